//! Describes the server and its durability risks.

use tokio_postgres::error::SqlState;

use super::session::Session;
use super::{OpenError, Settings, hosts};

/// The server, as of the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// Whether it is the server itself, and not a pooler before it.
    pub is_direct: bool,
    /// The server's version.
    pub version: String,
    /// The database's name.
    pub database: String,
    /// How many hosts the URL names.
    pub hosts: usize,
    /// Whether it syncs what it writes.
    pub has_fsync: bool,
    /// Whether it survives pages that are half written.
    pub has_full_page_writes: bool,
    /// Tables of the schema whose content a crash of the server removes.
    pub unlogged: Vec<String>,
    /// The default of `synchronous_commit` for this user.
    pub synchronous_commit: String,
    /// The standbys that commits wait for; empty where they wait for none.
    pub synchronous_standby_names: String,
    /// The standbys that are connected; `None` if this user may not see them.
    pub standbys: Option<Vec<Standby>>,
}

/// How far a standby is waited for, as `sync_state` of `pg_stat_replication` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standby {
    /// Commits wait for it.
    Synchronous,
    /// Commits wait for some of these.
    Quorum,
    /// Commits wait for it once another one is gone.
    Potential,
    /// Commits never wait for it.
    Asynchronous,
    /// This user may not see it.
    Hidden,
}

const SETTINGS: &str = "SELECT current_setting('server_version'), current_database()::text, \
    current_setting('fsync') = 'on', current_setting('full_page_writes') = 'on', \
    current_setting('synchronous_commit'), current_setting('synchronous_standby_names')";

/// The tables of the schema that the log does not have (CREATE TABLE, `UNLOGGED`).
const UNLOGGED: &str = "SELECT relname::text FROM pg_catalog.pg_class \
    WHERE relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'oncegate') AND relkind IN ('r', 'p') AND relpersistence <> 'p' ORDER BY 1";

/// The standbys, without backups and logical subscribers.
const STANDBYS: &str = "SELECT r.sync_state FROM pg_catalog.pg_stat_replication r \
    WHERE r.state IS DISTINCT FROM 'backup' AND NOT EXISTS (\
        SELECT FROM pg_catalog.pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')";

impl Description {
    pub(super) async fn of(session: &Session, settings: &Settings) -> Result<Self, OpenError> {
        let sql = |error: tokio_postgres::Error| OpenError::of(&error);
        let row = session.client().query_typed_one(SETTINGS, &[]).await.map_err(sql)?;
        let unlogged = session.client().query_typed(UNLOGGED, &[]).await.map_err(sql)?;
        let standbys = match session.client().query_typed(STANDBYS, &[]).await {
            Ok(rows) => Some(rows.iter().map(|row| Standby::of(row.get(0))).collect()),
            Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => None,
            Err(error) => return Err(sql(error)),
        };
        Ok(Self {
            is_direct: session.is_direct,
            version: row.get(0),
            database: row.get(1),
            hosts: hosts::count(&settings.servers),
            has_fsync: row.get(2),
            has_full_page_writes: row.get(3),
            unlogged: unlogged.iter().map(|row| row.get(0)).collect(),
            synchronous_commit: row.get(4),
            synchronous_standby_names: row.get(5),
            standbys,
        })
    }

    /// The data that may be lost and the setting to change, one line each.
    #[must_use]
    pub fn risks(&self) -> Vec<String> {
        let mut risks = Vec::new();
        for (is_on, setting) in [(self.has_fsync, "fsync"), (self.has_full_page_writes, "full_page_writes")] {
            if !is_on {
                risks.push(format!(
                    "{setting} is off: a crash of the server's machine may lose claims and answers that it acknowledged, and \
                     those requests may run twice; set {setting} to on"
                ));
            }
        }
        for table in &self.unlogged {
            risks.push(format!(
                "the table oncegate.{table} is UNLOGGED: a crash of the server empties it, no standby has it, and those requests \
                 run twice; make it a logged one: ALTER TABLE oncegate.{table} SET LOGGED"
            ));
        }
        if ["off", "local", "remote_write"].contains(&&*self.synchronous_commit) {
            risks.push(format!(
                "synchronous_commit is {} for this user: claims and answers are committed with on nevertheless, but a crash or a \
                 failover may lose what an upstream commits with that setting, while its answer is kept and replayed; set \
                 synchronous_commit to on",
                self.synchronous_commit
            ));
        }
        let replication = if self.synchronous_standby_names.is_empty() {
            self.without_synchronous_standby()
        } else {
            self.with_synchronous_standby()
        };
        risks.extend(replication.map(str::to_owned));
        risks
    }

