//! Sentences of an explanation, and what it says only where it is not the usual.

use http::request::Parts;

use crate::config::Resolved;
use crate::http::headers::{ATTEMPT, OwnHeaders};
use crate::http::problem::Problem;
use crate::idempotency::fingerprint::BytewiseReason;
use crate::idempotency::key::title_case;
use crate::idempotency::key::{Found, KeyRule, KeySource};
use crate::idempotency::media;
use crate::idempotency::policy::Policy;
use crate::idempotency::request_time::RequestTimeFault;
use crate::route::Route;
use crate::telemetry::wall_clock;

/// The status of a problem, as its client gets it.
pub(super) fn shown_status(problem: &Problem, head: &Parts) -> String {
    match media::is_grpc_call(&head.method, &head.headers) {
        true => format!("gRPC status {}", problem.call_status().name()),
        false => problem.code.status().as_u16().to_string(),
    }
}

/// What a request has for each part of a template; nothing for another source.
pub(super) fn template_parts(source: &KeySource, rule: &KeyRule, (head, body): (&Parts, &[u8])) -> Vec<String> {
    let KeySource::Template(template) = source else { return Vec::new() };
    let part = |part: &KeySource| {
        let alone = KeyRule { from: vec![part.clone()], ..rule.clone() };
        let what = match alone.find(&head.uri, &head.headers, Some(body)) {
            Ok(Found::Key(key)) => key.as_str().to_owned(),
            Ok(_) => "nothing there, so the template yields no key".to_owned(),
            Err(_) => "not well-formed".to_owned(),
        };
        format!("  {part}: {what}")
    };
    template.sources().map(part).collect()
}

/// What the upstream gets of the key and of the attempt, as labels and texts.
pub(super) fn own_headers(config: &Resolved, head: &Parts) -> Vec<(&'static str, String)> {
    let OwnHeaders { attempt, key } = &config.gate.own_headers;
    let key = key.as_ref().map(|name| {
        let instead = if head.headers.contains_key(name) { ", in place of the client's own" } else { "" };
        ("", format!("the upstream gets it as {} too{instead}", title_case(name)))
    });
    let attempt = match attempt {
        Some(name) if *name == ATTEMPT => None,
        Some(name) => Some(("attempt", format!("the upstream gets its token as {}", title_case(name)))),
        None => Some(("attempt", "the upstream does not get its token: headers.attempt is false".to_owned())),
    };
    key.into_iter().chain(attempt).collect()
}

/// Whether a request is young enough to run, where its route asks.
pub(super) fn request_time(policy: &Policy, head: &Parts) -> Option<String> {
    let rule = policy.request_time.as_ref()?;
    let name = &rule.from;
    let would = match rule.judge(&head.headers, wall_clock()) {
        Ok(()) => "it may run now",
        Err(RequestTimeFault::Missing) => "it is not there, so the request does not run: 400 request-expired",
        Err(RequestTimeFault::Unreadable) => "it is not one time, so the request does not run: 400 request-expired",
        Err(RequestTimeFault::Old { .. }) => "it is too old to run by now: 400 request-expired",
        Err(RequestTimeFault::Ahead { .. }) => "it is too far ahead to run now: 400 request-expired",
    };
    Some(format!("header:{name}: {would}; a retry of what ran gets its answer all the same"))
}

/// Why a body counts byte for byte.
pub(super) fn bytewise_reason(because: BytewiseReason) -> &'static str {
    match because {
        BytewiseReason::Asked => "byte for byte, as fingerprint.body says",
        BytewiseReason::Coded => "byte for byte, because it is coded (Content-Encoding)",
        BytewiseReason::Type => "byte for byte, as its type is neither JSON nor multipart",
        BytewiseReason::NoBoundary => "byte for byte, because its Content-Type has no boundary that can be read",
        BytewiseReason::Malformed => "byte for byte, because it is not of the form that it should be of",
        BytewiseReason::TooDeep => "byte for byte, because its JSON nests too deep",
        BytewiseReason::Ambiguous => "byte for byte, because its JSON has a name that stands twice",
    }
}

/// The methods, host and path of a route.
pub(super) fn pattern(route: &Route) -> String {
    let methods: Vec<&str> = route.methods.iter().map(http::Method::as_str).collect();
    let host = route.host.as_deref().map_or_else(String::new, |host| format!("{host} "));
    format!("{} {host}{}", methods.join("|"), route.path)
}
