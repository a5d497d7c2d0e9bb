//! `[store]`

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use self::location::{Location, UrlGrammar};
use self::sealing::KeyFile;
use super::declare::{Keys as _, Shown::Example, keys};
use super::kinds::{Kind, Toml, file, number, one_or_several, size, text, time, time_of, unique};
use super::node::{Node, Table, Wrong};
use super::secrets;
use crate::gate::Secret;
use crate::store::postgres::Settings;
use crate::store::sealed::SealingKey;

mod cache;
mod encryption;
pub(super) mod location;
mod places;
mod postgres;
mod redis;
mod sealing;

pub use places::StorePlaces;
pub use postgres::Postgres;
pub use redis::Redis;

/// `[store] url`
#[derive(Clone, Debug)]
pub enum Store {
    /// `memory:`
    Memory,
    /// `sqlite:PATH`
    Sqlite {
        /// The file, as it was written: relative to where the process runs.
        path: PathBuf,
    },
    /// `postgres://...`
    Postgres(Box<Postgres>),
    /// A list of several `postgres://...`: one store.
    Databases(Vec<Postgres>),
    /// `redis://...`
    Redis(Box<Redis>),
}

keys! {
    /// Where records are kept.
    pub(super) struct Keys "[store]" {
        /// "sqlite:PATH" is one file beside one process; "postgres://USER@HOST:PORT/DATABASE" serves any number of gates (docs/operate/postgresql.md
        /// has its parameters, such as ?sslmode=verify-full; `oncegate migrate` prepares it);
        /// "redis://USER:PASSWORD@HOST:PORT/DATABASE" serves any number of gates too, if it is acceptable that a crash or a
        /// failover of Redis can lose records ("rediss://" is encrypted; ?sentinel=NAME is for Sentinels, ?cluster=true for a
        /// cluster: see docs/operate/redis.md); "memory:" forgets everything when the process ends, for tests and trials. A relative
        /// path counts from where oncegate is started. A list of PostgreSQL databases, as in ["postgres://db-a/gate",
        /// "postgres://db-b/gate"], is one store spread over them; every gate has the same list in the same order: see
        /// docs/operate/scaling-out.md.
        url: Vec<String> = vec!["sqlite:oncegate.db".to_owned()] => one_or_several(ONE_URL, || url(STORE_URL));
        /// A file with the password of a PostgreSQL or Redis store. The password may stand in the URL instead, or, for
        /// PostgreSQL, in the variable PGPASSWORD, which applies where neither of the others is set.
        password_file: Option<PathBuf> = None => file().optional(), Example("\"/run/secrets/oncegate-database-password\"");
        /// The most connections that this process opens to a PostgreSQL store, from 4 to 1000. If omitted, 8.
        connections: Option<usize> = None
            => number(Settings::FEWEST_CONNECTIONS as u64..=1000).optional(), Example("8");
        /// Part of every record's identity: set it if several services share a store.
        service: Arc<str> = "default".into() => name();
        /// A file with a secret of at least 32 bytes. With it, a copy of the store does not help to guess keys, requests or
        /// callers' passwords. A new secret forgets every key, unless the former one moves to `other_id_secret_files`.
        id_secret_file: Option<PathBuf> = None => file().optional(), Example("\"/run/secrets/oncegate-id-secret\"");
        /// More secrets that count while you replace one secret by another, each in a file: a request also finds the
        /// records that were made with these, and new records are made with `id_secret_file`. "none" stands for no secret. At
        /// most 3. Each costs requests a read of the store, and new keys two. See docs/operate/id-secret.md.
        other_id_secret_files: Vec<PathBuf> = Vec::new()
            => unique(file()).map(few_secrets, Clone::clone), Example("[\"/run/secrets/oncegate-id-secret-1\"]");
        /// The keys that records are encrypted with, in the store and in the cache, as in
        /// [{ id = "2026-11", file = "/run/secrets/oncegate-key-1" }]. The cipher is AES-256-GCM, bound to record and attempt. The first
        /// encrypts, and all of them decrypt. A request whose record has another key gets 503 `store-unavailable` and does not
        /// run. A reload takes other keys; only a start begins or ends encryption. If omitted, everyone who has a copy of the
        /// store can read answers and the heads of requests. See docs/operate/encryption.md.
        encryption_keys: Vec<KeyFile> = Vec::new()
            => sealing::key_files(), Example("[{ id = \"2026-11\", file = \"/run/secrets/oncegate-key-1\" }]");
        /// The longest time for which your rules allow records to be kept. If a route has a longer `ttl` or `unknown_ttl`, `oncegate check`
        /// and the start say so; the route keeps what it has. If omitted, there is no limit.
        max_ttl: Option<Duration> = None => time().optional(), Example("\"7d\"");
        /// A Redis that answers retries before a PostgreSQL store is asked, so that a gate need not have seen the first
        /// answer itself. The URL has the form of a Redis store's. The cache is never believed over the store, and can be
        /// lost at any time. Its content is authenticated, with `id_secret_file` too if that is set.
        cache: Option<String> = None => url(CACHE_URL).optional(), Example("\"redis://cache.internal:6379\"");
        /// A file with the password of the cache. The password may stand in the URL instead.
        cache_password_file: Option<PathBuf> = None
            => file().optional(), Example("\"/run/secrets/oncegate-cache-password\"");
        /// How long completed records stay in memory, and in the cache, and are replayed from there. A record comes
        /// into memory when this gate first replays it. If another gate that shares the store purges a record, this
        /// gate usually learns of it at once, and after this time at the latest. "0s" keeps nothing that is shared.
        cache_max_age: Duration = Duration::from_secs(600) => time();
        /// How many bytes of completed records a process keeps in its own memory, with any store. At most "1024GiB"; "0B"
        /// keeps none.
        cache_max_bytes: u64 = 32 << 20 => size(0..=1 << 40);
        /// How many completed records a process keeps in its own memory, from 1 to 100000000.
        cache_max_entries: usize = 65_536 => number(1..=100_000_000);
        /// How long a client waits for the store to say what it knows of the key, and to take the claim or the request. Then it gets 503,
        /// or the request is forwarded as `store_failure` says. So long it waits again for a store that became unreachable after the
        /// attempt. Then it gets the upstream's answer, marked `unrecorded`. At least "10ms".
        settle_timeout: Duration = Duration::from_secs(5) => time_of(Duration::from_millis(10)..=Duration::MAX);
    }
}

