//! Keys that do nothing: a request carries one, and no route protects it.
//!
//! A client that sends a key expects that a retry is safe. Where it is not, the answer says so, and so does the log.

use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};

use crate::gate::answer::Reply;
use crate::gate::request::Head;
use crate::gate::{Gate, RouteState};
use crate::idempotency::key::{Found, KeyRule, KeySource};
use crate::route::Router;
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::report::Seen;

/// The methods whose log lines are counted apart. Clients make up names of methods: all others share one place.
const METHODS: [Method; 8] = [
    Method::GET,
    Method::HEAD,
    Method::POST,
    Method::PUT,
    Method::PATCH,
    Method::DELETE,
    Method::OPTIONS,
    Method::TRACE,
];

/// The most lines of a malformed head that are looked at.
const MOST_LINES: usize = 1000;

/// Headers that clients take for the one of the key.
const NEARLY_KEYS: [&str; 4] = ["x-idempotency-key", "idempotency_key", "idempotencykey", "x-idempotency-token"];

/// The longest path that is logged whole, in bytes.
const LONGEST_PATH: usize = 100;

/// The places where the clients of a gate put keys: the `Idempotency-Key` header, and each header, query parameter and
/// event that a protected route reads its keys from, in requests with a method of that route. Keys in JSON bodies and
/// fingerprints are not looked for. An event in structured mode counts by its type: each has a `source` and an `id`, and a
/// route that protects it refuses one without.
pub(in crate::gate) struct KeyPlaces {
    header: KeyRule,
    others: Vec<(KeyRule, Vec<Method>)>,
    /// Those of [`NEARLY_KEYS`] that no route names.
    nearly: Vec<HeaderName>,
}

impl KeyPlaces {
    pub(in crate::gate) fn of(router: &Router) -> Self {
        let header = KeyRule::default();
        let mut others: Vec<(KeyRule, Vec<Method>)> = Vec::new();
        for route in router.routes().iter().filter(|route| route.policy.mode.protects()) {
            for source in route.policy.key.from.iter().filter(|source| !header.from.contains(source)) {
                match source {
                    KeySource::Header(_) | KeySource::Query(_) | KeySource::CloudEvent => {}
                    KeySource::Template(_) if !source.may_need_body() => {}
                    KeySource::Json(_) | KeySource::Template(_) | KeySource::Fingerprint => continue,
                }
                match others.iter_mut().find(|(rule, _)| rule.from.contains(source)) {
                    Some((_, methods)) => methods.extend(route.methods.iter().cloned()),
                    None => {
                        let rule = KeyRule { from: vec![source.clone()], ..KeyRule::default() };
                        others.push((rule, route.methods.clone()));
                    }
                }
            }
        }
        let is_named = |name: &HeaderName| {
            let mut sources = router.routes().iter().flat_map(|route| &route.policy.key.from);
            sources.any(|source| source.headers().contains(&name))
        };
        let nearly = NEARLY_KEYS.into_iter().map(HeaderName::from_static).filter(|name| !is_named(name)).collect();
        Self { header, others, nearly }
    }

    /// Whether a request carries a key, well-formed or not.
    pub(in crate::gate) fn has_key(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> bool {
        let others = self.others.iter().filter(|(_, methods)| methods.contains(method)).map(|(rule, _)| rule);
        [&self.header].into_iter().chain(others).any(|rule| rule.find(uri, headers, None) != Ok(Found::Absent))
    }

    /// Whether a malformed head has a header for a key with a control character in its value.
    pub(super) fn has_odd_key(&self, head: &[u8]) -> bool {
        let rules = || [&self.header].into_iter().chain(self.others.iter().map(|(rule, _)| rule));
        let is_of_key = |name: &[u8]| {
            let mut sources = rules().flat_map(|rule| &rule.from);
            sources.any(|source| matches!(source, KeySource::Header(known) if name.eq_ignore_ascii_case(known.as_str().as_bytes())))
        };
        let is_odd = |byte: &u8| byte.is_ascii_control() && *byte != b'\t';
        head_lines(head).skip(1).any(|line| {
            let end = memchr::memchr(b':', line);
            end.is_some_and(|end| line[end + 1..].iter().any(is_odd) && is_of_key(line[..end].trim_ascii()))
        })
    }

    /// Whether a request carries a key whose head may be malformed, by the lines of it that can be read.
    pub(super) fn may_have_key(&self, head: &[u8]) -> bool {
        let mut lines = head_lines(head);
        let line = lines.next().unwrap_or_default();
        let Some(method) = Seen::of_line(line).method else { return false };
        let uri = legible_query(line);
        let field = |line: &[u8]| {
            let (name, value) = line.split_at(memchr::memchr(b':', line)?);
            let value = HeaderValue::from_bytes(value[1..].trim_ascii());
            // A key that is malformed is there all the same.
            Some((HeaderName::from_bytes(name.trim_ascii_end()).ok()?, value.unwrap_or(HeaderValue::from_static("?"))))
        };
        let mut headers = HeaderMap::new();
        for (name, value) in lines.filter_map(field).take(MOST_LINES) {
            headers.append(name, value);
        }
        self.has_key(&method, &uri, &headers)
    }
}

/// What can be read of the query of a request line, whose target may be no URI. Other bytes stand as `_`.
fn legible_query(line: &[u8]) -> Uri {
    let query = memchr::memchr(b'?', line).map_or(&[][..], |at| &line[at + 1..]);
    let end = memchr::memmem::rfind(query, b" HTTP/").unwrap_or(query.len());
    let is_legible = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@/?%".contains(&byte);
    let query: String =
        query[..end].iter().map(|byte| if is_legible(*byte) { char::from(*byte) } else { '_' }).collect();
    format!("/?{query}").parse().unwrap_or_default()
}

/// The lines of a head, without their ends.
pub(in crate::gate) fn head_lines(head: &[u8]) -> impl Iterator<Item = &[u8]> {
    head.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line))
}

