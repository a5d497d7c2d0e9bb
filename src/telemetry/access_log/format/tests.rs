use http::{HeaderMap, Method, StatusCode};
use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::idempotency::record::{RecordId, RequestId, Timestamp};
use crate::telemetry::notes::Noted;
use crate::telemetry::outcome::Outcome;
use crate::telemetry::report::Seen;

fn facts(target: &str, headers: &[(&'static str, &[u8])]) -> Facts {
    let headers = headers
        .iter()
        .map(|(name, value)| (http::HeaderName::from_static(name), HeaderValue::from_bytes(value).unwrap()));
    let headers: HeaderMap = headers.collect();
    Facts {
        since: Duration::from_millis(1_767_225_600_123),
        took: Duration::from_micros(1500),
        request: RequestId(std::num::NonZeroU64::MIN),
        peer: [192, 0, 2, 1].into(),
        is_secure: false,
        seen: Seen::of_head(&Method::POST, &target.parse().unwrap(), Version::HTTP_11, &headers),
        noted: Noted {
            client: Some([198, 51, 100, 7].into()),
            key: Some("or…-1".into()),
            record: Some(RecordId([7; 32])),
            attempt: Some(Timestamp(1_767_225_600_124)),
            attempts: 1,
            upstream: Some("app".into()),
            upstream_time: Some(Duration::from_micros(900)),
            store_time: Some(Duration::from_micros(300)),
            ..Noted::default()
        },
        status: Some(StatusCode::CREATED),
        bytes: 12,
        route: Some("charges".into()),
        outcome: Some(Outcome::Executed),
    }
}

fn line(format: Format, facts: &Facts) -> String {
    let mut out = Vec::new();
    write(&mut out, format, facts);
    String::from_utf8(out).unwrap()
}

#[test]
fn a_line_of_json_has_what_is_known() {
    let facts = facts(
        "/charges?key=secret",
        &[("host", b"a.example"), ("user-agent", b"curl/8"), ("referer", b"https://u:p@b.example/x?token=1#y")],
    );
    let record = RecordId([7; 32]);
    let expected = format!(
        "{{\"time\":\"2026-01-01T00:00:00.123Z\",\"request\":\"{}\",\"client\":\"198.51.100.7\",\"method\":\"POST\",\
         \"path\":\"/charges\",\"host\":\"a.example\",\"protocol\":\"HTTP/1.1\",\"status\":201,\"bytes\":12,\
         \"micros\":1500,\"route\":\"charges\",\"outcome\":\"executed\",\"key\":\"or…-1\",\"record\":\"{record}\",\
         \"attempt\":\"2026-01-01T00:00:00.124Z\",\"attempts\":1,\"upstream\":\"app\",\"upstream_micros\":900,\
         \"store_micros\":300,\"user_agent\":\"curl/8\",\"referer\":\"https://b.example/x\"}}\n",
        facts.request
    );
    assert_eq!(line(Format::Json, &facts), expected);
}

#[test]
fn a_combined_line_is_that_of_apache() {
    let known = facts("/charges?key=secret", &[("user-agent", b"a\"b\\c\td\xff"), ("referer", b"/x?y")]);
    let expected = "198.51.100.7 - - [01/Jan/2026:00:00:00 +0000] \"POST /charges HTTP/1.1\" 201 12 \"/x\" \
                    \"a\\\"b\\\\c\\x09d\\xff\"\n";
    assert_eq!(line(Format::Combined, &known), expected);
    let unknown = Facts { seen: Seen::of_line(b"secrets"), status: None, bytes: 0, ..known };
    let expected = "198.51.100.7 - - [01/Jan/2026:00:00:00 +0000] \"-\" 499 - \"-\" \"-\"\n";
    assert_eq!(line(Format::Combined, &unknown), expected);
}

#[test]
fn of_a_malformed_request_line_only_a_target_is_taken() {
    let seen = |line: &[u8]| {
        let Seen { method, target, version, .. } = Seen::of_line(line);
        (method.map(|method| method.to_string()), target.map(|target| target.path().to_owned()), version)
    };
    let full = (Some("GET".into()), Some("/a".into()), Some(Version::HTTP_11));
    assert_eq!(seen(b"GET /a?b HTTP/1.1"), full);
    assert_eq!(seen(b"GET /a HTTP/3"), (full.0.clone(), full.1.clone(), None));
    assert_eq!(seen(b"G(T /a HTTP/1.1"), (None, None, full.2));
    assert_eq!(seen(b"GET http://user:secret@/a"), (full.0, None, None));
    assert_eq!(seen(b""), (None, None, None));
}

/// As a browser reads them, and a client that leaves a part out.
#[test]
fn no_user_stands_in_a_referer_or_a_host() {
    for (referer, shown) in [
        ("https://u:p@b.example/x?token=1#y", "https://b.example/x"),
        ("https://b.example/u:p@x", "https://b.example/u:p@x"),
        ("http:u:p@b.example/x", "http:b.example/x"),
        ("http:/u:p@b.example/x", "http:/b.example/x"),
        ("http:\\\\u:p@b.example\\x", "http:\\\\b.example\\x"),
        ("//u:p@b.example", "//b.example"),
        ("u:p@b.example/x", "b.example/x"),
        ("/x@y", "/x@y"),
        ("about:blank", "about:blank"),
        ("", ""),
    ] {
        assert_eq!(String::from_utf8(without_query(referer.as_bytes())).unwrap(), shown, "{referer}");
    }
    let (mut line, known) = (Vec::new(), facts("/", &[("host", b"u:secret@a.example")]));
    json(&mut line, &known);
    let line = String::from_utf8(line).unwrap();
    assert!(line.contains("\"host\":\"a.example\"") && !line.contains("secret"), "{line}");
}

/// The fields of a combined line, unescaped.
fn parse_combined(line: &str) -> Option<Vec<Vec<u8>>> {
    let mut rest = line.strip_suffix('\n')?.as_bytes();
    let mut fields = Vec::new();
    while !rest.is_empty() {
        let quoted = rest[0] == b'"';
        let end = if quoted {
            b'"'
        } else if rest[0] == b'[' {
            b']'
        } else {
            b' '
        };
        let (mut field, mut at) = (Vec::new(), usize::from(end != b' '));
        while at < rest.len() && rest[at] != end {
            if quoted && rest[at] == b'\\' {
                at += 1;
                if rest[at] == b'x' {
                    field.push(u8::from_str_radix(std::str::from_utf8(&rest[at + 1..at + 3]).ok()?, 16).ok()?);
                    at += 3;
                    continue;
                }
            }
            field.push(rest[at]);
            at += 1;
        }
        fields.push(field);
        at += usize::from(end != b' ');
        rest = rest.get(at..)?;
        if let Some((space, after)) = rest.split_first() {
            (*space == b' ').then_some(())?;
            rest = after;
        }
    }
    Some(fields)
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    // What a header may hold (RFC 9110, 5.5), as rude as that can be.
    let byte = prop_oneof![
        3 => any::<u8>(),
        2 => prop_oneof![Just(b'"'), Just(b'\\'), Just(b'\t'), Just(b'x'), Just(b' '), Just(b'}'), Just(0xC3), Just(0xBC)],
    ];
    let byte = byte.prop_map(|byte| if byte == b'\t' || byte >= b' ' && byte != 0x7f { byte } else { b'"' });
    proptest::collection::vec(byte, 0..800)
}

proptest! {
    /// Whatever a client sends, a line is one line, and each field is that field again.
    #[test]
    fn a_line_parses_back(agent in value(), path in "/[!-~&&[^?#<>`{}|^\\[\\]]]{0,60}", referer in value()) {
        let Ok(_) = path.parse::<Uri>() else { return Ok(()) };
        let facts = facts(&path, &[("user-agent", &agent), ("referer", &referer)]);
        let is_same = |found: &[u8], sent: &[u8]| match found.strip_suffix(CUT) {
            Some(part) if !sent.ends_with(CUT) => sent.starts_with(part) && part.len() > MAX_AGENT / 12,
            _ => found == sent,
        };
        let json = line(Format::Json, &facts);
        prop_assert_eq!(json.find('\n'), Some(json.len() - 1));
        prop_assert!(json.len() < 4096);
        let parsed: Value = serde_json::from_str(&json).unwrap();
        let text = |name: &str| parsed[name].as_str().unwrap().as_bytes().to_vec();
        let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned().into_bytes();
        prop_assert!(is_same(&text("user_agent"), &lossy(&agent)));
        prop_assert!(is_same(&text("referer"), &lossy(&without_query(&referer))));
        prop_assert_eq!(text("path"), path.as_bytes());
        prop_assert_eq!(text("outcome"), b"executed");

        let combined = line(Format::Combined, &facts);
        prop_assert_eq!(combined.find('\n'), Some(combined.len() - 1));
        let fields = parse_combined(&combined).unwrap();
        prop_assert_eq!(fields.len(), 9);
        prop_assert_eq!(&fields[4], &format!("POST {path} HTTP/1.1").into_bytes());
        prop_assert!(is_same(&fields[7], &without_query(&referer)));
        prop_assert!(is_same(&fields[8], &agent));
    }
}

#[test]
fn a_long_value_is_cut() {
    let long = format!("/{}", "a".repeat(5000));
    let agent = vec![b'"'; 5000];
    let facts = facts(&long, &[("user-agent", &agent), ("referer", &agent), ("host", &agent)]);
    for format in FORMATS {
        let line = line(format.1, &facts);
        assert!(line.len() < 4096 && line.contains("aaa..."), "{}", line.len());
    }
    let parsed: Value = serde_json::from_str(&line(Format::Json, &facts)).unwrap();
    assert!(parsed["user_agent"].as_str().unwrap().ends_with("\"\"..."));
}
