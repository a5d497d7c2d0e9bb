//! The shadow record: what a route with `mode = "observe"` keeps of a request. With it the route says what the next request with
//! the same key would have got under protection.
//!
//! A request is evaluated when it is over, and every request of the route is forwarded. So the first of two that is evaluated
//! is not always the first that came. Which of two requests that overlap counts as the retry does not matter to the numbers of
//! duplicates and of keys that ran again; what each of them would have got is exact only if both succeed.
//!
//! The stored form, before that of the record's head:
//!
//! | bytes | what |
//! |---|---|
//! | 1 | version: 1 |
//! | 1 | envelope: 0 |
//! | 1 | kept 0, tombstone 1, unknown 2 |
//! | 2 | the status of the answer; 0 where there is none |
//! | 8, 8, 8 | when it came, when it was over, until when it would answer retries |
//! | 1 | how many of its requests ran: 0, 1, or 2 for more |
//! | 1, 8 | whether its answer is known, and the digest of that; else zeros |

use bytes::Bytes;
use http::StatusCode;

use super::codec::{Answer, Content, Head, PLAIN, Reader, Unreadable, VERSION};
use super::credential::Proof;
use super::decide::{Decision, decide};
use super::policy::{InFlight, Policy};
use super::record::{AttemptToken, Record, State, Timestamp};

/// The request that would have claimed the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shadow {
    /// When it came and when it was over.
    pub span: Span,
    /// What the record would hold.
    pub outcome: ShadowOutcome,
    /// The status of its answer, where it had one.
    pub status: Option<StatusCode>,
    /// Until when the record would stand.
    pub until: Timestamp,
    /// How many requests with the key ran; 2 stands for more.
    pub runs: u8,
    /// A digest of the answer of the first that ran.
    pub answer: Option<[u8; 8]>,
}

/// From when to when a request was under way. Of two that began at one time, the one that was over first counts as the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    /// When all of it had come.
    pub began: Timestamp,
    /// When its answer was over.
    pub ended: Timestamp,
}

/// What a record would hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShadowOutcome {
    /// The answer.
    Kept,
    /// That there was an answer.
    Tombstone,
    /// That the outcome is unknown.
    Unknown,
}

/// Another run of a key that has run before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunAgain {
    /// Whether its answer is another than the first.
    pub differs: bool,
}

impl Span {
    fn overlaps(self, other: Self) -> bool {
        self.began < other.ended && other.began < self.ended
    }

    /// Whether it began while the other was under way.
    #[must_use]
    pub fn came_during(self, other: Self) -> bool {
        self.overlaps(other) && other < self
    }
}

impl Shadow {
    /// What another request with the key would have got. `head` is the record's; `is_same` and `proof` are as for [`decide`],
    /// which decides this too: by the record as it would have stood.
    #[must_use]
    pub fn decide(&self, policy: &Policy, head: &Head, other: Span, proof: Option<&Proof>, is_same: bool) -> Decision {
        let over = other.began.max(self.span.ended);
        // Who came later waits for who came first.
        let (first, later) = (self.span.min(other), self.span.max(other));
        let patience = match policy.in_flight {
            InFlight::Reject => later.began,
            InFlight::Wait(patience) => later.began.plus(patience),
        };
        let is_running = self.span.overlaps(other) && patience < first.ended;
        let (state, now, until, answer) = if is_running {
            (State::InFlight, later.began, first.ended, None)
        } else {
            let content =
                (self.outcome == ShadowOutcome::Kept).then(|| Content { body: Bytes::new(), trailers: Vec::new() });
            let status = self.status.unwrap_or(StatusCode::OK);
            let answer = Answer { status, reason: None, headers: Vec::new(), content }.encode();
            match self.outcome {
                ShadowOutcome::Kept | ShadowOutcome::Tombstone => (State::Completed, over, self.until, Some(answer)),
                ShadowOutcome::Unknown => (State::Unknown, over, self.until, None),
            }
        };
        let claimed_at = first.began;
        let record = Record { attempt: AttemptToken([0; 16]), state, claimed_at, until, head: Bytes::new(), answer };
        decide(now, policy, &record, Some(head), proof, is_same)
    }

    /// After another of its requests ran, with an answer of this digest; and what to say of it, where it was not the first.
    #[must_use]
    pub fn run_again(self, answer: Option<[u8; 8]>) -> (Self, Option<RunAgain>) {
        let differs = matches!((self.answer, answer), (Some(first), Some(again)) if first != again);
        let again = (self.runs == 1).then_some(RunAgain { differs });
        (Self { runs: (self.runs + 1).min(2), answer: self.answer.or(answer), ..self }, again)
    }

