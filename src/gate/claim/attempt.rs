//! One forward to the upstream: how it is settled, and what its client gets once its record is settled or the store has not
//! answered in time.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, Entry};
use http::{HeaderMap, HeaderName, HeaderValue, Request, response};
use hyper::ext::ReasonPhrase;
use tokio::time::{Instant, timeout};

use self::client_reply::{
    Cut, by_policy, end_of_tee, may_stream, recorded, relay, relay_released, trailers_may_follow, unrecorded,
};
use super::protected::ProtectedRequest;
use super::single_flight::Released;
use crate::gate::answer::{Client, Reply};
use crate::gate::pass;
use crate::http::answer::{Captured, PartialBody, RelayLimits, ResponseTee, TeeHandle, Withheld, capture};
use crate::http::body::Body;
use crate::http::headers::{lines, to_client, without_forbidden_fields, without_names};
use crate::http::problem::Problem;
use crate::http::upstream::{Error, PooledConnection, Reuse, SendContext, Sharing};
use crate::http::usage::{Account, Permit};
use crate::idempotency::codec::{Answer, Content};
use crate::idempotency::policy::Policy;
use crate::idempotency::record::{AttemptToken, Record};
use crate::idempotency::recovery::Recovery;
use crate::idempotency::settle::{Control, Ending, LARGEST_JUDGED, OutcomeAction, Verdict, settle, settle_again};
use crate::idempotency::unknown::UnknownCause;
use crate::store::{Expiry, Settled, Settlement};
use crate::telemetry::metrics::AttemptGuard;
use crate::telemetry::outcome::{Code, Outcome};

mod client_reply;

/// How long a client that stopped reading is waited for.
const CLIENT_STALL: Duration = Duration::from_secs(30);

/// How an exchange with the upstream ended.
enum Exchanged {
    /// With an answer, taken in whole.
    Whole(Box<Whole>),
    /// With an answer that is larger than may be kept; the rest of it is still to come.
    Large(Box<Large>),
    /// Without an answer.
    Failed(Ending, Problem),
    /// The gate shuts down and waits no longer.
    Abandoned,
}

struct Whole {
    answer: Answer,
    /// The memory of its record, where it is not small.
    record: Option<Permit>,
    control: Control,
}

struct Large {
    tombstone: Answer,
    control: Control,
    rest: PartialBody,
    connection: PooledConnection,
}

/// The recipient of the answer.
struct Recipient {
    /// The client, until it has a reply, or the head of one.
    client: Option<Client>,
    /// The rest of a reply whose head it has.
    tee: ResponseTee,
    /// The rule by which the answer is settled.
    settle: Settle,
}

/// The rule by which an attempt is settled.
type Settle = fn(&Policy, Ending, &Control, Option<OutcomeAction>) -> Verdict;

/// What an attempt came to.
pub(in crate::gate) struct Attempted {
    attempt: AttemptToken,
    /// How its record ends.
    pub(in crate::gate) end: Settlement,
    /// What followers get of it, where it was released.
    pub(in crate::gate) released: Option<Released>,
    /// The memory that the record takes until it is settled.
    pub(in crate::gate) record: Option<Permit>,
    /// What the client gets, until it has it.
    for_client: Option<ForClient>,
    _counted: Arc<AttemptGuard>,
}

struct ForClient {
    outcome: Outcome,
    /// The answer, whole or without its body; else the problem is the reply.
    answer: Result<Answer, Problem>,
    recipient: Recipient,
    /// What follows the head of a large answer.
    rest: Option<Following>,
    /// The end of a large answer that the client has in part.
    withheld: Option<Withheld>,
}

/// The rest of a large answer: it is read to its end whatever becomes of the client.
struct Following {
    rest: PartialBody,
    limits: RelayLimits,
    connection: PooledConnection,
    /// The attempt goes on until then.
    counted: Arc<AttemptGuard>,
}

/// How an attempt ends, and what its client gets.
struct AttemptResult {
    end: Settlement,
    outcome: Outcome,
    answer: Result<Answer, Problem>,
}

impl AttemptResult {
    fn without_answer(end: Settlement, problem: Problem) -> Self {
        Self { end, outcome: Outcome::Problem(problem.code), answer: Err(problem) }
    }
}

