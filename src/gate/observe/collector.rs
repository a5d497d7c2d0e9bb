//! The body of a request that goes by.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use sha2::{Digest as _, Sha256};

use crate::http::request_body::IN_MEMORY;
use crate::http::usage::{Budget, Permit};
use crate::idempotency::record::Timestamp;
use crate::telemetry::wall_clock;

/// A body up to this size, in bytes, is not counted: the number of requests bounds these.
const UNCOUNTED: usize = 4 << 10;

/// Collects a body, up to the size that is kept in memory; of a larger one the digest.
pub(super) struct Collector {
    content: Content,
    /// How many bytes went by.
    length: u64,
    /// How many will, where that is known.
    expected: Option<u64>,
    /// The largest body that the route takes.
    limit: u64,
    state: State,
    memory: Permit,
    /// When it was there.
    ended: Option<Timestamp>,
}

enum Content {
    /// In one piece, which its sender counts.
    One(Bytes),
    Copied(BytesMut),
    Hashed(Sha256),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Part,
    Whole,
    TooLarge,
    NoRoom,
}

/// What was collected of a body.
pub(super) enum Collected {
    /// All of it.
    Whole(Bytes),
    /// The SHA-256 of all of it.
    Digest([u8; 32]),
    /// It is larger than its route takes.
    TooLarge,
    /// It did not come to its end, or there was no memory for it.
    Nothing,
}

/// One that the request and the notes about it share.
pub(super) type SharedCollector = Arc<Mutex<Collector>>;

impl Collector {
    /// For a body of at most `limit` bytes. Copies count against `memory`.
    pub(super) fn new(limit: u64, memory: &Arc<Budget>) -> Self {
        Self {
            content: Content::One(Bytes::new()),
            length: 0,
            expected: None,
            limit,
            state: State::Part,
            memory: memory.empty_permit(),
            ended: None,
        }
    }

    /// The body has this length.
    pub(super) fn expect(&mut self, length: Option<u64>) {
        self.expected = length;
        if length.is_some_and(|length| length > self.limit) {
            self.state = State::TooLarge;
        }
    }

    pub(super) fn add(&mut self, data: &Bytes) {
        self.length += data.len() as u64;
        if self.state == State::Part && !data.is_empty() {
            self.state = match self.length > self.limit {
                true => State::TooLarge,
                false if self.keep(data) => State::Part,
                false => State::NoRoom,
            };
            if self.state != State::Part {
                self.drop_content();
            }
        }
        if self.expected == Some(self.length) {
            self.end();
        }
    }

    /// Whether there is room for it.
    fn keep(&mut self, data: &Bytes) -> bool {
        let is_large = self.length > IN_MEMORY;
        match &mut self.content {
            Content::Hashed(hash) => hash.update(data),
            Content::One(one) if one.is_empty() => *one = data.clone(),
            Content::One(one) if is_large => self.content = Content::Hashed(hash_of(&[one, data])),
            Content::Copied(copied) if is_large => {
                self.content = Content::Hashed(hash_of(&[copied, data]));
                self.memory = self.memory.split(0);
            }
            Content::One(one) => {
                let mut copied = BytesMut::from(&one[..]);
                copied.extend_from_slice(data);
                self.content = Content::Copied(copied);
            }
            Content::Copied(copied) => copied.extend_from_slice(data),
        }
        match &self.content {
            Content::Copied(copied) => {
                let uncounted = (copied.capacity() as u64).saturating_sub(self.memory.amount());
                copied.capacity() <= UNCOUNTED || self.memory.grow_if_plenty(uncounted)
            }
            Content::One(_) | Content::Hashed(_) => true,
        }
    }

    /// The body came to its end.
    pub(super) fn end(&mut self) {
        if self.ended.is_none() {
            self.ended = Some(wall_clock());
        }
        if self.state == State::Part {
            self.state = State::Whole;
        }
    }

    /// What was collected, and when the body was there.
    pub(super) fn take(&mut self) -> (Collected, Option<Timestamp>) {
        let content = self.drop_content();
        let collected = match (self.state, content) {
            (State::Whole, Content::One(one)) => Collected::Whole(one),
            (State::Whole, Content::Copied(copied)) => Collected::Whole(copied.freeze()),
            (State::Whole, Content::Hashed(hash)) => Collected::Digest(hash.finalize().into()),
            (State::TooLarge, _) => Collected::TooLarge,
            (State::Part | State::NoRoom, _) => Collected::Nothing,
        };
        (collected, self.ended)
    }

    fn drop_content(&mut self) -> Content {
        self.memory = self.memory.split(0);
        std::mem::replace(&mut self.content, Content::One(Bytes::new()))
    }
}

fn hash_of(parts: &[&[u8]]) -> Sha256 {
    parts.iter().fold(Sha256::new(), |hash, part| hash.chain_update(part))
}

pub(super) fn lock(collector: &Mutex<Collector>) -> MutexGuard<'_, Collector> {
    // No operation under this lock can leave it inconsistent.
    collector.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::limits::Limits;
    use crate::http::usage::Usage;
    use crate::telemetry::metrics::Metrics;

    fn memory() -> Arc<Budget> {
        let limits = Limits { max_buffered_memory: 1 << 20, ..Limits::default() };
        Arc::clone(&Usage::new(&limits, &Metrics::new()).memory)
    }

    fn collect(limit: u64, memory: &Arc<Budget>, body: &[u8], piece: usize) -> Collected {
        let mut collector = Collector::new(limit, memory);
        body.chunks(piece).for_each(|piece| collector.add(&Bytes::copy_from_slice(piece)));
        collector.end();
        assert!(memory.used() <= 2 * IN_MEMORY, "{} bytes", memory.used());
        collector.take().0
    }

    #[test]
    fn a_small_body_is_kept_and_a_large_one_is_hashed() {
        let memory = memory();
        let body: Vec<u8> = (0..=255).cycle().take(2 * IN_MEMORY as usize).collect();
        for piece in [1, 1000, 70_000, IN_MEMORY as usize, body.len()] {
            let small = &body[..IN_MEMORY as usize];
            let Collected::Whole(kept) = collect(1 << 30, &memory, small, piece) else { panic!("in {piece}s") };
            assert!(kept == small);
            if piece < body.len() {
                let Collected::Digest(digest) = collect(1 << 30, &memory, &body, piece) else { panic!("in {piece}s") };
                assert_eq!(digest, <[u8; 32]>::from(Sha256::digest(&body)));
            }
        }
        assert!(matches!(collect(100, &memory, &body, 90), Collected::TooLarge));
        assert_eq!(memory.used(), 0, "nothing is counted that is not there any more");
    }

    #[test]
    fn a_body_ends_with_its_last_byte() {
        let mut collector = Collector::new(10, &memory());
        collector.expect(Some(3));
        collector.add(&Bytes::from_static(b"abc"));
        assert!(matches!(collector.take(), (Collected::Whole(_), Some(_))));
        let mut collector = Collector::new(10, &memory());
        collector.expect(Some(11));
        assert!(matches!(collector.take().0, Collected::TooLarge), "before a byte of it came");
        let mut collector = Collector::new(10, &memory());
        collector.add(&Bytes::from_static(b"abc"));
        assert!(matches!(collector.take(), (Collected::Nothing, None)), "it broke off");
    }
}