/// The log of a route's ignored keys: one line a minute for each method.
pub(in crate::gate) struct IgnoredLog([LogThrottle; METHODS.len() + 1]);

impl Default for IgnoredLog {
    fn default() -> Self {
        Self(std::array::from_fn(|_| LogThrottle::each_minute()))
    }
}

impl IgnoredLog {
    fn of(&self, method: &Method) -> &LogThrottle {
        &self.0[METHODS.iter().position(|known| known == method).unwrap_or(METHODS.len())]
    }
}

/// A key that does nothing, and the request that carries it.
pub(in crate::gate) struct IgnoredKey<'a> {
    gate: &'a Gate,
    state: &'a RouteState,
    method: Method,
    path: Box<str>,
}

impl<'a> IgnoredKey<'a> {
    /// The key of a request that is not protected, if it carries one. `state` is its route's, or that of requests without a
    /// route.
    pub(in crate::gate) fn of(gate: &'a Gate, state: &'a RouteState, head: &Head) -> Option<Self> {
        if !gate.key_places.has_key(&head.method, &head.uri, &head.headers) {
            if let Some(name) = gate.key_places.nearly.iter().find(|name| head.headers.contains_key(*name)) {
                warn_of_nearly_a_key(state, head, name);
            }
            return None;
        }
        let (method, path) = (head.method.clone(), head.uri.path());
        Some(Self { gate, state, method, path: shortened(path).into() })
    }

    /// Says so: in the reply, whatever it is, and in the log.
    pub(in crate::gate) fn tell(self, reply: Reply) -> Reply {
        if let Some(others) = self.state.ignored.of(&self.method).due() {
            tracing::warn!(
                route = &*self.state.name,
                method = self.method.as_str(),
                path = &*self.path,
                others,
                "an idempotency key was ignored, since no route protects this request: a retry runs again; add a route \
                 that does, or one with mode = \"pass\" if none should"
            );
        }
        reply.of_ignored_key(&self.gate.settings.headers).without_trailers(&self.gate.added)
    }
}

/// Says that a request has a header that its client may take for the one of the key. The answer does not: it carries no key.
fn warn_of_nearly_a_key(state: &RouteState, head: &Head, header: &HeaderName) {
    if let Some(others) = state.nearly_keys.of(&head.method).due() {
        tracing::warn!(
            route = &*state.name,
            method = head.method.as_str(),
            path = shortened(head.uri.path()),
            %header,
            others,
            "a header was ignored that looks like the one of an idempotency key: a retry runs again; send Idempotency-Key, or name \
             this header in key.from of a route that protects the request"
        );
    }
}

