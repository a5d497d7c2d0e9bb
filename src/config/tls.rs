//! `[server] tls` and `[admin] tls`, and how commands reach a listener that encrypts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::UnixTime;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, ServerConfig};

use super::declare::{
    Keys as _,
    Shown::{Example, Required},
    keys,
};
use super::kinds::file;
use super::node::{Table, Wrong};
use super::pem;
use crate::http::accept::{ServerTls, TlsFiles};
use crate::tls::{self, Roots, Trust};

keys! {
    /// The files of `tls` of a listener.
    pub(super) struct Files "a listener's tls" {
        /// The file of the certificate, followed by the intermediate certificates.
        cert: Option<PathBuf> = None => file().optional(), Required("\"/etc/oncegate/cert.pem\"");
        /// The file of its key.
        key: Option<PathBuf> = None => file().optional(), Required("\"/etc/oncegate/key.pem\"");
        /// The file of the authorities that sign the certificates of clients.
        client_ca: Option<PathBuf> = None => file().optional(), Example("\"/etc/oncegate/ca.pem\"");
        /// The file of their lists of revoked certificates.
        client_crl: Option<PathBuf> = None => file().optional(), Example("\"/etc/oncegate/crl.pem\"");
    }
}

/// Reads the files that `tls` of a listener names.
pub(super) fn read(listener: &Table<'_>, files: Files) -> Option<ServerTls> {
    listener.get("tls")?;
    let table = listener.table("tls", Files::SECTION);
    for key in ["cert", "key"] {
        if table.get(key).is_none() {
            table.report(key, Wrong::new("is missing").hint("name a file in PEM"));
        }
    }
    if files.client_crl.is_some() && table.get("client_ca").is_none() {
        let useless = Wrong::new("`client_crl` has no effect: clients are not asked for a certificate");
        table.report(
            "client_crl",
            useless.hint("name the authorities that sign them: client_ca = \"FILE\", or remove it"),
        );
        return None;
    }
    let Files { cert, key, client_ca, client_crl } = files;
    let files = TlsFiles { cert: cert?, key: key?, client_ca, client_crl };
    match config(&files) {
        Ok((config, warnings)) => {
            warnings.into_iter().for_each(|(key, message)| table.advise(key, message));
            Some(ServerTls { files, config })
        }
        Err(wrong) => {
            wrong.into_iter().for_each(|wrong| listener.report("tls", wrong));
            None
        }
    }
}

/// Reads the files of a listener's `tls` again. Returns warnings too, such as one of a certificate that has expired.
///
/// # Errors
/// They cannot be used, for this reason.
pub fn reread(files: &TlsFiles) -> Result<(Arc<ServerConfig>, Vec<String>), String> {
    config(files)
        .map(|(config, warnings)| (config, warnings.iter().map(|(key, message)| format!("{key}: {message}")).collect()))
        .map_err(|wrong| wrong.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
}

/// Which certificate of a listener a command believes.
#[derive(Debug)]
pub enum ServerTrust {
    /// Any: the gate sends it nothing secret.
    Any,
    /// The one in this file, by whatever name the listener is reached.
    Own(PathBuf),
    /// One for the name of the listener that the authorities in this file signed.
    SignedBy(PathBuf),
    /// One for the name of the listener that the authorities of this system signed.
    SignedBySystem,
}

/// Reads what a command reaches a listener with that encrypts: `cert` and `key` are what it shows.
///
/// # Errors
/// The files cannot be used, for this reason.
pub fn client(believed: ServerTrust, cert: Option<PathBuf>, key: Option<PathBuf>) -> Result<Arc<ClientConfig>, String> {
    let mut wrong = Vec::new();
    let names = ("--admin-cert", "--admin-key");
    let text = |path: Option<PathBuf>| path.map(|path| path.display().to_string());
    let identity = pem::identity((names.0, text(cert)), (names.1, text(key)), &mut wrong);
    let mut roots = |parameter: &str, file: &Path| {
        let (roots, _) = pem::roots(parameter, &file.display().to_string(), &mut wrong)?;
        Some(roots)
    };
    let trust = match believed {
        ServerTrust::Any => Some(Trust::Anybody),
        ServerTrust::Own(file) => roots("admin.tls.cert", &file).map(Trust::Certificate),
        ServerTrust::SignedBy(file) => roots("--admin-ca", &file).map(Trust::Host),
        ServerTrust::SignedBySystem => pem::system_roots("--admin-ca", &mut wrong).map(Trust::Host),
    };
    let identity = identity.map(|(identity, _)| identity);
    let config = trust.and_then(|trust| pem::client(trust, identity, names, &mut wrong));
    match config {
        Some(config) if wrong.is_empty() => Ok(Arc::new(config)),
        _ => Err(wrong.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")),
    }
}

/// The settings that the files give, and warnings, each with the key of its file.
type Loaded = (Arc<ServerConfig>, Vec<(&'static str, String)>);

fn config(files: &TlsFiles) -> Result<Loaded, Vec<Wrong>> {
    let mut wrong = Vec::new();
    let text = |path: &PathBuf| Some(path.display().to_string());
    let identity = pem::identity(("cert", text(&files.cert)), ("key", text(&files.key)), &mut wrong);
    let clients = files.client_ca.as_ref().and_then(|file| {
        let (roots, _) = pem::roots("client_ca", &file.display().to_string(), &mut wrong)?;
        clients(roots, files.client_crl.as_deref(), &mut wrong)
    });
    let (Some((identity, _)), true) = (identity, wrong.is_empty()) else { return Err(wrong) };
    let (clients, have_run_out) = clients.unzip();
    let refused = identity.0.first().and_then(|own| tls::validity_fault(own, UnixTime::now()));
    let refused = refused.map(|why| ("cert", format!("{why}: clients refuse the certificate")));
    let run_out = have_run_out.unwrap_or_default().then(|| ("client_crl", pem::RUN_OUT.to_owned()));
    let warnings = refused.into_iter().chain(run_out).collect();
    tls::server(identity, clients).map(|config| (Arc::new(config), warnings)).map_err(|error| {
        let unusable = Wrong::new(format!("`cert` and `key` cannot be used: {error}"));
        vec![
            unusable.hint(
                "name the certificate, with those between it and the authority's, and the key that it was made for",
            ),
        ]
    })
}

fn clients(roots: Roots, crl: Option<&Path>, wrong: &mut Vec<Wrong>) -> Option<(Arc<dyn ClientCertVerifier>, bool)> {
    let file = crl.map(|file| file.display().to_string());
    let lists = match &file {
        Some(file) => pem::lists("client_crl", file, wrong)?.0,
        None => Vec::new(),
    };
    let have_run_out = tls::have_run_out(&lists, UnixTime::now());
    let unusable = |error| wrong.push(pem::unusable_lists("client_crl", file.as_deref().unwrap_or_default(), &error));
    tls::clients(roots, lists).map_err(unusable).ok().map(|verifier| (verifier, have_run_out))
}
