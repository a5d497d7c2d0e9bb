//! A consumer: takes messages, runs each to its end, and tells the broker.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::Settings;
use super::attempts::{AttemptLog, MessageInHand};
use super::outage::Outage;
use super::source::{ConnectionHistory, EndReply, Error, MessageEnd, Received, Subscription, subscribe};
use crate::gate::{Disposition, Gate, Message};
use crate::idempotency::key::Found;
use crate::telemetry::consumers::{ConsumerMetrics, MessageOutcome};

/// How long a connection may take to open.
const CONNECT: Duration = Duration::from_secs(10);

/// About how often a consumer that stands by asks whether the other is gone.
const STAND_BY: Duration = Duration::from_secs(1);

/// How long a broker may take to hear that a gate that stops wants no more messages. What runs is not ended meanwhile.
const PAUSE: Duration = Duration::from_secs(1);

/// So many messages for each that may run are taken, so that those that wait for their next attempt hold up no others.
const TAKEN_FOR_EACH: u32 = 8;

/// The longest pause: an upstream may name one that no clock can count.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// How often to look whether an upstream may be asked again that could not be reached.
const CIRCUIT: Duration = Duration::from_millis(100);

/// How long after a dead letter that the broker did not take to send it again.
const DEAD_LETTER: Duration = Duration::from_secs(5);

/// What the messages of a consumer share.
struct Shared<F> {
    settings: Arc<Settings>,
    current: F,
    /// How many messages may run at a time.
    turns: Semaphore,
    attempts: AttemptLog,
}

/// Takes messages until `stop` turns true, and returns when those in hand have ended. `current` gives the gate that serves.
pub async fn consume(
    settings: Arc<Settings>,
    current: impl Fn() -> Arc<Gate> + Send + Sync + 'static,
    metrics: ConsumerMetrics,
    mut stop: watch::Receiver<bool>,
) {
    let shared = Arc::new(Shared {
        turns: Semaphore::new(settings.concurrency as usize),
        attempts: AttemptLog::default(),
        current,
        settings,
    });
    let mut outage = Outage::new(Arc::clone(&shared.settings.name), shared.settings.source.to_string());
    let mut history = ConnectionHistory::default();
    while !*stop.borrow() {
        let opening = timeout(CONNECT, subscribe(&shared.settings, shared.most_taken(), &history));
        let opened = tokio::select! {
            biased;
            () = turned(&mut stop) => return,
            opened = opening => opened.unwrap_or_else(|_| Err(no_answer())),
        };
        let error = match opened {
            Ok(subscription) => {
                let consumer = Consumer { shared: &shared, metrics: &metrics, outage: &mut outage, subscription };
                let ran = consumer.run(&mut stop).await;
                metrics.connected(false);
                metrics.in_hand(0);
                match ran {
                    Ok(()) => return,
                    Err(error) => {
                        history.was_lost = true;
                        error
                    }
                }
            }
            Err(error) => error,
        };
        if *stop.borrow() {
            tracing::debug!(consumer = &*shared.settings.name, %error, "the broker cannot be used any more");
            return;
        }
        let pause = outage.failed(error);
        tokio::select! {
            biased;
            () = turned(&mut stop) => return,
            () = sleep(pause) => {}
        }
    }
}

fn no_answer() -> Error {
    Error("no answer in time".to_owned())
}

/// Returns when it is true, or its sender is gone.
async fn turned(signal: &mut watch::Receiver<bool>) {
    let _ = signal.wait_for(|signal| *signal).await;
}

/// A consumer with a connection.
struct Consumer<'a, F> {
    shared: &'a Arc<Shared<F>>,
    metrics: &'a ConsumerMetrics,
    outage: &'a mut Outage,
    subscription: Box<dyn Subscription>,
}

