//! The cache that gates share, where it refuses some of what is asked.

use super::*;
use crate::store::cached::{CacheOperation, RemoteCache};

fn value(byte: u8) -> Bytes {
    Bytes::from(vec![byte; 8])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_value_does_not_affect_the_rest_of_its_batch() {
    let Some(server) = servers::Redis::start() else { return };
    server.run("ACL SETUSER gate on >secret ~oncegate-cache:* resetchannels +@all");
    let mut settings = settings(&server);
    (settings.servers.user, settings.servers.password) = (Some("gate".to_owned()), Some("secret".to_owned()));
    let cache = RedisCache::connect_lazily(&settings.servers, [7; 16]).unwrap();
    let life = Duration::from_secs(60);
    let keep = |number| CacheOperation::Put(id(number), value(1), life);
    eventually("it is connected", async || cache.execute(&[keep(1), keep(2), keep(3)]).await).await;
    let key = [b"oncegate-cache:0707070707070707:", &id(3).0[..]].concat();
    server.ask(&[&b"DEL"[..], &key]);
    server.ask(&[&b"HSET"[..], &key, b"a", b"b"]);
    let ask = [1, 2, 3, 4].map(|number| CacheOperation::Get(id(number)));
    let [one, two, three, four] = ask;
    // It may not tell others.
    let batch = [one.clone(), CacheOperation::Invalidate(id(1)), two.clone(), one.clone(), three, four];
    let response = cache.execute(&batch).await.unwrap();
    assert_eq!(response, [Some(value(1)), Some(value(1)), None, Some(Bytes::new()), None]);
    server.run("CONFIG SET maxmemory 1").unwrap();
    let response = cache.execute(&[keep(1), two.clone(), one.clone()]).await.unwrap();
    assert_eq!(response, [Some(value(1)), None]);
    server.run("CONFIG SET maxmemory 0").unwrap();
    server.run("ACL SETUSER gate -getrange").unwrap();
    assert_eq!(cache.execute(&[keep(1), one.clone()]).await.unwrap(), [None]);
    server.run("ACL SETUSER gate +getrange").unwrap();
    assert_eq!(cache.execute(&[one.clone(), two]).await.unwrap(), [Some(value(1)), Some(value(1))]);
    // Another program's value takes no more memory than one of a gate's.
    let key = [b"oncegate-cache:0707070707070707:", &id(1).0[..]].concat();
    server.ask(&[&b"SET"[..], &key, &vec![b'x'; 2 << 20]]);
    let found = cache.execute(&[one]).await.unwrap();
    assert_eq!(found[0].as_ref().map(Bytes::len), Some(512 << 10));
    server.kill9();
    assert!(cache.execute(&[keep(1)]).await.is_err(), "nothing is answered at all");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_start_of_the_removal_feed_is_published() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let cache = RedisCache::connect_lazily(&settings(&server).servers, [7; 16]).unwrap();
    let mut both = [store.removals().unwrap(), cache.removals()];
    server.kill9();
    // The end of the feed.
    both.iter_mut().for_each(|removals| while removals.try_recv().is_ok() {});
    server.begin();
    for removals in &mut both {
        let again = async { while removals.recv().await != Ok(Removal::Subscribed) {} };
        tokio::time::timeout(Duration::from_secs(20), again).await.expect("it is said");
    }
}
