//! The writer's connection: transactions, counts, checkpoints.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::wal::CheckpointMode;
use rusqlite::{Connection, Error as SqlError, ErrorCode, params};

use super::damage::Damage;
use super::error::{self, Failure};
use super::guard::{self, Guard};
use super::health::{Health, HealthChange};
use super::reserve::{self, Reserve};
use super::{row, schema};
use crate::idempotency::record::{RecordId, State, Timestamp};
use crate::store::clock::Clock;
use crate::store::deliveries::LaneTurn;
use crate::store::lifecycle::{self, CurrentRecord};
use crate::store::{ErrorKind, OriginId};

/// The log is copied into the database when it has so many pages, from 2 to 16 MiB: see [`Pace`].
const CHECKPOINT_PAGES: std::ops::RangeInclusive<i32> = 512..=4096;

/// How often the time is noted, at most.
const STAMP_EVERY: Duration = Duration::from_secs(1);

/// The committed counts, which callers of `count` see.
pub(super) type Counts = Arc<Mutex<[u64; 3]>>;

/// The connection that writes.
pub(super) struct Session {
    pub(super) conn: Connection,
    clock: Clock,
    /// As of this transaction.
    counts: [u64; 3],
    committed: Counts,
    /// The row ids and views of claims of this process that nothing has changed since, so that settling them needs no
    /// lookup.
    in_flight: HashMap<RecordId, (i64, CurrentRecord)>,
    /// How the deliveries of each route go on.
    pub(super) turns: HashMap<OriginId, LaneTurn>,
    changes_before: u64,
    /// Whether this transaction shows that claims have room.
    takes_claims: bool,
    stamped: Option<Instant>,
    reserve: Reserve,
    health: Health,
    /// Pages in the log, as of the last commit.
    log_pages: Arc<AtomicI32>,
    checkpoint_at: i32,
    pace: Pace,
    #[cfg(test)]
    pub(super) failpoints: super::failpoint::Failpoints,
    /// After the connection, which it must outlive.
    guard: Guard,
}

impl Session {
    pub(super) fn new(mut opened: schema::Opened, reserve: Reserve, committed: Counts) -> rusqlite::Result<Self> {
        let log_pages = Arc::new(AtomicI32::new(0));
        let seen = log_pages.clone();
        opened.conn.wal_hook(Some(move |_: &mut rusqlite::hooks::Wal, pages| {
            seen.store(pages, Ordering::Relaxed);
            Ok(())
        }))?;
        Ok(Self {
            conn: opened.conn,
            clock: opened.clock,
            counts: opened.counts,
            committed,
            in_flight: HashMap::new(),
            turns: HashMap::new(),
            changes_before: 0,
            takes_claims: false,
            stamped: None,
            reserve,
            health: Health::default(),
            log_pages,
            checkpoint_at: *CHECKPOINT_PAGES.start(),
            pace: Pace::default(),
            #[cfg(test)]
            failpoints: super::failpoint::Failpoints::default(),
            guard: opened.guard,
        })
    }

    pub(super) fn now(&self) -> Timestamp {
        (self.clock)()
    }

    pub(super) fn begin(&mut self) -> rusqlite::Result<()> {
        self.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        self.changes_before = self.conn.total_changes();
        self.takes_claims = false;
        Ok(())
    }

    /// Commits. A read-only transaction writes nothing, and does not wait for the disk.
    pub(super) fn commit(&mut self) -> rusqlite::Result<()> {
        #[cfg(test)]
        self.failpoints.hit(super::failpoint::Failpoint::Commit)?;
        let began = Instant::now();
        self.conn.prepare_cached("COMMIT")?.execute([])?;
        *self.committed.lock().unwrap_or_else(PoisonError::into_inner) = self.counts;
        let now = Instant::now();
        if self.has_written() {
            self.pace.committed(now - began);
            self.health.wrote(self.takes_claims, now);
        }
        if self.health.news(now) == Some(HealthChange::HasRoom) {
            tracing::debug!("the store's disk has room again");
        }
        Ok(())
    }

    /// Whether the files are those that SQLite has open, and hold what it wrote. To be called before a commit.
    pub(super) fn check_files(&mut self) -> Result<(), Damage> {
        self.guard.check()
    }

    /// The same of a transaction that is about to be committed; one that wrote nothing needs no log.
    pub(super) fn check_before_commit(&mut self) -> Result<(), Damage> {
        if self.has_written() { self.guard.check() } else { Ok(()) }
    }

    /// Whether the log has what was just committed, so that it may be acknowledged.
    pub(super) fn check_after_commit(&mut self) -> Result<(), Damage> {
        if self.has_written() { self.guard.committed() } else { Ok(()) }
    }

