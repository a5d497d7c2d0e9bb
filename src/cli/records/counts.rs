//! What a change of many records did, in words.

use std::io::Write;

pub(super) const RECORDS: [&str; 2] = ["record", "records"];
pub(super) const ACCEPTED: [&str; 2] = ["accepted request", "accepted requests"];

/// What the gate did.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) matched: u64,
    pub(super) done: u64,
    pub(super) failed: u64,
    pub(super) in_flight: u64,
    pub(super) unreadable: u64,
    pub(super) accepted: u64,
    pub(super) to_retry: u64,
    pub(super) of_unknown_scope: u64,
    pub(super) of_unknown_outcome: u64,
    pub(super) as_of: Option<String>,
}

/// Says how many had no record yet.
pub(super) fn say_accepted(count: u64, what: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    if count > 0 {
        let (verb, noun) = if count == 1 { ("is an", "request") } else { ("are", "requests") };
        writeln!(out, "{count} of them {verb} accepted {noun} that {what}")?;
    }
    Ok(())
}

/// Says how many accepted requests stay dead until an operator retries them.
pub(super) fn say_to_retry(count: u64, out: &mut dyn Write) -> anyhow::Result<()> {
    if count > 0 {
        let (verb, noun, stay) = if count == 1 {
            ("is of an", "request, which stays", "it")
        } else {
            ("are of", "requests, which stay", "them")
        };
        writeln!(
            out,
            "{count} of them {verb} accepted {noun} dead until `oncegate records retry` delivers {stay} again: \
             `oncegate deliveries list --state dead` lists {stay}"
        )?;
    }
    Ok(())
}

/// Says what a filter by scope leaves alone: it may be anybody's.
pub(super) fn say_of_unknown_scope(count: u64, out: &mut dyn Write) -> anyhow::Result<()> {
    if count > 0 {
        writeln!(
            out,
            "{} left alone: they do not say whose they are, since an older version claimed them, other rules of keys or another id \
             secret made them, or they cannot be read",
            records(count)
        )?;
    }
    Ok(())
}

/// Says what a retry leaves alone: it may have run.
pub(super) fn say_of_unknown_outcome(count: u64, out: &mut dyn Write) -> anyhow::Result<()> {
    if count > 0 {
        writeln!(
            out,
            "{} left alone, as their outcome is unknown: `oncegate records resolve` them first, with --release where they did not run",
            counted(count, ACCEPTED)
        )?;
    }
    Ok(())
}

/// Says what a purge leaves alone unless it is asked for by name.
pub(super) fn say_in_flight(count: u64, out: &mut dyn Write) -> anyhow::Result<()> {
    if count > 0 {
        writeln!(
            out,
            "{} in flight left alone, as their attempts run: --state in-flight is for these",
            records(count)
        )?;
    }
    Ok(())
}

/// Says what a completion leaves alone.
pub(super) fn say_unreadable(count: u64, out: &mut dyn Write) -> anyhow::Result<()> {
    if count > 0 {
        let what =
            "left alone, as no client could read the answer: `oncegate records show` says `unreadable`, or `grpc`";
        writeln!(out, "{} {what}", records(count))?;
    }
    Ok(())
}

/// So many records, in words.
pub(in crate::cli) fn records(count: u64) -> String {
    counted(count, RECORDS)
}

/// So many accepted requests, in words.
pub(in crate::cli) fn accepted_requests(count: u64) -> String {
    counted(count, ACCEPTED)
}

pub(super) fn counted(count: u64, nouns: [&str; 2]) -> String {
    format!("{count} {}", nouns[usize::from(count != 1)])
}
