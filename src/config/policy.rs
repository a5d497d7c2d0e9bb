//! `[defaults]`, and the policy of each of `[[routes]]`

use std::time::Duration;

use http::{HeaderName, Uri};

use super::keys;
use super::node::{Node, Table, Wrong};
use super::units;
use crate::idempotency::fingerprint::{BodyForm, Pointer, Recipe};
use crate::idempotency::grpc;
use crate::idempotency::key::{KeyRule, KeySource};
use crate::idempotency::policy::{Cors, Delivery, InFlight, Mode, Policy, Recovery, StoreFailure};
use crate::idempotency::scope::{Scope, ScopePart, ScopeWord};
use crate::idempotency::settle::Outcomes;

/// The words for modes.
pub(super) const MODES: [(&str, Mode); 2] = [("protect", Mode::Protect), ("pass", Mode::Pass)];

/// The words for when the client gets an answer.
pub(super) const DELIVERIES: [(&str, Delivery); 2] = [("buffer", Delivery::Buffer), ("stream", Delivery::Stream)];

/// The words for recoveries.
pub(super) const RECOVERIES: [(&str, Recovery); 2] = [("hold", Recovery::Hold), ("retry", Recovery::Retry)];

/// The words for what happens when the store cannot be reached.
pub(super) const STORE_FAILURES: [(&str, StoreFailure); 2] =
    [("reject", StoreFailure::Reject), ("forward", StoreFailure::Forward)];

/// The words for forms of a body.
pub(super) const FORMS: [(&str, BodyForm); 4] =
    [("auto", BodyForm::Auto), ("bytes", BodyForm::Bytes), ("json", BodyForm::Json), ("none", BodyForm::None)];

/// The longest that `key.max_length` may be: beyond it, a key is a document.
pub(super) const LONGEST_KEY: u64 = 4096;

/// The shortest lease: a shorter one would pass between two renewals.
const SHORTEST_LEASE: Duration = Duration::from_secs(1);

/// The longest wait: no connection outlives it.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 60 * 60);

/// The largest body that is held whole, in bytes: a record is written and read in one piece, and its memory with it.
pub(super) const LARGEST_BODY: u64 = 256 << 20;

/// A policy, and whether its scope was written down.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    pub policy: Policy,
    pub scope_is_explicit: bool,
}

/// Reads what a table says of a policy; `base` is what counts where it says nothing. The parts of `key`,
/// `fingerprint` and `outcomes` count one by one.
pub(super) fn read(table: &Table<'_>, base: &Draft) -> Draft {
    let Draft { policy: base, scope_is_explicit } = base.clone();
    let scope = table.read_list("scope", part).and_then(|scope| check_scope(table, scope));
    Draft {
        scope_is_explicit: scope_is_explicit || table.get("scope").is_some(),
        policy: Policy {
            ttl: table.read("ttl", Node::some_duration).unwrap_or(base.ttl),
            unknown_ttl: table.read("unknown_ttl", Node::some_duration).unwrap_or(base.unknown_ttl),
            key: key(table, base.key),
            scope: scope.unwrap_or(base.scope),
            fingerprint: fingerprint(table, base.fingerprint),
            outcomes: outcomes(table, base.outcomes),
            in_flight: in_flight(table).unwrap_or(base.in_flight),
            recovery: table.read("recovery", |node| node.word(&RECOVERIES, &["probe"])).unwrap_or(base.recovery),
            store_failure: table
                .read("store_failure", |node| node.word(&STORE_FAILURES, &[]))
                .unwrap_or(base.store_failure),
            lease: table.read("lease", lease).unwrap_or(base.lease),
            mode: table.read("mode", |node| node.word(&MODES, &["observe"])).unwrap_or(base.mode),
            body: table.read("body", |node| node.word(&DELIVERIES, &[])).unwrap_or(base.body),
            max_request_body: table.read("max_request_body", body_size).unwrap_or(base.max_request_body),
            max_response_body: table.read("max_response_body", body_size).unwrap_or(base.max_response_body),
            cors: cors(table, base.cors),
            docs: table.read("docs", docs).or(base.docs),
        },
    }
}

