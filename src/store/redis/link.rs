//! One way to the servers, which heals itself.
//!
//! What is lost is connected to again in a task of its own. Meanwhile whatever would need it fails at once, and did
//! nothing. In a cluster each node is lost and found for itself.

mod follow;
mod map;
mod reach;
mod slots;

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use redis::aio::PubSub;
use redis::{Arg, Cmd, ErrorKind, Pipeline, RedisError, RedisResult, Value};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use self::reach::{Node, Reach, Way, deposed, late, shown};
use super::error::{code, told};
use super::{OpenError, Servers};

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How often a server that nothing is asked of is asked whether it is there.
const CHECK: Duration = Duration::from_secs(1);

/// How long it may take to begin to listen.
const LISTEN: Duration = Duration::from_secs(2);

/// How many bytes a connection carries in a millisecond at least: 1 MiB in about a second.
const SLOWEST: usize = 1024;

/// A way to the servers. Its tasks end with its last clone.
#[derive(Clone)]
pub(in crate::store) struct Link {
    shared: Arc<Shared>,
    _healing: Arc<JoinSet<()>>,
}

/// What was answered to each command, in their order.
pub(in crate::store) type Answers = Vec<RedisResult<Value>>;

struct Shared {
    reach: Reach,
    answer: Duration,
    state: Mutex<State>,
    /// Something was lost, or has moved.
    disturbed: Notify,
    /// How often something was lost.
    losses: watch::Sender<u64>,
}

struct State {
    way: Arc<Way>,
    /// Whether something is missing or has moved.
    is_broken: bool,
    /// What it was, or why it is missing still.
    failure: Option<String>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").finish_non_exhaustive()
    }
}

impl Link {
    /// Connects. A server has `answer` to answer, and longer where much is sent to it; then it is connected to again.
    ///
    /// # Errors
    /// See [`OpenError`]; only after [`OpenError::Unreachable`] it may help to try again.
    pub(in crate::store) async fn open(servers: &Servers, answer: Duration) -> Result<Self, OpenError> {
        let reach = Reach::new(servers.clone());
        let way = reach.connect(&Way::default()).await?;
        if let Some(missing) = way.missing() {
            return Err(OpenError::Unreachable(missing));
        }
        Ok(Self::begin(reach, answer, way, false))
    }

    /// As [`Link::open`], but connects in a task of its own, for as long as it takes.
    ///
    /// # Errors
    /// Where the certificates make no sense.
    pub(in crate::store) fn lazy(servers: &Servers, answer: Duration) -> Result<Self, OpenError> {
        let reach = Reach::new(servers.clone());
        reach.try_settings()?;
        Ok(Self::begin(reach, answer, Way::default(), true))
    }

    fn begin(reach: Reach, answer: Duration, way: Way, is_broken: bool) -> Self {
        let state = Mutex::new(State { way: Arc::new(way), is_broken, failure: None });
        let (losses, _) = watch::channel(0);
        let shared = Arc::new(Shared { reach, answer, state, disturbed: Notify::new(), losses });
        let mut healing = JoinSet::new();
        healing.spawn(heal(Arc::clone(&shared)));
        Self { shared, _healing: Arc::new(healing) }
    }

    /// Sends a batch to each server that is connected to.
    ///
    /// # Errors
    /// Where there is none.
    pub(in crate::store) async fn ask_each(&self, batch: &[Cmd]) -> RedisResult<Vec<(String, RedisResult<Answers>)>> {
        let way = self.shared.way()?;
        let asking = way.nodes.iter().map(async |node| {
            let answers = self.shared.send_to(node, batch.iter().collect()).await;
            (shown(&node.address), answers)
        });
        Ok(join_all(asking).await)
    }

    /// Listens to a channel, in a cluster at any node: each is told all. Whoever listens begins again after
    /// [`Link::losses`] has changed.
    ///
    /// # Errors
    /// Where no server lets it listen.
    pub(in crate::store) async fn subscribe(&self, channel: &str) -> RedisResult<PubSub> {
        let way = self.shared.way()?;
        let Some(node) = way.nodes.first() else { return Err(nowhere("it is not connected")) };
        let listening = async {
            let mut listening = node.client.get_async_pubsub().await?;
            listening.subscribe(channel).await?;
            Ok(listening)
        };
        timeout(LISTEN, listening).await.map_err(|_| late())?
    }

