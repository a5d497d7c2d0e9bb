//! Filters the frames of an upstream beneath hyper.

use std::collections::VecDeque;
use std::future::{Future as _, poll_fn};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::unconstrained;
use tokio::time::{Instant, Sleep, sleep_until};

use super::connection::MAX_INTERIM;
use super::remote_state::RemoteState;
use crate::http::frame::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADER, HEADERS, RST_STREAM, SETTINGS, length,
};

/// The offsets of kind and flags in a frame header.
const KIND: usize = 3;
const FLAGS: usize = 4;

/// An unknown frame type, which recipients ignore (RFC 9113, 5.5).
const UNKNOWN_KIND: u8 = 0xFF;

const NO_ERROR: [u8; 4] = [0, 0, 0, 0];
const INTERNAL_ERROR: [u8; 4] = [0, 0, 0, 2];
const REFUSED_STREAM: [u8; 4] = [0, 0, 0, 7];

const MAX_CONCURRENT_STREAMS: u16 = 3;

/// How many ended, and how many partly answered streams are remembered: a reset after the end follows it soon.
const MAX_REMEMBERED: usize = 256;

/// How long after a GOAWAY a response may still arrive on a stream above its last stream ID.
const GOAWAY_GRACE: Duration = Duration::from_millis(100);

/// For how long it may still be read then, before what has come counts as late: a gate that stood still reads late what came in time.
const GOAWAY_OVERDUE: Duration = Duration::from_secs(1);

/// A connection on which more bytes than this were dropped accepts no more requests: h2 does not see them, and so
/// never returns their share of the connection window, which is four times as large.
const MAX_DROPPED: u64 = 64 << 20;

/// The size of the read buffer that is used if the caller's is too small, or if bytes from an earlier read wait.
const SCRATCH: usize = 1024;

/// I/O that inspects and rewrites the frames that arrive.
///
/// A complete response takes precedence over a reset of its stream, whatever the code, and a reset before the end never makes
/// it complete (RFC 9113, 8.1). hyper treats the first as a failure, and the second, if it has no error, as the end. So resets
/// are rewritten: without an error if the response had ended, else with one. A GOAWAY always gets an error, because it ends the
/// streams that it excludes as a reset does.
///
/// A stream on which an upstream has started to respond, if only with an interim response, was processed (RFC 9113, 8.7): a
/// reset that refuses it becomes an internal error. A GOAWAY reaches hyper [`GOAWAY_GRACE`] later, or when the connection ends,
/// behind resets of the streams that it excludes and that have a response. A response that is complete by then counts.
///
/// hyper does not limit interim responses. A stream with more than [`MAX_INTERIM`] of them is reset.
///
/// An empty DATA frame without END_STREAM means nothing, and some servers send one with every response. h2 ends a connection,
/// with all its streams, at the hundredth of them. They reach h2 as frames of an unknown type.
///
/// A frame header is passed on when it is complete.
pub(super) struct FrameFilter<T> {
    inner: T,
    reader: FrameReader,
    /// Bytes to return before any other.
    ready: BytesMut,
    /// Bytes that wait for more input, or for `ready` to be returned.
    unread: BytesMut,
    /// The result of the last read, at the end of the input.
    end: Option<io::Result<()>>,
    /// When a held GOAWAY is returned.
    goaway_timer: Option<Pin<Box<Sleep>>>,
}

struct FrameReader {
    remote: Arc<RemoteState>,
    /// The header of the current frame, as it was returned.
    header: [u8; HEADER],
    /// How much of the payload has yet to arrive.
    left: usize,
    /// How much of the payload has arrived.
    at: usize,
    setting: [u8; 6],
    /// A header block continues in the next frame.
    is_in_block: bool,
    /// The last streams whose responses have ended.
    ended: VecDeque<u32>,
    /// The streams whose responses have started.
    open: VecDeque<OpenStream>,
    /// Streams up to this one may have a response too.
    forgotten: u32,
    /// The current frame is a GOAWAY, which is returned later.
    is_goaway: bool,
    /// Its last stream ID and error code.
    goaway_payload: [u8; 8],
    /// The last complete GOAWAY that was not returned yet, and when it arrived.
    goaway: Option<([u8; 8], Instant)>,
    /// The last stream ID of the GOAWAY that was returned: h2 has closed the streams above it.
    last: u32,
    /// How many bytes of bodies were dropped.
    dropped: u64,
}

