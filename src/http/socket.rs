//! Socket options, and draining of input before a close.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::timeout;

/// The idle time before the first TCP keepalive probe, and the interval between probes.
const KEEPALIVE: Duration = Duration::from_secs(60);
const KEEPALIVE_AGAIN: Duration = Duration::from_secs(15);

/// Disables Nagle's algorithm and enables keepalive, which detects vanished peers.
pub(super) fn configure_tcp(stream: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_AGAIN))
}

/// Reads on what a client still sends, until it closes, fails, or pauses for so long: closed with bytes unread, the
/// connection would be reset, and the last answer lost on its way (RFC 9112, 9.6).
pub(super) async fn drain_input(socket: &mut (impl AsyncRead + Unpin), pause: Duration) {
    // On the heap, so that the future of each connection stays small.
    let mut unread = vec![0; 8 << 10];
    while let Ok(Ok(1..)) = timeout(pause, socket.read(&mut unread)).await {}
}
