//! `oncegate records`: what an operator sees and does about records, through the admin API.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::builder::PossibleValuesParser;
use clap::{ArgGroup, Args, Subcommand, value_parser};
use http::Method;
use serde_json::{Map, Value};

use super::http_client::{AdminArgs, AdminClient};
use super::paging::{self, Listing, Output, PagingArgs, members_of, percent_encode};
use super::{audit, block_on};
use crate::admin;
use crate::idempotency::record::State;
use crate::store::IdPrefix;

mod changing;
mod counts;
mod resealing;
mod table;

pub(super) use self::counts::{accepted_requests, records};

/// The digits of an id.
const WHOLE: usize = 64;

/// Fewest digits of an id that name a record.
const SHORTEST_ID: usize = 8;

/// How many records an error or a dry run shows.
const SHOWN: usize = 10;

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
    /// List records, newest first
    List(ListArgs),
    /// Show one record
    Show {
        /// The record's id, or at least its first 8 digits
        #[arg(value_name = "ID", value_parser = parse_id)]
        record: String,
        /// Show the answer that retries get, with its headers and its body; the audit log says that it was read
        #[arg(long)]
        answer: bool,
        /// Show the whole key, where the record keeps it: on routes with `recovery = { probe = ..., every = ... }`. The audit log
        /// says that it was read
        #[arg(long)]
        reveal_key: bool,
        /// Print the API's JSON
        #[arg(long)]
        json: bool,
    },
    /// Decide an unknown outcome, for one record or for all that match a filter
    Resolve(ResolveArgs),
    /// Remove a record, or all that a filter finds. Their keys are free, and the next request with such a key runs. Records in
    /// flight are removed only by their id or by --state in-flight: a retry may then run beside an attempt of another gate
    Purge(PurgeArgs),
    /// Encrypt records anew with the first of `store.encryption_keys`, while the gate serves
    Reseal,
    /// Deliver an accepted request again that was given up, or all that a filter finds
    Retry(RetryArgs),
}

/// Which records. All that is given must hold.
#[derive(Args, Debug)]
struct FilterArgs {
    /// Only records in this state
    #[arg(long, value_parser = PossibleValuesParser::new(State::ALL.map(State::as_str)))]
    state: Option<String>,
    /// Only records claimed by this route
    #[arg(long, value_name = "NAME")]
    route: Option<String>,
    /// Only records of this key, as its client sent it, of every route and caller
    #[arg(long, allow_hyphen_values = true)]
    key: Option<String>,
    /// Only records whose id starts with these hexadecimal digits
    #[arg(long, value_name = "PREFIX", value_parser = parse_prefix)]
    id: Option<String>,
    /// Only records claimed at least this long ago, as 90s, 1h or 7d
    #[arg(long, value_name = "DURATION", value_parser = parse_age)]
    older_than: Option<String>,
    /// Only records claimed at most this long ago, as 90s, 1h or 7d, or since a time, as 2026-01-31T22:00:00Z
    #[arg(long, value_name = "DURATION|TIME", value_parser = paging::parse_since)]
    since: Option<String>,
    /// Only records whose scope has this value, as header:X-Tenant=acme, cookie:NAME=VALUE, basic:user=NAME, host=NAME,
    /// client-ip=ADDRESS, jwt:sub=VALUE, or credential=NAME: VALUE with the header that has the credential
    #[arg(long, value_name = "PART=VALUE")]
    scope: Option<String>,
}

#[derive(Args, Debug)]
struct ListArgs {
    #[command(flatten)]
    filter: FilterArgs,
    #[command(flatten)]
    paging: PagingArgs,
}

/// The names of what selects more than one record.
const SELECTING: [&str; 8] = ["state", "route", "key", "id", "older_than", "since", "scope", "all"];

/// Which records to change, and what is said of it.
#[derive(Args, Debug)]
#[command(group(ArgGroup::new("selection").required(true).multiple(true).args(SELECTING).arg("record")))]
struct ChangeArgs {
    /// The record's id, or at least its first 8 digits. Or else, a filter
    #[arg(value_name = "ID", value_parser = parse_id, conflicts_with_all = SELECTING)]
    record: Option<String>,
    #[command(flatten)]
    filter: FilterArgs,
    /// All records
    #[arg(long, conflicts_with_all = &SELECTING[..7])]
    all: bool,
    /// Leave alone what was claimed, or turned unknown, after this time: a dry run prints it
    #[arg(long, value_name = "TIME", conflicts_with = "record", value_parser = parse_as_of)]
    as_of: Option<String>,
    /// Say which records it would be, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Do it for all that the filter finds, without asking
    #[arg(long)]
    yes: bool,
    /// Why; goes to the audit log and to the log of `oncegate serve`
    #[arg(long, value_name = "TEXT", value_parser = parse_reason, required_unless_present_any = ["record", "dry_run"])]
    reason: Option<String>,
}