/// A stream whose response has started and not ended.
struct OpenStream {
    stream: u32,
    /// How many header blocks arrived before the body.
    heads: usize,
    is_reset: bool,
}

impl<T> FrameFilter<T> {
    pub(super) fn new(inner: T, remote: Arc<RemoteState>) -> Self {
        let (ready, unread) = (BytesMut::new(), BytesMut::new());
        Self { inner, reader: FrameReader::new(remote), ready, unread, end: None, goaway_timer: None }
    }

    /// For how long a held GOAWAY has been due, if it is; otherwise `cx` is woken when it is.
    fn goaway_due_for(&mut self, cx: &mut Context<'_>) -> Option<Duration> {
        let (_, since) = self.reader.goaway?;
        let at = since + GOAWAY_GRACE;
        let goaway_timer = self.goaway_timer.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if goaway_timer.deadline() != at {
            goaway_timer.as_mut().reset(at);
        }
        goaway_timer.as_mut().poll(cx).is_ready().then(|| at.elapsed())
    }

    /// Returns a held GOAWAY, unless a frame is under way. Returns whether there was one to return.
    fn emit_goaway(&mut self) -> bool {
        let may = self.reader.goaway.is_some() && self.reader.is_between();
        if may {
            self.goaway_timer = None;
            self.reader.emit_goaway(&mut self.ready);
        }
        may
    }

    /// Filters the input. Returns whether any of it can be returned.
    fn filter_unread(&mut self) -> bool {
        let (passed, reset) = self.reader.read(&mut self.unread);
        self.ready.extend_from_slice(&self.unread.split_to(passed));
        self.ready.extend_from_slice(reset.as_ref().map_or(&[], |reset| &reset[..]));
        !self.ready.is_empty()
    }
}

impl FrameReader {
    fn new(remote: Arc<RemoteState>) -> Self {
        Self {
            remote,
            header: [0; HEADER],
            left: 0,
            at: 0,
            setting: [0; 6],
            is_in_block: false,
            ended: VecDeque::new(),
            open: VecDeque::new(),
            forgotten: 0,
            is_goaway: false,
            goaway_payload: [0; 8],
            goaway: None,
            last: u32::MAX,
            dropped: 0,
        }
    }

    /// Returns how many of these bytes may be passed on, and a frame to insert behind them. The caller passes the rest
    /// again, with more input behind it.
    fn read(&mut self, bytes: &mut [u8]) -> (usize, Option<[u8; HEADER + 4]>) {
        let mut passed = 0;
        loop {
            let rest = &mut bytes[passed..];
            if self.left == 0 {
                let Some(header) = rest.first_chunk_mut::<HEADER>() else { return (passed, None) };
                if let Some(reset) = self.begin(header) {
                    return (passed, Some(reset));
                }
                self.header = *header;
                (self.left, self.at) = (length(self.header) as usize, 0);
                passed += HEADER;
            } else if rest.is_empty() {
                return (passed, None);
            } else {
                let count = rest.len().min(self.left);
                self.payload(&mut rest[..count]);
                self.at += count;
                self.left -= count;
                passed += count;
            }
            if self.left == 0 {
                self.end();
            }
        }
    }

    /// Whether any frame may follow.
    fn is_between(&self) -> bool {
        self.left == 0 && !self.is_in_block
    }

    fn kind(&self) -> u8 {
        self.header[KIND]
    }

    fn has_flag(&self, flag: u8) -> bool {
        self.header[FLAGS] & flag != 0
    }

