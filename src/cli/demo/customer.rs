//! Who pays, and what the payment API will do about it: all of it chosen by the seed.

use std::time::Duration;

/// What the payment API does about one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Charges and answers 201.
    Prompt,
    /// Charges, and answers 201 when the client has long stopped waiting.
    Slow,
    /// Charges, and resets the connection instead of answering.
    ResetAfter,
    /// Resets the connection before it charges.
    ResetBefore,
    /// Charges, fails at something else, and answers 500.
    FailedAfter,
    /// Answers 503 before it charges.
    Refused,
}

/// A customer who pays once.
#[derive(Clone, Debug)]
pub(super) struct Customer {
    pub(super) name: String,
    /// The number of the order that is paid. It goes to the API in the body.
    pub(super) order: String,
    /// The idempotency key that the shop made for this payment.
    pub(super) key: String,
    /// What is to be paid, in cents.
    pub(super) cents: u64,
    /// When the customer pays, counted from the beginning of the storm.
    pub(super) arrives: Duration,
    /// What the API does about the first, second… request for this order; from then on it answers promptly.
    pub(super) fates: [Fate; FATES],
    /// Where the jitter of the shop's pauses comes from.
    pub(super) jitter: u64,
}

/// How many requests for one order can meet with something else than a prompt answer.
const FATES: usize = 3;

/// Within this time everybody pays.
const STORM: Duration = Duration::from_secs(2);

/// The customers whose payments are shown one by one: each meets with one failure.
const TOLD: [(&str, Fate); 4] =
    [("Ada", Fate::Slow), ("Ben", Fate::ResetAfter), ("Cleo", Fate::FailedAfter), ("Dev", Fate::ResetBefore)];

impl Fate {
    /// Each with how many of 100 requests meet with it.
    pub(super) const ODDS: [(Self, u8); 6] = [
        (Self::Prompt, 72),
        (Self::Slow, 9),
        (Self::ResetAfter, 6),
        (Self::ResetBefore, 3),
        (Self::FailedAfter, 5),
        (Self::Refused, 5),
    ];

    /// Whether money is taken.
    pub(super) fn charges(self) -> bool {
        !matches!(self, Self::ResetBefore | Self::Refused)
    }

    /// What the API does, in words.
    pub(super) fn in_words(self) -> &'static str {
        match self {
            Self::Prompt => "charges, and answers 201",
            Self::Slow => "charges, and answers when the client has given up",
            Self::ResetAfter => "charges, then resets the connection",
            Self::ResetBefore => "resets the connection before it charges",
            Self::FailedAfter => "charges, then answers 500",
            Self::Refused => "answers 503 before it charges",
        }
    }

    fn draw(random: &mut fastrand::Rng) -> Self {
        let mut left = random.u8(0..100);
        for (fate, odds) in Self::ODDS {
            if left < odds {
                return fate;
            }
            left -= odds;
        }
        Self::Prompt
    }
}

/// As many customers as are asked for, the same ones for the same seed. Those who are shown one by one come first.
pub(super) fn customers(count: usize, seed: u64) -> Vec<Customer> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count).map(|nth| customer(nth, &mut random)).collect()
}

/// How many of the first customers are shown one by one.
pub(super) const fn told() -> usize {
    TOLD.len()
}

fn customer(nth: usize, random: &mut fastrand::Rng) -> Customer {
    let mut fates = std::array::from_fn(|_| Fate::draw(random));
    let mut name = format!("customer {}", nth + 1);
    if let Some((told, fate)) = TOLD.get(nth) {
        name = (*told).to_owned();
        fates = [*fate, Fate::Prompt, Fate::Prompt];
    }
    Customer {
        name,
        order: format!("order-{}", 10_001 + nth),
        key: format!("{:032x}", random.u128(..)),
        cents: random.u64(500..20_000),
        arrives: STORM.mul_f64(random.f64()),
        fates,
        jitter: random.u64(..),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_makes_the_same_customers() {
        let written = |seed| format!("{:?}", customers(50, seed));
        assert_eq!(written(7), written(7));
        assert_ne!(written(7), written(8));
        // More customers are the same ones and others behind them.
        assert!(format!("{:?}", customers(60, 7)).starts_with(written(7).trim_end_matches(']')));
    }

    #[test]
    fn fates_come_as_often_as_is_said() {
        assert_eq!(Fate::ODDS.iter().map(|(_, odds)| u32::from(*odds)).sum::<u32>(), 100);
        let mut random = fastrand::Rng::with_seed(1);
        let drawn: Vec<Fate> = (0..10_000).map(|_| Fate::draw(&mut random)).collect();
        for (fate, odds) in Fate::ODDS {
            let found = drawn.iter().filter(|drawn| **drawn == fate).count();
            assert!(found.abs_diff(usize::from(odds) * 100) < 150, "{fate:?}: {found} of 10000");
        }
    }

    #[test]
    fn keys_and_orders_are_each_customers_own() {
        let customers = customers(1000, 3);
        for part in [|customer: &Customer| customer.key.clone(), |customer: &Customer| customer.order.clone()] {
            let all: std::collections::BTreeSet<String> = customers.iter().map(part).collect();
            assert_eq!(all.len(), 1000);
        }
    }
}
