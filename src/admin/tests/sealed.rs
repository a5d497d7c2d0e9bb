//! What a gate shows of values that it has no key for.

use super::*;
use crate::store::deliveries::{Deliveries, DeliveryChange, Lane, NewDelivery, Take};
use crate::store::sealed::{Keyring, Sealed, SealingKey};

fn sealed_with(key: u8, store: &Arc<Memory>) -> Arc<Sealed> {
    let keys = Keyring::new(vec![SealingKey::new("a".into(), &[key; 32])]);
    Arc::new(Sealed::new(Arc::clone(store) as Arc<dyn Store>, Arc::new(keys), "shop".into(), |_, _| {}))
}

/// It would stay 503 for retries, and the answer would go nowhere.
#[tokio::test]
async fn a_record_whose_key_is_missing_says_so_and_is_not_completed() {
    for has_other_key in [false, true] {
        let admin = start_without_store(None).await;
        admin.store.adopt(vec![origin("charge")], Vec::new(), false).await.unwrap();
        let (id, attempt) = (RecordId([3; 32]), AttemptToken([1; 16]));
        let (origin, lease) = (origin("charge").id(), LEASE);
        let fresh =
            NewRecord { attempt, origin, lease, ttl: lease, unknown_ttl: lease, head: Bytes::from_static(b"head") };
        sealed_with(1, &admin.store).claim(id, fresh).await.unwrap();
        admin.pass(LEASE);
        admin.store.expire_leases(10).await.unwrap();
        match has_other_key {
            true => admin.state.set_store(sealed_with(2, &admin.store)),
            false => admin.state.set_store(admin.store.clone()),
        }
        let shown = admin.get(&format!("/api/v1/records/{id}")).await.json();
        assert_eq!(
            (&shown["state"], &shown["unknown_because"], &shown["unreadable"], &shown["unreadable_because"]),
            (&json!("unknown"), &json!("unreadable"), &json!(true), &json!("encrypted"))
        );
        let complete = json!({"action": "complete", "status": 200});
        let refused = admin.resolve(id, complete).await;
        refused.is_problem(409, "unreadable").says("store.encryption_keys");
        let all = json!({"filter": {"state": "unknown"}, "action": "complete", "status": 200, "reason": "x"});
        let left = admin.bulk("resolve", all).await.json();
        assert_eq!((&left["matched"], &left["unreadable"], &left["done"]), (&json!(0), &json!(1), &json!(0)));
        assert_eq!(admin.store.get(id).await.unwrap().unwrap().record.state, State::Unknown);
        assert_eq!(admin.resolve(id, json!({"action": "release"})).await.status, 204, "its key is free then");
    }
}

#[tokio::test]
async fn what_became_of_a_delivery_is_not_shown_encrypted() {
    for has_other_key in [false, true] {
        let admin = start_without_store(None).await;
        admin.store.adopt(vec![origin("charge")], Vec::new(), false).await.unwrap();
        let (id, token, origin) = (RecordId([3; 32]), AttemptToken([1; 16]), origin("charge").id());
        let sealed = sealed_with(1, &admin.store);
        let (head, request, body) = (Bytes::from_static(b"head"), Bytes::from_static(b"request"), Bytes::new());
        sealed.accept(id, NewDelivery { token, origin, lane: Lane(0), head, request, body }).await.unwrap();
        let take = Take { origin, limit: 1, max_bytes: 100, hold: LEASE, is_ordered: false };
        let held = sealed.take_due(take).await.unwrap().taken.remove(0).held();
        let note = Bytes::from_static(b"outcome-unknown");
        sealed.change(held, DeliveryChange::Park { ttl: LEASE, is_attempt: false, note }).await.unwrap();
        match has_other_key {
            true => admin.state.set_store(sealed_with(2, &admin.store)),
            false => admin.state.set_store(admin.store.clone()),
        }
        let said = "encrypted with a key that this gate does not have";
        let listed = admin.get("/api/v1/deliveries").await.json();
        assert_eq!(listed["deliveries"][0]["reason"], said, "{listed}");
        // Nor does the log have it, nor the audit log.
        let (lines, _logging) = logged();
        assert_eq!(admin.delete(id).await.status, 204);
        let log = lines.text();
        let entries = admin.get("/api/v1/audit").await.body;
        assert!(entries.contains(said), "{entries}");
        assert!(!log.contains('\u{fffd}') && !entries.contains('\u{fffd}'), "{log}{entries}");
    }
}