    /// The same, with the runs that another one has counted.
    #[must_use]
    pub fn with_runs_of(self, other: &Self) -> Self {
        Self { runs: other.runs, answer: other.answer, ..self }
    }

    /// The stored form, with the head of the record.
    #[must_use]
    pub fn encode(&self, head: &Head) -> Bytes {
        let outcome = match self.outcome {
            ShadowOutcome::Kept => 0,
            ShadowOutcome::Tombstone => 1,
            ShadowOutcome::Unknown => 2,
        };
        let head = head.encode();
        let mut out = Vec::with_capacity(39 + head.len());
        out.extend_from_slice(&[VERSION, PLAIN, outcome]);
        out.extend_from_slice(&self.status.map_or(0, |status| status.as_u16()).to_be_bytes());
        for time in [self.span.began, self.span.ended, self.until] {
            out.extend_from_slice(&time.0.to_be_bytes());
        }
        out.extend_from_slice(&[self.runs, u8::from(self.answer.is_some())]);
        out.extend_from_slice(&self.answer.unwrap_or_default());
        out.extend_from_slice(&head);
        out.into()
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// Another version of oncegate wrote it.
    pub fn decode(bytes: &Bytes) -> Result<(Self, Head), Unreadable> {
        let mut reader = Reader::new(bytes);
        let [version, envelope, outcome] = reader.array()?;
        let status = match u16::from_be_bytes(reader.array()?) {
            0 => None,
            status => Some(StatusCode::from_u16(status).map_err(|_| Unreadable)?),
        };
        let mut time = || reader.array().map(|bytes| Timestamp(u64::from_be_bytes(bytes)));
        let (began, ended, until) = (time()?, time()?, time()?);
        let [runs] = reader.array()?;
        let is_answered = reader.flag()?;
        let answer = Some(reader.array()?).filter(|_| is_answered);
        let head = Head::decode(&reader.rest())?;
        let outcome = match (version, envelope, outcome) {
            (VERSION, PLAIN, 0) => ShadowOutcome::Kept,
            (VERSION, PLAIN, 1) => ShadowOutcome::Tombstone,
            (VERSION, PLAIN, 2) => ShadowOutcome::Unknown,
            _ => return Err(Unreadable),
        };
        Ok((Self { span: Span { began, ended }, outcome, status, until, runs, answer }, head))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::Method;
    use proptest::prelude::*;

    use super::*;
    use crate::idempotency::decide::RunningAttempt;
    use crate::idempotency::fingerprint::{Fingerprint, Recipe};
    use crate::idempotency::key::Key;
    use crate::idempotency::recovery::Recovery;

    fn head() -> Head {
        let fingerprint = Fingerprint { recipe: Recipe::default(), digest: [1; 32] };
        Head::new(fingerprint, Method::POST, "/charges", &Key::from_fingerprint(&[2; 32]))
    }

    fn span(began: u64, ended: u64) -> Span {
        Span { began: Timestamp(began), ended: Timestamp(ended) }
    }

    fn shadow(outcome: ShadowOutcome) -> Shadow {
        Shadow {
            span: span(1000, 2000),
            outcome,
            status: Some(StatusCode::CREATED),
            until: Timestamp(10_000),
            runs: 1,
            answer: None,
        }
    }

    fn meets(shadow: &Shadow, policy: &Policy, other: Span) -> Decision {
        shadow.decide(policy, &head(), other, None, true)
    }

    #[test]
    fn a_retry_would_have_got_what_the_record_would_have_said() {
        let policy = Policy::default();
        let kept = |other| meets(&shadow(ShadowOutcome::Kept), &policy, other);
        assert!(matches!(kept(span(2000, 2100)), Decision::Replay(answer) if answer.status == StatusCode::CREATED));
        assert_eq!(
            meets(&shadow(ShadowOutcome::Tombstone), &policy, span(2000, 2100)),
            Decision::NotStored(StatusCode::CREATED)
        );
        assert_eq!(meets(&shadow(ShadowOutcome::Unknown), &policy, span(2000, 2100)), Decision::Unknown);
        let running = |elapsed| {
            let lease_left = Some(Duration::from_secs(1) - elapsed);
            Decision::InFlight(RunningAttempt { elapsed, lease_left })
        };
        assert_eq!(kept(span(1500, 1600)), running(Duration::from_millis(500)));
        assert_eq!(kept(span(9_999, 10_500)), kept(span(2000, 2100)));
        assert_eq!(kept(span(10_000, 10_500)), Decision::Supersede, "it would have expired");
        let retry = Policy { recovery: Recovery::Retry, ..Policy::default() };
        assert_eq!(meets(&shadow(ShadowOutcome::Unknown), &retry, span(2000, 2100)), Decision::Supersede);
        let differs =
            |proof, is_same| shadow(ShadowOutcome::Kept).decide(&policy, &head(), span(1500, 1600), proof, is_same);
        assert_eq!(differs(None, false), Decision::Reused);
        assert_eq!(differs(Some(&Proof([3; 32])), true), Decision::CallerDiffers);
    }

    #[test]
    fn who_would_have_waited_gets_the_answer_if_it_is_there_in_time() {
        let wait = |millis| Policy { in_flight: InFlight::Wait(Duration::from_millis(millis)), ..Policy::default() };
        let kept = |policy: &Policy| meets(&shadow(ShadowOutcome::Kept), policy, span(1500, 1600));
        assert!(matches!(kept(&wait(500)), Decision::Replay(_)));
        assert!(matches!(kept(&wait(499)), Decision::InFlight(_)));
    }

    #[test]
    fn who_came_first_is_the_one_that_would_have_run() {
        let first = Shadow { span: span(1000, 3000), ..shadow(ShadowOutcome::Kept) };
        let second = Shadow { span: span(1500, 1600), runs: 2, answer: Some([4; 8]), ..shadow(ShadowOutcome::Unknown) };
        assert!(second.span.came_during(first.span) && !first.span.came_during(second.span));
        assert!(!span(3000, 3100).came_during(first.span), "it came later");
        let stands = first.with_runs_of(&second);
        assert_eq!((stands.span, stands.outcome, stands.runs), (first.span, ShadowOutcome::Kept, 2));
        assert!(matches!(meets(&stands, &Policy::default(), span(2000, 2100)), Decision::InFlight(_)));
    }

    #[test]
    fn a_key_that_runs_again_is_told_once() {
        let first = Shadow { answer: Some([1; 8]), ..shadow(ShadowOutcome::Kept) };
        let (second, again) = first.run_again(Some([2; 8]));
        assert_eq!(again, Some(RunAgain { differs: true }));
        assert_eq!(second.run_again(Some([3; 8])).1, None);
        assert_eq!(first.run_again(Some([1; 8])).1, Some(RunAgain { differs: false }));
        assert_eq!(first.run_again(None).1, Some(RunAgain { differs: false }), "nobody knows");
        let unknown = Shadow { runs: 0, ..shadow(ShadowOutcome::Unknown) };
        let (ran, again) = unknown.run_again(Some([1; 8]));
        assert_eq!((ran.runs, ran.answer, again), (1, Some([1; 8]), None));
    }

    proptest! {
        /// Of two requests that overlap one would have run and the other met it, whichever is evaluated first.
        #[test]
        fn the_order_of_evaluation_does_not_matter(
            one in (0..50u64, 0..50u64), other in (0..50u64, 0..50u64), patience in 0..60u64,
        ) {
            let wait = InFlight::Wait(Duration::from_millis(patience));
            let spans = [one, other].map(|(began, took)| span(1000 + began, 1000 + began + took));
            for in_flight in [InFlight::Reject, wait] {
                let policy = Policy { in_flight, ..Policy::default() };
                let met = |first: Span, second: Span| {
                    let shadow = Shadow { span: first, ..shadow(ShadowOutcome::Kept) };
                    matches!(meets(&shadow, &policy, second), Decision::InFlight(_))
                };
                prop_assert_eq!(met(spans[0], spans[1]), met(spans[1], spans[0]));
            }
        }

        #[test]
        fn the_stored_form_is_read_back(
            times in any::<[u64; 3]>(), runs in 0..3u8, answer in any::<Option<[u8; 8]>>(), status in 0..900u16, outcome in 0..3,
        ) {
            let shadow = Shadow {
                span: span(times[0], times[1]),
                outcome: [ShadowOutcome::Kept, ShadowOutcome::Tombstone, ShadowOutcome::Unknown][outcome as usize],
                status: StatusCode::from_u16(status + 100).ok().filter(|_| status > 0),
                until: Timestamp(times[2]),
                runs,
                answer,
            };
            prop_assert_eq!(Shadow::decode(&shadow.encode(&head())), Ok((shadow, head())));
        }

        #[test]
        fn what_another_version_wrote_is_told_apart(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let bytes = Bytes::from(bytes);
            if let Ok((shadow, head)) = Shadow::decode(&bytes) {
                prop_assert_eq!(shadow.encode(&head).len(), bytes.len());
            }
        }
    }
}
