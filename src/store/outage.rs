//! The outages of a store as an operator reads them: one line when it begins and one when it is over, however many
//! requests, leases and workers meet it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::{Error, ErrorKind};

/// An outage is over when the store works and nothing has failed for this long: one that comes and goes is one outage.
const QUIET: Duration = Duration::from_secs(2);

/// How often an operation that fails now and then is reported at most.
const REMINDER: Duration = Duration::from_secs(60);

/// How often the cause of an outage is compared with the one in the log: what a connection that breaks says of it is not what the next
/// ones meet.
const COMPARISON: Duration = Duration::from_secs(5);

/// How many causes of one outage the log has at most.
const MOST_CAUSES: usize = 8;

/// What an operation of the store is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Requests cannot run without it.
    Claims,
    /// A worker calls it every second: it shows an outage, and its end, where there are no requests.
    Heartbeat,
    /// It is tried again until it works.
    Background,
    /// Its caller reports a failure.
    Foreground,
}

/// The recent failures of one operation.
#[derive(Debug)]
pub(super) struct OperationHealth {
    name: &'static str,
    role: Role,
    /// How often it has failed since it last worked.
    failures: AtomicU32,
    is_reported: AtomicBool,
    last_report: Mutex<Option<Instant>>,
}

/// Whether a store is in an outage. All of its operations share it.
#[derive(Debug, Default)]
pub(super) struct StoreHealth {
    /// The name of the database.
    pub(super) database: Option<Arc<str>>,
    /// Whether the store has others, too.
    pub(super) has_others: bool,
    is_out: AtomicBool,
    outage: Mutex<Option<Outage>>,
    /// How many claims have worked.
    claims: AtomicU64,
    /// How many had when the heartbeat was called that failed first since it last worked.
    claims_at_heartbeat: AtomicU64,
}

#[derive(Debug)]
struct Outage {
    began: Instant,
    last_failure: Instant,
    claims_failed: u64,
    /// How many claims had worked at the last failure.
    claims_before: u64,
    /// Whether the heartbeat failed too. If not, as on a full disk, it does not show by itself that claims work again.
    has_stopped_heartbeat: bool,
    /// The causes that stand in the log, and when to compare them again.
    causes: Vec<String>,
    compare_at: Instant,
}

/// What is logged.
#[derive(Debug, PartialEq)]
enum HealthEvent {
    OutageBegan,
    OutageOver { lasted: Duration, claims_failed: u64 },
    OperationFails,
    OperationWorks,
}

impl OperationHealth {
    pub(super) fn new(name: &'static str, role: Role) -> Self {
        let (failures, is_reported) = (AtomicU32::new(0), AtomicBool::new(false));
        Self { name, role, failures, is_reported, last_report: Mutex::default() }
    }

    /// Whether it is time to report that it fails.
    fn is_report_due(&self) -> bool {
        let mut last = self.last_report.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.is_none_or(|last| last.elapsed() >= REMINDER);
        if is_due {
            *last = Some(Instant::now());
        }
        is_due
    }
}

impl StoreHealth {
    /// An operation worked.
    pub(super) fn worked(&self, operation: &OperationHealth) {
        let (name, database) = (operation.name, self.database.as_deref());
        match self.after_success(operation) {
            Some(HealthEvent::OutageOver { lasted, claims_failed }) => {
                tracing::info!(
                    database,
                    seconds = lasted.as_millis() as f64 / 1000.0,
                    claims_failed,
                    "the store works again"
                );
            }
            Some(_) => tracing::info!(database, operation = name, "an operation of the store works again"),
            None => {}
        }
    }

    /// An operation failed.
    pub(super) fn failed(&self, operation: &OperationHealth, error: &Error) {
        let (name, database) = (operation.name, self.database.as_deref());
        match self.after_failure(operation, error.cause().kind) {
            Some(HealthEvent::OutageBegan) => {
                self.note_cause(error);
                let fate = "get 503 store-unavailable, and routes with store_failure = `forward` run them unprotected";
                let (what, whose) = match self.has_others {
                    true => ("one database of the store", "whose keys are there"),
                    false => ("the store", "with a key"),
                };
                tracing::error!(
                    database,
                    operation = name,
                    %error,
                    "{what} fails: until it works again, requests {whose} {fate}"
                );
            }
            Some(_) => {
                tracing::warn!(database, operation = name, %error, "an operation of the store fails; trying again")
            }
            None if says_why(operation.role, error.cause().kind) && self.has_another_cause(error) => {
                tracing::warn!(database, operation = name, %error, "the store still fails, for another cause than before");
            }
            None => tracing::debug!(database, operation = name, %error, "the store failed"),
        }
    }

