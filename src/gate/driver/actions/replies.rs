//! What each reply of the claim protocol says to a client that no attempt of its own has an answer for.

use std::sync::Arc;

use super::records::shows_record;
use super::{ActionExecutor, CLIENT, Missing, PROBED, REQUEST, needed};
use crate::gate::answer::Client;
use crate::gate::claim::attempt;
use crate::gate::claim::protected::ProtectedRequest;
use crate::gate::claim::second_look::other_id_first;
use crate::gate::inquiry::Inquired;
use crate::gate::inquiry::reauthorize;
use crate::idempotency::protocol::Reply;
use crate::store::ErrorKind;

impl ActionExecutor {
    /// Answers the client of a request that has no attempt, or none of its own.
    pub(super) fn reply_without_attempt(&mut self, outcome: Reply) -> Result<(), Missing> {
        let (request, client) = (needed(self.request.take(), REQUEST)?, needed(self.client.take(), CLIENT)?);
        (self.place, self.lock) = (None, None);
        let shared = &self.shared;
        let reply = match outcome {
            Reply::Decided { decision, until } if request.needs_permission(&decision) => {
                reauthorize::ask_before(request, client, move |request| request.reply(decision, until));
                return Ok(());
            }
            Reply::Released if request.policy().reauthorize.is_some() => {
                let answer = needed(self.released.take(), "a released answer")?;
                reauthorize::ask_before(request, client, move |request| attempt::released(request, &answer));
                return Ok(());
            }
            Reply::Decided { decision, until } => request.reply(decision, until),
            Reply::Released => attempt::released(&request, needed(self.released.as_deref(), "a released answer")?),
            Reply::Recovered => {
                let Inquired { answer, .. } = needed(self.probed.take().and_then(|probed| probed.inquired), PROBED)?;
                request.recovered(answer, self.settled.as_ref())
            }
            Reply::NothingLeft => request.nothing_left(),
            Reply::OtherId => request.problem(self.problem.take().unwrap_or_else(other_id_first)),
            Reply::Retired => request.problem(request.retired()),
            Reply::LookFailed => request.store_away(),
            Reply::Failed | Reply::Barred => request.problem(needed(self.problem.take(), "a problem")?),
            Reply::ClaimTooLate => {
                warn_of_late_claim(&request, "the store took too long for a claim, which is given up");
                request.store_away()
            }
            Reply::LeaderUnanswered if request.state.rules_status.try_read().is_err() => {
                request.problem(request.retired())
            }
            Reply::LeaderUnanswered if shared.single_flight.knows_record(self.id) => request.store_away(),
            Reply::LeaderUnanswered => {
                without_store(request, client);
                return Ok(());
            }
            Reply::ClaimFailed | Reply::ClaimUnanswered => {
                let error = self.error.take();
                match (&outcome, &error) {
                    (_, Some(error)) if error.cause().kind == ErrorKind::Corrupt => {
                        if let Some(others) = shared.unreadable.due() {
                            let message = "a record cannot be read: requests with its key get 503 store-unavailable";
                            tracing::error!(%error, record = %self.id, others, "{message}");
                        }
                    }
                    (Reply::ClaimUnanswered, _) => {
                        warn_of_late_claim(&request, "the store did not answer a claim in time");
                    }
                    (_, Some(error)) => tracing::debug!(%error, record = %self.id, "a claim failed"),
                    (_, None) => {}
                }
                // To forward it could run it twice, whatever the route says of a store that is away: this one is not.
                if !error.as_ref().is_some_and(shows_record) {
                    without_store(request, client);
                    return Ok(());
                }
                request.store_away()
            }
            Reply::Attempted(_) => return Ok(()),
        };
        client.reply(reply);
        Ok(())
    }
}

/// Logs that the store was late with the claim of a request.
fn warn_of_late_claim(request: &ProtectedRequest, message: &'static str) {
    if let Some(others) = request.gate.shared.late_claims.due() {
        tracing::warn!(record = %request.id, route = &*request.route.name, others, "{message}");
    }
}

/// Answers a client whose claim failed, which may take as long as the upstream does. What the claim comes to is seen to
/// meanwhile. A request that may not run (see `Event::Barred` of the protocol) must not be forwarded here either.
fn without_store(request: Arc<ProtectedRequest>, client: Client) {
    if request.needs_store() {
        client.reply(request.store_away());
    } else if let Some(problem) = request.bar() {
        client.reply(request.problem(problem));
    } else if client.is_gone() {
        // Nothing was sent yet. To run it now would leave neither an answer with a client nor a record.
        tracing::debug!(record = %request.id, "the store is away, and so is the client: nothing is sent");
    } else {
        tokio::spawn(Box::pin(async move { client.reply(request.forward_unprotected().await) }));
    }
}
