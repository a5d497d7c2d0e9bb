//! Waiting for something to become true, never for time to pass.

use std::sync::{Arc, Condvar, Mutex};
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
        std::thread::sleep(Duration::from_millis(10));
    }
}
