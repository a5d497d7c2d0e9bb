//! `oncegate serve`: composes the rooms and runs them.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

use self::adopting::StoreWait;
use self::caching::Remembering;
use self::consuming::Consuming;
use self::listening::{Bound, Inherited, SocketFile, admin_is_guarded, bind_server, listen_admin};
use self::notices::Notices;
use self::reloading::StartSettings;
use self::signals::Instruction;
pub(super) use self::signals::Signals;
use self::summary::Summary;
use self::supervision::supervise;
pub(super) use self::watched_file::WatchedFile;
use crate::admin::{self, Phase, Readiness, RouteInfo};
use crate::cli::BAD_CONFIGURATION;
use crate::cli::identity_changes::Written;
use crate::config::{Resolved, Sources};
use crate::gate::{self, Gate};
use crate::http::memory::release_when_idle;
use crate::http::server::{self, Current};
use crate::http::shards::Shards;
use crate::http::upstream::Upstream;
use crate::http::usage::Usage;
use crate::store::Store;
use crate::store::cached::Cached;
use crate::store::sealed::{Keyring, Resealer};
use crate::telemetry::access_log::{AccessLog, Output};
use crate::telemetry::{access_log, logs, metrics::Metrics};
use crate::worker;

mod adopting;
mod caching;
mod certificates;
mod consuming;
mod draining;
pub(super) mod durability;
mod files;
mod listening;
mod logging;
pub(super) mod missing_keys;
mod notices;
mod opening;
mod reloading;
mod signals;
mod summary;
mod supervision;
mod token_keys;
mod traces;
mod watched_file;

/// How long the end may take once everything is settled.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Runs a gate until SIGTERM or SIGINT. At SIGHUP it reads `sources` again, of which `config` was made.
pub(super) fn run(
    config: Resolved,
    sources: Sources,
    accept_identity_change: bool,
    watched: Option<WatchedFile>,
) -> anyhow::Result<ExitCode> {
    let log_filter = logs::init(&config.log)?;
    let format = config.log.format;
    let access_log = match config.access_log.clone().map(Output::open).transpose() {
        Ok(access_log) => access_log,
        Err(error) => {
            tracing::error!(%error, "the access log cannot be opened");
            return Ok(ExitCode::from(BAD_CONFIGURATION));
        }
    };
    match run_logged(config, sources, log_filter, access_log, accept_identity_change, watched) {
        Err(error) if format == logs::Format::Json => {
            tracing::error!(error = super::describe(&error), "the gate cannot go on");
            Ok(ExitCode::FAILURE)
        }
        ended => ended,
    }
}

fn run_logged(
    mut config: Resolved,
    sources: Sources,
    log_filter: logs::Filter,
    access_log: Option<Output>,
    accept_identity_change: bool,
    watched: Option<WatchedFile>,
) -> anyhow::Result<ExitCode> {
    files::share_out(&mut config);
    files::write_no_core();
    files::check_spool();
    let inherited = Inherited::take();
    let shards = Arc::new(Shards::start().context("cannot start the threads that serve")?);
    let environment = Environment { shards, inherited, notices: Notices::of_process(), access_log };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(serve(config, sources, log_filter, environment, accept_identity_change, watched));
    // Whatever still runs by now was given up on.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served
}

async fn serve(
    config: Resolved,
    sources: Sources,
    log_filter: logs::Filter,
    environment: Environment,
    accept_identity_change: bool,
    watched: Option<WatchedFile>,
) -> anyhow::Result<ExitCode> {
    let metrics = Metrics::new();
    metrics.config_reloaded(true);
    let mut signals = Signals::install(watched)?;
    let serving = Serving::start(config, environment, accept_identity_change, metrics, &mut signals).await?;
    if let Some(mut serving) = serving {
        let (sender, mut reloads) = mpsc::channel(1);
        serving.admin_state.set_reloads(sender);
        loop {
            let reply = tokio::select! {
                biased;
                instruction = signals.next() => match instruction {
                    Instruction::Stop => break,
                    Instruction::Reload => None,
                },
                Some(reply) = reloads.recv() => Some(reply),
            };
            let by_signal = reply.is_none();
            tokio::select! {
                report = serving.reload(&sources, &log_filter, by_signal) => {
                    // Whoever asked may have gone.
                    let _ = reply.map(|reply| reply.send(report));
                }
                () = signals.stop() => break,
            }
        }
        drop(reloads);
        let (shutdown_delay, drain_timeout) = (serving.shutdown_delay, serving.drain_timeout);
        serving.stop(shutdown_delay, drain_timeout, &mut signals).await;
        tracing::info!("stopped");
    }
    Ok(ExitCode::SUCCESS)
}

