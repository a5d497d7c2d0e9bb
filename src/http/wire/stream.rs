//! The way from a client's socket to hyper and back.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::fault::Fault;
use super::line::Line;
use super::message::Message;
use crate::http::limits::Limits;
use crate::http::usage::Usage;
use crate::telemetry::limits::Limit;

/// What stands in for a request that is refused: hyper has it answered in its turn, and closes after that.
const STAND_IN: &[u8] = b"GET / HTTP/1.1\r\nhost: -\r\nconnection: close\r\n\r\n";

/// How much may come before it is known what protocol it is of.
const EARLY: usize = 64 << 10;

/// A client's socket, of which hyper sees whole and sound requests only.
pub(in crate::http) struct Stream<S> {
    /// Nothing once it is given back.
    socket: Option<S>,
    line: Arc<Line<S>>,
    usage: Arc<Usage>,
    message: Message,
    /// What has come and not gone on.
    held: BytesMut,
    /// So many bytes of it may go on.
    ready: usize,
    /// Whether something has come since it was last judged.
    is_new: bool,
    /// How many requests have gone on, whole or not.
    requests: u64,
    end: Option<End>,
    patience: Patience,
    /// The exchange of which alone something can be under way.
    clear_for: u64,
    /// An interim answer that is under way.
    interim: Bytes,
    /// Runs while the client takes nothing of what is to be written.
    stuck: Option<Pin<Box<Sleep>>>,
    /// Whether nothing is left to be written.
    is_flushed: bool,
    /// Who is woken, by interim answers and by the timer of `patience`.
    waker: Option<Waker>,
}

/// Nothing more is read.
#[derive(Clone, Copy)]
enum End {
    /// The stand-in says why.
    Refused,
    /// In the middle of a body.
    Broken(Fault),
    /// Everything is written.
    Shut,
}

/// What a client is waited for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Awaited {
    /// The head of its next request, of which nothing has come.
    Request,
    /// The rest of a head; or any, on a new connection.
    Head,
    /// More of a body.
    Body,
}

/// How long a client has been waited for.
struct Patience {
    what: Awaited,
    /// Since when it has been, in this head or body.
    since: Option<Instant>,
    /// How long it was before, in this body.
    waited: Duration,
    /// How many bytes of the body have come.
    bytes: u64,
    timer: Option<Pin<Box<Sleep>>>,
    /// Whether it was polled since it was set, or since somebody else is woken.
    is_polled: bool,
}

impl<S> Stream<S> {
    /// `read` was read from the socket before; the first head is waited for since then.
    pub(in crate::http) fn new(
        socket: S,
        (read, since): (BytesMut, Instant),
        limits: Limits,
        usage: Arc<Usage>,
        line: Arc<Line<S>>,
    ) -> Self {
        let (what, since) = (Awaited::Head, Some(since));
        let patience = Patience { what, since, waited: Duration::ZERO, bytes: 0, timer: None, is_polled: false };
        Self {
            socket: Some(socket),
            line,
            usage,
            message: Message::new(limits),
            is_new: !read.is_empty(),
            held: read,
            ready: 0,
            requests: 0,
            end: None,
            patience,
            clear_for: 0,
            interim: Bytes::new(),
            stuck: None,
            is_flushed: true,
            waker: None,
        }
    }

