//! A small client of the admin API, and the options of the commands that use it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::complain;
use super::table::shown;
use crate::config::{Flags, ServerTrust, Sources, client_tls, load_admin, load_admin_address};
use crate::http::socket::Listen;
use crate::http::upstream::Io;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest time for a request and its whole answer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Largest answer, in bytes: far more than a page of the most records.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

const DEFAULT_ADDRESS: &str = "127.0.0.1:9090";

/// How the URL of a listener begins that encrypts.
const HTTPS: &str = "https://";

/// The heading in the help of the options that say how to reach the admin listener.
const HEADING: &str = "Admin listener";

/// Where the admin listener of a running gate is. [`AdminArgs::check`] judges the values, not clap: clap also judges a variable that a
/// flag overrides.
#[derive(Args, Debug)]
pub(super) struct AdminArgs {
    /// The gate's configuration file, whose `[admin]` names the admin listener and its token
    #[arg(short, long, global = true, help_heading = HEADING, value_name = "FILE", env = super::FILE_VARIABLE, value_parser = any_path())]
    config: Option<PathBuf>,
    /// Where the admin listener is: an address and a port, or an https:// URL of a name and a port [default: 127.0.0.1:9090]
    #[arg(long, global = true, help_heading = HEADING, value_name = "ADDR", env = "ONCEGATE_ADMIN__LISTEN")]
    admin: Option<String>,
    /// A file with the admin listener's token
    #[arg(long, global = true, help_heading = HEADING, value_name = "FILE", env = "ONCEGATE_ADMIN__TOKEN_FILE", value_parser = any_path())]
    token_file: Option<PathBuf>,
    /// The CA certificates to check the admin listener's certificate with. Default: the certificate named in --config; without
    /// --config, the system's CAs
    #[arg(long, global = true, help_heading = HEADING, value_name = "FILE", env = "ONCEGATE_ADMIN_CA", value_parser = any_path())]
    admin_ca: Option<PathBuf>,
    /// The certificate to show to an admin listener with `client_ca`
    #[arg(long, global = true, help_heading = HEADING, value_name = "FILE", env = "ONCEGATE_ADMIN_CERT", value_parser = any_path())]
    admin_cert: Option<PathBuf>,
    /// The key of --admin-cert
    #[arg(long, global = true, help_heading = HEADING, value_name = "FILE", env = "ONCEGATE_ADMIN_KEY", value_parser = any_path())]
    admin_key: Option<PathBuf>,
}

impl AdminArgs {
    /// A client of that listener.
    pub(super) fn client(self) -> anyhow::Result<AdminClient> {
        self.check()?;
        let token = self.token_file.clone().map(read_token).transpose()?;
        let settings = match &self.config {
            Some(config) => match load_admin(Sources::of_process(Some(config.clone()), Flags::default())) {
                Ok(settings) => Some(settings),
                // Nothing of it is needed.
                Err(_) if self.admin.is_some() && token.is_some() => None,
                Err(problems) => match self.admin.as_deref().filter(|address| stays_here(address)) {
                    // The gate may ask for no token, or says that it does.
                    Some(address) => {
                        complain(&format!("{problems}: asking at {address} without a token"));
                        None
                    }
                    None => return Err(problems.into()),
                },
            },
            None => None,
        };
        let own = match &settings {
            Some(settings) => settings.tls.as_ref().map(|tls| ServerTrust::Own(tls.files.cert.clone())),
            None => self.believed_of_unreadable()?,
        };
        let address = match (&self.admin, &settings) {
            (Some(address), _) => address.clone(),
            (None, Some(settings)) => reachable(&settings.listen)?,
            (None, None) => DEFAULT_ADDRESS.to_owned(),
        };
        let configured = settings.as_ref().and_then(|settings| settings.strongest_token());
        let token = token.or_else(|| configured.map(|token| token.secret.0.clone()));
        AdminClient::new(&address, token.as_deref(), self.tls(&address, own)?)
    }

    /// Checks the values that count.
    fn check(&self) -> anyhow::Result<()> {
        let Self { config, admin, token_file, admin_ca, admin_cert, admin_key } = self;
        for (file, flag, variable) in [
            (config, "--config", super::FILE_VARIABLE),
            (token_file, "--token-file", "ONCEGATE_ADMIN__TOKEN_FILE"),
            (admin_ca, "--admin-ca", "ONCEGATE_ADMIN_CA"),
            (admin_cert, "--admin-cert", "ONCEGATE_ADMIN_CERT"),
            (admin_key, "--admin-key", "ONCEGATE_ADMIN_KEY"),
        ] {
            if file.as_ref().is_some_and(|file| file.as_os_str().is_empty()) {
                bail!(WrongParameter(format!("{flag}, or {variable}, is empty: leave it out, or name a file")));
            }
        }
        match admin.as_deref().map(admin_address) {
            Some(Err(wrong)) => bail!(WrongParameter(format!("--admin, or ONCEGATE_ADMIN__LISTEN: {wrong}"))),
            _ => Ok(()),
        }
    }

