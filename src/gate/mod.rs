//! The gate: what becomes of a request.
//!
//! `driver.rs` is the page to begin with: it says in order what happens to a request. `admission` has the rules by which a
//! request is refused, forwarded or protected, and `claim/attempt.rs` the one forward under a claim. The order of claims, waits
//! and settlements is decided in [`crate::idempotency::protocol`], which `driver/actions.rs` connects to the store and the
//! upstream.

pub mod admission;
mod answer;
mod claim;
mod delivery;
pub mod describe;
mod drain;
mod driver;
mod gate_before;
pub mod identity;
mod inquiry;
mod observe;
mod pass;
mod pending_reply;
mod reload;
mod request;
mod rules_in_force;
mod shared;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue, Request, Response};
use tokio::sync::Notify;
use tokio::time::Instant;

use self::admission::admit::{Admission, Refusal, Step};
use self::admission::if_protected::IfProtected;
use self::admission::ignored::{IgnoredLog, KeyPlaces, head_lines};
use self::admission::jwt::{self, Verifier};
pub use self::answer::HeaderNames;
use self::answer::{CrossOrigin, Estimator, Reply};
pub use self::claim::attempt_tokens::Tokens;
use self::claim::renewal;
use self::delivery::circuit::Circuit;
pub use self::delivery::deliver::deliver_accepted;
pub use self::delivery::disposition::{Disposition, Tries};
pub use self::delivery::message::{CircuitPermit, Message, may_have_header};
use self::delivery::request_status;
use self::describe::policy_page::PolicyPage;
pub use self::identity::newer_rules::{KNOWN_AFTER, are_in_force, follow_rules, replaces};
use self::identity::origin;
use self::inquiry::probe::ProbeCheck;
pub use self::inquiry::reconcile::ask_about_unknown;
use self::pass::ForwardOptions;
use self::pending_reply::PendingReply;
pub use self::reload::{Reload, ReloadTimeout};
use self::request::ForwardingContext;
use self::rules_in_force::{RulesDigest, RulesLock};
use self::shared::Shared;
use crate::http::body::Body;
use crate::http::fault::Fault;
use crate::http::forwarding::{Forwarding, new_request_id, parent};
use crate::http::headers::OwnHeaders;
use crate::http::problem::Problem;
use crate::http::request_body::RequestBody;
use crate::http::server::{Handler, MalformedHead, Peer};
use crate::http::upgrade::Upgrades;
use crate::http::upstream::Upstream;
use crate::http::usage::Usage;
use crate::idempotency::identity::{CallerRules, RecordIdHasher, RecordIdHashers, RulesTag};
use crate::idempotency::media;
use crate::idempotency::record::RequestId;
use crate::route::{Route, Router};
use crate::store::{OriginId, Store};
use crate::telemetry::access_log::AccessLog;
use crate::telemetry::limits::Limit;
use crate::telemetry::metrics::{Metrics, RouteMetrics};
use crate::telemetry::notes::Notes;
use crate::telemetry::outcome::Outcome;
use crate::telemetry::report::{Report, Seen};
use crate::telemetry::spans::{Parent, Tracer};

/// The settings of the gate.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `[store] service`
    pub service: Arc<str>,
    /// `[store] id_secret_file`'s content.
    pub id_secret: Option<Secret>,
    /// `[store] other_id_secret_files`' contents; nothing for `"none"`.
    pub other_id_secrets: Vec<Option<Secret>>,
    /// How long a client waits for a store that went away after the attempt, and for a claim.
    pub settle_timeout: Duration,
    /// The names of the headers that the gate adds.
    pub headers: HeaderNames,
    /// The headers with which it tells an upstream of an attempt.
    pub own_headers: OwnHeaders,
    /// Index of the upstream for what matches no route.
    pub default_upstream: Option<usize>,
    /// `[server] trusted_proxies` and `forwarded`
    pub forwarding: Forwarding,
    /// `[server] upgrades`
    pub upgrades: Upgrades,
    /// `[policy_page] path`
    pub policy_page: Option<Arc<str>>,
    /// Where the attempts' tokens come from.
    pub tokens: Tokens,
    /// `[auth.jwt]`
    pub jwt: Option<jwt::Settings>,
}

