//! Entries of the audit log.
//!
//! One sorted set has them in the order of their places, so that one node of a cluster has all of them. What stands in it is
//! the place, the times, the length of what never changes, that, and the detail. Another set has the places in the order in
//! which they expire.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::{Buf, BufMut, Bytes};
use redis::Value;

use super::record::{self, Unreadable};
use super::{Redis, keys, number, unexpected_reply};
use crate::idempotency::record::{RecordId, Timestamp};
use crate::store::Error;
use crate::store::audit::{AuditLog, Entry, EntryFilter, EntryPage, NewEntry, Position};
use crate::store::listing::takes_too_long;

/// How many entries one call reads: a megabyte or so.
const CHUNK: usize = 256;

/// How long a list may take: one that passes few entries looks at all.
const PATIENCE: Duration = Duration::from_secs(20);

#[async_trait]
impl AuditLog for Redis {
    async fn append(&self, entry: NewEntry) -> Result<Position, Error> {
        let mut call = self.client.scripts.append_entry.call(2);
        call.arg(keys::AUDIT).arg(keys::AUDIT_EXPIRY).arg(record::span(entry.ttl)).arg(write(&entry));
        number(&self.write(call).await?).map(Position)
    }

    async fn amend(&self, position: Position, detail: Bytes) -> Result<bool, Error> {
        let mut call = self.client.scripts.amend_entry.call(1);
        call.arg(keys::AUDIT).arg(position.0).arg(&detail[..]);
        Ok(number(&self.write(call).await?)? == 1)
    }

    async fn entries(&self, filter: EntryFilter, before: Option<Position>, limit: usize) -> Result<EntryPage, Error> {
        let started = Instant::now();
        let (mut found, mut next) = (Vec::new(), before.map_or(u64::MAX, |before| before.0.saturating_sub(1)));
        loop {
            let mut call = self.client.scripts.list_entries.call(1);
            call.arg(keys::AUDIT).arg(next).arg(CHUNK);
            let (now, chunk) = read_chunk(self.ask(call).await?)?;
            // The others are older still.
            let is_too_old = |entry: &Entry| filter.since.is_some_and(|since| !since.includes(entry.at, now));
            let is_last = chunk.len() < CHUNK || chunk.last().is_some_and(is_too_old);
            next = chunk.last().map_or(0, |last| last.position.0.saturating_sub(1));
            found.extend(chunk.into_iter().filter(|entry| filter.passes(entry, now)));
            // One extra entry shows whether there are more.
            if is_last || found.len() > limit {
                return Ok(EntryPage::of(found, limit));
            }
            if started.elapsed() > PATIENCE {
                return Err(takes_too_long(PATIENCE));
            }
        }
    }

    async fn sweep_entries(&self, limit: usize) -> Result<usize, Error> {
        let mut call = self.client.scripts.sweep_entries.call(2);
        call.arg(keys::AUDIT).arg(keys::AUDIT_EXPIRY).arg(limit);
        Ok(usize::try_from(number(&self.write(call).await?)?).unwrap_or(usize::MAX))
    }
}

/// What the script puts behind place and times.
fn write(entry: &NewEntry) -> Vec<u8> {
    let NewEntry { ttl: _, service, action, by, record, detail, reason } = entry;
    let record = record.as_ref().map(|record| &record.0[..]);
    let parts = [Some(service.as_bytes()), Some(action.as_bytes()), Some(by.as_bytes()), record, reason.as_deref()];
    let mut fixed = Vec::new();
    for part in parts {
        fixed.put_u8(u8::from(part.is_some()));
        let part = part.unwrap_or_default();
        fixed.put_u32(part.len() as u32);
        fixed.put_slice(part);
    }
    let mut written = Vec::with_capacity(4 + fixed.len() + detail.len());
    written.put_u32(fixed.len() as u32);
    written.put_slice(&fixed);
    written.put_slice(detail);
    written
}

/// The time by the store's clock, and entries.
fn read_chunk(response: Value) -> Result<(Timestamp, Vec<Entry>), Error> {
    let Value::Array(response) = response else { return Err(unexpected_reply(Unreadable)) };
    let mut response = response.into_iter();
    let now = response.next().as_ref().map(number).transpose()?.ok_or_else(|| unexpected_reply(Unreadable))?;
    let read = |value| match value {
        Value::BulkString(value) => read(value.into()).map_err(unexpected_reply),
        _ => Err(unexpected_reply(Unreadable)),
    };
    Ok((record::time(now), response.map(read).collect::<Result<_, _>>()?))
}

fn read(mut rest: Bytes) -> Result<Entry, Unreadable> {
    let position = Position(rest.try_get_u64()?);
    let (at, until) = (record::time(rest.try_get_u64()?), record::time(rest.try_get_u64()?));
    let length = rest.try_get_u32()? as usize;
    if rest.len() < length {
        return Err(Unreadable);
    }
    let mut fixed = rest.split_to(length);
    let mut part = || -> Result<Option<Bytes>, Unreadable> {
        let (is_there, length) = (fixed.try_get_u8()? == 1, fixed.try_get_u32()? as usize);
        if fixed.len() < length {
            return Err(Unreadable);
        }
        Ok(Some(fixed.split_to(length)).filter(|_| is_there))
    };
    let text = |part: Option<Bytes>| {
        let text = part.and_then(|part| String::from_utf8(part.into()).ok());
        text.map(Into::into).ok_or(Unreadable)
    };
    Ok(Entry {
        position,
        at,
        until,
        service: text(part()?)?,
        action: text(part()?)?,
        by: text(part()?)?,
        record: part()?.map(|id| id[..].try_into().map(RecordId).map_err(|_| Unreadable)).transpose()?,
        reason: part()?,
        detail: rest,
    })
}
