//! What moves a connection's bytes, and what the server says on it without being asked.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::{AsyncMessage, Connection};

/// What the server says without being asked.
#[derive(Default)]
pub(super) struct News {
    /// How often the wait for a standby was broken off: the transaction stands here, and perhaps nowhere else.
    doubts: AtomicU64,
    /// The receiver of notifications.
    told: Option<mpsc::UnboundedSender<String>>,
}

impl News {
    /// With where notifications go.
    pub(super) fn with_notifications(told: Option<mpsc::UnboundedSender<String>>) -> Self {
        Self { told, ..Self::default() }
    }

    /// How often the wait for a standby was broken off so far.
    pub(super) fn doubts(&self) -> u64 {
        self.doubts.load(Ordering::SeqCst)
    }
}

/// Moves a connection's bytes until it ends, and says whether it was lost. In the order in which the server sends: by the
/// time that a statement is answered, its notices were seen.
pub(super) async fn drive<S, T>(mut driven: Connection<S, T>, news: &News) -> bool
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
                    news.doubts.fetch_add(1, Ordering::SeqCst);
                }
            }
            AsyncMessage::Notification(notification) => {
                if let Some(told) = &news.told {
                    // The other end goes with its session.
                    let _ = told.send(notification.payload().to_owned());
                }
            }
            _ => {}
        }
    }
}
