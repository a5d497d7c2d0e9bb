//! `oncegate demo`: a flaky payment upstream, the gate, and a narrated retry storm.
//!
//! Everything is real and in one process: the API and the gate listen on free ports of the loopback address, the gate
//! is what `serve` runs, with its store in a temporary directory, and every number that is printed is counted.

mod customer;
mod day;
mod payments;
mod person;
mod screen;
mod shop;
mod story;
mod tally;
mod wire;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use tempfile::TempDir;
use tokio::time::Instant;

use self::customer::customers;
use self::day::Day;
use self::payments::Payments;
use self::screen::Screen;
use self::shop::Shop;
use self::story::Story;
use self::wire::Server;
use super::serve::{Environment, Serving, Signals};
use crate::config::{self, Resolved, Sources};
use crate::http::shards::Shards;
use crate::telemetry::logs;
use crate::telemetry::metrics::Metrics;

/// How long the viewer gets to read.
const PAUSE: Duration = Duration::from_millis(300);

/// How long the gate gets to finish what runs when the demo is over.
const DRAIN: Duration = Duration::from_secs(1);

/// The route of the demo, as it is shown and as the gate reads it.
const ROUTE: &str = r#"[[routes]]
name = "charges"
methods = ["POST"]
path = "/v1/charges"
outcomes = { "5xx" = "hold", "503" = "release" }
"#;

/// Show a storm of retries at a payment API that fails, without the gate and with it
///
/// Starts the API and the gate on free ports of 127.0.0.1, with a temporary directory that is removed in the end, and
/// ends by itself within half a minute. The exit status is 1 if anybody was charged twice through the gate.
#[derive(Args, Debug)]
pub(super) struct DemoArgs {
    /// How many customers pay, from 10 to 1000
    #[arg(long, value_name = "N", default_value_t = 120, value_parser = clap::value_parser!(u16).range(10..=1000))]
    customers: u16,
    /// Chooses who meets with which failure: the same seed, the same day
    #[arg(long, value_name = "N", default_value_t = 42)]
    seed: u64,
    /// Leave out the pauses that are there for reading
    #[arg(long)]
    fast: bool,
}

/// Shows it, or ends early when it is interrupted or its output is closed.
pub(super) fn run(args: DemoArgs) -> anyhow::Result<ExitCode> {
    logs::init(&logs::Settings { format: logs::Format::Text, level: "error".to_owned() })?;
    let shards = Arc::new(Shards::start().context("cannot start the threads that serve")?);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let shown = runtime.block_on(show(args, shards));
    // Whatever still runs by now was given up on.
    runtime.shutdown_timeout(Duration::from_secs(1));
    shown
}

async fn show(args: DemoArgs, shards: Arc<Shards>) -> anyhow::Result<ExitCode> {
    let metrics = Metrics::new();
    let mut signals = Signals::install(None)?;
    let screen = Arc::new(Screen::stdout());
    let customers: Vec<_> = customers(args.customers.into(), args.seed).into_iter().map(Arc::new).collect();
    let (alone, behind) = (Payments::open(&customers).await?, Payments::open(&customers).await?);

    let directory = tempfile::Builder::new().prefix("oncegate-demo-").tempdir().with_context(|| {
        format!("cannot make a directory in {}: set TMPDIR to one that is writable", std::env::temp_dir().display())
    })?;
    let config = configuration(&directory, behind.address)?;
    let Some(serving) = Serving::start(config, Environment::alone(shards), false, metrics, &mut signals).await? else {
        bail!("interrupted")
    };
    let gate = *serving.addresses.first().context("the gate listens nowhere")?;
    let pause = if args.fast { Duration::ZERO } else { PAUSE };
    let day = |api: Arc<Payments>, shop: Shop| {
        let books = Server::at("the payment API", api.address)?;
        anyhow::Ok(Arc::new(Day { api, books, shop, screen: Arc::clone(&screen), began: Instant::now(), pause }))
    };
    let story = Story {
        without: day(Arc::clone(&alone), Shop::at("the payment API", alone.address)?)?,
        with: day(behind, Shop::at("oncegate", gate)?)?,
        gate,
        admin: serving.admin,
        seed: args.seed,
        customers,
    };
    let ended = tokio::select! {
        ended = story.tell() => ended,
        () = signals.stop() => Err(anyhow::anyhow!("interrupted")),
        kind = screen.failed() => match kind {
            // A reader that went away wanted no more.
            std::io::ErrorKind::BrokenPipe => Ok(()),
            kind => Err(std::io::Error::from(kind)).context("cannot write the output"),
        },
    };
    // What stood there for a moment only is not the end of it.
    screen.pass("");
    serving.stop(Duration::ZERO, if ended.is_ok() { DRAIN } else { Duration::ZERO }, &mut signals).await;
    let path = directory.path().to_owned();
    directory.close().with_context(|| format!("cannot remove {}", path.display()))?;
    ended.map(|()| ExitCode::SUCCESS)
}

/// The configuration of the gate: the least that a gate before this API needs.
fn configuration(directory: &TempDir, upstream: SocketAddr) -> anyhow::Result<Resolved> {
    let file = directory.path().join("oncegate.toml");
    let store = toml_edit::Value::from(format!("sqlite:{}", directory.path().join("oncegate.db").display()));
    let text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[store]\nurl = {store}\n\
         [upstreams]\npayments = \"http://{upstream}\"\n\n{ROUTE}"
    );
    std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    // Nothing of the environment: the demo is the same wherever it runs.
    Ok(config::load(Sources { file: Some(file), ..Sources::default() })?)
}
