//! Work that goes on after a panic.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;

/// How long after a panic to start again.
const PAUSE: Duration = Duration::from_secs(1);

/// Does work until it returns. Where it panics, `failed` is called, and the work begins again.
pub(super) async fn supervise<F>(work: impl Fn() -> F, failed: impl Fn())
where
    F: Future<Output = ()> + Send + 'static,
{
    loop {
        let mut working = JoinSet::new();
        working.spawn(work());
        match working.join_next().await {
            Some(Err(error)) if error.is_panic() => {
                failed();
                sleep(PAUSE).await;
            }
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn work_begins_again_after_a_panic_and_ends_when_it_returns() {
        let (begun, failures) = (Arc::new(AtomicU32::new(0)), AtomicU32::new(0));
        let failed = || {
            failures.fetch_add(1, Ordering::AcqRel);
        };
        let counted = Arc::clone(&begun);
        let work = move || {
            let nth = counted.fetch_add(1, Ordering::AcqRel);
            async move { assert!(nth >= 2, "it panics twice") }
        };
        supervise(work, failed).await;
        assert_eq!((begun.load(Ordering::Acquire), failures.load(Ordering::Acquire)), (3, 2));
    }
}
