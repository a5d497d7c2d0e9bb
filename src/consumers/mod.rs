//! Consumers: each takes the messages of a queue, and runs every one once, as a request through the gate.
//!
//! A message runs under the claim of its key, so that a second copy of it, or the same one after a crash, is a replay. It is
//! acknowledged when its record is durable. Until then the broker keeps it: whatever dies, it comes again.
//!
//! `source.rs` says what a broker is to the rest; each broker has a file of its own.

#[cfg(feature = "amqp")]
mod amqp;
mod run;
mod source;

use std::fmt;
use std::sync::Arc;

use http::{HeaderValue, Method, Uri};

pub use self::run::consume;
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

impl Amqp {
    /// What a message can have as `property:NAME`.
    const PROPERTIES: [&str; 6] = ["message-id", "correlation-id", "type", "app-id", "exchange", "routing-key"];
}

impl fmt::Debug for Amqp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Amqp({self})")
    }
}

impl fmt::Display for Amqp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the queue {} of RabbitMQ at {}:{}", self.queue, self.host, self.port)
    }
}

impl Source {
    /// What a message of this broker can have as `property:NAME`.
    #[must_use]
    pub fn properties(&self) -> &'static [&'static str] {
        match self {
            Self::Amqp(_) => &Amqp::PROPERTIES,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Amqp(queue) => queue.fmt(f),
        }
    }
}
