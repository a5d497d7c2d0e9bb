//! Reads and lists records.

use std::time::{Duration, Instant};

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::pool::Pool;
use super::row::{self, Unreadable};
use crate::idempotency::record::{RecordId, State};
use crate::store::{Error, ErrorKind, Filter, Listed, Page};

/// How many records one statement reads.
const CHUNK: i64 = 4096;

/// How long a listing runs before it returns a partial page.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);

const GET: &str = "SELECT id, now, attempt, state, claimed_at, until, head, answer, service, namespace, route \
                   FROM oncegate.get_v1($1)";

pub(super) async fn get(pool: &Pool, id: RecordId) -> Result<Option<Listed>, Error> {
    let rows = pool.query(GET, &[(&&id.0[..], Type::BYTEA)]).await?;
    rows.first().map(listed).transpose().map_err(unreadable)
}

pub(super) async fn list(pool: &Pool, filter: &Filter, after: Option<RecordId>, limit: usize) -> Result<Page, Error> {
    let started = Instant::now();
    let walk = Scan::of(filter);
    let (mut after, before) = bounds(filter, after);
    // One extra record shows whether there are more.
    let wanted = limit.saturating_add(1);
    let mut found = Vec::new();
    loop {
        let end = walk.end_of_chunk(pool, &after, &before).await?;
        let upto = end.as_ref().map_or(&before[..], |end| &end.0[..]);
        found.extend(walk.between(pool, filter, &after, upto, wanted - found.len()).await?);
        match end {
            Some(end) if found.len() < wanted && started.elapsed() < LIST_TIMEOUT => after = end.0.to_vec(),
            Some(end) if found.len() < wanted => return Ok(Page { records: found, next: Some(end) }),
            _ => return Ok(Page::of(found, limit)),
        }
    }
}

/// Which records a listing walks past. The state is written out: only so its index serves.
#[derive(Clone, Copy)]
struct Scan(&'static str);

impl Scan {
    fn of(filter: &Filter) -> Self {
        match filter.state {
            Some(State::InFlight) => Self("r.state = 0"),
            Some(State::Unknown) => Self("r.state = 2"),
            Some(State::Completed) | None => Self("true"),
        }
    }

    /// The last id of the chunk after `after` and before `before`; `None` if fewer are left.
    async fn end_of_chunk(self, pool: &Pool, after: &[u8], before: &[u8]) -> Result<Option<RecordId>, Error> {
        let sql = format!(
            "SELECT r.id FROM oncegate.record r WHERE {} AND r.id > $1 AND r.id < $2 ORDER BY r.id OFFSET $3 - 1 LIMIT 1",
            self.0
        );
        let rows = pool.query(&sql, &[(&after, Type::BYTEA), (&before, Type::BYTEA), (&CHUNK, Type::INT8)]).await?;
        rows.first().map(|found| row::id(found, 0)).transpose().map_err(unreadable)
    }

    /// The records after `after` and up to `end` that pass.
    async fn between(
        self,
        pool: &Pool,
        filter: &Filter,
        after: &[u8],
        end: &[u8],
        missing: usize,
    ) -> Result<Vec<Listed>, Error> {
        let sql = format!(
            "SELECT r.id, t.now, r.attempt, r.state, r.claimed_at,
                    CASE r.state WHEN 0 THEN r.lease_until ELSE r.expires_at END, r.head, NULL::bytea,
                    o.service, o.namespace, o.route
             FROM (SELECT oncegate.now_v1() AS now OFFSET 0) t, oncegate.record r
                LEFT JOIN oncegate.origin o ON o.id = r.origin
             WHERE {} AND r.id > $1 AND r.id <= $2
                AND ($3::smallint IS NULL OR r.state = $3) AND ($4::text IS NULL OR o.service = $4)
                AND ($5::text IS NULL OR o.route = $5) AND ($6::bigint IS NULL OR r.claimed_at <= t.now - $6)
             ORDER BY r.id LIMIT $7",
            self.0
        );
        let (state, missing) = (filter.state.map(row::state), i64::try_from(missing).unwrap_or(i64::MAX));
        let age = filter.older_than.map(row::span);
        let values: [(&(dyn ToSql + Sync), Type); 7] = [
            (&after, Type::BYTEA),
            (&end, Type::BYTEA),
            (&state, Type::INT2),
            (&filter.service.as_deref(), Type::TEXT),
            (&filter.route, Type::TEXT),
            (&age, Type::INT8),
            (&missing, Type::INT8),
        ];
        let rows = pool.query(&sql, &values).await?;
        rows.iter().map(listed).collect::<Result<_, _>>().map_err(unreadable)
    }
}

fn listed(found: &Row) -> Result<Listed, Unreadable> {
    Ok(Listed {
        id: row::id(found, 0)?,
        now: row::time(found, 1)?,
        record: row::record(found, 2)?,
        origin: row::origin(found, 8)?,
    })
}

/// The ids between which a page lies, both excluded. Shorter and longer strings of bytes than an id sort before and
/// after the ids that they start.
fn bounds(filter: &Filter, after: Option<RecordId>) -> (Vec<u8>, Vec<u8>) {
    let prefix = filter.prefix.map(Vec::from).unwrap_or_default();
    let mut before = prefix.clone();
    before.resize(33, 0xff);
    let after = after.map(|id| id.0.to_vec()).unwrap_or_default();
    (after.max(prefix), before)
}

fn unreadable(unreadable: Unreadable) -> Error {
    Error::determinate(ErrorKind::Corrupt, unreadable)
}
