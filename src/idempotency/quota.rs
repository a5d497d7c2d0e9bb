//! `quota`: how many new keys a caller may claim in a time.
//!
//! A quota is counted by one number, the time at which it is whole again (GCRA, the generic cell rate algorithm of ITU-T
//! I.371): each key moves it into the future by an equal share of the window, and a key that would move it beyond a whole
//! window is one too many. `src/store/redis/scripts/quota.lua` has the same formula.

use std::net::IpAddr;
use std::time::Duration;

use super::identity::RecordIdHasher;
use super::record::put;
use super::scope::{Caller, Scope};

/// How many new keys each caller may claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// In each window.
    pub new_keys: u32,
    /// The window.
    pub per: Duration,
    /// Who is one caller.
    pub by: QuotaBy,
}

/// Who is one caller for a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaBy {
    /// Whoever has the same scope.
    Scope,
    /// A client's address: an IPv4 address, or an IPv6 /64.
    ClientIp,
    /// Everybody: the quota is the route's.
    Route,
}

/// What a quota is counted under: that of one caller on one route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuotaId(pub [u8; 32]);

/// How fast a quota is used and becomes whole again, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// The share of one key.
    pub share: f64,
    /// The window.
    pub window: f64,
}

impl Quota {
    /// How it is counted.
    #[must_use]
    pub fn rate(&self) -> Rate {
        let window = self.per.as_micros() as f64;
        Rate { share: window / f64::from(self.new_keys.max(1)), window }
    }
}

impl Rate {
    /// Takes a key from a quota that is whole again at `whole`, or says how long to wait.
    pub fn take(&self, whole: &mut f64, now: f64) -> Result<(), Duration> {
        // Also where nothing is taken: what was written before the window became shorter is not waited for.
        *whole = self.at(*whole, now);
        let wait = *whole + self.share - now - self.window;
        // Shares are rounded: the last of a window's keys may stand beyond it by a trifle.
        if wait > self.share / 2.0 {
            return Err(Duration::from_micros(wait.ceil() as u64));
        }
        *whole += self.share;
        Ok(())
    }

    /// Gives a key back.
    pub fn give_back(&self, whole: &mut f64, now: f64) {
        *whole = (self.at(*whole, now) - self.share).max(now);
    }

    /// None is left for this time, as others know.
    pub fn use_up(&self, whole: &mut f64, now: f64, wait: Duration) {
        let used_up = now + wait.as_micros() as f64 + self.window - self.share;
        *whole = self.at(self.at(*whole, now).max(used_up), now);
    }

    /// It is never whole in the past, and never later than a window and the last key's share from now, whatever was written or
    /// configured before.
    fn at(&self, whole: f64, now: f64) -> f64 {
        whole.max(now).min(now + self.window + self.share)
    }
}

impl RecordIdHasher {
    /// What the quota of a caller on a route is counted under.
    #[must_use]
    pub fn quota(&self, route: &str, by: QuotaBy, scope: &Scope, caller: Caller<'_>) -> QuotaId {
        let mut whole = self.begin(b"oncegate quota 1");
        put(&mut whole, route.as_bytes());
        match by {
            QuotaBy::Scope => {
                put(&mut whole, b"scope");
                scope.iter().for_each(|part| drop(part.encode(caller, &mut whole)));
            }
            QuotaBy::ClientIp => {
                put(&mut whole, b"client-ip");
                caller.client_ip.into_iter().for_each(|ip| put(&mut whole, &network(ip).to_be_bytes()));
            }
            QuotaBy::Route => put(&mut whole, b"route"),
        }
        QuotaId(self.hash(&whole))
    }
}

