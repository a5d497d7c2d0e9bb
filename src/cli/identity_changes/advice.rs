//! How keys that would be forgotten can be kept: lines to write into the configuration.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::{Present, PresentRoute, fingerprint, list, string};
use crate::gate::identity::Former;
use crate::gate::identity::coverage::{LossReason, LostKeys};
use crate::idempotency::description::{CoverageDescription, NamespaceDescription, RouteDescription, RulesDescription};
use crate::idempotency::key::title_case;
use crate::store::IdentityChange;

/// Lines of a configuration to write, and where.
struct TomlLines {
    place: String,
    lines: Vec<String>,
}

/// How to give these requests a route of their namespace again, in lines.
pub(super) fn how_to_take(present: &Present<'_>, lost: &LostKeys) -> String {
    let namespace = &lost.namespace;
    // The rules are the same as before.
    let Some(rules) = present.of(namespace).next().map(|route| route.rules.clone()) else { return String::new() };
    let former = Former::Described(rules.clone());
    match &lost.reason {
        LossReason::NoRoute => {
            let everything = RouteDescription {
                name: namespace.to_string(),
                methods: lost.methods.iter().cloned().collect(),
                host: None,
                path: "/{*rest}".to_owned(),
            };
            let routes: Vec<RouteDescription> = match lost.former.is_empty() {
                true => vec![everything],
                false => lost.former.iter().map(|route| narrowed(route, &lost.methods)).collect(),
            };
            let blocks = routes.iter().map(|route| block(present, namespace, route, Some((&former, &rules))));
            let lines: Vec<String> = blocks.flatten().collect();
            advice(
                "Add a route for the requests that no route takes:",
                &[TomlLines { place: String::new(), lines }],
                "",
            )
        }
        LossReason::Unprotected(route, mode) => {
            let place = format!("{}, without its mode = \"{}\"", present.place(route), mode.as_str());
            let mut lines = vec![setting("namespace", namespace)];
            lines.extend(rules_as_lines(&former, &rules));
            advice("Let the route that takes these requests protect them:", &[TomlLines { place, lines }], "")
        }
        LossReason::Other(route) => match present.routes.iter().find(|known| known.name == &**route) {
            Some(known) if !known.is_on_file => restoring(present, &[known], (&former, &rules), Some(namespace)),
            _ => format!(
                "     Leave {} out until the keys have expired: with `namespace = {}` it\n     would forget keys of its \
                 own.\n",
                present.named(route),
                string(namespace)
            ),
        },
        LossReason::Undelivered(route) => format!(
            "     Keep the name `{route}` of the route, and its namespace, until none is left in\n     \
             `oncegate deliveries list {route} --state queued`.\n"
        ),
        LossReason::OtherSecret => {
            "     Leave the former secret in `[store] other_id_secret_files` until they have expired.\n".to_owned()
        }
        LossReason::Sealed => {
            "     Add the key that these records were encrypted with to `[store] encryption_keys`.\n".to_owned()
        }
        LossReason::Unreadable => {
            "     Restore the former routes, or start the version of oncegate that wrote these records.\n".to_owned()
        }
    }
}

fn narrowed(route: &RouteDescription, methods: &BTreeSet<String>) -> RouteDescription {
    let methods = route.methods.iter().filter(|method| methods.contains(*method)).cloned().collect();
    RouteDescription { methods, ..route.clone() }
}

/// A whole route, with these rules where they are known.
fn block(
    present: &Present<'_>,
    namespace: &str,
    route: &RouteDescription,
    rules: Option<(&Former, &RulesDescription)>,
) -> Vec<String> {
    let numbered = (2..).map(|number| format!("{}-{number}", route.name));
    let mut names = std::iter::once(route.name.clone()).chain(numbered);
    let name = names.find(|name| !present.places.contains_key(&**name)).unwrap_or_default();
    let mut lines = vec!["[[routes]]".to_owned(), setting("name", &name)];
    lines.push(format!("methods = {}", list(&route.methods)));
    lines.extend(route.host.as_ref().map(|host| setting("host", host)));
    lines.push(setting("path", &route.path));
    lines.extend(present.upstream.map(|upstream| setting("upstream", upstream)));
    if name != namespace {
        lines.push(setting("namespace", namespace));
    }
    lines.extend(rules.map(|(former, rules)| rules_as_lines(former, rules)).unwrap_or_default());
    lines
}

/// All rules that a route can have, as they are written.
fn rules_as_lines(former: &Former, rules: &RulesDescription) -> Vec<String> {
    let scope = rules.scope.iter().map(|part| scope_word(part, former));
    let key: Vec<String> = rules.key.iter().map(|place| word(place)).collect();
    let mut lines = vec![format!("scope = {}", list(&scope.collect::<Vec<_>>())), format!("key.from = {}", list(&key))];
    lines.extend(rules.fingerprint.as_ref().map(|was| format!("fingerprint = {}", fingerprint(was))));
    lines
}

