//! What an operator may ask for, and the newest records of those that a store looks at.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::{Error, ErrorKind, Origin, RecordEntry};
use crate::idempotency::record::{Record, RecordId, State, Timestamp};

/// Which records to list. Everything that is set must hold.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Of this service.
    pub service: Option<Arc<str>>,
    /// Claimed by this route.
    pub route: Option<String>,
    /// In this state.
    pub state: Option<State>,
    /// With an id that starts with these digits.
    pub prefix: Option<IdPrefix>,
    /// Claimed at least this long ago.
    pub older_than: Option<Duration>,
    /// Claimed no earlier than this.
    pub since: Option<Since>,
}

/// The earliest claim that passes a [`Filter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// This long ago.
    Ago(Duration),
    /// At this time.
    At(Timestamp),
}

/// The first hexadecimal digits of an id: from none to all 64.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct IdPrefix {
    digits: usize,
    /// The digits, and zeros after them.
    bytes: [u8; 32],
}

/// A place in a listing, between two of its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// When the record before it was claimed.
    pub claimed_at: Timestamp,
    /// The id of that record.
    pub id: RecordId,
    /// Where the store finds it again; 0 where the store goes by time and id.
    pub position: i64,
}

/// A part of a listing.
#[derive(Clone, Debug)]
pub struct Page {
    /// The records, newest first.
    pub records: Vec<RecordEntry>,
    /// Where the next page starts; `None` if no record is left.
    pub next: Option<Cursor>,
}

/// A part of a scan.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// The records, in the order of their ids.
    pub records: Vec<RecordEntry>,
    /// After which id the next chunk starts; `None` if no record is left.
    pub next: Option<RecordId>,
}

impl Filter {
    /// The ids that a record that passes may have.
    pub(super) fn ids(&self) -> RangeInclusive<RecordId> {
        self.prefix.unwrap_or(IdPrefix::NONE).ids()
    }

    /// The same filter, whose ages count at this time of the store, as far as a store need know: it may find records as well that were
    /// not [`older_than`](Self::older_than) that by then.
    #[must_use]
    pub fn at(self, time: Timestamp) -> Self {
        let since = self.since.map(|since| match since {
            Since::Ago(age) => Since::At(time.minus(age)),
            Since::At(earliest) => Since::At(earliest),
        });
        Self { since, ..self }
    }

    /// Whether a record passes, by the store's time `now`.
    #[must_use]
    pub fn passes(&self, id: RecordId, record: &Record, origin: Option<&Origin>, now: Timestamp) -> bool {
        self.service.as_ref().is_none_or(|service| origin.is_some_and(|origin| origin.service == *service))
            && self.route.as_ref().is_none_or(|route| origin.is_some_and(|origin| *origin.route == **route))
            && self.state.is_none_or(|state| record.state == state)
            && self.prefix.is_none_or(|prefix| prefix.ids().contains(&id))
            && self.older_than.is_none_or(|age| record.claimed_at.plus(age) <= now)
            && self.since.is_none_or(|since| since.includes(record.claimed_at, now))
    }
}

impl Since {
    /// Whether a time is no earlier, by the store's time `now`.
    pub(super) fn includes(self, time: Timestamp, now: Timestamp) -> bool {
        match self {
            Self::Ago(age) => time.plus(age) >= now,
            Self::At(earliest) => time >= earliest,
        }
    }
}

impl IdPrefix {
    /// Every id starts with it.
    pub(super) const NONE: Self = Self { digits: 0, bytes: [0; 32] };

    /// Reads up to 64 hexadecimal digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut prefix = Self { digits: text.len(), bytes: [0; 32] };
        for (place, digit) in text.chars().enumerate() {
            let digit = u8::try_from(digit.to_digit(16)?).ok()?;
            *prefix.bytes.get_mut(place / 2)? |= if place % 2 == 0 { digit << 4 } else { digit };
        }
        Some(prefix)
    }

    /// The ids that start with these bytes.
    #[must_use]
    pub fn of_bytes(first: [u8; 8]) -> Self {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&first);
        Self { digits: 16, bytes }
    }

    /// What ids start with that start with both; `None` if there are none.
    #[must_use]
    pub fn and(self, other: Self) -> Option<Self> {
        let (short, long) = if self.digits < other.digits { (self, other) } else { (other, self) };
        short.ids().contains(&RecordId(long.bytes)).then_some(long)
    }

    /// From the first id that starts with it to the last one.
    pub(super) fn ids(self) -> RangeInclusive<RecordId> {
        let mut last = self.bytes;
        for place in self.digits..64 {
            last[place / 2] |= if place % 2 == 0 { 0xf0 } else { 0x0f };
        }
        RecordId(self.bytes)..=RecordId(last)
    }
}

impl fmt::Debug for IdPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = RecordId(self.bytes).to_string();
        write!(f, "{}…", &digits[..self.digits])
    }
}

impl Cursor {
    /// Reads what `Display` writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let mut number = || parts.next()?.parse::<i64>().ok();
        let (claimed_at, position) = (Timestamp(number()?.unsigned_abs()), number()?);
        let id = RecordId::parse(parts.next()?)?;
        parts.next().is_none().then_some(Self { claimed_at, id, position })
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.claimed_at.0, self.position, self.id)
    }
}

impl Page {
    /// The page of `found`, which holds one record more than `limit` where there are more.
    pub(super) fn of(mut found: Vec<RecordEntry>, limit: usize) -> Self {
        let is_last = found.len() <= limit;
        found.truncate(limit);
        let last = found.last().filter(|_| !is_last);
        let next = last.map(|last| Cursor { claimed_at: last.record.claimed_at, id: last.id, position: 0 });
        Self { records: found, next }
    }
}

