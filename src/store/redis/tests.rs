//! Against a real server.

use std::sync::Arc;

use proptest::test_runner::Config;

use super::*;
use crate::store::contract::{self, Harness, model};
use crate::store::servers;

/// The time that a test has set, as `now`.
const STOPPED: &str = "local now = tonumber(redis.call('GET', 'clock'))\n";

fn settings(server: &servers::Redis) -> Settings {
    let address = server.address();
    let hosts = vec![(address.ip().to_string(), address.port())];
    let (user, password, tls) = (None, None, None);
    Settings { servers: Servers { topology: Topology::Standalone, hosts, user, password, database: 0, tls } }
}

/// An empty store, whose clock stands until it is stepped.
async fn harness(server: &Arc<servers::Redis>) -> Harness {
    server.run("FLUSHALL").unwrap();
    server.run("SET clock 1700000000000").unwrap();
    let store = Redis::on_clock(&settings(server), STOPPED).await.unwrap();
    let clock = Arc::clone(server);
    let step = move |time: Duration| {
        let said = clock.run(&format!("INCRBY clock {}", time.as_millis())).unwrap();
        assert!(said.starts_with(':'), "{said}");
    };
    Harness::stepped(store, step).shared()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_keeps_the_contract() {
    let Some(server) = servers::Redis::start().map(Arc::new) else { return };
    contract::run(async || harness(&server).await).await;
}

#[test]
fn it_says_what_a_plain_map_says() {
    let Some(server) = servers::Redis::start().map(Arc::new) else { return };
    model::check(Config::default().cases / 4, async || {
        let again = Arc::clone(&server);
        let reopen: model::Reopen = Box::new(move || {
            let server = Arc::clone(&again);
            Box::pin(
                async move { Arc::new(Redis::on_clock(&settings(&server), STOPPED).await.unwrap()) as Arc<dyn Store> },
            )
        });
        model::Subject { harness: harness(&server).await, reopen: Some(reopen) }
    });
}

#[tokio::test]
async fn time_is_the_servers() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let fresh = Fresh {
        attempt: Attempt([1; 16]),
        origin: crate::store::OriginId(-7),
        lease: Duration::from_secs(30),
        ttl: Duration::from_secs(60),
        unknown_ttl: Duration::MAX,
        head: Bytes::from_static(b"head"),
    };
    let Claim::Inserted(at) = store.claim(RecordId([9; 32]), fresh).await.unwrap() else { panic!("nothing stands") };
    let here = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    assert!(at.since(Timestamp(0)).abs_diff(here) < Duration::from_secs(5));
    let listed = store.get(RecordId([9; 32])).await.unwrap().unwrap();
    assert_eq!(listed.record.until, at.plus(Duration::from_secs(30)));
}
