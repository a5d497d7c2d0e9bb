//! A request's body, as it comes from a client, and held whole before its key is claimed: in memory while it is small,
//! else in an unlinked temporary file.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::runtime::Handle;
use tokio::time::{Instant, Sleep, sleep_until, timeout};

use super::body::{self, Body, Progress};
use super::fault::Fault;
use super::headers::{is_reserved_alias, without_forbidden_fields};
use super::http1::judge_trailer_fields;
use super::limits::Limits;
use super::spool::{self, SpoolFile, SpoolReader, SpoolWriter};
use super::usage::{Account, CountedBuffer, Usage};

/// Bodies up to this size, in bytes, stay in memory.
pub const IN_MEMORY: u64 = 256 * 1024;

const RESET: Fault = Fault::Malformed("the request was reset before the end of its body (RFC 9113, 8.1)");

/// How much of a body of HTTP/2 that is not wanted is read, in bytes.
const UNWANTED: usize = 64 * 1024;

/// For how long it is read.
const UNWANTED_WAIT: Duration = Duration::from_secs(1);

/// A request's body, as it comes from a client.
pub struct RequestBody {
    incoming: Received,
    /// Timeouts of an HTTP/2 stream. HTTP/1.1 bodies are checked by `http1`.
    timer: Option<Box<BodyTimer>>,
    /// The name of a trailer that goes no further.
    withheld: Option<HeaderName>,
    /// What [`Self::begin`] has read of it.
    first: Option<Box<Result<Frame<Bytes>, ReadError>>>,
}

/// Why reading a request's body failed.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It was cut off, or is malformed.
    #[error("the request's body broke off or is malformed: {0}")]
    Broken(#[from] hyper::Error),
    /// It timed out, or has a field that is not allowed.
    #[error("{0}")]
    Refused(#[from] Fault),
}

impl From<ReadError> for body::Error {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Broken(error) => Self::Broken(error),
            ReadError::Refused(fault) => Self::Refused(fault),
        }
    }
}

impl From<Incoming> for RequestBody {
    /// The body of an HTTP/1.1 request.
    fn from(incoming: Incoming) -> Self {
        let incoming = Received { incoming: Some(incoming), reads_rest: false };
        Self { incoming, timer: None, withheld: None, first: None }
    }
}

/// What comes from a client.
///
/// To an HTTP/2 client that still sends, the answer to a request whose body is dropped is followed by a reset of the stream, and
/// some clients take that for a failure of the answer, though RFC 9113, section 8.1, forbids it: curl 7.88 does. So the rest of a
/// small body is read first.
struct Received {
    incoming: Option<Incoming>,
    reads_rest: bool,
}

impl Received {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let Some(incoming) = &mut self.incoming else { return Poll::Ready(None) };
        Pin::new(incoming).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.as_ref().map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        let rest = self.incoming.take().filter(|incoming| self.reads_rest && !incoming.is_end_stream());
        if let (Some(rest), Ok(runtime)) = (rest, Handle::try_current()) {
            runtime.spawn(timeout(UNWANTED_WAIT, discard(rest)));
        }
    }
}

async fn discard(mut unwanted: Incoming) {
    let mut length = 0;
    while length <= UNWANTED
        && let Some(Ok(frame)) = unwanted.frame().await
    {
        length += frame.data_ref().map_or(0, Bytes::len);
    }
}

impl RequestBody {
    /// Sends it on as it arrives. `progress` records every frame, and the end.
    #[must_use]
    pub fn relay(self, progress: Arc<Progress>) -> Body {
        if self.is_end_stream() { Body::empty() } else { Body::relay(self, progress) }
    }

    /// The body of an HTTP/2 stream, with the read timeouts of `limits`.
    pub(super) fn of_stream(incoming: Incoming, limits: Arc<Limits>, usage: Arc<Usage>) -> Self {
        if incoming.is_end_stream() {
            return incoming.into();
        }
        let timer = BodyTimer { limits, usage, since: None, waited: Duration::ZERO, bytes: 0, timer: None };
        let incoming = Received { incoming: Some(incoming), reads_rest: true };
        Self { incoming, timer: Some(Box::new(timer)), withheld: None, first: None }
    }

    /// Waits for the first byte or the trailers, or the end of a body that has neither.
    pub async fn begin(&mut self) {
        while self.first.is_none() {
            match self.frame().await {
                Some(Ok(frame)) if frame.data_ref().is_some_and(Bytes::is_empty) => {}
                Some(first) => self.first = Some(Box::new(first)),
                None => return,
            }
        }
    }

