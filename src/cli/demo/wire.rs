//! HTTP to one address, as shops and people of the demo speak it.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::anyhow;
use bytes::Bytes;
use http::header::HOST;
use http::{HeaderValue, Request, response};
use http_body_util::{BodyExt as _, Limited};

use crate::http::body::Body;
use crate::http::limits::Limits;
use crate::http::upstream::{Protocol, Reuse, SendContext, Settings, Sharing, Upstream, UpstreamAddress};
use crate::http::usage::Usage;
use crate::telemetry::metrics::Metrics;

/// Longest answer, in bytes: all the books of the API.
const MAX_ANSWER: usize = 16 * 1024 * 1024;

/// How long a connection may take to open.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A server at an address, and the connections to it.
pub(super) struct Server {
    upstream: Upstream,
    host: HeaderValue,
}

/// An exchange failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The other side reset the connection.
    Reset,
    /// Something else.
    Other(String),
}

impl Server {
    /// The server at `address`, called `name` in errors.
    pub(super) fn at(name: &str, address: SocketAddr) -> anyhow::Result<Self> {
        let settings = Settings {
            name: name.into(),
            places: vec![UpstreamAddress::Tcp { host: address.ip().to_string(), port: address.port() }],
            tls: None,
            protocol: Protocol::Http1,
            // Who asks keeps the time.
            timeout: Duration::MAX,
            client_timeout: Duration::MAX,
            connect_timeout: CONNECT_TIMEOUT,
            max_connections: u64::MAX,
            max_headers: Limits::default().max_answer_headers(),
            reuse: Sharing::Always,
        };
        let usage = Usage::new(&Limits::default(), &Metrics::new());
        Ok(Self { upstream: Upstream::new(settings, usage), host: HeaderValue::from_str(&address.to_string())? })
    }

    /// Sends a request, once, and takes in its answer. Dropped, it closes the connection.
    pub(super) async fn send(&self, mut request: Request<Body>) -> Result<(response::Parts, Bytes), Failure> {
        request.headers_mut().insert(HOST, self.host.clone());
        let sent = self.upstream.send(request, Reuse::Protected, &SendContext::default()).await;
        let (response, connection) = sent.map_err(|error| Failure::of(&error))?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_ANSWER).collect().await.map_err(|error| Failure::of(&*error))?;
        connection.return_to_pool();
        Ok((head, body.to_bytes()))
    }

    /// The body of a successful answer to GET.
    pub(super) async fn get(&self, target: &str) -> anyhow::Result<Bytes> {
        let (head, body) = match self.send(Request::get(target).body(Body::empty())?).await {
            Ok(answered) => answered,
            Err(Failure::Reset) => return Err(anyhow!("{self} reset the connection")),
            Err(Failure::Other(error)) => return Err(anyhow!("{self} gave no answer: {error}")),
        };
        match head.status.is_success() {
            true => Ok(body),
            false => Err(anyhow!("{self} answered {} to GET {target}", head.status)),
        }
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}", self.upstream.settings().name, self.upstream.authority())
    }
}

impl Failure {
    fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut cause = Some(error);
        while let Some(inner) = cause {
            if inner.downcast_ref().is_some_and(|error: &io::Error| error.kind() == io::ErrorKind::ConnectionReset) {
                return Self::Reset;
            }
            cause = inner.source();
        }
        Self::Other(error.to_string())
    }
}
