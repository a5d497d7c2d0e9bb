//! Ends an attempt at the database that owns its record.

use std::sync::{Arc, OnceLock};

use futures_util::future::BoxFuture;

use super::{AttemptToken, Error, RecordId, Settled, Settlement, Sharded, Store};
use crate::idempotency::record::Timestamp;

impl Sharded {
    /// See [`Store::settle`].
    pub(super) async fn settle_at_owner(
        &self,
        id: RecordId,
        attempt: AttemptToken,
        end: Settlement,
    ) -> Result<Settled, Error> {
        // A release is done as well where there is no record. So each is made a second time, to be sure of the database, and a retry
        // may have claimed the key in between: what the only owner said first counts. While records move, either may say so.
        let released = Arc::<OnceLock<Timestamp>>::default();
        let is_release = matches!(end, Settlement::Release);
        let has_one_owner = self.owners(id)?.second.is_none();
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            let (end, released) = (end.clone(), Arc::clone(&released));
            Box::pin(async move {
                let settled = store.settle(id, attempt, end).await?;
                if let Settled::Done { until } = settled {
                    let _ = released.set(until);
                }
                Ok(settled)
            })
        };
        let is_found = |settled: &Settled| !is_release && !matches!(settled, Settled::NotCurrent { record: None });
        let settled = self.ask(id, false, call, is_found).await?;
        match (&settled, released.get()) {
            (Settled::NotCurrent { record: Some(record) }, Some(&until))
                if is_release && has_one_owner && record.attempt != attempt =>
            {
                Ok(Settled::Done { until })
            }
            _ => Ok(settled),
        }
    }
}
