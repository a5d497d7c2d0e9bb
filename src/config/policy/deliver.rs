//! `deliver` of a policy, and which routes may accept.

use std::time::Duration;

use crate::config::declare::Shown::Example;
use crate::config::declare::keys;
use crate::config::kinds::{Kind, nonzero_time, number, text, time_of, words};
use crate::config::node::{Node, Table, Wrong};
use crate::config::routes;
use crate::idempotency::delivery::{Deliver, DeliveryRate, NoRate, Order};
use crate::idempotency::policy::Mode;
use crate::route::Router;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

keys! {
    /// `deliver`
    for Deliver "deliver" {
        /// How many attempts may fail before the request is given up. Those that end in a release count, by `outcomes`, and with
        /// `recovery = "retry"` or a probe those whose outcome is unknown. A request that is given up
        /// is kept for `unknown_ttl`, and `oncegate records retry ID` delivers it again.
        attempts => number(1..=10_000);
        /// The longest pause after the first attempt; it doubles with each attempt, and each pause is any time up to it. A
        /// Retry-After of the upstream that is longer counts. At most 24h.
        backoff => time_of(Duration::from_millis(1)..=DAY);
        /// The longest pause that oncegate chooses itself, at most 24h.
        max_backoff => time_of(Duration::from_millis(1)..=DAY);
        /// How long an attempt may take, at most 24h; the upstream's own timeout counts where it is shorter.
        timeout => time_of(Duration::from_millis(1)..=DAY);
        /// "scope": what callers of one scope sent is delivered one at a time, in the order in which it was accepted. "none":
        /// nothing waits for anything.
        order => words(&[("none", Order::None), ("scope", Order::Scope)]);
        /// How long oncegate tries to deliver an accepted request before it gives it up.
        give_up_after => nonzero_time();
        /// How many deliveries of the route each gate has under way at a time.
        concurrency => number(1..=10_000);
        /// How many deliveries of the route each gate begins, evenly spread: "100/s", "20/m" or "5/h". The number is
        /// 1000000 at most.
        rate => rate().optional(), Example("\"100/s\"");
    }
}

fn rate() -> Kind<DeliveryRate> {
    text("^[1-9][0-9]*/[smh]$", |node: &Node<'_>| {
        let text = node.filled()?;
        text.parse().map_err(|NoRate| Wrong::new(NoRate.to_string()).hint("write a rate such as \"100/s\""))
    })
}

/// Pauses grow.
pub(super) fn check(table: &Table<'_>, deliver: &Deliver) {
    if deliver.max_backoff < deliver.backoff {
        let key = if table.get("max_backoff").is_some() { "max_backoff" } else { "backoff" };
        let wrong = Wrong::new("`max_backoff` is shorter than `backoff`");
        table.report(key, wrong.hint("pauses grow from `backoff` to `max_backoff`"));
    }
}

/// What is accepted must not be lost, and nothing can be refused about it any more.
pub(in crate::config) fn check_accepting(
    root: &Table<'_>,
    router: &Router,
    unfit_store: Option<&str>,
    is_spread: bool,
) {
    let tables = root.tables("routes", routes::SECTION).unwrap_or_default();
    for (place, route) in router.routes().iter().enumerate().filter(|(_, route)| route.policy.accepts()) {
        let key = if route.policy.mode == Mode::Accept { "mode" } else { "async" };
        let name = &route.name;
        let report = |key: &str, wrong: Wrong| match tables.get(place) {
            Some(table) => table.report(key, wrong),
            None => root.table("defaults", super::SECTION).report(key, wrong),
        };
        if let Some(store) = unfit_store {
            let wrong = Wrong::new(format!("the route `{name}` accepts requests, which {store} may lose"));
            report(key, wrong.hint("set store.url to sqlite:PATH or postgres://..., or let the route protect"));
        }
        if is_spread && route.policy.deliver.order == Order::Scope {
            let wrong = Wrong::new(format!(
                "the route `{name}` delivers in the order of each scope, whose requests are in several databases"
            ));
            report("deliver", wrong.hint("set order = \"none\", or let store.url name one database"));
        }
    }
}
