//! What a start refuses because it would forget keys, for the operator who has to decide what to do about it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use self::advice::{how_to_keep, how_to_take};
use crate::config::{Place, Resolved};
use crate::gate::identity::coverage::{LossReason, LostKeys};
use crate::gate::identity::{Former, IdentityRules};
use crate::idempotency::description::{FingerprintDescription, RulesDescription};
use crate::idempotency::policy::{Mode, Policy};
use crate::idempotency::record::Timestamp;
use crate::store::{IdentityChange, LiveKeys, NamespaceRules};

pub(super) use self::live::{look_for_given_up, look_for_lost};

mod advice;
mod live;
mod undelivered;

/// The flag that forgets them.
pub(super) const ACCEPT: &str = "--accept-identity-change";

/// The last millisecond of the year 9999, the last that RFC 3339 can write.
const LAST: Timestamp = Timestamp(253_402_300_799_999);

/// What adopting a configuration would forget.
#[derive(Debug, Default)]
pub(super) struct Forgotten {
    /// Namespaces whose rules change, or that are gone: all their keys.
    pub(super) changes: Vec<IdentityChange>,
    /// Keys of namespaces that keep their rules, whose requests their routes no longer take.
    pub(super) lost: Vec<LostKeys>,
}

/// What an operator can do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Occasion {
    /// Start the process again.
    Start,
    /// Reload the configuration again, or restart the process.
    Reload,
}

/// How a configuration is written, for advice that can be pasted into it.
#[derive(Clone, Debug, Default)]
pub(super) struct Written {
    /// See [`Resolved::route_places`].
    places: Vec<Place>,
    upstreams: Vec<String>,
}

/// What the present configuration has.
struct Present<'a> {
    service: &'a str,
    /// The scope of a route that names none.
    default_scope: Vec<String>,
    routes: Vec<PresentRoute<'a>>,
    /// Those that make none, with their namespaces and modes.
    unprotected: Vec<(&'a str, &'a str, Mode)>,
    /// The names that are taken, and where the routes stand.
    places: BTreeMap<&'a str, Option<String>>,
    /// The upstream that a new route must name, where there are several.
    upstream: Option<&'a str>,
    /// Whether a route accepts requests.
    accepts: bool,
}

/// A route that makes records.
struct PresentRoute<'a> {
    name: &'a str,
    namespace: &'a str,
    /// Whether the store has rules of its namespace on file already.
    is_on_file: bool,
    rules: RulesDescription,
}

impl Forgotten {
    /// How many keys of which namespaces, each once.
    pub(super) fn by_namespace(&self) -> Vec<(Arc<str>, u64)> {
        let changed = self.changes.iter().map(|change| (&change.namespace, change.keys()));
        let mut keys: BTreeMap<Arc<str>, u64> = BTreeMap::new();
        for (namespace, count) in changed.chain(self.forgotten().map(|lost| (&lost.namespace, lost.keys))) {
            *keys.entry(Arc::clone(namespace)).or_default() += count;
        }
        keys.into_iter().collect()
    }

    pub(super) fn is_nothing(&self) -> bool {
        self.changes.is_empty() && self.lost.is_empty()
    }

    pub(super) fn keys(&self) -> u64 {
        let changes = self.changes.iter().map(IdentityChange::keys);
        changes.chain(self.forgotten().map(|lost| lost.keys)).sum()
    }

    fn forgotten(&self) -> impl Iterator<Item = &LostKeys> {
        self.lost.iter().filter(|lost| !lost.are_undelivered())
    }
}

impl Written {
    pub(super) fn of(config: &Resolved) -> Self {
        let upstreams = config.upstreams.iter().map(|upstream| upstream.name.to_string()).collect();
        Self { places: config.route_places.clone(), upstreams }
    }
}

/// Whether ids would be made with a secret of which the store has not heard, in the place of one that it knows. A gate that
/// does not know the new one would not find what this one records.
pub(super) fn is_unannounced(on_file: &[NamespaceRules], rules: IdentityRules<'_>) -> bool {
    rules.adoption().1.iter().any(|adopting| {
        on_file.iter().filter(|found| found.service == adopting.service && found.namespace == adopting.namespace).any(
            |found| {
                found.digest.is_some_and(|now| adopting.others.contains(&now))
                    && !found.in_force().contains(&adopting.digest)
            },
        )
    })
}

/// Why a start is refused where [`is_unannounced`].
pub(super) const UNANNOUNCED: &str = "the secret in store.id_secret_file is new to this store: gates that do not know it yet would not find \
     what this one records, and would run retries again\n\
     What you can do, best first:\n  \
     1. Let all gates know the new secret first: restart them one by one with the former secret in id_secret_file and the new \
     one in other_id_secret_files. When all of them have it, swap the two, one gate after the other.\n  \
     2. If no other gate of this store runs or drains: start once with --accept-identity-change. No key is forgotten.";

