//! Looking through the live keys of a store for those that a configuration would forget without the store's noticing.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::gate::Gate;
use crate::gate::identity::IdentityRules;
use crate::gate::identity::coverage::{Coverage, LostKeys};
use crate::store::deliveries::DeliveryFilter;
use crate::store::{Error, Filter, IdentityChange, LiveKeys, NamespaceRuleSet, NamespaceRules, RecordEntry, Store};

/// How many records are asked for at once.
const CHUNK: usize = 1000;

/// Looks for live keys whose requests the routes of their namespace no longer take: at every record, where routes changed.
pub(in crate::cli) async fn look_for_lost(store: &dyn Store, rules: IdentityRules<'_>) -> Result<Vec<LostKeys>, Error> {
    let on_file = store.identities().await?;
    let mut coverage = Coverage::of(rules, &on_file);
    if coverage.is_changed() {
        tracing::debug!("the routes changed: looking for live keys whose requests they no longer take");
        look_at_each(store, rules.service(), |listed, is_accepted| coverage.look_at(listed, is_accepted)).await?;
    }
    Ok(coverage.finish())
}

/// Looks for live keys that `current` may have claimed and `next` would not find, in namespaces that are not on file: another
/// gate has given these up while `current` goes on with them, and the store no longer counts their keys.
pub(in crate::cli) async fn look_for_given_up(
    store: &dyn Store,
    current: &Gate,
    next: &Gate,
    on_file: &[NamespaceRules],
) -> Result<Vec<IdentityChange>, Error> {
    let (mut given_up, (_, adopting)) = (current.identities().1, next.identities());
    given_up.retain(|own| {
        let is_on_file = |found: &NamespaceRules| found.digest.is_some() && found.is_for(own);
        // A reload keeps the service.
        let finds = |rule: &NamespaceRuleSet| rule.namespace == own.namespace && rule.finds(Some(own.digest));
        !on_file.iter().any(is_on_file) && !adopting.iter().any(finds)
    });
    if given_up.is_empty() {
        return Ok(Vec::new());
    }
    let mut live: BTreeMap<(Arc<str>, Arc<str>), LiveKeys> = BTreeMap::new();
    look_at_each(store, current.identity_rules().service(), |listed, _| {
        if let Some(origin) = listed.origin.as_ref().filter(|_| listed.is_live()) {
            let of_route = live.entry((Arc::clone(&origin.namespace), Arc::clone(&origin.route)));
            of_route.or_insert_with(|| LiveKeys::of(&origin.route)).add(&listed.record);
        }
    })
    .await?;
    let changes = given_up.into_iter().map(|rules| IdentityChange {
        live: live.iter().filter(|((of, _), _)| *of == rules.namespace).map(|(_, live)| live.clone()).collect(),
        service: rules.service,
        namespace: rules.namespace,
        digest: rules.digest,
        description: rules.description,
    });
    Ok(changes.filter(|change| !change.live.is_empty()).collect())
}

/// Looks at every record of a service, and at every request that was accepted and has no record yet: its key is as live.
async fn look_at_each(
    store: &dyn Store,
    service: &Arc<str>,
    mut look: impl FnMut(&RecordEntry, bool),
) -> Result<(), Error> {
    let filter = Filter { service: Some(Arc::clone(service)), ..Filter::default() };
    let mut after = None;
    loop {
        let chunk = store.scan(filter.clone(), after, CHUNK).await?;
        chunk.records.iter().for_each(|listed| look(listed, false));
        after = chunk.next;
        if after.is_none() {
            break;
        }
    }
    let Some(queue) = store.deliveries() else { return Ok(()) };
    let filter = DeliveryFilter { service: Some(Arc::clone(service)), ..DeliveryFilter::default() };
    let mut after = None;
    loop {
        let page = queue.deliveries(filter.clone(), after, CHUNK).await?;
        for delivery in page.deliveries {
            look(&delivery.as_listed(), true);
        }
        after = page.next;
        if after.is_none() {
            return Ok(());
        }
    }
}
