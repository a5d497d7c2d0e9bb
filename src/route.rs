//! Finds the route of a request.
//!
//! Of the routes that match, the most specific path wins: compared segment by segment from the left, a literal beats
//! `{x}`, which beats `{*rest}`, and a path that ends beats one that goes on with `{*rest}`. Between equal paths, a named
//! host beats any host. [`Router::new`] refuses routes that would tie, so the order of routes never matters.
//!
//! A path and a method are compared as they are, byte for byte, and forwarded so. An upstream may interpret a path in another
//! way. Servers decode it, resolve dot segments, merge slashes, cut off parameters, trim dots and white space, and ignore case
//! and a trailing slash, each in its own way and order (RFC 3986, 6.2, describes some of this). Some take what follows two
//! slashes for a host, and some do not mind the case of a method. Where another reading selects another route, and one of the
//! two is protected, the policy is ambiguous, and [`Router::choose`] refuses the request.

use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;

use http::Method;

use self::normalization::{has_stream, normalizations};
use self::pattern::PathVariant;
pub use self::pattern::Pattern;
use crate::idempotency::policy::Policy;

#[cfg(test)]
mod ambiguity_tests;
mod normalization;
mod pattern;
#[cfg(test)]
mod reference;

/// One route, resolved.
#[derive(Clone, Debug)]
pub struct Route {
    /// Its name.
    pub name: Arc<str>,
    /// The namespace of its records: `namespace`, else its name.
    pub namespace: Arc<str>,
    /// Methods it matches.
    pub methods: Vec<Method>,
    /// Host it matches, in lower case and without port; `None` is any.
    pub host: Option<String>,
    /// Path it matches.
    pub path: Pattern,
    /// Index of its upstream in the gate's list.
    pub upstream: usize,
    /// Its policy.
    pub policy: Policy,
}

/// Which parts of a request a route matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteMatch {
    /// Whether it has the request's method.
    pub method: bool,
    /// Whether it has the request's host.
    pub host: bool,
    /// Whether its path matches.
    pub path: bool,
}

impl RouteMatch {
    /// Whether it matches the request.
    #[must_use]
    pub fn is_whole(self) -> bool {
        self.method && self.host && self.path
    }
}

/// The routes of a gate.
#[derive(Clone, Debug, Default)]
pub struct Router {
    routes: Vec<Arc<Route>>,
    /// Indices of `routes`, the most specific first: the first that matches wins.
    order: Vec<usize>,
    /// Whether a path can mean anything but itself: something is protected, and not on every path.
    paths_matter: bool,
    /// Whether a literal of a path has a capital letter.
    has_capitals: bool,
    /// Whether a route is for one host.
    hosts_matter: bool,
}

/// Two routes that can overlap with equal specificity, by their places in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("routes {first} and {second} can overlap with equal specificity")]
pub struct Overlap {
    /// The one that stands first.
    pub first: usize,
    /// The other.
    pub second: usize,
}

/// A request whose path or method can be read so that it belongs to another route, and one of the two is protected.
#[derive(Clone, Debug)]
pub struct Ambiguous {
    /// The kind of ambiguity.
    pub kind: Ambiguity,
    /// What of the path has the other reading, where a normalization does.
    pub features: Vec<&'static str>,
    /// The reading; nothing where there are too many.
    pub reading: Option<String>,
    /// The route of the path as it stands.
    pub route: Option<Arc<Route>>,
    /// The route of the reading.
    pub other: Option<Arc<Route>>,
}

/// The kind of ambiguity in a path or a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ambiguity {
    /// Its percent-encoding, dot segments, empty segments, a host between slashes, parameters, backslashes, ends of segments
    /// or letters beyond ASCII.
    Normalization,
    /// The case of its letters.
    Case,
    /// The slash at its end.
    TrailingSlash,
    /// The case of its method's letters, which count (RFC 9110, 9.1), though not to every server.
    Method,
    /// More readings than are checked.
    TooManyReadings,
}

