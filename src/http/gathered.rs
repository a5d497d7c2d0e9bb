//! Bytes that come in pieces, counted as they are gathered in memory.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::budget::{Budget, Taken};

/// A body that comes in one piece of this size at most, in bytes, is not counted: there are as many as requests.
const UNCOUNTED: usize = 4 << 10;

/// Bytes in memory that are a part of a budget.
pub(super) struct Gathered<'a> {
    /// The only piece so far: most bodies come in one, which then needs no copy.
    first: Option<Bytes>,
    memory: BytesMut,
    /// As many bytes as `memory` has room for, times `copies`.
    taken: Option<Taken>,
    budget: &'a Arc<Budget>,
    copies: u64,
    floor: usize,
    expected: usize,
}

impl<'a> Gathered<'a> {
    pub(super) fn new(budget: &'a Arc<Budget>) -> Self {
        Self { first: None, memory: BytesMut::new(), taken: None, budget, copies: 1, floor: 0, expected: 0 }
    }

    /// Counts each byte this many times: for copies that will be made of it.
    pub(super) fn copied(self, copies: u64) -> Self {
        Self { copies, ..self }
    }

    /// Takes up to this many bytes even where there is no room.
    pub(super) fn at_least(self, floor: usize) -> Self {
        Self { floor, ..self }
    }

    /// Makes room for this many as soon as they are more than one piece.
    pub(super) fn expecting(self, expected: usize) -> Self {
        Self { expected, ..self }
    }

    pub(super) fn len(&self) -> usize {
        self.first.as_ref().map_or(self.memory.len(), Bytes::len)
    }

    /// A copy of a part of what was gathered.
    pub(super) fn copy(&self, part: Range<usize>) -> Bytes {
        let gathered = self.first.as_deref().unwrap_or(&self.memory);
        Bytes::copy_from_slice(&gathered[part])
    }

    /// Adds a piece; gives it back where there is no room for it.
    pub(super) fn push(&mut self, data: Bytes) -> Result<(), Bytes> {
        if self.len() == 0 && self.memory.capacity() == 0 {
            if data.len() > UNCOUNTED && !self.count(data.len()) {
                return Err(data);
            }
            self.first = Some(data);
            return Ok(());
        }
        let needed = self.len() + data.len();
        if needed > self.memory.capacity() {
            let generous = needed.max(self.memory.capacity() * 2).max(self.expected);
            let capacity = if self.try_count(generous) {
                generous
            } else if self.count(needed) {
                needed
            } else {
                return Err(data);
            };
            self.memory.reserve(capacity - self.memory.len());
        }
        if let Some(first) = self.first.take() {
            self.memory.extend_from_slice(&first);
        }
        self.memory.extend_from_slice(&data);
        Ok(())
    }

    /// Takes out what was gathered, which is counted until nothing refers to it any more; and what was counted for its
    /// copies, if anything.
    pub(super) fn take(&mut self) -> (Bytes, Option<Taken>) {
        let bytes = self.first.take().unwrap_or_else(|| std::mem::take(&mut self.memory).freeze());
        let Some(mut taken) = self.taken.take() else { return (bytes, None) };
        let copies = taken.split(taken.amount() / self.copies * (self.copies - 1));
        (counted(bytes, taken), Some(copies))
    }

    /// Counts that there are `capacity` bytes in all, if that is more than there are.
    fn count(&mut self, capacity: usize) -> bool {
        let (more, is_below) = (self.more(capacity), capacity <= self.floor);
        let taken = self.taken();
        if is_below {
            taken.grow_anyway(more);
            return true;
        }
        taken.grow(more)
    }

    fn try_count(&mut self, capacity: usize) -> bool {
        let more = self.more(capacity);
        self.taken().try_grow(more)
    }

    fn taken(&mut self) -> &mut Taken {
        self.taken.get_or_insert_with(|| self.budget.nothing())
    }

    fn more(&self, capacity: usize) -> u64 {
        (capacity as u64 * self.copies).saturating_sub(self.taken.as_ref().map_or(0, Taken::amount))
    }
}

/// Bytes that are counted until nothing refers to them any more.
pub(super) fn counted(bytes: Bytes, taken: Taken) -> Bytes {
    struct Counted {
        bytes: Bytes,
        _taken: Taken,
    }
    impl AsRef<[u8]> for Counted {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }
    if taken.amount() == 0 {
        return bytes;
    }
    Bytes::from_owner(Counted { bytes, _taken: taken })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::limits::Limit;
    use crate::telemetry::metrics::Metrics;

    fn budget(most: u64) -> Arc<Budget> {
        Budget::new(Limit::MaxBufferedMemory, most, &Metrics::new().limits())
    }

    fn piece(size: usize) -> Bytes {
        vec![b'x'; size].into()
    }

    #[test]
    fn bytes_are_counted_until_nothing_refers_to_them() {
        let budget = budget(100_000);
        let mut gathered = Gathered::new(&budget);
        gathered.push(piece(10_000)).unwrap();
        assert_eq!(budget.taken(), 10_000);
        for _ in 0..5 {
            gathered.push(piece(10_000)).unwrap();
            assert!(budget.taken() >= gathered.memory.capacity() as u64, "{}", budget.taken());
        }
        let (bytes, _) = gathered.take();
        assert_eq!((bytes.len(), gathered.len()), (60_000, 0));
        let part = bytes.slice(10..20);
        drop(bytes);
        assert!(budget.taken() >= 60_000);
        drop(part);
        assert_eq!(budget.taken(), 0);
    }

    #[test]
    fn what_is_small_is_not_counted_until_there_is_more() {
        let budget = budget(UNCOUNTED as u64 + 1);
        let mut gathered = Gathered::new(&budget);
        gathered.push(piece(UNCOUNTED)).unwrap();
        assert_eq!(budget.taken(), 0);
        gathered.push(piece(1)).unwrap();
        assert_eq!(budget.taken(), UNCOUNTED as u64 + 1);
        assert!(gathered.push(piece(1)).is_err());
        assert!(Gathered::new(&budget).push(piece(UNCOUNTED + 1)).is_err());
    }

    #[test]
    fn what_finds_no_room_comes_back_and_what_was_gathered_stays() {
        let budget = budget(25_000);
        let mut gathered = Gathered::new(&budget);
        gathered.push(piece(10_000)).unwrap();
        // Not twice as much as there is, but as much as is needed.
        gathered.push(piece(11_000)).unwrap();
        assert_eq!(gathered.push(piece(4_100)).unwrap_err().len(), 4_100);
        assert_eq!(gathered.len(), 21_000);
        gathered.push(piece(4_000)).unwrap();
        assert_eq!(gathered.take().0.len(), 25_000);
        assert_eq!(budget.taken(), 0);
    }

    #[test]
    fn copies_are_counted_apart_and_the_floor_is_there_for_everybody() {
        let budget = budget(10);
        let mut gathered = Gathered::new(&budget).copied(2).at_least(10_000);
        gathered.push(piece(6_000)).unwrap();
        gathered.push(piece(4_000)).unwrap();
        assert_eq!(budget.taken(), 20_000);
        assert!(gathered.push(piece(1)).is_err());
        let (bytes, copies) = gathered.take();
        drop(copies);
        assert_eq!(budget.taken(), 10_000);
        drop(bytes);
        assert_eq!(budget.taken(), 0);
    }
}
