//! How often each thing worth simulating has happened, so that no change makes the simulation quietly empty.

mod deliveries;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use oncegate::idempotency::record::State;
use oncegate::store::unreliable::Operation;

use crate::history::{Entry, Event, Label, LifeNumber, Question, Request, Standing, Token, Told};
use crate::setup::{PROBE, RESEND};

/// What must happen, and how often at least in a thousand runs.
const EXPECTED: [(&str, u32); 99] = [
    ("answer: executed", 1000),
    ("answer: replayed", 1000),
    ("answer: released", 100),
    ("answer: unrecorded", 30),
    ("answer: unprotected", 30),
    ("answer: recovered", 50),
    ("answer: in-flight", 300),
    ("answer: outcome-unknown", 300),
    ("answer: response-not-stored", 100),
    ("answer: key-reused", 300),
    ("answer: store-unavailable", 300),
    ("answer: still-running", 30),
    ("answer: upstream-unreachable", 30),
    ("answer: upstream-broken", 100),
    ("answer: upstream-timeout", 30),
    ("answer: held, of the upstream", 30),
    ("replay by another gate than ran it", 100),
    ("replay of what a dead gate ran", 100),
    ("replay without asking the store", 100),
    ("takeover of an unknown record by policy", 30),
    ("takeover of an expired unknown record", 10),
    ("takeover of an expired completed record", 30),
    ("takeover past the lease by policy", 10),
    ("hold by its attempt", 100),
    ("lease ended by the reaper", 100),
    ("late completion of an unknown record", 10),
    ("attempt that came too late to settle", 10),
    ("claim asked again after it was done", 30),
    ("ending asked again after it was done", 30),
    ("claim of nobody released", 30),
    ("claim of nobody released past its lease", 10),
    ("lease renewed", 100),
    ("tombstone", 100),
    ("swept", 100),
    ("gate died with an attempt sent", 30),
    ("gate died with a claim not sent", 10),
    ("gate drained", 10),
    ("question of a retry", 100),
    ("question of nobody", 50),
    ("question answered: it ran", 100),
    ("question answered: it is not known", 30),
    ("question answered: nothing", 10),
    ("question given up", 20),
    ("question of a gate that died", 3),
    ("question refused, as another asks", 50),
    ("completed by what the upstream said", 80),
    ("completed by what the upstream said, for nobody", 20),
    ("tombstone of what the upstream said", 3),
    ("run again, as the upstream did not know it", 20),
    ("released, as the upstream did not know it", 20),
    ("key that the upstream knows", 100),
    ("sent again", 60),
    ("sent again twice", 20),
    ("upstream completed it itself", 40),
    ("upstream completed it itself, and its answer was lost", 4),
    ("dead gate's operation took effect", 30),
    ("run for a dead gate", 10),
    ("client left, and its attempt completed", 30),
    ("two gates asked for one key at once", 30),
    ("cache: memory", 100),
    ("cache: hit", 100),
    ("cache: in-flight", 50),
    ("cache: miss", 1000),
    ("cache: stale", 30),
    ("cache: invalid", 10),
    ("cache: away", 10),
    ("cache: late", 100),
    ("cache: failed", 10),
    ("purge of an attempt in flight", 10),
    ("purge of an unknown record", 30),
    ("purge of a completed record", 100),
    ("claim of what was purged", 100),
    ("replay of what is purged already", 5),
    ("run of what was purged in flight", 3),
    ("answer: accepted", 500),
    ("accepted, and its client never heard", 1),
    ("accepted while a delivery of its tenant waits", 50),
    ("delivery begun by another gate", 30),
    ("delivery taken again past its hold", 15),
    ("delivery of a gate that died", 10),
    ("delivery done", 90),
    ("delivery done by its record alone", 1),
    ("delivery done past the expiry of its record", 1),
    ("delivery put off", 7),
    ("delivery to be tried again", 15),
    ("delivery run again", 15),
    ("delivery given up after a release", 6),
    ("delivery given up as unknown", 20),
    ("dead delivery expired", 5),
    ("dead delivery queued again", 2),
    ("delivery discarded", 6),
    ("route paused with deliveries", 15),
    ("status: queued", 80),
    ("status: in-flight", 60),
    ("status: completed", 20),
    ("status: unknown", 10),
    ("status: dead", 7),
    ("status: no-route", 2),
    ("status: store-unavailable", 60),
];

