//! The format of the corpus.
//!
//! A file is one theme. A case begins with `== ` and its title; a line without meaning begins with `#`. Then:
//!
//! - `from:` the section, or the advisory, that it stands for;
//! - `> ` lines that the client sends, `< ` lines that the upstream answers with. Each line ends in CR LF, unless a `\`
//!   stands at its end. `\r \n \t \0 \\ \xNN` are what they are elsewhere; `\k` is a key of the case's own;
//!   `\{TEXT*N}` is TEXT, N times. `<<` begins the answer to the next request;
//! - `then:` what follows the bytes: `client ends` (it sends no more), `upstream closes`; or
//!   `nothing in pieces` where bytes behind the answer count, which come too late if they come one by one;
//! - `answers:` what the client gets, in order, interim answers too: a status (`400|413` is either, `?100` may be left out, `*103` may come any number of times), and behind
//!   it the word in
//!   `Idempotency-Status` or the problem's code, `HEAD` where it answers one, `broken` where its body must not pass for
//!   complete, `"TEXT"` for its body. `none` for nothing; `maybe` before the first that may be missing;
//! - `end:` `open` (another request is answered), `closed` (the end of the stream and no reset) or `either`;
//! - `forwarded:` each request that must reach the upstream: method and target; `partial` before them where it must
//!   break off, `perhaps` before that where it may not have left; `nothing` where none may, `any` where that is left open. `with:` a header it must have, `without:` one that it must not have,
//!   `body:` its body, for the request of the line before;
//! - `record:` the state of the key's record: `none`, `completed`, `unknown`, or `any`.
//!
//! A case without `>` is about an answer: it is asked for with a key and without. `passed:` then says what a
//! client without a key gets, where that is not the same.

use std::path::Path;

/// One case.
#[derive(Clone, Debug, Default)]
pub struct Case {
    pub file: String,
    pub title: String,
    pub source: String,
    /// What the client sends, still escaped.
    sent: Vec<String>,
    /// What the upstream answers, still escaped.
    answered: Vec<Vec<String>>,
    pub client_ends: bool,
    pub upstream_closes: bool,
    /// What stands behind the answer is seen for certain only where it comes with it.
    pub is_in_one_piece: bool,
    pub answers: Option<Answers>,
    pub passed: Option<Answers>,
    pub end: Option<End>,
    pub forwarded: Option<Vec<Forwarded>>,
    /// It may be forwarded or not.
    pub forwards_what_it_likes: bool,
    pub record: Option<String>,
}

/// What the client gets.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    pub list: Vec<Answer>,
    /// The connection may also just end.
    pub may_be_missing: bool,
}

/// One answer.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// Any of these.
    pub statuses: Vec<u16>,
    pub word: Option<String>,
    /// It may be left out.
    pub is_optional: bool,
    /// It may come any number of times.
    pub repeats: bool,
    pub to_head: bool,
    pub broken: bool,
    pub body: Option<String>,
}

/// What becomes of the client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Open,
    Closed,
    Either,
}

/// What reaches the upstream.
#[derive(Clone, Debug, Default)]
pub struct Forwarded {
    /// Method and target.
    pub line: String,
    pub is_partial: bool,
    /// It may not have left.
    pub is_optional: bool,
    pub with: Vec<String>,
    pub without: Vec<String>,
    pub body: Option<String>,
}

impl Case {
    /// Whether it is about an answer only.
    pub fn is_of_upstream(&self) -> bool {
        self.sent.is_empty()
    }

    /// The bytes that the client sends.
    pub fn request(&self, key: &str) -> Vec<u8> {
        bytes(&self.sent, key)
    }

    /// What the upstream answers, request for request.
    pub fn script(&self) -> Vec<Vec<u8>> {
        self.answered.iter().map(|lines| bytes(lines, "")).collect()
    }

    pub fn has_key(&self) -> bool {
        self.sent.iter().any(|line| line.contains(r"\k"))
    }

    fn line(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "from" => value.clone_into(&mut self.source),
            "then" => match value {
                "client ends" => self.client_ends = true,
                "upstream closes" => self.upstream_closes = true,
                "nothing in pieces" => self.is_in_one_piece = true,
                _ => return Err(format!("then what? {value}")),
            },
            "answers" => self.answers = Some(answers(value)?),
            "passed" => self.passed = Some(answers(value)?),
            "end" => {
                self.end = Some(match value {
                    "open" => End::Open,
                    "closed" => End::Closed,
                    "either" => End::Either,
                    _ => return Err(format!("no such end: {value}")),
                });
            }
            "forwarded" => {
                let list = self.forwarded.get_or_insert_default();
                if value == "any" {
                    self.forwards_what_it_likes = true;
                } else if value != "nothing" {
                    let line = value.strip_prefix("perhaps ");
                    let is_optional = line.is_some();
                    let value = line.unwrap_or(value);
                    let line = value.strip_prefix("partial ");
                    let is_partial = line.is_some();
                    let line = line.unwrap_or(value).to_owned();
                    list.push(Forwarded { line, is_partial, is_optional, ..Forwarded::default() });
                }
            }
            "with" | "without" | "body" => {
                let last = self.forwarded.as_mut().and_then(|list| list.last_mut());
                let last = last.ok_or_else(|| format!("{name} without a request"))?;
                match name {
                    "with" => last.with.push(value.to_owned()),
                    "without" => last.without.push(value.to_owned()),
                    _ => last.body = Some(value.to_owned()),
                }
            }
            "record" => self.record = Some(value.to_owned()),
            _ => return Err(format!("what is {name}?")),
        }
        Ok(())
    }

    fn is_whole(&self) -> bool {
        let judged = self.is_of_upstream() || self.end.is_some() && self.forwarded.is_some();
        !self.source.is_empty() && self.answers.is_some() && judged
    }

    /// Whether it promises an open connection behind an answer that may come before the body has: such an answer ends
    /// the connection where it is first, so the case would hold or not by chance.
    fn is_a_race(&self) -> bool {
        let has_body = |line: &String| line.starts_with("Content-Length: ") || line.starts_with("Transfer-Encoding: ");
        let stays_here = self.forwarded.as_ref().is_some_and(Vec::is_empty);
        self.end == Some(End::Open) && stays_here && self.sent.iter().any(has_body)
    }
}

