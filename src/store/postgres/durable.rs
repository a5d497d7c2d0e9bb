//! Makes what was read durable before the store hands it out: its commit may have reached the primary only.

use super::operation::{ClaimOperation, ClaimReply};
use super::{Postgres, unexpected_reply};
use crate::idempotency::record::{AttemptToken, Record, RecordId, State, Timestamp};
use crate::store::Error;

/// How many completions are remembered as durable. One that is not costs its next reader one more commit.
pub(super) const REMEMBERED: usize = 1 << 18;

/// The same of deliveries.
pub(super) const REMEMBERED_DELIVERIES: usize = 1 << 16;

impl Postgres {
    /// Returns once a record that was read on a host is durable. True if another host is in use by then, so that it
    /// must be read again. One flush serves all that wait for one.
    ///
    /// A flush on an old primary, whose standby was promoted away, does not return.
    pub(super) async fn ensure_durable(
        &self,
        id: RecordId,
        record: &Record,
        now: Timestamp,
        host: Option<usize>,
    ) -> Result<bool, Error> {
        let is_durable = match record.state {
            State::Completed => self.durable.get(&record.attempt).is_some(),
            State::InFlight => record.until > now,
            State::Unknown => false,
        };
        if !is_durable && host != Some(self.flush(id).await?) {
            return Ok(true);
        }
        self.remember(record);
        Ok(false)
    }

    /// The same of the delivery of this token: whoever reads it tells its client that the request is kept.
    pub(super) async fn ensure_kept(
        &self,
        id: RecordId,
        token: AttemptToken,
        host: Option<usize>,
    ) -> Result<bool, Error> {
        if self.kept.get(&token).is_some() {
            return Ok(false);
        }
        if host != Some(self.flush(id).await?) {
            return Ok(true);
        }
        self.kept.insert(token, ());
        Ok(false)
    }

    /// Makes all durable that is visible, because of what was read of this id. Returns on which host.
    async fn flush(&self, id: RecordId) -> Result<usize, Error> {
        match self.claims.submit(ClaimOperation::Flush { id }).await? {
            ClaimReply::Flushed { host } => Ok(host),
            _ => Err(unexpected_reply()),
        }
    }

    /// Notes that a record was seen durable.
    pub(super) fn remember(&self, record: &Record) {
        if record.state == State::Completed {
            self.durable.insert(record.attempt, ());
        }
    }
}
