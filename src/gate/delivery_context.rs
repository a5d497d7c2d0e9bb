//! What the store keeps of an accepted request, besides the request itself.

use std::time::Duration;

use bytes::Bytes;

use crate::idempotency::record::{Attempt, Timestamp};

/// What the store keeps of an accepted request, and how a gate took its delivery.
pub(super) struct DeliveryContext {
    /// The head of its record.
    pub(super) head: Bytes,
    /// How long its attempt may take, where its upstream gives it longer.
    pub(super) timeout: Duration,
    /// Names its delivery.
    pub(super) token: Attempt,
    /// How long its record is kept where the outcome is unknown: the head says it too, and both tell since when.
    pub(super) unknown_ttl: Duration,
    pub(super) accepted_at: Timestamp,
    pub(super) taken_at: Timestamp,
}
