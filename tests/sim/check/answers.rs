//! What clients were told.

use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

use oncegate::idempotency::policy::{InFlight, StoreFailure};
use oncegate::idempotency::record::State;
use oncegate::idempotency::recovery::Recovery;

use super::endings::millis;
use super::facts::{Asked, Facts, Run, Sent};
use super::questions::may_be_asked;
use super::{Invariant, Violation};
use crate::history::{Answer, EPOCH, Label, Question, Request, Standing, Token};

/// What a gate adds to an answer, or sets for its connection.
const ADDED: [&str; 6] = [
    "idempotency-status",
    "idempotent-replayed",
    "idempotency-expires",
    "content-length",
    "transfer-encoding",
    "connection",
];

type Fault = (Invariant, String);

/// An answer and the request that got it.
struct Got<'a> {
    request: Request,
    sent: Sent,
    index: usize,
    answer: &'a Answer,
    /// When the answer's gate may have read the store first, and where: it may be what another request waited for.
    earliest: u64,
    since: usize,
}

pub fn check(facts: &Facts<'_>, found: &mut Vec<Violation>) {
    let mut firsts = BTreeMap::new();
    let mut got: Vec<_> = facts
        .ended
        .iter()
        .filter_map(|(request, (index, answer))| {
            let sent = *facts.sent.get(request)?;
            let earliest = facts.at(sent.index).saturating_sub(millis(facts.setup.settle_timeout));
            let since = facts.place(earliest).min(sent.index);
            Some(Got { request: *request, sent, index: *index, answer: (*answer)?, earliest, since })
        })
        .collect();
    got.sort_by_key(|got| got.index);
    for got in &got {
        let mut judge = |judged: Result<(), Fault>| {
            if let Err((invariant, why)) = judged {
                let why = format!("request {} got {}: {why}", got.request.0, got.answer);
                found.push(facts.violation(invariant, got.index, got.sent.label, why));
            }
        };
        judge(mismatch(facts, got));
        judge(told(facts, got));
        judge(identical(facts, got, &mut firsts));
    }
}

/// What the answer says must be so.
fn told(facts: &Facts<'_>, got: &Got<'_>) -> Result<(), Fault> {
    let answer = got.answer;
    if answer.is_replay() != (answer.word() == "replayed") {
        return wrong("it is a replay, or it is not");
    }
    if answer.body.windows(20).any(|text| text == b"the gate failed at t") {
        return wrong("the gate panicked");
    }
    match answer.word() {
        "released" if !facts.written.contains_key(&got.request) => waited(facts, got),
        "executed" if answer.question().is_some() => found_out(facts, got),
        "executed" | "released" | "unrecorded" => own_run(facts, got).and_then(|run| settled(facts, got, run)),
        "outcome-unknown" if !answer.is_problem() => own_run(facts, got).and_then(|run| settled(facts, got, run)),
        "unprotected" => match facts.setup.policy(got.sent.label).store_failure {
            StoreFailure::Forward => own_run(facts, got).map(|_| ()),
            StoreFailure::Reject => wrong("the route does not fail open"),
        },
        "replayed" => replayed(facts, got),
        "recovered" => recovered(facts, got),
        "response-not-stored" => stood(facts, got, |standing| {
            standing.state == State::Completed && standing.decoded().is_some_and(|answer| answer.content.is_none())
        })
        .and_then(|()| retry_after(got, false)),
        "in-flight" => in_flight(facts, got).and_then(|()| retry_after(got, true)),
        "key-reused" => ever(facts, got, |variant| variant != got.sent.variant),
        "outcome-unknown" => stood(facts, got, |standing| {
            standing.state == State::Unknown
                || standing.state == State::InFlight && standing.is_past(facts.at(got.index))
        })
        .and_then(|()| retry_after(got, false)),
        "accepted" => accepted(facts, got),
        "still-running" | "store-unavailable" | "upstream-unreachable" => retry_after(got, true),
        "upstream-broken" | "upstream-timeout" => retry_after(got, false),
        word => wrong(&format!("{word} is no answer to a request that is well-formed")),
    }
}

