//! What the scripts tell of ends and removals is heard here.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::time::sleep;

use super::link::Link;
use crate::idempotency::record::RecordId;
use crate::store::waiters::Waiters;

/// Where the scripts tell it.
const CHANNEL: &str = "oncegate";

/// Between two tries to listen again.
const PAUSE: Duration = Duration::from_secs(1);

/// Listens, and begins again where a connection is lost: the one that listens would not notice by itself that nobody
/// tells it anything any more.
pub(super) async fn run(link: Link, waiters: Arc<Waiters>) {
    let mut losses = link.losses();
    loop {
        losses.mark_unchanged();
        match link.subscribe(CHANNEL).await {
            Ok(mut listening) => {
                waiters.begin();
                let mut told = listening.on_message();
                loop {
                    let message = tokio::select! {
                        message = told.next() => message,
                        _ = losses.changed() => None,
                    };
                    let Some(message) = message else { break };
                    hear(&waiters, message.get_payload_bytes());
                }
                waiters.tell_all();
            }
            Err(error) => {
                let error = super::error::told(&error);
                tracing::debug!(error, "nobody listens for the ends of attempts; waiters ask instead");
            }
        }
        sleep(PAUSE).await;
    }
}

/// A letter for what happened, and the id.
fn hear(waiters: &Waiters, payload: &[u8]) {
    let Some((what, id)) = payload.split_first() else { return };
    let Ok(id) = <[u8; 32]>::try_from(id).map(RecordId) else { return };
    match what {
        b'e' => waiters.tell(id),
        b'r' => waiters.removed(id),
        _ => {}
    }
}