impl Attempted {
    /// Whether the request may be sent again: how the attempt ended is unknown, and its client has nothing of an answer.
    pub(in crate::gate) fn may_be_sent_again(&self) -> bool {
        let is_unanswered = |waits: &ForClient| waits.recipient.client.is_some() && waits.rest.is_none();
        let is_shutdown = |cause: &Bytes| UnknownCause::decode(cause) == Ok(UnknownCause::Shutdown);
        matches!(&self.end, Settlement::Hold { cause } if !is_shutdown(cause))
            && self.for_client.as_ref().is_some_and(is_unanswered)
    }

    /// How its record ends where the request is sent again.
    pub(in crate::gate) fn sent_again(&self) -> Settlement {
        let cause = match &self.end {
            Settlement::Hold { cause } => UnknownCause::decode(cause).ok(),
            Settlement::Complete { .. } | Settlement::Release => None,
        };
        cause.map_or_else(|| self.end.clone(), |cause| hold(cause.sent_again()))
    }

    /// Whether it was this attempt.
    pub(in crate::gate) fn is_of(&self, attempt: AttemptToken) -> bool {
        self.attempt == attempt
    }

    /// The client, for the next attempt.
    pub(in crate::gate) fn into_client(self) -> Option<Client> {
        self.for_client?.recipient.client
    }
}

/// Forwards the request once, under the claim of `attempt`, and takes in the answer. Nothing is settled yet, and the client
/// has at most a part of an answer that is kept by its head. Where it `is_again` that, the outcome of an earlier attempt is unknown.
pub(in crate::gate) async fn run(
    request: Arc<ProtectedRequest>,
    attempt: AttemptToken,
    client: Client,
    is_again: bool,
) -> Attempted {
    let request = &*request;
    let began = Instant::now();
    let counted = Arc::new(request.state.metrics.attempt_began());
    let settle = if is_again { settle_again } else { settle };
    let mut recipient = Recipient { client: Some(client), tee: ResponseTee::default(), settle };
    if let Some(notes) = &request.head.notes {
        notes.begins_attempt();
    }
    let timing = request.head.asks(request.upstream());
    let exchanged = exchange(request, attempt, &mut recipient).await;
    drop(timing);
    let took = began.elapsed();
    if !matches!(exchanged, Exchanged::Failed(Ending::Unreachable, _)) {
        request.state.estimator.took(took);
        request.state.metrics.upstream_took(took);
    }
    let (mut record, mut rest, mut withheld) = (None, None, None);
    let ended = match exchanged {
        Exchanged::Whole(whole) => {
            record = whole.record;
            answered(request, whole.answer, &whole.control, settle)
        }
        Exchanged::Large(large) => {
            let limit = request.timeout();
            let limits = RelayLimits { stall: limit, client: CLIENT_STALL, deadline: began + limit };
            let following =
                Following { rest: large.rest, limits, connection: large.connection, counted: Arc::clone(&counted) };
            match answered(request, large.tombstone, &large.control, settle) {
                // The attempt runs until all of the answer is there, and its key is not free before.
                AttemptResult { end: Settlement::Release, outcome, answer: Ok(answer) } => {
                    match relay_released(request, following, &answer, &mut recipient.client).await {
                        Ok(end) => {
                            withheld = Some(end);
                            AttemptResult { end: Settlement::Release, outcome, answer: Ok(answer) }
                        }
                        Err(Cut::Broken) => {
                            let problem = Problem::new(Code::UpstreamBroken, "the upstream broke off its answer");
                            failed(request, Ending::Broken, problem, settle)
                        }
                        Err(Cut::Shutdown) => abandoned(),
                    }
                }
                ended => {
                    rest = Some(following);
                    ended
                }
            }
        }
        Exchanged::Failed(ending, problem) => {
            let problem = match ending {
                Ending::Unreachable if is_again => {
                    let detail = "after an earlier attempt, the upstream could not be reached again";
                    Problem::new(Code::UpstreamBroken, detail)
                }
                _ => problem,
            };
            failed(request, ending, problem, settle)
        }
        Exchanged::Abandoned => abandoned(),
    };
    let AttemptResult { end, outcome, answer } = ended;
    let is_whole = answer.as_ref().map_or(true, |answer| answer.content.is_some());
    let released = match end {
        // An answer too large to keep cannot be shared with followers.
        Settlement::Release if is_whole => {
            // A follower is a retry: some headers are for the first client only.
            let answer =
                answer.clone().map(|answer| request.policy().response_headers.kept(Cow::Owned(answer)).into_owned());
            Some(Released { fingerprint: request.fingerprint.clone(), proof: request.proof, answer })
        }
        Settlement::Release | Settlement::Complete { .. } | Settlement::Hold { .. } => None,
    };
    let for_client = Some(ForClient { outcome, answer, recipient, rest, withheld });
    Attempted { attempt, end, released, record, for_client, _counted: counted }
}

