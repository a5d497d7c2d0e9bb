use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::LazyLock;

use jsonschema::Validator;
use serde_json::json;
use toml_edit::DocumentMut;

use self::lines::{POLICIES, ROUTES, WHOLES};
use super::*;
use crate::config::kinds::to_json;
use crate::config::tests::{DEFAULT, with_examples};
use crate::config::{Sources, load};

mod lines;

static VALIDATOR: LazyLock<Validator> = LazyLock::new(|| jsonschema::draft7::new(&schema()).unwrap());

/// A TOML file as the JSON that an editor's validator is given.
fn instance(text: &str) -> Value {
    let document: DocumentMut = text.parse().unwrap();
    to_json(&toml_edit::Value::from(document.as_table().clone().into_inline_table()))
}

/// The dotted keys of what the schema refuses.
fn refused(text: &str) -> BTreeSet<String> {
    let instance = instance(text);
    let unknown = |error: &jsonschema::ValidationError<'_>| match error.kind() {
        jsonschema::error::ValidationErrorKind::AdditionalProperties { unexpected } => unexpected.clone(),
        jsonschema::error::ValidationErrorKind::Required { property } => {
            vec![property.as_str().unwrap_or_default().to_owned()]
        }
        _ => Vec::new(),
    };
    let mut keys = BTreeSet::new();
    for error in VALIDATOR.iter_errors(&instance) {
        let steps = error.instance_path().as_str().split('/').skip(1).map(str::to_owned);
        let at: Vec<String> = steps.collect();
        let below = unknown(&error);
        if below.is_empty() {
            keys.insert(dotted(&at));
        }
        for key in below {
            keys.insert(dotted(&[&at[..], &[key]].concat()));
        }
    }
    keys
}

/// `routes/0/key` as the loader writes it: `routes[0].key`
fn dotted(steps: &[String]) -> String {
    steps.iter().fold(String::new(), |path, step| match step.parse::<usize>() {
        Ok(index)
            if path.starts_with("routes")
                || path.starts_with("consumers")
                || path.ends_with("listen")
                || is_list(&path) =>
        {
            format!("{path}[{index}]")
        }
        _ if path.is_empty() => step.clone(),
        _ => format!("{path}.{step}"),
    })
}

fn is_list(path: &str) -> bool {
    [
        "from",
        "scope",
        "of",
        "include",
        "exclude",
        "methods",
        "origins",
        "outcomes_body",
        "encryption_keys",
        "other_id_secret_files",
        "tokens",
        "trusted_proxies",
        "upgrades",
        "algorithms",
        "audience",
    ]
    .iter()
    .any(|key| path.ends_with(key))
}

#[test]
fn it_is_a_schema() {
    assert!(jsonschema::draft7::meta::is_valid(&schema()));
    assert!(!schema().to_string().contains("$ref"), "taplo loses what stands beside a reference");
}

/// Every table of the schema, by its dotted path; `*` stands for a name of the user's.
fn tables<'a>(schema: &'a Value, path: &str, found: &mut Vec<(String, &'a Value)>) {
    if schema.get("properties").is_some() {
        found.push((path.to_owned(), schema));
    }
    let named = schema["properties"].as_object().into_iter().flatten().map(|(key, value)| (key.as_str(), value));
    let open = schema["patternProperties"].as_object().into_iter().flatten().map(|(_, value)| ("*", value));
    let items = schema.get("items").into_iter().map(|value| ("[]", value));
    for (key, value) in named.chain(open).chain(items) {
        let dot = if path.is_empty() { "" } else { "." };
        tables(value, &format!("{path}{dot}{key}"), found);
    }
}

#[test]
fn every_key_of_a_table_has_a_type_and_a_description() {
    let schema = schema();
    let mut found = Vec::new();
    tables(&schema, "", &mut found);
    for (path, table) in &found {
        assert_eq!(table["additionalProperties"], false, "{path}");
        for (key, value) in table["properties"].as_object().unwrap() {
            assert!(value.get("type").is_some(), "{path}.{key} has no type");
            let is_entry = path.ends_with("outcomes");
            let is_described = value["description"].as_str().is_some_and(|text| text.len() > 10);
            assert!(is_entry || is_described, "{path}.{key} is not described");
        }
    }
    assert_eq!(found.len(), 47, "{:?}", found.iter().map(|(path, _)| path).collect::<Vec<_>>());
}

