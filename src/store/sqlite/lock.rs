//! One process per file.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::error::missing_directory;
use super::{OpenError, Settings};

/// The right to open a file, held against every other process until the store that was opened with it has ended.
#[derive(Debug)]
pub struct Lock {
    pub(super) settings: Settings,
    path: PathBuf,
    /// The database and its lock file, each with the name that it must keep. They stay open as long as SQLite has the
    /// database: closing any descriptor of it drops the locks that SQLite has on it.
    files: [LockedFile; 2],
}

#[derive(Debug)]
struct LockedFile {
    path: PathBuf,
    file: File,
    /// Device and inode.
    identity: (u64, u64),
}

impl LockedFile {
    fn new(path: PathBuf, file: File) -> io::Result<Self> {
        let found = file.metadata()?;
        Ok(Self { path, file, identity: (found.dev(), found.ino()) })
    }
}

impl Lock {
    /// Creates the file if there is none and locks it; `None` while another process holds it.
    ///
    /// The locks are the operating system's, on `<path>.lock` and on the file itself: they go when the process does,
    /// however it ends. The path is resolved first, so that two names of one file exclude each other. The lock file
    /// stays where it is, since removing it would let two processes lock two files of that name.
    ///
    /// # Errors
    /// When the files cannot be created or locked, the file has a second name (its log is beside one name
    /// only), or it is missing or empty and another file says that a store was here.
    pub fn try_acquire(settings: &Settings) -> Result<Option<Self>, OpenError> {
        let fail = |source| OpenError::Io { path: settings.path.clone(), source };
        let path = resolve(&settings.path).map_err(fail)?;
        check_is_file(&path).map_err(fail)?;
        let lock_path = with_suffix(&path, LOCK);
        let lock_file =
            open_private(OpenOptions::new().read(true).write(true).create(true), &lock_path).map_err(fail)?;
        if !lock(&lock_file).map_err(fail)? {
            return Ok(None);
        }
        create(&path)?;
        let database = open_private(OpenOptions::new().read(true).write(true), &path).map_err(fail)?;
        if !lock(&database).map_err(fail)? {
            return Ok(None);
        }
        if database.metadata().map_err(fail)?.nlink() > 1 {
            return Err(OpenError::Linked { path });
        }
        let database = LockedFile::new(path.clone(), database).map_err(fail)?;
        let files = [database, LockedFile::new(lock_path, lock_file).map_err(fail)?];
        Ok(Some(Self { settings: settings.clone(), path, files }))
    }

    /// The process that holds the lock, as far as the system tells: not where it runs in another container.
    #[must_use]
    pub fn holder(settings: &Settings) -> Option<u32> {
        let path = resolve(&settings.path).ok()?;
        let held = fs::metadata(with_suffix(&path, LOCK)).ok()?;
        let (major, minor) = (rustix::fs::major(held.dev()), rustix::fs::minor(held.dev()));
        let file = format!("{major:02x}:{minor:02x}:{}", held.ino());
        // `1: FLOCK  ADVISORY  WRITE 4711 fe:01:1234 0 EOF`, see proc_locks(5).
        let locks = fs::read_to_string("/proc/locks").ok()?;
        locks.lines().find_map(|line| {
            let mut words = line.split_whitespace().skip(1);
            let (kind, pid, locked) = (words.next()?, words.nth(2)?, words.next()?);
            (kind == "FLOCK" && locked == file).then(|| pid.parse().ok())?
        })
    }

    /// How large the database is; or the first of the files that are not any more where they were: removed, renamed or
    /// replaced. Another process could take a new file of that name for the store.
    pub(super) fn in_place(&self) -> Result<u64, &Path> {
        let [database, lock] =
            self.files.each_ref().map(|LockedFile { path, identity, .. }| match fs::metadata(path) {
                Ok(there) if (there.dev(), there.ino()) == *identity => Ok(there.len()),
                _ => Err(path.as_path()),
            });
        lock.and(database)
    }

    /// The database. Its descriptor must not be closed before SQLite's are.
    pub(super) fn database(&self) -> &File {
        &self.files[0].file
    }

    pub(super) fn lock_file(&self) -> &File {
        &self.files[1].file
    }

