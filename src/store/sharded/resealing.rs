//! Keys of records.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::BoxFuture;

use super::Sharded;
use crate::idempotency::record::{AttemptToken, RecordId, Version};
use crate::store::deliveries::Delivery;
use crate::store::resealing::{Beginnings, DeliveryValues, Resealing, Values};
use crate::store::{Error, ErrorKind, Store};

fn resealing(store: &dyn Store) -> Result<&dyn Resealing, Error> {
    store.resealing().ok_or_else(|| Error::determinate(ErrorKind::Other, "this store's records cannot be replaced"))
}

#[async_trait]
impl Resealing for Sharded {
    async fn beginnings(&self, after: Option<RecordId>, limit: usize) -> Result<Beginnings, Error> {
        let call = |store: Arc<dyn Store>, wanted| -> BoxFuture<'static, _> {
            Box::pin(async move {
                let Beginnings { records, next } = resealing(&*store)?.beginnings(after, wanted).await?;
                Ok((records, next))
            })
        };
        let (records, next) = self.in_order(after, limit, call, |beginning| beginning.id).await?;
        let found = Beginnings::of(records, limit);
        Ok(Beginnings { next: found.next.or(next), ..found })
    }

    async fn reseal(&self, id: RecordId, seen: Version, values: Values) -> Result<bool, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            let values = values.clone();
            Box::pin(async move { resealing(&*store)?.reseal(id, seen, values).await })
        };
        self.ask(id, false, call, |resealed| *resealed).await
    }

    async fn delivery_values(&self, id: RecordId) -> Result<Option<(Delivery, DeliveryValues)>, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            Box::pin(async move { resealing(&*store)?.delivery_values(id).await })
        };
        self.ask(id, false, call, Option::is_some).await
    }

    async fn reseal_delivery(
        &self,
        id: RecordId,
        token: AttemptToken,
        seen: Option<Bytes>,
        values: DeliveryValues,
    ) -> Result<bool, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            let (seen, values) = (seen.clone(), values.clone());
            Box::pin(async move { resealing(&*store)?.reseal_delivery(id, token, seen, values).await })
        };
        self.ask(id, false, call, |resealed| *resealed).await
    }
}
