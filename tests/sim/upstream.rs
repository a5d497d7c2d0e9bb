//! The service behind the gates: it runs what arrives, and answers as chance has it, or not.

mod honoured;
mod questions;

use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::http::limits::Limits;
use oncegate::http::upstream::{self, Dial, Io, Upstream};
use oncegate::http::usage::Usage;
use tokio::io::AsyncWriteExt;
use tokio::time::{sleep, timeout};

use self::honoured::Honoured;
use self::questions::{Asking, Open};
use crate::dice::Dice;
use crate::history::{Answer, Connection, Event, History, Label, Question, Request, Token};
use crate::life::{Life, Reach};
use crate::mutant::{Mutant, Shelf};
use crate::pipe::{Cable, Settlement, pipe};
use crate::setup::{PATHS, PROBE, RESEND, Setup, TENANTS, variant_in};
use crate::wire::{self, Message, Reader};

/// The upstream of every gate.
pub struct Site {
    history: History,
    dice: Mutex<Dice>,
    serials: AtomicU32,
    connections: AtomicU32,
    questions: AtomicU32,
    calm: AtomicBool,
    setup: Setup,
    /// Where it completes records itself.
    shelf: Arc<Shelf>,
    /// What its books have of each key: the last run.
    ran: Mutex<BTreeMap<Label, u32>>,
    /// The keys that it honours itself.
    honoured: Honoured,
}

/// How one gate reaches it.
struct Dialer {
    site: Arc<Site>,
    life: Arc<Life>,
}

/// What becomes of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conduct {
    /// It runs and is answered.
    Answer,
    /// And the connection closes after it.
    AnswerAndClose,
    /// The connection breaks before it runs.
    BreakBefore,
    /// It runs, and the connection breaks instead of an answer.
    BreakAfter,
    /// It runs, and the connection breaks in the middle of the answer.
    BreakWithin,
    /// It runs, and there is never an answer.
    Silent,
}

/// A request as it arrived.
struct Arrived {
    /// The header that names the attempt, and the attempt.
    attempt: Option<String>,
    token: Option<Token>,
    request: Request,
    label: Label,
    variant: usize,
}

impl Site {
    pub fn new(history: History, dice: Dice, setup: Setup, shelf: Arc<Shelf>) -> Arc<Self> {
        Arc::new(Self {
            history,
            dice: Mutex::new(dice),
            serials: AtomicU32::new(1),
            connections: AtomicU32::new(1),
            questions: AtomicU32::new(1),
            calm: AtomicBool::new(false),
            setup,
            shelf,
            ran: Mutex::default(),
            honoured: Honoured::default(),
        })
    }

    /// From now on it answers everything at once.
    pub fn calm(&self) {
        self.calm.store(true, Ordering::Relaxed);
    }

    fn is_calm(&self) -> bool {
        self.calm.load(Ordering::Relaxed)
    }

    fn dice(&self) -> Dice {
        self.dice.lock().unwrap().fork()
    }

    /// A connection of `life`, with the upstream at its other end.
    fn connect(self: &Arc<Self>, life: &Arc<Life>) -> Settlement {
        let mut dice = self.dice();
        let (site, writer, connection) = (Arc::clone(self), Arc::clone(life), self.next_connection());
        let open = Open::default();
        let asking = Asking { history: self.history.clone(), open: Arc::clone(&open) };
        let watch = move |written: &[u8]| site.left(&writer, connection, &asking, written);
        let (near, far, cable) = pipe(dice.pick(&[256, 1024, 16_384]), Some(Box::new(watch)));
        life.holds_upstream(&cable);
        tokio::spawn(Arc::clone(self).serve(Arc::clone(life), connection, open, (far, cable), dice));
        near
    }

    fn next_connection(&self) -> Connection {
        Connection(self.connections.fetch_add(1, Ordering::Relaxed))
    }

