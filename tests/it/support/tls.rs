//! Encryption in front of an upstream that has none.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{HandshakeKind, RootCertStore, ServerConfig};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio_rustls::TlsAcceptor;

/// A server that encrypts, and hands on what it reads. Ends when dropped.
pub struct Tls {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    _runtime: Runtime,
}

struct Shared {
    config: Mutex<Arc<ServerConfig>>,
    agreed: AtomicUsize,
    resumed: AtomicUsize,
}

/// What a server shows, and asks for. Certificates are files of one directory, by name.
#[derive(Clone, Copy)]
pub struct Terms<'a> {
    pub directory: &'a Path,
    pub certificate: &'a str,
    /// Whose certificates clients need.
    pub client_ca: Option<&'a str>,
    pub protocols: &'a [&'a str],
    pub only_tls12: bool,
}

impl<'a> Terms<'a> {
    pub fn of(directory: &'a Path, certificate: &'a str) -> Self {
        Self { directory, certificate, client_ca: None, protocols: &[], only_tls12: false }
    }

    fn config(self) -> Arc<ServerConfig> {
        let file = |name: &str, end: &str| std::fs::read(self.directory.join(format!("{name}.{end}"))).expect("a file");
        let certificates = |name: &str| -> Vec<CertificateDer<'static>> {
            CertificateDer::pem_slice_iter(&file(name, "pem")).map(|one| one.expect("PEM")).collect()
        };
        let key = PrivateKeyDer::from_pem_slice(&file(self.certificate, "key")).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = if self.only_tls12 { &[&rustls::version::TLS12][..] } else { rustls::ALL_VERSIONS };
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_protocol_versions(versions).expect("versions");
        let builder = match self.client_ca {
            Some(ca) => {
                let mut roots = RootCertStore::empty();
                roots.add_parsable_certificates(certificates(ca));
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                builder.with_client_cert_verifier(verifier.build().expect("a root"))
            }
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_single_cert(certificates(self.certificate), key).expect("a pair");
        config.alpn_protocols = self.protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}

impl Tls {
    /// In front of this address.
    pub fn before(upstream: SocketAddr, terms: Terms<'_>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a free port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            config: Mutex::new(terms.config()),
            agreed: AtomicUsize::new(0),
            resumed: AtomicUsize::new(0),
        });
        let serving = Arc::clone(&shared);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let shared = Arc::clone(&serving);
                tokio::spawn(async move {
                    let acceptor = TlsAcceptor::from(Arc::clone(&shared.config.lock().unwrap()));
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    shared.agreed.fetch_add(1, Ordering::SeqCst);
                    let is_resumed = stream.get_ref().1.handshake_kind() == Some(HandshakeKind::Resumed);
                    shared.resumed.fetch_add(usize::from(is_resumed), Ordering::SeqCst);
                    let Ok(mut upstream) = TcpStream::connect(upstream).await else { return };
                    // However it ends.
                    let _ = copy_bidirectional(&mut stream, &mut upstream).await;
                });
            }
        });
        Self { address, shared, _runtime: runtime }
    }

    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// New connections get these terms.
    pub fn change(&self, terms: Terms<'_>) {
        *self.shared.config.lock().unwrap() = terms.config();
    }

    /// How many connections both sides agreed on.
    pub fn agreed(&self) -> usize {
        self.shared.agreed.load(Ordering::SeqCst)
    }

    /// How many of them showed no certificate, since they went on with a session of before.
    pub fn resumed(&self) -> usize {
        self.shared.resumed.load(Ordering::SeqCst)
    }
}