/// The run that an answer is of. It must be of this very request.
fn own_run(facts: &Facts<'_>, got: &Got<'_>) -> Result<Run, Fault> {
    let run = run_of(facts, got.answer)?;
    if let Recovery::Resend(_) = facts.setup.policy(got.sent.label).recovery {
        // Of an earlier request, perhaps, whose record is gone: this upstream knows keys for ever.
        let serial = got.answer.serial().unwrap_or_default();
        let token = facts.attempts_of(got.request).rev().find(|token| facts.gave(*token, serial));
        if token.is_none() || (run.label, run.variant) != (got.sent.label, got.sent.variant) {
            return Err((Invariant::AnswerIsOwn, format!("it is that to variant {} of {}", run.variant, run.label)));
        }
        return Ok(Run { token, request: got.request, ..run });
    }
    if run.request != got.request {
        return Err((Invariant::AnswerIsOwn, format!("it is the answer to request {}", run.request.0)));
    }
    Ok(run)
}

/// The answer of an attempt that this request waited for, at the same gate, and that was released meanwhile.
fn waited(facts: &Facts<'_>, got: &Got<'_>) -> Result<(), Fault> {
    let (run, sent) = (run_of(facts, got.answer)?, got.sent);
    if (run.label, run.variant) != (sent.label, sent.variant) {
        return Err((Invariant::AnswerIsOwn, format!("it is that to variant {} of {}", run.variant, run.label)));
    }
    if !matches!(facts.setup.policy(sent.label).in_flight, InFlight::Wait(_)) {
        return wrong("it is that of another request, and nobody waits on this route");
    }
    let serial = got.answer.serial().unwrap_or_default();
    let there = |(token, request): (&Token, &Request)| {
        let token = *token;
        // The store may have released it before this request came, as long as the gate did not know; when its own client
        // heard of it, the gate did.
        let known = match facts.ended.get(request) {
            Some((index, Some(answer))) if answer.word() == "released" => *index,
            _ => got.index,
        };
        facts.gave(token, serial)
            && token.life() == sent.life
            && sent.index < known
            && facts.was_released(token, sent.label, got.index)
    };
    if facts.requests.iter().any(there) { Ok(()) } else { wrong("that attempt was not released while it waited") }
}

/// The run whose answer this is, as the upstream gave it.
fn run_of(facts: &Facts<'_>, answer: &Answer) -> Result<Run, Fault> {
    let serial = answer.serial().unwrap_or_default();
    let (Some(run), Some(given)) = (facts.runs.get(&serial), facts.given.get(&serial)) else {
        return Err((Invariant::AnswerIsOwn, "it is no answer of the upstream's".to_owned()));
    };
    as_given_by(answer, given).map(|()| *run)
}

/// The question to the books whose answer this is, as they gave it.
fn question_of<'f, 'a>(facts: &'f Facts<'a>, answer: &Answer, question: Question) -> Result<&'f Asked<'a>, Fault> {
    let asked = facts.questions.get(&question);
    let Some((asked, (_, given))) = asked.and_then(|asked| Some((asked, asked.said?))) else {
        return Err((Invariant::AnswerIsOwn, "the books have not said this".to_owned()));
    };
    as_given_by(answer, given).map(|()| asked)
}

fn as_given_by(answer: &Answer, given: &Answer) -> Result<(), Fault> {
    if (answer.status, &answer.reason, &answer.body) != (given.status, &given.reason, &given.body) {
        return Err((Invariant::AnswerIsOwn, format!("the upstream gave {given}, with other bytes")));
    }
    if end_to_end(answer) != end_to_end(given) {
        return Err((Invariant::AnswerIsOwn, format!("the upstream gave {:?}", given.headers)));
    }
    Ok(())
}

/// The headers that pass a gate.
fn end_to_end(answer: &Answer) -> Vec<&(String, String)> {
    let passes = |name: &str| !ADDED.contains(&name) && name != "idempotency-control";
    answer.headers.iter().filter(|(name, _)| passes(name)).collect()
}

