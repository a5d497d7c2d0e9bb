//! What a start refuses because it would forget keys, for the operator who has to decide what to do about it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use crate::gate::identities::{Former, IdentityRules};
use crate::idempotency::description::{FingerprintDescription, RulesDescription};
use crate::idempotency::policy::Policy;
use crate::idempotency::record::Timestamp;
use crate::store::{IdentityChange, NamespaceRules};

/// The flag that forgets them.
pub(super) const ACCEPT: &str = "--accept-identity-change";

/// The last millisecond of the year 9999, the last that RFC 3339 can write.
const LAST: Timestamp = Timestamp(253_402_300_799_999);

/// What the present configuration has.
struct Present<'a> {
    service: &'a str,
    /// The scope of a route that names none.
    default_scope: Vec<String>,
    routes: Vec<PresentRoute<'a>>,
}

/// A route that makes records.
struct PresentRoute<'a> {
    name: &'a str,
    namespace: &'a str,
    /// Whether the store has rules of its namespace on file already.
    is_on_file: bool,
    rules: RulesDescription,
}

/// What would be forgotten, why, and what to do instead, best first. Several lines, without a line break at the end.
///
/// `on_file` is what the store has of all namespaces.
pub(super) fn report(changes: &[IdentityChange], rules: IdentityRules<'_>, on_file: &[NamespaceRules]) -> String {
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
    let Policy { scope, key, fingerprint, .. } = Policy::default();
    let default_scope = RulesDescription::of(&scope, &key, &fingerprint, "", false).scope;
    let present = Present { service, default_scope, routes: routes.collect() };
    let formers: Vec<Former> = changes.iter().map(|change| rules.former(change)).collect();
    text(&present, &changes.iter().zip(&formers).collect::<Vec<_>>())
}

fn text(present: &Present<'_>, changes: &[(&IdentityChange, &Former)]) -> String {
    let total = changes.iter().map(|(change, _)| change.keys()).sum();
    let mut text = format!(
        "this configuration would forget {}: a retry with one of them would run its request again\n",
        keys(total)
    );
    for (change, former) in changes {
        text.push('\n');
        for line in what_changed(present, change, former) {
            let _ = writeln!(text, "{line}");
        }
        let _ = writeln!(text, "  {}: {}", keys(change.keys()), by_route(change));
    }
    text.push_str("\nWhat you can do, best first:\n  1. Keep the keys.\n");
    let mut said: BTreeSet<String> = BTreeSet::new();
    for (change, former) in changes {
        let advice = how_to_keep(present, change, former);
        // Once for all namespaces of a service that is gone.
        if said.insert(advice.clone()) {
            text.push_str(&advice);
        }
    }
    let _ = write!(
        text,
        "  2. Wait until the keys have expired: {}.\n     \
         Until then, let no request claim a key under the former rules.\n  \
         3. Forget the keys: start once with {ACCEPT}.\n     \
         {} forgotten: a retry with a forgotten key runs its request again.",
        expiry(changes),
        match total {
            1 => "1 key is".to_owned(),
            total => format!("{total} keys are"),
        },
    );
    text
}

/// Which rule, with its old value and its new one.
fn what_changed(present: &Present<'_>, change: &IdentityChange, former: &Former) -> Vec<String> {
    let IdentityChange { service, namespace, .. } = change;
    if **service != *present.service {
        return vec![format!("the service `{service}` is gone: this configuration has `{}`", present.service)];
    }
    let same: Vec<&PresentRoute<'_>> = present.of(namespace).collect();
    let Some(now) = same.first() else {
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
        let trusted = |rules: &RulesDescription| rules.trusted_proxies.clone().unwrap_or_else(|| "none".to_owned());
        compare("trusted proxies (server.trusted_proxies, server.forwarded)", trusted(former), trusted(now));
    }
    let secret = |rules: &RulesDescription| if rules.id_secret { "set" } else { "not set" }.to_owned();
    compare("store.id_secret_file", secret(former), secret(now));
    if lines.is_empty() {
        lines.push(match now.id_secret {
            true => "the secret in store.id_secret_file is another one".to_owned(),
            false => "a rule was changed that this version of oncegate does not know".to_owned(),
        });
    }
    lines
}

