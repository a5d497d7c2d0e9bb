//! Whether the log and its index are still the files that SQLite works with, and hold what it wrote.
//!
//! SQLite goes on writing to a log that was removed, and leaves a hole in one that was cut. From an index that was
//! overwritten it reads old pages, and writes new ones that are made from them. So the writer checks before each
//! commit, and again before it acknowledges the commit: a log with a hole in it is never acknowledged, and never
//! copied into the database.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rusqlite::Connection;

use super::damage::Damage;
use super::lock::{LOCK, LOG, with_suffix};
use super::mark::{CLOSED_AT, Mark, MarkState, Marks};
use super::wal::{self, Frame, Header, INDEX_HEADER, Index, IndexHeader, Salts};
use super::{Lock, OpenError};
use crate::idempotency::record::Timestamp;

/// How often to read the index's header before it counts as damaged: another program may be writing it.
const MAX_READS: u32 = 50;

/// After how many reads to give that program time: it writes the header in less than a microsecond, unless it is
/// interrupted.
const QUICK_READS: u32 = 10;

/// How long to wait between two reads then.
const READ_DELAY: Duration = Duration::from_millis(5);

/// A file and the path that it must keep.
#[derive(Debug)]
struct WatchedFile {
    path: PathBuf,
    file: File,
    identity: (u64, u64),
}

/// The end of the log.
#[derive(Debug, Default)]
struct LogEnd {
    salts: Salts,
    frames: u32,
    last: Option<Frame>,
}

/// Guards the files of an open store.
///
/// Closing any descriptor of the index drops the locks that SQLite has on it, so this must outlive the connections.
#[derive(Debug)]
pub(super) struct Guard {
    lock: Arc<Lock>,
    log: WatchedFile,
    index: WatchedFile,
    log_end: LogEnd,
    expected: Index,
    /// The database only grows.
    database_size: u64,
    marks: Marks,
    /// Buffers for reading the index and the log.
    index_buffer: Vec<u8>,
    log_buffer: Vec<u8>,
}

impl WatchedFile {
    fn open(path: PathBuf) -> Result<Self, OpenError> {
        let open = || {
            let file = File::open(&path)?;
            let found = file.metadata()?;
            Ok((file, (found.dev(), found.ino())))
        };
        match open() {
            Ok((file, identity)) => Ok(Self { path, file, identity }),
            Err(source) => Err(OpenError::Io { path, source }),
        }
    }

    fn is_in_place(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|there| (there.dev(), there.ino()) == self.identity)
    }

    fn changed(&self) -> Damage {
        Damage::Changed(self.path.clone())
    }

    fn unreadable(&self, error: io::Error) -> Damage {
        if error.kind() == io::ErrorKind::UnexpectedEof {
            self.changed()
        } else {
            Damage::Unreadable(self.path.clone(), error)
        }
    }
}

