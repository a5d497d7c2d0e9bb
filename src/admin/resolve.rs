//! An operator says how an unknown attempt ended.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use schemars::generate::SchemaGenerator;
use schemars::{JsonSchema, Schema};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Number, Value};

use super::State;
use super::access::Principal;
use super::answer::{Answer, Kind, Problem};
use super::audit::AuditEvent;
use super::forms;
use super::precondition::Precondition;
use super::records::{MAX_REASON, absent, check_not_held, check_optional, find_begun, settle};
use crate::idempotency::codec::{self, Content, Head};
use crate::idempotency::grpc;
use crate::idempotency::media;
use crate::idempotency::record::{self, Record, RecordId};
use crate::store::{Expiry, RecordEntry, Settled, Settlement, deliveries};

/// Largest body, in bytes: it carries an answer in base64.
pub const MAX_BODY: usize = 32 * 1024 * 1024;

/// How long it may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// How many characters a problem shows of the name of a member.
const MAX_NAME: usize = 100;

/// The most headers of an answer that an operator gives.
const MAX_HEADERS: usize = 256;

/// Headers of oncegate's own. A client that finds one in a replay must know that it is the gate that says it.
const OWN: [&str; 5] =
    ["idempotency-status", "idempotent-replayed", "idempotency-expires", "idempotency-attempt", "idempotency-control"];

/// They speak of one connection or one message, not of the answer: what replays it writes its own.
const FRAMING: [HeaderName; 6] = [CONNECTION, CONTENT_LENGTH, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];
const OF_THE_HOP: [&str; 3] = ["keep-alive", "proxy-connection", "proxy-authenticate"];

/// How an operator may say that an attempt ended: see [`Resolution`].
pub(super) const ACTIONS: [&str; 2] = ["release", "complete"];

/// The body of a request to resolve. One flat struct: serde cannot read exact numbers in a tagged enum.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(extend("oneOf" = forms::by_action()))]
pub(super) struct ResolveBody {
    #[schemars(extend("enum" = ACTIONS))]
    action: String,
    #[serde(default, deserialize_with = "whole")]
    #[schemars(schema_with = "forms::status")]
    status: Option<u16>,
    #[schemars(schema_with = "headers_form")]
    headers: Option<Vec<(String, String)>>,
    #[schemars(schema_with = "forms::base64")]
    body_base64: Option<String>,
    #[serde(default)]
    #[schemars(extend("pattern" = forms::REASON_OR_NONE, "maxLength" = MAX_REASON))]
    reason: String,
}

/// A whole number, also as `200.0`: JSON knows one kind of numbers (RFC 8259, section 6).
pub(super) fn whole<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u16>, D::Error> {
    let Some(number) = Option::<Number>::deserialize(value)? else { return Ok(None) };
    let whole = number.as_f64().filter(|number| number.fract() == 0.0 && (0.0..=65535.0).contains(number));
    whole.map(|number| Some(number as u16)).ok_or_else(|| D::Error::custom("no status"))
}

pub(super) fn headers_form(_: &mut SchemaGenerator) -> Schema {
    let framing = FRAMING.iter().map(HeaderName::as_str);
    forms::headers(&framing.chain(OF_THE_HOP).chain(OWN).collect::<Vec<_>>())
}

/// How the operator says that the attempt ended.
#[derive(Debug)]
pub(super) enum Resolution {
    /// It had no effect: the key is free.
    Release,
    /// With this answer, encoded.
    Complete {
        answer: Bytes,
        /// The same as one to a gRPC call, where it can be one.
        to_call: Option<Bytes>,
    },
}

/// `POST /api/v1/records/{id}/resolve`
pub(super) async fn resolve(
    state: &State,
    id: RecordId,
    request: Request<Incoming>,
    asker: &Principal,
) -> Result<Answer, Problem> {
    let precondition = Precondition::of(request.headers());
    let (resolution, reason) = parse(&receive(request.into_body()).await?)?;
    let found = find_begun(state, id).await?;
    precondition.check(Some(&found))?;
    resolution.check(&found)?;
    let deed = AuditEvent::Resolve { found: &found, resolution: resolution.as_str(), reason: &reason };
    let begun = state.begin(asker, deed).await?;
    let applied = resolution.apply(state, &found).await;
    begun.conclude(deed, asker, applied).await
}

