//! Spans in the OpenTelemetry protocol: `ExportTraceServiceRequest` of opentelemetry-proto 1, in protobuf.
//!
//! Seven messages are written and none is read, so that no crate is needed for it. The tests of the wire read them with the
//! crate of the OpenTelemetry project.

use std::fmt::Display;
use std::io::Write as _;

use http::uri::Authority;
use http::{StatusCode, Version};

use super::Span;
use crate::telemetry::rfc3339;

/// `SPAN_KIND_SERVER`
const SERVER: u64 = 2;
/// `STATUS_CODE_ERROR`
const ERROR: u64 = 2;
/// The sampled flag of a trace (W3C Trace Context, 3.2.2.5).
const SAMPLED: u32 = 1;

const NAME: &str = "oncegate";

/// One request to a collector with all of these spans.
pub(super) fn encode(spans: &[Span]) -> Vec<u8> {
    let mut request = Message::default();
    request.message(1, |resource_spans| {
        resource_spans.message(1, |resource| {
            resource.attribute(1, "service.name", NAME);
            resource.attribute(1, "service.version", env!("CARGO_PKG_VERSION"));
        });
        resource_spans.message(2, |scope_spans| {
            scope_spans.message(1, |scope| {
                scope.bytes(1, NAME.as_bytes());
                scope.bytes(2, env!("CARGO_PKG_VERSION").as_bytes());
            });
            for span in spans {
                scope_spans.message(2, |message| write_span(message, span));
            }
        });
    });
    request.0
}

fn write_span(message: &mut Message, Span { context, parent, facts }: &Span) {
    let (seen, noted) = (&facts.seen, &facts.noted);
    message.bytes(1, &context.trace.to_be_bytes());
    message.bytes(2, &context.span.to_be_bytes());
    if let Some(parent) = parent {
        message.bytes(4, &parent.to_be_bytes());
    }
    let method = seen.method.as_ref().map_or("HTTP", |method| method.as_str());
    let route = facts.route.as_deref();
    message.bytes(5, route.map_or_else(|| method.to_owned(), |route| format!("{method} {route}")).as_bytes());
    message.number(6, SERVER);
    let nanos = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    message.fixed64(7, nanos(facts.since));
    message.fixed64(8, nanos(facts.since + facts.took));
    message.attribute(9, "http.request.method", method);
    if let Some(target) = &seen.target {
        message.attribute(9, "url.path", target.path());
    }
    message.attribute(9, "url.scheme", if facts.is_secure { "https" } else { "http" });
    if let Some(host) = seen.host.as_ref().and_then(|host| Authority::try_from(host.as_bytes()).ok()) {
        message.attribute(9, "server.address", host.host());
        if let Some(port) = host.port_u16() {
            message.count(9, "server.port", port.into());
        }
    }
    message.attribute(9, "client.address", facts.client());
    let version = match seen.version {
        Some(Version::HTTP_10) => Some("1.0"),
        Some(Version::HTTP_11) => Some("1.1"),
        Some(Version::HTTP_2) => Some("2"),
        _ => None,
    };
    if let Some(version) = version {
        message.attribute(9, "network.protocol.version", version);
    }
    if let Some(status) = facts.status {
        message.count(9, "http.response.status_code", status.as_u16().into());
    }
    message.count(9, "http.response.body.size", facts.bytes);
    message.attribute(9, "oncegate.request", facts.request);
    if let Some(route) = route {
        message.attribute(9, "oncegate.route", route);
    }
    if let Some(outcome) = facts.outcome {
        message.attribute(9, "oncegate.outcome", outcome.as_str());
    }
    if let Some(key) = &noted.key {
        message.attribute(9, "oncegate.key", key);
    }
    if let Some(record) = &noted.record {
        message.attribute(9, "oncegate.record", record);
    }
    if let Some(attempt) = noted.attempt {
        message.attribute(9, "oncegate.attempt", rfc3339(attempt));
        message.count(9, "oncegate.attempts", noted.attempts.into());
    }
    if let Some(upstream) = &noted.upstream {
        message.attribute(9, "oncegate.upstream", upstream);
    }
    for (name, time) in [("oncegate.upstream.micros", noted.upstream_time), ("oncegate.store.micros", noted.store_time)]
    {
        if let Some(time) = time {
            message.count(9, name, u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
        }
    }
    if let Some(first) = noted.first {
        message.message(13, |link| {
            link.bytes(1, &first.trace.to_be_bytes());
            link.bytes(2, &first.span.to_be_bytes());
        });
    }
    // Of a server, the client's own mistakes are no errors (OpenTelemetry semantic conventions, HTTP spans).
    if facts.status.is_some_and(|status: StatusCode| status.is_server_error()) {
        message.message(15, |status| status.number(3, ERROR));
    }
    message.fixed32(16, SAMPLED);
}

/// A protobuf message that is written.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    /// A message in this one.
    fn message(&mut self, field: u64, write: impl FnOnce(&mut Self)) {
        self.varint(field << 3 | 2);
        // Most lengths take one byte.
        let at = self.0.len();
        self.0.push(0);
        write(self);
        match self.0.len() - at - 1 {
            short @ ..0x80 => self.0[at] = short as u8,
            long => {
                let mut length = Self::default();
                length.varint(long as u64);
                self.0.splice(at..=at, length.0);
            }
        }
    }

    /// `KeyValue` with text.
    fn attribute(&mut self, field: u64, key: &str, value: impl Display) {
        self.message(field, |pair| {
            pair.bytes(1, key.as_bytes());
            // A string is written as a message is. Nothing fails to be written to memory.
            pair.message(2, |any| any.message(1, |text| drop(write!(text.0, "{value}"))));
        });
    }

    /// `KeyValue` with a number.
    fn count(&mut self, field: u64, key: &str, value: u64) {
        self.message(field, |pair| {
            pair.bytes(1, key.as_bytes());
            pair.message(2, |any| any.number(3, value.min(i64::MAX as u64)));
        });
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn number(&mut self, field: u64, number: u64) {
        self.varint(field << 3);
        self.varint(number);
    }

    fn fixed64(&mut self, field: u64, number: u64) {
        self.varint(field << 3 | 1);
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn fixed32(&mut self, field: u64, number: u32) {
        self.varint(field << 3 | 5);
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push((number & 0x7f) as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_written_as_its_bytes_are() {
        for length in [0, 1, 0x7f, 0x80, 0x3fff, 0x4000] {
            let (mut nested, mut plain) = (Message::default(), Message::default());
            nested.message(1, |outer| outer.message(2, |inner| inner.0.extend(std::iter::repeat_n(7, length))));
            let mut outer = Message::default();
            outer.bytes(2, &vec![7; length]);
            plain.bytes(1, &outer.0);
            assert_eq!(nested.0, plain.0, "{length}");
        }
    }
}