    /// Whom to believe where `[admin]` cannot be read, such as by somebody who may not read its key: a token must not go in the clear to a
    /// listener that encrypts.
    fn believed_of_unreadable(&self) -> anyhow::Result<Option<ServerTrust>> {
        let Some(config) = self.config.clone() else { return Ok(None) };
        match load_admin_address(Sources::of_process(Some(config), Flags::default())) {
            Ok((_, is_encrypted)) => Ok(is_encrypted.then_some(ServerTrust::SignedBySystem)),
            Err(_) if self.admin.as_deref().is_some_and(stays_here) => Ok(None),
            Err(problems) => bail!(
                "{problems}\nit does not say whether the admin listener encrypts: name it with http:// or https:// in --admin"
            ),
        }
    }

    /// A client of that listener that shows no token, for what asks for none. A configuration that the gate would refuse
    /// does not matter: the gate goes on with the former one.
    pub(super) fn client_without_token(self) -> anyhow::Result<AdminClient> {
        self.check()?;
        let known = self.config.clone().map(|config| {
            let known = load_admin_address(Sources::of_process(Some(config), Flags::default()));
            known.map(|(listen, is_encrypted)| (reachable(&listen), is_encrypted))
        });
        let (address, is_encrypted) = match (self.admin.clone(), known) {
            (Some(address), known) => (address, known.is_some_and(|known| known.is_ok_and(|(_, encrypts)| encrypts))),
            (None, None) => (DEFAULT_ADDRESS.to_owned(), false),
            (None, Some(Ok((address, is_encrypted)))) => (address?, is_encrypted),
            (None, Some(Err(problems))) => {
                complain(&format!(
                    "{problems}\noncegate: it does not say where the admin listener is; asking at {DEFAULT_ADDRESS}"
                ));
                (DEFAULT_ADDRESS.to_owned(), false)
            }
        };
        // The request has nothing secret, and the gate may go on with a certificate that has left its file.
        let tls = self.tls(&address, is_encrypted.then_some(ServerTrust::Any))?;
        AdminClient::new(&address, None, tls)
    }

    /// How its connections are encrypted, where they are; `configured` is what the configuration says of its certificate.
    fn tls(self, address: &str, configured: Option<ServerTrust>) -> anyhow::Result<Option<Arc<ClientConfig>>> {
        let Self { admin_ca, admin_cert, admin_key, .. } = self;
        if admin_cert.is_some() != admin_key.is_some() {
            let pair = "--admin-cert and --admin-key go together, or ONCEGATE_ADMIN_CERT and ONCEGATE_ADMIN_KEY";
            bail!(WrongParameter(pair.to_owned()));
        }
        let is_meant = configured.is_some() || admin_ca.is_some() || admin_cert.is_some();
        if address.starts_with("http://") {
            if admin_ca.is_some() || admin_cert.is_some() {
                let unused = "an http:// listener does not encrypt, and has no use for --admin-ca, --admin-cert and --admin-key: \
                              write https:// in --admin, or leave them and their variables out";
                bail!(WrongParameter(unused.to_owned()));
            }
            return Ok(None);
        }
        if !is_meant && !address.starts_with(HTTPS) {
            return Ok(None);
        }
        let believed = admin_ca.map(ServerTrust::SignedBy).or(configured).unwrap_or(ServerTrust::SignedBySystem);
        client_tls(believed, admin_cert, admin_key).map(Some).map_err(|wrong| anyhow!(wrong))
    }
}

/// A path that may be empty.
fn any_path() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// Whether the other end says that the certificate shown to it is missing or not to be believed. With TLS 1.3 it says so once
/// the handshake is over for this end.
fn is_refused_certificate(error: &anyhow::Error) -> bool {
    let io_errors = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    let mut tls_errors = io_errors.filter_map(|error| error.get_ref()?.downcast_ref::<rustls::Error>());
    tls_errors.any(|error| matches!(error, rustls::Error::AlertReceived(_)))
}

/// The value of --admin, which names a host and a port.
fn admin_address(text: &str) -> Result<(), String> {
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    match bare(text).rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && !host.contains(['/', '@']) && is_port(port) => Ok(()),
        _ => Err("give an address and a port, such as 127.0.0.1:9090 or https://gate.internal:9090".to_owned()),
    }
}

