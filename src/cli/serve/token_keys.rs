//! The keys that tokens are verified with, where they come from a URL.

use std::time::Duration;

use tokio::time::sleep;

use crate::admin::Readiness;
use crate::gate::Gate;
use crate::http::server::Current;

/// How often to look whether keys are due.
const LOOK: Duration = Duration::from_secs(1);

/// Has the keys fetched when they are due, and says in `readiness` whether there are any.
pub(super) async fn follow(current: Current<Gate>, readiness: Readiness) {
    loop {
        let gate = std::sync::Arc::clone(&current.load().handler);
        readiness.set_token_keys(gate.refresh_token_keys().await);
        sleep(LOOK).await;
    }
}
