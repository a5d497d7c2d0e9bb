//! An upstream's transaction and the gate's statements meet at the same records: neither harms the other, and neither
//! holds up what is not its business.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ::tokio::time::{sleep, timeout};
use bytes::Bytes;
use oncegate::idempotency::record::{AttemptToken, RecordId, State};
use oncegate::store::postgres::Postgres;
use oncegate::store::{Claim, Error, Expiry, LeaseRenewal, NewRecord, OriginId, Settled, Settlement, Store};

use super::{migrated, settings, tokio};
use crate::servers::{Database, Session};

/// Longer than the gate waits for a lock.
const SOON: Duration = Duration::from_millis(1500);

/// What nobody holds up takes less, on a machine however busy. What is held is so for as long as it takes.
const LATE: Duration = Duration::from_secs(4);
const PAST: Duration = Duration::from_millis(50);

fn id(number: u8) -> RecordId {
    RecordId([number; 32])
}

fn attempt(number: u8) -> AttemptToken {
    AttemptToken([number; 16])
}

/// The calls of the upstream that the attempt of this number went to.
fn assert_current(number: u8) -> String {
    format!("SELECT oncegate.assert_current('{}')", attempt(number).expose())
}

fn complete(number: u8) -> String {
    format!("SELECT oncegate.complete('{}', 201, NULL, '{number}')", attempt(number).expose())
}

fn fresh(number: u8, lease: Duration) -> NewRecord {
    let ttl = Duration::from_secs(3600);
    NewRecord {
        attempt: attempt(number),
        origin: OriginId(1),
        lease,
        ttl,
        unknown_ttl: ttl,
        head: Bytes::from_static(b"head"),
    }
}

async fn open(database: &Database) -> Postgres {
    Postgres::open(&settings(&database.url)).await.expect("it opens")
}

/// Claims records whose leases are past soon.
async fn claim(store: &Postgres, numbers: impl IntoIterator<Item = u8>) {
    for number in numbers {
        assert!(matches!(store.claim(id(number), fresh(number, PAST)).await, Ok(Claim::Inserted(_))));
    }
    sleep(2 * PAST).await;
}

/// A transaction of an upstream that holds these records.
fn holding(database: &Database, numbers: &[u8]) -> Session {
    let session = database.session();
    session.run("BEGIN");
    numbers.iter().for_each(|number| drop(session.run(&assert_current(*number))));
    session
}

#[track_caller]
fn held(number: u8) -> LeaseRenewal {
    LeaseRenewal { id: id(number), attempt: attempt(number), lease: Duration::from_secs(60) }
}

#[test]
fn leases_of_others_are_renewed_and_end() {
    let Some(database) = migrated() else { return };
    tokio().block_on(async {
        let store = open(&database).await;
        claim(&store, 1..=4).await;
        let upstream = holding(&database, &[1]);
        timeout(LATE, store.renew(vec![held(1), held(2)])).await.expect("it waits for nobody").unwrap();
        let expired = timeout(LATE, store.expire_leases(100)).await.expect("it waits for nobody").unwrap();
        assert_eq!(expired.len(), 2, "the third and the fourth");
        let listed = store.get(id(2)).await.unwrap().unwrap();
        assert!(listed.record.until.since(listed.now) > Duration::from_secs(50));
        // Its lease is past, and it is at work.
        let Claim::Exists { record, now } = store.claim(id(1), fresh(9, PAST)).await.unwrap() else {
            panic!("claimed")
        };
        assert_eq!((record.state, record.attempt), (State::InFlight, attempt(1)));
        assert!(record.until > now);
        upstream.run(&format!("{}; COMMIT", complete(1)));
        let Claim::Exists { record, .. } = store.claim(id(1), fresh(9, PAST)).await.unwrap() else { panic!("claimed") };
        assert_eq!((record.state, record.attempt), (State::Completed, attempt(1)));
    });
}

