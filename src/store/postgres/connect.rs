//! Connections: made, proven, and driven.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Error as SqlError, Row, Statement};

use super::error::{self, OpenError};
use super::tls::Encryptor;
use super::{Description, Settings, hosts, row};
use crate::store::{Error, ErrorKind};

/// How long a connection may take from its beginning until it is known to work, besides the time to reach the server.
const GREETING: Duration = Duration::from_secs(5);

/// How long a host that was reached may take to let somebody in. Then the next one is tried: a server that hangs takes
/// connections too.
const LOGIN: Duration = Duration::from_secs(3);

/// How long a statement may take. Beyond it the connection is given up: whoever asked has given up already, and nobody
/// knows whether the server is there.
pub(super) const ANSWER: Duration = Duration::from_secs(5);

/// How many bytes a connection carries in a millisecond at least: 1 MiB in about a second.
const SLOWEST: usize = 1024;

/// How long a server may take to be reached, unless the settings say.
const REACH: Duration = Duration::from_secs(2);

/// The setting by which a session is recognised.
const SESSION: &str = "oncegate.session";

/// Makes connections.
#[derive(Clone)]
pub(super) struct Connector {
    servers: Config,
    tls: Encryptor,
    /// Whether a pooler was met.
    is_pooled: Arc<AtomicBool>,
}

/// A parameter of a statement with its type.
pub(super) type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// A statement that is asked again and again.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) sql: &'static str,
    pub(super) types: &'static [Type],
}

/// A connection that works.
pub(super) struct Session {
    client: Client,
    /// What was prepared: only where the other end is always the same server process.
    prepared: Option<Vec<(&'static str, Statement)>>,
    news: Arc<News>,
    /// Ends with the session: a server that does not answer would keep the task, and the task the connection.
    _driver: AbortOnDrop,
    ended: watch::Receiver<bool>,
    tls: Encryptor,
    pub(super) description: Description,
}

/// What the server says without being asked.
#[derive(Default)]
struct News {
    /// How often the wait for a standby was broken off: the transaction stands here, and perhaps nowhere else.
    doubts: AtomicU64,
    /// Where notifications go.
    told: Option<mpsc::UnboundedSender<String>>,
}

/// Why a call failed.
pub(super) enum Failed {
    /// It was not sent.
    Unsent(String),
    /// The server said so, or the connection broke.
    Sql(SqlError),
    /// It is done, and what came back makes no sense.
    Unreadable(row::Unreadable),
    /// There was no answer in time.
    Late,
    /// It is done, but perhaps on this server only.
    Unreplicated,
}

impl Failed {
    /// The error for whoever asked for a write.
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::Unsent(told) => Error::determinate(ErrorKind::Unavailable, told),
            Self::Sql(error) => error::of_statement(&error),
            Self::Unreadable(unreadable) => Error::indeterminate(ErrorKind::Corrupt, unreadable),
            Self::Late => Error::indeterminate(ErrorKind::Timeout, "the database did not answer in time"),
            Self::Unreplicated => Error::indeterminate(
                ErrorKind::Unavailable,
                "the wait for the standby was broken off: the write may be on the primary only",
            ),
        }
    }

    /// Whether the connection can be used no longer.
    pub(super) fn is_last(&self) -> bool {
        match self {
            Self::Unsent(_) | Self::Late => true,
            Self::Sql(error) => error::is_last(error),
            Self::Unreadable(_) | Self::Unreplicated => false,
        }
    }
}

impl Connector {
    pub(super) fn new(settings: &Settings) -> Self {
        let tls = Encryptor::new(settings.tls.clone());
        Self { servers: settings.servers.clone(), tls, is_pooled: Arc::default() }
    }

