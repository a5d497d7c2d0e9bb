//! Encrypted connections.
//!
//! The crates that bring rustls to tokio-postgres do not support channel binding (they do not hash the certificate)
//! and cannot connect to a socket of the file system. It takes little to do both.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, ServerName};
use sha2::{Digest, Sha256, Sha384, Sha512};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream as RustlsStream;
use x509_cert::Certificate;
use x509_cert::der::Decode as _;

/// Encrypts connections for tokio-postgres; none where there is nothing to encrypt with, for which `sslmode` has to be
/// off.
#[derive(Clone)]
pub struct Encryptor(Option<TlsConnector>);

impl Encryptor {
    /// With these settings.
    #[must_use]
    pub fn new(config: Option<ClientConfig>) -> Self {
        Self(config.map(|mut config| {
            // Asked for by servers that are spoken to without being asked first whether they encrypt.
            config.alpn_protocols = vec![b"postgresql".to_vec()];
            Arc::new(config).into()
        }))
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

/// Encrypts one connection.
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

/// The digest of a server's certificate that a login is bound to (RFC 5929, section 4.1); `None` if its signature
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
    use rustls::pki_types::pem::PemObject as _;

    use super::*;
    use crate::tls::tests::OWN;

    #[test]
    fn a_login_is_bound_to_the_whole_certificate() {
        let certificate = CertificateDer::from_pem_slice(OWN.as_bytes()).unwrap();
        assert_eq!(end_point(&certificate), Some(Sha256::digest(&certificate).to_vec()));
        assert_eq!(end_point(&CertificateDer::from(vec![1, 2, 3])), None);
    }
}
