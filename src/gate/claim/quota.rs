//! Quotas of new keys: each gate counts in memory, and where gates share a Redis, all of them together there.
//!
//! A key is taken before the claim, and given back unless the claim leads to an attempt. Where requests are accepted, it is
//! taken before the request is kept, and given back if it certainly is not. A request waits for Redis for
//! milliseconds at most. What Redis says later than that still counts: for its own count, and for what this gate grants next.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use quick_cache::sync::Cache;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use super::protected::ProtectedRequest;
use crate::http::problem::{Problem, RateLimit};
use crate::idempotency::policy::Policy;
use crate::idempotency::quota::{Quota, QuotaId, Rate};
use crate::store::SharedQuotas;
use crate::telemetry::outcome::Code;

/// How many callers are counted at once. Beyond that, the count of one that was not seen for long is forgotten: it has its
/// whole quota again.
const MOST_CALLERS: usize = 100_000;

/// How long a request waits for what all gates have left.
const WAIT: Duration = Duration::from_millis(3);

/// The quotas of all callers.
pub(in crate::gate) struct Quotas {
    /// When each quota is whole again, in microseconds since `epoch`. Made when the first key is taken.
    whole: OnceLock<Cache<QuotaId, Arc<Mutex<f64>>>>,
    epoch: Instant,
    shared: Option<Arc<dyn SharedQuotas>>,
}

/// A key that was taken from a quota. It is given back when it is dropped, unless it was spent.
pub(in crate::gate) struct QuotaPermit {
    quotas: Arc<Quotas>,
    id: QuotaId,
    rate: Rate,
    is_shared: bool,
    is_spent: bool,
    /// Tells who waits for a late answer of all gates whether the key was spent.
    late: Option<oneshot::Sender<bool>>,
}

/// What a quota says at once.
pub(in crate::gate) enum QuotaGrant {
    /// There is a key left, or no quota.
    Permitted(Option<QuotaPermit>),
    /// There is one left here; what all gates have is to be asked with [`QuotaPermit::confirm`].
    Unconfirmed(QuotaPermit),
}

impl Quotas {
    pub(in crate::gate) fn new(shared: Option<Arc<dyn SharedQuotas>>) -> Self {
        Self { whole: OnceLock::new(), epoch: Instant::now(), shared }
    }

    /// Whether all gates count together.
    pub(super) fn are_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Takes a key, or says how long to wait.
    pub(in crate::gate) fn take(self: &Arc<Self>, id: QuotaId, quota: &Quota) -> Result<QuotaGrant, Duration> {
        let rate = quota.rate();
        self.change(id, |whole, now| rate.take(whole, now))?;
        let permit = QuotaPermit { quotas: Arc::clone(self), id, rate, is_shared: false, is_spent: false, late: None };
        Ok(if self.are_shared() { QuotaGrant::Unconfirmed(permit) } else { QuotaGrant::Permitted(Some(permit)) })
    }

    /// All gates have none left for this time, whatever this one has. Only what comes late is remembered: else Redis is asked
    /// again, which may have been given one back.
    fn use_up(&self, id: QuotaId, rate: Rate, wait: Duration) {
        self.change(id, |whole, now| rate.use_up(whole, now, wait));
    }

    fn change<T>(&self, id: QuotaId, change: impl FnOnce(&mut f64, f64) -> T) -> T {
        let now = self.epoch.elapsed().as_micros() as f64;
        let known = self.whole.get_or_init(|| Cache::new(MOST_CALLERS));
        let counted = known.get(&id).unwrap_or_else(|| {
            let fresh = Arc::new(Mutex::new(0.0));
            // Where another has been faster, its count stands.
            known
                .get_or_insert_with(&id, || Ok::<_, std::convert::Infallible>(fresh))
                .unwrap_or_else(|never| match never {})
        });
        let mut whole = counted.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut whole, now)
    }
}

