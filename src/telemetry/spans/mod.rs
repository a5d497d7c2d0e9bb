//! Spans: what a request was in its trace (W3C Trace Context), for a collector of OpenTelemetry.
//!
//! A protected request has one span, whose id is the id of the request: a record names the request that claimed it, so that
//! a replay can link to the span of the attempt. Spans wait in a queue until they are exported. Where it is full, spans are
//! dropped and counted: no request waits for a collector.

pub mod otlp;

use std::sync::Arc;
use std::time::Duration;

use prometheus::IntCounter;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::report::Facts;
use crate::idempotency::record::RequestId;

/// How many spans wait at most.
const QUEUE: usize = 8192;

/// How many spans are exported at a time.
const BATCH: usize = 1024;

/// How long spans gather before they are exported together.
const PAUSE: Duration = Duration::from_millis(200);

/// Where a span stands in its trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanContext {
    /// The id of the trace.
    pub trace: u128,
    /// The id of the span. Never 0.
    pub span: u64,
}

/// The span that a request comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// Its trace and its id.
    pub context: SpanContext,
    /// Whether it is exported.
    pub is_sampled: bool,
}

/// Decides which requests have spans, and takes them.
pub struct Tracer {
    /// Of 2^63.
    threshold: u64,
    spans: mpsc::Sender<Span>,
    dropped: IntCounter,
}

/// The spans that a tracer took.
pub struct Spans {
    queue: mpsc::Receiver<Span>,
}

/// A span that has begun.
pub struct Started {
    tracer: Arc<Tracer>,
    context: SpanContext,
    parent: Option<u64>,
}

/// A span that has ended.
pub struct Span {
    context: SpanContext,
    parent: Option<u64>,
    facts: Facts,
}

impl Tracer {
    /// A tracer that takes this part of all traces, from 0 to 1, and its spans. Those that it drops are counted.
    #[must_use]
    pub fn new(sample: f64, dropped: IntCounter) -> (Arc<Self>, Spans) {
        let (spans, queue) = mpsc::channel(QUEUE);
        // A float converts to the nearest number that there is.
        let threshold = (sample * (1_u64 << 63) as f64) as u64;
        (Arc::new(Self { threshold, spans, dropped }), Spans { queue })
    }

    /// Begins the span of a request; nothing if it is not sampled. If the request has a parent, the parent decides.
    #[must_use]
    pub fn begin(self: &Arc<Self>, request: RequestId, parent: Option<Parent>) -> Option<Started> {
        let trace = parent.map_or_else(|| request.trace(), |parent| parent.context.trace);
        let is_sampled = match parent {
            Some(parent) => parent.is_sampled,
            // As other samplers by ratio, so that one trace is sampled here and there.
            None => (trace as u64) >> 1 < self.threshold,
        };
        let context = SpanContext { trace, span: request.0.get() };
        let parent = parent.map(|parent| parent.context.span);
        is_sampled.then(|| Started { tracer: Arc::clone(self), context, parent })
    }
}

impl Started {
    /// Where it stands.
    #[must_use]
    pub fn context(&self) -> SpanContext {
        self.context
    }

    /// Ends it. Requests that are not protected have no span.
    pub(super) fn end(self, facts: &Facts) {
        let Self { tracer, context, parent } = self;
        if !facts.noted.is_protected {
            return;
        }
        if tracer.spans.try_send(Span { context, parent, facts: facts.clone() }).is_err() {
            tracer.dropped.inc();
        }
    }
}

impl Spans {
    /// The next spans, as the body of a request to a collector, and how many they are; nothing when there are no more.
    pub async fn next(&mut self) -> Option<(Vec<u8>, u64)> {
        let mut batch = Vec::new();
        if self.queue.len() < BATCH {
            batch.push(self.queue.recv().await?);
            if !self.queue.is_closed() {
                // Nothing more comes where the tracer is gone.
                let _ = timeout(PAUSE, self.closed()).await;
            }
        }
        while batch.len() < BATCH
            && let Ok(span) = self.queue.try_recv()
        {
            batch.push(span);
        }
        Some((otlp::encode(&batch), batch.len() as u64))
    }

    async fn closed(&self) {
        while !self.queue.is_closed() && self.queue.len() < BATCH {
            sleep(PAUSE / 10).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    fn tracer(sample: f64) -> Arc<Tracer> {
        Tracer::new(sample, IntCounter::new("dropped", "dropped").unwrap()).0
    }

    #[test]
    fn a_part_of_all_traces_is_sampled_unless_a_parent_says_otherwise() {
        for sample in [0.0, 0.1, 0.5, 1.0] {
            let tracer = tracer(sample);
            let ids = (0..10_000).filter_map(|_| NonZeroU64::new(fastrand::u64(1..))).map(RequestId);
            let sampled = ids.filter(|id| tracer.begin(*id, None).is_some()).count() as f64;
            assert!((sampled - 10_000.0 * sample).abs() < 300.0, "{sample}: {sampled}");
            for is_sampled in [false, true] {
                let parent = Parent { context: SpanContext { trace: 7, span: 8 }, is_sampled };
                let begun = tracer.begin(RequestId(NonZeroU64::MAX), Some(parent));
                assert_eq!(begun.is_some(), is_sampled);
                let context = begun.map(|begun| (begun.context, begun.parent));
                let expected = (SpanContext { trace: 7, span: u64::MAX }, Some(8));
                assert!(context.is_none_or(|context| context == expected));
            }
        }
    }
}
