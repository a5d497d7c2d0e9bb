//! Messages that the client library cannot read: it ends the connection when the broker delivers one.
//!
//! NATS does not check headers. A publisher that writes a value in Latin-1, or a name with a space, makes such a message. The
//! answer to a request for a message has the headers in Base64, so that it can be looked at there.

use std::collections::BTreeSet;
use std::str::FromStr as _;
use std::sync::{Mutex, PoisonError};

use async_nats::jetstream::consumer::{Config, PullConsumer};
use async_nats::jetstream::response::Response;
use async_nats::jetstream::stream::RawMessage;
use async_nats::jetstream::{Context, Message};
use async_nats::{HeaderMap, HeaderName, Subject};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::time::{Duration, timeout};

use super::super::source::Error;
use super::failed;

/// A header of a dead letter: the headers of the message as they were, in Base64.
const HEADERS: &str = "x-oncegate-headers";

/// Where messages are looked at.
pub(super) const LOOKS_AT: &str = "STREAM.MSG.GET.";

/// How long to look, at each connection that follows a lost one.
const SEARCH: Duration = Duration::from_secs(5);

/// How many are given up with one connection: each is held in memory.
const MOST: usize = 16;

/// How far a consumer has looked. It looks again only at messages that it found, even while the server counts others as not
/// acknowledged.
#[derive(Default)]
pub(in crate::consumers) struct Looked {
    /// The sequence in the stream to go on from.
    next: u64,
    /// Those that were found and have not ended.
    found: BTreeSet<u64>,
    pub(super) has_failed: bool,
}

impl Looked {
    /// Whether a message was found and has not ended.
    pub(super) fn contains(&self, sequence: u64) -> bool {
        self.found.contains(&sequence)
    }

    /// The server has the end of a message.
    pub(super) fn ended(&mut self, sequence: u64) {
        self.found.remove(&sequence);
    }

    /// From where to look for what has been delivered after `floor`, up to `last`.
    fn start(&mut self, floor: u64, last: u64) -> u64 {
        if self.next > last + 1 {
            // The stream or the consumer was made again, and counts anew.
            (self.next, self.found) = (0, BTreeSet::new());
        }
        self.found.first().copied().unwrap_or(self.next).max(floor + 1)
    }
}

/// The answer to a request for a message.
#[derive(serde::Deserialize)]
struct Stored {
    message: RawMessage,
}

/// Messages that NATS has delivered to a consumer, that are not acknowledged and cannot be read; each with the problem. Where they
/// cannot be looked for, that is logged: the consumer goes on with the rest.
pub(super) async fn find(
    context: &Context,
    consumer: &mut PullConsumer,
    looked: &Mutex<Looked>,
    name: &str,
) -> Vec<(Message, String)> {
    let mut found = Vec::new();
    let searched = timeout(SEARCH, search(context, consumer, looked, &mut found)).await;
    if let Ok(Err(error)) = searched {
        let mut looked = looked.lock().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut looked.has_failed, true) {
            let stream = &consumer.cached_info().stream_name;
            tracing::warn!(
                consumer = name, %error,
                "messages that cannot be read are not looked for, and each of them ends the connection: let this user publish to $JS.API.STREAM.MSG.GET.{stream}"
            );
        }
    }
    found
}