impl QuotaPermit {
    /// Asks what all gates have left, for milliseconds at most: where Redis does not answer, what this gate has left counts.
    pub(in crate::gate) async fn confirm(mut self) -> Result<Self, Duration> {
        let Some(shared) = self.quotas.shared.clone() else { return Ok(self) };
        let (id, rate, quotas) = (self.id, self.rate, Arc::clone(&self.quotas));
        let Some(mut answer) = shared.take(id, rate) else { return Ok(self) };
        match timeout(WAIT, &mut answer).await {
            Ok(Ok(Ok(()))) => self.is_shared = true,
            // This gate gives back what it counted.
            Ok(Ok(Err(wait))) => return Err(wait),
            // It does not answer.
            Ok(Err(_)) => {}
            Err(_) => {
                let (late, is_spent) = oneshot::channel();
                self.late = Some(late);
                tokio::spawn(async move {
                    match answer.await {
                        Ok(Ok(())) if is_spent.await != Ok(true) => shared.give_back(id, rate),
                        Ok(Err(wait)) => quotas.use_up(id, rate, wait),
                        _ => {}
                    }
                });
            }
        }
        Ok(self)
    }

    /// The key is used.
    pub(in crate::gate) fn spend(mut self) {
        self.is_spent = true;
    }
}

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        if let Some(late) = self.late.take() {
            let _ = late.send(self.is_spent);
        }
        if self.is_spent {
            return;
        }
        let rate = self.rate;
        self.quotas.change(self.id, |whole, now| rate.give_back(whole, now));
        if let Some(shared) = self.quotas.shared.as_ref().filter(|_| self.is_shared) {
            shared.give_back(self.id, rate);
        }
    }
}

impl ProtectedRequest {
    /// Takes a key from the quota of its caller, or says how long to wait. A delivery takes none: its client took it when the request
    /// was accepted.
    pub(in crate::gate) fn take_from_quota(&self) -> Result<QuotaGrant, Duration> {
        let Policy { quota, scope, .. } = self.policy();
        let Some(quota) = quota.as_ref().filter(|_| self.delivery.is_none()) else {
            return Ok(QuotaGrant::Permitted(None));
        };
        let id = self.gate.identifiers.first.quota(&self.route.name, quota.by, scope, self.head.caller());
        self.gate.shared.quotas.take(id, quota)
    }

