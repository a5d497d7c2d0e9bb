//! An explanation as text, for a person at night.

use std::fmt::Write as _;
use std::sync::Arc;

use http::header::{CONTENT_TYPE, HOST};
use http::request::Parts;

use super::credential::{carrier, on_renewal};
use super::details::{bytewise_reason, own_headers, pattern, request_time, shown_status, template_parts};
use super::policy::{built_in, other_default, policy_of, preset_of, show_quota, wrapped};
use crate::config::Resolved;
use crate::gate::describe::explain::{Explanation, Fate, Handling, Identified, Unprotected, Value};
use crate::http::prefer;
use crate::http::problem::Problem;
use crate::idempotency::credential::Kind;
use crate::idempotency::fingerprint::{BodyComparison, BytewiseReason, Recipe, stands_at};
use crate::idempotency::key::{Found, KeyRule, KeySource};
use crate::idempotency::media;
use crate::idempotency::policy::Mode;
use crate::idempotency::record::Hex;
use crate::idempotency::recovery::without_query_values;
use crate::idempotency::scope::ScopePart;
use crate::route::{Ambiguous, Route, RouteMatch};

/// The request that was asked about.
pub(super) struct ExplainedRequest<'a> {
    pub(super) head: Parts,
    pub(super) body: &'a [u8],
    /// Whether the command line leaves `Content-Type` to its default.
    pub(super) type_is_default: bool,
}

/// Writes the whole.
pub(super) fn write(config: &Resolved, request: &ExplainedRequest<'_>, explanation: &Explanation) -> String {
    let mut report = Report { out: String::new(), config, request, explanation };
    report.request();
    match &explanation.fate {
        Fate::PolicyPage => {
            report.line("answer", "the policy page of [policy_page], to GET and HEAD; 405 to any other method");
            report.line("protected", "no: nothing is forwarded");
        }
        Fate::Status => {
            report.line("answer", "the status of an accepted request, to GET and HEAD of its caller; else 404 or 405");
            report.line("protected", "no: nothing is forwarded");
        }
        Fate::Malformed(problem) => report.answer(problem, None),
        Fate::Ambiguous(ambiguous, problem) => {
            report.ambiguous(ambiguous);
            report.answer(problem, None);
        }
        Fate::Unrouted(upstream) => report.unrouted(upstream),
        Fate::Routed(route, handling) => {
            report.route(route);
            report.handling(route, handling);
            report.policy(route);
            report.advice(route, handling);
        }
    }
    report.out
}

struct Report<'a> {
    out: String,
    config: &'a Resolved,
    request: &'a ExplainedRequest<'a>,
    explanation: &'a Explanation,
}

/// Where the second column begins.
const INDENT: usize = 13;

/// How many digits of a digest tell two values apart.
const SHORT: usize = 8;

