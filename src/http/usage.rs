//! How much of the limits is in use: budgets, the permits of those who use them, and the bytes that count against them.

mod levels;
mod permit;
mod proxied;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::{Bytes, BytesMut};

pub(super) use self::permit::counted;
use super::fair_share::{Contested, NoRoom, Party, PartyOf, Shares};
use super::limits::Limits;
use super::refusal::Refusals;
use crate::idempotency::quota::network;
use crate::telemetry::limits::{Level, Limit, LimitMetrics};
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::metrics::Metrics;

/// This many bytes of each response are buffered even if the budget is exhausted: the number of requests bounds them.
pub(super) const UNCOUNTED_BODY: usize = 64 << 10;

/// A body of one frame of at most this size, in bytes, is not counted: the number of requests bounds these.
const UNCOUNTED: usize = 4 << 10;

/// The current usage of the limits: one for the process, kept across reloads.
pub struct Usage {
    /// Requests in flight.
    pub requests: Arc<Budget>,
    /// Requests that wait for another's attempt.
    pub waiting: Arc<Budget>,
    /// Requests that are looked at afterwards, of routes that only observe.
    pub observing: Arc<Budget>,
    /// Bytes of bodies in memory.
    pub memory: Arc<Budget>,
    /// Bytes of bodies in temporary files.
    pub disk: Arc<Budget>,
    connections: Arc<Budget>,
    addresses: Arc<NetworkConnections>,
    /// Answers connections that exceed a limit.
    pub(super) refusals: Refusals,
    metrics: Arc<LimitMetrics>,
    is_fair: Arc<AtomicBool>,
    broken_http2: LogThrottle,
}

/// The right to one client connection. Dropping it returns the right.
pub struct ConnectionPermit {
    permit: Permit,
    addresses: Arc<NetworkConnections>,
    /// `None` until the client's address is known.
    network: Option<Network>,
}

struct NetworkConnections {
    max: AtomicU64,
    connections: Mutex<HashMap<Network, u64>>,
}

/// The addresses that count as one client: an IPv4 address, or an IPv6 /64.
type Network = u64;

impl Usage {
    /// No usage yet.
    #[must_use]
    pub fn new(limits: &Limits, metrics: &Metrics) -> Arc<Self> {
        let metrics = metrics.limits();
        let is_fair = Arc::new(AtomicBool::new(limits.fair_share));
        let budget = |limit, max| Arc::new(Budget::shared(limit, max, metrics.level(limit), &metrics, &is_fair));
        Arc::new(Self {
            requests: budget(Limit::MaxRequests, limits.max_requests),
            waiting: budget(Limit::MaxWaiting, limits.max_waiting),
            observing: budget(Limit::MaxObserving, limits.max_observing),
            memory: budget(Limit::MaxBufferedMemory, limits.max_buffered_memory),
            disk: budget(Limit::MaxBufferedDisk, limits.max_buffered_disk),
            connections: budget(Limit::MaxConnections, limits.max_connections),
            addresses: Arc::new(NetworkConnections {
                max: AtomicU64::new(limits.max_connections_per_address),
                connections: Mutex::default(),
            }),
            refusals: Refusals::new(limits.max_connections),
            metrics,
            is_fair,
            broken_http2: LogThrottle::each_minute(),
        })
    }

    /// Changes all limits. Existing permits stay valid.
    pub fn set_limits(&self, limits: &Limits) {
        self.is_fair.store(limits.fair_share, Ordering::Relaxed);
        self.requests.set_max(limits.max_requests);
        self.waiting.set_max(limits.max_waiting);
        self.observing.set_max(limits.max_observing);
        self.memory.set_max(limits.max_buffered_memory);
        self.disk.set_max(limits.max_buffered_disk);
        self.connections.set_max(limits.max_connections);
        self.addresses.max.store(limits.max_connections_per_address, Ordering::Relaxed);
    }

    /// The budget of one upstream's connections, which has no metric of its own.
    pub(super) fn of_upstream(&self, max: u64) -> Arc<Budget> {
        Arc::new(Budget::shared(Limit::UpstreamMaxConnections, max, Level::default(), &self.metrics, &self.is_fair))
    }

    /// Counts that a limit was reached.
    pub fn exceeded(&self, limit: Limit) {
        self.metrics.exceeded(limit);
    }

