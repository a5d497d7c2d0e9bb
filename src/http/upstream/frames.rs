//! What passes on an HTTP/2 connection beneath hyper, which keeps it to itself.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::http::frame::{ACK, DATA, END_STREAM, GOAWAY, HEADER, HEADERS, RST_STREAM, SETTINGS, length};

/// Where in a frame's header its kind stands, behind its length.
const KIND: usize = 3;

/// One that nobody knows, and everybody passes over (RFC 9113, 5.5).
const NO_KIND: u8 = 0xFF;

const NO_ERROR: [u8; 4] = [0, 0, 0, 0];
const INTERNAL_ERROR: [u8; 4] = [0, 0, 0, 2];

const MAX_CONCURRENT_STREAMS: u16 = 3;

/// So many streams are known to have ended: one that is reset after its end is so soon after it.
const REMEMBERED: usize = 256;

/// What an upstream has said on a connection.
pub(super) struct Heard {
    opened: Instant,
    /// When it last said anything, in milliseconds since it was opened.
    last: AtomicU64,
    /// How many requests it takes at a time.
    most: AtomicUsize,
    has_greeted: AtomicBool,
    /// It takes no more requests.
    says_goodbye: AtomicBool,
    greeted: Notify,
}

impl Default for Heard {
    fn default() -> Self {
        Self {
            opened: Instant::now(),
            last: AtomicU64::new(0),
            // Where it says nothing, as many as one likes (RFC 9113, 6.5.2).
            most: AtomicUsize::new(usize::MAX),
            has_greeted: AtomicBool::new(false),
            says_goodbye: AtomicBool::new(false),
            greeted: Notify::new(),
        }
    }
}

impl Heard {
    /// Waits until it has said that it speaks HTTP/2 (RFC 9113, 3.4).
    pub(super) async fn greeting(&self) {
        let greeted = self.greeted.notified();
        if !self.has_greeted.load(Ordering::Acquire) {
            greeted.await;
        }
    }

    pub(super) fn most_streams(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }

    pub(super) fn says_goodbye(&self) -> bool {
        self.says_goodbye.load(Ordering::Relaxed)
    }

    /// For how long it has said nothing.
    pub(super) fn silence(&self) -> Duration {
        self.opened.elapsed().saturating_sub(Duration::from_millis(self.last.load(Ordering::Relaxed)))
    }

    fn hear(&self) {
        let now = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    fn greets(&self) {
        self.has_greeted.store(true, Ordering::Release);
        self.greeted.notify_waiters();
    }
}

/// A stream whose frames are looked at as they come.
///
/// An answer that is complete beats a reset of its stream, whatever that says; and a reset before its end never makes it
/// complete (RFC 9113, 8.1). hyper takes the one for a failure and, where the reset is without an error, the other for an
/// end. So resets come to it in its own words: without an error where the answer had ended, else with one; and goodbyes
/// with one, for they end the streams that they do not name as a reset does.
///
/// A frame of a body that is empty and not the last means nothing, and some servers send one with every answer: h2 ends a
/// connection for the hundredth of them, with all that is under way there. It comes to it as a frame of no known kind.
pub(super) struct Frames<T> {
    inner: T,
    reader: Reader,
    /// Whether the kind of such a frame has come, perhaps, and is held back until it is known.
    is_held: bool,
}

struct Reader {
    heard: Arc<Heard>,
    header: [u8; HEADER],
    have: usize,
    /// What is still to come of the frame's payload.
    left: usize,
    /// How much of it has come.
    at: usize,
    setting: [u8; 6],
    /// The streams whose answers have ended, the last of them.
    ended: VecDeque<u32>,
}

impl<T> Frames<T> {
    pub(super) fn new(inner: T, heard: Arc<Heard>) -> Self {
        Self { inner, reader: Reader::new(heard), is_held: false }
    }
}

impl Reader {
    fn new(heard: Arc<Heard>) -> Self {
        let (header, setting, ended) = ([0; HEADER], [0; 6], VecDeque::new());
        Self { heard, header, have: 0, left: 0, at: 0, setting, ended }
    }

