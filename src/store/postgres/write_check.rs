//! Checks that claims and settlements work: claims, renews and releases a record that belongs to no request.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::operation::{ClaimOperation, ClaimReply, Claims, SettleOperation, Settlements};
use super::session::{CallError, Query, Session};
use super::unexpected_reply;
use crate::store::batcher::Batcher;
use crate::store::{Error, ErrorKind};

/// The first half of the ids of these records; the other half is random. Ids of requests are hashes.
const PREFIX: [u8; 16] = *b"oncegate proof\0\0";

/// A single statement, which leaves no record however it ends. If a step has no effect, the division fails and rolls
/// the others back. The head takes as much room as that of most requests: a full disk may have room for a smaller
/// one. Without `LIMIT`, PostgreSQL expects a thousand rows of each function, a billion in all, and compiles the
/// statement (`jit`), which takes 0.2 s of its CPU for each check.
pub(super) const CHECK_WRITES: Query = Query {
    sql: "SELECT 1 / (c.attempt IS NULL AND r.id IS NOT NULL AND s.done_until IS NOT NULL)::int \
          FROM (SELECT * FROM oncegate.claim_v1(ARRAY[$1], ARRAY[$2], '{60000}', '{60000}', '{60000}', '{0}', \
              ARRAY[decode(repeat('00', 1024), 'hex')]) LIMIT 1) AS c \
          LEFT JOIN LATERAL (SELECT * FROM oncegate.renew_v1(ARRAY[c.id], ARRAY[$2], '{60000}') LIMIT 1) AS r (id) \
          ON true \
          LEFT JOIN LATERAL (SELECT * FROM oncegate.settle_v1(ARRAY[coalesce(r.id, c.id)], ARRAY[$2], '{3}', '{0}', \
              '{NULL}', false) LIMIT 1) AS s ON true",
    types: &[Type::BYTEA, Type::BYTEA],
};

/// How long a successful claim and settlement count as a check.
const VALIDITY: Duration = Duration::from_secs(1);

/// The delay between two checks, at first and at most.
const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// Claims a record on a connection, renews and releases it, and waits until that is durable.
pub(super) async fn check_writes(session: &Session) -> Result<(), CallError> {
    let (mut id, mut attempt) = ([0; 32], [0; 16]);
    getrandom::fill(&mut attempt)
        .map_err(|_| CallError::Unsent("the system's random number generator failed".to_owned()))?;
    id[..16].copy_from_slice(&PREFIX);
    id[16..].copy_from_slice(&attempt);
    match session.write(&CHECK_WRITES, &[&&id[..], &&attempt[..]], 0).await {
        Ok(rows) if rows.is_empty() => Err(CallError::NoEffect),
        Ok(_) => Ok(()),
        Err(CallError::Sql(error)) if error.code() == Some(&SqlState::DIVISION_BY_ZERO) => Err(CallError::NoEffect),
        Err(failed) => Err(failed),
    }
}

/// The same through the connections that requests use.
pub(super) async fn check_all(claims: &Batcher<Claims>, settlements: &Batcher<Settlements>) -> Result<(), Error> {
    // Settlements have their own connections; this writes nothing.
    let (proven, renewed) = tokio::join!(
        claims.submit(ClaimOperation::CheckWrites),
        settlements.submit(SettleOperation::Renew(Vec::new()))
    );
    match proven? {
        ClaimReply::WritesChecked => renewed.map(drop),
        ClaimReply::Claim { .. } | ClaimReply::Superseded(_) | ClaimReply::Flushed { .. } => Err(unexpected_reply()),
    }
}

/// Whether claims and settlements work, as far as known.
pub(super) struct WriteHealth {
    began: Instant,
    /// When a claim and a settlement last worked, in milliseconds since `began`, plus one.
    last_claim: AtomicU64,
    last_settle: AtomicU64,
    /// Whether `failure` is set.
    is_failing: AtomicBool,
    /// Why attempts could not be settled.
    failure: Mutex<Option<(ErrorKind, String)>>,
    suspected: Notify,
}

