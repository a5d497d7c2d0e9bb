//! The queue of a batcher: when a batch is due, what it carries, and how its callers are answered.

use std::collections::{HashSet, VecDeque};

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::idempotency::record::RecordId;
use crate::store::{Error, ErrorKind};

/// How many operations may be queued. More are refused at once.
const MAX_QUEUED: usize = 8192;

/// How many operations one batch carries.
const MAX_BATCH: usize = 256;

/// From this many queued operations on, a second worker joins in while a batch is in flight.
const SECOND_WORKER_THRESHOLD: usize = 64;

/// An operation that a batcher carries.
pub(in crate::store) trait Operation: Send + Sync + 'static {
    /// The reply to the caller.
    type Reply: Send + 'static;

    /// The record that no other operation of its batch may be about.
    fn id(&self) -> Option<RecordId>;

    /// How many bytes it writes, where they may be many.
    fn size(&self) -> usize;

    /// Whether it is dropped if its caller has gone before it was sent.
    fn is_abandoned_with_caller(&self) -> bool;

    /// Whether it needs a batch of its own.
    fn is_exclusive(&self) -> bool {
        false
    }

    /// The statement that carries it: a batch has operations of one.
    fn statement(&self) -> u8 {
        0
    }
}

/// What a caller gets.
pub(in crate::store) type Answer<O> = Result<<O as Operation>::Reply, Error>;

/// An operation whose caller waits.
pub(super) struct Pending<O: Operation> {
    pub(super) operation: O,
    pub(super) reply: oneshot::Sender<Answer<O>>,
    pub(super) runtime: Option<Handle>,
    pub(super) since: Instant,
}

impl<O: Operation> Pending<O> {
    /// Whether its caller has gone, and it may be dropped for that.
    fn is_abandoned(&self) -> bool {
        self.operation.is_abandoned_with_caller() && self.reply.is_closed()
    }
}

/// Operations in the order of arrival, and the state of the connections.
///
/// An operation that writes more than `max_bytes` is large: no other waits for it. It has a batch of its own, and leaves one
/// connection to the others where there are several.
pub(super) struct Queue<O: Operation> {
    /// How many bytes one batch carries, give or take one operation.
    max_bytes: usize,
    /// Those that are not large.
    waiting: VecDeque<Pending<O>>,
    large: VecDeque<Pending<O>>,
    /// How many connections work.
    pub(super) connected: usize,
    /// How many batches are in flight, not large, and not slow yet.
    in_flight: usize,
    /// How many large operations are in flight.
    large_in_flight: usize,
    /// Why the last try to connect failed, if it did.
    pub(super) failure: Option<Error>,
    pub(super) is_closing: bool,
}

impl<O: Operation> Queue<O> {
    pub(super) fn new(max_bytes: usize, connected: usize) -> Self {
        Self {
            max_bytes,
            waiting: VecDeque::new(),
            large: VecDeque::new(),
            connected,
            in_flight: 0,
            large_in_flight: 0,
            failure: None,
            is_closing: false,
        }
    }

    /// Adds an operation, unless they are refused.
    pub(super) fn push(&mut self, pending: Pending<O>) -> Result<(), Error> {
        if let Some(refusal) = self.refusal() {
            return Err(refusal);
        }
        if self.waiting.len() + self.large.len() >= MAX_QUEUED {
            return Err(Error::determinate(ErrorKind::Unavailable, "too many operations are queued for the store"));
        }
        self.those_like(&pending).push_back(pending);
        Ok(())
    }

    /// Puts operations back, ahead of all others.
    pub(super) fn put_back(&mut self, again: Vec<Pending<O>>) {
        again.into_iter().rev().for_each(|pending| self.those_like(&pending).push_front(pending));
    }

    /// Takes all that waits.
    pub(super) fn take_all(&mut self) -> Vec<Pending<O>> {
        self.waiting.drain(..).chain(self.large.drain(..)).collect()
    }

    fn those_like(&mut self, pending: &Pending<O>) -> &mut VecDeque<Pending<O>> {
        if self.is_large(pending) { &mut self.large } else { &mut self.waiting }
    }

    pub(super) fn is_large(&self, pending: &Pending<O>) -> bool {
        pending.operation.size() > self.max_bytes
    }

