//! Closes idle connections in time: they take memory and files, and requests look at no more than the youngest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::sleep;

use super::{Idle, Inner, UNPROTECTED_IDLE, Upstream};
use crate::http::shards;

/// How often to look for those that were idle for too long.
const EVERY: Duration = Duration::from_secs(10);

/// For each of the threads that serve, whether a task closes the connections there that are idle for too long.
pub(super) struct Swept(Box<[AtomicBool]>);

impl Swept {
    pub(super) fn new() -> Self {
        Self((0..shards::count()).map(|_| AtomicBool::new(false)).collect())
    }
}

impl Upstream {
    /// A connection of this thread is about to be idle: has it closed when it was for too long.
    pub(super) fn keep_swept(&self) {
        let shard = shards::index();
        let is_swept = &self.0.swept.0[shard];
        if !is_swept.load(Ordering::Relaxed) {
            is_swept.store(true, Ordering::Relaxed);
            tokio::spawn(sweep(Arc::downgrade(&self.0), shard));
        }
    }
}

/// Goes on until the thread has none that is idle.
async fn sweep(upstream: Weak<Inner>, shard: usize) {
    loop {
        sleep(EVERY).await;
        let Some(upstream) = upstream.upgrade().map(Upstream) else { return };
        let mut idle = upstream.idle(shard);
        let old = idle.partition_point(|entry| entry.since.elapsed() >= UNPROTECTED_IDLE);
        let old: Vec<Idle> = idle.drain(..old).collect();
        if idle.is_empty() {
            upstream.0.swept.0[shard].store(false, Ordering::Relaxed);
            return;
        }
        drop(idle);
        drop(old);
    }
}
