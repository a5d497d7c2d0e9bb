//! Selects the host to use among several.
//!
//! A host is chosen once a commit has returned on it, and a claim and a settle have worked where records are to be
//! kept. A login proves nothing: an old primary whose synchronous standby was promoted accepts logins and commits
//! nothing. The chosen host stays the chosen one for as long as it commits. When that is in doubt, all hosts are
//! probed at once. If another one is selected, every connection to the former ends.
//!
//! Of several hosts that commit, the one on the highest timeline is used: the others were left behind by a promotion. See
//! `lineage`.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use super::connect::Connector;
use super::error::OpenError;
use super::lineage::{Lineage, LineageGuard};
use super::session::{CallError, Session};
use super::{hosts, schema, write_check};

/// The delay between two probes of all hosts, or of one that failed while others are awaited.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// The hosts of one store, numbered in the order of the URL.
pub(super) struct Hosts {
    /// The host in use; nothing before the first choice.
    chosen: watch::Sender<Option<usize>>,
    /// Held while all hosts are probed.
    probing: tokio::sync::Mutex<()>,
    suspected: Notify,
    suspicion: Mutex<Option<(usize, Suspicion)>>,
    /// The store and the timeline of the hosts that were used.
    pub(super) lineage_guard: LineageGuard,
    each: Vec<Host>,
}

/// The state of one host.
#[derive(Default)]
struct Host {
    /// Whether a pooler was met there.
    is_pooled: AtomicBool,
    /// Why it was found unfit the last time.
    unfit: Mutex<Option<String>>,
}

/// Why the chosen host may be the wrong one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Suspicion {
    /// A statement takes long, or a connection failed.
    Silent,
    /// It said that it cannot write: its disk is full, or it is a standby. It is used only if no other host commits.
    Refuses,
}

/// The result of probing a host.
#[derive(Debug)]
enum ProbeResult {
    /// It can be used. Its lineage is known for a store of records.
    Works(Option<Lineage>),
    /// It commits, but lacks the schema, a right or the records.
    Unfit(OpenError),
    /// It cannot be reached or takes no writes.
    Fails(OpenError),
}

/// The result of probing all hosts.
#[derive(Debug, PartialEq, Eq)]
enum Selection {
    Take(usize),
    Wait,
    Nothing,
}

impl Hosts {
    pub(super) fn new(count: usize) -> Self {
        // A single host is used without probing; its connections are checked one by one.
        let chosen = watch::Sender::new((count <= 1).then_some(0));
        Self {
            chosen,
            probing: tokio::sync::Mutex::default(),
            suspected: Notify::new(),
            suspicion: Mutex::default(),
            lineage_guard: LineageGuard::default(),
            each: (0..count).map(|_| Host::default()).collect(),
        }
    }

    pub(super) fn chosen(&self) -> Option<usize> {
        *self.chosen.borrow()
    }

    /// Has all hosts probed again, unless another host is in use by now.
    pub(super) fn suspect(&self, host: usize, suspicion: Suspicion) {
        if self.chosen() != Some(host) {
            return;
        }
        let mut noted = self.suspicion.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*noted, Some((noted, Suspicion::Refuses)) if noted == host) {
            *noted = Some((host, suspicion));
        }
        drop(noted);
        self.suspected.notify_one();
    }

    /// Returns once another host than this is in use.
    pub(super) fn left(&self, host: usize) -> impl Future<Output = ()> + Send + 'static {
        let mut chosen = self.chosen.subscribe();
        async move {
            if chosen.wait_for(|chosen| chosen.is_some_and(|chosen| chosen != host)).await.is_err() {
                // The store is gone, and its connections end with their owners.
                std::future::pending().await
            }
        }
    }

    pub(super) fn is_pooled(&self, host: usize) -> bool {
        self.each.get(host).is_some_and(|host| host.is_pooled.load(Ordering::Relaxed))
    }

    /// Notes that a host is behind a pooler.
    pub(super) fn set_pooled(&self, host: usize) {
        if let Some(host) = self.each.get(host) {
            host.is_pooled.store(true, Ordering::Relaxed);
        }
    }

    fn take_suspicion(&self) -> Option<(usize, Suspicion)> {
        self.suspicion.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether a result changes the known fitness of a host.
    fn is_change(&self, host: usize, result: &ProbeResult) -> bool {
        let unfit = match result {
            ProbeResult::Works(_) => None,
            ProbeResult::Unfit(error) => Some(error.to_string()),
            ProbeResult::Fails(_) => return false,
        };
        let Some(host) = self.each.get(host) else { return false };
        let mut last = host.unfit.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *last, unfit.clone()) != unfit
    }
}

