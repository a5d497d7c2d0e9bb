//! Servers that hold another store than the one that a gate has used, or none.

use super::*;

fn id_at(server: &servers::Redis) -> Option<Vec<u8>> {
    match server.ask(&["GET", keys::STORE]) {
        servers::Reply::Nothing => None,
        id => Some(id.bytes()),
    }
}

/// Two servers under one URL, of which the second does not run, and a store that uses the first.
async fn moved(server: &servers::Redis, other: &servers::Redis) -> Redis {
    other.kill9();
    let store = Redis::open(&settings_of(Topology::Standalone, [server, other])).await.unwrap();
    store.claim(id(1), fresh(1)).await.unwrap();
    server.kill9();
    other.begin();
    store
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_with_another_store_is_refused() {
    let (Some(server), Some(other)) = (servers::Redis::start(), servers::Redis::start()) else { return };
    Redis::open(&settings(&other)).await.unwrap();
    let store = moved(&server, &other).await;
    let refused = eventually("it is recognised", async || {
        let failed = store.claim(id(1), fresh(2)).await.err().ok_or("a key is new on another store")?;
        let said = failed.to_string();
        if said.contains("holds another store") { Ok(failed) } else { Err("it is not known yet") }
    })
    .await;
    assert!(matches!(&refused, Error::Determinate(cause) if cause.kind == ErrorKind::Unavailable), "{refused:?}");
    other.kill9();
    server.begin();
    let claimed = eventually("the first is used again", async || store.claim(id(1), fresh(2)).await).await;
    assert!(matches!(claimed, Claim::Exists { .. }), "{claimed:?}");
    // A gate that starts there uses it.
    other.begin();
    Redis::open(&settings(&other)).await.unwrap();
}

#[tokio::test]
async fn a_look_leaves_no_id() {
    let Some(server) = servers::Redis::start() else { return };
    Redis::look(&settings(&server)).await.unwrap();
    assert_eq!(id_at(&server), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_server_becomes_the_store() {
    let (Some(server), Some(other)) = (servers::Redis::start(), servers::Redis::start()) else { return };
    let store = moved(&server, &other).await;
    let claimed = eventually("the empty one is used", async || store.claim(id(1), fresh(2)).await).await;
    assert!(matches!(claimed, Claim::Inserted(_)), "{claimed:?}");
    let id = id_at(&other);
    other.kill9();
    server.begin();
    assert!(id.is_some() && id == id_at(&server), "it is one store to the gates");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_was_emptied_keeps_its_id_among_its_gates() {
    let Some(server) = servers::Redis::start() else { return };
    let gates = [Redis::open(&settings(&server)).await.unwrap(), Redis::open(&settings(&server)).await.unwrap()];
    let before = id_at(&server);
    server.run("FLUSHALL").unwrap();
    let is_back = async || if id_at(&server) == before { Ok(()) } else { Err("the store has no id") };
    eventually("the id is written again, also without a new connection", is_back).await;
    server.run("FLUSHALL").unwrap();
    server.kill9();
    server.begin();
    for (number, gate) in (1..).zip(&gates) {
        eventually("it is used again", async || gate.claim(id(number), fresh(number)).await).await;
    }
    assert!(before.is_some() && before == id_at(&server));
    // What another program has written there is no id, and left alone.
    server.run(&format!("DEL {}", keys::STORE)).unwrap();
    server.run(&format!("LPUSH {} junk", keys::STORE)).unwrap();
    server.kill9();
    server.begin();
    for (number, gate) in (3..).zip(&gates) {
        eventually("it is used again", async || gate.claim(id(number), fresh(number)).await).await;
    }
}
