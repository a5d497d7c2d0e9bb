//! Accepts requests that are delivered later: each is durable before its client gets 202.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, LOCATION, RETRY_AFTER};
use http::{HeaderName, HeaderValue, Response, StatusCode};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout_at};

use super::{deliver, request_status};
use crate::gate::answer::{RETRY_SOON, Reply};
use crate::gate::claim::delivery_context::DeliveryContext;
use crate::gate::claim::protected::{ProtectedRequest, digest};
use crate::gate::claim::quota::{QuotaGrant, QuotaPermit};
use crate::gate::claim::second_look::other_id_first;
use crate::gate::pass::{no_room_for_request, spool_problem};
use crate::gate::request::Head;
use crate::gate::{Gate, RouteState};
use crate::http::body::Body;
use crate::http::forwarding::{TRACEPARENT, TRACESTATE, continue_or_start_trace};
use crate::http::prefer;
use crate::http::problem::{Problem, Pushback, end_call, set_date, whole_seconds};
use crate::http::request_body::{Buffered, IN_MEMORY};
use crate::http::usage::{Account, Usage};
use crate::idempotency::codec::{self, AcceptedRequest, Details};
use crate::idempotency::decide::{Decision, difference};
use crate::idempotency::delivery::met_by_delivery;
use crate::idempotency::fingerprint::Fingerprint;
use crate::idempotency::grpc::{self, Status};
use crate::idempotency::identity::RecordIdHasher;
use crate::idempotency::record::{Record, RecordId, Timestamp};
use crate::idempotency::recovery::Recovery;
use crate::route::Route;
use crate::store::deliveries::{self, Acceptance, Delivery, Lane, NewDelivery, TakenDelivery};
use crate::store::{Error, RecordEntry, Store};
use crate::telemetry::outcome::{Code, Outcome};

/// The state of a request that was given up.
const DEAD: &str = "dead";

const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// For how long, and after what pause, the store is asked again that did not say whether it keeps a request. A reload waits for that.
const DOUBT: Duration = Duration::from_secs(2);
const DOUBT_PAUSE: Duration = Duration::from_millis(200);

/// What to do with a request whose key the store knows, where there is no reply.
enum Instead {
    /// The store knows something else by now.
    LookAgain,
    /// It runs for its client, as one that is not accepted: the record is of an attempt for another client that waited, and `recovery`
    /// has another attempt made, or the upstream asked.
    Run,
}

/// What the store knows of a request that may be accepted.
enum AcceptState {
    /// It is kept now.
    Accepted,
    /// It was accepted before, and its record may not be there yet.
    Queued(Delivery),
    /// There is a record of its key.
    Recorded(Record, Timestamp),
}

impl ProtectedRequest {
    /// The reply to a request that is accepted rather than run, or whose key belongs to one that was accepted. Nothing where it
    /// is to run now.
    pub(in crate::gate) async fn accepted(&self) -> Option<Reply> {
        if prefer::is_to_be_accepted(self.policy(), &self.head.method, &self.head.headers) {
            return self.accept().await;
        }
        if !self.may_have_delivery() {
            return None;
        }
        // Where the store does not say, it is asked for a claim next. A delivery that is not seen here finds that claim.
        let looking = async {
            match deliveries::of(&*self.gate.shared.store)?.delivery(self.id).await? {
                // Its answer may be there already.
                Some(_) => self.look().await,
                None => Ok(None),
            }
        };
        match timeout_at(self.look_deadline(), looking).await {
            Ok(Ok(Some(known))) => self.reply_to(known).await.ok(),
            _ => None,
        }
    }

    async fn accept(&self) -> Option<Reply> {
        for _ in 0..3 {
            let known = match timeout_at(self.store_deadline(), self.keep_or_find()).await {
                Ok(Ok(known)) => known,
                Ok(Err(problem)) => return Some(self.problem(problem)),
                Err(_) => return Some(self.problem(unkept())),
            };
            match self.reply_to(known).await {
                Ok(reply) => return Some(reply),
                Err(Instead::LookAgain) => {}
                Err(Instead::Run) => return None,
            }
        }
        Some(self.nothing_left())
    }

    /// Keeps it, if it may run, unless there is something of its key already.
    async fn keep_or_find(&self) -> Result<AcceptState, Problem> {
        // Under an id of a former secret, nothing new is made: what it found there is gone since.
        let barred = self.bar().or_else(|| (self.made_by > 0).then(other_id_first));
        let permitted = match barred {
            Some(problem) => Err(problem),
            None => self.count().await,
        };
        match permitted {
            // What may not run any more still gets what became of it.
            Err(problem) => self.look().await.map_err(|error| self.not_accepted(&error))?.ok_or(problem),
            Ok(permit) => self.keep(permit).await,
        }
    }

