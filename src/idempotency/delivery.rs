//! When an accepted request is delivered, and delivered again.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::record::{Record, State, Timestamp};

/// How a route delivers what it accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deliver {
    /// How many attempts may fail, and be followed by another, before the request is given up.
    pub attempts: u32,
    /// The longest pause after the first of them; each later one may last twice as long.
    pub backoff: Duration,
    /// The longest pause that the gate chooses itself; a longer `Retry-After` of the upstream counts.
    pub max_backoff: Duration,
    /// How long one attempt may take.
    pub timeout: Duration,
    /// Which deliveries wait for others.
    pub order: Order,
    /// How long after it was accepted a request is given up.
    pub give_up_after: Duration,
    /// How many deliveries of the route a gate has under way at a time.
    pub concurrency: u32,
    /// How many it begins in a time.
    pub rate: Option<DeliveryRate>,
}

impl Default for Deliver {
    fn default() -> Self {
        Self {
            attempts: 20,
            backoff: Duration::from_secs(1),
            max_backoff: Duration::from_secs(60 * 60),
            timeout: Duration::from_secs(30),
            order: Order::None,
            give_up_after: Duration::from_secs(3 * 24 * 60 * 60),
            concurrency: 32,
            rate: None,
        }
    }
}

/// Which deliveries wait for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// None.
    None,
    /// Those of one scope are delivered one at a time, in the order in which they were accepted.
    Scope,
}

/// Whether a client may have its request accepted rather than run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Async {
    /// It may not.
    Refuse,
    /// It may, where it prefers that (RFC 7240, section 4.1).
    Allow,
}

/// So many in a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeliveryRate {
    /// How many, at least 1.
    pub count: u32,
    /// The time.
    pub per: Duration,
}

/// The units of a rate.
const UNITS: [(&str, Duration); 3] =
    [("s", Duration::from_secs(1)), ("m", Duration::from_secs(60)), ("h", Duration::from_secs(60 * 60))];

/// The most deliveries in the time of a rate.
const MOST: u32 = 1_000_000;

/// A rate is a number from 1 to 1,000,000, a slash, and `s`, `m` or `h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a rate is a number from 1 to 1000000, then /s, /m or /h")]
pub struct NoRate;

impl FromStr for DeliveryRate {
    type Err = NoRate;

    fn from_str(text: &str) -> Result<Self, NoRate> {
        let (count, unit) = text.split_once('/').ok_or(NoRate)?;
        let (_, per) = UNITS.iter().find(|(name, _)| *name == unit).ok_or(NoRate)?;
        if !count.bytes().all(|byte| byte.is_ascii_digit()) || count.starts_with('0') {
            return Err(NoRate);
        }
        let count = count.parse().ok().filter(|count| (1..=MOST).contains(count)).ok_or(NoRate)?;
        Ok(Self { count, per: *per })
    }
}

impl fmt::Display for DeliveryRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS.iter().find(|(_, per)| *per == self.per).map_or("s", |(name, _)| name);
        write!(f, "{}/{unit}", self.count)
    }
}

impl DeliveryRate {
    /// The time from one delivery to the next.
    #[must_use]
    pub fn gap(&self) -> Duration {
        self.per / self.count.max(1)
    }
}

/// What becomes of a delivery whose attempt ended in a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextTry {
    /// It is delivered again after a pause.
    Again(Duration),
    /// It is given up after so many attempts.
    Exhausted,
    /// It is given up: it is too old.
    TooOld,
}

/// A record as a delivery meets it, however late. One that had not expired when the request was accepted is that of an attempt
/// of the request itself: it does not expire before the delivery is over. An earlier one has the expiry that it has.
#[must_use]
pub fn met_by_delivery(record: &Record, accepted_at: Timestamp, now: Timestamp) -> Record {
    let is_its_own = record.state != State::InFlight && record.until > accepted_at;
    let until = if is_its_own { record.until.max(now.plus(Duration::from_millis(1))) } else { record.until };
    Record { until, ..record.clone() }
}

/// How long after `give_up_after` the last attempt of a delivery may begin.
const GRACE: Duration = Duration::from_secs(10);

impl Deliver {
    /// Whether a request of this age is given up rather than tried. The last attempt is due when `give_up_after` is over, and may
    /// begin ten seconds later.
    #[must_use]
    pub fn is_too_late(&self, age: Duration) -> bool {
        age > self.give_up_after.saturating_add(GRACE)
    }

    /// What becomes of a delivery after `attempts` that ended in a release, the last of them now, `age` after it was
    /// queued. `retry_after` is what the upstream asks for, and `random` any number, all of whose bits count.
    #[must_use]
    pub fn next_try(&self, attempts: u32, age: Duration, retry_after: Option<Duration>, random: u64) -> NextTry {
        if attempts >= self.attempts {
            return NextTry::Exhausted;
        }
        let left = self.give_up_after.saturating_sub(age);
        if left.is_zero() {
            return NextTry::TooOld;
        }
        // However long the upstream wants to be left alone, there is a last try when the time is over.
        NextTry::Again(self.pause(attempts, random).max(retry_after.unwrap_or_default()).min(left))
    }

