//! An upstream that keeps every byte it gets, and answers with whatever bytes it is told.

use std::collections::{HashMap, VecDeque};
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::strict::{self, Message, Read};

/// What came over a connection.
#[derive(Clone, Debug)]
pub enum Seen {
    /// A request that can be read in one way only.
    Whole(Message),
    /// What cannot be read, or not in one way only.
    Bad(String, Vec<u8>),
    /// The beginning of a request; then the connection ended.
    Partial(Vec<u8>),
}

/// What it answers to one request.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub bytes: Vec<u8>,
    /// It closes behind them.
    pub closes: bool,
    /// It sends each for itself.
    pub by_bytes: bool,
}

#[derive(Clone, Default)]
pub struct Recorder(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    seen: Vec<Seen>,
    /// Bytes of requests that are not whole yet, by connection.
    pending: HashMap<usize, Vec<u8>>,
    /// How often it has begun anew.
    nth: usize,
    /// Answers to come; after them it says what was asked for.
    script: VecDeque<Answer>,
    /// Connections so far.
    accepted: usize,
}

impl Recorder {
    /// Listens, for as long as the process lives.
    pub fn start() -> (Self, String) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a loopback address");
        let url = format!("http://{}", listener.local_addr().expect("a bound socket"));
        let recorder = Self::default();
        let accepting = recorder.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let recorder = accepting.clone();
                std::thread::spawn(move || recorder.serve(stream));
            }
        });
        (recorder, url)
    }

    /// Forgets what came, and answers with `script` from now on.
    pub fn begin(&self, script: Vec<Answer>) {
        let mut state = self.0.lock().unwrap();
        state.seen.clear();
        state.nth += 1;
        state.script = script.into();
    }

    /// What has come since it began; nothing where a request is still under way.
    pub fn seen(&self) -> Option<Vec<Seen>> {
        let state = self.0.lock().unwrap();
        state.pending.is_empty().then(|| state.seen.clone())
    }

    /// Bytes of requests that are under way.
    pub fn pending(&self) -> String {
        let state = self.0.lock().unwrap();
        state.pending.values().map(|bytes| bytes.escape_ascii().to_string()).collect::<Vec<_>>().join(" and ")
    }

    fn serve(&self, mut stream: TcpStream) {
        let id = {
            let mut state = self.0.lock().unwrap();
            state.accepted += 1;
            state.accepted
        };
        drop(stream.set_nodelay(true));
        let mut buffer = Vec::new();
        let mut chunk = vec![0; 64 << 10];
        let mut began = 0;
        while self.answer(&mut stream, &mut buffer) {
            self.keep_pending(id, &buffer);
            match stream.read(&mut chunk) {
                Ok(n) if n > 0 => {
                    if buffer.is_empty() {
                        began = self.0.lock().unwrap().nth;
                    }
                    buffer.extend_from_slice(&chunk[..n]);
                }
                _ => break,
            }
        }
        let mut state = self.0.lock().unwrap();
        state.pending.remove(&id);
        // What began before is missed by nobody now.
        if !buffer.is_empty() && began == state.nth {
            state.seen.push(Seen::Partial(buffer));
        }
    }

    fn keep_pending(&self, id: usize, bytes: &[u8]) {
        let mut state = self.0.lock().unwrap();
        if bytes.is_empty() {
            state.pending.remove(&id);
        } else {
            state.pending.insert(id, bytes[..bytes.len().min(1000)].to_vec());
        }
    }

    /// Answers the requests that are whole. False where the connection is over.
    fn answer(&self, stream: &mut TcpStream, buffer: &mut Vec<u8>) -> bool {
        loop {
            let message = match strict::request(buffer) {
                Read::More => return true,
                Read::Bad(why) => {
                    self.0.lock().unwrap().seen.push(Seen::Bad(why, std::mem::take(buffer)));
                    drop(stream.shutdown(Shutdown::Both));
                    return false;
                }
                Read::Whole(message) => *message,
            };
            buffer.drain(..message.raw.len());
            let is_probe = message.start.starts_with("GET /probe");
            let scripted = {
                let mut state = self.0.lock().unwrap();
                let scripted = if is_probe { None } else { state.script.pop_front() };
                state.seen.push(Seen::Whole(message.clone()));
                scripted
            };
            let answer = scripted.unwrap_or_else(|| echo(&message));
            let size = if answer.by_bytes { 1 } else { answer.bytes.len().max(1) };
            if answer.bytes.chunks(size).try_for_each(|bytes| stream.write_all(bytes)).is_err() {
                return false;
            }
            if answer.closes {
                drop(stream.shutdown(Shutdown::Write));
                buffer.clear();
                return false;
            }
        }
    }
}

/// Says what was asked for, so that a client sees which request an answer belongs to.
fn echo(message: &Message) -> Answer {
    let asked = message.start.strip_suffix(" HTTP/1.1").unwrap_or_default();
    let body = if asked.starts_with("HEAD ") { "" } else { asked };
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", asked.len());
    Answer { bytes: format!("{head}{body}").into_bytes(), ..Answer::default() }
}
