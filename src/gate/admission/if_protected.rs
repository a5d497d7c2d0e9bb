//! What requests of routes that only observe would get if these protected: as far as other routes have to do with it.

use super::ignored::KeyPlaces;
use crate::gate::request::Head;
use crate::idempotency::policy::Mode;
use crate::route::{Ambiguous, Route, Router};

/// The routes of a gate as if all that observe protected.
pub(in crate::gate) struct IfProtected {
    router: Router,
    key_places: KeyPlaces,
}

impl IfProtected {
    /// Nothing where no route observes.
    pub(in crate::gate) fn of(router: &Router) -> Option<Self> {
        let observes = |route: &Route| route.policy.mode == Mode::Observe;
        if !router.routes().iter().any(|route| observes(route)) {
            return None;
        }
        let protecting = router.routes().iter().map(|route| {
            let mut route = Route::clone(route);
            if observes(&route) {
                route.policy.mode = Mode::Protect;
            }
            route
        });
        // Whether routes overlap does not depend on what they do.
        let router = Router::new(protecting.collect()).ok()?;
        Some(Self { key_places: KeyPlaces::of(&router), router })
    }

    /// Why the request would be refused, whose path or method can be read in another way.
    pub(in crate::gate) fn ambiguity(&self, head: &Head) -> Option<Box<Ambiguous>> {
        self.router.choose(&head.method, head.authority(), head.uri.path()).err()
    }

    /// Whether the request carries a key, where its route reads none.
    pub(in crate::gate) fn has_key(&self, head: &Head) -> bool {
        self.key_places.has_key(&head.method, &head.uri, &head.headers)
    }
}
