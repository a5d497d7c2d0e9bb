//! Making the store know by which rules identities are made, or refusing to serve by others.

use std::pin::pin;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::time::{sleep, timeout};

use super::Signals;
use super::opening::REMINDER;
use crate::admin::{AuditWriter, Outcome, Phase, Readiness};
use crate::cli::identity_changes::{
    ACCEPT, Forgotten, Occasion, UNANNOUNCED, Written, is_unannounced, look_for_given_up, look_for_lost, report,
};
use crate::gate::identity::coverage::{LossReason, LostKeys};
use crate::gate::{Gate, KNOWN_AFTER, are_in_force, replaces};
use crate::store::{Error, IdentityChange, LiveKeys, NamespaceRuleSet, NamespaceRules, Store};
use crate::telemetry::log_throttle::LogThrottle;
use crate::telemetry::wall_clock;

/// Between two tries to prepare a store that has gone away.
const AGAIN: Duration = Duration::from_secs(1);

/// How long a store is asked for what only makes an advice better: at a reload, claims of the routes that change wait meanwhile.
const LOOK: Duration = Duration::from_secs(2);

/// How long a start waits for its store before it says so.
const SLOW: Duration = Duration::from_secs(5);

const REPLACED: &str =
    "rules of keys are replaced, or were in the last minute: waiting until gates that run with the former ones know";

const NO_ANSWER: &str = "it did not answer in time";

/// A start that waits for its store to take its configuration.
pub(super) struct StoreWait<'a> {
    pub(super) readiness: &'a Readiness,
    /// How the log names the store.
    pub(super) store: String,
}

/// Makes the store know this configuration; false if the process was stopped while it waited for that. Other rules are taken
/// where `accepting`, and what that forgets is in the audit log before.
pub(super) async fn at_start(
    gate: &Gate,
    store: &dyn Store,
    written: &Written,
    accepting: Option<&AuditWriter>,
    is_shared: bool,
    waiting: &StoreWait<'_>,
    signals: &mut Signals,
) -> anyhow::Result<bool> {
    let accept_change = accepting.is_some();
    let (origins, identities) = gate.identities();
    // Looked for until it is known, and then no more: of what may have been adopted nothing is left to ask.
    let mut found: Option<Forgotten> = None;
    let mut begun = None;
    let mut is_replacing = false;
    let reminder = LogThrottle::every(REMINDER);
    let changes = loop {
        let adopt = async {
            // No other gate runs on a store that is not shared.
            if is_shared {
                let on_file = store.identities().await?;
                if !accept_change && is_unannounced(&on_file, gate.identity_rules()) {
                    return Ok(Err(Unannounced));
                }
                // Of what an earlier try adopted nothing is left to see.
                is_replacing |= replaces(&on_file, gate.identity_rules(), wall_clock());
            }
            if found.is_none() {
                let lost = look_for_lost(store, gate.identity_rules()).await?;
                let changes = match accept_change || !lost.is_empty() {
                    true => store.changes(origins.clone(), identities.clone()).await?,
                    false => Vec::new(),
                };
                found = Some(Forgotten { changes, lost });
            }
            if let (Some(writer), Some(found), None) = (accepting, &found, &begun)
                && !found.is_nothing()
            {
                begun = Some(writer.accepting_identity_change(store, &found.by_namespace()).await?);
            }
            match &found {
                Some(found) if !accept_change && !found.lost.is_empty() => Ok(Ok(Vec::new())),
                _ => store.adopt(origins.clone(), identities.clone(), accept_change).await.map(Ok),
            }
        };
        // Another process may adopt, and where rules or routes changed that takes as long as there are records.
        let mut adopt = pin!(adopt);
        let adopted = loop {
            tokio::select! {
                adopted = &mut adopt => break adopted,
                () = signals.stop() => return Ok(false),
                () = sleep(SLOW) => {
                    if reminder.due().is_some() {
                        tracing::warn!(store = waiting.store, "the store has not taken this configuration yet; still waiting");
                    }
                    waiting.readiness.set(Phase::WaitingForStore);
                }
            }
        };
        match adopted {
            Ok(Ok(changes)) => break changes,
            Ok(Err(unannounced)) => bail!(unannounced),
            // It went away just after it was opened, or another session holds a lock.
            Err(error) if error.cause().kind.is_passing() => {
                waiting.readiness.set(Phase::WaitingForStore);
                if reminder.due().is_some() {
                    tracing::warn!(store = waiting.store, %error, "the store does not take this configuration; trying again every second");
                }
            }
            Err(error) => return Err(error).context("cannot prepare the store"),
        }
        if timeout(AGAIN, signals.stop()).await.is_ok() {
            return Ok(false);
        }
    };
    let found = found.unwrap_or_default();
    let is_adopted = changes.is_empty() && (accept_change || found.lost.is_empty());
    if is_adopted && is_replacing {
        tracing::info!(wait = ?KNOWN_AFTER, "{REPLACED}");
        if timeout(KNOWN_AFTER, signals.stop()).await.is_ok() {
            return Ok(false);
        }
    }
    if accept_change {
        if let Some(begun) = begun {
            begun.end(Outcome::Done).await;
        }
        tell_forgotten(&found);
        return Ok(true);
    }
    let changes = if found.lost.is_empty() { changes } else { found.changes };
    let forgotten = Forgotten { changes, lost: found.lost };
    refuse(&forgotten, gate, store, written, Occasion::Start).await.map(|()| true)
}

