//! What happened in a run, in the order in which it happened.

use std::fmt;
use std::sync::{Arc, Mutex};

use oncegate::idempotency::codec;
use oncegate::idempotency::record::{AttemptToken, State};
use oncegate::store::cached::CacheResult;
use oncegate::store::unreliable::Operation;
use tokio::time::Instant;

/// The store's time when a run begins, in milliseconds since the epoch.
pub const EPOCH: u64 = 1_700_000_000_000;

/// A run that has so much to tell goes round in circles.
const TOO_MUCH: usize = 100_000;

/// A history that is being written.
#[derive(Clone)]
pub struct History {
    began: Instant,
    entries: Arc<Mutex<Vec<Entry>>>,
}

/// One thing that happened.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// In milliseconds since the run began.
    pub at: u64,
    pub event: Event,
}

/// One life of a gate. A gate that comes back lives another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LifeNumber(pub u32);

/// A client's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request(pub u32);

/// A connection of a gate to the upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Connection(pub u32);

/// A question of a gate to the upstream's books.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Question(pub u32);

/// A client's question for the status of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Poll(pub u32);

/// The token of an attempt: the life that made it, and its number there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Token(pub u64);

/// What a record is about: a key of a tenant on a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Label {
    pub route: usize,
    pub tenant: usize,
    pub key: usize,
}

/// An answer: in full, as its client got it, or as the upstream gave it.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub status: u16,
    pub reason: String,
    /// Without `Date`, which the gate's own problems take from the wall clock.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

/// A record as it stands. Times are in milliseconds since the run began.
#[derive(Clone, PartialEq)]
pub struct Standing {
    pub token: Token,
    pub state: State,
    pub claimed: u64,
    pub until: u64,
    /// Which request was claimed, told by its fingerprint.
    pub variant: Option<usize>,
    /// Encoded.
    pub answer: Option<bytes::Bytes>,
}

/// An accepted request that waits for its delivery. Times are in milliseconds since the run began.
#[derive(Clone, Debug, PartialEq)]
pub struct Waiting {
    /// Names this acceptance.
    pub token: Token,
    pub request: Request,
    /// Its place in the order of acceptance.
    pub sequence: u64,
    pub variant: Option<usize>,
    /// Since when it is tried.
    pub since: u64,
    /// Whether it was given up.
    pub is_dead: bool,
    /// When it is due; when it expires, if it was given up.
    pub until: u64,
    /// How many attempts were released.
    pub attempts: u32,
}

/// What an operation of the store returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    Inserted,
    Exists(State),
    Superseded(bool),
    Settled,
    NotSettled,
    Count(usize),
    Renewed(usize),
    Removed(bool),
}

#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A gate begins to live.
    Born { life: LifeNumber, slot: usize },
    /// A gate is told to end.
    Drained { life: LifeNumber },
    /// A gate is dead from here on.
    Died { life: LifeNumber },
    /// Something in the world changes for a gate; the word is for readers.
    Fault { life: LifeNumber, what: String },
    /// Something happens to the cache that gates share; the word is for readers.
    Cache { what: String },
    /// What came of asking the cache of a gate.
    Recalled { life: LifeNumber, answered: CacheResult },
    /// The connections of a gate to the upstream are reset.
    Cut { life: LifeNumber },
    /// A client sends a request.
    Sent { request: Request, life: LifeNumber, label: Label, variant: usize, is_probe: bool },
    /// A client has a whole answer.
    Answered { request: Request, answer: Answer },
    /// The connection ended before the answer did.
    Lost { request: Request },
    /// The client went away by itself.
    Left { request: Request },
    /// The client waited for longer than any gate may take.
    Hung { request: Request },
    /// The store did an operation, and this came of it.
    Told { life: LifeNumber, op: Operation, label: Option<Label>, token: Option<Token>, told: Told },
    /// A record changed, by an operation that `by` asked for.
    Changed {
        life: LifeNumber,
        op: Operation,
        by: Option<Token>,
        label: Label,
        before: Option<Standing>,
        after: Option<Standing>,
    },
    /// A request was accepted, or what waits for its delivery changed.
    Queued { life: LifeNumber, op: Operation, label: Label, before: Option<Waiting>, after: Option<Waiting> },
    /// An operator holds back the accepted requests, or lets them go again.
    Paused { life: LifeNumber, is_paused: bool },
    /// A client asks for the status of a request.
    Polls { poll: Poll, life: LifeNumber, label: Label },
    /// It has an answer: the state, or the code of a problem.
    Polled { poll: Poll, word: String },
    /// The right to ask the upstream about a record changed hands: it is a record of its own, and tells of another.
    Locked { life: LifeNumber, op: Operation, about: Label, before: Option<Standing>, after: Option<Standing> },
    /// The first byte of a question left a gate for the upstream's books; `request` is the retry on whose behalf it asks.
    Asked { question: Question, life: LifeNumber, label: Label, request: Option<Request> },
    /// The books have written all of an answer.
    Said { question: Question, answer: Answer },
    /// The gate waits for the answer no longer.
    Dropped { question: Question },
    /// The first byte of a request left a gate for the upstream.
    Wrote { life: LifeNumber, connection: Connection, token: Option<Token>, request: Request },
    /// The upstream ran a request.
    Executed { serial: u32, token: Option<Token>, request: Request, label: Label, variant: usize },
    /// The upstream knows the key of a request, which it does not run: it gives the answer of a run before.
    Honoured { serial: u32, token: Option<Token>, request: Request },
    /// The upstream, or an operator, completes the record of a run in the store, beside the gate that sent it.
    Kept { serial: u32, token: Token, answer: Answer },
    /// The upstream begins to answer.
    Replying { serial: u32, token: Option<Token>, answer: Answer },
    /// The upstream has written all of its answer.
    Replied { serial: u32, token: Option<Token> },
    /// The upstream closes a connection.
    Closed { connection: Connection },
    /// The upstream broke off instead of an answer, or in the middle of one.
    Broke { token: Option<Token> },
    /// No more faults from here on; the upstream answers everything at once.
    Calm,
}

