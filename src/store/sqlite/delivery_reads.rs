//! Reads of requests that are delivered later.

use std::time::Duration;

use rusqlite::{OptionalExtension, params};

use super::deliveries::{delivery, select};
use super::error::Failure;
use super::reader::Reader;
use super::row;
use crate::idempotency::record::{RecordId, Timestamp};
use crate::store::OriginId;
use crate::store::deliveries::{Delivery, DeliveryCount, DeliveryFilter, DeliveryPage, Sequence};
use crate::store::resealing::DeliveryValues;

impl Reader {
    pub(super) fn delivery(&self, id: RecordId) -> Result<Option<Delivery>, Failure> {
        let sql = select("", "WHERE d.id = ?1");
        Ok(self.conn.prepare_cached(&sql)?.query_row([id.0], |found| delivery(found, self.now())).optional()?)
    }

    pub(super) fn delivery_values(&self, id: RecordId) -> Result<Option<(Delivery, DeliveryValues)>, Failure> {
        let sql = select(", d.request, d.body", "WHERE d.id = ?1");
        let mut find = self.conn.prepare_cached(&sql)?;
        let found = find.query_row([id.0], |found| {
            let delivery = delivery(found, self.now())?;
            let bytes = |column| row::read_bytes(found, column).map(Option::unwrap_or_default);
            let (head, note) = (delivery.head.clone(), delivery.note.clone());
            let values = DeliveryValues { head, request: bytes(14)?, body: bytes(15)?, note };
            Ok((delivery, values))
        });
        Ok(found.optional()?)
    }

    /// How long until something of an origin is due, if anything is queued there; nothing in it where something is due now.
    pub(super) fn next_due(&self, origin: OriginId) -> Result<Option<Option<Duration>>, Failure> {
        let mut next = self
            .conn
            .prepare_cached("SELECT due FROM delivery WHERE origin = ?1 AND dead_until IS NULL ORDER BY due LIMIT 1")?;
        let due = next.query_row([origin.0], |found| row::read_time(found, 0)).optional()?;
        let now = self.now();
        Ok(due.map(|due| (due > now).then(|| due.since(now))))
    }

    pub(super) fn deliveries(
        &self,
        filter: &DeliveryFilter,
        after: Option<Sequence>,
        limit: usize,
    ) -> Result<DeliveryPage, Failure> {
        let (DeliveryFilter { service, route, is_dead, .. }, ids) = (filter, filter.ids());
        let sql = select(
            "",
            "WHERE d.sequence > ?1 AND (?2 IS NULL OR o.service = ?2) AND (?3 IS NULL OR o.route = ?3)
                AND (?4 IS NULL OR (d.dead_until IS NOT NULL) = ?4) AND d.id BETWEEN ?6 AND ?7
             ORDER BY d.sequence LIMIT ?5",
        );
        let wanted = row::count(limit.saturating_add(1));
        let after = after.map_or(0, |Sequence(after)| i64::try_from(after).unwrap_or(i64::MAX));
        let values = params![after, service.as_deref(), route.as_deref(), is_dead, wanted, ids.start().0, ids.end().0];
        let mut listing = self.conn.prepare_cached(&sql)?;
        let now = self.now();
        let found = listing.query_map(values, |found| delivery(found, now))?.collect::<rusqlite::Result<_>>()?;
        Ok(DeliveryPage::of(found, limit))
    }

    pub(super) fn count_deliveries(&self) -> Result<Vec<DeliveryCount>, Failure> {
        let mut count = self.conn.prepare_cached(
            "SELECT o.service, o.namespace, o.route, c.queued, c.oldest, c.dead FROM (
                SELECT origin, count(*) FILTER (WHERE dead_until IS NULL) AS queued,
                    min(accepted_at) FILTER (WHERE dead_until IS NULL) AS oldest,
                    count(*) FILTER (WHERE dead_until IS NOT NULL) AS dead
                FROM delivery GROUP BY origin
             ) c LEFT JOIN origin o ON o.id = c.origin",
        )?;
        let now = self.now();
        let counts = count.query_map([], |found| {
            let oldest: Option<i64> = found.get(4)?;
            Ok(DeliveryCount {
                origin: row::origin(found, 0)?,
                queued: row::read_time(found, 3)?.0,
                oldest: oldest.map(|at| now.since(Timestamp(at.unsigned_abs()))),
                dead: row::read_time(found, 5)?.0,
            })
        })?;
        Ok(counts.collect::<rusqlite::Result<_>>()?)
    }

    pub(super) fn paused(&self) -> Result<Vec<OriginId>, Failure> {
        let mut paused = self.conn.prepare_cached("SELECT origin FROM paused")?;
        Ok(paused.query_map([], |found| found.get(0).map(OriginId))?.collect::<rusqlite::Result<_>>()?)
    }

    pub(super) fn nothing_to_sweep(&self) -> Result<bool, Failure> {
        let mut due = self.conn.prepare_cached("SELECT 1 FROM delivery WHERE dead_until <= ?1")?;
        Ok(!due.exists([row::time(self.now())])?)
    }
}
