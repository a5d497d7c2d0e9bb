//! `[store]`

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::listeners::{FILE_HINT, secret_file};
use super::node::{Node, Table, Wrong};
use super::{SecretFile, keys};
use crate::gate::Secret;

mod encryption;
mod location;
pub(super) mod postgres;

pub use postgres::Postgres;

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
}

/// `[store]`
pub(super) struct Section {
    pub url: Store,
    pub service: Arc<str>,
    pub id_secret: Option<SecretFile<Secret>>,
    pub cache_max_age: Duration,
    pub settle_timeout: Duration,
}

/// The shortest secret, in bytes: that of the digest it keys (RFC 2104, section 3).
const SHORTEST_SECRET: usize = 32;

/// Reads `[store]`, and its secret.
pub(super) fn read(root: &Table<'_>) -> Section {
    let table = root.table("store", &keys::STORE);
    Section {
        url: store(&table).unwrap_or_else(|| Store::Sqlite { path: PathBuf::from("oncegate.db") }),
        service: table.read("service", name).map_or_else(|| "default".into(), Into::into),
        id_secret: table.read("id_secret_file", secret),
        cache_max_age: table.read("cache_max_age", Node::duration).unwrap_or(Duration::from_secs(600)),
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

/// The store; nothing where the URL is absent or wrong, which is reported.
fn store(table: &Table<'_>) -> Option<Store> {
    let url = table.get("url");
    let parts = url.as_ref().and_then(|node| Some((node, node.text().ok()?.split_once(':')?)));
    if let Some((node, (scheme @ ("postgres" | "postgresql"), rest))) = parts {
        return postgres::read(table, node, scheme, rest).map(|store| Store::Postgres(Box::new(store)));
    }
    let store = table.read("url", own);
    // Of a URL that is wrong nobody knows what else it should have.
    if url.is_none() || store.is_some() {
        postgres::refuse(table);
    }
    store
}

/// Reads the URL of a store that is this process's own.
fn own(node: &Node<'_>) -> Result<Store, Wrong> {
    let text = node.filled()?;
    let choice = "write \"sqlite:PATH\", \"postgres://USER@HOST/DATABASE\" or \"memory:\"";
    // Nothing of the URL but its scheme is shown: it may hold a password.
    let Some((scheme, rest)) = text.split_once(':') else {
        return Err(Wrong::new("a store's URL starts with its kind").hint(choice));
    };
    match scheme {
        "memory" if rest.is_empty() => Ok(Store::Memory),
        "memory" => Err(Wrong::new("nothing can follow `memory:`").hint("write \"memory:\"")),
        "sqlite" => sqlite(rest),
        "redis" | "rediss" => Err(Wrong::later("`redis:` stores").hint(choice)),
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

fn secret(node: &Node<'_>) -> Result<SecretFile<Secret>, Wrong> {
    let (path, content) = secret_file(node)?;
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
