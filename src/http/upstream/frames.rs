//! What passes on an HTTP/2 connection beneath hyper, which keeps it to itself.

use std::collections::VecDeque;
use std::future::Future as _;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::connection::MOST_INTERIM;
use super::heard::Heard;
use crate::http::frame::{
    ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADER, HEADERS, RST_STREAM, SETTINGS, length,
};

/// Where in a frame's header its kind stands, behind its length; and its flags.
const KIND: usize = 3;
const FLAGS: usize = 4;

/// One that nobody knows, and everybody passes over (RFC 9113, 5.5).
const NO_KIND: u8 = 0xFF;

const NO_ERROR: [u8; 4] = [0, 0, 0, 0];
const INTERNAL_ERROR: [u8; 4] = [0, 0, 0, 2];
const REFUSED_STREAM: [u8; 4] = [0, 0, 0, 7];

const MAX_CONCURRENT_STREAMS: u16 = 3;

/// So many streams are known to have ended, and so many to have been answered in part: one that is reset after its end is so
/// soon after it.
const REMEMBERED: usize = 256;

/// How long after a goodbye an answer may still come on a stream that it leaves out.
const GRACE: Duration = Duration::from_millis(100);

/// A connection on which more bytes than this were dropped takes no more requests: h2 does not see them, and so never gives the
/// upstream back what they took of the connection's window, which is four times as large.
const MOST_DROPPED: u64 = 64 << 20;

/// How many bytes are read at a time where the caller's buffer is too small, or bytes wait that were read before.
const ASIDE: usize = 1024;

/// A stream whose frames are looked at as they come.
///
/// An answer that is complete beats a reset of its stream, whatever that says; and a reset before its end never makes it
/// complete (RFC 9113, 8.1). hyper takes the one for a failure and, where the reset is without an error, the other for an
/// end. So resets come to it in its own words: without an error where the answer had ended, else with one; and goodbyes
/// with one, for they end the streams that they do not name as a reset does.
///
/// A stream that an upstream has answered in part, if only by an interim answer, was processed (RFC 9113, 8.7): a reset that
/// refuses it comes as an internal error. A goodbye comes to hyper [`GRACE`] later, or when the connection ends, behind resets
/// of the streams that it leaves out and that were answered: so an answer that is complete by then counts.
///
/// hyper keeps interim answers to itself. A stream with more than [`MOST_INTERIM`] of them is reset.
///
/// A frame of a body that is empty and not the last means nothing, and some servers send one with every answer: h2 ends a
/// connection for the hundredth of them, with all that is under way there. It comes to it as a frame of no known kind.
///
/// A frame's header goes on when it is whole.
pub(super) struct Frames<T> {
    inner: T,
    reader: Reader,
    /// What goes on before anything else.
    ready: BytesMut,
    /// What was read, and waits for more or for what goes on before it.
    unread: BytesMut,
    /// How reading ended.
    end: Option<io::Result<()>>,
    /// When a goodbye goes on.
    due: Option<Pin<Box<Sleep>>>,
}

struct Reader {
    heard: Arc<Heard>,
    /// Of the frame that is under way, as it went on.
    header: [u8; HEADER],
    /// What is still to come of the frame's payload.
    left: usize,
    /// How much of it has come.
    at: usize,
    setting: [u8; 6],
    /// A block of headers goes on in the next frame.
    is_in_block: bool,
    /// The streams whose answers have ended, the last of them.
    ended: VecDeque<u32>,
    /// The streams whose answers have begun.
    open: VecDeque<Open>,
    /// Those up to this one may have been answered, too.
    forgotten: u32,
    /// A goodbye is under way, that goes on later.
    is_goodbye: bool,
    /// What it says: the last stream that it names, and why.
    said: [u8; 8],
    /// The last goodbye that has come whole and has not gone on, and when it came.
    goodbye: Option<([u8; 8], Instant)>,
    /// The last stream that a goodbye has named which has gone on: h2 has closed those above it.
    last: u32,
    /// How many bytes of bodies were dropped.
    dropped: u64,
}

/// A stream that was answered in part.
struct Open {
    stream: u32,
    /// How many blocks of headers have come before a body.
    heads: usize,
    is_reset: bool,
}

impl<T> Frames<T> {
    pub(super) fn new(inner: T, heard: Arc<Heard>) -> Self {
        let (ready, unread) = (BytesMut::new(), BytesMut::new());
        Self { inner, reader: Reader::new(heard), ready, unread, end: None, due: None }
    }

