//! Clusters, Sentinels, several hosts, encryption, users with few rights.

use std::collections::HashMap;

use super::*;
use crate::store::servers::{Cluster, Sentinels};

/// The time that a test has set for each node, as `now`.
const STOPPED_APART: &str =
    "local now = tonumber(redis.call('GET', string.match(KEYS[1], '^oncegate{[^}]*}') .. ':clock'))\n";

/// The clocks of a cluster, which a test sets: one for each hash tag.
struct Clocks {
    cluster: Arc<Cluster>,
    of_shards: HashMap<usize, Vec<String>>,
}

impl Clocks {
    fn of(cluster: &Arc<Cluster>) -> Self {
        let tags = Partition::all().map(|partition| format!("{:02}", partition.0));
        let mut of_shards: HashMap<usize, Vec<String>> = HashMap::new();
        for tag in tags.chain(["origins", "identities", "audit"].map(str::to_owned)) {
            let clock = format!("oncegate{{{tag}}}:clock");
            of_shards.entry(cluster.shard_of(clock.as_bytes())).or_default().push(clock);
        }
        Self { cluster: Arc::clone(cluster), of_shards }
    }

    fn step(&self, millis: u128) {
        for (shard, clocks) in &self.of_shards {
            let step = |clock: &String| vec!["INCRBY".to_owned(), clock.clone(), millis.to_string()];
            let steps: Vec<_> = clocks.iter().map(step).collect();
            self.cluster.primary(*shard).unwrap().session().ask_all(&steps).unwrap();
        }
    }
}

