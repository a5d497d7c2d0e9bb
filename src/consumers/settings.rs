//! The settings of a consumer, and where each broker keeps messages.

use std::fmt;
use std::sync::Arc;

use http::{HeaderValue, Method, Uri};

use crate::gate::Gate;
use crate::idempotency::message::MessageKeyRule;

/// `[[consumers]]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Its name in logs and metrics.
    pub name: Arc<str>,
    /// Where its messages come from.
    pub source: Source,
    /// The request that each of them becomes.
    pub request: RequestLine,
    /// Where a message has its key.
    pub key: MessageKeyRule,
    /// How many messages run at a time.
    pub concurrency: u32,
    /// Where messages go that are given up; `None` is the broker's default.
    pub dead_letter: Option<String>,
}

impl Settings {
    /// Whether a gate has a route for its messages.
    #[must_use]
    pub fn has_route(&self, gate: &Gate) -> bool {
        gate.takes_messages(&self.request.method, self.request.host.as_ref(), &self.request.target)
    }
}

/// Where a message goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestLine {
    /// The method.
    pub method: Method,
    /// Path and query.
    pub target: Uri,
    /// The host; if omitted, the upstream's.
    pub host: Option<HeaderValue>,
}

/// Where messages come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A queue of RabbitMQ (AMQP 0-9-1).
    Amqp(Amqp),
    /// A topic of Kafka.
    Kafka(Kafka),
    /// A stream of NATS JetStream.
    Nats(Nats),
}

/// A queue of RabbitMQ.
#[derive(Clone, PartialEq, Eq)]
pub struct Amqp {
    /// Whether the connection is encrypted.
    pub is_encrypted: bool,
    /// The server's host.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// The user.
    pub user: String,
    /// The user's password.
    pub password: String,
    /// The virtual host.
    pub virtual_host: String,
    /// The queue.
    pub queue: String,
}

/// A topic of Kafka, consumed as a member of a group.
#[derive(Clone, PartialEq, Eq)]
pub struct Kafka {
    /// Brokers to ask first: hosts and ports.
    pub servers: Vec<(String, u16)>,
    /// The user and the user's password (SASL PLAIN).
    pub login: Option<(String, String)>,
    /// The topic.
    pub topic: String,
    /// The group, whose members share the partitions.
    pub group: String,
}

/// A durable pull consumer of a stream of NATS JetStream.
#[derive(Clone, PartialEq, Eq)]
pub struct Nats {
    /// Whether the connection is encrypted.
    pub is_encrypted: bool,
    /// Servers of one cluster: hosts and ports.
    pub servers: Vec<(String, u16)>,
    /// Who connects.
    pub login: NatsLogin,
    /// The stream.
    pub stream: String,
    /// Its consumer.
    pub consumer: String,
}

/// Who connects to NATS.
#[derive(Clone, PartialEq, Eq)]
pub enum NatsLogin {
    /// Without a name.
    Anonymous,
    /// A token.
    Token(String),
    /// A user and a password.
    User(String, String),
}

impl Amqp {
    /// What a message can have as `property:NAME`.
    pub(super) const PROPERTIES: [&str; 6] =
        ["message-id", "correlation-id", "type", "app-id", "exchange", "routing-key"];
}

impl Kafka {
    /// What a message can have as `property:NAME`.
    pub(super) const PROPERTIES: [&str; 4] = ["key", "position", "topic", "partition"];
}

impl Nats {
    /// What a message can have as `property:NAME`.
    pub(super) const PROPERTIES: [&str; 3] = ["message-id", "position", "subject"];
}

impl Source {
    /// What a message of this broker can have as `property:NAME`.
    #[must_use]
    pub fn properties(&self) -> &'static [&'static str] {
        match self {
            Self::Amqp(_) => &Amqp::PROPERTIES,
            Self::Kafka(_) => &Kafka::PROPERTIES,
            Self::Nats(_) => &Nats::PROPERTIES,
        }
    }

    /// Whether messages of some broker have this as `property:NAME`.
    #[must_use]
    pub fn is_property(name: &str) -> bool {
        [&Amqp::PROPERTIES[..], &Kafka::PROPERTIES, &Nats::PROPERTIES].concat().contains(&name)
    }

    /// Where a message has its key if the configuration does not say so.
    #[must_use]
    pub fn default_key(&self) -> &'static [&'static str] {
        match self {
            Self::Amqp(_) => &["property:message-id"],
            Self::Kafka(_) => &["property:position"],
            Self::Nats(_) => &["property:message-id", "property:position"],
        }
    }

    /// The cargo feature that this build lacks to use this broker.
    #[must_use]
    pub fn missing_feature(&self) -> Option<&'static str> {
        let (feature, is_built) = match self {
            Self::Amqp(_) => ("amqp", cfg!(feature = "amqp")),
            Self::Kafka(_) => ("kafka", cfg!(feature = "kafka")),
            Self::Nats(_) => ("nats", cfg!(feature = "nats")),
        };
        (!is_built).then_some(feature)
    }

    /// Whether dead letters that go there come back as messages. Of NATS, the stream says which subjects it has.
    #[must_use]
    pub fn is_own(&self, dead_letter: &str) -> bool {
        match self {
            Self::Amqp(_) | Self::Kafka(_) => self.name() == dead_letter,
            Self::Nats(_) => false,
        }
    }

    /// What the messages stand in: a queue, a topic or a stream.
    fn name(&self) -> &str {
        match self {
            Self::Amqp(amqp) => &amqp.queue,
            Self::Kafka(kafka) => &kafka.topic,
            Self::Nats(nats) => &nats.stream,
        }
    }
}

impl Settings {
    /// Where messages go that are given up.
    #[cfg_attr(
        not(any(feature = "amqp", feature = "kafka", feature = "nats")),
        expect(dead_code, reason = "no broker")
    )]
    pub(super) fn dead_letter(&self) -> String {
        self.dead_letter.clone().unwrap_or_else(|| format!("{}.dead-letter", self.source.name()))
    }
}

impl fmt::Debug for Amqp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Amqp({self})")
    }
}

impl fmt::Debug for Kafka {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kafka({self})")
    }
}

impl fmt::Debug for Nats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nats({self})")
    }
}

impl fmt::Display for Amqp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the queue {} of RabbitMQ at {}", self.queue, address(&self.host, self.port))
    }
}

impl fmt::Display for Kafka {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the topic {} of Kafka at {}, as group {}", self.topic, addresses(&self.servers), self.group)
    }
}

impl fmt::Display for Nats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = addresses(&self.servers);
        write!(f, "the stream {} of NATS at {at}, as consumer {}", self.stream, self.consumer)
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Amqp(amqp) => amqp.fmt(f),
            Self::Kafka(kafka) => kafka.fmt(f),
            Self::Nats(nats) => nats.fmt(f),
        }
    }
}

/// `HOST:PORT`
pub(super) fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// `HOST:PORT,HOST:PORT`
pub(super) fn addresses(servers: &[(String, u16)]) -> String {
    let servers: Vec<String> = servers.iter().map(|(host, port)| address(host, *port)).collect();
    servers.join(",")
}
