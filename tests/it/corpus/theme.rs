//! Runs the cases of a theme, one after the other, through one gate.

use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

use super::cases::{self, Answer, Answers, Case, End, Forwarded};
use super::directory;
use super::recorder::{self, Recorder, Seen};
use super::strict::{self, Exchange, Message, Read};
use crate::support::Gate;
use crate::support::wire::values;

/// The longest wait for an answer, or for the end of a connection.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a request that may have left is waited for.
const MOMENT: Duration = Duration::from_millis(200);

/// Requests up to this many bytes are also sent byte by byte.
const SHORT: usize = 4096;

/// How a case is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// The client sends everything at once.
    AtOnce,
    /// The client sends each byte for itself.
    ByBytes,
    /// About an answer: the request has a key.
    WithKey,
    /// About an answer: the request has none.
    WithoutKey,
    /// About an answer: the request has a key, and the upstream sends each byte for itself.
    FromUpstreamByBytes,
}

impl Manner {
    fn is_by_bytes(self) -> bool {
        matches!(self, Self::ByBytes | Self::FromUpstreamByBytes)
    }
}

struct Stage {
    gate: Gate,
    upstream: Recorder,
    /// Plays so far.
    plays: usize,
    /// Keys of requests whose clients had left before they were forwarded, if they are.
    left: Vec<String>,
    /// What was forwarded, for other parsers to read.
    forwarded: String,
}

