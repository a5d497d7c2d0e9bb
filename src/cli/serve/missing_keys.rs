//! Saying that live records need a key that is not configured.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use crate::store::sealed::{Locked, Pace, Resealer};

/// How a start looks, when it serves already.
const AT_START: Pace = Pace { patience: Duration::from_secs(60), pauses: true };

/// How a reload looks that removes a key. Its caller waits for that.
const AT_RELOAD: Pace = Pace { patience: Duration::from_secs(5), pauses: false };

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
    let locked = resealer.look_for_locked(AT_RELOAD).await.ok()?;
    let (mut words, removed) = (in_words(&locked)?, removed.join(", "));
    tracing::warn!(records = locked.count(), removed, "{words}");
    let _ = write!(words, "; the reload removed {removed}");
    Some(words)
}