    /// What counts the losses of connections.
    pub(in crate::store) fn losses(&self) -> watch::Receiver<u64> {
        self.shared.losses.subscribe()
    }

    /// Versions of the servers that are connected to, each once.
    pub(super) fn versions(&self) -> Vec<String> {
        let mut versions: Vec<String> = self.shared.lock().way.nodes.iter().map(|node| node.version.clone()).collect();
        versions.sort();
        versions.dedup();
        versions
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that is done under it can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is connected to, if anything is.
    fn way(&self) -> RedisResult<Arc<Way>> {
        let state = self.lock();
        if state.way.nodes.is_empty() {
            return Err(nowhere(state.failure.as_deref().unwrap_or("it is not connected yet")));
        }
        Ok(Arc::clone(&state.way))
    }

    /// Sends commands to a node, which is lost where it does not answer.
    async fn send_to(&self, node: &Node, batch: Vec<&Cmd>) -> RedisResult<Answers> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let mut pipeline = Pipeline::with_capacity(batch.len());
        let mut bytes = 0;
        for command in batch {
            bytes += size(command);
            pipeline.add_command(command.clone());
        }
        let patience = self.answer + Duration::from_millis((bytes / SLOWEST) as u64);
        let _waiting = Waiting::new(&node.waiting);
        let mut connection = node.connection.clone();
        let sent = timeout(patience, connection.send_packed_commands(&pipeline, 0, pipeline.len())).await;
        let answers: Answers = match sent.unwrap_or_else(|_| Err(late())) {
            Ok(answers) => answers
                .into_iter()
                .map(|answer| match answer {
                    Value::ServerError(error) => Err(error.into()),
                    answer => Ok(answer),
                })
                .collect(),
            Err(error) => {
                self.lost(node, &error);
                return Err(error);
            }
        };
        for error in answers.iter().filter_map(failure) {
            match code(&error) {
                Some("READONLY" | "NOAUTH") => self.lost(node, &error),
                Some("MOVED" | "CLUSTERDOWN" | "TRYAGAIN") => self.disturb(),
                _ => {}
            }
        }
        Ok(answers)
    }

    /// A node does not answer, or not as a primary.
    fn lost(&self, node: &Node, error: &RedisError) {
        {
            let mut state = self.lock();
            let mut nodes = state.way.nodes.clone();
            nodes.retain(|known| known.number != node.number);
            if nodes.len() == state.way.nodes.len() {
                return;
            }
            let (told, server) = (told(error), shown(&node.address));
            tracing::warn!(error = told, server, "the connection to Redis is lost: refused until it works again");
            state.way = Arc::new(Way { nodes, slots: state.way.slots.clone() });
            state.is_broken = true;
            state.failure = Some(told);
        }
        self.losses.send_modify(|losses| *losses += 1);
        self.disturbed.notify_one();
    }

    /// Something is not where it was.
    fn disturb(&self) {
        self.lock().is_broken = true;
        self.disturbed.notify_one();
    }

