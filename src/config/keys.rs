//! The top level, and which keys there are where.

use std::sync::LazyLock;

use super::access_log::AccessLog;
use super::auth::Auth;
use super::declare::{Facts, Inner, Key, Section, Shown};
use super::headers::Headers;
use super::kinds::{nested, raw};
use super::listeners::{Admin, Server};
use super::logging::Log;
use super::policy_page::PolicyPage;
use super::telemetry::Telemetry;
use super::{consumers, policy, routes, store, upstreams};
use crate::http::limits::Limits;
use crate::idempotency::policy::Policy;

/// The top level.
pub(super) const ROOT: &Section = &Section {
    name: "the top level",
    about: &[
        " oncegate: the default configuration.",
        "",
        " A setting without a `#` is the default. A `#` without a space after it comments out a setting that has no fixed",
        " default, or an example. The least that works is one upstream.",
        "",
        " Durations are a whole number and a unit (ms, s, m, h, d), and several may stand in a row: \"500ms\", \"24h\", \"1h30m\".",
        " Sizes are a whole number and a unit (B, KiB, MiB, GiB, or kB, MB, GB for powers of ten): \"256KiB\", \"16MiB\".",
        "",
        " Environment variables set keys too: ONCEGATE_ and the key in capitals, with two underscores between levels, as in",
        " ONCEGATE_SERVER__LISTEN. Text stands bare, and a list or a table is written as in TOML:",
        " ONCEGATE_DEFAULTS__SCOPE='[\"host\"]'. A variable sets a list as a whole. Of a table it sets the keys that it names, and",
        " the others stay as the file has them. ONCEGATE_UPSTREAMS__MY_APP is the upstream my_app, and not my-app. Flags override",
        " the environment, which overrides the file.",
        "",
        " `oncegate check --config FILE` reports every problem of a file, with lines and hints. SIGHUP makes a running gate",
        " read the file again: a file with any problem changes nothing. `listen`, `socket_mode`, log.format, [[consumers]] and",
        " most of [store] (not settle_timeout, max_ttl and encryption_keys) only change at a restart. If store.url,",
        " store.service or the id secret changed, nothing is applied. See docs/operate/reload.md.",
    ],
    groups: &[&[
        Key {
            name: "default_upstream",
            doc: &[
                " The upstream of requests that match no route: they are forwarded unprotected. If omitted, the only upstream;",
                " if there are several, these requests get 404 `no-route`.",
            ],
            shown: Shown::Example("\"app\""),
            facts: || Facts::of(&raw(upstreams::NAME).optional(), &None),
        },
        Key::table::<Server>("server"),
        Key::table::<Limits>("limits"),
        Key::table::<Admin>("admin"),
        Key::table::<store::Keys>("store"),
        Key {
            name: "upstreams",
            doc: upstreams::SECTION.about,
            shown: Shown::Default,
            facts: || Facts {
                shape: upstreams::shape(),
                default: None,
                inner: Inner::Named(<upstreams::Keys as super::declare::Keys>::SECTION),
            },
        },
        Key {
            name: "defaults",
            doc: policy::SECTION.about,
            shown: Shown::Default,
            facts: || Facts {
                shape: policy::SECTION.shape(),
                default: nested::<Policy>().print(&Policy::default()),
                inner: Inner::Table(policy::SECTION),
            },
        },
        Key {
            name: "routes",
            doc: routes::SECTION.about,
            shown: Shown::Default,
            facts: || Facts { shape: routes::shape(), default: None, inner: Inner::List(routes::SECTION) },
        },
        Key {
            name: "consumers",
            doc: consumers::SECTION.about,
            shown: Shown::Default,
            facts: || Facts { shape: consumers::shape(), default: None, inner: Inner::List(consumers::SECTION) },
        },
        Key::table::<Headers>("headers"),
        Key::table::<Auth>("auth"),
        Key::table::<PolicyPage>("policy_page"),
        Key::table::<Log>("log"),
        Key::table::<AccessLog>("access_log"),
        Key::table::<Telemetry>("telemetry"),
    ]],
};

/// The tables that have a key of this name.
pub(super) fn homes(key: &str) -> impl Iterator<Item = &'static str> {
    // Looked for once: a key's facts are put together anew each time.
    static ALL: LazyLock<Vec<&Section>> = LazyLock::new(|| {
        let mut sections = Vec::new();
        add_sections(ROOT, &mut sections);
        sections
    });
    ALL.iter().filter(move |section| section.names().any(|known| known == key)).map(|section| section.name)
}

fn add_sections(section: &'static Section, found: &mut Vec<&'static Section>) {
    if found.iter().any(|known| known.name == section.name) {
        return;
    }
    found.push(section);
    for key in section.keys() {
        if let Inner::Table(inner) | Inner::Named(inner) | Inner::List(inner) = (key.facts)().inner {
            add_sections(inner, found);
        }
    }
}

/// The section of the top level that a variable with one underscore too few may mean, and the key in it.
pub(super) fn split_variable(key: &str) -> Option<(&'static str, &str)> {
    sections().find_map(|(name, section)| {
        let rest = key.strip_prefix(name)?.strip_prefix('_')?;
        let is_known = section.is_open() && !rest.is_empty() || section.names().any(|known| known == rest);
        is_known.then_some((name, rest))
    })
}

/// The variables that set a key of this name in a section of the top level.
pub(super) fn variables(key: &str) -> impl Iterator<Item = String> {
    let sections = sections().filter(move |(_, section)| section.names().any(|known| known == key));
    sections.map(move |(name, _)| variable(name, key))
}

/// The variable that sets a key in a section of the top level.
pub(super) fn variable(section: &str, key: &str) -> String {
    format!("ONCEGATE_{}__{}", section.to_uppercase(), key.to_uppercase())
}

/// The variable that sets the key of a path, where one does.
pub(super) fn variable_at(path: &str) -> Option<String> {
    let (name, key) = path.split_once('.')?;
    let (_, section) = sections().find(|(section, _)| *section == name)?;
    if name == "upstreams" {
        let upstream = key.strip_suffix(".url").filter(|upstream| !upstream.contains(['.', '[', '"']))?;
        return Some(variable(name, upstream));
    }
    section.names().any(|known| known == key).then(|| variable(name, key))
}

/// A variable that sets a key in a section of the top level: its first one.
pub(super) fn example_variable(section: &str) -> Option<String> {
    let (name, section) = sections().find(|(name, _)| *name == section)?;
    Some(variable(name, section.names().next().unwrap_or("app")))
}

/// Every key of the top level, and those of its sections.
#[cfg(test)]
pub(super) fn all() -> impl Iterator<Item = (Option<&'static str>, &'static str)> {
    let top = ROOT.names().map(|key| (None, key));
    top.chain(sections().flat_map(|(name, section)| section.names().map(move |key| (Some(name), key))))
}

/// The sections of the top level whose keys variables can set.
fn sections() -> impl Iterator<Item = (&'static str, &'static Section)> {
    static ALL: LazyLock<Vec<(&str, &Section)>> = LazyLock::new(|| {
        let section = |key: &'static Key| match (key.facts)().inner {
            Inner::Table(section) => Some((key.name, section)),
            Inner::Named(_) => Some((key.name, upstreams::SECTION)),
            Inner::None | Inner::List(_) | Inner::Entries(_) => None,
        };
        ROOT.keys().filter_map(section).collect()
    });
    ALL.iter().copied()
}
