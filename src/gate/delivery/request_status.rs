//! `GET /.well-known/oncegate/requests/{id}`: what became of an accepted request, for the caller who sent it.

use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, DATE, RETRY_AFTER, VARY};
use http::{HeaderMap, HeaderValue, Method, Request, Response};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::gate::admission::preflight::Preflight;
use crate::gate::answer::{CrossOrigin, RETRY_SOON, Reply, takes_get_only};
use crate::gate::claim::protected::no_room;
use crate::gate::request::Head;
use crate::gate::{Gate, TOO_MANY};
use crate::http::answer;
use crate::http::body::Body;
use crate::http::problem::{Problem, set_date, whole_seconds};
use crate::http::request_body::RequestBody;
use crate::http::server::Peer;
use crate::http::usage::{Account, Usage};
use crate::idempotency::codec::{self, Answer};
use crate::idempotency::decide;
use crate::idempotency::record::{Record, RecordId, RequestId, State, Timestamp};
use crate::idempotency::recovery::{Recovery, next_attempt_within};
use crate::route::Route;
use crate::store::deliveries::{self, Delivery, DeliveryState};
use crate::store::{Error, Origin, RecordEntry};
use crate::telemetry::deliveries::{ended_attempts, note_of};
use crate::telemetry::outcome::{Code, Outcome};
use crate::telemetry::rfc3339;

const PATH: &str = "/.well-known/oncegate/requests/";

/// How long a client waits that asks for what is not there yet, where nothing is known of how long it takes.
const SHORTEST_RETRY_AFTER: Duration = Duration::from_secs(1);

/// The path of the status of a request, by its record.
pub(super) fn path_of(id: RecordId) -> String {
    format!("{PATH}{id}")
}

/// Whether a path is that of a status.
pub(in crate::gate) fn is_at(path: &str) -> bool {
    path.starts_with(PATH)
}

/// The record that a path names.
fn record_at(path: &str) -> Option<RecordId> {
    path.strip_prefix(PATH).and_then(RecordId::parse)
}

/// What there is of a request.
struct Found {
    /// Of its key: it may be another request's.
    record_of_key: Option<(Record, Timestamp)>,
    delivery: Option<Delivery>,
}

impl Found {
    /// The head that its record has or will have; nothing where this version cannot read it.
    fn head(&self) -> Option<codec::Head> {
        let of_record = || self.record_of_key.as_ref().map(|(record, _)| &record.head);
        codec::Head::decode(self.delivery.as_ref().map(|delivery| &delivery.head).or_else(of_record)?).ok()
    }

    /// The record, if it is of this request. A request that was accepted while another with its key ran has none: the caller of one
    /// is not to see what became of the other.
    fn own_record(&self) -> Option<&(Record, Timestamp)> {
        let found = self.record_of_key.as_ref()?;
        let Some(delivery) = &self.delivery else { return Some(found) };
        let heads = codec::Head::decode(&found.0.head)
            .and_then(|of_record| Ok((of_record, codec::Head::decode(&delivery.head)?)));
        heads
            .is_ok_and(|(one, other)| one.fingerprint == other.fingerprint && one.proof == other.proof)
            .then_some(found)
    }

    /// Whether it was accepted, whatever its route does by now.
    fn is_accepted(&self) -> bool {
        self.delivery.is_some() || self.head().is_some_and(|head| head.details().is_accepted)
    }
}

/// A request for a status, by the caller whose request it is of.
struct StatusRequest<'a> {
    route: &'a Arc<Route>,
    head: Head,
    id: RecordId,
    found: Found,
}

/// The reason why a request for a status is refused. It has `docs` only where the caller has the scope of the request.
struct StatusRefusal<'a> {
    problem: Problem,
    docs: Option<&'a str>,
}

impl From<Problem> for StatusRefusal<'_> {
    fn from(problem: Problem) -> Self {
        Self { problem, docs: None }
    }
}

/// Where a request stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DeliveryProgress {
    Queued,
    InFlight,
    Completed,
    Unknown,
    Dead,
}

