//! The permission to claim: the configuration stays as it is meanwhile, and the caller has a key left of its quota.

use std::sync::Arc;
use std::time::Duration;

use super::{Done, Driver, Missing, Permission, REQUEST, needed};
use crate::gate::protected::ProtectedRequest;
use crate::gate::quota::Taken;
use crate::http::problem::{Problem, RateLimit};
use crate::idempotency::protocol::Event;
use crate::idempotency::quota::{Quota, QuotaId};
use crate::telemetry::outcome::Code;

impl Driver {
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
        let quota = needed(self.request.as_ref(), REQUEST)?.quota().filter(|_| self.ticket.is_none());
        if let Some((id, quota)) = quota {
            match self.shared.quotas.take(id, &quota) {
                Ok(Taken::Ticket(ticket)) => self.ticket = Some(ticket),
                Ok(Taken::Unconfirmed(ticket)) => {
                    self.operate(async move { Done::Counted(ticket.confirm().await, retired.read_owned().await) });
                    return Ok(None);
                }
                Err(wait) => return Ok(Some(self.quota_exceeded(wait))),
            }
        }
        Ok(match Arc::clone(&retired).try_read_owned() {
            Ok(permission) => Some(self.permitted(permission)),
            Err(_) => {
                self.operate(async move { Done::Permitted(retired.read_owned().await) });
                None
            }
        })
    }

    /// The request may not run. What there is of an earlier one with its key is answered all the same.
    pub(super) fn quota_exceeded(&mut self, wait: Duration) -> Event {
        let quota = self.request.as_ref().and_then(|request| request.policy().quota);
        self.problem = quota.map(|quota| exceeded(&quota, wait));
        Event::Barred
    }

    pub(super) fn permitted(&mut self, permission: Permission) -> Event {
        let stays = |request: &Arc<ProtectedRequest>| {
            !permission.contains(&request.state.rules) && request.is_found_after_reload()
        };
        if !self.request.as_ref().is_some_and(stays) {
            return Event::Retired;
        }
        self.permission = Some(permission);
        Event::Permitted
    }
}

impl ProtectedRequest {
    /// The quota that the request takes a key from, if its route has one.
    fn quota(&self) -> Option<(QuotaId, Quota)> {
        let policy = self.policy();
        let quota = policy.quota?;
        let id = self.gate.identifier.quota(&self.route.name, quota.by, &policy.scope, self.head.caller());
        Some((id, quota))
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
