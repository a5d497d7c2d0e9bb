//! Queues of RabbitMQ (AMQP 0-9-1).

mod dead_letters;
mod frames;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt as _;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue};
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicGetOptions, BasicNackOptions, BasicQosOptions,
    QueueDeclareOptions,
};
use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, Consumer, ErrorKind};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};

use self::dead_letters::DeadLetters;
use self::frames::LEFT_OUT;
use super::source::{CONSUMER, EndReply, Error, MessageEnd, REASON, Received, Subscription, append};
use super::{Amqp, Settings};

/// How often each side says that it lives, in seconds, where nothing else is said. Twice that without a word, and the other is
/// gone.
const HEARTBEAT: u16 = 10;

/// A header of a dead letter: the queue that the message came from.
const QUEUE: &str = "x-oncegate-queue";

/// A header of a message of a quorum queue: how often it came back.
const RETURNS: &str = "x-delivery-count";

/// A header of a message of a stream: its place there. Nothing else tells that a queue is a stream.
const OFFSET: &str = "x-stream-offset";

/// From so many on the log warns, and how often at most.
const MANY_RETURNS: i64 = 5;
const WARN_EVERY: Duration = Duration::from_secs(60);

/// What the properties of a dead letter take besides their texts, and the headers that the gate adds besides their values, in bytes.
const ROOM: usize = 256;

/// The delivery mode of a message that outlives a restart of the broker.
const PERSISTENT: u8 = 2;

/// The reply code of a connection or channel that is closed without an error.
const SUCCESS: u16 = 200;

/// How long a connection that is given up may take to close.
const CLOSE: Duration = Duration::from_secs(10);

/// How RabbitMQ refuses a consumer whose queue has an exclusive one, and an exclusive one whose queue has any other, or has a
/// single active consumer. It refuses a user without the right to read by the same code.
const IN_USE: &str = "in exclusive use";

impl From<lapin::Error> for Error {
    fn from(error: lapin::Error) -> Self {
        Self(error.to_string())
    }
}

/// A queue, over one channel of one connection.
struct Queue {
    name: Arc<str>,
    queue: ShortString,
    /// How many messages may be taken and not ended.
    most: u16,
    /// Whether the queue may have no other consumer: else a message could overtake one that another has, or that an earlier
    /// connection has which RabbitMQ does not know to be lost.
    is_alone: bool,
    /// RabbitMQ has refused this consumer because the queue has another one. So it is no quorum queue, whose count includes consumers
    /// of a lost node.
    was_refused: bool,
    connection: Arc<Connection>,
    /// Messages come over it, and are acknowledged there.
    channel: Channel,
    dead_letters: DeadLetters,
    /// There, once it has begun.
    consumer: Option<Consumer>,
    /// When the log had the last message that came back often.
    warned: Option<Instant>,
    /// A message that is still looked at.
    received: Option<Delivery>,
    /// RabbitMQ has said that the queue is no stream.
    is_no_stream: bool,
    /// Messages that are not acknowledged, with their bodies.
    unacknowledged: HashMap<u64, (Delivery, Bytes)>,
}

/// Subscribes to a queue.
pub(super) async fn subscribe(
    settings: &Arc<Settings>,
    source: &Amqp,
    most: u16,
) -> Result<Box<dyn Subscription>, Error> {
    let uri = AMQPUri {
        scheme: if source.is_encrypted { AMQPScheme::AMQPS } else { AMQPScheme::AMQP },
        authority: AMQPAuthority {
            userinfo: AMQPUserInfo { username: source.user.clone(), password: source.password.clone() },
            host: source.host.clone(),
            port: source.port,
        },
        vhost: source.virtual_host.clone(),
        query: AMQPQueryString {
            heartbeat: Some(HEARTBEAT),
            frame_max: Some(frames::LARGEST_FRAME),
            ..AMQPQueryString::default()
        },
    };
    let properties = ConnectionProperties::default().with_connection_name(format!("oncegate {}", settings.name).into());
    let dead_letters = DeadLetters::open(uri.clone(), properties.clone(), settings.dead_letter());
    let receiving = async {
        let connection = frames::connect(uri, properties).await?;
        let channel = receiving(&connection, most).await?;
        Ok((connection, channel))
    };
    let (dead_letters, (connection, channel)) = tokio::try_join!(dead_letters, receiving)?;
    Ok(Box::new(Queue {
        name: Arc::clone(&settings.name),
        queue: short(&source.queue)?,
        most,
        is_alone: settings.concurrency == 1,
        was_refused: false,
        connection: Arc::new(connection),
        channel,
        dead_letters,
        consumer: None,
        warned: None,
        received: None,
        is_no_stream: false,
        unacknowledged: HashMap::new(),
    }))
}

