//! Routes that only observe: every request is forwarded as it comes, and what its route would have done with it is found out
//! when it is over.
//!
//! [`Watch`] goes with a request and takes notes. When the answer is over, or its client has left, a task of its own compares
//! them with the shadow record of the key: see [`crate::idempotency::shadow`]. No request waits for that. Where too many wait
//! to be looked at, or the store is away, they are counted as dropped.

mod collector;
mod look;

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_body::{Body as _, Frame};
use tokio::time::timeout;

use self::collector::{Collector, SharedCollector, lock};
use super::answer::Reply;
use super::request::Head;
use super::{Gate, RouteState};
use crate::http::body::{Body, Observer};
use crate::http::headers::lines;
use crate::idempotency::record::Timestamp;
use crate::idempotency::settle::{Control, LARGEST_JUDGED};
use crate::route::Route;
use crate::telemetry::outcome::{Code, Outcome};
use crate::telemetry::wall_clock;

/// How much of an answer is compared, in bytes.
const COMPARED: usize = 64 << 10;

/// Takes notes of one request. What comes of them is counted when it is dropped.
pub(super) struct Watch(Option<Box<Notes>>);

struct Notes {
    gate: Arc<Gate>,
    route: Arc<Route>,
    state: Arc<RouteState>,
    head: Head,
    asks_upgrade: bool,
    began: Timestamp,
    body: SharedCollector,
    end: Seen,
}

/// How the exchange went, so far.
enum Seen {
    /// There is no answer. If it stays so, the client has left.
    Nothing,
    /// The gate answered with this problem.
    Problem(Code),
    /// The upstream answers.
    Answer(Box<SeenAnswer>),
}

struct SeenAnswer {
    status: StatusCode,
    control: Control,
    headers: Vec<(HeaderName, HeaderValue)>,
    trailers: Vec<(HeaderName, HeaderValue)>,
    body: Collector,
    is_broken: bool,
}

impl Watch {
    pub(super) fn begin(gate: &Arc<Gate>, route: &Arc<Route>, state: &Arc<RouteState>, head: &Head) -> Self {
        let body = Collector::new(route.policy.max_request_body, Some(head.memory(&gate.shared.usage)));
        Self(Some(Box::new(Notes {
            gate: Arc::clone(gate),
            route: Arc::clone(route),
            state: Arc::clone(state),
            asks_upgrade: head.upgrade.is_some(),
            head: head.without_upgrade(),
            began: wall_clock(),
            body: Arc::new(Mutex::new(body)),
            end: Seen::Nothing,
        })))
    }

    /// The request has this body.
    pub(super) fn has_body(&self, bytes: &Bytes) {
        let Some(notes) = &self.0 else { return };
        let mut body = lock(&notes.body);
        body.memory = None;
        body.add(bytes);
        body.end();
    }

    /// The same body, of which notes are taken as it goes by.
    pub(super) fn relay(&self, body: Body) -> Body {
        match &self.0 {
            Some(notes) => Body::relay(body, RequestTap(Arc::clone(&notes.body))),
            None => body,
        }
    }

    /// The upstream answers with this head.
    pub(super) fn answers(&mut self, status: StatusCode, headers: &HeaderMap) {
        let Some(notes) = &mut self.0 else { return };
        let is_judged = !notes.route.policy.outcomes_body.0.is_empty();
        let limit = if is_judged { LARGEST_JUDGED } else { COMPARED };
        notes.end = Seen::Answer(Box::new(SeenAnswer {
            status,
            control: Control::read(headers),
            headers: if is_judged || notes.head.is_call() { lines(headers).collect() } else { Vec::new() },
            trailers: Vec::new(),
            body: Collector::new(limit as u64, None),
            is_broken: false,
        }));
    }

    /// The reply as its client gets it, of whose body notes are taken as it goes by.
    pub(super) fn follow(mut self, reply: Reply) -> Reply {
        if let (true, Some(notes), Outcome::Problem(code)) = (reply.is_problem(), &mut self.0, reply.outcome) {
            notes.end = Seen::Problem(code);
            return reply;
        }
        let Reply { response, .. } = reply;
        let response = if response.body().is_end_stream() || response.body().is_announced() {
            self.ended();
            response
        } else {
            response.map(|body| Body::relay(body, AnswerTap(Some(self))))
        };
        Reply::new(Outcome::Observed, response)
    }

    /// The answer is over.
    fn ended(mut self) {
        if let Some(Notes { end: Seen::Answer(answer), .. }) = self.0.as_deref_mut() {
            answer.body.end();
        }
    }

    fn answer(&mut self) -> Option<&mut SeenAnswer> {
        match self.0.as_deref_mut() {
            Some(Notes { end: Seen::Answer(answer), .. }) => Some(answer),
            _ => None,
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(notes) = self.0.take() else { return };
        let tally = Arc::clone(notes.state.metrics.observed());
        // Without a runtime the process is about to end.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return tally.dropped() };
        let Some(permit) = notes.gate.shared.usage.observing.acquire(1) else { return tally.dropped() };
        let ended = wall_clock();
        runtime.spawn(async move {
            // A shutdown waits for it.
            let _going = notes.gate.shared.requests.subscribe();
            let patience = notes.gate.settings.settle_timeout;
            if !matches!(timeout(patience, notes.look(ended)).await, Ok(Ok(()))) {
                tally.dropped();
            }
            drop(permit);
        });
    }
}

/// Collects the body of a request.
struct RequestTap(SharedCollector);

impl Observer for RequestTap {
    fn frame(&mut self, frame: &Frame<Bytes>) {
        if let Some(data) = frame.data_ref() {
            lock(&self.0).add(data);
        }
    }

    fn received(&mut self, is_end: bool) {
        if is_end {
            lock(&self.0).end();
        }
    }
}

/// Collects the body of an answer; with its end the notes are complete.
struct AnswerTap(Option<Watch>);

impl Observer for AnswerTap {
    fn frame(&mut self, frame: &Frame<Bytes>) {
        let Some(answer) = self.0.as_mut().and_then(Watch::answer) else { return };
        if let Some(data) = frame.data_ref() {
            answer.body.add(data);
        } else if let Some(trailers) = frame.trailers_ref() {
            answer.trailers = lines(trailers).collect();
        }
    }

    fn received(&mut self, is_end: bool) {
        if let Some(watch) = self.0.take_if(|_| is_end) {
            watch.ended();
        }
    }

    fn broke(&mut self) {
        if let Some(mut watch) = self.0.take()
            && let Some(answer) = watch.answer()
        {
            answer.is_broken = true;
        }
    }
}
