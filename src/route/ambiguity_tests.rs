use proptest::prelude::*;

use super::reference::{self, Reading};
use super::tests::{any_route, route as routed};
use super::*;
use crate::idempotency::policy::Mode;

fn router(routes: &[(&str, Mode)]) -> Router {
    let routes = routes.iter().map(|(path, mode)| {
        let mut route = routed(path, &[Method::POST], None, path);
        route.policy.mode = *mode;
        route
    });
    Router::new(routes.collect()).unwrap()
}

/// The route that a path is given, or in which way it can be read otherwise.
fn chosen(router: &Router, path: &str) -> Result<Option<String>, Ambiguity> {
    let route = router.choose(&Method::POST, Some("a.example"), path).map_err(|ambiguous| ambiguous.kind)?;
    Ok(route.map(|route| route.name.to_string()))
}

const CHARGES: [(&str, Mode); 3] =
    [("/v1/charges", Mode::Protect), ("/v1/charges/{id}", Mode::Protect), ("/public/{*rest}", Mode::Pass)];

/// The detail of the problem names what of this path has two readings, and nothing else.
#[test]
fn a_refusal_names_its_reason() {
    let router = router(&CHARGES);
    for (path, reason) in [
        ("/v1/%63harges", "by percent-encoding"),
        ("/v1//charges", "by an empty segment"),
        ("//a.example/v1/charges", "by a host after two slashes"),
        ("/v1/./charges", "by a dot segment"),
        ("/v1/charges;x", "by a parameter after `;`"),
        ("/v1\\charges", "by a backslash"),
        ("/v1/charges.", "by dots or spaces at an end"),
        ("/v1/charges%00", "by percent-encoding and a byte that ends the path"),
        ("/public/..;/v1/charges", "by a parameter after `;` and a dot segment"),
        ("/v1/charge%C5%BF", "by percent-encoding and letters beyond ASCII"),
        ("/v1/charges/", "the slash at the end may or may not count"),
        ("/v1/Charges", "letters in upper and lower case may or may not be the same"),
    ] {
        let said = router.choose(&Method::POST, None, path).unwrap_err().to_string();
        let expected = format!("the path can be read in two ways ({reason}), and different");
        assert!(said.starts_with(&expected), "{path}: {said}");
    }
}

