//! Finds the route of a request.

use std::sync::Arc;

use http::Method;

use crate::idempotency::policy::Policy;

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

/// A path pattern: literal segments, `{x}` for one segment, `{*rest}` for the remainder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern(Vec<Segment>);

/// One segment of a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Literal(String),
    One,
    Rest,
}

/// The routes of a gate.
#[derive(Clone, Debug)]
pub struct Router {
    routes: Vec<Arc<Route>>,
}

impl Router {
    /// The route of a request: of those that match, the one with the most specific path.
    ///
    /// `host` is the request's authority; `path` is the raw path of its target.
    #[must_use]
    pub fn find(&self, method: &Method, host: Option<&str>, path: &str) -> Option<&Arc<Route>> {
        let _ = (method, host, path, &self.routes);
        todo!()
    }

    /// All routes, in the order configured.
    #[must_use]
    pub fn routes(&self) -> &[Arc<Route>] {
        &self.routes
    }
}
