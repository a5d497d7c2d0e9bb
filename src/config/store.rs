//! `[store]`

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use self::cache::Cache;
use self::location::{Dialect, Location};
use super::node::{Node, Table, Wrong};
use super::{SecretFile, keys, secrets};
use crate::gate::Secret;

pub(super) mod cache;
mod encryption;
mod location;
pub(super) mod postgres;
mod redis;

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
    /// `redis://...`
    Redis(Box<Redis>),
}

/// `[store]`
pub(super) struct Section {
    pub url: Store,
    pub cache: Cache,
    pub service: Arc<str>,
    pub id_secret: Option<SecretFile<Secret>>,
    pub settle_timeout: Duration,
}

/// What sort of store a URL names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// One that is this process's own.
    Own,
    /// PostgreSQL.
    Postgres,
    /// Redis.
    Redis,
}

/// The shortest secret, in bytes: that of the digest it keys (RFC 2104, section 3).
const SHORTEST_SECRET: usize = 32;

/// Reads `[store]`, and its secrets.
pub(super) fn read(root: &Table<'_>) -> Section {
    let table = root.table("store", &keys::STORE);
    let kind = kind(&table);
    refuse(&table, kind);
    Section {
        url: store(&table, kind).unwrap_or_else(|| Store::Sqlite { path: PathBuf::from("oncegate.db") }),
        cache: cache::read(&table, kind),
        service: table.read("service", name).map_or_else(|| "default".into(), Into::into),
        id_secret: table.read("id_secret_file", secret),
        settle_timeout: table.read("settle_timeout", Node::duration).unwrap_or(Duration::from_secs(5)),
    }
}

/// Reads the name of a service, a namespace or a route: it stands in records, metrics and logs.
pub(super) fn name<'a>(node: &Node<'a>) -> Result<&'a str, Wrong> {
    let text = node.filled()?;
    if text.len() > 128 || text.chars().any(char::is_control) || text.trim() != text {
        let wrong = Wrong::new("a name has at most 128 bytes, no control characters and no space at either end");
        return Err(wrong.hint("choose a short word, such as \"create-charge\""));
    }
    Ok(text)
}

/// The sort of store that is configured; nothing where its URL does not say it.
fn kind(table: &Table<'_>) -> Option<Kind> {
    let Some(url) = table.get("url") else { return Some(Kind::Own) };
    match url.text().ok()?.split_once(':')?.0 {
        "memory" | "sqlite" => Some(Kind::Own),
        "postgres" | "postgresql" => Some(Kind::Postgres),
        "redis" | "rediss" => Some(Kind::Redis),
        _ => None,
    }
}

/// Reports the keys that only another sort of store has.
fn refuse(table: &Table<'_>, kind: Option<Kind>) {
    // Of a URL that is wrong nobody knows what else it should have.
    let Some(kind) = kind else { return };
    for (key, kinds, named) in [
        ("password_file", &[Kind::Postgres, Kind::Redis][..], "`postgres:` or `redis:`"),
        ("connections", &[Kind::Postgres], "`postgres:`"),
    ] {
        if table.get(key).is_some() && !kinds.contains(&kind) {
            let wrong = Wrong::new(format!("only a {named} store has this"));
            table.report(key, wrong.hint(format!("remove it, or write the URL of a {named} store")));
        }
    }
}

/// The store; nothing where the URL is absent or wrong, which is reported.
fn store(table: &Table<'_>, kind: Option<Kind>) -> Option<Store> {
    let node = table.get("url")?;
    let parts = node.text().ok().and_then(|text| text.split_once(':'));
    match (kind, parts) {
        (Some(Kind::Postgres), Some((scheme, rest))) => {
            postgres::read(table, &node, scheme, rest).map(|store| Store::Postgres(Box::new(store)))
        }
        (Some(Kind::Redis), Some((scheme, rest))) => {
            let store = redis::read(table, &redis::STORE, scheme, rest)?;
            table.advise("url", OUTSIDE_THE_PROMISE.to_owned());
            Some(Store::Redis(Box::new(store)))
        }
        _ => table.read("url", own),
    }
}

const OUTSIDE_THE_PROMISE: &str = "a `redis:` store is outside the promise: a crash or a failover of Redis can lose claims \
                                   that it acknowledged, and a request may then run twice; see the README";

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
fn password(node: &Node<'_>) -> Result<SecretFile<Vec<u8>>, Wrong> {
    let path = PathBuf::from(node.filled()?);
    let content = secrets::read(&path)?;
    match content.is_empty() {
        true => Err(Wrong::new(format!("{} is empty", path.display())).hint("put the password into it")),
        false => Ok((path, content)),
    }
}

/// Reports a file of a password that stands in the URL already.
fn only_one_password(table: &Table<'_>, dialect: &Dialect, location: &Location) {
    if location.password.is_some() && table.get(dialect.password_file).is_some() {
        let twice = Wrong::new("the password stands in the URL as well");
        table.report(dialect.password_file, twice.hint("remove one of them"));
    }
}

fn secret(node: &Node<'_>) -> Result<SecretFile<Secret>, Wrong> {
    let path = PathBuf::from(node.filled()?);
    let content = secrets::read(&path)?;
    if content.len() < SHORTEST_SECRET {
        let wrong = Wrong::new(format!(
            "{} holds {} bytes, and a secret needs at least {SHORTEST_SECRET}",
            path.display(),
            content.len()
        ));
        return Err(wrong.hint("fill it with `openssl rand -hex 32`, and keep it as long as the records live"));
    }
    Ok((path, Secret(content.into())))
}

#[cfg(test)]
mod tests;