impl Connector {
    /// The host in use, chosen now if none is.
    pub(super) async fn host(&self) -> Result<usize, OpenError> {
        if let Some(host) = self.hosts().chosen() {
            return Ok(host);
        }
        let _trying = self.hosts().probing.lock().await;
        if let Some(host) = self.hosts().chosen() {
            return Ok(host);
        }
        let (host, lineage) = self.probe_all(&hosts::order(self.servers())).await?;
        self.choose(host, lineage);
        Ok(host)
    }

    /// Probes the hosts again whenever the one in use is suspected, until one commits. Runs for as long as the store
    /// does.
    pub(super) async fn run_host_selection(self) {
        if hosts::count(self.servers()) == 1 {
            return;
        }
        loop {
            self.hosts().suspected.notified().await;
            while let Some((host, suspicion)) = self.hosts().take_suspicion() {
                if !self.reselect(host, suspicion).await {
                    self.hosts().suspect(host, suspicion);
                }
                sleep(RETRY_DELAY).await;
            }
        }
    }

    /// Selects among all hosts, now that one is suspected. Returns whether one of them can be used.
    async fn reselect(&self, suspected: usize, suspicion: Suspicion) -> bool {
        let _trying = self.hosts().probing.lock().await;
        if self.hosts().chosen() != Some(suspected) {
            return true;
        }
        let mut order = hosts::order(self.servers());
        order.retain(|host| *host != suspected);
        order.insert(if suspicion == Suspicion::Refuses { order.len() } else { 0 }, suspected);
        match self.probe_all(&order).await {
            Ok((host, lineage)) => {
                if host != suspected {
                    let (from, to) = (self.name(suspected), self.name(host));
                    tracing::warn!(
                        from,
                        to,
                        "changing to another database server: the former fails or was left behind"
                    );
                }
                self.choose(host, lineage);
                true
            }
            Err(error) => {
                tracing::debug!(%error, "no database server commits; trying again");
                false
            }
        }
    }

    fn choose(&self, host: usize, lineage: Option<Lineage>) {
        if let Some(lineage) = lineage {
            self.hosts().lineage_guard.add(&lineage, &self.name(host));
        }
        self.hosts().chosen.send_if_modified(|chosen| chosen.replace(host) != Some(host));
    }

    /// The host to use. Each has the time to connect; after that, the first that works is taken.
    async fn probe_all(&self, order: &[usize]) -> Result<(usize, Option<Lineage>), OpenError> {
        let probe = |host: usize, pause: Duration| async move {
            sleep(pause).await;
            (host, self.probe_one(host).await)
        };
        let mut probes: FuturesUnordered<_> = order.iter().map(|host| probe(*host, Duration::ZERO)).collect();
        let mut results: Vec<Option<ProbeResult>> = order.iter().map(|_| None).collect();
        let mut grace = pin!(sleep(self.connect_timeout()));
        let mut is_late = false;
        loop {
            match select(order, &results, is_late) {
                Selection::Take(host) => {
                    self.expect_one_store(&results)?;
                    let Some(ProbeResult::Works(lineage)) = &results[host] else { return Err(OpenError::late()) };
                    return Ok((host, *lineage));
                }
                Selection::Nothing => return Err(self.no_host_error(results)),
                Selection::Wait => {}
            }
            tokio::select! {
                Some((host, result)) = probes.next() => {
                    if self.hosts().is_change(host, &result) {
                        self.log_change(host, &result);
                    }
                    // A standby that is promoted meanwhile does not wait for a host that hangs.
                    if matches!(result, ProbeResult::Fails(_)) {
                        probes.push(probe(host, RETRY_DELAY));
                    }
                    results[host] = Some(result);
                }
                () = grace.as_mut(), if !is_late => is_late = true,
            }
        }
    }

