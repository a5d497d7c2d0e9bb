//! A lane for each node: who waits for one that hangs keeps nobody from the others.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::Handle;

use super::caller::Caller;
use super::keys;
use super::lane::Lane;
use super::operation::{Operation, Said};
use super::queue::closed;
use crate::store::Error;

/// Lanes, opened as nodes are found.
pub(super) struct Lanes {
    caller: Arc<Caller>,
    runtime: Handle,
    /// By the places of nodes; nothing once they are closed.
    lanes: Mutex<Option<Vec<Arc<Lane>>>>,
}

impl Lanes {
    /// Lanes whose tasks run on the runtime that this is called on.
    pub(super) fn open(caller: Arc<Caller>) -> Self {
        Self { caller, runtime: Handle::current(), lanes: Mutex::new(Some(Vec::new())) }
    }

    /// Has an operation carried out with all others that wait for its node.
    pub(super) async fn ask(&self, operation: Operation) -> Result<Said, Error> {
        let first = operation.first().filter(|_| self.caller.is_partitioned);
        let place = first.map_or(0, |id| self.caller.link.place_of(&keys::record(id)));
        self.lane(place)?.ask(operation).await
    }

    /// Carries out what waits, takes nothing more, and ends.
    pub(super) async fn close(&self) {
        let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner).take();
        let closing = lanes.iter().flatten().map(|lane| lane.close());
        futures_util::future::join_all(closing).await;
    }

    fn lane(&self, place: usize) -> Result<Arc<Lane>, Error> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let lanes = lanes.as_mut().ok_or_else(closed)?;
        if place >= lanes.len() {
            let _on_it = self.runtime.enter();
            lanes.resize_with(place + 1, || Arc::new(Lane::open(Arc::clone(&self.caller))));
        }
        Ok(Arc::clone(&lanes[place]))
    }
}
