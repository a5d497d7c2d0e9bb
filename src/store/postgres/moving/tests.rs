//! One process that moves records is stopped in the middle, and others go on meanwhile.

use super::*;
use crate::idempotency::record::RecordId;
use crate::store::postgres::Postgres;
use crate::store::postgres::layout::join;
use crate::store::postgres::tests::{database, open, settings};
use crate::store::servers::Database;
use crate::store::sharded::layout::{Found, Misfit};
use crate::store::{Error, ErrorKind, Filter, Settlement, Store as _, contract};

/// Two databases that are one store. The first has a record.
async fn two() -> Option<[Database; 2]> {
    let (a, b) = (database()?, database()?);
    b.run("UPDATE oncegate.store SET id = uuid_send(gen_random_uuid())");
    let names = [&a, &b].map(|database| database.name.clone());
    join(&names, &[&a, &b].map(|database| settings(&database.url))).await.unwrap();
    let store = Postgres::open_member(&settings(&a.url), &|_: &Found| Ok(())).await.unwrap();
    let fresh = contract::fresh(1);
    let attempt = fresh.attempt;
    store.claim(RecordId([0x10; 32]), fresh).await.unwrap();
    store.settle(RecordId([0x10; 32]), attempt, Settlement::Hold { cause: bytes::Bytes::new() }).await.unwrap();
    store.close().await;
    Some([a, b])
}

/// The databases in this order, and then in the other one: each gets the ids of the other.
fn swap(first: &Database, second: &Database, is_preparation: bool) -> Move {
    let list = |list: [&Database; 2]| list.map(|database| (database.name.clone(), settings(&database.url))).to_vec();
    Move { from: list([first, second]), to: list([second, first]), is_preparation }
}

async fn swapped(first: &Database, second: &Database) {
    move_records(&swap(first, second, false), &mut |_| ()).await.unwrap();
}

/// The range that a process has set aside when it is stopped.
const RANGE: Range = Range { first: 0, beyond: 1 << 61 };

async fn stopped_with_a_range_aside(first: &Database, second: &Database) -> Moving {
    let mut moving = Moving::of(&swap(first, second, false)).await.unwrap();
    moving.announce().await.unwrap();
    moving.copy_rules().await.unwrap();
    assert!(moving.set_aside(0, RANGE, PATIENCE).await.unwrap());
    moving
}

fn refused(done: Result<(), OpenError>) {
    let error = done.unwrap_err().to_string();
    assert!(error.contains("another `oncegate migrate` has moved the same records meanwhile"), "{error}");
}

/// Which of the databases own the first id, and the records in each.
fn standing(databases: [&Database; 2]) -> [(String, String); 2] {
    databases.map(|database| {
        (database.value("SELECT oncegate.owns_v1('\\x00')"), database.value("SELECT count(*) FROM oncegate.record"))
    })
}

fn at_first() -> [(String, String); 2] {
    [("t".into(), "1".into()), ("f".into(), "0".into())]
}

#[tokio::test]
async fn a_range_that_was_moved_back_meanwhile_gets_no_second_owner() {
    let Some([a, b]) = two().await else { return };
    let mut stopped = stopped_with_a_range_aside(&a, &b).await;
    swapped(&a, &b).await;
    swapped(&b, &a).await;
    refused(stopped.copy(0, 1, RANGE).await);
    drop(stopped);
    assert_eq!(standing([&a, &b]), at_first());
}

/// The databases are in a move between the same lists, but the range is where it was before that.
#[tokio::test]
async fn nor_where_the_same_move_has_begun_anew() {
    let Some([a, b]) = two().await else { return };
    let mut stopped = stopped_with_a_range_aside(&a, &b).await;
    swapped(&a, &b).await;
    swapped(&b, &a).await;
    move_records(&swap(&a, &b, true), &mut |_| ()).await.unwrap();
    refused(stopped.copy(0, 1, RANGE).await);
    drop(stopped);
    assert_eq!(standing([&a, &b]), at_first());
    swapped(&a, &b).await;
    assert_eq!(standing([&b, &a]), at_first());
}

#[tokio::test]
async fn what_is_on_its_way_in_a_later_move_is_not_taken_for_what_was_left() {
    let Some([a, b]) = two().await else { return };
    let mut stopped = Moving::of(&swap(&a, &b, false)).await.unwrap();
    stopped.announce().await.unwrap();
    swapped(&a, &b).await;
    swapped(&b, &a).await;
    let later = stopped_with_a_range_aside(&a, &b).await;
    // It was about to end its move: nothing was left to hand over.
    refused(stopped.remove_left(0).await);
    drop((stopped, later));
    assert_eq!(a.value("SELECT count(*) FROM oncegate.outgoing_record"), "1");
    swapped(&a, &b).await;
    assert_eq!(standing([&b, &a]), at_first());
}

