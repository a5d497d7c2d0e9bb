//! The configurations of `config/examples` as they stand, but for where their upstreams, their store, their listeners and
//! their certificates are.

use std::net::SocketAddr;
use std::process::Command;

use crate::support::http2::post;
use crate::support::https::{Certificates, Https, http2};
use crate::support::process::Process;
use crate::support::service::{Asked, Service};
use crate::support::{Reply, Request, Response, Signal, Terms, Tls, Upstream, eventually};
use crate::upstream_addresses::by_socket;

/// A gate with an example.
pub struct Example {
    address: SocketAddr,
    admin: SocketAddr,
    _process: Process,
}

impl Example {
    /// Before its one upstream.
    #[track_caller]
    fn start(name: &str, upstream: &str) -> Self {
        Self::start_with(name, upstream, &[])
    }

    /// With these environment variables.
    #[track_caller]
    pub fn start_with(name: &str, upstream: &str, environment: &[(&str, &str)]) -> Self {
        Self::run(name, &[], |command| {
            command.args(["--upstream", upstream]).envs(environment.iter().copied());
        })
    }

    /// Before several upstreams: each of these texts of the file is replaced by the second.
    #[track_caller]
    fn start_at(name: &str, places: &[(&str, &str)]) -> Self {
        Self::run(name, places, |_| ())
    }

