//! A page in a real browser (Chromium, where it is installed) that pays through the gate, at an upstream that knows nothing
//! of keys or of other origins.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::upstream::Request;
use crate::support::{Gate, Process, Reply, Signal, Upstream, eventually};

/// How long a browser may take on a busy machine.
const BROWSER: Duration = Duration::from_secs(60);

/// Two tabs of an impatient user: the same payment twice at once. The second waits as `Retry-After` says, until it has the
/// first one's answer.
const PAGE: &str = r#"<!doctype html><title>shop</title><script>
const gate = "GATE";
async function pay(key) {
  const waits = [];
  for (;;) {
    const response = await fetch(gate + "/charges", {
      method: "POST",
      headers: { "Idempotency-Key": key, "Content-Type": "application/json" },
      body: JSON.stringify({ amount: 100 }),
    });
    const status = response.headers.get("Idempotency-Status");
    if (status !== "in-flight") return { status, code: response.status, body: await response.text(), waits };
    waits.push(Number(response.headers.get("Retry-After")));
    await fetch("/waiting");
    await new Promise(resolve => setTimeout(resolve, 1000 * waits.at(-1)));
  }
}
Promise.all([pay("k-1"), pay("k-1")])
  .then(paid => fetch("/result", { method: "POST", body: JSON.stringify(paid) }))
  .catch(error => fetch("/result", { method: "POST", body: JSON.stringify(String(error)) }));
</script>"#;

fn method(request: &Request) -> String {
    request.start_line().split(' ').next().unwrap_or_default().to_owned()
}

fn target(request: &Request) -> String {
    request.start_line().split(' ').nth(1).unwrap_or_default().to_owned()
}

#[test]
fn a_page_of_another_origin_pays_once() {
    if Command::new("chromium").arg("--version").output().is_err() {
        return crate::servers::skipped("chromium");
    }
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match method(request).as_str() {
        "POST" => Reply::ok(format!("charge {}", request.nth)).hold_until(&held),
        _ => Reply::status("405 Method Not Allowed", "POST only"),
    });
    let address = Upstream::free_address();
    let page = PAGE.replace("GATE", &format!("http://{address}"));
    let shop = Upstream::start(move |request| match target(request).as_str() {
        "/" => Reply::raw(format!(
            "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {}\r\n\r\n{page}",
            page.len()
        )),
        _ => Reply::ok(""),
    });
    let cors = format!("cors = {{ origins = [\"{}\"], preflight = true }}", shop.url());
    let gate = Gate::before(&upstream).server(&format!("listen = \"{address}\"")).defaults(&cors).start();
    let profile = tempfile::tempdir().expect("a writable directory");
    let mut chromium = Command::new("chromium");
    chromium.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"]);
    chromium.args([
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]);
    chromium.arg(format!("--user-data-dir={}", profile.path().display())).arg("--remote-debugging-port=0");
    chromium.arg(shop.url());
    let browser = Process::start(chromium, profile);
    let wait = |what: &str, path: &str| {
        let start = Instant::now();
        loop {
            if let Some(request) = shop.seen().into_iter().find(|request| target(request) == path) {
                return request;
            }
            assert!(start.elapsed() < BROWSER, "{what}: never\n{}\n{}", browser.log(), gate.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    wait("one of two payments is told to wait", "/waiting");
    signal.open();
    let result = wait("both payments end", "/result");
    let paid: Value = serde_json::from_slice(&result.body.bytes).expect("JSON");
    let mut words: Vec<&str> =
        paid.as_array().expect("two payments").iter().filter_map(|one| one["status"].as_str()).collect();
    words.sort_unstable();
    assert_eq!(words, ["executed", "replayed"], "{paid}");
    assert_eq!((&paid[0]["body"], &paid[0]["code"]), (&paid[1]["body"], &paid[1]["code"]), "{paid}");
    let waited = paid
        .as_array()
        .expect("two")
        .iter()
        .filter(|one| one["waits"].as_array().is_some_and(|waits| !waits.is_empty()));
    assert_eq!(waited.count(), 1, "{paid}");
    eventually("it is kept", || (gate.states("k-1") == ["completed"]).then_some(()));
    assert_eq!(upstream.runs_of("k-1"), 1);
}
