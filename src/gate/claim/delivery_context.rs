//! What the store keeps of an accepted request, besides the request itself.

use std::time::Duration;

use bytes::Bytes;

use crate::idempotency::record::{AttemptToken, Timestamp};

/// What the store keeps of an accepted request, and how a gate took its delivery.
pub(in crate::gate) struct DeliveryContext {
    /// The head of its record.
    pub(in crate::gate) head: Bytes,
    /// How long its attempt may take, where its upstream gives it longer.
    pub(in crate::gate) timeout: Duration,
    /// Names its delivery.
    pub(in crate::gate) token: AttemptToken,
    /// How long its record is kept where the outcome is unknown: the head says it too, and both tell since when.
    pub(in crate::gate) unknown_ttl: Duration,
    pub(in crate::gate) accepted_at: Timestamp,
    pub(in crate::gate) taken_at: Timestamp,
}
