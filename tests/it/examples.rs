//! The configurations of `config/examples` as they stand, but for where their upstream, their store and their listeners are.

use std::net::SocketAddr;
use std::process::Command;

use crate::support::process::Process;
use crate::support::service::{Asked, Service};
use crate::support::{Reply, Request, Response, Upstream, eventually};

/// A gate with an example.
pub struct Example {
    address: SocketAddr,
    admin: SocketAddr,
    _process: Process,
}

impl Example {
    #[track_caller]
    fn start(name: &str, upstream: &str) -> Self {
        Self::start_with(name, upstream, &[])
    }

    /// With these environment variables.
    #[track_caller]
    pub fn start_with(name: &str, upstream: &str, environment: &[(&str, &str)]) -> Self {
        let root = env!("CARGO_MANIFEST_DIR");
        let directory = tempfile::tempdir().unwrap();
        let store = format!("sqlite:{}", directory.path().join("gate.db").display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(["serve", "--config", &format!("{root}/config/examples/{name}.toml"), "--upstream", upstream]);
        command.args(["--store", &store, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
        command.env("ONCEGATE_LOG__FORMAT", "json");
        command.envs(environment.iter().copied());
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
    for path in ["/v1/charges", "/v1/charges/ch_1/capture", "/v1/payouts"] {
        let first = gate.send(&pay(path, path));
        first.expect(200, "executed").expect_repeated_by(&gate.send(&pay(path, path)));
    }
    assert_eq!(upstream.runs(), 3);
    gate.send(&pay("/v1/payouts", "fails")).expect(500, "outcome-unknown");
    gate.send(&pay("/v1/payouts", "fails")).expect_problem(409, "outcome-unknown");
    assert_eq!(upstream.runs(), 4);
    let page = gate.send(&Request::get("/.well-known/idempotency")).json();
    assert_eq!(page["routes"].as_array().map(Vec::len), Some(2), "{page:#}");
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
