//! The files of the admin page at the wire. `tests/page/run` uses the page in a browser.

use crate::support::{Gate, Plan, Reply, Request, Response, Upstream};

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

fn plan(upstream: &Upstream) -> Plan {
    Gate::before(upstream)
}

fn get(gate: &Gate, path: &str) -> Response {
    Request::get(path).header("Host", "127.0.0.1").send(gate.admin)
}

/// Every file that a page names: in an attribute, or in an import of a script.
fn named(text: &str) -> Vec<String> {
    text.split('"').filter(|part| part.starts_with("/page/")).map(str::to_owned).collect()
}

#[test]
fn the_page_and_all_that_it_loads_are_there() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = plan(&upstream).start();
    let (mut files, mut next) = (vec!["/".to_owned()], 0);
    while let Some(path) = files.get(next).cloned() {
        next += 1;
        let answer = get(&gate, &path);
        assert_eq!(answer.status, 200, "{path}: {}", answer.show());
        let expected = match path.rsplit_once('.') {
            None => "text/html; charset=utf-8",
            Some((_, "js")) => "text/javascript; charset=utf-8",
            Some((_, "css")) => "text/css; charset=utf-8",
            Some(_) => "image/svg+xml",
        };
        for (name, value) in [
            ("content-type", expected),
            ("content-security-policy", POLICY),
            ("x-content-type-options", "nosniff"),
            ("x-frame-options", "DENY"),
            ("cross-origin-resource-policy", "same-origin"),
            ("referrer-policy", "no-referrer"),
            ("cache-control", "no-cache"),
        ] {
            assert_eq!(answer.head.all(name), [value.as_bytes()], "{path}: {name}");
        }
        assert!(!answer.head.has("set-cookie") && !answer.head.has("access-control-allow-origin"), "{}", answer.show());
        for file in named(&answer.text()) {
            if !files.contains(&file) {
                files.push(file);
            }
        }
    }
    assert_eq!(files.len(), 12, "{files:?}");
}

#[test]
fn a_file_that_the_browser_has_is_not_sent_again() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = plan(&upstream).start();
    let first = get(&gate, "/page/main.js");
    let tag = first.get("etag").expect("a tag");
    let again =
        Request::get("/page/main.js").header("Host", "127.0.0.1").header("If-None-Match", &tag).send(gate.admin);
    assert_eq!((again.status, again.text().len()), (304, 0), "{}", again.show());
    assert_eq!(again.get("etag"), Some(tag));
    assert_eq!(again.get("content-security-policy").as_deref(), Some(POLICY));
    let head = Request::new("HEAD", "/").header("Host", "127.0.0.1").send(gate.admin);
    assert_eq!((head.status, head.text().len()), (200, 0), "{}", head.show());
    assert_eq!(head.get("content-length"), Some(get(&gate, "/").body.bytes.len().to_string()));
}

#[test]
fn it_is_only_read() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = plan(&upstream).start();
    for path in ["/", "/page/main.js"] {
        for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
            let request = Request::new(method, path).header("Host", "127.0.0.1").header("Content-Length", "0");
            let answer = request.send(gate.admin);
            assert_eq!((answer.status, answer.get("allow").as_deref()), (405, Some("GET, HEAD")), "{}", answer.show());
        }
    }
    assert_eq!(get(&gate, "/?from=a-bookmark").status, 200);
    for path in ["/index.html", "/page", "/page/", "/page/other.js", "/page/../page/main.js", "//"] {
        assert_eq!(get(&gate, path).status, 404, "{path}");
    }
}

/// The page asks for a token itself. Without one it has no data, whatever the name it was loaded from.
#[test]
fn it_needs_no_token_and_what_it_asks_for_does() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = plan(&upstream);
    let token = plan.path("token");
    std::fs::write(&token, "0123456789abcdef0123456789abcdef").expect("a token");
    std::fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("its owner's");
    let gate = plan.admin(&format!("token_file = \"{}\"", token.display())).start();
    let page = Request::get("/").header("Host", "oncegate.internal").send(gate.admin);
    assert_eq!(page.status, 200, "{}", page.show());
    for path in ["/api/v1/stats", "/api/v1/records", "/api/v1/routes", "/api/v1/audit"] {
        assert_eq!(get(&gate, path).status, 401, "{path}");
    }
}