    /// Takes note of who is woken.
    fn known(&mut self, cx: &Context<'_>) {
        if self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            return;
        }
        self.waker = Some(cx.waker().clone());
        self.line.interim().wake(cx.waker());
        self.patience.is_polled = false;
    }

    fn socket(&mut self) -> io::Result<Pin<&mut S>>
    where
        S: Unpin,
    {
        self.socket.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Takes note of bytes that go on.
    fn passed(&mut self, was_between: bool, bytes: usize) {
        self.requests += u64::from(was_between);
        self.line.came(self.requests - u64::from(!self.message.is_between()));
        self.patience.moved(was_between, self.message.is_in_body(), bytes as u64);
    }

    /// What came is no message.
    fn refuse(&mut self, fault: Fault) {
        if let Some(limit) = fault.limit() {
            self.usage.exceeded(limit);
        }
        if self.message.is_in_body() {
            self.end = Some(End::Broken(fault));
            return;
        }
        self.line.refuse(self.requests + 1, fault);
        self.held = BytesMut::from(STAND_IN);
        self.ready = STAND_IN.len();
        self.end = Some(End::Refused);
    }

    /// Judges what is held. False where nothing of it goes on yet.
    fn judge(&mut self) -> bool {
        if self.held.is_empty() || !std::mem::take(&mut self.is_new) {
            return false;
        }
        let was_between = self.message.is_between();
        match self.message.follow(&self.held) {
            Ok(0) => return false,
            Ok(some) => {
                self.ready = some;
                self.is_new = some < self.held.len();
                self.passed(was_between, some);
            }
            Err(fault) => self.refuse(fault),
        }
        true
    }

    /// Judges what has just been read into `buf`, and takes back what does not go on yet. False where nothing does.
    fn judge_read(&mut self, buf: &mut ReadBuf<'_>, before: usize) -> bool {
        let was_between = self.message.is_between();
        let read = &buf.filled()[before..];
        match self.message.follow(read) {
            Ok(some) => {
                if some < read.len() {
                    self.held.extend_from_slice(&read[some..]);
                    self.is_new = some > 0;
                    buf.set_filled(before + some);
                }
                if some > 0 {
                    self.passed(was_between, some);
                }
                some > 0
            }
            Err(fault) => {
                buf.set_filled(before);
                self.refuse(fault);
                false
            }
        }
    }

    /// What the client is waited for, if it is.
    fn awaited(&self) -> Option<Awaited> {
        if self.message.is_in_body() {
            Some(Awaited::Body)
        } else if self.requests == 0 || !self.held.is_empty() && !self.message.is_elsewhere() {
            Some(Awaited::Head)
        } else if self.is_flushed && self.line.is_idle() {
            Some(Awaited::Request)
        } else {
            None
        }
    }

    /// Waits no longer than a client may take. Nothing is wrong where a client has no more requests.
    fn poll_patience(&mut self, cx: &mut Context<'_>) -> Poll<Option<Fault>> {
        let Some(what) = self.awaited() else { return Poll::Pending };
        if what != std::mem::replace(&mut self.patience.what, what) {
            self.patience.since = None;
        }
        let since = *self.patience.since.get_or_insert_with(Instant::now);
        let limits = self.message.limits();
        let (patience, fault) = match what {
            Awaited::Request => (limits.idle_timeout, None),
            Awaited::Head => (limits.header_timeout, Some(Fault::HeadTooSlow)),
            Awaited::Body => {
                let (patience, fault) = limits.patience_in_body(self.patience.waited, self.patience.bytes);
                (patience, Some(fault))
            }
        };
        self.known(cx);
        self.patience.poll_until(since + patience, cx).map(|()| fault)
    }
}

impl Patience {
    fn poll_until(&mut self, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if deadline < timer.deadline() {
            timer.as_mut().reset(deadline);
            self.is_polled = false;
        }
        // It wakes whom it was polled for.
        if self.is_polled && !timer.is_elapsed() {
            return Poll::Pending;
        }
        self.is_polled = true;
        loop {
            ready!(timer.as_mut().poll(cx));
            // It was set for something that was over sooner.
            if deadline <= timer.deadline() {
                return Poll::Ready(());
            }
            timer.as_mut().reset(deadline);
        }
    }

