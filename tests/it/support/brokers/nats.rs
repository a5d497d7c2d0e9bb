//! A NATS server with JetStream, which keeps its streams in files.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use async_nats::ConnectOptions;
use async_nats::jetstream::consumer::{PullConsumer, pull};
use async_nats::jetstream::context::Context;
use async_nats::jetstream::{self, stream};
use futures_util::StreamExt as _;
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use super::{Broker, Message};
use crate::servers::certificates;
use crate::servers::process::{self, Server};
use crate::support::wait::eventually;

const STREAM: &str = "ORDERS";
const SUBJECT: &str = "orders.new";
const CONSUMER: &str = "gate";
const DEAD: &str = "ORDERS-dead-letter";
const USER: &str = "gate";
const PASSWORD: &str = "s3cret";
/// One who has not every right, with the same password.
const LIMITED: &str = "limited";

/// How long the server waits for an acknowledgement: less than the longest attempts of tests take, and more than a busy
/// machine needs to say that one is under way, which the gate does three times within that time.
const ACK_WAIT: Duration = Duration::from_secs(3);

/// How long a stream remembers the id of a message: a copy that comes later is one message more.
const REMEMBERED: Duration = Duration::from_millis(100);

pub struct Nats {
    directory: TempDir,
    address: SocketAddr,
    server: Option<Server>,
    runtime: Runtime,
    is_encrypted: bool,
}

impl Nats {
    /// One whose connections are encrypted, with an authority of its own.
    pub fn start_encrypted() -> Self {
        Self::started(true)
    }

    /// One with a user who may publish to these subjects alone, and its source for that user.
    pub fn start_limited(subjects: &[&str]) -> (Self, String) {
        let user = |name: &str, more: &str| format!("{{ user: \"{name}\", password: \"{PASSWORD}\"{more} }}");
        let rights = format!(", permissions: {{ publish: {subjects:?}, subscribe: [\"_INBOX.>\"] }}");
        let users = format!("authorization {{ users: [ {}, {} ] }}\n", user(USER, ""), user(LIMITED, &rights));
        let server = Self::started_as(false, Some(&users));
        let source = server.source().replace(&format!("//{USER}:"), &format!("//{LIMITED}:"));
        (server, source)
    }

    /// The certificate of its authority.
    pub fn authority(&self) -> PathBuf {
        self.directory.path().join("ca.pem")
    }

    fn started(is_encrypted: bool) -> Self {
        Self::started_as(is_encrypted, None)
    }

    fn started_as(is_encrypted: bool, users: Option<&str>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let directory = process::directory("oncegate-nats");
        let mut server = Self { directory, address: process::free_address(), server: None, runtime, is_encrypted };
        if is_encrypted {
            let directory = server.directory.path();
            certificates::authority(directory, "ca");
            let name = format!("subjectAltName=IP:{}", server.address.ip());
            certificates::signed(directory, "server", "ca", &name);
            for file in ["server.pem", "server.key"] {
                process::give(&directory.join(file));
            }
        }
        if let Some(users) = users {
            std::fs::write(server.users(), users).expect("it can be written");
            process::give(&server.users());
        }
        server.run();
        server.with(|context| async move {
            let config = stream::Config {
                name: STREAM.to_owned(),
                subjects: vec!["orders.>".to_owned()],
                duplicate_window: REMEMBERED,
                ..stream::Config::default()
            };
            Ok(context.create_stream(config).await?)
        });
        server.configure(-1, 1000);
        server
    }

    /// Its users, where it has more than one.
    fn users(&self) -> PathBuf {
        self.directory.path().join("users.conf")
    }

    fn options(&self) -> ConnectOptions {
        let options = ConnectOptions::with_user_and_password(USER.to_owned(), PASSWORD.to_owned());
        match self.is_encrypted {
            true => options.add_root_certificates(self.authority()).require_tls(true),
            false => options,
        }
    }

    async fn connect(&self) -> Result<Context, async_nats::Error> {
        let client = self.options().connect(format!("nats://{}", self.address)).await?;
        Ok(jetstream::new(client))
    }

    fn with<T, F: Future<Output = Result<T, async_nats::Error>>>(&self, act: impl FnOnce(Context) -> F) -> T {
        self.runtime.block_on(async {
            let context = self.connect().await.expect("NATS takes connections");
            act(context).await.expect("NATS does it")
        })
    }

    /// Makes the consumer, or changes it.
    pub fn configure(&self, max_deliver: i64, max_ack_pending: i64) {
        self.configure_with(pull::Config { max_deliver, max_ack_pending, ..pull::Config::default() });
    }

    /// The same, where the server allows no request for messages to be as large, or as long, as the gate's.
    pub fn limit_requests(&self) {
        let (max_batch, max_expires) = (2, Duration::from_secs(1));
        self.configure_with(pull::Config { max_deliver: -1, max_batch, max_expires, ..pull::Config::default() });
    }

    fn configure_with(&self, config: pull::Config) {
        self.with(|context| async move {
            let stream = context.get_stream(STREAM).await?;
            let durable_name = Some(CONSUMER.to_owned());
            Ok(stream.create_consumer(pull::Config { durable_name, ack_wait: ACK_WAIT, ..config }).await?)
        });
    }

