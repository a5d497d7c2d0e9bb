//! Messages that the client library cannot read: it ends the connection when the broker delivers one.
//!
//! NATS does not check headers. A publisher that writes a value in Latin-1, or a name with a space, makes such a message. The
//! answer to a request for a message has the headers in Base64, so that it can be looked at there.

use std::str::FromStr as _;

use async_nats::jetstream::consumer::{Config, PullConsumer};
use async_nats::jetstream::response::Response;
use async_nats::jetstream::stream::RawMessage;
use async_nats::jetstream::{Context, Message};
use async_nats::{HeaderMap, HeaderName, StatusCode, Subject};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::time::{Duration, Instant};

use super::super::source::Error;
use super::failed;

/// A header of a dead letter: the headers of the message as they were, in Base64.
const HEADERS: &str = "x-oncegate-headers";

/// How long to look.
const SEARCH: Duration = Duration::from_secs(5);

/// The answer to a request for a message.
#[derive(serde::Deserialize)]
struct Stored {
    message: RawMessage,
}

/// Messages that NATS has delivered to a consumer, that are not acknowledged and cannot be read; each with the problem.
///
/// # Errors
///
/// An answer that does not come, or is none.
pub(super) async fn find(context: &Context, consumer: &mut PullConsumer) -> Result<Vec<(Message, String)>, Error> {
    let info = consumer.info().await.map_err(failed)?.clone();
    let (mut found, end) = (Vec::new(), Instant::now() + SEARCH);
    if info.num_ack_pending == 0 {
        return Ok(found);
    }
    for subject in subjects(&info.config) {
        let mut from = info.ack_floor.stream_sequence + 1;
        while from <= info.delivered.stream_sequence && Instant::now() < end {
            let asked = serde_json::json!({ "seq": from, "next_by_subj": subject });
            let answer = context.request(format!("STREAM.MSG.GET.{}", info.stream_name), &asked).await;
            // An error: there is none.
            let Response::Ok(Stored { message }) = answer.map_err(failed)? else { break };
            if message.sequence > info.delivered.stream_sequence {
                break;
            }
            from = message.sequence + 1;
            let headers = message.headers.as_deref().map(|headers| STANDARD.decode(headers));
            let Some(headers) = headers.transpose().map_err(failed)? else { continue };
            if let Err(problem) = check(&headers) {
                found.push((delivered(context, (&info.stream_name, &info.name), message)?, problem));
            }
        }
    }
    Ok(found)
}

/// The subjects that a consumer has.
fn subjects(config: &Config) -> Vec<String> {
    let filters = std::iter::once(&config.filter_subject).chain(&config.filter_subjects);
    let mut subjects: Vec<String> = filters.filter(|subject| !subject.is_empty()).cloned().collect();
    if subjects.is_empty() {
        subjects.push(">".to_owned());
    }
    subjects
}

/// Checks headers as the client library reads them.
fn check(headers: &[u8]) -> Result<(), String> {
    let text = std::str::from_utf8(headers).map_err(|_| "they are not UTF-8".to_owned())?;
    let mut lines = text.lines();
    let first = lines.next().and_then(|line| line.strip_prefix("NATS/1.0")).map(str::trim);
    let status = first.ok_or("they do not begin with NATS/1.0")?.split(' ').next().unwrap_or_default();
    if !status.is_empty() {
        StatusCode::from_str(status).map_err(|_| "their status is no number".to_owned())?;
    }
    let mut is_first = true;
    for line in lines.filter(|line| !line.is_empty()) {
        if !is_first && line.starts_with(char::is_whitespace) {
            continue;
        }
        is_first = false;
        let (name, _) = line.split_once(':').ok_or("a line has no colon")?;
        HeaderName::from_str(name).map_err(|_| "a name has a character that names cannot have".to_owned())?;
    }
    Ok(())
}

/// The message as it would have been delivered, with no header but a copy of all.
fn delivered(context: &Context, (stream, consumer): (&str, &str), message: RawMessage) -> Result<Message, Error> {
    let mut headers = HeaderMap::new();
    headers.insert(HEADERS, message.headers.unwrap_or_default());
    let payload = STANDARD.decode(message.payload).map_err(failed)?;
    let (sequence, time) = (message.sequence, message.time.unix_timestamp_nanos());
    // NATS looks a message up by its sequence in the stream. The sequence in the consumer is not known, and 0 is nothing's.
    let reply = format!("$JS.ACK.{stream}.{consumer}.1.{sequence}.0.{time}.0");
    let message = async_nats::Message {
        subject: Subject::from(message.subject),
        reply: Some(Subject::from(reply)),
        length: payload.len(),
        payload: payload.into(),
        headers: Some(headers),
        status: None,
        description: None,
    };
    Ok(Message { message, context: context.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_library_cannot_read_has_a_problem() {
        for fine in ["", "\r\nA: b", "\r\nA: b\r\n c d\r\n\r\n", " 404 No Messages", "\r\nA:", "\r\nA: b: c"] {
            assert_eq!(check(format!("NATS/1.0{fine}\r\n\r\n").as_bytes()), Ok(()), "{fine:?}");
        }
        for wrong in ["\r\nA b: c", "\r\nA", "\r\n a: b", " x"] {
            assert!(check(format!("NATS/1.0{wrong}\r\n\r\n").as_bytes()).is_err(), "{wrong:?}");
        }
        assert!(
            check(b"NATS/1.0\r\nA: caf\xe9\r\n\r\n").is_err() && check(b"A: b\r\n\r\n").is_err() && check(b"").is_err()
        );
    }
}
