//! `[server]` and `[admin]`

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

use super::admin_tokens::{self, TokenFile, token_files};
use super::declare::Shown::Example;
use super::declare::{Keys as _, keys};
use super::kinds::{Kind, file, flag, list, nested, one_or_several, text, text_as, time, time_of, words};
use super::node::{Node, Table, Wrong};
use super::routes;
use super::tls::{self, Files};
use crate::admin;
use crate::http;
use crate::http::accept::AcceptSettings;
use crate::http::forwarding::{Forwarding, Style};
use crate::http::limits::Limits;
use crate::http::socket::Listen;
use crate::http::upgrade::{Protocol, Upgrades};

keys! {
    /// Where clients connect.
    pub(super) struct Server "[server]" {
        /// An IP address or "localhost", and a port. Several stand in a list: ["127.0.0.1:8080", "[::1]:8080"].
        /// "0.0.0.0:8080" is every IPv4 address of the machine. "unix:PATH" is a unix socket, whose clients have the address
        /// 127.0.0.1. "systemd" is every TCP or unix socket that the process inherits (socket activation), "systemd:NAME"
        /// those of one name (FileDescriptorName= of the socket unit). Each speaks HTTP/1.1, and HTTP/2 with prior knowledge.
        listen: Vec<Listen> = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)).into()]
            => one_or_several(FILLED, || text(format!("^({ADDRESS}|unix:.{{0,99}}[^/])$"), listen));
        /// Who may connect to the unix sockets of `listen`: the mode of their files. Each file is created at the start and
        /// removed at the end; a socket that another process still answers on is not taken over.
        socket_mode: u32 = 0o660 => file_mode();
        /// Encrypts the connections of all TCP sockets (TLS 1.2 and 1.3; HTTP/2 and HTTP/1.1 by ALPN): PEM files with the
        /// certificate chain and with its key. With `client_ca`, each client must have a certificate signed by one of the
        /// authorities in that file; with `client_crl` (their lists of revoked certificates), one that is known not to be
        /// revoked, as with `crl` of an upstream. Files that change are read again, at once and at SIGHUP, for connections
        /// opened from then on; files that cannot be used change nothing.
        tls: Files = Files::default() => nested(), Example(
            r#"{ cert = "/etc/oncegate/cert.pem", key = "/etc/oncegate/key.pem", client_ca = "/etc/oncegate/ca.pem", client_crl = "/etc/oncegate/crl.pem" }"#
        );
        /// Whether each connection begins with a PROXY protocol header (version 1 or 2), which has the client's address.
        /// Only `trusted_proxies` may connect then; connections from other addresses, or without the header, are closed.
        proxy_protocol: bool = false => flag();
        /// How long requests are still accepted after SIGTERM, while `/readyz` answers 503 already: as long as a balancer
        /// needs to notice. A second signal ends it. drain_timeout counts from then on.
        shutdown_delay: Duration = Duration::ZERO => time();
        /// How long SIGTERM waits for what runs: attempts, other requests, and connections that have switched protocols. Attempts
        /// that do not end in time are recorded as unknown, and clients without an answer get 504. If omitted, the longest timeout
        /// of an upstream.
        drain_timeout: Option<Duration> = None => time().optional(), Example("\"60s\"");
        /// The proxies in front of this one: addresses and networks, such as ["10.0.0.0/8", "fd00::/8", "127.0.0.1"]. Only
        /// these are believed about a client: its address (for a scope with `client-ip`) is the nearest one that is not
        /// among them. The `forwarded` headers of any other sender are replaced.
        trusted_proxies: Vec<IpNet> = Vec::new() => list(proxies());
        /// Which headers name the client, both those believed from trusted proxies and those sent to the upstream:
        /// "x-forwarded" (X-Forwarded-For, -Proto and -Host), "rfc7239" (Forwarded), or "both". The others are dropped. With
        /// "both", the trusted proxies must set or drop both.
        forwarded: Style = Style::default()
            => words(&[("x-forwarded", Style::XForwarded), ("rfc7239", Style::Rfc7239), ("both", Style::Both)]);
        /// The protocols that clients may switch to with `Upgrade`, each as "NAME" (in any version) or "NAME/VERSION". After
        /// a switch, bytes pass both ways unread. An upgrade to any other protocol is ignored: the request is forwarded
        /// without it.
        upgrades: Vec<Protocol> = Upgrades::default().protocols().to_vec() => list(text(PROTOCOL, protocol));
    }
}

