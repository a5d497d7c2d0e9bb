//! Changes of all records that a filter finds.

use http::{HeaderMap, Method};

use super::*;
use crate::admin::testing::identifier;
use crate::idempotency::codec::{Details, Head};
use crate::idempotency::fingerprint::{Fingerprint, Recipe};
use crate::idempotency::identity::RulesTag;
use crate::idempotency::key::Key;
use crate::idempotency::scope::{Caller, ScopePart};
use crate::store::sharded::layout::{DatabaseId, DatabaseMap, NotKnown};
use crate::store::sharded::{Databases, Sharded};
use crate::store::{Expiry, NamespaceRuleSet};

/// The API before a store whose calls can be delayed or refused.
async fn start_unreliable() -> (Admin, Arc<Unreliable>) {
    let admin = start_without_store(None).await;
    let store = Arc::new(Unreliable::new(admin.store.clone()));
    admin.state.set_store(store.clone());
    admin.store.adopt(vec![origin("charge")], Vec::new(), false).await.unwrap();
    (admin, store)
}

/// A claim of somebody else.
fn fresh() -> NewRecord {
    let (attempt, origin, head) = (AttemptToken([7; 16]), origin("charge").id(), Bytes::from_static(b"?"));
    NewRecord { attempt, origin, lease: LEASE, ttl: LEASE, unknown_ttl: LEASE, head }
}

#[tokio::test]
async fn all_that_a_filter_finds_are_removed() {
    let admin = start(None).await;
    let mut old = Vec::new();
    for n in 0..130 {
        old.push(admin.completed("refund", &format!("old-{n}")).await.to_string());
        admin.unknown("charge", &format!("old-{n}")).await;
    }
    admin.pass(Duration::from_secs(1800));
    let young = admin.completed("refund", "young").await.to_string();
    let filter = json!({"state": "completed", "older_than": "10m"});
    let dry = admin.bulk("purge", json!({"filter": filter, "dry_run": true})).await.json();
    assert_eq!((&dry["matched"], &dry["done"], &dry["failed"]), (&json!(130), &json!(0), &json!(0)));
    old.sort();
    assert_eq!(dry["ids"], json!(old[..100]));
    let count = admin.store.count().await.unwrap();
    assert_eq!(count, [0, 131, 130]);
    let done = admin.bulk("purge", json!({"filter": filter, "reason": "a test"})).await.json();
    let as_of = dry["as_of"].clone();
    assert_eq!(done, json!({"matched": 130, "done": 130, "failed": 0, "as_of": as_of, "ids": old[..100]}));
    assert_eq!(admin.ids("?state=completed").await, [young]);
    assert_eq!(admin.store.count().await.unwrap(), [0, 1, 130]);
    let (running, _) = admin.claim("charge", "running").await;
    let prefix = json!({"id": &running.to_string()[..20]});
    let done = admin.bulk("purge", json!({"filter": prefix, "reason": "a test"})).await.json();
    assert_eq!((&done["matched"], &done["in_flight"]), (&json!(0), &json!(1)), "its attempt runs");
    let all = admin.bulk("purge", json!({"all": true, "reason": "a test"})).await.json();
    assert_eq!(
        (&all["done"], &all["in_flight"], admin.store.count().await.unwrap()),
        (&json!(131), &json!(1), [1, 0, 0])
    );
    let by_name = json!({"state": "in-flight", "id": &running.to_string()[..20]});
    let done = admin.bulk("purge", json!({"filter": by_name, "reason": "a test"})).await.json();
    assert_eq!((&done["done"], &done["ids"]), (&json!(1), &json!([running.to_string()])));
    assert_eq!(admin.store.count().await.unwrap(), [0, 0, 0]);
}