    /// Why what waits is refused: no connection works that would carry it out.
    pub(super) fn outage(&self) -> Option<Error> {
        self.refusal().filter(|_| self.connected == 0)
    }

    /// Why operations are refused at this moment, if they are.
    pub(super) fn refusal(&self) -> Option<Error> {
        if self.is_closing {
            return Some(Error::closed());
        }
        self.failure.as_ref().filter(|_| self.connected == 0).map(copy)
    }

    /// How many batches of a kind are in flight.
    pub(super) fn count(&mut self, is_large: bool) -> &mut usize {
        if is_large { &mut self.large_in_flight } else { &mut self.in_flight }
    }

    /// Whether a worker is to take up what waits.
    pub(super) fn is_due(&self) -> bool {
        self.a_batch_is_due() || self.a_large_one_is_due()
    }

    fn a_batch_is_due(&self) -> bool {
        // An exclusive operation needs a batch of its own in any case.
        let is_alone = self.waiting.front().is_some_and(|first| first.operation.is_exclusive());
        let enough = if self.in_flight == 0 || is_alone || self.is_closing { 1 } else { SECOND_WORKER_THRESHOLD };
        self.waiting.len() >= enough
    }

    fn a_large_one_is_due(&self) -> bool {
        !self.large.is_empty() && self.large_in_flight < self.connected.saturating_sub(1).max(1)
    }

    /// Takes the next batch from the queue, in the order of ids and each id once. Where a large operation is due as well, whichever
    /// began to wait first is next.
    pub(super) fn batch(&mut self) -> Vec<Pending<O>> {
        let began = |queue: &VecDeque<Pending<O>>| queue.front().map(|first| first.since);
        let batch_is_first = self.a_batch_is_due() && began(&self.waiting) < began(&self.large);
        if self.a_large_one_is_due() && !batch_is_first {
            let next = std::iter::from_fn(|| self.large.pop_front()).find(|pending| !pending.is_abandoned());
            if next.is_some() {
                return next.into_iter().collect();
            }
        }
        let mut batch: Vec<Pending<O>> = Vec::with_capacity(self.waiting.len().min(MAX_BATCH));
        let (mut bytes, mut others, mut ids) = (0, Vec::new(), HashSet::new());
        while batch.len() < MAX_BATCH && bytes < self.max_bytes {
            let Some(pending) = self.waiting.pop_front() else { break };
            if pending.is_abandoned() {
                continue;
            }
            let first = batch.first().map(|first: &Pending<O>| first.operation.statement());
            if first.is_some_and(|statement| statement != pending.operation.statement()) {
                others.push(pending);
                continue;
            }
            let is_alone = pending.operation.is_exclusive();
            if is_alone && !batch.is_empty() {
                self.waiting.push_front(pending);
                break;
            }
            // It keeps its place behind the others that are left: no id that is asked for again and again comes before them.
            if pending.operation.id().is_some_and(|id| !ids.insert(id)) {
                others.push(pending);
                continue;
            }
            bytes += pending.operation.size();
            batch.push(pending);
            if is_alone {
                break;
            }
        }
        self.put_back(others);
        batch.sort_by_key(|pending| pending.operation.id());
        batch
    }
}

pub(super) fn fail<O: Operation>(operations: impl IntoIterator<Item = Pending<O>>, error: &Error) {
    answer(operations.into_iter().map(|pending| (pending, Err(copy(error)))).collect());
}

pub(super) fn answer<O: Operation>(answered: Vec<(Pending<O>, Answer<O>)>) {
    finish_on_caller_runtimes(
        answered,
        |(pending, _)| pending.runtime.as_ref(),
        |(pending, answer)| {
            // The caller may have gone.
            let _ = pending.reply.send(answer);
        },
    );
}

fn copy(error: &Error) -> Error {
    let (kind, message) = (error.cause().kind, error.cause().source.to_string());
    match error {
        Error::Determinate(_) => Error::determinate(kind, message),
        Error::Indeterminate(_) => Error::indeterminate(kind, message),
    }
}

