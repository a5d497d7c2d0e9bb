//! `[defaults]`, and the policy of each of `[[routes]]`

use std::time::Duration;

use http::{HeaderName, Uri};
use serde_json::json;

use super::declare::Shown::{DefaultAs, DefaultOff, Example, Required};
use super::declare::{Inner, Keys as _, Section, keys};
use super::headers::TOKEN;
use super::kinds::{
    Flag, Kind, List, NONZERO_TIME, Optional, Shape, Text, Toml, list, nested, number, size, text, time, words,
};
use super::node::{Node, Table, Wrong};
use crate::idempotency::fingerprint::{BodyForm, Pointer, Recipe};
use crate::idempotency::grpc;
use crate::idempotency::key::{KeyRule, KeySource};
use crate::idempotency::policy::{Cors, Delivery, InFlight, Mode, Policy, Recovery, StoreFailure};
use crate::idempotency::scope::{Scope, ScopeWord};
use crate::idempotency::settle::{Action, Ending, Outcomes};

keys! {
    /// What applies to every route that does not set it itself. The parts of `key`, `fingerprint`, `outcomes` and `cors`
    /// apply one by one.
    for Policy "[defaults]" {
        /// How long a completed record answers retries, from its claim. It should exceed the upstream's timeout: otherwise the
        /// answer of a slow attempt is forgotten before its retry arrives.
        ttl => NONZERO_TIME;
        /// How long a record whose outcome is unknown is kept, from when it became unknown.
        unknown_ttl => NONZERO_TIME;
        /// Where the idempotency key comes from, and whether it is required.
        key => nested();
        /// Who a key belongs to: callers that differ in any part never get each other's answers. "credential", "header:NAME",
        /// "cookie:NAME", "basic:user", "client-cert:subject", "client-cert:san" (with `client_ca`), "host", "client-ip",
        /// "const:TEXT". A request without a header, cookie, user or certificate that is named here is refused (400
        /// `scope-missing`), unless a `?` follows, as in "header:X-Tenant?": then its absence is a value of its own.
        /// "credential" is X-Api-Key, else Authorization, else Cookie: a retry whose password, token or session was renewed
        /// gets 422 `caller-differs`, and one with a refreshed opaque token runs again. To accept both, name what stays the
        /// same, such as "header:X-User".
        scope => Parts, DefaultOff;
        /// What tells a retry from a key that was reused for another request.
        fingerprint => Recipes;
        /// What the end of an attempt does: "store" keeps the answer, "release" forgets the key so that a retry runs again,
        /// "hold" leaves the outcome unknown. Entries are a status, a class, or what happened to the connection:
        /// "unreachable" (provably nothing was sent), "timeout", "broken". A gRPC call has its own status: "grpc:14" or
        /// "grpc:UNAVAILABLE"; those that are not named below are stored, and a call without a status is "broken". The most
        /// specific entry wins. Only differences from these defaults need to be set.
        outcomes => Entries;
        /// What a retry gets while the first request is in progress: "reject" is 409 `in-flight` at once; { wait = "10s" }
        /// holds it for that long at most (24h at most), and answers as soon as the first request has its answer. If the
        /// client sends `Prefer: wait=N`, it waits for N seconds if that is shorter. A retry that waits never runs itself.
        in_flight => WordOrWait;
        /// What a retry of an unknown outcome gets: "hold" is 409 `outcome-unknown` until an operator resolves it; "retry" runs
        /// again, possibly beside an attempt that is still in progress.
        recovery => words(&[("hold", Recovery::Hold), ("retry", Recovery::Retry)]).later(&["probe"]);
        /// If the store cannot be reached: "reject" is 503, "forward" runs unprotected, marked and counted.
        store_failure => words(&[("reject", StoreFailure::Reject), ("forward", StoreFailure::Forward)]);
        /// How long a claim lasts without renewal; it is renewed while the attempt runs. At least "1s".
        lease => time(Duration::from_secs(1), Duration::MAX);
        /// "protect", or "pass": forward and do nothing else.
        mode => words(&[("protect", Mode::Protect), ("pass", Mode::Pass)]).later(&["observe"]);
        /// "buffer": an answer is durable before the client gets any of it. "stream": an answer of several pieces goes to its
        /// client while the upstream sends it, each piece when the next one arrives; the last bytes wait until all of it is
        /// durable, and if that fails the connection is broken off. Answers of gRPC calls are buffered: their status comes
        /// last.
        body => words(&[("buffer", Delivery::Buffer), ("stream", Delivery::Stream)]);
        /// The largest request body; 413 `request-too-large` beyond it. At most "256MiB".
        max_request_body => size(0..=LARGEST_BODY);
        /// The largest answer whose body is kept for replays; beyond it, a retry gets 409 `response-not-stored`. At most
        /// "256MiB".
        max_response_body => size(0..=LARGEST_BODY);
        /// Which scripts may read, in browsers, the answers that oncegate itself gives.
        cors => nested();
        /// A page that explains the problems that oncegate answers with: their `type` and Link.
        docs => Optional(text(|| PAGE.into(), docs)), Example("\"https://docs.example.com/idempotency\"");
    }
}

