//! Manages the connections to the servers, and reconnects by itself.
//!
//! A background task reconnects to a server that was lost. Until then, commands for that server fail at once without
//! being sent. In a cluster, each node is tracked separately.

mod connector;
mod discovery;
mod identity;
mod redirect;
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

use self::connector::{Connections, Connector, Node, demoted, format_address, timed_out};
use super::error::{code, message};
use super::{OpenError, Servers};

const MIN_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// How often an idle server is checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// How long subscribing to a channel may take.
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(2);

/// How many bytes a connection carries in a millisecond at least: 1 MiB in about a second.
const MIN_BYTES_PER_MS: usize = 1024;

/// The connections to the servers. Its background task ends with the last clone.
#[derive(Clone)]
pub(in crate::store) struct ConnectionManager {
    shared: Arc<Shared>,
    _reconnecting: Arc<JoinSet<()>>,
}

/// The answer to each command, in order.
pub(in crate::store) type Answers = Vec<RedisResult<Value>>;

struct Shared {
    connector: Connector,
    answer: Duration,
    state: Mutex<State>,
    /// A connection was lost, or a slot has moved.
    broken: Notify,
    /// How many connections were lost so far.
    losses: watch::Sender<u64>,
}

struct State {
    connections: Arc<Connections>,
    /// Whether a connection is missing or a slot has moved.
    is_broken: bool,
    /// The error of the last failure, or of the last attempt to reconnect.
    failure: Option<String>,
}

impl fmt::Debug for ConnectionManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionManager").finish_non_exhaustive()
    }
}

impl ConnectionManager {
    /// Connects to the servers of a store. A server has `answer` to answer, and longer where much is sent to it; then it is connected to again.
    ///
    /// # Errors
    /// See [`OpenError`]; only after [`OpenError::Unreachable`] it may help to try again.
    pub(in crate::store) async fn open(servers: &Servers, answer: Duration) -> Result<Self, OpenError> {
        Self::open_with(Connector::of_store(servers.clone()), answer).await
    }

    /// As [`ConnectionManager::open`], but takes any servers, and writes no id there.
    ///
    /// # Errors
    /// As [`ConnectionManager::open`].
    pub(in crate::store) async fn look(servers: &Servers, answer: Duration) -> Result<Self, OpenError> {
        Self::open_with(Connector::new(servers.clone()), answer).await
    }

    async fn open_with(connector: Connector, answer: Duration) -> Result<Self, OpenError> {
        let connections = connector.connect(&Connections::default()).await?;
        if let Some(missing) = connections.missing() {
            return Err(OpenError::Unreachable(missing));
        }
        Ok(Self::begin(connector, answer, connections, false))
    }

    /// As [`ConnectionManager::open`], for servers that keep no store, but connects in a task of its own, for as long as it takes.
    ///
    /// # Errors
    /// Where the certificates make no sense.
    pub(in crate::store) fn lazy(servers: &Servers, answer: Duration) -> Result<Self, OpenError> {
        let connector = Connector::new(servers.clone());
        connector.try_settings()?;
        Ok(Self::begin(connector, answer, Connections::default(), true))
    }

    fn begin(connector: Connector, answer: Duration, connections: Connections, is_broken: bool) -> Self {
        let state = Mutex::new(State { connections: Arc::new(connections), is_broken, failure: None });
        let (losses, _) = watch::channel(0);
        let shared = Arc::new(Shared { connector, answer, state, broken: Notify::new(), losses });
        let mut reconnecting = JoinSet::new();
        reconnecting.spawn(reconnect_loop(Arc::clone(&shared)));
        Self { shared, _reconnecting: Arc::new(reconnecting) }
    }

    /// Sends a batch to each server that is connected to.
    ///
    /// # Errors
    /// Where there is none.
    pub(in crate::store) async fn ask_each(&self, batch: &[Cmd]) -> RedisResult<Vec<(String, RedisResult<Answers>)>> {
        let connections = self.shared.connections()?;
        let asking = connections.nodes.iter().map(async |node| {
            let answers = self.shared.send_to(node, batch.iter().collect()).await;
            (format_address(&node.address), answers)
        });
        Ok(join_all(asking).await)
    }