    /// A connection on which a commit has gone through, and which has what `calls` need.
    ///
    /// Only that shows that claims would work: a standby that was promoted away, a full disk or a synchronous standby
    /// that is gone lets everybody log in.
    pub(super) async fn connect(&self, calls: &[Call]) -> Result<Session, OpenError> {
        let mut session = self.connect_unproven().await?;
        let proving = async {
            session.client.query_typed("SELECT oncegate.flush_v1()", &[]).await?;
            session.prepare(calls).await
        };
        match timeout(GREETING, proving).await {
            Ok(Ok(())) => Ok(session),
            Ok(Err(error)) => Err(OpenError::of(&error)),
            Err(_) => {
                session.give_up();
                Err(late())
            }
        }
    }

    /// A connection for the pool.
    pub(super) async fn connect_plainly(&self) -> Result<(Client, JoinHandle<()>), SqlError> {
        let (ending, _) = watch::channel(false);
        self.dial(&self.servers, Arc::default(), ending).await
    }

    pub(super) fn servers(&self) -> &Config {
        &self.servers
    }

    /// How long it may take until a connection is made, whichever host lets it in.
    pub(super) fn patience(&self) -> Duration {
        let hosts = u32::try_from(hosts::count(&self.servers)).unwrap_or(u32::MAX);
        (self.reach() + LOGIN).saturating_mul(hosts) + GREETING
    }

    fn reach(&self) -> Duration {
        self.servers.get_connect_timeout().copied().unwrap_or(REACH)
    }

    /// A connection, whatever it is good for. Tells whether it is direct.
    pub(super) async fn connect_unproven(&self) -> Result<Session, OpenError> {
        self.greet_in_time(None).await
    }

    /// As [`Connector::connect_unproven`]; notifications go to `told`.
    pub(super) async fn connect_to_listen(&self, told: mpsc::UnboundedSender<String>) -> Result<Session, OpenError> {
        self.greet_in_time(Some(told)).await
    }

    async fn greet_in_time(&self, told: Option<mpsc::UnboundedSender<String>>) -> Result<Session, OpenError> {
        timeout(self.patience(), self.greet(told)).await.unwrap_or_else(|_| Err(late()))
    }

    async fn greet(&self, told: Option<mpsc::UnboundedSender<String>>) -> Result<Session, OpenError> {
        let opened = if self.is_pooled.load(Ordering::Relaxed) {
            None
        } else {
            let mark = mark()?;
            let mut servers = self.servers.clone();
            let options = self.servers.get_options().unwrap_or_default();
            servers.options(format!("{options} -c {SESSION}={mark}").trim());
            match self.open(&servers, told.clone()).await {
                Ok(session) => Some((session, mark)),
                // What a pooler says to start-up parameters that it does not know.
                Err(error) if error.code() == Some(&SqlState::PROTOCOL_VIOLATION) => None,
                Err(error) => return Err(OpenError::of(&error)),
            }
        };
        let (mut session, mark) = match opened {
            Some((session, mark)) => (session, Some(mark)),
            None => (self.open(&self.servers, told).await.map_err(|error| OpenError::of(&error))?, None),
        };
        session.describe(mark.as_deref()).await.map_err(|error| OpenError::of(&error))?;
        if !session.description.is_direct {
            self.is_pooled.store(true, Ordering::Relaxed);
        }
        Ok(session)
    }

    async fn open(&self, servers: &Config, told: Option<mpsc::UnboundedSender<String>>) -> Result<Session, SqlError> {
        let (ending, ended) = watch::channel(false);
        let news = Arc::new(News { told, ..News::default() });
        let (client, driver) = self.dial(servers, Arc::clone(&news), ending).await?;
        let description = Description::default();
        let tls = self.tls.clone();
        Ok(Session { client, prepared: None, news, _driver: AbortOnDrop(driver), ended, tls, description })
    }

