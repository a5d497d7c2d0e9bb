//! Checks the bytes of an HTTP/1.1 client before hyper reads them.
//!
//! Two readers of one stream must never see two different requests. Every byte of a connection is therefore checked against
//! the grammar of RFC 9112 on its way from the socket. Input that is not unambiguously one request is refused together with
//! its connection. hyper would repair some of it, and the server behind might repair it differently. Accepted bytes pass
//! unchanged.
//!
//! `head`, `chunked` and `message` are pure: bytes in, verdict out. `client_io` puts them between a socket and hyper.

mod chunked;
mod client_io;
mod connection;
mod head;
mod message;

pub(super) use self::client_io::{ClientIo, poll_until};
pub(super) use self::connection::{ConnectionState, RefusedRequest, StartedExchange};
pub use self::connection::{ExchangeGuard, Interim};
pub(super) use self::head::{check_target, judge_trailer_fields};
pub use self::message::MessageParser;
