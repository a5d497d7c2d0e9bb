//! A connection in use: its statements, what their failures mean, and what the server says besides.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, CancelToken, Client, Connection, Error as SqlError, Row, Statement};

use super::error::{self, OpenError};
use super::host_selection::{Hosts, Suspicion};
use super::row;
use super::tls::Encryptor;
use crate::store::batcher::Failure;
use crate::store::server_clock::ServerClock;
use crate::store::{Error, ErrorKind};

/// How long a statement may take. After that the connection is closed: the caller has timed out already, and the
/// server may be gone.
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// From this time on a statement that is not answered casts doubt on the server: others are tried beside it. So a client
/// that waits for `settle_timeout` gets its answer from the next server.
const SUSPECT_AFTER: Duration = Duration::from_secs(1);

/// How long a cancellation may take.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);

/// How many bytes a connection carries in a millisecond at least: 1 MiB in about a second.
const MIN_BYTES_PER_MS: usize = 1024;

/// Writes to the log that a commit waits for, and to no table: `migrate` connects where there is none yet. The commit waits
/// as those of claims do, whatever the session is set to. Gives the server's time.
const COMMIT: Query = Query {
    sql: "SELECT (date_part('epoch', clock_timestamp()) * 1000)::bigint, \
          pg_logical_emit_message(true, 'oncegate', ''), set_config('client_min_messages', 'warning', true), \
          CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') \
          THEN set_config('synchronous_commit', 'on', true) END",
    types: &[],
};

/// A parameter of a statement with its type.
pub(super) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// A statement that is executed repeatedly, with the types of its parameters.
#[derive(Clone, Copy)]
pub(super) struct Query {
    pub(super) sql: &'static str,
    pub(super) types: &'static [Type],
}

/// A connection that works.
pub(super) struct Session {
    client: Client,
    /// The prepared statements, if there is no pooler in between.
    prepared: Option<Vec<(&'static str, Statement)>>,
    messages: Arc<ServerMessages>,
    /// Ends with the session: a server that does not answer would keep the task, and the task the connection.
    _driver: AbortOnDrop,
    ended: watch::Receiver<bool>,
    tls: Encryptor,
    hosts: Arc<Hosts>,
    /// The host that it is with.
    pub(super) host: usize,
    /// Whether the other end is the server itself, and not a pooler before it.
    pub(super) is_direct: bool,
    /// Its time, as it said with the last commit or claim.
    pub(super) clock: ServerClock,
}

/// Cancels the statement that a connection waits for.
pub(super) struct Cancel {
    pub(super) token: CancelToken,
    pub(super) tls: Encryptor,
}

/// The error of a call.
pub(super) enum CallError {
    /// It was not sent.
    Unsent(String),
    /// The server said so, or the connection broke.
    Sql(SqlError),
    /// It is done, and its rows cannot be decoded.
    Unreadable(row::Unreadable),
    /// There was no answer in time.
    Late,
    /// It is done, but perhaps on this server only.
    Unreplicated,
    /// Nothing of it is done, since a step of it had no effect.
    NoEffect,
}

/// The message for a check whose steps had no effect.
const NO_EFFECT: &str = "a record that this user claims cannot be renewed and released, though no statement fails: look for \
                        row security and triggers on oncegate.record";

impl CallError {
    /// The error for the caller of a write.
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Unsent(message) => Error::determinate(ErrorKind::Unavailable, message),
            Self::Sql(error) => error::of_write(&error),
            Self::Unreadable(unreadable) => Error::indeterminate(ErrorKind::Corrupt, unreadable),
            Self::Late => Error::indeterminate(ErrorKind::Timeout, "the database did not answer in time"),
            Self::Unreplicated => Error::indeterminate(
                ErrorKind::Unavailable,
                "the wait for the standby was cancelled: the write may be on the primary only",
            ),
            Self::NoEffect => Error::determinate(ErrorKind::Other, NO_EFFECT),
        }
    }

    /// The error for opening the store.
    pub(super) fn into_open_error(self) -> OpenError {
        match self {
            Self::Sql(error) => OpenError::of(&error),
            Self::Late => OpenError::late(),
            Self::NoEffect => OpenError::Denied(NO_EFFECT.to_owned()),
            other => OpenError::Unreachable(other.into_error().cause().source.to_string()),
        }
    }

    /// What it means for a batch of `count` operations.
    pub(super) fn into_failure(self, count: usize) -> Failure {
        let meaning = match &self {
            Self::Unsent(_) => Failure::Lost,
            Self::Late => Failure::Hung,
            Self::Unreadable(_) | Self::Unreplicated | Self::NoEffect => Failure::OfAll,
            // One of them waits for a lock.
            Self::Sql(error) if error::is_lock_timeout(error) && count > 1 => Failure::OfOne,
            Self::Sql(error) if error::is_transient(error) => Failure::Conflict,
            Self::Sql(error) if error::must_close(error) => Failure::Lost,
            // Any other kind comes from the server's state, and would affect every operation.
            Self::Sql(error) if matches!(error::kind(error), ErrorKind::Other | ErrorKind::Moved) => Failure::OfOne,
            Self::Sql(_) => Failure::OfAll,
        };
        meaning(self.into_error())
    }
}