    /// Takes a key from its caller's quota, where there is one.
    async fn count(&self) -> Result<Option<QuotaPermit>, Problem> {
        let counted = match self.take_from_quota() {
            Ok(QuotaGrant::Permitted(permit)) => Ok(permit),
            // In a task of its own: if the client leaves, what another gate's count says goes on.
            Ok(QuotaGrant::Unconfirmed(permit)) => {
                tokio::spawn(permit.confirm()).await.map_err(|_| unkept())?.map(Some)
            }
            Err(wait) => Err(wait),
        };
        counted.or_else(|wait| self.quota_exceeded(wait).map_or(Ok(None), Err))
    }

    /// What the store knows of it already.
    async fn look(&self) -> Result<Option<AcceptState>, Error> {
        let store = &*self.gate.shared.store;
        if let Some(RecordEntry { record, now, .. }) = store.get(self.id).await?.filter(RecordEntry::is_live) {
            return Ok(Some(AcceptState::Recorded(record, now)));
        }
        Ok(deliveries::of(store)?.delivery(self.id).await?.map(AcceptState::Queued))
    }

    /// Keeps it, unless there is a record or a delivery of its key.
    async fn keep(&self, permit: Option<QuotaPermit>) -> Result<AcceptState, Problem> {
        // Held until it is kept: a reload looks for what is kept before its rules take the place of these.
        let status = Arc::clone(&self.state.rules_status).read_owned().await;
        if !self.may_claim(*status) {
            return Err(self.retired());
        }
        // A body that lies in a file is read back; a small one counts already.
        let (party, length) = (|| self.party(), self.body.len());
        let memory = Account::new(&self.gate.shared.usage.memory, Some(&party));
        let memory = memory.acquire_or_half(if length > IN_MEMORY { length } else { 0 });
        let memory = memory.ok_or_else(no_room_for_request)?;
        let body = self.body.whole().await.map_err(|error| spool_problem(&self.gate, &error))?;
        let new = self.new_delivery(body)?;
        let store = &self.gate.shared.store;
        // In a task of its own: if the client leaves, what the store does goes on.
        let accepting = tokio::spawn(accept_surely(Arc::clone(store), self.id, new, permit, (status, memory)));
        let accepted = accepting.await.map_err(|_| unkept())?;
        match accepted.map_err(|error| self.not_accepted(&error))? {
            Acceptance::Accepted => {
                self.state.arrivals.notify_one();
                // A retry finds out which of the two counts. This one stays: others may have got a 202 for it.
                match self.second_look().stands_under_other_id(&**store).await {
                    Ok(false) => Ok(AcceptState::Accepted),
                    Ok(true) => Err(unkept()),
                    Err(error) => Err(self.not_accepted(&error)),
                }
            }
            Acceptance::Queued(delivery) => Ok(AcceptState::Queued(delivery)),
            Acceptance::Recorded { record, now } => Ok(AcceptState::Recorded(record, now)),
        }
    }

    fn new_delivery(&self, body: Bytes) -> Result<NewDelivery, Problem> {
        let caller = self.identifier.caller(&self.policy().scope, self.head.caller());
        Ok(NewDelivery {
            token: self.new_attempt()?,
            origin: self.state.origin,
            lane: Lane(i64::from_be_bytes(caller)),
            head: self.record_head().with_details(&Details { is_accepted: true, ..self.details() }).encode(),
            request: self.stored_request().encode(),
            body,
        })
    }

    /// What of it, but its body, is sent to the upstream later.
    fn stored_request(&self) -> AcceptedRequest {
        let peer = self.head.peer();
        let mut headers = self.head.headers.clone();
        // Where the fingerprint is made of it, the delivery must have what the client sent.
        if !self.policy().fingerprint.headers.contains(&prefer::PREFER) {
            prefer::remove_respond_async(&mut headers);
        }
        let compared = &self.policy().fingerprint.headers;
        // Its delivery is a child of the span that it has here.
        let is_compared = compared.contains(&TRACEPARENT) || compared.contains(&TRACESTATE);
        if let Some(span) = self.head.exported_span().filter(|_| !is_compared) {
            continue_or_start_trace(&mut headers, self.head.id, Some(span));
        }
        AcceptedRequest {
            method: self.head.method.clone(),
            target: self.head.uri.clone(),
            version: self.head.version,
            is_secure: peer.is_secure,
            may_be_trusted: peer.may_be_trusted,
            peer: peer.ip,
            request: self.head.id,
            key: self.key.clone(),
            headers,
            certificate: peer.certificate.clone().filter(|_| self.policy().scope.has_certificate()),
        }
    }

