//! `tls` of an upstream: who is believed to be it, and how the gate proves who it is.

use std::sync::Arc;

use rustls::pki_types::UnixTime;
use sha2::{Digest as _, Sha256};

use crate::config::declare::{Keys as _, Shown::Example, keys};
use crate::config::kinds::{raw, text};
use crate::config::node::{Node, Table, Wrong};
use crate::config::pem;
use crate::http::upstream::{self, UpstreamAddress, can_be_named};
use crate::tls::{CrlVerifier, Trust, have_run_out};

keys! {
    /// `tls` of an upstream.
    pub(in crate::config) struct Tls "an upstream's tls" {
        /// A file with the certificates of the authorities that sign its certificate. If omitted, those of this system.
        ca: Option<String> = None => raw(r"\S").optional(), Example("\"/etc/oncegate/ca.pem\"");
        /// A file with the certificate of the gate.
        cert: Option<String> = None => raw(r"\S").optional(), Example("\"/etc/oncegate/gate.pem\"");
        /// A file with the key of that certificate.
        key: Option<String> = None => raw(r"\S").optional(), Example("\"/etc/oncegate/gate-key.pem\"");
        /// The name that its certificate must have if it is not the host's.
        name: Option<String> = None => text(r"^\S+$", name).optional(), Example("\"app.internal\"");
        /// A file with lists of revoked certificates.
        crl: Option<String> = None => raw(r"\S").optional(), Example("\"/etc/oncegate/crl.pem\"");
    }
}

/// Reads the files that `tls` names, of an upstream with encrypted connections, whose address is the value of `url`.
pub(in crate::config) fn read(
    upstream: &Table<'_>,
    url: &str,
    keys: Tls,
    places: &[UpstreamAddress],
) -> Option<upstream::Tls> {
    let table = upstream.table("tls", Tls::SECTION);
    let given = table.entries().filter(|(key, _)| Tls::KEYS.iter().any(|known| known.name == *key)).count();
    if given > keys.print().len() {
        return None;
    }
    if keys.name.is_none() {
        let unfit =
            places.iter().find(|place| matches!(place, UpstreamAddress::Tcp { host, .. } if !can_be_named(host)));
        if let Some(place) = unfit {
            let wrong = Wrong::new(format!("no certificate can name the host of {place}"));
            upstream.report(url, wrong.hint("write tls = { name = \"...\" } with the name that its certificate has"));
            return None;
        }
    }
    let Tls { ca, cert, key, name, crl } = keys;
    let files = [ca, cert, key, crl];
    let [ca, certificate, key, crl] = files.clone();
    let mut wrong = Vec::new();
    let mut made_of = Sha256::new();
    let roots = match ca {
        Some(file) => pem::roots("ca", &file, &mut wrong).map(|(roots, pem)| {
            made_of.update(Sha256::digest(pem));
            roots
        }),
        None => pem::system_roots("ca", &mut wrong).inspect(|roots| {
            roots.certificates().iter().for_each(|root| made_of.update(Sha256::digest(root)));
        }),
    };
    let identity =
        pem::identity(("cert", certificate), ("key", key), &mut wrong).map(|(identity, (chain, private))| {
            made_of.update(Sha256::digest(chain));
            made_of.update(Sha256::digest(private));
            identity
        });
    let trust = match (roots, crl) {
        (None, _) => None,
        (Some(roots), None) => Some(Trust::Host(roots)),
        (Some(roots), Some(file)) => pem::lists("crl", &file, &mut wrong).and_then(|(lists, content)| {
            made_of.update(Sha256::digest(content));
            if have_run_out(&lists, UnixTime::now()) {
                table.advise("crl", pem::RUN_OUT.to_owned());
            }
            let unusable = |error| wrong.push(pem::unusable_lists("crl", &file, &error));
            CrlVerifier::of(roots, lists).map_err(unusable).map(Trust::CrlVerifier).ok()
        }),
    };
    let client = match trust {
        Some(trust) if wrong.is_empty() => pem::client(trust, identity, ("cert", "key"), &mut wrong),
        _ => None,
    };
    wrong.into_iter().for_each(|wrong| upstream.report("tls", wrong));
    Some(upstream::Tls { client: Arc::new(client?), name, files, made_of: made_of.finalize().into() })
}

fn name(node: &Node<'_>) -> Result<String, Wrong> {
    let name = node.filled()?;
    if can_be_named(name) {
        return Ok(name.to_owned());
    }
    Err(Wrong::new("this is not a valid TLS server name").hint("write a name or an address, without a port"))
}
