//! The keys that a configuration may have.

use super::declare::Keys as _;
use super::headers::Headers;
use super::listeners::{Admin, Server};
use super::logging::Log;
use super::tls::Files;
use crate::http::limits::Limits;

/// The keys of one table.
#[derive(Debug)]
pub(super) struct Section {
    /// Its name, for people.
    pub name: &'static str,
    /// Its keys, in groups; none at all where the keys are the user's own.
    pub keys: &'static [&'static [&'static str]],
}

impl Section {
    /// Its keys.
    pub(super) fn keys(&self) -> impl Iterator<Item = &'static str> {
        self.keys.iter().flat_map(|group| group.iter().copied())
    }

    /// Whether it takes any key.
    pub(super) fn is_open(&self) -> bool {
        self.keys.is_empty()
    }
}

/// Keys of the contract that this version does not support, with their sections.
pub(super) const LATER: [(&str, &str); 3] = [(ROOT.name, "auth"), ("[admin]", "tls"), ("[[routes]]", "probe")];

/// The top level.
pub(super) const ROOT: Section = Section {
    name: "the top level",
    keys: &[&[
        "default_upstream",
        "server",
        "limits",
        "admin",
        "store",
        "upstreams",
        "defaults",
        "routes",
        "headers",
        "log",
    ]],
};

/// `[store]`
pub(super) const STORE: Section = Section {
    name: "[store]",
    keys: &[
        &["url", "password_file", "connections", "service", "id_secret_file"],
        &["cache", "cache_password_file", "cache_max_age", "cache_max_bytes", "cache_max_entries"],
        &["settle_timeout"],
    ],
};

/// `[upstreams]`
pub(super) const UPSTREAMS: Section = Section { name: "[upstreams]", keys: &[] };

/// One of `[upstreams]`
pub(super) const UPSTREAM: Section = Section {
    name: "an upstream",
    keys: &[&["url", "tls", "protocol", "timeout", "connect_timeout", "client_timeout", "max_connections", "reuse"]],
};

/// `tls` of an upstream
pub(super) const UPSTREAM_TLS: Section =
    Section { name: "tls of an upstream", keys: &[&["ca", "cert", "key", "name", "crl"]] };

/// One of `[[routes]]`
pub(super) const ROUTE: Section =
    Section { name: "[[routes]]", keys: &[&["name", "namespace", "methods", "host", "path", "upstream"], POLICY] };

/// `[defaults]`
pub(super) const DEFAULTS: Section = Section { name: "[defaults]", keys: &[POLICY] };

/// The policy of a route.
const POLICY: &[&str] = &[
    "ttl",
    "unknown_ttl",
    "key",
    "scope",
    "fingerprint",
    "outcomes",
    "in_flight",
    "recovery",
    "store_failure",
    "lease",
    "mode",
    "body",
    "max_request_body",
    "max_response_body",
    "cors",
    "docs",
];

/// `key`
pub(super) const KEY: Section = Section { name: "key", keys: &[&["from", "required", "max_length"]] };

/// `fingerprint`
pub(super) const FINGERPRINT: Section = Section { name: "fingerprint", keys: &[&["of", "body", "include", "exclude"]] };

/// `outcomes`
pub(super) const OUTCOMES: Section = Section { name: "outcomes", keys: &[] };

/// `in_flight`, where it is a table
pub(super) const IN_FLIGHT: Section = Section { name: "in_flight", keys: &[&["wait"]] };

/// `cors`
pub(super) const CORS: Section = Section { name: "cors", keys: &[&["origins", "credentials"]] };

/// Where a key stands that is not known where it was found.
pub(super) fn homes(key: &str) -> impl Iterator<Item = &'static str> {
    HOMES.iter().filter(move |section| section.keys().any(|known| known == key)).map(|section| section.name)
}

/// The section of the top level that a variable with one underscore too few may mean, and the key in it.
pub(super) fn split_variable(key: &str) -> Option<(&'static str, &str)> {
    SECTIONS.iter().find_map(|(name, section)| {
        let rest = key.strip_prefix(name)?.strip_prefix('_')?;
        let is_known = section.is_open() && !rest.is_empty() || section.keys().any(|known| known == rest);
        is_known.then_some((*name, rest))
    })
}

/// The variables that set a key of this name in a section of the top level.
pub(super) fn variables(key: &str) -> impl Iterator<Item = String> {
    let sections = SECTIONS.iter().filter(move |(_, section)| section.keys().any(|known| known == key));
    sections.map(move |(name, _)| variable(name, key))
}

/// The variable that sets a key in a section of the top level.
pub(super) fn variable(section: &str, key: &str) -> String {
    format!("ONCEGATE_{}__{}", section.to_uppercase(), key.to_uppercase())
}

/// Every key of the top level, and those of its sections.
#[cfg(test)]
pub(super) fn all() -> impl Iterator<Item = (Option<&'static str>, &'static str)> {
    let later = LATER.iter().filter(|(section, _)| *section == ROOT.name).map(|(_, key)| *key);
    let top = ROOT.keys().chain(later).map(|key| (None, key));
    top.chain(SECTIONS.iter().flat_map(|(name, section)| section.keys().map(|key| (Some(*name), key))))
}

const HOMES: &[&Section] = &[
    &ROOT,
    Server::SECTION,
    Files::SECTION,
    Limits::SECTION,
    Admin::SECTION,
    &STORE,
    &UPSTREAM,
    &ROUTE,
    &DEFAULTS,
    &KEY,
    &FINGERPRINT,
    &IN_FLIGHT,
    &CORS,
    Headers::SECTION,
    Log::SECTION,
];

const SECTIONS: &[(&str, &Section)] = &[
    ("server", Server::SECTION),
    ("limits", Limits::SECTION),
    ("admin", Admin::SECTION),
    ("store", &STORE),
    ("upstreams", &UPSTREAMS),
    ("defaults", &DEFAULTS),
    ("headers", Headers::SECTION),
    ("log", Log::SECTION),
];
