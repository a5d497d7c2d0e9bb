//! The idempotency key: the places that it may come from, and what it may look like.

use std::fmt;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Uri};

use super::fingerprint::Pointer;
use super::json::{self, Fault};
use super::media::{self, Media};
use super::record::{Hex, put, sha256};

pub use template::Template;

/// A valid idempotency key: 1 to `max_length` visible ASCII characters, case-sensitive.
///
/// `Debug` shows it shortened, and nothing else shows it at all but [`Key::as_str`].
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key(Box<str>);

/// `key = { from, required, max_length }`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRule {
    /// Places in order; the first that yields a value wins.
    pub from: Vec<KeySource>,
    /// Whether a request without a key is refused.
    pub required: bool,
    /// Longest key, in characters. The hashes that stand for an event or a fingerprint have 64, whatever it says.
    pub max_length: usize,
}

/// What looking for a key found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// This key.
    Key(Key),
    /// The key is the request's own fingerprint: compute it, then use [`Key::from_fingerprint`].
    Fingerprint,
    /// No place yields a value.
    Absent,
    /// The next place is in the body, which was not given: ask again with it.
    NeedsBody,
}

/// What the types of structured events and of batches begin with.
const EVENT_TYPE: &str = "application/cloudevents";

/// The headers that name an event in binary mode.
static EVENT_HEADERS: [HeaderName; 2] = [HeaderName::from_static("ce-source"), HeaderName::from_static("ce-id")];

impl Found {
    /// The key that was found, or else the request's own fingerprint as its key.
    #[must_use]
    pub fn into_key(self, fingerprint: &[u8; 32]) -> Key {
        match self {
            Self::Key(key) => key,
            Self::Fingerprint | Self::Absent | Self::NeedsBody => Key::from_fingerprint(fingerprint),
        }
    }
}

/// A malformed key. The message describes the problem without the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub String);

impl Default for KeyRule {
    /// The header `Idempotency-Key`, optional, of at most 255 characters.
    fn default() -> Self {
        let header = KeySource::Header(HeaderName::from_static("idempotency-key"));
        Self { from: vec![header], required: false, max_length: 255 }
    }
}

impl KeyRule {
    /// Looks for a key. Without `body`, stops at the first place that is in it. `body` is the whole body.
    ///
    /// # Errors
    /// The first place that has something has no well-formed key. Later places do not count then.
    pub fn find(&self, uri: &Uri, headers: &HeaderMap, body: Option<&[u8]>) -> Result<Found, Invalid> {
        for source in &self.from {
            match source.read(uri, headers, body, self.max_length)? {
                Reading::Absent => {}
                Reading::Found(found) => return Ok(found),
            }
        }
        Ok(Found::Absent)
    }
}

impl Key {
    /// The key of a request whose fingerprint is its key: 64 hexadecimal digits.
    #[must_use]
    pub fn from_fingerprint(digest: &[u8; 32]) -> Self {
        Self(Hex(digest).to_string().into())
    }

    /// Reads a bare or quoted key, as an operator types it.
    ///
    /// # Errors
    /// The text is neither, or not 1 to `max_length` visible ASCII characters.
    pub fn parse(text: &str, max_length: usize) -> Result<Self, Invalid> {
        Self::from_field(text.as_bytes(), max_length)
    }

    /// The key itself. Never log it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key as a header carries it: bare, or quoted where it has to be (RFC 9651, section 3.3.3).
    #[must_use]
    pub fn to_field(&self) -> String {
        if !self.0.contains(['"', '\\', ',', ';']) {
            return self.0.to_string();
        }
        let mut field = String::from('"');
        for char in self.0.chars() {
            if matches!(char, '"' | '\\') {
                field.push('\\');
            }
            field.push(char);
        }
        field + "\""
    }

    /// The key without its middle, for people: at most 8 characters of its beginning and 4 of its end, and at most half of it.
    #[must_use]
    pub fn shortened(&self) -> String {
        let length = self.0.len();
        let begin = (length / 4).min(8);
        // Keys that count up differ at their end.
        let end = (length / 3).min(length / 2 - begin).min(4);
        format!("{}…{}", &self.0[..begin], &self.0[length - end..])
    }

