//! Permits that grow and are split, budgets within budgets, and bytes that hold a permit.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use super::{Account, Budget, Owner, Permit, UNCOUNTED_BODY, Usage};
use crate::http::fair_share::PartyOf;
use crate::telemetry::limits::Level;

impl Permit {
    /// Acquires more for a party. Where too little is left, or the party holds its share, returns false and counts the
    /// refusal.
    #[must_use]
    pub fn grow(&mut self, amount: u64, party: Option<PartyOf<'_>>) -> bool {
        self.charge(amount, party).inspect_err(|why| self.budget.refused(*why)).is_ok()
    }

    /// Acquires more if it may: for callers that can do with less.
    #[must_use]
    pub fn try_grow(&mut self, amount: u64, party: Option<PartyOf<'_>>) -> bool {
        self.charge(amount, party).is_ok()
    }

    /// Acquires more that counts for no caller, while the budget is not scarce: for what the process can do without.
    #[must_use]
    pub fn grow_if_plenty(&mut self, amount: u64) -> bool {
        let budget = Arc::clone(&self.budget);
        budget.root().is_plenty(amount) && self.charge(amount, None).is_ok()
    }

    /// Acquires more, even beyond the maximum: for uses with another bound. Where a party has no room for it, the maximum grows by
    /// the amount until the permit is dropped, so that others find as much left as before.
    pub fn force_grow(&mut self, amount: u64, party: Option<PartyOf<'_>>) {
        let excess = if party.is_some() { amount } else { 0 };
        if self.charge(amount, party).is_err() && self.budget.force(amount, excess) {
            self.amount += amount;
            self.excess += excess;
        }
    }

    /// Splits off some of the amount, at most all of it.
    #[must_use]
    pub fn split(&mut self, amount: u64) -> Self {
        let amount = amount.min(self.amount);
        self.amount -= amount;
        let excess = amount.min(self.excess);
        self.excess -= excess;
        let part = Self { budget: Arc::clone(&self.budget), amount, excess, upper: 0, held: OnceLock::new() };
        if let Some((party, held)) = self.held.get_mut() {
            let moved = amount.min(*held);
            *held -= moved;
            // It was made empty.
            let _ = part.held.set((*party, moved));
        }
        part
    }

    /// Its amount.
    #[must_use]
    pub fn amount(&self) -> u64 {
        self.amount
    }
}

impl Budget {
    /// A child of this budget. An amount acquired from the child also counts against the parent. A child has room for
    /// `max`, or for a single permit of any size that the parent has room for.
    #[must_use]
    pub fn child(self: &Arc<Self>, max: u64) -> Arc<Self> {
        Arc::new(Self {
            limit: self.limit,
            max: AtomicU64::new(max),
            used: Level::default(),
            excess: AtomicU64::new(0),
            metrics: Arc::clone(&self.metrics),
            owner: Owner::Parent(Arc::clone(self)),
        })
    }

    /// The budget that this one and its siblings are parts of.
    fn root(&self) -> &Self {
        match &self.owner {
            Owner::Parent(parent) => parent.root(),
            Owner::Everyone(..) => self,
        }
    }

    /// Whether half is in use, so that it counts who uses more.
    #[must_use]
    pub fn is_scarce(&self) -> bool {
        !self.root().is_plenty(1)
    }

    /// Whether `amount` more takes nothing of the upper half.
    fn is_plenty(&self, amount: u64) -> bool {
        self.contested(self.used(), amount).is_none()
    }

    /// Adds to the amount in use, whatever is left.
    fn force(&self, amount: u64, excess: u64) -> bool {
        if !self.add(amount, None) {
            return false;
        }
        self.excess.fetch_add(excess, Ordering::Relaxed);
        match &self.owner {
            Owner::Parent(parent) => parent.force(amount, excess),
            Owner::Everyone(..) => true,
        }
    }
}

impl Account<'_> {
    /// The same as [`Account::acquire`], but no more than half of the budget: what was accepted under a larger budget can still
    /// be delivered, if not much else is held at the time.
    #[must_use]
    pub fn acquire_or_half(self, amount: u64) -> Option<Permit> {
        let half = self.budget.max.load(Ordering::Relaxed) / 2;
        self.acquire(amount.min(half))
    }
}

impl Usage {
    /// The same as [`Usage::count_body`], by [`Account::acquire_or_half`].
    #[must_use]
    pub fn count_body_or_half(memory: Account<'_>, body: Bytes) -> Option<Bytes> {
        let permit = memory.acquire_or_half(body.len() as u64)?;
        Some(counted(body, permit))
    }

    /// Counts the bytes of a body against `memory` until their last reference is dropped. Returns `None` where the
    /// budget has no room. Small bodies are not counted: the number of requests bounds them.
    #[must_use]
    pub fn count_body(memory: Account<'_>, body: Bytes) -> Option<Bytes> {
        if body.len() <= UNCOUNTED_BODY {
            return Some(body);
        }
        let permit = memory.acquire(body.len() as u64)?;
        Some(counted(body, permit))
    }
}

/// Bytes that count until their last reference is dropped.
pub(in crate::http) fn counted(bytes: Bytes, permit: Permit) -> Bytes {
    struct Counted {
        bytes: Bytes,
        _permit: Permit,
    }
    impl AsRef<[u8]> for Counted {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }
    if permit.amount() == 0 {
        return bytes;
    }
    Bytes::from_owner(Counted { bytes, _permit: permit })
}
