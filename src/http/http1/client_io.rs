//! The I/O between a client's socket and hyper.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::connection::{ConnectionState, RefusedRequest};
use super::message::MessageParser;
use crate::http::fault::Fault;
use crate::http::limits::Limits;
use crate::http::socket::ClientStream;
use crate::http::usage::Usage;
use crate::telemetry::limits::Limit;

/// Replaces a refused request: hyper answers it in its turn, and then closes the connection.
const PLACEHOLDER: &[u8] = b"GET / HTTP/1.1\r\nhost: -\r\nconnection: close\r\n\r\n";

/// How much input is buffered while an upgrade is undecided.
const MAX_EARLY_DATA: usize = 64 << 10;

/// A client's socket. hyper sees only complete heads of valid requests.
pub(in crate::http) struct ClientIo<S> {
    /// `None` after it was handed over for draining.
    socket: Option<S>,
    state: Arc<ConnectionState<S>>,
    usage: Arc<Usage>,
    parser: MessageParser,
    /// Input that was not passed on yet.
    buffered: BytesMut,
    /// How many bytes of `buffered` may be passed on.
    ready: usize,
    /// Whether `buffered` has input that was not checked.
    is_new: bool,
    /// How many requests were passed on, complete or not.
    requests: u64,
    end: Option<ReadEnd>,
    timer: ReadTimer,
    /// The exchange whose interim responses may be written now.
    interim_allowed_for: u64,
    /// An interim response that is being written.
    interim: Bytes,
    /// Runs while the client accepts no output.
    write_timer: Option<Pin<Box<Sleep>>>,
    /// Whether all output is flushed.
    is_flushed: bool,
    /// Whether closing the socket is a reset.
    resets_on_close: bool,
    /// Woken by interim responses and by `timer`.
    waker: Option<Waker>,
}

/// Why no more input is read.
#[derive(Clone, Copy)]
enum ReadEnd {
    /// The request was refused and replaced by the placeholder.
    Refused,
    /// The fault occurred in a body.
    Broken(Fault),
    /// The output is shut down.
    Shut,
}

/// The part of a message that the next input belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReadPhase {
    /// The next request, of which no byte has arrived.
    Idle,
    /// The rest of a head; or the first head of a new connection.
    Head,
    /// More of a body.
    Body,
}

/// The read timeout.
struct ReadTimer {
    what: ReadPhase,
    /// When the current wait in this head or body started.
    since: Option<Instant>,
    /// The sum of earlier waits in this body.
    waited: Duration,
    /// How many bytes of the body have arrived.
    bytes: u64,
    timer: Option<Pin<Box<Sleep>>>,
    /// Whether it was polled since it was set or since the waker changed.
    is_polled: bool,
}

impl<S> ClientIo<S> {
    /// `read` was read from the socket before. The timeout of the first head starts at `since`.
    pub(in crate::http) fn new(
        socket: S,
        (read, since): (BytesMut, Instant),
        limits: Limits,
        usage: Arc<Usage>,
        state: Arc<ConnectionState<S>>,
    ) -> Self {
        let (what, since) = (ReadPhase::Head, Some(since));
        let timer = ReadTimer { what, since, waited: Duration::ZERO, bytes: 0, timer: None, is_polled: false };
        Self {
            socket: Some(socket),
            state,
            usage,
            parser: MessageParser::new(limits),
            is_new: !read.is_empty(),
            buffered: read,
            ready: 0,
            requests: 0,
            end: None,
            timer,
            interim_allowed_for: 0,
            interim: Bytes::new(),
            write_timer: None,
            is_flushed: true,
            resets_on_close: false,
            waker: None,
        }
    }

