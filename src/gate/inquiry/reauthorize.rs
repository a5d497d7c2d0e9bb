//! Asks the upstream whether a caller may still have a recorded answer, as `reauthorize` says: before each replay, and never
//! before a request that runs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::StatusCode;
use tokio::sync::OnceCell;
use tokio::time::{Instant, sleep_until, timeout};

use super::Question;
use crate::gate::answer::{Client, RETRY_SOON, Reply};
use crate::gate::claim::protected::ProtectedRequest;
use crate::http::problem::Problem;
use crate::http::upstream;
use crate::idempotency::codec::Answer;
use crate::idempotency::decide::Decision;
use crate::idempotency::record::Timestamp;
use crate::telemetry::outcome::{Code, Outcome};

/// How long one question speaks for equal ones, from when it was asked.
const SHARED_FOR: Duration = Duration::from_secs(1);

/// The most questions that are shared at a time; others are asked by each request for itself.
const MOST_SHARED: usize = 1024;

/// The largest refusal that is shared, in bytes.
const LARGEST_SHARED: usize = 16 << 10;

/// What the upstream says of a replay.
#[derive(Clone)]
enum ReplayPermission {
    /// The caller may have it.
    Granted,
    /// It may not, and gets this.
    Refused(Arc<Answer>),
    /// The upstream did not say.
    Unclear(Problem),
}

/// The questions of the last second, by what was asked and with which headers.
#[derive(Clone, Default)]
pub(in crate::gate) struct Questions(Arc<Mutex<HashMap<[u8; 32], Shared>>>);

#[derive(Clone)]
struct Shared {
    asked: Instant,
    said: Arc<OnceCell<ReplayPermission>>,
}

impl Questions {
    /// The question of this digest: one that was asked less than a second ago, or a new one.
    fn shared(&self, digest: [u8; 32]) -> Shared {
        let mut questions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = questions.get(&digest).filter(|known| known.asked.elapsed() < SHARED_FOR) {
            return known.clone();
        }
        let new = Shared { asked: Instant::now(), said: Arc::default() };
        if questions.len() < MOST_SHARED {
            questions.insert(digest, new.clone());
            let (all, new) = (self.clone(), new.clone());
            tokio::spawn(async move {
                sleep_until(new.asked + SHARED_FOR).await;
                all.forget(&digest, &new);
            });
        }
        new
    }

    /// Shares this question no longer. Another one may have taken its place.
    fn forget(&self, digest: &[u8; 32], question: &Shared) {
        let mut questions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if questions.get(digest).is_some_and(|known| Arc::ptr_eq(&known.said, &question.said)) {
            questions.remove(digest);
        }
    }
}

impl ProtectedRequest {
    /// Whether the upstream is asked before this request gets what a decision means: the answer of an earlier one, or that it
    /// was not kept.
    pub(in crate::gate) fn needs_permission(&self, decision: &Decision) -> bool {
        self.policy().reauthorize.is_some() && matches!(decision, Decision::Replay(_) | Decision::NotStored(_))
    }

    /// The reply that a decision means, by a record that stands until then, once the upstream has let it through where it is
    /// asked.
    pub(in crate::gate) async fn permitted_reply(&self, decision: Decision, until: Timestamp) -> Reply {
        if !self.needs_permission(&decision) {
            return self.reply(decision, Some(until));
        }
        // In a box: the future of every protected request would have room for this question.
        match Box::pin(self.reply_without_permission()).await {
            Some(reply) => reply,
            None => self.reply(decision, Some(until)),
        }
    }

    /// Asks the upstream whether the request may have the answer of an earlier one; the reply where it may not.
    pub(super) async fn reply_without_permission(&self) -> Option<Reply> {
        let path = self.policy().reauthorize.clone()?;
        let question = Question::of(self, path.into());
        let (questions, digest) = (&self.gate.shared.questions, question.digest());
        let shared = questions.shared(digest);
        // Where the request that asks goes away, the next one that waits asks.
        let asking =
            shared.said.get_or_init(|| async { permission(question.ask().await.map(|inquired| inquired.answer)) });
        let upstream::Settings { client_timeout, timeout: longest, .. } = self.upstream().settings();
        let limit = self.deadlines.as_ref().and_then(|deadlines| deadlines.of_question(*longest));
        let said = match limit {
            Some(limit) => match timeout(limit, asking).await {
                Ok(said) => said,
                Err(_) => return Some(self.problem(self.state.estimator.still_running(*client_timeout, *longest))),
            },
            None => asking.await,
        };
        match said.clone() {
            ReplayPermission::Granted => None,
            ReplayPermission::Refused(answer) => {
                if answer.content.as_ref().is_some_and(|content| content.body.len() > LARGEST_SHARED) {
                    questions.forget(&digest, &shared);
                }
                Some(self.reply_with(Outcome::Refused, Ok(Answer::clone(&answer)), None))
            }
            ReplayPermission::Unclear(problem) => Some(self.problem(problem).of_question()),
        }
    }
}

/// Replies once the upstream has let the request through, or else with what the upstream says.
pub(in crate::gate) fn ask_before(
    request: Arc<ProtectedRequest>,
    client: Client,
    reply: impl FnOnce(&ProtectedRequest) -> Reply + Send + 'static,
) {
    tokio::spawn(Box::pin(async move {
        let refusal = request.reply_without_permission().await;
        client.reply(refusal.unwrap_or_else(|| reply(&request)));
    }));
}

fn permission(asked: Result<Answer, Problem>) -> ReplayPermission {
    let unclear = |why: String| {
        let detail = format!("the upstream was asked whether you may have the recorded answer, and {why}; nothing ran");
        ReplayPermission::Unclear(Problem::new(Code::UpstreamUnreachable, detail).retry_after(RETRY_SOON))
    };
    match asked {
        Ok(answer) if answer.status.is_success() => ReplayPermission::Granted,
        Ok(answer)
            if [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN, StatusCode::NOT_FOUND].contains(&answer.status) =>
        {
            ReplayPermission::Refused(Arc::new(answer))
        }
        Ok(answer) => unclear(format!("it answered {}", answer.status.as_u16())),
        Err(problem) if problem.code == Code::Overloaded => ReplayPermission::Unclear(problem),
        Err(_) => unclear("it gave no whole answer of at most 1 MiB".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_question_is_shared_for_a_second_and_then_forgotten() {
        let questions = Questions::default();
        let is_same = |one: &Shared, other: &Shared| Arc::ptr_eq(&one.said, &other.said);
        let first = questions.shared([1; 32]);
        assert!(is_same(&questions.shared([1; 32]), &first));
        assert!(!is_same(&questions.shared([2; 32]), &first));
        // One that is forgotten early is not the one that followed it.
        questions.forget(&[1; 32], &first);
        tokio::time::sleep(SHARED_FOR / 2).await;
        let second = questions.shared([1; 32]);
        assert!(!is_same(&second, &first));
        tokio::time::sleep(SHARED_FOR * 3 / 4).await;
        assert!(is_same(&questions.shared([1; 32]), &second));
        tokio::time::sleep(SHARED_FOR).await;
        assert!(questions.0.lock().unwrap().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn only_so_many_questions_are_shared_at_a_time() {
        let questions = Questions::default();
        for number in 0..2 * MOST_SHARED {
            let mut digest = [0; 32];
            digest[..8].copy_from_slice(&number.to_be_bytes());
            questions.shared(digest);
        }
        assert_eq!(questions.0.lock().unwrap().len(), MOST_SHARED);
    }
}
