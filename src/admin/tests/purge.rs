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

#[tokio::test]
async fn a_removal_may_give_its_reason() {
    let admin = start(None).await;
    let id = admin.completed("refund", KEY).await;
    let host = format!("Host: {}\r\n", admin.address);
    let delete = async |query: &str| admin.send(&format!("DELETE /api/v1/records/{id}?{query}"), &host, "").await;
    delete("reason=").await.is_problem(400, "bad-request").says("`reason` is empty");
    delete("reason=%20").await.is_problem(400, "bad-request").says("`reason` is empty");
    delete("why=x").await.is_problem(400, "bad-request").says("known are: reason");
    delete(&format!("reason={}", "x".repeat(2001))).await.is_problem(400, "bad-request").says("longer than 2000");
    assert_eq!(delete("reason=twice").await.status, 204);
}