    /// Reads the value of a header field: a bare key, or a quoted one (RFC 9651, section 3.3.3).
    fn from_field(field: &[u8], max_length: usize) -> Result<Self, Invalid> {
        let field = field.trim_ascii();
        if field.first() == Some(&b'"') {
            return Self::from_value(&unquote(field)?, max_length);
        }
        if field.iter().any(|byte| matches!(byte, b'"' | b'\\' | b',' | b';')) {
            return Err(Invalid("an unquoted key has no `\"`, `\\`, `,` or `;`".to_owned()));
        }
        Self::from_value(field, max_length)
    }

    /// Reads a value that stands for nothing but itself.
    pub(super) fn from_value(value: &[u8], max_length: usize) -> Result<Self, Invalid> {
        if value.is_empty() {
            return Err(Invalid("the key is empty".to_owned()));
        }
        let visible = std::str::from_utf8(value).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_graphic()));
        let Some(text) = visible else {
            return Err(Invalid("a key has visible ASCII characters only, and no spaces".to_owned()));
        };
        if text.len() > max_length {
            return Err(Invalid(format!("the key is longer than {max_length} characters")));
        }
        Ok(Self(text.into()))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.shortened())
    }
}

/// One place that a key may come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// `header:NAME`
    Header(HeaderName),
    /// `query:NAME`
    Query(String),
    /// `json:/pointer` (RFC 6901) into a JSON body: a string or an integer.
    Json(Pointer),
    /// `cloudevent`: source and id, from `ce-source` and `ce-id` or from a structured JSON event.
    CloudEvent,
    /// `template:...`: several of the other places, joined.
    Template(Template),
    /// `fingerprint`: the request's own fingerprint.
    Fingerprint,
}

/// What a place has.
enum Reading {
    /// Nothing.
    Absent,
    /// This ends the search.
    Found(Found),
}

impl KeySource {
    /// Reads the configuration's word for a place.
    ///
    /// # Errors
    /// The problem, for the author of the configuration.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("header", name)) => match HeaderName::from_bytes(name.as_bytes()) {
                Ok(name) => Ok(Self::Header(name)),
                Err(_) => Err(format!("`{name}` is not a header name")),
            },
            Some(("query", "")) => Err("`query:` needs the name of a parameter, as `query:request_id`".to_owned()),
            Some(("query", name)) => Ok(Self::Query(name.to_owned())),
            Some(("json", "")) => Err("`json:` needs a JSON pointer, as `json:/request/id`".to_owned()),
            Some(("json", pointer)) => Ok(Self::Json(Pointer::parse(pointer)?)),
            Some(("template", text)) => Ok(Self::Template(Template::parse(text)?)),
            None if text == "cloudevent" => Ok(Self::CloudEvent),
            None if text == "fingerprint" => Ok(Self::Fingerprint),
            None if text.contains('-') && HeaderName::from_bytes(text.as_bytes()).is_ok() => {
                Err(format!("`{text}` is not a place for a key: use `header:{text}` if that is a header"))
            }
            _ if Template::parse(text).is_ok() => {
                Err(format!("`{text}` is not a place for a key: use `template:{text}` to join several"))
            }
            _ => Err(format!(
                "`{text}` is not a place for a key: use `header:NAME`, `query:NAME`, `json:/pointer`, `cloudevent`, \
                 `template:{{header:A}}:{{header:B}}` or `fingerprint`"
            )),
        }
    }

    /// Names it in words of HTTP, for people who send requests.
    #[must_use]
    pub fn in_http(&self) -> String {
        match self {
            Self::Header(name) => format!("the header {}", title_case(name)),
            Self::Query(name) => format!("the query parameter `{name}`"),
            Self::Json(pointer) => format!("the member `{pointer}` of the JSON body"),
            Self::CloudEvent => "the source and the id of a CloudEvent".to_owned(),
            Self::Template(template) => template.in_http(),
            Self::Fingerprint => "the request itself".to_owned(),
        }
    }

    /// The headers that it reads its key from.
    #[must_use]
    pub fn headers(&self) -> Vec<&HeaderName> {
        match self {
            Self::Header(name) => vec![name],
            Self::CloudEvent => EVENT_HEADERS.iter().collect(),
            Self::Template(template) => template.sources().flat_map(Self::headers).collect(),
            Self::Query(_) | Self::Json(_) | Self::Fingerprint => Vec::new(),
        }
    }

    /// Whether it may be in the body.
    #[must_use]
    pub fn may_need_body(&self) -> bool {
        match self {
            Self::Json(_) => true,
            Self::Template(template) => template.sources().any(Self::may_need_body),
            Self::Header(_) | Self::Query(_) | Self::CloudEvent | Self::Fingerprint => false,
        }
    }

    /// Reads what this place has of a request.
    fn read(&self, uri: &Uri, headers: &HeaderMap, body: Option<&[u8]>, max_length: usize) -> Result<Reading, Invalid> {
        let reading = match self {
            Self::Header(name) => from_header(headers, name, max_length),
            Self::Query(name) => from_query(uri.query().unwrap_or_default(), name, max_length),
            Self::Json(pointer) => match body {
                Some(body) => from_json(body, pointer, max_length),
                None => Ok(Reading::Found(Found::NeedsBody)),
            },
            Self::CloudEvent => from_event(headers, body),
            // It says itself which of its places is meant.
            Self::Template(template) => return template.read(uri, headers, body, max_length),
            Self::Fingerprint => Ok(Reading::Found(Found::Fingerprint)),
        };
        reading.map_err(|Invalid(what)| Invalid(format!("{}: {what}", self.in_http())))
    }
}

