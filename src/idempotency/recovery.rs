//! What becomes of an outcome that is unknown, besides waiting for an operator.

use std::fmt;
use std::fmt::Write as _;
use std::time::Duration;

use http::{HeaderName, HeaderValue, StatusCode, Uri};

use super::codec::Details;
use super::key::Key;
use super::record::{Record, RecordId, State, Timestamp};
use super::unknown::UnknownCause;

/// `recovery`: what happens to a retry of an unknown outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Answer `outcome-unknown` until an operator, or the late attempt itself, resolves it.
    Hold,
    /// Claim again with a new attempt, which may overlap one that still runs.
    Retry,
    /// Ask the upstream what became of it.
    Probe(Probe),
    /// Send the request again while its client waits: the upstream honours the key itself. Then hold.
    Resend(Resend),
}

/// How a request is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resend {
    /// How often it is sent at most, the first time included.
    pub attempts: u32,
    /// The pause before the second attempt; each one after it is twice as long, up to [`Self::LONGEST_PAUSE`].
    pub backoff: Duration,
}

impl Resend {
    /// The longest pause before a request is sent again.
    pub const LONGEST_PAUSE: Duration = Duration::from_secs(60);
}

/// How the upstream is asked what became of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// What it is asked for, with GET.
    pub path: ProbePath,
    /// How long an outcome must have been unknown. `None` in a configuration: the upstream's `timeout`. Where it is not
    /// known, nothing is asked.
    pub after: Option<Duration>,
    /// How often a worker asks about records whose clients do not come back; never where it is not set.
    pub every: Option<Duration>,
    /// What the worker sends in the place of a client's headers.
    pub headers: Vec<ProbeHeader>,
}

/// A header of the worker's own questions.
#[derive(Clone, PartialEq, Eq)]
pub struct ProbeHeader {
    /// Its name.
    pub name: HeaderName,
    /// Its value, which may be a secret.
    pub value: HeaderValue,
    /// What the configuration says: the value, or where it is.
    pub source: String,
}

/// A path and query with places for the key and the id of the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbePath(Vec<Piece>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Key,
    Id,
}

/// What the upstream's answer to a probe says of the attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finding {
    /// It took effect, and this is its answer.
    Done,
    /// The upstream knows nothing of it: the request may run again.
    Absent,
    /// The answer says neither.
    Unclear,
}

impl Finding {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Done, Self::Absent, Self::Unclear];

    /// The word for it in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Absent => "absent",
            Self::Unclear => "unclear",
        }
    }

    /// By the status of a whole answer.
    #[must_use]
    pub fn of(status: StatusCode) -> Self {
        match status {
            status if status.is_success() => Self::Done,
            StatusCode::NOT_FOUND | StatusCode::GONE => Self::Absent,
            _ => Self::Unclear,
        }
    }
}

impl Recovery {
    /// Whether records keep the keys of their requests.
    #[must_use]
    pub fn keeps_keys(&self) -> bool {
        matches!(self, Self::Probe(Probe { every: Some(_), .. }))
    }
}

impl Probe {
    /// Whether the outcome of a record has been unknown for so long that the upstream may be asked. `unknown_ttl` is that of
    /// the record's route, for records that do not say their own.
    #[must_use]
    pub fn is_due(&self, record: &Record, details: &Details, unknown_ttl: Duration, now: Timestamp) -> bool {
        self.due_in(record, details, unknown_ttl, now) == Some(Duration::ZERO)
    }

    /// After what time the upstream may be asked about a record: none where it may be asked now. `None` where it never is.
    #[must_use]
    pub fn due_in(
        &self,
        record: &Record,
        details: &Details,
        unknown_ttl: Duration,
        now: Timestamp,
    ) -> Option<Duration> {
        let since = match record.state {
            // Its lease has passed, and nothing has noticed yet.
            State::InFlight => record.until,
            State::Unknown => unknown_since(record, details).unwrap_or(record.until.minus(unknown_ttl)),
            State::Completed => return None,
        };
        Some(since.plus(self.after?).since(now))
    }
}

/// How long the next attempt of a request that is sent again may take to claim: for so long the record of the one before counts
/// as in flight.
const CLAIMED_AGAIN_WITHIN: Duration = Duration::from_secs(1);

/// How long a record is still to count as in flight whose attempt ended as unknown, because its gate is about to send the request
/// again; `None` of any other. The gate may have died meanwhile, so that is not for long. `unknown_ttl` is as for [`Probe::due_in`].
#[must_use]
pub fn next_attempt_within(
    record: &Record,
    details: &Details,
    unknown_ttl: Duration,
    now: Timestamp,
) -> Option<Duration> {
    let cause = record.answer.as_ref().filter(|_| record.state == State::Unknown)?;
    if !matches!(UnknownCause::decode(cause), Ok(UnknownCause::SentAgain(_))) {
        return None;
    }
    let since = unknown_since(record, details).unwrap_or(record.until.minus(unknown_ttl));
    Some(since.plus(CLAIMED_AGAIN_WITHIN).since(now)).filter(|left| !left.is_zero())
}

