//! Routes that are accepted, and probably protect less than they were meant to.

use std::sync::Arc;
use std::time::Duration;

use http::header::COOKIE;
use http::{HeaderName, Method};

use super::super::declare::Keys;
use super::super::node::Table;
use super::super::preset::Preset;
use super::super::suggest::nearest;
use super::super::units::show_duration;
use crate::idempotency::delivery::Deliver;
use crate::idempotency::grpc::Status;
use crate::idempotency::key::{KeyRule, KeySource};
use crate::idempotency::policy::{Cors, Mode, Policy, StoreFailure};
use crate::idempotency::recovery::{Probe, Recovery};
use crate::idempotency::scope::ScopePart;
use crate::idempotency::settle::OutcomeAction;
use crate::route::Route;

/// Headers with a value for each request, by their last words: `request-id` is `X-Request-Id` too.
const EACH_REQUEST: &str = "request-id requestid correlation-id correlationid invocation-id transaction-id trace-id traceid \
    trace-context traceparent tracestate span-id spanid spancontext parent-id b3 baggage sampled ray date \
    timestamp request-time request-start queue-start nonce dpop signature signature-input digest content-md5 \
    content-sha256 content-length retry-count attempt";

/// Headers with another value in each try of one request, where programs set them and not people.
const EACH_TRY: [&str; 4] = ["traceparent", "b3", "x-b3-spanid", "date"];

/// Headers that name the client's software or what it asks for.
const CLIENT: [&str; 7] =
    ["user-agent", "accept", "accept-encoding", "accept-language", "content-type", "referer", "sec-ch-ua"];

/// Headers that many requests of a client have the same value of.
const MANY_REQUESTS: [&str; 10] = [
    "authorization",
    "connection",
    "content-encoding",
    "content-length",
    "cookie",
    "host",
    "origin",
    "tracestate",
    "transfer-encoding",
    "x-b3-traceid",
];

/// The keys of a policy that count for requests that are forwarded unprotected: `scope` says whose memory their bodies take.
const PASSING: [&str; 4] = ["mode", "scope", "docs", "cors"];

/// Headers that list the proxies on the way.
const PROXIES: [&str; 3] = ["x-forwarded-for", "forwarded", "via"];

/// The methods of RFC 9110, section 9, and RFC 5789 that a route may have.
const USUAL_METHODS: [&str; 8] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"];

/// Other methods that IANA has registered, and that are near to one of those.
const REGISTERED: [&str; 4] = ["PRI", "COPY", "LOCK", "MOVE"];

/// Advises against a method that is nearly a usual one: its route protects nothing that comes by that.
pub(super) fn on_methods(table: &Table<'_>, route: &str, methods: &[Method]) {
    for method in methods.iter().map(Method::as_str) {
        if USUAL_METHODS.contains(&method) || REGISTERED.contains(&method) {
            continue;
        }
        let has = |usual: &&str| methods.iter().any(|method| method.as_str() == *usual);
        if let Some(usual) = nearest(method, USUAL_METHODS).filter(|usual| !has(usual)) {
            let message = format!("route `{route}` takes {method} requests, and no {usual}");
            table.advise("methods", format!("{message}; did you mean \"{usual}\"?"));
        }
    }
}

/// Advises against parts of a scope that a retry has another value of, and against the key itself as one.
pub(super) fn on_scope(table: &Table<'_>, route: &str, policy: &Policy) {
    for word in policy.scope.words().filter(|word| word.is_optional) {
        if let ScopePart::Cookie(name) = &word.part {
            let message =
                format!("route `{route}` is scoped by {word}, which an answer can set while its client has none");
            let effect = "if that answer is cut off, the retry carries the cookie, is another caller, and runs again";
            let instead = format!("write \"cookie:{name}\", which refuses requests without it");
            table.advise("scope", format!("{message}: {effect}; {instead}"));
        }
    }
    for part in policy.scope.iter() {
        let Some(name) = header_of(part) else { continue };
        if is_key(name, policy) {
            let message =
                format!("route `{route}` is scoped by {part}, which is the key itself: it tells no callers apart");
            table.advise("scope", format!("{message}; name what stays the same for one caller"));
        } else if let Some((what, instead)) = changes(name) {
            let message = format!("route `{route}` is scoped by {part}, which {what}");
            let effect = "a retry that carries another value is another caller and runs again";
            table.advise("scope", format!("{message}: {effect}; {instead}"));
        }
    }
}

/// The header whose value is a part of the scope as it stands.
fn header_of(part: &ScopePart) -> Option<&HeaderName> {
    match part {
        ScopePart::Header(name) => Some(name),
        _ => None,
    }
}

