//! `outcomes_body`: what an answer's own JSON says of how its attempt ended.

use crate::support::{Client, Gate, Reply, Request, Signal, Upstream};

const RULES: &str = "outcomes_body = [
    { pointer = \"/error/retryable\", equals = true, then = \"release\" },
    { pointer = \"/error/code\", equals = \"unsure\", then = \"hold\" },
    { pointer = \"/done\", equals = 1, then = \"store\" },
]";

const RETRYABLE: &str = "{\"error\":{\"retryable\":true}}";

fn json(status: &str, more: &str, body: impl AsRef<[u8]>) -> Reply {
    let body = body.as_ref();
    let head =
        format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{more}Content-Length: {}\r\n\r\n", body.len());
    Reply::raw(head).then(body)
}

/// Sends the same request twice: the words that its answers had, and how often it ran.
fn twice(reply: impl Fn() -> Reply + Send + Sync + 'static, defaults: &str) -> (String, String, usize) {
    let upstream = Upstream::start(move |_| reply());
    let gate = Gate::before(&upstream).defaults(defaults).start();
    let (first, second) = (gate.post("/c", "k", "{}"), gate.post("/c", "k", "{}"));
    (first.word(), second.word(), upstream.runs())
}

#[track_caller]
fn expect(reply: impl Fn() -> Reply + Send + Sync + 'static, first: &str, second: &str, runs: usize) {
    assert_eq!(twice(reply, RULES), (first.to_owned(), second.to_owned(), runs));
}

#[test]
fn a_body_decides_before_the_status_does() {
    // By its status it would be kept.
    expect(|| json("200 OK", "", RETRYABLE), "released", "released", 2);
    let problem = || {
        let head = format!("Content-Type: application/problem+json\r\nContent-Length: {}", RETRYABLE.len());
        Reply::raw(format!("HTTP/1.1 422 No\r\n{head}\r\n\r\n{RETRYABLE}"))
    };
    expect(problem, "released", "released", 2);
    let unsure = "{\"error\":{\"retryable\":false,\"code\":\"unsure\"}}";
    expect(move || json("200 OK", "", unsure), "outcome-unknown", "outcome-unknown", 1);
    // By its status it would be released.
    expect(|| json("503 Later", "", "{\"done\":1.0}"), "executed", "replayed", 1);
    expect(|| json("200 OK", "", "{\"error\":null}"), "executed", "replayed", 1);
}

#[test]
fn the_first_client_gets_the_answer_whatever_it_comes_to() {
    let upstream = Upstream::start(|_| json("200 OK", "", RETRYABLE));
    let gate = Gate::before(&upstream).defaults(RULES).start();
    let first = gate.post("/c", "k", "{}");
    first.expect(200, "released");
    assert_eq!(first.text(), RETRYABLE);
    assert!(gate.records("").is_empty(), "the key is free");
}

#[test]
fn what_cannot_be_judged_is_settled_by_its_status() {
    let kept = |reply: fn() -> Reply| expect(reply, "executed", "replayed", 1);
    // Compressed, whatever its bytes look like.
    kept(|| json("200 OK", "Content-Encoding: gzip\r\n", RETRYABLE));
    // Not JSON by its type, or by itself.
    kept(|| Reply::ok(RETRYABLE));
    kept(|| json("200 OK", "", &RETRYABLE[..RETRYABLE.len() - 1]));
    // Read in two ways by two readers.
    kept(|| json("200 OK", "", "{\"error\":{\"retryable\":true},\"error\":{\"retryable\":true}}"));
    kept(|| json("200 OK", "", "{\"error\":{\"retryable\":\"true\"}}"));
    // Larger than 1 MiB.
    kept(|| json("200 OK", "", format!("{{\"x\":\"{}\",\"error\":{{\"retryable\":true}}}}", "x".repeat(1 << 20))));
    kept(|| Reply::raw("HTTP/1.1 204 None\r\nContent-Type: application/json\r\n\r\n"));
}

/// It might say that the request took effect.
#[test]
fn what_cannot_be_read_frees_no_key() {
    let held = |reply: fn() -> Reply, defaults: &str| {
        let words = ("outcome-unknown".to_owned(), "outcome-unknown".to_owned(), 1);
        assert_eq!(twice(reply, &format!("{RULES}\n{defaults}")), words);
    };
    held(|| json("500 No", "Content-Encoding: gzip\r\n", "\x1f"), "");
    held(|| json("500 No", "", "1".repeat((1 << 20) + 1)), "");
    held(|| json("500 No", "", "1".repeat(101)), "max_response_body = \"100B\"");
    expect(|| json("500 No", "", "1".repeat(1 << 20)), "released", "released", 2);
    expect(|| json("500 No", "", ""), "released", "released", 2);
}

#[test]
fn an_answer_that_is_judged_is_asked_for_without_coding() {
    let upstream = Upstream::start(|_| json("200 OK", "", RETRYABLE));
    let gate = Gate::before(&upstream).defaults(RULES).start();
    for coding in [None, Some("gzip, br")] {
        let request = Request::post("/c").key("k").body("{}");
        let request = coding.into_iter().fold(request, |request, coding| request.header("Accept-Encoding", coding));
        request.send(&gate).expect(200, "released");
        let forwarded = upstream.last().head.get("accept-encoding");
        assert_eq!(forwarded, coding.map(|_| "identity".to_owned()));
    }
}

#[test]
fn what_the_upstream_says_in_its_head_beats_its_body() {
    let control = |control: &'static str, body: &'static str| {
        move || json("200 OK", &format!("Idempotency-Control: {control}\r\n"), body)
    };
    expect(control("no-store", RETRYABLE), "executed", "response-not-stored", 1);
    expect(control("release", "{\"done\":1}"), "released", "released", 2);
}

/// An answer that may be judged by its body is not out before it is judged; another streams as usual.
#[test]
fn an_answer_that_streams() {
    let streams = format!("body = \"stream\"\n{RULES}");
    for (content_type, is_judged) in [("application/json", true), ("text/event-stream", false)] {
        let signal = Signal::new();
        let held = signal.clone();
        let upstream = Upstream::start(move |_| {
            let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n";
            Reply::raw(format!("{head}Content-Type: {content_type}\r\n\r\n9\r\n{{\"error\":\r\n3\r\n   \r\n"))
                .pause_until(&held)
                .then("12\r\n{\"retryable\":true}\r\n1\r\n}\r\n0\r\n\r\n")
        });
        let gate = Gate::before(&upstream).defaults(&streams).start();
        let mut client = Client::connect(gate.address);
        client.send(Request::post("/c").key("k").body("{}").bytes());
        if !is_judged {
            client.wire.until(b"{\"error\":").expect("a piece, while the upstream still sends");
        }
        signal.open();
        if is_judged {
            let response = client.response();
            response.expect(200, "released");
            assert_eq!(response.text(), "{\"error\":   {\"retryable\":true}}");
        }
        drop(client);
        let (word, runs) = if is_judged { ("released", 2) } else { ("replayed", 1) };
        let retry = Request::post("/c").key("k").body("{}").send_after_attempt(&gate);
        assert_eq!((retry.word().as_str(), upstream.runs()), (word, runs));
    }
}

/// One that is too large to be judged streams once that is known.
#[test]
fn a_large_answer_streams_all_the_same() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| {
        Reply::raw("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 3000000\r\n\r\n")
            .then("1".repeat(2_000_000))
            .pause_until(&held)
            .then("1".repeat(1_000_000))
    });
    let gate = Gate::before(&upstream).defaults(&format!("body = \"stream\"\n{RULES}")).start();
    let mut client = Client::connect(gate.address);
    client.send(Request::post("/c").key("k").body("{}").bytes());
    client.wire.until(&[b'1'; 1_100_000]).expect("a piece, while the upstream still sends");
    signal.open();
    Request::post("/c").key("k").body("{}").send_after_attempt(&gate).expect(200, "replayed");
    assert_eq!(upstream.runs(), 1);
}
