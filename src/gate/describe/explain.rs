//! What the gate would do with a request, found out by the gate's own rules and without doing it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use http::Version;
use http::header::{EXPECT, HOST};
use http::request::Parts;
use sha2::{Digest as _, Sha256};

use super::policy_page;
use crate::gate::Settings;
pub use crate::gate::admission::admit::Unprotected;
use crate::gate::admission::admit::{Admission, Candidate, Step};
use crate::gate::admission::if_protected::IfProtected;
use crate::gate::admission::ignored::KeyPlaces;
use crate::gate::admission::jwt::{Examined, unverified};
use crate::gate::admission::preflight::{Preflight, announced};
use crate::gate::delivery::request_status;
use crate::gate::pass;
use crate::gate::pass::too_large;
use crate::gate::request;
use crate::gate::request::{ForwardingContext, Head};
use crate::http::fault::Fault;
use crate::http::problem::Problem;
use crate::http::server::Peer;
use crate::idempotency::credential::{Credential, Kind};
use crate::idempotency::fingerprint::{Body, BodyComparison, Fingerprint, Subject};
use crate::idempotency::key::{Found, Key};
use crate::idempotency::record::RecordId;
use crate::idempotency::scope::{Caller, ClientCertificate, ScopePart, ScopeWord};
use crate::route::{Ambiguous, Route, Router};

/// A request as it would come. Without a host in its target or its headers, and without an address of its client, what
/// depends on them stays unknown.
#[derive(Clone, Debug)]
pub struct Sample<'a> {
    /// Its head.
    pub head: Parts,
    /// Its whole body.
    pub body: &'a [u8],
    /// The address that its connection is from.
    pub client_ip: Option<IpAddr>,
    /// What its client proves who it is with.
    pub certificate: Option<Arc<ClientCertificate>>,
    /// Whether clients are asked for a certificate.
    pub asks_certificate: bool,
    /// Whether its connection is encrypted.
    pub is_secure: bool,
}

/// What the gate would do with a request.
#[derive(Debug)]
pub struct Explanation {
    /// The host that the request names, as the gate compares it.
    pub authority: Option<Arc<str>>,
    /// Whether it carries a key that does nothing, since no route protects it.
    pub ignores_key: bool,
    /// Whether it is a preflight for a request of a route.
    pub is_preflight: bool,
    /// That route, where the gate completes the preflight.
    pub preflight: Option<Arc<Route>>,
    /// What becomes of it.
    pub fate: Fate,
}

/// What becomes of a request.
#[derive(Debug)]
pub enum Fate {
    /// It gets the policy page.
    PolicyPage,
    /// It gets the status of an accepted request.
    Status,
    /// It is refused before a route is looked for.
    Malformed(Problem),
    /// Its path can be read in two ways that are protected differently. It gets the problem.
    Ambiguous(Box<Ambiguous>, Problem),
    /// No route matches it. It goes to the upstream of this index, or gets the problem.
    Unrouted(Result<usize, Problem>),
    /// It has a route.
    Routed(Arc<Route>, Handling),
}

/// What a route does with a request.
#[derive(Debug)]
pub enum Handling {
    /// It is forwarded without protection.
    Passed(Unprotected),
    /// It is refused; nothing is forwarded.
    Refused(Problem),
    /// Its key is claimed before it is forwarded.
    Protected(Box<Identified>),
    /// It is forwarded as it comes, and this is what the route would do if it protected.
    Observed(Box<Handling>),
}

/// What makes a protected request's record.
#[derive(Debug)]
pub struct Identified {
    /// Its key.
    pub key: Key,
    /// Who the key belongs to.
    pub scope: Vec<(ScopeWord, Value)>,
    /// What tells it from another request.
    pub fingerprint: Fingerprint,
    /// How its body counts in that.
    pub counted: BodyComparison,
    /// The id of its record; nothing where part of the scope is unknown.
    pub id: Option<RecordId>,
}

/// What a request has for a part of a scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// The sample does not say.
    Unknown,
    /// Nothing, which is a value of its own.
    Absent,
    /// This, which is no secret.
    Shown(String),
    /// Something that may be a secret.
    Hidden {
        /// How many values: lines of a header, cookies of a name.
        count: usize,
        /// The SHA-256 of the part and its values.
        digest: [u8; 32],
    },
    /// A credential.
    Credential {
        /// Which headers count, and how.
        kind: Kind,
        /// The SHA-256 of its identity.
        identity: [u8; 32],
        /// The SHA-256 of its proof, where its kind has one.
        proof: Option<[u8; 32]>,
    },
}