    /// Stores the task's waker.
    fn register_waker(&mut self, cx: &Context<'_>) {
        if self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            return;
        }
        self.waker = Some(cx.waker().clone());
        self.state.interim().set_waker(cx.waker());
        self.timer.is_polled = false;
    }

    fn socket(&mut self) -> io::Result<Pin<&mut S>>
    where
        S: Unpin,
    {
        self.socket.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Records bytes that are passed on.
    fn passed(&mut self, was_between: bool, bytes: usize) {
        self.requests += u64::from(was_between);
        self.state.received(self.requests - u64::from(!self.parser.is_between()));
        self.timer.progressed(was_between, self.parser.is_in_body(), bytes as u64);
    }

    /// Refuses malformed input, of a request with this head.
    fn refuse(&mut self, fault: Fault, head: Bytes) {
        if let Some(limit) = fault.limit() {
            self.usage.exceeded(limit);
        }
        if self.parser.is_in_body() {
            self.end = Some(ReadEnd::Broken(fault));
            return;
        }
        self.state.refuse(self.requests + 1, RefusedRequest { fault, head });
        self.buffered = BytesMut::from(PLACEHOLDER);
        self.ready = PLACEHOLDER.len();
        self.end = Some(ReadEnd::Refused);
    }

    /// Checks the buffered input. Returns false if none of it can be passed on yet.
    fn judge(&mut self) -> bool {
        if self.buffered.is_empty() || !std::mem::take(&mut self.is_new) {
            return false;
        }
        let was_between = self.parser.is_between();
        match self.parser.follow(&self.buffered) {
            Ok(0) => return false,
            Ok(some) => {
                self.ready = some;
                self.is_new = some < self.buffered.len();
                self.passed(was_between, some);
            }
            Err(fault) => self.refuse(fault, head_of(&self.buffered)),
        }
        true
    }

    /// Checks the input just read into `buf`, and buffers the part that cannot be passed on yet. Returns false if none
    /// can.
    fn judge_read(&mut self, buf: &mut ReadBuf<'_>, before: usize) -> bool {
        let was_between = self.parser.is_between();
        let read = &buf.filled()[before..];
        match self.parser.follow(read) {
            Ok(some) => {
                if some < read.len() {
                    self.buffered.extend_from_slice(&read[some..]);
                    self.is_new = some > 0;
                    buf.set_filled(before + some);
                }
                if some > 0 {
                    self.passed(was_between, some);
                }
                some > 0
            }
            Err(fault) => {
                let head = head_of(read);
                buf.set_filled(before);
                self.refuse(fault, head);
                false
            }
        }
    }

    /// The input that the gate waits for, if it waits for the client.
    fn read_phase(&self) -> Option<ReadPhase> {
        if self.parser.is_in_body() {
            Some(ReadPhase::Body)
        } else if self.requests == 0 || !self.buffered.is_empty() && !self.parser.is_upgraded() {
            Some(ReadPhase::Head)
        } else if self.is_flushed && self.state.is_idle() {
            Some(ReadPhase::Idle)
        } else {
            None
        }
    }

    /// Returns the fault when the client has taken too long, or `None` for an idle connection.
    fn poll_read_timeout(&mut self, cx: &mut Context<'_>) -> Poll<Option<Fault>> {
        let Some(what) = self.read_phase() else { return Poll::Pending };
        if what != std::mem::replace(&mut self.timer.what, what) {
            self.timer.since = None;
        }
        let since = *self.timer.since.get_or_insert_with(Instant::now);
        let limits = self.parser.limits();
        let (wait, fault) = match what {
            ReadPhase::Idle => (limits.idle_timeout, None),
            ReadPhase::Head => (limits.header_timeout, Some(Fault::HeadTooSlow)),
            ReadPhase::Body => {
                let (wait, fault) = limits.body_wait(self.timer.waited, self.timer.bytes);
                (wait, Some(fault))
            }
        };
        self.register_waker(cx);
        self.timer.poll_until(since + wait, cx).map(|()| fault)
    }
}

impl ReadTimer {
    fn poll_until(&mut self, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if deadline < timer.deadline() {
            timer.as_mut().reset(deadline);
            self.is_polled = false;
        }
        // It has the current waker already.
        if self.is_polled && !timer.is_elapsed() {
            return Poll::Pending;
        }
        self.is_polled = true;
        poll_until(timer.as_mut(), deadline, cx)
    }

    fn progressed(&mut self, is_head: bool, is_in_body: bool, bytes: u64) {
        let since = self.since.take();
        if is_head || !is_in_body {
            (self.waited, self.bytes) = (Duration::ZERO, 0);
        } else {
            self.waited += since.map_or(Duration::ZERO, |since| since.elapsed());
            self.bytes += bytes;
        }
    }
}

/// Waits until a deadline, which may be another one each time.
pub(in crate::http) fn poll_until(mut timer: Pin<&mut Sleep>, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
    if deadline < timer.deadline() {
        timer.as_mut().reset(deadline);
    }
    loop {
        ready!(timer.as_mut().poll(cx));
        // It was set for an earlier deadline.
        if deadline <= timer.deadline() {
            return Poll::Ready(());
        }
        timer.as_mut().reset(deadline);
    }
}