impl Resolution {
    /// Of the members of a request.
    pub(super) fn of(
        action: &str,
        status: Option<u16>,
        headers: Option<Vec<(String, String)>>,
        body_base64: Option<String>,
    ) -> Result<Self, Problem> {
        match action {
            "release" if status.is_some() || headers.is_some() || body_base64.is_some() => {
                Err(Kind::BadRequest.because("`status`, `headers` and `body_base64` go with `complete` only"))
            }
            "release" => Ok(Self::Release),
            "complete" => {
                let answer = given_answer(status, headers, body_base64)?;
                Ok(Self::Complete { answer: answer.encode(), to_call: to_call(answer).map(|answer| answer.encode()) })
            }
            _ => Err(Kind::BadRequest.because("`action` must be `release` or `complete`")),
        }
    }

    /// The word for it.
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Complete { .. } => "complete",
        }
    }

    /// Whether clients could read its answer: not of a record that cannot be read here, nor of a gRPC call where it says no status.
    pub(super) fn is_readable(&self, record: &record::Record) -> bool {
        self.answer_for(record).is_ok()
    }

    /// The answer to a retry of this record; nothing where its key is released.
    fn answer_for(&self, record: &record::Record) -> Result<Option<&Bytes>, Problem> {
        let Self::Complete { answer, to_call } = self else { return Ok(None) };
        let head = Head::decode(&record.head).map_err(|_| unreadable(&record.head))?;
        match head.details().is_call {
            true => to_call.as_ref().map(Some).ok_or_else(not_to_call),
            false => Ok(Some(answer)),
        }
    }

    /// The same; refused are a record that is not unknown, and one whose clients could not read the answer.
    fn check(&self, found: &RecordEntry) -> Result<Option<&Bytes>, Problem> {
        let record = &found.record;
        if record.state != record::State::Unknown {
            return Err(not_unknown(record, found.now));
        }
        self.answer_for(record)
    }

    /// Ends the attempt of an unknown record so.
    pub(super) async fn apply(&self, state: &State, found: &RecordEntry) -> Result<(), Problem> {
        let answer = self.check(found)?;
        let RecordEntry { id, origin, now, .. } = found;
        let end = match answer {
            None => Settlement::Release,
            Some(answer) => {
                let ttl = state.ttl(origin.as_ref().map(|origin| &*origin.route));
                Settlement::Complete { answer: answer.clone(), expiry: Expiry::FromNow(ttl) }
            }
        };
        // By the record's own attempt: if another superseded it meanwhile, or it completed by itself, nothing is written.
        check_not_held(&**state.opened()?, *id).await?;
        match settle(&**state.opened()?, found, end).await? {
            // A completed request has its answer, so its delivery ends. A released one keeps its delivery, for a retry.
            Settled::Done { .. } => {
                if matches!(self, Self::Complete { .. })
                    && deliveries::remove_of(&**state.opened()?, found).await.is_err()
                {
                    tracing::warn!(record = %id, "the record is completed, and its delivery stays listed as dead until a gate looks at it again");
                }
                Ok(())
            }
            Settled::NotCurrent { record: Some(record) } => Err(not_unknown(&record, *now)),
            Settled::NotCurrent { record: None } => Err(absent()),
        }
    }
}

/// An answer as one to a gRPC call, where it can be one: behind messages, what ends the call stands in the trailers.
fn to_call(mut answer: codec::Answer) -> Option<codec::Answer> {
    let of = |name: HeaderName| answer.headers.iter().filter(move |(found, _)| *found == name).map(|(_, value)| value);
    let has_status = of(grpc::STATUS).count() == 1 && of(grpc::STATUS).all(|value| grpc::status(value).is_some());
    let has_type = of(CONTENT_TYPE).next().is_some();
    if answer.status != StatusCode::OK || !has_status || !of(CONTENT_TYPE).all(media::is_grpc) {
        return None;
    }
    if let Some(content) = answer.content.as_mut().filter(|content| !content.body.is_empty()) {
        if !grpc::are_messages(&content.body) {
            return None;
        }
        content.trailers = answer.headers.extract_if(.., |(name, _)| grpc::ENDING.contains(name)).collect();
    }
    if !has_type {
        answer.headers.push((CONTENT_TYPE, HeaderValue::from_static("application/grpc")));
    }
    Some(answer)
}

fn not_to_call() -> Problem {
    Kind::BadRequest.because(
        "the record is of a gRPC call, whose client could not read this answer: give `status` 200, in `headers` one `grpc-status` from 0 \
         to 16 and no `content-type` but that of gRPC, and as the body nothing or messages, each with its prefix of five bytes",
    )
}

fn unreadable(head: &Bytes) -> Problem {
    let (why, needed) = match codec::is_sealed(head) {
        true => ("it is encrypted with a key that is not in store.encryption_keys", "has the key"),
        false => ("a later version of oncegate wrote it, or it is damaged", "can read it"),
    };
    Kind::Unreadable.because(format!(
        "this gate cannot read the record: {why}, and retries would get 503 rather than the answer. Give the answer at a gate that \
         {needed}. `release` works here too"
    ))
}

