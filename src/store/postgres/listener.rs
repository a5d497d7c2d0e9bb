//! Listens to the notifications of the database: ends of attempts, for waiters, and removals, for caches.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::sleep;

use super::connect::Connector;
use super::session::Session;
use crate::idempotency::record::RecordId;
use crate::store::waiters::Waiters;

/// Delay before listening again.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The prefix of the id in the notification of a removal.
const REMOVED: &str = "removed ";

/// Listens, and begins again where the connection is lost. Where a host cannot be listened to, it waits for another one.
pub(super) async fn run(connector: Connector, waiters: Arc<Waiters>) {
    loop {
        let (sender, mut receiver) = mpsc::unbounded_channel();
        match listen(&connector, sender).await {
            Ok(Listening::Established(session)) => {
                waiters.connected();
                loop {
                    let payload = tokio::select! {
                        payload = receiver.recv() => payload,
                        () = session.ended() => None,
                    };
                    let Some(payload) = payload else { break };
                    dispatch(&waiters, &payload);
                }
                drop(session);
                waiters.disconnected();
            }
            Ok(Listening::BehindPooler(host)) => connector.hosts().left(host).await,
            Err(error) => tracing::debug!(%error, "cannot listen for notifications; waiters poll"),
        }
        sleep(RETRY_DELAY).await;
    }
}

fn dispatch(waiters: &Waiters, payload: &str) {
    let removed = payload.strip_prefix(REMOVED);
    match (RecordId::parse(removed.unwrap_or(payload)), removed) {
        (Some(id), Some(_)) => waiters.removed(id),
        (Some(id), None) => waiters.notify(id),
        (None, _) => {}
    }
}

/// The result of trying to listen.
#[expect(clippy::large_enum_variant, reason = "there is one of it for a store, and it is taken apart at once")]
enum Listening {
    Established(Session),
    /// This host is behind a pooler: notifications would go to another client.
    BehindPooler(usize),
}

async fn listen(connector: &Connector, sender: mpsc::UnboundedSender<String>) -> Result<Listening, super::OpenError> {
    let session = connector.connect_to_listen(sender).await?;
    if !session.is_direct {
        return Ok(Listening::BehindPooler(session.host));
    }
    session.client().batch_execute("LISTEN oncegate").await.map_err(|error| super::OpenError::of(&error))?;
    Ok(Listening::Established(session))
}
