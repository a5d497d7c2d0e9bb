//! Whether requests should be sent to this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use super::State;
use crate::store::Store;

/// How long the store may take to answer, for the process to be ready.
const PING_DEADLINE: Duration = Duration::from_secs(1);

/// How long an answer of the store stands for the next question, so that probes do not load it.
const PING_AGE: Duration = Duration::from_secs(1);

/// The reason of a process that serves while its store is away.
pub(super) const STORE_UNAVAILABLE: &str = "store-unavailable";

/// The reason of a process that serves and could not fetch the keys of tokens so far.
pub(super) const NO_TOKEN_KEYS: &str = "waiting-for-token-keys";

/// Where the life of the process stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It is being set up.
    Starting,
    /// Another process holds the store.
    WaitingForStoreLock,
    /// The store cannot be reached.
    WaitingForStore,
    /// It takes requests.
    Ready,
    /// It finishes what it has, and takes no more.
    Draining,
}

/// The phase of the process, shared between those that change it and those that ask. Starts with
/// [`Phase::Starting`]; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Readiness {
    index: Arc<AtomicU8>,
    lacks_token_keys: Arc<AtomicBool>,
    claims_stopped: Arc<AtomicBool>,
}

impl Phase {
    const ALL: [Self; 5] =
        [Self::Starting, Self::WaitingForStoreLock, Self::WaitingForStore, Self::Ready, Self::Draining];

    /// The word for it: `starting`, `waiting-for-store-lock`, `waiting-for-store`, `ready` or `draining`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::WaitingForStoreLock => "waiting-for-store-lock",
            Self::WaitingForStore => "waiting-for-store",
            Self::Ready => "ready",
            Self::Draining => "draining",
        }
    }
}

impl Readiness {
    /// Changes the phase. A process that drains stays so, whatever is still being set up.
    pub fn set(&self, phase: Phase) {
        let _ = self.index.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            (now != Phase::Draining as u8).then_some(phase as u8)
        });
    }

    /// Says whether there are keys to verify tokens with, where tokens are verified.
    pub fn set_token_keys(&self, has_keys: bool) {
        self.lacks_token_keys.store(!has_keys, Ordering::Release);
    }

    /// Says whether the routes that a reload was to change claim nothing, because it failed and the store cannot be set back.
    pub fn set_claims_stopped(&self, are_stopped: bool) {
        self.claims_stopped.store(are_stopped, Ordering::Release);
    }

    /// Whether routes claim nothing: see [`Readiness::set_claims_stopped`].
    #[must_use]
    pub fn are_claims_stopped(&self) -> bool {
        self.claims_stopped.load(Ordering::Acquire)
    }

    /// The phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        Phase::ALL[usize::from(self.index.load(Ordering::Acquire))]
    }
}

impl State {
    /// Nothing if requests should be sent here, else the reason why not.
    pub(super) async fn why_not_ready(&self) -> Option<&'static str> {
        let phase = self.readiness.phase();
        if phase != Phase::Ready {
            return Some(phase.as_str());
        }
        if self.readiness.lacks_token_keys.load(Ordering::Acquire) {
            return Some(NO_TOKEN_KEYS);
        }
        if self.readiness.are_claims_stopped() {
            return Some(STORE_UNAVAILABLE);
        }
        let answers = match self.store.get() {
            Some(store) => self.ping.answers(&**store).await,
            None => false,
        };
        (!answers).then_some(STORE_UNAVAILABLE)
    }
}

/// Whether the store answers, asked at most once in [`PING_AGE`].
#[derive(Default)]
pub(super) struct Ping {
    last: Mutex<Option<(Instant, bool)>>,
}

impl Ping {
    async fn answers(&self, store: &dyn Store) -> bool {
        // Held during the probe: concurrent requests get the same answer.
        let mut last = self.last.lock().await;
        if let Some((asked, answered)) = *last
            && asked.elapsed() < PING_AGE
        {
            return answered;
        }
        let answered = matches!(tokio::time::timeout(PING_DEADLINE, store.ping()).await, Ok(Ok(())));
        *last = Some((Instant::now(), answered));
        answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_survives_being_set() {
        for phase in Phase::ALL {
            let readiness = Readiness::default();
            readiness.set(phase);
            assert_eq!(readiness.phase(), phase);
        }
    }

    #[test]
    fn draining_is_the_end() {
        let readiness = Readiness::default();
        readiness.set(Phase::Draining);
        readiness.set(Phase::Ready);
        assert_eq!(readiness.phase(), Phase::Draining);
    }
}
