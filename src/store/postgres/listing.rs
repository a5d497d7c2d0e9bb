//! Reads and lists records.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::pool::Pool;
use super::row::{self, Unreadable};
use super::session::Parameter;
use super::{Postgres, deliveries};
use crate::idempotency::record::{AttemptToken, RecordId, State, Version};
use crate::store::deliveries::Delivery;
use crate::store::resealing::{BEGINNING, Beginning, Beginnings, DeliveryValues, Values};
use crate::store::{Chunk, Cursor, Error, ErrorKind, Filter, Page, RecordEntry, Resealing, Since};

/// How many records one statement of a scan reads.
const CHUNK: i64 = 4096;

/// How long a scan runs before it returns a partial chunk.
const SCAN_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a listing may take, by the server's clock. It holds nothing that others wait for but keeps the vacuum from
/// removing what was deleted since it began.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);

/// The same where it takes the only connection that workers and large answers have too: they wait for two seconds.
const SHORT_LIST_TIMEOUT: Duration = Duration::from_secs(1);

const GET: &str = "SELECT id, now, attempt, state, claimed_at, until, head, answer, service, namespace, route \
                   FROM oncegate.get_v1($1)";

pub(super) async fn get(pool: &Pool, id: RecordId) -> Result<Option<RecordEntry>, Error> {
    let rows = pool.query(GET, &[(&&id.0[..], Type::BYTEA)]).await?;
    rows.first().map(listed).transpose().map_err(unreadable)
}

/// The newest records. No index has them in the order of their claims: to look at all of them and keep the newest takes a
/// fraction of a second for a million, and costs claims nothing.
pub(super) async fn list(pool: &Pool, filter: &Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
    let set = Set::of(filter);
    let ids = filter.prefix.map(|_| filter.ids());
    let (from, upto) = (ids.as_ref().map(|ids| &ids.start().0[..]), ids.as_ref().map(|ids| &ids.end().0[..]));
    // One extra record shows whether there are more.
    let wanted = row::count(limit.saturating_add(1));
    let (time, id) = (after.map(|after| row::millis(after.claimed_at)), after.map(|after| after.id.0.to_vec()));
    let passing = Passing::of(filter);
    let mut values = vec![(&from as &(dyn ToSql + Sync), Type::BYTEA), (&upto, Type::BYTEA), (&wanted, Type::INT8)];
    values.extend(passing.values());
    values.extend([(&time as &(dyn ToSql + Sync), Type::INT8), (&id, Type::BYTEA)]);
    let rows = query(pool, &set.newest(), &values).await?;
    let found = rows.iter().map(listed).collect::<Result<_, _>>().map_err(unreadable)?;
    Ok(Page::of(found, limit))
}

