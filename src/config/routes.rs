//! `[[routes]]`

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use serde_json::json;
use toml_edit::{ArrayOfTables, Item};

use super::declare::Shown::{Example, Required};
use super::declare::{Keys as _, Section, keys};
use super::headers;
use super::kinds::{Shape, filled, raw, text, text_as};
use super::node::{Node, Table, Wrong};
use super::policy::{self, PartialPolicy};
use super::preset::Preset;
use super::problem::Place;
use super::store::{NAME, name, parse_name};
use super::units;
use super::upstreams::{self, Upstreams};
use crate::idempotency::key::KeySource;
use crate::idempotency::policy::{Mode, Policy};
use crate::idempotency::recovery::{Probe, Recovery};
use crate::idempotency::scope::ScopePart;
use crate::route::{Overlap, Pattern, Route, Router};

mod advice;
#[cfg(test)]
mod tests;

keys! {
    /// The routes that protect. Without any route, one named "default" takes every POST and PATCH. Otherwise, of the routes that
    /// match, the one with the most specific path wins, then the one with a named host; two that overlap with equal
    /// specificity are an error.
    pub(super) struct Keys "[[routes]]" {
        /// Its name in logs, metrics and records; its records are kept under this name unless `namespace` is set.
        name: Option<Arc<str>> = None => text(format!("^(?!-$){NAME}"), route_name).optional(), Required("\"create-charge\"");
        /// Routes with the same namespace share their records. They need the same scope and key.from.
        namespace: Option<Arc<str>> = None => name().optional(), Example("\"charges\"");
        /// The methods it matches.
        methods: Vec<Method> = vec![Method::POST, Method::PATCH]
            => filled("write [\"POST\", \"PATCH\"], or remove it", text(METHOD, method));
        /// The host it matches, exact and without port; "*" is any.
        host: Option<String> = None
            => text_as(HOST, host, |host| host.as_deref().unwrap_or("*").to_owned());
        /// The path it matches, byte for byte: {x} is one segment, {*rest} is everything that follows, or nothing:
        /// "/v1/orders/{*rest}" is "/v1/orders" and everything below it.
        path: Option<Pattern> = None => text(PATH, path).optional(), Required("\"/v1/charges/{id}/capture\"");
        /// The upstream it goes to. If omitted, the only upstream.
        upstream: Option<String> = None => raw(upstreams::NAME).optional(), Example("\"app\"");
    }
}

/// A route has its own keys, and those of a policy.
pub(super) const SECTION: &Section = &Section {
    name: Keys::SECTION.name,
    about: Keys::SECTION.about,
    groups: &[Keys::KEYS, Preset::KEYS, Policy::KEYS],
};

/// `[[routes]]` in the schema. Where a route lacks a key of a policy, `[defaults]` applies.
pub(super) fn shape() -> Shape {
    fn without_defaults(shape: &mut Shape) {
        let Some(shape) = shape.as_object_mut() else { return };
        shape.remove("default");
        let inner = shape.get_mut("properties").and_then(Shape::as_object_mut);
        inner.into_iter().flat_map(|inner| inner.values_mut()).for_each(without_defaults);
    }
    let mut route = SECTION.shape();
    Policy::KEYS.iter().for_each(|key| without_defaults(&mut route["properties"][key.name]));
    json!({ "type": "array", "items": route })
}

const METHOD: &str = "^(?!(CONNECT|ANY|ALL|\\*)$)[!#$%&'*+.^_`|~0-9A-Z-]+$";

/// A host without port, or `*`.
const HOST: &str = r"^(?!_$)(\*|([A-Za-z0-9_-]+\.)*[A-Za-z0-9_-]+\.?|\[[0-9A-Fa-f:.]+\])$";

/// A path pattern: literals, `{x}` and, at the end, `{*rest}`. No literal looks like `:id`, a glob or a regular expression.
const PATH: &str = concat!(
    r"^(?=/)(?!.*(\$$|\+(/|$)|\.\+))",
    r"(/(?!\.{1,2}(/|$)|\(|:[A-Za-z_])(([A-Za-z0-9._~!$&'()+,;=:@-]|%[0-9A-F]{2})*|\{[A-Za-z0-9_-]+\}))*",
    r"(/\{\*[A-Za-z0-9_-]+\})?$",
);

/// Routes that could be read, each with the table that it was read from.
type Read<'a> = Vec<(Table<'a>, Route)>;