fn not_unknown(record: &Record, now: record::Timestamp) -> Problem {
    Kind::NotUnknown.because(match record.state {
        record::State::InFlight if record.until <= now => {
            "the record is in flight and its lease is past; it turns unknown within seconds: ask again then"
        }
        record::State::InFlight => {
            "the record is in flight: its attempt still runs, or its upstream has called oncegate.assert_current() or \
             oncegate.complete() in a transaction that is still open"
        }
        record::State::Completed => "the record is completed: it has its answer",
        record::State::Unknown => "the record was claimed again and became unknown meanwhile: look at it anew",
    })
}

/// Receives the body of a request that has nothing to say: none, or an empty object.
pub(super) async fn receive_nothing(body: Incoming) -> Result<(), Problem> {
    let body = receive(body).await?;
    let is_nothing =
        body.is_empty() || serde_json::from_slice::<Map<String, Value>>(&body).is_ok_and(|body| body.is_empty());
    is_nothing
        .then_some(())
        .ok_or_else(|| Kind::BadRequest.because("the body must be empty or `{}`: this request takes no members"))
}

pub(super) async fn receive(body: Incoming) -> Result<Bytes, Problem> {
    let too_large = || Kind::RequestTooLarge.because(format!("the body is larger than {MAX_BODY} bytes"));
    // What announces that it is too large is not waited for.
    if body.size_hint().lower() > MAX_BODY as u64 {
        return Err(too_large());
    }
    match tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, MAX_BODY).collect()).await {
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(_)) => Err(Kind::BadRequest.because("the body did not arrive whole")),
        Err(_) => Err(Kind::RequestTimeout.because("the body did not arrive in time")),
    }
}

/// Reads an object: a struct could be read from an array, too.
pub(super) fn from_object<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        serde_json::from_slice::<Map<String, Value>>(bytes)?;
    }
    serde_json::from_slice(bytes)
}

/// The problem of a body that is not of this form. It says where, and names a wrong member. It quotes no value: that may be
/// part of an answer.
pub(super) fn wrong_body(error: &serde_json::Error, form: &str) -> Problem {
    let place = format!("line {}, column {}", error.line(), error.column());
    let message = error.to_string();
    let wrong = ["unknown", "missing", "duplicate"].into_iter().find_map(|what| {
        let (name, _) = message.strip_prefix(what)?.strip_prefix(" field `")?.split_once('`')?;
        Some((what, name.chars().take(MAX_NAME).collect::<String>()))
    });
    Kind::BadRequest.because(match wrong {
        Some((what, name)) => {
            format!("{what} member `{}` at {place}; the body is of the form {form}", name.escape_debug())
        }
        None => format!("the body is not of the form {form}: {place}"),
    })
}

fn parse(bytes: &[u8]) -> Result<(Resolution, String), Problem> {
    const FORM: &str = "{\"action\": \"release\" | \"complete\", \"status\": 200, \"headers\": [[\"name\", \"value\"]], \
                        \"body_base64\": \"...\", \"reason\": \"...\"}";
    let body: ResolveBody = from_object(bytes).map_err(|error| wrong_body(&error, FORM))?;
    check_optional(&body.reason)?;
    let resolution = Resolution::of(&body.action, body.status, body.headers, body.body_base64)?;
    Ok((resolution, body.reason))
}

/// The answer that an operator gives.
fn given_answer(
    status: Option<u16>,
    headers: Option<Vec<(String, String)>>,
    body_base64: Option<String>,
) -> Result<codec::Answer, Problem> {
    let status = status
        .filter(|status| (200..=599).contains(status))
        .and_then(|status| StatusCode::from_u16(status).ok())
        .ok_or_else(|| Kind::BadRequest.because("`status` must be a number from 200 to 599"))?;
    let headers = headers.unwrap_or_default();
    if headers.len() > MAX_HEADERS {
        return Err(Kind::BadRequest.because(format!("`headers` has more than {MAX_HEADERS} lines")));
    }
    let headers = headers.iter().map(given_header).collect::<Result<_, _>>()?;
    let body = STANDARD
        .decode(body_base64.unwrap_or_default())
        .map_err(|_| Kind::BadRequest.because("`body_base64` is not base64 (RFC 4648 section 4, with padding)"))?;
    if matches!(status, StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT | StatusCode::NOT_MODIFIED)
        && !body.is_empty()
    {
        return Err(Kind::BadRequest.because(format!("an answer with status {} has no body", status.as_u16())));
    }
    let content = Some(Content { body: body.into(), trailers: Vec::new() });
    Ok(codec::Answer { status, reason: None, headers, content })
}