/// Records that do not say whose they are might be anybody's: they are counted, and left alone.
#[tokio::test]
async fn a_scope_finds_the_records_of_its_caller() {
    let admin = start(None).await;
    let claim_of = async |host: &str, key: &str| {
        let key = Key::parse(key, 255).unwrap();
        let headers = HeaderMap::new();
        let caller =
            Caller { headers: &headers, authority: Some(host), client_ip: None, certificate: None, claims: None };
        let scope = Some(identifier().scope_tags(&[ScopePart::Host], caller));
        let fingerprint = Fingerprint { recipe: Recipe::default(), digest: [7; 32] };
        let head =
            Head::new(fingerprint, Method::POST, "/v1", &key).with_details(&Details { scope, ..Details::default() });
        let id = identifier().id("charge", &[ScopePart::Host], caller, &key);
        let attempt = AttemptToken([id.0[9]; 16]);
        admin.store.claim(id, NewRecord { attempt, head: head.encode(), ..fresh() }).await.unwrap();
        let end = Settlement::Complete { answer: Bytes::new(), expiry: Expiry::FromNow(LEASE) };
        admin.store.settle(id, attempt, end).await.unwrap();
        id.to_string()
    };
    let (one, two) = (claim_of("acme.example", "k-1").await, claim_of("acme.example", "k-2").await);
    let other = claim_of("globex.example", "k-1").await;
    let legacy = admin.completed("charge", "legacy").await.to_string();

    let sorted = |mut ids: Vec<String>| {
        ids.sort();
        ids
    };
    assert_eq!(sorted(admin.ids("?scope=host=acme.example").await), sorted(vec![one.clone(), two.clone()]));
    assert!(admin.ids("?scope=host=nobody.example").await.is_empty());
    // Page by page, where each page of the store is longer.
    let first = admin.get("/api/v1/records?scope=host=acme.example&limit=1").await.json();
    let next = first["next"].as_str().unwrap();
    let second = admin.get(&format!("/api/v1/records?scope=host=acme.example&limit=1&cursor={next}")).await.json();
    let ids = [first, second].map(|page| page["records"][0]["id"].as_str().unwrap().to_owned());
    assert_eq!(sorted(ids.to_vec()), sorted(vec![one.clone(), two.clone()]));
    // A part that no route has finds no records, and the answer says so.
    for unused in ["cookie:session=a", "X-Api-Key:a"] {
        let nothing = admin.get(&format!("/api/v1/records?scope={unused}")).await;
        nothing.is_problem(404, "not-found").says("credential=NAME: VALUE");
        let nothing = admin.bulk("purge", json!({"filter": {"scope": unused}, "dry_run": true})).await;
        // One does not say whose it is.
        assert_eq!(nothing.json()["of_unknown_scope"], 1);
    }
    let filter = json!({"scope": "host=ACME.example"});
    let dry = admin.bulk("purge", json!({"filter": filter, "dry_run": true})).await.json();
    assert_eq!((&dry["matched"], &dry["of_unknown_scope"]), (&json!(2), &json!(1)));
    let done = admin.bulk("purge", json!({"filter": filter, "reason": "a test"})).await.json();
    assert_eq!(
        (&done["done"], &done["of_unknown_scope"], &done["ids"]),
        (&json!(2), &json!(1), &json!(sorted(vec![one, two])))
    );
    assert_eq!(sorted(admin.ids("").await), sorted(vec![other, legacy]));
    for wrong in ["acme", "const:x=y", "client-ip=here"] {
        let refused = admin.bulk("purge", json!({"filter": {"scope": wrong}, "reason": "a test"})).await;
        refused.is_problem(400, "bad-request").says("`scope`");
    }
}