/// `[defaults]`
struct Defaults {
    preset: Preset,
    /// What applies to a route without a preset of its own.
    filled: PartialPolicy,
    /// What applies to one with a preset of its own: nothing of that of `[defaults]`.
    plain: PartialPolicy,
    /// Whether there are consumers, whose routes keep to `deliver` without accepting requests.
    has_consumers: bool,
    /// Whether the upstreams see each key in the header `headers.forward_key_as`.
    forwards_key: bool,
}

impl Defaults {
    fn read(root: &Table<'_>, table: &Table<'_>) -> Self {
        let (preset, built_in) = (Preset::of(table), PartialPolicy::default());
        // What is wrong is reported once: a problem that is found again is dropped.
        let [filled, plain] = [preset.over(&built_in), built_in].map(|base| policy::read(table, &base));
        let has_consumers = root.get("consumers").is_some();
        Self { preset, filled, plain, has_consumers, forwards_key: headers::forwards_key(root) }
    }

    /// The preset of a route, and what applies where the route says nothing.
    fn of_route(&self, table: &Table<'_>) -> (Preset, PartialPolicy) {
        let own = Preset::of(table);
        if own.is_named() { (own, own.over(&self.plain)) } else { (self.preset, self.filled.clone()) }
    }
}

/// Reads `[defaults]` and `[[routes]]`, with the place of each route. Where there are no routes, one protects every POST
/// and PATCH, and stands nowhere.
pub(super) fn read(root: &Table<'_>, upstreams: &Upstreams) -> (Router, Vec<Place>) {
    let table = root.table("defaults", policy::SECTION);
    let defaults = Defaults::read(root, &table);
    let tables = root.tables("routes", SECTION).unwrap_or_default();
    if tables.is_empty() {
        return (only_route(root, &table, defaults, upstreams), Vec::new());
    }
    check_names(&tables);
    let mut printed = ArrayOfTables::new();
    let read: Read<'_> = tables
        .into_iter()
        .filter_map(|table| {
            let route = one(&table, &defaults, upstreams, &mut printed)?;
            Some((table, route))
        })
        .collect();
    root.print("routes", Item::ArrayOfTables(printed));
    check_namespaces(&read);
    advise_on_credential(read.iter().map(|(table, route)| (table, &route.policy)));
    let (tables, routes): (Vec<_>, Vec<_>) = read.into_iter().unzip();
    let names: Vec<Arc<str>> = routes.iter().map(|route| Arc::clone(&route.name)).collect();
    match Router::new(routes) {
        Ok(router) => {
            let is_forwarded = upstreams::default(root, upstreams).is_some();
            advise_on_the_rest(root, &router, is_forwarded);
            advice::on_collections(&tables, router.routes(), is_forwarded);
            (router, tables.iter().map(Table::place).collect())
        }
        Err(overlaps) => {
            overlaps.into_iter().for_each(|overlap| report_overlap(&tables, &names, overlap));
            (Router::default(), Vec::new())
        }
    }
}

/// Requests that match no route are forwarded as they are, which may surprise where a first route was added.
fn advise_on_the_rest(root: &Table<'_>, router: &Router, is_forwarded: bool) {
    let protects_the_rest = |route: &Arc<Route>| {
        route.path.to_string().starts_with("/{*") && route.host.is_none() && route.methods.contains(&Method::POST)
    };
    if is_forwarded && !router.routes().iter().any(protects_the_rest) {
        let what = "requests that match no route are forwarded unprotected, with a key or without";
        let instead = "a route with path = \"/{*rest}\" would protect the rest";
        root.advise("routes", format!("{what}; {instead}"));
    }
}

/// A credential may be an opaque token, which tells no more than itself. Once for all routes: most have the default scope.
fn advise_on_credential<'a>(policies: impl IntoIterator<Item = (&'a Table<'a>, &'a Policy)>) {
    let has_credential = |policy: &Policy| policy.mode.protects() && policy.scope.contains(&ScopePart::Credential);
    if let Some((table, _)) = policies.into_iter().find(|(_, policy)| has_credential(policy)) {
        table.advise(
            "scope",
            "keys belong to credentials: a refreshed opaque token (anything but Bearer with a JWT that has a sub) is another caller, and its retry \
             runs again; if clients refresh such tokens, let scope name what stays, such as \"header:X-User\""
                .to_owned(),
        );
    }
}