fn lease(node: &Node<'_>) -> Result<Duration, Wrong> {
    match node.duration()? {
        short if short < SHORTEST_LEASE => Err(Wrong::new("a lease is at least one second").hint("write \"30s\"")),
        lease => Ok(lease),
    }
}

/// What `in_flight` says; nothing where it is absent or wrong, which is reported.
fn in_flight(table: &Table<'_>) -> Option<InFlight> {
    let node = table.get("in_flight")?;
    if !node.is_table() {
        let word = match node.text() {
            Ok(_) => node.word(&[("reject", InFlight::Reject)], &[]),
            Err(_) => Err(node.expected("\"reject\" or a table")),
        };
        let choices = |wrong: Wrong| wrong.hint("write \"reject\" or { wait = \"10s\" }");
        return word.map_err(|wrong| node.report(choices(wrong))).ok();
    }
    let table = table.table("in_flight", &keys::IN_FLIGHT);
    if table.get("wait").is_none() {
        node.report(Wrong::new("it does not say how long to wait").hint("write { wait = \"10s\" }, or \"reject\""));
    }
    table.read("wait", wait).map(InFlight::Wait)
}

fn wait(node: &Node<'_>) -> Result<Duration, Wrong> {
    match node.some_duration()? {
        long if long > LONGEST_WAIT => {
            let longest = units::show_duration(LONGEST_WAIT);
            Err(Wrong::new(format!("a wait is at most {longest}")).hint("write \"10s\""))
        }
        wait => Ok(wait),
    }
}

fn body_size(node: &Node<'_>) -> Result<u64, Wrong> {
    match node.size()? {
        large if large > LARGEST_BODY => {
            let largest = units::show_size(LARGEST_BODY);
            Err(Wrong::new(format!("a body that is held whole is at most {largest}"))
                .hint(format!("write \"{largest}\" or less")))
        }
        size => Ok(size),
    }
}

fn key(table: &Table<'_>, base: KeyRule) -> KeyRule {
    let table = table.table("key", &keys::KEY);
    let from = table.read_list("from", source);
    if let Some(from) = &from {
        let hint = "write [\"header:Idempotency-Key\"], or remove it";
        check_list(&table, "from", from, hint);
        // Every request has one.
        if from.iter().rev().skip(1).any(|source| *source == KeySource::Fingerprint) {
            let wrong = Wrong::new("what stands behind `fingerprint` is never looked at");
            table.report("from", wrong.hint("put \"fingerprint\" last"));
        }
    }
    KeyRule {
        from: from.unwrap_or(base.from),
        required: table.read("required", Node::flag).unwrap_or(base.required),
        max_length: table.read("max_length", key_length).unwrap_or(base.max_length),
    }
}

fn key_length(node: &Node<'_>) -> Result<usize, Wrong> {
    match usize::try_from(node.number()?) {
        Ok(length) if (1..=LONGEST_KEY as usize).contains(&length) => Ok(length),
        _ => Err(Wrong::new(format!("must be from 1 to {LONGEST_KEY}")).hint("write 255")),
    }
}

fn source(node: &Node<'_>) -> Result<KeySource, Wrong> {
    let hint = "such as \"header:Idempotency-Key\", \"query:request_id\" or \"json:/request/id\"";
    KeySource::parse(node.filled()?).map_err(|message| told(&message, hint))
}

fn part(node: &Node<'_>) -> Result<ScopeWord, Wrong> {
    let text = node.filled()?;
    if text.starts_with("jwt:") {
        return Err(Wrong::later("`jwt:` in a scope").hint("write \"credential\" for now"));
    }
    ScopeWord::parse(text).map_err(|message| told(&message, "such as \"header:X-Tenant\" or \"cookie:session?\""))
}

/// What the pure core says of a word: what follows "use" is what to do, and `hint` where it does not say.
fn told(message: &str, hint: &str) -> Wrong {
    match message.split_once(": use ") {
        Some((message, choice)) => Wrong::new(message).hint(format!("use {choice}")),
        None => Wrong::new(message).hint(hint),
    }
}

