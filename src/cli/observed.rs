//! `oncegate observed`

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use http::Method;
use serde_json::Value;

use super::http_client::AdminArgs;
use super::print;

/// How wide the column of labels is.
const COLUMN: usize = 16;

/// Show what a running gate would have done with the requests of routes that only observe
///
/// For each route with `mode = "observe"`: how many of its requests were retries, how many keys the upstream ran more than once,
/// and what the requests would have got under `mode = "protect"`. A gate counts what it forwarded itself since it started.
#[derive(Args, Debug)]
pub(super) struct ObservedArgs {
    #[command(flatten)]
    admin: AdminArgs,
    /// Print the API's JSON
    #[arg(long)]
    json: bool,
}

/// Runs `oncegate observed`.
pub(super) fn run(args: ObservedArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = args.admin.client()?;
    let report = runtime.block_on(client.send(Method::GET, "/api/v1/observed", None))?;
    if args.json {
        print(&format!("{report:#}\n"))?;
    } else {
        let routes = report["routes"].as_array().context("what answers there is not oncegate's admin listener")?;
        print(&text(routes))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn text(routes: &[Value]) -> String {
    if routes.is_empty() {
        return "no route observes: set mode = \"observe\" on one\n".to_owned();
    }
    let blocks: Vec<String> = routes.iter().map(route).collect();
    blocks.join("\n")
}

/// The block of one route.
fn route(route: &Value) -> String {
    let count = |name: &str| route[name].as_u64().unwrap_or_default();
    let word = |name: &str| route[name].as_str().unwrap_or_default();
    let mut block = format!("{}, observed since {}\n", word("route"), word("since"));
    let mut line = |label: &str, text: String| {
        let _ = writeln!(block, "  {label:COLUMN$}{text}");
    };
    line("requests", count("requests").to_string());
    line("duplicates", format!("{}, which oncegate would have answered itself", count("duplicates")));
    let again = match (count("keys_run_again"), count("keys_answered_differently")) {
        (0, _) => "0 keys".to_owned(),
        (keys, 0) => format!("{}, and the upstream gave the same answer again", keys_of(keys)),
        (keys, differently) => format!("{}, {differently} of them with another answer", keys_of(keys)),
    };
    line("ran again", again);
    if count("dropped") > 0 {
        line("not known", format!("{}: too many at once, or the store was away", count("dropped")));
    }
    let would = route["would"].as_object().into_iter().flatten();
    for (place, (outcome, count)) in would.enumerate() {
        line(if place == 0 { "would have got" } else { "" }, format!("{outcome} {count}"));
    }
    let examples = route["examples"].as_array().into_iter().flatten();
    for (place, example) in examples.enumerate() {
        let word = |name: &str| example[name].as_str().unwrap_or_default();
        let differs = if example["answer_differs"] == true { ", another answer" } else { ", the same answer" };
        let again = format!(
            "{} {} {}, at {} and {}{differs}",
            word("key"),
            word("method"),
            word("path"),
            word("first_at"),
            word("again_at")
        );
        line(if place == 0 { "newest" } else { "" }, again);
    }
    block
}

fn keys_of(count: u64) -> String {
    if count == 1 { "1 key".to_owned() } else { format!("{count} keys") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_report_says_what_protection_is_worth() {
        let report = json!([{
            "route": "charges", "since": "2026-01-01T00:00:00.000Z", "requests": 7, "duplicates": 3, "keys_run_again": 2,
            "keys_answered_differently": 1, "would": { "executed": 3, "replayed": 2, "in-flight": 1 }, "dropped": 1,
            "examples": [{ "key": "order-1", "method": "POST", "path": "/v1/charges", "answer_differs": true,
                "first_at": "2026-01-01T00:00:01.000Z", "again_at": "2026-01-01T00:00:02.000Z", "would": "replayed" }],
        }]);
        let text = text(report.as_array().unwrap());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[..8],
            [
                "charges, observed since 2026-01-01T00:00:00.000Z",
                "  requests        7",
                "  duplicates      3, which oncegate would have answered itself",
                "  ran again       2 keys, 1 of them with another answer",
                "  not known       1: too many at once, or the store was away",
                "  would have got  executed 3",
                "                  in-flight 1",
                "                  replayed 2",
            ]
        );
        assert!(text.ends_with(
            "order-1 POST /v1/charges, at 2026-01-01T00:00:01.000Z and 2026-01-01T00:00:02.000Z, another answer\n"
        ));
    }

    #[test]
    fn without_a_route_that_observes_it_says_what_to_do() {
        assert_eq!(text(&[]), "no route observes: set mode = \"observe\" on one\n");
    }
}
