//! `template:`, which joins several sources to one key.
//!
//! A template is text with sources between braces. Its key is that text, with the value of each source in its place. Two
//! different tuples of values never give one key: whatever of a value could be taken for the text between is escaped, as
//! `%` and two hexadecimal digits.

use std::fmt::{self, Write as _};

use http::{HeaderMap, Uri};

use super::{Found, Invalid, Key, KeySource, Reading};

/// `template:{header:X-Saga-Id}:{header:X-Step}`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// The text before each source, and the source.
    parts: Vec<(String, KeySource)>,
    /// The text behind the last one.
    end: String,
}

impl Template {
    /// Reads what follows `template:`.
    ///
    /// # Errors
    /// The problem, for the author of the configuration.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some((before, after)) = rest.split_once('{') {
            check_text(before)?;
            let Some((source, after)) = after.split_once('}') else {
                return Err(format!(
                    "the template `{text}` has a `{{` without a `}}` behind it: use one pair of braces for each source"
                ));
            };
            if source.is_empty() {
                return Err(format!(
                    "the template `{text}` has nothing in `{{}}`: use a source such as `{{header:X-Saga-Id}}`"
                ));
            }
            if source.contains('{') {
                return Err(format!(
                    "the template `{text}` has two `{{` before a `}}`: use one pair of braces for each source"
                ));
            }
            if !parts.is_empty() && !before.bytes().any(is_separator) {
                return Err(format!(
                    "`{{{source}}}` follows another source without a character between that is neither a letter, a digit nor \
                     `%`: use a separator such as `:`"
                ));
            }
            let source = match KeySource::parse(source)? {
                KeySource::Fingerprint | KeySource::Template(_) => {
                    return Err(format!(
                        "`{source}` cannot be a part of a template: use `header:NAME`, `query:NAME`, `json:/pointer` or \
                         `cloudevent`"
                    ));
                }
                source => source,
            };
            parts.push((before.to_owned(), source));
            rest = after;
        }
        check_text(rest)?;
        if parts.is_empty() {
            return Err(format!("the template `{text}` has no source: use one such as `{{header:X-Saga-Id}}`"));
        }
        Ok(Self { parts, end: rest.to_owned() })
    }

    /// What its values come from, in words of HTTP.
    pub(super) fn in_http(&self) -> String {
        let sources: Vec<String> = self.sources().map(KeySource::in_http).collect();
        sources.join(" and ")
    }

    /// Its sources, in order.
    pub fn sources(&self) -> impl Iterator<Item = &KeySource> {
        self.parts.iter().map(|(_, source)| source)
    }

    /// Reads the key. Where a source has nothing, the template has nothing, whatever the others have.
    pub(super) fn read(
        &self,
        uri: &Uri,
        headers: &HeaderMap,
        body: Option<&[u8]>,
        max_length: usize,
    ) -> Result<Reading, Invalid> {
        let (mut joined, mut needs_body, mut invalid) = (String::new(), false, None);
        for (before, source) in &self.parts {
            match source.read(uri, headers, body, max_length) {
                Ok(Reading::Absent) => return Ok(Reading::Absent),
                Ok(Reading::Found(Found::Key(key))) => {
                    joined.push_str(before);
                    self.push_escaped(&mut joined, key.as_str());
                }
                Ok(Reading::Found(_)) => needs_body = true,
                Err(error) => invalid = invalid.or(Some(error)),
            }
        }
        match invalid {
            // What is in the body may be absent.
            _ if needs_body => Ok(Reading::Found(Found::NeedsBody)),
            Some(error) => Err(error),
            None => {
                joined.push_str(&self.end);
                let key = Key::from_value(joined.as_bytes(), max_length);
                key.map(super::found).map_err(|Invalid(what)| Invalid(format!("{}: {what}", self.in_http())))
            }
        }
    }

    /// Appends a value, in which no character stands that separates values in this template.
    fn push_escaped(&self, joined: &mut String, value: &str) {
        let texts = || self.parts.iter().map(|(before, _)| before).chain([&self.end]);
        for byte in value.bytes() {
            if byte == b'%' || is_separator(byte) && texts().any(|text| text.as_bytes().contains(&byte)) {
                // Writing to a string does not fail.
                let _ = write!(joined, "%{byte:02X}");
            } else {
                joined.push(char::from(byte));
            }
        }
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (before, source) in &self.parts {
            write!(f, "{before}{{{source}}}")?;
        }
        f.write_str(&self.end)
    }
}

/// Whether a character of the text can tell where a value ends: none of those that an escaped value always may have.
fn is_separator(byte: u8) -> bool {
    byte.is_ascii_graphic() && !byte.is_ascii_alphanumeric() && byte != b'%'
}

