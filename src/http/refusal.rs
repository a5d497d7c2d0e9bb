//! What a connection gets that has no place.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::problem::Problem;
use super::socket::read_on;
use crate::telemetry::limits::Limit;
use crate::telemetry::outcome::Code;

/// How many of them are told why at a time. The others are closed at once, so that what is refused takes nothing either.
const AT_A_TIME: usize = 64;

/// How long a client that says nothing is waited for.
const SILENCE: Duration = Duration::from_millis(500);

/// How long it may take in all to tell one.
const LONGEST: Duration = Duration::from_secs(2);

/// When to come back.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Tells connections that there is no place for them.
pub(super) struct Refusals {
    turns: Arc<Semaphore>,
    all: Bytes,
    of_address: Bytes,
}

impl Refusals {
    pub(super) fn new() -> Self {
        let words = |code, detail: &str| Problem::new(code, detail).retry_after(RETRY_AFTER).into_last_words();
        Self {
            turns: Arc::new(Semaphore::new(AT_A_TIME)),
            all: words(Code::Overloaded, "the gate has as many connections as it may have; nothing was sent"),
            of_address: words(Code::QuotaExceeded, "too many connections from this address; nothing was sent"),
        }
    }

    /// What tells a client why it has no place; nothing where too many are being told already.
    pub(super) fn tell<S>(&self, stream: S, why: Limit) -> Option<impl Future<Output = ()> + Send + use<S>>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin,
    {
        let turn = Arc::clone(&self.turns).try_acquire_owned().ok()?;
        let words = if why == Limit::MaxConnectionsPerAddress { &self.of_address } else { &self.all };
        let telling = tell(stream, words.clone());
        Some(async move {
            // However it went.
            let _ = timeout(LONGEST, telling).await;
            drop(turn);
        })
    }
}

async fn tell<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, words: Bytes) -> std::io::Result<()> {
    let mut ignored = [0; 4096];
    // A client may be confused by an answer to what it did not ask yet.
    if timeout(SILENCE, stream.read(&mut ignored)).await.unwrap_or(Ok(1))? == 0 {
        return Ok(());
    }
    stream.write_all(&words).await?;
    stream.shutdown().await?;
    read_on(&mut stream, LONGEST).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::duplex;

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_is_told_too_and_nobody_holds_it_up() {
        let refusals = Refusals::new();
        let (mut client, stream) = duplex(1024);
        tokio::spawn(refusals.tell(stream, Limit::MaxConnections).unwrap());
        let mut told = String::new();
        client.read_to_string(&mut told).await.unwrap();
        assert!(told.starts_with("HTTP/1.1 503 Service Unavailable\r\n"), "{told}");
        assert!(told.contains("\r\nretry-after: 1\r\n") && told.contains("\r\nconnection: close\r\n"), "{told}");
        let length = told.split("content-length: ").nth(1).unwrap().split("\r\n").next().unwrap();
        assert_eq!(told.split("\r\n\r\n").nth(1).unwrap().len().to_string(), length);
        // It stays, and is left.
        tokio::time::sleep(LONGEST).await;
        assert_eq!(refusals.turns.available_permits(), AT_A_TIME);
    }

    #[tokio::test]
    async fn only_so_many_are_told_at_a_time() {
        let refusals = Refusals::new();
        let streams: Vec<_> = (0..=AT_A_TIME).map(|_| duplex(64)).collect();
        let told = streams.into_iter().filter_map(|(_, stream)| refusals.tell(stream, Limit::MaxConnections));
        let told: Vec<_> = told.collect();
        assert_eq!(told.len(), AT_A_TIME);
        drop(told);
        assert_eq!(refusals.turns.available_permits(), AT_A_TIME);
    }
}