impl<F: Fn() -> Arc<Gate> + Send + Sync + 'static> Consumer<'_, F> {
    async fn run(mut self, stop: &mut watch::Receiver<bool>) -> Result<(), Error> {
        if !self.begin(stop).await? {
            let patience = self.subscription.patience();
            let _ = timeout(patience, self.subscription.close()).await;
            return Ok(());
        }
        if self.outage.takes_over(self.subscription.longest_pause()) {
            let Settings { name, source, .. } = &*self.shared.settings;
            tracing::info!(consumer = &**name, source = source.to_string(), "consuming messages");
        }
        // In an outage, a broker may refuse again and again what follows the subscription.
        self.metrics.connected(!self.outage.is_on());
        let (begun, mut first_end) = (Instant::now(), None);
        let returning = watch::Sender::new(false);
        let (mut lanes, mut tasks) = (Lanes::default(), JoinSet::new());
        let mut is_stopping = false;
        let mut refused = Refused { consumer: Arc::clone(&self.shared.settings.name), since: None };
        // Where the connection is lost, the tasks go with it: the broker delivers their messages again. What runs has a claim, and
        // runs on.
        loop {
            tokio::select! {
                biased;
                () = turned(stop), if !is_stopping => {
                    is_stopping = true;
                    returning.send_replace(true);
                    // What runs is ended all the same, as far as the broker takes it.
                    match timeout(PAUSE, self.subscription.pause()).await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => self.still_sends(&error),
                        Err(_) => self.still_sends(&no_answer()),
                    }
                }
                () = sleep_until(self.outage.proven_at(begun, first_end)), if self.outage.is_on() => {
                    self.outage.over();
                    self.metrics.connected(true);
                }
                Some(ended) = tasks.join_next() => {
                    // A panic. The broker delivers again what is not acknowledged.
                    let finished = ended.map_err(|_| Error("a message failed".to_owned()))?;
                    let Finished { receipt, lane, end, .. } = &finished;
                    // A broker that is silent must not hold up what it would deliver over another connection.
                    let reply = timeout(self.subscription.patience(), self.subscription.end(*receipt, end)).await;
                    let reply =
                        reply.unwrap_or_else(|_| Err(Error("the broker does not take the end of a message".to_owned())));
                    let is_dead = matches!(end, MessageEnd::Dead(_));
                    let reply = reply.inspect_err(|_| {
                        self.outage.note_refusal(is_dead);
                        if is_dead {
                            self.metrics.dead_letter_refused();
                        }
                    })?;
                    if let EndReply::Refused(error) = reply {
                        refused.again(&error);
                        self.metrics.dead_letter_refused();
                        tasks.spawn(finished.again(returning.subscribe()));
                    } else {
                        first_end.get_or_insert_with(Instant::now);
                        lanes.left(lane);
                        if is_dead {
                            refused.over();
                        }
                        self.metrics.ended(match end {
                            MessageEnd::Done => MessageOutcome::Done,
                            MessageEnd::Dead(_) => MessageOutcome::Dead,
                            MessageEnd::Returned => MessageOutcome::Returned,
                        });
                        finished.over();
                    }
                }
                received = self.subscription.next(), if !is_stopping => {
                    let work = MessageTask::of(self.shared, received?);
                    let place = lanes.join(work.lane.clone());
                    tasks.spawn(work.run(Arc::clone(self.shared), place, returning.subscribe()));
                }
            }
            self.metrics.in_hand(tasks.len());
            if is_stopping && tasks.is_empty() {
                let patience = self.subscription.patience();
                let _ = timeout(patience, self.subscription.close()).await;
                return Ok(());
            }
        }
    }

    fn still_sends(&self, error: &Error) {
        let consumer = &*self.shared.settings.name;
        tracing::debug!(consumer, %error, "the broker does not say that it sends no more messages");
    }

    /// Waits until this consumer may have the messages; false where it is stopped before.
    async fn begin(&mut self, stop: &mut watch::Receiver<bool>) -> Result<bool, Error> {
        let connected = Instant::now();
        loop {
            let begun = tokio::select! {
                biased;
                () = turned(stop) => return Ok(false),
                begun = timeout(CONNECT, self.subscription.begin()) => begun.unwrap_or_else(|_| Err(no_answer()))?,
            };
            if begun {
                return Ok(true);
            }
            self.outage.stands_by(connected.elapsed());
            // Those that stand by do not ask all at the same time.
            let pause = STAND_BY.mul_f64(0.5 + fastrand::f64());
            tokio::select! {
                biased;
                () = turned(stop) => return Ok(false),
                () = sleep(pause) => {}
            }
        }
    }
}

/// Messages of one lane run one after the other, in the order in which they came.
#[derive(Default)]
struct Lanes(HashMap<Bytes, (u32, Option<oneshot::Receiver<()>>)>);

