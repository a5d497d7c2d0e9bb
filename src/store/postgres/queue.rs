//! What waits for a connection, and when it is worth one.

use std::collections::VecDeque;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::connect::{Call, Failed, Session};
use crate::idempotency::record::RecordId;
use crate::store::{Error, ErrorKind};

/// How many operations may wait. More are refused at once.
const WAITING: usize = 8192;

/// How many operations one statement carries.
const BATCH: usize = 256;

/// How many bytes one statement carries, give or take one operation.
const BATCH_BYTES: usize = 16 << 20;

/// So many that wait are worth another connection, while a statement is under way.
const WORTH_ANOTHER: usize = 64;

/// What a lane carries.
pub(super) trait Operation: Send + Sync + Sized + 'static {
    /// What the caller gets.
    type Reply: Send + 'static;

    /// What they are, for the log.
    const WHAT: &'static str;

    /// The statements that carry them.
    const CALLS: &'static [Call];

    /// The record that it is about.
    fn id(&self) -> RecordId;

    /// How many bytes it writes, where they may be many.
    fn size(&self) -> usize;

    /// Whether it is left undone where its caller has gone before it was sent.
    fn is_abandoned_with_caller(&self) -> bool;

    /// Whether a statement of its own carries it.
    fn goes_alone(&self) -> bool;

    /// Carries out a batch, which is in the order of ids, each once. Nothing in the place of a reply means to ask again.
    fn carry_out(
        session: &Session,
        batch: &[&Self],
    ) -> impl Future<Output = Result<Vec<Option<Self::Reply>>, Failed>> + Send;
}

/// An operation whose caller waits.
pub(super) struct Pending<O: Operation> {
    pub(super) operation: O,
    pub(super) reply: oneshot::Sender<Result<O::Reply, Error>>,
    pub(super) runtime: Option<Handle>,
    pub(super) since: Instant,
}

/// Operations in the order in which they came, and what is known of the connections.
pub(super) struct Queue<O: Operation> {
    pub(super) waiting: VecDeque<Pending<O>>,
    /// How many connections work.
    pub(super) working: usize,
    /// How many statements are under way that may soon have been answered.
    pub(super) prompt: usize,
    /// Why the last try to connect failed, if it did.
    pub(super) failure: Option<(ErrorKind, String)>,
    pub(super) is_closing: bool,
}

impl<O: Operation> Queue<O> {
    pub(super) fn new() -> Self {
        Self { waiting: VecDeque::new(), working: 0, prompt: 0, failure: None, is_closing: false }
    }

    /// Adds an operation, unless they are refused.
    pub(super) fn push(&mut self, pending: Pending<O>) -> Result<(), Error> {
        if let Some(refusal) = self.refusal() {
            return Err(refusal);
        }
        if self.waiting.len() >= WAITING {
            return Err(Error::determinate(ErrorKind::Unavailable, "too many operations wait for the database"));
        }
        self.waiting.push_back(pending);
        Ok(())
    }

    /// Puts back what is to be asked again, before all others.
    pub(super) fn put_back(&mut self, again: Vec<Pending<O>>) {
        again.into_iter().rev().for_each(|pending| self.waiting.push_front(pending));
    }

    /// Why what waits is refused: no connection works that would carry it out.
    pub(super) fn loss(&self) -> Option<Error> {
        self.refusal().filter(|_| self.working == 0)
    }

    /// Why operations are refused at this moment, if they are.
    pub(super) fn refusal(&self) -> Option<Error> {
        if self.is_closing {
            return Some(closed());
        }
        let (kind, told) = self.failure.as_ref().filter(|_| self.working == 0)?;
        Some(Error::determinate(*kind, told.clone()))
    }

    /// Whether a connection is to take up what waits.
    pub(super) fn is_due(&self) -> bool {
        // What goes alone is not carried by the next statement either way.
        let is_alone = self.waiting.front().is_some_and(|first| first.operation.goes_alone());
        let enough = if self.prompt == 0 || is_alone || self.is_closing { 1 } else { WORTH_ANOTHER };
        self.waiting.len() >= enough
    }

    /// What one statement carries of it, in the order of ids and each id once.
    pub(super) fn batch(&mut self) -> Vec<Pending<O>> {
        let mut batch: Vec<Pending<O>> = Vec::with_capacity(self.waiting.len().min(BATCH));
        let mut bytes = 0;
        while batch.len() < BATCH && bytes < BATCH_BYTES {
            let Some(pending) = self.waiting.pop_front() else { break };
            if pending.operation.is_abandoned_with_caller() && pending.reply.is_closed() {
                continue;
            }
            let is_alone = pending.operation.goes_alone();
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

    /// An operation on a record: whether it goes alone, and whether its caller may go.
    struct Act(u8, bool, bool);

    type Answer = oneshot::Receiver<Result<(), Error>>;

    impl Operation for Act {
        type Reply = ();
        const WHAT: &'static str = "acts";
        const CALLS: &'static [Call] = &[];

        fn id(&self) -> RecordId {
            RecordId([self.0; 32])
        }

        fn size(&self) -> usize {
            BATCH_BYTES / 4
        }

        fn is_abandoned_with_caller(&self) -> bool {
            self.2
        }

        fn goes_alone(&self) -> bool {
            self.1
        }

        async fn carry_out(_: &Session, batch: &[&Self]) -> Result<Vec<Option<()>>, Failed> {
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
    fn what_goes_alone_goes_when_it_is_its_turn() {
        let (mut waiting, _answers) = queue([act(2), Act(1, true, false), act(3)]);
        assert_eq!(batches(&mut waiting), [vec![2], vec![1], vec![3]]);
    }

    #[test]
    fn what_nobody_waits_for_is_left_out_where_it_may() {
        let (mut waiting, answers) = queue([Act(1, false, true), act(2), Act(3, false, true)]);
        drop(answers);
        assert_eq!(batches(&mut waiting), [vec![2]]);
    }

    #[test]
    fn while_a_statement_is_under_way_few_are_not_worth_another() {
        let (mut waiting, _answers) = queue([act(1)]);
        assert!(waiting.is_due(), "nobody is waited for");
        waiting.prompt = 1;
        assert!(!waiting.is_due());
        waiting.is_closing = true;
        assert!(waiting.is_due(), "nothing more will come");
        let (mut waiting, _answers) = queue((0..64).map(act));
        waiting.prompt = 1;
        assert!(waiting.is_due());
        let (mut waiting, _answers) = queue([Act(1, true, false)]);
        waiting.prompt = 1;
        assert!(waiting.is_due(), "it gathers with nobody");
    }

    #[test]
    fn more_than_may_wait_are_refused() {
        let (mut waiting, _answers) = queue((0..WAITING).map(|_| act(1)));
        let (reply, _answer) = oneshot::channel();
        let refused = waiting.push(Pending { operation: act(1), reply, runtime: None, since: Instant::now() });
        assert!(matches!(refused, Err(Error::Determinate(_))));
    }
}