/// What to write into the configuration, in lines.
pub(super) fn how_to_keep(present: &Present<'_>, change: &IdentityChange, former: &Former) -> String {
    let IdentityChange { service, namespace, .. } = change;
    if **service != *present.service {
        let lines = vec![setting("service", service)];
        return advice(
            "Write the former name of the service:",
            &[TomlLines { place: "[store]".to_owned(), lines }],
            "",
        );
    }
    let same: Vec<&PresentRoute<'_>> = present.of(namespace).collect();
    if !same.is_empty() {
        let Some(rules) = former.rules() else {
            return "     Restore the former scope, key.from, server.trusted_proxies and store.id_secret_file.\n"
                .to_owned();
        };
        return restoring(present, &same, (former, rules), None);
    }
    let unprotected: Vec<String> = present.unprotected(namespace).collect();
    if !unprotected.is_empty() {
        return format!(
            "     Remove the mode again: {}. Observing and passing look at no\n     record: a retry of a key that ran would run \
             again.\n",
            unprotected.join(", ")
        );
    }
    match present.newcomers().collect::<Vec<_>>().as_slice() {
        [] => {
            let coverage = change.description.as_deref().and_then(NamespaceDescription::parse);
            let routes =
                coverage.and_then(|described| described.coverage).map(|CoverageDescription { routes, .. }| routes);
            let known = former.rules().map(|rules| (former, rules));
            let lines = match routes {
                Some(routes) => routes.iter().flat_map(|route| block(present, namespace, route, known)).collect(),
                None => Vec::new(),
            };
            let another =
                format!("another route takes its requests now, add `namespace = {}` to that", string(namespace));
            match lines.is_empty() {
                true => format!("     Restore the route `{namespace}`; or, where {another}.\n"),
                false => {
                    let restore = format!("Restore the former route; or, where {another}:");
                    advice(&restore, &[TomlLines { place: String::new(), lines }], "")
                }
            }
        }
        new => match former.rules() {
            Some(rules) => restoring(present, new, (former, rules), Some(namespace)),
            None => {
                let tables = new.iter().map(|route| TomlLines {
                    place: present.place(route.name),
                    lines: vec![setting("namespace", namespace)],
                });
                advice(
                    &format!("Add this to each route that takes requests of `{namespace}` now:"),
                    &tables.collect::<Vec<_>>(),
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
        let mut table: Vec<String> = namespace.map(|namespace| setting("namespace", namespace)).into_iter().collect();
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
            others.insert("     Restore server.trusted_proxies, server.forwarded and server.proxy_protocol.\n");
        }
        match (rules.id_secret, now.id_secret) {
            (true, false) => drop(others.insert(
                "     Restore store.id_secret_file, or list that file in store.other_id_secret_files until the keys have \
                 expired.\n",
            )),
            (false, true) => drop(others.insert(
                "     Write other_id_secret_files = [\"none\"] in [store] until the keys have expired.\n",
            )),
            (true, true) if namespace.is_none() && table.is_empty() && now == rules => {
                others.insert(
                    "     List the file with the former secret in store.other_id_secret_files until the keys have \
                     expired.\n",
                );
            }
            _ => {}
        }
        tables.push(TomlLines { place: present.place(route.name), lines: table });
    }
    // It is not written down where there are no [[routes]]; nor is a scope that was the default, and is another one now.
    let is_only_default = matches!(routes, [route] if route.name == "default");
    let has_default_scope = |route: &&PresentRoute<'_>| route.rules.scope == present.default_scope;
    let is_upgrade = matches!(former, Former::Recognised(_)) && routes.iter().all(has_default_scope);
    if namespace.is_none() && (is_only_default || is_upgrade && tables.iter().all(|table| table.lines.len() == 1)) {
        tables.truncate(1);
        tables[0].place = "[defaults]".to_owned();
    }
    tables.retain(|table| !table.lines.is_empty());
    let others: String = others.into_iter().collect();
    if tables.is_empty() {
        return match others.is_empty() {
            true => "     Restore the former settings.\n".to_owned(),
            false => others,
        };
    }
    match (namespace, tables.len()) {
        (Some(gone), 1) => {
            advice(&format!("Add this to the route that takes requests of `{gone}` now:"), &tables, &others)
        }
        (Some(gone), _) => {
            let lead = format!(
                "Add this to each of these routes that takes requests of `{gone}` now; routes that share a namespace need \
                 the\n     same rules:"
            );
            advice(&lead, &tables, &others)
        }
        (None, _) => advice("Write the former value:", &tables, &others),
    }
}

fn advice(lead: &str, tables: &[TomlLines], more: &str) -> String {
    let mut text = format!("     {lead}\n");
    for TomlLines { place, lines } in tables {
        if !place.is_empty() {
            let _ = writeln!(text, "       {place}:");
        }
        for line in lines {
            let _ = writeln!(text, "         {line}");
        }
    }
    text + more
}

fn setting(key: &str, value: &str) -> String {
    format!("{key} = {}", string(value))
}

/// A part of a former scope as it is to be written. Earlier versions took a request without it: now that needs a `?`. They had no
/// `jwt:` yet.
pub(super) fn scope_word(part: &str, former: &Former) -> String {
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