#[derive(Args, Debug)]
#[command(override_usage = changing::PURGE_USAGE)]
struct PurgeArgs {
    #[command(flatten)]
    change: ChangeArgs,
}

/// An operator retries dead deliveries. Dead is no state of a record, so `--state` is refused.
#[derive(Args, Debug)]
#[command(
    override_usage = changing::RETRY_USAGE,
    mut_arg("record", |arg| arg.help("The accepted request's id, or at least its first 8 digits. Or else, a filter")),
    mut_arg("state", |arg| arg.hide(true).value_parser(parse_no_state)),
    mut_arg("all", |arg| arg.help("All that were given up")),
    mut_group("selection", |group| ArgGroup::new(group.get_id()).required(true).multiple(true).args(&SELECTING[1..]).arg("record"))
)]
struct RetryArgs {
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args, Debug)]
#[command(
    group(ArgGroup::new("outcome").required(true).args(["release", "complete"])),
    override_usage = changing::RESOLVE_USAGE
)]
struct ResolveArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// The attempt had no effect: free its key, so that the next request with it runs. An accepted request runs once
    /// `oncegate records retry` delivers it again
    #[arg(long)]
    release: bool,
    /// The attempt had this answer: give it to every retry
    #[arg(long, requires = "status")]
    complete: bool,
    /// The answer's status
    #[arg(
        long,
        value_name = "N",
        requires = "complete",
        conflicts_with = "release",
        value_parser = value_parser!(u16).range(200..=599)
    )]
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
}

/// Asks a question that is answered by yes or no; `None` where no person is at a terminal.
type Ask = dyn Fn(&str) -> Option<bool>;

/// Runs `oncegate records`.
pub fn run(args: RecordsArgs) -> anyhow::Result<ExitCode> {
    let mut out = Output::stdout();
    let executed = block_on(execute(args, &mut out, &ask))?;
    paging::finish(executed, &mut out)?;
    Ok(ExitCode::SUCCESS)
}