fn given_header((name, value): &(String, String)) -> Result<(HeaderName, HeaderValue), Problem> {
    let bad = |what: &str| Kind::BadRequest.because(format!("`headers`: `{}` {what}", name.escape_debug()));
    let parsed = HeaderName::from_bytes(name.as_bytes()).map_err(|_| bad("is not a header name"))?;
    if FRAMING.contains(&parsed) || OF_THE_HOP.contains(&parsed.as_str()) {
        return Err(bad("cannot be given: it is not part of an answer that is kept"));
    }
    if OWN.contains(&parsed.as_str()) {
        return Err(bad("cannot be given: oncegate says it of an answer, or takes it out of one"));
    }
    let value =
        HeaderValue::from_bytes(value.trim().as_bytes()).map_err(|_| bad("has a value that no header can have"))?;
    Ok((parsed, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(body: &str) -> String {
        format!("{:?}", parse(body.as_bytes()).unwrap_err())
    }

    #[test]
    fn a_release_needs_nothing_else() {
        let (resolution, reason) = parse(br#"{"action":"release","reason":"not in the ledger"}"#).unwrap();
        assert!(matches!(resolution, Resolution::Release));
        assert_eq!(reason, "not in the ledger");
        assert!(refused(r#"{"action":"release","status":200}"#).contains("`complete` only"));
    }

    #[test]
    fn a_status_is_a_whole_number_however_it_is_written() {
        for status in ["200", "200.0", "2e2"] {
            let (resolution, _) = parse(format!(r#"{{"action":"complete","status":{status}}}"#).as_bytes()).unwrap();
            assert!(matches!(resolution, Resolution::Complete { .. }), "{status}");
        }
    }

    #[test]
    fn what_cannot_be_an_answer_is_refused() {
        for (body, said) in [
            ("", "line 1"),
            (r#"{"action":"retry"}"#, "`release` or `complete`"),
            (r#"{"action":"release","force":true}"#, "unknown member `force` at line 1, column 27"),
            (r#"{"action":"complete"}"#, "`status` must be"),
            (r#"{"action":"complete","status":101}"#, "`status` must be"),
            (r#"{"action":"complete","status":600}"#, "`status` must be"),
            (r#"{"action":"complete","status":200.5}"#, "not of the form"),
            (r#"{"action":"complete","status":200,"body_base64":"*"}"#, "`body_base64` is not"),
            (r#"{"action":"complete","status":204,"body_base64":"eA=="}"#, "has no body"),
            (r#"{"action":"complete","status":200,"headers":[["a b","c"]]}"#, "is not a header name"),
            (r#"{"action":"complete","status":200,"headers":[["a","b\r\nc: d"]]}"#, "no header can have"),
            (r#"{"action":"complete","status":200,"headers":[["Content-Length","3"]]}"#, "cannot be given"),
            (r#"{"action":"complete","status":200,"headers":[["transfer-encoding","gzip"]]}"#, "cannot be given"),
            (r#"{"action":"complete","status":200,"headers":{"a":"b"}}"#, "not of the form"),
        ] {
            let problem = refused(body);
            assert!(problem.contains(said), "{body}: {problem}");
        }
    }

    #[test]
    fn more_headers_than_an_upstream_may_send_are_refused() {
        let body = |count: usize| {
            let lines: Vec<_> = (0..count).map(|number| format!(r#"["x-{number}",""]"#)).collect();
            format!(r#"{{"action":"complete","status":200,"headers":[{}]}}"#, lines.join(","))
        };
        assert!(parse(body(256).as_bytes()).is_ok());
        assert!(refused(&body(257)).contains("more than 256 lines"));
    }

    #[test]
    fn headers_of_our_own_are_refused() {
        for name in [
            "Idempotency-Status",
            "Idempotent-Replayed",
            "idempotency-expires",
            "IDEMPOTENCY-ATTEMPT",
            "Idempotency-Control",
        ] {
            let body = format!(r#"{{"action":"complete","status":200,"headers":[["{name}","x"]]}}"#);
            let problem = refused(&body);
            assert!(problem.contains(name) && problem.contains("cannot be given"), "{problem}");
        }
        let body = r#"{"action":"complete","status":200,"headers":[["Idempotency-Key","x"],["ETag","\"x\""]]}"#;
        assert!(parse(body.as_bytes()).is_ok());
    }

    #[test]
    fn a_body_is_not_quoted_back() {
        assert!(!refused(r#"{"action":"complete","status":"s3cret"}"#).contains("s3cret"));
    }
}
