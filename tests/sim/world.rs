//! A run: gates on one store, an upstream, clients, and what goes wrong.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use futures_util::FutureExt;
use http::HeaderName;
use oncegate::gate::{self, Gate, HeaderNames, Settings, Tokens};
use oncegate::http::forwarding::Forwarding;
use oncegate::http::limits::Limits;
use oncegate::http::server::stopped;
use oncegate::http::usage::Usage;
use oncegate::idempotency::policy::Policy;
use oncegate::idempotency::record::Timestamp;
use oncegate::idempotency::recovery::Recovery;
use oncegate::store::Store;
use oncegate::store::cached::{self, Cached, SharedSettings};
use oncegate::store::memory::Memory;
use oncegate::store::unreliable::{Rates, Side, Unreliable};
use oncegate::telemetry::metrics::Metrics;
use oncegate::worker;
use tokio::runtime;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::believer::{Believer, Seen};
use crate::books::{Books, Recorded};
use crate::client::{Errand, ask, pursue};
use crate::dice::Dice;
use crate::history::{Answer, EPOCH, Entry, Event, History, Label, LifeNumber, Request, Token};
use crate::ledger::{Ledger, Line};
use crate::life::{Fuse, Life, Reach};
use crate::link::{Link, Pace};
use crate::mutant::{Mutant, Shelf};
use crate::remote::{Cache, Damage, Mood, Notices, Sender, Wire};
use crate::setup::{KEYS, PATHS, PROBE, RESEND, Setup, TENANTS, VARIANTS, id_of};
use crate::upstream::{Site, upstreams};

/// What came of a run.
pub struct Run {
    pub setup: Setup,
    pub history: Vec<Entry>,
    /// What its store was asked.
    pub ledger: Vec<Line>,
}

pub struct World {
    pub setup: Setup,
    pub history: History,
    shelf: Arc<Shelf>,
    site: Arc<Site>,
    /// The present life of each gate.
    gates: Mutex<Vec<Arc<Life>>>,
    /// Every gate, and what fails before it, for as long as the run lasts.
    kept: Mutex<Vec<(Arc<Gate>, Arc<Unreliable>)>>,
    lives: AtomicU32,
    requests: AtomicU32,
    calm: AtomicBool,
    /// What clients ask for.
    labels: Vec<Label>,
    /// What gates share besides the store, if they do.
    cache: Option<Arc<Cache>>,
}

/// Within this time after the last fault every key must have its answer. It is longer than the longest lease, attempt
/// and pause together.
pub const SOON: Duration = Duration::from_secs(30);

/// No attempt takes longer, once there are no faults, nor does settling it.
const LONGEST: Duration = Duration::from_secs(10);

/// Nobody looks at what they count.
pub static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

/// Plays the run of a seed. The same seed gives the same history.
pub fn run(seed: u64, mutant: Option<Mutant>) -> Run {
    let runtime = runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    // The ids of requests, which clients see in problems.
    fastrand::seed(seed);
    runtime.block_on(async {
        let mut dice = Dice::of(seed);
        let world = World::new(&mut dice, mutant);
        world.play(&mut dice).await;
        Run { setup: world.setup.clone(), history: world.history.take(), ledger: world.shelf.ledger.take() }
    })
}

impl World {
    fn new(dice: &mut Dice, mutant: Option<Mutant>) -> Arc<Self> {
        let history = History::begin();
        let clock = history.clone();
        let memory = Arc::new(Memory::with_clock(Arc::new(move || Timestamp(EPOCH + clock.now()))));
        let books = Arc::new(Books::new(Arc::clone(&memory), history.clone()));
        let shelf = Arc::new(Shelf { memory, books, ledger: Ledger::default(), seen: Seen::default(), mutant });
        let setup = Setup::draw(dice);
        let site = Site::new(history.clone(), dice.fork(), setup.clone(), Arc::clone(&shelf));
        let is_shared = setup.gates > 1 && dice.percent(60);
        Arc::new(Self {
            setup,
            cache: is_shared.then(|| Cache::new(history.clone(), dice.fork())),
            labels: labels(dice),
            history,
            shelf,
            site,
            gates: Mutex::default(),
            kept: Mutex::default(),
            lives: AtomicU32::new(0),
            requests: AtomicU32::new(0),
            calm: AtomicBool::new(false),
        })
    }

    pub fn is_calm(&self) -> bool {
        self.calm.load(Ordering::Relaxed)
    }

    pub fn next_request(&self) -> Request {
        Request(self.requests.fetch_add(1, Ordering::Relaxed))
    }

    /// A gate that takes clients, if there is one.
    pub fn any_gate(&self, dice: &mut Dice) -> Option<Arc<Life>> {
        let accepting: Vec<_> = self.gates().into_iter().filter(|life| life.accepts()).collect();
        if accepting.is_empty() { None } else { Some(dice.pick(&accepting)) }
    }