keys! {
    /// The listener of health, metrics and the records API.
    pub(super) struct Admin "[admin]" {
        /// One address, or one inherited socket, such as "systemd:admin". Clients must not reach it.
        listen: Listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 9090)).into()
            => text(format!("^({ADDRESS})$"), admin_listen);
        /// A file with a bearer token of an operator: one word, without white space. Use at least 32 characters, so that
        /// it cannot be guessed. This or `tokens` is required unless `listen` is a loopback address.
        token_file: Option<PathBuf> = None => file().optional(), Example("\"/run/secrets/oncegate-admin-token\"");
        /// Bearer tokens with names, and with roles: what their holders may do. A reload takes other tokens. See
        /// docs/operate/hardening.md.
        tokens: Vec<TokenFile> = Vec::new()
            => token_files(), Example("[{ name = \"ops\", role = \"operator\", file = \"/run/secrets/oncegate-ops-token\" }]");
        /// Encrypts its connections, with the files that `tls` of [server] has: without HTTP/2. With `client_ca`, probes and
        /// scrapers need a certificate too. Commands show one with --admin-cert and --admin-key.
        tls: Files = Files::default() => nested(), Example(
            r#"{ cert = "/etc/oncegate/cert.pem", key = "/etc/oncegate/key.pem", client_ca = "/etc/oncegate/ca.pem" }"#
        );
        /// How long the store keeps the entries of the audit log: what operators did, when and why.
        audit_ttl: Duration = Duration::from_secs(90 * 24 * 60 * 60) => time_of(Duration::from_secs(1)..=Duration::MAX);
    }
}

/// What `[server]` comes to.
pub(super) struct Serving {
    /// The settings of the listeners.
    pub settings: http::server::Settings,
    /// Whose forwarding headers count, and which.
    pub forwarding: Forwarding,
    /// The protocols that clients may switch to.
    pub upgrades: Upgrades,
}

const FILLED: &str = "write at least one, or remove it";

/// An address and a port, or an inherited socket.
const ADDRESS: &str =
    r"systemd(:[!-9;-~]{1,255})?|([0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9A-Fa-f:.]+(%[0-9]+)?\]|localhost):[0-9]{1,5}";

/// A protocol that carries no requests: a name, or a name and a version.
const PROTOCOL: &str = r"^(?!([Hh]2[Cc]?|[Hh]3|[Hh][Tt][Tt][Pp]|[Tt][Ll][Ss])(/|$))[!#$%&'*+.^_`|~0-9A-Za-z-]+(/[!#$%&'*+.^_`|~0-9A-Za-z-]+)?$";

/// The mode of a file, as `chmod` takes it.
fn file_mode() -> Kind<u32> {
    text_as("^[0-7]{3}$|^0[0-7]{3}$", mode, |mode| format!("{mode:04o}"))
}

/// An IP address, or a network as its first address and the length of its prefix.
fn proxies() -> Kind<IpNet> {
    let pattern = r"^([0-9]{1,3}(\.[0-9]{1,3}){3}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)(/[0-9]{1,3})?$";
    text_as(pattern, network, |network| match network.prefix_len() == network.max_prefix_len() {
        true => network.addr().to_string(),
        false => network.to_string(),
    })
}

/// Reads `[server]`, given the longest timeout of an upstream and `[limits]`.
pub(super) fn server(root: &Table<'_>, longest: Duration, limits: Limits) -> Serving {
    let table = root.table("server", Server::SECTION);
    let mut server = Server::read(&table, Server::default());
    let drain_timeout = *server.drain_timeout.get_or_insert(longest);
    root.print("server", server.print_table());
    for (place, one) in server.listen.iter().enumerate() {
        if server.listen[..place].iter().any(|other| other.collides_with(one)) {
            table.report("listen", Wrong::new(format!("{one} is taken twice")).hint("remove one of them"));
        }
    }
    if let Some(network) = server.trusted_proxies.iter().find(|network| network.prefix_len() == 0) {
        let advice = "is every address: any client can claim any address, unless only a proxy can connect";
        table.advise("trusted_proxies", format!("{network} {advice}"));
    }
    if server.proxy_protocol && table.get("trusted_proxies").is_none() {
        let closed = Wrong::new("no client could connect: only trusted proxies may send this header");
        table.report("proxy_protocol", closed.hint("name them in `trusted_proxies`"));
    }
    let proxies = server.proxy_protocol.then(|| server.trusted_proxies.clone());
    let accept = AcceptSettings { tls: tls::read(&table, server.tls), proxies };
    Serving {
        settings: http::server::Settings {
            listen: server.listen,
            shutdown_delay: server.shutdown_delay,
            drain_timeout,
            limits,
            accept,
            socket_mode: server.socket_mode,
        },
        forwarding: Forwarding {
            trusted: server.trusted_proxies,
            style: server.forwarded,
            is_proxied: server.proxy_protocol,
        },
        upgrades: Upgrades::new(server.upgrades),
    }
}

