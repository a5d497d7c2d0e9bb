//! `[headers]`

use figment::value::Value;
use http::HeaderName;
use serde_json::json;

use super::declare::{Keys as _, keys};
use super::kinds::Kind;
use super::node::{Node, Table, Wrong};
use crate::gate::HeaderNames;

/// Headers that mean something else already: they frame a message, are dropped on the way, or are set by the gate for
/// other reasons.
const TAKEN: &str = "connection content-language content-length content-type date host idempotency-attempt idempotency-control \
    idempotency-key keep-alive link location proxy-authenticate proxy-connection retry-after set-cookie te \
    trailer transfer-encoding upgrade via";

keys! {
    /// The headers that oncegate adds to its answers; false without quotes leaves one out.
    pub(super) struct Headers "[headers]" {
        /// What became of the request: executed, replayed, released, refused, unrecorded, unprotected, ignored (it carried a key, and
        /// no route protects it), or the code of a problem.
        status: Option<HeaderName> = Some(HeaderName::from_static("idempotency-status")) => name_or_false();
        /// "true" on replays, and only there.
        replayed: Option<HeaderName> = Some(HeaderName::from_static("idempotent-replayed")) => name_or_false();
        /// Until when a completed record answers retries.
        expires: Option<HeaderName> = Some(HeaderName::from_static("idempotency-expires")) => name_or_false();
    }
}

/// Reads `[headers]`.
pub(super) fn read(root: &Table<'_>) -> HeaderNames {
    let table = root.table("headers", Headers::SECTION);
    let headers = Headers::read(&table, Headers::default());
    root.print("headers", headers.print_table());
    let Headers { status, replayed, expires } = headers;
    let named = [("status", &status), ("replayed", &replayed), ("expires", &expires)];
    for (place, (key, name)) in named.iter().enumerate() {
        if name.is_some() && named[..place].iter().any(|(_, other)| other == name) {
            let wrong = Wrong::new("another of the three headers has this name");
            table.report(key, wrong.hint("give each a name of its own, or false to leave it out"));
        }
    }
    HeaderNames { status, replayed, expires }
}

/// The pattern of a token (RFC 9110, section 5.6.2).
pub(super) const TOKEN: &str = "[!#$%&'*+.^_`|~0-9A-Za-z-]+";

/// The name of a header, or false. Names are kept in lower case, and printed as people write them.
fn name_or_false() -> Kind<Option<HeaderName>> {
    let shape = || json!({ "type": ["string", "boolean"], "pattern": format!("^{TOKEN}$"), "not": { "const": true } });
    Kind::new(shape, name, |name| name.as_ref().map_or(false.into(), |name| spelled(name).into()))
}

/// The name of a header as people write it.
pub(super) fn spelled(name: &HeaderName) -> String {
    let capital = |word: &str| word.get(..1).map(|first| first.to_ascii_uppercase() + &word[1..]).unwrap_or_default();
    name.as_str().split('-').map(capital).collect::<Vec<_>>().join("-")
}

fn name(node: &Node<'_>) -> Result<Option<HeaderName>, Wrong> {
    let hint = "write a header name, or false without quotes to leave the header out";
    // An environment variable that says false means the same.
    if let Value::Bool(_, on) = node.value {
        return if *on { Err(Wrong::new("true is not a header name").hint(hint)) } else { Ok(None) };
    }
    let text = node.filled()?;
    match HeaderName::from_bytes(text.as_bytes()) {
        Ok(name) if TAKEN.split(' ').any(|taken| taken == name.as_str()) => {
            Err(Wrong::new(format!("`{text}` has another meaning")).hint("choose another name"))
        }
        Ok(name) => Ok(Some(name)),
        Err(_) => Err(Wrong::new(format!("`{text}` is not a header name")).hint(hint)),
    }
}
