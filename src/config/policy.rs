//! `[defaults]`, and the policy of each of `[[routes]]`

use std::time::Duration;

use http::Uri;
use http::uri::PathAndQuery;
use serde_json::json;

use self::fingerprint::Fingerprint;
use super::declare::Shown::{DefaultAs, DefaultOff, Example, Required};
use super::declare::{Inner, Keys as _, Section, keys};
use super::headers::TOKEN;
use super::kinds::{
    Kind, flag, nested, nonzero_time, number, or_false, set, size, text, text_as, time_of, unique, words,
};
use super::node::{Node, Table, Wrong};
use super::preset::Preset;
use super::units::show_duration;
use crate::idempotency::delivery::{Async, Deliver};
use crate::idempotency::key::{KeyRule, KeySource};
use crate::idempotency::policy::{Cors, InFlight, Mode, Policy, ResponseMode, Seal, StoreFailure};
use crate::idempotency::recovery::without_query_values;
use crate::idempotency::scope::{Scope, ScopeWord};
use crate::route::Router;

mod deliver;
mod fingerprint;
mod outcomes;
mod outcomes_body;
mod quota;
mod recovery;
mod request_time;
mod response_headers;

keys! {
    /// What applies to every route that does not set it itself. The parts of `key`, `fingerprint`, `outcomes`,
    /// `response_headers`, `cors` and `deliver` apply one by one.
    for Policy "[defaults]" {
        /// How long a completed record answers retries, from its claim. It should exceed the upstream's timeout by far:
        /// otherwise the answer of a slow attempt is forgotten before its retry arrives. An attempt that takes longer
        /// than this has its answer kept as long from its end. The answer of a record that was unknown is kept as long
        /// from when a probe found it, or an operator gave it.
        ttl => nonzero_time();
        /// How long a record whose outcome is unknown is kept, from when it became unknown.
        unknown_ttl => nonzero_time();
        /// Where the idempotency key comes from, and whether it is required.
        key => nested();
        /// Who a key belongs to: callers that differ in any part never get each other's answers. "credential", "header:NAME",
        /// "cookie:NAME", "basic:user", "client-cert:subject", "client-cert:san" (with `client_ca`), "host", "client-ip",
        /// "jwt:CLAIM" (of a token that `[auth.jwt]` verifies), "const:TEXT". A request without a header, cookie, user,
        /// certificate or claim that is named here is refused (400 `scope-missing`), unless a `?` follows, as in
        /// "header:X-Tenant?": then its absence is a value of its own. "credential" is X-Api-Key, else Authorization, else
        /// Cookie: a retry whose password, token or session was renewed gets 422 `caller-differs`, and one with a refreshed
        /// opaque token runs again. To accept both, name what stays the same, such as "jwt:sub" or "header:X-User".
        scope => scope(), DefaultOff;
        /// What tells a retry from a key that was reused for another request.
        fingerprint => fingerprint::recipe();
        /// What the end of an attempt does: "store" keeps the answer, "release" forgets the key so that a retry runs
        /// again, "hold" leaves the outcome unknown. Entries are a status, a class, or what happened to the connection:
        /// "unreachable" (provably nothing was sent), "timeout", "broken". A gRPC call has its own status: "grpc:14" or
        /// "grpc:UNAVAILABLE"; those from 0 to 16 that are not named below are stored, any other is held, and a call without
        /// a status is "broken". The most specific entry wins. Only differences from these defaults need to be set. A
        /// status from 600 on is always held.
        outcomes => outcomes::outcomes();
        /// What an answer's own JSON says of how the attempt ended, as in
        /// [{ pointer = "/error/retryable", equals = true, then = "release" }]. The first rule that matches decides, before
        /// `outcomes`; an Idempotency-Control of the upstream comes before both. Answers whose type is application/json or
        /// ends in +json are judged, if they are whole, not compressed, at most 1MiB and no gRPC calls.
        outcomes_body => outcomes_body::rules();
        /// What a retry gets while the first request is in progress: "reject" is 409 `in-flight` at once; { wait = "10s" }
        /// holds it for that long at most (24h, or `timeout` or `client_timeout` of its upstream, the longer one, if that is
        /// less), and answers as soon as the first request has its answer. If the
        /// client sends `Prefer: wait=N`, it waits for N seconds if that is shorter. A retry that waits never runs itself.
        in_flight => in_flight();
        /// What a retry of an unknown outcome gets: "hold" is 409 `outcome-unknown` until an operator resolves it; "retry" runs
        /// again, possibly beside an attempt that is still in progress. With { probe = "/v1/charges/by-key/{key}" } oncegate
        /// asks the upstream first, with GET and the headers of the retry: a 2xx completes the record with that answer, 404
        /// or 410 runs the request, and anything else holds. With { resend = { attempts = 5, backoff = "1s" } }, for an upstream
        /// that honours the key itself, oncegate sends the request again while its client waits.
        recovery => recovery::recovery();
        /// The greatest age at which a request still runs. oncegate reads its time from a header, as in
        /// { from = "header:X-Request-Timestamp", max_age = "1h", skew = "5m" }. One that is older, that is further ahead than
        /// `skew`, or that has no such header gets 400 `request-expired` and does not run. Retries of what ran get their
        /// answers whatever their time. `max_age` and `skew` together must exceed neither `ttl` nor `unknown_ttl`. false:
        /// any request may run.
        request_time => request_time::rule(), Example("{ from = \"header:X-Request-Timestamp\", max_age = \"1h\", skew = \"5m\" }");
        /// If the store cannot be reached: "reject" is 503, "forward" runs unprotected, marked and counted.
        store_failure => words(&[("reject", StoreFailure::Reject), ("forward", StoreFailure::Forward)]);
        /// "required": a request that meets a record that is not encrypted gets 503 and does not run, so that a writer to the
        /// store cannot plant an answer of its own. Needs `store.encryption_keys`. Refuses what an upstream writes with
        /// `oncegate.complete()`, and, on every route, records from before the keys. "optional": such records are read.
        seal => words(&[("optional", Seal::Optional), ("required", Seal::Required)]);
        /// How long a claim lasts without renewal; it is renewed while the attempt runs. At least "1s".
        lease => time_of(Duration::from_secs(1)..=Duration::MAX);
        /// "protect"; "observe": forward every request as it comes and count what "protect" would have done with it (`oncegate
        /// observed` shows that); "pass": forward and do nothing else; or "accept": keep the request, answer 202, and deliver it
        /// later as `deliver` says. A route that accepts needs a key in each request, and the stores sqlite or postgres.
        mode => words(&[
            ("protect", Mode::Protect),
            ("observe", Mode::Observe),
            ("pass", Mode::Pass),
            ("accept", Mode::Accept)
        ]);
        /// "allow": a request with `Prefer: respond-async` (RFC 7240) is accepted as with mode = "accept", but for gRPC calls; any other
        /// is protected. "refuse": that preference is ignored.
        r#async => words(&[("refuse", Async::Refuse), ("allow", Async::Allow)]);
        /// How what was accepted is delivered.
        deliver => nested();
        /// "buffer": an answer is durable before the client gets any of it. "stream": an answer of several pieces goes to its
        /// client while the upstream sends it, each piece when the next one arrives; the last bytes wait until all of it is
        /// durable, and if that fails the connection is broken off. Answers of gRPC calls are buffered: their status comes
        /// last.
        body => words(&[("buffer", ResponseMode::Buffer), ("stream", ResponseMode::Stream)]);
        /// The largest request body; 413 `request-too-large` beyond it. At most "256MiB".
        max_request_body => size(0..=LARGEST_BODY);
        /// The largest answer whose body is kept for replays; beyond it, a retry gets 409 `response-not-stored`. At most
        /// "256MiB".
        max_response_body => size(0..=LARGEST_BODY);
        /// How many new keys a caller may claim: { new_keys = 1000, per = "1m", by = "scope" }, or by "client-ip" or "route".
        /// Beyond that a request that would run or be accepted gets 429 `quota-exceeded`; retries are answered all the same. All gates
        /// count together where there is a Redis (the store, or `cache`), else each gate counts by itself. false: no quota.
        quota => or_false(quota::quota()), Example("{ new_keys = 1000, per = \"1m\", by = \"scope\" }");
        /// Which headers of an answer its first client alone gets.
        response_headers => nested();
        /// A path of the upstream that says whether a caller may still have a recorded answer. Before each replay oncegate asks
        /// for it, with GET and the retry's own headers, less those of its body and its key. 2xx lets the replay through; 401,
        /// 403 and 404 go to the client as they came; anything else is 502 `upstream-unreachable`, and the client may try
        /// again. Equal retries within a second share a question. A request that runs is not asked about. false: replays are not
        /// asked about either.
        reauthorize => or_false(text_as(ASKED, asked, |path: &PathAndQuery| without_query_values(path.as_str()))), Example("\"/v1/whoami\"");
        /// Which scripts may read, in browsers, the answers that oncegate itself gives.
        cors => nested();
        /// A page that explains the problems that oncegate answers with: their `type` and Link.
        docs => text(PAGE, docs).optional(), Example("\"https://docs.example.com/idempotency\"");
    }
}

