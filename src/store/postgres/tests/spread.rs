//! A store that is spread over several databases, each of which keeps others out.

use futures_util::future::BoxFuture;
use tokio::time::{sleep, timeout};

use super::*;
use crate::store::servers::Session;
use crate::store::sharded::layout::{DatabaseId, DatabaseMap, Found, NotKnown, fit};
use crate::store::sharded::placement::place_of;
use crate::store::sharded::{Databases, Sharded};

/// Three databases that are one store.
async fn databases() -> Option<Vec<Database>> {
    let databases: Option<Vec<Database>> = (0..3).map(|_| database()).collect();
    let databases = databases?;
    for database in &databases {
        // They are copies of one, which has an id already.
        database.run("UPDATE oncegate.store SET id = uuid_send(gen_random_uuid())");
    }
    assert!(layout::join(&names(&databases), &all(&databases)).await.unwrap());
    Some(databases)
}

fn names(databases: &[Database]) -> Vec<String> {
    databases.iter().map(|database| database.name.clone()).collect()
}

fn all(databases: &[Database]) -> Vec<Settings> {
    databases.iter().map(|database| settings(&database.url)).collect()
}

/// Databases that are all open.
struct Open;

#[async_trait]
impl Databases for Open {
    async fn open(&self, _: usize) -> Result<Arc<dyn Store>, String> {
        Err("it is open".to_owned())
    }

    async fn routes(&self, _: &[DatabaseId]) -> Result<DatabaseMap, NotKnown> {
        Ok(DatabaseMap::fixed(3))
    }

    fn observed(&self, _: usize, _: bool) {}
}

async fn spread(databases: &[Database]) -> Sharded {
    let mut opened = Vec::new();
    for database in databases {
        let store = Postgres::open_member(&settings(&database.url), &|_: &Found| Ok(())).await.unwrap();
        let name: Arc<str> = database.name.as_str().into();
        opened.push((name, Some(Arc::new(store) as Arc<dyn Store>)));
    }
    Sharded::new(opened, DatabaseMap::fixed(3), Arc::new(Open))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_keeps_the_contract() {
    let Some(databases) = databases().await else { return };
    databases.iter().for_each(|database| drop(database.run(STOP_CLOCK)));
    contract::run(async || {
        let sessions: Arc<Vec<Session>> = Arc::new(databases.iter().map(Database::session).collect());
        sessions.iter().for_each(|session| drop(session.run(EMPTY)));
        let advance = move |time: Duration| -> BoxFuture<'static, ()> {
            let step = format!("UPDATE clock SET at = at + {}", time.as_millis());
            sessions.iter().for_each(|session| drop(session.run(&step)));
            Box::pin(std::future::ready(()))
        };
        Harness::stepped_slowly(spread(&databases).await, advance).shared()
    })
    .await;
}

#[tokio::test]
async fn a_database_takes_no_claim_for_an_id_of_another() {
    let Some(databases) = databases().await else { return };
    let store = Postgres::open_member(&settings(&databases[1].url), &|_: &Found| Ok(())).await.unwrap();
    store.ping().await.unwrap();
    let fresh = || contract::fresh(1);
    for first in [0_u8, 0x54, 0x56, 0xa9, 0xab, 0xff] {
        let id = RecordId([first; 32]);
        let claimed = store.claim(id, fresh()).await;
        match place_of(id, 3) {
            1 => assert!(matches!(claimed, Ok(Claim::Inserted(_))), "{claimed:?}"),
            _ => {
                let error = claimed.unwrap_err();
                assert!(matches!(&error, Error::Determinate(cause) if cause.kind == ErrorKind::Moved), "{error}");
            }
        }
    }
    // One that is another's refuses no other of its batch.
    let claims = [0_u8, 0x57, 0x58, 0xff].map(|first| store.claim(RecordId([first; 32]), fresh()));
    let claimed = futures_util::future::join_all(claims).await;
    assert_eq!(claimed.iter().map(Result::is_ok).collect::<Vec<_>>(), [false, true, true, false]);
    assert_eq!(databases[1].value("SELECT count(*) FROM oncegate.record"), "4");
}

#[tokio::test]
async fn a_list_is_made_once_and_any_other_is_refused() {
    let Some(databases) = databases().await else { return };
    let (names, settings) = (names(&databases), all(&databases));
    assert!(!layout::join(&names, &settings).await.unwrap(), "it is there");
    for wrong in [vec![1, 0, 2], vec![0, 1], vec![0, 0, 2], vec![2]] {
        let pick = |from: &[String]| wrong.iter().map(|index| from[*index].clone()).collect::<Vec<_>>();
        let settings: Vec<Settings> = wrong.iter().map(|index| settings[*index].clone()).collect();
        let refused = layout::join(&pick(&names), &settings).await.unwrap_err();
        assert!(matches!(refused, OpenError::Layout(_)), "{wrong:?}: {refused}");
    }
    // One of them is not a store by itself, and older programs do not take it for one.
    let refused = Postgres::open(&settings[1]).await.unwrap_err().to_string();
    assert!(refused.contains(&format!("/{} says that it is", databases[1].name)), "{refused}");
    assert!(
        refused.contains("says that it is number 2 of 3 databases, and [store] url names it as number 1 of 1"),
        "{refused}"
    );
    let compatible = "SELECT max(compatible_with) FROM oncegate.migration";
    assert_eq!(databases[1].value(compatible), "11");
    let found = layout::find(&settings[0]).await.unwrap().found;
    assert!(fit(&names, &[Some(found), None, None]).is_ok());
}