/// When a record turned unknown; nothing of any other, and where an older release claimed it.
#[must_use]
pub fn unknown_since(record: &Record, details: &Details) -> Option<Timestamp> {
    let ttl = details.unknown_ttl.filter(|_| record.state == State::Unknown)?;
    Some(record.until.minus(ttl))
}

impl ProbePath {
    /// Reads the path of a configuration.
    ///
    /// # Errors
    /// The problem, for the author of the configuration.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| Err(format!("`{text}` {what}: use a path such as `/v1/charges/by-key/{{key}}`"));
        if text.contains("://") {
            return Err(format!("`{text}` is a URL, and the route's own upstream is asked: use the path alone"));
        }
        if !text.starts_with('/') || text.starts_with("//") {
            return wrong("does not begin with one `/`");
        }
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once('{') {
            let Some((name, after)) = after.split_once('}') else { return wrong("has a `{` without its `}`") };
            pieces.push(Piece::Text(before.to_owned()));
            pieces.push(match name {
                "key" => Piece::Key,
                "id" => Piece::Id,
                _ => return wrong("has a place that is neither `{key}` nor `{id}`"),
            });
            rest = after;
        }
        pieces.push(Piece::Text(rest.to_owned()));
        if !pieces.iter().any(|piece| *piece == Piece::Key || *piece == Piece::Id) {
            return wrong("asks the same of every record, without `{key}` or `{id}`");
        }
        let path = Self(pieces.into_iter().filter(|piece| *piece != Piece::Text(String::new())).collect());
        let is_text = |piece: &Piece| match piece {
            Piece::Text(text) => text.bytes().all(|byte| byte.is_ascii_graphic() && !b"#}<>\"\\^`|".contains(&byte)),
            Piece::Key | Piece::Id => true,
        };
        if has_dot_segment(text.split('?').next().unwrap_or_default()) {
            return wrong("has a segment `.` or `..`, which upstreams resolve");
        }
        if !path.0.iter().all(is_text) || path.expand("key", &RecordId([0; 32])).is_none() {
            return wrong("is not a path of HTTP, percent-encoded where needed");
        }
        Ok(path)
    }

    /// Whether the path has the key.
    #[must_use]
    pub fn has_key(&self) -> bool {
        self.0.contains(&Piece::Key)
    }

    /// The target for a record; nothing where the key would change which path is meant: then the upstream is not asked.
    #[must_use]
    pub fn target(&self, key: &Key, id: &RecordId) -> Option<Uri> {
        self.expand(key.as_str(), id)
    }

    /// Whether a 404 or 410 says that nothing is known of this key. It does not where the path has a slash of the key: many servers
    /// decode `%2F` before they look for the resource, and say 404 of a key that they know.
    #[must_use]
    pub fn tells_absence(&self, key: &Key) -> bool {
        let in_path = self.0.iter().take_while(|piece| !matches!(piece, Piece::Text(text) if text.contains('?')));
        !has_slash(key.as_str()) || !in_path.into_iter().any(|piece| matches!(piece, Piece::Key))
    }

    /// The key is percent-encoded but for unreserved characters (RFC 3986, section 2.3).
    fn expand(&self, key: &str, id: &RecordId) -> Option<Uri> {
        let mut out = String::new();
        for piece in &self.0 {
            match piece {
                Piece::Text(text) => out.push_str(text),
                Piece::Id => {
                    let _ = write!(out, "{id}");
                }
                Piece::Key if !out.contains('?') && has_odd_segment(key) => return None,
                Piece::Key => {
                    for byte in key.bytes() {
                        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                            out.push(char::from(byte));
                        } else {
                            let _ = write!(out, "%{byte:02X}");
                        }
                    }
                }
            }
        }
        let path = out.split('?').next().unwrap_or_default();
        if has_dot_segment(path) { None } else { out.parse().ok() }
    }
}

/// Whether a key of several segments has one that is empty or made of dots: where slashes are decoded and merged, another path is
/// meant.
fn has_odd_segment(key: &str) -> bool {
    let is_odd = |segment: &str| ["", ".", ".."].contains(&segment);
    has_slash(key) && key.split(['/', '\\']).any(is_odd)
}

fn has_slash(key: &str) -> bool {
    key.contains(['/', '\\'])
}

