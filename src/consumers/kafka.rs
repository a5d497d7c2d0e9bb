//! Topics of Kafka, as a member of a consumer group.

mod progress;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use rdkafka::ClientContext;
use rdkafka::client::Client;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext, Rebalance, StreamConsumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Header, Headers as _, Message as _, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};

use self::progress::{MessagePosition, Progress};
use super::settings::addresses;
use super::source::{CONSUMER, EndReply, Error, MessageEnd, POSITION, REASON, Received, Subscription, append};
use super::{Kafka, Settings};

/// How long a broker may take to say what topics it has.
const METADATA: Duration = Duration::from_secs(4);

/// How long a dead letter may take to be stored: a partition may be without a leader for as long. The client connects to another
/// broker by itself.
const STORED: Duration = Duration::from_secs(30);

/// How much later the client may say that it has given a dead letter up. One that is given up before may still be stored, and is
/// stored twice when its message comes again.
const SAID: Duration = Duration::from_secs(5);

/// How long leaving the group may take.
const LEAVE: Duration = Duration::from_secs(10);

/// Where no more messages may be taken, partitions are paused after this time, and the group is served without them.
const PAUSE: Duration = Duration::from_secs(1);

/// Settings of both clients. Without `queued...`, librdkafka fetches up to 64 MiB ahead.
const CONSUMER_SETTINGS: [(&str, &str); 9] = [
    // What has ended is stored here, and committed every second and when a partition goes.
    ("enable.auto.offset.store", "false"),
    ("enable.auto.commit", "true"),
    ("auto.commit.interval.ms", "1000"),
    // A group that is new, or was away for longer than messages are kept, begins with the oldest.
    ("auto.offset.reset", "earliest"),
    ("partition.assignment.strategy", "cooperative-sticky"),
    ("session.timeout.ms", "10000"),
    ("queued.min.messages", "1000"),
    ("queued.max.messages.kbytes", "16384"),
    ("fetch.max.bytes", "8388608"),
];
const PRODUCER_SETTINGS: [(&str, &str); 2] = [
    ("enable.idempotence", "true"),
    // The topic says how large a message may be.
    ("message.max.bytes", "1000000000"),
];

/// A message without its place.
struct KafkaMessage {
    place: MessagePosition,
    key: Option<Bytes>,
    headers: Option<OwnedHeaders>,
    /// A message may have none: it says that its key is deleted.
    body: Option<Bytes>,
    millis: Option<i64>,
}

/// A topic, as a member of a group.
struct Topic {
    name: Arc<str>,
    topic: String,
    dead_letter: String,
    /// There, until this is dropped.
    clients: Option<Clients>,
    /// How many messages may be taken and not ended.
    most: usize,
    receipts: u64,
    unended: HashMap<u64, KafkaMessage>,
    /// Messages that came although no more may be taken.
    ahead: VecDeque<KafkaMessage>,
    /// Since when no more may be taken, and whether partitions are paused for that.
    full_since: Option<Instant>,
    is_paused: bool,
}

/// The member of the group, and what publishes dead letters. To drop them blocks.
struct Clients {
    consumer: StreamConsumer<Group>,
    producer: FutureProducer,
}

/// The partitions that this member has.
#[derive(Default)]
struct Group(Mutex<Progress>);

impl Group {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientContext for Group {}

impl ConsumerContext for Group {
    fn pre_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        // What is stored is committed before they go. What ends later is delivered again, to whoever has them.
        if let Rebalance::Revoke(partitions) = rebalance {
            // One that is paused when it goes would be paused when it comes back.
            let _ = consumer.resume(partitions);
            for partition in partitions.elements() {
                self.progress().revoked(partition.partition());
            }
        }
    }
}

impl From<KafkaError> for Error {
    fn from(error: KafkaError) -> Self {
        Self(error.to_string())
    }
}

/// Joins the group.
pub(super) async fn subscribe(
    settings: &Arc<Settings>,
    source: &Kafka,
    most: u16,
) -> Result<Box<dyn Subscription>, Error> {
    let dead_letter = settings.dead_letter();
    let joining = in_a_thread({
        let (source, name, dead_letter) = (source.clone(), Arc::clone(&settings.name), dead_letter.clone());
        move || join(&source, &name, &dead_letter)
    });
    let clients = joining.await.map_err(|_| Error("the client failed".to_owned()))??;
    Ok(Box::new(Topic {
        name: Arc::clone(&settings.name),
        topic: source.topic.clone(),
        dead_letter,
        clients: Some(clients),
        most: most.into(),
        receipts: 0,
        unended: HashMap::new(),
        ahead: VecDeque::new(),
        full_since: None,
        is_paused: false,
    }))
}