fn check_scope(table: &Table<'_>, scope: Vec<ScopeWord>) -> Option<Scope> {
    let hint = "write [\"const:shared\"] if every client may get every other's answers";
    // With a `?` or without, it is the same part.
    let parts: Vec<ScopePart> = scope.iter().map(|word| word.part.clone()).collect();
    check_list(table, "scope", &parts, hint).then(|| scope.into_iter().collect())
}

/// Reports a list that is empty, or has an item twice.
fn check_list<T: PartialEq + std::fmt::Display>(table: &Table<'_>, key: &str, items: &[T], hint: &str) -> bool {
    if items.is_empty() {
        table.report(key, Wrong::new("must not be empty").hint(hint));
    }
    let twice = items.iter().enumerate().find(|(place, item)| items[..*place].contains(item));
    if let Some((_, item)) = twice {
        table.report(key, Wrong::new(format!("`{item}` stands twice")).hint("remove one of them"));
    }
    !items.is_empty() && twice.is_none()
}

fn fingerprint(table: &Table<'_>, base: Recipe) -> Recipe {
    let table = table.table("fingerprint", &keys::FINGERPRINT);
    let mut recipe = base;
    if let Some(of) = table.read_list("of", ingredient) {
        check_list(&table, "of", &of, "write [\"method\", \"path\", \"query\", \"body\"], or remove it");
        recipe.method = of.contains(&Ingredient::Method);
        recipe.path = of.contains(&Ingredient::Path);
        recipe.query = of.contains(&Ingredient::Query);
        recipe.body = of.contains(&Ingredient::Body);
        recipe.headers = of.into_iter().filter_map(Ingredient::header).collect();
    }
    if let Some(form) = table.read("body", |node| node.word(&FORMS, &[])) {
        recipe.form = form;
    }
    for (key, pointers) in [("include", &mut recipe.include), ("exclude", &mut recipe.exclude)] {
        if let Some(read) = table.read_list(key, pointer) {
            *pointers = read;
        }
    }
    let reads_json = recipe.body && matches!(recipe.form, BodyForm::Auto | BodyForm::Json);
    for (key, pointers) in [("include", &recipe.include), ("exclude", &recipe.exclude)] {
        if !reads_json && !pointers.is_empty() {
            let wrong = Wrong::new("it has no effect: the body does not count as JSON");
            table.report(key, wrong.hint("remove it, or let `of` have \"body\" and `body` be \"auto\" or \"json\""));
        }
    }
    let left_out = recipe.include.iter().find(|part| recipe.exclude.iter().any(|whole| part.is_within(whole)));
    if let Some(part) = left_out {
        let wrong = Wrong::new(format!("`{part}` does not count: `exclude` leaves it out"));
        table.report("include", wrong.hint("remove it from one of them"));
    }
    recipe
}

/// One of `fingerprint.of`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Ingredient {
    Method,
    Path,
    Query,
    Body,
    Header(HeaderName),
}

impl Ingredient {
    fn header(self) -> Option<HeaderName> {
        match self {
            Self::Header(name) => Some(name),
            Self::Method | Self::Path | Self::Query | Self::Body => None,
        }
    }
}

impl std::fmt::Display for Ingredient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Method => f.write_str("method"),
            Self::Path => f.write_str("path"),
            Self::Query => f.write_str("query"),
            Self::Body => f.write_str("body"),
            Self::Header(name) => write!(f, "header:{name}"),
        }
    }
}

fn ingredient(node: &Node<'_>) -> Result<Ingredient, Wrong> {
    let text = node.filled()?;
    match text.split_once(':') {
        Some(("header", name)) => HeaderName::from_bytes(name.as_bytes())
            .map(Ingredient::Header)
            .map_err(|_| Wrong::new(format!("`{name}` is not a header name")).hint("such as \"header:X-Tenant\"")),
        None if text == "method" => Ok(Ingredient::Method),
        None if text == "path" => Ok(Ingredient::Path),
        None if text == "query" => Ok(Ingredient::Query),
        None if text == "body" => Ok(Ingredient::Body),
        _ => {
            let wrong = Wrong::new(format!("`{text}` is not a part of a request"));
            Err(wrong.hint("use \"method\", \"path\", \"query\", \"body\" or \"header:NAME\""))
        }
    }
}

