//! What waits for a round trip, and when it is worth one.

use std::collections::VecDeque;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::operation::{Operation, Said};
use crate::store::{Error, ErrorKind};

/// How many operations may wait. More are refused at once.
const WAITING: usize = 8192;

/// How many operations one batch carries.
const BATCH: usize = 256;

/// How many bytes one batch carries, give or take one operation: the server does nothing else meanwhile.
const BATCH_BYTES: usize = 4 << 20;

/// So many that wait are worth another round trip, while one is under way.
const WORTH_ANOTHER: usize = 64;

/// An operation whose caller waits.
pub(super) struct Pending {
    pub(super) operation: Operation,
    pub(super) reply: oneshot::Sender<Result<Said, Error>>,
    pub(super) runtime: Option<Handle>,
    pub(super) since: Instant,
}

/// Operations in the order in which they came.
#[derive(Default)]
pub(super) struct Queue {
    waiting: VecDeque<Pending>,
    /// How many round trips are under way that may soon have been answered.
    pub(super) prompt: usize,
    pub(super) is_closing: bool,
}

impl Queue {
    /// Adds an operation, unless they are refused.
    pub(super) fn push(&mut self, pending: Pending) -> Result<(), Error> {
        if self.is_closing {
            return Err(closed());
        }
        if self.waiting.len() >= WAITING {
            return Err(Error::determinate(ErrorKind::Unavailable, "too many operations wait for Redis"));
        }
        self.waiting.push_back(pending);
        Ok(())
    }

    /// Whether a worker is to take up what waits.
    pub(super) fn is_due(&self) -> bool {
        let enough = if self.prompt == 0 || self.is_closing { 1 } else { WORTH_ANOTHER };
        self.waiting.len() >= enough
    }

    /// What one batch carries of it.
    pub(super) fn batch(&mut self) -> Vec<Pending> {
        let mut batch: Vec<Pending> = Vec::with_capacity(self.waiting.len().min(BATCH));
        let mut bytes = 0;
        while batch.len() < BATCH && bytes < BATCH_BYTES {
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
    ) -> (Pending, oneshot::Receiver<Result<Said, Error>>) {
        let (reply, answer) = oneshot::channel();
        let operation = operation(RecordId([number; 32]));
        (Pending { operation, reply, runtime: None, since: Instant::now() }, answer)
    }

    fn release(id: RecordId) -> Operation {
        Operation::Settle { id, attempt: Attempt([0; 16]), end: End::Release }
    }

    #[test]
    fn what_nobody_waits_for_is_left_out_where_it_may() {
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
    fn while_a_round_trip_is_under_way_few_are_not_worth_another() {
        let mut queue = Queue::default();
        let mut answers = Vec::new();
        for number in 0..64 {
            let (pending, answer) = pending(number, release);
            queue.push(pending).unwrap();
            answers.push(answer);
            queue.prompt = 0;
            assert!(queue.is_due(), "nobody is waited for");
            queue.prompt = 1;
            assert_eq!(queue.is_due(), number == 63);
        }
        assert_eq!(queue.batch().len(), 64);
        assert!(!queue.is_due());
    }

    #[test]
    fn more_than_may_wait_are_refused() {
        let mut queue = Queue::default();
        for _ in 0..WAITING {
            queue.push(pending(1, release).0).unwrap();
        }
        assert!(matches!(queue.push(pending(1, release).0), Err(Error::Determinate(_))));
    }
}
