//! adopt.

use super::*;
use crate::idempotency::description::NamespaceDescription;
use crate::idempotency::identity::RulesTag;
use crate::store::deliveries::{DeliveryChange, DeliveryState, Lane, NewDelivery, Take};
use crate::store::{IdentityChange, LiveKeys, NamespaceRuleSet, NamespaceRules, is_orphaned};

fn rule(namespace: &str, digest: u8) -> NamespaceRuleSet {
    let description = Some(format!("rules {digest}").into());
    NamespaceRuleSet {
        service: "shop".into(),
        namespace: namespace.into(),
        digest: [digest; 32],
        others: Vec::new(),
        description,
    }
}

fn origins() -> Vec<Origin> {
    ["charges", "refunds"].map(|namespace| Origin { namespace: namespace.into(), ..origin("r") }).to_vec()
}

/// A change: the service, the namespace and how many of its records live.
type Change = (String, String, u64);

/// The changes of adopting, after asking for them without adopting.
async fn adopt(harness: &Harness, rules: Vec<NamespaceRuleSet>, accept_change: bool) -> Vec<Change> {
    let seen = harness.store.changes(origins(), rules.clone()).await.expect("changes works");
    let changes = harness.store.adopt(origins(), rules, accept_change).await.expect("adopt works");
    assert!(accept_change && changes.is_empty() || seen == changes, "{seen:?} was seen before {changes:?}");
    changes.iter().map(of).collect()
}

fn of(change: &IdentityChange) -> Change {
    (change.service.to_string(), change.namespace.to_string(), change.keys())
}

/// A record of a namespace. With an unknown outcome it lives for a short time only.
async fn record_of(harness: &Harness, number: u8, service: &str, namespace: &str) {
    let origin = Origin { service: service.into(), namespace: namespace.into(), route: "r".into() };
    let fresh = NewRecord { origin: origin.id(), unknown_ttl: SHORT, ..fresh(number) };
    claim(harness, id(number), fresh).await;
}

fn change(namespace: &str, live: u64) -> Change {
    ("shop".to_owned(), namespace.to_owned(), live)
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
        claim(&harness, id(number), NewRecord { origin: charges.id(), ..fresh(number) }).await;
    }
    settle(&harness, id(1), attempt(1), hold()).await;
    settle(&harness, id(2), attempt(2), complete("x")).await;
    let new = Origin { namespace: "new".into(), ..origin("r") };
    let second = vec![rule("charges", 2), rule("refunds", 2), rule("new", 2)];
    let changes = harness.store.adopt(vec![new.clone()], second, false).await.expect("adopt works");
    assert_eq!(changes.iter().map(of).collect::<Vec<_>>(), [change("charges", 3)]);
    // Nothing was changed, not even where nothing stood in the way.
    claim(&harness, id(8), NewRecord { origin: new.id(), ..fresh(8) }).await;
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
    settle(&harness, id(1), attempt(1), hold()).await;
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

