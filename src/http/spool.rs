//! Temporary files for bodies that are too large for memory. They have no name, and no reader of the disk reads them: each
//! is encrypted with a key of its own, which only this process has in its memory.
//!
//! A file has the encrypted body, piece by piece: AES-256-GCM, with the number of the piece as its nonce, since no other file has
//! the key and a file is written once. The tags stay in memory.

use std::fs::File;
use std::future::Future as _;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use ring::error::Unspecified;
use sha2::{Digest as _, Sha256};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::fair_share::PartyOf;
use super::usage::{Budget, Permit, Usage, counted};

/// How much of a spooled body is written or read at a time, in bytes.
pub(super) const CHUNK: usize = 256 * 1024;

/// The chunk size in bytes where the memory budget has no room for a full chunk.
const SMALL_CHUNK: usize = 16 * 1024;

/// How much is encrypted together, in bytes: a chunk has whole pieces.
const PIECE: usize = SMALL_CHUNK;

/// How long a step on the disk may take while a request is received: nothing was sent by then.
const DISK_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a body cannot be spooled.
#[derive(Debug)]
pub(super) enum Error {
    /// The budget for files has no room.
    NoRoom,
    /// The file cannot be made or written.
    Failed(io::Error),
}

/// A temporary file that is being written.
pub(super) struct SpoolWriter {
    file: File,
    key: LessSafeKey,
    tags: Vec<Tag>,
    /// The beginning of the next piece.
    piece: Vec<u8>,
    hash: Sha256,
    permit: Permit,
}

/// A temporary file. It disappears with its last reference.
pub(super) struct SpoolFile {
    file: File,
    key: LessSafeKey,
    tags: Vec<Tag>,
    length: u64,
    _permit: Permit,
    /// The budget for reading it back.
    memory: Arc<Budget>,
}

/// A file without a name.
///
/// # Errors
/// With the name of the directory that takes none.
pub fn new_file() -> io::Result<File> {
    tempfile::tempfile().map_err(|error| {
        let directory = std::env::temp_dir();
        io::Error::new(error.kind(), format!("no file can be made in {}: {error}", directory.display()))
    })
}

/// The key of one file.
fn new_key() -> io::Result<LessSafeKey> {
    let mut key = [0; 32];
    getrandom::fill(&mut key).map_err(io::Error::other)?;
    let key = UnboundKey::new(&AES_256_GCM, &key).map_err(unspecified)?;
    Ok(LessSafeKey::new(key))
}

/// The cipher does not say why.
fn unspecified(_: Unspecified) -> io::Error {
    io::Error::other("the cipher failed")
}

