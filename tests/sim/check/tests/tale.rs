//! Histories told by hand.

use std::collections::BTreeSet;
use std::time::Duration;

use http::{HeaderName, HeaderValue, StatusCode};
use oncegate::idempotency::codec;
use oncegate::idempotency::delivery::{Deliver, Order};
use oncegate::idempotency::policy::{InFlight, Policy};
use oncegate::idempotency::record::State;
use oncegate::idempotency::recovery::{Probe, Recovery, Resend};
use oncegate::store::unreliable::Operation;

use crate::check::{Invariant, check};
use crate::dice::Dice;
use crate::history::{
    Answer, Connection, EPOCH, Entry, Event, Label, LifeNumber, Question, Request, Standing, Token, Told, Waiting,
};
use crate::setup::{ACCEPT, PROBE, RESEND, Setup};

pub(super) const HOLD: Label = Label { route: 0, tenant: 0, key: 0 };
pub(super) const RETRY: Label = Label { route: 1, tenant: 0, key: 0 };
pub(super) const PROBED: Label = Label { route: PROBE, tenant: 0, key: 0 };
pub(super) const RESENT: Label = Label { route: RESEND, tenant: 0, key: 0 };
pub(super) const ACCEPTED: Label = Label { route: ACCEPT, tenant: 0, key: 0 };
pub(super) const ONE: LifeNumber = LifeNumber(1);
pub(super) const A: Token = Token(1 << 32);
/// Another of the same gate.
pub(super) const NEXT: Token = Token((1 << 32) + 1);
pub(super) const B: Token = Token(2 << 32);
pub(super) const AFTER: u64 = 2_000;
pub(super) const LEASE: u64 = 1_000;
pub(super) const TTL: u64 = 10_000;
pub(super) const MAX_AGE: u64 = 1_500;
pub(super) const UNKNOWN_TTL: u64 = 5_000;

/// A history that is being told.
pub(super) struct Tale {
    pub(super) label: Label,
    pub(super) now: u64,
    pub(super) standing: Option<Standing>,
    pub(super) waiting: Option<Waiting>,
    pub(super) entries: Vec<Entry>,
}

impl Tale {
    pub(super) fn of(label: Label) -> Self {
        let mut tale = Self { label, now: 0, standing: None, waiting: None, entries: Vec::new() };
        tale.add(Event::Born { life: ONE, slot: 0 });
        tale
    }

    pub(super) fn add(&mut self, event: Event) -> &mut Self {
        self.entries.push(Entry { at: self.now, event });
        self
    }

    pub(super) fn pass(&mut self, millis: u64) -> &mut Self {
        self.now += millis;
        self
    }

    pub(super) fn sent(&mut self, request: u32) -> &mut Self {
        self.sent_variant(request, 0)
    }

    pub(super) fn sent_variant(&mut self, request: u32, variant: usize) -> &mut Self {
        let (request, label) = (Request(request), self.label);
        self.add(Event::Sent { request, life: ONE, label, variant, is_probe: false })
    }

    pub(super) fn changed(&mut self, op: Operation, by: Option<Token>, after: Option<Standing>) -> &mut Self {
        let before = std::mem::replace(&mut self.standing, after.clone());
        let label = self.label;
        self.add(Event::Changed { life: ONE, op, by, label, before, after });
        if op == Operation::Settle {
            self.add(Event::Told { life: ONE, op, label: Some(label), token: by, told: Told::Settled });
        }
        self
    }

    pub(super) fn queued(&mut self, op: Operation, after: Option<Waiting>) -> &mut Self {
        let (label, before) = (self.label, std::mem::replace(&mut self.waiting, after.clone()));
        self.add(Event::Queued { life: ONE, op, label, before, after })
    }

    pub(super) fn claimed(&mut self, token: Token) -> &mut Self {
        let op = if self.standing.is_some() { Operation::Supersede } else { Operation::Claim };
        let until = self.now + LEASE;
        let claimed = self.now;
        let after = Standing { token, state: State::InFlight, claimed, until, variant: Some(0), answer: None };
        self.changed(op, Some(token), Some(after))
    }

    pub(super) fn stands(&mut self, op: Operation, by: Option<Token>, change: impl FnOnce(&mut Standing)) -> &mut Self {
        let mut after = self.standing.clone().unwrap();
        change(&mut after);
        self.changed(op, by, Some(after))
    }

    pub(super) fn unknown(&mut self, op: Operation, by: Option<Token>) -> &mut Self {
        let until = self.now + UNKNOWN_TTL;
        self.stands(op, by, |standing| (standing.state, standing.until) = (State::Unknown, until))
    }

    pub(super) fn completed(&mut self, by: Token, serial: u32) -> &mut Self {
        self.stands(Operation::Settle, Some(by), |standing| {
            standing.state = State::Completed;
            standing.until = standing.claimed + TTL;
            standing.answer = Some(encoded(serial));
        })
    }

    pub(super) fn wrote(&mut self, token: Token, request: u32) -> &mut Self {
        let (connection, request) = (Connection(request), Request(request));
        self.add(Event::Wrote { life: ONE, connection, token: Some(token), request })
    }

    /// A gate asks the books, for a request or for nobody.
    pub(super) fn asks(&mut self, question: u32, request: Option<u32>) -> &mut Self {
        let (question, label, request) = (Question(question), self.label, request.map(Request));
        self.add(Event::Asked { question, life: ONE, label, request })
    }

    pub(super) fn books_say(&mut self, question: u32, status: u16) -> &mut Self {
        self.add(Event::Said { question: Question(question), answer: of_books(question, status) })
    }

