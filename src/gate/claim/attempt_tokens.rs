//! The tokens of attempts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::idempotency::record::AttemptToken;

/// A source of attempts' tokens.
#[derive(Clone, Debug)]
pub struct Tokens(Source);

#[derive(Clone, Debug)]
enum Source {
    System,
    Counted(Arc<AtomicU64>),
}

impl Tokens {
    /// Unguessable tokens, from the random source of the operating system.
    ///
    /// Each is asked for anew. A generator in this process would be copied with a snapshot of its machine, and two
    /// attempts with one token would both believe that the claim is theirs.
    #[must_use]
    pub fn secret() -> Self {
        Self(Source::System)
    }

    /// Tokens in a sequence that is the same each time, for simulations. Clones go on in one sequence.
    #[must_use]
    pub fn counted_from(first: u64) -> Self {
        Self(Source::Counted(Arc::new(AtomicU64::new(first))))
    }

    /// The next one. Fails where the system has no randomness.
    pub(in crate::gate) fn next(&self) -> Result<AttemptToken, getrandom::Error> {
        let mut token = [0; 16];
        match &self.0 {
            Source::System => getrandom::fill(&mut token)?,
            Source::Counted(next) => token[8..].copy_from_slice(&next.fetch_add(1, Ordering::Relaxed).to_be_bytes()),
        }
        Ok(AttemptToken(token))
    }
}