    /// Handles a frame header. Returns a frame to insert before it.
    fn begin(&mut self, header: &mut [u8; HEADER]) -> Option<[u8; HEADER + 4]> {
        let stream = stream_of(header);
        let has_end = header[FLAGS] & END_STREAM != 0;
        match header[KIND] {
            HEADERS => {
                let is_left_out = stream > self.last;
                let open = self.response_head(stream);
                open.heads += 1;
                open.is_reset |= is_left_out;
                // The last one may be the final response.
                if open.heads > MAX_INTERIM + 1 && !open.is_reset {
                    open.is_reset = true;
                    return Some(reset(stream, INTERNAL_ERROR));
                }
                if open.is_reset {
                    // h2 ends a connection for trailers behind a reset, but only the stream for what are no trailers.
                    header[FLAGS] &= !END_STREAM;
                }
            }
            DATA => match self.open.iter_mut().find(|open| open.stream == stream) {
                Some(open) if open.is_reset => {
                    header[KIND] = UNKNOWN_KIND;
                    self.dropped += u64::from(length(*header));
                    if self.dropped > MAX_DROPPED {
                        self.remote.is_going_away.store(true, Ordering::Relaxed);
                    }
                }
                Some(open) => open.heads = 1,
                None => {}
            },
            GOAWAY => self.remote.is_going_away.store(true, Ordering::Relaxed),
            _ => {}
        }
        if header[KIND] == DATA && header[..KIND] == [0; KIND] && !has_end {
            header[KIND] = UNKNOWN_KIND;
        }
        self.is_goaway = header[KIND] == GOAWAY && length(*header) as usize >= self.goaway_payload.len() && stream == 0;
        if self.is_goaway {
            header[KIND] = UNKNOWN_KIND;
        }
        None
    }

    /// The stream, whose response has started.
    fn response_head(&mut self, stream: u32) -> &mut OpenStream {
        let place = self.open.iter().position(|open| open.stream == stream).unwrap_or_else(|| {
            if self.open.len() == MAX_REMEMBERED
                && let Some(OpenStream { stream, .. }) = self.open.pop_front()
            {
                self.forgotten = self.forgotten.max(stream);
            }
            self.open.push_back(OpenStream { stream, heads: 0, is_reset: false });
            self.open.len() - 1
        });
        &mut self.open[place]
    }

    fn has_response(&self, stream: u32) -> bool {
        stream <= self.forgotten || self.open.iter().any(|open| open.stream == stream)
    }

    fn payload(&mut self, now: &mut [u8]) {
        match self.kind() {
            SETTINGS if !self.has_flag(ACK) => {
                for (place, byte) in (self.at..).zip(&*now) {
                    self.setting[place % 6] = *byte;
                    if place % 6 == 5 {
                        self.apply_setting();
                    }
                }
            }
            RST_STREAM => self.rewrite_reset(now),
            UNKNOWN_KIND if self.is_goaway => {
                for (goaway_payload, byte) in self.goaway_payload.iter_mut().skip(self.at).zip(&*now) {
                    *goaway_payload = *byte;
                }
            }
            _ => {}
        }
    }

    fn apply_setting(&self) {
        let [a, b, value @ ..] = self.setting;
        if u16::from_be_bytes([a, b]) == MAX_CONCURRENT_STREAMS {
            self.remote.max_streams.store(u32::from_be_bytes(value) as usize, Ordering::Relaxed);
        }
    }

    /// Rewrites the error code of a reset, as far as it has arrived.
    fn rewrite_reset(&mut self, now: &mut [u8]) {
        let stream = stream_of(&self.header);
        if self.ended.contains(&stream) {
            for (place, byte) in (self.at..).zip(now) {
                *byte = NO_ERROR.get(place).copied().unwrap_or(*byte);
            }
            return;
        }
        let has_response = self.has_response(stream);
        // Rewritten codes differ from other codes in use only in the last byte. If that arrives in a separate read,
        // the three bytes before it were passed on, and are the same in all of them.
        for (place, byte) in (self.at..).zip(now) {
            let Some(goaway_payload) = self.setting.get_mut(place) else { continue };
            *goaway_payload = *byte;
            if place == 3 && (self.setting[..4] == NO_ERROR || has_response && self.setting[..4] == REFUSED_STREAM) {
                *byte = INTERNAL_ERROR[3];
            }
        }
    }

