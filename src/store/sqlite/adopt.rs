//! Origins, and the rules that identities are made by.

use std::sync::Arc;

use rusqlite::{Connection, Row, params};

use super::error::Failure;
use super::row;
use super::session::Session;
use super::writer::Request;
use crate::idempotency::record::Timestamp;
use crate::store::adoption::{self, NamespacePeriod};
use crate::store::{IdentityChange, LiveKeys, NamespaceRuleSet, NamespaceRules, Origin, RulesPeriod};

/// A service, a namespace, and the digest that the last start adopted for it.
type Adopted = (Arc<str>, Arc<str>, [u8; 32]);

pub(super) struct ChangesRequest {
    pub(super) rules: Vec<NamespaceRuleSet>,
}

pub(super) struct AdoptRequest {
    pub(super) origins: Vec<Origin>,
    pub(super) rules: Vec<NamespaceRuleSet>,
    pub(super) accept_change: bool,
}

impl Request for ChangesRequest {
    type Reply = Vec<IdentityChange>;

    fn run(&self, session: &mut Session) -> Result<Vec<IdentityChange>, Failure> {
        Ok(changes(&session.conn, &on_file(&session.conn)?, &self.rules, session.now())?)
    }
}

impl Request for AdoptRequest {
    type Reply = Vec<IdentityChange>;

    fn run(&self, session: &mut Session) -> Result<Vec<IdentityChange>, Failure> {
        let now = session.now();
        let conn = &session.conn;
        let on_file = on_file(conn)?;
        if !self.accept_change {
            let changes = changes(conn, &on_file, &self.rules, now)?;
            if !changes.is_empty() {
                return Ok(changes);
            }
        }
        // A statement that fails here takes the whole transaction back: all or nothing. Where nothing changes nothing
        // is written: the usual start costs no commit.
        for origin in &self.origins {
            conn.prepare_cached(
                "INSERT OR IGNORE INTO origin (id, service, namespace, route) VALUES (?1, ?2, ?3, ?4)",
            )?
            .execute(params![origin.id().0, &*origin.service, &*origin.namespace, &*origin.route])?;
        }
        for stale in adoption::stale(&on_file, &self.rules) {
            conn.prepare_cached("DELETE FROM identity WHERE service = ?1 AND namespace = ?2")?
                .execute(params![&*stale.service, &*stale.namespace])?;
        }
        for rule in &self.rules {
            conn.prepare_cached("INSERT OR IGNORE INTO identity (service, namespace, digest) VALUES (?1, ?2, ?3)")?
                .execute(params![&*rule.service, &*rule.namespace, rule.digest])?;
        }
        for NamespacePeriod { service, namespace, period } in adoption::new_periods(&on_file, &self.rules, now) {
            conn.prepare_cached(
                "INSERT OR REPLACE INTO rules_period (service, namespace, since, digest, description)
                 VALUES (?1, ?2, ?3, ?4, ?5)",
            )?
            .execute(params![
                &*service,
                &*namespace,
                row::time(period.since),
                period.digest,
                period.description.as_deref()
            ])?;
        }
        Ok(Vec::new())
    }
}

/// The rules on file. The file is one gate's alone, so every service counts.
pub(super) fn on_file(conn: &Connection) -> rusqlite::Result<Vec<NamespaceRules>> {
    let mut find = conn.prepare_cached("SELECT service, namespace, since, digest, description FROM rules_period")?;
    let periods = find.query_map([], |row| {
        let description = row.get::<_, Option<String>>(4)?.map(Arc::from);
        let period = RulesPeriod { since: row::read_time(row, 2)?, digest: row.get(3)?, description };
        Ok(NamespacePeriod { service: text(row, 0)?, namespace: text(row, 1)?, period })
    })?;
    Ok(adoption::on_file(identities(conn)?, periods.collect::<rusqlite::Result<Vec<_>>>()?))
}

fn identities(conn: &Connection) -> rusqlite::Result<Vec<Adopted>> {
    let mut find = conn.prepare_cached("SELECT service, namespace, digest FROM identity")?;
    let identities = find.query_map([], |row| Ok((text(row, 0)?, text(row, 1)?, row.get(2)?)))?;
    identities.collect()
}

/// The changes whose records adopting `rules` would forget.
pub(super) fn changes(
    conn: &Connection,
    on_file: &[NamespaceRules],
    rules: &[NamespaceRuleSet],
    now: Timestamp,
) -> rusqlite::Result<Vec<IdentityChange>> {
    let stale = adoption::forgotten(on_file, rules);
    let changes = stale.iter().map(|stale| Ok(adoption::change(stale, live(conn, stale, now)?)));
    changes.filter_map(Result::transpose).collect()
}

/// The live records of a namespace and the accepted requests that have none yet, by their routes. Looks at all of them: only
/// where rules changed, and before requests are taken.
fn live(conn: &Connection, rules: &NamespaceRules, now: Timestamp) -> rusqlite::Result<Vec<LiveKeys>> {
    let mut count = conn.prepare_cached(
        "SELECT o.route, count(*), sum(live.is_open), max(CASE WHEN NOT live.is_open THEN live.until END) FROM (
             SELECT r.origin, r.state = 0 AS is_open, r.until FROM record r WHERE r.state = 0 OR r.until > ?3
             UNION ALL
             SELECT d.origin, d.dead_until IS NULL, d.dead_until FROM delivery d
             WHERE (d.dead_until IS NULL OR d.dead_until > ?3)
                AND NOT EXISTS (SELECT 1 FROM record r WHERE r.id = d.id AND (r.state = 0 OR r.until > ?3))
         ) live JOIN origin o ON o.id = live.origin
         WHERE o.service = ?1 AND o.namespace = ?2 GROUP BY o.route",
    )?;
    let live = count.query_map(params![&*rules.service, &*rules.namespace, row::time(now)], |found| {
        let until = found.get::<_, Option<i64>>(3)?.is_some().then(|| row::read_time(found, 3)).transpose()?;
        let number = |column| found.get::<_, i64>(column).map(|number| u64::try_from(number).unwrap_or(0));
        Ok(LiveKeys { route: text(found, 0)?, keys: number(1)?, in_flight: number(2)?, until })
    })?;
    live.collect()
}

fn text(row: &Row<'_>, column: usize) -> rusqlite::Result<Arc<str>> {
    row.get::<_, String>(column).map(Arc::from)
}