    /// Ends the use of damaged files. A log that was removed is copied into the database, if it can be. Returns the
    /// reason to end the process with.
    pub(super) fn give_up(&mut self, damage: &Damage) -> String {
        // SQLite would copy the damaged log into the database.
        guard::leave_log(&self.conn);
        let Self { conn, guard, .. } = self;
        let path = conn.path().map(PathBuf::from).unwrap_or_default();
        match damage {
            Damage::LogGone(_) => {}
            Damage::Gone(gone) if *gone == path => {
                return match guard.database_gone() {
                    Ok(()) => damage.to_string(),
                    Err(error) => format!("{damage}, which cannot be noted in the lock file: {error}"),
                };
            }
            _ => return damage.to_string(),
        }
        let is_undone = conn.is_autocommit() || conn.execute_batch("ROLLBACK").is_ok();
        let saved = if is_undone {
            guard.save(|| schema::make_durable(conn, &path, Duration::ZERO))
        } else {
            Err("a transaction is open".to_owned())
        };
        match saved {
            Ok(()) => format!("{damage}; all that it held is now in the database, and nothing is lost"),
            Err(error) => format!("{damage}, and could not be copied into the database: {error}"),
        }
    }

    /// Leaves everything in the database, where that can be done at once.
    pub(super) fn finish(&mut self) {
        // Does not wait for another program that writes.
        let is_quick = self.conn.busy_timeout(Duration::ZERO);
        if is_quick.is_ok() && self.check_files().is_ok() {
            // A full disk may have no room for it; an older time will do.
            let _ = self.write_time();
        }
        let Self { conn, guard, .. } = self;
        let path = conn.path().map(PathBuf::from).unwrap_or_default();
        let finished = guard.check().map_err(|damage| damage.to_string()).and_then(|()| {
            is_quick.map_err(|error| error.to_string()).and_then(|()| {
                schema::make_durable(conn, &path, Duration::ZERO).map_err(|error| error.to_string())?;
                let at = schema::last_time(conn).map_err(|error| error.to_string())?;
                guard.closed(at).map_err(|error| error.to_string())
            })
        });
        if let Err(error) = finished {
            tracing::warn!(error, "the write-ahead log (WAL) stays beside the database; the next start reads it");
            guard::leave_log(conn);
        }
    }

    /// Undoes what the transaction did so far. SQLite may have done so itself.
    pub(super) fn rollback(&mut self) -> rusqlite::Result<()> {
        self.counts = *self.committed.lock().unwrap_or_else(PoisonError::into_inner);
        self.forget_all();
        if !self.conn.is_autocommit() {
            self.conn.execute_batch("ROLLBACK")?;
        }
        Ok(())
    }

    /// Notes the time with what this transaction writes, if it writes.
    pub(super) fn stamp(&mut self) -> rusqlite::Result<()> {
        let is_due = self.stamped.is_none_or(|stamped| stamped.elapsed() >= STAMP_EVERY);
        if self.has_written() && is_due { self.write_time() } else { Ok(()) }
    }

    fn write_time(&mut self) -> rusqlite::Result<()> {
        let now = row::time(self.now());
        self.conn.prepare_cached(schema::STAMP)?.execute(params![now])?;
        self.stamped = Some(Instant::now());
        Ok(())
    }

    fn has_written(&self) -> bool {
        self.conn.total_changes() != self.changes_before
    }

    /// Remembers the record that was inserted last.
    pub(super) fn remember(&mut self, id: RecordId, current: CurrentRecord) {
        self.in_flight.insert(id, (self.conn.last_insert_rowid(), current));
    }

    /// The row id and the view of a record, if remembered.
    pub(super) fn remembered(&self, id: &RecordId) -> Option<(i64, CurrentRecord)> {
        self.in_flight.get(id).copied()
    }

    /// Takes the row id and the view of a record that is about to change, if remembered.
    pub(super) fn take_remembered(&mut self, id: &RecordId) -> Option<(i64, CurrentRecord)> {
        self.in_flight.remove(id)
    }

    /// A record is about to change.
    pub(super) fn forget(&mut self, id: &RecordId) {
        self.in_flight.remove(id);
    }

    /// Any may have changed.
    pub(super) fn forget_all(&mut self) {
        self.in_flight.clear();
    }

    /// Counts a new claim.
    pub(super) fn claimed(&mut self, instead_of: Option<State>) {
        self.took_room();
        self.moved(instead_of, Some(State::InFlight), 1);
    }

    /// Something was written that had to have room as a claim does.
    pub(super) fn took_room(&mut self) {
        self.takes_claims = true;
    }

    /// Counts records that moved from `from` to `to`. `None` stands for records that did not exist before, or no
    /// longer exist.
    pub(super) fn moved(&mut self, from: Option<State>, to: Option<State>, how_many: u64) {
        if let Some(from) = from {
            let count = &mut self.counts[lifecycle::state_index(from)];
            *count = count.saturating_sub(how_many);
        }
        if let Some(to) = to {
            self.counts[lifecycle::state_index(to)] += how_many;
        }
    }

    /// Notes a failure that says something about the disk.
    pub(super) fn note(&mut self, error: &SqlError) {
        match error::kind(error) {
            _ if error::wants_room(error) => {
                if self.health.found_full(Instant::now()) == Some(HealthChange::IsFull) {
                    tracing::debug!(%error, "the store's disk is full: new claims are refused until there is room");
                }
            }
            // What one request asked for, perhaps.
            ErrorKind::Other => {}
            kind => self.health.found_failing(kind),
        }
    }

