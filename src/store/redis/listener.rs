//! Listens to the channel on which ends of attempts and removals of records are published.

use std::time::Duration;

use futures_util::StreamExt;
use tokio::time::sleep;

use super::manager::ConnectionManager;

/// Delay before subscribing again.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// An event of a subscription.
pub(super) enum ListenerEvent<'a> {
    /// The subscription is active.
    Subscribed,
    /// A message was published.
    Message(&'a [u8]),
    /// The subscription is lost.
    Lost,
}

/// Subscribes to a channel, and again whenever a connection is lost: a subscriber alone would not notice that
/// messages no longer arrive.
pub(super) async fn run(manager: ConnectionManager, channel: String, on_event: impl Fn(ListenerEvent<'_>)) {
    let mut losses = manager.losses();
    loop {
        losses.mark_unchanged();
        match manager.subscribe(&channel).await {
            Ok(mut listening) => {
                on_event(ListenerEvent::Subscribed);
                let mut messages = listening.on_message();
                loop {
                    let message = tokio::select! {
                        message = messages.next() => message,
                        _ = losses.changed() => None,
                    };
                    let Some(message) = message else { break };
                    on_event(ListenerEvent::Message(message.get_payload_bytes()));
                }
                on_event(ListenerEvent::Lost);
            }
            Err(error) => {
                let error = super::error::message(&error);
                tracing::debug!(error, "cannot subscribe to notifications; waiters poll");
            }
        }
        sleep(RETRY_DELAY).await;
    }
}