    /// The record of an attempt completes with what the books said to a question.
    pub(super) fn completed_by_books(&mut self, by: Token, question: u32) -> &mut Self {
        let until = self.now + TTL;
        let content = codec::Content { body: format!("books {question}").into(), trailers: Vec::new() };
        let headers = vec![(HeaderName::from_static("x-question"), HeaderValue::from(question))];
        let answer = codec::Answer { status: StatusCode::OK, reason: None, headers, content: Some(content) }.encode();
        self.stands(Operation::Settle, Some(by), |standing| {
            (standing.state, standing.until, standing.answer) = (State::Completed, until, Some(answer));
        })
    }

    /// What a client gets of that.
    pub(super) fn got_of_books(&mut self, request: u32, question: u32, word: &str) -> &mut Self {
        let until = self.standing.as_ref().map_or(0, |standing| standing.until);
        self.answered(request, marked(of_books(question, 200), word, until))
    }

    /// The request runs, and is answered with 200.
    pub(super) fn ran(&mut self, token: Token, request: u32, serial: u32) -> &mut Self {
        let (label, token) = (self.label, Some(token));
        self.add(Event::Executed { serial, token, request: Request(request), label, variant: 0 });
        self.add(Event::Replying { serial, token, answer: given(serial) });
        self.add(Event::Replied { serial, token })
    }

    pub(super) fn answered(&mut self, request: u32, answer: Answer) -> &mut Self {
        self.add(Event::Answered { request: Request(request), answer })
    }

    /// The upstream's answer, with the gate's words.
    pub(super) fn got(&mut self, request: u32, serial: u32, word: &str) -> &mut Self {
        let until = self.standing.as_ref().map_or(0, |standing| standing.until);
        self.answered(request, told(serial, word, until))
    }

    pub(super) fn problem(&mut self, request: u32, status: u16, word: &str, retry_after: bool) -> &mut Self {
        let mut headers = vec![
            ("content-type".to_owned(), "application/problem+json".to_owned()),
            ("idempotency-status".to_owned(), word.to_owned()),
        ];
        if retry_after {
            headers.push(("retry-after".to_owned(), "1".to_owned()));
        }
        self.answered(request, Answer { status, reason: String::new(), headers, body: b"{}".to_vec() })
    }

    /// One request, from its beginning to its answer.
    pub(super) fn once(&mut self) -> &mut Self {
        self.sent(0).pass(1).claimed(A).pass(1).wrote(A, 0).ran(A, 0, 1).pass(1).completed(A, 1).got(0, 1, "executed")
    }

    pub(super) fn broken(&self) -> BTreeSet<Invariant> {
        check(&setup(), &self.entries).into_iter().map(|violation| violation.invariant).collect()
    }
}

pub(super) fn given(serial: u32) -> Answer {
    let headers = vec![("x-serial".to_owned(), serial.to_string())];
    Answer { status: 200, reason: "OK".to_owned(), headers, body: format!("body {serial}").into_bytes() }
}

pub(super) fn told(serial: u32, word: &str, until: u64) -> Answer {
    marked(given(serial), word, until)
}

/// An answer with the gate's words.
fn marked(mut answer: Answer, word: &str, until: u64) -> Answer {
    answer.headers.push(("idempotency-status".to_owned(), word.to_owned()));
    if matches!(word, "executed" | "recovered" | "replayed") {
        let until = std::time::UNIX_EPOCH + Duration::from_millis(EPOCH + until);
        answer.headers.push(("idempotency-expires".to_owned(), httpdate::fmt_http_date(until)));
    }
    if word == "replayed" {
        answer.headers.push(("idempotent-replayed".to_owned(), "true".to_owned()));
    }
    answer
}

pub(super) fn encoded(serial: u32) -> bytes::Bytes {
    let name = HeaderName::from_static("x-serial");
    let content = codec::Content { body: format!("body {serial}").into(), trailers: Vec::new() };
    let headers = vec![(name, HeaderValue::from(serial))];
    codec::Answer { status: StatusCode::OK, reason: None, headers, content: Some(content) }.encode()
}

/// The books' answer to a question.
pub(super) fn of_books(question: u32, status: u16) -> Answer {
    let headers = vec![("x-question".to_owned(), question.to_string())];
    Answer { status, reason: String::new(), headers, body: format!("books {question}").into_bytes() }
}

fn recovery(drawn: &Recovery) -> Recovery {
    match drawn.clone() {
        Recovery::Probe(probe) => Recovery::Probe(Probe { after: Some(Duration::from_millis(AFTER)), ..probe }),
        Recovery::Resend(resend) => Recovery::Resend(Resend { attempts: 3, ..resend }),
        recovery => recovery,
    }
}

pub(super) fn setup() -> Setup {
    let mut setup = Setup::draw(&mut Dice::of(0));
    for policy in &mut setup.policies {
        *policy = Policy {
            ttl: Duration::from_millis(TTL),
            unknown_ttl: Duration::from_millis(UNKNOWN_TTL),
            lease: Duration::from_millis(LEASE),
            recovery: recovery(&policy.recovery),
            in_flight: InFlight::Reject,
            ..Policy::default()
        };
    }
    setup.policies[ACCEPT].deliver = Deliver {
        attempts: 2,
        max_backoff: Duration::from_secs(1),
        give_up_after: Duration::from_secs(60),
        order: Order::Scope,
        ..Deliver::default()
    };
    setup.max_age = Some(Duration::from_millis(MAX_AGE));
    setup.settle_timeout = Duration::from_secs(1);
    setup.set_timeouts(Duration::from_secs(2));
    setup
}