    pub(super) fn log_path(&self) -> PathBuf {
        with_suffix(&self.path, LOG)
    }

    pub(super) fn index_path(&self) -> PathBuf {
        with_suffix(&self.path, INDEX)
    }

    /// Where the file is: absolute and without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// How the names of the files beside the database end: its log, the log's index, the lock, and the room that is held.
pub(super) const LOG: &str = "-wal";
pub(super) const INDEX: &str = "-shm";
pub(super) const LOCK: &str = ".lock";
pub(super) const RESERVE: &str = ".reserve";

/// What the files of a store at this path are called, resolved where its directory is there.
#[must_use]
pub fn files(path: &Path) -> Vec<PathBuf> {
    let path = resolved(path);
    ["", LOG, INDEX, LOCK, RESERVE].map(|suffix| with_suffix(&path, suffix)).to_vec()
}

/// The one name of a file that may have several; absolute at least, where its directory is not there.
fn resolved(path: &Path) -> PathBuf {
    resolve(path).or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.to_owned())
}

/// Whether both are one file, by one of its names or several.
#[must_use]
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|there| (there.dev(), there.ino()));
    resolved(one) == resolved(other) || matches!((identity(one), identity(other)), (Ok(one), Ok(other)) if one == other)
}

/// Locks a file; false while another process holds it.
fn lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// The kind of file system at `path` (or where it would be created) if what is written there does not outlive a
/// restart of the machine or the container: `tmpfs` or `overlayfs`.
#[must_use]
pub fn filesystem_warning(path: &Path) -> Option<&'static str> {
    // From linux/magic.h.
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    const OVERLAYFS: u64 = 0x794c_7630;
    let absolute = std::path::absolute(path).ok()?;
    let existing = absolute.ancestors().find(|ancestor| ancestor.exists())?;
    // Its type differs between platforms, its value does not.
    match rustix::fs::statfs(existing).ok()?.f_type as u64 {
        TMPFS | RAMFS => Some("tmpfs"),
        OVERLAYFS => Some("overlayfs"),
        _ => None,
    }
}

/// The resolved path of a file, which may be missing in a directory that is not.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    match fs::canonicalize(path) {
        // A symbolic link that leads nowhere is not replaced by a file.
        Err(error) if error.kind() == io::ErrorKind::NotFound && fs::symlink_metadata(path).is_err() => {
            let absolute = std::path::absolute(path)?;
            let (Some(directory), Some(name)) = (absolute.parent(), absolute.file_name()) else { return Err(error) };
            Ok(fs::canonicalize(directory)?.join(name))
        }
        resolved => resolved,
    }
}

/// The file at the path of the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DatabasePresence {
    /// A file that is not empty.
    Database,
    /// An empty file, and no trace of a store.
    Empty,
    /// Nothing, and no trace of a store.
    Nothing,
}

/// Looks for the database, without opening it. Refuses where there is none and a store was: an empty one in its place would
/// let all its keys run again. A store that was ever opened has left a note in its lock file; one of an earlier version has at
/// least one of the other files. A process that is killed before it has made its database has neither.
pub(super) fn find_database(path: &Path) -> Result<DatabasePresence, OpenError> {
    let fail = |source| OpenError::Io { path: path.to_owned(), source };
    check_is_file(path).map_err(fail)?;
    let is_missing = match fs::metadata(path) {
        Ok(found) if found.len() > 0 => return Ok(DatabasePresence::Database),
        Ok(_) => false,
        Err(error) if error.kind() == io::ErrorKind::NotFound && missing_directory(path).is_none() => true,
        Err(error) => return Err(fail(error)),
    };
    let mut traces = [LOG, INDEX, RESERVE].map(|suffix| with_suffix(path, suffix)).to_vec();
    traces.retain(|trace| trace.exists());
    let lock_path = with_suffix(path, LOCK);
    if fs::metadata(&lock_path).is_ok_and(|lock| lock.len() > 0) {
        traces.push(lock_path);
    }
    if !traces.is_empty() {
        return Err(OpenError::NoDatabase { path: path.to_owned(), is_missing, traces });
    }
    Ok(if is_missing { DatabasePresence::Nothing } else { DatabasePresence::Empty })
}

