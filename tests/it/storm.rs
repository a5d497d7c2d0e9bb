//! Many clients that try again, before gates that share a database, while a test makes things fail. Everything that
//! happens is written down.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::history::{Answer, End, History, Run, Said, Try, Wrong, judge};
use crate::servers::Session;
use crate::support::wait::PATIENCE;
use crate::support::{Gate, Plan, Reply, Request, Response, Upstream};

/// Whoever asks for a key that another runs waits a little, so that being told across replicas is tried as well.
const POLICY: &str = "in_flight = { wait = \"700ms\" }";

/// What lets gates accept requests and deliver them later, without long pauses.
const ACCEPT: &str = "mode = \"accept\"\ndeliver = { attempts = 100, backoff = \"50ms\", max_backoff = \"200ms\" }";

/// How many clients there are, and how many of them want the same at once.
const CLIENTS: usize = 50;
const TOGETHER: usize = 4;

/// How many keys there are in a round.
const KEYS: usize = 200;

/// How many keys are tried at least, unless that takes too long.
const LEAST: usize = 100;
const LONGEST: Duration = Duration::from_secs(90);

/// How long a client tries before it leaves its key to the end.
const TRIES: Duration = Duration::from_secs(8);

/// Where the gates are at the moment: nothing in the place of one that is down.
pub type Places = Mutex<Vec<Option<SocketAddr>>>;

/// An upstream that writes down what it is asked, and clients that do.
pub struct Storm {
    pub upstream: Upstream,
    pub gates: Arc<Places>,
    books: Arc<Books>,
    /// How many rounds of keys have begun.
    rounds: AtomicUsize,
    /// How long the gates' leases are, in seconds.
    lease: u32,
    /// Whether clients ask again, now and then, for what they have had.
    asks_again: bool,
    /// Whether a key has several ids: a gate that dies after its claim may leave a record under another.
    has_several_ids: bool,
    /// Whether requests are accepted, and delivered later.
    accepts: bool,
    /// Where the records can be looked at, by a way that nothing disturbs.
    databases: Vec<String>,
}

struct Books {
    began: Instant,
    runs: Mutex<Vec<Run>>,
    tries: Mutex<Vec<Try>>,
    /// Sessions with the databases, one with each, that nobody uses at the moment.
    idle: Mutex<Vec<Vec<Session>>>,
}

impl Storm {
    /// `database` is where claims can be looked up.
    pub fn before(database: &str) -> Self {
        Self::over(&[database])
    }

    /// The same where records are in several databases.
    pub fn over(databases: &[&str]) -> Self {
        let databases: Vec<String> = databases.iter().map(|url| (*url).to_owned()).collect();
        let books = Arc::new(Books {
            began: Instant::now(),
            runs: Mutex::default(),
            tries: Mutex::default(),
            idle: Mutex::default(),
        });
        let (writing, urls) = (Arc::clone(&books), databases.clone());
        let upstream = Upstream::start(move |request| writing.serve(request, &urls));
        let rounds = AtomicUsize::new(0);
        let (asks_again, has_several_ids, accepts) = (false, false, false);
        Self {
            upstream,
            gates: Arc::default(),
            books,
            rounds,
            lease: 1,
            asks_again,
            has_several_ids,
            accepts,
            databases,
        }
    }

    /// With clients who ask again for what others have had long ago, as often as for what is new.
    pub fn asking_again(mut self) -> Self {
        self.asks_again = true;
        self
    }

    /// With gates that make ids with different secrets.
    pub fn with_several_ids(mut self) -> Self {
        self.has_several_ids = true;
        self
    }

    /// With gates that accept requests, and deliver them later. Clients ask until they have the answer.
    pub fn accepting(mut self) -> Self {
        self.accepts = true;
        self
    }

    /// With leases of so many seconds, where nobody dies: a claim that takes most of one is refused.
    pub fn with_lease(mut self, seconds: u32) -> Self {
        self.lease = seconds;
        self
    }

    /// Starts gates before the upstream.
    pub fn start(&self, gates: usize, plan: impl Fn(Plan) -> Plan) -> Vec<Gate> {
        let accept = if self.accepts { ACCEPT } else { "" };
        let policy = format!("lease = \"{}s\"\n{POLICY}\n{accept}", self.lease);
        let gates: Vec<Gate> =
            (0..gates).map(|_| plan(Gate::before_url(&self.upstream.url()).defaults(&policy)).start()).collect();
        *self.gates.lock().unwrap() = gates.iter().map(|gate| Some(gate.address)).collect();
        gates
    }

