//! Origins, and the rules that identities are made by.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use redis::Cmd;
use tokio::time::{Instant, sleep};

use super::listing::{self, Walk};
use super::record::Unreadable;
use super::{Redis, confused, error, keys};
use crate::store::{Error, ErrorKind, Identity, IdentityChange, Origin, rules};

/// How long whoever adopts has for it: where rules changed, every record is looked at.
const PATIENCE: Duration = Duration::from_secs(600);

/// Between two looks whether another has done.
const PAUSE: Duration = Duration::from_millis(20);

/// Between a service and its namespace, which have no control characters.
const BETWEEN: char = '\n';

pub(super) async fn adopt(
    store: &Redis,
    origins: &[Origin],
    rules: &[Identity],
    accept_change: bool,
) -> Result<Vec<IdentityChange>, Error> {
    let mut token = [0; 16];
    getrandom::fill(&mut token).map_err(|_| Error::determinate(ErrorKind::Other, "no randomness to be had"))?;
    lock(store, &token).await?;
    let adopted = adopt_alone(store, origins, rules, accept_change).await;
    // Where it fails it ends by itself.
    let mut release = store.caller.scripts.release.call(1);
    release.arg(keys::ADOPTING).arg(&token[..]);
    drop(store.call(release).await);
    adopted
}

/// One gate at a time.
async fn lock(store: &Redis, token: &[u8; 16]) -> Result<(), Error> {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        let mut command = redis::cmd("SET");
        command.arg(keys::ADOPTING).arg(&token[..]).arg("NX").arg("PX").arg(PATIENCE.as_millis() as u64);
        if ask::<Option<String>>(store, command).await?.is_some() {
            return Ok(());
        }
        sleep(PAUSE).await;
    }
    Err(Error::determinate(ErrorKind::Timeout, "another gate does not end to adopt its rules"))
}

async fn adopt_alone(
    store: &Redis,
    origins: &[Origin],
    rules: &[Identity],
    accept_change: bool,
) -> Result<Vec<IdentityChange>, Error> {
    let services = origins.iter().map(|origin| &origin.service).chain(rules.iter().map(|rule| &rule.service));
    let services: BTreeSet<&Arc<str>> = services.collect();
    let stale = on_file(store, &services, rules).await?;
    if !accept_change && !stale.is_empty() {
        let changes = live(store, &stale).await?;
        if !changes.is_empty() {
            return Ok(changes);
        }
    }
    let mut writes = Vec::new();
    for origin in origins {
        let mut command = redis::cmd("HSET");
        command.arg(keys::ORIGINS).arg(&listing::origin_key(origin.id())[..]).arg(listing::write_origin(origin));
        writes.push(command);
    }
    for (service, namespace) in &stale {
        writes.push(redis::cmd("HDEL").arg(keys::IDENTITIES).arg(name(service, namespace)).to_owned());
    }
    for rule in rules {
        let mut command = redis::cmd("HSET");
        command.arg(keys::IDENTITIES).arg(name(&rule.service, &rule.namespace)).arg(&rule.digest[..]);
        writes.push(command);
    }
    for command in writes {
        store.call(command).await.map_err(|error| error::of_write(&error))?;
    }
    Ok(Vec::new())
}

/// What starts of these services have adopted that is not among `rules`, in order.
async fn on_file(
    store: &Redis,
    services: &BTreeSet<&Arc<str>>,
    rules: &[Identity],
) -> Result<BTreeSet<(Arc<str>, Arc<str>)>, Error> {
    let found: Vec<(String, Vec<u8>)> = ask(store, redis::cmd("HGETALL").arg(keys::IDENTITIES).to_owned()).await?;
    let identities = found.into_iter().filter_map(|(name, digest)| {
        let (service, namespace) = name.split_once(BETWEEN)?;
        let is_known = |rule: &Identity| {
            &*rule.service == service && &*rule.namespace == namespace && rule.digest[..] == digest[..]
        };
        let is_stale = services.iter().any(|of| &***of == service) && !rules.iter().any(is_known);
        is_stale.then(|| (service.into(), namespace.into()))
    });
    Ok(identities.collect())
}

/// Those of them that have live records.
async fn live(store: &Redis, stale: &BTreeSet<(Arc<str>, Arc<str>)>) -> Result<Vec<IdentityChange>, Error> {
    let origins = listing::origins(store).await?;
    let mut counts: Vec<u64> = vec![0; stale.len()];
    let mut walk = Walk::after(store, None);
    while let Some((_, kept, now)) = walk.next().await? {
        let Some(origin) = origins.get(&kept.origin.0) else { continue };
        let place =
            stale.iter().position(|(service, namespace)| *service == origin.service && *namespace == origin.namespace);
        if let Some(place) = place
            && rules::is_live(kept.record.state, kept.record.until, now)
        {
            counts[place] += 1;
        }
    }
    let changes = stale.iter().zip(counts).filter(|(_, live)| *live > 0);
    Ok(changes
        .map(|((service, namespace), live)| IdentityChange {
            service: Arc::clone(service),
            namespace: Arc::clone(namespace),
            live,
        })
        .collect())
}

fn name(service: &str, namespace: &str) -> String {
    format!("{service}{BETWEEN}{namespace}")
}

async fn ask<T: redis::FromRedisValue>(store: &Redis, command: Cmd) -> Result<T, Error> {
    let said = store.call(command).await.map_err(|error| error::of_question(&error))?;
    T::from_redis_value(said).map_err(|_| confused(Unreadable))
}