    fn log_change(&self, host: usize, result: &ProbeResult) {
        let server = self.name(host);
        match result {
            ProbeResult::Unfit(error) => {
                tracing::warn!(server, %error, "a database server accepts writes but cannot be used")
            }
            ProbeResult::Works(_) | ProbeResult::Fails(_) => {
                tracing::info!(server, "this database server can be used again")
            }
        }
    }

    /// Whether a host can be used. It has as long as a connection for use.
    async fn probe_one(&self, host: usize) -> ProbeResult {
        let probing = async {
            match self.connect_probe(host).await {
                Ok(session) => Probe(Some(session)).run(self).await,
                Err(error) => ProbeResult::Fails(error),
            }
        };
        timeout(self.patience(), probing).await.unwrap_or_else(|_| ProbeResult::Fails(OpenError::late()))
    }

    /// Refuses to choose between hosts that hold different stores: either may have the keys that were run.
    fn expect_one_store(&self, results: &[Option<ProbeResult>]) -> Result<(), OpenError> {
        let mut found = results.iter().enumerate().filter_map(|(host, result)| match result {
            Some(ProbeResult::Works(Some(lineage))) => Some((host, lineage.store)),
            _ => None,
        });
        let Some((first, store)) = found.next() else { return Ok(()) };
        match found.find(|(_, other)| *other != store) {
            Some((host, _)) => Err(OpenError::OtherStore { server: self.name(host), first: self.name(first) }),
            None => Ok(()),
        }
    }

    /// The error if no host can be selected. A retry may help if one of them is only unreachable.
    fn no_host_error(&self, results: Vec<Option<ProbeResult>>) -> OpenError {
        let mut errors: Vec<(usize, OpenError)> = Vec::new();
        for (host, result) in results.into_iter().enumerate() {
            match result {
                // A host that commits was found, and waiting does not help.
                Some(ProbeResult::Unfit(error)) => return error,
                Some(ProbeResult::Fails(error)) => errors.push((host, error)),
                Some(ProbeResult::Works(_)) | None => {}
            }
        }
        if !errors.is_empty() && !errors.iter().any(|(_, error)| error.is_passing()) {
            return errors.swap_remove(0).1;
        }
        let failures = errors.iter().map(|(host, error)| {
            let name = self.name(*host);
            match error {
                OpenError::Unreachable(message) => format!("{name}: {message}"),
                other => format!("{name}: {other}"),
            }
        });
        OpenError::Unreachable(failures.collect::<Vec<_>>().join("; "))
    }
}

/// Which host to use, by the probe results so far. `results` is in the order of hosts, not in that of `order`.
fn select(order: &[usize], results: &[Option<ProbeResult>], is_late: bool) -> Selection {
    let is_complete = order.iter().all(|host| results[*host].is_some());
    if !is_complete && !is_late {
        return Selection::Wait;
    }
    let working = order.iter().filter_map(|host| match &results[*host] {
        Some(ProbeResult::Works(lineage)) => Some((*host, lineage)),
        Some(ProbeResult::Unfit(_) | ProbeResult::Fails(_)) | None => None,
    });
    let is_newer = |one: &Option<Lineage>, other: &Option<Lineage>| matches!((one, other), (Some(one), Some(other)) if one.is_newer_than(other));
    match working.reduce(|best, next| if is_newer(next.1, best.1) { next } else { best }) {
        Some((host, _)) => Selection::Take(host),
        None if is_complete => Selection::Nothing,
        None => Selection::Wait,
    }
}

/// The connection of a probe. Dropping it before the probe has ended cancels its statement on the server.
struct Probe(Option<Session>);

