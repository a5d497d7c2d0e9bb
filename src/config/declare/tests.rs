//! What is made of the declarations.

use std::collections::BTreeSet;

use super::*;
use crate::config::keys::ROOT;
use crate::config::tests::{Case, DEFAULT, with_examples};
use crate::config::{Resolved, annotated, schema};
use toml_edit::DocumentMut;

/// With `ONCEGATE_BLESS=1` the file is written instead of compared.
#[test]
fn the_annotated_default_is_made_of_the_declarations() {
    if std::env::var_os("ONCEGATE_BLESS").is_some() {
        std::fs::write("config/oncegate.default.toml", annotated()).unwrap();
    } else {
        assert_eq!(annotated(), DEFAULT, "run with ONCEGATE_BLESS=1 if this is meant");
    }
}

/// Every declared key, with the path of its table; `*` stands for a name and for a place in a list.
fn declared(keys: impl Iterator<Item = &'static Key>, at: &str, found: &mut Vec<(String, &'static Key)>) {
    for key in keys {
        let path = format!("{at}{}", key.name);
        match (key.facts)().inner {
            Inner::Table(section) => declared(section.keys(), &format!("{path}."), found),
            Inner::Named(section) | Inner::List(section) => declared(section.keys(), &format!("{path}.*."), found),
            Inner::None | Inner::Entries(_) => {}
        }
        found.push((path, key));
    }
}

/// Each declared key is in the annotated file, in the schema and, once it is set, in what is printed; and a misspelt key
/// is corrected.
#[test]
fn every_declared_key_is_documented_described_printed_and_suggested() {
    let mut keys = Vec::new();
    declared(ROOT.keys(), "", &mut keys);
    assert!(keys.len() > 100, "{}", keys.len());
    let (annotated, schema, printed) = (with_examples().parse::<DocumentMut>().unwrap(), schema(), everything());
    let mut shown = [BTreeSet::new(), BTreeSet::new()];
    note_keys(annotated.as_item(), "", &mut shown[0]);
    note_keys(printed.effective.as_item(), "", &mut shown[1]);
    // A policy is documented once, under [defaults], and printed once, with each route. Tables in one line have one example.
    let of_policy = |path: &str| path.replace("routes.*.", "defaults.");
    for (path, key) in &keys {
        let in_one_line =
            ["tls.", "in_flight.", "outcomes_body.", "recovery.", "quota.", "request_time.", "encryption_keys."]
                .iter()
                .any(|table| path.contains(table));
        let is_documented = [path.clone(), of_policy(path)].iter().any(|path| shown[0].contains(path));
        assert!(is_documented || in_one_line, "{path} is not in the annotated file");
        assert!(!key.doc.is_empty(), "{path} has no documentation");
        let as_printed = path.replacen("defaults", "routes.*", 1);
        // Of these, one is set at a time.
        let is_other_source =
            ["secret_file", "pem_file", "jwks_file"].map(|key| format!("auth.jwt.{key}")).contains(path);
        let is_printed = shown[1].contains(&as_printed) || is_other_source;
        assert!(is_printed || path == "defaults", "{path} is not printed");
        let mut place = &schema;
        for step in path.split('.') {
            place = match step {
                "*" => place.get("items").unwrap_or_else(|| {
                    place["patternProperties"].as_object().and_then(|names| names.values().next()).unwrap()
                }),
                key => &place["properties"][key],
            };
        }
        assert!(place["description"].is_string(), "{path} is not in the schema");
        // The last letter twice
        let slip = format!("{path}{} = 1\n", &path[path.len() - 1..]);
        // A table of a list that is the value of a key.
        let listed = |slip: &str| match slip.split_once(".*.") {
            Some((list, slip)) if list != "upstreams" => format!("{list} = [{{ {} }}]\n", slip.trim()),
            _ => slip.to_owned(),
        };
        let text = match slip.strip_prefix("routes.*.") {
            Some(slip) => format!("[[routes]]\n{}", listed(slip)),
            None => listed(&slip).replace('*', "app"),
        };
        let problems = Case::new(&text).problems();
        let suggested = format!("did you mean `{}`?", key.name);
        assert!(problems.contains(&suggested), "{path}: {problems}");
    }
}