keys! {
    /// `key`
    for KeyRule "key" {
        /// Where the idempotency key comes from: the first that yields a value wins. "header:NAME", "query:NAME",
        /// "json:/pointer" (a string or an integer of a JSON body), "cloudevent" (source and id), "template:..." (several of
        /// these joined to one key, as in "template:{header:X-Saga-Id}:{header:X-Step}"; all must be there), or "fingerprint"
        /// (for clients that cannot send a key: an identical request within ttl is a retry; it stands last, and needs a scope
        /// that is set and a fingerprint that includes the body).
        from => set(
            "write [\"header:Idempotency-Key\"], or remove it",
            text(format!("^(header:{TOKEN}|query:.+|json:{STEPS}|cloudevent|template:[^{{}}]*(\\{{[^{{}}]+\\}}[^{{}}]*)+|fingerprint)$"), source)
        ), DefaultAs("[\"header:Idempotency-Key\"]");
        /// Whether a request without a key is refused (400 `key-missing`). Otherwise it is forwarded unprotected.
        required => flag();
        /// The longest key, in characters, from 1 to 4096.
        max_length => number(1..=4096);
    }
}

keys! {
    /// `in_flight`, where it is a table.
    pub(super) struct Wait "in_flight" {
        /// How long a duplicate is held, at most 24h.
        wait: Option<Duration> = None
            => time_of(Duration::from_millis(1)..=Duration::from_secs(24 * 60 * 60)).optional(), Required("\"10s\"");
    }
}

