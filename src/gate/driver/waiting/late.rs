//! What the store carries out when the gate has given it up.

use super::*;
use crate::idempotency::record::Record;
use crate::store::{CLAIM_EXPIRY, Claim, NewRecord, OriginId, RecordEntry, Settled, Settlement};

/// A database may carry out a withdrawal a second time, long after it seemed lost. It must not take the record of what runs.
#[tokio::test(start_paused = true)]
async fn a_claim_after_a_withdrawal_is_another_attempts() {
    let pair = pair(Policy::default());
    pair.store.script_for(Operation::Claim, [Fault::LoseAnswer, Fault::Delay(Duration::from_millis(500))]);
    let client = post(&pair.first);
    sleep(Duration::from_millis(200)).await;
    let page = pair.store.list(Filter::default(), None, 1).await.unwrap();
    let RecordEntry { id, record, .. } = &page.records[0];
    // As where its lease has passed.
    let held = pair.store.settle(*id, record.attempt, Settlement::Hold { cause: Bytes::new() }).await.unwrap();
    assert!(matches!(held, Settled::Done { .. }), "{held:?}");
    while pair.runs() == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    let late = pair.store.settle(*id, record.attempt, Settlement::Release).await.unwrap();
    assert!(matches!(late, Settled::NotCurrent { .. }), "{late:?}");
    pair.answer(OK);
    check(&client.await.unwrap(), "200", "executed", None);
    check(&post(&pair.other).await.unwrap(), "200", "replayed", None);
}

/// The connection of a claim may break, and the server carry it out when the key is free again.
#[tokio::test(start_paused = true)]
async fn what_a_claim_leaves_that_comes_late_is_released() {
    let pair = pair(Policy::default());
    pair.store.script_for(Operation::Claim, [Fault::LoseAnswer]);
    let client = post(&pair.first);
    while pair.runs() == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    let page = pair.store.list(Filter::default(), None, 1).await.unwrap();
    let RecordEntry { id, record, .. } = page.records[0].clone();
    pair.answer("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n");
    check(&client.await.unwrap(), "500", "released", None);
    let Record { attempt, head, .. } = record;
    let late = NewRecord { attempt, origin: OriginId(0), lease: WAIT, ttl: WAIT, unknown_ttl: WAIT, head };
    let claimed = pair.store.claim(id, late).await;
    assert!(matches!(claimed, Ok(Claim::Inserted(_))), "{claimed:?}");
    pair.store.script_for(Operation::Settle, [Fault::Refuse]);
    sleep(3 * CLAIM_EXPIRY).await;
    assert_eq!(pair.store.count().await.unwrap(), [0, 0, 0]);
}

/// The claim was in doubt and the attempt ran, so the gate keeps its record.
#[tokio::test(start_paused = true)]
async fn a_record_that_says_how_its_attempt_ended_stays() {
    let pair = pair(Policy::default());
    pair.store.script_for(Operation::Claim, [Fault::LoseAnswer]);
    let client = post(&pair.first);
    pair.answer("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n");
    check(&client.await.unwrap(), "502", "upstream-broken", None);
    sleep(3 * CLAIM_EXPIRY).await;
    assert_eq!(pair.store.count().await.unwrap(), [0, 0, 1]);
}
