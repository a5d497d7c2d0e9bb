//! Answers connections that exceed a connection limit.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::problem::Problem;
use super::socket::drain_input;
use crate::telemetry::limits::Limit;
use crate::telemetry::outcome::Code;

/// How many connections are answered at a time: a quarter of `max_connections`, since they are open files too, from 8 to 64. Further ones
/// are closed at once.
const OF_CONNECTIONS: u64 = 4;
const MIN_CONCURRENT: u64 = 8;
const MAX_CONCURRENT: u64 = 64;

/// How long to wait for the first bytes of a client.
const READ_TIMEOUT: Duration = Duration::from_millis(500);

/// How long answering one connection may take.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(2);

/// The value of `Retry-After`.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Tells connections that there is no place for them.
pub(super) struct Refusals {
    permits: Arc<Semaphore>,
    all: Bytes,
    of_address: Bytes,
}

impl Refusals {
    /// For a process that takes at most so many connections of clients.
    pub(super) fn new(max_connections: u64) -> Self {
        let most = (max_connections / OF_CONNECTIONS).clamp(MIN_CONCURRENT, MAX_CONCURRENT);
        let response = |code, detail: &str| Problem::new(code, detail).retry_after(RETRY_AFTER).into_http1_bytes();
        Self {
            permits: Arc::new(Semaphore::new(most as usize)),
            all: response(Code::Overloaded, "too many connections; nothing was sent"),
            of_address: response(Code::QuotaExceeded, "too many connections from this address; nothing was sent"),
        }
    }

    /// A future that answers a client; `None` where too many are being answered already.
    pub(super) fn respond<S>(&self, stream: S, why: Limit) -> Option<impl Future<Output = ()> + Send + use<S>>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin,
    {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        let response = if why == Limit::MaxConnectionsPerAddress { &self.of_address } else { &self.all };
        let responding = write_response(stream, response.clone());
        Some(async move {
            // A failure concerns only the refused client.
            let _ = timeout(TOTAL_TIMEOUT, responding).await;
            drop(permit);
        })
    }
}

async fn write_response<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, response: Bytes) -> std::io::Result<()> {
    let mut ignored = [0; 4096];
    // An answer before the request could confuse a client.
    if timeout(READ_TIMEOUT, stream.read(&mut ignored)).await.unwrap_or(Ok(1))? == 0 {
        return Ok(());
    }
    stream.write_all(&response).await?;
    stream.shutdown().await?;
    drain_input(&mut stream, TOTAL_TIMEOUT).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::duplex;

    const MANY: u64 = 12_000;

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_is_answered_after_the_read_timeout() {
        let refusals = Refusals::new(MANY);
        let (mut client, stream) = duplex(1024);
        tokio::spawn(refusals.respond(stream, Limit::MaxConnections).unwrap());
        let mut told = String::new();
        client.read_to_string(&mut told).await.unwrap();
        assert!(told.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{told}");
        assert!(told.contains("\r\nretry-after: 1\r\n") && told.contains("\r\nconnection: close\r\n"), "{told}");
        let length = told.split("content-length: ").nth(1).unwrap().split("\r\n").next().unwrap();
        assert_eq!(told.split("\r\n\r\n").nth(1).unwrap().len().to_string(), length);
        // It stays, and is left.
        tokio::time::sleep(TOTAL_TIMEOUT).await;
        assert_eq!(refusals.permits.available_permits(), MAX_CONCURRENT as usize);
    }

    #[tokio::test]
    async fn concurrent_answers_are_limited() {
        let refusals = Refusals::new(MANY);
        assert_eq!(Refusals::new(48).permits.available_permits(), 12);
        let streams: Vec<_> = (0..=MAX_CONCURRENT).map(|_| duplex(64)).collect();
        let told = streams.into_iter().filter_map(|(_, stream)| refusals.respond(stream, Limit::MaxConnections));
        let told: Vec<_> = told.collect();
        assert_eq!(told.len(), MAX_CONCURRENT as usize);
        drop(told);
        assert_eq!(refusals.permits.available_permits(), MAX_CONCURRENT as usize);
    }
}
