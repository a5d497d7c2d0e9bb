//! Origins, and the rules that identities are made by.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use redis::Cmd;
use tokio::time::{Instant, sleep};

use super::listing::{self, Walk};
use super::record::Unreadable;
use super::{Redis, confused, error, keys, number};
use crate::store::{Error, ErrorKind, Identity, IdentityChange, Origin, rules};

/// How long another is waited for: where rules changed, it looks at every record.
const PATIENCE: Duration = Duration::from_secs(600);

/// How long the lock outlives whoever holds it.
pub(super) const HOLD: Duration = Duration::from_secs(30);

/// How long another is waited for without a word, and how often that is told.
const WORDLESS: Duration = Duration::from_secs(1);
const REMINDER: Duration = Duration::from_secs(10);

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
    // One at a time in this process too: the token is the same.
    let token = store.token.lock().await;
    let lock = Lock { store, token: *token, hold: HOLD };
    lock.take().await?;
    let adopted = lock.keep(adopt_alone(&lock, origins, rules, accept_change)).await;
    // Where this fails it ends by itself.
    let mut release = store.caller.scripts.release.call(1);
    release.arg(keys::ADOPTING).arg(&token[..]);
    drop(store.call(release).await);
    adopted
}

/// The lock of whoever adopts. Its token is that of the process: one that was not told that it has the lock finds that it
/// does.
pub(super) struct Lock<'a> {
    pub(super) store: &'a Redis,
    pub(super) token: [u8; 16],
    pub(super) hold: Duration,
}

impl Lock<'_> {
    /// Waits for it.
    pub(super) async fn take(&self) -> Result<(), Error> {
        let (began, mut told) = (Instant::now(), None);
        while !self.extend(false).await? {
            if began.elapsed() >= PATIENCE {
                return Err(Error::determinate(ErrorKind::Timeout, "another gate does not end to adopt its rules"));
            }
            if began.elapsed() >= WORDLESS && told.is_none_or(|told: Instant| told.elapsed() >= REMINDER) {
                told = Some(Instant::now());
                tracing::info!("waiting for another gate, which adopts its rules");
            }
            sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Holds it while something is done, which is given up where it cannot be held.
    pub(super) async fn keep<T>(&self, doing: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let mut until = Instant::now() + self.hold;
        let keeping = async {
            loop {
                sleep(self.hold / 3).await;
                let asked = Instant::now();
                match self.extend(true).await {
                    Ok(true) => until = asked + self.hold,
                    Ok(false) => return lost(),
                    Err(error) if Instant::now() + self.hold / 3 >= until => return error,
                    Err(_) => {}
                }
            }
        };
        tokio::select! {
            done = doing => done,
            failure = keeping => Err(failure),
        }
    }

    /// Whether it is held from now on.
    async fn extend(&self, must_be_held: bool) -> Result<bool, Error> {
        let mut call = self.store.caller.scripts.lock.call(1);
        call.arg(keys::ADOPTING).arg(&self.token[..]).arg(self.hold.as_millis() as u64).arg(u8::from(must_be_held));
        Ok(number(&self.store.write(call).await?)? == 1)
    }
}

fn lost() -> Error {
    Error::indeterminate(ErrorKind::Timeout, "another gate began to adopt its rules before this one had done")
}

pub(super) async fn adopt_alone(
    lock: &Lock<'_>,
    origins: &[Origin],
    rules: &[Identity],
    accept_change: bool,
) -> Result<Vec<IdentityChange>, Error> {
    let store = lock.store;
    let services = origins.iter().map(|origin| &origin.service).chain(rules.iter().map(|rule| &rule.service));
    let services: BTreeSet<&Arc<str>> = services.collect();
    let stale = on_file(store, &services, rules).await?;
    if !accept_change && !stale.is_empty() {
        let changes = live(store, &stale).await?;
        if !changes.is_empty() {
            return Ok(changes);
        }
    }
    for origin in origins {
        let mut command = redis::cmd("HSET");
        command.arg(keys::ORIGINS).arg(&listing::origin_key(origin.id())[..]).arg(listing::write_origin(origin));
        store.write(command).await?;
    }
    let mut call = store.caller.scripts.adopt.call(2);
    call.arg(keys::ADOPTING).arg(keys::IDENTITIES).arg(&lock.token[..]).arg(rules.len());
    for rule in rules {
        call.arg(name(&rule.service, &rule.namespace)).arg(&rule.digest[..]);
    }
    let is_ruled = |service: &str, namespace: &str| {
        rules.iter().any(|rule| &*rule.service == service && &*rule.namespace == namespace)
    };
    for (service, namespace) in stale.iter().filter(|(service, namespace)| !is_ruled(service, namespace)) {
        call.arg(name(service, namespace));
    }
    if number(&store.write(call).await?)? == 1 { Ok(Vec::new()) } else { Err(lost()) }
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
