//! The way from a client's socket to hyper and back.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, sleep_until, timeout_at};

use super::fault::Fault;
use super::interim::{Interim, Waiting};
use super::message::Message;
use crate::http::limits::Limits;
use crate::http::socket::read_on;
use crate::http::usage::Usage;
use crate::telemetry::limits::Limit;

/// What stands in for a request that is refused: hyper has it answered in its turn, and closes after that.
const STAND_IN: &[u8] = b"GET / HTTP/1.1\r\nhost: -\r\nconnection: close\r\n\r\n";

/// How much may come before it is known what protocol it is of.
const EARLY: usize = 64 << 10;

/// How long what a client still sends is read on after the last answer, and how long it may pause.
const LINGER: Duration = Duration::from_secs(30);
const LINGER_PAUSE: Duration = Duration::from_secs(2);

/// What the stream, and whoever answers, know of one connection.
#[derive(Debug)]
pub(in crate::http) struct Line<S> {
    /// The number of the request that is refused, counted from 1, and why.
    refused: OnceLock<(u64, Fault)>,
    /// How many exchanges have begun.
    exchanges: AtomicU64,
    /// How many requests have come whole.
    whole: AtomicU64,
    /// Whether it carries something else than HTTP by now.
    is_switched: AtomicBool,
    interim: Arc<Waiting>,
    /// The socket, once all is written.
    ended: Mutex<Option<S>>,
}

impl<S> Line<S> {
    pub(in crate::http) fn new() -> Arc<Self> {
        Arc::new(Self {
            refused: OnceLock::new(),
            exchanges: AtomicU64::new(0),
            whole: AtomicU64::new(0),
            is_switched: AtomicBool::new(false),
            interim: Arc::default(),
            ended: Mutex::new(None),
        })
    }

    /// Begins the next exchange, and gives its number. A fault where the request is none.
    pub(in crate::http) fn begin(&self) -> (u64, Result<Interim, Fault>) {
        let number = self.exchanges.fetch_add(1, Ordering::Relaxed) + 1;
        match self.refused.get() {
            Some((refused, fault)) if *refused == number => (number, Err(*fault)),
            _ => {
                self.interim.begin(number);
                (number, Ok(Interim::new(number, Arc::clone(&self.interim))))
            }
        }
    }

    /// Whether any exchange has begun.
    pub(in crate::http) fn has_begun(&self) -> bool {
        self.exchanges.load(Ordering::Relaxed) > 0
    }

    /// The answer of an exchange begins. Says whether the connection can go on after it: not where some of the request
    /// is still to come, or where it was to become something else.
    pub(in crate::http) fn answer(&self, number: u64, switches: bool) -> bool {
        self.interim.end();
        if switches {
            self.is_switched.store(true, Ordering::Release);
        }
        switches || self.whole.load(Ordering::Relaxed) >= number
    }
}

impl<S: AsyncRead + Unpin> Line<S> {
    /// Reads on what a client still sends after the last answer, for a while.
    ///
    /// The process ends no later for it: where `is_stopping`, one pause is all.
    pub(in crate::http) async fn linger(&self, is_stopping: bool) {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut socket) = ended else { return };
        let deadline = Instant::now() + if is_stopping { LINGER_PAUSE } else { LINGER };
        let _ = timeout_at(deadline, read_on(&mut socket, LINGER_PAUSE)).await;
    }
}

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

/// How long a client has been waited for.
struct Patience {
    /// Since when it has been, in this head or body.
    since: Option<Instant>,
    /// How long it was before, in this body.
    waited: Duration,
    /// How many bytes of the body have come.
    bytes: u64,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> Stream<S> {
    pub(in crate::http) fn new(socket: S, limits: Limits, usage: Arc<Usage>, line: Arc<Line<S>>) -> Self {
        // The first head is waited for from the beginning.
        let patience = Patience { since: Some(Instant::now()), waited: Duration::ZERO, bytes: 0, timer: None };
        Self {
            socket: Some(socket),
            line,
            usage,
            message: Message::new(limits),
            held: BytesMut::new(),
            ready: 0,
            is_new: false,
            requests: 0,
            end: None,
            patience,
            clear_for: 0,
            interim: Bytes::new(),
            stuck: None,
        }
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
        self.line.whole.store(self.requests - u64::from(!self.message.is_between()), Ordering::Relaxed);
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
        // Nothing is read any more, so this is the only one.
        let _ = self.line.refused.set((self.requests + 1, fault));
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

    /// Waits no longer than a client may take.
    fn poll_patience(&mut self, cx: &mut Context<'_>) -> Poll<Fault> {
        let limits = self.message.limits();
        let is_first = self.requests == 0;
        let (deadline, fault) = if self.message.is_in_body() {
            let since = *self.patience.since.get_or_insert_with(Instant::now);
            let earned = Duration::from_secs(self.patience.bytes / limits.min_body_rate.max(1));
            let left = (limits.body_timeout + earned).saturating_sub(self.patience.waited);
            let fault = if left < limits.body_timeout { Fault::BodyTooSlow } else { Fault::BodyPaused };
            (since + left.min(limits.body_timeout), fault)
        } else if is_first || !self.held.is_empty() && !self.message.is_elsewhere() {
            let since = *self.patience.since.get_or_insert_with(Instant::now);
            (since + limits.header_timeout, Fault::HeadTooSlow)
        } else {
            // How long it may be silent between two requests is hyper's to see to.
            return Poll::Pending;
        };
        let timer = self.patience.timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if deadline < timer.deadline() {
            timer.as_mut().reset(deadline);
        }
        loop {
            ready!(timer.as_mut().poll(cx));
            // It was set for something that was over sooner.
            if deadline <= timer.deadline() {
                return Poll::Ready(fault);
            }
            timer.as_mut().reset(deadline);
        }
    }
}

impl Patience {
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
            let is_switched = this.line.is_switched.load(Ordering::Acquire);
            if is_switched {
                this.ready = this.held.len();
            }
            if this.ready > 0 {
                let some = this.ready.min(buf.remaining());
                buf.put_slice(&this.held[..some]);
                this.held.advance(some);
                this.ready -= some;
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
                let fault = ready!(this.poll_patience(cx));
                if this.requests == 0 && this.held.is_empty() {
                    // It never said a word.
                    this.usage.exceeded(Limit::HeaderTimeout);
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
                this.refuse(fault);
                continue;
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
            match self.line.interim.take(self.clear_for) {
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
        self.clear_for = 0;
        let written = write(self.socket()?, cx);
        self.poll_taken(cx, written)
    }

    /// Whoever takes nothing of an answer for as long as a body may pause is not there: the upstream's connection is not
    /// kept for it.
    fn poll_taken(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() || self.line.is_switched.load(Ordering::Acquire) {
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
        self.clear_for = self.line.interim.wait(cx.waker());
        if self.poll_interim(cx)?.is_pending() {
            return self.poll_taken(cx, Poll::Pending).map_ok(|_| ());
        }
        self.socket()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.socket()?.poll_shutdown(cx))?;
        self.end = Some(End::Shut);
        Poll::Ready(Ok(()))
    }
}

impl<S> Drop for Stream<S> {
    fn drop(&mut self) {
        // One that failed is of no use.
        if let Some(End::Shut) = self.end {
            *self.line.ended.lock().unwrap_or_else(PoisonError::into_inner) = self.socket.take();
        }
    }
}
