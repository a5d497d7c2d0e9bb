//! Reads and lists records.

use std::collections::{HashMap, VecDeque};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use redis::{FromRedisValue, Value};

use super::keys::{self, Partition};
use super::record::{self, StoredRecord, Unreadable};
use super::{Redis, number, parts, unexpected_reply};
use crate::idempotency::record::{Record, RecordId, Timestamp};
use crate::store::listing::{Newest, takes_too_long};
use crate::store::resealing::{BEGINNING, Beginning, Beginnings, Values};
use crate::store::{Chunk, Cursor, Error, Filter, Origin, OriginId, Page, RecordEntry};

/// How many records one call reads.
const CHUNK: usize = 256;

/// How many ids one call fetches.
const IDS: usize = 1000;

/// How long a listing may take.
const LIST_TIMEOUT: Duration = Duration::from_secs(20);

/// How long a scan runs before it returns a partial chunk.
const SCAN_TIMEOUT: Duration = Duration::from_secs(5);

/// Records one after another, in the order of their ids, without their answers.
///
/// The ids of a partition are in no order on the server: they are fetched together, 32 bytes each, when it is its turn.
pub(super) struct Scan<'a> {
    store: &'a Redis,
    wanted: RangeInclusive<RecordId>,
    after: Option<RecordId>,
    partitions: RangeInclusive<u8>,
    ids: VecDeque<RecordId>,
    found: VecDeque<(RecordId, StoredRecord, Timestamp)>,
    /// How many bytes of each answer.
    answers: usize,
}

impl<'a> Scan<'a> {
    /// Of all records.
    pub(super) fn of_all(store: &'a Redis) -> Self {
        Self::of(store, &Filter::default(), None)
    }

    /// Of the records whose ids may pass the filter, after an id.
    fn of(store: &'a Redis, filter: &Filter, after: Option<RecordId>) -> Self {
        let wanted = filter.ids();
        let first = Partition::of(after.map_or(*wanted.start(), |after| after.max(*wanted.start())));
        let partitions = first.0..=Partition::of(*wanted.end()).0;
        Self { store, wanted, after, partitions, ids: VecDeque::new(), found: VecDeque::new(), answers: 0 }
    }

    /// The next record with the time by the store's clock; `None` if there are no more.
    pub(super) async fn next(&mut self) -> Result<Option<(RecordId, StoredRecord, Timestamp)>, Error> {
        while self.found.is_empty() {
            if self.ids.is_empty() {
                let Some(partition) = self.partitions.next() else { return Ok(None) };
                self.ids = self.ids_in(Partition(partition)).await?.into();
                continue;
            }
            let chunk: Vec<RecordId> = self.ids.drain(..self.ids.len().min(CHUNK)).collect();
            self.found = read(self.store, &chunk, self.answers).await?;
        }
        Ok(self.found.pop_front())
    }

