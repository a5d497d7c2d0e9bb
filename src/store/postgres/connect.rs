//! Makes connections and checks that they work.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{CancelToken, Client, Config, Error as SqlError, Row, Statement};

use super::driver::{ServerMessages, drive};
use super::error::{self, OpenError};
use super::host_selection::{Hosts, Suspicion};
use super::lineage::Lineage;
use super::tls::Encryptor;
use super::{Settings, hosts, row};
use crate::store::{Error, ErrorKind};

/// How long a connection may take from its beginning until it is known to work, besides the time to reach the server.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a login may take once the host was reached: a server that hangs accepts connections too.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a statement may take. After that the connection is closed: the caller has timed out already, and the
/// server may be gone.
pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// From this time on a statement that is not answered casts doubt on the server: others are tried beside it. So a client
/// that waits for `settle_timeout` gets its answer from the next server.
const SUSPECT_AFTER: Duration = Duration::from_secs(1);

/// How many bytes a connection carries in a millisecond at least: 1 MiB in about a second.
const MIN_BYTES_PER_MS: usize = 1024;

/// How long a server may take to be reached, unless the settings say.
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The setting by which a session is recognised.
const SESSION: &str = "oncegate.session";

/// Writes to the log that a commit waits for, and to no table: `migrate` connects where there is none yet. The commit waits
/// as those of claims do, whatever the session is set to.
const COMMIT: Query = Query {
    sql: "SELECT pg_logical_emit_message(true, 'oncegate', ''), set_config('client_min_messages', 'warning', true), \
          CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') \
          THEN set_config('synchronous_commit', 'on', true) END",
    types: &[],
};

/// Makes connections.
#[derive(Clone)]
pub(super) struct Connector {
    servers: Config,
    tls: Encryptor,
    hosts: Arc<Hosts>,
    /// Whether the servers must be able to keep records, beyond committing.
    is_for_records: bool,
}

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
}

/// The purpose of a connection.
enum Purpose {
    /// To be used for as long as its host is; notifications go to the other end of this.
    Use(Option<mpsc::UnboundedSender<String>>),
    /// To find out whether the host is to be used.
    Probe,
}

/// Cancels the statement that a connection waits for.
struct Cancel {
    token: CancelToken,
    tls: Encryptor,
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

    /// Whether the connection must be closed.
    pub(super) fn is_fatal(&self) -> bool {
        match self {
            Self::Unsent(_) | Self::Late => true,
            Self::Sql(error) => error::is_fatal(error),
            Self::Unreadable(_) | Self::Unreplicated | Self::NoEffect => false,
        }
    }
}

impl Connector {
    /// For a look or for `migrate`: a host need not have the schema.
    pub(super) fn new(settings: &Settings) -> Self {
        let servers = settings.servers.clone();
        let hosts = Arc::new(Hosts::new(hosts::count(&servers)));
        Self { servers, tls: Encryptor::new(settings.tls.clone()), hosts, is_for_records: false }
    }

    /// For a store that keeps records: of several hosts, only those are chosen where a claim and a settle work.
    pub(super) fn for_records(settings: &Settings) -> Self {
        Self { is_for_records: true, ..Self::new(settings) }
    }

