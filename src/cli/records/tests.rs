use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::time::Duration;

use bytes::Bytes;
use clap::Parser;
use serde_json::json;

use super::changing::with_content_type;
use super::*;
use crate::admin::testing::{Admin, start};
use crate::idempotency::codec::SEALED;
use crate::idempotency::record::{AttemptToken, RecordId};
use crate::store::deliveries::{self, DeliveryChange, DeliveryFilter, Take};
use crate::store::{NewRecord, OriginId, Store};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    records: RecordsArgs,
}

const ID: &str = "00000000000000000000000000000000000000000000000000000000000000ff";

async fn run(admin: &Admin, args: &[&str]) -> Result<String, String> {
    run_and_answer(admin, args, None).await
}

/// As a person who answers each question so.
async fn run_and_answer(admin: &Admin, args: &[&str], answer: Option<bool>) -> Result<String, String> {
    let address = admin.address.to_string();
    let args = ["records"].iter().chain(args).copied().chain(["--admin", &address]);
    let cli = Cli::try_parse_from(args).map_err(|error| error.to_string())?;
    let mut out = Vec::new();
    match execute(cli.records, &mut out, &move |_| answer).await {
        Ok(()) => Ok(String::from_utf8(out).unwrap()),
        Err(error) => Err(format!("{error:#}")),
    }
}

#[tokio::test]
async fn records_are_listed_as_a_table_and_as_json() {
    let admin = start(None).await;
    assert_eq!(run(&admin, &["list"]).await.unwrap(), "no records\n");
    for n in 0..5 {
        admin.unknown("charge", &format!("some-longer-key-{n}")).await;
    }
    let (id, _) = admin.claim("refund", "a+b/c=d&e").await;
    let table = run(&admin, &["list"]).await.unwrap();
    assert_eq!(table.lines().count(), 7);
    assert!(table.contains(&format!("{id}  in-flight  refund")), "{table}");
    let table = run(&admin, &["list", "--state", "unknown", "--limit", "2"]).await.unwrap();
    assert_eq!(table.lines().count(), 4);
    let next = table.lines().last().unwrap().strip_prefix("next: ").unwrap();
    let rest = run(&admin, &["list", "--state", "unknown", "--after", next]).await.unwrap();
    assert_eq!(rest.lines().count(), 4, "{rest}");
    let some = run(&admin, &["list", "--id", &id.to_string()[..17], "--since", "1h"]).await.unwrap();
    assert_eq!(some.lines().count(), 2, "{some}");
    let json = run(&admin, &["list", "--key", "a+b/c=d&e", "--json"]).await.unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["records"][0]["id"], &json["next"]), (&json!(id.to_string()), &Value::Null));
    let error = run(&admin, &["list", "--older-than", "soon"]).await.unwrap_err();
    assert!(
        error.contains("'--older-than <DURATION>': must be a duration above zero, such as 90s, 1h or 7d"),
        "{error}"
    );
}

#[tokio::test]
async fn a_list_follows_the_pages() {
    let admin = start(None).await;
    for n in 0..1100 {
        admin.claim("charge", &format!("key-{n}")).await;
    }
    let table = run(&admin, &["list", "--limit", "5000"]).await.unwrap();
    assert_eq!(table.lines().count(), 1101);
    let table = run(&admin, &["list", "--limit", "1050"]).await.unwrap();
    assert_eq!(table.lines().count(), 1052);
    let table = run(&admin, &["list", "--all"]).await.unwrap();
    assert_eq!((table.lines().count(), table.contains("next:")), (1101, false));
    let ids: Vec<&str> = table.lines().skip(1).map(|line| &line[..64]).collect();
    assert!(ids.is_sorted_by(|earlier, later| earlier > later), "claimed at one time");
    let json: Value = serde_json::from_str(&run(&admin, &["list", "--all", "--json"]).await.unwrap()).unwrap();
    let listed: Vec<_> = records_of(&json).unwrap().iter().map(|record| record["id"].as_str().unwrap()).collect();
    assert_eq!((listed, &json["next"]), (ids, &Value::Null));
    let json = run(&admin, &["list", "--all", "--json", "--route", "nothing"]).await.unwrap();
    assert_eq!(json, "{\n  \"records\": [],\n  \"next\": null\n}\n");
}

