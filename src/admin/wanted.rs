//! Which records a request to the admin listener is about: parameters of a query, or members of a JSON object.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use super::State;
use super::scope::ScopeValue;
use crate::idempotency::identity::ScopeTag;
use crate::idempotency::key::Key;
use crate::idempotency::record::{self, RecordId, Timestamp};
use crate::store::{Filter, IdPrefix, NamespaceRules, Since};

/// Longest key that can be looked up, in characters: longer than any route lets in by default.
pub(super) const MAX_KEY: usize = 4096;

/// What an answer says of text with a NUL character, which PostgreSQL cannot store.
pub(super) const NUL: &str = "holds a NUL character";

/// What a record must be. Everything that is set must hold.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Wanted {
    pub(super) state: Option<record::State>,
    pub(super) route: Option<String>,
    pub(super) key: Option<Key>,
    pub(super) id: Option<IdPrefix>,
    pub(super) older_than: Option<Duration>,
    pub(super) since: Option<Since>,
    pub(super) scope: Option<ScopeValue>,
}

/// Which records a store gives, and which of these are wanted.
pub(super) struct Selection {
    pub(super) filter: Filter,
    /// `None` where they may be of anybody.
    pub(super) tags: Option<Vec<ScopeTag>>,
    /// The rules that the store has of all namespaces, by which records are judged that have none of the tags.
    pub(super) on_file: Vec<NamespaceRules>,
    /// With which their ids begin, where the filter does not say that. Empty for any.
    pub(super) prefixes: Vec<[u8; 8]>,
}

/// The beginning of an id. Otherwise says what is wrong with it, as the end of a sentence.
pub(super) fn id_prefix(value: &str) -> Result<IdPrefix, &'static str> {
    IdPrefix::parse(value).ok_or("must be an id, or the first of its 64 hexadecimal digits")
}

impl Wanted {
    /// The names of its members.
    pub(super) const NAMES: [&str; 7] = ["state", "route", "key", "id", "older_than", "since", "scope"];

    /// Sets a member. Otherwise says what is wrong with the value, as the end of a sentence.
    pub(super) fn set(&mut self, name: &str, value: String) -> Result<(), String> {
        if value.is_empty() {
            return Err("is empty; leave it out to not filter by it".to_owned());
        }
        if value.contains('\0') {
            return Err(NUL.to_owned());
        }
        match name {
            "state" => self.state = Some(state(&value)?),
            "route" => self.route = Some(value),
            "key" => self.key = Some(Key::parse(&value, MAX_KEY).map_err(|invalid| format!("is no key: {invalid}"))?),
            "id" => {
                self.id = Some(id_prefix(&value)?);
            }
            "older_than" => self.older_than = Some(parse_age(&value)?),
            "since" => self.since = Some(parse_since(&value)?),
            "scope" => self.scope = Some(ScopeValue::parse(&value)?),
            _ => return Err(format!("is unknown; known are: {}", Self::NAMES.join(", "))),
        }
        Ok(())
    }

    /// Whether nothing is set, so that every record passes.
    pub(super) fn is_everything(&self) -> bool {
        *self == Self::default()
    }

    /// Whether it names a key or a caller, so that its answer tells whether a guess is right.
    pub(super) fn is_guess(&self) -> bool {
        self.key.is_some() || self.scope.is_some()
    }

    /// Where it names a part that no route has in its scope, so that no record of theirs can be found by it: that.
    pub(super) fn unused_scope(&self, state: &State) -> Option<String> {
        let scope = self.scope.as_ref()?;
        let configured = state.configured.load();
        let parts = || configured.routes.iter().flat_map(|route| &route.scope);
        if parts().any(|word| scope.is_of(word)) {
            return None;
        }
        let parts: BTreeSet<&str> = parts().map(|word| word.trim_end_matches('?')).collect();
        let parts = parts.into_iter().collect::<Vec<_>>().join(", ");
        let hint =
            if parts.contains("credential") { "; the header of a credential is `credential=NAME: VALUE`" } else { "" };
        Some(format!(
            "nothing is found, and no route has `{}` in its scope: the parts that routes have are {parts}{hint}",
            scope.part()
        ))
    }

