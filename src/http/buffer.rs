//! Holds a request body whole before its key is claimed: in memory while it is small, else in an unlinked temporary
//! file.

use std::fs::File;
use std::future::Future as _;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::HeaderMap;
use http_body::Body as _;
use http_body_util::BodyExt as _;
use sha2::{Digest as _, Sha256};
use tokio::task::JoinHandle;

use super::body::Body;
use super::budget::{Budget, Taken};
use super::gathered::{Gathered, counted};
use super::headers::without_ours;
use super::inbound::{self, Inbound};
use super::usage::Usage;

/// Bodies up to this size, in bytes, stay in memory.
pub const IN_MEMORY: u64 = 256 * 1024;

/// How much of a spooled body is written or read at a time, in bytes.
const SPOOL_CHUNK: usize = 256 * 1024;

/// How much of it is read at a time where there is no room for more, in bytes.
const SMALL_CHUNK: usize = 16 * 1024;

/// A whole request body.
#[derive(Clone, Debug)]
pub struct Buffered {
    content: Content,
    /// The trailers that followed it.
    trailers: Option<HeaderMap>,
}

#[derive(Clone)]
enum Content {
    Memory(Bytes),
    Spooled { file: Arc<Spooled>, length: u64, sha256: [u8; 32] },
}

/// Why a body could not be held.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is larger than the limit.
    #[error("the body is larger than {limit} bytes")]
    TooLarge {
        /// In bytes.
        limit: u64,
    },
    /// It is malformed, or the client went away before its end.
    #[error("the body is malformed or incomplete")]
    Malformed(#[source] inbound::Error),
    /// There is no room for it, neither in memory nor in a temporary file.
    #[error("there is no room for the body")]
    NoRoom,
    /// The temporary file failed.
    #[error("the temporary file failed: {0}")]
    Spool(#[source] io::Error),
}

impl Buffered {
    /// Reads a body to its end, at most `limit` bytes of it, into `memory` or a file.
    pub async fn read(incoming: Inbound, limit: u64, memory: &Arc<Budget>, usage: &Usage) -> Result<Self, Error> {
        // A length that is announced is refused before a byte of it is read.
        if incoming.size_hint().lower() > limit {
            return Err(Error::TooLarge { limit });
        }
        let gathered = Gathered::new(memory);
        Reader { gathered, spool: None, length: 0, limit, memory, usage }.run(incoming).await
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        match &self.content {
            Content::Memory(bytes) => bytes.len() as u64,
            Content::Spooled { length, .. } => *length,
        }
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its bytes, where they are in memory.
    #[must_use]
    pub fn in_memory(&self) -> Option<&Bytes> {
        match &self.content {
            Content::Memory(bytes) => Some(bytes),
            Content::Spooled { .. } => None,
        }
    }

    /// The SHA-256 of its bytes, where they are not in memory.
    #[must_use]
    pub fn spooled_digest(&self) -> Option<[u8; 32]> {
        match &self.content {
            Content::Memory(_) => None,
            Content::Spooled { sha256, .. } => Some(*sha256),
        }
    }

    /// Its bytes, read back from the file where need be.
    pub async fn whole(&self) -> io::Result<Bytes> {
        match &self.content {
            Content::Memory(bytes) => Ok(bytes.clone()),
            Content::Spooled { file, length, .. } => {
                let (file, length) = (Arc::clone(file), usize::try_from(*length).unwrap_or(usize::MAX));
                blocking(move || {
                    let mut bytes = vec![0; length];
                    file.file.read_exact_at(&mut bytes, 0)?;
                    Ok(Bytes::from(bytes))
                })
                .await
            }
        }
    }

    /// A body that sends it. May be called again.
    #[must_use]
    pub fn body(&self) -> Body {
        match (&self.content, &self.trailers) {
            (Content::Memory(bytes), None) => Body::full(bytes.clone()),
            (Content::Memory(bytes), Some(trailers)) => Body::with_trailers(bytes.clone(), trailers.clone()),
            // Trailers are seldom, and with a spooled body seldom twice over: they are dropped, as any recipient may
            // (RFC 9110, 6.5.1).
            (Content::Spooled { file, length, .. }, _) => {
                Body::spooled(SpooledReader { file: Arc::clone(file), offset: 0, length: *length, reading: None })
            }
        }
    }

    /// The trailers that [`Buffered::body`] ends in: then it must be sent in chunks.
    #[must_use]
    pub fn trailers(&self) -> Option<&HeaderMap> {
        self.trailers.as_ref().filter(|_| self.in_memory().is_some())
    }
}

impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Memory(bytes) => write!(f, "{} bytes in memory", bytes.len()),
            Self::Spooled { length, .. } => write!(f, "{length} bytes spooled"),
        }
    }
}

struct Reader<'a> {
    gathered: Gathered<'a>,
    spool: Option<Spool>,
    length: u64,
    limit: u64,
    memory: &'a Arc<Budget>,
    usage: &'a Usage,
}

