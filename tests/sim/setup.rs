//! What a run is set up with: the routes and their policies, and how requests of the simulation look.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use oncegate::idempotency::codec;
use oncegate::idempotency::delivery::{Deliver, DeliveryRate, Order};
use oncegate::idempotency::fingerprint::{Body, Recipe, Subject};
use oncegate::idempotency::identity::RecordIdHasher;
use oncegate::idempotency::key::Key;
use oncegate::idempotency::policy::{InFlight, Mode, Policy, StoreFailure};
use oncegate::idempotency::record::RecordId;
use oncegate::idempotency::recovery::{Probe, ProbeHeader, ProbePath, Recovery, Resend};
use oncegate::idempotency::scope::{Caller, ScopePart};
use oncegate::route::{Pattern, Route, Router};
use oncegate::store::{Origin, OriginId};

use crate::dice::Dice;
use crate::history::Label;
use crate::mutant::Mutant;

/// The path of each route; its name is the same without the slash.
pub const PATHS: [&str; 6] = ["/hold", "/retry", "/open", "/probe", "/resend", "/accept"];
/// The route whose upstream has books that can be asked.
pub const PROBE: usize = 3;
/// The route whose upstream honours keys itself.
pub const RESEND: usize = 4;
/// The route that accepts requests and delivers them later, where a run has it.
pub const ACCEPT: usize = 5;
pub const TENANTS: [&str; 2] = ["ann", "bob"];
pub const KEYS: usize = 3;
/// Of a hundred runs, how many have a route that accepts requests.
const ACCEPTING: u64 = 10;
/// Bodies of requests. Each is another request; [`body`] spells the first in two ways.
pub const VARIANTS: usize = 2;

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Of each route, in the order of [`PATHS`].
    pub policies: Vec<Policy>,
    /// Whether there is a route that accepts requests.
    pub accepts: bool,
    /// How long a gate waits for its store.
    pub settle_timeout: Duration,
    /// Longest time for an attempt; [`Setup::timeout_of`] is that of a key.
    timeout: Duration,
    /// The same on the routes where unknown outcomes are found out: there, an attempt that waits for longer is of no use.
    short_timeout: Duration,
    /// How long a request may be under way in the upstream that has books, until they show it.
    pub underway: Duration,
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
    let identifier = identifier();
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

