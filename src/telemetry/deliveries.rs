//! What is reported of accepted requests: how many are still to be delivered, and how far one of them is.

use std::borrow::Cow;
use std::time::Duration;

use prometheus::{Gauge, IntGauge, IntGaugeVec, Opts, Registry};

use super::metrics::Metrics;
use super::outcome::Code;
use crate::idempotency::codec::is_sealed;
use crate::store::deliveries::{Delivery, DeliveryCount};

/// Whether a delivery was given up because the outcome of an attempt is unknown, as far as can be read.
#[must_use]
pub fn is_given_up_as_unknown(delivery: &Delivery) -> bool {
    delivery.is_dead() && delivery.note.as_deref() == Some(Code::OutcomeUnknown.as_str().as_bytes())
}

/// What became of a delivery, to show. What is encrypted is not shown.
#[must_use]
pub fn note_of(delivery: &Delivery) -> Option<Cow<'_, str>> {
    delivery.note.as_ref().map(|note| match is_sealed(note) {
        true => Cow::Borrowed("encrypted with a key that this gate does not have"),
        false => String::from_utf8_lossy(note),
    })
}

/// How many attempts of a delivery have ended, one with an unknown outcome included: the queue itself counts those that ended in a
/// release.
#[must_use]
pub fn ended_attempts(delivery: &Delivery) -> u32 {
    delivery.attempts + u32::from(is_given_up_as_unknown(delivery))
}

/// The gauges of the deliveries in the store.
#[derive(Clone)]
pub struct DeliveryGauges {
    queued: IntGauge,
    dead: IntGauge,
    oldest: Gauge,
}

impl Metrics {
    /// How many accepted requests are to be delivered.
    #[must_use]
    pub fn deliveries(&self) -> &DeliveryGauges {
        &self.families.deliveries
    }
}

impl DeliveryGauges {
    /// In a registry.
    pub(super) fn new(registry: &Registry) -> Self {
        let help = "Accepted requests in the store, queued or dead, when they were last counted.";
        let counts = IntGaugeVec::new(Opts::new("oncegate_deliveries", help), &["state"]).expect("a sound name");
        let oldest = "How long ago the oldest request was accepted that is still to be delivered, in seconds.";
        let oldest = Gauge::new("oncegate_deliveries_oldest_seconds", oldest).expect("a sound name");
        registry.register(Box::new(counts.clone())).expect("no other has this name");
        registry.register(Box::new(oldest.clone())).expect("no other has this name");
        let of = |state| counts.with_label_values(&[state]);
        Self { queued: of("queued"), dead: of("dead"), oldest }
    }

    /// How many are queued, and how many are dead.
    pub(super) fn levels(&self) -> [u64; 2] {
        [&self.queued, &self.dead].map(|gauge| u64::try_from(gauge.get()).unwrap_or(0))
    }

    /// How long ago the oldest was accepted that is still to be delivered; nothing where there is none.
    pub(super) fn oldest(&self) -> Option<Duration> {
        Duration::try_from_secs_f64(self.oldest.get()).ok().filter(|age| !age.is_zero())
    }

    /// They were counted.
    pub fn counted(&self, counts: &[DeliveryCount]) {
        let sum = |of: fn(&DeliveryCount) -> u64| counts.iter().map(of).sum::<u64>();
        self.queued.set(i64::try_from(sum(|count| count.queued)).unwrap_or(i64::MAX));
        self.dead.set(i64::try_from(sum(|count| count.dead)).unwrap_or(i64::MAX));
        let oldest = counts.iter().filter_map(|count| count.oldest).max();
        self.oldest.set(oldest.unwrap_or(Duration::ZERO).as_secs_f64());
    }
}
