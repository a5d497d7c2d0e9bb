//! The upstream's books: which keys it has run. Gates ask them what became of an attempt.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::time::sleep;

use super::{Site, breaks, header, written};
use crate::dice::Dice;
use crate::history::{Answer, Event, History, Label, Question, Request};
use crate::life::Life;
use crate::pipe::{Cable, Settlement};
use crate::setup::{BOOKS, key, label_named};
use crate::wire::{Message, Reader};

/// The question that is under way on a connection.
pub(super) type Open = Arc<Mutex<Option<Question>>>;

/// The gate's end of a connection, for as long as it has it.
pub(super) struct Asking {
    pub(super) history: History,
    pub(super) open: Open,
}

/// What becomes of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conduct {
    Answer,
    /// It is answered with this status, which says nothing of the key.
    Evade(u16, &'static str),
    /// The connection breaks instead of an answer.
    Break,
    /// The connection breaks in the middle of the answer.
    BreakWithin,
    /// There is never an answer.
    Silent,
    /// The answer is larger than a gate takes.
    Large,
}

const CONDUCTS: [(u64, Conduct); 9] = [
    (64, Conduct::Answer),
    (6, Conduct::Evade(500, "Internal Server Error")),
    (4, Conduct::Evade(302, "Found")),
    (2, Conduct::Evade(401, "Unauthorized")),
    (4, Conduct::Evade(503, "Service Unavailable")),
    (4, Conduct::Break),
    (6, Conduct::BreakWithin),
    (6, Conduct::Silent),
    (4, Conduct::Large),
];

impl Asking {
    /// A question begins to leave the gate.
    pub(super) fn begin(&self, question: Question, life: &Life, written: &[u8]) {
        let line = String::from_utf8_lossy(written.split(|byte| *byte == b'\r').next().unwrap_or_default());
        let label = asked(&line);
        let request = header(written, "x-request").map(|text| Request(text.parse().unwrap()));
        let before = self.open.lock().unwrap().replace(question);
        assert_eq!(before, None, "two questions on one connection");
        self.history.add(Event::Asked { question, life: life.number, label, request });
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(question) = self.open.lock().unwrap().take() {
            self.history.add(Event::Dropped { question });
        }
    }
}

impl Site {
    /// Deals with one question. Returns whether the connection goes on.
    pub(super) async fn look_up(
        &self,
        message: &Message,
        open: &Open,
        stream: &mut Settlement,
        cable: &Cable,
        dice: &mut Dice,
    ) -> bool {
        // The gate may have given it up already.
        let Some(question) = *open.lock().unwrap() else { return false };
        let label = asked(&message.line);
        let conduct = if self.is_calm() { Conduct::Answer } else { dice.weighted(&CONDUCTS) };
        // What it says is what it knows now, however long it takes to say it.
        let ran = self.ran.lock().unwrap().get(&label).copied();
        sleep(self.takes(dice)).await;
        let (status, reason) = match (conduct, ran) {
            (Conduct::Evade(status, reason), _) => (status, reason),
            (_, Some(_)) => dice.pick(&[(200, "OK"), (200, "Fine"), (203, "Non-Authoritative Information")]),
            (_, None) => dice.pick(&[(404, "Not Found"), (404, "Not Found"), (410, "Gone")]),
        };
        let (answer, bytes) = said(question, label, (status, reason, ran), dice);
        match conduct {
            Conduct::Break => return breaks(cable, dice),
            Conduct::Silent => return outwaits(stream).await,
            Conduct::Large => {
                let head = "HTTP/1.1 200 OK\r\nContent-Length: 2000000\r\n\r\nthe beginning of all books";
                return stream.write_all(head.as_bytes()).await.is_ok() && outwaits(stream).await;
            }
            Conduct::Answer | Conduct::Evade(..) | Conduct::BreakWithin => {}
        }
        let cut = dice.within(1..bytes.len() as u64) as usize;
        if stream.write_all(&bytes[..cut]).await.is_err() {
            return false;
        }
        if conduct == Conduct::BreakWithin {
            return breaks(cable, dice);
        }
        if open.lock().unwrap().take().is_some() {
            // Before the last byte, for the gate may act on it before this task goes on.
            self.history.add(Event::Said { question, answer });
        }
        stream.write_all(&bytes[cut..]).await.is_ok() && dice.percent(80)
    }

    fn takes(&self, dice: &mut Dice) -> Duration {
        match dice.within(0..100) {
            _ if self.is_calm() => Duration::ZERO,
            0..40 => Duration::ZERO,
            40..70 => dice.millis(1..60),
            _ => dice.millis(60..1_200),
        }
    }
}

/// Until the other side gives up.
async fn outwaits(stream: &mut Settlement) -> bool {
    while let Ok(Some(_)) = Reader::new().next(stream).await {}
    false
}

/// The key that a question is about, by its first line.
fn asked(line: &str) -> Label {
    let target = line.split(' ').nth(1).and_then(|path| path.strip_prefix(BOOKS)).expect("a question to the books");
    let (id, named) = target.split_once('/').expect("an id and a key");
    let label = label_named(id).expect("a question about a record that there may be");
    assert_eq!(named, key(label.key), "a question about one record, by the key of another");
    label
}

fn said(
    question: Question,
    label: Label,
    (status, reason, ran): (u16, &str, Option<u32>),
    dice: &mut Dice,
) -> (Answer, Vec<u8>) {
    let headers = [("x-question", question.0.to_string()), ("set-cookie", format!("q={}", question.0))];
    let headers = headers.map(|(name, value)| (name.to_owned(), value)).to_vec();
    let mut body = match ran {
        Some(serial) => format!("the books have {label}: serial {serial}").into_bytes(),
        None => format!("the books have nothing of {label}").into_bytes(),
    };
    if dice.percent(20) {
        body.extend(std::iter::repeat_n(b'.', 600));
    }
    written(Answer { status, reason: reason.to_owned(), headers, body }, dice.percent(30))
}
