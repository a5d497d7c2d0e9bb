//! The rules that make the ids of a namespace, in the words of the configuration: what
//! [`RecordIdHasher::rules_digest`](super::identity::RecordIdHasher::rules_digest) hashes, readable.
//!
//! A store keeps a description beside each digest as JSON, so that a start that refuses other rules can name what changed.
//! A description is never compared to tell whether rules are the same: the digest alone does.

use serde::{Deserialize, Serialize};

use super::fingerprint::{BodyForm, Recipe};
use super::identity::CallerRules;
use super::key::{KeyRule, KeySource};
use super::record::RecordId;
use super::scope::ScopePart;

/// What a store keeps of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NamespaceDescription {
    /// The rules of its ids.
    #[serde(flatten)]
    pub rules: RulesDescription,
    /// The requests that find its records; nothing where an earlier version of oncegate wrote the description.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coverage: Option<CoverageDescription>,
    /// The digests of the rules with other id secrets by which records may have been made, in hexadecimal.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<String>,
}

/// The requests that find the records of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CoverageDescription {
    /// The routes of the namespace.
    pub routes: Vec<RouteDescription>,
    /// Other routes, which take requests from them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub except: Vec<RouteDescription>,
}

/// The requests of a route.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct RouteDescription {
    /// Its name.
    pub name: String,
    /// Its methods.
    pub methods: Vec<String>,
    /// Its host; nothing for any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Its path.
    pub path: String,
}

/// The rules of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RulesDescription {
    /// The parts of the scope, in order.
    pub scope: Vec<String>,
    /// The places of the key, in order.
    pub key: Vec<String>,
    /// How fingerprints are made, where a key may be one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<FingerprintDescription>,
    /// The proxies that are trusted for the address of a client, where that address is part of the scope.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trusted_proxies: Option<String>,
    /// The header of the token, where a claim is part of the scope and that header is not `Authorization`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_header: Option<String>,
    /// Whether ids are made with a secret.
    pub id_secret: bool,
}

/// A fingerprint's recipe.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FingerprintDescription {
    /// What counts of a request.
    pub of: Vec<String>,
    /// How its body counts.
    pub body: String,
    /// The parts of a JSON body that count.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<String>,
    /// The parts of a JSON body that do not count.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<String>,
}

impl RulesDescription {
    /// Describes what `rules_digest` hashes of the same arguments, and whether the identifier has a secret.
    #[must_use]
    pub fn of<'a>(
        scope: &[ScopePart],
        key: &KeyRule,
        fingerprint: &Recipe,
        callers: impl Into<CallerRules<'a>>,
        id_secret: bool,
    ) -> Self {
        let CallerRules { trusted, token_header } = callers.into().of_scope(scope);
        Self {
            scope: scope.iter().map(ToString::to_string).collect(),
            key: key.from.iter().map(ToString::to_string).collect(),
            fingerprint: key.from.contains(&KeySource::Fingerprint).then(|| FingerprintDescription::of(fingerprint)),
            trusted_proxies: (!trusted.is_empty()).then(|| trusted.to_owned()),
            token_header: token_header.map(ToString::to_string),
            id_secret,
        }
    }
}

impl NamespaceDescription {
    /// The digests of the rules with other id secrets.
    #[must_use]
    pub fn other_digests(&self) -> Vec<[u8; 32]> {
        let read = |text: &String| RecordId::parse(text).map(|RecordId(digest)| digest);
        self.others.iter().filter_map(read).collect()
    }

    /// Reads what [`NamespaceDescription::to_text`] wrote, perhaps in a later version; nothing where it is no description.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// The form that a store keeps.
    #[must_use]
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).expect("strings and lists of them can be written as JSON")
    }
}

