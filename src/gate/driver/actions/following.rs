//! What following another request comes to.

use super::{ActionExecutor, Followed};
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
}