/// The nonce of a piece.
fn nonce(piece: usize) -> Nonce {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&(piece as u64).to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

impl SpoolWriter {
    pub(super) async fn create(usage: &Usage) -> Result<Self, Error> {
        let file = blocking(new_file).await.map_err(Error::Failed)?;
        Self::to(file, usage).map_err(Error::Failed)
    }

    fn to(file: File, usage: &Usage) -> io::Result<Self> {
        let (key, permit) = (new_key()?, usage.disk.empty_permit());
        Ok(Self { file, key, tags: Vec::new(), piece: Vec::with_capacity(PIECE), hash: Sha256::new(), permit })
    }

    pub(super) async fn write(mut self, chunk: Bytes, party: Option<PartyOf<'_>>) -> Result<Self, Error> {
        if !self.permit.grow(chunk.len() as u64, party) {
            return Err(Error::NoRoom);
        }
        // The chunk returns to the thread that allocated it: the allocator caches freed memory by thread.
        let written = blocking(move || {
            self.write_all(&chunk)?;
            Ok((self, chunk))
        });
        let (spool, _chunk) = written.await.map_err(Error::Failed)?;
        Ok(spool)
    }

    fn write_all(&mut self, mut chunk: &[u8]) -> io::Result<()> {
        self.hash.update(chunk);
        while !chunk.is_empty() {
            let (now, rest) = chunk.split_at(chunk.len().min(PIECE - self.piece.len()));
            self.piece.extend_from_slice(now);
            chunk = rest;
            if self.piece.len() == PIECE {
                self.write_piece()?;
            }
        }
        Ok(())
    }

    fn write_piece(&mut self) -> io::Result<()> {
        let tag = self.key.seal_in_place_separate_tag(nonce(self.tags.len()), Aad::empty(), &mut self.piece);
        self.tags.push(tag.map_err(unspecified)?);
        self.file.write_all(&self.piece)?;
        self.piece.clear();
        Ok(())
    }

    /// The file, and the SHA-256 of what was written. `memory` is the budget for reading it back.
    pub(super) async fn finish(mut self, memory: Arc<Budget>) -> Result<(Arc<SpoolFile>, [u8; 32]), Error> {
        let length = (self.tags.len() * PIECE + self.piece.len()) as u64;
        let finished = blocking(move || {
            if !self.piece.is_empty() {
                self.write_piece()?;
            }
            Ok(self)
        });
        let Self { file, key, tags, hash, permit, .. } = finished.await.map_err(Error::Failed)?;
        let file = SpoolFile { file, key, tags, length, _permit: permit, memory };
        Ok((Arc::new(file), hash.finalize().into()))
    }
}

impl SpoolFile {
    pub(super) fn length(&self) -> u64 {
        self.length
    }

    /// All of it.
    pub(super) async fn whole(self: &Arc<Self>) -> io::Result<Bytes> {
        let file = Arc::clone(self);
        blocking(move || {
            let mut bytes = vec![0; usize::try_from(file.length).unwrap_or(usize::MAX)];
            file.read_at(&mut bytes, 0)?;
            Ok(Bytes::from(bytes))
        })
        .await
    }

    /// Reads from the beginning of a piece to the end of one.
    fn read_at(&self, bytes: &mut [u8], position: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, position)?;
        let first = usize::try_from(position).map_err(io::Error::other)? / PIECE;
        for (piece, encrypted) in (first..).zip(bytes.chunks_mut(PIECE)) {
            let altered = || io::Error::new(io::ErrorKind::InvalidData, "a temporary file was altered");
            let tag = *self.tags.get(piece).ok_or_else(altered)?;
            let opened = self.key.open_in_place_separate_tag(nonce(piece), Aad::empty(), tag, encrypted, 0..);
            opened.map_err(|_| altered())?;
        }
        Ok(())
    }
}

/// Reads a spooled body back, a chunk at a time.
pub(super) struct SpoolReader {
    file: Arc<SpoolFile>,
    offset: u64,
    reading: Option<io::Result<JoinHandle<io::Result<Bytes>>>>,
}

impl SpoolReader {
    pub(super) fn new(file: Arc<SpoolFile>) -> Self {
        Self { file, offset: 0, reading: None }
    }

    /// Bytes still to be read.
    fn remaining(&self) -> u64 {
        self.file.length - self.offset
    }
}

impl http_body::Body for SpoolReader {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = &mut *self;
        let remaining = this.remaining();
        if remaining == 0 {
            return Poll::Ready(None);
        }
        let reading = this.reading.get_or_insert_with(|| {
            let (file, offset) = (Arc::clone(&this.file), this.offset);
            let mut permit = file.memory.empty_permit();
            // A large chunk is read only where memory is plenty.
            let step = if permit.grow_if_plenty(CHUNK as u64) { CHUNK } else { SMALL_CHUNK };
            let size = usize::try_from(remaining).map_or(step, |left| left.min(step));
            // The buffer is allocated on the thread that frees it: the allocator caches freed memory by thread.
            let mut bytes = vec![0; size];
            spawn(move || {
                file.read_at(&mut bytes, offset)?;
                Ok(counted(Bytes::from(bytes), permit))
            })
        });
        let reading = match reading {
            Ok(reading) => reading,
            Err(_) => {
                let failed = this.reading.take().and_then(Result::err).unwrap_or_else(no_thread);
                return Poll::Ready(Some(Err(failed)));
            }
        };
        let done = ready!(Pin::new(reading).poll(cx));
        this.reading = None;
        let bytes = done.map_err(io::Error::other).flatten();
        Poll::Ready(Some(bytes.map(|bytes| {
            this.offset += bytes.len() as u64;
            Frame::data(bytes)
        })))
    }

    fn is_end_stream(&self) -> bool {
        self.remaining() == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.remaining())
    }
}

/// Runs it on a thread that may block, where there is one.
fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<JoinHandle<T>> {
    unless_it_panics(|| tokio::task::spawn_blocking(work))
}

/// Tokio panics where it has no thread that may block, and the system gives it none.
fn unless_it_panics<T>(spawn: impl FnOnce() -> T) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(spawn)).map_err(|_| no_thread())
}