impl fmt::Display for KeySource {
    /// The configuration's word.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Query(name) => write!(f, "query:{name}"),
            Self::Json(pointer) => write!(f, "json:{pointer}"),
            Self::CloudEvent => f.write_str("cloudevent"),
            Self::Template(template) => write!(f, "template:{template}"),
            Self::Fingerprint => f.write_str("fingerprint"),
        }
    }
}

/// The name of a header as people write it.
#[must_use]
pub fn title_case<N: AsRef<str> + ?Sized>(name: &N) -> String {
    let capital = |word: &str| word.get(..1).map(|first| first.to_ascii_uppercase() + &word[1..]).unwrap_or_default();
    name.as_ref().split('-').map(capital).collect::<Vec<_>>().join("-")
}

/// The value of a quoted string. Nothing may stand behind it.
fn unquote(field: &[u8]) -> Result<Vec<u8>, Invalid> {
    let invalid = |what: &str| Err(Invalid(what.to_owned()));
    let mut value = Vec::with_capacity(field.len());
    let mut bytes = field.iter().copied().skip(1);
    loop {
        match bytes.next() {
            None => return invalid("the quoted key does not end"),
            Some(b'"') => break,
            Some(b'\\') => match bytes.next() {
                Some(byte @ (b'"' | b'\\')) => value.push(byte),
                _ => return invalid("in a quoted key, `\\` stands only before `\"` or `\\`"),
            },
            Some(byte) => value.push(byte),
        }
    }
    match bytes.next() {
        None => Ok(value),
        Some(_) => invalid("the key has parameters, or there is more than one"),
    }
}

fn from_header(headers: &HeaderMap, name: &HeaderName, max_length: usize) -> Result<Reading, Invalid> {
    let mut lines = headers.get_all(name).iter();
    let Some(line) = lines.next() else { return Ok(Reading::Absent) };
    if lines.next().is_some() {
        return invalid("the header stands more than once");
    }
    Key::from_field(line.as_bytes(), max_length).map(found)
}

fn from_query(query: &str, name: &str, max_length: usize) -> Result<Reading, Invalid> {
    let mut values = query.split('&').filter_map(|pair| {
        let (this, value) = pair.split_once('=').unwrap_or((pair, ""));
        (percent_decode(this.as_bytes())? == name.as_bytes()).then_some(value)
    });
    let Some(value) = values.next() else { return Ok(Reading::Absent) };
    if values.next().is_some() {
        return invalid("the parameter stands more than once");
    }
    match percent_decode(value.as_bytes()) {
        Some(value) => Key::from_value(&value, max_length).map(found),
        None => invalid("a `%` is not followed by two hexadecimal digits"),
    }
}