    /// Subscribes to a channel; in a cluster at any node, since every node receives all messages. The subscriber
    /// subscribes again after [`ConnectionManager::losses`] has changed.
    ///
    /// # Errors
    /// Where no server lets it listen.
    pub(in crate::store) async fn subscribe(&self, channel: &str) -> RedisResult<PubSub> {
        let connections = self.shared.connections()?;
        let Some(node) = connections.nodes.first() else { return Err(not_connected("it is not connected")) };
        let listening = async {
            let mut listening = node.client.get_async_pubsub().await?;
            listening.subscribe(channel).await?;
            Ok(listening)
        };
        timeout(SUBSCRIBE_TIMEOUT, listening).await.map_err(|_| timed_out())?
    }

    /// Counts the lost connections.
    pub(in crate::store) fn losses(&self) -> watch::Receiver<u64> {
        self.shared.losses.subscribe()
    }

    /// Versions of the servers that are connected to, each once.
    pub(super) fn versions(&self) -> Vec<String> {
        let mut versions: Vec<String> =
            self.shared.lock().connections.nodes.iter().map(|node| node.version.clone()).collect();
        versions.sort();
        versions.dedup();
        versions
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No operation under the lock can leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The current connections; an error if there are none.
    fn connections(&self) -> RedisResult<Arc<Connections>> {
        let state = self.lock();
        if state.connections.nodes.is_empty() {
            return Err(not_connected(state.failure.as_deref().unwrap_or("it is not connected yet")));
        }
        Ok(Arc::clone(&state.connections))
    }

    /// Sends commands to a node. The node counts as lost if it does not answer.
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
        let patience = self.answer + Duration::from_millis((bytes / MIN_BYTES_PER_MS) as u64);
        let _in_flight = InFlightGuard::new(&node.in_flight);
        let mut connection = node.connection.clone();
        let sent = timeout(patience, connection.send_packed_commands(&pipeline, 0, pipeline.len())).await;
        let answers: Answers = match sent.unwrap_or_else(|_| Err(timed_out())) {
            Ok(answers) => answers
                .into_iter()
                .map(|answer| match answer {
                    Value::ServerError(error) => Err(error.into()),
                    answer => Ok(answer),
                })
                .collect(),
            Err(error) => {
                self.mark_lost(node, &error);
                return Err(error);
            }
        };
        for error in answers.iter().filter_map(failure) {
            match code(&error) {
                Some("READONLY" | "NOAUTH") => self.mark_lost(node, &error),
                Some("MOVED" | "CLUSTERDOWN" | "TRYAGAIN") => self.mark_broken(),
                _ => {}
            }
        }
        Ok(answers)
    }

    /// Drops the connection to a node that does not answer, or is no longer a primary.
    fn mark_lost(&self, node: &Node, error: &RedisError) {
        {
            let mut state = self.lock();
            let mut nodes = state.connections.nodes.clone();
            nodes.retain(|known| known.number != node.number);
            if nodes.len() == state.connections.nodes.len() {
                return;
            }
            let (message, server) = (message(error), format_address(&node.address));
            tracing::debug!(
                error = message,
                server,
                "the connection to Redis is lost: operations are refused until it works again"
            );
            state.connections = Arc::new(Connections { nodes, slots: state.connections.slots.clone() });
            state.is_broken = true;
            state.failure = Some(message);
        }
        self.losses.send_modify(|losses| *losses += 1);
        self.broken.notify_one();
    }

    /// Notes that the topology has changed.
    fn mark_broken(&self) {
        self.lock().is_broken = true;
        self.broken.notify_one();
    }

