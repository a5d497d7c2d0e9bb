//! Addresses for tests.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket};

/// An address that answers no connection: its backlog is full. Held, it stays so.
pub(crate) struct SilentAddress {
    listener: TcpListener,
    _waiting: Vec<TcpStream>,
}

impl SilentAddress {
    /// Occupies this address.
    pub(crate) fn at(address: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(address).unwrap();
        let listener = socket.listen(0).unwrap();
        let address = listener.local_addr().unwrap();
        let connect = || TcpStream::connect_timeout(&address, Duration::from_millis(100)).ok();
        Self { _waiting: std::iter::from_fn(connect).collect(), listener }
    }

    /// Where it is.
    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }
}