/// The cases of a file.
pub fn read(path: &Path) -> Vec<Case> {
    let text = std::fs::read_to_string(path).unwrap();
    let file = path.file_stem().unwrap().to_string_lossy().into_owned();
    let mut cases: Vec<Case> = Vec::new();
    for (nth, line) in text.lines().enumerate() {
        let place = format!("{}:{}", path.display(), nth + 1);
        if let Some(title) = line.strip_prefix("== ") {
            cases.push(Case { file: file.clone(), title: title.into(), ..Case::default() });
            continue;
        }
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let case = cases.last_mut().unwrap_or_else(|| panic!("{place}: no case yet"));
        let after = |mark: &str| line.strip_prefix(mark).map(|rest| rest.strip_prefix(' ').unwrap_or(rest).to_owned());
        if line == "<<" {
            case.answered.push(Vec::new());
        } else if let Some(line) = after(">") {
            case.sent.push(line);
        } else if let Some(line) = after("<") {
            if case.answered.is_empty() {
                case.answered.push(Vec::new());
            }
            case.answered.last_mut().unwrap().push(line);
        } else {
            let (name, value) = line.split_once(": ").unwrap_or_else(|| panic!("{place}: what is this?"));
            case.line(name, value).unwrap_or_else(|why| panic!("{place}: {why}"));
        }
    }
    for case in &cases {
        assert!(case.is_whole(), "{file}: {}: something is missing", case.title);
        assert!(!case.is_a_race(), "{file}: {}: the end of the connection is open to chance", case.title);
    }
    cases
}

fn answers(text: &str) -> Result<Answers, String> {
    let mut answers = Answers::default();
    if text == "none" {
        return Ok(answers);
    }
    let text = text.strip_prefix("maybe ").inspect(|_| answers.may_be_missing = true).unwrap_or(text);
    for item in text.split(", ") {
        let mut words = item.split(' ');
        let (is_optional, repeats) = (item.starts_with(['?', '*']), item.starts_with('*'));
        let statuses = words
            .next()
            .map(|codes| codes.trim_start_matches(['?', '*']))
            .map(|codes| codes.split('|').map(str::parse).collect::<Result<_, _>>());
        let statuses = statuses.and_then(Result::ok).ok_or_else(|| format!("no status: {item}"))?;
        let mut answer = Answer { statuses, is_optional, repeats, ..Answer::default() };
        if let Some((_, body)) = item.split_once('"') {
            answer.body = Some(body.strip_suffix('"').ok_or("a body without an end")?.to_owned());
        }
        for word in words.take_while(|word| !word.starts_with('"')) {
            match word {
                "HEAD" => answer.to_head = true,
                "broken" => answer.broken = true,
                word => answer.word = Some(word.to_owned()),
            }
        }
        answers.list.push(answer);
    }
    Ok(answers)
}

fn bytes(lines: &[String], key: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for line in lines {
        // An even number of them stands for half as many.
        let slashes = line.bytes().rev().take_while(|byte| *byte == b'\\').count();
        let (line, end) = if slashes % 2 == 1 { (&line[..line.len() - 1], "") } else { (&line[..], "\r\n") };
        unescape(line, key, &mut out);
        out.extend_from_slice(end.as_bytes());
    }
    out
}

/// The bytes that an escaped text stands for.
pub fn unescape(text: &str, key: &str, out: &mut Vec<u8>) {
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.extend_from_slice(&rest.as_bytes()[..at]);
        let escape = rest.as_bytes().get(at + 1).copied().unwrap_or_else(|| panic!("nothing is escaped in {text}"));
        let mut used = 2;
        match escape {
            b'r' => out.push(b'\r'),
            b'n' => out.push(b'\n'),
            b't' => out.push(b'\t'),
            b'0' => out.push(0),
            b'\\' => out.push(b'\\'),
            b'k' => out.extend_from_slice(key.as_bytes()),
            b'x' => {
                out.push(u8::from_str_radix(&rest[at + 2..at + 4], 16).unwrap());
                used = 4;
            }
            b'{' => {
                let end = rest[at..].find('}').unwrap_or_else(|| panic!("no end in {text}"));
                let (what, times) = rest[at + 2..at + end].rsplit_once('*').unwrap();
                let mut one = Vec::new();
                unescape(what, key, &mut one);
                out.extend(one.repeat(times.parse().unwrap()));
                used = end + 1;
            }
            _ => panic!("no such escape in {text}"),
        }
        rest = &rest[at + used..];
    }
    out.extend_from_slice(rest.as_bytes());
}

#[test]
fn escapes_are_bytes() {
    let lines = [r"a\r\n\0\xff\\".to_owned(), r"\{xy\t*2}\k\".to_owned()];
    assert_eq!(bytes(&lines, "key"), b"a\r\n\0\xff\\\r\nxy\txy\tkey");
}
