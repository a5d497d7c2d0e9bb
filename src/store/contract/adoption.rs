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

/// A record of a namespace.
async fn record_of(harness: &Harness, number: u8, service: &str, namespace: &str) {
    let origin = Origin { service: service.into(), namespace: namespace.into(), route: "r".into() };
    let fresh = Fresh { origin: origin.id(), unknown_ttl: SHORT, ..fresh(number) };
    claim(harness, id(number), fresh).await;
}

fn change(namespace: &str, live: u64) -> IdentityChange {
    IdentityChange { namespace: namespace.into(), live }
}

pub(super) async fn the_first_rules_are_taken(harness: Harness) {
    record_of(&harness, 1, "shop", "charges").await;
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, []);
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, [], "the same rules change nothing");
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], false).await, [change("charges", 1)]);
    assert_eq!(adopt(&harness, Vec::new(), false).await, [], "a namespace that is not used is let be");
}

pub(super) async fn other_rules_are_refused_while_records_live(harness: Harness) {
    let first = vec![rule("charges", 1), rule("refunds", 1)];
    assert_eq!(adopt(&harness, first.clone(), false).await, []);
    for number in 1..=3 {
        record_of(&harness, number, "shop", "charges").await;
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
    assert_eq!(adopt(&harness, vec![rule("refunds", 2)], false).await, [change("refunds", 1)]);
    assert_eq!(adopt(&harness, vec![rule("new", 3)], false).await, [], "no rules are on file");
    assert_eq!(adopt(&harness, first, false).await, []);
}

pub(super) async fn other_rules_are_taken_where_nothing_lives(harness: Harness) {
    assert_eq!(adopt(&harness, vec![rule("charges", 1), rule("refunds", 1)], false).await, []);
    record_of(&harness, 1, "shop", "charges").await;
    settle(&harness, id(1), attempt(1), End::Hold).await;
    short_passes(&harness).await;
    record_of(&harness, 2, "shop", "refunds").await;
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], false).await, [], "its record has expired");
    record_of(&harness, 3, "shop", "charges").await;
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, [change("charges", 1)], "the new ones hold");
}

pub(super) async fn other_rules_are_taken_where_that_is_accepted(harness: Harness) {
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, []);
    record_of(&harness, 1, "shop", "charges").await;
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], true).await, []);
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], false).await, []);
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, [change("charges", 1)]);
}

pub(super) async fn namespaces_of_other_services_are_let_be(harness: Harness) {
    let elsewhere = Origin { service: "desk".into(), ..origin("r") };
    let theirs = Identity { service: "desk".into(), ..rule("charges", 9) };
    harness.store.adopt(vec![elsewhere], vec![theirs], false).await.expect("adopt works");
    record_of(&harness, 1, "desk", "charges").await;
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, []);
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], false).await, [], "no record of this service lives");
}
