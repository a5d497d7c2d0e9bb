//! Entries of the audit log.

use async_trait::async_trait;
use bytes::Bytes;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::row::{self, Unreadable};
use super::session::Parameter;
use super::{Postgres, count_of, listing, unexpected_reply};
use crate::store::audit::{AuditLog, Entry, EntryFilter, EntryPage, NewEntry, Position};
use crate::store::{Error, ErrorKind, Since};

const APPEND: &str = "SELECT oncegate.append_entry_v1($1, $2, $3, $4, $5, $6, $7)";

const AMEND: &str = "SELECT oncegate.amend_entry_v1($1, $2)";

const SWEEP: &str = "SELECT oncegate.sweep_entries_v1($1)";

/// The `$8` newest entries before `$1` that pass.
const NEWEST: &str = "SELECT a.position, a.at, a.expires_at, a.service, a.action, a.by, a.record, a.detail, a.reason
    FROM oncegate.audit a
    WHERE ($1::bigint IS NULL OR a.position < $1) AND ($2::text IS NULL OR a.service = $2)
        AND ($3::text IS NULL OR a.action = $3) AND ($4::text IS NULL OR a.by = $4)
        AND ($5::bytea IS NULL OR a.record = $5)
        AND ($6::bigint IS NULL OR a.at >= (SELECT oncegate.now_v1()) - $6) AND ($7::bigint IS NULL OR a.at >= $7)
    ORDER BY a.position DESC LIMIT $8";

#[async_trait]
impl AuditLog for Postgres {
    async fn append(&self, entry: NewEntry) -> Result<Position, Error> {
        self.ensure_open()?;
        let NewEntry { ttl, service, action, by, record, detail, reason } = &entry;
        let record = record.as_ref().map(|record| &record.0[..]);
        let values: [Parameter<'_>; 7] = [
            (&row::span(*ttl), Type::INT8),
            (&&**service, Type::TEXT),
            (&&**action, Type::TEXT),
            (&&**by, Type::TEXT),
            (&record, Type::BYTEA),
            (&&detail[..], Type::BYTEA),
            (&reason.as_deref(), Type::BYTEA),
        ];
        let rows = self.pool.write_unless_locked(APPEND, &values).await?;
        let position = rows.first().and_then(|found| row::number(found, 0).ok());
        position.map(Position).ok_or_else(unexpected_reply)
    }

    async fn amend(&self, position: Position, detail: Bytes) -> Result<bool, Error> {
        self.ensure_open()?;
        let Ok(place) = i64::try_from(position.0) else { return Ok(false) };
        let rows = self.pool.write(AMEND, &[(&place, Type::INT8), (&&detail[..], Type::BYTEA)]).await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }

    async fn entries(&self, filter: EntryFilter, before: Option<Position>, limit: usize) -> Result<EntryPage, Error> {
        self.ensure_open()?;
        let before = before.map(|before| i64::try_from(before.0).unwrap_or(i64::MAX));
        let EntryFilter { service, action, by, record, since } = &filter;
        let record = record.as_ref().map(|record| &record.0[..]);
        let (since_ago, since) = match since {
            Some(Since::Ago(age)) => (Some(row::span(*age)), None),
            Some(Since::At(time)) => (None, Some(row::millis(*time))),
            None => (None, None),
        };
        // One extra entry shows whether there are more.
        let wanted = row::count(limit.saturating_add(1));
        let values: [Parameter<'_>; 8] = [
            (&before, Type::INT8),
            (&service.as_deref(), Type::TEXT),
            (&action.as_deref(), Type::TEXT),
            (&by.as_deref(), Type::TEXT),
            (&record, Type::BYTEA),
            (&since_ago, Type::INT8),
            (&since, Type::INT8),
            (&wanted, Type::INT8),
        ];
        let rows = listing::query(&self.pool, NEWEST, &values).await?;
        let found = rows.iter().map(entry).collect::<Result<_, _>>();
        let found = found.map_err(|unreadable| Error::determinate(ErrorKind::Corrupt, unreadable))?;
        Ok(EntryPage::of(found, limit))
    }

    async fn sweep_entries(&self, limit: usize) -> Result<usize, Error> {
        self.ensure_open()?;
        count_of(&self.pool.write_unless_locked(SWEEP, &[(&row::count(limit), Type::INT8)]).await?, 0)
    }
}

fn entry(found: &Row) -> Result<Entry, Unreadable> {
    let text = |column| row::get::<&str>(found, column).map(Into::into);
    Ok(Entry {
        position: Position(row::number(found, 0)?),
        at: row::time(found, 1)?,
        until: row::time(found, 2)?,
        service: text(3)?,
        action: text(4)?,
        by: text(5)?,
        record: if row::is_null(found, 6)? { None } else { Some(row::id(found, 6)?) },
        detail: Bytes::copy_from_slice(row::get(found, 7)?),
        reason: row::get::<Option<&[u8]>>(found, 8)?.map(Bytes::copy_from_slice),
    })
}
