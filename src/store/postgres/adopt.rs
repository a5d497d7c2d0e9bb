//! Origins, and the rules that identities are made by.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Error as SqlError, Transaction};

use super::error;
use super::pool::Pool;
use super::row::{self, Unreadable};
use super::schema::LOOK_TIMEOUT;
use crate::idempotency::record::Timestamp;
use crate::store::adoption::{self, NamespacePeriod};
use crate::store::{Error, ErrorKind, IdentityChange, LiveKeys, NamespaceRuleSet, NamespaceRules, Origin, RulesPeriod};

/// How long it may take: where rules changed, every record is looked at.
const ADOPT_TIMEOUT: Duration = Duration::from_secs(600);

/// How long reading the rules on file may take.
const LOOK: Duration = Duration::from_secs(10);

/// One gate at a time.
const LOCK: &str =
    "SELECT pg_advisory_xact_lock(('x' || left(encode(sha256('oncegate adopt'), 'hex'), 16))::bit(64)::bigint)";

/// Why it failed: the server, or what a row holds.
enum Failure {
    Sql(SqlError),
    Unreadable(Unreadable),
}

/// The changes whose records adopting `rules` would forget. Takes no lock that a gate waits for.
pub(super) async fn changes(
    pool: &Pool,
    origins: &[Origin],
    rules: &[NamespaceRuleSet],
) -> Result<Vec<IdentityChange>, Error> {
    let mut connection = pool.check_out().await?;
    let client = connection.client()?;
    let looking = async {
        let transaction = client.build_transaction().read_only(true).start().await?;
        transaction.batch_execute(LOOK_TIMEOUT).await?;
        let on_file = on_file(&transaction, Some(&services(origins, rules))).await?;
        let changes = changes_within(&transaction, &on_file, rules).await?;
        transaction.commit().await?;
        Ok(changes)
    };
    let changes = read_within(ADOPT_TIMEOUT, looking).await?;
    connection.give_back();
    Ok(changes)
}

/// All that is on file.
pub(super) async fn identities(pool: &Pool) -> Result<Vec<NamespaceRules>, Error> {
    let mut connection = pool.check_out().await?;
    let client = connection.client()?;
    let looking = async {
        let transaction = client.build_transaction().read_only(true).start().await?;
        transaction.batch_execute(LOOK_TIMEOUT).await?;
        let on_file = on_file(&transaction, None).await?;
        transaction.commit().await?;
        Ok(on_file)
    };
    let on_file = read_within(LOOK, looking).await?;
    connection.give_back();
    Ok(on_file)
}

async fn read_within<T>(limit: Duration, read: impl Future<Output = Result<T, Failure>>) -> Result<T, Error> {
    match timeout(limit, read).await {
        Ok(found) => found.map_err(|failure| match failure {
            Failure::Sql(error) => error::of_read(&error),
            Failure::Unreadable(unreadable) => Error::determinate(ErrorKind::Corrupt, unreadable),
        }),
        Err(_) => Err(Error::determinate(ErrorKind::Timeout, "the database did not answer in time")),
    }
}

pub(super) async fn adopt(
    pool: &Pool,
    origins: &[Origin],
    rules: &[NamespaceRuleSet],
    accept_change: bool,
) -> Result<Vec<IdentityChange>, Error> {
    let interrupted_waits = pool.interrupted_waits();
    let mut connection = pool.check_out().await?;
    let client = connection.client()?;
    let adopting = async {
        let transaction = client.transaction().await?;
        transaction.batch_execute(LOCK).await?;
        let changes = adopt_within(&transaction, origins, rules, accept_change).await?;
        // Where something is in the way nothing was written.
        transaction.commit().await?;
        Ok(changes)
    };
    match timeout(ADOPT_TIMEOUT, adopting).await {
        Ok(Ok(changes)) => {
            connection.give_back();
            pool.expect_replicated(interrupted_waits).map(|()| changes)
        }
        Ok(Err(Failure::Sql(error))) => Err(error::of_write(&error)),
        Ok(Err(Failure::Unreadable(unreadable))) => Err(Error::indeterminate(ErrorKind::Corrupt, unreadable)),
        Err(_) => Err(Error::indeterminate(ErrorKind::Timeout, "the database did not answer in time")),
    }
}

async fn adopt_within(
    transaction: &Transaction<'_>,
    origins: &[Origin],
    rules: &[NamespaceRuleSet],
    accept_change: bool,
) -> Result<Vec<IdentityChange>, Failure> {
    let on_file = on_file(transaction, Some(&services(origins, rules))).await?;
    if !accept_change {
        let changes = changes_within(transaction, &on_file, rules).await?;
        if !changes.is_empty() {
            return Ok(changes);
        }
    }
    for origin in origins {
        let values: [(&(dyn ToSql + Sync), Type); 4] = [
            (&origin.id().0, Type::INT8),
            (&&*origin.service, Type::TEXT),
            (&&*origin.namespace, Type::TEXT),
            (&&*origin.route, Type::TEXT),
        ];
        let insert = "INSERT INTO oncegate.origin (id, service, namespace, route) VALUES ($1, $2, $3, $4) \
                      ON CONFLICT (id) DO NOTHING";
        transaction.execute_typed(insert, &values).await?;
    }
    for stale in adoption::stale(&on_file, rules) {
        let values: [(&(dyn ToSql + Sync), Type); 2] =
            [(&&*stale.service, Type::TEXT), (&&*stale.namespace, Type::TEXT)];
        let delete = "DELETE FROM oncegate.identity WHERE service = $1 AND namespace = $2";
        transaction.execute_typed(delete, &values).await?;
    }
    for rule in rules {
        let values: [(&(dyn ToSql + Sync), Type); 3] =
            [(&&*rule.service, Type::TEXT), (&&*rule.namespace, Type::TEXT), (&&rule.digest[..], Type::BYTEA)];
        let insert = "INSERT INTO oncegate.identity (service, namespace, digest) VALUES ($1, $2, $3) \
                      ON CONFLICT (service, namespace) DO NOTHING";
        transaction.execute_typed(insert, &values).await?;
    }
    let now = now(transaction).await?;
    for NamespacePeriod { service, namespace, period } in adoption::new_periods(&on_file, rules, now) {
        let values: [(&(dyn ToSql + Sync), Type); 5] = [
            (&&*service, Type::TEXT),
            (&&*namespace, Type::TEXT),
            (&row::millis(period.since), Type::INT8),
            (&&period.digest[..], Type::BYTEA),
            (&period.description.as_deref(), Type::TEXT),
        ];
        let write = "INSERT INTO oncegate.rules_period (service, namespace, since, digest, description) \
                     VALUES ($1, $2, $3, $4, $5) ON CONFLICT (service, namespace, since) \
                     DO UPDATE SET digest = EXCLUDED.digest, description = EXCLUDED.description";
        transaction.execute_typed(write, &values).await?;
    }
    Ok(Vec::new())
}

