use std::time::Duration;

use bytes::Bytes;

use super::*;
use crate::gate::Gate;
use crate::gate::tests::{gate_of, route as any_route};
use crate::idempotency::codec::SEALED;
use crate::idempotency::fingerprint::{Fingerprint, Recipe};
use crate::idempotency::key::Key;
use crate::idempotency::record::{AttemptToken, Record, RecordId};

/// When the records of these tests are looked at.
const NOW: Timestamp = Timestamp(1_000);

/// A route as `NAME NAMESPACE [host]/path`; a namespace of `-` is that of a route that does not protect.
fn route(text: &str) -> Route {
    let [name, namespace, place] = text.split(' ').collect::<Vec<_>>()[..] else { panic!("{text}") };
    let mode = if namespace == "-" { Mode::Pass } else { Mode::Protect };
    let (host, path) = place.split_at(place.find('/').unwrap());
    Route {
        namespace: namespace.into(),
        host: Some(host.to_owned()).filter(|host| !host.is_empty()),
        path: Pattern::parse(path).unwrap(),
        ..any_route(name, mode, "client-ip")
    }
}

fn gate(routes: &[&str]) -> Arc<Gate> {
    gate_of(routes.iter().map(|text| route(text)).collect())
}

/// What a store has on file that this gate has adopted; without routes where an earlier version did.
fn on_file(gate: &Gate, has_routes: bool) -> Vec<NamespaceRules> {
    let known = |text: &Arc<str>| {
        let described = NamespaceDescription::parse(text).unwrap();
        NamespaceDescription { coverage: described.coverage.filter(|_| has_routes), ..described }.to_text().into()
    };
    let identities = gate.identities().1.into_iter();
    identities
        .map(|rule| NamespaceRules {
            service: rule.service,
            namespace: rule.namespace,
            digest: Some(rule.digest),
            periods: vec![crate::store::RulesPeriod {
                since: Timestamp(0),
                digest: rule.digest,
                description: rule.description.as_ref().map(known),
            }],
        })
        .collect()
}

fn record(namespace: &str, method: Method, path: &str) -> RecordEntry {
    let fingerprint = Fingerprint { recipe: Recipe::default(), digest: [0; 32] };
    let head = Head::new(fingerprint, method, path, &Key::parse("k", 255).unwrap()).encode();
    let origin = Origin { service: "default".into(), namespace: namespace.into(), route: "any".into() };
    let record = Record {
        attempt: AttemptToken([1; 16]),
        state: State::Completed,
        claimed_at: Timestamp(0),
        until: NOW.plus(Duration::from_secs(1)),
        head,
        answer: None,
    };
    RecordEntry { id: RecordId([1; 32]), origin: Some(origin), record, now: NOW }
}

/// What would be forgotten of records of POST requests, each `NAMESPACE /path`; nothing where none is looked at.
fn lost(former: &[RecordEntry], (was, has_routes): (&[&str], bool), is: &[&str]) -> Option<Vec<LostKeys>> {
    let (was, is) = (gate(was), gate(is));
    let on_file = on_file(&was, has_routes);
    let mut coverage = Coverage::of(is.identity_rules(), &on_file);
    coverage.is_changed().then(|| {
        former.iter().for_each(|listed| coverage.look_at(listed, false));
        coverage.finish()
    })
}

/// How one request of the namespace `n` fares: nothing where its key is found.
fn end(was: &[&str], is: &[&str], path: &str) -> Option<LossReason> {
    let mut lost = lost(&[record("n", Method::POST, path)], (was, true), is)?;
    lost.pop().map(|lost| lost.reason)
}