    /// The wanted ids of a partition, in order. A record that exists throughout the scan is among them.
    async fn ids_in(&self, partition: Partition) -> Result<Vec<RecordId>, Error> {
        let mut ids = Vec::new();
        let mut cursor = 0_u64;
        loop {
            let mut command = redis::cmd("ZSCAN");
            command.arg(&partition.times()[..]).arg(cursor).arg("COUNT").arg(IDS);
            let response = self.store.ask(command).await?;
            let (next, found) =
                <(u64, Vec<(Vec<u8>, f64)>)>::from_redis_value(response).map_err(|_| unexpected_reply(Unreadable))?;
            for (id, _) in found {
                let id = id.try_into().map(RecordId).map_err(|_| unexpected_reply(Unreadable))?;
                if self.wanted.contains(&id) && self.after.is_none_or(|after| id > after) {
                    ids.push(id);
                }
            }
            cursor = next;
            if cursor == 0 {
                break;
            }
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }
}

async fn read(
    store: &Redis,
    ids: &[RecordId],
    answers: usize,
) -> Result<VecDeque<(RecordId, StoredRecord, Timestamp)>, Error> {
    let mut call = store.client.scripts.look.call(ids.len());
    for id in ids {
        call.arg(&keys::record(*id)[..]);
    }
    call.arg(answers);
    let Value::Array(response) = store.ask(call).await? else { return Err(unexpected_reply(Unreadable)) };
    let mut response = response.into_iter();
    let now = response
        .next()
        .as_ref()
        .map(number)
        .transpose()?
        .map(record::time)
        .ok_or_else(|| unexpected_reply(Unreadable))?;
    let mut found = VecDeque::new();
    for (id, value) in ids.iter().zip(response) {
        // It may have gone meanwhile.
        let Value::BulkString(value) = value else { continue };
        match record::read(value, answers > 0) {
            Ok(stored) => found.push_back((*id, stored, now)),
            Err(error) => tracing::warn!(%error, %id, "a record was left out of the listing"),
        }
    }
    Ok(found)
}

pub(super) async fn get(store: &Redis, id: RecordId) -> Result<Option<RecordEntry>, Error> {
    let mut call = store.client.scripts.get.call(1);
    call.arg(&keys::record(id)[..]);
    let (now, Some(current)) = parts(store.ask(call).await?)? else { return Ok(None) };
    let stored = record::read(current, true).map_err(unexpected_reply)?;
    let origin = origins(store).await?.remove(&stored.origin.0);
    Ok(Some(RecordEntry { id, origin, record: stored.record, now }))
}

/// The newest records, of all that have such ids: no key has them in the order of their claims.
pub(super) async fn list(store: &Redis, filter: &Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
    let started = Instant::now();
    let origins = origins(store).await?;
    let mut scan = Scan::of(store, filter, None);
    let mut newest = Newest::new(after, limit);
    while let Some((id, StoredRecord { record, origin, .. }, now)) = scan.next().await? {
        let origin = origins.get(&origin.0);
        if newest.wants(record.claimed_at, id) && filter.passes(id, &record, origin, now) {
            newest.keep(record.claimed_at, 0, RecordEntry { id, origin: origin.cloned(), record, now });
        }
        if started.elapsed() > LIST_TIMEOUT {
            return Err(takes_too_long(LIST_TIMEOUT));
        }
    }
    Ok(newest.into_page())
}

/// How the values of records begin.
pub(super) async fn beginnings(store: &Redis, after: Option<RecordId>, limit: usize) -> Result<Beginnings, Error> {
    let mut scan = Scan { answers: BEGINNING, ..Scan::of(store, &Filter::default(), after) };
    let mut records = Vec::new();
    while records.len() < limit
        && let Some((id, StoredRecord { record, .. }, _)) = scan.next().await?
    {
        let Record { state, head, answer, .. } = record;
        records.push(Beginning { id, state, values: Values { head, answer }.beginning() });
    }
    Ok(Beginnings::of(records, limit))
}

pub(super) async fn scan(
    store: &Redis,
    filter: &Filter,
    after: Option<RecordId>,
    limit: usize,
) -> Result<Chunk, Error> {
    let started = Instant::now();
    let origins = origins(store).await?;
    let mut scan = Scan::of(store, filter, after);
    let mut found: Vec<RecordEntry> = Vec::new();
    while found.len() <= limit {
        let Some((id, stored, now)) = scan.next().await? else { break };
        let origin = origins.get(&stored.origin.0);
        if filter.passes(id, &stored.record, origin, now) {
            found.push(RecordEntry { id, origin: origin.cloned(), record: stored.record, now });
        } else if started.elapsed() > SCAN_TIMEOUT {
            return Ok(Chunk { records: found, next: Some(id) });
        }
    }
    Ok(Chunk::of(found, limit))
}

/// All origins that are known.
pub(super) async fn origins(store: &Redis) -> Result<HashMap<i64, Origin>, Error> {
    let command = redis::cmd("HVALS").arg(keys::ORIGINS).to_owned();
    let response = store.ask(command).await?;
    let found = Vec::<Vec<u8>>::from_redis_value(response).map_err(|_| unexpected_reply(Unreadable))?;
    found.iter().map(|origin| read_origin(origin).map(|origin| (origin.id().0, origin))).collect()
}

/// The stored form of an origin: its parts, with a separator that none contains.
pub(super) fn write_origin(origin: &Origin) -> String {
    [&*origin.service, &*origin.namespace, &*origin.route].join("\n")
}

fn read_origin(value: &[u8]) -> Result<Origin, Error> {
    let text = std::str::from_utf8(value).map_err(|_| unexpected_reply(Unreadable))?;
    let mut parts = text.split('\n').map(Arc::<str>::from);
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(service), Some(namespace), Some(route), None) => Ok(Origin { service, namespace, route }),
        _ => Err(unexpected_reply(Unreadable)),
    }
}

/// The id that records refer to an origin by, as a key of its hash.
pub(super) fn origin_key(id: OriginId) -> [u8; 8] {
    id.0.to_be_bytes()
}
