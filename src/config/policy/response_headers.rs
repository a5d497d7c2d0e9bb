//! `response_headers` of a policy.

use http::HeaderName;

use crate::config::declare::keys;
use crate::config::headers::{TOKEN, spelled};
use crate::config::kinds::{text_as, unique};
use crate::config::node::{Node, Wrong};
use crate::idempotency::policy::ResponseHeaders;

keys! {
    /// `response_headers`
    for ResponseHeaders "response_headers" {
        /// Headers of an answer, such as ["Set-Cookie"], that go to the client whose request ran and to no retry: they are
        /// neither kept nor replayed. Headers without which a replay could not be read, such as Content-Type, cannot be
        /// excluded.
        exclude => unique(text_as(format!("^{TOKEN}$"), excluded, spelled));
    }
}

fn excluded(node: &Node<'_>) -> Result<HeaderName, Wrong> {
    let text = node.filled()?;
    let Ok(name) = HeaderName::from_bytes(text.as_bytes()) else {
        return Err(Wrong::new(format!("`{text}` is not a header name")).hint("such as \"Set-Cookie\""));
    };
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