#[test]
fn documentation_becomes_descriptions() {
    let schema = schema();
    let of = |pointer: &str| schema.pointer(&format!("/properties/{pointer}/description")).unwrap().as_str().unwrap();
    assert!(of("defaults/properties/max_request_body").starts_with("The largest request body; 413"));
    assert!(of("routes/items/properties/namespace").starts_with("Routes with the same namespace"));
    assert!(of("defaults/properties/outcomes").starts_with("What the end of an attempt does"));
    assert!(of("store/properties/id_secret_file").contains("With it, a copy of the store does not help to guess keys"));
}

#[test]
fn the_annotated_default_and_the_examples_are_valid() {
    let read = |path: &str| std::fs::read_to_string(path).unwrap();
    let mut files = vec![DEFAULT.to_owned(), with_examples()];
    files.extend(["edge.toml", "gateway.toml", "sidecar.toml"].map(|name| read(&format!("config/examples/{name}"))));
    for text in files {
        assert_eq!(refused(&text), BTreeSet::new());
    }
}

/// What `check` finds in the wrong files and the schema leaves to it: it takes more than one value, more than a pattern,
/// or the machine. An upstream's URL may come from the environment.
const LEFT_TO_CHECK: &[&str] = &[
    "accepting: routes[0].deliver.max_backoff",
    "accepting: routes[0].mode",
    "accepting: routes[1].async",
    "access-log-in-the-configuration: access_log.path",
    "access-log-in-the-store: access_log.path",
    "addresses-of-ipv6: upstreams.colons.url",
    "addresses-of-ipv6: upstreams.groups.url",
    "admin-tls-files: admin.tls",
    "admin-tls: admin.tls.client_crl",
    "admin-token-file-twice: admin.tokens[0].file",
    "admin-token-file-twice: admin.tokens[1].name",
    "admin-token-files: admin.tokens[0].file",
    "admin-token-files: admin.tokens[1].file",
    "admin-token-files: admin.tokens[2].file",
    "admin-token-twice: admin.tokens[1].file",
    "admin-tokens-of-one-name: admin.tokens",
    "admin-without-tokens: admin.token_file",
    "cache-before-redis: store.cache",
    "cache-before-sqlite: store.cache",
    "cache-before-sqlite: store.cache_password_file",
    "cache-of-no-age: store.cache",
    "cache-of-no-age: store.cache_max_age",
    "cache-password-alone: store.cache_password_file",
    "cache-password-not-encoded: store.id_secret_file",
    "cache-password-twice: store.cache",
    "cache-password-twice: store.cache_password_file",
    "cache-password-twice: store.id_secret_file",
    "client-lists: server.tls.client_crl",
    "consumers-brokers: consumers[2].source",
    "consumers-brokers: consumers[3].dead_letter",
    "consumers-brokers: consumers[3].key",
    "consumers-brokers: consumers[4].source",
    "consumers-brokers: consumers[5].source",
    "consumers-keys: consumers[0].key",
    "consumers-keys: consumers[2].key",
    "consumers-own-dead-letter: consumers[0].dead_letter",
    "consumers-own-dead-letter: consumers[1].dead_letter",
    "consumers: consumers[0].source",
    "consumers: consumers[1].request",
    "consumers: consumers[1].source",
    "consumers: consumers[3].key",
    "consumers: consumers[3].request",
    "consumers: consumers[4].name",
    "cors-preflight: defaults.cors.preflight",
    "cors: routes[0].cors.credentials",
    "cors: routes[1].cors.origins",
    "duplicate-name-and-path: routes[1].name",
    "duplicate-names: routes[1].name",
    "encryption-key-missing: store.encryption_keys[1].file",
    "encryption-key-too-short: store.encryption_keys[0].file",
    "encryption-key-twice: store.encryption_keys[1].file",
    "encryption-keys-of-one-id: store.encryption_keys[1].file",
    "encryption-keys-of-one-id: store.encryption_keys[1].id",
    "endless-secret: store.id_secret_file",
    "fingerprint-key-without-scope: routes[0].scope",
    "fingerprints: routes[0].fingerprint",
    "fingerprints: routes[2].fingerprint",
    "fingerprints: routes[3].fingerprint",
    "fingerprints: routes[4].key.from",
    "fingerprints: routes[5].fingerprint.include",
    "id-secrets: store.other_id_secret_files",
    "inherited-socket-twice: admin.listen",
    "inherited-socket-twice: server.listen",
    "key-rules: routes[0].fingerprint.exclude",
    "key-rules: routes[0].key.from",
    "key-rules: routes[1].scope",
    "limits: limits.max_header_size",
    "limits: limits.min_body_rate",
    "listeners: admin.token_file",
    "listeners: server.proxy_protocol",
    "namespaces: routes[1].namespace",
    "no-id-secrets: store.other_id_secret_files",
    "no-upstream: upstreams",
    "not-postgres: store.connections",
    "not-postgres: store.password_file",
    "outcomes-body: routes[1].outcomes_body",
    "outcomes: defaults.outcomes.grpc:UNAVAILABLE",
    "overlapping-routes: routes[1].path",
    "own-headers-forwarded: headers.forward_key_as",
    "own-headers-of-events: headers.attempt",
    "own-headers-of-events: headers.forward_key_as",
    "own-headers-of-tokens: headers.attempt",
    "own-headers-of-tokens: headers.forward_key_as",
    "own-headers-read: headers.attempt",
    "own-headers-read: headers.forward_key_as",
    "own-headers-twice: headers.attempt",
    "own-headers: headers.attempt",
    "own-headers: headers.forward_key_as",
    "own-headers: headers.replayed",
    "own-headers: headers.status",
    "paths: routes[4].path",
    "paths: routes[6].path",
    "postgres-missing-files: store.url",
    "postgres-no-host: store.url",
    "postgres-parameters: store.url",
    "postgres-password-file: store.password_file",
    "postgres-password-twice: store.password_file",
    "postgres-port: store.url",
    "postgres-sockets-and-hosts: store.url",
    "postgres-sslmode: store.url",
    "postgres-useless-root: store.url",
    "postgres-weak-roots: store.url",
    "preset-with-another-fingerprint: routes[0].fingerprint.include",
    "proxies: server.trusted_proxies[1]",
    "proxies: server.trusted_proxies[2]",
    "proxies: server.trusted_proxies[4]",
    "proxies: server.trusted_proxies[6]",
    "quotas: routes[2].quota.per",
    "recovery-headers-wrong: routes[0].recovery.headers.Authorization",
    "recovery-headers-wrong: routes[0].recovery.headers.Connection",
    "recovery-headers-wrong: routes[0].recovery.headers.X-A",
    "recovery-resend-pauses: routes[1].recovery.resend.backoff",
    "redis-cluster-behind-sentinels: store.url",
    "redis-cluster: store.url",
    "redis-files: store.url",
    "redis-half-identity: store.url",
    "redis-lone-password: store.url",
    "redis-parameters: store.url",
    "redis-password-twice: store.connections",
    "redis-password-twice: store.password_file",
    "redis-socket: store.url",
    "redis-topology: store.url",
    "request-time-beyond-a-presets-ttl: routes[0].request_time",
    "request-time-beyond-a-routes-ttl: routes[0].request_time",
    "request-time-beyond-the-default-ttl: defaults.request_time",
    "request-time-beyond-unknown: routes[0].request_time",
    "request-time: routes[1].request_time",
    "request-time: routes[2].request_time",
    "resend-of-fingerprints: routes[0].recovery",
    "response-headers-by-pattern: routes[0].response_headers.exclude[0]",
    "response-headers-of-oncegate: defaults.response_headers.exclude[0]",
    "response-headers-of-oncegate: routes[0].response_headers.exclude[0]",
    "response-headers-of-oncegate: routes[0].response_headers.exclude[1]",
    "response-headers: defaults.response_headers.exclude",
    "response-headers: routes[0].response_headers.exclude[0]",
    "response-headers: routes[0].response_headers.exclude[1]",
    "response-headers: routes[0].response_headers.exclude[2]",
    "response-headers: routes[0].response_headers.exclude[3]",
    "response-headers: routes[0].response_headers.exclude[4]",
    "response-headers: routes[0].response_headers.exclude[5]",
    "response-headers: routes[0].response_headers.exclude[6]",
    "same-address: admin.listen",
    "seal-without-keys: defaults.seal",
    "seal-without-keys: routes[0].seal",
    "several-upstreams-no-route: routes",
    "sizes: defaults.max_request_body",
    "sizes: routes[1].max_response_body",
    "sqlite-url: store.id_secret_file",
    "store-list-in-order: routes[0].deliver",
    "store-list-mixed: store.url",
    "store-list-of-files: store.url",
    "store-list-twice: store.url[2]",
    "stores: store.cache_max_bytes",
    "stores: store.id_secret_file",
    "template-twice: routes[0].key.from",
    "template-with-spaces: routes[0].key.from[0]",
    "templates-without-their-word: routes[1].key.from[0]",
    "templates-without-their-word: routes[3].key.from[0]",
    "templates-without-their-word: routes[4].key.from[0]",
    "templates: routes[0].key.from[2]",
    "templates: routes[0].key.from[3]",
    "templates: routes[0].key.from[6]",
    "templates: routes[0].key.from[7]",
    "templates: routes[0].key.from[8]",
    "tokens-in-auth: defaults.scope[0]",
    "tokens-of-a-description: auth.jwt.jwks_url",
    "tokens-of-a-private-key: auth.jwt.pem_file",
    "tokens-of-a-secret-at-a-url: auth.jwt.algorithms",
    "tokens-of-a-set-as-pem: auth.jwt.pem_file",
    "tokens-of-another-family: auth.jwt.algorithms",
    "tokens-of-pem-as-a-set: auth.jwt.jwks_file",
    "tokens-secret-in-the-file: auth.jwt",
    "tokens-unverified: defaults.scope[1]",
    "tokens-unverified: routes[0].scope[0]",
    "tokens-without-keys: auth.jwt",
    "tokens: auth.jwt.jwks_url",
    "tokens: auth.jwt.leeway",
    "tokens: auth.jwt.secret_file",
    "tokens: auth.jwt.tls",
    "too-many-id-secrets: store.other_id_secret_files",
    "unknown-upstream: default_upstream",
    "unknown-upstream: routes[0].upstream",
    "unknown-upstream: routes[1].upstream",
    "upstream-tls: upstreams.half.tls",
    "upstream-tls: upstreams.missing.tls",
    "upstream-tls: upstreams.plain.tls",
    "upstream-tls: upstreams.unlisted.tls",
    "upstream-tls: upstreams.unnamable.url",
    "upstream-urls: upstreams.both.url",
    "upstream-urls: upstreams.none.url",
    "upstream-urls: upstreams.twice.url",
    "waits: routes[3].in_flight.wait",
    "words: headers.expires",
];

