//! Histories that are as they should be, and each with one thing that must not be.

use super::*;

fn at(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn said(body: &str) -> Said {
    Said { status: 200, head: vec!["content-length: 1".into()], body: body.into() }
}

fn of_gate(word: &str, status: u16) -> Answer {
    Answer { word: word.into(), said: Said { status, head: Vec::new(), body: b"{}".to_vec() } }
}

fn of_upstream(word: &str, body: &str) -> Answer {
    Answer { word: word.into(), said: said(body) }
}

fn asked(began: u64, ended: u64, answer: Option<Answer>) -> Try {
    Try { key: "k".into(), began: at(began), ended: at(ended), answer }
}

fn run(attempt: &str, began: u64, ended: u64, body: &str) -> Run {
    Run {
        key: "k".into(),
        attempt: attempt.into(),
        began: at(began),
        ended: Some(at(ended)),
        answer: said(body),
        releases: false,
        was_claimed: Some(true),
    }
}

/// A run that releases its key.
fn released(attempt: &str, began: u64, ended: u64, body: &str) -> Run {
    Run { releases: true, ..run(attempt, began, ended, body) }
}

fn end(answer: Option<Answer>, state: &str, attempt: &str) -> End {
    End { key: "k".into(), answer, state: Some(state.into()), attempt: Some(attempt.into()) }
}

/// A key that ran once, and whose answer was lost once and replayed twice.
fn good() -> History {
    History {
        tries: vec![
            asked(0, 20, None),
            asked(5, 6, Some(of_gate("in-flight", 409))),
            asked(15, 16, Some(of_gate("store-unavailable", 503))),
            asked(21, 22, Some(of_upstream("replayed", "a"))),
        ],
        runs: vec![run("t1", 1, 19, "a")],
        ends: vec![end(Some(of_upstream("replayed", "a")), "completed", "t1")],
    }
}

/// A key whose outcome nobody knows.
fn unknown() -> History {
    History {
        tries: vec![asked(0, 20, None), asked(21, 22, Some(of_gate("outcome-unknown", 409)))],
        runs: vec![Run { ended: None, ..run("t1", 1, 0, "a") }],
        ends: vec![end(Some(of_gate("outcome-unknown", 409)), "unknown", "t1")],
    }
}

/// A key that was released once, and ran again.
fn again() -> History {
    History {
        tries: vec![
            asked(0, 20, Some(of_upstream("released", "a"))),
            asked(21, 30, Some(of_upstream("executed", "b"))),
        ],
        runs: vec![released("t1", 1, 19, "a"), run("t2", 22, 29, "b")],
        ends: vec![end(Some(of_upstream("replayed", "b")), "completed", "t2")],
    }
}

fn key() -> String {
    "k".into()
}

#[test]
fn what_is_as_it_should_be_passes() {
    assert_eq!(judge(&History::default()), []);
    assert_eq!(judge(&good()), []);
    assert_eq!(judge(&unknown()), []);
    assert_eq!(judge(&again()), []);
    // The store was away when the first had its answer, and its replica settled later.
    let mut late = good();
    late.tries[0].answer = Some(of_upstream("unrecorded", "a"));
    late.tries.push(asked(21, 22, Some(of_gate("outcome-unknown", 409))));
    assert_eq!(judge(&late), []);
    // It never ran, and does so in the end.
    let mut never = good();
    never.tries.truncate(1);
    never.runs = vec![run("t9", 100, 101, "a")];
    never.ends[0] = end(Some(of_upstream("executed", "a")), "completed", "t9");
    assert_eq!(judge(&never), []);
    // Its second claim was lost before it came to the upstream.
    let mut lost = again();
    lost.tries.pop();
    lost.runs.pop();
    lost.ends[0] = end(Some(of_gate("outcome-unknown", 409)), "unknown", "t2");
    assert_eq!(judge(&lost), []);
    // The database could not be asked.
    let mut dark = good();
    dark.runs[0].was_claimed = None;
    assert_eq!(judge(&dark), []);
}

#[test]
fn a_second_run() {
    let mut history = good();
    history.runs.push(run("t2", 30, 31, "a"));
    history.ends[0].attempt = Some("t2".into());
    assert_eq!(judge(&history), [Wrong::RanTwice { key: key() }]);
    // Also where the first did not answer, or had not yet.
    let mut history = unknown();
    history.runs.insert(0, Run { ended: None, ..released("t0", 0, 0, "a") });
    assert_eq!(judge(&history), [Wrong::RanTwice { key: key() }]);
    let mut history = again();
    history.runs[0].ended = Some(at(23));
    assert_eq!(judge(&history), [Wrong::RanTwice { key: key() }]);
}

#[test]
fn a_token_that_was_used() {
    let mut history = again();
    history.runs[0].attempt = "t2".into();
    assert_eq!(judge(&history), [Wrong::TokenUsedTwice { key: key() }]);
    // By another key as well.
    let mut history = good();
    let mut other = good();
    other.tries.iter_mut().for_each(|one| one.key = "l".into());
    other.runs.iter_mut().for_each(|run| run.key = "l".into());
    other.ends.iter_mut().for_each(|end| end.key = "l".into());
    history.tries.extend(other.tries);
    history.runs.extend(other.runs);
    history.ends.extend(other.ends);
    assert_eq!(judge(&history), [Wrong::TokenUsedTwice { key: "l".into() }]);
}

#[test]
fn a_run_without_its_claim() {
    let mut history = good();
    history.runs[0].was_claimed = Some(false);
    assert_eq!(judge(&history), [Wrong::RanWithoutClaim { key: key() }]);
    let mut history = good();
    history.ends[0].attempt = Some("t7".into());
    assert_eq!(judge(&history), [Wrong::RecordOfAnother { key: key() }]);
}

#[test]
fn an_answer_that_no_run_gave() {
    let from_nowhere = |body: &str| Wrong::AnswerFromNowhere { key: key(), body: body.into() };
    let mut history = good();
    history.tries[3].answer = Some(of_upstream("replayed", "b"));
    assert_eq!(judge(&history), [from_nowhere("b"), Wrong::TwoAnswers { key: key() }]);
    // A header is missing.
    let mut history = good();
    history.ends[0].answer.as_mut().unwrap().said.head.clear();
    assert_eq!(judge(&history), [from_nowhere("a"), Wrong::TwoAnswers { key: key() }]);
    // Before anything ran.
    let mut history = good();
    history.runs[0].began = at(23);
    assert_eq!(judge(&history), [from_nowhere("a")]);
    // What releases is not replayed, and what is kept does not release.
    let mut history = again();
    history.tries[0].answer = Some(of_upstream("replayed", "a"));
    assert!(judge(&history).contains(&from_nowhere("a")));
    let mut history = again();
    history.tries[1].answer = Some(of_upstream("released", "b"));
    assert_eq!(judge(&history), [from_nowhere("b")]);
}

#[test]
fn two_answers_that_were_to_last() {
    let mut history = again();
    history.runs[0].releases = false;
    history.tries[0].answer = Some(of_upstream("executed", "a"));
    let wrong = judge(&history);
    assert!(wrong.contains(&Wrong::TwoAnswers { key: key() }), "{wrong:?}");
    assert!(wrong.contains(&Wrong::ExecutedTwice { key: key() }), "{wrong:?}");
    assert!(wrong.contains(&Wrong::RanTwice { key: key() }), "{wrong:?}");
    let mut history = good();
    history.tries[0].answer = Some(of_upstream("executed", "a"));
    history.tries[3].answer = Some(of_upstream("executed", "a"));
    assert_eq!(judge(&history), [Wrong::ExecutedTwice { key: key() }]);
}

#[test]
fn an_answer_that_is_lost() {
    let mut history = good();
    history.tries.push(asked(23, 24, Some(of_gate("outcome-unknown", 409))));
    assert_eq!(judge(&history), [Wrong::Lost { key: key() }]);
    // Who asked before may be told so.
    history.tries[4].began = at(21);
    assert_eq!(judge(&history), []);
    let mut history = good();
    history.ends[0] = end(Some(of_gate("outcome-unknown", 409)), "unknown", "t1");
    assert_eq!(judge(&history), [Wrong::Lost { key: key() }]);
}

#[test]
fn a_key_that_never_answers() {
    for answer in [None, Some(of_gate("in-flight", 409)), Some(of_gate("store-unavailable", 503))] {
        let mut history = unknown();
        history.ends[0].answer = answer;
        assert_eq!(judge(&history), [Wrong::NeverAnswered { key: key() }]);
    }
    let mut history = good();
    history.ends.clear();
    assert_eq!(judge(&history), [Wrong::NeverAnswered { key: key() }]);
}

#[test]
fn a_record_that_does_not_fit() {
    let mut history = unknown();
    history.ends[0].state = Some("in-flight".into());
    assert_eq!(judge(&history), [Wrong::RecordDoesNotFit { key: key(), state: Some("in-flight".into()) }]);
    let mut history = good();
    history.ends[0].state = None;
    assert_eq!(judge(&history), [Wrong::RecordDoesNotFit { key: key(), state: None }]);
}

#[test]
fn an_answer_that_has_no_place_here() {
    for (word, status) in [("upstream-broken", 502), ("key-reused", 422), ("", 500), ("in-flight", 500)] {
        let mut history = good();
        history.tries[1].answer = Some(of_gate(word, status));
        assert_eq!(judge(&history), [Wrong::Strange { key: key(), word: word.into(), status }]);
    }
}