/// What `[store]` comes to.
pub(super) struct Section {
    /// Where its keys stand.
    pub(super) places: StorePlaces,
    /// The store that `url` names.
    pub store: Store,
    /// `cache`
    pub cache: Option<Redis>,
    /// The content of `id_secret_file`.
    pub id_secret: Option<Secret>,
    /// The contents of `other_id_secret_files`.
    pub other_id_secrets: Vec<Option<Secret>>,
    /// `encryption_keys`
    pub sealing: Vec<SealingKey>,
    /// The keys, without passwords.
    pub keys: Keys,
}

const ONE_URL: &str = "write a URL, or a list of PostgreSQL databases";

const STORE_URL: &str = concat!(
    r"^(memory:|sqlite:(?!//|:memory:$)[^?]*[^?\s][^?]*|",
    r"postgres(ql)?://([^\s#@/?]*@)?[^\s#@/?]*(/[^\s#@/?]*)?(\?[^\s#@]*)?|",
    r"rediss?://([^\s#@/?]*@)?[^\s#@/?]+(/[^\s#@/?]*)?(\?[^\s#@]*)?)$",
);

const CACHE_URL: &str = r"^rediss?://([^\s#@/?]*@)?[^\s#@/?]+(/[^\s#@/?]*)?(\?[^\s#@]*)?$";