/// A request that is accepted waits for its delivery, or is under way by its record.
fn accepted(facts: &Facts<'_>, got: &Got<'_>) -> Result<(), Fault> {
    let Got { sent, index, .. } = got;
    // Asking again helps until it is given up.
    let is_given_up = got.answer.header("retry-after").is_none();
    retry_after(got, !is_given_up)?;
    let waits = facts.all_waiting(sent.label, sent.index, *index).into_iter().flatten();
    let waits = waits.filter(|waiting| waiting.is_dead == is_given_up);
    let stands = facts.standings(sent.label, sent.index, *index).into_iter().flatten();
    let stands = stands.filter(|standing| standing.state != State::Completed && !is_given_up);
    if got.answer.status != 202 || got.answer.header("location").is_none() {
        return wrong("it does not say where its status is");
    }
    if waits.map(|it| it.variant).chain(stands.map(|it| it.variant)).any(|variant| variant == Some(sent.variant)) {
        return Ok(());
    }
    Err((Invariant::DurableBeforeAnswer, "no such request waits for its delivery".to_owned()))
}

/// What the answer of an attempt says of its record must be durable by now.
fn settled(facts: &Facts<'_>, got: &Got<'_>, run: Run) -> Result<(), Fault> {
    let Got { sent, index, answer, .. } = got;
    let Some(token) = run.token else { return wrong("it ran without an attempt") };
    let reached = |state| {
        let changes = facts.records.get(&sent.label).into_iter().flatten();
        changes
            .filter_map(|(at, standing)| standing.filter(|_| at < index))
            .rfind(|standing| standing.token == token && standing.state == state)
    };
    let stands = facts.standing(sent.label, *index).is_some_and(|standing| standing.token == token);
    match answer.word() {
        "executed" => match reached(State::Completed) {
            Some(record) => expires(answer, record),
            None => Err((Invariant::DurableBeforeAnswer, format!("{token} is not recorded as completed yet"))),
        },
        "released" if stands => Err((Invariant::DurableBeforeAnswer, format!("{token} still has its claim"))),
        "outcome-unknown" if stands && reached(State::Unknown).is_none() => {
            Err((Invariant::DurableBeforeAnswer, format!("{token} is not recorded as unknown yet")))
        }
        "unrecorded" if stands => {
            let reply = facts.reply(token, answer.serial().unwrap_or_default());
            let waited = reply.map(|reply| facts.at(reply.begun));
            let patience = millis(facts.setup.settle_timeout);
            match waited {
                Some(begun) if facts.at(*index) >= begun + patience => Ok(()),
                _ => wrong("the store had its time yet, and nobody has taken the record over"),
            }
        }
        _ => Ok(()),
    }
}

/// What the books said to another gate while the attempt of this request went on: by the record, that is its outcome.
fn found_out(facts: &Facts<'_>, got: &Got<'_>) -> Result<(), Fault> {
    let Some(question) = got.answer.question() else { return wrong("it is not of the books") };
    question_of(facts, got.answer, question)?;
    let own: Vec<Token> = facts.attempts_of(got.request).collect();
    let stood = facts.standings(got.sent.label, got.sent.index, got.index);
    let is_its = |standing: &&Standing| standing.question() == Some(question) && own.contains(&standing.token);
    match stood.into_iter().flatten().find(is_its) {
        Some(record) => expires(got.answer, record),
        None => Err((Invariant::DurableBeforeAnswer, "no attempt of it is recorded as completed with that".to_owned())),
    }
}

/// What the books said to the question of this very request, and the record has it.
fn recovered(facts: &Facts<'_>, got: &Got<'_>) -> Result<(), Fault> {
    let Some(question) = got.answer.question() else { return wrong("it is not of the books") };
    let asked = question_of(facts, got.answer, question)?;
    if (asked.request, asked.label) != (Some(got.request), got.sent.label) {
        return Err((Invariant::AnswerIsOwn, format!("the books were asked about {}", asked.label)));
    }
    let stood = facts.standings(got.sent.label, asked.index, got.index);
    let Some(unknown) = stood[0] else { return wrong("nothing stood when the books were asked") };
    if unknown.variant != Some(got.sent.variant) {
        return Err((Invariant::MismatchRefused, format!("what stood is {unknown:?}")));
    }
    let is_its = |standing: &&Standing| standing.state == State::Completed && standing.token == unknown.token;
    match stood.into_iter().flatten().find(is_its) {
        Some(record) => expires(got.answer, record),
        None => Err((Invariant::DurableBeforeAnswer, format!("{} is not recorded as completed", unknown.token))),
    }
}

