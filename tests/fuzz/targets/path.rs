//! Routes and a path: where the router gives the path a route, no server that reads the path otherwise gets around what
//! is protected.
//!
//! The first line is what a server does, the second the path, and each of the others a route: `p` and its path where it
//! is protected, another letter where it is not.

#![no_main]

#[path = "../../../src/route/reference.rs"]
mod reference;

use std::sync::Arc;

use http::{Method, Uri};
use libfuzzer_sys::fuzz_target;
use oncegate::idempotency::policy::{Mode, Policy};
use oncegate::route::{Pattern, Route, Router};
use reference::Reading;

fuzz_target!(|input: &str| {
    let mut lines = input.lines();
    let (Some(steps), Some(path)) = (lines.next(), lines.next()) else { return };
    // Others come in no request.
    if !path.parse::<Uri>().is_ok_and(|uri| uri.path() == path) {
        return;
    }
    let Some(routes) = lines.map(route).collect::<Option<Vec<_>>>() else { return };
    let Ok(router) = Router::new(routes) else { return };
    let find = |path: &str| router.find(&Method::POST, None, path);
    let Ok(route) = router.choose(&Method::POST, None, path) else {
        assert!(router.routes().iter().any(protects), "nothing is protected");
        return;
    };
    assert_eq!(route.map(Arc::as_ptr), find(path).map(Arc::as_ptr));
    if !path.starts_with('/') {
        return;
    }
    let steps = steps.bytes().map(|byte| usize::from(byte) % reference::STEPS);
    let reading = steps.take(8).fold(Reading::of(path), Reading::then).path;
    let found = find(&reading);
    let at_stake = |other: Option<&Arc<Route>>| {
        other.map(Arc::as_ptr) != route.map(Arc::as_ptr) && other.into_iter().chain(route).any(protects)
    };
    assert!(!at_stake(found), "{path} as {reading}");
    for fold in reference::folds(&reading) {
        let precedence = |route: &Arc<Route>| reference::precedence(&route.path.to_string(), false);
        let is_more_specific = |other: &&Arc<Route>| {
            found.is_none_or(|found| reference::is_more_specific(&precedence(other), &precedence(found)))
        };
        let other = find(&fold).filter(is_more_specific);
        assert!(other.is_none() || !at_stake(other), "{path} as {fold}");
    }
});

/// A route that spells out `//`, capitals or the like gets them: that is left to the unit tests.
fn route(line: &str) -> Option<Route> {
    let path = line.get(1..)?;
    let is_plain = !path.contains(|c: char| matches!(c, '%' | ';' | '$' | 'A'..='Z'))
        && !path.contains("//")
        && !path.split('/').any(|segment| segment.ends_with('.'));
    let policy = Policy { mode: if line.starts_with('p') { Mode::Protect } else { Mode::Pass }, ..Policy::default() };
    Some(Route {
        name: path.into(),
        namespace: path.into(),
        methods: vec![Method::POST],
        host: None,
        path: is_plain.then(|| Pattern::parse(path).ok())??,
        upstream: 0,
        policy,
    })
}

fn protects(route: &Arc<Route>) -> bool {
    route.policy.mode == Mode::Protect
}