/// Whether a path has a `.` or `..` that an upstream or a proxy before it may resolve (RFC 3986, section 5.2.4), be it one that
/// decodes slashes first.
fn has_dot_segment(path: &str) -> bool {
    let path = path.to_ascii_lowercase().replace("%2e", ".").replace("%2f", "/").replace("%5c", "/");
    path.split('/').any(|segment| segment == "." || segment == "..")
}

impl fmt::Display for ProbePath {
    /// As [`without_query_values`] shows it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pieces = self.0.iter().map(|piece| match piece {
            Piece::Text(text) => text.as_str(),
            Piece::Key => "{key}",
            Piece::Id => "{id}",
        });
        f.write_str(&without_query_values(&pieces.collect::<String>()))
    }
}

/// A target as it is printed and logged: with `***` for each value of its query, which may be a credential, but `{key}` and
/// `{id}`.
#[must_use]
pub fn without_query_values(target: &str) -> String {
    let Some((path, query)) = target.split_once('?') else { return target.to_owned() };
    let shown = |parameter: &str| match parameter.split_once('=') {
        Some((name, value @ ("" | "{key}" | "{id}"))) => format!("{name}={value}"),
        Some((name, _)) => format!("{name}=***"),
        None => "***".to_owned(),
    };
    let query: Vec<String> = query.split('&').map(shown).collect();
    format!("{path}?{}", query.join("&"))
}

impl fmt::Debug for ProbeHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProbeHeader({})", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_value_of_a_query_is_printed_but_what_stands_for_a_key_or_an_id() {
        for (target, shown) in [
            ("/who", "/who"),
            ("/who?token=secret", "/who?token=***"),
            ("/who?secret", "/who?***"),
            ("/{key}?id={id}&key={key}&token=s=1&empty=&more", "/{key}?id={id}&key={key}&token=***&empty=&***"),
            ("/by/{id}?a=x{key}", "/by/{id}?a=***"),
        ] {
            assert_eq!(without_query_values(target), shown);
        }
        assert_eq!(ProbePath::parse("/by/{key}?token=secret").unwrap().to_string(), "/by/{key}?token=***");
    }

    #[test]
    fn a_key_cannot_leave_its_place() {
        let path = ProbePath::parse("/v1/by-key/{key}?record={id}").unwrap();
        let uri = path.expand("a/..b?c#d%25 é", &RecordId([0xab; 32])).unwrap();
        assert_eq!(uri.path(), "/v1/by-key/a%2F..b%3Fc%23d%2525%20%C3%A9");
        assert_eq!(uri.query(), Some(&*format!("record={}", "ab".repeat(32))));
        assert_eq!(path.to_string(), "/v1/by-key/{key}?record={id}");
        let asked = |text: &str, key: &str| ProbePath::parse(text).unwrap().expand(key, &RecordId([0; 32])).is_some();
        for key in [".", "..", "../..", "a/../b", "a/.", "..\\a", "/", "//", "a/", "/a", "a//b", "a\\"] {
            assert!(!asked("/v1/by-key/{key}", key), "{key}");
            assert!(asked("/v1/by-key?key={key}", key), "{key}");
        }
        assert!(!asked("/v1/.{key}", ".") && asked("/v1/{key}", "...") && asked("/v1/by-{key}", ".."));
    }

    #[test]
    fn what_is_not_found_of_a_key_with_a_slash_in_the_path_may_be_there() {
        for (path, key, expected) in [
            ("/v1/by-key/{key}", "2026-11-7", true),
            ("/v1/by-key/{key}", "2026/11/7", false),
            ("/v1/{key}?id={id}", "\"a\\\\b\"", false),
            ("/v1/charges?key={key}", "2026/11/7", true),
            ("/v1/charges/{id}", "2026/11/7", true),
        ] {
            let key = Key::parse(key, 255).unwrap();
            assert_eq!(ProbePath::parse(path).unwrap().tells_absence(&key), expected, "{path} {}", key.as_str());
        }
    }

    #[test]
    fn what_is_no_path_is_refused() {
        for text in [
            "",
            "x/{key}",
            "//host/{key}",
            "/v1/fixed",
            "/{key",
            "/{other}",
            "/{key}#x",
            "/a b/{key}",
            "/é/{key}",
            "/a/../{key}",
            "/%2E%2e%2f{key}",
        ] {
            assert!(ProbePath::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn only_2xx_and_404_and_410_tell_anything() {
        let finding = |status| Finding::of(StatusCode::from_u16(status).unwrap());
        assert!([200, 201, 204, 299].into_iter().all(|status| finding(status) == Finding::Done));
        assert!([404, 410].into_iter().all(|status| finding(status) == Finding::Absent));
        let unclear = [301, 302, 304, 400, 401, 403, 405, 409, 429, 500, 502, 503, 504];
        assert!(unclear.into_iter().all(|status| finding(status) == Finding::Unclear));
    }
}
