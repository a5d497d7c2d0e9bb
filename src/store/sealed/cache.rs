//! A cache whose values are sealed.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::broadcast;

use super::keyring::{DecryptionError, Keyring, Part, Sealing};
use crate::idempotency::record::{AttemptToken, RecordId};
use crate::store::cached::{CacheOperation, RemoteCache, RemoteError};
use crate::store::{Removal, SharedQuotas};

/// Values are not of one attempt: each replaces what stood there.
const NO_ATTEMPT: AttemptToken = AttemptToken([0; 16]);

/// A cache that sees values only in sealed form. What was sealed with a key that is missing, or not at all, is no value.
pub struct SealedCache {
    cache: Arc<dyn RemoteCache>,
    keys: Arc<Keyring>,
}

impl SealedCache {
    /// Seals what goes to `cache`.
    pub fn new(cache: Arc<dyn RemoteCache>, keys: Arc<Keyring>) -> Self {
        Self { cache, keys }
    }

    /// A value that was altered is passed on as it is: whoever asked counts it as invalid.
    fn open(&self, id: RecordId, value: &Bytes) -> Option<Bytes> {
        if Sealing::of(value) == Sealing::Plain && self.keys.first().is_some() {
            return None;
        }
        match self.keys.open(id, NO_ATTEMPT, Part::Cached, value) {
            Ok(plain) => Some(plain),
            Err(DecryptionError::Altered) => Some(value.clone()),
            Err(DecryptionError::NoKey | DecryptionError::Plain) => None,
        }
    }
}

#[async_trait]
impl RemoteCache for SealedCache {
    async fn execute(&self, batch: &[CacheOperation]) -> Result<Vec<Option<Bytes>>, RemoteError> {
        let sealed: Vec<CacheOperation> = batch
            .iter()
            .map(|operation| match operation {
                CacheOperation::Put(id, value, life) => {
                    CacheOperation::Put(*id, self.keys.seal(*id, NO_ATTEMPT, Part::Cached, value), *life)
                }
                operation => operation.clone(),
            })
            .collect();
        let asked = batch.iter().filter_map(|operation| match operation {
            CacheOperation::Get(id) => Some(*id),
            _ => None,
        });
        let values = self.cache.execute(&sealed).await?;
        Ok(asked.zip(values).map(|(id, value)| value.and_then(|value| self.open(id, &value))).collect())
    }

    fn removals(&self) -> broadcast::Receiver<Removal> {
        self.cache.removals()
    }

    fn quotas(&self) -> Option<Arc<dyn SharedQuotas>> {
        self.cache.quotas()
    }
}
