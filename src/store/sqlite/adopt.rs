//! Origins, and the rules that identities are made by.

use rusqlite::{Connection, OptionalExtension, params};

use super::error::Failure;
use super::row;
use super::session::Session;
use super::writer::Request;
use crate::idempotency::record::Timestamp;
use crate::store::{Identity, IdentityChange, Origin};

pub(super) struct AdoptRequest {
    pub(super) origins: Vec<Origin>,
    pub(super) rules: Vec<Identity>,
    pub(super) accept_change: bool,
}

impl Request for AdoptRequest {
    type Reply = Vec<IdentityChange>;

    fn run(&self, session: &mut Session) -> Result<Vec<IdentityChange>, Failure> {
        if !self.accept_change {
            let now = session.now();
            let changes = self.rules.iter().map(|rule| change(&session.conn, rule, now));
            let changes = changes.filter_map(Result::transpose).collect::<Result<Vec<_>, Failure>>()?;
            if !changes.is_empty() {
                return Ok(changes);
            }
        }
        // A statement that fails here takes the whole transaction back: all or nothing.
        let conn = &session.conn;
        for origin in &self.origins {
            conn.prepare_cached(
                "INSERT OR IGNORE INTO origin (id, service, namespace, route) VALUES (?1, ?2, ?3, ?4)",
            )?
            .execute(params![origin.id().0, &*origin.service, &*origin.namespace, &*origin.route])?;
        }
        for rule in &self.rules {
            // No write where nothing changes: the usual start costs no commit.
            conn.prepare_cached(
                "INSERT INTO identity (service, namespace, digest) VALUES (?1, ?2, ?3)
                 ON CONFLICT (service, namespace) DO UPDATE SET digest = excluded.digest
                 WHERE digest <> excluded.digest",
            )?
            .execute(params![&*rule.service, &*rule.namespace, rule.digest])?;
        }
        Ok(Vec::new())
    }
}

/// The change that `rule` would be, if records live that were made by another one.
fn change(conn: &Connection, rule: &Identity, now: Timestamp) -> Result<Option<IdentityChange>, Failure> {
    let on_file = conn
        .prepare_cached("SELECT digest FROM identity WHERE service = ?1 AND namespace = ?2")?
        .query_row(params![&*rule.service, &*rule.namespace], |row| row.get::<_, [u8; 32]>(0))
        .optional()?;
    if on_file.is_none_or(|digest| digest == rule.digest) {
        return Ok(None);
    }
    // Looks at every record: only where rules changed, and before requests are taken.
    let live = conn.query_row(
        "SELECT count(*) FROM record JOIN origin ON origin.id = record.origin
         WHERE origin.service = ?1 AND origin.namespace = ?2 AND (state = 0 OR until > ?3)",
        params![&*rule.service, &*rule.namespace, row::time(now)],
        |row| row.get::<_, i64>(0),
    )?;
    let live = u64::try_from(live).unwrap_or(0);
    Ok((live > 0).then(|| IdentityChange { namespace: rule.namespace.clone(), live }))
}
