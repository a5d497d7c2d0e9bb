//! Requests in files, as the documentation of their senders shows them.

use std::path::Path;

/// A recorded request.
pub struct Recorded {
    pub method: String,
    pub target: String,
    /// The lines of the head behind the request line.
    pub headers: Vec<String>,
    pub body: String,
}

/// The requests of a file in `tests/it`: `####` stands between two. Lines that begin with `#`, before the first, say where
/// they come from.
pub fn requests<const N: usize>(path: &str) -> [Recorded; N] {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it").join(path);
    let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{path}: {error}"));
    let comment: usize = text.split_inclusive('\n').take_while(|line| line.starts_with('#')).map(str::len).sum();
    let requests = text[comment..].trim_end().split("\n####\n").map(Recorded::read);
    let requests: Result<[Recorded; N], _> = requests.collect::<Vec<_>>().try_into();
    requests.unwrap_or_else(|found| panic!("{path} has {} requests and not {N}", found.len()))
}

impl Recorded {
    fn read(text: &str) -> Self {
        let (head, body) = text.split_once("\n\n").expect("a head and a body");
        let mut lines = head.lines();
        let line = lines.next().and_then(|line| line.strip_suffix(" HTTP/1.1")).expect("a request line");
        let (method, target) = line.split_once(' ').expect("a method and a target");
        let headers = lines.map(str::to_owned).collect();
        Self { method: method.to_owned(), target: target.to_owned(), headers, body: body.to_owned() }
    }

    /// What goes over the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let Self { method, target, headers, body } = self;
        let headers: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
        format!("{method} {target} HTTP/1.1\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
    }
}
