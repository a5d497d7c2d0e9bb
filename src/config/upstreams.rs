//! `[upstreams]` and `default_upstream`

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use toml_edit::{Item, value};

use self::encryption::Tls;
use self::location::{Endpoint, Location};
use super::declare::{Keys as _, Section, Shown::Example, keys};
use super::kinds::{Kind, Shape, nested, nonzero_time, number, one_or_several, words};
use super::limits::COUNTS;
use super::node::{Node, Table, Wrong};
use super::suggest::nearest;
use super::units::show_duration;
use crate::http::socket::Listen;
use crate::http::upstream::{Protocol, Settings, Sharing, UpstreamAddress};
use crate::idempotency::recovery::Recovery;
use crate::route::{Route, Router};

pub(super) mod encryption;
pub(super) mod location;
#[cfg(test)]
mod tests;

keys! {
    /// A service behind: a table, or only its URL or list of URLs.
    pub(super) struct Keys "an upstream" {
        /// "http://HOST:PORT", "https://HOST:PORT", or "unix:PATH" for a socket; without a path: the path of a request is
        /// passed on unchanged. Several stand in a list: ["http://a:3000", "http://b:3000"]. They, and all addresses of a
        /// name, take new connections in turn; one that refuses connections, or breaks off exchanges, comes after the others
        /// for ten seconds.
        url: Vec<Endpoint> = Vec::new()
            => one_or_several(location::FORM, location::endpoint), Example("\"http://127.0.0.1:3000\"");
        /// The protocol: "auto" is HTTP/2 or HTTP/1.1, as the upstream chooses (ALPN), if the URL is https, and HTTP/1.1
        /// otherwise; "http1"; "h2", which over an unencrypted connection is HTTP/2 with prior knowledge (h2c).
        protocol: Protocol = Protocol::Auto
            => protocol();
        /// How an https upstream is authenticated: `ca` is a file with the certificates of the authorities that sign its
        /// certificate (if omitted, those of this system), `cert` and `key` are the files of the gate's own certificate,
        /// `name` is the name that the upstream's certificate must have if it is not the host's. With `crl`, a file with
        /// lists of revoked certificates, each certificate must be known not to be revoked: there must be a list by each of
        /// their issuers whose next update is still to come.
        tls: Tls = Tls::default() => nested(), Example(
            r#"{ ca = "/etc/oncegate/ca.pem", crl = "/etc/oncegate/crl.pem" }"#
        );
        /// The longest that a whole attempt may take. After that its outcome is unknown.
        timeout: Duration = Duration::from_secs(60) => nonzero_time();
        /// The longest that opening a connection may take, including TLS and the HTTP/2 preface. Nothing has been sent by
        /// then, so the key is free again, unless `outcomes.unreachable` is "hold".
        connect_timeout: Duration = Duration::from_secs(2) => nonzero_time();
        /// How long a client waits before it gets 504 `still-running` while the attempt goes on. If omitted, `timeout`.
        client_timeout: Option<Duration> = None => nonzero_time().optional(), Example("\"60s\"");
        /// The most connections to it, from 1 to 1000000. A request that finds none free waits for one as long as opening
        /// one may take; then it gets 503 `overloaded`: nothing was sent, and its key is free again (see connect_timeout).
        max_connections: u64 = 4000 => number(COUNTS);
        /// Which requests may share a connection: "always" those of all callers, "caller" those of one caller, "never" none:
        /// each has a connection of its own. An upstream that sends bytes after an answer can make them the answer to the
        /// next request on that connection.
        reuse: Sharing = Sharing::Always
            => words(&[("always", Sharing::Always), ("caller", Sharing::Caller), ("never", Sharing::Never)]);
    }
}

/// `[upstreams]`, whose keys are names.
pub(super) const SECTION: &Section = &Section {
    name: "[upstreams]",
    about: &[
        " The services behind oncegate, by names of your choice. If there is only one, routes need not name it. Only a URL:",
        "     [upstreams]",
        "     app = \"http://127.0.0.1:3000\"",
        " or a table with these keys:",
    ],
    groups: &[],
};

/// `[upstreams]` in the schema.
pub(super) fn shape() -> Shape {
    let mut upstream = Keys::SECTION.shape();
    let url = upstream["properties"]["url"].clone();
    upstream["type"] = json!(["string", "array", "object"]);
    ["pattern", "items", "minItems"].into_iter().for_each(|key| upstream[key] = url[key].clone());
    json!({
        "title": SECTION.name,
        "type": "object",
        "patternProperties": { (NAME): upstream },
        "additionalProperties": false,
    })
}

