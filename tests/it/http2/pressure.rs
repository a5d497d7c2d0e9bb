//! What one side does not take is not taken from the other either, and holds up nobody else.
//!
//! HTTP/1.1 on both sides is tested in `passthrough`.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{client, server};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::support::frames::{END_HEADERS, END_STREAM, Ended, Ending, Frames, HEADERS, WINDOW_UPDATE, request};
use crate::support::wait::PATIENCE;
use crate::support::{Gate, Plan};

/// As much as nobody holds on the way.
const SIZE: usize = 48 << 20;
const PIECE: usize = 64 << 10;

/// So many messages of a few bytes.
const DROPS: usize = 20_000;
const DROP: usize = 32;

/// The most memory of the gate, in bytes.
const MEMORY: u64 = 60 << 20;

type Body = BoxBody<Bytes, Infallible>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Speaks {
    Http1,
    Http2,
}
use Speaks::{Http1, Http2};

/// A client and an upstream.
const PAIRS: [(Speaks, Speaks); 3] = [(Http2, Http1), (Http1, Http2), (Http2, Http2)];

/// A body of [`SIZE`], and how much of it was given away.
fn large() -> (Arc<AtomicUsize>, Body) {
    let given = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&given);
    let piece = Bytes::from(vec![b'x'; PIECE]);
    let pieces = (0..SIZE / PIECE).map(move |_| {
        counted.fetch_add(PIECE, Ordering::SeqCst);
        Ok(Frame::data(piece.clone()))
    });
    (given, BodyExt::boxed(StreamBody::new(stream::iter(pieces))))
}

/// How much was given when no more is taken.
async fn settled(given: &AtomicUsize) -> usize {
    loop {
        let before = given.load(Ordering::SeqCst);
        sleep(Duration::from_millis(400)).await;
        if before > 0 && given.load(Ordering::SeqCst) == before {
            return before;
        }
    }
}

/// How many bytes come until the end.
async fn count(mut body: Incoming) -> usize {
    let mut size = 0;
    while let Some(frame) = timeout(PATIENCE, body.frame()).await.expect("more of it in time") {
        size += frame.expect("it goes on").data_ref().map_or(0, Bytes::len);
    }
    size
}

/// An upstream. Ends when dropped.
struct Behind {
    speaks: Speaks,
    address: SocketAddr,
    shared: Arc<Shared>,
    runtime: Runtime,
}

struct Shared {
    /// How much it has given to who asked for `/large` or `/drops`, of them all.
    given: AtomicUsize,
    /// Whether it reads what is sent to `/slow`.
    reads: watch::Sender<bool>,
    connections: AtomicUsize,
}

impl Behind {
    fn start(speaks: Speaks) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (given, connections) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let shared = Arc::new(Shared { given, reads: watch::Sender::new(false), connections });
        let serving = Arc::clone(&shared);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                serving.connections.fetch_add(1, Ordering::SeqCst);
                let shared = Arc::clone(&serving);
                let service = service_fn(move |request| answer(request, Arc::clone(&shared)));
                let stream = TokioIo::new(stream);
                match speaks {
                    Http1 => drop(tokio::spawn(server::conn::http1::Builder::new().serve_connection(stream, service))),
                    Http2 => {
                        let mut server = server::conn::http2::Builder::new(TokioExecutor::new());
                        // One that it does not read leaves room for others.
                        server.initial_stream_window_size(64 << 10).initial_connection_window_size(1 << 20);
                        drop(tokio::spawn(server.serve_connection(stream, service)));
                    }
                }
            }
        });
        Self { speaks, address, shared, runtime }
    }

    fn plan(&self) -> Plan {
        let plan = Gate::before_url(&format!("http://{}", self.address));
        if self.speaks == Http2 { plan.upstream("protocol = \"h2\"") } else { plan }
    }
}

