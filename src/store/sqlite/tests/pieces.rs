//! Answers that are written in pieces.

use super::*;
use crate::store::lifecycle::is_past;
use crate::store::resealing::Values;

fn large(length: usize) -> Bytes {
    (0..length).map(|place| (place % 251) as u8).collect()
}

/// A store, and another program's connection to its file.
struct Case {
    store: Arc<Sqlite>,
    other: Connection,
    dir: tempfile::TempDir,
}

impl Case {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        Self { store: Arc::new(open(&path)), other: Connection::open(path).unwrap(), dir }
    }

    fn pieces(&self) -> i64 {
        self.other.query_row("SELECT count(*) FROM piece", [], |row| row.get(0)).unwrap()
    }

    async fn claim(&self, number: u16) {
        assert!(matches!(self.store.claim(id(number), fresh(number)).await.unwrap(), Claim::Inserted(_)));
    }

    async fn complete(&self, number: u16, answer: &Bytes) {
        let settled = self.store.settle(id(number), attempt(number), complete(answer.clone())).await.unwrap();
        assert!(matches!(settled, Settled::Done { .. }), "{settled:?}");
    }

    async fn answer(&self, number: u16) -> Option<Bytes> {
        self.store.get(id(number)).await.unwrap().unwrap().record.answer
    }

    /// Writes some pieces of an answer, whose attempt then ends otherwise or not at all.
    async fn begin(&self, number: u16) {
        self.claim(number).await;
        let settling = {
            let store = Arc::clone(&self.store);
            tokio::spawn(
                async move { store.settle(id(number), attempt(number), complete(vec![0; 64 << 20].into())).await },
            )
        };
        while self.pieces() < 3 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        settling.abort();
        assert!(settling.await.unwrap_err().is_cancelled());
        // What it asked for last has been carried out.
        self.store.ping().await.unwrap();
    }
}