    /// A gate has written this, or the first bytes of it.
    fn left(self: &Arc<Self>, life: &Arc<Life>, connection: Connection, asking: &Asking, written: &[u8]) {
        if written.starts_with(b"GET ") {
            let question = Question(self.questions.fetch_add(1, Ordering::Relaxed));
            asking.begin(question, life, written);
            return life.burn_at_write();
        }
        if !written.starts_with(b"POST ") {
            return;
        }
        let token = header(written, "idempotency-attempt").and_then(|text| Token::parse(&text));
        let request = Request(header(written, "x-request").unwrap().parse().unwrap());
        self.history.add(Event::Wrote { life: life.number, connection, token, request });
        if self.shelf.mutant == Some(Mutant::SendsTwice) && request.0.is_multiple_of(3) {
            self.send_again(life, written.to_vec());
        }
        life.burn_at_write();
    }

    /// As if something on the way had sent the request once more, of its own accord.
    fn send_again(self: &Arc<Self>, life: &Arc<Life>, bytes: Vec<u8>) {
        let (mut near, far, cable) = pipe(16_384, None);
        let (site, connection) = (Arc::clone(self), self.next_connection());
        tokio::spawn(site.serve(Arc::clone(life), connection, Open::default(), (far, cable), self.dice()));
        tokio::spawn(async move {
            drop(near.write_all(&bytes).await);
            drop(Reader::new().next(&mut near).await);
        });
    }

    async fn serve(
        self: Arc<Self>,
        life: Arc<Life>,
        connection: Connection,
        open: Open,
        (mut stream, cable): (Settlement, Cable),
        mut dice: Dice,
    ) {
        let mut reader = Reader::new();
        // A service closes connections that are idle for longer than it likes.
        let idle = if dice.percent(70) { Duration::from_secs(60) } else { dice.millis(1..900) };
        while let Ok(Ok(Some(message))) = timeout(idle, reader.next(&mut stream)).await {
            let goes_on = match message.line.starts_with("GET ") {
                true => self.look_up(&message, &open, &mut stream, &cable, &mut dice).await,
                false => self.exchange(&life, &message, &mut stream, &cable, &mut dice).await,
            };
            if !goes_on {
                break;
            }
        }
        self.history.add(Event::Closed { connection });
    }

    /// Deals with one request. Returns whether the connection goes on.
    async fn exchange(
        &self,
        life: &Arc<Life>,
        message: &Message,
        stream: &mut Settlement,
        cable: &Cable,
        dice: &mut Dice,
    ) -> bool {
        let arrived = arrived(message);
        let token = arrived.token;
        let conduct = match self.is_calm() {
            true => Conduct::Answer,
            // Where unknown outcomes are found out, there are more of them.
            false if matches!(arrived.label.route, PROBE | RESEND) => dice.weighted(&[
                (45, Conduct::Answer),
                (7, Conduct::AnswerAndClose),
                (18, Conduct::BreakBefore),
                (12, Conduct::BreakAfter),
                (8, Conduct::BreakWithin),
                (10, Conduct::Silent),
            ]),
            false => dice.weighted(&[
                (70, Conduct::Answer),
                (8, Conduct::AnswerAndClose),
                (6, Conduct::BreakBefore),
                (6, Conduct::BreakAfter),
                (5, Conduct::BreakWithin),
                (5, Conduct::Silent),
            ]),
        };
        if conduct == Conduct::BreakBefore {
            self.history.add(Event::Broke { token });
            return breaks(cable, dice);
        }
        let (serial, answer, bytes) = self.run(life, &arrived, dice).await;
        sleep(self.thinks(dice)).await;
        match conduct {
            Conduct::BreakAfter => {
                self.history.add(Event::Broke { token });
                return breaks(cable, dice);
            }
            Conduct::Silent => {
                // Until the other side gives up.
                while let Ok(Some(_)) = Reader::new().next(stream).await {}
                return false;
            }
            _ => {}
        }
        self.history.add(Event::Replying { serial, token, answer });
        let cut = dice.within(1..bytes.len() as u64) as usize;
        if stream.write_all(&bytes[..cut]).await.is_err() {
            return false;
        }
        if conduct == Conduct::BreakWithin {
            self.history.add(Event::Broke { token });
            return breaks(cable, dice);
        }
        if dice.percent(20) && !self.is_calm() {
            sleep(dice.millis(1..300)).await;
        }
        // Before the last byte, for the gate may act on it before this task goes on.
        self.history.add(Event::Replied { serial, token });
        stream.write_all(&bytes[cut..]).await.is_ok() && conduct == Conduct::Answer
    }