    fn gates(&self) -> Vec<Arc<Life>> {
        self.gates.lock().unwrap().clone()
    }

    async fn play(self: &Arc<Self>, dice: &mut Dice) {
        for slot in 0..self.setup.gates {
            let life = self.begin(slot, dice);
            self.gates.lock().unwrap().push(life);
        }
        let length = dice.millis(3_000..12_000);
        let mut clients = JoinSet::new();
        for _ in 0..dice.within(4..12) {
            let errand = Errand {
                label: dice.pick(&self.labels),
                variant: if dice.percent(85) { 0 } else { 1 },
                tries: dice.within(1..5) as u32,
                start: dice.millis(0..length.as_millis() as u64 * 2 / 3),
            };
            clients.spawn(pursue(Arc::clone(self), errand, dice.fork()));
        }
        let faults = tokio::spawn(Arc::clone(self).go_wrong(length, dice.fork()));
        faults.await.unwrap();
        self.calm_down(dice).await;
        while let Some(client) = clients.join_next().await {
            client.unwrap();
        }
        self.probe(dice).await;
    }

    /// A gate begins to live in a place.
    fn begin(&self, slot: usize, dice: &mut Dice) -> Arc<Life> {
        let number = LifeNumber(self.lives.fetch_add(1, Ordering::Relaxed) + 1);
        let life = Life::new(number, slot, self.history.clone());
        let recorded = Arc::new(Recorded { shelf: Arc::clone(&self.shelf), life: Arc::clone(&life) });
        let faults = Arc::new(Unreliable::new(Arc::clone(&recorded) as _));
        let pace = self.pace(dice);
        if !self.is_calm() && dice.percent(60) {
            faults.seed(dice.seed(), Some(rates(dice)));
        }
        let link = Link::new(Arc::clone(&faults) as _, Arc::clone(&life), dice.fork(), pace);
        let store = Believer::before(self.remembering(Arc::new(link), &life, dice), &self.shelf);
        let settings = Settings {
            service: "sim".into(),
            id_secret: None,
            other_id_secrets: Vec::new(),
            settle_timeout: self.setup.settle_timeout,
            headers: HeaderNames {
                status: Some(HeaderName::from_static("idempotency-status")),
                replayed: Some(HeaderName::from_static("idempotent-replayed")),
                expires: Some(HeaderName::from_static("idempotency-expires")),
            },
            own_headers: oncegate::http::headers::OwnHeaders::default(),
            default_upstream: None,
            forwarding: Forwarding::default(),
            upgrades: oncegate::http::upgrade::Upgrades::default(),
            policy_page: None,
            tokens: Tokens::counted_from(Token::first_of(number).0),
            jwt: None,
        };
        let usage = Usage::new(&Limits::default(), &METRICS);
        let (router, upstreams) =
            (self.setup.router(self.shelf.mutant), upstreams(&self.site, &life, &self.setup, &usage));
        let gate = Gate::new(settings, router, upstreams, Arc::clone(&store), usage, &METRICS);
        // A gate does so before it serves. The store is in memory, and answers at once.
        let (origins, rules) = gate.identities();
        let adopted = recorded.adopt(origins, rules, false).now_or_never();
        assert!(adopted.is_some_and(|adopted| adopted.is_ok_and(|changes| changes.is_empty())));
        let known = Arc::downgrade(&store);
        let (renewing, stop) = (Arc::clone(&gate), life.stop());
        tokio::spawn(async move { renewing.renew_leases(stop).await });
        let (asking, mut stop) = (Arc::clone(&gate), life.stop());
        tokio::spawn(async move {
            tokio::select! {
                biased;
                () = stopped(&mut stop) => {}
                () = gate::ask_about_unknown(move || Arc::clone(&asking)) => {}
            }
        });
        if dice.percent(70) || self.is_calm() {
            let every = worker::Settings {
                reap_every: dice.millis(200..1_500),
                sweep_every: dice.millis(300..3_000),
                ..worker::Settings::default()
            };
            drop(worker::spawn(store, None, METRICS.clone(), every, life.stop()));
        }
        assert!(life.gate.set(Arc::downgrade(&gate)).is_ok() && life.faults.set(Arc::downgrade(&faults)).is_ok());
        assert!(life.store.set(known).is_ok());
        self.kept.lock().unwrap().push((gate, faults));
        life
    }

    fn pace(&self, dice: &mut Dice) -> Pace {
        if self.is_calm() {
            return Pace::Quick;
        }
        dice.weighted(&[(2, Pace::Instant), (3, Pace::Quick), (2, Pace::Slow)])
    }