/// The beginning of a path, which may end within an escape.
fn shortened(path: &str) -> &str {
    let mut end = path.len().min(LONGEST_PATH);
    while !path.is_char_boundary(end) {
        end -= 1;
    }
    &path[..end]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::tests::route;
    use crate::idempotency::policy::Mode;
    use crate::route::Route;

    fn with_key(name: &str, mode: Mode, from: &[&str]) -> Route {
        let mut route = route(name, mode, "host");
        route.policy.key.from = from.iter().map(|word| KeySource::parse(word).unwrap()).collect();
        route
    }

    fn places() -> KeyPlaces {
        let routes = vec![
            with_key("a", Mode::Protect, &["header:X-Order", "json:/id", "fingerprint"]),
            with_key("b", Mode::Protect, &["query:ref", "header:X-Order"]),
            with_key("c", Mode::Pass, &["header:X-Passed"]),
        ];
        KeyPlaces::of(&Router::new(routes).unwrap())
    }

    #[test]
    fn a_key_is_one_wherever_a_protected_route_reads_it_and_however_malformed() {
        let places = places();
        let has_key = |target: &str, lines: &[(&'static str, &'static str)]| {
            let lines = lines.iter().map(|&(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
            places.has_key(&Method::POST, &target.parse().unwrap(), &lines.collect())
        };
        for (target, lines) in [
            ("/x", &[("idempotency-key", "k")][..]),
            ("/x", &[("idempotency-key", "not valid, at all")]),
            ("/x", &[("idempotency-key", "")]),
            ("/x", &[("idempotency-key", "k"), ("idempotency-key", "l")]),
            ("/x", &[("x-order", "k")]),
            ("/x?a=1&ref=k", &[]),
            ("/x?r%65f=k", &[]),
            ("/x?ref", &[]),
        ] {
            assert!(has_key(target, lines), "{target} {lines:?}");
        }
        for (target, lines) in
            [("/x", &[][..]), ("/x", &[("x-passed", "k"), ("x-request-id", "1")]), ("/ref?order=1", &[("ce-id", "1")])]
        {
            assert!(!has_key(target, lines), "{target} {lines:?}");
        }
        // A route that reads its keys elsewhere says nothing about methods that it does not have.
        let key = HeaderMap::from_iter([(http::HeaderName::from_static("idempotency-key"), "k".parse().unwrap())]);
        assert!(!places.has_key(&Method::GET, &"/x?ref=k".parse().unwrap(), &HeaderMap::new()));
        assert!(places.has_key(&Method::GET, &"/x".parse().unwrap(), &key));
    }

    #[test]
    fn a_head_that_cannot_be_read_has_a_key_where_its_query_has_one() {
        let may_have_key = |line: &str| places().may_have_key(format!("{line} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes());
        for line in ["POST /x y?ref=k", "POST /x?ref=k y", "POST /\u{e9}?a=<&ref=k", "POST x?ref=\u{1}"] {
            assert!(may_have_key(line), "{line}");
        }
        for line in ["POST /x y", "POST /x?order=1 y", "GET /x?ref=k y", "POST /x?or?ref=k y", "\u{e9} /x?ref=k"] {
            assert!(!may_have_key(line), "{line}");
        }
    }

    /// Its body is not looked into. A route that protects it would refuse an event without a key.
    #[test]
    fn a_structured_event_has_a_key_by_its_type() {
        let places =
            |from: &str| KeyPlaces::of(&Router::new(vec![with_key("a", Mode::Protect, &[from])]).expect("one route"));
        let has_key = |places: &KeyPlaces, kind: &'static str| {
            let headers = HeaderMap::from_iter([(http::header::CONTENT_TYPE, HeaderValue::from_static(kind))]);
            places.has_key(&Method::POST, &Uri::from_static("/x"), &headers)
        };
        let events = places("cloudevent");
        assert!(has_key(&events, "application/cloudevents+json; charset=utf-8"));
        assert!(!has_key(&events, "application/json"));
        assert!(!has_key(&places("json:/id"), "application/cloudevents+json"));
    }

    #[test]
    fn the_place_of_each_source_stands_once() {
        let KeyPlaces { header, others, .. } = places();
        let rules = [&header].into_iter().chain(others.iter().map(|(rule, _)| rule));
        let places: Vec<String> = rules.flat_map(|rule| &rule.from).map(ToString::to_string).collect();
        assert_eq!(places, ["header:idempotency-key", "header:x-order", "query:ref"]);
    }

    /// Whatever the mode and the methods of the route.
    #[test]
    fn a_header_that_a_route_names_is_not_nearly_one() {
        let nearly = |routes: Vec<Route>| KeyPlaces::of(&Router::new(routes).unwrap()).nearly;
        assert_eq!(nearly(vec![with_key("a", Mode::Protect, &["header:X-Order"])]), NEARLY_KEYS);
        for from in ["header:X-Idempotency-Key", "template:{header:X-Idempotency-Key}"] {
            assert_eq!(nearly(vec![with_key("a", Mode::Observe, &[from])]), NEARLY_KEYS[1..], "{from}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_method_has_its_line_and_made_up_ones_share_one() {
        let log = IgnoredLog::default();
        let due = |method: &str| log.of(&method.parse().unwrap()).due();
        assert_eq!((due("POST"), due("POST"), due("PUT")), (Some(0), None, Some(0)));
        assert_eq!((due("FOO"), due("BAR")), (Some(0), None));
        tokio::time::advance(std::time::Duration::from_secs(60)).await;
        assert_eq!((due("POST"), due("BAZ")), (Some(1), Some(1)));
    }

    #[test]
    fn a_long_path_is_cut_between_characters() {
        assert_eq!(shortened("/short"), "/short");
        let long = format!("/{}é{}", "a".repeat(LONGEST_PATH - 2), "b".repeat(50));
        assert_eq!(shortened(&long), format!("/{}", "a".repeat(LONGEST_PATH - 2)));
    }
}