async fn search(
    context: &Context,
    consumer: &mut PullConsumer,
    looked: &Mutex<Looked>,
    found: &mut Vec<(Message, String)>,
) -> Result<(), Error> {
    let looked = || looked.lock().unwrap_or_else(PoisonError::into_inner);
    let info = consumer.info().await.map_err(failed)?.clone();
    let (subjects, last) = (subjects(&info.config), info.delivered.stream_sequence);
    let mut next = looked().start(info.ack_floor.stream_sequence, last);
    while next <= last && found.len() < MOST {
        // The first message of any of its subjects.
        let mut first: Option<RawMessage> = None;
        for subject in &subjects {
            let asked = serde_json::json!({ "seq": next, "next_by_subj": subject });
            let answer = context.request(format!("{LOOKS_AT}{}", info.stream_name), &asked).await;
            // An error: there is none.
            let Response::Ok(Stored { message }) = answer.map_err(failed)? else { continue };
            if first.as_ref().is_none_or(|first| message.sequence < first.sequence) {
                first = Some(message);
            }
        }
        let Some(message) = first.filter(|message| message.sequence <= last) else {
            next = last + 1;
            break;
        };
        next = message.sequence + 1;
        let is_known = {
            let mut looked = looked();
            let is_known = message.sequence < looked.next && !looked.found.contains(&message.sequence);
            looked.next = looked.next.max(next);
            is_known
        };
        if is_known {
            continue;
        }
        let headers = message.headers.as_deref().map(|headers| STANDARD.decode(headers)).transpose().map_err(failed)?;
        if let Err(problem) = check(&message.subject, headers.as_deref()) {
            looked().found.insert(message.sequence);
            found.push((delivered(context, (&info.stream_name, &info.name), message)?, problem));
        }
    }
    let mut looked = looked();
    looked.next = looked.next.max(next);
    Ok(())
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

/// Checks what the client library reads, as it does.
fn check(subject: &str, headers: Option<&[u8]>) -> Result<(), String> {
    // The JSON of the server has this character in the place of bytes that are not UTF-8.
    if subject.contains(char::REPLACEMENT_CHARACTER) {
        return Err("its subject is not UTF-8".to_owned());
    }
    let Some(headers) = headers else { return Ok(()) };
    let text = std::str::from_utf8(headers).map_err(|_| "they are not UTF-8".to_owned())?;
    let mut lines = text.lines().peekable();
    let first = lines.next().and_then(|line| line.strip_prefix("NATS/1.0")).map(str::trim);
    if !first.ok_or("they do not begin with NATS/1.0")?.is_empty() {
        return Err("they have a status, as only answers of the server do".to_owned());
    }
    while let Some(line) = lines.next() {
        if line.is_empty() {
            continue;
        }
        let (name, value) = line.split_once(':').ok_or("a line has no colon")?;
        HeaderName::from_str(name).map_err(|_| "a name has a character that names cannot have".to_owned())?;
        let mut has_return = value.contains('\r');
        while let Some(more) = lines.next_if(|line| line.starts_with(char::is_whitespace)) {
            has_return |= more.contains('\r');
        }
        if has_return {
            return Err("a value has a carriage return".to_owned());
        }
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
        let check = |headers: &[u8]| check("orders.new", Some(headers));
        for fine in ["", "\r\nA: b", "\r\nA: b\r\n c d\r\n\r\n", "\r\nA:", "\r\nA: b: c"] {
            assert_eq!(check(format!("NATS/1.0{fine}\r\n\r\n").as_bytes()), Ok(()), "{fine:?}");
        }
        for wrong in
            ["\r\nA b: c", "\r\nA", "\r\n a: b", " x", " 503", "\r\nA: b\rc", "\r\nA: b\r\n\r\n c", "\r\nA: b\r\n c\rd"]
        {
            assert!(check(format!("NATS/1.0{wrong}\r\n\r\n").as_bytes()).is_err(), "{wrong:?}");
        }
        assert!(
            check(b"NATS/1.0\r\nA: caf\xe9\r\n\r\n").is_err() && check(b"A: b\r\n\r\n").is_err() && check(b"").is_err()
        );
        assert!(super::check("orders.\u{fffd}", None).is_err() && super::check("orders.new", None).is_ok());
    }

    #[test]
    fn what_was_looked_at_is_not_looked_at_again() {
        let mut looked = Looked::default();
        assert_eq!((looked.start(0, 9), looked.start(7, 9)), (1, 8));
        looked.next = 20;
        assert_eq!((looked.start(7, 19), looked.start(30, 40)), (20, 31));
        // What was found and could not be given up is.
        looked.found.extend([9, 12]);
        assert_eq!(looked.start(7, 40), 9);
        looked.ended(9);
        looked.ended(12);
        assert_eq!(looked.start(7, 40), 20);
        // A stream that was made again begins with 1.
        assert_eq!((looked.start(0, 3), looked.next), (1, 0));
    }
}
