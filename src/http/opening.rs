//! What a connection begins with: which protocol it is of.

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::{Instant, timeout_at};

/// What every connection of HTTP/2 begins with (RFC 9113, 3.4). No request of HTTP/1.1 does.
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// How many bytes are read at first.
const FIRST: usize = 4 << 10;

/// What a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    /// HTTP/1.1 or 1.0: or nothing that is known, of which the reader of HTTP/1.1 says so.
    Http1,
    /// HTTP/2.
    Http2,
}

/// What came first.
pub(super) struct Opening {
    pub(super) protocol: Protocol,
    /// What was read to find out.
    pub(super) read: BytesMut,
}

/// Why there is nothing to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nothing {
    /// The client left without a word.
    Left,
    /// It said nothing in time.
    Silent,
}

/// Tells what a client speaks by its first bytes. Who stops in the middle of a preface until `deadline` is left to the
/// reader of HTTP/1.1, which answers him.
///
/// `read` was read before.
pub(super) async fn open<S>(socket: &mut S, mut read: BytesMut, deadline: Instant) -> Result<Opening, Nothing>
where
    S: AsyncRead + Unpin,
{
    let protocol = loop {
        if read.starts_with(PREFACE) {
            break Protocol::Http2;
        }
        if !PREFACE.starts_with(&read) {
            break Protocol::Http1;
        }
        read.reserve(FIRST);
        match timeout_at(deadline, socket.read_buf(&mut read)).await {
            Ok(Ok(1..)) => {}
            Ok(_) if read.is_empty() => return Err(Nothing::Left),
            Err(_) if read.is_empty() => return Err(Nothing::Silent),
            Ok(_) | Err(_) => break Protocol::Http1,
        }
    };
    Ok(Opening { protocol, read })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncWriteExt as _, duplex};

    use super::*;

    async fn opened(bytes: &[u8], closes: bool) -> Result<(Protocol, Vec<u8>), Nothing> {
        let (mut client, mut socket) = duplex(64);
        client.write_all(bytes).await.unwrap();
        if closes {
            client.shutdown().await.unwrap();
        }
        let opening = open(&mut socket, BytesMut::new(), Instant::now() + Duration::from_secs(5)).await?;
        Ok((opening.protocol, opening.read.to_vec()))
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_whole_preface_is_http_2() {
        for length in 1..=PREFACE.len() {
            let (begin, is_whole) = (&PREFACE[..length], length == PREFACE.len());
            let expected = if is_whole { Protocol::Http2 } else { Protocol::Http1 };
            assert_eq!(opened(begin, false).await, Ok((expected, begin.to_vec())), "{length}");
            assert_eq!(opened(begin, true).await, Ok((expected, begin.to_vec())), "{length}");
        }
        for other in ["P", "PUT / HTTP/1.1\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\n", "PRI * HTTP/1.1\r\n", "\x16\x03\x01"]
        {
            assert_eq!(opened(other.as_bytes(), false).await, Ok((Protocol::Http1, other.as_bytes().to_vec())));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_who_is_silent_is_waited_for() {
        assert_eq!(opened(b"", false).await, Err(Nothing::Silent));
        assert_eq!(opened(b"", true).await, Err(Nothing::Left));
    }
}
