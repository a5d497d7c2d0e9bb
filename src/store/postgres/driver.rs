//! Drives a connection, and receives the server's notices and notifications.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::{AsyncMessage, Connection};

/// Notices and notifications of the server.
#[derive(Default)]
pub(super) struct ServerMessages {
    /// How often the wait for a standby was cancelled: the transaction is committed here, and perhaps nowhere else.
    interrupted_waits: AtomicU64,
    /// The receiver of notifications.
    notifications: Option<mpsc::UnboundedSender<String>>,
}

impl ServerMessages {
    /// With where notifications go.
    pub(super) fn with_notifications(notifications: Option<mpsc::UnboundedSender<String>>) -> Self {
        Self { notifications, ..Self::default() }
    }

    /// How often the wait for a standby was cancelled so far.
    pub(super) fn interrupted_waits(&self) -> u64 {
        self.interrupted_waits.load(Ordering::SeqCst)
    }
}

/// Moves a connection's bytes until it ends, and says whether it was lost. In the order in which the server sends: by the
/// time that a statement is answered, its notices were seen.
pub(super) async fn drive<S, T>(mut driven: Connection<S, T>, messages: &ServerMessages) -> bool
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    loop {
        let message = match poll_fn(|context| driven.poll_message(context)).await {
            Some(Ok(message)) => message,
            Some(Err(_)) => return true,
            None => return false,
        };
        match message {
            AsyncMessage::Notice(notice) => {
                let is_warning = notice.parsed_severity() == Some(Severity::Warning);
                let is_wait =
                    notice.routine() == Some("SyncRepWaitForLSN") || *notice.code() == SqlState::ADMIN_SHUTDOWN;
                if is_warning && is_wait {
                    messages.interrupted_waits.fetch_add(1, Ordering::SeqCst);
                }
            }
            AsyncMessage::Notification(notification) => {
                if let Some(notifications) = &messages.notifications {
                    // The receiver ends with its session.
                    let _ = notifications.send(notification.payload().to_owned());
                }
            }
            _ => {}
        }
    }
}
