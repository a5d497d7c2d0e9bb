//! Scripts of another origin: what they may read of the gate's own answers, by the headers that browsers go by (the Fetch
//! standard, 3.3).

use crate::support::http2::{Http2, post};
use crate::support::{Gate, Reply, Request, Response, Signal, Upstream};

const SHOP: &str = "https://shop.example";
const EXPOSED: &str = "idempotency-status, idempotent-replayed, idempotency-expires, retry-after";

fn request(key: &str, origin: &str) -> Request {
    Request::post("/orders").key(key).header("Origin", origin).body("{}")
}

/// The headers about origins, as lines.
fn lines(response: &Response) -> Vec<String> {
    let is_about = |name: &str| name.starts_with("access-control-") || name == "vary";
    let line = |(name, value): &(Vec<u8>, Vec<u8>)| {
        let name = String::from_utf8_lossy(name).to_ascii_lowercase();
        is_about(&name).then(|| format!("{name}: {}", String::from_utf8_lossy(value)))
    };
    response.head.fields.iter().filter_map(line).collect()
}

#[test]
fn problems_can_be_read_by_scripts_of_the_origins_that_are_named() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let cors = "cors = { origins = [\"https://other.example\", \"https://shop.example\"], credentials = true }";
    let gate = Gate::before(&upstream).defaults(cors).start();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| request("k-1", SHOP).send(&gate));
        upstream.wait_for_runs(1);
        let second = request("k-1", SHOP).send(&gate);
        second.expect_problem(409, "in-flight");
        let exposed = format!("access-control-expose-headers: {EXPOSED}");
        let allowed = format!("access-control-allow-origin: {SHOP}");
        let shared = ["vary: origin", &allowed, "access-control-allow-credentials: true", &exposed];
        assert_eq!(lines(&second), shared);
        for origin in ["https://evil.example", "https://shop.example.evil.example", "null", "HTTPS://shop.example"] {
            let other = request("k-1", origin).send(&gate);
            assert_eq!(lines(&other.expect_problem(409, "in-flight").clone()), ["vary: origin"], "{origin}");
        }
        let plain = Request::post("/orders").key("k-1").body("{}").send(&gate);
        assert_eq!(lines(plain.expect_problem(409, "in-flight")), ["vary: origin"]);
        signal.open();
        // What the upstream says nothing of is not shared by the gate.
        let first = first.join().expect("an answer");
        assert!(lines(first.expect(200, "executed")).is_empty(), "{}", first.show());
    });
}

#[test]
fn answers_keep_what_the_upstream_says_and_expose_the_gates_headers_too() {
    let upstream = Upstream::start(|_| {
        Reply::raw(
            "HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: https://shop.example\r\nVary: Origin\r\n\
             Access-Control-Expose-Headers: X-Total\r\nContent-Length: 1\r\n\r\nx",
        )
    });
    let gate = Gate::before(&upstream).defaults("cors.origins = [\"https://shop.example\"]").start();
    let first = request("k-1", SHOP).send(&gate);
    let exposed = [b"X-Total".to_vec(), EXPOSED.as_bytes().to_vec()];
    first.expect(200, "executed");
    assert_eq!(first.head.all("access-control-expose-headers"), exposed);
    assert_eq!(first.head.all("access-control-allow-origin"), [SHOP.as_bytes()]);
    let replay = request("k-1", SHOP).send(&gate);
    replay.expect(200, "replayed");
    first.expect_repeated_by(&replay);
    // Without a script nothing is exposed, and what is not protected is as the upstream made it.
    let plain = Request::post("/orders").key("k-1").body("{}").send(&gate);
    assert_eq!(plain.head.all("access-control-expose-headers"), [b"X-Total"]);
    let passed = Request::post("/orders").header("Origin", SHOP).body("{}").send(&gate);
    assert_eq!(passed.head.all("access-control-expose-headers"), [b"X-Total"]);
    let preflight = Request::new("OPTIONS", "/orders").header("Origin", SHOP).send(&gate);
    assert_eq!(preflight.head.all("access-control-expose-headers"), [b"X-Total"]);
    assert_eq!(upstream.runs(), 3);
}