/// The route of a gate that has none configured.
fn only_route(root: &Table<'_>, table: &Table<'_>, defaults: Defaults, upstreams: &Upstreams) -> Router {
    let upstream = match root.get("default_upstream") {
        Some(_) => upstreams::default(root, upstreams),
        None => upstreams.only(),
    };
    if upstream.is_none() && upstreams.names.len() > 1 {
        let wrong = Wrong::new(format!(
            "there are several upstreams ({}), and no route that names one",
            upstreams.names.join(", ")
        ));
        root.report("routes", wrong.hint("add [[routes]], or name one upstream as default_upstream"));
    }
    let Defaults { preset, filled, has_consumers, forwards_key, .. } = defaults;
    advice::on_idle_keys(table, "default", &filled.policy, &Policy::default(), has_consumers);
    advice::on_accepted_events(table, "default", &filled.policy, preset);
    check_policy(table, "default", &filled, upstreams.timeout(upstream), forwards_key);
    advise_on_credential([(table, &filled.policy)]);
    let (name, path) = (Some("default".into()), Pattern::parse("/{*rest}").ok());
    let keys = Keys { name, path, ..Keys::default() };
    let mut printed = ArrayOfTables::new();
    let route = upstream.and_then(|upstream| route(keys, upstream, preset, filled.policy, upstreams, &mut printed));
    root.print("routes", Item::ArrayOfTables(printed));
    Router::new(route.into_iter().collect()).unwrap_or_default()
}

fn one(table: &Table<'_>, defaults: &Defaults, upstreams: &Upstreams, printed: &mut ArrayOfTables) -> Option<Route> {
    table.require("route", &[("name", "write name = \"create-charge\""), ("path", "write path = \"/v1/charges\"")]);
    let keys = Keys::read(table, Keys::default());
    let upstream = upstreams::of_route(table, upstreams);
    let (preset, base) = defaults.of_route(table);
    let draft = policy::read(table, &base);
    let name = keys.name.as_deref().unwrap_or("?");
    advice::on_methods(table, name, &keys.methods);
    advice::on_idle_keys(table, name, &draft.policy, &base.policy, defaults.has_consumers);
    advice::on_accepted_events(table, name, &draft.policy, preset);
    check_policy(table, name, &draft, upstreams.timeout(upstream), defaults.forwards_key);
    // A wrong upstream is reported; the route still takes part in the checks of all routes.
    route(keys, upstream.unwrap_or_default(), preset, draft.policy, upstreams, printed)
}

/// The route of these keys, which is printed too; `None` without a name or a path.
fn route(
    mut keys: Keys,
    upstream: usize,
    preset: Preset,
    mut policy: Policy,
    upstreams: &Upstreams,
    printed: &mut ArrayOfTables,
) -> Option<Route> {
    let name = keys.name.clone()?;
    if policy.mode == Mode::Accept {
        // What is accepted is delivered later, and nothing but a key tells its retries.
        policy.key.required = true;
    }
    let namespace = Arc::clone(keys.namespace.get_or_insert_with(|| Arc::clone(&name)));
    keys.upstream = upstreams.names.get(upstream).map(ToString::to_string);
    let entries = keys.print().into_iter().chain(preset.print()).chain(policy.print());
    printed.push(entries.map(|(key, value)| (key, Item::Value(value))).collect());
    if let Recovery::Probe(probe) = &mut policy.recovery {
        probe.after = probe.after.or(upstreams.timeout(Some(upstream)));
    }
    Some(Route { name, namespace, methods: keys.methods, host: keys.host, path: keys.path?, upstream, policy })
}

fn route_name(node: &Node<'_>) -> Result<Arc<str>, Wrong> {
    match parse_name(node)? {
        name if *name == *"-" => {
            Err(Wrong::new("`-` stands for requests that match no route").hint("choose another name"))
        }
        name => Ok(name),
    }
}

fn method(node: &Node<'_>) -> Result<Method, Wrong> {
    let text = node.filled()?;
    if ["*", "ANY", "ALL"].iter().any(|every| text.eq_ignore_ascii_case(every)) {
        let wrong = Wrong::new("there is no word for every method");
        return Err(wrong.hint("list those that have an effect: [\"POST\", \"PUT\", \"PATCH\", \"DELETE\"]"));
    }
    let wrong = || Wrong::new(format!("`{text}` is not a method"));
    let upper = text.to_ascii_uppercase();
    match Method::from_bytes(text.as_bytes()) {
        Ok(Method::CONNECT) => Err(Wrong::new("CONNECT opens a tunnel and has no answer to keep").hint("remove it")),
        Ok(_) if upper != text => Err(wrong().hint(format!("did you mean \"{upper}\"? Methods are case-sensitive"))),
        Ok(method) => Ok(method),
        Err(_) => Err(wrong().hint("write a method such as \"POST\"")),
    }
}

