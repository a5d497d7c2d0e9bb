//! Origins, and the rules that identities are made by.

use rusqlite::{Connection, params};

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
        let now = session.now();
        let conn = &session.conn;
        let mut stale = on_file(conn)?;
        stale.retain(|identity| !self.rules.contains(identity));
        if !self.accept_change {
            let changes = stale.iter().map(|identity| change(conn, identity, now));
            let changes = changes.filter_map(Result::transpose).collect::<Result<Vec<_>, Failure>>()?;
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
        for identity in &stale {
            conn.prepare_cached("DELETE FROM identity WHERE service = ?1 AND namespace = ?2")?
                .execute(params![&*identity.service, &*identity.namespace])?;
        }
        for rule in &self.rules {
            conn.prepare_cached("INSERT OR IGNORE INTO identity (service, namespace, digest) VALUES (?1, ?2, ?3)")?
                .execute(params![&*rule.service, &*rule.namespace, rule.digest])?;
        }
        Ok(Vec::new())
    }
}

/// What the last start adopted. The file is one gate's alone, so every service counts.
fn on_file(conn: &Connection) -> Result<Vec<Identity>, Failure> {
    let mut find =
        conn.prepare_cached("SELECT service, namespace, digest FROM identity ORDER BY service, namespace")?;
    let identities = find.query_map([], |row| {
        Ok(Identity {
            service: row.get::<_, String>(0)?.into(),
            namespace: row.get::<_, String>(1)?.into(),
            digest: row.get(2)?,
        })
    })?;
    Ok(identities.collect::<Result<_, _>>()?)
}

/// The change that it is to give up `identity`, if records live that were made by it.
fn change(conn: &Connection, identity: &Identity, now: Timestamp) -> Result<Option<IdentityChange>, Failure> {
    let Identity { service, namespace, .. } = identity;
    // Looks at every record: only where rules changed, and before requests are taken.
    let live = conn.query_row(
        "SELECT count(*) FROM record JOIN origin ON origin.id = record.origin
         WHERE origin.service = ?1 AND origin.namespace = ?2 AND (state = 0 OR until > ?3)",
        params![&**service, &**namespace, row::time(now)],
        |row| row.get::<_, i64>(0),
    )?;
    let live = u64::try_from(live).unwrap_or(0);
    Ok((live > 0).then(|| IdentityChange { service: service.clone(), namespace: namespace.clone(), live }))
}
