//! Consumers: each takes the messages of a queue, a topic or a stream, and runs every one once, as a request through the gate.
//!
//! A message runs under the claim of its key, so that a second copy of it, or the same one after a crash, is a replay. It is
//! acknowledged when its record is durable. Until then the broker keeps it: whatever dies, it comes again.
//!
//! `source.rs` says what a broker is to the rest; each broker has a file of its own.

#[cfg(feature = "amqp")]
mod amqp;
mod attempts;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(feature = "nats")]
mod nats;
mod outage;
mod run;
mod settings;
mod source;

pub use self::run::consume;
pub use self::settings::{Amqp, Kafka, Nats, NatsLogin, RequestLine, Settings, Source};