/// What would be forgotten, why, and what to do instead, best first. Several lines, without a line break at the end.
///
/// `on_file` is what the store has of all namespaces.
pub(super) fn report(
    forgotten: &Forgotten,
    rules: IdentityRules<'_>,
    on_file: &[NamespaceRules],
    written: &Written,
    occasion: Occasion,
) -> String {
    let service = rules.service();
    let is_on_file = |namespace: &str| {
        let of = |found: &NamespaceRules| found.service == *service && *found.namespace == *namespace;
        on_file.iter().any(|found| of(found) && found.digest.is_some())
    };
    let routes = rules.routes().map(|(route, rules)| PresentRoute {
        name: &route.name,
        namespace: &route.namespace,
        is_on_file: is_on_file(&route.namespace),
        rules,
    });
    let unprotected = rules.router().routes().iter().filter(|route| !route.policy.mode.protects());
    let unprotected = unprotected.map(|route| (&*route.name, &*route.namespace, route.policy.mode));
    let Policy { scope, key, fingerprint, .. } = Policy::default();
    let default_scope = RulesDescription::of(&scope, &key, &fingerprint, "", false).scope;
    let places = rules.router().routes().iter().enumerate();
    let places = places.map(|(index, route)| (&*route.name, written.places.get(index).map(Place::to_string)));
    let upstream = written.upstreams.get(rules.default_upstream().unwrap_or_default());
    let present = Present {
        service,
        default_scope,
        routes: routes.collect(),
        unprotected: unprotected.collect(),
        places: places.collect(),
        upstream: upstream.filter(|_| written.upstreams.len() > 1).map(String::as_str),
        accepts: rules.router().routes().iter().any(|route| route.policy.accepts()),
    };
    let formers: Vec<Former> = forgotten.changes.iter().map(|change| rules.former(change)).collect();
    let changes: Vec<_> = forgotten.changes.iter().zip(&formers).collect();
    let (undelivered, lost): (Vec<&LostKeys>, Vec<&LostKeys>) =
        forgotten.lost.iter().partition(|lost| lost.are_undelivered());
    let mut reports = Vec::new();
    if !changes.is_empty() || !lost.is_empty() {
        reports.push(text(&present, &changes, &lost, occasion));
    }
    if !undelivered.is_empty() {
        reports.push(undelivered::report(&present, &undelivered, occasion));
    }
    reports.join("\n\n")
}

fn text(
    present: &Present<'_>,
    changes: &[(&IdentityChange, &Former)],
    lost: &[&LostKeys],
    occasion: Occasion,
) -> String {
    let total = changes.iter().map(|(change, _)| change.keys()).chain(lost.iter().map(|lost| lost.keys)).sum();
    let mut text = format!(
        "this configuration would forget {}: a retry with {} would run its request again\n",
        keys(total),
        if total == 1 { "it" } else { "one of them" }
    );
    for (change, former) in changes {
        text.push('\n');
        for line in what_changed(present, change, former) {
            let _ = writeln!(text, "{line}");
        }
        let _ = writeln!(text, "  {}: {}", keys(change.keys()), by_route(change));
    }
    for (index, of_namespace) in lost.iter().enumerate() {
        let namespace = &of_namespace.namespace;
        if index == 0 || lost[index - 1].namespace != *namespace {
            let what = match of_namespace.reason {
                LossReason::OtherSecret => "requests no longer find their records",
                _ => "its routes no longer take requests that have keys",
            };
            let _ = writeln!(text, "\nnamespace `{namespace}`: {what}");
        }
        let _ = writeln!(text, "  {}", what_is_lost(present, of_namespace));
    }
    text.push_str("\nWhat you can do, best first:\n  1. Keep the keys.\n");
    let mut said: BTreeSet<String> = BTreeSet::new();
    let advice = changes.iter().map(|(change, former)| how_to_keep(present, change, former));
    for advice in advice.chain(lost.iter().map(|lost| how_to_take(present, lost))) {
        // Once for all namespaces of a service that is gone.
        if said.insert(advice.clone()) {
            text.push_str(&advice);
        }
    }
    let is_renamed = |live: &LiveKeys| live.in_flight > 0 && !present.places.contains_key(&*live.route);
    if present.accepts && changes.iter().any(|(change, _)| change.live.iter().any(is_renamed)) {
        text.push_str(
            "     Keep the name of a route that has accepted requests in its queue: nothing else delivers them.\n",
        );
    }
    let (then, forget) = match occasion {
        Occasion::Start => ("", format!("start once with {ACCEPT}")),
        Occasion::Reload => {
            (" Then reload again.", format!("restart the process, once with {ACCEPT}. A reload never forgets keys"))
        }
    };
    let _ = write!(
        text,
        "  2. Wait until the keys have expired: {}.\n     \
         Until then, let no request claim a key under the former rules.{then}\n  \
         3. Forget the keys: {forget}.\n     \
         {} forgotten: a retry with a forgotten key runs its request again.",
        expiry(changes, lost),
        match total {
            1 => "1 key is".to_owned(),
            total => format!("{total} keys are"),
        },
    );
    text
}

