//! Entries of the audit log, of which memory keeps the newest.

use std::collections::BTreeMap;

use async_trait::async_trait;
use bytes::Bytes;

use super::Memory;
use crate::store::audit::{AuditLog, Entry, EntryFilter, EntryPage, NewEntry, Position};
use crate::store::{Error, lifecycle};

/// How many entries are kept at most. The oldest goes for one that is new.
const MAX_ENTRIES: usize = 10_000;

/// The entries, by their places.
#[derive(Default)]
pub(super) struct Entries {
    kept: BTreeMap<Position, Entry>,
    last: u64,
}

#[async_trait]
impl AuditLog for Memory {
    async fn append(&self, entry: NewEntry) -> Result<Position, Error> {
        self.with(|tables, now| {
            let Entries { kept, last } = &mut tables.audit;
            *last += 1;
            let position = Position(*last);
            kept.insert(position, entry.at(position, now));
            if kept.len() > MAX_ENTRIES {
                kept.pop_first();
            }
            position
        })
    }

    async fn amend(&self, position: Position, detail: Bytes) -> Result<bool, Error> {
        self.with(|tables, _| match tables.audit.kept.get_mut(&position) {
            Some(entry) => {
                entry.detail = detail;
                true
            }
            None => false,
        })
    }

    async fn entries(&self, filter: EntryFilter, before: Option<Position>, limit: usize) -> Result<EntryPage, Error> {
        self.with(|tables, now| {
            let end = before.unwrap_or(Position(u64::MAX));
            let newest_first = tables.audit.kept.range(..end).rev().map(|(_, entry)| entry);
            let found = newest_first.filter(|entry| filter.passes(entry, now));
            // One extra entry shows whether there are more.
            EntryPage::of(found.take(limit.saturating_add(1)).cloned().collect(), limit)
        })
    }

    async fn sweep_entries(&self, limit: usize) -> Result<usize, Error> {
        self.with(|tables, now| {
            let kept = &mut tables.audit.kept;
            let past = kept.values().filter(|entry| lifecycle::is_past(entry.until, now));
            let past: Vec<Position> = past.take(limit).map(|entry| entry.position).collect();
            past.iter().for_each(|position| drop(kept.remove(position)));
            past.len()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_newest_are_kept() {
        let store = Memory::new();
        let entry = NewEntry {
            ttl: std::time::Duration::from_secs(60),
            service: "shop".into(),
            action: "purge".into(),
            by: "ops".into(),
            record: None,
            detail: Bytes::new(),
            reason: None,
        };
        for _ in 0..=MAX_ENTRIES {
            store.append(entry.clone()).await.unwrap();
        }
        let page = store.entries(EntryFilter::default(), None, 2 * MAX_ENTRIES).await.unwrap();
        assert_eq!((page.entries.len(), page.next), (MAX_ENTRIES, None));
        assert_eq!(page.entries.last().unwrap().position, Position(2));
    }
}