    /// Emits the GOAWAY, behind resets of the streams that it excludes and that have a response.
    fn emit_goaway(&mut self, out: &mut BytesMut) {
        let Some(([a, b, c, d, code @ ..], _)) = self.goaway.take() else { return };
        let last = (u32::from_be_bytes([a, b, c, d]) & (u32::MAX >> 1)).max(self.forgotten);
        for stream in self.ended.iter().filter(|stream| (last + 1..=self.last).contains(*stream)) {
            out.extend_from_slice(&reset(*stream, NO_ERROR));
        }
        for open in self.open.iter_mut().filter(|open| open.stream > last && !open.is_reset) {
            open.is_reset = true;
            out.extend_from_slice(&reset(open.stream, INTERNAL_ERROR));
        }
        self.last = last.min(self.last);
        out.extend_from_slice(&[0, 0, 8, GOAWAY, 0, 0, 0, 0, 0]);
        out.extend_from_slice(&last.to_be_bytes());
        out.extend_from_slice(if code == NO_ERROR { &INTERNAL_ERROR } else { &code });
    }

    /// Emits resets without an error of the streams whose responses have ended: h2 forgets that they have, where the connection ends
    /// before the request's body does.
    fn emit_ends(&mut self, out: &mut BytesMut) {
        self.ended.drain(..).for_each(|stream| out.extend_from_slice(&reset(stream, NO_ERROR)));
    }

    /// Handles the end of a frame.
    fn end(&mut self) {
        let stream = stream_of(&self.header);
        match self.kind() {
            HEADERS | CONTINUATION => self.is_in_block = !self.has_flag(END_HEADERS),
            SETTINGS if !self.has_flag(ACK) => self.remote.receive_settings(),
            RST_STREAM => self.open.retain(|open| open.stream != stream),
            UNKNOWN_KIND if self.is_goaway => self.goaway = Some((self.goaway_payload, Instant::now())),
            _ => {}
        }
        if matches!(self.kind(), DATA | HEADERS) && self.has_flag(END_STREAM) {
            if self.ended.len() == MAX_REMEMBERED {
                self.ended.pop_front();
            }
            self.ended.push_back(stream);
            self.open.retain(|open| open.stream != stream);
        }
    }
}

fn stream_of(header: &[u8; HEADER]) -> u32 {
    let [.., a, b, c, d] = *header;
    u32::from_be_bytes([a, b, c, d]) & (u32::MAX >> 1)
}

/// A frame that resets a stream.
fn reset(stream: u32, [e, f, g, h]: [u8; 4]) -> [u8; HEADER + 4] {
    let [a, b, c, d] = stream.to_be_bytes();
    [0, 0, 4, RST_STREAM, 0, a, b, c, d, e, f, g, h]
}

/// Reads what has come. `is_last` is a last look, at which the runtime must not say that there is nothing only for the task to give way.
fn poll_inner<T: AsyncRead + Unpin>(
    inner: &mut T,
    cx: &mut Context<'_>,
    buffer: &mut ReadBuf<'_>,
    is_last: bool,
) -> Poll<io::Result<()>> {
    if !is_last {
        return Pin::new(inner).poll_read(cx, buffer);
    }
    let mut reading = unconstrained(poll_fn(|cx| Pin::new(&mut *inner).poll_read(cx, buffer)));
    Pin::new(&mut reading).poll(cx)
}

