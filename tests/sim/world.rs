//! A run: gates on one store, an upstream, clients, and what goes wrong.

mod faults;

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
use oncegate::store::deliveries::Deliveries;
use oncegate::store::memory::Memory;
use oncegate::store::unreliable::Unreliable;
use oncegate::telemetry::metrics::Metrics;
use oncegate::worker;
use tokio::runtime;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use self::faults::rates;
use crate::believer::{Believer, Seen};
use crate::books::{Books, Recorded};
use crate::client::{Errand, ask, pursue};
use crate::dice::Dice;
use crate::history::{Answer, EPOCH, Entry, Event, History, Label, LifeNumber, Poll, Request, Token};
use crate::ledger::{Ledger, Line};
use crate::life::{Life, Reach};
use crate::link::{Link, Pace};
use crate::mutant::{Mutant, Shelf};
use crate::remote::{Cache, Mood, Notices, Sender, Wire};
use crate::setup::{ACCEPT, KEYS, PATHS, PROBE, RESEND, Setup, TENANTS, VARIANTS};
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
    polls: AtomicU32,
    calm: AtomicBool,
    /// What clients ask for.
    labels: Vec<Label>,
    /// What gates share besides the store, if they do.
    cache: Option<Arc<Cache>>,
}

/// Within this time after the last fault every key must have its answer. It is longer than the longest lease, attempt
/// and pause together.
pub const SOON: Duration = Duration::from_secs(30);

/// As long as that, what a gate took that has died is still held, or is being delivered then.
const HELD: Duration = Duration::from_secs(15);

/// No attempt takes longer, once there are no faults, nor does settling it.
const LONGEST: Duration = Duration::from_secs(10);

/// Nobody looks at what they count.
pub static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

/// Plays the run of a seed. The same seed gives the same history.
pub fn run(seed: u64, mutant: Option<Mutant>) -> Run {
    // Where a mistake is about records, they alone show it best.
    play(seed, mutant, mutant.is_none_or(Mutant::is_of_deliveries))
}

/// The same without the route that accepts requests: what its store was asked is about records alone.
pub fn run_of_records(seed: u64) -> Run {
    play(seed, None, false)
}

/// Whether a run has a route that accepts requests.
pub fn accepts(seed: u64) -> bool {
    Setup::draw(&mut Dice::of(seed)).accepts
}

fn play(seed: u64, mutant: Option<Mutant>, may_accept: bool) -> Run {
    let runtime = runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    // The ids of requests, which clients see in problems.
    fastrand::seed(seed);
    runtime.block_on(async {
        let mut dice = Dice::of(seed);
        let mut setup = Setup::draw(&mut dice);
        setup.accepts &= may_accept;
        let world = World::new(setup, &mut dice, mutant);
        world.play(&mut dice).await;
        Run { setup: world.setup.clone(), history: world.history.take(), ledger: world.shelf.ledger.take() }
    })
}

impl World {
    fn new(setup: Setup, dice: &mut Dice, mutant: Option<Mutant>) -> Arc<Self> {
        let history = History::begin();
        let clock = history.clone();
        let memory = Arc::new(Memory::with_clock(Arc::new(move || Timestamp(EPOCH + clock.now()))));
        let books = Arc::new(Books::new(Arc::clone(&memory), history.clone()));
        let shelf = Arc::new(Shelf { memory, books, ledger: Ledger::default(), seen: Seen::default(), mutant });
        let site = Site::new(history.clone(), dice.fork(), setup.clone(), Arc::clone(&shelf));
        let is_shared = setup.gates > 1 && dice.percent(60);
        Arc::new(Self {
            cache: is_shared.then(|| Cache::new(history.clone(), dice.fork())),
            labels: labels(&setup, dice),
            setup,
            history,
            shelf,
            site,
            gates: Mutex::default(),
            kept: Mutex::default(),
            lives: AtomicU32::new(0),
            requests: AtomicU32::new(0),
            polls: AtomicU32::new(0),
            calm: AtomicBool::new(false),
        })
    }

    pub fn is_calm(&self) -> bool {
        self.calm.load(Ordering::Relaxed)
    }

    pub fn next_request(&self) -> Request {
        Request(self.requests.fetch_add(1, Ordering::Relaxed))
    }

    pub fn next_poll(&self) -> Poll {
        Poll(self.polls.fetch_add(1, Ordering::Relaxed))
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
        let mut apart = dice.apart();
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
        if self.setup.accepts {
            let accepted: Vec<Label> = self.labels.iter().copied().filter(|label| label.route == ACCEPT).collect();
            for _ in 0..apart.within(3..7) {
                let errand = Errand {
                    label: apart.pick(&accepted),
                    variant: if apart.percent(90) { 0 } else { 1 },
                    tries: apart.within(1..5) as u32,
                    start: apart.millis(0..length.as_millis() as u64 * 2 / 3),
                };
                clients.spawn(pursue(Arc::clone(self), errand, apart.fork()));
            }
            // It ends with the run.
            tokio::spawn(Arc::clone(self).operate(accepted, apart));
        }
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
        let keeps_deliveries = self.setup.accepts;
        let recorded = Arc::new(Recorded { shelf: Arc::clone(&self.shelf), life: Arc::clone(&life), keeps_deliveries });
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
        if self.setup.accepts {
            let delivering = Arc::clone(&gate);
            tokio::spawn(gate::deliver_accepted(move || Arc::clone(&delivering), life.stop()));
        }
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
                    Some(_) if answer.as_ref().is_some_and(|answer| is_final(answer, self.setup.policy(label))) => {}
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
        for _ in 0..HELD.as_secs() {
            let deliveries = self.shelf.memory.count_deliveries().await.unwrap();
            if deliveries.iter().all(|count| count.queued == 0) {
                break;
            }
            sleep(Duration::from_secs(1)).await;
        }
    }
}

/// Whether an answer is one for good. Where the upstream can be asked, no outcome stays unknown.
pub fn is_final(answer: &Answer, policy: &Policy) -> bool {
    match answer.word() {
        // It was given up.
        "accepted" => answer.body.windows(6).any(|text| text == b"\"dead\""),
        "executed" | "replayed" | "recovered" | "released" | "response-not-stored" => true,
        "outcome-unknown" => !matches!(policy.recovery, Recovery::Probe(_)),
        _ => false,
    }
}

/// What clients of a run ask for: few keys, so that they meet.
fn labels(setup: &Setup, dice: &mut Dice) -> Vec<Label> {
    let mut apart = dice.apart();
    let mut labels = Vec::new();
    for _ in 0..dice.within(1..4) {
        let route = dice.weighted(&[(4, 0), (4, 1), (1, 2), (4, PROBE), (3, RESEND)]);
        let label = Label { route, tenant: 0, key: dice.within(0..KEYS as u64) as usize };
        labels.push(label);
        if dice.percent(40) {
            labels.push(Label { tenant: 1, ..label });
        }
    }
    if setup.accepts {
        // Those of one tenant wait for one another, where that is the order.
        let label = |tenant, key| Label { route: ACCEPT, tenant, key };
        labels.extend((0..apart.within(1..4) as usize).map(|key| label(0, key)));
        labels.extend(apart.percent(40).then(|| label(1, 0)));
    }
    labels.sort_unstable();
    labels.dedup();
    assert!(labels.iter().all(|label| label.route < PATHS.len() && label.tenant < TENANTS.len()) && VARIANTS == 2);
    labels
}