keys! {
    /// `key`
    for KeyRule "key" {
        /// Where the idempotency key comes from: the first that yields a value wins. "header:NAME", "query:NAME",
        /// "json:/pointer" (a string or an integer of a JSON body), "cloudevent" (source and id), or "fingerprint" (for
        /// clients that cannot send a key: an identical request within ttl is a retry; it stands last, and needs a scope that
        /// is set and a fingerprint that includes the body).
        from => list(text(|| format!("^(header:{TOKEN}|query:.+|json:{STEPS}|cloudevent|fingerprint)$"), source))
            .unique().filled("write [\"header:Idempotency-Key\"], or remove it"), DefaultAs("[\"header:Idempotency-Key\"]");
        /// Whether a request without a key is refused (400 `key-missing`). Otherwise it is forwarded unprotected.
        required => Flag;
        /// The longest key, in characters, from 1 to 4096.
        max_length => number(1..=4096);
    }
}

keys! {
    /// `fingerprint`
    pub(super) struct Fingerprint "fingerprint" {
        /// What counts: "method", "path", "query", "body", "header:NAME". At least one.
        of: Vec<Ingredient> = ingredients(&Recipe::default())
            => list(text(|| format!("^(method|path|query|body|header:{TOKEN})$"), ingredient))
                .unique().filled("write [\"method\", \"path\", \"query\", \"body\"], or remove it");
        /// How the body counts: "auto" (JSON without regard to white space and the order of names, multipart without its
        /// boundary, anything else byte for byte), "bytes", "json", or "none" (not at all).
        body: BodyForm = Recipe::default().form => words(&[
            ("auto", BodyForm::Auto), ("bytes", BodyForm::Bytes), ("json", BodyForm::Json), ("none", BodyForm::None),
        ]);
        /// The parts of a JSON body that count, as JSON pointers; all of it if the list is empty, or if the body has none of
        /// them.
        include: Vec<Pointer> = Vec::new() => list(text(|| format!("^({STEPS})?$"), pointer));
        /// The parts of a JSON body that do not count, such as ["/sent_at"].
        exclude: Vec<Pointer> = Vec::new() => list(text(|| format!("^({STEPS})?$"), pointer));
    }
}

keys! {
    /// `in_flight`, where it is a table.
    pub(super) struct Wait "in_flight" {
        /// How long a duplicate is held, at most 24h.
        wait: Option<Duration> = None
            => Optional(time(Duration::from_millis(1), Duration::from_secs(24 * 60 * 60))), Required("\"10s\"");
    }
}

