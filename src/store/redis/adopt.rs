//! Origins, and the rules that identities are made by.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use super::listing::{self, Scan};
use super::record::{self, Unreadable};
use super::{Redis, error, keys, number, unexpected_reply};
use crate::idempotency::record::{RecordId, Timestamp, write_hex};
use crate::store::adoption::{self, NamespacePeriod};
use crate::store::{
    Error, ErrorKind, IdentityChange, LiveKeys, NamespaceRuleSet, NamespaceRules, Origin, RulesPeriod, lifecycle,
};

/// How long another is waited for: where rules changed, it looks at every record.
const ADOPT_TIMEOUT: Duration = Duration::from_secs(600);

/// How long the lock lasts if its holder dies.
pub(super) const LOCK_TTL: Duration = Duration::from_secs(30);

/// How long to wait for another process before logging it, and how often to log it again.
const QUIET: Duration = Duration::from_secs(1);
const REMINDER: Duration = Duration::from_secs(10);

/// Between two looks whether another has done.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Between a service and its namespace, which have no control characters.
const SEPARATOR: char = '\n';

pub(super) async fn adopt(
    store: &Redis,
    origins: &[Origin],
    rules: &[NamespaceRuleSet],
    accept_change: bool,
) -> Result<Vec<IdentityChange>, Error> {
    // One at a time in this process too: the token is the same.
    let token = store.token.lock().await;
    let lock = Lock { store, token: *token, hold: LOCK_TTL };
    lock.take().await?;
    let adopted = lock.keep(adopt_alone(&lock, origins, rules, accept_change)).await;
    // Where this fails it ends by itself.
    let mut release = store.client.scripts.release.call(1);
    release.arg(keys::ADOPTING).arg(&token[..]);
    drop(store.call(release).await);
    adopted
}

/// The adoption lock. Its token is the process's: a process that lost the acknowledgement of taking the lock finds
/// that it holds it.
pub(super) struct Lock<'a> {
    pub(super) store: &'a Redis,
    pub(super) token: [u8; 16],
    pub(super) hold: Duration,
}

