//! `oncegate records`: what an operator sees and does about records, through the admin API.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use clap::builder::PossibleValuesParser;
use clap::{ArgGroup, Args, Subcommand};
use http::Method;
use serde_json::{Value, json};

use super::http_client::{AdminArgs, AdminClient};
use crate::idempotency::record::{RecordId, State};

mod table;

/// Most records that the API gives at once.
const PAGE: usize = 1000;

/// List, show, resolve and purge records, through the admin listener of a running `oncegate serve`
#[derive(Args, Debug)]
pub struct RecordsArgs {
    #[command(flatten)]
    admin: AdminArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// List records, in the order of their ids
    List(ListArgs),
    /// Show one record
    Show {
        /// The record's id
        #[arg(value_parser = parse_id)]
        id: RecordId,
        /// Show the answer that retries get, with its headers and its body; the gate logs that it was read
        #[arg(long)]
        answer: bool,
        /// Print the API's JSON
        #[arg(long)]
        json: bool,
    },
    /// Say how an attempt ended whose outcome is unknown
    Resolve(ResolveArgs),
    /// Remove a record, whatever its state: its key is free, and the next request with it runs. Where its attempt still
    /// runs in the gate, that is when the attempt has ended
    Purge {
        /// The record's id
        #[arg(value_parser = parse_id)]
        id: RecordId,
    },
}

#[derive(Args, Debug)]
struct ListArgs {
    /// Only records in this state
    #[arg(long, value_parser = PossibleValuesParser::new(State::ALL.map(State::as_str)))]
    state: Option<String>,
    /// Only records claimed by this route
    #[arg(long, value_name = "NAME")]
    route: Option<String>,
    /// Only records of this key, as its client sent it
    #[arg(long, allow_hyphen_values = true)]
    key: Option<String>,
    /// Only records claimed at least this long ago, as 90s, 1h or 7d
    #[arg(long, value_name = "DURATION")]
    older_than: Option<String>,
    /// Most records to list
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = parse_limit)]
    limit: usize,
    /// Print the API's JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
#[command(group(ArgGroup::new("outcome").required(true).args(["release", "complete"])))]
struct ResolveArgs {
    /// The record's id
    #[arg(value_parser = parse_id)]
    id: RecordId,
    /// The attempt had no effect: free its key, so that the next request with it runs
    #[arg(long)]
    release: bool,
    /// The attempt had this answer: give it to every retry
    #[arg(long, requires = "status")]
    complete: bool,
    /// The answer's status
    #[arg(long, value_name = "N", requires = "complete", conflicts_with = "release")]
    status: Option<u16>,
    /// A header of the answer; may be repeated
    #[arg(long, value_name = "NAME: VALUE", requires = "complete", conflicts_with = "release", value_parser = parse_header)]
    header: Vec<(String, String)>,
    /// The answer's body, or @FILE to read it from a file. JSON gets its Content-Type unless --header gives one
    #[arg(
        long,
        value_name = "TEXT|@FILE",
        allow_hyphen_values = true,
        requires = "complete",
        conflicts_with = "release"
    )]
    body: Option<String>,
    /// Why; goes to the log of `oncegate serve`
    #[arg(long, value_name = "TEXT", value_parser = parse_reason)]
    reason: String,
}

/// Runs `oncegate records`.
pub fn run(args: RecordsArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("the runtime could not be started")?;
    let mut out = Vec::new();
    let result = runtime.block_on(execute(args, &mut out));
    // What was learned before a failure is worth its place on the screen.
    match io::stdout().lock().write_all(&out) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error).context("cannot write"),
        _ => {}
    }
    result.map(|()| ExitCode::SUCCESS)
}

async fn execute(args: RecordsArgs, out: &mut Vec<u8>) -> anyhow::Result<()> {
    let client = args.admin.client()?;
    match args.command {
        Command::List(list) => self::list(&client, list, out).await,
        Command::Show { id, answer, json } => {
            let query = if answer { "?answer=true" } else { "" };
            let record = client.send(Method::GET, &format!("{}{query}", record_path(id)), None).await?;
            if json { print_json(&record, out) } else { table::write_one(&record, out) }
        }
        Command::Resolve(resolve) => self::resolve(&client, resolve, out).await,
        Command::Purge { id } => {
            client.send(Method::DELETE, &record_path(id), None).await?;
            writeln!(out, "{id} removed: its key is free, once no attempt of it runs any more")?;
            Ok(())
        }
    }
}

