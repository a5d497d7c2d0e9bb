//! A RabbitMQ, and what a test does with its queue there.

mod raw;

use std::io::{PipeWriter, pipe};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, Consumer};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::time::timeout;

pub use self::raw::RawMessage;
use super::{Broker, Link, Message};
use crate::support::process::Process;
use crate::support::wait::{PATIENCE, eventually, within};

/// Where the port of the server stands that the tests of a run share (see `tests/run`).
const SHARED: &str = "ONCEGATE_TEST_RABBITMQ";

/// Starts the server where Debian has it, which is not the one in the path: that one runs as a user of its own. When the input
/// ends, be it that the test was killed, the server is killed, and Erlang's directory of names with it.
const SCRIPT: &str =
    "/usr/lib/rabbitmq/bin/rabbitmq-server </dev/null & cat >/dev/null; epmd -kill >/dev/null; kill -9 0";

/// A queue of a server.
pub struct RabbitMq {
    port: u16,
    queue: String,
    /// The server, if no other test has it.
    own: Option<Server>,
    runtime: Runtime,
}

/// A server, which keeps what it has in a directory of its own.
pub struct Server {
    dir: TempDir,
    pub port: u16,
    /// Of the processes that it knows each other by.
    others: [u16; 2],
    /// The process, and what keeps it: its input.
    process: Option<(Process, PipeWriter)>,
}

/// A consumer that is no gate. Dropped, it ends.
pub struct Consuming {
    _consumer: Consumer,
    _connection: Connection,
}

/// A port that no connection is given: it is free again where the server starts again.
fn free_port() -> u16 {
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    std::iter::repeat_with(|| fastrand::u16(20_000..32_000)).find(is_free).expect("a free port")
}

impl Broker for RabbitMq {
    const ID: &'static str = "property:message-id";
    const KILLS: usize = 4;
    const PASSWORD: &'static str = "guest";

    fn start() -> Self {
        Self::started(FieldTable::default())
    }

    fn shared() -> Self {
        Self::shared_with(FieldTable::default())
    }

    fn run(&mut self) {
        self.own.as_mut().expect("a server of its own").run();
        self.wait();
    }

    fn kill9(&mut self) {
        self.own.as_mut().expect("a server of its own").kill9();
    }

    fn source(&self) -> String {
        self.source_at(self.port)
    }

    fn publish(&self, messages: &[(Option<&str>, &str)]) {
        let queue = self.name();
        self.with(|channel| async move {
            for (id, body) in messages {
                let mut headers = FieldTable::default();
                headers.insert("x-source".into(), AMQPValue::LongString("shop".into()));
                let mut properties = BasicProperties::default()
                    .with_delivery_mode(2)
                    .with_content_type("application/json".into())
                    .with_headers(headers);
                if let Some(id) = id {
                    properties = properties.with_message_id((*id).into());
                }
                let options = BasicPublishOptions::default();
                channel.basic_publish("".into(), queue.clone(), options, body.as_bytes(), properties).await?.await?;
            }
            Ok(())
        });
    }

    fn waiting(&self) -> usize {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = self.name();
        let count = self.with(|channel| async move {
            Ok(channel.queue_declare(queue, options, FieldTable::default()).await?.message_count())
        });
        count as usize
    }

    fn take_waiting(&self) -> Vec<Message> {
        self.take(self.name())
    }

    fn take_dead(&self) -> Vec<Message> {
        self.take(self.dead_letters())
    }
}

impl Server {
    /// One that starts: it does not serve yet.
    pub fn begin() -> Self {
        let dir = TempDir::new().expect("a directory");
        let mut server = Self { dir, port: free_port(), others: [free_port(), free_port()], process: None };
        server.run();
        server
    }