    async fn dial(
        &self,
        servers: &Config,
        news: Arc<News>,
        ending: watch::Sender<bool>,
    ) -> Result<(Client, JoinHandle<()>), SqlError> {
        let mut failure = None;
        for host in hosts::each(servers, self.reach()) {
            match timeout(self.reach() + LOGIN, host.connect(self.tls.clone())).await {
                Ok(Ok((client, driven))) => return Ok((client, tokio::spawn(drive(driven, news, ending)))),
                // A pooler, which is spoken to in another way.
                Ok(Err(error)) if error.code() == Some(&SqlState::PROTOCOL_VIOLATION) => return Err(error),
                Ok(Err(error)) => failure = Some(error),
                Err(_) => failure = Some(SqlError::__private_api_timeout()),
            }
        }
        Err(failure.unwrap_or_else(SqlError::__private_api_timeout))
    }
}

/// Moves a connection's bytes until it ends. In the order in which the server sends: by the time that a statement is
/// answered, its notices were seen.
async fn drive<S, T>(mut driven: Connection<S, T>, news: Arc<News>, ending: watch::Sender<bool>)
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    while let Some(Ok(message)) = poll_fn(|context| driven.poll_message(context)).await {
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
    ending.send_replace(true);
}

impl Session {
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
        let (cancel, tls) = (self.client.cancel_token(), self.tls.clone());
        tokio::spawn(async move {
            // Nothing depends on it.
            let _ = timeout(GREETING, cancel.cancel_query(tls)).await;
            drop(self);
        });
    }

    /// Returns when the connection has ended.
    pub(super) async fn ended(&self) {
        let _ = self.ended.clone().wait_for(|ended| *ended).await;
    }

    /// Calls a function that writes, and waits until that is durable.
    /// `bytes` is about how much it carries.
    pub(super) async fn write(
        &self,
        call: &Call,
        values: &[&(dyn ToSql + Sync)],
        bytes: usize,
    ) -> Result<Vec<Row>, Failed> {
        if self.client.is_closed() {
            return Err(Failed::Unsent("the connection to the database was lost".to_owned()));
        }
        let doubts = self.news.doubts.load(Ordering::SeqCst);
        let patience = ANSWER + Duration::from_millis((bytes / SLOWEST) as u64);
        let rows = timeout(patience, self.call(call, values)).await.map_err(|_| Failed::Late)?.map_err(Failed::Sql)?;
        if self.news.doubts.load(Ordering::SeqCst) == doubts { Ok(rows) } else { Err(Failed::Unreplicated) }
    }

    async fn call(&self, call: &Call, values: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, SqlError> {
        let known = self.prepared.iter().flatten().find(|(sql, _)| *sql == call.sql);
        if let Some((_, statement)) = known {
            return self.client.query(statement, values).await;
        }
        let typed: Vec<Parameter<'_>> = values.iter().copied().zip(call.types.iter().cloned()).collect();
        self.client.query_typed(call.sql, &typed).await
    }

    /// Prepares calls, where the server will know them the next time.
    async fn prepare(&mut self, calls: &[Call]) -> Result<(), SqlError> {
        if !self.description.is_direct {
            return Ok(());
        }
        let mut prepared = Vec::new();
        for call in calls {
            prepared.push((call.sql, self.client.prepare_typed(call.sql, call.types).await?));
        }
        self.prepared = Some(prepared);
        Ok(())
    }

    async fn describe(&mut self, mark: Option<&str>) -> Result<(), SqlError> {
        let question = "SELECT current_setting('oncegate.session', true), current_setting('server_version'), \
                        current_database()::text, current_setting('fsync') = 'on', \
                        current_setting('full_page_writes') = 'on'";
        let row = self.client.query_typed_one(question, &[]).await?;
        let found: Option<String> = row.get(0);
        self.description = Description {
            is_direct: mark.is_some() && found.as_deref() == mark,
            version: row.get(1),
            database: row.get(2),
            has_fsync: row.get(3),
            has_full_page_writes: row.get(4),
        };
        Ok(())
    }
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A random word that only the session knows that was begun with it.
fn mark() -> Result<String, OpenError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|_| OpenError::Failed("no randomness to be had".to_owned()))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn late() -> OpenError {
    OpenError::Unreachable("it did not answer in time".to_owned())
}