    /// Logs that a client broke HTTP/2, for which its connection ended with all its requests.
    pub(super) fn broken_http2(&self, client: IpAddr, reason: h2::Reason) {
        if let Some(others) = self.broken_http2.due() {
            let error = format_args!("{reason:?}");
            tracing::warn!(%client, %error, others, "ended a connection over HTTP/2 with all its requests: its client broke the protocol");
        }
    }

    /// Acquires a permit for a connection from this address, or returns the limit that is reached.
    pub fn connection(&self, ip: IpAddr) -> Result<ConnectionPermit, Limit> {
        let party = || Party::at(ip);
        let Some(permit) = Account::new(&self.connections, Some(&party)).acquire(1) else {
            return Err(Limit::MaxConnections);
        };
        let network = network(ip);
        if self.addresses.acquire(network) {
            return Ok(ConnectionPermit { permit, addresses: Arc::clone(&self.addresses), network: Some(network) });
        }
        self.exceeded(Limit::MaxConnectionsPerAddress);
        Err(Limit::MaxConnectionsPerAddress)
    }
}

impl NetworkConnections {
    fn acquire(&self, network: Network) -> bool {
        let max = self.max.load(Ordering::Relaxed);
        match self.connections().entry(network) {
            Entry::Occupied(entry) if *entry.get() >= max => false,
            Entry::Occupied(mut entry) => {
                *entry.get_mut() += 1;
                true
            }
            Entry::Vacant(entry) => {
                entry.insert(1);
                true
            }
        }
    }

    fn release(&self, network: Network) {
        if let Entry::Occupied(mut entry) = self.connections().entry(network) {
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
            }
        }
    }

    fn connections(&self) -> MutexGuard<'_, HashMap<Network, u64>> {
        // No operation under this lock can leave the state inconsistent.
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        if let Some(network) = self.network {
            self.addresses.release(network);
        }
    }
}

/// A limited amount of a resource, and how much of it is in use. A caller acquires a permit and returns it when it is done; no
/// caller waits.
pub struct Budget {
    limit: Limit,
    max: AtomicU64,
    used: Level,
    /// How much of `used` lies beyond the maximum, by [`Permit::force_grow`]. It adds to the maximum for as long, so that others
    /// find as much left as without it.
    excess: AtomicU64,
    metrics: Arc<LimitMetrics>,
    owner: Owner,
}

enum Owner {
    /// It is a child of this budget.
    Parent(Arc<Budget>),
    /// All share it, fairly where the flag says so.
    Everyone(Shares, Arc<AtomicBool>),
}

/// The right to use an amount of a budget. Dropping it returns the amount.
pub struct Permit {
    budget: Arc<Budget>,
    amount: u64,
    /// How much of it lies beyond the maximum.
    excess: u64,
    /// How much of it was of the upper half, and counts for no caller yet.
    upper: u64,
    /// For whom how much of it counts.
    held: OnceLock<(Party, u64)>,
}

/// A budget, and who uses it. Without a party, no share bounds what is used.
#[derive(Clone, Copy)]
pub struct Account<'a> {
    budget: &'a Arc<Budget>,
    party: Option<PartyOf<'a>>,
}

impl Budget {
    /// An unused budget.
    #[cfg(test)]
    pub(super) fn new(limit: Limit, max: u64, metrics: &Arc<LimitMetrics>) -> Arc<Self> {
        Arc::new(Self::shared(limit, max, metrics.level(limit), metrics, &Arc::new(AtomicBool::new(true))))
    }

    fn shared(limit: Limit, max: u64, used: Level, metrics: &Arc<LimitMetrics>, is_fair: &Arc<AtomicBool>) -> Self {
        let owner = Owner::Everyone(Shares::default(), Arc::clone(is_fair));
        let (max, excess) = (AtomicU64::new(max), AtomicU64::new(0));
        Self { limit, max, used, excess, metrics: Arc::clone(metrics), owner }
    }

    /// Changes the maximum. Existing permits keep their amounts.
    pub fn set_max(&self, max: u64) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// Acquires a permit that counts for no caller yet: see [`Permit::attribute`]. Where too little is left, returns `None` and counts the refusal.
    #[must_use]
    pub fn acquire(self: &Arc<Self>, amount: u64) -> Option<Permit> {
        let upper = self.contested(self.used(), amount).map_or(0, |contested| contested.amount);
        let mut permit = Account::new(self, None).acquire(amount)?;
        permit.upper = upper;
        Some(permit)
    }

