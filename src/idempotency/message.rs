//! The key of a broker's message: from its properties, its headers or its body.

use std::fmt;

use http::{HeaderMap, Uri};

use super::key::{Found, Invalid, Key, KeyRule, KeySource};

/// `key` of a consumer: the first place that yields a value wins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageKeyRule(pub Vec<MessageKeySource>);

/// A place for the key of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageKeySource {
    /// `property:NAME`: what the broker says of the message.
    Property(Box<str>),
    /// A place in the request that the message becomes.
    Request(KeySource),
}

/// The longest key of a message, in characters.
const LONGEST: usize = 255;

impl MessageKeyRule {
    /// Looks for the key of a message.
    ///
    /// # Errors
    /// The first place that has something has no well-formed key.
    pub fn find<'a>(
        &self,
        property: impl Fn(&str) -> Option<&'a [u8]>,
        uri: &Uri,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Result<Found, Invalid> {
        for source in &self.0 {
            let found = match source {
                MessageKeySource::Property(name) => match property(name) {
                    Some(value) => Found::Key(Key::from_value(value, LONGEST).map_err(|wrong| of(source, wrong))?),
                    None => Found::Absent,
                },
                MessageKeySource::Request(place) => {
                    let rule = KeyRule { from: vec![place.clone()], required: false, max_length: LONGEST };
                    rule.find(uri, headers, Some(body))?
                }
            };
            if !matches!(found, Found::Absent | Found::NeedsBody) {
                return Ok(found);
            }
        }
        Ok(Found::Absent)
    }
}

fn of(source: &MessageKeySource, Invalid(what): Invalid) -> Invalid {
    Invalid(format!("{source}: {what}"))
}

impl MessageKeySource {
    /// Reads the configuration's word for a place; `properties` are those that the broker's messages can have.
    ///
    /// # Errors
    /// The problem, for the author of the configuration.
    pub fn parse(text: &str, properties: &[&str]) -> Result<Self, String> {
        let of_broker = || format!("a message of this broker has the properties {}", properties.join(", "));
        match text.split_once(':') {
            Some(("property", name)) if properties.contains(&name) => Ok(Self::Property(name.into())),
            Some(("property", name)) => Err(format!("`{name}` is not a property: {}", of_broker())),
            Some(("query", _)) => Err("every message of a consumer has the same query: use a property, header:NAME, \
                                       json:/pointer, cloudevent or fingerprint"
                .to_owned()),
            _ => KeySource::parse(text).map(Self::Request),
        }
    }
}

impl fmt::Display for MessageKeySource {
    /// The configuration's word.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Property(name) => write!(f, "property:{name}"),
            Self::Request(source) => source.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROPERTIES: [&str; 2] = ["message-id", "correlation-id"];

    fn find(places: &[&str], id: Option<&'static str>, headers: &[(&'static str, &str)], body: &str) -> String {
        let rule = places.iter().map(|place| MessageKeySource::parse(place, &PROPERTIES).unwrap()).collect();
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        let property = |name: &str| id.filter(|_| name == "message-id").map(str::as_bytes);
        match MessageKeyRule(rule).find(property, &Uri::from_static("/orders"), &headers, body.as_bytes()) {
            Ok(Found::Key(key)) => key.as_str().to_owned(),
            Ok(other) => format!("{other:?}"),
            Err(Invalid(what)) => what,
        }
    }

    #[test]
    fn the_first_place_that_has_a_key_wins() {
        let places = ["property:message-id", "header:x-event-id", "json:/id", "fingerprint"];
        assert_eq!(
            find(&places, Some("m 1"), &[], ""),
            "property:message-id: a key has visible ASCII characters only, and no spaces"
        );
        assert_eq!(find(&places, Some("m,1"), &[("x-event-id", "e-1")], "{\"id\":7}"), "m,1");
        assert_eq!(find(&places, None, &[("x-event-id", "e-1")], "{\"id\":7}"), "e-1");
        assert_eq!(find(&places, None, &[], "{\"id\":7}"), "7");
        assert_eq!(find(&places, None, &[], "{}"), "Fingerprint");
        assert_eq!(find(&places[..3], None, &[], "{}"), "Absent");
        assert_eq!(find(&["property:correlation-id"], Some("m-1"), &[], ""), "Absent");
    }

    #[test]
    fn places_are_read_and_written() {
        for text in ["property:message-id", "header:x-event-id", "json:/id", "cloudevent", "fingerprint"] {
            assert_eq!(MessageKeySource::parse(text, &PROPERTIES).unwrap().to_string(), text);
        }
        for text in ["property:", "property:offset", "query:id", "message-id", ""] {
            assert!(MessageKeySource::parse(text, &PROPERTIES).is_err(), "{text}");
        }
    }
}