keys! {
    /// `cors`
    for Cors "cors" {
        /// Which scripts may read, in browsers, the answers that oncegate itself gives: origins such as
        /// "https://shop.example", or "*" for any. oncegate then sets Access-Control-Allow-Origin on what it says itself
        /// (problems, the 202 of an accepted request, its status), and names its headers for scripts in
        /// Access-Control-Expose-Headers. Answers of the upstream keep their own headers of this kind, and preflights are the
        /// upstream's to answer, unless `preflight` is true.
        origins => unique(text(ORIGIN, origin));
        /// Whether those scripts may use the user's cookies; not together with "*".
        credentials => flag();
        /// Whether oncegate helps an upstream that knows neither keys nor other origins to work in browsers. Where the
        /// upstream allows a preflight, oncegate allows the header of the key too. Where it answers a preflight with 404 or
        /// 405, or with 2xx, 4xx or 501 without Access-Control-Allow-Origin, or does not answer it, oncegate allows what was
        /// asked for. Answers of the upstream without Access-Control-Allow-Origin get one from oncegate. All of that is for
        /// `origins` only, and not for mode = "observe".
        preflight => flag();
    }
}

/// The largest body that is held whole, in bytes: a record is written and read in one piece, and its memory with it.
const LARGEST_BODY: u64 = 256 << 20;

/// A JSON pointer that is not empty (RFC 6901).
const STEPS: &str = "(/([^~/]|~[01])*)+";

/// A path with or without a query, as a request has it.
const ASKED: &str = r"^/(?!/)[A-Za-z0-9._~!$&'()*+,;=:@%/?-]*$";

const PAGE: &str = r#"^https?://[^\s/?#@<>"]+([/?#][^\s<>"]*)?$"#;

/// An origin as browsers write it, or `*`.
const ORIGIN: &str = r"^(\*|https://(?!.*:443$)[^\sA-Z/?#@*]+|http://(?!.*:80$)[^\sA-Z/?#@*]+)$";

/// `[defaults]`: a policy, and the preset that fills in what it leaves out.
pub(super) const SECTION: &Section =
    &Section { name: Policy::SECTION.name, about: Policy::SECTION.about, groups: &[Preset::KEYS, Policy::KEYS] };

/// A policy, and whether its scope, and whether keys are required, was written down.
#[derive(Clone, Debug, Default)]
pub(super) struct PartialPolicy {
    pub policy: Policy,
    pub scope_is_explicit: bool,
    pub required_is_explicit: bool,
}

