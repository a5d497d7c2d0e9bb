//! The gate as it is, under every seed.
//!
//! `ONCEGATE_SIM_SEEDS=N` plays the seeds from 0 to N - 1 instead of the first 2,000; `ONCEGATE_SIM_SEED=S` plays one,
//! and tells all of its history.

use std::time::Instant;

use crate::check::check;
use crate::report::{command, report, whole};
use crate::tally::Tally;
use crate::world::run;

/// How many seeds a usual run plays.
pub const USUAL: u64 = 2_000;

/// With fewer runs than this, it is chance what happens in them.
const MANY: u64 = 500;

#[test]
fn even_seeds_hold() {
    hold("seeds::even_seeds_hold", 0);
}

#[test]
fn odd_seeds_hold() {
    hold("seeds::odd_seeds_hold", 1);
}

#[test]
fn the_same_seed_gives_the_same_history_and_another_gives_another() {
    give_way();
    let mut last = None;
    for seed in 0..200 {
        let (one, other) = (run(seed, None).history, run(seed, None).history);
        if let Some(at) = (0..one.len().max(other.len())).find(|at| one.get(*at) != other.get(*at)) {
            panic!("seed {seed} went two ways, from entry {at} on: {:?} and {:?}", one.get(at), other.get(at));
        }
        assert_ne!(Some(&one), last.as_ref(), "seeds {} and {seed} are one", seed - 1);
        last = Some(one);
    }
}

/// Leaves the processors to the tests of real time that run meanwhile: here, none passes. Not for runs that are played to a real
/// store, whose client waits for so long only.
fn give_way() {
    #[cfg(target_os = "linux")]
    rustix::process::nice(10).unwrap();
}

/// Plays every second seed, from `first` on; or the one that is asked for, if it is among them.
fn hold(test: &str, first: u64) {
    give_way();
    if let Some(seed) = asked_for() {
        if seed % 2 == first {
            let run = run(seed, None);
            let violations = check(&run.setup, &run.history);
            println!("{}", whole(&run, &violations));
            assert!(violations.is_empty(), "{}", report(seed, test, &run, &violations));
        }
        return;
    }
    let seeds = number("ONCEGATE_SIM_SEEDS").unwrap_or(USUAL);
    let (began, mut tally, mut played) = (Instant::now(), Tally::default(), 0);
    for seed in (first..seeds).step_by(2) {
        // A panic in the middle of a run tells which.
        let guard = Guard { seed, test };
        let run = run(seed, None);
        drop(guard);
        let violations = check(&run.setup, &run.history);
        assert!(violations.is_empty(), "{}", report(seed, test, &run, &violations));
        tally.add(&run.history);
        played += 1;
    }
    println!("{played} seeds hold, in {:.1?}", began.elapsed());
    println!("{tally}");
    if played >= MANY {
        let missing = tally.missing();
        assert!(missing.is_empty(), "the simulation has become poor:\n{}", missing.join("\n"));
    }
}

/// The one seed to play.
pub fn asked_for() -> Option<u64> {
    number("ONCEGATE_SIM_SEED")
}

/// As many of `usual` as `ONCEGATE_SIM_SEEDS` says of all seeds; at least one.
pub fn share_of(usual: u64) -> u64 {
    number("ONCEGATE_SIM_SEEDS").map_or(usual, |seeds| (usual * seeds / USUAL).max(1))
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}, and not a number")))
}

struct Guard<'a> {
    seed: u64,
    test: &'a str,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("seed {} panicked: {}", self.seed, command(self.seed, self.test));
        }
    }
}