impl Report<'_> {
    fn line(&mut self, label: &str, text: impl AsRef<str>) {
        let _ = writeln!(self.out, "{label:INDENT$}{}", text.as_ref());
    }

    fn more(&mut self, text: impl AsRef<str>) {
        self.line("", text);
    }

    fn gap(&mut self) {
        self.out.push('\n');
    }

    fn request(&mut self) {
        let (head, body) = (&self.request.head, self.request.body);
        let target = head.uri.path_and_query().map_or_else(|| head.uri.to_string(), ToString::to_string);
        self.line("request", format!("{} {target}", head.method));
        match &self.explanation.authority {
            Some(host) => self.more(format!("host {host}")),
            None if head.headers.contains_key(HOST) => {}
            None => self.more("host: what the client names; give it with -H 'Host: NAME' or as part of a whole URL"),
        }
        let bytes = if body.len() == 1 { "1 byte".to_owned() } else { format!("{} bytes", body.len()) };
        match head.headers.get(CONTENT_TYPE) {
            _ if body.is_empty() => self.more("no body"),
            Some(_) if self.request.type_is_default => {
                self.more(format!(
                    "body of {bytes}, application/x-www-form-urlencoded: no Content-Type was given, and"
                ));
                self.more("this is what curl -d sends; give another with -H 'Content-Type: ...'");
            }
            Some(media) => self.more(format!("body of {bytes}, {}", media.as_bytes().escape_ascii())),
            None => self.more(format!("body of {bytes}, without a Content-Type")),
        }
        self.gap();
    }

    /// What the gate answers by itself.
    fn answer(&mut self, problem: &Problem, docs: Option<&str>) {
        let code = problem.code;
        let status = shown_status(problem, &self.request.head);
        self.line("answer", format!("{status} {}: {}", code.as_str(), problem.detail));
        if let Some(docs) = docs {
            self.more(docs);
        }
        self.line("protected", "no: nothing is forwarded");
    }

    /// Both readings of a path or a method, and what each belongs to.
    fn ambiguous(&mut self, ambiguous: &Ambiguous) {
        let owner = |route: &Option<Arc<Route>>| match route {
            Some(route) => format!("{} ({}, mode {})", route.name, pattern(route), route.policy.mode.as_str()),
            None => "no route".to_owned(),
        };
        self.line("route", format!("as it stands, {}", owner(&ambiguous.route)));
        match &ambiguous.reading {
            Some(reading) => self.more(format!("read as {reading:?}, {}", owner(&ambiguous.other))),
            None => self.more("and it has more readings than are looked at"),
        }
        self.gap();
    }

    fn unrouted(&mut self, upstream: &Result<usize, Problem>) {
        self.line("route", "none matches");
        self.near_misses(None);
        match upstream {
            Ok(index) => {
                self.upstream(*index);
                let why = match self.explanation.is_preflight {
                    true => "no: a preflight is forwarded to the upstream of the request it announces",
                    false => "no: what matches no route is forwarded as it is",
                };
                self.line("protected", why);
            }
            Err(problem) => self.answer(problem, None),
        }
        self.ignored_key();
        self.preflight();
    }

    /// Says what the gate adds to the answer of a preflight.
    fn preflight(&mut self) {
        if let Some(route) = &self.explanation.preflight {
            let name = &route.name;
            self.line(
                "preflight",
                format!("for a request of the route {name}, which sets cors.preflight: the gate adds what the"),
            );
            self.more("upstream's answer lacks, such as the key's header in Access-Control-Allow-Headers");
        }
    }

    /// Says that the key does nothing, where it does.
    fn ignored_key(&mut self) {
        if self.explanation.ignores_key {
            self.more("its key is ignored, since no route protects this request; the answer and the log say so");
        }
    }

    fn route(&mut self, route: &Route) {
        self.line("route", format!("{}: {}", route.name, pattern(route)));
        let others: Vec<String> = self
            .fits()
            .filter(|(other, parts)| parts.is_whole() && other.name != route.name)
            .map(|(other, _)| format!("{} ({})", other.name, other.path))
            .collect();
        if others.is_empty() {
            self.more("the only one that matches");
        } else {
            self.more(format!("the most specific of those that match; also {}", others.join(", ")));
        }
        self.near_misses(Some(route));
        self.line("mode", route.policy.mode.as_str());
        self.upstream(route.upstream);
    }

    /// Routes that would match but for one thing, and would count before `found`.
    fn near_misses(&mut self, found: Option<&Route>) {
        let stronger = self.fits().take_while(|(other, _)| found.is_none_or(|found| other.name != found.name));
        let misses: Vec<String> = stronger.filter_map(|(other, parts)| self.near_miss(other, parts)).collect();
        for miss in misses {
            self.more(miss);
        }
    }

    fn near_miss(&self, route: &Route, parts: RouteMatch) -> Option<String> {
        let (name, shape) = (&route.name, pattern(route));
        let why = match parts {
            RouteMatch { path: true, method: false, host: true } => {
                format!("its method is not {}", self.request.head.method)
            }
            RouteMatch { path: true, method: true, host: false } => match &self.explanation.authority {
                Some(host) => format!("its host is not {host}"),
                None => "a client that names this host gets it".to_owned(),
            },
            RouteMatch { path: false, method: true, host: true } => {
                let path = self.request.head.uri.path();
                let other = path.strip_suffix('/').map_or_else(|| format!("{path}/"), ToOwned::to_owned);
                let slash = if route.path.matches(&other) { "the slash at the end counts" } else { return None };
                slash.to_owned()
            }
            _ => return None,
        };
        Some(format!("nearly {name} ({shape}): {why}"))
    }

    /// Every route, the most specific first, and what of the request it matches.
    fn fits(&self) -> impl Iterator<Item = (&Route, RouteMatch)> {
        let (method, path) = (&self.request.head.method, self.request.head.uri.path());
        let host = self.explanation.authority.as_deref();
        self.config.router.ranked().map(move |route| (&**route, route.match_parts(method, host, path)))
    }

    fn upstream(&mut self, index: usize) {
        let name = &self.config.upstreams[index].name;
        let url = self.config.effective["upstreams"][&**name]["url"].as_str().unwrap_or_default().to_owned();
        self.line("upstream", format!("{name}, {url}"));
    }

    fn handling(&mut self, route: &Route, handling: &Handling) {
        let policy = &route.policy;
        match handling {
            Handling::Passed(Unprotected::Mode | Unprotected::Observed) => {
                let mode = policy.mode.as_str();
                self.line("protected", format!("no: the route's mode is {mode:?}; it is forwarded as it is"));
                self.preflight();
            }
            Handling::Observed(protected) => {
                self.line("observed", "it is forwarded as it is, whatever follows; with mode = \"protect\":");
                self.handling(route, protected);
            }
            Handling::Passed(Unprotected::NoKey) => {
                let key = if self.explanation.ignores_key { "no key that the route reads" } else { "no key" };
                self.line("protected", format!("no: it carries {key} and needs none; it is forwarded as it is"));
                self.ignored_key();
                self.preflight();
                self.gap();
                self.sources("key", &policy.key);
            }
            Handling::Refused(problem) => {
                self.answer(problem, policy.docs.as_deref());
                self.gap();
                self.sources("key", &policy.key);
            }
            Handling::Protected(identified) => {
                let Parts { method, headers, .. } = &self.request.head;
                self.line(
                    "protected",
                    match prefer::is_to_be_accepted(policy, method, headers) {
                        true if media::is_grpc_call(method, headers) => {
                            "yes: it is kept and ended with UNAVAILABLE, and delivered later"
                        }
                        true => "yes: it is kept and answered with 202, and delivered later",
                        false => "yes: its key is claimed before anything is forwarded",
                    },
                );
                self.gap();
                self.identified(route, identified);
            }
        }
    }

    fn identified(&mut self, route: &Route, identified: &Identified) {
        self.line("key", identified.key.as_str());
        self.sources("", &route.policy.key);
        for (label, text) in own_headers(self.config, &self.request.head) {
            self.line(label, text);
        }
        if let Some(time) = request_time(&route.policy, &self.request.head) {
            self.line("time", time);
        }
        self.scope(identified);
        self.fingerprint(identified);
        route.policy.quota.iter().for_each(|quota| self.line("quota", show_quota(quota)));
        if let Some(path) = route.policy.reauthorize.as_ref().map(|path| without_query_values(path.as_str())) {
            self.line(
                "replay",
                format!("GET {path} is asked of the upstream first, with the retry's own headers: 2xx lets it"),
            );
            self.more("through; 401, 403 and 404 go to the client instead");
        }
        match identified.id {
            Some(id) => {
                self.line("record", id.to_string());
                // A shadow record has another id, and no command shows it.
                if route.policy.mode == Mode::Observe {
                    self.more("no command shows this record; oncegate observed shows what was counted");
                    return;
                }
                self.more(format!("what became of it: oncegate records show {id}"));
                if route.policy.accepts() {
                    self.more(format!("while it waits: oncegate deliveries list {}", route.name));
                }
            }
            None => {
                self.line("record", "not known: its scope is not, and its id is made of that");
            }
        }
    }

    /// Where the key was looked for, in the order in which places count, and what was there.
    fn sources(&mut self, label: &str, rule: &KeyRule) {
        let (mut label, mut decided) = (label, false);
        for source in &rule.from {
            let alone = KeyRule { from: vec![source.clone()], ..rule.clone() };
            let found = alone.find(&self.request.head.uri, &self.request.head.headers, Some(self.request.body));
            let what = match found {
                _ if decided => "not looked at",
                Ok(Found::Absent) => "nothing there",
                Ok(Found::Fingerprint) => "the key is the request's own fingerprint",
                Ok(_) if matches!(source, KeySource::CloudEvent) => "the key is a digest of the event's source and id",
                Ok(_) => "the key is from here",
                Err(_) => "not well-formed",
            };
            self.line(std::mem::take(&mut label), format!("{source}: {what}"));
            if !decided {
                let request = (&self.request.head, self.request.body);
                template_parts(source, rule, request).iter().for_each(|part| self.more(part));
            }
            decided |= !matches!(found, Ok(Found::Absent));
        }
    }

    fn scope(&mut self, identified: &Identified) {
        for (place, (word, value)) in identified.scope.iter().enumerate() {
            let what = match value {
                Value::Unknown if word.part == ScopePart::Host => "not known: what the client names".to_owned(),
                Value::Unknown if matches!(word.part, ScopePart::ClientCert(_) | ScopePart::Credential) => {
                    "not known: give the client's certificate with --client-cert FILE".to_owned()
                }
                Value::Unknown if matches!(word.part, ScopePart::JwtClaim(_)) => {
                    "not known: only a gate that runs has the keys of jwks_url".to_owned()
                }
                Value::Unknown => "not known: give it with --client-ip IP".to_owned(),
                Value::Absent => "absent, which is a value of its own".to_owned(),
                Value::Shown(text) => text.clone(),
                Value::Hidden { count: 1, digest } => format!("present, {}", short(digest)),
                Value::Hidden { count, digest } => format!("present {count} times, {}", short(digest)),
                Value::Credential { kind: Kind::Anonymous, .. } => "none".to_owned(),
                Value::Credential { kind, identity, proof } => {
                    let proof = proof.as_ref().map_or_else(String::new, |proof| format!(", proof {}", short(proof)));
                    format!("{}, identity {}{proof}", carrier(*kind), short(identity))
                }
            };
            let part = match &word.part {
                ScopePart::Const(_) => "const".to_owned(),
                _ => word.to_string(),
            };
            self.line(if place == 0 { "scope" } else { "" }, format!("{part}: {what}"));
            if let Value::Credential { kind, .. } = value {
                self.more(format!("  {}", on_renewal(*kind)));
            }
        }
    }

    fn fingerprint(&mut self, identified: &Identified) {
        let recipe = &identified.fingerprint.recipe;
        self.line("fingerprint", Hex(&identified.fingerprint.digest).to_string());
        self.more(format!("of {}", self.ingredients(recipe).join(", ")));
        let body = self.request.body;
        let how = match identified.counted {
            BodyComparison::None => return,
            _ if body.is_empty() => return self.more("body: there is none, which is one of its own"),
            BodyComparison::Json => "by the content of its JSON: white space and the order of members do not count",
            BodyComparison::JsonParts => "by the included parts of its JSON",
            BodyComparison::Multipart => "as multipart without its boundary",
            BodyComparison::Bytes(because) => bytewise_reason(because),
        };
        self.more(format!("body: {how}"));
        if !matches!(identified.counted, BodyComparison::Json | BodyComparison::JsonParts) {
            return;
        }
        if identified.counted == BodyComparison::Json && !recipe.include.is_empty() {
            self.more("it has none of the included parts, so all of it counts");
        }
        for (what, pointers) in [("included", &recipe.include), ("excluded", &recipe.exclude)] {
            for pointer in pointers {
                let there = if stands_at(pointer, body) { "" } else { ", which this body does not have" };
                self.more(format!(
                    "{what}: {}{there}",
                    if pointer.as_str().is_empty() { "everything" } else { pointer.as_str() }
                ));
            }
        }
    }

    fn ingredients(&self, recipe: &Recipe) -> Vec<String> {
        let query = match self.request.head.uri.query() {
            Some(_) => "query",
            None => "query (there is none)",
        };
        let parts = [(recipe.method, "method"), (recipe.path, "path"), (recipe.query, query), (recipe.body, "body")];
        let parts = parts.into_iter().filter(|(counts, _)| *counts).map(|(_, part)| part.to_owned());
        let headers = recipe.headers.iter().map(|name| match self.request.head.headers.contains_key(name) {
            true => format!("header:{name} (present)"),
            false => format!("header:{name} (absent)"),
        });
        parts.chain(headers).collect()
    }

    /// The whole policy as TOML, and which of it is not built in.
    fn policy(&mut self, route: &Route) {
        if route.policy.mode == Mode::Pass {
            return;
        }
        self.gap();
        self.line("policy", format!("namespace {:?}, service {:?}", route.namespace, self.config.gate.service));
        let (own, built_in) = (policy_of(self.config, &route.name), built_in());
        let preset = preset_of(self.config, &route.name);
        let (mut same, mut differs) = (Vec::new(), Vec::new());
        for entry in &own {
            let (key, value) = entry;
            let by = match &preset {
                Some((name, filled)) if filled.contains(entry) => format!("; preset {name}"),
                _ => String::new(),
            };
            match built_in.iter().find(|(other, _)| other == key).map(|(_, value)| value) {
                Some(default) if default == value => same.push(format!("{key} = {value}")),
                Some(default) => differs.push(format!("{key} = {value}   # default: {default}{by}")),
                None => differs.push(format!("{key} = {value}   {}{by}", other_default(key))),
            }
        }
        self.more(if differs.is_empty() { "nothing differs from the defaults:" } else { "differs from the defaults:" });
        differs.iter().for_each(|line| self.more(format!("  {line}")));
        if !differs.is_empty() {
            self.more("as by default:");
        }
        wrapped(&same).iter().for_each(|line| self.more(format!("  {line}")));
    }

    fn advice(&mut self, route: &Route, handling: &Handling) {
        let mut advice = Vec::new();
        let handling = match handling {
            Handling::Observed(protected) => protected,
            handling => handling,
        };
        if let Handling::Protected(identified) = handling {
            advice.extend(self.on_body(identified));
            advice.extend(on_scope(identified));
        }
        if let Handling::Passed(Unprotected::NoKey) = handling {
            advice.push("to refuse such requests, set key = { required = true } on the route".to_owned());
        }
        let place = self.config.router.routes().iter().position(|other| other.name == route.name).unwrap_or_default();
        let upstream = &self.config.upstreams[route.upstream].name;
        let about = [format!("routes[{place}]."), "defaults.".to_owned(), format!("upstreams.{upstream}.")];
        let configured = self.config.advice.iter().filter(|one| about.iter().any(|key| one.key.starts_with(key)));
        advice.extend(configured.map(|advice| format!("{}: {}: {}", advice.place, advice.key, advice.message)));
        if !advice.is_empty() {
            self.gap();
        }
        for (place, line) in advice.iter().enumerate() {
            self.line(if place == 0 { "advice" } else { "" }, line);
        }
    }

    fn on_body(&self, identified: &Identified) -> Option<String> {
        let by_bytes = matches!(identified.counted, BodyComparison::Bytes(BytewiseReason::Type));
        let is_json = matches!(self.request.body.trim_ascii_start().first(), Some(b'{' | b'['))
            && serde_json::from_slice::<serde::de::IgnoredAny>(self.request.body).is_ok();
        let advice = "the body is JSON, and its Content-Type does not say so: it counts byte for byte, so that a retry \
                      with other white space is another request; give -H 'Content-Type: application/json' if the \
                      client does";
        (by_bytes && is_json).then(|| advice.to_owned())
    }
}

fn on_scope(identified: &Identified) -> Option<String> {
    let mut callers =
        identified.scope.iter().filter(|(word, _)| !matches!(word.part, ScopePart::Host | ScopePart::Const(_)));
    let is_absent = |value: &Value| matches!(value, Value::Absent | Value::Credential { kind: Kind::Anonymous, .. });
    let all_absent = callers.clone().next().is_some() && callers.all(|(_, value)| is_absent(value));
    let advice = "nothing of the scope tells this caller from another: all who send none of these share their keys";
    all_absent.then(|| advice.to_owned())
}

fn short(digest: &[u8; 32]) -> String {
    Hex(digest).to_string()[..SHORT].to_owned()
}
