//! A batcher over a backend that does what the test says. Time is paused, and passes only while all wait.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::*;
use crate::idempotency::record::RecordId;

/// How long a batch takes that fails.
const FAILS_IN: Duration = Duration::from_millis(2);

/// What the backend does with a batch.
enum Step {
    Takes(Duration),
    QueuesAgain,
    Fails(Failure),
    Panics,
}

#[derive(Default)]
struct Fake {
    /// What is done with the next batches. Those after them are executed at once.
    steps: Mutex<VecDeque<Step>>,
    /// The operation that fails every batch it is in.
    poison: Option<u8>,
    /// How long it takes to connect; `None` while it fails.
    connects_in: Mutex<Option<Duration>>,
    /// When it was tried to connect.
    tries: Mutex<Vec<Instant>>,
    given_up: AtomicUsize,
    /// The connections end.
    ending: Notify,
    batches: Mutex<Vec<Vec<u8>>>,
}

struct Act(u8);

const LARGE: u8 = 199;

impl Operation for Act {
    type Reply = u8;

    fn id(&self) -> Option<RecordId> {
        Some(RecordId([self.0; 32]))
    }

    fn size(&self) -> usize {
        if self.0 == LARGE { 2 } else { 0 }
    }

    fn is_abandoned_with_caller(&self) -> bool {
        false
    }

    fn statement(&self) -> u8 {
        self.0 / 200
    }
}

impl Backend for Arc<Fake> {
    type Operation = Act;
    type Connection = Self;
    const WHAT: &'static str = "acts";
    const MAX_BATCH_BYTES: usize = 1;

    async fn connect(&self) -> Result<Self, Error> {
        self.tries.lock().unwrap().push(Instant::now());
        let connects_in = *self.connects_in.lock().unwrap();
        sleep(connects_in.unwrap_or_default()).await;
        connects_in.map(|_| Self::clone(self)).ok_or_else(|| Error::determinate(ErrorKind::Unavailable, "away"))
    }

    async fn ended(connection: &Self) {
        connection.ending.notified().await;
    }

    fn give_up(connection: Self) {
        connection.given_up.fetch_add(1, Ordering::Relaxed);
    }

    async fn execute(&self, _: &Self, batch: &[&Act]) -> Result<Replies<Act>, Failure> {
        let ids: Vec<u8> = batch.iter().map(|act| act.0).collect();
        let step = self.steps.lock().unwrap().pop_front();
        self.batches.lock().unwrap().push(ids.clone());
        match step {
            Some(Step::Takes(time)) => sleep(time).await,
            Some(Step::QueuesAgain) => return Ok(ids.iter().map(|_| None).collect()),
            Some(Step::Fails(failure)) => {
                sleep(FAILS_IN).await;
                return Err(failure);
            }
            Some(Step::Panics) => panic!("injected panic"),
            None => {}
        }
        match self.poison {
            Some(poison) if ids.contains(&poison) => Err(Failure::OfOne(denied())),
            _ => Ok(ids.into_iter().map(|id| Some(Ok(id))).collect()),
        }
    }
}

impl Fake {
    fn of(steps: impl IntoIterator<Item = Step>) -> Arc<Self> {
        let connects_in = Mutex::new(Some(Duration::ZERO));
        Arc::new(Self { steps: Mutex::new(steps.into_iter().collect()), connects_in, ..Self::default() })
    }

    fn set_connects_in(&self, time: Option<Duration>) {
        *self.connects_in.lock().unwrap() = time;
    }

    fn batches(&self) -> Vec<Vec<u8>> {
        self.batches.lock().unwrap().clone()
    }
}

fn open(fake: &Arc<Fake>, connections: usize) -> Arc<Batcher<Arc<Fake>>> {
    Arc::new(Batcher::open(Arc::clone(fake), Some(Arc::clone(fake)), connections))
}

/// Submits operations, and lets the workers run.
async fn submit(
    batcher: &Arc<Batcher<Arc<Fake>>>,
    ids: impl IntoIterator<Item = u8>,
) -> Vec<JoinHandle<(Result<u8, Error>, Instant)>> {
    let submit = |id| {
        let batcher = Arc::clone(batcher);
        tokio::spawn(async move { (batcher.submit(Act(id)).await, Instant::now()) })
    };
    let submitted = ids.into_iter().map(submit).collect();
    sleep(millis(1)).await;
    submitted
}

