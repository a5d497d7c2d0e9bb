//! Turns service, namespace, scope and key into a record's id.

use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::codec::put_recipe;
use super::fingerprint::Recipe;
use super::frame::{put, put_count, sha256};
use super::key::{Key, KeyRule, KeySource};
use super::record::RecordId;
use super::scope::{Caller, ScopePart};

/// Makes ids: SHA-256, or HMAC-SHA-256 where a secret is set, so that ids cannot be guessed from keys.
#[derive(Clone)]
pub struct Identifier {
    secret: Option<Arc<[u8]>>,
    service: Arc<str>,
}

impl Identifier {
    /// For one service. The same secret must be used for the life of its records.
    #[must_use]
    pub fn new(service: Arc<str>, secret: Option<Arc<[u8]>>) -> Self {
        Self { secret, service }
    }

    /// The id of a record.
    #[must_use]
    pub fn id(&self, namespace: &str, scope: &[ScopePart], caller: Caller<'_>, key: &Key) -> RecordId {
        let mut whole = self.begin(b"oncegate record 1");
        put(&mut whole, namespace.as_bytes());
        put_count(&mut whole, scope.len());
        scope.iter().for_each(|part| part.encode(caller, &mut whole));
        put(&mut whole, key.as_str().as_bytes());

        let mut id = [0; 32];
        id[..8].copy_from_slice(&self.prefix(key));
        id[8..].copy_from_slice(&self.hash(&whole)[..24]);
        RecordId(id)
    }

    /// The first eight bytes of the ids of every record of this key, whatever its namespace and scope.
    #[must_use]
    pub fn prefix(&self, key: &Key) -> [u8; 8] {
        let mut out = self.begin(b"oncegate key 1");
        put(&mut out, key.as_str().as_bytes());
        let mut prefix = [0; 8];
        prefix.copy_from_slice(&self.hash(&out)[..8]);
        prefix
    }

    /// The digest of everything but the request that makes the ids of a namespace. Two gates with equal digests
    /// give a request the same id.
    ///
    /// `fingerprint` counts only where a key may be a request's own fingerprint. The secret counts by making the
    /// digest, as it makes the ids.
    #[must_use]
    pub fn rules_digest(&self, namespace: &str, scope: &[ScopePart], key: &KeyRule, fingerprint: &Recipe) -> [u8; 32] {
        let mut out = self.begin(b"oncegate rules 1");
        put(&mut out, namespace.as_bytes());
        put_count(&mut out, scope.len());
        scope.iter().for_each(|part| put(&mut out, part.to_string().as_bytes()));
        put_count(&mut out, key.from.len());
        for source in &key.from {
            put(&mut out, source.to_string().as_bytes());
            if *source == KeySource::Fingerprint {
                put_recipe(&mut out, fingerprint);
            }
        }
        self.hash(&out)
    }

    /// What every hash begins with: what it is for, and the service.
    fn begin(&self, purpose: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(512);
        put(&mut out, purpose);
        put(&mut out, self.service.as_bytes());
        out
    }

