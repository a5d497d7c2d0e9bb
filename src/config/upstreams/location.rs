//! `url` of an upstream: one or several places.

use std::net::{Ipv4Addr, Ipv6Addr};

use http::Uri;
use http::uri::Authority;

use crate::config::kinds::{Kind, text_as};
use crate::config::node::{Node, Table, Wrong};
use crate::http::upstream::UpstreamAddress;

/// Where an upstream is.
pub(super) struct Location {
    /// Never empty.
    pub places: Vec<UpstreamAddress>,
    pub is_encrypted: bool,
}

/// One place, and whether connections to it are encrypted.
pub(in crate::config) type Endpoint = (UpstreamAddress, bool);

/// The longest path of a socket, in bytes (unix(7): 108 with the zero behind it).
const LONGEST_PATH: usize = 107;

/// The longest name, and the longest part of one (RFC 1035, 2.3.4: 255 with the lengths of its parts).
const LONGEST_NAME: usize = 253;
const LONGEST_LABEL: usize = 63;

/// The pattern of [`endpoint`], but for the length of a host and for impossible IPv4 addresses. An address of IPv6 has one `::`, or
/// else begins with six groups. A zone may follow it.
pub(super) const PATTERN: &str = concat!(
    r"^(https?://(\[(?![^\]]*::[^\]]*::)(?=[^\]]*::|([0-9A-Fa-f]{1,4}:){6})[0-9A-Fa-f:.]+(%(?!25)[^\s/?#@:\[\]]+)?\]|",
    r"[!$-)+,0-9;=A-Z_a-z~-]{1,63}(\.[!$-)+,0-9;=A-Z_a-z~-]{1,63})*\.?)(:[0-9]{1,5})?/?|unix:(//|(?!//)).{0,106}[^/])$",
);

/// `http://HOST:PORT`, `https://HOST:PORT` or `unix:PATH`
pub(in crate::config) fn endpoint() -> Kind<Endpoint> {
    text_as(PATTERN, place, |(place, is_encrypted)| match place {
        UpstreamAddress::Tcp { .. } => format!("{}://{place}", if *is_encrypted { "https" } else { "http" }),
        UpstreamAddress::Unix(_) => place.to_string(),
    })
}

pub(super) const FORM: &str = "write \"http://HOST:PORT\", \"https://HOST:PORT\" or \"unix:PATH\"";

/// Holds that several places differ in nothing but where they are; `None` if they do not, which is reported, or if there
/// are none.
pub(super) fn read(table: &Table<'_>, endpoints: Vec<Endpoint>) -> Option<Location> {
    let (_, is_encrypted) = *endpoints.first()?;
    if endpoints.iter().any(|(_, encrypted)| *encrypted != is_encrypted) {
        let mixed = Wrong::new("some of these are encrypted, and some are not");
        table.report("url", mixed.hint("write https:// in front of all, or of none"));
        return None;
    }
    let places: Vec<UpstreamAddress> = endpoints.into_iter().map(|(place, _)| place).collect();
    if let Some(twice) = places.iter().enumerate().find(|(at, place)| places[..*at].contains(place)) {
        table.report("url", Wrong::new(format!("`{}` stands twice", twice.1)).hint("remove one of them"));
        return None;
    }
    Some(Location { places, is_encrypted })
}

