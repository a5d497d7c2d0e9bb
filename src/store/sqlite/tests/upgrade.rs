//! Files that an earlier version of oncegate wrote, and files that another process has in use.

use super::*;
use crate::idempotency::record::Timestamp;
use crate::store::is_orphaned;

fn rule(digest: u8) -> NamespaceRuleSet {
    let description = Some(format!("rules {digest}").into());
    NamespaceRuleSet {
        service: "shop".into(),
        namespace: "charges".into(),
        digest: [digest; 32],
        others: Vec::new(),
        description,
    }
}

fn origin() -> Origin {
    Origin { service: "shop".into(), namespace: "charges".into(), route: "create".into() }
}

/// A file of version 1 with rules of this digest, and a completed record of id 1.
fn former(path: &Path, digest: u8) {
    let conn = Connection::open(path).unwrap();
    conn.execute_batch(include_str!("../../../../migrations/sqlite/0001_records.sql")).unwrap();
    conn.execute("INSERT INTO identity VALUES ('shop', 'charges', ?1)", [[digest; 32]]).unwrap();
    let origin = (origin().id().0, "shop", "charges", "create");
    conn.execute("INSERT INTO origin VALUES (?1, ?2, ?3, ?4)", origin).unwrap();
    let (now, hour) = (row::time(clock::wall()), 3_600_000);
    conn.execute(
        "INSERT INTO record (id, attempt, state, claimed_at, until, unknown_ttl, origin, head, answer)
         VALUES (?1, ?2, 1, ?3, ?4, ?5, ?6, x'00', x'01')",
        (id(1).0, attempt(1).0, now, now + hour, hour, origin.0),
    )
    .unwrap();
    conn.pragma_update(None, "application_id", 0x6f6e_6365).unwrap();
    conn.pragma_update(None, "user_version", 1).unwrap();
}

#[tokio::test]
async fn a_file_of_the_former_version_keeps_its_records_and_its_rules() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    former(&path, 1);
    let store = open(&path);
    assert_eq!(state_of(&store, 1).await, Some(State::Completed));
    let refused = store.adopt(vec![origin()], vec![rule(2)], false).await.unwrap();
    assert_eq!((refused.len(), refused[0].keys(), refused[0].digest), (1, 1, [1; 32]));
    assert_eq!(refused[0].description, None, "it was not kept");
    assert_eq!(store.adopt(vec![origin()], vec![rule(1)], false).await.unwrap(), []);
    let found = store.identities().await.unwrap();
    assert_eq!(found[0].description().map(|text| &**text), Some("rules 1"));
    assert_eq!(found[0].periods[0].since, Timestamp(0), "they held before anything was known of them");
    let record = store.get(id(1)).await.unwrap().unwrap().record;
    assert!(!is_orphaned(&found, &origin(), record.claimed_at, None));
    assert_eq!(store.adopt(vec![origin()], vec![rule(2)], true).await.unwrap(), []);
    assert!(is_orphaned(&store.identities().await.unwrap(), &origin(), record.claimed_at, None));
}

#[tokio::test]
async fn a_file_in_use_is_looked_into_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    assert!(preview(&path, &[rule(1)]).unwrap().is_none(), "there is no file");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "and none is made");
    let store = open(&path);
    store.adopt(vec![origin()], vec![rule(1)], false).await.unwrap();
    store.claim(id(1), NewRecord { origin: origin().id(), ..fresh(1) }).await.unwrap();
    let found = |digest| preview(&path, &[rule(digest)]).unwrap().unwrap();
    assert_eq!(found(1).changes, []);
    let changes = store.changes(Vec::new(), vec![rule(2)]).await.unwrap();
    assert_eq!((found(2).changes, found(2).on_file), (changes.clone(), store.identities().await.unwrap()));
    assert_eq!((changes[0].keys(), changes[0].description.as_deref()), (1, Some("rules 1")));
    // It goes on.
    store.settle(id(1), attempt(1), complete(Bytes::from_static(b"x"))).await.unwrap();
    store.close().await;
    assert_eq!(found(2).changes[0].live[0].in_flight, 0);
    let store = open(&path);
    assert_eq!(state_of(&store, 1).await, Some(State::Completed));
}

#[test]
fn a_file_of_the_former_version_is_looked_into_and_stays_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    former(&path, 1);
    let found = |digest| preview(&path, &[rule(digest)]).unwrap().unwrap();
    assert_eq!(found(1).changes, []);
    assert_eq!(found(2).changes[0].keys(), 1);
    let version = Connection::open(&path).unwrap().query_row("PRAGMA user_version", [], |row| row.get::<_, i64>(0));
    assert_eq!(version.unwrap(), 1);
}

#[test]
fn a_file_that_is_not_a_store_is_not_looked_into() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notes.txt");
    fs::write(&path, "not a database at all, but long enough to be looked at as one".repeat(20)).unwrap();
    assert!(matches!(preview(&path, &[]), Err(OpenError::NotADatabase { .. })));
}