fn no_thread() -> io::Error {
    io::Error::new(io::ErrorKind::WouldBlock, "the system gives this process no more threads")
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    let mut work = spawn(work)?;
    match timeout(DISK_TIMEOUT, &mut work).await {
        Ok(done) => done.map_err(io::Error::other)?,
        Err(_) => {
            // It does not begin any more, if no thread has taken it yet.
            work.abort();
            let cause = format!("the disk took longer than {DISK_TIMEOUT:?}");
            Err(io::Error::new(io::ErrorKind::TimedOut, cause))
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;
    use crate::http::limits::Limits;
    use crate::telemetry::metrics::Metrics;

    #[tokio::test]
    async fn a_full_disk_differs_from_an_exhausted_budget() {
        let usage = Usage::new(&Limits { max_buffered_disk: PIECE as u64, ..Limits::default() }, &Metrics::new());
        let full = File::options().write(true).open("/dev/full").unwrap();
        let on_full_disk = SpoolWriter::to(full, &usage).unwrap();
        let failed = on_full_disk.write(Bytes::from(vec![1; PIECE]), None).await.err();
        let Some(Error::Failed(error)) = failed else { panic!("{failed:?}") };
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(usage.disk.used(), 0);

        let spool = SpoolWriter::create(&usage).await.unwrap().write(Bytes::from(vec![1; PIECE]), None).await.unwrap();
        assert_eq!(usage.disk.used(), PIECE as u64);
        assert!(matches!(spool.write(Bytes::from_static(b"9"), None).await, Err(Error::NoRoom)));
        assert_eq!(usage.disk.used(), 0);
    }

    #[test]
    fn a_system_without_threads_is_an_error() {
        let failed = unless_it_panics(|| panic!("OS can't spawn worker thread")).unwrap_err();
        assert_eq!(failed.kind(), io::ErrorKind::WouldBlock);
        assert_eq!(unless_it_panics(|| 1).unwrap(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_disk_that_hangs_is_given_up() {
        let usage = Usage::new(&Limits::default(), &Metrics::new());
        // A pipe that is not read takes less than this.
        let (reader, writer) = io::pipe().unwrap();
        let spool = SpoolWriter::to(File::from(std::os::fd::OwnedFd::from(writer)), &usage).unwrap();
        let writing = spool.write(Bytes::from(vec![1; 4 << 20]), None);
        let (failed, ()) = tokio::join!(writing, tokio::time::advance(DISK_TIMEOUT));
        let Some(Error::Failed(error)) = failed.err() else { panic!("it was written") };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(reader);
    }

    #[tokio::test]
    async fn what_is_written_reads_back_the_same_twice_and_is_not_on_the_disk() {
        let bytes: Vec<u8> = (0..700_000_u32).map(|i| (i % 251) as u8).collect();
        let usage = Usage::new(&Limits::default(), &Metrics::new());
        let mut spool = SpoolWriter::create(&usage).await.unwrap();
        // Chunks that end anywhere.
        let (first, rest) = bytes.split_at(300_007);
        for chunk in [first, &rest[..1], &[], &rest[1..]] {
            spool = spool.write(Bytes::copy_from_slice(chunk), None).await.unwrap();
        }
        let (file, digest) = spool.finish(Arc::clone(&usage.memory)).await.unwrap();
        assert_eq!(file.length(), bytes.len() as u64);
        for _ in 0..2 {
            assert_eq!(SpoolReader::new(Arc::clone(&file)).collect().await.unwrap().to_bytes(), bytes);
        }
        assert_eq!(file.whole().await.unwrap(), bytes);
        assert_eq!(digest, <[u8; 32]>::from(Sha256::digest(&bytes)));

        let mut on_disk = vec![0; bytes.len()];
        file.file.read_exact_at(&mut on_disk, 0).unwrap();
        let same = on_disk.iter().zip(&bytes).filter(|(disk, plain)| disk == plain).count();
        assert!(same < bytes.len() / 100, "{same} bytes of {} are as they were", bytes.len());
        let (other, _) = {
            let spool = SpoolWriter::create(&usage).await.unwrap();
            let spool = spool.write(Bytes::copy_from_slice(first), None).await.unwrap();
            spool.finish(Arc::clone(&usage.memory)).await.unwrap()
        };
        let mut again = vec![0; first.len()];
        other.file.read_exact_at(&mut again, 0).unwrap();
        assert_ne!(again, on_disk[..first.len()], "each file has a key of its own");
    }
}