impl Reader<'_> {
    async fn run(mut self, mut incoming: Inbound) -> Result<Buffered, Error> {
        let mut trailers = None;
        while let Some(frame) = incoming.frame().await {
            match frame.map_err(Error::Malformed)?.into_data() {
                Ok(data) => self.take(data).await?,
                Err(frame) => trailers = frame.into_trailers().ok().map(without_ours),
            }
        }
        let (last, _) = self.gathered.take();
        let content = match self.spool {
            None => Content::Memory(last),
            Some(spool) => {
                let Spool { file, hash, taken } = spool.write(last).await?;
                let file = Spooled { file, _taken: taken, memory: Arc::clone(self.memory) };
                Content::Spooled { file: Arc::new(file), length: self.length, sha256: hash.finalize().into() }
            }
        };
        Ok(Buffered { content, trailers })
    }

    async fn take(&mut self, data: Bytes) -> Result<(), Error> {
        self.length += data.len() as u64;
        if self.length > self.limit {
            return Err(Error::TooLarge { limit: self.limit });
        }
        // What finds no room in memory goes to the file at once, and what is there before it.
        let homeless = self.gathered.push(data).err();
        let full = if self.spool.is_some() { self.gathered.len() >= SPOOL_CHUNK } else { self.length > IN_MEMORY };
        if full || homeless.is_some() {
            let mut spool = match self.spool.take() {
                Some(spool) => spool,
                None => Spool::create(self.usage).await?,
            };
            let (gathered, _) = self.gathered.take();
            for chunk in [gathered].into_iter().chain(homeless) {
                spool = spool.write(chunk).await?;
            }
            self.spool = Some(spool);
        }
        Ok(())
    }
}

/// A temporary file, which is gone with the last that refers to it.
struct Spooled {
    file: File,
    _taken: Taken,
    /// What it takes to read it back.
    memory: Arc<Budget>,
}

struct Spool {
    file: File,
    hash: Sha256,
    taken: Taken,
}

impl Spool {
    async fn create(usage: &Usage) -> Result<Self, Error> {
        let file = blocking(tempfile::tempfile).await.map_err(Error::Spool)?;
        Ok(Self { file, hash: Sha256::new(), taken: usage.disk.nothing() })
    }

    async fn write(mut self, chunk: Bytes) -> Result<Self, Error> {
        if !self.taken.grow(chunk.len() as u64) {
            return Err(Error::NoRoom);
        }
        // The chunk comes back and goes where it came from: what one thread frees for another is not at hand for either.
        let written = blocking(move || {
            self.file.write_all(&chunk)?;
            self.hash.update(&chunk);
            Ok((self, chunk))
        });
        let (spool, _chunk) = written.await.map_err(Error::Spool)?;
        Ok(spool)
    }
}

/// Reads a spooled body back, a chunk at a time.
pub(super) struct SpooledReader {
    file: Arc<Spooled>,
    offset: u64,
    length: u64,
    reading: Option<JoinHandle<io::Result<Bytes>>>,
}

impl SpooledReader {
    /// Bytes still to be read.
    pub(super) fn remaining(&self) -> u64 {
        self.length - self.offset
    }

    /// The next chunk; nothing at the end.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        if self.remaining() == 0 {
            return Poll::Ready(Ok(None));
        }
        let reading = self.reading.get_or_insert_with(|| {
            let (file, offset) = (Arc::clone(&self.file), self.offset);
            let mut taken = file.memory.nothing();
            // In small steps where there is little room.
            let step = if taken.try_grow(SPOOL_CHUNK as u64) { SPOOL_CHUNK } else { SMALL_CHUNK };
            let size = usize::try_from(self.length - offset).map_or(step, |left| left.min(step));
            // Here, where it is freed: what one thread frees for another is not at hand for either.
            let mut bytes = vec![0; size];
            tokio::task::spawn_blocking(move || {
                file.file.read_exact_at(&mut bytes, offset)?;
                Ok(counted(Bytes::from(bytes), taken))
            })
        });
        let done = ready!(Pin::new(reading).poll(cx));
        self.reading = None;
        let bytes = done.map_err(io::Error::other)??;
        self.offset += bytes.len() as u64;
        Poll::Ready(Ok(Some(bytes)))
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::limits::Limits;
    use crate::telemetry::metrics::Metrics;

    #[tokio::test]
    async fn a_disk_that_is_full_is_told_from_a_budget_that_is_spent() {
        let usage = Usage::new(&Limits { max_buffered_disk: 8, ..Limits::default() }, &Metrics::new());
        let full = File::options().write(true).open("/dev/full").unwrap();
        let on_full_disk = Spool { file: full, hash: Sha256::new(), taken: usage.disk.nothing() };
        let failed = on_full_disk.write(Bytes::from_static(b"12345678")).await.err();
        let Some(Error::Spool(error)) = failed else { panic!("{failed:?}") };
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(usage.disk.taken(), 0);

        let spool = Spool::create(&usage).await.unwrap().write(Bytes::from_static(b"12345678")).await.unwrap();
        assert_eq!(usage.disk.taken(), 8);
        assert!(matches!(spool.write(Bytes::from_static(b"9")).await, Err(Error::NoRoom)));
        assert_eq!(usage.disk.taken(), 0);
    }

    #[tokio::test]
    async fn a_spooled_body_reads_back_the_same_twice() {
        let bytes: Vec<u8> = (0..700_000u32).map(|i| (i % 251) as u8).collect();
        let usage = Usage::new(&Limits::default(), &Metrics::new());
        let spool = Spool::create(&usage).await.unwrap().write(Bytes::from(bytes.clone())).await.unwrap();
        let Spool { file, hash, taken } = spool;
        let file = Arc::new(Spooled { file, _taken: taken, memory: Arc::clone(&usage.memory) });
        let content = Content::Spooled { file, length: bytes.len() as u64, sha256: hash.finalize().into() };
        let buffered = Buffered { content, trailers: None };
        for _ in 0..2 {
            assert_eq!(buffered.body().collect().await.unwrap().to_bytes(), bytes);
        }
        assert_eq!(buffered.whole().await.unwrap(), bytes);
        assert_eq!(buffered.spooled_digest().unwrap(), <[u8; 32]>::from(Sha256::digest(&bytes)));
    }
}