/// And the others are as they were: one that was left joined would own ids of the one with records.
#[tokio::test]
async fn a_database_with_records_joins_no_list() {
    for id in ["00", "ff"] {
        let (Some(one), Some(other)) = (database(), database()) else { return };
        one.run(&format!("UPDATE oncegate.store SET id = decode(repeat('{id}', 16), 'hex')"));
        let store = open(&one.url).await;
        store.claim(RecordId([7; 32]), contract::fresh(1)).await.unwrap();
        let databases = [one, other];
        let refused = layout::join(&names(&databases), &all(&databases)).await.unwrap_err().to_string();
        let name = &databases[0].name;
        assert!(refused.starts_with(&format!("{name} says that it is a store by itself")), "{refused}");
        assert!(refused.contains("oncegate migrate --from OLD --to NEW"), "{refused}");
        for database in &databases {
            assert_eq!(database.value("SELECT count(*) FROM oncegate.layout"), "0");
        }
    }
}

#[tokio::test]
async fn a_list_with_a_database_that_is_away_names_that_one() {
    let Some(one) = database() else { return };
    let away = settings("postgres://gate@127.0.0.1:1/away?sslmode=disable");
    let names = ["one".to_owned(), "other".to_owned()];
    let refused = layout::join(&names, &[settings(&one.url), away]).await.unwrap_err().to_string();
    assert!(refused.starts_with("other: the database cannot be used"), "{refused}");
}

/// What is joined already, and what is refused, is not locked: claims would wait behind it.
#[tokio::test]
async fn who_has_a_table_holds_up_nobody_where_no_list_is_made() {
    let Some(databases) = databases().await else { return };
    let Some(one) = database() else { return };
    one.run("UPDATE oncegate.store SET id = decode(repeat('00', 16), 'hex')");
    open(&one.url).await.claim(RecordId([7; 32]), contract::fresh(1)).await.unwrap();
    let held: Vec<_> = databases.iter().chain([&one]).map(Database::session).collect();
    for session in &held {
        session.run("BEGIN; LOCK TABLE oncegate.record IN ROW EXCLUSIVE MODE");
    }
    let within = Duration::from_secs(20);
    let joined = timeout(within, layout::join(&names(&databases), &all(&databases))).await;
    assert!(!joined.expect("it waits for nobody").unwrap());
    let Some(new) = database() else { return };
    let two = [new, one];
    let refused = timeout(within, layout::join(&names(&two), &all(&two))).await;
    assert!(refused.expect("it waits for nobody").is_err());
    // Where one joins, others go on between its tries.
    let Some(other) = database() else { return };
    other.run("UPDATE oncegate.store SET id = uuid_send(gen_random_uuid())");
    let [new, _] = two;
    let two = [new, other];
    let session = two[1].session();
    session.run("BEGIN; LOCK TABLE oncegate.record IN ROW EXCLUSIVE MODE");
    let ending = async {
        sleep(Duration::from_millis(1200)).await;
        session.run("COMMIT");
    };
    let (names, settings) = (names(&two), all(&two));
    let (joined, ()) = tokio::join!(layout::join(&names, &settings), ending);
    assert!(joined.unwrap());
}

/// Two may move records at once, and one of them may have slept: what it knows of a range is old.
#[tokio::test]
async fn a_range_that_was_set_aside_is_taken_back_by_nobody() {
    let Some(databases) = databases().await else { return };
    let said = |function: &str| databases[1].value(&format!("SELECT oncegate.{function}_v1('\\x57', '\\x58')"));
    assert_eq!(said("take_back"), "f", "it was not given up");
    assert_eq!((said("give_up"), said("take_back")), ("t".into(), "t".into()));
    assert_eq!(databases[1].value("SELECT count(*) FROM oncegate.owned"), "1", "it is one range again");
    // It has no record that would show that it was set aside.
    assert_eq!((said("give_up"), said("set_aside"), said("take_back")), ("t".into(), "t".into(), "f".into()));
    // The other mover is done with it.
    databases[1].run("DELETE FROM oncegate.handover");
    assert_eq!(said("take_back"), "f");
    assert_eq!(databases[1].value("SELECT oncegate.owns_v1('\\x57aa')"), "f");
}

#[tokio::test]
async fn what_is_on_its_way_is_not_absent() {
    let Some(databases) = databases().await else { return };
    let (store, id) = (spread(&databases).await, RecordId([0x57; 32]));
    let fresh = contract::fresh(1);
    let attempt = fresh.attempt;
    assert!(matches!(store.claim(id, fresh).await, Ok(Claim::Inserted(_))));
    assert!(store.get(RecordId([0x58; 32])).await.unwrap().is_none(), "its database owns it, and has nothing");
    store.settle(id, attempt, Settlement::Hold { cause: bytes::Bytes::new() }).await.unwrap();
    for step in ["give_up", "set_aside"] {
        assert_eq!(databases[1].value(&format!("SELECT oncegate.{step}_v1('\\x57', '\\x58')")), "t");
    }
    let is_moved = |error: Error| assert_eq!(error.cause().kind, ErrorKind::Moved, "{error}");
    is_moved(store.get(id).await.unwrap_err());
    is_moved(store.remove(id, attempt).await.unwrap_err());
    is_moved(store.settle(id, attempt, Settlement::Hold { cause: bytes::Bytes::new() }).await.unwrap_err());
    let queue = crate::store::deliveries::of(&store).unwrap();
    is_moved(queue.delivery(id).await.unwrap_err());
    is_moved(queue.discard(id, attempt).await.unwrap_err());
}
