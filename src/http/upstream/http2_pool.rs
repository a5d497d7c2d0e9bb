//! The HTTP/2 connections to an upstream.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use super::connection::{Owner, Purpose};
use super::http2::{Http2Connection, MAX_STREAMS, ReservedStream};
use super::settings::{Protocol, Settings};
use super::{NotSent, Reuse};
use crate::http::shards;

/// The open HTTP/2 connections, by shard.
pub(super) struct Http2Pool {
    shards: Box<[PoolShard]>,
    /// Notified when a stream on one of them is free.
    pub(super) freed: Arc<Notify>,
    /// Whether the last connection negotiated HTTP/2.
    is_h2: AtomicBool,
    /// Whether any connection has negotiated a protocol yet.
    is_known: AtomicBool,
    /// How many streams the last connection had: as many as the next one will have, in all likelihood.
    streams: AtomicUsize,
}

#[derive(Default)]
struct PoolShard {
    open: Mutex<Vec<Arc<Http2Connection>>>,
    /// The openings of each kind. A connection carries many requests, so that not each of them opens one.
    openings: [Openings; 2],
}

/// The connections of one kind that a thread opens.
#[derive(Default)]
struct Openings {
    counts: Mutex<OpeningCounts>,
    /// Notified when one has ended.
    ended: Notify,
}

#[derive(Default)]
struct OpeningCounts {
    /// How many requests need a stream on one, those that open it included.
    needed: usize,
    under_way: usize,
}

/// A request that needs a stream on a new connection, until this is dropped.
pub(super) struct Need<'a> {
    openings: &'a Openings,
    is_opening: bool,
}

impl Openings {
    fn counts(&self) -> MutexGuard<'_, OpeningCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> Need<'a> {
    fn of(openings: &'a Openings) -> Self {
        openings.counts().needed += 1;
        Self { openings, is_opening: false }
    }

    /// Begins an opening, if those under way will have too few streams for all that need one.
    fn try_begin(&mut self, streams: usize) -> bool {
        let mut counts = self.openings.counts();
        self.is_opening = counts.under_way < counts.needed.div_ceil(streams);
        counts.under_way += usize::from(self.is_opening);
        self.is_opening
    }
}

impl Drop for Need<'_> {
    fn drop(&mut self) {
        let mut counts = self.openings.counts();
        counts.needed -= 1;
        counts.under_way -= usize::from(self.is_opening);
        drop(counts);
        if self.is_opening {
            self.openings.ended.notify_waiters();
        }
    }
}

impl Http2Pool {
    /// `None` if HTTP/2 is never spoken.
    pub(super) fn of(settings: &Settings) -> Option<Self> {
        let is_h2 = match (settings.protocol, &settings.tls) {
            (Protocol::Http1, _) | (Protocol::Auto, None) => return None,
            (Protocol::Auto, Some(_)) => false,
            (Protocol::H2, _) => true,
        };
        Some(Self {
            shards: (0..shards::count()).map(|_| PoolShard::default()).collect(),
            freed: Arc::default(),
            is_h2: AtomicBool::new(is_h2),
            is_known: AtomicBool::new(is_h2),
            streams: AtomicUsize::new(MAX_STREAMS),
        })
    }

    /// Whether the next connection is likely to be HTTP/2.
    pub(super) fn is_http2_likely(&self) -> bool {
        self.is_h2.load(Ordering::Relaxed) || !self.is_known.load(Ordering::Relaxed)
    }

    /// Records the protocol of a new connection.
    pub(super) fn observe_protocol(&self, is_h2: bool) {
        self.is_h2.store(is_h2, Ordering::Relaxed);
        self.is_known.store(true, Ordering::Relaxed);
    }