#[test]
fn any_origin_is_told_as_any_and_no_route_shares_unasked() {
    let address = Upstream::free_address();
    let gate = Gate::before_url(&format!("http://{address}")).defaults("cors.origins = [\"*\"]").start();
    let response = request("k-1", SHOP).send(&gate);
    response.expect_problem(502, "upstream-unreachable");
    let exposed = format!("access-control-expose-headers: {EXPOSED}");
    assert_eq!(lines(&response), ["access-control-allow-origin: *", &exposed]);
    let keyless = Request::post("/orders").header("Origin", SHOP).body("{}").send(&gate);
    assert_eq!(lines(keyless.expect_bare_problem(502, "upstream-unreachable")).len(), 2, "{}", keyless.show());
    let gate = Gate::before_url(&format!("http://{address}")).start();
    let response = request("k-1", SHOP).send(&gate);
    assert!(lines(response.expect_problem(502, "upstream-unreachable")).is_empty());
}

#[test]
fn a_refusal_is_shared_where_its_route_is_known() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let routes = format!(
        "[[routes]]\nname = \"orders\"\nmethods = [\"POST\"]\npath = \"/orders\"\nupstream = \"app\"\n\
         cors.origins = [\"{SHOP}\"]\n\
         [[routes]]\nname = \"open\"\nmethods = [\"POST\"]\npath = \"/open/{{*rest}}\"\nmode = \"pass\"\n\
         upstream = \"app\"\ncors.origins = [\"https://open.example\"]\n[upstreams.other]\nurl = \"{}\"\n",
        upstream.url()
    );
    let gate = Gate::before(&upstream).routes(&routes).start();
    let send = |path: &str, origin: &str| Request::post(path).header("Origin", origin).body("{}").send(&gate);
    let exposed = format!("access-control-expose-headers: {EXPOSED}");
    // It has no route as it stands, and has one, and could be of another.
    for (path, origin) in [("/orders/", SHOP), ("/open/../orders", "https://open.example")] {
        let ambiguous = send(path, origin);
        let allowed = format!("access-control-allow-origin: {origin}");
        let shared = ["vary: origin".to_owned(), allowed, exposed.clone()];
        assert_eq!(lines(ambiguous.expect_bare_problem(400, "bad-request")), shared, "{path}");
        let other = send(path, "https://evil.example");
        assert_eq!(lines(other.expect_bare_problem(400, "bad-request")), ["vary: origin"], "{path}");
    }
    // No route, and no request.
    assert!(lines(send("/elsewhere", SHOP).expect_bare_problem(404, "no-route")).is_empty());
    let unsound = Request::post("/orders").header("Origin", SHOP).header("Expect", "more").body("{}").send(&gate);
    assert!(lines(unsound.expect_bare_problem(417, "expectation-failed")).is_empty());
    let unsound = post("/orders").header("origin", SHOP).header("expect", "more").body("{}").unwrap();
    let answer = Http2::connect(&gate).send(unsound);
    assert_eq!((answer.status, answer.get("access-control-allow-origin")), (417, ""));
    assert_eq!(upstream.runs(), 0);
}

fn preflight(path: &str, origin: &str, method: &str, headers: &str) -> Request {
    Request::new("OPTIONS", path)
        .header("Origin", origin)
        .header("Access-Control-Request-Method", method)
        .header("Access-Control-Request-Headers", headers)
}

const PREFLIGHT: &str = "cors = { origins = [\"https://shop.example\"], credentials = true, preflight = true }";

#[test]
fn a_preflight_that_the_upstream_allows_allows_the_key_too() {
    let upstream = Upstream::start(|request| match request.start_line().split(' ').next().unwrap() {
        "OPTIONS" => Reply::raw(
            "HTTP/1.1 204 No Content\r\nAccess-Control-Allow-Origin: https://shop.example\r\n\
             Access-Control-Allow-Headers: Content-Type\r\nAccess-Control-Allow-Methods: POST\r\n\r\n",
        ),
        _ => Reply::ok("x"),
    });
    let gate = Gate::before(&upstream).defaults(PREFLIGHT).start();
    let allowed = |request: Request| {
        let response = request.send(&gate);
        assert_eq!(response.status, 204, "{}", response.show());
        response
            .head
            .all("access-control-allow-headers")
            .into_iter()
            .map(|line| String::from_utf8_lossy(line).into_owned())
            .collect::<Vec<_>>()
    };
    let asked = "content-type,idempotency-key";
    assert_eq!(allowed(preflight("/orders", SHOP, "POST", asked)), ["Content-Type", "idempotency-key"]);
    // Nothing is allowed that was not asked for, to nobody else, and for nothing that the route does not take.
    assert_eq!(allowed(preflight("/orders", SHOP, "POST", "content-type")), ["Content-Type"]);
    assert_eq!(allowed(preflight("/orders", "https://evil.example", "POST", asked)), ["Content-Type"]);
    assert_eq!(allowed(preflight("/orders", SHOP, "PUT", asked)), ["Content-Type"]);
    assert_eq!(allowed(Request::new("OPTIONS", "/orders").header("Origin", SHOP)), ["Content-Type"]);
    let gate = Gate::before(&upstream).defaults("cors.origins = [\"https://shop.example\"]").start();
    let plain = preflight("/orders", SHOP, "POST", asked).send(&gate);
    assert_eq!(plain.head.all("access-control-allow-headers"), [b"Content-Type"]);
}

