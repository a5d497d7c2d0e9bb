//! Threads that serve connections, each with a runtime of its own.
//!
//! A connection stays on the thread that it was given to, and so does everything that is done for it: its requests,
//! their attempts, and the connections to upstreams that they use. Nothing has to wake another thread but the store's
//! answers.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, LazyLock, Mutex};
use std::thread;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio::time::interval;

use super::memory::release_when_idle;

/// The maximum number of threads for blocking calls: files, and digests of large bodies.
const MAX_BLOCKING_THREADS: usize = 512;

/// By how much the nice value of threads for blocking calls is above that of the threads that serve connections.
#[cfg(target_os = "linux")]
const BLOCKING_NICE: i32 = 10;

/// How long a thread waits for its blocking calls when it ends.
const BLOCKING_SHUTDOWN: Duration = Duration::from_secs(1);

/// How often a thread wakes at least. A timer that is due before all others interrupts its thread, with a system call for
/// each request where few are under way; this one is due before nearly all of them.
const TICK: Duration = Duration::from_millis(250);

thread_local! {
    static INDEX: Cell<usize> = const { Cell::new(0) };
}

/// Threads that serve connections. Dropping this ends them without waiting for their tasks.
pub struct Shards(Vec<Shard>);

struct Shard {
    runtime: Handle,
    /// How many connections it has.
    load: Arc<AtomicUsize>,
    /// Dropped, it ends the thread.
    stop: Option<oneshot::Sender<()>>,
    /// Disconnected when the thread has ended.
    ended: Mutex<Receiver<()>>,
}

impl Shards {
    /// Starts one for each core that this process may use.
    pub fn start() -> io::Result<Self> {
        (0..count()).map(Shard::start).collect::<io::Result<_>>().map(Self)
    }

    /// The runtime of each thread.
    pub fn runtimes(&self) -> impl Iterator<Item = &Handle> {
        self.0.iter().map(|shard| &shard.runtime)
    }

    /// Runs a task that belongs to no connection on one of them.
    pub fn run<F>(&self, task: F) -> Option<JoinHandle<()>>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.0.first().map(|shard| shard.runtime.spawn(task))
    }

    /// Returns when each of them has done something since the call.
    pub async fn answer(&self) {
        for shard in &self.0 {
            // A thread that has ended is reported elsewhere.
            let _ = shard.runtime.spawn(async {}).await;
        }
    }

    /// Runs `connection` on the thread that has the fewest.
    pub(super) fn spawn<F>(&self, connections: &mut JoinSet<()>, connection: F) -> Option<AbortHandle>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let shard = self.0.iter().min_by_key(|shard| shard.load.load(Ordering::Relaxed))?;
        let guard = LoadGuard::new(&shard.load);
        let task = async move {
            connection.await;
            drop(guard);
        };
        Some(connections.spawn_on(task, &shard.runtime))
    }
}

/// How many there are.
pub fn count() -> usize {
    // Read once: the number of available cores can change at run time.
    static COUNT: LazyLock<usize> = LazyLock::new(|| thread::available_parallelism().map_or(1, usize::from));
    *COUNT
}

/// Which one this thread is, below [`count`]. A thread that is none counts as the first.
pub fn index() -> usize {
    INDEX.get()
}

impl Shard {
    fn start(index: usize) -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads((MAX_BLOCKING_THREADS / count()).max(8))
            .on_thread_start(give_way)
            .build()?;
        let (stop, stopped) = oneshot::channel::<()>();
        let handle = runtime.handle().clone();
        let (ending, ended) = channel();
        thread::Builder::new().name(format!("shard-{index}")).spawn(move || {
            INDEX.set(index);
            runtime.spawn(release_when_idle());
            runtime.block_on(tick_until(stopped));
            runtime.shutdown_timeout(BLOCKING_SHUTDOWN);
            drop::<Sender<()>>(ending);
        })?;
        Ok(Self { runtime: handle, load: Arc::default(), stop: Some(stop), ended: Mutex::new(ended) })
    }
}

/// What a thread for blocking calls begins with: it has less of the processors than the threads that serve connections, each
/// of which has many requests. To encrypt and hash large bodies keeps all processors busy.
fn give_way() {
    // A thread has a nice value of its own on Linux alone. Where it may not be changed, bodies take what they took.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::nice(BLOCKING_NICE);
}

/// Waits for the sender, which is only ever dropped.
async fn tick_until(mut stopped: oneshot::Receiver<()>) {
    let mut tick = interval(TICK);
    while tokio::select! { _ = &mut stopped => false, _ = tick.tick() => true } {}
}

impl Drop for Shards {
    fn drop(&mut self) {
        for shard in &mut self.0 {
            shard.stop = None;
        }
        for shard in &mut self.0 {
            // One that does not come to an end is left behind; the process ends all the same.
            if let Ok(ended) = shard.ended.get_mut() {
                let _ = ended.recv_timeout(2 * BLOCKING_SHUTDOWN);
            }
        }
    }
}

struct LoadGuard(Arc<AtomicUsize>);

impl LoadGuard {
    fn new(load: &Arc<AtomicUsize>) -> Self {
        load.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(load))
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn work_on_large_bodies_gives_way_to_connections() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let shards = Shards::start().unwrap();
        for runtime in shards.runtimes() {
            let on_shard = runtime.spawn(async move { nice() });
            assert_eq!(on_shard.await.unwrap(), nice());
            assert_eq!(runtime.spawn_blocking(nice).await.unwrap(), (nice() + BLOCKING_NICE).min(19));
        }
    }

    #[tokio::test]
    async fn connections_are_spread_evenly_and_stay_where_they_are() {
        let shards = Shards::start().unwrap();
        let (seen, mut where_they_ran) = tokio::sync::mpsc::unbounded_channel();
        let mut connections = JoinSet::new();
        let all = Arc::new(tokio::sync::Barrier::new(2 * count()));
        for _ in 0..2 * count() {
            let (seen, all) = (seen.clone(), Arc::clone(&all));
            shards.spawn(&mut connections, async move {
                let first = index();
                // One that has ended leaves its place to another.
                all.wait().await;
                seen.send((first, index())).unwrap();
            });
        }
        while connections.join_next().await.is_some() {}
        let mut taken = vec![0; count()];
        while let Ok((first, last)) = where_they_ran.try_recv() {
            assert_eq!(first, last);
            taken[first] += 1;
        }
        assert_eq!(taken, vec![2; count()]);
    }

    #[tokio::test]
    async fn a_blocked_shard_does_not_answer() {
        let shards = Shards::start().unwrap();
        shards.answer().await;
        let (go_on, blocked) = channel::<()>();
        let mut connections = JoinSet::new();
        shards.spawn(&mut connections, async move { blocked.recv().unwrap() });
        assert!(tokio::time::timeout(Duration::from_millis(50), shards.answer()).await.is_err());
        go_on.send(()).unwrap();
        shards.answer().await;
    }

    #[tokio::test]
    async fn dropping_the_shards_cancels_their_tasks() {
        let shards = Shards::start().unwrap();
        let mut connections = JoinSet::new();
        shards.spawn(&mut connections, std::future::pending());
        drop(shards);
        assert!(connections.join_next().await.unwrap().unwrap_err().is_cancelled());
    }
}