/// The rows of a statement that may look at a whole table.
pub(super) async fn query(pool: &Pool, sql: &str, values: &[Parameter<'_>]) -> Result<Vec<Row>, Error> {
    let patience = if pool.max_size() > 1 { LIST_TIMEOUT } else { SHORT_LIST_TIMEOUT };
    pool.query_in_transaction(&begin(patience), sql, values, patience + GRACE).await
}

/// Begins the transaction of a listing. It forbids no scan: what is forbidden and used all the same, as the scan of the
/// origins would be, counts so much that the planner sees no difference between the other ways. Half of its time may go by
/// until the tables can be read: only then is it known that it takes long because there is much to read.
fn begin(patience: Duration) -> String {
    let millis = patience.as_millis();
    let lock_millis = millis / 2;
    format!(
        "BEGIN READ ONLY; SET LOCAL statement_timeout = {millis}; SET LOCAL lock_timeout = {lock_millis}; SET LOCAL jit = off"
    )
}

/// How much longer the answer of a listing is waited for.
const GRACE: Duration = Duration::from_secs(2);

pub(super) async fn scan(pool: &Pool, filter: &Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
    let started = Instant::now();
    let set = Set::of(filter);
    let (first, last) = filter.ids().into_inner();
    let mut from = after.map_or_else(|| first.0.to_vec(), |after| behind(after).max(first.0.to_vec()));
    // One extra record shows whether there are more.
    let wanted = limit.saturating_add(1);
    let mut found = Vec::new();
    loop {
        let end = set.end_of_chunk(pool, &from, &last.0).await?;
        let upto = end.as_ref().map_or(&last.0, |end| &end.0);
        found.extend(set.between(pool, filter, &from, upto, wanted - found.len()).await?);
        match end {
            Some(end) if found.len() < wanted && started.elapsed() < SCAN_TIMEOUT => from = behind(end),
            Some(end) if found.len() < wanted => return Ok(Chunk { records: found, next: Some(end) }),
            _ => return Ok(Chunk::of(found, limit)),
        }
    }
}

const BEGINNINGS: &str = "SELECT r.id, r.state, substr(r.head, 1, $3), substr(r.answer, 1, $3)
    FROM oncegate.record r WHERE r.id > $1 ORDER BY r.id LIMIT $2";

/// How the values of records begin.
async fn read_beginnings(pool: &Pool, after: Option<RecordId>, limit: usize) -> Result<Beginnings, Error> {
    let after = after.as_ref().map_or(&[][..], |after| &after.0);
    let (wanted, bytes) = (row::count(limit), BEGINNING as i32);
    let values: [Parameter<'_>; 3] = [(&after, Type::BYTEA), (&wanted, Type::INT8), (&bytes, Type::INT4)];
    let rows = pool.query_unless_locked(BEGINNINGS, &values).await?;
    let beginning = |found: &Row| {
        let bytes = |column| row::get::<Option<&[u8]>>(found, column).map(|value| value.map(Bytes::copy_from_slice));
        let values = Values { head: bytes(2)?.unwrap_or_default(), answer: bytes(3)? };
        Ok(Beginning { id: row::id(found, 0)?, state: row::read_state(found, 1)?, values })
    };
    Ok(Beginnings::of(rows.iter().map(beginning).collect::<Result<_, _>>().map_err(unreadable)?, limit))
}

/// Replaces the values of a record.
async fn write_values(pool: &Pool, id: RecordId, seen: Version, values: &Values) -> Result<bool, Error> {
    let Values { head, answer } = values;
    let (head, answer) = (&head[..], answer.as_deref());
    let values: [Parameter<'_>; 6] = [
        (&&id.0[..], Type::BYTEA),
        (&&seen.attempt.0[..], Type::BYTEA),
        (&row::state(seen.state), Type::INT2),
        (&row::millis(seen.until), Type::INT8),
        (&head, Type::BYTEA),
        (&answer, Type::BYTEA),
    ];
    let rows = pool.write("SELECT oncegate.reseal_v1($1, $2, $3, $4, $5, $6)", &values).await?;
    Ok(rows.first().is_some_and(|row| row.get(0)))
}

/// The records that are looked at. The state is written out: only so its index serves.
#[derive(Clone, Copy)]
pub(super) struct Set(&'static str);

/// The columns of a record of `r` and an origin of `o`.
const COLUMNS: &str = "r.id, t.now, r.attempt, r.state, r.claimed_at,
    CASE r.state WHEN 0 THEN r.lease_until ELSE r.expires_at END, r.head, NULL::bytea, o.service, o.namespace, o.route";

impl Set {
    pub(super) fn of(filter: &Filter) -> Self {
        match filter.state {
            Some(State::InFlight) => Self("r.state = 0"),
            Some(State::Unknown) => Self("r.state = 2"),
            Some(State::Completed) => Self("r.state = 1"),
            None => Self("true"),
        }
    }

    /// The `$3` newest records from id `$1` to `$2` that pass, before time `$9` and id `$10`. Those that are looked at are
    /// sorted by what they are sorted by alone: the rest is read of the newest.
    pub(super) fn newest(self) -> String {
        format!(
            "SELECT {COLUMNS}
             FROM (
                SELECT r.id, r.claimed_at FROM oncegate.record r
                WHERE {} AND ($1::bytea IS NULL OR r.id >= $1) AND ($2::bytea IS NULL OR r.id <= $2) AND {PASSES}
                    AND ($9::bigint IS NULL OR (r.claimed_at, r.id) < ($9, $10))
                ORDER BY r.claimed_at DESC, r.id DESC LIMIT $3
             ) n
                CROSS JOIN LATERAL (SELECT * FROM oncegate.record s WHERE s.id = n.id OFFSET 0) r
                CROSS JOIN (SELECT oncegate.now_v1() AS now OFFSET 0) t
                LEFT JOIN oncegate.origin o ON o.id = r.origin
             ORDER BY n.claimed_at DESC, n.id DESC",
            self.0
        )
    }

    /// The last id of the chunk from `from` to `last`; `None` if fewer are left.
    async fn end_of_chunk(self, pool: &Pool, from: &[u8], last: &[u8]) -> Result<Option<RecordId>, Error> {
        let sql = format!(
            "SELECT r.id FROM oncegate.record r WHERE {} AND r.id >= $1 AND r.id <= $2 ORDER BY r.id OFFSET $3 - 1 LIMIT 1",
            self.0
        );
        let rows =
            pool.query_unless_locked(&sql, &[(&from, Type::BYTEA), (&last, Type::BYTEA), (&CHUNK, Type::INT8)]).await?;
        rows.first().map(|found| row::id(found, 0)).transpose().map_err(unreadable)
    }

    /// The records from `from` to `end` that pass.
    async fn between(
        self,
        pool: &Pool,
        filter: &Filter,
        from: &[u8],
        end: &[u8],
        missing: usize,
    ) -> Result<Vec<RecordEntry>, Error> {
        let sql = format!(
            "SELECT {COLUMNS}
             FROM (SELECT oncegate.now_v1() AS now OFFSET 0) t, oncegate.record r
                LEFT JOIN oncegate.origin o ON o.id = r.origin
             WHERE {} AND r.id >= $1 AND r.id <= $2 AND {PASSES}
             ORDER BY r.id LIMIT $3",
            self.0
        );
        let (missing, passing) = (row::count(missing), Passing::of(filter));
        let mut values = vec![(&from as &(dyn ToSql + Sync), Type::BYTEA), (&end, Type::BYTEA), (&missing, Type::INT8)];
        values.extend(passing.values());
        let rows = pool.query_unless_locked(&sql, &values).await?;
        rows.iter().map(listed).collect::<Result<_, _>>().map_err(unreadable)
    }
}

/// Whether a record of `r` passes, but for its state and id. The origins and the time are found once.
const PASSES: &str = "($4::text IS NULL AND $5::text IS NULL OR r.origin = ANY (ARRAY(
        SELECT o.id FROM oncegate.origin o
        WHERE ($4::text IS NULL OR o.service = $4) AND ($5::text IS NULL OR o.route = $5)
    )))
    AND ($6::bigint IS NULL OR r.claimed_at <= (SELECT oncegate.now_v1()) - $6)
    AND ($7::bigint IS NULL OR r.claimed_at >= (SELECT oncegate.now_v1()) - $7)
    AND ($8::bigint IS NULL OR r.claimed_at >= $8)";

