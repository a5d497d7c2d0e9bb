//! `[headers]`

use figment::value::Value;
use http::HeaderName;

use super::keys;
use super::node::{Node, Table, Wrong};
use crate::gate::HeaderNames;

/// Headers that mean something else already: they frame a message, are dropped on the way, or are set by the gate for
/// other reasons.
const TAKEN: [&str; 21] = [
    "connection",
    "content-language",
    "content-length",
    "content-type",
    "date",
    "host",
    "idempotency-attempt",
    "idempotency-control",
    "idempotency-key",
    "keep-alive",
    "link",
    "location",
    "proxy-authenticate",
    "proxy-connection",
    "retry-after",
    "set-cookie",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "via",
];

/// The keys and their defaults.
pub(super) const DEFAULTS: [(&str, &str); 3] =
    [("status", "Idempotency-Status"), ("replayed", "Idempotent-Replayed"), ("expires", "Idempotency-Expires")];

/// Reads `[headers]`.
pub(super) fn read(root: &Table<'_>) -> HeaderNames {
    let table = root.table("headers", &keys::HEADERS);
    let [status, replayed, expires] = DEFAULTS.map(|(key, default)| {
        let default = || HeaderName::from_bytes(default.as_bytes()).ok();
        table.read(key, name).unwrap_or_else(default)
    });
    let names = [&status, &replayed, &expires];
    for place in 1..names.len() {
        if names[place].is_some() && names[..place].contains(&names[place]) {
            let wrong = Wrong::new("another of the three headers has this name");
            table.report(DEFAULTS[place].0, wrong.hint("give each a name of its own, or false to leave it out"));
        }
    }
    HeaderNames { status, replayed, expires }
}

fn name(node: &Node<'_>) -> Result<Option<HeaderName>, Wrong> {
    let hint = "write a header name, or false without quotes to leave the header out";
    // An environment variable that says false means the same.
    if let Value::Bool(_, on) = node.value {
        return if *on { Err(Wrong::new("true is not a header name").hint(hint)) } else { Ok(None) };
    }
    let text = node.filled()?;
    match HeaderName::from_bytes(text.as_bytes()) {
        Ok(name) if TAKEN.contains(&name.as_str()) => {
            Err(Wrong::new(format!("`{text}` has another meaning")).hint("choose another name"))
        }
        Ok(name) => Ok(Some(name)),
        Err(_) => Err(Wrong::new(format!("`{text}` is not a header name")).hint(hint)),
    }
}
