//! `If-Match` (RFC 9110, 13.1.1): an operator changes the record that was looked at, and no other that stands in its place by now.

use http::header::IF_MATCH;
use http::{HeaderMap, HeaderValue};
use sha2::{Digest as _, Sha256};

use super::answer::{Kind, Problem};
use crate::http::headers::members;
use crate::idempotency::record::Hex;
use crate::store::RecordEntry;

/// What a request demands of the record that it is to change.
pub(super) struct Precondition(Vec<HeaderValue>);

impl Precondition {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        Self(headers.get_all(IF_MATCH).iter().cloned().collect())
    }

    /// Refuses another record, or none. A request without `If-Match` demands nothing.
    pub(super) fn check(&self, found: Option<&RecordEntry>) -> Result<(), Problem> {
        // Weakly, unlike for a document: a proxy that compresses weakens the tag, which names an attempt and no bytes.
        let is_met = |found: &RecordEntry| {
            let tag = etag(found);
            let is_tag = |wanted: &[u8]| wanted.strip_prefix(b"W/").unwrap_or(wanted) == tag.as_bytes();
            let mut wanted = self.0.iter().flat_map(|line| members(line.as_bytes()));
            wanted.any(|wanted| wanted == b"*" || is_tag(wanted))
        };
        if self.0.is_empty() || found.is_some_and(is_met) {
            return Ok(());
        }
        Err(Kind::RecordChanged.because("the record is not what it was: nothing was done; look at it again"))
    }
}

/// Names the attempt of a record and its state: the renewal of a lease changes nothing. Without the attempt's token, which is random,
/// nothing of it can be found out.
pub(super) fn etag(found: &RecordEntry) -> String {
    let mut hash = Sha256::new();
    hash.update(b"oncegate record 1");
    hash.update(found.id.0);
    hash.update(found.record.attempt.0);
    hash.update([found.record.state as u8]);
    format!("\"{}\"", Hex(&hash.finalize()[..8]))
}