    fn run(&mut self) {
        let path = |name: &str| self.dir.path().join(name);
        let [distribution, mapper] = self.others;
        let (input, kept) = pipe().expect("a pipe");
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT]).stdin(input).stdout(Stdio::null());
        let places: [(&str, PathBuf); 7] = [
            ("HOME", path("")),
            ("RABBITMQ_MNESIA_BASE", path("data")),
            ("RABBITMQ_LOG_BASE", path("log")),
            ("RABBITMQ_ENABLED_PLUGINS_FILE", path("plugins")),
            ("RABBITMQ_CONF_ENV_FILE", path("none")),
            ("RABBITMQ_CONFIG_FILE", path("none")),
            ("RABBITMQ_PID_FILE", path("pid")),
        ];
        command.envs(places);
        command.env("RABBITMQ_NODENAME", "rabbit@localhost").env("RABBITMQ_LOGS", "-");
        command.env("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1").env("RABBITMQ_NODE_PORT", self.port.to_string());
        command.env("RABBITMQ_DIST_PORT", distribution.to_string());
        command.env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "-kernel inet_dist_use_interface {127,0,0,1}");
        command.env("ERL_EPMD_PORT", mapper.to_string()).env("ERL_EPMD_ADDRESS", "127.0.0.1");
        // It may be ended while the server is still known there.
        command.env("ERL_EPMD_RELAXED_COMMAND_CHECK", "1");
        // What the script kills.
        command.process_group(0);
        self.process = Some((Process::start_as_it_is(command, ()), kept));
    }

    /// Runs the command line of the server.
    fn control(&self, args: &[&str]) {
        let mut command = Command::new("/usr/lib/rabbitmq/bin/rabbitmqctl");
        command.args(args).env("HOME", self.dir.path()).env("RABBITMQ_NODENAME", "rabbit@localhost");
        command.env("RABBITMQ_CONF_ENV_FILE", self.dir.path().join("none"));
        command.env("ERL_EPMD_PORT", self.others[1].to_string()).env("ERL_EPMD_ADDRESS", "127.0.0.1");
        let done = command.stdin(Stdio::null()).output().expect("rabbitmqctl runs");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    fn kill9(&mut self) {
        if let Some((mut process, input)) = self.process.take() {
            drop(input);
            process.wait();
        }
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        eventually("it is gone", || TcpStream::connect(address).is_err().then_some(()));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill9();
    }
}

