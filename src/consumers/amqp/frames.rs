//! Connections to RabbitMQ whose frames the client library can read, whatever a publisher has put into a message.
//!
//! A short string is UTF-8 (AMQP 0-9-1, section 4.2.5.3). RabbitMQ takes any bytes from a publisher, and hands them on. The library
//! ends the connection where they are no text, and would read the same message first on the next: no other message of the queue would
//! come, and each new connection would count as one more delivery of all that had come with it. So these bytes become control
//! characters before the library reads them. No key has one, so a message whose key they are is a dead letter.
//!
//! The library also ends the connection at a frame that is larger than agreed on. RabbitMQ does not hold the headers of a message
//! to that, and adds to them when the message comes back. Where a content header is too large, [`LEFT_OUT`] stands in the place of its
//! headers, and the message is a dead letter.
//!
//! Tables in tables beyond [`MAX_DEPTH`] become byte arrays: the library reads them by recursion.

use std::future::Future;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use futures_io::{AsyncRead, AsyncWrite};
use futures_util::future::{FutureExt as _, Shared};
use futures_util::{Stream, future};
use lapin::tcp::{AsyncTcpStream, TLSConfig};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{Connection, ConnectionProperties};
use tokio::sync::oneshot;

use super::super::source::LOOKUP;
use crate::net::{ATTEMPT_DELAY, Names, race};

/// Stands for each byte of a short string that is no text.
const UNREADABLE: u8 = 1;

/// How many tables and arrays may stand within each other.
const MAX_DEPTH: usize = 32;

/// The header of a message whose own headers are left out: their frame is too large.
pub(super) const LEFT_OUT: &str = "x-oncegate-headers-left-out";

/// The largest frame that the gate asks for, in bytes. A server whose own limit is lower has its way. The library makes room for 32 of
/// them, twice.
pub(super) const LARGEST_FRAME: u32 = 1 << 20;

/// Frames of more bytes are not looked at, and the library ends the connection. They would have to be held as a whole.
const LARGEST_HELD: usize = 16 << 20;

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

/// `connection.tune`, and the methods that bring a message: `basic.deliver` and `basic.get-ok`. Each is a class and a method.
const TUNE: [u8; 4] = [0, 10, 0, 30];
const DELIVER: [u8; 4] = [0, 60, 0, 60];
const GET_OK: [u8; 4] = [0, 60, 0, 71];

/// Where the properties of a content header begin: behind its class, its weight, the size of the body, and the flags that say which
/// properties there are.
const FLAGS: usize = 12;
const PROPERTIES: usize = FLAGS + 2;

/// The flags of the first three properties.
const CONTENT_TYPE: u16 = 1 << 15;
const CONTENT_ENCODING: u16 = 1 << 14;
const HEADERS: u16 = 1 << 13;

/// What a handshake is awaited by: it ends well, or an error says that it is given up.
type Handshake = Shared<oneshot::Receiver<()>>;

/// Connects. The library has a thread for each connection, which would wait for ever for a broker that says nothing: where this is
/// given up, the thread ends.
pub(super) async fn connect(uri: AMQPUri, properties: ConnectionProperties) -> lapin::Result<Connection> {
    let runtime = Runtime::new(RuntimeParts::new(Tokio::current(), ReadableReactor(Tokio::current())));
    let (handshake, awaited) = oneshot::channel();
    let awaited = awaited.shared();
    let connect = async move |uri: AMQPUri, _| {
        let opening = pin!(open(&uri));
        // Nothing completes it before there is a stream.
        let stream = match future::select(opening, awaited.clone()).await {
            future::Either::Left((stream, _)) => stream?,
            future::Either::Right(_) => return Err(given_up().into()),
        };
        Ok(AsyncTcpStream::Plain(Readable { handshake: Some(awaited.clone()), ..Readable::new(stream) }))
    };
    let connection = Connection::connector(uri, runtime, connect, properties).await?;
    // Dropped before, it ends the thread.
    let _ = handshake.send(());
    Ok(connection)
}

fn given_up() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no answer in time")
}

/// A stream to the broker, encrypted if it is to be.
async fn open(uri: &AMQPUri) -> io::Result<AsyncTcpStream<Tcp>> {
    let authority = &uri.authority;
    let addresses = Names::global().resolve_within(LOOKUP, &authority.host, authority.port).await?;
    let stream = AsyncTcpStream::Plain(open_one_of(addresses).await?);
    match uri.scheme {
        AMQPScheme::AMQP => Ok(stream),
        AMQPScheme::AMQPS => stream.into_tls(&authority.host, TLSConfig::default()).await,
    }
}