/// Does what blocks. Nothing waits for it at the end of the process.
fn in_a_thread<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> oneshot::Receiver<T> {
    let (done, result) = oneshot::channel();
    let runtime = Handle::try_current().ok();
    std::thread::spawn(move || {
        // Where the clients have their own tasks.
        let _entered = runtime.as_ref().map(Handle::enter);
        // Where nothing waits for it any more, what was made is dropped.
        drop(done.send(act()));
    });
    result
}

fn join(source: &Kafka, name: &str, dead_letter: &str) -> Result<Clients, Error> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", addresses(&source.servers)).set("client.id", format!("oncegate-{name}"));
    if let Some((user, password)) = &source.login {
        config.set("security.protocol", "SASL_PLAINTEXT").set("sasl.mechanism", "PLAIN");
        config.set("sasl.username", user).set("sasl.password", password);
    }
    let mut producing = config.clone();
    producing.extend(PRODUCER_SETTINGS.map(|(key, value)| (key.to_owned(), value.to_owned())));
    producing.set("message.timeout.ms", STORED.as_millis().to_string());
    config.extend(CONSUMER_SETTINGS.map(|(key, value)| (key.to_owned(), value.to_owned())));
    config.set("group.id", &source.group);
    let consumer: StreamConsumer<Group> = config.create_with_context(Group::default())?;
    let producer: FutureProducer = producing.create()?;
    has_topic(consumer.client(), &source.topic)?;
    has_topic(producer.client(), dead_letter)?;
    consumer.subscribe(&[&source.topic])?;
    Ok(Clients { consumer, producer })
}

fn has_topic<C: ClientContext>(client: &Client<C>, topic: &str) -> Result<(), Error> {
    let metadata = client.fetch_metadata(Some(topic), METADATA)?;
    let found = metadata.topics().iter().find(|found| found.name() == topic);
    match found.map(|found| found.error()) {
        Some(None) => Ok(()),
        Some(Some(error)) => Err(Error(format!("the topic {topic}: {}", RDKafkaErrorCode::from(error)))),
        None => Err(Error(format!("there is no topic {topic}"))),
    }
}

#[async_trait]
impl Subscription for Topic {
    async fn next(&mut self) -> Result<Received, Error> {
        loop {
            if self.unended.len() < self.most {
                self.full_since = None;
                match self.ahead.pop_front() {
                    Some(message) if self.group().is_current(&message.place) => return Ok(self.receive(message)),
                    Some(_) => continue,
                    None => self.pause_partitions(false)?,
                }
                if let Some(message) = self.take().await? {
                    return Ok(self.receive(message));
                }
            } else {
                let since = *self.full_since.get_or_insert_with(Instant::now);
                sleep_until(since + PAUSE).await;
                self.pause_partitions(true)?;
                if let Some(message) = self.take().await? {
                    // Of a partition that came after the pause.
                    self.ahead.push_back(message);
                    self.is_paused = false;
                    self.pause_partitions(true)?;
                }
            }
        }
    }