/// Rights to a file, as `chmod` takes them.
fn mode(node: &Node<'_>) -> Result<u32, Wrong> {
    let text = node.filled()?;
    let is_octal = (3..=4).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    match u32::from_str_radix(text, 8) {
        Ok(mode) if is_octal && mode <= 0o777 => Ok(mode),
        _ => {
            let wrong = Wrong::new(format!("`{text}` is not a file mode"));
            Err(wrong.hint("write a 0 and three octal digits, such as \"0660\""))
        }
    }
}

/// Reads the name of a protocol that `Upgrade` may ask for.
fn protocol(node: &Node<'_>) -> Result<Protocol, Wrong> {
    let hint = "name protocols that carry no requests, such as \"websocket\"; others are ignored";
    Protocol::parse(node.filled()?).map_err(|what| Wrong::new(what).hint(hint))
}

/// Holds that nothing is scoped by the certificates of clients that are not asked for any.
pub(super) fn check_scopes(root: &Table<'_>) {
    // Where its files are wrong, that is reported, and nothing is known of what they hold.
    if root.table("server", Server::SECTION).table("tls", tls::Files::SECTION).get("client_ca").is_some() {
        return;
    }
    routes::refuse_scope_parts(root, "client-cert:", || {
        Wrong::new("no client has a certificate here: the server does not ask for one")
            .hint("name who vouches for clients: [server] tls = { cert = ..., key = ..., client_ca = ... }")
    });
}

/// Reads `[admin] listen` alone, its default if it is wrong, and whether the listener encrypts.
pub(super) fn admin_address(root: &Table<'_>) -> (Listen, bool) {
    let admin = Admin::read(&root.table("admin", Admin::SECTION), Admin::default());
    (admin.listen, admin.tls.cert.is_some())
}

/// Reads `[admin]`, and its tokens. Its address must not be one of `server`.
pub(super) fn admin(root: &Table<'_>, server: &[Listen]) -> admin::Settings {
    let table = root.table("admin", Admin::SECTION);
    let admin = Admin::read(&table, Admin::default());
    root.print("admin", admin.print_table());
    let tls = tls::read(&table, admin.tls);
    let tokens = admin_tokens::read(&table, admin.token_file.as_deref(), &admin.tokens);
    // Of an inherited socket only the start knows the address.
    if let Listen::Address(listen) = &admin.listen
        && !listen.ip().is_loopback()
        && admin.tokens.is_empty()
        && table.get("token_file").is_none()
        && table.get("tokens").is_none_or(|tokens| tokens.items().is_some_and(|tokens| tokens.is_empty()))
    {
        let wrong = Wrong::new(format!("{listen} is not a loopback address, so the records API needs a token"));
        table.report(
            "token_file",
            wrong.hint("name a file that holds a token, here or in `tokens`, or listen on 127.0.0.1"),
        );
    }
    let listen = admin.listen;
    if server.iter().any(|other| other.collides_with(&listen)) {
        let wrong = Wrong::new(format!("{listen} is taken by server.listen too"));
        let own = match listen {
            Listen::Address(_) | Listen::Unix(_) => "give each listener a port of its own",
            Listen::Inherited(_) => "write \"systemd:NAME\", with a FileDescriptorName= of the socket unit",
        };
        table.report("listen", wrong.hint(own));
    }
    admin::Settings { listen, tokens, tls, audit_ttl: admin.audit_ttl }
}

fn admin_listen(node: &Node<'_>) -> Result<Listen, Wrong> {
    let text = node.filled()?;
    if text.starts_with("unix:") || is_path(text) {
        return Err(Wrong::new("the admin listener has no unix socket").hint("write an address and a port"));
    }
    listen(node)
}

