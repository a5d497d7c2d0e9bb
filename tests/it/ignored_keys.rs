//! A key that does nothing is never silent: the answer, the metrics and the log say that no route protects it.

use serde_json::Value;

use crate::support::{Client, Gate, Plan, Reply, Request, Signal, Upstream, eventually};

const ROUTES: &str = "[[routes]]\nname = \"orders\"\nmethods = [\"POST\"]\npath = \"/orders\"\n\
                      [[routes]]\nname = \"hooks\"\nmethods = [\"POST\"]\npath = \"/hooks\"\n\
                      key.from = [\"header:X-Event\", \"query:event\"]\n\
                      [[routes]]\nname = \"notes\"\nmethods = [\"POST\"]\npath = \"/notes\"\nkey.from = [\"json:/id\"]\n\
                      [[routes]]\nname = \"passed\"\nmethods = [\"POST\"]\npath = \"/passed\"\nmode = \"pass\"\n";

fn plan(upstream: &Upstream) -> Plan {
    Gate::before(upstream).routes(ROUTES)
}

/// The method and route of each log line on an ignored key, once there are so many: a line may come behind its answer.
fn logged(gate: &Gate, count: usize) -> Vec<(String, String)> {
    eventually("a line for each method and route", || Some(ignored(gate)).filter(|lines| lines.len() >= count))
}

fn ignored(gate: &Gate) -> Vec<(String, String)> {
    let log = gate.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let ignored = lines.filter(|line| line["message"].as_str().is_some_and(|text| text.contains("key was ignored")));
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    ignored.map(|line| (text(&line["method"]), text(&line["route"]))).collect()
}

#[test]
fn a_key_that_no_route_protects_is_marked_counted_and_logged() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = plan(&upstream).start();
    for (what, request) in [
        ("another path", Request::post("/elsewhere").key("k")),
        ("another method", Request::new("PUT", "/orders").key("k")),
        ("a key that is malformed", Request::post("/elsewhere").key("not, valid")),
        ("two keys", Request::post("/elsewhere").key("k").key("l")),
        ("a header that another route reads", Request::post("/elsewhere").header("X-Event", "1")),
        ("a parameter that another route reads", Request::post("/elsewhere?event=1")),
        ("a body that is awaited", Request::post("/elsewhere").key("k").body("{}")),
        ("a route that reads its keys elsewhere", Request::post("/hooks").key("k").body("{}")),
        ("a route that reads its keys in the body", Request::post("/notes").key("k").body("{}")),
    ] {
        let answer = request.send(&gate);
        assert_eq!((answer.status, &*answer.word()), (200, "ignored"), "{what}: {}", answer.show());
    }
    assert_eq!(upstream.runs(), 9);
    for (what, request, word) in [
        ("no key", Request::post("/elsewhere"), ""),
        ("no key on a route", Request::post("/orders"), ""),
        ("a route that passes", Request::post("/passed").key("k"), ""),
        ("a key", Request::post("/orders").key("k"), "executed"),
        ("a key elsewhere", Request::post("/hooks?event=2").key("k"), "executed"),
        ("a key in the body", Request::post("/notes").key("k").body("{\"id\": 1}"), "executed"),
    ] {
        assert_eq!(request.send(&gate).word(), word, "{what}");
    }
    let counted = |labels: &[&str]| gate.metric("oncegate_requests_total", labels);
    assert_eq!(counted(&["route=\"-\"", "outcome=\"ignored\""]), 7.0);
    assert_eq!(counted(&["route=\"hooks\"", "outcome=\"ignored\""]), 1.0);
    assert_eq!(counted(&["route=\"notes\"", "outcome=\"ignored\""]), 1.0);
    assert_eq!(counted(&["outcome=\"passed\""]), 3.0);
    // Once a minute for each method and route.
    let expected = [("POST", "-"), ("PUT", "-"), ("POST", "hooks"), ("POST", "notes")];
    assert_eq!(logged(&gate, 4), expected.map(|(method, route)| (method.to_owned(), route.to_owned())));
}

#[test]
fn the_upstreams_own_word_is_replaced_and_the_header_has_its_configured_name() {
    let upstream = Upstream::start(|_| {
        let head =
            "HTTP/1.1 200 OK\r\nIdempotency-Status: executed\r\nIdempotent-Replayed: true\r\nContent-Length: 0\r\n";
        Reply::raw(format!("{head}\r\n"))
    });
    let gate = plan(&upstream).start();
    let answer = Request::post("/elsewhere").key("k").send(&gate);
    assert_eq!(answer.head.all("idempotency-status"), [b"ignored"], "{}", answer.show());
    assert_eq!(Request::post("/elsewhere").send(&gate).word(), "executed", "without a key it passes as it came");
    drop(gate);

    let gate = plan(&upstream).top("[headers]\nstatus = \"X-Gate\"\n").start();
    let answer = Request::post("/elsewhere").key("k").send(&gate);
    assert_eq!((answer.get("x-gate").as_deref(), &*answer.word()), (Some("ignored"), "executed"), "{}", answer.show());
    drop(gate);

    let gate = plan(&upstream).top("[headers]\nstatus = false\n").start();
    let answer = Request::post("/elsewhere").key("k").send(&gate);
    assert_eq!(answer.word(), "executed", "{}", answer.show());
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"ignored\""]), 1.0);
    assert_eq!(logged(&gate, 1).len(), 1);
}

