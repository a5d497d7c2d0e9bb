//! Connections: made and proven.

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

use super::choosing::{Doubt, Hosts};
use super::driver::{News, drive};
use super::error::{self, OpenError};
use super::lineage::Lineage;
use super::tls::Encryptor;
use super::{Settings, hosts, row};
use crate::store::{Error, ErrorKind};

/// How long a connection may take from its beginning until it is known to work, besides the time to reach the server.
const GREETING: Duration = Duration::from_secs(5);

/// How long a host that was reached may take to let somebody in: a server that hangs takes connections too.
const LOGIN: Duration = Duration::from_secs(3);

/// How long a statement may take. Beyond it the connection is given up: whoever asked has given up already, and nobody
/// knows whether the server is there.
pub(super) const ANSWER: Duration = Duration::from_secs(5);

/// From this time on a statement that is not answered casts doubt on the server: others are tried beside it. So a client
/// that waits for `settle_timeout` gets its answer from the next server.
const SLOW: Duration = Duration::from_secs(1);

/// How many bytes a connection carries in a millisecond at least: 1 MiB in about a second.
const SLOWEST: usize = 1024;

/// How long a server may take to be reached, unless the settings say.
const REACH: Duration = Duration::from_secs(2);

/// The setting by which a session is recognised.
const SESSION: &str = "oncegate.session";

/// Writes to the log that a commit waits for, and to no table: `migrate` connects where there is none yet. The commit waits
/// as those of claims do, whatever the session is set to.
const COMMIT: Call = Call {
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
    /// Whether records are to be kept there, for which a commit is not enough.
    is_for_records: bool,
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
    hosts: Arc<Hosts>,
    /// The host that it is with.
    pub(super) host: usize,
    /// Whether the other end is the server itself, and not a pooler before it.
    pub(super) is_direct: bool,
}

/// What a connection is for.
enum Purpose {
    /// To be used for as long as its host is; notifications go to the other end of this.
    Use(Option<mpsc::UnboundedSender<String>>),
    /// To find out whether the host is to be used.
    Trial,
}

/// Tells the server to give up the statement that a connection waits for.
struct Cancel {
    token: CancelToken,
    tls: Encryptor,
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
    /// Nothing of it is done, since a step of it had no effect.
    Unproven,
}