/// Sends the request once and takes in the answer.
async fn exchange(request: &ProtectedRequest, attempt: AttemptToken, recipient: &mut Recipient) -> Exchanged {
    let limit = request.timeout();
    let drain = &request.gate.shared.drain;
    if drain.is_over() {
        return Exchanged::Failed(Ending::Unreachable, pass::unreachable());
    }
    let party = || request.party();
    let mut sending = SendContext::of(request.head.interim()).for_party(&party);
    if request.upstream().settings().reuse == Sharing::Caller {
        sending = sending.in_scope(request.scope_digest());
    }
    let exchanged = tokio::select! {
        biased;
        ended = timeout(limit, send(request, attempt, &sending, recipient)) => {
            ended.unwrap_or_else(|_| Exchanged::Failed(Ending::Timeout, pass::timed_out(limit)))
        }
        () = drain.over() => Exchanged::Abandoned,
    };
    match exchanged {
        // Both gave up on it: it tells no more what it did not tell before.
        Exchanged::Failed(Ending::Timeout, _) | Exchanged::Abandoned if !sending.has_begun() => {
            Exchanged::Failed(Ending::Unreachable, pass::unreachable())
        }
        ended => ended,
    }
}

async fn send(
    request: &ProtectedRequest,
    attempt: AttemptToken,
    sending: &SendContext<'_>,
    recipient: &mut Recipient,
) -> Exchanged {
    let upstream = request.upstream();
    let (response, connection) = match upstream.send(forwarded(request, attempt), Reuse::Protected, sending).await {
        Ok(answered) => answered,
        Err(error) => {
            let ending = match &error {
                Error::NotSent(_) => Ending::Unreachable,
                // The body was whole before the key was claimed: reading it back failed in the middle.
                Error::ClientBody(_) | Error::Unknown(_) | Error::Framing | Error::Head(_) => Ending::Broken,
            };
            let mut problem = pass::problem(upstream, &error);
            if ending == Ending::Broken {
                problem.code = Code::UpstreamBroken;
            }
            return Exchanged::Failed(ending, problem);
        }
    };
    let (parts, body) = response.into_parts();
    let version = parts.version;
    let control = Control::read(&parts.headers);
    let head_of_call = request.head.is_call().then(|| parts.headers.clone());
    let answer = match head_of_answer(parts, &request.gate.added) {
        Ok(answer) => answer,
        Err(problem) => return Exchanged::Failed(Ending::Broken, problem),
    };
    let Recipient { client, tee, settle } = recipient;
    let mut begin = |body| {
        if let Some(client) = client.take() {
            client.reply(request.reply_with(Outcome::Executed, Ok(answer.clone()), Some(body)));
        }
    };
    // What is judged by its body is held back until it is whole, or too large to be judged.
    let held_back = || if request.policy().outcomes_body.concern(&answer.headers) { LARGEST_JUDGED } else { 0 };
    let tee_handle = may_stream(request, &answer, &control, *settle).then(|| TeeHandle {
        tee,
        held_back: held_back(),
        begin: &mut begin,
    });
    let party = || request.party();
    let memory = Account::new(request.head.memory(&request.gate.shared.usage), Some(&party));
    let captured =
        capture(body, (version, answer.status), request.policy().max_response_body, memory, tee_handle).await;
    let control = match (&captured, &head_of_call) {
        (Ok(Captured::Whole { trailers: Some(trailers), .. }), Some(head)) => Control::of_call(head, trailers),
        _ => control,
    };
    if control.invalid > 0 {
        request.state.metrics.control_invalid(control.invalid);
        tracing::debug!(route = &*request.state.name, "Idempotency-Control has directives that are invalid: ignored");
    }
    match captured {
        Ok(Captured::Whole { body, trailers, record }) => {
            let trailers = trailers.filter(|_| recipient.client.is_some() || trailers_may_follow(request, &answer));
            let trailers = trailers.map(|trailers| without_names(trailers, &request.gate.added));
            let answer = whole_answer(answer, body, trailers);
            connection.return_to_pool();
            Exchanged::Whole(Box::new(Whole { answer, record, control }))
        }
        Ok(Captured::Truncated) => Exchanged::Failed(Ending::Broken, pass::problem(upstream, &Error::Framing)),
        Ok(Captured::TooLarge(rest)) => {
            Exchanged::Large(Box::new(Large { tombstone: answer, control, rest, connection }))
        }
        Err(error) => Exchanged::Failed(Ending::Broken, pass::problem(upstream, &Error::Unknown(error))),
    }
}

