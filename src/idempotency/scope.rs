//! Who a key belongs to.

use http::{HeaderMap, HeaderName};
use std::net::IpAddr;

/// One part of a scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScopePart {
    /// `header:NAME`: every line of it.
    Header(HeaderName),
    /// `cookie:NAME`: every cookie of that name.
    Cookie(String),
    /// `basic:user`: the user of HTTP Basic credentials (RFC 7617).
    BasicUser,
    /// `host`: the request's authority, in lower case.
    Host,
    /// `client-ip`
    ClientIp,
    /// `const:TEXT`
    Const(String),
}

/// What a scope may be made of.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// The request's headers, as received.
    pub headers: &'a HeaderMap,
    /// The request's authority: of an absolute-form target, else of `Host`.
    pub authority: Option<&'a str>,
    /// The address of the client.
    pub client_ip: Option<IpAddr>,
}