/// Finds out what a gate with these settings and routes would do.
#[must_use]
pub fn explain(settings: &Settings, router: &Router, sample: Sample<'_>) -> Explanation {
    let Sample { head, body, client_ip, certificate, asks_certificate, is_secure } = sample;
    let without_route =
        |fate| Explanation { authority: None, ignores_key: false, is_preflight: false, preflight: None, fate };
    if settings.policy_page.as_ref().is_some_and(|page| policy_page::is_at(page, &head.uri)) {
        return without_route(Fate::PolicyPage);
    }
    if request_status::is_at(head.uri.path()) && router.routes().iter().any(|route| route.policy.accepts()) {
        return without_route(Fate::Status);
    }
    let is_http_1_0 = head.version == Version::HTTP_10;
    let mut expectations = head.headers.get_all(EXPECT).iter();
    if let Some(fault) = expectations.find_map(|value| Fault::of_expectation(value.as_bytes(), is_http_1_0).err()) {
        return without_route(Fate::Malformed(Problem::new(fault.code(), fault.to_string())));
    }
    let lacks_certificate = asks_certificate && certificate.is_none();
    let upgrades = settings.upgrades.asked(head.version, &head.headers).is_some();
    // An unused address stands for an unknown one; it is not read then.
    let address = SocketAddr::from((client_ip.unwrap_or(Ipv4Addr::UNSPECIFIED.into()), 0));
    let peer = Peer { certificate, is_secure, ..Peer::new(address) };
    let context =
        Arc::new(ForwardingContext { forwarding: settings.forwarding.clone(), ..ForwardingContext::default() });
    let mut head = head;
    if !head.headers.contains_key(HOST) {
        // Its host is not known; HTTP/1.1 would demand one.
        head.version = Version::HTTP_10;
    }
    let mut head = match Head::of(head, peer, &context) {
        Ok(head) => head,
        Err(problem) => {
            return without_route(Fate::Malformed(problem));
        }
    };
    let authority = head.authority().map(Arc::from);
    let has_key = KeyPlaces::of(router).has_key(&head.method, &head.uri, &head.headers);
    let token = settings.jwt.as_ref().map_or(Examined::Known(None), |jwt| jwt.examine(&head.headers));
    match &token {
        Examined::Known(claims) => head.set_jwt_claims(claims.clone()),
        Examined::Unknown => head.set_jwt_claims(None),
        Examined::Refused(_) => {}
    }
    let asked = Inquiry { settings, head: &head, upgrades, body, client_ip, lacks_certificate, token };
    let fate = asked.fate(router);
    let is_unprotected = matches!(fate, Fate::Unrouted(_) | Fate::Routed(_, Handling::Passed(Unprotected::NoKey)));
    let preflight = match &fate {
        Fate::Unrouted(_) | Fate::Routed(_, Handling::Passed(_) | Handling::Observed(_)) => {
            Preflight::of(router, &head)
        }
        Fate::PolicyPage | Fate::Status | Fate::Malformed(_) | Fate::Ambiguous(..) | Fate::Routed(..) => None,
    };
    let preflight = preflight.map(|preflight| preflight.route);
    let is_preflight = announced(router, &head).is_some();
    Explanation { authority, ignores_key: has_key && is_unprotected, is_preflight, preflight, fate }
}

/// A request that is asked about.
struct Inquiry<'a> {
    settings: &'a Settings,
    head: &'a Head,
    upgrades: bool,
    body: &'a [u8],
    client_ip: Option<IpAddr>,
    /// Whether the client must have a certificate, and the sample does not say which.
    lacks_certificate: bool,
    token: Examined,
}

