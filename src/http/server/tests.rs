//! Connections, with a handler that answers what it is asked for.

use bytes::Bytes;
use http_body_util::BodyExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

use super::*;
use crate::http::fault::fault_of;
use crate::telemetry::metrics::Metrics;

struct Echo;

impl Handler for Echo {
    /// `/unread` leaves the body where it is; `/hints` says something before, `/flood` a lot; `/late` takes a minute;
    /// `/switch` becomes an echo of bytes.
    async fn handle(self: Arc<Self>, mut request: Request<RequestBody>, peer: Peer) -> Response<Body> {
        let path = request.uri().path().to_owned();
        match &path[..] {
            "/hints" => {
                let interim = peer.interim.unwrap();
                interim.send(StatusCode::EARLY_HINTS, &http::HeaderMap::new());
                sleep(Duration::from_millis(10)).await;
                // Right before the answer.
                interim.send(StatusCode::PROCESSING, &http::HeaderMap::new());
            }
            "/flood" => {
                let interim = peer.interim.unwrap();
                let links = HeaderValue::from_bytes(&[b'x'; 4096]).unwrap();
                let links = http::HeaderMap::from_iter([(http::header::LINK, links)]);
                for _ in 0..10 {
                    interim.send(StatusCode::EARLY_HINTS, &links);
                }
                sleep(Duration::from_secs(3600)).await;
            }
            "/late" => sleep(Duration::from_secs(60)).await,
            "/switch" => {
                let upgrade = hyper::upgrade::on(&mut request);
                tokio::spawn(async move {
                    let (mut reader, mut writer) = tokio::io::split(TokioIo::new(upgrade.await.unwrap()));
                    tokio::io::copy(&mut reader, &mut writer).await
                });
                let mut response = Response::new(Body::empty());
                *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
                return response;
            }
            _ => {}
        }
        let said = match path.as_str() {
            "/unread" => "unread".to_owned(),
            _ => match request.into_body().collect().await {
                Ok(body) => format!("{path} {}", String::from_utf8_lossy(&body.to_bytes())),
                Err(error) => format!("{path} {:?}", fault_of(&error)),
            },
        };
        Response::new(Body::full(Bytes::from(said)))
    }

    fn refuse(&self, fault: Fault, _known: MalformedHead<'_>, _peer: &Peer) -> Response<Body> {
        let mut response = Response::new(Body::full(Bytes::from(fault.to_string())));
        *response.status_mut() = fault.code().status();
        response
    }
}

fn connect() -> (DuplexStream, watch::Sender<bool>) {
    connect_counted(&Metrics::new())
}

fn connect_counted(metrics: &Metrics) -> (DuplexStream, watch::Sender<bool>) {
    connect_idle(Duration::from_secs(20), metrics)
}

fn connect_idle(idle_timeout: Duration, metrics: &Metrics) -> (DuplexStream, watch::Sender<bool>) {
    connect_by(duplex(16 << 10), idle_timeout, metrics)
}

fn connect_by(
    (client, stream): (DuplexStream, DuplexStream),
    idle_timeout: Duration,
    metrics: &Metrics,
) -> (DuplexStream, watch::Sender<bool>) {
    let (stop, stopped) = watch::channel(false);
    let limits = Limits {
        header_timeout: Duration::from_secs(5),
        idle_timeout,
        body_timeout: Duration::from_secs(10),
        min_body_rate: 100,
        ..Limits::default()
    };
    let usage = Usage::new(&limits, metrics);
    let current = ServerState::current(Arc::new(Echo), limits, AcceptSettings::default(), usage);
    tokio::spawn(connection(stream, SocketAddr::from(([127, 0, 0, 1], 1)), current, stopped));
    (client, stop)
}

/// All that comes back to these bytes, to the end.
async fn exchange(sent: &str) -> String {
    let (mut client, _stop) = connect();
    client.write_all(sent.as_bytes()).await.unwrap();
    rest(&mut client).await
}

async fn rest(client: &mut DuplexStream) -> String {
    let mut came = String::new();
    timeout(Duration::from_secs(120), client.read_to_string(&mut came)).await.unwrap().unwrap();
    came
}

/// What comes, up to these bytes.
async fn until(client: &mut DuplexStream, end: &str) -> String {
    let mut came = Vec::new();
    while !came.ends_with(end.as_bytes()) {
        came.push(timeout(Duration::from_secs(120), client.read_u8()).await.unwrap().unwrap());
    }
    String::from_utf8(came).unwrap()
}

