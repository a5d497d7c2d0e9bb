//! Entries of what operators did.

use super::*;
use crate::store::Since;
use crate::store::audit::{self, AuditLog, Entry, EntryFilter, NewEntry, Position};

fn log(harness: &Harness) -> &dyn AuditLog {
    audit::of(&*harness.store).expect("the store keeps entries")
}

/// An entry of an action, about record `number` if it is not 0.
fn entry(action: &str, number: u8) -> NewEntry {
    NewEntry {
        ttl: LONG,
        service: "shop".into(),
        action: action.into(),
        by: "ops".into(),
        record: (number > 0).then(|| id(number)),
        detail: Bytes::from(format!("{action} {number}")),
        reason: (number % 2 == 1).then(|| answer("\"because of ü\"")),
    }
}

async fn append(harness: &Harness, entry: NewEntry) -> Position {
    log(harness).append(entry).await.expect("append works")
}

async fn all(harness: &Harness) -> Vec<Entry> {
    found(harness, EntryFilter::default()).await
}

async fn found(harness: &Harness, filter: EntryFilter) -> Vec<Entry> {
    let page = log(harness).entries(filter, None, 1000).await.expect("entries works");
    assert_eq!(page.next, None);
    page.entries
}

fn actions(entries: &[Entry]) -> Vec<&str> {
    entries.iter().map(|entry| &*entry.action).collect()
}

pub(super) async fn entries_are_kept_as_they_are(harness: Harness) {
    assert_eq!(all(&harness).await, []);
    let detail = Bytes::from(vec![0xff; 20_000]);
    let entries = [
        entry("resolve", 1),
        NewEntry { by: "-".into(), service: "bank ü".into(), ..entry("reload", 0) },
        NewEntry { detail: Bytes::new(), reason: Some(Bytes::new()), ..entry("purge", 2) },
        NewEntry { detail: detail.clone(), reason: Some(detail), ttl: SHORT, ..entry("purge", 3) },
    ];
    let mut positions = Vec::new();
    for entry in &entries {
        positions.push(append(&harness, entry.clone()).await);
    }
    assert!(positions.is_sorted_by(|one, next| one < next), "{positions:?}");
    let now = harness.store.claim(id(9), fresh(9)).await.expect("claim works");
    let Claim::Inserted(now) = now else { panic!("it is not free") };
    let kept = all(&harness).await;
    assert_eq!(kept.len(), entries.len());
    for ((kept, new), position) in kept.iter().rev().zip(entries).zip(positions) {
        let NewEntry { ttl, service, action, by, record, detail, reason } = new;
        let (at, until) = (kept.at, kept.at.plus(ttl));
        assert!(at <= now && now.since(at) < LONG / 2, "{at:?} {now:?}");
        assert_eq!(*kept, Entry { position, at, until, service, action, by, record, detail, reason });
    }
}

pub(super) async fn entries_come_in_pages(harness: Harness) {
    let mut positions = Vec::new();
    for number in 0..7 {
        positions.insert(0, append(&harness, entry("purge", number)).await);
    }
    for limit in 1..9 {
        let (mut found, mut before) = (Vec::new(), None);
        loop {
            let page = log(&harness).entries(EntryFilter::default(), before, limit).await.expect("entries works");
            assert!(page.entries.len() <= limit && !page.entries.is_empty());
            found.extend(page.entries.iter().map(|entry| entry.position));
            before = page.next;
            if before.is_none() {
                break;
            }
        }
        assert_eq!(found, positions, "{limit} at once");
    }
    let about_one = EntryFilter { record: Some(id(1)), ..EntryFilter::default() };
    let page = log(&harness).entries(about_one, Some(positions[3]), 1).await.expect("entries works");
    assert_eq!((page.entries.len(), page.next), (1, None), "what is not asked for is no next one");
}

