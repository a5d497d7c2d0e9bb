//! gRPC over HTTP/2 on both sides, as it is spoken.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::support::frames::{END_HEADERS, END_STREAM, Frames, HEADERS, request};
use crate::support::http2::{Answer, Http2, post};
use crate::support::service::{Asked, Service};
use crate::support::wait::PATIENCE;
use crate::support::{Gate, Plan};

const MESSAGE: &str = "\0\0\0\0\x05\x0a\x03abc";

fn before(url: &str) -> Plan {
    Gate::before_url(url).upstream("protocol = \"h2\"")
}

/// Calls once, with a key and some metadata.
fn call(gate: &Gate, key: &str) -> Answer {
    let request = post("/pay.Payments/Charge").header("content-type", "application/grpc").header("te", "trailers");
    let request = request.header("idempotency-key", key).header("grpc-timeout", "5S").header("x-own-bin", "AAEC");
    Http2::connect(gate).send(request.body(MESSAGE).unwrap())
}

/// The headers but for the gate's three.
fn own(answer: &Answer) -> HeaderMap {
    let mut headers = answer.headers.clone();
    for name in ["idempotency-status", "idempotent-replayed", "idempotency-expires"] {
        headers.remove(name);
    }
    headers
}

#[test]
fn a_call_runs_once_and_its_retry_is_the_same() {
    let service = Service::start(|_: &Asked| {
        let trailers = vec![("grpc-status", "0"), ("grpc-message", "well"), ("grpc-status-details-bin", "CAAS")];
        (200, vec![("content-type", "application/grpc"), ("x-meta-bin", "AAEC")], MESSAGE, trailers)
    });
    let gate = before(&service.url()).start();
    let first = call(&gate, "k-1");
    first.expect(200, "executed");
    let retry = call(&gate, "k-1");
    retry.expect(200, "replayed");
    assert_eq!((own(&first), &first.body, &first.trailers), (own(&retry), &retry.body, &retry.trailers));
    assert_eq!(retry.body, MESSAGE);
    assert_eq!(retry.trailers.as_ref().unwrap()["grpc-status-details-bin"], "CAAS");
    // Nothing that only HTTP/1.1 needs.
    assert!(!retry.headers.contains_key("trailer") && !retry.headers.contains_key("transfer-encoding"), "{retry:?}");
    let [asked] = &service.asked()[..] else { panic!("once") };
    assert_eq!(asked.body, MESSAGE);
    for (name, value) in [("te", "trailers"), ("grpc-timeout", "5S"), ("x-own-bin", "AAEC")] {
        assert_eq!(asked.headers[name], value);
    }
}

#[test]
fn trailers_alone_come_as_one_block_the_first_time_and_again() {
    let service = Service::start(|_: &Asked| {
        (200, vec![("content-type", "application/grpc"), ("grpc-status", "5"), ("grpc-message", "none")], "", vec![])
    });
    let gate = before(&service.url()).start();
    for word in ["executed", "replayed"] {
        let answer = call(&gate, "k-1");
        answer.expect(200, word);
        assert_eq!((answer.get("grpc-status"), answer.get("grpc-message")), ("5", "none"));
        assert!(answer.trailers.is_none() && answer.body.is_empty());
    }
    assert_eq!(service.asked().len(), 1);
}

#[test]
fn problems_are_told_in_the_words_of_grpc() {
    let service = Service::start(|_: &Asked| {
        (200, vec![("content-type", "application/grpc")], MESSAGE, vec![("grpc-status", "13")])
    });
    let gate = before(&service.url()).start();
    call(&gate, "k-1").expect(200, "outcome-unknown");
    let told = call(&gate, "k-1");
    told.expect(200, "outcome-unknown");
    assert_eq!((told.get("content-type"), told.get("grpc-status")), ("application/grpc", "2"));
    assert_eq!((told.get("grpc-retry-pushback-ms"), told.trailers.is_none()), ("-1", true));
    assert_eq!(service.asked().len(), 1);
}