    /// Lets the clients try new keys, again and again, while `disturb` is done again and again: for this time at least,
    /// and on a busy machine for longer, until there is something to judge.
    pub fn rage(&self, time: Duration, mut disturb: impl FnMut()) {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::SeqCst) {
                    self.round(self.rounds.fetch_add(1, Ordering::SeqCst), &is_over);
                }
            });
            // Also where what disturbs fails.
            let _end = Ending(&is_over);
            let start = Instant::now();
            while start.elapsed() < time || self.books.keys().len() < LEAST && start.elapsed() < LONGEST {
                disturb();
            }
        });
    }

    /// Each of some keys is tried by several clients at once.
    fn round(&self, round: usize, is_over: &AtomicBool) {
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    while !is_over.load(Ordering::SeqCst) {
                        let key = next.fetch_add(1, Ordering::SeqCst) / TOGETHER;
                        if key >= KEYS {
                            return;
                        }
                        self.try_until_final(&name(round, key), is_over);
                        if self.asks_again {
                            let (round, most) = match fastrand::usize(..=round) {
                                this if this == round => (round, key + 1),
                                earlier => (earlier, KEYS),
                            };
                            self.try_until_final(&name(round, fastrand::usize(..most)), is_over);
                        }
                    }
                });
            }
        });
    }

    /// As a client does that wants its answer.
    fn try_until_final(&self, key: &str, is_over: &AtomicBool) {
        let start = Instant::now();
        while start.elapsed() < TRIES && !is_over.load(Ordering::SeqCst) {
            let Some(gate) = self.some_gate() else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            let began = self.books.now();
            let answer = request(key).try_send(gate).map(|response| read(&response));
            let one = Try { key: key.into(), began, ended: self.books.now(), answer };
            let pause = match one.answer.as_ref().map(|answer| answer.word.as_str()) {
                Some("executed" | "replayed" | "outcome-unknown") => None,
                Some("released") | None => Some(1),
                Some("accepted") => Some(20),
                Some(_) => Some(50),
            };
            self.books.tries.lock().unwrap().push(one);
            let Some(pause) = pause else { return };
            std::thread::sleep(Duration::from_millis(pause));
        }
    }

    fn some_gate(&self) -> Option<SocketAddr> {
        let gates: Vec<SocketAddr> = self.gates.lock().unwrap().iter().flatten().copied().collect();
        fastrand::choice(gates)
    }

    /// Asks once more for every key, now that everything works, and judges all that happened.
    pub fn judge(self) -> Seen {
        let keys = self.books.keys();
        let next = AtomicUsize::new(0);
        let answers = Mutex::new(BTreeMap::new());
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    while let Some(key) = keys.get(next.fetch_add(1, Ordering::SeqCst)) {
                        let answer = self.last_answer(key);
                        answers.lock().unwrap().insert(key.clone(), answer);
                    }
                });
            }
        });
        let mut answers = answers.into_inner().unwrap();
        let sessions: Vec<Session> = self.databases.iter().map(|url| Session::open(url)).collect();
        // What was lost is said to be unknown as soon as its lease is past; the reapers write it down within a second or so.
        let start = Instant::now();
        let in_flight = "SELECT count(*) FROM oncegate.record WHERE state = 0";
        while start.elapsed() < PATIENCE && sessions.iter().any(|session| session.value(in_flight) != "0") {
            std::thread::sleep(Duration::from_millis(50));
        }
        let ends = loop {
            let mut records = records(&sessions, self.has_several_ids);
            let ends = keys.iter().map(|key| {
                let (state, attempt) = records.remove(key).unzip();
                End { key: key.clone(), answer: answers.get(key).cloned().flatten(), state, attempt }
            });
            let ends: Vec<End> = ends.collect();
            // An attempt whose answer arrived may still be settled late, after its key was said to be unknown.
            let is_late = |end: &&End| end.word() == Some("outcome-unknown") && !end.fits();
            let late: Vec<&End> = ends.iter().filter(is_late).collect();
            if late.is_empty() || start.elapsed() > PATIENCE {
                break ends;
            }
            answers.extend(late.into_iter().map(|end| (end.key.clone(), self.last_answer(&end.key))));
        };
        let (tries, runs) = (self.books.tries.lock().unwrap().clone(), self.books.runs.lock().unwrap().clone());
        Seen { history: History { tries, runs, ends }, accepts: self.accepts }
    }

    /// The answer to one more request, once it is final.
    fn last_answer(&self, key: &str) -> Option<Answer> {
        let start = Instant::now();
        let mut last = None;
        while start.elapsed() < PATIENCE {
            let answer = self.some_gate().and_then(|gate| request(key).try_send(gate)).map(|response| read(&response));
            let is_final = |word: &str| ["executed", "replayed", "outcome-unknown"].contains(&word);
            let done = answer.as_ref().is_some_and(|answer| is_final(&answer.word));
            last = answer;
            if done {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        last
    }
}

/// Ends a storm when dropped.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// What was seen of a storm.
pub struct Seen {
    history: History,
    accepts: bool,
}

impl Seen {
    /// Holds that nothing was wrong, and that there was something to see.
    #[track_caller]
    pub fn expect_right(self) {
        let wrong = judge(&self.history);
        let keys = self.history.ends.len();
        let count = |word: &str| self.history.ends.iter().filter(|end| end.word() == Some(word)).count();
        let lost = self.history.tries.iter().filter(|one| one.answer.is_none()).count();
        let away = self.history.tries.iter().filter(|one| one.word() == Some("store-unavailable")).count();
        let accepted = self.history.tries.iter().filter(|one| one.word() == Some("accepted")).count();
        eprintln!(
            "{keys} keys, {} runs, {} requests ({lost} without an answer, {away} store-unavailable, {accepted} accepted); in \
             the end {} replayed, {} unknown, {} executed only then",
            self.history.runs.len(),
            self.history.tries.len(),
            count("replayed"),
            count("outcome-unknown"),
            count("executed"),
        );
        let shown: Vec<String> = wrong.iter().take(5).map(|wrong| self.show(wrong)).collect();
        assert!(wrong.is_empty(), "{} things are wrong, such as\n{}", wrong.len(), shown.join("\n"));
        assert!(keys >= LEAST, "{keys} keys only");
        assert_eq!(accepted > 0, self.accepts, "{accepted} were accepted");
        let looked = self.history.runs.iter().filter(|run| run.was_claimed.is_some()).count();
        assert!(looked * 2 >= self.history.runs.len(), "{looked} claims were looked up");
        assert!(count("replayed") * 2 >= keys, "most keys should come through");
    }

    /// Holds that no gate failed, and that none sent anybody away for want of its store, but for the few whom a busy
    /// machine keeps waiting for the database.
    #[track_caller]
    pub fn expect_hardly_anybody_sent_away(&self) {
        let tries = &self.history.tries;
        let failed: Vec<&Try> = tries.iter().filter(|one| one.answer.is_none()).collect();
        assert!(failed.is_empty(), "{} of {} without an answer: {:?}", failed.len(), tries.len(), failed[0]);
        self.expect_few_sent_away();
    }

    /// As [`Seen::expect_hardly_anybody_sent_away`], where gates may be killed before they answer.
    #[track_caller]
    pub fn expect_few_sent_away(&self) {
        let tries = &self.history.tries;
        let is_away = |one: &&Try| matches!(one.word(), Some("store-unavailable" | "overloaded"));
        let away = tries.iter().filter(is_away).count();
        assert!(away * 100 <= tries.len(), "{away} of {} were sent away", tries.len());
    }

    /// What happened to the key that something is wrong with.
    fn show(&self, wrong: &Wrong) -> String {
        let name = format!("{wrong:?}");
        let key = name.split('"').nth(1).unwrap_or_default();
        let mut lines: Vec<(Duration, String)> = Vec::new();
        for one in self.history.tries.iter().filter(|one| one.key == key) {
            let answer = one.answer.as_ref().map(show_answer);
            lines.push((one.began, format!("asked, until {:?}: {answer:?}", one.ended)));
        }
        for run in self.history.runs.iter().filter(|run| run.key == key) {
            let body = String::from_utf8_lossy(&run.answer.body);
            let (claimed, attempt) = (run.was_claimed, &run.attempt);
            lines.push((run.began, format!("ran, until {:?}: {body} under {attempt}, claimed {claimed:?}", run.ended)));
        }
        for end in self.history.ends.iter().filter(|end| end.key == key) {
            let answer = end.answer.as_ref().map(show_answer);
            lines.push((Duration::MAX, format!("in the end {answer:?}, {:?} under {:?}", end.state, end.attempt)));
        }
        lines.sort();
        let lines: Vec<String> = lines.into_iter().map(|(at, what)| format!("  {at:?} {what}")).collect();
        format!("{wrong:?}\n{}", lines.join("\n"))
    }
}

fn show_answer(answer: &Answer) -> String {
    let Said { status, head, body } = &answer.said;
    format!("{} {status} {head:?} {}", answer.word, String::from_utf8_lossy(body))
}

impl Try {
    fn word(&self) -> Option<&str> {
        self.answer.as_ref().map(|answer| answer.word.as_str())
    }
}

impl End {
    fn word(&self) -> Option<&str> {
        self.answer.as_ref().map(|answer| answer.word.as_str())
    }
}

impl Books {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.tries.lock().unwrap().iter().map(|one| one.key.clone()).collect();
        keys.sort();
        keys.dedup();
        keys
    }

    /// Runs a request: takes some time, answers what it answers to no other, and releases one key in seven at first.
    fn serve(&self, request: &crate::support::upstream::Request, databases: &[String]) -> Reply {
        let began = self.now();
        let key = request.key().unwrap_or_default();
        let attempt = request.head.get("idempotency-attempt").unwrap_or_default();
        let is_first = !self.runs.lock().unwrap().iter().any(|run| run.key == key);
        let nth: usize = key.rsplit('-').next().and_then(|nth| nth.parse().ok()).unwrap_or_default();
        let releases = is_first && nth.is_multiple_of(7);
        let (status, line) = if releases { (500, "500 Oops") } else { (200, "200 Done") };
        let body = format!("{key} run {}", request.nth).into_bytes();
        let head = vec![format!("content-length: {}", body.len()), format!("x-run: {}", request.nth)];
        let place = {
            let mut runs = self.runs.lock().unwrap();
            runs.push(Run {
                key: key.clone(),
                attempt: attempt.clone(),
                began,
                ended: None,
                answer: Said { status, head: head.clone(), body: body.clone() },
                releases,
                was_claimed: None,
            });
            runs.len() - 1
        };
        let was_claimed = self.look_up(&attempt, databases);
        // Most are quick; a few take longer than a lease.
        let pause = if nth % 50 == 49 { 1_500 } else { fastrand::u64(2..120) };
        std::thread::sleep(Duration::from_millis(pause));
        {
            let mut runs = self.runs.lock().unwrap();
            runs[place].was_claimed = was_claimed;
            runs[place].ended = Some(self.now());
        }
        let mut raw = format!("HTTP/1.1 {line}\r\n{}\r\n\r\n", head.join("\r\n")).into_bytes();
        raw.extend(body);
        Reply::raw(raw)
    }

    /// Whether the claim of an attempt stands; nothing where a database cannot be asked and no other has it.
    fn look_up(&self, attempt: &str, databases: &[String]) -> Option<bool> {
        assert!(attempt.len() == 32 && attempt.bytes().all(|byte| byte.is_ascii_hexdigit()), "{attempt:?}");
        let idle = self.idle.lock().unwrap().pop();
        let open = || databases.iter().map(|url| Session::try_open(url)).collect();
        let sessions: Vec<Session> = idle.map_or_else(open, Ok).ok()?;
        let sql = format!(
            "SELECT FROM oncegate.record WHERE state = 0 AND attempt = '\\x{attempt}' \
             UNION ALL SELECT FROM oncegate.record WHERE state = 2 AND attempt = '\\x{attempt}'"
        );
        let mut is_found = false;
        for session in &sessions {
            is_found |= !session.start(&sql).within(PATIENCE)?.ok()?.is_empty();
        }
        self.idle.lock().unwrap().push(sessions);
        Some(is_found)
    }
}

