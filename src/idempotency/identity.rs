//! Turns service, namespace, scope and key into a record's id.

use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use http::HeaderName;
use sha2::Sha256;

use super::codec::put_recipe;
use super::credential::Proof;
use super::fingerprint::Recipe;
use super::key::{Key, KeyRule, KeySource};
use super::record::{RecordId, put, put_count, sha256};
use super::scope::{Caller, ScopePart};

/// Makes ids: SHA-256, or HMAC-SHA-256 where a secret is set, so that ids cannot be guessed from keys.
#[derive(Clone)]
pub struct RecordIdHasher {
    secret: Option<Arc<[u8]>>,
    service: Arc<str>,
}

/// The ways in which the ids of a service's records may have been made. Records are made by the first; the others are looked
/// for, too, while one secret takes the place of another.
#[derive(Clone)]
pub struct RecordIdHashers {
    /// What makes new ids.
    pub first: RecordIdHasher,
    /// What may have made the ids of records that are there.
    pub others: Arc<[RecordIdHasher]>,
}

/// What finds records by a part of their scope without saying what it is: a digest, which without a secret can be tested
/// against guesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScopeTag(pub [u8; 8]);

/// The first eight bytes of a digest.
fn beginning(digest: &[u8; 32]) -> [u8; 8] {
    std::array::from_fn(|at| digest[at])
}

/// The beginning of a digest of rules: see [`RecordIdHasher::rules_digest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RulesTag(pub [u8; 8]);

impl RulesTag {
    /// That of a digest.
    #[must_use]
    pub fn of(digest: &[u8; 32]) -> Self {
        Self(beginning(digest))
    }
}

/// What says who a caller is and stands in no route. A rule counts only where the part that it is about is part of the scope.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallerRules<'a> {
    /// Whose word counts for the address of a client; empty for none.
    pub trusted: &'a str,
    /// The header that a token comes in, where it is not `Authorization`.
    pub token_header: Option<&'a HeaderName>,
}

impl<'a> CallerRules<'a> {
    /// Those of them that count for a scope.
    pub(super) fn of_scope(self, scope: &[ScopePart]) -> Self {
        let has_jwt_claims = scope.iter().any(|part| matches!(part, ScopePart::JwtClaim(_)));
        Self {
            trusted: if scope.contains(&ScopePart::ClientIp) { self.trusted } else { "" },
            token_header: self.token_header.filter(|_| has_jwt_claims),
        }
    }
}

impl<'a> From<&'a str> for CallerRules<'a> {
    /// With nothing but whose word counts for an address.
    fn from(trusted: &'a str) -> Self {
        Self { trusted, token_header: None }
    }
}

impl RecordIdHashers {
    /// One way alone.
    #[must_use]
    pub fn only(first: RecordIdHasher) -> Self {
        Self { first, others: Arc::new([]) }
    }

    /// Each, the one that makes new ids first.
    pub fn all(&self) -> impl Iterator<Item = &RecordIdHasher> {
        std::iter::once(&self.first).chain(&*self.others)
    }
}

impl RecordIdHasher {
    /// For one service. The same secret must be used for the life of its records.
    #[must_use]
    pub fn new(service: Arc<str>, secret: Option<Arc<[u8]>>) -> Self {
        Self { secret, service }
    }

    /// The id of a record.
    #[must_use]
    pub fn id(&self, namespace: &str, scope: &[ScopePart], caller: Caller<'_>, key: &Key) -> RecordId {
        self.identify(namespace, scope, caller, key).0
    }