/// Makes the store know the configuration. Where that replaces rules, or another gate has just replaced them, waits until
/// gates that run with the former ones know, and claim nothing by them any more.
async fn adopt_between_gates(gate: &Gate, store: &dyn Store, is_replacing: bool) -> Result<Vec<IdentityChange>, Error> {
    let (origins, identities) = gate.identities();
    let changes = store.adopt(origins, identities, false).await?;
    if is_replacing && changes.is_empty() {
        tracing::info!(wait = ?KNOWN_AFTER, "{REPLACED}");
        sleep(KNOWN_AFTER).await;
    }
    Ok(changes)
}

/// Refuses a reload after which routes would no longer take requests that have live keys, or keys of `current` would be forgotten
/// that the store does not count, since another gate has given up their namespace. Claims that the next routes find go on
/// meanwhile.
pub(super) async fn look_before_reload(
    current: &Gate,
    next: &Gate,
    store: &dyn Store,
    written: &Written,
    is_shared: bool,
) -> anyhow::Result<()> {
    let cannot = "cannot look for live keys in the store";
    let lost = look_for_lost(store, next.identity_rules()).await.context(cannot)?;
    let mut changes = Vec::new();
    if is_shared {
        let on_file = store.identities().await.context(cannot)?;
        // Where another gate has replaced the rules of this one, it claims nothing.
        if are_in_force(&on_file, current.identity_rules()) {
            changes = look_for_given_up(store, current, next, &on_file).await.context(cannot)?;
        }
    }
    if lost.is_empty() && changes.is_empty() {
        return Ok(());
    }
    let (origins, identities) = next.identities();
    changes.extend(store.changes(origins, identities).await.context(cannot)?);
    refuse(&Forgotten { changes, lost }, next, store, written, Occasion::Reload).await
}