    /// Says whether the last byte is to come again, with what follows it.
    fn read(&mut self, mut bytes: &mut [u8]) -> bool {
        self.heard.hear();
        while !bytes.is_empty() {
            if self.have < HEADER {
                let count = bytes.len().min(HEADER - self.have);
                let (now, rest) = bytes.split_at_mut(count);
                self.header[self.have..self.have + count].copy_from_slice(now);
                let kind = KIND.checked_sub(self.have).and_then(|place| now.get_mut(place));
                self.have += count;
                if let Some(kind) = kind
                    && self.is_empty()
                    && self.have > KIND + 1
                    && !self.has_flag(END_STREAM)
                {
                    *kind = NO_KIND;
                }
                bytes = rest;
                if self.have == HEADER {
                    self.begin();
                }
            } else {
                let count = bytes.len().min(self.left);
                let (now, rest) = bytes.split_at_mut(count);
                self.payload(now);
                self.at += count;
                self.left -= count;
                bytes = rest;
            }
            if self.have == HEADER && self.left == 0 {
                self.end();
            }
        }
        let is_open = self.have == KIND + 1 && self.is_empty();
        self.have -= usize::from(is_open);
        is_open
    }

    /// Whether the header is that of a body's frame with nothing in it, as far as it has come.
    fn is_empty(&self) -> bool {
        self.have > KIND && self.header[..KIND] == [0; KIND] && self.kind() == DATA
    }

    fn kind(&self) -> u8 {
        self.header[KIND]
    }

    fn has_flag(&self, flag: u8) -> bool {
        self.header[4] & flag != 0
    }

    fn stream(&self) -> u32 {
        let [.., a, b, c, d] = self.header;
        u32::from_be_bytes([a, b, c, d]) & (u32::MAX >> 1)
    }

    /// A frame's header has come.
    fn begin(&mut self) {
        self.left = length(self.header) as usize;
        self.at = 0;
        if self.kind() == GOAWAY {
            self.heard.says_goodbye.store(true, Ordering::Relaxed);
        }
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
            // Behind the last stream that it names.
            GOAWAY => self.say_error(now, 4),
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
        if !self.ended.contains(&self.stream()) {
            return self.say_error(now, 0);
        }
        for (place, byte) in (self.at..).zip(now) {
            *byte = NO_ERROR.get(place).copied().unwrap_or(*byte);
        }
    }

    /// Makes an error of a code that is none, which begins there in the payload.
    fn say_error(&mut self, now: &mut [u8], from: usize) {
        // Only the last byte of a code tells one that is without an error from others that are in use: where it comes by
        // itself, the three before it have been looked at.
        for (place, byte) in (self.at..).zip(now) {
            let Some(said) = place.checked_sub(from).and_then(|place| self.setting.get_mut(place)) else { continue };
            *said = *byte;
            if place == from + 3 && self.setting[..4] == NO_ERROR {
                *byte = INTERNAL_ERROR[3];
            }
        }
    }

