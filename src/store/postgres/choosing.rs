//! Which of several hosts is used.
//!
//! A host is chosen once a commit has returned on it. A login proves nothing: an old primary whose synchronous standby was
//! promoted lets everybody in, and commits nothing. The chosen host stays the chosen one for as long as it commits. Where
//! that is in doubt, all hosts are tried at once, and where another one commits, every connection to the former ends.

use std::pin::pin;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::{Notify, watch};
use tokio::time::{sleep, timeout};

use super::connect::{Connector, Failed, Session};
use super::error::OpenError;
use super::hosts;

/// Between two looks at all hosts.
const PAUSE: Duration = Duration::from_millis(500);

/// The hosts of one store, numbered in the order of the URL.
pub(super) struct Hosts {
    /// The host in use; nothing before the first choice.
    chosen: watch::Sender<Option<usize>>,
    /// Held while all hosts are tried.
    trying: tokio::sync::Mutex<()>,
    doubted: Notify,
    doubt: Mutex<Option<(usize, Doubt)>>,
}

/// Why the chosen host may be the wrong one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doubt {
    /// A statement takes long, or a connection failed.
    Silent,
    /// It said that it cannot write: its disk is full, or it is a standby. It is used only if no other host commits.
    Refuses,
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
        Self { chosen, trying: tokio::sync::Mutex::default(), doubted: Notify::new(), doubt: Mutex::default() }
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

    fn take_doubt(&self) -> Option<(usize, Doubt)> {
        self.doubt.lock().unwrap_or_else(PoisonError::into_inner).take()
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
        let host = self.try_all(&hosts::order(self.servers())).await?;
        self.hosts().chosen.send_replace(Some(host));
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

    /// Chooses among all hosts, now that one is in doubt. Returns whether one of them commits.
    async fn choose_again(&self, doubted: usize, doubt: Doubt) -> bool {
        let _trying = self.hosts().trying.lock().await;
        if self.hosts().chosen() != Some(doubted) {
            return true;
        }
        let mut order = hosts::order(self.servers());
        order.retain(|host| *host != doubted);
        order.insert(if doubt == Doubt::Refuses { order.len() } else { 0 }, doubted);
        match self.try_all(&order).await {
            Ok(host) if host == doubted => true,
            Ok(host) => {
                let (from, to) = (hosts::name(self.servers(), doubted), hosts::name(self.servers(), host));
                tracing::warn!(from, to, "the database server does not commit, and another one does: changing to it");
                self.hosts().chosen.send_replace(Some(host));
                true
            }
            Err(error) => {
                tracing::debug!(%error, "no database server commits; trying again");
                false
            }
        }
    }

    /// The first of these hosts on which a commit returns. A later one is taken where the earlier ones have failed, or have
    /// had the time to connect for it.
    async fn try_all(&self, order: &[usize]) -> Result<usize, OpenError> {
        let mut trials: FuturesUnordered<_> =
            order.iter().map(|host| async move { (*host, self.try_one(*host).await) }).collect();
        let mut ended: Vec<Option<Result<(), OpenError>>> = order.iter().map(|_| None).collect();
        let mut grace = pin!(sleep(self.reach()));
        let mut is_late = false;
        loop {
            match pick(order, &ended, is_late) {
                Pick::Take(host) => return Ok(host),
                Pick::Nothing => return Err(self.why_none(ended)),
                Pick::Wait => {}
            }
            tokio::select! {
                Some((host, result)) = trials.next() => ended[host] = Some(result),
                () = grace.as_mut(), if !is_late => is_late = true,
            }
        }
    }

    /// Whether a commit returns on a host, in twice the time that it may take to be reached.
    async fn try_one(&self, host: usize) -> Result<(), OpenError> {
        let trying =
            async { Trial(Some(self.connect_on_trial(host).await?)).commit().await.map_err(Failed::into_open_error) };
        timeout(self.reach() * 2, trying).await.unwrap_or_else(|_| Err(OpenError::late()))
    }

    /// Why no host is chosen. It may help to try again where one of them is only away.
    fn why_none(&self, ended: Vec<Option<Result<(), OpenError>>>) -> OpenError {
        let mut errors: Vec<(usize, OpenError)> = Vec::new();
        errors.extend(ended.into_iter().enumerate().filter_map(|(host, result)| Some((host, result?.err()?))));
        let is_away = |(_, error): &(usize, OpenError)| matches!(error, OpenError::Unreachable(_));
        if let Some(at) = errors.iter().position(|error| !is_away(error))
            && !errors.iter().any(is_away)
        {
            return errors.swap_remove(at).1;
        }
        let told = errors.iter().map(|(host, error)| {
            let name = hosts::name(self.servers(), *host);
            match error {
                OpenError::Unreachable(told) => format!("{name}: {told}"),
                other => format!("{name}: {other}"),
            }
        });
        OpenError::Unreachable(told.collect::<Vec<_>>().join("; "))
    }
}

/// Which host to use, by how the trials have ended so far. `ended` is in the order of hosts, not in that of `order`.
fn pick(order: &[usize], ended: &[Option<Result<(), OpenError>>], is_late: bool) -> Pick {
    let mut runs_on = false;
    for host in order {
        match &ended[*host] {
            Some(Ok(())) => return Pick::Take(*host),
            Some(Err(_)) => {}
            None if is_late => runs_on = true,
            None => return Pick::Wait,
        }
    }
    if runs_on { Pick::Wait } else { Pick::Nothing }
}

/// A connection of a trial. Where it is dropped before its commit returns, the server is told to give that up.
struct Trial(Option<Session>);

impl Trial {
    async fn commit(mut self) -> Result<(), Failed> {
        let Some(session) = &self.0 else { return Ok(()) };
        let committed = session.commit().await;
        self.0 = None;
        committed
    }
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

    /// How trials have ended, in the order of hosts: `+` committed, `-` failed, `.` has not ended.
    fn picked(order: &[usize], ended: &str, is_late: bool) -> Pick {
        let ended = ended.chars().map(|how| match how {
            '+' => Some(Ok(())),
            '-' => Some(Err(OpenError::late())),
            _ => None,
        });
        pick(order, &ended.collect::<Vec<_>>(), is_late)
    }

    #[test]
    fn the_first_host_that_commits_is_taken_and_a_silent_one_is_waited_for_only_so_long() {
        let cases = [
            (&[0, 1][..], "++", false, Pick::Take(0)),
            (&[0, 1], "+.", false, Pick::Take(0)),
            (&[0, 1], "-+", false, Pick::Take(1)),
            (&[0, 1], ".+", false, Pick::Wait),
            (&[0, 1], ".+", true, Pick::Take(1)),
            (&[0, 1], ".-", true, Pick::Wait),
            (&[0, 1], "..", true, Pick::Wait),
            (&[0, 1], "--", false, Pick::Nothing),
            (&[1, 0], "++", false, Pick::Take(1)),
            (&[1, 0], "+.", false, Pick::Wait),
            (&[1, 0], "+.", true, Pick::Take(0)),
            (&[2, 0, 1], "-+.", true, Pick::Take(1)),
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
