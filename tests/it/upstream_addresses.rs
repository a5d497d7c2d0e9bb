//! Where an upstream is: sockets of the file system, and several addresses.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::http2::{Http2, post};
use crate::support::{Client, Gate, H2, Reply, Service, Upstream, eventually};

#[test]
fn a_socket_of_the_file_system_is_an_upstream() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("app.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let upstream = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n{}") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.extend(byte);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npaid").unwrap();
        String::from_utf8(head).unwrap()
    });
    let gate = Gate::before_url(&format!("unix:{}", path.display())).start();
    assert_eq!(gate.post("/charges", "k", "{}").text(), "paid");
    let head = upstream.join().unwrap().to_ascii_lowercase();
    assert!(head.starts_with("post /charges http/1.1\r\n") && head.contains("\r\nhost: "), "{head}");
    std::fs::remove_file(&path).unwrap();
    assert_eq!(gate.post("/charges", "other", "{}").word(), "upstream-unreachable");
}

/// A gate before the upstreams at these addresses.
fn before(urls: &[String]) -> Gate {
    before_with(urls, "")
}

fn before_with(urls: &[String], lines: &str) -> Gate {
    let several = format!("[upstreams.several]\nurl = {urls:?}\n{lines}");
    let route = "[[routes]]\nname = \"all\"\npath = \"/{*rest}\"\nupstream = \"several\"\n";
    Gate::before_url(&urls[0]).routes(&(several + route)).start()
}

#[test]
fn connections_go_to_several_addresses_in_turn() {
    let upstreams = [(); 2].map(|()| Upstream::start(|_| Reply::last("paid")));
    let gate = before(&upstreams.each_ref().map(Upstream::url));
    for nth in 0..10 {
        assert_eq!(gate.post("/charges", &format!("k{nth}"), "{}").text(), "paid");
    }
    assert_eq!(upstreams.each_ref().map(Upstream::runs), [5, 5]);
}

#[test]
fn an_address_that_takes_no_connection_is_set_aside() {
    // An address that refuses, as long as nobody listens there.
    let refusing = Upstream::free_address();
    let upstream = Upstream::start(|_| Reply::last("paid"));
    let gate = before(&[format!("http://{refusing}"), upstream.url()]);
    for nth in 0..10 {
        assert_eq!(gate.post("/charges", &format!("k{nth}"), "{}").text(), "paid");
    }
    drop(upstream);
    // All of them are tried where all are set aside.
    let answer = gate.post("/charges", "none", "{}");
    assert_eq!(answer.word(), "upstream-unreachable", "{}", answer.show());
    let back = Upstream::start_at(refusing, |_| Reply::last("paid"));
    eventually("the address that came back", || (gate.post("/charges", "back", "{}").text() == "paid").then_some(()));
    drop(back);
}

#[test]
fn an_address_that_does_not_greet_is_set_aside() {
    let silent = H2::raw(|mut conn| conn.rest());
    // Each request takes a connection of its own.
    let good = H2::start(&[], |mut conn| {
        if let Some(stream) = conn.request() {
            conn.go_away(stream, 0);
            conn.answer(stream, b"paid");
        }
    });
    let gate = before_with(&[silent.url(), good.url()], "protocol = \"h2\"\nconnect_timeout = \"4s\"\n");
    let answers: Vec<String> = (0..10).map(|nth| gate.post("/charges", &format!("k{nth}"), "{}").word()).collect();
    assert_eq!(answers.iter().filter(|word| *word == "upstream-unreachable").count(), 1, "{answers:?}");
    assert_eq!((silent.connections(), good.connections()), (1, 9));
}

#[test]
fn an_address_whose_exchanges_break_off_is_set_aside() {
    let (bad, good) = (Upstream::start(|_| Reply::raw("").close()), Upstream::start(|_| Reply::last("paid")));
    let gate = before(&[bad.url(), good.url()]);
    for nth in 0..20 {
        let answer = gate.post("/charges", &format!("k{nth}"), "{}");
        assert!(answer.text() == "paid" || answer.word() == "upstream-broken", "{}", answer.show());
    }
    assert_eq!((bad.runs(), good.runs()), (3, 17), "and what may have been sent goes nowhere else");
}

/// A socket of the file system in front of a server of TCP; and how many connections came by it.
pub fn by_socket(path: &Path, server: SocketAddr) -> Arc<AtomicUsize> {
    let (listener, came) = (UnixListener::bind(path).unwrap(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&came);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            counted.fetch_add(1, Ordering::SeqCst);
            let (from, to) = (stream.unwrap(), TcpStream::connect(server).unwrap());
            let (mut from_too, mut to_too) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            std::thread::spawn(move || {
                let (mut from, mut to) = (from, to);
                // However it ends.
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut to_too, &mut from_too);
                let _ = from_too.shutdown(Shutdown::Both);
            });
        }
    });
    came
}