    async fn reply_to(&self, known: AcceptState) -> Result<Reply, Instead> {
        Ok(match known {
            AcceptState::Accepted => self.accepted_reply("queued", Duration::ZERO),
            AcceptState::Queued(delivery) => match self.is_retry_of(&delivery.head).await {
                Ok(None) => {
                    self.accepted_reply(if delivery.is_dead() { DEAD } else { "queued" }, delivery.expected_in())
                }
                Ok(Some(decision)) => self.reply(decision, None),
                Err(problem) => self.problem(problem),
            },
            AcceptState::Recorded(record, now) => match self.decide(&record, now).await {
                Ok(decision @ Decision::InFlight(_)) => match self.is_queued().await {
                    Ok(true) => self.accepted_reply("in-flight", Duration::ZERO),
                    // Its delivery may have ended since the record was read.
                    Ok(false) if self.is_gone(&record).await => return Err(Instead::LookAgain),
                    // This attempt is a client's own. If it is released, nothing delivers the request.
                    Ok(false) => self.reply(decision, Some(record.until)),
                    Err(problem) => self.problem(problem),
                },
                Ok(Decision::Supersede) => return self.tried_again(&record).await,
                // Its delivery asks the upstream, and goes on by what that says.
                Ok(Decision::Unknown | Decision::Probe) if matches!(self.policy().recovery, Recovery::Probe(_)) => {
                    return self.tried_again(&record).await;
                }
                Ok(decision) => self.permitted_reply(decision, record.until).await,
                Err(problem) => self.problem(problem),
            },
        })
    }

    /// Whether its key has no such record any more, as far as the store says.
    async fn is_gone(&self, record: &Record) -> bool {
        let found = timeout_at(self.store_deadline(), self.gate.shared.store.get(self.id)).await;
        !matches!(found, Ok(Ok(Some(listed))) if listed.record.version() == record.version())
    }

    /// Whether it is delivered.
    pub(super) async fn is_queued(&self) -> Result<bool, Problem> {
        let finding = deliveries::is_queued(&*self.gate.shared.store, self.id);
        match timeout_at(self.store_deadline(), finding).await {
            Ok(Ok(is_queued)) => Ok(is_queued),
            Ok(Err(error)) => Err(self.not_accepted(&error)),
            Err(_) => Err(unkept()),
        }
    }

    /// Where the outcome is unknown and the route asks the upstream or makes another attempt. That is for its delivery to do: if it is
    /// gone, or was given up, there is none.
    async fn tried_again(&self, record: &Record) -> Result<Reply, Instead> {
        let store = &*self.gate.shared.store;
        let is_accepted = codec::Head::decode(&record.head).is_ok_and(|head| head.details().is_accepted);
        let finding = async {
            let delivery = deliveries::of(store)?.delivery(self.id).await?;
            Ok((delivery, store.get(self.id).await?))
        };
        Ok(match timeout_at(self.store_deadline(), finding).await {
            Ok(Ok((Some(delivery), _))) if !delivery.is_dead() => self.accepted_reply("queued", delivery.expected_in()),
            Ok(Ok((None, _))) if !is_accepted => return Err(Instead::Run),
            Ok(Ok((_, Some(RecordEntry { record: same, .. })))) if same.version() == record.version() => {
                self.permitted_reply(Decision::Unknown, record.until).await
            }
            // The other attempt has just ended, or the record has expired.
            Ok(Ok(_)) => return Err(Instead::LookAgain),
            Ok(Err(error)) => self.problem(self.not_accepted(&error)),
            Err(_) => self.problem(unkept()),
        })
    }

    /// What this request gets where it differs from the one with this head; nothing where it is a retry of it.
    async fn is_retry_of(&self, head: &Bytes) -> Result<Option<Decision>, Problem> {
        let Ok(head) = codec::Head::decode(head) else { return Ok(Some(Decision::Unreadable)) };
        let is_same = self.is_of(&head).await?;
        Ok(difference(is_same, head.proof.as_ref(), self.proof.as_ref()))
    }

