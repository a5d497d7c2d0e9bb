//! The cache that the gates of a run share, and the way from each gate to it.
//!
//! It keeps nothing it is told to keep if chance will have it so, keeps what it is told to forget, and has values that nobody
//! put there: gates may lose time by that, and nothing else.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use oncegate::idempotency::record::RecordId;
use oncegate::store::Removal;
use oncegate::store::cached::{CacheOperation, RemoteCache, RemoteError};
use tokio::sync::{Notify, broadcast};
use tokio::time::{Instant, sleep};

use crate::dice::Dice;
use crate::history::{Event, History};
use crate::life::Life;
use crate::link::Pace;

/// How many notices may wait for a gate. Few: gates that are slow shall miss some.
const WAITING: usize = 4;

/// How often damage that lasts is done once more.
const AGAIN: u32 = 20;

/// The values, and who hears of removals.
pub struct Cache {
    history: History,
    held: Mutex<CacheState>,
}

struct CacheState {
    values: Values,
    ears: Vec<broadcast::Sender<Removal>>,
    notices: Notices,
    dice: Dice,
}

/// Each with the time at which it goes; those of a dump stay.
type Values = BTreeMap<RecordId, (Bytes, Option<Instant>)>;

/// How gates hear of removals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notices {
    Once,
    Twice,
    Never,
}

/// What happens to the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// All are gone.
    Flushed,
    /// Some are other bytes, or other by a bit.
    Junk,
    /// Some end early.
    Cut,
    /// Each stands under another key.
    Swapped,
    /// They are what they were a while ago, and do not go.
    Restored,
}

/// The way from one life of a gate to the cache.
pub struct Wire {
    cache: Arc<Cache>,
    life: Arc<Life>,
    ear: broadcast::Sender<Removal>,
    state: Mutex<(Dice, Pace, Mood)>,
    passes: Notify,
}

/// How the cache treats a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    Well,
    /// It refuses everything.
    Away,
    /// It answers nothing, until it does again.
    Hung,
    /// It loses what it is told, and what it says.
    Lossy,
}

/// What becomes of a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Course {
    Done,
    NotDone,
    DoneAndFailed,
    DoneInParts,
}

impl Cache {
    pub fn new(history: History, dice: Dice) -> Arc<Self> {
        let held = CacheState { values: Values::new(), ears: Vec::new(), notices: Notices::Once, dice };
        Arc::new(Self { history, held: Mutex::new(held) })
    }

    pub fn set_notices(&self, notices: Notices) {
        self.held().notices = notices;
        self.tell(format!("gates hear of removals: {notices:?}"));
    }

    /// Does damage to the values; a dump of them is taken at first, and restored after `time`.
    pub async fn suffer(&self, damage: Damage, time: Duration) {
        let dump = self.held().values.clone();
        if damage == Damage::Restored {
            sleep(time).await;
        }
        self.tell(format!("its values are {damage:?}"));
        self.held().damage(damage, dump);
        if matches!(damage, Damage::Junk | Damage::Cut | Damage::Swapped) {
            // So are those that come.
            for _ in 0..AGAIN {
                sleep(time / AGAIN).await;
                self.held().damage(damage, Values::new());
            }
        }
    }

    fn tell(&self, what: String) {
        self.history.add(Event::Cache { what });
    }

    fn held(&self) -> MutexGuard<'_, CacheState> {
        self.held.lock().unwrap()
    }
}

impl CacheState {
    fn damage(&mut self, damage: Damage, dump: Values) {
        let Self { values, dice, .. } = self;
        match damage {
            Damage::Flushed => values.clear(),
            Damage::Junk => {
                for (value, _) in values.values_mut() {
                    if dice.percent(40) {
                        continue;
                    }
                    let mut bytes = value.to_vec();
                    if dice.percent(50) && !bytes.is_empty() {
                        let place = dice.within(0..bytes.len() as u64) as usize;
                        bytes[place] ^= 1 << dice.within(0..8);
                    } else {
                        bytes = vec![dice.within(0..256) as u8; dice.within(0..300) as usize];
                    }
                    *value = bytes.into();
                }
            }
            Damage::Cut => {
                for (value, _) in values.values_mut() {
                    value.truncate(dice.within(0..value.len() as u64 + 1) as usize);
                }
            }
            Damage::Swapped => {
                let ids: Vec<RecordId> = values.keys().copied().collect();
                let mut kept: Vec<_> = values.values().cloned().collect();
                if !kept.is_empty() {
                    kept.rotate_left(1);
                }
                *values = ids.into_iter().zip(kept).collect();
            }
            Damage::Restored => *values = dump.into_iter().map(|(id, (value, _))| (id, (value, None))).collect(),
        }
    }