fn is_key(name: &HeaderName, policy: &Policy) -> bool {
    let is_source = policy.key.from.iter().flat_map(KeySource::headers).any(|other| other == name);
    is_source || ends_with_words(name, "idempotency-key")
}

/// Why the value of a header changes although the caller stays the same, and what to write instead.
fn changes(name: &HeaderName) -> Option<(&'static str, &'static str)> {
    if EACH_REQUEST.split(' ').any(|words| ends_with_words(name, words)) {
        return Some(("has a value for each request", "name what stays the same for one caller"));
    }
    if CLIENT.contains(&name.as_str()) {
        return Some(("tells clients apart and not callers", "name what stays the same for one caller"));
    }
    if PROXIES.contains(&name.as_str()) {
        return Some(("lists the proxies on the way", "write \"client-ip\" for the client's address"));
    }
    (*name == COOKIE).then_some(("has every cookie", "name the one that stays, such as \"cookie:session\""))
}

/// Whether a header's name is these words, or ends with them.
fn ends_with_words(name: &HeaderName, words: &str) -> bool {
    name.as_str().strip_suffix(words).is_some_and(|before| before.is_empty() || before.ends_with('-'))
}

/// Advises against keys that different requests share, and against keys whose value changes in a retry.
pub(super) fn on_keys(table: &Table<'_>, route: &str, policy: &Policy) {
    for source in &policy.key.from {
        let KeySource::Header(name) = source else { continue };
        let is_one_of = |known: &[&str]| known.contains(&name.as_str());
        if is_one_of(&EACH_TRY) {
            let message = format!("route `{route}` reads its keys from {source}, which has another value in each try");
            let instead = "name a header that a retry carries with the same value";
            table.advise("key", format!("{message}: a retry runs again; {instead}"));
        }
        if is_one_of(&MANY_REQUESTS) || is_one_of(&CLIENT) || is_one_of(&PROXIES) {
            let message =
                format!("route `{route}` reads its keys from {source}, which different requests have in common");
            let effect = "each but the first gets 422 `key-reused` or the answer of another";
            table.advise(
                "key",
                format!("{message}: {effect}; name a header in which the client sends a new value for each operation"),
            );
        }
    }
}

/// From here on, two requests that are meant to be two are probably taken for one.
const LONG_FOR_FINGERPRINTS: Duration = Duration::from_secs(3600);

/// Advises against keys that are fingerprints for as long as other keys last. A route with a `ttl` of its own is left alone.
pub(super) fn on_fingerprint_keys(table: &Table<'_>, route: &str, policy: &Policy) {
    let is_chosen = ["ttl", "preset"].iter().any(|key| table.get(key).is_some());
    if policy.key.from.contains(&KeySource::Fingerprint) && policy.ttl > LONG_FOR_FINGERPRINTS && !is_chosen {
        let ttl = show_duration(policy.ttl);
        let effect = format!("a caller that means the same twice within {ttl} gets the first answer again");
        table.advise(
            "key",
            format!(
                "route `{route}` takes an equal request for a retry: {effect}; write the `ttl` of this route, such as \"10m\": how \
                 long its clients retry"
            ),
        );
    }
}

/// Advises to require keys that stand in JSON bodies: a body that cannot be read has none. Where it is written whether keys are
/// required, nothing is advised.
pub(super) fn on_json_keys(table: &Table<'_>, route: &str, policy: &Policy) {
    let rule = &policy.key;
    // Every request has a fingerprint.
    let may_lack_key = rule.from.iter().any(KeySource::may_need_body) && !rule.from.contains(&KeySource::Fingerprint);
    if policy.mode == Mode::Protect && may_lack_key && !rule.required {
        let message =
            format!("route `{route}` reads keys from JSON bodies, and a body with a `Content-Encoding` has none");
        let effect = "such a request is forwarded unprotected, and nothing marks it";
        table.advise("key", format!("{message}: {effect}; write key.required = true, or false if this is wanted"));
    }
}

/// Advises against a release where the upstream may have done its work.
pub(super) fn on_outcomes(table: &Table<'_>, route: &str, policy: &Policy) {
    let is_success = |status: &u16| (200..300).contains(status);
    let exact =
        policy.outcomes.status.iter().any(|(status, action)| is_success(status) && *action == OutcomeAction::Release);
    if exact || policy.outcomes.class.get(&2) == Some(&OutcomeAction::Release) {
        table.advise(
            "outcomes",
            format!("route `{route}` releases the key of a success: each retry of a request that succeeded runs again"),
        );
    }
    for (word, action) in [("timeout", policy.outcomes.timeout), ("broken", policy.outcomes.broken)] {
        if action == Some(OutcomeAction::Release) {
            table.advise(
                "outcomes",
                format!(
                    "route `{route}` has {word} = \"release\": such an attempt may have taken effect, and may still run, and a \
                     retry runs again; \"hold\" keeps the key until an operator or a probe says what became of it"
                ),
            );
        }
    }
}