#[test]
fn an_upstream_that_knows_nothing_of_origins_works_from_a_browser() {
    for status in ["404 Not Found", "405 Method Not Allowed", "401 Unauthorized", "501 Not Implemented", "200 OK"] {
        let upstream = Upstream::start(move |request| match request.start_line().split(' ').next().unwrap() {
            "OPTIONS" => Reply::status(status, "what?"),
            _ => Reply::ok("x"),
        });
        let gate = Gate::before(&upstream).defaults(PREFLIGHT).start();
        let allowed = preflight("/orders", SHOP, "POST", "content-type,idempotency-key").send(&gate);
        assert_eq!(allowed.status, if status == "200 OK" { 200 } else { 204 }, "{}", allowed.show());
        let shared = [
            "vary: origin",
            "access-control-allow-origin: https://shop.example",
            "access-control-allow-credentials: true",
            "access-control-allow-methods: POST",
            "access-control-allow-headers: content-type,idempotency-key",
            "access-control-max-age: 7200",
        ];
        let mut found = lines(&allowed);
        found.sort();
        let mut expected = shared.map(str::to_owned).to_vec();
        expected.sort();
        assert_eq!(found, expected);
        for (path, origin, method) in
            [("/orders", "https://evil.example", "POST"), ("/orders", SHOP, "DELETE"), ("/orders", "null", "POST")]
        {
            let refused = preflight(path, origin, method, "idempotency-key").send(&gate);
            assert!(status.starts_with(&refused.status.to_string()), "{}", refused.show());
            assert!(lines(&refused).is_empty(), "{origin} {method}: {}", refused.show());
        }
        let first = request("k-1", SHOP).send(&gate);
        first.expect(200, "executed");
        assert_eq!(first.head.all("access-control-allow-origin"), [SHOP.as_bytes()]);
        assert_eq!(first.head.all("access-control-expose-headers"), [EXPOSED.as_bytes()]);
        let replay = request("k-1", SHOP).send(&gate);
        replay.expect(200, "replayed");
        first.expect_repeated_by(&replay);
        // Another origin gets the answer without leave to read it, also of the same record.
        let other = request("k-1", "https://evil.example").send(&gate);
        assert_eq!(lines(other.expect(200, "replayed")), ["vary: origin"]);
    }
}

#[test]
fn what_an_upstream_says_of_cookies_to_everybody_is_not_passed_on() {
    let stray = "HTTP/1.1 200 OK\r\nAccess-Control-Allow-Credentials: true\r\nAccess-Control-Expose-Headers: X-Total\r\n\
                 Content-Length: 1\r\n\r\nx";
    let upstream = Upstream::start(move |_| Reply::raw(stray));
    let cors = "cors = { origins = [\"https://shop.example\", \"https://desk.example\"], preflight = true }";
    let gate = Gate::before(&upstream).defaults(cors).start();
    let asked = preflight("/orders", SHOP, "POST", "idempotency-key").send(&gate);
    let first = request("k-1", SHOP).send(&gate);
    for response in [&asked, first.expect(200, "executed")] {
        assert_eq!(response.head.all("access-control-allow-origin"), [SHOP.as_bytes()], "{}", response.show());
        assert_eq!(response.head.all("access-control-allow-credentials"), [b""; 0]);
    }
    assert_eq!(first.head.all("access-control-expose-headers"), [b"X-Total".as_slice(), EXPOSED.as_bytes()]);
    let any = "cors = { origins = [\"*\"], preflight = true }";
    let gate = Gate::before(&upstream).defaults(any).start();
    let unasked = Request::post("/orders").key("k-1").body("{}").send(&gate);
    assert_eq!(unasked.expect(200, "executed").head.all("access-control-allow-origin"), [b"*"]);
}