/// The URL of a store or a cache, of this pattern. [`read`] takes the password out of it before it is printed.
fn url(pattern: &'static str) -> Kind<String> {
    let shape = move || json!({ "type": "string", "pattern": pattern });
    let print = |url: &String| {
        let mut printed = Toml::from(url);
        let suffix = if url.contains("://") { " # a password would not be shown" } else { "" };
        printed.decor_mut().set_suffix(suffix);
        printed
    };
    Kind::new(shape, |node| node.filled().map(str::to_owned), print)
}

/// The pattern of [`name`].
pub(super) const NAME: &str = r"[^\s\x00-\x1f\x7f]([^\x00-\x1f\x7f]{0,126}[^\s\x00-\x1f\x7f])?$";

/// The name of a service, a namespace or a route: it stands in records, metrics and logs.
pub(super) fn name() -> Kind<Arc<str>> {
    text(format!("^{NAME}"), parse_name)
}

/// What sort of store a URL names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    /// One that is this process's own: memory, or SQLite.
    InProcess,
    /// PostgreSQL.
    Postgres,
    /// Redis.
    Redis,
}

/// The shortest secret, in bytes: that of the digest it keys (RFC 2104, section 3).
const SHORTEST_SECRET: usize = 32;

/// Reads `[store]`, and its secrets.
pub(super) fn read(root: &Table<'_>) -> Section {
    let table = root.table("store", Keys::SECTION);
    let mut keys = Keys::read(&table, Keys::default());
    let kind = kind(&table);
    refuse(&table, kind);
    let store = store(&table, &keys, kind).unwrap_or_else(|| Store::Sqlite { path: PathBuf::from("oncegate.db") });
    let cache = cache::read(&table, &keys, kind);
    // The URLs as they were written may have passwords.
    (keys.url, keys.connections) = match &store {
        Store::Memory => (vec!["memory:".to_owned()], None),
        Store::Sqlite { path } => (vec![format!("sqlite:{}", path.display())], None),
        Store::Postgres(store) => (vec![store.url.clone()], Some(store.settings.connections)),
        Store::Databases(databases) => {
            let connections = databases.first().map(|database| database.settings.connections);
            (databases.iter().map(|database| database.url.clone()).collect(), connections)
        }
        Store::Redis(store) => (vec![store.url.clone()], None),
    };
    keys.cache = cache.as_ref().map(|cache| cache.url.clone());
    root.print("store", keys.print_table());
    let id_secret = table.read_file("id_secret_file", keys.id_secret_file.as_deref(), secret);
    let other_id_secrets = other_secrets(&table, &keys.other_id_secret_files, id_secret.as_ref());
    let sealing = sealing::read(&table, &keys.encryption_keys);
    Section { store, cache, id_secret, other_id_secrets, sealing, places: StorePlaces::of(&table), keys }
}

/// Reads the name of a service, a namespace or a route.
pub(super) fn parse_name(node: &Node<'_>) -> Result<Arc<str>, Wrong> {
    let text = node.filled()?;
    if text.len() > 128 || text.chars().any(char::is_control) || text.trim() != text {
        let wrong = Wrong::new("a name has at most 128 bytes, no control characters and no space at either end");
        return Err(wrong.hint("choose a short word, such as \"create-charge\""));
    }
    Ok(text.into())
}

/// The sort of store that is configured; nothing where its URL does not say it.
fn kind(table: &Table<'_>) -> Option<Engine> {
    let Some(url) = table.get("url") else { return Some(Engine::InProcess) };
    let engine = |url: &Node<'_>| match url.text().ok()?.split_once(':')?.0 {
        "memory" | "sqlite" => Some(Engine::InProcess),
        "postgres" | "postgresql" => Some(Engine::Postgres),
        "redis" | "rediss" => Some(Engine::Redis),
        _ => None,
    };
    match url.items() {
        Some(urls) => {
            let first = engine(urls.first()?)?;
            urls.iter().all(|url| engine(url) == Some(first)).then_some(first)
        }
        None => engine(&url),
    }
}

