//! Connections to RabbitMQ whose frames the client library can read, whatever a publisher has put into a message.
//!
//! A short string is UTF-8 (AMQP 0-9-1, section 4.2.5.3). RabbitMQ takes any bytes from a publisher, and hands them on. The library
//! ends the connection where they are no text, and would read the same message first on the next: no other message of the queue would
//! come, and each new connection would count as one more delivery of all that had come with it. So these bytes become control
//! characters before the library reads them. No key has one, so a message whose key they are is a dead letter.
//!
//! Tables in tables beyond [`MAX_DEPTH`] become byte arrays: the library reads them by recursion.

use std::future::Future;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use futures_io::{AsyncRead, AsyncWrite};
use futures_util::Stream;
use lapin::tcp::{AMQPUriTcpExt as _, AsyncTcpStream};
use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties};

/// Stands for each byte of a short string that is no text.
const UNREADABLE: u8 = 1;

/// How many tables and arrays may stand within each other.
const MAX_DEPTH: usize = 32;

/// Frames of more bytes pass as they are: RabbitMQ sends none, since both sides have agreed on less.
const MAX_FRAME: usize = 1 << 20;

/// How much is read at a time, in bytes.
const CHUNK: usize = 64 << 10;

/// The kinds of frames (AMQP 0-9-1, section 4.2.3).
const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;

/// What a frame has before its payload, and behind it: a kind, a channel and a size; an end.
const FRAME_HEAD: usize = 7;
const FRAME_END: usize = 1;

/// The methods that bring a message: `basic.deliver` and `basic.get-ok`, each with the class and without its properties.
const DELIVER: [u8; 4] = [0, 60, 0, 60];
const GET_OK: [u8; 4] = [0, 60, 0, 71];

/// Connects.
pub(super) async fn connect(uri: AMQPUri, properties: ConnectionProperties) -> lapin::Result<Connection> {
    let runtime = Runtime::new(RuntimeParts::new(Tokio::current(), ReadableReactor(Tokio::current())));
    let connect = async |uri: AMQPUri, _| {
        let stream = uri.connect_async(&Runtime::tokio_current()).await?;
        Ok(AsyncTcpStream::Plain(Readable::new(stream)))
    };
    Connection::connector(uri, runtime, connect, properties).await
}

/// The reactor of tokio, whose streams are [`Readable`].
#[derive(Clone, Debug)]
struct ReadableReactor(Tokio);

impl Reactor for ReadableReactor {
    type TcpStream = Readable<AsyncTcpStream<<Tokio as Reactor>::TcpStream>>;
    type Sleep = <Tokio as Reactor>::Sleep;

    fn register<H: Read + Write + AsFd + AsRawFd + Send + 'static>(
        &self,
        socket: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        self.0.register(socket)
    }

    fn sleep(&self, span: Duration) -> Self::Sleep {
        self.0.sleep(span)
    }

    fn interval(&self, span: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.0.interval(span)
    }

    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<Self::TcpStream>> + Send + 'static {
        let connecting = self.0.tcp_connect_addr(address);
        async move { Ok(Readable::new(AsyncTcpStream::Plain(connecting.await?))) }
    }
}

/// A connection whose frames can be read.
struct Readable<S> {
    stream: S,
    frames: Frames,
}

impl<S> Readable<S> {
    fn new(stream: S) -> Self {
        Self { stream, frames: Frames::default() }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Readable<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        let Self { stream, frames } = &mut *self;
        loop {
            let given = frames.give(into);
            if given > 0 || into.is_empty() {
                return Poll::Ready(Ok(given));
            }
            let before = frames.input.len();
            frames.input.resize(before + CHUNK, 0);
            let read = Pin::new(&mut *stream).poll_read(cx, &mut frames.input[before..]);
            let count = if let Poll::Ready(Ok(count)) = &read { *count } else { 0 };
            frames.input.truncate(before + count);
            match read {
                Poll::Ready(Ok(0)) if frames.input.is_empty() => return Poll::Ready(Ok(0)),
                // What is left of a frame that never ends.
                Poll::Ready(Ok(0)) => frames.ready = frames.input.len(),
                Poll::Ready(Ok(_)) => frames.look(),
                unread => return unread,
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Readable<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, from)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_close(cx)
    }
}

/// Frames that arrive in pieces.
#[derive(Default)]
struct Frames {
    /// What was read and not given.
    input: Vec<u8>,
    /// How much of it may be given.
    ready: usize,
    /// How much of a frame passes as it is and has not come yet.
    passing: usize,
    /// It is another protocol.
    is_foreign: bool,
}

impl Frames {
    /// Gives what is ready. Returns how much.
    fn give(&mut self, into: &mut [u8]) -> usize {
        let count = self.ready.min(into.len());
        into[..count].copy_from_slice(&self.input[..count]);
        self.input.drain(..count);
        self.ready -= count;
        count
    }