/// The pattern of an upstream's name.
pub(super) const NAME: &str = "^[A-Za-z0-9._-]{1,128}$";

/// What is configured of upstreams.
pub(super) struct Upstreams {
    /// Those that could be read, in the order of their names.
    pub settings: Vec<Settings>,
    /// The names of all of them.
    pub names: Vec<Arc<str>>,
}

/// Reads `[upstreams]`.
pub(super) fn read(root: &Table<'_>, max_headers: usize) -> Upstreams {
    let table = root.table("upstreams", SECTION);
    let mut upstreams = Upstreams { settings: Vec::new(), names: Vec::new() };
    let mut printed = toml_edit::Table::new();
    printed.set_implicit(true);
    for (key, node) in table.entries() {
        if let Err(wrong) = name_of(key) {
            node.report(wrong);
        }
        let is_setting = Keys::KEYS.iter().any(|known| known.name == key);
        let upstream = Table::open(node.clone(), Keys::SECTION);
        // A value in the place of a table is an upstream's URL.
        if is_setting && upstream.get("url").is_some_and(|url| !url.text().is_ok_and(|url| url.contains(':'))) {
            let wrong = Wrong::new(format!("`{key}` is a setting of one upstream, and not an upstream"));
            node.report(wrong.hint("write it under [upstreams.NAME], beside the url of that upstream"));
            continue;
        }
        let name: Arc<str> = key.into();
        upstreams.names.push(Arc::clone(&name));
        if let Some((settings, keys)) = one(name, &upstream, max_headers) {
            upstreams.settings.push(settings);
            printed.insert(key, keys);
        }
    }
    root.print("upstreams", Item::Table(printed));
    if upstreams.names.is_empty() {
        let hint = "add `app = \"http://127.0.0.1:3000\"` under [upstreams], or start with --upstream URL";
        root.report("upstreams", Wrong::new("there is no upstream").hint(hint));
    }
    upstreams
}

/// Tells of upstreams where the gate itself listens: each request would come back.
pub(super) fn advise_on_places(root: &Table<'_>, upstreams: &Upstreams, server: &[Listen], admin: &Listen) {
    let table = root.table("upstreams", SECTION);
    for Settings { name, places, .. } in &upstreams.settings {
        let mut own = server.iter().map(|listen| ("server.listen", listen)).chain([("admin.listen", admin)]);
        if let Some((key, listen)) = own.find(|(_, listen)| places.iter().any(|place| is_at(listen, place))) {
            let message = format!("oncegate itself listens here ({key} is {listen}): write where the service listens");
            table.table(name, Keys::SECTION).advise("url", message);
        }
    }
}

/// HTTP/2 has names elsewhere that are nearer to "http1".
fn protocol() -> Kind<Protocol> {
    const WORDS: [(&str, Protocol); 3] = [("auto", Protocol::Auto), ("http1", Protocol::Http1), ("h2", Protocol::H2)];
    const HTTP_2: [&str; 5] = ["http2", "http/2", "http/2.0", "h2c", "grpc"];
    let parse = |node: &Node<'_>| {
        node.word(&WORDS).map_err(|wrong| match node.text() {
            Ok(text) if HTTP_2.contains(&&*text.to_ascii_lowercase()) => wrong.hint("did you mean \"h2\"?"),
            _ => wrong,
        })
    };
    let print = |value: &Protocol| WORDS.iter().find(|(_, meant)| meant == value).map_or("", |(word, _)| word).into();
    Kind::new(|| words(&WORDS).shape(), parse, print)
}

/// Advises on upstreams whose clients get 504 before a store that does not answer is given up: they do not learn why, and
/// `store_failure` has nothing to decide. Where `client_timeout` is not below `timeout`, the attempt's own end comes first.
pub(super) fn advise_on_patience(root: &Table<'_>, upstreams: &Upstreams, settle_timeout: Duration, router: &Router) {
    let table = root.table("upstreams", SECTION);
    for Settings { name, timeout, client_timeout, .. } in &upstreams.settings {
        let is_bounded = |route: &Arc<Route>| {
            let is_resent = matches!(route.policy.recovery, Recovery::Resend(_));
            upstreams.names.get(route.upstream) == Some(name)
                && route.policy.mode.protects()
                && (client_timeout < timeout || is_resent)
        };
        if *client_timeout > settle_timeout || !router.routes().iter().any(is_bounded) {
            continue;
        }
        let table = table.table(name, Keys::SECTION);
        let key = if table.get("client_timeout").is_some() { "client_timeout" } else { "timeout" };
        let settle_timeout = show_duration(settle_timeout);
        let effect = "if the store does not answer, clients get 504 `still-running`, and store_failure has no effect";
        let mend = format!("write more than {settle_timeout}, or shorten store.settle_timeout");
        table.advise(key, format!("{effect}: a call of the store may take {settle_timeout}; {mend}"));
    }
}

