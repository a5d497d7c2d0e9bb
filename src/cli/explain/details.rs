//! What an explanation says only where it is not the usual.

use http::request::Parts;

use crate::config::{Resolved, spelled_header};
use crate::http::headers::{ATTEMPT, OwnHeaders};

/// What the upstream gets of the key and of the attempt, as labels and texts.
pub(super) fn own_headers(config: &Resolved, head: &Parts) -> Vec<(&'static str, String)> {
    let OwnHeaders { attempt, key } = &config.gate.own_headers;
    let key = key.as_ref().map(|name| {
        let instead = if head.headers.contains_key(name) { ", in place of the client's own" } else { "" };
        ("", format!("the upstream gets it as {} too{instead}", spelled_header(name)))
    });
    let attempt = match attempt {
        Some(name) if *name == ATTEMPT => None,
        Some(name) => Some(("attempt", format!("the upstream gets its token as {}", spelled_header(name)))),
        None => Some(("attempt", "the upstream does not get its token: headers.attempt is false".to_owned())),
    };
    key.into_iter().chain(attempt).collect()
}
