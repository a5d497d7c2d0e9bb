//! A record as the API shows it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue};
use schemars::JsonSchema;
use serde::Serialize;

use super::endpoints::REVEALING;
use super::precondition;
use super::tokens::Role;
use crate::idempotency::codec::{Answer, Details, Head, is_sealed};
use crate::idempotency::record::{Hex, Record, RequestId, State};
use crate::idempotency::recovery::unknown_since;
use crate::idempotency::unknown::UnknownCause;
use crate::store::{NamespaceRules, Origin, RecordEntry, is_orphaned};
use crate::telemetry::rfc3339;

/// A record without its secrets: no attempt, no whole key, and no header or body unless they are asked for.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Record")]
pub(super) struct RecordView {
    /// 64 hexadecimal digits.
    id: String,
    /// For `If-Match`: it changes with the attempt and the state. Of one record that is shown alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    etag: Option<String>,
    #[schemars(extend("enum" = State::ALL.map(State::as_str)))]
    state: &'static str,
    #[serde(flatten)]
    unknown: Option<UnknownView>,
    service: Option<String>,
    namespace: Option<String>,
    route: Option<String>,
    upstream: Option<String>,
    /// Shortened; nothing for a viewer.
    key: Option<String>,
    /// Whether the record keeps its whole key, for `key=true` to show; a list leaves it out.
    #[serde(skip_serializing_if = "Option::is_none")]
    keeps_key: Option<bool>,
    method: Option<String>,
    path: Option<String>,
    /// Whether it is a gRPC call.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    grpc: bool,
    /// The request that claimed it, as `instance` of its problem names it.
    request: Option<String>,
    trace_id: Option<String>,
    /// A digest: equal for the requests of one caller.
    caller: Option<String>,
    /// The beginning of its digest.
    fingerprint: Option<String>,
    /// When its attempt began.
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
    /// Why not: it is encrypted and no key of this gate opens it, or a later version wrote it, or it is damaged.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = UNREADABLE))]
    unreadable_because: Option<&'static str>,
    /// Whether the rules changed since it was claimed, so that no request can find it any more.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    orphaned: bool,
}

/// Why a record cannot be read.
const UNREADABLE: [&str; 2] = ["encrypted", "format"];

/// Why the outcome of the attempt is unknown.
#[derive(Debug, Serialize, JsonSchema)]
struct UnknownView {
    /// When it turned unknown; nothing where an older release claimed the record.
    unknown_since: Option<String>,
    /// In the words of `outcomes`, `shutdown`, `lease-expired`, `not-recorded` where an older release held it, or `unreadable`;
    /// nothing in a list, which leaves it out.
    #[serde(skip_serializing_if = "Option::is_none")]
    unknown_because: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct AnswerView {
    status: u16,
    content_type: Option<String>,
    /// Nothing where the body was not kept.
    body_bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<WholeAnswer>,
}

/// An answer, in the form in which `resolve` takes one.
#[derive(Debug, Serialize, JsonSchema)]
struct WholeAnswer {
    headers: Vec<[String; 2]>,
    body_base64: Option<String>,
    trailers: Vec<[String; 2]>,
}

/// How much of a record is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// What a list of records has: nothing of what the attempt left.
    RecordEntry,
    /// All but what only an operator who asks for it gets.
    Described(Revealed),
}

/// What is shown only where an operator asks for it, which is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Revealed {
    /// The headers and the body of the answer.
    pub(super) answer: bool,
    /// The whole key, where the record keeps it.
    pub(super) key: bool,
}

