//! The policy page: what clients may expect, on the gate's own listener.

use crate::support::{Gate, Plan, Reply, Request, Upstream};

const PATH: &str = "/.well-known/idempotency";

const ROUTES: &str = "[[routes]]\nname = \"inner-name\"\nmethods = [\"POST\"]\npath = \"/v1/charges/{id}\"\nhost = \"a.example\"\n\
                      ttl = \"2d\"\nscope = [\"header:X-Tenant\", \"const:hush\"]\nkey = { required = true, max_length = 64 }\n\
                      [[routes]]\nname = \"passed\"\nmethods = [\"POST\"]\npath = \"/passed\"\nmode = \"pass\"\n\
                      [[routes]]\nname = \"everything\"\nmethods = [\"POST\", \"GET\"]\npath = \"/{*rest}\"\n";

fn plan(upstream: &Upstream) -> Plan {
    Gate::before(upstream).routes(ROUTES).top(&format!("[policy_page]\npath = \"{PATH}\"\n"))
}

#[test]
fn without_a_path_there_is_no_page() {
    let upstream = Upstream::start(|_| Reply::ok("the upstream's"));
    let gate = Gate::before(&upstream).routes(ROUTES).start();
    assert_eq!(Request::get(PATH).send(&gate).text(), "the upstream's");
}

#[test]
fn only_get_and_head_have_an_answer() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = plan(&upstream).start();
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        let answer = Request::new(method, PATH).key("k").header("Content-Length", "0").send(&gate);
        assert_eq!((answer.status, answer.get("allow").as_deref()), (405, Some("GET, HEAD")), "{}", answer.show());
        assert_eq!(answer.json()["detail"], "this path takes GET and HEAD");
        assert_eq!(answer.word(), "", "{}", answer.show());
    }
    let answer = Request::new("HEAD", PATH).send(&gate);
    let whole = Request::get(PATH).send(&gate);
    assert_eq!((answer.status, answer.text().len()), (200, 0), "{}", answer.show());
    assert_eq!(answer.get("content-length"), Some(whole.text().len().to_string()));
    assert_eq!(answer.get("etag"), whole.get("etag"));
    assert_eq!(upstream.runs(), 0);
}

#[test]
fn the_page_has_what_clients_need_and_nothing_else() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = plan(&upstream).start();
    let answer = Request::get(&format!("{PATH}?x=1")).key("k").header("Accept", "*/*").send(&gate);
    assert_eq!((answer.status, answer.get("content-type").as_deref()), (200, Some("application/json")));
    for (name, value) in [("set-cookie", None), ("idempotency-status", None), ("vary", Some("accept"))] {
        assert_eq!(answer.get(name).as_deref(), value, "{}", answer.show());
    }
    assert!(answer.get("cache-control").is_some() && answer.get("etag").is_some(), "{}", answer.show());
    let page = answer.json();
    let route = &page["routes"][0];
    assert_eq!(page["routes"].as_array().unwrap().len(), 2, "{page:#}");
    assert_eq!((&route["path"], &route["host"]), (&"/v1/charges/{id}".into(), &"a.example".into()));
    assert_eq!((&route["ttl_seconds"], &route["key"]["max_length"]), (&172_800.0.into(), &64.into()));
    assert_eq!(route["scope"], serde_json::json!(["header:x-tenant", "const"]));
    let codes: Vec<&str> =
        route["problems"].as_array().unwrap().iter().filter_map(|problem| problem["code"].as_str()).collect();
    assert!(codes.contains(&"key-missing") && codes.contains(&"scope-missing"), "{codes:?}");
    assert!(!codes.contains(&"caller-differs") && !codes.contains(&"no-route"), "{codes:?}");
    let address = upstream.url();
    for text in [answer.text(), Request::get(PATH).header("Accept", "text/html").send(&gate).text()] {
        assert!(!text.contains("hush") && !text.contains("inner-name"), "{text}");
        assert!(!text.contains(address.trim_start_matches("http://")), "{text}");
    }
    assert_eq!(upstream.runs(), 0);
    assert_eq!(gate.metric("oncegate_requests_total", &[]), 0.0, "no proxied request");
}

#[test]
fn a_browser_gets_html_without_a_script() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = plan(&upstream).start();
    let accept = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    let answer = Request::get(PATH).header("Accept", accept).send(&gate);
    assert_eq!(answer.get("content-type").as_deref(), Some("text/html; charset=utf-8"), "{}", answer.show());
    let policy = answer.get("content-security-policy").unwrap_or_default();
    assert!(policy.starts_with("default-src 'none'; style-src 'sha256-"), "{policy}");
    assert!(!answer.text().contains("<script"), "{}", answer.text());
    let etag = answer.get("etag").unwrap_or_default();
    let again = Request::get(PATH).header("Accept", accept).header("If-None-Match", &etag).send(&gate);
    assert_eq!((again.status, again.text().len()), (304, 0), "{}", again.show());
    let other = Request::get(PATH).header("If-None-Match", &etag).send(&gate);
    assert_eq!(other.status, 200, "JSON is another form: {}", other.show());
}

#[test]
fn a_reload_changes_the_page() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = plan(&upstream).start();
    let ttl = || Request::get(PATH).send(&gate).json()["routes"][0]["ttl_seconds"].as_f64();
    assert_eq!(ttl(), Some(172_800.0));
    let file = gate.plan.config();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("ttl = \"2d\"", "ttl = \"3d\"")).unwrap();
    gate.sighup();
    crate::support::eventually("the page of the new file", || ttl().filter(|ttl| *ttl == 259_200.0));
}