    /// Makes room after a failure for want of room. True where what failed may be tried once more.
    pub(super) fn make_room(&mut self, error: &SqlError) -> bool {
        error::wants_room(error) && self.reserve.spend()
    }

    /// Refuses a claim, or what is to be delivered later, while the remaining room is reserved for running attempts.
    pub(super) fn room_for_claims(&mut self) -> Result<(), Failure> {
        let Self { health, reserve, .. } = self;
        health.may_try(Instant::now(), || reserve.is_back()).map_err(Failure::Request)
    }

    /// Tries a write if the last ones failed: there may be no claims that would find out.
    pub(super) fn try_to_write(&mut self) -> Result<(), Failure> {
        if self.health.is_good() {
            return Ok(());
        }
        self.room_for_claims()?;
        self.write_time()?;
        self.takes_claims = true;
        Ok(())
    }

    /// Copies the log into the database if it has grown enough. Waits for no reader: where one still looks at an older
    /// state, the log grows on and this is tried again a little later.
    pub(super) fn checkpoint_if_due(&mut self) -> rusqlite::Result<()> {
        let (pages, due) = (self.log_pages.load(Ordering::Relaxed), self.pace.pages);
        if pages < due {
            self.checkpoint_at = due;
        }
        if pages < self.checkpoint_at {
            return Ok(());
        }
        self.checkpoint_at = pages + due / 4;
        self.checkpoint()
    }

    /// Copies the log into the database, so that its room serves again. Not on a full disk where the database would
    /// have to grow by more than the room that was held: that room would be spent, and the log no shorter.
    pub(super) fn checkpoint(&mut self) -> rusqlite::Result<()> {
        if self.health.is_full() && self.growth()? > reserve::SIZE / 2 {
            return Ok(());
        }
        // A damaged log must not reach the database. The next check reports it.
        if self.guard.check().is_err() {
            return Ok(());
        }
        #[cfg(test)]
        self.failpoints.hit(super::failpoint::Failpoint::Checkpoint)?;
        let busy = |error: &SqlError| error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy);
        let began = Instant::now();
        match self.conn.wal_checkpoint_v2(None::<&str>, CheckpointMode::PASSIVE) {
            Ok((frames, copied)) => {
                // Where a reader holds it up, how long it took says nothing.
                if frames == copied {
                    self.pace.copied(began.elapsed());
                }
                Ok(())
            }
            Err(error) if busy(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// By how many bytes a checkpoint makes the database grow.
    fn growth(&self) -> rusqlite::Result<u64> {
        let bytes = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size";
        let bytes = self.conn.query_row(bytes, [], |row| row.get::<_, i64>(0))?;
        let on_disk = self.conn.path().and_then(|path| std::fs::metadata(path).ok()).map_or(0, |file| file.len());
        Ok(u64::try_from(bytes).unwrap_or(0).saturating_sub(on_disk))
    }
}

/// How long the log may become before it is copied into the database.
///
/// All callers wait for a copy: a short log makes them wait often, and a long one for long. A copy costs at least two syncs,
/// so that on a slow disk many short ones would take most of the time. So a copy may take as long as a few commits do.
struct Pace {
    pages: i32,
    /// What commits took since the last copy, and how many they were.
    commits: (Duration, u32),
}

impl Default for Pace {
    fn default() -> Self {
        Self { pages: *CHECKPOINT_PAGES.start(), commits: (Duration::ZERO, 0) }
    }
}

impl Pace {
    fn committed(&mut self, took: Duration) {
        self.commits = (self.commits.0 + took, self.commits.1 + 1);
    }

    fn copied(&mut self, took: Duration) {
        let (commits, count) = std::mem::take(&mut self.commits);
        let commit = commits / count.max(1);
        if took > commit * 6 {
            self.pages = (self.pages / 2).max(*CHECKPOINT_PAGES.start());
        } else if took < commit * 3 {
            self.pages = (self.pages * 2).min(*CHECKPOINT_PAGES.end());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_the_log_may_take_as_long_as_a_few_commits() {
        let mut pace = Pace::default();
        let mut copy = |commits: &[u64], took: u64| {
            commits.iter().for_each(|commit| pace.committed(Duration::from_millis(*commit)));
            pace.copied(Duration::from_millis(took));
            pace.pages
        };
        // A disk whose syncs take long.
        assert_eq!([copy(&[9, 11], 22), copy(&[10], 25), copy(&[10], 29), copy(&[10], 29)], [1024, 2048, 4096, 4096]);
        assert_eq!(copy(&[10, 10], 48), 4096);
        // One whose syncs are quick.
        assert_eq!([copy(&[2, 2], 30), copy(&[2], 16), copy(&[2], 13), copy(&[2], 8)], [2048, 1024, 512, 512]);
        assert_eq!(copy(&[], 5), 512);
    }
}
