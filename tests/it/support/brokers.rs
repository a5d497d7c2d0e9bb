//! Brokers of a test's own, and what a test does with their messages.

#[cfg(feature = "kafka")]
mod kafka;
mod link;
mod nats;
mod rabbitmq;

#[cfg(feature = "kafka")]
pub use kafka::Kafka;
pub use link::Link;
pub use nats::Nats;
pub use rabbitmq::{RabbitMq, RawMessage, Server as RabbitMqServer};

/// A message, and how it came.
#[derive(Clone, Debug)]
pub struct Message {
    pub id: Option<String>,
    pub body: String,
    /// The reason of a dead letter.
    pub reason: Option<String>,
}

/// A server with one queue, partition or stream.
pub trait Broker {
    /// Where a message has the id that it is published with.
    const ID: &'static str;

    /// How often a gate may be killed in a test: where a group waits for its dead members, that takes its time.
    const KILLS: usize;

    /// What no log may show.
    const PASSWORD: &'static str;

    fn start() -> Self;

    /// One that other tests may have too: it cannot be killed.
    fn shared() -> Self
    where
        Self: Sized,
    {
        Self::start()
    }

    /// One whose messages several gates can have at a time.
    fn start_for_many() -> Self
    where
        Self: Sized,
    {
        Self::start()
    }

    /// Kills it. What it has outlives that.
    fn kill9(&mut self);

    /// Starts it, with what it had.
    fn run(&mut self);

    /// The source of a consumer.
    fn source(&self) -> String;

    /// What a consumer of one message at a time needs.
    fn keep_order(&self) {}

    /// Publishes messages with the header `x-source: shop`: ids and bodies. A copy is one message more.
    fn publish(&self, messages: &[(Option<&str>, &str)]);

    /// How many messages are not acknowledged. RabbitMQ leaves out those that a gate has.
    fn waiting(&self) -> usize;

    /// Takes the messages that are not acknowledged.
    fn take_waiting(&self) -> Vec<Message>;

    /// Takes the dead letters.
    fn take_dead(&self) -> Vec<Message>;
}