/// Whether a connection to a place arrives at a listener.
fn is_at(listen: &Listen, place: &UpstreamAddress) -> bool {
    match (listen, place) {
        (Listen::Address(own), UpstreamAddress::Tcp { host, port }) => {
            let own_ip = own.ip();
            let is_host = match host.parse::<IpAddr>() {
                // What listens on `[::]` takes IPv4, too.
                Ok(ip) if own_ip.is_unspecified() => {
                    (own_ip.is_ipv6() || ip.is_ipv4()) && (ip.is_loopback() || ip.is_unspecified())
                }
                Ok(ip) => ip == own_ip,
                Err(_) => host == "localhost" && (own_ip.is_loopback() || own_ip.is_unspecified()),
            };
            own.port() == *port && is_host
        }
        (Listen::Unix(own), UpstreamAddress::Unix(path)) => own == path,
        _ => false,
    }
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
                None if names().next().is_none() => "there is no upstream: add one under [upstreams]".to_owned(),
                None => format!("the upstreams are {}", names().collect::<Vec<_>>().join(", ")),
            };
            Wrong::new(format!("there is no upstream `{text}`")).hint(hint)
        })
    }
}

/// Reads `default_upstream`: the only upstream where it is not set.
pub(super) fn default(root: &Table<'_>, upstreams: &Upstreams) -> Option<usize> {
    let place = match root.get("default_upstream") {
        Some(node) => node.accept(upstreams.find(&node)),
        None => upstreams.only(),
    }?;
    root.print("default_upstream", value(&*upstreams.names[place]));
    Some(place)
}

fn name_of(key: &str) -> Result<(), Wrong> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if !key.is_empty() && key.len() <= 128 && key.bytes().all(good) {
        return Ok(());
    }
    Err(Wrong::new("the name of an upstream has letters, digits, `-`, `_` and `.`").hint("choose a short word"))
}

fn one(name: Arc<str>, table: &Table<'_>, max_headers: usize) -> Option<(Settings, Item)> {
    if table.get("url").is_none() {
        table.report("url", Wrong::new("the upstream has no URL").hint("write url = \"http://HOST:PORT\""));
    }
    let mut keys = Keys::read(table, Keys::default());
    let client_timeout = *keys.client_timeout.get_or_insert(keys.timeout);
    let printed = keys.print_table();
    for (key, value) in [("connect_timeout", keys.connect_timeout), ("client_timeout", client_timeout)] {
        if table.get(key).is_some() && value > keys.timeout {
            table.advise(key, "it is longer than timeout, which ends the attempt first".to_owned());
        }
    }
    let Location { places, is_encrypted } = location::read(table, keys.url)?;
    let tls = if is_encrypted { Some(encryption::read(table, "url", keys.tls, &places)?) } else { None };
    if !is_encrypted && table.get("tls").is_some() {
        let useless = Wrong::new("`tls` has no effect: nothing is encrypted");
        table.report("tls", useless.hint("write url = \"https://HOST\", or remove it"));
    }
    let settings = Settings {
        name,
        places,
        tls,
        protocol: keys.protocol,
        timeout: keys.timeout,
        connect_timeout: keys.connect_timeout,
        max_connections: keys.max_connections,
        max_headers,
        reuse: keys.reuse,
        client_timeout,
    };
    Some((settings, printed))
}

/// Reads the name of an upstream that a route goes to.
pub(super) fn of_route(table: &Table<'_>, upstreams: &Upstreams) -> Option<usize> {
    if let Some(node) = table.get("upstream") {
        return node.accept(upstreams.find(&node));
    }
    if upstreams.names.len() > 1 {
        let names = upstreams.names.join(", ");
        let wrong = Wrong::new("there are several upstreams, and the route names none");
        table.report("upstream", wrong.hint(format!("write upstream = \"NAME\" with one of {names}")));
    }
    upstreams.only()
}
