//! Clusters whose slots move, and whose nodes hang.

use super::*;
use crate::store::servers::{Cluster, Reply};

/// A slot that moves from one node to another.
struct Moving<'a> {
    slot: String,
    from: &'a servers::Redis,
    to: &'a servers::Redis,
}

impl<'a> Moving<'a> {
    fn begin(cluster: &'a Cluster, key: &[u8]) -> Self {
        let shard = cluster.shard_of(key);
        let (from, to) = (cluster.primary(shard).unwrap(), cluster.primary((shard + 1) % 3).unwrap());
        let slot = from.ask(&[&b"CLUSTER"[..], b"KEYSLOT", key]).number().to_string();
        let moving = Self { slot, from, to };
        moving.set(to, "IMPORTING", from);
        moving.set(from, "MIGRATING", to);
        moving
    }

    fn set(&self, at: &servers::Redis, what: &str, of: &servers::Redis) {
        let node = of.ask(&["CLUSTER", "MYID"]).text();
        assert_eq!(at.ask(&["CLUSTER", "SETSLOT", &self.slot, what, &node]), Reply::Status("OK".into()));
    }

    fn carry(&self, key: &[u8]) {
        let (ip, port) = (self.to.address().ip().to_string(), self.to.address().port().to_string());
        let said = self.from.ask(&[&b"MIGRATE"[..], ip.as_bytes(), port.as_bytes(), key, b"0", b"5000"]);
        assert_eq!(said, Reply::Status("OK".into()));
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
    store.claim(id(1), Fresh { lease, ..fresh(1) }).await.unwrap();
    store.claim(id(2), Fresh { ttl: Duration::ZERO, ..fresh(2) }).await.unwrap();
    let expiry = Expiry::FromNow(Duration::ZERO);
    let end = End::Complete { answer: Bytes::new(), expiry };
    store.settle(id(2), attempt(2), end).await.unwrap();
    let moving = [1, 2].map(|number| {
        let moving = Moving::begin(&cluster, &keys::record(id(number)));
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
    assert_eq!(eventually("it goes on", async || store.expire_leases(10).await).await, 1);
    assert_eq!(store.sweep(10).await.unwrap(), 1);
    assert_eq!(store.count().await.unwrap(), [0, 0, 1]);
}
