//! Saying that live records cannot be read with the keys that are configured.

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
    "it is not known whether records can still be read: `oncegate_records_by_key` of this gate says so soon";

/// How many records cannot be read, why, and what that means; nothing where none was found.
pub(in crate::cli) fn in_words(locked: &Locked) -> Option<String> {
    let least = if locked.is_partial { "at least " } else { "" };
    let counted = |count: usize| match count {
        1 => format!("{least}1 record is"),
        count => format!("{least}{count} records are"),
    };
    let lacking = (locked.lacking() > 0).then(|| {
        format!(
            "{} encrypted with a key that `store.encryption_keys` does not have: retries get 503 until it does",
            counted(locked.lacking())
        )
    });
    let plain = (locked.plain() > 0).then(|| {
        format!(
            "{} not encrypted, or not their answers, and a route has `seal = \"required\"`: retries get 503. Remove `seal`, \
             run `oncegate records reseal`, and set it again",
            counted(locked.plain())
        )
    });
    let words: Vec<String> = lacking.into_iter().chain(plain).collect();
    (!words.is_empty()).then(|| words.join("; "))
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

/// Warns of the records that a reload made unreadable, and returns the warning: it removed the keys with these ids, or read others
/// from their files, or demands encryption.
pub(super) async fn warn_at_reload(resealer: &Resealer, removed: &[Arc<str>]) -> Option<String> {
    let looked = timeout(LIMIT, resealer.look_for_locked(AT_RELOAD)).await;
    let locked = looked.ok().and_then(Result::ok);
    let ids = resealer.keys().ids();
    let (changed, removed): (Vec<_>, Vec<_>) = removed.iter().map(Arc::clone).partition(|id| ids.contains(id));
    let (changed, removed) = (changed.join(", "), removed.join(", "));
    let (records, words) = match &locked {
        Some(locked) => match (locked.count(), locked.is_partial) {
            (0, true) => (0, UNKNOWN.to_owned()),
            (records, _) => (records, in_words(locked)?),
        },
        None => (0, UNKNOWN.to_owned()),
    };
    tracing::warn!(records, removed, changed, "{words}");
    let removed = if removed.is_empty() { String::new() } else { format!("; the reload removed {removed}") };
    let mend = "add the former one under an id of its own";
    let changed = match &*changed {
        "" => String::new(),
        ids => format!("; the reload found another key in the file of {ids}: {mend}"),
    };
    Some(words + &removed + &changed)
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
        let plain = head.clone();
        let fresh = NewRecord { attempt, origin: origin.id(), lease: hour, ttl: hour, unknown_ttl: hour, head };
        sealed.claim(RecordId([1; 32]), fresh).await.unwrap();

        let resealer = sealed.resealer();
        let removed = keys.replace(vec![key(1)]);
        assert_eq!(warn_at_reload(&resealer, &removed).await, None);
        let removed = keys.replace(vec![key(2)]);
        let said = warn_at_reload(&resealer, &removed).await.unwrap();
        assert!(said.starts_with("1 record is encrypted") && said.ends_with("; the reload removed key-1"), "{said}");
        let removed = keys.replace(vec![key(1)]);
        assert_eq!(warn_at_reload(&resealer, &removed).await, None, "it is back");
        let removed = keys.replace(vec![SealingKey::new("key-1".into(), &[9; 32])]);
        let said = warn_at_reload(&resealer, &removed).await.unwrap();
        assert!(
            said.contains("; the reload found another key in the file of key-1: ") && !said.contains("removed"),
            "{said}"
        );
        let removed = keys.replace(vec![key(1)]);
        assert_eq!(warn_at_reload(&resealer, &removed).await, None, "its former content is back");
        let plain = NewRecord { attempt, origin: origin.id(), lease: hour, ttl: hour, unknown_ttl: hour, head: plain };
        store.claim(RecordId([2; 32]), plain).await.unwrap();
        assert_eq!(warn_at_reload(&resealer, &[]).await, None, "it may be plain");
        keys.be_strict([origin.id()].into());
        let said = warn_at_reload(&resealer, &[]).await.unwrap();
        assert!(said.starts_with("1 record is not encrypted") && said.ends_with("set it again"), "{said}");
        store.script_for(Operation::List, [Fault::Refuse]);
        let said = warn_at_reload(&resealer, &removed).await.unwrap();
        assert!(said.starts_with(UNKNOWN), "{said}");
    }
}