/// Runs all cases of a theme and says all that is wrong at once.
#[track_caller]
pub fn theme(name: &str) {
    let (upstream, url) = Recorder::start();
    let gate = Gate::before_url(&url).start();
    let mut stage = Stage { gate, upstream, plays: 0, left: Vec::new(), forwarded: String::new() };
    let cases = cases::read(&directory().join(format!("{name}.txt")));
    let mut wrong = Vec::new();
    for case in &cases {
        let manners: &[Manner] = match case.is_of_upstream() {
            true => &[Manner::WithKey, Manner::WithoutKey, Manner::FromUpstreamByBytes],
            false => &[Manner::AtOnce, Manner::ByBytes],
        };
        for &manner in manners {
            let is_long = case.request("").len() > SHORT || case.script().concat().len() > SHORT;
            if manner.is_by_bytes() && (is_long || case.is_in_one_piece) {
                continue;
            }
            if let Err(why) = stage.play(case, manner) {
                wrong.push(format!("{name}: {} ({manner:?}; {}): {why}", case.title, case.source));
            }
        }
    }
    if let Ok(directory) = std::env::var("CORPUS_FORWARDED") {
        std::fs::write(format!("{directory}/{name}.jsonl"), &stage.forwarded).unwrap();
    }
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

impl Stage {
    fn play(&mut self, case: &Case, manner: Manner) -> Result<(), String> {
        self.plays += 1;
        let key = format!("case-{}", self.plays);
        let closes = case.upstream_closes;
        let by_bytes = manner.is_by_bytes();
        let answer = |bytes| recorder::Answer { bytes, closes, by_bytes };
        let script: Vec<_> = case.script().into_iter().map(answer).collect();
        let is_scripted = !script.is_empty();
        self.upstream.begin(script);
        let request = match manner {
            Manner::AtOnce | Manner::ByBytes => case.request(&key),
            Manner::WithKey | Manner::FromUpstreamByBytes => asked(&format!("Idempotency-Key: {key}\r\n")),
            Manner::WithoutKey => asked(""),
        };
        let mut client = Client::connect(&self.gate, &request, manner == Manner::ByBytes, case.client_ends);
        let expected = match (&case.answers, &case.passed) {
            (_, Some(passed)) if manner == Manner::WithoutKey => passed,
            (Some(answers), _) => answers,
            (None, _) => return Err("no answers".into()),
        };
        let got = client.expect(expected, manner != Manner::WithoutKey);
        let ended = got.as_ref().map_err(String::clone).and_then(|_| self.end(&mut client, case, expected));
        let asked_for = [Forwarded { line: "POST /charges".into(), ..Forwarded::default() }];
        let forwarded = case.forwarded.as_deref().unwrap_or(&asked_for);
        // Judged also where the answer is wrong already: what reached the upstream says more.
        let seen = self.arrived(case, forwarded, manner, &key);
        if case.client_ends && seen.as_ref().is_ok_and(Vec::is_empty) {
            self.left.push(key.clone());
        }
        let got = got.map_err(|why| join(why, seen.as_ref().err()))?;
        ended.map_err(|why| join(why, seen.as_ref().err()))?;
        let seen = seen?;
        if !is_scripted {
            in_order(&got, &seen)?;
        }
        self.record(case, manner, &key, expected, forwarded)
    }

    /// What becomes of the client's connection behind the answers.
    fn end(&mut self, client: &mut Client, case: &Case, expected: &Answers) -> Result<(), String> {
        let is_broken = expected.list.iter().any(|answer| answer.broken);
        let end = if case.client_ends || is_broken { End::Closed } else { case.end.unwrap_or(End::Open) };
        if end == End::Closed {
            return client.expect_end();
        }
        let probe = format!("/probe-{}", self.plays);
        let sent = client.stream.write_all(format!("GET {probe} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes());
        match (client.next(false), end) {
            (Ok(Some(answer)), _) if answer.body == format!("GET {probe}").as_bytes() => Ok(()),
            (Ok(Some(answer)), _) => Err(format!("another request got {}", show(&answer))),
            (Ok(None) | Err(_), End::Either) => Ok(()),
            (Ok(None), _) => Err(format!("the connection ended (sending: {sent:?})")),
            (Err(why), _) => Err(format!("another request got no answer: {why}")),
        }
    }

    /// Holds that exactly this has reached the upstream, and returns it.
    fn arrived(
        &mut self,
        case: &Case,
        forwarded: &[Forwarded],
        manner: Manner,
        key: &str,
    ) -> Result<Vec<Message>, String> {
        let start = std::time::Instant::now();
        let at_least = forwarded.iter().filter(|one| !one.is_optional).count();
        let seen = loop {
            let seen = self.upstream.seen();
            let list: Vec<_> =
                seen.iter().flatten().filter(|seen| !is_probe(seen) && !is_late(seen, &self.left)).cloned().collect();
            // What may have left is given a moment to arrive.
            let wanted = if start.elapsed() < MOMENT { forwarded.len() } else { at_least };
            if seen.is_some() && list.len() >= wanted || start.elapsed() > PATIENCE {
                break list;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let mut whole = Vec::new();
        for one in &seen {
            match one {
                Seen::Whole(message) => whole.push(message.clone()),
                Seen::Bad(why, bytes) => return Err(format!("the upstream got {why}: {}", cut(bytes))),
                Seen::Partial(_) => {}
            }
        }
        for (nth, message) in whole.iter().enumerate() {
            let line = serde_json::json!({
                "case": format!("{}: {}", case.file, case.title), "manner": format!("{manner:?}"), "nth": nth,
                "bytes": BASE64_STANDARD.encode(&message.raw),
            });
            writeln!(self.forwarded, "{line}").unwrap();
        }
        let lines: Vec<String> = seen.iter().map(line_of).collect();
        let expected: Vec<String> = forwarded.iter().map(expected_line).collect();
        let is_left_out = lines.is_empty() && at_least == 0;
        if lines != expected && !is_left_out && !case.forwards_what_it_likes {
            let pending = self.upstream.pending();
            return Err(format!("the upstream got {lines:?} and not {expected:?}; under way: {pending:?}"));
        }
        for (one, expected) in seen.iter().zip(forwarded) {
            if let Seen::Whole(message) = one {
                matches(message, expected, key)?;
            }
        }
        Ok(whole)
    }

    fn record(
        &self,
        case: &Case,
        manner: Manner,
        key: &str,
        expected: &Answers,
        forwarded: &[Forwarded],
    ) -> Result<(), String> {
        let word = expected.list.iter().find_map(|answer| answer.word.as_deref());
        let state = match (&case.record, word) {
            _ if manner == Manner::WithoutKey => return Ok(()),
            (Some(state), _) if state == "any" => return Ok(()),
            (Some(state), _) => state.as_str(),
            (None, Some("executed")) => "completed",
            (None, Some("upstream-broken")) => "unknown",
            (None, _) if case.has_key() && forwarded.is_empty() && !case.forwards_what_it_likes => "none",
            (None, _) => return Ok(()),
        };
        let states = self.gate.states(key);
        let is = match &states[..] {
            [] => "none",
            [one] => one,
            _ => "several",
        };
        if is == state { Ok(()) } else { Err(format!("the record is {is} and not {state}")) }
    }
}

fn join(why: String, more: Option<&String>) -> String {
    more.map_or(why.clone(), |more| format!("{why}; {more}"))
}

/// What a case is asked with that is about an answer.
fn asked(key: &str) -> Vec<u8> {
    format!("POST /charges HTTP/1.1\r\nHost: a\r\n{key}Content-Length: 2\r\n\r\n{{}}").into_bytes()
}

fn is_probe(seen: &Seen) -> bool {
    matches!(seen, Seen::Whole(message) if message.start.starts_with("GET /probe"))
}

/// Whether it belongs to a play before this one, whose client had left before it was sent.
fn is_late(seen: &Seen, left: &[String]) -> bool {
    let Seen::Whole(message) = seen else { return false };
    let has = |text: &str| message.raw.windows(text.len()).any(|window| window == text.as_bytes());
    left.iter().any(|key| has(&format!("{key}\r\n")))
}

fn line_of(seen: &Seen) -> String {
    match seen {
        Seen::Whole(message) => message.start.strip_suffix(" HTTP/1.1").unwrap_or(&message.start).to_owned(),
        Seen::Partial(bytes) | Seen::Bad(_, bytes) => {
            let end = bytes.windows(9).position(|window| window == b" HTTP/1.1").unwrap_or(bytes.len());
            format!("partial {}", bytes[..end].escape_ascii())
        }
    }
}

fn expected_line(forwarded: &Forwarded) -> String {
    let mut line = Vec::new();
    cases::unescape(&forwarded.line, "", &mut line);
    let line = String::from_utf8_lossy(&line);
    if forwarded.is_partial { format!("partial {line}") } else { line.into_owned() }
}

fn matches(message: &Message, expected: &Forwarded, key: &str) -> Result<(), String> {
    let all = || message.fields.iter().chain(&message.trailers);
    for field in &expected.with {
        let (name, escaped) = field.split_once(": ").ok_or("with what?")?;
        let mut value = Vec::new();
        cases::unescape(escaped, key, &mut value);
        if !all().any(|(n, v)| n.eq_ignore_ascii_case(name.as_bytes()) && *v == value) {
            return Err(format!("the upstream misses {field}: {}", cut(&message.raw)));
        }
    }
    for name in &expected.without {
        if all().any(|(n, _)| n.eq_ignore_ascii_case(name.as_bytes())) {
            return Err(format!("the upstream got {name}: {}", cut(&message.raw)));
        }
    }
    if let Some(escaped) = &expected.body {
        let mut body = Vec::new();
        cases::unescape(escaped, "", &mut body);
        if message.body != body {
            return Err(format!("the upstream got the body {} and not {}", cut(&message.body), cut(&body)));
        }
    }
    Ok(())
}

/// Holds that each answer from the upstream is the one to its request: it says what was asked for.
fn in_order(answers: &[Message], seen: &[Message]) -> Result<(), String> {
    let mut seen = seen.iter();
    for answer in answers {
        let is_replay = !values(&answer.fields, "idempotent-replayed").is_empty();
        if strict::status(&answer.start) != Some(200) || is_replay {
            continue;
        }
        let asked = seen.next().map(|message| message.start.strip_suffix(" HTTP/1.1").unwrap_or_default().to_owned());
        let asked = asked.ok_or_else(|| format!("nothing was asked for {}", show(answer)))?;
        if answer.body != asked.as_bytes() && !asked.starts_with("HEAD ") {
            return Err(format!("{asked} got the answer {}", show(answer)));
        }
    }
    Ok(())
}

/// A client that has sent its bytes.
struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
    ended: Option<Ended>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Closed,
    Reset,
}

impl Client {
    fn connect(gate: &Gate, request: &[u8], by_bytes: bool, ends: bool) -> Self {
        let stream = TcpStream::connect(gate.address).expect("the gate listens");
        stream.set_nodelay(true).expect("a socket");
        stream.set_read_timeout(Some(PATIENCE)).expect("not zero");
        stream.set_write_timeout(Some(PATIENCE)).expect("not zero");
        let size = if by_bytes { 1 } else { request.len().max(1) };
        // A gate that has refused may stop reading before all is sent: what it said is what counts.
        let sent = request.chunks(size).try_for_each(|bytes| (&stream).write_all(bytes));
        if ends {
            drop(sent.and_then(|()| stream.shutdown(Shutdown::Write)));
        }
        Self { stream, buffer: Vec::new(), ended: None }
    }

    /// Reads once more.
    fn fill(&mut self) -> Result<(), String> {
        let mut chunk = [0; 16 << 10];
        match self.stream.read(&mut chunk) {
            Ok(0) => self.ended = Some(Ended::Closed),
            Ok(n) => self.buffer.extend_from_slice(&chunk[..n]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(format!("nothing more within {PATIENCE:?} behind {:?}", cut(&self.buffer)));
            }
            // A process that was stopped and goes on finds a read with a timeout interrupted.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => self.ended = Some(Ended::Reset),
        }
        Ok(())
    }

    /// The next answer, or nothing where the connection has ended.
    fn next(&mut self, to_head: bool) -> Result<Option<Message>, String> {
        loop {
            if self.buffer.is_empty() && self.ended.is_some() {
                return Ok(None);
            }
            match strict::answer(&self.buffer, Exchange { to_head, ended: self.ended.is_some() }) {
                Read::More => self.fill()?,
                Read::Whole(message) => {
                    self.buffer.drain(..message.raw.len());
                    return Ok(Some(*message));
                }
                Read::Bad(why) => {
                    let bytes = std::mem::take(&mut self.buffer);
                    return Err(format!("{why}: {}", cut(&bytes)));
                }
            }
        }
    }

    /// Holds that these answers come, and returns them.
    fn expect(&mut self, expected: &Answers, words_count: bool) -> Result<Vec<Message>, String> {
        let mut got = Vec::new();
        let mut list = expected.list.iter().enumerate();
        while let Some((nth, mut answer)) = list.next() {
            if answer.broken {
                self.expect_broken(answer)?;
                break;
            }
            let mut next = self.next(answer.to_head)?;
            while answer.repeats && next.as_ref().is_some_and(|message| has_status(message, answer)) {
                next = self.next(answer.to_head)?;
            }
            if answer.is_optional && next.as_ref().is_some_and(|message| !has_status(message, answer)) {
                answer = list.next().ok_or("something must follow what may be left out")?.1;
            }
            match next {
                Some(message) => {
                    is_answer(&message, answer, words_count)?;
                    got.push(message);
                }
                None if nth == 0 && expected.may_be_missing => return Ok(got),
                None => return Err(format!("answer {} is missing; the connection: {:?}", nth + 1, self.ended)),
            }
        }
        Ok(got)
    }

    fn expect_broken(&mut self, expected: &Answer) -> Result<(), String> {
        loop {
            let exchange = Exchange { to_head: false, ended: self.ended.is_some() };
            match strict::answer(&self.buffer, exchange) {
                Read::More => self.fill()?,
                Read::Bad(why) if why == strict::BROKEN => {
                    let bytes = std::mem::take(&mut self.buffer);
                    let begins = |status| bytes.starts_with(format!("HTTP/1.1 {status} ").as_bytes());
                    let is = expected.statuses.iter().any(begins);
                    // Where its head had not left yet, there is nothing but the end.
                    return if is || bytes.is_empty() { Ok(()) } else { Err(format!("broken, but {}", cut(&bytes))) };
                }
                Read::Bad(why) => return Err(why),
                Read::Whole(message) => return Err(format!("passed for complete: {}", show(&message))),
            }
        }
    }

    /// Holds that nothing more comes but the end.
    fn expect_end(&mut self) -> Result<(), String> {
        match self.next(false)? {
            Some(message) => Err(format!("another answer: {}", show(&message))),
            None if self.ended == Some(Ended::Reset) => Err("a reset".into()),
            None => Ok(()),
        }
    }
}

fn has_status(message: &Message, expected: &Answer) -> bool {
    strict::status(&message.start).is_some_and(|status| expected.statuses.contains(&status))
}

fn is_answer(message: &Message, expected: &Answer, words_count: bool) -> Result<(), String> {
    let wrong = |what: &str| Err(format!("not {what}: {}", show(message)));
    if !has_status(message, expected) {
        return wrong(&format!("{:?}", expected.statuses));
    }
    if let Some(word) = &expected.word {
        let status = values(&message.fields, "idempotency-status").first().map(|word| String::from_utf8_lossy(word));
        let problem: serde_json::Value = serde_json::from_slice(&message.body).unwrap_or_default();
        // What the gate says of a key it says only where there was one.
        let is_of_a_key = ["executed", "replayed", "released"].contains(&word.as_str());
        let said = status.is_some_and(|status| status == word.as_str()) || problem["code"] == word.as_str();
        if !said && (words_count || !is_of_a_key) {
            return wrong(word);
        }
    }
    if let Some(escaped) = &expected.body {
        let mut body = Vec::new();
        cases::unescape(escaped, "", &mut body);
        if message.body != body {
            return wrong(escaped);
        }
    }
    Ok(())
}

fn show(message: &Message) -> String {
    cut(&message.raw)
}

fn cut(bytes: &[u8]) -> String {
    let shown = bytes[..bytes.len().min(300)].escape_ascii().to_string();
    if bytes.len() > 300 { format!("{shown}... ({} bytes)", bytes.len()) } else { shown }
}