fn forwarded(request: &ProtectedRequest, attempt: AttemptToken) -> Request<Body> {
    let options = request.forward_options();
    let mut forwarded = pass::buffered_request(request.upstream(), &request.head, &request.body, &options);
    // Rules that read the answer need it as it is (RFC 9110, 12.5.3).
    if !request.policy().outcomes_body.0.is_empty()
        && !request.head.is_call()
        && let Entry::Occupied(mut codings) = forwarded.headers_mut().entry(ACCEPT_ENCODING)
    {
        codings.insert(HeaderValue::from_static("identity"));
    }
    if let (Some(name), Ok(mut token)) =
        (&request.gate.settings.own_headers.attempt, HeaderValue::from_str(&attempt.expose()))
    {
        token.set_sensitive(true);
        forwarded.headers_mut().insert(name, token);
    }
    forwarded
}

/// The answer as its client gets it, without its body and without what the gate `added` says itself.
pub(in crate::gate) fn head_of_answer(parts: response::Parts, added: &[HeaderName]) -> Result<Answer, Problem> {
    if parts.status.is_informational() {
        return Err(pass::unasked_switch());
    }
    let reason = parts.extensions.get::<ReasonPhrase>().map(|reason| Bytes::copy_from_slice(reason.as_bytes()));
    let headers = to_client(parts.headers, added);
    Ok(Answer { status: parts.status, reason, headers: lines(&headers).collect(), content: None })
}

/// Joins the head of an answer with its body and its trailers, and leaves out the trailers that no client gets.
pub(in crate::gate) fn whole_answer(head: Answer, body: Bytes, trailers: Option<HeaderMap>) -> Answer {
    let trailers = trailers.map(without_forbidden_fields);
    let content = Content { body, trailers: trailers.iter().flat_map(lines).collect() };
    Answer { content: Some(content), ..head }
}

/// What a complete answer means, or the head of one that is too large.
fn ending(request: &ProtectedRequest, answer: &Answer) -> Ending {
    let status = answer.status.as_u16();
    match &answer.content {
        Some(content) if request.head.is_call() => Ending::of_call(status, &answer.headers, &content.trailers),
        // A call's own status is yet to come; but messages follow only what went well.
        Some(_) | None => Ending::Answered(status),
    }
}

/// What a complete answer comes to, or the head of one that is too large, or that there is no memory for.
fn answered(request: &ProtectedRequest, answer: Answer, control: &Control, settle: Settle) -> AttemptResult {
    let ending = ending(request, &answer);
    let policy = request.policy();
    let by_body = Some(&policy.outcomes_body).filter(|_| !request.head.is_call()).and_then(|rules| {
        let body = answer.content.as_ref().map(|content| &content.body[..]);
        rules.judge(&answer.headers, body, policy.outcomes.action(ending))
    });
    let (end, outcome) = match settle(policy, ending, control, by_body) {
        Verdict::Complete { ttl, keep_body } => {
            let kept = match policy.response_headers.exclude.is_empty() {
                true => Cow::Borrowed(&answer),
                false => policy.response_headers.kept(Cow::Borrowed(&answer)),
            };
            let kept = if keep_body { kept.encode() } else { Answer { content: None, ..kept.into_owned() }.encode() };
            (Settlement::Complete { answer: kept, expiry: Expiry::FromClaim(ttl) }, Outcome::Executed)
        }
        Verdict::Release => (Settlement::Release, Outcome::Released),
        Verdict::Hold => (hold(UnknownCause::Ended(ending)), Outcome::Problem(Code::OutcomeUnknown)),
    };
    AttemptResult { end, outcome, answer: Ok(answer) }
}

