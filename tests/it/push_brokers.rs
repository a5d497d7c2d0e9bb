//! The recipes for brokers that push, against what these brokers send.
//!
//! Each file of `tests/it/push_brokers` has three requests: a delivery as the documentation that it names shows it, the same
//! delivered again, and another payload under the same id. The routes are those of the recipe's page.

use std::path::Path;
use std::process::Command;

use crate::support::{Client, Gate, Reply, Response, Upstream, recorded};

/// The page and the file of a broker, the key that `oncegate explain` finds, where, and the scope.
const BROKERS: [(&str, &str, &str, &str); 6] = [
    ("cloudevents", "", "cloudevent: the key is a digest of the event's source and id", "host: webhook.example.com"),
    ("pubsub-push", "2070443601311540", "json:/message/messageId: the key is from here", "host: hooks.example.com"),
    (
        "sns",
        "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
        "header:x-amz-sns-message-id: the key is from here",
        "host: hooks.example.com",
    ),
    (
        "eventbridge",
        "6a7e8feb-b491-4cf7-a9f1-bf3703467718",
        "json:/id: the key is from here",
        "host: hooks.example.com",
    ),
    (
        "knative",
        "",
        "cloudevent: the key is a digest of the event's source and id",
        "host: orders.default.svc.cluster.local",
    ),
    ("dapr", "", "cloudevent: the key is a digest of the event's source and id", "host: 127.0.0.1:8080"),
];

/// A gate with the routes of a recipe.
fn gate(upstream: &Upstream, page: &str) -> Gate {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/recipes/{page}.md"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{page}: {error}"));
    let file = text.split("```toml,file=gate.toml\n").nth(1).and_then(|rest| rest.split("```").next());
    let routes = file.and_then(|file| file.find("[[routes]]").map(|start| &file[start..])).expect("routes");
    Gate::before(upstream).routes(routes).start()
}

fn send(gate: &Gate, request: &recorded::Recorded) -> Response {
    Client::connect(gate.address).send(request.bytes()).response()
}

/// What `oncegate explain` says of a request: the key, where it is from, and the scope.
fn explained(gate: &Gate, request: &recorded::Recorded) -> [String; 3] {
    let mut explain = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    explain.arg("explain").arg("--config").arg(gate.plan.path("oncegate.toml")).args(["-X", &request.method]);
    explain.args(request.headers.iter().flat_map(|line| ["-H", line])).args(["-d", &request.body, &request.target]);
    let done = explain.output().expect("the binary starts");
    let text = String::from_utf8(done.stdout).expect("UTF-8");
    assert!(done.status.success(), "{text}{}", String::from_utf8_lossy(&done.stderr));
    let column = |line: &str| line.get(13..).unwrap_or_default().to_owned();
    let lines: Vec<&str> = text.lines().collect();
    let at = |label: &str| lines.iter().position(|line| line.starts_with(label)).unwrap_or_else(|| panic!("{text}"));
    [column(lines[at("key ")]), column(lines[at("key ") + 1]), column(lines[at("scope ")])]
}

#[test]
fn a_delivery_runs_once_and_another_payload_under_its_id_is_refused() {
    for (page, key, source, scope) in BROKERS {
        let upstream = Upstream::start(|_| Reply::ok("done"));
        let gate = gate(&upstream, page);
        let [first, again, changed] = recorded::requests(&format!("push_brokers/{page}.http"));
        let [found, from, whose] = explained(&gate, &first);
        assert!(if key.is_empty() { found.len() == 64 } else { found == key }, "{page}: {found}");
        assert_eq!((&*from, &*whose), (source, scope), "{page}");
        assert_eq!(explained(&gate, &again), [found, from, whose], "{page}: the redelivery has the same key and scope");
        for (what, request, status, word) in [
            ("first", &first, 200, "executed"),
            ("again", &again, 200, "replayed"),
            ("changed", &changed, 422, "key-reused"),
            ("again", &again, 200, "replayed"),
        ] {
            let answer = send(&gate, request);
            assert_eq!((answer.status, &*answer.word()), (status, word), "{page}: {what}: {}", answer.show());
        }
        assert_eq!(upstream.runs(), 1, "{page}");
    }
}

#[test]
fn a_delivery_that_failed_runs_again() {
    for (page, ..) in BROKERS {
        let upstream = Upstream::start(|request| match request.nth {
            1 => Reply::status("500 Internal Server Error", "no"),
            2 => Reply::status("404 Not Found", "no"),
            _ => Reply::ok("done"),
        });
        let gate = gate(&upstream, page);
        let [first, again, _] = recorded::requests(&format!("push_brokers/{page}.http"));
        for (request, word) in [(&first, "released"), (&again, "released"), (&again, "executed"), (&again, "replayed")]
        {
            assert_eq!(send(&gate, request).word(), word, "{page}");
        }
    }
}

#[test]
fn dapr_gets_a_message_again_that_the_application_asks_for_again() {
    let json = |body: &str| {
        let length = body.len();
        Reply::raw(format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        ))
    };
    let upstream = Upstream::start(move |request| match request.nth {
        1 => json("{\"status\": \"RETRY\"}"),
        _ => json("{\"status\": \"SUCCESS\"}"),
    });
    let gate = gate(&upstream, "dapr");
    let [first, again, _] = recorded::requests("push_brokers/dapr.http");
    for (request, word) in [(&first, "released"), (&again, "executed"), (&again, "replayed")] {
        send(&gate, request).expect(200, word);
    }
}
