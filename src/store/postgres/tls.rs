//! Encrypted connections.
//!
//! The crates that bring rustls to tokio-postgres bind no channels (what they hash is not the certificate) and cannot
//! connect to a socket of the file system. It takes little to do both.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use sha2::{Digest, Sha256, Sha384, Sha512};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream as RustlsStream;
use x509_cert::Certificate;
use x509_cert::der::Decode as _;

/// What a server must prove.
#[derive(Debug)]
pub enum Trust {
    /// Nothing: it may be anybody's.
    Anybody,
    /// That one of these vouches for its certificate.
    Certificate(Roots),
    /// That one of these vouches for its certificate, which names the host that it was reached by.
    Host(Roots),
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
}

/// What proves to a server who connects: certificates, that of the client first, and its key.
pub type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// The settings of encrypted connections.
///
/// # Errors
/// Where the certificate and the key of `identity` cannot be used, or are not of each other.
pub fn client(trust: Trust, identity: Option<Identity>) -> Result<ClientConfig, rustls::Error> {
    let provider = Arc::new(ring::default_provider());
    let verifier = Verifier { trust, algorithms: provider.signature_verification_algorithms };
    let builder = builder(provider)?.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match identity {
        Some((certificates, key)) => builder.with_client_auth_cert(certificates, key)?,
        None => builder.with_no_client_auth(),
    };
    // Asked for by servers that are spoken to without being asked first whether they encrypt.
    config.alpn_protocols = vec![b"postgresql".to_vec()];
    Ok(config)
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
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let (roots, is_named) = match &self.trust {
            Trust::Anybody => return Ok(ServerCertVerified::assertion()),
            Trust::Certificate(roots) => (roots, false),
            Trust::Host(roots) => (roots, true),
        };
        let certificate = ParsedCertificate::try_from(end_entity)?;
        if roots.own.iter().any(|own| **own == **end_entity) {
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

/// Encrypts connections for tokio-postgres; none where there is nothing to encrypt with, for which `sslmode` has to be
/// off.
#[derive(Clone)]
pub struct Encryptor(Option<TlsConnector>);

impl Encryptor {
    /// With these settings.
    #[must_use]
    pub fn new(config: Option<ClientConfig>) -> Self {
        Self(config.map(|config| Arc::new(config).into()))
    }
}

impl fmt::Debug for Encryptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Encryptor").field(&self.0.is_some()).finish()
    }
}

impl<S> MakeTlsConnect<S> for Encryptor
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = Encrypted<S>;
    type TlsConnect = Handshake;
    type Error = io::Error;

    fn make_tls_connect(&mut self, host: &str) -> Result<Handshake, io::Error> {
        // A socket of the file system has no host, and is asked for this too.
        Ok(Handshake { connector: self.0.clone(), host: host.to_owned() })
    }
}

/// What is to encrypt one connection.
#[derive(Clone)]
pub struct Handshake {
    connector: Option<TlsConnector>,
    host: String,
}

impl fmt::Debug for Handshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handshake").field("host", &self.host).finish_non_exhaustive()
    }
}

impl<S> TlsConnect<S> for Handshake
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    type Stream = Encrypted<S>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Encrypted<S>>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        Box::pin(async move {
            let connector = self.connector.ok_or_else(|| io::Error::other("there is nothing to encrypt with"))?;
            let host =
                ServerName::try_from(self.host).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
            Ok(Encrypted(connector.connect(host, stream).await?))
        })
    }
}

/// An encrypted connection.
#[derive(Debug)]
pub struct Encrypted<S>(RustlsStream<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Encrypted<S> {
    fn channel_binding(&self) -> ChannelBinding {
        let certificates = self.0.get_ref().1.peer_certificates();
        let end_point = certificates.and_then(|certificates| end_point(certificates.first()?));
        end_point.map_or_else(ChannelBinding::none, ChannelBinding::tls_server_end_point)
    }
}

/// The digest of a server's certificate that a login is bound to (RFC 5929, section 4.1); nothing where its signature
/// does not say by which algorithm.
fn end_point(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    let algorithm = Certificate::from_der(certificate).ok()?.signature_algorithm.oid.to_string();
    let digest = match algorithm.as_str() {
        // MD5 and SHA-1, each with RSA; SHA-1 with ECDSA; SHA-256 with RSA and with ECDSA.
        "1.2.840.113549.1.1.4"
        | "1.2.840.113549.1.1.5"
        | "1.2.840.10045.4.1"
        | "1.2.840.113549.1.1.11"
        | "1.2.840.10045.4.3.2" => Sha256::digest(certificate).to_vec(),
        "1.2.840.113549.1.1.12" | "1.2.840.10045.4.3.3" => Sha384::digest(certificate).to_vec(),
        "1.2.840.113549.1.1.13" | "1.2.840.10045.4.3.4" => Sha512::digest(certificate).to_vec(),
        _ => return None,
    };
    Some(digest)
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Encrypted<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Encrypted<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustls::pki_types::pem::PemObject as _;

    use super::*;

    /// Signed by itself and marked as an authority's, for `db.example` and 192.0.2.1, from [`BEGIN`] to [`END`].
    const OWN: &str = "\
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

    #[test]
    fn a_login_is_bound_to_the_whole_certificate() {
        assert_eq!(end_point(&certificate(OWN)), Some(Sha256::digest(certificate(OWN)).to_vec()));
        assert_eq!(end_point(&CertificateDer::from(vec![1, 2, 3])), None);
    }
}
