//! The queue of a batcher: decides when a batch is due, and what it carries.

use std::collections::VecDeque;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::connect::{CallError, Query, Session};
use crate::idempotency::record::RecordId;
use crate::store::{Error, ErrorKind};

/// How many operations may be queued. More are refused at once.
const MAX_QUEUED: usize = 8192;

/// How many operations one statement carries.
const MAX_BATCH: usize = 256;

/// How many bytes one statement carries, give or take one operation.
const MAX_BATCH_BYTES: usize = 16 << 20;

/// From this many queued operations on, a second connection joins in while a statement is in flight.
const SECOND_WORKER_THRESHOLD: usize = 64;

/// An operation that a batcher executes.
pub(super) trait Operation: Send + Sync + Sized + 'static {
    /// The reply to the caller.
    type Reply: Send + 'static;

    /// The operations' name in the log.
    const WHAT: &'static str;

    /// The statements that carry them.
    const QUERIES: &'static [Query];

    /// The record that it is about.
    fn id(&self) -> RecordId;

    /// How many bytes it writes, where they may be many.
    fn size(&self) -> usize;

    /// Whether it is dropped if its caller has gone before it was sent.
    fn is_abandoned_with_caller(&self) -> bool;

    /// Whether it needs a statement of its own.
    fn is_exclusive(&self) -> bool;

    /// Executes a batch, which is in the order of ids, each once. `None` in place of a reply means to retry.
    fn execute(
        session: &Session,
        batch: &[&Self],
    ) -> impl Future<Output = Result<Vec<Option<Self::Reply>>, CallError>> + Send;
}

/// An operation whose caller waits.
pub(super) struct Pending<O: Operation> {
    pub(super) operation: O,
    pub(super) reply: oneshot::Sender<Result<O::Reply, Error>>,
    pub(super) runtime: Option<Handle>,
    pub(super) since: Instant,
}

/// Operations in the order of arrival, and the state of the connections.
pub(super) struct Queue<O: Operation> {
    pub(super) waiting: VecDeque<Pending<O>>,
    /// How many connections work.
    pub(super) connected: usize,
    /// How many statements are in flight and not slow yet.
    pub(super) in_flight: usize,
    /// Why the last try to connect failed, if it did.
    pub(super) failure: Option<(ErrorKind, String)>,
    pub(super) is_closing: bool,
}

impl<O: Operation> Queue<O> {
    pub(super) fn new() -> Self {
        Self { waiting: VecDeque::new(), connected: 0, in_flight: 0, failure: None, is_closing: false }
    }

    /// Adds an operation, unless they are refused.
    pub(super) fn push(&mut self, pending: Pending<O>) -> Result<(), Error> {
        if let Some(refusal) = self.refusal() {
            return Err(refusal);
        }
        if self.waiting.len() >= MAX_QUEUED {
            return Err(Error::determinate(ErrorKind::Unavailable, "too many operations are queued for the database"));
        }
        self.waiting.push_back(pending);
        Ok(())
    }

    /// Puts back operations to retry, ahead of all others.
    pub(super) fn put_back(&mut self, again: Vec<Pending<O>>) {
        again.into_iter().rev().for_each(|pending| self.waiting.push_front(pending));
    }

    /// Why what waits is refused: no connection works that would carry it out.
    pub(super) fn outage(&self) -> Option<Error> {
        self.refusal().filter(|_| self.connected == 0)
    }

    /// Why operations are refused at this moment, if they are.
    pub(super) fn refusal(&self) -> Option<Error> {
        if self.is_closing {
            return Some(closed());
        }
        let (kind, message) = self.failure.as_ref().filter(|_| self.connected == 0)?;
        Some(Error::determinate(*kind, message.clone()))
    }

    /// Whether a connection is to take up what waits.
    pub(super) fn is_due(&self) -> bool {
        // An exclusive operation needs a statement of its own in any case.
        let is_alone = self.waiting.front().is_some_and(|first| first.operation.is_exclusive());
        let enough = if self.in_flight == 0 || is_alone || self.is_closing { 1 } else { SECOND_WORKER_THRESHOLD };
        self.waiting.len() >= enough
    }

