//! Waiting for an attempt that is in flight, in the place of a 409.
//!
//! A waiter reads and never claims: whatever becomes of the attempt, it starts none. One that runs in this process is
//! followed to its end; of any other the store is asked now and then.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use super::answer::Reply;
use super::attempt;
use super::errand::{Client, Errand};
use super::flights::{Follow, Released, Role, Running, Stage};
use crate::http::budget::Taken;
use crate::http::prefer;
use crate::http::problem::Problem;
use crate::http::upstream;
use crate::idempotency::decide::Decision;
use crate::idempotency::policy::InFlight;
use crate::idempotency::record::Timestamp;
use crate::telemetry::outcome::{Code, Outcome};

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What a request met that does not lead for its key.
pub(super) enum Met {
    /// An attempt for the same request of the same caller, in this process.
    Running(Follow, Arc<Running>),
    /// The end of such an attempt.
    Released(Arc<Released>),
    /// What this means that the store had, until when it stands.
    Decided(Decision, Option<Timestamp>),
    /// Nothing that says anything.
    Nothing,
}

/// The attempt that a request waits for.
pub(super) enum Awaited {
    /// It runs in this process.
    Here(Follow, Arc<Running>),
    /// It runs in another process, or nowhere: the store has its record. It began at this time.
    Elsewhere(Instant),
}

impl Awaited {
    /// One that has been running for this long already, elsewhere.
    pub(super) fn elsewhere(elapsed: Duration) -> Self {
        let now = Instant::now();
        Self::Elsewhere(now.checked_sub(elapsed).unwrap_or(now))
    }

    fn began(&self) -> Instant {
        match self {
            Self::Here(_, running) => running.began,
            Self::Elsewhere(began) => *began,
        }
    }
}

impl Errand {
    /// How long this request may wait for another's attempt; zero where it is to have its answer at once.
    pub(super) fn patience(&self) -> Duration {
        let InFlight::Wait(longest) = self.policy().in_flight else { return Duration::ZERO };
        let upstream::Settings { client_timeout, timeout, .. } = self.upstream().settings();
        // A client's timeout that is shorter than the attempt's ends this by itself, with `still-running`.
        let limit = longest.min(*client_timeout.max(timeout));
        prefer::wait(&self.head.headers).map_or(limit, |preferred| preferred.min(limit))
    }

    /// Waits for an attempt to end, as long as patience lasts and the client is there, and replies.
    pub(super) async fn wait(self, mut awaited: Awaited, place: Taken, mut client: Client) {
        let reply = tokio::select! {
            biased;
            () = client.gone() => return,
            reply = self.end_of(&mut awaited) => reply,
            () = self.patience_ends() => {
                self.reply(Decision::InFlight { elapsed: awaited.began().elapsed() }, None)
            }
        };
        drop(place);
        client.reply(reply.unwrap_or_else(|| self.left_without_answer()));
    }

    /// What the end of an attempt means for this request; nothing where there is no answer, and a new attempt is due.
    async fn end_of(&self, awaited: &mut Awaited) -> Option<Reply> {
        let mut pause = FIRST_PAUSE;
        loop {
            match awaited {
                Awaited::Here(follow, _) => {
                    if let Some(Stage::Released(released)) = follow.ended().await {
                        return Some(self.released(&released));
                    }
                    pause = FIRST_PAUSE;
                }
                Awaited::Elsewhere(_) => {
                    tokio::select! {
                        biased;
                        () = self.gate.work.store.changed(self.id) => {}
                        () = sleep(pause) => {}
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
            *awaited = match self.look().await {
                Ok(Met::Running(follow, running)) => Awaited::Here(follow, running),
                Ok(Met::Decided(Decision::InFlight { elapsed }, _)) => Awaited::elsewhere(elapsed),
                // The store is away, and may be back in time.
                Ok(Met::Nothing) => Awaited::Elsewhere(awaited.began()),
                Ok(Met::Decided(decision, until)) => return self.reply(decision, until),
                Ok(Met::Released(released)) => return Some(self.released(&released)),
                Err(problem) => return Some(self.problem(problem)),
            };
        }
    }

    /// Looks what there is of the key now, in this process or else in the store, without claiming it.
    async fn look(&self) -> Result<Met, Problem> {
        let lead = match self.gate.work.flights.join(self.id) {
            Role::Lead(lead) => lead,
            Role::Follow(mut follow) => {
                let stage = follow.joined().await;
                return self.meet(follow, stage).await;
            }
        };
        match self.gate.work.store.get(self.id).await {
            Ok(Some(listed)) => {
                let (record, now) = (listed.record, listed.now);
                let met = Met::Decided(self.decide(&record, now).await?, Some(record.until));
                lead.found(record, now);
                Ok(met)
            }
            Ok(None) => {
                lead.absent();
                Ok(Met::Decided(Decision::Supersede, None))
            }
            Err(error) => {
                tracing::debug!(%error, record = ?self.id, "the store failed one who waits");
                Ok(Met::Nothing)
            }
        }
    }

    /// What following another came to.
    pub(super) async fn meet(&self, follow: Follow, stage: Option<Stage>) -> Result<Met, Problem> {
        Ok(match stage {
            Some(Stage::Running(running)) => {
                match self.difference(&running.fingerprint, running.proof.as_ref()).await? {
                    None => Met::Running(follow, running),
                    Some(decision) => Met::Decided(decision, None),
                }
            }
            Some(Stage::Released(released)) => {
                match self.difference(&released.fingerprint, released.proof.as_ref()).await? {
                    None => Met::Released(released),
                    // The key is free again.
                    Some(_) => Met::Nothing,
                }
            }
            Some(Stage::Found(found)) => Met::Decided(self.decide(&found.0, found.1).await?, Some(found.0.until)),
            Some(Stage::Absent) => Met::Decided(Decision::Supersede, None),
            Some(Stage::Asking) | None => Met::Nothing,
        })
    }

    /// Returns when this request has waited for long enough.
    async fn patience_ends(&self) {
        let mut abandon = self.gate.work.abandon.subscribe();
        let gate_ends = async {
            let _ = abandon.wait_for(|abandon| *abandon).await;
            // By then attempts in this process have ended, and nobody stays for any other.
            sleep(self.gate.settings.settle_timeout).await;
        };
        tokio::select! {
            biased;
            () = sleep_until(self.began + self.patience()) => {}
            () = gate_ends => {}
        }
    }

    /// The reply with the answer of an attempt that was released.
    pub(super) fn released(&self, released: &Released) -> Reply {
        attempt::reply(self, Outcome::Released, released.answer.clone(), None)
    }

    /// The reply where the next request with this key runs.
    fn left_without_answer(&self) -> Reply {
        let detail = "the earlier request with this key has ended and left no answer; send this one again";
        self.problem(Problem::new(Code::InFlight, detail).retry_after(Duration::from_secs(1)))
    }
}

#[cfg(test)]
mod tests;