impl Lock<'_> {
    /// Waits for it.
    pub(super) async fn take(&self) -> Result<(), Error> {
        let (began, mut last_logged) = (Instant::now(), None);
        while !self.extend(false).await? {
            if began.elapsed() >= ADOPT_TIMEOUT {
                return Err(Error::determinate(
                    ErrorKind::Timeout,
                    "timed out waiting for another gate to adopt its rules",
                ));
            }
            if began.elapsed() >= QUIET
                && last_logged.is_none_or(|last_logged: Instant| last_logged.elapsed() >= REMINDER)
            {
                last_logged = Some(Instant::now());
                tracing::info!("waiting for another gate to adopt its rules");
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Extends the lock while a future runs. The future is dropped if the lock is lost.
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
        let mut call = self.store.client.scripts.lock.call(1);
        call.arg(keys::ADOPTING).arg(&self.token[..]).arg(self.hold.as_millis() as u64).arg(u8::from(must_be_held));
        Ok(number(&self.store.write(call).await?)? == 1)
    }
}

fn lost() -> Error {
    Error::indeterminate(ErrorKind::Timeout, "another gate began to adopt its rules before this one had finished")
}

/// The changes whose records adopting `rules` would forget. Does not wait for the adoption lock.
pub(super) async fn changes(
    store: &Redis,
    origins: &[Origin],
    rules: &[NamespaceRuleSet],
) -> Result<Vec<IdentityChange>, Error> {
    changes_to(store, &on_file(store, Some(&adoption::services(origins, rules))).await?, rules).await
}

pub(super) async fn adopt_alone(
    lock: &Lock<'_>,
    origins: &[Origin],
    rules: &[NamespaceRuleSet],
    accept_change: bool,
) -> Result<Vec<IdentityChange>, Error> {
    let store = lock.store;
    let on_file = on_file(store, Some(&adoption::services(origins, rules))).await?;
    if !accept_change {
        let changes = changes_to(store, &on_file, rules).await?;
        if !changes.is_empty() {
            return Ok(changes);
        }
    }
    for origin in origins {
        let mut command = redis::cmd("HSET");
        command.arg(keys::ORIGINS).arg(&listing::origin_key(origin.id())[..]).arg(listing::write_origin(origin));
        store.write(command).await?;
    }
    let periods = periods_to_write(&on_file, rules, now(store).await?);
    let mut call = store.client.scripts.adopt.call(3);
    call.arg(keys::ADOPTING).arg(keys::IDENTITIES).arg(keys::PERIODS);
    call.arg(&lock.token[..]).arg(rules.len()).arg(periods.len());
    for rule in rules {
        call.arg(name(&rule.service, &rule.namespace)).arg(&rule.digest[..]);
    }
    for (name, periods) in periods {
        call.arg(name).arg(periods);
    }
    let is_ruled = |stale: &NamespaceRules| {
        rules.iter().any(|rule| rule.service == stale.service && rule.namespace == stale.namespace)
    };
    for stale in adoption::stale(&on_file, rules).iter().filter(|stale| !is_ruled(stale)) {
        call.arg(name(&stale.service, &stale.namespace));
    }
    if number(&store.write(call).await?)? == 1 { Ok(Vec::new()) } else { Err(lost()) }
}

/// The rules on file of these services, or of all.
pub(super) async fn on_file(store: &Redis, of: Option<&BTreeSet<&str>>) -> Result<Vec<NamespaceRules>, Error> {
    let is_asked = |service: &str| of.is_none_or(|services| services.contains(service));
    let found: Vec<(String, Vec<u8>)> = ask(store, redis::cmd("HGETALL").arg(keys::IDENTITIES).to_owned()).await?;
    let identities = found.into_iter().filter_map(|(name, digest)| {
        let (service, namespace) = name.split_once(SEPARATOR).filter(|(service, _)| is_asked(service))?;
        Some((service.into(), namespace.into(), digest.try_into().ok()?))
    });
    let found: Vec<(String, Vec<u8>)> = ask(store, redis::cmd("HGETALL").arg(keys::PERIODS).to_owned()).await?;
    let mut periods = Vec::new();
    for (name, written) in found {
        let Some((service, namespace)) = name.split_once(SEPARATOR).filter(|(service, _)| is_asked(service)) else {
            continue;
        };
        let (service, namespace) = (Arc::<str>::from(service), Arc::<str>::from(namespace));
        let written: Vec<StoredPeriod> = serde_json::from_slice(&written).map_err(|_| unexpected_reply(Unreadable))?;
        for period in written {
            let period = period.read().ok_or_else(|| unexpected_reply(Unreadable))?;
            let (service, namespace) = (Arc::clone(&service), Arc::clone(&namespace));
            periods.push(NamespacePeriod { service, namespace, period });
        }
    }
    Ok(adoption::on_file(identities, periods))
}

async fn changes_to(
    store: &Redis,
    on_file: &[NamespaceRules],
    rules: &[NamespaceRuleSet],
) -> Result<Vec<IdentityChange>, Error> {
    let stale = adoption::forgotten(on_file, rules);
    if stale.is_empty() {
        return Ok(Vec::new());
    }
    let live = live(store, &stale).await?;
    Ok(stale.iter().zip(live).filter_map(|(stale, live)| adoption::change(stale, live)).collect())
}

/// The live records of each of these namespaces, by their routes.
async fn live(store: &Redis, stale: &[NamespaceRules]) -> Result<Vec<Vec<LiveKeys>>, Error> {
    let origins = listing::origins(store).await?;
    let mut live: Vec<BTreeMap<Arc<str>, LiveKeys>> = vec![BTreeMap::new(); stale.len()];
    let mut walk = Scan::of_all(store);
    while let Some((_, stored, now)) = walk.next().await? {
        let Some(Origin { service, namespace, route }) = origins.get(&stored.origin.0) else { continue };
        let place = stale.iter().position(|stale| stale.service == *service && stale.namespace == *namespace);
        if let Some(place) = place
            && lifecycle::is_live(stored.record.state, stored.record.until, now)
        {
            live[place].entry(Arc::clone(route)).or_insert_with(|| LiveKeys::of(route)).add(&stored.record);
        }
    }
    Ok(live.into_iter().map(|routes| routes.into_values().collect()).collect())
}

/// The stored form of a period. All periods of a namespace are in one list.
#[derive(Clone, Serialize, Deserialize)]
struct StoredPeriod {
    since: u64,
    /// In hexadecimal digits.
    digest: String,
    description: Option<String>,
}

impl StoredPeriod {
    fn of(period: &RulesPeriod) -> Self {
        let mut digits = [0; 64];
        write_hex(&period.digest, &mut digits);
        Self {
            since: record::millis(period.since),
            digest: String::from_utf8_lossy(&digits).into_owned(),
            description: period.description.as_deref().map(ToOwned::to_owned),
        }
    }

    fn read(self) -> Option<RulesPeriod> {
        let Self { since, digest, description } = self;
        let digest = RecordId::parse(&digest)?.0;
        Some(RulesPeriod { since: record::time(since), digest, description: description.map(Arc::from) })
    }
}

/// The namespaces whose periods change, with all of their periods in the stored form.
fn periods_to_write(on_file: &[NamespaceRules], rules: &[NamespaceRuleSet], now: Timestamp) -> Vec<(String, String)> {
    let mut changed: BTreeMap<(Arc<str>, Arc<str>), Vec<RulesPeriod>> = BTreeMap::new();
    for NamespacePeriod { service, namespace, period } in adoption::new_periods(on_file, rules, now) {
        let known = || {
            let of = |found: &&NamespaceRules| found.service == service && found.namespace == namespace;
            on_file.iter().find(of).map(|found| found.periods.clone()).unwrap_or_default()
        };
        let periods = changed.entry((Arc::clone(&service), Arc::clone(&namespace))).or_insert_with(known);
        periods.retain(|known| known.since != period.since);
        periods.push(period);
    }
    let write = |((service, namespace), periods): ((Arc<str>, Arc<str>), Vec<RulesPeriod>)| {
        let written: Vec<StoredPeriod> = periods.iter().map(StoredPeriod::of).collect();
        Some((name(&service, &namespace), serde_json::to_string(&written).ok()?))
    };
    changed.into_iter().filter_map(write).collect()
}

/// The time by the store's clock.
async fn now(store: &Redis) -> Result<Timestamp, Error> {
    let mut call = store.client.scripts.look.call(1);
    call.arg(keys::ADOPTING);
    let response = store.ask(call).await?;
    match response {
        Value::Array(response) => response.first().map(number).transpose()?.map(record::time),
        _ => None,
    }
    .ok_or_else(|| unexpected_reply(Unreadable))
}

fn name(service: &str, namespace: &str) -> String {
    format!("{service}{SEPARATOR}{namespace}")
}

async fn ask<T: redis::FromRedisValue>(store: &Redis, command: Cmd) -> Result<T, Error> {
    let response = store.call(command).await.map_err(|error| error::of_read(&error))?;
    T::from_redis_value(response).map_err(|_| unexpected_reply(Unreadable))
}