#[derive(Default)]
pub struct Tally {
    runs: u32,
    counts: BTreeMap<&'static str, u32>,
}

/// What is known at one moment of a history.
#[derive(Default)]
struct Moment {
    dead: BTreeSet<LifeNumber>,
    left: BTreeSet<Request>,
    sent: BTreeMap<Request, (LifeNumber, Label)>,
    /// The attempts in flight, and whether they left their gate.
    running: BTreeMap<Token, bool>,
    /// How often each request left a gate.
    attempts: BTreeMap<Request, u32>,
    /// The questions that are open, and which gate's they are.
    questions: BTreeMap<Question, LifeNumber>,
    /// Those that no retry asked.
    of_nobody: BTreeSet<Question>,
    /// What the upstream completed itself.
    kept: BTreeSet<Token>,
    requests: BTreeMap<Token, Request>,
    runs: BTreeMap<u32, Token>,
    inserted: BTreeSet<Token>,
    settled: BTreeSet<Token>,
    /// What was purged last of each key, and which of these attempts were in flight.
    purged: BTreeMap<Label, Token>,
    purged_in_flight: BTreeSet<Token>,
    /// Of which keys a gate has asked the store since the last request for them.
    asked: BTreeSet<(LifeNumber, Label)>,
    deliveries: deliveries::Moment,
}

impl Tally {
    pub fn add(&mut self, history: &[Entry]) {
        self.runs += 1;
        let mut moment = Moment::default();
        for entry in history {
            self.count(&mut moment, entry);
        }
    }

    /// What happened too seldom.
    pub fn missing(&self) -> Vec<String> {
        let often = |what| self.counts.get(what).copied().unwrap_or_default();
        EXPECTED
            .iter()
            .map(|(what, least)| (what, u64::from(often(what)), u64::from(*least) * u64::from(self.runs) / 1000))
            .filter(|(_, often, least)| often < least)
            .map(|(what, often, least)| format!("{what}: {often} times in {} runs, and not {least}", self.runs))
            .collect()
    }

    fn hit(&mut self, what: &'static str) {
        debug_assert!(EXPECTED.iter().any(|(known, _)| *known == what), "{what} is not expected");
        *self.counts.entry(what).or_default() += 1;
    }

    fn count(&mut self, moment: &mut Moment, entry: &Entry) {
        self.count_delivery(&mut moment.deliveries, entry);
        match &entry.event {
            Event::Drained { .. } => self.hit("gate drained"),
            Event::Died { life } => {
                moment.dead.insert(*life);
                let own: Vec<bool> =
                    moment.running.iter().filter(|(token, _)| of(token) == *life).map(|it| *it.1).collect();
                for is_sent in own {
                    self.hit(if is_sent {
                        "gate died with an attempt sent"
                    } else {
                        "gate died with a claim not sent"
                    });
                }
                let before = moment.questions.len();
                moment.questions.retain(|_, own| own != life);
                (moment.questions.len()..before).for_each(|_| self.hit("question of a gate that died"));
            }
            Event::Sent { request, life, label, .. } => {
                let others = moment.sent.values().any(|(other, own)| own == label && other != life);
                if others {
                    self.hit("two gates asked for one key at once");
                }
                moment.sent.insert(*request, (*life, *label));
                moment.asked.remove(&(*life, *label));
            }
            Event::Answered { request, answer } => {
                let sent = moment.sent.remove(request);
                let asked = sent.is_some_and(|(life, label)| moment.asked.remove(&(life, label)));
                if answer.is_replay() && !asked {
                    self.hit("replay without asking the store");
                }
                self.answered(moment, sent.map(|(life, _)| life), answer);
            }
            Event::Left { request } => {
                moment.sent.remove(request);
                moment.left.insert(*request);
            }
            Event::Lost { request } | Event::Hung { request } => drop(moment.sent.remove(request)),
            Event::Asked { question, life, request, .. } => {
                self.hit(if request.is_some() { "question of a retry" } else { "question of nobody" });
                moment.questions.insert(*question, *life);
                if request.is_none() {
                    moment.of_nobody.insert(*question);
                }
            }
            Event::Said { question, answer } => {
                moment.questions.remove(question);
                self.hit(match answer.status {
                    200..300 => "question answered: it ran",
                    404 | 410 => "question answered: it is not known",
                    _ => "question answered: nothing",
                });
            }
            Event::Dropped { question } if moment.questions.remove(question).is_some() => self.hit("question given up"),
            Event::Honoured { .. } => self.hit("key that the upstream knows"),
            Event::Kept { token, .. } => {
                moment.kept.insert(*token);
                self.hit("upstream completed it itself");
            }
            Event::Broke { token: Some(token) } if moment.kept.contains(token) => {
                self.hit("upstream completed it itself, and its answer was lost");
            }
            Event::Wrote { token: Some(token), request, .. } => {
                let attempts = moment.attempts.entry(*request).or_default();
                *attempts += 1;
                match *attempts {
                    _ if moment.deliveries.is_accepted(*request) => {}
                    1 => {}
                    2 => self.hit("sent again"),
                    _ => self.hit("sent again twice"),
                }
                moment.requests.insert(*token, *request);
                moment.running.entry(*token).and_modify(|is_sent| *is_sent = true);
            }
            Event::Executed { serial, token: Some(token), .. } => {
                moment.runs.insert(*serial, *token);
                if moment.purged_in_flight.contains(token) {
                    self.hit("run of what was purged in flight");
                }
                if moment.dead.contains(&of(token)) {
                    self.hit("run for a dead gate");
                }
            }
            Event::Told { life, op, label, token, told } => {
                moment.asked.extend(label.map(|label| (*life, label)));
                self.told(moment, *op, *label, *token, *told);
            }
            Event::Recalled { answered, .. } => {
                if let Some((known, _)) =
                    EXPECTED.iter().find(|(known, _)| known.strip_prefix("cache: ") == Some(answered.as_str()))
                {
                    self.hit(known);
                }
            }
            Event::Changed { .. } => self.changed(moment, entry),
            _ => {}
        }
    }