/// Every other problem of those files is refused by the schema, at its key or at one above it; and the schema refuses
/// nothing else in them.
#[test]
fn what_is_wrong_with_one_value_is_refused() {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir("tests/config-errors").unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    let mut left = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        if text.parse::<DocumentMut>().is_err() {
            continue;
        }
        let problems = load(Sources { file: Some(file.clone()), ..Sources::default() }).unwrap_err();
        let wrong: BTreeSet<String> = problems.iter().map(|problem| problem.key.replace('"', "")).collect();
        let refused = refused(&text);
        let within = |key: &str, other: &str| key == other || key.starts_with(&format!("{other}."));
        for key in &refused {
            let known = wrong.iter().any(|wrong| within(wrong, key) || within(key, wrong));
            assert!(known, "{}: {key} is refused, and the loader takes it", file.display());
        }
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let missed = wrong.into_iter().filter(|wrong| !refused.iter().any(|key| within(wrong, key)));
        left.extend(missed.map(|key| format!("{name}: {key}")));
    }
    assert_eq!(left, LEFT_TO_CHECK);
}

/// The loader and the schema accept and refuse the same lines. What `config print` writes of a line is read as the same settings.
#[test]
fn the_schema_and_the_loader_agree() {
    let app = "upstreams.app = \"http://app\"";
    let named = |line: &str| if line.starts_with("name ") { "" } else { "name = \"r\"\n" };
    let at = |line: &str| if line.starts_with("path ") { "" } else { "path = \"/r\"\n" };
    // With several upstreams, one must be named.
    let default = |line: &str| if line.starts_with("default_") { "" } else { "default_upstream = \"app\"\n" };
    let policies = POLICIES.iter().map(|line| format!("{app}\n[defaults]\n{line}\n"));
    let routes = ROUTES.iter().map(|line| format!("{app}\n[[routes]]\n{}{}{line}\n", named(line), at(line)));
    let wholes = WHOLES.iter().map(|line| format!("{line}\n{app}\n{}", default(line)));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gate.toml");
    for text in policies.chain(routes).chain(wholes) {
        std::fs::write(&file, &text).unwrap();
        let effective = || {
            let loaded = load(Sources { file: Some(file.clone()), ..Sources::default() });
            loaded.map(|resolved| resolved.effective.to_string())
        };
        let loaded = effective();
        let refused = refused(&text);
        assert_eq!(loaded.is_ok(), refused.is_empty(), "{text}{loaded:?}\n{refused:?}");
        // A password in a URL is not printed.
        if let (Ok(printed), false) = (loaded, text.contains(":p@")) {
            std::fs::write(&file, &printed).unwrap();
            assert_eq!(effective().as_ref(), Ok(&printed), "{text}");
        }
    }
}