async fn cluster_harness(cluster: &Arc<Cluster>) -> Harness {
    for shard in 0..3 {
        cluster.primary(shard).unwrap().run("FLUSHALL").unwrap();
    }
    let clocks = Clocks::of(cluster);
    clocks.step(1_700_000_000_000);
    let store = Redis::with_clock(&settings_of(Topology::Cluster, cluster.nodes()), STOPPED_APART).await.unwrap();
    Harness::stepped(store, move |time| clocks.step(time.as_millis())).shared().without_deliveries()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_keeps_the_contract() {
    let Some(cluster) = Cluster::start().map(Arc::new) else { return };
    contract::run(async || cluster_harness(&cluster).await).await;
}

#[test]
fn a_cluster_behaves_like_a_plain_map() {
    let Some(cluster) = Cluster::start().map(Arc::new) else { return };
    model::check(Config::default().cases / 16, async || {
        let again = Arc::clone(&cluster);
        let reopen: model::Reopen = Box::new(move || {
            let settings = settings_of(Topology::Cluster, again.nodes());
            Box::pin(
                async move { Arc::new(Redis::with_clock(&settings, STOPPED_APART).await.unwrap()) as Arc<dyn Store> },
            )
        });
        model::Subject { harness: cluster_harness(&cluster).await, reopen: Some(reopen) }
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_fails_over_is_followed_and_the_others_go_on() {
    let Some(cluster) = Cluster::with(1, &[("appendonly", "yes")]) else { return };
    // One host is enough to find the others.
    let store = Redis::open(&settings_of(Topology::Cluster, cluster.nodes().take(1))).await.unwrap();
    assert_eq!((store.description().primaries.len(), store.description().replicas()), (3, 3));
    for number in 0..64 {
        store.claim(id(number), fresh(number)).await.unwrap();
    }
    let shard = cluster.shard_of(&keys::record(id(1)));
    let elsewhere: Vec<u16> = (0..64).filter(|number| cluster.shard_of(&keys::record(id(*number))) != shard).collect();
    cluster.primary(shard).unwrap().kill9();
    eventually("its loss is noticed", async || match store.claim(id(1), fresh(1)).await {
        Err(Error::Determinate(_)) => Ok(()),
        other => Err(other),
    })
    .await;
    for number in elsewhere.iter().take(8) {
        let settled = store.settle(id(*number), attempt(*number), complete()).await;
        assert!(matches!(settled, Ok(Settled::Done { .. })), "others are not disturbed: {settled:?}");
    }
    eventually("it is followed", async || store.claim(id(1), fresh(1)).await).await;
    eventually("all works", async || store.ping().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_is_followed_through_the_sentinels() {
    let Some(all) = Sentinels::start() else { return };
    let topology = Topology::Sentinel { primary: "mymaster".to_owned(), is_guarded: false };
    let name = all.sentinels()[0].ask(&["SENTINEL", "MASTERS"]).list().remove(0).list().remove(1).text();
    let topology = match topology {
        Topology::Sentinel { is_guarded, .. } => Topology::Sentinel { primary: name, is_guarded },
        other => other,
    };
    let store = Redis::open(&settings_of(topology, all.sentinels())).await.unwrap();
    assert_eq!(store.description().replicas(), 1);
    store.claim(id(1), fresh(1)).await.unwrap();
    all.wait_until_copied();
    let killed = all.kill_primary();
    all.wait_for_failover(killed);
    let settled = eventually("the other is used", async || store.settle(id(1), attempt(1), complete()).await).await;
    assert!(matches!(settled, Settled::Done { .. }), "{settled:?}");
    let unknown = Topology::Sentinel { primary: "nobody".to_owned(), is_guarded: false };
    let refused = Redis::open(&settings_of(unknown, all.sentinels())).await.unwrap_err();
    assert!(matches!(refused, OpenError::Unreachable(_)), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_several_hosts_the_one_that_takes_writes_is_used() {
    let (Some(replica), Some(primary)) = (servers::Redis::start(), servers::Redis::start()) else { return };
    let address = primary.address();
    replica.run(&format!("REPLICAOF {} {}", address.ip(), address.port())).unwrap();
    let store = Redis::open(&settings_of(Topology::Standalone, [&replica, &primary])).await.unwrap();
    assert!(matches!(store.claim(id(1), fresh(1)).await, Ok(Claim::Inserted(_))));
    primary.kill9();
    replica.run("REPLICAOF NO ONE").unwrap();
    eventually("the other is used", async || store.claim(id(2), fresh(2)).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_the_sentinels_no_longer_name_is_left() {
    let Some(all) = Sentinels::start() else { return };
    let name = all.sentinels()[0].ask(&["SENTINEL", "MASTERS"]).list().remove(0).list().remove(1).text();
    let topology = Topology::Sentinel { primary: name.clone(), is_guarded: false };
    let store = Redis::open(&settings_of(topology, all.sentinels())).await.unwrap();
    store.claim(id(1), fresh(1)).await.unwrap();
    all.wait_until_copied();
    let (old, new) = (all.primary(), all.replica());
    new.run("REPLICAOF NO ONE").unwrap();
    let (ip, port) = (new.address().ip().to_string(), new.address().port().to_string());
    for sentinel in all.sentinels() {
        sentinel.ask(&["SENTINEL", "REMOVE", &name]);
        sentinel.ask(&["SENTINEL", "MONITOR", &name, &ip, &port, "2"]);
    }
    assert_eq!(old.ask(&["ROLE"]).list().remove(0).text(), "master", "it does not know");
    eventually("the other is used", async || {
        store.claim(id(2), fresh(2)).await.map_err(|error| error.to_string())?;
        let found = new.ask(&[&b"EXISTS"[..], &keys::record(id(2))]).number();
        if found == 1 { Ok(()) } else { Err("the old one has it".to_owned()) }
    })
    .await;
    assert!(matches!(store.settle(id(1), attempt(1), complete()).await, Ok(Settled::Done { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_primaries_neither_is_taken() {
    let (Some(one), Some(other)) = (servers::Redis::start(), servers::Redis::start()) else { return };
    let both = settings_of(Topology::Standalone, [&one, &other]);
    let refused = Redis::open(&both).await.unwrap_err();
    assert!(matches!(&refused, OpenError::Unfit(message) if message.contains("both take writes")), "{refused}");
    Redis::open(&settings_of(Topology::Standalone, [&one, &one])).await.expect("it is one server");
    other.kill9();
    let store = Redis::open(&both).await.unwrap();
    other.begin();
    one.kill9();
    // Where the other was not seen at the start, it is used once it is alone.
    eventually("the other is used", async || store.claim(id(1), fresh(1)).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_forgot_its_cluster_is_not_believed() {
    let settings = [("appendonly", "no"), ("cluster-require-full-coverage", "no")];
    let Some(cluster) = Cluster::with(0, &settings) else { return };
    let store = Redis::open(&settings_of(Topology::Cluster, cluster.nodes())).await.unwrap();
    let node = cluster.primary(0).unwrap();
    let (there, elsewhere): (Vec<u16>, Vec<u16>) =
        (0..64).partition(|number| cluster.shard_of(&keys::record(id(*number))) == 0);
    node.run("FLUSHALL").unwrap();
    assert_eq!(node.ask(&["CLUSTER", "RESET", "HARD"]), servers::Reply::Status("OK".into()));
    for number in &elsewhere {
        // It says that it has nothing, and is asked who has.
        assert!(store.claim(id(there[0]), fresh(500)).await.is_err());
        let claimed = store.claim(id(*number), fresh(*number)).await;
        assert!(matches!(claimed, Ok(Claim::Inserted(_))), "{claimed:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Connections to a server, and how many of them would notice that it has vanished.
#[cfg(target_os = "linux")]
fn guarded(server: &servers::Redis) -> (usize, usize) {
    let port = format!(":{:04X}", server.address().port());
    let lines = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let fields = lines.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let ours: Vec<_> = fields.filter(|fields| fields[2].ends_with(&port) && fields[3] == "01").collect();
    // Timer 2 is that of keepalives (proc_net_tcp in the kernel's documentation).
    (ours.len(), ours.iter().filter(|fields| fields[5].starts_with("02")).count())
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keepalive_notices_a_vanished_server_on_an_idle_subscription() {
    let Some(server) = servers::Redis::start() else { return };
    let manager = ConnectionManager::open(&settings(&server).servers, COMMAND_TIMEOUT).await.unwrap();
    let _listening = manager.subscribe(CHANNEL).await.unwrap();
    eventually("both are guarded", async || match guarded(&server) {
        (2, 2) => Ok(()),
        other => Err(other),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_wrong_kind_of_server_is_refused_with_its_reason() {
    let (Some(server), Some(cluster)) = (servers::Redis::start(), Cluster::start()) else { return };
    let refused = Redis::open(&settings_of(Topology::Cluster, [&server])).await.unwrap_err();
    assert!(matches!(refused, OpenError::Unfit(_)), "{refused}");
    let refused = Redis::open(&settings_of(Topology::Standalone, cluster.nodes())).await.unwrap_err();
    assert!(matches!(refused, OpenError::Unfit(_)), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_encrypted_and_both_ends_known() {
    let Some(server) = servers::Redis::encrypting(&[]) else { return };
    let file = |name: &str| std::fs::read(server.file(name)).unwrap();
    let with = |roots: Option<&str>, identity: Option<&str>| {
        let mut settings = settings(&server);
        let identity = identity.map(|name| (file(&format!("{name}.pem")), file(&format!("{name}.key"))));
        settings.servers.tls = Some(Certificates { roots: roots.map(file), identity });
        settings
    };
    let store = Redis::open(&with(Some("ca.pem"), Some("client"))).await.unwrap();
    assert!(matches!(store.claim(id(1), fresh(1)).await, Ok(Claim::Inserted(_))));
    for wrong in [with(Some("other.pem"), Some("client")), with(None, Some("client")), with(Some("ca.pem"), None)] {
        assert!(Redis::open(&wrong).await.is_err());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_login_is_reported() {
    let Some(server) = servers::Redis::with(&[("requirepass", "opensesame")]) else { return };
    let with = |password: Option<&str>| {
        let mut settings = settings(&server);
        settings.servers.password = password.map(str::to_owned);
        settings
    };
    for wrong in [None, Some("wrong")] {
        let refused = Redis::open(&with(wrong)).await.unwrap_err();
        assert!(matches!(refused, OpenError::Refused(_)), "{refused}");
        assert!(!refused.to_string().contains("wrong"));
    }
    Redis::open(&with(Some("opensesame"))).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_rights_are_named() {
    let (Some(server), Some(cluster)) = (servers::Redis::start(), Cluster::start()) else { return };
    let open = async |rights: &str| {
        let all = cluster.nodes().chain([&server]);
        all.for_each(|node| drop(node.run(&format!("ACL SETUSER gate reset on >secret {rights}")).unwrap()));
        let mut opened = Vec::new();
        for mut settings in [settings(&server), settings_of(Topology::Cluster, cluster.nodes())] {
            (settings.servers.user, settings.servers.password) = (Some("gate".to_owned()), Some("secret".to_owned()));
            opened.push(Redis::open(&settings).await.map(drop).map_err(|error| error.to_string()));
        }
        opened
    };
    for (rights, denied) in [
        ("~oncegate* +@all", "PUBLISH, SUBSCRIBE"),
        ("~oncegate* &oncegate* +@all -zadd -hvals", "HVALS, ZADD"),
        ("~oncegate* &oncegate* +@all -evalsha", "EVALSHA"),
        ("%R~oncegate* &oncegate* +@all", "SET"),
    ] {
        for refused in open(rights).await {
            let message = refused.unwrap_err();
            assert!(
                message.contains(denied) && message.contains("ACL SETUSER gate ~oncegate* &oncegate* +"),
                "{message}"
            );
        }
    }
    for opened in open("~oncegate* &oncegate* +@all").await {
        opened.unwrap();
    }
    assert_eq!(server.names(), [keys::STORE.as_bytes()], "nothing is left of it but the id of the store");
}

/// What is taken away after the start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_who_may_not_claim_or_settle_any_more_is_not_ready() {
    let (Some(server), Some(cluster)) = (servers::Redis::start(), Cluster::start()) else { return };
    let nodes: Vec<&servers::Redis> = cluster.nodes().chain([&server]).collect();
    let set = |rights: &str| {
        nodes.iter().for_each(|node| drop(node.run(&format!("ACL SETUSER gate {rights}")).unwrap()));
    };
    set("reset on >secret ~oncegate* &oncegate* +@all");
    let mut stores = Vec::new();
    for mut settings in [settings(&server), settings_of(Topology::Cluster, cluster.nodes())] {
        (settings.servers.user, settings.servers.password) = (Some("gate".to_owned()), Some("secret".to_owned()));
        stores.push(Redis::open(&settings).await.unwrap());
    }
    for (lose, regain) in [
        ("-evalsha", "+evalsha"),
        ("-@write", "+@write"),
        ("-zadd", "+zadd"),
        ("-zrem", "+zrem"),
        ("-del", "+del"),
        ("-getrange", "+getrange"),
        ("resetkeys %R~oncegate*", "resetkeys ~oncegate*"),
    ] {
        for store in &stores {
            store.ping().await.unwrap();
        }
        set(lose);
        for store in &stores {
            assert!(store.ping().await.is_err(), "ready with {lose}");
        }
        set(regain);
    }
    for store in &stores {
        store.ping().await.unwrap();
        assert_eq!(store.count().await.unwrap(), [0, 0, 0]);
    }
    for node in cluster.nodes().chain([&server]) {
        let others: Vec<_> = node.names().into_iter().filter(|name| name != keys::STORE.as_bytes()).collect();
        assert_eq!(others, Vec::<Vec<u8>>::new(), "nothing is left of it but the id of the store");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_the_user_may_not_read_are_reported_as_unknown() {
    let Some(server) = servers::Redis::start() else { return };
    let rights = "~oncegate* &oncegate* +@all -config -info";
    server.run(&format!("ACL SETUSER gate on >secret {rights}")).unwrap();
    let mut settings = settings(&server);
    (settings.servers.user, settings.servers.password) = (Some("gate".to_owned()), Some("secret".to_owned()));
    let store = Redis::open(&settings).await.unwrap();
    assert!(matches!(store.claim(id(1), fresh(1)).await, Ok(Claim::Inserted(_))));
    let risks = store.description().risks();
    assert!(risks.iter().any(|risk| risk.contains("may not see maxmemory-policy")), "{risks:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_risks_of_a_server_are_read_from_its_settings() {
    let of = async |lines: &[(&str, &str)]| {
        let server = servers::Redis::with(lines)?;
        Some(Redis::open(&settings(&server)).await.unwrap().description().clone())
    };
    let Some(safe) = of(&[("appendonly", "yes"), ("appendfsync", "always")]).await else { return };
    assert_eq!((safe.topology, safe.versions.len(), safe.primaries[0].appends), ("standalone", 1, Some(true)));
    assert_eq!(safe.risks().len(), 1, "only that it is alone: {:?}", safe.risks());
    let bad = [("appendonly", "no"), ("save", ""), ("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")];
    let risks = of(&bad).await.unwrap().risks();
    assert!(risks[0].contains("WILL RUN TWICE") && risks[1].contains("nothing is written to a disk"), "{risks:?}");
}
