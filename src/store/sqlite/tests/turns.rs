//! Who waits for whom where some requests write much.

use std::sync::mpsc::{self, Receiver, Sender};

use super::*;
use crate::store::sqlite::error::Failure;
use crate::store::sqlite::session::Session;

const LARGE: usize = 9 << 20;

/// A request that says it writes `size` bytes, tells when it runs, and may go on only when told.
struct Step {
    name: &'static str,
    size: usize,
    began: Sender<&'static str>,
    may_end: Option<Mutex<Receiver<()>>>,
}

impl Request for Step {
    type Reply = ();
    const ABANDONED_WITH_CALLER: bool = true;

    fn size(&self) -> usize {
        self.size
    }

    fn run(&self, _: &mut Session) -> Result<(), Failure> {
        self.began.send(self.name).unwrap();
        if let Some(may_end) = &self.may_end {
            may_end.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
        }
        Ok(())
    }
}

/// A store, and the order in which its requests run.
struct Steps {
    store: Sqlite,
    began: Sender<&'static str>,
    order: Receiver<&'static str>,
    _dir: tempfile::TempDir,
}

impl Steps {
    fn new(queue: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings { queue, ..Settings::new(dir.path().join("a.db")) };
        let (began, order) = mpsc::channel();
        Self { store: Sqlite::open(acquire(&settings)).unwrap(), began, order, _dir: dir }
    }

    fn queue(&self, name: &'static str, size: usize) -> writer::Reply<()> {
        self.push(name, size, None)
    }

    /// One that runs, and ends when the sender says so.
    fn begin(&self, name: &'static str, size: usize) -> (Sender<()>, writer::Reply<()>) {
        let held = self.queue_held(name, size);
        assert_eq!(self.next(), [name]);
        held
    }

    /// Queues one that ends when the sender says so.
    fn queue_held(&self, name: &'static str, size: usize) -> (Sender<()>, writer::Reply<()>) {
        let (end, may_end) = mpsc::channel();
        (end, self.push(name, size, Some(Mutex::new(may_end))))
    }

    fn push(&self, name: &'static str, size: usize, may_end: Option<Mutex<Receiver<()>>>) -> writer::Reply<()> {
        let (message, reply) = writer::job(Step { name, size, began: self.began.clone(), may_end });
        self.store.writer.try_send(message).unwrap();
        reply
    }

    /// The next ones that run.
    fn next<const N: usize>(&self) -> [&'static str; N] {
        std::array::from_fn(|_| self.order.recv_timeout(Duration::from_secs(60)).unwrap())
    }
}

#[tokio::test]
async fn what_writes_little_waits_for_one_large_request_at_most() {
    let steps = Steps::new(100);
    let (end_first, first) = steps.begin("first", 0);
    let (end_large, large) = steps.queue_held("large", LARGE);
    let rest = [("large too", LARGE), ("medium", 1 << 20), ("small", 100)].map(|(name, size)| steps.queue(name, size));
    end_first.send(()).unwrap();
    assert_eq!(steps.next(), ["small", "large"]);
    let later = steps.queue("later", 100);
    // It took some time, and somebody waited: then the next large one waits for a part of that.
    let took = Duration::from_millis(100);
    std::thread::sleep(took);
    let ended = Instant::now();
    end_large.send(()).unwrap();
    assert_eq!(steps.next(), ["later", "large too"]);
    assert!(ended.elapsed() >= took / 2, "{:?}", ended.elapsed());
    assert_eq!(steps.next(), ["medium"]);
    for reply in [first, large, later].into_iter().chain(rest) {
        reply.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_store_that_closes_ends_large_requests_and_refuses_the_rest() {
    let steps = Steps::new(100);
    let (end, first) = steps.begin("first", LARGE);
    let queued = [steps.queue("second", LARGE), steps.queue("third", LARGE)];
    steps.store.writer.try_send(Message::Close).unwrap();
    end.send(()).unwrap();
    steps.store.close().await;
    for reply in [first].into_iter().chain(queued) {
        reply.await.unwrap().unwrap();
    }
    assert!(steps.store.writer.is_closed());
}

#[tokio::test]
async fn large_requests_that_wait_are_bounded_and_dropped_with_their_callers() {
    let steps = Steps::new(2);
    let (end_first, first) = steps.begin("first", 0);
    let (end_large, large) = steps.queue_held("large", LARGE);
    let abandoned = steps.queue("abandoned", LARGE);
    end_first.send(()).unwrap();
    assert_eq!(steps.next(), ["large"]);
    // One waits already, and there is room for another.
    let (second, third) = (steps.queue("second", LARGE), steps.queue("third", LARGE));
    drop(abandoned);
    end_large.send(()).unwrap();
    assert_eq!(steps.next(), ["second"]);
    let refused = third.await.unwrap();
    assert!(matches!(&refused, Err(Error::Determinate(cause)) if cause.kind == ErrorKind::Unavailable), "{refused:?}");
    for reply in [first, large, second] {
        reply.await.unwrap().unwrap();
    }
    assert!(steps.order.try_recv().is_err(), "nothing else ran");
}