/// A body that is not JSON has no value; so it is with a coded one.
fn from_json(body: &[u8], pointer: &Pointer, max_length: usize) -> Result<Reading, Invalid> {
    let value = match json::locate(json::without_mark(body), pointer) {
        Ok(Some(value)) => value,
        Ok(None) | Err(Fault::Syntax) => return Ok(Reading::Absent),
        Err(fault) => return invalid(describe(fault)),
    };
    if let Some(text) = json::string(value) {
        return Key::from_value(&text, max_length).map(found);
    }
    match value {
        b"null" => Ok(Reading::Absent),
        _ if value.iter().all(|byte| matches!(byte, b'-' | b'0'..=b'9')) => {
            Key::from_value(value, max_length).map(found)
        }
        _ => invalid("the value is neither a string nor an integer"),
    }
}

/// The key of a CloudEvent, in binary or structured mode (CloudEvents HTTP binding 1.0, sections 3.1 and 3.2): a hash
/// of its source and id, which together name it, and which may be longer than a key and hold any character. The type of
/// the body tells the mode (section 3): headers of a structured event or of a batch say nothing.
fn from_event(headers: &HeaderMap, body: Option<&[u8]>) -> Result<Reading, Invalid> {
    match Media::read(headers) {
        Some(media) if media.essence == "application/cloudevents+json" => from_structured_event(body),
        Some(media) if media.essence.starts_with(EVENT_TYPE) => Ok(Reading::Absent),
        None if is_doubtful_event(headers) => invalid("an event has one Content-Type, which tells its mode"),
        _ => from_binary_event(headers),
    }
}

/// Whether a request whose type cannot be told may be a structured event or a batch.
fn is_doubtful_event(headers: &HeaderMap) -> bool {
    let is_event = |line: &HeaderValue| {
        let line = line.as_bytes().trim_ascii_start();
        line.get(..EVENT_TYPE.len()).is_some_and(|start| start.eq_ignore_ascii_case(EVENT_TYPE.as_bytes()))
    };
    headers.get_all(CONTENT_TYPE).iter().any(is_event)
}

fn from_binary_event(headers: &HeaderMap) -> Result<Reading, Invalid> {
    let [source, id] = &EVENT_HEADERS;
    let source = event_header(headers, source)?;
    let id = event_header(headers, id)?;
    match (source, id) {
        (Some(source), Some(id)) => event_key(&source, &id),
        (None, None) => Ok(Reading::Absent),
        _ => invalid("an event has both `ce-source` and `ce-id`"),
    }
}

fn from_structured_event(body: Option<&[u8]>) -> Result<Reading, Invalid> {
    let Some(body) = body else { return Ok(Reading::Found(Found::NeedsBody)) };
    let member = |pointer| {
        let pointer = Pointer::parse(pointer).expect("a pointer of this source");
        match json::locate(json::without_mark(body), &pointer) {
            Ok(value) => Ok(value.and_then(json::string).unwrap_or_default()),
            Err(fault) => Err(Invalid(describe(fault).to_owned())),
        }
    };
    event_key(&member("/source")?, &member("/id")?)
}

fn event_key(source: &[u8], id: &[u8]) -> Result<Reading, Invalid> {
    if source.is_empty() || id.is_empty() {
        return invalid("an event's `source` and `id` are strings and not empty");
    }
    let mut joined = Vec::new();
    put(&mut joined, b"oncegate cloudevent 1");
    put(&mut joined, source);
    put(&mut joined, id);
    Ok(found(Key::from_fingerprint(&sha256(&joined))))
}

/// An attribute of an event in binary mode, decoded as section 3.1.3.2 of the binding says, so that both modes of one
/// event give one key.
fn event_header(headers: &HeaderMap, name: &HeaderName) -> Result<Option<Vec<u8>>, Invalid> {
    let mut lines = headers.get_all(name).iter();
    let Some(line) = lines.next() else { return Ok(None) };
    if lines.next().is_some() {
        return Err(Invalid(format!("the header {} stands more than once", title_case(name))));
    }
    let text = line.as_bytes().trim_ascii();
    let text = match media::quoted(text) {
        Some((value, [])) if text.starts_with(b"\"") => value,
        _ => text.to_vec(),
    };
    match percent_decode(&text) {
        Some(value) => Ok(Some(value)),
        None => {
            Err(Invalid(format!("in the header {}, a `%` is not followed by two hexadecimal digits", title_case(name))))
        }
    }
}

/// Decodes `%XX` (RFC 3986, section 2.1). Nothing where a `%` is not followed by two hexadecimal digits.
#[must_use]
pub fn percent_decode(text: &[u8]) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.iter().copied();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        let value = digit()? << 4 | digit()?;
        decoded.push(u8::try_from(value).ok()?);
    }
    Some(decoded)
}