impl Router {
    /// Takes the routes of a gate, or says which of them overlap: every pair, in order.
    pub fn new(routes: Vec<Route>) -> Result<Self, Vec<Overlap>> {
        let overlaps: Vec<_> = pairs(routes.len())
            .filter(|&(first, second)| routes[first].overlaps(&routes[second]))
            .map(|(first, second)| Overlap { first, second })
            .collect();
        if !overlaps.is_empty() {
            return Err(overlaps);
        }
        let mut order: Vec<usize> = (0..routes.len()).collect();
        order.sort_by(|&a, &b| routes[a].precedence(&routes[b]));
        Ok(Self {
            order,
            paths_matter: routes.iter().any(Route::protects) && !routes.iter().all(|route| route.path.is_everything()),
            has_capitals: routes.iter().any(|route| route.path.has_capitals()),
            hosts_matter: routes.iter().any(|route| route.host.is_some()),
            routes: routes.into_iter().map(Arc::new).collect(),
        })
    }

    /// The route of a request: of those that match, the one with the most specific path.
    ///
    /// `host` is the request's authority; `path` is the raw path of its target. Both are compared as they are,
    /// except that a host's case, port and final dot do not count.
    #[must_use]
    pub fn find(&self, method: &Method, host: Option<&str>, path: &str) -> Option<&Arc<Route>> {
        self.find_at(method, self.host_that_matters(host), path)
    }

    /// The route of a request, as [`Router::find`] finds it, unless its path or its method can be read otherwise and that matters:
    /// another reading belongs to another route or to none, and one of the two is protected.
    ///
    /// That letters may count in whatever case, and a slash at the end not at all, holds for every path; only a route
    /// that says more of the path than the one it has makes a difference there. `/public` can be exempt under a protected
    /// `/{*rest}`, though `/public/` is not.
    ///
    /// # Errors
    /// The request must be refused.
    pub fn choose(
        &self,
        method: &Method,
        host: Option<&str>,
        path: &str,
    ) -> Result<Option<&Arc<Route>>, Box<Ambiguous>> {
        let host = self.host_that_matters(host);
        let route = self.find_at(method, host, path);
        let check = AmbiguityCheck { router: self, method, host, route };
        check.check_method(path)?;
        if !self.paths_matter || !path.starts_with('/') {
            return Ok(route);
        }
        let bytes = path.as_bytes();
        check.check_folds(bytes, route)?;
        let is_unusual = match route {
            Some(route) => route.path.has_parameter_where(path, is_unusual),
            None => has_unusual(bytes),
        };
        if is_unusual && check.candidates().any(|route| route.protects()) {
            check.check_normalizations(bytes)?;
        }
        Ok(route)
    }

    fn find_at(&self, method: &Method, host: Option<&str>, path: &str) -> Option<&Arc<Route>> {
        self.ranked().find(|route| route.matches(method, host, path))
    }

    /// The host of an authority, where any route looks at it.
    fn host_that_matters<'a>(&self, authority: Option<&'a str>) -> Option<&'a str> {
        authority.filter(|_| self.hosts_matter).map(host_of)
    }

    /// All routes, the most specific first: of those that match a request, the first is its route.
    pub fn ranked(&self) -> impl Iterator<Item = &Arc<Route>> {
        self.order.iter().map(|&index| &self.routes[index])
    }

    /// All routes, in the order configured.
    #[must_use]
    pub fn routes(&self) -> &[Arc<Route>] {
        &self.routes
    }
}

impl Route {
    /// Which parts of a request it matches. `host` and `path` are as in [`Router::find`].
    #[must_use]
    pub fn match_parts(&self, method: &Method, host: Option<&str>, path: &str) -> RouteMatch {
        let host = self.matches_host(host.map(host_of));
        RouteMatch { method: self.methods.contains(method), host, path: self.path.matches(path) }
    }

    fn matches(&self, method: &Method, host: Option<&str>, path: &str) -> bool {
        self.serves(method, host) && self.path.matches(path)
    }

