//! The schema `oncegate` and its migrations.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::connect::Connector;
use super::error::is_lock_timeout;
use super::{OpenError, Opened, Settings};
use crate::idempotency::record::Timestamp;

/// One step from an empty database to the schema that this program works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migration {
    /// Its number, from 1.
    pub version: u32,
    /// The subject of the migration.
    pub name: &'static str,
    /// The statements, which run in one transaction.
    pub sql: &'static str,
    /// The oldest program, by the latest migration that it knows, which can work on the schema from then on.
    pub compatible_with: u32,
}

/// Every step, in order.
const MIGRATIONS: [Migration; 15] = [
    Migration {
        version: 1,
        name: "records",
        sql: include_str!("../../../migrations/postgres/0001_records.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 2,
        name: "upstream",
        sql: include_str!("../../../migrations/postgres/0002_upstream.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 3,
        name: "store",
        sql: include_str!("../../../migrations/postgres/0003_store.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 4,
        name: "two-phase commit",
        sql: include_str!("../../../migrations/postgres/0004_two_phase_commit.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 5,
        name: "rules",
        sql: include_str!("../../../migrations/postgres/0005_rules.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 6,
        name: "lost leases",
        sql: include_str!("../../../migrations/postgres/0006_lost_leases.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 7,
        name: "reseal",
        sql: include_str!("../../../migrations/postgres/0007_reseal.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 8,
        name: "audit",
        sql: include_str!("../../../migrations/postgres/0008_audit.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 9,
        name: "deliveries",
        sql: include_str!("../../../migrations/postgres/0009_deliveries.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 10,
        name: "delivery_batches",
        sql: include_str!("../../../migrations/postgres/0010_delivery_batches.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 11,
        name: "layout",
        sql: include_str!("../../../migrations/postgres/0011_layout.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 12,
        name: "standing_deliveries",
        sql: include_str!("../../../migrations/postgres/0012_standing_deliveries.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 13,
        name: "long_queues",
        sql: include_str!("../../../migrations/postgres/0013_long_queues.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 14,
        name: "takes",
        sql: include_str!("../../../migrations/postgres/0014_takes.sql"),
        compatible_with: 1,
    },
    Migration {
        version: 15,
        name: "turns",
        sql: include_str!("../../../migrations/postgres/0015_turns.sql"),
        compatible_with: 1,
    },
];

/// The version that this program works on.
const NEEDED: u32 = MIGRATIONS[MIGRATIONS.len() - 1].version;

/// One process at a time: the first eight bytes of the SHA-256 of "oncegate migrate".
pub(super) const LOCK: &str =
    "SELECT pg_advisory_xact_lock(('x' || left(encode(sha256('oncegate migrate'), 'hex'), 16))::bit(64)::bigint)";

/// The migrations that [`migrate`] would apply, in order.
///
/// # Errors
/// See [`OpenError`].
pub async fn pending(settings: &Settings) -> Result<Vec<Migration>, OpenError> {
    let session = Connector::new(settings).connect_unchecked().await?;
    let looking = async { Ok(missing(session.client()).await?) };
    within(LOOK_TIMEOUT, session.client(), looking).await
}

/// How long a look at the tables waits for a lock.
pub(super) const LOOK_TIMEOUT: &str = "SET LOCAL lock_timeout = '5s'";

/// Reads in one transaction, in which no statement waits for another session's lock longer than `lock_timeout` sets: it would
/// wait for as long as the lock is held.
pub(super) async fn within<T>(
    lock_timeout: &str,
    client: &Client,
    reading: impl Future<Output = Result<T, OpenError>>,
) -> Result<T, OpenError> {
    let sql = |error: tokio_postgres::Error| OpenError::of(&error);
    client.batch_execute(&format!("BEGIN READ ONLY; {lock_timeout}")).await.map_err(sql)?;
    let read = reading.await;
    // The session can go on after an error, too.
    let ended = client.batch_execute("COMMIT").await;
    let read = read?;
    ended.map_err(sql)?;
    Ok(read)
}

/// How long a migration waits for a lock, since what gates do waits behind it; how long it then lets them go on; and for how
/// long it tries.
pub(super) const LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '500ms'";
const PAUSE: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(60);

/// Applies the missing migrations, in one transaction and one process at a time, and returns them. Where others have the tables
/// locked, it tries again for a minute.
///
/// # Errors
/// See [`OpenError`].
pub async fn migrate(settings: &Settings) -> Result<Vec<Migration>, OpenError> {
    let mut session = Connector::new(settings).connect_unchecked().await?;
    let began = Instant::now();
    loop {
        match try_migrate(session.client_mut()).await {
            Err(Failed::Sql(error)) if is_lock_timeout(&error) && began.elapsed() < PATIENCE => sleep(PAUSE).await,
            other => return Ok(other?),
        }
    }
}

enum Failed {
    Sql(tokio_postgres::Error),
    Open(OpenError),
}

impl From<tokio_postgres::Error> for Failed {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Sql(error)
    }
}

impl From<OpenError> for Failed {
    fn from(error: OpenError) -> Self {
        Self::Open(error)
    }
}

impl From<Failed> for OpenError {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Sql(error) => Self::of(&error),
            Failed::Open(error) => error,
        }
    }
}

async fn try_migrate(client: &mut Client) -> Result<Vec<Migration>, Failed> {
    let transaction = client.transaction().await?;
    transaction.batch_execute(&format!("{LOCK}; {LOCK_TIMEOUT}")).await?;
    let missing = missing(transaction.client()).await?;
    for migration in &missing {
        transaction.batch_execute(migration.sql).await?;
        let (version, compatible_with) = (migration.version as i32, migration.compatible_with as i32);
        transaction
            .execute_typed(
                "INSERT INTO oncegate.migration (version, compatible_with) VALUES ($1, $2)",
                &[(&version, Type::INT4), (&compatible_with, Type::INT4)],
            )
            .await?;
    }
    transaction.commit().await?;
    Ok(missing)
}

async fn missing(client: &Client) -> Result<Vec<Migration>, Failed> {
    let found = match versions(client).await {
        Err(Failed::Open(OpenError::NoSchema)) => 0,
        other => workable(other?)?,
    };
    Ok(MIGRATIONS.into_iter().filter(|migration| migration.version > found).collect())
}

/// Whether this program can work on the schema.
pub(super) async fn check(client: &Client) -> Result<(), OpenError> {
    // First: a user who may read the versions and no more would meet one refusal after another.
    may_use(client).await?;
    let found = workable(versions(client).await?)?;
    if found < NEEDED {
        return Err(OpenError::Older { found, needed: NEEDED });
    }
    isolates(client).await
}

/// The version of a schema on which a program works that knows all up to [`NEEDED`].
fn workable((found, compatible_with): (u32, u32)) -> Result<u32, OpenError> {
    match compatible_with > NEEDED {
        true => Err(OpenError::Newer { found, compatible_with, known: NEEDED }),
        false => Ok(found),
    }
}

/// The store's identity, the secret of its gates, and its time.
pub(super) async fn store(client: &Client) -> Result<Opened, OpenError> {
    let asked = Instant::now();
    let row = client.query_typed_one("SELECT id, secret, at FROM oncegate.store_v1()", &[]).await;
    let row = row.map_err(|error| OpenError::of(&error))?;
    let bytes = |column| row.get::<_, Option<&[u8]>>(column).unwrap_or_default();
    let time = row.get::<_, Option<i64>>(2).and_then(|time| u64::try_from(time).ok());
    match (bytes(0).try_into(), bytes(1).try_into(), time) {
        (Ok(id), Ok(secret), Some(time)) => Ok(Opened { id, secret, time: Timestamp(time), asked }),
        _ => Err(OpenError::Failed(
            "the table oncegate.store has no row: restore it with its data, as the other tables of the schema"
                .to_owned(),
        )),
    }
}

/// Checks that this user has each right on the tables that the gate uses: a rare operation would fail late. A former schema lacks some of
/// the tables.
async fn may_use(client: &Client) -> Result<(), OpenError> {
    let question = "SELECT string_agg(t || ': ' || p, ', ' ORDER BY t, p)
        FROM (SELECT t, p FROM unnest(ARRAY['record', 'origin', 'identity', 'audit', 'delivery', 'paused']) t,
              unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) p
              UNION ALL SELECT unnest(ARRAY['store', 'layout', 'owned', 'migration']), 'SELECT'
              UNION ALL SELECT 'rules_period', unnest(ARRAY['SELECT', 'INSERT', 'UPDATE'])) needed
        WHERE NOT has_table_privilege(to_regclass('oncegate.' || t), p)";
    let row = client.query_typed_one(question, &[]).await.map_err(|error| OpenError::of(&error))?;
    match row.get::<_, Option<String>>(0) {
        Some(missing) => {
            Err(OpenError::Denied(format!("permission denied for tables of the schema oncegate ({missing})")))
        }
        None => Ok(()),
    }
}

/// Whether this user's transactions are as the gate's must be.
async fn isolates(client: &Client) -> Result<(), OpenError> {
    let question = "SELECT current_setting('transaction_isolation')";
    let row = client.query_typed_one(question, &[]).await.map_err(|error| OpenError::of(&error))?;
    let isolation: String = row.get(0);
    // PostgreSQL takes the second for the first.
    if !["read committed", "read uncommitted"].contains(&&*isolation) {
        return Err(OpenError::Isolation(isolation));
    }
    Ok(())
}

/// The latest migration that was applied, and the oldest program that can work on what it left.
async fn versions(client: &Client) -> Result<(u32, u32), Failed> {
    // Asked for by name first: a transaction in which a statement failed is lost.
    let is_there = "SELECT to_regclass('oncegate.migration') IS NOT NULL";
    let row = client.query_typed_one(is_there, &[]).await?;
    if !row.get::<_, bool>(0) {
        return Err(OpenError::NoSchema.into());
    }
    let versions = "SELECT coalesce(max(version), 0), coalesce(max(compatible_with), 0) FROM oncegate.migration";
    let row = client.query_typed_one(versions, &[]).await?;
    let number = |column| u32::try_from(row.get::<_, i32>(column)).unwrap_or(0);
    Ok((number(0), number(1)))
}

/// All of it, as one text.
#[cfg(test)]
pub(super) fn all() -> String {
    MIGRATIONS.iter().map(|migration| migration.sql).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_are_numbered_from_one_and_without_a_gap() {
        for (index, migration) in MIGRATIONS.iter().enumerate() {
            assert_eq!(migration.version as usize, index + 1);
            assert!(migration.compatible_with <= migration.version);
        }
    }
}
