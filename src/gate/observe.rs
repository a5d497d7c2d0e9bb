//! Routes that only observe: every request is forwarded as it comes, and what its route would have done with it is found out
//! when it is over.
//!
//! [`ObservedExchange`] goes with a request and takes notes. When the answer is over, or its client has left, a task of its own evaluates
//! them: it compares them with the shadow record of the key, see [`crate::idempotency::shadow`]. No request waits for that.
//! What cannot be evaluated is counted as dropped.

mod collector;
mod evaluate;

use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use http::header::{ETAG, LOCATION};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_body::{Body as _, Frame};
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;

use self::collector::{Collector, SharedCollector, lock};
use super::answer::Reply;
use super::request::Head;
use super::{Gate, RouteState};
use crate::http::body::{Body, Observer};
use crate::http::headers::lines;
use crate::http::usage::Permit;
use crate::idempotency::grpc;
use crate::idempotency::record::Timestamp;
use crate::idempotency::settle::{Control, LARGEST_JUDGED};
use crate::route::Route;
use crate::telemetry::observed::Dropped;
use crate::telemetry::outcome::{Code, Outcome};
use crate::telemetry::wall_clock;

/// How much of the body of an answer is compared, in bytes.
const COMPARED: usize = 64 << 10;

/// Takes notes of one request. They are evaluated when it is dropped.
pub(super) struct ObservedExchange(Option<Box<Notes>>);

struct Notes {
    gate: Arc<Gate>,
    route: Arc<Route>,
    state: Arc<RouteState>,
    head: Head,
    asks_upgrade: bool,
    began: Timestamp,
    body: SharedCollector,
    end: ExchangeEnd,
}

/// How the exchange went, so far.
enum ExchangeEnd {
    /// There is no answer. If it stays so, the client has left.
    Unanswered,
    /// The gate answered with this problem.
    Problem(Code),
    /// The upstream answers.
    Answer(Box<ObservedAnswer>),
}

struct ObservedAnswer {
    status: StatusCode,
    control: Control,
    /// For calls, and for answers that `outcomes_body` is about.
    headers: Vec<(HeaderName, HeaderValue)>,
    trailers: Vec<(HeaderName, HeaderValue)>,
    length: u64,
    expected: Option<u64>,
    /// Of what tells one answer from another, so far.
    digest: Sha256,
    /// The body, where `outcomes_body` judges it and there is room for it.
    judged: Option<(BytesMut, Permit)>,
    progress: AnswerProgress,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AnswerProgress {
    Streaming,
    Whole,
    Broken,
}

impl ObservedExchange {
    pub(super) fn begin(gate: &Arc<Gate>, route: &Arc<Route>, state: &Arc<RouteState>, head: &Head) -> Self {
        let body = Collector::new(route.policy.max_request_body, head.memory(&gate.shared.usage));
        Self(Some(Box::new(Notes {
            gate: Arc::clone(gate),
            route: Arc::clone(route),
            state: Arc::clone(state),
            asks_upgrade: head.upgrade.is_some(),
            head: head.without_upgrade(),
            began: wall_clock(),
            body: Arc::new(Mutex::new(body)),
            end: ExchangeEnd::Unanswered,
        })))
    }

    /// The request has this body.
    pub(super) fn add_body(&self, bytes: &Bytes) {
        let Some(notes) = &self.0 else { return };
        let mut body = lock(&notes.body);
        body.add(bytes);
        body.end();
    }

    /// The same body, which is collected as it goes by.
    pub(super) fn relay(&self, body: Body) -> Body {
        let Some(notes) = &self.0 else { return body };
        lock(&notes.body).expect(body.size_hint().exact());
        Body::relay(body, RequestTap(Arc::clone(&notes.body)))
    }

    /// The upstream answers with this head.
    pub(super) fn answers(&mut self, status: StatusCode, headers: &HeaderMap) {
        let Some(notes) = &mut self.0 else { return };
        let outcomes_body = &notes.route.policy.outcomes_body;
        let needs_headers = notes.head.is_call() || !outcomes_body.0.is_empty();
        let listed = if needs_headers { lines(headers).collect() } else { Vec::new() };
        let is_judged = !notes.head.is_call() && outcomes_body.concern(&listed);
        let memory = notes.head.memory(&notes.gate.shared.usage);
        let mut digest = Sha256::new().chain_update(status.as_u16().to_be_bytes());
        for name in [LOCATION, ETAG] {
            headers.get_all(name).iter().for_each(|value| digest.update(value));
            digest.update([0]);
        }
        notes.end = ExchangeEnd::Answer(Box::new(ObservedAnswer {
            status,
            control: Control::read(headers),
            headers: listed,
            trailers: Vec::new(),
            length: 0,
            expected: None,
            digest,
            judged: is_judged.then(|| (BytesMut::new(), memory.empty_permit())),
            progress: AnswerProgress::Streaming,
        }));
    }

    /// The reply as its client gets it, of whose body notes are taken as it goes by.
    pub(super) fn follow(mut self, reply: Reply) -> Reply {
        if let (true, Some(notes), Outcome::Problem(code)) = (reply.is_problem(), &mut self.0, reply.outcome) {
            notes.end = ExchangeEnd::Problem(code);
            return reply;
        }
        let Reply { response, .. } = reply;
        let response = if response.body().is_end_stream() || response.body().is_announced() {
            self.answer(ObservedAnswer::end);
            response
        } else {
            self.answer(|answer| answer.expected = response.body().size_hint().exact());
            response.map(|body| Body::relay(body, AnswerTap(Some(self))))
        };
        Reply::new(Outcome::Observed, response)
    }