    /// Has a goodbye go on where its time has come; otherwise `cx` is woken when it does.
    fn say_goodbye(&mut self, cx: &mut Context<'_>) {
        let Some((_, since)) = self.reader.goodbye else { return };
        let at = since + GRACE;
        let due = self.due.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if due.deadline() != at {
            due.as_mut().reset(at);
        }
        let is_due = due.as_mut().poll(cx).is_ready() || self.end.is_some();
        if is_due && self.reader.is_between() {
            self.due = None;
            self.reader.say_goodbye(&mut self.ready);
        }
    }

    /// Looks at what was read: whether any of it goes on.
    fn look_at_unread(&mut self) -> bool {
        let (passed, reset) = self.reader.read(&mut self.unread);
        self.ready.extend_from_slice(&self.unread.split_to(passed));
        self.ready.extend_from_slice(reset.as_ref().map_or(&[], |reset| &reset[..]));
        !self.ready.is_empty()
    }
}

impl Reader {
    fn new(heard: Arc<Heard>) -> Self {
        Self {
            heard,
            header: [0; HEADER],
            left: 0,
            at: 0,
            setting: [0; 6],
            is_in_block: false,
            ended: VecDeque::new(),
            open: VecDeque::new(),
            forgotten: 0,
            is_goodbye: false,
            said: [0; 8],
            goodbye: None,
            last: u32::MAX,
            dropped: 0,
        }
    }

    /// How many of these bytes may go on, and a frame that goes on behind them and before the others. Those that may not are
    /// given again, with more behind them.
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

    /// Whether a frame of any kind may come.
    fn is_between(&self) -> bool {
        self.left == 0 && !self.is_in_block
    }

    fn kind(&self) -> u8 {
        self.header[KIND]
    }

    fn has_flag(&self, flag: u8) -> bool {
        self.header[FLAGS] & flag != 0
    }

    /// A frame's header has come. Says what is to go on before it.
    fn begin(&mut self, header: &mut [u8; HEADER]) -> Option<[u8; HEADER + 4]> {
        let stream = stream_of(header);
        let has_end = header[FLAGS] & END_STREAM != 0;
        match header[KIND] {
            HEADERS => {
                let is_left_out = stream > self.last;
                let open = self.answered(stream);
                open.heads += 1;
                open.is_reset |= is_left_out;
                // The last of them may be the answer's own.
                if open.heads > MOST_INTERIM + 1 && !open.is_reset {
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
                    header[KIND] = NO_KIND;
                    self.dropped += u64::from(length(*header));
                    if self.dropped > MOST_DROPPED {
                        self.heard.says_goodbye.store(true, Ordering::Relaxed);
                    }
                }
                Some(open) => open.heads = 1,
                None => {}
            },
            GOAWAY => self.heard.says_goodbye.store(true, Ordering::Relaxed),
            _ => {}
        }
        if header[KIND] == DATA && header[..KIND] == [0; KIND] && !has_end {
            header[KIND] = NO_KIND;
        }
        self.is_goodbye = header[KIND] == GOAWAY && length(*header) as usize >= self.said.len() && stream == 0;
        if self.is_goodbye {
            header[KIND] = NO_KIND;
        }
        None
    }

    /// The stream, which is answered by what comes.
    fn answered(&mut self, stream: u32) -> &mut Open {
        let place = self.open.iter().position(|open| open.stream == stream).unwrap_or_else(|| {
            if self.open.len() == REMEMBERED
                && let Some(Open { stream, .. }) = self.open.pop_front()
            {
                self.forgotten = self.forgotten.max(stream);
            }
            self.open.push_back(Open { stream, heads: 0, is_reset: false });
            self.open.len() - 1
        });
        &mut self.open[place]
    }

    fn was_answered(&self, stream: u32) -> bool {
        stream <= self.forgotten || self.open.iter().any(|open| open.stream == stream)
    }

    fn payload(&mut self, now: &mut [u8]) {
        match self.kind() {
            SETTINGS if !self.has_flag(ACK) => {
                for (place, byte) in (self.at..).zip(&*now) {
                    self.setting[place % 6] = *byte;
                    if place % 6 == 5 {
                        self.set();
                    }
                }
            }
            RST_STREAM => self.say(now),
            NO_KIND if self.is_goodbye => {
                for (said, byte) in self.said.iter_mut().skip(self.at).zip(&*now) {
                    *said = *byte;
                }
            }
            _ => {}
        }
    }