    /// Carries out the operations that pass, and gives what each question found.
    fn execute(&mut self, batch: &[CacheOperation], mut passes: impl FnMut() -> bool) -> Vec<Option<Bytes>> {
        let mut found = Vec::new();
        for operation in batch {
            match operation {
                CacheOperation::Get(id) => {
                    let stands =
                        |(_, until): &&(Bytes, Option<Instant>)| until.is_none_or(|until| Instant::now() < until);
                    found.push(self.values.get(id).filter(stands).map(|(value, _)| value.clone()));
                }
                _ if !passes() => {}
                CacheOperation::Put(id, value, life) => {
                    self.values.insert(*id, (value.clone(), Instant::now().checked_add(*life)));
                }
                CacheOperation::Delete(id) => drop(self.values.remove(id)),
                CacheOperation::Invalidate(id) => {
                    self.values.remove(id);
                    self.notify(*id);
                }
            }
        }
        found
    }

    /// Gates hear of a removal, each in its own time.
    fn notify(&mut self, id: RecordId) {
        let often = match self.notices {
            Notices::Once => 1,
            Notices::Twice => 2,
            Notices::Never => 0,
        };
        for ear in self.ears.iter().flat_map(|ear| std::iter::repeat_n(ear, often)) {
            let (ear, time) = (ear.clone(), self.dice.millis(0..5));
            tokio::spawn(async move {
                sleep(time).await;
                // A gate that is dead hears nothing.
                let _ = ear.send(Removal::Of(id));
            });
        }
    }
}

impl Wire {
    pub fn new(cache: Arc<Cache>, life: Arc<Life>, dice: Dice, pace: Pace) -> Arc<Self> {
        let ear = broadcast::Sender::new(WAITING);
        cache.held().ears.push(ear.clone());
        Arc::new(Self { cache, life, ear, state: Mutex::new((dice, pace, Mood::Well)), passes: Notify::new() })
    }

    pub fn set_mood(&self, mood: Mood) {
        self.state.lock().unwrap().2 = mood;
        self.passes.notify_waiters();
        self.life.fault(format!("the shared cache treats it: {mood:?}"));
    }

    fn mood(&self) -> Mood {
        self.state.lock().unwrap().2
    }

    /// How long a batch is on its way there and back, what becomes of it, and whether it arrives after its gate's death.
    fn journey(&self) -> (Duration, Duration, Course, bool) {
        let (dice, pace, mood) = &mut *self.state.lock().unwrap();
        let mut leg = || match pace {
            Pace::Instant => Duration::ZERO,
            Pace::Quick => dice.millis(0..2),
            Pace::Slow if dice.percent(5) => dice.millis(0..900),
            Pace::Slow => dice.millis(0..5),
        };
        let (there, back) = (leg(), leg());
        let course = match mood {
            Mood::Well | Mood::Hung => Course::Done,
            Mood::Away => Course::NotDone,
            Mood::Lossy => dice.weighted(&[
                (2, Course::Done),
                (2, Course::NotDone),
                (2, Course::DoneAndFailed),
                (5, Course::DoneInParts),
            ]),
        };
        (there, back, course, dice.percent(50))
    }

    /// Waits until something can pass.
    async fn travel(&self, time: Duration) {
        if !time.is_zero() {
            sleep(time).await;
        }
        while self.mood() == Mood::Hung && !self.life.is_dead() {
            self.passes.notified().await;
        }
    }

    async fn carry(&self, batch: &[CacheOperation]) -> Result<Vec<Option<Bytes>>, RemoteError> {
        let (there, back, course, arrives) = self.journey();
        if self.mood() == Mood::Away {
            return Err(RemoteError("it is away".to_owned()));
        }
        self.travel(there).await;
        if self.life.is_dead() && !arrives {
            return pending().await;
        }
        let found = match course {
            Course::NotDone => return Err(RemoteError("it failed".to_owned())),
            Course::Done | Course::DoneAndFailed => self.cache.held().execute(batch, || true),
            Course::DoneInParts => {
                let dice = &mut self.state.lock().unwrap().0;
                self.cache.held().execute(batch, || dice.percent(50))
            }
        };
        self.travel(back).await;
        if self.life.is_dead() {
            return pending().await;
        }
        if course == Course::DoneAndFailed { Err(RemoteError("it failed".to_owned())) } else { Ok(found) }
    }
}

/// As the memory of a gate has it: once a batch is on its way it arrives, whatever becomes of the one who sent it.
pub struct Sender(pub Arc<Wire>);

#[async_trait]
impl RemoteCache for Sender {
    async fn execute(&self, batch: &[CacheOperation]) -> Result<Vec<Option<Bytes>>, RemoteError> {
        if self.0.life.is_dead() {
            return pending().await;
        }
        let (wire, batch) = (Arc::clone(&self.0), batch.to_vec());
        let carried = tokio::spawn(async move { wire.carry(&batch).await });
        carried.await.expect("a cache does not panic")
    }

    fn removals(&self) -> broadcast::Receiver<Removal> {
        self.0.ear.subscribe()
    }
}
