//! Who proves what to whom on encrypted connections: to stores, to upstreams, and of clients.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{
    Resumption, VerifierBuilderError, WebPkiServerVerifier, verify_server_cert_signed_by_trust_anchor,
    verify_server_name,
};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use x509_cert::Certificate;
use x509_cert::crl::CertificateList;
use x509_cert::der::Decode as _;
use x509_cert::der::oid::AssociatedOid as _;
use x509_cert::ext::pkix::CrlNumber;

/// What a server must prove.
#[derive(Debug)]
pub enum Trust {
    /// Nothing: it may be anybody's.
    Anybody,
    /// That one of these vouches for its certificate.
    Certificate(Roots),
    /// That one of these vouches for its certificate, which names the host that it was reached by.
    Host(Roots),
    /// The same, and that no list revokes its certificate or one between it and them.
    CrlVerifier(CrlVerifier),
}

/// Who vouches for servers.
#[derive(Debug)]
pub struct Roots {
    store: RootCertStore,
    /// The same as they are: a server may have one of them itself.
    own: Vec<CertificateDer<'static>>,
}

impl Roots {
    /// Takes those that can be read; nothing where none can.
    #[must_use]
    pub fn of(certificates: Vec<CertificateDer<'static>>) -> Option<Self> {
        let mut store = RootCertStore::empty();
        let (added, _) = store.add_parsable_certificates(certificates.iter().cloned());
        (added > 0).then_some(Self { store, own: certificates })
    }

    /// All of them.
    #[must_use]
    pub fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.own
    }

    fn have(&self, certificate: &CertificateDer<'_>) -> bool {
        self.own.iter().any(|own| **own == **certificate)
    }
}

/// Lists of the certificates that those who made them have revoked. A certificate whose maker's list is not among them
/// counts as revoked, and so does one whose maker's list is past its time: it may be on a list that was kept from us.
pub type Lists = Vec<CertificateRevocationListDer<'static>>;

/// Whether one of the lists should have been followed by a newer one before this time.
#[must_use]
pub fn have_run_out(lists: &Lists, now: UnixTime) -> bool {
    let next =
        |list: &CertificateRevocationListDer<'_>| CertificateList::from_der(list).ok()?.tbs_cert_list.next_update;
    lists.iter().filter_map(next).any(|next| next.to_unix_duration().as_secs() <= now.as_secs())
}

/// Of several lists of one maker the first counts.
fn newest_first(mut lists: Lists) -> Lists {
    // One that cannot be read is refused by who gets them.
    let made = |list: &CertificateRevocationListDer<'_>| {
        let list = CertificateList::from_der(list).ok()?.tbs_cert_list;
        let mut extensions = list.crl_extensions.iter().flatten();
        let number = extensions.find(|extension| extension.extn_id == CrlNumber::OID);
        let number = number.and_then(|extension| CrlNumber::from_der(extension.extn_value.as_bytes()).ok());
        // Without leading zeros, more bytes are more.
        let number = number.map(|number| (number.0.as_bytes().len(), number.0.as_bytes().to_vec()));
        Some((list.this_update.to_unix_duration(), number))
    };
    lists.sort_by_cached_key(|list| std::cmp::Reverse(made(list)));
    lists
}

/// Who vouches for servers, and for whom they do not any more.
#[derive(Debug)]
pub struct CrlVerifier {
    roots: Roots,
    verifier: Arc<WebPkiServerVerifier>,
}

impl CrlVerifier {
    /// Of those that `roots` vouch for, those that are not on the `lists`.
    ///
    /// # Errors
    /// Where one of the lists cannot be read.
    pub fn of(roots: Roots, lists: Lists) -> Result<Self, VerifierBuilderError> {
        let builder = WebPkiServerVerifier::builder_with_provider(Arc::new(roots.store.clone()), provider());
        let verifier = builder.with_crls(newest_first(lists)).enforce_revocation_expiration().build()?;
        Ok(Self { roots, verifier })
    }
}

/// What clients must prove: that one of `roots` vouches for their certificate, and, where there are `lists`, that none has
/// revoked it or one between it and them.
///
/// # Errors
/// Where one of the lists cannot be read.
pub fn clients(roots: Roots, lists: Lists) -> Result<Arc<dyn ClientCertVerifier>, VerifierBuilderError> {
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots.store), provider());
    builder.with_crls(newest_first(lists)).enforce_revocation_expiration().build()
}