impl<T: AsyncRead + Unpin> AsyncRead for FrameFilter<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            let due_for = if this.ready.is_empty() { this.goaway_due_for(cx) } else { None };
            if this.ready.is_empty() && (this.end.is_some() || due_for.is_some_and(|due_for| due_for >= GOAWAY_OVERDUE))
            {
                this.emit_goaway();
            }
            if !this.ready.is_empty() {
                let count = this.ready.len().min(buffer.remaining());
                buffer.put_slice(&this.ready.split_to(count));
                return Poll::Ready(Ok(()));
            }
            if let Some(end) = this.end.take() {
                return Poll::Ready(end);
            }
            if !this.unread.is_empty() && this.filter_unread() {
                continue;
            }
            let count = if this.unread.is_empty() && buffer.remaining() > HEADER {
                // The usual case, without a copy.
                let before = buffer.filled().len();
                let read = match poll_inner(&mut this.inner, cx, buffer, due_for.is_some()) {
                    Poll::Pending if due_for.is_some() && this.emit_goaway() => continue,
                    read => ready!(read),
                };
                match read {
                    Ok(()) => {
                        let came = buffer.filled().len() - before;
                        this.reader.remote.record_activity();
                        let (passed, reset) = this.reader.read(&mut buffer.filled_mut()[before..]);
                        this.unread.extend_from_slice(&buffer.filled()[before + passed..]);
                        this.ready.extend_from_slice(reset.as_ref().map_or(&[], |reset| &reset[..]));
                        buffer.set_filled(before + passed);
                        if passed > 0 {
                            return Poll::Ready(Ok(()));
                        }
                        Ok(came)
                    }
                    Err(error) => Err(error),
                }
            } else {
                let mut scratch = [0; SCRATCH];
                let mut scratch = ReadBuf::new(&mut scratch);
                let read = match poll_inner(&mut this.inner, cx, &mut scratch, due_for.is_some()) {
                    Poll::Pending if due_for.is_some() && this.emit_goaway() => continue,
                    read => ready!(read),
                };
                this.unread.extend_from_slice(scratch.filled());
                this.reader.remote.record_activity();
                read.map(|()| scratch.filled().len())
            };
            match count {
                Ok(1..) => {}
                end => {
                    this.end = Some(end.map(|_| ()));
                    // An incomplete header is returned unchanged.
                    let cut = this.unread.split();
                    this.emit_goaway();
                    if this.reader.is_between() {
                        this.reader.emit_ends(&mut this.ready);
                    }
                    this.ready.extend_from_slice(&cut);
                }
            }
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for FrameFilter<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const HEAD: &[u8] = &[0x88];

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let header = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
        [&header, payload].concat()
    }

    fn goaway(last: u32, code: u32) -> Vec<u8> {
        frame(GOAWAY, 0, 0, &[last.to_be_bytes(), code.to_be_bytes()].concat())
    }

    /// A GOAWAY as it is masked where it arrives.
    fn masked(goaway: &[u8]) -> Vec<u8> {
        frame(UNKNOWN_KIND, 0, 0, &goaway[HEADER..])
    }

    fn resets(stream: u32, code: u32) -> Vec<u8> {
        frame(RST_STREAM, 0, stream, &code.to_be_bytes())
    }

    /// What hyper reads before it hears at the end which responses have ended.
    async fn read(bytes: &[u8]) -> (Vec<u8>, Arc<RemoteState>) {
        let (mut came, remote) = read_to_end(bytes).await;
        let (mut at, mut ended, mut is_in_block) = (0, 0, false);
        while let Some([_, high, low, kind, flags, ..]) = came.get(at..at + HEADER) {
            ended += usize::from(matches!(*kind, DATA | HEADERS) && flags & END_STREAM != 0);
            is_in_block = if *kind == HEADERS { flags & END_HEADERS == 0 } else { is_in_block };
            at += HEADER + usize::from(u16::from_be_bytes([*high, *low]));
        }
        if at == came.len() && !is_in_block {
            came.truncate(at - ended * (HEADER + 4));
        }
        (came, remote)
    }

    /// The bytes that hyper reads from this input up to its end, which must not depend on how it is split.
    async fn read_to_end(bytes: &[u8]) -> (Vec<u8>, Arc<RemoteState>) {
        let mut first = None;
        for size in (1..100).chain([bytes.len()]) {
            let (mut sender, receiver) = tokio::io::duplex(size);
            let remote = Arc::new(RemoteState::default());
            let sent = bytes.to_vec();
            tokio::spawn(async move { sender.write_all(&sent).await });
            let mut came = Vec::new();
            FrameFilter::new(receiver, Arc::clone(&remote)).read_to_end(&mut came).await.unwrap();
            let (expected, _) = first.get_or_insert_with(|| (came.clone(), remote));
            assert_eq!(came, *expected, "in pieces of {size}");
        }
        first.unwrap()
    }

    #[tokio::test]
    async fn a_reset_reflects_the_state_of_the_response() {
        for (before, goaway_payload, told) in [
            (frame(DATA, END_STREAM, 1, b"all"), 8, 0),
            (frame(HEADERS, END_STREAM, 1, HEAD), 0, 0),
            (frame(HEADERS, END_STREAM, 3, HEAD), 0, 2),
            (frame(DATA, 0, 1, b"part"), 0, 2),
            (frame(DATA, 0, 1, b"part"), 8, 8),
            (Vec::new(), 0, 2),
            (Vec::new(), 7, 7),
            (Vec::new(), 0x100, 0x100),
            // It was answered: it is not refused.
            (frame(HEADERS, END_HEADERS, 1, HEAD), 7, 2),
            (frame(HEADERS, END_HEADERS, 1, HEAD), 8, 8),
            (frame(HEADERS, END_HEADERS, 3, HEAD), 7, 7),
            (frame(HEADERS, END_STREAM | END_HEADERS, 1, HEAD), 7, 0),
        ] {
            let (told_bytes, _) = read(&[before.clone(), resets(1, goaway_payload)].concat()).await;
            assert_eq!(told_bytes, [before, resets(1, told)].concat(), "{goaway_payload}");
        }
    }

    /// The request's body may not be sent yet.
    #[tokio::test]
    async fn a_response_that_has_ended_stays_so_where_the_connection_ends() {
        let (ended, begun) = (frame(DATA, END_STREAM, 1, b"all"), frame(DATA, 0, 3, b"part"));
        let came = read_to_end(&[&ended[..], &begun].concat()).await.0;
        assert_eq!(came, [&ended[..], &begun, &resets(1, 0)].concat());
        // Not within a frame.
        let cut = [&ended[..], &begun[..begun.len() - 1]].concat();
        assert_eq!(read_to_end(&cut).await.0, cut);
    }

    #[tokio::test]
    async fn empty_data_frames_become_unknown_frames() {
        let head = frame(HEADERS, END_HEADERS, 1, HEAD);
        let around = |kind, flags| [head.clone(), frame(kind, flags, 1, &[]), frame(DATA, 0, 1, b"x")].concat();
        assert_eq!(read(&around(DATA, 0)).await.0, around(UNKNOWN_KIND, 0));
        for (kind, flags) in [(DATA, END_STREAM), (HEADERS, END_HEADERS), (SETTINGS, ACK)] {
            assert_eq!(read(&around(kind, flags)).await.0, around(kind, flags));
        }
    }

    #[tokio::test]
    async fn nothing_is_lost_where_the_end_comes_in_a_frame() {
        let stream = [frame(DATA, 0, 1, b"x"), frame(DATA, 0, 1, &[7; 40]), vec![0, 0, 0, 0]].concat();
        for end in 1..stream.len() {
            assert_eq!(read(&stream[..end]).await.0, stream[..end], "{end}");
        }
    }

    #[tokio::test]
    async fn settings_and_goaway_update_the_remote_state() {
        let (_, remote) = read(&frame(DATA, 0, 1, b"x")).await;
        assert!(!remote.has_settings.load(Ordering::Relaxed) && remote.stream_limit() == usize::MAX);
        let settings = [0, 4, 0, 0, 255, 255, 0, 3, 0, 0, 1, 7, 0, 5, 0, 0, 64, 0];
        let (_, remote) = read(&[frame(SETTINGS, 0, 0, &settings), frame(SETTINGS, ACK, 0, &[])].concat()).await;
        assert!(remote.has_settings.load(Ordering::Relaxed) && !remote.is_going_away());
        assert_eq!(remote.stream_limit(), 263);
        let (_, remote) = read(&goaway(0, 0)).await;
        assert!(remote.is_going_away());
    }

    #[tokio::test]
    async fn a_goaway_gets_an_error_and_follows_resets_of_answered_streams() {
        for (goaway_payload, told) in [(0, 2), (11, 11)] {
            let ended = frame(DATA, END_STREAM, 1, b"all");
            let begun = frame(HEADERS, END_HEADERS, 3, HEAD);
            let named = goaway(3, goaway_payload);
            let came = read(&[&named[..], &ended, &begun].concat()).await.0;
            assert_eq!(came, [masked(&named), ended.clone(), begun.clone(), goaway(3, told)].concat());
            let left_out = goaway(0, goaway_payload);
            let came = read(&[&left_out[..], &ended, &begun].concat()).await.0;
            let end = [resets(1, 0), resets(3, 2), goaway(0, told)].concat();
            assert_eq!(came, [masked(&left_out), ended, begun, end].concat());
        }
        // Of two, the second counts; what is none goes on as it came.
        let two = [goaway(u32::MAX >> 1, 0), goaway(5, 0)];
        let came = read(&two.concat()).await.0;
        assert_eq!(came, [masked(&two[0]), masked(&two[1]), goaway(5, 2)].concat());
        let short = frame(GOAWAY, 0, 0, &[0; 7]);
        assert_eq!(read(&short).await.0, short);
        let unknown = frame(UNKNOWN_KIND, 0, 0, &[0; 8]);
        assert_eq!(read(&unknown).await.0, unknown);
    }

    /// As where the machine was busy with something else.
    #[tokio::test(start_paused = true)]
    async fn a_response_that_came_in_time_and_is_read_late_counts() {
        let answer = frame(HEADERS, END_HEADERS | END_STREAM, 1, HEAD);
        for (late, is_in_time) in [(GOAWAY_GRACE * 3, true), (GOAWAY_GRACE + GOAWAY_OVERDUE, false)] {
            let (mut upstream, receiver) = tokio::io::duplex(1 << 10);
            let mut frames = FrameFilter::new(receiver, Arc::default());
            upstream.write_all(&goaway(0, 0)).await.unwrap();
            frames.read_exact(&mut vec![0; goaway(0, 0).len()]).await.unwrap();
            upstream.write_all(&answer).await.unwrap();
            tokio::time::advance(late).await;
            let expected = match is_in_time {
                true => [&answer[..], &resets(1, 0), &goaway(0, 2)].concat(),
                false => goaway(0, 2),
            };
            let mut came = vec![0; expected.len()];
            frames.read_exact(&mut came).await.unwrap();
            assert_eq!(came, expected, "{late:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_response_may_arrive_for_a_while_after_a_goaway() {
        let (mut upstream, receiver) = tokio::io::duplex(1 << 10);
        let mut frames = FrameFilter::new(receiver, Arc::default());
        upstream.write_all(&goaway(0, 0)).await.unwrap();
        let mut came = vec![0; goaway(0, 0).len()];
        frames.read_exact(&mut came).await.unwrap();
        assert_eq!(came, masked(&goaway(0, 0)));
        let began = Instant::now();
        let answer = frame(HEADERS, END_HEADERS | END_STREAM, 1, HEAD);
        // Not within what another stream is in the middle of.
        let (part, rest) = answer.split_at(HEADER);
        let context = async {
            tokio::time::sleep(GOAWAY_GRACE / 2).await;
            upstream.write_all(part).await.unwrap();
            tokio::time::sleep(GOAWAY_GRACE).await;
            upstream.write_all(rest).await.unwrap();
        };
        let expected = [&answer[..], &resets(1, 0), &goaway(0, 2)].concat();
        let mut came = vec![0; expected.len()];
        let (_, read) = tokio::join!(context, frames.read_exact(&mut came));
        read.unwrap();
        assert_eq!((came, began.elapsed()), (expected, GOAWAY_GRACE / 2 + GOAWAY_GRACE));

        // The grace period starts again with the next GOAWAY.
        let context = async {
            upstream.write_all(&goaway(3, 0)).await.unwrap();
            tokio::time::sleep(GOAWAY_GRACE / 2).await;
            upstream.write_all(&goaway(1, 0)).await.unwrap();
        };
        let expected = [masked(&goaway(3, 0)), masked(&goaway(1, 0)), goaway(1, 2)].concat();
        let (began, mut came) = (Instant::now(), vec![0; expected.len()]);
        let (_, read) = tokio::join!(context, frames.read_exact(&mut came));
        read.unwrap();
        let took = began.elapsed();
        assert_eq!(came, expected);
        assert!(took >= GOAWAY_GRACE / 2 + GOAWAY_GRACE && took < GOAWAY_GRACE * 2, "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn frames_on_an_excluded_stream_do_not_end_other_streams() {
        let (mut upstream, receiver) = tokio::io::duplex(1 << 10);
        let mut frames = FrameFilter::new(receiver, Arc::default());
        let begun = [frame(HEADERS, END_HEADERS, 1, HEAD), frame(HEADERS, END_HEADERS, 3, HEAD)].concat();
        upstream.write_all(&[&begun[..], &goaway(1, 0)].concat()).await.unwrap();
        let told = [&begun[..], &masked(&goaway(1, 0)), &resets(3, 2), &goaway(1, 2)].concat();
        let mut came = vec![0; told.len()];
        frames.read_exact(&mut came).await.unwrap();
        assert_eq!(came, told);
        // It was under way: on a stream that was answered, and on one that was not.
        let late = |kind, flags| {
            [
                frame(kind, 0, 3, b"more"),
                frame(HEADERS, END_HEADERS | flags, 3, HEAD),
                frame(HEADERS, END_HEADERS | flags, 5, HEAD),
                frame(kind, 0, 5, b"more"),
                frame(DATA, 0, 1, b"goes on"),
                goaway(1, 0),
            ]
        };
        upstream.write_all(&late(DATA, END_STREAM).concat()).await.unwrap();
        let [before @ .., again] = late(UNKNOWN_KIND, 0);
        let told = [&before.concat()[..], &masked(&again), &goaway(1, 2)].concat();
        let mut came = vec![0; told.len()];
        frames.read_exact(&mut came).await.unwrap();
        assert_eq!(came, told);
    }

    #[test]
    fn a_connection_whose_window_shrinks_takes_no_more_requests() {
        let mut reader = FrameReader::new(Arc::default());
        reader.response_head(1).is_reset = true;
        let size = (1_u32 << 24) - 1;
        let mut header = [255, 255, 255, DATA, 0, 0, 0, 0, 1];
        let frames = MAX_DROPPED / u64::from(size) + 1;
        for nth in 1..=frames {
            assert!(!reader.remote.is_going_away(), "{nth}");
            header[KIND] = DATA;
            assert!(reader.begin(&mut header).is_none() && header[KIND] == UNKNOWN_KIND);
        }
        assert!(reader.remote.is_going_away());
    }

    #[tokio::test]
    async fn a_stream_with_too_many_interim_answers_is_reset_before_the_answer() {
        let interim = frame(HEADERS, END_HEADERS, 1, HEAD);
        let answer = [frame(HEADERS, END_HEADERS, 1, HEAD), frame(DATA, END_STREAM, 1, b"all")].concat();
        let other = frame(HEADERS, END_HEADERS | END_STREAM, 3, HEAD);
        let few = [interim.repeat(MAX_INTERIM), answer.clone(), other.clone()].concat();
        assert_eq!(read(&few).await.0, few);
        let many = [interim.repeat(MAX_INTERIM + 1), answer, other.clone()].concat();
        let dropped = frame(UNKNOWN_KIND, END_STREAM, 1, b"all");
        let told = [interim.repeat(MAX_INTERIM + 1), resets(1, 2), interim.clone(), dropped, other].concat();
        assert_eq!(read(&many).await.0, told);
        // Without a body, too; and what follows a body is none of them.
        let end = frame(HEADERS, END_HEADERS | END_STREAM, 1, HEAD);
        let came = read(&[interim.repeat(MAX_INTERIM + 1), end.clone()].concat()).await.0;
        assert_eq!(came, [interim.repeat(MAX_INTERIM + 1), resets(1, 2), interim.clone()].concat());
        let trailers = [interim.repeat(MAX_INTERIM + 1), frame(DATA, 0, 1, b"all"), end].concat();
        assert_eq!(read(&trailers).await.0, trailers);
    }

    #[test]
    fn a_stream_that_is_forgotten_counts_as_answered() {
        let mut reader = FrameReader::new(Arc::default());
        let streams = u32::try_from(MAX_REMEMBERED).unwrap() + 1;
        for stream in 0..streams {
            let mut head = frame(HEADERS, END_HEADERS, 2 * stream + 1, HEAD);
            assert!(reader.read(&mut head) == (head.len(), None));
        }
        assert!(
            reader.has_response(1) && reader.has_response(2 * streams - 1) && !reader.has_response(2 * streams + 1)
        );
        assert_eq!(reader.open.len(), MAX_REMEMBERED);
    }
}
