//! Which keys the records need, and sealing them anew with the first.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use tokio::sync::{Notify, Semaphore};

use super::keyring::{Keyring, Part, Sealing, is_plain};
use crate::idempotency::record::{Record, RecordId, State};
use crate::store::resealing::{Beginning, Beginnings, Resealing, Values};
use crate::store::{Error, ErrorKind, Store};

/// How many records are looked at together.
const CHUNK: usize = 1000;

/// How many are sealed anew at a time. Each waits for the store, which takes those that wait together.
const AT_A_TIME: usize = 16;

/// How often a record is looked at that changes meanwhile.
const LOOKS: usize = 3;

/// Looks after the keys of a store.
pub struct Keeper {
    /// Beneath what seals.
    store: Arc<dyn Store>,
    keys: Arc<Keyring>,
    again: Notify,
    /// For records that requests met.
    sealers: Arc<Semaphore>,
}

/// How many records need each key; one that needs two counts twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CountByKey {
    /// By the id of the key: every key of the configuration, in its order.
    pub keys: Vec<(Arc<str>, u64)>,
    /// With a part that is not sealed.
    pub plain: u64,
    /// With a part whose key the configuration does not have.
    pub missing: u64,
}

/// What came of sealing records anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resealed {
    /// How many are sealed with the first key now, and were not.
    pub resealed: u64,
    /// How many wait for the end of their attempts.
    pub in_flight: u64,
    /// How many do not open: their key is missing, they were altered, or they are plain where a route demands a seal.
    pub unopened: u64,
    /// After which id the others come; `None` if there are no others.
    pub next: Option<RecordId>,
}

/// What became of one record.
enum Fate {
    Resealed,
    InFlight,
    Unopened,
    Gone,
}

