//! `oncegate health`

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use http::{Method, StatusCode};
use serde_json::Value;

use super::http_client::AdminArgs;
use super::{block_on, print};

/// How long the gate may take to answer, in a container or on a host that is busy too.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Ask a running gate whether it is ready: exit status 0 if it is, 1 if not
///
/// For probes of containers: it prints one line, and needs no other program.
#[derive(Args, Debug)]
pub(super) struct HealthArgs {
    #[command(flatten)]
    admin: AdminArgs,
    /// A gate whose store is away is healthy too: it goes on passing requests and replaying what it remembers
    #[arg(long)]
    store_optional: bool,
}

/// Runs `oncegate health`.
pub(super) fn run(args: HealthArgs) -> anyhow::Result<ExitCode> {
    let client = args.admin.client_without_token()?;
    let target = if args.store_optional { "/readyz?store=optional" } else { "/readyz" };
    let (status, bytes) = block_on(client.exchange_within(TIMEOUT, Method::GET, target, None))??;
    let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let Some(word) = body["status"].as_str() else { bail!(client.refusal(status, &bytes)) };
    let reason = body["reason"].as_str();
    print(&reason.map_or_else(|| format!("{word}\n"), |reason| format!("{word}: {reason}\n")))?;
    Ok(if status == StatusCode::OK { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
