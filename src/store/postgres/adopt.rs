//! Origins, and the rules that identities are made by.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Error as SqlError, Row, Transaction};

use super::pool::Pool;
use super::{error, row};
use crate::store::{Error, ErrorKind, Identity, IdentityChange, Origin};

/// How long it may take: where rules changed, every record is looked at.
const PATIENCE: Duration = Duration::from_secs(600);

/// One gate at a time.
const LOCK: &str =
    "SELECT pg_advisory_xact_lock(('x' || left(encode(sha256('oncegate adopt'), 'hex'), 16))::bit(64)::bigint)";

pub(super) async fn adopt(
    pool: &Pool,
    origins: &[Origin],
    rules: &[Identity],
    accept_change: bool,
) -> Result<Vec<IdentityChange>, Error> {
    let mut connection = pool.get().await?;
    let adopting = async {
        let transaction = connection.transaction().await?;
        transaction.batch_execute(LOCK).await?;
        let changes = adopt_within(&transaction, origins, rules, accept_change).await?;
        // Where something is in the way nothing was written.
        transaction.commit().await.map(|()| changes)
    };
    match timeout(PATIENCE, adopting).await {
        Ok(adopted) => adopted.map_err(|error| error::of_statement(&error)),
        Err(_) => Err(Error::indeterminate(ErrorKind::Timeout, "the database did not answer in time")),
    }
}

async fn adopt_within(
    transaction: &deadpool_postgres::Transaction<'_>,
    origins: &[Origin],
    rules: &[Identity],
    accept_change: bool,
) -> Result<Vec<IdentityChange>, SqlError> {
    let services = origins.iter().map(|origin| &origin.service).chain(rules.iter().map(|rule| &rule.service));
    let services: BTreeSet<&Arc<str>> = services.collect();
    let services: Vec<&str> = services.into_iter().map(|service| &**service).collect();
    let stale = on_file(transaction, &services, rules).await?;
    if !accept_change {
        let mut changes = Vec::new();
        for (service, namespace) in &stale {
            let live = live(transaction, service, namespace).await?;
            if live > 0 {
                changes.push(IdentityChange { service: Arc::clone(service), namespace: Arc::clone(namespace), live });
            }
        }
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
    for (service, namespace) in &stale {
        let values: [(&(dyn ToSql + Sync), Type); 2] = [(&&**service, Type::TEXT), (&&**namespace, Type::TEXT)];
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
    Ok(Vec::new())
}

/// What starts of these services have adopted that is not among `rules`.
async fn on_file(
    transaction: &Transaction<'_>,
    services: &[&str],
    rules: &[Identity],
) -> Result<Vec<(Arc<str>, Arc<str>)>, SqlError> {
    let found = "SELECT service, namespace, digest FROM oncegate.identity WHERE service = ANY ($1) \
                 ORDER BY service COLLATE \"C\", namespace COLLATE \"C\"";
    let rows = transaction.query_typed(found, &[(&services, Type::TEXT_ARRAY)]).await?;
    let is_stale = |found: &&Row| {
        let (service, namespace, digest): (&str, &str, &[u8]) = (found.get(0), found.get(1), found.get(2));
        !rules.iter().any(|rule| &*rule.service == service && &*rule.namespace == namespace && rule.digest == digest)
    };
    let name = |found: &Row, column| Arc::from(found.get::<_, &str>(column));
    Ok(rows.iter().filter(is_stale).map(|found| (name(found, 0), name(found, 1))).collect())
}

/// How many records live of a namespace.
async fn live(transaction: &Transaction<'_>, service: &str, namespace: &str) -> Result<u64, SqlError> {
    let count = "SELECT count(*) FROM oncegate.record r JOIN oncegate.origin o ON o.id = r.origin \
                 WHERE o.service = $1 AND o.namespace = $2 AND (r.state = 0 OR r.expires_at > oncegate.now_v1())";
    let row = transaction.query_typed(count, &[(&service, Type::TEXT), (&namespace, Type::TEXT)]).await?;
    Ok(row.first().and_then(|found| row::number(found, 0).ok()).unwrap_or_default())
}