    /// The id of a record, and the digest of what the caller proves its identity with, where the scope asks for a proof.
    #[must_use]
    pub fn identify(
        &self,
        namespace: &str,
        scope: &[ScopePart],
        caller: Caller<'_>,
        key: &Key,
    ) -> (RecordId, Option<Proof>) {
        let mut whole = self.begin(b"oncegate record 1");
        put(&mut whole, namespace.as_bytes());
        put_count(&mut whole, scope.len());
        // No part stands twice, so there is one proof at most.
        let proofs = scope.iter().filter_map(|part| part.encode(caller, &mut whole));
        let proof = proofs.last();
        put(&mut whole, key.as_str().as_bytes());

        let mut id = [0; 32];
        id[..8].copy_from_slice(&self.prefix(key));
        id[8..].copy_from_slice(&self.hash(&whole)[..24]);
        let id = RecordId(id);
        (id, proof.map(|proof| self.proof(id, &proof)))
    }

    /// The id of the record whose claim is the right to ask the upstream about another record. It has the same prefix. It is
    /// made without the secret: gates that make new ids with different ones ask one at a time, too.
    #[must_use]
    pub fn probe_lock(&self, of: RecordId) -> RecordId {
        self.derived(b"oncegate probe 1", of, sha256)
    }

    /// The id of the shadow record that stands for a record while its route only observes: no protected request finds it.
    #[must_use]
    pub fn shadow(&self, of: RecordId) -> RecordId {
        self.derived(b"oncegate shadow 1", of, |text| self.hash(text))
    }

    fn derived(&self, purpose: &[u8], of: RecordId, hash: impl FnOnce(&[u8]) -> [u8; 32]) -> RecordId {
        let mut whole = self.begin(purpose);
        put(&mut whole, &of.0);
        let mut id = of.0;
        id[8..].copy_from_slice(&hash(&whole)[..24]);
        RecordId(id)
    }

    /// The digest of a request's fingerprint as its record keeps it, where there is a secret: the plain digest can be tested
    /// against guesses. It is bound to the record.
    #[must_use]
    pub fn keyed_digest(&self, id: RecordId, digest: &[u8; 32]) -> Option<[u8; 32]> {
        self.secret.as_ref()?;
        let mut whole = self.begin(b"oncegate fingerprint 1");
        put(&mut whole, &id.0);
        put(&mut whole, digest);
        Some(self.hash(&whole))
    }

    /// The digest of what a caller proves its identity with, for a record, where the scope asks for a proof.
    #[must_use]
    pub fn proof_for(&self, id: RecordId, scope: &[ScopePart], caller: Caller<'_>) -> Option<Proof> {
        let mut identity = Vec::new();
        let proof = scope.iter().filter_map(|part| part.encode(caller, &mut identity)).last();
        proof.map(|proof| self.proof(id, &proof))
    }

    fn proof(&self, id: RecordId, proof: &[u8]) -> Proof {
        let mut whole = self.begin(b"oncegate proof 1");
        put(&mut whole, &id.0);
        put(&mut whole, proof);
        Proof(self.hash(&whole))
    }

    /// A digest of a caller, equal for all its requests on routes with the same scope: it tells operators which records are of
    /// one caller, and not who that is.
    #[must_use]
    pub fn caller(&self, scope: &[ScopePart], caller: Caller<'_>) -> [u8; 8] {
        let mut whole = self.begin(b"oncegate caller 1");
        scope.iter().for_each(|part| drop(part.encode(caller, &mut whole)));
        beginning(&self.hash(&whole))
    }

    /// The tags of the parts of a scope, but for constants: they find the records of one value of a part, on every route.
    #[must_use]
    pub fn scope_tags(&self, scope: &[ScopePart], caller: Caller<'_>) -> Vec<ScopeTag> {
        let parts = scope.iter().filter(|part| !matches!(part, ScopePart::Const(_)));
        parts.map(|part| self.scope_tag(part, caller)).collect()
    }

    /// The tag of what a caller has for a part.
    #[must_use]
    pub fn scope_tag(&self, part: &ScopePart, caller: Caller<'_>) -> ScopeTag {
        let mut whole = self.begin(b"oncegate scope part 1");
        part.encode(caller, &mut whole);
        ScopeTag(beginning(&self.hash(&whole)))
    }