fn by_route(change: &IdentityChange) -> String {
    let routes = change.live.iter().map(|live| {
        let in_flight = if live.in_flight > 0 { format!(" ({} in flight)", live.in_flight) } else { String::new() };
        format!("{} of route `{}`{in_flight}", live.keys, live.route)
    });
    routes.collect::<Vec<_>>().join(", ")
}

/// What to write into the configuration, in lines.
fn how_to_keep(present: &Present<'_>, change: &IdentityChange, former: &Former) -> String {
    let IdentityChange { service, namespace, .. } = change;
    if **service != *present.service {
        return advice("Write the former name of the service:", &[&["[store]", &setting("service", service)]], "");
    }
    let same: Vec<&PresentRoute<'_>> = present.of(namespace).collect();
    if !same.is_empty() {
        let Some(rules) = former.rules() else {
            return "     Restore the former scope, key.from, server.trusted_proxies and store.id_secret_file.\n"
                .to_owned();
        };
        return restoring(present, &same, (former, rules), None);
    }
    match present.newcomers().collect::<Vec<_>>().as_slice() {
        [] => format!(
            "     Restore the route `{namespace}`, or write this into the route that takes its requests now:\n{}",
            indented(&[&["[[routes]]", &setting("namespace", namespace)]])
        ),
        new => match former.rules() {
            Some(rules) => restoring(present, new, (former, rules), Some(namespace)),
            None => {
                let tables: Vec<[String; 2]> =
                    new.iter().map(|route| [heading(route.name), setting("namespace", namespace)]).collect();
                let tables: Vec<Vec<&str>> = tables.iter().map(|table| lines(table)).collect();
                advice(
                    &format!("Write this into each route that takes requests of `{namespace}` now:"),
                    &tables.iter().map(Vec::as_slice).collect::<Vec<_>>(),
                    "     These routes need the scope and key.from that the former one had. An earlier version of oncegate \
                     adopted\n     those, and recorded only their digest.\n",
                )
            }
        },
    }
}