    /// Runs a request, unless the upstream honours its key and knows it. Returns its answer, and of which run that is.
    async fn run(&self, life: &Arc<Life>, arrived: &Arrived, dice: &mut Dice) -> (u32, Answer, Vec<u8>) {
        let Arrived { token, request, label, variant, .. } = *arrived;
        let honours = label.route == RESEND;
        if honours && let Some((serial, answer, bytes)) = self.honoured.known(label, variant).await {
            self.history.add(Event::Honoured { serial, token, request });
            return (serial, answer, bytes);
        }
        let time = self.thinks(dice);
        sleep(if label.route == PROBE { time.min(self.setup.underway) } else { time }).await;
        let serial = self.serials.fetch_add(1, Ordering::Relaxed);
        self.history.add(Event::Executed { serial, token, request, label, variant });
        self.ran.lock().unwrap().insert(label, serial);
        let (answer, bytes) = answer(serial, label, variant, self.is_calm(), dice);
        if honours {
            self.honoured.keep((label, variant), (serial, answer.clone(), bytes.clone()));
            if dice.percent(50) {
                self.complete(life, arrived, serial, &answer).await;
            }
        }
        (serial, answer, bytes)
    }

    fn thinks(&self, dice: &mut Dice) -> Duration {
        match dice.within(0..100) {
            _ if self.is_calm() => Duration::ZERO,
            0..45 => Duration::ZERO,
            45..70 => dice.millis(1..60),
            70..95 => dice.millis(100..2_000),
            _ => dice.millis(2_000..6_000),
        }
    }
}

/// The site as a gate has it: once for each of its patiences.
pub fn upstreams(site: &Arc<Site>, life: &Arc<Life>, setup: &Setup, usage: &Arc<Usage>) -> Vec<Upstream> {
    let upstreams = ["app", "books"].into_iter().zip(setup.timeouts()).map(|(name, timeout)| {
        let settings = upstream::Settings {
            name: name.into(),
            places: vec![upstream::UpstreamAddress::Tcp { host: name.to_owned(), port: 80 }],
            tls: None,
            protocol: upstream::Protocol::Http1,
            timeout,
            connect_timeout: setup.connect_timeout,
            client_timeout: setup.client_timeout,
            max_connections: 1000,
            max_headers: Limits::default().max_answer_headers(),
            reuse: upstream::Sharing::Always,
        };
        let dialer = Dialer { site: Arc::clone(site), life: Arc::clone(life) };
        Upstream::through(settings, Arc::clone(usage), Arc::new(dialer))
    });
    upstreams.collect()
}

#[async_trait]
impl Dial for Dialer {
    async fn dial(&self) -> io::Result<Box<dyn Io>> {
        let mut dice = self.site.dice();
        if dice.percent(20) && !self.site.is_calm() {
            let longest = if dice.percent(20) { 1_200 } else { 50 };
            sleep(dice.millis(1..longest)).await;
        }
        if self.life.is_dead() {
            return pending().await;
        }
        match self.life.reach() {
            Reach::Open if dice.percent(4) && !self.site.is_calm() => Err(io::ErrorKind::ConnectionRefused.into()),
            Reach::Open => Ok(Box::new(self.site.connect(&self.life))),
            Reach::Refused => Err(io::ErrorKind::ConnectionRefused.into()),
            Reach::Silent => pending().await,
        }
    }
}

/// Breaks a connection: by a reset, or as a process does that ends.
fn breaks(cable: &Cable, dice: &mut Dice) -> bool {
    if dice.percent(50) {
        cable.reset();
    }
    false
}