/// Reads a host; nothing is any host.
fn host(node: &Node<'_>) -> Result<Option<String>, Wrong> {
    let text = node.filled()?;
    if text == "*" {
        return Ok(None);
    }
    let wrong = Wrong::new(format!("`{text}` is not a host name"));
    if text == "_" {
        return Err(wrong.hint("write \"*\" for any host, which is the default"));
    }
    if text.contains('*') {
        return Err(wrong.hint("a host is exact, or \"*\" for any"));
    }
    if let Some((host, port)) = text.rsplit_once(':')
        && !host.contains(':')
        && port.bytes().all(|byte| byte.is_ascii_digit())
    {
        return Err(wrong.hint(format!("write \"{host}\": a host has no port here")));
    }
    let is_name = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_'));
    let address = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let is_address = address.is_some_and(|text| text.parse::<std::net::Ipv6Addr>().is_ok());
    let name = text.strip_suffix('.').unwrap_or(text);
    if (is_name && name.split('.').all(|label| !label.is_empty())) || is_address {
        return Ok(Some(name.to_ascii_lowercase()));
    }
    Err(wrong.hint("write a name such as \"api.example.com\", or \"*\" for any"))
}

fn path(node: &Node<'_>) -> Result<Pattern, Wrong> {
    let such_as = "such as \"/v1/charges\", \"/v1/charges/{id}/capture\" or \"/v1/{*rest}\"";
    Pattern::parse(node.filled()?).map_err(|error| {
        let hint = match error.instead() {
            [] => such_as.to_owned(),
            [path] => match error.beginning() {
                Some(beginning) => format!(
                    "write \"{path}\", which takes \"{beginning}\" and what is below it; other paths that begin with \
                     \"{beginning}\" need routes of their own"
                ),
                None => format!("write \"{path}\""),
            },
            paths => format!("write a route for each: \"{}\"", paths.join("\", \"")),
        };
        Wrong::new(error.to_string()).hint(hint)
    })
}

/// An upstream that is to recognise a key has to see it. A fingerprint is the gate's own, and goes to no upstream by itself.
fn check_unseen_key(table: &Table<'_>, route: &str, policy: &Policy) {
    let mend = "name the header in which the upstream reads a key as headers.forward_key_as, or remove \"fingerprint\" from key.from";
    match &policy.recovery {
        Recovery::Resend(_) => {
            let wrong = Wrong::new("`resend` needs an upstream that sees the key, and a fingerprint does not go there");
            table.report("recovery", wrong.hint(mend));
        }
        Recovery::Probe(probe) if probe.path.has_key() => table.advise(
            "recovery",
            format!(
                "route `{route}` asks its upstream about keys that are fingerprints, which the upstream does not see: its 404 \
                 lets the request run again; {mend}"
            ),
        ),
        _ => {}
    }
}

/// What only the whole policy shows. `timeout` is the upstream's.
fn check_policy(table: &Table<'_>, route: &str, draft: &PartialPolicy, timeout: Option<Duration>, forwards_key: bool) {
    let PartialPolicy { policy, scope_is_explicit, required_is_explicit } = draft;
    if policy.mode == Mode::Pass {
        return;
    }
    if policy.key.from.contains(&KeySource::Fingerprint) && !scope_is_explicit {
        let wrong = Wrong::new("a key that is the request's own fingerprint needs a scope that is written down");
        let hint = "say who may share answers, such as scope = [\"credential\"]";
        table.report("scope", wrong.hint(hint));
    }
    if policy.mode.protects() && policy.key.from.contains(&KeySource::Fingerprint) && !forwards_key {
        check_unseen_key(table, route, policy);
    }
    check_fingerprint(table, policy);
    policy::check_request_time(table, policy);
    if let Some(timeout) = timeout.filter(|&timeout| policy.ttl <= timeout) {
        table.advise(
            "ttl",
            format!(
                "route `{route}` forgets an answer {} after its claim, and an attempt may take {}: a retry of a slow one \
                 may run again",
                units::show_duration(policy.ttl),
                units::show_duration(timeout)
            ),
        );
    }
    if let (Recovery::Probe(Probe { after: Some(after), .. }), Some(timeout)) = (&policy.recovery, timeout)
        && *after < timeout
    {
        table.advise(
            "recovery",
            format!(
                "route `{route}` asks its upstream {} after an outcome turned unknown, and an attempt may take {}: one that is \
                 still under way there may count as one that never came, and run again",
                units::show_duration(*after),
                units::show_duration(timeout)
            ),
        );
    }
    advice::on_scope(table, route, policy);
    advice::on_keys(table, route, policy);
    advice::on_fingerprint_keys(table, route, policy);
    if !required_is_explicit {
        advice::on_json_keys(table, route, policy);
    }
    advice::on_outcomes(table, route, policy);
    advice::on_deliveries(table, route, policy);
    advice::on_calls(table, route, policy);
    advice::on_effects(table, route, policy, timeout);
    let bearer = |part: &ScopePart| matches!(part, ScopePart::Header(name) if name == http::header::AUTHORIZATION);
    if policy.scope.iter().any(bearer) {
        table.advise(
            "scope",
            format!(
                "route `{route}` is scoped by the raw Authorization header: with bearer tokens, a refreshed token is \
                 another caller"
            ),
        );
    }
}

