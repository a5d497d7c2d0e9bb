//! A record as the API shows it.

use std::time::{Duration, SystemTime};

use serde::Serialize;

use crate::idempotency::codec::{Answer, Head};
use crate::idempotency::record::{Record, State, Timestamp};
use crate::store::{Listed, NamespaceRules, Origin, is_orphaned};

/// The last millisecond of the year 9999, the last that RFC 3339 can write.
const LAST: Timestamp = Timestamp(253_402_300_799_999);

/// A record without its secrets: no attempt, no whole key, no header, no body.
#[derive(Debug, Serialize)]
pub(super) struct RecordView {
    id: String,
    state: &'static str,
    service: Option<String>,
    namespace: Option<String>,
    route: Option<String>,
    /// Shortened.
    key: Option<String>,
    method: Option<String>,
    path: Option<String>,
    claimed_at: String,
    age_seconds: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_until: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<String>,
    #[serde(flatten)]
    answer: Option<AnswerView>,
    /// Whether this version cannot read the record; such a key is never run again.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    unreadable: bool,
    /// Whether the rules changed since it was claimed, so that no request can find it any more.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    orphaned: bool,
}

#[derive(Debug, Serialize)]
struct AnswerView {
    status: u16,
    /// Nothing where the body was not kept.
    body_bytes: Option<usize>,
}

impl RecordView {
    /// `on_file` is what the store has of all namespaces.
    pub(super) fn of(listed: &Listed, on_file: &[NamespaceRules]) -> Self {
        let Listed { id, origin, record, now } = listed;
        let head = Head::decode(&record.head);
        let answer = record.answer.as_ref().map(Answer::decode);
        let unreadable = head.is_err() || matches!(answer, Some(Err(_)));
        let head = head.ok();
        let of_origin = |part: fn(&Origin) -> &str| origin.as_ref().map(|origin| part(origin).to_owned());
        let in_flight = record.state == State::InFlight;
        let until = rfc3339(record.until);
        Self {
            id: id.to_string(),
            state: record.state.as_str(),
            service: of_origin(|origin| &origin.service),
            namespace: of_origin(|origin| &origin.namespace),
            route: of_origin(|origin| &origin.route),
            key: head.as_ref().map(|head| head.key.clone()),
            method: head.as_ref().map(|head| head.method.to_string()),
            path: head.map(|head| head.path),
            claimed_at: rfc3339(record.claimed_at),
            age_seconds: now.since(record.claimed_at).as_secs(),
            lease_until: in_flight.then(|| until.clone()),
            expires_at: (!in_flight).then_some(until),
            answer: answer.and_then(Result::ok).map(|answer| AnswerView {
                status: answer.status.as_u16(),
                body_bytes: answer.content.map(|content| content.body.len()),
            }),
            unreadable,
            orphaned: origin.as_ref().is_some_and(|origin| is_orphaned(on_file, origin, record.claimed_at)),
        }
    }
}

/// The key of a record for people, where it can be read.
pub(super) fn shortened_key(record: &Record) -> Option<String> {
    Head::decode(&record.head).ok().map(|head| head.key)
}

fn rfc3339(time: Timestamp) -> String {
    let since_epoch = Duration::from_millis(time.min(LAST).0);
    humantime::format_rfc3339_millis(SystemTime::UNIX_EPOCH + since_epoch).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc_3339_whatever_they_are() {
        assert_eq!(rfc3339(Timestamp(0)), "1970-01-01T00:00:00.000Z");
        assert_eq!(rfc3339(Timestamp(1_767_225_600_123)), "2026-01-01T00:00:00.123Z");
        assert_eq!(rfc3339(Timestamp(i64::MAX as u64)), "9999-12-31T23:59:59.999Z");
    }
}