/// The place of a message in its lane. Dropped, it lets the next one run.
struct Turn {
    before: Option<oneshot::Receiver<()>>,
    _after: oneshot::Sender<()>,
}

impl Lanes {
    fn join(&mut self, lane: Bytes) -> Turn {
        let (after, next) = oneshot::channel();
        let (count, last) = self.0.entry(lane).or_default();
        *count += 1;
        Turn { before: last.replace(next), _after: after }
    }

    fn left(&mut self, lane: &Bytes) {
        if let Some((count, _)) = self.0.get_mut(lane) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(lane);
            }
        }
    }
}

/// A message that the broker is yet to hear the end of.
struct Finished {
    receipt: u64,
    lane: Bytes,
    end: MessageEnd,
    in_hand: Option<MessageInHand>,
    /// The next of its lane runs when the broker has the end of this one.
    _place: Turn,
}

impl Finished {
    /// The broker has its end: the next one with its key counts from the beginning.
    fn over(self) {
        if self.end != MessageEnd::Returned {
            self.in_hand.into_iter().for_each(MessageInHand::ended);
        }
    }

    /// The same after a while, in which the broker may have found room for dead letters. At a shutdown the message goes back.
    async fn again(self, mut returning: watch::Receiver<bool>) -> Self {
        tokio::select! {
            biased;
            () = turned(&mut returning) => Self { end: MessageEnd::Returned, ..self },
            () = sleep(DEAD_LETTER) => self,
        }
    }
}

/// Whether the broker takes dead letters, for the log.
struct Refused {
    consumer: Arc<str>,
    since: Option<Instant>,
}

impl Refused {
    fn again(&mut self, error: &Error) {
        if self.since.is_none() {
            self.since = Some(Instant::now());
            let consumer = &*self.consumer;
            tracing::error!(consumer, %error, "a message was given up, and the broker does not take its dead letter; trying again");
        }
    }

    fn over(&mut self) {
        if let Some(since) = self.since.take() {
            let (consumer, seconds) = (&*self.consumer, since.elapsed().as_secs_f64());
            tracing::info!(consumer, seconds, "the broker takes dead letters again");
        }
    }
}

/// A message on its way.
struct MessageTask {
    receipt: u64,
    /// Names it among messages.
    key: Bytes,
    lane: Bytes,
    /// Names it among messages, where the broker does.
    position: Option<String>,
    /// Its request; else why it can have none.
    message: Result<Message, String>,
}

impl MessageTask {
    fn of<F>(shared: &Shared<F>, received: Received) -> Self {
        let Settings { request, key: rule, concurrency, .. } = &*shared.settings;
        let Received { receipt, properties, headers, body } = received;
        let property = |name: &str| properties.iter().find(|(known, _)| *known == name).map(|(_, value)| &**value);
        let position = property("position").map(|position| String::from_utf8_lossy(position).into_owned());
        let headers = headers.map_err(|problem| format!("headers-invalid: its headers cannot be read: {problem}"));
        let found = headers.and_then(|headers| match rule.find(property, &request.target, &headers, &body) {
            Ok(Found::Absent | Found::NeedsBody) => Err("key-missing: the message has no key".to_owned()),
            Ok(found) => Ok((headers, found)),
            Err(invalid) => Err(format!("key-invalid: {invalid}")),
        });
        let key = match &found {
            Ok((_, Found::Key(key))) => Bytes::copy_from_slice(key.as_str().as_bytes()),
            Ok(_) => digest(&body),
            // RabbitMQ gives no position.
            Err(_) => position.clone().map_or_else(|| digest(&body), Bytes::from),
        };
        // One at a time is one after the other.
        let lane = if *concurrency == 1 { Bytes::new() } else { key.clone() };
        let (method, target, host) = (request.method.clone(), request.target.clone(), request.host.clone());
        let message = found.map(|(headers, key)| Message { method, target, host, headers, body, key });
        Self { receipt, key, lane, position, message }
    }