/// The right to ask about each label.
static LOCKS: LazyLock<BTreeMap<RecordId, Label>> = LazyLock::new(|| {
    let identifier = identifier();
    IDS.iter().map(|(id, label)| (identifier.probe_lock(*id), *label)).collect()
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

/// Where the upstream is asked about a key: its record's id follows, and the key.
pub const BOOKS: &str = "/books/";

const TENANT: HeaderName = HeaderName::from_static("x-tenant");

impl Setup {
    pub fn draw(dice: &mut Dice) -> Self {
        let mut apart = dice.apart();
        let timeout = dice.millis(1_500..5_000);
        let (short_timeout, underway) = (dice.millis(500..1_500), dice.millis(100..900));
        // An attempt whose gate has lost its store sends until its time is up, and what it sent takes its time.
        let after = short_timeout + underway;
        let gates = dice.weighted(&[(1, 1), (3, 2), (2, 3)]);
        let max_age = (gates > 1).then(|| dice.millis(300..5_000));
        let accepts = apart.percent(ACCEPTING);
        let mut policies: Vec<Policy> = (0..ACCEPT).map(|route| policy(route, after, dice)).collect();
        policies.push(accepting(&mut apart));
        Self {
            accepts,
            policies,
            gates,
            max_age,
            settle_timeout: dice.millis(500..2_500),
            timeout,
            short_timeout,
            underway,
            connect_timeout: dice.millis(200..1_000),
            client_timeout: if dice.percent(75) { timeout } else { dice.millis(300..1_500) },
        }
    }

    pub fn policy(&self, label: Label) -> &Policy {
        &self.policies[label.route]
    }

    /// Longest time for an attempt.
    pub fn timeout_of(&self, label: Label) -> Duration {
        let longest = self.timeouts()[upstream_of(label.route)];
        if label.route == ACCEPT { longest.min(self.policy(label).deliver.timeout) } else { longest }
    }

    /// Whether what the route accepts is delivered in the order of each scope.
    pub fn is_ordered(&self) -> bool {
        self.policies[ACCEPT].deliver.order == Order::Scope
    }

    /// The same, of each upstream.
    pub fn timeouts(&self) -> [Duration; 2] {
        [self.timeout, self.short_timeout]
    }

    /// The same for all upstreams, as histories have it that are told by hand.
    #[cfg(test)]
    pub fn set_timeouts(&mut self, timeout: Duration) {
        (self.timeout, self.short_timeout) = (timeout, timeout);
    }

    /// The routes, as gates have them: one that makes a mistake may have others.
    pub fn router(&self, mutant: Option<Mutant>) -> Router {
        let routes = self.policies.iter().enumerate().filter(|(route, _)| *route != ACCEPT || self.accepts);
        let routes = routes.map(|(route, policy)| Route {
            name: name(route).into(),
            namespace: name(route).into(),
            methods: vec![Method::POST],
            host: None,
            path: Pattern::parse(PATHS[route]).unwrap(),
            upstream: upstream_of(route),
            policy: mistaken(policy, mutant),
        });
        Router::new(routes.collect()).unwrap()
    }
}

/// The origin of what is accepted.
pub fn accepting_origin() -> OriginId {
    Origin { service: "sim".into(), namespace: name(ACCEPT).into(), route: name(ACCEPT).into() }.id()
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

/// What a record is about, by its id as the upstream gets it.
pub fn label_named(id: &str) -> Option<Label> {
    IDS.iter().find(|(own, _)| own.to_string() == id).map(|(_, label)| *label)
}

/// What a record is about that is the right to ask the upstream.
pub fn label_of_lock(id: RecordId) -> Option<Label> {
    LOCKS.get(&id).copied()
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

fn identifier() -> RecordIdHasher {
    RecordIdHasher::new("sim".into(), None)
}

/// Which of a gate's upstreams a route has. They are one site, for which it has two patiences.
fn upstream_of(route: usize) -> usize {
    usize::from(matches!(route, PROBE | RESEND))
}

/// A policy as a gate has it that makes a mistake.
fn mistaken(policy: &Policy, mutant: Option<Mutant>) -> Policy {
    let mut policy = policy.clone();
    if let (Recovery::Probe(probe), Some(Mutant::ProbesEarly)) = (&mut policy.recovery, mutant) {
        probe.after = Some(Duration::ZERO);
    }
    policy
}

/// The policy of the route that accepts requests.
fn accepting(dice: &mut Dice) -> Policy {
    let mut policy = policy(ACCEPT, Duration::ZERO, dice);
    policy.mode = Mode::Accept;
    if dice.percent(25) {
        policy.recovery = Recovery::Retry;
    }
    if dice.percent(40) {
        policy.outcomes.insert("5xx", "release").unwrap();
    }
    let backoff = dice.millis(20..600);
    policy.deliver = Deliver {
        attempts: dice.within(1..5) as u32,
        backoff,
        max_backoff: backoff + dice.millis(0..1_500),
        timeout: dice.millis(1_000..6_000),
        order: if dice.percent(50) { Order::Scope } else { Order::None },
        give_up_after: dice.millis(2_000..30_000),
        concurrency: dice.pick(&[1, 2, 32]),
        rate: dice.percent(20).then_some(DeliveryRate { count: 4, per: Duration::from_secs(1) }),
    };
    policy
}

fn recovery(route: usize, after: Duration, dice: &mut Dice) -> Recovery {
    match route {
        1 => Recovery::Retry,
        PROBE => Recovery::Probe(Probe {
            path: ProbePath::parse(&format!("{BOOKS}{{id}}/{{key}}")).unwrap(),
            after: Some(after),
            every: dice.percent(50).then(|| dice.millis(500..2_500)),
            headers: vec![ProbeHeader {
                name: HeaderName::from_static("authorization"),
                value: HeaderValue::from_static("the gate"),
                source: "***".to_owned(),
            }],
        }),
        RESEND => Recovery::Resend(Resend { attempts: dice.within(2..5) as u32, backoff: dice.millis(20..600) }),
        _ => Recovery::Hold,
    }
}

fn name(route: usize) -> &'static str {
    &PATHS[route][1..]
}

fn scope() -> Vec<ScopePart> {
    vec![ScopePart::Header(TENANT)]
}

fn policy(route: usize, after: Duration, dice: &mut Dice) -> Policy {
    let mut policy = Policy {
        ttl: dice.weighted(&[(1, Duration::from_secs(2)), (1, Duration::from_secs(6)), (2, Duration::from_secs(3600))]),
        unknown_ttl: dice.weighted(&[(1, Duration::from_secs(3)), (3, Duration::from_secs(3600))]),
        scope: scope().into(),
        recovery: recovery(route, after, dice),
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
