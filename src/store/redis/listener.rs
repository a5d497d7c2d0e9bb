//! What the scripts tell of ends and removals is heard here.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use redis::aio::PubSub;
use redis::{Client, RedisResult};
use tokio::time::sleep;

use crate::idempotency::record::RecordId;
use crate::store::waiters::Waiters;

/// Where the scripts tell it.
const CHANNEL: &str = "oncegate";

/// Between two tries to listen again.
const PAUSE: Duration = Duration::from_secs(1);

/// Listens, and begins again where the connection is lost.
pub(super) async fn run(client: Client, waiters: Arc<Waiters>) {
    loop {
        match listen(&client).await {
            Ok(mut listening) => {
                waiters.begin();
                let mut told = listening.on_message();
                while let Some(message) = told.next().await {
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

async fn listen(client: &Client) -> RedisResult<PubSub> {
    let mut listening = client.get_async_pubsub().await?;
    listening.subscribe(CHANNEL).await?;
    Ok(listening)
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
