//! What a head keeps for operators, and for the client that asks what became of an accepted request. No claim depends on it.
//!
//! A list of entries, each a byte that says what it is, a byte for its length, and its bytes. A reader skips entries that it
//! does not know, so that a later version can add some without another version of heads.

use std::num::NonZeroU64;
use std::time::Duration;

use bytes::Bytes;

use super::Reader;
use crate::idempotency::identity::{RulesTag, ScopeTag};
use crate::idempotency::key::Key;
use crate::idempotency::record::RequestId;

const REQUEST: u8 = 1;
const TRACE: u8 = 2;
const UPSTREAM: u8 = 3;
const CALLER: u8 = 4;
const UNKNOWN_TTL: u8 = 5;
/// A key that is longer than an entry is in several, one after the other.
const KEY: u8 = 6;
/// All tags, one after the other.
const SCOPE: u8 = 7;
const RULES: u8 = 8;
const ACCEPTED: u8 = 9;
const CALL: u8 = 10;

/// The most tags in an entry.
const MOST_TAGS: usize = u8::MAX as usize / size_of::<ScopeTag>();

/// What a head says of its request besides what decisions need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// The id of the request.
    pub request: Option<RequestId>,
    /// The id of the trace that its client sent (W3C Trace Context). Without one, it is [`RequestId::trace`].
    pub trace: Option<u128>,
    /// The name of the upstream that it was forwarded to.
    pub upstream: Option<String>,
    /// A digest of the caller, equal for the requests of one caller on routes with the same scope.
    pub caller: Option<[u8; 8]>,
    /// What finds the record by a part of its scope; `None` where an older release claimed it.
    pub scope: Option<Vec<ScopeTag>>,
    /// By which rules its id was made, where its gate knew several.
    pub rules: Option<RulesTag>,
    /// How long the record is kept if it turns unknown.
    pub unknown_ttl: Option<Duration>,
    /// The whole key, where the upstream is asked about records without a client.
    pub key: Option<Key>,
    /// Whether it was accepted, and its client may ask for its status.
    pub is_accepted: bool,
    /// Whether it is a gRPC call.
    pub is_call: bool,
}

impl Details {
    /// Whether the attempt went to the upstream of this name. Another one answers 404 about all that it never saw. An attempt that
    /// names none may have gone anywhere.
    #[must_use]
    pub fn went_to(&self, upstream: &str) -> bool {
        self.upstream.as_ref().is_none_or(|own| own == upstream)
    }

    pub(super) fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(64);
        let mut put = |what: u8, bytes: &[u8]| {
            if let Ok(length) = u8::try_from(bytes.len()) {
                out.extend_from_slice(&[what, length]);
                out.extend_from_slice(bytes);
            }
        };
        if let Some(RequestId(id)) = self.request {
            put(REQUEST, &id.get().to_be_bytes());
        }
        if let Some(trace) = self.trace {
            put(TRACE, &trace.to_be_bytes());
        }
        if let Some(upstream) = &self.upstream {
            // A longer name is left out.
            put(UPSTREAM, upstream.as_bytes());
        }
        if let Some(caller) = &self.caller {
            put(CALLER, caller);
        }
        if let Some(tags) = &self.scope {
            // No scope has as many parts as an entry has room for.
            let tags: Vec<u8> = tags.iter().take(MOST_TAGS).flat_map(|tag| tag.0).collect();
            put(SCOPE, &tags);
        }
        if let Some(RulesTag(tag)) = &self.rules {
            put(RULES, tag);
        }
        if let Some(ttl) = self.unknown_ttl {
            let millis = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).to_be_bytes();
            let zeroes = millis.iter().take_while(|byte| **byte == 0).count();
            put(UNKNOWN_TTL, &millis[zeroes..]);
        }
        if let Some(key) = &self.key {
            key.as_str().as_bytes().chunks(usize::from(u8::MAX)).for_each(|chunk| put(KEY, chunk));
        }
        if self.is_accepted {
            put(ACCEPTED, &[]);
        }
        if self.is_call {
            put(CALL, &[]);
        }
        out.into()
    }

    /// Reads what can be read: an entry that is damaged, and what follows it, is as good as absent.
    pub(super) fn decode(bytes: &Bytes) -> Self {
        let mut details = Self::default();
        let mut key = Vec::new();
        let mut reader = Reader::new(bytes);
        while let Ok([what, length]) = reader.array() {
            let Ok(value) = reader.take(usize::from(length)) else { break };
            match what {
                REQUEST => details.request = number(&value).and_then(NonZeroU64::new).map(RequestId),
                TRACE => details.trace = value.as_ref().try_into().ok().map(u128::from_be_bytes),
                UPSTREAM => details.upstream = String::from_utf8(value.into()).ok(),
                CALLER => details.caller = value.as_ref().try_into().ok(),
                UNKNOWN_TTL => details.unknown_ttl = number(&value).map(Duration::from_millis),
                SCOPE => details.scope = Some(value.as_chunks().0.iter().copied().map(ScopeTag).collect()),
                RULES => details.rules = value.as_ref().try_into().ok().map(RulesTag),
                KEY => key.extend_from_slice(&value),
                ACCEPTED => details.is_accepted = true,
                CALL => details.is_call = true,
                _ => {}
            }
        }
        details.key = Key::from_value(&key, key.len()).ok();
        details
    }
}