    async fn end(&mut self, receipt: u64, end: &MessageEnd) -> Result<EndReply, Error> {
        let Some(message) = self.unended.remove(&receipt) else { return Ok(EndReply::Taken) };
        match end {
            MessageEnd::Done => {}
            MessageEnd::Dead(reason) => self.bury(&message, reason).await?,
            // It is not committed, nor is what comes after it.
            MessageEnd::Returned => return Ok(EndReply::Taken),
        }
        let ended = self.group().ended(&message.place);
        if let Some(next) = ended {
            match self.consumer().store_offset(&self.topic, message.place.partition, next - 1) {
                // The partition went, and this member does not know yet.
                Ok(()) | Err(KafkaError::StoreOffset(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(EndReply::Taken)
    }

    fn patience(&self) -> Duration {
        STORED + SAID
    }

    async fn pause(&mut self) -> Result<(), Error> {
        self.ahead.clear();
        Ok(())
    }

    async fn close(mut self: Box<Self>) {
        // It commits, and leaves the group.
        let _ = timeout(LEAVE, self.leave()).await;
    }
}

impl Drop for Topic {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Topic {
    fn group(&self) -> MutexGuard<'_, Progress> {
        self.consumer().context().progress()
    }

    fn clients(&self) -> &Clients {
        self.clients.as_ref().expect("they are taken where this is dropped")
    }

    fn consumer(&self) -> &StreamConsumer<Group> {
        &self.clients().consumer
    }

    fn leave(&mut self) -> oneshot::Receiver<()> {
        let clients = self.clients.take();
        in_a_thread(move || drop(clients))
    }

    /// The next message; nothing where the client will go on by itself. A call that is given up loses none.
    async fn take(&self) -> Result<Option<KafkaMessage>, Error> {
        match self.consumer().recv().await {
            Ok(message) => Ok(Some(self.taken(&message))),
            // The client connects to a broker again, and knows others.
            Err(KafkaError::MessageConsumption(
                RDKafkaErrorCode::BrokerTransportFailure
                | RDKafkaErrorCode::Resolve
                | RDKafkaErrorCode::OperationTimedOut,
            )) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn taken(&self, message: &BorrowedMessage<'_>) -> KafkaMessage {
        KafkaMessage {
            place: self.group().received(message.partition(), message.offset()),
            key: message.key().map(Bytes::copy_from_slice),
            headers: message.headers().map(|headers| headers.detach()),
            body: message.payload().map(Bytes::copy_from_slice),
            millis: message.timestamp().to_millis(),
        }
    }

    fn receive(&mut self, message: KafkaMessage) -> Received {
        self.receipts += 1;
        let received = Received {
            receipt: self.receipts,
            properties: self.properties(&message),
            headers: headers(message.headers.as_ref()),
            body: message.body.clone().unwrap_or_default(),
        };
        self.unended.insert(self.receipts, message);
        received
    }

    /// Pauses or resumes every partition. A pause is repeated: there may be new ones.
    fn pause_partitions(&mut self, is_paused: bool) -> Result<(), Error> {
        if self.is_paused == is_paused {
            return Ok(());
        }
        let partitions = self.consumer().assignment()?;
        match is_paused {
            true => self.consumer().pause(&partitions)?,
            false => self.consumer().resume(&partitions)?,
        }
        self.is_paused = is_paused;
        Ok(())
    }

    /// Names a message among all that a topic ever had: a topic that is made again counts from 0 again, but later.
    fn position(&self, message: &KafkaMessage) -> String {
        let MessagePosition { partition, offset, .. } = message.place;
        let millis = message.millis.map_or_else(String::new, |millis| millis.to_string());
        format!("{}/{partition}/{offset}/{millis}", self.topic)
    }

    /// The properties of a message that it has.
    fn properties(&self, message: &KafkaMessage) -> Vec<(&'static str, Bytes)> {
        let values = [
            message.key.clone(),
            Some(self.position(message).into()),
            Some(Bytes::copy_from_slice(self.topic.as_bytes())),
            Some(message.place.partition.to_string().into()),
        ];
        Kafka::PROPERTIES.into_iter().zip(values).filter_map(|(name, value)| Some((name, value?))).collect()
    }

    /// Publishes a message again, to the dead letters, with the reason. Durable when it returns.
    async fn bury(&self, message: &KafkaMessage, reason: &str) -> Result<(), Error> {
        let mut headers = message.headers.clone().unwrap_or_default();
        let position = self.position(message);
        for (key, value) in [(REASON, reason), (CONSUMER, &*self.name), (POSITION, &*position)] {
            headers = headers.insert(Header { key, value: Some(value) });
        }
        let mut record: FutureRecord<'_, [u8], [u8]> = FutureRecord::to(&self.dead_letter).headers(headers);
        if let Some(key) = &message.key {
            record = record.key(key);
        }
        if let Some(body) = &message.body {
            record = record.payload(body);
        }
        // It goes alone: there is room for it at once.
        let stored = self.clients().producer.send(record, Duration::ZERO).await;
        stored
            .map_err(|(error, _)| Error(format!("a dead letter for {} was not stored: {error}", self.dead_letter)))?;
        Ok(())
    }
}

/// The headers of a message that HTTP can carry.
fn headers(headers: Option<&OwnedHeaders>) -> Result<HeaderMap, String> {
    let mut known = HeaderMap::new();
    for header in headers.into_iter().flat_map(OwnedHeaders::iter) {
        let value = header.value.and_then(|value| HeaderValue::from_bytes(value).ok());
        if let (Ok(name), Some(value)) = (HeaderName::from_bytes(header.key.as_bytes()), value) {
            append(&mut known, name, value)?;
        }
    }
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_what_http_can_carry() {
        let mut of_message = OwnedHeaders::new();
        for (key, value) in
            [("X-Event-Id", Some("e-1")), ("not a name", Some("x")), ("broken", Some("a\nb")), ("none", None)]
        {
            of_message = of_message.insert(Header { key, value });
        }
        let found = headers(Some(&of_message)).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found["x-event-id"], "e-1");
        assert!(headers(None).unwrap().is_empty());
    }

    #[test]
    fn more_headers_than_a_map_can_have_are_a_problem() {
        let of = |count: usize| {
            let mut of_message = OwnedHeaders::new_with_capacity(count);
            for number in 0..count {
                of_message = of_message.insert(Header { key: &format!("x-{number}"), value: Some("x") });
            }
            headers(Some(&of_message))
        };
        assert_eq!(of(10_000).map(|headers| headers.len()), Ok(10_000));
        for count in [10_001, 30_000] {
            assert_eq!(of(count), Err("there are more than 10000".to_owned()));
        }
    }
}