impl Guard {
    /// Guards the files of a store that SQLite has just opened, and notes that the store is in use.
    pub(super) fn begin(lock: &Arc<Lock>) -> Result<Self, OpenError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                OpenError::Full { path: lock.path().to_owned() }
            }
            _ => OpenError::Io { path: lock.path().to_owned(), source },
        };
        let mut guard = Self {
            lock: lock.clone(),
            log: WatchedFile::open(lock.log_path())?,
            index: WatchedFile::open(lock.index_path())?,
            log_end: LogEnd::default(),
            expected: Index::default(),
            database_size: 0,
            marks: Marks::read(lock.lock_file()).map_err(failed)?,
            index_buffer: Vec::new(),
            log_buffer: Vec::new(),
        };
        guard.check().map_err(|damage| failed(io::Error::other(damage.to_string())))?;
        guard.note(MarkState::Open).and_then(|()| lock.lock_file().sync_data()).map_err(failed)?;
        Ok(guard)
    }

    /// Before a commit, a checkpoint, and now and then: whether all files are in place and hold what they must.
    pub(super) fn check(&mut self) -> Result<(), Damage> {
        self.check_database()?;
        self.retry_until_stable(|guard| guard.follow().and_then(|()| guard.compare_index()))?;
        // The log first: its content can be saved.
        self.check_log()?;
        if self.index.is_in_place() { Ok(()) } else { Err(Damage::of_missing(&self.index.path)) }
    }

    /// After a commit, before it is acknowledged: whether the log has it. Notes it.
    ///
    /// The other files count for the next commit only: a start makes do without the index, and refuses without the
    /// database.
    pub(super) fn committed(&mut self) -> Result<(), Damage> {
        self.retry_until_stable(Self::follow)?;
        self.check_log()?;
        // Where the disk has no room for it, an older note asks for less.
        let _ = self.note(MarkState::Open);
        Ok(())
    }

    /// Copies a log that is gone into the database, if this process can still read all of it.
    pub(super) fn save(&mut self, copy: impl FnOnce() -> Result<(), OpenError>) -> Result<(), String> {
        self.retry_until_stable(|guard| guard.follow().and_then(|()| guard.compare_index()))
            .map_err(|damage| damage.to_string())?;
        copy().map_err(|error| error.to_string())?;
        self.finish(MarkState::Saved).map_err(|error| error.to_string())
    }

    /// Notes that the database is not where it was, and how to tell it from another: the log is of no use to that.
    pub(super) fn database_gone(&mut self) -> io::Result<()> {
        // Of the database that it has open: its path may name another file by now.
        let content = words(self.lock.database().metadata()?.ino());
        let LogEnd { salts, frames, .. } = self.log_end;
        self.marks.write(self.lock.lock_file(), Mark { state: MarkState::Taken, salts, frames, page: 0, content })?;
        self.lock.lock_file().sync_data()
    }

    /// Notes that everything is in the database.
    pub(super) fn finish(&mut self, state: MarkState) -> io::Result<()> {
        self.note(state)?;
        self.lock.lock_file().sync_data()
    }

    /// Notes that everything is in the database, which was closed at this time of its own clock.
    pub(super) fn closed(&mut self, at: Timestamp) -> io::Result<()> {
        let LogEnd { salts, frames, .. } = self.log_end;
        let mark = Mark { state: MarkState::Closed, salts, frames, page: CLOSED_AT, content: words(at.0) };
        self.marks.write(self.lock.lock_file(), mark)?;
        self.lock.lock_file().sync_data()
    }

    fn check_database(&mut self) -> Result<(), Damage> {
        let size = self.lock.in_place().map_err(Damage::of_missing)?;
        if size < self.database_size {
            return Err(Damage::Shrunk(self.lock.path().to_owned()));
        }
        self.database_size = size;
        Ok(())
    }

    fn check_log(&self) -> Result<(), Damage> {
        if self.log.is_in_place() {
            return Ok(());
        }
        Err(match Damage::of_missing(&self.log.path) {
            Damage::Gone(path) => Damage::LogGone(path),
            other => other,
        })
    }

    /// Repeats a check if another program has written meanwhile.
    fn retry_until_stable(&mut self, check: impl Fn(&mut Self) -> Result<(), Damage>) -> Result<(), Damage> {
        let mut before = None;
        loop {
            let checked = check(self);
            if checked.is_ok() {
                return checked;
            }
            let now = Some(self.index_header()?);
            if now == before {
                return checked;
            }
            before = now;
        }
    }

    /// Follows the log to where the index says that it ends, and checks that what was there before still is.
    ///
    /// A cut takes the end of a file. So it is enough to read two frames again: the last one that was known, and the last
    /// one that is new.
    fn follow(&mut self) -> Result<(), Damage> {
        let now = self.index_header()?;
        if now.frames == 0 {
            // It starts over, with whatever is written next.
            self.log_end = LogEnd { salts: now.salts, ..LogEnd::default() };
            return Ok(());
        }
        let header = match Header::read(&self.log.file) {
            Ok(Some(header)) if header.salts == now.salts => header,
            Ok(_) => return Err(self.log.changed()),
            Err(error) => return Err(self.log.unreadable(error)),
        };
        let is_same = now.salts == self.log_end.salts;
        if is_same && let Some(log_end) = &self.log_end.last {
            let is_there = header.has(&self.log.file, self.log_end.frames, log_end, &mut self.log_buffer);
            if !is_there.map_err(|error| self.log.unreadable(error))? {
                return Err(self.log.changed());
            }
        }
        let before = if is_same { self.log_end.frames } else { 0 };
        if now.frames < before {
            return Err(self.index.changed());
        }
        if now.frames > before {
            let buffer = std::mem::take(&mut self.log_buffer);
            let found = header.frame(&self.log.file, now.frames, buffer).map_err(|error| self.log.unreadable(error))?;
            let Some(last) = found.filter(|last| last.checksum() == now.checksum) else {
                return Err(self.log.changed());
            };
            self.learn(before + 1, now.frames)?;
            let former =
                std::mem::replace(&mut self.log_end, LogEnd { salts: now.salts, frames: now.frames, last: Some(last) });
            self.log_buffer = former.last.map(Frame::into_buffer).unwrap_or_default();
        }
        Ok(())
    }

    fn index_header(&self) -> Result<IndexHeader, Damage> {
        let mut bytes = [0; INDEX_HEADER];
        for check in 0..MAX_READS {
            self.index.file.read_exact_at(&mut bytes, 0).map_err(|error| self.index.unreadable(error))?;
            if let Some(header) = IndexHeader::parse(&bytes) {
                return Ok(header);
            }
            if check < QUICK_READS { thread::yield_now() } else { thread::sleep(READ_DELAY) }
        }
        Err(self.index.changed())
    }

    /// Adds new frames to the expected index, as the index says. It is compared with the rest of the index before the
    /// next commit.
    fn learn(&mut self, first: u32, last: u32) -> Result<(), Damage> {
        let mut next = first;
        while next <= last {
            let count = Index::run(next).min(last - next + 1);
            let mut pages = vec![0; count as usize * 4];
            let read = self.index.file.read_exact_at(&mut pages, Index::offset(next));
            read.map_err(|error| self.index.unreadable(error))?;
            for page in pages.chunks_exact(4) {
                if !self.expected.append(next, u32::from_ne_bytes([page[0], page[1], page[2], page[3]])) {
                    return Err(self.index.changed());
                }
                next += 1;
            }
        }
        Ok(())
    }

    fn compare_index(&mut self) -> Result<(), Damage> {
        self.index_buffer.resize(Index::length(self.log_end.frames), 0);
        let read = self.index.file.read_exact_at(&mut self.index_buffer, 0);
        read.map_err(|error| self.index.unreadable(error))?;
        if self.expected.matches(&self.index_buffer, self.log_end.frames) { Ok(()) } else { Err(self.index.changed()) }
    }

    fn note(&mut self, state: MarkState) -> io::Result<()> {
        let LogEnd { salts, frames, last } = &self.log_end;
        let mark = match last {
            Some(last) => {
                let content = wal::checksum(last.content(), [0, 0], true);
                Mark { state, salts: *salts, frames: *frames, page: last.page(), content }
            }
            // Nothing is in the log, so nothing of it is needed.
            None => Mark { state: MarkState::Closed, salts: *salts, frames: 0, page: 0, content: [0; 2] },
        };
        self.marks.write(self.lock.lock_file(), mark)
    }
}