async fn answer(request: Request<Incoming>, shared: Arc<Shared>) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    let answer = match path.as_str() {
        "/large" => Some((SIZE, PIECE)),
        "/drops" => Some((DROPS * DROP, DROP)),
        _ => None,
    };
    if let Some((size, piece)) = answer {
        let bytes = Bytes::from(vec![b'x'; piece]);
        let pieces = (0..size / piece).map(move |_| {
            shared.given.fetch_add(piece, Ordering::SeqCst);
            Ok(Frame::data(bytes.clone()))
        });
        return Ok(Response::new(BodyExt::boxed(StreamBody::new(stream::iter(pieces)))));
    }
    if path == "/slow" {
        shared.reads.subscribe().wait_for(|reads| *reads).await.expect("an upstream");
    }
    let size = count(request.into_body()).await;
    Ok(Response::new(Full::from(size.to_string()).boxed()))
}

/// A connection to the gate.
enum Client {
    Http1(client::conn::http1::SendRequest<Body>),
    Http2(client::conn::http2::SendRequest<Body>),
}

impl Client {
    async fn connect(speaks: Speaks, gate: &Gate) -> Self {
        let stream = TokioIo::new(TcpStream::connect(gate.address).await.expect("the gate listens"));
        match speaks {
            Http1 => {
                let (sender, connection) = client::conn::http1::handshake(stream).await.unwrap();
                tokio::spawn(connection);
                Self::Http1(sender)
            }
            Http2 => {
                let executor = TokioExecutor::new();
                let (sender, connection) = client::conn::http2::handshake(executor, stream).await.unwrap();
                tokio::spawn(connection);
                Self::Http2(sender)
            }
        }
    }

    /// For an exchange beside those that go on: on the same connection, where that is possible.
    async fn beside(&self, gate: &Gate) -> Self {
        match self {
            Self::Http1(_) => Self::connect(Http1, gate).await,
            Self::Http2(sender) => Self::Http2(sender.clone()),
        }
    }

    /// Sends a request, and waits for the head of its answer.
    async fn send(&mut self, method: &str, path: &str, body: Body) -> Incoming {
        let request = Request::builder().method(method);
        let response = match self {
            Self::Http1(sender) => {
                let request = request.uri(path).header("host", "gate.test").body(body).unwrap();
                timeout(PATIENCE, sender.ready()).await.expect("a free connection in time").expect("a free connection");
                timeout(PATIENCE, sender.send_request(request)).await
            }
            Self::Http2(sender) => {
                let request = request.uri(format!("http://gate.test{path}")).body(body).unwrap();
                timeout(PATIENCE, sender.send_request(request)).await
            }
        };
        let response = response.expect("an answer in time").expect("an answer");
        assert_eq!(response.status(), 200);
        response.into_body()
    }

    async fn text(&mut self, method: &str, path: &str, body: Body) -> String {
        let body = self.send(method, path, body).await;
        let body = timeout(PATIENCE, body.collect()).await.expect("all of it in time").expect("all of it");
        String::from_utf8_lossy(&body.to_bytes()).into_owned()
    }

    /// Exchanges of others, there and back.
    async fn others(&mut self) {
        for _ in 0..10 {
            assert_eq!(self.text("GET", "/small", Empty::new().boxed()).await, "0");
            let size = 100 << 10;
            assert_eq!(self.text("PUT", "/read", Full::from(vec![b'x'; size]).boxed()).await, size.to_string());
        }
    }
}

#[track_caller]
fn is_bounded(gate: &Gate, pair: (Speaks, Speaks)) {
    let peak = gate.peak_memory();
    assert!(peak < MEMORY, "{pair:?}: {} MiB", peak >> 20);
}

#[test]
fn an_answer_that_is_read_slowly_is_not_buffered_for() {
    for pair in PAIRS {
        let behind = Behind::start(pair.1);
        let gate = behind.plan().start();
        behind.runtime.block_on(async {
            let mut client = Client::connect(pair.0, &gate).await;
            let answer = client.send("GET", "/large", Empty::new().boxed()).await;
            let given = settled(&behind.shared.given).await;
            assert!(given < SIZE, "{pair:?}: all of it was taken, and the client has read nothing");
            is_bounded(&gate, pair);
            assert_eq!(count(answer).await, SIZE, "{pair:?}");
        });
        is_bounded(&gate, pair);
    }
}

