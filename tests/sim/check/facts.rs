//! A history, sorted by what it is about.

use std::collections::BTreeMap;

use oncegate::idempotency::policy::StoreFailure;
use oncegate::idempotency::record::State;
use oncegate::idempotency::recovery::Recovery;
use oncegate::store::unreliable::Operation;

use super::endings::millis;
use super::{Invariant, Violation};
use crate::history::{
    Answer, Connection, Entry, Event, Label, LifeNumber, Poll, Question, Request, Standing, Token, Told, Waiting,
};
use crate::setup::Setup;

/// All places are indices of the history.
pub struct Facts<'a> {
    pub setup: &'a Setup,
    pub history: &'a [Entry],
    /// What stands for each key, from which place on.
    pub records: BTreeMap<Label, Vec<(usize, Option<&'a Standing>)>>,
    /// Where each attempt was claimed, on which key: more than once only where the first claim was released unsent.
    pub claims: BTreeMap<Token, Vec<(usize, Label)>>,
    /// Where a first byte of each attempt left a gate.
    pub writes: BTreeMap<Token, Vec<usize>>,
    /// On which connection each attempt left, at first.
    pub carriers: BTreeMap<Token, Connection>,
    /// Where the upstream closed each connection.
    pub closed: BTreeMap<Connection, usize>,
    /// The same as `writes` of each request.
    pub written: BTreeMap<Request, Vec<usize>>,
    /// Whose request each attempt was sent for.
    pub requests: BTreeMap<Token, Request>,
    /// By serial.
    pub runs: BTreeMap<u32, Run>,
    /// The answer of each serial. An upstream that honours keys gives it several times.
    pub given: BTreeMap<u32, &'a Answer>,
    /// What the upstream answered each attempt: once, but for a request that something on the way has sent twice.
    pub replies: BTreeMap<Token, Vec<Reply<'a>>>,
    /// Which attempts the upstream completed in the store itself: where, and with the answer of which serial.
    pub kept: BTreeMap<Token, (usize, u32)>,
    /// What was asked of the upstream's books.
    pub questions: BTreeMap<Question, Asked<'a>>,
    /// Who had the right to ask about each key, from which place on.
    pub locks: BTreeMap<Label, Vec<(usize, Option<&'a Standing>)>>,
    /// Where the upstream first broke off for an attempt.
    pub broke: BTreeMap<Token, usize>,
    /// Where the upstream connections of a gate were reset.
    pub cuts: Vec<(usize, LifeNumber)>,
    /// Where each gate was told to end, or died.
    pub ends: Vec<(usize, LifeNumber)>,
    /// What was purged for each key, and where.
    pub purged: BTreeMap<Label, Vec<(usize, &'a Standing)>>,
    pub sent: BTreeMap<Request, Sent>,
    /// Where a request ended, and with which answer.
    pub ended: BTreeMap<Request, (usize, Option<&'a Answer>)>,
    pub calm: Option<usize>,
    /// What waits for its delivery, of each key, from which place on.
    pub queue: BTreeMap<Label, Vec<(usize, Option<&'a Waiting>)>>,
    pub acceptances: BTreeMap<Request, Acceptance<'a>>,
    /// From where on accepted requests were held back, or went again.
    pub pauses: Vec<(usize, bool)>,
    pub polls: BTreeMap<Poll, Polled<'a>>,
}

/// An accepted request.
#[derive(Debug)]
pub struct Acceptance<'a> {
    pub index: usize,
    pub label: Label,
    /// What stood then.
    pub first: &'a Waiting,
    /// What became of it, where, and by what.
    pub changes: Vec<(usize, Operation, Option<&'a Waiting>)>,
}

/// A client's question for a status.
#[derive(Clone, Copy, Debug)]
pub struct Polled<'a> {
    pub index: usize,
    pub label: Label,
    pub answered: Option<(usize, &'a str)>,
}

impl<'a> Acceptance<'a> {
    /// What stands of it right after a place.
    pub fn standing(&self, index: usize) -> Option<&'a Waiting> {
        let changes = self.changes.iter().take_while(|(at, ..)| *at <= index);
        changes.last().map_or(Some(self.first).filter(|_| self.index <= index), |(.., standing)| *standing)
    }

    pub fn was_given_up(&self, index: usize) -> bool {
        let mut before = self.changes.iter().take_while(|(at, ..)| *at <= index);
        before.any(|(.., standing)| standing.is_some_and(|standing| standing.is_dead))
    }
}

/// A run of the upstream.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub index: usize,
    pub token: Option<Token>,
    pub request: Request,
    pub label: Label,
    pub variant: usize,
}

/// An answer of the upstream to an attempt.
#[derive(Clone, Copy, Debug)]
pub struct Reply<'a> {
    pub serial: u32,
    pub begun: usize,
    pub answer: &'a Answer,
    /// Where its last byte left the upstream.
    pub replied: Option<usize>,
}

/// A question to the upstream's books.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    pub index: usize,
    pub life: LifeNumber,
    pub label: Label,
    /// The retry on whose behalf it was asked, if one did.
    pub request: Option<Request>,
    /// The whole answer, and where it left the upstream.
    pub said: Option<(usize, &'a Answer)>,
    /// Where nobody waited for an answer any more.
    pub over: Option<usize>,
}

/// A request of a client.
#[derive(Clone, Copy, Debug)]
pub struct Sent {
    pub index: usize,
    pub life: LifeNumber,
    pub label: Label,
    pub variant: usize,
    pub is_probe: bool,
}

impl<'a> Facts<'a> {
    pub fn of(setup: &'a Setup, history: &'a [Entry]) -> Self {
        let mut facts = Self {
            setup,
            history,
            records: BTreeMap::new(),
            claims: BTreeMap::new(),
            writes: BTreeMap::new(),
            carriers: BTreeMap::new(),
            closed: BTreeMap::new(),
            written: BTreeMap::new(),
            requests: BTreeMap::new(),
            runs: BTreeMap::new(),
            given: BTreeMap::new(),
            replies: BTreeMap::new(),
            kept: BTreeMap::new(),
            questions: BTreeMap::new(),
            locks: BTreeMap::new(),
            broke: BTreeMap::new(),
            cuts: Vec::new(),
            ends: Vec::new(),
            purged: BTreeMap::new(),
            sent: BTreeMap::new(),
            ended: BTreeMap::new(),
            calm: None,
            queue: BTreeMap::new(),
            acceptances: BTreeMap::new(),
            pauses: Vec::new(),
            polls: BTreeMap::new(),
        };
        for (index, entry) in history.iter().enumerate() {
            facts.add(index, &entry.event);
        }
        facts
    }

    fn add(&mut self, index: usize, event: &'a Event) {
        match event {
            Event::Drained { life } | Event::Died { life } => {
                self.ends.push((index, *life));
                if let Event::Died { .. } = event {
                    let own = self.questions.values_mut().filter(|asked| asked.life == *life);
                    own.for_each(|asked| asked.over = asked.over.or(Some(index)));
                }
            }
            Event::Cut { life } => self.cuts.push((index, *life)),
            Event::Sent { request, life, label, variant, is_probe } => {
                let sent = Sent { index, life: *life, label: *label, variant: *variant, is_probe: *is_probe };
                self.sent.insert(*request, sent);
            }
            Event::Answered { request, answer } => drop(self.ended.insert(*request, (index, Some(answer)))),
            Event::Lost { request } | Event::Left { request } | Event::Hung { request } => {
                self.ended.insert(*request, (index, None));
            }
            Event::Changed { label, before, after, op, .. } => {
                if let (Operation::Remove, Some(before)) = (op, before) {
                    self.purged.entry(*label).or_default().push((index, before));
                }
                self.records.entry(*label).or_default().push((index, after.as_ref()));
                if let Some(after) = after
                    && before.as_ref().is_none_or(|before| before.token != after.token)
                {
                    self.claims.entry(after.token).or_default().push((index, *label));
                }
            }
            Event::Closed { connection } => drop(self.closed.insert(*connection, index)),
            Event::Wrote { token, request, connection, .. } => {
                if let Some(token) = token {
                    self.carriers.entry(*token).or_insert(*connection);
                    self.writes.entry(*token).or_default().push(index);
                    self.requests.entry(*token).or_insert(*request);
                }
                self.written.entry(*request).or_default().push(index);
            }
            Event::Executed { serial, token, request, label, variant } => {
                let run = Run { index, token: *token, request: *request, label: *label, variant: *variant };
                self.runs.insert(*serial, run);
            }
            Event::Replying { serial, token, answer } => {
                self.given.entry(*serial).or_insert(answer);
                if let Some(token) = token {
                    let reply = Reply { serial: *serial, begun: index, answer, replied: None };
                    self.replies.entry(*token).or_default().push(reply);
                }
            }
            Event::Replied { serial, token } => {
                let replies = token.and_then(|token| self.replies.get_mut(&token));
                let own = replies.into_iter().flatten().find(|reply| reply.serial == *serial);
                own.into_iter().for_each(|reply| reply.replied = Some(index));
            }
            Event::Kept { serial, token, answer } => {
                self.given.entry(*serial).or_insert(answer);
                self.kept.insert(*token, (index, *serial));
            }
            Event::Locked { about, after, .. } => {
                self.locks.entry(*about).or_default().push((index, after.as_ref()));
            }
            Event::Asked { question, life, label, request } => {
                let (life, label, request) = (*life, *label, *request);
                self.questions.insert(*question, Asked { index, life, label, request, said: None, over: None });
            }
            Event::Said { question, answer } => {
                if let Some(asked) = self.questions.get_mut(question) {
                    asked.said = Some((index, answer));
                    asked.over.get_or_insert(index);
                }
            }
            Event::Dropped { question } => {
                if let Some(asked) = self.questions.get_mut(question) {
                    asked.over.get_or_insert(index);
                }
            }
            Event::Broke { token } => {
                if let Some(token) = token {
                    self.broke.entry(*token).or_insert(index);
                }
            }
            Event::Calm => self.calm = Some(index),
            Event::Queued { op, label, before, after, .. } => {
                self.queue.entry(*label).or_default().push((index, after.as_ref()));
                let (was, is) = (before.as_ref(), after.as_ref());
                if let Some(was) = was {
                    let stands = is.filter(|is| is.token == was.token);
                    let own = self.acceptances.get_mut(&was.request);
                    own.into_iter().for_each(|own| own.changes.push((index, *op, stands)));
                }
                if let Some(first) = is.filter(|is| was.is_none_or(|was| was.token != is.token)) {
                    let acceptance = Acceptance { index, label: *label, first, changes: Vec::new() };
                    self.acceptances.insert(first.request, acceptance);
                }
            }
            Event::Paused { is_paused, .. } => self.pauses.push((index, *is_paused)),
            Event::Polls { poll, label, .. } => {
                self.polls.insert(*poll, Polled { index, label: *label, answered: None });
            }
            Event::Polled { poll, word } => {
                if let Some(polled) = self.polls.get_mut(poll) {
                    polled.answered = Some((index, word));
                }
            }
            Event::Born { .. }
            | Event::Fault { .. }
            | Event::Cache { .. }
            | Event::Recalled { .. }
            | Event::Honoured { .. }
            | Event::Told { .. } => {}
        }
    }

    /// When something happened.
    pub fn at(&self, index: usize) -> u64 {
        self.history[index].at
    }

    /// The first place that is not earlier than `at`.
    pub fn place(&self, at: u64) -> usize {
        self.history.partition_point(|entry| entry.at < at)
    }

    /// What stands for a key right after a place.
    pub fn standing(&self, label: Label, index: usize) -> Option<&'a Standing> {
        self.standings(label, index, index).pop().flatten()
    }

    /// Everything that stood for a key right after `from`, or came to stand up to `to`, in order.
    pub fn standings(&self, label: Label, from: usize, to: usize) -> Vec<Option<&'a Standing>> {
        among(&self.records, label, from, to)
    }

    /// What waits for its delivery of a key right after a place.
    pub fn waiting(&self, label: Label, index: usize) -> Option<&'a Waiting> {
        self.all_waiting(label, index, index).pop().flatten()
    }

    /// Everything that waited right after `from`, or came to wait up to `to`, in order.
    pub fn all_waiting(&self, label: Label, from: usize, to: usize) -> Vec<Option<&'a Waiting>> {
        among(&self.queue, label, from, to)
    }

    /// Whether accepted requests are held back at a place.
    pub fn is_paused(&self, index: usize) -> bool {
        self.pauses.iter().rfind(|(at, _)| *at < index).is_some_and(|(_, is_paused)| *is_paused)
    }

    /// The requests of a route that left a gate, and where.
    pub fn written_for(&self, route: usize) -> impl Iterator<Item = (Request, Label, &Vec<usize>)> {
        let of = move |(request, writes)| {
            let label = self.sent.get::<Request>(request)?.label;
            (label.route == route).then_some((*request, label, writes))
        };
        self.written.iter().filter_map(of)
    }

    /// Whether somebody had the right to ask about a key between a time and a place, or so shortly before that a gate may
    /// believe a hint of that.
    pub fn was_locked(&self, label: Label, from: u64, to: usize) -> bool {
        let stands = |standing: &Standing| standing.state == State::InFlight;
        among(&self.locks, label, self.hinted_since(from), to).into_iter().flatten().any(stands)
    }

    /// The place before which nothing counts any more at a time, also where a gate goes by a hint: for a second, and no
    /// longer than its max age.
    fn hinted_since(&self, from: u64) -> usize {
        let hint = self.setup.max_age.map_or(0, millis).min(1_000);
        // What stood as that time began.
        self.place(from.saturating_sub(hint)).saturating_sub(1)
    }

    /// Whether the upstream gave an attempt the answer of a run, or completed it with that.
    pub fn gave(&self, token: Token, serial: u32) -> bool {
        self.reply(token, serial).is_some() || self.kept.get(&token).is_some_and(|(_, kept)| *kept == serial)
    }

    /// The answer of a run, as the upstream gave it to an attempt.
    pub fn reply(&self, token: Token, serial: u32) -> Option<&Reply<'a>> {
        self.replies.get(&token)?.iter().find(|reply| reply.serial == serial)
    }

    /// The attempts of a request that left a gate, in order.
    pub fn attempts_of(&self, request: Request) -> impl DoubleEndedIterator<Item = Token> {
        let writes = self.written.get(&request).into_iter().flatten();
        writes.filter_map(|write| match &self.history[*write].event {
            Event::Wrote { token, .. } => *token,
            _ => None,
        })
    }

    /// Which attempt was unknown whose request is sent again by this one, if it was claimed for that.
    pub fn resent(&self, token: Token) -> Option<Token> {
        let (claimed, label) = self.claims.get(&token)?.last()?;
        let Event::Changed { before: Some(before), .. } = &self.history[*claimed].event else { return None };
        let resends = matches!(self.setup.policy(*label).recovery, Recovery::Resend(_));
        let is_unknown = before.state == State::Unknown && !before.is_past(self.at(*claimed));
        (resends && is_unknown).then_some(before.token)
    }

    /// What was completed and then purged so late that a gate may believe it yet at a time: gates that have not heard of
    /// the purge believe what they read just before it for their max age, and no longer.
    pub fn believed(&self, label: Label, at: u64) -> impl Iterator<Item = &'a Standing> {
        let max_age = self.setup.max_age.map_or(0, millis);
        let purged = self.purged.get(&label).into_iter().flatten();
        let late = purged.filter(move |(index, _)| at < self.at(*index) + max_age);
        late.map(|(_, standing)| *standing).filter(|standing| standing.state == State::Completed)
    }

    /// Whether an attempt for a variant was in flight between a time and a place, or so shortly before that a gate may
    /// believe a hint of that.
    pub fn was_in_flight(&self, label: Label, variant: usize, from: u64, to: usize) -> bool {
        let fits = |standing: &Standing| standing.state == State::InFlight && standing.variant == Some(variant);
        self.standings(label, self.hinted_since(from), to).into_iter().flatten().any(fits)
    }

    /// Where an attempt's request left the gate, if it did before `index`.
    pub fn written_before(&self, token: Token, index: usize) -> bool {
        self.writes.get(&token).is_some_and(|writes| writes[0] < index)
    }

    /// Whether a gate was told to end, or died, before `index`.
    pub fn has_ended(&self, life: LifeNumber, index: usize) -> bool {
        self.ends.iter().any(|(end, own)| *own == life && *end < index)
    }

    /// Whether the upstream connections of a gate were reset between two places.
    pub fn was_cut(&self, life: LifeNumber, from: usize, to: usize) -> bool {
        self.cuts.iter().any(|(cut, own)| *own == life && (from..to).contains(cut))
    }

    /// Whether the connection that carried an attempt broke before `index`.
    pub fn has_broken(&self, token: Token, index: usize) -> bool {
        let closed = self.carriers.get(&token).and_then(|connection| self.closed.get(connection));
        [self.broke.get(&token), closed].into_iter().flatten().any(|broke| *broke < index)
    }

    /// Whether an attempt was settled before a place in a way that left it no record.
    pub fn was_released(&self, token: Token, label: Label, index: usize) -> bool {
        let stands = self.standing(label, index).is_some_and(|standing| standing.token == token);
        let settled = self.history[..index].iter().any(|entry| match &entry.event {
            Event::Told { op: Operation::Settle, token: settled, told: Told::Settled, .. } => *settled == Some(token),
            _ => false,
        });
        settled && !stands
    }

    /// Whether a gate has claimed a key for a variant before a place.
    pub fn has_claimed(&self, life: LifeNumber, label: Label, variant: usize, index: usize) -> bool {
        let changes = self.records.get(&label).into_iter().flatten().filter(|(at, _)| *at < index);
        changes
            .filter_map(|(_, standing)| *standing)
            .any(|standing| standing.token.life() == life && standing.variant == Some(variant))
    }

    /// Whether a request went to the upstream unprotected, or tried to.
    pub fn failed_open(&self, request: Request) -> bool {
        let Some(sent) = self.sent.get(&request) else { return false };
        let fails_open = self.setup.policy(sent.label).store_failure == StoreFailure::Forward;
        fails_open && !self.written.get(&request).is_some_and(|writes| self.has_attempt(writes[0]))
    }

    fn has_attempt(&self, index: usize) -> bool {
        matches!(&self.history[index].event, Event::Wrote { token: Some(_), .. })
    }

    pub fn violation(
        &self,
        invariant: Invariant,
        index: usize,
        label: impl Into<Option<Label>>,
        why: impl Into<String>,
    ) -> Violation {
        Violation { invariant, index, label: label.into(), why: why.into() }
    }
}

/// What stood in a list of changes right after `from`, or came to stand up to `to`, in order.
fn among<'a, T>(
    changes: &BTreeMap<Label, Vec<(usize, Option<&'a T>)>>,
    label: Label,
    from: usize,
    to: usize,
) -> Vec<Option<&'a T>> {
    let Some(changes) = changes.get(&label) else { return vec![None] };
    let first = changes.partition_point(|(index, _)| *index <= from);
    let past = changes.partition_point(|(index, _)| *index <= to);
    let at_first = first.checked_sub(1).and_then(|last| changes[last].1);
    std::iter::once(at_first).chain(changes[first..past].iter().map(|(_, standing)| *standing)).collect()
}
