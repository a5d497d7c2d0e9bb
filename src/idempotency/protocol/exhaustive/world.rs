//! What the machines of the search live in: gates, a store with one record, an upstream, and what goes wrong.

use std::collections::VecDeque;
use std::time::Duration;

use super::super::mutants::Mutant;
use super::super::*;
use super::Rules;
use crate::idempotency::record::State;

use self::books::Books;
use self::store::Record;

mod books;
mod store;

#[derive(Clone, PartialEq, Eq, Hash)]
struct Request {
    gate: usize,
    protocol: Protocol,
    /// Its attempt. The request's number is its remainder by [`STRIDE`].
    token: usize,
    age: Duration,
    operation: Option<Operation>,
    /// The store call that ends with the event at hand.
    asked: Option<Operation>,
    leads: bool,
    is_running: bool,
    has_waited: bool,
    /// It may not run.
    is_barred: bool,
    /// Its client has its answer, or has left.
    is_answered: bool,
    ended: Option<Ended>,
    /// What the store had when it was asked last.
    found: Option<bool>,
    /// The record whose attempt it asks the upstream about.
    probed: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Ended {
    Completes,
    Releases,
    Holds,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(in super::super) enum Operation {
    Claim,
    Supersede(Version),
    Look,
    Settle,
    Hold,
    Withdraw,
    Run,
    Follow { to_end: bool },
    LockProbe,
    CheckProbe,
    Probe,
    Recover,
    Pause,
    Reclaim,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct World {
    requests: Vec<Option<Request>>,
    record: Option<Record>,
    /// Calls that failed, and may happen yet.
    late: Vec<(usize, Operation, Option<Ended>)>,
    /// Runs since the key was last free by right: unclaimed, purged, released unsent, or retried by policy.
    runs: usize,
    /// What the upstream knows of the attempts since then.
    books: Books,
    /// Who has the right to probe.
    lock: Option<usize>,
    /// One had it.
    has_asked: bool,
    faults_left: u8,
    rules: Rules,
    /// The configuration changed, and retries would not find what these requests claim.
    is_reloaded: bool,
    /// As many wait as may.
    is_full: bool,
    /// A claim may be left behind: a gate was killed, or a call happened late.
    may_leave: bool,
    mutant: Mutant,
}

/// The difference between two tokens of one request.
pub(super) const STRIDE: usize = 8;

/// What a store call that fails does all the same.
type Effect<'a> = &'a dyn Fn(&mut World);

impl World {
    pub(super) fn new(gates: &[usize], limits: ProtocolLimits, faults_left: u8, rules: Rules, mutant: Mutant) -> Self {
        let limits = ProtocolLimits { attempts: if rules.resends { 2 } else { 1 }, ..limits };
        let request = |(index, &gate): (usize, &usize)| {
            let (protocol, age) = (Protocol::new(limits), Duration::ZERO);
            let (operation, asked, ended, found, probed) = (None, None, None, None, None);
            let (leads, is_running, has_waited, is_answered) = (false, false, false, false);
            let is_barred = rules.bars_last && index + 1 == gates.len();
            Some(Request {
                gate,
                protocol,
                token: index,
                age,
                operation,
                asked,
                leads,
                is_running,
                has_waited,
                is_barred,
                is_answered,
                ended,
                found,
                probed,
            })
        };
        let requests = gates.iter().enumerate().map(request).collect();
        let (mut record, late, runs, may_leave) = (None, Vec::new(), 0, false);
        let (mut books, lock) = (Books::default(), None);
        if rules.probes {
            // The attempt of a gate that is gone.
            let attempt = gates.len();
            record = Some(Record {
                attempt,
                state: State::Unknown,
                is_past: false,
                by_upstream: false,
                is_sent_again: false,
            });
            books.pending.push(attempt);
        }
        let (is_reloaded, is_full) = (false, false);
        let mut world = Self {
            requests,
            record,
            late,
            runs,
            books,
            lock,
            has_asked: false,
            faults_left,
            rules,
            is_reloaded,
            is_full,
            may_leave,
            mutant,
        };
        (0..gates.len()).for_each(|index| world.handle(index, Event::Begin));
        world
    }

    fn request(&mut self, index: usize) -> &mut Request {
        self.requests[index].as_mut().expect("it was not killed")
    }

    /// Hands an event to a request, and carries out what follows.
    fn handle(&mut self, index: usize, event: Event) {
        let mutant = self.mutant;
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let request = self.request(index);
            let (now, operation) = (request.age, request.asked);
            let actions = mutant.handle(&mut request.protocol, now, event, operation);
            for action in actions {
                events.extend(self.begin(index, action));
            }
        }
        let request = self.request(index);
        if request.protocol.is_done() {
            assert!(!request.leads, "it lets others lead");
            assert!(request.is_answered, "its client is answered");
            request.operation = None;
        } else {
            assert!(request.operation.is_some() || request.protocol.timeout().is_some(), "it waits for something");
        }
    }

    fn begin(&mut self, index: usize, action: Action) -> Option<Event> {
        let (gate, is_reloaded, is_full) = (self.request(index).gate, self.is_reloaded, self.is_full);
        let leader = self.requests.iter().flatten().find(|other| other.gate == gate && other.leads);
        let leader = leader.map(|leader| leader.is_running);
        let token = self.request(index).token;
        let is_executed = self.record.as_ref().is_some_and(|it| it.attempt == token && it.state == State::Completed);
        let is_sent_again = self.record.as_ref().is_some_and(|record| record.is_sent_again);
        let may_know = self.rules.probes && self.books.is_quiet && !self.has_asked;
        let request = self.request(index);
        match action {
            Action::Join if leader.is_some() => return Some(Event::Follows),
            Action::Join => {
                request.leads = true;
                return Some(Event::Leads);
            }
            Action::AskPermission if is_reloaded => return Some(Event::Retired),
            Action::AskPermission if request.is_barred => return Some(Event::Barred),
            Action::AskPermission => return Some(Event::Permitted),
            Action::Follow if leader.is_none() => return Some(Event::Followed(Followed::AskStore)),
            Action::Follow if leader == Some(true) => return Some(running()),
            Action::FollowToEnd if leader.is_none() => return Some(Event::Followed(Followed::AskStore)),
            Action::AcquireWaitSlot if is_full => return Some(Event::WaitSlotsFull),
            Action::AcquireWaitSlot => {
                request.has_waited = true;
                return Some(Event::WaitSlotAcquired);
            }
            Action::Follow => request.operation = Some(Operation::Follow { to_end: false }),
            Action::FollowToEnd => request.operation = Some(Operation::Follow { to_end: true }),
            Action::Claim | Action::Supersede(_) if request.is_barred => panic!("it may not run"),
            Action::Claim => request.operation = Some(Operation::Claim),
            Action::Supersede(seen) => request.operation = Some(Operation::Supersede(seen)),
            Action::Look => request.operation = Some(Operation::Look),
            Action::Settle => request.operation = Some(Operation::Settle),
            Action::Hold => request.operation = Some(Operation::Hold),
            Action::Withdraw => {
                assert!(!request.is_running, "a claim under which something may have been sent is not withdrawn");
                request.operation = Some(Operation::Withdraw);
            }
            Action::Pause(_) => request.operation = Some(Operation::Pause),
            Action::Reclaim => {
                request.token += STRIDE;
                request.operation = Some(Operation::Reclaim);
            }
            Action::LockProbe => request.operation = Some(Operation::LockProbe),
            Action::CheckProbe => request.operation = Some(Operation::CheckProbe),
            Action::ShareProbing => self.followers_hear(gate, &running()),
            Action::Probe => {
                request.operation = Some(Operation::Probe);
                assert_eq!(self.lock, Some(index), "one probe at a time");
            }
            Action::Recover => request.operation = Some(Operation::Recover),
            Action::Run => {
                request.operation = Some(Operation::Run);
                assert!(!self.rules.stands_elsewhere, "the key has a record under another id");
                self.lock.take_if(|holder| *holder == index);
                self.runs += 1;
                if self.rules.probes {
                    self.books.is_quiet = false;
                    self.books.pending.push(index);
                }
                assert!(self.runs == 1, "two runs for one claim");
            }
            Action::ShareRunning { .. } => {
                let is_first = !request.is_running || request.ended == Some(Ended::Holds);
                assert!(request.leads && !request.has_waited && is_first && !request.is_answered);
                request.is_running = true;
                self.followers_hear(gate, &running());
            }
            Action::ShareFound | Action::ShareEnd | Action::Leave => {
                assert!(request.leads);
                request.leads = false;
                let followed = match (action, request.found, request.ended) {
                    (Action::ShareFound, Some(false), _) => Followed::Absent,
                    (Action::ShareEnd, _, Some(Ended::Releases)) => Followed::Released { is_same: true },
                    // What the leader found, its followers could as well have found themselves.
                    _ => Followed::AskStore,
                };
                self.followers_hear(gate, &Event::Followed(followed));
            }
            Action::Watch => request.operation = None,
            Action::Reply(reply) => {
                assert!(!request.is_answered, "one reply");
                request.is_answered = true;
                let is_unknown = matches!(reply, Reply::Decided { decision: Decision::Unknown, .. });
                assert!(!is_unknown || !is_sent_again, "the outcome is not known yet");
                assert!(!is_unknown || !may_know, "the upstream may know");
                let says_executed =
                    reply == Reply::Attempted(Some(SettleResult::Done)) && request.ended == Some(Ended::Completes);
                assert!(!says_executed || is_executed, "a reply says `executed` only of a durable record");
                self.lock.take_if(|holder| *holder == index);
            }
        }
        None
    }

    fn followers_hear(&mut self, gate: usize, event: &Event) {
        for index in 0..self.requests.len() {
            let Some(request) = &mut self.requests[index] else { continue };
            let hears = match request.operation {
                Some(Operation::Follow { to_end }) => !to_end || *event != running(),
                _ => false,
            };
            if request.gate == gate && hears {
                request.operation = None;
                self.handle(index, event.clone());
            }
        }
    }

    /// Every state that can follow.
    pub(super) fn next(&self) -> Vec<Self> {
        let mut next = Vec::new();
        for (index, request) in self.requests.iter().enumerate() {
            let Some(request) = request.as_ref().filter(|request| !request.protocol.is_done()) else { continue };
            match request.operation {
                None | Some(Operation::Follow { .. }) => {}
                Some(Operation::Run) => {
                    let is_sent = self.record.as_ref().is_some_and(|it| it.attempt == request.token && it.by_upstream);
                    for ended in [Ended::Completes, Ended::Releases, Ended::Holds] {
                        // What the upstream has completed was sent.
                        if ended != Ended::Releases || !is_sent {
                            next.push(self.ends(index, |world| {
                                world.request(index).ended = Some(ended);
                                if ended != Ended::Holds {
                                    world.books.takes_effect(index, ended == Ended::Completes);
                                }
                                if ended == Ended::Holds && world.rules.resends {
                                    return Event::AttemptLost;
                                }
                                Event::AttemptEnded
                            }));
                        }
                    }
                    next.extend(self.goes_wrong(|world| {
                        let it = world.record.as_mut().filter(|it| it.attempt == request.token)?;
                        (it.state, it.by_upstream) = (State::Completed, true);
                        world.books.takes_effect(index, true);
                        Some(())
                    }));
                }
                Some(Operation::Pause) => {
                    next.push(self.ends(index, |_| Event::Resumed));
                    next.extend(self.goes_wrong(|world| {
                        *world = world.ends(index, |_| Event::ShuttingDown);
                        Some(())
                    }));
                }
                Some(Operation::Probe) => {
                    let told = if self.books.has_effect { Finding::Done } else { Finding::Absent };
                    for finding in [told, Finding::Unclear] {
                        next.push(self.ends(index, |_| Event::Probed(finding)));
                    }
                }
                Some(call) => {
                    let (ended, token) = (request.ended, request.token);
                    next.push(self.ends(index, |world| world.happens(token, call, ended)));
                    let lost = |world: &mut Self| {
                        world.happens(token, call, ended);
                    };
                    let late = |world: &mut Self| {
                        if !matches!(call, Operation::LockProbe | Operation::CheckProbe) {
                            world.late.push((token, call, ended));
                        }
                    };
                    let effects: [(Effect<'_>, bool); 3] = [(&lost, true), (&late, true), (&|_| {}, false)];
                    for (effect, in_doubt) in effects {
                        next.extend(self.goes_wrong(|world| {
                            effect(world);
                            *world = world.ends(index, |_| Event::StoreFailed { in_doubt });
                            Some(())
                        }));
                    }
                }
            }
            if let Some(at) = request.protocol.timeout() {
                let mut later = self.clone();
                later.request(index).age = at.max(request.age);
                later.handle(index, Event::Timeout);
                next.push(later);
            }
            if request.protocol.is_waiting() {
                for event in [Event::ClientLeft, Event::ShuttingDown, Event::Changed] {
                    next.extend(self.goes_wrong(|world| {
                        world.request(index).is_answered |= event == Event::ClientLeft;
                        world.handle(index, event);
                        Some(())
                    }));
                }
            }
            next.extend(self.goes_wrong(|world| {
                world.request(index).age += Duration::from_secs(21);
                Some(())
            }));
            next.extend(self.goes_wrong(|world| world.is_killed(request.gate)));
        }
        for (nth, &(token, call, ended)) in self.late.iter().enumerate() {
            let mut world = self.clone();
            world.late.remove(nth);
            world.happens(token, call, ended);
            world.may_leave = true;
            next.push(world);
        }
        next.extend(self.goes_wrong(|world| {
            world.record.take()?;
            (world.runs, world.books) = (0, Books::default());
            Some(())
        }));
        for &attempt in &self.books.pending {
            let mut world = self.clone();
            world.books.takes_effect(attempt, true);
            next.push(world);
        }
        // `after` is longer than an attempt may take, and than a gate may take to begin one.
        let may_run = |attempt: usize| {
            self.requests
                .get(attempt % STRIDE)
                .and_then(Option::as_ref)
                .is_some_and(|it| it.ended.is_none() && !it.is_answered)
        };
        if let Some(record) = &self.record
            && self.rules.probes
            && (record.is_past || record.state == State::Unknown)
            && !(may_run(record.attempt) || self.books.is_quiet)
        {
            let mut world = self.clone();
            world.books.pending.clear();
            world.books.is_quiet = true;
            next.push(world);
        }
        if self.record.as_ref().is_some_and(|record| record.is_sent_again) {
            next.extend(self.goes_wrong(|world| {
                world.record.as_mut()?.is_sent_again = false;
                Some(())
            }));
        }
        next.extend(self.goes_wrong(|world| (!std::mem::replace(&mut world.is_reloaded, true)).then_some(())));
        next.extend(self.goes_wrong(|world| (!std::mem::replace(&mut world.is_full, true)).then_some(())));
        if let Some(record) = self.record.as_ref().filter(|record| record.state == State::InFlight) {
            next.extend(self.goes_wrong(|world| {
                world.record.as_mut().filter(|record| !record.is_past)?.is_past = true;
                Some(())
            }));
            if record.is_past {
                let mut world = self.clone();
                world.record = Some(Record { state: State::Unknown, is_past: false, ..record.clone() });
                next.push(world);
            }
        }
        next
    }

    /// An operation ends with an event.
    fn ends(&self, index: usize, event: impl FnOnce(&mut Self) -> Event) -> Self {
        let mut world = self.clone();
        world.request(index).asked = world.request(index).operation.take();
        let event = match event(&mut world) {
            Event::Claimed if world.rules.stands_elsewhere => Event::OtherId,
            event => event,
        };
        world.hears_of_store(index, &event);
        world.handle(index, event);
        world.request(index).asked = None;
        world
    }

    fn goes_wrong(&self, how: impl FnOnce(&mut Self) -> Option<()>) -> Option<Self> {
        let faults_left = self.faults_left.checked_sub(1)?;
        let mut world = Self { faults_left, ..self.clone() };
        how(&mut world).map(|()| world)
    }

    /// A gate is killed; its store calls may happen yet.
    fn is_killed(&mut self, gate: usize) -> Option<()> {
        for index in 0..self.requests.len() {
            let Some(request) = self.requests[index].take_if(|request| request.gate == gate) else { continue };
            let is_call = match request.operation {
                None => false,
                Some(call) => !matches!(
                    call,
                    Operation::Run
                        | Operation::Probe
                        | Operation::LockProbe
                        | Operation::CheckProbe
                        | Operation::Pause
                        | Operation::Follow { .. }
                ),
            };
            // No gate renews it.
            self.lock.take_if(|holder| *holder == index);
            self.late.extend(request.operation.filter(|_| is_call).map(|call| (request.token, call, request.ended)));
        }
        self.may_leave = true;
        Some(())
    }

    pub(super) fn check(&self) {
        if self.requests.iter().flatten().all(|request| request.protocol.is_done())
            && !self.may_leave
            && self.late.is_empty()
        {
            let is_left = self.record.as_ref().is_some_and(|record| record.state == State::InFlight);
            assert!(!is_left, "every claim is ended");
        }
    }
}

fn running() -> Event {
    Event::Followed(Followed::Running { difference: None, attempt: RunningAttempt::here(Duration::ZERO) })
}