    /// The same, without a trailer of this name.
    #[must_use]
    pub fn without_trailer(self, name: HeaderName) -> Self {
        Self { withheld: Some(name), ..self }
    }

    fn poll_judged(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, ReadError>>> {
        let polled = self.incoming.poll_frame(cx);
        let Some(timer) = &mut self.timer else { return polled.map_err(ReadError::from) };
        match polled {
            Poll::Pending => timer.poll_timeout(cx).map(|fault| Some(Err(timer.refused(fault)))),
            Poll::Ready(Some(Ok(frame))) => {
                timer.received(frame.data_ref().map_or(0, Bytes::len));
                let judged = frame.trailers_ref().map_or(Ok(()), |trailers| timer.judge(trailers));
                Poll::Ready(Some(judged.map(|()| frame)))
            }
            // hyper reports a reset without an error as the end.
            Poll::Ready(None) if !self.incoming.is_end_stream() => {
                self.incoming.reads_rest = false;
                Poll::Ready(Some(Err(timer.refused(RESET))))
            }
            Poll::Ready(ended) => {
                // There is no rest to read.
                self.incoming.reads_rest = false;
                Poll::Ready(ended.map(|frame| frame.map_err(ReadError::from)))
            }
        }
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

    fn refused(&self, fault: Fault) -> ReadError {
        if let Some(limit) = fault.limit() {
            self.usage.exceeded(limit);
        }
        fault.into()
    }

    fn judge(&self, trailers: &HeaderMap) -> Result<(), ReadError> {
        judge_trailer_fields(trailers, &self.limits).map_err(|fault| self.refused(fault))
    }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = ReadError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, ReadError>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(*first));
        }
        let mut polled = self.poll_judged(cx);
        if let Poll::Ready(Some(Ok(frame))) = &mut polled
            && let Some(trailers) = frame.trailers_mut()
        {
            let own = self.withheld.as_ref();
            let is_dropped = |name: &&HeaderName| own == Some(*name) || is_reserved_alias(name, own);
            let dropped: Vec<HeaderName> = trailers.keys().filter(is_dropped).cloned().collect();
            for name in dropped {
                trailers.remove(name);
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

/// A whole request body.
#[derive(Clone, Debug)]
pub struct Buffered {
    content: Content,
    /// The trailers that followed it.
    trailers: Option<HeaderMap>,
}

#[derive(Clone)]
enum Content {
    Memory(Bytes),
    Spooled { file: Arc<SpoolFile>, sha256: [u8; 32] },
}

/// Why a body could not be buffered.
#[derive(Debug, thiserror::Error)]
pub enum BufferError {
    /// It is larger than the limit.
    #[error("the body is larger than {limit} bytes")]
    TooLarge {
        /// In bytes.
        limit: u64,
    },
    /// It is malformed, or the client went away before its end.
    #[error("the body is malformed or incomplete")]
    Malformed(#[source] ReadError),
    /// There is no room for it, neither in memory nor in a temporary file.
    #[error("there is no room for the body")]
    NoRoom,
    /// The temporary file failed.
    #[error("the temporary file failed: {0}")]
    Spool(#[source] io::Error),
}

impl From<spool::Error> for BufferError {
    fn from(error: spool::Error) -> Self {
        match error {
            spool::Error::NoRoom => Self::NoRoom,
            spool::Error::Failed(error) => Self::Spool(error),
        }
    }
}

impl Buffered {
    /// Reads a body to its end, at most `limit` bytes of it, into `memory` or a file.
    pub async fn read(
        incoming: RequestBody,
        limit: u64,
        memory: Account<'_>,
        usage: &Usage,
    ) -> Result<Self, BufferError> {
        // An announced length is refused before a byte of the body is read.
        if incoming.size_hint().lower() > limit {
            return Err(BufferError::TooLarge { limit });
        }
        let buffer = CountedBuffer::new(memory);
        Reader { buffer, spool: None, length: 0, limit, memory, usage }.run(incoming).await
    }

    /// A body that was read before.
    #[must_use]
    pub fn of(bytes: Bytes) -> Self {
        Self { content: Content::Memory(bytes), trailers: None }
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match &self.content {
            Content::Memory(bytes) => bytes.len() as u64,
            Content::Spooled { file, .. } => file.length(),
        }
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its bytes, where they are in memory.
    #[must_use]
    pub fn in_memory(&self) -> Option<&Bytes> {
        match &self.content {
            Content::Memory(bytes) => Some(bytes),
            Content::Spooled { .. } => None,
        }
    }

    /// The SHA-256 of its bytes, where they are not in memory.
    #[must_use]
    pub fn spooled_digest(&self) -> Option<[u8; 32]> {
        match &self.content {
            Content::Memory(_) => None,
            Content::Spooled { sha256, .. } => Some(*sha256),
        }
    }

    /// Its bytes, read back from the file where need be.
    pub async fn whole(&self) -> io::Result<Bytes> {
        match &self.content {
            Content::Memory(bytes) => Ok(bytes.clone()),
            Content::Spooled { file, .. } => file.whole().await,
        }
    }

    /// The same without some of its trailers.
    #[must_use]
    pub fn with_trailers(self, keep: impl FnOnce(HeaderMap) -> HeaderMap) -> Self {
        let trailers = self.trailers.map(keep).filter(|trailers| !trailers.is_empty());
        Self { trailers, ..self }
    }

    /// A body that sends it. May be called again.
    #[must_use]
    pub fn body(&self) -> Body {
        match (&self.content, &self.trailers) {
            (Content::Memory(bytes), None) => Body::full(bytes.clone()),
            (Content::Memory(bytes), Some(trailers)) => Body::with_trailers(bytes.clone(), trailers.clone()),
            // Trailers are rare, and rarer still with a spooled body. They are dropped, as any recipient may (RFC
            // 9110, 6.5.1).
            (Content::Spooled { file, .. }, _) => Body::relay(SpoolReader::new(Arc::clone(file)), ()),
        }
    }

    /// The trailers that [`Buffered::body`] ends in: then it must be sent in chunks.
    #[must_use]
    pub fn trailers(&self) -> Option<&HeaderMap> {
        self.trailers.as_ref().filter(|_| self.in_memory().is_some())
    }
}

impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Memory(bytes) => write!(f, "{} bytes in memory", bytes.len()),
            Self::Spooled { file, .. } => write!(f, "{} bytes spooled", file.length()),
        }
    }
}

struct Reader<'a> {
    buffer: CountedBuffer<'a>,
    /// In a box, as what awaits it: the future of every request with a body would have room for them.
    spool: Option<Box<SpoolWriter>>,
    length: u64,
    limit: u64,
    memory: Account<'a>,
    usage: &'a Usage,
}

impl Reader<'_> {
    async fn run(mut self, mut incoming: RequestBody) -> Result<Buffered, BufferError> {
        let mut trailers = None;
        while let Some(frame) = incoming.frame().await {
            match frame.map_err(BufferError::Malformed)?.into_data() {
                Ok(data) => self.take(data).await?,
                Err(frame) => trailers = frame.into_trailers().ok().map(without_forbidden_fields),
            }
        }
        let (last, _) = self.buffer.take();
        let content = match self.spool {
            None => Content::Memory(last),
            Some(spool) => {
                let (party, budget) = (self.memory.party(), Arc::clone(self.memory.budget()));
                let (file, sha256) =
                    Box::pin(async move { spool.write(last, party).await?.finish(budget).await }).await?;
                Content::Spooled { file, sha256 }
            }
        };
        Ok(Buffered { content, trailers })
    }

    async fn take(&mut self, data: Bytes) -> Result<(), BufferError> {
        self.length += data.len() as u64;
        if self.length > self.limit {
            return Err(BufferError::TooLarge { limit: self.limit });
        }
        // Data without room in memory goes to the file at once, after the data that is already buffered.
        let unplaced = self.buffer.push(data).err();
        let full = if self.spool.is_some() { self.buffer.len() >= spool::CHUNK } else { self.length > IN_MEMORY };
        if full || unplaced.is_some() {
            Box::pin(self.spill(unplaced)).await?;
        }
        Ok(())
    }

    /// Writes to the file what is buffered, and then what was not placed.
    async fn spill(&mut self, unplaced: Option<Bytes>) -> Result<(), BufferError> {
        let mut spool = match self.spool.take() {
            Some(spool) => *spool,
            None => SpoolWriter::create(self.usage).await?,
        };
        let (buffer, _) = self.buffer.take();
        for chunk in [buffer].into_iter().chain(unplaced) {
            spool = spool.write(chunk, self.memory.party()).await?;
        }
        self.spool = Some(Box::new(spool));
        Ok(())
    }
}
