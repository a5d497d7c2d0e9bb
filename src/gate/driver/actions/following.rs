//! What following another request comes to.

use super::{ActionExecutor, Event, Followed};
use crate::gate::claim::single_flight::{Follower, LeaderProgress};
use crate::http::problem::Problem;
use crate::idempotency::decide::RunningAttempt;

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
                let difference = request.difference(&running.fingerprint, running.proof.as_ref()).await?;
                self.follower = Some(follower);
                Followed::Running { difference, attempt: RunningAttempt::here(running.began.elapsed()) }
            }
            Some(LeaderProgress::Released(released)) => {
                let difference = request.difference(&released.fingerprint, released.proof.as_ref()).await?;
                self.released = Some(released);
                Followed::Released { is_same: difference.is_none() }
            }
            Some(LeaderProgress::Found(found)) => {
                let (record, now) = &*found;
                Followed::Found { decision: request.decide(record, *now).await?, until: Some(record.until) }
            }
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
            Some(LeaderProgress::Found(found)) => {
                let (record, now) = &*found;
                match request.decide(record, *now).await {
                    Ok(decision) => Followed::Found { decision, until: Some(record.until) },
                    Err(problem) => return self.failed(problem),
                }
            }
            _ => Followed::AskStore,
        })
    }
}
