//! One request, from its head to its answer: what oncegate does, in order.
//!
//! [`Gate::answer`] admits the request and reads its body. From there the claim protocol decides, as a pure state machine
//! ([`Protocol`]): [`drive`] carries out its actions on the store and the upstream, and reports what they came to. It goes on
//! in a task of its own, whatever becomes of the client.

mod actions;

use std::sync::Arc;

use http::Request;
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::admission::admit::{Admission, Candidate, Refusal, Step, Unprotected};
use super::admission::jwt::unverified;
use super::admission::preflight::{Preflight, announced};
use super::answer::{Client, CrossOrigin, Deadlines, RETRY_SOON, Reply};
use super::claim::protected::{ProtectedRequest, identify, read_back};
use super::driver::actions::ActionExecutor;
use super::observe::ObservedExchange;
use super::pass::{self, ForwardOptions, body_problem};
use super::pending_reply::PendingReply;
use super::request::{self, Head};
use super::{Gate, RouteState, TOO_MANY_OF_ONE};
use crate::http::problem::Problem;
use crate::http::request_body::{Buffered, RequestBody};
use crate::http::server::Peer;
use crate::http::upstream;
use crate::http::usage::{Account, Permit};
use crate::idempotency::key::Found;
use crate::idempotency::protocol::{Event, Protocol};
use crate::idempotency::record::RequestId;
use crate::idempotency::recovery::Recovery;
use crate::route::Route;
use crate::telemetry::notes::Notes;
use crate::telemetry::outcome::{Code, Outcome};

impl Gate {
    /// Answers a request. An error in the place of the `permit` is the reason to refuse it: too many requests are in flight, or
    /// its connection holds too much.
    pub(super) async fn answer(
        self: &Arc<Self>,
        request: Request<RequestBody>,
        (id, notes): (RequestId, Option<Arc<Notes>>),
        peer: Peer,
        permit: Result<&Arc<Permit>, &'static str>,
        pending: &mut PendingReply,
    ) -> (Arc<RouteState>, Reply) {
        // 1. Read the head. Where it is malformed, the rest of the connection may be desynchronised.
        let (mut head, body) = match Head::read(request, peer, &self.context, (id, notes)) {
            Ok(read) => read,
            Err(refused) => return (Arc::clone(&self.unrouted), self.reply_to_head(*refused, id)),
        };
        // 2. Admit: find the route and the key.
        let admission = Candidate::new(&head).admit(&self.router);
        let permit = match permit {
            Ok(permit) => permit,
            Err(why) => return self.refused_early(&head, admission, overloaded(why)),
        };
        let (route, step) = match admission {
            Admission::Routed(route, step) => {
                pending.set_route(&self.states[&route.name], &head);
                (route, step)
            }
            Admission::Ambiguous(ambiguous) => {
                let problem = request::ambiguous(&ambiguous);
                return self.refused_early(&head, Admission::Ambiguous(ambiguous), problem);
            }
            Admission::Unrouted => {
                pending.set_route(&self.unrouted, &head);
                if !permit.attribute(&|| head.party(None)) {
                    return self.refused_early(&head, Admission::Unrouted, overloaded(TOO_MANY_OF_ONE));
                }
                let options = ForwardOptions::unrouted(self, &head);
                // A preflight goes where the request that it announces would.
                let preflight = Preflight::of(&self.router, &head);
                let upstream = announced(&self.router, &head).map(|(route, _)| route.upstream);
                let reply = match upstream.or(self.settings.default_upstream) {
                    Some(index) => pass::forward(self, &self.upstreams[index], head, body, options).await,
                    None => options.problem(pass::no_route(&head)),
                };
                let reply = match preflight {
                    Some(preflight) => preflight.complete(reply),
                    None => reply,
                };
                return (Arc::clone(&self.unrouted), reply);
            }
        };
        // 3. Verify its token, where its scope has a claim of one.
        let step = match step {
            Step::Verify { has_key } => match self.verify(&mut head).await {
                Ok(()) => Candidate::new(&head).step(route),
                Err(problem) => Step::Refuse(Refusal { problem, has_key }),
            },
            step => step,
        };
        // 4. Where requests in flight are scarce, leave some to other clients.
        if !permit.attribute(&|| head.party(Some(&route.policy.scope))) {
            return self.refused_early(&head, Admission::Routed(route, step), overloaded(TOO_MANY_OF_ONE));
        }
        // 5. Do what the route does with it.
        head.note_protected(!matches!(step, Step::Forward(_)));
        let (state, asked) = (Arc::clone(&self.states[&route.name]), CrossOrigin::of(route, &head.headers));
        let reply = match step {
            Step::Refuse(refusal) => self.refused(route, id, self.with_other_keys(refusal, &head)),
            Step::Forward(why) => {
                let observed =
                    (why == Unprotected::Observed).then(|| ObservedExchange::begin(self, route, &state, &head));
                let options = ForwardOptions { observed, ..ForwardOptions::of(self, &state, route, &head) };
                let preflight = Preflight::of(&self.router, &head);
                let reply = pass::forward(self, &self.upstreams[route.upstream], head, body, options).await;
                match preflight {
                    Some(preflight) => return (state, preflight.complete(reply)),
                    None => reply,
                }
            }
            Step::Protect(found) => self.protect(route, &state, head, body, Some(found), permit).await,
            Step::NeedBody => self.protect(route, &state, head, body, None, permit).await,
            // Its token is known by now.
            Step::Verify { has_key } => self.refused(route, id, Refusal { problem: unverified(), has_key }),
        };
        (state, self.share(reply, asked))
    }

