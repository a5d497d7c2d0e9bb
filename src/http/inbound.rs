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

use super::limits::Limits;
use super::usage::Usage;
use super::wire::{Fault, judge_trailer_fields};

const CUT_OFF: Fault = Fault::Malformed("the request was reset before the end of its body (RFC 9113, 8.1)");

/// A request's body, as it comes from a client.
pub struct Inbound {
    incoming: Incoming,
    /// Of a stream of HTTP/2. What comes by HTTP/1.1 was judged on its way here.
    watch: Option<Box<Watch>>,
}

/// Why a request's body did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It broke off, or is none.
    #[error("the request's body broke off: {0}")]
    Broken(#[from] hyper::Error),
    /// It is not waited for any longer, or says what it may not.
    #[error("{0}")]
    Refused(#[from] Fault),
}

impl From<Incoming> for Inbound {
    /// Of HTTP/1.1.
    fn from(incoming: Incoming) -> Self {
        Self { incoming, watch: None }
    }
}

impl Inbound {
    /// Of a stream of HTTP/2, whose client is waited for no longer than it may take.
    pub(super) fn of_stream(incoming: Incoming, limits: Arc<Limits>, usage: Arc<Usage>) -> Self {
        if incoming.is_end_stream() {
            return incoming.into();
        }
        let watch = Watch { limits, usage, since: None, waited: Duration::ZERO, bytes: 0, timer: None };
        Self { incoming, watch: Some(Box::new(watch)) }
    }
}

/// How long a client has been waited for in a body.
struct Watch {
    limits: Arc<Limits>,
    usage: Arc<Usage>,
    /// Since when it is.
    since: Option<Instant>,
    /// How long it was before.
    waited: Duration,
    /// How many bytes have come.
    bytes: u64,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Watch {
    /// Waits no longer than the client may take.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<Fault> {
        let since = *self.since.get_or_insert_with(Instant::now);
        let (patience, fault) = self.limits.patience_in_body(self.waited, self.bytes);
        let deadline = since + patience;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if timer.deadline() != deadline {
            timer.as_mut().reset(deadline);
        }
        timer.as_mut().poll(cx).map(|()| fault)
    }

    fn came(&mut self, bytes: usize) {
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

impl Body for Inbound {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        let polled = Pin::new(&mut this.incoming).poll_frame(cx);
        let Some(watch) = &mut this.watch else { return polled.map_err(Error::from) };
        match polled {
            Poll::Pending => watch.poll_late(cx).map(|fault| Some(Err(watch.refused(fault)))),
            Poll::Ready(Some(Ok(frame))) => {
                watch.came(frame.data_ref().map_or(0, Bytes::len));
                let judged = frame.trailers_ref().map_or(Ok(()), |trailers| watch.judge(trailers));
                Poll::Ready(Some(judged.map(|()| frame)))
            }
            // hyper takes a reset without an error for the end.
            Poll::Ready(None) if !this.incoming.is_end_stream() => Poll::Ready(Some(Err(watch.refused(CUT_OFF)))),
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
