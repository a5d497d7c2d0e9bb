//! Entries of the audit log, whose reasons are sealed: people write names and keys into them.
//!
//! Where the key of a reason is gone, all else of the entry can be read.

use async_trait::async_trait;
use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::Sealed;
use super::keyring::Part;
use crate::idempotency::record::{AttemptToken, RecordId};
use crate::store::Error;
use crate::store::audit::{self, AuditLog, Entry, EntryFilter, EntryPage, NewEntry, Position};

#[async_trait]
impl AuditLog for Sealed {
    async fn append(&self, entry: NewEntry) -> Result<Position, Error> {
        let (id, attempt) = place(&entry.service, &entry.action, &entry.by, entry.record);
        let reason = entry.reason.as_ref().map(|reason| self.keys.seal(id, attempt, Part::Reason, reason));
        audit::of(&*self.store)?.append(NewEntry { reason, ..entry }).await
    }

    async fn amend(&self, position: Position, detail: Bytes) -> Result<bool, Error> {
        audit::of(&*self.store)?.amend(position, detail).await
    }

    async fn entries(&self, filter: EntryFilter, before: Option<Position>, limit: usize) -> Result<EntryPage, Error> {
        let mut page = audit::of(&*self.store)?.entries(filter, before, limit).await?;
        for entry in &mut page.entries {
            self.open_reason(entry);
        }
        Ok(page)
    }

    async fn sweep_entries(&self, limit: usize) -> Result<usize, Error> {
        audit::of(&*self.store)?.sweep_entries(limit).await
    }
}

impl Sealed {
    /// What does not open stays as it is: nothing reads it.
    fn open_reason(&self, entry: &mut Entry) {
        let (id, attempt) = place(&entry.service, &entry.action, &entry.by, entry.record);
        if let Some(reason) = &mut entry.reason
            && let Ok(opened) = self.keys.open(id, attempt, Part::Reason, reason)
        {
            *reason = opened;
        }
    }
}

/// What a reason is bound to. Its entry has no place in the log yet when it is sealed.
fn place(service: &str, action: &str, by: &str, record: Option<RecordId>) -> (RecordId, AttemptToken) {
    let mut hash = Sha256::new();
    let record = record.as_ref().map_or(&[][..], |record| &record.0);
    for part in [service.as_bytes(), action.as_bytes(), by.as_bytes(), record] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    (RecordId(hash.finalize().into()), AttemptToken([0; 16]))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::store::Store;
    use crate::store::memory::Memory;
    use crate::store::sealed::{Keyring, SealingKey};

    fn sealed(store: &Arc<Memory>, keys: &[u8]) -> Sealed {
        let keys = keys.iter().map(|byte| SealingKey::new(format!("key {byte}").into(), &[*byte; 32])).collect();
        let store: Arc<dyn Store> = Arc::clone(store) as Arc<dyn Store>;
        Sealed::new(store, Arc::new(Keyring::new(keys)), "shop".into(), |_, _| {})
    }

    async fn reasons(log: &dyn AuditLog) -> Vec<Bytes> {
        let page = log.entries(EntryFilter::default(), None, 10).await.unwrap();
        page.entries.into_iter().filter_map(|entry| entry.reason).collect()
    }

    #[tokio::test]
    async fn reasons_are_encrypted_and_bound_to_what_their_entries_say() {
        let store = Arc::new(Memory::new());
        let reason = Bytes::from_static(b"\"erased for Ada Lovelace\"");
        let entry = |by: &str| NewEntry {
            ttl: Duration::from_secs(60),
            service: "shop".into(),
            action: "purge".into(),
            by: by.into(),
            record: Some(RecordId([7; 32])),
            detail: Bytes::from_static(b"{}"),
            reason: Some(reason.clone()),
        };
        let first = sealed(&store, &[1]);
        let position = first.append(entry("ops")).await.unwrap();
        assert!(first.amend(position, Bytes::from_static(b"{\"outcome\":\"done\"}")).await.unwrap());
        assert_eq!(reasons(&first).await, std::slice::from_ref(&reason));
        let kept = reasons(&*store).await.remove(0);
        assert!(!kept.windows(3).any(|part| part == b"Ada"), "{kept:?}");
        // Another first key; the key gone; no keys at all.
        assert_eq!(reasons(&sealed(&store, &[2, 1])).await, std::slice::from_ref(&reason));
        assert_eq!(reasons(&sealed(&store, &[2])).await, std::slice::from_ref(&kept));
        store.sweep_entries(10).await.unwrap();
        // Somebody puts it under another name.
        store.append(NewEntry { reason: Some(kept.clone()), ..entry("night") }).await.unwrap();
        // A plain one is from before the keys.
        store.append(entry("ops")).await.unwrap();
        assert_eq!(reasons(&first).await, [reason.clone(), kept, reason]);
    }
}
