//! Over stores in memory, of which one is away at first.

use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use tokio::time::sleep;

use super::moving::LOOK_WHILE_MOVING;
use super::*;
use crate::store::audit::{EntryFilter, NewEntry};
use crate::store::deliveries::{Lane, NewDelivery, Take};
use crate::store::memory::Memory;
use crate::store::unreliable::{Fault, Operation, Unreliable};
use crate::store::{OriginId, contract};

/// A list whose second database cannot be opened at first.
#[derive(Default)]
struct Late {
    is_there: AtomicBool,
    store: Arc<Memory>,
}

#[async_trait]
impl Databases for Late {
    async fn open(&self, _: usize) -> Result<Arc<dyn Store>, String> {
        match self.is_there.load(Ordering::SeqCst) {
            true => Ok(Arc::clone(&self.store) as Arc<dyn Store>),
            false => Err("it is away".to_owned()),
        }
    }

    async fn routes(&self, _: &[DatabaseId]) -> Result<DatabaseMap, NotKnown> {
        Ok(DatabaseMap::fixed(2))
    }

    fn observed(&self, _: usize, _: bool) {}
}

#[tokio::test(start_paused = true)]
async fn a_database_that_comes_late_knows_the_rules_before_it_takes_a_claim() {
    let late = Arc::new(Late::default());
    let first: Arc<dyn Store> = Arc::new(Memory::new());
    let opened = vec![("a".into(), Some(first)), ("b".into(), None)];
    let store = Sharded::new(opened, DatabaseMap::fixed(2), Arc::clone(&late) as Arc<dyn Databases>);
    let rules = NamespaceRuleSet {
        service: "shop".into(),
        namespace: "charges".into(),
        digest: [1; 32],
        others: Vec::new(),
        description: None,
    };
    assert_eq!(store.adopt(Vec::new(), vec![rules.clone()], false).await.unwrap(), []);
    let claim = |first| store.claim(RecordId([first; 32]), contract::fresh(1));
    assert!(matches!(claim(0x10).await, Ok(Claim::Inserted(_))));
    let away = claim(0xf0).await.unwrap_err();
    assert!(matches!(&away, Error::Determinate(cause) if cause.kind == ErrorKind::Unavailable), "{away}");
    assert!(store.ping().await.is_ok(), "one works");
    assert_eq!(store.away(), [Arc::from("b")]);
    assert!(store.count().await.is_err(), "some of the records cannot be counted");
    // What is done in every database is done in those that are there.
    assert_eq!(store.sweep(10).await.unwrap(), 0);
    assert!(store.expire_leases(10).await.unwrap().is_empty());

    late.is_there.store(true, Ordering::SeqCst);
    while claim(0xf0).await.is_err() {
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(late.store.identities().await.unwrap()[0].digest, Some(rules.digest));
    assert!(store.ping().await.is_ok() && store.away().is_empty());
    assert_eq!(store.count().await.unwrap(), [2, 0, 0]);
}

/// One database holds the deliveries back, and the other does not: that is not "nothing".
#[tokio::test]
async fn a_pause_that_only_some_databases_took_may_have_happened() {
    let other = Arc::new(Unreliable::new(Arc::new(Memory::new())));
    let stores: [Arc<dyn Store>; 2] = [Arc::new(Memory::new()), Arc::clone(&other) as Arc<dyn Store>];
    let opened = ["a", "b"].into_iter().zip(stores).map(|(name, store)| (name.into(), Some(store))).collect();
    let store = Sharded::new(opened, DatabaseMap::fixed(2), Arc::new(Late::default()));
    let queue = Store::deliveries(&store).unwrap();
    other.set_away(true);
    let error = queue.pause(OriginId(7), true).await.unwrap_err();
    assert!(matches!(error, Error::Indeterminate(_)), "{error}");
    other.set_away(false);
    assert!(queue.pause(OriginId(7), true).await.unwrap(), "one of them changes");
    assert!(!queue.pause(OriginId(7), true).await.unwrap(), "none does");
}

/// All routes ask at once where they have something to deliver.
#[tokio::test]
async fn routes_take_their_deliveries_at_once() {
    let opened = ["a", "b"].map(|name| (name.into(), Some(Arc::new(Memory::new()) as Arc<dyn Store>)));
    let store = Sharded::new(opened.into(), DatabaseMap::fixed(2), Arc::new(Late::default()));
    let queue = Store::deliveries(&store).unwrap();
    let routes = 1..=5;
    for route in routes.clone() {
        let (token, origin, lane, nothing) =
            (AttemptToken([route; 16]), OriginId(i64::from(route)), Lane(0), Bytes::new);
        let new = NewDelivery { token, origin, lane, head: nothing(), request: nothing(), body: nothing() };
        queue.accept(RecordId([50 * route; 32]), new).await.unwrap();
    }
    let take = |route| {
        let (origin, hold) = (OriginId(i64::from(route)), Duration::from_secs(60));
        queue.take_due(Take { origin, limit: 9, max_bytes: 9, hold, is_ordered: false })
    };
    for (route, batch) in routes.clone().zip(join_all(routes.map(take)).await) {
        let taken: Vec<AttemptToken> = batch.unwrap().taken.iter().map(|taken| taken.delivery.token).collect();
        assert_eq!(taken, [AttemptToken([route; 16])]);
    }
}

/// A database of the next list that it does not name would go on as it is, or as the former ones were when the move began.
#[tokio::test]
async fn a_gate_that_does_not_name_all_databases_pauses_nothing() {
    let first = Arc::new(Memory::new());
    let databases = Arc::new(Moving(AtomicBool::new(false)));
    let partial = DatabaseMap { members: vec![Some(0)], target: Some(vec![Some(0), None]), ids: Vec::new() };
    // It may know of the move, or not yet.
    for routes in [partial, DatabaseMap::fixed(1)] {
        let opened = vec![("a".into(), Some(Arc::clone(&first) as Arc<dyn Store>))];
        let store = Sharded::new(opened, routes, Arc::clone(&databases) as Arc<dyn Databases>);
        let queue = Store::deliveries(&store).unwrap();
        for is_paused in [true, false] {
            let refused = queue.pause(OriginId(7), is_paused).await.unwrap_err();
            assert!(matches!(&refused, Error::Determinate(cause) if cause.kind == ErrorKind::Moved), "{refused}");
        }
        assert_eq!(queue.paused().await.unwrap(), []);
    }
}

#[tokio::test]
async fn a_database_that_the_list_does_not_name_is_not_asked() {
    let first: Arc<dyn Store> = Arc::new(Memory::new());
    let routes = DatabaseMap { members: vec![Some(0), None], target: None, ids: Vec::new() };
    let store = Sharded::new(vec![("a".into(), Some(first))], routes, Arc::new(Late::default()));
    assert!(store.claim(RecordId([0x10; 32]), contract::fresh(1)).await.is_ok());
    let error = store.claim(RecordId([0xf0; 32]), contract::fresh(1)).await.unwrap_err();
    assert!(matches!(&error, Error::Determinate(cause) if cause.kind == ErrorKind::Moved), "{error}");
}

/// It says so at once: what changes many records would change a part of them.
#[tokio::test(start_paused = true)]
async fn the_databases_that_do_not_answer_are_named_before_many_records_change() {
    let stores: [Arc<Unreliable>; 2] = std::array::from_fn(|_| Arc::new(Unreliable::new(Arc::new(Memory::new()))));
    let names = ["a", "b"].into_iter().zip(&stores);
    let opened = names.map(|(name, store)| (name.into(), Some(Arc::clone(store) as Arc<dyn Store>))).collect();
    let store = Sharded::new(opened, DatabaseMap::fixed(2), Arc::new(Late::default()));
    assert!(store.silent().await.is_empty());
    stores[1].set_away(true);
    assert_eq!(store.silent().await, [Arc::from("b")]);
    stores[1].set_away(false);
    stores.iter().for_each(|store| store.script([Fault::Hang]));
    let began = tokio::time::Instant::now();
    assert_eq!(store.silent().await, [Arc::from("a"), Arc::from("b")]);
    assert!(began.elapsed() < Duration::from_secs(3), "all are asked at once: {:?}", began.elapsed());
    let first: Arc<dyn Store> = Arc::new(Memory::new());
    let store = Sharded::new(vec![("a".into(), Some(first))], places(&[Some(0), None]), Arc::new(Late::default()));
    assert_eq!(store.silent().await, [Arc::from(UNNAMED)]);
}

/// A list whose records move to it from a database that it does not name.
struct Moving(AtomicBool);

#[async_trait]
impl Databases for Moving {
    async fn open(&self, _: usize) -> Result<Arc<dyn Store>, String> {
        Err("it is open".to_owned())
    }

    async fn routes(&self, _: &[DatabaseId]) -> Result<DatabaseMap, NotKnown> {
        Ok(if self.0.load(Ordering::SeqCst) { DatabaseMap::fixed(2) } else { moving() })
    }

    fn observed(&self, _: usize, _: bool) {}
}

fn moving() -> DatabaseMap {
    DatabaseMap { members: vec![None], target: Some(vec![Some(0), Some(1)]), ids: Vec::new() }
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_move_is_noticed_though_nothing_is_refused() {
    let opened = ["a", "b"].map(|name| (name.into(), Some(Arc::new(Memory::new()) as Arc<dyn Store>)));
    let databases = Arc::new(Moving(AtomicBool::new(false)));
    let store = Sharded::new(opened.into(), moving(), Arc::clone(&databases) as Arc<dyn Databases>);
    assert!(matches!(store.claim(RecordId([0x10; 32]), contract::fresh(1)).await, Ok(Claim::Inserted(_))));
    let partial = store.count().await.unwrap_err();
    assert!(matches!(&partial, Error::Determinate(cause) if cause.kind == ErrorKind::Moved), "{partial}");
    databases.0.store(true, Ordering::SeqCst);
    sleep(2 * LOOK_WHILE_MOVING).await;
    assert_eq!(store.count().await.unwrap(), [1, 0, 0]);
}

/// A list whose databases say where records are.
struct ScriptedDatabases(ArcSwap<DatabaseMap>);

#[async_trait]
impl Databases for ScriptedDatabases {
    async fn open(&self, _: usize) -> Result<Arc<dyn Store>, String> {
        Err("it is open".to_owned())
    }

    async fn routes(&self, _: &[DatabaseId]) -> Result<DatabaseMap, NotKnown> {
        Ok(DatabaseMap::clone(&self.0.load()))
    }

    fn observed(&self, _: usize, _: bool) {}
}

/// A gate that has these databases in its list, believes this of where records are, and has not heard what they say now.
fn unaware(stores: &[Arc<Memory>], believed: DatabaseMap, said: DatabaseMap) -> Sharded {
    let names = ["a", "b", "c"].into_iter().zip(stores);
    let opened = names.map(|(name, store)| (name.into(), Some(Arc::clone(store) as Arc<dyn Store>))).collect();
    Sharded::new(opened, believed, Arc::new(ScriptedDatabases(ArcSwap::from_pointee(said))))
}

fn places(members: &[Option<usize>]) -> DatabaseMap {
    DatabaseMap { members: members.to_vec(), ..DatabaseMap::default() }
}

/// It would list a part of the records as if that were all of them, as it is not refused anything.
#[tokio::test(start_paused = true)]
async fn a_gate_that_does_not_know_of_a_move_lists_no_part_of_the_records() {
    let stores: [Arc<Memory>; 2] = Default::default();
    stores[0].claim(RecordId([0x10; 32]), contract::fresh(1)).await.unwrap();
    let store = unaware(&stores, DatabaseMap::fixed(2), places(&[Some(0), Some(1), None]));
    let is_moved = |error: Error| assert_eq!(error.cause().kind, ErrorKind::Moved, "{error}");
    is_moved(store.list(Filter::default(), None, 9).await.unwrap_err());
    is_moved(store.scan(Filter::default(), None, 9).await.unwrap_err());
    is_moved(store.resealing().unwrap().beginnings(None, 9).await.unwrap_err());
    is_moved(store.count().await.unwrap_err());
}

#[tokio::test(start_paused = true)]
async fn pages_go_on_where_the_records_are_now() {
    let stores: [Arc<Memory>; 3] = Default::default();
    for (index, first) in [(0, 0x10), (0, 0x70), (1, 0xf0)] {
        stores[index].claim(RecordId([first; 32]), contract::fresh(first)).await.unwrap();
    }
    let store = unaware(&stores, DatabaseMap::fixed(3), places(&[Some(0), Some(1)]));
    let found = store.scan(Filter::default(), Some(RecordId([0x60; 32])), 9).await.unwrap();
    let ids: Vec<u8> = found.records.iter().map(|listed| listed.id.0[0]).collect();
    assert_eq!(ids, [0x70, 0xf0]);
}

fn rules(digest: u8) -> NamespaceRuleSet {
    let (service, namespace) = ("shop".into(), "charges".into());
    NamespaceRuleSet { service, namespace, digest: [digest; 32], others: Vec::new(), description: None }
}

/// How many keys other rules would forget is not known where records are out of its reach, whether or not it knows that.
#[tokio::test(start_paused = true)]
async fn a_gate_that_does_not_name_all_databases_takes_no_other_rules() {
    let partial = || places(&[Some(0), Some(1), None]);
    for believed in [partial(), DatabaseMap::fixed(2)] {
        let stores: [Arc<Memory>; 2] = Default::default();
        let store = unaware(&stores, believed, partial());
        assert_eq!(store.adopt(Vec::new(), vec![rules(1)], false).await.unwrap(), []);
        let refused = store.adopt(Vec::new(), vec![rules(2)], false).await.unwrap_err();
        assert_eq!(refused.cause().kind, ErrorKind::Unavailable, "{refused}");
        assert_eq!(stores[0].identities().await.unwrap()[0].digest, Some([1; 32]));
    }
}

/// It was not asked for a while, and the database is one of those that have records again.
#[tokio::test(start_paused = true)]
async fn all_databases_that_have_records_by_now_know_the_rules() {
    let stores: [Arc<Memory>; 2] = Default::default();
    let store = unaware(&stores, places(&[Some(0)]), DatabaseMap::fixed(2));
    assert_eq!(store.adopt(Vec::new(), vec![rules(1)], false).await.unwrap(), []);
    assert_eq!(stores[1].identities().await.unwrap()[0].digest, Some([1; 32]));
}

/// Nobody would find it when the move is over, though the gate has not heard that it has begun.
#[tokio::test(start_paused = true)]
async fn what_operators_do_is_kept_in_a_database_of_the_next_list() {
    let stores: [Arc<Memory>; 2] = Default::default();
    let moving = DatabaseMap { target: Some(vec![Some(1)]), ..places(&[Some(0), Some(1)]) };
    let store = unaware(&stores, DatabaseMap::fixed(2), moving);
    for record in [None, Some(RecordId([0x10; 32])), Some(RecordId([0xf0; 32]))] {
        let (ttl, word) = (Duration::from_secs(60), Arc::<str>::from("purge"));
        let (service, action, by) = (Arc::clone(&word), Arc::clone(&word), word);
        let entry = NewEntry { ttl, service, action, by, record, detail: Bytes::new(), reason: None };
        store.audit().unwrap().append(entry).await.unwrap();
    }
    let entries = async |store: &Memory| {
        store.audit().unwrap().entries(EntryFilter::default(), None, 9).await.unwrap().entries.len()
    };
    assert_eq!((entries(&stores[0]).await, entries(&stores[1]).await), (0, 3));
}

#[tokio::test(start_paused = true)]
async fn a_gate_whose_list_names_no_database_that_has_records_is_not_ready() {
    let stores: [Arc<Memory>; 2] = Default::default();
    let store = unaware(&stores, places(&[None, None]), places(&[None, None]));
    let error = store.ping().await.unwrap_err();
    assert_eq!(error.cause().kind, ErrorKind::Moved, "{error}");
}

/// A release is made a second time, to be sure of it, and a retry may claim the key in between.
#[tokio::test(start_paused = true)]
async fn a_release_is_done_though_a_retry_has_claimed_the_key_since() {
    let (memory, id) = (Arc::<Memory>::default(), RecordId([0x10; 32]));
    let first = Arc::new(Unreliable::new(Arc::clone(&memory) as Arc<dyn Store>));
    let names = [("a", first.clone() as Arc<dyn Store>), ("b", Arc::<Memory>::default() as Arc<dyn Store>)];
    let opened = names.map(|(name, store)| (name.into(), Some(store))).into();
    let said = ScriptedDatabases(ArcSwap::from_pointee(DatabaseMap::fixed(2)));
    let store = Sharded::new(opened, DatabaseMap::fixed(2), Arc::new(said));
    store.claim(id, contract::fresh(1)).await.unwrap();
    first.script_for(Operation::Settle, [Fault::DelayAnswer(Duration::from_secs(1))]);
    let release = store.settle(id, contract::fresh(1).attempt, Settlement::Release);
    let retry = async {
        sleep(Duration::from_millis(500)).await;
        memory.claim(id, contract::fresh(2)).await.unwrap()
    };
    let (released, claimed) = tokio::join!(release, retry);
    assert!(matches!(claimed, Claim::Inserted { .. }), "{claimed:?}");
    assert!(matches!(released, Ok(Settled::Done { .. })), "{released:?}");
    // What the first attempt never had, it does not release.
    let other = store.settle(id, contract::fresh(3).attempt, Settlement::Release).await.unwrap();
    assert!(matches!(other, Settled::NotCurrent { record: Some(_) }), "{other:?}");
}