    /// A permit for nothing, which can grow.
    #[must_use]
    pub fn empty_permit(self: &Arc<Self>) -> Permit {
        Permit { budget: Arc::clone(self), amount: 0, excess: 0, upper: 0, held: OnceLock::new() }
    }

    /// The amount in use.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// How much of an amount that is about to be in use, or is in use already, lies in the upper half, which is shared fairly.
    fn contested(&self, used: u64, amount: u64) -> Option<Contested<'_>> {
        let Owner::Everyone(shares, is_fair) = &self.owner else { return None };
        let max = self.max.load(Ordering::Relaxed);
        let used = used.saturating_sub(self.excess.load(Ordering::Relaxed));
        let amount = amount.min(used.saturating_add(amount).saturating_sub(max.div_ceil(2)));
        let is_contested = amount > 0 && is_fair.load(Ordering::Relaxed);
        let left = max.saturating_sub(used.max(max.div_ceil(2)));
        is_contested.then_some(Contested { shares, amount, left })
    }

    /// How much may be in use.
    fn room(&self) -> u64 {
        self.max.load(Ordering::Relaxed).saturating_add(self.excess.load(Ordering::Relaxed))
    }

    /// Adds to the amount in use if enough is left for a permit that has `own` so far. Without `own` there is no
    /// limit.
    fn add(&self, amount: u64, own: Option<u64>) -> bool {
        let max = self.room();
        let is_child = matches!(self.owner, Owner::Parent(_));
        let fits = |before: u64, after: u64| own.is_none_or(|own| after <= max || (is_child && before == own));
        let added = |before: u64| before.checked_add(amount).filter(|after| fits(before, *after));
        // It orders no other memory access: only the sum has to be right.
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added).is_ok()
    }

    /// The same, in the parent too, for a party that is counted where the budget is scarce. Returns how much counts for it.
    fn charge(&self, amount: u64, own: u64, party: Option<PartyOf<'_>>) -> Result<Option<(Party, u64)>, NoRoom> {
        if let Owner::Parent(parent) = &self.owner {
            if !self.add(amount, Some(own)) {
                return Err(NoRoom::Full);
            }
            let charged = parent.charge(amount, own, party);
            if charged.is_err() {
                self.used.fetch_sub(amount, Ordering::Relaxed);
            }
            return charged;
        }
        let contested =
            party.and_then(|party| self.contested(self.used(), amount).map(|contested| (party(), contested)));
        let held = contested.map(|(party, contested)| contested.hold(party)).transpose()?;
        if self.add(amount, Some(own)) {
            return Ok(held);
        }
        self.release(held);
        Err(NoRoom::Full)
    }

    fn release(&self, held: Option<(Party, u64)>) {
        if let (Owner::Everyone(shares, _), Some((party, amount))) = (&self.owner, held) {
            shares.release(party, amount);
        }
    }

    fn refund(&self, amount: u64, excess: u64, held: Option<(Party, u64)>) {
        self.used.fetch_sub(amount, Ordering::Relaxed);
        if excess > 0 {
            self.excess.fetch_sub(excess, Ordering::Relaxed);
        }
        match &self.owner {
            Owner::Parent(parent) => parent.refund(amount, excess, held),
            Owner::Everyone(..) => self.release(held),
        }
    }

    pub(super) fn refused(&self, why: NoRoom) {
        match why {
            NoRoom::Full => self.metrics.exceeded(self.limit),
            NoRoom::Share(_) => self.metrics.share_exceeded(self.limit),
        }
    }
}

impl<'a> Account<'a> {
    /// A budget that `party` uses.
    #[must_use]
    pub fn new(budget: &'a Arc<Budget>, party: Option<PartyOf<'a>>) -> Self {
        Self { budget, party }
    }