/// A key of a round.
fn name(round: usize, key: usize) -> String {
    format!("k-{round:04}-{key:04}")
}

/// A client's request. Its path is the key too: that stands in the record.
fn request(key: &str) -> Request {
    Request::post(&format!("/charges/{key}")).key(key).body("{\"amount\":1}")
}

fn read(response: &Response) -> Answer {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let head = response.end_to_end();
    let head = head.iter().map(|(name, value)| format!("{}: {}", text(name).to_ascii_lowercase(), text(value)));
    let said = Said { status: response.status, head: head.collect(), body: response.body.bytes.clone() };
    Answer { word: response.word(), said }
}

/// State and attempt of each key. Of several records of one, the one that gates take: a completed one before all others.
fn records(sessions: &[Session], may_be_several: bool) -> BTreeMap<String, (String, String)> {
    let all =
        "SELECT state, encode(attempt, 'hex'), encode(head, 'escape') FROM oncegate.record ORDER BY state <> 1, id";
    let rows = sessions.iter().flat_map(|session| session.run(all));
    let mut records: BTreeMap<String, (String, String)> = BTreeMap::new();
    for row in rows {
        let [Some(state), Some(attempt), Some(head)] = &row[..] else { panic!("{row:?}") };
        let (_, path) = head.split_once("/charges/").unwrap_or_else(|| panic!("no path in {head:?}"));
        let key: String = path.chars().take("k-0000-0000".len()).collect();
        let state = ["in-flight", "completed", "unknown"][state.parse::<usize>().expect("a number")];
        match records.get(&key) {
            Some(_) => assert!(may_be_several && state != "completed", "two records of {path}"),
            None => drop(records.insert(key, (state.to_owned(), attempt.clone()))),
        }
    }
    records
}
