//! How many wrong tokens an address may send.
//!
//! A token of 128 bits cannot be guessed, however often somebody tries; a short one can. And whoever shares an address with
//! the operator (a proxy, a cluster's node, this machine) must not be able to lock the operator out. So while an address is
//! throttled, a long token is accepted as always, and a short one is refused, right or wrong: guesses at it learn nothing.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How many wrong tokens an address may send at once.
const BURST: u32 = 10;

/// How long each of them counts: so often one more is allowed.
const EACH: Duration = Duration::from_secs(6);

/// How many addresses are remembered: a few hundred KiB at most.
const MOST_ADDRESSES: usize = 4096;

/// The wrong tokens of late.
#[derive(Debug, Default)]
pub(super) struct Throttle {
    /// When all that an address sent is forgotten.
    forgotten_at: Mutex<HashMap<Network, Instant>>,
}

/// The addresses that count as one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Network {
    /// Every process of this machine has all of these.
    Loopback,
    V4([u8; 4]),
    /// A /64: one subscriber has all of it.
    V6([u8; 8]),
}

impl Throttle {
    /// For how long an address sent too many wrong tokens; nothing where it did not.
    pub(super) fn wait(&self, client: IpAddr, now: Instant) -> Option<Duration> {
        let forgotten_at = *self.lock().get(&Network::of(client))?;
        let allowed_at = forgotten_at - EACH * (BURST - 1);
        allowed_at.checked_duration_since(now).filter(|wait| !wait.is_zero())
    }

    /// An address sent a wrong token. Whether it may not send another one at once, and might until now.
    pub(super) fn count(&self, client: IpAddr, now: Instant) -> bool {
        let mut addresses = self.lock();
        let network = Network::of(client);
        if addresses.len() >= MOST_ADDRESSES && !addresses.contains_key(&network) {
            addresses.retain(|_, forgotten_at| *forgotten_at > now);
            // Who has as many addresses as that is not held up by this; the worst offenders stay.
            let least = addresses.iter().min_by_key(|(_, forgotten_at)| **forgotten_at).map(|(network, _)| *network);
            if let Some(least) = least.filter(|_| addresses.len() >= MOST_ADDRESSES) {
                addresses.remove(&least);
            }
        }
        let forgotten_at = addresses.entry(network).or_insert(now);
        let is_throttled = |forgotten_at: Instant| forgotten_at > now + EACH * (BURST - 1);
        let was_throttled = is_throttled(*forgotten_at);
        // Answers that were under way when it was throttled do not prolong it.
        *forgotten_at = ((*forgotten_at).max(now) + EACH).min(now + EACH * BURST);
        !was_throttled && is_throttled(*forgotten_at)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Network, Instant>> {
        // Nothing that is done under it can leave it half changed.
        self.forgotten_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Network {
    fn of(client: IpAddr) -> Self {
        match client.to_canonical() {
            ip if ip.is_loopback() => Self::Loopback,
            IpAddr::V4(ip) => Self::V4(ip.octets()),
            IpAddr::V6(ip) => {
                let [a, b, c, d, e, f, g, h, ..] = ip.octets();
                Self::V6([a, b, c, d, e, f, g, h])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn ten_at_once_and_then_one_in_six_seconds() {
        let (throttle, begin) = (Throttle::default(), Instant::now());
        let client = ip("192.0.2.1");
        for nth in 1..=10 {
            assert_eq!(throttle.wait(client, begin), None, "{nth}");
            assert_eq!(throttle.count(client, begin), nth == 10, "{nth}");
        }
        assert_eq!(throttle.wait(client, begin), Some(EACH));
        // One that was under way.
        assert!(!throttle.count(client, begin));
        assert_eq!(throttle.wait(client, begin + EACH / 2), Some(EACH / 2));
        let later = begin + EACH;
        assert_eq!(throttle.wait(client, later), None);
        assert!(throttle.count(client, later));
        assert_eq!(throttle.wait(client, later), Some(EACH));
        let much_later = later + EACH * BURST;
        assert_eq!(throttle.wait(client, much_later), None);
        assert!(!throttle.count(client, much_later), "all is forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_is_a_subscriber() {
        let now = Instant::now();
        for (one, other, is_same) in [
            ("192.0.2.1", "192.0.2.2", false),
            ("192.0.2.1", "::ffff:192.0.2.1", true),
            ("2001:db8::1", "2001:db8::ffff:2", true),
            ("2001:db8::1", "2001:db8:0:1::1", false),
            ("127.0.0.1", "127.8.9.10", true),
            ("127.0.0.1", "::1", true),
        ] {
            let throttle = Throttle::default();
            for _ in 0..BURST {
                throttle.count(ip(one), now);
            }
            assert_eq!(throttle.wait(ip(other), now).is_some(), is_same, "{one} {other}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn so_many_addresses_are_remembered_and_no_more() {
        let (throttle, now) = (Throttle::default(), Instant::now());
        let worst = ip("192.0.2.1");
        for _ in 0..BURST {
            throttle.count(worst, now);
        }
        for nth in 0..2 * MOST_ADDRESSES as u32 {
            let client = match nth % 2 {
                0 => IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + nth)),
                _ => IpAddr::V6(Ipv6Addr::from(u128::from(nth) << 64 | 1 << 120)),
            };
            throttle.count(client, now);
            assert!(throttle.lock().len() <= MOST_ADDRESSES);
        }
        assert!(throttle.wait(worst, now).is_some());
        throttle.count(ip("192.0.2.2"), now + EACH * (BURST + 1));
        assert_eq!(throttle.lock().len(), 1, "those that are forgotten make room");
    }
}
