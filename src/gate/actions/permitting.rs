//! Whether a request may claim: its configuration is in force, it is not too old, and its caller has a key left.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use super::{ActionExecutor, Done, Missing, Permission, REQUEST, needed};
use crate::gate::quota::QuotaGrant;
use crate::http::problem::{Problem, RateLimit};
use crate::idempotency::protocol::Event;
use crate::idempotency::quota::Quota;
use crate::telemetry::outcome::Code;

impl ActionExecutor {
    /// Makes the record to claim, takes a key from the quota, and holds the configuration.
    pub(super) fn permit(&mut self) -> Result<Option<Event>, Missing> {
        if self.fresh.is_none() {
            match needed(self.request.as_ref(), REQUEST)?.fresh() {
                Ok(fresh) => self.fresh = Some(fresh),
                Err(problem) => return Ok(Some(self.failed(problem))),
            }
        }
        self.permission = None;
        let retired = Arc::clone(&self.shared.retired);
        if let Some(quota) = needed(self.request.as_ref(), REQUEST)?.policy().quota.filter(|_| self.ticket.is_none())
            && let ControlFlow::Break(event) = self.count(&quota)?
        {
            return Ok(event);
        }
        Ok(match Arc::clone(&retired).try_read_owned() {
            Ok(permission) => Some(self.permitted(permission)),
            Err(_) => {
                self.operate(async move { Done::Permitted(retired.read_owned().await) });
                None
            }
        })
    }

    pub(super) fn permitted(&mut self, permission: Permission) -> Event {
        if !self.request.as_ref().is_some_and(|request| request.may_claim(&permission)) {
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
    fn count(&mut self, quota: &Quota) -> Result<ControlFlow<Option<Event>>, Missing> {
        let request = needed(self.request.as_ref(), REQUEST)?;
        let (identifier, scope) = (&request.gate.identifiers.first, &request.policy().scope);
        let id = identifier.quota(&request.route.name, quota.by, scope, request.head.caller());
        match self.shared.quotas.take(id, quota) {
            Ok(QuotaGrant::QuotaPermit(ticket)) => {
                self.ticket = Some(ticket);
                Ok(ControlFlow::Continue(()))
            }
            Ok(QuotaGrant::Unconfirmed(ticket)) => {
                let retired = Arc::clone(&self.shared.retired);
                self.operate(async move { Done::Counted(ticket.confirm().await, retired.read_owned().await) });
                Ok(ControlFlow::Break(None))
            }
            Err(wait) => Ok(ControlFlow::Break(Some(self.quota_exceeded(wait)))),
        }
    }

    /// The request may not run. What there is of an earlier one with its key is answered all the same.
    pub(super) fn quota_exceeded(&mut self, wait: Duration) -> Event {
        let quota = self.request.as_ref().and_then(|request| request.policy().quota);
        self.problem = quota.map(|quota| exceeded(&quota, wait));
        Event::Barred
    }
}

/// The problem of a request that is one too many.
fn exceeded(quota: &Quota, wait: Duration) -> Problem {
    let (new_keys, seconds) = (quota.new_keys, quota.per.as_secs());
    let detail = format!(
        "the quota of {new_keys} new keys in {seconds} s is used up; nothing was sent. A retry of a request that ran gets its \
         answer all the same"
    );
    let mut problem = Problem::new(Code::QuotaExceeded, detail).retry_after(wait);
    problem.rate_limit = Some(RateLimit { quota: u64::from(new_keys), window: quota.per });
    problem
}
