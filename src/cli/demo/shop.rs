//! The shop: pays for its customers, and tries again as payment SDKs do.

use std::net::SocketAddr;
use std::time::Duration;

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, Request, StatusCode};
use serde_json::Value;
use tokio::time::{sleep, timeout};

use super::customer::Customer;
use super::payments::{PATH, order};
use super::wire::{Failure, Server};
use crate::http::body::Body;

/// How long it waits for an answer.
pub(super) const TIMEOUT: Duration = Duration::from_millis(500);

/// How often it sends a request at most.
const TRIES: u32 = 8;

/// The pause before the second try; it doubles from try to try.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause that the shop chooses by itself.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A shop that pays at one address.
pub(super) struct Shop(Server);

/// What the shop saw of a try.
#[derive(Debug)]
pub(super) enum Seen {
    /// An answer.
    Answer(Answer),
    /// No answer in time.
    Silence,
    /// The connection was reset.
    Reset,
    /// The exchange failed otherwise.
    Failed,
}

/// What the shop saw of an answer.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    /// The charge that it tells of.
    pub(super) charge: Option<String>,
    /// The `code` of a problem, as oncegate's are.
    pub(super) code: Option<String>,
    /// `Retry-After`
    pub(super) retry_after: Option<Duration>,
    /// `Idempotent-Replayed`
    pub(super) replayed: bool,
}

/// What the shop does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// It is paid.
    Paid,
    /// It tries again after this time.
    Again(Duration),
    /// It stops, and a person has to look at it.
    Stop,
}

/// How paying ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Payment {
    /// Whether the shop knows that it is paid.
    pub(super) paid: bool,
    /// How many requests it took.
    pub(super) tries: u32,
}

impl Shop {
    /// A shop that pays at the API or the gate at `address`.
    pub(super) fn at(name: &str, address: SocketAddr) -> anyhow::Result<Self> {
        Ok(Self(Server::at(name, address)?))
    }

    /// Pays, with the same key however often it tries. `told` hears of every try.
    pub(super) async fn pay(&self, customer: &Customer, mut told: impl FnMut(&Seen, Next)) -> anyhow::Result<Payment> {
        let mut random = fastrand::Rng::with_seed(customer.jitter);
        let mut tries = 0;
        loop {
            tries += 1;
            let seen = self.attempt(customer).await?;
            let next = next(&seen, tries, &mut random);
            told(&seen, next);
            match next {
                Next::Paid => return Ok(Payment { paid: true, tries }),
                Next::Stop => return Ok(Payment { paid: false, tries }),
                Next::Again(pause) => sleep(pause).await,
            }
        }
    }

    async fn attempt(&self, customer: &Customer) -> anyhow::Result<Seen> {
        let request = Request::post(PATH)
            .header(CONTENT_TYPE, "application/json")
            .header("idempotency-key", &customer.key)
            .body(Body::full(order(customer)))?;
        Ok(match timeout(TIMEOUT, self.0.send(request)).await {
            Err(_) => Seen::Silence,
            Ok(Err(Failure::Reset)) => Seen::Reset,
            Ok(Err(Failure::Other(_))) => Seen::Failed,
            Ok(Ok((head, body))) => Seen::Answer(Answer::read(head.status, &head.headers, &body)),
        })
    }
}

impl Answer {
    fn read(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Self {
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        let text = |name: &str| body[name].as_str().map(ToOwned::to_owned);
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        Self {
            status,
            charge: text("id"),
            code: text("code"),
            retry_after: header(RETRY_AFTER.as_str()).and_then(|value| value.parse().ok()).map(Duration::from_secs),
            replayed: header("idempotent-replayed") == Some("true"),
        }
    }
}

/// The rules of payment SDKs: what may have been lost on the way is sent again, with a pause that grows and is never
/// shorter than `Retry-After`. A 409 is tried again only where it says when.
fn next(seen: &Seen, nth: u32, random: &mut fastrand::Rng) -> Next {
    let retry_after = match seen {
        Seen::Silence | Seen::Reset | Seen::Failed => None,
        Seen::Answer(answer) if answer.status.is_success() => return Next::Paid,
        Seen::Answer(answer) => match (answer.status.as_u16(), answer.retry_after) {
            (409, Some(_)) | (429 | 500 | 502 | 503 | 504, _) => answer.retry_after,
            _ => return Next::Stop,
        },
    };
    if nth >= TRIES {
        return Next::Stop;
    }
    let doubled = FIRST_PAUSE.saturating_mul(1 << (nth - 1).min(16)).min(LONGEST_PAUSE);
    // Shops that failed together do not come back together.
    let pause = doubled.mul_f64(0.75 + random.f64() / 2.0);
    Next::Again(pause.max(retry_after.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(seen: &Seen, nth: u32) -> Next {
        next(seen, nth, &mut fastrand::Rng::with_seed(1))
    }

    fn answer(status: u16, retry_after: Option<u64>) -> Seen {
        let status = StatusCode::from_u16(status).unwrap();
        Seen::Answer(Answer { status, retry_after: retry_after.map(Duration::from_secs), ..Answer::default() })
    }

    #[test]
    fn what_may_have_been_lost_is_sent_again() {
        for seen in [Seen::Silence, Seen::Reset, Seen::Failed]
            .into_iter()
            .chain([429, 500, 502, 503, 504].map(|status| answer(status, None)))
        {
            assert!(matches!(after(&seen, 1), Next::Again(_)), "{seen:?}");
            assert_eq!(after(&seen, TRIES), Next::Stop, "{seen:?}");
        }
        for status in [400, 402, 404, 409, 422] {
            assert_eq!(after(&answer(status, None), 1), Next::Stop, "{status}");
        }
        assert_eq!(after(&answer(201, None), TRIES), Next::Paid);
    }

    #[test]
    fn pauses_grow_and_mind_retry_after() {
        let pause = |seen: &Seen, nth| match after(seen, nth) {
            Next::Again(pause) => pause,
            other => panic!("{other:?}"),
        };
        assert!(pause(&Seen::Silence, 1) < pause(&Seen::Silence, 3));
        assert!(pause(&Seen::Silence, TRIES - 1) <= LONGEST_PAUSE.mul_f64(1.25));
        assert_eq!(pause(&answer(409, Some(5)), 2), Duration::from_secs(5));
        assert!(pause(&answer(503, Some(0)), 3) > Duration::ZERO);
    }

    #[test]
    fn an_answer_is_read_with_its_headers() {
        let mut headers = HeaderMap::new();
        headers.insert("retry-after", http::HeaderValue::from_static("3"));
        headers.insert("idempotent-replayed", http::HeaderValue::from_static("true"));
        let answer = Answer::read(StatusCode::CONFLICT, &headers, br#"{"id":"ch_1","code":"in-flight"}"#);
        assert_eq!((answer.charge.as_deref(), answer.code.as_deref()), (Some("ch_1"), Some("in-flight")));
        assert_eq!((answer.retry_after, answer.replayed), (Some(Duration::from_secs(3)), true));
        let answer = Answer::read(StatusCode::OK, &HeaderMap::new(), b"not JSON");
        assert_eq!((answer.charge, answer.code, answer.replayed), (None, None, false));
    }
}
