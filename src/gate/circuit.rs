//! Whether an upstream can be reached, as those see it who can wait for it.

use std::time::Duration;

use tokio::time::Instant;

/// The circuit opens when this many attempts in a row have not reached the upstream.
const OPENS_AFTER: u32 = 5;

/// How long the circuit stays open the first time. Then one attempt tries the upstream; each failure doubles the time.
const OPEN: Duration = Duration::from_secs(1);

/// The longest time that the circuit stays open.
const LONGEST_OPEN: Duration = Duration::from_secs(5);

/// Whether an upstream can be reached.
#[derive(Default)]
pub struct Circuit {
    failures: u32,
    open_until: Option<Instant>,
}

impl Circuit {
    /// How many may begin, of those that are free.
    #[must_use]
    pub fn allows(&self, free: u32, running: u32, now: Instant) -> u32 {
        match self.open_until {
            None => free,
            Some(until) if now < until || running > 0 => 0,
            Some(_) => free.min(1),
        }
    }

    /// An attempt ended, and the upstream was reached or not.
    pub fn ended(&mut self, is_reached: bool, now: Instant) {
        if is_reached {
            *self = Self::default();
            return;
        }
        self.failures = self.failures.saturating_add(1);
        if let Some(more) = self.failures.checked_sub(OPENS_AFTER) {
            let open = OPEN.saturating_mul(1_u32.checked_shl(more).unwrap_or(u32::MAX)).min(LONGEST_OPEN);
            self.open_until = Some(now + open);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_circuit_opens_and_one_at_a_time_tries_it() {
        let (mut circuit, now) = (Circuit::default(), Instant::now());
        for _ in 1..OPENS_AFTER {
            circuit.ended(false, now);
            assert_eq!(circuit.allows(8, 3, now), 8);
        }
        circuit.ended(false, now);
        assert_eq!(circuit.allows(8, 0, now), 0);
        assert_eq!(circuit.allows(8, 0, now + OPEN), 1);
        assert_eq!(circuit.allows(7, 1, now + OPEN), 0, "one tries it already");
        circuit.ended(false, now + OPEN);
        assert_eq!(circuit.allows(8, 0, now + 2 * OPEN), 0);
        assert_eq!(circuit.allows(8, 0, now + 3 * OPEN), 1);
        circuit.ended(true, now);
        assert_eq!(circuit.allows(8, 5, now), 8);
    }
}
