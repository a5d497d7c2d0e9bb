//! What is told of ends and removals is heard here.

use std::time::Duration;

use futures_util::StreamExt;
use tokio::time::sleep;

use super::link::Link;

/// Between two tries to listen again.
const PAUSE: Duration = Duration::from_secs(1);

/// What whoever listens hears.
pub(super) enum Heard<'a> {
    /// From now on it hears.
    Begin,
    /// This was told.
    Message(&'a [u8]),
    /// From now on it hears nothing.
    Lost,
}

/// Listens to a channel, and begins again where a connection is lost: the one that listens would not notice by itself that
/// nobody tells it anything any more.
pub(super) async fn run(link: Link, channel: String, hear: impl Fn(Heard<'_>)) {
    let mut losses = link.losses();
    loop {
        losses.mark_unchanged();
        match link.subscribe(&channel).await {
            Ok(mut listening) => {
                hear(Heard::Begin);
                let mut told = listening.on_message();
                loop {
                    let message = tokio::select! {
                        message = told.next() => message,
                        _ = losses.changed() => None,
                    };
                    let Some(message) = message else { break };
                    hear(Heard::Message(message.get_payload_bytes()));
                }
                hear(Heard::Lost);
            }
            Err(error) => {
                let error = super::error::told(&error);
                tracing::debug!(error, "nobody listens to what Redis tells");
            }
        }
        sleep(PAUSE).await;
    }
}