impl Probe {
    async fn run(mut self, connector: &Connector) -> ProbeResult {
        let Some(session) = &self.0 else { return ProbeResult::Fails(OpenError::late()) };
        let result = match session.commit().await.map_err(CallError::into_open_error) {
            Err(error) => ProbeResult::Fails(error),
            Ok(()) if !connector.is_for_records() => ProbeResult::Works(None),
            Ok(()) => match check_writes(session, connector).await {
                Ok(lineage) => ProbeResult::Works(Some(lineage)),
                Err(error) if error.is_passing() => ProbeResult::Fails(error),
                Err(error) => ProbeResult::Unfit(error),
            },
        };
        self.0 = None;
        result
    }
}

/// Checks that the server of a connection can keep records, and holds the store in use. A server whose disk is full
/// still commits small writes.
async fn check_writes(session: &Session, connector: &Connector) -> Result<Lineage, OpenError> {
    schema::check(session.client()).await?;
    let lineage = connector.recognise(session).await?;
    write_check::check_writes(session).await.map_err(CallError::into_open_error)?;
    Ok(lineage)
}

impl Drop for Probe {
    fn drop(&mut self) {
        if let Some(session) = self.0.take() {
            session.give_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probe results, in the order of hosts: a digit works on that timeline, `+` works on an unknown one, `-` failed,
    /// `x` is unfit, `.` has not ended.
    fn picked(order: &[usize], ended: &str, is_late: bool) -> Selection {
        let on = |timeline: Option<u32>| Some(ProbeResult::Works(Some(Lineage { store: [1; 16], timeline })));
        let results = ended.chars().map(|how| match how {
            '+' => on(None),
            '-' => Some(ProbeResult::Fails(OpenError::late())),
            'x' => Some(ProbeResult::Unfit(OpenError::NoSchema)),
            '.' => None,
            timeline => on(timeline.to_digit(10)),
        });
        select(order, &results.collect::<Vec<_>>(), is_late)
    }

    #[test]
    fn the_first_host_on_the_highest_timeline_is_selected_after_a_bounded_wait() {
        let cases = [
            (&[0, 1][..], "++", false, Selection::Take(0)),
            (&[0, 1], "+.", false, Selection::Wait),
            (&[0, 1], "+.", true, Selection::Take(0)),
            (&[0, 1], "-+", false, Selection::Take(1)),
            (&[0, 1], "x+", false, Selection::Take(1)),
            (&[0, 1], ".+", false, Selection::Wait),
            (&[0, 1], ".+", true, Selection::Take(1)),
            (&[0, 1], ".-", true, Selection::Wait),
            (&[0, 1], "..", true, Selection::Wait),
            (&[0, 1], "--", false, Selection::Nothing),
            (&[0, 1], "-x", false, Selection::Nothing),
            (&[1, 0], "++", false, Selection::Take(1)),
            (&[1, 0], "+.", true, Selection::Take(0)),
            (&[2, 0, 1], "-+.", true, Selection::Take(1)),
            (&[0, 1], "12", false, Selection::Take(1)),
            (&[0, 1], "21", false, Selection::Take(0)),
            (&[1, 0], "11", false, Selection::Take(1)),
            (&[0, 1, 2], "1-2", false, Selection::Take(2)),
            (&[0, 1], "+2", false, Selection::Take(0)),
            (&[0, 1], "1.", true, Selection::Take(0)),
        ];
        for (order, ended, is_late, expected) in cases {
            assert_eq!(picked(order, ended, is_late), expected, "{order:?} {ended} {is_late}");
        }
    }

    #[test]
    fn only_the_host_in_use_is_suspected_and_a_refusal_is_kept() {
        let hosts = Hosts::new(2);
        hosts.suspect(0, Suspicion::Silent);
        assert_eq!(hosts.take_suspicion(), None, "none is in use");
        hosts.chosen.send_replace(Some(1));
        hosts.suspect(0, Suspicion::Silent);
        assert_eq!(hosts.take_suspicion(), None, "it is not the one in use");
        hosts.suspect(1, Suspicion::Refuses);
        hosts.suspect(1, Suspicion::Silent);
        assert_eq!(hosts.take_suspicion(), Some((1, Suspicion::Refuses)));
        assert_eq!(hosts.take_suspicion(), None);
    }
}
