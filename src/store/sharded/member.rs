//! One database of a list: opened when it can be, and made to know the rules of identities before it takes claims.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::Databases;
use crate::store::{Error, ErrorKind, IdentityChange, NamespaceRuleSet, Origin, OriginId, Store};

/// Between two tries to open a database, or to make it know the rules.
const AGAIN: Duration = Duration::from_secs(1);

/// How often to say that one is waited for.
const REMINDER: Duration = Duration::from_secs(60);

/// A database.
pub(super) struct Member {
    pub(super) name: Arc<str>,
    store: OnceLock<Arc<dyn Store>>,
    /// Whether it answered when it was last asked.
    pub(super) is_up: AtomicBool,
    /// What it does not know yet: it takes no claims before.
    unknown: Mutex<Option<Arc<Adoption>>>,
    lacks_rules: AtomicBool,
    changed: Notify,
    pub(super) busy: Busy,
}

/// The arguments of [`Store::adopt`].
pub(super) struct Adoption {
    pub(super) origins: Vec<Origin>,
    pub(super) rules: Vec<NamespaceRuleSet>,
    pub(super) accept_change: bool,
}

/// The calls of upkeep that are under way: another one would wait behind them.
#[derive(Default)]
pub(super) struct Busy {
    pub(super) renewing: Arc<AtomicBool>,
    pub(super) expiring: Arc<AtomicBool>,
    pub(super) sweeping: Arc<AtomicBool>,
    pub(super) sweeping_entries: Arc<AtomicBool>,
    pub(super) sweeping_deliveries: Arc<AtomicBool>,
    taking: Mutex<HashMap<OriginId, Arc<AtomicBool>>>,
}

impl Busy {
    /// Of the deliveries of one route: none waits for those of another.
    pub(super) fn taking(&self, origin: OriginId) -> Arc<AtomicBool> {
        Arc::clone(self.taking.lock().unwrap_or_else(PoisonError::into_inner).entry(origin).or_default())
    }
}

impl Member {
    pub(super) fn new(name: Arc<str>, store: Option<Arc<dyn Store>>) -> Self {
        let is_up = AtomicBool::new(store.is_some());
        Self {
            name,
            store: store.map(OnceLock::from).unwrap_or_default(),
            is_up,
            unknown: Mutex::default(),
            lacks_rules: AtomicBool::new(false),
            changed: Notify::new(),
            busy: Busy::default(),
        }
    }

    /// Its store.
    pub(super) fn store(&self) -> Result<&Arc<dyn Store>, Error> {
        self.store.get().ok_or_else(|| self.refusal("has not been reached since the start"))
    }

    /// Its store, for what makes a claim.
    pub(super) fn store_for_claims(&self) -> Result<&Arc<dyn Store>, Error> {
        if self.lacks_rules.load(Ordering::Acquire) {
            return Err(self.refusal("was not reached when the rules of keys changed, and does not know them yet"));
        }
        self.store()
    }

    pub(super) fn is_open(&self) -> bool {
        self.store.get().is_some()
    }

    fn refusal(&self, why: &str) -> Error {
        Error::determinate(ErrorKind::Unavailable, format!("the database {} {why}", self.name))
    }

    /// Makes it know these rules as soon as possible, and lets it take no claims before.
    pub(super) fn adopt_later(&self, adoption: &Arc<Adoption>) {
        *self.unknown() = Some(Arc::clone(adoption));
        self.lacks_rules.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    /// It knows the latest rules.
    pub(super) fn adopted(&self) {
        *self.unknown() = None;
        self.lacks_rules.store(false, Ordering::Release);
    }

    /// Opens it, and makes it know what it lacks, for as long as the store lives.
    pub(super) async fn attend(self: Arc<Self>, index: usize, databases: Arc<dyn Databases>) {
        let mut said: Option<Instant> = None;
        let mut say = |error: &dyn std::fmt::Display| {
            if said.is_none_or(|at| at.elapsed() >= REMINDER) {
                said = Some(Instant::now());
                tracing::warn!(database = &*self.name, %error, "a database of the store cannot be used; trying again");
            }
        };
        while !self.is_open() {
            match databases.open(index).await {
                Ok(store) => {
                    tracing::info!(database = &*self.name, "a database of the store was opened");
                    // Nothing else sets it.
                    let _ = self.store.set(store);
                }
                Err(error) => {
                    say(&error);
                    sleep(AGAIN).await;
                }
            }
        }
        loop {
            let Some(adoption) = self.unknown().clone() else {
                self.changed.notified().await;
                continue;
            };
            match self.try_adopt(&adoption).await {
                Ok(changes) if changes.is_empty() || adoption.accept_change => {
                    let mut unknown = self.unknown();
                    if unknown.as_ref().is_some_and(|latest| Arc::ptr_eq(latest, &adoption)) {
                        *unknown = None;
                        self.lacks_rules.store(false, Ordering::Release);
                    }
                }
                Ok(changes) => {
                    let keys: u64 = changes.iter().map(IdentityChange::keys).sum();
                    say(&format!(
                        "it has {keys} live keys that the rules of this configuration would forget: see `oncegate check --store`"
                    ));
                    sleep(10 * AGAIN).await;
                }
                Err(error) => {
                    say(&error);
                    sleep(AGAIN).await;
                }
            }
        }
    }

    async fn try_adopt(&self, adoption: &Adoption) -> Result<Vec<IdentityChange>, Error> {
        let Adoption { origins, rules, accept_change } = adoption;
        self.store()?.adopt(origins.clone(), rules.clone(), *accept_change).await
    }

    fn unknown(&self) -> std::sync::MutexGuard<'_, Option<Arc<Adoption>>> {
        // It is replaced at once.
        self.unknown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
