//! What happened to some keys while everything was made to fail, and whether that may be: a pure judgement.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[cfg(test)]
mod tests;

/// All of it. Times are since the beginning, by one clock.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub tries: Vec<Try>,
    pub runs: Vec<Run>,
    /// What each key came to in the end, when everything worked again.
    pub ends: Vec<End>,
}

/// A request of a client.
#[derive(Clone, Debug)]
pub struct Try {
    pub key: String,
    pub began: Duration,
    pub ended: Duration,
    /// Nothing where there was no whole answer.
    pub answer: Option<Answer>,
}

/// A request that the upstream got.
#[derive(Clone, Debug)]
pub struct Run {
    pub key: String,
    /// What stood in `Idempotency-Attempt`.
    pub attempt: String,
    pub began: Duration,
    /// When it had its answer to send; nothing where it never had.
    pub ended: Option<Duration>,
    pub answer: Said,
    /// Whether the answer releases its key, by the gate's policy.
    pub releases: bool,
    /// Whether the claim of this attempt stood in the database while this ran; nothing where that could not be asked.
    pub was_claimed: Option<bool>,
}

/// An answer to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// `Idempotency-Status`.
    pub word: String,
    pub said: Said,
}

/// What a replay repeats of an answer: status and all the upstream's headers, and the body.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Said {
    pub status: u16,
    pub head: Vec<String>,
    pub body: Vec<u8>,
}

/// What a key came to.
#[derive(Clone, Debug)]
pub struct End {
    pub key: String,
    /// The answer to one more request; nothing where it never got one that is final.
    pub answer: Option<Answer>,
    /// The record's state in the database: `in-flight`, `completed`, `unknown`; nothing where there is no record.
    pub state: Option<String>,
    /// The record's attempt in the database.
    pub attempt: Option<String>,
}

/// What must not be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wrong {
    /// Two runs for one claim: the second began before the first had released the key.
    RanTwice { key: String },
    /// Two runs under one token.
    TokenUsedTwice { key: String },
    /// It ran without a claim in the database.
    RanWithoutClaim { key: String },
    /// The record in the end is not that of the last run.
    RecordOfAnother { key: String },
    /// An answer that no run gave, or none that had begun.
    AnswerFromNowhere { key: String, body: Vec<u8> },
    /// One key, two answers that were to last.
    TwoAnswers { key: String },
    /// A second request of a key was told that it was the first.
    ExecutedTwice { key: String },
    /// A client has the answer, and a later one is told that nobody knows.
    Lost { key: String },
    /// In the end there was no answer that is final.
    NeverAnswered { key: String },
    /// The last answer and the record in the database do not fit.
    RecordDoesNotFit { key: String, state: Option<String> },
    /// An answer that a gate never gives here.
    Strange { key: String, word: String, status: u16 },
}

impl Answer {
    /// Whether it is the upstream's.
    fn is_upstreams(&self) -> bool {
        ["executed", "replayed", "released", "unrecorded"].contains(&self.word.as_str())
    }

    /// Whether it says that it is kept.
    fn is_kept(&self) -> bool {
        ["executed", "replayed"].contains(&self.word.as_str())
    }
}

impl End {
    /// The state of a record of which its last answer tells; nothing where that is not final.
    fn fitting(&self) -> Option<&'static str> {
        match self.answer.as_ref()?.word.as_str() {
            "replayed" | "executed" => Some("completed"),
            "outcome-unknown" => Some("unknown"),
            _ => None,
        }
    }

    /// Whether its last answer tells of the record that there is.
    pub fn fits(&self) -> bool {
        self.state.as_deref() == self.fitting()
    }
}

/// Everything about one key, in the order of time.
#[derive(Default)]
struct Facts<'a> {
    tries: Vec<&'a Try>,
    runs: Vec<&'a Run>,
    end: Option<&'a End>,
}

/// Everything that must not be, in the order of keys.
pub fn judge(history: &History) -> Vec<Wrong> {
    let mut keys: BTreeMap<&str, Facts> = BTreeMap::new();
    for one in &history.tries {
        keys.entry(&one.key).or_default().tries.push(one);
    }
    for run in &history.runs {
        keys.entry(&run.key).or_default().runs.push(run);
    }
    for end in &history.ends {
        keys.entry(&end.key).or_default().end = Some(end);
    }
    let mut wrong = Vec::new();
    let mut tokens = BTreeSet::new();
    for (key, mut facts) in keys {
        let key = key.to_owned();
        facts.tries.sort_by_key(|one| one.ended);
        facts.runs.sort_by_key(|run| run.began);
        if facts.runs.iter().filter(|run| !tokens.insert(&run.attempt)).count() > 0 {
            wrong.push(Wrong::TokenUsedTwice { key: key.clone() });
        }
        judge_runs(&key, &facts, &mut wrong);
        judge_answers(&key, &facts, &mut wrong);
        judge_end(&key, &facts, &mut wrong);
    }
    wrong
}

