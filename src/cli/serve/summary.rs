//! What a gate does, in one block at its start: where it listens and forwards, what its store survives, what it protects
//! and what it does not.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::durability::Durability;
use crate::config::{Resolved, Store, show_duration};
use crate::http::socket::Listen;
use crate::http::upstream::{self, UpstreamAddress};
use crate::idempotency::delivery::Deliver;
use crate::idempotency::key::{KeyRule, KeySource};
use crate::idempotency::policy::{Mode, Policy, Seal, StoreFailure};
use crate::idempotency::recovery::{Recovery, without_query_values};
use crate::idempotency::scope::Scope;
use crate::idempotency::settle::{Ending, OutcomeAction, Outcomes};
use crate::route::Route;
use crate::telemetry::logs::{Format, STRUCTURED};

/// The most routes or upstreams that are listed.
const MOST: usize = 50;

/// The most statuses that are listed of those whose outcome is not that of their class.
const MOST_STATUSES: usize = 8;

/// The most routes that are named behind a value that not all have.
const MOST_NAMES: usize = 8;

/// Where the second column of the block begins, in characters.
const COLUMN: usize = 15;

/// What a gate does, for its operator. It holds no secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Summary {
    /// Whether clients encrypt.
    is_secure: bool,
    /// Where clients connect.
    listen: Vec<String>,
    /// Where operators connect.
    admin: String,
    is_admin_secure: bool,
    /// How many tokens it takes.
    tokens: usize,
    upstreams: Vec<String>,
    store: Durability,
    /// Who can read what the store keeps; nothing where it keeps nothing.
    at_rest: Option<AtRest>,
    /// The cache in front of the store.
    cache: Option<String>,
    protected: Vec<Protected>,
    /// How many more routes protect.
    more_protected: usize,
    unprotected: Vec<String>,
}

/// A route that protects.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Protected {
    route: Shown,
    policy: Vec<(&'static str, String)>,
}

/// A value, and the names of the routes that have it.
type Named<'a> = (&'a str, Vec<&'a str>);

/// The requests of a route, and where they go.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Shown {
    name: String,
    methods: Vec<String>,
    host: Option<String>,
    path: String,
    upstream: String,
}

/// Who can read what the store keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
enum AtRest {
    /// Whoever has a copy.
    Readable,
    /// Those who have these keys, of which the first encrypts.
    Encrypted(Vec<Arc<str>>),
}

impl AtRest {
    fn of(config: &Resolved) -> Option<Self> {
        let ids: Vec<Arc<str>> = config.sealing.iter().map(|key| Arc::clone(&key.id)).collect();
        match config.store {
            Store::Memory => None,
            _ if ids.is_empty() => Some(Self::Readable),
            _ => Some(Self::Encrypted(ids)),
        }
    }

    /// It after a reload: keys replace keys, but only a start begins or ends encryption.
    fn reloaded(before: Option<&Self>, config: &Resolved) -> Option<Self> {
        match (before, Self::of(config)) {
            (Some(Self::Encrypted(_)), now @ Some(Self::Encrypted(_))) => now,
            _ => before.cloned(),
        }
    }
}

impl fmt::Display for AtRest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Encrypted(ids) => match &ids[..] {
                [first, others @ ..] if !others.is_empty() => {
                    write!(f, "encrypted with the key {first}; decrypted with {} too", others.join(", "))
                }
                ids => write!(f, "encrypted with the key {}", ids.join(", ")),
            },
            Self::Readable => f.write_str("readable by whoever has a copy; store.encryption_keys encrypts it"),
        }
    }
}

