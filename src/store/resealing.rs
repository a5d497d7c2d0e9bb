//! What replaces the keys of records that are there: see [`super::sealed`].

use async_trait::async_trait;
use bytes::Bytes;

use super::Error;
use super::deliveries::Delivery;
use crate::idempotency::record::{AttemptToken, RecordId, State, Version};

/// So many of the first bytes of a value tell whether it is sealed, and with which key.
pub const BEGINNING: usize = 10;

/// A store whose records can be replaced by the same ones in another form. It lies beneath what seals them.
#[async_trait]
pub trait Resealing: Send + Sync {
    /// How the values of records begin, in the order of their ids, starting after `after`: of at most `limit` (at least 1)
    /// records.
    async fn beginnings(&self, after: Option<RecordId>, limit: usize) -> Result<Beginnings, Error>;

    /// Puts other values in the place of those of a record that is not in flight, if its version is still `seen`. State and
    /// times stay. Durable when it returns.
    async fn reseal(&self, id: RecordId, seen: Version, values: Values) -> Result<bool, Error>;

    /// The delivery of an id with all its values, in a store that keeps deliveries.
    async fn delivery_values(&self, _id: RecordId) -> Result<Option<(Delivery, DeliveryValues)>, Error> {
        Ok(None)
    }

    /// Puts other values in the place of those of a delivery of this token, if its note is still `seen`. Durable when it
    /// returns.
    async fn reseal_delivery(
        &self,
        _id: RecordId,
        _token: AttemptToken,
        _seen: Option<Bytes>,
        _values: DeliveryValues,
    ) -> Result<bool, Error> {
        Ok(false)
    }
}

/// The values of a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeliveryValues {
    /// See [`Delivery::head`].
    pub head: Bytes,
    /// See [`crate::store::deliveries::NewDelivery::request`].
    pub request: Bytes,
    /// See [`crate::store::deliveries::NewDelivery::body`].
    pub body: Bytes,
    /// See [`Delivery::note`].
    pub note: Option<Bytes>,
}

/// The values of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Values {
    /// See [`crate::idempotency::record::Record::head`].
    pub head: Bytes,
    /// See [`crate::idempotency::record::Record::answer`].
    pub answer: Option<Bytes>,
}

/// Some of the records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Beginnings {
    /// They, in order.
    pub records: Vec<Beginning>,
    /// After which id the others come; `None` if there are no others.
    pub next: Option<RecordId>,
}

/// The first [`BEGINNING`] bytes of the values of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beginning {
    /// The record.
    pub id: RecordId,
    /// Its state.
    pub state: State,
    /// Its values, cut.
    pub values: Values,
}

impl Beginnings {
    /// Those that were found when `limit` were asked for.
    pub(super) fn of(records: Vec<Beginning>, limit: usize) -> Self {
        let next = (records.len() >= limit).then(|| records.last().map(|last| last.id)).flatten();
        Self { records, next }
    }
}

impl Values {
    /// Those of which only the beginning is wanted.
    pub(super) fn beginning(&self) -> Self {
        let cut = |value: &Bytes| value.slice(..value.len().min(BEGINNING));
        Self { head: cut(&self.head), answer: self.answer.as_ref().map(cut) }
    }
}