fn check_text(text: &str) -> Result<(), String> {
    if text.contains('}') {
        return Err("in a template, `}` stands only behind a source: use other brackets".to_owned());
    }
    if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("a key has visible ASCII characters only, and no spaces: use others in the template".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};
    use proptest::prelude::*;

    use super::*;

    fn template(text: &str) -> Template {
        Template::parse(text).unwrap()
    }

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let line = |(name, value): &(&'static str, &str)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        };
        lines.iter().map(line).collect()
    }

    /// The key of a request with these headers and this body; `None` where there is none.
    fn key(text: &str, lines: &[(&'static str, &str)], body: Option<&[u8]>) -> Result<Option<String>, String> {
        let uri = Uri::from_static("/?step=charge");
        match template(text).read(&uri, &headers(lines), body, 40) {
            Ok(Reading::Absent) => Ok(None),
            Ok(Reading::Found(Found::Key(key))) => Ok(Some(key.as_str().to_owned())),
            Ok(Reading::Found(found)) => Ok(Some(format!("{found:?}"))),
            Err(Invalid(what)) => Err(what),
        }
    }

    const SAGA: &str = "{header:x-saga-id}:{header:x-step}";

    #[test]
    fn all_parts_are_joined() {
        let some = |key: &str| Ok(Some(key.to_owned()));
        assert_eq!(key(SAGA, &[("x-saga-id", "s-1"), ("x-step", "\"2\"")], None), some("s-1:2"));
        let around = "saga/{header:x-saga-id}/{query:step}/v1";
        assert_eq!(key(around, &[("x-saga-id", "7")], None), some("saga/7/charge/v1"));
        assert_eq!(key("{json:/id}-{query:step}", &[], Some(b"{\"id\":7}")), some("7-charge"));
        let event = key("{cloudevent}.{query:step}", &[("ce-source", "/s"), ("ce-id", "1")], None);
        assert!(event.unwrap_err().ends_with(": the key is longer than 40 characters"), "a digest has 64");
    }

    #[test]
    fn without_a_part_there_is_nothing() {
        assert_eq!(key(SAGA, &[("x-saga-id", "s-1")], None), Ok(None));
        assert_eq!(key(SAGA, &[], None), Ok(None));
        // Whatever the others have, and though the body is not there yet.
        assert_eq!(key(SAGA, &[("x-saga-id", "a,b")], None), Ok(None));
        assert_eq!(key("{json:/id}-{header:x-step}", &[], None), Ok(None));
        let with_body = |body| key("{json:/id}-{header:x-step}", &[("x-step", "1")], body);
        assert_eq!(with_body(None), Ok(Some("NeedsBody".to_owned())));
        assert_eq!(with_body(Some(b"{}")), Ok(None));
        assert_eq!(with_body(Some(b"not JSON")), Ok(None));
    }

    #[test]
    fn a_malformed_part_is_told() {
        let both = |saga: &str, step: &str| key(SAGA, &[("x-saga-id", saga), ("x-step", step)], None);
        assert!(both("a,b", "1").unwrap_err().starts_with("the header X-Saga-Id: "));
        assert!(both("1", "").unwrap_err().starts_with("the header X-Step: "));
        // The whole is no longer than a key.
        assert!(both(&"a".repeat(30), &"b".repeat(9)).is_ok());
        assert!(both(&"a".repeat(30), &"b".repeat(10)).is_err());
        // An escaped character counts as three.
        assert!(both(&":".repeat(13), "1").is_err());
    }

    #[test]
    fn what_separates_is_escaped_in_values() {
        let both = |saga: &str, step: &str| key(SAGA, &[("x-saga-id", saga), ("x-step", step)], None).unwrap().unwrap();
        assert_eq!(both("a:b", "c"), "a%3Ab:c");
        assert_eq!(both("a", "b:c"), "a:b%3Ac");
        assert_eq!(both("a%3Ab", "c"), "a%253Ab:c");
        assert_eq!(both("a-b", "c/d"), "a-b:c/d", "other characters stay");
    }

    #[test]
    fn templates_that_make_no_sense_are_told() {
        for (text, said) in [
            ("", "no source"),
            ("a:b", "no source"),
            ("{header:a}{header:b}", "separator"),
            ("{header:a}and{header:b}", "separator"),
            ("{header:a}%{header:b}", "separator"),
            ("{header:a", "without a `}`"),
            ("header:a}", "only behind a source"),
            ("{header:a}:}", "only behind a source"),
            ("{header:a} {header:b}", "visible ASCII"),
            ("{header:a}é", "visible ASCII"),
            ("{}", "nothing in `{}`"),
            ("{{header:a}}", "two `{`"),
            ("{fingerprint}", "cannot be a part"),
            ("{template:x}", "no source"),
            ("{header:a b}", "not a header name"),
            ("{cookie:a}", "not a place for a key"),
        ] {
            let error = Template::parse(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn it_is_shown_as_it_is_read() {
        for text in ["{header:x-a}:{query:b}", "saga/{json:/a/0}-{cloudevent}/v1", "{header:a}"] {
            assert_eq!(template(text).to_string(), text);
            assert_eq!(template(&template(text).to_string()), template(text));
        }
        assert_eq!(template("{header:X-Saga-Id}").to_string(), "{header:x-saga-id}");
    }

    proptest! {
        /// Two different tuples never make one key.
        #[test]
        fn tuples_are_told_apart(
            one in ["[a2%:.F3-]{1,6}", "[a2%:.F3-]{1,6}", "[a2%:.F3-]{1,6}"],
            other in ["[a2%:.F3-]{1,6}", "[a2%:.F3-]{1,6}", "[a2%:.F3-]{1,6}"],
            text in proptest::sample::select(&["{header:a}:{header:b}.{header:c}", "a:{header:a}2:a{header:b}.-F{header:c}:3", "{header:a}-{header:b}-{header:c}"][..]),
        ) {
            let key = |[a, b, c]: &[String; 3]| {
                let lines = headers(&[("a", a.as_str()), ("b", b.as_str()), ("c", c.as_str())]);
                match template(text).read(&Uri::from_static("/"), &lines, None, 4096) {
                    Ok(Reading::Found(Found::Key(key))) => key,
                    _ => panic!("a key"),
                }
            };
            prop_assert_eq!(key(&one) == key(&other), one == other);
        }
    }
}
