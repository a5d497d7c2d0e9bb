//! One life of a gate: what it is connected to, and its death.
//!
//! A gate that dies does not run any more in reality. Here its tasks go on, and nothing of them gets out: each of its
//! connections ends at that moment, what it asks of its store or upstream from then on is never done and never
//! answered, and what was on its way to the store may be done or not, as chance has it.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use oncegate::gate::Gate;
use oncegate::store::Store;
use oncegate::store::unreliable::{Side, Unreliable};
use tokio::sync::{Notify, watch};

use crate::history::{Event, History, LifeNumber};
use crate::pipe::Cable;
use crate::remote::Wire;

pub struct Life {
    pub number: LifeNumber,
    /// Which gate it is a life of.
    pub slot: usize,
    /// The world keeps it: what it is made of knows its life.
    pub gate: OnceLock<Weak<Gate>>,
    /// What fails between it and the store.
    pub faults: OnceLock<Weak<Unreliable>>,
    /// All that it asks for records.
    pub store: OnceLock<Weak<dyn Store>>,
    /// The way to the cache that it shares, if it does.
    pub wire: OnceLock<Weak<Wire>>,
    pub history: History,
    dead: AtomicBool,
    drained: AtomicBool,
    calm: AtomicBool,
    /// One for each who is to be told: `tokio::sync::watch` wakes in an order of chance.
    stops: Mutex<Vec<watch::Sender<bool>>>,
    /// Whether nothing passes between it and its store.
    stalled: AtomicBool,
    passes: Notify,
    /// How often its connections to the store broke.
    breaks: AtomicU32,
    broke: Notify,
    reach: Mutex<Reach>,
    fuse: Mutex<Option<Fuse>>,
    clients: Mutex<Vec<Cable>>,
    upstreams: Mutex<Vec<Cable>>,
}

/// What becomes of new connections to the upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    Open,
    Refused,
    /// They never open.
    Silent,
}

/// How a gate is to die by itself.
#[derive(Clone, Copy, Debug)]
pub enum Fuse {
    /// At the so-many-th call of its store, before or after its effect.
    StoreCall(u32, Side),
    /// When the first byte of the so-many-th request has left for the upstream.
    Write(u32),
}

impl Life {
    pub fn new(number: LifeNumber, slot: usize, history: History) -> Arc<Self> {
        history.add(Event::Born { life: number, slot });
        Arc::new(Self {
            number,
            slot,
            history,
            gate: OnceLock::new(),
            faults: OnceLock::new(),
            store: OnceLock::new(),
            wire: OnceLock::new(),
            dead: AtomicBool::new(false),
            drained: AtomicBool::new(false),
            calm: AtomicBool::new(false),
            stops: Mutex::default(),
            stalled: AtomicBool::new(false),
            passes: Notify::new(),
            breaks: AtomicU32::new(0),
            broke: Notify::new(),
            reach: Mutex::new(Reach::Open),
            fuse: Mutex::default(),
            clients: Mutex::default(),
            upstreams: Mutex::default(),
        })
    }

    pub fn gate(&self) -> Arc<Gate> {
        self.gate.get().and_then(Weak::upgrade).unwrap()
    }

    pub fn faults(&self) -> Arc<Unreliable> {
        self.faults.get().and_then(Weak::upgrade).unwrap()
    }

    pub fn store(&self) -> Arc<dyn Store> {
        self.store.get().and_then(Weak::upgrade).unwrap()
    }

    pub fn wire(&self) -> Option<Arc<Wire>> {
        self.wire.get().and_then(Weak::upgrade)
    }

    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// Whether it takes new clients.
    pub fn accepts(&self) -> bool {
        !self.is_dead() && !self.drained.load(Ordering::Relaxed)
    }

    /// Turns true when it is to end.
    pub fn stop(&self) -> watch::Receiver<bool> {
        let (stop, stopped) = watch::channel(!self.accepts());
        self.stops.lock().unwrap().push(stop);
        stopped
    }

    fn tell_to_stop(&self) {
        for stop in &*self.stops.lock().unwrap() {
            stop.send_replace(true);
        }
    }

    fn set_stalled(&self, stalled: bool) {
        self.stalled.store(stalled, Ordering::Relaxed);
        self.passes.notify_waiters();
    }

    /// From now on no fuse kills it.
    pub fn calm(&self) {
        self.calm.store(true, Ordering::Relaxed);
        self.light(None);
    }