impl History {
    /// Begins now.
    pub fn begin() -> Self {
        Self { began: Instant::now(), entries: Arc::default() }
    }

    pub fn add(&self, event: Event) {
        let at = self.now();
        let mut entries = self.entries.lock().unwrap();
        assert!(entries.len() < TOO_MUCH, "the run goes on for ever");
        entries.push(Entry { at, event });
    }

    /// In milliseconds since the run began.
    pub fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap()
    }

    pub fn take(&self) -> Vec<Entry> {
        std::mem::take(&mut self.entries.lock().unwrap())
    }
}

impl Token {
    pub fn of(attempt: AttemptToken) -> Self {
        let mut low = [0; 8];
        low.copy_from_slice(&attempt.0[8..]);
        Self(u64::from_be_bytes(low))
    }

    /// Of the header's 32 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        u64::from_str_radix(text.get(16..)?, 16).ok().map(Self)
    }

    /// Whose attempt it is.
    pub fn life(self) -> LifeNumber {
        LifeNumber(u32::try_from(self.0 >> 32).unwrap())
    }

    /// The first of a life's.
    pub fn first_of(life: LifeNumber) -> Self {
        Self(u64::from(life.0) << 32)
    }
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        crate::wire::find(&self.headers, name)
    }

    /// The word in `Idempotency-Status`.
    pub fn word(&self) -> &str {
        self.header("idempotency-status").unwrap_or("-")
    }

    /// Which run of the upstream it came of.
    pub fn serial(&self) -> Option<u32> {
        self.header("x-serial")?.parse().ok()
    }

    /// Which question it answered.
    pub fn question(&self) -> Option<Question> {
        self.header("x-question")?.parse().ok().map(Question)
    }

    pub fn is_replay(&self) -> bool {
        self.header("idempotent-replayed").is_some()
    }

    /// Whether the gate made it itself.
    pub fn is_problem(&self) -> bool {
        self.header("content-type") == Some("application/problem+json")
    }
}

impl Standing {
    pub fn is_past(&self, at: u64) -> bool {
        self.until <= at
    }

    /// Which question its answer is the books' answer to.
    pub fn question(&self) -> Option<Question> {
        let decoded = self.decoded()?;
        let (_, value) = decoded.headers.iter().find(|(name, _)| name == "x-question")?;
        value.to_str().ok()?.parse().ok().map(Question)
    }

    /// Whether it says that a request ended: completed, and not expired at `at`.
    pub fn decoded(&self) -> Option<codec::Answer> {
        codec::Answer::decode(self.answer.as_ref()?).ok()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "attempt {}.{}", self.0 >> 32, self.0 & 0xffff_ffff)
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} k{} t{}", crate::setup::PATHS[self.route], self.key, self.tenant)
    }
}

