//! Unix sockets that the process binds.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{Instant, timeout};

use super::{GRACE, POLL, Signals};

/// The file of a socket. Dropped, it is removed, unless another socket has taken its place.
#[derive(Debug)]
pub(in crate::cli::serve) struct SocketFile {
    path: PathBuf,
    /// The device and the number of the file.
    id: (u64, u64),
}

impl SocketFile {
    /// Where it is, for people: the socket itself knows only the name by which it was bound.
    pub(in crate::cli::serve) fn place(&self) -> String {
        format!("unix:{}", self.path.display())
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if id(&self.path).is_ok_and(|id| id == self.id) {
            // It is as well left, and taken over by the next process.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Binds a socket with the permissions `mode`; nothing if the process was stopped meanwhile.
///
/// A stale socket is replaced. Where a process still answers, the bind waits for a while: that process may be about to
/// end.
pub(super) async fn bind(
    path: &Path,
    mode: u32,
    signals: &mut Signals,
) -> anyhow::Result<Option<(UnixListener, SocketFile)>> {
    let patience = Instant::now() + GRACE;
    while is_taken(path).await? {
        if Instant::now() >= patience {
            bail!("[server] listen: cannot listen on unix:{}: another process does", path.display());
        }
        if timeout(POLL, signals.stop()).await.is_ok() {
            return Ok(None);
        }
    }
    let (listener, file) =
        bound(path, mode).with_context(|| format!("[server] listen: cannot listen on unix:{}", path.display()))?;
    listener.set_nonblocking(true)?;
    Ok(Some((UnixListener::from_std(listener)?, file)))
}

/// Whether a process has it: only a socket that refuses connections is stale.
async fn is_taken(path: &Path) -> anyhow::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            bail!("[server] listen: {} is there, and is no socket", path.display())
        }
        Ok(_) => match timeout(POLL, UnixStream::connect(path)).await {
            Ok(Err(error)) => Ok(!matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)),
            Ok(Ok(_)) | Err(_) => Ok(true),
        },
        Err(_) => Ok(false),
    }
}

/// Binds beside the path and renames: no client finds the socket before it has its permissions, or finds none meanwhile.
fn bound(path: &Path, mode: u32) -> io::Result<(StdListener, SocketFile)> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}", std::process::id()));
    let beside = PathBuf::from(beside);
    // Of a process that had the same number, and was killed just here.
    let _ = fs::remove_file(&beside);
    let listener = StdListener::bind(&beside)?;
    let moved = fs::set_permissions(&beside, fs::Permissions::from_mode(mode))
        .and_then(|()| fs::rename(&beside, path))
        .and_then(|()| id(path));
    match moved {
        Ok(id) => Ok((listener, SocketFile { path: path.to_owned(), id })),
        Err(error) => {
            let _ = fs::remove_file(&beside);
            Err(error)
        }
    }
}

fn id(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}
