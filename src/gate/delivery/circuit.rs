//! Whether an upstream can be reached, as those see it who can wait for it: deliveries and messages. What could not reach it
//! says so for all routes and consumers that have it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::http::upstream::Settings;

/// The circuit opens when this many attempts in a row have not reached the upstream.
const OPENS_AFTER: u32 = 5;

/// How long the circuit stays open the first time. Then one attempt tries the upstream; each failure doubles the time.
const OPEN: Duration = Duration::from_secs(1);

/// The longest time that the circuit stays open, and for which one attempt alone tries the upstream.
const LONGEST_OPEN: Duration = Duration::from_secs(5);

/// Whether one upstream can be reached.
#[derive(Default)]
pub(in crate::gate) struct Circuit(Mutex<State>);

#[derive(Default)]
struct State {
    failures: u32,
    open_until: Option<Instant>,
    /// The attempt that tries whether the upstream can be reached again, and since when.
    trial: Option<(u64, Instant)>,
    /// How many trials there were.
    trials: u64,
}

/// How many attempts may begin.
pub(super) struct Allowance {
    pub(super) count: u32,
    /// What the one attempt holds until it ends that tries whether the upstream can be reached again.
    pub(super) trial: Option<HalfOpenPermit>,
}

/// While this is held, and for [`LONGEST_OPEN`] at most, no other attempt tries whether the upstream can be reached again.
pub(super) struct HalfOpenPermit {
    circuit: Arc<Circuit>,
    number: u64,
}

impl Circuit {
    /// How many may begin, of so many.
    pub(super) fn allow(self: &Arc<Self>, wanted: u32) -> Allowance {
        let (mut state, now) = (self.state(), Instant::now());
        let is_tried = state.trial.is_some_and(|(_, since)| now < since + LONGEST_OPEN);
        match state.open_until {
            None => Allowance { count: wanted, trial: None },
            Some(until) if now < until || is_tried || wanted == 0 => Allowance { count: 0, trial: None },
            Some(_) => {
                state.trials += 1;
                let number = state.trials;
                state.trial = Some((number, now));
                Allowance { count: 1, trial: Some(HalfOpenPermit { circuit: Arc::clone(self), number }) }
            }
        }
    }

    /// An attempt ended, and the upstream was reached or not.
    pub(super) fn ended(&self, is_reached: bool) {
        let (mut state, now) = (self.state(), Instant::now());
        if is_reached {
            (state.failures, state.open_until, state.trial) = (0, None, None);
            return;
        }
        if state.open_until.is_some_and(|until| now < until) {
            // One that began before it opened says nothing new.
            return;
        }
        state.failures = state.failures.saturating_add(1);
        if let Some(more) = state.failures.checked_sub(OPENS_AFTER) {
            let open = OPEN.saturating_mul(1_u32.checked_shl(more).unwrap_or(u32::MAX)).min(LONGEST_OPEN);
            state.open_until = Some(now + open);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HalfOpenPermit {
    fn drop(&mut self) {
        let mut state = self.circuit.state();
        if state.trial.is_some_and(|(number, _)| number == self.number) {
            state.trial = None;
        }
    }
}

/// The circuits, with how their upstreams are reached.
#[derive(Default)]
pub(in crate::gate) struct Circuits(Mutex<Vec<(Settings, Weak<Circuit>)>>);

impl Circuits {
    /// The circuit of an upstream. Those that are reached in the same way have one.
    pub(in crate::gate) fn of(&self, upstream: &Settings) -> Arc<Circuit> {
        let mut circuits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        circuits.retain(|(_, circuit)| circuit.strong_count() > 0);
        let known = circuits.iter().find(|(known, _)| is_reached_as(known, upstream));
        known.and_then(|(_, circuit)| circuit.upgrade()).unwrap_or_else(|| {
            let circuit = Arc::default();
            circuits.push((upstream.clone(), Arc::downgrade(&circuit)));
            circuit
        })
    }
}

fn is_reached_as(one: &Settings, other: &Settings) -> bool {
    let way = |of: &Settings| (of.places.clone(), of.tls.clone(), of.protocol, of.connect_timeout);
    way(one) == way(other)
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;
    use crate::gate::tests::upstream_settings;
    use crate::http::upstream::Protocol;

    #[tokio::test(start_paused = true)]
    async fn a_circuit_opens_and_one_at_a_time_tries_it() {
        let circuit = Arc::<Circuit>::default();
        let allowed = |wanted| circuit.allow(wanted).count;
        for _ in 1..OPENS_AFTER {
            circuit.ended(false);
            assert_eq!(allowed(8), 8);
        }
        circuit.ended(false);
        assert_eq!(allowed(8), 0);
        advance(OPEN).await;
        assert_eq!(allowed(0), 0);
        let trial = circuit.allow(8);
        assert_eq!((trial.count, allowed(7)), (1, 0), "one tries it already");
        circuit.ended(false);
        drop(trial);
        advance(OPEN).await;
        assert_eq!(allowed(8), 0);
        advance(OPEN).await;
        assert_eq!((allowed(8), allowed(8)), (1, 1), "a trial that is dropped lets another begin");
        circuit.ended(true);
        assert_eq!(allowed(8), 8);
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_that_fail_together_open_it_once() {
        let circuit = Arc::<Circuit>::default();
        (0..4 * OPENS_AFTER).for_each(|_| circuit.ended(false));
        advance(OPEN).await;
        assert_eq!(circuit.allow(8).count, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_trial_that_takes_long_keeps_others_waiting_for_a_while_only() {
        let circuit = Arc::<Circuit>::default();
        let fail = || (0..OPENS_AFTER).for_each(|_| circuit.ended(false));
        fail();
        advance(OPEN).await;
        let long = circuit.allow(1);
        assert_eq!((long.count, circuit.allow(1).count), (1, 0));
        // An attempt that began before the circuit opened has its answer, and then the upstream goes again.
        circuit.ended(true);
        fail();
        advance(OPEN).await;
        let next = circuit.allow(1);
        assert_eq!(next.count, 1);
        drop(long);
        assert_eq!(circuit.allow(1).count, 0, "the other one ends no trial but its own");
        advance(LONGEST_OPEN).await;
        assert_eq!(circuit.allow(1).count, 1);
    }

    #[test]
    fn upstreams_that_are_reached_in_the_same_way_have_one_circuit() {
        let circuits = Circuits::default();
        let settings = upstream_settings();
        let slower = Settings { timeout: Duration::from_secs(1), name: "slower".into(), ..settings.clone() };
        let elsewhere = Settings { protocol: Protocol::H2, ..settings.clone() };
        let [first, same, other] = [&settings, &slower, &elsewhere].map(|settings| circuits.of(settings));
        assert!(Arc::ptr_eq(&first, &same) && !Arc::ptr_eq(&first, &other));
        drop((first, same));
        drop(circuits.of(&elsewhere));
        assert_eq!(circuits.0.lock().unwrap().len(), 1, "what no upstream has any more is forgotten");
    }
}