fn judge_runs(key: &str, facts: &Facts, wrong: &mut Vec<Wrong>) {
    let may_follow = |first: &Run, second: &Run| first.releases && first.ended.is_some_and(|end| end <= second.began);
    if facts.runs.windows(2).any(|pair| !may_follow(pair[0], pair[1])) {
        wrong.push(Wrong::RanTwice { key: key.to_owned() });
    }
    if facts.runs.iter().any(|run| run.was_claimed == Some(false)) {
        wrong.push(Wrong::RanWithoutClaim { key: key.to_owned() });
    }
}

fn judge_answers(key: &str, facts: &Facts, wrong: &mut Vec<Wrong>) {
    let last = facts.end.and_then(|end| end.answer.as_ref());
    let all = facts.tries.iter().filter_map(|one| Some((one.answer.as_ref()?, one.ended)));
    let all: Vec<(&Answer, Duration)> = all.chain(last.map(|answer| (answer, Duration::MAX))).collect();
    for (answer, at) in &all {
        if answer.is_upstreams() {
            let gave = |run: &&Run| run.answer == answer.said && run.began <= *at && run.releases != answer.is_kept();
            let of_run = |run: &&Run| answer.word == "unrecorded" && run.answer == answer.said && run.began <= *at;
            if !facts.runs.iter().any(|run| gave(run) || of_run(run)) {
                wrong.push(Wrong::AnswerFromNowhere { key: key.to_owned(), body: answer.said.body.clone() });
            }
        } else if !is_known(answer) {
            let (word, status) = (answer.word.clone(), answer.said.status);
            wrong.push(Wrong::Strange { key: key.to_owned(), word, status });
        }
    }
    let kept: BTreeSet<&Said> =
        all.iter().filter(|(answer, _)| answer.is_kept()).map(|(answer, _)| &answer.said).collect();
    if kept.len() > 1 {
        wrong.push(Wrong::TwoAnswers { key: key.to_owned() });
    }
    if all.iter().filter(|(answer, _)| answer.word == "executed").count() > 1 {
        wrong.push(Wrong::ExecutedTwice { key: key.to_owned() });
    }
    // Who asked after somebody had the answer must have it too. Nobody may be told that the outcome is unknown whose
    // request began then.
    let since = facts.tries.iter().filter(|one| one.answer.as_ref().is_some_and(Answer::is_kept)).map(|one| one.ended);
    if let Some(since) = since.min() {
        let loses = |answer: Option<&Answer>| answer.is_some_and(|answer| answer.word == "outcome-unknown");
        let later = facts.tries.iter().any(|one| one.began >= since && loses(one.answer.as_ref()));
        if later || last.is_some_and(|answer| answer.word != "replayed") {
            wrong.push(Wrong::Lost { key: key.to_owned() });
        }
    }
}

/// Whether it is one of the gate's own answers that may come up while everything fails. The upstream here neither breaks
/// off nor is it late.
fn is_known(answer: &Answer) -> bool {
    let known = [
        (202, "accepted"),
        (409, "in-flight"),
        (409, "outcome-unknown"),
        (503, "store-unavailable"),
        (503, "overloaded"),
    ];
    known.contains(&(answer.said.status, &answer.word))
}

fn judge_end(key: &str, facts: &Facts, wrong: &mut Vec<Wrong>) {
    let Some(end) = facts.end else { return wrong.push(Wrong::NeverAnswered { key: key.to_owned() }) };
    let Some(fitting) = end.fitting() else { return wrong.push(Wrong::NeverAnswered { key: key.to_owned() }) };
    if !end.fits() {
        wrong.push(Wrong::RecordDoesNotFit { key: key.to_owned(), state: end.state.clone() });
    }
    if let Some(run) = facts.runs.last()
        && end.attempt.as_ref() != Some(&run.attempt)
        // A claim after a release, whose attempt never came to the upstream.
        && !(run.releases && fitting == "unknown")
    {
        wrong.push(Wrong::RecordOfAnother { key: key.to_owned() });
    }
}