/// Advises against deliveries that go on after an attempt which may have taken effect, and against a queue that nothing limits. A
/// route that says what its 5xx mean is left alone.
pub(super) fn on_deliveries(table: &Table<'_>, route: &str, policy: &Policy) {
    if !policy.accepts() {
        return;
    }
    let key = if policy.mode == Mode::Accept { "mode" } else { "async" };
    if policy.quota.is_none() {
        let message = format!("route `{route}` accepts requests, and nothing limits how many wait in the store");
        table.advise(
            key,
            format!("{message} while the upstream is away; write a quota, such as quota = {{ new_keys = 1000, per = \"1m\" }}"),
        );
    }
    let outcomes = &policy.outcomes;
    let is_said = outcomes.class.contains_key(&5) || outcomes.status.range(500..600).next().is_some();
    if !is_said {
        let message = format!("route `{route}` accepts requests, and delivers one again by itself after an answer 5xx");
        table.advise(
            key,
            format!(
                "{message} other than 502 and 504: if the upstream may have done its work by then, write outcomes = \
                 {{ \"5xx\" = \"hold\" }}; if it never has, write \"release\" there"
            ),
        );
    }
}

/// Advises against a 202 for what a sender delivers: it counts that as handled, and does not deliver again what the upstream refuses.
pub(super) fn on_accepted_events(table: &Table<'_>, route: &str, policy: &Policy, preset: Preset) {
    if policy.mode != Mode::Accept {
        return;
    }
    if let Some(preset) = preset.of_sender() {
        let message =
            format!("route `{route}` accepts events (preset `{preset}`), and their sender counts each 202 as handled");
        let effect = "one that is given up is not sent again, and a signature may be too old when it is delivered";
        table.advise("mode", format!("{message}: {effect}; let the route protect"));
    }
}

/// What libraries and proxies make of a call that was cut off, too: the service may have done its work.
const CUT_OFF: [Status; 5] =
    [Status::Cancelled, Status::Unknown, Status::DeadlineExceeded, Status::Internal, Status::DataLoss];

/// The same of calls.
pub(super) fn on_calls(table: &Table<'_>, route: &str, policy: &Policy) {
    for status in CUT_OFF.into_iter().filter(|status| policy.outcomes.grpc.get(status) == Some(&OutcomeAction::Release))
    {
        let name = status.name();
        table.advise(
            "outcomes",
            format!(
                "route `{route}` has \"grpc:{name}\" = \"release\": libraries and proxies also give {name} for calls that were cut \
                 off, which may have taken effect, and a retry runs again; leave it out unless the service gives it before it \
                 does anything"
            ),
        );
    }
}

/// Keys of `deliver` that messages do not keep to.
const OF_ACCEPTED: [&str; 4] = ["timeout", "concurrency", "rate", "order"];

/// Says which keys of a route's own do nothing, because of its `mode`. A key of `[defaults]` may serve other routes, and one with the
/// value that it has anyway, as `config print` writes it, asks for nothing. Messages of consumers keep to `deliver` where a route
/// accepts no requests.
pub(super) fn on_idle_keys(table: &Table<'_>, route: &str, policy: &Policy, base: &Policy, has_consumers: bool) {
    let passing = || Policy::KEYS.iter().map(|key| key.name).filter(|name| !PASSING.contains(name)).collect();
    let (idle, why) = match policy.mode {
        Mode::Pass => (passing(), "forwards its requests unprotected"),
        Mode::Observe => (vec!["async", "deliver", "quota", "reauthorize", "store_failure"], "only observes"),
        Mode::Protect if !policy.accepts() && !has_consumers => {
            (vec!["deliver"], "accepts no requests; write async = \"allow\", or mode = \"accept\"")
        }
        Mode::Protect => (vec![], ""),
        Mode::Accept => (vec!["async", "body", "in_flight"], "accepts every request"),
    };
    let key = table.table("key", KeyRule::SECTION);
    if policy.mode == Mode::Accept && key.get("required").is_some() && !policy.key.required {
        key.advise("required", format!("`key.required` has no effect: route `{route}` {why}, and each needs a key"));
    }
    for key in idle.into_iter().filter(|key| table.get(key).is_some() && is_changed(key, policy, base)) {
        table.advise(key, format!("`{key}` has no effect: route `{route}` {why}"));
    }
    let cors = table.table("cors", Cors::SECTION);
    if policy.mode == Mode::Observe && policy.cors.preflight && cors.get("preflight").is_some() {
        let why = "pages get nothing from the gate that they would get with mode = \"protect\" or \"pass\"";
        cors.advise("preflight", format!("`cors.preflight` has no effect: route `{route}` only observes; {why}"));
    }
    if policy.mode == Mode::Protect && !policy.accepts() && has_consumers && table.get("deliver").is_some() {
        let deliver = table.table("deliver", Deliver::SECTION);
        let is_changed = |key: &&str| is_changed(key, &policy.deliver, &base.deliver);
        for key in OF_ACCEPTED.into_iter().filter(|key| deliver.get(key).is_some()).filter(is_changed) {
            let why = "accepts no requests, and messages do not keep to it";
            deliver.advise(key, format!("`deliver.{key}` has no effect: route `{route}` {why}"));
        }
    }
}