fn pointer(node: &Node<'_>) -> Result<Pointer, Wrong> {
    let hint = "write a JSON pointer (RFC 6901) such as \"/payment/amount\"";
    Pointer::parse(node.text()?).map_err(|message| told(&message, hint))
}

fn outcomes(table: &Table<'_>, base: Outcomes) -> Outcomes {
    let mut outcomes = base;
    let mut calls = Vec::new();
    for (entry, node) in table.table("outcomes", &keys::OUTCOMES).entries() {
        let read = match entry.strip_prefix("grpc:").and_then(grpc::Status::parse) {
            Some(status) if calls.contains(&status) => {
                let wrong =
                    Wrong::new(format!("`{entry}` stands twice: as {} and as {}", status.number(), status.name()));
                Err(wrong.hint("remove one of them"))
            }
            status => {
                calls.extend(status);
                outcome(&mut outcomes, entry, &node)
            }
        };
        if let Err(wrong) = read {
            node.report(wrong);
        }
    }
    outcomes
}

fn outcome(outcomes: &mut Outcomes, entry: &str, node: &Node<'_>) -> Result<(), Wrong> {
    let action = node.text()?;
    let hint = "such as \"429\" = \"store\", \"4xx\" = \"release\" or \"timeout\" = \"hold\"";
    outcomes.insert(entry, action).map_err(|message| told(&message, hint))
}

fn cors(table: &Table<'_>, base: Cors) -> Cors {
    let table = table.table("cors", &keys::CORS);
    let origins = table.read_list("origins", origin);
    let cors = Cors {
        origins: origins.unwrap_or(base.origins),
        credentials: table.read("credentials", Node::flag).unwrap_or(base.credentials),
    };
    if cors.origins.len() > 1 {
        check_list(&table, "origins", &cors.origins, "name one, or remove it");
    }
    let any = cors.origins.iter().any(|origin| origin == "*");
    if any && cors.origins.len() > 1 {
        table.report("origins", Wrong::new("`*` is every origin").hint("let it stand alone, or remove it"));
    }
    if any && cors.credentials {
        // Browsers refuse it (Fetch, 3.3.5).
        let wrong = Wrong::new("every origin, with the credentials of its users, is no origin to browsers");
        table.report("credentials", wrong.hint("name the origins, or remove credentials"));
    }
    cors
}

/// An origin as browsers send it: scheme, host in lower case, and the port where it is not the default one.
fn origin(node: &Node<'_>) -> Result<String, Wrong> {
    let text = node.filled()?;
    if text == "*" {
        return Ok(text.to_owned());
    }
    let wrong = Wrong::new(format!("`{text}` is not an origin"));
    let rest = [("https://", ":443"), ("http://", ":80")]
        .into_iter()
        .find_map(|(scheme, port)| Some((text.strip_prefix(scheme)?, port)));
    let is_host = |host: &str| !host.contains(['/', '?', '#', '@']) && text.parse::<Uri>().is_ok();
    match rest {
        Some((host, port)) if host.ends_with(port) => {
            Err(wrong.hint(format!("write it without {port}: browsers leave out the default port")))
        }
        Some((host, _)) if is_host(host) && text.to_ascii_lowercase() == text => Ok(text.to_owned()),
        _ => Err(wrong.hint("write scheme, host and port alone, in lower case, such as \"https://shop.example\"")),
    }
}

fn docs(node: &Node<'_>) -> Result<String, Wrong> {
    let text = node.filled()?;
    let uri = text.parse::<Uri>().ok();
    let host = uri.as_ref().and_then(|uri| uri.authority()).filter(|authority| !authority.as_str().contains('@'));
    let is_web = text.starts_with("http://") || text.starts_with("https://");
    // It goes between angle brackets in a Link header (RFC 8288, section 3).
    if is_web && host.is_some() && !text.contains(['<', '>', '"']) {
        return Ok(text.to_owned());
    }
    let wrong = Wrong::new("this is not the address of a page");
    Err(wrong.hint("write an absolute URL without user and password, such as \"https://docs.example.com/errors\""))
}