#[test]
fn no_spelling_dodges_a_protected_route() {
    let router = router(&CHARGES);
    for path in [
        "/v1//charges",
        "//v1/charges",
        "//a.example/v1/charges",
        "///a.example/v1/charges",
        "/\\//a.example/v1/charges",
        "/x/..///a.example/v1/charges",
        "/\\a.example/v1/charges",
        "//a.example:80\\v1/charges",
        "/v1/./charges",
        "/./v1/charges",
        "/v1/x/../charges",
        "/../v1/charges",
        "/v1/%63harges",
        "/v1/charge%73",
        "/v1%2Fcharges",
        "/v1%2fcharges",
        "/%76%31/%63harges",
        "/v1/%2563harges",
        "/v1/%252563harges",
        "/v1%252Fcharges",
        "/v1/charges;x",
        "/v1;a=b/charges",
        "/v1/charges%3Bx",
        "/v1/charges%3Fx",
        "/v1/charges%23x",
        "/v1/charges%00",
        "/v1/charges%00.png",
        "/v1/charges%0a",
        "/v1/charges%0D%0A",
        "/v1/charges%20",
        "/v1/charges%09",
        "/v1/charges%7f",
        "/v1/charges%c2%85",
        "/v1/charges%C2%A0%20",
        "/v1/charges%ef%bb%bf",
        "/v1/charges%a0",
        "/v1%e3%80%80/charges",
        "/v1/charges%20%20/",
        "/v1%20/charges",
        "/v1/charges.",
        "/v1/charges...",
        "/v1./charges",
        "/v1/charges%2e",
        "/v1/charges.%20.",
        "/v1/charges.%0a",
        "/v1/.../charges",
        "/public/..%20/v1/charges",
        "/public/..%20%20/v1/charges",
        "/v1/charges::$DATA",
        "/v1/charges::$data",
        "/v1/charges%3a%3a%24DATA",
        "/v1:$i30:$INDEX_ALLOCATION/charges",
        "/v1/charges.::$DATA",
        "/v1/charges::$DATA.",
        "/v1%e0%80%afcharges",
        "/v1%f0%80%80%afcharges",
        "/v1%f8%80%80%80%afcharges",
        "/v1%fc%80%80%80%80%afcharges",
        "/public/%e0%80%ae%e0%80%ae/v1/charges",
        "/v1/%e0%81%a3harges",
        "/v1/%u0063harges",
        "/v1/%U0063harges",
        "/v1%u002fcharges",
        "/v1/%uff43harges",
        "/v1%uff0fcharges",
        "/v1/%25u0063harges",
        "/v1/%u00%363harges",
        "/v1/charge%u017f",
        "/v1\\charges",
        "/v1%5Ccharges",
        "/public/../v1/charges",
        "/public/%2e%2e/v1/charges",
        "/public/.%2E/v1/charges",
        "/public/..;/v1/charges",
        "/public/..;x=y/v1/charges",
        "/public/%2e%2e;/v1/charges",
        "/public/..%2Fv1%2Fcharges",
        "/public/..%5cv1%5ccharges",
        "/public/%252e%252e/v1/charges",
        "/public/..%252fv1/charges",
        "/public/a/../../v1/charges",
        "/public//../../v1/charges",
        "/public/..%2F/v1/charges",
        "/x%2Fy/../v1%2Fcharges",
        "/v1/%c0%ae/charges",
        "/public/%c0%ae%c0%ae/v1/charges",
        "/v1/charge%C5%BF",
        "/v1/%EF%BD%83harges",
        "/v1/%43HARGES",
        "/v1//charges/",
        "/public/%2e%2e/v1/Charges/",
        "/v1/charges/..",
        "/v1/charges/a%2Fb",
        "/v1/charges/%2e%2e",
        "/v1/%25252525252563harges",
    ] {
        assert!(chosen(&router, path).is_err(), "{path}");
    }
    for path in ["/V1/charges", "/v1/CHARGES", "/v1/Charges/", "/V1/charges/7"] {
        assert_eq!(chosen(&router, path), Err(Ambiguity::Case), "{path}");
    }
    for path in ["/v1/charges/", "/v1/charges/7/"] {
        assert_eq!(chosen(&router, path), Err(Ambiguity::TrailingSlash), "{path}");
    }
}

/// Methods have a case (RFC 9110, 9.1), and some servers do not mind it.
#[test]
fn no_case_of_a_method_dodges_a_protected_route() {
    let router = router(&CHARGES);
    let everything = self::router(&[("/{*rest}", Mode::Protect)]);
    let chosen = |router: &Router, method: &str, path: &str| {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        router.choose(&method, None, path).map(|route| route.is_some()).map_err(|ambiguous| ambiguous.kind)
    };
    for method in ["post", "Post", "pOST"] {
        for path in ["/v1/charges", "/v1/charges/7"] {
            assert_eq!(chosen(&router, method, path), Err(Ambiguity::Method), "{method} {path}");
        }
        assert_eq!(chosen(&router, method, "/v1//charges"), Err(Ambiguity::Normalization), "{method}");
        assert_eq!(chosen(&router, method, "/v1/refunds"), Ok(false), "{method}");
        assert_eq!(chosen(&everything, method, "/v1/refunds"), Err(Ambiguity::Method), "{method}");
    }
    assert_eq!(chosen(&everything, "get", "/v1/refunds"), Ok(false));
    assert_eq!(chosen(&everything, "PoST-LIKE", "/v1/refunds"), Ok(false));
}

