//! `[server]` and `[admin]`

use std::fs::File;
use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use figment::value::Value;
use ipnet::IpNet;

use super::node::{Node, Table, Wrong};
use super::{SecretFile, keys, tls};
use crate::admin::Token;
use crate::http;
use crate::http::door::Door;
use crate::http::forwarding::{Forwarding, Style};
use crate::http::upgrade::{Protocol, Upgrades};

/// The words of `server.forwarded`.
pub(super) const STYLES: [(&str, Style); 3] =
    [("x-forwarded", Style::XForwarded), ("rfc7239", Style::Rfc7239), ("both", Style::Both)];
use crate::http::limits::Limits;
use crate::http::listen::Listen;

/// `[server]`
pub(super) struct Server {
    /// Where it listens.
    pub listen: Vec<Listen>,
    /// How long SIGTERM waits; nothing for the longest upstream timeout.
    pub drain_timeout: Option<Duration>,
    /// Whose forwarding headers count, and which.
    pub forwarding: Forwarding,
    /// The protocols that clients may switch to.
    pub upgrades: Upgrades,
    /// What is asked of connections.
    pub door: Door,
    /// The rights to unix sockets.
    pub socket_mode: u32,
}

/// `[admin]`
pub(super) struct Admin {
    /// Where it listens.
    pub listen: Listen,
    /// The token of the records API.
    pub token: Option<SecretFile<Token>>,
}

impl Server {
    /// The settings, given the longest upstream timeout and `[limits]`.
    pub(super) fn settings(self, longest: Duration, limits: Limits) -> http::server::Settings {
        http::server::Settings {
            listen: self.listen,
            drain_timeout: self.drain_timeout.unwrap_or(longest),
            limits,
            door: self.door,
            socket_mode: self.socket_mode,
        }
    }
}

/// Reads `[server]`.
pub(super) fn server(root: &Table<'_>) -> Server {
    let table = root.table("server", &keys::SERVER);
    let listen = match table.get("listen").map(|node| node.value) {
        Some(Value::Array(..)) => table.read_list("listen", listen),
        _ => table.read("listen", listen).map(|listen| vec![listen]),
    };
    let listen = listen.unwrap_or_else(|| vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)).into()]);
    if listen.is_empty() {
        table.report("listen", Wrong::new("there is no address").hint("write at least one, or remove it"));
    }
    for (place, one) in listen.iter().enumerate() {
        if listen[..place].iter().any(|other| other.collides_with(one)) {
            table.report("listen", Wrong::new(format!("{one} is taken twice")).hint("remove one of them"));
        }
    }
    let is_proxied = table.read("proxy_protocol", Node::flag).unwrap_or_default();
    let forwarding = Forwarding {
        trusted: table.read_list("trusted_proxies", network).unwrap_or_default(),
        style: table.read("forwarded", |node| node.word(&STYLES, &[])).unwrap_or_default(),
        is_proxied,
    };
    if let Some(everybody) = forwarding.trusted.iter().find(|network| network.prefix_len() == 0) {
        let advice =
            "is everybody: any client can say that it comes from wherever it likes, unless only a proxy can connect";
        table.advise("trusted_proxies", format!("{everybody} {advice}"));
    }
    if is_proxied && table.get("trusted_proxies").is_none() {
        let nobody = Wrong::new("nobody could connect: only trusted proxies may say for whom they do");
        table.report("proxy_protocol", nobody.hint("name them in `trusted_proxies`"));
    }
    let door = Door { tls: tls::read(&table), proxies: is_proxied.then(|| forwarding.trusted.clone()) };
    let socket_mode = table.read("socket_mode", mode).unwrap_or(SOCKET_MODE);
    let upgrades = table.read_list("upgrades", protocol).map(Upgrades::new).unwrap_or_default();
    Server {
        listen,
        drain_timeout: table.read("drain_timeout", Node::duration),
        forwarding,
        upgrades,
        door,
        socket_mode,
    }
}

/// The rights to a unix socket where nothing is said: its owner and its group.
pub(super) const SOCKET_MODE: u32 = 0o660;

/// Rights to a file, as `chmod` takes them.
fn mode(node: &Node<'_>) -> Result<u32, Wrong> {
    let text = node.filled()?;
    let is_octal = (3..=4).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    match u32::from_str_radix(text, 8) {
        Ok(mode) if is_octal && mode <= 0o777 => Ok(mode),
        _ => {
            let wrong = Wrong::new(format!("`{text}` is no mode of a file"));
            Err(wrong.hint("write three octal digits behind a 0, such as \"0660\""))
        }
    }
}