    /// The first eight bytes of the ids of every record of this key, whatever its namespace and scope.
    #[must_use]
    pub fn prefix(&self, key: &Key) -> [u8; 8] {
        let mut out = self.begin(b"oncegate key 1");
        put(&mut out, key.as_str().as_bytes());
        beginning(&self.hash(&out))
    }

    /// The digest of everything but the request that makes the ids of a namespace. Two gates with equal digests
    /// give a request the same id.
    ///
    /// `fingerprint` counts only where a key may be a request's own fingerprint. The secret counts by making the digest, as it
    /// makes the ids.
    #[must_use]
    pub fn rules_digest<'a>(
        &self,
        namespace: &str,
        scope: &[ScopePart],
        key: &KeyRule,
        fingerprint: &Recipe,
        callers: impl Into<CallerRules<'a>>,
    ) -> [u8; 32] {
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
        let CallerRules { trusted, token_header } = callers.into().of_scope(scope);
        if !trusted.is_empty() {
            put(&mut out, trusted.as_bytes());
        }
        if let Some(name) = token_header {
            put(&mut out, format!("token in {name}").as_bytes());
        }
        self.hash(&out)
    }

    /// What every hash begins with: what it is for, and the service.
    pub(super) fn begin(&self, purpose: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(512);
        put(&mut out, purpose);
        put(&mut out, self.service.as_bytes());
        out
    }

    pub(super) fn hash(&self, text: &[u8]) -> [u8; 32] {
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
    use crate::idempotency::scope::{Scope, ScopeWord};

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
        fn identifier(&self) -> RecordIdHasher {
            RecordIdHasher::new(
                self.service.as_str().into(),
                self.secret.as_ref().map(|secret| secret.as_bytes().into()),
            )
        }

        fn id(&self) -> RecordId {
            let headers: HeaderMap = self
                .lines
                .iter()
                .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), HeaderValue::try_from(value).unwrap()))
                .collect();
            let scope: Vec<_> = self.scope.iter().map(|word| ScopePart::parse(word).unwrap()).collect();
            let caller =
                Caller { headers: &headers, authority: None, client_ip: None, certificate: None, claims: None };
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
        #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases * 8))]
        #[test]
        fn different_identities_have_different_ids(one in whole(), other in whole()) {
            prop_assert_eq!(one.id() == other.id(), one == other);
            let same_key = (&one.secret, &one.service, &one.key) == (&other.secret, &other.service, &other.key);
            prop_assert_eq!(one.id().0[..8] == other.id().0[..8], same_key);
        }

        #[test]
        fn an_id_is_its_service_namespace_scope_and_key(one in request(), other in request()) {
            prop_assert_eq!(one.id() == other.id(), one.meaning() == other.meaning(), "{:?} {:?}", one, other);
        }

        #[test]
        fn a_secret_changes_everything(mut whole in whole(), secret in "[ab]{0,3}") {
            whole.secret = None;
            let bare = whole.id();
            whole.secret = Some(secret.clone());
            let with = whole.id();
            whole.secret = Some(format!("{secret}a"));
            let other = whole.id();
            for eight in 0..4 {
                let eight = eight * 8..eight * 8 + 8;
                prop_assert!(bare.0[eight.clone()] != with.0[eight.clone()] && with.0[eight.clone()] != other.0[eight]);
            }
        }
    }

    /// A request under a scope of any parts, some of which it lacks.
    #[derive(Clone, Debug)]
    struct Request {
        namespace: String,
        scope: Vec<&'static str>,
        /// The lines of `x`, and of `cookie`.
        lines: [Vec<String>; 2],
        authority: Option<String>,
        client_ip: Option<u8>,
        key: String,
    }

    fn request() -> impl Strategy<Value = Request> {
        const PARTS: [&str; 6] = ["header:x", "cookie:c", "host", "client-ip", "const:", "const:a"];
        let scope = proptest::collection::vec(proptest::sample::select(&PARTS[..]), 0..3);
        let lines = [proptest::collection::vec("[ab]{0,1}", 0..3), proptest::collection::vec("[cd]=[ab]{0,1}", 0..3)];
        let of_caller = (lines, proptest::option::of("[ab]{0,1}"), proptest::option::of(0..2_u8));
        ("[ab]{0,1}", scope, of_caller, "[ab]{1,2}").prop_map(
            |(namespace, scope, (lines, authority, client_ip), key)| Request {
                namespace,
                scope,
                lines,
                authority,
                client_ip,
                key,
            },
        )
    }

    impl Request {
        fn id(&self) -> RecordId {
            let lines = ["x", "cookie"].iter().zip(&self.lines);
            let lines =
                lines.flat_map(|(name, lines)| lines.iter().map(move |line| (HeaderName::from_static(name), line)));
            let headers: HeaderMap = lines.map(|(name, line)| (name, HeaderValue::from_str(line).unwrap())).collect();
            let client_ip = self.client_ip.map(|last| std::net::IpAddr::from([127, 0, 0, last]));
            let caller = Caller {
                headers: &headers,
                authority: self.authority.as_deref(),
                client_ip,
                certificate: None,
                claims: None,
            };
            let scope: Vec<_> = self.scope.iter().map(|part| ScopePart::parse(part).unwrap()).collect();
            RecordIdHasher::new("s".into(), None).id(
                &self.namespace,
                &scope,
                caller,
                &Key::parse(&self.key, 9).unwrap(),
            )
        }

        /// What the id stands for, spelled out.
        fn meaning(&self) -> (&str, &str, Vec<(&str, Vec<String>)>) {
            let values = |part: &&'static str| match *part {
                "header:x" => self.lines[0].clone(),
                "cookie:c" => {
                    self.lines[1].iter().filter_map(|pair| Some(pair.strip_prefix("c=")?.to_owned())).collect()
                }
                "host" => self.authority.iter().cloned().collect(),
                "client-ip" => self.client_ip.iter().map(u8::to_string).collect(),
                // Its word says it.
                _ => Vec::new(),
            };
            (&self.namespace, &self.key, self.scope.iter().map(|part| (*part, values(part))).collect())
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

    fn scope(words: &[&str]) -> Scope {
        words.iter().map(|word| ScopeWord::parse(word).unwrap()).collect()
    }

    /// The id of a request with this line, and the digest of the rules, without a secret and with one.
    fn ids(scope: &Scope, (name, value): (&'static str, &'static str)) -> [[String; 2]; 2] {
        let policy = Policy::default();
        let headers = HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_static(value))]);
        let caller = Caller {
            headers: &headers,
            authority: Some("Example.com"),
            client_ip: None,
            certificate: None,
            claims: None,
        };
        let key = Key::parse("8e03978e-40d5-43dd-bc93-6894a57f9324", 255).unwrap();
        [None, Some(Arc::from(&b"secret"[..]))].map(|secret| {
            let identifier = RecordIdHasher::new("default".into(), secret);
            let rules = identifier.rules_digest("charges", scope, &policy.key, &policy.fingerprint, "");
            [identifier.id("charges", scope, caller, &key).to_string(), RecordId(rules).to_string()]
        })
    }

    /// Records outlive programs: these never change. Those of the first default are still found under it, written down.
    #[test]
    fn ids_are_as_they_ever_were() {
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
        for mark in ["?", ""] {
            let first = ["host".to_owned(), format!("header:Authorization{mark}"), format!("header:X-Api-Key{mark}")];
            assert_eq!(ids(&scope(&first.each_ref().map(String::as_str)), ("x-api-key", "ann")), ever);
        }
    }

    #[test]
    fn ids_and_proofs_of_the_default_are_as_they_ever_were() {
        let ever = [
            [
                "00a2f30977a11e84203ad981c6df26eceedb27727bf1bbb1061ec58c39f9e74d",
                "ad2df2baefbba4de6625ebfb7bad1f521371f6fd89e02d2bfe22d08a64cfd363",
            ],
            [
                "c97dee0fd01e8900435e6c332e333d43aae483fafe66e147bb500576b2cf92f1",
                "629add4e04005dba21da14d0afc67f344a800913f2c888874fb10a4942014709",
            ],
        ];
        assert_eq!(ids(&Policy::default().scope, ("x-api-key", "ann")), ever);
        let ever = [
            "06fb11230f40123f236b711e534622f0fc53d4fa5c63d1e9cfcdf20d5f17d242",
            "e06d0b6c2ff4d9dc2d0d80b57f7f4deee16324122febab2f3170a2ba197695d8",
        ];
        let headers = HeaderMap::from_iter([(http::header::COOKIE, HeaderValue::from_static("s=1"))]);
        let caller = Caller { headers: &headers, authority: None, client_ip: None, certificate: None, claims: None };
        let proofs = [None, Some(Arc::from(&b"secret"[..]))].map(|secret| {
            let key = Key::parse("k", 255).unwrap();
            let (_, proof) =
                RecordIdHasher::new("s".into(), secret).identify("n", &Policy::default().scope, caller, &key);
            RecordId(proof.unwrap().0).to_string()
        });
        assert_eq!(proofs, ever);
    }

    #[test]
    fn a_proof_is_bound_to_its_record() {
        let headers = HeaderMap::from_iter([(http::header::COOKIE, HeaderValue::from_static("s=1"))]);
        let caller = Caller { headers: &headers, authority: None, client_ip: None, certificate: None, claims: None };
        let proof = |secret: Option<&str>, service: &str, namespace: &str, scope: &[&str], key: &str| {
            let secret = secret.map(|secret| secret.as_bytes().into());
            let key = Key::parse(key, 255).unwrap();
            RecordIdHasher::new(service.into(), secret)
                .identify(namespace, &self::scope(scope), caller, &key)
                .1
                .unwrap()
                .0
        };
        let proofs = [
            proof(None, "s", "n", &["credential"], "k"),
            proof(Some("x"), "s", "n", &["credential"], "k"),
            proof(None, "t", "n", &["credential"], "k"),
            proof(None, "s", "m", &["credential"], "k"),
            proof(None, "s", "n", &["credential", "host"], "k"),
            proof(None, "s", "n", &["credential"], "l"),
        ];
        for (at, one) in proofs.iter().enumerate() {
            assert!(!proofs[at + 1..].contains(one), "number {at} stands again");
        }
    }

    #[test]
    fn rules_differ_where_ids_would() {
        let digest = |service: &str, secret: Option<&str>, namespace: &str, change: fn(&mut Policy)| {
            let mut policy = Policy::default();
            change(&mut policy);
            RecordIdHasher::new(service.into(), secret.map(|secret| secret.as_bytes().into())).rules_digest(
                namespace,
                &policy.scope,
                &policy.key,
                &policy.fingerprint,
                "",
            )
        };
        let by_fingerprint = |policy: &mut Policy| policy.key.from = vec![KeySource::Fingerprint];
        let different = [
            digest("a", None, "n", |_| ()),
            digest("b", None, "n", |_| ()),
            digest("a", Some(""), "n", |_| ()),
            digest("a", Some("s"), "n", |_| ()),
            digest("a", None, "m", |_| ()),
            digest("a", None, "n", |policy| policy.scope = scope(&[])),
            digest("a", None, "n", |policy| policy.scope = scope(&["credential", "host"])),
            digest("a", None, "n", |policy| policy.scope = scope(&["host", "header:a"])),
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
        let optional = digest("a", None, "n", |policy| policy.scope = scope(&["host", "header:A?"]));
        assert!(different.contains(&optional), "whether a part must be there is no rule of identities");
    }
}
