//! A request's body, as it comes from a client.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep_until};

use super::body::{self, Progress};
use super::fault::Fault;
use super::http1::judge_trailer_fields;
use super::limits::Limits;
use super::usage::Usage;

const RESET: Fault = Fault::Malformed("the request was reset before the end of its body (RFC 9113, 8.1)");

/// A request's body, as it comes from a client.
pub struct RequestBody {
    incoming: Incoming,
    /// Timeouts of an HTTP/2 stream. HTTP/1.1 bodies are checked by `http1`.
    timer: Option<Box<BodyTimer>>,
}

/// Why reading a request's body failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It was cut off, or is malformed.
    #[error("the request's body broke off: {0}")]
    Broken(#[from] hyper::Error),
    /// It timed out, or has a field that is not allowed.
    #[error("{0}")]
    Refused(#[from] Fault),
}

impl From<Error> for body::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Broken(error) => Self::Broken(error),
            Error::Refused(fault) => Self::Refused(fault),
        }
    }
}

impl From<Incoming> for RequestBody {
    /// The body of an HTTP/1.1 request.
    fn from(incoming: Incoming) -> Self {
        Self { incoming, timer: None }
    }
}

impl RequestBody {
    /// Sends it on as it arrives. `progress` records every frame, and the end.
    #[must_use]
    pub fn relay(self, progress: Arc<Progress>) -> body::Body {
        if self.is_end_stream() { body::Body::empty() } else { body::Body::relay(self, progress) }
    }

    /// The body of an HTTP/2 stream, with the read timeouts of `limits`.
    pub(super) fn of_stream(incoming: Incoming, limits: Arc<Limits>, usage: Arc<Usage>) -> Self {
        if incoming.is_end_stream() {
            return incoming.into();
        }
        let timer = BodyTimer { limits, usage, since: None, waited: Duration::ZERO, bytes: 0, timer: None };
        Self { incoming, timer: Some(Box::new(timer)) }
    }
}

/// Read timeouts of a body.
struct BodyTimer {
    limits: Arc<Limits>,
    usage: Arc<Usage>,
    /// When the current wait started.
    since: Option<Instant>,
    /// The sum of earlier waits.
    waited: Duration,
    /// How many bytes have arrived.
    bytes: u64,
    timer: Option<Pin<Box<Sleep>>>,
}

impl BodyTimer {
    /// Returns the fault when the client has taken too long.
    fn poll_timeout(&mut self, cx: &mut Context<'_>) -> Poll<Fault> {
        let since = *self.since.get_or_insert_with(Instant::now);
        let (wait, fault) = self.limits.body_wait(self.waited, self.bytes);
        let deadline = since + wait;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if timer.deadline() != deadline {
            timer.as_mut().reset(deadline);
        }
        timer.as_mut().poll(cx).map(|()| fault)
    }

    fn received(&mut self, bytes: usize) {
        self.waited += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        self.bytes += bytes as u64;
    }

    fn refused(&self, fault: Fault) -> Error {
        if let Some(limit) = fault.limit() {
            self.usage.exceeded(limit);
        }
        fault.into()
    }

    fn judge(&self, trailers: &HeaderMap) -> Result<(), Error> {
        judge_trailer_fields(trailers, &self.limits).map_err(|fault| self.refused(fault))
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        let polled = Pin::new(&mut this.incoming).poll_frame(cx);
        let Some(timer) = &mut this.timer else { return polled.map_err(Error::from) };
        match polled {
            Poll::Pending => timer.poll_timeout(cx).map(|fault| Some(Err(timer.refused(fault)))),
            Poll::Ready(Some(Ok(frame))) => {
                timer.received(frame.data_ref().map_or(0, Bytes::len));
                let judged = frame.trailers_ref().map_or(Ok(()), |trailers| timer.judge(trailers));
                Poll::Ready(Some(judged.map(|()| frame)))
            }
            // hyper reports a reset without an error as the end.
            Poll::Ready(None) if !this.incoming.is_end_stream() => Poll::Ready(Some(Err(timer.refused(RESET)))),
            Poll::Ready(ended) => Poll::Ready(ended.map(|frame| frame.map_err(Error::from))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}