/// A fingerprint must tell requests apart; a key that is one must tell their bodies apart, or two payments would share
/// it.
fn check_fingerprint(table: &Table<'_>, policy: &Policy) {
    let recipe = &policy.fingerprint;
    if !recipe.tells_requests_apart() {
        let wrong = Wrong::new("nothing of a request counts: a key reused for another request would get its answer");
        table.report("fingerprint", wrong.hint("let `of` have \"method\" and \"path\", or let the body count"));
    } else if policy.key.from.contains(&KeySource::Fingerprint) && !recipe.tells_bodies_apart() {
        let wrong = Wrong::new("a key that is the request's own fingerprint needs one that the body counts in");
        let hint = "let `of` have \"body\" and `body` not be \"none\", or take \"fingerprint\" out of key.from";
        table.report("fingerprint", wrong.hint(hint));
    }
}

/// Reports each scope part with this prefix: the configuration lacks what the part needs.
pub(super) fn refuse_scope_parts(root: &Table<'_>, prefix: &str, wrong: impl Fn() -> Wrong) {
    let routes = root.tables("routes", SECTION).unwrap_or_default();
    for table in routes.into_iter().chain([root.table("defaults", policy::SECTION)]) {
        let parts = table.get("scope").and_then(|scope| scope.items()).unwrap_or_default();
        for part in parts.into_iter().filter(|part| part.text().is_ok_and(|text| text.starts_with(prefix))) {
            part.report(wrong());
        }
    }
}

fn check_names(tables: &[Table<'_>]) {
    let names: Vec<Option<&str>> = tables.iter().map(|table| table.get("name")?.text().ok()).collect();
    for (place, (table, name)) in tables.iter().zip(&names).enumerate() {
        let Some(name) = name else { continue };
        if let Some(first) = names[..place].iter().position(|other| *other == Some(name)) {
            let wrong = Wrong::new(format!("another route is named `{name}`, {}", at(&tables[first])));
            table.report("name", wrong.hint("give each route a name of its own; set namespace to share records"));
        }
    }
}

/// Routes that share a namespace must make the identity of a record by the same rules, or a key of one would never be
/// found by the other.
fn check_namespaces(read: &Read<'_>) {
    let protecting = || read.iter().filter(|(_, route)| route.policy.mode.protects());
    for (table, route) in protecting() {
        // The first of a namespace sets its rules.
        let Some((first, other)) = protecting().find(|(_, other)| other.namespace == route.namespace) else { continue };
        if !same_identity(&route.policy, &other.policy) {
            let wrong = Wrong::new(format!(
                "the namespace `{}` is shared with route `{}` ({}), which has another scope or key.from",
                route.namespace,
                other.name,
                at(first)
            ));
            table.report("namespace", wrong.hint("give both the same scope and key.from, or each its own namespace"));
        }
    }
}

/// Whether both make the same id of a request with the same key.
fn same_identity(one: &Policy, other: &Policy) -> bool {
    let by_fingerprint = one.key.from.contains(&KeySource::Fingerprint);
    one.scope[..] == other.scope[..]
        && one.key.from == other.key.from
        && (!by_fingerprint || one.fingerprint == other.fingerprint)
}

fn report_overlap(tables: &[Table<'_>], names: &[Arc<str>], Overlap { first, second }: Overlap) {
    let wrong = Wrong::new(format!(
        "route `{}` and route `{}` ({}) overlap with equal specificity",
        names[second],
        names[first],
        at(&tables[first])
    ));
    tables[second].report("path", wrong.hint("make their paths, hosts or methods differ"));
}

/// Where a table stands, for a sentence.
fn at(table: &Table<'_>) -> String {
    match table.place() {
        Place::File(_, Some(line)) => format!("line {line}"),
        place => place.to_string(),
    }
}