    /// The pause after so many attempts: any time up to a limit that doubles, so that what failed together does not come
    /// again together.
    fn pause(&self, attempts: u32, random: u64) -> Duration {
        let doubled = 1_u32.checked_shl(attempts.saturating_sub(1)).unwrap_or(u32::MAX);
        let limit = self.backoff.saturating_mul(doubled).min(self.max_backoff);
        limit.mul_f64(random as f64 / u64::MAX as f64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use bytes::Bytes;

    use super::*;
    use crate::idempotency::record::AttemptToken;

    #[test]
    fn the_last_attempt_may_begin_a_little_later_than_it_is_due() {
        let deliver = Deliver { give_up_after: Duration::from_secs(100), ..Deliver::default() };
        assert!(!deliver.is_too_late(Duration::from_secs(100)) && !deliver.is_too_late(Duration::from_secs(110)));
        assert!(deliver.is_too_late(Duration::from_millis(110_001)));
        assert!(!Deliver { give_up_after: Duration::MAX, ..deliver }.is_too_late(Duration::MAX));
    }

    #[test]
    fn a_record_of_a_delivery_does_not_expire_before_it() {
        let met = |state, until, now| {
            let (attempt, claimed_at, head) = (AttemptToken([1; 16]), Timestamp(0), Bytes::new());
            let record = Record { attempt, state, claimed_at, until: Timestamp(until), head, answer: None };
            met_by_delivery(&record, Timestamp(100), Timestamp(now)).until.0
        };
        for state in [State::Completed, State::Unknown] {
            assert_eq!(met(state, 100, 500), 100, "it had expired when the request was accepted");
            assert_eq!(met(state, 101, 500), 501);
            assert_eq!(met(state, 900, 500), 900);
        }
        assert_eq!(met(State::InFlight, 200, 500), 200, "a lease ends when it does");
    }

    #[test]
    fn rates_are_read_and_written() {
        for (text, count, per) in [("100/s", 100, 1), ("1/m", 1, 60), ("1000000/h", MOST, 3600)] {
            let rate: DeliveryRate = text.parse().unwrap();
            assert_eq!((rate.count, rate.per.as_secs()), (count, per), "{text}");
            assert_eq!(rate.to_string(), text);
        }
        assert_eq!("100/s".parse::<DeliveryRate>().unwrap().gap(), Duration::from_millis(10));
        for text in ["", "100", "/s", "0/s", "1000001/s", "1/d", "1/", "-1/s", "+1/s", "01/s", "1 /s", "99999999999/s"]
        {
            assert_eq!(text.parse::<DeliveryRate>(), Err(NoRate), "{text}");
        }
    }

    #[test]
    fn the_last_attempt_and_the_last_hour_are_the_end() {
        let deliver = Deliver { attempts: 3, give_up_after: Duration::from_secs(100), ..Deliver::default() };
        let next_try = |attempts, age, retry_after: Option<u64>| {
            deliver.next_try(attempts, Duration::from_secs(age), retry_after.map(Duration::from_secs), u64::MAX)
        };
        assert_eq!(next_try(1, 0, None), NextTry::Again(Duration::from_secs(1)));
        assert_eq!(next_try(2, 50, None), NextTry::Again(Duration::from_secs(2)));
        assert_eq!(next_try(2, 50, Some(30)), NextTry::Again(Duration::from_secs(30)));
        assert_eq!(next_try(2, 50, Some(300_000)), NextTry::Again(Duration::from_secs(50)), "a last try");
        assert_eq!(next_try(2, 99, None), NextTry::Again(Duration::from_secs(1)));
        assert_eq!(next_try(2, 100, None), NextTry::TooOld);
        assert_eq!(next_try(3, 0, None), NextTry::Exhausted);
    }

    proptest! {
        #[test]
        fn pauses_grow_and_are_bounded(attempts in 1_u32..200, random: u64, asked in 0_u64..100_000) {
            let deliver = Deliver { attempts: u32::MAX, give_up_after: Duration::MAX, ..Deliver::default() };
            let asked = Duration::from_secs(asked);
            let NextTry::Again(pause) = deliver.next_try(attempts, Duration::ZERO, Some(asked), random) else {
                panic!("it is given up");
            };
            prop_assert!(pause >= asked && pause <= deliver.max_backoff.max(asked));
            let longest = deliver.pause(attempts, u64::MAX);
            prop_assert!(longest <= deliver.pause(attempts + 1, u64::MAX));
            prop_assert!(deliver.pause(attempts, random) <= longest);
        }
    }
}