/// A channel over which at most so many messages come that are not acknowledged.
async fn receiving(connection: &Connection, most: u16) -> Result<Channel, Error> {
    let channel = connection.create_channel().await?;
    channel.basic_qos(most, BasicQosOptions::default()).await?;
    Ok(channel)
}

/// What follows from whether the end of a message was sent: once its channel has failed, the client sends none and reports no error.
fn sent(is_sent: bool) -> Result<EndReply, Error> {
    if is_sent { Ok(EndReply::Taken) } else { Err(Error("the channel of a message is closed".to_owned())) }
}

fn short(text: &str) -> Result<ShortString, Error> {
    ShortString::try_new(text).map_err(|error| Error(error.to_string()))
}

#[async_trait]
impl Subscription for Queue {
    async fn begin(&mut self) -> Result<bool, Error> {
        if !self.is_alone {
            self.consumer = Some(self.consume(false).await?);
            return Ok(true);
        }
        // Each refusal is an error in the log of RabbitMQ.
        if self.was_refused && self.consumers().await? > 0 {
            return Ok(false);
        }
        let consumer = match self.consume(true).await {
            Ok(consumer) => consumer,
            Err(error) if is_in_use(&error) => {
                self.was_refused = true;
                // The refusal has closed the channel.
                self.channel = receiving(&self.connection, self.most).await?;
                if self.consumers().await? > 0 {
                    return Ok(false);
                }
                // Nobody has it: RabbitMQ itself gives this queue a single active consumer, and takes no exclusive one.
                self.consume(false).await?
            }
            Err(error) => return Err(error.into()),
        };
        self.consumer = Some(consumer);
        // A quorum queue takes any number of exclusive consumers, unless it has a single active one, and counts those of a lost node.
        if self.consumers().await? > 1 {
            tracing::warn!(
                consumer = &*self.name,
                "the queue has other consumers, and RabbitMQ gives them messages too: declare it with x-single-active-consumer, or concurrency = 1 \
                 keeps no order"
            );
        }
        Ok(true)
    }

    async fn next(&mut self) -> Result<Received, Error> {
        let Some(consumer) = &mut self.consumer else { return Err(Error("it has not begun".to_owned())) };
        if self.received.is_none() {
            match consumer.next().await {
                Some(delivery) => self.received = Some(delivery?),
                None => return Err(Error("the broker ended the subscription; is the queue gone?".to_owned())),
            }
        }
        if !self.is_no_stream && self.received.as_ref().is_some_and(|delivery| has_offset(&delivery.properties)) {
            self.refuse_stream().await?;
        }
        let Some(mut delivery) = self.received.take() else { return Err(Error("it has no message".to_owned())) };
        let receipt = delivery.delivery_tag;
        self.look_at_returns(&delivery.properties);
        let body = Bytes::from(std::mem::take(&mut delivery.data));
        let (properties, headers) = (properties(&delivery), headers(&delivery.properties));
        self.unacknowledged.insert(receipt, (delivery, body.clone()));
        Ok(Received { receipt, properties, headers, body })
    }

    async fn end(&mut self, receipt: u64, end: &MessageEnd) -> Result<EndReply, Error> {
        let Some((delivery, body)) = self.unacknowledged.remove(&receipt) else { return Ok(EndReply::Taken) };
        match end {
            MessageEnd::Done => {}
            MessageEnd::Returned if self.dead_letters.was_stored(receipt).await => {}
            MessageEnd::Dead(reason) => {
                let properties = self.dead_letter_properties(&delivery.properties, reason)?;
                if let Err(error) = self.dead_letters.store(receipt, properties, body.clone()).await {
                    self.unacknowledged.insert(receipt, (delivery, body));
                    return Ok(EndReply::Refused(error));
                }
            }
            // It goes back with the connection. Before, it would only come here again.
            MessageEnd::Returned if self.is_alone => return Ok(EndReply::Taken),
            MessageEnd::Returned => {
                let options = BasicNackOptions { requeue: true, ..BasicNackOptions::default() };
                return sent(delivery.nack(options).await?);
            }
        }
        sent(delivery.ack(BasicAckOptions::default()).await?)
    }