/// What the schema calls a default is what the loader does where the key is missing.
#[test]
fn its_defaults_are_in_force() {
    fn defaults(schema: &Value) -> Value {
        if let Some(default) = schema.get("default") {
            return default.clone();
        }
        let properties = schema["properties"].as_object().into_iter().flatten();
        // A table that must say something is not there by default.
        let is_there = |value: &Value| value.get("required").is_none() || value.get("default").is_some();
        let properties = properties.filter(|(_, value)| is_there(value));
        let values = properties.map(|(key, value)| (key.clone(), defaults(value)));
        Value::Object(values.filter(|(_, value)| value.as_object().is_none_or(|below| !below.is_empty())).collect())
    }
    /// JSON is TOML but for its objects.
    fn toml(value: &Value) -> String {
        let entry = |(key, value): (&String, &Value)| format!("{key:?} = {}", toml(value));
        match value.as_object() {
            Some(entries) => format!("{{ {} }}", entries.iter().map(entry).collect::<Vec<_>>().join(", ")),
            None => value.to_string(),
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gate.toml");
    let effective = |top: &Value, app: &Value, route: &Value| {
        let mut text: String =
            top.as_object().unwrap().iter().map(|(key, value)| format!("{key} = {}\n", toml(value))).collect();
        text += &format!("upstreams.app = {}\nroutes = [{}]\n", toml(app), toml(route));
        std::fs::write(&file, &text).unwrap();
        let loaded = load(Sources { file: Some(file.clone()), ..Sources::default() });
        loaded.unwrap_or_else(|problems| panic!("{text}{problems}")).effective.to_string()
    };
    let schema = schema();
    let mut top = defaults(&schema);
    assert!(top["defaults"]["outcomes"]["429"].is_string() && top["headers"]["status"].is_string(), "{top}");
    // They are spelled out where they are written down.
    top["defaults"].as_object_mut().unwrap().remove("outcomes");
    let of = |pointer: &str| schema.pointer(pointer).unwrap();
    let upstream = of("/properties/upstreams/patternProperties").as_object().unwrap().values().next().unwrap();
    let (mut app, mut route) = (defaults(upstream), defaults(of("/properties/routes/items")));
    assert_eq!((app.as_object().unwrap().len(), route.as_object().unwrap().len()), (5, 2), "{app} {route}");
    app["url"] = "http://app".into();
    let least = json!({ "name": "r", "path": "/r" });
    (route["name"], route["path"]) = (least["name"].clone(), least["path"].clone());
    assert_eq!(effective(&top, &app, &route), effective(&json!({}), &json!({ "url": "http://app" }), &least));
}