    #[track_caller]
    fn run(name: &str, places: &[(&str, &str)], more: impl FnOnce(&mut Command)) -> Self {
        let file = format!("{}/config/examples/{name}.toml", env!("CARGO_MANIFEST_DIR"));
        let mut text = std::fs::read_to_string(&file).expect("an example");
        for (from, to) in places {
            assert!(text.contains(from), "{name}: {from}");
            text = text.replace(from, to);
        }
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("oncegate.toml");
        std::fs::write(&config, text).unwrap();
        let store = format!("sqlite:{}", directory.path().join("gate.db").display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.arg("serve").arg("--config").arg(config);
        command.args(["--store", &store, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        command.env("ONCEGATE_LOG__FORMAT", "json");
        more(&mut command);
        let process = Process::start(command, directory);
        let address = process.address("listening").unwrap_or_else(|| panic!("{name}: {}", process.log()));
        let admin = process.address("admin listening").expect("an admin listener");
        Self { address, admin, _process: process }
    }

    pub fn send(&self, request: &Request) -> Response {
        request.send(self.address)
    }
}

#[test]
fn sidecar() {
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let gate = Example::start("sidecar", &upstream.url());
    for method in ["POST", "PATCH"] {
        let request = Request::new(method, "/any/path").key(method).body("{}");
        gate.send(&request).expect(200, "executed").expect_repeated_by(&gate.send(&request));
    }
    assert_eq!(upstream.runs(), 2);
    // What has no key passes, and so does another method with one, which is said.
    let keyless = Request::post("/any/path").body("{}");
    let other = Request::new("PUT", "/any/path").key("POST").body("{}");
    for (request, word) in [(keyless, ""), (other, "ignored")] {
        gate.send(&request).expect(200, word);
        gate.send(&request).expect(200, word);
    }
    assert_eq!(upstream.runs(), 6);
}

#[test]
fn gateway() {
    let shop = Upstream::start(|_| Reply::ok("shop"));
    let billing = Upstream::start(|request| match request.key().as_deref() {
        Some("fails") => Reply::status("500 Internal Server Error", "x"),
        _ => Reply::ok("billing"),
    });
    let places = [("http://shop.internal:3000", &*shop.url()), ("http://billing.internal:3000", &billing.url())];
    let gate = Example::start_at("gateway", &places);
    let of = |tenant: &str, path: &str, body: &str| Request::post(path).header("X-Tenant", tenant).body(body);
    let twice = |request: &Request| {
        gate.send(request).expect(200, "executed").expect_repeated_by(&gate.send(request));
    };
    // A charge runs once for each tenant, has to have a key, and holds an error of the service.
    for tenant in ["a", "b"] {
        twice(&of(tenant, "/v1/charges", "{}").key("k"));
    }
    let keyless = gate.send(&of("a", "/v1/charges", "{}"));
    assert_eq!(keyless.expect_bare_problem(400, "key-missing").json()["type"], "https://docs.example.com/retries");
    gate.send(&Request::post("/v1/charges").key("k").body("{}")).expect_problem(400, "scope-missing");
    let failing = of("a", "/v1/charges", "{}").key("fails");
    gate.send(&failing).expect(500, "outcome-unknown");
    gate.send(&failing).expect_problem(409, "outcome-unknown");
    // A capture is the same whenever it was sent.
    let capture = |amount: u32, second: u32| {
        let body = format!("{{\"amount\": {amount}, \"sent_at\": {second}}}");
        gate.send(&of("a", "/v1/charges/ch_1/capture", &body).header("Content-Type", "application/json").key("c"))
    };
    capture(1, 1).expect(200, "executed");
    capture(1, 2).expect(200, "replayed");
    capture(2, 2).expect_problem(422, "key-reused");
    assert_eq!((billing.runs(), shop.runs()), (4, 0));
    // A partner's event is known by itself, on the partner's host alone.
    let event = |host: &str| of("p", "/events/paid", "{\"id\": 1}").header("Host", host);
    twice(&event("partners.example.com"));
    gate.send(&event("partners.example.com").body("{\"id\": 2}")).expect(200, "executed");
    gate.send(&event("gate.test")).expect(200, "");
    // A search passes, with a key too.
    let search = of("a", "/v1/search", "{}").key("k");
    gate.send(&search).expect(200, "");
    gate.send(&search).expect(200, "");
    assert_eq!((billing.runs(), shop.runs()), (4, 5));
}

#[test]
fn edge() {
    let Some(certificates) = Certificates::new() else { return };
    certificates.sign("reports", "subjectAltName=IP:127.0.0.1");
    certificates.sign("client", "extendedKeyUsage=clientAuth");
    let shop = Upstream::start(|_| Reply::ok("sold"));
    let socket = certificates.path("shop.sock");
    by_socket(&socket, shop.address);
    let payments = Service::start(|asked: &Asked| {
        let status = if asked.headers.get("idempotency-key").is_some_and(|key| key == "busy") { "14" } else { "0" };
        (200, vec![("content-type", "application/grpc")], "\0\0\0\0\x01x", vec![("grpc-status", status)])
    });
    let signal = Signal::new();
    let held = signal.clone();
    let reports = Upstream::start(move |_| {
        let head = "HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n6\r\nsecond\r\n";
        Reply::raw(head).pause_until(&held).then("4\r\nlast\r\n0\r\n\r\n")
    });
    let terms = Terms { client_ca: Some("ca"), ..Terms::of(certificates.directory(), "reports") };
    let machines = [(); 2].map(|()| Tls::before(reports.address, terms));
    let at = |name: &str| certificates.path(name).display().to_string();
    let gate = Example::start_at(
        "edge",
        &[
            ("/etc/oncegate/cert.pem", &*at("gate.pem")),
            ("/etc/oncegate/key.pem", &at("gate.key")),
            ("/etc/oncegate/ca.pem", &at("ca.pem")),
            ("/etc/oncegate/gate.pem", &at("client.pem")),
            ("/etc/oncegate/gate-key.pem", &at("client.key")),
            ("/run/shop/http.sock", &at("shop.sock")),
            ("http://payments.internal:50051", &payments.url()),
            ("https://reports-1.internal", &machines[0].url()),
            ("https://reports-2.internal", &machines[1].url()),
        ],
    );
    let mut client = http2(gate.address, &certificates.client(&["h2"], None));
    // A browser that checks out, and may read why it may not.
    let checkout = |origin: &str| post("/v1/checkout").header("cookie", "session=s").header("origin", origin);
    let keyless = client.send(checkout("https://shop.example").body("{}").unwrap());
    assert_eq!((keyless.status, keyless.get("access-control-allow-origin")), (400, "https://shop.example"));
    let keyless = client.send(checkout("https://evil.example").body("{}").unwrap());
    assert_eq!((keyless.status, keyless.headers.get("access-control-allow-origin")), (400, None));
    for word in ["executed", "replayed"] {
        let request = checkout("https://shop.example").header("idempotency-key", "k");
        client.send(request.body("{}").unwrap()).expect(200, word);
    }
    assert_eq!(shop.runs(), 1);
    // gRPC calls: one that runs once, and one that passes.
    let mut call = |name: &str, key: &str, word: &str| {
        let request = post(&format!("/payments.v1.Payments/{name}")).header("content-type", "application/grpc");
        let request = request.header("te", "trailers").header("x-api-key", "a").header("idempotency-key", key);
        let answer = client.send(request.body("\0\0\0\0\x01x").unwrap());
        answer.expect(200, word);
        assert!(answer.trailers.unwrap().contains_key("grpc-status"));
    };
    for (name, key, word) in [
        ("Charge", "k", "executed"),
        ("Charge", "k", "replayed"),
        ("Charge", "busy", "released"),
        ("Charge", "busy", "released"),
        ("List", "k", ""),
        ("List", "k", ""),
    ] {
        call(name, key, word);
    }
    assert_eq!(payments.asked().len(), 5);
    // A report that is read while it is made, from a machine that the gate shows its certificate; its last bytes wait.
    let report = "POST /v1/reports HTTP/1.1\r\nHost: gate.test\r\nX-Api-Key: a\r\nIdempotency-Key: k\r\n\
                  Content-Length: 2\r\n\r\n{}";
    let mut client = Https::connect(gate.address, &certificates.client(&["http/1.1"], None));
    let begun = client.exchange(report, "5\r\nfirst\r\n").unwrap();
    assert!(begun.starts_with("HTTP/1.1 201") && begun.contains("idempotency-status: executed\r\n"), "{begun}");
    signal.open();
    client.exchange("", "0\r\n\r\n").unwrap();
    let replay = client.exchange(report, "\r\n0\r\n\r\n").unwrap();
    assert!(replay.contains("idempotency-status: replayed\r\n") && replay.contains("firstsecondlast"), "{replay}");
    assert_eq!((reports.runs(), machines.iter().map(Tls::agreed).sum::<usize>()), (1, 1));
}

#[test]
fn payments() {
    let upstream = Upstream::start(|request| match request.key().as_deref() {
        Some("fails") => Reply::status("500 Internal Server Error", "x"),
        _ => Reply::ok(format!("payment {}", request.nth)),
    });
    let gate = Example::start("payments", &upstream.url());
    let pay = |path: &str, key: &str| Request::post(path).key(key).header("X-Tenant", "a").body("{\"amount\": 1}");
    let bare = Request::post("/v1/charges").header("X-Tenant", "a").body("{}");
    gate.send(&bare).expect_bare_problem(400, "key-missing");
    gate.send(&Request::post("/v1/charges").key("k").body("{}")).expect_problem(400, "scope-missing");
    for path in ["/v1/charges", "/v1/charges/ch_1/capture", "/v1/payouts", "/v1/refunds"] {
        let first = gate.send(&pay(path, path));
        first.expect(200, "executed").expect_repeated_by(&gate.send(&pay(path, path)));
    }
    assert_eq!(upstream.runs(), 4);
    gate.send(&pay("/v1/payouts", "fails")).expect(500, "outcome-unknown");
    gate.send(&pay("/v1/payouts", "fails")).expect_problem(409, "outcome-unknown");
    assert_eq!(upstream.runs(), 5);
    let page = gate.send(&Request::get("/.well-known/idempotency")).json();
    assert_eq!(page["routes"].as_array().map(Vec::len), Some(3), "{page:#}");
}

#[test]
fn webhooks() {
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = Example::start("webhooks", &upstream.url());
    let json = |path: &str, body: &str| Request::post(path).header("Content-Type", "application/json").body(body);
    let deliveries = [
        json("/hooks/stripe", "{\"id\": \"evt_1\"}"),
        json("/hooks/github", "{}").header("X-GitHub-Delivery", "d-1"),
        json("/hooks/shopify", "{}").header("X-Shopify-Event-Id", "e-1").header("X-Shopify-Topic", "orders/create"),
        json("/hooks/standard/acme", "{}").header("webhook-id", "msg_1"),
        json("/events", "{}").header("ce-id", "1").header("ce-source", "/s").header("ce-specversion", "1.0"),
    ];
    for delivery in &deliveries {
        gate.send(delivery).expect(200, "executed");
        gate.send(delivery).expect(200, "replayed");
    }
    assert_eq!(upstream.runs(), deliveries.len());
    gate.send(&json("/hooks/github", "{}")).expect_bare_problem(400, "key-missing");
}

#[test]
fn grpc() {
    let service = Service::start(|asked: &Asked| {
        let status = if asked.headers["idempotency-key"] == "busy" { "14" } else { "0" };
        (200, vec![("content-type", "application/grpc")], "\0\0\0\0\x05\x0a\x03abc", vec![("grpc-status", status)])
    });
    let gate = Example::start("grpc", &service.url());
    let call = |call: &str, key: &str| {
        let request = Request::post(&format!("/payments.v1.Payments/{call}")).key(key).header("X-Api-Key", "a");
        request.header("Content-Type", "application/grpc").header("TE", "trailers").body("\0\0\0\0\x05\x0a\x03abc")
    };
    gate.send(&call("Charge", "k")).expect(200, "executed");
    gate.send(&call("Charge", "k")).expect(200, "replayed");
    gate.send(&call("Charge", "busy")).expect(200, "released");
    gate.send(&call("List", "k")).expect(200, "");
    assert_eq!(service.asked().len(), 3);
}

#[test]
fn observe_first() {
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let gate = Example::start("observe-first", &upstream.url());
    let charge = Request::post("/v1/charges").key("k").body("{}");
    let looked_at = |requests: u64| {
        eventually("the report", || {
            let report = Request::get("/api/v1/observed").header("Host", "127.0.0.1").send(gate.admin).json();
            let charges = report["routes"][0].clone();
            (charges["requests"] == requests).then_some(charges)
        })
    };
    assert_eq!(gate.send(&charge).expect(200, "").text(), "run 1");
    looked_at(1);
    assert_eq!(gate.send(&charge).expect(200, "").text(), "run 2");
    let charges = looked_at(2);
    assert_eq!((&charges["route"], &charges["keys_run_again"]), (&"charges".into(), &1.into()), "{charges:#}");
}
