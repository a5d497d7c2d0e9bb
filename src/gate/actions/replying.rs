//! What a client gets that no attempt of its own has an answer for.

use std::sync::Arc;

use super::{CLIENT, Driver, Missing, PROBED, REQUEST, needed};
use crate::gate::attempt;
use crate::gate::protected::{Client, ProtectedRequest};
use crate::idempotency::protocol::Reply as ProtocolReply;
use crate::store::ErrorKind;

impl Driver {
    /// Answers the client by what there is, or is not.
    pub(super) fn reply_without_attempt(&mut self, outcome: ProtocolReply) -> Result<(), Missing> {
        let (request, client) = (needed(self.request.take(), REQUEST)?, needed(self.client.take(), CLIENT)?);
        (self.place, self.lock) = (None, None);
        let shared = &self.shared;
        let reply = match outcome {
            ProtocolReply::Decided { decision, until } => request.reply(decision, until),
            ProtocolReply::Released => {
                attempt::released(&request, needed(self.released.as_deref(), "a released answer")?)
            }
            ProtocolReply::Recovered => {
                let answer = needed(self.probed.take().and_then(|probed| probed.answer), PROBED)?;
                request.recovered(answer, self.settled.as_ref())
            }
            ProtocolReply::NothingLeft => request.nothing_left(),
            ProtocolReply::Retired => request.retired(),
            ProtocolReply::LookFailed => request.store_away(),
            ProtocolReply::Failed | ProtocolReply::Barred => request.problem(needed(self.problem.take(), "a problem")?),
            ProtocolReply::ClaimTooLate => {
                if let Some(others) = shared.late_claims.due() {
                    tracing::warn!(record = %self.id, others, "the store took too long for a claim, which is given up");
                }
                request.store_away()
            }
            ProtocolReply::LeaderUnanswered if shared.retired.try_read().is_err() => request.retired(),
            ProtocolReply::LeaderUnanswered => {
                without_store(request, client);
                return Ok(());
            }
            ProtocolReply::ClaimFailed => {
                match self.error.take() {
                    Some(error) if error.cause().kind == ErrorKind::Corrupt => {
                        if let Some(others) = shared.unreadable.due() {
                            let message = "a record cannot be read: requests with its key get 503 store-unavailable";
                            tracing::error!(%error, record = %self.id, others, "{message}");
                        }
                    }
                    Some(error) => tracing::debug!(%error, record = %self.id, "a claim failed"),
                    None => {}
                }
                without_store(request, client);
                return Ok(());
            }
            ProtocolReply::ClaimUnanswered => {
                if let Some(others) = shared.late_claims.due() {
                    tracing::warn!(record = %self.id, others, "the store did not answer a claim in time");
                }
                without_store(request, client);
                return Ok(());
            }
            ProtocolReply::Attempted(_) => return Ok(()),
        };
        client.reply(reply);
        Ok(())
    }
}

/// Answers a client whose claim failed, which may take as long as the upstream does. What the claim comes to is seen to
/// meanwhile. A request that may not run (see [`Event::Barred`]) must not be forwarded here either.
fn without_store(request: Arc<ProtectedRequest>, client: Client) {
    if request.needs_store() {
        client.reply(request.store_away());
    } else {
        tokio::spawn(Box::pin(async move { client.reply(request.forward_unprotected().await) }));
    }
}
