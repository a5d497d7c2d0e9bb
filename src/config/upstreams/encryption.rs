//! `tls` of an upstream: who is believed to be it, and how the gate proves who it is.

use std::sync::Arc;

use rustls::pki_types::UnixTime;
use sha2::{Digest as _, Sha256};

use crate::config::keys;
use crate::config::node::{Node, Table, Wrong};
use crate::config::pem;
use crate::http::upstream::{Place, Tls, can_be_named};
use crate::tls::{Trust, Unrevoked, have_run_out};

/// The keys that name files, in the order of [`Tls::files`].
pub(in crate::config) const FILES: [&str; 4] = ["ca", "cert", "key", "crl"];

/// Reads `tls`, which may be absent, of an upstream with encrypted connections.
pub(super) fn read(upstream: &Table<'_>, places: &[Place]) -> Option<Tls> {
    let table = upstream.table("tls", &keys::UPSTREAM_TLS);
    let file = |key: &str| table.read(key, |node| node.filled().map(str::to_owned));
    let files = FILES.map(file);
    let given = FILES.into_iter().filter(|key| table.get(key).is_some()).count();
    if given > files.iter().flatten().count() {
        return None;
    }
    let name = table.read("name", name);
    if name.is_none() {
        if table.get("name").is_some() {
            return None;
        }
        let unfit = places.iter().find(|place| matches!(place, Place::Tcp { host, .. } if !can_be_named(host)));
        if let Some(place) = unfit {
            let wrong = Wrong::new(format!("no certificate can name the host of {place}"));
            upstream.report("url", wrong.hint("write tls = { name = \"...\" } with the name that its certificate has"));
            return None;
        }
    }
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
            Unrevoked::of(roots, lists).map_err(unusable).map(Trust::Unrevoked).ok()
        }),
    };
    let client = match trust {
        Some(trust) if wrong.is_empty() => pem::client(trust, identity, ("cert", "key"), &mut wrong),
        _ => None,
    };
    wrong.into_iter().for_each(|wrong| upstream.report("tls", wrong));
    Some(Tls { client: Arc::new(client?), name, files, made_of: made_of.finalize().into() })
}

fn name(node: &Node<'_>) -> Result<String, Wrong> {
    let name = node.filled()?;
    if can_be_named(name) {
        return Ok(name.to_owned());
    }
    Err(Wrong::new("this is no name of a server").hint("write a name or an address, without a port"))
}
