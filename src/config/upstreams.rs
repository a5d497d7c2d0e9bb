//! `[upstreams]` and `default_upstream`

use std::sync::Arc;
use std::time::Duration;

use self::location::Location;
use super::kinds::{Kind as _, number};
use super::node::{Node, Table, Wrong};
use super::suggest::nearest;
use super::{keys, limits};
use crate::http::upstream::{Protocol, Settings, Sharing};

pub(super) mod encryption;
mod location;
#[cfg(test)]
mod tests;

/// How many connections there may be to an upstream where nothing is said.
pub(super) const MAX_CONNECTIONS: u64 = 4000;

/// The words of `protocol`.
pub(super) const PROTOCOLS: [(&str, Protocol); 3] =
    [("auto", Protocol::Auto), ("http1", Protocol::Http1), ("h2", Protocol::H2)];

/// The words of `reuse`.
pub(super) const SHARINGS: [(&str, Sharing); 3] =
    [("always", Sharing::Always), ("caller", Sharing::Caller), ("never", Sharing::Never)];

/// What is configured of upstreams.
pub(super) struct Upstreams {
    /// Those that could be read, in the order of their names.
    pub settings: Vec<Settings>,
    /// The names of all of them.
    pub names: Vec<Arc<str>>,
}

/// Reads `[upstreams]`.
pub(super) fn read(root: &Table<'_>) -> Upstreams {
    let table = root.table("upstreams", &keys::UPSTREAMS);
    let mut upstreams = Upstreams { settings: Vec::new(), names: Vec::new() };
    for (key, node) in table.entries() {
        if let Err(wrong) = name_of(key) {
            node.report(wrong);
        }
        let name: Arc<str> = key.into();
        upstreams.names.push(Arc::clone(&name));
        upstreams.settings.extend(one(name, &Table::open(node, &keys::UPSTREAM)));
    }
    if upstreams.names.is_empty() {
        let hint = "add `app = \"http://127.0.0.1:3000\"` under [upstreams], or start with --upstream URL";
        root.report("upstreams", Wrong::new("there is no upstream").hint(hint));
    }
    upstreams
}

impl Upstreams {
    /// The only one there is.
    pub(super) fn only(&self) -> Option<usize> {
        (self.names.len() == 1).then_some(0)
    }

    /// How long an attempt at an upstream may take, where that could be read.
    pub(super) fn timeout(&self, place: Option<usize>) -> Option<Duration> {
        let name = self.names.get(place?)?;
        self.settings.iter().find(|settings| settings.name == *name).map(|settings| settings.timeout)
    }

    /// The place of a name in the list.
    pub(super) fn find(&self, node: &Node<'_>) -> Result<usize, Wrong> {
        let text = node.filled()?;
        let names = || self.names.iter().map(|name| &**name);
        self.names.iter().position(|name| **name == *text).ok_or_else(|| {
            let hint = match nearest(text, names()) {
                Some(name) => format!("did you mean \"{name}\"?"),
                None => format!("the upstreams are {}", names().collect::<Vec<_>>().join(", ")),
            };
            Wrong::new(format!("there is no upstream `{text}`")).hint(hint)
        })
    }
}

/// Reads `default_upstream`: the only upstream where it is not set.
pub(super) fn default(root: &Table<'_>, upstreams: &Upstreams) -> Option<usize> {
    match root.get("default_upstream") {
        Some(_) => root.read("default_upstream", |node| upstreams.find(node)),
        None => upstreams.only(),
    }
}

fn name_of(key: &str) -> Result<(), Wrong> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if !key.is_empty() && key.len() <= 128 && key.bytes().all(good) {
        return Ok(());
    }
    Err(Wrong::new("the name of an upstream has letters, digits, `-`, `_` and `.`").hint("choose a short word"))
}

fn one(name: Arc<str>, table: &Table<'_>) -> Option<Settings> {
    if table.get("url").is_none() {
        table.report("url", Wrong::new("the upstream has no URL").hint("write url = \"http://HOST:PORT\""));
    }
    let location = location::read(table);
    let timeout = table.read("timeout", Node::some_duration).unwrap_or(Duration::from_secs(60));
    let connect_timeout = table.read("connect_timeout", Node::some_duration);
    let max_connections = table.get("max_connections").and_then(|node| number(limits::COUNTS).take(&node));
    let client_timeout = table.read("client_timeout", Node::some_duration);
    let protocol = table.read("protocol", |node| node.word(&PROTOCOLS, &[]));
    let reuse = table.read("reuse", |node| node.word(&SHARINGS, &[]));
    for (key, value) in [("connect_timeout", connect_timeout), ("client_timeout", client_timeout)] {
        if value.is_some_and(|value| value > timeout) {
            table.advise(key, "it is longer than timeout, which ends the attempt first".to_owned());
        }
    }
    let Location { places, is_encrypted } = location?;
    let tls = if is_encrypted { Some(encryption::read(table, &places)?) } else { None };
    if !is_encrypted && table.get("tls").is_some() {
        let useless = Wrong::new("`tls` is of no use where nothing is encrypted");
        table.report("tls", useless.hint("write url = \"https://HOST\", or remove it"));
    }
    Some(Settings {
        name,
        places,
        tls,
        protocol: protocol.unwrap_or(Protocol::Auto),
        timeout,
        connect_timeout: connect_timeout.unwrap_or(Duration::from_secs(2)),
        max_connections: max_connections.unwrap_or(MAX_CONNECTIONS),
        reuse: reuse.unwrap_or(Sharing::Always),
        client_timeout: client_timeout.unwrap_or(timeout),
    })
}

/// Reads the name of an upstream that a route goes to.
pub(super) fn of_route(table: &Table<'_>, upstreams: &Upstreams) -> Option<usize> {
    if table.get("upstream").is_some() {
        return table.read("upstream", |node| upstreams.find(node));
    }
    if upstreams.names.len() > 1 {
        let names = upstreams.names.join(", ");
        let wrong = Wrong::new("there are several upstreams, and the route names none");
        table.report("upstream", wrong.hint(format!("write upstream = \"NAME\" with one of {names}")));
    }
    upstreams.only()
}