#[test]
fn a_key_is_lost_where_the_route_of_its_request_is_gone() {
    let all: &[&str] = &["all n /{*rest}"];
    let orders = "orders n /v1/orders/{*rest}";
    assert_eq!(end(all, &[orders], "/v1/orders/7"), None);
    assert_eq!(end(all, &[orders], "/v1/refunds"), Some(LossReason::NoRoute));
    assert_eq!(
        end(all, &[orders, "open - /v1/{*rest}"], "/v1/refunds"),
        Some(LossReason::Unprotected("open".into(), Mode::Pass))
    );
    assert_eq!(end(all, &[orders, "refund r /v1/refunds"], "/v1/refunds"), Some(LossReason::Other("refund".into())));
    // Another method.
    let gone = lost(&[record("n", Method::PATCH, "/v1/orders")], (&["all n /{*rest}"], false), &[orders]).unwrap();
    assert_eq!(gone[0].reason, LossReason::NoRoute);
    // A request that is refused runs nothing.
    assert_eq!(end(all, &[orders], "/v1/orders/../refunds"), None);
}

/// They wait in the queue of their route, by its name.
#[test]
fn accepted_requests_are_lost_where_their_route_is_renamed() {
    let (was, is) = (gate(&["any n /{*rest}"]), gate(&["other n /{*rest}"]));
    let queued = |state| {
        let mut listed = record("n", Method::POST, "/x");
        listed.record.state = state;
        listed
    };
    let reason = |is: &Gate, state, is_accepted| {
        let on_file = on_file(&was, true);
        let mut coverage = Coverage::of(is.identity_rules(), &on_file);
        coverage.look_at(&queued(state), is_accepted);
        coverage.finish().pop().map(|lost| lost.reason)
    };
    assert_eq!(reason(&is, State::InFlight, true), Some(LossReason::Undelivered("any".into())));
    assert_eq!(reason(&is, State::InFlight, false), None, "its record is found");
    assert_eq!(reason(&is, State::Unknown, true), None, "it was given up");
    assert_eq!(reason(&gate(&["any n /{*rest}", "more n /v1/more"]), State::InFlight, true), None);
    // No route takes a retry either.
    assert_eq!(reason(&gate(&["other n /y"]), State::InFlight, true), Some(LossReason::NoRoute));
}

#[test]
fn a_more_specific_route_takes_keys_away() {
    let all = "all n /{*rest}";
    assert_eq!(end(&[all], &[all, "open - /open"], "/open"), Some(LossReason::Unprotected("open".into(), Mode::Pass)));
    assert_eq!(end(&[all], &[all, "open - /open"], "/x"), None);
    // It did before.
    assert_eq!(end(&[all, "a m /a", "b m /b"], &[all, "a m /a", "b - /b"], "/a"), None);
}

#[test]
fn records_are_looked_at_only_where_routes_changed() {
    let is_looked_at = |was: &[&str], is: &[&str]| lost(&[], (was, true), is).is_some();
    let (one, two) = ("one n /v1/a", "two n /v1/b");
    assert!(!is_looked_at(&[one, two], &[two, one]), "their order never matters");
    assert!(!is_looked_at(&[one], &[one, "rest - /{*rest}"]), "it is less specific");
    assert!(!is_looked_at(&[one], &[one, "other m /v1/c"]), "it takes no request of the other");
    assert!(is_looked_at(&[one, two], &[one]));
    assert!(is_looked_at(&["all n /v1/{*rest}"], &["all n /v1/{*rest}", one.replace(" n ", " m ").as_str()]));
    assert!(lost(&[], (&[one], false), &[one]).is_some(), "an earlier version kept no routes");
    // The store counts these.
    assert!(!is_looked_at(&[one], &["one m /v1/a"]));
}