    /// A fuse has burnt down.
    pub fn die_of_fuse(&self) {
        if !self.calm.load(Ordering::Relaxed) {
            self.die();
        }
    }

    /// Dies here and now.
    pub fn die(&self) {
        if self.dead.swap(true, Ordering::Relaxed) {
            return;
        }
        self.history.add(Event::Died { life: self.number });
        for cable in self.clients.lock().unwrap().drain(..).chain(self.upstreams.lock().unwrap().drain(..)) {
            cable.kill();
        }
        self.tell_to_stop();
        self.set_stalled(false);
    }

    /// Is told to end, as by SIGTERM.
    pub fn drain(&self) {
        self.drained.store(true, Ordering::Relaxed);
        self.history.add(Event::Drained { life: self.number });
        self.tell_to_stop();
    }

    /// Notes a connection, so that it ends with this life.
    pub fn holds_client(&self, cable: &Cable) {
        hold(&self.clients, cable);
    }

    pub fn holds_upstream(&self, cable: &Cable) {
        hold(&self.upstreams, cable);
    }

    pub fn reach(&self) -> Reach {
        *self.reach.lock().unwrap()
    }

    pub fn set_reach(&self, reach: Reach) {
        *self.reach.lock().unwrap() = reach;
        self.fault(format!("new connections to the upstream: {reach:?}"));
    }

    /// Nothing passes between it and its store, or everything again.
    pub fn stall_store(&self, stalled: bool) {
        self.set_stalled(stalled);
        self.fault(format!("the way to the store is stalled: {stalled}"));
    }

    /// Waits until something can pass between it and its store.
    pub async fn store_passes(&self) {
        while self.stalled.load(Ordering::Relaxed) {
            self.passes.notified().await;
        }
    }

    /// Its connections to the store break. It hears so of all calls that are under way.
    pub fn break_store(&self) {
        self.breaks.fetch_add(1, Ordering::Relaxed);
        self.broke.notify_waiters();
        self.fault("its connections to the store break".to_owned());
    }

    pub fn store_breaks(&self) -> u32 {
        self.breaks.load(Ordering::Relaxed)
    }

    /// Waits until its connections to the store have broken more often than that.
    pub async fn store_broke(&self, breaks: u32) {
        while self.store_breaks() == breaks {
            self.broke.notified().await;
        }
    }

    pub fn stall_clients(&self, stalled: bool) {
        self.clients.lock().unwrap().iter().for_each(|cable| cable.stall(stalled));
        self.fault(format!("its clients are stalled: {stalled}"));
    }

    pub fn stall_upstreams(&self, stalled: bool) {
        self.upstreams.lock().unwrap().iter().for_each(|cable| cable.stall(stalled));
        self.fault(format!("its upstream connections are stalled: {stalled}"));
    }

    /// Resets every connection to the upstream.
    pub fn cut_upstreams(&self) {
        self.history.add(Event::Cut { life: self.number });
        self.upstreams.lock().unwrap().drain(..).for_each(|cable| cable.reset());
    }

    pub fn fault(&self, what: String) {
        self.history.add(Event::Fault { life: self.number, what });
    }

    pub fn light(&self, fuse: Option<Fuse>) {
        *self.fuse.lock().unwrap() = fuse;
    }

    /// A call of its store begins: on which side of its effect the gate dies, if it does.
    pub fn burn_at_call(&self) -> Option<Side> {
        let mut fuse = self.fuse.lock().unwrap();
        match *fuse {
            Some(Fuse::StoreCall(0, side)) => {
                *fuse = None;
                Some(side)
            }
            Some(Fuse::StoreCall(left, side)) => {
                *fuse = Some(Fuse::StoreCall(left - 1, side));
                None
            }
            Some(Fuse::Write(_)) | None => None,
        }
    }

    /// A request begins to leave for the upstream.
    pub fn burn_at_write(&self) {
        let burnt = {
            let mut fuse = self.fuse.lock().unwrap();
            match *fuse {
                Some(Fuse::Write(0)) => true,
                Some(Fuse::Write(left)) => {
                    *fuse = Some(Fuse::Write(left - 1));
                    false
                }
                Some(Fuse::StoreCall(..)) | None => false,
            }
        };
        if burnt {
            self.die_of_fuse();
        }
    }
}

fn hold(cables: &Mutex<Vec<Cable>>, cable: &Cable) {
    let mut cables = cables.lock().unwrap();
    cables.retain(Cable::is_open);
    cables.push(cable.clone());
}
