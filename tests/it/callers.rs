//! Callers under the default scope: a key's answer goes to the credentials that the key was used with, and to no others.

use std::thread::scope;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};

use crate::support::http2::{self, Http2};
use crate::support::https::{self, Certificates, Https};
use crate::support::{Gate, Reply, Request, Response, Signal, Upstream};

const BODY: &str = "{\"amount\":1}";

/// An upstream that answers each caller with what only that caller may see.
fn upstream() -> Upstream {
    Upstream::start(|request| {
        let body = format!("run {}: the account of {}", request.nth, request.head.get("cookie").unwrap_or_default());
        Reply::raw(format!(
            "HTTP/1.1 201 Created\r\nSet-Cookie: session=secret-{}\r\nContent-Length: {}\r\n\r\n{body}",
            request.nth,
            body.len()
        ))
    })
}

fn charge(headers: &[(&str, &str)]) -> Request {
    charge_with("k-1", headers)
}

fn charge_with(key: &str, headers: &[(&str, &str)]) -> Request {
    let request = Request::post("/charges").key(key).body(BODY);
    headers.iter().fold(request, |request, (name, value)| request.header(name, value))
}

/// `Bearer` with a token in the form of a JWT.
fn bearer(payload: &str) -> String {
    format!("Bearer e30.{}.c2ln", URL_SAFE_NO_PAD.encode(payload))
}

fn basic(user: &str) -> String {
    format!("Basic {}", STANDARD.encode(user))
}

/// Holds that a caller with other credentials is refused, and hears nothing of the record.
#[track_caller]
fn expect_refused(response: &Response) {
    response.expect_problem(422, "caller-differs");
    let show = response.show();
    assert!(!response.head.has("set-cookie") && !response.head.has("retry-after"), "{show}");
    assert!(!show.contains("account") && !show.contains("secret"), "{show}");
}

#[test]
fn two_customers_with_cookies_and_one_key() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    let (ann, bob) = (charge(&[("Cookie", "session=ann")]), charge(&[("Cookie", "session=bob")]));
    let first = ann.send(&gate);
    first.expect(201, "executed");
    let refused = bob.send(&gate);
    expect_refused(&refused);
    assert_eq!(upstream.runs(), 1);
    let replay = ann.send(&gate);
    replay.expect(201, "replayed");
    first.expect_repeated_by(&replay);
    // It tells no more than a key that was reused does.
    let reused = charge(&[("Cookie", "session=bob")]).body("{\"amount\":2}").send(&gate);
    reused.expect_problem(422, "key-reused");
    assert_eq!(refused.names(), reused.names());
    let members =
        |response: &Response| response.json().as_object().unwrap().keys().map(String::to_owned).collect::<Vec<_>>();
    assert_eq!(members(&refused), members(&reused));
    // A caller without cookies is neither of them, and may be the one whose session has ended.
    expect_refused(&charge(&[]).send(&gate));
    assert_eq!(upstream.runs(), 1);
}