keys! {
    /// `cors`
    for Cors "cors" {
        /// Which scripts may read, in browsers, the answers that oncegate itself gives: origins such as
        /// "https://shop.example", or "*" for any. oncegate then sets Access-Control-Allow-Origin on its own problems, and
        /// names its headers for scripts in Access-Control-Expose-Headers. Answers of the upstream keep their own headers of
        /// this kind, and preflights are the upstream's to answer.
        origins => list(text(|| ORIGIN.into(), origin)).unique();
        /// Whether those scripts may use the user's cookies; not together with "*".
        credentials => Flag;
    }
}

/// The largest body that is held whole, in bytes: a record is written and read in one piece, and its memory with it.
const LARGEST_BODY: u64 = 256 << 20;

/// A JSON pointer that is not empty (RFC 6901).
const STEPS: &str = "(/([^~/]|~[01])*)+";

const PAGE: &str = r#"^https?://[^\s/?#@<>"]+([/?#][^\s<>"]*)?$"#;

/// An origin as browsers write it, or `*`.
const ORIGIN: &str = r"^(\*|https://(?!.*:443$)[^\sA-Z/?#@]+|http://(?!.*:80$)[^\sA-Z/?#@]+)$";

/// `outcomes` takes entries.
const OUTCOMES: Section = Section { name: "outcomes", about: &[], groups: &[] };

/// A policy, and whether its scope was written down.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    pub policy: Policy,
    pub scope_is_explicit: bool,
}

/// Reads what a table says of a policy; `base` applies where it says nothing. The parts of `key`, `fingerprint`,
/// `outcomes` and `cors` apply one by one.
pub(super) fn read(table: &Table<'_>, base: &Draft) -> Draft {
    let policy = Policy::read(table, base.policy.clone());
    check_key(&table.table("key", KeyRule::SECTION), &policy.key);
    check_pointers(&table.table("fingerprint", Fingerprint::SECTION), &policy.fingerprint);
    check_cors(&table.table("cors", Cors::SECTION), &policy.cors);
    Draft { policy, scope_is_explicit: base.scope_is_explicit || table.get("scope").is_some() }
}

/// Every request has a fingerprint.
fn check_key(table: &Table<'_>, rule: &KeyRule) {
    let before_last = rule.from.iter().rev().skip(1);
    if table.get("from").is_some() && before_last.into_iter().any(|source| *source == KeySource::Fingerprint) {
        let wrong = Wrong::new("what stands after `fingerprint` is never used");
        table.report("from", wrong.hint("put \"fingerprint\" last"));
    }
}

fn check_pointers(table: &Table<'_>, recipe: &Recipe) {
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
}

fn check_cors(table: &Table<'_>, cors: &Cors) {
    let any = cors.origins.iter().any(|origin| origin == "*");
    if any && cors.origins.len() > 1 {
        table.report("origins", Wrong::new("`*` is every origin").hint("let it stand alone, or remove it"));
    }
    if any && cors.credentials {
        // Browsers refuse it (Fetch, 3.3.5).
        let wrong = Wrong::new("browsers refuse to send credentials to every origin");
        table.report("credentials", wrong.hint("name the origins, or remove credentials"));
    }
}

/// `in_flight`: a word, or a table with how long to wait.
struct WordOrWait;

impl Kind for WordOrWait {
    type Value = InFlight;

    fn shape(&self) -> Shape {
        let mut shape = Wait::SECTION.shape();
        shape["type"] = json!(["string", "object"]);
        shape["pattern"] = "^reject$".into();
        shape
    }

    fn inner(&self) -> Inner {
        Inner::Table(Wait::SECTION)
    }

    fn take(&self, node: &Node<'_>) -> Option<InFlight> {
        let hint = "write \"reject\" or { wait = \"10s\" }";
        if !node.is_table() {
            let word = match node.text() {
                Ok(_) => node.word(&[("reject", InFlight::Reject)], &[]),
                Err(_) => Err(node.expected("\"reject\" or a table")),
            };
            return node.accept(word.map_err(|wrong| wrong.hint(hint)));
        }
        let table = Table::open(node.clone(), Wait::SECTION);
        if table.get("wait").is_none() {
            table.report("wait", Wrong::new("is missing").hint("write { wait = \"10s\" }, or \"reject\""));
        }
        Wait::read(&table, Wait::default()).wait.map(InFlight::Wait)
    }

