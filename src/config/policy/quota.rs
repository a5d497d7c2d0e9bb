//! `quota` of a policy.

use std::time::Duration;

use crate::config::declare::Shown::{Example, Required};
use crate::config::declare::{Inner, Keys as _, keys};
use crate::config::kinds::{Kind, required_number, time_of, words};
use crate::config::node::{Node, Table, Wrong};
use crate::idempotency::quota::{Quota, QuotaBy};

/// The shortest and the longest window.
const SECOND: Duration = Duration::from_secs(1);
const MONTH: Duration = Duration::from_secs(31 * 24 * 60 * 60);

const WORDS: &[(&str, QuotaBy)] =
    &[("scope", QuotaBy::Scope), ("client-ip", QuotaBy::ClientIp), ("route", QuotaBy::Route)];

keys! {
    /// `quota`
    pub(super) struct Keys "quota" {
        /// How many new keys a caller may claim in a window, all at once or one by one. Each comes back after its share of
        /// the window.
        new_keys: Option<u32> = None => required_number(1..=1_000_000).optional(), Required("1000");
        /// The window, from "1s" to "31d".
        per: Option<Duration> = None => time_of(SECOND..=MONTH).optional(), Required("\"1m\"");
        /// Who is one caller: "scope" is all requests with the same scope, "client-ip" an address (an IPv6 /64), "route" everybody
        /// on the route. If omitted, "scope".
        by: Option<QuotaBy> = None => words(WORDS).optional(), Example("\"scope\"");
    }
}

/// The table.
pub(super) fn quota() -> Kind<Quota> {
    let print = |quota: &Quota| {
        let keys = Keys { new_keys: Some(quota.new_keys), per: Some(quota.per), by: Some(quota.by) };
        keys.print_inline().into()
    };
    Kind::new(|| Keys::SECTION.shape(), read, print).with_inner(|| Inner::Table(Keys::SECTION))
}

fn read(node: &Node<'_>) -> Result<Quota, Wrong> {
    let example = "write { new_keys = 1000, per = \"1m\" }";
    if !node.is_table() {
        return Err(node.expected("a table").hint(example));
    }
    let table = Table::open(node.clone(), Keys::SECTION);
    for key in ["new_keys", "per"].into_iter().filter(|key| table.get(key).is_none()) {
        table.report(key, Wrong::new("is missing").hint(example));
    }
    let Keys { new_keys, per, by } = Keys::read(&table, Keys::default());
    // What is missing has been reported.
    Ok(Quota { new_keys: new_keys.unwrap_or(1), per: per.unwrap_or(SECOND), by: by.unwrap_or(QuotaBy::Scope) })
}