#[tokio::test]
async fn an_accepted_request_without_a_record_is_named_by_the_start_of_its_id() {
    let admin = start(None).await;
    let id = admin.accept("charge", "queued").await.to_string();
    let error = run(&admin, &["show", &id[..8].to_uppercase()]).await.unwrap_err();
    assert!(error.contains("it is an accepted request"), "{error}");
    let error = run(&admin, &["retry", &id[..8]]).await.unwrap_err();
    assert!(error.starts_with("no dead delivery has an id that starts with"), "{error}");
    let error = run(&admin, &["resolve", &id, "--release", "--reason", "x"]).await.unwrap_err();
    assert!(error.contains("it is an accepted request. `oncegate deliveries list`"), "{error}");
    let error = run(&admin, &["retry", &id]).await.unwrap_err();
    assert!(error.starts_with("already-queued: "), "{error}");
    let trial = run(&admin, &["purge", &id[..8], "--dry-run"]).await.unwrap();
    assert!(
        trial.starts_with("1 accepted request would be discarded, and not delivered; nothing was changed"),
        "{trial}"
    );
    // Ids of one key start with the same 16 digits: what stands for another caller is not taken for it.
    let (other, _) = admin.unknown("refund", "queued").await;
    for ambiguous in [&id[..8], &other.to_string()[..16]] {
        let error = run(&admin, &["purge", ambiguous, "--reason", "x"]).await.unwrap_err();
        assert!(error.starts_with("more than one id starts with") && error.contains(&id), "{error}");
    }
    let discarded = run(&admin, &["purge", &id, "--reason", "x"]).await.unwrap();
    assert_eq!(discarded, format!("{id} discarded: this accepted request is not delivered; its key is free\n"));
    run(&admin, &["purge", &id[..8], "--reason", "x"]).await.unwrap();
    let error = run(&admin, &["show", &id[..8]]).await.unwrap_err();
    assert!(error.starts_with("no record and no accepted request has an id"), "{error}");
}

#[tokio::test]
async fn a_retry_on_a_paused_route_waits_for_its_resumption() {
    let admin = start(None).await;
    let mut ids = Vec::new();
    for key in ["first", "second"] {
        ids.push(admin.accept("charge", key).await.to_string());
    }
    let queue = deliveries::of(&*admin.store).unwrap();
    let origin = queue.deliveries(DeliveryFilter::default(), None, 1).await.unwrap().deliveries[0].origin.clone();
    let (origin, hold) = (origin.unwrap().id(), Duration::from_secs(60));
    let take = Take { origin, limit: 2, max_bytes: 1 << 20, hold, is_ordered: false };
    for taken in queue.take_due(take).await.unwrap().taken {
        let park = DeliveryChange::Park { ttl: hold, is_attempt: true, note: Bytes::from_static(b"released") };
        assert!(queue.change(taken.held(), park).await.unwrap());
    }
    let retry = async |id: &str| run(&admin, &["retry", id]).await.unwrap();
    let attempts = "with as many attempts as a new one\n";
    assert_eq!(retry(&ids[0]).await, format!("{} queued: it is delivered again, {attempts}", ids[0]));
    assert!(queue.pause(origin, true).await.unwrap());
    let once = "once the route charge is resumed";
    assert_eq!(retry(&ids[1]).await, format!("{} queued: it is delivered again {once}, {attempts}", ids[1]));
}

