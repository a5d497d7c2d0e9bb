//! Admission: what becomes of a request, by its head and, where its key is in its body, by its body.
//!
//! The rules of admission have this one home. Serving, the refusal under overload and `explain` all ask [`Candidate`].

use std::sync::Arc;

use crate::gate::request;
use crate::gate::request::Head;
use crate::http::headers::announces_body;
use crate::http::problem::Problem;
use crate::idempotency::key::Found;
use crate::idempotency::policy::Mode;
use crate::idempotency::scope::ScopePart;
use crate::route::{Ambiguous, Route, Router};
use crate::telemetry::outcome::Code;

/// What becomes of a request.
pub(in crate::gate) enum Admission<'a> {
    /// Its path or its method can be read in two ways that are protected differently: it is refused.
    Ambiguous(Box<Ambiguous>),
    /// No route matches it.
    Unrouted,
    /// It has a route, which does this with it.
    Routed(&'a Arc<Route>, Step),
}

/// What a route does with a request.
pub(in crate::gate) enum Step {
    /// It is refused; nothing is forwarded.
    Refuse(Refusal),
    /// It is forwarded without protection.
    Forward(Unprotected),
    /// The key may be in the body: [`Candidate::with_body`] decides.
    NeedBody,
    /// Its scope has a claim of a token, which is verified first; then [`Candidate::step`] decides.
    Verify {
        /// Whether the request is known to carry a key.
        has_key: bool,
    },
    /// The key is claimed before the request is forwarded.
    Protect(Found),
}

/// Why a request is refused.
pub(in crate::gate) struct Refusal {
    pub(in crate::gate) problem: Problem,
    /// Whether the request is known to carry a key, be it a malformed one.
    pub(in crate::gate) has_key: bool,
}

/// Why a request is forwarded without protection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unprotected {
    /// `mode = "pass"`
    Mode,
    /// `mode = "observe"`
    Observed,
    /// It carries no key, and needs none.
    NoKey,
}

/// A request to be admitted.
pub(in crate::gate) struct Candidate<'a> {
    head: &'a Head,
    /// Whether it asks for an upgrade that is allowed.
    asks_upgrade: bool,
    /// Whether it lacks a part of a scope that it must have. A question of `explain` that leaves the part open does not lack it.
    lacks: &'a (dyn Fn(&ScopePart) -> bool + Sync),
}

impl<'a> Candidate<'a> {
    /// A request that a connection has brought.
    pub(in crate::gate) fn new(head: &'a Head) -> Self {
        Self { head, asks_upgrade: head.upgrade.is_some(), lacks: &|_| true }
    }

    /// A request that `explain` describes.
    pub(in crate::gate) fn asked_about(
        head: &'a Head,
        asks_upgrade: bool,
        lacks: &'a (dyn Fn(&ScopePart) -> bool + Sync),
    ) -> Self {
        Self { head, asks_upgrade, lacks }
    }

    /// What becomes of the request, by its head.
    pub(in crate::gate) fn admit<'r>(&self, router: &'r Router) -> Admission<'r> {
        match router.choose(&self.head.method, self.head.authority(), self.head.uri.path()) {
            Err(ambiguous) => Admission::Ambiguous(ambiguous),
            Ok(None) => Admission::Unrouted,
            Ok(Some(route)) => Admission::Routed(route, self.step(route)),
        }
    }

    /// What its route does with the request, by its head.
    pub(in crate::gate) fn step(&self, route: &Route) -> Step {
        match route.policy.mode {
            Mode::Pass => Step::Forward(Unprotected::Mode),
            Mode::Observe => Step::Forward(Unprotected::Observed),
            Mode::Protect | Mode::Accept => self.protected_step(route),
        }
    }

    /// What a route that protects does with the request, by its head.
    pub(in crate::gate) fn protected_step(&self, route: &Route) -> Step {
        // An upgrade without a body has all of it already; the body of any other is not waited for.
        let body = (self.asks_upgrade && !announces_body(&self.head.headers)).then_some(&[][..]);
        match route.policy.key.find(&self.head.uri, &self.head.headers, body) {
            Err(invalid) => refuse(Problem::new(Code::KeyInvalid, invalid.to_string()), true),
            Ok(Found::Absent) => without_key(route),
            Ok(Found::NeedsBody) if self.asks_upgrade => refuse(request::upgrade_with_body(), false),
            Ok(_) if self.asks_upgrade => refuse(request::upgrade_with_key(), true),
            Ok(found) if route.policy.scope.has_jwt_claims() && !self.head.is_token_known() => {
                Step::Verify { has_key: found != Found::NeedsBody }
            }
            Ok(Found::NeedsBody) => Step::NeedBody,
            Ok(found) => self.protect(route, found),
        }
    }

    /// What its route does with the request, by the body that it needed.
    pub(in crate::gate) fn with_body(&self, route: &Route, body: &[u8]) -> Step {
        match route.policy.key.find(&self.head.uri, &self.head.headers, Some(body)) {
            Err(invalid) => refuse(Problem::new(Code::KeyInvalid, invalid.to_string()), true),
            Ok(Found::Absent | Found::NeedsBody) => without_key(route),
            Ok(found) => self.protect(route, found),
        }
    }

    /// What its route does with the request, whose key was found and whose token was verified.
    pub(in crate::gate) fn protect(&self, route: &Route, found: Found) -> Step {
        if let Some(part) = route.policy.scope.unfit(self.head.caller()) {
            return refuse(request::claim_unfit(part), true);
        }
        match route.policy.scope.missing(self.head.caller()).find(|part| (self.lacks)(part)) {
            Some(part) => refuse(request::scope_missing(part), true),
            None => Step::Protect(found),
        }
    }
}

impl Step {
    /// Whether the request is known to carry a key for a route that protects it.
    pub(in crate::gate) fn has_key(&self) -> bool {
        match self {
            Self::Refuse(refusal) => refusal.has_key,
            Self::Verify { has_key } => *has_key,
            Self::Protect(_) => true,
            Self::Forward(_) | Self::NeedBody => false,
        }
    }
}

fn without_key(route: &Route) -> Step {
    if route.policy.key.required {
        return refuse(request::key_missing(&route.policy.key), false);
    }
    Step::Forward(Unprotected::NoKey)
}

fn refuse(problem: Problem, has_key: bool) -> Step {
    Step::Refuse(Refusal { problem, has_key })
}
