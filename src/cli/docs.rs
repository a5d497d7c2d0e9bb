//! `oncegate docs`: what the error catalogue of the book says of a problem, where there is no browser at hand.

use std::process::ExitCode;

use clap::Args;

use super::table::Table;
use super::{complain, print};

/// The page that has an entry for each problem.
const PAGE: &str = include_str!("../../docs/clients/errors.md");

/// Where that page is in the book, which links in the page start from.
const PLACE: &str = "docs/clients/errors.md";

/// Explain a problem that the gate answers with, as the book does
#[derive(Args, Debug)]
pub(super) struct DocsArgs {
    /// Its `code`, or its `type`. If omitted, all codes are listed
    code: Option<String>,
}

/// An entry of the catalogue.
struct Entry {
    code: &'static str,
    /// `409`, retryable.
    summary: &'static str,
    /// In Markdown, without the example.
    text: Vec<&'static str>,
}

/// Prints an entry, or the list of all.
pub(super) fn run(args: DocsArgs) -> anyhow::Result<ExitCode> {
    let Some(code) = args.code else {
        return print(&list()?).map(|()| ExitCode::SUCCESS);
    };
    // As in a problem of the gate: `urn:oncegate:problem:CODE`.
    let code = code.rsplit(':').next().unwrap_or_default();
    match entries().find(|entry| entry.code == code) {
        Some(entry) => print(&entry.show()).map(|()| ExitCode::SUCCESS),
        None => {
            complain(&format!("oncegate: no problem has the code `{code}`; `oncegate docs` lists all"));
            Ok(ExitCode::FAILURE)
        }
    }
}

fn list() -> anyhow::Result<String> {
    let mut table = Table::new(["CODE", "STATUS"], "");
    let mut out = Vec::new();
    table.write(
        entries().map(|Entry { code, summary, .. }| {
            [code.to_owned(), plain(summary).replace('`', "").trim_end_matches('.').to_owned()]
        }),
        &mut out,
    )?;
    table.end(&mut out)?;
    let text = String::from_utf8(out)?;
    Ok(format!("{text}\n`oncegate docs CODE` explains one. {PLACE} of the book has an example of each.\n"))
}

fn entries() -> impl Iterator<Item = Entry> {
    PAGE.split("\n### ").skip(1).filter_map(|section| {
        let mut lines = section.lines();
        let code = lines.next()?;
        let mut text: Vec<&str> =
            lines.take_while(|line| !line.starts_with("```") && !line.starts_with("## ")).collect();
        // What introduces the example ends with a colon.
        let is_blank = |line: &&str| line.is_empty();
        while text.pop_if(|line| is_blank(line)).is_some() {}
        if text.last().is_some_and(|line| line.ends_with(':')) {
            text.truncate(text.iter().rposition(|line| line.is_empty()).unwrap_or_default());
        }
        let summary = text.iter().position(|line| !line.is_empty()).map(|place| text.drain(..=place).next_back())??;
        Some(Entry { code, summary, text })
    })
}

impl Entry {
    fn show(&self) -> String {
        let text = self.text.join("\n");
        format!("{} ({PLACE}#{})\n\n{}\n\n{}\n", self.code, self.code, plain(self.summary), plain(text.trim()))
    }
}

/// Markdown as it is read on a terminal: without emphasis, and with a link's page behind its words.
fn plain(markdown: &str) -> String {
    let mut text = String::new();
    let mut rest = markdown;
    while let Some((before, words, target, after)) = next_link(rest) {
        text.push_str(before);
        text.push_str(words);
        let page = target.split('#').next().unwrap_or_default();
        if !page.is_empty() {
            let page =
                page.strip_prefix("../").map_or_else(|| format!("docs/clients/{page}"), |page| format!("docs/{page}"));
            text.push_str(&format!(" ({page})"));
        }
        rest = after;
    }
    text.push_str(rest);
    text.replace("**", "")
}

/// What stands before the next link, its words, where it leads, and what follows.
fn next_link(text: &str) -> Option<(&str, &str, &str, &str)> {
    let (before_end, target) = text.split_once("](")?;
    let (before, words) = before_end.rsplit_once('[')?;
    let (target, after) = target.split_once(')')?;
    Some((before, words, target, after))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::outcome::Outcome;

    #[test]
    fn every_problem_of_the_gate_has_its_entry() {
        let codes: Vec<&str> = entries().map(|entry| entry.code).collect();
        let problems = Outcome::ALL.into_iter().filter(|outcome| matches!(outcome, Outcome::Problem(_)));
        for code in problems.map(Outcome::as_str) {
            assert!(codes.contains(&code), "{code} is not among {codes:?}");
        }
        for entry in entries() {
            let shown = entry.show();
            assert!(shown.contains("What happened:") && shown.contains("Did it run?"), "{shown}");
            assert!(!shown.contains("](") && !shown.contains("```") && !shown.contains("**"), "{shown}");
            assert!(!shown.trim_end().ends_with(':'), "{shown}");
        }
    }

    #[test]
    fn the_list_is_plain_text() {
        let list = list().unwrap();
        let rows: Vec<&str> = list.lines().take_while(|line| !line.is_empty()).collect();
        assert!(rows.iter().any(|row| row.ends_with(" 409, retryable")), "{list}");
        assert!(!rows.iter().any(|row| row.contains('`')), "{list}");
    }

    #[test]
    fn a_link_becomes_its_page() {
        let text = "See [A storm](../runbooks/storm-of-409.md#a), [above](#in-flight) and **not** [Go](go.md).";
        assert_eq!(plain(text), "See A storm (docs/runbooks/storm-of-409.md), above and not Go (docs/clients/go.md).");
        assert_eq!(plain("none [of] them"), "none [of] them");
    }
}
