//! Against real servers.

mod adopting;
mod cache;
mod faults;
mod identity;
mod junk;
mod moving;
mod quotas;
mod topologies;

use std::sync::Arc;

use bytes::Bytes;
use proptest::test_runner::Config;

use super::*;
use crate::store::Expiry;
use crate::store::contract::{self, Harness, model};
use crate::store::servers;

/// The time that a test has set, as `now`.
const STOPPED: &str = "local now = tonumber(redis.call('GET', 'clock'))\n";

fn settings(server: &servers::Redis) -> Settings {
    settings_of(Topology::Standalone, [server])
}

fn settings_of<'a>(topology: Topology, hosts: impl IntoIterator<Item = &'a servers::Redis>) -> Settings {
    let hosts = hosts.into_iter().map(servers::Redis::address);
    let hosts = hosts.map(|address| (address.ip().to_string(), address.port())).collect();
    Settings { servers: Servers { topology, hosts, user: None, password: None, database: 0, tls: None } }
}

/// Ids of all partitions, each another.
fn id(number: u16) -> RecordId {
    let mut id = [number.wrapping_mul(37) as u8; 32];
    id[30..].copy_from_slice(&number.to_be_bytes());
    RecordId(id)
}

fn attempt(number: u16) -> AttemptToken {
    let mut attempt = [7; 16];
    attempt[..2].copy_from_slice(&number.to_be_bytes());
    AttemptToken(attempt)
}

fn fresh(number: u16) -> NewRecord {
    NewRecord {
        attempt: attempt(number),
        origin: crate::store::OriginId(-7),
        lease: Duration::from_secs(60),
        ttl: Duration::from_secs(60),
        unknown_ttl: Duration::MAX,
        head: Bytes::from_static(b"head"),
    }
}

fn complete() -> Settlement {
    let expiry = crate::store::Expiry::FromClaim(Duration::from_secs(3600));
    Settlement::Complete { answer: Bytes::from_static(b"answer"), expiry }
}

/// What comes of something that is tried until it works, or it has taken too long.
async fn eventually<T, E: fmt::Debug>(what: &str, mut trying: impl AsyncFnMut() -> Result<T, E>) -> T {
    let began = tokio::time::Instant::now();
    loop {
        match trying().await {
            Ok(done) => return done,
            Err(error) if began.elapsed() > Duration::from_secs(20) => panic!("{what}: {error:?}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// An empty store, whose clock stands until it is stepped.
async fn harness(server: &Arc<servers::Redis>) -> Harness {
    server.run("FLUSHALL").unwrap();
    server.run("SET clock 1700000000000").unwrap();
    let store = Redis::with_clock(&settings(server), STOPPED).await.unwrap();
    let clock = Arc::clone(server);
    let step = move |time: Duration| {
        let response = clock.run(&format!("INCRBY clock {}", time.as_millis())).unwrap();
        assert!(response.starts_with(':'), "{response}");
    };
    Harness::stepped(store, step).shared().without_deliveries()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_keeps_the_contract() {
    let Some(server) = servers::Redis::start().map(Arc::new) else { return };
    contract::run(async || harness(&server).await).await;
}

#[test]
fn it_behaves_like_a_plain_map() {
    let Some(server) = servers::Redis::start().map(Arc::new) else { return };
    model::check(Config::default().cases / 4, async || {
        let again = Arc::clone(&server);
        let reopen: model::Reopen = Box::new(move || {
            let server = Arc::clone(&again);
            Box::pin(async move {
                Arc::new(Redis::with_clock(&settings(&server), STOPPED).await.unwrap()) as Arc<dyn Store>
            })
        });
        model::Subject { harness: harness(&server).await, reopen: Some(reopen) }
    });
}

#[tokio::test]
async fn time_is_the_servers() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let Claim::Inserted(at) = store.claim(id(9), fresh(9)).await.unwrap() else { panic!("nothing stands") };
    let here = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    assert!(at.since(Timestamp(0)).abs_diff(here) < Duration::from_secs(5));
    let listed = store.get(id(9)).await.unwrap().unwrap();
    assert_eq!(listed.record.until, at.plus(Duration::from_secs(60)));
}