fn replayed(facts: &Facts<'_>, got: &Got<'_>) -> Result<(), Fault> {
    // What the books said tells of no variant but that of the record.
    let (label, variant) = match got.answer.question() {
        Some(question) => (question_of(facts, got.answer, question)?.label, None),
        None => run_of(facts, got.answer).map(|run| (run.label, Some(run.variant)))?,
    };
    if label != got.sent.label {
        return Err((Invariant::AnswerIsOwn, format!("it is of {label}")));
    }
    if let Some(variant) = variant.filter(|variant| *variant != got.sent.variant) {
        return Err((Invariant::MismatchRefused, format!("it is the answer to variant {variant}")));
    }
    let is_its = |standing: &&Standing| match got.answer.question() {
        Some(question) => standing.question() == Some(question) && standing.variant == Some(got.sent.variant),
        None => facts.gave(standing.token, got.answer.serial().unwrap_or_default()),
    };
    let (since, now) = (facts.at(got.since), facts.at(got.index));
    let completed: Vec<_> = facts
        .standings(got.sent.label, got.since, got.index)
        .into_iter()
        .flatten()
        .filter(|standing| standing.state == State::Completed && is_its(standing))
        .collect();
    let purged = facts.believed(got.sent.label, got.earliest).filter(is_its);
    // Where the upstream honours keys, several records have the same answer.
    let mut alive = completed.into_iter().chain(purged).filter(|standing| !standing.is_past(since)).peekable();
    let Some(record) = alive.peek().copied() else {
        return Err((Invariant::ReplayInTime, format!("no such record was complete and alive in {since} to {now} ms")));
    };
    if record.decoded().is_none_or(|answer| answer.content.is_none()) {
        return wrong("the record has no body");
    }
    if alive.any(|record| expires(got.answer, record).is_ok()) { Ok(()) } else { expires(got.answer, record) }
}

/// A key that stood for another request all the while must have refused this one.
fn mismatch(facts: &Facts<'_>, got: &Got<'_>) -> Result<(), Fault> {
    let now = facts.at(got.index);
    let standings = facts.standings(got.sent.label, got.since, got.index);
    let other = |standing: &Option<&Standing>| {
        standing.is_some_and(|standing| {
            standing.variant.is_some_and(|variant| variant != got.sent.variant)
                && (standing.state == State::InFlight || !standing.is_past(now))
        })
    };
    let tokens: Vec<Option<Token>> = standings.iter().map(|standing| standing.map(|standing| standing.token)).collect();
    let stood_all_along = standings.iter().all(other) && tokens.windows(2).all(|pair| pair[0] == pair[1]);
    // A slow store leaves the gate, or the client, without an answer of its own; and a route that fails open asks nobody.
    let refused = match got.answer.word() {
        "key-reused" | "store-unavailable" | "still-running" => true,
        // A gate goes by an attempt of its own until it knows how that ended, also where it has lost its record to another.
        "in-flight" | "released" | "upstream-unreachable" | "upstream-broken" | "upstream-timeout" => {
            facts.has_claimed(got.sent.life, got.sent.label, got.sent.variant, got.index)
        }
        _ => false,
    };
    let refused = refused || facts.failed_open(got.request) || misled(facts, got);
    if stood_all_along && !refused {
        return Err((Invariant::MismatchRefused, format!("the key stood for another request: {:?}", standings[0])));
    }
    Ok(())
}

/// Whether a gate goes by what it read before the record that stands was claimed, and may: a replay of what was purged
/// lately, or a hint of an attempt that has just ended. Both are what it would have said then. The second does not last, and
/// says nothing but to ask again; and the first is the price of memory.
fn misled(facts: &Facts<'_>, got: &Got<'_>) -> bool {
    let Got { sent, earliest, index, answer, .. } = got;
    match answer.word() {
        "replayed" | "response-not-stored" => {
            facts.believed(sent.label, *earliest).any(|standing| standing.variant == Some(sent.variant))
        }
        "in-flight" => facts.was_in_flight(sent.label, sent.variant, *earliest, *index),
        _ => false,
    }
}

