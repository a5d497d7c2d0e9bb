//! `oncegate reload`

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use http::{Method, StatusCode};
use serde_json::json;

use super::http_client::{AdminArgs, NotConnected};
use super::paging::say_done;
use super::{BAD_CONFIGURATION, block_on, complain, describe, print};
use crate::admin::ReloadReport;
use crate::config::Problems;

/// How long a reload may take: it waits for claims under way, and for the store.
const TIMEOUT: Duration = Duration::from_secs(120);

/// What helps where the file changes how the listener is reached by which this command asks.
const CHANGED_LISTENER: &str = "if admin.tls or the token has changed, `kill -HUP` makes the gate read the file";

/// Have a running gate read its configuration again, and wait for what comes of it
///
/// A configuration with a problem changes nothing: its problems are printed, and the exit status is 78. The gate reads the
/// file that it was started with; --config only tells where its admin listener is.
#[derive(Args, Debug)]
pub(super) struct ReloadArgs {
    #[command(flatten)]
    admin: AdminArgs,
}

/// Runs `oncegate reload`.
pub(super) fn run(args: ReloadArgs) -> anyhow::Result<ExitCode> {
    let client = match args.admin.client() {
        Ok(client) => client,
        Err(error) if error.is::<Problems>() => {
            complain(&format!("{error}: the gate was not asked, and goes on with the former configuration"));
            return Ok(ExitCode::from(BAD_CONFIGURATION));
        }
        Err(error) => return Err(error),
    };
    let nothing = json!({});
    let asked = client.exchange_within(TIMEOUT, Method::POST, "/api/v1/reload", Some(&nothing));
    let (status, body) = block_on(asked)?.map_err(|error| {
        let was_asked = !error.is::<NotConnected>();
        if was_asked {
            return error.context("what came of the reload is not known: see the gate's log");
        }
        let error = describe(&error);
        let hint = if error.contains("TLS") { format!("\n    hint: {CHANGED_LISTENER}") } else { String::new() };
        anyhow!("not reloaded: {error}{hint}")
    })?;
    if status == StatusCode::UNAUTHORIZED {
        bail!("{}\n    hint: {CHANGED_LISTENER}", client.refusal(status, &body));
    }
    if !matches!(status, StatusCode::OK | StatusCode::UNPROCESSABLE_ENTITY) {
        bail!(client.refusal(status, &body));
    }
    match serde_json::from_slice(&body).context("what answers there is not oncegate's admin listener")? {
        ReloadReport::Reloaded { routes, needs_restart, warnings } => {
            let said = say_done(|| print(&format!("reloaded; routes: {routes}\n")));
            if !needs_restart.is_empty() {
                complain(&format!("oncegate: restart the gate to apply {}", needs_restart.join(", ")));
            }
            for warning in warnings {
                complain(&format!("oncegate: warning: {warning}"));
            }
            said.map(|()| ExitCode::SUCCESS)
        }
        ReloadReport::Refused { detail, problems } if problems.is_empty() => {
            bail!("not reloaded, the gate goes on with the former configuration: {detail}")
        }
        ReloadReport::Refused { detail, .. } => {
            complain(&format!("{detail}: not reloaded, the gate goes on with the former configuration"));
            Ok(ExitCode::from(BAD_CONFIGURATION))
        }
    }
}
