//! The table of the module as people read it, with cases: `credential.golden.md`, written from what [`Credential::of`] does.
//!
//! A test compares. To accept a change: `ONCEGATE_BLESS=1 cargo test golden`, then read the difference.

use std::fmt::Write as _;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::super::codec::Reader;
use super::super::golden::compare;
use super::super::scope::ClientCertificate;
use super::*;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/idempotency/credential.golden.md");

/// Tokens of the table, under the names that it shows. Their second parts are, in the same order:
const TOKENS: &[(&str, &str, &str)] = &[
    ("ANN", "eyJhbGciOiJIUzI1NiJ9", r#"{"iss":"https://id.example","sub":"ann","exp":1}"#),
    ("ANN-LATER", "eyJhbGciOiJIUzI1NiJ9", r#"{"exp":2,"sub":"ann","iss":"https://id.example"}"#),
    ("BOB", "eyJhbGciOiJIUzI1NiJ9", r#"{"iss":"https://id.example","sub":"bob"}"#),
    ("NO-ISS", "eyJhbGciOiJIUzI1NiJ9", r#"{"sub":"ann"}"#),
    ("ESCAPED", "eyJhbGciOiJIUzI1NiJ9", r#"{"\u0069ss":"https:\/\/id.example","sub":"\u0061nn"}"#),
    ("EMPTY-SUB", "eyJhbGciOiJIUzI1NiJ9", r#"{"sub":""}"#),
    ("NO-SUB", "eyJhbGciOiJIUzI1NiJ9", r#"{"iss":"https://id.example"}"#),
    ("SUB-IS-7", "eyJhbGciOiJIUzI1NiJ9", r#"{"sub":7}"#),
    ("ISS-IS-LIST", "eyJhbGciOiJIUzI1NiJ9", r#"{"sub":"ann","iss":["a"]}"#),
    ("TWO-SUBS", "eyJhbGciOiJIUzI1NiJ9", r#"{"sub":"ann","sub":"bob"}"#),
    ("TWO-ISS", "eyJhbGciOiJIUzI1NiJ9", r#"{"iss":"a","sub":"ann","iss":"b"}"#),
    ("SUB-DEEPER", "eyJhbGciOiJIUzI1NiJ9", r#"{"user":{"sub":"ann"}}"#),
    ("ARRAY", "eyJhbGciOiJIUzI1NiJ9", r#"["sub","ann"]"#),
    ("NOT-JSON", "eyJhbGciOiJIUzI1NiJ9", "sub=ann"),
    ("CUT-OFF", "eyJhbGciOiJIUzI1NiJ9", r#"{"sub":"ann""#),
    ("NO-HEADER", "", r#"{"sub":"ann"}"#),
    ("ODD-HEADER", "e+J", r#"{"sub":"ann"}"#),
];

/// A case: the lines of headers, and whether the client has a certificate. `{NAME}` is a token of [`TOKENS`].
type Case = (&'static [(&'static str, &'static str)], bool);

const BASIC_ONE: &str = "Basic YW5uOm9uZQ==";
const BASIC_TWO: &str = "Basic YW5uOnR3bw==";

/// Cases under a title.
const SECTIONS: &[(&str, &[Case])] = &[
    (
        "Each alone",
        &[
            (&[], false),
            (&[], true),
            (&[("x-api-key", "key-1")], false),
            (&[("authorization", BASIC_ONE)], false),
            (&[("authorization", "Bearer {ANN}.sig")], false),
            (&[("authorization", "Bearer opaque-1")], false),
            (&[("authorization", "Digest username=\"ann\"")], false),
            (&[("cookie", "s=1")], false),
            (&[("cookie", "s=1")], true),
            (&[("proxy-authorization", BASIC_ONE)], false),
        ],
    ),
    (
        "Two of them",
        &[
            (&[("x-api-key", "key-1"), ("authorization", BASIC_ONE)], false),
            (&[("x-api-key", "key-1"), ("authorization", "Bearer {ANN}.sig")], false),
            (&[("x-api-key", "key-1"), ("authorization", "Bearer opaque-1")], false),
            (&[("x-api-key", "key-1"), ("cookie", "s=1")], false),
            (&[("x-api-key", "key-1"), ("authorization", BASIC_ONE), ("cookie", "s=1")], true),
            (&[("x-api-key", "key-1")], true),
            (&[("authorization", BASIC_ONE), ("cookie", "s=1")], false),
            (&[("authorization", "Bearer {ANN}.sig"), ("cookie", "s=1")], true),
            (&[("authorization", "Bearer opaque-1"), ("cookie", "s=1")], true),
        ],
    ),
    (
        "What changes",
        &[
            (&[("authorization", BASIC_TWO)], false),
            (&[("authorization", "Bearer {ANN-LATER}.sig")], false),
            (&[("authorization", "Bearer {ANN}.gis")], false),
            (&[("authorization", "Bearer {BOB}.sig")], false),
            (&[("authorization", "Bearer opaque-2")], false),
            (&[("x-api-key", "key-2")], false),
            (&[("cookie", "s=2")], false),
        ],
    ),
    (
        "Several lines",
        &[
            (&[("x-api-key", "key-1"), ("x-api-key", "key-2")], false),
            (&[("x-api-key", "key-1, key-2")], false),
            (&[("authorization", BASIC_ONE), ("authorization", BASIC_ONE)], false),
            (&[("authorization", BASIC_ONE), ("authorization", "Bearer {ANN}.sig")], false),
            (&[("authorization", ""), ("authorization", BASIC_ONE)], false),
            (&[("x-api-key", "key-1"), ("authorization", "a"), ("authorization", "b")], false),
            (&[("cookie", "s=1; t=2")], false),
            (&[("cookie", "s=1"), ("cookie", "t=2")], false),
            (&[("cookie", "t=2"), ("cookie", "s=1")], false),
        ],
    ),
    (
        "Empty values, and schemes without credentials",
        &[
            (&[("x-api-key", "")], false),
            (&[("authorization", "")], false),
            (&[("authorization", "Bearer")], false),
            (&[("authorization", "basic")], false),
            (&[("cookie", "")], false),
            (&[("cookie", "; ")], false),
            (&[("x-api-key", ""), ("authorization", "Bearer"), ("cookie", "s=1")], false),
            (&[("x-api-key", "key-1"), ("authorization", ""), ("cookie", "")], false),
            (&[("x-api-key", "key-1"), ("x-api-key", "")], false),
            (&[("authorization", "raw-token")], false),
            (&[("cookie", "s=")], false),
        ],
    ),
    (
        "Spellings of Basic",
        &[
            (&[("authorization", "bAsIc   YW5uOm9uZQ==")], false),
            (&[("authorization", "Basic YW5uOm9uZQ")], false),
            (&[("authorization", "Basic OnR3bw==")], false),
            (&[("authorization", "Basic YW5u")], false),
            (&[("authorization", "Basic !")], false),
            (&[("authorization", "Basic\tYW5uOm9uZQ==")], false),
            (&[("authorization", "Basically YW5uOm9uZQ==")], false),
        ],
    ),
    (
        "Forms of tokens",
        &[
            (&[("authorization", "bearer  {ANN}.sig")], false),
            (&[("authorization", "Bearer {NO-ISS}.sig")], false),
            (&[("authorization", "Bearer {ESCAPED}.sig")], false),
            (&[("authorization", "Bearer {EMPTY-SUB}.sig")], false),
            (&[("authorization", "Bearer {ANN}.")], false),
            (&[("authorization", "Bearer {ANN}")], false),
            (&[("authorization", "Bearer {ANN}.sig.more")], false),
            (&[("authorization", "Bearer {ANN}.sig.more.more")], false),
            (&[("authorization", "Bearer {ANN}.s+g")], false),
            (&[("authorization", "Bearer {ANN}=.sig")], false),
            (&[("authorization", "Bearer {ANN}.sig, Bearer x")], false),
            (&[("authorization", "DPoP {ANN}.sig")], false),
            (&[("authorization", "{ANN}.sig")], false),
            (&[("authorization", "Bearer ..")], false),
            (&[("authorization", "Bearer {NO-SUB}.sig")], false),
            (&[("authorization", "Bearer {SUB-IS-7}.sig")], false),
            (&[("authorization", "Bearer {ISS-IS-LIST}.sig")], false),
            (&[("authorization", "Bearer {TWO-SUBS}.sig")], false),
            (&[("authorization", "Bearer {TWO-ISS}.sig")], false),
            (&[("authorization", "Bearer {SUB-DEEPER}.sig")], false),
            (&[("authorization", "Bearer {ARRAY}.sig")], false),
            (&[("authorization", "Bearer {NOT-JSON}.sig")], false),
            (&[("authorization", "Bearer {CUT-OFF}.sig")], false),
            (&[("authorization", "Bearer {NO-HEADER}.sig")], false),
            (&[("authorization", "Bearer {ODD-HEADER}.sig")], false),
        ],
    ),
    (
        "gRPC metadata",
        &[
            (&[("te", "trailers"), ("authorization", "Bearer {ANN}.sig"), ("grpc-timeout", "5S")], false),
            (&[("te", "trailers"), ("x-api-key", "key-1"), ("authorization-bin", "AAEC")], false),
        ],
    ),
];

#[test]
fn the_table_is_as_agreed() {
    compare(FILE, &table());
}

#[test]
fn a_token_is_read_up_to_its_longest() {
    let token = |length: usize| {
        let head = "e30.eyJzdWIiOiJhbm4ifQ.";
        format!("Bearer {head}{}", "a".repeat(length - head.len()))
    };
    for (length, kind) in [(LONGEST_TOKEN, Kind::Jwt), (LONGEST_TOKEN + 1, Kind::Other)] {
        let line = HeaderValue::try_from(token(length)).unwrap();
        let headers = HeaderMap::from_iter([(AUTHORIZATION, line)]);
        assert_eq!(Credential::of(caller(&headers, None)).kind, kind);
    }
}

#[test]
fn a_credential_does_not_show_in_debug() {
    let headers = HeaderMap::from_iter([(COOKIE, HeaderValue::from_static("s3cret"))]);
    assert_eq!(format!("{:?}", Credential::of(caller(&headers, None))), "Credential(Cookie)");
    assert_eq!(format!("{:?}", Proof([7; 32])), "Proof");
}

fn caller<'a>(headers: &'a HeaderMap, certificate: Option<&'a ClientCertificate>) -> Caller<'a> {
    Caller { headers, authority: None, client_ip: None, certificate, claims: None }
}

fn table() -> String {
    let mut out = String::from(
        "# Who a caller is\n\n\
         This file is written by a test from what the program does. It is read by people: a change here is a change \
         of what oncegate promises.\n\n\
         The default scope is `[\"host\", \"credential\"]`. The *identity* of a credential is part of what a key belongs \
         to: requests whose identities differ never share a key. The *proof* is kept in the record as a digest: a request \
         with the same identity, key and fingerprint and another proof gets 422 `caller-differs`. With neither, two \
         requests have the same caller. `+ certificate` means that the gate has verified a certificate of the client, \
         whose subject is CN=ann. A user of Basic is marked `u`; credentials without a user that can be read stand for \
         themselves, marked `?`.\n\n\
         `{NAME}` stands for the first two parts of a token, whose second part is this in base64url:\n\n\
         | token | second part |\n|---|---|\n",
    );
    for (name, _, payload) in TOKENS {
        let _ = writeln!(out, "| {name} | `{payload}` |");
    }
    let certificate = ClientCertificate::named(b"CN=ann");
    for (title, cases) in SECTIONS {
        let _ = write!(out, "\n## {title}\n\n| the request carries | identity | proof |\n|---|---|---|\n");
        for (lines, is_certified) in *cases {
            let headers = lines.iter().map(|(name, value)| {
                (HeaderName::from_static(name), HeaderValue::try_from(with_tokens(value)).unwrap())
            });
            let headers: HeaderMap = headers.collect();
            let credential = Credential::of(caller(&headers, is_certified.then_some(&certificate)));
            let mut carries: Vec<_> = lines.iter().map(|(name, value)| format!("`{name}: {value}`")).collect();
            carries.extend(is_certified.then(|| "+ certificate".to_owned()));
            let carries = if carries.is_empty() { "nothing".to_owned() } else { carries.join(" ") };
            let mut identity = vec![format!("**{}**", credential.kind.identity())];
            identity.extend(values(&credential.identity));
            let proof = credential.proof.as_deref().map_or_else(|| vec!["-".to_owned()], values);
            let nothing = if credential.kind == Kind::ApiKey { "no `authorization`" } else { "nothing" };
            let proof = if proof.is_empty() { format!("that there is {nothing}") } else { proof.join(" ") };
            let _ = writeln!(out, "| {carries} | {} | {proof} |", identity.join(" "));
        }
    }
    out
}

/// A line with its tokens in place of their names.
fn with_tokens(line: &str) -> String {
    TOKENS.iter().fold(line.to_owned(), |line, (name, header, payload)| {
        line.replace(&format!("{{{name}}}"), &format!("{header}.{}", URL_SAFE_NO_PAD.encode(payload)))
    })
}

/// Values as people read them, tokens under their names.
fn values(framed: &[u8]) -> Vec<String> {
    let bytes = Bytes::copy_from_slice(framed);
    let mut reader = Reader::new(&bytes);
    let count = reader.count().unwrap();
    let values = (0..count).map(|_| {
        let value = String::from_utf8(reader.part().unwrap().to_vec()).unwrap();
        let named = TOKENS.iter().fold(value, |value, (name, header, payload)| {
            value.replace(&format!("{header}.{}", URL_SAFE_NO_PAD.encode(payload)), &format!("{{{name}}}"))
        });
        if named.is_empty() { "(empty)".to_owned() } else { format!("`{named}`") }
    });
    let values = values.collect();
    reader.finish().unwrap();
    values
}
