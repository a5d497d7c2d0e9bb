//! `oncegate audit`: what operators did, through the admin API.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use http::Method;
use serde_json::Value;

use super::block_on;
use super::http_client::{AdminArgs, AdminClient};
use super::paging::{self, Listing, Output, PagingArgs, members_of, percent_encode};
use super::records;
use super::table::{Table, text};

/// How many digits of a record's id a line shows.
const DIGITS: usize = 16;

/// How many entries of a record are shown with it.
const HISTORY: usize = 20;

/// List what operators did, newest first: changes of records, reloads, and readings of answers and keys
///
/// The entries are in the store, for `admin.audit_ttl`, and are of all gates with this `store.service`.
#[derive(Args, Debug)]
pub(super) struct AuditArgs {
    #[command(flatten)]
    admin: AdminArgs,
    /// Only entries that are at most this old, as 90s, 1h or 7d, or since a time, as 2026-01-31T22:00:00Z
    #[arg(long, value_name = "DURATION|TIME", value_parser = paging::parse_since)]
    since: Option<String>,
    /// Only this: resolve, purge, bulk-resolve, bulk-purge, bulk-retry, reseal, reload, read-answer, read-key,
    /// accept-identity-change, retry, pause or resume
    #[arg(long, value_name = "ACTION")]
    action: Option<String>,
    /// Only about this record, which may be gone: its whole id
    #[arg(long, value_name = "ID")]
    record: Option<String>,
    /// Only by the holder of the token with this name; `-` is without a token
    #[arg(long, value_name = "NAME", allow_hyphen_values = true)]
    by: Option<String>,
    #[command(flatten)]
    paging: PagingArgs,
}

/// Runs `oncegate audit`.
pub(super) fn run(args: AuditArgs) -> anyhow::Result<ExitCode> {
    let mut out = Output::stdout();
    let listed = block_on(list(args, &mut out))?;
    paging::finish(listed, &mut out)?;
    Ok(ExitCode::SUCCESS)
}

async fn list(args: AuditArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let AuditArgs { admin, since, action, record, by, paging } = args;
    let filter = [("since", since), ("action", action), ("record", record), ("by", by)];
    let filter = filter.iter().filter_map(|(name, value)| Some((name, value.as_deref()?)));
    let filter = filter.map(|(name, value)| format!("&{name}={}", percent_encode(value))).collect();
    let (path, member, table) = ("/api/v1/audit", "entries", table());
    let listing = Listing { path, member, filter, route: None, table, row, also: None };
    listing.write(&admin.client()?, paging, out).await
}

/// Writes the newest entries about a record, if there are any. A gate of an older release knows none.
pub(super) async fn write_history(client: &AdminClient, record: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    let target = format!("/api/v1/audit?record={record}&limit={HISTORY}");
    let Ok(page) = client.send(Method::GET, &target, None).await else { return Ok(()) };
    let entries = members_of(&page, "entries")?;
    if !entries.is_empty() {
        writeln!(out)?;
        table().write(entries.iter().map(row), out)?;
    }
    Ok(())
}

fn table() -> Table<6> {
    Table::new(["AT", "BY", "ACTION", "OUTCOME", "WHAT", "REASON"], "no entries")
}

fn row(entry: &Value) -> [String; 6] {
    let reason = match entry["reason_unreadable"] == true {
        true => "(encrypted with a key that is gone)".to_owned(),
        false => text(&entry["reason"]),
    };
    let [at, by, action, outcome] = ["at", "by", "action", "outcome"].map(|member| text(&entry[member]));
    [at, by, action, outcome, what(entry), reason]
}