    /// The problem of a request that is one too many.
    pub(in crate::gate) fn quota_exceeded(&self, wait: Duration) -> Option<Problem> {
        let Quota { new_keys, per, .. } = self.policy().quota?;
        let seconds = per.as_secs();
        let detail = format!(
            "the quota of {new_keys} new keys in {seconds} s is used up; nothing was sent. A retry of a request that ran or \
             was accepted is answered all the same"
        );
        let mut problem = Problem::new(Code::QuotaExceeded, detail).retry_after(wait);
        problem.rate_limit = Some(RateLimit { quota: u64::from(new_keys), window: per });
        Some(problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idempotency::quota::QuotaBy;

    fn quota(new_keys: u32) -> Quota {
        Quota { new_keys, per: Duration::from_secs(3600), by: QuotaBy::Scope }
    }

    fn id(number: u64) -> QuotaId {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&number.to_be_bytes());
        QuotaId(id)
    }

    #[tokio::test(start_paused = true)]
    async fn a_permit_that_is_not_spent_is_given_back() {
        let quotas = Arc::new(Quotas::new(None));
        for _ in 0..10 {
            assert!(quotas.take(id(1), &quota(2)).is_ok());
        }
        for _ in 0..2 {
            let Ok(QuotaGrant::Permitted(Some(permit))) = quotas.take(id(1), &quota(2)) else {
                panic!("there are two")
            };
            permit.spend();
        }
        assert_eq!(quotas.take(id(1), &quota(2)).err(), Some(Duration::from_secs(1800)));
        assert!(quotas.take(id(2), &quota(2)).is_ok(), "another caller has a quota of its own");
        tokio::time::advance(Duration::from_secs(1800)).await;
        assert!(quotas.take(id(1), &quota(2)).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn callers_that_are_made_up_do_not_grow_memory_without_bound() {
        let quotas = Arc::new(Quotas::new(None));
        for number in 0..3 * MOST_CALLERS as u64 {
            if let Ok(QuotaGrant::Permitted(Some(permit))) = quotas.take(id(number), &quota(1)) {
                permit.spend();
            }
        }
        assert!(quotas.whole.get().unwrap().len() <= MOST_CALLERS);
    }

    /// All gates together, with so many left; nothing where they do not answer.
    struct Others(Mutex<Option<u32>>);

    impl SharedQuotas for Others {
        fn take(&self, _: QuotaId, _: Rate) -> Option<oneshot::Receiver<Result<(), Duration>>> {
            let (sender, answer) = oneshot::channel();
            let mut left = self.0.lock().unwrap();
            let _ = sender.send(match (*left)? {
                0 => Err(Duration::from_secs(1000)),
                some => {
                    *left = Some(some - 1);
                    Ok(())
                }
            });
            Some(answer)
        }

        fn give_back(&self, _: QuotaId, _: Rate) {
            let mut left = self.0.lock().unwrap();
            *left = left.map(|left| left + 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_all_gates_have_left_counts_where_it_is_known() {
        let others = Arc::new(Others(Mutex::new(Some(1))));
        let quotas = Arc::new(Quotas::new(Some(Arc::<Others>::clone(&others))));
        let take = async || match quotas.take(id(1), &quota(3)) {
            Ok(QuotaGrant::Unconfirmed(permit)) => permit.confirm().await,
            Ok(QuotaGrant::Permitted(_)) => panic!("others are to be asked"),
            Err(wait) => Err(wait),
        };
        drop(take().await.unwrap());
        assert_eq!(*others.0.lock().unwrap(), Some(1), "it was given back to all");
        take().await.unwrap().spend();
        assert_eq!(take().await.err(), Some(Duration::from_secs(1000)));
        *others.0.lock().unwrap() = None;
        take().await.unwrap().spend();
        take().await.unwrap().spend();
        assert_eq!(take().await.err(), Some(Duration::from_secs(1200)), "what this gate counted itself");
    }

    /// Answers later than a request waits.
    struct Late(Mutex<u32>, Mutex<u32>);

    impl SharedQuotas for Late {
        fn take(&self, _: QuotaId, _: Rate) -> Option<oneshot::Receiver<Result<(), Duration>>> {
            let (sender, answer) = oneshot::channel();
            let mut left = self.0.lock().unwrap();
            let granted = if *left == 0 { Err(Duration::from_secs(1000)) } else { Ok(()) };
            *left = left.saturating_sub(1);
            tokio::spawn(async move {
                tokio::time::sleep(2 * WAIT).await;
                let _ = sender.send(granted);
            });
            Some(answer)
        }

        fn give_back(&self, _: QuotaId, _: Rate) {
            *self.1.lock().unwrap() += 1;
        }
    }

    /// Three gates before a slow Redis must not let three times as many through.
    #[tokio::test(start_paused = true)]
    async fn what_comes_late_counts_too() {
        let shared = Arc::new(Late(Mutex::new(3), Mutex::new(0)));
        let gates = [(); 3].map(|()| Arc::new(Quotas::new(Some(Arc::<Late>::clone(&shared)))));
        let mut granted = 0;
        for turn in 0..30 {
            if let Ok(QuotaGrant::Unconfirmed(permit)) = gates[turn % 3].take(id(1), &quota(3))
                && let Ok(permit) = permit.confirm().await
            {
                permit.spend();
                granted += 1;
            }
            tokio::time::sleep(2 * WAIT).await;
        }
        assert_eq!(granted, 6, "each gate learns from its first refusal");
        assert_eq!(*shared.1.lock().unwrap(), 0);
        // One that is not spent is given back, when it is known that it was taken.
        let (shared, quotas) = {
            let shared = Arc::new(Late(Mutex::new(1), Mutex::new(0)));
            (Arc::clone(&shared), Arc::new(Quotas::new(Some(shared))))
        };
        let Ok(QuotaGrant::Unconfirmed(permit)) = quotas.take(id(1), &quota(3)) else {
            panic!("others are to be asked")
        };
        drop(permit.confirm().await.unwrap());
        tokio::time::sleep(2 * WAIT).await;
        assert_eq!(*shared.1.lock().unwrap(), 1);
    }
}
