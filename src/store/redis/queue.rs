//! The queue of a batcher: decides when a batch is due, and what it carries.

use std::collections::VecDeque;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::operation::{Operation, Reply};
use crate::store::{Error, ErrorKind};

/// How many operations may be queued. More are refused at once.
const MAX_QUEUED: usize = 8192;

/// How many operations one batch carries.
const MAX_BATCH: usize = 256;

/// How many bytes one batch carries, give or take one operation: the server does nothing else meanwhile.
const MAX_BATCH_BYTES: usize = 4 << 20;

/// From this many queued operations on, a second round trip starts while one is in flight.
const SECOND_WORKER_THRESHOLD: usize = 64;

/// An operation whose caller waits.
pub(super) struct Pending {
    pub(super) operation: Operation,
    pub(super) reply: oneshot::Sender<Result<Reply, Error>>,
    pub(super) runtime: Option<Handle>,
    pub(super) since: Instant,
}

/// Operations in the order of arrival.
#[derive(Default)]
pub(super) struct Queue {
    waiting: VecDeque<Pending>,
    /// How many round trips are in flight and not slow yet.
    pub(super) in_flight: usize,
    pub(super) is_closing: bool,
}

impl Queue {
    /// Adds an operation, unless they are refused.
    pub(super) fn push(&mut self, pending: Pending) -> Result<(), Error> {
        if self.is_closing {
            return Err(closed());
        }
        if self.waiting.len() >= MAX_QUEUED {
            return Err(Error::determinate(ErrorKind::Unavailable, "too many operations are queued for Redis"));
        }
        self.waiting.push_back(pending);
        Ok(())
    }

    /// Whether a worker is to take up what waits.
    pub(super) fn is_due(&self) -> bool {
        let enough = if self.in_flight == 0 || self.is_closing { 1 } else { SECOND_WORKER_THRESHOLD };
        self.waiting.len() >= enough
    }

    /// Takes the next batch from the queue.
    pub(super) fn batch(&mut self) -> Vec<Pending> {
        let mut batch: Vec<Pending> = Vec::with_capacity(self.waiting.len().min(MAX_BATCH));
        let mut bytes = 0;
        while batch.len() < MAX_BATCH && bytes < MAX_BATCH_BYTES {
            let Some(pending) = self.waiting.pop_front() else { break };
            if pending.operation.is_abandoned_with_caller() && pending.reply.is_closed() {
                continue;
            }
            bytes += pending.operation.size();
            batch.push(pending);
        }
        batch
    }
}

pub(super) fn closed() -> Error {
    Error::determinate(ErrorKind::Unavailable, "the store is closed")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idempotency::record::{Attempt, RecordId};
    use crate::store::End;

    fn pending(
        number: u8,
        operation: impl Fn(RecordId) -> Operation,
    ) -> (Pending, oneshot::Receiver<Result<Reply, Error>>) {
        let (reply, answer) = oneshot::channel();
        let operation = operation(RecordId([number; 32]));
        (Pending { operation, reply, runtime: None, since: Instant::now() }, answer)
    }

    fn release(id: RecordId) -> Operation {
        Operation::Settle { id, attempt: Attempt([0; 16]), end: End::Release }
    }

    #[test]
    fn abandoned_operations_are_dropped_where_that_is_safe() {
        let mut queue = Queue::default();
        for number in 0..3 {
            let (pending, answer) = pending(number, if number == 1 { Operation::Await } else { release });
            queue.push(pending).unwrap();
            drop(answer);
        }
        let batch = queue.batch();
        assert_eq!(batch.iter().map(|pending| pending.operation.id().unwrap().0[0]).collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn few_operations_do_not_start_a_second_round_trip() {
        let mut queue = Queue::default();
        let mut answers = Vec::new();
        for number in 0..64 {
            let (pending, answer) = pending(number, release);
            queue.push(pending).unwrap();
            answers.push(answer);
            queue.in_flight = 0;
            assert!(queue.is_due(), "an idle worker takes it at once");
            queue.in_flight = 1;
            assert_eq!(queue.is_due(), number == 63);
        }
        assert_eq!(queue.batch().len(), 64);
        assert!(!queue.is_due());
    }

    #[test]
    fn operations_beyond_the_queue_limit_are_refused() {
        let mut queue = Queue::default();
        for _ in 0..MAX_QUEUED {
            queue.push(pending(1, release).0).unwrap();
        }
        assert!(matches!(queue.push(pending(1, release).0), Err(Error::Determinate(_))));
    }
}