/// Which requests, and what would become of them.
fn what_is_lost(present: &Present<'_>, lost: &LostKeys) -> String {
    let in_flight = if lost.in_flight > 0 { format!(" ({} in flight)", lost.in_flight) } else { String::new() };
    let why = match &lost.reason {
        LossReason::Undelivered(route) => {
            return format!("{} of the route `{route}`", undelivered::requests(lost.keys));
        }
        LossReason::NoRoute => "no route takes".to_owned(),
        LossReason::Unprotected(route, mode) => {
            format!("{}, which has mode = \"{}\", takes", present.named(route), mode.as_str())
        }
        LossReason::Other(route) => {
            let namespace = present.routes.iter().find(|known| known.name == &**route).map(|route| route.namespace);
            let namespace = namespace.unwrap_or_default();
            format!("{}, which has the namespace `{namespace}`, takes", present.named(route))
        }
        LossReason::OtherSecret => {
            return format!(
                "{}{in_flight}: made with a secret that is not in `[store] other_id_secret_files`, of {}",
                keys(lost.keys),
                lost.examples.join(", ")
            );
        }
        LossReason::Sealed => {
            return format!(
                "{}{in_flight}: encrypted with a key that is not in `[store] encryption_keys`",
                keys(lost.keys)
            );
        }
        LossReason::Unreadable => {
            return format!("{}{in_flight}: this version of oncegate cannot read their requests", keys(lost.keys));
        }
    };
    let more = if lost.keys > lost.examples.len() as u64 { " and others" } else { "" };
    format!("{}{in_flight}: {why} {}{more}", keys(lost.keys), lost.examples.join(", "))
}

/// Which rule, with its old value and its new one.
fn what_changed(present: &Present<'_>, change: &IdentityChange, former: &Former) -> Vec<String> {
    let IdentityChange { service, namespace, .. } = change;
    if **service != *present.service {
        return vec![format!("the service `{service}` is gone: this configuration has `{}`", present.service)];
    }
    let same: Vec<&PresentRoute<'_>> = present.of(namespace).collect();
    let Some(now) = same.first() else {
        let unprotected: Vec<String> = present.unprotected(namespace).collect();
        if !unprotected.is_empty() {
            return vec![format!("namespace `{namespace}`: no route protects its keys: {}", unprotected.join(", "))];
        }
        let new: Vec<&PresentRoute<'_>> = present.newcomers().collect();
        let is_same = |route: &&PresentRoute<'_>| former.rules().is_some_and(|former| former == &route.rules);
        let instead = match new.as_slice() {
            [] => "no new one takes its place".to_owned(),
            new => {
                let rules = if new.iter().all(is_same) { ", with the same rules" } else { "" };
                let namespaces: BTreeSet<&str> = new.iter().map(|route| route.namespace).collect();
                format!("this configuration has {} instead{rules}", quoted(namespaces))
            }
        };
        return vec![format!("the namespace `{namespace}` is gone: {instead}")];
    };
    let lines = match former.rules() {
        Some(former) => differences(former, &now.rules),
        None => vec![
            "the rules were changed; an earlier version of oncegate, which recorded only their digest, adopted the former \
             ones"
            .to_owned(),
        ],
    };
    lines.into_iter().map(|line| format!("namespace `{namespace}`: {line}")).collect()
}

fn differences(former: &RulesDescription, now: &RulesDescription) -> Vec<String> {
    let mut lines = Vec::new();
    let mut compare = |rule: &str, was: String, is: String| {
        if was != is {
            lines.push(format!("{rule}: was {was}, is now {is}"));
        }
    };
    compare("scope", list(&former.scope), list(&now.scope));
    compare("key.from", list(&former.key), list(&now.key));
    if let (Some(was), Some(is)) = (&former.fingerprint, &now.fingerprint) {
        compare("fingerprint", fingerprint(was), fingerprint(is));
    }
    // It counts only where the address does; where that comes or goes the scope says so.
    if former.scope == now.scope {
        let trusted = |rules: &RulesDescription| match &rules.trusted_proxies {
            Some(rule) => in_words_of_the_configuration(rule),
            None => "none".to_owned(),
        };
        compare(
            "trusted proxies (server.trusted_proxies, server.forwarded, server.proxy_protocol)",
            trusted(former),
            trusted(now),
        );
        let header =
            |rules: &RulesDescription| rules.token_header.clone().unwrap_or_else(|| "authorization".to_owned());
        compare("the header of tokens (auth.jwt.header)", header(former), header(now));
    }
    let secret = |rules: &RulesDescription| if rules.id_secret { "set" } else { "not set" }.to_owned();
    compare("store.id_secret_file", secret(former), secret(now));
    if lines.is_empty() {
        lines.push(match now.id_secret {
            true => "store.id_secret_file: the secret is another one".to_owned(),
            false => "a rule was changed that this version of oncegate does not know".to_owned(),
        });
    }
    lines
}