    /// Makes readable what has come, frame by frame.
    fn look(&mut self) {
        while self.ready < self.input.len() {
            let rest = &mut self.input[self.ready..];
            if self.is_foreign || self.passing > 0 {
                let count = if self.is_foreign { rest.len() } else { self.passing.min(rest.len()) };
                self.passing = self.passing.saturating_sub(count);
                self.ready += count;
                continue;
            }
            let Some(head) = rest.first_chunk::<FRAME_HEAD>() else { return };
            let size = u32::from_be_bytes([head[3], head[4], head[5], head[6]]) as usize;
            let whole = FRAME_HEAD + size + FRAME_END;
            match head[0] {
                kind @ (METHOD | HEADER) if whole <= MAX_FRAME => {
                    let Some(frame) = rest.get_mut(..whole) else { return };
                    // One that is malformed is the library's to refuse.
                    let _ = make_readable(kind, &mut frame[FRAME_HEAD..FRAME_HEAD + size]);
                    self.ready += whole;
                }
                METHOD | HEADER | BODY | HEARTBEAT => self.passing = whole,
                _ => self.is_foreign = true,
            }
        }
    }
}

/// Makes the payload of a frame readable; nothing where it ends too early.
fn make_readable(kind: u8, payload: &mut [u8]) -> Option<()> {
    let mut rest = Rest(payload);
    if kind == METHOD {
        match rest.array::<4>()? {
            // Consumer, then delivery and whether it is one more.
            DELIVER => {
                rest.short_string()?;
                rest.skip(9)?;
            }
            // Delivery, and whether it is one more.
            GET_OK => rest.skip(9)?,
            _ => return Some(()),
        }
        // Exchange and routing key.
        rest.short_string()?;
        return rest.short_string();
    }
    // Class, weight and size of the body.
    rest.skip(12)?;
    let flags = u16::from_be_bytes(rest.array()?);
    type Property = fn(&mut Rest<'_>) -> Option<()>;
    const TEXT: Property = |rest| rest.short_string();
    const PROPERTIES: [Property; 14] = [
        // content-type, content-encoding
        TEXT,
        TEXT,
        // headers
        |rest| rest.table(0),
        // delivery-mode, priority
        |rest| rest.skip(1),
        |rest| rest.skip(1),
        // correlation-id, reply-to, expiration, message-id
        TEXT,
        TEXT,
        TEXT,
        TEXT,
        // timestamp
        |rest| rest.skip(8),
        // type, user-id, app-id, cluster-id
        TEXT,
        TEXT,
        TEXT,
        TEXT,
    ];
    for (place, property) in PROPERTIES.iter().enumerate() {
        if flags & (1 << (15 - place)) != 0 {
            property(&mut rest)?;
        }
    }
    Some(())
}

/// What is left of a payload.
struct Rest<'a>(&'a mut [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, count: usize) -> Option<&'a mut [u8]> {
        let (taken, rest) = std::mem::take(&mut self.0).split_at_mut_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn skip(&mut self, count: usize) -> Option<()> {
        self.take(count).map(|_| ())
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn short_string(&mut self) -> Option<()> {
        let [length] = self.array()?;
        let text = self.take(length.into())?;
        if std::str::from_utf8(text).is_err() {
            text.fill(UNREADABLE);
        }
        Some(())
    }

    /// What stands behind its length.
    fn sized(&mut self) -> Option<Self> {
        let length = u32::from_be_bytes(self.array()?);
        self.take(length.try_into().ok()?).map(Self)
    }

    fn table(&mut self, depth: usize) -> Option<()> {
        let mut entries = self.sized()?;
        while !entries.0.is_empty() {
            entries.short_string()?;
            entries.value(depth)?;
        }
        Some(())
    }

    /// A value as RabbitMQ writes it, behind the letter of its type.
    fn value(&mut self, depth: usize) -> Option<()> {
        let kind = self.take(1)?;
        match kind[0] {
            b'F' | b'A' if depth == MAX_DEPTH => {
                kind[0] = b'x';
                self.sized().map(|_| ())
            }
            b'F' => self.table(depth + 1),
            b'A' => {
                let mut values = self.sized()?;
                while !values.0.is_empty() {
                    values.value(depth + 1)?;
                }
                Some(())
            }
            b'S' | b'x' => self.sized().map(|_| ()),
            b't' | b'b' | b'B' => self.skip(1),
            b's' | b'U' | b'u' => self.skip(2),
            b'I' | b'i' | b'f' => self.skip(4),
            b'L' | b'l' | b'd' | b'T' => self.skip(8),
            b'D' => self.skip(5),
            b'V' => Some(()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let size = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&[kind, 0, 1][..], &size, payload, &[0xCE]].concat()
    }

    fn short(text: &[u8]) -> Vec<u8> {
        [&[u8::try_from(text.len()).unwrap()][..], text].concat()
    }

    fn long(kind: u8, bytes: &[u8]) -> Vec<u8> {
        [&[kind][..], &u32::try_from(bytes.len()).unwrap().to_be_bytes(), bytes].concat()
    }

    fn deliver(routing_key: &[u8]) -> Vec<u8> {
        frame(METHOD, &[&DELIVER[..], &short(b"tag"), &[0; 9], &short(b"orders"), &short(routing_key)].concat())
    }

    /// A content header with a content type, headers and a message id.
    fn header(content_type: &[u8], table: &[u8], message_id: &[u8]) -> Vec<u8> {
        let table = &long(b'F', table)[1..];
        let flags = [0b1010_0000, 0b1000_0000];
        let properties = [&short(content_type)[..], table, &short(message_id)].concat();
        frame(HEADER, &[&[0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3][..], &flags, &properties].concat())
    }

    /// What comes of input that arrives in pieces of this size.
    fn sifted(input: &[u8], piece: usize) -> Vec<u8> {
        let (mut frames, mut given) = (Frames::default(), Vec::new());
        for piece in input.chunks(piece) {
            frames.input.extend_from_slice(piece);
            frames.look();
            let mut into = [0; 5];
            while let count @ 1.. = frames.give(&mut into) {
                given.extend_from_slice(&into[..count]);
            }
        }
        given
    }

    #[test]
    fn what_is_text_passes_as_it_came_in_any_pieces() {
        let table = [&short(b"x-id")[..], &long(b'S', b"\xff\xfe"), &short("é".as_bytes()), b"t\x01"].concat();
        let input = [
            deliver("schl\u{fc}ssel".as_bytes()),
            header(b"text/plain", &table, b"m-1"),
            frame(BODY, b"\xff\xfe\x02"),
            frame(HEARTBEAT, b""),
            // It does not end.
            frame(HEADER, b"\0"),
        ]
        .concat();
        for piece in [1, 2, 3, 7, 8, 64, 4096] {
            assert_eq!(sifted(&input, piece), input, "{piece}");
        }
        let foreign = b"AMQP\x00\x00\x09\x01and more".to_vec();
        assert_eq!(sifted(&foreign, 3), foreign);
    }

    #[test]
    fn short_strings_that_are_no_text_become_control_characters() {
        let table = |name: &[u8]| {
            let inner = [&short(name)[..], b"I\0\0\0\x07"].concat();
            [&short(name)[..], &long(b'F', &inner), &short(b"a"), &long(b'A', &long(b'F', &inner))].concat()
        };
        let given =
            [deliver(b"\xff\x00"), header(b"a\x80", &table(b"\xc3"), b"\xff\xfe"), frame(BODY, b"\xff")].concat();
        let expected = [deliver(b"\x01\x01"), header(b"\x01\x01", &table(b"\x01"), b"\x01\x01"), frame(BODY, b"\xff")];
        for piece in [1, 5, 4096] {
            assert_eq!(sifted(&given, piece), expected.concat(), "{piece}");
        }
        let got = |key: &[u8]| frame(METHOD, &[&GET_OK[..], &[0; 9], &short(b""), &short(key), &[0; 4]].concat());
        assert_eq!(sifted(&got(b"\xff"), 64), got(b"\x01"));
    }

    #[test]
    fn tables_that_are_too_deep_are_bytes() {
        let nested = |depth: usize, deepest: u8| {
            (1..depth).fold([&short(b"n")[..], &long(deepest, &short(b"\xff"))].concat(), |inner, _| {
                [&short(b"n")[..], &long(b'F', &inner)].concat()
            })
        };
        let given = header(b"", &nested(MAX_DEPTH + 1, b'F'), b"");
        assert_eq!(sifted(&given, 4096), header(b"", &nested(MAX_DEPTH + 1, b'x'), b""));
        let deepest = header(b"", &nested(10_000, b'F'), b"");
        assert_eq!(sifted(&deepest, 4096).len(), deepest.len());
    }
}
