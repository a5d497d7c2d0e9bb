//! `[limits]`

use std::ops::RangeInclusive;

use super::declare::{Keys as _, Shown::Example, keys};
use super::kinds::{flag, nonzero_time, number, size};
use super::node::Table;
use crate::http::limits::Limits;

/// How many connections or requests there may be: at most more than any machine has.
pub(super) const COUNTS: RangeInclusive<u64> = 1..=1_000_000;

keys! {
    /// What clients may use, and for how long. What exceeds a limit is refused or closed, and counted in
    /// `oncegate_limit_exceeded_total`.
    for Limits "[limits]" {
        /// Connections on all listeners: one more gets 503 `overloaded` and is closed. At most 1000000. If the system allows
        /// fewer open files (`ulimit -Hn`) than these, those of upstreams and large bodies need, the start warns and lowers it.
        max_connections => number(COUNTS);
        /// Connections from one address, or from one /64 of IPv6: one more gets 429 `quota-exceeded` and is closed; if
        /// it is encrypted or has a PROXY header, it is closed without an answer. If omitted, `max_connections`: behind a
        /// balancer all come from one address.
        max_connections_per_address => number(COUNTS), Example("1000");
        /// Requests in progress, until the end of their answers, or of their attempts where these go on without a client: one
        /// more gets 503 `overloaded`, and nothing of it is sent.
        /// At most 1000000.
        max_requests => number(COUNTS);
        /// How many of them may wait for another request's attempt (in_flight = { wait = ... }): one more gets 409
        /// `in-flight` at once. At most 1000000.
        max_waiting => number(0..=*COUNTS.end());
        /// How many requests of routes with mode = "observe" are evaluated at the same time, after their answers: one more is
        /// not evaluated, and counted in `oncegate_observed_dropped_total`. At most 1000000.
        max_observing => number(0..=*COUNTS.end());
        /// How much memory bodies may take: those of requests with a key, up to 256 KiB each, and those of answers that are
        /// to be stored, which count twice until they are. From "1MiB" to "1024GiB". Beyond it, a request's body goes to a
        /// temporary file, and an answer is treated as if it exceeded max_response_body; answers up to 64 KiB are always held.
        max_buffered_memory => size(1 << 20..=1 << 40);
        /// How much disk space request bodies may take in temporary files (in TMPDIR, or /tmp). Beyond it, a request gets
        /// 503 `overloaded`: nothing was sent, and its key is not claimed.
        max_buffered_disk => size(0..=1 << 50);
        /// Whether each client leaves some of the limits above, and of max_connections of an upstream, to others. Once half of a
        /// limit is in use, one address may hold at most three times what is still free, and one caller (by the scope of its
        /// route) at most three times what is free for its address. So one address always leaves an eighth.
        /// max_connections counts by the address of the connection, or of its PROXY header. Beyond its share, a client gets what
        /// the limit says, also counted as `fair_share`. One client can use up a limit below 8.
        fair_share => flag();
        /// How long the head of a request may take, from its first byte, and how long a new connection may take for its first
        /// head, with its PROXY header and TLS handshake. Then the connection is closed; an HTTP/1.1 request that has begun gets
        /// 408 first.
        header_timeout => nonzero_time();
        /// How long a connection may be silent between two requests.
        idle_timeout => nonzero_time();
        /// The longest pause in the body of a request. Beyond it, 408.
        body_timeout => nonzero_time();
        /// How many bytes of a request's body must arrive per second, on average, once body_timeout has passed. If fewer
        /// do, 408. "0B" only limits pauses; at most "1GiB".
        min_body_rate => size(0..=1 << 30);
        /// The largest request head, with its first line: from "1KiB" to "1MiB". Beyond it, 431.
        max_header_size => size(1 << 10..=1 << 20);
        /// The most header lines of a request, from 1 to 1000. Beyond it, 431. An answer of an upstream may have as many, and
        /// always 100; beyond that, 502.
        max_headers => number(1..=1000);
    }
}

/// Reads `[limits]`.
pub(super) fn read(root: &Table<'_>) -> Limits {
    let table = root.table("limits", Limits::SECTION);
    let mut limits = Limits::read(&table, Limits::default());
    if table.get("max_connections_per_address").is_none() {
        limits.max_connections_per_address = limits.max_connections;
    }
    root.print("limits", limits.print_table());
    limits
}