    /// Takes the next batch from the queue, in the order of ids and each id once.
    pub(super) fn batch(&mut self) -> Vec<Pending<O>> {
        let mut batch: Vec<Pending<O>> = Vec::with_capacity(self.waiting.len().min(MAX_BATCH));
        let mut bytes = 0;
        while batch.len() < MAX_BATCH && bytes < MAX_BATCH_BYTES {
            let Some(pending) = self.waiting.pop_front() else { break };
            if pending.operation.is_abandoned_with_caller() && pending.reply.is_closed() {
                continue;
            }
            let is_alone = pending.operation.is_exclusive();
            if is_alone && !batch.is_empty() {
                self.waiting.push_front(pending);
                break;
            }
            bytes += pending.operation.size();
            batch.push(pending);
            if is_alone {
                break;
            }
        }
        batch.sort_by_key(|pending| pending.operation.id());
        let mut single: Vec<Pending<O>> = Vec::with_capacity(batch.len());
        for pending in batch {
            match single.last() {
                Some(last) if last.operation.id() == pending.operation.id() => self.waiting.push_front(pending),
                _ => single.push(pending),
            }
        }
        single
    }
}

pub(super) fn closed() -> Error {
    Error::determinate(ErrorKind::Unavailable, "the store is closed")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operation on a record: whether it is exclusive, and whether it is abandoned with its caller.
    struct Act(u8, bool, bool);

    type Answer = oneshot::Receiver<Result<(), Error>>;

    impl Operation for Act {
        type Reply = ();
        const WHAT: &'static str = "acts";
        const QUERIES: &'static [Query] = &[];

        fn id(&self) -> RecordId {
            RecordId([self.0; 32])
        }

        fn size(&self) -> usize {
            MAX_BATCH_BYTES / 4
        }

        fn is_abandoned_with_caller(&self) -> bool {
            self.2
        }

        fn is_exclusive(&self) -> bool {
            self.1
        }

        async fn execute(_: &Session, batch: &[&Self]) -> Result<Vec<Option<()>>, CallError> {
            Ok(batch.iter().map(|_| Some(())).collect())
        }
    }

    fn queue(acts: impl IntoIterator<Item = Act>) -> (Queue<Act>, Vec<Answer>) {
        let mut queue = Queue::new();
        let add = |operation| {
            let (reply, answer) = oneshot::channel();
            queue.push(Pending { operation, reply, runtime: None, since: Instant::now() }).unwrap();
            answer
        };
        let answers = acts.into_iter().map(add).collect();
        (queue, answers)
    }

    fn batches(queue: &mut Queue<Act>) -> Vec<Vec<u8>> {
        let batches = std::iter::from_fn(|| Some(queue.batch()).filter(|batch| !batch.is_empty()));
        batches.map(|batch| batch.iter().map(|pending| pending.operation.0).collect()).collect()
    }

    fn act(id: u8) -> Act {
        Act(id, false, false)
    }

    #[test]
    fn a_batch_is_in_order_has_each_id_once_and_ends_where_it_is_large() {
        let (mut waiting, _answers) = queue([3, 1, 3, 2, 5, 4].map(act));
        assert_eq!(batches(&mut waiting), [vec![1, 2, 3], vec![3, 4, 5]]);
    }

    #[test]
    fn exclusive_operations_run_in_order() {
        let (mut waiting, _answers) = queue([act(2), Act(1, true, false), act(3)]);
        assert_eq!(batches(&mut waiting), [vec![2], vec![1], vec![3]]);
    }

    #[test]
    fn abandoned_operations_are_dropped_where_that_is_safe() {
        let (mut waiting, answers) = queue([Act(1, false, true), act(2), Act(3, false, true)]);
        drop(answers);
        assert_eq!(batches(&mut waiting), [vec![2]]);
    }

    #[test]
    fn few_operations_do_not_start_a_second_statement() {
        let (mut waiting, _answers) = queue([act(1)]);
        assert!(waiting.is_due(), "an idle connection takes it at once");
        waiting.in_flight = 1;
        assert!(!waiting.is_due());
        waiting.is_closing = true;
        assert!(waiting.is_due(), "nothing more will come");
        let (mut waiting, _answers) = queue((0..64).map(act));
        waiting.in_flight = 1;
        assert!(waiting.is_due());
        let (mut waiting, _answers) = queue([Act(1, true, false)]);
        waiting.in_flight = 1;
        assert!(waiting.is_due(), "an exclusive operation is due at once");
    }

    #[test]
    fn operations_beyond_the_queue_limit_are_refused() {
        let (mut waiting, _answers) = queue((0..MAX_QUEUED).map(|_| act(1)));
        let (reply, _answer) = oneshot::channel();
        let refused = waiting.push(Pending { operation: act(1), reply, runtime: None, since: Instant::now() });
        assert!(matches!(refused, Err(Error::Determinate(_))));
    }
}
