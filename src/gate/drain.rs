//! What a shutdown waits for, and how what runs learns that it waits no longer.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::sync::{Notify, watch};

use crate::http::shards;

/// All that a drain goes by.
pub(super) struct Drain {
    /// Attempts, and requests that are only forwarded, must end.
    is_over: AtomicBool,
    /// One for each thread that serves connections: threads that share none do not slow each other down.
    parts: Box<[Part]>,
    /// Each protected request holds a receiver until it has ended.
    pub(super) requests: watch::Sender<()>,
    /// Each connection that has switched to another protocol holds a receiver until it has ended.
    pub(super) tunnels: watch::Sender<()>,
}

/// What one thread has of it, on cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Part {
    /// Wakes what waits for the end of the drain, in the order in which it came.
    over: Notify,
    /// How many requests have no answer yet.
    unanswered: AtomicUsize,
}

/// A request that has no answer yet.
pub(super) struct Unanswered<'a>(&'a AtomicUsize);

impl Drain {
    /// A request arrives.
    pub(super) fn arrived(&self) -> Unanswered<'_> {
        let unanswered = &self.part().unanswered;
        unanswered.fetch_add(1, Ordering::Relaxed);
        Unanswered(unanswered)
    }

    /// Whether a client waits for an answer.
    pub(super) fn owes_answers(&self) -> bool {
        self.parts.iter().any(|part| part.unanswered.load(Ordering::Relaxed) > 0)
    }

    /// From now on it is over: what runs must end.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        for part in &self.parts {
            part.over.notify_waiters();
        }
    }

    /// Whether it is over.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// Waits until it is over.
    pub(super) async fn over(&self) {
        // From its creation on it is woken, also by what comes before it waits.
        let over = self.part().over.notified();
        if !self.is_over() {
            over.await;
        }
    }

    /// What something comes to; nothing where the drain is over first.
    pub(super) async fn unless_over<T>(&self, something: impl Future<Output = T>) -> Option<T> {
        // Most is there at once: then the other is not polled.
        tokio::select! {
            biased;
            done = something => Some(done),
            () = self.over() => None,
        }
    }

    fn part(&self) -> &Part {
        &self.parts[shards::index()]
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for Drain {
    fn default() -> Self {
        Self {
            is_over: AtomicBool::new(false),
            parts: (0..shards::count()).map(|_| Part::default()).collect(),
            requests: watch::Sender::new(()),
            tunnels: watch::Sender::new(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn what_waits_is_woken_and_what_comes_later_does_not_wait() {
        let drain = Drain::default();
        let mut waiting = Box::pin(drain.over());
        let unpolled = drain.over();
        assert!(waiting.as_mut().now_or_never().is_none());
        assert_eq!(drain.unless_over(async { 1 }).now_or_never(), Some(Some(1)));
        assert_eq!(drain.unless_over(std::future::pending::<()>()).now_or_never(), None);
        drain.end();
        assert!(waiting.now_or_never().is_some() && unpolled.now_or_never().is_some());
        assert!(drain.over().now_or_never().is_some() && drain.is_over());
        assert_eq!(drain.unless_over(std::future::pending::<()>()).now_or_never(), Some(None));
    }

    #[test]
    fn answers_are_owed_until_the_last_request_has_one() {
        let drain = Drain::default();
        let (one, other) = (drain.arrived(), drain.arrived());
        drop(one);
        assert!(drain.owes_answers());
        drop(other);
        assert!(!drain.owes_answers());
    }
}