#[tokio::test]
async fn a_database_that_is_in_another_move_neither_gives_anything_up_nor_changes_its_list() {
    let Some([a, b]) = two().await else { return };
    let mut stopped = Moving::of(&swap(&a, &b, false)).await.unwrap();
    stopped.announce().await.unwrap();
    let mut late = Moving::of(&swap(&a, &b, false)).await.unwrap();
    swapped(&a, &b).await;
    swapped(&b, &a).await;
    refused(stopped.set_aside(0, RANGE, PATIENCE).await.map(drop));
    assert_eq!(standing([&a, &b]), at_first());
    let in_order = "SELECT members[1] = (SELECT id FROM oncegate.store) AND target IS NULL FROM oncegate.layout";
    refused(late.finish().await);
    drop(late);
    assert_eq!((a.value(in_order), b.value(in_order)), ("t".into(), "f".into()));
    // Nor is a move begun that has begun and ended since its databases were looked at.
    let mut late = Moving::of(&swap(&a, &b, false)).await.unwrap();
    swapped(&a, &b).await;
    refused(late.announce().await);
    assert_eq!((a.value(in_order), b.value(in_order)), ("f".into(), "t".into()));
}

/// A gate that was started with it alone is not refused anything either, as long as it has no request with a key.
#[tokio::test]
async fn a_store_by_itself_that_became_one_of_two_lists_no_part_of_the_records() {
    let (Some(a), Some(b)) = (database(), database()) else { return };
    b.run("UPDATE oncegate.store SET id = uuid_send(gen_random_uuid())");
    let store = open(&a.url).await;
    let fresh = contract::fresh(1);
    let attempt = fresh.attempt;
    store.claim(RecordId([0xf0; 32]), fresh).await.unwrap();
    store.settle(RecordId([0xf0; 32]), attempt, Settlement::Hold { cause: bytes::Bytes::new() }).await.unwrap();
    assert_eq!(store.count().await.unwrap(), [0, 0, 1]);
    let list = |databases: &[&Database]| {
        databases.iter().map(|database| (database.name.clone(), settings(&database.url))).collect()
    };
    let (from, to) = (list(&[&a]), list(&[&a, &b]));
    move_records(&Move { from, to, is_preparation: false }, &mut |_| ()).await.unwrap();
    let is_moved = |error: Error| assert_eq!(error.cause().kind, ErrorKind::Moved, "{error}");
    is_moved(store.list(Filter::default(), None, 9).await.unwrap_err());
    is_moved(store.scan(Filter::default(), None, 9).await.unwrap_err());
    is_moved(store.resealing().unwrap().beginnings(None, 9).await.unwrap_err());
    is_moved(store.count().await.unwrap_err());
    is_moved(store.changes(Vec::new(), Vec::new()).await.unwrap_err());
}

fn list(databases: &[&Database]) -> Vec<(String, Settings)> {
    databases.iter().map(|database| (database.name.clone(), settings(&database.url))).collect()
}

async fn moved(from: &[&Database], to: &[&Database]) -> Result<(), MoveError> {
    move_records(&Move { from: list(from), to: list(to), is_preparation: false }, &mut |_| ()).await
}

/// A database with an id of its own.
fn another() -> Option<Database> {
    let database = database()?;
    database.run("UPDATE oncegate.store SET id = uuid_send(gen_random_uuid())");
    Some(database)
}

/// Nothing was moved there: a retry of what the former store has would run again.
#[tokio::test]
async fn records_do_not_move_to_databases_that_are_a_store_already() {
    let (Some([a, b]), Some(c), Some(d)) = (two().await, another(), another()) else { return };
    join(&[&c, &d].map(|database| database.name.clone()), &[&c, &d].map(|database| settings(&database.url)))
        .await
        .unwrap();
    let Some(single) = another() else { return };
    for from in [&[&a, &b][..], &[&single]] {
        let error = moved(from, &[&c, &d]).await.unwrap_err();
        assert!(
            matches!(&error, MoveError::Refused(OpenError::Layout(Misfit::OtherStore { name, .. })) if *name == c.name),
            "{error}"
        );
    }
    assert_eq!(standing([&a, &b]), at_first());
}

/// It may own some ids without the other that has records of them.
#[tokio::test]
async fn a_database_that_says_it_is_over_moves_nothing_while_another_knows_of_no_move() {
    let Some([a, b]) = two().await else { return };
    // As a backup of before it joined is, and as one was left that was refused in the middle.
    a.run("DELETE FROM oncegate.layout; DELETE FROM oncegate.owned");
    let error = moved(&[&a], &[&a, &b]).await.unwrap_err();
    assert!(
        matches!(&error, MoveError::Refused(OpenError::Layout(Misfit::NotOfMove { name, .. })) if *name == b.name),
        "{error}"
    );
    assert_eq!(a.value("SELECT count(*) FROM oncegate.layout"), "0");
}

#[tokio::test]
async fn databases_that_own_the_same_ids_move_nothing() {
    let Some([a, b]) = two().await else { return };
    b.run("UPDATE oncegate.owned SET first = '\\x70'");
    for (from, to) in [([&a, &b], [&b, &a]), ([&a, &b], [&a, &b])] {
        let error = moved(&from, &to).await.unwrap_err();
        assert!(matches!(&error, MoveError::Refused(OpenError::Layout(Misfit::OwnedTwice { .. }))), "{error}");
    }
}

/// It has pauses and entries of before.
#[tokio::test]
async fn a_database_that_was_removed_is_to_be_made_anew() {
    let Some([a, b]) = two().await else { return };
    moved(&[&a, &b], &[&b]).await.unwrap();
    assert_eq!(standing([&b, &a]), at_first());
    let error = moved(&[&b], &[&a, &b]).await.unwrap_err().to_string();
    assert!(error.contains("was removed from its store") && error.contains("DROP SCHEMA"), "{error}");
}
