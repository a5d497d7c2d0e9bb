//! Histories of runs, played again on other stores: they must say what the store of the run said.
//!
//! A run is over before its calls are played: no real server lives by a paused clock. The database's clock stands, and is
//! stepped to the time of each call. Calls of one instant whose order makes no difference are made at once, so that they
//! share statements. Each gate's calls go to a store of their own, on the one database.

mod met;
mod mistake;
mod mistakes;
mod postgres;
mod redis;
mod script;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::join_all;
use oncegate::idempotency::record::{AttemptToken, RecordId};
use oncegate::store::Store;

use crate::history::EPOCH;
use crate::ledger::{Call, Line, Said};

/// How many stores a script is played on: as many as there are gates at most.
const STORES: usize = 3;

/// How many calls a store carries out at once, beside those that share statements: it has that many connections for them. A call that waits
/// for one longer than two seconds fails.
const CONNECTIONS: usize = 3;

/// How many lines a difference tells.
const TOLD: usize = 16;

/// Stores on the same records, and their clock.
struct Stage {
    stores: Vec<Arc<dyn Store>>,
    clock: Arc<Clock>,
}

/// A clock that stands until it is set. In milliseconds since the run began.
struct Clock {
    at: AtomicU64,
    set: Box<dyn Fn(u64) + Send + Sync>,
}

/// A store said something else than the one in memory.
struct Difference {
    /// What it is about and what was said before, and then what should have been.
    lines: Vec<String>,
    said: String,
}

impl Stage {
    /// Plays a script until a store says something else.
    async fn play(&self, script: &[Line]) -> Result<(), Difference> {
        let mut played = 0;
        while played < script.len() {
            let group = &script[played..played + together(&script[played..])];
            self.clock.set(group[0].at);
            let said = join_all(group.iter().map(|line| line.call.ask(&*self.stores[line.gate]))).await;
            if let Some((wrong, said)) = difference(group, said) {
                return Err(Difference::at(&script[..=played + wrong], &said));
            }
            played += group.len();
        }
        Ok(())
    }
}

impl Clock {
    fn new(set: impl Fn(u64) + Send + Sync + 'static) -> Self {
        Self { at: AtomicU64::new(u64::MAX), set: Box::new(set) }
    }

    fn set(&self, at: u64) {
        if self.at.swap(at, Ordering::Relaxed) != at {
            (self.set)(at);
        }
    }

    fn shift(&self, millis: i64) {
        self.set(self.at.load(Ordering::Relaxed).saturating_add_signed(millis));
    }
}

/// How many of the first lines can be played at once, since it makes no difference which of them comes first.
fn together(lines: &[Line]) -> usize {
    let first = &lines[0];
    // Which records they are about, and whether one of them changes it.
    let mut met: BTreeMap<RecordId, bool> = BTreeMap::new();
    let mut meets = |line: &Line| {
        let Some(ids) = line.call.ids() else { return false };
        let is_change = line.is_change();
        let is_free = ids.iter().all(|id| met.get(id).is_none_or(|is_changed| !is_changed && !is_change));
        met.extend(ids.into_iter().map(|id| (id, is_change)));
        is_free
    };
    let mut busy = [0; STORES];
    let mut has_connection = |line: &Line| {
        let busy = &mut busy[line.gate];
        *busy += usize::from(!line.call.shares_statements());
        *busy <= CONNECTIONS
    };
    meets(first);
    has_connection(first);
    let joins = |line: &&Line| {
        line.at == first.at
            && has_connection(line)
            && match (&first.call, &line.call) {
                // Who finds what does depend on it, but not how much they find together.
                (Call::ExpireLeases(_), Call::ExpireLeases(_)) | (Call::Sweep(_), Call::Sweep(_)) => true,
                (Call::ExpireLeases(_) | Call::Sweep(_) | Call::Adopt(..), _) => false,
                (Call::Scan(..) | Call::Count, call) => matches!(call, Call::Scan(..) | Call::Count | Call::Get(_)),
                _ => meets(line),
            }
    };
    1 + lines[1..].iter().take_while(joins).count()
}

/// The first of a group that was told something else, and what.
fn difference(group: &[Line], said: Vec<Said>) -> Option<(usize, Said)> {
    if matches!(group[0].call, Call::ExpireLeases(_) | Call::Sweep(_)) {
        let expected: Option<usize> = group.iter().map(|line| line.said.count()).sum();
        if said.iter().map(Said::count).sum::<Option<usize>>() == expected {
            return None;
        }
    }
    said.into_iter().enumerate().find(|(nth, said)| *said != group[*nth].said)
}

impl Call {
    /// Whether those of one moment share a statement.
    fn shares_statements(&self) -> bool {
        matches!(self, Self::Claim(..) | Self::Supersede(..) | Self::Settle(..) | Self::Renew(_))
    }
}

impl Line {
    /// Whether it may have changed the record that it is about.
    fn is_change(&self) -> bool {
        match &self.said {
            Said::Inserted(at) => at.0 == EPOCH + self.at,
            Said::Superseded(is_done) | Said::Removed(is_done) => *is_done,
            Said::Renewed(ids) => !ids.is_empty(),
            Said::Exists(..) | Said::Fenced(_) | Said::Found(_) => false,
            _ => true,
        }
    }
}

impl Said {
    fn count(&self) -> Option<usize> {
        if let Self::Count(count) = self { Some(*count) } else { None }
    }
}

impl Difference {
    /// Where the last line was told `said`.
    fn at(played: &[Line], said: &Said) -> Self {
        let (last, before) = played.split_last().expect("a line that was played");
        let about = last.call.ids();
        let concerns = |line: &&Line| match (&about, line.call.ids()) {
            (Some(about), Some(ids)) => ids.iter().any(|id| about.contains(id)),
            (Some(_), None) => matches!(line.said, Said::Count(1..)),
            (None, _) => !matches!(line.call, Call::Get(_) | Call::Scan(..) | Call::Count),
        };
        let mut lines: Vec<_> = before.iter().rev().filter(concerns).take(TOLD).map(Line::to_string).collect();
        lines.reverse();
        lines.push(last.to_string());
        Self { lines, said: said.to_string() }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        writeln!(f, "and it said: {}", self.said)
    }
}

#[test]
fn removals_wait_for_no_connection() {
    // Attempts that the record is not of: the order makes no difference.
    let removals = |gate, times| {
        let call = Call::Remove(RecordId([0; 32]), AttemptToken([0; 16]));
        vec![Line { at: 0, gate, call, said: Said::Removed(false) }; times]
    };
    let lines = [removals(0, CONNECTIONS), removals(1, CONNECTIONS)].concat();
    assert_eq!(together(&lines), 2 * CONNECTIONS);
    assert_eq!(together(&removals(0, 500)), CONNECTIONS);
}

#[test]
fn what_is_played_at_once_does_not_depend_on_the_order() {
    let mut several = 0;
    for script in script::scripts(0, 4, 20) {
        let (memory, time) = script::memory();
        let lines = script.lines();
        let mut played = 0;
        while played < lines.len() {
            let group = &lines[played..played + together(&lines[played..])];
            time.store(EPOCH + group[0].at, Ordering::Relaxed);
            // The last one first.
            let mut said: Vec<_> = group.iter().rev().map(|line| line.call.say(&memory)).collect();
            said.reverse();
            if let Some((wrong, said)) = difference(group, said) {
                panic!("{script}:\n{}", Difference::at(&lines[..=played + wrong], &said));
            }
            played += group.len();
            several += usize::from(group.len() > 1);
        }
    }
    assert!(several > 500, "only {several} groups hold more than one call");
}