impl Session {
    /// A session with a host. Its bytes are moved by `driver`, which says when it has `ended`.
    pub(super) fn new(
        client: Client,
        messages: Arc<ServerMessages>,
        driver: JoinHandle<()>,
        ended: watch::Receiver<bool>,
        tls: Encryptor,
        hosts: Arc<Hosts>,
        host: usize,
    ) -> Self {
        let _driver = AbortOnDrop(driver);
        let clock = ServerClock::default();
        Self { client, prepared: None, messages, _driver, ended, tls, hosts, host, is_direct: false, clock }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn client_mut(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Ends the connection, and tells the server: one that waits for a lock or a standby would not notice by itself, and
    /// keep its place among the connections that it allows.
    pub(super) fn give_up(self) {
        if self.client.is_closed() {
            return;
        }
        let cancel = Cancel { token: self.client.cancel_token(), tls: self.tls.clone() };
        tokio::spawn(async move {
            cancel.send().await;
            drop(self);
        });
    }

    /// Returns when the connection has ended.
    pub(super) async fn ended(&self) {
        let _ = self.ended.clone().wait_for(|ended| *ended).await;
    }

    /// Commits, and waits until that is durable. Reads the server's clock.
    pub(super) async fn commit(&self) -> Result<(), CallError> {
        let asked = Instant::now();
        let rows = self.write(&COMMIT, &[], 0).await?;
        if let Some(time) = rows.first().and_then(|row| row.try_get(0).ok()) {
            self.clock.read(asked, time);
        }
        Ok(())
    }

    /// Calls a function that writes, and waits until that is durable.
    /// `bytes` is about how much it carries.
    pub(super) async fn write(
        &self,
        call: &Query,
        values: &[&(dyn ToSql + Sync)],
        bytes: usize,
    ) -> Result<Vec<Row>, CallError> {
        if self.client.is_closed() {
            return Err(CallError::Unsent("the connection to the database was lost".to_owned()));
        }
        let interrupted_waits = self.messages.interrupted_waits();
        let patience = STATEMENT_TIMEOUT + Duration::from_millis((bytes / MIN_BYTES_PER_MS) as u64);
        let mut calling = pin!(self.call(call, values));
        let answered = match timeout(SUSPECT_AFTER, calling.as_mut()).await {
            Ok(answered) => answered,
            Err(_) => {
                self.hosts.suspect(self.host, Suspicion::Silent);
                timeout(patience - SUSPECT_AFTER, calling).await.map_err(|_| CallError::Late)?
            }
        };
        let rows = answered.map_err(|error| {
            if error::refuses_writes(&error) {
                self.hosts.suspect(self.host, Suspicion::Refuses);
            }
            CallError::Sql(error)
        })?;
        if self.messages.interrupted_waits() == interrupted_waits { Ok(rows) } else { Err(CallError::Unreplicated) }
    }

    async fn call(&self, call: &Query, values: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, SqlError> {
        let known = self.prepared.iter().flatten().find(|(sql, _)| *sql == call.sql);
        if let Some((_, statement)) = known {
            return self.client.query(statement, values).await;
        }
        let typed: Vec<Parameter<'_>> = values.iter().copied().zip(call.types.iter().cloned()).collect();
        self.client.query_typed(call.sql, &typed).await
    }

    /// Prepares calls, where the server will know them the next time.
    pub(super) async fn prepare(&mut self, calls: &[Query]) -> Result<(), SqlError> {
        if !self.is_direct {
            return Ok(());
        }
        let mut prepared = Vec::new();
        for call in calls {
            prepared.push((call.sql, self.client.prepare_typed(call.sql, call.types).await?));
        }
        self.prepared = Some(prepared);
        Ok(())
    }

    /// Whether the session has the mark that it was started with. Behind a pooler it does not.
    pub(super) async fn has_mark(&self, mark: Option<&str>) -> Result<bool, SqlError> {
        let question = "SELECT current_setting('oncegate.session', true)";
        let row = self.client.query_typed_one(question, &[]).await?;
        let found: Option<&str> = row.get(0);
        Ok(mark.is_some() && found == mark)
    }
}

impl Cancel {
    pub(super) async fn send(self) {
        // Nothing depends on it.
        let _ = timeout(CANCEL_TIMEOUT, self.token.cancel_query(self.tls)).await;
    }
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

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

/// Moves a connection's bytes in a task of its own, until it ends or `left` returns. Then calls `end` with whether it was
/// lost.
pub(super) fn spawn_driver<S, T>(
    driven: Connection<S, T>,
    messages: Arc<ServerMessages>,
    left: impl Future<Output = ()> + Send + 'static,
    cancel: Cancel,
    end: impl FnOnce(bool) + Send + 'static,
) -> JoinHandle<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    tokio::spawn(async move {
        tokio::select! {
            biased;
            is_lost = drive(driven, &messages) => end(is_lost),
            () = left => {
                tokio::spawn(cancel.send());
                end(false);
            }
        }
    })
}

/// Moves a connection's bytes until it ends, and says whether it was lost. In the order in which the server sends: by the
/// time that a statement is answered, its notices were seen.
async fn drive<S, T>(mut driven: Connection<S, T>, messages: &ServerMessages) -> bool
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
                // A server that is shut down at once says the same from its quickdie, whether or not anything waits.
                let is_wait = match notice.routine() {
                    Some("SyncRepWaitForLSN") => true,
                    routine => *notice.code() == SqlState::ADMIN_SHUTDOWN && routine != Some("quickdie"),
                };
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