    /// Connects to what is missing, and says whether nothing is any more.
    async fn mend(&self) -> bool {
        let before = {
            let mut state = self.lock();
            // Whatever breaks from here on is seen.
            state.is_broken = false;
            Arc::clone(&state.way)
        };
        let made = self.reach.connect(&before).await;
        let mut state = self.lock();
        let failure = match made {
            Ok(mut way) => {
                let missing = way.missing();
                // What was lost meanwhile stays lost.
                let is_lost = |node: &Node| {
                    let was = |way: &Way| way.nodes.iter().any(|known| known.number == node.number);
                    was(&before) && !was(&state.way)
                };
                way.nodes.retain(|node| !is_lost(node));
                let is_kept = |node: &Node| way.nodes.iter().any(|known| known.number == node.number);
                if !before.nodes.iter().all(is_kept) {
                    // Whoever listens there is told nothing any more.
                    self.losses.send_modify(|losses| *losses += 1);
                }
                state.way = Arc::new(way);
                missing
            }
            Err(error) => Some(error.to_string()),
        };
        match failure {
            None if state.is_broken => false,
            None => {
                if let Some(was) = state.failure.take() {
                    tracing::info!(was, "Redis answers again");
                }
                true
            }
            Some(failure) => {
                if state.failure.as_ref() != Some(&failure) {
                    tracing::warn!(error = failure, "Redis cannot be reached; trying again");
                }
                state.failure = Some(failure);
                state.is_broken = true;
                false
            }
        }
    }

    /// Whether servers of which nothing is asked are there still, and whether they are still those to ask.
    async fn check(&self) {
        let way = Arc::clone(&self.lock().way);
        let idle = way.nodes.iter().filter(|node| node.waiting.load(Ordering::Relaxed) == 0);
        let checks = idle.map(async |node| {
            if let Err(error) = node.check(self.answer.max(CHECK)).await {
                self.lost(node, &error);
            }
        });
        // A primary that was deposed while it was cut off from others does not know it.
        let (named, _) = tokio::join!(self.reach.named_elsewhere(&way), join_all(checks));
        if let (Some(named), Some(node)) = (named, way.nodes.first()) {
            self.lost(node, &deposed(format!("the Sentinels say that {} is the primary", shown(&named))));
        }
    }

    fn is_broken(&self) -> bool {
        self.lock().is_broken
    }
}

/// Mends what breaks.
async fn heal(shared: Arc<Shared>) {
    let mut pause = FIRST_PAUSE;
    let mut mended = Instant::now();
    loop {
        if !shared.is_broken() {
            // Whoever told of it before is not waited for.
            if timeout(CHECK, shared.disturbed.notified()).await.is_err() {
                // One that hangs keeps no other from being mended.
                tokio::select! {
                    () = shared.check() => {}
                    () = shared.disturbed.notified() => {}
                }
            }
            continue;
        }
        // What breaks again and again is not tried without a pause.
        if mended.elapsed() < LONGEST_PAUSE && pause > FIRST_PAUSE {
            sleep(pause).await;
        } else {
            pause = FIRST_PAUSE;
        }
        while !shared.mend().await {
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
        mended = Instant::now();
    }
}

impl Way {
    fn node(&self, address: &(String, u16)) -> Option<&Node> {
        self.nodes.iter().find(|node| node.address == *address)
    }

    /// What of a cluster cannot be used.
    fn missing(&self) -> Option<String> {
        let slots = self.slots.as_ref()?;
        if let Some(slot) = slots.hole() {
            return Some(format!("no node of the cluster has slot {slot}"));
        }
        let missing = slots.primaries().iter().find(|address| self.node(address).is_none())?;
        Some(format!("{} of the cluster cannot be reached", shown(missing)))
    }
}

/// The error that was answered, also to one of what a script did.
fn failure(answer: &RedisResult<Value>) -> Option<RedisError> {
    match answer {
        Err(error) => Some(error.clone()),
        Ok(Value::Array(parts)) => parts.iter().find_map(|part| match part {
            Value::ServerError(error) => Some(error.clone().into()),
            _ => None,
        }),
        Ok(_) => None,
    }
}

/// Somebody who waits for a node, as it counts them.
struct Waiting(Arc<AtomicUsize>);

impl Waiting {
    fn new(waiting: &Arc<AtomicUsize>) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(waiting))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How many bytes a command carries.
fn size(command: &Cmd) -> usize {
    let sizes = command.args_iter().map(|argument| match argument {
        Arg::Simple(argument) => argument.len(),
        _ => 0,
    });
    sizes.sum()
}

/// The error of what was never sent.
fn nowhere(told: &str) -> RedisError {
    RedisError::from((ErrorKind::ClusterConnectionNotFound, "no connection", told.to_owned()))
}
