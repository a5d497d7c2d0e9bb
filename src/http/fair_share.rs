//! How much of a limit one client may hold, so that none is left without.
//!
//! The first half of each limit goes to requests as they come, and counts for no client. The second half counts for the
//! client's address and for its caller. An address may hold three times what is left for all, and a caller three times what is
//! left for its address. So one address leaves at least an eighth of the limit to others, whatever callers it invents. Each
//! further address leaves a quarter of what it finds. One caller at one address leaves more: callers behind one balancer share
//! an address, and the others need something too. A caller that comes from any number of addresses leaves a twentieth.
//!
//! This is the dynamic threshold of shared buffers (Choudhury and Hahne, 1998), applied twice.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher as _, Hash, RandomState};
use std::net::IpAddr;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use crate::idempotency::quota::network;

/// How many times what is left a client may hold.
const FACTOR: u64 = 3;

/// Who a request counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Party {
    /// An IPv4 address, or an IPv6 /64.
    address: u64,
    /// A digest of what tells callers apart.
    caller: Option<u64>,
}

/// Computes who a request counts for. It is called only where a limit is scarce, since it costs a digest.
pub type PartyOf<'a> = &'a (dyn Fn() -> Party + Send + Sync);

/// Why a party gets nothing of what is left: it holds its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OverShare {
    /// All of its address do.
    Address(u64),
    /// The caller does.
    Caller(u64),
}

/// Why a limit has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// Too little is left.
    Full,
    /// Enough is left, and the party holds its share.
    Share(OverShare),
}

/// An amount of the upper half of a limit that is about to be taken.
pub(super) struct Contested<'a> {
    pub(super) shares: &'a Shares,
    pub(super) amount: u64,
    /// How much of the limit is left before.
    pub(super) left: u64,
}

impl Contested<'_> {
    /// Counts it for a party.
    pub(super) fn hold(self, party: Party) -> Result<(Party, u64), NoRoom> {
        let Self { shares, amount, left } = self;
        if amount > left {
            return Err(NoRoom::Full);
        }
        shares.hold(party, amount, left).map_err(NoRoom::Share)?;
        Ok((party, amount))
    }
}

/// What parties hold of the upper half of a limit.
#[derive(Default)]
pub(super) struct Shares(Mutex<Holdings>);

#[derive(Default)]
struct Holdings {
    addresses: HashMap<u64, u64>,
    callers: HashMap<u64, u64>,
}

/// The key of callers' digests, so that no client can choose a caller name with the digest of another.
static DIGESTS: LazyLock<RandomState> = LazyLock::new(RandomState::new);

impl Party {
    /// Everyone at this address.
    #[must_use]
    pub fn at(ip: IpAddr) -> Self {
        Self { address: network(ip), caller: None }
    }

    /// One caller at this address: two are the same if these bytes are.
    #[must_use]
    pub fn caller_at(ip: IpAddr, caller: &[u8]) -> Self {
        Self { caller: Some(DIGESTS.hash_one(caller)), ..Self::at(ip) }
    }

    /// All that it may be refused for.
    pub(super) fn bounds(self) -> impl Iterator<Item = OverShare> {
        [OverShare::Address(self.address)].into_iter().chain(self.caller.map(OverShare::Caller))
    }
}

impl Shares {
    /// Counts an amount for a party of which `left` is left for all, unless that exceeds its share.
    pub(super) fn hold(&self, party: Party, amount: u64, left: u64) -> Result<(), OverShare> {
        let mut holdings = self.holdings();
        let of = |held: &HashMap<u64, u64>, key| held.get(&key).copied().unwrap_or(0);
        let caller = party.caller.map(|caller| (caller, of(&holdings.callers, caller)));
        within_share(amount, left, (party.address, of(&holdings.addresses, party.address)), caller)?;
        *holdings.addresses.entry(party.address).or_default() += amount;
        if let Some(caller) = party.caller {
            *holdings.callers.entry(caller).or_default() += amount;
        }
        Ok(())
    }

    /// Returns an amount that was counted for a party.
    pub(super) fn release(&self, party: Party, amount: u64) {
        let mut holdings = self.holdings();
        subtract(&mut holdings.addresses, party.address, amount);
        if let Some(caller) = party.caller {
            subtract(&mut holdings.callers, caller, amount);
        }
    }

