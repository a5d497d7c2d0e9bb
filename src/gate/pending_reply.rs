//! Clients that leave before their answer.

use std::sync::Arc;

use super::RouteState;
use super::request::Head;

/// A request that waits for its answer. Dropped before that, its client has left.
pub(super) struct PendingReply(Option<Arc<RouteState>>);

impl PendingReply {
    /// One whose route is not known yet.
    pub(super) fn new(unrouted: &Arc<RouteState>) -> Self {
        Self(Some(Arc::clone(unrouted)))
    }

    /// It is a request of this route.
    pub(super) fn set_route(&mut self, state: &Arc<RouteState>, head: &Head) {
        if let Some(notes) = &head.notes {
            notes.note(|noted| noted.route = Some(Arc::clone(&state.name)));
        }
        self.0 = Some(Arc::clone(state));
    }

    /// Its answer begins.
    pub(super) fn answer_began(&mut self) {
        self.0 = None;
    }
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        if let Some(state) = &self.0 {
            state.metrics.client_gone();
        }
    }
}
