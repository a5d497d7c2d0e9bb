//! Which keys the records need, and sealing them anew with the first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use tokio::sync::{Notify, Semaphore};

use super::keyring::{Keyring, Part, Sealing, Strictness};
use crate::idempotency::record::{AttemptToken, Record, RecordId, State};
use crate::store::deliveries::{Delivery, DeliveryFilter, Sequence};
use crate::store::resealing::{Beginning, Beginnings, DeliveryValues, Resealing, Values};
use crate::store::{Error, ErrorKind, Origin, Store};

/// How many records are looked at together.
const CHUNK: usize = 1000;

/// How many are sealed anew at a time. Each waits for the store, which takes those that wait together.
const AT_A_TIME: usize = 16;

/// How often a record is looked at that changes meanwhile.
const LOOKS: usize = 3;

/// Looks after the keys of a store.
pub struct Resealer {
    /// Beneath what seals.
    store: Arc<dyn Store>,
    keys: Arc<Keyring>,
    /// Whose records it seals anew.
    service: Arc<str>,
    /// How many records are looked at together.
    chunk: usize,
    again: Notify,
    /// For records that requests met.
    sealers: Arc<Semaphore>,
    /// After which delivery a call goes on that begins behind the records; nothing where the last one came to the end.
    resealed_to: Mutex<Option<Sequence>>,
}

/// How many records and accepted requests need each key; a record that needs two counts twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CountByKey {
    /// By the id of the key: every key of the configuration, in its order.
    pub keys: Vec<(Arc<str>, u64)>,
    /// With a part that is not sealed.
    pub plain: u64,
    /// With a part whose key the configuration does not have.
    pub missing: u64,
}

/// What came of sealing records and deliveries anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resealed {
    /// How many are sealed with the first key now, and were not.
    pub resealed: u64,
    /// How many wait for the end of their attempts.
    pub in_flight: u64,
    /// How many do not open: their key is missing, they were altered, or they are plain where a route demands a seal.
    pub unopened: u64,
    /// How many the store failed for.
    pub failed: u64,
    /// After which id the others come; `None` if there are no others.
    pub next: Option<RecordId>,
}

/// What became of one record.
enum Fate {
    Resealed,
    InFlight,
    Unopened,
    /// Which may have other keys, or none.
    OfAnotherService,
    Gone,
}