    fn print(&self, value: &InFlight) -> Option<Toml> {
        match value {
            InFlight::Reject => Some("reject".into()),
            InFlight::Wait(wait) => Some(Wait { wait: Some(*wait) }.print_inline().into()),
        }
    }
}

/// `scope`
struct Parts;

impl Parts {
    const LIST: fn() -> List<Text<ScopeWord>> = || {
        let pattern = || {
            let optional = format!(r"(header:{TOKEN}|cookie:{TOKEN}|basic:user|client-cert:(subject|san))\?");
            format!("^({optional}?|credential|host|client-ip|const:.*)$")
        };
        list(text(pattern, part)).filled("write [\"const:shared\"] if all clients may get each other's answers")
    };
}

impl Kind for Parts {
    type Value = Scope;

    fn shape(&self) -> Shape {
        Self::LIST().unique().shape()
    }

    fn take(&self, node: &Node<'_>) -> Option<Scope> {
        let words = Self::LIST().take(node)?;
        // With a `?` or without, it is the same part.
        let twice = |(place, word): &(usize, &ScopeWord)| words[..*place].iter().any(|other| other.part == word.part);
        if let Some((_, word)) = words.iter().enumerate().find(twice) {
            let wrong = Wrong::new(format!("`{}` stands twice", word.part)).hint("remove one of them");
            return node.accept(Err(wrong));
        }
        Some(words.into_iter().collect())
    }

    fn print(&self, value: &Scope) -> Option<Toml> {
        Self::LIST().print(&value.words().collect())
    }
}

/// `fingerprint`: several fields of a recipe are one key.
struct Recipes;

impl Kind for Recipes {
    type Value = Recipe;

    fn shape(&self) -> Shape {
        Fingerprint::SECTION.shape()
    }

    fn inner(&self) -> Inner {
        Inner::Table(Fingerprint::SECTION)
    }

    fn take(&self, node: &Node<'_>) -> Option<Recipe> {
        nested::<Fingerprint>().take(node).map(Fingerprint::into_recipe)
    }

    fn print(&self, value: &Recipe) -> Option<Toml> {
        nested().print(&Fingerprint::of_recipe(value))
    }

    fn read(&self, table: &Table<'_>, key: &str, base: Recipe) -> Recipe {
        nested().read(table, key, Fingerprint::of_recipe(&base)).into_recipe()
    }
}

impl Fingerprint {
    fn of_recipe(recipe: &Recipe) -> Self {
        let (include, exclude) = (recipe.include.clone(), recipe.exclude.clone());
        Self { of: ingredients(recipe), body: recipe.form, include, exclude }
    }

    fn into_recipe(self) -> Recipe {
        Recipe {
            method: self.of.contains(&Ingredient::Method),
            path: self.of.contains(&Ingredient::Path),
            query: self.of.contains(&Ingredient::Query),
            body: self.of.contains(&Ingredient::Body),
            headers: self.of.into_iter().filter_map(Ingredient::header).collect(),
            form: self.body,
            include: self.include,
            exclude: self.exclude,
        }
    }
}

fn ingredients(recipe: &Recipe) -> Vec<Ingredient> {
    let parts = [
        (recipe.method, Ingredient::Method),
        (recipe.path, Ingredient::Path),
        (recipe.query, Ingredient::Query),
        (recipe.body, Ingredient::Body),
    ];
    let parts = parts.into_iter().filter(|(counts, _)| *counts).map(|(_, part)| part);
    parts.chain(recipe.headers.iter().cloned().map(Ingredient::Header)).collect()
}