    fn answered(&mut self, moment: &Moment, life: Option<LifeNumber>, answer: &crate::history::Answer) {
        match answer.word() {
            "outcome-unknown" if !answer.is_problem() => self.hit("answer: held, of the upstream"),
            word => {
                if let Some((known, _)) =
                    EXPECTED.iter().find(|(known, _)| known.strip_prefix("answer: ") == Some(word))
                {
                    self.hit(known);
                }
            }
        }
        let ran = answer.serial().and_then(|serial| moment.runs.get(&serial)).map(of);
        if answer.is_replay() && ran.is_some() {
            let token = answer.serial().and_then(|serial| moment.runs.get(&serial));
            if token.is_some_and(|token| moment.purged.values().any(|purged| purged == token)) {
                self.hit("replay of what is purged already");
            }
        }
        if answer.is_replay() && ran != life {
            self.hit("replay by another gate than ran it");
            if ran.is_some_and(|ran| moment.dead.contains(&ran)) {
                self.hit("replay of what a dead gate ran");
            }
        }
    }

    fn told(&mut self, moment: &mut Moment, op: Operation, label: Option<Label>, token: Option<Token>, told: Told) {
        let Some(token) = token else { return };
        if label.is_none() {
            // The right to ask.
            if let (Operation::Claim, Told::Exists(State::InFlight)) = (op, told) {
                self.hit("question refused, as another asks");
            }
            return;
        }
        match (op, told) {
            (Operation::Claim, Told::Inserted) if !moment.inserted.insert(token) => {
                self.hit("claim asked again after it was done");
            }
            (Operation::Settle, Told::Settled) if !moment.settled.insert(token) => {
                self.hit("ending asked again after it was done");
            }
            (Operation::Settle, Told::NotSettled) => self.hit("attempt that came too late to settle"),
            _ => {}
        }
    }