    /// A connection to the host in use, on which a commit has gone through, which holds the store that this process uses,
    /// and which has what `calls` need.
    ///
    /// Only that shows that claims would work: a standby that was promoted away, a full disk or a synchronous standby
    /// that is gone still accepts logins.
    pub(super) async fn connect(&self, calls: &[Query]) -> Result<Session, OpenError> {
        let mut session = self.connect_unchecked().await?;
        let proving = async {
            session.commit().await.map_err(CallError::into_open_error)?;
            let lineage =
                self.recognise(&session).await.inspect_err(|_| self.hosts.suspect(session.host, Suspicion::Silent))?;
            self.hosts.lineage_guard.add(&lineage, &self.name(session.host));
            session.prepare(calls).await.map_err(|error| OpenError::of(&error))
        };
        match timeout(HANDSHAKE_TIMEOUT, proving).await {
            Ok(Ok(())) => Ok(session),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                session.give_up();
                Err(OpenError::late())
            }
        }
    }

    /// The lineage of the server of a connection. An error if it is not the one that this process uses.
    pub(super) async fn recognise(&self, session: &Session) -> Result<Lineage, OpenError> {
        self.recognise_at(session.client(), session.host).await
    }

    /// The same for a connection of the pool to the host in use, for a store of records.
    pub(super) async fn recognise_in_use(&self, client: &Client) -> Result<(), OpenError> {
        if !self.is_for_records {
            return Ok(());
        }
        let host = self.hosts.chosen().unwrap_or_default();
        // The pool has no time limit of its own for this.
        let recognised = timeout(HANDSHAKE_TIMEOUT, self.recognise_at(client, host)).await;
        recognised
            .unwrap_or_else(|_| Err(OpenError::late()))
            .map(drop)
            .inspect_err(|_| self.hosts.suspect(host, Suspicion::Silent))
    }

    async fn recognise_at(&self, client: &Client, host: usize) -> Result<Lineage, OpenError> {
        let lineage = Lineage::of(client).await?;
        self.hosts.lineage_guard.check(&lineage, &self.name(host))?;
        Ok(lineage)
    }

    /// A connection for the pool. Its notices go to `messages`.
    pub(super) async fn connect_plainly(
        &self,
        messages: Arc<ServerMessages>,
    ) -> Result<(Client, JoinHandle<()>), SqlError> {
        let host = self.hosts.chosen().unwrap_or_default();
        let (end, _) = watch::channel(false);
        let dialled = self.connect_to(&self.servers, host, messages, end, false).await;
        dialled.inspect_err(|_| self.hosts.suspect(host, Suspicion::Silent))
    }

    pub(super) fn servers(&self) -> &Config {
        &self.servers
    }

    pub(super) fn hosts(&self) -> &Arc<Hosts> {
        &self.hosts
    }

    pub(super) fn is_for_records(&self) -> bool {
        self.is_for_records
    }

    /// A host's name and port.
    pub(super) fn name(&self, host: usize) -> String {
        hosts::name(&self.servers, host)
    }

    /// How long it may take until a connection is made.
    pub(super) fn patience(&self) -> Duration {
        self.connect_timeout() + LOGIN_TIMEOUT + HANDSHAKE_TIMEOUT
    }

    /// How long a server may take to be reached.
    pub(super) fn connect_timeout(&self) -> Duration {
        self.servers.get_connect_timeout().copied().unwrap_or(DEFAULT_CONNECT_TIMEOUT)
    }

    /// A connection to the host in use, whatever it is good for. Tells whether it is direct.
    pub(super) async fn connect_unchecked(&self) -> Result<Session, OpenError> {
        self.connect_for_use(None).await
    }

    /// As [`Connector::connect_unchecked`]; notifications go to `notifications`.
    pub(super) async fn connect_to_listen(
        &self,
        notifications: mpsc::UnboundedSender<String>,
    ) -> Result<Session, OpenError> {
        self.connect_for_use(Some(notifications)).await
    }

    /// A connection to a host that may come to be used.
    pub(super) async fn connect_probe(&self, host: usize) -> Result<Session, OpenError> {
        self.handshake(host, &Purpose::Probe).await
    }

    async fn connect_for_use(
        &self,
        notifications: Option<mpsc::UnboundedSender<String>>,
    ) -> Result<Session, OpenError> {
        let host = self.host().await?;
        let greeted = timeout(self.patience(), self.handshake(host, &Purpose::Use(notifications))).await;
        let greeted = greeted.unwrap_or_else(|_| Err(OpenError::late()));
        greeted.inspect_err(|_| self.hosts.suspect(host, Suspicion::Silent))
    }

    async fn handshake(&self, host: usize, purpose: &Purpose) -> Result<Session, OpenError> {
        let opened = if self.hosts.is_pooled(host) {
            None
        } else {
            let mark = mark()?;
            let mut servers = self.servers.clone();
            let options = self.servers.get_options().unwrap_or_default();
            servers.options(format!("{options} -c {SESSION}={mark}").trim());
            match self.open(&servers, host, purpose).await {
                Ok(session) => Some((session, mark)),
                // The answer of a pooler to unknown start-up parameters.
                Err(error) if error.code() == Some(&SqlState::PROTOCOL_VIOLATION) => None,
                Err(error) => return Err(OpenError::of(&error)),
            }
        };
        let (mut session, mark) = match opened {
            Some((session, mark)) => (session, Some(mark)),
            None => (self.open(&self.servers, host, purpose).await.map_err(|error| OpenError::of(&error))?, None),
        };
        session.is_direct = session.has_mark(mark.as_deref()).await.map_err(|error| OpenError::of(&error))?;
        if !session.is_direct {
            self.hosts.set_pooled(host);
        }
        Ok(session)
    }

    async fn open(&self, servers: &Config, host: usize, purpose: &Purpose) -> Result<Session, SqlError> {
        let (end, ended) = watch::channel(false);
        let (notifications, is_probe) = match purpose {
            Purpose::Use(notifications) => (notifications.clone(), false),
            Purpose::Probe => (None, true),
        };
        let messages = Arc::new(ServerMessages::with_notifications(notifications));
        let (client, driver) = self.connect_to(servers, host, Arc::clone(&messages), end, is_probe).await?;
        let (tls, hosts) = (self.tls.clone(), Arc::clone(&self.hosts));
        let _driver = AbortOnDrop(driver);
        Ok(Session { client, prepared: None, messages, _driver, ended, tls, hosts, host, is_direct: false })
    }

    /// A connection, and the task that moves its bytes: until it ends, or until another host is in use, unless it is on trial.
    async fn connect_to(
        &self,
        servers: &Config,
        host: usize,
        messages: Arc<ServerMessages>,
        end: watch::Sender<bool>,
        is_probe: bool,
    ) -> Result<(Client, JoinHandle<()>), SqlError> {
        let settings = hosts::one(servers, host, self.connect_timeout());
        let hosts = Arc::clone(&self.hosts);
        let left = (!is_probe).then(|| self.hosts.left(host));
        let mut left = Box::pin(async move {
            match left {
                Some(left) => left.await,
                None => pending().await,
            }
        });
        let late = SqlError::__private_api_timeout;
        let (client, driven) = tokio::select! {
            connected = timeout(self.connect_timeout() + LOGIN_TIMEOUT, settings.connect(self.tls.clone())) => {
                connected.unwrap_or_else(|_| Err(late()))?
            }
            () = left.as_mut() => return Err(late()),
        };
        let cancel = Cancel { token: client.cancel_token(), tls: self.tls.clone() };
        let driver = tokio::spawn(async move {
            tokio::select! {
                biased;
                is_lost = drive(driven, &messages) => if is_lost && !is_probe {
                    hosts.suspect(host, Suspicion::Silent);
                },
                () = left => drop(tokio::spawn(cancel.send())),
            }
            end.send_replace(true);
        });
        Ok((client, driver))
    }
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

    /// Commits, and waits until that is durable.
    pub(super) async fn commit(&self) -> Result<(), CallError> {
        self.write(&COMMIT, &[], 0).await.map(drop)
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
    async fn prepare(&mut self, calls: &[Query]) -> Result<(), SqlError> {
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
    async fn has_mark(&self, mark: Option<&str>) -> Result<bool, SqlError> {
        let question = "SELECT current_setting('oncegate.session', true)";
        let row = self.client.query_typed_one(question, &[]).await?;
        let found: Option<&str> = row.get(0);
        Ok(mark.is_some() && found == mark)
    }
}

impl Cancel {
    async fn send(self) {
        // Nothing depends on it.
        let _ = timeout(HANDSHAKE_TIMEOUT, self.token.cancel_query(self.tls)).await;
    }
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A random mark that identifies a session.
fn mark() -> Result<String, OpenError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|_| OpenError::Failed("the system's random number generator failed".to_owned()))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