/// An error where something is there that is no file.
fn check_is_file(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(io::Error::from(io::ErrorKind::IsADirectory)),
        Ok(found) if !found.is_file() => Err(io::Error::other("it is a device, a pipe or a socket, and not a file")),
        _ => Ok(()),
    }
}

/// Creates the database where there is none, readable by its owner only: it holds answers.
fn create(path: &Path) -> Result<(), OpenError> {
    let fail = |source| OpenError::Io { path: path.to_owned(), source };
    // Not opened where it exists: closing any descriptor of a database drops the locks that SQLite has on it.
    if find_database(path)? == DatabasePresence::Nothing {
        let created = open_private(OpenOptions::new().write(true).create_new(true), path).map_err(fail)?;
        created.sync_all().and_then(|()| sync_directory(path)).map_err(fail)?;
    }
    Ok(())
}

pub(super) fn open_private(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    options.mode(0o600).open(path)
}

/// Makes the names in a file's directory durable.
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}

pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_holds_a_file_under_all_its_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let link = dir.path().join("link.db");
        let first = Lock::try_acquire(&Settings::new(&path)).unwrap().unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(Lock::try_acquire(&Settings::new(&path)).unwrap().is_none());
        assert!(Lock::try_acquire(&Settings::new(&link)).unwrap().is_none());
        let holder = Lock::holder(&Settings::new(&link));
        assert!(holder.is_none_or(|pid| pid == std::process::id()), "{holder:?}");
        assert_eq!(Lock::holder(&Settings::new(dir.path().join("other.db"))), None);
        drop(first);
        // A process that another test has just spawned shares the lock for a moment.
        let second = std::iter::repeat_with(|| Lock::try_acquire(&Settings::new(&link)).unwrap())
            .find_map(std::convert::identity)
            .unwrap();
        assert_eq!(second.path(), fs::canonicalize(&path).unwrap());
    }

    #[test]
    fn a_file_of_two_names_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        drop(Lock::try_acquire(&Settings::new(&path)).unwrap().unwrap());
        fs::hard_link(&path, dir.path().join("b.db")).unwrap();
        let error = Lock::try_acquire(&Settings::new(&path)).unwrap_err();
        assert!(matches!(error, OpenError::Linked { .. }), "{error}");
    }

    /// A start and `check` alike.
    #[test]
    fn what_is_no_file_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        for (path, said) in [(dir.path(), "directory"), (Path::new("/dev/full"), "a device")] {
            let looked = find_database(path).map(drop).unwrap_err().to_string();
            let opened = Lock::try_acquire(&Settings::new(path)).map(drop).unwrap_err().to_string();
            assert!(looked.contains(said) && opened.contains(said), "{looked}; {opened}");
            assert!(!with_suffix(path, LOCK).exists());
        }
    }

    #[test]
    fn a_file_that_was_removed_or_replaced_is_noticed() {
        for suffix in ["", ".lock"] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a.db");
            let lock = Lock::try_acquire(&Settings::new(&path)).unwrap().unwrap();
            assert_eq!(lock.in_place(), Ok(0));
            let name = with_suffix(lock.path(), suffix);
            fs::remove_file(&name).unwrap();
            assert_eq!(lock.in_place(), Err(name.as_path()));
            fs::write(&name, "").unwrap();
            assert_eq!(lock.in_place(), Err(name.as_path()));
        }
    }

    #[test]
    fn a_missing_directory_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("missing").join("a.db");
        let error = Lock::try_acquire(&Settings::new(&path)).unwrap_err();
        assert!(error.to_string().contains("missing/a.db"), "{error}");
    }

    #[test]
    fn new_files_are_private() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        let _lock = Lock::try_acquire(&Settings::new(&path)).unwrap().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn volatile_file_systems_are_reported() {
        if Path::new("/dev/shm").exists() {
            assert_eq!(filesystem_warning(Path::new("/dev/shm/not/yet/there.db")), Some("tmpfs"));
        }
        assert_eq!(filesystem_warning(Path::new("/proc/self")), None);
    }
}
