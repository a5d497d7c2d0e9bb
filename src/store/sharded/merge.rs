//! Makes one answer of those of several databases.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::time::sleep;

use super::member::Member;
use super::upkeep::Part;
use crate::idempotency::record::RecordId;
use crate::store::removals::Removals;
use crate::store::{Cursor, IdentityChange, LiveKeys, NamespaceRules, Page, RecordEntry, Removal};

/// How often to look whether a database was opened.
const POLL: Duration = Duration::from_millis(200);

/// The newest records of several pages that begin at the same place.
pub(super) fn pages(pages: Vec<Page>, limit: usize) -> Page {
    // Behind the end of a page, its database may have more.
    let bound = pages.iter().filter_map(|page| page.next).max_by_key(|next| (next.claimed_at, next.id));
    let mut records: Vec<RecordEntry> = pages.into_iter().flat_map(|page| page.records).collect();
    if let Some(bound) = bound {
        records.retain(|listed| (listed.record.claimed_at, listed.id) >= (bound.claimed_at, bound.id));
    }
    records.sort_by_key(|listed| std::cmp::Reverse((listed.record.claimed_at, listed.id)));
    // A record that moves at this moment may be seen twice.
    records.dedup_by_key(|listed| listed.id);
    let is_more = records.len() > limit;
    records.truncate(limit);
    let last = records.last().filter(|_| is_more);
    let next = last.map(|last| Cursor { claimed_at: last.record.claimed_at, id: last.id, position: 0 });
    Page { records, next: next.or(bound) }
}

/// Up to `wanted` of several parts that begin after the same id.
pub(super) fn in_order<T>(parts: Vec<Part<T>>, id: impl Fn(&T) -> RecordId, wanted: usize) -> Part<T> {
    let bound = parts.iter().filter_map(|(_, next)| *next).min();
    let mut found: Vec<T> = parts.into_iter().flat_map(|(found, _)| found).collect();
    found.retain(|one| bound.is_none_or(|bound| id(one) <= bound));
    found.sort_by_key(&id);
    // A record that moves at this moment may be seen twice.
    found.dedup_by_key(|one| id(one));
    let is_more = found.len() > wanted;
    found.truncate(wanted);
    let last = found.last().filter(|_| is_more).map(&id);
    (found, last.or(bound))
}

/// What changes in all databases together.
pub(super) fn changes(found: Vec<Vec<IdentityChange>>) -> Vec<IdentityChange> {
    type Key = (Arc<str>, Arc<str>, [u8; 32]);
    let mut merged: BTreeMap<Key, IdentityChange> = BTreeMap::new();
    for change in found.into_iter().flatten() {
        let key = (Arc::clone(&change.service), Arc::clone(&change.namespace), change.digest);
        match merged.get_mut(&key) {
            Some(known) => add_live(&mut known.live, change.live),
            None => drop(merged.insert(key, change)),
        }
    }
    merged.into_values().collect()
}

fn add_live(known: &mut Vec<LiveKeys>, more: Vec<LiveKeys>) {
    for live in more {
        match known.iter_mut().find(|known| known.route == live.route) {
            Some(known) => {
                known.keys += live.keys;
                known.in_flight += live.in_flight;
                known.until = known.until.max(live.until);
            }
            None => known.push(live),
        }
    }
    known.sort_by(|one, other| one.route.cmp(&other.route));
}

/// The rules on file. A database that was away when they changed does not have the latest.
pub(super) fn identities(found: Vec<Vec<NamespaceRules>>) -> Vec<NamespaceRules> {
    let mut merged: BTreeMap<(Arc<str>, Arc<str>), NamespaceRules> = BTreeMap::new();
    let latest = |rules: &NamespaceRules| (rules.periods.last().map(|period| period.since), rules.digest.is_some());
    for rules in found.into_iter().flatten() {
        let key = (Arc::clone(&rules.service), Arc::clone(&rules.namespace));
        match merged.get(&key) {
            Some(known) if latest(known) >= latest(&rules) => {}
            _ => drop(merged.insert(key, rules)),
        }
    }
    merged.into_values().collect()
}

/// Publishes the removals of a database among those of all.
pub(super) async fn forward_removals(
    member: &Member,
    removals: &Removals,
    silent: &std::sync::Mutex<HashSet<Arc<str>>>,
) {
    let store = loop {
        match member.store() {
            Ok(store) => break store,
            Err(_) => sleep(POLL).await,
        }
    };
    let Some(mut received) = store.removals() else { return };
    let silent = || silent.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    loop {
        match received.recv().await {
            Ok(Removal::Of(id)) => removals.publish(Removal::Of(id)),
            Ok(Removal::Subscribed) | Err(RecvError::Lagged(_)) => {
                removals.publish(Removal::Subscribed);
                let mut silent = silent();
                silent.remove(&member.name);
                if !silent.is_empty() {
                    // Of those of another database, nothing is heard still.
                    removals.publish(Removal::Lost);
                }
            }
            Ok(Removal::Lost) => {
                silent().insert(Arc::clone(&member.name));
                removals.publish(Removal::Lost);
            }
            Err(RecvError::Closed) => return,
        }
    }
}