fn ask(question: &str) -> Option<bool> {
    if !io::stdin().is_terminal() {
        return None;
    }
    let _ = write!(io::stderr().lock(), "{question} [y/N] ");
    let mut answer = String::new();
    io::stdin().read_line(&mut answer).ok()?;
    Some(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

async fn execute(args: RecordsArgs, out: &mut dyn Write, ask: &Ask) -> anyhow::Result<()> {
    let client = args.admin.client()?;
    match args.command {
        Command::List(ListArgs { filter, paging }) => {
            let (path, member, also) = ("/api/v1/records", "records", None);
            let (filter, route, table) = (filter.query(), filter.route, table::table());
            let listing = Listing { path, member, filter, route, table, row: table::row, also };
            listing.write(&client, paging, out).await
        }
        Command::Show { record, answer, reveal_key, json } => {
            let id = whole_id(&client, &record).await?;
            let path = record_path(&id);
            let asked =
                [("answer=true", answer), ("key=true", reveal_key)].into_iter().filter(|(_, is_asked)| *is_asked);
            let query: Vec<_> = asked.map(|(parameter, _)| parameter).collect();
            let target = if query.is_empty() { path } else { format!("{path}?{}", query.join("&")) };
            let record = client.send(Method::GET, &target, None).await?;
            if json {
                return print_json(&record, out);
            }
            table::write_one(&record, out)?;
            table::write_lacking(&record, answer, reveal_key, out)?;
            audit::write_history(&client, &id, out).await?;
            table::write_answer_of(&record, out)
        }
        Command::Resolve(resolve) => changing::resolve(&client, resolve, out, ask).await,
        Command::Retry(retry) => changing::retry(&client, retry.change, out, ask).await,
        Command::Reseal => resealing::reseal(&client, out).await,
        Command::Purge(purge) => changing::purge(&client, purge.change, out, ask).await,
    }
}

/// The whole id of the one record whose id starts so, or of the one accepted request: no attempt may have made its record yet.
async fn whole_id(client: &AdminClient, start: &str) -> anyhow::Result<String> {
    if start.len() == WHOLE {
        return Ok(start.to_owned());
    }
    let beginning = format!("id={start}&limit={}", SHOWN + 1);
    let mut ids = ids_of(client, &format!("/api/v1/records?{beginning}"), "records").await?;
    // One whose attempt has begun stands in both.
    ids.extend(ids_of(client, &format!("/api/v1/deliveries?{beginning}"), "deliveries").await?);
    one_of(ids, start, "record and no accepted request")
}

/// The ids of a list.
async fn ids_of(client: &AdminClient, target: &str, member: &str) -> anyhow::Result<BTreeSet<String>> {
    let page = client.send(Method::GET, target, None).await?;
    let ids = members_of(&page, member)?.iter().filter_map(|listed| listed["id"].as_str());
    Ok(ids.map(str::to_owned).collect())
}

/// The only id that was found. `nothing` is what there is none of.
fn one_of(ids: BTreeSet<String>, start: &str, nothing: &str) -> anyhow::Result<String> {
    if ids.len() > 1 {
        let shown: Vec<&str> = ids.iter().take(SHOWN).map(String::as_str).collect();
        let more = if ids.len() > SHOWN { "\nand more" } else { "" };
        bail!("more than one id starts with {start}; give more digits:\n{}{more}", shown.join("\n"));
    }
    ids.into_iter().next().with_context(|| format!("no {nothing} has an id that starts with {start}"))
}

fn records_of(page: &Value) -> anyhow::Result<&Vec<Value>> {
    members_of(page, "records")
}

impl FilterArgs {
    /// What is given, by the names of the API.
    fn given(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let Self { state, route, key, id, older_than, since, scope } = self;
        let all = [
            ("state", state),
            ("route", route),
            ("key", key),
            ("id", id),
            ("older_than", older_than),
            ("since", since),
            ("scope", scope),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)))
    }

    /// As parameters of a query, each after an `&`.
    fn query(&self) -> String {
        query_of(self.given())
    }

    /// The same without the state.
    fn query_of_any_state(&self) -> String {
        query_of(self.given().filter(|(name, _)| *name != "state"))
    }

    /// As members of an object.
    fn members(&self) -> Map<String, Value> {
        self.given().map(|(name, value)| (name.to_owned(), value.into())).collect()
    }
}

fn query_of<'a>(given: impl Iterator<Item = (&'static str, &'a str)>) -> String {
    given.map(|(name, value)| format!("&{name}={}", percent_encode(value))).collect()
}

fn record_path(id: &str) -> String {
    format!("/api/v1/records/{id}")
}

fn print_json(value: &Value, out: &mut dyn Write) -> anyhow::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value).map_err(io::Error::from)?;
    writeln!(out)?;
    Ok(())
}

fn parse_id(text: &str) -> Result<String, String> {
    let is_id = (SHORTEST_ID..=64).contains(&text.len()) && IdPrefix::parse(text).is_some();
    is_id.then(|| text.to_ascii_lowercase()).ok_or_else(|| {
        format!("an id is 64 hexadecimal digits, of which the first {SHORTEST_ID} do where no other record has them")
    })
}

fn parse_prefix(text: &str) -> Result<String, String> {
    let prefix = IdPrefix::parse(text).filter(|_| !text.is_empty());
    prefix.map(|_| text.to_owned()).ok_or_else(|| "must be an id, or the first of its 64 hexadecimal digits".to_owned())
}

fn parse_no_state(_: &str) -> Result<String, &'static str> {
    Err("leave it out: what can be retried is dead, and that is no state of a record")
}

fn parse_age(text: &str) -> Result<String, &'static str> {
    admin::parse_age(text).map(|_| text.to_owned())
}

fn parse_as_of(text: &str) -> Result<String, &'static str> {
    admin::parse_time(text).map(|_| text.to_owned()).ok_or("must be a time such as 2026-01-31T22:00:00Z")
}

fn parse_reason(text: &str) -> Result<String, String> {
    Some(text.trim()).filter(|text| !text.is_empty()).map(str::to_owned).ok_or_else(|| "say why".to_owned())
}

fn parse_header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("a header is written as 'Name: value'")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

#[cfg(test)]
mod tests;