#[test]
fn paths_that_mean_one_thing_are_let_alone() {
    let router = router(&CHARGES);
    for (path, expected) in [
        ("/v1/charges", Some("/v1/charges")),
        ("/v1/charges/7", Some("/v1/charges/{id}")),
        ("/v1/charges/Ch_7", Some("/v1/charges/{id}")),
        ("/v1/charges/a%20b", Some("/v1/charges/{id}")),
        ("/v1/charges/a%40b;v=1", Some("/v1/charges/{id}")),
        ("/v1/charges/%E2%82%AC", Some("/v1/charges/{id}")),
        ("/v1/charges/..a", Some("/v1/charges/{id}")),
        ("/v1/charges/a.", Some("/v1/charges/{id}")),
        ("/v1/charges/a.b", Some("/v1/charges/{id}")),
        ("/v1/charges/a%20", Some("/v1/charges/{id}")),
        ("/v1/charges/a%0A", Some("/v1/charges/{id}")),
        ("/v1/charges/a::$DATA", Some("/v1/charges/{id}")),
        ("/v1/charges/$a:b", Some("/v1/charges/{id}")),
        ("/v1/charges/%u0061", Some("/v1/charges/{id}")),
        ("/v1/charges/%u00", Some("/v1/charges/{id}")),
        ("/v1/charges/%ud800", Some("/v1/charges/{id}")),
        ("/v1/charges/%E0%80%B7", Some("/v1/charges/{id}")),
        ("/v1/charges/%E0%82%AF", Some("/v1/charges/{id}")),
        ("/v1/.charges", None),
        ("/v1/charges:DATA", None),
        ("/v1/refunds", None),
        ("/V1/Refunds/", None),
        ("/v1/refunds//../x%2Fy;z", None),
        ("/public/a%20b", Some("/public/{*rest}")),
        ("/public//a/./b/..", Some("/public/{*rest}")),
        ("/public/", Some("/public/{*rest}")),
        ("/.well-known/x", None),
        ("/", None),
        ("*", None),
    ] {
        assert_eq!(chosen(&router, path), Ok(expected.map(str::to_owned)), "{path}");
    }
    // Another method, which nothing protects.
    assert!(router.choose(&Method::GET, None, "/v1//charges").unwrap().is_none());
}

#[test]
fn a_protected_rest_leaves_what_is_exempt_exempt() {
    let router = router(&[("/{*rest}", Mode::Protect), ("/hooks", Mode::Pass), ("/a/{x}", Mode::Pass)]);
    assert_eq!(chosen(&router, "/hooks"), Ok(Some("/hooks".to_owned())));
    assert_eq!(chosen(&router, "/a/b"), Ok(Some("/a/{x}".to_owned())));
    assert_eq!(chosen(&router, "/a/b%20c"), Ok(Some("/a/{x}".to_owned())));
    assert_eq!(chosen(&router, "/x//y/../%2e"), Ok(Some("/{*rest}".to_owned())));
    for path in ["/hooks/", "/HOOKS", "/a/..%2Fcharges", "/a/..", "/a/%2Fb"] {
        assert!(chosen(&router, path).is_err(), "{path}");
    }
}

#[test]
fn literals_of_a_route_are_intended() {
    let router = router(&[
        ("/a%2Fb", Mode::Protect),
        ("/c//d;v=1", Mode::Protect),
        ("/e", Mode::Pass),
        ("/e/", Mode::Protect),
        ("/F", Mode::Protect),
        ("/f", Mode::Pass),
        ("/g", Mode::Pass),
        ("/g.", Mode::Protect),
        ("/g%20", Mode::Protect),
        ("/g%0A", Mode::Protect),
        ("/g::$DATA", Mode::Protect),
        ("/g%E0%80%AF", Mode::Protect),
    ]);
    for path in
        ["/a%2Fb", "/c//d;v=1", "/e", "/e/", "/F", "/f", "/g", "/g.", "/g%20", "/g%0A", "/g::$DATA", "/g%E0%80%AF"]
    {
        assert_eq!(chosen(&router, path), Ok(Some(path.to_owned())), "{path}");
    }
}

#[test]
fn a_route_of_the_requests_host_is_not_reached_around_by_one_of_any() {
    for (of_host, of_any) in [("/a/", "/a"), ("/a", "/a/")] {
        let mut routes = [routed("host", &[Method::POST], Some("a.example"), of_host)].to_vec();
        routes.push(routed("any", &[Method::POST], None, of_any));
        routes[1].policy.mode = Mode::Pass;
        let router = Router::new(routes).unwrap();
        assert_eq!(chosen(&router, of_any), Err(Ambiguity::TrailingSlash));
        assert_eq!(chosen(&router, of_host), Ok(Some("host".to_owned())));
        let elsewhere = router.choose(&Method::POST, Some("b.example"), of_any).unwrap();
        assert_eq!(&*elsewhere.unwrap().name, "any");
    }
}

