//! A Redis Cluster of a test's own.

use std::fmt::Write;
use std::time::Duration;

use super::super::process;
use super::{Redis, Reply, until};

/// How many slots a cluster has.
const SLOTS: usize = 16_384;

/// How many primaries share them.
const SHARDS: usize = 3;

/// How long a node may be silent before others take it for failed: where a replica is to take its place, and where none
/// can. A busy machine is not to seem to.
const NOTICED: Duration = Duration::from_secs(2);
const NOTICED_ALONE: Duration = Duration::from_secs(5);

/// A cluster of three primaries, each with as many replicas as were asked for.
pub struct Cluster {
    /// The servers of each shard: the first is the primary, until it fails.
    shards: Vec<Vec<Redis>>,
}

impl Cluster {
    /// Starts three primaries without replicas, that append what is written to a file; nothing (and a failure where `CI`
    /// is set) where Redis is not installed.
    #[track_caller]
    pub fn start() -> Option<Self> {
        Self::with(0, &[("appendonly", "yes")])
    }

    /// Starts three primaries, each with this many replicas, all with these settings.
    #[track_caller]
    pub fn with(replicas: usize, settings: &[(&str, &str)]) -> Option<Self> {
        let noticed = if replicas == 0 { NOTICED_ALONE } else { NOTICED };
        let mut shards = Vec::new();
        for _ in 0..SHARDS {
            let shard: Option<Vec<Redis>> = (0..=replicas).map(|_| node(settings, noticed)).collect();
            shards.push(shard?);
        }
        let cluster = Self { shards };
        cluster.join();
        cluster.wait_until_ok();
        Some(cluster)
    }

    /// Makes one cluster of servers that know nothing of each other.
    fn join(&self) {
        let ask = |node: &Redis, command: &[&str]| {
            let said = node.ask(command);
            assert_eq!(said, Reply::Status("OK".into()), "{command:?}");
        };
        for (nth, shard) in self.shards.iter().enumerate() {
            let (first, last) = (nth * SLOTS / SHARDS, (nth + 1) * SLOTS / SHARDS - 1);
            ask(&shard[0], &["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
        }
        // One for each node, the primaries' first: nodes that find one taken twice choose others, and a replica that has
        // not heard of its primary's is denied every vote.
        let primaries = self.shards.iter().map(|shard| &shard[0]);
        for (nth, node) in primaries.chain(self.shards.iter().flat_map(|shard| &shard[1..])).enumerate() {
            ask(node, &["CLUSTER", "SET-CONFIG-EPOCH", &(nth + 1).to_string()]);
        }
        let first = &self.shards[0][0];
        let (ip, port) = (first.address().ip().to_string(), first.address().port().to_string());
        let bus = first.ask(&["CONFIG", "GET", "cluster-port"]).list().remove(1).text();
        for node in self.nodes().skip(1) {
            ask(node, &["CLUSTER", "MEET", &ip, &port, &bus]);
        }
        let all = self.nodes().count().to_string();
        until("all nodes know each other", || {
            self.nodes().all(|node| field(node, "cluster_known_nodes").as_ref() == Some(&all))
        });
        for shard in &self.shards {
            let primary = shard[0].ask(&["CLUSTER", "MYID"]).text();
            shard[1..].iter().for_each(|replica| ask(replica, &["CLUSTER", "REPLICATE", &primary]));
        }
    }

    /// Its URL, with all of its nodes.
    pub fn url(&self) -> String {
        let nodes: Vec<String> = self.nodes().map(|node| node.address().to_string()).collect();
        format!("redis://{}{}?cluster=true", self.shards[0][0].user_info(), nodes.join(","))
    }

    /// All servers, also those that were ended.
    pub fn nodes(&self) -> impl Iterator<Item = &Redis> {
        self.shards.iter().flatten()
    }

    /// The servers of one of the three shards.
    pub fn shard(&self, nth: usize) -> &[Redis] {
        &self.shards[nth]
    }

    /// The shard that has a key.
    #[track_caller]
    pub fn shard_of(&self, key: &[u8]) -> usize {
        let slot = self.shards[0][0].ask(&[&b"CLUSTER"[..], b"KEYSLOT", key]).number();
        usize::try_from(slot).expect("not negative") * SHARDS / SLOTS
    }

    /// The server of a shard that takes writes; nothing while there is none.
    pub fn primary(&self, shard: usize) -> Option<&Redis> {
        self.shards[shard].iter().find(|node| node.is_primary())
    }

    /// Waits until every node that runs finds all slots served, by somebody who runs, with all replicas up to date.
    #[track_caller]
    pub fn wait_until_ok(&self) {
        until("a cluster that is well", || {
            let is_ok = |node: &Redis| field(node, "cluster_state").as_deref() == Some("ok");
            let are_linked = |shard: &[Redis]| {
                let running = shard.iter().filter(|node| node.is_running());
                running.filter(|node| !node.is_primary()).all(Redis::is_linked)
            };
            let running = || self.nodes().filter(|node| node.is_running());
            running().all(is_ok)
                && (0..SHARDS).all(|shard| self.primary(shard).is_some())
                && self.shards.iter().all(|shard| are_linked(shard))
        });
    }

    /// Kills the primary of a shard, and waits until one of its replicas has taken its place.
    #[track_caller]
    pub fn fail_over(&self, shard: usize) {
        let killed = self.primary(shard).expect("a primary");
        killed.kill9();
        // While nobody has noticed yet, the state is still said to be well: but no primary runs.
        self.wait_until_ok();
    }
}

/// A node that belongs to no cluster yet.
#[track_caller]
fn node(settings: &[(&str, &str)], noticed: Duration) -> Option<Redis> {
    let server = Redis::planned(settings, false)?;
    let (ip, port, bus) = (server.address.ip(), server.address.port(), process::free_address().port());
    let mut lines = format!(
        "port {port}\nrepl-diskless-sync-delay 0\ncluster-enabled yes\ncluster-port {bus}\ncluster-announce-ip {ip}\n"
    );
    writeln!(lines, "cluster-node-timeout {}", noticed.as_millis()).expect("a string");
    if let Some(password) = &server.password {
        writeln!(lines, "masterauth {password}").expect("a string");
    }
    server.configure(&lines);
    server.begin();
    Some(server)
}

fn field(node: &Redis, name: &str) -> Option<String> {
    let said = node.try_session().ok()?.ask(&["CLUSTER", "INFO"]).ok()?.text();
    said.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.to_owned()))
}