    fn answer(&mut self, note: impl FnOnce(&mut ObservedAnswer)) {
        if let Some(Notes { end: ExchangeEnd::Answer(answer), .. }) = self.0.as_deref_mut() {
            note(answer);
        }
    }
}

impl Drop for ObservedExchange {
    fn drop(&mut self) {
        let Some(notes) = self.0.take() else { return };
        let tally = Arc::clone(notes.state.metrics.observed());
        // Without a runtime the process is about to end.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return tally.dropped(Dropped::Limit) };
        let Some(permit) = notes.gate.shared.usage.observing.acquire(1) else { return tally.dropped(Dropped::Limit) };
        let (ended, going) = (wall_clock(), notes.gate.shared.evaluations.subscribe());
        let patience = notes.gate.settings.settle_timeout;
        // In a box: a future of this size would be copied several times on its way into the task.
        runtime.spawn(Box::pin(async move {
            match timeout(patience, notes.evaluate(ended)).await {
                Ok(Ok(())) => {}
                Ok(Err(why)) => tally.dropped(why),
                Err(_) => tally.dropped(Dropped::Store),
            }
            drop((permit, going));
        }));
    }
}

impl ObservedAnswer {
    fn add(&mut self, data: &Bytes) {
        let left = usize::try_from(self.length).map_or(0, |length| COMPARED.saturating_sub(length));
        self.digest.update(&data[..data.len().min(left)]);
        self.length += data.len() as u64;
        if let Some((body, memory)) = &mut self.judged {
            let has_room = body.len() + data.len() <= LARGEST_JUDGED && memory.grow_if_plenty(data.len() as u64);
            if has_room {
                body.extend_from_slice(data);
            } else {
                self.judged = None;
            }
        }
        if self.expected == Some(self.length) {
            self.end();
        }
    }

    fn end(&mut self) {
        if self.progress == AnswerProgress::Streaming {
            self.progress = AnswerProgress::Whole;
        }
    }

    /// What tells it from another answer; nothing where its end is not known.
    fn digest(&self) -> Option<[u8; 8]> {
        let mut whole = self.digest.clone();
        whole.update(self.length.to_be_bytes());
        let status = self.trailers.iter().chain(&self.headers).find(|(name, _)| *name == grpc::STATUS);
        whole.update(status.map_or(&b""[..], |(_, value)| value.as_bytes()));
        let mut digest = [0; 8];
        digest.copy_from_slice(&whole.finalize()[..8]);
        (self.progress == AnswerProgress::Whole).then_some(digest)
    }
}

/// Collects the body of a request.
struct RequestTap(SharedCollector);

impl Observer for RequestTap {
    fn frame(&mut self, frame: &Frame<Bytes>) {
        match frame.data_ref() {
            Some(data) => lock(&self.0).add(data),
            // Nothing follows trailers.
            None => lock(&self.0).end(),
        }
    }

    fn received(&mut self, is_end: bool) {
        if is_end {
            lock(&self.0).end();
        }
    }
}

/// Takes notes of the body of an answer.
struct AnswerTap(Option<ObservedExchange>);

impl Observer for AnswerTap {
    fn frame(&mut self, frame: &Frame<Bytes>) {
        let Some(observed) = &mut self.0 else { return };
        let is_call = frame.is_trailers() && observed.0.as_ref().is_some_and(|notes| notes.head.is_call());
        observed.answer(|answer| match frame.data_ref() {
            Some(data) => answer.add(data),
            None => {
                if let Some(trailers) = frame.trailers_ref() {
                    answer.trailers = lines(trailers).collect();
                    if is_call {
                        answer.control = Control::of_call(&answer.headers.iter().cloned().collect(), trailers);
                    }
                }
                answer.end();
            }
        });
    }

    fn received(&mut self, is_end: bool) {
        if let Some(mut observed) = self.0.take_if(|_| is_end) {
            observed.answer(ObservedAnswer::end);
        }
    }

    fn broke(&mut self) {
        if let Some(mut observed) = self.0.take() {
            observed.answer(|answer| answer.progress = AnswerProgress::Broken);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(pieces: &[usize], status: u16, expected: Option<u64>) -> Option<[u8; 8]> {
        let mut answer = ObservedAnswer {
            status: StatusCode::OK,
            control: Control::default(),
            headers: Vec::new(),
            trailers: Vec::new(),
            length: 0,
            expected,
            digest: Sha256::new().chain_update(status.to_be_bytes()),
            judged: None,
            progress: AnswerProgress::Streaming,
        };
        pieces.iter().for_each(|length| answer.add(&Bytes::from(vec![7; *length])));
        answer.digest()
    }

    #[test]
    fn the_pieces_in_which_an_answer_came_do_not_count() {
        let whole = Some(100 << 10);
        let one = digest(&[100 << 10], 200, whole);
        assert!(one.is_some());
        assert_eq!(one, digest(&[16 << 10, 16 << 10, 28 << 10, 40 << 10], 200, whole));
        assert_ne!(one, digest(&[100 << 10], 201, whole));
        assert_ne!(one, digest(&[101 << 10], 200, Some(101 << 10)));
        assert_eq!(digest(&[50 << 10], 200, whole), None, "its client left");
    }
}
