//! Who waits for whom where some requests write much.

use std::sync::mpsc::{self, Receiver, Sender};

use super::*;
use crate::store::sqlite::error::Failure;
use crate::store::sqlite::session::Session;

/// A request that says it writes `size` bytes, tells when it runs, and may go on only when told.
struct Step {
    name: &'static str,
    size: usize,
    began: Sender<&'static str>,
    may_end: Option<Mutex<Receiver<()>>>,
}

impl Request for Step {
    type Reply = ();

    fn size(&self) -> usize {
        self.size
    }

    fn run(&self, _: &mut Session) -> Result<(), Failure> {
        self.began.send(self.name).unwrap();
        if let Some(may_end) = &self.may_end {
            may_end.lock().unwrap().recv().unwrap();
        }
        Ok(())
    }
}

#[tokio::test]
async fn what_writes_little_waits_for_one_large_request_at_most() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir.path().join("a.db"));
    let (began, order) = mpsc::channel();
    let mut replies = Vec::new();
    let mut queue = |name, size, may_end| {
        let began = began.clone();
        let (message, reply) = writer::job(Step { name, size, began, may_end });
        store.writer.try_send(message).unwrap();
        replies.push(reply);
    };
    let held = || {
        let (go_on, may_end) = mpsc::channel();
        (go_on, Some(Mutex::new(may_end)))
    };

    let (end_first, may_end) = held();
    queue("first", 0, may_end);
    assert_eq!(order.recv(), Ok("first"));
    let (end_large, may_end) = held();
    queue("large", 9 << 20, may_end);
    queue("large too", 9 << 20, None);
    queue("medium", 1 << 20, None);
    queue("small", 100, None);
    end_first.send(()).unwrap();
    assert_eq!([order.recv(), order.recv()], [Ok("small"), Ok("large")]);
    queue("later", 100, None);
    end_large.send(()).unwrap();
    assert_eq!([order.recv(), order.recv(), order.recv()], [Ok("later"), Ok("large too"), Ok("medium")]);

    // A store that closes ends them all.
    let (end_last, may_end) = held();
    queue("last", 9 << 20, may_end);
    assert_eq!(order.recv(), Ok("last"));
    queue("queued", 9 << 20, None);
    queue("queued too", 9 << 20, None);
    store.writer.try_send(Message::Close).unwrap();
    end_last.send(()).unwrap();
    store.close().await;
    for reply in replies {
        reply.await.unwrap().unwrap();
    }
}