pub(super) use deliver::check_accepting;
pub(super) use request_time::check as check_request_time;
pub(super) use response_headers::check as check_response_headers;

/// Reads what a table says of a policy; `base` applies where it says nothing. The parts of `key`, `fingerprint`,
/// `outcomes`, `response_headers`, `cors` and `deliver` apply one by one.
pub(super) fn read(table: &Table<'_>, base: &PartialPolicy) -> PartialPolicy {
    let policy = Policy::read(table, base.policy.clone());
    let key = table.table("key", KeyRule::SECTION);
    check_key(&key, &policy.key);
    fingerprint::check(&table.table("fingerprint", Fingerprint::SECTION), &policy.fingerprint);
    check_cors(&table.table("cors", Cors::SECTION), &policy.cors);
    deliver::check(&table.table("deliver", Deliver::SECTION), &policy.deliver);
    PartialPolicy {
        policy,
        scope_is_explicit: base.scope_is_explicit || table.get("scope").is_some(),
        required_is_explicit: base.required_is_explicit || key.get("required").is_some(),
    }
}

/// Says which routes keep records for longer than the operator means to.
pub(super) fn advise_retention(root: &Table<'_>, most: Option<Duration>, router: &Router) {
    let Some(most) = most else { return };
    let tables = root.tables("routes", super::routes::SECTION).unwrap_or_default();
    for (place, route) in router.routes().iter().enumerate() {
        for (key, span) in [("ttl", route.policy.ttl), ("unknown_ttl", route.policy.unknown_ttl)] {
            if span > most {
                let (name, span, most) = (&route.name, show_duration(span), show_duration(most));
                let message = format!("the route `{name}` keeps records for {span}, and store.max_ttl is {most}");
                match tables.get(place) {
                    Some(table) => table.advise(key, message),
                    None => root.table("defaults", SECTION).advise(key, message),
                }
            }
        }
    }
}

/// Nothing is encrypted without a key.
pub(super) fn check_seals(root: &Table<'_>, has_keys: bool) {
    if has_keys {
        return;
    }
    let routes = root.tables("routes", super::routes::SECTION).unwrap_or_default();
    for table in routes.into_iter().chain([root.table("defaults", SECTION)]) {
        if table.get("seal").is_some_and(|seal| seal.text() == Ok("required")) {
            let wrong = Wrong::new("no key is configured that records could be encrypted with");
            table.report("seal", wrong.hint("set [store] encryption_keys; `oncegate keys generate` makes a key"));
        }
    }
}

/// Every request has a fingerprint.
fn check_key(table: &Table<'_>, rule: &KeyRule) {
    let before_last = rule.from.iter().rev().skip(1);
    if table.get("from").is_some() && before_last.into_iter().any(|source| *source == KeySource::Fingerprint) {
        let wrong = Wrong::new("what stands after `fingerprint` is never used");
        table.report("from", wrong.hint("put \"fingerprint\" last"));
    }
}

fn check_cors(table: &Table<'_>, cors: &Cors) {
    let any = cors.origins.iter().any(|origin| origin == "*");
    if cors.preflight && cors.origins.is_empty() && table.get("preflight").is_some() {
        let wrong = Wrong::new("no origin is named whose preflights could be answered");
        table.report("preflight", wrong.hint("name the origins, such as origins = [\"https://shop.example\"]"));
    }
    if any && cors.origins.len() > 1 {
        table.report("origins", Wrong::new("`*` is every origin").hint("let it stand alone, or remove it"));
    }
    if any && cors.credentials {
        // Browsers refuse it (Fetch, 3.3.5).
        let wrong = Wrong::new("browsers do not accept `*` together with credentials");
        table.report("credentials", wrong.hint("name the origins, or remove credentials"));
    }
}

/// `in_flight`: a word, or a table with how long to wait.
fn in_flight() -> Kind<InFlight> {
    let shape = || {
        let mut shape = Wait::SECTION.shape();
        shape["type"] = json!(["string", "object"]);
        shape["pattern"] = "^reject$".into();
        shape
    };
    let print = |value: &InFlight| match value {
        InFlight::Reject => "reject".into(),
        InFlight::Wait(wait) => Wait { wait: Some(*wait) }.print_inline().into(),
    };
    Kind::new(shape, word, print).with_inner(|| Inner::Table(Wait::SECTION)).merged(|node, base| {
        let read = if node.is_table() { wait(node) } else { node.accept(word(node)) };
        read.unwrap_or(base)
    })
}