pub(super) async fn entries_are_filtered(harness: Harness) {
    append(&harness, entry("resolve", 1)).await;
    append(&harness, NewEntry { service: "bank".into(), ..entry("purge", 1) }).await;
    append(&harness, NewEntry { by: "night".into(), ..entry("reload", 0) }).await;
    let early = all(&harness).await[0].at;
    short_passes(&harness).await;
    append(&harness, entry("purge", 2)).await;
    let late = all(&harness).await[0].at;
    assert!(late > early);
    let none = EntryFilter::default;
    for (filter, expected) in [
        (none(), &["purge", "reload", "purge", "resolve"][..]),
        (EntryFilter { service: Some("shop".into()), ..none() }, &["purge", "reload", "resolve"]),
        (EntryFilter { action: Some("purge".into()), ..none() }, &["purge", "purge"]),
        (EntryFilter { action: Some("pur".into()), ..none() }, &[]),
        (EntryFilter { by: Some("night".into()), ..none() }, &["reload"]),
        (EntryFilter { record: Some(id(1)), ..none() }, &["purge", "resolve"]),
        (EntryFilter { record: Some(id(1)), service: Some("shop".into()), ..none() }, &["resolve"]),
        (EntryFilter { record: Some(id(3)), ..none() }, &[]),
        (EntryFilter { since: Some(Since::At(late)), ..none() }, &["purge"]),
        (EntryFilter { since: Some(Since::Ago(LONG)), ..none() }, &["purge", "reload", "purge", "resolve"]),
        (EntryFilter { since: Some(Since::At(late.plus(LONG))), ..none() }, &[]),
    ] {
        assert_eq!(actions(&found(&harness, filter.clone()).await), expected, "{filter:?}");
    }
}

pub(super) async fn details_are_amended(harness: Harness) {
    let first = append(&harness, entry("purge", 1)).await;
    let second = append(&harness, entry("resolve", 2)).await;
    let before = all(&harness).await;
    // The same again, as after an answer that was lost.
    for detail in ["done", "done", "", "a longer one than it was"] {
        let detail = answer(detail);
        assert!(log(&harness).amend(first, detail.clone()).await.expect("amend works"));
        let amended = Entry { detail, ..before[1].clone() };
        assert_eq!(all(&harness).await, [before[0].clone(), amended]);
    }
    assert!(!log(&harness).amend(Position(second.0 + 1), answer("nothing")).await.expect("amend works"));
    assert_eq!(all(&harness).await.len(), 2);
}

pub(super) async fn entries_expire(harness: Harness) {
    let sweep = async |limit| log(&harness).sweep_entries(limit).await.expect("sweep works");
    append(&harness, NewEntry { ttl: LONG, ..entry("purge", 2) }).await;
    assert_eq!(sweep(10).await, 0);
    // From here on, the clock of a busy machine may be past the short time at any step.
    for number in [0, 1, 3] {
        append(&harness, NewEntry { ttl: SHORT, ..entry("purge", number) }).await;
    }
    let amended = log(&harness).amend(all(&harness).await[0].position, answer("done")).await;
    assert!(amended.expect("amend works"));
    short_passes(&harness).await;
    let found = (sweep(2).await, all(&harness).await.len(), sweep(10).await);
    assert_eq!(found, (2, 2, 1));
    let left = all(&harness).await;
    assert_eq!(left.iter().map(|entry| &entry.detail[..]).collect::<Vec<_>>(), [b"purge 2"]);
    assert!(append(&harness, entry("purge", 1)).await > left[0].position);
    // A sweep of records takes none of them.
    harness.store.sweep(10).await.expect("sweep works");
    assert_eq!((sweep(10).await, all(&harness).await.len()), (0, 2));
}

pub(super) async fn no_place_is_given_twice(harness: Harness) {
    let last = append(&harness, NewEntry { ttl: SHORT, ..entry("purge", 1) }).await;
    short_passes(&harness).await;
    assert_eq!(log(&harness).sweep_entries(10).await.expect("sweep works"), 1);
    let next = append(&harness, entry("purge", 1)).await;
    assert!(next > last);
    assert!(!log(&harness).amend(last, answer("gone")).await.expect("amend works"));
}