    fn changed(&mut self, moment: &mut Moment, entry: &Entry) {
        let Event::Changed { life, op, label, before, after, .. } = &entry.event else { return };
        if moment.dead.contains(life) {
            self.hit("dead gate's operation took effect");
        }
        self.purged(moment, entry);
        let past = before.as_ref().is_some_and(|before| before.is_past(entry.at));
        let states = (before.as_ref().map(|it| it.state), after.as_ref().map(|it| it.state));
        match (states, op) {
            _ if self.recovered(moment, label, before.as_ref(), after.as_ref(), past) => {}
            ((Some(State::Unknown), Some(State::InFlight)), _) if past => {
                self.hit("takeover of an expired unknown record");
            }
            ((Some(State::Unknown), Some(State::InFlight)), _) => self.hit("takeover of an unknown record by policy"),
            ((Some(State::Completed), Some(State::InFlight)), _) => {
                self.hit("takeover of an expired completed record");
            }
            ((Some(State::InFlight), Some(State::InFlight)), Operation::Renew) => self.hit("lease renewed"),
            ((Some(State::InFlight), Some(State::InFlight)), _) => self.hit("takeover past the lease by policy"),
            ((Some(State::InFlight), Some(State::Unknown)), Operation::Settle) => self.hit("hold by its attempt"),
            ((Some(State::InFlight), Some(State::Unknown)), _) => self.hit("lease ended by the reaper"),
            ((Some(State::Unknown), Some(State::Completed)), _) => self.hit("late completion of an unknown record"),
            ((_, None), Operation::Sweep) => self.hit("swept"),
            ((Some(_), None), Operation::Settle) => {
                let sent = before.as_ref().is_some_and(|before| moment.requests.contains_key(&before.token));
                if !sent {
                    self.hit("claim of nobody released");
                }
                if !sent && states.0 == Some(State::Unknown) {
                    self.hit("claim of nobody released past its lease");
                }
            }
            _ => {}
        }
        if let Some(before) = before {
            moment.running.remove(&before.token);
        }
        if let Some(after) = after
            && after.state == State::InFlight
        {
            moment.running.insert(after.token, moment.requests.contains_key(&after.token));
        }
        if let Some(after) = after
            && after.state == State::Completed
        {
            if after.decoded().is_some_and(|answer| answer.content.is_none()) {
                self.hit("tombstone");
            }
            if moment.requests.get(&after.token).is_some_and(|request| moment.left.contains(request)) {
                self.hit("client left, and its attempt completed");
            }
        }
    }
}

impl Tally {
    /// Whether a record changed by what the upstream said of it.
    fn recovered(
        &mut self,
        moment: &Moment,
        label: &Label,
        before: Option<&Standing>,
        after: Option<&Standing>,
        past: bool,
    ) -> bool {
        let is_sent = before.is_some_and(|before| moment.requests.contains_key(&before.token));
        let states = (before.map(|it| it.state), after.map(|it| it.state));
        let is_past = past && states.0 == Some(State::Unknown);
        match (states, after.and_then(Standing::question)) {
            (_, Some(question)) => {
                self.hit("completed by what the upstream said");
                if moment.of_nobody.contains(&question) {
                    self.hit("completed by what the upstream said, for nobody");
                }
                if after.and_then(Standing::decoded).is_some_and(|answer| answer.content.is_none()) {
                    self.hit("tombstone of what the upstream said");
                }
            }
            ((Some(State::Unknown | State::InFlight), Some(State::InFlight)), _)
                if label.route == PROBE && !is_past && before.map(|it| it.token) != after.map(|it| it.token) =>
            {
                self.hit("run again, as the upstream did not know it");
            }
            ((Some(State::Unknown), None), _) if label.route == PROBE && is_sent && !is_past => {
                self.hit("released, as the upstream did not know it");
            }
            ((Some(State::Unknown), Some(State::InFlight)), _) if label.route == RESEND && !is_past => {}
            _ => return false,
        }
        true
    }

    fn purged(&mut self, moment: &mut Moment, entry: &Entry) {
        match &entry.event {
            Event::Changed { op: Operation::Remove, label, before: Some(before), .. } => {
                self.hit(match before.state {
                    State::InFlight => "purge of an attempt in flight",
                    State::Unknown => "purge of an unknown record",
                    State::Completed => "purge of a completed record",
                });
                moment.purged.insert(*label, before.token);
                if before.state == State::InFlight {
                    moment.purged_in_flight.insert(before.token);
                }
            }
            Event::Changed { op: Operation::Claim, label, .. } if moment.purged.contains_key(label) => {
                moment.purged.remove(label);
                self.hit("claim of what was purged");
            }
            _ => {}
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, _) in EXPECTED {
            writeln!(f, "{:>9} {what}", self.counts.get(what).copied().unwrap_or_default())?;
        }
        Ok(())
    }
}

/// Whose attempt it is.
fn of(token: &Token) -> LifeNumber {
    token.life()
}
