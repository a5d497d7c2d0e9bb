//! Whether an upstream can be reached, as those see it who can wait for it: deliveries and messages. What could not reach it
//! says so for all routes and consumers that have it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::Instant;

/// The circuit opens when this many attempts in a row have not reached the upstream.
const OPENS_AFTER: u32 = 5;

/// How long the circuit stays open the first time. Then one attempt tries the upstream; each failure doubles the time.
const OPEN: Duration = Duration::from_secs(1);

/// The longest time that the circuit stays open.
const LONGEST_OPEN: Duration = Duration::from_secs(5);

/// Whether one upstream can be reached.
#[derive(Default)]
pub(super) struct Circuit(Mutex<State>);

#[derive(Default)]
struct State {
    failures: u32,
    open_until: Option<Instant>,
    /// One attempt tries whether the upstream can be reached again.
    is_tried: bool,
}

/// How many attempts may begin.
pub(super) struct Permit {
    pub(super) count: u32,
    /// What the one attempt holds until it ends that tries whether the upstream can be reached again.
    pub(super) trial: Option<Trial>,
}

/// While this is held, no other attempt tries whether the upstream can be reached again.
pub(super) struct Trial(Arc<Circuit>);

impl Circuit {
    /// How many may begin, of so many.
    pub(super) fn permit(self: &Arc<Self>, wanted: u32) -> Permit {
        let mut state = self.state();
        match state.open_until {
            None => Permit { count: wanted, trial: None },
            Some(until) if Instant::now() < until || state.is_tried || wanted == 0 => Permit { count: 0, trial: None },
            Some(_) => {
                state.is_tried = true;
                Permit { count: 1, trial: Some(Trial(Arc::clone(self))) }
            }
        }
    }

    /// An attempt ended, and the upstream was reached or not.
    pub(super) fn ended(&self, is_reached: bool) {
        let mut state = self.state();
        if is_reached {
            (state.failures, state.open_until) = (0, None);
            return;
        }
        state.failures = state.failures.saturating_add(1);
        if let Some(more) = state.failures.checked_sub(OPENS_AFTER) {
            let open = OPEN.saturating_mul(1_u32.checked_shl(more).unwrap_or(u32::MAX)).min(LONGEST_OPEN);
            state.open_until = Some(Instant::now() + open);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        self.0.state().is_tried = false;
    }
}

/// The circuits, by the addresses of their upstreams.
#[derive(Default)]
pub(super) struct Circuits(Mutex<HashMap<String, Weak<Circuit>>>);

impl Circuits {
    /// The circuit of the upstream with these addresses.
    pub(super) fn of(&self, addresses: String) -> Arc<Circuit> {
        let mut circuits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        circuits.retain(|_, circuit| circuit.strong_count() > 0);
        let known = circuits.entry(addresses).or_default();
        known.upgrade().unwrap_or_else(|| {
            let circuit = Arc::default();
            *known = Arc::downgrade(&circuit);
            circuit
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_circuit_opens_and_one_at_a_time_tries_it() {
        let circuit = Arc::<Circuit>::default();
        let allowed = |wanted| circuit.permit(wanted).count;
        for _ in 1..OPENS_AFTER {
            circuit.ended(false);
            assert_eq!(allowed(8), 8);
        }
        circuit.ended(false);
        assert_eq!(allowed(8), 0);
        advance(OPEN).await;
        assert_eq!(allowed(0), 0);
        let trial = circuit.permit(8);
        assert_eq!((trial.count, allowed(7)), (1, 0), "one tries it already");
        circuit.ended(false);
        drop(trial);
        advance(OPEN).await;
        assert_eq!(allowed(8), 0);
        advance(OPEN).await;
        assert_eq!((allowed(8), allowed(8)), (1, 1), "what is not used is free again");
        circuit.ended(true);
        assert_eq!(allowed(8), 8);
    }

    #[test]
    fn upstreams_with_the_same_addresses_have_one_circuit() {
        let circuits = Circuits::default();
        let [first, same, other] = ["a:80", "a:80", "b:80"].map(|address| circuits.of(address.to_owned()));
        assert!(Arc::ptr_eq(&first, &same) && !Arc::ptr_eq(&first, &other));
        drop((first, same));
        drop(circuits.of("b:80".to_owned()));
        assert_eq!(circuits.0.lock().unwrap().len(), 1, "what no upstream has any more is forgotten");
    }
}
