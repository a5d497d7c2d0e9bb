//! Presets against what their senders send.
//!
//! Each file of `tests/it/presets` has three requests as the sender's documentation shows them: the first delivery, the same
//! again as the sender repeats it, and another one.

use crate::support::{Client, Gate, Reply, Request, Response, Upstream, recorded};

const PRESETS: [&str; 9] = [
    "ietf",
    "stripe",
    "cloudevents",
    "standard-webhooks",
    "github-webhook",
    "stripe-webhook",
    "shopify-webhook",
    "pubsub-push",
    "sns",
];

/// The requests of a preset, as bytes.
fn requests(preset: &str) -> [Vec<u8>; 3] {
    recorded::requests(&format!("presets/{preset}.http")).map(|request| request.bytes())
}

fn send(gate: &Gate, request: &[u8]) -> Response {
    Client::connect(gate.address).send(request).response()
}

fn gate(upstream: &Upstream, preset: &str) -> Gate {
    let route = format!("[[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\npreset = \"{preset}\"\n");
    Gate::before(upstream).routes(&route).start()
}

#[test]
fn what_a_sender_repeats_is_a_replay_and_another_event_runs() {
    for preset in PRESETS {
        let upstream = Upstream::start(|_| Reply::ok("done"));
        let gate = gate(&upstream, preset);
        let [first, again, other] = requests(preset);
        for (what, request, word) in
            [("first", &first, "executed"), ("again", &again, "replayed"), ("another", &other, "executed")]
        {
            let answer = send(&gate, request);
            assert_eq!((answer.status, &*answer.word()), (200, word), "{preset}: {what}: {}", answer.show());
        }
        assert_eq!(upstream.runs(), 2, "{preset}");
    }
}

/// GitHub gives the deliveries of one event to several hooks the same id.
#[test]
fn each_hook_of_an_event_runs_once() {
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = gate(&upstream, "github-webhook");
    let [first, again, _] = requests("github-webhook");
    let other = String::from_utf8(first.clone()).unwrap().replace("292430182", "292430183");
    for (request, word) in
        [(&first[..], "executed"), (other.as_bytes(), "executed"), (&again, "replayed"), (other.as_bytes(), "replayed")]
    {
        assert_eq!(send(&gate, request).word(), word);
    }
    assert_eq!(upstream.runs(), 2);
}

#[test]
fn a_delivery_that_failed_runs_again() {
    for preset in PRESETS.iter().filter(|preset| !["ietf", "stripe"].contains(preset)) {
        for status in ["302 Found", "400 Bad Request", "404 Not Found", "500 Internal Server Error"] {
            let upstream = Upstream::start(move |_| Reply::status(status, "no"));
            let gate = gate(&upstream, preset);
            let [first, again, _] = requests(preset);
            assert_eq!(send(&gate, &first).word(), "released", "{preset}: {status}");
            assert_eq!(send(&gate, &again).word(), "released", "{preset}: {status}");
            assert_eq!(upstream.runs(), 2, "{preset}: {status}");
        }
    }
}

#[test]
fn a_request_without_an_id_is_refused_where_senders_always_have_one() {
    for preset in PRESETS {
        let upstream = Upstream::start(|_| Reply::ok("done"));
        let gate = gate(&upstream, preset);
        let answer = Request::post("/x").header("Content-Type", "application/json").body("{}").send(&gate);
        match preset {
            "stripe" => assert_eq!((answer.status, upstream.runs()), (200, 1), "{}", answer.show()),
            _ => assert_eq!(answer.expect_bare_problem(400, "key-missing").word(), "", "{preset}"),
        }
    }
}

#[test]
fn a_stripe_like_api_keeps_errors_of_its_own_and_not_refusals() {
    for (status, word) in [
        ("400 Bad Request", "released"),
        ("401 Unauthorized", "released"),
        ("402 Payment Required", "replayed"),
        ("409 Conflict", "released"),
        ("429 Too Many Requests", "released"),
        ("500 Internal Server Error", "replayed"),
    ] {
        let upstream = Upstream::start(move |_| Reply::status(status, "no"));
        let gate = gate(&upstream, "stripe");
        let [first, again, _] = requests("stripe");
        send(&gate, &first);
        assert_eq!(send(&gate, &again).word(), word, "{status}");
    }
}

#[test]
fn a_message_id_of_another_subscription_is_refused_and_not_lost() {
    let upstream = Upstream::start(|_| Reply::ok("done"));
    let gate = gate(&upstream, "pubsub-push");
    let [first, ..] = requests("pubsub-push");
    assert_eq!(send(&gate, &first).word(), "executed");
    let other = String::from_utf8(first).unwrap().replace("mysubscription", "hersubscription");
    let (head, body) = other.split_once("\r\n\r\n").unwrap();
    let lines: Vec<&str> = head.lines().filter(|line| !line.starts_with("Content-Length")).collect();
    let other = format!("{}\r\nContent-Length: {}\r\n\r\n{body}", lines.join("\r\n"), body.len());
    send(&gate, other.as_bytes()).expect_problem(422, "key-reused");
}
