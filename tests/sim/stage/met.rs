//! What was met in what was played, so that no change makes it quietly empty.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use oncegate::idempotency::record::{RecordId, State};
use oncegate::store::Settlement;

use super::together;
use crate::ledger::{Call, Line, Said};

/// What must be met, and how often at least where a usual number of runs is played.
const EXPECTED: [(&str, u32); 39] = [
    ("claim of a free key", 400),
    ("claim asked again after it was done", 30),
    ("claim finds a live lease", 200),
    ("claim finds a lease that is past", 10),
    ("claim finds a lease at the millisecond of its end", 1),
    ("claim finds an answer", 500),
    ("claim finds an expired answer", 10),
    ("claim finds an unknown outcome", 400),
    ("claim finds what another gate claimed", 800),
    ("takeover", 40),
    ("takeover of what has changed meanwhile", 30),
    ("completion", 200),
    ("release", 80),
    ("hold", 50),
    ("ending that comes too late", 50),
    ("renewal", 400),
    ("renewal that comes too late", 100),
    ("renewal of several leases", 15),
    ("leases end", 60),
    ("no lease ends", 1000),
    ("swept", 100),
    ("nothing to sweep", 1000),
    ("look at one record", 300),
    ("look at no record", 300),
    ("chunk of records", 500),
    ("chunk before others", 200),
    ("counts", 500),
    ("removed", 150),
    ("nothing to remove", 300),
    ("rules adopted", 200),
    ("rules refused", 20),
    ("claims at once", 250),
    ("claims of one record at once", 100),
    ("endings at once", 20),
    ("renewals at once", 40),
    ("reapers at once", 40),
    ("sweepers at once", 25),
    ("claim in the statement of another", 250),
    ("ending in the statement of another", 15),
];

#[derive(Default)]
pub struct Met {
    counts: BTreeMap<&'static str, u32>,
    /// How many claims and endings were asked for.
    claims: u32,
    endings: u32,
    /// It is known how many statements carried them.
    is_carried: bool,
}

impl Met {
    /// Adds a script that was played.
    pub fn add(&mut self, script: &[Line]) {
        // Which gate claimed what stands.
        let mut claimed = BTreeMap::new();
        for line in script {
            self.line(line, &mut claimed);
        }
        let mut at = 0;
        while at < script.len() {
            let group = &script[at..at + together(&script[at..])];
            self.group(group);
            at += group.len();
        }
    }

    /// Adds how many statements carried the claims and the endings.
    pub fn carry(&mut self, [claims, endings]: [u32; 2]) {
        self.is_carried = true;
        self.counts.insert("claim in the statement of another", self.claims.saturating_sub(claims));
        self.counts.insert("ending in the statement of another", self.endings.saturating_sub(endings));
    }

    /// What was met too seldom.
    pub fn missing(&self) -> Vec<String> {
        let often = |what| self.counts.get(what).copied().unwrap_or_default();
        let counted =
            EXPECTED.iter().filter(|(what, _)| self.is_carried || !what.ends_with("in the statement of another"));
        let missing = counted.filter(|(what, least)| often(what) < *least);
        missing.map(|(what, least)| format!("{what}: {} times, and not {least}", often(what))).collect()
    }

    fn hit(&mut self, what: &'static str) {
        debug_assert!(EXPECTED.iter().any(|(known, _)| *known == what), "{what} is not expected");
        *self.counts.entry(what).or_default() += 1;
    }

    fn line(&mut self, line: &Line, claimed: &mut BTreeMap<RecordId, usize>) {
        match (&line.call, &line.said) {
            (Call::Claim(id, _), said) => {
                self.claims += 1;
                self.claim(line, claimed.get(id).is_some_and(|gate| *gate != line.gate), said);
                if let Said::Inserted(_) = said {
                    claimed.insert(*id, line.gate);
                }
            }
            (Call::Supersede(id, ..), Said::Superseded(true)) => {
                claimed.insert(*id, line.gate);
                self.hit("takeover");
            }
            (Call::Supersede(..), _) => self.hit("takeover of what has changed meanwhile"),
            (Call::Settle(_, _, end), said) => {
                self.endings += 1;
                self.hit(match (end, said) {
                    (Settlement::Complete { .. }, Said::Done(_)) => "completion",
                    (Settlement::Release, Said::Done(_)) => "release",
                    (Settlement::Hold { .. }, Said::Done(_)) => "hold",
                    _ => "ending that comes too late",
                });
            }
            (Call::Renew(held), said) => {
                let all = matches!(said, Said::Renewed(ids) if ids.len() == held.len());
                self.hit(if all { "renewal" } else { "renewal that comes too late" });
                if held.len() > 1 {
                    self.hit("renewal of several leases");
                }
            }
            (Call::ExpireLeases(_), Said::Count(0)) => self.hit("no lease ends"),
            (Call::ExpireLeases(_), _) => self.hit("leases end"),
            (Call::Sweep(_), Said::Count(0)) => self.hit("nothing to sweep"),
            (Call::Sweep(_), _) => self.hit("swept"),
            (Call::Get(_), Said::Found(Some(_))) => self.hit("look at one record"),
            (Call::Get(_), _) => self.hit("look at no record"),
            (Call::Scan(..), Said::Chunk(_, Some(_))) => self.hit("chunk before others"),
            (Call::Scan(..), _) => self.hit("chunk of records"),
            (Call::Count, _) => self.hit("counts"),
            (Call::Remove(..), Said::Removed(true)) => self.hit("removed"),
            (Call::Remove(..), _) => self.hit("nothing to remove"),
            (Call::Adopt(..), Said::Changes(changes)) if changes.is_empty() => self.hit("rules adopted"),
            (Call::Adopt(..), _) => self.hit("rules refused"),
        }
    }

    fn claim(&mut self, line: &Line, is_anothers: bool, said: &Said) {
        match said {
            Said::Exists(record, now) => {
                self.hit(match record.state {
                    State::InFlight if record.until == *now => "claim finds a lease at the millisecond of its end",
                    State::InFlight if record.until < *now => "claim finds a lease that is past",
                    State::InFlight => "claim finds a live lease",
                    State::Completed if record.until <= *now => "claim finds an expired answer",
                    State::Completed => "claim finds an answer",
                    State::Unknown => "claim finds an unknown outcome",
                });
                if is_anothers {
                    self.hit("claim finds what another gate claimed");
                }
            }
            Said::Inserted(at) if at.0 < crate::history::EPOCH + line.at => {
                self.hit("claim asked again after it was done");
            }
            _ => self.hit("claim of a free key"),
        }
    }

    fn group(&mut self, group: &[Line]) {
        let several = |is: fn(&Call) -> bool| group.iter().filter(|line| is(&line.call)).count() > 1;
        for (what, is) in [
            ("claims at once", several(|call| matches!(call, Call::Claim(..)))),
            ("claims of one record at once", {
                let mut ids = BTreeSet::new();
                group.iter().any(|line| matches!(line.call, Call::Claim(id, _) if !ids.insert(id)))
            }),
            ("endings at once", several(|call| matches!(call, Call::Settle(..)))),
            ("renewals at once", several(|call| matches!(call, Call::Renew(_)))),
            ("reapers at once", several(|call| matches!(call, Call::ExpireLeases(_)))),
            ("sweepers at once", several(|call| matches!(call, Call::Sweep(_)))),
        ] {
            if is {
                self.hit(what);
            }
        }
    }
}

impl fmt::Display for Met {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, _) in EXPECTED {
            writeln!(f, "{:>9} {what}", self.counts.get(what).copied().unwrap_or_default())?;
        }
        Ok(())
    }
}
