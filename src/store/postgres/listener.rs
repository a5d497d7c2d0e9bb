//! Who waits for the end of an attempt, or keeps records in mind, is told by the database where it can be listened to.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::sleep;

use super::connect::{Connector, Session};
use crate::idempotency::record::RecordId;
use crate::store::waiters::Waiters;

/// Between two tries to listen again.
const PAUSE: Duration = Duration::from_secs(1);

/// What comes before the id in the notification of a removal.
const REMOVED: &str = "removed ";

/// Listens, and begins again where the connection is lost. Where a host cannot be listened to, it waits for another one.
pub(super) async fn run(connector: Connector, waiters: Arc<Waiters>) {
    loop {
        let (tell, mut told) = mpsc::unbounded_channel();
        match listen(&connector, tell).await {
            Ok(Listening::Hears(session)) => {
                waiters.begin();
                loop {
                    let payload = tokio::select! {
                        payload = told.recv() => payload,
                        () = session.ended() => None,
                    };
                    let Some(payload) = payload else { break };
                    hear(&waiters, &payload);
                }
                drop(session);
                waiters.tell_all();
            }
            Ok(Listening::CannotAt(host)) => connector.hosts().left(host).await,
            Err(error) => tracing::debug!(%error, "nobody listens for the ends of attempts; waiters ask instead"),
        }
        sleep(PAUSE).await;
    }
}

fn hear(waiters: &Waiters, payload: &str) {
    let removed = payload.strip_prefix(REMOVED);
    match (RecordId::parse(removed.unwrap_or(payload)), removed) {
        (Some(id), Some(_)) => waiters.removed(id),
        (Some(id), None) => waiters.tell(id),
        (None, _) => {}
    }
}

/// What became of a try to listen.
#[expect(clippy::large_enum_variant, reason = "there is one of it for a store, and it is taken apart at once")]
enum Listening {
    Hears(Session),
    /// A pooler stands before this host: what comes in would go to somebody else.
    CannotAt(usize),
}

async fn listen(connector: &Connector, tell: mpsc::UnboundedSender<String>) -> Result<Listening, super::OpenError> {
    let session = connector.connect_to_listen(tell).await?;
    if !session.is_direct {
        return Ok(Listening::CannotAt(session.host));
    }
    session.client().batch_execute("LISTEN oncegate").await.map_err(|error| super::OpenError::of(&error))?;
    Ok(Listening::Hears(session))
}
