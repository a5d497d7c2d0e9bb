//! Parts of records that could not be decrypted.

use super::log_throttle::LogThrottle;
use super::metrics::Metrics;
use crate::idempotency::record::RecordId;
use crate::store::sealed::DecryptionError;

impl Metrics {
    /// Counts and logs parts of records that could not be decrypted.
    pub fn decryption_failed(&self) -> impl Fn(RecordId, DecryptionError) + Send + Sync + 'static {
        let families = self.families.clone();
        let warned = DecryptionError::ALL.map(|_| LogThrottle::default());
        move |record, closed| {
            families.decryption_failures[closed as usize].inc();
            let Some(others) = warned[closed as usize].due() else { return };
            match closed {
                DecryptionError::NoKey => tracing::error!(
                    %record, others, "a record is encrypted with a key that store.encryption_keys does not have: its requests get 503"
                ),
                DecryptionError::Plain => tracing::error!(
                    %record, others, "a record is not encrypted, and seal = \"required\" demands that it is: its requests get 503"
                ),
                DecryptionError::Altered => tracing::error!(
                    %record, others, "a record was altered or moved in the store, and does not decrypt: its requests get 503"
                ),
            }
        }
    }
}
