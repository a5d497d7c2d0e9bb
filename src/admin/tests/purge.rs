//! One record is removed.

use super::*;

#[tokio::test]
async fn a_purge_by_id_leaves_a_request_that_was_accepted_after_the_record_had_expired() {
    let admin = start(None).await;
    let id = admin.completed("charge", KEY).await;
    admin.pass(Duration::from_secs(3601));
    admin.accept("charge", KEY).await;
    assert_eq!(admin.delete(id).await.status, 204);
    let queue = crate::store::deliveries::of(&*admin.store).unwrap();
    assert!(queue.delivery(id).await.unwrap().is_some(), "its client has a 202");
    assert_eq!(admin.delete(id).await.status, 204);
    assert!(queue.delivery(id).await.unwrap().is_none(), "without a record, the id names the request");
}

#[tokio::test]
async fn a_record_is_removed_whatever_its_state() {
    let admin = start(None).await;
    let (running, _) = admin.claim("charge", KEY).await;
    let kept = admin.completed("refund", KEY).await;
    for id in [running, kept] {
        let reply = admin.delete(id).await;
        assert_eq!((reply.status, &*reply.body), (204, ""));
        admin.delete(id).await.is_problem(404, "not-found");
    }
}

/// An operator who looked at an unknown record must not remove the answer that a retry got since.
#[tokio::test]
async fn only_what_was_shown_is_changed_where_the_request_says_what_that_was() {
    let admin = start(None).await;
    let host = format!("Host: {}\r\n", admin.address);
    let tag = async |id: RecordId| {
        let shown = admin.get(&format!("/api/v1/records/{id}")).await;
        let line = shown.head.lines().find(|line| line.starts_with("etag: ")).expect("an ETag").to_owned();
        line["etag: ".len()..].to_owned()
    };
    let with = |tag: &str| format!("{host}If-Match: {tag}\r\n");
    let release = r#"{"action": "release"}"#;
    let resolve = async |id: RecordId, tag: &str| {
        let head = format!("{}Content-Type: application/json\r\n", with(tag));
        admin.send(&format!("POST /api/v1/records/{id}/resolve"), &head, release).await
    };
    let delete =
        async |id: RecordId, tag: &str| admin.send(&format!("DELETE /api/v1/records/{id}"), &with(tag), "").await;
    let (id, attempt) = admin.claim("charge", KEY).await;
    let in_flight = tag(id).await;
    admin.pass(Duration::from_secs(1));
    assert_eq!(tag(id).await, in_flight, "time alone changes nothing");
    admin
        .end(id, attempt, Settlement::Hold { cause: crate::idempotency::unknown::UnknownCause::Shutdown.encode() })
        .await;
    let unknown = tag(id).await;
    assert_ne!(unknown, in_flight);
    resolve(id, &in_flight).await.is_problem(412, "record-changed");
    delete(id, &format!("W/{in_flight}, \"x\"")).await.is_problem(412, "record-changed");
    // As a proxy hands it on that compresses.
    assert_eq!(resolve(id, &format!("\"x\", W/{unknown}")).await.status, 204);
    delete(id, &unknown).await.is_problem(412, "record-changed");
    delete(id, "*").await.is_problem(412, "record-changed");
    // A retry has run since.
    let id = admin.completed("charge", KEY).await;
    delete(id, &unknown).await.is_problem(412, "record-changed");
    assert_eq!(delete(id, &tag(id).await).await.status, 204);
}

#[tokio::test]
async fn a_removal_may_give_its_reason() {
    let admin = start(None).await;
    let id = admin.completed("refund", KEY).await;
    let host = format!("Host: {}\r\n", admin.address);
    let delete = async |query: &str| admin.send(&format!("DELETE /api/v1/records/{id}?{query}"), &host, "").await;
    delete("reason=").await.is_problem(400, "bad-request").says("`reason` is empty");
    delete("reason=%20").await.is_problem(400, "bad-request").says("`reason` is empty");
    delete("reason=%07%0a").await.is_problem(400, "bad-request").says("`reason` is empty");
    delete("why=x").await.is_problem(400, "bad-request").says("known are: reason");
    delete(&format!("reason={}", "x".repeat(2001))).await.is_problem(400, "bad-request").says("longer than 2000");
    assert_eq!(delete("reason=twice").await.status, 204);
}