    /// Most gates remember what they read, and share that where there is a cache.
    fn remembering(&self, store: Arc<dyn Store>, life: &Arc<Life>, dice: &mut Dice) -> Arc<dyn Store> {
        if !dice.percent(75) {
            return store;
        }
        let settings = cached::Settings { most_entries: 100, most_bytes: 1 << 20, max_age: self.setup.max_age };
        let shared = self.cache.as_ref().map(|cache| {
            let wire = Wire::new(Arc::clone(cache), Arc::clone(life), dice.fork(), self.pace(dice));
            assert!(life.wire.set(Arc::downgrade(&wire)).is_ok());
            let time = (Timestamp(EPOCH + self.history.now()), Instant::now());
            let secrets = [b"the id secret".as_slice(), b"the store's own"].map(Arc::from);
            SharedSettings { remote: Arc::new(Sender(wire)), secrets, other_secrets: Vec::new(), time }
        });
        let (history, number) = (self.history.clone(), life.number);
        let tell = move |answered| history.add(Event::Recalled { life: number, answered });
        Arc::new(Cached::new(store, &settings, shared, tell))
    }

    /// What goes wrong, for as long as it does.
    async fn go_wrong(self: Arc<Self>, length: Duration, mut dice: Dice) {
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
                life.gate().drain(dice.millis(0..3_000)).await;
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
                sleep(time * 2).await;
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
                // Whether it was done, the records tell.
                drop(life.store().remove(id_of(label)).await);
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

    /// Begins another life in the place of a dead one, unless one has begun already.
    fn revive(&self, dead: &Arc<Life>, dice: &mut Dice) {
        if Arc::ptr_eq(&self.gates()[dead.slot], dead) {
            let life = self.begin(dead.slot, dice);
            self.gates.lock().unwrap()[dead.slot] = life;
        }
    }

    /// Ends every fault.
    async fn calm_down(&self, dice: &mut Dice) {
        self.calm.store(true, Ordering::Relaxed);
        self.site.calm();
        for life in self.gates() {
            life.calm();
            if !life.accepts() {
                life.die();
                self.revive(&life, dice);
                continue;
            }
            life.faults().set_away(false);
            life.faults().seed(0, None);
            life.stall_store(false);
            life.stall_clients(false);
            life.stall_upstreams(false);
            life.set_reach(Reach::Open);
            if let Some(wire) = life.wire() {
                wire.set_mood(Mood::Well);
            }
        }
        if let Some(cache) = &self.cache {
            cache.set_notices(Notices::Once);
        }
        self.history.add(Event::Calm);
    }

    /// Asks every gate for every key until each has answered for good, or nobody can wait any longer.
    async fn probe(self: &Arc<Self>, dice: &mut Dice) {
        let end = Instant::now() + SOON;
        let mut open: Vec<(Label, usize, Arc<Life>)> = Vec::new();
        for life in self.gates() {
            open.extend(self.labels.iter().map(|label| (*label, 0, Arc::clone(&life))));
        }
        while !open.is_empty() && Instant::now() < end {
            let mut still = Vec::new();
            for (label, variant, life) in open {
                let errand = Errand { label, variant, tries: 1, start: Duration::ZERO };
                let answer = ask(self, &life, errand, true, dice.fork()).await;
                match answer.as_ref().map(Answer::word) {
                    Some(word) if is_final(word, self.setup.policy(label)) => {}
                    // It stands for the other request.
                    Some("key-reused") => still.push((label, (variant + 1) % VARIANTS, life)),
                    _ => still.push((label, variant, life)),
                }
            }
            open = still;
            if !open.is_empty() {
                sleep(Duration::from_secs(1)).await;
            }
        }
        sleep(LONGEST).await;
    }
}

/// Whether an answer is one for good. Where the upstream can be asked, no outcome stays unknown.
pub fn is_final(word: &str, policy: &Policy) -> bool {
    match word {
        "executed" | "replayed" | "recovered" | "released" | "response-not-stored" => true,
        "outcome-unknown" => !matches!(policy.recovery, Recovery::Probe(_)),
        _ => false,
    }
}

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

fn rates(dice: &mut Dice) -> Rates {
    let worst = dice.pick(&[20, 100, 250]);
    let mut rate = || dice.within(0..worst) as u16;
    let (refuse, lose_answer, lose_call, delay) = (rate(), rate(), rate(), rate());
    Rates { refuse, lose_answer, lose_call, delay, longest: dice.millis(1..3_000) }
}

/// What clients of a run ask for: few keys, so that they meet.
fn labels(dice: &mut Dice) -> Vec<Label> {
    let mut labels = Vec::new();
    for _ in 0..dice.within(1..4) {
        let route = dice.weighted(&[(4, 0), (4, 1), (1, 2), (4, PROBE), (3, RESEND)]);
        let label = Label { route, tenant: 0, key: dice.within(0..KEYS as u64) as usize };
        labels.push(label);
        if dice.percent(40) {
            labels.push(Label { tenant: 1, ..label });
        }
    }
    labels.sort_unstable();
    labels.dedup();
    assert!(labels.iter().all(|label| label.route < PATHS.len() && label.tenant < TENANTS.len()) && VARIANTS == 2);
    labels
}
