//! Saying that live records need a key that is not configured.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::store::sealed::{Locked, Pace, Resealer};

/// How a start looks, when it serves already. Ids are digests, so the first records are a sample of all: a key that many need is
/// seen at once. The count by key looks at all of them.
const AT_START: Pace = Pace { patience: Duration::from_secs(5), pauses: true };

/// How a reload looks that removes a key. Its caller waits for that.
const AT_RELOAD: Pace = Pace { patience: Duration::from_secs(4), pauses: false };

/// How long a reload waits for it at most: one call of the store may take longer than all are to.
const LIMIT: Duration = Duration::from_secs(5);

/// What a reload says that did not see all records in time.
const UNKNOWN: &str =
    "it is not known whether records need a removed key: `oncegate_records_by_key` of this gate says so soon";

/// How many records need a key that is missing, and what that means; nothing where none was found.
pub(in crate::cli) fn in_words(locked: &Locked) -> Option<String> {
    let (least, count) = (if locked.is_partial { "at least " } else { "" }, locked.count());
    let (noun, verb) = if count == 1 { ("record", "is") } else { ("records", "are") };
    (count > 0).then(|| {
        format!(
            "{least}{count} {noun} {verb} encrypted with a key that `store.encryption_keys` does not have: retries get 503 \
             until it does"
        )
    })
}

/// Warns of the records that a start cannot read.
pub(super) async fn warn_at_start(resealer: Arc<Resealer>) {
    // The store reports its failures.
    let Ok(locked) = resealer.look_for_locked(AT_START).await else { return };
    if let Some(words) = in_words(&locked) {
        let configured = resealer.keys().ids().join(", ");
        tracing::warn!(records = locked.count(), configured, "{words}");
    }
}

/// Warns of the records that a reload made unreadable by removing keys of these ids, and returns the warning.
pub(super) async fn warn_at_reload(resealer: &Resealer, removed: &[Arc<str>]) -> Option<String> {
    let looked = timeout(LIMIT, resealer.look_for_locked(AT_RELOAD)).await;
    let (locked, removed) = (looked.ok().and_then(Result::ok), removed.join(", "));
    let (records, words) = match &locked {
        Some(locked) if locked.count() > 0 || !locked.is_partial => (locked.count(), in_words(locked)?),
        _ => (0, UNKNOWN.to_owned()),
    };
    tracing::warn!(records, removed, "{words}");
    Some(format!("{words}; the reload removed {removed}"))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::idempotency::record::{AttemptToken, RecordId};
    use crate::store::memory::Memory;
    use crate::store::sealed::{Keyring, Sealed, SealingKey};
    use crate::store::unreliable::{Fault, Operation, Unreliable};
    use crate::store::{NewRecord, Origin, Store};

    #[tokio::test(start_paused = true)]
    async fn a_reload_counts_what_it_made_unreadable_or_says_that_it_cannot() {
        let hour = Duration::from_secs(3600);
        let key = |byte: u8| SealingKey::new(format!("key-{byte}").into(), &[byte; 32]);
        let store = Arc::new(Unreliable::new(Arc::new(Memory::new())));
        let origin = Origin { service: "ours".into(), namespace: "n".into(), route: "r".into() };
        store.adopt(vec![origin.clone()], Vec::new(), false).await.unwrap();
        let keys = Arc::new(Keyring::new(vec![key(1), key(3)]));
        let sealed = Sealed::new(store.clone(), Arc::clone(&keys), "ours".into(), |_, _| ());
        let (attempt, head) = (AttemptToken([1; 16]), Bytes::from_static(b"head"));
        let fresh = NewRecord { attempt, origin: origin.id(), lease: hour, ttl: hour, unknown_ttl: hour, head };
        sealed.claim(RecordId([1; 32]), fresh).await.unwrap();

        let resealer = sealed.resealer();
        let removed = keys.replace(vec![key(1)]);
        assert_eq!(warn_at_reload(&resealer, &removed).await, None);
        let removed = keys.replace(vec![key(2)]);
        let said = warn_at_reload(&resealer, &removed).await.unwrap();
        assert!(said.starts_with("1 record is encrypted") && said.ends_with("; the reload removed key-1"), "{said}");
        store.script_for(Operation::List, [Fault::Refuse]);
        let said = warn_at_reload(&resealer, &removed).await.unwrap();
        assert!(said.starts_with(UNKNOWN), "{said}");
    }
}