    /// Whether it matches the request on some path.
    fn serves(&self, method: &Method, host: Option<&str>) -> bool {
        self.matches_host(host) && self.methods.contains(method)
    }

    fn protects(&self) -> bool {
        self.policy.mode.protects()
    }

    /// Whether some request that matches both is this route's.
    #[must_use]
    pub fn takes_from(&self, other: &Self) -> bool {
        let share_a_host = match (&self.host, &other.host) {
            (Some(own), Some(other)) => own.eq_ignore_ascii_case(other),
            _ => true,
        };
        share_a_host
            && self.precedence(other).is_lt()
            && self.methods.iter().any(|method| other.methods.contains(method))
            && self.path.intersects(&other.path)
    }

    fn matches_host(&self, host: Option<&str>) -> bool {
        match (&self.host, host) {
            (None, _) => true,
            (Some(own), Some(host)) => own.eq_ignore_ascii_case(host),
            (Some(_), None) => false,
        }
    }

    /// Orders routes by precedence: the lesser one wins. Equal routes that match one request are a tie.
    fn precedence(&self, other: &Self) -> Ordering {
        self.path.specificity().cmp(other.path.specificity()).then(self.host.is_none().cmp(&other.host.is_none()))
    }

    /// Whether it says more of a request than `other` does, of its path or else of its host.
    fn is_more_specific(&self, other: &Self) -> bool {
        self.path.is_more_specific(&other.path)
            || !other.path.is_more_specific(&self.path) && self.host.is_some() && other.host.is_none()
    }

    /// Whether both match some request with equal specificity.
    ///
    /// Two paths that can match the same request and are equally specific have the same literals in the same places.
    fn overlaps(&self, other: &Self) -> bool {
        let same_host = match (&self.host, &other.host) {
            (None, None) => true,
            (Some(own), Some(other)) => own.eq_ignore_ascii_case(other),
            _ => false,
        };
        same_host
            && self.path.same_requests(&other.path)
            && self.methods.iter().any(|method| other.methods.contains(method))
    }
}

/// A check of the other readings of a path.
struct AmbiguityCheck<'a> {
    router: &'a Router,
    method: &'a Method,
    host: Option<&'a str>,
    /// The route of the path as it stands.
    route: Option<&'a Arc<Route>>,
}

