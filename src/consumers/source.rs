//! What a broker is to a consumer.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::Settings;

/// The headers that a dead letter has besides its own, for every broker: the reason, and the name of the consumer.
#[cfg_attr(not(any(feature = "amqp", feature = "kafka", feature = "nats")), expect(dead_code, reason = "no broker"))]
pub(super) const REASON: &str = "x-oncegate-reason";
#[cfg_attr(not(any(feature = "amqp", feature = "kafka", feature = "nats")), expect(dead_code, reason = "no broker"))]
pub(super) const CONSUMER: &str = "x-oncegate-consumer";

/// The header of a dead letter that names the message in its stream or topic.
#[cfg_attr(not(any(feature = "kafka", feature = "nats")), expect(dead_code, reason = "no broker"))]
pub(super) const POSITION: &str = "x-oncegate-position";

/// How many headers a message may have. A map takes no more than 24,576, and the gate adds some of its own.
const MOST_HEADERS: usize = 10_000;

/// How long the name of a broker may be looked up: less than a connection may take to open, so that the log says what hangs.
#[cfg_attr(not(any(feature = "amqp", feature = "nats")), expect(dead_code, reason = "no broker"))]
pub(super) const LOOKUP: Duration = Duration::from_secs(8);

/// How long a broker may take to acknowledge a message, or to keep a dead letter, if it says nothing else.
const BROKER_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a broker cannot be used now. It never has a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Error(pub(super) String);

/// A message that is not acknowledged yet.
pub(super) struct Received {
    /// Names it to its subscription.
    pub(super) receipt: u64,
    /// What the broker says of it, by names of [`MessageKeySource::Property`].
    ///
    /// [`MessageKeySource::Property`]: crate::idempotency::message::MessageKeySource::Property
    pub(super) properties: Vec<(&'static str, Bytes)>,
    /// Its headers, or why they cannot be read.
    pub(super) headers: Result<HeaderMap, String>,
    /// Its body.
    pub(super) body: Bytes,
}

/// How a message ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MessageEnd {
    /// Its record is durable: it is acknowledged.
    Done,
    /// It goes to the dead letters with this reason. Then it is acknowledged.
    Dead(String),
    /// It goes back, for this consumer or another.
    Returned,
}

/// What a broker says to the end of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EndReply {
    /// It has it.
    Taken,
    /// It says at once that it does not take the dead letter. The message is still held, and can be ended again.
    Refused(Error),
}

/// What a consumer knows from one connection to the next.
#[derive(Default)]
pub(super) struct ConnectionHistory {
    /// Whether it lost one before.
    pub(super) was_lost: bool,
    /// How far it has looked for messages that it cannot read.
    #[cfg(feature = "nats")]
    pub(super) looked: Arc<std::sync::Mutex<super::nats::Looked>>,
}

/// Adds a header of a message.
#[cfg_attr(not(any(feature = "amqp", feature = "kafka", feature = "nats")), expect(dead_code, reason = "no broker"))]
pub(super) fn append(headers: &mut HeaderMap, name: HeaderName, value: HeaderValue) -> Result<(), String> {
    if headers.len() >= MOST_HEADERS || headers.try_append(name, value).is_err() {
        return Err(format!("there are more than {MOST_HEADERS}"));
    }
    Ok(())
}

/// The messages of one consumer, over one connection.
#[async_trait]
pub(super) trait Subscription: Send {
    /// Begins to receive messages; false where another consumer has them. Then it can be asked again.
    async fn begin(&mut self) -> Result<bool, Error> {
        Ok(true)
    }

    /// The next message; an error where the connection is lost. A call that is given up loses none.
    async fn next(&mut self) -> Result<Received, Error>;

    /// Ends a message.
    async fn end(&mut self, receipt: u64, end: &MessageEnd) -> Result<EndReply, Error>;

    /// How long it may take to end a message. A call that takes longer is given up, and the connection with it.
    fn patience(&self) -> Duration {
        BROKER_TIMEOUT
    }

    /// How long the consumer may stay away at most, once it is lost.
    fn longest_pause(&self) -> Duration {
        Duration::MAX
    }

    /// Receives no more messages. Those that came before are still to be ended.
    async fn pause(&mut self) -> Result<(), Error>;

    /// Ends the connection.
    async fn close(self: Box<Self>);
}

/// Subscribes, for `most` messages at a time that are not ended.
#[cfg_attr(not(feature = "nats"), allow(unused_variables, reason = "only NATS needs to know what was before"))]
pub(super) async fn subscribe(
    settings: &Arc<Settings>,
    most: u16,
    history: &ConnectionHistory,
) -> Result<Box<dyn Subscription>, Error> {
    match &settings.source {
        #[cfg(feature = "amqp")]
        super::Source::Amqp(queue) => super::amqp::subscribe(settings, queue, most).await,
        #[cfg(feature = "kafka")]
        super::Source::Kafka(topic) => super::kafka::subscribe(settings, topic, most).await,
        #[cfg(feature = "nats")]
        super::Source::Nats(stream) => super::nats::subscribe(settings, stream, most, history).await,
        // The configuration is checked for that.
        #[allow(unreachable_patterns, reason = "a build may have every broker")]
        _ => Err(Error("this build cannot use this broker".to_owned())),
    }
}
