//! Spans: what a collector of OpenTelemetry gets of protected requests, read with the types of that project.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind, status::StatusCode};
use prost::Message as _;

use crate::support::{Awake, Gate, Plan, Reply, Request, Signal, Upstream, eventually, store};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// A collector that keeps the spans that it gets by HTTP.
fn collector() -> (Upstream, Arc<Mutex<Vec<Span>>>) {
    let spans = Arc::new(Mutex::new(Vec::new()));
    let taken = Arc::clone(&spans);
    let upstream = Upstream::start(move |request| {
        assert_eq!(request.start_line(), "POST /v1/traces HTTP/1.1");
        assert_eq!(request.head.get("content-type").as_deref(), Some("application/x-protobuf"));
        take(&taken, &request.body.bytes);
        Reply::ok("")
    });
    (upstream, spans)
}

fn take(spans: &Mutex<Vec<Span>>, bytes: &[u8]) {
    let request = ExportTraceServiceRequest::decode(bytes).expect("OTLP");
    for resource in request.resource_spans {
        let attributes = texts(&resource.resource.expect("a resource").attributes);
        assert_eq!(attributes["service.name"], "oncegate");
        for scope in resource.scope_spans {
            assert_eq!(scope.scope.expect("a scope").name, "oncegate");
            spans.lock().unwrap().extend(scope.spans);
        }
    }
}

fn texts(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |attribute: &KeyValue| match attribute.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        other => panic!("{}: {other:?}", attribute.key),
    };
    attributes.iter().map(|attribute| (attribute.key.clone(), text(attribute))).collect()
}

fn plan(upstream: &Upstream, otlp: &str, more: &str) -> Plan {
    Gate::before(upstream).top(&format!("[telemetry]\notlp = \"{otlp}\"\n{more}\n"))
}

/// The spans, once there are so many, in the order in which their requests began. Of two that were answered one after
/// the other, the threads of the gate may give the second one's first.
#[track_caller]
fn spans_of(spans: &Mutex<Vec<Span>>, count: usize) -> Vec<Span> {
    let mut spans = eventually("spans", || Some(spans.lock().unwrap().clone()).filter(|spans| spans.len() >= count));
    assert_eq!(spans.len(), count, "{spans:#?}");
    spans.sort_by_key(|span| span.start_time_unix_nano);
    spans
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Trace, parent and flags.
fn traceparent(upstream: &Upstream) -> (String, String, String) {
    let text = upstream.last().head.get("traceparent").expect("a trace");
    let parts: Vec<&str> = text.split('-').collect();
    assert_eq!((parts.len(), parts[0]), (4, "00"), "{text}");
    (parts[1].to_owned(), parts[2].to_owned(), parts[3].to_owned())
}

#[test]
fn a_conflict_links_to_the_attempt_that_runs() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("answer").hold_until(&held));
    let (collector, spans) = collector();
    let gate = plan(&upstream, &collector.url(), "sample = 1.0").start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/charges", "k", "{}"));
        upstream.wait_for_runs(1);
        gate.post("/charges", "k", "{}").expect_problem(409, "in-flight");
        signal.open();
        first.join().expect("an answer").expect(200, "executed");
    });
    let spans = spans_of(&spans, 2);
    let of =
        |word: &str| spans.iter().find(|span| texts(&span.attributes)["oncegate.outcome"] == word).expect("a span");
    let (conflict, first) = (of("in-flight"), of("executed"));
    assert_eq!(conflict.links.len(), 1, "{conflict:#?}");
    assert_eq!((&conflict.links[0].trace_id, &conflict.links[0].span_id), (&first.trace_id, &first.span_id));
}

#[test]
fn a_delivery_is_a_child_of_the_span_of_the_request_that_was_accepted() {
    if store::kind() == "redis" {
        return;
    }
    for given in [None, Some(format!("00-{TRACE}-{PARENT}-01"))] {
        let upstream = Upstream::start(|_| Reply::ok("answer"));
        let (collector, spans) = collector();
        let gate = plan(&upstream, &collector.url(), "sample = 1.0").defaults("mode = \"accept\"").start();
        let mut request = Request::post("/charges").key("k").body("{}");
        if let Some(given) = &given {
            request = request.header("traceparent", given);
        }
        request.send(&gate).expect(202, "accepted");
        upstream.wait_for_runs(1);
        let accepted = &spans_of(&spans, 1)[0];
        let expected = (hex(&accepted.trace_id), hex(&accepted.span_id), "01".to_owned());
        assert_eq!(traceparent(&upstream), expected, "{given:?}");
        assert_eq!(hex(&accepted.parent_span_id), given.map(|_| PARENT.to_owned()).unwrap_or_default());
    }
}