/// The addresses that count as one client: an IPv4 address, or an IPv6 /64.
#[must_use]
pub fn network(ip: IpAddr) -> u64 {
    match ip.to_canonical() {
        // Mapped into ::/64, which has no other client addresses.
        IpAddr::V4(ip) => u64::from(ip.to_bits()),
        IpAddr::V6(ip) => match (ip.to_bits() >> 64) as u64 {
            0 => u64::MAX,
            network => network,
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rate(new_keys: u32, per: Duration) -> Rate {
        Quota { new_keys, per, by: QuotaBy::Scope }.rate()
    }

    /// Takes as many as there are at once.
    fn take_all(rate: Rate, whole: &mut f64, now: f64) -> u32 {
        (0..).take_while(|_| rate.take(whole, now).is_ok()).count() as u32
    }

    #[test]
    fn what_others_know_to_be_used_up_is_used_up() {
        let (rate, wait) = (rate(3, Duration::from_secs(60)), Duration::from_secs(15));
        let mut whole = 0.0;
        rate.use_up(&mut whole, 0.0, wait);
        assert_eq!(rate.take(&mut whole, 0.0), Err(wait));
        assert_eq!(take_all(rate, &mut whole, 15_000_000.0), 1);
        // Nor is more left than was.
        let mut whole = 60_000_000.0;
        rate.use_up(&mut whole, 0.0, Duration::from_secs(1));
        assert_eq!(rate.take(&mut whole, 0.0), Err(Duration::from_secs(20)));
    }

    #[test]
    fn a_whole_quota_can_be_used_at_once_and_comes_back_share_by_share() {
        let (rate, mut whole) = (rate(3, Duration::from_secs(60)), 0.0);
        assert_eq!(take_all(rate, &mut whole, 0.0), 3);
        assert_eq!(rate.take(&mut whole, 0.0), Err(Duration::from_secs(20)));
        assert_eq!(rate.take(&mut whole, 5_000_000.0), Err(Duration::from_secs(15)));
        assert_eq!(take_all(rate, &mut whole, 20_000_000.0), 1);
        assert_eq!(take_all(rate, &mut whole, 80_000_000.0), 3);
        assert_eq!(take_all(rate, &mut whole, 1e12), 3, "more than a whole quota is never saved up");
    }

    #[test]
    fn what_is_given_back_can_be_taken_again() {
        let (rate, mut whole) = (rate(2, Duration::from_secs(10)), 0.0);
        take_all(rate, &mut whole, 0.0);
        rate.give_back(&mut whole, 0.0);
        assert_eq!(take_all(rate, &mut whole, 0.0), 1);
        let mut whole = 0.0;
        rate.give_back(&mut whole, 7.0);
        assert_eq!(whole, 7.0, "a whole quota stays whole");
    }

    #[test]
    fn a_number_that_another_configuration_or_program_left_does_not_lock_a_caller_out() {
        let rate = rate(10, Duration::from_secs(1));
        for strange in [f64::MAX, f64::INFINITY, f64::NAN, 3.6e9] {
            let mut whole = strange;
            let wait = rate.take(&mut whole, 0.0).err().unwrap_or_default();
            assert!(wait <= Duration::from_millis(200), "{strange}: {wait:?}");
            assert_eq!(rate.take(&mut whole, wait.as_micros() as f64), Ok(()), "{strange}");
        }
    }

    #[test]
    fn an_ipv6_network_is_one_client() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(network(ip("2001:db8::1")), network(ip("2001:db8::ffff:1")));
        assert_ne!(network(ip("2001:db8::1")), network(ip("2001:db8:0:1::1")));
        assert_eq!(network(ip("192.0.2.1")), network(ip("::ffff:192.0.2.1")));
        assert_ne!(network(ip("192.0.2.1")), network(ip("192.0.2.2")));
    }

    proptest! {
        /// Whatever the order of keys and pauses, no more is taken in a time than a whole quota and what came back in it.
        #[test]
        fn no_more_is_taken_than_there_is(
            new_keys in 1_u32..10_000,
            per in 1_u64..100_000,
            pauses in prop::collection::vec(0_u64..10_000_000, 1..200),
        ) {
            let rate = rate(new_keys, Duration::from_secs(per));
            // The magnitude of a clock's microseconds.
            let began = 1.7e14;
            let (mut now, mut whole, mut taken) = (began, 0.0, 0_u32);
            for pause in pauses {
                now += pause as f64;
                match rate.take(&mut whole, now) {
                    Ok(()) => taken += 1,
                    Err(wait) => prop_assert!(
                        rate.take(&mut whole.clone(), now + wait.as_micros() as f64).is_ok(),
                        "waiting {:?} suffices", wait
                    ),
                }
            }
            let came_back = (now - began) / rate.share;
            prop_assert!(f64::from(taken) <= f64::from(new_keys) + came_back + 1.0);
        }
    }
}