const GOOD: &str = "POST /good HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc";

#[tokio::test(start_paused = true)]
async fn refused_requests_are_answered_in_order() {
    for bad in [
        "POST /bad HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST /bad HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
        "GET /bad HTTP/1.1\nHost: a\n\n",
        "\u{16}\u{3}\u{1}",
    ] {
        let came = exchange(&format!("{GOOD}{GOOD}{bad}{GOOD}")).await;
        let statuses: Vec<&str> = came.match_indices("HTTP/1.1 ").map(|(at, _)| &came[at + 9..at + 12]).collect();
        assert_eq!(statuses, ["200", "200", "400"], "{came}");
        assert_eq!(came.matches("connection: close").count(), 1, "{came}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_malformed_body_is_an_error_for_its_reader() {
    let (mut client, _stop) = connect();
    client.write_all(b"POST /x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n").await.unwrap();
    sleep(Duration::from_millis(10)).await;
    client.write_all(b"zzz\r\n").await.unwrap();
    let came = rest(&mut client).await;
    assert!(came.contains("connection: close") && came.contains("/x Some(Malformed("), "{came}");
}

#[tokio::test(start_paused = true)]
async fn slow_clients_time_out() {
    let metrics = Metrics::new();
    let after = async |sent: &str, pieces: &[&str], pause: u64| {
        let (mut client, _stop) = connect_counted(&metrics);
        let began = Instant::now();
        client.write_all(sent.as_bytes()).await.unwrap();
        for piece in pieces {
            sleep(Duration::from_secs(pause)).await;
            // It may have been closed by then.
            let _ = client.write_all(piece.as_bytes()).await;
        }
        let came = rest(&mut client).await;
        (came, began.elapsed().as_secs())
    };
    assert_eq!(after("", &[], 0).await, (String::new(), 5), "silent from the beginning");
    let (came, secs) = after("GET / HTTP/1.1\r\n", &["Host: a\r\n", "A: b\r\n"], 2).await;
    assert!(came.starts_with("HTTP/1.1 408") && secs == 5, "{secs} {came}");
    let (came, secs) = after(GOOD, &[], 0).await;
    assert!(came.matches("HTTP/1.1").count() == 1 && secs == 20, "silent afterwards: {secs} {came}");
    // The head of the next request has its own time, from its first byte.
    let (came, secs) = after(GOOD, &["GET / HT"], 9).await;
    assert!(came.contains("HTTP/1.1 408") && secs == 14, "{secs} {came}");
    let slow = "POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n";
    let (came, secs) = after(slow, &[], 0).await;
    assert!(came.contains("/slow Some(BodyPaused)") && secs == 10, "{secs} {came}");
    // 500 bytes in 3 s each time: 500 bytes earn 5 s.
    let fair = "x".repeat(500);
    let (came, secs) = after(slow, &[&fair[..]; 10], 3).await;
    assert!(came.contains("/slow Some(BodyPaused)") && secs == 40, "{secs} {came}");
    // 50 bytes in 3 s each time: 50 bytes earn nothing, 100 one second.
    let (came, secs) = after(slow, &[&fair[..50]; 10], 3).await;
    assert!(came.contains("/slow Some(BodyTooSlow)"), "{came}");
    assert!((10..=32).contains(&secs), "{secs}");
    let counted = metrics.encode();
    for (limit, times) in [("header_timeout", 3), ("idle_timeout", 1), ("body_timeout", 2), ("min_body_rate", 1)] {
        assert!(counted.contains(&format!("limit=\"{limit}\"}} {times}\n")), "{limit}");
    }
}

#[tokio::test(start_paused = true)]
async fn only_between_two_requests_is_a_connection_idle() {
    let metrics = Metrics::new();
    let connect = || connect_idle(Duration::from_secs(2), &metrics);
    let began = Instant::now();
    let secs = || began.elapsed().as_secs();
    let (mut client, _stop) = connect();
    // While its request is under way, the server does not wait for the client.
    client.write_all(b"GET /late HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    until(&mut client, "/late ").await;
    assert_eq!(secs(), 60);
    sleep(Duration::from_secs(1)).await;
    client.write_all(GOOD.as_bytes()).await.unwrap();
    until(&mut client, "/good abc").await;
    sleep(Duration::from_secs(1)).await;
    // This one is read slowly, and is as long as the client reads.
    let body = "x".repeat(100_000);
    let large = format!("POST /large HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    client.write_all(large.as_bytes()).await.unwrap();
    until(&mut client, "\r\n\r\n/large ").await;
    for _ in 0..10 {
        sleep(Duration::from_secs(9)).await;
        client.read_exact(&mut [0; 10_000]).await.unwrap();
    }
    // All that was left to write was written by then, for two seconds and longer.
    assert_eq!((rest(&mut client).await, secs()), (String::new(), 152));
    let (mut client, _stop) = connect();
    client.write_all(GOOD.as_bytes()).await.unwrap();
    until(&mut client, "/good abc").await;
    sleep(Duration::from_secs(1)).await;
    client.write_all(b"GET / HT").await.unwrap();
    let came = rest(&mut client).await;
    assert!(came.starts_with("HTTP/1.1 408") && secs() == 158, "{} {came}", secs());
    assert!(metrics.encode().contains("limit=\"idle_timeout\"} 1\n"));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_no_interim_responses_is_disconnected() {
    let (mut client, _stop) = connect();
    client.write_all(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    sleep(Duration::from_secs(9)).await;
    client.read_exact(&mut [0; 1000]).await.unwrap();
    sleep(Duration::from_secs(60)).await;
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.unwrap();
    assert!(rest.len() < 20_000, "{} bytes", rest.len());
}

#[tokio::test(start_paused = true)]
async fn a_response_reaches_a_client_that_still_sends() {
    let (mut client, _stop) = connect();
    client.write_all(b"POST /unread HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n").await.unwrap();
    for _ in 0..100 {
        client.write_all(&[b'x'; 10_000]).await.unwrap();
    }
    let came = rest(&mut client).await;
    assert!(came.contains("connection: close") && came.ends_with("unread"), "{came}");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_no_response_is_disconnected() {
    let (mut client, _stop) = connect();
    let began = Instant::now();
    // Its answer is larger than what can be on the way.
    let body = "x".repeat(100_000);
    let sent = format!("POST /large HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    client.write_all(sent.as_bytes()).await.unwrap();
    until(&mut client, "\r\n\r\n").await;
    sleep(Duration::from_secs(9)).await;
    client.read_exact(&mut [0; 1000]).await.unwrap();
    sleep(Duration::from_secs(9)).await;
    client.read_exact(&mut [0; 1000]).await.unwrap();
    sleep(Duration::from_secs(60)).await;
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.unwrap();
    assert!(rest.len() < 40_000, "{} bytes after {:?}", rest.len(), began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn interim_answers_come_before_the_answer() {
    let (mut client, _stop) = connect();
    client.write_all(b"GET /hints HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    assert_eq!(until(&mut client, "\r\n\r\n").await, "HTTP/1.1 103 Early Hints\r\n\r\n");
    assert_eq!(until(&mut client, "\r\n\r\n").await, "HTTP/1.1 102 Processing\r\n\r\n");
    assert!(until(&mut client, "/hints ").await.starts_with("HTTP/1.1 200 OK\r\n"));
    // And the connection goes on.
    client.write_all(GOOD.as_bytes()).await.unwrap();
    until(&mut client, "/good abc").await;
}

#[tokio::test(start_paused = true)]
async fn after_a_switch_bytes_are_bytes() {
    let (mut client, _stop) = connect();
    let head = "GET /switch HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n\0early\n";
    client.write_all(head.as_bytes()).await.unwrap();
    assert!(until(&mut client, "\r\n\r\n").await.starts_with("HTTP/1.1 101"));
    assert_eq!(until(&mut client, "\n").await, "\0early\n");
    client.write_all(b"\xff\0\n").await.unwrap();
    client.shutdown().await.unwrap();
    let mut last = Vec::new();
    client.read_to_end(&mut last).await.unwrap();
    assert_eq!(last, b"\xff\0\n");
}

#[tokio::test(start_paused = true)]
async fn an_upgrade_that_does_not_come_about_ends_the_connection() {
    let came = exchange("GET /x HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nGET / HTTP").await;
    assert!(came.contains("connection: close") && came.ends_with("/x "), "{came}");
}

/// Closed with input unread, the connection would be reset, and the answer could be lost on its way.
#[tokio::test(start_paused = true)]
async fn behind_an_upgrade_that_does_not_come_about_the_input_is_drained() {
    let (mut client, _stop) = connect();
    client.write_all(b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n").await.unwrap();
    assert!(rest(&mut client).await.ends_with("/x "));
    client.write_all(b"GET /y HTTP/1.1\r\nHost: a\r\n\r\n").await.expect("it is still read");
    sleep(Duration::from_secs(3)).await;
    client.write_all(b"x").await.expect_err("it is closed after a pause");
}

#[tokio::test(start_paused = true)]
async fn continue_is_sent_when_the_body_is_read() {
    let expecting =
        |path: &str| format!("POST {path} HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n");
    let (mut client, _stop) = connect();
    client.write_all(expecting("/x").as_bytes()).await.unwrap();
    assert_eq!(until(&mut client, "\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(b"abc").await.unwrap();
    until(&mut client, "/x abc").await;
    client.write_all(expecting("/unread").as_bytes()).await.unwrap();
    let came = rest(&mut client).await;
    assert!(came.starts_with("HTTP/1.1 200") && came.contains("connection: close"), "{came}");
}

/// hyper closes a connection of which it has read nothing when a shutdown begins; and a client that has just connected has
/// no reason to expect that.
#[tokio::test]
async fn a_request_that_is_on_its_way_when_all_ends_is_answered() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let serve = |stream: TcpStream, peer: SocketAddr, stop| {
        let usage = Usage::new(&Limits::default(), &Metrics::new());
        let place = usage.connection(peer.ip()).unwrap();
        let current = ServerState::current(Arc::new(Echo), Limits::default(), AcceptSettings::default(), usage);
        let stream = Accepted::Tcp(stream).configure().unwrap();
        serve_on_shard((stream, peer), place, current, stop)
    };
    let (_stopping, stop) = watch::channel(true);
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (stream, peer) = listener.accept().await.unwrap();
    let mut came = String::new();
    let asks = async {
        client.write_all(b"GET /x HTTP/1.1\r\nHos").await.unwrap();
        sleep(Duration::from_millis(5)).await;
        client.write_all(b"t: a\r\n\r\n").await.unwrap();
        client.read_to_string(&mut came).await.unwrap();
    };
    let answered = async { tokio::join!(serve(stream, peer, stop.clone()), asks) };
    timeout(Duration::from_secs(20), answered).await.unwrap();
    assert!(came.ends_with("/x "), "{came:?}");

    // One that says nothing holds nothing up.
    let _silent = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (stream, peer) = listener.accept().await.unwrap();
    timeout(Duration::from_secs(20), serve(stream, peer, stop)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_in_the_backlog_are_answered_at_shutdown() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        clients.push(client);
    }
    let (_stopping, stop) = watch::channel(true);
    let usage = Usage::new(&Limits::default(), &Metrics::new());
    let current = ServerState::current(Arc::new(Echo), Limits::default(), AcceptSettings::default(), usage);
    let served = serve(Listener::Tcp(listener), Arc::new(Shards::start().unwrap()), current, stop);
    let answers = async {
        for client in &mut clients {
            let mut came = String::new();
            client.read_to_string(&mut came).await.unwrap();
            assert!(came.ends_with("/x "), "{came:?}");
        }
    };
    timeout(Duration::from_secs(20), async { tokio::join!(served, answers) }).await.unwrap();
}

/// All of it has come by the time that the gate looks, and would be read at one go.
#[tokio::test]
async fn a_flooding_client_gets_a_goaway_before_it_is_disconnected() {
    use crate::http::frame::{GOAWAY, HEADER, SETTINGS, WINDOW_UPDATE};

    let window = [0, 0, 4, WINDOW_UPDATE, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    let sent = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice(), &[0, 0, 0, SETTINGS, 0, 0, 0, 0, 0]].concat();
    let sent = [sent, window.repeat(400_000)].concat();
    let (mut client, stream) = duplex(sent.len());
    client.write_all(&sent).await.unwrap();
    let (mut client, _stop) = connect_by((client, stream), Duration::from_secs(20), &Metrics::new());
    let (mut came, mut goodbyes) = (Vec::new(), Vec::new());
    timeout(Duration::from_secs(30), client.read_to_end(&mut came)).await.unwrap().unwrap();
    let mut rest = &came[..];
    while let Some((head, frames)) = rest.split_first_chunk::<HEADER>() {
        let (payload, frames) = frames.split_at(crate::http::frame::length(*head) as usize);
        if head[3] == GOAWAY {
            goodbyes.push(payload[4..8].to_vec());
        }
        rest = frames;
    }
    // Before its reason, the last stream that is answered (RFC 9113, 6.8).
    assert_eq!(goodbyes, [[0; 4]]);
}
