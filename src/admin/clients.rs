//! Who is connected to the admin listener, and who leaves when another comes.
//!
//! Anybody may connect, and health must be answered whatever they do there. So a connection never waits for a place: where
//! all are taken, the one closes that has been quiet for longest. One on which a request showed a token is counted apart,
//! so that those that show none do not push it out.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;
use tokio::time::Instant;

/// Most connections on which no token was shown: each may hold a whole answer in memory.
const MOST: usize = 128;

/// Most connections that are counted apart because a token was shown on them. Those beyond count as the others do.
const MOST_PROVEN: usize = 64;

/// The connections that there are.
#[derive(Default)]
pub(super) struct Clients {
    connections: Vec<(Client, AbortHandle)>,
    proven: Arc<AtomicUsize>,
}

/// One connection, as its task sees it.
#[derive(Clone)]
pub(super) struct Client(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// How many have proven themselves.
    proven: Arc<AtomicUsize>,
}

struct State {
    is_proven: bool,
    /// A request is being answered.
    is_answering: bool,
    /// When it connected, or its last answer was ready.
    quiet_since: Instant,
}

impl Clients {
    /// The next client, not connected yet.
    pub(super) fn next(&self) -> Client {
        let state = State { is_proven: false, is_answering: false, quiet_since: Instant::now() };
        Client(Arc::new(Shared { state: Mutex::new(state), proven: Arc::clone(&self.proven) }))
    }

    /// It is served by this task. Where there are too many, one is closed.
    pub(super) fn enter(&mut self, client: Client, task: AbortHandle) {
        self.connections.retain(|(_, task)| !task.is_finished());
        if self.connections.iter().filter(|(client, _)| !client.state().is_proven).count() >= MOST {
            self.close_one();
        }
        self.connections.push((client, task));
    }

    /// Closes the connection that matters least. False where all have shown a token.
    pub(super) fn close_one(&mut self) -> bool {
        let unproven = self.connections.iter().enumerate().filter_map(|(nth, (client, task))| {
            let state = client.state();
            (!state.is_proven && !task.is_finished()).then_some((state.is_answering, state.quiet_since, nth))
        });
        let Some((_, _, nth)) = unproven.min() else { return false };
        self.connections.swap_remove(nth).1.abort();
        true
    }
}

impl Client {
    /// A request has come.
    pub(super) fn asks(&self) {
        self.state().is_answering = true;
    }

    /// It shows a token.
    pub(super) fn proves_itself(&self) {
        let mut state = self.state();
        if !state.is_proven {
            let more = |proven: usize| Some(proven + 1).filter(|proven| *proven <= MOST_PROVEN);
            state.is_proven = self.0.proven.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok();
        }
    }

    /// Its answer is ready.
    pub(super) fn answered(&self) {
        let mut state = self.state();
        state.is_answering = false;
        state.quiet_since = Instant::now();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that is done under it can leave it half changed.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.state.get_mut().unwrap_or_else(PoisonError::into_inner).is_proven {
            self.proven.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn connect(clients: &mut Clients) -> (Client, tokio::task::JoinHandle<()>) {
        tokio::time::advance(Duration::from_secs(1)).await;
        let client = clients.next();
        let task = tokio::spawn(std::future::pending());
        clients.enter(client.clone(), task.abort_handle());
        (client, task)
    }

    #[tokio::test(start_paused = true)]
    async fn the_one_that_is_quiet_for_longest_leaves() {
        let mut clients = Clients::default();
        let mut all = Vec::new();
        for _ in 0..MOST {
            all.push(connect(&mut clients).await);
        }
        // The first is at it, the second was a moment ago, and the third is proven.
        all[0].0.asks();
        all[1].0.asks();
        tokio::time::advance(Duration::from_secs(1)).await;
        all[1].0.answered();
        all[2].0.asks();
        all[2].0.proves_itself();
        connect(&mut clients).await;
        assert!(all.iter().all(|(_, task)| !task.is_finished()), "there is a place where one is proven");
        connect(&mut clients).await;
        assert!((&mut all[3].1).await.unwrap_err().is_cancelled());
        for nth in (4..MOST).chain([1]) {
            connect(&mut clients).await;
            assert!((&mut all[nth].1).await.unwrap_err().is_cancelled(), "{nth}");
        }
        assert!(!all[0].1.is_finished() && !all[2].1.is_finished());
    }

    #[tokio::test(start_paused = true)]
    async fn so_many_are_counted_apart_and_no_more() {
        let mut clients = Clients::default();
        let proven = async |clients: &mut Clients| {
            let (client, task) = connect(clients).await;
            client.asks();
            client.proves_itself();
            client.answered();
            let is_proven = client.state().is_proven;
            (is_proven, task)
        };
        for _ in 0..MOST_PROVEN {
            assert!(proven(&mut clients).await.0);
        }
        assert!(!proven(&mut clients).await.0);
        assert!(clients.close_one() && !clients.close_one());
        // One that ends leaves its place.
        let (_, task) = clients.connections.remove(0);
        task.abort();
        assert!(proven(&mut clients).await.0);
    }
}
