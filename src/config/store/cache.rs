//! What answers retries before the store is asked: `[store] cache`.

use super::{Engine, Keys, Redis, Table, Wrong, redis};

/// Reads `cache`, given which store it is for, where that is known.
pub(super) fn read(table: &Table<'_>, keys: &Keys, engine: Option<Engine>) -> Option<Redis> {
    if table.get("cache").is_some() {
        check(table, keys, engine);
    } else if table.get("cache_password_file").is_some() {
        let alone = Wrong::new("there is no cache");
        table.report("cache_password_file", alone.hint("remove it, or write cache = \"redis://HOST:PORT\""));
    }
    let url = keys.cache.as_deref()?;
    match redis::split(url) {
        Some(parts) => redis::read(table, &redis::CACHE, keys.cache_password_file.as_deref(), parts),
        None => {
            // Nothing of it is shown: it may hold a password.
            let other = Wrong::new("the URL of a cache starts with `redis://` or `rediss://`");
            table.report("cache", other.hint(redis::CACHE.grammar.form));
            None
        }
    }
}

/// Reports keys that a cache does not go together with.
fn check(table: &Table<'_>, keys: &Keys, engine: Option<Engine>) {
    if let Some(Engine::InProcess | Engine::Redis) = engine {
        let useless = Wrong::new("only a `postgres:` store has a cache in front of it");
        table.report("cache", useless.hint("remove it, or write the URL of a `postgres:` store"));
    } else if keys.cache_max_age.is_zero() {
        let forgetful = Wrong::new("nothing is kept for \"0s\", so `cache` has no effect");
        table.report("cache_max_age", forgetful.hint("write how long it may be, such as \"10m\", or remove `cache`"));
    }
}