impl<'a> AmbiguityCheck<'a> {
    /// Routes that match the request on some path, the most specific first.
    fn candidates(&self) -> impl Iterator<Item = &'a Arc<Route>> {
        let Self { method, host, .. } = *self;
        self.router.ranked().filter(move |route| route.serves(method, host))
    }

    /// Checks the method in capitals, which is not the same method to the gate.
    fn check_method(&self, path: &str) -> Result<(), Box<Ambiguous>> {
        if !self.method.as_str().bytes().any(|byte| byte.is_ascii_lowercase()) {
            return Ok(());
        }
        let Ok(capitals) = Method::from_bytes(self.method.as_str().to_ascii_uppercase().as_bytes()) else {
            return Ok(());
        };
        let other = self.router.choose(&capitals, self.host, path)?;
        self.check(Ambiguity::Method, PathVariant::raw(path.as_bytes()), other)
            .map_err(|ambiguous| Box::new(Ambiguous { reading: Some(capitals.to_string()), ..*ambiguous }))
    }

    /// Checks each normalization of the path, with its folds.
    fn check_normalizations(&self, path: &[u8]) -> Result<(), Box<Ambiguous>> {
        let Some(readings) = normalizations(path) else {
            return Err(Box::new(Ambiguous {
                kind: Ambiguity::TooManyReadings,
                features: Vec::new(),
                reading: None,
                route: self.route.cloned(),
                other: None,
            }));
        };
        for (place, reading) in readings.paths() {
            let variant = PathVariant::raw(reading);
            let found = self.candidates().find(|route| route.path.matches_variant(variant));
            let named =
                |ambiguous: Box<Ambiguous>| Box::new(Ambiguous { features: readings.features(place), ..*ambiguous });
            self.check(Ambiguity::Normalization, variant, found).map_err(named)?;
            self.check_folds(reading, found)?;
        }
        Ok(())
    }

    /// Checks a reading, of which `found` is the route, with the trailing slash toggled and with any case.
    fn check_folds(&self, reading: &[u8], found: Option<&Arc<Route>>) -> Result<(), Box<Ambiguous>> {
        let as_is = PathVariant::raw(reading);
        let slash = match reading.strip_suffix(b"/") {
            Some(b"") => None,
            Some(path) => Some(PathVariant { path, ..as_is }),
            None => Some(PathVariant { slash: true, ..as_is }),
        };
        let case_counts = self.router.has_capitals || reading.iter().any(u8::is_ascii_uppercase);
        let any_case = |variant| PathVariant { any_case: true, ..variant };
        let folds = [
            (Ambiguity::TrailingSlash, slash),
            (Ambiguity::Case, Some(any_case(as_is)).filter(|_| case_counts)),
            (Ambiguity::Case, slash.map(any_case).filter(|_| case_counts)),
        ];
        for (kind, fold) in folds {
            let Some(fold) = fold else { continue };
            // A more specific path ranks before it. A route with a host may rank after it, if the paths differ only in
            // a trailing slash.
            let is_before = |route: &&Arc<Route>| found.is_none_or(|found| !Arc::ptr_eq(found, route));
            let before = self.router.ranked().take_while(|route| self.router.hosts_matter || is_before(route));
            let mut others =
                before.filter(|route| route.path.matches_variant(fold) && route.serves(self.method, self.host));
            let Some(first) = others.next() else { continue };
            // In any case, several may have the same precedence.
            let ties = others.filter(|other| !first.is_more_specific(other));
            for other in std::iter::once(first).chain(ties) {
                if found.is_none_or(|found| other.is_more_specific(found)) {
                    self.check(kind, fold, Some(other))?;
                }
            }
        }
        Ok(())
    }

    /// Refuses a reading that belongs to another route, where that matters.
    fn check(
        &self,
        kind: Ambiguity,
        reading: PathVariant<'_>,
        other: Option<&Arc<Route>>,
    ) -> Result<(), Box<Ambiguous>> {
        let is_same = match (self.route, other) {
            (Some(route), Some(other)) => Arc::ptr_eq(route, other),
            (None, None) => true,
            _ => false,
        };
        if is_same || !self.route.into_iter().chain(other).any(|route| route.protects()) {
            return Ok(());
        }
        let slash = if reading.slash { "/" } else { "" };
        let text = format!("{}{slash}", String::from_utf8_lossy(reading.path));
        let reading = Some(if reading.any_case { text.to_ascii_lowercase() } else { text });
        let (route, other) = (self.route.cloned(), other.cloned());
        Err(Box::new(Ambiguous { kind, features: Vec::new(), reading, route, other }))
    }
}

impl fmt::Display for Ambiguous {
    /// For the client: without the names of routes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let normalized;
        let what = match self.kind {
            Ambiguity::Normalization => {
                normalized = format!("by {}", self.features.join(" and "));
                &normalized
            }
            Ambiguity::Case => "letters in upper and lower case may or may not be the same",
            Ambiguity::TrailingSlash => "the slash at the end may or may not count",
            Ambiguity::TooManyReadings => "it has more readings than are looked at",
            Ambiguity::Method => {
                return f.write_str(
                    "the method has lowercase letters, which some servers take for capitals, and different rules hold for that \
                     method here; nothing was sent: write the method in capitals",
                );
            }
        };
        write!(
            f,
            "the path can be read in two ways ({what}), and different rules hold for them here; nothing was sent: write the \
             path plainly"
        )
    }
}