    fn set(&self) {
        let [a, b, value @ ..] = self.setting;
        if u16::from_be_bytes([a, b]) == MAX_CONCURRENT_STREAMS {
            self.heard.most.store(u32::from_be_bytes(value) as usize, Ordering::Relaxed);
        }
    }

    /// Puts other words into a reset, as far as it has come.
    fn say(&mut self, now: &mut [u8]) {
        let stream = stream_of(&self.header);
        if self.ended.contains(&stream) {
            for (place, byte) in (self.at..).zip(now) {
                *byte = NO_ERROR.get(place).copied().unwrap_or(*byte);
            }
            return;
        }
        let was_answered = self.was_answered(stream);
        // Only the last byte of a code tells those that get other words from others that are in use: where it comes by
        // itself, the three before it have been looked at, and are the same in all of them.
        for (place, byte) in (self.at..).zip(now) {
            let Some(said) = self.setting.get_mut(place) else { continue };
            *said = *byte;
            if place == 3 && (self.setting[..4] == NO_ERROR || was_answered && self.setting[..4] == REFUSED_STREAM) {
                *byte = INTERNAL_ERROR[3];
            }
        }
    }

    /// The goodbye, behind resets of the streams that it leaves out and that were answered.
    fn say_goodbye(&mut self, out: &mut BytesMut) {
        let Some(([a, b, c, d, code @ ..], _)) = self.goodbye.take() else { return };
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

    /// A frame is over.
    fn end(&mut self) {
        let stream = stream_of(&self.header);
        match self.kind() {
            HEADERS | CONTINUATION => self.is_in_block = !self.has_flag(END_HEADERS),
            SETTINGS if !self.has_flag(ACK) => self.heard.greets(),
            RST_STREAM => self.open.retain(|open| open.stream != stream),
            NO_KIND if self.is_goodbye => self.goodbye = Some((self.said, Instant::now())),
            _ => {}
        }
        if matches!(self.kind(), DATA | HEADERS) && self.has_flag(END_STREAM) {
            if self.ended.len() == REMEMBERED {
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

impl<T: AsyncRead + Unpin> AsyncRead for Frames<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if this.ready.is_empty() {
                this.say_goodbye(cx);
            }
            if !this.ready.is_empty() {
                let count = this.ready.len().min(buffer.remaining());
                buffer.put_slice(&this.ready.split_to(count));
                return Poll::Ready(Ok(()));
            }
            if let Some(end) = this.end.take() {
                return Poll::Ready(end);
            }
            if !this.unread.is_empty() && this.look_at_unread() {
                continue;
            }
            let count = if this.unread.is_empty() && buffer.remaining() > HEADER {
                // As a rule: nothing is copied.
                let before = buffer.filled().len();
                let read = Pin::new(&mut this.inner).poll_read(cx, buffer);
                match ready!(read) {
                    Ok(()) => {
                        let came = buffer.filled().len() - before;
                        this.reader.heard.hear();
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
                let mut aside = [0; ASIDE];
                let mut aside = ReadBuf::new(&mut aside);
                let read = ready!(Pin::new(&mut this.inner).poll_read(cx, &mut aside));
                this.unread.extend_from_slice(aside.filled());
                this.reader.heard.hear();
                read.map(|()| aside.filled().len())
            };
            match count {
                Ok(1..) => {}
                end => {
                    this.end = Some(end.map(|_| ()));
                    // What is no whole header goes on as it came.
                    let cut = this.unread.split();
                    this.say_goodbye(cx);
                    this.ready.extend_from_slice(&cut);
                }
            }
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Frames<T> {
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

    fn goodbye(last: u32, code: u32) -> Vec<u8> {
        frame(GOAWAY, 0, 0, &[last.to_be_bytes(), code.to_be_bytes()].concat())
    }

    /// A goodbye where it came.
    fn passed_over(goodbye: &[u8]) -> Vec<u8> {
        frame(NO_KIND, 0, 0, &goodbye[HEADER..])
    }

    fn resets(stream: u32, code: u32) -> Vec<u8> {
        frame(RST_STREAM, 0, stream, &code.to_be_bytes())
    }

    /// What hyper gets of these bytes and the end behind them, whatever pieces they come in.
    async fn read(bytes: &[u8]) -> (Vec<u8>, Arc<Heard>) {
        let mut first = None;
        for size in (1..100).chain([bytes.len()]) {
            let (mut sender, receiver) = tokio::io::duplex(size);
            let heard = Arc::new(Heard::default());
            let sent = bytes.to_vec();
            tokio::spawn(async move { sender.write_all(&sent).await });
            let mut came = Vec::new();
            Frames::new(receiver, Arc::clone(&heard)).read_to_end(&mut came).await.unwrap();
            let (expected, _) = first.get_or_insert_with(|| (came.clone(), heard));
            assert_eq!(came, *expected, "in pieces of {size}");
        }
        first.unwrap()
    }

    #[tokio::test]
    async fn a_reset_says_what_became_of_the_answer() {
        for (before, said, told) in [
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
            let (told_bytes, _) = read(&[before.clone(), resets(1, said)].concat()).await;
            assert_eq!(told_bytes, [before, resets(1, told)].concat(), "{said}");
        }
    }

    #[tokio::test]
    async fn frames_that_are_empty_come_as_none() {
        let head = frame(HEADERS, END_HEADERS, 1, HEAD);
        let around = |kind, flags| [head.clone(), frame(kind, flags, 1, &[]), frame(DATA, 0, 1, b"x")].concat();
        assert_eq!(read(&around(DATA, 0)).await.0, around(NO_KIND, 0));
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
    async fn settings_and_goodbyes_are_heard() {
        let (_, heard) = read(&frame(DATA, 0, 1, b"x")).await;
        assert!(!heard.has_greeted.load(Ordering::Relaxed) && heard.most_streams() == usize::MAX);
        let settings = [0, 4, 0, 0, 255, 255, 0, 3, 0, 0, 1, 7, 0, 5, 0, 0, 64, 0];
        let (_, heard) = read(&[frame(SETTINGS, 0, 0, &settings), frame(SETTINGS, ACK, 0, &[])].concat()).await;
        assert!(heard.has_greeted.load(Ordering::Relaxed) && !heard.says_goodbye());
        assert_eq!(heard.most_streams(), 263);
        let (_, heard) = read(&goodbye(0, 0)).await;
        assert!(heard.says_goodbye());
    }

    #[tokio::test]
    async fn a_goodbye_is_an_error_and_comes_last_behind_resets_of_what_was_answered() {
        for (said, told) in [(0, 2), (11, 11)] {
            let ended = frame(DATA, END_STREAM, 1, b"all");
            let begun = frame(HEADERS, END_HEADERS, 3, HEAD);
            let named = goodbye(3, said);
            let came = read(&[&named[..], &ended, &begun].concat()).await.0;
            assert_eq!(came, [passed_over(&named), ended.clone(), begun.clone(), goodbye(3, told)].concat());
            let left_out = goodbye(0, said);
            let came = read(&[&left_out[..], &ended, &begun].concat()).await.0;
            let end = [resets(1, 0), resets(3, 2), goodbye(0, told)].concat();
            assert_eq!(came, [passed_over(&left_out), ended, begun, end].concat());
        }
        // Of two, the second counts; what is none goes on as it came.
        let two = [goodbye(u32::MAX >> 1, 0), goodbye(5, 0)];
        let came = read(&two.concat()).await.0;
        assert_eq!(came, [passed_over(&two[0]), passed_over(&two[1]), goodbye(5, 2)].concat());
        let short = frame(GOAWAY, 0, 0, &[0; 7]);
        assert_eq!(read(&short).await.0, short);
        let unknown = frame(NO_KIND, 0, 0, &[0; 8]);
        assert_eq!(read(&unknown).await.0, unknown);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_may_come_for_a_while_after_a_goodbye() {
        let (mut upstream, receiver) = tokio::io::duplex(1 << 10);
        let mut frames = Frames::new(receiver, Arc::default());
        upstream.write_all(&goodbye(0, 0)).await.unwrap();
        let mut came = vec![0; goodbye(0, 0).len()];
        frames.read_exact(&mut came).await.unwrap();
        assert_eq!(came, passed_over(&goodbye(0, 0)));
        let began = Instant::now();
        let answer = frame(HEADERS, END_HEADERS | END_STREAM, 1, HEAD);
        // Not within what another stream is in the middle of.
        let (part, rest) = answer.split_at(HEADER);
        let sending = async {
            tokio::time::sleep(GRACE / 2).await;
            upstream.write_all(part).await.unwrap();
            tokio::time::sleep(GRACE).await;
            upstream.write_all(rest).await.unwrap();
        };
        let expected = [&answer[..], &resets(1, 0), &goodbye(0, 2)].concat();
        let mut came = vec![0; expected.len()];
        let (_, read) = tokio::join!(sending, frames.read_exact(&mut came));
        read.unwrap();
        assert_eq!((came, began.elapsed()), (expected, GRACE / 2 + GRACE));

        // It begins again with the next goodbye.
        let sending = async {
            upstream.write_all(&goodbye(3, 0)).await.unwrap();
            tokio::time::sleep(GRACE / 2).await;
            upstream.write_all(&goodbye(1, 0)).await.unwrap();
        };
        let expected = [passed_over(&goodbye(3, 0)), passed_over(&goodbye(1, 0)), goodbye(1, 2)].concat();
        let (began, mut came) = (Instant::now(), vec![0; expected.len()]);
        let (_, read) = tokio::join!(sending, frames.read_exact(&mut came));
        read.unwrap();
        let took = began.elapsed();
        assert_eq!(came, expected);
        assert!(took >= GRACE / 2 + GRACE && took < GRACE * 2, "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_on_a_stream_that_a_goodbye_left_out_does_not_end_the_others() {
        let (mut upstream, receiver) = tokio::io::duplex(1 << 10);
        let mut frames = Frames::new(receiver, Arc::default());
        let begun = [frame(HEADERS, END_HEADERS, 1, HEAD), frame(HEADERS, END_HEADERS, 3, HEAD)].concat();
        upstream.write_all(&[&begun[..], &goodbye(1, 0)].concat()).await.unwrap();
        let told = [&begun[..], &passed_over(&goodbye(1, 0)), &resets(3, 2), &goodbye(1, 2)].concat();
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
                goodbye(1, 0),
            ]
        };
        upstream.write_all(&late(DATA, END_STREAM).concat()).await.unwrap();
        let [before @ .., again] = late(NO_KIND, 0);
        let told = [&before.concat()[..], &passed_over(&again), &goodbye(1, 2)].concat();
        let mut came = vec![0; told.len()];
        frames.read_exact(&mut came).await.unwrap();
        assert_eq!(came, told);
    }

    #[test]
    fn a_connection_whose_window_shrinks_takes_no_more_requests() {
        let mut reader = Reader::new(Arc::default());
        reader.answered(1).is_reset = true;
        let size = (1_u32 << 24) - 1;
        let mut header = [255, 255, 255, DATA, 0, 0, 0, 0, 1];
        let frames = MOST_DROPPED / u64::from(size) + 1;
        for nth in 1..=frames {
            assert!(!reader.heard.says_goodbye(), "{nth}");
            header[KIND] = DATA;
            assert!(reader.begin(&mut header).is_none() && header[KIND] == NO_KIND);
        }
        assert!(reader.heard.says_goodbye());
    }

    #[tokio::test]
    async fn a_stream_with_too_many_interim_answers_is_reset_before_the_answer() {
        let interim = frame(HEADERS, END_HEADERS, 1, HEAD);
        let answer = [frame(HEADERS, END_HEADERS, 1, HEAD), frame(DATA, END_STREAM, 1, b"all")].concat();
        let other = frame(HEADERS, END_HEADERS | END_STREAM, 3, HEAD);
        let few = [interim.repeat(MOST_INTERIM), answer.clone(), other.clone()].concat();
        assert_eq!(read(&few).await.0, few);
        let many = [interim.repeat(MOST_INTERIM + 1), answer, other.clone()].concat();
        let dropped = frame(NO_KIND, END_STREAM, 1, b"all");
        let told = [interim.repeat(MOST_INTERIM + 1), resets(1, 2), interim.clone(), dropped, other].concat();
        assert_eq!(read(&many).await.0, told);
        // Without a body, too; and what follows a body is none of them.
        let end = frame(HEADERS, END_HEADERS | END_STREAM, 1, HEAD);
        let came = read(&[interim.repeat(MOST_INTERIM + 1), end.clone()].concat()).await.0;
        assert_eq!(came, [interim.repeat(MOST_INTERIM + 1), resets(1, 2), interim.clone()].concat());
        let trailers = [interim.repeat(MOST_INTERIM + 1), frame(DATA, 0, 1, b"all"), end].concat();
        assert_eq!(read(&trailers).await.0, trailers);
    }

    #[test]
    fn a_stream_that_is_forgotten_counts_as_answered() {
        let mut reader = Reader::new(Arc::default());
        let streams = u32::try_from(REMEMBERED).unwrap() + 1;
        for stream in 0..streams {
            let mut head = frame(HEADERS, END_HEADERS, 2 * stream + 1, HEAD);
            assert!(reader.read(&mut head) == (head.len(), None));
        }
        assert!(
            reader.was_answered(1) && reader.was_answered(2 * streams - 1) && !reader.was_answered(2 * streams + 1)
        );
        assert_eq!(reader.open.len(), REMEMBERED);
    }
}
