//! The HTTP/2 connections to an upstream.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Mutex as Turns, MutexGuard as Turn, Notify};

use super::Reuse;
use super::owner::{Owner, Purpose};
use super::settings::{Protocol, Settings};
use super::shared::{Shared, Ticket};
use crate::http::shards;

/// Those that are open, for each of the threads that serve.
pub(super) struct Lines {
    shards: Box<[Line]>,
    /// Told when there is room on one of them.
    pub(super) freed: Arc<Notify>,
    /// What was spoken on the last connection that opened.
    is_h2: AtomicBool,
    /// Whether anything was spoken yet.
    is_known: AtomicBool,
}

#[derive(Default)]
struct Line {
    open: Mutex<Vec<Arc<Shared>>>,
    /// One at a time of each kind is opened: many a request fits on it.
    opening: [Turns<()>; 2],
}

impl Lines {
    /// Nothing where HTTP/2 is never spoken.
    pub(super) fn of(settings: &Settings) -> Option<Self> {
        let is_h2 = match (settings.protocol, &settings.tls) {
            (Protocol::Http1, _) | (Protocol::Auto, None) => return None,
            (Protocol::Auto, Some(_)) => false,
            (Protocol::H2, _) => true,
        };
        Some(Self {
            shards: (0..shards::count()).map(|_| Line::default()).collect(),
            freed: Arc::default(),
            is_h2: AtomicBool::new(is_h2),
            is_known: AtomicBool::new(is_h2),
        })
    }

    /// Whether a connection of this thread that opens next is likely to be one of them.
    pub(super) fn are_likely(&self) -> bool {
        self.is_h2.load(Ordering::Relaxed) || !self.is_known.load(Ordering::Relaxed)
    }

    /// What was spoken on a connection that has opened.
    pub(super) fn learn(&self, is_h2: bool) {
        self.is_h2.store(is_h2, Ordering::Relaxed);
        self.is_known.store(true, Ordering::Relaxed);
    }

    /// Waits until nobody else on this thread opens one of this kind.
    pub(super) async fn turn(&self, reuse: Reuse) -> Turn<'_, ()> {
        self.shards[shards::index()].opening[usize::from(reuse == Reuse::Protected)].lock().await
    }

    /// Room for a request on one of this thread that was opened for its kind: what befalls a connection by other requests,
    /// and by clients who do not take their answers, is not to befall protected attempts.
    pub(super) fn join(&self, purpose: Purpose) -> Option<Ticket> {
        self.join_in(shards::index(), purpose, |shared| shared.is_for(purpose.reuse))
    }

    /// Room for a request on any, where no more can be opened.
    pub(super) fn join_any(&self, purpose: Purpose) -> Option<Ticket> {
        let mut all = 0..self.shards.len();
        let own = all.clone().find_map(|shard| self.join_in(shard, purpose, |shared| shared.is_for(purpose.reuse)));
        own.or_else(|| all.find_map(|shard| self.join_in(shard, purpose, |_| true)))
    }

    fn join_in(&self, shard: usize, purpose: Purpose, may: impl Fn(&Shared) -> bool) -> Option<Ticket> {
        if purpose.reuse == Reuse::Never {
            return None;
        }
        let may = |shared: &&Arc<Shared>| purpose.may_use(shared.owner()) && may(shared);
        // The last one is the youngest.
        self.open(shard).iter().rev().filter(may).find_map(|shared| shared.join(purpose.reuse))
    }

    /// Takes in one that has just opened, and makes room on it.
    pub(super) fn take_in(&self, shared: Arc<Shared>) -> Option<Ticket> {
        let ticket = shared.join_new();
        if shared.owner() == Owner::OneRequest {
            return ticket;
        }
        let mut open = self.open(shards::index());
        open.retain(|shared| shared.is_alive() && !shared.is_unused(Reuse::Unprotected));
        open.push(shared);
        drop(open);
        // There is room for many more.
        self.freed.notify_waiters();
        ticket
    }

    /// Closes a connection that carries nothing and may not carry a request of this purpose.
    pub(super) fn give_up_one(&self, purpose: Purpose) {
        let is_useless = |shared: &Arc<Shared>| {
            shared.is_unused(purpose.reuse) || shared.is_empty() && !purpose.may_use(shared.owner())
        };
        let unused = (0..self.shards.len()).find_map(|shard| {
            let mut open = self.open(shard);
            let place = open.iter().position(is_useless)?;
            Some(open.remove(place))
        });
        drop(unused);
    }

    fn open(&self, shard: usize) -> MutexGuard<'_, Vec<Arc<Shared>>> {
        self.shards[shard].open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
