//! Which identity rules are in force. Nothing is claimed by others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::RwLock;

/// The digest of the rules that a namespace's identities are made by.
pub(super) type RulesDigest = [u8; 32];

/// Whether keys are found by some rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RulesStatus {
    #[default]
    InForce,
    /// Former gates made identities by them, and the present one does not.
    Retired,
}

/// Held for reading while the store is asked for a claim by these rules, and for writing while a reload changes their
/// status. Claims by other rules go on meanwhile.
pub(super) type RulesLock = Arc<RwLock<RulesStatus>>;

/// One lock for each of the rules by which a gate of this process may claim. Rules that no gate has any more are forgotten.
#[derive(Default)]
pub(super) struct RulesInForce(Mutex<HashMap<RulesDigest, Weak<RwLock<RulesStatus>>>>);

impl RulesInForce {
    /// The lock of these rules, which are in force unless a reload has retired them.
    pub(super) fn lock_of(&self, rules: RulesDigest) -> RulesLock {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = locks.get(&rules).and_then(Weak::upgrade) {
            return lock;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = RulesLock::default();
        locks.insert(rules, Arc::downgrade(&lock));
        lock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_stay_retired_while_a_gate_has_them_and_no_longer() {
        let rules = RulesInForce::default();
        let lock = rules.lock_of([1; 32]);
        *lock.try_write().unwrap() = RulesStatus::Retired;
        let again = rules.lock_of([1; 32]);
        assert_eq!(*again.try_read().unwrap(), RulesStatus::Retired);
        assert_eq!(*rules.lock_of([2; 32]).try_read().unwrap(), RulesStatus::InForce);
        drop((lock, again));
        assert_eq!(*rules.lock_of([1; 32]).try_read().unwrap(), RulesStatus::InForce);
        assert_eq!(rules.0.lock().unwrap().len(), 1, "rules that no gate has are forgotten");
    }
}
