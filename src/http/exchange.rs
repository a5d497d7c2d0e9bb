//! Marks an HTTP/1.1 connection as busy while a response is under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// An exchange that has not ended. When it is dropped, its connection may wait for the next request.
#[derive(Debug)]
pub struct ExchangeGuard(Arc<AtomicBool>);

impl ExchangeGuard {
    /// Marks a connection as busy.
    pub(super) fn new(is_busy: &Arc<AtomicBool>) -> Self {
        is_busy.store(true, Ordering::Release);
        Self(Arc::clone(is_busy))
    }
}

impl Drop for ExchangeGuard {
    fn drop(&mut self) {
        // hyper starts the next exchange only after this one has ended.
        self.0.store(false, Ordering::Release);
    }
}
