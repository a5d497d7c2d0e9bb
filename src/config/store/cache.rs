//! What answers retries before the store is asked: `[store] cache` and the memory of each process.

use std::time::Duration;

use super::{Kind, Node, Redis, Table, Wrong, redis};
use crate::config::units::show_size;

/// `cache` and every `cache_...`
pub(in crate::config) struct Cache {
    pub redis: Option<Redis>,
    pub max_age: Duration,
    pub max_bytes: u64,
    pub max_entries: usize,
}

/// The most bytes that a process remembers: more than any has.
pub(in crate::config) const MOST_BYTES: u64 = 1 << 40;

/// The most records that a process remembers.
pub(in crate::config) const MOST_ENTRIES: u64 = 100_000_000;

const USUAL_ENTRIES: usize = 65_536;

/// Reads them, given what sort of store they are for, where that is known.
pub(super) fn read(table: &Table<'_>, kind: Option<Kind>) -> Cache {
    let max_age = table.read("cache_max_age", Node::duration);
    if table.get("cache").is_some() {
        fits(table, kind, max_age);
    } else if table.get("cache_password_file").is_some() {
        let alone = Wrong::new("there is no cache");
        table.report("cache_password_file", alone.hint("remove it, or write cache = \"redis://HOST:PORT\""));
    }
    Cache {
        redis: cache(table),
        max_age: max_age.unwrap_or(Duration::from_secs(600)),
        max_bytes: table.read("cache_max_bytes", max_bytes).unwrap_or(32 << 20),
        max_entries: table.read("cache_max_entries", max_entries).unwrap_or(USUAL_ENTRIES),
    }
}

/// Reports what a cache does not go together with.
fn fits(table: &Table<'_>, kind: Option<Kind>, max_age: Option<Duration>) {
    if let Some(Kind::Own | Kind::Redis) = kind {
        let useless = Wrong::new("only a `postgres:` store has a cache in front of it");
        table.report("cache", useless.hint("remove it, or write the URL of a `postgres:` store"));
        return;
    }
    if max_age == Some(Duration::ZERO) {
        let forgetful = Wrong::new("nothing is remembered for \"0s\", so `cache` would be of no use");
        table.report("cache_max_age", forgetful.hint("write how long it may be, such as \"10m\", or remove `cache`"));
    }
}

fn cache(table: &Table<'_>) -> Option<Redis> {
    let url = table.read("cache", Node::filled)?;
    match redis::split(url) {
        Some((scheme, rest)) => redis::read(table, &redis::CACHE, scheme, rest),
        None => {
            // Nothing of it is shown: it may hold a password.
            let other = Wrong::new("the URL of a cache starts with `redis://` or `rediss://`");
            table.report("cache", other.hint(redis::CACHE.dialect.form));
            None
        }
    }
}

fn max_bytes(node: &Node<'_>) -> Result<u64, Wrong> {
    match node.size()? {
        size if size > MOST_BYTES => {
            let most = show_size(MOST_BYTES);
            Err(Wrong::new(format!("a process remembers at most {most}"))
                .hint("write \"32MiB\" unless you know better"))
        }
        size => Ok(size),
    }
}

fn max_entries(node: &Node<'_>) -> Result<usize, Wrong> {
    let number = Some(node.number()?).filter(|number| (1..=MOST_ENTRIES).contains(number));
    number.and_then(|number| usize::try_from(number).ok()).ok_or_else(|| {
        Wrong::new(format!("a process remembers 1 to {MOST_ENTRIES} records"))
            .hint(format!("write {USUAL_ENTRIES} unless you know better"))
    })
}
