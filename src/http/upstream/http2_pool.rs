//! The HTTP/2 connections to an upstream.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Mutex as AsyncMutex, MutexGuard as AsyncMutexGuard, Notify};

use super::Reuse;
use super::connection::{Owner, Purpose};
use super::http2::{Http2Connection, ReservedStream};
use super::settings::{Protocol, Settings};
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
}

#[derive(Default)]
struct PoolShard {
    open: Mutex<Vec<Arc<Http2Connection>>>,
    /// One connection of each kind is opened at a time, because it carries many requests.
    opening: [AsyncMutex<()>; 2],
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

    /// Waits until no other request on this thread opens a connection of this kind.
    pub(super) async fn lock_opening(&self, reuse: Reuse) -> AsyncMutexGuard<'_, ()> {
        self.shards[shards::index()].opening[usize::from(reuse == Reuse::Protected)].lock().await
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