    /// Connects to the missing nodes. Returns whether none is missing afterwards.
    async fn reconnect(&self) -> bool {
        let before = {
            let mut state = self.lock();
            // A failure from here on is noticed.
            state.is_broken = false;
            Arc::clone(&state.connections)
        };
        let made = self.connector.connect(&before).await;
        let mut state = self.lock();
        let failure = match made {
            Ok(mut connections) => {
                let missing = connections.missing();
                // Nodes that were lost meanwhile stay lost.
                let is_lost = |node: &Node| {
                    let was =
                        |connections: &Connections| connections.nodes.iter().any(|known| known.number == node.number);
                    was(&before) && !was(&state.connections)
                };
                connections.nodes.retain(|node| !is_lost(node));
                let is_kept = |node: &Node| connections.nodes.iter().any(|known| known.number == node.number);
                if !before.nodes.iter().all(is_kept) {
                    // Subscriptions on that node no longer receive messages.
                    self.losses.send_modify(|losses| *losses += 1);
                }
                state.connections = Arc::new(connections);
                missing
            }
            Err(error) => Some(error.to_string()),
        };
        match failure {
            None if state.is_broken => false,
            None => {
                if let Some(was) = state.failure.take() {
                    tracing::debug!(was, "Redis answers again");
                }
                true
            }
            Some(failure) => {
                if state.failure.as_ref() != Some(&failure) {
                    tracing::debug!(error = failure, "Redis cannot be reached; trying again");
                }
                state.failure = Some(failure);
                state.is_broken = true;
                false
            }
        }
    }

    /// Checks that idle servers still answer, and are still the primaries.
    async fn check(&self) {
        let connections = Arc::clone(&self.lock().connections);
        let idle = connections.nodes.iter().filter(|node| node.in_flight.load(Ordering::Relaxed) == 0);
        let checks = idle.map(async |node| {
            if let Err(error) = node.check(self.answer.max(CHECK_INTERVAL)).await {
                self.mark_lost(node, &error);
            }
        });
        // A primary that was demoted while partitioned from the others does not know it.
        // Where its id is gone, it is written again before a gate that starts can write another.
        let (named, _, _) = tokio::join!(
            self.connector.named_elsewhere(&connections),
            join_all(checks),
            self.connector.recognise(&connections)
        );
        if let (Some(named), Some(node)) = (named, connections.nodes.first()) {
            self.mark_lost(node, &demoted(format!("the Sentinels say that {} is the primary", format_address(&named))));
        }
    }

    fn is_broken(&self) -> bool {
        self.lock().is_broken
    }
}

/// Reconnects whenever a connection is missing.
async fn reconnect_loop(shared: Arc<Shared>) {
    let mut pause = MIN_BACKOFF;
    let mut mended = Instant::now();
    loop {
        if !shared.is_broken() {
            // A notification from before is consumed here.
            if timeout(CHECK_INTERVAL, shared.broken.notified()).await.is_err() {
                // A server that hangs does not delay reconnecting to another.
                tokio::select! {
                    () = shared.check() => {}
                    () = shared.broken.notified() => {}
                }
            }
            continue;
        }
        // A connection that fails repeatedly is retried with a delay.
        if mended.elapsed() < MAX_BACKOFF && pause > MIN_BACKOFF {
            sleep(pause).await;
        } else {
            pause = MIN_BACKOFF;
        }
        while !shared.reconnect().await {
            sleep(pause).await;
            pause = (pause * 2).min(MAX_BACKOFF);
        }
        pause = (pause * 2).min(MAX_BACKOFF);
        mended = Instant::now();
    }
}

impl Connections {
    fn node(&self, address: &(String, u16)) -> Option<&Node> {
        self.nodes.iter().find(|node| node.address == *address)
    }

    /// The part of a cluster that cannot be used, if any.
    fn missing(&self) -> Option<String> {
        let slots = self.slots.as_ref()?;
        if let Some(slot) = slots.hole() {
            return Some(format!("no node of the cluster has slot {slot}"));
        }
        let missing = slots.primaries().iter().find(|address| self.node(address).is_none())?;
        Some(format!("{} of the cluster cannot be reached", format_address(missing)))
    }
}

/// The error of an answer, or of one of the operations of a script.
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

/// Counts a batch in flight to a node for as long as it lives.
struct InFlightGuard(Arc<AtomicUsize>);

impl InFlightGuard {
    fn new(in_flight: &Arc<AtomicUsize>) -> Self {
        in_flight.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(in_flight))
    }
}

impl Drop for InFlightGuard {
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

/// The error for a command that was not sent.
fn not_connected(message: &str) -> RedisError {
    RedisError::from((ErrorKind::ClusterConnectionNotFound, "no connection", message.to_owned()))
}
