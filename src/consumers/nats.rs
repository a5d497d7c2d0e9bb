//! Streams of NATS JetStream, through durable pull consumers.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::Client;
use async_nats::jetstream::consumer::pull::{Batch, BatchError};
use async_nats::jetstream::consumer::{AckPolicy, Config, PullConsumer};
use async_nats::jetstream::context::{GetStreamByNameErrorKind, PublishErrorKind};
use async_nats::jetstream::{self, AckKind, Context, Message, stream};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::FutureExt as _;
use futures_util::stream::StreamExt as _;
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::source::{
    CONSUMER, ConnectionHistory, EndReply, Error, MessageEnd, POSITION, REASON, Received, Subscription, append,
};
use super::{Nats, Settings};

mod connecting;
mod trouble;
mod unreadable;

use self::trouble::Trouble;
pub(super) use self::unreadable::Looked;

/// The header by which a publisher names a message, and by which a stream recognises a copy.
const MESSAGE_ID: &str = "Nats-Msg-Id";

/// A header of a dead letter: the id that the message had. Its own names the dead letter.
const ORIGINAL_ID: &str = "x-oncegate-message-id";

/// How long a request for messages waits at the server.
const REQUEST: Duration = Duration::from_secs(30);

/// A request that ends before this part of its time is left has not ended by itself.
const EARLY: u32 = 6;

/// The server may allow less time for a request, but not less than this.
const SHORTEST_REQUEST: Duration = Duration::from_secs(1);

/// How long the last acknowledgements may take to leave.
const FLUSH: Duration = Duration::from_secs(5);

/// How many times within `ack_wait` the consumer reports to the server that a message is still in work.
const PROGRESS: u32 = 3;

/// The shortest time between two of these.
const LEAST: Duration = Duration::from_millis(10);

type Opening = Pin<Box<dyn Future<Output = Result<Batch, BatchError>> + Send>>;

/// A consumer of a stream, over one connection.
struct Pull {
    name: Arc<str>,
    dead_letter: String,
    client: Client,
    context: Context,
    consumer: PullConsumer,
    /// How many messages may be taken and not ended.
    most: usize,
    limits: RequestLimits,
    /// A request for messages, before and after the server has it. It asks for no more than may be taken.
    opening: Option<Opening>,
    batch: Option<Batch>,
    /// Until when the server keeps that request open, and for how many messages more.
    open_for: (Instant, usize),
    /// Messages that it cannot take, each with the problem of its headers.
    unreadable: VecDeque<(Message, String)>,
    looked: Arc<Mutex<Looked>>,
    receipts: u64,
    unacknowledged: Unacknowledged,
    trouble: Trouble,
    /// After that time the server delivers messages again.
    redelivery: Duration,
    /// Keeps messages that are in work from being delivered again.
    progress: JoinHandle<()>,
}

/// Messages that are not acknowledged, by their receipts.
#[derive(Clone, Default)]
struct Unacknowledged(Arc<Mutex<HashMap<u64, Arc<Message>>>>);

impl Unacknowledged {
    fn messages(&self) -> MutexGuard<'_, HashMap<u64, Arc<Message>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error(error.to_string())
}

/// Subscribes to a stream.
pub(super) async fn subscribe(
    settings: &Arc<Settings>,
    source: &Nats,
    most: u16,
    history: &ConnectionHistory,
) -> Result<Box<dyn Subscription>, Error> {
    let (troubled, trouble) = watch::channel(None);
    let trouble = Trouble(trouble);
    let client = connecting::connect(&settings.name, source, troubled).await?;
    // Where the user has too few rights, no answer comes.
    let mut troubling = trouble.clone();
    tokio::select! {
        biased;
        error = troubling.arises() => Err(error),
        opened = open(client, settings, source, most, history, trouble) => Ok(Box::new(opened?)),
    }
}