/// The lines that give these routes the former rules, and the former namespace where that is gone.
fn restoring(
    present: &Present<'_>,
    routes: &[&PresentRoute<'_>],
    (former, rules): (&Former, &RulesDescription),
    namespace: Option<&str>,
) -> String {
    let (mut tables, mut others) = (Vec::new(), BTreeSet::new());
    for route in routes {
        let mut table = vec![heading(route.name)];
        table.extend(namespace.map(|namespace| setting("namespace", namespace)));
        let now = &route.rules;
        if now.scope != rules.scope {
            let words = rules.scope.iter().map(|part| scope_word(part, former));
            table.push(format!("scope = {}", list(&words.collect::<Vec<_>>())));
        }
        if now.key != rules.key {
            let words: Vec<String> = rules.key.iter().map(|place| word(place)).collect();
            table.push(format!("key.from = {}", list(&words)));
        }
        if let Some(was) = rules.fingerprint.as_ref().filter(|was| now.fingerprint.as_ref() != Some(was)) {
            table.push(format!("fingerprint = {}", fingerprint(was)));
        }
        // It counts only where the address does; where that comes back with the scope, the next start says whether it is right.
        if now.scope == rules.scope && now.trusted_proxies != rules.trusted_proxies {
            others.insert("     Restore server.trusted_proxies and server.forwarded.\n");
        }
        match (rules.id_secret, now.id_secret) {
            (true, false) => drop(others.insert("     Restore store.id_secret_file.\n")),
            (false, true) => drop(others.insert("     Remove store.id_secret_file.\n")),
            (true, true) if namespace.is_none() && table.len() == 1 && now == rules => {
                others.insert("     Restore the former secret in store.id_secret_file.\n");
            }
            _ => {}
        }
        tables.push(table);
    }
    // It is not written down where there are no [[routes]]; nor is a scope that was the default, and is another one now.
    let is_only_default = matches!(routes, [route] if route.name == "default");
    let has_default_scope = |route: &&PresentRoute<'_>| route.rules.scope == present.default_scope;
    let is_upgrade = matches!(former, Former::Recognised(_)) && routes.iter().all(has_default_scope);
    if namespace.is_none() && (is_only_default || is_upgrade && tables.iter().all(|table| table.len() == 2)) {
        tables.truncate(1);
        tables[0][0] = "[defaults]".to_owned();
    }
    tables.retain(|table| table.len() > 1);
    let others: String = others.into_iter().collect();
    if tables.is_empty() {
        return match others.is_empty() {
            true => "     Restore the former settings.\n".to_owned(),
            false => others,
        };
    }
    let tables: Vec<Vec<&str>> = tables.iter().map(|table| lines(table)).collect();
    let tables: Vec<&[&str]> = tables.iter().map(Vec::as_slice).collect();
    match (namespace, tables.len()) {
        (Some(gone), 1) => {
            let lead = format!(
                "Write this into the route that takes the requests of `{gone}` now. A key whose request no route of this \
                 namespace\n     takes is not found:"
            );
            advice(&lead, &tables, &others)
        }
        (Some(gone), _) => {
            let lead = format!(
                "Write this into each of these routes that takes requests of `{gone}` now; routes that share a namespace \
                 need the\n     same rules:"
            );
            advice(&lead, &tables, &others)
        }
        (None, _) => advice("Write the former value:", &tables, &others),
    }
}

fn advice(lead: &str, tables: &[&[&str]], more: &str) -> String {
    format!("     {lead}\n{}{more}", indented(tables))
}

fn indented(tables: &[&[&str]]) -> String {
    tables.iter().flat_map(|table| table.iter()).fold(String::new(), |mut text, line| {
        let _ = writeln!(text, "         {line}");
        text
    })
}

fn lines(table: &[String]) -> Vec<&str> {
    table.iter().map(String::as_str).collect()
}

fn heading(route: &str) -> String {
    format!("[[routes]] # the one with name = {}", string(route))
}

fn setting(key: &str, value: &str) -> String {
    format!("{key} = {}", string(value))
}

/// A part of a former scope as it is to be written. Earlier versions took a request without it: now that needs a `?`.
fn scope_word(part: &str, former: &Former) -> String {
    let kind = part.split_once(':').map_or(part, |(kind, _)| kind);
    let may_be_absent = matches!(kind, "header" | "cookie" | "basic" | "client-cert");
    if may_be_absent && matches!(former, Former::Recognised(_)) { word(part) + "?" } else { word(part) }
}

/// A part of a scope or a place of a key as people write it.
fn word(text: &str) -> String {
    match text.strip_prefix("header:") {
        Some(name) => format!("header:{}", title_case(name)),
        None => text.to_owned(),
    }
}

fn title_case(name: &str) -> String {
    let words = name.split('-').map(|word| {
        let mut letters = word.chars();
        letters.next().map(|first| first.to_ascii_uppercase()).into_iter().chain(letters).collect::<String>()
    });
    words.collect::<Vec<_>>().join("-")
}

/// When the last of them has gone.
fn expiry(changes: &[(&IdentityChange, &Former)]) -> String {
    let live = || changes.iter().flat_map(|(change, _)| &change.live);
    let in_flight: u64 = live().map(|live| live.in_flight).sum();
    let last = live().filter_map(|live| live.until).max().map(|last| format!("the last expires {}", rfc3339(last)));
    match (last, in_flight) {
        (Some(last), 0) => last,
        (Some(last), running) => format!("{last}; {running} in flight expire some time after their attempts end"),
        (None, _) => "all are in flight, and expire some time after their attempts end".to_owned(),
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

    /// The routes whose namespace is new to the store: one of them may have taken the place of one that is gone.
    fn newcomers(&self) -> impl Iterator<Item = &PresentRoute<'a>> {
        self.routes.iter().filter(|route| !route.is_on_file)
    }
}

#[cfg(test)]
mod tests;