async fn results(submitted: Vec<JoinHandle<(Result<u8, Error>, Instant)>>) -> Vec<Result<u8, Error>> {
    join_all(submitted).await.into_iter().map(|answered| answered.unwrap().0).collect()
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn denied() -> Error {
    Error::determinate(ErrorKind::Other, "denied")
}

fn late() -> Error {
    Error::indeterminate(ErrorKind::Timeout, "late")
}

fn is_determinate(result: &Result<u8, Error>, kind: ErrorKind) -> bool {
    matches!(result, Err(Error::Determinate(cause)) if cause.kind == kind)
}

fn is_indeterminate(result: &Result<u8, Error>) -> bool {
    matches!(result, Err(Error::Indeterminate(_)))
}

#[tokio::test(start_paused = true)]
async fn a_lone_caller_is_served_at_once() {
    let fake = Fake::of([]);
    let (batcher, began) = (open(&fake, 2), Instant::now());
    assert_eq!(batcher.submit(Act(1)).await.unwrap(), 1);
    assert_eq!(began.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn what_queues_during_a_batch_is_carried_by_the_next() {
    let fake = Fake::of([Step::Takes(millis(5))]);
    let batcher = open(&fake, 2);
    let first = submit(&batcher, [5]).await;
    let rest = submit(&batcher, [3, 1, 3, 2]).await;
    let answers: Vec<_> = results(rest).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(answers, [3, 1, 3, 2], "each has its own reply");
    assert!(results(first).await[0].is_ok());
    assert_eq!(fake.batches(), [vec![5], vec![1, 2, 3], vec![3]]);
}

#[tokio::test(start_paused = true)]
async fn a_batch_has_operations_of_one_statement() {
    let fake = Fake::of([Step::Takes(millis(5))]);
    let batcher = open(&fake, 2);
    let first = submit(&batcher, [5]).await;
    let rest = submit(&batcher, [203, 1, 201, 2, 202]).await;
    let answers: Vec<_> = results(rest).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(answers, [203, 1, 201, 2, 202]);
    assert!(results(first).await[0].is_ok());
    assert_eq!(fake.batches(), [vec![5], vec![201, 202, 203], vec![1, 2]], "that of the first comes first");
}

#[tokio::test(start_paused = true)]
async fn an_id_that_is_asked_for_again_and_again_holds_up_no_other() {
    let fake = Fake::of([Step::Takes(millis(5))]);
    let batcher = open(&fake, 2);
    let first = submit(&batcher, [5]).await;
    let rest = submit(&batcher, [201, 1, 201, 201, 2]).await;
    assert_eq!(results(rest).await.len(), 5);
    assert!(results(first).await[0].is_ok());
    assert_eq!(fake.batches(), [vec![5], vec![201], vec![1, 2], vec![201], vec![201]]);
}

#[tokio::test(start_paused = true)]
async fn a_second_worker_joins_in_if_many_are_queued() {
    for (queued, joins) in [(63, false), (64, true)] {
        let fake = Fake::of([Step::Takes(millis(5))]);
        let (batcher, began) = (open(&fake, 2), Instant::now());
        let first = submit(&batcher, [100]).await;
        for answered in join_all(submit(&batcher, 0..queued).await).await {
            assert_eq!(answered.unwrap().1 - began < millis(5), joins, "{queued}");
        }
        drop(first);
    }
}

#[tokio::test(start_paused = true)]
async fn a_second_worker_does_not_wait_for_a_slow_batch() {
    let fake = Fake::of([Step::Takes(millis(1000))]);
    let (batcher, began) = (open(&fake, 2), Instant::now());
    let slow = submit(&batcher, [1]).await;
    batcher.submit(Act(2)).await.unwrap();
    assert!((SLOW_AFTER..2 * SLOW_AFTER).contains(&began.elapsed()), "{:?}", began.elapsed());
    batcher.submit(Act(3)).await.unwrap();
    assert!(began.elapsed() < 2 * SLOW_AFTER, "it takes all that come");
    assert!(results(slow).await[0].is_ok());
}

#[tokio::test(start_paused = true)]
async fn no_other_waits_for_a_large_operation() {
    let fake = Fake::of([Step::Takes(millis(1000)), Step::Takes(millis(3)), Step::Takes(millis(1000))]);
    let batcher = open(&fake, 2);
    let large = submit(&batcher, [LARGE, LARGE]).await;
    let began = Instant::now();
    batcher.submit(Act(1)).await.unwrap();
    assert_eq!(began.elapsed(), millis(3));
    // The second one waits for the first: large operations leave the other connection free, even while nothing else is queued.
    let ends: Vec<_> = join_all(large).await.into_iter().map(|answered| answered.unwrap().1).collect();
    assert_eq!(ends[1] - ends[0], millis(1000));
    assert_eq!(fake.batches(), [vec![LARGE], vec![1], vec![LARGE]]);
}

#[tokio::test(start_paused = true)]
async fn operations_are_refused_while_no_connection_works() {
    let fake = Fake::of([]);
    fake.set_connects_in(None);
    let (batcher, began) = (Batcher::open(Arc::clone(&fake), None, 1), Instant::now());
    assert!(is_determinate(&batcher.submit(Act(1)).await, ErrorKind::Unavailable), "queued before it was known");
    assert!(batcher.refusal().is_some() && is_determinate(&batcher.submit(Act(1)).await, ErrorKind::Unavailable));
    assert_eq!(began.elapsed(), Duration::ZERO);
    sleep(millis(3000)).await;
    let tries: Vec<_> = fake.tries.lock().unwrap().iter().map(|at| (*at - began).as_millis()).collect();
    assert_eq!(tries, [0, 50, 150, 350, 750, 1550, 2550]);
    fake.set_connects_in(Some(Duration::ZERO));
    sleep(MAX_BACKOFF).await;
    assert!(batcher.refusal().is_none());
    fake.set_connects_in(Some(millis(100)));
    fake.ending.notify_waiters();
    assert_eq!(batcher.submit(Act(1)).await.unwrap(), 1, "the former failure is forgotten");
}

#[tokio::test(start_paused = true)]
async fn operations_go_on_while_one_connection_works() {
    let fake = Fake::of([]);
    fake.set_connects_in(None);
    let batcher = open(&fake, 2);
    sleep(millis(100)).await;
    assert!(batcher.refusal().is_none());
    assert_eq!(batcher.submit(Act(1)).await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_ends_is_replaced() {
    let fake = Fake::of([]);
    let batcher = open(&fake, 1);
    sleep(millis(1)).await;
    fake.ending.notify_waiters();
    assert_eq!(batcher.submit(Act(1)).await.unwrap(), 1);
    assert_eq!((fake.given_up.load(Ordering::Relaxed), fake.tries.lock().unwrap().len()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn another_worker_takes_what_queued_for_a_lost_connection() {
    let fake = Fake::of([Step::Fails(Failure::Lost(late()))]);
    let (batcher, began) = (open(&fake, 2), Instant::now());
    sleep(millis(1)).await;
    fake.set_connects_in(Some(millis(100)));
    let lost = submit(&batcher, [1]).await;
    assert_eq!(batcher.submit(Act(2)).await.unwrap(), 2);
    assert!(began.elapsed() < millis(100) && is_indeterminate(&results(lost).await[0]));
}

#[tokio::test(start_paused = true)]
async fn callers_wait_for_the_connection_after_a_lost_one_but_not_after_one_that_hung() {
    for (failure, is_refused) in [(Failure::Lost(late()), false), (Failure::Hung(late()), true)] {
        let fake = Fake::of([Step::Fails(failure)]);
        let batcher = open(&fake, 1);
        fake.set_connects_in(Some(millis(100)));
        assert!(is_indeterminate(&batcher.submit(Act(1)).await));
        sleep(millis(1)).await;
        let next = batcher.submit(Act(2)).await;
        if is_refused {
            assert!(is_determinate(&next, ErrorKind::Timeout), "{next:?}");
        } else {
            assert_eq!(next.unwrap(), 2);
        }
        sleep(millis(100)).await;
        assert_eq!(batcher.submit(Act(3)).await.unwrap(), 3);
        assert_eq!(fake.given_up.load(Ordering::Relaxed), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_that_conflicts_is_retried_a_few_times() {
    let conflict = || Step::Fails(Failure::Conflict(denied()));
    let fake = Fake::of((0..MAX_RETRIES).map(|_| conflict()));
    assert_eq!(open(&fake, 1).submit(Act(1)).await.unwrap(), 1);
    let fake = Fake::of((0..=MAX_RETRIES).map(|_| conflict()));
    assert!(is_determinate(&open(&fake, 1).submit(Act(1)).await, ErrorKind::Other));
    assert_eq!(fake.batches(), vec![vec![1]; 1 + MAX_RETRIES]);
}

#[tokio::test(start_paused = true)]
async fn operations_without_a_reply_are_queued_again() {
    let fake = Fake::of([Step::QueuesAgain]);
    let batcher = open(&fake, 2);
    assert!(results(submit(&batcher, [2, 1]).await).await.iter().all(Result::is_ok));
    assert_eq!(fake.batches(), [vec![1, 2], vec![1, 2]]);
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_fails_its_batch_is_found() {
    let fake = Arc::new(Fake { poison: Some(3), ..Fake::default() });
    let answers = results(submit(&open(&fake, 1), 1..=5).await).await;
    let failed: Vec<_> = answers.iter().map(|answer| is_determinate(answer, ErrorKind::Other)).collect();
    assert_eq!(failed, [false, false, true, false, false]);
    assert_eq!(fake.batches(), [vec![1, 2, 3, 4, 5], vec![1, 2], vec![3, 4, 5], vec![3], vec![4, 5]]);
}

#[tokio::test(start_paused = true)]
async fn a_failure_of_all_is_that_of_each() {
    let fake = Fake::of([Step::Fails(Failure::OfAll(late()))]);
    assert!(results(submit(&open(&fake, 1), 1..=3).await).await.iter().all(is_indeterminate));
    assert_eq!(fake.batches().len(), 1);
    assert_eq!(fake.given_up.load(Ordering::Relaxed), 0, "the connection goes on");
}

#[tokio::test(start_paused = true)]
async fn what_was_not_sent_before_the_connection_was_lost_has_certainly_not_happened() {
    let fake = Fake::of([Step::Fails(Failure::OfOne(denied())), Step::Fails(Failure::Lost(late()))]);
    let answers = results(submit(&open(&fake, 1), 1..=4).await).await;
    assert!(answers[..2].iter().all(is_indeterminate), "{answers:?}");
    assert!(answers[2..].iter().all(|answer| is_determinate(answer, ErrorKind::Unavailable)), "{answers:?}");
    assert_eq!(fake.batches(), [vec![1, 2, 3, 4], vec![1, 2]]);
}

#[tokio::test(start_paused = true)]
async fn an_operation_that_was_queued_for_too_long_is_refused() {
    let fake = Fake::of([Step::Takes(QUEUE_TIMEOUT + millis(2))]);
    let batcher = open(&fake, 1);
    let first = submit(&batcher, [1]).await;
    let stale = submit(&batcher, [2]).await;
    sleep(QUEUE_TIMEOUT / 2).await;
    let later = submit(&batcher, [4]).await;
    assert!(is_determinate(&results(stale).await[0], ErrorKind::Timeout));
    assert!(results(first).await[0].is_ok() && results(later).await[0].is_ok());
    assert_eq!(fake.batches(), [[1], [4]], "it was never sent");
}

#[tokio::test(start_paused = true)]
async fn the_callers_of_a_worker_that_panics_are_in_doubt_and_it_starts_again() {
    let fake = Fake::of([Step::Panics, Step::Takes(millis(5))]);
    let batcher = open(&fake, 1);
    assert!(results(submit(&batcher, 1..=2).await).await.iter().all(is_indeterminate));
    // No batch counts as in flight any more: the next is taken at once.
    assert_eq!(batcher.submit(Act(3)).await.unwrap(), 3);
    assert_eq!(fake.tries.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn closing_executes_what_is_queued_and_refuses_the_rest() {
    let fake = Fake::of([Step::Takes(millis(5))]);
    let batcher = open(&fake, 1);
    let mut queued = submit(&batcher, [1]).await;
    queued.extend(submit(&batcher, [2, 3]).await);
    batcher.close().await;
    assert!(results(queued).await.iter().all(Result::is_ok));
    assert!(is_determinate(&batcher.submit(Act(4)).await, ErrorKind::Unavailable));
    assert_eq!(fake.batches(), [vec![1], vec![2, 3]]);
}