fn describe(fault: Fault) -> &'static str {
    match fault {
        Fault::Syntax => "the body is not JSON",
        Fault::TooDeep => "the body nests too deep",
        Fault::Ambiguous => "a name stands more than once",
    }
}

fn found(key: Key) -> Reading {
    Reading::Found(Found::Key(key))
}

fn invalid(what: &str) -> Result<Reading, Invalid> {
    Err(Invalid(what.to_owned()))
}

mod template;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod reference;

#[cfg(test)]
mod tests {
    use super::*;

    fn field(text: &[u8]) -> Option<String> {
        Key::from_field(text, 20).ok().map(|key| key.as_str().to_owned())
    }

    #[test]
    fn the_grammar_of_a_header() {
        for (text, key) in [
            ("abc", Some("abc")),
            ("\"abc\"", Some("abc")),
            ("  \"abc\"\t", Some("abc")),
            ("ABC", Some("ABC")),
            ("a=b:c/d'!~", Some("a=b:c/d'!~")),
            ("\"a,b;c\"", Some("a,b;c")),
            ("\"a\\\"b\\\\c\"", Some("a\"b\\c")),
            ("01234567890123456789", Some("01234567890123456789")),
            ("\"01234567890123456789\"", Some("01234567890123456789")),
            // Too long.
            ("012345678901234567890", None),
            ("\"012345678901234567890\"", None),
            // Empty.
            ("", None),
            ("  ", None),
            ("\"\"", None),
            // Lists and parameters.
            ("a,b", None),
            ("a, b", None),
            ("\"a\", \"b\"", None),
            ("a;b=c", None),
            ("\"a\";b=c", None),
            ("\"a\" x", None),
            ("\"a\"\"b\"", None),
            // Quotes and escapes out of place.
            ("\"a", None),
            ("a\"", None),
            ("a\"b", None),
            ("a\\b", None),
            ("\"a\\", None),
            ("\"a\\x\"", None),
            ("\"a\\\"", None),
            // Spaces, control characters, other scripts.
            ("a b", None),
            ("\"a b\"", None),
            ("\" a\"", None),
            ("a\tb", None),
            ("a\u{7f}", None),
            ("é", None),
            ("\"é\"", None),
        ] {
            assert_eq!(field(text.as_bytes()).as_deref(), key, "{text:?}");
        }
        assert_eq!(field(b"a\xff"), None);
    }