/// The complete header lines at the start of the input.
fn head_of(input: &[u8]) -> Bytes {
    let input = input.trim_ascii_start();
    // A malformed one may end in LF alone.
    let ends = [&b"\r\n\r\n"[..], b"\n\n"].map(|end| memchr::memmem::find(input, end).map(|at| at + end.len() / 2));
    let end = ends.into_iter().flatten().min().or_else(|| memchr::memrchr(b'\n', input).map(|end| end + 1));
    Bytes::copy_from_slice(&input[..end.unwrap_or(0)])
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientIo<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            let is_upgraded = this.state.is_upgraded();
            if is_upgraded {
                this.ready = this.buffered.len();
            }
            if this.ready > 0 {
                let some = this.ready.min(buf.remaining());
                buf.put_slice(&this.buffered[..some]);
                this.buffered.advance(some);
                this.ready -= some;
                if this.buffered.is_empty() {
                    // Input is rarely buffered: an idle connection keeps no memory for it.
                    this.buffered = BytesMut::new();
                }
                return Poll::Ready(Ok(()));
            }
            if is_upgraded {
                return this.socket()?.poll_read(cx, buf);
            }
            match this.end {
                None => {}
                // The reader waits for the client to close.
                Some(ReadEnd::Refused | ReadEnd::Shut) => return Poll::Pending,
                Some(ReadEnd::Broken(fault)) => return Poll::Ready(Err(fault.into())),
            }
            if this.judge() {
                continue;
            }
            if this.parser.is_upgraded() && this.buffered.len() >= MAX_EARLY_DATA {
                return Poll::Pending;
            }
            let before = buf.filled().len();
            if this.socket()?.poll_read(cx, buf)?.is_pending() {
                match ready!(this.poll_read_timeout(cx)) {
                    // The client has sent nothing at all.
                    Some(fault) if this.requests == 0 && this.buffered.is_empty() => {
                        fault.limit().into_iter().for_each(|limit| this.usage.exceeded(limit));
                    }
                    Some(fault) => {
                        this.refuse(fault, head_of(&this.buffered));
                        continue;
                    }
                    None => this.usage.exceeded(Limit::IdleTimeout),
                }
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            if buf.filled().len() == before {
                return Poll::Ready(Ok(()));
            }
            if this.buffered.is_empty() {
                if this.judge_read(buf, before) {
                    return Poll::Ready(Ok(()));
                }
                continue;
            }
            this.buffered.extend_from_slice(&buf.filled()[before..]);
            this.is_new = true;
            buf.set_filled(before);
        }
    }
}

impl<S: ClientStream> ClientIo<S> {
    /// Whether closing the socket is to be a reset.
    fn reset_on_close(&mut self, resets: bool) {
        if self.resets_on_close != resets {
            self.resets_on_close = resets;
            self.socket.iter().for_each(|socket| socket.reset_on_close(resets));
        }
    }

    /// Writes the queued interim responses, unless a response is being written.
    fn poll_interim(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            while !self.interim.is_empty() {
                let socket = self.socket.as_mut().map(Pin::new).ok_or(io::ErrorKind::NotConnected)?;
                let written = ready!(socket.poll_write(cx, &self.interim))?;
                if written == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.interim.advance(written);
            }
            match self.state.interim().take(self.interim_allowed_for) {
                Some(next) => self.interim = next,
                None => return Poll::Ready(Ok(())),
            }
        }
    }

    /// Writes hyper's output, behind the queued interim responses.
    fn poll_written(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut S>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if self.poll_interim(cx)?.is_pending() {
            return self.poll_write_timeout(cx, Poll::Pending);
        }
        (self.interim_allowed_for, self.is_flushed) = (0, false);
        if self.state.resets_if_broken() {
            self.reset_on_close(true);
        }
        let written = write(self.socket()?, cx);
        self.poll_write_timeout(cx, written)
    }

    /// Fails a write when the client has accepted no output for `body_timeout`: it does not keep the upstream's
    /// connection occupied.
    fn poll_write_timeout(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() || self.state.is_upgraded() {
            self.write_timer = None;
            return written;
        }
        let limit = self.parser.limits().body_timeout;
        ready!(self.write_timer.get_or_insert_with(|| Box::pin(sleep(limit))).as_mut().poll(cx));
        self.usage.exceeded(Limit::BodyTimeout);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: ClientStream> AsyncWrite for ClientIo<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_written(cx, |socket, cx| socket.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_written(cx, |socket, cx| socket.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper flushes when it has no more output.
        self.register_waker(cx);
        self.interim_allowed_for = self.state.interim().open_exchange();
        if self.poll_interim(cx)?.is_pending() {
            return self.poll_write_timeout(cx, Poll::Pending).map_ok(|_| ());
        }
        let flushed = self.socket()?.poll_flush(cx)?;
        if flushed.is_pending() {
            // TLS buffers output until it is flushed.
            return self.poll_write_timeout(cx, Poll::Pending).map_ok(|_| ());
        }
        (self.is_flushed, self.write_timer) = (true, None);
        // hyper may have read before this flush, and does not read again after it.
        if self.read_phase() == Some(ReadPhase::Idle) && self.poll_read_timeout(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.socket()?.poll_shutdown(cx)?.is_pending() {
            // A TLS close notification must be written too.
            return self.poll_write_timeout(cx, Poll::Pending).map_ok(|_| ());
        }
        self.reset_on_close(false);
        self.end = Some(ReadEnd::Shut);
        Poll::Ready(Ok(()))
    }
}

impl<S> Drop for ClientIo<S> {
    fn drop(&mut self) {
        let is_shut = matches!(self.end, Some(ReadEnd::Shut));
        // After the answer to an upgrade that did not come about, hyper drops the socket instead of shutting it down.
        let is_declined = self.parser.is_upgraded() && !self.state.is_upgraded() && self.is_flushed;
        // A failed socket is not drained.
        if is_shut || is_declined {
            self.state.end(self.socket.take());
        }
    }
}