#[test]
fn an_upstream_that_reads_slowly_is_not_buffered_for() {
    for pair in PAIRS {
        let behind = Behind::start(pair.1);
        let gate = behind.plan().start();
        behind.runtime.block_on(async {
            let mut client = Client::connect(pair.0, &gate).await;
            let (sent, body) = large();
            let answer = tokio::spawn(async move { client.text("PUT", "/slow", body).await });
            let sent = settled(&sent).await;
            assert!(sent < SIZE, "{pair:?}: all of it was taken, and the upstream has read nothing");
            is_bounded(&gate, pair);
            behind.shared.reads.send_replace(true);
            assert_eq!(answer.await.unwrap(), SIZE.to_string(), "{pair:?}");
        });
        is_bounded(&gate, pair);
    }
}

/// Neither on the connection of the client, nor on that to the upstream.
#[test]
fn an_exchange_that_stands_still_holds_up_no_other() {
    for pair in PAIRS {
        let behind = Behind::start(pair.1);
        let gate = behind.plan().start();
        behind.runtime.block_on(async {
            let mut unread = Client::connect(pair.0, &gate).await;
            let answer = unread.send("GET", "/large", Empty::new().boxed()).await;
            assert!(settled(&behind.shared.given).await < SIZE);
            unread.beside(&gate).await.others().await;
            let mut sending = unread.beside(&gate).await;
            let (sent, body) = large();
            let sending = tokio::spawn(async move { sending.text("PUT", "/slow", body).await });
            assert!(settled(&sent).await < SIZE);
            unread.beside(&gate).await.others().await;
            behind.shared.reads.send_replace(true);
            assert_eq!((count(answer).await, sending.await.unwrap()), (SIZE, SIZE.to_string()), "{pair:?}");
        });
        if pair == (Http2, Http2) {
            assert_eq!(behind.shared.connections.load(Ordering::SeqCst), 1, "all of that on one connection");
        }
    }
}

/// Messages of a few bytes each, as calls stream them, that an upstream does not take yet: h2 counts what waits.
#[test]
fn small_pieces_that_wait_are_no_flood() {
    let behind = Behind::start(Http1);
    let gate = behind.plan().start();
    behind.runtime.block_on(async {
        let mut client = Client::connect(Http2, &gate).await;
        let mut other = client.beside(&gate).await;
        let sent = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&sent);
        let pieces = (0..DROPS).map(move |_| {
            counted.fetch_add(1, Ordering::SeqCst);
            Ok(Frame::data(Bytes::from_static(&[b'x'; DROP])))
        });
        let body = BodyExt::boxed(StreamBody::new(stream::iter(pieces)));
        let answer = tokio::spawn(async move { client.text("PUT", "/slow", body).await });
        settled(&sent).await;
        other.others().await;
        behind.shared.reads.send_replace(true);
        assert_eq!(answer.await.unwrap(), (DROPS * DROP).to_string());
    });
}

/// The same in answers that clients do not take: others have theirs on the same connection to the upstream.
#[test]
fn answers_in_small_pieces_that_wait_are_no_flood() {
    let behind = Behind::start(Http2);
    let gate = behind.plan().start();
    let mut client = Frames::connect(gate.address, &[(4, 0)]);
    for nth in 0..20 {
        client.send(HEADERS, END_HEADERS | END_STREAM, 2 * nth + 1, &request("GET", "/drops", &[]));
    }
    behind.runtime.block_on(settled(&behind.shared.given));
    client.send(HEADERS, END_HEADERS | END_STREAM, 41, &request("GET", "/small", &[]));
    assert_eq!(client.ending(41), Ending::Status(200));
    assert_eq!(behind.shared.connections.load(Ordering::SeqCst), 1);
    let window = u32::MAX >> 2;
    client.send(WINDOW_UPDATE, 0, 0, &window.to_be_bytes()).send(WINDOW_UPDATE, 0, 1, &window.to_be_bytes());
    let (body, ended) = client.body(1);
    assert_eq!((body.len(), ended), (DROPS * DROP, Ended::Whole));
}