    /// Whether an outage goes on for a cause that is not in the log.
    fn has_another_cause(&self, error: &Error) -> bool {
        if !self.is_out.load(Relaxed) {
            return false;
        }
        let mut outage = self.outage.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let Some(outage) = outage.as_mut().filter(|outage| outage.compare_at <= now) else { return false };
        outage.compare_at = now + COMPARISON;
        let cause = error.cause().source.to_string();
        let is_other = outage.causes.len() < MOST_CAUSES && !outage.causes.contains(&cause);
        if is_other {
            outage.causes.push(cause);
        }
        is_other
    }

    /// The log has this cause of the outage.
    fn note_cause(&self, error: &Error) {
        if let Some(outage) = &mut *self.outage.lock().unwrap_or_else(PoisonError::into_inner) {
            outage.causes.push(error.cause().source.to_string());
        }
    }

    /// The heartbeat is about to be called.
    pub(super) fn heartbeat_begins(&self, heartbeat: &OperationHealth) {
        if heartbeat.failures.load(Relaxed) == 0 {
            self.claims_at_heartbeat.store(self.claims.load(Relaxed), Relaxed);
        }
    }

    fn after_success(&self, operation: &OperationHealth) -> Option<HealthEvent> {
        if operation.role == Role::Claims {
            self.claims.fetch_add(1, Relaxed);
        }
        if operation.failures.load(Relaxed) > 0 {
            operation.failures.store(0, Relaxed);
            // In an outage, the end of the outage tells of it.
            if operation.is_reported.swap(false, Relaxed) && !self.is_out.load(Relaxed) {
                return Some(HealthEvent::OperationWorks);
            }
        }
        if !self.is_out.load(Relaxed) {
            return None;
        }
        let mut outage = self.outage.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = |outage: &mut Outage| {
            let shows_claims = match operation.role {
                Role::Claims => true,
                Role::Heartbeat => outage.has_stopped_heartbeat || self.claims.load(Relaxed) != outage.claims_before,
                Role::Background | Role::Foreground => false,
            };
            shows_claims && outage.last_failure.elapsed() >= QUIET
        };
        let Outage { began, claims_failed, .. } = outage.take_if(is_over)?;
        self.is_out.store(false, Relaxed);
        Some(HealthEvent::OutageOver { lasted: began.elapsed(), claims_failed })
    }

    fn after_failure(&self, operation: &OperationHealth, kind: ErrorKind) -> Option<HealthEvent> {
        let failures = operation.failures.fetch_add(1, Relaxed).saturating_add(1);
        let claims = self.claims.load(Relaxed);
        let is_outage = match operation.role {
            Role::Foreground => return None,
            // One record may be damaged alone, and one that is another database's says nothing of this one.
            Role::Claims if kind == ErrorKind::Moved => false,
            Role::Claims => kind != ErrorKind::Corrupt || failures > 1,
            Role::Background => false,
            // Claims may work all the same.
            Role::Heartbeat => failures > 1 && claims == self.claims_at_heartbeat.load(Relaxed),
        };
        let (is_claim, is_heartbeat) = (operation.role == Role::Claims, operation.role == Role::Heartbeat);
        let now = Instant::now();
        let mut outage = self.outage.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *outage {
            Some(outage) => {
                outage.claims_failed += u64::from(is_claim);
                outage.has_stopped_heartbeat |= is_heartbeat;
                // While claims work, nothing else makes it last.
                if (is_claim && is_outage) || claims == outage.claims_before {
                    (outage.last_failure, outage.claims_before) = (now, claims);
                }
                None
            }
            None if is_outage => {
                *outage = Some(Outage {
                    began: now,
                    last_failure: now,
                    claims_failed: u64::from(is_claim),
                    claims_before: claims,
                    has_stopped_heartbeat: is_heartbeat,
                    causes: Vec::new(),
                    compare_at: now + COMPARISON,
                });
                self.is_out.store(true, Relaxed);
                Some(HealthEvent::OutageBegan)
            }
            // Once is not worth a word.
            None if failures == 1 || operation.is_reported.load(Relaxed) || !operation.is_report_due() => None,
            None => {
                operation.is_reported.store(true, Relaxed);
                Some(HealthEvent::OperationFails)
            }
        }
    }
}