#[test]
fn a_problem_on_the_way_says_it_too() {
    let gate = plan_before_nothing().start();
    // An outcome that is unknown is not known to the gate either: a retry would run again.
    let answer = Request::post("/elsewhere").key("k").body("{}").send(&gate);
    assert_eq!(answer.expect_bare_problem(502, "upstream-unreachable").word(), "ignored");
    assert_eq!(gate.metric("oncegate_requests_total", &["outcome=\"upstream-unreachable\""]), 1.0);
    assert_eq!(logged(&gate, 1).len(), 1);
    let call = Request::post("/elsewhere").key("k").header("Content-Type", "application/grpc").header("TE", "trailers");
    let answer = call.body("").send(&gate);
    assert_eq!((answer.get("grpc-status").as_deref(), &*answer.word()), (Some("14"), "ignored"), "{}", answer.show());
}

#[test]
fn a_refusal_under_overload_says_what_becomes_of_a_key() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let gate = plan(&upstream).top("[limits]\nmax_requests = 1").start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| Request::get("/").send(&gate));
        upstream.wait_for_runs(1);
        for (what, path, word) in [
            ("no route", "/elsewhere", "ignored"),
            ("a route that reads its keys elsewhere", "/hooks", "ignored"),
            ("a route that passes", "/passed", ""),
            ("a route that reads its keys in the body", "/notes", ""),
            ("a route that protects it", "/orders", "overloaded"),
            ("a path that may be that of such a route", "/orders/", "overloaded"),
        ] {
            let refused = Request::post(path).key("k").body("{}").send(&gate);
            assert_eq!(refused.expect_bare_problem(503, "overloaded").word(), word, "{what}: {}", refused.show());
        }
        signal.open();
        assert_eq!(first.join().expect("an answer").status, 200);
    });
    assert_eq!(upstream.runs(), 1);
}

fn plan_before_nothing() -> Plan {
    Gate::before_url(&format!("http://{}", Upstream::free_address())).routes(ROUTES)
}

#[test]
fn a_replay_of_the_next_gate_is_none_of_this_one() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let inner = Gate::before(&upstream).start();
    let gate = Gate::before_url(&format!("http://{}", inner.address)).routes(ROUTES).start();
    for run in 0..2 {
        let answer = Request::post("/elsewhere").key("k").body("x").send(&gate);
        assert_eq!((answer.status, &*answer.word()), (200, "ignored"), "{run}: {}", answer.show());
        assert!(
            !answer.head.has("idempotent-replayed") && !answer.head.has("idempotency-expires"),
            "{}",
            answer.show()
        );
    }
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn calls_and_upgrades_are_marked_too() {
    let upstream = Upstream::scripted(|conn| {
        while let Some(request) = conn.next() {
            let answer: &[u8] = match request.head.get("upgrade") {
                Some(_) => b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
                None => {
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\nTrailer: grpc-status\r\n\
                      Transfer-Encoding: chunked\r\n\r\n0\r\ngrpc-status: 0\r\n\r\n"
                }
            };
            if conn.wire.send(answer).is_err() {
                break;
            }
        }
    });
    let gate = plan(&upstream).start();
    let call = Request::post("/elsewhere").key("k").header("Content-Type", "application/grpc").header("TE", "trailers");
    let answer = call.body("x").send(&gate);
    assert_eq!((answer.status, &*answer.word()), (200, "ignored"), "{}", answer.show());
    let mut client = Client::connect(gate.address);
    client.send(
        "GET /socket HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nIdempotency-Key: k\r\n\r\n",
    );
    let head = client.head();
    assert!(head.start.starts_with(b"HTTP/1.1 101"), "{:?}", String::from_utf8_lossy(&head.raw));
    assert_eq!(head.get("idempotency-status").as_deref(), Some("ignored"));
}

/// The route reads its keys elsewhere, and goes on without one no more than with none.
#[test]
fn a_required_key_that_came_elsewhere_is_not_silent() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let routes = "[[routes]]\nname = \"a\"\npath = \"/a\"\nkey = { from = [\"header:X-Event\"], required = true }\n\
                  [[routes]]\nname = \"b\"\npath = \"/b\"\nkey = { from = [\"json:/id\"], required = true }\n";
    let gate = Gate::before(&upstream).routes(routes).start();
    for path in ["/a", "/b"] {
        Request::post(path).key("k").body("{}").send(&gate).expect_problem(400, "key-missing");
        Request::post(path).body("{}").send(&gate).expect_bare_problem(400, "key-missing");
    }
    assert_eq!(upstream.runs(), 0);
}

/// The commonest slip of a client. It is no key, so the answer says nothing of it, and the line on a key comes beside.
#[test]
fn a_header_that_is_nearly_the_one_of_the_key_is_logged() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = plan(&upstream).start();
    let named = |path: &str, name: &str| {
        let answer = Request::post(path).header(name, "k").send(&gate);
        assert_eq!((answer.status, &*answer.word()), (200, ""), "{path} {name}: {}", answer.show());
    };
    for (path, name) in [
        ("/orders", "X-Request-Id"),
        ("/passed", "X-Idempotency-Key"),
        ("/orders", "X-Idempotency-Key"),
        ("/orders", "Idempotency_Key"),
        ("/elsewhere", "Idempotency_Key"),
    ] {
        named(path, name);
    }
    // Comes last, so that all lines before are there.
    Request::post("/elsewhere").key("k").send(&gate);
    assert_eq!(logged(&gate, 1), [("POST".to_owned(), "-".to_owned())]);
    let log = gate.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let nearly =
        lines.filter(|line| line["message"].as_str().is_some_and(|text| text.contains("looks like the one of")));
    let nearly: Vec<(Value, Value)> = nearly.map(|line| (line["route"].clone(), line["header"].clone())).collect();
    assert_eq!(nearly, [("orders".into(), "x-idempotency-key".into()), ("-".into(), "idempotency_key".into())]);
}
