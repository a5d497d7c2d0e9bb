//! A store with injected faults, around one that works. For tests and simulations.
//!
//! ```
//! # use std::sync::Arc;
//! # use oncegate::store::{Store, memory::Memory, unreliable::{Fault, Unreliable}};
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let store = Unreliable::new(Arc::new(Memory::new()));
//! store.script([Fault::Refuse, Fault::None]);
//! assert!(store.ping().await.is_err());
//! assert!(store.ping().await.is_ok());
//! # });
//! ```

mod deliveries;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::broadcast;

use super::audit::{self, EntryFilter, EntryPage, NewEntry, Position};
use super::{
    AuditLog, Chunk, Claim, Cursor, Deliveries, Error, ErrorKind, Filter, IdentityChange, LeaseRenewal,
    NamespaceRuleSet, NamespaceRules, NewRecord, Origin, Page, RecordEntry, Removal, Resealing, Settled, Settlement,
    SharedQuotas, Store,
};
use crate::idempotency::record::{AttemptToken, Record, RecordId, Timestamp, Version};

/// A store that wraps another one and injects faults. It injects none until it is configured to.
///
/// The fault of a call is decided when it is made (polled first), in this order: the stop, being away, the script of
/// its operation, the script, chance.
pub struct Unreliable {
    inner: Arc<dyn Store>,
    plan: Mutex<Plan>,
}

/// The fault of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing: it works.
    None,
    /// It is not done, and says so.
    Refuse,
    /// It is not done for want of room, and says so.
    Full,
    /// It is done, and says that it may have been.
    LoseAnswer,
    /// It is not done, and says that it may have been.
    LoseCall,
    /// It is done after this long.
    Delay(Duration),
    /// It is done at once, and answers after this long.
    DelayAnswer(Duration),
    /// It is not done, and never answers.
    Hang,
    /// It is done, and never answers.
    HangAfter,
}

/// The operations of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "they are the methods of the trait")]
pub enum Operation {
    Claim,
    Supersede,
    Settle,
    Renew,
    ExpireLeases,
    Sweep,
    Get,
    List,
    Remove,
    Count,
    Changes,
    Adopt,
    Identities,
    Ping,
    Append,
    Amend,
    Entries,
    SweepEntries,
    Accept,
    Delivery,
    TakeDue,
    ChangeDelivery,
    Requeue,
    Discard,
    Deliveries,
    CountDeliveries,
    Pause,
    Paused,
    SweepDeliveries,
}

/// How often chance strikes, in calls of a thousand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// [`Fault::Refuse`]
    pub refuse: u16,
    /// [`Fault::LoseAnswer`]
    pub lose_answer: u16,
    /// [`Fault::LoseCall`]
    pub lose_call: u16,
    /// [`Fault::Delay`], of up to [`Rates::longest`].
    pub delay: u16,
    /// The longest delay.
    pub longest: Duration,
}

/// On which side of its effect a call stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// It is not done.
    Before,
    /// It is done, and not answered.
    After,
}

#[derive(Default)]
struct Plan {
    calls: u64,
    is_away: bool,
    is_stopped: bool,
    script: VecDeque<Fault>,
    scripts: HashMap<Operation, VecDeque<Fault>>,
    chance: Option<(SeededRandom, Rates)>,
    stop: Option<Stop>,
}

struct Stop {
    at: u64,
    side: Side,
    then: Arc<dyn Fn() + Send + Sync>,
}

/// The behaviour of one call.
enum Behaviour {
    Inject(Fault),
    Stop(Side, Arc<dyn Fn() + Send + Sync>),
}

