//! A small client of the admin API.

use std::io;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest time for a request and its whole answer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Largest answer, in bytes: far more than a page of the most records.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

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
        let (status, body) = timeout(TIMEOUT, self.exchange(method, target, body))
            .await
            .map_err(|_| anyhow!("{} did not answer within {} s", self.address, TIMEOUT.as_secs()))??;
        if !status.is_success() {
            bail!(self.refusal(status, &body));
        }
        if body.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&body).with_context(|| self.stranger(status))
    }

    /// The status and the body of any answer.
    pub(super) async fn exchange(
        &self,
        method: Method,
        target: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let mut request = Request::builder().method(method).uri(target).header(HOST, &self.address);
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
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => bail!(
                "nothing listens at {address}: `oncegate serve` must be running, with this address as its \
                 `admin.listen`; give another with --admin"
            ),
            Ok(Err(error)) => Err(error).with_context(|| format!("cannot connect to {address}")),
            Err(_) => bail!("cannot connect to {address}: no answer within {} s", CONNECT_TIMEOUT.as_secs()),
        }
    }

    fn refusal(&self, status: StatusCode, body: &[u8]) -> String {
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