/// Follows the pages up to the limit.
async fn list(client: &AdminClient, args: ListArgs, out: &mut Vec<u8>) -> anyhow::Result<()> {
    let mut filter = String::new();
    for (name, value) in
        [("state", &args.state), ("route", &args.route), ("key", &args.key), ("older_than", &args.older_than)]
    {
        if let Some(value) = value {
            filter.push_str(&format!("&{name}={}", percent_encode(value)));
        }
    }
    let (mut records, mut next) = (Vec::new(), None);
    loop {
        let limit = (args.limit - records.len()).min(PAGE);
        let cursor = next.map(|next: String| format!("&cursor={}", percent_encode(&next))).unwrap_or_default();
        let page = client.send(Method::GET, &format!("/api/v1/records?limit={limit}{filter}{cursor}"), None).await?;
        let found = page["records"].as_array().ok_or_else(|| anyhow!("the answer has no records"))?;
        records.extend(found.iter().cloned());
        next = page["next"].as_str().map(ToOwned::to_owned);
        if next.is_none() || records.len() >= args.limit {
            break;
        }
    }
    if args.json {
        return print_json(&json!({ "records": records, "next": next }), out);
    }
    table::write_all(&records, out)?;
    if next.is_some() {
        writeln!(out, "and more: raise --limit")?;
    }
    Ok(())
}

async fn resolve(client: &AdminClient, args: ResolveArgs, out: &mut Vec<u8>) -> anyhow::Result<()> {
    let body = if args.release {
        json!({ "action": "release", "reason": args.reason })
    } else {
        let body = read_body(args.body)?;
        json!({
            "action": "complete",
            "status": args.status,
            "headers": with_content_type(args.header, &body),
            "body_base64": STANDARD.encode(body),
            "reason": args.reason,
        })
    };
    client.send(Method::POST, &format!("{}/resolve", record_path(args.id)), Some(&body)).await?;
    let done = if args.release { "released: its key is free" } else { "completed: retries get this answer" };
    writeln!(out, "{} {done}", args.id)?;
    Ok(())
}

/// The headers of an answer. A body of JSON says so unless they do: clients read it by its type.
fn with_content_type(mut headers: Vec<(String, String)>, body: &[u8]) -> Vec<(String, String)> {
    let has_type = headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("Content-Type"));
    if !has_type && serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok() {
        headers.push(("Content-Type".to_owned(), "application/json".to_owned()));
    }
    headers
}

fn record_path(id: RecordId) -> String {
    format!("/api/v1/records/{id}")
}

fn print_json(value: &Value, out: &mut Vec<u8>) -> anyhow::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)?;
    Ok(())
}

fn read_body(body: Option<String>) -> anyhow::Result<Vec<u8>> {
    match body {
        None => Ok(Vec::new()),
        Some(text) => match text.strip_prefix('@') {
            Some(file) => std::fs::read(file).with_context(|| format!("cannot read the body of {file}")),
            None => Ok(text.into_bytes()),
        },
    }
}

fn parse_id(text: &str) -> Result<RecordId, String> {
    RecordId::parse(text).ok_or_else(|| "an id is 64 hexadecimal digits".to_owned())
}

fn parse_reason(text: &str) -> Result<String, String> {
    Some(text.trim()).filter(|text| !text.is_empty()).map(str::to_owned).ok_or_else(|| "say why".to_owned())
}

fn parse_limit(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|limit| *limit > 0).ok_or_else(|| "must be a number from 1".to_owned())
}

fn parse_header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("a header is written as 'Name: value'")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

/// Everything but the unreserved characters (RFC 3986 section 2.3).
fn percent_encode(text: &str) -> String {
    text.bytes().fold(String::with_capacity(text.len()), |mut encoded, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
        encoded
    })
}

#[cfg(test)]
mod tests;
