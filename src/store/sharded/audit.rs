//! The audit log: each database has entries of its own, in places that no other gives.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all};
use tokio::time::timeout;

use super::Sharded;
use super::placement::place_of;
use crate::store::audit::{self, AuditLog, EntryFilter, EntryPage, NewEntry, Position};
use crate::store::{Error, ErrorKind, Store};

/// How long the databases have to say where records are.
const LOOK: Duration = Duration::from_millis(500);

#[async_trait]
impl AuditLog for Sharded {
    /// In the database of the record that it is about, or else in the first one that takes it. Where records move it is one of the
    /// next list: no gate reads the others when the move is over.
    async fn append(&self, entry: NewEntry) -> Result<Position, Error> {
        let call = |store: Arc<dyn Store>, entry: NewEntry| -> BoxFuture<'static, _> {
            Box::pin(async move { audit::of(&*store)?.append(entry).await })
        };
        // What is done waits for its entry.
        let routes = match timeout(LOOK, self.look()).await {
            Ok(Ok(routes)) => Arc::new(routes),
            Ok(Err(_)) | Err(_) => self.routes.load_full(),
        };
        let lists: Vec<&Vec<Option<usize>>> = routes.target.iter().chain([&routes.members]).collect();
        let place = |list: &Vec<Option<usize>>| list.get(place_of(entry.record?, list.len())).copied().flatten();
        let mut indexes: Vec<usize> = lists.iter().filter_map(|list| place(list)).collect();
        indexes.extend(lists.iter().flat_map(|list| list.iter().flatten()));
        let mut failed = None;
        for index in indexes {
            let Ok(store) = self.members[index].store() else { continue };
            match call(Arc::clone(store), entry.clone()).await {
                Ok(position) => return Ok(position),
                Err(error) => failed = Some(error),
            }
        }
        Err(failed.unwrap_or_else(|| Error::determinate(ErrorKind::Unavailable, "no database takes the entry")))
    }

    async fn amend(&self, position: Position, detail: Bytes) -> Result<bool, Error> {
        let amends = self.all().into_iter().map(|(_, member)| {
            let detail = detail.clone();
            async move {
                let store = member.store()?;
                audit::of(&**store)?.amend(position, detail).await
            }
        });
        let mut amended = Ok(false);
        for one in join_all(amends).await {
            match one {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(error) => amended = Err(error),
            }
        }
        amended
    }

    async fn entries(&self, filter: EntryFilter, before: Option<Position>, limit: usize) -> Result<EntryPage, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            let filter = filter.clone();
            Box::pin(async move { audit::of(&*store)?.entries(filter, before, limit).await })
        };
        let pages = self.of_all(call).await?;
        // Behind the end of a page, its database may have more.
        let bound = pages.iter().filter_map(|page| page.next).max();
        let mut entries: Vec<_> = pages.into_iter().flat_map(|page| page.entries).collect();
        entries.retain(|entry| bound.is_none_or(|bound| entry.position >= bound));
        entries.sort_by_key(|entry| Reverse(entry.position));
        let page = EntryPage::of(entries, limit);
        Ok(EntryPage { next: page.next.or(bound), ..page })
    }

    async fn sweep_entries(&self, limit: usize) -> Result<usize, Error> {
        let sweep = move |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            Box::pin(async move { audit::of(&*store)?.sweep_entries(limit).await })
        };
        Ok(self
            .sweep_each(|busy| Arc::clone(&busy.sweeping_entries), sweep)
            .await?
            .into_iter()
            .sum::<usize>()
            .min(limit))
    }
}
