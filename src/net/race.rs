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
/// Of those that failed, the first error that `says_more` than that there is no connection, or else the first; none where there is nothing
/// to try.
pub async fn race<C, T, E, F: Future<Output = Result<T, E>>>(
    delay: Duration,
    mut candidates: impl ExactSizeIterator<Item = C>,
    connect: impl Fn(C) -> F,
    says_more: impl Fn(&E) -> bool,
) -> Result<T, Option<E>> {
    let mut connecting = FuturesUnordered::new();
    let mut kept: Option<E> = None;
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
            Some(Err(error)) => {
                if kept.as_ref().is_none_or(|kept| !says_more(kept) && says_more(&error)) {
                    kept = Some(error);
                }
            }
            None => return Err(kept),
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
        let raced = race(
            ATTEMPT_DELAY,
            [Address::Silent, Address::Silent, Address::Answers("good")].into_iter(),
            connect,
            |_| false,
        )
        .await;
        assert_eq!((raced, began.elapsed()), (Ok("good"), 2 * ATTEMPT_DELAY));
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_refuses_costs_no_time_and_the_first_error_is_the_error() {
        let began = Instant::now();
        let refuse = [Address::Refuses("first"), Address::Refuses("second")];
        assert_eq!(race(ATTEMPT_DELAY, refuse.into_iter(), connect, |_| false).await, Err(Some("first")));
        let more = race(ATTEMPT_DELAY, refuse.into_iter(), connect, |why| *why == "second").await;
        assert_eq!(more, Err(Some("second")), "a server that was reached says why");
        let raced = race(ATTEMPT_DELAY, [refuse[0], Address::Answers("good")].into_iter(), connect, |_| false).await;
        assert_eq!((raced, began.elapsed()), (Ok("good"), Duration::ZERO));
        assert_eq!(race(ATTEMPT_DELAY, [].into_iter(), connect, |_| false).await, Err(None));
    }
}
