//! Which of several hosts is used.
//!
//! A host is chosen once a commit has returned on it, and a claim and a settle have worked where records are to be kept. A
//! login proves nothing: an old primary whose synchronous standby was promoted lets everybody in, and commits nothing. The
//! chosen host stays the chosen one for as long as it commits. Where that is in doubt, all hosts are tried at once, and
//! where another one is to be used, every connection to the former ends.
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

use super::connect::{Connector, Failed, Session};
use super::error::OpenError;
use super::lineage::{Lineage, Used};
use super::{hosts, proof, schema};

/// Between two looks at all hosts, or at one that failed while others are waited for.
const PAUSE: Duration = Duration::from_millis(500);

/// The hosts of one store, numbered in the order of the URL.
pub(super) struct Hosts {
    /// The host in use; nothing before the first choice.
    chosen: watch::Sender<Option<usize>>,
    /// Held while all hosts are tried.
    trying: tokio::sync::Mutex<()>,
    doubted: Notify,
    doubt: Mutex<Option<(usize, Doubt)>>,
    /// What was found on the hosts that were used.
    pub(super) used: Used,
    each: Vec<Host>,
}

/// What is known of one of them.
#[derive(Default)]
struct Host {
    /// Whether a pooler was met there.
    is_pooled: AtomicBool,
    /// Why it was found unfit the last time.
    unfit: Mutex<Option<String>>,
}

/// Why the chosen host may be the wrong one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doubt {
    /// A statement takes long, or a connection failed.
    Silent,
    /// It said that it cannot write: its disk is full, or it is a standby. It is used only if no other host commits.
    Refuses,
}

/// How the trial of a host has ended.
#[derive(Debug)]
enum Verdict {
    /// It can be used. What it holds is known where records are to be kept.
    Works(Option<Lineage>),
    /// It commits, but lacks the schema, a right or the records.
    Unfit(OpenError),
    /// It cannot be reached or takes no writes.
    Fails(OpenError),
}

/// What a trial of all hosts has come to.
#[derive(Debug, PartialEq, Eq)]
enum Pick {
    Take(usize),
    Wait,
    Nothing,
}

impl Hosts {
    pub(super) fn new(count: usize) -> Self {
        // One host is used whatever it is like; connections prove themselves.
        let chosen = watch::Sender::new((count <= 1).then_some(0));
        Self {
            chosen,
            trying: tokio::sync::Mutex::default(),
            doubted: Notify::new(),
            doubt: Mutex::default(),
            used: Used::default(),
            each: (0..count).map(|_| Host::default()).collect(),
        }
    }

    pub(super) fn chosen(&self) -> Option<usize> {
        *self.chosen.borrow()
    }

    /// Has the hosts tried again, unless another one than this is in use by now.
    pub(super) fn doubt(&self, host: usize, doubt: Doubt) {
        if self.chosen() != Some(host) {
            return;
        }
        let mut noted = self.doubt.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*noted, Some((noted, Doubt::Refuses)) if noted == host) {
            *noted = Some((host, doubt));
        }
        drop(noted);
        self.doubted.notify_one();
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

    /// Notes that a pooler stands before a host.
    pub(super) fn set_pooled(&self, host: usize) {
        if let Some(host) = self.each.get(host) {
            host.is_pooled.store(true, Ordering::Relaxed);
        }
    }