    #[test]
    fn an_invalid_key_does_not_show_in_its_error() {
        for text in ["secret key", "secret,key", "\"secret", "\"secret\\key\"", "secretsecretsecretsecret"] {
            let error = Key::parse(text, 20).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn people_see_half_at_most() {
        for (key, shortened) in [
            ("ab", "…"),
            ("abc", "…c"),
            ("abcd", "a…d"),
            ("abcdefghi", "ab…hi"),
            ("order-1130", "or…130"),
            (&format!("{}yyyy", "x".repeat(251)), "xxxxxxxx…yyyy"),
        ] {
            let key = Key::parse(key, 255).unwrap();
            assert_eq!(key.shortened(), shortened);
            assert_eq!(format!("{key:?}"), format!("Key({shortened})"));
        }
    }

    #[test]
    fn a_fingerprint_is_a_key() {
        assert_eq!(Key::from_fingerprint(&[0x0a; 32]).as_str(), "0a".repeat(32));
    }

    fn rule(from: &[&str]) -> KeyRule {
        let from = from.iter().map(|word| KeySource::parse(word).unwrap()).collect();
        KeyRule { from, ..KeyRule::default() }
    }

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines.iter().map(|&(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    /// What one place gives: a key, `absent`, `invalid` or `needs body`.
    fn look(word: &str, target: &str, lines: &[(&'static str, &'static str)], body: Option<&str>) -> String {
        match rule(&[word]).find(&target.parse().unwrap(), &headers(lines), body.map(str::as_bytes)) {
            Ok(Found::Key(key)) => key.as_str().to_owned(),
            Ok(Found::Fingerprint) => "fingerprint".to_owned(),
            Ok(Found::Absent) => "absent".to_owned(),
            Ok(Found::NeedsBody) => "needs body".to_owned(),
            Err(_) => "invalid".to_owned(),
        }
    }

    #[test]
    fn words_survive() {
        for word in ["header:idempotency-key", "query:id", "query:a:b", "json:/a/0", "cloudevent", "fingerprint"] {
            assert_eq!(KeySource::parse(word).unwrap().to_string(), word);
        }
        for word in ["", "header", "header:", "header:a b", "query:", "json:", "json:a", "Header:a", "cloudevent:"] {
            assert!(KeySource::parse(word).is_err(), "{word}");
        }
    }

    #[test]
    fn the_headers_of_a_source_are_those_that_it_reads() {
        for (word, names) in [
            ("header:X-Id", &["x-id"][..]),
            ("cloudevent", &["ce-source", "ce-id"]),
            ("template:{header:x-a}:{query:q}:{cloudevent}", &["x-a", "ce-source", "ce-id"]),
            ("query:q", &[]),
            ("fingerprint", &[]),
        ] {
            assert_eq!(KeySource::parse(word).unwrap().headers(), names, "{word}");
        }
    }

    #[test]
    fn headers_come_once() {
        let look = |lines: &[_]| look("header:Idempotency-Key", "/", lines, None);
        assert_eq!(look(&[]), "absent");
        assert_eq!(look(&[("idempotency-key", "\"a\"")]), "a");
        assert_eq!(look(&[("idempotency-key", "")]), "invalid");
        assert_eq!(look(&[("idempotency-key", "a"), ("idempotency-key", "a")]), "invalid");
    }

    #[test]
    fn parameters_are_decoded_and_come_once() {
        for (target, key) in [
            ("/", "absent"),
            ("/?", "absent"),
            ("/?other=a&keys=b&Key=c", "absent"),
            ("/?key=a", "a"),
            ("/?x=y&key=a%2Fb+c=d", "a/b+c=d"),
            ("/?%6bey=a", "a"),
            ("/?key=%22a%22", "\"a\""),
            ("/?key", "invalid"),
            ("/?key=", "invalid"),
            ("/?key=a&key=a", "invalid"),
            ("/?key=a&k%65y=b", "invalid"),
            ("/?key=a%20b", "invalid"),
            ("/?key=a%", "invalid"),
            ("/?key=a%2", "invalid"),
            ("/?key=a%+1", "invalid"),
            ("/?key=%C3%A9", "invalid"),
        ] {
            assert_eq!(look("query:key", target, &[], None), key, "{target}");
        }
    }

    #[test]
    fn json_has_strings_and_integers() {
        for (body, key) in [
            ("{\"a\":{\"id\":\"x\"}}", "x"),
            ("\u{feff}{\"a\":{\"id\":\"x\"}}", "x"),
            ("{\"a\":{\"id\":\"\\u0078\"}, \"emoji\":\"\\ud83d\"}", "x"),
            ("{\"\\u0061\":{\"id\": 10 }}", "10"),
            ("{\"a\":{\"id\":-5}}", "-5"),
            ("{\"a\":{\"id\":123456789012345678901234567890}}", "123456789012345678901234567890"),
            ("{\"a\":{\"id\":null}}", "absent"),
            ("{\"a\":{}}", "absent"),
            ("{\"a\":[]}", "absent"),
            ("not json", "absent"),
            ("{\"a\":{\"id\":\"x\"}", "absent"),
            ("", "absent"),
            ("{\"a\":{\"id\":\"\"}}", "invalid"),
            ("{\"a\":{\"id\":\"a b\"}}", "invalid"),
            ("{\"a\":{\"id\":\"\\ud83d\"}}", "invalid"),
            ("{\"a\":{\"id\":1.0}}", "invalid"),
            ("{\"a\":{\"id\":1e3}}", "invalid"),
            ("{\"a\":{\"id\":true}}", "invalid"),
            ("{\"a\":{\"id\":[\"x\"]}}", "invalid"),
            ("{\"a\":{\"id\":\"x\",\"id\":\"x\"}}", "invalid"),
            ("{\"a\":{\"id\":\"x\"},\"a\":{}}", "invalid"),
        ] {
            assert_eq!(look("json:/a/id", "/", &[], Some(body)), key, "{body}");
        }
        let deep = format!("{{\"a\":{{\"id\":\"x\"}},\"b\":{}{}}}", "[".repeat(500), "]".repeat(500));
        assert_eq!(look("json:/a/id", "/", &[], Some(&deep)), "invalid");
    }

    #[test]
    fn an_event_is_its_source_and_id() {
        let binary = |source, id| look("cloudevent", "/", &[("ce-source", source), ("ce-id", id)], None);
        let structured = |body: &str| {
            let lines = [("content-type", "application/cloudevents+json; charset=utf-8")];
            look("cloudevent", "/", &lines, Some(body))
        };
        let key = binary("/shop", "7");
        assert_eq!(key.len(), 64);
        assert_eq!(binary("\"/shop\"", "%37"), key);
        assert_eq!(structured("{\"id\":\"7\",\"source\":\"/shop\"}"), key);
        assert_ne!(binary("/shop7", ""), key);
        assert_ne!(binary("/sho", "p7"), key);
        assert_eq!(binary("/shop", "caf%C3%A9"), structured("{\"id\":\"café\",\"source\":\"/shop\"}"));
        assert_eq!(binary(&*Box::leak("s".repeat(1000).into_boxed_str()), "7").len(), 64);

        assert_eq!(binary("/shop", ""), "invalid");
        assert_eq!(binary("/shop", "%"), "invalid");
        assert_eq!(look("cloudevent", "/", &[("ce-id", "7")], None), "invalid");
        assert_eq!(look("cloudevent", "/", &[("ce-id", "7"), ("ce-id", "7"), ("ce-source", "s")], None), "invalid");
        assert_eq!(structured("{\"id\":7,\"source\":\"/shop\"}"), "invalid");
        assert_eq!(structured("{\"id\":\"7\"}"), "invalid");
        assert_eq!(structured("not json"), "invalid");
        assert_eq!(look("cloudevent", "/", &[], None), "absent");
        assert_eq!(look("cloudevent", "/", &[("content-type", "application/json")], Some("{}")), "absent");
        assert_eq!(look("cloudevent", "/", &[("content-type", "application/cloudevents+json")], None), "needs body");
        let headers = [("ce-source", "/other"), ("ce-id", "8"), ("content-type", "application/cloudevents+json")];
        assert_eq!(look("cloudevent", "/", &headers, None), "needs body");
        assert_eq!(look("cloudevent", "/", &headers, Some("{\"id\":\"7\",\"source\":\"/shop\"}")), key);
        let headers = [headers[0], headers[1], ("content-type", "application/cloudevents-batch+json")];
        assert_eq!(look("cloudevent", "/", &headers, Some("[]")), "absent", "a batch has no key");
        let headers = [headers[0], headers[1], headers[2], ("content-type", "application/json")];
        assert_eq!(look("cloudevent", "/", &headers, Some("{}")), "invalid");
        let headers = [("content-type", "application/json"), ("content-type", "text/plain")];
        assert_eq!(look("cloudevent", "/", &headers, Some("{}")), "absent", "it is no event");
    }

    #[test]
    fn the_first_place_that_has_something_decides() {
        let rule = rule(&["header:idempotency-key", "json:/id", "query:key", "fingerprint"]);
        let find = |target: &str, lines: &[_], body| rule.find(&target.parse().unwrap(), &headers(lines), body);
        let key = |text| Ok(Found::Key(Key::parse(text, 255).unwrap()));
        assert_eq!(find("/?key=q", &[("idempotency-key", "h")], None), key("h"));
        assert!(find("/?key=q", &[("idempotency-key", "a b")], Some(b"{\"id\":\"j\"}")).is_err());
        assert_eq!(find("/?key=q", &[], None), Ok(Found::NeedsBody));
        assert_eq!(find("/?key=q", &[], Some(b"{\"id\":\"j\"}")), key("j"));
        assert_eq!(find("/?key=q", &[], Some(b"{}")), key("q"));
        assert!(find("/?key=q", &[], Some(b"{\"id\":[]}")).is_err());
        assert_eq!(find("/", &[], Some(b"")), Ok(Found::Fingerprint));
    }

    #[test]
    fn an_error_names_the_place_and_not_the_key() {
        let error =
            rule(&["query:key"]).find(&"/?key=se%20cret".parse().unwrap(), &HeaderMap::new(), None).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the query parameter `key`: a key has visible ASCII characters only, and no spaces"
        );
    }
}