impl Summary {
    /// The summary of a gate with this configuration and store.
    pub(super) fn of(config: &Resolved, store: Durability) -> Self {
        let routes = config.router.routes();
        let mut protecting = routes.iter().filter(|route| route.policy.mode.protects());
        let shown = |route| Protected { route: Shown::of(config, route), policy: show_policy(&route.policy) };
        let protected = protecting.by_ref().take(MOST).map(|route| shown(route)).collect();
        let others = routes.iter().filter(|route| !route.policy.mode.protects());
        let shown = |route| format!("{} (mode = \"{}\")", Shown::of(config, route), route.policy.mode.as_str());
        let mut unprotected = bounded(others.map(|route| shown(route)));
        unprotected.push(show_rest(config));
        Self {
            is_secure: config.server.accept.tls.is_some(),
            listen: config.server.listen.iter().map(Listen::to_string).collect(),
            admin: config.admin.listen.to_string(),
            is_admin_secure: config.admin.tls.is_some(),
            tokens: config.admin.tokens.len(),
            upstreams: bounded(config.upstreams.iter().map(show_upstream)),
            store,
            at_rest: AtRest::of(config),
            cache: config.cache.as_ref().map(|cache| format!("Redis at {}, in front of the store", cache.servers())),
            protected,
            more_protected: protecting.count(),
            unprotected,
        }
    }

    /// The same, with the addresses that the listeners have.
    pub(super) fn at(self, admin: String, listen: Vec<String>) -> Self {
        Self { admin, listen, ..self }
    }

    /// The summary after a reload. What only a start sets stays.
    pub(super) fn reloaded(&self, config: &Resolved) -> Self {
        let now = Self::of(config, self.store.clone());
        let at_rest = AtRest::reloaded(self.at_rest.as_ref(), config);
        Self { cache: self.cache.clone(), at_rest, ..now }.at(self.admin.clone(), self.listen.clone())
    }

    /// Logs it: as one block, or as one line with a field for each part where lines are JSON.
    pub(super) fn log(&self, format: Format) {
        match format {
            Format::Text => tracing::info!("{}", self.text()),
            Format::Json => tracing::info!(
                target: STRUCTURED,
                version = VERSION,
                listen = self.listening().join(", "),
                admin = self.admin(),
                upstreams = self.upstreams.join("; "),
                store = self.store.place,
                cache = self.cache,
                survives = self.store.survives,
                at_rest = self.at_rest.as_ref().map(tracing::field::display),
                risks = self.risks().join("; "),
                protected = self.protected_json().to_string(),
                more_protected = (self.more_protected > 0).then_some(self.more_protected),
                unprotected = self.unprotected.join("; "),
                "serving"
            ),
        }
    }

    /// It as a block of lines.
    fn text(&self) -> String {
        let mut block = format!("oncegate {VERSION} serves");
        let mut line = |indent: usize, label: &str, text: &str| {
            let _ = write!(block, "\n{:indent$}{label:width$}{text}", "", width = COLUMN - indent);
        };
        let mut lines = |label: &str, texts: &[String]| {
            for (place, text) in texts.iter().enumerate() {
                line(2, if place == 0 { label } else { "" }, text);
            }
        };
        lines("clients", &self.listening());
        lines("admin", &[self.admin()]);
        lines("upstreams", &self.upstreams);
        lines("store", std::slice::from_ref(&self.store.place));
        lines("  survives", &[self.store.survives.to_owned()]);
        lines("  at rest", self.at_rest.as_ref().map(AtRest::to_string).as_slice());
        lines("  risks", &self.risks());
        lines("cache", self.cache.as_slice());
        let mut protected: Vec<String> = self.protected.iter().map(|known| known.route.to_string()).collect();
        protected.extend((self.more_protected > 0).then(|| more(self.more_protected)));
        lines("protected", &protected);
        self.policies().iter().for_each(|(label, texts)| lines(&format!("  {label}"), texts));
        lines("unprotected", &self.unprotected);
        block
    }

    fn listening(&self) -> Vec<String> {
        let scheme = if self.is_secure { "https" } else { "http" };
        let shown = |place: &String| match place.contains(':') && !place.starts_with("systemd") {
            true if !place.starts_with("unix:") => format!("{scheme}://{place}"),
            _ => place.clone(),
        };
        self.listen.iter().map(shown).collect()
    }

