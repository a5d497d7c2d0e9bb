//! Whether a request may claim: the rules of its identity are in force, it is not too old, and its caller has a key left.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use super::{ActionExecutor, Finished, Missing, REQUEST, RulesGuard, needed};
use crate::gate::claim::quota::QuotaGrant;
use crate::idempotency::protocol::Event;

impl ActionExecutor {
    /// Makes the record to claim, takes a key from the quota, and holds the status of the rules.
    pub(super) fn ask_permission(&mut self) -> Result<Option<Event>, Missing> {
        if self.fresh.is_none() {
            match needed(self.request.as_ref(), REQUEST)?.fresh() {
                Ok(fresh) => self.fresh = Some(fresh),
                Err(problem) => return Ok(Some(self.failed(problem))),
            }
        }
        self.permission = None;
        // Before the quota: to wait for a key would not help, and none is used up.
        if self.unless_barred(Event::Permitted) == Event::Barred {
            return Ok(Some(Event::Barred));
        }
        let status = Arc::clone(&needed(self.request.as_ref(), REQUEST)?.state.rules_status);
        if self.quota_permit.is_none()
            && let ControlFlow::Break(event) = self.count()?
        {
            return Ok(event);
        }
        Ok(match Arc::clone(&status).try_read_owned() {
            Ok(permission) => Some(self.permitted(permission)),
            Err(_) => {
                self.begin_operation(async move { Finished::Permitted(status.read_owned().await) });
                None
            }
        })
    }

    pub(super) fn permitted(&mut self, permission: RulesGuard) -> Event {
        if !self.request.as_ref().is_some_and(|request| request.may_claim(*permission)) {
            return Event::Retired;
        }
        self.permission = Some(permission);
        self.unless_barred(Event::Permitted)
    }

    /// The event, unless the request may not run: the problem says why. The store may have taken longer for a claim than the
    /// request had left to run.
    pub(super) fn unless_barred(&mut self, event: Event) -> Event {
        let Some(problem) = self.request.as_ref().and_then(|request| request.bar()) else { return event };
        self.problem = Some(problem);
        Event::Barred
    }

    /// Takes a key, and goes on where that is all there is to it. Otherwise returns the event that follows at once, if one does
    /// before the other gates have been asked.
    fn count(&mut self) -> Result<ControlFlow<Option<Event>>, Missing> {
        let request = needed(self.request.as_ref(), REQUEST)?;
        match request.take_from_quota() {
            Ok(QuotaGrant::Permitted(permit)) => {
                self.quota_permit = permit;
                Ok(ControlFlow::Continue(()))
            }
            Ok(QuotaGrant::Unconfirmed(permit)) => {
                let status = Arc::clone(&request.state.rules_status);
                self.begin_operation(
                    async move { Finished::Counted(permit.confirm().await, status.read_owned().await) },
                );
                Ok(ControlFlow::Break(None))
            }
            Err(wait) => Ok(ControlFlow::Break(Some(self.quota_exceeded(wait)))),
        }
    }

    /// The request may not run. What there is of an earlier one with its key is answered all the same.
    pub(super) fn quota_exceeded(&mut self, wait: Duration) -> Event {
        self.problem = self.request.as_ref().and_then(|request| request.quota_exceeded(wait));
        Event::Barred
    }
}