#[test]
fn a_protected_request_has_a_span_and_its_replay_links_to_it() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let (collector, spans) = collector();
    let gate = plan(&upstream, &collector.url(), "sample = 1.0").start();
    let request = Request::post("/charges?token=hush").key("order-number-1").body("{}");
    request.send(&gate).expect(200, "executed");
    let (trace, parent, flags) = traceparent(&upstream);
    request.send(&gate).expect(200, "replayed");
    // Neither of these is protected.
    assert_eq!(Request::get("/charges").send(&gate).status, 200);
    assert_eq!(traceparent(&upstream).2, "00");
    assert_eq!(Request::post("/charges").body("{}").send(&gate).status, 200);
    let spans = spans_of(&spans, 2);
    let (first, replay) = (&spans[0], &spans[1]);
    // The upstream's spans are its children.
    assert_eq!((hex(&first.trace_id), hex(&first.span_id), flags), (trace, parent, "01".to_owned()));
    assert!(first.parent_span_id.is_empty() && first.links.is_empty(), "{first:#?}");
    assert_eq!((&*first.name, first.kind()), ("POST all", SpanKind::Server));
    assert!(first.start_time_unix_nano < first.end_time_unix_nano);
    let attributes = texts(&first.attributes);
    let id = gate.records("key=order-number-1")[0]["id"].as_str().unwrap().to_owned();
    for (name, value) in [
        ("http.request.method", "POST"),
        ("http.response.status_code", "200"),
        ("url.scheme", "http"),
        ("url.path", "/charges"),
        ("client.address", "127.0.0.1"),
        ("network.protocol.version", "1.1"),
        ("oncegate.route", "all"),
        ("oncegate.outcome", "executed"),
        ("oncegate.record", &id),
        ("oncegate.upstream", "app"),
        ("oncegate.attempts", "1"),
    ] {
        assert_eq!(attributes.get(name).map(String::as_str), Some(value), "{attributes:#?}");
    }
    assert!(attributes["oncegate.key"].contains('…') && attributes.contains_key("oncegate.attempt"));
    let all = format!("{spans:?}");
    assert!(!all.contains("hush") && !all.contains("order-number"), "{all}");
    let token = upstream.seen()[0].head.get("idempotency-attempt").expect("a token");
    assert!(!all.contains(&token), "{all}");

    assert_eq!(texts(&replay.attributes)["oncegate.outcome"], "replayed");
    assert_ne!(replay.trace_id, first.trace_id);
    let link = &replay.links[..];
    assert_eq!(link.len(), 1, "{replay:#?}");
    assert_eq!((&link[0].trace_id, &link[0].span_id), (&first.trace_id, &first.span_id));
}

#[test]
fn the_parent_decides_and_is_the_clients() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let (collector, spans) = collector();
    let gate = plan(&upstream, &collector.url(), "sample = 0.0").start();
    let send = |key: &str, flags: &str| {
        let request = Request::post("/charges").key(key).header("traceparent", format!("00-{TRACE}-{PARENT}-{flags}"));
        request.header("tracestate", "vendor=1").body("{}").send(&gate).expect(200, "executed");
    };
    send("k-1", "00");
    assert_eq!(traceparent(&upstream), (TRACE.to_owned(), PARENT.to_owned(), "00".to_owned()));
    gate.post("/charges", "k-2", "{}").expect(200, "executed");
    assert_eq!(traceparent(&upstream).2, "00");
    send("k-3", "01");
    let span = spans_of(&spans, 1).remove(0);
    assert_eq!((hex(&span.trace_id), hex(&span.parent_span_id)), (TRACE.to_owned(), PARENT.to_owned()));
    assert_eq!(traceparent(&upstream), (TRACE.to_owned(), hex(&span.span_id), "01".to_owned()));
    assert_eq!(upstream.last().head.get("tracestate").as_deref(), Some("vendor=1"));
}

#[test]
fn a_refused_request_and_a_failed_one_have_spans() {
    let upstream = Upstream::start(|_| Reply::nothing().close());
    let (collector, spans) = collector();
    let gate = plan(&upstream, &collector.url(), "sample = 1.0").defaults("key = { required = true }").start();
    Request::post("/charges").body("{}").send(&gate).expect_bare_problem(400, "key-missing");
    gate.post("/charges", "k-1", "{}").expect_problem(502, "upstream-broken");
    gate.post("/charges", "k-1", "{}").expect_problem(409, "outcome-unknown");
    let spans = spans_of(&spans, 3);
    let outcome = |span: &Span| texts(&span.attributes)["oncegate.outcome"].clone();
    assert_eq!(spans.iter().map(outcome).collect::<Vec<_>>(), ["key-missing", "upstream-broken", "outcome-unknown"]);
    let error = |span: &Span| span.status.as_ref().is_some_and(|status| status.code() == StatusCode::Error);
    assert_eq!(spans.iter().map(error).collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(spans[2].links[0].span_id, spans[1].span_id);
}

#[test]
fn the_last_spans_are_sent_before_the_end() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let (collector, spans) = collector();
    let gate = plan(&upstream, &collector.url(), "sample = 1").start();
    for number in 0..20 {
        gate.post("/charges", &format!("k-{number}"), "{}").expect(200, "executed");
    }
    gate.stop();
    assert_eq!(spans.lock().unwrap().len(), 20);
}