/// A rule for client addresses, which begins with the name of a style as records keep it.
fn in_words_of_the_configuration(rule: &str) -> String {
    let styles = [("XForwarded", "x-forwarded"), ("Rfc7239", "rfc7239"), ("Both", "both")];
    let known = styles.into_iter().find_map(|(kept, word)| Some(format!("{word}{}", rule.strip_prefix(kept)?)));
    known.unwrap_or_else(|| rule.to_owned())
}

fn by_route(change: &IdentityChange) -> String {
    let routes = change.live.iter().map(|live| {
        let in_flight = if live.in_flight > 0 { format!(" ({} in flight)", live.in_flight) } else { String::new() };
        format!("{} of route `{}`{in_flight}", live.keys, live.route)
    });
    routes.collect::<Vec<_>>().join(", ")
}

/// When the last of them has gone.
fn expiry(changes: &[(&IdentityChange, &Former)], lost: &[&LostKeys]) -> String {
    let of_changes = || changes.iter().flat_map(|(change, _)| &change.live).map(|live| (live.in_flight, live.until));
    let live = || of_changes().chain(lost.iter().map(|lost| (lost.in_flight, lost.until)));
    let in_flight: u64 = live().map(|(in_flight, _)| in_flight).sum();
    let last = live().filter_map(|(_, until)| until).max().map(|last| format!("the last expires {}", rfc3339(last)));
    match (last, in_flight) {
        (Some(last), 0) => last,
        (Some(last), running) => format!("{last}; {running} in flight expire some time after their attempts end"),
        (None, _) => "all are queued or in flight, and expire some time after their attempts end".to_owned(),
    }
}

fn fingerprint(was: &FingerprintDescription) -> String {
    let mut text = format!("{{ of = {}, body = {}", list(&was.of), string(&was.body));
    for (key, pointers) in [("include", &was.include), ("exclude", &was.exclude)] {
        if !pointers.is_empty() {
            let _ = write!(text, ", {key} = {}", list(pointers));
        }
    }
    text + " }"
}

/// A list of strings in TOML.
fn list(items: &[String]) -> String {
    format!("[{}]", items.iter().map(|item| string(item)).collect::<Vec<_>>().join(", "))
}

/// A string in TOML, whose basic strings have all the escapes that JSON's have.
fn string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn quoted<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    names.into_iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn keys(count: u64) -> String {
    format!("{count} live key{}", if count == 1 { "" } else { "s" })
}

fn rfc3339(time: Timestamp) -> String {
    humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_millis(time.min(LAST).0)).to_string()
}

impl Former {
    fn rules(&self) -> Option<&RulesDescription> {
        match self {
            Self::Described(rules) | Self::Recognised(rules) => Some(rules),
            Self::Unknown => None,
        }
    }
}

impl<'a> Present<'a> {
    /// The routes of a namespace.
    fn of(&self, namespace: &str) -> impl Iterator<Item = &PresentRoute<'a>> {
        self.routes.iter().filter(move |route| route.namespace == namespace)
    }

    /// The routes of a namespace that do not protect, each with its mode.
    fn unprotected(&self, namespace: &str) -> impl Iterator<Item = String> {
        let of = self.unprotected.iter().filter(move |(_, known, _)| *known == namespace);
        of.map(|(name, _, mode)| format!("{} has mode = \"{}\"", self.named(name), mode.as_str()))
    }

    /// A route and where it stands, to begin a line.
    fn place(&self, route: &str) -> String {
        match self.places.get(route) {
            Some(Some(place)) => format!("route `{route}` ({place})"),
            _ => format!("route `{route}`"),
        }
    }

    /// The same in a sentence.
    fn named(&self, route: &str) -> String {
        format!("the {}", self.place(route))
    }

    /// The routes whose namespace is new to the store: one of them may have taken the place of one that is gone.
    fn newcomers(&self) -> impl Iterator<Item = &PresentRoute<'a>> {
        self.routes.iter().filter(|route| !route.is_on_file)
    }
}

#[cfg(test)]
mod tests;