/// What a process has besides its configuration.
pub(super) struct Environment {
    shards: Arc<Shards>,
    inherited: Inherited,
    notices: Notices,
    access_log: Option<Output>,
}

impl Environment {
    /// Without inherited sockets and notifications.
    pub(super) fn alone(shards: Arc<Shards>) -> Self {
        Self { shards, inherited: Inherited::default(), notices: Notices::default(), access_log: None }
    }
}

/// A gate that serves, and what works beside it.
pub(super) struct Serving {
    /// Where it listens.
    pub(super) addresses: Vec<SocketAddr>,
    /// Where its admin listener is.
    pub(super) admin: SocketAddr,
    /// The threads that serve. Deliveries run there when no connection is left.
    _shards: Arc<Shards>,
    /// The serving gate, which a reload replaces.
    current: Current<Gate>,
    start_settings: StartSettings,
    /// What the gate does, as it was last logged.
    summary: Summary,
    log_format: logs::Format,
    shutdown_delay: Duration,
    drain_timeout: Duration,
    metrics: Metrics,
    store: Arc<dyn Store>,
    /// The same store, whose memory a reload may empty.
    cached: Arc<Cached>,
    /// Whether other gates may write to it.
    is_shared: bool,
    /// What seals records, where the start had keys for it.
    resealer: Option<Arc<Resealer>>,
    readiness: Readiness,
    notices: Notices,
    servers: JoinSet<()>,
    /// The files of unix sockets, which go with this.
    _paths: Vec<SocketFile>,
    certificates: JoinSet<()>,
    token_keys: JoinHandle<()>,
    stop: watch::Sender<bool>,
    workers: JoinHandle<()>,
    renewing: JoinHandle<()>,
    asking: JoinHandle<()>,
    following: Option<JoinHandle<()>>,
    delivering: Option<JoinHandle<()>>,
    consuming: Consuming,
    work_stop: watch::Sender<bool>,
    admin_state: Arc<admin::State>,
    admin_task: JoinHandle<()>,
    admin_stop: watch::Sender<bool>,
    access_log: Option<(access_log::Settings, Arc<AccessLog>)>,
    exporting: Option<traces::Exporting>,
}