    fn admin(&self) -> String {
        let tokens = match self.tokens {
            0 => "without a token".to_owned(),
            1 => "with a token".to_owned(),
            several => format!("with {several} tokens"),
        };
        let scheme = if self.is_admin_secure { "https" } else { "http" };
        format!("{scheme}://{}, {tokens}", self.admin)
    }

    fn risks(&self) -> Vec<String> {
        std::iter::once(self.store.risk.to_owned()).chain(self.store.warnings.iter().cloned()).collect()
    }

    /// What the policies of the protected routes say, each value once: one that not all routes have names those that do.
    fn policies(&self) -> Vec<(&'static str, Vec<String>)> {
        let mut labels: Vec<(&'static str, Vec<Named<'_>>)> = Vec::new();
        for Protected { route, policy } in &self.protected {
            for (label, text) in policy {
                let at = labels.iter().position(|(known, _)| known == label).unwrap_or_else(|| {
                    labels.push((*label, Vec::new()));
                    labels.len() - 1
                });
                let texts = &mut labels[at].1;
                match texts.iter_mut().find(|(known, _)| known == text) {
                    Some((_, names)) => names.push(&route.name),
                    None => texts.push((text, vec![&route.name])),
                }
            }
        }
        let shown = |(text, names): Named<'_>| match names.len().checked_sub(MOST_NAMES) {
            _ if names.len() == self.protected.len() => text.to_owned(),
            None | Some(0) => format!("{text} ({})", names.join(", ")),
            Some(others) => format!("{text} ({} and {others} more)", names[..MOST_NAMES].join(", ")),
        };
        labels.into_iter().map(|(label, texts)| (label, texts.into_iter().map(shown).collect())).collect()
    }

    /// The protected routes as JSON: an array of objects.
    fn protected_json(&self) -> Value {
        let object = |Protected { route, policy }: &Protected| {
            let Shown { name, methods, host, path, upstream } = route;
            let mut object = Map::new();
            object.insert("route".to_owned(), json!(name));
            object.insert("methods".to_owned(), json!(methods));
            object.extend(host.as_ref().map(|host| ("host".to_owned(), json!(host))));
            object.insert("path".to_owned(), json!(path));
            object.insert("upstream".to_owned(), json!(upstream));
            object.extend(policy.iter().map(|(label, text)| (label.replace(' ', "_"), json!(text))));
            Value::Object(object)
        };
        self.protected.iter().map(object).collect()
    }
}

impl Shown {
    fn of(config: &Resolved, route: &Route) -> Self {
        Self {
            name: route.name.to_string(),
            methods: route.methods.iter().map(ToString::to_string).collect(),
            host: route.host.clone(),
            path: route.path.to_string(),
            upstream: config.upstreams[route.upstream].name.to_string(),
        }
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, methods, host, path, upstream } = self;
        let host = host.as_deref().unwrap_or_default();
        write!(f, "{name}: {} {host}{path} to {upstream}", methods.join(", "))
    }
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The first of them, and how many more there are.
fn bounded(items: impl Iterator<Item = String>) -> Vec<String> {
    let mut items = items.peekable();
    let mut shown: Vec<String> = items.by_ref().take(MOST).collect();
    if items.peek().is_some() {
        shown.push(more(items.count()));
    }
    shown
}

fn more(count: usize) -> String {
    format!("and {count} more: see `oncegate config print`")
}

fn show_upstream(settings: &upstream::Settings) -> String {
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    let url = |place: &UpstreamAddress| match place {
        UpstreamAddress::Tcp { .. } => format!("{scheme}://{place}"),
        UpstreamAddress::Unix(_) => place.to_string(),
    };
    let urls: Vec<String> = settings.places.iter().map(url).collect();
    let mut shown = format!("{}: {}", settings.name, urls.join(", "));
    let [connect, whole, client] =
        [settings.connect_timeout, settings.timeout, settings.client_timeout].map(show_duration);
    let _ = write!(shown, "; connect_timeout {connect}, timeout {whole}");
    if client != whole {
        let _ = write!(shown, ", client_timeout {client}");
    }
    shown
}

