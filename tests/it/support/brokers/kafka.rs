//! The cluster of librdkafka's own tests: one broker in this process that speaks the protocol of Kafka over TCP, with groups,
//! their rebalances and their offsets. It keeps messages in memory: that it is killed means here that it closes its
//! connections and its port. What a real broker does with its disk is not tested with it.

use std::time::Duration;

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Header, Headers as _, Message as _, OwnedHeaders};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use rdkafka::{Offset, TopicPartitionList};

use super::{Broker, Message};
use crate::support::wait::eventually;

const TOPIC: &str = "orders";
const DEAD: &str = "orders.dead-letter";
const GROUP: &str = "gate";
const BROKER: i32 = 1;
const PATIENCE: Duration = Duration::from_secs(20);

pub struct Kafka {
    cluster: MockCluster<'static, DefaultProducerContext>,
    partitions: i32,
}

impl Kafka {
    fn of(partitions: i32) -> Self {
        let cluster = MockCluster::new(1).expect("a cluster");
        cluster.create_topic(TOPIC, partitions, 1).expect("a topic");
        cluster.create_topic(DEAD, 1, 1).expect("a topic");
        Self { cluster, partitions }
    }

    /// Refuses so many times to store a message. A client tries again about once in a second, sooner at first.
    pub fn refuse(&self, times: usize) {
        let refused = vec![RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS; times];
        self.cluster.request_errors(RDKafkaApiKey::Produce, &refused);
    }

    fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.cluster.bootstrap_servers()).set("group.id", GROUP);
        config.set("enable.auto.commit", "false");
        config
    }

    fn consumer(&self) -> BaseConsumer {
        self.client().create().expect("a client")
    }

    /// Where the group goes on in a partition, and where that ends.
    fn range(consumer: &BaseConsumer, partition: i32) -> (i64, i64) {
        let mut asked = TopicPartitionList::new();
        asked.add_partition(TOPIC, partition);
        let committed = consumer.committed_offsets(asked, PATIENCE).expect("the broker says it");
        let (first, last) = consumer.fetch_watermarks(TOPIC, partition, PATIENCE).expect("the broker says it");
        let next = match committed.elements()[0].offset() {
            Offset::Offset(next) => next,
            _ => first,
        };
        (next, last)
    }

    fn read(consumer: &BaseConsumer, (topic, partition): (&str, i32), (from, end): (i64, i64)) -> Vec<Message> {
        let count = end - from;
        let mut place = TopicPartitionList::new();
        place.add_partition_offset(topic, partition, Offset::Offset(from)).expect("an offset");
        consumer.assign(&place).expect("it is there");
        let mut found = Vec::new();
        while (found.len() as i64) < count {
            let message = eventually("the broker has the message", || consumer.poll(Duration::from_secs(1))?.ok());
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let reason = message
                .headers()
                .and_then(|headers| headers.iter().find(|header| header.key == "x-oncegate-reason")?.value.map(text));
            let body = text(message.payload().unwrap_or_default());
            found.push(Message { id: message.key().map(text), body, reason });
        }
        found
    }
}

impl Broker for Kafka {
    const ID: &'static str = "property:key";
    const KILLS: usize = 2;
    // The mock cluster takes everybody.
    const PASSWORD: &'static str = "s3cret";

    fn start() -> Self {
        Self::of(1)
    }

    fn start_for_many() -> Self {
        Self::of(4)
    }

    fn kill9(&mut self) {
        self.cluster.broker_down(BROKER).expect("it was up");
    }

    fn run(&mut self) {
        self.cluster.broker_up(BROKER).expect("it was down");
    }

    fn source(&self) -> String {
        format!("kafka://{}?topic={TOPIC}&group={GROUP}", self.cluster.bootstrap_servers())
    }

    fn publish(&self, messages: &[(Option<&str>, &str)]) {
        let producer: ThreadedProducer<DefaultProducerContext> =
            self.client().set("linger.ms", "0").create().expect("a client");
        for (id, body) in messages {
            let mut headers = OwnedHeaders::new();
            for (key, value) in [("x-source", "shop"), ("content-type", "application/json")] {
                headers = headers.insert(Header { key, value: Some(value) });
            }
            let mut record: BaseRecord<'_, str, str> = BaseRecord::to(TOPIC).payload(*body).headers(headers);
            if let Some(id) = *id {
                record = record.key(id);
            }
            producer.send(record).map_err(|(error, _)| error).expect("it is taken");
        }
        producer.flush(PATIENCE).expect("the broker takes them");
    }

    fn waiting(&self) -> usize {
        let consumer = self.consumer();
        let waiting =
            (0..self.partitions).map(|partition| Self::range(&consumer, partition)).map(|(next, end)| end - next);
        usize::try_from(waiting.sum::<i64>()).expect("none are committed that are not there")
    }

    fn take_waiting(&self) -> Vec<Message> {
        let consumer = self.consumer();
        let read = |partition| Self::read(&consumer, (TOPIC, partition), Self::range(&consumer, partition));
        (0..self.partitions).flat_map(read).collect()
    }

    fn take_dead(&self) -> Vec<Message> {
        let consumer = self.consumer();
        let range = consumer.fetch_watermarks(DEAD, 0, PATIENCE).expect("the broker says it");
        Self::read(&consumer, (DEAD, 0), range)
    }
}