    /// The budget.
    #[must_use]
    pub fn budget(self) -> &'a Arc<Budget> {
        self.budget
    }

    /// Who uses it.
    #[must_use]
    pub fn party(self) -> Option<PartyOf<'a>> {
        self.party
    }

    /// Acquires a permit. Where too little is left, or the party holds its share, returns `None` and counts the refusal.
    #[must_use]
    pub fn acquire(self, amount: u64) -> Option<Permit> {
        self.try_acquire(amount).inspect_err(|why| self.budget.refused(*why)).ok()
    }

    /// The same, for callers that wait: a refusal is not counted.
    pub(super) fn try_acquire(self, amount: u64) -> Result<Permit, NoRoom> {
        let mut permit = self.budget.empty_permit();
        permit.charge(amount, self.party)?;
        Ok(permit)
    }
}

impl Permit {
    /// Counts the permit for a party, where its budget is scarce. Returns false, and counts the refusal, where the party holds
    /// its share.
    #[must_use]
    pub fn attribute(&self, party: PartyOf<'_>) -> bool {
        let before = self.budget.used().saturating_sub(self.amount);
        let contested = self.budget.contested(before, self.amount).filter(|_| self.upper > 0);
        let Some(contested) = contested else { return true };
        let held =
            Contested { amount: self.upper, ..contested }.hold(party()).inspect_err(|why| self.budget.refused(*why));
        held.map(|held| self.held.set(held)).is_ok()
    }

    fn charge(&mut self, amount: u64, party: Option<PartyOf<'_>>) -> Result<(), NoRoom> {
        if let Some((party, more)) = self.budget.charge(amount, self.amount, party)? {
            match self.held.get_mut() {
                Some((_, held)) => *held += more,
                None => drop(self.held.set((party, more))),
            }
        }
        self.amount += amount;
        Ok(())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.amount > 0 {
            self.budget.refund(self.amount, self.excess, self.held.get().copied());
        }
    }
}

/// A buffer whose bytes count against a budget.
pub(super) struct CountedBuffer<'a> {
    /// The only frame so far: most bodies have one, which needs no copy.
    first: Option<Bytes>,
    memory: BytesMut,
    /// As many bytes as `memory` has room for, times `copies`.
    permit: Option<Permit>,
    account: Account<'a>,
    copies: u64,
    floor: usize,
    expected: usize,
}

impl<'a> CountedBuffer<'a> {
    pub(super) fn new(account: Account<'a>) -> Self {
        Self { first: None, memory: BytesMut::new(), permit: None, account, copies: 1, floor: 0, expected: 0 }
    }

    /// Counts each byte twice, for a copy that will be made of it. Accepts `floor` bytes even where the budget has no room, and
    /// reserves room for those that are `expected` as soon as a second frame arrives.
    pub(super) fn for_answer(account: Account<'a>, floor: usize, expected: usize) -> Self {
        Self { copies: 2, floor, expected, ..Self::new(account) }
    }

    pub(super) fn len(&self) -> usize {
        self.first.as_ref().map_or(self.memory.len(), Bytes::len)
    }

    /// A copy of a part of the buffer.
    pub(super) fn copy(&self, part: Range<usize>) -> Bytes {
        let buffer = self.first.as_deref().unwrap_or(&self.memory);
        Bytes::copy_from_slice(&buffer[part])
    }

    /// Adds a frame; returns it where the budget has no room.
    pub(super) fn push(&mut self, data: Bytes) -> Result<(), Bytes> {
        if self.len() == 0 && self.memory.capacity() == 0 {
            if data.len() > UNCOUNTED && !self.reserve(data.len()) {
                return Err(data);
            }
            self.first = Some(data);
            return Ok(());
        }
        let needed = self.len() + data.len();
        if needed > self.memory.capacity() {
            let generous = needed.max(self.memory.capacity() * 2).max(self.expected);
            let capacity = if self.try_reserve(generous) {
                generous
            } else if self.reserve(needed) {
                needed
            } else {
                return Err(data);
            };
            self.memory.reserve(capacity - self.memory.len());
        }
        if let Some(first) = self.first.take() {
            self.memory.extend_from_slice(&first);
        }
        self.memory.extend_from_slice(&data);
        Ok(())
    }

    /// Takes the bytes out, which count until their last reference is dropped. Also returns the permit for the copies,
    /// if any.
    pub(super) fn take(&mut self) -> (Bytes, Option<Permit>) {
        let bytes = self.first.take().unwrap_or_else(|| std::mem::take(&mut self.memory).freeze());
        let Some(mut permit) = self.permit.take() else { return (bytes, None) };
        let copies = permit.split(permit.amount() / self.copies * (self.copies - 1));
        (counted(bytes, permit), Some(copies))
    }