#[tokio::test]
async fn a_record_is_named_by_the_start_of_its_id() {
    let admin = start(None).await;
    // Ids of one key start with the same 16 digits.
    let (one, _) = admin.unknown("charge", "same").await;
    let (other, _) = admin.unknown("refund", "same").await;
    let (one, other) = (one.to_string(), other.to_string());
    let shown = run(&admin, &["show", &one[..18].to_uppercase()]).await.unwrap();
    assert!(shown.contains(&one), "{shown}");
    let error = run(&admin, &["show", &one[..8]]).await.unwrap_err();
    assert!(error.starts_with("more than one id starts with"), "{error}");
    assert!(error.contains(&one) && error.contains(&other), "{error}");
    let error = run(&admin, &["purge", "00000000", "--reason", "x"]).await.unwrap_err();
    assert_eq!(error, "no record and no accepted request has an id that starts with 00000000");
    let released = run(&admin, &["resolve", &one[..18], "--release"]).await.unwrap();
    assert_eq!(released, format!("{one} released: its key is free\n"));
    run(&admin, &["purge", &other[..8]]).await.unwrap();
    assert_eq!(run(&admin, &["list"]).await.unwrap(), "no records\n");
}

#[tokio::test]
async fn all_that_a_filter_finds_is_changed_once_that_is_confirmed() {
    let admin = start(None).await;
    for n in 0..12 {
        admin.unknown("charge", &format!("key-{n}")).await;
    }
    let (running, _) = admin.claim("refund", "running").await;
    let release = ["resolve", "--route", "charge", "--release", "--reason", "x"];
    let dry = run(&admin, &[&release[..], &["--dry-run"]].concat()).await.unwrap();
    assert!(dry.starts_with("12 records would be released; nothing was changed\nthe newest 10 of them:\nID "), "{dry}");
    assert_eq!(dry.lines().count(), 14);
    let as_of = dry.trim_end().rsplit_once("come later: --as-of ").unwrap().1.strip_suffix(" --yes").unwrap();
    admin.pass(Duration::from_secs(1));
    admin.unknown("charge", "later").await;
    let dry = run(&admin, &[&release[..], &["--dry-run", "--as-of", as_of]].concat()).await.unwrap();
    assert!(dry.starts_with("12 records would be released; "), "{dry}");
    run(&admin, &["resolve", "--key", "later", "--release", "--reason", "x", "--yes"]).await.unwrap();
    assert_eq!(
        run(&admin, &release).await.unwrap_err(),
        "12 records would be released: give --yes to do it, or --dry-run to see what it would be"
    );
    assert_eq!(run_and_answer(&admin, &release, Some(false)).await.unwrap_err(), "nothing was changed");
    assert_eq!(run(&admin, &["list", "--state", "unknown"]).await.unwrap().lines().count(), 13);
    assert_eq!(run_and_answer(&admin, &release, Some(true)).await.unwrap(), "12 records released\n");
    assert_eq!(run(&admin, &release).await.unwrap(), "no records\n");
    let left = "1 record in flight left alone, as their attempts run: --state in-flight is for these\n";
    let all = ["purge", "--all", "--reason", "x"];
    assert_eq!(run(&admin, &all).await.unwrap(), format!("no records\n{left}"));
    assert_eq!(run(&admin, &[&all[..], &["--yes"]].concat()).await.unwrap(), format!("0 records removed\n{left}"));
    let purge = ["purge", "--state", "in-flight", "--reason", "x"];
    assert!(run(&admin, &purge).await.unwrap_err().starts_with("1 record would be removed: "));
    let dry = run(&admin, &["purge", "--state", "in-flight", "--dry-run"]).await.unwrap();
    assert!(dry.starts_with("1 record would be removed; nothing was changed\nID "), "{dry}");
    let dry = run(&admin, &["purge", &running.to_string()[..8], "--dry-run"]).await.unwrap();
    assert!(dry.contains(&format!("{running}  in-flight  refund")), "{dry}");
    let error = run(&admin, &["resolve", &running.to_string(), "--release", "--dry-run"]).await.unwrap_err();
    assert_eq!(error, "the record is in-flight: only an unknown one can be resolved");
    assert_eq!(run(&admin, &[&purge[..], &["--yes"]].concat()).await.unwrap(), "1 record removed\n");
    let (held, _) = admin.unknown("charge", "held").await;
    let complete =
        ["resolve", "--state", "unknown", "--complete", "--status", "200", "--body", "{}", "--yes", "--reason", "x"];
    assert_eq!(run(&admin, &complete).await.unwrap(), "1 record completed\n");
    let shown: Value =
        serde_json::from_str(&run(&admin, &["show", &held.to_string(), "--json"]).await.unwrap()).unwrap();
    assert_eq!((&shown["state"], &shown["status"]), (&json!("completed"), &json!(200)));
}

