//! Asking the store for a claim.

use std::future::Future;
use std::sync::Arc;

use super::flights::Lead;
use super::settling;
use crate::idempotency::record::{Attempt, Record, RecordId, State, Timestamp, Version};
use crate::store::{Claim, End, Error, Fresh, Store};

/// What asking the store came to.
pub(super) enum Asked {
    /// The claim is this request's.
    Ours,
    /// This stands.
    Theirs { record: Record, now: Timestamp },
    /// Something else stands by now.
    Again,
}

/// Asks the store for a claim: for a new record, or in the place of the one that was `seen`.
pub(super) async fn ask(
    store: Arc<dyn Store>,
    id: RecordId,
    seen: Option<Version>,
    fresh: Fresh,
) -> Result<Asked, Error> {
    if let Some(seen) = seen {
        let superseded = settling::supersede(&*store, id, seen, &fresh).await?;
        // Otherwise somebody else was first: look again.
        return Ok(if superseded { Asked::Ours } else { Asked::Again });
    }
    match settling::claim(&*store, id, &fresh).await? {
        Claim::Inserted(_) => Ok(Asked::Ours),
        Claim::Exists { record, .. } if record.attempt == fresh.attempt && record.state == State::Unknown => {
            // This very claim, written by a question that seemed to fail, whose lease is past by now. Nothing was sent
            // under it.
            settling::settle(&*store, id, fresh.attempt, End::Release).await;
            Ok(Asked::Again)
        }
        Claim::Exists { record, now } => Ok(Asked::Theirs { record, now }),
    }
}

/// Sees a claim through that nobody waits for any more: it may be written yet, and nobody stands behind it.
pub(super) async fn give_up(
    store: &dyn Store,
    lead: Lead,
    attempt: Attempt,
    asking: impl Future<Output = Result<Asked, Error>>,
) {
    match asking.await {
        // Where something else stands, that may be this very takeover, turned unknown by now: its answer was lost, and its
        // lease is past. What is another's is not released.
        Ok(Asked::Ours | Asked::Again) => {
            settling::settle(store, lead.id(), attempt, End::Release).await;
        }
        Ok(Asked::Theirs { .. }) | Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use tokio::time::sleep;

    use super::super::flights::{Flights, Role};
    use super::*;
    use crate::store::OriginId;
    use crate::store::contract::model;
    use crate::store::memory::Memory;
    use crate::store::unreliable::{Fault, Operation, Unreliable};

    const ID: RecordId = RecordId([7; 32]);
    const LEASE: Duration = Duration::from_secs(1);

    fn fresh(attempt: u8) -> Fresh {
        let unknown_ttl = Duration::from_secs(3600);
        Fresh {
            attempt: Attempt([attempt; 16]),
            origin: OriginId(1),
            lease: LEASE,
            ttl: unknown_ttl,
            unknown_ttl,
            head: Bytes::new(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_takeover_that_was_given_up_is_released_though_it_turned_unknown() {
        let (clock, step) = model::stopped_clock();
        let store = Arc::new(Unreliable::new(Arc::new(Memory::with_clock(clock))));
        store.claim(ID, fresh(1)).await.unwrap();
        store.settle(ID, Attempt([1; 16]), End::Hold).await.unwrap();
        let seen = store.get(ID).await.unwrap().unwrap().record.version();

        store.script_for(Operation::Supersede, [Fault::LoseAnswer]);
        let Role::Lead(lead) = Arc::<Flights>::default().join(ID) else { panic!("nobody else leads") };
        let away = Arc::clone(&store);
        let given_up = tokio::spawn(async move {
            let asking = ask(Arc::clone(&away) as _, ID, Some(seen), fresh(2));
            give_up(&*away, lead, Attempt([2; 16]), asking).await;
        });
        // It is done, and about to be asked again.
        sleep(Duration::from_millis(1)).await;
        assert_eq!(store.get(ID).await.unwrap().unwrap().record.attempt, Attempt([2; 16]));
        step(LEASE);
        assert_eq!(store.expire_leases(1).await.unwrap(), 1);
        given_up.await.unwrap();
        assert!(store.get(ID).await.unwrap().is_none(), "nobody stands behind it");
    }
}