    async fn pause(&mut self) -> Result<(), Error> {
        match &self.consumer {
            Some(consumer) if !self.is_alone => {
                Ok(self.channel.basic_cancel(consumer.tag(), BasicCancelOptions::default()).await?)
            }
            // Another consumer would begin with the next message while this one is still under way.
            _ => Ok(()),
        }
    }

    async fn close(mut self: Box<Self>) {
        // RabbitMQ puts what is not acknowledged back into the queue.
        let _ = self.connection.close(SUCCESS, "stopped".into()).await;
        self.dead_letters.close().await;
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // A consumer that is dropped is cancelled, and another gets the queue before the messages of this one are back there. Where
        // the connection is closed first, they are.
        let (connection, consumer) = (Arc::clone(&self.connection), self.consumer.take());
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(async move {
                let _ = timeout(CLOSE, connection.close(SUCCESS, "given up".into())).await;
                drop(consumer);
            });
        }
    }
}

impl Queue {
    async fn consume(&self, exclusive: bool) -> lapin::Result<Consumer> {
        let tag = ShortString::from(format!("oncegate.{}", self.name));
        let options = BasicConsumeOptions { exclusive, ..BasicConsumeOptions::default() };
        self.channel.basic_consume(self.queue.clone(), tag, options, FieldTable::default()).await
    }

    /// Refuses a stream. RabbitMQ does not keep which messages of a stream were acknowledged: those that come while no gate runs would
    /// never run.
    async fn refuse_stream(&mut self) -> Result<(), Error> {
        let channel = self.connection.create_channel().await?;
        match channel.basic_get(self.queue.clone(), BasicGetOptions::default()).await {
            Err(error) if is_not_implemented(&error) => Err(Error(format!(
                "the queue {} is a stream, of which RabbitMQ does not remember what a consumer has acknowledged: the gate would lose \
                 messages at each restart; consume a classic or a quorum queue",
                self.queue
            ))),
            Err(error) if !is_in_use(&error) => Err(error.into()),
            // Something has moved a message from a stream to this queue. RabbitMQ takes back what it gave here when the channel closes.
            _ => {
                self.is_no_stream = true;
                channel.close(SUCCESS, "it is no stream".into()).await.or(Ok(()))
            }
        }
    }

    /// How many consumers the queue has. Of a quorum queue with a single active consumer: how many are active.
    async fn consumers(&self) -> Result<u32, Error> {
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = self.channel.queue_declare(self.queue.clone(), passive, FieldTable::default()).await?;
        Ok(queue.consumer_count())
    }

    /// Warns of a message that came back often: at its limit a quorum queue drops it.
    fn look_at_returns(&mut self, properties: &BasicProperties) {
        let returns = returns(properties);
        if returns >= MANY_RETURNS && self.warned.is_none_or(|warned| warned.elapsed() >= WARN_EVERY) {
            self.warned = Some(Instant::now());
            tracing::warn!(
                consumer = &*self.name,
                queue = self.queue.as_str(),
                returns,
                "RabbitMQ delivers a message again and again: at the delivery limit of the queue (20 by default) it drops the message; \
                 declare the queue with x-delivery-limit = -1, or with a dead-letter exchange"
            );
        }
    }

    /// What the dead letter of a message with these properties has, with the reason.
    fn dead_letter_properties(&self, known: &BasicProperties, reason: &str) -> Result<BasicProperties, Error> {
        let headers = known.headers().as_ref().map(|table| table.inner().clone()).unwrap_or_default();
        // RabbitMQ would send it to the queues that these name.
        let is_kept = |name: &ShortString| !matches!(name.as_str(), "CC" | "BCC");
        let mut headers =
            FieldTable::from(headers.into_iter().filter(|(name, _)| is_kept(name)).collect::<BTreeMap<_, _>>());
        // All of it has one frame, which RabbitMQ refuses where it is larger than agreed on.
        let others = kept_texts(known).map(|(text, _)| text.as_str().len()).sum::<usize>()
            + reason.len()
            + self.name.len()
            + self.queue.as_str().len();
        if encoded(headers.inner()) + others + ROOM > self.connection.configuration().frame_max() as usize {
            tracing::warn!(
                consumer = &*self.name,
                "a dead letter is without the headers of its message: they have no room beside those that say why it is one"
            );
            headers = FieldTable::default();
        }
        for (name, value) in [(REASON, reason), (CONSUMER, &*self.name), (QUEUE, self.queue.as_str())] {
            headers.insert(short(name)?, AMQPValue::LongString(value.into()));
        }
        Ok(kept_properties(known).with_headers(headers).with_delivery_mode(PERSISTENT))
    }
}

