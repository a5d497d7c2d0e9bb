//! What is played: the calls of one run, or of several at once, and what a store in memory says to each.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use oncegate::idempotency::record::{AttemptToken, RecordId, State, Timestamp};
use oncegate::store::memory::Memory;
use oncegate::store::{Filter, IdPrefix, LeaseRenewal};

use super::STORES;
use crate::dice::Dice;
use crate::history::EPOCH;
use crate::ledger::{Call, Line, Said};
use crate::seeds::asked_for;
use crate::setup::PATHS;
use crate::world::run_of_records;

/// How many runs make a crowd.
const CROWD: u64 = 16;

/// How often the clock of a crowd ticks, in milliseconds. Leases and ttls are multiples of it, so calls of a crowd often
/// come in the very millisecond in which something ends.
const TICK: u64 = 50;

/// How many calls there are for one look of the operator.
const CALLS_A_LOOK: u64 = 4;

/// What is played.
pub enum Script {
    /// The run of a seed.
    Alone(u64),
    /// The runs of these seeds at once.
    Crowd(Range<u64>),
}

/// The `nth` series of scripts: so many crowds, and then so many runs alone; or those that begin with the seed that is
/// asked for.
pub fn scripts(nth: u64, crowds: u64, runs: u64) -> Vec<Script> {
    let crowd = |seed| Script::Crowd(seed..seed + CROWD);
    if let Some(seed) = asked_for() {
        return vec![crowd(seed), Script::Alone(seed)];
    }
    let crowds = (0..crowds).map(|place| crowd((nth * crowds + place) * CROWD));
    crowds.chain((0..runs).map(|place| Script::Alone(nth * runs + place))).collect()
}

impl Script {
    pub fn lines(&self) -> Vec<Line> {
        match self {
            Self::Alone(seed) => alone(*seed),
            Self::Crowd(seeds) => crowd(seeds.clone()),
        }
    }

    /// Its first seed.
    pub fn first(&self) -> u64 {
        match self {
            Self::Alone(seed) | Self::Crowd(Range { start: seed, .. }) => *seed,
        }
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alone(seed) => write!(f, "seed {seed}"),
            Self::Crowd(Range { start, end }) => write!(f, "seeds {start} to {} at once", end - 1),
        }
    }
}

/// A call that is to be made.
struct Cue {
    at: u64,
    gate: usize,
    call: Call,
}

/// The run of a seed as it was. An operator looks at its records meanwhile, and removes them when it is over.
fn alone(seed: u64) -> Vec<Line> {
    let ledger = run_of_records(seed).ledger;
    for (was, is) in ledger.iter().zip(carried_out(ledger.iter().map(Cue::of))) {
        assert_eq!(was.said, is.said, "seed {seed}: the ledger lacks what changed the store before {was}");
    }
    let ledger =
        without_repetition(ledger, &mut Dice::of(seed), |said| matches!(said, Said::Counts(_) | Said::Changes(_)));
    let mut operator = Operator::of(seed, &ledger);
    let mut cues = Vec::new();
    for line in &ledger {
        cues.push(Cue::of(line));
        cues.extend(operator.looks(line.at));
    }
    cues.extend(operator.tidies_up(ledger.last().map_or(0, |line| line.at)));
    carried_out(cues)
}

/// The runs of several seeds at once, each with records and attempts of its own, on a clock that ticks coarsely. The
/// operator is at work all the time.
fn crowd(seeds: Range<u64>) -> Vec<Line> {
    let mut cues = Vec::new();
    let mut all = Vec::new();
    for seed in seeds.clone() {
        let ledger = run_of_records(seed).ledger;
        let mut ledger = without_repetition(ledger, &mut Dice::of(seed), |said| {
            matches!(said, Said::Counts(_) | Said::Changes(_) | Said::Count(0))
        });
        let nth = u8::try_from(seed - seeds.start).expect("a small crowd");
        for Line { at, gate, call, .. } in &mut ledger {
            call.move_to(nth);
            *gate = (*gate + usize::from(nth)) % STORES;
            *at = on_tick(*at, call);
        }
        let mut operator = Operator::of(seed, &ledger);
        for line in &ledger {
            cues.push(Cue::of(line));
            cues.extend(operator.looks(line.at));
            cues.extend(operator.interferes(line.at));
        }
        all.extend(ledger);
    }
    let end = all.iter().map(|line| line.at).max().unwrap_or_default();
    cues.extend(Operator::of(seeds.start, &all).tidies_up(end));
    carried_out(in_turns(cues))
}