/// What an operator has looked at is what is changed, and nothing that comes later.
#[tokio::test]
async fn what_comes_after_the_dry_run_is_left_alone() {
    let admin = start(None).await;
    let (seen, _) = admin.unknown("charge", "seen").await;
    let (running, attempt) = admin.claim("charge", "running").await;
    admin.pass(Duration::from_secs(1));
    let body = |more: Value| {
        let mut body = json!({"filter": {"state": "unknown"}, "action": "release", "reason": "not in the ledger"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let dry = admin.bulk("resolve", body(json!({"dry_run": true}))).await.json();
    assert_eq!((&dry["matched"], &dry["ids"]), (&json!(1), &json!([seen.to_string()])));
    admin.pass(Duration::from_secs(1));
    // One turns unknown, and one is claimed and turns unknown, while the operator looks into the ledger.
    admin.end(running, attempt, Settlement::Hold { cause: UnknownCause::Shutdown.encode() }).await;
    admin.unknown("charge", "later").await;
    let done = admin.bulk("resolve", body(json!({"as_of": dry["as_of"]}))).await.json();
    assert_eq!((&done["matched"], &done["done"], &done["as_of"]), (&json!(1), &json!(1), &dry["as_of"]));
    assert_eq!(admin.store.count().await.unwrap(), [0, 0, 2]);
    let wrong = admin.bulk("resolve", body(json!({"as_of": "yesterday"}))).await;
    wrong.is_problem(400, "bad-request").says("`as_of` must be");
}

/// Records grow older while the operator looks into the ledger.
#[tokio::test]
async fn ages_count_at_the_time_of_the_dry_run() {
    for (name, age) in [("old", json!({"older_than": "1m"})), ("young", json!({"since": "1m"}))] {
        let admin = start(None).await;
        let (old, _) = admin.unknown("charge", "old").await;
        admin.pass(Duration::from_secs(90));
        let (young, _) = admin.unknown("charge", "young").await;
        let meant = json!([if name == "old" { old } else { young }.to_string()]);
        let dry = admin.bulk("purge", json!({"filter": age, "dry_run": true})).await.json();
        assert_eq!(dry["ids"], meant);
        admin.pass(Duration::from_secs(90));
        let body = json!({"filter": age, "reason": "not in the ledger", "as_of": dry["as_of"]});
        let done = admin.bulk("purge", body).await.json();
        assert_eq!((&done["done"], &done["ids"]), (&json!(1), &meant), "{name}");
        assert_eq!(admin.store.count().await.unwrap(), [0, 0, 1]);
    }
}

#[tokio::test]
async fn all_unknown_records_that_a_filter_finds_are_resolved() {
    let admin = start(None).await;
    for n in 0..20 {
        admin.unknown("charge", &format!("key-{n}")).await;
        admin.claim("charge", &format!("running-{n}")).await;
    }
    let (other, _) = admin.unknown("refund", KEY).await;
    let release = |filter: Value| json!({"filter": filter, "action": "release", "reason": "not in the ledger"});
    let done = admin.bulk("resolve", release(json!({"route": "charge"}))).await.json();
    assert_eq!((&done["matched"], &done["done"]), (&json!(20), &json!(20)));
    assert_eq!(admin.store.count().await.unwrap(), [20, 0, 1]);
    let complete = json!({"all": true, "action": "complete", "status": 200, "body_base64": "b2s=", "reason": "seen"});
    assert_eq!(admin.bulk("resolve", complete).await.json()["done"], 1);
    assert_eq!(admin.store.get(other).await.unwrap().unwrap().record.state, State::Completed);
    let problem = admin.bulk("resolve", release(json!({"state": "completed"}))).await;
    problem.is_problem(400, "bad-request").says("`unknown` only");
    let retry = json!({"all": true, "action": "retry", "reason": "x"});
    admin.bulk("resolve", retry).await.is_problem(400, "bad-request").says("`action`");
}

#[tokio::test]
async fn a_change_of_many_says_which_and_why() {
    let admin = start(None).await;
    admin.unknown("charge", KEY).await;
    for (body, said) in [
        (json!({"reason": "x"}), "`filter` is empty"),
        (json!({"filter": {}, "reason": "x"}), "`filter` is empty"),
        (json!({"filter": {"state": "unknown"}}), "`reason` is empty"),
        (json!({"filter": {"state": "unknown"}, "reason": " "}), "`reason` is empty"),
        (
            json!({"filter": {"state": "unknown"}, "reason": "x".repeat(2001), "dry_run": true}),
            "longer than 2000 bytes",
        ),
        (json!({"filter": {"state": "unknown"}, "all": true, "reason": "x"}), "do not go together"),
        (json!({"filter": {"state": "lost"}, "reason": "x"}), "`state` must be one of"),
        (json!({"filter": {"route": ""}, "reason": "x"}), "`route` is empty"),
        (json!({"filter": {"sate": "unknown"}, "reason": "x"}), "unknown member `sate` at line 1, column 17; "),
        (json!({"filter": {"sate": "unknown"}, "reason": "x"}), "{\"filter\": {...}, \"all\": false, "),
        (json!({"filter": {"state": "unknown", "route": null}, "reason": "x"}), "not of the form"),
        (json!({"filter": ["unknown"], "reason": "x"}), "not of the form"),
        (json!({"filter": [], "all": true, "reason": "x"}), "not of the form"),
        (json!([{"state": "unknown"}, false, false, "x"]), "not of the form"),
        (json!({"filter": {"older_than": "0s"}, "reason": "x"}), "`older_than` must be"),
        (json!({"filter": {"state": "unknown"}, "force": true, "reason": "x"}), "unknown member `force` at "),
        (json!({"all": true, "after": "x", "reason": "x"}), "`after` must be"),
    ] {
        admin.bulk("purge", body).await.is_problem(400, "bad-request").says(said);
    }
    assert_eq!(admin.store.count().await.unwrap(), [0, 0, 1]);
}

/// A record that was claimed again since it was found has an attempt that runs: it stays.
#[tokio::test]
async fn what_changed_meanwhile_is_left_alone() {
    let (admin, store) = start_unreliable().await;
    let (held, _) = admin.unknown("charge", "held").await;
    let kept = admin.completed("charge", "kept").await;
    // Between the scan and the changes.
    store.script_for(Operation::Settle, [Fault::Delay(Duration::from_millis(200))]);
    store.script_for(Operation::Remove, [Fault::Delay(Duration::from_millis(200))]);
    let purge = admin.bulk("purge", json!({"all": true, "reason": "a test"}));
    let claim_again = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        for id in [held, kept] {
            let seen = admin.store.get(id).await.unwrap().unwrap().record.version();
            assert!(admin.store.supersede(id, seen, fresh()).await.unwrap());
        }
    };
    let (reply, ()) = tokio::join!(purge, claim_again);
    let report = reply.json();
    assert_eq!((&report["matched"], &report["done"], &report["failed"]), (&json!(2), &json!(0), &json!(0)));
    assert_eq!(admin.store.count().await.unwrap(), [2, 0, 0]);
}

/// With another id secret, the same caller has other tags: not to have the tags that are looked for says nothing of whose it is.
#[tokio::test]
async fn a_record_that_other_rules_made_may_be_of_anybody() {
    let admin = start(None).await;
    let rules = |digest| NamespaceRuleSet {
        service: origin("charge").service,
        namespace: origin("charge").namespace,
        digest: [digest; 32],
        others: Vec::new(),
        description: None,
    };
    admin.store.adopt(vec![origin("charge")], vec![rules(1)], false).await.unwrap();
    let key = Key::parse("k-1", 255).unwrap();
    let fingerprint = Fingerprint { recipe: Recipe::default(), digest: [7; 32] };
    let details = Details { scope: Some(Vec::new()), rules: Some(RulesTag::of(&[1; 32])), ..Details::default() };
    let head = Head::new(fingerprint, Method::POST, "/v1", &key).with_details(&details);
    admin.store.claim(RecordId([1; 32]), NewRecord { head: head.encode(), ..fresh() }).await.unwrap();
    let of_unknown_scope = async || {
        let purge = json!({"filter": {"scope": "host=acme.example"}, "dry_run": true});
        admin.bulk("purge", purge).await.json()["of_unknown_scope"].clone()
    };
    assert_eq!(of_unknown_scope().await, Value::Null);
    admin.store.adopt(vec![origin("charge")], vec![rules(2)], true).await.unwrap();
    assert_eq!(of_unknown_scope().await, 1);
}

/// A store may carry a removal out late, when the record has expired and its key was claimed again.
#[tokio::test]
async fn a_removal_that_comes_late_leaves_the_newer_claim() {
    let (admin, store) = start_unreliable().await;
    let id = admin.completed("charge", "paid").await;
    admin.pass(Duration::from_secs(2 * 3600));
    store.script_for(Operation::Remove, [Fault::Delay(Duration::from_millis(200))]);
    let purge = admin.bulk("purge", json!({"filter": {"state": "completed"}, "reason": "a test"}));
    let seen = admin.store.get(id).await.unwrap().unwrap().record.version();
    let claim_again = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(admin.store.supersede(id, seen, fresh()).await.unwrap(), "it expired");
    };
    let (reply, ()) = tokio::join!(purge, claim_again);
    assert_eq!(reply.json()["done"], 0);
    assert_eq!(admin.store.count().await.unwrap(), [1, 0, 0], "an attempt runs");
}

#[tokio::test]
async fn a_change_of_many_that_breaks_off_says_what_was_done() {
    let (admin, store) = start_unreliable().await;
    for n in 0..100 {
        admin.unknown("charge", &format!("key-{n}")).await;
    }
    let body = json!({"filter": {"state": "unknown"}, "action": "release", "reason": "a test"});
    store.script_for(Operation::Settle, vec![Fault::Refuse; 3]);
    let report = admin.bulk("resolve", body.clone()).await.json();
    assert_eq!((&report["matched"], &report["done"], &report["failed"]), (&json!(100), &json!(97), &json!(3)));
    for n in 0..97 {
        admin.unknown("charge", &format!("other-{n}")).await;
    }
    store.script_for(Operation::Settle, vec![Fault::Refuse; 60]);
    let reply = admin.bulk("resolve", body.clone()).await;
    reply.is_problem(503, "store-unavailable").says("it broke off: of 100 records");
    let problem = reply.json();
    let left = admin.store.count().await.unwrap()[2];
    assert_eq!((&problem["matched"], problem["done"].as_u64()), (&json!(100), Some(100 - left)));
    assert!(problem["failed"].as_u64().unwrap() >= 16);
    store.script_for(Operation::List, [Fault::Refuse]);
    let reply = admin.bulk("resolve", body.clone()).await;
    let nothing = "the store failed before any record was looked at; nothing was changed; see the log";
    reply.is_problem(503, "store-unavailable").says(nothing);
    store.script_for(Operation::List, [Fault::Refuse]);
    let trial = json!({"filter": body["filter"], "dry_run": true});
    admin.bulk("purge", trial).await.is_problem(503, "store-unavailable").says(nothing);
}

/// Two databases that are open.
struct TwoDatabases;

#[async_trait::async_trait]
impl Databases for TwoDatabases {
    async fn open(&self, _: usize) -> Result<Arc<dyn Store>, String> {
        Err("it is open".to_owned())
    }

    async fn routes(&self, _: &[DatabaseId]) -> Result<DatabaseMap, NotKnown> {
        Ok(DatabaseMap::fixed(2))
    }

    fn observed(&self, _: usize, _: bool) {}
}

/// The half that can be reached would be changed, and the other half not.
#[tokio::test]
async fn nothing_is_changed_while_a_database_of_the_store_is_away() {
    let admin = start_without_store(None).await;
    let now = admin.now.clone();
    let clock = Arc::new(move || Timestamp(now.load(std::sync::atomic::Ordering::SeqCst)));
    let other = Arc::new(Unreliable::new(Arc::new(Memory::with_clock(clock))));
    let stores = [admin.store.clone() as Arc<dyn Store>, other.clone()];
    let opened = ["first", "second"].into_iter().zip(stores).map(|(name, store)| (name.into(), Some(store)));
    let store = Sharded::new(opened.collect(), DatabaseMap::fixed(2), Arc::new(TwoDatabases));
    store.adopt(vec![origin("charge")], Vec::new(), false).await.unwrap();
    // More than are looked for at once are in the first one.
    for number in 0..400_u64 {
        let mut id = RecordId([if number < 300 { 0x10 } else { 0xf0 }; 32]);
        id.0[8..16].copy_from_slice(&number.to_be_bytes());
        store.claim(id, fresh()).await.unwrap();
        let end = if number % 2 == 1 {
            Settlement::Hold { cause: UnknownCause::Shutdown.encode() }
        } else {
            let answer = Bytes::from_static(b"answer");
            Settlement::Complete { answer, expiry: Expiry::FromNow(LEASE) }
        };
        store.settle(id, AttemptToken([7; 16]), end).await.unwrap();
    }
    let (store, count) = (Arc::new(store), [0, 200, 200]);
    assert_eq!(store.count().await.unwrap(), count);
    admin.state.set_store(store.clone());
    let release = json!({"all": true, "action": "release", "reason": "a test"});
    let purge = json!({"filter": {"state": "completed"}, "reason": "a test"});
    let changes = [
        ("purge", purge),
        ("purge", json!({"all": true, "dry_run": true})),
        ("resolve", release),
        ("retry", json!({"all": true, "reason": "a test"})),
    ];
    let began = std::time::Instant::now();
    for (change, body) in changes {
        other.set_away(true);
        let refused = admin.bulk(change, body.clone()).await;
        assert_eq!(admin.store.count().await.unwrap(), [0, 150, 150], "{change}");
        refused.is_problem(503, "store-unavailable").says("second");
        refused.says("nothing was changed");
        // One that answers nothing at all costs no more time.
        other.set_away(false);
        other.script([Fault::Hang]);
        admin.bulk(change, body).await.is_problem(503, "store-unavailable").says("second");
        assert_eq!(store.count().await.unwrap(), count, "{change}");
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let purge = json!({"filter": {"state": "completed"}, "reason": "a test"});
    assert_eq!(admin.bulk("purge", purge).await.json()["done"], 200);
}