/// The values of [`PASSES`].
struct Passing<'a> {
    service: Option<&'a str>,
    route: &'a Option<String>,
    older_than: Option<i64>,
    since_ago: Option<i64>,
    since: Option<i64>,
}

impl<'a> Passing<'a> {
    fn of(filter: &'a Filter) -> Self {
        let (since_ago, since) = match filter.since {
            Some(Since::Ago(age)) => (Some(row::span(age)), None),
            Some(Since::At(time)) => (None, Some(row::millis(time))),
            None => (None, None),
        };
        let older_than = filter.older_than.map(row::span);
        Self { service: filter.service.as_deref(), route: &filter.route, older_than, since_ago, since }
    }

    fn values(&self) -> [Parameter<'_>; 5] {
        [
            (&self.service, Type::TEXT),
            (self.route, Type::TEXT),
            (&self.older_than, Type::INT8),
            (&self.since_ago, Type::INT8),
            (&self.since, Type::INT8),
        ]
    }
}

fn listed(found: &Row) -> Result<RecordEntry, Unreadable> {
    Ok(RecordEntry {
        id: row::id(found, 0)?,
        now: row::time(found, 1)?,
        record: row::record(found, 2)?,
        origin: row::origin(found, 8)?,
    })
}

/// The first string of bytes after an id: longer than every id, it is before the next one.
fn behind(id: RecordId) -> Vec<u8> {
    [&id.0[..], &[0]].concat()
}

fn unreadable(unreadable: Unreadable) -> Error {
    Error::determinate(ErrorKind::Corrupt, unreadable)
}

#[async_trait]
impl Resealing for Postgres {
    async fn beginnings(&self, after: Option<RecordId>, limit: usize) -> Result<Beginnings, Error> {
        self.ensure_open()?;
        self.of_all(read_beginnings(&self.pool, after, limit).await?).await
    }

    async fn reseal(&self, id: RecordId, seen: Version, values: Values) -> Result<bool, Error> {
        self.ensure_open()?;
        write_values(&self.pool, id, seen, &values).await
    }

    async fn delivery_values(&self, id: RecordId) -> Result<Option<(Delivery, DeliveryValues)>, Error> {
        self.ensure_open()?;
        deliveries::values(&self.pool, id).await
    }

    async fn reseal_delivery(
        &self,
        id: RecordId,
        token: AttemptToken,
        seen: Option<Bytes>,
        values: DeliveryValues,
    ) -> Result<bool, Error> {
        let DeliveryValues { head, request, body, note } = &values;
        let values: [Parameter<'_>; 7] = [
            (&&id.0[..], Type::BYTEA),
            (&&token.0[..], Type::BYTEA),
            (&seen.as_deref(), Type::BYTEA),
            (&&head[..], Type::BYTEA),
            (&&request[..], Type::BYTEA),
            (&&body[..], Type::BYTEA),
            (&note.as_deref(), Type::BYTEA),
        ];
        self.write_one("SELECT oncegate.reseal_delivery_v1($1, $2, $3, $4, $5, $6, $7)", &values).await
    }
}