impl Resealer {
    /// Looks after the records of a service in `store`, which must not be above what seals.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, keys: Arc<Keyring>, service: Arc<str>) -> Self {
        let (again, sealers) = (Notify::new(), Arc::new(Semaphore::new(AT_A_TIME)));
        Self { store, keys, service, chunk: CHUNK, again, sealers, resealed_to: Mutex::default() }
    }

    /// The keys.
    #[must_use]
    pub fn keys(&self) -> &Arc<Keyring> {
        &self.keys
    }

    /// Whose records it seals anew.
    pub(super) fn service(&self) -> &Arc<str> {
        &self.service
    }

    /// The store beneath what seals.
    pub(super) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// How many records are looked at together.
    pub(super) fn chunk(&self) -> usize {
        self.chunk
    }

    fn resealing(&self) -> Result<&dyn Resealing, Error> {
        self.store.resealing().ok_or_else(|| Error::determinate(ErrorKind::Other, "this store cannot be resealed"))
    }

    /// Counts all records and accepted requests, with pauses, so that others have the most of the store.
    pub async fn count(&self) -> Result<CountByKey, Error> {
        let names = self.keys.names();
        let (mut counts, mut plain, mut missing) = (vec![0; names.len()], 0, 0);
        let mut count = |sealing| match sealing {
            Sealing::Plain => plain += 1,
            Sealing::With(name, _) => match names.iter().position(|(_, known)| *known == name) {
                Some(place) => counts[place] += 1,
                None => missing += 1,
            },
        };
        let mut after = None;
        loop {
            let began = Instant::now();
            let Beginnings { records, next } = self.resealing()?.beginnings(after, self.chunk).await?;
            for Beginning { values, .. } in &records {
                let head = Sealing::of(&values.head);
                count(head);
                let ending = values.answer.as_ref().map(|ending| Sealing::of(ending));
                if let Some(ending) = ending.filter(|ending| !ending.is_same_key(head)) {
                    count(ending);
                }
            }
            after = next;
            if after.is_none() {
                break;
            }
            tokio::time::sleep(2 * began.elapsed()).await;
        }
        let mut after = None;
        while let Some(queue) = self.store.deliveries() {
            let began = Instant::now();
            let page = queue.deliveries(DeliveryFilter::default(), after, self.chunk).await?;
            // Its parts are sealed together, and only what is said of it may be younger.
            page.deliveries.iter().for_each(|delivery| count(Sealing::of(&delivery.head)));
            after = page.next;
            if after.is_none() {
                break;
            }
            tokio::time::sleep(2 * began.elapsed()).await;
        }
        let keys = names.into_iter().map(|(id, _)| id).zip(counts).collect();
        Ok(CountByKey { keys, plain, missing })
    }

    /// Seals records with the first key that are not, from after an id on, until `patience` is over; then the deliveries, from where
    /// the last call came to. A call from the beginning takes those from the beginning as well.
    pub async fn reseal(&self, after: Option<RecordId>, patience: Duration) -> Result<Resealed, Error> {
        let began = Instant::now();
        if after.is_none() {
            *self.resealed_to() = None;
        }
        let mut done = Resealed { next: after, ..Resealed::default() };
        loop {
            let found = self.resealing()?.beginnings(done.next, self.chunk).await;
            let Beginnings { records, next } = match found {
                Ok(found) => found,
                // What was done counts: the next call says what is wrong.
                Err(_) if done.resealed > 0 => return Ok(done),
                Err(error) => return Err(error),
            };
            let last = records.last().map(|last| last.id);
            let old = records.into_iter();
            let old = old.filter(|found| self.is_old([Some(&found.values.head), found.values.answer.as_ref()]));
            let mut fates = stream::iter(old.map(|found| self.reseal_one(found.id))).buffer_unordered(AT_A_TIME);
            while let Some(fate) = fates.next().await {
                match fate {
                    Ok(Fate::Resealed) => done.resealed += 1,
                    Ok(Fate::InFlight) => done.in_flight += 1,
                    Ok(Fate::Unopened) => done.unopened += 1,
                    Ok(Fate::Gone | Fate::OfAnotherService) => {}
                    // An upstream's transaction may hold it, for one.
                    Err(_) => done.failed += 1,
                }
            }
            drop(fates);
            done.next = last.or(done.next);
            if next.is_none() {
                break;
            }
            if began.elapsed() >= patience {
                return Ok(done);
            }
        }
        // Where the time is over, no record comes after the last one, and the next call begins with the deliveries.
        if self.reseal_deliveries(&mut done, began + patience).await? {
            done.next = None;
            self.count_again();
        } else {
            done.next = done.next.or(Some(RecordId([0; 32])));
        }
        Ok(done)
    }

    /// Seals deliveries with the first key that are not. False where the time is over before all were looked at.
    async fn reseal_deliveries(&self, done: &mut Resealed, until: Instant) -> Result<bool, Error> {
        let Some(queue) = self.store.deliveries() else { return Ok(true) };
        let mut after = *self.resealed_to();
        loop {
            let own = DeliveryFilter { service: Some(Arc::clone(&self.service)), ..DeliveryFilter::default() };
            let page = queue.deliveries(own, after, self.chunk).await?;
            let is_old = |delivery: &&Delivery| self.is_old([Some(&delivery.head), delivery.note.as_ref()]);
            let old: Vec<RecordId> = page.deliveries.iter().filter(is_old).map(|delivery| delivery.id).collect();
            let mut fates =
                stream::iter(old.into_iter().map(|id| self.reseal_delivery(id))).buffer_unordered(AT_A_TIME);
            while let Some(fate) = fates.next().await {
                match fate {
                    Ok(Fate::Resealed) => done.resealed += 1,
                    Ok(Fate::Unopened) => done.unopened += 1,
                    Ok(Fate::InFlight | Fate::Gone | Fate::OfAnotherService) => {}
                    Err(_) => done.failed += 1,
                }
            }
            drop(fates);
            after = page.next;
            *self.resealed_to() = after;
            if after.is_none() {
                return Ok(true);
            }
            if Instant::now() >= until {
                return Ok(false);
            }
        }
    }

    fn resealed_to(&self) -> MutexGuard<'_, Option<Sequence>> {
        // It is replaced at once.
        self.resealed_to.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn reseal_delivery(&self, id: RecordId) -> Result<Fate, Error> {
        for _ in 0..LOOKS {
            let Some((delivery, values)) = self.resealing()?.delivery_values(id).await? else { return Ok(Fate::Gone) };
            if delivery.origin.is_none_or(|origin| *origin.service != *self.service) {
                return Ok(Fate::OfAnotherService);
            }
            let Some(sealed) = self.sealed_delivery(id, delivery.token, &values) else { return Ok(Fate::Unopened) };
            if self.resealing()?.reseal_delivery(id, delivery.token, values.note, sealed).await? {
                return Ok(Fate::Resealed);
            }
        }
        Ok(Fate::InFlight)
    }

    /// Whether a value is not sealed with the first key.
    fn is_old(&self, values: [Option<&Bytes>; 2]) -> bool {
        let Some(first) = self.keys.first() else { return false };
        let is_old = |value: &Bytes| !matches!(Sealing::of(value), Sealing::With(name, _) if name == first);
        values.into_iter().flatten().any(is_old)
    }

    async fn reseal_one(&self, id: RecordId) -> Result<Fate, Error> {
        for _ in 0..LOOKS {
            let Some(found) = self.store.get(id).await? else { return Ok(Fate::Gone) };
            let is_ours = |origin: Origin| *origin.service == *self.service || origin.is_shadow_of(&self.service);
            if !found.origin.is_some_and(is_ours) {
                return Ok(Fate::OfAnotherService);
            }
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
        if self.keys.first().is_none() {
            return;
        }
        let Ok(permit) = Arc::clone(&self.sealers).try_acquire_owned() else { return };
        let resealer = Arc::clone(self);
        tokio::spawn(async move {
            // The store reports its failures.
            let _ = resealer.reseal_one(id).await;
            drop(permit);
        });
    }

    /// The values of a record under the first key; `None` if one does not open, or if it may be planted.
    fn sealed_anew(&self, id: RecordId, record: Record) -> Option<Values> {
        if self.keys.is_planted(&record.head, record.answer.as_ref()) {
            return None;
        }
        let seal = |part, value| self.seal_anew(id, record.attempt, part, value);
        let answer = record.answer.as_ref().map(|answer| seal(Part::Ending, answer));
        let answer = answer.map_or(Some(None), |sealed| sealed.map(Some))?;
        Some(Values { head: seal(Part::Head, &record.head)?, answer })
    }

    /// The same of a delivery.
    fn sealed_delivery(&self, id: RecordId, token: AttemptToken, values: &DeliveryValues) -> Option<DeliveryValues> {
        let DeliveryValues { head, request, body, note } = values;
        if self.keys.is_planted(head, [request, body].into_iter().chain(note)) {
            return None;
        }
        let seal = |part, value| self.seal_anew(id, token, part, value);
        let note = note.as_ref().map(|note| seal(Part::Note, note));
        Some(DeliveryValues {
            head: seal(Part::Head, head)?,
            request: seal(Part::Request, request)?,
            body: seal(Part::Body, body)?,
            note: note.map_or(Some(None), |sealed| sealed.map(Some))?,
        })
    }

    /// A value under the first key, a head as strict as it was; `None` if it does not open.
    fn seal_anew(&self, id: RecordId, attempt: AttemptToken, part: Part, value: &Bytes) -> Option<Bytes> {
        let strictness = match part {
            Part::Head => Sealing::of(value).strictness(),
            _ => Strictness::Lenient,
        };
        let plain = self.keys.open(id, attempt, part, value).ok()?;
        Some(self.keys.seal_as(strictness, id, attempt, part, &plain))
    }

    /// Lets the next count begin now.
    pub fn count_again(&self) {
        self.again.notify_one();
    }

    /// Returns when a count is wanted.
    pub async fn count_requested(&self) {
        self.again.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idempotency::record::AttemptToken;
    use crate::store::deliveries::{Lane, NewDelivery};
    use crate::store::memory::Memory;
    use crate::store::sealed::DecryptionError;
    use crate::store::sealed::{Pace, Sealed, SealingKey};
    use crate::store::{Claim, Expiry, NewRecord, Settled, Settlement};

    const HOUR: Duration = Duration::from_secs(3600);

    fn key(byte: u8) -> SealingKey {
        SealingKey::new(format!("key-{byte}").into(), &[byte; 32])
    }

    struct Gate {
        memory: Arc<dyn Store>,
        keys: Arc<Keyring>,
        sealed: Sealed,
        resealer: Resealer,
    }

    fn origin(service: &str) -> Origin {
        Origin { service: service.into(), namespace: "n".into(), route: "r".into() }
    }

    impl Gate {
        async fn new() -> Self {
            let (memory, keys) = (Arc::new(Memory::new()) as Arc<dyn Store>, Arc::new(Keyring::new(vec![key(1)])));
            memory.adopt(vec![origin("ours"), origin("other")], Vec::new(), false).await.unwrap();
            let sealed = Sealed::new(Arc::clone(&memory), Arc::clone(&keys), "ours".into(), |_, _| {});
            let resealer = Resealer::new(Arc::clone(&memory), Arc::clone(&keys), "ours".into());
            Self { memory, keys, sealed, resealer: Resealer { chunk: 100, ..resealer } }
        }

        async fn claim(&self, store: &dyn Store, number: u8) {
            self.claim_of("ours", store, number).await;
        }

        async fn claim_of(&self, service: &str, store: &dyn Store, number: u8) {
            let (attempt, head) = (AttemptToken([number; 16]), Bytes::from_static(b"head"));
            let origin = origin(service).id();
            let fresh = NewRecord { attempt, origin, lease: HOUR, ttl: HOUR, unknown_ttl: HOUR, head };
            store.claim(RecordId([number; 32]), fresh).await.unwrap();
        }

        async fn complete(&self, store: &dyn Store, number: u8) {
            let end = Settlement::Complete { answer: Bytes::from_static(b"answer"), expiry: Expiry::FromNow(HOUR) };
            store.settle(RecordId([number; 32]), AttemptToken([number; 16]), end).await.unwrap();
        }

        async fn counted(&self) -> (Vec<u64>, u64, u64) {
            let CountByKey { keys, plain, missing } = self.resealer.count().await.unwrap();
            (keys.into_iter().map(|(_, count)| count).collect(), plain, missing)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn every_record_is_counted_and_sealed_anew() {
        let gate = Gate::new().await;
        let (memory, sealed) = (Arc::clone(&gate.memory), &gate.sealed);
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
        // As many calls as there are chunks, where none may take long.
        let (mut after, mut resealed, mut calls) = (None, 0, 0);
        loop {
            let done = gate.resealer.reseal(after, Duration::ZERO).await.unwrap();
            (after, resealed, calls) = (done.next, resealed + done.resealed, calls + 1);
            if after.is_none() {
                break;
            }
        }
        assert_eq!((resealed, calls), (256, 3));
        assert_eq!(gate.counted().await, (vec![256, 0], 0, 0));
        assert_eq!(gate.resealer.reseal(None, HOUR).await.unwrap(), Resealed::default(), "nothing is left to do");
        gate.keys.replace(vec![key(2)]);
        for number in 0..=u8::MAX {
            let record = sealed.get(RecordId([number; 32])).await.unwrap().unwrap().record;
            assert_eq!((&record.head[..], record.answer.as_deref()), (&b"head"[..], Some(&b"answer"[..])));
        }
        // A key that is gone.
        gate.keys.replace(vec![key(3)]);
        assert_eq!(gate.counted().await, (vec![0], 0, 256));
        let before = memory.get(RecordId([7; 32])).await.unwrap().unwrap().record;
        let done = gate.resealer.reseal(None, HOUR).await.unwrap();
        assert_eq!(done, Resealed { unopened: 256, ..Resealed::default() });
        assert_eq!(memory.get(RecordId([7; 32])).await.unwrap().unwrap().record, before, "it stays as it is");
    }

    /// Where the time of each call is over before the queue is paged through.
    #[tokio::test(start_paused = true)]
    async fn a_long_queue_is_sealed_anew_to_its_end() {
        let gate = Gate::new().await;
        let queue = gate.sealed.deliveries().unwrap();
        for number in 0..250 {
            let nothing = Bytes::new;
            let (token, origin, lane) = (AttemptToken([number; 16]), origin("ours").id(), Lane(0));
            let new = NewDelivery { token, origin, lane, head: nothing(), request: nothing(), body: nothing() };
            queue.accept(RecordId([number; 32]), new).await.unwrap();
        }
        for byte in [2, 3] {
            gate.keys.replace(vec![key(byte), key(byte - 1)]);
            // One that somebody broke off leaves nothing out of the next.
            assert!(gate.resealer.reseal(None, Duration::ZERO).await.unwrap().next.is_some());
            let (mut after, mut resealed, mut calls) = (None, 100, 0);
            loop {
                let done = gate.resealer.reseal(after, Duration::ZERO).await.unwrap();
                (after, resealed, calls) = (done.next, resealed + done.resealed, calls + 1);
                if after.is_none() {
                    break;
                }
                assert!(calls < 9, "it does not end");
            }
            assert_eq!((resealed, calls), (250, 3));
            assert_eq!(gate.counted().await, (vec![250, 0], 0, 0));
        }
        gate.keys.replace(vec![key(4)]);
        assert_eq!(gate.resealer.reseal(None, HOUR).await.unwrap().unopened, 250);
    }

    #[tokio::test(start_paused = true)]
    async fn live_records_of_the_service_that_lack_their_key_are_found() {
        let gate = Gate::new().await;
        for number in 1..=150 {
            gate.claim(&gate.sealed, number).await;
        }
        gate.claim_of("other", &gate.sealed, 200).await;
        gate.claim(&*gate.memory, 201).await;
        let found = async |patience, pauses| {
            let locked = gate.resealer.look_for_locked(Pace { patience, pauses }).await.unwrap();
            (locked.lacking(), locked.is_partial)
        };
        assert_eq!(found(HOUR, false).await, (0, false));
        assert_eq!(gate.keys.replace(vec![key(2)]), [Arc::<str>::from("key-1")]);
        for pauses in [false, true] {
            assert_eq!(found(HOUR, pauses).await, (150, false));
        }
        let (count, is_partial) = found(Duration::ZERO, false).await;
        assert!(count <= 100 && is_partial, "{count}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_plain_is_sealed_and_what_runs_is_left() {
        let gate = Gate::new().await;
        for number in 1..=3 {
            gate.claim(&*gate.memory, number).await;
        }
        gate.complete(&*gate.memory, 1).await;
        // As an upstream's own transaction completes it.
        gate.claim(&gate.sealed, 4).await;
        gate.complete(&*gate.memory, 4).await;
        assert_eq!(gate.counted().await, (vec![1], 4, 0));
        let done = gate.resealer.reseal(None, Duration::ZERO).await.unwrap();
        assert_eq!(done, Resealed { resealed: 2, in_flight: 2, ..Resealed::default() });
        assert_eq!(gate.counted().await, (vec![2], 2, 0));
        let record = gate.sealed.get(RecordId([4; 32])).await.unwrap().unwrap().record;
        assert_eq!(record.answer.as_deref(), Some(&b"answer"[..]));
        // Another service may have other keys, or none.
        gate.claim_of("other", &*gate.memory, 5).await;
        gate.complete(&*gate.memory, 5).await;
        let done = gate.resealer.reseal(None, HOUR).await.unwrap();
        assert_eq!((done.resealed, done.in_flight), (0, 2));
        let record = gate.memory.get(RecordId([5; 32])).await.unwrap().unwrap().record;
        assert_eq!(record.head, &b"head"[..]);
    }

    /// What each way of reading gives: whether an answer could be replayed.
    async fn is_believed(gate: &Gate, number: u8) -> [bool; 3] {
        let (id, attempt) = (RecordId([number; 32]), AttemptToken([number; 16]));
        let is_believed = |record: &Record| record.head == b"head"[..] && record.answer.as_deref() == Some(b"planted");
        let got = gate.sealed.get(id).await.unwrap().unwrap().record;
        let (head, origin) = (Bytes::from_static(b"head"), origin("ours").id());
        let fresh =
            NewRecord { attempt: AttemptToken([99; 16]), origin, lease: HOUR, ttl: HOUR, unknown_ttl: HOUR, head };
        let Claim::Exists { record: met, .. } = gate.sealed.claim(id, fresh).await.unwrap() else {
            panic!("it exists")
        };
        let own = Settlement::Complete { answer: Bytes::from_static(b"own"), expiry: Expiry::FromNow(HOUR) };
        let Settled::NotCurrent { record: Some(settled) } = gate.sealed.settle(id, attempt, own).await.unwrap() else {
            panic!("it has ended")
        };
        [is_believed(&got), is_believed(&met), is_believed(&settled)]
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_planted_beside_a_strict_head_is_read_by_nobody() {
        let gate = Gate::new().await;
        let plant = async |number| {
            let end = Settlement::Complete { answer: Bytes::from_static(b"planted"), expiry: Expiry::FromNow(HOUR) };
            gate.memory.settle(RecordId([number; 32]), AttemptToken([number; 16]), end).await.unwrap();
        };
        // Whatever the origin is: whoever plants an answer can write another one.
        gate.claim(&gate.sealed, 1).await;
        plant(1).await;
        gate.keys.be_strict([origin("ours").id()].into());
        for (number, service, store) in
            [(2, "ours", &gate.sealed as &dyn Store), (3, "ours", &*gate.memory), (4, "other", &*gate.memory)]
        {
            gate.claim_of(service, store, number).await;
            plant(number).await;
            assert_eq!(is_believed(&gate, number).await, [false; 3], "{number}");
        }
        assert_eq!(is_believed(&gate, 1).await, [true; 3], "it was claimed before");
        // Nothing makes them genuine, and a new key leaves heads as strict as they were.
        gate.claim(&gate.sealed, 5).await;
        gate.complete(&gate.sealed, 5).await;
        gate.keys.replace(vec![key(2), key(1)]);
        let done = gate.resealer.reseal(None, HOUR).await.unwrap();
        assert_eq!((done.resealed, done.unopened), (2, 2), "1 and 5; 2 and 3; 4 is of another service");
        for number in [2, 3, 4] {
            assert_eq!(is_believed(&gate, number).await, [false; 3], "{number}");
        }
        let strict = gate.memory.get(RecordId([5; 32])).await.unwrap().unwrap().record;
        assert_eq!(Sealing::of(&strict.head).strictness(), Strictness::Strict);
        let mut altered = strict.head.to_vec();
        altered[1] = 1;
        let opened = gate.keys.open(RecordId([5; 32]), strict.attempt, Part::Head, &altered.into());
        assert_eq!(opened, Err(DecryptionError::Altered), "nobody makes it lenient");
    }
}