/// What to say where a step of a proof had no effect.
const UNPROVEN: &str = "a record that this user claims cannot be renewed and released, though no statement fails: look for \
                        row security and triggers on oncegate.record";

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
            Self::Unproven => Error::determinate(ErrorKind::Other, UNPROVEN),
        }
    }

    /// The error for whoever wants to use the store.
    pub(super) fn into_open_error(self) -> OpenError {
        match self {
            Self::Sql(error) => OpenError::of(&error),
            Self::Late => OpenError::late(),
            Self::Unproven => OpenError::Denied(UNPROVEN.to_owned()),
            other => OpenError::Unreachable(other.into_error().cause().source.to_string()),
        }
    }

    /// Whether the connection can be used no longer.
    pub(super) fn is_last(&self) -> bool {
        match self {
            Self::Unsent(_) | Self::Late => true,
            Self::Sql(error) => error::is_last(error),
            Self::Unreadable(_) | Self::Unreplicated | Self::Unproven => false,
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
    /// Only that shows that claims would work: a standby that was promoted away, a full disk or a synchronous standby that
    /// is gone lets everybody log in.
    pub(super) async fn connect(&self, calls: &[Call]) -> Result<Session, OpenError> {
        let mut session = self.connect_unproven().await?;
        let proving = async {
            session.commit().await.map_err(Failed::into_open_error)?;
            let lineage =
                self.recognise(&session).await.inspect_err(|_| self.hosts.doubt(session.host, Doubt::Silent))?;
            self.hosts.used.add(&lineage, &self.name(session.host));
            session.prepare(calls).await.map_err(|error| OpenError::of(&error))
        };
        match timeout(GREETING, proving).await {
            Ok(Ok(())) => Ok(session),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                session.give_up();
                Err(OpenError::late())
            }
        }
    }

    /// What the other end of a connection holds. An error where that is not what this process uses.
    pub(super) async fn recognise(&self, session: &Session) -> Result<Lineage, OpenError> {
        let lineage = Lineage::of(session.client()).await?;
        self.hosts.used.check(&lineage, &self.name(session.host))?;
        Ok(lineage)
    }

    /// A connection for the pool. What the server says goes to `news`.
    pub(super) async fn connect_plainly(&self, news: Arc<News>) -> Result<(Client, JoinHandle<()>), SqlError> {
        let host = self.hosts.chosen().unwrap_or_default();
        let (ending, _) = watch::channel(false);
        let dialled = self.dial(&self.servers, host, news, ending, false).await;
        dialled.inspect_err(|_| self.hosts.doubt(host, Doubt::Silent))
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
        self.reach() + LOGIN + GREETING
    }

    /// How long a server may take to be reached.
    pub(super) fn reach(&self) -> Duration {
        self.servers.get_connect_timeout().copied().unwrap_or(REACH)
    }

    /// A connection to the host in use, whatever it is good for. Tells whether it is direct.
    pub(super) async fn connect_unproven(&self) -> Result<Session, OpenError> {
        self.connect_for_use(None).await
    }

    /// As [`Connector::connect_unproven`]; notifications go to `told`.
    pub(super) async fn connect_to_listen(&self, told: mpsc::UnboundedSender<String>) -> Result<Session, OpenError> {
        self.connect_for_use(Some(told)).await
    }

    /// A connection to a host that may come to be used.
    pub(super) async fn connect_on_trial(&self, host: usize) -> Result<Session, OpenError> {
        self.greet(host, &Purpose::Trial).await
    }

    async fn connect_for_use(&self, told: Option<mpsc::UnboundedSender<String>>) -> Result<Session, OpenError> {
        let host = self.host().await?;
        let greeted = timeout(self.patience(), self.greet(host, &Purpose::Use(told))).await;
        let greeted = greeted.unwrap_or_else(|_| Err(OpenError::late()));
        greeted.inspect_err(|_| self.hosts.doubt(host, Doubt::Silent))
    }

    async fn greet(&self, host: usize, purpose: &Purpose) -> Result<Session, OpenError> {
        let opened = if self.hosts.is_pooled(host) {
            None
        } else {
            let mark = mark()?;
            let mut servers = self.servers.clone();
            let options = self.servers.get_options().unwrap_or_default();
            servers.options(format!("{options} -c {SESSION}={mark}").trim());
            match self.open(&servers, host, purpose).await {
                Ok(session) => Some((session, mark)),
                // What a pooler says to start-up parameters that it does not know.
                Err(error) if error.code() == Some(&SqlState::PROTOCOL_VIOLATION) => None,
                Err(error) => return Err(OpenError::of(&error)),
            }
        };
        let (mut session, mark) = match opened {
            Some((session, mark)) => (session, Some(mark)),
            None => (self.open(&self.servers, host, purpose).await.map_err(|error| OpenError::of(&error))?, None),
        };
        session.is_direct = session.knows(mark.as_deref()).await.map_err(|error| OpenError::of(&error))?;
        if !session.is_direct {
            self.hosts.set_pooled(host);
        }
        Ok(session)
    }

    async fn open(&self, servers: &Config, host: usize, purpose: &Purpose) -> Result<Session, SqlError> {
        let (ending, ended) = watch::channel(false);
        let (told, is_trial) = match purpose {
            Purpose::Use(told) => (told.clone(), false),
            Purpose::Trial => (None, true),
        };
        let news = Arc::new(News::with_notifications(told));
        let (client, driver) = self.dial(servers, host, Arc::clone(&news), ending, is_trial).await?;
        let (tls, hosts) = (self.tls.clone(), Arc::clone(&self.hosts));
        let _driver = AbortOnDrop(driver);
        Ok(Session { client, prepared: None, news, _driver, ended, tls, hosts, host, is_direct: false })
    }

    /// A connection, and the task that moves its bytes: until it ends, or until another host is in use, unless it is on trial.
    async fn dial(
        &self,
        servers: &Config,
        host: usize,
        news: Arc<News>,
        ending: watch::Sender<bool>,
        is_trial: bool,
    ) -> Result<(Client, JoinHandle<()>), SqlError> {
        let settings = hosts::one(servers, host, self.reach());
        let hosts = Arc::clone(&self.hosts);
        let left = (!is_trial).then(|| self.hosts.left(host));
        let mut left = Box::pin(async move {
            match left {
                Some(left) => left.await,
                None => pending().await,
            }
        });
        let late = SqlError::__private_api_timeout;
        let (client, driven) = tokio::select! {
            connected = timeout(self.reach() + LOGIN, settings.connect(self.tls.clone())) => {
                connected.unwrap_or_else(|_| Err(late()))?
            }
            () = left.as_mut() => return Err(late()),
        };
        let cancel = Cancel { token: client.cancel_token(), tls: self.tls.clone() };
        let driver = tokio::spawn(async move {
            tokio::select! {
                biased;
                is_lost = drive(driven, &news) => if is_lost && !is_trial {
                    hosts.doubt(host, Doubt::Silent);
                },
                () = left => drop(tokio::spawn(cancel.send())),
            }
            ending.send_replace(true);
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
    pub(super) async fn commit(&self) -> Result<(), Failed> {
        self.write(&COMMIT, &[], 0).await.map(drop)
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
        let doubts = self.news.doubts();
        let patience = ANSWER + Duration::from_millis((bytes / SLOWEST) as u64);
        let mut calling = pin!(self.call(call, values));
        let answered = match timeout(SLOW, calling.as_mut()).await {
            Ok(answered) => answered,
            Err(_) => {
                self.hosts.doubt(self.host, Doubt::Silent);
                timeout(patience - SLOW, calling).await.map_err(|_| Failed::Late)?
            }
        };
        let rows = answered.map_err(|error| {
            if error::refuses_writes(&error) {
                self.hosts.doubt(self.host, Doubt::Refuses);
            }
            Failed::Sql(error)
        })?;
        if self.news.doubts() == doubts { Ok(rows) } else { Err(Failed::Unreplicated) }
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

    /// Whether the session has the mark that it was begun with: a pooler gives it to another one.
    async fn knows(&self, mark: Option<&str>) -> Result<bool, SqlError> {
        let question = "SELECT current_setting('oncegate.session', true)";
        let row = self.client.query_typed_one(question, &[]).await?;
        let found: Option<&str> = row.get(0);
        Ok(mark.is_some() && found == mark)
    }
}

impl Cancel {
    async fn send(self) {
        // Nothing depends on it.
        let _ = timeout(GREETING, self.token.cancel_query(self.tls)).await;
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