impl RabbitMq {
    /// One whose queue is kept like this (`classic`, `quorum`, `stream`), and may have a single active consumer.
    pub fn of_type(queue_type: &str, has_single_active_consumer: bool) -> Self {
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString(queue_type.into()));
        if has_single_active_consumer {
            arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
        }
        Self::shared_with(arguments)
    }

    /// One of its own with a quorum queue, which drops a message that came back more often than this.
    pub fn start_quorum(delivery_limit: i32) -> Self {
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(delivery_limit));
        Self::started(arguments)
    }

    /// Puts a message with this header into the queue.
    pub fn publish_with(&self, name: &str, value: AMQPValue, body: &str) {
        let mut headers = FieldTable::default();
        headers.insert(name.into(), value);
        let properties = BasicProperties::default().with_message_id(body.into()).with_headers(headers);
        let (queue, options, body) = (self.name(), BasicPublishOptions::default(), body.to_owned());
        self.with(|channel| async move {
            channel.basic_publish("".into(), queue, options, body.as_bytes(), properties).await?.await
        });
    }

    /// Whether memory is short, from now on.
    pub fn set_alarm(&self, is_on: bool) {
        let limit: &[&str] = if is_on { &["absolute", "1"] } else { &["0.4"] };
        let server = self.own.as_ref().expect("a server of its own");
        server.control(&[&["set_vm_memory_high_watermark"], limit].concat());
    }

    fn started(arguments: FieldTable) -> Self {
        let server = Server::begin();
        Self::on(server.port, Some(server), arguments)
    }

    fn shared_with(arguments: FieldTable) -> Self {
        match std::env::var(SHARED) {
            Ok(port) => Self::on(port.parse().expect("a port"), None, arguments),
            Err(_) => Self::started(arguments),
        }
    }

    /// A link to it.
    pub fn link(&self) -> Link {
        Link::to(self.port)
    }

    /// The source of a consumer over a link.
    pub fn source_over(&self, link: &Link) -> String {
        self.source_at(link.port)
    }

    fn source_at(&self, port: u16) -> String {
        format!("amqp://guest:guest@127.0.0.1:{port}/%2F?queue={}", self.queue)
    }

    /// Consumes the queue as an older gate does, for as long as this is kept.
    pub fn consume(&self) -> Consuming {
        let (connection, channel) = self.try_channel().expect("RabbitMQ takes connections");
        let consuming =
            channel.basic_consume(self.name(), "".into(), BasicConsumeOptions::default(), FieldTable::default());
        let consumer = self.runtime.block_on(consuming).expect("RabbitMQ lets it consume");
        drop(channel);
        Consuming { _consumer: consumer, _connection: connection }
    }

    /// Makes the queue of the dead letters, which takes none.
    pub fn refuse_dead_letters(&self) {
        let (name, options) =
            (self.dead_letters(), QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() });
        let mut arguments = FieldTable::default();
        arguments.insert("x-max-length".into(), AMQPValue::LongInt(0));
        arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
        self.with(|channel| async move { channel.queue_declare(name, options, arguments).await });
    }

    /// The queue of the dead letters takes them after all.
    pub fn take_dead_letters(&self) {
        let name = self.dead_letters();
        self.with(|channel| async move { channel.queue_delete(name, QueueDeleteOptions::default()).await });
        let (name, options) =
            (self.dead_letters(), QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() });
        self.with(|channel| async move { channel.queue_declare(name, options, FieldTable::default()).await });
    }

    /// A new queue.
    fn on(port: u16, own: Option<Server>, arguments: FieldTable) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let queue = format!("orders-{:016x}", fastrand::u64(..));
        let broker = Self { port, queue, own, runtime };
        broker.wait();
        let (name, options) = (broker.name(), QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() });
        broker.with(|channel| async move { channel.queue_declare(name, options, arguments).await });
        broker
    }

    fn name(&self) -> ShortString {
        self.queue.as_str().into()
    }

    fn dead_letters(&self) -> ShortString {
        format!("{}.dead-letter", self.queue).into()
    }

    /// It reads its queues first.
    fn wait(&self) {
        within(3 * PATIENCE, "RabbitMQ takes connections", || self.try_channel());
    }

    fn try_channel(&self) -> Option<(Connection, Channel)> {
        let connecting = async {
            let url = format!("amqp://guest:guest@127.0.0.1:{}/%2F", self.port);
            let connection = Connection::connect(&url, ConnectionProperties::default()).await.ok()?;
            let channel = connection.create_channel().await.ok()?;
            channel.confirm_select(ConfirmSelectOptions::default()).await.ok()?;
            Some((connection, channel))
        };
        // One that is about to serve may say nothing.
        self.runtime.block_on(async { timeout(Duration::from_secs(3), connecting).await.ok().flatten() })
    }

    fn with<T, F: Future<Output = lapin::Result<T>>>(&self, act: impl FnOnce(Channel) -> F) -> T {
        let (connection, channel) = self.try_channel().expect("RabbitMQ takes connections");
        let done = self.runtime.block_on(act(channel)).expect("RabbitMQ does it");
        drop(connection);
        done
    }

    /// Takes every message out of a queue.
    fn take(&self, queue: ShortString) -> Vec<Message> {
        self.with(|channel| async move {
            let mut messages = Vec::new();
            while let Some(got) = channel.basic_get(queue.clone(), BasicGetOptions::default()).await? {
                let properties = &got.delivery.properties;
                let reason = properties.headers().as_ref().and_then(|headers| headers.inner().get("x-oncegate-reason"));
                messages.push(Message {
                    id: properties.message_id().as_ref().map(ToString::to_string),
                    body: String::from_utf8_lossy(&got.delivery.data).into_owned(),
                    reason: reason.and_then(|reason| match reason {
                        AMQPValue::LongString(text) => Some(String::from_utf8_lossy(text.as_bytes()).into_owned()),
                        _ => None,
                    }),
                });
                got.delivery.ack(BasicAckOptions::default()).await?;
            }
            Ok(messages)
        })
    }
}

impl Drop for RabbitMq {
    fn drop(&mut self) {
        if self.own.is_none() {
            let queues = [self.name(), self.dead_letters()];
            self.with(|channel| async move {
                for queue in queues {
                    channel.queue_delete(queue, QueueDeleteOptions::default()).await?;
                }
                Ok(())
            });
        }
    }
}
