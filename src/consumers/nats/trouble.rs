//! What ends the use of a connection to NATS: its loss, and what the server refuses.
//!
//! To a message that a user may not publish, the server gives no answer. It reports an error of the connection.

use async_nats::{Event, ServerError};
use tokio::sync::watch;

use super::super::source::Error;
use super::unreadable;

/// Why a connection cannot be used any more, once that is so.
#[derive(Clone)]
pub(super) struct Trouble(pub(super) watch::Receiver<Option<String>>);

impl Trouble {
    /// Returns when there is some.
    pub(super) async fn arises(&mut self) -> Error {
        match self.0.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(why)) => Error(why.clone()),
            _ => lost(),
        }
    }

    /// Why something failed that gives this error: the server answers a request that it does not permit by an event alone.
    pub(super) fn or(&self, error: impl std::fmt::Display) -> String {
        self.0.borrow().clone().unwrap_or_else(|| error.to_string())
    }
}

fn lost() -> Error {
    Error("the connection is lost".to_owned())
}

/// Why an event ends the use of a connection, where it does. The first such event has the others as its consequences.
pub(super) fn of(event: &Event) -> Option<String> {
    match event {
        Event::Disconnected | Event::Closed => Some(lost().0),
        Event::ServerError(error) => said(error),
        _ => None,
    }
}

/// What an error of the server says; nothing where it ends no more than the search for messages that cannot be read.
fn said(error: &ServerError) -> Option<String> {
    let text = error.to_string();
    if text.contains(unreadable::LOOKS_AT) {
        return None;
    }
    // The subject of each acknowledgement is another, and so is that of the answers to each connection.
    let of_all = |prefix: &str| text.split_once(prefix).map(|(before, _)| format!("{before}{prefix}>\""));
    Some(of_all("$JS.ACK.").or_else(|| of_all("_INBOX.")).unwrap_or(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_error_of_the_server_is_trouble_unless_the_consumer_can_do_without() {
        let of = |text: &str| said(&ServerError::Other(text.to_owned()));
        let denied = |subject: &str| of(&format!("Permissions Violation for Publish to \"{subject}\""));
        assert_eq!(denied("$JS.API.STREAM.MSG.GET.ORDERS"), None);
        let next = denied("$JS.API.CONSUMER.MSG.NEXT.ORDERS.gate").expect("no message comes");
        assert!(next.ends_with("Permissions Violation for Publish to \"$JS.API.CONSUMER.MSG.NEXT.ORDERS.gate\""));
        let acknowledged = ["$JS.ACK.ORDERS.gate.1.5.3.17.0", "$JS.ACK.ORDERS.gate.2.6.4.18.0"].map(denied);
        assert_eq!(acknowledged[0], acknowledged[1]);
        assert!(acknowledged[0].as_deref().is_some_and(|text| text.ends_with("\"$JS.ACK.>\"")), "{acknowledged:?}");
        let inbox = |name: &str| of(&format!("Permissions Violation for Subscription to \"_INBOX.{name}.*\""));
        assert_eq!(inbox("one"), inbox("two"));
        let (troubled, trouble) = watch::channel(None);
        let mut trouble = Trouble(trouble);
        assert_eq!(trouble.or("timed out"), "timed out");
        troubled.send_replace(Some(next));
        assert!(trouble.or("timed out").contains("Permissions"));
        assert!(trouble.arises().await.0.contains("Permissions"));
        drop(troubled);
        assert!(trouble.arises().await.0.contains("Permissions"), "it is not forgotten");
    }
}
