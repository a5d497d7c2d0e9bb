//! `[headers]`

use figment::value::Value;
use http::HeaderName;
use serde_json::json;
use toml_edit::Item;

use super::declare::{Keys as _, keys};
use super::kinds::{Kind, Shape, Toml};
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

keys! {
    /// The headers that oncegate adds to its answers; false without quotes leaves one out.
    pub(super) struct Headers "[headers]" {
        /// What became of the request: executed, replayed, released, unrecorded, unprotected, ignored (it carried a key, and
        /// no route protects it), or the code of a problem.
        status: Option<HeaderName> = Some(HeaderName::from_static("idempotency-status")) => NameOrFalse;
        /// "true" on replays, and only there.
        replayed: Option<HeaderName> = Some(HeaderName::from_static("idempotent-replayed")) => NameOrFalse;
        /// Until when a completed record answers retries.
        expires: Option<HeaderName> = Some(HeaderName::from_static("idempotency-expires")) => NameOrFalse;
    }
}

/// Reads `[headers]`; with it, what is in force.
pub(super) fn read(root: &Table<'_>) -> (HeaderNames, Item) {
    let table = root.table("headers", Headers::SECTION);
    let headers = Headers::read(&table, Headers::default());
    let printed = headers.print_table();
    let Headers { status, replayed, expires } = headers;
    let named = [("status", &status), ("replayed", &replayed), ("expires", &expires)];
    for (place, (key, name)) in named.iter().enumerate() {
        if name.is_some() && named[..place].iter().any(|(_, other)| other == name) {
            let wrong = Wrong::new("another of the three headers has this name");
            table.report(key, wrong.hint("give each a name of its own, or false to leave it out"));
        }
    }
    (HeaderNames { status, replayed, expires }, printed)
}

/// The pattern of a token (RFC 9110, section 5.6.2).
pub(super) const TOKEN: &str = "[!#$%&'*+.^_`|~0-9A-Za-z-]+";

/// The name of a header, or false.
struct NameOrFalse;

impl Kind for NameOrFalse {
    type Value = Option<HeaderName>;

    fn shape(&self) -> Shape {
        json!({ "type": ["string", "boolean"], "pattern": format!("^{TOKEN}$"), "not": { "const": true } })
    }

    fn take(&self, node: &Node<'_>) -> Option<Self::Value> {
        node.accept(name(node))
    }

    /// Header names are kept in lower case, and read better as they are documented.
    fn print(&self, value: &Self::Value) -> Option<Toml> {
        let capital = |word: &str| word[..1].to_ascii_uppercase() + &word[1..];
        let Some(name) = value else { return Some(false.into()) };
        let words = name.as_str().split('-').map(|word| if word.is_empty() { String::new() } else { capital(word) });
        Some(words.collect::<Vec<_>>().join("-").into())
    }
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