#[test]
fn a_rest_that_may_be_empty_is_not_reached_around() {
    let router = router(&[("/a", Mode::Protect), ("/a/{*rest}", Mode::Pass), ("/b/{*rest}", Mode::Protect)]);
    assert_eq!(chosen(&router, "/a/"), Err(Ambiguity::TrailingSlash));
    assert_eq!(chosen(&router, "/a"), Ok(Some("/a".to_owned())));
    for path in ["/b", "/b/", "/b/c"] {
        assert_eq!(chosen(&router, path), Ok(Some("/b/{*rest}".to_owned())), "{path}");
    }
}

#[test]
fn one_route_for_everything_refuses_nothing() {
    let router = router(&[("/{*rest}", Mode::Protect)]);
    let long = "/%25".repeat(1000);
    for path in ["/a%2Fb//c/../d;p=1", "/%2525252525", "/A/", &long] {
        assert_eq!(chosen(&router, path), Ok(Some("/{*rest}".to_owned())), "{path}");
    }
}

#[test]
fn a_path_with_too_many_readings_is_refused() {
    let router = router(&CHARGES);
    assert_eq!(chosen(&router, "/%25252525"), Err(Ambiguity::TooManyReadings));
    let long = format!("/{}", "a%252Fb//c;x%5C".repeat(4000));
    assert_eq!(chosen(&router, &long), Err(Ambiguity::TooManyReadings));
}

fn any_path() -> impl Strategy<Value = String> {
    let pieces = [
        "a",
        "b",
        "A",
        "c",
        "%61",
        "%41",
        "..",
        "%2e%2E",
        ".",
        "",
        "",
        "c;x",
        "a;",
        "a%3Bx",
        "a%2Fb",
        "a%5Cb",
        "\\a",
        "%2561",
        "%252e%252e",
        "a%00x",
        "..;",
        "a%2F..",
        "b%3f",
        "a.",
        "...",
        "a%20",
        "b%0a",
        "a%7f",
        "b%c2%a0",
        "b%e2%80%a8%20",
        "..%20",
        "a.%09",
        "a::$DATA",
        "b%3A%24index_allocation",
        "%u0061",
        "%U002f",
        "%u00",
        "%25u002e",
        "a%e0%80%afb",
        "%F0%80%81%A1",
        "%c0%ae.",
        "%fc%80%80%80%81%a1",
    ];
    prop::collection::vec(prop::sample::select(pieces.to_vec()), 1..5).prop_map(|path| format!("/{}", path.join("/")))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000 * ProptestConfig::default().cases / 256))]

    #[test]
    fn every_reading_of_a_path_has_its_policy(
        routes in prop::collection::vec((any_route(), any::<bool>()), 1..5),
        path in any_path(),
        steps in prop::collection::vec(0..reference::STEPS, 0..5),
    ) {
        let mut kept: Vec<Route> = Vec::new();
        for (mut route, protects) in routes {
            route.policy.mode = if protects { Mode::Protect } else { Mode::Pass };
            if !kept.iter().any(|other| other.overlaps(&route)) {
                kept.push(route);
            }
        }
        let router = Router::new(kept).unwrap();
        let (method, host) = (Method::POST, Some("a.example"));
        let find = |path: &str| router.find(&method, host, path);
        let Ok(route) = router.choose(&method, host, &path) else { return Ok(()) };
        let reading = steps.into_iter().fold(Reading::of(&path), Reading::then).path;
        let is_meant = route.is_some_and(|route| !route.path.has_parameter_where(&path, is_unusual));
        if is_meant && reading != path {
            return Ok(());
        }
        let is_other = |other: &&Arc<Route>| route.is_none_or(|route| !Arc::ptr_eq(route, other));
        let protects = |found: Option<&Arc<Route>>| found.is_some_and(|found| found.protects());
        let found = find(&reading);
        let is_same = found.map(Arc::as_ptr) == route.map(Arc::as_ptr);
        prop_assert!(is_same || !protects(found) && !protects(route), "{path} as {reading}");
        for fold in reference::folds(&reading) {
            let precedence = |route: &Arc<Route>| reference::precedence(&route.path.to_string(), route.host.is_some());
            let is_more_specific = |other: &&Arc<Route>| found.is_none_or(|found| reference::is_more_specific(&precedence(other), &precedence(found)));
            let other = find(&fold).filter(is_other).filter(is_more_specific);
            prop_assert!(other.is_none() || !protects(other) && !protects(route), "{path} as {fold}");
        }
    }
}
