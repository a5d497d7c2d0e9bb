//! Bytes that arrive on a connection between two requests. The socket has them, and the runtime does not know of them yet: it
//! polls sockets only while a test waits.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use bytes::Bytes;
use futures_util::future::join_all;
use http_body_util::{BodyExt as _, Empty};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::time::sleep;

use super::*;
use crate::http::limits::Limits;
use crate::telemetry::metrics::Metrics;

/// An upstream, and what listens in its place.
fn upstream() -> (Upstream, TcpListener) {
    upstream_with(Protocol::Auto, Duration::from_secs(60))
}

fn upstream_with(protocol: Protocol, connect_timeout: Duration) -> (Upstream, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let settings = Settings {
        name: "app".into(),
        places: vec![UpstreamAddress::Tcp {
            host: "127.0.0.1".to_owned(),
            port: listener.local_addr().unwrap().port(),
        }],
        tls: None,
        protocol,
        timeout: Duration::from_secs(60),
        connect_timeout,
        max_connections: 20,
        max_headers: Limits::default().max_answer_headers(),
        reuse: Sharing::Always,
        client_timeout: Duration::from_secs(60),
    };
    (Upstream::new(settings, Usage::new(&Limits::default(), &Metrics::default())), listener)
}

fn request() -> Request<Body> {
    Request::get("/").header("host", "a").body(Body::empty()).unwrap()
}

/// Takes a request off a connection, and answers it.
fn answer(mut connection: &TcpStream, answer: &str) {
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        connection.read_exact(&mut byte).unwrap();
        request.push(byte[0]);
    }
    // One that is refused is not read to its end.
    let _ = connection.write_all(answer.as_bytes());
}

/// Sends a request that the next connection answers, and waits until that is idle, where it may carry another.
async fn exchange(
    upstream: &Upstream,
    listener: &TcpListener,
    said: &'static str,
    is_kept: bool,
) -> (TcpStream, Bytes) {
    let listener = listener.try_clone().unwrap();
    let answered = std::thread::spawn(move || {
        let (connection, _) = listener.accept().unwrap();
        answer(&connection, said);
        connection
    });
    let (response, pooled) = upstream.send(request(), Reuse::Protected, &SendContext::default()).await.unwrap();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    // Otherwise the thread that accepts would wait for ever.
    assert_ne!(body, "EVIL");
    let before = upstream.idle(shards::index()).len();
    pooled.return_to_pool();
    for turn in 0.. {
        let idle = upstream.idle(shards::index()).len() - before;
        assert!(idle == 0 || is_kept, "{said:?}");
        if if is_kept { idle == 1 } else { turn == 1000 } {
            break;
        }
        tokio::task::yield_now().await;
    }
    (answered.join().unwrap(), body)
}

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

#[tokio::test]
async fn a_connection_on_which_anything_has_come_carries_no_request() {
    for closes in [false, true] {
        let (upstream, listener) = upstream();
        let (mut connection, _) = exchange(&upstream, &listener, OK, true).await;
        // It has arrived when this returns, and no task has run since.
        match closes {
            false => connection.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL").unwrap(),
            true => connection.shutdown(std::net::Shutdown::Write).unwrap(),
        }
        let (_, body) = exchange(&upstream, &listener, OK, true).await;
        assert_eq!(body, "ok");
        let mut came = Vec::new();
        // Closed with bytes unread, it is reset.
        let _ = connection.read_to_end(&mut came);
        assert_eq!(came, b"", "a request was written to it");
    }
}

#[tokio::test]
async fn a_request_that_is_handed_back_has_not_begun() {
    let (upstream, listener) = upstream();
    let (connection, _) = exchange(&upstream, &listener, OK, true).await;
    // The pooled connection hands the request back, and no other can be opened.
    connection.shutdown(std::net::Shutdown::Write).unwrap();
    drop(listener);
    let context = SendContext::default();
    let error = upstream.send(request(), Reuse::Protected, &context).await.err().unwrap();
    assert!(matches!(error, Error::NotSent(NotSent::Connect(_))), "{error}");
    assert!(!context.has_begun(), "who stops waiting while a connection opens knows that nothing was sent");
}