impl Chunk {
    /// The chunk of `found`, which holds one record more than `limit` where there are more.
    pub(super) fn of(mut found: Vec<RecordEntry>, limit: usize) -> Self {
        let is_last = found.len() <= limit;
        found.truncate(limit);
        let next = found.last().filter(|_| !is_last).map(|last| last.id);
        Self { records: found, next }
    }
}

/// The newest records after a cursor, of those that a store looks at in any order: a page of them and one more, which
/// shows that there is a next page. The others are not kept.
pub(super) struct Newest {
    limit: usize,
    after: Option<(Timestamp, RecordId)>,
    /// With their positions. The oldest is the first.
    kept: BTreeMap<(Timestamp, RecordId), (i64, RecordEntry)>,
}

impl Newest {
    pub(super) fn new(after: Option<Cursor>, limit: usize) -> Self {
        Self { limit, after: after.map(|after| (after.claimed_at, after.id)), kept: BTreeMap::new() }
    }

    /// Whether a record belongs to the page, by what was looked at so far.
    pub(super) fn wants(&self, claimed_at: Timestamp, id: RecordId) -> bool {
        let place = (claimed_at, id);
        self.after.is_none_or(|after| place < after)
            && (self.kept.len() <= self.limit || self.kept.first_key_value().is_some_and(|(oldest, _)| place > *oldest))
    }

    /// Keeps a record in its place.
    pub(super) fn keep(&mut self, claimed_at: Timestamp, position: i64, listed: RecordEntry) {
        self.kept.insert((claimed_at, listed.id), (position, listed));
        if self.kept.len() > self.limit.saturating_add(1) {
            self.kept.pop_first();
        }
    }

    /// Whether no record that was claimed at this time or before belongs to the page any more.
    pub(super) fn is_complete_at(&self, claimed_at: Timestamp) -> bool {
        self.kept.len() > self.limit && self.kept.first_key_value().is_some_and(|((oldest, _), _)| *oldest > claimed_at)
    }

    /// The last place of the page so far.
    pub(super) fn last(&self) -> Option<(Timestamp, RecordId)> {
        self.kept.first_key_value().map(|(place, _)| *place).or(self.after)
    }

    /// The page.
    pub(super) fn into_page(mut self) -> Page {
        let is_last = self.kept.len() <= self.limit;
        if !is_last {
            self.kept.pop_first();
        }
        let next = self.kept.first_key_value().filter(|_| !is_last);
        let next = next.map(|((claimed_at, id), (position, _))| Cursor {
            claimed_at: *claimed_at,
            id: *id,
            position: *position,
        });
        Page { records: self.kept.into_values().rev().map(|(_, listed)| listed).collect(), next }
    }
}

/// A listing that looks at more records than it has time for.
pub(super) fn takes_too_long(limit: Duration) -> Error {
    let limit = limit.as_secs();
    Error::determinate(ErrorKind::Timeout, format!("the list could not be made within {limit} s"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_have_any_number_of_digits() {
        let ids = |text: &str| {
            let ids = IdPrefix::parse(text).unwrap().ids();
            (ids.start().to_string(), ids.end().to_string())
        };
        let rest = |digit: &str, count| digit.repeat(count);
        assert_eq!(ids(""), (rest("0", 64), rest("f", 64)));
        assert_eq!(ids("a"), ("a".to_owned() + &rest("0", 63), "a".to_owned() + &rest("f", 63)));
        assert_eq!(ids("0B"), ("0b".to_owned() + &rest("0", 62), "0b".to_owned() + &rest("f", 62)));
        assert_eq!(ids("abc"), ("abc".to_owned() + &rest("0", 61), "abc".to_owned() + &rest("f", 61)));
        let whole = rest("0123456789abcdef", 4);
        assert_eq!(ids(&whole), (whole.clone(), whole.clone()));
        for wrong in ["g", "+1", "é", " ", &(whole + "0")] {
            assert_eq!(IdPrefix::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn two_prefixes_are_the_longer_one_or_nothing() {
        let prefix = |text: &str| IdPrefix::parse(text).unwrap();
        assert_eq!(prefix("abc").and(prefix("a")), Some(prefix("abc")));
        assert_eq!(prefix("a").and(prefix("abc")), Some(prefix("abc")));
        assert_eq!(prefix("a").and(prefix("a")), Some(prefix("a")));
        assert_eq!(prefix("a").and(prefix("b")), None);
        assert_eq!(prefix("abd").and(prefix("abc")), None);
        assert_eq!(prefix("a0").and(prefix("a")), Some(prefix("a0")));
        let bytes = IdPrefix::of_bytes([0xab; 8]);
        assert_eq!(bytes, prefix("abababababababab"));
    }

    #[test]
    fn cursors_are_read_as_they_are_written() {
        let id = RecordId([0xa5; 32]);
        for (claimed_at, position) in [(0, 0), (1_767_225_600_123, 17), (i64::MAX as u64, i64::MAX)] {
            let cursor = Cursor { claimed_at: Timestamp(claimed_at), id, position };
            assert_eq!(Cursor::parse(&cursor.to_string()), Some(cursor));
        }
        // The second is a cursor of an older version.
        for wrong in ["", &id.to_string(), "1-2", "1-2-3", &format!("1-2-{id}-"), &format!("x-2-{id}")] {
            assert_eq!(Cursor::parse(wrong), None, "{wrong}");
        }
        assert_eq!(Cursor::parse(&format!("-1-2-{id}")), None);
    }
}
