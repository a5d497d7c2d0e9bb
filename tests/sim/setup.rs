//! What a run is set up with: the routes and their policies, and how requests of the simulation look.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use oncegate::idempotency::codec;
use oncegate::idempotency::fingerprint::{Body, Recipe, Subject};
use oncegate::idempotency::identity::Identifier;
use oncegate::idempotency::key::Key;
use oncegate::idempotency::policy::{InFlight, Policy, StoreFailure};
use oncegate::idempotency::record::RecordId;
use oncegate::idempotency::recovery::Recovery;
use oncegate::idempotency::scope::{Caller, ScopePart};
use oncegate::route::{Pattern, Route, Router};

use crate::dice::Dice;
use crate::history::Label;

/// The path of each route; its name is the same without the slash.
pub const PATHS: [&str; 3] = ["/hold", "/retry", "/open"];
pub const TENANTS: [&str; 2] = ["ann", "bob"];
pub const KEYS: usize = 3;
/// Bodies of requests. Each is another request; [`body`] spells the first in two ways.
pub const VARIANTS: usize = 2;

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Of each route, in the order of [`PATHS`].
    pub policies: Vec<Policy>,
    /// How long a gate waits for its store.
    pub settle_timeout: Duration,
    /// Longest time for an attempt.
    pub timeout: Duration,
    /// Longest time for a connection to the upstream to open.
    pub connect_timeout: Duration,
    /// How long a client waits for an attempt.
    pub client_timeout: Duration,
    /// How many gates there are.
    pub gates: usize,
    /// How long gates believe what they read earlier, where there are several; the only one believes it while it lives.
    pub max_age: Option<Duration>,
}

/// The record of each label.
static IDS: LazyLock<BTreeMap<RecordId, Label>> = LazyLock::new(|| {
    let identifier = Identifier::new("sim".into(), None);
    let labels = (0..PATHS.len()).flat_map(|route| {
        (0..TENANTS.len()).flat_map(move |tenant| (0..KEYS).map(move |key| Label { route, tenant, key }))
    });
    labels
        .map(|label| {
            let headers = HeaderMap::from_iter([(TENANT, HeaderValue::from_static(TENANTS[label.tenant]))]);
            let caller =
                Caller { headers: &headers, authority: None, client_ip: None, certificate: None, claims: None };
            let key = Key::parse(&key(label.key), 255).unwrap();
            (identifier.id(name(label.route), &scope(), caller, &key), label)
        })
        .collect()
});

/// The variant behind each fingerprint.
static DIGESTS: LazyLock<BTreeMap<[u8; 32], usize>> = LazyLock::new(|| {
    let mut digests = BTreeMap::new();
    for path in PATHS {
        for variant in 0..VARIANTS {
            let (uri, body) = (Uri::from_static(path), body(variant, false));
            let headers =
                HeaderMap::from_iter([(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
            let subject =
                Subject { method: &Method::POST, uri: &uri, headers: &headers, body: Body::Whole(body.as_bytes()) };
            digests.insert(Recipe::default().digest(subject), variant);
        }
    }
    digests
});

const TENANT: HeaderName = HeaderName::from_static("x-tenant");

impl Setup {
    pub fn draw(dice: &mut Dice) -> Self {
        let timeout = dice.millis(1_500..5_000);
        let gates = dice.weighted(&[(1, 1), (3, 2), (2, 3)]);
        Self {
            gates,
            max_age: (gates > 1).then(|| dice.millis(300..5_000)),
            policies: (0..PATHS.len()).map(|route| policy(route, dice)).collect(),
            settle_timeout: dice.millis(500..2_500),
            timeout,
            connect_timeout: dice.millis(200..1_000),
            client_timeout: if dice.percent(75) { timeout } else { dice.millis(300..1_500) },
        }
    }

    pub fn policy(&self, label: Label) -> &Policy {
        &self.policies[label.route]
    }

    pub fn router(&self) -> Router {
        let routes = self.policies.iter().enumerate().map(|(route, policy)| Route {
            name: name(route).into(),
            namespace: name(route).into(),
            methods: vec![Method::POST],
            host: None,
            path: Pattern::parse(PATHS[route]).unwrap(),
            upstream: 0,
            policy: policy.clone(),
        });
        Router::new(routes.collect()).unwrap()
    }
}

/// The record of a label.
pub fn id_of(label: Label) -> RecordId {
    let found = IDS.iter().find(|(_, own)| **own == label);
    *found.expect("every label has a record").0
}

/// What a record is about.
pub fn label_of(id: RecordId) -> Option<Label> {
    IDS.get(&id).copied()
}

/// Which variant of a request a record was claimed for.
pub fn variant_of(head: &bytes::Bytes) -> Option<usize> {
    DIGESTS.get(&codec::Head::decode(head).ok()?.fingerprint.digest).copied()
}

pub fn key(key: usize) -> String {
    format!("k{key}")
}

/// The body of a variant; `respelled`, the same request in other bytes.
pub fn body(variant: usize, respelled: bool) -> String {
    if respelled { format!("{{ \"amount\": {variant} }}") } else { format!("{{\"amount\":{variant}}}") }
}

/// The variant of a body.
pub fn variant_in(body: &[u8]) -> usize {
    let digits: Vec<u8> = body.iter().copied().filter(u8::is_ascii_digit).collect();
    String::from_utf8(digits).unwrap().parse().unwrap()
}

fn name(route: usize) -> &'static str {
    &PATHS[route][1..]
}

fn scope() -> Vec<ScopePart> {
    vec![ScopePart::Header(TENANT)]
}

fn policy(route: usize, dice: &mut Dice) -> Policy {
    let mut policy = Policy {
        ttl: dice.weighted(&[(1, Duration::from_secs(2)), (1, Duration::from_secs(6)), (2, Duration::from_secs(3600))]),
        unknown_ttl: dice.weighted(&[(1, Duration::from_secs(3)), (3, Duration::from_secs(3600))]),
        scope: scope().into(),
        recovery: if route == 1 { Recovery::Retry } else { Recovery::Hold },
        store_failure: if route == 2 { StoreFailure::Forward } else { StoreFailure::Reject },
        in_flight: if dice.percent(40) { InFlight::Wait(dice.millis(200..4_000)) } else { InFlight::Reject },
        lease: dice.pick(&[Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(3)]),
        max_response_body: if dice.percent(30) { 300 } else { 1024 * 1024 },
        ..Policy::default()
    };
    const OVERRIDES: [(&str, &str); 9] = [
        ("404", "release"),
        ("429", "store"),
        ("5xx", "hold"),
        ("500", "store"),
        ("502", "release"),
        ("unreachable", "hold"),
        ("timeout", "release"),
        ("broken", "release"),
        ("2xx", "store"),
    ];
    for (entry, action) in OVERRIDES {
        if dice.percent(12) {
            policy.outcomes.insert(entry, action).unwrap();
        }
    }
    policy
}