/// Has all that is needed for messages of the stream.
async fn open(
    client: Client,
    settings: &Arc<Settings>,
    source: &Nats,
    most: u16,
    history: &ConnectionHistory,
    trouble: Trouble,
) -> Result<Pull, Error> {
    let context = jetstream::new(client.clone());
    let stream = context.get_stream(&source.stream).await;
    let stream = stream.map_err(|error| Error(format!("the stream {}: {error}", source.stream)))?;
    let mut consumer: PullConsumer = stream
        .get_consumer(&source.consumer)
        .await
        .map_err(|error| Error(format!("the consumer {} of the stream {}: {error}", source.consumer, source.stream)))?;
    let config = &consumer.cached_info().config;
    check(config, settings.concurrency).map_err(|problem| {
        Error(format!("the consumer {} of the stream {} {problem}", source.consumer, source.stream))
    })?;
    let (redelivery, limits) = (redelivery(config), RequestLimits::of(config));
    let dead_letter = settings.dead_letter();
    dead_letters(&context, &dead_letter, &stream.cached_info().config).await?;
    let unreadable = match history.was_lost {
        true => unreadable::find(&context, &mut consumer, &history.looked, &settings.name).await.into(),
        false => VecDeque::new(),
    };
    let unacknowledged = Unacknowledged::default();
    Ok(Pull {
        name: Arc::clone(&settings.name),
        dead_letter,
        client,
        context,
        consumer,
        most: most.into(),
        limits,
        opening: None,
        batch: None,
        open_for: (Instant::now(), 0),
        unreadable,
        looked: Arc::clone(&history.looked),
        receipts: 0,
        redelivery,
        progress: tokio::spawn(keep(unacknowledged.clone(), progress_interval(redelivery))),
        unacknowledged,
        trouble,
    })
}

/// A consumer that could lose messages, or their order, is not used.
fn check(config: &Config, concurrency: u32) -> Result<(), &'static str> {
    if config.ack_policy != AckPolicy::Explicit {
        return Err("must have ack_policy = explicit: each message is acknowledged by itself");
    }
    if config.max_deliver > 0 {
        return Err("must have max_deliver = -1: NATS would stop delivering a message, and it would be no dead letter");
    }
    if config.headers_only {
        return Err("must not have headers_only: each request would have an empty body");
    }
    if !config.max_expires.is_zero() && config.max_expires < SHORTEST_REQUEST {
        return Err("must have max_expires = 1s or more, or none: the gate asks anew each time");
    }
    if concurrency == 1 && config.max_ack_pending != 1 {
        return Err(
            "must have max_ack_pending = 1 where concurrency = 1: otherwise the order is lost when a gate dies",
        );
    }
    Ok(())
}

/// What a request for messages may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RequestLimits {
    /// How long it waits.
    time: Duration,
    /// One that ends this long before its time has not ended by itself.
    early: Duration,
    messages: usize,
}

impl RequestLimits {
    /// What the server allows for a consumer: it refuses a request that asks for more.
    fn of(config: &Config) -> Self {
        let time = if config.max_expires.is_zero() { REQUEST } else { REQUEST.min(config.max_expires) };
        let messages = usize::try_from(config.max_batch).ok().filter(|most| *most > 0).unwrap_or(usize::MAX);
        Self { time, early: time / EARLY, messages }
    }
}

/// After what time without a word the server delivers a message again.
fn redelivery(config: &Config) -> Duration {
    let shortest = config.backoff.iter().copied().min().unwrap_or(config.ack_wait);
    shortest.min(config.ack_wait)
}

/// How often to say that messages are in work.
fn progress_interval(redelivery: Duration) -> Duration {
    (redelivery / PROGRESS).max(LEAST)
}

/// Says that messages are in work, until it is aborted.
async fn keep(unacknowledged: Unacknowledged, pause: Duration) {
    let mut ticks = interval(pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let messages: Vec<Arc<Message>> = unacknowledged.messages().values().cloned().collect();
        for message in messages {
            // Where the connection is lost, the subscription says so.
            let _ = message.ack_with(AckKind::Progress).await;
        }
    }
}

