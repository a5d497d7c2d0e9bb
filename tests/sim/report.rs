//! What a failure shows.

use std::fmt::Write;

use crate::check::Violation;
use crate::history::{Entry, Event, Label, Question, Request};
use crate::world::Run;

/// How many entries after the one where it shows are told.
const AFTER: usize = 8;

/// The seed, what does not hold, what happened to the key that it is about, and how to see all of it.
pub fn report(seed: u64, test: &str, run: &Run, violations: &[Violation]) -> String {
    let mut text = String::new();
    let Some(first) = violations.first() else { return text };
    let _ = writeln!(text, "seed {seed}: {first}");
    if violations.len() > 1 {
        let _ = writeln!(text, "({} more follow from it, or stand beside it)", violations.len() - 1);
    }
    let end = (first.index + AFTER).min(run.history.len());
    for (index, entry) in run.history.iter().enumerate().take(end) {
        if first.label.is_none_or(|label| concerns(entry, label, &run.history)) {
            let mark = if index == first.index { ">" } else { " " };
            let _ = writeln!(text, "{mark}{index:>4} {entry}");
        }
    }
    let _ = writeln!(text, "All of it: {}", command(seed, test));
    text
}

/// How to run a seed again.
pub fn command(seed: u64, test: &str) -> String {
    format!("ONCEGATE_SIM_SEED={seed} cargo test --test sim -- --exact --nocapture {test}")
}

/// The whole history of a run, with what does not hold.
pub fn whole(run: &Run, violations: &[Violation]) -> String {
    let mut text = String::new();
    for (route, policy) in run.setup.policies.iter().enumerate() {
        let _ = writeln!(text, "{}: {policy:?}", crate::setup::PATHS[route]);
    }
    let _ = writeln!(
        text,
        "settle_timeout {:?}, timeouts {:?}, connect_timeout {:?}, client_timeout {:?}, under way for {:?} at most",
        run.setup.settle_timeout,
        run.setup.timeouts(),
        run.setup.connect_timeout,
        run.setup.client_timeout,
        run.setup.underway
    );
    for (index, entry) in run.history.iter().enumerate() {
        let _ = writeln!(text, "{index:>5} {entry}");
    }
    for violation in violations {
        let _ = writeln!(text, "{violation}");
    }
    text
}

/// Whether an entry tells something of a key, or of the gates.
fn concerns(entry: &Entry, label: Label, history: &[Entry]) -> bool {
    let by_request = |request: Request| {
        history.iter().any(|entry| {
            matches!(&entry.event, Event::Sent { request: own, label: about, .. } if *own == request && *about == label)
        })
    };
    let by_token = |token: &Option<crate::history::Token>| {
        history.iter().any(|entry| match &entry.event {
            Event::Wrote { token: own, request, .. } => own == token && by_request(*request),
            _ => false,
        })
    };
    let by_question = |question: Question| {
        let asks = |entry: &Entry| matches!(&entry.event, Event::Asked { question: own, label: about, .. } if *own == question && *about == label);
        history.iter().any(asks)
    };
    match &entry.event {
        Event::Sent { label: own, .. }
        | Event::Changed { label: own, .. }
        | Event::Queued { label: own, .. }
        | Event::Polls { label: own, .. }
        | Event::Locked { about: own, .. }
        | Event::Asked { label: own, .. }
        | Event::Executed { label: own, .. } => *own == label,
        Event::Said { question, .. } | Event::Dropped { question } => by_question(*question),
        Event::Kept { token, .. } => by_token(&Some(*token)),
        Event::Told { label: own, .. } => *own == Some(label),
        Event::Answered { request, .. }
        | Event::Lost { request }
        | Event::Left { request }
        | Event::Hung { request }
        | Event::Honoured { request, .. }
        | Event::Wrote { request, .. } => by_request(*request),
        Event::Replying { token, .. } | Event::Replied { token, .. } | Event::Broke { token } => by_token(token),
        Event::Polled { poll, .. } => history
            .iter()
            .any(|entry| matches!(&entry.event, Event::Polls { poll: own, label: about, .. } if own == poll && *about == label)),
        Event::Closed { .. } | Event::Recalled { .. } => false,
        Event::Born { .. }
        | Event::Drained { .. }
        | Event::Died { .. }
        | Event::Fault { .. }
        | Event::Cache { .. }
        | Event::Cut { .. }
        | Event::Paused { .. }
        | Event::Calm => true,
    }
}