/// A ledger with a quarter of the calls that come by the hundred and changed nothing.
fn without_repetition(mut ledger: Vec<Line>, dice: &mut Dice, changed_nothing: impl Fn(&Said) -> bool) -> Vec<Line> {
    // The first is the first start of a gate.
    let mut is_first = true;
    ledger.retain(|line| std::mem::take(&mut is_first) || !changed_nothing(&line.said) || dice.percent(25));
    ledger
}

/// When a call is made in a crowd. What is looked for by its time is looked for in the last millisecond before a tick:
/// in the next one it would be found.
fn on_tick(at: u64, call: &Call) -> u64 {
    let begin = at - at % TICK;
    if matches!(call, Call::ExpireLeases(_) | Call::Sweep(_)) && at.is_multiple_of(2) {
        begin + TICK - 1
    } else {
        begin
    }
}

/// Cues by their time. Those of one time come in such an order that many which are about different records are
/// neighbours; what is about one record stays as it was.
fn in_turns(mut cues: Vec<Cue>) -> Vec<Cue> {
    cues.sort_by_key(|cue| cue.at);
    let mut turns: BTreeMap<(u64, RecordId), usize> = BTreeMap::new();
    let mut placed: Vec<(u64, u8, usize, Cue)> = Vec::new();
    for cue in cues {
        let kind = match cue.call {
            Call::Adopt(..) => 1,
            Call::ExpireLeases(_) => 2,
            Call::Sweep(_) => 3,
            Call::Scan(..) | Call::Count => 4,
            _ => 0,
        };
        let ids = cue.call.ids().unwrap_or_default();
        let turn = ids.iter().filter_map(|id| turns.get(&(cue.at, *id))).max().map_or(0, |turn| turn + 1);
        turns.extend(ids.into_iter().map(|id| ((cue.at, id), turn)));
        placed.push((cue.at, kind, turn, cue));
    }
    placed.sort_by_key(|(at, kind, turn, _)| (*at, *kind, *turn));
    placed.into_iter().map(|(.., cue)| cue).collect()
}

/// What a store in memory says to each call.
fn carried_out(cues: impl IntoIterator<Item = Cue>) -> Vec<Line> {
    let (memory, time) = memory();
    let carried_out = cues.into_iter().map(|Cue { at, gate, call }| {
        time.store(EPOCH + at, Ordering::Relaxed);
        let said = call.say(&memory);
        assert!(!matches!(said, Said::Failed(_)), "{call}: {said}");
        Line { at, gate, call, said }
    });
    carried_out.collect()
}

/// A store in memory whose time is what is written beside it.
pub fn memory() -> (Memory, Arc<AtomicU64>) {
    let time = Arc::new(AtomicU64::new(EPOCH));
    let clock = Arc::clone(&time);
    (Memory::with_clock(Arc::new(move || Timestamp(clock.load(Ordering::Relaxed)))), time)
}

impl Cue {
    fn of(Line { at, gate, call, .. }: &Line) -> Self {
        Self { at: *at, gate: *gate, call: call.clone() }
    }
}

/// Who looks at records and removes them, through any gate.
struct Operator {
    dice: Dice,
    ids: Vec<RecordId>,
    /// The attempts of each record.
    attempts: BTreeMap<RecordId, Vec<AttemptToken>>,
    /// What the gates adopt.
    adoption: Option<Call>,
}

impl Operator {
    fn of(seed: u64, ledger: &[Line]) -> Self {
        let mut ids: Vec<_> = ledger.iter().flat_map(|line| line.call.ids().unwrap_or_default()).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut attempts: BTreeMap<RecordId, Vec<AttemptToken>> = BTreeMap::new();
        for line in ledger {
            if let Call::Claim(id, fresh) | Call::Supersede(id, _, fresh) = &line.call {
                attempts.entry(*id).or_default().push(fresh.attempt);
            }
        }
        attempts.values_mut().for_each(Vec::dedup);
        let adoption = ledger.iter().find(|line| matches!(line.call, Call::Adopt(..)));
        Self { dice: Dice::of(seed), ids, attempts, adoption: adoption.map(|line| line.call.clone()) }
    }

    fn asks(&mut self, at: u64, call: Call) -> Cue {
        Cue { at, gate: self.dice.within(0..STORES as u64) as usize, call }
    }

