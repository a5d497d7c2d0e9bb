//! Ranges of record ids, by their first eight bytes.

use crate::store::sharded::placement::beginning;

/// From `first` on, up to before `beyond`: `1 << 64` is after every id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Range {
    pub(super) first: u128,
    pub(super) beyond: u128,
}

/// After every id.
const END: u128 = 1 << 64;

impl Range {
    /// All of a place, of so many.
    pub(super) fn of_place(place: usize, count: usize) -> Self {
        let beyond = if place + 1 < count { bound(&beginning(place + 1, count)) } else { END };
        Self { first: bound(&beginning(place, count)), beyond }
    }

    /// As a row of `oncegate.owned` has it.
    pub(super) fn of_row(first: &[u8], beyond: Option<&[u8]>) -> Self {
        Self { first: bound(first), beyond: beyond.map_or(END, bound) }
    }

    pub(super) fn to_row(self) -> (Vec<u8>, Option<Vec<u8>>) {
        let bytes = |bound: u128| match u64::try_from(bound) {
            Ok(0) => Some(Vec::new()),
            Ok(bound) => Some(bound.to_be_bytes().to_vec()),
            Err(_) => None,
        };
        (bytes(self.first).unwrap_or_default(), bytes(self.beyond))
    }

    pub(super) fn and(self, other: Self) -> Option<Self> {
        let both = Self { first: self.first.max(other.first), beyond: self.beyond.min(other.beyond) };
        (both.first < both.beyond).then_some(both)
    }

    /// What is left of it without others.
    pub(super) fn without(self, others: &[Self]) -> Vec<Self> {
        let mut others: Vec<Self> = others.iter().filter_map(|other| self.and(*other)).collect();
        others.sort_unstable();
        let (mut left, mut at) = (Vec::new(), self.first);
        for other in others {
            left.extend(Self { first: at, beyond: other.first }.and(self));
            at = at.max(other.beyond);
        }
        left.extend(Self { first: at, beyond: self.beyond }.and(self));
        left
    }

    /// Parts of it of this length at most.
    pub(super) fn parts(self, length: u128) -> impl Iterator<Item = Self> {
        let count = (self.beyond - self.first).div_ceil(length);
        (0..count).map(move |part| {
            let first = self.first + part * length;
            Self { first, beyond: (first + length).min(self.beyond) }
        })
    }
}

fn bound(bytes: &[u8]) -> u128 {
    let mut first = [0; 8];
    let length = bytes.len().min(8);
    first[..length].copy_from_slice(&bytes[..length]);
    u64::from_be_bytes(first).into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rows_are_read_as_they_are_written() {
        for count in [1, 2, 3, 64] {
            let mut at = 0;
            for place in 0..count {
                let range = Range::of_place(place, count);
                assert_eq!(range.first, at, "without a gap");
                at = range.beyond;
                let (first, beyond) = range.to_row();
                assert_eq!(Range::of_row(&first, beyond.as_deref()), range);
            }
            assert_eq!(at, END);
        }
    }

    proptest! {
        #[test]
        fn what_is_left_and_what_is_taken_are_the_whole(
            others in prop::collection::vec((0_u128..200, 1_u128..40), 0..6),
            first in 0_u128..100,
            length in 1_u128..100,
            point in 0_u128..250,
        ) {
            let whole = Range { first, beyond: first + length };
            let others: Vec<Range> = others.into_iter().map(|(first, length)| Range { first, beyond: first + length }).collect();
            let left = whole.without(&others);
            let has = |range: &Range| range.first <= point && point < range.beyond;
            prop_assert_eq!(left.iter().filter(|left| has(left)).count(), usize::from(has(&whole) && !others.iter().any(has)));
            for range in left {
                let parts: Vec<Range> = range.parts(7).collect();
                prop_assert_eq!(parts.iter().filter(|part| has(part)).count(), usize::from(has(&range)));
            }
        }
    }
}
