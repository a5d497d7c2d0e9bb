//! Every order of events, tried: two gates, their clients, an operator and one key.
//!
//! A breadth-first search over all states that machines, gates and store can reach while a few things go wrong: a gate is
//! killed, a store call fails with or without its effect or happens late, time passes, a lease runs out, the record is purged,
//! the upstream completes the record itself, the configuration changes, no place is left to wait. [`World`] asserts the promise
//! at each step.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use rustc_hash::FxHashSet;

use self::world::World;
use super::mutants::Mutant;
use super::*;

mod world;

pub(super) use self::world::Operation;

/// What the configuration says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Rules {
    /// A retry of an unknown outcome runs again.
    retries: bool,
    /// A request whose outcome is unknown is sent again, to an upstream that honours its key.
    resends: bool,
    /// A retry of an unknown outcome asks the upstream.
    probes: bool,
    /// The last of the requests may not run.
    bars_last: bool,
    /// A record of the key stands under another id, which whoever has claimed finds.
    stands_elsewhere: bool,
}

/// Visits every state, and returns how many there are.
fn search(first: World) -> usize {
    let first = Rc::new(first);
    // Hashing is most of the work: with the default hasher, a search takes twice as long.
    let mut seen = FxHashSet::from_iter([Rc::clone(&first)]);
    let mut queue = VecDeque::from([first]);
    while let Some(world) = queue.pop_front() {
        world.check();
        for next in world.next().into_iter().map(Rc::new) {
            if seen.insert(Rc::clone(&next)) {
                queue.push_back(next);
            }
        }
    }
    seen.len()
}

const HOLDS: Rules = Rules { retries: false, probes: false, resends: false, bars_last: false, stands_elsewhere: false };

const RETRIES: Rules = Rules { retries: true, ..HOLDS };
const ELSEWHERE: Rules = Rules { stands_elsewhere: true, ..RETRIES };
const BARS: Rules = Rules { bars_last: true, ..RETRIES };
const PROBES: Rules = Rules { probes: true, ..HOLDS };
const PROBES_AND_BARS: Rules = Rules { bars_last: true, ..PROBES };
const RESENDS: Rules = Rules { resends: true, ..HOLDS };

#[test]
fn every_reachable_state_keeps_the_promise() {
    // Tests of real time run meanwhile.
    #[cfg(target_os = "linux")]
    rustix::process::nice(10).unwrap();
    let limits = |patience| ProtocolLimits {
        claim_by: Duration::from_secs(5),
        settle_timeout: Duration::from_secs(5),
        lease: Duration::from_secs(30),
        patience: Duration::from_millis(patience),
        attempts: 1,
        backoff: Duration::from_secs(1),
    };
    let mut states = 0;
    let waits = [HOLDS, RETRIES, BARS, ELSEWHERE, RESENDS].map(|rules| (rules, 100));
    let at_once = [HOLDS, RETRIES, BARS, ELSEWHERE, PROBES, PROBES_AND_BARS, RESENDS].map(|rules| (rules, 0));
    for (rules, patience) in at_once.into_iter().chain(waits) {
        for gates in [[0, 1], [0, 0]] {
            states += search(World::new(&gates, limits(patience), 2, rules, Mutant::None));
        }
    }
    // These are many more states.
    for gates in [[0, 1], [0, 0]] {
        states += search(World::new(&gates, limits(100), 1, PROBES, Mutant::None));
    }
    // What goes wrong for one request alone may go wrong more often.
    for rules in [HOLDS, RETRIES, BARS, PROBES, RESENDS] {
        states += search(World::new(&[0], limits(0), 4, rules, Mutant::None));
    }
    println!("{states} states");
    assert!(states > 10_000, "{states} states");
}

#[test]
fn each_mutant_is_found() {
    let limits = ProtocolLimits {
        claim_by: Duration::from_secs(5),
        settle_timeout: Duration::from_secs(5),
        lease: Duration::from_secs(30),
        patience: Duration::from_millis(100),
        attempts: 1,
        backoff: Duration::from_secs(1),
    };
    for mutant in Mutant::ALL {
        let rules = match mutant {
            Mutant::ProbesTooEarly | Mutant::BelievesUnclear | Mutant::ProbesBesideAnother => vec![PROBES],
            Mutant::RunsTheBarred => vec![BARS],
            Mutant::RunsBesideAnother => vec![ELSEWHERE],
            Mutant::ResendsTheSettled => vec![RESENDS],
            _ => vec![HOLDS, RETRIES],
        };
        let is_found = rules.into_iter().any(|rules| {
            let world = || World::new(&[0, 1], limits, 2, rules, mutant);
            std::panic::catch_unwind(|| search(world())).is_err()
        });
        assert!(is_found, "no state shows what {mutant:?} does");
    }
}
