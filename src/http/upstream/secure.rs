//! Encrypted connections to an upstream.

use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;

use super::settings::{Place, Protocol, Tls};
use super::{Io, NotSent};

const H2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// What encrypted connections to an upstream are made with.
pub(super) struct Secure {
    /// Where a connection may be HTTP/2; and where it may not.
    connectors: [TlsConnector; 2],
    name: Option<String>,
    /// Nothing else is spoken.
    only_h2: bool,
}

impl Secure {
    pub(super) fn new(tls: &Tls, protocol: Protocol) -> Self {
        let offered: &[&[u8]] = match protocol {
            Protocol::Auto => &[H2, HTTP1],
            Protocol::Http1 => &[HTTP1],
            Protocol::H2 => &[H2],
        };
        let connector = |offered: &[&[u8]]| {
            let mut client = ClientConfig::clone(&tls.client);
            client.alpn_protocols = offered.iter().map(|protocol| protocol.to_vec()).collect();
            // What is sent early can be replayed by anybody who records it (RFC 8446, 8).
            client.enable_early_data = false;
            TlsConnector::from(Arc::new(client))
        };
        let connectors = [connector(offered), connector(&[HTTP1])];
        Self { connectors, name: tls.name.clone(), only_h2: protocol == Protocol::H2 }
    }

    /// Agrees on encryption over `stream`, and says whether the upstream has chosen HTTP/2. An error means that nothing of a
    /// request was sent.
    pub(super) async fn begin<T: Io>(
        &self,
        stream: T,
        place: &Place,
        with_h2: bool,
    ) -> Result<(Box<dyn Io>, bool), NotSent> {
        let host = match place {
            Place::Tcp { host, .. } => host,
            Place::Unix(_) => "localhost",
        };
        let name = self.name.as_deref().unwrap_or(host).to_owned();
        // What cannot be one was refused when the configuration was read.
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