impl DeliveryProgress {
    fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::InFlight => "in-flight",
            Self::Completed => "completed",
            Self::Unknown => "unknown",
            Self::Dead => "dead",
        }
    }
}

impl Gate {
    /// Whether this gate answers for the status at a path: it accepts requests, or this one was accepted before.
    pub(in crate::gate) async fn has_status(&self, path: &str) -> bool {
        if self.accepts {
            return true;
        }
        let Some(id) = record_at(path).filter(|_| self.shared.store.deliveries().is_some()) else { return false };
        let Some(_permit) = self.shared.usage.requests.acquire(1) else { return true };
        match timeout(self.settings.settle_timeout, self.find_accepted(id)).await {
            Ok(Ok(found)) => found.is_some_and(|(_, found)| found.is_accepted()),
            // Another answer could pass for the end of it.
            Ok(Err(_)) | Err(_) => true,
        }
    }

    /// Answers a request for a status.
    pub(in crate::gate) async fn tell_status(
        self: &Arc<Self>,
        request: Request<RequestBody>,
        peer: Peer,
        id: RequestId,
    ) -> Response<Body> {
        if let Some(preflight) = Preflight::of_status(&self.router, request.method(), request.headers()) {
            return preflight.answer();
        }
        if *request.method() != Method::GET && *request.method() != Method::HEAD {
            return takes_get_only();
        }
        let of_any = CrossOrigin::of_any(&self.router, request.headers());
        let (origin, docs, answered) = match self.status_request(request, peer, id).await {
            Ok(asked) => {
                let origin = CrossOrigin::of(asked.route, &asked.head.headers);
                (origin, asked.route.policy.docs.as_deref(), self.answer_to(&asked))
            }
            // Whether there is a request of another caller, no header says.
            Err(StatusRefusal { problem, docs }) => (of_any, docs, Err(problem)),
        };
        let reply = answered.unwrap_or_else(|problem| Reply::problem(problem, docs, id));
        let mut response = self.share(reply, origin).response;
        let headers = response.headers_mut();
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if !headers.contains_key(DATE) {
            set_date(headers);
        }
        response
    }

    /// Reads a request for a status; a problem where it is not of the caller of the accepted one.
    async fn status_request(
        self: &Arc<Self>,
        request: Request<RequestBody>,
        peer: Peer,
        id: RequestId,
    ) -> Result<StatusRequest<'_>, StatusRefusal<'_>> {
        let Some(_permit) = self.shared.usage.requests.acquire(1) else {
            return Err(Problem::new(Code::Overloaded, TOO_MANY).retry_after(RETRY_SOON).into());
        };
        let (mut head, _) = Head::read(request, peer, &self.context, (id, None)).map_err(|refused| refused.problem)?;
        let record = record_at(head.uri.path()).ok_or_else(absent)?;
        // Before the record is looked for: a wrong token gets the same answer whether there is one or not.
        let reads_tokens = self.router.routes().iter().any(|route| route.policy.scope.has_jwt_claims());
        let verified = if reads_tokens { self.verify(&mut head).await } else { Ok(()) };
        match (self.status_of_caller(head, record, verified.is_ok()).await, verified) {
            (Err(StatusRefusal { problem, .. }), Err(wrong_token)) if problem.code == Code::NoRoute => {
                Err(wrong_token.into())
            }
            (asked, _) => asked,
        }
    }

    /// The same of a record, which a route may have whose scope needs a verified token.
    async fn status_of_caller(
        &self,
        head: Head,
        record: RecordId,
        is_verified: bool,
    ) -> Result<StatusRequest<'_>, StatusRefusal<'_>> {
        let found = timeout(self.settings.settle_timeout, self.find_accepted(record)).await;
        let (origin, found) = found.map_err(|_| away())?.map_err(|_| away())?.ok_or_else(absent)?;
        let route = self.router.routes().iter().find(|route| route.name == origin.route).ok_or_else(absent)?;
        // A record from before records said that they were accepted is one of a route that accepts requests.
        if !(route.policy.accepts() || found.is_accepted()) {
            return Err(absent().into());
        }
        if route.policy.scope.has_jwt_claims() && !is_verified {
            return Err(absent().into());
        }
        self.is_of_caller(route, &head, record, &found).map_err(|problem| {
            let docs = (problem.code == Code::CallerDiffers).then_some(route.policy.docs.as_deref()).flatten();
            StatusRefusal { problem, docs }
        })?;
        Ok(StatusRequest { route, head, id: record, found })
    }

