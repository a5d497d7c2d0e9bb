//! Paths that can be read in two ways: what is matched is what is forwarded, and no spelling gets around protection.

use crate::support::{Gate, Plan, Reply, Request, Upstream};

/// Protected charges, and everything else forwarded as it is: by a route, by none.
const ROUTES: &str = r#"
[[routes]]
name = "charges"
methods = ["POST"]
path = "/v1/charges"
key.required = true

[[routes]]
name = "capture"
methods = ["POST"]
path = "/v1/charges/{id}/capture"

[[routes]]
name = "public"
methods = ["POST"]
path = "/public/{*rest}"
mode = "pass"
"#;

fn upstream() -> Upstream {
    Upstream::start(|_| Reply::ok("x"))
}

fn plan(upstream: &Upstream) -> Plan {
    Gate::before(upstream).routes(ROUTES)
}

/// Paths that some server takes for a charge, and the gate for something that is not protected.
const DODGES: [&str; 46] = [
    "/v1//charges",
    "//v1/charges",
    "/v1/charges/",
    "/v1/charges//",
    "/v1/./charges",
    "/v1/x/../charges",
    "/../v1/charges",
    "/public/../v1/charges",
    "/public/%2e%2e/v1/charges",
    "/public/.%2E/v1/charges",
    "/public/%2e./v1/charges",
    "/public/..;/v1/charges",
    "/public/..;a=b/v1/charges",
    "/public/..%2Fv1%2Fcharges",
    "/public/..%2fv1/charges",
    "/public/..%5Cv1%5Ccharges",
    "/public/..\\v1\\charges",
    "/public/%252e%252e/v1/charges",
    "/public/..%252Fv1/charges",
    "/public/%c0%ae%c0%ae/v1/charges",
    "/v1/%63harges",
    "/v1/charge%73",
    "/%76%31/%63%68%61%72%67%65%73",
    "/v1%2Fcharges",
    "/v1%252fcharges",
    "/v1/charges;jsessionid=1",
    "/v1;x/charges",
    "/v1/charges%3Bx",
    "/v1/charges%3Fx=1",
    "/v1/charges%23x",
    "/v1/charges%00",
    "/v1/charges%0a",
    "/v1/charges%20",
    "/v1/charges%09",
    "/v1/charges.",
    "/v1./charges",
    "/public/..%20/v1/charges",
    "/v1/charges::$DATA",
    "/v1%e0%80%afcharges",
    "/v1%f0%80%80%afcharges",
    "/v1/%u0063harges",
    "/v1%U002fcharges",
    "/public/%u002e%u002e/v1/charges",
    "/V1/charges",
    "/v1/CHARGES",
    "/v1/Charges/",
];

#[test]
fn no_spelling_gets_around_protection() {
    let upstream = upstream();
    let gate = plan(&upstream).start();
    for path in DODGES {
        for (target, key) in [(path.to_owned(), true), (format!("{path}?a=b"), false)] {
            let request = Request::post(&target).body("amount=1");
            let request = if key { request.key("k") } else { request };
            let answer = request.send(&gate);
            assert_eq!(answer.status, 400, "{target}\n{}", answer.show());
            let problem = answer.json();
            assert_eq!(problem["code"], "bad-request", "{target}");
            let detail = problem["detail"].as_str().expect("a detail");
            assert!(detail.contains("read in two ways") && detail.contains("nothing was sent"), "{target}: {detail}");
            // By one of its readings a protected route would have used the key.
            assert_eq!(answer.word(), if key { "bad-request" } else { "" }, "{target}");
        }
    }
    assert_eq!(upstream.runs(), 0, "nothing of it was forwarded");
    assert!(gate.records("").is_empty());
    let refused = gate.metric("oncegate_requests_total", &["route=\"-\"", "outcome=\"bad-request\""]);
    assert_eq!(refused, 2.0 * DODGES.len() as f64);
}

/// A method that nothing protects is not the gate's concern, and neither is a path under which nothing is protected.
#[test]
fn where_nothing_is_protected_nothing_is_refused() {
    let upstream = upstream();
    let gate = plan(&upstream).start();
    for path in DODGES {
        assert_eq!(Request::get(path).send(&gate).status, 200, "{path}");
        assert_eq!(upstream.last().start_line(), format!("GET {path} HTTP/1.1"));
    }
    for path in
        ["/v2//charges", "/public//a/%2E/b;c%2Fd", "/public/x/..", "/Public/%41", "/v1/charges2/", "/V2/Charges"]
    {
        assert_eq!(Request::post(path).key("k").send(&gate).status, 200, "{path}");
        assert_eq!(upstream.last().start_line(), format!("POST {path} HTTP/1.1"));
    }
}