/// A secret that `Debug` does not show.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub Arc<[u8]>);

impl Settings {
    /// The ways in which the ids of records may have been made.
    #[must_use]
    pub fn identifiers(&self) -> RecordIdHashers {
        let identifier = |secret: Option<&Secret>| {
            RecordIdHasher::new(Arc::clone(&self.service), secret.map(|secret| Arc::clone(&secret.0)))
        };
        RecordIdHashers {
            first: identifier(self.id_secret.as_ref()),
            others: self.other_id_secrets.iter().map(|secret| identifier(secret.as_ref())).collect(),
        }
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// The gate: answers requests.
pub struct Gate {
    settings: Settings,
    router: Arc<Router>,
    upstreams: Vec<Upstream>,
    identifiers: RecordIdHashers,
    states: HashMap<Arc<str>, Arc<RouteState>>,
    unrouted: Arc<RouteState>,
    /// The headers that the gate adds to answers, which an upstream's own do not pass for.
    added: Arc<[HeaderName]>,
    /// Where clients put keys.
    key_places: KeyPlaces,
    /// What requests would get where routes observe.
    if_protected: Option<IfProtected>,
    /// What scripts may read of them.
    exposed: HeaderValue,
    /// Verifies the tokens that scopes have claims of.
    verifier: Option<Arc<Verifier>>,
    /// Whether any of its routes accepts requests.
    accepts: bool,
    /// What clients may expect of its routes.
    policy_page: Option<PolicyPage>,
    /// How it sees where requests come from.
    context: Arc<ForwardingContext>,
    /// What goes on when another gate takes the place of this one.
    shared: Arc<Shared>,
}

/// What the gate keeps for a route besides its policy.
struct RouteState {
    name: Arc<str>,
    origin: OriginId,
    /// Where its shadow records come from.
    shadow_origin: OriginId,
    metrics: Arc<RouteMetrics>,
    estimator: Arc<Estimator>,
    /// Notified when a delivery may be due.
    arrivals: Arc<Notify>,
    /// Whether its upstream can be reached, for what can wait.
    circuit: Arc<Circuit>,
    /// What the identities of its records are made by.
    rules: RulesDigest,
    /// Whether those are in force.
    rules_status: RulesLock,
    /// The tags of the rules by which each of the gate's identifiers makes ids; none where there is one.
    rules_tags: Vec<RulesTag>,
    /// Headers that must reach the upstream, whatever `Connection` lists.
    kept: Vec<HeaderName>,
    /// Logs keys that have no effect, at a limited rate.
    ignored: IgnoredLog,
    nearly_keys: IgnoredLog,
    /// Whether its probe can be believed, if it has one.
    probe_check: Option<Arc<ProbeCheck>>,
}

/// Why a request is refused before anything is done about it.
const TOO_MANY: &str = "too many requests in flight; nothing was sent";
const TOO_MANY_OF_ONE: &str = "too many requests in flight from this client; nothing was sent";
const UNREAD: &str = "too many bytes of earlier answers wait to be read on this connection; nothing was sent";

impl Gate {
    /// A gate that serves `router`'s routes. `upstreams` are in the order that routes refer to.
    #[must_use]
    pub fn new(
        settings: Settings,
        router: Router,
        upstreams: Vec<Upstream>,
        store: Arc<dyn Store>,
        usage: Arc<Usage>,
        metrics: &Metrics,
    ) -> Arc<Self> {
        let shared = Arc::new(Shared::new(store, usage));
        let gate = Self::beside(shared, settings, router, upstreams, metrics, None);
        gate.show_metrics(metrics);
        gate
    }

    /// A gate that has `shared` in common with others, and takes over what `former` knows of routes and tokens.
    fn beside(
        shared: Arc<Shared>,
        settings: Settings,
        router: Router,
        upstreams: Vec<Upstream>,
        metrics: &Metrics,
        former: Option<&Self>,
    ) -> Arc<Self> {
        let identifiers = settings.identifiers();
        let trusted = settings.forwarding.rule();
        let callers = CallerRules { trusted: &trusted, token_header: settings.token_header() };
        let token_header = settings.jwt.as_ref().map_or(http::header::AUTHORIZATION, |jwt| jwt.header.clone());
        // Where no token is verified, nothing waits for keys.
        let verifies = router.routes().iter().any(|route| route.policy.verifies_tokens());
        let verifier = settings
            .jwt
            .clone()
            .filter(|_| verifies)
            .map(|jwt| Verifier::new(jwt, former.and_then(|former| former.verifier.as_ref()), &shared.usage));
        let state = |name: &Arc<str>, namespace: &Arc<str>, rules: Vec<RulesDigest>, kept, route: Option<&Route>| {
            let known = former.and_then(|former| former.states.get(name));
            let made_by = rules.first().copied().unwrap_or_default();
            Arc::new(RouteState {
                rules: made_by,
                rules_status: shared.rules.lock_of(made_by),
                rules_tags: rules.iter().filter(|_| rules.len() > 1).map(RulesTag::of).collect(),
                kept,
                ignored: IgnoredLog::default(),
                nearly_keys: IgnoredLog::default(),
                probe_check: route.and_then(|route| ProbeCheck::of(route, &upstreams, known)),
                name: Arc::clone(name),
                origin: origin(&settings.service, namespace, name).id(),
                shadow_origin: origin(&settings.service, namespace, name).shadow().id(),
                metrics: metrics.route(name),
                estimator: known.map(|known| Arc::clone(&known.estimator)).unwrap_or_default(),
                arrivals: known.map(|known| Arc::clone(&known.arrivals)).unwrap_or_default(),
                circuit: route
                    .and_then(|route| upstreams.get(route.upstream))
                    .map_or_else(Arc::default, |upstream| shared.circuits.of(upstream.settings())),
            })
        };
        let states = router.routes().iter().map(|route| {
            let rules: Vec<RulesDigest> =
                identifiers.all().map(|identifier| identity::digest(identifier, route, callers)).collect();
            let kept = kept_headers(route, &token_header).into_iter().chain(settings.own_headers.key.clone()).collect();
            (Arc::clone(&route.name), state(&route.name, &route.namespace, rules, kept, Some(&**route)))
        });
        let nowhere: Arc<str> = "-".into();
        let unrouted = state(&nowhere, &nowhere, Vec::new(), Vec::new(), None);
        shared.expect_leases_of(&router);
        Arc::new(Self {
            states: states.collect(),
            verifier,
            unrouted,
            key_places: KeyPlaces::of(&router),
            if_protected: IfProtected::of(&router),
            exposed: answer::exposed(&settings.headers),
            added: settings.headers.all().into(),
            context: Arc::new(ForwardingContext {
                forwarding: settings.forwarding.clone(),
                upgrades: settings.upgrades.clone(),
                own: settings.own_headers.clone(),
                via: shared.via.clone(),
            }),
            accepts: router.routes().iter().any(|route| route.policy.accepts()),
            policy_page: settings.policy_page.clone().map(|path| PolicyPage::new(path, &router, &upstreams)),
            identifiers,
            router: Arc::new(router),
            upstreams,
            shared,
            settings,
        })
    }

    /// Renews the leases of running attempts until `stop` turns true: those of this gate, of the gates that it has taken
    /// the place of, and of those that will take its own. Nothing else does.
    pub fn renew_leases(&self, stop: tokio::sync::watch::Receiver<bool>) -> impl Future<Output = ()> + Send + use<> {
        renewal::run(Arc::clone(&self.shared), stop)
    }

    /// How many protected requests are being dealt with, by former gates too.
    #[must_use]
    pub fn running(&self) -> usize {
        self.shared.drain.requests.receiver_count()
    }

    /// Whether a client waits for an answer.
    #[must_use]
    pub fn owes_answers(&self) -> bool {
        self.shared.drain.owes_answers()
    }

    /// Waits until every connection that has switched to another protocol has ended.
    pub async fn tunnels_ended(&self) {
        self.shared.drain.tunnels.closed().await;
    }

    /// Waits until every protected request has ended, or `over` has. Then attempts that still run are given up: their records
    /// turn unknown. Returns whether all had ended by themselves.
    pub async fn drain(&self, over: impl Future<Output = ()>) -> bool {
        let ended = tokio::select! {
            biased;
            () = self.shared.drain.requests.closed() => true,
            () = over => false,
        };
        // Whatever is still to come must not begin an attempt.
        self.shared.drain.end();
        // What remains is to write that, and a store that is away may never come back. What is known of observed requests is lost
        // with the process: it waits as long, and is not worth more.
        let written = async { tokio::join!(self.shared.drain.requests.closed(), self.shared.evaluations.closed()) };
        let _ = tokio::time::timeout(self.settings.settle_timeout, written).await;
        ended
    }

    /// From now on, each request gets a line there.
    pub fn log_access_to(&self, log: Option<Arc<AccessLog>>) {
        self.shared.access_log.store(log);
    }

    /// From now on, this takes the spans of protected requests.
    pub fn trace_to(&self, tracer: Option<Arc<Tracer>>) {
        self.shared.tracer.store(tracer);
    }

    /// Notes on a request of the client at this address, and the report on it, if it goes anywhere.
    fn report(
        &self,
        id: RequestId,
        peer: &Peer,
        parent: impl FnOnce() -> Option<Parent>,
        seen: impl FnOnce() -> Seen,
    ) -> Option<(Arc<Notes>, Report)> {
        let log = self.shared.access_log.load();
        let span = self.shared.tracer.load().as_ref().and_then(|tracer| tracer.begin(id, parent()));
        if log.is_none() && span.is_none() {
            return None;
        }
        Some(Report::new(log.clone(), span, id, (peer.ip, peer.is_secure), seen()))
    }

    /// The answer to a request that its route refuses.
    fn refused(&self, route: &Route, request: RequestId, Refusal { problem, has_key }: Refusal) -> Reply {
        let reply = Reply::problem(problem, route.policy.docs.as_deref(), request);
        if has_key { self.keyed(reply) } else { reply }
    }

    /// A refusal that knows of a key where its route reads none, as the header that other routes read. Nothing was done with it.
    fn with_other_keys(&self, refusal: Refusal, head: &request::Head) -> Refusal {
        let has_key = refusal.has_key || self.key_places.has_key(&head.method, &head.uri, &head.headers);
        Refusal { has_key, ..refusal }
    }

    /// The answer to a request that is refused whatever its route does with it, with all that the route adds to it.
    fn refused_early(
        &self,
        head: &request::Head,
        admission: Admission<'_>,
        problem: Problem,
    ) -> (Arc<RouteState>, Reply) {
        let (route, step) = match admission {
            Admission::Routed(route, step) => (route, step),
            Admission::Unrouted => {
                return (Arc::clone(&self.unrouted), ForwardOptions::unrouted(self, head).problem(problem));
            }
            Admission::Ambiguous(ambiguous) => {
                // One of its readings is protected.
                let is_keyed = self.key_places.has_key(&head.method, &head.uri, &head.headers);
                let reply = Reply::problem(problem, None, head.id);
                let reply = if is_keyed { self.keyed(reply) } else { reply };
                return (Arc::clone(&self.unrouted), self.share(reply, CrossOrigin::of_either(&ambiguous, head)));
            }
        };
        let state = Arc::clone(&self.states[&route.name]);
        let reply = match step {
            Step::Forward(_) => ForwardOptions::of(self, &state, route, head).problem(problem),
            step => {
                head.note_protected(true);
                self.refused(route, head.id, Refusal { problem, has_key: step.has_key() })
            }
        };
        (state, self.share(reply, CrossOrigin::of(route, &head.headers)))
    }

    /// A reply as it goes to a script of the origin that asked.
    fn share(&self, reply: Reply, asked: Option<CrossOrigin>) -> Reply {
        match asked {
            Some(asked) => asked.share(reply, &self.exposed),
            None => reply,
        }
    }

    /// A reply to a request that carried a key: it says how it ended.
    fn keyed(&self, reply: Reply) -> Reply {
        reply.with_status(&self.settings.headers).without_trailers(&self.added)
    }
}

impl Handler for Gate {
    async fn handle(self: Arc<Self>, request: Request<RequestBody>, peer: Peer) -> Response<Body> {
        let _unanswered = self.shared.drain.arrived();
        let (began, id) = (Instant::now(), new_request_id());
        let (notes, report) = self.report(id, &peer, || parent(request.headers()), || Seen::of(&request)).unzip();
        if let Some(page) = self.policy_page.as_ref().filter(|page| page.is_asked_for(request.uri())) {
            let response = page.answer(&request);
            let report = report.map(|report: Report| report.answered(response.status(), None, &[]));
            return response.map(|body| body.with_request_guard(None, None, report));
        }
        if request_status::is_at(request.uri().path()) && self.has_status(request.uri().path()).await {
            let response = self.tell_status(request, peer, id).await;
            let report = report.map(|report: Report| report.answered(response.status(), None, &[]));
            return response.map(|body| body.with_request_guard(None, None, report));
        }
        let is_call = media::is_grpc_call(request.method(), request.headers());
        let usage = &self.shared.usage;
        let permit = if peer.connection_memory.as_ref().is_some_and(|memory| memory.is_backlogged()) {
            usage.exceeded(Limit::MaxBufferedMemory);
            Err(UNREAD)
        } else {
            usage.requests.acquire(1).map(Arc::new).ok_or(TOO_MANY)
        };
        let mut pending = PendingReply::new(&self.unrouted);
        let permitted = permit.as_ref().map_err(|why| *why);
        let (state, reply) = self.answer(request, (id, notes), peer, permitted, &mut pending).await;
        pending.answer_began();
        let Reply { outcome, response, .. } = if is_call { reply.into_call() } else { reply };
        log(&state, id, outcome, &response, began);
        let timer = state.metrics.answered(outcome, response.status(), began);
        let route = Some((&state.name, outcome));
        let report = report.map(|report| report.answered(response.status(), route, &state.kept));
        response.map(|body| body.with_request_guard(permit.ok(), Some(timer), report))
    }

    fn refuse(&self, fault: Fault, known: MalformedHead<'_>, peer: &Peer) -> Response<Body> {
        let id = new_request_id();
        let seen = || match known {
            MalformedHead::Raw(head) => Seen::of_line(head_lines(head).next().unwrap_or_default()),
            MalformedHead::Head(head) => Seen::of_head(&head.method, &head.uri, head.version, &head.headers),
        };
        let report = self.report(id, peer, || None, seen);
        let Reply { outcome, response, .. } = self.reply_to_fault(fault, known, id);
        let (state, now) = (&self.unrouted, Instant::now());
        log(state, id, outcome, &response, now);
        let timer = state.metrics.answered(outcome, response.status(), now);
        let route = Some((&state.name, outcome));
        let report = report.map(|(_, report)| report.answered(response.status(), route, &[]));
        response.map(|body| body.with_request_guard(None, Some(timer), report))
    }
}

/// Logs an answer as it begins.
fn log(state: &RouteState, request: RequestId, outcome: Outcome, response: &Response<Body>, began: Instant) {
    let (route, status, outcome) = (&*state.name, response.status().as_u16(), outcome.as_str());
    tracing::debug!(%request, route, outcome, status, micros = began.elapsed().as_micros() as u64, "answered");
}

/// The headers that a route's keys, scopes and fingerprints are made of.
fn kept_headers(route: &Route, token_header: &HeaderName) -> Vec<HeaderName> {
    use crate::idempotency::credential;
    use crate::idempotency::key::KeySource;
    use crate::idempotency::scope::ScopePart;
    let keys = route.policy.key.from.iter().flat_map(KeySource::headers).cloned();
    let scopes = route.policy.scope.iter().flat_map(|part| match part {
        ScopePart::Credential => credential::HEADERS.to_vec(),
        ScopePart::Header(name) => vec![name.clone()],
        ScopePart::Cookie(_) => vec![http::header::COOKIE],
        ScopePart::BasicUser => vec![http::header::AUTHORIZATION],
        ScopePart::JwtClaim(_) => vec![token_header.clone()],
        ScopePart::Host | ScopePart::ClientIp | ScopePart::ClientCert(_) | ScopePart::Const(_) => Vec::new(),
    });
    let compared = route.policy.fingerprint.headers.iter().cloned();
    let compared = compared.chain(route.policy.request_time.iter().map(|time| time.from.clone()));
    keys.chain(scopes).chain(compared).chain([http::header::CONTENT_TYPE]).collect()
}

#[cfg(test)]
pub(crate) mod tests;