#[test]
fn a_collector_that_is_away_costs_spans_and_nothing_else() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let away = Upstream::free_address();
    let gate = plan(&upstream, &format!("http://{away}"), "sample = 1").start();
    for number in 0..20 {
        gate.post("/charges", &format!("k-{number}"), "{}").expect(200, "executed");
    }
    eventually("they are counted", || (gate.metric("oncegate_spans_dropped_total", &[]) == 20.0).then_some(()));
    assert_eq!(gate.log().matches("spans are dropped").count(), 1, "{}", gate.log());
    // One that comes later gets what comes later.
    let spans = Arc::new(Mutex::new(Vec::new()));
    let taken = Arc::clone(&spans);
    let _collector = Upstream::start_at(away, move |request| {
        take(&taken, &request.body.bytes);
        Reply::ok("")
    });
    gate.post("/charges", "k-20", "{}").expect(200, "executed");
    spans_of(&spans, 1);
}

#[test]
fn a_collector_that_hangs_delays_no_request_and_hardly_the_end() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let signal = Signal::new();
    let held = signal.clone();
    let collector = Upstream::start(move |_| Reply::ok("").hold_until(&held));
    let gate = plan(&upstream, &collector.url(), "sample = 1").start();
    gate.post("/charges", "k-0", "{}").expect(200, "executed");
    collector.wait_for_runs(1);
    let begun = Awake::start();
    for number in 1..50 {
        gate.post("/charges", &format!("k-{number}"), "{}").expect(200, "executed");
    }
    // Far less than any of them would take that waited for the collector.
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    let ending = Awake::start();
    gate.stop();
    assert!(ending.elapsed() < Duration::from_secs(8), "{:?}", ending.elapsed());
    signal.open();
}

#[test]
fn a_collector_may_speak_grpc() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let spans = Arc::new(Mutex::new(Vec::new()));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    let taken = Arc::clone(&spans);
    runtime.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let taken = Arc::clone(&taken);
            let service = service_fn(move |request: hyper::Request<Incoming>| {
                let taken = Arc::clone(&taken);
                async move {
                    let path = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
                    assert_eq!(request.uri().path(), path);
                    assert_eq!(request.headers()["content-type"], "application/grpc");
                    let body = request.into_body().collect().await.unwrap().to_bytes();
                    assert_eq!(
                        (body[0], u32::from_be_bytes(body[1..5].try_into().unwrap())),
                        (0, body.len() as u32 - 5)
                    );
                    take(&taken, &body[5..]);
                    let mut trailers = http::HeaderMap::new();
                    trailers.insert("grpc-status", "0".parse().unwrap());
                    let frames = [Frame::data(Bytes::from_static(&[0; 5])), Frame::trailers(trailers)];
                    let frames = frames.map(Ok::<_, std::convert::Infallible>);
                    let body = StreamBody::new(futures_util::stream::iter(frames));
                    let response = hyper::Response::builder().header("content-type", "application/grpc");
                    Ok::<_, std::convert::Infallible>(response.body(body).unwrap())
                }
            });
            let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
        }
    });
    let gate = plan(&upstream, &format!("http://{address}"), "protocol = \"grpc\"\nsample = 1").start();
    for key in ["k-1", "k-2"] {
        gate.post("/charges", key, "{}").expect(200, "executed");
        spans_of(&spans, usize::from(key == "k-2") + 1);
    }
    assert_eq!(gate.metric("oncegate_spans_dropped_total", &[]), 0.0);
}

#[test]
fn a_reload_changes_the_collector() {
    let upstream = Upstream::start(|_| Reply::ok("answer"));
    let ((first, first_spans), (second, second_spans)) = (collector(), collector());
    let gate = plan(&upstream, &first.url(), "sample = 1").start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    let config = gate.plan.path("oncegate.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace(&first.url(), &second.url())).unwrap();
    let reloaded = gate.admin("POST", "/api/v1/reload", Some(&serde_json::json!({})));
    assert_eq!(reloaded.status, 200, "{}", reloaded.show());
    gate.post("/charges", "k-2", "{}").expect(200, "executed");
    spans_of(&first_spans, 1);
    spans_of(&second_spans, 1);
}