    fn moved(&mut self, is_head: bool, is_in_body: bool, bytes: u64) {
        let since = self.since.take();
        if is_head || !is_in_body {
            (self.waited, self.bytes) = (Duration::ZERO, 0);
        } else {
            self.waited += since.map_or(Duration::ZERO, |since| since.elapsed());
            self.bytes += bytes;
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Stream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            let is_switched = this.line.is_switched();
            if is_switched {
                this.ready = this.held.len();
            }
            if this.ready > 0 {
                let some = this.ready.min(buf.remaining());
                buf.put_slice(&this.held[..some]);
                this.held.advance(some);
                this.ready -= some;
                if this.held.is_empty() {
                    // Seldom is anything held: a connection that waits keeps no room for it.
                    this.held = BytesMut::new();
                }
                return Poll::Ready(Ok(()));
            }
            if is_switched {
                return this.socket()?.poll_read(cx, buf);
            }
            match this.end {
                None => {}
                // Whoever reads on waits for the client to leave.
                Some(End::Refused | End::Shut) => return Poll::Pending,
                Some(End::Broken(fault)) => return Poll::Ready(Err(fault.into())),
            }
            if this.judge() {
                continue;
            }
            if this.message.is_elsewhere() && this.held.len() >= EARLY {
                return Poll::Pending;
            }
            let before = buf.filled().len();
            if this.socket()?.poll_read(cx, buf)?.is_pending() {
                match ready!(this.poll_patience(cx)) {
                    // It never said a word.
                    Some(fault) if this.requests == 0 && this.held.is_empty() => {
                        fault.limit().into_iter().for_each(|limit| this.usage.exceeded(limit));
                    }
                    Some(fault) => {
                        this.refuse(fault);
                        continue;
                    }
                    None => this.usage.exceeded(Limit::IdleTimeout),
                }
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            if buf.filled().len() == before {
                return Poll::Ready(Ok(()));
            }
            if this.held.is_empty() {
                if this.judge_read(buf, before) {
                    return Poll::Ready(Ok(()));
                }
                continue;
            }
            this.held.extend_from_slice(&buf.filled()[before..]);
            this.is_new = true;
            buf.set_filled(before);
        }
    }
}

impl<S: AsyncWrite + Unpin> Stream<S> {
    /// Writes the interim answers that wait, unless something is under way that they would be part of.
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
            match self.line.interim().take(self.clear_for) {
                Some(next) => self.interim = next,
                None => return Poll::Ready(Ok(())),
            }
        }
    }

    /// Writes something of hyper's, behind the interim answers that wait.
    fn poll_written(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut S>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if self.poll_interim(cx)?.is_pending() {
            return self.poll_taken(cx, Poll::Pending);
        }
        (self.clear_for, self.is_flushed) = (0, false);
        let written = write(self.socket()?, cx);
        self.poll_taken(cx, written)
    }

    /// Whoever takes nothing of an answer for as long as a body may pause is not there: the upstream's connection is not
    /// kept for it.
    fn poll_taken(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() || self.line.is_switched() {
            self.stuck = None;
            return written;
        }
        let patience = self.message.limits().body_timeout;
        ready!(self.stuck.get_or_insert_with(|| Box::pin(sleep(patience))).as_mut().poll(cx));
        self.usage.exceeded(Limit::BodyTimeout);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Stream<S> {
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
        // It is hyper that flushes, when nothing of its own is left to write.
        self.known(cx);
        self.clear_for = self.line.interim().open();
        if self.poll_interim(cx)?.is_pending() {
            return self.poll_taken(cx, Poll::Pending).map_ok(|_| ());
        }
        let flushed = self.socket()?.poll_flush(cx)?;
        if flushed.is_pending() {
            // What is encrypted is held until then.
            return self.poll_taken(cx, Poll::Pending).map_ok(|_| ());
        }
        (self.is_flushed, self.stuck) = (true, None);
        // hyper may have tried to read before, and does not when this was the last thing to do.
        if self.awaited() == Some(Awaited::Request) && self.poll_patience(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.socket()?.poll_shutdown(cx)?.is_pending() {
            // The last words of an encrypted connection are to be written too.
            return self.poll_taken(cx, Poll::Pending).map_ok(|_| ());
        }
        self.end = Some(End::Shut);
        Poll::Ready(Ok(()))
    }
}

impl<S> Drop for Stream<S> {
    fn drop(&mut self) {
        // One that failed is of no use.
        if let Some(End::Shut) = self.end {
            self.line.end(self.socket.take());
        }
    }
}