#[test]
fn a_replay_is_shared_with_each_origin_that_is_named() {
    let upstream = Upstream::start(|_| {
        Reply::raw("HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: https://shop.example\r\nContent-Length: 1\r\n\r\nx")
    });
    let cors = "cors = { origins = [\"https://shop.example\", \"https://desk.example\"], preflight = true }";
    let gate = Gate::before(&upstream).defaults(cors).start();
    request("k-1", SHOP).send(&gate).expect(200, "executed");
    let replay = request("k-1", "https://desk.example").send(&gate);
    assert_eq!(replay.expect(200, "replayed").head.all("access-control-allow-origin"), [b"https://desk.example"]);
    let other = request("k-1", "https://evil.example").send(&gate);
    assert_eq!(other.expect(200, "replayed").head.all("access-control-allow-origin"), [SHOP.as_bytes()]);
}

/// Without it, no browser sends a request that would be accepted, and no script hears what went wrong with another.
#[test]
fn an_upstream_that_is_away_does_not_keep_scripts_from_asking() {
    let away = format!("http://{}", Upstream::free_address());
    for mode in ["accept", "protect"] {
        let gate = Gate::before_url(&away).defaults(&format!("{PREFLIGHT}\nmode = \"{mode}\"")).start();
        let asked = preflight("/orders", SHOP, "POST", "idempotency-key").send(&gate);
        assert_eq!(asked.status, 204, "{}", asked.show());
        assert_eq!(asked.head.all("access-control-allow-origin"), [SHOP.as_bytes()]);
        assert_eq!(asked.head.all("access-control-allow-headers"), [b"idempotency-key"]);
        assert!(asked.head.all("access-control-max-age").is_empty(), "it is asked again once the upstream is back");
        let evil = preflight("/orders", "https://evil.example", "POST", "idempotency-key").send(&gate);
        evil.expect_bare_problem(502, "upstream-unreachable");
        let (status, word) = if mode == "accept" { (202, "accepted") } else { (502, "upstream-unreachable") };
        let sent = request("k-1", SHOP).send(&gate);
        assert_eq!((sent.status, sent.word().as_str()), (status, word));
        assert_eq!(sent.head.all("access-control-allow-origin"), [SHOP.as_bytes()]);
    }
}

#[test]
fn scripts_read_how_much_of_a_quota_is_left() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let quota = "quota = { new_keys = 1, per = \"1h\" }";
    let gate = Gate::before(&upstream).defaults(&format!("{PREFLIGHT}\n{quota}")).start();
    request("k-1", SHOP).send(&gate).expect(200, "executed");
    let refused = request("k-2", SHOP).send(&gate);
    let exposed = refused.expect_problem(429, "quota-exceeded").head.all("access-control-expose-headers");
    assert_eq!(exposed, [EXPOSED.as_bytes(), b"ratelimit", b"ratelimit-policy"]);
}

/// It has no route of its own: its path may be that of a service, and the upstream for the rest may be another.
#[test]
fn a_preflight_goes_where_the_request_that_it_announces_would() {
    let upstream = Upstream::start(|_| Reply::ok("the rest"));
    let other = Upstream::start(|_| Reply::ok("orders"));
    let plan = Gate::before(&upstream).routes(&format!(
        "[upstreams.orders]\nurl = \"{}\"\n[[routes]]\nname = \"orders\"\nmethods = [\"POST\"]\npath = \"/orders\"\n\
         upstream = \"orders\"\n",
        other.url()
    ));
    let gate = plan.top("default_upstream = \"app\"").start();
    let asked = |path: &str, method: &str| preflight(path, SHOP, method, "idempotency-key").send(&gate).text();
    assert_eq!(asked("/orders", "POST"), "orders");
    assert_eq!((asked("/orders", "GET"), asked("/other", "POST")), ("the rest".to_owned(), "the rest".to_owned()));
    assert_eq!(Request::new("OPTIONS", "/orders").header("Origin", SHOP).send(&gate).text(), "the rest");
}

#[test]
fn a_preflight_is_completed_where_a_route_takes_it_too() {
    let upstream = Upstream::start(|_| Reply::status("404 Not Found", "what?"));
    let routes = "[[routes]]\nname = \"orders\"\nmethods = [\"POST\"]\npath = \"/orders\"\n\
                  cors = { origins = [\"https://shop.example\"], preflight = true }\n\
                  [[routes]]\nname = \"rest\"\nmethods = [\"OPTIONS\", \"GET\"]\npath = \"/{*rest}\"\nmode = \"pass\"\n";
    let gate = Gate::before(&upstream).routes(routes).start();
    assert_eq!(preflight("/orders", SHOP, "POST", "idempotency-key").send(&gate).status, 204);
    assert_eq!(preflight("/other", SHOP, "POST", "idempotency-key").send(&gate).status, 404);
}
