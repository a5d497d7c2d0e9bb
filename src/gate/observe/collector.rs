//! The bytes of a body that goes by.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};

use crate::http::usage::{Budget, Permit};

/// The bytes of a body as they go by, up to a limit.
pub(super) struct Collector {
    pub(super) frames: Vec<Bytes>,
    /// How many bytes went by, collected or not.
    pub(super) length: u64,
    limit: u64,
    pub(super) state: Collected,
    /// What the collected bytes take of the memory for bodies.
    pub(super) memory: Option<Permit>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Collected {
    /// More is to come.
    Part,
    Whole,
    /// It is larger than the limit.
    TooLarge,
    /// There was no memory for it.
    NoRoom,
}

/// One that the request and the notes about it share.
pub(super) type SharedCollector = Arc<Mutex<Collector>>;

impl Collector {
    /// An empty one. What it collects counts against `memory`.
    pub(super) fn new(limit: u64, memory: Option<&Arc<Budget>>) -> Self {
        let memory = memory.map(Budget::empty_permit);
        Self { frames: Vec::new(), length: 0, limit, state: Collected::Part, memory }
    }

    pub(super) fn add(&mut self, data: &Bytes) {
        self.length += data.len() as u64;
        if self.state != Collected::Part || data.is_empty() {
            return;
        }
        let has_room = self.memory.as_mut().is_none_or(|memory| memory.try_grow(data.len() as u64));
        if has_room && self.length <= self.limit {
            self.frames.push(data.clone());
            return;
        }
        self.state = if has_room { Collected::TooLarge } else { Collected::NoRoom };
        // Of what is compared, the beginning counts.
        if self.memory.take().is_some() {
            self.frames = Vec::new();
        }
    }

    pub(super) fn end(&mut self) {
        if self.state == Collected::Part {
            self.state = Collected::Whole;
        }
    }

    pub(super) fn joined(&self) -> Bytes {
        match &self.frames[..] {
            [] => Bytes::new(),
            [one] => one.clone(),
            frames => {
                let mut joined = BytesMut::with_capacity(frames.iter().map(Bytes::len).sum());
                frames.iter().for_each(|frame| joined.extend_from_slice(frame));
                joined.freeze()
            }
        }
    }

    /// The bytes that were collected, which it has no more.
    pub(super) fn take(&mut self) -> Bytes {
        let joined = self.joined();
        self.frames = Vec::new();
        joined
    }
}

pub(super) fn lock(collector: &Mutex<Collector>) -> MutexGuard<'_, Collector> {
    // No operation under this lock can leave it inconsistent.
    collector.lock().unwrap_or_else(PoisonError::into_inner)
}