/// How many bytes a table has, or more.
fn encoded(table: &BTreeMap<ShortString, AMQPValue>) -> usize {
    fn size(value: &AMQPValue) -> usize {
        match value {
            AMQPValue::LongString(text) => 5 + text.as_bytes().len(),
            AMQPValue::ByteArray(bytes) => 5 + bytes.as_slice().len(),
            AMQPValue::FieldArray(values) => 5 + values.as_slice().iter().map(size).sum::<usize>(),
            AMQPValue::FieldTable(table) => 5 + encoded(table.inner()),
            // None of the others is longer than a number of 64 bits.
            _ => 9,
        }
    }
    table.iter().map(|(name, value)| 1 + name.as_str().len() + size(value)).sum()
}

/// How often a message came back to its queue, where RabbitMQ says so.
fn returns(properties: &BasicProperties) -> i64 {
    let count = properties.headers().as_ref().and_then(|headers| headers.inner().get(RETURNS));
    match count {
        Some(AMQPValue::LongLongInt(count)) => *count,
        Some(AMQPValue::LongInt(count)) => (*count).into(),
        Some(AMQPValue::ShortInt(count)) => (*count).into(),
        Some(AMQPValue::ShortShortInt(count)) => (*count).into(),
        Some(AMQPValue::LongUInt(count)) => (*count).into(),
        _ => 0,
    }
}

/// Whether a message shows that it came from a stream.
fn has_offset(properties: &BasicProperties) -> bool {
    properties.headers().as_ref().is_some_and(|headers| headers.inner().contains_key(OFFSET))
}

/// Whether RabbitMQ says that this kind of queue does not offer what the gate asks for.
fn is_not_implemented(error: &lapin::Error) -> bool {
    let not_implemented = AMQPErrorKind::Hard(AMQPHardError::NOTIMPLEMENTED);
    matches!(error.kind(), ErrorKind::ProtocolError(error) if *error.kind() == not_implemented)
}

/// Whether a queue refuses a consumer for the sake of another.
fn is_in_use(error: &lapin::Error) -> bool {
    match error.kind() {
        ErrorKind::ProtocolError(error) => {
            *error.kind() == AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED)
                && error.get_message().as_str().contains(IN_USE)
        }
        _ => false,
    }
}

/// The text properties that a dead letter keeps, and what sets each: not `expiration`, by which it would vanish, and not `user_id`,
/// which must be the gate's.
fn kept_texts(known: &BasicProperties) -> impl Iterator<Item = (&ShortString, SetText)> {
    let texts: [(&Option<ShortString>, SetText); 7] = [
        (known.content_type(), BasicProperties::with_content_type),
        (known.content_encoding(), BasicProperties::with_content_encoding),
        (known.correlation_id(), BasicProperties::with_correlation_id),
        (known.reply_to(), BasicProperties::with_reply_to),
        (known.message_id(), BasicProperties::with_message_id),
        (known.kind(), BasicProperties::with_type),
        (known.app_id(), BasicProperties::with_app_id),
    ];
    texts.into_iter().filter_map(|(text, set)| Some((text.as_ref()?, set)))
}

type SetText = fn(BasicProperties, ShortString) -> BasicProperties;

/// The properties that a dead letter keeps.
fn kept_properties(known: &BasicProperties) -> BasicProperties {
    let mut kept = kept_texts(known).fold(BasicProperties::default(), |kept, (text, set)| set(kept, text.clone()));
    if let Some(priority) = known.priority() {
        kept = kept.with_priority(*priority);
    }
    if let Some(timestamp) = known.timestamp() {
        kept = kept.with_timestamp(*timestamp);
    }
    kept
}

/// The properties of a message that it has.
fn properties(delivery: &Delivery) -> Vec<(&'static str, Bytes)> {
    let known = &delivery.properties;
    let values = [
        known.message_id().as_ref(),
        known.correlation_id().as_ref(),
        known.kind().as_ref(),
        known.app_id().as_ref(),
        Some(&delivery.exchange),
        Some(&delivery.routing_key),
    ];
    let text = |text: &ShortString| Bytes::copy_from_slice(text.as_str().as_bytes());
    Amqp::PROPERTIES.into_iter().zip(values).filter_map(|(name, value)| Some((name, text(value?)))).collect()
}

