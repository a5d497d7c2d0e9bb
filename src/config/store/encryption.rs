//! `sslmode`, and the files that go with it.

use rustls::ClientConfig;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode, SslNegotiation};

use super::Wrong;
use super::location::{Location, is_loopback};
use crate::config::pem;
use crate::config::suggest::nearest;
use crate::tls::{Identity, Roots, Trust};

/// What `sslmode` says, in libpq's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Nothing is encrypted.
    Disable,
    /// What the server is able to encrypt is encrypted.
    Prefer,
    /// Everything is encrypted, to whomever it is that answers.
    Require,
    /// The server has a certificate that a root vouches for.
    VerifyCa,
    /// And that certificate names the host.
    VerifyFull,
}

const MODES: [(&str, Mode); 5] = [
    ("disable", Mode::Disable),
    ("prefer", Mode::Prefer),
    ("require", Mode::Require),
    ("verify-ca", Mode::VerifyCa),
    ("verify-full", Mode::VerifyFull),
];

/// How connections are encrypted.
pub(super) struct Encryption {
    pub mode: Mode,
    pub client: Option<ClientConfig>,
}

/// Reads what concerns encryption into `servers`, whose hosts are known.
pub(super) fn read(location: &mut Location, servers: &mut Config, wrong: &mut Vec<Wrong>) -> Encryption {
    let root = location.take("sslrootcert");
    let mode = mode(location.take("sslmode").as_deref(), root.as_deref(), wrong);
    let identity = identity(location.take("sslcert"), location.take("sslkey"), mode, wrong);
    negotiation(location.take("sslnegotiation").as_deref(), mode, servers, wrong);
    let is_socket = |host: &Host| matches!(host, Host::Unix(_));
    let sockets = servers.get_hosts().iter().filter(|host| is_socket(host)).count();
    if sockets > 0 && sockets < servers.get_hosts().len() && mode != Mode::Disable {
        let mixed = Wrong::new("sockets and hosts stand side by side, and nothing is encrypted on a socket");
        wrong.push(mixed.hint("name hosts only, or write sslmode=disable"));
    }
    let trust = match mode {
        // To a socket of the file system nothing is encrypted, whatever is said.
        _ if sockets > 0 => None,
        Mode::Disable => None,
        Mode::Prefer | Mode::Require => Some(Trust::Anybody),
        Mode::VerifyCa => roots(root.as_deref(), wrong).map(Trust::Certificate),
        Mode::VerifyFull => roots(root.as_deref(), wrong).map(Trust::Host),
    };
    let client = trust.and_then(|trust| pem::client(trust, identity, ("sslcert", "sslkey"), wrong));
    servers.ssl_mode(match (mode, sockets) {
        (Mode::Disable, _) | (_, 1..) => SslMode::Disable,
        (Mode::Prefer, _) => SslMode::Prefer,
        _ => SslMode::Require,
    });
    Encryption { mode, client }
}

/// What to know of a server that need not prove who it is; nothing where it is on this machine.
pub(super) fn advice(servers: &Config, encryption: &Encryption) -> Option<String> {
    let advice = match encryption.mode {
        Mode::VerifyCa | Mode::VerifyFull => return None,
        Mode::Disable => "nothing is encrypted on the way to",
        Mode::Prefer => "connections are encrypted only if the server offers it, and without proof that the server is",
        Mode::Require => "connections are encrypted, but without proof that the server is",
    };
    let far = servers.get_hosts().iter().find_map(|host| match host {
        Host::Tcp(host) if !is_loopback(host) => Some(host),
        _ => None,
    })?;
    Some(format!("{advice} {far}: write sslmode=verify-full, with sslrootcert=FILE unless the system knows its root"))
}

fn mode(word: Option<&str>, root: Option<&str>, wrong: &mut Vec<Wrong>) -> Mode {
    let Some(word) = word else {
        // A configured root means that certificates are to be verified.
        return if root.is_some() { Mode::VerifyFull } else { Mode::Prefer };
    };
    let Some((_, mode)) = MODES.iter().find(|(known, _)| *known == word) else {
        let hint = match nearest(word, MODES.iter().map(|(known, _)| *known)) {
            Some(near) => format!("did you mean sslmode={near}?"),
            None => "write sslmode=verify-full, so that the server has to prove who it is".to_owned(),
        };
        let choice = "`sslmode` is disable, prefer, require, verify-ca or verify-full";
        wrong.push(Wrong::new(choice).hint(hint));
        return Mode::Prefer;
    };
    match (mode, root) {
        (Mode::VerifyCa, None) | (Mode::Require | Mode::VerifyCa, Some("system")) => {
            let weak = Wrong::new("any server that a public authority knows would do, since its name is not checked");
            wrong.push(weak.hint("write sslmode=verify-full, or name your own authority's file: sslrootcert=FILE"));
            Mode::VerifyFull
        }
        (Mode::Disable | Mode::Prefer, Some(_)) => {
            let useless = Wrong::new("`sslrootcert` is of no use where `sslmode` checks nothing");
            wrong.push(useless.hint("write sslmode=verify-full, or remove sslrootcert"));
            *mode
        }
        // As libpq does. Words that mean less than they could are refused as it does too.
        (Mode::Require, Some(_)) => Mode::VerifyCa,
        _ => *mode,
    }
}

fn negotiation(word: Option<&str>, mode: Mode, servers: &mut Config, wrong: &mut Vec<Wrong>) {
    match word {
        None | Some("postgres") => {}
        Some("direct") if matches!(mode, Mode::Disable | Mode::Prefer) => {
            let weak = Wrong::new("`sslnegotiation=direct` cannot fall back to what is not encrypted");
            wrong.push(weak.hint("write sslmode=require or more, or remove sslnegotiation"));
        }
        Some("direct") => {
            servers.ssl_negotiation(SslNegotiation::Direct);
        }
        Some(_) => {
            wrong.push(Wrong::new("`sslnegotiation` is postgres or direct").hint("remove it for the default"));
        }
    }
}

fn roots(root: Option<&str>, wrong: &mut Vec<Wrong>) -> Option<Roots> {
    match root.filter(|root| *root != "system") {
        Some(file) => pem::roots("sslrootcert", file, wrong).map(|(roots, _)| roots),
        None => pem::system_roots("sslrootcert", wrong),
    }
}

fn identity(certificate: Option<String>, key: Option<String>, mode: Mode, wrong: &mut Vec<Wrong>) -> Option<Identity> {
    if mode == Mode::Disable && certificate.is_some() && key.is_some() {
        let useless = Wrong::new("`sslcert` and `sslkey` are of no use where nothing is encrypted");
        wrong.push(useless.hint("write another sslmode, or remove them"));
    }
    pem::identity(("sslcert", certificate), ("sslkey", key), wrong).map(|(identity, _)| identity)
}