pub(super) async fn other_rules_are_refused_while_accepted_requests_wait(harness: Harness) {
    let Some(queue) = harness.queue() else { return };
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, []);
    for number in 1..=3 {
        let (token, body) = (attempt(number), Bytes::from_static(b"body"));
        let (head, request) = (body.clone(), body.clone());
        let new = NewDelivery { token, origin: origin("r").id(), lane: Lane(0), head, request, body };
        queue.accept(id(number), new).await.expect("accept works");
    }
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], false).await, [change("charges", 3)]);
    // Its attempt is under way: it is one key still.
    record_of(&harness, 1, "shop", "charges").await;
    let take = Take { origin: origin("r").id(), limit: 3, max_bytes: 1 << 20, hold: LONG, is_ordered: false };
    for taken in queue.take_due(take).await.expect("taking works").taken {
        let ttl = match taken.delivery.id {
            found if found == id(1) => continue,
            found if found == id(2) => LONG,
            _ => SHORT,
        };
        let park = DeliveryChange::Park { ttl, is_attempt: true, note: Bytes::new() };
        assert!(queue.change(taken.held(), park).await.expect("the store works"));
    }
    short_passes(&harness).await;
    // The third is dead and has expired.
    let changes = harness.store.adopt(origins(), vec![rule("charges", 2)], false).await.expect("adopt works");
    assert_eq!(changes.iter().map(of).collect::<Vec<_>>(), [change("charges", 2)]);
    let dead = queue.delivery(id(2)).await.expect("the store works").expect("it is there");
    let DeliveryState::Dead { until } = dead.state else { panic!("{dead:?}") };
    assert_eq!((changes[0].live[0].in_flight, changes[0].live[0].until), (1, Some(until)));
    settle(&harness, id(1), attempt(1), Settlement::Release).await;
    for number in [1, 2] {
        assert!(queue.discard(id(number), attempt(number)).await.expect("the store works"));
    }
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], false).await, []);
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
    // No route protects any more, and some observe.
    let observing: Vec<Origin> = origins().into_iter().map(Origin::shadow).collect();
    let changes = harness.store.adopt(observing, Vec::new(), false).await.expect("adopt works");
    assert_eq!(changes.iter().map(of).collect::<Vec<_>>(), [change("charges", 1), change("refunds", 2)]);
    assert_eq!(adopt(&harness, both, false).await, [], "nothing was changed");
}

pub(super) async fn rules_that_are_gone_are_forgotten_where_nothing_lives(harness: Harness) {
    assert_eq!(adopt(&harness, vec![rule("charges", 1), rule("refunds", 1)], false).await, []);
    record_of(&harness, 1, "shop", "refunds").await;
    settle(&harness, id(1), attempt(1), hold()).await;
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
    let theirs = || vec![NamespaceRuleSet { service: "desk".into(), ..rule("charges", 1) }];
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
    let change = ("desk".to_owned(), "charges".to_owned(), 1);
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, [change]);
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], true).await, []);
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], false).await, [], "no record of this service lives");
}

pub(super) async fn a_change_says_what_lives_of_which_route_and_until_when(harness: Harness) {
    let routes = ["create", "capture"].map(origin);
    let rules = || vec![rule("charges", 1)];
    harness.store.adopt(routes.to_vec(), rules(), false).await.expect("adopt works");
    let [create, capture] = routes.map(|route| route.id());
    for (number, route) in [(1, create), (2, create), (3, create), (4, capture)] {
        claim(&harness, id(number), NewRecord { origin: route, ..fresh(number) }).await;
    }
    let first = settle(&harness, id(1), attempt(1), complete("x")).await;
    let last = settle(&harness, id(2), attempt(2), hold()).await;
    assert!(first < last);
    let [change] = &harness.store.changes(Vec::new(), vec![rule("charges", 2)]).await.expect("changes works")[..]
    else {
        panic!("one namespace");
    };
    assert_eq!((change.digest, change.description.as_deref()), ([1; 32], Some("rules 1")));
    let live = |route: &str, keys, in_flight, until| LiveKeys { route: route.into(), keys, in_flight, until };
    assert_eq!(change.live, [live("capture", 1, 1, None), live("create", 3, 1, Some(last))]);
    assert_eq!(adopt(&harness, rules(), false).await, [], "nothing was changed");
}

pub(super) async fn descriptions_are_kept_with_the_rules(harness: Harness) {
    let on_file = async || {
        let found: Vec<NamespaceRules> = harness.store.identities().await.expect("identities works");
        let shown = |rules: &NamespaceRules| {
            let description = rules.description().map(|text| text.to_string());
            (rules.namespace.to_string(), rules.digest.map(|digest| digest[0]), description)
        };
        found.iter().map(shown).collect::<Vec<_>>()
    };
    let shown = |namespace: &str, digest: u8, text: &str| {
        (namespace.to_owned(), Some(digest), (!text.is_empty()).then(|| text.to_owned()))
    };
    assert_eq!(on_file().await, []);
    let bare = NamespaceRuleSet { description: None, ..rule("refunds", 1) };
    assert_eq!(adopt(&harness, vec![rule("charges", 1), bare], false).await, []);
    assert_eq!(on_file().await, [shown("charges", 1, "rules 1"), shown("refunds", 1, "")]);
    // As they are adopted again.
    let other = NamespaceRuleSet { description: Some("the same in other words".into()), ..rule("charges", 1) };
    assert_eq!(adopt(&harness, vec![other, rule("refunds", 1)], false).await, []);
    assert_eq!(on_file().await, [shown("charges", 1, "the same in other words"), shown("refunds", 1, "rules 1")]);
    short_passes(&harness).await;
    assert_eq!(adopt(&harness, vec![rule("charges", 2), rule("refunds", 1)], false).await, []);
    assert_eq!(on_file().await, [shown("charges", 2, "rules 2"), shown("refunds", 1, "rules 1")]);
}

