//! Dead letters of RabbitMQ, over a connection of their own. While the broker is short of memory or disk, it reads nothing more from
//! a connection that publishes: over the same one it would not learn that other messages have ended.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::uri::AMQPUri;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::{Error, SUCCESS, frames, short};

/// How long the first dead letter may hold up the ends of other messages, and the last one a shutdown. A broker that can store takes
/// milliseconds.
const CONFIRM: Duration = Duration::from_secs(1);

/// How long a new connection may take.
const OPEN: Duration = Duration::from_secs(10);

/// The dead letters of one queue.
pub(super) struct DeadLetters {
    publisher: Arc<Mutex<Publisher>>,
    /// Those that the broker has not confirmed, by the receipts of their messages.
    unconfirmed: HashMap<u64, Publishing>,
}

impl DeadLetters {
    /// Connects, and makes the queue unless there is one.
    pub(super) async fn open(uri: AMQPUri, properties: ConnectionProperties, queue: String) -> Result<Self, Error> {
        let mut publisher = Publisher { uri, properties, queue, opened: None };
        publisher.channel().await?;
        Ok(Self { publisher: Arc::new(Mutex::new(publisher)), unconfirmed: HashMap::new() })
    }

    /// Returns once the broker has stored a dead letter. Where it has not in time, the letter stays on its way, and another call for
    /// its message says what became of it.
    pub(super) async fn store(&mut self, receipt: u64, properties: BasicProperties, body: Bytes) -> Result<(), Error> {
        let known = self.unconfirmed.remove(&receipt);
        // What has waited shows that the broker stores none at present.
        let patience = if known.is_none() && self.unconfirmed.is_empty() { CONFIRM } else { Duration::ZERO };
        let mut publishing = known.unwrap_or_else(|| {
            let publisher = Arc::clone(&self.publisher);
            Publishing(tokio::spawn(async move { publisher.lock().await.publish(properties, &body).await }))
        });
        if let Ok(stored) = timeout(patience, &mut publishing).await {
            return stored;
        }
        self.unconfirmed.insert(receipt, publishing);
        Err(Error("the broker does not confirm dead letters; has it an alarm for memory or disk?".to_owned()))
    }

    /// The message of a dead letter is to go back to its queue, unless the broker has stored the letter meanwhile. Then it is over.
    pub(super) async fn was_stored(&mut self, receipt: u64) -> bool {
        match self.unconfirmed.remove(&receipt) {
            Some(publishing) if publishing.0.is_finished() => publishing.await.is_ok(),
            _ => false,
        }
    }

    pub(super) async fn close(&mut self) {
        self.unconfirmed.clear();
        if let Some((connection, _)) = self.publisher.lock().await.opened.take() {
            // Nothing can be written while the broker reads nothing.
            let _ = timeout(CONFIRM, connection.close(SUCCESS, "stopped".into())).await;
        }
    }
}

/// A dead letter on its way. Dropped, it is given up.
struct Publishing(JoinHandle<Result<(), Error>>);

impl Future for Publishing {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let lost = |_| Err(Error("a dead letter failed".to_owned()));
        Pin::new(&mut self.0).poll(context).map(|published| published.unwrap_or_else(lost))
    }
}

impl Drop for Publishing {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Publisher {
    uri: AMQPUri,
    properties: ConnectionProperties,
    queue: String,
    opened: Option<(Connection, Channel)>,
}

impl Publisher {
    /// Publishes a message, and returns once the broker has stored it.
    async fn publish(&mut self, properties: BasicProperties, body: &[u8]) -> Result<(), Error> {
        // Where the queue is gone, RabbitMQ returns the message.
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let (queue, channel) = (short(&self.queue)?, self.channel().await?);
        let publishing =
            async { channel.basic_publish(ShortString::from(""), queue, options, body, properties).await?.await };
        let confirmation = match publishing.await {
            Ok(confirmation) => confirmation,
            Err(error) => {
                self.opened = None;
                return Err(error.into());
            }
        };
        let is_stored = confirmation.is_ack();
        if is_stored && confirmation.take_message().is_none() {
            return Ok(());
        }
        if is_stored {
            // The next one makes the queue.
            self.opened = None;
        }
        Err(Error(format!("the broker did not take a message for the queue {}", self.queue)))
    }

    /// The open channel, or a new one on a new connection.
    async fn channel(&mut self) -> Result<Channel, Error> {
        if let Some((_, channel)) = self.opened.as_ref().filter(|(_, channel)| channel.status().connected()) {
            return Ok(channel.clone());
        }
        self.opened = None;
        let opening = async {
            let connection = frames::connect(self.uri.clone(), self.properties.clone()).await?;
            let channel = publishing_to(&connection, short(&self.queue)?).await?;
            Ok::<_, Error>((connection, channel))
        };
        let no_answer = |_| Error("the broker does not answer the connection for dead letters".to_owned());
        let (_, channel) = self.opened.insert(timeout(OPEN, opening).await.map_err(no_answer)??);
        Ok(channel.clone())
    }
}

/// A channel to publish to a durable queue, which is made unless there is one.
async fn publishing_to(connection: &Connection, queue: ShortString) -> Result<Channel, Error> {
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let channel = confirming(connection).await?;
    if channel.queue_declare(queue.clone(), passive, FieldTable::default()).await.is_ok() {
        return Ok(channel);
    }
    // The refusal has closed the channel.
    let channel = confirming(connection).await?;
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(queue, durable, FieldTable::default()).await?;
    Ok(channel)
}

/// Opens a channel and has the broker confirm each message there.
async fn confirming(connection: &Connection) -> Result<Channel, Error> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}
