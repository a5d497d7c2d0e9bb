//! Errors of sending a request.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use super::response_head::HeadFault;
use crate::http::body;

/// Sending failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Provably nothing was sent.
    #[error("nothing was sent: {0}")]
    NotSent(#[source] NotSent),
    /// The client's own body broke off or is malformed, so the request was never whole.
    #[error("the client's body cannot be read: {0}")]
    ClientBody(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Bytes may have been sent.
    #[error("the exchange failed: {}{}", .0, cause_of(.0))]
    Unknown(#[source] hyper::Error),
    /// The end of the answer is ambiguous, or it has an unsupported transfer coding (RFC 9112, 6).
    #[error("the end of the answer is ambiguous, or it has a transfer coding other than chunked")]
    Framing,
    /// The answer's head is refused as it comes.
    #[error("{0}")]
    Head(#[source] HeadFault),
}

impl Error {
    /// Whether the chunks or the trailers of an answer are malformed, so that its end cannot be found.
    #[must_use]
    pub fn is_malformed_body(&self) -> bool {
        let Self::Unknown(error) = self else { return false };
        // The decoder's own errors have a text; those of connections have a kind alone, or that of the system.
        let decoding = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
        decoding.is_some_and(|cause| {
            matches!(cause.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData)
                && cause.get_ref().is_some_and(|inner| !inner.is::<HeadFault>())
        })
    }
}

/// What is behind an error, which does not say so itself.
fn cause_of(error: &hyper::Error) -> String {
    error.source().map(|cause| format!(": {cause}")).unwrap_or_default()
}

/// Why nothing was sent.
#[derive(Debug, thiserror::Error)]
pub enum NotSent {
    /// Its name did not resolve, or no address took the connection.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// The TLS handshake failed: one side does not trust the other, or the upstream does not speak TLS.
    #[error("TLS handshake failed: {0}")]
    Tls(#[source] io::Error),
    /// The configured server name is not a valid TLS server name.
    #[error("TLS: the host is not a valid TLS server name")]
    Name,
    /// It was asked to speak HTTP/2, and does not.
    #[error("it does not speak HTTP/2")]
    NoH2,
    /// The host of the request is not valid in HTTP/2.
    #[error("the request's Host is not valid in HTTP/2")]
    Host,
    /// It refused the request unprocessed.
    #[error("it refused the request unprocessed: {0}")]
    Refused(#[source] hyper::Error),
    /// No connection opened in time.
    #[error("no connection within {0:?}")]
    ConnectTimeout(Duration),
    /// The connection limit is reached, and no connection became free in time.
    #[error("no connection became free within {0:?}")]
    NoneFree(Duration),
    /// The connection closed before the request was written to it.
    #[error("the connection closed first: {0}")]
    Closed(#[source] hyper::Error),
    /// What came before a byte of the request was sent says why it is no use.
    #[error("{0}")]
    Unasked(#[source] HeadFault),
    /// The connection had closed before.
    #[error("the connection had closed")]
    Ended,
}

/// Why nothing was sent on a connection on which something came first, or that closed.
pub(super) fn not_sent(error: hyper::Error) -> NotSent {
    match std::error::Error::source(&error).and_then(head_fault) {
        Some(fault) => NotSent::Unasked(fault),
        None => NotSent::Closed(error),
    }
}

/// The fault of an answer's head, if it is the cause.
fn head_fault(cause: &(dyn std::error::Error + 'static)) -> Option<HeadFault> {
    // An io::Error names as its source that of the error in it.
    cause.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref().copied()
}

/// hyper does not say where an error comes from; one of the client's own body, or of the answer's head, is among its causes.
pub(super) fn broke_off(error: hyper::Error) -> Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(inner) = cause {
        if matches!(inner.downcast_ref(), Some(body::Error::Broken(_) | body::Error::Refused(_))) {
            return Error::ClientBody(error.into());
        }
        if let Some(fault) = head_fault(inner) {
            return Error::Head(fault);
        }
        cause = inner.source();
    }
    Error::Unknown(error)
}
