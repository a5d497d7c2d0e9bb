//! Sends commands to the nodes that have their keys, and follows redirections.

use std::sync::Arc;

use futures_util::future::join_all;
use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value};

use super::connector::{Address, Connections, Node};
use super::slots::{self, slot};
use super::{Answers, ConnectionManager, Shared, not_connected};

/// How often a command that has moved is sent after it.
const MOVES: usize = 2;

impl ConnectionManager {
    /// Sends all commands at once, each to the node that has its keys. The order in which they are carried out is theirs
    /// on each node.
    ///
    /// # Errors
    /// Where no server answers to any of them.
    pub(in crate::store) async fn send(&self, batch: &[Cmd]) -> RedisResult<Answers> {
        let connections = self.shared.connections()?;
        let Some(slots) = &connections.slots else {
            let Some(node) = connections.nodes.first() else { return Err(not_connected("it is not connected")) };
            return self.shared.send_to(node, batch.iter().collect()).await;
        };
        let node_of = |command: &Cmd| match slots::slot_of(command) {
            Some(slot) => connections.node(slots.primary(slot)?),
            None => connections.nodes.first(),
        };
        let mut answers: Vec<RedisResult<Value>> = Vec::with_capacity(batch.len());
        answers.resize_with(batch.len(), || Err(not_connected("a node of the cluster is not connected")));
        let placed: Vec<(usize, &Node)> =
            batch.iter().enumerate().filter_map(|(place, command)| Some((place, node_of(command)?))).collect();
        if placed.len() < batch.len() {
            self.shared.mark_broken();
        }
        self.shared.send_to_nodes(batch, placed.into_iter(), false, &mut answers).await;
        for _ in 0..MOVES {
            let moved: Vec<(usize, Moved)> =
                answers.iter().enumerate().filter_map(|(place, answer)| Some((place, moved(answer)?))).collect();
            if moved.is_empty() {
                break;
            }
            let connections = self.shared.connections_including(moved.iter().map(|(_, moved)| &moved.to)).await;
            for is_asking in [false, true] {
                let placed = moved.iter().filter(|(_, moved)| moved.is_asking == is_asking);
                let placed = placed.filter_map(|(place, moved)| Some((*place, connections.node(&moved.to)?)));
                self.shared.send_to_nodes(batch, placed, is_asking, &mut answers).await;
            }
        }
        Ok(answers)
    }

    /// Which of the nodes has a key, as far as it is known: a number below that of the nodes.
    pub(in crate::store) fn node_index(&self, key: &[u8]) -> usize {
        let connections = Arc::clone(&self.shared.lock().connections);
        connections.slots.as_ref().and_then(|slots| slots.place(slot(key))).unwrap_or_default()
    }
}

impl Shared {
    /// The current connections, plus the given nodes if they can be reached: a node that is taking over may have no
    /// slot yet.
    async fn connections_including(&self, wanted: impl Iterator<Item = &Address>) -> Arc<Connections> {
        let connections = Arc::clone(&self.lock().connections);
        let mut unknown: Vec<&Address> = wanted.filter(|address| connections.node(address).is_none()).collect();
        unknown.sort_unstable();
        unknown.dedup();
        if unknown.is_empty() {
            return connections;
        }
        let reached = join_all(unknown.into_iter().map(|address| self.connector.node(address))).await;
        let mut state = self.lock();
        let mut nodes = state.connections.nodes.clone();
        for (node, _) in reached.into_iter().flatten() {
            // Others may have been here.
            if state.connections.node(&node.address).is_none() {
                nodes.push(node);
            }
        }
        state.connections = Arc::new(Connections { nodes, slots: state.connections.slots.clone() });
        Arc::clone(&state.connections)
    }

    /// Sends some of a batch, each to its node, and puts the answers in their places.
    async fn send_to_nodes<'a>(
        &self,
        batch: &[Cmd],
        placed: impl Iterator<Item = (usize, &'a Node)>,
        is_asking: bool,
        answers: &mut [RedisResult<Value>],
    ) {
        let mut parts: Vec<(&Node, Vec<usize>)> = Vec::new();
        for (place, node) in placed {
            match parts.iter_mut().find(|(known, _)| known.number == node.number) {
                Some((_, places)) => places.push(place),
                None => parts.push((node, vec![place])),
            }
        }
        let asking = redis::cmd("ASKING");
        let sending = parts.into_iter().map(async |(node, places)| {
            let each = places.iter().flat_map(|place| [is_asking.then_some(&asking), Some(&batch[*place])]);
            let response = self.send_to(node, each.flatten().collect()).await;
            (places, response)
        });
        for (places, response) in join_all(sending).await {
            match response {
                Ok(response) => {
                    let response =
                        response.into_iter().skip(usize::from(is_asking)).step_by(1 + usize::from(is_asking));
                    places.into_iter().zip(response).for_each(|(place, response)| answers[place] = response);
                }
                Err(error) => places.into_iter().for_each(|place| answers[place] = Err(error.clone())),
            }
        }
    }
}

/// Where a command is to go instead.
struct Moved {
    to: (String, u16),
    /// Whether only this once.
    is_asking: bool,
}

fn moved(answer: &RedisResult<Value>) -> Option<Moved> {
    let error = answer.as_ref().err()?;
    let is_asking = match error.kind() {
        ErrorKind::Server(ServerErrorKind::Moved) => false,
        ErrorKind::Server(ServerErrorKind::Ask) => true,
        _ => return None,
    };
    let (host, port) = error.detail()?.split_once(' ')?.1.rsplit_once(':')?;
    Some(Moved { to: (host.to_owned(), port.parse().ok()?), is_asking })
}
