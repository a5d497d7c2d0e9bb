//! What goes wrong in a run, and what an operator does meanwhile.

use std::sync::Arc;
use std::time::Duration;

use oncegate::http::server::stopped;
use oncegate::store::Store as _;
use oncegate::store::deliveries::{self, Deliveries};
use oncegate::store::unreliable::{Rates, Side};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::World;
use crate::dice::Dice;
use crate::history::{Event, Label};
use crate::life::{Fuse, Life, Reach};
use crate::remote::{Damage, Mood, Notices};
use crate::setup::{ACCEPT, accepting_origin, id_of};

/// What happens to a gate.
#[derive(Clone, Copy, Debug)]
enum Wound {
    Death,
    DeathAtStore,
    DeathAtWrite,
    Drain,
    StoreAway,
    StoreStalled,
    StoreLossy,
    UpstreamAway,
    UpstreamCut,
    UpstreamStalled,
    ClientsStalled,
    CacheFails,
    /// The cache is all gates'.
    CacheDamaged,
    CacheNotices,
    /// It is not wounded by that.
    Purge,
}

const DAMAGES: [Damage; 5] = [Damage::Flushed, Damage::Junk, Damage::Cut, Damage::Swapped, Damage::Restored];

const WOUNDS: [(u64, Wound); 15] = [
    (3, Wound::Death),
    (3, Wound::DeathAtStore),
    (2, Wound::DeathAtWrite),
    (1, Wound::Drain),
    (3, Wound::StoreAway),
    (4, Wound::StoreStalled),
    (3, Wound::StoreLossy),
    (1, Wound::UpstreamAway),
    (1, Wound::UpstreamCut),
    (1, Wound::UpstreamStalled),
    (1, Wound::ClientsStalled),
    (4, Wound::CacheFails),
    (5, Wound::CacheDamaged),
    (1, Wound::CacheNotices),
    (5, Wound::Purge),
];

pub(super) fn rates(dice: &mut Dice) -> Rates {
    let worst = dice.pick(&[20, 100, 250]);
    let mut rate = || dice.within(0..worst) as u16;
    let (refuse, lose_answer, lose_call, delay) = (rate(), rate(), rate(), rate());
    Rates { refuse, lose_answer, lose_call, delay, longest: dice.millis(1..3_000) }
}

impl World {
    /// What goes wrong, for as long as it does.
    pub(super) async fn go_wrong(self: Arc<Self>, length: Duration, mut dice: Dice) {
        let end = Instant::now() + length;
        let mut wounds = JoinSet::new();
        // Some runs have no faults but those of the upstream and the clients.
        let gap = dice.pick(&[600, 1_500, 4_000, 60_000]);
        loop {
            let next = Instant::now() + dice.millis(gap / 4..gap);
            sleep_until(next.min(end)).await;
            if next >= end {
                break;
            }
            let life = dice.pick(&self.gates());
            let wound = dice.weighted(&WOUNDS);
            wounds.spawn(Arc::clone(&self).suffer(life, wound, dice.fork()));
        }
        wounds.shutdown().await;
    }

    /// An operator holds accepted requests back for a while, and has those tried again that were given up.
    pub(super) async fn operate(self: Arc<Self>, accepted: Vec<Label>, mut dice: Dice) {
        let gap = dice.pick(&[2_000, 6_000, 60_000]);
        loop {
            sleep(dice.millis(gap / 4..gap)).await;
            if self.is_calm() {
                return;
            }
            let Some(life) = self.any_gate(&mut dice) else { continue };
            if dice.percent(60) {
                for is_paused in [true, false] {
                    self.history.add(Event::Paused { life: life.number, is_paused });
                    self.shelf.memory.pause(accepting_origin(), is_paused).await.unwrap();
                    sleep(dice.millis(50..3_000)).await;
                }
            } else {
                let (store, id) = (life.store(), id_of(dice.pick(&accepted)));
                let requeue = async { deliveries::of(&*store)?.requeue(id).await };
                // The gate may die meanwhile. Whether it was done, the queue tells.
                drop(timeout(Duration::from_secs(2), requeue).await);
            }
        }
    }