/// Makes a stream for dead letters, unless one has their subject.
async fn dead_letters(context: &Context, subject: &str, of: &stream::Config) -> Result<(), Error> {
    match context.stream_by_subject(subject).await {
        Ok(name) if name == of.name => Err(Error(format!(
            "the subject {subject} for dead letters belongs to the stream {name} itself: set dead_letter to another"
        ))),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == GetStreamByNameErrorKind::NotFound => {
            let config = stream::Config {
                name: subject.replace(['.', '*', '>', ' '], "-"),
                subjects: vec![subject.to_owned()],
                num_replicas: of.num_replicas,
                ..stream::Config::default()
            };
            let name = config.name.clone();
            let made = context.create_stream(config).await;
            made.map_err(|error| Error(format!("the stream {name} for dead letters cannot be made: {error}")))?;
            Ok(())
        }
        Err(error) => Err(failed(error)),
    }
}

#[async_trait]
impl Subscription for Pull {
    async fn next(&mut self) -> Result<Received, Error> {
        let mut trouble = self.trouble.clone();
        loop {
            if let Some((message, problem)) = self.unreadable.pop_front() {
                return Ok(self.receive(message, Err(problem)));
            }
            let taken = tokio::select! {
                biased;
                error = trouble.arises() => return Err(error),
                taken = self.take() => taken?,
            };
            if let Some(message) = taken {
                let headers = headers(&message);
                return Ok(self.receive(message, headers));
            }
        }
    }

    async fn end(&mut self, receipt: u64, end: &MessageEnd) -> Result<EndReply, Error> {
        let Some(message) = self.unacknowledged.messages().remove(&receipt) else { return Ok(EndReply::Taken) };
        let kind = match end {
            MessageEnd::Done => AckKind::Ack,
            MessageEnd::Dead(reason) => {
                self.bury(&message, reason).await?;
                AckKind::Term
            }
            MessageEnd::Returned => AckKind::Nak(None),
        };
        let sequence = message.info().map_err(failed)?.stream_sequence;
        if !self.looked().contains(sequence) {
            return message.ack_with(kind).await.map(|()| EndReply::Taken).map_err(failed);
        }
        // The gate looks for it again until the server confirms its end: an acknowledgement that is lost with the connection would
        // leave it pending for good.
        message.double_ack_with(kind).await.map_err(failed)?;
        self.looked().ended(sequence);
        Ok(EndReply::Taken)
    }

    fn longest_pause(&self) -> Duration {
        // Servers of NATS 2.9 count back what they have delivered where a message is to be delivered again and nobody asks for one:
        // a message that cannot be read would not be found.
        self.redelivery / 2
    }

    async fn pause(&mut self) -> Result<(), Error> {
        self.opening = None;
        // What has come already goes back.
        if let Some(mut batch) = self.batch.take() {
            while let Some(Some(Ok(message))) = batch.next().now_or_never() {
                message.ack_with(AckKind::Nak(None)).await.map_err(failed)?;
            }
        }
        Ok(())
    }

    async fn close(self: Box<Self>) {
        let _ = timeout(FLUSH, self.client.flush()).await;
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        self.progress.abort();
    }
}

impl Pull {
    fn looked(&self) -> MutexGuard<'_, Looked> {
        self.looked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next message; nothing where it has looked for those that cannot be read. A call that is given up loses none: what it
    /// waits for is kept.
    async fn take(&mut self) -> Result<Option<Message>, Error> {
        loop {
            if let Some(batch) = &mut self.batch {
                if let Some(message) = batch.next().await {
                    self.open_for.1 = self.open_for.1.saturating_sub(1);
                    return message.map(Some).map_err(failed);
                }
                self.batch = None;
                let (until, more) = self.open_for;
                if more > 0 && Instant::now() < until {
                    // A message with the status 404 or 408 passes for an answer of the server that there are no more.
                    return Err(Error("the server ended a request for messages early".to_owned()));
                }
                if more > 0 && !self.looked().has_failed {
                    // A message with the status 100 passes for a sign of life.
                    self.look().await;
                    return Ok(None);
                }
            }
            if self.opening.is_none() {
                let free = self.most.saturating_sub(self.unacknowledged.messages().len());
                if free == 0 || self.has_unreadable() {
                    // It is called again when a message has ended. The server would deliver one again that cannot be read, and the
                    // connection would end before that message has.
                    std::future::pending::<()>().await;
                }
                let RequestLimits { time, early, messages } = self.limits;
                let wanted = free.min(messages);
                self.open_for = (Instant::now() + time - early, wanted);
                let consumer = self.consumer.clone();
                self.opening =
                    Some(Box::pin(async move { consumer.batch().max_messages(wanted).expires(time).messages().await }));
            }
            if let Some(opening) = &mut self.opening {
                let opened = opening.await;
                self.opening = None;
                self.batch = Some(opened.map_err(failed)?);
            }
        }
    }

