//! Settings as TOML: every value spelled out, so that reading it gives the same settings.

use std::path::PathBuf;

use toml_edit::{Array, ArrayOfTables, DocumentMut, InlineTable, Item, Table, Value, value};

use super::policy::{DELIVERIES, FORMS, MODES, RECOVERIES, STORE_FAILURES};
use super::units::{show_duration, show_size};
use super::upstreams::{PROTOCOLS, SHARINGS, encryption};
use super::{Resolved, Store};
use crate::http::upstream::{self, Place};
use crate::idempotency::fingerprint::Recipe;
use crate::idempotency::key::KeyRule;
use crate::idempotency::policy::InFlight;
use crate::idempotency::settle::{Action, Outcomes};
use crate::route::Route;

/// Writes the settings that no section prints itself. The file of the id secret is shown by name.
pub(super) fn document(resolved: &Resolved, id_secret_file: Option<&PathBuf>) -> DocumentMut {
    let mut document = DocumentMut::new();
    if let Some(index) = resolved.gate.default_upstream {
        document["default_upstream"] = value(&*resolved.upstreams[index].name);
    }
    document["store"] = store(resolved, id_secret_file);
    let mut upstreams: Table = resolved.upstreams.iter().map(|one| (&*one.name, upstream(one))).collect();
    upstreams.set_implicit(true);
    document["upstreams"] = Item::Table(upstreams);
    let routes: ArrayOfTables = resolved.router.routes().iter().map(|one| route(one, resolved)).collect();
    document["routes"] = Item::ArrayOfTables(routes);
    document
}

fn store(resolved: &Resolved, id_secret_file: Option<&PathBuf>) -> Item {
    let url = match &resolved.store {
        Store::Memory => "memory:".into(),
        Store::Sqlite { path } => format!("sqlite:{}", path.display()).into(),
        Store::Postgres(store) => without_password(&store.url),
        Store::Redis(store) => without_password(&store.url),
    };
    let file = |file: &PathBuf| value(file.display().to_string());
    let mut item = table([("url", url), ("service", Value::from(&*resolved.gate.service))]);
    let mut set = |key: &str, value: Option<Item>| {
        if let Some(value) = value {
            item[key] = value;
        }
    };
    let password_file = match &resolved.store {
        Store::Postgres(store) => {
            set("connections", Some(value(number(store.settings.connections))));
            &store.password_file
        }
        Store::Redis(store) => &store.password_file,
        Store::Memory | Store::Sqlite { .. } => &None,
    };
    set("password_file", password_file.as_ref().map(file));
    set("id_secret_file", id_secret_file.map(file));
    if let Some(cache) = &resolved.cache {
        set("cache", Some(Item::Value(without_password(&cache.url))));
        set("cache_password_file", cache.password_file.as_ref().map(file));
    }
    set("cache_max_age", Some(value(show_duration(resolved.cache_max_age))));
    set("cache_max_bytes", Some(value(show_size(resolved.cache_max_bytes))));
    set("cache_max_entries", Some(value(number(resolved.cache_max_entries))));
    set("settle_timeout", Some(value(show_duration(resolved.gate.settle_timeout))));
    item
}

/// A URL from which the password was taken, if there was one.
fn without_password(url: &str) -> Value {
    let mut url = Value::from(url);
    url.decor_mut().set_suffix(" # a password would not be shown");
    url
}

fn upstream(settings: &upstream::Settings) -> Item {
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    let url = |place: &Place| match place {
        Place::Tcp { .. } => format!("{scheme}://{place}"),
        Place::Unix(_) => place.to_string(),
    };
    let urls: Vec<String> = settings.places.iter().map(url).collect();
    let mut item = table([
        ("url", if let [url] = &*urls { url.into() } else { list(&urls) }),
        ("protocol", word(&PROTOCOLS, settings.protocol)),
        ("timeout", show_duration(settings.timeout).into()),
        ("connect_timeout", show_duration(settings.connect_timeout).into()),
        ("client_timeout", show_duration(settings.client_timeout).into()),
        ("max_connections", number(settings.max_connections)),
        ("reuse", word(&SHARINGS, settings.reuse)),
    ]);
    if let Some(tls) = &settings.tls {
        let files = encryption::FILES.into_iter().zip(&tls.files);
        let said = files.chain([("name", &tls.name)]).filter_map(|(key, value)| Some((key, value.as_ref()?)));
        let said: InlineTable = said.map(|(key, value)| (key, value.as_str())).collect();
        if !said.is_empty() {
            item["tls"] = value(said);
        }
    }
    item
}