/// A refusal that names options of the command line where it names the parameters or members that they become.
fn in_options(refusal: &str) -> String {
    // A change of many has its filter in the body.
    if let Some((code, (name, rest))) =
        refusal.split_once(": `").and_then(|(code, rest)| Some((code, rest.split_once('`')?)))
        && rest.starts_with(" must be ")
    {
        return format!("{code}: --{}{rest}", name.replace('_', "-"));
    }
    let mut parts = refusal.split("query parameter `");
    let mut said = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once('`').unwrap_or((part, ""));
        match name {
            "cursor" => {
                let rest = rest.replace("the `next` of the page before", "what a list ends with after `next: `");
                said.extend(["--after", &*rest]);
            }
            name => said.extend(["--", &*name.replace('_', "-"), rest]),
        }
    }
    said
}

/// An address without what stands around it in a URL.
fn bare(address: &str) -> &str {
    let bare = address.strip_prefix("http://").or_else(|| address.strip_prefix(HTTPS));
    bare.unwrap_or(address).trim_end_matches('/')
}

/// Whether what goes to this address stays on this machine, or it says itself how to go there.
fn stays_here(address: &str) -> bool {
    let is_loopback = |address: std::net::SocketAddr| address.ip().is_loopback();
    address.contains("://") || address.starts_with("localhost:") || address.parse().is_ok_and(is_loopback)
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

/// The error of a change whose answer is lost. A repeated purge could remove the record of a retry that has claimed the key since.
const IN_DOUBT: &str = "the change may have been made: see `oncegate audit` before you repeat it";

/// The gate cannot be reached: it was asked nothing.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct NotConnected(String);

/// The gate finds that what it was asked makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct WrongParameter(pub(super) String);

/// Sends requests to one admin listener, each on a connection of its own.
pub(super) struct AdminClient {
    address: String,
    authorization: Option<HeaderValue>,
    tls: Option<Arc<ClientConfig>>,
    /// Set once what answers there has shown that it is one.
    is_recognized: OnceCell<()>,
}

impl AdminClient {
    /// For the listener at `address`: a host and a port, or an `http://` or `https://` URL of them. `tls` where it encrypts.
    pub(super) fn new(address: &str, token: Option<&str>, tls: Option<Arc<ClientConfig>>) -> anyhow::Result<Self> {
        let authorization = token
            .map(|token| {
                let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
                    .map_err(|_| anyhow!("the token file holds characters that no token can have"))?;
                value.set_sensitive(true);
                anyhow::Ok(value)
            })
            .transpose()?;
        Ok(Self { address: bare(address).to_owned(), authorization, tls, is_recognized: OnceCell::new() })
    }

    /// The JSON of a successful answer; `Value::Null` where it has no body. The error of a change says so if the gate may have made it.
    pub(super) async fn send(&self, method: Method, target: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let changes = method != Method::GET && body.is_none_or(|body| body["dry_run"] != true);
        let (status, body) = self.exchange_within(TIMEOUT, method, target, body).await.map_err(|error| {
            match changes && !error.is::<NotConnected>() {
                true => error.context(IN_DOUBT),
                false => error,
            }
        })?;
        if !status.is_success() {
            let refusal = self.refusal(status, &body);
            // What it asks comes from the command line.
            bail!(match status {
                StatusCode::BAD_REQUEST => anyhow!(WrongParameter(in_options(&refusal))),
                _ => anyhow!(refusal),
            });
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

    /// Sends a request. Another service at this address, such as the upstream behind the gate's listener for clients, is sent no
    /// token and asked for no change.
    async fn exchange(
        &self,
        method: Method,
        target: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        self.is_recognized.get_or_try_init(|| self.recognize()).await?;
        self.ask(method, target, body, self.authorization.as_ref()).await
    }

    /// Checks that an admin listener answers at this address. Where it fails, nothing else was asked.
    async fn recognize(&self) -> anyhow::Result<()> {
        let asked = timeout(CONNECT_TIMEOUT, self.ask(Method::GET, "/livez", None, None)).await;
        let (status, body) = asked
            .map_err(|_| {
                NotConnected(format!("{} did not answer within {} s", self.address, CONNECT_TIMEOUT.as_secs()))
            })?
            .map_err(|error| {
                let hint = if is_refused_certificate(&error) {
                    "; the listener has `client_ca`: --admin-cert and --admin-key must name a certificate that it believes"
                } else {
                    ""
                };
                NotConnected(super::describe(&error) + hint)
            })?;
        let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
        if status != StatusCode::OK || answer["status"] != "live" {
            bail!(NotConnected(self.refusal(status, &body)));
        }
        Ok(())
    }

    async fn ask(
        &self,
        method: Method,
        target: &str,
        body: Option<&Value>,
        authorization: Option<&HeaderValue>,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let mut request = Request::builder().method(method).uri(target).header(HOST, &self.address);
        request = request.header("X-Requested-With", "oncegate");
        if let Some(authorization) = authorization {
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
            .map_err(|error| match error.is::<LengthLimitError>() {
                true => anyhow!("the answer of {} is larger than {} MiB", self.address, MAX_ANSWER >> 20),
                false => anyhow!(error).context(broken()),
            })?
            .to_bytes();
        connection.abort();
        Ok((status, body))
    }

    async fn connect(&self) -> anyhow::Result<Box<dyn Io>> {
        let (address, stream) = (&self.address, self.connect_tcp().await?);
        let Some(tls) = &self.tls else { return Ok(Box::new(stream)) };
        let host = address.rsplit_once(':').map_or(&**address, |(host, _)| host);
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())
            .map_err(|_| anyhow!("the host of {address} is not a valid TLS server name"))?;
        let handshake = TlsConnector::from(Arc::clone(tls)).connect(name, stream);
        match timeout(CONNECT_TIMEOUT, handshake).await {
            Ok(Ok(stream)) => Ok(Box::new(stream)),
            Ok(Err(error)) => bail!(NotConnected(format!(
                "the TLS handshake with {address} failed: {error}; --admin-ca names who vouches for its certificate, and \
                 --admin-cert and --admin-key what to show it"
            ))),
            Err(_) => bail!(NotConnected(format!(
                "the TLS handshake with {address} took longer than {} s",
                CONNECT_TIMEOUT.as_secs()
            ))),
        }
    }

    async fn connect_tcp(&self) -> anyhow::Result<TcpStream> {
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
        shown(&format!("{code}: {detail}{hint}"))
    }

    fn stranger(&self, status: StatusCode) -> String {
        format!("what answers at {} is not oncegate's admin listener (status {})", self.address, status.as_u16())
    }
}

#[cfg(test)]
mod tests {
    use super::{AdminArgs, AdminClient, WrongParameter, admin_address, in_options};

    #[test]
    fn an_admin_address_is_a_host_and_a_port() {
        for address in ["127.0.0.1:9090", "[::1]:9090", "http://gate:9090", "https://gate.internal:9090"] {
            assert_eq!(admin_address(address), Ok(()), "{address}");
        }
        for wrong in ["", "gate", ":9090", "gate:0", "gate:70000", "http://gate:9090/x", "http://user:secret@gate:9090"]
        {
            let said = admin_address(wrong).unwrap_err();
            assert!(!said.contains("secret") && !said.contains("gate:9090/x"), "{wrong}: {said}");
        }
    }

    fn asked(args: &[&str]) -> anyhow::Result<AdminClient> {
        #[derive(clap::Parser)]
        struct CommandLine {
            #[command(flatten)]
            admin: AdminArgs,
        }
        <CommandLine as clap::Parser>::try_parse_from([&["oncegate"], args].concat()).unwrap().admin.client()
    }

    #[test]
    fn what_makes_no_sense_is_a_wrong_command_line() {
        for (args, said) in [
            (&["--admin", "nonsense"][..], "--admin, or ONCEGATE_ADMIN__LISTEN: give an address and a port"),
            (&["--admin", "http://:9090"], "--admin"),
            (&["--admin", "127.0.0.1:0"], "--admin"),
            (&["--admin", "https://gate/x:9090"], "--admin"),
            (&["--admin", "systemd:admin"], "--admin"),
            (&["--config", ""], "--config, or ONCEGATE_CONFIG, is empty"),
            (&["--admin-cert", "cert.pem"], "go together"),
            // They would be ignored, and the token sent in the clear.
            (&["--admin", "http://127.0.0.1:9090", "--admin-ca", "ca.pem"], "does not encrypt"),
            (
                &["--admin", "http://127.0.0.1:9090", "--admin-cert", "c.pem", "--admin-key", "k.pem"],
                "does not encrypt",
            ),
        ] {
            let wrong = asked(args).err().unwrap().downcast::<WrongParameter>().unwrap();
            assert!(wrong.0.contains(said), "{args:?}: {}", wrong.0);
        }
        assert!(asked(&["--admin", "http://127.0.0.1:9090"]).is_ok());
    }

    #[test]
    fn a_refusal_names_the_options() {
        for (refusal, said) in [
            (
                "bad-request: query parameter `cursor` must be the `next` of the page before",
                "bad-request: --after must be what a list ends with after `next: `",
            ),
            (
                "bad-request: query parameter `older_than` must be a duration",
                "bad-request: --older-than must be a duration",
            ),
            ("bad-request: `scope` must be a part of a scope", "bad-request: --scope must be a part of a scope"),
            (
                "bad-request: `all` and `filter` do not go together",
                "bad-request: `all` and `filter` do not go together",
            ),
        ] {
            assert_eq!(in_options(refusal), said);
        }
    }
}
