//! Data that accompanies a request while it is sent.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::http::fair_share::PartyOf;
use crate::http::http1::Interim;

/// The progress of sending a request, the sender of interim responses, the scope of its record, and
/// who it counts for.
#[derive(Default)]
pub struct SendContext<'a> {
    has_begun: AtomicBool,
    pub(super) interim: Option<Interim>,
    pub(super) scope: Option<[u8; 32]>,
    pub(super) party: Option<PartyOf<'a>>,
    pub(super) is_alone: bool,
}

impl<'a> SendContext<'a> {
    /// For a request whose client gets interim responses, if it understands them.
    #[must_use]
    pub fn of(interim: Option<Interim>) -> Self {
        Self { interim, ..Self::default() }
    }

    /// Adds who the request counts for. Without a party, it counts for no client.
    #[must_use]
    pub fn for_party(self, party: PartyOf<'a>) -> Self {
        Self { party: Some(party), ..self }
    }

    /// Adds the digest of the record's scope, which distinguishes callers where each has its own connections.
    #[must_use]
    pub fn in_scope(self, digest: [u8; 32]) -> Self {
        Self { scope: Some(digest), ..self }
    }

    /// On a connection of its own, which carries nothing before or after it.
    #[must_use]
    pub fn alone(self) -> Self {
        Self { is_alone: true, ..self }
    }

    /// Whether the request was handed to a connection: from then on a byte of it may have been sent.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Acquire)
    }

    /// Records that the request is handed to a connection, or was returned unsent or unprocessed.
    pub(super) fn set_begun(&self, has_begun: bool) {
        self.has_begun.store(has_begun, Ordering::Release);
    }
}