    /// What the store has of a request of this service.
    async fn find_accepted(&self, id: RecordId) -> Result<Option<(Origin, Found)>, Error> {
        let store = &*self.shared.store;
        // The delivery first: its record is there before it is gone.
        let delivery = deliveries::of(store)?.delivery(id).await?;
        let listed = store.get(id).await?.filter(RecordEntry::is_live);
        let origin = delivery.as_ref().and_then(|delivery| delivery.origin.clone());
        let origin = origin.or_else(|| listed.as_ref().and_then(|listed| listed.origin.clone()));
        // Another service may have a gate behind this one.
        let origin = origin.filter(|origin| origin.service == self.settings.service);
        let record = listed.map(|RecordEntry { record, now, .. }| (record, now));
        Ok(origin.map(|origin| (origin, Found { record_of_key: record, delivery })))
    }

    /// Whoever asks must be who sent the request; to all others there is no such request.
    fn is_of_caller(&self, route: &Route, head: &Head, id: RecordId, found: &Found) -> Result<(), Problem> {
        let kept = found.head().ok_or_else(away)?;
        let caller = kept.details().caller.ok_or_else(absent)?;
        let scope = &route.policy.scope;
        let identifier = self.identifiers.all().find(|known| known.caller(scope, head.caller()) == caller);
        let proof = identifier.ok_or_else(absent)?.proof_for(id, scope, head.caller());
        if kept.proof != proof {
            let detail = "the request was sent with another password, token or session";
            return Err(Problem::new(Code::CallerDiffers, detail));
        }
        Ok(())
    }

    fn answer_to(&self, StatusRequest { route, head, id, found }: &StatusRequest<'_>) -> Result<Reply, Problem> {
        let progress = progress(route, found).ok_or_else(absent)?;
        let mut document = json!({ "id": id.to_string(), "state": progress.as_str() });
        if let Some(delivery) = &found.delivery {
            document["accepted_at"] = rfc3339(delivery.accepted_at).into();
            // The record has its end before the delivery is gone, or is given up.
            let has_ended = matches!(progress, DeliveryProgress::Completed | DeliveryProgress::Unknown);
            document["attempts"] = (ended_attempts(delivery) + u32::from(has_ended && !delivery.is_dead())).into();
            if let (DeliveryProgress::Queued, DeliveryState::Queued { due }) = (progress, delivery.state) {
                document["next_attempt_at"] = rfc3339(due).into();
            }
            if let (DeliveryProgress::Dead, Some(note)) = (progress, note_of(delivery)) {
                document["reason"] = note.into();
            }
        }
        if let Some((record, _)) = found.own_record().filter(|_| progress == DeliveryProgress::Completed) {
            let answer = decide::answer(&route.policy, record).ok_or_else(away)?;
            // Who may have a recorded answer is asked about a retry.
            if wants_answer(head, &answer) && route.policy.reauthorize.is_none() {
                return self.give(head, answer, record.until);
            }
            document["status"] = answer.status.as_u16().into();
            document["expires_at"] = rfc3339(record.until).into();
        }
        let expected_in = found.delivery.as_ref().filter(|_| progress == DeliveryProgress::Queued);
        let expected_in = expected_in.map_or(Duration::ZERO, Delivery::expected_in);
        Ok(Reply::new(Outcome::Accepted, self.document(route, progress, expected_in, &document)))
    }

    fn document(
        &self,
        route: &Route,
        progress: DeliveryProgress,
        expected_in: Duration,
        document: &Value,
    ) -> Response<Body> {
        let mut response = Response::new(Body::full(document.to_string().into()));
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(VARY, HeaderValue::from_name(ACCEPT));
        if matches!(progress, DeliveryProgress::Queued | DeliveryProgress::InFlight) {
            let wait = self.states[&route.name].estimator.remaining(Duration::ZERO, route.policy.deliver.timeout);
            headers
                .insert(RETRY_AFTER, HeaderValue::from(whole_seconds(wait.max(expected_in).max(SHORTEST_RETRY_AFTER))));
        }
        response
    }

