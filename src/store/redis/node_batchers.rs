//! A batcher for each node, so that operations for a node that hangs do not delay those for the others.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::Handle;

use super::keys;
use super::operation::{Operation, Reply};
use super::script_client::ScriptClient;
use crate::store::Error;
use crate::store::batcher::Batcher;

/// How many round trips are under way at most, for each node.
const WORKERS: usize = 2;

type NodeBatcher = Batcher<Arc<ScriptClient>>;

/// The batchers of the nodes, opened as nodes are found.
pub(super) struct NodeBatchers {
    client: Arc<ScriptClient>,
    runtime: Handle,
    /// By the places of nodes; nothing once they are closed.
    batchers: Mutex<Option<Vec<Arc<NodeBatcher>>>>,
}

impl NodeBatchers {
    /// Batchers whose tasks run on the runtime that this is called on.
    pub(super) fn open(client: Arc<ScriptClient>) -> Self {
        Self { client, runtime: Handle::current(), batchers: Mutex::new(Some(Vec::new())) }
    }

    /// Executes an operation, batched with the others for its node.
    pub(super) async fn submit(&self, operation: Operation) -> Result<Reply, Error> {
        let first = operation.first().filter(|_| self.client.is_partitioned);
        let place = first.map_or(0, |id| self.client.manager.node_index(&keys::record(id)));
        self.batcher(place)?.submit(operation).await
    }

    /// Executes the queued operations, accepts no more, and ends.
    pub(super) async fn close(&self) {
        let batchers = self.batchers.lock().unwrap_or_else(PoisonError::into_inner).take();
        let closing = batchers.iter().flatten().map(|batcher| batcher.close());
        futures_util::future::join_all(closing).await;
    }

    fn batcher(&self, place: usize) -> Result<Arc<NodeBatcher>, Error> {
        let mut batchers = self.batchers.lock().unwrap_or_else(PoisonError::into_inner);
        let batchers = batchers.as_mut().ok_or_else(Error::closed)?;
        if place >= batchers.len() {
            let _on_it = self.runtime.enter();
            batchers.resize_with(place + 1, || Arc::new(Batcher::open(Arc::clone(&self.client), None, WORKERS)));
        }
        Ok(Arc::clone(&batchers[place]))
    }
}