#[tokio::test]
async fn a_record_is_shown_resolved_and_purged() {
    let admin = start(None).await;
    let (id, _) = admin.unknown("charge", "one").await;
    let id = id.to_string();
    let shown = run(&admin, &["show", &id]).await.unwrap();
    for line in ["state            unknown", "unknown_because  shutdown: the gate shut down", "upstream         app"] {
        assert!(shown.contains(line), "{shown}");
    }
    let shown = run(&admin, &["show", &id, "--answer", "--reveal-key"]).await.unwrap();
    for line in [
        "this record does not keep its key: only routes with recovery.every do",
        "no answer is kept: the outcome is unknown",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{shown}");
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), b"\x00paid").unwrap();
    let body = format!("@{}", file.path().display());
    let complete =
        ["resolve", &id, "--complete", "--status", "201", "--header", "X-Id: 7", "--body", &body, "--reason", "ledger"];
    assert_eq!(run(&admin, &complete).await.unwrap(), format!("{id} completed: retries get this answer\n"));
    let shown: Value = serde_json::from_str(&run(&admin, &["show", &id, "--json"]).await.unwrap()).unwrap();
    assert_eq!((&shown["status"], &shown["body_bytes"], shown.get("answer")), (&json!(201), &json!(5), None));
    let whole: Value = serde_json::from_str(&run(&admin, &["show", &id, "--answer", "--json"]).await.unwrap()).unwrap();
    let answer = json!({"headers": [["x-id", "7"]], "body_base64": STANDARD.encode(b"\x00paid"), "trailers": []});
    assert_eq!(whole["answer"], answer);
    assert!(!run(&admin, &["show", &id, "--answer"]).await.unwrap().contains("no answer"));
    assert!(run(&admin, &["show", &id, "--answer"]).await.unwrap().ends_with("\nx-id: 7\n\n\\u{0}paid\n"));
    let release = ["resolve", &id, "--release", "--reason", "again"];
    assert!(run(&admin, &release).await.unwrap_err().starts_with("not-unknown: "));
    assert_eq!(
        run(&admin, &["purge", &id, "--reason", "a test"]).await.unwrap(),
        format!("{id} removed: its key is free; an attempt that still runs is not stopped\n")
    );
    assert!(run(&admin, &["show", &id]).await.unwrap_err().starts_with("not-found: "));
    let (id, _) = admin.unknown("charge", "two").await;
    let id = id.to_string();
    let release = ["resolve", &id, "--release", "--reason", "no charge"];
    assert_eq!(run(&admin, &release).await.unwrap(), format!("{id} released: its key is free\n"));
}

/// Its retries would get 503 still.
#[tokio::test]
async fn a_record_that_the_gate_cannot_read_says_so_and_is_not_completed() {
    let admin = start(None).await;
    let (id, minute) = (RecordId([3; 32]), Duration::from_secs(60));
    for (head, said) in
        [(&SEALED[..], "it is encrypted, and no key of this gate opens it"), (&[9, 9], "a later version")]
    {
        let (attempt, origin, head) = (AttemptToken([1; 16]), OriginId(1), Bytes::copy_from_slice(head));
        let fresh = NewRecord { attempt, origin, lease: minute, ttl: minute, unknown_ttl: 2 * minute, head };
        admin.store.claim(id, fresh).await.unwrap();
        admin.pass(minute);
        admin.store.expire_leases(10).await.unwrap();
        let id = id.to_string();
        let shown = run(&admin, &["show", &id]).await.unwrap();
        assert!(shown.contains("unreadable: this gate cannot read the record") && shown.contains(said), "{shown}");
        assert!(!shown.contains("did not write why"), "{shown}");
        let complete = ["resolve", &id, "--complete", "--status", "200", "--reason", "ledger"];
        let refused = run(&admin, &complete).await.unwrap_err();
        assert!(refused.starts_with("unreadable: "), "{refused}");
        let release = ["resolve", &id, "--release", "--reason", "ledger"];
        assert_eq!(run(&admin, &release).await.unwrap(), format!("{id} released: its key is free\n"));
    }
}

