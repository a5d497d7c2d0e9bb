//! What a route's policy makes of requests and answers.

use std::time::Duration;

use crate::support::{Gate, Reply, Request, Signal, Upstream, eventually};

/// An upstream whose answers differ from run to run.
fn numbered() -> Upstream {
    Upstream::start(|request| Reply::ok(format!("run {}", request.nth)))
}

/// An upstream that says this in `Idempotency-Control`.
fn controlled(control: &'static str) -> Upstream {
    Upstream::start(move |request| {
        let body = format!("run {}", request.nth);
        Reply::raw(format!(
            "HTTP/1.1 200 OK\r\nIdempotency-Control: {control}\r\nX-A: 1\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ))
    })
}

/// An upstream that stops in the middle of an answer of 400 kB until the signal is given.
fn large(status: &'static str, signal: &Signal) -> Upstream {
    let held = signal.clone();
    Upstream::start(move |_| {
        Reply::raw(format!("HTTP/1.1 {status}\r\nContent-Length: 400000\r\n\r\n"))
            .then("a".repeat(300_000))
            .pause_until(&held)
            .then("b".repeat(100_000))
    })
}

#[test]
fn a_key_reused_for_another_request() {
    let upstream = numbered();
    let gate = Gate::before(&upstream).start();
    gate.post("/charges", "k-1", "{\"amount\":1}").expect(200, "executed");
    gate.post("/charges", "k-1", "{\"amount\":2}").expect_problem(422, "key-reused");
    gate.post("/charges?x=1", "k-1", "{\"amount\":1}").expect_problem(422, "key-reused");
    gate.post("/refunds", "k-1", "{\"amount\":1}").expect_problem(422, "key-reused");
    let patch = Request::new("PATCH", "/charges").key("k-1").body("{\"amount\":1}").send(&gate);
    patch.expect_problem(422, "key-reused");
    gate.post("/charges", "k-1", "{\"amount\":1}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_key_reused_while_the_first_request_runs() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let gate = Gate::before(&upstream).start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| gate.post("/charges", "k-1", "{\"amount\":1}"));
        upstream.wait_for_runs(1);
        gate.post("/charges", "k-1", "{\"amount\":2}").expect_problem(422, "key-reused");
        signal.open();
        first.join().expect("an answer").expect(200, "executed");
    });
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn json_that_means_the_same_is_the_same_request() {
    let upstream = numbered();
    let gate = Gate::before(&upstream).start();
    let send =
        |body: &str| Request::post("/c").key("k").header("Content-Type", "application/json").body(body).send(&gate);
    send("{\"a\":1,\"b\":[1.0,{\"c\":null}]}").expect(200, "executed");
    send(" { \"b\" : [ 1.0, {\"c\":null} ],\n \"a\":1 }").expect(200, "replayed");
    send("{\"a\":1,\"b\":[1.00,{\"c\":null}]}").expect_problem(422, "key-reused");
    send("{\"a\":1,\"b\":[{\"c\":null},1.0]}").expect_problem(422, "key-reused");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn fingerprints_of_what_the_route_says() {
    let upstream = numbered();
    let fields = "fingerprint = { of = [\"method\", \"path\", \"body\"], body = \"json\", exclude = [\"/sent_at\"] }";
    let gate = Gate::before(&upstream).defaults(fields).start();
    gate.post("/c?try=1", "k", "{\"a\":1,\"sent_at\":1}").expect(200, "executed");
    gate.post("/c?try=2", "k", "{\"a\":1,\"sent_at\":2}").expect(200, "replayed");
    gate.post("/c?try=2", "k", "{\"a\":2,\"sent_at\":2}").expect_problem(422, "key-reused");
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn callers_do_not_share_keys() {
    let upstream = numbered();
    let gate = Gate::before(&upstream).start();
    let request = || Request::post("/c").header("Host", "a.example").key("k").body("{}");
    let callers = [
        request(),
        request().header("Authorization", "Bearer a"),
        request().header("Authorization", "Bearer b"),
        request().header("X-Api-Key", "Bearer a"),
        request().header("Authorization", "Bearer a").header("X-Api-Key", "b"),
        request().header("Authorization", "Basic YW5uOm9uZQ=="),
        request().header("Authorization", "Bearer e30.eyJzdWIiOiJhbm4ifQ.c2ln"),
        Request::post("/c").header("Host", "b.example").key("k").body("{}"),
        Request::post("/c").header("Host", "c.example").header("Cookie", "session=1").key("k").body("{}"),
    ];
    for (nth, caller) in callers.iter().enumerate() {
        let first = caller.send(&gate);
        first.expect(200, "executed");
        assert_eq!(first.text(), format!("run {}", nth + 1), "another caller's answer");
    }
    for (nth, caller) in callers.iter().enumerate() {
        let replay = caller.send(&gate);
        replay.expect(200, "replayed");
        assert_eq!(replay.text(), format!("run {}", nth + 1), "another caller's answer");
    }
    // A session may have begun or ended between two tries.
    request().header("Cookie", "session=1").send(&gate).expect_problem(422, "caller-differs");
    // Nothing is the same credential as an empty one.
    let empty = request().header("Authorization", "").header("X-Api-Key", "").header("Cookie", "").send(&gate);
    empty.expect(200, "replayed");
    assert_eq!(empty.text(), "run 1");
    // Hosts are not case-sensitive.
    let shouted = Request::post("/c").header("Host", "A.Example").key("k").body("{}").send(&gate);
    shouted.expect(200, "replayed");
}

#[test]
fn a_scope_of_the_routes_own() {
    let upstream = numbered();
    let gate = Gate::before(&upstream).defaults("scope = [\"header:X-Tenant\", \"cookie:session\"]").start();
    let request = |tenant: &str, session: &str, token: &str| {
        Request::post("/c")
            .key("k")
            .header("X-Tenant", tenant)
            .header("Cookie", format!("a=1; session={session}; b=2"))
            .header("Authorization", token)
            .body("{}")
            .send(&gate)
    };
    request("a", "1", "x").expect(200, "executed");
    request("a", "1", "y").expect(200, "replayed");
    request("b", "1", "x").expect(200, "executed");
    request("a", "2", "x").expect(200, "executed");
    assert_eq!(upstream.runs(), 3);
}

#[test]
fn routes_have_keys_of_their_own_unless_they_share_a_namespace() {
    let upstream = numbered();
    let route = |name: &str, more: &str| {
        format!(
            "[[routes]]\nname = \"{name}\"\nmethods = [\"POST\"]\npath = \"/{name}\"\n{more}\n\
             fingerprint = {{ of = [\"body\"] }}\n"
        )
    };
    let routes =
        [route("a", ""), route("b", ""), route("c", "namespace = \"shared\""), route("d", "namespace = \"shared\"")];
    let gate = Gate::before(&upstream).routes(&routes.concat()).start();
    gate.post("/a", "k", "{}").expect(200, "executed");
    gate.post("/b", "k", "{}").expect(200, "executed");
    gate.post("/c", "k", "{}").expect(200, "executed");
    gate.post("/d", "k", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), 3);
}

#[test]
fn keys_from_elsewhere() {
    let upstream = numbered();
    let from = "key = { from = [\"header:Idempotency-Key\", \"header:X-Request-Id\", \"query:token\", \"json:/id\"] }";
    let gate = Gate::before(&upstream).defaults(from).start();
    let send = |request: Request| request.send(&gate);
    let post = |path: &str, body: &str| Request::post(path).header("Content-Type", "application/json").body(body);
    send(post("/c", "{\"id\":\"k-1\"}")).expect(200, "executed");
    send(post("/c", "{\"id\":\"k-1\"}")).expect(200, "replayed");
    send(post("/c", "{\"id\":17}")).expect(200, "executed");
    send(post("/c", "{\"id\":17}")).expect(200, "replayed");
    send(post("/c?token=k-2", "{}")).expect(200, "executed");
    send(post("/c?token=k-2", "{}")).expect(200, "replayed");
    send(post("/c", "{}").header("X-Request-Id", "k-3")).expect(200, "executed");
    send(post("/c", "{}").header("X-Request-Id", "k-3")).expect(200, "replayed");
    // The first place that yields a value wins.
    send(post("/c?token=k-2", "{}").key("k-9")).expect(200, "executed");
    let unkeyed = send(post("/c", "{}"));
    assert_eq!((unkeyed.status, unkeyed.word().as_str()), (200, ""));
    assert_eq!(upstream.runs(), 6);
}

#[test]
fn keys_of_clients_that_cannot_send_one() {
    let upstream = numbered();
    let route = |name: &str, key: &str| {
        format!(
            "[[routes]]\nname = \"{name}\"\nmethods = [\"POST\"]\npath = \"/{name}\"\nscope = [\"header:X-Tenant?\"]\n\
             key = {{ from = [\"{key}\"] }}\n"
        )
    };
    let routes = route("legacy", "fingerprint") + &route("events", "cloudevent");
    let gate = Gate::before(&upstream).routes(&routes).start();
    let legacy = |tenant: &str, body: &str| Request::post("/legacy").header("X-Tenant", tenant).body(body).send(&gate);
    legacy("a", "1").expect(200, "executed");
    legacy("a", "1").expect(200, "replayed");
    legacy("a", "2").expect(200, "executed");
    legacy("b", "1").expect(200, "executed");
    let event = |source: &str, id: &str| {
        Request::post("/events").header("ce-source", source).header("ce-id", id).body("{}").send(&gate)
    };
    event("/shop", "1").expect(200, "executed");
    event("/shop", "1").expect(200, "replayed");
    event("/shop", "2").expect(200, "executed");
    event("/shop2", "1").expect(200, "executed");
    assert_eq!(upstream.runs(), 6);
}

#[test]
fn a_record_past_its_ttl_runs_again() {
    let upstream = numbered();
    let gate = Gate::before(&upstream).defaults("ttl = \"3s\"").start();
    gate.post("/c", "k", "{}").expect(200, "executed");
    gate.post("/c", "k", "{}").expect(200, "replayed");
    let again = eventually("the second run", || {
        let response = gate.post("/c", "k", "{}");
        (response.word() == "executed").then_some(response)
    });
    assert_eq!((again.text().as_str(), upstream.runs()), ("run 2", 2));
}

#[test]
fn an_unknown_record_past_its_ttl_runs_again() {
    let upstream = Upstream::start(|request| match request.nth {
        1 => Reply::default().pause(Duration::from_millis(1)).reset(),
        _ => Reply::ok("x"),
    });
    let gate = Gate::before(&upstream).defaults("unknown_ttl = \"3s\"").start();
    gate.post("/c", "k", "{}").expect_problem(502, "upstream-broken");
    gate.post("/c", "k", "{}").expect_problem(409, "outcome-unknown");
    eventually("the second run", || (gate.post("/c", "k", "{}").word() == "executed").then_some(()));
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn recovery_by_running_again() {
    let upstream = Upstream::start(|request| match request.nth {
        1 => Reply::default().pause(Duration::from_millis(1)).reset(),
        _ => Reply::ok("x"),
    });
    let gate = Gate::before(&upstream).defaults("recovery = \"retry\"").start();
    gate.post("/c", "k", "{}").expect_problem(502, "upstream-broken");
    gate.post("/c", "k", "{\"other\":1}").expect_problem(422, "key-reused");
    gate.post("/c", "k", "{}").expect(200, "executed");
    gate.post("/c", "k", "{}").expect(200, "replayed");
    let tokens: Vec<_> = upstream.seen().iter().map(|request| request.head.get("idempotency-attempt")).collect();
    assert_ne!(tokens[0], tokens[1], "a new attempt has a new token");
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn outcomes_of_the_routes_own() {
    let upstream = Upstream::start(|request| match request.head.get("x-status") {
        Some(status) => Reply::status(&format!("{status} As Asked"), "x"),
        None => Reply::default().pause(Duration::from_millis(1)).reset(),
    });
    let outcomes = "outcomes = { \"429\" = \"store\", \"5xx\" = \"hold\", \"500\" = \"store\", \"404\" = \"release\", \
                    \"broken\" = \"release\" }";
    let gate = Gate::before(&upstream).defaults(outcomes).start();
    for (status, first, second) in [
        ("429", "executed", "replayed"),
        ("503", "outcome-unknown", "outcome-unknown"),
        ("500", "executed", "replayed"),
        ("404", "released", "released"),
        ("502", "outcome-unknown", "outcome-unknown"),
    ] {
        let request = Request::post("/c").key(status).header("X-Status", status).body("{}");
        let response = request.send(&gate);
        assert_eq!((response.status.to_string().as_str(), response.word().as_str()), (status, first));
        assert_eq!(request.send(&gate).word(), second, "{status}");
    }
    let runs = upstream.runs();
    for _ in 0..2 {
        let response = gate.post("/c", "broken", "{}");
        assert_eq!(response.status, 502, "{}", response.show());
    }
    assert_eq!(upstream.runs(), runs + 2, "a released key runs again");
}

#[test]
fn an_upstream_that_releases() {
    for control in ["release", "no-store, release", "Release", "ttl=60, release"] {
        let upstream = controlled(control);
        let gate = Gate::before(&upstream).start();
        let first = gate.post("/c", "k", "{}");
        first.expect(200, "released");
        assert!(!first.head.has("idempotency-control"), "{}", first.show());
        assert!(first.head.has("x-a"));
        gate.post("/c", "k", "{}").expect(200, "released");
        assert_eq!(upstream.runs(), 2);
    }
}

#[test]
fn an_upstream_that_wants_its_answer_not_kept() {
    let upstream = controlled("no-store");
    let gate = Gate::before(&upstream).start();
    let first = gate.post("/c", "k", "{}");
    assert_eq!((first.status, first.text().as_str()), (200, "run 1"));
    assert!(!first.head.has("idempotency-control"));
    let retry = gate.post("/c", "k", "{}");
    retry.expect_problem(409, "response-not-stored");
    assert_eq!(retry.json()["original_status"], 200);
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn an_upstream_that_says_for_how_long() {
    let upstream = controlled("ttl=1");
    let gate = Gate::before(&upstream).start();
    gate.post("/c", "k", "{}").expect(200, "executed");
    eventually("the second run", || (gate.post("/c", "k", "{}").word() == "executed").then_some(()));
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn what_the_upstream_says_wrongly_is_ignored() {
    for control in ["ttl=soon", "ttl=-1", "sometimes", "ttl", ""] {
        let upstream = controlled(control);
        let gate = Gate::before(&upstream).start();
        gate.post("/c", "k", "{}").expect(200, "executed");
        let replay = gate.post("/c", "k", "{}");
        replay.expect(200, "replayed");
        assert!(!replay.head.has("idempotency-control"));
        assert_eq!(upstream.runs(), 1, "{control}");
    }
}

#[test]
fn control_beats_outcomes() {
    let upstream = Upstream::start(|_| {
        Reply::raw("HTTP/1.1 502 Bad Gateway\r\nIdempotency-Control: release\r\nContent-Length: 0\r\n\r\n")
    });
    let gate = Gate::before(&upstream).start();
    gate.post("/c", "k", "{}").expect(502, "released");
    gate.post("/c", "k", "{}").expect(502, "released");
    assert_eq!(upstream.runs(), 2);
}

/// An answer too large to keep streams to the client once it is durable that it will not be kept.
#[test]
fn answers_too_large_to_keep() {
    let body = "z".repeat(200_000);
    for chunked in [false, true] {
        let answer = body.clone();
        let upstream = Upstream::start(move |_| match chunked {
            false => Reply::ok(&answer),
            true => Reply::raw(format!(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{answer}\r\n0\r\n\r\n",
                answer.len()
            )),
        });
        let gate = Gate::before(&upstream).defaults("max_response_body = \"100KiB\"").start();
        let first = gate.post("/c", "k", "{}");
        assert_eq!(first.status, 200, "{}", first.show());
        assert!(first.body.complete && first.body.bytes == body.as_bytes());
        let gate = gate.kill9().start();
        let retry = gate.post("/c", "k", "{}");
        retry.expect_problem(409, "response-not-stored");
        assert_eq!(retry.json()["original_status"], 200);
        assert_eq!(upstream.runs(), 1);
    }
}

#[test]
fn an_answer_too_large_streams_only_after_its_tombstone() {
    let signal = Signal::new();
    let upstream = large("200 OK", &signal);
    let gate = Gate::before(&upstream).defaults("max_response_body = \"100KiB\"").start();
    let mut client = crate::support::Client::connect(gate.address);
    client.send(Request::post("/c").key("k").body("{}").bytes());
    let head = client.head();
    assert!(head.start.starts_with(b"HTTP/1.1 200"));
    client.wire.until(&[b'a'; 150_000]).expect("bytes, while the upstream still sends");
    // It is durable that the answer is not kept: a kill now cannot bring a second run.
    let gate = gate.kill9().start();
    gate.post("/c", "k", "{}").expect_problem(409, "response-not-stored");
    signal.open();
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn an_answer_too_large_that_releases_its_key_does_so_at_its_end() {
    let signal = Signal::new();
    let upstream = large("503 No", &signal);
    let gate = Gate::before(&upstream).defaults("max_response_body = \"100KiB\"").start();
    let mut client = crate::support::Client::connect(gate.address);
    client.send(Request::post("/c").key("k").body("{}").bytes());
    assert!(client.head().start.starts_with(b"HTTP/1.1 503"));
    client.wire.until(&[b'a'; 150_000]).expect("bytes, while the upstream still sends");
    gate.post("/c", "k", "{}").expect_problem(409, "in-flight");
    assert_eq!(upstream.runs(), 1, "a retry ran beside the attempt");
    signal.open();
    eventually("a free key", || (gate.post("/c", "k", "{}").status == 503).then_some(()));
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn an_answer_too_large_that_breaks_off_holds_its_key() {
    let upstream =
        Upstream::start(|_| Reply::raw("HTTP/1.1 500 No\r\nContent-Length: 400000\r\n\r\n").then("zzz").close());
    let gate = Gate::before(&upstream).defaults("max_response_body = \"100KiB\"").start();
    let first = gate.post("/c", "k", "{}");
    assert!(first.status == 500 && !first.body.complete, "{}", first.show());
    eventually("the end of the attempt", || {
        (gate.post("/c", "k", "{}").json()["code"] == "outcome-unknown").then_some(())
    });
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn problems_of_a_route_with_docs() {
    let upstream = numbered();
    let gate = Gate::before(&upstream).defaults("docs = \"https://docs.example/idempotency\"").start();
    gate.post("/c", "k", "{}");
    let problem = gate.post("/c", "k", "{\"a\":1}");
    problem.expect_problem(422, "key-reused");
    assert_eq!(problem.json()["type"], "https://docs.example/idempotency");
    assert_eq!(problem.get("link").as_deref(), Some("<https://docs.example/idempotency>; rel=\"describedby\""));
    let gate = Gate::before(&upstream).start();
    gate.post("/c", "k", "{}");
    let problem = gate.post("/c", "k", "{\"a\":1}");
    assert_eq!(problem.json()["type"], "urn:oncegate:problem:key-reused");
    assert!(!problem.head.has("link"));
}

#[test]
fn host_and_path_find_the_route() {
    let upstream = numbered();
    let routes = "[[routes]]\nname = \"any\"\nmethods = [\"POST\"]\npath = \"/v1/{*rest}\"\nmode = \"pass\"\n\
                  [[routes]]\nname = \"capture\"\nmethods = [\"POST\"]\npath = \"/v1/charges/{id}/capture\"\n\
                  [[routes]]\nname = \"tenant\"\nmethods = [\"POST\"]\nhost = \"a.example\"\npath = \"/t\"\n";
    let gate = Gate::before(&upstream).routes(routes).start();
    let word = |request: Request| request.key("k").body("{}").send(&gate).word();
    assert_eq!(word(Request::post("/v1/charges")), "");
    assert_eq!(word(Request::post("/v1/charges/7/capture")), "executed");
    assert_eq!(word(Request::post("/v1/charges/7/8/capture")), "");
    assert_eq!(word(Request::post("/t").header("Host", "A.example:80")), "executed");
    assert_eq!(word(Request::post("/t").header("Host", "b.example")), "ignored");
    let routes: Vec<_> = gate.records("").iter().map(|record| record["route"].clone()).collect();
    assert_eq!(routes.len(), 2);
    assert!(routes.contains(&"capture".into()) && routes.contains(&"tenant".into()), "{routes:?}");
}

#[test]
fn headers_by_another_name_or_not_at_all() {
    let upstream = numbered();
    let gate = Gate::before(&upstream)
        .top("[headers]\nstatus = \"X-Gate\"\nreplayed = \"X-Replayed\"\nexpires = false")
        .start();
    let first = gate.post("/c", "k", "{}");
    assert_eq!((first.get("x-gate").as_deref(), first.word().as_str()), (Some("executed"), ""), "{}", first.show());
    let second = gate.post("/c", "k", "{}");
    assert_eq!(second.get("x-gate").as_deref(), Some("replayed"), "{}", second.show());
    assert_eq!(second.get("x-replayed").as_deref(), Some("true"));
    for response in [first, second] {
        assert!(!response.head.has("idempotency-expires") && !response.head.has("idempotent-replayed"));
    }
}
