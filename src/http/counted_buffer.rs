//! A memory buffer whose bytes count against a budget.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};

use super::budget::{Budget, Permit};

/// A body of one frame of at most this size, in bytes, is not counted: the number of requests bounds these.
const UNCOUNTED: usize = 4 << 10;

/// A buffer whose bytes count against a budget.
pub(super) struct CountedBuffer<'a> {
    /// The only frame so far: most bodies have one, which needs no copy.
    first: Option<Bytes>,
    memory: BytesMut,
    /// As many bytes as `memory` has room for, times `copies`.
    permit: Option<Permit>,
    budget: &'a Arc<Budget>,
    copies: u64,
    floor: usize,
    expected: usize,
}

impl<'a> CountedBuffer<'a> {
    pub(super) fn new(budget: &'a Arc<Budget>) -> Self {
        Self { first: None, memory: BytesMut::new(), permit: None, budget, copies: 1, floor: 0, expected: 0 }
    }

    /// Counts each byte this many times, for copies that will be made of it.
    pub(super) fn with_copies(self, copies: u64) -> Self {
        Self { copies, ..self }
    }

    /// Accepts up to this many bytes even where the budget has no room.
    pub(super) fn with_floor(self, floor: usize) -> Self {
        Self { floor, ..self }
    }

    /// Reserves room for this many bytes as soon as a second frame arrives.
    pub(super) fn with_expected_len(self, expected: usize) -> Self {
        Self { expected, ..self }
    }

    pub(super) fn len(&self) -> usize {
        self.first.as_ref().map_or(self.memory.len(), Bytes::len)
    }

    /// A copy of a part of the buffer.
    pub(super) fn copy(&self, part: Range<usize>) -> Bytes {
        let buffer = self.first.as_deref().unwrap_or(&self.memory);
        Bytes::copy_from_slice(&buffer[part])
    }

    /// Adds a frame; returns it where the budget has no room.
    pub(super) fn push(&mut self, data: Bytes) -> Result<(), Bytes> {
        if self.len() == 0 && self.memory.capacity() == 0 {
            if data.len() > UNCOUNTED && !self.reserve(data.len()) {
                return Err(data);
            }
            self.first = Some(data);
            return Ok(());
        }
        let needed = self.len() + data.len();
        if needed > self.memory.capacity() {
            let generous = needed.max(self.memory.capacity() * 2).max(self.expected);
            let capacity = if self.try_reserve(generous) {
                generous
            } else if self.reserve(needed) {
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

    /// Takes the bytes out, which count until their last reference is dropped. Also returns the permit for the copies,
    /// if any.
    pub(super) fn take(&mut self) -> (Bytes, Option<Permit>) {
        let bytes = self.first.take().unwrap_or_else(|| std::mem::take(&mut self.memory).freeze());
        let Some(mut permit) = self.permit.take() else { return (bytes, None) };
        let copies = permit.split(permit.amount() / self.copies * (self.copies - 1));
        (counted(bytes, permit), Some(copies))
    }

    /// Extends the permit to `capacity` bytes in all.
    fn reserve(&mut self, capacity: usize) -> bool {
        let (shortfall, is_below) = (self.shortfall(capacity), capacity <= self.floor);
        let permit = self.permit();
        if is_below {
            permit.force_grow(shortfall);
            return true;
        }
        permit.grow(shortfall)
    }

    fn try_reserve(&mut self, capacity: usize) -> bool {
        let shortfall = self.shortfall(capacity);
        self.permit().try_grow(shortfall)
    }

    fn permit(&mut self) -> &mut Permit {
        self.permit.get_or_insert_with(|| self.budget.empty_permit())
    }

    fn shortfall(&self, capacity: usize) -> u64 {
        (capacity as u64 * self.copies).saturating_sub(self.permit.as_ref().map_or(0, Permit::amount))
    }
}

/// Bytes that count until their last reference is dropped.
pub(super) fn counted(bytes: Bytes, permit: Permit) -> Bytes {
    struct Counted {
        bytes: Bytes,
        _permit: Permit,
    }
    impl AsRef<[u8]> for Counted {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }
    if permit.amount() == 0 {
        return bytes;
    }
    Bytes::from_owner(Counted { bytes, _permit: permit })
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
        let mut buffer = CountedBuffer::new(&budget);
        buffer.push(piece(10_000)).unwrap();
        assert_eq!(budget.used(), 10_000);
        for _ in 0..5 {
            buffer.push(piece(10_000)).unwrap();
            assert!(budget.used() >= buffer.memory.capacity() as u64, "{}", budget.used());
        }
        let (bytes, _) = buffer.take();
        assert_eq!((bytes.len(), buffer.len()), (60_000, 0));
        let part = bytes.slice(10..20);
        drop(bytes);
        assert!(budget.used() >= 60_000);
        drop(part);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_small_first_frame_is_not_counted() {
        let budget = budget(UNCOUNTED as u64 + 1);
        let mut buffer = CountedBuffer::new(&budget);
        buffer.push(piece(UNCOUNTED)).unwrap();
        assert_eq!(budget.used(), 0);
        buffer.push(piece(1)).unwrap();
        assert_eq!(budget.used(), UNCOUNTED as u64 + 1);
        assert!(buffer.push(piece(1)).is_err());
        assert!(CountedBuffer::new(&budget).push(piece(UNCOUNTED + 1)).is_err());
    }

    #[test]
    fn a_frame_without_room_is_returned_and_the_buffer_is_kept() {
        let budget = budget(25_000);
        let mut buffer = CountedBuffer::new(&budget);
        buffer.push(piece(10_000)).unwrap();
        // Not twice as much as there is, but as much as is needed.
        buffer.push(piece(11_000)).unwrap();
        assert_eq!(buffer.push(piece(4_100)).unwrap_err().len(), 4_100);
        assert_eq!(buffer.len(), 21_000);
        buffer.push(piece(4_000)).unwrap();
        assert_eq!(buffer.take().0.len(), 25_000);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn copies_are_counted_separately_and_the_floor_is_always_available() {
        let budget = budget(10);
        let mut buffer = CountedBuffer::new(&budget).with_copies(2).with_floor(10_000);
        buffer.push(piece(6_000)).unwrap();
        buffer.push(piece(4_000)).unwrap();
        assert_eq!(budget.used(), 20_000);
        assert!(buffer.push(piece(1)).is_err());
        let (bytes, copies) = buffer.take();
        drop(copies);
        assert_eq!(budget.used(), 10_000);
        drop(bytes);
        assert_eq!(budget.used(), 0);
    }
}
