//! What is asked of the system for each connection, on either side.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::timeout;

/// After how long without a word from it a peer is asked whether it is there, and how often then.
const KEEPALIVE: Duration = Duration::from_secs(60);
const KEEPALIVE_AGAIN: Duration = Duration::from_secs(15);

/// Has small writes sent at once, and a peer noticed that has gone without a word.
pub(super) fn watch_over(stream: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE_AGAIN))
}

/// Reads on what a client still sends, until it closes, fails, or pauses for so long: closed with bytes unread, the
/// connection would be reset, and the last answer lost on its way (RFC 9112, 9.6).
pub(super) async fn read_on(socket: &mut (impl AsyncRead + Unpin), pause: Duration) {
    // Not within the future: all connections would have the room for it.
    let mut unread = vec![0; 8 << 10];
    while let Ok(Ok(1..)) = timeout(pause, socket.read(&mut unread)).await {}
}