impl FingerprintDescription {
    fn of(recipe: &Recipe) -> Self {
        let parts = [("method", recipe.method), ("path", recipe.path), ("query", recipe.query), ("body", recipe.body)];
        let parts = parts.into_iter().filter(|(_, counts)| *counts).map(|(part, _)| part.to_owned());
        let body = match recipe.form {
            BodyForm::Auto => "auto",
            BodyForm::Bytes => "bytes",
            BodyForm::Json => "json",
            BodyForm::None => "none",
        };
        Self {
            of: parts.chain(recipe.headers.iter().map(|name| format!("header:{name}"))).collect(),
            body: body.to_owned(),
            include: recipe.include.iter().map(ToString::to_string).collect(),
            exclude: recipe.exclude.iter().map(ToString::to_string).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderName;
    use proptest::prelude::*;

    use super::*;
    use crate::idempotency::identity::RecordIdHasher;
    use crate::idempotency::policy::Policy;

    /// The arguments of `rules_digest`.
    fn rules() -> impl Strategy<Value = (Vec<ScopePart>, KeyRule, Recipe, CallerRules<'static>, bool)> {
        const PARTS: [&str; 6] = ["host", "client-ip", "header:x", "cookie:x", "jwt:x", "const:x"];
        static HEADERS: [HeaderName; 2] = [HeaderName::from_static("x"), HeaderName::from_static("y")];
        const PLACES: [&str; 5] = ["header:x", "query:x", "json:/x", "template:{header:x}:{query:x}", "fingerprint"];
        let parts = proptest::collection::vec(proptest::sample::select(&PARTS[..]), 0..3);
        let places = proptest::collection::vec(proptest::sample::select(&PLACES[..]), 0..3);
        let forms = proptest::sample::select(&[BodyForm::Auto, BodyForm::Bytes, BodyForm::Json, BodyForm::None][..]);
        let recipe = (any::<[bool; 2]>(), forms);
        let trusted = proptest::sample::select(&["", "Both 10.0.0.0/8"][..]);
        let token_header = proptest::option::of((0..HEADERS.len()).prop_map(|nth| &HEADERS[nth]));
        let callers = (trusted, token_header).prop_map(|(trusted, token_header)| CallerRules { trusted, token_header });
        (parts, places, recipe, callers, any::<bool>()).prop_map(
            |(parts, places, ([query, header], form), callers, secret)| {
                let scope = parts.iter().map(|part| ScopePart::parse(part).unwrap()).collect();
                let from = places.iter().map(|place| KeySource::parse(place).unwrap()).collect();
                let headers = if header { vec!["x".parse().unwrap()] } else { Vec::new() };
                let key = KeyRule { from, ..Policy::default().key };
                (scope, key, Recipe { query, form, headers, ..Recipe::default() }, callers, secret)
            },
        )
    }

    proptest! {
        #[test]
        fn descriptions_differ_where_digests_do(one in rules(), other in rules()) {
            let both = [one, other].map(|(scope, key, recipe, trusted, secret)| {
                let identifier = RecordIdHasher::new("s".into(), secret.then(|| b"secret"[..].into()));
                let digest = identifier.rules_digest("n", &scope, &key, &recipe, trusted);
                (digest, RulesDescription::of(&scope, &key, &recipe, trusted, secret))
            });
            prop_assert_eq!(both[0].0 == both[1].0, both[0].1 == both[1].1, "{:?}", both);
            let described = NamespaceDescription { rules: both[0].1.clone(), coverage: None, others: Vec::new() };
            prop_assert_eq!(NamespaceDescription::parse(&described.to_text()), Some(described));
        }
    }

    #[test]
    fn a_description_is_read_by_other_versions() {
        let Policy { scope, key, fingerprint, .. } = Policy::default();
        let scope = &scope[..1];
        let rules = RulesDescription::of(scope, &key, &fingerprint, "", false);
        let mut described = NamespaceDescription { rules, coverage: None, others: Vec::new() };
        let text = described.to_text();
        assert_eq!(text, r#"{"scope":["host"],"key":["header:idempotency-key"],"id_secret":false}"#);
        let later = r#"{"scope":["host"],"key":["header:idempotency-key"],"id_secret":false,"moon":"full"}"#;
        assert_eq!(NamespaceDescription::parse(later).as_ref(), Some(&described));
        let route = RouteDescription {
            name: "charge".to_owned(),
            methods: vec!["POST".to_owned()],
            host: None,
            path: "/charges".to_owned(),
        };
        described.coverage = Some(CoverageDescription { routes: vec![route], except: Vec::new() });
        let text = described.to_text();
        let coverage = r#""coverage":{"routes":[{"name":"charge","methods":["POST"],"path":"/charges"}]}}"#;
        assert!(text.ends_with(coverage), "{text}");
        assert_eq!(NamespaceDescription::parse(&text), Some(described));
        assert_eq!(NamespaceDescription::parse("none"), None);
    }
}
