//! Encrypted connections to upstreams: who is believed to be one, and what a refusal proves.

use std::io::Write as _;
use std::path::Path;

use tempfile::TempDir;

use crate::servers::certificates::{self, authority, signed};
use crate::support::{Client, Gate, H2, Plan, Reply, Request, Response, Terms, Tls, Upstream, eventually};

/// A directory with an authority, `ca`, another, `other`, and a certificate of the first for 127.0.0.1, `server`.
fn directory() -> Option<TempDir> {
    if !certificates::can_be_made() {
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    authority(directory.path(), "ca");
    authority(directory.path(), "other");
    signed(directory.path(), "server", "ca", "subjectAltName=IP:127.0.0.1");
    Some(directory)
}

fn before(tls: &Tls, directory: &Path, ca: &str) -> Plan {
    Gate::before_url(&tls.url()).upstream(&format!("tls = {{ ca = {:?} }}", directory.join(format!("{ca}.pem"))))
}

/// That the attempt provably did not begin: its key is free, and the log says why.
#[track_caller]
fn refused(gate: &Gate, key: &str, why: &str) -> Response {
    let answer = gate.post("/charges", key, "{}");
    assert_eq!((answer.status, &*answer.word()), (502, "upstream-unreachable"), "{}", answer.show());
    assert_eq!(gate.states(key), [] as [&str; 0]);
    eventually(why, || gate.log().contains(why).then_some(()));
    answer
}

#[test]
fn an_upstream_that_proves_who_it_is_gets_requests_as_they_are() {
    let Some(directory) = directory() else { return };
    let upstream = Upstream::start(|request| Reply::ok(&request.body.bytes));
    for only_tls12 in [false, true] {
        let terms = Terms { only_tls12, ..Terms::of(directory.path(), "server") };
        let tls = Tls::before(upstream.address, terms);
        let gate = before(&tls, directory.path(), "ca").start();
        // One thread of the gate has it, and so one connection to the upstream.
        let mut client = Client::connect(gate.address);
        for _ in 0..2 {
            let post = Request::post("/charges").key("k").body("{\"amount\": 1}");
            let answer = client.send(post.bytes()).response();
            assert_eq!((answer.status, answer.text()), (200, "{\"amount\": 1}".to_owned()), "{}", answer.show());
        }
        assert_eq!(client.send(Request::get("/x").bytes()).response().status, 200);
        assert_eq!(tls.agreed(), 1, "the connection is kept");
    }
    assert_eq!(upstream.runs_of("k"), 2, "once for each gate");
}

#[test]
fn an_upstream_that_is_not_believed_gets_nothing() {
    let Some(directory) = directory() else { return };
    let at = directory.path();
    let upstream = Upstream::start(|_| Reply::ok("paid"));
    authority(at, "alone");
    signed(at, "elsewhere", "ca", "subjectAltName=DNS:elsewhere.example");
    let ten_days = 10 * 86_400;
    for (certificate, ca, days, why) in [
        ("server", "other", 0, "UnknownIssuer"),
        ("alone", "ca", 0, "invalid peer certificate"),
        ("elsewhere", "ca", 0, "not valid for name"),
        ("server", "ca", ten_days, "expired"),
        ("server", "ca", -ten_days, "not valid yet"),
    ] {
        let tls = Tls::before(upstream.address, Terms::of(at, certificate));
        let plan = before(&tls, at, ca);
        let gate = if days == 0 { plan } else { plan.clock_off_by(days) }.start();
        refused(&gate, "k", why);
        assert_eq!(tls.agreed(), 0);
    }
    // By who the system knows.
    let tls = Tls::before(upstream.address, Terms::of(at, "server"));
    let file = |name: &str| at.join(format!("{name}.pem")).display().to_string();
    refused(&Gate::before_url(&tls.url()).env("SSL_CERT_FILE", file("other")).start(), "k", "UnknownIssuer");
    assert_eq!(upstream.runs(), 0);
    let gate = Gate::before_url(&tls.url()).env("SSL_CERT_FILE", file("ca")).start();
    assert_eq!(gate.post("/charges", "k", "{}").text(), "paid");
    // By another name.
    let tls = Tls::before(upstream.address, Terms::of(at, "elsewhere"));
    let named = format!("tls = {{ ca = {:?}, name = \"elsewhere.example\" }}", file("ca"));
    assert_eq!(Gate::before_url(&tls.url()).upstream(&named).start().post("/charges", "k", "{}").text(), "paid");
    // No encryption is spoken there at all.
    let plain = H2::raw(|mut conn| {
        conn.stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").unwrap();
        conn.rest();
    });
    let gate = Gate::before_url(&format!("https://{}", plain.address)).env("SSL_CERT_FILE", file("ca")).start();
    refused(&gate, "k", "TLS handshake failed");
}

#[test]
fn a_gate_proves_who_it_is() {
    let Some(directory) = directory() else { return };
    let at = directory.path();
    signed(at, "gate", "ca", "extendedKeyUsage=clientAuth");
    signed(at, "forged", "other", "extendedKeyUsage=clientAuth");
    let (upstream, h2) = (Upstream::start(|_| Reply::ok("paid")), H2::answering("paid"));
    let file = |name: &str, end: &str| at.join(format!("{name}.{end}"));
    let identity = |name: &str| {
        let (ca, certificate, key) = (file("ca", "pem"), file(name, "pem"), file(name, "key"));
        format!("tls = {{ ca = {ca:?}, cert = {certificate:?}, key = {key:?} }}")
    };
    for (only_tls12, address, protocols) in
        [(true, upstream.address, &[][..]), (false, upstream.address, &[]), (false, h2.address, &["h2"])]
    {
        let terms = Terms { client_ca: Some("ca"), only_tls12, protocols, ..Terms::of(at, "server") };
        let tls = Tls::before(address, terms);
        let gate = Gate::before_url(&tls.url()).upstream(&identity("gate")).start();
        assert_eq!(gate.post("/charges", "k", "{}").text(), "paid");
        for unfit in [identity("forged"), format!("tls = {{ ca = {:?} }}", file("ca", "pem"))] {
            let gate = Gate::before_url(&tls.url()).upstream(&unfit).start();
            let runs = upstream.runs();
            if only_tls12 || !protocols.is_empty() {
                refused(&gate, "k", "the upstream cannot be reached");
            } else {
                // With TLS 1.3 the gate may have written its request before it hears of the refusal.
                let answer = gate.post("/charges", "k", "{}");
                let code = answer.word();
                assert!(["upstream-unreachable", "upstream-broken"].contains(&&*code), "{}", answer.show());
                assert_eq!(gate.states("k").is_empty(), code == "upstream-unreachable");
            }
            assert_eq!(upstream.runs(), runs);
        }
    }
}

#[test]
fn certificates_that_change_are_taken_up_at_a_reload() {
    let Some(directory) = directory() else { return };
    let at = directory.path();
    let upstream = Upstream::start(|_| Reply::last("paid"));
    let tls = Tls::before(upstream.address, Terms::of(at, "server"));
    std::fs::copy(at.join("ca.pem"), at.join("roots.pem")).unwrap();
    let gate = before(&tls, at, "roots").start();
    assert_eq!(gate.post("/charges", "first", "{}").text(), "paid");
    signed(at, "next", "other", "subjectAltName=IP:127.0.0.1");
    tls.change(Terms::of(at, "next"));
    refused(&gate, "second", "UnknownIssuer");
    std::fs::copy(at.join("other.pem"), at.join("roots.pem")).unwrap();
    gate.sighup();
    eventually("the new root", || (gate.post("/charges", "second", "{}").text() == "paid").then_some(()));
}

#[test]
fn what_is_wrong_is_told_once_a_second_at_most() {
    let Some(directory) = directory() else { return };
    let upstream = Upstream::start(|_| Reply::ok("paid"));
    let tls = Tls::before(upstream.address, Terms::of(directory.path(), "server"));
    let gate = before(&tls, directory.path(), "other").start();
    let began = std::time::Instant::now();
    for nth in 0..50 {
        refused(&gate, &format!("k{nth}"), "UnknownIssuer");
    }
    let most = began.elapsed().as_secs() as usize + 1;
    assert!(gate.log().matches("cannot be reached").count() <= most);
}