    /// Something happens to a gate, and passes.
    async fn suffer(self: Arc<Self>, life: Arc<Life>, wound: Wound, mut dice: Dice) {
        if !life.accepts() {
            return;
        }
        let time = dice.millis(50..2_500);
        match wound {
            Wound::Death => life.die(),
            Wound::DeathAtStore => {
                let side = if dice.percent(50) { Side::Before } else { Side::After };
                life.light(Some(Fuse::StoreCall(dice.within(0..6) as u32, side)));
            }
            Wound::DeathAtWrite => life.light(Some(Fuse::Write(dice.within(0..2) as u32))),
            Wound::Drain => {
                life.drain();
                life.gate().drain(tokio::time::sleep(dice.millis(0..3_000))).await;
                life.die();
            }
            Wound::StoreAway => {
                life.fault("its store is away".to_owned());
                life.faults().set_away(true);
                sleep(time).await;
                life.fault("its store is back".to_owned());
                life.faults().set_away(false);
            }
            Wound::StoreStalled => {
                life.stall_store(true);
                sleep(time).await;
                // A gate that remembers for as long as records live has its store in its process.
                if self.setup.max_age.is_some() && time.as_millis().is_multiple_of(2) {
                    life.break_store();
                }
                sleep(time).await;
                life.stall_store(false);
            }
            Wound::StoreLossy => {
                life.fault("its store loses calls and answers".to_owned());
                life.faults().seed(dice.seed(), Some(Rates { lose_answer: 600, lose_call: 350, ..Rates::default() }));
                sleep(time).await;
                life.fault("its store loses less".to_owned());
                life.faults().seed(dice.seed(), Some(rates(&mut dice)));
            }
            Wound::UpstreamAway => {
                life.set_reach(if dice.percent(50) { Reach::Refused } else { Reach::Silent });
                sleep(time).await;
                life.set_reach(Reach::Open);
            }
            Wound::UpstreamCut => life.cut_upstreams(),
            Wound::UpstreamStalled => {
                life.stall_upstreams(true);
                sleep(time * 2).await;
                life.stall_upstreams(false);
            }
            Wound::ClientsStalled => {
                life.stall_clients(true);
                sleep(time).await;
                life.stall_clients(false);
            }
            Wound::CacheFails => {
                if let Some(wire) = life.wire() {
                    wire.set_mood(dice.pick(&[Mood::Away, Mood::Away, Mood::Hung, Mood::Lossy, Mood::Lossy]));
                    sleep(time * 2).await;
                    wire.set_mood(Mood::Well);
                }
            }
            Wound::CacheDamaged => {
                if let Some(cache) = &self.cache {
                    cache.suffer(dice.pick(&DAMAGES), time * 2).await;
                }
            }
            Wound::CacheNotices => {
                if let Some(cache) = &self.cache {
                    cache.set_notices(dice.pick(&[Notices::Twice, Notices::Never, Notices::Never]));
                    sleep(time * 2).await;
                    cache.set_notices(Notices::Once);
                }
            }
            Wound::Purge => {
                let label = dice.pick(&self.labels);
                life.fault(format!("an operator purges {label}"));
                // What was accepted would run again where its record is gone.
                let store = life.store();
                let forgets = async {
                    let queue = deliveries::of(&*store)?;
                    match queue.delivery(id_of(label)).await? {
                        Some(found) => queue.discard(found.id, found.token).await,
                        None => Ok(false),
                    }
                };
                if label.route != ACCEPT || forgets.await.is_ok() {
                    // Whether it was done, the records tell.
                    if let Some(found) = self.shelf.memory.get(id_of(label)).await.unwrap() {
                        drop(store.remove(found.id, found.record.attempt).await);
                    }
                }
            }
        }
        if matches!(wound, Wound::DeathAtStore | Wound::DeathAtWrite) {
            stopped(&mut life.stop()).await;
        }
        if life.is_dead() {
            sleep(dice.millis(0..2_500)).await;
            self.revive(&life, &mut dice);
        }
    }
}