/// What an attempt comes to that has no whole answer.
fn failed(request: &ProtectedRequest, ending: Ending, problem: Problem, settle: Settle) -> AttemptResult {
    let is_released = settle(request.policy(), ending, &Control::default(), None) == Verdict::Release;
    // Where it is stored: there is no answer to complete with.
    let end = if is_released { Settlement::Release } else { hold(UnknownCause::Ended(ending)) };
    AttemptResult::without_answer(end, by_policy(problem, is_released, &request.policy().recovery))
}

/// What an attempt comes to that the gate waits for no longer.
fn abandoned() -> AttemptResult {
    AttemptResult::without_answer(hold(UnknownCause::Shutdown), by_policy(pass::abandoned(), false, &Recovery::Hold))
}

fn hold(cause: UnknownCause) -> Settlement {
    Settlement::Hold { cause: cause.encode() }
}

/// Logs that an attempt was held; not where the upstream or an operator has completed it in the store meanwhile.
fn report_held(request: &ProtectedRequest, attempted: &Attempted, settled: Option<&Settled>) {
    let Settlement::Hold { cause } = &attempted.end else { return };
    let by_attempt = |record: &Record| record.is_completed_by(attempted.attempt);
    if matches!(settled, Some(Settled::NotCurrent { record: Some(record) }) if by_attempt(record)) {
        return;
    }
    let (id, record, route, key) = (request.head.id, request.id, &*request.state.name, request.key_shortened());
    let upstream = &*request.upstream().settings().name;
    let cause = UnknownCause::decode(cause).map(tracing::field::display).ok();
    tracing::warn!(request = %id, %record, route, upstream, key, cause, "the outcome of an attempt is unknown");
}

/// Gives the client the answer of an attempt, or the end of it, by what the store says of its settlement; nothing where it
/// has not answered in time. What follows the head of a large answer goes on in a task of its own.
pub(in crate::gate) fn conclude(request: &Arc<ProtectedRequest>, attempted: &mut Attempted, settled: Option<&Settled>) {
    let attempt = attempted.attempt;
    let Some(ForClient { outcome, answer, recipient: Recipient { client, tee, .. }, rest, withheld }) =
        attempted.for_client.take()
    else {
        return;
    };
    report_held(request, attempted, settled);
    if outcome == Outcome::Executed
        && matches!(settled, Some(Settled::Done { .. }))
        // A call of gRPC that failed is answered with 200.
        && answer.as_ref().is_ok_and(|answer| answer.status.is_success() && !request.head.is_call())
    {
        request.check_probe();
    }
    let sender = match client {
        Some(client) => {
            let (sender, body) = rest.is_some().then(Body::channel).unzip();
            client.reply(match settled {
                Some(settled) => recorded(request, attempt, settled, outcome, answer, body),
                None => unrecorded(request, outcome, answer, body),
            });
            sender
        }
        None if withheld.is_some() && matches!(settled, Some(Settled::Done { .. })) => {
            if let Some(end) = withheld {
                tokio::spawn(end.finish());
            }
            None
        }
        None => end_of_tee(request, attempt, settled, answer, tee),
    };
    if let Some(following) = rest {
        let request = Arc::clone(request);
        tokio::spawn(async move { relay(&request, following, sender).await });
    }
}

/// Gives a retry that followed a released attempt its answer.
pub(in crate::gate) fn released(request: &ProtectedRequest, released: &Released) -> Reply {
    request.reply_with(Outcome::Released, released.answer.clone(), None)
}

#[cfg(test)]
mod properties;