impl Serving {
    /// Composes a gate and lets it serve; nothing if the process was stopped while it waited for its store.
    pub(super) async fn start(
        config: Resolved,
        environment: Environment,
        accept_identity_change: bool,
        metrics: Metrics,
        signals: &mut Signals,
    ) -> anyhow::Result<Option<Self>> {
        let Environment { shards, inherited, notices, access_log } = environment;
        metrics.watch_runtime("main", &Handle::current());
        for (index, runtime) in shards.runtimes().enumerate() {
            metrics.watch_runtime(&format!("shard-{index}"), runtime);
        }
        // The threads that serve do so by themselves.
        tokio::spawn(release_when_idle());
        let readiness = Readiness::default();
        notices.go_on(readiness.clone(), &shards);
        let (admin_source, sources) = inherited.share_out(&config.admin.listen, &config.server.listen)?;
        // Before the store: a process that waits for its store says so.
        let Some(listener) = listen_admin(admin_source, config.admin.tls.is_some(), signals).await? else {
            return Ok(None);
        };
        let admin_address = listener.local_addr()?;
        admin_is_guarded(admin_address, &config.admin)?;
        tracing::info!(address = %admin_address, "admin listening");
        for advice in &config.advice {
            tracing::info!("{advice}");
        }
        let admin_state = Arc::new(admin_state(&config, &metrics, &readiness));
        // It outlives the rest: a drain can be watched.
        let admin_stop = watch::Sender::new(false);
        let admin_task = tokio::spawn(admin::serve(listener, Arc::clone(&admin_state), admin_stop.subscribe()));

        let Some(mut opened) = opening::open(&config, &readiness, &metrics, signals).await? else {
            return Ok(None);
        };
        let is_shared = opened.is_shared;
        let upkeep = if is_shared { worker::Settings::beside_callers() } else { worker::Settings::default() };
        let place = opened.durability.place.clone();
        let (summary, log_format) = (Summary::of(&config, opened.durability.clone()), config.log.format);
        let written = Written::of(&config);
        let keyring = (!config.sealing.is_empty()).then(|| Arc::new(Keyring::new(config.sealing.clone())));
        let lost = std::mem::take(&mut opened.lost);
        let Remembering { store, cached, resealer, finder } = caching::before(opened, &config, keyring, &metrics)?;
        worker::lost_at_start(&*store, &metrics, lost).await;
        if config.router.routes().iter().any(|route| route.policy.quota.is_some()) {
            match store.quotas() {
                Some(_) => tracing::info!("quotas are counted by all gates together, in Redis"),
                None => {
                    tracing::info!("quotas are counted by each gate for itself: several gates grant them several times")
                }
            }
        }
        let start_settings = StartSettings::of(&config);
        let (shutdown_delay, drain_timeout) = (config.server.shutdown_delay, config.server.drain_timeout);
        let usage = Usage::new(&config.server.limits, &metrics);
        admin_state.set_usage(Arc::clone(&usage));
        let upstream = |settings| Upstream::new(settings, Arc::clone(&usage));
        let upstreams = config.upstreams.into_iter().map(upstream).collect();
        let gate = Gate::new(config.gate, config.router, upstreams, Arc::clone(&store), Arc::clone(&usage), &metrics);
        let access_log = access_log.map(|output| logging::start(&gate, output, &metrics)).transpose()?;
        let exporting = config.traces.map(|settings| traces::start(&gate, settings, &usage, &metrics));
        // All of them, before the first request: it must not be cut off because another address is taken. And before the
        // store adopts other rules: what they forget is forgotten also where this gate never serves. Clients can connect
        // when the store has taken the configuration.
        let mut bound = Vec::new();
        for source in sources {
            let Some(next) = bind_server(source, config.server.socket_mode, signals).await? else { return Ok(None) };
            bound.push(next);
        }
        let audit = admin_state.audit_writer();
        let accepting = accept_identity_change.then_some(&audit);
        let waiting = StoreWait { readiness: &readiness, store: place };
        if !adopting::at_start(&gate, &*store, &written, accepting, is_shared, &waiting, signals).await? {
            return Ok(None);
        }
        admin_state.set_store(Arc::clone(&store));
        if let Some(resealer) = &resealer {
            resealer.keys().be_strict(gate.sealed_origins());
            admin_state.set_resealer(Arc::clone(resealer));
        }
        // Before it is ready, so that the first request with a token need not wait for its key.
        readiness.set_token_keys(gate.refresh_token_keys().await);
        let places: Vec<String> = bound.iter().map(Bound::place).collect();
        let listeners = bound.into_iter().map(Bound::listen).collect::<anyhow::Result<Vec<_>>>()?;

        let current =
            server::ServerState::current(Arc::clone(&gate), config.server.limits, config.server.accept, usage);
        let work_stop = watch::Sender::new(false);
        let workers =
            worker::spawn(Arc::clone(&store), resealer.clone(), metrics.clone(), upkeep, work_stop.subscribe());
        let (renewer, stopping) = (Arc::clone(&current), work_stop.subscribe());
        let renewing = tokio::spawn(supervise(
            move || renewer.load().handler.renew_leases(stopping.clone()),
            || tracing::error!("the renewal of leases failed; starting it again"),
        ));
        let asking = tokio::spawn(keep_asking(Arc::clone(&current), work_stop.subscribe()));
        let following = is_shared.then(|| {
            let (follower, metrics) = (Arc::clone(&current), metrics.clone());
            tokio::spawn(supervise(
                move || {
                    let current = Arc::clone(&follower);
                    gate::follow_rules(move || Arc::clone(&current.load().handler), metrics.clone())
                },
                || tracing::error!("following the rules of keys failed; starting it again"),
            ))
        });
        let (mut servers, mut addresses, stop) = (JoinSet::new(), Vec::new(), watch::Sender::new(false));
        let (deliverer, stopping) = (Arc::clone(&current), stop.subscribe());
        let delivering = shards.run(supervise(
            move || {
                let current = Arc::clone(&deliverer);
                gate::deliver_accepted(move || Arc::clone(&current.load().handler), stopping.clone())
            },
            || tracing::error!("the delivery of accepted requests failed; starting it again"),
        ));
        let consuming = Consuming::start(config.consumers, &shards, &current, &metrics, &stop);
        let mut certificates = JoinSet::new();
        certificates.spawn(certificates::follow(Arc::clone(&current)));
        certificates.spawn(certificates::follow_admin(Arc::clone(&admin_state)));
        let token_keys = tokio::spawn(token_keys::follow(Arc::clone(&current), readiness.clone()));
        let summary = summary.at(admin_address.to_string(), places.clone());
        summary.log(log_format);
        let mut paths = Vec::new();
        for ((listener, path), place) in listeners.into_iter().zip(places) {
            tracing::info!(address = %place, "listening");
            addresses.extend(listener.address());
            paths.extend(path);
            servers.spawn(server::serve(listener, Arc::clone(&shards), Arc::clone(&current), stop.subscribe()));
        }
        readiness.set(Phase::Ready);
        notices.ready();
        tokio::spawn(missing_keys::warn_at_start(finder));
        Ok(Some(Self {
            addresses,
            admin: admin_address,
            _shards: shards,
            current,
            start_settings,
            summary,
            log_format,
            shutdown_delay,
            drain_timeout,
            metrics,
            store,
            cached,
            is_shared,
            resealer,
            readiness,
            notices,
            servers,
            _paths: paths,
            certificates,
            token_keys,
            stop,
            workers,
            renewing,
            asking,
            following,
            delivering,
            consuming,
            work_stop,
            admin_state,
            admin_task,
            admin_stop,
            access_log,
            exporting,
        }))
    }

