//! Learning which node of a cluster has what.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, timeout, timeout_at};

use super::super::OpenError;
use super::reach::{Address, CONNECT, Node, Reach, Way, at, late, shown};
use super::slots::{Opinion, Slots};

/// How long others have to know better than who has answered.
const SECOND_OPINION: Duration = Duration::from_millis(200);

impl Reach {
    /// Connects to the primaries of a cluster; `before` is what is connected to already. Some may be missing.
    pub(super) async fn cluster(&self, before: &Way) -> Result<Way, OpenError> {
        let slots = self.learn(before).await?;
        let known = |address: &Address| before.nodes.iter().find(|node| node.address == *address).cloned();
        let reached = join_all(slots.primaries().iter().map(async |address| match known(address) {
            Some(node) => Ok(node),
            None => self.node(address).await.map(|(node, _)| node),
        }));
        let (mut nodes, mut failure) = (Vec::new(), None);
        for reached in reached.await {
            match reached {
                Ok(node) => nodes.push(node),
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) if nodes.is_empty() => Err(error),
            _ => Ok(Way { nodes, slots: Some(slots) }),
        }
    }

    /// Which node has what, as those say who see the cluster well and have heard most. Nodes that are not connected to are
    /// asked where no other sees it well.
    async fn learn(&self, before: &Way) -> Result<Slots, OpenError> {
        let mut failure = None;
        let mut best = best(before.nodes.iter().map(opinion), &mut failure).await;
        if !best.as_ref().is_some_and(Opinion::is_good) {
            let named = before.slots.iter().flat_map(|slots| slots.all().iter());
            let mut others: Vec<&Address> = self.servers.hosts.iter().chain(named).collect();
            others.sort_unstable();
            others.dedup();
            let other = self::best(others.into_iter().map(|address| self.opinion_at(address)), &mut failure).await;
            best = [best, other].into_iter().flatten().max_by_key(Opinion::weight);
        }
        match best {
            Some(opinion) => Ok(opinion.slots),
            None => Err(failure.unwrap_or_else(|| OpenError::Failed("no host is named".to_owned()))),
        }
    }

    async fn opinion_at(&self, address: &Address) -> Result<Opinion, OpenError> {
        let (node, greeting) = self.node(address).await?;
        if greeting.mode != "cluster" {
            return Err(OpenError::Unfit(format!("{} is not a node of a cluster", shown(address))));
        }
        opinion(&node).await
    }
}

async fn opinion(node: &Node) -> Result<Opinion, OpenError> {
    let asked = timeout(CONNECT, Opinion::of(&node.connection, &node.address)).await;
    asked.unwrap_or_else(|_| Err(late())).map_err(|error| at(&node.address, &error))
}

/// The opinion that is rather believed than the others. Where one is good, those who hang are not waited for.
async fn best(
    asked: impl Iterator<Item = impl Future<Output = Result<Opinion, OpenError>>>,
    failure: &mut Option<OpenError>,
) -> Option<Opinion> {
    let mut asked: FuturesUnordered<_> = asked.collect();
    let mut until = Instant::now() + 2 * CONNECT;
    let mut best: Option<Opinion> = None;
    while let Ok(Some(said)) = timeout_at(until, asked.next()).await {
        match said {
            Ok(opinion) => {
                if opinion.is_good() {
                    until = until.min(Instant::now() + SECOND_OPINION);
                }
                best = best.into_iter().chain([opinion]).max_by_key(Opinion::weight);
            }
            Err(error) => *failure = Some(error),
        }
    }
    best
}