    fn hash(&self, text: &[u8]) -> [u8; 32] {
        match &self.secret {
            None => sha256(text),
            Some(secret) => {
                let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes secrets of any length");
                mac.update(text);
                mac.finalize().into_bytes().into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderName, HeaderValue};
    use proptest::prelude::*;

    use super::*;
    use crate::idempotency::policy::Policy;

    /// Everything that makes an id.
    #[derive(Clone, Debug, PartialEq)]
    struct Whole {
        secret: Option<String>,
        service: String,
        namespace: String,
        scope: Vec<String>,
        lines: Vec<(String, String)>,
        key: String,
    }

    impl Whole {
        fn identifier(&self) -> Identifier {
            Identifier::new(self.service.as_str().into(), self.secret.as_ref().map(|secret| secret.as_bytes().into()))
        }

        fn id(&self) -> RecordId {
            let headers: HeaderMap = self
                .lines
                .iter()
                .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), HeaderValue::try_from(value).unwrap()))
                .collect();
            let scope: Vec<_> = self.scope.iter().map(|word| ScopePart::parse(word).unwrap()).collect();
            let caller = Caller { headers: &headers, authority: None, client_ip: None };
            self.identifier().id(&self.namespace, &scope, caller, &Key::parse(&self.key, 255).unwrap())
        }
    }

    fn whole() -> impl Strategy<Value = Whole> {
        let word = || "[ab]{0,2}";
        let lines = proptest::collection::vec(("[xy]", word()), 0..3).prop_map(|mut lines| {
            // Between names, order does not count.
            lines.sort_by(|a, b| a.0.cmp(&b.0));
            lines
        });
        (proptest::option::of(word()), word(), word(), lines, "[ab]{1,2}").prop_map(
            |(secret, service, namespace, lines, key)| Whole {
                secret,
                service,
                namespace,
                scope: vec!["header:x".to_owned(), "header:y".to_owned()],
                lines,
                key,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn different_identities_have_different_ids(one in whole(), other in whole()) {
            prop_assert_eq!(one.id() == other.id(), one == other);
            let same_key = (&one.secret, &one.service, &one.key) == (&other.secret, &other.service, &other.key);
            prop_assert_eq!(one.id().0[..8] == other.id().0[..8], same_key);
        }
    }

    #[test]
    fn the_prefix_begins_the_id() {
        let whole = Whole {
            secret: Some("s".to_owned()),
            service: "default".to_owned(),
            namespace: "charges".to_owned(),
            scope: vec!["host".to_owned()],
            lines: vec![],
            key: "k".to_owned(),
        };
        assert_eq!(whole.identifier().prefix(&Key::parse("\"k\"", 255).unwrap()), whole.id().0[..8]);
    }

    /// Records outlive programs: these never change.
    #[test]
    fn ids_are_as_they_ever_were() {
        let policy = Policy::default();
        let headers = HeaderMap::from_iter([(HeaderName::from_static("x-api-key"), HeaderValue::from_static("ann"))]);
        let caller = Caller { headers: &headers, authority: Some("Example.com"), client_ip: None };
        let key = Key::parse("8e03978e-40d5-43dd-bc93-6894a57f9324", 255).unwrap();
        let all = [None, Some(Arc::from(&b"secret"[..]))].map(|secret| {
            let identifier = Identifier::new("default".into(), secret);
            let rules = identifier.rules_digest("charges", &policy.scope, &policy.key, &policy.fingerprint);
            [identifier.id("charges", &policy.scope, caller, &key).to_string(), RecordId(rules).to_string()]
        });
        let ever = [
            [
                "00a2f30977a11e84ece756d424777cd92bd3b45bc23079c6980804b4295a5a7e",
                "6691fded6e30210f6cd80efa3f05b5e32de4a32c741228a22fb260db746e5918",
            ],
            [
                "c97dee0fd01e890042aea9507e27bc7718bc48d3c29d3f0f621791d8779ef1be",
                "36723f2100af6e2bc889d5b15e19dc84339c7c95569ce4b3c8771508c9dd6ec4",
            ],
        ];
        assert_eq!(all, ever);
    }

    #[test]
    fn rules_differ_where_ids_would() {
        let digest = |service: &str, secret: Option<&str>, namespace: &str, change: fn(&mut Policy)| {
            let mut policy = Policy::default();
            change(&mut policy);
            Identifier::new(service.into(), secret.map(|secret| secret.as_bytes().into())).rules_digest(
                namespace,
                &policy.scope,
                &policy.key,
                &policy.fingerprint,
            )
        };
        let by_fingerprint = |policy: &mut Policy| policy.key.from = vec![KeySource::Fingerprint];
        let different = [
            digest("a", None, "n", |_| ()),
            digest("b", None, "n", |_| ()),
            digest("a", Some(""), "n", |_| ()),
            digest("a", Some("s"), "n", |_| ()),
            digest("a", None, "m", |_| ()),
            digest("a", None, "n", |policy| policy.scope.clear()),
            digest("a", None, "n", |policy| policy.scope.reverse()),
            digest("a", None, "n", |policy| policy.key.from.push(KeySource::CloudEvent)),
            digest("a", None, "n", by_fingerprint),
            digest("a", None, "n", |policy| {
                policy.key.from = vec![KeySource::Fingerprint];
                policy.fingerprint.query = false;
            }),
        ];
        for (at, one) in different.iter().enumerate() {
            assert!(!different[at + 1..].contains(one), "number {at} stands again");
        }
        let same = digest("a", None, "n", |policy| {
            policy.key.required = true;
            policy.key.max_length = 10;
            policy.fingerprint.query = false;
        });
        assert_eq!(same, different[0]);
    }
}
