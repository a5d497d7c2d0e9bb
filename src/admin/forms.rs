//! Patterns of the OpenAPI document. The API accepts every text that matches them; it also accepts a few that do not.

use schemars::generate::SchemaGenerator;
use schemars::{Schema, json_schema};
use serde_json::{Value, json};

use super::wanted::MAX_KEY;
use crate::idempotency::record::State;

/// A duration, as `humantime` reads it, but for spaces and long words.
macro_rules! duration {
    () => {
        "[1-9][0-9]{0,5}(ms|s|m|h|d|w)([0-9]{1,6}(ms|s|m|h|d|w)){0,8}"
    };
}

/// A time of UTC by RFC 3339, from 1970 to 2099.
macro_rules! time {
    () => {
        concat!(
            "(((19[7-9]|20[0-9])[0-9]-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|",
            "02-(0[1-9]|1[0-9]|2[0-8])))|(19(7[26]|8[048]|9[26])|20([02468][048]|[13579][26]))-02-29)",
            r"T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?Z"
        )
    };
}

/// The value of a header, without spaces around it.
macro_rules! value {
    () => {
        r"[^\x00-\x20\x7f]([^\x00-\x1f\x7f]*[^\x00-\x20\x7f])?"
    };
}

/// A number that fits 63 bits, up to 8,999,999,999,999,999,999.
macro_rules! number {
    () => {
        "([0-9]{1,18}|[1-8][0-9]{18})"
    };
}

pub(super) const DURATION: &str = concat!("^", duration!(), "$");
pub(super) const TIME: &str = concat!("^", time!(), "$");
pub(super) const SINCE: &str = concat!("^(0|", duration!(), "|", time!(), ")$");

/// A key, bare or quoted.
pub(super) const KEY: &str = r#"^([!#-+.-:<-\[\]-~-]+|"([!#-\[\]-~]|\\["\\])+")$"#;

/// The beginning of a record's id, and a whole one.
pub(super) const ID_PREFIX: &str = "^[0-9A-Fa-f]{1,64}$";
pub(super) const ID: &str = "^[0-9A-Fa-f]{64}$";

/// A part of a scope and its value.
pub(super) const SCOPE: &str = concat!(
    "^((header|cookie):[!#$%&'*+.^_`|~0-9A-Za-z-]+=",
    value!(),
    "|(host|jwt:[0-9A-Za-z_.:/-]+)=",
    value!(),
    "|basic:user=[^\u{0}-\u{20}:\u{7f}]+|credential=([Xx]-[Aa][Pp][Ii]-[Kk][Ee][Yy]: ?[!-~]+|[Aa]uthorization: ?[A-Za-z]+ [!-~]+)",
    // A header and its value.
    r"|[0-9A-Za-z-]+: ?[^\x00-\x20=\x7f]+|[Xx]-[0-9A-Za-z-]+: ?",
    value!(),
    r"|client-ip=(((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    "|([0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}|([0-9A-Fa-f]{1,4}:){1,7}:|([0-9A-Fa-f]{1,4}:){1,6}:[0-9A-Fa-f]{1,4}",
    "|([0-9A-Fa-f]{1,4}:){1,5}(:[0-9A-Fa-f]{1,4}){1,2}|([0-9A-Fa-f]{1,4}:){1,4}(:[0-9A-Fa-f]{1,4}){1,3}",
    "|([0-9A-Fa-f]{1,4}:){1,3}(:[0-9A-Fa-f]{1,4}){1,4}|([0-9A-Fa-f]{1,4}:){1,2}(:[0-9A-Fa-f]{1,4}){1,5}",
    "|[0-9A-Fa-f]{1,4}:(:[0-9A-Fa-f]{1,4}){1,6}|:(:[0-9A-Fa-f]{1,4}){1,7}|::))$"
);

/// The `next` of a page: of records, and of deliveries or audit entries.
pub(super) const RECORD_CURSOR: &str = concat!("^", number!(), "-", number!(), "-[0-9A-Fa-f]{64}$");
pub(super) const CURSOR: &str = concat!("^", number!(), "$");

/// The `next` of a change of many records.
pub(super) const PLACE: &str = concat!("^([0-9A-Fa-f]{64}|accepted-", number!(), ")$");

/// A reason that is given: not of white space and control characters alone. And the same, or none. Its limit is one of bytes, and a
/// schema counts characters: a reason of other characters than ASCII may be within `maxLength` and is refused.
pub(super) const REASON: &str = r"[^\s\x00-\x1f\x7f-\x9f]";
pub(super) const REASON_OR_NONE: &str = r"^$|[^\s\x00-\x1f\x7f-\x9f]";

/// Text without NUL that is not empty.
pub(super) const TEXT: &str = r"^[^\x00]+$";

/// The name and the value of a header, and base64 (RFC 4648, section 4) with its padding.
const NAME: &str = "^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}$";
const VALUE: &str = r"^[^\x00-\x1f\x7f]*$";
const BASE64: &str = "^([0-9A-Za-z+/]{4})*([0-9A-Za-z+/][AQgw]==|[0-9A-Za-z+/]{2}[048AEIMQUYcgkosw]=)?$";

/// What a record is filtered by: a member of [`Wanted`](super::wanted::Wanted).
pub(super) fn member(name: &str) -> Value {
    match name {
        "state" => json!({ "type": "string", "enum": State::ALL.map(State::as_str) }),
        "key" => json!({ "type": "string", "pattern": KEY, "maxLength": MAX_KEY }),
        "id" => pattern(ID_PREFIX),
        "older_than" => pattern(DURATION),
        "since" => pattern(SINCE),
        "scope" => pattern(SCOPE),
        _ => pattern(TEXT),
    }
}

/// A text of this form.
pub(super) fn pattern(pattern: &str) -> Value {
    json!({ "type": "string", "pattern": pattern })
}

/// What a change of many records must have: a filter that is not empty or expressly all, and a reason where it is no dry run.
pub(super) fn bulk() -> Value {
    json!([
        { "oneOf": [
            {
                "required": ["filter"],
                "properties": { "filter": { "minProperties": 1 }, "all": { "const": false } },
            },
            { "required": ["all"], "properties": { "filter": { "maxProperties": 0 }, "all": { "const": true } } },
        ] },
        { "anyOf": [
            { "required": ["dry_run"], "properties": { "dry_run": { "const": true } } },
            { "required": ["reason"], "properties": { "reason": { "pattern": REASON } } },
        ] },
    ])
}

/// The same, and what goes with the action.
pub(super) fn bulk_resolve() -> Value {
    let mut parts = bulk();
    if let Some(parts) = parts.as_array_mut() {
        parts.push(json!({ "oneOf": by_action() }));
        // Only unknown records have something to resolve.
        let unknown = json!({ "properties": { "state": { "const": "unknown" } } });
        parts.push(json!({ "properties": { "filter": unknown } }));
    }
    parts
}

/// What goes with `release`, and what with `complete`.
pub(super) fn by_action() -> Value {
    let none = json!({ "type": "null" });
    json!([
        {
            "properties": {
                "action": { "const": "release" }, "status": none, "headers": none, "body_base64": none,
            },
        },
        {
            "required": ["status"],
            "properties": { "action": { "const": "complete" }, "status": { "type": "integer" } },
            // RFC 9110, sections 15.3.5, 15.3.6 and 15.4.5.
            "if": { "properties": { "status": { "enum": [204, 205, 304] } } },
            "then": { "properties": { "body_base64": { "enum": [null, ""] } } },
        },
    ])
}

/// Headers of an answer. `refused` are names that cannot be given.
pub(super) fn headers(refused: &[&str]) -> Schema {
    let refused: Vec<String> = refused.iter().map(|name| in_any_case(name)).collect();
    let name = json!({ "type": "string", "pattern": NAME, "not": { "pattern": format!("^({})$", refused.join("|")) } });
    let line = json!({
        "type": "array",
        "prefixItems": [name, { "type": "string", "pattern": VALUE }],
        "minItems": 2,
        "maxItems": 2,
    });
    json_schema!({ "type": ["array", "null"], "maxItems": 256, "items": line })
}

/// The status of an answer.
pub(super) fn status(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["integer", "null"], "minimum": 200, "maximum": 599 })
}