/// Finishes jobs whose callers wait on several runtimes. To wake another thread is a system call: each runtime is woken
/// once, and wakes its callers itself.
pub(in crate::store) fn finish_on_caller_runtimes<J: Send + 'static>(
    jobs: Vec<J>,
    runtime: impl Fn(&J) -> Option<&Handle>,
    finish: fn(J),
) {
    let here = Handle::try_current().ok().map(|handle| handle.id());
    let mut groups: Vec<(Handle, Vec<J>)> = Vec::new();
    for job in jobs {
        let Some(waits) = runtime(&job).filter(|handle| Some(handle.id()) != here) else {
            finish(job);
            continue;
        };
        match groups.iter_mut().find(|(known, _)| known.id() == waits.id()) {
            Some((_, group)) => group.push(job),
            None => groups.push((waits.clone(), vec![job])),
        }
    }
    for (handle, mut group) in groups {
        if group.len() > 1 {
            handle.spawn(async move { group.into_iter().for_each(finish) });
        } else if let Some(job) = group.pop() {
            finish(job);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread::{self, ThreadId};
    use std::time::Duration;

    use super::*;

    const MAX_BATCH_BYTES: usize = 4;

    /// An operation on a record: whether it is exclusive, and whether it is abandoned with its caller. From [`LARGE`] on, it is
    /// large.
    struct Act(Option<u8>, bool, bool);

    const LARGE: u8 = 100;

    type Receiver = oneshot::Receiver<Result<(), Error>>;

    impl Operation for Act {
        type Reply = ();

        fn id(&self) -> Option<RecordId> {
            self.0.map(|id| RecordId([id; 32]))
        }

        fn size(&self) -> usize {
            if self.0 >= Some(LARGE) { MAX_BATCH_BYTES + 1 } else { MAX_BATCH_BYTES / 4 }
        }

        fn is_abandoned_with_caller(&self) -> bool {
            self.2
        }

        fn is_exclusive(&self) -> bool {
            self.1
        }
    }

    fn pending(operation: Act) -> (Pending<Act>, Receiver) {
        let (reply, answer) = oneshot::channel();
        (Pending { operation, reply, runtime: None, since: Instant::now() }, answer)
    }

    fn queue(acts: impl IntoIterator<Item = Act>) -> (Queue<Act>, Vec<Receiver>) {
        let mut queue = Queue::new(MAX_BATCH_BYTES, 1);
        let add = |act| {
            let (pending, answer) = pending(act);
            queue.push(pending).unwrap();
            answer
        };
        let answers = acts.into_iter().map(add).collect();
        (queue, answers)
    }

    fn batches(queue: &mut Queue<Act>) -> Vec<Vec<u8>> {
        let batches = std::iter::from_fn(|| Some(queue.batch()).filter(|batch| !batch.is_empty()));
        batches.map(|batch| batch.iter().map(|pending| pending.operation.0.unwrap_or_default()).collect()).collect()
    }

    fn act(id: u8) -> Act {
        Act(Some(id), false, false)
    }

    #[test]
    fn a_batch_is_in_order_has_each_id_once_and_ends_where_it_is_large() {
        let (mut waiting, _answers) = queue([3, 1, 3, 2, 5, 4].map(act));
        assert_eq!(batches(&mut waiting), [vec![1, 2, 3, 5], vec![3, 4]]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_operation_waits_its_turn_and_no_other_waits_for_it() {
        let (mut waiting, mut answers) = queue([]);
        for id in [1, LARGE, 2, LARGE + 1, 3] {
            let (pending, answer) = pending(act(id));
            waiting.push(pending).unwrap();
            answers.push(answer);
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(batches(&mut waiting), [vec![1, 2, 3], vec![LARGE], vec![LARGE + 1]]);
        for (connected, in_flight, is_due) in [(1, 0, true), (1, 1, false), (2, 1, false), (3, 1, true), (3, 2, false)]
        {
            let (mut waiting, _answers) = queue([LARGE, 1].map(act));
            (waiting.connected, waiting.large_in_flight) = (connected, in_flight);
            let expected = if is_due { vec![vec![LARGE], vec![1]] } else { vec![vec![1]] };
            assert_eq!(batches(&mut waiting), expected, "{connected} {in_flight}");
        }
        // A batch in flight is no reason for it to wait.
        let (mut waiting, _answers) = queue([1, LARGE].map(act));
        (waiting.connected, waiting.in_flight) = (2, 1);
        assert!(waiting.is_due());
        assert_eq!(waiting.batch()[0].operation.0, Some(LARGE));
        // Many of them make nothing else due.
        let (mut waiting, _answers) = queue(std::iter::repeat_n(LARGE, SECOND_WORKER_THRESHOLD).chain([1]).map(act));
        (waiting.connected, waiting.in_flight, waiting.large_in_flight) = (2, 1, 1);
        assert!(!waiting.is_due());
    }

    #[test]
    fn operations_on_no_record_share_a_batch() {
        let on_none = || Act(None, false, false);
        let (mut waiting, _answers) = queue([act(2), on_none(), act(1), on_none()]);
        assert_eq!(batches(&mut waiting), [vec![0, 0, 1, 2]]);
    }

    #[test]
    fn exclusive_operations_run_in_order() {
        let (mut waiting, _answers) = queue([act(2), Act(Some(1), true, false), act(3)]);
        assert_eq!(batches(&mut waiting), [vec![2], vec![1], vec![3]]);
    }

    #[test]
    fn abandoned_operations_are_dropped_where_that_is_safe() {
        let (mut waiting, answers) = queue([Act(Some(1), false, true), act(2), Act(Some(3), false, true)]);
        drop(answers);
        assert_eq!(batches(&mut waiting), [vec![2]]);
    }

    #[test]
    fn operations_put_back_come_before_all_others() {
        let (mut waiting, _answers) = queue([3, 2, 1].map(act));
        waiting.max_bytes = 2;
        let again = waiting.batch();
        waiting.put_back(again);
        let order: Vec<_> = waiting.waiting.iter().filter_map(|pending| pending.operation.0).collect();
        assert_eq!(order, [2, 3, 1]);
    }

    #[test]
    fn few_operations_do_not_start_a_second_batch() {
        let (mut waiting, _answers) = queue([act(1)]);
        assert!(waiting.is_due(), "an idle worker takes it at once");
        waiting.in_flight = 1;
        assert!(!waiting.is_due());
        waiting.is_closing = true;
        assert!(waiting.is_due(), "nothing more will come");
        let (mut waiting, _answers) = queue([Act(Some(1), true, false)]);
        waiting.in_flight = 1;
        assert!(waiting.is_due(), "an exclusive operation is due at once");
        let (mut waiting, mut answers) = queue([]);
        for number in 1..=SECOND_WORKER_THRESHOLD {
            let (pending, answer) = pending(act(number as u8));
            waiting.push(pending).unwrap();
            answers.push(answer);
            waiting.in_flight = 0;
            assert!(waiting.is_due());
            waiting.in_flight = 1;
            assert_eq!(waiting.is_due(), number == SECOND_WORKER_THRESHOLD);
        }
        waiting.max_bytes = usize::MAX;
        assert_eq!(waiting.batch().len(), SECOND_WORKER_THRESHOLD);
        assert!(!waiting.is_due());
    }

    #[test]
    fn operations_beyond_the_queue_limit_are_refused() {
        let (mut waiting, _answers) = queue((0..MAX_QUEUED).map(|_| act(1)));
        assert!(matches!(waiting.push(pending(act(1)).0), Err(Error::Determinate(_))));
    }

    #[test]
    fn callers_on_another_runtime_are_woken_by_one_task() {
        let other = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let here = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let finished_on = |runtimes: Vec<Option<Handle>>| {
            let (finished, threads) = std::sync::mpsc::channel::<ThreadId>();
            let jobs = runtimes.into_iter().map(|runtime| (runtime, finished.clone())).collect();
            let finish =
                |(_, finished): (_, std::sync::mpsc::Sender<_>)| finished.send(thread::current().id()).unwrap();
            here.block_on(async { finish_on_caller_runtimes(jobs, |(runtime, _)| runtime.as_ref(), finish) });
            drop(finished);
            threads.iter().map(|finished| finished == thread::current().id()).collect::<Vec<_>>()
        };
        let (theirs, ours) = (|| Some(other.handle().clone()), || Some(here.handle().clone()));
        assert_eq!(finished_on(vec![theirs()]), [true], "a single one is woken from here");
        assert_eq!(finished_on(vec![theirs(), ours(), theirs(), None]), [true, true, false, false]);
    }
}
