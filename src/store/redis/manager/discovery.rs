//! Discovers which node of a cluster has which slots.

use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, timeout, timeout_at};

use super::super::OpenError;
use super::connector::{Address, CONNECT_TIMEOUT, Connections, Connector, Node, at, format_address, timed_out};
use super::slots::{ClusterView, Slots};

/// How long to wait for a better view after the first complete one.
const LATECOMER_GRACE: Duration = Duration::from_millis(200);

impl Connector {
    /// Connects to the primaries of a cluster; `before` holds the existing connections. Some may be missing.
    pub(super) async fn cluster(&self, before: &Connections) -> Result<Connections, OpenError> {
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
            _ => Ok(Connections { nodes, slots: Some(slots) }),
        }
    }

    /// The slots of the best view. Nodes without a connection are asked only if no connected node has a complete
    /// view.
    async fn learn(&self, before: &Connections) -> Result<Slots, OpenError> {
        let mut failure = None;
        let mut best = best(before.nodes.iter().map(view), &mut failure).await;
        if !best.as_ref().is_some_and(ClusterView::is_good) {
            let named = before.slots.iter().flat_map(|slots| slots.all().iter());
            let mut others: Vec<&Address> = self.servers.hosts.iter().chain(named).collect();
            others.sort_unstable();
            others.dedup();
            let other = self::best(others.into_iter().map(|address| self.view_at(address)), &mut failure).await;
            best = [best, other].into_iter().flatten().max_by_key(ClusterView::weight);
        }
        match best {
            Some(view) => Ok(view.slots),
            None => Err(failure.unwrap_or_else(|| OpenError::Failed("no host is named".to_owned()))),
        }
    }

    async fn view_at(&self, address: &Address) -> Result<ClusterView, OpenError> {
        let (node, hello) = self.node(address).await?;
        if hello.mode != "cluster" {
            return Err(OpenError::Unfit(format!("{} is not a node of a cluster", format_address(address))));
        }
        view(&node).await
    }
}

async fn view(node: &Node) -> Result<ClusterView, OpenError> {
    let asked = timeout(CONNECT_TIMEOUT, ClusterView::of(&node.connection, &node.address)).await;
    asked.unwrap_or_else(|_| Err(timed_out())).map_err(|error| at(&node.address, &error))
}

/// The view with the greatest weight. After a complete view, nodes that hang are not waited for.
async fn best(
    asked: impl Iterator<Item = impl Future<Output = Result<ClusterView, OpenError>>>,
    failure: &mut Option<OpenError>,
) -> Option<ClusterView> {
    let mut asked: FuturesUnordered<_> = asked.collect();
    let mut until = Instant::now() + 2 * CONNECT_TIMEOUT;
    let mut best: Option<ClusterView> = None;
    while let Ok(Some(response)) = timeout_at(until, asked.next()).await {
        match response {
            Ok(view) => {
                if view.is_good() {
                    until = until.min(Instant::now() + LATECOMER_GRACE);
                }
                best = best.into_iter().chain([view]).max_by_key(ClusterView::weight);
            }
            Err(error) => *failure = Some(error),
        }
    }
    best
}