impl WriteHealth {
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            last_claim: AtomicU64::new(0),
            last_settle: AtomicU64::new(0),
            is_failing: AtomicBool::new(false),
            failure: Mutex::default(),
            suspected: Notify::new(),
        }
    }

    pub(super) fn record_claim(&self) {
        self.last_claim.store(self.now(), Ordering::Relaxed);
    }

    pub(super) fn record_settle(&self) {
        self.last_settle.store(self.now(), Ordering::Relaxed);
    }

    /// A settlement failed: checks whether others work.
    pub(super) fn suspect(&self) {
        self.suspected.notify_one();
    }

    /// Whether a claim and a settlement have worked just now, and nothing is known to fail.
    pub(super) fn is_recent_success(&self) -> bool {
        let recent =
            |at: &AtomicU64| self.now().saturating_sub(at.load(Ordering::Relaxed)) <= VALIDITY.as_millis() as u64;
        !self.is_failing.load(Ordering::Relaxed) && recent(&self.last_claim) && recent(&self.last_settle)
    }

    /// The error for claims while settlements fail.
    pub(super) fn refusal(&self) -> Option<Error> {
        if !self.is_failing.load(Ordering::Relaxed) {
            return None;
        }
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.as_ref().map(|(kind, message)| Error::determinate(*kind, message.clone()))
    }

    /// Checks, after every failed settlement, whether claims and settlements work, and repeats that until they do.
    /// Runs for as long as the store does.
    pub(super) async fn run(&self, claims: &Batcher<Claims>, settlements: &Batcher<Settlements>) {
        loop {
            self.suspected.notified().await;
            let mut pause = MIN_BACKOFF;
            while let Err(error) = check_all(claims, settlements).await {
                // A database that is unavailable is refused by the batchers themselves.
                if matches!(&error, Error::Determinate(cause) if !is_away(cause.kind)) {
                    self.record_failure(&error);
                }
                sleep(pause).await;
                pause = (pause * 2).min(MAX_BACKOFF);
            }
            self.record_success();
        }
    }

    fn record_failure(&self, error: &Error) {
        let cause = error.cause();
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.is_none() {
            tracing::debug!(%error, "attempts cannot be settled: nothing is claimed until they can");
        }
        *failure = Some((cause.kind, cause.source.to_string()));
        self.is_failing.store(true, Ordering::Relaxed);
    }

    /// Notes that a claim and a settlement worked.
    pub(super) fn record_success(&self) {
        self.record_claim();
        self.record_settle();
        if self.is_failing.load(Ordering::Relaxed) {
            *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = None;
            self.is_failing.store(false, Ordering::Relaxed);
            tracing::debug!("attempts can be settled again");
        }
    }

    fn now(&self) -> u64 {
        // Never zero, and late enough that what never worked is not recent.
        (self.began.elapsed() + VALIDITY).as_millis() as u64 + 1
    }
}

fn is_away(kind: ErrorKind) -> bool {
    kind.is_passing()
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_recent_claim_and_settlement_count_as_a_check() {
        let write_health = WriteHealth::new();
        assert!(!write_health.is_recent_success(), "neither has worked yet");
        write_health.record_claim();
        assert!(!write_health.is_recent_success(), "no ending has");
        write_health.record_settle();
        assert!(write_health.is_recent_success());
        advance(VALIDITY / 2).await;
        write_health.record_claim();
        advance(VALIDITY / 2 + Duration::from_millis(1)).await;
        assert!(!write_health.is_recent_success(), "that is too long ago");
        write_health.record_settle();
        assert!(write_health.is_recent_success());
        write_health.record_failure(&Error::determinate(ErrorKind::Other, "denied"));
        assert!(!write_health.is_recent_success() && write_health.refusal().is_some());
        write_health.record_success();
        assert!(write_health.is_recent_success() && write_health.refusal().is_none());
    }
}