    async fn run<F: Fn() -> Arc<Gate> + Send + Sync + 'static>(
        self,
        shared: Arc<Shared<F>>,
        mut place: Turn,
        returning: watch::Receiver<bool>,
    ) -> Finished {
        let Self { receipt, key, lane, position, message } = self;
        let (end, in_hand, shortened) = match message {
            Ok(message) => {
                let (end, in_hand) = shared.run(&message, key, &mut place, returning).await;
                (end, in_hand, if let Found::Key(key) = &message.key { Some(key.shortened()) } else { None })
            }
            Err(why) => (MessageEnd::Dead(why), Some(shared.attempts.hold(key)), None),
        };
        if let MessageEnd::Dead(reason) = &end
            && in_hand.as_ref().is_none_or(MessageInHand::give_up)
        {
            let consumer = &*shared.settings.name;
            tracing::warn!(
                consumer,
                reason,
                key = shortened,
                position,
                "a message is given up and goes to the dead letters"
            );
        }
        Finished { receipt, lane, end, in_hand, _place: place }
    }
}

/// The end of a pause that begins now.
fn after(pause: Duration) -> Instant {
    Instant::now() + pause.min(LONGEST)
}

/// Names a message of a consumer whose body is its key.
fn digest(body: &[u8]) -> Bytes {
    use std::hash::{DefaultHasher, Hasher as _};
    let mut hasher = DefaultHasher::new();
    hasher.write(body);
    Bytes::copy_from_slice(&hasher.finish().to_be_bytes())
}

