//! Sends spans to a collector of OpenTelemetry, by OTLP over HTTP or gRPC.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST, TE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Limited};
use prometheus::IntCounter;
use tokio::time::timeout;

use super::body::Body;
use super::upstream::{self, Reuse, SendContext, Upstream};
use super::usage::Usage;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::spans::Spans;

/// How long a collector may take for one batch. Meanwhile others wait, and then are dropped.
pub const DEADLINE: Duration = Duration::from_secs(5);

/// The largest answer of a collector, in bytes.
const LARGEST: usize = 1 << 20;

/// `[telemetry]`
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// How the collector is connected to.
    pub host: upstream::Settings,
    /// What is spoken to it.
    pub protocol: Protocol,
    /// Which part of the traces that begin here is sampled, from 0 to 1.
    pub sample: f64,
}

/// The transport of OTLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Protobuf over HTTP.
    Http,
    /// gRPC.
    Grpc,
}

/// Sends what the tracer takes until that is gone and all is sent. What cannot be sent is dropped and counted.
pub async fn export(settings: Settings, usage: Arc<Usage>, mut spans: Spans, dropped: IntCounter) {
    let collector = Collector { upstream: Upstream::new(settings.host, usage), protocol: settings.protocol };
    let failures = LogThrottle::each_minute();
    while let Some((batch, count)) = spans.next().await {
        let sent = timeout(DEADLINE, collector.send(batch)).await;
        let Err(error) = sent.unwrap_or_else(|_| Err("it did not answer in time".to_owned())) else { continue };
        if let Some(others) = failures.due() {
            let (collector, lost) = (collector.upstream.places(), dropped.get() + count);
            tracing::warn!(collector, error, lost, others, "spans are dropped: the collector does not take them");
        }
        // Last: who sees the count finds the line.
        dropped.inc_by(count);
    }
}

struct Collector {
    upstream: Upstream,
    protocol: Protocol,
}

impl Collector {
    async fn send(&self, spans: Vec<u8>) -> Result<(), String> {
        let (path, media, body) = match self.protocol {
            Protocol::Http => ("/v1/traces", "application/x-protobuf", spans.into()),
            Protocol::Grpc => {
                const EXPORT: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
                (EXPORT, "application/grpc", framed(&spans)?)
            }
        };
        let length = body.len();
        let mut request = Request::new(Body::full(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_static(path);
        let headers = request.headers_mut();
        let host = HeaderValue::from_str(&self.upstream.authority()).map_err(|error| error.to_string())?;
        headers.insert(HOST, host);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(media));
        headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("oncegate/", env!("CARGO_PKG_VERSION"))));
        if self.protocol == Protocol::Grpc {
            headers.insert(TE, HeaderValue::from_static("trailers"));
        }
        let context = SendContext::default();
        let sending = self.upstream.send(request, Reuse::Unprotected, &context);
        let (response, connection) = sending.await.map_err(|error| error.to_string())?;
        let (parts, body) = response.into_parts();
        let body = Limited::new(body, LARGEST).collect().await.map_err(|_| "its answer broke off".to_owned())?;
        connection.return_to_pool();
        if parts.status != StatusCode::OK {
            return Err(format!("it answered {}", parts.status.as_u16()));
        }
        match self.protocol {
            Protocol::Http => Ok(()),
            Protocol::Grpc => grpc_status(&parts.headers, body.trailers()),
        }
    }
}

/// One message of a gRPC call, not compressed.
fn framed(message: &[u8]) -> Result<Bytes, String> {
    let length = u32::try_from(message.len()).map_err(|_| "too many spans at once".to_owned())?;
    let mut frame = BytesMut::with_capacity(message.len() + 5);
    frame.put_u8(0);
    frame.put_u32(length);
    frame.put_slice(message);
    Ok(frame.freeze())
}

/// A call that has no message says how it ended in its head.
fn grpc_status(headers: &HeaderMap, trailers: Option<&HeaderMap>) -> Result<(), String> {
    const STATUS: &str = "grpc-status";
    match trailers.and_then(|trailers| trailers.get(STATUS)).or_else(|| headers.get(STATUS)) {
        Some(status) if status == "0" => Ok(()),
        Some(status) => Err(format!("it answered with gRPC status {}", String::from_utf8_lossy(status.as_bytes()))),
        None => Err("it answered without a gRPC status".to_owned()),
    }
}
