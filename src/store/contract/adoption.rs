//! adopt.

use super::*;
use crate::store::{Identity, IdentityChange};

fn rule(namespace: &str, digest: u8) -> Identity {
    Identity { service: "shop".into(), namespace: namespace.into(), digest: [digest; 32] }
}

async fn adopt(harness: &Harness, rules: Vec<Identity>, accept_change: bool) -> Vec<IdentityChange> {
    let origins = ["charges", "refunds"].map(|namespace| Origin { namespace: namespace.into(), ..origin("r") });
    harness.store.adopt(origins.to_vec(), rules, accept_change).await.expect("adopt works")
}

/// A record of a namespace. With an unknown outcome it lives for a short time only.
async fn record_of(harness: &Harness, number: u8, service: &str, namespace: &str) {
    let origin = Origin { service: service.into(), namespace: namespace.into(), route: "r".into() };
    let fresh = Fresh { origin: origin.id(), unknown_ttl: SHORT, ..fresh(number) };
    claim(harness, id(number), fresh).await;
}

fn change(namespace: &str, live: u64) -> IdentityChange {
    IdentityChange { service: "shop".into(), namespace: namespace.into(), live }
}

pub(super) async fn the_first_rules_are_taken(harness: Harness) {
    record_of(&harness, 1, "shop", "charges").await;
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, []);
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, [], "the same rules change nothing");
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], false).await, [change("charges", 1)]);
}

pub(super) async fn other_rules_are_refused_while_records_live(harness: Harness) {
    let first = vec![rule("charges", 1), rule("refunds", 1)];
    assert_eq!(adopt(&harness, first.clone(), false).await, []);
    for number in 1..=3 {
        let charges = Origin { namespace: "charges".into(), ..origin("r") };
        claim(&harness, id(number), Fresh { origin: charges.id(), ..fresh(number) }).await;
    }
    settle(&harness, id(1), attempt(1), End::Hold).await;
    settle(&harness, id(2), attempt(2), complete("x")).await;
    let new = Origin { namespace: "new".into(), ..origin("r") };
    let second = vec![rule("charges", 2), rule("refunds", 2), rule("new", 2)];
    let changes = harness.store.adopt(vec![new.clone()], second, false).await.expect("adopt works");
    assert_eq!(changes, [change("charges", 3)]);
    // Nothing was changed, not even where nothing stood in the way.
    claim(&harness, id(8), Fresh { origin: new.id(), ..fresh(8) }).await;
    assert_eq!(get(&harness, id(8)).await.expect("it stands").origin, None);
    record_of(&harness, 4, "shop", "refunds").await;
    let changed = vec![rule("refunds", 2), rule("charges", 1)];
    assert_eq!(adopt(&harness, changed, false).await, [change("refunds", 1)]);
    let more = [first.clone(), vec![rule("new", 3)]].concat();
    assert_eq!(adopt(&harness, more, false).await, [], "no rules are on file");
    assert_eq!(adopt(&harness, first, false).await, []);
}

pub(super) async fn other_rules_are_taken_where_nothing_lives(harness: Harness) {
    assert_eq!(adopt(&harness, vec![rule("charges", 1), rule("refunds", 1)], false).await, []);
    record_of(&harness, 1, "shop", "charges").await;
    settle(&harness, id(1), attempt(1), End::Hold).await;
    short_passes(&harness).await;
    record_of(&harness, 2, "shop", "refunds").await;
    let changed = vec![rule("charges", 2), rule("refunds", 1)];
    assert_eq!(adopt(&harness, changed, false).await, [], "its record has expired");
    record_of(&harness, 3, "shop", "charges").await;
    let back = vec![rule("charges", 1), rule("refunds", 1)];
    assert_eq!(adopt(&harness, back, false).await, [change("charges", 1)], "the new ones hold");
}

pub(super) async fn other_rules_are_taken_where_that_is_accepted(harness: Harness) {
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, []);
    record_of(&harness, 1, "shop", "charges").await;
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], true).await, []);
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], false).await, []);
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, [change("charges", 1)]);
}

pub(super) async fn rules_that_are_gone_are_refused_while_records_live(harness: Harness) {
    let both = vec![rule("charges", 1), rule("refunds", 1)];
    assert_eq!(adopt(&harness, both.clone(), false).await, []);
    record_of(&harness, 1, "shop", "charges").await;
    record_of(&harness, 2, "shop", "refunds").await;
    record_of(&harness, 3, "shop", "refunds").await;
    let renamed = vec![rule("charges", 1), rule("returns", 1)];
    assert_eq!(adopt(&harness, renamed, false).await, [change("refunds", 2)]);
    assert_eq!(adopt(&harness, Vec::new(), false).await, [change("charges", 1), change("refunds", 2)]);
    assert_eq!(adopt(&harness, both, false).await, [], "nothing was changed");
}

pub(super) async fn rules_that_are_gone_are_forgotten_where_nothing_lives(harness: Harness) {
    assert_eq!(adopt(&harness, vec![rule("charges", 1), rule("refunds", 1)], false).await, []);
    record_of(&harness, 1, "shop", "refunds").await;
    settle(&harness, id(1), attempt(1), End::Hold).await;
    short_passes(&harness).await;
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, [], "its record has expired");
    record_of(&harness, 2, "shop", "refunds").await;
    assert_eq!(adopt(&harness, vec![rule("charges", 1), rule("refunds", 2)], false).await, []);
}

pub(super) async fn rules_that_are_gone_are_forgotten_where_that_is_accepted(harness: Harness) {
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, []);
    record_of(&harness, 1, "shop", "charges").await;
    assert_eq!(adopt(&harness, vec![rule("refunds", 1)], true).await, []);
    assert_eq!(adopt(&harness, vec![rule("refunds", 1)], false).await, [], "the next start is quiet");
    record_of(&harness, 2, "shop", "refunds").await;
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, [change("refunds", 1)]);
}

pub(super) async fn another_service_is_left_alone_where_services_share_the_store(harness: Harness) {
    let elsewhere = Origin { service: "desk".into(), ..origin("r") };
    let theirs = || vec![Identity { service: "desk".into(), ..rule("charges", 1) }];
    harness.store.adopt(vec![elsewhere], theirs(), false).await.expect("adopt works");
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, [], "no record lives");
    assert_eq!(adopt(&harness, theirs(), false).await, []);
    record_of(&harness, 1, "desk", "charges").await;
    if harness.is_shared {
        assert_eq!(adopt(&harness, vec![rule("charges", 2)], false).await, [], "it is another's");
        record_of(&harness, 2, "shop", "charges").await;
        assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, [change("charges", 1)]);
        return;
    }
    let change = IdentityChange { service: "desk".into(), ..change("charges", 1) };
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, [change]);
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], true).await, []);
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], false).await, [], "no record of this service lives");
}