impl Inquiry<'_> {
    /// What becomes of the request, by the rules that serving asks too.
    fn fate(&self, router: &Router) -> Fate {
        let lacks = |part: &ScopePart| self.value(part) == Value::Absent;
        let candidate = Candidate::asked_about(self.head, self.upgrades, &lacks);
        match candidate.admit(router) {
            Admission::Ambiguous(ambiguous) => {
                let problem = request::ambiguous(&ambiguous);
                Fate::Ambiguous(ambiguous, problem)
            }
            Admission::Unrouted => {
                // A preflight goes where the request that it announces would.
                let announced = announced(router, self.head).map(|(route, _)| route.upstream);
                let upstream = announced.or(self.settings.default_upstream);
                Fate::Unrouted(upstream.ok_or_else(|| pass::no_route(self.head)))
            }
            Admission::Routed(route, Step::Forward(Unprotected::Observed)) => {
                let ambiguity = IfProtected::of(router).and_then(|routes| routes.ambiguity(self.head));
                let handling = match ambiguity {
                    Some(ambiguous) => Handling::Refused(request::ambiguous(&ambiguous)),
                    None => self.handling(&candidate, route, candidate.protected_step(route)),
                };
                Fate::Routed(Arc::clone(route), Handling::Observed(Box::new(handling)))
            }
            Admission::Routed(route, step) => Fate::Routed(Arc::clone(route), self.handling(&candidate, route, step)),
        }
    }

    fn handling(&self, candidate: &Candidate<'_>, route: &Route, step: Step) -> Handling {
        let longest = route.policy.max_request_body;
        match step {
            Step::Refuse(refusal) => Handling::Refused(refusal.problem),
            Step::Verify { .. } => Handling::Refused(match &self.token {
                Examined::Refused(problem) => problem.clone(),
                Examined::Known(_) | Examined::Unknown => unverified(),
            }),
            Step::Forward(why) => Handling::Passed(why),
            Step::NeedBody | Step::Protect(_) if self.body.len() as u64 > longest => {
                Handling::Refused(too_large(longest))
            }
            Step::Protect(found) => Handling::Protected(Box::new(self.identify(route, found))),
            Step::NeedBody => match candidate.with_body(route, self.body) {
                // The body was all that was missing.
                Step::NeedBody => Handling::Passed(Unprotected::NoKey),
                step => self.handling(candidate, route, step),
            },
        }
    }

    fn identify(&self, route: &Route, found: Found) -> Identified {
        let Head { method, uri, headers, .. } = self.head;
        let policy = &route.policy;
        let subject = Subject { method, uri, headers, body: Body::Whole(self.body) };
        let digest = policy.fingerprint.digest(subject);
        let key = found.into_key(&digest);
        let scope = policy.scope.words().map(|word| {
            let value = self.value(&word.part);
            (word, value)
        });
        let scope: Vec<_> = scope.collect();
        let is_known = scope.iter().all(|(_, value)| *value != Value::Unknown);
        let id = is_known.then(|| self.id(route, &key));
        // As the record keeps it.
        let digest = id.and_then(|id| self.settings.identifiers().first.keyed_digest(id, &digest)).unwrap_or(digest);
        Identified {
            id,
            counted: policy.fingerprint.counted(headers, self.body),
            fingerprint: Fingerprint { recipe: policy.fingerprint.clone(), digest },
            key,
            scope,
        }
    }

    fn id(&self, route: &Route, key: &Key) -> RecordId {
        self.settings.identifiers().first.id(&route.namespace, &route.policy.scope, self.caller(), key)
    }

    fn value(&self, part: &ScopePart) -> Value {
        let caller = self.caller();
        match part {
            ScopePart::Credential => self.credential(),
            ScopePart::Host => caller.authority.map_or(Value::Unknown, |host| Value::Shown(host.to_owned())),
            ScopePart::ClientIp => caller.client_ip.map_or(Value::Unknown, |ip| Value::Shown(ip.to_string())),
            ScopePart::ClientCert(_) if caller.certificate.is_none() => Value::Unknown,
            ScopePart::JwtClaim(_) if matches!(self.token, Examined::Unknown) => Value::Unknown,
            ScopePart::Const(text) => Value::Shown(text.clone()),
            ScopePart::Header(_)
            | ScopePart::Cookie(_)
            | ScopePart::BasicUser
            | ScopePart::ClientCert(_)
            | ScopePart::JwtClaim(_) => match part.count(caller) {
                0 => Value::Absent,
                count => {
                    let mut encoded = Vec::new();
                    let _ = part.encode(caller, &mut encoded);
                    Value::Hidden { count, digest: Sha256::digest(&encoded).into() }
                }
            },
        }
    }

    fn credential(&self) -> Value {
        let credential = Credential::of(self.caller());
        let by_certificate = matches!(credential.kind, Kind::Cookie | Kind::Certificate | Kind::Anonymous);
        if by_certificate && self.lacks_certificate {
            return Value::Unknown;
        }
        let mut identity = Vec::new();
        let proof = ScopePart::Credential.encode(self.caller(), &mut identity);
        let digest = |bytes: &[u8]| Sha256::digest(bytes).into();
        Value::Credential { kind: credential.kind, identity: digest(&identity), proof: proof.as_deref().map(digest) }
    }

    fn caller(&self) -> Caller<'_> {
        let caller = self.head.caller();
        Caller { client_ip: caller.client_ip.filter(|_| self.client_ip.is_some()), ..caller }
    }
}
