//! Where a listener has its socket from.

use std::fmt;
use std::net::SocketAddr;

/// Where a listener has its socket from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// It is bound to this address.
    Address(SocketAddr),
    /// The process inherits it, as from systemd: the one of this name, or those that no listener names.
    Inherited(Option<String>),
}

impl Listen {
    /// Whether one takes the other's socket. Port 0 is any free port.
    #[must_use]
    pub fn collides_with(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Address(one), Self::Address(other)) => {
                let same_family = one.is_ipv4() == other.is_ipv4();
                let is_any = one.ip().is_unspecified() || other.ip().is_unspecified();
                let same_ip = one.ip() == other.ip() || (same_family && is_any);
                one.port() != 0 && one.port() == other.port() && same_ip
            }
            (Self::Inherited(one), Self::Inherited(other)) => one == other,
            _ => false,
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Inherited(None) => f.write_str("systemd"),
            Self::Inherited(Some(name)) => write!(f, "systemd:{name}"),
        }
    }
}

impl From<SocketAddr> for Listen {
    fn from(address: SocketAddr) -> Self {
        Self::Address(address)
    }
}
