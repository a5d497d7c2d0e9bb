//! Whether the broker of a consumer can be used: when the consumer tries it again, and what the log says of it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::source::Error;

/// How long after a failure to connect again: twice as long each time, up to a limit.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// In an outage, another reason is logged that long after the one before: a broker that comes back gives several.
const ANOTHER_REASON: Duration = Duration::from_secs(30);

/// A connection that lasts so long has proven itself, even where no message comes over it.
const LASTING: Duration = Duration::from_secs(30);

/// The outages of one consumer. One begins with a failure. It is over when a connection has proven itself: a broker may refuse
/// again and again what follows the subscription.
pub(super) struct Outage {
    consumer: Arc<str>,
    source: String,
    /// How long after the next failure to connect again, at most.
    pause: Duration,
    longest: Duration,
    /// The last connection ended with a dead letter that the broker did not take.
    refuses_dead_letters: bool,
    /// Since when no messages come.
    since: Option<Instant>,
    /// When the log had the last reason, and which.
    said: (Instant, Error),
    /// Whether the log has that another consumer has the messages.
    stands_by: bool,
}

impl Outage {
    pub(super) fn new(consumer: Arc<str>, source: String) -> Self {
        let said = (Instant::now(), Error(String::new()));
        Self {
            consumer,
            source,
            pause: FIRST_PAUSE,
            longest: LONGEST_PAUSE,
            since: None,
            refuses_dead_letters: false,
            said,
            stands_by: false,
        }
    }

    /// Whether one has begun and is not over.
    pub(super) fn is_on(&self) -> bool {
        self.since.is_some()
    }

    /// The broker cannot be used. Returns how long to leave it alone.
    pub(super) fn failed(&mut self, error: Error) -> Duration {
        let (consumer, source) = (&*self.consumer, &*self.source);
        if self.since.is_none() {
            self.since = Some(Instant::now());
            tracing::error!(consumer, source, %error, "no messages come: the broker cannot be used; trying again");
            self.said = (Instant::now(), error);
            self.stands_by = false;
        } else if self.said.1 != error && self.said.0.elapsed() >= ANOTHER_REASON {
            tracing::error!(consumer, source, %error, "still no messages come, for another reason; trying again");
            self.said = (Instant::now(), error);
        }
        // Gates that lost a broker together do not come back together.
        let pause = self.pause.mul_f64(1.0 - fastrand::f64() / 2.0);
        self.pause = (2 * self.pause).min(self.longest);
        pause
    }

    /// When a connection that began at `begun` has proven itself. Where a message has ended over it, once it lasts as long as the
    /// pause would be: then the consumer connects for less time than it consumes. The connection must survive that end for a
    /// moment, since a broker may refuse what it does not reply to (an acknowledgement of NATS).
    pub(super) fn proven_at(&self, begun: Instant, first_end: Option<Instant>) -> Instant {
        match first_end.filter(|_| !self.refuses_dead_letters) {
            Some(ended) => (begun + self.pause).max(ended + FIRST_PAUSE),
            None => begun + LASTING,
        }
    }

    /// A connection ended with a dead letter that the broker did not take. It takes the end of other messages all the same: those
    /// prove nothing then.
    pub(super) fn note_refusal(&mut self, is_dead_letter: bool) {
        self.refuses_dead_letters = is_dead_letter;
    }

    /// The connection has proven itself, and messages come over it.
    pub(super) fn over(&mut self) {
        if let Some(since) = self.since.take() {
            let (consumer, source, seconds) = (&*self.consumer, &*self.source, since.elapsed().as_secs_f64());
            tracing::info!(consumer, source, seconds, "messages come again");
        }
        (self.pause, self.refuses_dead_letters) = (FIRST_PAUSE, false);
    }

    /// Another consumer has the messages, and has had them for the whole time of this connection.
    pub(super) fn stands_by(&mut self, lasted: Duration) {
        if !std::mem::replace(&mut self.stands_by, true) {
            let (consumer, source) = (&*self.consumer, &*self.source);
            tracing::info!(
                consumer,
                source,
                "another consumer, or an earlier connection of this one, has the messages: this one stands by until it is gone"
            );
        }
        if lasted >= LASTING {
            (self.since, self.pause) = (None, FIRST_PAUSE);
        }
    }

    /// This consumer has the messages, stands by no more, and must not stay away for longer than that. Returns whether no outage
    /// is on.
    pub(super) fn takes_over(&mut self, longest_pause: Duration) -> bool {
        self.stands_by = false;
        self.longest = longest_pause.clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.pause = self.pause.min(self.longest);
        !self.is_on()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outage() -> Outage {
        Outage::new("orders".into(), "amqp://localhost".to_owned())
    }

    fn failed(outage: &mut Outage) -> Duration {
        outage.failed(Error("refused".to_owned()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_subscription_that_fails_at_once_does_not_shorten_the_pause() {
        let mut outage = outage();
        let mut longest = FIRST_PAUSE;
        for _ in 0..10 {
            let pause = failed(&mut outage);
            assert!(pause > longest.mul_f64(0.49) && pause <= longest, "{pause:?} of {longest:?}");
            longest = (2 * longest).min(LONGEST_PAUSE);
            assert!(outage.is_on());
            // Its messages end, but it does not last as long as it is waited for.
            let now = Instant::now();
            let proof = |first_end| outage.proven_at(now, first_end) - now;
            assert_eq!([proof(None), proof(Some(now))], [LASTING, longest]);
            let late = |after| proof(Some(now + after));
            assert_eq!(late(longest), longest + FIRST_PAUSE);
        }
        assert_eq!(longest, LONGEST_PAUSE);
        outage.over();
        assert!(!outage.is_on() && failed(&mut outage) <= FIRST_PAUSE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_broker_says_how_long_it_may_be_left_alone() {
        let mut outage = outage();
        assert!(outage.takes_over(Duration::from_secs(1)));
        for _ in 0..10 {
            assert!(failed(&mut outage) <= Duration::from_secs(1));
        }
        assert!(!outage.takes_over(Duration::MAX));
        for _ in 0..10 {
            failed(&mut outage);
        }
        assert!(failed(&mut outage) >= LONGEST_PAUSE / 2);
        assert!(!outage.takes_over(Duration::ZERO) && failed(&mut outage) <= FIRST_PAUSE);
    }

    #[tokio::test(start_paused = true)]
    async fn to_stand_by_for_long_is_the_end_of_an_outage() {
        let mut outage = outage();
        for _ in 0..4 {
            failed(&mut outage);
        }
        outage.stands_by(LASTING / 2);
        assert!(outage.is_on() && outage.stands_by);
        outage.stands_by(LASTING);
        assert!(!outage.is_on() && outage.stands_by);
        // It is lost, and comes back: the log has both.
        assert!(failed(&mut outage) <= FIRST_PAUSE && !outage.stands_by);
    }
}