    /// The answer itself.
    fn give(&self, head: &Head, mut answer: Answer, until: Timestamp) -> Result<Reply, Problem> {
        if answer.content.is_none() {
            let detail = "the request ran, and its response was not kept";
            let mut problem = Problem::new(Code::ResponseNotStored, detail);
            problem.original_status = Some(answer.status.as_u16());
            return Err(problem);
        }
        if let Some(content) = &mut answer.content {
            let party = || head.party(None);
            let memory = Account::new(head.memory(&self.shared.usage), Some(&party));
            let body = Usage::count_body(memory, std::mem::take(&mut content.body));
            content.body = body.ok_or_else(no_room)?;
        }
        let response = answer::response(&answer, &head.method, head.version);
        let reply = self.keyed(Reply::new(Outcome::Replayed, response));
        Ok(reply.with_expiry(&self.settings.headers, until))
    }
}

/// Whether the record is between two sends of one attempt.
fn is_sent_again(route: &Route, record: &Record, now: Timestamp) -> bool {
    let details = codec::Head::decode(&record.head).map(|head| head.details()).unwrap_or_default();
    next_attempt_within(record, &details, route.policy.unknown_ttl, now).is_some()
}

fn progress(route: &Route, found: &Found) -> Option<DeliveryProgress> {
    let is_dead = found.delivery.as_ref().map(Delivery::is_dead);
    // An unknown outcome that is found out by another attempt, or by a question.
    let goes_on = is_dead == Some(false) && matches!(route.policy.recovery, Recovery::Retry | Recovery::Probe(_));
    match found.own_record() {
        Some((record, now)) => Some(match record.state {
            State::Completed => DeliveryProgress::Completed,
            State::InFlight if record.until > *now => DeliveryProgress::InFlight,
            State::Unknown if is_sent_again(route, record, *now) => DeliveryProgress::InFlight,
            State::InFlight | State::Unknown if goes_on => DeliveryProgress::Queued,
            State::InFlight | State::Unknown => DeliveryProgress::Unknown,
        }),
        None => is_dead.map(|is_dead| if is_dead { DeliveryProgress::Dead } else { DeliveryProgress::Queued }),
    }
}

/// Whether a client asks for the answer rather than for the status: with `answer` in the query, or by its type.
fn wants_answer(head: &Head, answer: &Answer) -> bool {
    let asks = |query: &str| query.split('&').any(|part| part.split('=').next() == Some("answer"));
    head.uri.query().is_some_and(asks) || accepts_type(&head.headers, answer)
}

/// Whether the type of an answer is among those that a client names. Ranges of types are not names, and a weight of 0 says that
/// the client does not take it (RFC 9110, 12.4.2).
fn accepts_type(headers: &HeaderMap, answer: &Answer) -> bool {
    let essence = |text: &str| text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let Some((_, value)) = answer.headers.iter().find(|(name, _)| *name == CONTENT_TYPE) else { return false };
    let Ok(kind) = value.to_str().map(essence) else { return false };
    let named = headers.get_all(ACCEPT).iter().filter_map(|line| line.to_str().ok()).flat_map(|line| line.split(','));
    let is_taken = |named: &str| {
        let weights = named.split(';').skip(1).filter_map(|parameter| parameter.trim().split_once('='));
        let mut weights = weights.filter(|(name, _)| name.eq_ignore_ascii_case("q"));
        weights.all(|(_, weight)| weight.parse() != Ok(0.0_f32))
    };
    named.filter(|named| is_taken(named)).map(essence).any(|named| named == kind)
}

fn absent() -> Problem {
    Problem::new(Code::NoRoute, "no accepted request of this caller has this id")
}

fn away() -> Problem {
    Problem::new(Code::StoreUnavailable, "the store does not say what became of the request")
        .retry_after(SHORTEST_RETRY_AFTER)
}
