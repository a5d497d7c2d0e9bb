//! What the upstream of the search knows of the attempts that reached it.

/// What the upstream knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Books {
    /// An attempt took effect.
    pub(super) has_effect: bool,
    /// Attempts that may take effect yet.
    pub(super) pending: Vec<usize>,
    /// So much time has passed that no former attempt takes effect any more.
    pub(super) is_quiet: bool,
}

impl Books {
    /// An attempt does what it does, or will never do it.
    pub(super) fn takes_effect(&mut self, attempt: usize, does: bool) {
        if let Some(place) = self.pending.iter().position(|pending| *pending == attempt) {
            self.pending.remove(place);
            self.has_effect |= does;
        }
    }
}
