//! What single values must look like.
//!
//! The patterns are of the kind that both ECMA-262, which JSON Schema names, and the `regex` crate's kin understand.
//! Where a pattern cannot say all that the loader asks for, it says less: what it refuses, the loader refuses.

use std::ops::RangeInclusive;

use serde_json::{Value, json};

use crate::config::units::{DURATIONS, SIZES};
use crate::idempotency::grpc::Status;

/// The name of an upstream.
pub(super) const UPSTREAM_NAME: &str = "^[A-Za-z0-9._-]{1,128}$";

/// `http://HOST:PORT`, `https://HOST:PORT` or `unix:PATH`
pub(super) const UPSTREAM_URL: &str =
    r"^(https?://(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+)(:[0-9]{1,5})?/?|unix:.*[^/].*)$";

/// `sqlite:PATH`, `postgres://...`, `redis://...` or `memory:`
pub(super) const STORE_URL: &str = concat!(
    r"^(memory:|sqlite:(?!//|:memory:$)[^?]*[^?\s][^?]*|",
    r"postgres(ql)?://([^\s#@/?]*@)?[^\s#@/?]*(/[^\s#@/?]*)?(\?[^\s#@]*)?|",
    r"rediss?://([^\s#@/?]*@)?[^\s#@/?]+(/[^\s#@/?]*)?(\?[^\s#@]*)?)$",
);

/// `redis://...`
pub(super) const CACHE_URL: &str = r"^rediss?://([^\s#@/?]*@)?[^\s#@/?]+(/[^\s#@/?]*)?(\?[^\s#@]*)?$";

/// A name, and `-` is none: it stands for requests that match no route.
pub(super) const ROUTE_NAME: &str = r"^(?!-$)[^\s\x00-\x1f\x7f]([^\x00-\x1f\x7f]{0,126}[^\s\x00-\x1f\x7f])?$";

/// A method in capitals.
pub(super) const METHOD: &str = "^(?!(CONNECT|\\*)$)[!#$%&'*+.^_`|~0-9A-Z-]+$";

/// A host without port, or `*`.
pub(super) const HOST: &str = r"^(\*|[A-Za-z0-9._-]*[A-Za-z0-9_-]\.?|\[[0-9A-Fa-f:.]+\])$";

/// A path pattern: literals, `{x}` and, at the end, `{*rest}`. No literal looks like `:id`, a glob or a regular expression.
pub(super) const PATH: &str = concat!(
    r"^(?=/)(?!.*(\$$|\+(/|$)|\.\+))",
    r"(/(?!\.{1,2}(/|$)|\(|:[A-Za-z_])(([A-Za-z0-9._~!$&'()+,;=:@-]|%[0-9A-F]{2})*|\{[A-Za-z0-9_-]+\}))*",
    r"(/\{\*[A-Za-z0-9_-]+\})?$",
);

/// The address of a page.
pub(super) const PAGE: &str = r#"^https?://[^\s/?#@<>"]+([/?#][^\s<>"]*)?$"#;

/// An origin as browsers write it, or `*`.
pub(super) const ORIGIN: &str = r"^(\*|https://(?!.*:443$)[^\sA-Z/?#@]+|http://(?!.*:80$)[^\sA-Z/?#@]+)$";

const TOKEN: &str = "[!#$%&'*+.^_`|~0-9A-Za-z-]+";

/// A JSON pointer that is not empty (RFC 6901).
const STEPS: &str = "(/([^~/]|~[01])*)+";

/// Text of this pattern.
pub(super) fn text(pattern: &str) -> Value {
    json!({ "type": "string", "pattern": pattern })
}

/// One of these words.
pub(super) fn words(words: impl IntoIterator<Item = &'static str>) -> Value {
    json!({ "type": "string", "enum": words.into_iter().collect::<Vec<_>>() })
}

/// A list.
pub(super) fn list(item: Value) -> Value {
    json!({ "type": "array", "items": item })
}

/// A list with an item, and none twice.
pub(super) fn set(item: Value) -> Value {
    json!({ "type": "array", "items": item, "minItems": 1, "uniqueItems": true })
}

/// Text, or a list of the same.
pub(super) fn one_or_several(mut item: Value) -> Value {
    let items = item.clone();
    item["type"] = json!(["string", "array"]);
    item["items"] = items;
    item["minItems"] = 1.into();
    item
}

/// A name of a service, a namespace or a route.
pub(super) fn name() -> Value {
    text(r"^[^\s\x00-\x1f\x7f]([^\x00-\x1f\x7f]{0,126}[^\s\x00-\x1f\x7f])?$")
}

/// The path of a file.
pub(super) fn file() -> Value {
    text(r"\S")
}

/// A duration.
pub(super) fn duration() -> Value {
    text(&format!(r"^\s*({})+\s*$", part("[0-9]+")))
}

/// A duration that is not zero.
pub(super) fn some_duration() -> Value {
    let (zero, some, any) = (part("0+"), part("0*[1-9][0-9]*"), part("[0-9]+"));
    text(&format!(r"^\s*({zero})*{some}({any})*\s*$"))
}

/// The pattern of a duration that is not under a second; of several parts, some that are get through.
pub(super) fn at_least_a_second() -> String {
    format!(r"^\s*(0*[1-9][0-9]{{3,}}ms|0*[1-9][0-9]*[smhd]|{any}({any})+)\s*$", any = part("[0-9]+"))
}

/// A whole number.
pub(super) fn number(allowed: RangeInclusive<u64>) -> Value {
    json!({ "type": "integer", "minimum": allowed.start(), "maximum": allowed.end() })
}

/// A size in bytes, or with a unit. What has a unit is not compared with what it may be.
pub(super) fn size(allowed: RangeInclusive<u64>) -> Value {
    let units = SIZES.map(|(unit, _)| unit).join("|");
    json!({
        "type": ["string", "integer"],
        "pattern": format!(r"^\s*[0-9]+\s*({units})\s*$"),
        "minimum": allowed.start(),
        "maximum": allowed.end(),
    })
}

/// The pattern of a place for a key.
pub(super) fn key_source() -> String {
    format!("^(header:{TOKEN}|query:.+|json:{STEPS}|cloudevent|fingerprint)$")
}

/// The pattern of a part of a scope.
pub(super) fn scope_part() -> String {
    let optional = format!(r"(header:{TOKEN}|cookie:{TOKEN}|basic:user|client-cert:(subject|san))\?");
    format!("^({optional}?|credential|host|client-ip|const:.*)$")
}

/// The pattern of a part of a fingerprint.
pub(super) fn ingredient() -> String {
    format!("^(method|path|query|body|header:{TOKEN})$")
}

/// The pattern of an entry of `outcomes` for a status of gRPC.
pub(super) fn grpc_entry() -> String {
    format!("^grpc:([0-9]|1[0-6]|{})$", Status::ALL.map(Status::name).join("|"))
}

/// The pattern of a JSON pointer.
pub(super) fn pointer() -> String {
    format!("^({STEPS})?$")
}

/// A number, in the form given, and its unit.
fn part(number: &str) -> String {
    format!("{number}({})", DURATIONS.map(|(unit, _)| unit).join("|"))
}