    fn without_synchronous_standby(&self) -> Option<&'static str> {
        match self.standbys.as_deref() {
            _ if self.hosts > 1 => Some(
                "the URL names several hosts and synchronous_standby_names is empty: a failover loses the last claims and \
                 answers, which no standby has yet, and those requests may run twice; name the standbys in \
                 synchronous_standby_names",
            ),
            None => Some(
                "synchronous_standby_names is empty: a failover to a standby would lose the last claims and answers, and the \
                 loss of this server without a standby all of them, and those requests may run twice; name a standby in \
                 synchronous_standby_names",
            ),
            Some([]) => Some(
                "no standby is connected: the disk of this server holds the only copy of all records, and where it is lost \
                 every retry would run again; add a standby and name it in synchronous_standby_names",
            ),
            Some(_) => Some(
                "its standbys are asynchronous (synchronous_standby_names is empty): a failover loses the last claims and \
                 answers, which no standby has yet, and those requests may run twice; name the standbys in \
                 synchronous_standby_names",
            ),
        }
    }

    fn with_synchronous_standby(&self) -> Option<&'static str> {
        let standbys = self.standbys.as_deref().unwrap_or(&[Standby::Hidden, Standby::Hidden]);
        let is_any = |state| standbys.contains(&state);
        let is_quorum = standbys.iter().filter(|state| **state == Standby::Quorum).count() > 1;
        if is_any(Standby::Asynchronous) || is_any(Standby::Potential) {
            Some(
                "commits do not wait for some of its standbys (async or potential in pg_stat_replication): a failover to one of \
                 these loses the last claims and answers, and those requests may run twice; fail over to a sync standby only",
            )
        } else if is_quorum {
            Some(
                "commits wait for some of its standbys, not for each (quorum in pg_stat_replication): a failover to one that is \
                 behind loses the last claims and answers, and those requests may run twice; fail over to the one that is \
                 furthest ahead only",
            )
        } else if is_any(Standby::Hidden) && standbys.len() > 1 {
            Some(
                "this user may not see which standbys commits wait for: a failover to one that they do not wait for loses the \
                 last claims and answers, and those requests may run twice; fail over to a sync standby only, and GRANT \
                 pg_read_all_stats to this user to have it checked here",
            )
        } else {
            None
        }
    }
}

impl Standby {
    fn of(sync_state: Option<&str>) -> Self {
        match sync_state {
            Some("sync") => Self::Synchronous,
            Some("quorum") => Self::Quorum,
            Some("potential") => Self::Potential,
            Some(_) => Self::Asynchronous,
            None => Self::Hidden,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Standby::{Asynchronous, Hidden, Potential, Quorum, Synchronous};
    use super::*;

    /// A server that risks nothing.
    fn safe() -> Description {
        Description {
            hosts: 2,
            has_fsync: true,
            has_full_page_writes: true,
            synchronous_commit: "on".to_owned(),
            synchronous_standby_names: "second".to_owned(),
            standbys: Some(vec![Synchronous]),
            ..Description::default()
        }
    }

    fn unnamed(hosts: usize, standbys: Option<&[Standby]>) -> Description {
        let standbys = standbys.map(<[_]>::to_vec);
        Description { hosts, synchronous_standby_names: String::new(), standbys, ..safe() }
    }

    fn named(standbys: Option<&[Standby]>) -> Description {
        Description { standbys: standbys.map(<[_]>::to_vec), ..safe() }
    }

    #[test]
    fn each_risk_is_one_line_with_the_setting_to_change() {
        let level = |level: &str| Description { synchronous_commit: level.to_owned(), ..safe() };
        let cases = [
            (Description { has_fsync: false, ..safe() }, "fsync is off", "set fsync to on"),
            (
                Description { has_full_page_writes: false, ..safe() },
                "full_page_writes is off",
                "set full_page_writes to on",
            ),
            (
                Description { unlogged: vec!["record".to_owned()], ..safe() },
                "oncegate.record is UNLOGGED",
                "ALTER TABLE oncegate.record SET LOGGED",
            ),
            (level("off"), "synchronous_commit is off", "set synchronous_commit to on"),
            (level("local"), "synchronous_commit is local", "set synchronous_commit to on"),
            (level("remote_write"), "synchronous_commit is remote_write", "set synchronous_commit to on"),
            (unnamed(1, Some(&[])), "no standby is connected", "add a standby"),
            (unnamed(1, Some(&[Asynchronous])), "standbys are asynchronous", "name the standbys"),
            (unnamed(1, Some(&[Hidden])), "standbys are asynchronous", "name the standbys"),
            (unnamed(1, None), "synchronous_standby_names is empty", "name a standby"),
            (unnamed(2, Some(&[])), "several hosts", "name the standbys"),
            (unnamed(2, Some(&[Asynchronous])), "several hosts", "name the standbys"),
            (named(Some(&[Synchronous, Asynchronous])), "do not wait for some", "a sync standby only"),
            (named(Some(&[Synchronous, Potential])), "do not wait for some", "a sync standby only"),
            (named(Some(&[Quorum, Quorum])), "not for each", "furthest ahead"),
            (named(Some(&[Hidden, Hidden])), "may not see", "pg_read_all_stats"),
            (named(None), "may not see", "pg_read_all_stats"),
        ];
        for (description, what, remedy) in cases {
            let risks = description.risks();
            let [risk] = &risks[..] else { panic!("{what}: {risks:?}") };
            assert!(risk.contains(what) && risk.contains(remedy) && !risk.contains('\n'), "{risk}");
        }
    }

    #[test]
    fn a_server_whose_commits_wait_for_every_standby_risks_nothing() {
        let level = |level: &str| Description { synchronous_commit: level.to_owned(), ..safe() };
        for description in
            [safe(), level("remote_apply"), named(Some(&[Quorum])), named(Some(&[Hidden])), named(Some(&[]))]
        {
            assert_eq!(description.risks(), [""; 0], "{description:?}");
        }
    }
}
