//! What many share the most of: each takes its part, and gives it back when it is done. Nobody waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::telemetry::limits::{Level, Limit, LimitMetrics};

/// So much there may be of something, and so much there is.
pub struct Budget {
    limit: Limit,
    most: AtomicU64,
    taken: Level,
    metrics: Arc<LimitMetrics>,
    /// The budget that it is a share of.
    whole: Option<Arc<Budget>>,
}

/// A part of a budget. Dropped, it is given back.
pub struct Taken {
    budget: Arc<Budget>,
    amount: u64,
}

impl Budget {
    /// Nothing of it is taken yet.
    #[must_use]
    pub fn new(limit: Limit, most: u64, metrics: &Arc<LimitMetrics>) -> Arc<Self> {
        Arc::new(Self {
            limit,
            most: AtomicU64::new(most),
            taken: metrics.level(limit),
            metrics: Arc::clone(metrics),
            whole: None,
        })
    }

    /// A share of this budget: whatever is taken of the share is also taken of the whole. A share has room for `most`, or for
    /// a single part of any size that the whole has room for.
    #[must_use]
    pub fn share(self: &Arc<Self>, most: u64) -> Arc<Self> {
        Arc::new(Self {
            limit: self.limit,
            most: AtomicU64::new(most),
            taken: Level::default(),
            metrics: Arc::clone(&self.metrics),
            whole: Some(Arc::clone(self)),
        })
    }

    /// Changes how much there may be. What was taken stays taken.
    pub fn allow(&self, most: u64) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// Takes a part; nothing where there is too little left, which is counted.
    #[must_use]
    pub fn take(self: &Arc<Self>, amount: u64) -> Option<Taken> {
        let mut taken = self.nothing();
        taken.grow(amount).then_some(taken)
    }

    /// A part that is to grow.
    #[must_use]
    pub fn nothing(self: &Arc<Self>) -> Taken {
        Taken { budget: Arc::clone(self), amount: 0 }
    }

    /// How much is taken.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Adds to what is taken, where there is enough left for a part that has `own` so far; or without a limit, where `own`
    /// is `None`.
    fn add(&self, amount: u64, own: Option<u64>) -> bool {
        let most = self.most.load(Ordering::Relaxed);
        let fits =
            |before: u64, after: u64| own.is_none_or(|own| after <= most || (self.whole.is_some() && before == own));
        let added = |before: u64| before.checked_add(amount).filter(|after| fits(before, *after));
        // It guards no other memory: only the sum has to be right.
        if self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added).is_err() {
            return false;
        }
        let is_added = self.whole.as_ref().is_none_or(|whole| whole.add(amount, own));
        if !is_added {
            self.taken.fetch_sub(amount, Ordering::Relaxed);
        }
        is_added
    }

    fn remove(&self, amount: u64) {
        self.taken.fetch_sub(amount, Ordering::Relaxed);
        if let Some(whole) = &self.whole {
            whole.remove(amount);
        }
    }
}

impl Taken {
    /// Takes more; false where there is too little left, which is counted.
    #[must_use]
    pub fn grow(&mut self, amount: u64) -> bool {
        let is_added = self.try_grow(amount);
        if !is_added {
            self.budget.metrics.exceeded(self.budget.limit);
        }
        is_added
    }

    /// Takes more where there is enough left: for what can do with less.
    #[must_use]
    pub fn try_grow(&mut self, amount: u64) -> bool {
        let is_added = self.budget.add(amount, Some(self.amount));
        self.amount += if is_added { amount } else { 0 };
        is_added
    }

    /// Takes more, whatever is left: for what is bounded by something else.
    pub fn grow_anyway(&mut self, amount: u64) {
        if self.budget.add(amount, None) {
            self.amount += amount;
        }
    }

    /// Parts with some of it, or with all.
    #[must_use]
    pub fn split(&mut self, amount: u64) -> Self {
        let amount = amount.min(self.amount);
        self.amount -= amount;
        Self { budget: Arc::clone(&self.budget), amount }
    }

    /// How much it is.
    #[must_use]
    pub fn amount(&self) -> u64 {
        self.amount
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if self.amount > 0 {
            self.budget.remove(self.amount);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::metrics::Metrics;

    #[test]
    fn what_is_taken_is_missing_until_it_is_given_back() {
        let metrics = Metrics::new();
        let budget = Budget::new(Limit::MaxRequests, 3, &metrics.limits());
        let mut first = budget.take(1).unwrap();
        let second = budget.take(2).unwrap();
        assert!(budget.take(1).is_none() && !first.grow(1));
        assert_eq!(budget.taken(), 3);
        assert!(metrics.encode().contains("oncegate_requests_in_flight 3\n"), "{}", metrics.encode());
        assert!(metrics.encode().contains("oncegate_limit_exceeded_total{limit=\"max_requests\"} 2\n"));
        drop(second);
        assert!(first.grow(2));
        drop(first);
        assert_eq!(budget.taken(), 0);
        assert!(metrics.encode().contains("oncegate_requests_in_flight 0\n"));
    }

    #[test]
    fn a_share_takes_of_the_whole_and_leaves_the_rest_to_others() {
        let metrics = Metrics::new();
        let whole = Budget::new(Limit::MaxBufferedMemory, 100, &metrics.limits());
        let share = whole.share(25);
        let mut parts = [(); 3].map(|()| share.take(8).unwrap());
        assert_eq!((share.taken(), whole.taken()), (24, 24));
        assert!(!parts[0].grow(2) && parts[0].grow(1) && share.take(1).is_none());
        assert!(metrics.encode().contains("oncegate_limit_exceeded_total{limit=\"max_buffered_memory\"} 2\n"));
        let mut other = whole.take(75).unwrap();
        other.grow_anyway(1);
        drop(parts);
        assert_eq!((share.taken(), whole.taken()), (0, 76));
        assert!(share.take(25).is_none(), "the whole has no room for it");
        assert_eq!((share.taken(), whole.taken()), (0, 76));
    }

    #[test]
    fn a_single_part_may_be_larger_than_its_share() {
        let whole = Budget::new(Limit::MaxBufferedMemory, 100, &Metrics::new().limits());
        let share = whole.share(25);
        let mut large = share.take(60).unwrap();
        assert!(large.grow(40) && !large.grow(1), "as far as the whole has room");
        assert!(share.take(1).is_none());
        let half = large.split(50);
        drop(large);
        let mut second = share.nothing();
        assert!(!second.grow(1), "another part is there");
        drop(half);
        assert!(second.grow(60));
        drop(second);
        assert_eq!((share.taken(), whole.taken()), (0, 0));
    }

    #[test]
    fn a_smaller_budget_waits_for_what_was_taken_of_the_larger() {
        let budget = Budget::new(Limit::MaxRequests, 3, &Metrics::new().limits());
        let [first, second, third] = [(); 3].map(|()| budget.take(1).unwrap());
        budget.allow(1);
        drop((first, second));
        assert!(budget.take(1).is_none());
        drop(third);
        assert!(budget.take(1).is_some());
    }
}