/// The headers of a message that HTTP can carry.
fn headers(properties: &BasicProperties) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    let table = properties.headers().as_ref().map(|table| table.inner());
    if table.is_some_and(|table| table.contains_key(LEFT_OUT)) {
        return Err("they have no room in a frame".to_owned());
    }
    for (name, value) in table.into_iter().flatten() {
        let name = HeaderName::from_bytes(name.as_str().as_bytes());
        if let (Ok(name), Some(Ok(value))) = (name, header_value(value)) {
            // Two names may differ in their case alone.
            headers.remove(&name);
            append(&mut headers, name, value)?;
        }
    }
    for (name, value) in [(CONTENT_TYPE, properties.content_type()), (CONTENT_ENCODING, properties.content_encoding())]
    {
        if let Some(Ok(value)) = value.as_ref().map(|value| HeaderValue::from_str(value.as_str())) {
            headers.remove(&name);
            append(&mut headers, name, value)?;
        }
    }
    Ok(headers)
}

fn header_value(value: &AMQPValue) -> Option<Result<HeaderValue, http::header::InvalidHeaderValue>> {
    Some(match value {
        AMQPValue::LongString(text) => HeaderValue::from_bytes(text.as_bytes()),
        AMQPValue::ShortString(text) => HeaderValue::from_str(text.as_str()),
        AMQPValue::Boolean(flag) => HeaderValue::from_str(&flag.to_string()),
        AMQPValue::ShortShortInt(number) => Ok((i16::from(*number)).into()),
        AMQPValue::ShortShortUInt(number) => Ok(u16::from(*number).into()),
        AMQPValue::ShortInt(number) => Ok((*number).into()),
        AMQPValue::ShortUInt(number) => Ok((*number).into()),
        AMQPValue::LongInt(number) => Ok((*number).into()),
        AMQPValue::LongUInt(number) => Ok((*number).into()),
        AMQPValue::LongLongInt(number) => Ok((*number).into()),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use lapin::protocol::AMQPError;

    use super::*;

    #[test]
    fn a_queue_that_is_in_use_is_not_one_that_a_user_may_not_read() {
        let refused = |message: &str| {
            let kind = AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED);
            is_in_use(&ErrorKind::ProtocolError(AMQPError::new(kind, message.into())).into())
        };
        assert!(refused("ACCESS_REFUSED - queue 'orders' in vhost '/' in exclusive use"));
        assert!(!refused("ACCESS_REFUSED - access to queue 'orders' in vhost '/' refused for user 'gate'"));
    }

    #[test]
    fn the_end_of_a_message_that_was_not_sent_is_not_taken() {
        assert_eq!(sent(true), Ok(EndReply::Taken));
        assert!(sent(false).is_err());
    }

    #[test]
    fn a_message_says_how_often_it_came_back() {
        let with = |value| {
            let mut table = FieldTable::default();
            table.insert(RETURNS.into(), value);
            returns(&BasicProperties::default().with_headers(table))
        };
        assert_eq!(returns(&BasicProperties::default()), 0);
        assert_eq!((with(AMQPValue::LongLongInt(19)), with(AMQPValue::LongInt(2))), (19, 2));
        assert_eq!(with(AMQPValue::LongString("19".into())), 0);
    }

    #[test]
    fn a_dead_letter_does_not_expire_and_is_nobody_elses() {
        let text = |text: &'static str| ShortString::from(text);
        let kept = BasicProperties::default().with_message_id(text("m")).with_type(text("paid")).with_priority(3);
        let sent = kept.clone().with_expiration(text("3000")).with_user_id(text("shop"));
        assert_eq!(kept_properties(&sent), kept);
    }

    #[test]
    fn headers_are_what_http_can_carry() {
        let mut table = FieldTable::default();
        let values = [
            ("X-Event-Id", AMQPValue::LongString("e-1".into())),
            ("retries", AMQPValue::LongInt(-3)),
            ("live", AMQPValue::Boolean(true)),
            ("not a name", AMQPValue::LongString("x".into())),
            ("broken", AMQPValue::LongString("a\nb".into())),
            ("table", AMQPValue::FieldTable(FieldTable::default())),
        ];
        for (name, value) in values {
            table.insert(name.into(), value);
        }
        let properties = BasicProperties::default().with_headers(table).with_content_type("application/json".into());
        let found = headers(&properties).unwrap();
        let mut found: Vec<_> =
            found.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        found.sort();
        assert_eq!(found, ["content-type: application/json", "live: true", "retries: -3", "x-event-id: e-1"]);
    }
}