/// Reports the keys that only another sort of store has.
fn refuse(table: &Table<'_>, kind: Option<Engine>) {
    // A wrong URL does not say which keys belong to it.
    let Some(kind) = kind else { return };
    for (key, kinds, named) in [
        ("password_file", &[Engine::Postgres, Engine::Redis][..], "`postgres:` or `redis:`"),
        ("connections", &[Engine::Postgres], "`postgres:`"),
    ] {
        if table.get(key).is_some() && !kinds.contains(&kind) {
            let wrong = Wrong::new(format!("only a {named} store has this"));
            table.report(key, wrong.hint(format!("remove it, or write the URL of a {named} store")));
        }
    }
}

/// The store; nothing where the URL is absent or wrong, which is reported.
fn store(table: &Table<'_>, keys: &Keys, kind: Option<Engine>) -> Option<Store> {
    let node = table.get("url")?;
    let node = match node.items() {
        Some(urls) if urls.len() > 1 => return databases(table, &node, &urls, keys, kind),
        Some(urls) => urls.into_iter().next()?,
        None => node,
    };
    let parts = node.text().ok().and_then(|text| text.split_once(':'));
    match (kind, parts) {
        (Some(Engine::Postgres), Some((scheme, rest))) => {
            let from_file = postgres::password_of_file(table, keys);
            postgres::read(table, &node, keys, from_file, (scheme, rest)).map(|store| Store::Postgres(Box::new(store)))
        }
        (Some(Engine::Redis), Some((scheme, rest))) => {
            let store = redis::read(table, &redis::STORE, keys.password_file.as_deref(), (scheme, rest))?;
            table.advise("url", OUTSIDE_THE_PROMISE.to_owned());
            Some(Store::Redis(Box::new(store)))
        }
        _ => node.accept(own(&node)),
    }
}

/// The most databases of a list: each numbers what it keeps besides records in six bits.
const MOST_DATABASES: usize = 64;