/// A configuration in which every key has a value.
fn everything() -> Resolved {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let file = directory.path().join(name);
        std::fs::write(&file, content).unwrap();
        file.display().to_string()
    };
    let (secret, own) =
        (file("secret", &"x".repeat(32)), file("own.pem", include_str!("../../../tests/servers/own.pem")));
    let token = file("token", &"y".repeat(32));
    let text = format!(
        "default_upstream = \"app\"\n[headers]\nforward_key_as = \"X-Request-Id\"\n\
         [server]\ntls = {{ cert = {own:?}, key = {own:?}, client_ca = {own:?}, client_crl = {own:?} }}\n[admin]\ntoken_file = {secret:?}\n\
         tokens = [{{ name = \"ops\", role = \"operator\", file = {token:?} }}]\n\
         tls = {{ cert = {own:?}, key = {own:?}, client_ca = {own:?}, client_crl = {own:?} }}\n\
         [store]\nurl = \"postgres://db.internal/oncegate\"\npassword_file = {secret:?}\nid_secret_file = {secret:?}\nother_id_secret_files = [{token:?}]\n\
         encryption_keys = [{{ id = \"a\", file = {secret:?} }}]\nmax_ttl = \"60d\"\n\
         cache = \"redis://cache.internal\"\ncache_password_file = {secret:?}\n[upstreams.app]\nurl = \"https://app\"\n\
         tls = {{ ca = {own:?}, cert = {own:?}, key = {own:?}, name = \"app\", crl = {own:?} }}\n\
         [policy_page]\npath = \"/policy\"\n[access_log]\npath = \"access.log\"\n[telemetry]\notlp = \"https://collector:4317\"\ntls = {{ ca = {own:?}, cert = {own:?}, key = {own:?}, name = \"collector\", crl = {own:?} }}\n[[routes]]\nname = \"r\"\npath = \"/r\"\n\
         preset = \"ietf\"\nreauthorize = \"/me\"\nquota = {{ new_keys = 1000, per = \"1m\" }}\ndocs = \"https://docs.example.com/\"\ndeliver = {{ rate = \"100/s\" }}\nin_flight = {{ wait = \"10s\" }}\n\
         recovery = {{ probe = \"/by-key/{{key}}\", after = \"60s\", every = \"5m\", headers = {{ X-Books = \"1\" }} }}\n\
         outcomes_body = [{{ pointer = \"/error/retryable\", equals = true, then = \"release\" }}]\n\
         request_time = {{ from = \"header:X-Time\" }}\n\
         [[routes]]\nname = \"s\"\npath = \"/s\"\nrecovery = {{ resend = {{ attempts = 3 }} }}\n\
         [[consumers]]\nname = \"c\"\nsource = \"amqp://rabbitmq/%2F?queue=q\"\npassword_file = {secret:?}\nrequest = \"POST /s\"\ndead_letter = \"d\"\n\
         [auth.jwt]\njwks_url = \"https://id/keys\"\nissuer = \"id\"\naudience = \"r\"\nalgorithms = [\"ES256\"]\n\
         tls = {{ ca = {own:?}, cert = {own:?}, key = {own:?}, name = \"id\", crl = {own:?} }}\n"
    );
    Case::new(&text).load()
}

fn note_keys(item: &Item, at: &str, found: &mut BTreeSet<String>) {
    if let Some(tables) = item.as_array_of_tables() {
        tables.iter().for_each(|table| note_keys(&Item::Table(table.clone()), &format!("{at}*."), found));
    }
    for table in item.as_array().into_iter().flatten().filter(|value| value.is_inline_table()) {
        note_keys(&Item::Value(table.clone()), &format!("{at}*."), found);
    }
    for (key, item) in item.as_table_like().into_iter().flat_map(|table| table.iter()) {
        let key = if at == "upstreams." { "*" } else { key };
        found.insert(format!("{at}{key}"));
        note_keys(item, &format!("{at}{key}."), found);
    }
}

#[test]
fn a_route_can_do_without_what_the_defaults_have() {
    let resolved = Case::new(
        "[upstreams]\napp = \"http://app:1\"\n[defaults]\nquota = { new_keys = 5, per = \"1m\" }\nreauthorize = \"/me\"\n\
         request_time = { from = \"header:X-T\" }\n[[routes]]\nname = \"all\"\npath = \"/a\"\n\
         [[routes]]\nname = \"none\"\npath = \"/b\"\nquota = false\nreauthorize = false\nrequest_time = false\n",
    )
    .load();
    let has = |name: &str| {
        let policy = &resolved.router.routes().iter().find(|route| &*route.name == name).expect("the route").policy;
        (policy.quota.is_some(), policy.reauthorize.is_some(), policy.request_time.is_some())
    };
    assert_eq!((has("all"), has("none")), ((true, true, true), (false, false, false)));
}
