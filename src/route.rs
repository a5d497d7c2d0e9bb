//! Finds the route of a request.
//!
//! Of the routes that match, the most specific path wins: compared segment by segment from the left, a literal beats
//! `{x}`, which beats `{*rest}`. Between equal paths, a named host beats any host. [`Router::new`] refuses routes
//! that would tie, so the order of routes never matters.

use std::cmp::Ordering;
use std::sync::Arc;

use http::Method;

use crate::idempotency::policy::Policy;

mod pattern;

pub use pattern::Pattern;

/// One route, resolved.
#[derive(Clone, Debug)]
pub struct Route {
    /// Its name.
    pub name: Arc<str>,
    /// What its records are kept under: `namespace`, else its name.
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

/// The routes of a gate.
#[derive(Clone, Debug, Default)]
pub struct Router {
    routes: Vec<Arc<Route>>,
    /// Indices of `routes`, the most specific first: the first that matches wins.
    order: Vec<usize>,
}

/// Two routes that can match one request with equal claim, by their places in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("routes {first} and {second} can match one request with equal claim")]
pub struct Overlap {
    /// The one that stands first.
    pub first: usize,
    /// The other.
    pub second: usize,
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
        order.sort_by(|&a, &b| routes[a].claim(&routes[b]));
        Ok(Self { routes: routes.into_iter().map(Arc::new).collect(), order })
    }

    /// The route of a request: of those that match, the one with the most specific path.
    ///
    /// `host` is the request's authority; `path` is the raw path of its target. Both are compared as they are,
    /// except that a host's case, port and final dot do not count.
    #[must_use]
    pub fn find(&self, method: &Method, host: Option<&str>, path: &str) -> Option<&Arc<Route>> {
        let host = host.map(host_of);
        self.order.iter().map(|&index| &self.routes[index]).find(|route| route.matches(method, host, path))
    }

    /// All routes, in the order configured.
    #[must_use]
    pub fn routes(&self) -> &[Arc<Route>] {
        &self.routes
    }
}

impl Route {
    fn matches(&self, method: &Method, host: Option<&str>, path: &str) -> bool {
        let host_matches = match (&self.host, host) {
            (None, _) => true,
            (Some(own), Some(host)) => own.eq_ignore_ascii_case(host),
            (Some(_), None) => false,
        };
        host_matches && self.methods.contains(method) && self.path.matches(path)
    }

    /// Less is the stronger claim. Where both match one request, equal is a tie.
    fn claim(&self, other: &Self) -> Ordering {
        self.path.specificity().cmp(other.path.specificity()).then(self.host.is_none().cmp(&other.host.is_none()))
    }

    /// Whether some request matches both with equal claim.
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