#[tokio::test]
async fn an_ambiguous_response_returns_no_connection_to_the_pool() {
    for said in [
        "HTTP/1.1 204 No Content\r\nContent-Length: 39\r\n\r\n",
        "HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 205 Reset Content\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 205 Reset Content\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\nContent-Length: 39\r\n\r\n",
        "HTTP/1.1 103 Early Hints\r\nContent-Length: 39\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n",
    ] {
        let (upstream, listener) = upstream();
        exchange(&upstream, &listener, said, false).await;
    }
    for said in [OK, "HTTP/1.1 204 No Content\r\n\r\n", "HTTP/1.1 304 Not Modified\r\nContent-Length: 0\r\n\r\n"] {
        let (upstream, listener) = upstream();
        exchange(&upstream, &listener, said, true).await;
    }
}

#[tokio::test]
async fn a_head_that_is_refused_says_why() {
    let large = format!("HTTP/1.1 200 OK\r\nA: {}\r\n\r\n", "a".repeat(300_000));
    for (said, fault) in [
        ("HTTP/1.1 200 OK\r\nA: b\nContent-Length: 0\r\n\r\n".to_owned(), HeadFault::BareLf),
        (large, HeadFault::TooLarge),
        (format!("HTTP/1.1 200 OK\r\n{}\r\n", "A: b\r\n".repeat(101)), HeadFault::TooManyLines(100)),
        ("\0\0\0\x04\0\0\0\0\0".to_owned(), HeadFault::Http2),
    ] {
        let (upstream, listener) = upstream();
        let answered = std::thread::spawn(move || answer(&listener.accept().unwrap().0, &said));
        let error = upstream.send(request(), Reuse::Protected, &SendContext::default()).await.err().unwrap();
        assert!(matches!(&error, Error::Head(is) if *is == fault), "{error}");
        answered.join().unwrap();
    }
}

/// Sends so many requests at once to an upstream that greets each connection so late and takes so many streams on it. Gives
/// how many connections it had.
async fn burst(requests: usize, streams: u32, greeting: Duration) -> usize {
    let (upstream, listener) = upstream_with(Protocol::H2, Duration::from_secs(2));
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    let serving = tokio::spawn(async move {
        for accepted in 0.. {
            // All are there, and none has ended.
            let Ok(connection) = timeout(Duration::from_secs(3), listener.accept()).await else { return accepted };
            let (connection, _) = connection.unwrap();
            tokio::spawn(async move {
                sleep(greeting).await;
                let service = service_fn(|_| async {
                    sleep(Duration::from_secs(4)).await;
                    Ok::<_, std::convert::Infallible>(Response::new(Empty::<Bytes>::new()))
                });
                let mut serving = http2::Builder::new(TokioExecutor::new());
                let _ =
                    serving.max_concurrent_streams(streams).serve_connection(TokioIo::new(connection), service).await;
            });
        }
        unreachable!()
    });
    let one = async || {
        let (response, pooled) = upstream.send(request(), Reuse::Protected, &SendContext::default()).await?;
        assert_eq!(response.status(), 200);
        drop((response, pooled));
        Ok::<_, Error>(())
    };
    for done in join_all((0..requests).map(|_| one())).await {
        done.unwrap();
    }
    serving.await.unwrap()
}

#[tokio::test]
async fn a_burst_opens_the_connections_that_it_needs_beside_each_other() {
    // Two openings of the last take longer than `connect_timeout`, which each of them has.
    let (soon, late) = (Duration::from_millis(300), Duration::from_millis(1200));
    let (few, many, pairs) = tokio::join!(burst(20, 1, soon), burst(20, 50, soon), burst(20, 2, late));
    assert_eq!((few, many), (20, 1), "connections to one of one stream, and to one of fifty");
    assert!(pairs >= 10, "{pairs} connections of two streams");
}