#[test]
fn a_protected_path_goes_on_byte_for_byte() {
    let upstream = upstream();
    let gate = plan(&upstream).start();
    for (nth, target) in [
        "/v1/charges",
        "/v1/charges?next=/../%2e%2e//;x\\&a=%zz",
        "/v1/charges/ch_1/capture",
        "/v1/charges/Ch%201;v=2/capture",
        "/v1/charges/a%40b.c~d/capture?",
        "/v1/charges/%e2%82%ac/capture",
    ]
    .into_iter()
    .enumerate()
    {
        let request = Request::post(target).key(&format!("k-{nth}")).body("{}");
        request.send(&gate).expect(200, "executed");
        assert_eq!(upstream.last().start_line(), format!("POST {target} HTTP/1.1"));
    }
    // Read otherwise, the charge is no other charge but another path.
    for path in ["/v1/charges/a%2Fb/capture", "/v1/charges/../capture", "/v1/charges/%2e%2e/capture"] {
        assert_eq!(Request::post(path).key("k").body("{}").send(&gate).status, 400, "{path}");
    }
    assert_eq!(upstream.runs(), 6);
}

/// What protects everything protects every spelling, and has no reason to refuse one.
#[test]
fn one_route_for_everything_refuses_no_path() {
    let upstream = upstream();
    let config = |routes: &str| Gate::before(&upstream).routes(routes).start();
    for (run, gate) in [config(""), config("[[routes]]\nname = \"all\"\npath = \"/{*rest}\"\n")].iter().enumerate() {
        for (nth, path) in DODGES.into_iter().enumerate() {
            let request = Request::post(path).key(&format!("k-{run}-{nth}")).body("{}");
            request.send(gate).expect(200, "executed");
            assert_eq!(upstream.last().start_line(), format!("POST {path} HTTP/1.1"));
            request.send(gate).expect(200, "replayed");
        }
    }
}

/// An exemption from a protected rest is what is written, and nothing that can be read otherwise.
#[test]
fn an_exemption_is_exact() {
    let routes = "[[routes]]\nname = \"rest\"\npath = \"/{*rest}\"\nkey.required = true\n\
                  [[routes]]\nname = \"hooks\"\npath = \"/hooks/{name}\"\nmode = \"pass\"\n";
    let upstream = upstream();
    let gate = Gate::before(&upstream).routes(routes).start();
    for path in ["/hooks/stripe", "/hooks/a%20b"] {
        assert_eq!(Request::post(path).body("{}").send(&gate).status, 200, "{path}");
    }
    assert_eq!(upstream.runs(), 2);
    for path in
        ["/hooks/..", "/hooks/..%2fcharges", "/hooks/%2e%2e", "/hooks/..;", "/hooks/a/../../charges", "/hooks/.."]
    {
        assert_eq!(Request::post(path).body("{}").send(&gate).status, 400, "{path}");
    }
    assert_eq!(upstream.runs(), 2);
}

/// The subtree of a route has its root in it: a collection is protected with its items.
#[test]
fn a_rest_protects_its_root() {
    let routes = "[[routes]]\nname = \"orders\"\npath = \"/v1/orders/{*rest}\"\n\
                  [[routes]]\nname = \"refunds\"\npath = \"/v1/refunds/{*rest}\"\n\
                  [[routes]]\nname = \"refund\"\npath = \"/v1/refunds\"\nmode = \"pass\"\n";
    let upstream = upstream();
    let gate = Gate::before(&upstream).routes(routes).start();
    for (nth, path) in ["/v1/orders", "/v1/orders/", "/v1/orders/7/lines", "/v1/refunds/7"].into_iter().enumerate() {
        let request = Request::post(path).key(&format!("k-{nth}")).body("{}");
        request.send(&gate).expect(200, "executed");
        assert_eq!(upstream.last().start_line(), format!("POST {path} HTTP/1.1"));
        request.send(&gate).expect(200, "replayed");
    }
    assert_eq!(upstream.runs(), 4);
    // The more specific path of two, and not its neighbours.
    let passed = Request::post("/v1/refunds").key("k").body("{}").send(&gate);
    assert_eq!((passed.status, upstream.runs()), (200, 5));
    assert_eq!(Request::post("/v1/refunds/").key("k").body("{}").send(&gate).status, 400);
    assert_eq!(upstream.runs(), 5);
}
