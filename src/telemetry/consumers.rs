//! What consumers do with messages.

use prometheus::{IntCounterVec, IntGaugeVec, Opts, Registry};

use super::metrics::Metrics;
use super::register::add;

/// The metrics of all consumers.
#[derive(Clone)]
pub struct ConsumerFamilies {
    pub(super) messages: IntCounterVec,
    pub(super) in_hand: IntGaugeVec,
    pub(super) connected: IntGaugeVec,
    pub(super) refused: IntCounterVec,
}

/// The metrics of one consumer.
#[derive(Clone)]
pub struct ConsumerMetrics {
    ended: [prometheus::IntCounter; MessageOutcome::ALL.len()],
    in_hand: prometheus::IntGauge,
    connected: prometheus::IntGauge,
    refused: prometheus::IntCounter,
}

/// How a message ended at this gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageOutcome {
    /// It was acknowledged: its record is durable.
    Done,
    /// It went to the dead letters.
    Dead,
    /// It went back to the broker, at a shutdown.
    Returned,
}

impl MessageOutcome {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Done, Self::Dead, Self::Returned];

    /// Its word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Dead => "dead",
            Self::Returned => "returned",
        }
    }
}

impl Metrics {
    /// The metrics of a consumer, all at zero.
    #[must_use]
    pub fn consumer(&self, name: &str) -> ConsumerMetrics {
        self.families.consumers.of(name)
    }
}

impl ConsumerFamilies {
    /// In a registry.
    pub(super) fn new(registry: &Registry) -> Self {
        let messages = "Messages that a consumer ended, by how.";
        let in_hand = "Messages that a consumer has taken and not ended.";
        let connected = "Whether a consumer has a connection to its broker that has proven itself.";
        let refused = "Dead letters that a broker did not confirm, each time that one was sent.";
        let gauge = |name, help| IntGaugeVec::new(Opts::new(name, help), &["consumer"]);
        Self {
            messages: add(
                registry,
                IntCounterVec::new(Opts::new("oncegate_messages_total", messages), &["consumer", "result"]),
            ),
            in_hand: add(registry, gauge("oncegate_messages_in_hand", in_hand)),
            connected: add(registry, gauge("oncegate_consumer_connected", connected)),
            refused: add(
                registry,
                IntCounterVec::new(Opts::new("oncegate_dead_letters_refused_total", refused), &["consumer"]),
            ),
        }
    }

    fn of(&self, name: &str) -> ConsumerMetrics {
        ConsumerMetrics {
            ended: MessageOutcome::ALL.map(|ended| self.messages.with_label_values(&[name, ended.as_str()])),
            in_hand: self.in_hand.with_label_values(&[name]),
            connected: self.connected.with_label_values(&[name]),
            refused: self.refused.with_label_values(&[name]),
        }
    }
}

impl ConsumerMetrics {
    /// A message ended.
    pub fn ended(&self, ended: MessageOutcome) {
        self.ended[ended as usize].inc();
    }

    /// So many messages are taken and not ended.
    pub fn in_hand(&self, count: usize) {
        self.in_hand.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// The broker did not take a dead letter.
    pub fn dead_letter_refused(&self) {
        self.refused.inc();
    }

    /// The consumer is connected, or is not.
    pub fn connected(&self, is_connected: bool) {
        self.connected.set(is_connected.into());
    }
}