/// The answer, and its bytes.
fn answer(serial: u32, label: Label, variant: usize, is_calm: bool, dice: &mut Dice) -> (Answer, Vec<u8>) {
    let statuses: [(u64, (u16, &str)); 15] = [
        (40, (200, "OK")),
        (8, (200, "Fine")),
        (8, (201, "Created")),
        (4, (204, "No Content")),
        (3, (303, "See Other")),
        (4, (400, "Bad Request")),
        (3, (401, "Unauthorized")),
        (4, (404, "Not Found")),
        (2, (409, "Conflict")),
        (3, (422, "Unprocessable Entity")),
        (4, (429, "Too Many Requests")),
        (6, (500, "Internal Server Error")),
        (4, (502, "Bad Gateway")),
        (3, (503, "Service Unavailable")),
        (4, (504, "Gateway Timeout")),
    ];
    let (status, reason) = if is_calm { (200, "OK") } else { dice.weighted(&statuses) };
    let mut headers = vec![
        ("X-Serial".to_owned(), serial.to_string()),
        ("Set-Cookie".to_owned(), format!("a={serial}")),
        ("Set-Cookie".to_owned(), "b=2; Path=/".to_owned()),
    ];
    if dice.percent(10) && !is_calm {
        let control = dice.pick(&["release", "no-store", "ttl=1", "ttl=5", "no-store, ttl=2", "nonsense"]);
        headers.push(("Idempotency-Control".to_owned(), control.to_owned()));
    }
    if dice.percent(5) {
        // What an upstream says in the gate's name does not pass.
        headers.push(("Idempotent-Replayed".to_owned(), "true".to_owned()));
        headers.push(("Idempotency-Status".to_owned(), "replayed".to_owned()));
    }
    let mut body = match status {
        204 => Vec::new(),
        _ => format!("{label} variant {variant} serial {serial}").into_bytes(),
    };
    if status != 204 && dice.percent(25) {
        body.extend(std::iter::repeat_n(b'.', 600));
    }
    let chunked = dice.percent(30);
    written(Answer { status, reason: reason.to_owned(), headers, body }, chunked)
}

/// An answer and its bytes, with its body in one chunk or by its length.
fn written(answer: Answer, chunked: bool) -> (Answer, Vec<u8>) {
    let Answer { status, reason, headers, body } = answer;
    let chunked = status != 204 && chunked;
    let mut bytes = format!("HTTP/1.1 {status} {reason}\r\n").into_bytes();
    for (name, value) in &headers {
        bytes.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
    }
    if chunked {
        bytes.extend_from_slice(format!("Transfer-Encoding: chunked\r\n\r\n{:x}\r\n", body.len()).as_bytes());
        bytes.extend_from_slice(&body);
        bytes.extend_from_slice(b"\r\n0\r\n\r\n");
    } else {
        if status != 204 {
            bytes.extend_from_slice(format!("Content-Length: {}\r\n", body.len()).as_bytes());
        }
        bytes.extend_from_slice(b"\r\n");
        bytes.extend_from_slice(&body);
    }
    let headers = headers.into_iter().map(|(name, value)| (name.to_ascii_lowercase(), value)).collect();
    (Answer { status, reason, headers, body }, bytes)
}

/// What a request is about, by its bytes alone.
fn arrived(message: &Message) -> Arrived {
    let path = message.line.split(' ').nth(1).unwrap();
    let key = message.header("idempotency-key").unwrap().trim_matches('"');
    let tenant = message.header("x-tenant").unwrap();
    Arrived {
        attempt: message.header("idempotency-attempt").map(str::to_owned),
        token: message.header("idempotency-attempt").and_then(Token::parse),
        request: Request(message.header("x-request").unwrap().parse().unwrap()),
        label: Label {
            route: PATHS.iter().position(|own| *own == path).unwrap(),
            tenant: TENANTS.iter().position(|own| *own == tenant).unwrap(),
            key: key[1..].parse().unwrap(),
        },
        variant: variant_in(&message.body),
    }
}

/// A header of a request whose head is at the beginning of `bytes`.
fn header(bytes: &[u8], name: &str) -> Option<String> {
    let start = wire::position(bytes, format!("\r\n{name}: ").as_bytes())? + name.len() + 4;
    let end = start + wire::position(&bytes[start..], b"\r\n")?;
    String::from_utf8(bytes[start..end].to_vec()).ok()
}