    fn holdings(&self) -> MutexGuard<'_, Holdings> {
        // No operation under this lock can leave the state inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The rule. An amount is judged as if it were taken one by one, so that a limit of a few can be used up.
fn within_share(
    amount: u64,
    left: u64,
    (address, held_by_address): (u64, u64),
    caller: Option<(u64, u64)>,
) -> Result<(), OverShare> {
    let before_last = amount.saturating_sub(1);
    let Some(left) = left.checked_sub(before_last) else { return Err(OverShare::Address(address)) };
    let of_address = (FACTOR * left).saturating_sub(held_by_address.saturating_add(before_last));
    if of_address == 0 {
        return Err(OverShare::Address(address));
    }
    match caller {
        Some((caller, held)) if held.saturating_add(before_last) >= FACTOR.saturating_mul(of_address) => {
            Err(OverShare::Caller(caller))
        }
        _ => Ok(()),
    }
}

fn subtract<K: Eq + Hash>(held: &mut HashMap<K, u64>, key: K, amount: u64) {
    if let Entry::Occupied(mut entry) = held.entry(key) {
        *entry.get_mut() -= amount.min(*entry.get());
        if *entry.get() == 0 {
            entry.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    /// A limit of which half is in use by whoever came first.
    struct Half {
        shares: Shares,
        left: u64,
    }

    impl Half {
        fn of(max: u64) -> Self {
            Self { shares: Shares::default(), left: max / 2 }
        }

        /// Takes one by one until that is refused.
        fn take_all(&mut self, party: Party) -> u64 {
            self.take_all_in(party, 1)
        }

        fn take_all_in(&mut self, party: Party, amount: u64) -> u64 {
            let before = self.left;
            while self.left >= amount && self.shares.hold(party, amount, self.left).is_ok() {
                self.left -= amount;
            }
            before - self.left
        }
    }

    #[test]
    fn one_address_leaves_an_eighth_to_others() {
        let mut limit = Half::of(4000);
        assert_eq!(limit.take_all(Party::at(ip(1))), 1500);
        assert_eq!(limit.left, 500);
        assert!(limit.take_all(Party::at(ip(2))) > 0);
    }

    #[test]
    fn one_caller_leaves_some_to_others_at_its_address() {
        let mut limit = Half::of(4000);
        limit.take_all(Party::caller_at(ip(1), b"loud"));
        assert_eq!(limit.left, 615, "a caller leaves more than an address");
        assert!(limit.take_all(Party::caller_at(ip(1), b"quiet")) > 50);
        assert!(limit.left > 500, "together they have an address's share");
    }

    #[test]
    fn invented_callers_have_one_share_and_many_addresses_of_one_caller_too() {
        let mut limit = Half::of(4000);
        for caller in 0..1000_u32 {
            limit.take_all(Party::caller_at(ip(1), &caller.to_be_bytes()));
        }
        assert!(limit.left >= 500, "{}", limit.left);
        assert!(limit.take_all(Party::caller_at(ip(2), b"quiet")) > 100);

        let mut limit = Half::of(4000);
        for address in 0..200 {
            limit.take_all(Party::caller_at(ip(address), b"loud"));
        }
        assert!(limit.left >= 200, "{}", limit.left);
        assert!(limit.take_all(Party::caller_at(ip(201), b"quiet")) > 100);
    }

    #[test]
    fn each_further_address_leaves_a_quarter_of_what_it_finds() {
        let mut limit = Half::of(4096);
        let left = (0..4).map(|address| {
            limit.take_all(Party::at(ip(address)));
            limit.left
        });
        assert_eq!(left.collect::<Vec<_>>(), [512, 128, 32, 8]);
    }

    #[test]
    fn a_limit_below_eight_can_be_used_up() {
        for max in 1..12_u64 {
            let mut limit = Half { left: max - max.div_ceil(2), ..Half::of(max) };
            limit.take_all(Party::caller_at(ip(1), b"only"));
            assert_eq!(limit.left, u64::from(max >= 8), "of {max}");
        }
    }

    #[test]
    fn large_amounts_leave_the_same() {
        let mut limit = Half::of(256 << 20);
        limit.take_all_in(Party::at(ip(1)), 1 << 20);
        assert_eq!(limit.left, 32 << 20);
        assert!(limit.shares.hold(Party::at(ip(2)), (32 << 20) + 1, limit.left).is_err());
        assert!(limit.shares.hold(Party::at(ip(2)), 16 << 20, limit.left).is_ok());
        assert!(limit.shares.hold(Party::at(ip(2)), u64::MAX, limit.left).is_err());
    }

    #[test]
    fn what_is_released_can_be_held_again_and_leaves_no_entries() {
        let mut limit = Half::of(64);
        let (loud, quiet) = (Party::caller_at(ip(1), b"loud"), Party::caller_at(ip(2), b"quiet"));
        let held = limit.take_all(loud);
        assert_eq!(limit.shares.hold(quiet, 1, limit.left), Ok(()));
        assert!(limit.shares.hold(loud, 1, limit.left).is_err());
        limit.shares.release(loud, held);
        limit.left += held;
        assert_eq!(limit.take_all(loud), held);
        limit.shares.release(loud, held);
        limit.shares.release(quiet, 1);
        let holdings = limit.shares.holdings();
        assert!(holdings.addresses.is_empty() && holdings.callers.is_empty());
    }

    #[test]
    fn addresses_of_one_network_are_one_party() {
        let at = |text: &str| Party::at(text.parse().unwrap());
        assert_eq!(at("2001:db8::1"), at("2001:db8::2"));
        assert_ne!(at("2001:db8::1"), at("2001:db8:0:1::1"));
        assert_ne!(Party::caller_at(ip(1), b"a"), Party::caller_at(ip(1), b"b"));
        assert_eq!(Party::caller_at(ip(1), b"a"), Party::caller_at(ip(1), b"a"));
    }
}
