//! `oncegate serve`: composes the rooms and runs them.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout, timeout_at};

use crate::admin::{self, Phase, Readiness, RouteInfo};
use crate::config::Resolved;
use crate::gate::Gate;
use crate::http::server;
use crate::http::shards::Shards;
use crate::http::upstream::Upstream;
use crate::http::usage::Usage;
use crate::idempotency::identity::Identifier;
use crate::idempotency::policy::Mode;
use crate::store::{ErrorKind, Store};
use crate::telemetry::{logs, metrics::Metrics};
use crate::worker;

mod files;
mod opening;
mod remembering;

/// How long the end may take once everything is settled.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Between two tries to prepare a store that has gone away.
const ADOPT_AGAIN: Duration = Duration::from_secs(1);

/// Runs a gate until SIGTERM or SIGINT.
pub fn run(config: Resolved, accept_identity_change: bool) -> anyhow::Result<ExitCode> {
    logs::init(&config.log)?;
    files::allow(&config);
    let shards = Arc::new(Shards::start().context("cannot start the threads that serve")?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(serve(config, shards, accept_identity_change));
    // Whatever still runs by now was given up on.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served
}

async fn serve(config: Resolved, shards: Arc<Shards>, accept_identity_change: bool) -> anyhow::Result<ExitCode> {
    let metrics = Metrics::new();
    metrics.config_reloaded(true);
    let mut signals = Signals::install(metrics.clone())?;
    let drain_timeout = config.server.drain_timeout;
    if let Some(serving) = Serving::start(config, &shards, accept_identity_change, metrics, &mut signals).await? {
        signals.stop().await;
        serving.stop(drain_timeout, &mut signals).await;
        tracing::info!("stopped");
    }
    Ok(ExitCode::SUCCESS)
}

/// A gate that serves, and what works beside it.
pub(super) struct Serving {
    /// Where it listens.
    pub(super) addresses: Vec<SocketAddr>,
    /// Where its admin listener is.
    pub(super) admin: SocketAddr,
    gate: Arc<Gate>,
    store: Arc<dyn Store>,
    readiness: Readiness,
    servers: JoinSet<()>,
    stop: watch::Sender<bool>,
    workers: JoinHandle<()>,
    renewing: JoinHandle<()>,
    work_stop: watch::Sender<bool>,
    admin_task: JoinHandle<()>,
    admin_stop: watch::Sender<bool>,
}

impl Serving {
    /// Composes a gate and lets it serve; nothing if the process was told to stop while it waited for its store.
    pub(super) async fn start(
        config: Resolved,
        shards: &Arc<Shards>,
        accept_identity_change: bool,
        metrics: Metrics,
        signals: &mut Signals,
    ) -> anyhow::Result<Option<Self>> {
        let readiness = Readiness::default();
        // Before the store: a process that waits for its store says so.
        let listener = bind(config.admin.listen, "admin").await?;
        let admin_address = listener.local_addr()?;
        tracing::info!(address = %admin_address, "admin listening");
        let admin = Arc::new(admin_state(&config, &metrics, &readiness));
        // It outlives the rest: a drain can be watched.
        let admin_stop = watch::Sender::new(false);
        let admin_task = tokio::spawn(admin::serve(listener, Arc::clone(&admin), admin_stop.subscribe()));

        let Some(opened) = opening::open(&config.store, &readiness, signals).await? else { return Ok(None) };
        let upkeep = if opened.is_shared { worker::Settings::beside_callers() } else { worker::Settings::default() };
        let store = remembering::before(opened, &config, &metrics)?;
        let upstreams = config.upstreams.into_iter().map(Upstream::new).collect();
        let usage = Usage::new(&config.server.limits, &metrics);
        let gate = Gate::new(config.gate, config.router, upstreams, Arc::clone(&store), Arc::clone(&usage), &metrics);
        if !adopt_identities(&gate, &*store, accept_identity_change, signals).await? {
            return Ok(None);
        }
        admin.set_store(Arc::clone(&store));

        let current = server::Serving::current(Arc::clone(&gate), config.server.limits, usage);
        // All of them, before the first request: it must not be cut off because another address is taken.
        let mut listeners = Vec::new();
        for address in config.server.listen {
            listeners.push(bind(address, "server").await?);
        }
        let work_stop = watch::Sender::new(false);
        let workers = worker::spawn(Arc::clone(&store), metrics, upkeep, work_stop.subscribe());
        let renewing = tokio::spawn(keep_renewing(Arc::clone(&gate), work_stop.subscribe()));
        let (mut servers, mut addresses, stop) = (JoinSet::new(), Vec::new(), watch::Sender::new(false));
        for listener in listeners {
            let address = listener.local_addr()?;
            tracing::info!(%address, "listening");
            addresses.push(address);
            servers.spawn(server::serve(listener, Arc::clone(shards), Arc::clone(&current), stop.subscribe()));
        }
        readiness.set(Phase::Ready);
        let admin = admin_address;
        Ok(Some(Self {
            addresses,
            admin,
            gate,
            store,
            readiness,
            servers,
            stop,
            workers,
            renewing,
            work_stop,
            admin_task,
            admin_stop,
        }))
    }

    /// Takes no more requests, finishes what runs within `drain_timeout`, and ends.
    pub(super) async fn stop(mut self, drain_timeout: Duration, signals: &mut Signals) {
        self.readiness.set(Phase::Draining);
        tracing::info!(
            running = self.gate.running(),
            ?drain_timeout,
            "draining: no new connections; finishing what runs"
        );
        self.stop.send_replace(true);
        drain(&self.gate, &mut self.servers, drain_timeout, signals).await;
        self.work_stop.send_replace(true);
        let ending = async {
            let _ = tokio::join!(self.workers, self.renewing);
            self.store.close().await;
            self.admin_stop.send_replace(true);
            self.admin_task.await
        };
        // Neither a store that hangs nor a client that keeps its connection to the admin listener is a reason to stay.
        let _ = timeout(LAST_WORDS, ending).await;
    }
}

/// Renews leases until told to stop, come what may.
async fn keep_renewing(gate: Arc<Gate>, stop: watch::Receiver<bool>) {
    loop {
        let (gate, stop) = (Arc::clone(&gate), stop.clone());
        match tokio::spawn(async move { gate.renew_leases(stop).await }).await {
            Ok(()) => return,
            Err(_) => {
                tracing::error!("the renewal of leases failed; starting it again");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

async fn drain(gate: &Gate, servers: &mut JoinSet<()>, patience: Duration, signals: &mut Signals) {
    let deadline = Instant::now() + patience;
    let hurried = tokio::select! {
        _ = timeout_at(deadline, all_ended(servers)) => false,
        () = signals.stop() => true,
    };
    if hurried {
        tracing::warn!(running = gate.running(), "told to stop again: waiting no longer");
    }
    let patience = if hurried { Duration::ZERO } else { deadline.saturating_duration_since(Instant::now()) };
    if !gate.drain(patience).await {
        tracing::warn!("attempts that did not end in time are recorded as unknown");
        // Their clients are still to be told.
        let _ = timeout(LAST_WORDS, all_ended(servers)).await;
    }
}

async fn all_ended(servers: &mut JoinSet<()>) {
    while servers.join_next().await.is_some() {}
}

/// Makes the store know this configuration; false if the process was told to stop while it waited for that.
async fn adopt_identities(
    gate: &Gate,
    store: &dyn Store,
    accept_change: bool,
    signals: &mut Signals,
) -> anyhow::Result<bool> {
    let (origins, identities) = gate.identities();
    let changes = loop {
        // Another process may adopt, and where rules changed that takes as long as there are records.
        let adopted = tokio::select! {
            adopted = store.adopt(origins.clone(), identities.clone(), accept_change) => adopted,
            () = signals.stop() => return Ok(false),
        };
        match adopted {
            Ok(changes) => break changes,
            // It went away just after it was opened.
            Err(error) if matches!(error.cause().kind, ErrorKind::Unavailable | ErrorKind::Timeout) => {
                tracing::warn!(%error, "the store cannot be prepared; trying again");
            }
            Err(error) => return Err(error).context("cannot prepare the store"),
        }
        if timeout(ADOPT_AGAIN, signals.stop()).await.is_ok() {
            return Ok(false);
        }
    };
    if changes.is_empty() {
        return Ok(true);
    }
    let list: Vec<_> = changes
        .iter()
        .map(|change| format!("{}/{} (live records: {})", change.service, change.namespace, change.live))
        .collect();
    bail!(
        "the store holds live records whose keys this configuration would not recognise, and their requests could run \
         again: {}.\n  \
         Their route was renamed or removed (the first [[routes]] take the place of the route `default`), or its scope, \
         key rules, namespace, service or id secret was changed.\n  \
         hint: restore the former settings, wait until the records have expired, or start with \
         --accept-identity-change if forgetting these keys is what you want",
        list.join(", ")
    )
}

async fn bind(address: SocketAddr, what: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| {
        let flag = if what == "admin" { "--admin" } else { "--listen" };
        format!("[{what}] listen: cannot listen on {address}; {flag} ADDR gives another one")
    })
}

fn admin_state(config: &Resolved, metrics: &Metrics, readiness: &Readiness) -> admin::State {
    let secret = config.gate.id_secret.as_ref().map(|secret| Arc::clone(&secret.0));
    let service = Arc::clone(&config.gate.service);
    let identifier = Identifier::new(Arc::clone(&service), secret);
    let routes = config.router.routes().iter().map(|route| RouteInfo {
        name: route.name.to_string(),
        namespace: route.namespace.to_string(),
        methods: route.methods.iter().map(ToString::to_string).collect(),
        host: route.host.clone().unwrap_or_else(|| "*".to_owned()),
        path: route.path.to_string(),
        upstream: config.upstreams[route.upstream].name.to_string(),
        mode: match route.policy.mode {
            Mode::Protect => "protect",
            Mode::Pass => "pass",
        },
        ttl: route.policy.ttl,
    });
    admin::State::new(&config.admin, metrics.clone(), readiness.clone(), identifier, service, routes.collect())
}

/// The signals that the process minds.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    metrics: Metrics,
}

impl Signals {
    pub(super) fn install(metrics: Metrics) -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            metrics,
        })
    }

    /// Waits until the process is told to stop.
    pub(super) async fn stop(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => {
                    self.metrics.config_reloaded(false);
                    tracing::warn!("SIGHUP: this version does not reload its configuration; restart it instead");
                }
            }
        }
    }
}