/// `outcomes`
struct Entries;

impl Kind for Entries {
    type Value = Outcomes;

    fn shape(&self) -> Shape {
        let actions = |actions: &[Action]| -> Shape {
            json!({ "type": "string", "enum": actions.iter().map(|action| action.as_str()).collect::<Vec<_>>() })
        };
        let (all, without_answer) =
            (actions(&[Action::Store, Action::Release, Action::Hold]), actions(&[Action::Release, Action::Hold]));
        let properties = default_outcomes().into_iter().map(|(entry, action)| {
            // What did not answer has nothing to store.
            let has_answer = entry.as_bytes()[0].is_ascii_digit() || entry.starts_with("grpc:");
            let mut shape = if has_answer { all.clone() } else { without_answer.clone() };
            shape["default"] = action.as_str().into();
            (entry, shape)
        });
        let grpc = format!("^grpc:([0-9]|1[0-6]|{})$", grpc::Status::ALL.map(grpc::Status::name).join("|"));
        json!({
            "title": OUTCOMES.name,
            "type": "object",
            "properties": properties.collect::<serde_json::Map<_, _>>(),
            "patternProperties": { "^[2-5]([0-9]{2}|xx)$": all, (grpc): all },
            "additionalProperties": false,
        })
    }

    fn inner(&self) -> Inner {
        Inner::Entries(default_outcomes().into_iter().map(|(entry, action)| (entry, action.as_str().into())).collect())
    }

    fn take(&self, node: &Node<'_>) -> Option<Outcomes> {
        Some(outcomes(&Table::open(node.clone(), &OUTCOMES), Outcomes::default()))
    }

    fn print(&self, outcomes: &Outcomes) -> Option<Toml> {
        let classes = outcomes.class.iter().map(|(class, action)| (format!("{class}xx"), *action));
        let statuses = outcomes.status.iter().map(|(status, action)| (status.to_string(), *action));
        let transport =
            [("unreachable", outcomes.unreachable), ("timeout", outcomes.timeout), ("broken", outcomes.broken)];
        let transport = transport.into_iter().filter_map(|(entry, action)| Some((entry.to_owned(), action?)));
        let calls = outcomes.grpc.iter().map(|(status, action)| (format!("grpc:{}", status.name()), *action));
        let entries = statuses.chain(classes).chain(calls).chain(transport);
        Some(Toml::InlineTable(entries.map(|(entry, action)| (entry, action.as_str())).collect()))
    }

    fn read(&self, table: &Table<'_>, key: &str, base: Outcomes) -> Outcomes {
        outcomes(&table.table(key, &OUTCOMES), base)
    }
}

/// Every entry that an ending is settled by where nothing is configured: classes, the statuses that differ from their
/// class, the gRPC statuses that are not stored, and endings without an answer.
fn default_outcomes() -> Vec<(String, Action)> {
    let action = |ending| Outcomes::default().action(ending);
    let class = |status: u16| action(Ending::Answered(status / 100 * 100 + 99));
    let classes = (2..=5).map(|first| (format!("{first}xx"), class(first * 100)));
    let statuses = (200..600).map(|status| (status, action(Ending::Answered(status))));
    let statuses = statuses.filter(|(status, action)| *action != class(*status));
    let calls = grpc::Status::ALL.into_iter().map(|status| (status, action(Ending::Called(status))));
    let calls = calls.filter(|(_, action)| *action != Action::Store);
    let transport = [("unreachable", Ending::Unreachable), ("timeout", Ending::Timeout), ("broken", Ending::Broken)];
    classes
        .chain(statuses.map(|(status, action)| (status.to_string(), action)))
        .chain(calls.map(|(status, action)| (format!("grpc:{}", status.name()), action)))
        .chain(transport.map(|(entry, ending)| (entry.to_owned(), action(ending))))
        .collect()
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

/// One of `fingerprint.of`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ingredient {
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
    for (entry, node) in table.entries() {
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