fn route(route: &Route, resolved: &Resolved) -> Table {
    let mut table = Table::new();
    let mut set = |key: &str, value: Value| table.insert(key, Item::Value(value));
    set("name", Value::from(&*route.name));
    set("namespace", Value::from(&*route.namespace));
    set("methods", list(&route.methods));
    set("host", route.host.as_deref().unwrap_or("*").into());
    set("path", route.path.to_string().into());
    set("upstream", Value::from(&*resolved.upstreams[route.upstream].name));
    let policy = &route.policy;
    set("ttl", show_duration(policy.ttl).into());
    set("unknown_ttl", show_duration(policy.unknown_ttl).into());
    set("key", key(&policy.key));
    set("scope", list(&policy.scope.words().collect::<Vec<_>>()));
    set("fingerprint", fingerprint(&policy.fingerprint));
    set("outcomes", outcomes(&policy.outcomes));
    set("in_flight", in_flight(policy.in_flight));
    set("recovery", word(&RECOVERIES, policy.recovery));
    set("store_failure", word(&STORE_FAILURES, policy.store_failure));
    set("lease", show_duration(policy.lease).into());
    set("mode", word(&MODES, policy.mode));
    set("body", word(&DELIVERIES, policy.body));
    set("max_request_body", show_size(policy.max_request_body).into());
    set("max_response_body", show_size(policy.max_response_body).into());
    let cors = &policy.cors;
    set("cors", inline([("origins", list(&cors.origins)), ("credentials", cors.credentials.into())]));
    if let Some(docs) = &policy.docs {
        set("docs", docs.into());
    }
    table
}

fn key(rule: &KeyRule) -> Value {
    inline([("from", list(&rule.from)), ("required", rule.required.into()), ("max_length", number(rule.max_length))])
}

fn fingerprint(recipe: &Recipe) -> Value {
    let parts = [("method", recipe.method), ("path", recipe.path), ("query", recipe.query), ("body", recipe.body)];
    let parts = parts.into_iter().filter(|(_, counts)| *counts).map(|(part, _)| part.to_owned());
    let of = parts.chain(recipe.headers.iter().map(|name| format!("header:{name}")));
    inline([
        ("of", Value::Array(of.collect())),
        ("body", word(&FORMS, recipe.form)),
        ("include", list(&recipe.include)),
        ("exclude", list(&recipe.exclude)),
    ])
}

fn outcomes(outcomes: &Outcomes) -> Value {
    let classes = outcomes.class.iter().map(|(class, action)| (format!("{class}xx"), *action));
    let statuses = outcomes.status.iter().map(|(status, action)| (status.to_string(), *action));
    let transport = [("unreachable", outcomes.unreachable), ("timeout", outcomes.timeout), ("broken", outcomes.broken)];
    let transport = transport.into_iter().filter_map(|(entry, action)| Some((entry.to_owned(), action?)));
    let calls = outcomes.grpc.iter().map(|(status, action)| (format!("grpc:{}", status.name()), *action));
    let entries = statuses.chain(classes).chain(calls).chain(transport);
    let entries: InlineTable = entries.map(|(entry, action): (String, Action)| (entry, action.as_str())).collect();
    Value::InlineTable(entries)
}

fn in_flight(in_flight: InFlight) -> Value {
    match in_flight {
        InFlight::Reject => "reject".into(),
        InFlight::Wait(wait) => inline([("wait", show_duration(wait).into())]),
    }
}

fn number(number: impl TryInto<i64>) -> Value {
    number.try_into().unwrap_or(i64::MAX).into()
}

fn table<const N: usize>(entries: [(&str, Value); N]) -> Item {
    Item::Table(entries.into_iter().map(|(key, value)| (key, Item::Value(value))).collect())
}

fn inline<const N: usize>(entries: [(&str, Value); N]) -> Value {
    Value::InlineTable(entries.into_iter().collect())
}

fn list<T: std::fmt::Display>(items: &[T]) -> Value {
    Value::Array(items.iter().map(ToString::to_string).collect::<Array>())
}

fn word<T: PartialEq>(words: &[(&'static str, T)], meant: T) -> Value {
    // Every value has its word: the tables of words are those that values are read by.
    words.iter().find(|(_, value)| *value == meant).map_or("", |(word, _)| word).into()
}
