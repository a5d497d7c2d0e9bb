//! What was tried with the messages of a consumer. It outlasts a connection: the broker delivers them again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::gate::Tries;

/// How many messages at most to remember the attempts of, beside those in hand.
const REMEMBERED: usize = 10_000;

/// A message that has not come back for so long ended at another gate. The next one with its key counts from the beginning.
const FORGOTTEN: Duration = Duration::from_secs(60 * 60);

/// The attempts of messages, by their keys.
#[derive(Clone, Default)]
pub(super) struct AttemptLog(Arc<Mutex<Entries>>);

#[derive(Default)]
struct Entries {
    of: HashMap<Bytes, Attempts>,
    /// How many of them are not in hand.
    away: usize,
}

/// What was tried with a message.
struct Attempts {
    count: u32,
    /// When the first of them began.
    since: Option<Instant>,
    /// When the next attempt may begin.
    next: Instant,
    is_given_up: bool,
    /// How many have it in hand: one, or none since then.
    holders: u32,
    left: Instant,
}

/// A message in hand. Dropped, it leaves what was tried to the next connection.
pub(super) struct MessageInHand {
    log: AttemptLog,
    key: Bytes,
}

impl AttemptLog {
    /// The message with this key is in hand.
    pub(super) fn hold(&self, key: Bytes) -> MessageInHand {
        let (mut entries, now) = (self.entries(), Instant::now());
        entries.make_room();
        let known = entries.of.get(&key);
        if known.is_some_and(|known| known.holders == 0) {
            entries.away -= 1;
            if entries.of[&key].is_forgotten(now) {
                entries.of.remove(&key);
            }
        }
        entries.of.entry(key.clone()).or_insert_with(|| Attempts::new(now)).holders += 1;
        drop(entries);
        MessageInHand { log: self.clone(), key }
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    /// Forgets the half that has been away for the longest time, where there are many.
    fn make_room(&mut self) {
        if self.away < REMEMBERED {
            return;
        }
        let mut left: Vec<Instant> =
            self.of.values().filter(|known| known.holders == 0).map(|known| known.left).collect();
        left.sort_unstable();
        let middle = left[left.len() / 2];
        self.of.retain(|_, known| known.holders > 0 || known.left > middle);
        self.away = self.of.values().filter(|known| known.holders == 0).count();
    }
}

impl Attempts {
    fn new(now: Instant) -> Self {
        Self { count: 0, since: None, next: now, is_given_up: false, holders: 0, left: now }
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        self.next.max(self.left) + FORGOTTEN < now
    }

    /// Whether the next connection has to know of it.
    fn counts(&self) -> bool {
        self.count > 0 || self.is_given_up
    }
}

impl MessageInHand {
    /// What was tried before.
    pub(super) fn tries(&self) -> Tries {
        self.with(|known| Tries {
            attempts: known.count,
            age: known.since.map(|since| since.elapsed()).unwrap_or_default(),
        })
    }

    /// When the next attempt may begin. A connection may be lost in a pause between two attempts. The pause is not.
    pub(super) fn next(&self) -> Instant {
        self.with(|known| known.next)
    }

    /// An attempt failed that began then, and when the next may begin.
    pub(super) fn failed(&self, began: Instant, next: Instant) {
        self.with(|known| {
            known.since.get_or_insert(began);
            (known.count, known.next) = (known.count.saturating_add(1), next);
        });
    }

    /// It is given up. Whether that is news: while a broker does not keep its dead letter, it comes again and again.
    pub(super) fn give_up(&self) -> bool {
        self.with(|known| !std::mem::replace(&mut known.is_given_up, true))
    }

    /// The broker has its end.
    pub(super) fn ended(self) {
        self.log.entries().of.remove(&self.key);
    }

    fn with<T>(&self, act: impl FnOnce(&mut Attempts) -> T) -> T {
        let mut entries = self.log.entries();
        let fresh = || Attempts { holders: 1, ..Attempts::new(Instant::now()) };
        act(entries.of.entry(self.key.clone()).or_insert_with(fresh))
    }
}

impl Drop for MessageInHand {
    fn drop(&mut self) {
        let mut entries = self.log.entries();
        let Some(known) = entries.of.get_mut(&self.key) else { return };
        known.holders = known.holders.saturating_sub(1);
        if known.holders == 0 {
            known.left = Instant::now();
            if known.counts() {
                entries.away += 1;
            } else {
                entries.of.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn key(number: usize) -> Bytes {
        Bytes::from(number.to_string())
    }

    fn count(log: &AttemptLog, number: usize) -> u32 {
        log.hold(key(number)).tries().attempts
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_outlast_a_connection_and_not_their_message() {
        let log = AttemptLog::default();
        let held = log.hold(key(1));
        held.failed(Instant::now(), Instant::now());
        held.failed(Instant::now(), Instant::now());
        drop(held);
        let again = log.hold(key(1));
        assert_eq!(again.tries().attempts, 2);
        again.ended();
        assert_eq!(count(&log, 1), 0, "it is another message");
        assert!(log.entries().of.is_empty(), "what was not tried leaves nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_is_as_old_as_its_first_attempt() {
        let second = Duration::from_secs(1);
        let held = AttemptLog::default().hold(key(1));
        // It waits for an upstream that is away.
        advance(FORGOTTEN).await;
        assert_eq!(held.tries().age, Duration::ZERO);
        let began = Instant::now();
        advance(second).await;
        held.failed(began, began);
        advance(second).await;
        held.failed(Instant::now(), Instant::now());
        assert_eq!(held.tries().age, 2 * second);
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_that_stays_away_is_another_one_when_it_comes() {
        let log = AttemptLog::default();
        let held = log.hold(key(1));
        held.failed(Instant::now(), Instant::now() + 3 * FORGOTTEN);
        // However long it is in hand, and however long its pause.
        advance(2 * FORGOTTEN).await;
        drop(held);
        advance(FORGOTTEN * 3 / 2).await;
        assert_eq!(count(&log, 1), 1);
        advance(FORGOTTEN * 3 / 2).await;
        let other = log.hold(key(1));
        assert_eq!((other.tries().attempts, other.next()), (0, Instant::now()));
        assert_eq!(other.tries().age, Duration::ZERO);
        drop(other);
        assert_eq!(log.entries().away, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_in_hand_is_not_forgotten_for_the_sake_of_others() {
        let log = AttemptLog::default();
        let held = log.hold(key(0));
        held.failed(Instant::now(), Instant::now());
        for number in 1..=2 * REMEMBERED {
            advance(Duration::from_millis(1)).await;
            log.hold(key(number)).failed(Instant::now(), Instant::now());
            assert!(log.entries().of.len() <= REMEMBERED + 1);
        }
        assert_eq!((held.tries().attempts, count(&log, 2 * REMEMBERED), count(&log, 1)), (1, 1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_is_given_up_once() {
        let log = AttemptLog::default();
        assert!(log.hold(key(1)).give_up());
        let again = log.hold(key(1));
        assert!(!again.give_up());
        again.ended();
        assert!(log.hold(key(1)).give_up(), "it is another message");
    }
}