    fn take_doubt(&self) -> Option<(usize, Doubt)> {
        self.doubt.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether a verdict says another thing of a host's fitness than the last one that said something.
    fn is_news(&self, host: usize, verdict: &Verdict) -> bool {
        let unfit = match verdict {
            Verdict::Works(_) => None,
            Verdict::Unfit(error) => Some(error.to_string()),
            Verdict::Fails(_) => return false,
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
        let _trying = self.hosts().trying.lock().await;
        if let Some(host) = self.hosts().chosen() {
            return Ok(host);
        }
        let (host, lineage) = self.try_all(&hosts::order(self.servers())).await?;
        self.choose(host, lineage);
        Ok(host)
    }

    /// Tries the hosts again whenever the one in use is in doubt, until one commits. Runs for as long as the store does.
    pub(super) async fn keep_choosing(self) {
        if hosts::count(self.servers()) == 1 {
            return;
        }
        loop {
            self.hosts().doubted.notified().await;
            while let Some((host, doubt)) = self.hosts().take_doubt() {
                if !self.choose_again(host, doubt).await {
                    self.hosts().doubt(host, doubt);
                }
                sleep(PAUSE).await;
            }
        }
    }

    /// Chooses among all hosts, now that one is in doubt. Returns whether one of them can be used.
    async fn choose_again(&self, doubted: usize, doubt: Doubt) -> bool {
        let _trying = self.hosts().trying.lock().await;
        if self.hosts().chosen() != Some(doubted) {
            return true;
        }
        let mut order = hosts::order(self.servers());
        order.retain(|host| *host != doubted);
        order.insert(if doubt == Doubt::Refuses { order.len() } else { 0 }, doubted);
        match self.try_all(&order).await {
            Ok((host, lineage)) => {
                if host != doubted {
                    let (from, to) = (self.name(doubted), self.name(host));
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
            self.hosts().used.add(&lineage, &self.name(host));
        }
        self.hosts().chosen.send_if_modified(|chosen| chosen.replace(host) != Some(host));
    }

    /// The host to use. Each has the time to connect; after that, the first that works is taken.
    async fn try_all(&self, order: &[usize]) -> Result<(usize, Option<Lineage>), OpenError> {
        let trial = |host: usize, pause: Duration| async move {
            sleep(pause).await;
            (host, self.try_one(host).await)
        };
        let mut trials: FuturesUnordered<_> = order.iter().map(|host| trial(*host, Duration::ZERO)).collect();
        let mut verdicts: Vec<Option<Verdict>> = order.iter().map(|_| None).collect();
        let mut grace = pin!(sleep(self.reach()));
        let mut is_late = false;
        loop {
            match pick(order, &verdicts, is_late) {
                Pick::Take(host) => {
                    self.expect_one_store(&verdicts)?;
                    let Some(Verdict::Works(lineage)) = &verdicts[host] else { return Err(OpenError::late()) };
                    return Ok((host, *lineage));
                }
                Pick::Nothing => return Err(self.why_none(verdicts)),
                Pick::Wait => {}
            }
            tokio::select! {
                Some((host, verdict)) = trials.next() => {
                    if self.hosts().is_news(host, &verdict) {
                        self.tell(host, &verdict);
                    }
                    // A standby that is promoted meanwhile does not wait for a host that hangs.
                    if matches!(verdict, Verdict::Fails(_)) {
                        trials.push(trial(host, PAUSE));
                    }
                    verdicts[host] = Some(verdict);
                }
                () = grace.as_mut(), if !is_late => is_late = true,
            }
        }
    }

    fn tell(&self, host: usize, verdict: &Verdict) {
        let server = self.name(host);
        match verdict {
            Verdict::Unfit(error) => tracing::warn!(server, %error, "a database server commits and cannot be used"),
            Verdict::Works(_) | Verdict::Fails(_) => tracing::info!(server, "this database server can be used again"),
        }
    }

    /// Whether a host can be used. It has as long as a connection for use.
    async fn try_one(&self, host: usize) -> Verdict {
        let trying = async {
            match self.connect_on_trial(host).await {
                Ok(session) => Trial(Some(session)).judge(self).await,
                Err(error) => Verdict::Fails(error),
            }
        };
        timeout(self.patience(), trying).await.unwrap_or_else(|_| Verdict::Fails(OpenError::late()))
    }

    /// Refuses to choose between hosts that hold different stores: either may have the keys that were run.
    fn expect_one_store(&self, verdicts: &[Option<Verdict>]) -> Result<(), OpenError> {
        let mut found = verdicts.iter().enumerate().filter_map(|(host, verdict)| match verdict {
            Some(Verdict::Works(Some(lineage))) => Some((host, lineage.store)),
            _ => None,
        });
        let Some((first, store)) = found.next() else { return Ok(()) };
        match found.find(|(_, other)| *other != store) {
            Some((host, _)) => Err(OpenError::OtherStore { server: self.name(host), first: self.name(first) }),
            None => Ok(()),
        }
    }

    /// Why no host is chosen. It may help to try again where one of them is only away.
    fn why_none(&self, verdicts: Vec<Option<Verdict>>) -> OpenError {
        let mut errors: Vec<(usize, OpenError)> = Vec::new();
        for (host, verdict) in verdicts.into_iter().enumerate() {
            match verdict {
                // A host that commits was found, and waiting mends nothing there.
                Some(Verdict::Unfit(error)) => return error,
                Some(Verdict::Fails(error)) => errors.push((host, error)),
                Some(Verdict::Works(_)) | None => {}
            }
        }
        let is_away = |(_, error): &(usize, OpenError)| matches!(error, OpenError::Unreachable(_));
        if !errors.is_empty() && !errors.iter().any(is_away) {
            return errors.swap_remove(0).1;
        }
        let told = errors.iter().map(|(host, error)| {
            let name = self.name(*host);
            match error {
                OpenError::Unreachable(told) => format!("{name}: {told}"),
                other => format!("{name}: {other}"),
            }
        });
        OpenError::Unreachable(told.collect::<Vec<_>>().join("; "))
    }
}

/// Which host to use, by how the trials have ended so far. `verdicts` is in the order of hosts, not in that of `order`.
fn pick(order: &[usize], verdicts: &[Option<Verdict>], is_late: bool) -> Pick {
    let is_complete = order.iter().all(|host| verdicts[*host].is_some());
    if !is_complete && !is_late {
        return Pick::Wait;
    }
    let working = order.iter().filter_map(|host| match &verdicts[*host] {
        Some(Verdict::Works(lineage)) => Some((*host, lineage)),
        Some(Verdict::Unfit(_) | Verdict::Fails(_)) | None => None,
    });
    let is_newer = |one: &Option<Lineage>, other: &Option<Lineage>| matches!((one, other), (Some(one), Some(other)) if one.is_newer_than(other));
    match working.reduce(|best, next| if is_newer(next.1, best.1) { next } else { best }) {
        Some((host, _)) => Pick::Take(host),
        None if is_complete => Pick::Nothing,
        None => Pick::Wait,
    }
}

/// A connection of a trial. Where it is dropped before the trial has ended, the server is told to give up its statement.
struct Trial(Option<Session>);

impl Trial {
    async fn judge(mut self, connector: &Connector) -> Verdict {
        let Some(session) = &self.0 else { return Verdict::Fails(OpenError::late()) };
        let verdict = match session.commit().await.map_err(Failed::into_open_error) {
            Err(error) => Verdict::Fails(error),
            Ok(()) if !connector.is_for_records() => Verdict::Works(None),
            Ok(()) => match prove(session, connector).await {
                Ok(lineage) => Verdict::Works(Some(lineage)),
                Err(error @ OpenError::Unreachable(_)) => Verdict::Fails(error),
                Err(error) => Verdict::Unfit(error),
            },
        };
        self.0 = None;
        verdict
    }
}

/// Whether records can be kept on the other end of a connection, and are where those so far are. A server whose disk is
/// full still commits what is small.
async fn prove(session: &Session, connector: &Connector) -> Result<Lineage, OpenError> {
    schema::check(session.client()).await?;
    let lineage = connector.recognise(session).await?;
    proof::prove(session).await.map_err(Failed::into_open_error)?;
    Ok(lineage)
}

impl Drop for Trial {
    fn drop(&mut self) {
        if let Some(session) = self.0.take() {
            session.give_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How trials have ended, in the order of hosts: a digit works on that timeline, `+` works on an unknown one, `-` failed,
    /// `x` is unfit, `.` has not ended.
    fn picked(order: &[usize], ended: &str, is_late: bool) -> Pick {
        let on = |timeline: Option<u32>| Some(Verdict::Works(Some(Lineage { store: [1; 16], timeline })));
        let verdicts = ended.chars().map(|how| match how {
            '+' => on(None),
            '-' => Some(Verdict::Fails(OpenError::late())),
            'x' => Some(Verdict::Unfit(OpenError::NoSchema)),
            '.' => None,
            timeline => on(timeline.to_digit(10)),
        });
        pick(order, &verdicts.collect::<Vec<_>>(), is_late)
    }

    #[test]
    fn the_first_host_on_the_highest_timeline_is_taken_and_a_silent_one_is_waited_for_only_so_long() {
        let cases = [
            (&[0, 1][..], "++", false, Pick::Take(0)),
            (&[0, 1], "+.", false, Pick::Wait),
            (&[0, 1], "+.", true, Pick::Take(0)),
            (&[0, 1], "-+", false, Pick::Take(1)),
            (&[0, 1], "x+", false, Pick::Take(1)),
            (&[0, 1], ".+", false, Pick::Wait),
            (&[0, 1], ".+", true, Pick::Take(1)),
            (&[0, 1], ".-", true, Pick::Wait),
            (&[0, 1], "..", true, Pick::Wait),
            (&[0, 1], "--", false, Pick::Nothing),
            (&[0, 1], "-x", false, Pick::Nothing),
            (&[1, 0], "++", false, Pick::Take(1)),
            (&[1, 0], "+.", true, Pick::Take(0)),
            (&[2, 0, 1], "-+.", true, Pick::Take(1)),
            (&[0, 1], "12", false, Pick::Take(1)),
            (&[0, 1], "21", false, Pick::Take(0)),
            (&[1, 0], "11", false, Pick::Take(1)),
            (&[0, 1, 2], "1-2", false, Pick::Take(2)),
            (&[0, 1], "+2", false, Pick::Take(0)),
            (&[0, 1], "1.", true, Pick::Take(0)),
        ];
        for (order, ended, is_late, expected) in cases {
            assert_eq!(picked(order, ended, is_late), expected, "{order:?} {ended} {is_late}");
        }
    }

    #[test]
    fn a_doubt_counts_for_the_host_in_use_and_a_refusal_is_not_forgotten() {
        let hosts = Hosts::new(2);
        hosts.doubt(0, Doubt::Silent);
        assert_eq!(hosts.take_doubt(), None, "none is in use");
        hosts.chosen.send_replace(Some(1));
        hosts.doubt(0, Doubt::Silent);
        assert_eq!(hosts.take_doubt(), None, "it is not the one in use");
        hosts.doubt(1, Doubt::Refuses);
        hosts.doubt(1, Doubt::Silent);
        assert_eq!(hosts.take_doubt(), Some((1, Doubt::Refuses)));
        assert_eq!(hosts.take_doubt(), None);
    }
}