/// What proves to a server who connects: certificates, that of the client first, and its key.
pub type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// The settings of encrypted connections.
///
/// # Errors
/// Where the certificate and the key of `identity` cannot be used, or are not of each other.
pub fn client(trust: Trust, identity: Option<Identity>) -> Result<ClientConfig, rustls::Error> {
    let provider = provider();
    let has_lists = matches!(trust, Trust::CrlVerifier(_));
    let verifier = Verifier { trust, algorithms: provider.signature_verification_algorithms };
    let builder = builder(provider)?.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match identity {
        Some((certificates, key)) => builder.with_client_auth_cert(certificates, key)?,
        None => builder.with_no_client_auth(),
    };
    if has_lists {
        // A session that goes on shows no certificate: lists that have run out meanwhile would not be missed.
        config.resumption = Resumption::disabled();
    }
    Ok(config)
}

/// The settings of encrypted connections that clients open: TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1 by ALPN, and no data
/// before the handshake is over. Where `clients` says what they must prove, each must have a certificate.
///
/// # Errors
/// Where the certificate and the key of `identity` cannot be used, or are not of each other.
pub fn server(
    (certificates, key): Identity,
    clients: Option<Arc<dyn ClientCertVerifier>>,
) -> Result<ServerConfig, rustls::Error> {
    let has_clients = clients.is_some();
    let builder = ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
    let builder = match clients {
        Some(clients) => builder.with_client_cert_verifier(clients),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_single_cert(certificates, key)?;
    if has_clients {
        // A session that goes on is not asked again who it is: a certificate would be good beyond its end.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// The algorithms of all connections.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn builder(
    provider: Arc<CryptoProvider>,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier>, rustls::Error> {
    ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()
}

#[derive(Debug)]
struct Verifier {
    trust: Trust,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let (roots, is_named) = match &self.trust {
            Trust::Anybody => return Ok(ServerCertVerified::assertion()),
            Trust::Certificate(roots) => (roots, false),
            Trust::Host(roots) => (roots, true),
            // A certificate that is signed by itself is on no list.
            Trust::CrlVerifier(CrlVerifier { roots, .. }) if roots.have(end_entity) && is_self_made(end_entity) => {
                (roots, true)
            }
            Trust::CrlVerifier(CrlVerifier { verifier, .. }) => {
                return verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
            }
        };
        let certificate = ParsedCertificate::try_from(end_entity)?;
        if roots.have(end_entity) {
            // A certificate that signed itself is mostly marked as an authority's, which none of a server may be.
            check_validity(end_entity, now)?;
        } else {
            let algorithms = self.algorithms.all;
            verify_server_cert_signed_by_trust_anchor(&certificate, &roots.store, intermediates, now, algorithms)?;
        }
        if is_named {
            verify_server_name(&certificate, server_name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

fn is_self_made(certificate: &CertificateDer<'_>) -> bool {
    Certificate::from_der(certificate)
        .is_ok_and(|certificate| certificate.tbs_certificate.issuer == certificate.tbs_certificate.subject)
}

fn check_validity(certificate: &CertificateDer<'_>, now: UnixTime) -> Result<(), CertificateError> {
    let certificate = Certificate::from_der(certificate).map_err(|_| CertificateError::BadEncoding)?;
    let validity = certificate.tbs_certificate.validity;
    let now = now.as_secs();
    if now < validity.not_before.to_unix_duration().as_secs() {
        return Err(CertificateError::NotValidYet);
    }
    if now > validity.not_after.to_unix_duration().as_secs() {
        return Err(CertificateError::Expired);
    }
    Ok(())
}

/// Why peers refuse a certificate at this time, whatever else they think of it.
#[must_use]
pub fn validity_fault(certificate: &CertificateDer<'_>, now: UnixTime) -> Option<&'static str> {
    match check_validity(certificate, now) {
        Err(CertificateError::Expired) => Some("it has expired"),
        Err(CertificateError::NotValidYet) => Some("it is not valid yet"),
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use rustls::pki_types::pem::PemObject as _;

    use super::*;

    /// Signed by itself and marked as an authority's, for `db.example` and 192.0.2.1, from [`BEGIN`] to [`END`].
    pub(crate) const OWN: &str = "\
-----BEGIN CERTIFICATE-----
MIIBjDCCATKgAwIBAgIUQzWD/+gh6ZcbOxJzqJb0xvKV/lcwCgYIKoZIzj0EAwIw
DTELMAkGA1UEAwwCZGIwHhcNMjYxMTIxMDcxNDEwWhcNMzYxMTE4MDcxNDEwWjAN
MQswCQYDVQQDDAJkYjBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABO2zIHP8P3N+
Dfs566EQv/CW8TKT2DipfaDBlVaRS4fK9KlwA3B1EK9JO7hPYS6Bu4UIG8rhypKc
nt5m9JKMdEOjcDBuMB0GA1UdDgQWBBQYZtvBNwLOQgMtzOj34OPaWvoOKjAfBgNV
HSMEGDAWgBQYZtvBNwLOQgMtzOj34OPaWvoOKjAPBgNVHRMBAf8EBTADAQH/MBsG
A1UdEQQUMBKCCmRiLmV4YW1wbGWHBMAAAgEwCgYIKoZIzj0EAwIDSAAwRQIhAODN
UkYfW8jbkWsLRyL+kPfhrCAn5EBvQiAaso+mBOb1AiAnalICh4biEFWkKjiKXM8p
ZfDVPda/OqSmGASpWlYc9w==
-----END CERTIFICATE-----
";

    /// Signed by itself, for nobody.
    const OTHER: &str = "\
-----BEGIN CERTIFICATE-----
MIIBdTCCARugAwIBAgIULLZwm5t6vE5NLda0RaqRAZ3YxwowCgYIKoZIzj0EAwIw
EDEOMAwGA1UEAwwFb3RoZXIwHhcNMjYxMTIxMDcxNDEwWhcNMzYxMTE4MDcxNDEw
WjAQMQ4wDAYDVQQDDAVvdGhlcjBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABERi
qr/bX7wLI9AqA2grL6lh7Bfe4T9IS74IMjt2KdhYn3ZYKS14ubriMbT24vKnNLQH
YcyI2fOeXsozSUwjFmmjUzBRMB0GA1UdDgQWBBTA/nTKFgmA7dPN72zM458Y8UYn
3zAfBgNVHSMEGDAWgBTA/nTKFgmA7dPN72zM458Y8UYn3zAPBgNVHRMBAf8EBTAD
AQH/MAoGCCqGSM49BAMCA0gAMEUCIGlt+t+CdEqo8wMc2coUzrZPNkUYVS+fm2/2
/Q0Ilk+CAiEAmX0tGWZzpOMD70huk7KfGYfPgY4hGr4wFRMzTM81EfQ=
-----END CERTIFICATE-----
";

    const BEGIN: u64 = 1_795_245_250;
    const END: u64 = BEGIN + 3650 * 86_400;

    fn certificate(pem: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
    }

    fn verify(trust: Trust, name: &'static str, at: u64) -> Result<(), CertificateError> {
        let verifier = Verifier { trust, algorithms: ring::default_provider().signature_verification_algorithms };
        let (name, now) = (ServerName::try_from(name).unwrap(), UnixTime::since_unix_epoch(Duration::from_secs(at)));
        match verifier.verify_server_cert(&certificate(OWN), &[], &name, &[], now) {
            Ok(_) => Ok(()),
            Err(rustls::Error::InvalidCertificate(error)) => Err(error),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_certificate_among_the_roots_is_believed_in_its_time_and_for_its_names() {
        let own = || Roots::of(vec![certificate(OTHER), certificate(OWN)]).unwrap();
        for name in ["db.example", "192.0.2.1"] {
            for at in [BEGIN, END - 86_400] {
                assert_eq!(verify(Trust::Host(own()), name, at), Ok(()));
            }
        }
        assert_eq!(verify(Trust::Certificate(own()), "other.example", BEGIN), Ok(()));
        assert!(verify(Trust::Host(own()), "other.example", BEGIN).is_err());
        assert!(verify(Trust::Host(own()), "db.example.other", BEGIN).is_err());
        assert_eq!(verify(Trust::Host(own()), "db.example", BEGIN - 1), Err(CertificateError::NotValidYet));
        let refused =
            |at| validity_fault(&own().certificates()[0], UnixTime::since_unix_epoch(Duration::from_secs(at)));
        assert_eq!(refused(BEGIN - 1), Some("it is not valid yet"));
        assert_eq!((refused(BEGIN), refused(END)), (None, None));
        assert_eq!(refused(END + 1), Some("it has expired"));
        assert_eq!(verify(Trust::Certificate(own()), "db.example", END + 86_400), Err(CertificateError::Expired));
    }

    #[test]
    fn nobody_else_is_believed_unless_anybody_is() {
        let other = || Roots::of(vec![certificate(OTHER)]).unwrap();
        assert!(verify(Trust::Certificate(other()), "db.example", BEGIN).is_err());
        assert!(verify(Trust::Host(other()), "db.example", BEGIN).is_err());
        assert_eq!(verify(Trust::Anybody, "other.example", END + 86_400), Ok(()));
        assert!(Roots::of(Vec::new()).is_none());
        assert!(Roots::of(vec![CertificateDer::from(vec![1, 2, 3])]).is_none());
    }
}
