//! A client that encrypts, and certificates for it and for the gate.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt as _;

use super::http2::Http2;
use super::wait::PATIENCE;
use crate::servers::certificates::{authority, can_be_made, signed};

/// The name of the gate.
const NAME: &str = "gate.test";

/// Certificates of one test: of the gate (`gate`), and of clients.
pub struct Certificates(TempDir);

impl Certificates {
    /// The gate's own, signed by `ca`; nothing where none can be made.
    #[track_caller]
    pub fn new() -> Option<Self> {
        if !can_be_made() {
            return None;
        }
        let own = Self(tempfile::tempdir().unwrap());
        authority(own.0.path(), "ca");
        own.sign("gate", &format!("subjectAltName=DNS:{NAME}"));
        Some(own)
    }

    pub fn directory(&self) -> &Path {
        self.0.path()
    }

    /// Makes a certificate of this name.
    #[track_caller]
    pub fn sign(&self, name: &str, extension: &str) {
        signed(self.0.path(), name, "ca", extension);
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The lines of `[server]` that use them.
    pub fn server(&self, more: &str) -> String {
        format!("tls = {{ cert = {:?}, key = {:?}{more} }}\n", self.path("gate.pem"), self.path("gate.key"))
    }

    /// The same, where clients have certificates of `ca`.
    pub fn server_of_clients(&self) -> String {
        self.server(&format!(", client_ca = {:?}", self.path("ca.pem")))
    }

    /// A client that believes `ca`, and is `client` where that is said.
    pub fn client(&self, protocols: &[&str], client: Option<&str>) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.path("ca.pem")).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let builder = builder.with_root_certificates(roots);
        let mut config = match client {
            None => builder.with_no_client_auth(),
            Some(name) => {
                let chain = vec![CertificateDer::from_pem_file(self.path(&format!("{name}.pem"))).unwrap()];
                let key = PrivateKeyDer::from_pem_file(self.path(&format!("{name}.key"))).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}

/// An encrypted connection of HTTP/1.1.
pub struct Https(pub StreamOwned<ClientConnection, TcpStream>);

impl Https {
    #[track_caller]
    pub fn connect(address: SocketAddr, config: &Arc<ClientConfig>) -> Self {
        let stream = TcpStream::connect_timeout(&address, PATIENCE).expect("the gate listens");
        Self::over(stream, config)
    }

    pub fn over(stream: TcpStream, config: &Arc<ClientConfig>) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let name = ServerName::try_from(NAME).unwrap();
        Self(StreamOwned::new(ClientConnection::new(Arc::clone(config), name).unwrap(), stream))
    }

    /// Sends a request, and reads until so much has come that ends like this.
    pub fn exchange(&mut self, request: &str, end: &str) -> std::io::Result<String> {
        self.0.write_all(request.as_bytes())?;
        let (mut came, mut some) = (Vec::new(), [0; 4096]);
        while !came.ends_with(end.as_bytes()) {
            let read = self.0.read(&mut some)?;
            if read == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            came.extend_from_slice(&some[..read]);
        }
        Ok(String::from_utf8_lossy(&came).into_owned())
    }
}

/// An encrypted connection of HTTP/2.
#[track_caller]
pub fn http2(address: SocketAddr, config: &Arc<ClientConfig>) -> Http2 {
    http2_behind(address, &[], config)
}

/// The same, behind these bytes.
#[track_caller]
pub fn http2_behind(address: SocketAddr, bytes: &[u8], config: &Arc<ClientConfig>) -> Http2 {
    let connector = tokio_rustls::TlsConnector::from(Arc::clone(config));
    Http2::over(async move {
        let mut stream = tokio::net::TcpStream::connect(address).await.expect("the gate listens");
        stream.write_all(bytes).await.expect("the gate reads");
        let stream = connector.connect(ServerName::try_from(NAME).unwrap(), stream).await.expect("a handshake");
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        stream
    })
}