/// Reads the name of a protocol that `Upgrade` may ask for.
fn protocol(node: &Node<'_>) -> Result<Protocol, Wrong> {
    let hint = "name protocols that carry no requests, such as \"websocket\"; others are ignored";
    Protocol::parse(node.filled()?).map_err(|what| Wrong::new(what).hint(hint))
}

/// Holds that nothing is scoped by the certificates of clients that are not asked for any.
pub(super) fn check_scopes(root: &Table<'_>, server: &Server) {
    if server.door.tls.as_ref().is_some_and(|secure| secure.files.client_ca.is_some()) {
        return;
    }
    let routes = root.tables("routes", &keys::ROUTE).unwrap_or_default();
    for table in routes.into_iter().chain([root.table("defaults", &keys::DEFAULTS)]) {
        let parts = table.get("scope").and_then(|scope| scope.items()).unwrap_or_default();
        for part in parts.into_iter().filter(|part| part.text().is_ok_and(|text| text.starts_with("client-cert:"))) {
            let wrong = Wrong::new("no client has a certificate here: the server does not ask for one");
            part.report(
                wrong.hint("name who vouches for clients: [server] tls = { cert = ..., key = ..., client_ca = ... }"),
            );
        }
    }
}

/// Reads `[admin]`, and its token. Its address must not be one of `server`.
pub(super) fn admin(root: &Table<'_>, server: &Server) -> Admin {
    let table = root.table("admin", &keys::ADMIN);
    let listen = table.read("listen", |node| match listen(node)? {
        Listen::Unix(_) => Err(Wrong::new("the admin listener has no unix socket").hint("write an address and a port")),
        listen => Ok(listen),
    });
    let token = table.read("token_file", token);
    // Of an inherited socket only the start knows the address.
    if let Some(Listen::Address(listen)) = &listen
        && !listen.ip().is_loopback()
        && table.get("token_file").is_none()
    {
        let wrong = Wrong::new(format!("{listen} is not a loopback address, so the records API needs a token"));
        table.report("token_file", wrong.hint("name a file that holds a token, or listen on 127.0.0.1"));
    }
    let listen = listen.unwrap_or_else(|| SocketAddr::from((Ipv4Addr::LOCALHOST, 9090)).into());
    if server.listen.iter().any(|other| other.collides_with(&listen)) {
        let wrong = Wrong::new(format!("{listen} is taken by server.listen too"));
        let own = match listen {
            Listen::Address(_) | Listen::Unix(_) => "give each listener a port of its own",
            Listen::Inherited(_) => "write \"systemd:NAME\", with a FileDescriptorName= of the socket unit",
        };
        table.report("listen", wrong.hint(own));
    }
    Admin { listen, token }
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
    if path.is_empty() || path.contains('\0') || path.len() > LONGEST {
        let wrong = Wrong::new(format!("the path of a socket is from 1 to {LONGEST} bytes long"));
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
            return Err(wrong.hint("write \"0.0.0.0/0\" and \"::/0\" to believe everybody"));
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

fn token(node: &Node<'_>) -> Result<SecretFile<Token>, Wrong> {
    let (path, content) = secret_file(node)?;
    let hint = "put one line of letters and digits into it, such as `openssl rand -hex 32` prints";
    if content.is_empty() {
        return Err(Wrong::new(format!("{} is empty", path.display())).hint(hint));
    }
    match String::from_utf8(content) {
        // What a client can send after `Bearer` (RFC 6750, section 2.1).
        Ok(token) if token.bytes().all(|byte| byte.is_ascii_graphic()) => Ok((path, Token(token))),
        _ => Err(Wrong::new(format!("{} holds more than one word of visible ASCII", path.display())).hint(hint)),
    }
}

/// The longest file of a secret, in bytes.
const LARGEST_SECRET: u64 = 64 * 1024;

/// What to do about a file that cannot be read.
pub(super) const FILE_HINT: &str =
    "the path counts from where oncegate is started; the user that runs it must be able to read the file";

/// Reads the file of a secret, without the white space at both ends.
pub(super) fn secret_file(node: &Node<'_>) -> Result<SecretFile<Vec<u8>>, Wrong> {
    let path = PathBuf::from(node.filled()?);
    let mut content = Vec::new();
    let reading = File::open(&path).and_then(|file| file.take(LARGEST_SECRET + 1).read_to_end(&mut content));
    if let Err(error) = reading {
        let wrong = Wrong::new(format!("{} cannot be read: {error}", path.display()));
        return Err(wrong.hint(FILE_HINT));
    }
    if content.len() as u64 > LARGEST_SECRET {
        let wrong = Wrong::new(format!("{} is longer than {LARGEST_SECRET} bytes", path.display()));
        return Err(wrong.hint("name a file that holds nothing but the secret"));
    }
    Ok((path, content.trim_ascii().to_vec()))
}