    /// Looks now and then.
    fn looks(&mut self, at: u64) -> Option<Cue> {
        if self.ids.is_empty() || self.dice.within(0..CALLS_A_LOOK) > 0 {
            return None;
        }
        let call = match self.dice.within(0..8) {
            0 => Call::Count,
            1..3 => Call::Get(self.dice.pick(&self.ids)),
            3..5 => Call::Scan(Filter::default(), None, 1000),
            _ => self.filtered(),
        };
        Some(self.asks(at, call))
    }

    fn filtered(&mut self) -> Call {
        let Self { dice, ids, .. } = self;
        let mut filter = Filter::default();
        match dice.within(0..6) {
            0 => filter.route = Some(dice.pick(&PATHS)[1..].to_owned()),
            1 => filter.service = Some(dice.pick(&["sim", "another"]).into()),
            2 => filter.prefix = dice.pick(ids).0.first_chunk().copied().map(IdPrefix::of_bytes),
            3 => filter.older_than = Some(Duration::from_millis(dice.within(0..5000) / TICK * TICK)),
            _ => filter.state = Some(dice.pick(&State::ALL)),
        }
        let after = dice.percent(30).then(|| dice.pick(ids));
        Call::Scan(filter, after, dice.within(1..4) as usize)
    }

    /// Removes a record now and then, or starts a gate whose rules differ.
    fn interferes(&mut self, at: u64) -> Option<Cue> {
        let call = match self.dice.within(0..200) {
            0..4 if !self.attempts.is_empty() => {
                let of = self.dice.within(0..self.attempts.len() as u64) as usize;
                let (id, attempts) = self.attempts.iter().nth(of).expect("there are so many");
                Call::Remove(*id, self.dice.pick(attempts))
            }
            4 => self.adopts_other_rules(false)?,
            5 if self.dice.percent(20) => self.adopts_other_rules(true)?,
            _ => return None,
        };
        Some(self.asks(at, call))
    }

    fn adopts_other_rules(&mut self, accept_change: bool) -> Option<Call> {
        let Some(Call::Adopt(origins, mut rules, _)) = self.adoption.clone() else { return None };
        let nth = self.dice.within(0..rules.len() as u64) as usize;
        if self.dice.percent(50) {
            rules[nth].digest[0] ^= 1
        } else {
            drop(rules.remove(nth))
        }
        Some(Call::Adopt(origins, rules, accept_change))
    }

    /// Removes everything, and tries to adopt other rules before and after.
    fn tidies_up(&mut self, at: u64) -> Vec<Cue> {
        let mut calls = Vec::from_iter(self.adopts_other_rules(false));
        for (id, attempts) in &self.attempts {
            // Each twice.
            calls.extend(attempts.iter().chain(attempts).map(|attempt| Call::Remove(*id, *attempt)));
            calls.push(Call::Get(*id));
        }
        calls.push(Call::Count);
        calls.push(Call::Scan(Filter::default(), None, 1000));
        calls.extend(self.adopts_other_rules(false));
        calls.extend(self.adopts_other_rules(true));
        calls.into_iter().map(|call| self.asks(at, call)).collect()
    }
}

impl Call {
    /// What a store in memory says to it.
    pub fn say(&self, memory: &Memory) -> Said {
        self.ask(memory).now_or_never().expect("a store in memory never waits")
    }

    /// Gives it another record and another attempt than the same call of another run of a crowd has.
    fn move_to(&mut self, nth: u8) {
        // Not in the first bytes, which say what key it is, nor in the last, which say what the attempt's number is.
        let id = |id: &mut RecordId| id.0[31] ^= nth;
        let attempt = |attempt: &mut AttemptToken| attempt.0[0] ^= nth;
        match self {
            Self::Claim(of, fresh) => {
                id(of);
                attempt(&mut fresh.attempt);
            }
            Self::Supersede(of, seen, fresh) => {
                id(of);
                attempt(&mut seen.attempt);
                attempt(&mut fresh.attempt);
            }
            Self::Settle(of, by, _) | Self::Remove(of, by) => {
                id(of);
                attempt(by);
            }
            Self::Renew(held) => {
                for LeaseRenewal { id: of, attempt: by, .. } in held {
                    id(of);
                    attempt(by);
                }
            }
            Self::Get(of) => id(of),
            Self::Scan(_, after, _) => after.iter_mut().for_each(id),
            Self::ExpireLeases(_) | Self::Sweep(_) | Self::Count | Self::Adopt(..) => {}
        }
    }
}