impl fmt::Debug for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { token, state, claimed, until, variant, answer } = self;
        write!(f, "{} of {token} (claimed {claimed}, until {until}", state.as_str())?;
        match variant {
            Some(variant) => write!(f, ", variant {variant}")?,
            None => write!(f, ", a request that nobody sent")?,
        }
        if let Some(answer) = answer {
            let tail = String::from_utf8_lossy(&answer[answer.len().saturating_sub(24)..]).into_owned();
            write!(f, ", answer of {} bytes ending in {tail:?}", answer.len())?;
        }
        write!(f, ")")
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.status, self.word())?;
        if self.is_replay() {
            write!(f, " (a replay)")?;
        }
        for name in ["x-serial", "x-question", "idempotency-control", "retry-after", "idempotency-expires"] {
            if let Some(value) = self.header(name) {
                write!(f, ", {name}: {value}")?;
            }
        }
        write!(f, ", {} bytes", self.body.len())
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>6} ms  ", self.at)?;
        let token = |token: &Option<Token>| token.map_or_else(|| "no attempt".to_owned(), |token| token.to_string());
        match &self.event {
            Event::Born { life: LifeNumber(life), slot } => write!(f, "gate {life} begins in place {slot}"),
            Event::Drained { life: LifeNumber(life) } => write!(f, "gate {life} is told to end"),
            Event::Died { life: LifeNumber(life) } => write!(f, "gate {life} is dead"),
            Event::Fault { life: LifeNumber(life), what } => write!(f, "gate {life}: {what}"),
            Event::Cache { what } => write!(f, "shared cache: {what}"),
            Event::Recalled { life: LifeNumber(life), answered } => {
                write!(f, "cache, gate {life}: {}", answered.as_str())
            }
            Event::Cut { life: LifeNumber(life) } => write!(f, "gate {life}: its upstream connections are reset"),
            Event::Sent { request: Request(request), life: LifeNumber(life), label, variant, is_probe } => {
                let what = if *is_probe { "probe" } else { "request" };
                write!(f, "{what} {request} to gate {life}: {label}, variant {variant}")
            }
            Event::Answered { request: Request(request), answer } => write!(f, "request {request} gets {answer}"),
            Event::Lost { request: Request(request) } => write!(f, "request {request} gets no whole answer"),
            Event::Left { request: Request(request) } => write!(f, "request {request}: its client leaves"),
            Event::Hung { request: Request(request) } => write!(f, "request {request} hangs"),
            Event::Told { life: LifeNumber(life), op, label, token: by, told } => {
                write!(f, "store, gate {life}: {op:?} ")?;
                if let Some(label) = label {
                    write!(f, "{label}, {} ", token(by))?;
                }
                write!(f, "-> {told:?}")
            }
            Event::Changed { life: LifeNumber(life), op, by, label, before, after } => {
                write!(f, "RECORD {label}: ")?;
                match (before, after) {
                    (_, Some(after)) => write!(f, "now {after:?}")?,
                    (Some(before), None) => write!(f, "gone, was {before:?}")?,
                    (None, None) => write!(f, "nothing")?,
                }
                write!(f, ", by {op:?} of gate {life}, {}", token(by))
            }
            Event::Queued { life: LifeNumber(life), op, label, before, after } => {
                match after.as_ref().or(before.as_ref()) {
                    Some(waiting) => {
                        let what = if after.is_some() { "" } else { "is gone, was " };
                        write!(f, "QUEUE {label}: {what}{waiting:?}, by {op:?} of gate {life}")
                    }
                    None => Ok(()),
                }
            }
            Event::Paused { life: LifeNumber(life), is_paused } => {
                write!(f, "accepted requests are held back: {is_paused}, by gate {life}")
            }
            Event::Polls { poll: Poll(poll), life: LifeNumber(life), label } => {
                write!(f, "poll {poll} asks gate {life} for the status of {label}")
            }
            Event::Polled { poll: Poll(poll), word } => write!(f, "poll {poll} gets {word}"),
            Event::Locked { life: LifeNumber(life), op, about, before, after } => match after
                .as_ref()
                .or(before.as_ref())
            {
                Some(lock) => {
                    let what = if after.is_some() { "" } else { "is gone, was " };
                    write!(f, "LOCK {about}: {what}{} of {}, by {op:?} of gate {life}", lock.state.as_str(), lock.token)
                }
                None => Ok(()),
            },
            Event::Asked { question: Question(question), life: LifeNumber(life), label, request } => {
                write!(f, "gate {life} asks the books about {label}: question {question}")?;
                request.iter().try_for_each(|Request(request)| write!(f, ", for request {request}"))
            }
            Event::Said { question: Question(question), answer } => write!(f, "BOOKS, question {question}: {answer}"),
            Event::Dropped { question: Question(question) } => write!(f, "question {question} is given up"),
            Event::Honoured { serial, token: by, request: Request(request) } => {
                write!(f, "upstream knows request {request} as serial {serial}, {}", token(by))
            }
            Event::Kept { serial, token, answer } => {
                write!(f, "upstream completes the record of {token}, serial {serial}: {answer}")
            }
            Event::Wrote { life: LifeNumber(life), connection, token: by, request: Request(request) } => {
                write!(f, "gate {life} writes request {request} to connection {}, {}", connection.0, token(by))
            }
            Event::Closed { connection: Connection(connection) } => {
                write!(f, "upstream closes connection {connection}")
            }
            Event::Executed { serial, token: by, request: Request(request), label, variant } => {
                write!(f, "UPSTREAM runs {label}, variant {variant}: serial {serial}, request {request}, {}", token(by))
            }
            Event::Replying { serial, token: by, answer } => {
                write!(f, "upstream begins to answer serial {serial}, {}: {answer}", token(by))
            }
            Event::Replied { serial, token: by } => write!(f, "upstream has answered serial {serial}, {}", token(by)),
            Event::Broke { token: by } => write!(f, "upstream breaks off, {}", token(by)),
            Event::Calm => write!(f, "CALM: no more faults"),
        }
    }
}