    /// The selection among the records of this service; `None` where no record can pass.
    pub(super) fn select(self, state: &State) -> Option<Selection> {
        let identifiers = || state.identifiers.all();
        let tags = self.scope.as_ref().map(|scope| identifiers().flat_map(|by| scope.tags(by)).collect());
        let mut prefixes: Vec<[u8; 8]> =
            self.key.iter().flat_map(|key| identifiers().map(|by| by.prefix(key))).collect();
        // A store looks for one prefix. While one id secret takes the place of another there are several: it gives all.
        let by_key = prefixes.pop_if(|_| identifiers().count() == 1).map(IdPrefix::of_bytes);
        let prefix = match (by_key, self.id) {
            (Some(by_key), Some(id)) => Some(by_key.and(id)?),
            (by_key, id) => by_key.or(id),
        };
        let service = Some(state.service.clone());
        let Self { state, route, older_than, since, .. } = self;
        Some(Selection {
            filter: Filter { service, route, state, prefix, older_than, since },
            tags,
            on_file: Vec::new(),
            prefixes,
        })
    }
}

/// Whether an id begins with one of these, if there are any.
pub(super) fn begins(id: RecordId, prefixes: &[[u8; 8]]) -> bool {
    prefixes.is_empty() || prefixes.iter().any(|prefix| id.0.starts_with(prefix))
}

fn state(value: &str) -> Result<record::State, String> {
    let words = || record::State::ALL.map(record::State::as_str).join(", ");
    record::State::parse(value).ok_or_else(|| format!("must be one of: {}", words()))
}

/// Reads an age, such as 90s, 1h or 7d.
///
/// # Errors
/// What it must be.
pub fn parse_age(value: &str) -> Result<Duration, &'static str> {
    let age = humantime::parse_duration(value).ok().filter(|age| !age.is_zero());
    age.ok_or("must be a duration above zero, such as 90s, 1h or 7d")
}

/// Reads an age, or a time by UTC as RFC 3339 writes it.
///
/// # Errors
/// What it must be.
pub fn parse_since(value: &str) -> Result<Since, &'static str> {
    let age = humantime::parse_duration(value).ok().map(Since::Ago);
    age.or_else(|| parse_time(value).map(Since::At))
        .ok_or("must be a duration such as 1h, or a time such as 2026-01-31T22:00:00Z")
}

/// A time by UTC, as RFC 3339 writes it.
#[must_use]
pub fn parse_time(value: &str) -> Option<Timestamp> {
    // The library ignores what comes after the seconds and a `Z`.
    let of_utc = value.strip_suffix('Z').or_else(|| value.strip_suffix("+00:00")).unwrap_or(value);
    let (_, fraction) = of_utc.split_at_checked("2026-01-31T22:00:00".len())?;
    let is_fraction = |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    if !fraction.is_empty() && !fraction.strip_prefix('.').is_some_and(is_fraction) {
        return None;
    }
    let time = humantime::parse_rfc3339_weak(value).ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    Some(Timestamp(u64::try_from(time.as_millis()).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_an_age_or_a_date() {
        assert_eq!(parse_since("1h 30m"), Ok(Since::Ago(Duration::from_secs(5400))));
        let at = Ok(Since::At(Timestamp(1_767_225_600_123)));
        for text in ["2026-01-01T00:00:00.123Z", "2026-01-01 00:00:00.123", "2026-01-01T00:00:00.123+00:00"] {
            assert_eq!(parse_since(text), at, "{text}");
        }
        for text in [
            "",
            "soon",
            "3",
            "2026-01-01",
            "2026-13-01T00:00:00Z",
            "1969-01-01T00:00:00Z",
            "2026-01-01T00:00:00Z*",
            "2026-01-01T00:00:00-05:00",
            "2026-01-01T00:00:00ZZ",
        ] {
            assert!(parse_since(text).is_err(), "{text}");
        }
    }
}