fn word(node: &Node<'_>) -> Result<InFlight, Wrong> {
    let word = match node.text() {
        Ok(_) => node.word(&[("reject", InFlight::Reject)]),
        Err(_) => Err(node.expected("\"reject\" or a table")),
    };
    word.map_err(|wrong| wrong.hint("write \"reject\" or { wait = \"10s\" }"))
}

fn wait(node: &Node<'_>) -> Option<InFlight> {
    let table = Table::open(node.clone(), Wait::SECTION);
    if table.get("wait").is_none() {
        table.report("wait", Wrong::new("is missing").hint("write { wait = \"10s\" }, or \"reject\""));
    }
    Wait::read(&table, Wait::default()).wait.map(InFlight::Wait)
}

/// `scope`
fn scope() -> Kind<Scope> {
    let optional = format!(r"(header:{TOKEN}|cookie:{TOKEN}|basic:user|client-cert:(subject|san)|jwt:[^\s?]+)\?");
    let pattern = format!("^({optional}?|credential|host|client-ip|const:.*)$");
    let hint = "write [\"const:shared\"] if all clients may get each other's answers";
    let check = |words: Vec<ScopeWord>| {
        // With a `?` or without, it is the same part.
        let twice = |(place, word): &(usize, &ScopeWord)| words[..*place].iter().any(|other| other.part == word.part);
        match words.iter().enumerate().find(twice) {
            Some((_, word)) => Err(Wrong::new(format!("`{}` stands twice", word.part)).hint("remove one of them")),
            None => Ok(words.into_iter().collect()),
        }
    };
    set(hint, text(pattern, part)).map(check, |scope: &Scope| scope.words().collect())
}

fn source(node: &Node<'_>) -> Result<KeySource, Wrong> {
    let hint = "such as \"header:Idempotency-Key\", \"query:request_id\" or \"json:/request/id\"";
    KeySource::parse(node.filled()?).map_err(|message| hinted(&message, hint))
}

fn part(node: &Node<'_>) -> Result<ScopeWord, Wrong> {
    let text = node.filled()?;
    ScopeWord::parse(text).map_err(|message| hinted(&message, "such as \"header:X-Tenant\" or \"cookie:session?\""))
}

/// What the pure core says of a word: what follows "use" is what to do, and `hint` where it does not say.
fn hinted(message: &str, hint: &str) -> Wrong {
    match message.split_once(": use ") {
        Some((message, choice)) => Wrong::new(message).hint(format!("use {choice}")),
        None => Wrong::new(message).hint(hint),
    }
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
        Some((host, _)) if host.contains('*') => {
            Err(wrong.hint("patterns are not supported: write each origin out, or \"*\" alone for any origin"))
        }
        Some((host, port)) if host.ends_with(port) => {
            Err(wrong.hint(format!("write it without {port}: browsers leave out the default port")))
        }
        Some((host, _)) if is_host(host) && text.to_ascii_lowercase() == text => Ok(text.to_owned()),
        _ => Err(wrong.hint("write scheme, host and port alone, in lower case, such as \"https://shop.example\"")),
    }
}

/// Reads a path that the upstream is asked for.
fn asked(node: &Node<'_>) -> Result<PathAndQuery, Wrong> {
    let text = node.filled().map_err(|wrong| wrong.hint("write a path such as \"/v1/whoami\""))?;
    let is_sound = |byte: u8| byte.is_ascii_alphanumeric() || b"._~!$&'()*+,;=:@%/?-".contains(&byte);
    let is_path = text.starts_with('/') && !text.starts_with("//") && text.bytes().all(is_sound);
    text.parse::<PathAndQuery>().ok().filter(|_| is_path).ok_or_else(|| {
        let wrong = Wrong::new(format!("`{text}` is not a path"));
        wrong.hint(match text {
            _ if text.contains("://") => {
                "write the path alone, such as \"/v1/whoami\": the route's own upstream is asked"
            }
            _ if text.contains(' ') => "write the path alone, such as \"/v1/whoami\": it is asked for with GET",
            _ if text.contains('{') => {
                "write one path for all requests, such as \"/v1/whoami\": their headers say who asks"
            }
            _ => "write one such as \"/v1/whoami\"",
        })
    })
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