/// To what it was done, and how.
fn what(entry: &Value) -> String {
    let mut words = Vec::new();
    words.extend(entry["resolution"].as_str().map(str::to_owned));
    if let Some(id) = entry["record"].as_str() {
        words.push(format!("{}… of {}", text(&Value::from(id.get(..DIGITS).unwrap_or(id))), text(&entry["route"])));
    } else if entry["route"].is_string() {
        words.push(text(&entry["route"]));
    }
    let count = |member: &str| entry[member].as_u64();
    let counted = if entry["action"] == "bulk-retry" { records::accepted_requests } else { records::records };
    words.extend(count("done").or(count("resealed")).map(counted));
    if let Some(filter) = entry["filter"].as_object() {
        let filter = filter.iter().map(|(name, value)| match value {
            Value::Bool(true) => text(&Value::from(&**name)),
            value => format!("{}={}", text(&Value::from(&**name)), text(value)),
        });
        words.push(format!("({})", filter.collect::<Vec<_>>().join(", ")));
    }
    words.extend(count("keys").map(|keys| format!("{keys} {}", if keys == 1 { "key" } else { "keys" })));
    if let Some(namespaces) = entry["namespaces"].as_array() {
        words.push(format!("of {}", namespaces.iter().map(text).collect::<Vec<_>>().join(", ")));
    }
    if words.is_empty() { "-".to_owned() } else { words.join(" ") }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;
    use crate::admin::testing::{Admin, start};

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        audit: AuditArgs,
    }

    async fn run(admin: &Admin, args: &[&str]) -> Result<String, String> {
        let address = admin.address.to_string();
        let args = ["audit"].iter().chain(args).copied().chain(["--admin", &address]);
        let cli = Cli::try_parse_from(args).map_err(|error| error.to_string())?;
        let mut out = Vec::new();
        match list(cli.audit, &mut out).await {
            Ok(()) => Ok(String::from_utf8(out).unwrap()),
            Err(error) => Err(format!("{error:#}")),
        }
    }

    #[tokio::test]
    async fn entries_are_listed_as_a_table_and_as_json() {
        let admin = start(None).await;
        assert_eq!(run(&admin, &[]).await.unwrap(), "no entries\n");
        let (id, _) = admin.unknown("charge", "some-longer-key").await;
        let body = json!({"action": "release", "reason": "not booked\u{1b}[2J"});
        assert_eq!(admin.resolve(id, body).await.status, 204);
        admin.pass(std::time::Duration::from_secs(60));
        let purge = json!({"filter": {"state": "completed", "route": "charge"}, "reason": "a trial"});
        assert_eq!(admin.bulk("purge", purge).await.status, 200);
        let first = &id.to_string()[..DIGITS];
        let expected = format!(
            "\
AT                        BY  ACTION      OUTCOME    WHAT                                        REASON
2026-01-01T00:01:00.000Z  -   bulk-purge  unchanged  0 records (route=charge, state=completed)   a trial
2026-01-01T00:00:00.000Z  -   resolve     done       release {first}… of charge       not booked\\u{{1b}}[2J
"
        );
        let squeezed = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(squeezed(&run(&admin, &[]).await.unwrap()), squeezed(&expected));
        let page = run(&admin, &["--limit", "1"]).await.unwrap();
        let next = page.lines().last().unwrap().strip_prefix("next: ").unwrap();
        assert!(run(&admin, &["--after", next]).await.unwrap().contains("not booked"));
        let some = run(&admin, &["--since", "30s", "--by", "-", "--action", "bulk-purge", "--all"]).await.unwrap();
        assert_eq!(some.lines().count(), 2, "{some}");
        let json = run(&admin, &["--record", &id.to_string(), "--json"]).await.unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&json["entries"][0]["resolution"], &json["next"]), (&json!("release"), &Value::Null));
        let error = run(&admin, &["--action", "delete"]).await.unwrap_err();
        assert!(error.contains("--action must be one of: resolve,"), "{error}");
    }

    #[test]
    fn what_was_done_is_said_in_a_line() {
        let said = |entry: Value| what(&entry);
        assert_eq!(said(json!({"keys": 7, "namespaces": ["charge", "refund"]})), "7 keys of charge, refund");
        assert_eq!(
            said(json!({"done": 5, "filter": {"all": true}, "resolution": "release"})),
            "release 5 records (all)"
        );
        assert_eq!(said(json!({"resealed": 12})), "12 records");
        assert_eq!(said(json!({"done": 1, "filter": {"state": "completed"}})), "1 record (state=completed)");
        assert_eq!(said(json!({"action": "bulk-retry", "done": 1})), "1 accepted request");
        assert_eq!(said(json!({"keys": 1, "namespaces": ["charge"]})), "1 key of charge");
        assert_eq!(said(json!({"route": "charge"})), "charge");
        assert_eq!(said(json!({})), "-");
        let row = row(&json!({"action": "purge", "reason": null, "reason_unreadable": true}));
        assert_eq!(row[5], "(encrypted with a key that is gone)");
    }
}