    /// A frame is over.
    fn end(&mut self) {
        self.have = 0;
        match self.kind() {
            DATA | HEADERS if self.has_flag(END_STREAM) => {
                if self.ended.len() == REMEMBERED {
                    self.ended.pop_front();
                }
                self.ended.push_back(self.stream());
            }
            SETTINGS if !self.has_flag(ACK) => self.heard.greets(),
            _ => {}
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Frames<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        loop {
            if buffer.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            if this.is_held {
                buffer.put_slice(&[DATA]);
            }
            let own = buffer.filled().len();
            if Pin::new(&mut this.inner).poll_read(cx, buffer)?.is_pending() {
                buffer.set_filled(before);
                return Poll::Pending;
            }
            // At the end, or where there is room for nothing more, it goes on as it came.
            let is_over = buffer.filled().len() == own;
            this.reader.have += usize::from(is_over && this.is_held);
            this.is_held = !is_over && this.reader.read(&mut buffer.filled_mut()[before..]);
            let some = buffer.filled().len() - usize::from(this.is_held);
            buffer.set_filled(some);
            if is_over || some > before {
                return Poll::Ready(Ok(()));
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

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let header = [&length[1..], &[kind, flags], &stream.to_be_bytes()].concat();
        [&header, payload].concat()
    }

    /// What hyper gets of these bytes, whatever pieces they come in.
    fn read(bytes: &[u8]) -> (Vec<u8>, Arc<Heard>) {
        let mut results = (1..=bytes.len()).map(|size| {
            let heard = Arc::new(Heard::default());
            let (mut reader, mut bytes) = (Reader::new(Arc::clone(&heard)), bytes.to_vec());
            let mut from = 0;
            while from < bytes.len() {
                let end = bytes.len().min(from + size + usize::from(from > 0));
                from = end - usize::from(reader.read(&mut bytes[from..end]) && end < bytes.len());
            }
            (bytes, heard)
        });
        let (first, heard) = results.next().unwrap();
        assert!(results.all(|(bytes, _)| bytes == first));
        (first, heard)
    }

    #[test]
    fn a_reset_says_what_became_of_the_answer() {
        let reset = |stream, code: u32| frame(RST_STREAM, 0, stream, &code.to_be_bytes());
        for (before, said, told) in [
            (frame(DATA, END_STREAM, 1, b"all"), 8, 0),
            (frame(HEADERS, END_STREAM, 1, &[0x88]), 0, 0),
            (frame(HEADERS, END_STREAM, 3, &[0x88]), 0, 2),
            (frame(DATA, 0, 1, b"part"), 0, 2),
            (frame(DATA, 0, 1, b"part"), 8, 8),
            (Vec::new(), 0, 2),
            (Vec::new(), 7, 7),
            (Vec::new(), 0x100, 0x100),
        ] {
            let (told_bytes, _) = read(&[before.clone(), reset(1, said)].concat());
            assert_eq!(told_bytes, [before, reset(1, told)].concat(), "{said}");
        }
    }

    #[test]
    fn frames_that_are_empty_come_as_none() {
        let head = frame(HEADERS, 4, 1, &[0x88]);
        let around = |kind, flags| [head.clone(), frame(kind, flags, 1, &[]), frame(DATA, 0, 1, b"x")].concat();
        assert_eq!(read(&around(DATA, 0)).0, around(NO_KIND, 0));
        for (kind, flags) in [(DATA, END_STREAM), (HEADERS, 4), (SETTINGS, ACK)] {
            assert_eq!(read(&around(kind, flags)).0, around(kind, flags));
        }
    }

    #[tokio::test]
    async fn nothing_is_lost_however_little_comes_at_a_time() {
        let stream =
            [frame(DATA, 0, 1, b"x"), frame(DATA, 0, 1, &[]), frame(DATA, END_STREAM, 1, &[]), vec![0, 0, 0, 0]];
        let expected =
            [&stream[0], &frame(NO_KIND, 0, 1, &[]), &stream[2], &stream[3]].map(|frame| &frame[..]).concat();
        for size in 1..40 {
            let (mut sender, receiver) = tokio::io::duplex(size);
            let bytes = stream.concat();
            tokio::spawn(async move { sender.write_all(&bytes).await });
            let mut came = Vec::new();
            Frames::new(receiver, Arc::default()).read_to_end(&mut came).await.unwrap();
            assert_eq!(came, expected, "{size}");
        }
    }

    #[test]
    fn settings_and_goodbyes_are_heard() {
        let (_, heard) = read(&frame(DATA, 0, 1, b"x"));
        assert!(!heard.has_greeted.load(Ordering::Relaxed) && heard.most_streams() == usize::MAX);
        let settings = [0, 4, 0, 0, 255, 255, 0, 3, 0, 0, 1, 7, 0, 5, 0, 0, 64, 0];
        let (_, heard) = read(&[frame(SETTINGS, 0, 0, &settings), frame(SETTINGS, ACK, 0, &[])].concat());
        assert!(heard.has_greeted.load(Ordering::Relaxed) && !heard.says_goodbye());
        assert_eq!(heard.most_streams(), 263);
        let (told, heard) = read(&frame(GOAWAY, 0, 0, &[0; 9]));
        assert!(heard.says_goodbye());
        assert_eq!(told, frame(GOAWAY, 0, 0, &[0, 0, 0, 0, 0, 0, 0, 2, 0]), "and it is no end of an answer");
        let went = frame(GOAWAY, 0, 0, &[0, 0, 0, 5, 0, 0, 0, 11]);
        assert_eq!(read(&went).0, went);
    }
}