/// What becomes of requests that no route matches.
fn show_rest(config: &Resolved) -> String {
    let Some(index) = config.gate.default_upstream else { return "everything else: 404 no-route".to_owned() };
    // As it is configured: a `HeaderName` is in small letters.
    let header = config.effective["headers"]["status"].as_str();
    let header = header.map(|name| format!(" ({name}: ignored)")).unwrap_or_default();
    format!("everything else: to {}; a key does nothing there{header}", config.upstreams[index].name)
}

/// What an operator should know of a policy.
fn show_policy(policy: &Policy) -> Vec<(&'static str, String)> {
    let (ttl, unknown_ttl) = (show_duration(policy.ttl), show_duration(policy.unknown_ttl));
    let mut shown = vec![
        ("key", show_key(&policy.key)),
        ("caller", show_scope(&policy.scope)),
        ("ttl", format!("{ttl}; {unknown_ttl} where the outcome is unknown")),
        ("5xx", show_server_errors(&policy.outcomes, policy.mode == Mode::Accept)),
        (
            "unknown",
            if policy.mode == Mode::Accept {
                show_delivery_recovery(&policy.recovery)
            } else {
                show_recovery(&policy.recovery)
            },
        ),
    ];
    if policy.accepts() {
        let Deliver { attempts, give_up_after, .. } = &policy.deliver;
        let given_up = show_duration(*give_up_after);
        let who = match policy.mode {
            Mode::Accept => "every request is kept, answered 202 and delivered later",
            _ => "a request that prefers respond-async is kept, answered 202 and delivered later",
        };
        shown.push(("accepts", format!("{who}; given up after {attempts} attempts or {given_up}")));
    }
    if let Some(path) = policy.reauthorize.as_ref().map(|path| without_query_values(path.as_str())) {
        shown.push(("replays", format!("only where the upstream answers GET {path} with 2xx")));
    }
    if policy.seal == Seal::Required {
        shown.push(("records", "encrypted ones only (seal = \"required\")".to_owned()));
    }
    if policy.store_failure == StoreFailure::Forward {
        shown.push(("store away", "requests run unprotected (store_failure = \"forward\")".to_owned()));
    }
    shown
}

fn show_key(rule: &KeyRule) -> String {
    let places: Vec<String> = rule.from.iter().map(KeySource::to_string).collect();
    let places = places.join(" or ");
    match rule.required {
        _ if rule.from.contains(&KeySource::Fingerprint) => places,
        true => format!("{places}, required"),
        false => format!("{places}; a request without one is not protected"),
    }
}

/// Who a caller is: callers that differ in any part never share a key.
fn show_scope(scope: &Scope) -> String {
    scope.words().map(|word| show_part(&word.to_string())).collect::<Vec<_>>().join(" + ")
}

/// A part of a scope in words. A part without words here is shown as it is configured.
fn show_part(part: &str) -> String {
    if let Some(text) = part.strip_prefix("const:") {
        return format!("the constant {text}");
    }
    let (part, absent) = match part.strip_suffix('?') {
        Some(part) => (part, ", if there is one"),
        None => (part, ""),
    };
    let shown = match part {
        "host" => "the host".to_owned(),
        "credential" => {
            // The advice on `scope` says what a refreshed token does.
            "the credential (X-Api-Key, Basic user, token subject, or else cookies; callers without any of these share \
             their keys)"
                .to_owned()
        }
        "header:authorization" => "header authorization (a refreshed token is another caller)".to_owned(),
        "client-ip" => "the client's address".to_owned(),
        "basic:user" => "the user of Basic credentials".to_owned(),
        "client-cert:subject" => "the subject of the client's certificate".to_owned(),
        "client-cert:san" => "the names in the client's certificate".to_owned(),
        _ => match part.split_once(':') {
            Some((kind @ ("header" | "cookie"), name)) => format!("{kind} {name}"),
            Some(("jwt", claim)) => format!("claim {claim} of the token"),
            _ => part.to_owned(),
        },
    };
    format!("{shown}{absent}")
}