async fn changes_within(
    transaction: &Transaction<'_>,
    on_file: &[NamespaceRules],
    rules: &[NamespaceRuleSet],
) -> Result<Vec<IdentityChange>, Failure> {
    let mut changes = Vec::new();
    for stale in adoption::forgotten(on_file, rules) {
        let live = live(transaction, &stale).await?;
        changes.extend(adoption::change(&stale, live));
    }
    Ok(changes)
}

fn services<'a>(origins: &'a [Origin], rules: &'a [NamespaceRuleSet]) -> Vec<&'a str> {
    adoption::services(origins, rules).into_iter().collect()
}

/// The rules on file of these services, or of all.
async fn on_file(transaction: &Transaction<'_>, of: Option<&[&str]>) -> Result<Vec<NamespaceRules>, Failure> {
    let identities = "SELECT service, namespace, digest FROM oncegate.identity \
                      WHERE $1::text[] IS NULL OR service = ANY ($1)";
    let identities = transaction.query_typed(identities, &[(&of, Type::TEXT_ARRAY)]).await?;
    let periods = "SELECT service, namespace, digest, since, description FROM oncegate.rules_period \
                   WHERE $1::text[] IS NULL OR service = ANY ($1)";
    let periods = transaction.query_typed(periods, &[(&of, Type::TEXT_ARRAY)]).await?;
    let name = |found, column| row::get::<&str>(found, column).map(Arc::from);
    let identities = identities.iter().map(|found| Ok((name(found, 0)?, name(found, 1)?, row::digest(found, 2)?)));
    let periods = periods.iter().map(|found| {
        let description = row::get::<Option<&str>>(found, 4)?.map(Arc::from);
        let period = RulesPeriod { since: row::time(found, 3)?, digest: row::digest(found, 2)?, description };
        Ok(NamespacePeriod { service: name(found, 0)?, namespace: name(found, 1)?, period })
    });
    let identities = identities.collect::<Result<Vec<_>, Unreadable>>()?;
    Ok(adoption::on_file(identities, periods.collect::<Result<Vec<_>, Unreadable>>()?))
}

/// The live records of a namespace and the accepted requests that have none yet, by their routes.
async fn live(transaction: &Transaction<'_>, rules: &NamespaceRules) -> Result<Vec<LiveKeys>, Failure> {
    let count = "WITH own AS MATERIALIZED ( \
                     SELECT o.id, o.route FROM oncegate.origin o WHERE o.service = $1 AND o.namespace = $2 \
                 ), live AS ( \
                     SELECT r.origin, r.state = 0 AS is_open, r.expires_at AS until FROM oncegate.record r \
                     WHERE r.state = 0 OR r.expires_at > oncegate.now_v1() \
                     UNION ALL \
                     SELECT d.origin, d.dead_until IS NULL, d.dead_until FROM oncegate.delivery d \
                     WHERE (d.dead_until IS NULL OR d.dead_until > oncegate.now_v1()) AND NOT EXISTS ( \
                         SELECT FROM oncegate.record r \
                         WHERE r.id = d.id AND (r.state = 0 OR r.expires_at > oncegate.now_v1()) \
                     ) \
                 ) \
                 SELECT own.route, count(*), count(*) FILTER (WHERE live.is_open), \
                     max(live.until) FILTER (WHERE NOT live.is_open) \
                 FROM live JOIN own ON own.id = live.origin GROUP BY own.route";
    let values: [(&(dyn ToSql + Sync), Type); 2] = [(&&*rules.service, Type::TEXT), (&&*rules.namespace, Type::TEXT)];
    let rows = transaction.query_typed(count, &values).await?;
    let live = rows.iter().map(|found| {
        let until = row::get::<Option<i64>>(found, 3)?.is_some().then(|| row::time(found, 3)).transpose()?;
        let (keys, in_flight) = (row::number(found, 1)?, row::number(found, 2)?);
        Ok(LiveKeys { route: row::get::<&str>(found, 0)?.into(), keys, in_flight, until })
    });
    Ok(live.collect::<Result<_, Unreadable>>()?)
}

async fn now(transaction: &Transaction<'_>) -> Result<Timestamp, Failure> {
    let row = transaction.query_typed_one("SELECT oncegate.now_v1()", &[]).await?;
    Ok(row::time(&row, 0)?)
}

impl From<SqlError> for Failure {
    fn from(error: SqlError) -> Self {
        Self::Sql(error)
    }
}

impl From<Unreadable> for Failure {
    fn from(unreadable: Unreadable) -> Self {
        Self::Unreadable(unreadable)
    }
}
