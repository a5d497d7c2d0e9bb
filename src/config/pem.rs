//! Files of certificates and keys that settings name.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use rustls::ClientConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

use super::node::Wrong;
use super::secrets::FILE_HINT;
use crate::tls::{self, Identity, Lists, Roots, Trust};

/// The largest file of certificates, in bytes.
const LARGEST_FILE: u64 = 4 << 20;

/// The largest file of lists of revoked certificates, in bytes. Each handshake goes through all of a list.
const LARGEST_LISTS: u64 = 16 << 20;

/// What is said of lists that are past their time.
pub(super) const RUN_OUT: &str =
    "a list in it is past its next update: all that it would speak for is refused until there is a newer one";

/// Who vouches for servers as far as this system knows. `parameter` would name others.
pub(super) fn system_roots(parameter: &str, wrong: &mut Vec<Wrong>) -> Option<Roots> {
    // What cannot be read of them is left out: some of the others will do, or the server is refused.
    let roots = Roots::of(rustls_native_certs::load_native_certs().certs);
    if roots.is_none() {
        let none = Wrong::new("this system has no root certificates to check the server's by");
        wrong.push(none.hint(format!("install them (ca-certificates), or name a file with {parameter}=FILE")));
    }
    roots
}

/// Who vouches for servers, from a file; and what it holds.
pub(super) fn roots(parameter: &str, file: &str, wrong: &mut Vec<Wrong>) -> Option<(Roots, Vec<u8>)> {
    let pem = read(parameter, file, wrong)?;
    let roots = Roots::of(certificates(&pem));
    if roots.is_none() {
        wrong.push(Wrong::new(format!("`{parameter}`: {file} holds no certificate")).hint("name a file in PEM"));
    }
    Some((roots?, pem))
}

/// Revoked certificates, from the lists in a file; and the content of the file.
pub(super) fn lists(parameter: &str, file: &str, wrong: &mut Vec<Wrong>) -> Option<(Lists, Vec<u8>)> {
    let pem = read_most(LARGEST_LISTS, parameter, file, wrong)?;
    // One that cannot be read may be the one that a certificate is on.
    let lists: Result<Lists, _> = CertificateRevocationListDer::pem_slice_iter(&pem).collect();
    let problem = match lists {
        Ok(lists) if !lists.is_empty() => return Some((lists, pem)),
        Ok(_) => Wrong::new(format!("`{parameter}`: {file} holds no list of revoked certificates"))
            .hint("name a file in PEM (openssl crl -inform DER -in LIST -out FILE writes one)"),
        Err(error) => unusable_lists(parameter, file, &error),
    };
    wrong.push(problem);
    None
}

/// Why the lists of a file are of no use.
pub(super) fn unusable_lists(parameter: &str, file: &str, error: &dyn std::fmt::Display) -> Wrong {
    Wrong::new(format!("`{parameter}`: {file} holds a list that cannot be read: {error}"))
        .hint("name a file in PEM with whole lists (version 2), each made by who made the certificates")
}

/// What a file of certificates and a file of a key hold.
pub(super) type Files = (Vec<u8>, Vec<u8>);

/// What proves to a server who connects, from two files that two parameters name; and what they hold.
pub(super) fn identity(
    (certificate, certificate_file): (&str, Option<String>),
    (key, key_file): (&str, Option<String>),
    wrong: &mut Vec<Wrong>,
) -> Option<(Identity, Files)> {
    let (certificate_file, key_file) = match (certificate_file, key_file) {
        (None, None) => return None,
        (Some(certificate_file), Some(key_file)) => (certificate_file, key_file),
        _ => {
            let alone = Wrong::new(format!("`{certificate}` and `{key}` go together"));
            wrong.push(alone.hint("name both files, or none"));
            return None;
        }
    };
    let chain = read(certificate, &certificate_file, wrong).map(|pem| (certificates(&pem), pem));
    if chain.as_ref().is_some_and(|(chain, _)| chain.is_empty()) {
        let none = Wrong::new(format!("`{certificate}`: {certificate_file} holds no certificate"));
        wrong.push(none.hint("name a file in PEM"));
    }
    let private = read(key, &key_file, wrong).map(|pem| (PrivateKeyDer::from_pem_slice(&pem).ok(), pem));
    if let Some((None, _)) = private {
        let none = Wrong::new(format!("`{key}`: {key_file} holds no key that can be read"));
        wrong.push(none.hint("name a file in PEM, not encrypted: PKCS #8, PKCS #1 or SEC 1"));
    }
    let (chain, chain_pem) = chain.filter(|(chain, _)| !chain.is_empty())?;
    let (private, private_pem) = private?;
    Some(((chain, private?), (chain_pem, private_pem)))
}

/// The settings of encrypted connections; nothing where the certificate and the key that the parameters of these names
/// stand for cannot be used.
pub(super) fn client(
    trust: Trust,
    identity: Option<Identity>,
    (certificate, key): (&str, &str),
    wrong: &mut Vec<Wrong>,
) -> Option<ClientConfig> {
    let unusable = |error| {
        Wrong::new(format!("`{certificate}` and `{key}` cannot be used: {error}"))
            .hint("name the certificate and the key that it was made for")
    };
    tls::client(trust, identity).map_err(|error| wrong.push(unusable(error))).ok()
}

fn certificates(pem: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem).filter_map(Result::ok).collect()
}

fn read(parameter: &str, file: &str, wrong: &mut Vec<Wrong>) -> Option<Vec<u8>> {
    read_most(LARGEST_FILE, parameter, file, wrong)
}

fn read_most(most: u64, parameter: &str, file: &str, wrong: &mut Vec<Wrong>) -> Option<Vec<u8>> {
    let mut content = Vec::new();
    let reading = File::open(Path::new(file)).and_then(|file| file.take(most + 1).read_to_end(&mut content));
    let unread = match reading {
        Ok(_) if content.len() as u64 <= most => return Some(content),
        Ok(_) => {
            Wrong::new(format!("`{parameter}`: {file} is larger than {} MiB", most >> 20)).hint("name the file in PEM")
        }
        Err(error) => Wrong::new(format!("`{parameter}`: {file} cannot be read: {error}")).hint(FILE_HINT),
    };
    wrong.push(unread);
    None
}