    /// Extends the permit to `capacity` bytes in all.
    fn reserve(&mut self, capacity: usize) -> bool {
        let (shortfall, is_below, party) = (self.shortfall(capacity), capacity <= self.floor, self.account.party);
        let permit = self.permit();
        if is_below {
            permit.force_grow(shortfall, party);
            return true;
        }
        permit.grow(shortfall, party)
    }

    fn try_reserve(&mut self, capacity: usize) -> bool {
        let (shortfall, party) = (self.shortfall(capacity), self.account.party);
        self.permit().try_grow(shortfall, party)
    }

    fn permit(&mut self) -> &mut Permit {
        self.permit.get_or_insert_with(|| self.account.budget.empty_permit())
    }

    fn shortfall(&self, capacity: usize) -> u64 {
        (capacity as u64 * self.copies).saturating_sub(self.permit.as_ref().map_or(0, Permit::amount))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::limits::Limit;
    use crate::telemetry::metrics::Metrics;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn usage(all: u64, each: u64) -> Arc<Usage> {
        let limits = Limits { max_connections: all, max_connections_per_address: each, ..Limits::default() };
        Usage::new(&limits, &Metrics::new())
    }

    #[test]
    fn each_network_has_its_own_permits() {
        let usage = usage(10, 2);
        let first = usage.connection(ip("2001:db8::1")).unwrap();
        let _second = usage.connection(ip("2001:db8::ffff:2")).unwrap();
        assert_eq!(usage.connection(ip("2001:db8::3")).err(), Some(Limit::MaxConnectionsPerAddress));
        let _next = usage.connection(ip("2001:db8:0:1::3")).unwrap();
        let _loopback = usage.connection(ip("::1")).unwrap();
        drop(first);
        let _third = usage.connection(ip("2001:db8::3")).unwrap();
        let _old = usage.connection(ip("10.0.0.1")).unwrap();
        let _mapped = usage.connection(ip("::ffff:10.0.0.1")).unwrap();
        assert_eq!(usage.connection(ip("10.0.0.1")).err(), Some(Limit::MaxConnectionsPerAddress));
        let _neighbour = usage.connection(ip("10.0.0.2")).unwrap();
    }

    #[test]
    fn refused_and_closed_connections_leave_no_entries() {
        let usage = usage(2, 2);
        let permits = [usage.connection(ip("10.0.0.1")).unwrap(), usage.connection(ip("10.0.0.2")).unwrap()];
        assert_eq!(usage.connection(ip("10.0.0.3")).err(), Some(Limit::MaxConnections));
        assert_eq!(usage.addresses.connections().len(), 2);
        drop(permits);
        assert!(usage.addresses.connections().is_empty());
        assert_eq!(usage.connections.used(), 0);
    }

    #[test]
    fn permits_reduce_the_budget_until_they_are_dropped() {
        let metrics = Metrics::new();
        let budget = Budget::new(Limit::MaxRequests, 3, &metrics.limits());
        let mut first = budget.acquire(1).unwrap();
        let second = budget.acquire(2).unwrap();
        assert!(budget.acquire(1).is_none() && !first.grow(1, None));
        assert_eq!(budget.used(), 3);
        assert!(metrics.encode().contains("oncegate_requests_in_flight 3\n"), "{}", metrics.encode());
        assert!(metrics.encode().contains("oncegate_limit_exceeded_total{limit=\"max_requests\"} 2\n"));
        drop(second);
        assert!(first.grow(2, None));
        drop(first);
        assert_eq!(budget.used(), 0);
        assert!(metrics.encode().contains("oncegate_requests_in_flight 0\n"));
    }

    #[test]
    fn a_share_takes_of_the_whole_and_leaves_the_rest_to_others() {
        let metrics = Metrics::new();
        let parent = Budget::new(Limit::MaxBufferedMemory, 100, &metrics.limits());
        let child = parent.child(25);
        let mut parts = [(); 3].map(|()| child.acquire(8).unwrap());
        assert_eq!((child.used(), parent.used()), (24, 24));
        assert!(!parts[0].grow(2, None) && parts[0].grow(1, None) && child.acquire(1).is_none());
        assert!(metrics.encode().contains("oncegate_limit_exceeded_total{limit=\"max_buffered_memory\"} 2\n"));
        let mut other = parent.acquire(75).unwrap();
        other.force_grow(1, None);
        drop(parts);
        assert_eq!((child.used(), parent.used()), (0, 76));
        assert!(child.acquire(25).is_none(), "the whole has no room for it");
        assert_eq!((child.used(), parent.used()), (0, 76));
    }

    #[test]
    fn a_single_part_may_be_larger_than_its_share() {
        let parent = Budget::new(Limit::MaxBufferedMemory, 100, &Metrics::new().limits());
        let child = parent.child(25);
        let mut large = child.acquire(60).unwrap();
        assert!(large.grow(40, None) && !large.grow(1, None), "as far as the whole has room");
        assert!(child.acquire(1).is_none());
        let half = large.split(50);
        drop(large);
        let mut second = child.empty_permit();
        assert!(!second.grow(1, None), "another part is there");
        drop(half);
        assert!(second.grow(60, None));
        drop(second);
        assert_eq!((child.used(), parent.used()), (0, 0));
    }

    #[test]
    fn a_smaller_budget_waits_for_what_was_taken_of_the_larger() {
        let budget = Budget::new(Limit::MaxRequests, 3, &Metrics::new().limits());
        let [first, second, third] = [(); 3].map(|()| budget.acquire(1).unwrap());
        budget.set_max(1);
        drop((first, second));
        assert!(budget.acquire(1).is_none());
        drop(third);
        assert!(budget.acquire(1).is_some());
    }

    #[test]
    fn a_party_is_counted_in_the_upper_half_until_its_permits_are_gone() {
        let metrics = Metrics::new();
        let budget = Budget::new(Limit::MaxWaiting, 64, &metrics.limits());
        let (loud, quiet) = (Party::at(ip("192.0.2.1")), Party::at(ip("192.0.2.2")));
        let take = |party: Party| Account::new(&budget, Some(&|| party)).acquire(1);
        let mut held: Vec<_> = std::iter::from_fn(|| take(loud)).collect();
        assert_eq!(held.len(), 56);
        let text = metrics.encode();
        assert!(text.contains("oncegate_limit_exceeded_total{limit=\"fair_share\"} 1\n"), "{text}");
        assert!(text.contains("oncegate_limit_exceeded_total{limit=\"max_waiting\"} 1\n"), "{text}");
        let others: Vec<_> = std::iter::from_fn(|| take(quiet)).collect();
        assert_eq!(others.len(), 6, "three quarters of the rest");
        // One of the lower half makes room for another, but gives back no share.
        held.remove(0);
        assert!(take(loud).is_none());
        held.pop();
        assert!(take(loud).is_none(), "others have taken of what was left");
        held.truncate(40);
        assert!(take(loud).is_some());
        drop((held, others));
        assert_eq!(budget.used(), 0);
        assert_eq!(std::iter::from_fn(|| take(loud)).collect::<Vec<_>>().len(), 56);
    }

    #[test]
    fn a_permit_is_attributed_when_its_party_is_known() {
        let budget = Budget::new(Limit::MaxRequests, 16, &Metrics::new().limits());
        let (loud, quiet) = (Party::at(ip("192.0.2.1")), Party::at(ip("192.0.2.2")));
        let take = |party: Party| budget.acquire(1).filter(|permit| permit.attribute(&|| party));
        let held: Vec<_> = std::iter::from_fn(|| take(loud)).collect();
        assert_eq!((held.len(), budget.used()), (14, 14));
        let other = take(quiet);
        assert!(other.is_some() && take(loud).is_none());
        drop((held, other));
        assert_eq!(std::iter::from_fn(|| take(loud)).collect::<Vec<_>>().len(), 14);
    }

    #[test]
    fn parts_of_a_permit_give_back_what_the_whole_held() {
        let parent = Budget::new(Limit::MaxBufferedMemory, 800, &Metrics::new().limits());
        let child = parent.child(700);
        let loud = Party::at(ip("192.0.2.1"));
        let party: PartyOf<'_> = &|| loud;
        let mut whole = child.empty_permit();
        assert!(whole.grow(400, Some(party)) && whole.grow(300, Some(party)));
        assert!(!whole.grow(50, Some(party)));
        let part = whole.split(500);
        // Beyond its share, it is not counted.
        whole.force_grow(100, Some(party));
        assert_eq!((whole.amount(), part.amount(), parent.used()), (300, 500, 800));
        assert!(!whole.grow_if_plenty(1));
        let quiet = Party::at(ip("192.0.2.2"));
        assert!(Account::new(&parent, Some(&|| quiet)).acquire(50).is_some(), "that took nothing of what was left");
        drop(whole);
        drop(part);
        assert_eq!((child.used(), parent.used()), (0, 0));
        assert!(child.empty_permit().grow_if_plenty(400));
        let again = Account::new(&child, Some(party)).acquire(700);
        assert!(again.is_some());
    }

    #[test]
    fn without_fair_shares_one_party_may_have_all() {
        let limits = Limits { max_waiting: 64, fair_share: false, ..Limits::default() };
        let usage = Usage::new(&limits, &Metrics::new());
        let take = || Account::new(&usage.waiting, Some(&|| Party::at(ip("192.0.2.1")))).acquire(1);
        let mut held: Vec<_> = std::iter::from_fn(take).collect();
        assert_eq!(held.len(), 64);
        usage.set_limits(&Limits { fair_share: true, ..limits });
        held.pop();
        assert!(take().is_some(), "it held nothing that was counted");
    }

    fn budget(most: u64) -> Arc<Budget> {
        Budget::new(Limit::MaxBufferedMemory, most, &Metrics::new().limits())
    }

    fn piece(size: usize) -> Bytes {
        vec![b'x'; size].into()
    }

    #[test]
    fn bytes_are_counted_until_nothing_refers_to_them() {
        let budget = budget(100_000);
        let mut buffer = CountedBuffer::new(Account::new(&budget, None));
        buffer.push(piece(10_000)).unwrap();
        assert_eq!(budget.used(), 10_000);
        for _ in 0..5 {
            buffer.push(piece(10_000)).unwrap();
            assert!(budget.used() >= buffer.memory.capacity() as u64, "{}", budget.used());
        }
        let (bytes, _) = buffer.take();
        assert_eq!((bytes.len(), buffer.len()), (60_000, 0));
        let part = bytes.slice(10..20);
        drop(bytes);
        assert!(budget.used() >= 60_000);
        drop(part);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_small_first_frame_is_not_counted() {
        let budget = budget(UNCOUNTED as u64 + 1);
        let mut buffer = CountedBuffer::new(Account::new(&budget, None));
        buffer.push(piece(UNCOUNTED)).unwrap();
        assert_eq!(budget.used(), 0);
        buffer.push(piece(1)).unwrap();
        assert_eq!(budget.used(), UNCOUNTED as u64 + 1);
        assert!(buffer.push(piece(1)).is_err());
        assert!(CountedBuffer::new(Account::new(&budget, None)).push(piece(UNCOUNTED + 1)).is_err());
    }

    #[test]
    fn a_frame_without_room_is_returned_and_the_buffer_is_kept() {
        let budget = budget(25_000);
        let mut buffer = CountedBuffer::new(Account::new(&budget, None));
        buffer.push(piece(10_000)).unwrap();
        // Not twice as much as there is, but as much as is needed.
        buffer.push(piece(11_000)).unwrap();
        assert_eq!(buffer.push(piece(4_100)).unwrap_err().len(), 4_100);
        assert_eq!(buffer.len(), 21_000);
        buffer.push(piece(4_000)).unwrap();
        assert_eq!(buffer.take().0.len(), 25_000);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn copies_are_counted_separately_and_the_floor_is_always_available() {
        let budget = budget(10);
        let mut buffer = CountedBuffer::for_answer(Account::new(&budget, None), 10_000, 0);
        buffer.push(piece(6_000)).unwrap();
        buffer.push(piece(4_000)).unwrap();
        assert_eq!(budget.used(), 20_000);
        assert!(buffer.push(piece(1)).is_err());
        let (bytes, copies) = buffer.take();
        drop(copies);
        assert_eq!(budget.used(), 10_000);
        drop(bytes);
        assert_eq!(budget.used(), 0);
    }
}