/// Makes the store know the configuration of `next`, which is to take the place of `current`, within `patience`. Meanwhile
/// nobody claims whose rules change.
pub(super) async fn at_reload(
    current: &Gate,
    next: &Gate,
    store: &dyn Store,
    written: &Written,
    is_shared: bool,
    patience: Duration,
    readiness: &Readiness,
) -> anyhow::Result<()> {
    let on_file = match timeout(patience, store.identities()).await {
        Ok(Ok(on_file)) => on_file,
        Ok(Err(error)) => bail!("cannot prepare the store: {error}"),
        Err(_) => bail!("cannot prepare the store: {NO_ANSWER}"),
    };
    let is_replacing = is_shared && replaces(&on_file, next.identity_rules(), wall_clock());
    let adopting = adopt_between_gates(next, store, is_replacing);
    let failure = match timeout(patience, adopting).await {
        Ok(Ok(changes)) => {
            let forgotten = Forgotten { changes, lost: Vec::new() };
            return refuse(&forgotten, next, store, written, Occasion::Reload).await;
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => NO_ANSWER.to_owned(),
    };
    if !are_in_force(&on_file, current.identity_rules()) {
        bail!("cannot prepare the store: {failure}");
    }
    // It may come to the store all the same. A gate that went on by other rules than the store knows would have its
    // records forgotten at the next start without a word.
    tracing::warn!(
        error = failure,
        "the store cannot be prepared for the new configuration: going back to the former one"
    );
    // Requests of the routes that were to change wait meanwhile, and are refused.
    readiness.set_claims_stopped(true);
    loop {
        let error = match timeout(patience, go_back(current, next, store, &on_file)).await {
            Ok(Ok(())) => break,
            Ok(Err(error)) => error.to_string(),
            Err(_) => NO_ANSWER.to_owned(),
        };
        tracing::warn!(error, "the store cannot be set back to the former configuration; trying again");
        sleep(AGAIN).await;
    }
    readiness.set_claims_stopped(false);
    bail!("cannot prepare the store: {failure}");
}

/// Puts the rules of `current` back on file, where those of `next` may have come. `before` is what the store had on file when the
/// reload began.
///
/// Where another gate has replaced the rules meanwhile, be it by those of `next`, it changes nothing that forgets what that gate has
/// recorded by them. This one has recorded nothing by `next`.
async fn go_back(current: &Gate, next: &Gate, store: &dyn Store, before: &[NamespaceRules]) -> Result<(), Error> {
    let on_file = store.identities().await?;
    if [current, next].iter().any(|gate| are_in_force(&on_file, gate.identity_rules())) {
        let added = next.identities().1;
        let is_before =
            |rule: &NamespaceRuleSet| before.iter().any(|found| found.digest.is_some() && found.is_for(rule));
        let added = added.iter().filter(|rule| !is_before(rule));
        let identities = beside(current, &on_file, &added.collect::<Vec<_>>());
        store.adopt(current.identities().0, identities, false).await?;
    }
    Ok(())
}

/// The rules of a gate, and beside them those of namespaces that other gates have on file: all but those that it has `added` itself.
fn beside(current: &Gate, on_file: &[NamespaceRules], added: &[&NamespaceRuleSet]) -> Vec<NamespaceRuleSet> {
    let (_, mut rules) = current.identities();
    let service = current.identity_rules().service();
    let others = on_file.iter().filter(|found| found.service == *service);
    let others = others.filter(|found| !rules.iter().chain(added.iter().copied()).any(|rule| found.is_for(rule)));
    let others: Vec<NamespaceRuleSet> = others.filter_map(NamespaceRuleSet::on_file).collect();
    rules.extend(others);
    rules
}

/// A configuration is refused because other gates may not know its secret.
#[derive(Debug, thiserror::Error)]
#[error("{UNANNOUNCED}")]
struct Unannounced;

/// A configuration is refused because it would forget keys.
#[derive(Debug, thiserror::Error)]
#[error("{report}")]
pub(super) struct Refused {
    /// What would be forgotten, and what to do about it, in lines.
    pub(super) report: String,
    /// How many keys.
    pub(super) keys: u64,
}

/// Says what would be forgotten and what to do about it, if anything would be.
async fn refuse(
    forgotten: &Forgotten,
    gate: &Gate,
    store: &dyn Store,
    written: &Written,
    occasion: Occasion,
) -> anyhow::Result<()> {
    if forgotten.is_nothing() {
        return Ok(());
    }
    // It only makes the advice better.
    let on_file = timeout(LOOK, store.identities()).await.ok().and_then(Result::ok).unwrap_or_default();
    let report = report(forgotten, gate.identity_rules(), &on_file, written, occasion);
    bail!(Refused { report, keys: forgotten.keys() })
}

/// Logs which keys are forgotten.
fn tell_forgotten(forgotten: &Forgotten) {
    for IdentityChange { service, namespace, live, .. } in &forgotten.changes {
        for LiveKeys { route, keys, in_flight, .. } in live {
            tracing::warn!(
                %service,
                %namespace,
                %route,
                keys,
                in_flight,
                "{ACCEPT}: these keys are forgotten, and a retry with one of them runs its request again"
            );
        }
    }
    for LostKeys { namespace, keys, in_flight, examples, reason, .. } in &forgotten.lost {
        if let LossReason::Undelivered(route) = reason {
            tracing::warn!(
                %namespace,
                %route,
                requests = keys,
                "{ACCEPT}: these accepted requests stay in the queue until a route of this name and namespace delivers them"
            );
            continue;
        }
        tracing::warn!(
            %namespace,
            keys,
            in_flight,
            examples = examples.join(", "),
            "{ACCEPT}: the keys of requests that no route of their namespace takes any more are forgotten, and a retry with \
             one of them runs its request again"
        );
    }
    let keys = forgotten.keys();
    if keys == 0 {
        tracing::info!("{ACCEPT}: no key is forgotten; start without it from now on");
    } else {
        tracing::warn!(keys, "{ACCEPT}: keys are forgotten; start without it from now on");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;

    use super::*;
    use crate::gate::tests::{gate_of, route};
    use crate::idempotency::policy::Mode;
    use crate::idempotency::record::{AttemptToken, RecordId};
    use crate::route::Route;
    use crate::store::NewRecord;
    use crate::store::memory::Memory;
    use crate::store::unreliable::{Fault, Operation, Unreliable};

    const PATIENCE: Duration = Duration::from_secs(5);

    /// A gate with a route in each of these namespaces, and of its name.
    fn gate_of_namespaces(names: &[&str]) -> Arc<Gate> {
        let of = |name: &&str| Route { namespace: (*name).into(), ..route(name, Mode::Protect, "host") };
        gate_of(names.iter().map(of).collect())
    }

    async fn claim(store: &dyn Store, gate: &Gate) {
        let span = Duration::from_secs(60);
        let (attempt, head) = (AttemptToken([1; 16]), Bytes::new());
        let origin = gate.identities().0[0].id();
        let fresh = NewRecord { attempt, origin, lease: span, ttl: span, unknown_ttl: span, head };
        store.claim(RecordId([1; 32]), fresh).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_gate_that_replaces_rules_serves_when_the_others_know() {
        let gate = |scope| gate_of(vec![route("charges", Mode::Protect, scope)]);
        let (former, new) = (gate("header:x-tenant"), gate("host"));
        let store = Memory::new();
        let takes = async |gate: &Gate| {
            let (began, on_file) = (tokio::time::Instant::now(), store.identities().await.unwrap());
            let is_replacing = replaces(&on_file, gate.identity_rules(), wall_clock());
            assert!(adopt_between_gates(gate, &store, is_replacing).await.unwrap().is_empty());
            began.elapsed()
        };
        assert_eq!(takes(&former).await, Duration::ZERO, "the first");
        assert_eq!(takes(&former).await, Duration::ZERO);
        assert_eq!(takes(&new).await, KNOWN_AFTER);
        assert_eq!(takes(&new).await, KNOWN_AFTER, "others may not know yet");
        let later = wall_clock().plus(Duration::from_secs(3600));
        assert!(!replaces(&store.identities().await.unwrap(), new.identity_rules(), later));
        assert!(replaces(&store.identities().await.unwrap(), former.identity_rules(), later));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reload_that_fails_half_way_is_taken_back() {
        let gate = |scope| gate_of(vec![route("charges", Mode::Protect, scope)]);
        let (current, next) = (gate("header:x-tenant"), gate("host"));
        for fault in [Fault::Refuse, Fault::LoseCall, Fault::LoseAnswer, Fault::Hang, Fault::HangAfter] {
            let store = Unreliable::new(Arc::new(Memory::new()));
            // Another gate has one namespace more.
            let more = Route { namespace: "more".into(), ..route("more", Mode::Protect, "host") };
            let other = gate_of(vec![route("charges", Mode::Protect, "header:x-tenant"), more]);
            let (origins, identities) = other.identities();
            store.adopt(origins, identities, false).await.unwrap();
            // The former configuration is adopted again until that succeeds.
            store.script_for(Operation::Adopt, [fault, Fault::Refuse]);
            let (readiness, written) = (Readiness::default(), Written::default());
            let reload = at_reload(&current, &next, &store, &written, false, PATIENCE, &readiness);
            let error = reload.await.unwrap_err();
            assert!(!readiness.are_claims_stopped());
            assert!(error.to_string().starts_with("cannot prepare the store"), "{fault:?}: {error}");
            claim(&store, &current).await;
            let changes = async |gate: &Gate| {
                let (origins, identities) = gate.identities();
                store.adopt(origins, identities, false).await.unwrap().len()
            };
            assert!(are_in_force(&store.identities().await.unwrap(), other.identity_rules()), "{fault:?}");
            assert_eq!((changes(&next).await, changes(&current).await), (1, 0), "{fault:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_a_gate_claimed_where_another_has_given_up_is_not_forgotten() {
        let (both, one) = (gate_of_namespaces(&["charges", "refunds"]), gate_of_namespaces(&["refunds"]));
        let store = Memory::new();
        for gate in [&both, &one] {
            let (origins, identities) = gate.identities();
            assert!(store.adopt(origins, identities, false).await.unwrap().is_empty());
        }
        let look = async || look_before_reload(&both, &one, &store, &Written::default(), true).await;
        claim(&store, &both).await;
        let refused = look().await.unwrap_err();
        assert!(refused.is::<Refused>() && refused.to_string().contains("`charges`"), "{refused}");
        let is_as_before = are_in_force(&store.identities().await.unwrap(), one.identity_rules());
        assert!(is_as_before, "nothing is written: the other gate goes on");
        store.remove(RecordId([1; 32]), AttemptToken([1; 16])).await.unwrap();
        look().await.unwrap();
    }

    /// It claims nothing, and what it had recorded before was forgotten on purpose.
    #[tokio::test(start_paused = true)]
    async fn a_gate_whose_namespace_another_has_replaced_may_follow_it() {
        let (former, other) = (gate_of_namespaces(&["charges"]), gate_of_namespaces(&["payments"]));
        let store = Memory::new();
        let (origins, identities) = former.identities();
        store.adopt(origins, identities, false).await.unwrap();
        claim(&store, &former).await;
        let (origins, identities) = other.identities();
        store.adopt(origins, identities, true).await.unwrap();
        look_before_reload(&former, &other, &store, &Written::default(), true).await.unwrap();
        let readiness = Readiness::default();
        at_reload(&former, &other, &store, &Written::default(), true, PATIENCE, &readiness).await.unwrap();
        let on_file = store.identities().await.unwrap();
        assert!(on_file.iter().all(|found| found.digest.is_none() || &*found.namespace == "payments"), "{on_file:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn rules_that_another_gate_replaces_while_a_reload_is_taken_back_stay() {
        let gate = |scope| gate_of(vec![route("charges", Mode::Protect, scope)]);
        let (current, next) = (gate("header:x-tenant"), gate("client-ip"));
        // The other gate has rules of its own, or those of the next configuration: an operator reloads all gates at once.
        let others = [gate("host"), gate("client-ip")];
        let cases = [Fault::Hang, Fault::HangAfter]
            .into_iter()
            .flat_map(|first| others.iter().map(move |other| (first, other)));
        for (first, other) in cases {
            let inner = Arc::new(Memory::new());
            let store = Unreliable::new(Arc::clone(&inner) as Arc<dyn Store>);
            let (origins, identities) = current.identities();
            store.adopt(origins, identities, false).await.unwrap();
            store.script_for(Operation::Adopt, [first, Fault::Refuse]);
            let (readiness, written) = (Readiness::default(), Written::default());
            let reload = at_reload(&current, &next, &store, &written, true, PATIENCE, &readiness);
            let meanwhile = async {
                sleep(PATIENCE + AGAIN / 2).await;
                assert!(readiness.are_claims_stopped());
                let (origins, identities) = other.identities();
                inner.adopt(origins, identities, true).await.unwrap();
                claim(&*inner, other).await;
            };
            let (refused, ()) = tokio::join!(reload, meanwhile);
            refused.unwrap_err();
            assert!(are_in_force(&store.identities().await.unwrap(), other.identity_rules()), "{first:?}");
            assert!(!readiness.are_claims_stopped());
        }
    }

    /// Whether the reload is refused or fails: what the other gate has recorded must be found.
    #[tokio::test(start_paused = true)]
    async fn rules_that_another_gate_has_replaced_do_not_come_back_by_a_reload() {
        let gate = |scope| gate_of(vec![route("charges", Mode::Protect, scope)]);
        let (current, next, other) = (gate("header:x-tenant"), gate("client-ip"), gate("host"));
        let faults = [None, Some(Fault::Refuse), Some(Fault::LoseCall), Some(Fault::Hang)];
        for (fault, next) in faults.into_iter().flat_map(|fault| [(fault, &current), (fault, &next)]) {
            let store = Unreliable::new(Arc::new(Memory::new()));
            for gate in [&current, &other] {
                let (origins, identities) = gate.identities();
                store.adopt(origins, identities, false).await.unwrap();
            }
            claim(&store, &other).await;
            store.script_for(Operation::Adopt, fault);
            let readiness = Readiness::default();
            at_reload(&current, next, &store, &Written::default(), true, PATIENCE, &readiness).await.unwrap_err();
            let on_file = store.identities().await.unwrap();
            assert!(are_in_force(&on_file, other.identity_rules()), "{fault:?}");
            assert!(!are_in_force(&on_file, current.identity_rules()), "{fault:?}");
        }
    }
}