    /// The 202. `expected_in` is the time until the next attempt.
    fn accepted_reply(&self, state: &'static str, expected_in: Duration) -> Reply {
        let location = request_status::path_of(self.id);
        let document = json!({ "id": self.id.to_string(), "state": state, "status": location });
        let mut response = Response::new(Body::full(document.to_string().into()));
        *response.status_mut() = StatusCode::ACCEPTED;
        let headers = response.headers_mut();
        let wait = self.state.estimator.remaining(Duration::ZERO, self.timeout()).max(expected_in);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        // What is given up stays so: nothing is to be waited for.
        if state != DEAD {
            headers.insert(RETRY_AFTER, HeaderValue::from(whole_seconds(wait)));
        }
        set_date(headers);
        headers.insert(PREFERENCE_APPLIED, HeaderValue::from_static("respond-async"));
        if let Ok(location) = HeaderValue::try_from(location) {
            headers.insert(LOCATION, location);
        }
        if self.head.is_call() {
            end_call_accepted(&mut response, state, wait);
        }
        self.gate.keyed(Reply::new(Outcome::Accepted, response))
    }

    fn not_accepted(&self, error: &Error) -> Problem {
        tracing::debug!(%error, record = %self.id, route = &*self.state.name, "a request was not accepted");
        unkept()
    }
}

/// A 202 as the answer to a gRPC call, which has none: its client tries again until it gets the answer.
fn end_call_accepted(response: &mut Response<Body>, state: &str, wait: Duration) {
    let (status, message, pushback) = match state {
        DEAD => (Status::Unknown, "accepted: the gate has given up delivering this call", Pushback::Stop),
        _ => {
            let message = "accepted: the call is delivered later; a retry with the same key gets its answer";
            (Status::Unavailable, message, Pushback::After(wait))
        }
    };
    end_call(response, status, message, Some(pushback));
}

/// What is accepted is restored for its delivery, as a client would send it again.
impl ProtectedRequest {
    /// A record as this request meets it.
    pub(in crate::gate) fn met<'a>(&self, record: &'a Record, now: Timestamp) -> Cow<'a, Record> {
        match &self.delivery {
            Some(delivery) => Cow::Owned(met_by_delivery(record, delivery.accepted_at, now)),
            None => Cow::Borrowed(record),
        }
    }

    /// The request of a delivery; else how long to wait until it may be had.
    pub(super) async fn of_delivery(
        gate: &Arc<Gate>,
        route: &Arc<Route>,
        state: &Arc<RouteState>,
        taken: &TakenDelivery,
    ) -> Result<Self, Duration> {
        let id = taken.delivery.id;
        let unreadable = || deliver::unreadable(gate, taken, &state.name);
        let record = codec::Head::decode(&taken.delivery.head).map_err(|_| unreadable())?;
        let stored = AcceptedRequest::decode(&taken.request).map_err(|_| unreadable())?;
        let permit = gate.shared.usage.requests.acquire(1).map(Arc::new).ok_or(RETRY_SOON)?;
        let (key, policy) = (stored.key.clone(), &route.policy);
        let mut head = Head::accepted(stored, &gate.context).map_err(|_| unreadable())?;
        // It was how long the client waited for its answer, which it has. The delivery has its own time.
        if head.is_call() && !policy.fingerprint.headers.contains(&grpc::TIMEOUT) {
            head.headers.remove(grpc::TIMEOUT);
        }
        if policy.scope.has_jwt_claims() {
            gate.reread_jwt_claims(&mut head);
        }
        let memory = Account::new(&gate.shared.usage.memory, None);
        let body = Usage::count_body_or_half(memory, taken.body.clone()).map(Buffered::of).ok_or(RETRY_SOON)?;
        let recipe = record.fingerprint.recipe.clone();
        let digest = digest(gate, &recipe, &head, &body).await.map_err(|_| RETRY_SOON)?;
        // Whatever the rules are now: its client's retries found it under this id.
        let is_made_by =
            |identifier: &RecordIdHasher| identifier.id(&route.namespace, &policy.scope, head.caller(), &key) == id;
        let made_by = gate.identifiers.all().position(is_made_by).unwrap_or_default();
        let Delivery { token, accepted_at, .. } = taken.delivery;
        let (head_of_record, timeout) = (taken.delivery.head.clone(), policy.deliver.timeout);
        let unknown_ttl = record.details().unknown_ttl.unwrap_or(policy.unknown_ttl);
        let delivery = DeliveryContext {
            head: head_of_record,
            timeout,
            token,
            unknown_ttl,
            accepted_at,
            taken_at: taken.delivery.now,
        };
        let identifier = gate.identifiers.all().nth(made_by).unwrap_or(&gate.identifiers.first).clone();
        Ok(Self {
            gate: Arc::clone(gate),
            route: Arc::clone(route),
            state: Arc::clone(state),
            head,
            body,
            id,
            identifier,
            made_by,
            key,
            fingerprint: Fingerprint { recipe, digest },
            delivery: Some(delivery),
            is_unattended: true,
            proof: record.proof,
            began: Instant::now(),
            deadlines: None,
            going: Arc::new(gate.shared.drain.requests.subscribe()),
            _permit: permit,
        })
    }
}

