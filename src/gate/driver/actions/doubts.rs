//! Claims that failed, and that the store may carry out yet.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use crate::idempotency::record::{AttemptToken, RecordId};
use crate::store::{CLAIM_EXPIRY, Settlement, Store};

/// The pause between two tries of a release, and how many tries there are. After the last, the record stays, and turns unknown.
const PAUSE: Duration = Duration::from_secs(5);
const TRIES: u32 = 12;

/// The claims in doubt of one request.
///
/// A server or a network that hung may carry out a claim after its connection broke, and after the gate has released the key. The
/// record would be of an attempt that no gate knows: all retries would wait for it, and get `outcome-unknown` in the end.
#[derive(Default)]
pub(super) struct Doubts(Vec<Doubt>);

struct Doubt {
    attempt: AttemptToken,
    /// Until when the store may carry the claim out.
    until: Instant,
}

impl Doubts {
    /// A claim of this attempt failed, and may be carried out.
    pub(super) fn add(&mut self, attempt: AttemptToken) {
        self.0.retain(|doubt| doubt.attempt != attempt);
        self.0.push(Doubt { attempt, until: Instant::now() + CLAIM_EXPIRY });
    }

    /// Releases what the claims have left, once none can come any more. The request must be over: no attempt of these runs, and no
    /// record of theirs is needed.
    pub(super) fn clear_up(self, store: &Arc<dyn Store>, id: RecordId) {
        for Doubt { attempt, until } in self.0 {
            let store = Arc::clone(store);
            tokio::spawn(async move {
                sleep_until(until).await;
                for _ in 0..TRIES {
                    match store.settle(id, attempt, Settlement::Release).await {
                        Ok(_) => return,
                        Err(error) => {
                            tracing::debug!(%error, record = %id, "the store failed the release of a claim that may have come late");
                        }
                    }
                    sleep(PAUSE).await;
                }
            });
        }
    }
}