/// What no route is looked for of.
#[test]
fn a_call_that_is_no_sound_request_is_refused_in_the_words_of_grpc() {
    let service = Service::start(|_: &Asked| (200, vec![], "", vec![("grpc-status", "0")]));
    let gate = before(&service.url()).top("[limits]\nmax_headers = 20").start();
    let call = || post("/pay.Payments/Charge").header("content-type", "application/grpc").header("te", "trailers");
    let many = (0..20).fold(call(), |call, nth| call.header(format!("x-{nth}"), "1"));
    let mut client = Http2::connect(&gate);
    for (request, status, code) in [
        (many, "8", "headers-too-large"),
        (call().header("expect", "more"), "3", "expectation-failed"),
        (call().header("x-padded", " y"), "3", "bad-request"),
        (call().header("host", "other.test"), "3", "bad-request"),
    ] {
        let told = client.send(request.header("idempotency-key", "k").body(MESSAGE).unwrap());
        assert_eq!((told.status, told.get("content-type")), (200, "application/grpc"), "{told:?}");
        assert_eq!((told.get("grpc-status"), told.get("grpc-retry-pushback-ms")), (status, "-1"), "{told:?}");
        assert!(told.get("grpc-message").starts_with(&format!("{code}: ")), "{told:?}");
        assert!(told.body.is_empty() && told.trailers.is_none(), "{told:?}");
        assert!(!told.headers.contains_key("content-language"), "{told:?}");
    }
    assert!(service.asked().is_empty());
    // The head is all of it.
    let head = [("content-type", &b"application/grpc"[..]), ("expect", b"more")];
    let mut client = Frames::connect(gate.address, &[]);
    client.send(HEADERS, END_HEADERS | END_STREAM, 1, &request("POST", "/pay.Payments/Charge", &head));
    assert!(client.next_of(HEADERS).expect("an answer").ends());
}

/// A body whose pieces are given one by one.
struct Pieces(UnboundedReceiver<Bytes>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

fn pieces() -> (UnboundedSender<Bytes>, Pieces) {
    let (sender, receiver) = unbounded_channel();
    (sender, Pieces(receiver))
}

/// Gives back what it is sent, as it is sent, and says in the end that all went well.
async fn echo(listener: TcpListener) {
    let service = hyper::service::service_fn(|request: Request<Incoming>| async {
        let trailers = HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]);
        let body = request.into_body().with_trailers(std::future::ready(Some(Ok(trailers))));
        let response = Response::builder().header("content-type", "application/grpc").body(body.boxed());
        Ok::<_, Infallible>(response.unwrap())
    });
    while let Ok((stream, _)) = listener.accept().await {
        let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
    }
}

#[test]
fn both_sides_stream_at_once_on_a_route_that_passes() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let gate = before(&format!("http://{}", listener.local_addr().unwrap())).start();
    runtime.spawn(echo(listener));
    let address = gate.address;
    let talk = async {
        let stream = TcpStream::connect(address).await.unwrap();
        let (mut requests, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let (sender, body) = pieces();
        let request = post("/chat.Chat/Talk").header("content-type", "application/grpc").header("te", "trailers");
        // The answer begins before the client has said a word.
        let response = requests.send_request(request.body(body).unwrap()).await.unwrap();
        assert_eq!(response.headers()["content-type"], "application/grpc");
        let mut answers = response.into_body();
        for nth in 0..50 {
            // The next message depends on the answer to this one.
            let message = Bytes::from(format!("message {nth}"));
            sender.send(message.clone()).unwrap();
            let answer = answers.frame().await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(answer, message);
        }
        drop(sender);
        let trailers = answers.frame().await.unwrap().unwrap().into_trailers().unwrap();
        assert_eq!(trailers["grpc-status"], "0");
    };
    runtime.block_on(async { tokio::time::timeout(PATIENCE, talk).await.expect("one of both was held back") });
}
