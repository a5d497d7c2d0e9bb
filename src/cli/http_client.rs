//! A small client of the admin API, and the options of the commands that use it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use clap::Args;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::complain;
use crate::config::{Flags, Sources, load_admin, load_admin_address};
use crate::http::socket::Listen;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest time for a request and its whole answer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Largest answer, in bytes: far more than a page of the most records.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

const DEFAULT_ADDRESS: &str = "127.0.0.1:9090";

/// Where the admin listener of a running gate is.
#[derive(Args, Debug)]
pub(super) struct AdminArgs {
    /// The gate's configuration file, whose `[admin]` names the admin listener and its token
    #[arg(short, long, global = true, value_name = "FILE", env = "ONCEGATE_CONFIG")]
    config: Option<PathBuf>,
    /// Where the admin listener is [default: 127.0.0.1:9090]
    #[arg(long, global = true, value_name = "ADDR", env = "ONCEGATE_ADMIN__LISTEN")]
    admin: Option<String>,
    /// A file with the admin listener's token
    #[arg(long, global = true, value_name = "FILE", env = "ONCEGATE_ADMIN__TOKEN_FILE")]
    token_file: Option<PathBuf>,
}

impl AdminArgs {
    /// A client of that listener.
    pub(super) fn client(self) -> anyhow::Result<AdminClient> {
        let (mut address, mut token) = (self.admin, self.token_file.map(read_token).transpose()?);
        if self.config.is_some() && (address.is_none() || token.is_none()) {
            let settings = load_admin(Sources::of_process(self.config, Flags::default()))?;
            if address.is_none() {
                address = Some(reachable(&settings.listen)?);
            }
            token = token.or(settings.strongest_token().map(|token| token.secret.0.clone()));
        }
        AdminClient::new(address.as_deref().unwrap_or(DEFAULT_ADDRESS), token.as_deref())
    }
}

impl AdminArgs {
    /// A client of that listener that shows no token, for what asks for none. A configuration that the gate would refuse
    /// does not matter: the gate goes on with the former one.
    pub(super) fn client_without_token(self) -> anyhow::Result<AdminClient> {
        let address = match (self.admin, &self.config) {
            (Some(address), _) => address,
            (None, None) => DEFAULT_ADDRESS.to_owned(),
            (None, Some(_)) => match load_admin_address(Sources::of_process(self.config, Flags::default())) {
                Ok(listen) => reachable(&listen)?,
                Err(problems) => {
                    complain(&format!("{problems}: asking at {DEFAULT_ADDRESS}"));
                    DEFAULT_ADDRESS.to_owned()
                }
            },
        };
        AdminClient::new(&address, None)
    }
}

/// The address at which this machine reaches a listener.
fn reachable(listen: &Listen) -> anyhow::Result<String> {
    let Listen::Address(mut address) = listen.clone() else {
        bail!("the configuration does not say where the inherited socket {listen} listens: name it with --admin");
    };
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            std::net::SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            std::net::SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        });
    }
    Ok(address.to_string())
}

fn read_token(file: PathBuf) -> anyhow::Result<String> {
    let text =
        std::fs::read_to_string(&file).with_context(|| format!("cannot read the token of {}", file.display()))?;
    let token = text.trim();
    if token.is_empty() {
        bail!("{} holds no token", file.display());
    }
    Ok(token.to_owned())
}

/// The gate cannot be reached: it was asked nothing.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct NotConnected(String);

/// Sends requests to one admin listener, each on a connection of its own.
pub(super) struct AdminClient {
    address: String,
    authorization: Option<HeaderValue>,
}

impl AdminClient {
    /// For the listener at `address`: a host and a port, or an `http://` URL of them.
    pub(super) fn new(address: &str, token: Option<&str>) -> anyhow::Result<Self> {
        let address = address.strip_prefix("http://").unwrap_or(address).trim_end_matches('/');
        let authorization = token
            .map(|token| {
                let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
                    .map_err(|_| anyhow!("the token file holds characters that no token can have"))?;
                value.set_sensitive(true);
                anyhow::Ok(value)
            })
            .transpose()?;
        Ok(Self { address: address.to_owned(), authorization })
    }

    /// The JSON of a successful answer; `Value::Null` where it has no body.
    pub(super) async fn send(&self, method: Method, target: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let (status, body) = self.exchange_within(TIMEOUT, method, target, body).await?;
        if !status.is_success() {
            bail!(self.refusal(status, &body));
        }
        if body.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&body).with_context(|| self.stranger(status))
    }

    /// The status and the body of any answer, within a time limit.
    pub(super) async fn exchange_within(
        &self,
        limit: Duration,
        method: Method,
        target: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        timeout(limit, self.exchange(method, target, body))
            .await
            .map_err(|_| anyhow!("{} did not answer within {} s", self.address, limit.as_secs()))?
    }

    async fn exchange(
        &self,
        method: Method,
        target: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let mut request = Request::builder().method(method).uri(target).header(HOST, &self.address);
        request = request.header("X-Requested-With", "oncegate");
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = request.body(Full::new(Bytes::from(body))).context("the request cannot be written")?;

        let stream = self.connect().await?;
        let broken = || format!("the connection to {} broke", self.address);
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.with_context(broken)?;
        let connection = tokio::spawn(connection);
        let answer = sender.send_request(request).await.with_context(broken)?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER)
            .collect()
            .await
            .map_err(|error| anyhow!(error).context(broken()))?
            .to_bytes();
        connection.abort();
        Ok((status, body))
    }

    async fn connect(&self) -> anyhow::Result<TcpStream> {
        let address = &self.address;
        match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => bail!(NotConnected(format!(
                "nothing listens at {address}: `oncegate serve` must be running, with this address as its \
                 `admin.listen`; name it with --config, or with --admin"
            ))),
            Ok(Err(error)) => bail!(NotConnected(format!("cannot connect to {address}: {error}"))),
            Err(_) => bail!(NotConnected(format!(
                "cannot connect to {address}: no answer within {} s",
                CONNECT_TIMEOUT.as_secs()
            ))),
        }
    }

    /// The message of an answer that is no success.
    pub(super) fn refusal(&self, status: StatusCode, body: &[u8]) -> String {
        let problem: Value = serde_json::from_slice(body).unwrap_or_default();
        let (Some(code), Some(detail)) = (problem["code"].as_str(), problem["detail"].as_str()) else {
            return self.stranger(status);
        };
        let hint = if status == StatusCode::UNAUTHORIZED { "; give the token with --token-file" } else { "" };
        format!("{code}: {detail}{hint}")
    }

    fn stranger(&self, status: StatusCode) -> String {
        format!("what answers at {} is not oncegate's admin listener (status {})", self.address, status.as_u16())
    }
}
