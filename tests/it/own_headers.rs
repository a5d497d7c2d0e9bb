//! `[headers] attempt` and `forward_key_as`: how an upstream is told of an attempt and of its key.

use crate::support::http2::{Http2, post};
use crate::support::{Client, Gate, Plan, Reply, Request, Upstream};

const ROUTES: &str = "[[routes]]\nname = \"all\"\nmethods = [\"POST\"]\npath = \"/{*rest}\"\n\
                      [[routes]]\nname = \"pass\"\nmethods = [\"POST\"]\npath = \"/pass\"\nmode = \"pass\"\n";

fn plan(upstream: &Upstream, headers: &str) -> Plan {
    Gate::before(upstream).routes(ROUTES).top(&format!("[headers]\n{headers}"))
}

fn echo() -> Upstream {
    Upstream::start(|request| Reply::ok(format!("run {}", request.nth)))
}

fn got(upstream: &Upstream, name: &str) -> Option<String> {
    upstream.last().head.get(name)
}

fn all(upstream: &Upstream, name: &str) -> Vec<String> {
    let request = upstream.last();
    request.head.all(name).into_iter().map(|value| String::from_utf8_lossy(value).into_owned()).collect()
}

/// Nothing that a client sends passes for the token of an attempt, on no route.
#[test]
fn a_clients_own_token_goes_nowhere() {
    let upstream = echo();
    let gate = plan(&upstream, "attempt = \"X-Run\"").start();
    let forged = |path: &str| {
        let request = Request::post(path).header("X-Run", "forged").header("x_run", "forged");
        request.header("Idempotency-Attempt", "forged").header("X-Runs", "mine").body("{}")
    };
    for request in [forged("/pass"), forged("/pass").key("k-1"), forged("/c")] {
        request.send(&gate);
        for name in ["x-run", "x_run", "idempotency-attempt"] {
            assert_eq!(got(&upstream, name), None, "{name}");
        }
        assert_eq!(got(&upstream, "x-runs").as_deref(), Some("mine"));
    }
    forged("/c").key("k").send(&gate).expect(200, "executed");
    assert_eq!(all(&upstream, "x-run").len(), 1, "one token, the gate's");
    assert_eq!(got(&upstream, "x-run").map(|token| token.len()), Some(32));
    assert_eq!((got(&upstream, "x_run"), got(&upstream, "idempotency-attempt")), (None, None));
}

/// Servers that merge trailers into headers would take one for the gate's.
#[test]
fn a_trailer_does_not_pass_for_it_either() {
    let upstream = echo();
    let gate = plan(&upstream, "attempt = \"X-Run\"").start();
    for key in ["", "Idempotency-Key: k\r\n"] {
        let mut client = Client::connect(gate.address);
        client.send(format!(
            "POST /c HTTP/1.1\r\nHost: a\r\n{key}Transfer-Encoding: chunked\r\nTrailer: X-Run, X-Sum\r\n\r\n\
             1\r\nx\r\n0\r\nX-Run: forged\r\nX-Sum: 1\r\n\r\n"
        ));
        assert_eq!(client.response().status, 200);
        let trailers = upstream.last().body.trailers.clone();
        let names: Vec<_> = trailers.iter().map(|(name, _)| String::from_utf8_lossy(name).to_lowercase()).collect();
        assert_eq!(names, ["x-sum"], "{key:?}");
    }
}

#[test]
fn no_token_is_sent_where_none_is_wanted() {
    let upstream = echo();
    let gate = plan(&upstream, "attempt = false").start();
    let request = Request::post("/c").key("k").header("Idempotency-Attempt", "forged").body("{}");
    request.send(&gate).expect(200, "executed");
    assert_eq!(got(&upstream, "idempotency-attempt"), None);
    request.send(&gate).expect(200, "replayed");
}

#[test]
fn the_key_goes_under_another_name_too() {
    let upstream = echo();
    let routes = "[[routes]]\nname = \"all\"\nmethods = [\"POST\"]\npath = \"/{*rest}\"\n\
                  key = { from = [\"header:Idempotency-Key\", \"query:id\"] }\n";
    let gate = plan(&upstream, "forward_key_as = \"X-Request-Id\"").routes(routes).start();
    let post = |target: &str| Request::post(target).header("X-Request-Id", "the client's").body("{}");
    // What has no key goes on as it came.
    post("/c").send(&gate);
    assert_eq!(got(&upstream, "x-request-id").as_deref(), Some("the client's"));
    // A quoted key goes on as it came, and unquoted under the other name, once.
    let twice = post("/c").header("X-Request-Id", "another").header("X_Request_Id", "x").key("\"k \\\\ 1\"");
    twice.send(&gate).expect_problem(400, "key-invalid");
    let quoted = post("/c").header("X-Request-Id", "another").header("X_Request_Id", "x").key("\"k\\\\1\"");
    quoted.send(&gate).expect(200, "executed");
    assert_eq!(got(&upstream, "idempotency-key").as_deref(), Some("\"k\\\\1\""));
    assert_eq!(all(&upstream, "x-request-id"), ["k\\1"]);
    assert_eq!(got(&upstream, "x_request_id"), None);
    // A key from elsewhere, too; and no `Connection` can drop it.
    post("/c?id=k-2").header("Connection", "X-Request-Id").send(&gate).expect(200, "executed");
    assert_eq!(all(&upstream, "x-request-id"), ["k-2"]);
    assert_eq!(got(&upstream, "idempotency-key"), None);
    assert_eq!(upstream.runs(), 3);
}

/// The same over HTTP/2.
#[test]
fn both_over_http2() {
    let upstream = echo();
    let gate = plan(&upstream, "attempt = \"X-Run\"\nforward_key_as = \"X-Request-Id\"").start();
    let mut client = Http2::connect(gate.address);
    let request = post("/c").header("idempotency-key", "k").header("x-run", "forged").header("x-request-id", "mine");
    client.send(request.body("{}").expect("a request")).expect(200, "executed");
    assert_eq!(all(&upstream, "x-request-id"), ["k"]);
    assert_ne!(got(&upstream, "x-run").as_deref(), Some("forged"));
    assert_eq!(all(&upstream, "x-run").len(), 1);
}

#[test]
fn trailers_cannot_pass_for_what_a_request_is_known_by() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let policy = "key = { from = [\"header:X-Req\"] }\nscope = [\"header:X-Tenant\"]\n";
    let gate = Gate::before(&upstream).defaults(policy).top("[headers]\nforward_key_as = \"X-Request-Id\"").start();
    let mut client = Client::connect(gate.address);
    client.send(
        "POST /x HTTP/1.1\r\nHost: a\r\nX-Req: k\r\nX-Tenant: acme\r\nTransfer-Encoding: chunked\r\n\r\n\
         1\r\na\r\n0\r\nX-Sum: 9\r\nX-Req: evil\r\nX-Tenant: evil\r\nX_Tenant: evil\r\nX-Request-Id: evil\r\n\r\n",
    );
    assert_eq!(client.response().status, 200);
    let request = upstream.last();
    assert_eq!(request.head.get("x-request-id").as_deref(), Some("k"));
    assert_eq!(request.body.trailers.len(), 1, "{:?}", request.body.trailers);
}
