//! Sentences of an explanation, and what it says only where it is not the usual.

use http::request::Parts;

use crate::config::{Resolved, spelled_header};
use crate::http::headers::{ATTEMPT, OwnHeaders};
use crate::idempotency::fingerprint::Because;
use crate::idempotency::key::{Found, KeyRule, KeySource};

/// What a request has for each part of a template; nothing for another source.
pub(super) fn template_parts(source: &KeySource, rule: &KeyRule, (head, body): (&Parts, &[u8])) -> Vec<String> {
    let KeySource::Template(template) = source else { return Vec::new() };
    let part = |part: &KeySource| {
        let alone = KeyRule { from: vec![part.clone()], ..rule.clone() };
        let what = match alone.find(&head.uri, &head.headers, Some(body)) {
            Ok(Found::Key(key)) => key.as_str().to_owned(),
            Ok(_) => "nothing there, so the template yields no key".to_owned(),
            Err(_) => "not well-formed".to_owned(),
        };
        format!("  {part}: {what}")
    };
    template.sources().map(part).collect()
}

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

/// Why a body counts byte for byte.
pub(super) fn because_of(because: Because) -> &'static str {
    match because {
        Because::Asked => "byte for byte, as fingerprint.body says",
        Because::Coded => "byte for byte, because it is coded (Content-Encoding)",
        Because::Type => "byte for byte, as its type is neither JSON nor multipart",
        Because::NoBoundary => "byte for byte, because its Content-Type has no boundary that can be read",
        Because::Malformed => "byte for byte, because it is not of the form that it should be of",
        Because::TooDeep => "byte for byte, because its JSON nests too deep",
        Because::Ambiguous => "byte for byte, because its JSON has a name that stands twice",
    }
}
