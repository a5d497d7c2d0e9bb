//! `request_time` of a policy.

use std::time::Duration;

use http::HeaderName;

use super::TOKEN;
use crate::config::declare::Shown::Required;
use crate::config::declare::{Inner, Keys as _, keys};
use crate::config::kinds::{Kind, nonzero_time, or_false, text_as, time, whole};
use crate::config::node::{Node, Table, Wrong};
use crate::config::units::show_duration;
use crate::idempotency::policy::Policy;
use crate::idempotency::request_time::RequestTime;

keys! {
    /// `request_time`
    pub(super) struct Time "request_time" {
        /// The header with the time, as "header:NAME": RFC 3339, an HTTP date, or seconds or milliseconds since 1970.
        from: Option<HeaderName> = None
            => text_as(format!("^header:{TOKEN}$"), header, |name| format!("header:{name}")).optional(),
            Required("\"header:X-Request-Timestamp\"");
        /// The age from which a request is too old to run.
        max_age: Duration = Duration::from_secs(60 * 60) => nonzero_time();
        /// How far the time of a request may be ahead of the gate's. Let it cover how far the clocks of clients and gates
        /// differ.
        skew: Duration = Duration::from_secs(5 * 60) => time();
    }
}

/// The table, or false.
pub(super) fn rule() -> Kind<Option<RequestTime>> {
    or_false(whole::<Time>().complete(Time::into_rule, Time::of_rule)).with_inner(|| Inner::Table(Time::SECTION))
}

/// A request that may run must still find the record of its first run.
pub(in crate::config) fn check(table: &Table<'_>, policy: &Policy) {
    let Some(RequestTime { max_age, skew, .. }) = &policy.request_time else { return };
    for (key, record, kept) in
        [("ttl", "a record", policy.ttl), ("unknown_ttl", "one whose outcome is unknown", policy.unknown_ttl)]
    {
        if max_age.saturating_add(*skew) > kept {
            let (max_age, skew, kept) = (show_duration(*max_age), show_duration(*skew), show_duration(kept));
            let wrong = format!(
                "a request may run until it is {max_age} old, its clock may be {skew} ahead, and {record} is kept for {kept}: \
                 a retry that outlives its record would run again"
            );
            let hint = format!("let max_age and skew together be at most {key}");
            table.report("request_time", Wrong::new(wrong).hint(hint));
        }
    }
}

impl Time {
    fn into_rule(self) -> Option<RequestTime> {
        Some(RequestTime { from: self.from?, max_age: self.max_age, skew: self.skew })
    }

    fn of_rule(rule: &RequestTime) -> Self {
        Self { from: Some(rule.from.clone()), max_age: rule.max_age, skew: rule.skew }
    }
}

fn header(node: &Node<'_>) -> Result<HeaderName, Wrong> {
    let text = node.filled()?;
    let name = text.strip_prefix("header:").and_then(|name| HeaderName::from_bytes(name.as_bytes()).ok());
    name.ok_or_else(|| {
        let wrong = Wrong::new(format!("`{text}` is not a place for the time of a request"));
        wrong.hint("write \"header:NAME\", such as \"header:X-Request-Timestamp\"")
    })
}
