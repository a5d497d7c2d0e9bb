//! Claims and endings, asked for again until it is known what became of them.

use std::future::Future;
use std::time::Duration;

use tokio::time::sleep;

use crate::idempotency::record::{Attempt, RecordId, Version};
use crate::store::{Claim, End, Error, Fresh, Settled, Store};

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Claims a key. An error says that the claim does not stand and will not.
pub(super) async fn claim(store: &dyn Store, id: RecordId, fresh: &Fresh) -> Result<Claim, Error> {
    until_certain(id, "claim", || store.claim(id, fresh.clone())).await
}

/// Replaces a record. An error says that it was not replaced and will not be.
pub(super) async fn supersede(store: &dyn Store, id: RecordId, seen: Version, fresh: &Fresh) -> Result<bool, Error> {
    until_certain(id, "supersede", || store.supersede(id, seen, fresh.clone())).await
}

/// Ends an attempt, asking until the store has answered.
pub(super) async fn settle(store: &dyn Store, id: RecordId, attempt: Attempt, end: End) -> Settled {
    let mut backoff = Backoff::new();
    loop {
        match store.settle(id, attempt, end.clone()).await {
            Ok(settled) => {
                backoff.done(id, "settle");
                return settled;
            }
            Err(error) => backoff.pause_after(&error, id, "settle").await,
        }
    }
}

/// Asks until the answer is certain: where it is not known whether something was written, the same is asked again with
/// the same attempt, for as long as it takes. A claim that stands with nobody behind it would turn its key unknown for
/// nothing.
async fn until_certain<T, F>(id: RecordId, what: &'static str, ask: impl Fn() -> F) -> Result<T, Error>
where
    F: Future<Output = Result<T, Error>>,
{
    let mut backoff = Backoff::new();
    let mut uncertain = false;
    loop {
        match ask().await {
            Ok(answer) => {
                backoff.done(id, what);
                return Ok(answer);
            }
            Err(error @ Error::Determinate(_)) if !uncertain => return Err(error),
            Err(error) => {
                uncertain = true;
                backoff.pause_after(&error, id, what).await;
            }
        }
    }
}

/// Pauses that grow, between two questions to a store that is away.
struct Backoff {
    next: Duration,
}

impl Backoff {
    fn new() -> Self {
        Self { next: FIRST_PAUSE }
    }

    /// The store has answered, perhaps after all.
    fn done(&self, id: RecordId, what: &'static str) {
        if self.next > FIRST_PAUSE {
            tracing::info!(record = %id, what, "the store has answered after all");
        }
    }

    async fn pause_after(&mut self, error: &Error, id: RecordId, what: &'static str) {
        if self.next == FIRST_PAUSE {
            tracing::warn!(%error, record = %id, what, "the store failed; asking again until it answers");
        } else {
            tracing::debug!(%error, record = %id, what, "the store still fails");
        }
        sleep(self.next).await;
        self.next = (self.next * 2).min(LONGEST_PAUSE);
    }
}