#[tokio::test]
async fn a_large_answer_survives_a_restart() {
    let case = Case::new();
    let answer = large((3 << 20) + 17);
    case.claim(1).await;
    case.complete(1, &answer).await;
    assert_eq!(case.pieces(), 49);
    let Case { store, dir, other } = case;
    drop(other);
    store.close().await;
    let store = open(&dir.path().join("a.db"));
    let Claim::Exists { record, .. } = store.claim(id(1), fresh(2)).await.unwrap() else { panic!("it is there") };
    assert_eq!(record.answer, Some(answer));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_writes_little_waits_for_no_large_answer() {
    let case = Case::new();
    case.claim(1).await;
    let settling = {
        let store = Arc::clone(&case.store);
        tokio::spawn(async move { store.settle(id(1), attempt(1), complete(large(32 << 20))).await })
    };
    let mut claims = 0;
    while !settling.is_finished() {
        claims += 1;
        case.claim(claims + 1).await;
    }
    assert!(matches!(settling.await.unwrap().unwrap(), Settled::Done { .. }));
    // There are 256 pieces, of which a transaction takes two.
    assert!(claims > 32, "only {claims} claims came between them");
}

#[tokio::test]
async fn pieces_go_with_their_attempt() {
    let case = Case::new();
    let answer = large(2 << 20);
    // Released, removed, claimed by another one, and sealed again.
    for number in 1..=4 {
        case.claim(number).await;
    }
    for number in 2..=4 {
        case.complete(number, &answer).await;
        assert_eq!(case.answer(number).await.as_ref(), Some(&answer));
    }
    assert!(case.store.remove(id(2), attempt(2)).await.unwrap());
    assert_eq!(case.pieces(), 64);
    let seen = case.store.get(id(3)).await.unwrap().unwrap().record.version();
    assert!(case.store.supersede(id(3), seen, fresh(5)).await.unwrap());
    assert_eq!(case.pieces(), 32);
    let seen = case.store.get(id(4)).await.unwrap().unwrap().record.version();
    let values = Values { head: Bytes::from_static(b"other"), answer: Some(large(3 << 20)) };
    assert!(case.store.reseal(id(4), seen, values).await.unwrap());
    assert_eq!((case.pieces(), case.answer(4).await), (0, Some(large(3 << 20))));
    case.begin(6).await;
    case.store.settle(id(6), attempt(6), Settlement::Release).await.unwrap();
    assert_eq!(case.pieces(), 0);
}

#[tokio::test]
async fn pieces_expire_with_their_record() {
    let case = Case::new();
    let soon = |answer| Settlement::Complete { answer, expiry: Expiry::FromNow(Duration::from_millis(1)) };
    case.claim(1).await;
    case.store.settle(id(1), attempt(1), soon(large(2 << 20))).await.unwrap();
    case.claim(2).await;
    case.complete(2, &large(2 << 20)).await;
    let listed = case.store.get(id(1)).await.unwrap().unwrap();
    while !is_past(listed.record.until, case.store.get(id(2)).await.unwrap().unwrap().now) {}
    assert_eq!(case.store.sweep(10).await.unwrap(), 1);
    assert_eq!((case.pieces(), case.answer(2).await), (32, Some(large(2 << 20))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_was_not_written_to_its_end_is_none() {
    let case = Case::new();
    case.begin(1).await;
    assert_eq!(case.answer(1).await, None);
    // Other bytes, and fewer of them.
    let answer: Bytes = large((2 << 20) + 1).iter().rev().copied().collect();
    case.complete(1, &answer).await;
    assert_eq!((case.pieces(), case.answer(1).await), (33, Some(answer)));

    case.begin(2).await;
    let Case { store, dir, other } = case;
    store.close().await;
    drop((store, other));
    let path = dir.path().join("a.db");
    let case = Case { store: Arc::new(open(&path)), other: Connection::open(path).unwrap(), dir };
    assert_eq!((state_of(&case.store, 2).await, case.answer(2).await), (Some(State::Unknown), None));
    // The answer that comes late is whole.
    case.complete(2, &large(2 << 20)).await;
    assert_eq!(case.answer(2).await, Some(large(2 << 20)));
}

#[tokio::test]
async fn the_same_large_ending_repeats_and_another_one_does_not() {
    let case = Case::new();
    let (answer, other) = (large(2 << 20), large(3 << 20));
    case.claim(1).await;
    case.complete(1, &answer).await;
    case.complete(1, &answer).await;
    for (by, end) in [(1, other.clone()), (2, answer.clone()), (2, other)] {
        let settled = case.store.settle(id(1), attempt(by), complete(end)).await.unwrap();
        let Settled::NotCurrent { record: Some(record) } = settled else { panic!("{by} ended it") };
        assert_eq!(record.answer.as_ref(), Some(&answer));
    }
    assert_eq!(case.pieces(), 32, "no one else's are written");
}

#[tokio::test]
async fn an_answer_that_lacks_a_piece_is_damaged() {
    let case = Case::new();
    case.claim(1).await;
    case.complete(1, &large(2 << 20)).await;
    case.other.execute("DELETE FROM piece WHERE place = 3", []).unwrap();
    let found = case.store.get(id(1)).await.map(drop).unwrap_err();
    assert_eq!(found.cause().kind, ErrorKind::Corrupt, "{found}");
    let claimed = case.store.claim(id(1), fresh(2)).await.map(drop).unwrap_err();
    assert_eq!(claimed.cause().kind, ErrorKind::Corrupt, "{claimed}");
}

#[tokio::test]
async fn a_piece_shows_how_a_large_answer_begins() {
    let case = Case::new();
    let answer = large(2 << 20);
    case.claim(1).await;
    case.complete(1, &answer).await;
    let expected = Values { head: Bytes::new(), answer: Some(answer) }.beginning().answer;
    let found = case.store.beginnings(None, 10).await.unwrap().records;
    assert_eq!(found[0].values.answer, expected);
    let mut seen = Vec::new();
    let shown = preview(&case.dir.path().join("a.db"), &[]).unwrap().unwrap();
    shown.for_each(|_, answer, _| seen.push(answer)).unwrap();
    assert_eq!(seen, [expected]);
}

/// An operator completes it while the gate, whose answer comes late, does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_endings_of_an_attempt_do_not_mix() {
    let case = Case::new();
    let answers: Vec<Bytes> = [1, 2].map(|byte| vec![byte; 2 << 20].into()).into();
    for number in 1..=10 {
        case.claim(number).await;
        let endings = answers.iter().map(|answer| {
            let (store, end) = (Arc::clone(&case.store), complete(answer.clone()));
            tokio::spawn(async move { store.settle(id(number), attempt(number), end).await })
        });
        let ended = futures_util::future::join_all(endings.collect::<Vec<_>>()).await;
        let done = ended.iter().filter(|ended| matches!(ended, Ok(Ok(Settled::Done { .. })))).count();
        assert!(done <= 1, "{ended:?}");
        match case.answer(number).await {
            Some(answer) => assert!(done == 1 && answers.contains(&answer)),
            None => assert_eq!(done, 0),
        }
    }
}

#[tokio::test]
async fn what_has_no_room_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let store = Sqlite::open(acquire(&Settings { max_pages: Some(400), ..Settings::new(&path) })).unwrap();
    assert!(store.has_room(2 << 20) && !store.has_room(usize::MAX / 4));
    let case = Case { store: Arc::new(store), other: Connection::open(&path).unwrap(), dir };
    case.claim(1).await;
    let full = case.store.settle(id(1), attempt(1), complete(large(2 << 20))).await.unwrap_err();
    assert!(matches!(&full, Error::Determinate(cause) if cause.kind == ErrorKind::Full), "{full}");
    assert_eq!(case.pieces(), 0);
    case.complete(1, &large(1 << 20)).await;
    assert_eq!(case.answer(1).await, Some(large(1 << 20)));
}
