//! Connects to one of several addresses, some of which may be silent.

use std::future::Future;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::time::sleep;

/// The connection attempt delay: when the next address is tried in parallel (RFC 8305, 5).
pub const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Connects to the first of these that takes it. The next one is tried when the one before fails, or has taken `delay`.
///
/// # Errors
/// That of the first that failed; none where there is nothing to try.
pub async fn race<C, T, E, F: Future<Output = Result<T, E>>>(
    delay: Duration,
    mut candidates: impl ExactSizeIterator<Item = C>,
    connect: impl Fn(C) -> F,
) -> Result<T, Option<E>> {
    let mut connecting = FuturesUnordered::new();
    let mut first_error = None;
    loop {
        if let Some(next) = candidates.next() {
            connecting.push(connect(next));
        }
        let ended = tokio::select! {
            biased;
            ended = connecting.next() => ended,
            () = sleep(delay), if candidates.len() > 0 => continue,
        };
        match ended {
            Some(Ok(connected)) => return Ok(connected),
            Some(Err(error)) => _ = first_error.get_or_insert(error),
            None => return Err(first_error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::Instant;

    use super::*;

    /// How an address behaves.
    #[derive(Clone, Copy)]
    enum Address {
        Silent,
        Refuses(&'static str),
        Answers(&'static str),
    }

    async fn connect(address: Address) -> Result<&'static str, &'static str> {
        match address {
            Address::Silent => pending().await,
            Address::Refuses(why) => Err(why),
            Address::Answers(name) => Ok(name),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silent_addresses_keep_from_no_other() {
        let began = Instant::now();
        let raced =
            race(ATTEMPT_DELAY, [Address::Silent, Address::Silent, Address::Answers("good")].into_iter(), connect)
                .await;
        assert_eq!((raced, began.elapsed()), (Ok("good"), 2 * ATTEMPT_DELAY));
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_refuses_costs_no_time_and_the_first_error_is_the_error() {
        let began = Instant::now();
        let refuse = [Address::Refuses("first"), Address::Refuses("second")];
        assert_eq!(race(ATTEMPT_DELAY, refuse.into_iter(), connect).await, Err(Some("first")));
        let raced = race(ATTEMPT_DELAY, [refuse[0], Address::Answers("good")].into_iter(), connect).await;
        assert_eq!((raced, began.elapsed()), (Ok("good"), Duration::ZERO));
        assert_eq!(race(ATTEMPT_DELAY, [].into_iter(), connect).await, Err(None));
    }
}