/// Keeps a request under the rules that `permission` holds in force. While the store does not say whether it did, it is asked again
/// for a while: the rules are not to change before that is known. Where the request may have run by then, its client has yet to ask.
async fn accept_surely<T>(
    store: Arc<dyn Store>,
    id: RecordId,
    new: NewDelivery,
    permit: Option<QuotaPermit>,
    permission: T,
) -> Result<Acceptance, Error> {
    let (began, mut in_doubt) = (Instant::now(), None);
    let (accepted, may_be_kept) = loop {
        let accepted = async { deliveries::of(&*store)?.accept(id, new.clone()).await }.await;
        match (accepted, in_doubt.take()) {
            // Once in doubt, a failure that did nothing settles nothing: the call before it may have.
            (Err(error), Some(doubt)) if began.elapsed() < DOUBT => {
                tracing::debug!(%error, record = %id, "it is still not known whether a request is kept");
                in_doubt = Some(doubt);
            }
            (Err(error @ Error::Indeterminate(_)), None) if began.elapsed() < DOUBT => in_doubt = Some(error),
            (Err(_) | Ok(Acceptance::Recorded { .. }), Some(doubt)) => break (Err(doubt), true),
            (accepted, doubt) => {
                let is_kept = matches!(accepted, Ok(Acceptance::Accepted) | Err(Error::Indeterminate(_)));
                break (accepted, is_kept || doubt.is_some());
            }
        }
        sleep(DOUBT_PAUSE).await;
    };
    if may_be_kept {
        permit.into_iter().for_each(QuotaPermit::spend);
    }
    drop(permission);
    accepted
}

/// It may have been kept all the same: then a retry finds it.
fn unkept() -> Problem {
    let detail = "the request could not be kept for its delivery; send it again with the same key";
    Problem::new(Code::StoreUnavailable, detail).retry_after(RETRY_SOON)
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::sync::oneshot::error::TryRecvError;

    use super::*;
    use crate::gate::claim::quota::Quotas;
    use crate::idempotency::quota::{Quota, QuotaBy, QuotaId};
    use crate::idempotency::record::AttemptToken;
    use crate::store::OriginId;
    use crate::store::memory::Memory;
    use crate::store::unreliable::{Fault, Operation, Unreliable};

    fn delivery() -> NewDelivery {
        let empty = Bytes::new;
        let (token, origin, lane) = (AttemptToken([1; 16]), OriginId(1), Lane(0));
        NewDelivery { token, origin, lane, head: empty(), request: empty(), body: empty() }
    }

    /// A reload that changes how keys are found looks for what is kept once it has the permission.
    #[tokio::test(start_paused = true)]
    async fn the_rules_may_change_only_once_it_is_known_whether_a_request_is_kept() {
        for (faults, is_kept) in [
            (vec![Fault::Delay(Duration::from_secs(60))], true),
            (vec![Fault::LoseAnswer, Fault::LoseCall], true),
            // As of a batcher whose connection hangs: what follows the call in doubt is refused at once.
            (vec![Fault::LoseAnswer, Fault::Refuse], true),
            (vec![Fault::Refuse], false),
        ] {
            let quotas = Arc::new(Quotas::new(None));
            let quota = Quota { new_keys: 1, per: Duration::from_secs(3600), by: QuotaBy::Route };
            let take = || quotas.take(QuotaId([0; 32]), &quota);
            let Ok(QuotaGrant::Permitted(permit)) = take() else { panic!("there is one") };
            let store = Arc::new(Unreliable::new(Arc::new(Memory::new())));
            store.script_for(Operation::Accept, faults);
            let id = RecordId([1; 32]);
            let (permission, mut released) = oneshot::channel::<()>();
            let accepting =
                tokio::spawn(accept_surely(Arc::<Unreliable>::clone(&store), id, delivery(), permit, permission));
            tokio::task::yield_now().await;
            while released.try_recv() == Err(TryRecvError::Empty) {
                tokio::time::advance(Duration::from_millis(10)).await;
            }
            let found = store.deliveries().unwrap().delivery(id).await.unwrap();
            assert_eq!(found.is_some(), is_kept);
            assert_eq!(accepting.await.unwrap().is_ok(), is_kept);
            assert_eq!(take().is_err(), is_kept, "what is kept has used the key");
        }
    }
}