    /// Looks for messages that it cannot read. It has none.
    async fn look(&mut self) {
        self.unreadable = unreadable::find(&self.context, &mut self.consumer, &self.looked, &self.name).await.into();
    }

    /// Whether it has a message that it cannot read.
    fn has_unreadable(&self) -> bool {
        let (looked, unacknowledged) = (self.looked(), self.unacknowledged.messages());
        unacknowledged
            .values()
            .filter_map(|message| message.info().ok())
            .any(|info| looked.contains(info.stream_sequence))
    }

    fn receive(&mut self, message: Message, headers: Result<HeaderMap, String>) -> Received {
        self.receipts += 1;
        let received = Received {
            receipt: self.receipts,
            properties: properties(&message),
            headers,
            body: message.payload.clone(),
        };
        self.unacknowledged.messages().insert(self.receipts, Arc::new(message));
        received
    }

    /// Publishes a message again, to the dead letters, with the reason. Durable when it returns.
    async fn bury(&mut self, message: &Message, reason: &str) -> Result<(), Error> {
        let known = message.headers.clone().unwrap_or_default();
        let mut own = async_nats::HeaderMap::new();
        if let Some(id) = known.get(MESSAGE_ID).cloned() {
            own.insert(ORIGINAL_ID, id);
        }
        own.insert(REASON, reason.replace(['\r', '\n'], " "));
        own.insert(CONSUMER, &*self.name);
        if let Some(position) = position(message) {
            own.insert(MESSAGE_ID, dead_letter_id(&position, &self.name));
            own.insert(POSITION, position);
        }
        let mut all = async_nats::HeaderMap::new();
        let is_kept = |name: &async_nats::HeaderName| !is_of_nats(name) && own.get(name.clone()).is_none();
        for (name, values) in known.iter().filter(|(name, _)| is_kept(name)).chain(own.iter()) {
            values.iter().for_each(|value| all.append(name.clone(), value.clone()));
        }
        let failed =
            |error| Error(format!("a dead letter for {} was not stored: {}", self.dead_letter, self.trouble.or(error)));
        // A message that is nearly as large as the server allows has no room for more headers.
        for headers in [all, own, async_nats::HeaderMap::new()] {
            let is_last = headers.is_empty();
            let publishing =
                self.context.publish_with_headers(self.dead_letter.clone(), headers, message.payload.clone());
            match publishing.await {
                Err(error) if error.kind() == PublishErrorKind::MaxPayloadExceeded && !is_last => {}
                Err(error) => return Err(failed(error)),
                Ok(stored) => return stored.await.map(drop).map_err(failed),
            }
        }
        Ok(())
    }
}

/// By which the server tells dead letters apart: two messages with one id are two, and so is one message that two consumers give
/// up. One that is sent twice is one.
fn dead_letter_id(position: &str, consumer: &str) -> String {
    format!("{position}/{consumer}")
}

/// Names a message among all that a stream ever had: a stream that is made again counts from 1 again, but later.
fn position(message: &Message) -> Option<String> {
    let info = message.info().ok()?;
    Some(format!("{}/{}/{}", info.stream, info.stream_sequence, info.published.unix_timestamp_nanos()))
}