impl Unreliable {
    /// Around `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Store>) -> Self {
        Self { inner, plan: Mutex::default() }
    }

    /// The next calls meet these faults, in this order, after those that were scripted before.
    pub fn script(&self, faults: impl IntoIterator<Item = Fault>) {
        self.plan().script.extend(faults);
    }

    /// The next calls of one operation meet these faults.
    pub fn script_for(&self, operation: Operation, faults: impl IntoIterator<Item = Fault>) {
        self.plan().scripts.entry(operation).or_default().extend(faults);
    }

    /// Faults strike at these rates, the same ones in the same order for the same seed. No rates: none strike.
    ///
    /// # Panics
    /// Where the rates are more than a thousand together.
    pub fn seed(&self, seed: u64, rates: Option<Rates>) {
        if let Some(Rates { refuse, lose_answer, lose_call, delay, .. }) = rates {
            assert!(u32::from(refuse) + u32::from(lose_answer) + u32::from(lose_call) + u32::from(delay) <= 1000);
        }
        self.plan().chance = rates.map(|rates| (SeededRandom(seed), rates));
    }

    /// Takes the store away, so that every call is refused, or brings it back. Calls under way are not touched.
    pub fn set_away(&self, is_away: bool) {
        self.plan().is_away = is_away;
    }

    /// The `n`th call from now (1 is the next one) calls `then`, which may end the process, and never answers; nor does
    /// any call after it, as if this had happened to the process.
    pub fn stop_at(&self, n: u64, side: Side, then: impl Fn() + Send + Sync + 'static) {
        let mut plan = self.plan();
        plan.stop = Some(Stop { at: plan.calls + n, side, then: Arc::new(then) });
    }

    /// Whether the call of [`Unreliable::stop_at`] has come.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.plan().is_stopped
    }

    /// How many calls were made. `close` does not count.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.plan().calls
    }

    async fn call<T>(&self, operation: Operation, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        // Not in the match: its guard would be held while the call waits.
        let behaviour = self.plan().next(operation);
        match behaviour {
            Behaviour::Inject(fault) => inject(fault, work).await,
            Behaviour::Stop(side, then) => {
                if side == Side::After {
                    let _ = work.await;
                }
                then();
                std::future::pending().await
            }
        }
    }

    fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Unreliable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unreliable").field("inner", &self.inner.kind()).finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for Unreliable {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn recall(&self, id: RecordId) -> Option<(Record, Timestamp)> {
        self.inner.recall(id)
    }

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        self.call(Operation::Claim, self.inner.claim(id, fresh)).await
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        self.call(Operation::Supersede, self.inner.supersede(id, seen, fresh)).await
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        self.call(Operation::Settle, self.inner.settle(id, attempt, end)).await
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        self.call(Operation::Renew, self.inner.renew(held)).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        self.call(Operation::ExpireLeases, self.inner.expire_leases(limit)).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        self.call(Operation::Sweep, self.inner.sweep(limit)).await
    }

    async fn changed(&self, id: RecordId) {
        self.inner.changed(id).await;
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        self.inner.removals()
    }

    fn quotas(&self) -> Option<Arc<dyn SharedQuotas>> {
        self.inner.quotas()
    }

    fn resealing(&self) -> Option<&dyn Resealing> {
        self.inner.resealing()
    }

    fn deliveries(&self) -> Option<&dyn Deliveries> {
        self.inner.deliveries().map(|_| self as &dyn Deliveries)
    }

    fn audit(&self) -> Option<&dyn AuditLog> {
        self.inner.audit().map(|_| self as &dyn AuditLog)
    }

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        self.call(Operation::Get, self.inner.get(id)).await
    }

    async fn is_held(&self, id: RecordId) -> Result<bool, Error> {
        self.call(Operation::Get, self.inner.is_held(id)).await
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.call(Operation::List, self.inner.list(filter, after, limit)).await
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        self.call(Operation::List, self.inner.scan(filter, after, limit)).await
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        self.call(Operation::Remove, self.inner.remove(id, attempt)).await
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        self.call(Operation::Count, self.inner.count()).await
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error> {
        self.call(Operation::Changes, self.inner.changes(origins, rules)).await
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        self.call(Operation::Adopt, self.inner.adopt(origins, rules, accept_change)).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        self.call(Operation::Identities, self.inner.identities()).await
    }

    async fn ping(&self) -> Result<(), Error> {
        self.call(Operation::Ping, self.inner.ping()).await
    }

    fn away(&self) -> Vec<Arc<str>> {
        self.inner.away()
    }

    async fn silent(&self) -> Vec<Arc<str>> {
        self.inner.silent().await
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

#[async_trait]
impl AuditLog for Unreliable {
    async fn append(&self, entry: NewEntry) -> Result<Position, Error> {
        self.call(Operation::Append, audit::of(&*self.inner)?.append(entry)).await
    }

    async fn amend(&self, position: Position, detail: Bytes) -> Result<bool, Error> {
        self.call(Operation::Amend, audit::of(&*self.inner)?.amend(position, detail)).await
    }

    async fn entries(&self, filter: EntryFilter, before: Option<Position>, limit: usize) -> Result<EntryPage, Error> {
        self.call(Operation::Entries, audit::of(&*self.inner)?.entries(filter, before, limit)).await
    }

    async fn sweep_entries(&self, limit: usize) -> Result<usize, Error> {
        self.call(Operation::SweepEntries, audit::of(&*self.inner)?.sweep_entries(limit)).await
    }
}

async fn inject<T>(fault: Fault, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match fault {
        Fault::None => work.await,
        Fault::Refuse => Err(Error::determinate(ErrorKind::Unavailable, "injected refusal")),
        Fault::Full => Err(Error::determinate(ErrorKind::Full, "injected full disk")),
        Fault::LoseAnswer => {
            work.await?;
            Err(Error::indeterminate(ErrorKind::Timeout, "injected loss of the answer"))
        }
        Fault::LoseCall => Err(Error::indeterminate(ErrorKind::Timeout, "injected loss of the call")),
        Fault::Delay(delay) => {
            tokio::time::sleep(delay).await;
            work.await
        }
        Fault::DelayAnswer(delay) => {
            let answer = work.await;
            tokio::time::sleep(delay).await;
            answer
        }
        Fault::Hang => std::future::pending().await,
        Fault::HangAfter => {
            let _ = work.await;
            std::future::pending().await
        }
    }
}

impl Plan {
    fn next(&mut self, operation: Operation) -> Behaviour {
        self.calls += 1;
        if self.is_stopped {
            return Behaviour::Inject(Fault::Hang);
        }
        if let Some(stop) = self.stop.take_if(|stop| stop.at <= self.calls) {
            self.is_stopped = true;
            return Behaviour::Stop(stop.side, stop.then);
        }
        if self.is_away {
            return Behaviour::Inject(Fault::Refuse);
        }
        let scripted = self.scripts.get_mut(&operation).and_then(VecDeque::pop_front);
        let fault = scripted.or_else(|| self.script.pop_front());
        let fault = fault.or_else(|| self.chance.as_mut().map(|(chance, rates)| chance.pick(rates)));
        Behaviour::Inject(fault.unwrap_or(Fault::None))
    }
}

/// Random numbers that a seed fixes (splitmix64).
struct SeededRandom(u64);

impl SeededRandom {
    fn pick(&mut self, rates: &Rates) -> Fault {
        let mut draw = self.below(1000);
        let mut strikes = |rate: u16| {
            let hit = draw < u64::from(rate);
            draw = draw.wrapping_sub(u64::from(rate));
            hit
        };
        if strikes(rates.refuse) {
            Fault::Refuse
        } else if strikes(rates.lose_answer) {
            Fault::LoseAnswer
        } else if strikes(rates.lose_call) {
            Fault::LoseCall
        } else if strikes(rates.delay) {
            let longest = u64::try_from(rates.longest.as_micros()).unwrap_or(u64::MAX);
            Fault::Delay(Duration::from_micros(self.below(longest.saturating_add(1))))
        } else {
            Fault::None
        }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}
