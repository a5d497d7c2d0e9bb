//! TLS connections to an upstream.

use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;

use super::settings::{Protocol, Tls, UpstreamAddress};
use super::{Io, NotSent};

const H2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// Connectors for TLS connections to an upstream.
pub(super) struct TlsConnectors {
    /// One that offers HTTP/2, and one that does not.
    connectors: [TlsConnector; 2],
    name: Option<String>,
    /// Whether only HTTP/2 is acceptable.
    only_h2: bool,
}

impl TlsConnectors {
    pub(super) fn new(tls: &Tls, protocol: Protocol) -> Self {
        let offered: &[&[u8]] = match protocol {
            Protocol::Auto => &[H2, HTTP1],
            Protocol::Http1 => &[HTTP1],
            Protocol::H2 => &[H2],
        };
        let connector = |offered: &[&[u8]]| {
            let mut client = ClientConfig::clone(&tls.client);
            client.alpn_protocols = offered.iter().map(|protocol| protocol.to_vec()).collect();
            // An attacker can replay early data (RFC 8446, 8).
            client.enable_early_data = false;
            TlsConnector::from(Arc::new(client))
        };
        let connectors = [connector(offered), connector(&[HTTP1])];
        Self { connectors, name: tls.name.clone(), only_h2: protocol == Protocol::H2 }
    }

    /// Performs the TLS handshake over `stream`, and returns whether the upstream has chosen HTTP/2. An error means
    /// that nothing of a request was sent.
    pub(super) async fn handshake<T: Io>(
        &self,
        stream: T,
        place: &UpstreamAddress,
        with_h2: bool,
    ) -> Result<(Box<dyn Io>, bool), NotSent> {
        let host = match place {
            UpstreamAddress::Tcp { host, .. } => host,
            UpstreamAddress::Unix(_) => "localhost",
        };
        let name = self.name.as_deref().unwrap_or(host).to_owned();
        // The configuration refuses invalid names.
        let name = ServerName::try_from(name).map_err(|_| NotSent::Name)?;
        let connector = &self.connectors[usize::from(!with_h2)];
        let stream = connector.connect(name, stream).await.map_err(NotSent::Tls)?;
        let chose_h2 = stream.get_ref().1.alpn_protocol() == Some(H2);
        if self.only_h2 && with_h2 && !chose_h2 {
            return Err(NotSent::NoH2);
        }
        Ok((Box::new(stream), chose_h2))
    }
}