    /// Publishes a message with headers that begin and go on so, in Latin-1.
    pub fn publish_raw(&self, header: &str, body: &str) {
        let header = format!("NATS/1.0{header}\r\n\r\n");
        let header: Vec<u8> = header.chars().map(|char| u8::try_from(char).expect("Latin-1")).collect();
        let sizes = format!("{} {}", header.len(), header.len() + body.len());
        self.send(format!("HPUB {SUBJECT} {sizes}"), &[&header, body.as_bytes()].concat());
    }

    /// Publishes a message without headers.
    pub fn publish_bare(&self, body: &str) {
        self.send(format!("PUB {SUBJECT} {}", body.len()), body.as_bytes());
    }

    /// Sends a command without a client library, and waits until the server has taken it.
    fn send(&self, command: String, content: &[u8]) {
        let login =
            format!("CONNECT {{\"user\":\"{USER}\",\"pass\":\"{PASSWORD}\",\"headers\":true,\"verbose\":false}}\r\n");
        let parts = [login.as_bytes(), command.as_bytes(), b"\r\n", content, b"\r\nPING\r\n"];
        let mut stream = BufReader::new(TcpStream::connect(self.address).expect("NATS takes connections"));
        stream.get_mut().write_all(&parts.concat()).expect("NATS takes it");
        let answer = stream.lines().map(|line| line.expect("NATS answers")).find(|line| !line.starts_with("INFO"));
        assert_eq!(answer.as_deref(), Some("PONG"));
    }

    async fn read(consumer: PullConsumer) -> Result<Vec<Message>, async_nats::Error> {
        let mut found = Vec::new();
        loop {
            let mut batch = consumer.batch().max_messages(1000).expires(Duration::from_millis(300)).messages().await?;
            let before = found.len();
            while let Some(message) = batch.next().await {
                let message = message?;
                let header = |name: &str| Some(message.headers.as_ref()?.get(name)?.as_str().to_owned());
                found.push(Message {
                    id: header("x-oncegate-message-id").or_else(|| header("Nats-Msg-Id")),
                    body: String::from_utf8_lossy(&message.payload).into_owned(),
                    reason: header("x-oncegate-reason"),
                });
                message.ack().await?;
            }
            if found.len() == before {
                return Ok(found);
            }
        }
    }
}

impl Broker for Nats {
    const ID: &'static str = "property:message-id";
    const KILLS: usize = 4;
    const PASSWORD: &'static str = PASSWORD;

    fn start() -> Self {
        Self::started(false)
    }

    fn kill9(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.end(Signal::KILL);
        }
    }

    fn run(&mut self) {
        let program = process::find("nats-server", &["/usr/sbin".into()]).expect("nats-server is installed");
        let mut command = process::unprivileged(&program);
        command.args(["-js", "-a"]).arg(self.address.ip().to_string()).arg("-p").arg(self.address.port().to_string());
        match self.users().exists() {
            true => command.arg("-c").arg(self.users()),
            false => command.args(["--user", USER, "--pass", PASSWORD]),
        };
        command.arg("-sd").arg(self.directory.path().join("streams"));
        if self.is_encrypted {
            let file = |name: &str| self.directory.path().join(name);
            command.arg("--tls").arg("--tlscert").arg(file("server.pem")).arg("--tlskey").arg(file("server.key"));
        }
        self.server = Some(start(command, self.directory.path()));
        eventually("NATS takes connections", || {
            let asked = async {
                let listed = self.connect().await.ok()?.stream_names().next().await;
                listed.is_none_or(|name| name.is_ok()).then_some(())
            };
            self.runtime.block_on(async { timeout(Duration::from_secs(3), asked).await.ok().flatten() })
        });
    }

    fn source(&self) -> String {
        let scheme = if self.is_encrypted { "tls" } else { "nats" };
        format!("{scheme}://{USER}:{PASSWORD}@{}?stream={STREAM}&consumer={CONSUMER}", self.address)
    }

    fn keep_order(&self) {
        self.configure(-1, 1);
    }

    fn publish(&self, messages: &[(Option<&str>, &str)]) {
        self.with(|context| async move {
            for (id, body) in messages {
                loop {
                    let mut headers = async_nats::HeaderMap::new();
                    headers.insert("x-source", "shop");
                    headers.insert("content-type", "application/json");
                    if let Some(id) = id {
                        headers.insert("Nats-Msg-Id", *id);
                    }
                    let published = context.publish_with_headers(SUBJECT, headers, (*body).to_owned().into());
                    if !published.await?.await?.duplicate {
                        break;
                    }
                    tokio::time::sleep(REMEMBERED / 4).await;
                }
            }
            Ok(())
        });
    }

    fn waiting(&self) -> usize {
        self.with(|context| async move {
            let mut consumer: PullConsumer = context.get_consumer_from_stream(CONSUMER, STREAM).await?;
            let info = consumer.info().await?;
            Ok(info.num_ack_pending + usize::try_from(info.num_pending)?)
        })
    }

    fn take_waiting(&self) -> Vec<Message> {
        self.with(|context| async move { Self::read(context.get_consumer_from_stream(CONSUMER, STREAM).await?).await })
    }

    fn take_dead(&self) -> Vec<Message> {
        self.with(|context| async move {
            let Ok(stream) = context.get_stream(DEAD).await else { return Ok(Vec::new()) };
            let config = pull::Config { durable_name: Some("test".to_owned()), ..pull::Config::default() };
            Self::read(stream.get_or_create_consumer("test", config).await?).await
        })
    }
}

fn start(command: Command, directory: &Path) -> Server {
    Server::start(command, directory, &directory.join("log"))
}
