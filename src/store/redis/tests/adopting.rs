//! The adoption lock.

use tokio::time::{Instant, sleep, timeout};

use super::adopt::{Lock, adopt_alone};
use super::*;

fn rule() -> NamespaceRuleSet {
    NamespaceRuleSet {
        service: "pay".into(),
        namespace: "default".into(),
        digest: [1; 32],
        others: Vec::new(),
        description: None,
    }
}

async fn adopt(store: &Redis) -> Result<Vec<IdentityChange>, Error> {
    store.adopt(Vec::new(), vec![rule()], false).await
}

fn on_file(server: &servers::Redis) -> i64 {
    server.ask(&["HLEN", keys::IDENTITIES]).number()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_acknowledgement_of_the_lock_is_recovered() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let token = *store.token.lock().await;
    server.ask(&[&b"SET"[..], keys::ADOPTING.as_bytes(), &token, b"PX", b"600000"]);
    timeout(Duration::from_secs(5), adopt(&store)).await.expect("it is its own").unwrap();
    assert_eq!(server.ask(&["EXISTS", keys::ADOPTING]).number(), 0, "and it is let go");
    assert_eq!(on_file(&server), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_whose_holder_died_expires() {
    let Some(server) = servers::Redis::start() else { return };
    let (store, dead) =
        (Redis::open(&settings(&server)).await.unwrap(), Redis::open(&settings(&server)).await.unwrap());
    let hold = Duration::from_millis(500);
    let began = Instant::now();
    Lock { store: &dead, token: [1; 16], hold }.take().await.unwrap();
    adopt(&store).await.unwrap();
    assert!(began.elapsed() > hold / 2 && began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    // And the usual one holds for half a minute.
    Lock { store: &dead, token: [1; 16], hold: super::adopt::LOCK_TTL }.take().await.unwrap();
    let left = server.ask(&["PTTL", keys::ADOPTING]).number();
    assert!((1..=30_000).contains(&left), "{left}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lock_is_extended_while_in_use_and_then_released() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let hold = Duration::from_secs(4);
    let lock = Lock { store: &store, token: [1; 16], hold };
    lock.take().await.unwrap();
    let began = Instant::now();
    let doing = async {
        while began.elapsed() < hold * 3 / 2 {
            assert_eq!(server.ask(&["EXISTS", keys::ADOPTING]).number(), 1);
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    };
    lock.keep(doing).await.unwrap();
    let other = Lock { store: &store, token: [2; 16], hold: Duration::from_secs(60) };
    other.take().await.unwrap();
    let given_up = timeout(Duration::from_secs(5), lock.keep(std::future::pending::<Result<(), Error>>())).await;
    assert_eq!(given_up.expect("it is given up").unwrap_err().cause().kind, ErrorKind::Timeout);
    assert!(adopt_alone(&lock, &[], &[rule()], false).await.is_err());
    assert_eq!(on_file(&server), 0, "nothing is written without the lock");
}