/// Headers of a request.
type Headers = Vec<(&'static str, String)>;

/// What a retry gets after its credentials changed, while the record is kept by a process, and by the next.
#[test]
fn a_credential_that_was_renewed() {
    let ann = |expires: u32| bearer(&format!("{{\"iss\":\"https://id.example\",\"sub\":\"ann\",\"exp\":{expires}}}"));
    let cases: [(&str, Headers, Headers, bool); 8] = [
        ("a password", vec![("Authorization", basic("ann:1"))], vec![("Authorization", basic("ann:2"))], true),
        ("a JWT", vec![("Authorization", ann(1))], vec![("Authorization", ann(2))], true),
        (
            "one of two users of an application key",
            vec![("X-Api-Key", "app".to_owned()), ("Authorization", "Bearer ann".to_owned())],
            vec![("X-Api-Key", "app".to_owned()), ("Authorization", "Bearer bob".to_owned())],
            true,
        ),
        (
            "an application key with a user and without one",
            vec![("X-Api-Key", "app".to_owned()), ("Authorization", "Bearer ann".to_owned())],
            vec![("X-Api-Key", "app".to_owned())],
            true,
        ),
        ("a session", vec![("Cookie", "s=1".to_owned())], vec![("Cookie", "s=2".to_owned())], true),
        (
            "an opaque token",
            vec![("Authorization", "Bearer one".to_owned())],
            vec![("Authorization", "Bearer two".to_owned())],
            false,
        ),
        ("an application key", vec![("X-Api-Key", "one".to_owned())], vec![("X-Api-Key", "two".to_owned())], false),
        (
            "a JWT of another subject",
            vec![("Authorization", ann(1))],
            vec![("Authorization", bearer("{\"iss\":\"https://id.example\",\"sub\":\"bob\"}"))],
            false,
        ),
    ];
    let upstream = upstream();
    let mut gate = Gate::before(&upstream).start();
    let request = |nth: usize, headers: &[(&str, String)]| {
        let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        charge_with(&format!("k-{nth}"), &headers)
    };
    for (nth, (what, first, _, _)) in cases.iter().enumerate() {
        request(nth, first).send(&gate).expect(201, "executed");
        assert_eq!(upstream.runs_of(&format!("k-{nth}")), 1, "{what}");
    }
    for is_restarted in [false, true] {
        if is_restarted {
            gate = gate.kill9().start();
        }
        for (nth, (what, first, second, is_refused)) in cases.iter().enumerate() {
            request(nth, first).send(&gate).expect(201, "replayed");
            let renewed = request(nth, second).send(&gate);
            if *is_refused {
                expect_refused(&renewed);
            } else {
                renewed.expect(201, if is_restarted { "replayed" } else { "executed" });
            }
            assert_eq!(upstream.runs_of(&format!("k-{nth}")), if *is_refused { 1 } else { 2 }, "{what}");
        }
    }
}

#[test]
fn while_the_first_request_runs() {
    for wait in ["in_flight = \"reject\"", "in_flight = { wait = \"60s\" }"] {
        let signal = Signal::new();
        let held = signal.clone();
        let upstream = Upstream::start(move |_| Reply::ok("the account of ann").hold_until(&held));
        let gate = Gate::before(&upstream).defaults(wait).start();
        let (ann, bob) = (charge(&[("Cookie", "session=ann")]), charge(&[("Cookie", "session=bob")]));
        scope(|scope| {
            let first = scope.spawn(|| ann.send(&gate));
            upstream.wait_for_runs(1);
            // At once, whether duplicates wait here or not.
            expect_refused(&bob.send(&gate));
            let own = scope.spawn(|| ann.send(&gate));
            if wait.contains("wait") {
                gate.wait_for_waiting(1);
                expect_refused(&bob.send(&gate));
                signal.open();
                own.join().unwrap().expect(200, "replayed");
            } else {
                own.join().unwrap().expect_problem(409, "in-flight");
                signal.open();
            }
            first.join().unwrap().expect(200, "executed");
        });
        expect_refused(&bob.send(&gate));
        assert_eq!(upstream.runs(), 1);
    }
}

#[test]
fn an_outcome_that_is_unknown() {
    for recovery in ["hold", "retry"] {
        let upstream = Upstream::start(|request| match request.nth {
            1 => Reply::default().pause(std::time::Duration::from_millis(1)).reset(),
            _ => Reply::ok("x"),
        });
        let plan = Gate::before(&upstream).defaults(&format!("recovery = \"{recovery}\""));
        let gate = plan.start();
        let (ann, bob) = (charge(&[("Cookie", "session=ann")]), charge(&[("Cookie", "session=bob")]));
        ann.send(&gate).expect_problem(502, "upstream-broken");
        expect_refused(&bob.send(&gate));
        let gate = gate.kill9().start();
        expect_refused(&bob.send(&gate));
        assert_eq!((upstream.runs(), gate.states("k-1")), (1, vec!["unknown".to_owned()]), "{recovery}");
        match recovery {
            "hold" => ann.send(&gate).expect_problem(409, "outcome-unknown"),
            _ => ann.send(&gate).expect(200, "executed"),
        };
    }
}

#[test]
fn a_key_that_is_free_again_is_anybodys() {
    let upstream = Upstream::start(|request| match request.nth {
        1 => Reply::status("500 Oops", "x"),
        _ => Reply::ok("x"),
    });
    let gate = Gate::before(&upstream).start();
    charge(&[("Cookie", "session=ann")]).send(&gate).expect(500, "released");
    charge(&[("Cookie", "session=bob")]).send(&gate).expect(200, "executed");
    expect_refused(&charge(&[("Cookie", "session=ann")]).send(&gate));
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn cookies_count_alike_in_one_line_and_in_several() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    let by_http1 = |lines: &[&str]| {
        let request =
            lines.iter().fold(charge(&[("Host", "gate.test")]), |request, line| request.header("Cookie", line));
        request.send(&gate)
    };
    let by_http2 = |crumbs: &[&str]| {
        let request = http2::post("/charges").header("idempotency-key", "k-1");
        let request = crumbs.iter().fold(request, |request, crumb| request.header("cookie", *crumb));
        Http2::connect(&gate).send(request.body(BODY).unwrap())
    };
    by_http1(&["a=1; session=ann"]).expect(201, "executed");
    by_http1(&["a=1", "session=ann"]).expect(201, "replayed");
    by_http2(&["a=1", "session=ann"]).expect(201, "replayed");
    by_http2(&["a=1; session=ann"]).expect(201, "replayed");
    let refused = by_http2(&["a=1", "session=bob"]);
    refused.expect(422, "caller-differs");
    assert!(!refused.headers.contains_key("set-cookie"), "{refused:?}");
    expect_refused(&by_http1(&["a=1", "session=bob"]));
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn the_metadata_of_a_call_counts_alike() {
    let upstream = Upstream::start(|_| {
        Reply::raw("HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\ngrpc-status: 0\r\nContent-Length: 0\r\n\r\n")
    });
    let gate = Gate::before(&upstream).start();
    let call = |token: &str| {
        let request = Request::post("/pay.Payments/Charge").key("k-1").header("Content-Type", "application/grpc");
        request.header("TE", "trailers").header("Authorization", token).body(b"\0\0\0\0\0".to_vec()).send(&gate)
    };
    let ann = |expires: u32| bearer(&format!("{{\"sub\":\"ann\",\"exp\":{expires}}}"));
    call(&ann(1)).expect(200, "executed");
    call(&ann(1)).expect(200, "replayed");
    let refused = call(&ann(2));
    refused.expect(200, "caller-differs");
    // As for a key that was reused: it will not go away.
    assert_eq!(refused.get("grpc-status").as_deref(), Some("9"), "{}", refused.show());
    assert_eq!(refused.get("grpc-retry-pushback-ms").as_deref(), Some("-1"));
    assert!(refused.get("grpc-message").unwrap().starts_with("caller-differs: "));
    assert_eq!(upstream.runs(), 1);
}

#[test]
fn a_clients_certificate_is_a_proof() {
    let Some(certificates) = Certificates::new() else { return };
    for name in ["ann", "bob"] {
        certificates.sign(name, "subjectAltName=DNS:shared");
    }
    let upstream = Upstream::start(|_| Reply::ok("made"));
    let gate = Gate::before(&upstream).server(&certificates.server_of_clients()).start();
    let pay = |name: &str, word: &str| {
        let request = "POST /pay HTTP/1.1\r\nHost: gate.test\r\nIdempotency-Key: k\r\nContent-Length: 2\r\n\r\n10";
        let mut client = Https::connect(gate.address, &certificates.client(&[], Some(name)));
        if word == "caller-differs" {
            let refused = client.exchange(request, "\"retryable\":false}").unwrap();
            assert!(refused.contains("idempotency-status: caller-differs"), "{refused}");
        } else {
            client.exchange(request, "made").unwrap();
        }
        https::http2(gate.address, &certificates.client(&["h2"], Some(name))).post("/pay", "k", "10")
    };
    pay("ann", "executed").expect(200, "replayed");
    pay("bob", "caller-differs").expect(422, "caller-differs");
    pay("ann", "replayed").expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}

/// A part of a scope that is written down must be there.
#[test]
fn a_request_without_a_part_of_its_scope() {
    for (part, what, there) in [
        ("header:X-Tenant", "the header X-Tenant", ("X-Tenant", "a")),
        ("cookie:session", "the cookie `session`", ("Cookie", "a=1; session=ann")),
        ("basic:user", "the user of HTTP Basic credentials", ("Authorization", "Basic YW5uOm9uZQ==")),
    ] {
        let upstream = upstream();
        let gate = Gate::before(&upstream).defaults(&format!("scope = [\"host\", \"{part}\"]")).start();
        let refused = charge(&[("Cookie", "other=1"), ("Authorization", "Bearer s3cret")]).send(&gate);
        refused.expect_problem(400, "scope-missing");
        let detail = refused.json()["detail"].as_str().unwrap().to_owned();
        assert_eq!(detail, format!("{what} is required; nothing was sent"));
        assert_eq!((upstream.runs(), gate.records("limit=10").len()), (0, 0), "{part}");
        charge(&[there]).send(&gate).expect(201, "executed");
        charge(&[there]).send(&gate).expect(201, "replayed");
        // What carries no key is not protected, and needs no scope.
        let unkeyed = Request::post("/charges").body(BODY).send(&gate);
        assert_eq!((unkeyed.status, unkeyed.word().as_str()), (201, ""));
    }
}

#[test]
fn a_part_that_may_be_absent() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).defaults("scope = [\"header:X-Tenant?\"]").start();
    for (nth, headers) in [&[][..], &[("X-Tenant", "")], &[("X-Tenant", "a")]].into_iter().enumerate() {
        charge(headers).send(&gate).expect(201, "executed");
        charge(headers).send(&gate).expect(201, "replayed");
        assert_eq!(upstream.runs(), nth + 1, "absent, empty and present are three callers");
    }
}