    /// Answers a request that its route protects, whose key is `found` in its head or may be in its body.
    async fn protect(
        self: &Arc<Self>,
        route: &Arc<Route>,
        state: &Arc<RouteState>,
        head: Head,
        body: RequestBody,
        found: Option<Found>,
        permit: &Arc<Permit>,
    ) -> Reply {
        let policy = &route.policy;
        // 6. Read the whole body: nothing is claimed for a request that may not arrive.
        let request_id = head.id;
        let has_key = found.is_some() || self.key_places.has_key(&head.method, &head.uri, &head.headers);
        let refuse = |problem, has_key| self.refused(route, request_id, Refusal { problem, has_key });
        let usage = &self.shared.usage;
        let party = || head.party(Some(&policy.scope));
        let account = Account::new(head.memory(usage), Some(&party));
        let reading = Buffered::read(body, policy.max_request_body, account, usage);
        let body = match self.shared.drain.unless_over(reading).await {
            Some(Ok(body)) => body,
            Some(Err(error)) => return refuse(body_problem(self, error), has_key),
            None => return refuse(pass::unreachable(), has_key),
        };
        // 7. Find the key in the body, where it is not in the head.
        let found = match found {
            Some(found) => found,
            None => {
                // The body that was read back is gone again before anything is awaited.
                let step = match read_back(self, &body).await {
                    Ok((whole, _permit)) => Candidate::new(&head).with_body(route, &whole),
                    Err(problem) => return refuse(problem, true),
                };
                match step {
                    Step::Protect(found) => found,
                    Step::Refuse(refusal) => return refuse(refusal.problem, refusal.has_key || has_key),
                    Step::Verify { .. } => return refuse(unverified(), true),
                    Step::Forward(_) | Step::NeedBody => {
                        head.note_protected(false);
                        let (upstream, options) =
                            (&self.upstreams[route.upstream], ForwardOptions::of(self, state, route, &head));
                        let outcome = Outcome::Passed;
                        return Box::pin(pass::forward_buffered(upstream, &head, &body, options, outcome)).await;
                    }
                }
            }
        };
        // 8. Identify the record: service, namespace, caller, key. And take the fingerprint.
        let (key, fingerprint) = match identify(self, policy, &head, &body, found).await {
            Ok(identified) => identified,
            Err(problem) => return refuse(problem, true),
        };
        let at = (self, route, state);
        let mut request = ProtectedRequest::new(at, (head, body), (key, fingerprint), Arc::clone(permit));
        request.note_record();
        let upstream::Settings { client_timeout, timeout: whole, .. } = self.upstreams[route.upstream].settings();
        let deadlines = Deadlines::of(request.began, self.settings.settle_timeout, *client_timeout);
        let client = deadlines.client;
        request.deadlines = Some(deadlines);
        // Where `client_timeout` is not shorter, the attempt's own end comes first.
        let is_bounded = client_timeout < whole || matches!(policy.recovery, Recovery::Resend(_));
        let still_running = |id| refuse(state.estimator.still_running(*client_timeout, *whole).of_record(id), true);
        // 9. Replay from memory, where the answer is at hand.
        if let Some(reply) = request.recalled().await {
            return reply;
        }
        let asking = async {
            // While one id secret takes the place of another, its record may stand under another id.
            request.find_record().await;
            request.note_record();
            // 10. Accept it, where it is to be delivered later.
            request.accepted().await
        };
        match if is_bounded { timeout_at(client, asking).await } else { Ok(asking.await) } {
            Ok(Some(reply)) => return reply,
            Ok(None) => {}
            Err(_) => return still_running(request.id),
        }
        let id = request.id;
        // 11. Else claim the key, run, settle and reply: see `drive`.
        let (sender, reply) = oneshot::channel();
        // In a box: a future of this size would be copied several times on its way into the task.
        tokio::spawn(Box::pin(drive(request, Client(sender))));
        let failed = |_| {
            // The task is gone without a reply. Only a bug does that, and how far it came is unknown.
            refuse(Problem::new(Code::OutcomeUnknown, "the gate failed at this request").of_record(id), true)
        };
        match if is_bounded { timeout_at(client, reply).await } else { Ok(reply.await) } {
            Ok(reply) => reply.unwrap_or_else(failed),
            Err(_) => still_running(id),
        }
    }
}

/// The gate has too many requests in flight for this one.
fn overloaded(why: &str) -> Problem {
    Problem::new(Code::Overloaded, why).retry_after(RETRY_SOON)
}

/// Drives the claim protocol of one request to its end: it claims the key, runs the attempt, settles and replies; or waits
/// for another's attempt, or replies what the record says.
pub(super) async fn drive(request: ProtectedRequest, client: Client) {
    let mut protocol = Protocol::new(request.limits());
    let mut driver = ActionExecutor::new(request, client);
    let (mut event, mut age) = (Event::Begin, driver.age());
    loop {
        let mut at_once = None;
        for action in protocol.handle(age, event) {
            at_once = match driver.begin(action) {
                Ok(event) => event.or(at_once),
                Err(missing) => return driver.give_up(&missing),
            };
        }
        if protocol.is_done() {
            return driver.end();
        }
        event = match at_once {
            Some(event) => event,
            None => {
                let event = driver.next(&protocol).await;
                age = driver.age();
                event
            }
        };
    }
}

#[cfg(test)]
mod waiting;
