//! How an attempt may have ended, for all that its gate can know, and what the policy makes of that.

use oncegate::idempotency::settle::{Control, Ending, Verdict, settle, settle_again};

use super::facts::{Facts, Reply};
use crate::history::{Answer, Label, Token};

/// A way in which an attempt may have ended.
pub struct Possible<'a> {
    pub verdict: Verdict,
    /// The upstream's answer, where that is how it ended.
    pub answer: Option<&'a Answer>,
    pub what: &'static str,
}

/// What may become of the record of an attempt that is settled at `index`.
pub fn possible<'a>(facts: &Facts<'a>, token: Token, label: Label, index: usize) -> Vec<Possible<'a>> {
    let policy = facts.setup.policy(label);
    let (life, timeout) = (token.life(), millis(facts.setup.timeout_of(label)));
    // What an attempt did not do whose request is sent again, the one before it may have done.
    let is_again = facts.resent(token).is_some();
    let settle = if is_again { settle_again } else { settle };
    let verdict = |ending| settle(policy, ending, &Control::default(), None);
    let bare = |verdict, what| Possible { verdict, answer: None, what };
    let Some(written) = facts.writes.get(&token).map(|writes| writes[0]).filter(|written| *written < index) else {
        let unsent = if is_again { Verdict::Hold } else { Verdict::Release };
        let mut possible = vec![bare(verdict(Ending::Unreachable), "nothing was sent"), bare(unsent, "it never began")];
        if let Some(claimed) = claimed(facts, token, index) {
            // It was handed to a connection that took nothing of it.
            if facts.at(index) >= facts.at(claimed) + timeout {
                possible.push(bare(verdict(Ending::Timeout), "nothing moved in time"));
            }
            if facts.was_cut(life, claimed, index) {
                possible.push(bare(verdict(Ending::Broken), "its connection was reset"));
            }
        }
        if facts.has_ended(life, index) {
            possible.push(bare(Verdict::Hold, "its gate was told to end"));
        }
        return possible;
    };
    let mut possible = Vec::new();
    for Reply { answer, replied, .. } in facts.replies.get(&token).into_iter().flatten().filter(|it| it.begun < index) {
        let whole = replied.is_some_and(|replied| replied < index);
        let large = answer.body.len() as u64 > policy.max_response_body;
        if whole || large {
            let verdict = settle(policy, Ending::Answered(answer.status), &control(answer), None);
            possible.push(Possible { verdict, answer: Some(answer), what: "the upstream answered" });
        }
    }
    if let Some((_, serial)) = facts.kept.get(&token).filter(|(kept, _)| *kept < index) {
        let verdict = Verdict::Complete { ttl: policy.ttl, keep_body: true };
        let answer = facts.given.get(serial).copied();
        possible.push(Possible { verdict, answer, what: "the upstream completed it" });
    }
    if facts.has_broken(token, index) || facts.was_cut(life, written, index) {
        possible.push(bare(verdict(Ending::Broken), "the connection broke"));
    }
    let claimed = claimed(facts, token, index).unwrap_or(written);
    if facts.at(index) >= facts.at(claimed) + timeout {
        possible.push(bare(verdict(Ending::Timeout), "the time was up"));
    }
    if facts.has_ended(life, index) {
        possible.push(bare(Verdict::Hold, "its gate was told to end"));
    }
    possible
}

/// What the upstream says of its answer.
pub fn control(answer: &Answer) -> Control {
    let lines = answer.headers.iter().map(|(name, value)| {
        (http::HeaderName::try_from(name.as_str()).unwrap(), http::HeaderValue::try_from(value.as_str()).unwrap())
    });
    Control::read(&lines.collect())
}

pub fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap()
}

fn claimed(facts: &Facts<'_>, token: Token, index: usize) -> Option<usize> {
    facts.claims.get(&token)?.iter().map(|(claimed, _)| *claimed).rfind(|claimed| *claimed < index)
}
