//! Waiting for something to become true, never for time to pass.

use std::sync::{Arc, Condvar, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The longest that anything may take on a machine that is busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A latch that one side opens and others wait for.
#[derive(Clone, Default)]
pub struct Signal(Arc<(Mutex<bool>, Condvar)>);

impl Signal {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    /// Waits until it is open; gives up after [`PATIENCE`] so that no thread outlives its test for long.
    pub fn wait(&self) {
        let guard = self.0.0.lock().unwrap();
        drop(self.0.1.wait_timeout_while(guard, PATIENCE, |open| !*open).unwrap());
    }
}

/// Asks again until there is an answer.
#[track_caller]
pub fn eventually<T>(what: &str, ask: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, what, ask)
}

/// The same for what takes a busy machine longer.
#[track_caller]
pub fn within<T>(patience: Duration, what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < patience, "not within {patience:?}: {what}");
        sleep(Duration::from_millis(10));
    }
}

/// How often [`Awake`] looks, and how late it may be on a machine that is merely busy: more than that stood still.
const BEAT: Duration = Duration::from_millis(10);
const LATE: Duration = Duration::from_millis(100);

/// A clock that leaves out the times at which the machine stood still, for bounds on what the product takes: a thread
/// sleeps for a moment again and again, and notices how late it wakes up.
pub struct Awake {
    began: Instant,
    beats: Arc<Mutex<Beats>>,
}

struct Beats {
    last: Instant,
    stood_still: Duration,
}

impl Beats {
    fn stood_still(&self, now: Instant) -> Duration {
        self.stood_still + now.saturating_duration_since(self.last).saturating_sub(BEAT + LATE)
    }
}

impl Awake {
    pub fn start() -> Self {
        let began = Instant::now();
        let beats = Arc::new(Mutex::new(Beats { last: began, stood_still: Duration::ZERO }));
        let beating = Arc::downgrade(&beats);
        std::thread::spawn(move || {
            while let Some(beats) = beating.upgrade() {
                let mut beats = beats.lock().unwrap();
                let now = Instant::now();
                beats.stood_still = beats.stood_still(now);
                beats.last = now;
                drop(beats);
                sleep(BEAT);
            }
        });
        Self { began, beats }
    }

    /// How long it has been since the start, without the times at which the machine stood still.
    pub fn elapsed(&self) -> Duration {
        let beats = self.beats.lock().unwrap();
        let now = Instant::now();
        now.duration_since(self.began).saturating_sub(beats.stood_still(now))
    }
}