    /// Waits for the connections that other requests of this kind open on this thread, until `take` finds one with a free
    /// stream (`Ok`), or until the caller is to open one (`Err`): they have too few streams, or HTTP/2 is not spoken (`None`).
    /// It waits for each of them no longer than `limit`, which is how long opening one may take.
    pub(super) async fn wait_for_opening<T>(
        &self,
        reuse: Reuse,
        limit: Duration,
        take: impl Fn() -> Option<T>,
    ) -> Result<Result<T, Option<Need<'_>>>, NotSent> {
        let openings = &self.shards[shards::index()].openings[usize::from(reuse == Reuse::Protected)];
        let mut need = Need::of(openings);
        loop {
            // Registered before the check, so that no notification is missed.
            let ended = openings.ended.notified();
            if let Some(taken) = take() {
                return Ok(Ok(taken));
            }
            // The previous connection may have negotiated HTTP/1.1, which carries one request at a time.
            if !self.is_http2_likely() {
                return Ok(Err(None));
            }
            if need.try_begin(self.streams.load(Ordering::Relaxed)) {
                return Ok(Err(Some(need)));
            }
            timeout(limit, ended).await.map_err(|_| NotSent::ConnectTimeout(limit))?;
        }
    }

    /// Reserves a stream on a connection of this thread that was opened for this kind of request. Other requests, or
    /// clients that do not read their responses, can break or stall a connection; protected attempts must not suffer
    /// from that.
    pub(super) fn reserve(&self, purpose: Purpose) -> Option<ReservedStream> {
        self.reserve_in(shards::index(), purpose, |connection| connection.is_for(purpose.reuse))
    }

    /// Reserves a stream on any connection, where no more can be opened.
    pub(super) fn reserve_any(&self, purpose: Purpose) -> Option<ReservedStream> {
        let mut all = 0..self.shards.len();
        let own = all
            .clone()
            .find_map(|shard| self.reserve_in(shard, purpose, |connection| connection.is_for(purpose.reuse)));
        own.or_else(|| all.find_map(|shard| self.reserve_in(shard, purpose, |_| true)))
    }

    fn reserve_in(
        &self,
        shard: usize,
        purpose: Purpose,
        may: impl Fn(&Http2Connection) -> bool,
    ) -> Option<ReservedStream> {
        if purpose.reuse == Reuse::Never {
            return None;
        }
        let may = |connection: &&Arc<Http2Connection>| purpose.may_use(connection.owner()) && may(connection);
        // The last one is the newest.
        self.open(shard).iter().rev().filter(may).find_map(|connection| connection.reserve(purpose.reuse))
    }

    /// Adds a new connection, and reserves a stream on it.
    pub(super) fn insert(&self, connection: Arc<Http2Connection>) -> Option<ReservedStream> {
        self.streams.store(connection.stream_limit().max(1), Ordering::Relaxed);
        let stream = connection.reserve_new();
        if connection.owner() == Owner::OneRequest {
            return stream;
        }
        let mut open = self.open(shards::index());
        open.retain(|connection| connection.is_alive() && !connection.is_unused(Reuse::Unprotected));
        open.push(connection);
        drop(open);
        // It has free streams for other requests.
        self.freed.notify_waiters();
        stream
    }

    /// Closes the connections of a thread that have had no stream for as long as requests may reuse one. Returns whether none is left.
    pub(super) fn sweep(&self, shard: usize) -> bool {
        let is_unused =
            |connection: &mut Arc<Http2Connection>| !connection.is_alive() || connection.is_unused(Reuse::Unprotected);
        let mut open = self.open(shard);
        let unused: Vec<_> = open.extract_if(.., is_unused).collect();
        let is_empty = open.is_empty();
        drop(open);
        drop(unused);
        is_empty
    }

    /// Closes a connection that carries nothing and may not carry a request of this purpose.
    pub(super) fn evict_unused(&self, purpose: Purpose) {
        let is_evictable = |connection: &Arc<Http2Connection>| {
            connection.is_unused(purpose.reuse) || connection.is_empty() && !purpose.may_use(connection.owner())
        };
        let unused = (0..self.shards.len()).find_map(|shard| {
            let mut open = self.open(shard);
            let place = open.iter().position(is_evictable)?;
            Some(open.remove(place))
        });
        drop(unused);
    }

    fn open(&self, shard: usize) -> MutexGuard<'_, Vec<Arc<Http2Connection>>> {
        self.shards[shard].open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