pub(super) async fn rules_that_are_found_as_well_take_each_others_place(harness: Harness) {
    let with = |digest: u8, others: &[u8]| {
        let description = NamespaceDescription {
            others: others.iter().map(|other| RecordId([*other; 32]).to_string()).collect(),
            ..NamespaceDescription::default()
        };
        let others = others.iter().map(|other| [*other; 32]).collect();
        vec![NamespaceRuleSet { others, description: Some(description.to_text().into()), ..rule("charges", digest) }]
    };
    let in_force = async || {
        let on_file = harness.store.identities().await.expect("identities works");
        on_file[0].in_force().iter().map(|digest| digest[0]).collect::<Vec<_>>()
    };
    let orphans = async || {
        let on_file = harness.store.identities().await.expect("identities works");
        let found = get(&harness, id(1)).await.expect("a record");
        let origin = found.origin.expect("an origin");
        [None, Some(1), Some(2), Some(3)].map(|tag: Option<u8>| {
            is_orphaned(&on_file, &origin, found.record.claimed_at, tag.map(|tag| RulesTag([tag; 8])))
        })
    };
    assert_eq!(adopt(&harness, with(1, &[]), false).await, []);
    record_of(&harness, 1, "shop", "charges").await;
    short_passes(&harness).await;
    assert_eq!(adopt(&harness, with(2, &[1]), false).await, []);
    assert_eq!((in_force().await, orphans().await), (vec![2, 1], [false, false, false, true]));
    assert_eq!(adopt(&harness, with(1, &[2]), false).await, []);
    assert_eq!((in_force().await, orphans().await), (vec![1, 2], [false, false, false, true]));
    assert_eq!(adopt(&harness, with(2, &[3]), false).await, [change("charges", 1)], "the first is given up");
    assert_eq!(adopt(&harness, with(2, &[1]), false).await, []);
    short_passes(&harness).await;
    // Those who look at each record see what that forgets.
    assert_eq!(adopt(&harness, with(2, &[]), false).await, []);
    assert_eq!((in_force().await, orphans().await), (vec![2], [true, true, false, true]));
}

pub(super) async fn records_are_orphaned_while_other_rules_are_on_file(harness: Harness) {
    let orphans = async || {
        let on_file = harness.store.identities().await.expect("identities works");
        let mut orphans = Vec::new();
        for number in 1..=2 {
            if let Some(RecordEntry { origin: Some(origin), record, .. }) = get(&harness, id(number)).await {
                orphans.push(is_orphaned(&on_file, &origin, record.claimed_at, None));
            }
        }
        orphans
    };
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, []);
    record_of(&harness, 1, "shop", "charges").await;
    assert_eq!(orphans().await, [false]);
    // The order of two events in one millisecond is undefined.
    short_passes(&harness).await;
    assert_eq!(adopt(&harness, vec![rule("charges", 2)], true).await, []);
    short_passes(&harness).await;
    record_of(&harness, 2, "shop", "charges").await;
    assert_eq!(orphans().await, [true, false]);
    short_passes(&harness).await;
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], true).await, []);
    assert_eq!(orphans().await, [false, true], "the former rules are back");
    assert_eq!(adopt(&harness, Vec::new(), true).await, []);
    // A store that services share leaves alone what no origin and no rule is of; here an origin is.
    assert_eq!(orphans().await, [true, true], "nothing asks for them");
    assert_eq!(adopt(&harness, vec![rule("charges", 1)], false).await, []);
    assert_eq!(orphans().await, [false, true]);
}