/// A connection to the first of these addresses that takes it.
async fn open_one_of(addresses: Vec<SocketAddr>) -> io::Result<Tcp> {
    let tokio = Tokio::current();
    let opened = race(ATTEMPT_DELAY, addresses.into_iter(), |address| tokio.tcp_connect_addr(address), |_| false).await;
    opened.map_err(|error| error.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into()))
}

type Tcp = <Tokio as Reactor>::TcpStream;

/// The reactor of tokio, whose streams are [`Readable`].
#[derive(Clone, Debug)]
struct ReadableReactor(Tokio);

impl Reactor for ReadableReactor {
    type TcpStream = Readable<AsyncTcpStream<Tcp>>;
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
    filter: FrameFilter,
    /// There, until it has ended well.
    handshake: Option<Handshake>,
}

impl<S> Readable<S> {
    fn new(stream: S) -> Self {
        Self { stream, filter: FrameFilter::default(), handshake: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Readable<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        let Self { stream, filter, handshake } = &mut *self;
        match handshake.as_mut().map(|handshake| handshake.poll_unpin(cx)) {
            Some(Poll::Ready(Ok(()))) => *handshake = None,
            Some(Poll::Ready(Err(_))) => return Poll::Ready(Err(given_up())),
            Some(Poll::Pending) | None => {}
        }
        loop {
            let given = filter.give(into);
            if given > 0 || into.is_empty() {
                return Poll::Ready(Ok(given));
            }
            match Pin::new(&mut *stream).poll_read(cx, filter.room()) {
                Poll::Ready(Ok(0)) if filter.filled == 0 => return Poll::Ready(Ok(0)),
                // The connection ended within a frame.
                Poll::Ready(Ok(0)) => filter.ready = filter.filled,
                Poll::Ready(Ok(count)) => filter.read(count),
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

/// Makes frames readable that arrive in pieces.
struct FrameFilter {
    /// The bytes that were read and that the library has not taken, then room for more.
    input: Vec<u8>,
    /// How many of them are bytes that were read.
    filled: usize,
    /// How many the library may take.
    ready: usize,
    /// How many bytes of the frame under way still have to come and pass as they are.
    passing: usize,
    /// The largest frame that the library takes, in bytes.
    largest: usize,
    /// It is another protocol.
    is_foreign: bool,
}

impl Default for FrameFilter {
    fn default() -> Self {
        let largest = LARGEST_FRAME as usize;
        Self { input: Vec::new(), filled: 0, ready: 0, passing: 0, largest, is_foreign: false }
    }
}

impl FrameFilter {
    /// Hands the library the bytes that it may take, as many as have room. Returns how many.
    fn give(&mut self, into: &mut [u8]) -> usize {
        let count = self.ready.min(into.len());
        into[..count].copy_from_slice(&self.input[..count]);
        self.input.copy_within(count..self.filled, 0);
        self.filled -= count;
        self.ready -= count;
        count
    }

    /// Where more is read to.
    fn room(&mut self) -> &mut [u8] {
        let needed = self.filled + CHUNK;
        if self.input.len() < needed {
            self.input.resize(needed, 0);
        }
        &mut self.input[self.filled..]
    }

    /// So much was read there. Makes whole frames readable.
    fn read(&mut self, count: usize) {
        self.filled += count;
        while self.ready < self.filled {
            let rest = &mut self.input[self.ready..self.filled];
            if self.is_foreign || self.passing > 0 {
                let count = if self.is_foreign { rest.len() } else { self.passing.min(rest.len()) };
                self.passing = self.passing.saturating_sub(count);
                self.ready += count;
                continue;
            }
            let Some(head) = rest.first_chunk::<FRAME_HEAD>() else { return };
            let (kind, size) = (head[0], u32::from_be_bytes([head[3], head[4], head[5], head[6]]) as usize);
            let whole = FRAME_HEAD + size + FRAME_END;
            match kind {
                METHOD | HEADER if whole <= LARGEST_HELD => {
                    let Some(frame) = rest.get_mut(..whole) else { return };
                    let payload = &mut frame[FRAME_HEAD..FRAME_HEAD + size];
                    if let (METHOD, Some(largest)) = (kind, largest_of(payload)) {
                        self.largest = largest.min(self.largest);
                    }
                    // One that is malformed is the library's to refuse.
                    let _ = make_readable(kind, payload);
                    self.ready += self.shortened(kind, whole).unwrap_or(whole);
                }
                METHOD | HEADER | BODY | HEARTBEAT => self.passing = whole,
                _ => self.is_foreign = true,
            }
        }
    }

    /// Leaves out the headers of the next frame if it is a content header that is too large. Returns its size then.
    fn shortened(&mut self, kind: u8, whole: usize) -> Option<usize> {
        if kind != HEADER || whole <= self.largest {
            return None;
        }
        let frame = &self.input[self.ready..self.ready + whole];
        let payload = without_headers(&frame[FRAME_HEAD..whole - FRAME_END])?;
        let size = u32::try_from(payload.len()).ok()?.to_be_bytes();
        let frame = [&frame[..FRAME_HEAD - size.len()], &size, &payload, &frame[whole - FRAME_END..]].concat();
        let shorter = frame.len();
        self.input.splice(self.ready..self.ready + whole, frame);
        self.filled -= whole - shorter;
        Some(shorter)
    }
}

/// The largest frame that the server names in `connection.tune`, if a method is that.
fn largest_of(method: &[u8]) -> Option<usize> {
    let arguments = method.strip_prefix(&TUNE)?;
    // Behind the most channels. 0 is no limit.
    let named = u32::from_be_bytes(arguments.get(2..6)?.try_into().ok()?);
    (named > 0).then_some(named as usize)
}

/// The payload of a content header with [`LEFT_OUT`] in the place of its headers; nothing if it has none, or ends too early.
fn without_headers(payload: &[u8]) -> Option<Vec<u8>> {
    let flags = u16::from_be_bytes(payload.get(FLAGS..PROPERTIES)?.try_into().ok()?);
    if flags & HEADERS == 0 {
        return None;
    }
    let mut begin = PROPERTIES;
    for property in [CONTENT_TYPE, CONTENT_ENCODING] {
        if flags & property != 0 {
            begin += 1 + usize::from(*payload.get(begin)?);
        }
    }
    let length = u32::from_be_bytes(payload.get(begin..begin + 4)?.try_into().ok()?) as usize;
    let others = payload.get(begin + 4 + length..)?;
    let entry = [&[LEFT_OUT.len() as u8], LEFT_OUT.as_bytes(), b"t\x01"].concat();
    Some([&payload[..begin], &(entry.len() as u32).to_be_bytes(), &entry, others].concat())
}

/// Makes the payload of a frame readable; nothing where it ends too early.
fn make_readable(kind: u8, payload: &mut [u8]) -> Option<()> {
    let mut reader = PayloadReader(payload);
    if kind == METHOD {
        match reader.array::<4>()? {
            // Consumer, then delivery and whether it is one more.
            DELIVER => {
                reader.short_string()?;
                reader.skip(9)?;
            }
            // Delivery, and whether it is one more.
            GET_OK => reader.skip(9)?,
            _ => return Some(()),
        }
        // Exchange and routing key.
        reader.short_string()?;
        return reader.short_string();
    }
    reader.skip(FLAGS)?;
    let flags = u16::from_be_bytes(reader.array()?);
    type Property = fn(&mut PayloadReader<'_>) -> Option<()>;
    const TEXT: Property = |reader| reader.short_string();
    const IN_ORDER: [Property; 14] = [
        // content-type, content-encoding
        TEXT,
        TEXT,
        // headers
        |reader| reader.table(0),
        // delivery-mode, priority
        |reader| reader.skip(1),
        |reader| reader.skip(1),
        // correlation-id, reply-to, expiration, message-id
        TEXT,
        TEXT,
        TEXT,
        TEXT,
        // timestamp
        |reader| reader.skip(8),
        // type, user-id, app-id, cluster-id
        TEXT,
        TEXT,
        TEXT,
        TEXT,
    ];
    for (place, property) in IN_ORDER.iter().enumerate() {
        if flags & (1 << (15 - place)) != 0 {
            property(&mut reader)?;
        }
    }
    Some(())
}

/// Reads a payload from its beginning, and holds the bytes that it has not read.
struct PayloadReader<'a>(&'a mut [u8]);

impl<'a> PayloadReader<'a> {
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
    use crate::net::testing::SilentAddress;

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

    /// A stream whose input arrives in pieces of this size, each after a pause, and then ends.
    struct Pieces<'a> {
        input: &'a [u8],
        size: usize,
        is_paused: bool,
    }

    impl AsyncRead for Pieces<'_> {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
            self.is_paused = !self.is_paused;
            if self.is_paused {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let (piece, rest) = self.input.split_at(self.input.len().min(self.size).min(into.len()));
            into[..piece.len()].copy_from_slice(piece);
            self.input = rest;
            Poll::Ready(Ok(piece.len()))
        }
    }

    /// What a reader gets of input that arrives in pieces of this size.
    fn filtered(input: &[u8], size: usize) -> Vec<u8> {
        let mut stream = Readable::new(Pieces { input, size, is_paused: false });
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let (mut given, mut into) = (Vec::new(), [0; 5]);
        loop {
            match Pin::new(&mut stream).poll_read(&mut cx, &mut into) {
                Poll::Ready(Ok(0)) => return given,
                Poll::Ready(Ok(count)) => given.extend_from_slice(&into[..count]),
                Poll::Ready(Err(error)) => panic!("{error}"),
                Poll::Pending => {}
            }
        }
    }

    /// A broker that takes connections and says nothing, and the URI of it.
    fn silent() -> (std::net::TcpListener, AMQPUri) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("amqp://{}", listener.local_addr().unwrap()).parse().unwrap();
        (listener, uri)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn connections_that_are_given_up_are_closed() {
        let (listener, uri) = silent();
        let mut accepted = Vec::new();
        for _ in 0..3 {
            let connecting = tokio::spawn(connect(uri.clone(), ConnectionProperties::default()));
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            // The library has begun its handshake.
            let mut header = [0; 8];
            stream.read_exact(&mut header).unwrap();
            assert_eq!(&header, b"AMQP\x00\x00\x09\x01");
            connecting.abort();
            accepted.push(stream);
        }
        for mut stream in accepted {
            assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0, "it is closed");
        }
        // It was not connected to again.
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[tokio::test]
    async fn a_silent_address_keeps_from_no_other() {
        let silent = SilentAddress::at("127.0.0.1:0".parse().unwrap());
        let good = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let opening = open_one_of(vec![silent.address(), good.local_addr().unwrap()]);
        let opened =
            tokio::time::timeout(Duration::from_secs(10), async { tokio::join!(opening, good.accept()) }).await;
        let (stream, accepted) = opened.expect("the good address was not tried");
        assert!(stream.is_ok() && accepted.is_ok());
    }

    #[test]
    fn what_is_text_passes_as_it_came_in_any_pieces() {
        let table = [&short(b"x-id")[..], &long(b'S', b"\xff\xfe"), &short("é".as_bytes()), b"t\x01"].concat();
        let input = [
            deliver("schl\u{fc}ssel".as_bytes()),
            header(b"text/plain", &table, b"m-1"),
            frame(BODY, b"\xff\xfe\x02"),
            frame(HEARTBEAT, b""),
            // Its payload ends too early.
            frame(HEADER, b"\0"),
            // It does not end.
            deliver(b"order")[..20].to_vec(),
        ]
        .concat();
        for piece in [1, 2, 3, 7, 8, 64, 4096] {
            assert_eq!(filtered(&input, piece), input, "{piece}");
        }
        let foreign = b"AMQP\x00\x00\x09\x01and more".to_vec();
        assert_eq!(filtered(&foreign, 3), foreign);
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
            assert_eq!(filtered(&given, piece), expected.concat(), "{piece}");
        }
        let got = |key: &[u8]| frame(METHOD, &[&GET_OK[..], &[0; 9], &short(b""), &short(key), &[0; 4]].concat());
        assert_eq!(filtered(&got(b"\xff"), 64), got(b"\x01"));
    }

    /// RabbitMQ has let a publisher use the whole frame, and has added a header of its own since.
    #[test]
    fn headers_that_are_too_large_are_left_out() {
        let tune = |largest: u32| frame(METHOD, &[&TUNE[..], &[7, 255], &largest.to_be_bytes(), &[0, 10]].concat());
        let table = |size: usize| [&short(b"x-large")[..], &long(b'S', &vec![b'z'; size])].concat();
        let fits = header(b"text/plain", &table(200), b"m-1");
        let largest = u32::try_from(fits.len()).unwrap();
        let left_out = [&short(LEFT_OUT.as_bytes())[..], b"t\x01"].concat();
        let expected =
            [tune(largest), fits.clone(), header(b"text/plain", &left_out, b"m-1"), deliver(b"order")].concat();
        let given = [tune(largest), fits, header(b"text/plain", &table(201), b"m-1"), deliver(b"order")].concat();
        for piece in [1, 100, 4096] {
            assert_eq!(filtered(&given, piece), expected, "{piece}");
        }
        let without_limit = [tune(0), header(b"", &table(LARGEST_FRAME as usize), b"")].concat();
        assert_eq!(filtered(&without_limit, 1 << 16), [tune(0), header(b"", &left_out, b"")].concat());
    }

    #[test]
    fn tables_that_are_too_deep_are_bytes() {
        let nested = |depth: usize, deepest: u8| {
            (1..depth).fold([&short(b"n")[..], &long(deepest, &short(b"\xff"))].concat(), |inner, _| {
                [&short(b"n")[..], &long(b'F', &inner)].concat()
            })
        };
        let given = header(b"", &nested(MAX_DEPTH + 1, b'F'), b"");
        assert_eq!(filtered(&given, 4096), header(b"", &nested(MAX_DEPTH + 1, b'x'), b""));
        let deepest = header(b"", &nested(10_000, b'F'), b"");
        assert_eq!(filtered(&deepest, 4096).len(), deepest.len());
    }
}
