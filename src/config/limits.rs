//! `[limits]`

use std::ops::RangeInclusive;

use super::keys;
use super::node::{Node, Table, Wrong};
use super::units::show_size;
use crate::http::limits::Limits;

/// The most that can be asked of a client, in bytes a second: more than any network has.
pub(super) const FASTEST: u64 = 1 << 30;

/// How large the largest head may be, in bytes: less is no head, and more is no head any more.
pub(super) const HEADER_SIZES: RangeInclusive<u64> = 1 << 10..=1 << 20;

/// How many header lines it may have at most.
pub(super) const HEADERS: RangeInclusive<u64> = 1..=1000;

/// How many connections or requests there may be at most: more than any machine has.
pub(super) const COUNTS: RangeInclusive<u64> = 1..=1_000_000;

/// How much memory bodies may take, in bytes: from some at all to more than any machine has.
pub(super) const MEMORY_SIZES: RangeInclusive<u64> = 1 << 20..=1 << 40;

/// The most that temporary files may take, in bytes.
pub(super) const MOST_DISK: u64 = 1 << 50;

/// Reads `[limits]`.
pub(super) fn read(root: &Table<'_>) -> Limits {
    let table = root.table("limits", &keys::LIMITS);
    let usual = Limits::default();
    let max_connections = table.read("max_connections", |node| number(node, COUNTS)).unwrap_or(usual.max_connections);
    Limits {
        header_timeout: table.read("header_timeout", Node::some_duration).unwrap_or(usual.header_timeout),
        idle_timeout: table.read("idle_timeout", Node::some_duration).unwrap_or(usual.idle_timeout),
        body_timeout: table.read("body_timeout", Node::some_duration).unwrap_or(usual.body_timeout),
        min_body_rate: table.read("min_body_rate", |node| size(node, 0..=FASTEST)).unwrap_or(usual.min_body_rate),
        max_header_size: table
            .read("max_header_size", |node| size(node, HEADER_SIZES))
            .and_then(|size| usize::try_from(size).ok())
            .unwrap_or(usual.max_header_size),
        max_headers: table
            .read("max_headers", |node| number(node, HEADERS))
            .and_then(|number| usize::try_from(number).ok())
            .unwrap_or(usual.max_headers),
        max_connections,
        // Without a bound of its own, whoever is alone may have them all: behind a balancer all come from one address.
        max_connections_per_address: table
            .read("max_connections_per_address", |node| number(node, COUNTS))
            .unwrap_or(max_connections),
        max_requests: table.read("max_requests", |node| number(node, COUNTS)).unwrap_or(usual.max_requests),
        max_waiting: table.read("max_waiting", |node| number(node, 0..=*COUNTS.end())).unwrap_or(usual.max_waiting),
        max_buffered_memory: table
            .read("max_buffered_memory", |node| size(node, MEMORY_SIZES))
            .unwrap_or(usual.max_buffered_memory),
        max_buffered_disk: table
            .read("max_buffered_disk", |node| size(node, 0..=MOST_DISK))
            .unwrap_or(usual.max_buffered_disk),
    }
}

fn size(node: &Node<'_>, allowed: RangeInclusive<u64>) -> Result<u64, Wrong> {
    let size = node.size()?;
    bounded(size, &allowed, show_size)
}

/// Reads a number of these.
pub(super) fn number(node: &Node<'_>, allowed: RangeInclusive<u64>) -> Result<u64, Wrong> {
    bounded(node.number()?, &allowed, |number| number.to_string())
}

fn bounded(value: u64, allowed: &RangeInclusive<u64>, show: fn(u64) -> String) -> Result<u64, Wrong> {
    if allowed.contains(&value) {
        return Ok(value);
    }
    let (least, most) = (*allowed.start(), *allowed.end());
    let nearest = show(value.clamp(least, most));
    let hint = if nearest.ends_with('B') { format!("write \"{nearest}\"") } else { format!("write {nearest}") };
    Err(Wrong::new(format!("must be from {} to {}", show(least), show(most))).hint(hint))
}