    /// Takes no more requests after `shutdown_delay`, finishes what runs within `drain_timeout`, and ends. A second signal
    /// ends the delay, a third the drain.
    pub(super) async fn stop(mut self, shutdown_delay: Duration, drain_timeout: Duration, signals: &mut Signals) {
        self.readiness.set(Phase::Draining);
        if !shutdown_delay.is_zero() {
            tracing::info!(?shutdown_delay, "not ready any more; accepting requests until balancers have noticed");
            let _ = timeout(shutdown_delay, signals.stop()).await;
        }
        // It speaks for the attempts of all gates that there were.
        let gate = Arc::clone(&self.current.load().handler);
        let running = gate.running();
        self.notices.stopping(running);
        tracing::info!(running, ?drain_timeout, "draining: no new connections; finishing what runs");
        self.certificates.abort_all();
        self.token_keys.abort();
        self.stop.send_replace(true);
        // What is not delivered by then, another gate or start delivers.
        if let Some(delivering) = self.delivering.take() {
            let _ = timeout(LAST_WORDS, delivering).await;
        }
        draining::drain(&gate, &mut self.servers, drain_timeout, signals).await;
        // What has not ended by then, its broker delivers again.
        let _ = timeout(LAST_WORDS, self.consuming.ended()).await;
        self.work_stop.send_replace(true);
        if let Some(following) = &self.following {
            following.abort();
        }
        self.end_traces().await;
        if let Some((_, log)) = &self.access_log {
            log.end().await;
        }
        let ending = async {
            let _ = tokio::join!(self.workers, self.renewing, self.asking);
            self.store.close().await;
            self.admin_stop.send_replace(true);
            self.admin_task.await
        };
        // Neither a store that hangs nor a client that keeps its connection to the admin listener is a reason to stay.
        let _ = timeout(LAST_WORDS, ending).await;
    }
}

/// Asks upstreams about unknown outcomes until it is stopped, even after a panic.
async fn keep_asking(current: Current<Gate>, mut stop: watch::Receiver<bool>) {
    loop {
        let current = Arc::clone(&current);
        let mut asking = JoinSet::new();
        asking.spawn(gate::ask_about_unknown(move || Arc::clone(&current.load().handler)));
        tokio::select! {
            biased;
            () = server::stopped(&mut stop) => return,
            _ = asking.join_next() => {
                tracing::error!("asking about unknown outcomes failed; starting it again");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

fn admin_state(config: &Resolved, metrics: &Metrics, readiness: &Readiness) -> admin::State {
    let identifiers = config.gate.identifiers();
    let (service, routes) = (Arc::clone(&config.gate.service), admin_routes(config));
    admin::State::new(&config.admin, metrics.clone(), readiness.clone(), identifiers, service, routes)
}

fn admin_routes(config: &Resolved) -> Vec<RouteInfo> {
    let routes = config.router.routes().iter().map(|route| RouteInfo {
        name: route.name.to_string(),
        namespace: route.namespace.to_string(),
        methods: route.methods.iter().map(ToString::to_string).collect(),
        host: route.host.clone().unwrap_or_else(|| "*".to_owned()),
        path: route.path.to_string(),
        upstream: config.upstreams[route.upstream].name.to_string(),
        mode: route.policy.mode.as_str(),
        scope: route.policy.scope.words().map(|word| word.to_string()).collect(),
        accepts: route.policy.accepts(),
        ttl: route.policy.ttl,
    });
    routes.collect()
}