impl RecordView {
    /// As somebody of this role sees it. `on_file` is what the store has of all namespaces.
    pub(super) fn of(listed: &RecordEntry, on_file: &[NamespaceRules], extent: Extent, role: Role) -> Self {
        let RecordEntry { id, origin, record, now } = listed;
        let head = Head::decode(&record.head);
        let answer = record.answer.as_ref().filter(|_| record.state == State::Completed).map(Answer::decode);
        let unreadable = head.is_err() || matches!(answer, Some(Err(_)));
        let is_encrypted =
            [Some(&record.head), record.answer.as_ref()].into_iter().flatten().any(|value| is_sealed(value));
        let unreadable_because = unreadable.then_some(UNREADABLE[usize::from(!is_encrypted)]);
        let head = head.ok();
        let revealed = match extent {
            Extent::RecordEntry => Revealed::default(),
            Extent::Described(revealed) => revealed,
        };
        let details = head.as_ref().map(Head::details).unwrap_or_default();
        let unknown = (record.state == State::Unknown).then(|| UnknownView {
            unknown_since: unknown_since(record, &details).map(rfc3339),
            unknown_because: (extent != Extent::RecordEntry).then(|| because(record, &details, head.is_some())),
        });
        let whole_key = details.key.as_ref().filter(|_| revealed.key).map(|key| key.as_str().to_owned());
        let shortened = || head.as_ref().map(|head| head.key.clone());
        let trace = details.trace.or(details.request.map(RequestId::trace));
        let of_origin = |part: fn(&Origin) -> &str| origin.as_ref().map(|origin| part(origin).to_owned());
        let in_flight = record.state == State::InFlight;
        let until = rfc3339(record.until);
        Self {
            id: id.to_string(),
            // A proxy may change or remove the header.
            etag: (extent != Extent::RecordEntry).then(|| precondition::etag(listed)),
            state: record.state.as_str(),
            unknown,
            service: of_origin(|origin| &origin.service),
            namespace: of_origin(|origin| &origin.namespace),
            route: of_origin(|origin| &origin.route),
            upstream: details.upstream,
            key: whole_key.or_else(shortened).filter(|_| role >= REVEALING),
            keeps_key: (extent != Extent::RecordEntry).then_some(details.key.is_some()),
            method: head.as_ref().map(|head| head.method.to_string()),
            request: details.request.map(|request| request.to_string()),
            trace_id: trace.map(|trace| format!("{trace:032x}")),
            caller: details.caller.map(|caller| Hex(&caller).to_string()),
            fingerprint: head.as_ref().map(|head| Hex(&head.fingerprint.digest[..8]).to_string()),
            path: head.map(|head| head.shown_path()),
            grpc: details.is_call,
            claimed_at: rfc3339(record.claimed_at),
            age_seconds: now.since(record.claimed_at).as_secs(),
            lease_until: in_flight.then(|| until.clone()),
            expires_at: (!in_flight).then_some(until),
            answer: answer.and_then(Result::ok).map(|answer| AnswerView::of(&answer, revealed)),
            unreadable,
            unreadable_because,
            orphaned: origin
                .as_ref()
                .is_some_and(|origin| is_orphaned(on_file, origin, record.claimed_at, details.rules)),
        }
    }
}

impl AnswerView {
    fn of(answer: &Answer, revealed: Revealed) -> Self {
        let content_type = answer.headers.iter().find(|(name, _)| *name == CONTENT_TYPE);
        let content = answer.content.as_ref();
        Self {
            status: answer.status.as_u16(),
            content_type: content_type.map(|(_, value)| text(value)),
            body_bytes: content.map(|content| content.body.len()),
            answer: revealed.answer.then(|| WholeAnswer {
                headers: lines(&answer.headers),
                body_base64: content.map(|content| STANDARD.encode(&content.body)),
                trailers: content.map(|content| lines(&content.trailers)).unwrap_or_default(),
            }),
        }
    }
}

/// Why the outcome of an unknown record's attempt is unknown.
fn because(record: &Record, details: &Details, is_readable: bool) -> String {
    match record.answer.as_ref().map(UnknownCause::decode) {
        Some(Ok(cause)) => cause.to_string(),
        Some(Err(_)) => "unreadable".to_owned(),
        // Whether a cause was to be written, its head says.
        None if !is_readable => "unreadable".to_owned(),
        // An older version wrote no causes.
        None if details.request.is_none() => "not-recorded".to_owned(),
        // Its gate ended, or it could not reach the store in time.
        None => "lease-expired".to_owned(),
    }
}

fn lines(lines: &[(HeaderName, HeaderValue)]) -> Vec<[String; 2]> {
    lines.iter().map(|(name, value)| [name.to_string(), text(value)]).collect()
}

fn text(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
}

/// The request that claimed a record, where it can be read: it names the attempt.
pub(super) fn claiming_request(record: &Record) -> Option<String> {
    let request = Head::decode(&record.head).ok().and_then(|head| head.details().request);
    request.map(|request| request.to_string())
}

/// Whether a record keeps its whole key.
pub(super) fn keeps_key(found: &RecordEntry) -> bool {
    Head::decode(&found.record.head).is_ok_and(|head| head.details().key.is_some())
}

/// Whether the record has an answer that can be read.
pub(super) fn keeps_answer(found: &RecordEntry) -> bool {
    let record = &found.record;
    record.state == State::Completed && record.answer.as_ref().is_some_and(|answer| Answer::decode(answer).is_ok())
}

/// The key of a record for people, where it can be read.
pub(super) fn shortened_key(record: &Record) -> Option<String> {
    Head::decode(&record.head).ok().map(|head| head.key)
}
