//! Whether claims and endings work: a claim, a renewal and a release of a record that no request has.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::asking::{Asking, Said};
use super::confused;
use super::connect::{Call, Failed, Session};
use super::ending::Work;
use super::lane::Lane;
use crate::store::{Error, ErrorKind};

/// The first half of the ids of these records; the other half is random. Ids of requests are hashes.
const PREFIX: [u8; 16] = *b"oncegate proof\0\0";

/// Everything in one statement: nothing of it stands afterwards, however it ends. Where a step does nothing, the division
/// fails and takes the others back. The head takes as much room as that of most requests: a disk that is full has some for
/// what is smaller.
const PROOF: Call = Call {
    sql: "SELECT 1 / (c.attempt IS NULL AND r.id IS NOT NULL AND s.done_until IS NOT NULL)::int \
          FROM oncegate.claim_v1(ARRAY[$1], ARRAY[$2], '{60000}', '{60000}', '{60000}', '{0}', \
              ARRAY[decode(repeat('00', 1024), 'hex')]) AS c \
          LEFT JOIN LATERAL oncegate.renew_v1(ARRAY[c.id], ARRAY[$2], '{60000}') AS r (id) ON true \
          LEFT JOIN LATERAL oncegate.settle_v1(ARRAY[coalesce(r.id, c.id)], ARRAY[$2], '{3}', '{0}', '{NULL}', false) AS s \
          ON true",
    types: &[Type::BYTEA, Type::BYTEA],
};

/// For so long a claim and an ending that worked count as proof.
const RECENT: Duration = Duration::from_secs(1);

/// Between two proofs, at first and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Claims a record on a connection, renews and releases it, and waits until that is durable.
pub(super) async fn prove(session: &Session) -> Result<(), Failed> {
    let (mut id, mut attempt) = ([0; 32], [0; 16]);
    getrandom::fill(&mut attempt).map_err(|_| Failed::Unsent("no randomness to be had".to_owned()))?;
    id[..16].copy_from_slice(&PREFIX);
    id[16..].copy_from_slice(&attempt);
    match session.write(&PROOF, &[&&id[..], &&attempt[..]], 0).await {
        Ok(rows) if rows.is_empty() => Err(Failed::Unproven),
        Ok(_) => Ok(()),
        Err(Failed::Sql(error)) if error.code() == Some(&SqlState::DIVISION_BY_ZERO) => Err(Failed::Unproven),
        Err(failed) => Err(failed),
    }
}

/// The same through the connections that requests use.
pub(super) async fn prove_all(claims: &Lane<Asking>, endings: &Lane<Work>) -> Result<(), Error> {
    // Endings have their own connections; this writes nothing.
    let (proven, renewed) = tokio::join!(claims.ask(Asking::Prove), endings.ask(Work::Renew(Vec::new())));
    match proven? {
        Said::Proven => renewed.map(drop),
        Said::Claim { .. } | Said::Superseded(_) | Said::Flushed { .. } => Err(confused()),
    }
}

/// What is known of whether claims and endings work.
pub(super) struct Proofs {
    began: Instant,
    /// When a claim and an ending last worked, in milliseconds since `began`, plus one.
    claimed: AtomicU64,
    settled: AtomicU64,
    /// Whether `failure` is set.
    is_failing: AtomicBool,
    /// Why attempts could not be settled.
    failure: Mutex<Option<(ErrorKind, String)>>,
    doubted: Notify,
}

impl Proofs {
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            claimed: AtomicU64::new(0),
            settled: AtomicU64::new(0),
            is_failing: AtomicBool::new(false),
            failure: Mutex::default(),
            doubted: Notify::new(),
        }
    }

    pub(super) fn claimed(&self) {
        self.claimed.store(self.now(), Ordering::Relaxed);
    }

    pub(super) fn settled(&self) {
        self.settled.store(self.now(), Ordering::Relaxed);
    }

    /// An ending failed: whether others work is to be found out.
    pub(super) fn doubt(&self) {
        self.doubted.notify_one();
    }

    /// Whether a claim and an ending have worked just now, and nothing is known to fail.
    pub(super) fn are_recent(&self) -> bool {
        let recent =
            |at: &AtomicU64| self.now().saturating_sub(at.load(Ordering::Relaxed)) <= RECENT.as_millis() as u64;
        !self.is_failing.load(Ordering::Relaxed) && recent(&self.claimed) && recent(&self.settled)
    }

    /// Why nothing is to be claimed: it could not be settled.
    pub(super) fn refusal(&self) -> Option<Error> {
        if !self.is_failing.load(Ordering::Relaxed) {
            return None;
        }
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.as_ref().map(|(kind, told)| Error::determinate(*kind, told.clone()))
    }

    /// Finds out, whenever there is doubt, whether claims and endings work, and goes on until they do. Runs for as long as
    /// the store does.
    pub(super) async fn keep_proving(&self, claims: &Lane<Asking>, endings: &Lane<Work>) {
        loop {
            self.doubted.notified().await;
            let mut pause = FIRST_PAUSE;
            while let Err(error) = prove_all(claims, endings).await {
                // What is away is refused by the connections themselves, and comes back with them.
                if matches!(&error, Error::Determinate(cause) if !is_away(cause.kind)) {
                    self.fails(&error);
                }
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            self.works();
        }
    }

    fn fails(&self, error: &Error) {
        let cause = error.cause();
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.is_none() {
            tracing::error!(%error, "attempts cannot be settled: nothing is claimed until they can");
        }
        *failure = Some((cause.kind, cause.source.to_string()));
        self.is_failing.store(true, Ordering::Relaxed);
    }

    /// A claim and an ending worked.
    pub(super) fn works(&self) {
        self.claimed();
        self.settled();
        if self.is_failing.load(Ordering::Relaxed) {
            *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = None;
            self.is_failing.store(false, Ordering::Relaxed);
            tracing::info!("attempts can be settled again");
        }
    }

    fn now(&self) -> u64 {
        // Never zero, and late enough that what never worked is not recent.
        (self.began.elapsed() + RECENT).as_millis() as u64 + 1
    }
}

fn is_away(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Unavailable | ErrorKind::Timeout)
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_claim_and_an_ending_that_worked_just_now_are_proof() {
        let proofs = Proofs::new();
        assert!(!proofs.are_recent(), "neither has worked yet");
        proofs.claimed();
        assert!(!proofs.are_recent(), "no ending has");
        proofs.settled();
        assert!(proofs.are_recent());
        advance(RECENT / 2).await;
        proofs.claimed();
        advance(RECENT / 2 + Duration::from_millis(1)).await;
        assert!(!proofs.are_recent(), "that is too long ago");
        proofs.settled();
        assert!(proofs.are_recent());
        proofs.fails(&Error::determinate(ErrorKind::Other, "denied"));
        assert!(!proofs.are_recent() && proofs.refusal().is_some());
        proofs.works();
        assert!(proofs.are_recent() && proofs.refusal().is_none());
    }
}
