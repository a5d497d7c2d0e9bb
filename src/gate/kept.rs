//! What is kept of an accepted request besides what it sends.

use std::time::Duration;

use bytes::Bytes;

use crate::idempotency::record::{Attempt, Timestamp};

/// What is kept of an accepted request, and of its delivery as it was taken.
pub(super) struct Kept {
    /// The head of its record.
    pub(super) head: Bytes,
    /// How long its attempt may take, where its upstream gives it longer.
    pub(super) timeout: Duration,
    /// Names its delivery.
    pub(super) token: Attempt,
    pub(super) accepted_at: Timestamp,
    pub(super) taken_at: Timestamp,
}