impl Keeper {
    /// Looks after the records of `store`, which must not be above what seals.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, keys: Arc<Keyring>) -> Self {
        Self { store, keys, again: Notify::new(), sealers: Arc::new(Semaphore::new(AT_A_TIME)) }
    }

    /// The keys.
    #[must_use]
    pub fn keys(&self) -> &Arc<Keyring> {
        &self.keys
    }

    fn resealing(&self) -> Result<&dyn Resealing, Error> {
        self.store.resealing().ok_or_else(|| Error::determinate(ErrorKind::Other, "this store cannot be resealed"))
    }

    /// Counts all records, with pauses, so that others have the most of the store.
    pub async fn count(&self) -> Result<CountByKey, Error> {
        let mut counts: BTreeMap<Sealing, u64> = BTreeMap::new();
        let mut after = None;
        loop {
            let began = Instant::now();
            let Beginnings { records, next } = self.resealing()?.beginnings(after, CHUNK).await?;
            for Beginning { values, .. } in &records {
                let head = Sealing::of(&values.head);
                *counts.entry(head).or_default() += 1;
                if let Some(ending) =
                    values.answer.as_ref().map(|ending| Sealing::of(ending)).filter(|own| *own != head)
                {
                    *counts.entry(ending).or_default() += 1;
                }
            }
            after = next;
            if after.is_none() {
                break;
            }
            tokio::time::sleep(2 * began.elapsed()).await;
        }
        let plain = counts.remove(&Sealing::Plain).unwrap_or(0);
        let keys = self.keys.each(|id, sealing| (Arc::clone(id), counts.remove(&sealing).unwrap_or(0)));
        Ok(CountByKey { keys, plain, missing: counts.into_values().sum() })
    }

    /// Seals records with the first key that are not, from after an id on, until `patience` is over.
    pub async fn reseal(&self, after: Option<RecordId>, patience: Duration) -> Result<Resealed, Error> {
        let began = Instant::now();
        let mut done = Resealed { next: after, ..Resealed::default() };
        loop {
            let Beginnings { records, next } = self.resealing()?.beginnings(done.next, CHUNK).await?;
            let old =
                records.into_iter().filter(|found| self.is_old(&found.values)).map(|found| self.reseal_one(found.id));
            let fates: Vec<Fate> = stream::iter(old).buffer_unordered(AT_A_TIME).try_collect().await?;
            for fate in fates {
                match fate {
                    Fate::Resealed => done.resealed += 1,
                    Fate::InFlight => done.in_flight += 1,
                    Fate::Unopened => done.unopened += 1,
                    Fate::Gone => {}
                }
            }
            done.next = next;
            if next.is_none() || began.elapsed() >= patience {
                break;
            }
        }
        if done.next.is_none() {
            self.count_again();
        }
        Ok(done)
    }

    /// Whether a value is not sealed with the first key.
    fn is_old(&self, values: &Values) -> bool {
        let first = self.keys.first();
        let is_old = |value: &Bytes| first.is_some_and(|first| Sealing::of(value) != first);
        is_old(&values.head) || values.answer.as_ref().is_some_and(is_old)
    }

    async fn reseal_one(&self, id: RecordId) -> Result<Fate, Error> {
        for _ in 0..LOOKS {
            let Some(found) = self.store.get(id).await? else { return Ok(Fate::Gone) };
            let record = found.record;
            if record.state == State::InFlight {
                return Ok(Fate::InFlight);
            }
            let version = record.version();
            let Some(values) = self.sealed_anew(id, record) else { return Ok(Fate::Unopened) };
            if self.resealing()?.reseal(id, version, values).await? {
                return Ok(Fate::Resealed);
            }
        }
        // It changes again and again, so that somebody is at work on it.
        Ok(Fate::InFlight)
    }

    /// Seals a record in the background that is not. Where too many are being sealed, this one is met again.
    pub(super) fn seal_soon(self: &Arc<Self>, id: RecordId) {
        if self.keys.first().is_none() || self.keys.requires_any() {
            return;
        }
        let Ok(permit) = Arc::clone(&self.sealers).try_acquire_owned() else { return };
        let keeper = Arc::clone(self);
        tokio::spawn(async move {
            // The store reports its failures.
            let _ = keeper.reseal_one(id).await;
            drop(permit);
        });
    }

    /// The values of a record under the first key; `None` if one does not open, or if it may be planted: where routes demand
    /// that records are sealed, nothing makes a sealed record of a plain one.
    fn sealed_anew(&self, id: RecordId, record: Record) -> Option<Values> {
        if self.keys.requires_any() && is_plain(&record) {
            return None;
        }
        let seal = |part, value| {
            let plain = self.keys.open(id, record.attempt, part, value).ok()?;
            Some(self.keys.seal(id, record.attempt, part, &plain))
        };
        let answer = match &record.answer {
            Some(answer) => Some(seal(Part::Ending, answer)?),
            None => None,
        };
        Some(Values { head: seal(Part::Head, &record.head)?, answer })
    }

    /// Lets the next count begin now.
    pub fn count_again(&self) {
        self.again.notify_one();
    }

    /// Returns when a count is wanted.
    pub async fn is_asked_to_count(&self) {
        self.again.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idempotency::record::Attempt;
    use crate::store::memory::Memory;
    use crate::store::sealed::{Sealed, SealingKey};
    use crate::store::{End, Expiry, Fresh, OriginId};

    const HOUR: Duration = Duration::from_secs(3600);

    fn key(byte: u8) -> SealingKey {
        SealingKey::new(format!("key-{byte}").into(), &[byte; 32])
    }

    struct Gate {
        memory: Arc<dyn Store>,
        keys: Arc<Keyring>,
        sealed: Sealed,
        keeper: Keeper,
    }

    impl Gate {
        fn new() -> Self {
            let (memory, keys) = (Arc::new(Memory::new()) as Arc<dyn Store>, Arc::new(Keyring::new(vec![key(1)])));
            let sealed = Sealed::new(Arc::clone(&memory), Arc::clone(&keys), |_, _| {});
            let keeper = Keeper::new(Arc::clone(&memory), Arc::clone(&keys));
            Self { memory, keys, sealed, keeper }
        }

        async fn claim(&self, store: &dyn Store, number: u8) {
            let (attempt, head) = (Attempt([number; 16]), Bytes::from_static(b"head"));
            let fresh = Fresh { attempt, origin: OriginId(1), lease: HOUR, ttl: HOUR, unknown_ttl: HOUR, head };
            store.claim(RecordId([number; 32]), fresh).await.unwrap();
        }

        async fn complete(&self, store: &dyn Store, number: u8) {
            let end = End::Complete { answer: Bytes::from_static(b"answer"), expiry: Expiry::FromNow(HOUR) };
            store.settle(RecordId([number; 32]), Attempt([number; 16]), end).await.unwrap();
        }

        async fn counted(&self) -> (Vec<u64>, u64, u64) {
            let CountByKey { keys, plain, missing } = self.keeper.count().await.unwrap();
            (keys.into_iter().map(|(_, count)| count).collect(), plain, missing)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn every_record_is_counted_and_sealed_anew() {
        let gate = Gate::new();
        let (memory, sealed) = (Arc::clone(&gate.memory), &gate.sealed);
        // More than one chunk of plain records, and one of each kind.
        for number in 0..=u8::MAX {
            gate.claim(sealed, number).await;
            if number > 0 {
                gate.complete(sealed, number).await;
            }
        }
        assert_eq!(gate.counted().await, (vec![256], 0, 0));
        gate.keys.replace(vec![key(2), key(1)]);
        assert_eq!(gate.counted().await, (vec![0, 256], 0, 0));
        // The end of an attempt that began under the former key needs both.
        gate.complete(sealed, 0).await;
        assert_eq!(gate.counted().await, (vec![1, 256], 0, 0));
        let done = gate.keeper.reseal(None, HOUR).await.unwrap();
        assert_eq!(done, Resealed { resealed: 256, ..Resealed::default() });
        assert_eq!(gate.counted().await, (vec![256, 0], 0, 0));
        assert_eq!(gate.keeper.reseal(None, HOUR).await.unwrap(), Resealed::default(), "nothing is left to do");
        gate.keys.replace(vec![key(2)]);
        for number in 0..=u8::MAX {
            let record = sealed.get(RecordId([number; 32])).await.unwrap().unwrap().record;
            assert_eq!((&record.head[..], record.answer.as_deref()), (&b"head"[..], Some(&b"answer"[..])));
        }
        // A key that is gone.
        gate.keys.replace(vec![key(3)]);
        assert_eq!(gate.counted().await, (vec![0], 0, 256));
        let before = memory.get(RecordId([7; 32])).await.unwrap().unwrap().record;
        let done = gate.keeper.reseal(None, HOUR).await.unwrap();
        assert_eq!(done, Resealed { unopened: 256, ..Resealed::default() });
        assert_eq!(memory.get(RecordId([7; 32])).await.unwrap().unwrap().record, before, "it stays as it is");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_plain_is_sealed_and_what_runs_is_left() {
        let gate = Gate::new();
        for number in 1..=3 {
            gate.claim(&*gate.memory, number).await;
        }
        gate.complete(&*gate.memory, 1).await;
        // As an upstream's own transaction completes it.
        gate.claim(&gate.sealed, 4).await;
        gate.complete(&*gate.memory, 4).await;
        assert_eq!(gate.counted().await, (vec![1], 4, 0));
        let done = gate.keeper.reseal(None, Duration::ZERO).await.unwrap();
        assert_eq!(done, Resealed { resealed: 2, in_flight: 2, ..Resealed::default() });
        assert_eq!(gate.counted().await, (vec![2], 2, 0));
        let record = gate.sealed.get(RecordId([4; 32])).await.unwrap().unwrap().record;
        assert_eq!(record.answer.as_deref(), Some(&b"answer"[..]));
    }
}
