//! Budgets for shared resources: a caller acquires a permit and returns it when it is done. No caller waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::telemetry::limits::{Level, Limit, LimitMetrics};

/// A limited amount of a resource, and how much of it is in use.
pub struct Budget {
    limit: Limit,
    max: AtomicU64,
    used: Level,
    metrics: Arc<LimitMetrics>,
    /// The budget that this is a child of.
    parent: Option<Arc<Budget>>,
}

/// The right to use an amount of a budget. Dropping it returns the amount.
pub struct Permit {
    budget: Arc<Budget>,
    amount: u64,
}

impl Budget {
    /// An unused budget.
    #[must_use]
    pub fn new(limit: Limit, max: u64, metrics: &Arc<LimitMetrics>) -> Arc<Self> {
        Arc::new(Self {
            limit,
            max: AtomicU64::new(max),
            used: metrics.level(limit),
            metrics: Arc::clone(metrics),
            parent: None,
        })
    }

    /// A child of this budget. An amount acquired from the child also counts against the parent. A child has room for
    /// `max`, or for a single permit of any size that the parent has room for.
    #[must_use]
    pub fn child(self: &Arc<Self>, max: u64) -> Arc<Self> {
        Arc::new(Self {
            limit: self.limit,
            max: AtomicU64::new(max),
            used: Level::default(),
            metrics: Arc::clone(&self.metrics),
            parent: Some(Arc::clone(self)),
        })
    }

    /// Changes the maximum. Existing permits keep their amounts.
    pub fn set_max(&self, max: u64) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// Acquires a permit. Where too little is left, returns `None` and counts the refusal.
    #[must_use]
    pub fn acquire(self: &Arc<Self>, amount: u64) -> Option<Permit> {
        let mut permit = self.empty_permit();
        permit.grow(amount).then_some(permit)
    }

    /// A permit for nothing, which can grow.
    #[must_use]
    pub fn empty_permit(self: &Arc<Self>) -> Permit {
        Permit { budget: Arc::clone(self), amount: 0 }
    }

    /// The amount in use.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Adds to the amount in use if enough is left for a permit that has `own` so far. Without `own` there is no
    /// limit.
    fn charge(&self, amount: u64, own: Option<u64>) -> bool {
        let max = self.max.load(Ordering::Relaxed);
        let fits =
            |before: u64, after: u64| own.is_none_or(|own| after <= max || (self.parent.is_some() && before == own));
        let added = |before: u64| before.checked_add(amount).filter(|after| fits(before, *after));
        // It orders no other memory access: only the sum has to be right.
        if self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added).is_err() {
            return false;
        }
        let is_added = self.parent.as_ref().is_none_or(|parent| parent.charge(amount, own));
        if !is_added {
            self.used.fetch_sub(amount, Ordering::Relaxed);
        }
        is_added
    }

    fn refund(&self, amount: u64) {
        self.used.fetch_sub(amount, Ordering::Relaxed);
        if let Some(parent) = &self.parent {
            parent.refund(amount);
        }
    }
}

impl Permit {
    /// Acquires more. Where too little is left, returns false and counts the refusal.
    #[must_use]
    pub fn grow(&mut self, amount: u64) -> bool {
        let is_added = self.try_grow(amount);
        if !is_added {
            self.budget.metrics.exceeded(self.budget.limit);
        }
        is_added
    }

    /// Acquires more if enough is left: for callers that can do with less.
    #[must_use]
    pub fn try_grow(&mut self, amount: u64) -> bool {
        let is_added = self.budget.charge(amount, Some(self.amount));
        self.amount += if is_added { amount } else { 0 };
        is_added
    }

    /// Acquires more, whatever is left: for uses with another bound.
    pub fn force_grow(&mut self, amount: u64) {
        if self.budget.charge(amount, None) {
            self.amount += amount;
        }
    }

    /// Splits off some of the amount, at most all of it.
    #[must_use]
    pub fn split(&mut self, amount: u64) -> Self {
        let amount = amount.min(self.amount);
        self.amount -= amount;
        Self { budget: Arc::clone(&self.budget), amount }
    }

    /// Its amount.
    #[must_use]
    pub fn amount(&self) -> u64 {
        self.amount
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.amount > 0 {
            self.budget.refund(self.amount);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::Metrics;

    #[test]
    fn permits_reduce_the_budget_until_they_are_dropped() {
        let metrics = Metrics::new();
        let budget = Budget::new(Limit::MaxRequests, 3, &metrics.limits());
        let mut first = budget.acquire(1).unwrap();
        let second = budget.acquire(2).unwrap();
        assert!(budget.acquire(1).is_none() && !first.grow(1));
        assert_eq!(budget.used(), 3);
        assert!(metrics.encode().contains("oncegate_requests_in_flight 3\n"), "{}", metrics.encode());
        assert!(metrics.encode().contains("oncegate_limit_exceeded_total{limit=\"max_requests\"} 2\n"));
        drop(second);
        assert!(first.grow(2));
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
        assert!(!parts[0].grow(2) && parts[0].grow(1) && child.acquire(1).is_none());
        assert!(metrics.encode().contains("oncegate_limit_exceeded_total{limit=\"max_buffered_memory\"} 2\n"));
        let mut other = parent.acquire(75).unwrap();
        other.force_grow(1);
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
        assert!(large.grow(40) && !large.grow(1), "as far as the whole has room");
        assert!(child.acquire(1).is_none());
        let half = large.split(50);
        drop(large);
        let mut second = child.empty_permit();
        assert!(!second.grow(1), "another part is there");
        drop(half);
        assert!(second.grow(60));
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
}