#[test]
fn a_lease_is_lost_where_the_transaction_ends_without_a_word() {
    let Some(database) = migrated() else { return };
    tokio().block_on(async {
        let store = open(&database).await;
        claim(&store, [1]).await;
        let upstream = holding(&database, &[1]);
        assert_eq!(store.expire_leases(100).await.unwrap(), []);
        // Even without a ROLLBACK: its process has died.
        drop(upstream);
        let began = Instant::now();
        while store.expire_leases(100).await.unwrap().is_empty() {
            assert!(began.elapsed() < Duration::from_secs(10), "still held");
            sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(store.get(id(1)).await.unwrap().unwrap().record.state, State::Unknown);
    });
}

#[test]
fn an_ending_waits_for_the_transaction_and_holds_up_no_other() {
    for end in [Settlement::Release, Settlement::Hold { cause: Bytes::from_static(b"cause") }, completed("by the gate")]
    {
        let Some(database) = migrated() else { return };
        tokio().block_on(async {
            let store = open(&database).await;
            claim(&store, 1..=9).await;
            let upstream = holding(&database, &[1]);
            upstream.run(&complete(1));
            let mut first = std::pin::pin!(store.settle(id(1), attempt(1), end));
            // All at once: some of them get into one batch with it.
            let others = async {
                let others = (2..=9).map(|number| store.settle(id(number), attempt(number), completed("done")));
                for settled in futures_util::future::join_all(others).await {
                    assert!(matches!(settled, Ok(Settled::Done { .. })), "{settled:?}");
                }
            };
            ::tokio::select! {
                biased;
                settled = &mut first => panic!("settled what is held: {settled:?}"),
                others = timeout(LATE, others) => others.expect("others wait"),
            }
            assert!(timeout(PAST, &mut first).await.is_err(), "settled what is held");
            upstream.run("COMMIT");
            // What the upstream says is what stands.
            let settled = timeout(LATE, first).await.expect("it is free").unwrap();
            let Settled::NotCurrent { record: Some(record) } = settled else { panic!("{settled:?}") };
            assert_eq!((record.state, record.attempt), (State::Completed, attempt(1)));
        });
    }
}

#[test]
fn an_ending_has_its_way_where_the_transaction_is_rolled_back() {
    let Some(database) = migrated() else { return };
    tokio().block_on(async {
        let store = open(&database).await;
        claim(&store, [1]).await;
        let upstream = holding(&database, &[1]);
        upstream.run(&complete(1));
        let mut first = std::pin::pin!(store.settle(id(1), attempt(1), Settlement::Release));
        assert!(timeout(SOON, &mut first).await.is_err(), "settled what is held");
        upstream.run("ROLLBACK");
        assert!(matches!(timeout(LATE, first).await.expect("it is free"), Ok(Settled::Done { .. })));
        assert!(store.get(id(1)).await.unwrap().is_none());
        // And now it is too late.
        assert!(upstream.try_run(&complete(1)).unwrap_err().starts_with("OG001"));
    });
}

/// An unknown record that its upstream works on is not claimed again, nor removed, by whoever asks for it.
#[test]
fn nobody_takes_over_what_is_held() {
    let Some(database) = migrated() else { return };
    tokio().block_on(async {
        let store = open(&database).await;
        claim(&store, [1]).await;
        assert_eq!(store.expire_leases(100).await.unwrap().len(), 1);
        let seen = store.get(id(1)).await.unwrap().unwrap().record.version();
        let upstream = holding(&database, &[1]);
        let superseded = timeout(LATE, store.supersede(id(1), seen, fresh(2, PAST))).await.expect("it gives up");
        assert!(matches!(superseded, Err(Error::Determinate(_))), "{superseded:?}");
        let removed = timeout(2 * LATE, store.remove(id(1), attempt(1))).await.expect("it gives up");
        assert!(matches!(removed, Err(Error::Determinate(_))), "{removed:?}");
        upstream.run(&format!("{}; COMMIT", complete(1)));
        assert!(!store.supersede(id(1), seen, fresh(2, PAST)).await.unwrap());
        assert_eq!(store.get(id(1)).await.unwrap().unwrap().record.attempt, attempt(1));
    });
}

#[test]
fn who_comes_late_finds_the_attempt_superseded() {
    let Some(database) = migrated() else { return };
    tokio().block_on(async {
        let store = open(&database).await;
        claim(&store, [1]).await;
        assert_eq!(store.expire_leases(100).await.unwrap().len(), 1);
        let seen = store.get(id(1)).await.unwrap().unwrap().record.version();
        assert!(store.supersede(id(1), seen, fresh(2, PAST)).await.unwrap());
        let late = database.session();
        late.run("CREATE TABLE charge (of int)");
        late.run("BEGIN; INSERT INTO charge VALUES (1)");
        assert!(late.try_run(&complete(1)).unwrap_err().starts_with("OG001"));
        late.run("ROLLBACK");
        late.run(&format!("BEGIN; INSERT INTO charge VALUES (2); {}; COMMIT", complete(2)));
        assert_eq!(database.value("SELECT of FROM charge"), "2");
    });
}

/// Many of both at once, each upstream with two records in either order, against batches that go through all of them.
#[test]
fn nobody_waits_for_ever() {
    const UPSTREAMS: u8 = 8;
    const ROUNDS: u8 = 12;
    let Some(database) = migrated() else { return };
    let is_over = AtomicBool::new(false);
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let completed = tokio().block_on(async {
        let store = open(&database).await;
        claim(&store, 1..=2 * UPSTREAMS * ROUNDS).await;
        ::tokio::task::block_in_place(|| {
            std::thread::scope(|scope| {
                let upstreams: Vec<_> = (0..UPSTREAMS)
                    .map(|upstream| {
                        let (session, random) =
                            (database.session(), fastrand::Rng::with_seed(seed + u64::from(upstream)));
                        scope.spawn(move || {
                            act(&session, random, (0..ROUNDS).map(|round| 1 + 2 * (upstream * ROUNDS + round)))
                        })
                    })
                    .collect();
                let gate = ::tokio::runtime::Handle::current();
                let (store, over) = (&store, &is_over);
                let meddling = scope.spawn(move || gate.block_on(meddle(store, over, 2 * UPSTREAMS * ROUNDS)));
                let completed: Vec<u8> = upstreams.into_iter().flat_map(|upstream| upstream.join().unwrap()).collect();
                is_over.store(true, Ordering::SeqCst);
                meddling.join().unwrap();
                completed
            })
        })
    });
    assert!(completed.len() > usize::from(UPSTREAMS));
    for number in 1..=2 * UPSTREAMS * ROUNDS {
        let hex = format!("{number:02x}").repeat(32);
        let state = database.value(&format!("SELECT state FROM oncegate.record WHERE id = '\\x{hex}'"));
        assert_eq!(state == "1", completed.contains(&number), "{number}, seed {seed}");
    }
}

/// The upstream: two records in a transaction, which commits or not. Gives the numbers of those that completed.
fn act(session: &Session, mut random: fastrand::Rng, numbers: impl Iterator<Item = u8>) -> Vec<u8> {
    let mut completed = Vec::new();
    for number in numbers {
        let mut pair = [number, number + 1];
        random.shuffle(&mut pair);
        session.run("BEGIN");
        if random.bool() {
            session.run(&assert_current(pair[0]));
        }
        for number in pair {
            std::thread::sleep(Duration::from_millis(random.u64(0..60)));
            session.run(&complete(number));
        }
        std::thread::sleep(Duration::from_millis(random.u64(0..60)));
        if random.u8(0..4) > 0 {
            session.run("COMMIT");
            completed.extend(pair);
        } else {
            session.run("ROLLBACK");
        }
    }
    completed
}

/// The gate: everything that it does with records, again and again.
async fn meddle(store: &Postgres, is_over: &AtomicBool, last: u8) {
    while !is_over.load(Ordering::SeqCst) {
        let all = || 1..=last;
        let renewing = store.renew(all().rev().map(held).map(|held| LeaseRenewal { lease: PAST, ..held }).collect());
        let holding = futures_util::future::join_all(all().map(|number| {
            timeout(
                PAST,
                store.settle(id(number), attempt(number), Settlement::Hold { cause: Bytes::from_static(b"cause") }),
            )
        }));
        let claiming = futures_util::future::join_all(all().map(|number| store.claim(id(number), fresh(255, PAST))));
        let expiring = store.expire_leases(100);
        let (renewed, held, claimed, expired) = ::tokio::join!(renewing, holding, claiming, expiring);
        renewed.unwrap();
        expired.unwrap();
        for settled in held.into_iter().flatten() {
            settled.unwrap();
        }
        for claim in claimed {
            assert!(matches!(claim.unwrap(), Claim::Exists { .. }));
        }
    }
}

fn completed(answer: &'static str) -> Settlement {
    let expiry = Expiry::FromClaim(Duration::from_secs(3600));
    Settlement::Complete { answer: Bytes::from_static(answer.as_bytes()), expiry }
}
