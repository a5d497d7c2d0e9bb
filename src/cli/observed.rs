//! `oncegate observed`

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use http::Method;
use serde_json::Value;

use super::http_client::AdminArgs;
use super::{block_on, print};

/// How wide the column of labels is.
const COLUMN: usize = 16;

/// Show what a running gate would have done with the requests of routes that only observe
///
/// For each route with `mode = "observe"`: how many of its requests were retries, how many keys the upstream ran more than once,
/// and what the requests would have got under `mode = "protect"`. A gate counts what it forwarded itself since it started, or
/// since a reload made the route observe.
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
    let client = args.admin.client()?;
    let report = block_on(client.send(Method::GET, "/api/v1/observed", None))??;
    if args.json {
        print(&format!("{report:#}\n"))?;
    } else {
        let routes = report["routes"].as_array().context("what answers there is not oncegate's admin listener")?;
        print(&text(routes)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn text(routes: &[Value]) -> anyhow::Result<String> {
    if routes.is_empty() {
        return Ok("no route observes: set mode = \"observe\" on one\n".to_owned());
    }
    let blocks: Vec<String> = routes.iter().map(route).collect::<Result<_, _>>()?;
    Ok(blocks.join("\n"))
}

/// The block of one route.
fn route(route: &Value) -> anyhow::Result<String> {
    let stranger = "what answers there is not the admin listener of this version of oncegate";
    let count = |name: &str| route[name].as_u64().context(stranger);
    let word = |value: &Value| value.as_str().map(str::to_owned).context(stranger);
    let words = |name: &str| route[name].as_object().context(stranger);
    let mut block = format!("{}, observed since {}\n", word(&route["route"])?, word(&route["since"])?);
    let mut line = |label: &str, text: String| {
        let _ = writeln!(block, "  {label:COLUMN$}{text}");
    };
    line("requests", count("requests")?.to_string());
    line(
        "duplicates",
        match count("duplicates")? {
            0 => "0".to_owned(),
            some => format!("{some}, which oncegate would have answered itself"),
        },
    );
    line(
        "ran again",
        match (count("keys_run_again")?, count("keys_answered_differently")?) {
            (0, _) => "0 keys".to_owned(),
            (keys, 0) => format!("{}, and the upstream gave the same answer again", keys_of(keys)),
            (keys, differently) => format!("{}, {differently} of them with another answer", keys_of(keys)),
        },
    );
    for (place, (outcome, count)) in words("would")?.iter().enumerate() {
        line(if place == 0 { "would have got" } else { "" }, format!("{outcome} {count}"));
    }
    for (place, (reason, count)) in words("dropped")?.iter().enumerate() {
        let why = match &**reason {
            "limit" => "more than limits.max_observing at once",
            "body" => {
                "the request's body is too large to be compared, found no memory, or had not come whole when the upstream answered"
            }
            _ => "the store failed or was too slow",
        };
        line(if place == 0 { "not evaluated" } else { "" }, format!("{count}: {why}"));
    }
    for (place, example) in route["examples"].as_array().context(stranger)?.iter().enumerate() {
        let differs = if example["answer_differs"] == true { ", another answer" } else { ", the same answer" };
        let [key, method, path, first, again] =
            ["key", "method", "path", "first_at", "again_at"].map(|name| example[name].as_str().unwrap_or("-"));
        let again = format!("{key} {method} {path}, at {first} and {again}{differs}");
        line(if place == 0 { "newest" } else { "" }, again);
    }
    Ok(block)
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
            "keys_answered_differently": 1, "would": { "executed": 3, "replayed": 2, "in-flight": 1 }, "dropped": { "store": 1 },
            "examples": [{ "key": "o…-1", "method": "POST", "path": "/v1/charges", "answer_differs": true,
                "first_at": "2026-01-01T00:00:01.000Z", "again_at": "2026-01-01T00:00:02.000Z", "would": "replayed" }],
        }]);
        let text = text(report.as_array().unwrap()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[..8],
            [
                "charges, observed since 2026-01-01T00:00:00.000Z",
                "  requests        7",
                "  duplicates      3, which oncegate would have answered itself",
                "  ran again       2 keys, 1 of them with another answer",
                "  would have got  executed 3",
                "                  in-flight 1",
                "                  replayed 2",
                "  not evaluated   1: the store failed or was too slow",
            ]
        );
        assert!(text.ends_with(
            "o…-1 POST /v1/charges, at 2026-01-01T00:00:01.000Z and 2026-01-01T00:00:02.000Z, another answer\n"
        ));
    }

    #[test]
    fn without_a_route_that_observes_it_says_what_to_do() {
        assert_eq!(text(&[]).unwrap(), "no route observes: set mode = \"observe\" on one\n");
    }
}