/// Reads one. What is wrong is said without showing it: it may hold a password.
fn place(node: &Node<'_>) -> Result<Endpoint, Wrong> {
    let text = node.filled()?;
    if let Some(path) = text.strip_prefix("unix:") {
        let path = path.strip_prefix("//").unwrap_or(path);
        if path.is_empty() || path.ends_with('/') || path.contains('\0') {
            return Err(Wrong::new("the path of the socket is missing").hint("write \"unix:/run/app.sock\""));
        }
        if path.len() > LONGEST_PATH {
            let long =
                Wrong::new(format!("the path of the socket has {} bytes, and may have {LONGEST_PATH}", path.len()));
            return Err(long.hint("put the socket where its path is shorter, such as \"unix:/run/app.sock\""));
        }
        return Ok((UpstreamAddress::Unix(path.into()), false));
    }
    let (usual_port, is_encrypted) = match text.split_once("://") {
        Some(("http", _)) => (80, false),
        Some(("https", _)) => (443, true),
        scheme => {
            let wrong = Wrong::new("the URL starts with `http://`, `https://` or `unix:`");
            // Without an `@` there is no password, and nothing of one is shown.
            let is_address = scheme.is_none()
                && !text.contains('@')
                && text.parse::<Authority>().is_ok_and(|address| address.port_u16().is_some());
            return Err(wrong.hint(if is_address { format!("write \"http://{text}\"") } else { FORM.to_owned() }));
        }
    };
    if !text.is_ascii() && !text.contains('@') {
        let foreign = Wrong::new("the URL has letters outside ASCII");
        return Err(foreign.hint("write a host as DNS has it, with `xn--` in front of such parts"));
    }
    let uri: Uri = text.parse().map_err(|_| Wrong::new("this is not a URL").hint(FORM))?;
    let Some(authority) = uri.authority() else {
        return Err(Wrong::new("this is not a URL").hint(FORM));
    };
    if authority.as_str().contains('@') {
        let wrong = Wrong::new("the URL has no user and no password");
        return Err(wrong.hint("remove them: the client's own Authorization header is passed on"));
    }
    if uri.path() != "/" {
        let wrong = Wrong::new("the URL has no path");
        return Err(wrong.hint(format!("{FORM}: the path of a request is passed on as it is")));
    }
    if uri.query().is_some() || text.contains('#') {
        return Err(Wrong::new("the URL has no query and no fragment").hint(FORM));
    }
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let port = match authority.as_str().strip_prefix(authority.host()) {
        Some("") => Some(usual_port),
        _ => authority.port_u16(),
    };
    match port {
        // As RFC 6874 has it: the resolver would take the digits for a part of the zone.
        _ if host.contains("%25") => {
            Err(Wrong::new("the `%` before the zone of an address is not encoded").hint("write `%eth0`, not `%25eth0`"))
        }
        _ if authority.host().starts_with('[') && !is_ipv6(host) => {
            Err(Wrong::new("what stands in brackets is not an IPv6 address")
                .hint("write one such as \"http://[::1]:3000\""))
        }
        Some(port) if port > 0 && !host.is_empty() => {
            if !is_ipv6(host) {
                name(host)?;
            }
            Ok((UpstreamAddress::Tcp { host: host.to_owned(), port }, is_encrypted))
        }
        _ => Err(Wrong::new("the URL needs a host and a port from 1 to 65535").hint(FORM)),
    }
}

/// Holds that a host is an IPv4 address, or a name that DNS can have.
fn name(host: &str) -> Result<(), Wrong> {
    let labels = || host.strip_suffix('.').unwrap_or(host).split('.');
    let is_number = |label: &str| label.bytes().all(|byte| byte.is_ascii_digit());
    if host.len() > LONGEST_NAME || labels().any(|label| label.len() > LONGEST_LABEL) {
        let long = format!("a host has {LONGEST_NAME} bytes at most, and {LONGEST_LABEL} between two dots");
        return Err(Wrong::new(long).hint("write a name that DNS can have, or an address"));
    }
    if host.contains('*') || labels().any(str::is_empty) {
        let wrong = Wrong::new("the host is neither a name nor an address");
        return Err(wrong.hint("write the name of one server, with single dots between its parts"));
    }
    // Fewer numbers are an address to the system too.
    if labels().count() > 3 && labels().all(is_number) && host.parse::<Ipv4Addr>().is_err() {
        let wrong = Wrong::new("the host is not an IPv4 address");
        return Err(wrong.hint("write four numbers from 0 to 255, without leading zeros"));
    }
    Ok(())
}

/// Whether it is an address of IPv6, with a zone or without.
pub(in crate::config) fn is_ipv6(host: &str) -> bool {
    let (address, zone) = host.split_once('%').unwrap_or((host, "eth0"));
    address.parse::<Ipv6Addr>().is_ok() && !zone.is_empty()
}