/// Reads an address, or `systemd` or `systemd:NAME`.
fn listen(node: &Node<'_>) -> Result<Listen, Wrong> {
    if let Some(path) = node.filled()?.strip_prefix("unix:") {
        return socket_path(path).map(Listen::Unix);
    }
    match node.filled()?.strip_prefix("systemd") {
        Some("") => Ok(Listen::Inherited(None)),
        Some(name) if name.starts_with(':') => Ok(Listen::Inherited(Some(socket_name(&name[1..])?))),
        _ => address(node).map(Listen::Address),
    }
}

/// Reads the path of a unix socket (unix(7)).
fn socket_path(path: &str) -> Result<PathBuf, Wrong> {
    const LONGEST: usize = 100;
    if path.is_empty() || path.ends_with('/') || path.contains('\0') || path.len() > LONGEST {
        let wrong =
            Wrong::new(format!("the path of a socket is from 1 to {LONGEST} bytes long, and ends with its name"));
        return Err(wrong.hint("write \"unix:/run/oncegate/gate.sock\""));
    }
    Ok(PathBuf::from(path))
}

/// Reads the name of an inherited socket (systemd.socket(5), `FileDescriptorName=`).
fn socket_name(name: &str) -> Result<String, Wrong> {
    if !name.is_empty() && name.len() <= 255 && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':') {
        return Ok(name.to_owned());
    }
    let wrong = Wrong::new("the name of a socket is visible ASCII without `:`, and at most 255 characters long");
    Err(wrong.hint("write \"systemd:NAME\" with the FileDescriptorName= of the socket unit, such as \"systemd:admin\""))
}

/// An address, or a network as its first address and the length of its prefix (CIDR, RFC 4632).
fn network(node: &Node<'_>) -> Result<IpNet, Wrong> {
    let text = node.filled()?;
    let example = "write an address or a network, such as \"10.1.2.3\", \"10.0.0.0/8\" or \"fd00::/8\"";
    let network = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
    let Ok(network) = network else {
        let wrong = Wrong::new(format!("`{text}` is neither an address nor a network"));
        if text == "*" {
            return Err(wrong.hint("write \"0.0.0.0/0\" and \"::/0\" to trust every address"));
        }
        if text.parse::<SocketAddr>().is_ok() {
            return Err(wrong.hint("leave out the port: a proxy connects from any"));
        }
        return Err(wrong.hint(example));
    };
    if network.addr() != network.network() {
        let wrong = Wrong::new(format!("`{text}` has more than its first {} bits", network.prefix_len()));
        return Err(wrong.hint(format!(
            "write \"{}\", or \"{}\" for this address alone",
            network.trunc(),
            network.addr()
        )));
    }
    if let IpNet::V6(six) = network
        && let Some(four) = six.addr().to_ipv4_mapped()
    {
        let wrong = Wrong::new(format!("`{text}` is IPv4 written as IPv6"));
        let prefix = six.prefix_len().saturating_sub(96);
        return Err(wrong.hint(format!("write \"{four}/{prefix}\"")));
    }
    Ok(network)
}

/// Whether it is the path of a socket, and no address.
fn is_path(text: &str) -> bool {
    text.starts_with(['/', '.']) || text.ends_with(".sock")
}

fn address(node: &Node<'_>) -> Result<SocketAddr, Wrong> {
    let text = node.filled()?;
    let host_and_port = "write an address and a port, such as \"127.0.0.1:8080\" or \"[::1]:8080\"";
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Ok(address);
    }
    if text.starts_with("fd:") {
        return Err(Wrong::new("a socket is not named by its number").hint("write \"systemd\" or \"systemd:NAME\""));
    }
    let wrong = Wrong::new(format!("`{text}` is not an address"));
    if is_path(text) {
        return Err(wrong.hint(format!("write \"unix:{text}\" for a socket of that path")));
    }
    let port = |text: &str| text.parse::<u16>().ok();
    match text.rsplit_once(':') {
        Some(("localhost", number)) if port(number).is_some() => {
            Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port(number).unwrap_or_default())))
        }
        Some(("" | "*", number)) if port(number).is_some() => {
            Err(wrong.hint(format!("write \"0.0.0.0:{number}\" or \"[::]:{number}\" for every interface")))
        }
        None if port(text).is_some() => Err(wrong.hint(format!("write \"127.0.0.1:{text}\""))),
        None if text.parse::<IpAddr>().is_ok() => Err(wrong.hint("add a port")),
        _ => Err(wrong.hint(host_and_port)),
    }
}