#[test]
fn a_host_is_not_known_of_a_record() {
    let (one, two) = ("one n a.example/x", "two n b.example/x");
    assert_eq!(end(&[one, two], &[one, "two m b.example/x"], "/x"), Some(LossReason::Other("two".into())));
    assert_eq!(end(&[one], &[one, "two m b.example/x"], "/x"), None);
    assert_eq!(
        end(&["all n /x"], &["all n /x", two.replace(" n ", " m ").as_str()], "/x"),
        Some(LossReason::Other("two".into()))
    );
    // Where the former routes are not known either, a host that finds it is enough.
    let from_earlier = |is: &[&str]| lost(&[record("n", Method::POST, "/x")], (&[one], false), is).unwrap();
    assert_eq!(from_earlier(&[one]), []);
    assert_eq!(from_earlier(&["one n a.example/y"]).len(), 1);
}

#[test]
fn a_key_that_was_lost_before_is_not_lost_again() {
    let (orders, refunds) = ("orders n /v1/orders", "refunds n /v1/refunds");
    // An operator has accepted that, or these routes would not be on file.
    assert_eq!(end(&[orders], &[orders, refunds], "/v1/charges"), None);
}

#[test]
fn a_key_from_before_its_rules_changed_is_not_lost_again() {
    let (was, is) = (gate(&["all n /{*rest}"]), gate(&["some n /v1/{*rest}"]));
    let mut on_file = on_file(&was, true);
    let present = on_file[0].periods[0].clone();
    on_file[0].periods.push(crate::store::RulesPeriod { since: Timestamp(500), ..present });
    on_file[0].periods[0].digest = [9; 32];
    let mut coverage = Coverage::of(is.identity_rules(), &on_file);
    for claimed_at in [499, 500] {
        let mut claimed = record("n", Method::POST, "/x");
        claimed.record.claimed_at = Timestamp(claimed_at);
        coverage.look_at(&claimed, false);
    }
    assert_eq!(coverage.finish()[0].keys, 1);
}

#[test]
fn what_cannot_be_told_counts_as_lost() {
    let long = format!("/v1/{}", "a/".repeat(150));
    assert_eq!(end(&["all n /{*rest}"], &["some n /v1/{*rest}"], &long), None);
    let exact = format!("exact n {long}b");
    assert_eq!(end(&["all n /{*rest}"], &["few n /v1/x", &exact], &long), Some(LossReason::NoRoute));
    // Cut behind a slash, it could be read as the path of another route.
    let content = format!("/v1/files/{}/content", "i".repeat(245));
    let (keep, file) = ("keep n /v1/x", "file m /v1/files/{id}");
    assert_eq!(end(&[keep, "down n /v1/files/{id}/content"], &[keep, file], &content), Some(LossReason::NoRoute));
    for (head, reason) in [(&[9, 9][..], LossReason::Unreadable), (&SEALED, LossReason::Sealed)] {
        let mut closed = record("n", Method::POST, "/x");
        closed.record.head = Bytes::from_static(head);
        let closed = lost(&[closed], (&["all n /{*rest}"], true), &["some n /v1/{*rest}"]).unwrap();
        assert_eq!((&closed[0].reason, closed[0].keys), (&reason, 1));
    }
}

#[test]
fn keys_are_counted_and_few_requests_are_named() {
    let mut records: Vec<RecordEntry> =
        (0..100).map(|number| record("n", Method::POST, &format!("/v1/refunds/{number}"))).collect();
    records[0].record.state = State::InFlight;
    let mut expired = record("n", Method::POST, "/v1/refunds/old");
    expired.record.until = NOW;
    records.push(expired);
    records.push(record("m", Method::POST, "/v1/refunds/other"));
    let found = lost(&records, (&["all n /{*rest}"], true), &["orders n /v1/orders"]).unwrap();
    let [found] = &found[..] else { panic!("{found:?}") };
    assert_eq!((found.keys, found.in_flight, found.until), (100, 1, Some(records[1].record.until)));
    assert_eq!(found.examples, ["POST /v1/refunds/0", "POST /v1/refunds/1", "POST /v1/refunds/2"]);
    let former: Vec<&str> = found.former.iter().map(|route| &*route.path).collect();
    assert_eq!((former, found.methods.len()), (vec!["/{*rest}"], 1));
}
