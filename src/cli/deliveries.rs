//! `oncegate deliveries`: accepted requests that are delivered later, through the admin API.

use std::io::Write;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use http::Method;
use serde_json::{Value, json};

use super::block_on;
use super::http_client::{AdminArgs, AdminClient};
use super::paging::{self, Listing, Output, PagingArgs, percent_encode, say_done};
use super::table::{Table, text};

/// List accepted requests that are still to be delivered, or dead; hold the deliveries of a route back, or let them go
#[derive(Args, Debug)]
pub(super) struct DeliveriesArgs {
    #[command(flatten)]
    admin: AdminArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// List accepted requests, in the order of their acceptance
    List {
        /// Only those of this route
        #[arg(value_name = "ROUTE")]
        route: Option<String>,
        /// Only those that are queued, or dead
        #[arg(long, value_parser = ["queued", "dead"])]
        state: Option<String>,
        #[command(flatten)]
        paging: PagingArgs,
    },
    /// Hold back the deliveries of a route, at every gate of the store, until they are resumed
    Pause(RouteArgs),
    /// Let the deliveries of a route go again
    Resume(RouteArgs),
}

#[derive(Args, Debug)]
struct RouteArgs {
    /// The name of the route
    #[arg(value_name = "ROUTE")]
    route: String,
    /// Why; goes to the audit log and to the log of `oncegate serve`
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    reason: String,
}

/// Runs `oncegate deliveries`.
pub(super) fn run(args: DeliveriesArgs) -> anyhow::Result<ExitCode> {
    let mut out = Output::stdout();
    let done = block_on(execute(args, &mut out))?;
    paging::finish(done, &mut out)?;
    Ok(ExitCode::SUCCESS)
}

async fn execute(args: DeliveriesArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let client = args.admin.client()?;
    match args.command {
        Command::List { route, state, paging } => {
            let given = [("route", &route), ("state", &state)];
            let given = given.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
            let filter = given.map(|(name, value)| format!("&{name}={}", percent_encode(value))).collect();
            let listing = Listing {
                path: "/api/v1/deliveries",
                member: "deliveries",
                filter,
                route,
                table: table(),
                row,
                also: Some("paused"),
            };
            listing.write(&client, paging, out).await
        }
        Command::Pause(args) => {
            change(
                &client,
                "pause",
                args,
                "paused: its requests are still accepted, and none is delivered until it is resumed",
                out,
            )
            .await
        }
        Command::Resume(args) => change(&client, "resume", args, "resumed", out).await,
    }
}

async fn change(
    client: &AdminClient,
    verb: &str,
    RouteArgs { route, reason }: RouteArgs,
    done: &str,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let body = json!({ "route": route, "reason": reason });
    client.send(Method::POST, &format!("/api/v1/deliveries/{verb}"), Some(&body)).await?;
    say_done(|| Ok(writeln!(out, "{route} {done}")?))
}

fn table() -> Table<7> {
    Table::new(["ID", "ROUTE", "STATE", "ACCEPTED", "DUE", "ATTEMPTS", "REASON"], "nothing is to be delivered")
}

fn row(delivery: &Value) -> [String; 7] {
    [
        text(&delivery["id"]),
        text(&delivery["route"]),
        text(&delivery["state"]),
        text(&delivery["accepted_at"]),
        text(&delivery["due_at"]),
        text(&delivery["attempts"]),
        text(&delivery["reason"]),
    ]
}
