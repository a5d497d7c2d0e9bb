//! Commands follow their keys.

use std::sync::Arc;

use futures_util::future::join_all;
use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value};

use super::reach::{Address, Node, Way};
use super::slots::{self, slot};
use super::{Answers, Link, Shared, nowhere};

/// How often a command that has moved is sent after it.
const MOVES: usize = 2;

impl Link {
    /// Sends all commands at once, each to the node that has its keys. The order in which they are carried out is theirs
    /// on each node.
    ///
    /// # Errors
    /// Where no server answers to any of them.
    pub(in crate::store) async fn send(&self, batch: &[Cmd]) -> RedisResult<Answers> {
        let way = self.shared.way()?;
        let Some(slots) = &way.slots else {
            let Some(node) = way.nodes.first() else { return Err(nowhere("it is not connected")) };
            return self.shared.send_to(node, batch.iter().collect()).await;
        };
        let node_of = |command: &Cmd| match slots::slot_of(command) {
            Some(slot) => way.node(slots.primary(slot)?),
            None => way.nodes.first(),
        };
        let mut answers: Vec<RedisResult<Value>> = Vec::with_capacity(batch.len());
        answers.resize_with(batch.len(), || Err(nowhere("a node of the cluster is not connected")));
        let placed: Vec<(usize, &Node)> =
            batch.iter().enumerate().filter_map(|(place, command)| Some((place, node_of(command)?))).collect();
        if placed.len() < batch.len() {
            self.shared.disturb();
        }
        self.shared.send_placed(batch, placed.into_iter(), false, &mut answers).await;
        for _ in 0..MOVES {
            let moved: Vec<(usize, Moved)> =
                answers.iter().enumerate().filter_map(|(place, answer)| Some((place, moved(answer)?))).collect();
            if moved.is_empty() {
                break;
            }
            let way = self.shared.way_to(moved.iter().map(|(_, moved)| &moved.to)).await;
            for is_asking in [false, true] {
                let placed = moved.iter().filter(|(_, moved)| moved.is_asking == is_asking);
                let placed = placed.filter_map(|(place, moved)| Some((*place, way.node(&moved.to)?)));
                self.shared.send_placed(batch, placed, is_asking, &mut answers).await;
            }
        }
        Ok(answers)
    }

    /// Which of the nodes has a key, as far as it is known: a number below that of the nodes.
    pub(in crate::store) fn place_of(&self, key: &[u8]) -> usize {
        let way = Arc::clone(&self.shared.lock().way);
        way.slots.as_ref().and_then(|slots| slots.place(slot(key))).unwrap_or_default()
    }
}

impl Shared {
    /// What is connected to, with these nodes as well where they can be reached: one that only takes over has no slot yet.
    async fn way_to(&self, wanted: impl Iterator<Item = &Address>) -> Arc<Way> {
        let way = Arc::clone(&self.lock().way);
        let mut unknown: Vec<&Address> = wanted.filter(|address| way.node(address).is_none()).collect();
        unknown.sort_unstable();
        unknown.dedup();
        if unknown.is_empty() {
            return way;
        }
        let reached = join_all(unknown.into_iter().map(|address| self.reach.node(address))).await;
        let mut state = self.lock();
        let mut nodes = state.way.nodes.clone();
        for (node, _) in reached.into_iter().flatten() {
            // Others may have been here.
            if state.way.node(&node.address).is_none() {
                nodes.push(node);
            }
        }
        state.way = Arc::new(Way { nodes, slots: state.way.slots.clone() });
        Arc::clone(&state.way)
    }

    /// Sends some of a batch, each to its node, and puts the answers in their places.
    async fn send_placed<'a>(
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
            let said = self.send_to(node, each.flatten().collect()).await;
            (places, said)
        });
        for (places, said) in join_all(sending).await {
            match said {
                Ok(said) => {
                    let said = said.into_iter().skip(usize::from(is_asking)).step_by(1 + usize::from(is_asking));
                    places.into_iter().zip(said).for_each(|(place, said)| answers[place] = said);
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