/// Whether a key has another value than it would have by itself.
fn is_changed<K: Keys>(key: &str, now: &K, base: &K) -> bool {
    let value = |keys: &K| keys.print().into_iter().find(|(name, _)| *name == key).map(|(_, value)| value.to_string());
    value(now) != value(base)
}

/// Advises against what cannot do what it says.
pub(super) fn on_effects(table: &Table<'_>, route: &str, policy: &Policy, timeout: Option<Duration>) {
    if policy.mode == Mode::Accept && policy.store_failure == StoreFailure::Forward {
        let why = "what is accepted is kept in the store: while it is away, requests get 503 all the same";
        table.advise(
            "store_failure",
            format!("route `{route}` has store_failure = \"forward\" and accepts requests; {why}"),
        );
    }
    // With "retry", a retry runs beside such an attempt anyway.
    if let Some(timeout) = timeout.filter(|timeout| policy.unknown_ttl <= *timeout)
        && policy.mode.protects()
        && !matches!(policy.recovery, Recovery::Retry)
    {
        let (kept, timeout) = (show_duration(policy.unknown_ttl), show_duration(timeout));
        let message =
            format!("route `{route}` forgets an unknown outcome after {kept}, and an attempt may take {timeout}");
        let effect = "a retry may run again while the first attempt still runs";
        table.advise("unknown_ttl", format!("{message}: {effect}; write more than {timeout}"));
    }
    if let (Recovery::Probe(probe), Some(timeout)) = (&policy.recovery, timeout)
        && probe.after.unwrap_or(timeout) >= policy.unknown_ttl
    {
        let (after, kept) = (show_duration(probe.after.unwrap_or(timeout)), show_duration(policy.unknown_ttl));
        let message =
            format!("route `{route}` may ask about an unknown outcome after {after}, and forgets it after {kept}");
        table.advise("recovery", format!("{message}: it never asks, and a retry after that runs again"));
    }
    if let Recovery::Probe(Probe { every: Some(every), .. }) = &policy.recovery
        && *every >= policy.unknown_ttl
    {
        let (every, kept) = (show_duration(*every), show_duration(policy.unknown_ttl));
        let message =
            format!("route `{route}` asks about unknown outcomes every {every}, and forgets them after {kept}");
        table.advise("recovery", format!("{message}: some are never asked about"));
    }
}

/// Advises against a route for the items of a collection where no route takes the collection: creating an item is usually
/// a POST to it. `tables` and `routes` are in the same order; `is_forwarded` is whether anything takes what no route does.
pub(super) fn on_collections(tables: &[Table<'_>], routes: &[Arc<Route>], is_forwarded: bool) {
    let posts = |route: &Route| route.methods.contains(&Method::POST);
    for (table, route) in tables.iter().zip(routes) {
        let Some(collection) = route.path.collection() else { continue };
        if !is_of_items(collection) {
            continue;
        }
        // A parameter in its text is a segment that only a parameter matches.
        let is_taken = |other: &Arc<Route>| {
            posts(other) && (other.path.matches(collection) || other.path.matches(&format!("{collection}/")))
        };
        if !route.policy.mode.protects() || !posts(route) || routes.iter().any(is_taken) {
            continue;
        }
        let fate = if is_forwarded { "which is forwarded unprotected here" } else { "which gets 404 `no-route` here" };
        table.advise(
            "path",
            format!(
                "no route takes POST {collection}: route `{}` is for what stands below it, and creating is usually a POST \
                 to the collection, {fate}; add a route with path = \"{collection}\", or write \
                 \"{collection}/{{*rest}}\" for both",
                route.name
            ),
        );
    }
}

/// Whether the path of what may be a collection ends with a name for one: not with a version, and not with that of a gRPC
/// service, below which the methods stand.
fn is_of_items(collection: &str) -> bool {
    let (above, name) = collection.rsplit_once('/').unwrap_or(("", collection));
    let is_version = name.strip_prefix('v').is_some_and(|rest| rest.starts_with(|char: char| char.is_ascii_digit()));
    let is_service = above.is_empty() && name.contains('.');
    !is_version && !is_service && name != "api"
}