#[tokio::test]
async fn a_token_comes_from_a_file() {
    let admin = start(Some("s3cret")).await;
    let error = run(&admin, &["list"]).await.unwrap_err();
    assert!(error.starts_with("unauthorized: ") && error.ends_with("--token-file"), "{error}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    assert!(run(&admin, &["list", "--token-file", path]).await.unwrap_err().contains("holds no token"));
    std::fs::write(path, "s3cret\n").unwrap();
    assert_eq!(run(&admin, &["list", "--token-file", path]).await.unwrap(), "no records\n");
}

#[tokio::test]
async fn nobody_listening_is_said_with_the_address() {
    let mut out = Vec::new();
    // Port 1 is not one that anything is given by the system.
    let cli = Cli::try_parse_from(["records", "list", "--admin", "127.0.0.1:1"]).ok().unwrap();
    let error = format!("{:#}", execute(cli.records, &mut out, &|_| None).await.unwrap_err());
    assert!(error.contains("nothing listens at 127.0.0.1:1") && error.contains("`oncegate serve`"), "{error}");
}

#[test]
fn a_retry_does_not_offer_a_state() {
    let error = Cli::try_parse_from(["records", "retry"]).err().unwrap().to_string();
    assert!(error.contains("--route <NAME>") && !error.contains("--state"), "{error}");
    let error = Cli::try_parse_from(["records", "retry", "--state", "unknown", "--reason", "x"]).err().unwrap();
    assert!(error.to_string().contains("what can be retried is dead"), "{error}");
    let error = Cli::try_parse_from(["records", "purge"]).err().unwrap().to_string();
    assert!(error.contains("--state <STATE>"), "{error}");
}

#[test]
fn wrong_usage_is_refused() {
    for args in [
        &["resolve", ID, "--reason", "x"][..],
        &["resolve", "--route", "charge", "--release"],
        &["resolve", ID, "--release", "--reason", " "],
        &["resolve", ID, "--release", "--complete", "--status", "200", "--reason", "x"],
        &["resolve", ID, "--release", "--status", "200", "--reason", "x"],
        &["resolve", ID, "--complete", "--reason", "x"],
        &["resolve", ID, "--complete", "--status", "200", "--header", "nothing", "--reason", "x"],
        &["list", "--state", "lost"],
        &["list", "--limit", "0"],
        &["list", "--all", "--limit", "7"],
        &["list", "--id", "xyz"],
        &["list", "--id", ""],
        &["show", "ff"],
        &["show", "xyzxyzxyz"],
        &["purge", "--route", "charge"],
        &["purge", ID, "--reason", ""],
        &["purge", "--reason", "x"],
        &["purge", ID, "--route", "charge", "--reason", "x"],
        &["purge", ID, "--all", "--reason", "x"],
        &["purge", "--route", "charge", "--all", "--reason", "x"],
        &["resolve", "--release", "--reason", "x"],
        &["resolve", "--route", "charge", "--reason", "x"],
    ] {
        assert!(Cli::try_parse_from(["records"].iter().chain(args)).is_err(), "{args:?}");
    }
}

#[test]
fn json_gets_its_type() {
    let json = ("Content-Type".to_owned(), "application/json".to_owned());
    assert_eq!(with_content_type(Vec::new(), br#"{"id":"ch_7"}"#), [json]);
    let other = vec![("content-type".to_owned(), "application/vnd.api+json".to_owned())];
    assert_eq!(with_content_type(other.clone(), b"{}"), other);
    for body in [&b""[..], b"paid", b"{\"id\":", b"\x00"] {
        assert_eq!(with_content_type(Vec::new(), body), []);
    }
}
