//! Detects the protocol of a connection by its first bytes.

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::{Instant, timeout_at};

/// The HTTP/2 connection preface (RFC 9113, 3.4). No HTTP/1.1 request starts with it.
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Capacity of the first read, in bytes.
const READ_SIZE: usize = 4 << 10;

/// The version of HTTP on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HttpVersion {
    /// HTTP/1.1 or 1.0, or an unknown protocol, which the HTTP/1.1 reader refuses.
    Http1,
    /// HTTP/2.
    Http2,
}

/// A detected version.
pub(super) struct Detected {
    pub(super) version: HttpVersion,
    /// The bytes that were read for the detection.
    pub(super) read: BytesMut,
}

/// Why no version was detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DetectError {
    /// The client closed the connection without sending a byte.
    Closed,
    /// The client sent nothing before the deadline.
    TimedOut,
}

/// Detects the version by the first bytes. A client that stops in the middle of a preface until `deadline` is passed
/// to the HTTP/1.1 reader, which answers it.
///
/// `read` holds bytes that were read before.
pub(super) async fn detect<S>(socket: &mut S, mut read: BytesMut, deadline: Instant) -> Result<Detected, DetectError>
where
    S: AsyncRead + Unpin,
{
    let version = loop {
        if read.starts_with(PREFACE) {
            break HttpVersion::Http2;
        }
        if !PREFACE.starts_with(&read) {
            break HttpVersion::Http1;
        }
        read.reserve(READ_SIZE);
        match timeout_at(deadline, socket.read_buf(&mut read)).await {
            Ok(Ok(1..)) => {}
            Ok(_) if read.is_empty() => return Err(DetectError::Closed),
            Err(_) if read.is_empty() => return Err(DetectError::TimedOut),
            Ok(_) | Err(_) => break HttpVersion::Http1,
        }
    };
    Ok(Detected { version, read })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncWriteExt as _, duplex};

    use super::*;

    async fn detect_in(bytes: &[u8], closes: bool) -> Result<(HttpVersion, Vec<u8>), DetectError> {
        let (mut client, mut socket) = duplex(64);
        client.write_all(bytes).await.unwrap();
        if closes {
            client.shutdown().await.unwrap();
        }
        let detected = detect(&mut socket, BytesMut::new(), Instant::now() + Duration::from_secs(5)).await?;
        Ok((detected.version, detected.read.to_vec()))
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_whole_preface_is_http_2() {
        for length in 1..=PREFACE.len() {
            let (begin, is_whole) = (&PREFACE[..length], length == PREFACE.len());
            let expected = if is_whole { HttpVersion::Http2 } else { HttpVersion::Http1 };
            assert_eq!(detect_in(begin, false).await, Ok((expected, begin.to_vec())), "{length}");
            assert_eq!(detect_in(begin, true).await, Ok((expected, begin.to_vec())), "{length}");
        }
        for other in ["P", "PUT / HTTP/1.1\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\n", "PRI * HTTP/1.1\r\n", "\x16\x03\x01"]
        {
            assert_eq!(detect_in(other.as_bytes(), false).await, Ok((HttpVersion::Http1, other.as_bytes().to_vec())));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_times_out() {
        assert_eq!(detect_in(b"", false).await, Err(DetectError::TimedOut));
        assert_eq!(detect_in(b"", true).await, Err(DetectError::Closed));
    }
}