/// Keeps SQLite from copying the log into the database, and removing it, when it closes this connection.
pub(super) fn leave_log(conn: &Connection) {
    let _ = conn.set_db_config(rusqlite::config::DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
}

/// How many times the log may have started over since the note: a power failure leaves an older note.
const GENERATIONS: std::ops::RangeInclusive<i32> = 1..=4096;

/// The files of a store that is not open.
struct Files<'a> {
    path: &'a Path,
    marks: Marks,
    /// `None` if another process may have it open: it is then opened only if it must be read.
    database: Option<&'a File>,
}

/// Checks, before SQLite opens the store, that its log has everything that was acknowledged. SQLite itself accepts a log
/// that was cut, and an older one.
pub(super) fn check_log_at_start(lock: &Lock) -> Result<(), OpenError> {
    let failed = |source| OpenError::Io { path: lock.path().to_owned(), source };
    let marks = Marks::read(lock.lock_file()).map_err(failed)?;
    Files { path: lock.path(), marks, database: Some(lock.database()) }.check()
}

/// Checks the same of a store that another process may have in use, which then changes its files meanwhile.
pub(super) fn check_log_of(path: &Path) -> Result<(), OpenError> {
    match read_marks(path)? {
        Some((path, marks)) => Files { path: &path, marks, database: None }.check(),
        None => Ok(()),
    }
}