#[test]
fn http_2_is_spoken_over_a_socket_of_the_file_system_too() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("app.sock");
    let service = Service::start(|_| (200, vec![], "paid", vec![("x-sum", "6")]));
    let connections = by_socket(&path, service.address);
    let gate = Gate::before_url(&format!("unix:{}", path.display())).upstream("protocol = \"h2\"").start();
    let mut client = Http2::connect(&gate);
    let mut send = |key: &str, word: &str| {
        let request = post("/charges");
        let request = if key.is_empty() { request } else { request.header("idempotency-key", key) };
        let answer = client.send(request.body("{}").unwrap());
        answer.expect(200, word);
        assert_eq!((&*answer.body, &answer.trailers.unwrap()["x-sum"]), (&b"paid"[..], &"6".parse().unwrap()));
    };
    send("a", "executed");
    send("a", "replayed");
    send("", "");
    let open = connections.load(Ordering::SeqCst);
    for _ in 0..4 {
        send("", "");
    }
    assert_eq!(connections.load(Ordering::SeqCst), open, "the connection is kept");
    let mut old = Client::connect(gate.address);
    old.send("GET /old HTTP/1.0\r\nConnection: close\r\n\r\n");
    assert_eq!(old.response().text(), "paid");
    let targets: Vec<_> = service.asked().into_iter().map(|asked| asked.target).collect();
    assert_eq!((targets.len(), &*targets[0], &*targets[6]), (7, "http://gate.test/charges", "http://localhost/old"));
    std::fs::remove_file(&path).unwrap();
}

/// The ports of these addresses with the same number, taken by nobody else: sockets that refuse, as they do not listen.
fn same_port(addresses: &[IpAddr]) -> Vec<socket2::Socket> {
    let bound = |address: IpAddr, port: u16| {
        let address = SocketAddr::from((address, port));
        let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
        socket.bind(&address.into()).map(|()| socket)
    };
    std::iter::repeat_with(|| -> std::io::Result<Vec<_>> {
        let first = bound(addresses[0], 0)?;
        let port = first.local_addr()?.as_socket().unwrap().port();
        let others = addresses[1..].iter().map(|address| bound(*address, port));
        std::iter::once(Ok(first)).chain(others).collect()
    })
    .take(100)
    .find_map(Result::ok)
    .expect("a port that is free at all of them")
}

/// Answers `paid` on a socket that is bound; and how many requests it has answered.
fn answering(socket: &socket2::Socket) -> Arc<AtomicUsize> {
    socket.listen(64).unwrap();
    let (listener, runs) = (TcpListener::from(socket.try_clone().unwrap()), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&runs);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, mut head) = (stream.unwrap(), Vec::new());
            while !head.ends_with(b"\r\n\r\n{}") {
                let mut byte = [0];
                // A connection that was opened beside another ends without a word.
                match stream.read(&mut byte) {
                    Ok(1) => head.extend(byte),
                    _ => break,
                }
            }
            if !head.is_empty() {
                counted.fetch_add(1, Ordering::SeqCst);
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\npaid").unwrap();
            }
        }
    });
    runs
}

#[test]
fn all_addresses_of_a_name_are_an_upstream() {
    let all: Vec<IpAddr> = ["127.0.0.1", "::1", "127.77.0.1"].map(|address| address.parse().unwrap()).to_vec();
    let has_ipv6 = TcpListener::bind("[::1]:0").is_ok();
    let addresses: Vec<IpAddr> = all.into_iter().filter(|address| has_ipv6 || address.is_ipv4()).collect();
    for refusing in 0..addresses.len() {
        let sockets = same_port(&addresses);
        let port = sockets[0].local_addr().unwrap().as_socket().unwrap().port();
        let listening = sockets.iter().enumerate().filter(|(place, _)| *place != refusing);
        let runs: Vec<_> = listening.map(|(_, socket)| answering(socket)).collect();
        let gate = Gate::before_url(&format!("http://several.test:{port}")).knows(&addresses).start();
        for nth in 0..12 {
            assert_eq!(gate.post("/charges", &format!("k{nth}"), "{}").text(), "paid");
        }
        let runs: Vec<_> = runs.iter().map(|runs| runs.load(Ordering::SeqCst)).collect();
        assert!(runs.iter().sum::<usize>() == 12 && runs.iter().all(|runs| *runs >= 3), "in turn: {runs:?}");
    }
    // Of a name whose addresses all refuse, nothing was sent; and of one that has none.
    let sockets = same_port(&addresses);
    let port = sockets[0].local_addr().unwrap().as_socket().unwrap().port();
    for known in [&addresses[..], &[]] {
        let gate = Gate::before_url(&format!("http://several.test:{port}")).knows(known).start();
        assert_eq!(gate.post("/charges", "k", "{}").word(), "upstream-unreachable");
        assert_eq!(gate.states("k"), [] as [&str; 0]);
    }
}
