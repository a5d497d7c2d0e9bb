//! Which database has a record.
//!
//! Ids are divided into as many ranges of equal length as there are databases, in the order of the list. An id is a digest,
//! so each range gets the same share of the records. A range can be named by its two ends, in SQL too: so a database can
//! itself refuse the ids that are not its own, the order of the ids is that of the databases, and records move to another
//! number of databases one part of a range after another. Other choices, such as jump hashing, move fewer records when a
//! database is added (a third of them instead of a half from two to three), and allow none of that.

use crate::idempotency::record::RecordId;

/// The place, from 0, of the database that has an id, of so many (at least 1).
#[must_use]
pub fn place_of(id: RecordId, count: usize) -> usize {
    let mut first = [0; 8];
    first.copy_from_slice(&id.0[..8]);
    // Below `count`, since the product is below `count << 64`.
    ((u128::from(u64::from_be_bytes(first)) * count as u128) >> 64) as usize
}

/// How the first id of a place begins: all ids that begin so or are greater belong to it or to a later place. Empty for
/// the first place.
#[must_use]
pub fn beginning(place: usize, count: usize) -> Vec<u8> {
    match ((place as u128) << 64).div_ceil(count as u128) {
        0 => Vec::new(),
        first => u64::try_from(first).unwrap_or(u64::MAX).to_be_bytes().to_vec(),
    }
}

/// The last id of a place.
#[must_use]
pub fn last(place: usize, count: usize) -> RecordId {
    let mut id = [0xff; 32];
    if place + 1 < count {
        let next = ((place as u128 + 1) << 64).div_ceil(count as u128);
        id[..8].copy_from_slice(&u64::try_from(next - 1).unwrap_or(u64::MAX).to_be_bytes());
    }
    RecordId(id)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(first: u64) -> RecordId {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&first.to_be_bytes());
        RecordId(id)
    }

    /// Gates of every version must choose the same database.
    #[test]
    fn the_choice_never_changes() {
        let third = u64::MAX / 3;
        for (first, count, place) in [
            (0, 1, 0),
            (u64::MAX, 1, 0),
            (0x7fff_ffff_ffff_ffff, 2, 0),
            (0x8000_0000_0000_0000, 2, 1),
            (third, 3, 0),
            (third + 1, 3, 1),
            (2 * third, 3, 1),
            (2 * third + 1, 3, 2),
            (u64::MAX, 3, 2),
            (u64::MAX, 64, 63),
        ] {
            assert_eq!(place_of(id(first), count), place, "{first:x} of {count}");
        }
        assert_eq!(beginning(0, 3), [0; 0]);
        assert_eq!(beginning(1, 2), [0x80, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(beginning(1, 3), [0x55, 0x55, 0x55, 0x55, 0x55, 0x55, 0x55, 0x56]);
    }

    #[test]
    fn each_database_gets_its_share() {
        for count in [2, 3, 7, 64] {
            let mut found = vec![0_usize; count];
            for number in 0..count as u64 * 1000 {
                use sha2::{Digest, Sha256};
                found[place_of(RecordId(Sha256::digest(number.to_be_bytes()).into()), count)] += 1;
            }
            assert!(found.iter().all(|found| (850..=1150).contains(found)), "{found:?}");
        }
    }

    proptest! {
        /// The ends of ranges, by which databases judge, are those of the choice, by which gates do.
        #[test]
        fn ranges_are_what_the_choice_says(count in 1_usize..=64, first: u64, tail: [u8; 24]) {
            let mut id = id(first);
            id.0[8..].copy_from_slice(&tail);
            let place = place_of(id, count);
            prop_assert!(place < count);
            prop_assert!(id.0[..] >= beginning(place, count)[..] && id <= last(place, count));
            prop_assert_eq!(place_of(last(place, count), count), place);
            if place + 1 < count {
                prop_assert!(id.0[..] < beginning(place + 1, count)[..]);
                let mut next = [0; 32];
                next[..8].copy_from_slice(&beginning(place + 1, count));
                prop_assert_eq!(place_of(RecordId(next), count), place + 1);
            }
        }
    }
}
