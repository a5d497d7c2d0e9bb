//! Bodies as fingerprints and keys read them, beside a reader that is known to be right.

#![no_main]

use std::collections::BTreeSet;
use std::fmt;

use http::{HeaderMap, Method, Uri};
use libfuzzer_sys::fuzz_target;
use oncegate::idempotency::fingerprint::{Body, BodyForm, Pointer, Recipe, Subject};
use oncegate::idempotency::key::{Found, KeyRule, KeySource};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// How deep oncegate reads.
const DEEPEST: usize = 64;

fuzz_target!(|input: &[u8]| {
    // Two bodies: 0xff stands in no text.
    let mut bodies = input.splitn(2, |byte| *byte == 0xff);
    let one = bodies.next().unwrap_or_default();
    let values = [Some(one), bodies.next()].map(|body| body.and_then(alone));
    if let [Some(one), Some(other)] = &values {
        let same = digest(&one.0, &[]) == digest(&other.0, &[]);
        let is_exact = !has_exponent(&one.0) && !has_exponent(&other.0);
        assert!(if is_exact { same == (one.1 == other.1) } else { !same || one.1 == other.1 }, "{one:?} {other:?}");
    }
    // With parts left out there is nothing to compare with, but nothing may break either.
    digest(one, &["/a", "/b/0", "/"]);
});

/// Reads one body in both ways, and returns it with its value if it is JSON that says one thing only.
fn alone(body: &[u8]) -> Option<(Vec<u8>, Value)> {
    let as_json = digest(body, &[]);
    let as_bytes = read(BodyForm::Bytes, body, &[]);
    // A lone surrogate is none of the other reader's, and oncegate reads it.
    let has_surrogate = body.windows(3).any(|three| three.eq_ignore_ascii_case(b"\\ud"));
    let Ok(value) = serde_json::from_slice::<Value>(body) else {
        assert!(has_surrogate || as_json == as_bytes, "what is not JSON counts by its bytes");
        return None;
    };
    let strict = serde_json::from_slice::<Strict>(body).ok().filter(|strict| strict.depth <= DEEPEST);
    if strict.is_none() {
        assert_eq!(as_json, as_bytes, "what is ambiguous or too deep counts by its bytes");
        return None;
    }
    assert_ne!(as_json, as_bytes, "it is JSON");
    assert_eq!(digest(&spaced(body), &[]), as_json, "white space does not count");
    if !has_exponent(body) {
        let written = serde_json::to_vec_pretty(&value).expect("a value can be written");
        assert_eq!(digest(&written, &[]), as_json, "the order of members and escapes do not count");
    }
    key(body, &value);
    Some((body.to_vec(), value))
}

/// Whether some number may have an exponent, which the other reader writes in a way of its own.
fn has_exponent(body: &[u8]) -> bool {
    body.windows(2).any(|pair| pair[0].is_ascii_digit() && pair[1].eq_ignore_ascii_case(&b'e'))
}

/// The same with white space wherever it may stand.
fn spaced(body: &[u8]) -> Vec<u8> {
    let (mut out, mut in_string, mut is_escaped) = (b"\n".to_vec(), false, false);
    for &byte in body {
        let is_structure = !in_string && b"{}[],:".contains(&byte);
        out.extend_from_slice(if is_structure { b" \t" } else { b"" });
        out.push(byte);
        out.extend_from_slice(if is_structure { b"\r\n" } else { b"" });
        in_string ^= byte == b'"' && !is_escaped;
        is_escaped = in_string && byte == b'\\' && !is_escaped;
    }
    out
}

/// The key at `/a`, in both ways.
fn key(body: &[u8], value: &Value) {
    let rule = KeyRule { from: vec![KeySource::parse("json:/a").expect("a pointer")], ..KeyRule::default() };
    let found = rule.find(&Uri::from_static("/"), &HeaderMap::new(), Some(body));
    let text = match value.pointer("/a") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => number.to_string(),
        Some(Value::Null) | None => return assert_eq!(found, Ok(Found::Absent)),
        Some(_) => return assert!(found.is_err()),
    };
    if let Ok(found) = found {
        assert!(matches!(found, Found::Key(key) if key.as_str() == text), "another key than {text:?}");
    } else {
        let is_integer = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-');
        let is_key = (1..=255).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
        assert!(!is_key || (value["a"].is_number() && !is_integer), "{text:?} is a key");
    }
}

fn digest(body: &[u8], exclude: &[&str]) -> [u8; 32] {
    read(BodyForm::Json, body, exclude)
}

fn read(form: BodyForm, body: &[u8], exclude: &[&str]) -> [u8; 32] {
    let exclude = exclude.iter().map(|text| Pointer::parse(text).expect("a pointer")).collect();
    let recipe = Recipe { form, exclude, ..Recipe::default() };
    let (uri, headers) = (Uri::from_static("/"), HeaderMap::new());
    recipe.digest(Subject { method: &Method::POST, uri: &uri, headers: &headers, body: Body::Whole(body) })
}

/// JSON without a name that stands twice in one object, and how deep it nests.
struct Strict {
    depth: usize,
}

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Strict;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Strict, E> {
        Ok(Strict { depth: 0 })
    }

    fn visit_unit<E>(self) -> Result<Strict, E> {
        Ok(Strict { depth: 0 })
    }

    fn visit_str<E>(self, _: &str) -> Result<Strict, E> {
        Ok(Strict { depth: 0 })
    }

    fn visit_u64<E>(self, _: u64) -> Result<Strict, E> {
        Ok(Strict { depth: 0 })
    }

    fn visit_i64<E>(self, _: i64) -> Result<Strict, E> {
        Ok(Strict { depth: 0 })
    }

    fn visit_f64<E>(self, _: f64) -> Result<Strict, E> {
        Ok(Strict { depth: 0 })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Strict, A::Error> {
        let mut depth = 0;
        while let Some(item) = items.next_element::<Strict>()? {
            depth = depth.max(item.depth);
        }
        Ok(Strict { depth: depth + 1 })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Strict, A::Error> {
        /// What serde_json calls a number whose literal it keeps.
        const NUMBER: &str = "$serde_json::private::Number";
        let (mut names, mut depth) = (BTreeSet::new(), 0);
        while let Some((name, value)) = members.next_entry::<String, Strict>()? {
            if name == NUMBER {
                return Ok(Strict { depth: 0 });
            }
            depth = depth.max(value.depth);
            if !names.insert(name) {
                return Err(serde::de::Error::custom("a name stands twice"));
            }
        }
        Ok(Strict { depth: depth + 1 })
    }
}