impl<F: Fn() -> Arc<Gate> + Send + Sync + 'static> Shared<F> {
    /// How many messages are taken at a time.
    fn most_taken(&self) -> u16 {
        let concurrency = self.settings.concurrency;
        let most = if concurrency == 1 { 1 } else { concurrency.saturating_mul(TAKEN_FOR_EACH) };
        u16::try_from(most).unwrap_or(u16::MAX)
    }

    /// Runs a message once those before it in its lane are over.
    async fn run(
        &self,
        message: &Message,
        key: Bytes,
        place: &mut Turn,
        mut returning: watch::Receiver<bool>,
    ) -> (MessageEnd, Option<MessageInHand>) {
        if let Some(before) = place.before.take() {
            tokio::select! {
                biased;
                () = turned(&mut returning) => return (MessageEnd::Returned, None),
                // It sends nothing, and is dropped.
                _ = before => {}
            }
        }
        let in_hand = self.attempts.hold(key);
        let end = self.run_to_end(message, &in_hand, returning).await;
        (end, Some(in_hand))
    }

    /// Runs a message until it has its end, or until `returning` turns true while it waits.
    async fn run_to_end(
        &self,
        message: &Message,
        in_hand: &MessageInHand,
        mut returning: watch::Receiver<bool>,
    ) -> MessageEnd {
        let mut next = in_hand.next();
        loop {
            let turn = async {
                // A timer takes its time even where nothing is to be waited for.
                if Instant::now() < next {
                    sleep_until(next).await;
                }
                // It is never closed.
                let turn = self.turns.acquire().await.ok();
                loop {
                    match (self.current)().permit(message) {
                        Some(permission) => break (turn, permission),
                        None => sleep(CIRCUIT).await,
                    }
                }
            };
            let turn = tokio::select! {
                biased;
                () = turned(&mut returning) => return MessageEnd::Returned,
                turn = turn => turn,
            };
            let began = Instant::now();
            let disposition = (self.current)().consume(message, in_hand.tries()).await;
            drop(turn);
            next = match disposition {
                Disposition::Done => return MessageEnd::Done,
                Disposition::GiveUp { note, .. } => return MessageEnd::Dead(note),
                Disposition::Wait(pause) => after(pause),
                Disposition::Again { pause, .. } => {
                    let next = after(pause);
                    in_hand.failed(began, next);
                    next
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::{HeaderMap, Method, Uri};

    use super::*;
    use crate::consumers::{Amqp, RequestLine, Source};
    use crate::gate::tests::gate_of;
    use crate::idempotency::message::{MessageKeyRule, MessageKeySource};
    use crate::telemetry::metrics::Metrics;

    /// A consumer whose gate has no route, and how often it asked for that gate.
    fn shared() -> (Arc<Shared<impl Fn() -> Arc<Gate> + Send + Sync + 'static>>, Arc<AtomicUsize>) {
        let amqp = Amqp {
            is_encrypted: false,
            host: "localhost".to_owned(),
            port: 5672,
            user: "guest".to_owned(),
            password: "guest".to_owned(),
            virtual_host: "/".to_owned(),
            queue: "orders".to_owned(),
        };
        let settings = Arc::new(Settings {
            name: "orders".into(),
            source: Source::Amqp(amqp),
            request: RequestLine { method: Method::POST, target: Uri::from_static("/orders"), host: None },
            key: MessageKeyRule(vec![MessageKeySource::Property("message-id".into())]),
            concurrency: 16,
            dead_letter: None,
        });
        let asked = Arc::new(AtomicUsize::new(0));
        let (gate, counted) = (gate_of(Vec::new()), Arc::clone(&asked));
        let current = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Arc::clone(&gate)
        };
        (Arc::new(Shared { settings, current, turns: Semaphore::new(16), attempts: AttemptLog::default() }), asked)
    }

    fn message() -> Message {
        Message {
            method: Method::POST,
            target: Uri::from_static("/orders"),
            host: None,
            headers: HeaderMap::new(),
            body: Bytes::new(),
            key: Found::Fingerprint,
        }
    }

    fn received(receipt: u64) -> Received {
        let body = Bytes::from(receipt.to_string());
        Received { receipt, properties: Vec::new(), headers: Ok(HeaderMap::new()), body }
    }

    /// RabbitMQ gives a message no position. After a new connection, the gate knows it by its body.
    #[tokio::test]
    async fn a_message_that_nothing_names_is_given_up_once() {
        let shared = shared().0;
        let give_up = async |receipt| {
            let place = Lanes::default().join(Bytes::new());
            let task = MessageTask::of(&shared, received(receipt));
            let finished = task.run(Arc::clone(&shared), place, watch::channel(false).1).await;
            assert!(matches!(finished.end, MessageEnd::Dead(_)));
            finished.in_hand.expect("it is remembered")
        };
        let lost = give_up(1).await;
        assert!(!lost.give_up(), "the log has it");
        drop(lost);
        assert!(!give_up(1).await.give_up());
        give_up(1).await.ended();
        assert!(shared.attempts.hold(digest(b"1")).give_up(), "it is another one");
    }

    /// A broker that has messages without keys, and takes their ends or does not.
    struct Fake {
        messages: Vec<Received>,
        /// What it says to each end; to all further ones the last.
        ends: Vec<Result<EndReply, Error>>,
        asked: Arc<AtomicUsize>,
        /// Whether it says nothing to a consumer that stops.
        is_silent: bool,
        /// It gives its messages so late, and ends the connection that long after it took an end.
        refuses_afterwards: Option<(Duration, Duration)>,
    }

    impl Fake {
        fn of(messages: Vec<Received>, ends: Vec<Result<EndReply, Error>>) -> Self {
            Self { messages, ends, asked: Arc::default(), is_silent: false, refuses_afterwards: None }
        }
    }

    #[async_trait::async_trait]
    impl Subscription for Fake {
        async fn next(&mut self) -> Result<Received, Error> {
            if let Some((before, after)) = self.refuses_afterwards {
                let has_ended = self.asked.load(Ordering::Relaxed) > 0;
                sleep(if has_ended { after } else { before }).await;
                if has_ended {
                    return Err(Error("refused".to_owned()));
                }
            }
            match self.messages.pop() {
                Some(message) => Ok(message),
                None => std::future::pending().await,
            }
        }

        async fn end(&mut self, _: u64, _: &MessageEnd) -> Result<EndReply, Error> {
            let nth = self.asked.fetch_add(1, Ordering::Relaxed);
            self.ends[nth.min(self.ends.len() - 1)].clone()
        }

        async fn pause(&mut self) -> Result<(), Error> {
            if self.is_silent { std::future::pending().await } else { Ok(()) }
        }

        async fn close(self: Box<Self>) {
            if self.is_silent {
                std::future::pending().await
            }
        }
    }

    /// Consumes from a broker for so long, or until the broker cannot be used.
    async fn consume_for(time: Duration, outage: &mut Outage, fake: Fake) -> Option<Error> {
        consume_and_count(time, outage, fake, &Metrics::new().consumer("orders")).await
    }

    async fn consume_and_count(
        time: Duration,
        outage: &mut Outage,
        fake: Fake,
        metrics: &ConsumerMetrics,
    ) -> Option<Error> {
        let (_stop, mut stopped) = watch::channel(false);
        let shared = shared().0;
        let consumer = Consumer { shared: &shared, metrics, outage, subscription: Box::new(fake) };
        timeout(time, consumer.run(&mut stopped)).await.ok().map(|ran| ran.expect_err("nothing stopped it"))
    }

    #[tokio::test(start_paused = true)]
    async fn a_broker_that_keeps_no_dead_letter_is_away_until_a_connection_lasts() {
        let all = Metrics::new();
        let metrics = all.consumer("orders");
        let has = |name: &str, value: u32| {
            let line = format!("{name}{{consumer=\"orders\"}} {value}");
            assert!(all.encode().lines().any(|known| known == line), "{line}:\n{}", all.encode());
        };
        let mut outage = Outage::new("orders".into(), "amqp://localhost".to_owned());
        let second = Duration::from_secs(1);
        let idle = || Fake::of(Vec::new(), vec![Ok(EndReply::Taken)]);
        consume_and_count(second, &mut outage, idle(), &metrics).await;
        has("oncegate_consumer_connected", 1);
        for times in 1..=2 {
            let fake = Fake::of(vec![received(1)], vec![Err(Error("no room".to_owned()))]);
            let error = consume_and_count(second, &mut outage, fake, &metrics).await.expect("it is refused");
            outage.failed(error);
            has("oncegate_dead_letters_refused_total", times);
        }
        consume_and_count(second, &mut outage, idle(), &metrics).await;
        has("oncegate_consumer_connected", 0);
        consume_and_count(31 * second, &mut outage, idle(), &metrics).await;
        has("oncegate_consumer_connected", 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_has_proven_itself_when_messages_end_over_it_or_when_it_lasts() {
        let refused = || Error("refused".to_owned());
        let mut outage = Outage::new("orders".into(), "amqp://localhost".to_owned());
        let mut pauses = Vec::new();
        for _ in 0..6 {
            let fake = Fake::of(vec![received(1)], vec![Err(refused())]);
            let error = consume_for(Duration::from_secs(60), &mut outage, fake).await.expect("it is refused");
            pauses.push(outage.failed(error));
            assert!(outage.is_on(), "it was opened, and that is all");
        }
        assert!(pauses[5] >= Duration::from_secs(4), "{pauses:?}");
        let idle = || Fake::of(Vec::new(), vec![Ok(EndReply::Taken)]);
        consume_for(Duration::from_secs(29), &mut outage, idle()).await;
        assert!(outage.is_on());
        consume_for(Duration::from_secs(31), &mut outage, idle()).await;
        assert!(!outage.is_on());
        outage.failed(refused());
        let fake = Fake::of(vec![received(1)], vec![Ok(EndReply::Taken)]);
        consume_for(Duration::from_secs(1), &mut outage, fake).await;
        assert!(!outage.is_on(), "a message ended, and more could");
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_that_is_refused_a_little_later_proves_nothing() {
        let mut outage = Outage::new("orders".into(), "nats://localhost".to_owned());
        outage.failed(Error("refused".to_owned()));
        let late = (Duration::from_secs(20), Duration::from_millis(20));
        let fake = Fake { refuses_afterwards: Some(late), ..Fake::of(vec![received(1)], vec![Ok(EndReply::Taken)]) };
        consume_for(Duration::from_secs(25), &mut outage, fake).await.expect("it is refused");
        assert!(outage.is_on());
    }

    #[tokio::test(start_paused = true)]
    async fn a_dead_letter_that_is_not_taken_holds_up_no_other_message() {
        let refused = || Ok(EndReply::Refused(Error("no room".to_owned())));
        let mut outage = Outage::new("orders".into(), "amqp://localhost".to_owned());
        // Two messages without keys, of which the first to end is refused twice.
        let fake = Fake::of(
            vec![received(1), received(2)],
            vec![refused(), Ok(EndReply::Taken), refused(), Ok(EndReply::Taken)],
        );
        let asked = Arc::clone(&fake.asked);
        assert!(consume_for(DEAD_LETTER / 2, &mut outage, fake).await.is_none(), "the connection is not given up");
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        let fake = Fake::of(vec![received(1)], vec![refused(), refused(), Ok(EndReply::Taken)]);
        let asked = Arc::clone(&fake.asked);
        assert!(consume_for(DEAD_LETTER * 10, &mut outage, fake).await.is_none());
        assert_eq!(asked.load(Ordering::Relaxed), 3, "it is tried until it is taken");
        assert!(!outage.is_on());
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_broker_keeps_nothing_from_ending_at_a_shutdown() {
        let mut outage = Outage::new("orders".into(), "amqp://localhost".to_owned());
        // Its dead letter is still to be taken when the consumer stops.
        let refused = Ok(EndReply::Refused(Error("no room".to_owned())));
        let mut fake = Fake::of(vec![received(1)], vec![refused, Ok(EndReply::Taken)]);
        fake.is_silent = true;
        let asked = Arc::clone(&fake.asked);
        let (stop, mut stopped) = watch::channel(false);
        let (shared, metrics) = (shared().0, Metrics::new().consumer("orders"));
        let consumer =
            Consumer { shared: &shared, metrics: &metrics, outage: &mut outage, subscription: Box::new(fake) };
        let stopping = async {
            sleep(Duration::from_secs(1)).await;
            stop.send_replace(true);
        };
        let (ran, ()) = tokio::join!(timeout(Duration::from_secs(60), consumer.run(&mut stopped)), stopping);
        assert_eq!((ran, asked.load(Ordering::Relaxed)), (Ok(Ok(())), 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_between_attempts_outlasts_a_connection() {
        let (shared, asked) = shared();
        let key = Bytes::from_static(b"m-1");
        shared.attempts.hold(key.clone()).failed(Instant::now(), after(Duration::from_secs(600)));
        // Each connection has it for a while.
        for _ in 0..3 {
            let (_returning, returned) = watch::channel(false);
            let mut place = Lanes::default().join(key.clone());
            let message = message();
            let run = shared.run(&message, key.clone(), &mut place, returned);
            assert!(timeout(Duration::from_secs(180), run).await.is_err());
        }
        let tries = shared.attempts.hold(key.clone()).tries();
        assert_eq!((asked.load(Ordering::Relaxed), tries.attempts), (0, 1), "no attempt yet");
        let (returning, returned) = watch::channel(false);
        let (message, mut place) = (message(), Lanes::default().join(key.clone()));
        let run = shared.run(&message, key, &mut place, returned);
        let stop = async {
            sleep(Duration::from_secs(61)).await;
            returning.send_replace(true);
        };
        let ((end, _), ()) = tokio::join!(run, stop);
        assert!(asked.load(Ordering::Relaxed) > 0, "the pause is over");
        assert_eq!(end, MessageEnd::Returned);
    }

    #[test]
    fn a_pause_may_be_longer_than_a_clock_can_count() {
        assert!(after(Duration::MAX) > Instant::now() + Duration::from_secs(86_400));
    }

    #[tokio::test]
    async fn a_lane_is_one_after_the_other() {
        let mut lanes = Lanes::default();
        let lane = Bytes::from_static(b"a");
        let mut first = lanes.join(lane.clone());
        let mut second = lanes.join(lane.clone());
        let other = lanes.join(Bytes::from_static(b"b"));
        assert!(first.before.take().is_none() && other.before.is_none());
        let mut before = second.before.take().expect("one comes before it");
        assert!(before.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Empty));
        drop(first);
        lanes.left(&lane);
        assert!(before.await.is_err(), "the first is gone");
        // The second is still there: a third comes after it.
        assert!(lanes.join(lane.clone()).before.is_some());
        lanes.left(&lane);
        lanes.left(&lane);
        assert!(lanes.join(lane).before.is_none());
    }

    #[tokio::test]
    async fn the_next_message_of_a_key_waits_for_the_end_of_the_first_and_counts_from_the_beginning() {
        let (mut lanes, log, key) = (Lanes::default(), AttemptLog::default(), Bytes::from_static(b"a"));
        let (first, mut second) = (lanes.join(key.clone()), lanes.join(key.clone()));
        let mut before = second.before.take().expect("one comes before it");
        let in_hand = log.hold(key.clone());
        in_hand.failed(Instant::now(), Instant::now());
        let end = MessageEnd::Dead("released: 503, after 2 attempts".to_owned());
        let finished = Finished { receipt: 1, lane: key.clone(), end, in_hand: Some(in_hand), _place: first };
        assert!(before.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Empty));
        finished.over();
        assert!(before.await.is_err());
        assert_eq!(log.hold(key).tries().attempts, 0);
    }
}