/// Every answer of one record is the first.
fn identical<'a>(
    facts: &Facts<'_>,
    got: &Got<'a>,
    firsts: &mut BTreeMap<(Label, Origin), (Request, &'a Answer)>,
) -> Result<(), Fault> {
    if !matches!(got.answer.word(), "executed" | "unrecorded" | "recovered" | "replayed") {
        return Ok(());
    }
    let run = got.answer.serial().and_then(|serial| facts.runs.get(&serial));
    let run = run.and_then(|run| run.token).map(Origin::Run);
    let Some(origin) = got.answer.question().map(Origin::Books).or(run) else { return Ok(()) };
    let (first, answer) = *firsts.entry((got.sent.label, origin)).or_insert((got.request, got.answer));
    if as_given(answer) == as_given(got.answer) {
        return Ok(());
    }
    Err((Invariant::ReplayIdentical, format!("request {} got {:?}, this {:?}", first.0, answer, got.answer)))
}

/// Where the answer of a record comes from.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    Run(Token),
    Books(Question),
}

/// An answer without what may differ between the first time and the next.
fn as_given(answer: &Answer) -> (u16, &str, Vec<&(String, String)>, &[u8]) {
    let kept = |name: &str| {
        !matches!(name, "idempotency-status" | "idempotent-replayed" | "idempotency-expires" | "connection")
    };
    let headers = answer.headers.iter().filter(|(name, _)| kept(name)).collect();
    (answer.status, &answer.reason, headers, &answer.body)
}

/// `Idempotency-Expires` is when the record does.
fn expires(answer: &Answer, record: &Standing) -> Result<(), Fault> {
    let until = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_millis(EPOCH + record.until));
    match answer.header("idempotency-expires") {
        Some(told) if told == until => Ok(()),
        told => wrong(&format!("its record expires on {until}, and it says {told:?}")),
    }
}

/// Some record that stood while the request was there is as it says.
fn stood(facts: &Facts<'_>, got: &Got<'_>, fits: impl Fn(&Standing) -> bool) -> Result<(), Fault> {
    let standings = facts.standings(got.sent.label, got.since, got.index);
    let purged = facts.believed(got.sent.label, got.earliest);
    if standings
        .iter()
        .flatten()
        .copied()
        .chain(purged)
        .any(|standing| standing.variant == Some(got.sent.variant) && fits(standing))
    {
        return Ok(());
    }
    wrong(&format!("what stood is {standings:?}"))
}

/// An attempt for this very request is in flight, or was until just now; or it was claimed by this gate, which goes by what
/// it knows of it, and not by the record; or the upstream is asked about it.
fn in_flight(facts: &Facts<'_>, got: &Got<'_>) -> Result<(), Fault> {
    let Got { sent, earliest, index, .. } = got;
    let is_so = facts.was_in_flight(sent.label, sent.variant, *earliest, *index)
        || facts.has_claimed(sent.life, sent.label, sent.variant, *index)
        || facts.was_locked(sent.label, *earliest, *index)
        || may_be_asked(facts, sent.label, sent.variant, *earliest, *index)
        // It has asked the upstream itself, and the record is gone by then.
        || facts.questions.values().any(|asked| asked.request == Some(got.request) && asked.over.is_some());
    if is_so { Ok(()) } else { wrong("no attempt for such a request was in flight") }
}

/// An attempt for a request that fits was claimed before: where it runs, its own gate goes by that, and not by the record.
fn ever(facts: &Facts<'_>, got: &Got<'_>, fits: impl Fn(usize) -> bool) -> Result<(), Fault> {
    let standings = facts.standings(got.sent.label, 0, got.index);
    let waited = facts.all_waiting(got.sent.label, 0, got.index);
    let waited = waited.iter().flatten().map(|waiting| waiting.variant);
    if standings.iter().flatten().map(|standing| standing.variant).chain(waited).flatten().any(fits) {
        return Ok(());
    }
    wrong("no such request was claimed")
}

/// `Retry-After` is there, in whole seconds of at least one, where waiting helps; and only there.
fn retry_after(got: &Got<'_>, helps: bool) -> Result<(), Fault> {
    let told = got.answer.header("retry-after").map(str::parse::<u64>);
    match (told, helps) {
        (Some(Ok(1..)), true) | (None, false) => Ok(()),
        (told, _) => wrong(&format!("Retry-After is {told:?}")),
    }
}

fn wrong<T>(why: &str) -> Result<T, Fault> {
    Err((Invariant::AnswerFitsRecord, why.to_owned()))
}