/// What becomes of a key whose request the upstream answers with a 5xx; where every request is accepted, of the delivery.
fn show_server_errors(outcomes: &Outcomes, is_delivered: bool) -> String {
    const ACTIONS: [OutcomeAction; 3] = [OutcomeAction::Release, OutcomeAction::Hold, OutcomeAction::Store];
    let statuses_with = |action: OutcomeAction| {
        let ends_so = move |status: &u16| outcomes.action(Ending::Answered(*status)) == action;
        (500..=599).filter(ends_so).collect::<Vec<u16>>()
    };
    let mut by_action = ACTIONS.map(|action| (action, statuses_with(action)));
    // That of the class comes first: nearly all statuses have it.
    by_action.sort_by_key(|(_, statuses)| std::cmp::Reverse(statuses.len()));
    let [(usual, _), exceptions @ ..] = &by_action;
    let mut shown = match usual {
        OutcomeAction::Release if is_delivered => "is delivered again later",
        OutcomeAction::Release => "frees the key: a retry runs again",
        OutcomeAction::Hold if is_delivered => "leaves the outcome unknown",
        OutcomeAction::Hold => "holds the key: the outcome is unknown",
        OutcomeAction::Store => "is kept: a retry gets it again",
    }
    .to_owned();
    for (action, statuses) in exceptions.iter().filter(|(_, statuses)| !statuses.is_empty()) {
        let verb = match (action, &statuses[..]) {
            (OutcomeAction::Release, [_]) if is_delivered => "is delivered again",
            (OutcomeAction::Release, _) if is_delivered => "are delivered again",
            (OutcomeAction::Release, [_]) => "frees it",
            (OutcomeAction::Release, _) => "free it",
            (OutcomeAction::Hold, [_]) if is_delivered => "leaves the outcome unknown",
            (OutcomeAction::Hold, _) if is_delivered => "leave the outcome unknown",
            (OutcomeAction::Hold, [_]) => "holds it: the outcome is unknown",
            (OutcomeAction::Hold, _) => "hold it: the outcome is unknown",
            (OutcomeAction::Store, [_]) => "is kept",
            (OutcomeAction::Store, _) => "are kept",
        };
        let listed: Vec<String> = statuses.iter().take(MOST_STATUSES).map(u16::to_string).collect();
        let more = match statuses.len().saturating_sub(MOST_STATUSES) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let _ = write!(shown, "; {}{more} {verb}", listed.join(", "));
    }
    shown
}

/// What becomes of a retry of a request whose outcome is unknown.
fn show_recovery(recovery: &Recovery) -> String {
    match recovery {
        Recovery::Hold => "a retry gets 409 outcome-unknown until an operator resolves the record".to_owned(),
        Recovery::Retry => "a retry runs again, perhaps beside the first attempt (recovery = \"retry\")".to_owned(),
        Recovery::Resend(resend) => format!(
            "a request is sent up to {} times while its client waits; then a retry gets 409 outcome-unknown",
            resend.attempts
        ),
        Recovery::Probe(probe) => {
            let every = probe
                .every
                .map_or_else(String::new, |every| format!("; the gate asks by itself every {}", show_duration(every)));
            format!("a retry asks the upstream what became of it (GET {}){every}", probe.path)
        }
    }
}

/// What becomes of an accepted request whose outcome is unknown.
fn show_delivery_recovery(recovery: &Recovery) -> String {
    match recovery {
        Recovery::Hold => "the request is given up until an operator resolves the record".to_owned(),
        Recovery::Retry => "it is delivered again, perhaps beside the first attempt (recovery = \"retry\")".to_owned(),
        Recovery::Resend(resend) => {
            format!("it is sent up to {} times, then given up until an operator resolves the record", resend.attempts)
        }
        Recovery::Probe(probe) => format!("the upstream is asked what became of it (GET {})", probe.path),
    }
}

#[cfg(test)]
mod tests;