/// The databases of a list; nothing where something is wrong with it, which is reported.
fn databases(
    table: &Table<'_>,
    list: &Node<'_>,
    urls: &[Node<'_>],
    keys: &Keys,
    kind: Option<Engine>,
) -> Option<Store> {
    if kind != Some(Engine::Postgres) {
        let wrong = Wrong::new("a store of several URLs is of PostgreSQL databases only");
        list.report(
            wrong.hint("write [\"postgres://USER@HOST/DATABASE\", \"postgres://USER@HOST/DATABASE\"], or one URL"),
        );
        return None;
    }
    if urls.len() > MOST_DATABASES {
        let wrong = Wrong::new(format!("must not have more than {MOST_DATABASES} databases"));
        list.report(wrong.hint("spread the store over fewer and larger ones"));
        return None;
    }
    let from_file = postgres::password_of_file(table, keys);
    let mut databases: Vec<Postgres> = Vec::new();
    for url in urls {
        let parts = url.text().ok().and_then(|text| text.split_once(':'));
        let Some(database) = parts.and_then(|parts| postgres::read(table, url, keys, from_file.clone(), parts)) else {
            continue;
        };
        if databases.iter().any(|other| other.servers() == database.servers()) {
            let wrong = Wrong::new(format!("the database {} stands twice", database.servers()));
            url.report(
                wrong.hint("name each database once; parts of a store are told apart by host, port and database"),
            );
            continue;
        }
        databases.push(database);
    }
    (databases.len() == urls.len()).then_some(Store::Databases(databases))
}

const OUTSIDE_THE_PROMISE: &str = "a `redis:` store is outside the promise: a crash or a failover of Redis can lose claims \
                                   that it acknowledged, and a request may then run twice; see docs/operate/stores.md";

/// Reads the URL of a store that is this process's own.
fn own(node: &Node<'_>) -> Result<Store, Wrong> {
    let text = node.filled()?;
    let choice = "write \"sqlite:PATH\", \"postgres://USER@HOST/DATABASE\", \"redis://HOST\" or \"memory:\"";
    // Nothing of the URL but its scheme is shown: it may hold a password.
    let Some((scheme, rest)) = text.split_once(':') else {
        return Err(Wrong::new("a store's URL starts with its kind").hint(choice));
    };
    match scheme {
        "memory" if rest.is_empty() => Ok(Store::Memory),
        "memory" => Err(Wrong::new("nothing can follow `memory:`").hint("write \"memory:\"")),
        "sqlite" => sqlite(rest),
        _ => Err(Wrong::new("this is not a kind of store").hint(choice)),
    }
}

fn sqlite(path: &str) -> Result<Store, Wrong> {
    if path.trim().is_empty() {
        return Err(Wrong::new("the path is missing").hint("write \"sqlite:oncegate.db\""));
    }
    if path == ":memory:" {
        return Err(Wrong::new("a store in memory is not a file").hint("write \"memory:\""));
    }
    if path.starts_with("//") {
        let wrong = Wrong::new("two slashes would start a host name, and a file has none");
        return Err(wrong.hint("write \"sqlite:/absolute/path\" or \"sqlite:relative/path\""));
    }
    if path.contains('?') {
        return Err(Wrong::new("a path has no `?`: options cannot be given here").hint("write \"sqlite:PATH\""));
    }
    Ok(Store::Sqlite { path: PathBuf::from(path) })
}

/// Reads the file of a password.
pub(super) fn password(path: &Path) -> Result<Vec<u8>, Wrong> {
    match secrets::read(path)? {
        content if content.is_empty() => {
            Err(Wrong::new(format!("{} is empty", path.display())).hint("put the password into it"))
        }
        content => Ok(content),
    }
}

/// A password of a server that takes no others than text.
pub(super) fn password_text(password: Vec<u8>, what: &str) -> Result<String, Wrong> {
    let not_text = || Wrong::new(format!("{what} is not text in UTF-8")).hint("choose another password");
    String::from_utf8(password).map_err(|_| not_text())
}

/// Reports a file of a password that stands in the URL already.
pub(super) fn only_one_password(table: &Table<'_>, grammar: &UrlGrammar, location: &Location) {
    if location.password.is_some() && table.get(grammar.password_file).is_some() {
        let twice = Wrong::new("the password stands in the URL as well");
        table.report(grammar.password_file, twice.hint("remove one of them"));
    }
}

/// The most of `other_id_secret_files`.
const MOST_OTHER_SECRETS: usize = 3;

/// What stands for no secret among `other_id_secret_files`.
const NO_SECRET: &str = "none";

fn few_secrets(files: Vec<PathBuf>) -> Result<Vec<PathBuf>, Wrong> {
    if files.len() > MOST_OTHER_SECRETS {
        let wrong = Wrong::new(format!("must not have more than {MOST_OTHER_SECRETS}"));
        return Err(wrong.hint("remove the secrets whose records have expired"));
    }
    Ok(files)
}

/// Reads `other_id_secret_files`.
fn other_secrets(table: &Table<'_>, files: &[PathBuf], first: Option<&Secret>) -> Vec<Option<Secret>> {
    let mut known = vec![first.cloned()];
    for file in files {
        let read = |path: &Path| {
            let secret = if path == Path::new(NO_SECRET) { None } else { Some(secret(path)?) };
            if known.contains(&secret) {
                let what = match secret {
                    Some(_) => format!("{} holds a secret that counts already", path.display()),
                    None => "`none` counts already: there is no id_secret_file".to_owned(),
                };
                return Err(Wrong::new(what).hint("list the other secrets here, and only those"));
            }
            Ok(secret)
        };
        if let Some(secret) = table.read_file("other_id_secret_files", Some(file), read) {
            known.push(secret);
        }
    }
    known.split_off(1)
}

fn secret(path: &Path) -> Result<Secret, Wrong> {
    let content = secrets::read(path)?;
    if content.len() < SHORTEST_SECRET {
        let wrong = Wrong::new(format!(
            "{} holds {} bytes, and a secret needs at least {SHORTEST_SECRET}",
            path.display(),
            content.len()
        ));
        return Err(wrong.hint("fill it with `openssl rand -hex 32`, and keep it as long as the records live"));
    }
    Ok(Secret(content.into()))
}

#[cfg(test)]
mod tests;
