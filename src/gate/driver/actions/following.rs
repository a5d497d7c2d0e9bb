//! What following another request comes to.

use super::{ActionExecutor, Event, Followed};
use crate::gate::claim::protected::ProtectedRequest;
use crate::gate::claim::single_flight::{Follower, FoundRecord, LeaderProgress};
use crate::http::problem::Problem;
use crate::idempotency::decide::{Decision, RunningAttempt};

impl ActionExecutor {
    /// What following another request came to.
    pub(super) async fn met(
        &mut self,
        follower: Follower,
        progress: Option<LeaderProgress>,
    ) -> Result<Followed, Problem> {
        let Some(request) = &self.request else { return Ok(Followed::AskStore) };
        Ok(match progress {
            Some(LeaderProgress::Running(running)) => {
                request.head.comes_after_request(running.span);
                let difference = request.difference(&running.fingerprint, running.proof.as_ref()).await?;
                self.follower = Some(follower);
                Followed::Running { difference, attempt: RunningAttempt::here(running.began.elapsed()) }
            }
            Some(LeaderProgress::Released(released)) => {
                let difference = request.difference(&released.fingerprint, released.proof.as_ref()).await?;
                self.released = Some(released);
                Followed::Released { is_same: difference.is_none() }
            }
            Some(LeaderProgress::Found(found)) => followed_to(request, &found).await?,
            Some(LeaderProgress::Absent) => Followed::Absent,
            Some(LeaderProgress::Asking { .. }) | None => Followed::AskStore,
        })
    }

    /// What waiting for the end of another request's attempt, or of its question, came to. It is known by now to be the same request.
    pub(super) async fn followed_to_end(&mut self, progress: Option<LeaderProgress>) -> Event {
        let Some(request) = &self.request else { return Event::Followed(Followed::AskStore) };
        Event::Followed(match progress {
            Some(LeaderProgress::Released(released)) => {
                self.released = Some(released);
                Followed::Released { is_same: true }
            }
            Some(LeaderProgress::Found(found)) => match followed_to(request, &found).await {
                Ok(followed) => followed,
                Err(problem) => return self.failed(problem),
            },
            _ => Followed::AskStore,
        })
    }
}

/// What a record that another request has found means for this one. Read before this request came, it says nothing of an answer
/// that a client had by then: the store is asked again before anybody hears that the outcome is unknown.
async fn followed_to(request: &ProtectedRequest, found: &FoundRecord) -> Result<Followed, Problem> {
    let decision = request.decide(&found.record, found.now).await?;
    if decision == Decision::Unknown && found.asked < request.began {
        return Ok(Followed::AskStore);
    }
    Ok(Followed::Found { decision, until: Some(found.record.until) })
}
