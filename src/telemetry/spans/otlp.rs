//! Spans in the OpenTelemetry protocol (OTLP), as the crate of the OpenTelemetry project writes it in protobuf.

use http::uri::Authority;
use http::{StatusCode, Version};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::{Link, SpanKind};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode as SpanStatus;
use opentelemetry_proto::tonic::trace::v1::{self as otlp, ResourceSpans, ScopeSpans};
use prost::Message as _;

use super::Span;
use crate::telemetry::rfc3339;

/// The sampled flag of a trace (W3C Trace Context, 3.2.2.5).
const SAMPLED: u32 = 1;

const NAME: &str = "oncegate";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// One request to a collector with all of these spans.
pub(super) fn encode(spans: &[Span]) -> Vec<u8> {
    let resource = Resource {
        attributes: vec![text("service.name", NAME), text("service.version", VERSION)],
        ..Resource::default()
    };
    let scope = InstrumentationScope { name: NAME.into(), version: VERSION.into(), ..InstrumentationScope::default() };
    let spans = spans.iter().map(span).collect();
    let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() }];
    let resource_spans = ResourceSpans { resource: Some(resource), scope_spans, ..ResourceSpans::default() };
    ExportTraceServiceRequest { resource_spans: vec![resource_spans] }.encode_to_vec()
}

fn span(Span { context, parent, facts }: &Span) -> otlp::Span {
    let (seen, noted) = (&facts.seen, &facts.noted);
    let method = seen.method.as_ref().map_or("HTTP", |method| method.as_str());
    let route = facts.route.as_deref();
    let host = seen.host.as_ref().and_then(|host| Authority::try_from(host.as_bytes()).ok());
    let version = match seen.version {
        Some(Version::HTTP_10) => Some("1.0"),
        Some(Version::HTTP_11) => Some("1.1"),
        Some(Version::HTTP_2) => Some("2"),
        _ => None,
    };
    let micros = |time: std::time::Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let attributes = [
        Some(text("http.request.method", method)),
        seen.target.as_ref().map(|target| text("url.path", target.path())),
        Some(text("url.scheme", if facts.is_secure { "https" } else { "http" })),
        host.as_ref().map(|host| text("server.address", host.host())),
        host.as_ref().and_then(Authority::port_u16).map(|port| count("server.port", port.into())),
        Some(text("client.address", facts.client().to_string())),
        version.map(|version| text("network.protocol.version", version)),
        facts.status.map(|status| count("http.response.status_code", status.as_u16().into())),
        Some(count("http.response.body.size", facts.bytes)),
        Some(text("oncegate.request", facts.request.to_string())),
        route.map(|route| text("oncegate.route", route)),
        facts.outcome.map(|outcome| text("oncegate.outcome", outcome.as_str())),
        noted.key.as_ref().map(|key| text("oncegate.key", key.to_string())),
        noted.record.as_ref().map(|record| text("oncegate.record", record.to_string())),
        noted.attempt.map(|attempt| text("oncegate.attempt", rfc3339(attempt).to_string())),
        noted.attempt.map(|_| count("oncegate.attempts", noted.attempts.into())),
        noted.upstream.as_ref().map(|upstream| text("oncegate.upstream", upstream.to_string())),
        noted.upstream_time.map(|time| count("oncegate.upstream.micros", micros(time))),
        noted.store_time.map(|time| count("oncegate.store.micros", micros(time))),
    ];
    let nanos = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let link = noted.first.map(|first| Link {
        trace_id: first.trace.to_be_bytes().into(),
        span_id: first.span.to_be_bytes().into(),
        ..Link::default()
    });
    // Of a server, the client's own mistakes are no errors (OpenTelemetry semantic conventions, HTTP spans).
    let failed = facts.status.filter(StatusCode::is_server_error);
    otlp::Span {
        trace_id: context.trace.to_be_bytes().into(),
        span_id: context.span.to_be_bytes().into(),
        parent_span_id: parent.map_or_else(Vec::new, |parent| parent.to_be_bytes().into()),
        flags: SAMPLED,
        name: route.map_or_else(|| method.to_owned(), |route| format!("{method} {route}")),
        kind: SpanKind::Server.into(),
        start_time_unix_nano: nanos(facts.since),
        end_time_unix_nano: nanos(facts.since + facts.took),
        attributes: attributes.into_iter().flatten().collect(),
        links: link.into_iter().collect(),
        status: failed.map(|_| otlp::Status { code: SpanStatus::Error.into(), ..otlp::Status::default() }),
        ..otlp::Span::default()
    }
}

fn text(key: &str, value: impl Into<String>) -> KeyValue {
    attribute(key, Value::StringValue(value.into()))
}

fn count(key: &str, value: u64) -> KeyValue {
    attribute(key, Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX)))
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.into(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}
