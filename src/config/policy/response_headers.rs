//! `response_headers` of a policy.

use http::HeaderName;

use crate::config::declare::{Keys as _, keys};
use crate::config::headers::TOKEN;
use crate::config::kinds::{text_as, unique};
use crate::config::node::{Node, Table, Wrong};
use crate::config::routes;
use crate::gate::HeaderNames;
use crate::idempotency::key::title_case;
use crate::idempotency::policy::ResponseHeaders;

keys! {
    /// `response_headers`
    for ResponseHeaders "response_headers" {
        /// Headers of an answer, such as ["Set-Cookie"], that go to the client whose request ran and to no retry: they are
        /// neither kept nor replayed. Headers without which a replay could not be read, such as Content-Type, cannot be
        /// excluded.
        exclude => unique(text_as(format!("^{TOKEN}$"), excluded, title_case));
    }
}

/// What oncegate says itself in each answer cannot be left out of some.
pub(in crate::config) fn check(root: &Table<'_>, own: &HeaderNames) {
    let own = [("status", &own.status), ("replayed", &own.replayed), ("expires", &own.expires)];
    let routes = root.tables("routes", routes::SECTION).unwrap_or_default();
    for policy in routes.into_iter().chain([root.table("defaults", super::SECTION)]) {
        let table = policy.table("response_headers", ResponseHeaders::SECTION);
        for node in table.get("exclude").and_then(|list| list.items()).unwrap_or_default() {
            let is_it = |name: &Option<HeaderName>| {
                name.as_ref().zip(node.text().ok()).is_some_and(|(name, text)| name.as_str().eq_ignore_ascii_case(text))
            };
            if let Some((key, _)) = own.into_iter().find(|(_, name)| is_it(name)) {
                let wrong = format!(
                    "`{}` cannot be excluded: oncegate adds it to its answers by itself",
                    node.text().unwrap_or_default()
                );
                node.report(
                    Wrong::new(wrong).hint(format!("remove it; [headers] {key} = false leaves it out everywhere")),
                );
            }
        }
    }
}

fn excluded(node: &Node<'_>) -> Result<HeaderName, Wrong> {
    let text = node.filled()?;
    let Ok(name) = HeaderName::from_bytes(text.as_bytes()) else {
        return Err(Wrong::new(format!("`{text}` is not a header name")).hint("such as \"Set-Cookie\""));
    };
    if text.contains('*') {
        let wrong = Wrong::new(format!("`{text}` is no pattern here: it would be one header with this name"));
        return Err(wrong.hint("name each header"));
    }
    match why_not(&name) {
        Some(why) => Err(Wrong::new(format!("`{text}` cannot be excluded: {why}")).hint("remove it")),
        None => Ok(name),
    }
}

/// Why a header cannot be excluded from what is kept.
fn why_not(name: &HeaderName) -> Option<&'static str> {
    Some(match name.as_str() {
        "connection" | "http2-settings" | "keep-alive" | "proxy-connection" | "te" | "transfer-encoding"
        | "upgrade" => "it belongs to one connection, and is never kept",
        "content-length" | "trailer" => "it frames the body, and a replay has the same body",
        "content-encoding" | "content-range" | "content-type" => {
            "it says how the body is read, and a replay has the same body"
        }
        "grpc-encoding" | "grpc-message" | "grpc-status" | "grpc-status-details-bin" => {
            "it says how a gRPC call ended, and a replay ends in the same way"
        }
        "idempotency-control" => "it is for oncegate, and no client gets it",
        _ => return None,
    })
}