/// The body of an answer.
pub(super) fn base64(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "null"], "contentEncoding": "base64", "pattern": BASE64 })
}

/// The pattern of a word whose letters may be large or small.
fn in_any_case(word: &str) -> String {
    let of = |letter: char| match letter.is_ascii_alphabetic() {
        true => format!("[{}{letter}]", letter.to_ascii_uppercase()),
        false => letter.to_string(),
    };
    word.chars().map(of).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::string::string_regex;

    use super::*;
    use crate::admin::scope::ScopeValue;
    use crate::admin::wanted::{Wanted, parse_since, parse_time};
    use crate::store::Cursor;

    fn of(pattern: &str) -> impl Strategy<Value = String> {
        string_regex(pattern.trim_start_matches('^').trim_end_matches('$')).unwrap()
    }

    proptest! {
        #[test]
        fn what_a_pattern_describes_is_read(
            duration in of(DURATION), time in of(TIME), either in of(SINCE), key in of(KEY), scope in of(SCOPE),
            cursor in of(RECORD_CURSOR), id in of(ID_PREFIX),
        ) {
            for (name, value) in
                [("older_than", duration), ("since", either), ("key", key), ("scope", scope.clone()), ("id", id)]
            {
                let set = Wanted::default().set(name, value.clone());
                prop_assert!(set.is_ok(), "{name}={value}: {set:?}");
            }
            prop_assert!(parse_time(&time).is_some() && parse_since(&time).is_ok(), "{time}");
            prop_assert!(ScopeValue::parse(&scope).is_ok(), "{scope}");
            prop_assert!(Cursor::parse(&cursor).is_some(), "{cursor}");
        }
    }

    #[test]
    fn what_people_write_is_described() {
        for (pattern, texts) in [
            (DURATION, &["90s", "1h", "7d", "1h30m", "250ms"][..]),
            (TIME, &["2026-01-31T22:00:00Z", "2024-02-29T00:00:00Z", "2026-12-01T23:59:59.123Z"]),
            (SINCE, &["1h", "2026-01-31T22:00:00Z"]),
            (CURSOR, &["7", "1853070350745600000"]),
            (PLACE, &["accepted-1853070350745600000"]),
            (REASON, &["R\u{fc}ckerstattung\ngepr\u{fc}ft"]),
            (KEY, &["order-1", "a:b", "\"a,b\"", "8e03978e-40d5-43dd-bc93-6894a57f9324"]),
            (
                SCOPE,
                &[
                    "header:X-Tenant=acme",
                    "host=api.test",
                    "client-ip=192.0.2.1",
                    "client-ip=2001:db8::1",
                    "jwt:sub=ann",
                    "credential=Authorization: Bearer abc",
                    "basic:user=ann",
                    "cookie:session=a b",
                ],
            ),
        ] {
            let matcher = jsonschema::validator_for(&json!({ "pattern": pattern })).unwrap();
            for text in texts {
                assert!(matcher.is_valid(&json!(text)), "{pattern}: {text}");
            }
        }
    }
}