/// Also where the key is found in the body only; and the rule of identities is the same with a `?` and without.
#[test]
fn a_part_becomes_optional_without_a_key_being_forgotten() {
    let upstream = upstream();
    let lines = |scope: &str| format!("scope = [\"{scope}\"]\nkey.from = [\"json:/id\"]");
    let plan = Gate::before(&upstream);
    let send = |gate: &Gate, tenant: Option<&str>| {
        let request = Request::post("/charges").header("Content-Type", "application/json").body("{\"id\":\"k-1\"}");
        tenant.into_iter().fold(request, |request, tenant| request.header("X-Tenant", tenant)).send(gate)
    };
    let gate = plan.clone().defaults(&lines("header:X-Tenant")).start();
    send(&gate, Some("a")).expect(201, "executed");
    send(&gate, None).expect_problem(400, "scope-missing");
    gate.stop();
    let gate = plan.clone().defaults(&lines("header:X-Tenant?")).start();
    send(&gate, Some("a")).expect(201, "replayed");
    send(&gate, None).expect(201, "executed");
    assert_eq!(upstream.runs(), 2);
}

/// What was kept under the first default scope is not forgotten in silence, and found under that scope written down.
#[test]
fn records_of_the_former_default() {
    let upstream = upstream();
    let plan = Gate::before(&upstream);
    let former = plan.clone().defaults("scope = [\"host\", \"header:Authorization?\", \"header:X-Api-Key?\"]");
    let request = charge(&[("Authorization", "Bearer one")]);
    let gate = former.start();
    request.send(&gate).expect(201, "executed");
    gate.stop();
    let mut refused = plan.spawn();
    assert!(!refused.wait().success());
    assert!(refused.log().contains("--accept-identity-change"), "{}", refused.log());
    request.send(&former.start()).expect(201, "replayed");
    assert_eq!(upstream.runs(), 1);
}

/// What a client sends with an empty `Authorization`, it sends without a credential there.
#[test]
fn headers_that_say_nothing_leave_cookies_to_tell() {
    let upstream = upstream();
    let gate = Gate::before(&upstream).start();
    let empties: [&[(&str, &str)]; 3] =
        [&[("Authorization", "")], &[("Authorization", "Bearer")], &[("X-Api-Key", "")]];
    for (nth, empty) in empties.into_iter().enumerate() {
        let key = format!("k-{nth}");
        let request = |session: &str| charge_with(&key, &[empty, &[("Cookie", session)]].concat()).send(&gate);
        request("session=ann").expect(201, "executed");
        expect_refused(&request("session=bob"));
        request("session=ann").expect(201, "replayed");
    }
}