/// A number whose leading zero bytes may be left out.
fn number(bytes: &[u8]) -> Option<u64> {
    let mut all = [0; 8];
    let from = all.len().checked_sub(bytes.len())?;
    all[from..].copy_from_slice(bytes);
    Some(u64::from_be_bytes(all))
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    prop_compose! {
        pub(in super::super) fn details()(
            request in proptest::option::of(1..=u64::MAX),
            trace in proptest::option::of(any::<u128>()),
            upstream in proptest::option::of("\\PC{0,20}"),
            caller in proptest::option::of(any::<[u8; 8]>()),
            scope in proptest::option::of(proptest::collection::vec(any::<[u8; 8]>(), 0..5)),
            rules in proptest::option::of(any::<[u8; 8]>()),
            unknown_ttl in proptest::option::of(any::<u64>()),
            key in proptest::option::of("[!-~]{1,600}"),
            is_accepted in any::<bool>(),
            is_call in any::<bool>(),
        ) -> Details {
            Details {
                request: request.and_then(NonZeroU64::new).map(RequestId),
                trace,
                upstream,
                caller,
                scope: scope.map(|tags| tags.into_iter().map(ScopeTag).collect()),
                rules: rules.map(RulesTag),
                unknown_ttl: unknown_ttl.map(Duration::from_millis),
                key: key.and_then(|key| Key::from_value(key.as_bytes(), key.len()).ok()),
                is_accepted,
                is_call,
            }
        }
    }

    proptest! {
        #[test]
        fn details_survive(details in details()) {
            prop_assert_eq!(Details::decode(&details.encode()), details);
        }

        #[test]
        fn entries_of_a_later_version_are_skipped(details in details(), what in 11..=255_u8, value in "[a-z]{0,9}") {
            let later = [&[what, value.len() as u8], value.as_bytes(), &details.encode()].concat();
            prop_assert_eq!(Details::decode(&later.into()), details);
        }

        #[test]
        fn damaged_details_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let _ = Details::decode(&bytes.into()).encode();
        }
    }

    #[test]
    fn the_layout_is_as_it_ever_was() {
        let details = Details {
            request: NonZeroU64::new(7).map(RequestId),
            trace: Some(8),
            upstream: Some("app".to_owned()),
            caller: Some([9; 8]),
            scope: Some(vec![ScopeTag([5; 8]), ScopeTag([6; 8])]),
            rules: Some(RulesTag([4; 8])),
            unknown_ttl: Some(Duration::from_millis(258)),
            key: Key::from_value(b"k-1", 255).ok(),
            is_accepted: true,
            is_call: true,
        };
        let mut expected = b"\x01\x08\0\0\0\0\0\0\0\x07\x02\x10".to_vec();
        expected.extend(8_u128.to_be_bytes());
        expected.extend(b"\x03\x03app\x04\x08\x09\x09\x09\x09\x09\x09\x09\x09\x07\x10\x05\x05\x05\x05\x05\x05\x05\x05\x06\x06\x06\x06\x06\x06\x06\x06\x08\x08\x04\x04\x04\x04\x04\x04\x04\x04\x05\x02\x01\x02\x06\x03k-1\x09\x00\x0a\x00");
        assert_eq!(&details.encode()[..], &expected[..]);
        let long = Details { upstream: Some("x".repeat(256)), ..Details::default() };
        assert_eq!(Details::decode(&long.encode()), Details::default());
    }
}
