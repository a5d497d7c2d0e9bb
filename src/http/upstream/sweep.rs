//! Closes connections that were idle for too long: they take memory and file descriptors.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::sleep;

use super::{IdleConnection, Inner, UNPROTECTED_IDLE, Upstream};
use crate::http::shards;

/// How often to look for expired connections.
const INTERVAL: Duration = Duration::from_secs(10);

/// Whether a sweeper task runs, for each shard.
pub(super) struct Sweepers(Box<[AtomicBool]>);

impl Sweepers {
    pub(super) fn new() -> Self {
        Self((0..shards::count()).map(|_| AtomicBool::new(false)).collect())
    }
}

impl Upstream {
    /// Starts the sweeper of this thread if it is not running.
    pub(super) fn ensure_sweeper(&self) {
        let shard = shards::index();
        let is_running = &self.0.sweepers.0[shard];
        if !is_running.load(Ordering::Relaxed) {
            is_running.store(true, Ordering::Relaxed);
            tokio::spawn(sweep(Arc::downgrade(&self.0), shard));
        }
    }
}

/// Runs until the thread has no idle connections.
async fn sweep(upstream: Weak<Inner>, shard: usize) {
    loop {
        sleep(INTERVAL).await;
        let Some(upstream) = upstream.upgrade().map(Upstream) else { return };
        let mut idle = upstream.idle(shard);
        let old = idle.partition_point(|entry| entry.since.elapsed() >= UNPROTECTED_IDLE);
        let old: Vec<IdleConnection> = idle.drain(..old).collect();
        if idle.is_empty() {
            upstream.0.sweepers.0[shard].store(false, Ordering::Relaxed);
            return;
        }
        drop(idle);
        drop(old);
    }
}
