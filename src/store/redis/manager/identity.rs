//! Recognises the store by an id that it keeps: a name may come to lead to another server, where every key would run again.

use std::sync::{Mutex, PoisonError};

use redis::{RedisError, RedisResult};
use tokio::time::timeout;

use super::super::error::{code, message};
use super::super::{OpenError, keys};
use super::connector::{CONNECT_TIMEOUT, Connections, Connector, Node, at, format_address, timed_out};
use super::slots::slot;
use crate::idempotency::record::Hex;

/// The id of the store that this process uses, once it is known.
#[derive(Default)]
pub(super) struct StoreIdentity(Mutex<Option<Vec<u8>>>);

/// What became of the id on a server.
struct Found {
    id: Option<Vec<u8>>,
    /// The server had none.
    was_missing: bool,
}

impl StoreIdentity {
    fn known(&self) -> Option<Vec<u8>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, id: Vec<u8>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(id);
    }
}

impl Connector {
    /// Refuses servers that hold another store than those that this process has used. Those that hold none become its store: they
    /// have lost their records.
    pub(super) async fn recognise(&self, connections: &Connections) -> Result<(), OpenError> {
        let (Some(identity), Some(node)) = (&self.identity, holder(connections)) else { return Ok(()) };
        let known = identity.known();
        let own = match &known {
            Some(known) => known.clone(),
            None => random_id()?,
        };
        let found = timeout(CONNECT_TIMEOUT, found_or_set(node, &own)).await.unwrap_or_else(|_| Err(timed_out()));
        let found = match found {
            Ok(found) => found,
            Err(error) if is_answer(&error) => {
                // It shows when a claim is made.
                tracing::debug!(error = message(&error), "the id of the store cannot be read");
                return Ok(());
            }
            // Of a cluster, the other nodes serve their keys meanwhile.
            Err(error) if connections.slots.is_some() => {
                tracing::debug!(error = message(&error), "the node that has the id of the store does not answer");
                return Ok(());
            }
            Err(error) => return Err(at(&node.address, &error)),
        };
        let server = format_address(&node.address);
        if known.is_some() && found.was_missing && found.id.is_some() {
            tracing::error!(
                server,
                "Redis has lost its records, or an empty server is in its place: every key is new there, and a retry of what ran \
                 before runs again; if you have a copy of its data, stop the gates and restore it"
            );
        }
        match (known, found.id) {
            (Some(known), Some(found)) if known != found => Err(OpenError::OtherStore(server)),
            (_, Some(found)) => {
                identity.set(found);
                Ok(())
            }
            (_, None) => Ok(()),
        }
    }
}

/// The node that keeps the id.
fn holder(connections: &Connections) -> Option<&Node> {
    match &connections.slots {
        Some(slots) => connections.node(slots.primary(slot(keys::STORE.as_bytes()))?),
        None => connections.nodes.first(),
    }
}

/// The id on a server, which is `own` if it has none and takes it.
async fn found_or_set(node: &Node, own: &[u8]) -> RedisResult<Found> {
    let mut connection = node.connection.clone();
    let mut get = redis::cmd("GET");
    get.arg(keys::STORE);
    let id: Option<Vec<u8>> = get.query_async(&mut connection).await?;
    if id.is_some() {
        return Ok(Found { id, was_missing: false });
    }
    let mut set = redis::cmd("SET");
    set.arg(keys::STORE).arg(own).arg("NX");
    match set.query_async::<Option<String>>(&mut connection).await {
        // It may be full.
        Err(error) if is_answer(&error) => Ok(Found { id: None, was_missing: true }),
        Err(error) => Err(error),
        // Another gate may have been faster.
        Ok(_) => Ok(Found { id: get.query_async(&mut connection).await?, was_missing: true }),
    }
}

/// Whether the server has answered: the connection works.
fn is_answer(error: &RedisError) -> bool {
    code(error).is_some()
}

fn random_id() -> Result<Vec<u8>, OpenError> {
    let mut id = [0; 16];
    getrandom::fill(&mut id)
        .map_err(|_| OpenError::Failed("the system's random number generator failed".to_owned()))?;
    Ok(Hex(&id).to_string().into_bytes())
}