/// The properties of a message that it has.
fn properties(message: &Message) -> Vec<(&'static str, Bytes)> {
    let id = message.headers.as_ref().and_then(|headers| headers.get(MESSAGE_ID));
    let values = [
        id.map(|id| Bytes::copy_from_slice(id.as_str().as_bytes())),
        position(message).map(Bytes::from),
        Some(Bytes::copy_from_slice(message.subject.as_bytes())),
    ];
    Nats::PROPERTIES.into_iter().zip(values).filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Whether NATS reads a header itself: in a dead letter it would mean something else.
fn is_of_nats(name: impl AsRef<str>) -> bool {
    name.as_ref().get(..5).is_some_and(|start| start.eq_ignore_ascii_case("nats-"))
}

/// The headers of a message that HTTP can carry, without those that NATS reads itself.
fn headers(message: &Message) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (name, values) in message.headers.iter().flat_map(async_nats::HeaderMap::iter) {
        let text: &str = name.as_ref();
        let Ok(name) = HeaderName::from_bytes(text.as_bytes()) else { continue };
        if is_of_nats(text) {
            continue;
        }
        for value in values.iter().filter_map(|value| HeaderValue::from_str(value.as_str()).ok()) {
            append(&mut headers, name.clone(), value)?;
        }
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_that_nats_reads_are_known_in_any_case() {
        assert!(["Nats-Expected-Stream", "nats-ttl", "NATS-Msg-Id"].into_iter().all(is_of_nats));
        assert!(!["X-Nats", "Nat", "Idempotency-Key"].into_iter().any(is_of_nats));
    }

    #[test]
    fn two_consumers_that_give_up_one_message_have_two_dead_letters() {
        let ids = ["billing", "shipping"].map(|consumer| dead_letter_id("ORDERS/7/1", consumer));
        assert_ne!(ids[0], ids[1]);
        assert_eq!(ids[0], dead_letter_id("ORDERS/7/1", "billing"));
    }

    #[test]
    fn a_consumer_that_could_lose_messages_is_refused() {
        let fit = Config { max_deliver: -1, max_ack_pending: 1000, ..Config::default() };
        assert_eq!(check(&fit, 16), Ok(()));
        assert_eq!(check(&Config { max_deliver: 0, ..fit.clone() }, 16), Ok(()));
        let refused = |config: Config, concurrency, word| {
            assert!(check(&config, concurrency).is_err_and(|problem| problem.contains(word)), "{word}");
        };
        refused(Config { ack_policy: AckPolicy::All, ..fit.clone() }, 16, "ack_policy");
        refused(Config { ack_policy: AckPolicy::None, ..fit.clone() }, 16, "ack_policy");
        refused(Config { max_deliver: 5, ..fit.clone() }, 16, "max_deliver");
        refused(Config { headers_only: true, ..fit.clone() }, 16, "headers_only");
        refused(Config { max_expires: Duration::from_millis(10), ..fit.clone() }, 16, "max_expires");
        refused(fit.clone(), 1, "max_ack_pending");
        assert_eq!(check(&Config { max_ack_pending: 1, ..fit }, 1), Ok(()));
    }

    #[test]
    fn a_request_asks_for_no_more_than_the_server_allows() {
        let limits = |seconds, max_batch| {
            RequestLimits::of(&Config { max_expires: Duration::from_secs(seconds), max_batch, ..Config::default() })
        };
        let free = RequestLimits { time: REQUEST, early: Duration::from_secs(5), messages: usize::MAX };
        for unlimited in [limits(0, 0), limits(0, -1), limits(60, 0)] {
            assert_eq!(unlimited, free);
        }
        let early = Duration::from_secs(2);
        assert_eq!(limits(12, 10), RequestLimits { time: Duration::from_secs(12), early, messages: 10 });
    }

    #[test]
    fn progress_is_reported_before_the_shortest_time_is_over() {
        let interval = |config: &Config| progress_interval(redelivery(config));
        let config = Config { ack_wait: Duration::from_secs(30), ..Config::default() };
        assert_eq!(interval(&config), Duration::from_secs(10));
        let backoff = vec![Duration::from_secs(3), Duration::from_secs(60)];
        assert_eq!(interval(&Config { backoff, ..config.clone() }), Duration::from_secs(1));
        assert_eq!(interval(&Config { ack_wait: Duration::ZERO, ..config }), LEAST);
    }
}