/// The host of an authority: without user, port and final dot. The brackets of an IPv6 address stay.
fn host_of(authority: &str) -> &str {
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let host = match host.rfind(']') {
        Some(end) => &host[..=end],
        None => host.split_once(':').map_or(host, |(host, _)| host),
    };
    host.strip_suffix('.').unwrap_or(host)
}

fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).flat_map(move |first| (first + 1..count).map(move |second| (first, second)))
}

/// Whether a segment has more than one reading.
fn is_unusual(segment: &[u8], is_last: bool) -> bool {
    segment.is_empty() && !is_last
        || segment.last() == Some(&b'.')
        || has_stream(segment)
        || segment.iter().any(|byte| matches!(byte, b'%' | b';' | b'\\' | b'?' | b'#' | ..=b' ' | 0x7F..))
}

fn has_unusual(path: &[u8]) -> bool {
    let mut segments = path.split(|byte| *byte == b'/').skip(1).peekable();
    while let Some(segment) = segments.next() {
        if is_unusual(segment, segments.peek().is_none()) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(super) fn route(name: &str, methods: &[Method], host: Option<&str>, path: &str) -> Route {
        Route {
            name: name.into(),
            namespace: name.into(),
            methods: methods.to_vec(),
            host: host.map(str::to_owned),
            path: Pattern::parse(path).unwrap(),
            upstream: 0,
            policy: Policy::default(),
        }
    }

    fn post(name: &str, host: Option<&str>, path: &str) -> Route {
        route(name, &[Method::POST], host, path)
    }

    #[test]
    fn the_most_specific_path_wins() {
        let router = Router::new(vec![
            post("rest", None, "/{*rest}"),
            post("one", None, "/v1/{x}/capture"),
            post("literal", None, "/v1/charges/{*rest}"),
            post("root", None, "/"),
            post("hosted rest", Some("a.example"), "/{*rest}"),
        ])
        .unwrap();
        let found = |host, path| router.find(&Method::POST, host, path).map(|route| &*route.name);
        assert_eq!(found(None, "/v1/charges/capture"), Some("literal"), "the first segments decide");
        assert_eq!(found(None, "/v1/refunds/capture"), Some("one"));
        assert_eq!(found(None, "/v1/refunds/capture/"), Some("rest"));
        assert_eq!(found(None, "/"), Some("root"));
        assert_eq!(found(None, "*"), None);
        assert_eq!(found(Some("a.example"), "/x"), Some("hosted rest"));
        assert_eq!(found(Some("a.example"), "/v1/refunds/capture"), Some("one"), "the path counts before the host");
        assert!(router.find(&Method::GET, None, "/").is_none());
        assert_eq!(router.routes().len(), 5);
    }

    #[test]
    fn a_host_is_compared_without_case_port_and_final_dot() {
        let router = Router::new(vec![post("named", Some("api.example.com"), "/"), post("six", Some("[::1]"), "/")]);
        let router = router.unwrap();
        for host in ["api.example.com", "API.Example.com:8080", "api.example.com.", "u@api.example.com.:80"] {
            assert_eq!(&*router.find(&Method::POST, Some(host), "/").unwrap().name, "named", "{host}");
        }
        for host in ["[::1]", "[::1]:8080"] {
            assert_eq!(&*router.find(&Method::POST, Some(host), "/").unwrap().name, "six", "{host}");
        }
        for host in ["example.com", "api.example.com.evil", ""] {
            assert!(router.find(&Method::POST, Some(host), "/").is_none(), "{host}");
        }
        assert!(router.find(&Method::POST, None, "/").is_none());
    }

    #[test]
    fn a_match_reports_its_parts() {
        let router = Router::new(vec![post("rest", None, "/{*rest}"), post("named", Some("a.example"), "/a")]).unwrap();
        let names: Vec<&str> = router.ranked().map(|route| &*route.name).collect();
        assert_eq!(names, ["named", "rest"]);
        let match_parts = |method: Method, host, path| {
            let RouteMatch { method, host, path } = router.ranked().next().unwrap().match_parts(&method, host, path);
            (method, host, path)
        };
        assert_eq!(match_parts(Method::POST, Some("A.example:80"), "/a"), (true, true, true));
        assert_eq!(match_parts(Method::PUT, Some("a.example"), "/a"), (false, true, true));
        assert_eq!(match_parts(Method::POST, Some("b.example"), "/a"), (true, false, true));
        assert_eq!(match_parts(Method::POST, None, "/a/"), (true, false, false));
    }

    #[test]
    fn every_overlap_is_reported() {
        let overlaps = Router::new(vec![
            post("a", None, "/v1/{x}"),
            post("b", Some("a.example"), "/v1/{x}"),
            post("c", None, "/v1/{y}"),
            post("d", Some("a.example"), "/v1/{z}"),
            route("e", &[Method::PUT], None, "/v1/{x}"),
        ]);
        let expected = vec![Overlap { first: 0, second: 2 }, Overlap { first: 1, second: 3 }];
        assert_eq!(overlaps.unwrap_err(), expected);
    }

    #[test]
    fn a_rest_takes_its_root_unless_another_path_is_more_specific() {
        let router = Router::new(vec![
            post("all", None, "/{*rest}"),
            post("one", None, "/v1/{x}"),
            post("orders", None, "/v1/orders/{*rest}"),
            post("charges", None, "/v1/charges"),
            post("below charges", None, "/v1/charges/{*rest}"),
            post("hosted charges", Some("a.example"), "/v1/charges/{*rest}"),
            post("v1", None, "/v1/{*rest}"),
        ])
        .unwrap();
        for (path, expected) in [
            ("/v1/orders", "orders"),
            ("/v1/orders/", "orders"),
            ("/v1/orders/7/lines", "orders"),
            ("/v1/ordersx", "one"),
            ("/v1/charges", "charges"),
            ("/v1/charges/", "hosted charges"),
            ("/v1/charges/7", "hosted charges"),
            ("/v1", "v1"),
            ("/v1/", "v1"),
            ("/v2", "all"),
            ("/", "all"),
        ] {
            assert_eq!(&*router.find(&Method::POST, Some("a.example"), path).unwrap().name, expected, "{path}");
        }
    }

    const HOSTS: [&str; 2] = ["a.example", "b.example"];

    pub(super) fn any_route() -> impl Strategy<Value = Route> {
        let segment = prop_oneof![Just("a"), Just("b"), Just("{x}"), Just("")];
        let segments = (prop::collection::vec(segment, 0..3), any::<bool>());
        let path = segments.prop_map(|(segments, rest)| {
            let names: Vec<String> = segments
                .iter()
                .enumerate()
                .map(|(place, segment)| segment.replace('x', &format!("x{place}")))
                .collect();
            match (names.is_empty(), rest) {
                (true, true) => "/{*rest}".to_owned(),
                (_, false) => format!("/{}", names.join("/")),
                (false, true) => format!("/{}/{{*rest}}", names.join("/")),
            }
        });
        let host = prop::option::of(prop::sample::select(HOSTS.to_vec()));
        let methods = prop::sample::subsequence(vec![Method::POST, Method::PUT], 1..=2);
        (path, host, methods).prop_map(|(path, host, methods)| route("any", &methods, host, &path))
    }

    /// Every request that routes of [`any_route`] can tell apart.
    fn requests() -> Vec<(Method, Option<&'static str>, String)> {
        let mut paths = vec![String::new()];
        let mut longest = paths.clone();
        for _ in 0..4 {
            longest =
                longest.iter().flat_map(|path| ["a", "b", "c", ""].map(|next| format!("{path}/{next}"))).collect();
            paths.extend(longest.clone());
        }
        let hosts = [None, Some(HOSTS[0]), Some(HOSTS[1]), Some("c.example")];
        let heads = [Method::POST, Method::PUT].into_iter().flat_map(|method| hosts.map(|host| (method.clone(), host)));
        heads.flat_map(|(method, host)| paths.iter().map(move |path| (method.clone(), host, path.clone()))).collect()
    }

    /// The precedence of a pattern for a path, from their texts: per segment, then the end. More is stronger.
    fn naive_path_precedence(pattern: &str, path: &str) -> Option<Vec<u8>> {
        // The part before a rest matches the path, or what stands before some slash of it.
        if let Some(root) = pattern.strip_suffix("/{*rest}") {
            let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
            let mut heads = ends.map(|end| &path[..end]);
            let mut precedence = match root {
                "" => path.starts_with('/').then(Vec::new)?,
                _ => heads.find_map(|head| naive_path_precedence(root, head))?,
            };
            precedence.truncate(root.matches('/').count());
            precedence.push(0);
            return Some(precedence);
        }
        if pattern.matches('/').count() != path.matches('/').count() {
            return None;
        }
        let pairs = pattern.split('/').zip(path.split('/')).skip(1);
        let precedences = pairs.map(|(segment, piece)| match segment {
            _ if segment.starts_with('{') && !piece.is_empty() => Some(1),
            _ if segment == piece => Some(2),
            _ => None,
        });
        precedences.chain([Some(2)]).collect()
    }

    /// The precedence of a route for a request: of its path, then of its host. More is stronger.
    fn naive_precedence(route: &Route, method: &Method, host: Option<&str>, path: &str) -> Option<Vec<u8>> {
        let mut precedence = naive_path_precedence(&route.path.to_string(), path)?;
        precedence.push(u8::from(route.host.is_some()));
        let host_matches = route.host.is_none() || route.host.as_deref() == host;
        (host_matches && route.methods.contains(method)).then_some(precedence)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases / 4))]

        #[test]
        fn exactly_those_that_tie_on_some_request_overlap(one in any_route(), other in any_route()) {
            let ties = requests().iter().any(|(method, host, path)| {
                let precedence = naive_precedence(&one, method, *host, path);
                precedence.is_some() && precedence == naive_precedence(&other, method, *host, path)
            });
            prop_assert_eq!(Router::new(vec![one, other]).is_err(), ties);
        }

        #[test]
        fn a_route_takes_from_another_what_both_match_and_it_gets(one in any_route(), other in any_route()) {
            let takes = one.takes_from(&other);
            let Ok(router) = Router::new(vec![one.clone(), other.clone()]) else { return Ok(()) };
            let is_taken = |(method, host, path): &(Method, Option<&str>, String)| {
                other.match_parts(method, *host, path).is_whole()
                    && router.find(method, *host, path).is_some_and(|found| Arc::ptr_eq(found, &router.routes()[0]))
            };
            prop_assert_eq!(takes, requests().iter().any(is_taken), "{} {}", one.path, other.path);
        }

        #[test]
        fn a_pattern_matches_what_the_reference_says(route in any_route()) {
            let text = route.path.to_string();
            for (_, _, path) in requests() {
                prop_assert_eq!(route.path.matches(&path), naive_path_precedence(&text, &path).is_some(), "{} {}", text, path);
            }
        }

        #[test]
        fn the_route_of_highest_precedence_is_found(mut routes in prop::collection::vec(any_route(), 1..6)) {
            // Without those that overlap an earlier one.
            let mut kept: Vec<Route> = Vec::new();
            for route in routes.drain(..) {
                if !kept.iter().any(|other| other.overlaps(&route)) {
                    kept.push(route);
                }
            }
            let router = Router::new(kept.clone()).unwrap();
            for (method, host, path) in requests() {
                let precedences = kept.iter().map(|route| naive_precedence(route, &method, host, &path));
                let expected = precedences.enumerate().filter(|(_, precedence)| precedence.is_some()).max_by_key(|(_, precedence)| precedence.clone());
                let found = router.find(&method, host, &path);
                let place = found.and_then(|found| router.routes().iter().position(|route| Arc::ptr_eq(route, found)));
                prop_assert_eq!(place, expected.map(|(place, _)| place), "{} {:?} {}", method, host, path);
            }
        }
    }
}
