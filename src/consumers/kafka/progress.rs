//! How far the messages of each partition are done: what may be committed.

use std::collections::{BTreeMap, HashMap};

/// Where a message stands, and which of several messages that came from there it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MessagePosition {
    pub(super) partition: i32,
    pub(super) offset: i64,
    generation: u64,
}

/// The partitions that messages came from.
#[derive(Default)]
pub(super) struct Progress {
    partitions: HashMap<i32, Partition>,
    generations: u64,
}

/// A partition, while this member has it.
struct Partition {
    /// Of what comes now. Another one begins where the offsets go back.
    generation: u64,
    /// Messages that came and have not ended, each with its generation.
    open: BTreeMap<i64, u64>,
    /// The place behind the last message that came.
    next: i64,
}

impl Progress {
    /// A message came.
    pub(super) fn received(&mut self, partition: i32, offset: i64) -> MessagePosition {
        let generations = &mut self.generations;
        let mut following = || {
            *generations += 1;
            *generations
        };
        let entry = self.partitions.entry(partition).or_insert_with(|| Partition {
            generation: following(),
            open: BTreeMap::new(),
            next: offset,
        });
        // The topic lost messages, and counts from an earlier offset again. Those from there on are others, whose ends are
        // still to come. Those before it are still there: nothing behind them may be committed until they have ended.
        if offset < entry.next {
            entry.open.split_off(&offset);
            entry.generation = following();
        }
        entry.next = offset + 1;
        entry.open.insert(offset, entry.generation);
        MessagePosition { partition, offset, generation: entry.generation }
    }

    /// A message has ended. Everything before the offset that is returned has ended too: it may be committed.
    pub(super) fn ended(&mut self, place: &MessagePosition) -> Option<i64> {
        let partition = self.current(place)?;
        let before = partition.first();
        partition.open.remove(&place.offset);
        let after = partition.first();
        (after > before).then_some(after)
    }

    /// A partition went to another member.
    pub(super) fn revoked(&mut self, partition: i32) {
        self.partitions.remove(&partition);
    }

    /// Whether a message has not ended, and is still the one at its place.
    pub(super) fn is_current(&mut self, place: &MessagePosition) -> bool {
        self.current(place).is_some()
    }

    fn current(&mut self, place: &MessagePosition) -> Option<&mut Partition> {
        let partition = self.partitions.get_mut(&place.partition)?;
        (partition.open.get(&place.offset) == Some(&place.generation)).then_some(partition)
    }
}

impl Partition {
    /// The first message that has not ended.
    fn first(&self) -> i64 {
        self.open.first_key_value().map_or(self.next, |(offset, _)| *offset)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_is_committed_beyond_a_message_that_has_not_ended() {
        let mut progress = Progress::default();
        // Offsets have gaps: markers of transactions, and messages that were compacted away.
        let [first, second, third] = [5, 6, 9].map(|offset| progress.received(0, offset));
        assert_eq!(progress.ended(&second), None);
        assert_eq!(progress.ended(&first), Some(9));
        assert_eq!(progress.ended(&first), None);
        assert_eq!(progress.ended(&third), Some(10));
        let other = progress.received(1, 0);
        let fourth = progress.received(0, 10);
        assert_eq!(progress.ended(&other), Some(1));
        assert_eq!(progress.ended(&fourth), Some(11));
    }

    #[test]
    fn what_came_before_a_partition_went_counts_no_more() {
        let mut progress = Progress::default();
        let before = progress.received(3, 7);
        progress.revoked(3);
        assert!(!progress.is_current(&before));
        assert_eq!(progress.ended(&before), None);
        // It comes back from where it was committed.
        let again = progress.received(3, 7);
        let behind = progress.received(3, 8);
        assert_eq!(progress.ended(&before), None, "the second time is still under way");
        assert_eq!(progress.ended(&behind), None);
        assert_eq!(progress.ended(&again), Some(9));
    }

    #[test]
    fn a_partition_that_goes_back_begins_anew() {
        let mut progress = Progress::default();
        let before = progress.received(0, 900);
        let again = progress.received(0, 10);
        assert_eq!((progress.ended(&before), progress.ended(&again)), (None, Some(11)));
    }

    #[test]
    fn nothing_is_committed_beyond_a_message_before_the_place_that_a_partition_goes_back_to() {
        let mut progress = Progress::default();
        let [waiting, ended, lost] = [5, 6, 9].map(|offset| progress.received(0, offset));
        assert_eq!(progress.ended(&ended), None);
        // An unclean election of a leader: offsets from 8 on are given anew.
        let new = progress.received(0, 8);
        let second = progress.received(0, 9);
        assert_eq!(progress.ended(&new), None, "5 has not ended, and is still in the topic");
        assert!(!progress.is_current(&lost));
        assert_eq!(progress.ended(&lost), None, "another message has its place");
        assert_eq!(progress.ended(&waiting), Some(9));
        assert_eq!(progress.ended(&second), Some(10));
    }

    proptest! {
        #[test]
        fn what_is_committed_is_exactly_what_has_ended(ends in Just((0..20_i64).collect::<Vec<_>>()).prop_shuffle()) {
            let mut progress = Progress::default();
            let places: Vec<MessagePosition> = (0..20).map(|offset| progress.received(0, offset)).collect();
            let (mut committed, mut ended) = (0, BTreeSet::new());
            for offset in ends {
                ended.insert(offset);
                committed = progress.ended(&places[usize::try_from(offset).unwrap()]).unwrap_or(committed);
                let first = (0..).find(|offset| !ended.contains(offset)).unwrap();
                prop_assert_eq!(committed, first);
            }
        }
    }
}
