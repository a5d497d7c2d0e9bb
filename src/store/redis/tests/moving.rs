//! Clusters whose slots move, and whose nodes hang.

use tokio::time::Instant;

use super::*;
use crate::store::servers::{Cluster, Reply};

/// A slot that moves from one node to another.
struct Moving<'a> {
    slot: String,
    from: &'a servers::Redis,
    to: &'a servers::Redis,
}

impl<'a> Moving<'a> {
    fn of(cluster: &'a Cluster, key: &[u8]) -> Self {
        let shard = cluster.shard_of(key);
        let (from, to) = (cluster.primary(shard).unwrap(), cluster.primary((shard + 1) % 3).unwrap());
        let slot = from.ask(&[&b"CLUSTER"[..], b"KEYSLOT", key]).number().to_string();
        Self { slot, from, to }
    }

    fn begin(&self) {
        self.set(self.to, "IMPORTING", self.from);
        self.set(self.from, "MIGRATING", self.to);
    }

    fn set(&self, at: &servers::Redis, what: &str, of: &servers::Redis) {
        let node = of.ask(&["CLUSTER", "MYID"]).text();
        assert_eq!(at.ask(&["CLUSTER", "SETSLOT", &self.slot, what, &node]), Reply::Status("OK".into()));
    }

    fn carry(&self, key: &[u8]) {
        let (ip, port) = (self.to.address().ip().to_string(), self.to.address().port().to_string());
        let response = self.from.ask(&[&b"MIGRATE"[..], ip.as_bytes(), port.as_bytes(), key, b"0", b"5000"]);
        assert_eq!(response, Reply::Status("OK".into()));
    }

    fn end(self) {
        self.set(self.to, "NODE", self.to);
        self.set(self.from, "NODE", self.to);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_slot_moves_upkeep_loses_nothing() {
    let Some(cluster) = Cluster::start() else { return };
    let store = Redis::open(&settings_of(Topology::Cluster, cluster.nodes())).await.unwrap();
    let lease = Duration::ZERO;
    store.claim(id(1), NewRecord { lease, ..fresh(1) }).await.unwrap();
    store.claim(id(2), NewRecord { ttl: Duration::ZERO, ..fresh(2) }).await.unwrap();
    let expiry = Expiry::FromNow(Duration::ZERO);
    let end = Settlement::Complete { answer: Bytes::new(), expiry };
    store.settle(id(2), attempt(2), end).await.unwrap();
    let moving = [1, 2].map(|number| {
        let moving = Moving::of(&cluster, &keys::record(id(number)));
        moving.begin();
        moving.carry(&keys::record(id(number)));
        moving
    });
    let (expired, swept) = (store.expire_leases(10).await, store.sweep(10).await);
    assert!(expired.is_err() && swept.is_err(), "{expired:?} {swept:?}");
    for (number, moving) in [1, 2].into_iter().zip(moving) {
        let set = Partition::of(id(number)).times();
        assert_ne!(moving.from.ask(&[&b"ZRANK"[..], &set, &id(number).0]), Reply::Nothing, "{number}");
        moving.carry(&set);
        moving.end();
    }
    assert_eq!(eventually("it goes on", async || store.expire_leases(10).await).await.len(), 1);
    assert_eq!(store.sweep(10).await.unwrap(), 1);
    assert_eq!(store.count().await.unwrap(), [0, 0, 1]);
}

/// A node that comes to a cluster, and has no slots yet.
async fn newcomer(cluster: &Cluster) -> servers::Redis {
    let bus = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let node = servers::Redis::with(&[("cluster-enabled", "yes"), ("cluster-port", &bus)]).unwrap();
    node.run(&format!("CONFIG SET cluster-announce-ip {}", node.address().ip())).unwrap();
    let known = cluster.nodes().next().unwrap();
    let bus = known.ask(&["CONFIG", "GET", "cluster-port"]).list().remove(1).text();
    let (ip, port) = (known.address().ip().to_string(), known.address().port().to_string());
    assert_eq!(node.ask(&["CLUSTER", "MEET", &ip, &port, &bus]), Reply::Status("OK".into()));
    for one in cluster.nodes().chain([&node]) {
        eventually("all know all", async || match one.ask(&["CLUSTER", "NODES"]).text() {
            nodes
                if nodes.lines().filter(|node| node.ends_with("connected") || node.contains(" connected ")).count()
                    == 4 =>
            {
                Ok(())
            }
            nodes => Err(nodes),
        })
        .await;
    }
    eventually("it finds that all is well", async || match node.ask(&["CLUSTER", "INFO"]).text() {
        info if info.contains("cluster_state:ok") => Ok(()),
        info => Err(info),
    })
    .await;
    node
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_is_followed_to_an_unknown_node() {
    let Some(cluster) = Cluster::start() else { return };
    let store = Redis::open(&settings_of(Topology::Cluster, cluster.nodes())).await.unwrap();
    store.claim(id(1), fresh(1)).await.unwrap();
    let newcomer = newcomer(&cluster).await;
    let moving = Moving { to: &newcomer, ..Moving::of(&cluster, &keys::record(id(1))) };
    moving.begin();
    moving.carry(&keys::record(id(1)));
    let half = store.settle(id(1), attempt(1), complete()).await;
    assert!(matches!(&half, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Unavailable), "{half:?}");
    moving.carry(&Partition::of(id(1)).times());
    let settled = store.settle(id(1), attempt(1), complete()).await;
    assert!(matches!(settled, Ok(Settled::Done { .. })), "it is asked there: {settled:?}");
    moving.end();
    let claimed = store.claim(id(1), fresh(2)).await;
    assert!(matches!(claimed, Ok(Claim::Exists { .. })), "{claimed:?}");
    eventually("all works", async || store.ping().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_hangs_does_not_delay_the_others() {
    let Some(cluster) = Cluster::start() else { return };
    let store = Arc::new(Redis::open(&settings_of(Topology::Cluster, cluster.nodes())).await.unwrap());
    for number in 0..64 {
        store.claim(id(number), fresh(number)).await.unwrap();
    }
    let shard = cluster.shard_of(&keys::record(id(1)));
    let (there, elsewhere): (Vec<u16>, Vec<u16>) =
        (0..64).partition(|number| cluster.shard_of(&keys::record(id(*number))) == shard);
    cluster.primary(shard).unwrap().hang();
    let waiting: Vec<_> = (0..200)
        .map(|nth| {
            let (store, number) = (Arc::clone(&store), there[nth % there.len()]);
            tokio::spawn(async move { store.claim(id(number), fresh(500)).await })
        })
        .collect();
    let (settled, held) = elsewhere.split_at(elsewhere.len() / 2);
    let held_there = there.iter().chain(held).map(|number| LeaseRenewal {
        id: id(*number),
        attempt: attempt(*number),
        lease: Duration::from_secs(60),
    });
    let began = Instant::now();
    let (renewed, ()) = tokio::join!(store.renew(held_there.collect()), async {
        for number in settled {
            let settled = store.settle(id(*number), attempt(*number), complete()).await;
            assert!(matches!(settled, Ok(Settled::Done { .. })), "{settled:?}");
        }
        assert!(began.elapsed() < COMMAND_TIMEOUT, "{:?}", began.elapsed());
        assert!(waiting.iter().any(|waiting| !waiting.is_finished()), "they still wait");
    });
    assert_eq!(renewed.unwrap().len(), held.len(), "and leases are renewed there");
    for waiting in waiting {
        assert!(waiting.await.unwrap().is_err());
    }
    cluster.primary(shard).map(servers::Redis::go_on);
}