/// Whether such a failure says why a store is away.
fn says_why(role: Role, kind: ErrorKind) -> bool {
    match role {
        // They may be of one record alone.
        Role::Claims => !matches!(kind, ErrorKind::Corrupt | ErrorKind::Moved),
        // That it has not come back says nothing new.
        Role::Heartbeat => kind != ErrorKind::Timeout,
        Role::Background | Role::Foreground => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Cause;

    const DOWN: ErrorKind = ErrorKind::Unavailable;

    fn beat_fails(health: &StoreHealth, heartbeat: &OperationHealth) -> Option<HealthEvent> {
        health.heartbeat_begins(heartbeat);
        health.after_failure(heartbeat, DOWN)
    }

    struct Fake {
        health: StoreHealth,
        claim: OperationHealth,
        expire_leases: OperationHealth,
        settle: OperationHealth,
        get: OperationHealth,
    }

    fn store() -> Fake {
        Fake {
            health: StoreHealth::default(),
            claim: OperationHealth::new("claim", Role::Claims),
            expire_leases: OperationHealth::new("expire_leases", Role::Heartbeat),
            settle: OperationHealth::new("settle", Role::Background),
            get: OperationHealth::new("get", Role::Foreground),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_is_two_lines() {
        let Fake { health, claim, expire_leases, settle, .. } = store();
        assert_eq!(health.after_success(&claim), None);
        assert_eq!(health.after_failure(&claim, DOWN), Some(HealthEvent::OutageBegan));
        for _ in 0..10 {
            tokio::time::advance(Duration::from_secs(1)).await;
            for operation in [&claim, &expire_leases, &settle] {
                assert_eq!(health.after_failure(operation, DOWN), None);
            }
        }
        assert_eq!(health.after_success(&claim), None, "it may fail again at once");
        assert_eq!(health.after_success(&settle), None);
        tokio::time::advance(QUIET).await;
        assert_eq!(health.after_success(&settle), None, "settling alone does not show that claims work");
        let over = HealthEvent::OutageOver { lasted: Duration::from_secs(12), claims_failed: 11 };
        assert_eq!(health.after_success(&expire_leases), Some(over));
        assert_eq!(health.after_success(&claim), None);
    }

    /// What breaks a connection is not why there is no other.
    #[tokio::test(start_paused = true)]
    async fn another_cause_of_an_outage_is_one_more_line() {
        let Fake { health, claim, .. } = store();
        let error = |cause: &str| Error::Determinate(Cause { kind: DOWN, source: cause.into() });
        health.failed(&claim, &error("connection closed"));
        assert!(!health.has_another_cause(&error("password authentication failed")), "the first moments are one story");
        tokio::time::advance(COMPARISON).await;
        assert!(!health.has_another_cause(&error("connection closed")));
        tokio::time::advance(COMPARISON).await;
        assert!(health.has_another_cause(&error("password authentication failed")));
        for cause in ["password authentication failed", "connection closed"] {
            tokio::time::advance(COMPARISON).await;
            assert!(!health.has_another_cause(&error(cause)), "the log has it");
        }
        for number in 0..2 * MOST_CAUSES {
            tokio::time::advance(COMPARISON).await;
            assert_eq!(health.has_another_cause(&error(&number.to_string())), number + 2 < MOST_CAUSES);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_without_requests_shows_at_the_second_heartbeat() {
        let Fake { health, claim, expire_leases, .. } = store();
        assert_eq!(health.after_success(&claim), None);
        assert_eq!(beat_fails(&health, &expire_leases), None);
        assert_eq!(beat_fails(&health, &expire_leases), Some(HealthEvent::OutageBegan));
        tokio::time::advance(QUIET).await;
        let over = HealthEvent::OutageOver { lasted: QUIET, claims_failed: 0 };
        assert_eq!(health.after_success(&expire_leases), Some(over));
    }

    #[tokio::test(start_paused = true)]
    async fn where_only_claims_fail_a_claim_ends_the_outage() {
        let Fake { health, claim, expire_leases, .. } = store();
        assert_eq!(health.after_failure(&claim, DOWN), Some(HealthEvent::OutageBegan));
        tokio::time::advance(QUIET * 10).await;
        assert_eq!(health.after_success(&expire_leases), None);
        let over = HealthEvent::OutageOver { lasted: QUIET * 10, claims_failed: 1 };
        assert_eq!(health.after_success(&claim), Some(over));
    }

    #[tokio::test(start_paused = true)]
    async fn the_heartbeat_ends_an_outage_after_the_last_claim_worked() {
        let Fake { health, claim, expire_leases, .. } = store();
        assert_eq!(health.after_failure(&claim, DOWN), Some(HealthEvent::OutageBegan));
        assert_eq!(health.after_success(&claim), None, "it may fail again at once");
        assert_eq!(health.after_success(&expire_leases), None);
        tokio::time::advance(QUIET).await;
        assert_eq!(
            health.after_success(&expire_leases),
            Some(HealthEvent::OutageOver { lasted: QUIET, claims_failed: 1 })
        );
    }

    #[tokio::test(start_paused = true)]
    async fn an_operation_that_fails_while_claims_work_is_no_outage() {
        let Fake { health, claim, expire_leases, settle, get } = store();
        for operation in [&expire_leases, &settle] {
            assert_eq!(health.after_failure(operation, DOWN), None, "once is not reported");
            assert_eq!(health.after_success(&claim), None);
            assert_eq!(health.after_failure(operation, DOWN), Some(HealthEvent::OperationFails));
            assert_eq!(health.after_failure(operation, DOWN), None);
            assert_eq!(health.after_success(operation), Some(HealthEvent::OperationWorks));
            assert_eq!(health.after_success(operation), None);
            for _ in 0..2 {
                assert_eq!(health.after_failure(operation, DOWN), None, "it was reported a moment ago");
            }
        }
        assert_eq!((health.after_failure(&get, DOWN), health.after_failure(&get, DOWN)), (None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_heartbeat_that_fails_alone_does_not_keep_an_outage_open() {
        let Fake { health, claim, expire_leases, .. } = store();
        assert_eq!((beat_fails(&health, &expire_leases), health.after_success(&claim)), (None, None));
        assert_eq!(health.after_failure(&claim, DOWN), Some(HealthEvent::OutageBegan));
        for _ in 0..2 {
            assert_eq!(health.after_success(&claim), None);
            assert_eq!(beat_fails(&health, &expire_leases), None);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let over = HealthEvent::OutageOver { lasted: Duration::from_secs(2), claims_failed: 1 };
        assert_eq!(health.after_success(&claim), Some(over));
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_that_an_operation_showed_first_has_one_end() {
        let Fake { health, claim, expire_leases, settle, .. } = store();
        assert_eq!((beat_fails(&health, &expire_leases), health.after_failure(&settle, DOWN)), (None, None));
        assert_eq!(health.after_success(&claim), None, "it was on its way when the store failed");
        assert_eq!(beat_fails(&health, &expire_leases), Some(HealthEvent::OperationFails));
        assert_eq!(health.after_failure(&claim, DOWN), Some(HealthEvent::OutageBegan));
        assert_eq!(health.after_success(&expire_leases), None, "the outage is not over");
        tokio::time::advance(QUIET).await;
        assert_eq!(health.after_success(&claim), Some(HealthEvent::OutageOver { lasted: QUIET, claims_failed: 1 }));
        assert_eq!(health.after_success(&expire_leases), None);
    }

    #[tokio::test(start_paused = true)]
    async fn one_damaged_record_is_no_outage() {
        let Fake { health, claim, .. } = store();
        for _ in 0..3 {
            assert_eq!(health.after_failure(&claim, ErrorKind::Corrupt), None);
            assert_eq!(health.after_success(&claim), None);
        }
        assert_eq!(health.after_failure(&claim, ErrorKind::Corrupt), None);
        assert_eq!(health.after_failure(&claim, ErrorKind::Corrupt), Some(HealthEvent::OutageBegan), "none works");
    }
}