/// The resolved path of a store, and its notes; `None` if it has no lock file.
fn read_marks(path: &Path) -> Result<Option<(PathBuf, Marks)>, OpenError> {
    let failed = |source| OpenError::Io { path: path.to_owned(), source };
    let path = fs::canonicalize(path).map_err(failed)?;
    match File::open(with_suffix(&path, LOCK)) {
        Ok(file) => Ok(Some((path, Marks::read(&file).map_err(failed)?))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// Checks that the database is not older than when it was last closed: `at` is the last time that it has itself.
pub(super) fn check_time(lock: &Lock, at: Timestamp) -> Result<(), OpenError> {
    let failed = |source| OpenError::Io { path: lock.path().to_owned(), source };
    let closed = closed_at(&Marks::read(lock.lock_file()).map_err(failed)?);
    closed.map_or(Ok(()), |closed| is_current(lock.path(), closed, at))
}

/// When a store that another process may have in use was closed, where that is the last that was noted.
pub(super) fn last_closed(path: &Path) -> Result<Option<Timestamp>, OpenError> {
    Ok(read_marks(path)?.and_then(|(_, marks)| closed_at(&marks)))
}

fn closed_at(marks: &Marks) -> Option<Timestamp> {
    let Some(Mark { state: MarkState::Closed, page: CLOSED_AT, content: [first, second], .. }) = marks.last() else {
        return None;
    };
    Some(Timestamp(u64::from(*first) << 32 | u64::from(*second)))
}

/// Refuses a database whose last time is before the one at which it was closed.
pub(super) fn is_current(path: &Path, closed: Timestamp, at: Timestamp) -> Result<(), OpenError> {
    if at < closed { Err(OpenError::Older { path: path.to_owned(), at, closed }) } else { Ok(()) }
}

impl Files<'_> {
    fn check(&self) -> Result<(), OpenError> {
        let path = self.path;
        let failed = |source| OpenError::Io { path: path.to_owned(), source };
        let Some(mark) = self.marks.last().filter(|mark| mark.state != MarkState::Closed) else { return Ok(()) };
        let stray = || OpenError::StrayLog { path: path.to_owned() };
        let lost = |left| OpenError::LogLost { path: path.to_owned(), left, acknowledged: mark.frames };
        if mark.state == MarkState::Taken && inode(path).map_err(failed)? != mark.content {
            return Err(stray());
        }
        let log_path = with_suffix(path, LOG);
        let log = match File::open(&log_path) {
            Ok(file) => Some(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(source) => return Err(OpenError::Io { path: log_path, source }),
        };
        let found = match &log {
            Some(file) => contents(file).map_err(failed)?,
            None => None,
        };
        match (mark.state, found) {
            (MarkState::Saved, Some((_, 1..))) => Err(stray()),
            (MarkState::Open | MarkState::Taken, Some((salts, frames)))
                if salts == mark.salts && frames >= mark.frames =>
            {
                Ok(())
            }
            // A log starts over once all of it is in the database. It may have no more than its new header yet.
            (MarkState::Open | MarkState::Taken, Some((salts, _)))
                if GENERATIONS.contains(&wal::generations(mark.salts, salts)) =>
            {
                Ok(())
            }
            (MarkState::Open | MarkState::Taken, Some((salts, frames @ 1..))) => {
                Err(if salts == mark.salts { lost(Some(frames)) } else { stray() })
            }
            // Another program may have copied it into the database, as SQLite's shell does at its end.
            (MarkState::Open, _) if self.is_in_database(mark).map_err(failed)? => Ok(()),
            (MarkState::Open | MarkState::Taken, _) => Err(lost(log.is_some().then_some(0))),
            (MarkState::Saved | MarkState::Closed, _) => Ok(()),
        }
    }

    /// Whether the database has the page that the noted frame is a version of, in this version.
    fn is_in_database(&self, mark: &Mark) -> io::Result<bool> {
        match self.database {
            Some(database) => is_in_database(database, mark),
            None => is_in_database(&File::open(self.path)?, mark),
        }
    }
}

/// Notes that nothing of the log is needed, now that it is in the database.
pub(super) fn forget_log(lock: &Lock) -> io::Result<()> {
    let mut marks = Marks::read(lock.lock_file())?;
    match marks.last() {
        Some(mark) if mark.state != MarkState::Closed => {
            let closed = Mark { state: MarkState::Closed, ..*mark };
            marks.write(lock.lock_file(), closed)?;
            lock.lock_file().sync_data()
        }
        _ => Ok(()),
    }
}

/// The salts of a log and how many frames a recovery finds in it; `None` if it has no valid header.
fn contents(log: &File) -> io::Result<Option<(Salts, u32)>> {
    let Some(header) = Header::read(log)? else { return Ok(None) };
    let frames = header.committed(log)?;
    Ok(Some((header.salts, frames)))
}

/// Identifies a file among others of its name, as encoded in a note.
fn inode(path: &Path) -> io::Result<[u32; 2]> {
    Ok(words(fs::metadata(path)?.ino()))
}

fn words(number: u64) -> [u32; 2] {
    [(number >> 32) as u32, number as u32]
}

/// Whether the database has the page that the noted frame is a version of, in this version.
fn is_in_database(database: &File, mark: &Mark) -> io::Result<bool> {
    let mut header = [0; 18];
    let mut read = || {
        database.read_exact_at(&mut header, 0)?;
        let page_size = match u16::from_be_bytes([header[16], header[17]]) {
            1 => 65_536,
            size => usize::from(size),
        };
        let mut page = vec![0; page_size];
        database.read_exact_at(&mut page, u64::from(mark.page.saturating_sub(1)) * page_size as u64)?;
        Ok::<_, io::Error>(wal::checksum(&page, [0, 0], true) == mark.content)
    };
    match read() {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read,
    }
}
