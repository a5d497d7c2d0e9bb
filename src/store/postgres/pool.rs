//! A pool for operations that are rare or may take long, so that they delay no claim and no settlement.

use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{
    Connect, Hook, HookError, Manager, ManagerConfig, Object, Pool as Connections, PoolError, RecyclingMethod, Runtime,
};
use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::{Client, Config, Error as SqlError, Row};

use super::connect::Connector;
use super::error;
use super::schema::LOOK_TIMEOUT;
use super::session::{CallError, Cancel, Parameter, ServerMessages};
use super::tls::Encryptor;
use crate::store::{Error, ErrorKind};

/// How long a caller waits for a connection.
const CHECKOUT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long an answer may take.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// The connections.
#[derive(Clone)]
pub(super) struct Pool {
    connections: Connections,
    /// The messages of the servers on all of them. They do not name the connection, so a write counts as uncertain if
    /// the standby wait of any of them was cancelled meanwhile.
    messages: Arc<ServerMessages>,
    /// For the connections that cancel statements; nothing behind a pooler: see [`CheckedOut`].
    cancelling: Option<Encryptor>,
}

impl Pool {
    /// `is_direct` says that no pooler is in between.
    pub(super) fn new(connector: Connector, connections: usize, is_direct: bool) -> Result<Self, super::OpenError> {
        let (patience, cancelling) = (connector.patience(), is_direct.then(|| connector.tls().clone()));
        let manager_config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let messages = Arc::<ServerMessages>::default();
        let servers = connector.servers().clone();
        let connect_to = PoolConnect { connector: connector.clone(), messages: Arc::clone(&messages) };
        let manager = Manager::from_connect(servers, connect_to, manager_config);
        let pool = Connections::builder(manager)
            .max_size(connections)
            .wait_timeout(Some(CHECKOUT_TIMEOUT))
            .create_timeout(Some(patience))
            .recycle_timeout(Some(CHECKOUT_TIMEOUT))
            .post_create(Hook::async_fn(move |client, _| {
                let connector = connector.clone();
                Box::pin(async move {
                    let recognised = connector.recognise_in_use(client).await;
                    recognised.map_err(|error| HookError::message(error.to_string()))
                })
            }))
            .runtime(Runtime::Tokio1)
            .build();
        pool.map(|connections| Self { connections, messages, cancelling })
            .map_err(|error| super::OpenError::Failed(error.to_string()))
    }

    /// How many connections it has at most.
    pub(super) fn max_size(&self) -> usize {
        self.connections.status().max_size
    }

    /// A connection for one caller. On an error, no statement was sent.
    pub(super) async fn check_out(&self) -> Result<CheckedOut, Error> {
        let connection = self.connections.get().await;
        let cancelling = self.cancelling.clone();
        let checked_out = |connection| CheckedOut { connection: Some(connection), cancelling };
        connection.map(checked_out).map_err(|error| match error {
            PoolError::Backend(error) => error::of_read(&error),
            PoolError::Closed => Error::closed(),
            PoolError::Timeout(_) => {
                Error::determinate(ErrorKind::Unavailable, "timed out waiting for a database connection")
            }
            PoolError::PostCreateHook(HookError::Message(message)) => {
                Error::determinate(ErrorKind::Unavailable, message.to_string())
            }
            other => Error::determinate(ErrorKind::Other, other.to_string()),
        })
    }

    /// The rows of a read for a request of a client, in one round trip. Behind a pooler, it stays for as long as another session has its
    /// table locked.
    pub(super) async fn query(&self, sql: &str, values: &[Parameter<'_>]) -> Result<Vec<Row>, Error> {
        self.read(LockWait::Unbounded, sql, values).await
    }

    /// The same for anybody else. The server itself ends the wait for a lock. The transaction may lock rows, as a look at whether one is
    /// held does.
    pub(super) async fn query_unless_locked(&self, sql: &str, values: &[Parameter<'_>]) -> Result<Vec<Row>, Error> {
        self.read(LockWait::Bounded, sql, values).await
    }

    async fn read(&self, wait: LockWait, sql: &str, values: &[Parameter<'_>]) -> Result<Vec<Row>, Error> {
        match self.run(wait, sql, values).await? {
            Some(answer) => answer.map_err(|error| error::of_read(&error)),
            None => Err(Error::determinate(ErrorKind::Timeout, "the database did not answer in time")),
        }
    }

    /// The rows of a read in a transaction of its own, which `begin` begins and sets up.
    pub(super) async fn query_in_transaction(
        &self,
        begin: &str,
        sql: &str,
        values: &[Parameter<'_>],
        patience: Duration,
    ) -> Result<Vec<Row>, Error> {
        let mut connection = self.check_out().await?;
        let client = connection.client()?;
        let read = async {
            client.batch_execute(begin).await?;
            let rows = client.query_typed(sql, values).await?;
            client.batch_execute("COMMIT").await?;
            Ok(rows)
        };
        let rows = match timeout(patience, read).await {
            Ok(answer) => answer.map_err(|error| error::of_read(&error))?,
            Err(_) => return Err(Error::determinate(ErrorKind::Timeout, "the database did not answer in time")),
        };
        // Where it failed, the transaction ends with the connection.
        connection.give_back();
        Ok(rows)
    }

    /// The rows of a statement that writes.
    pub(super) async fn write(&self, sql: &str, values: &[Parameter<'_>]) -> Result<Vec<Row>, Error> {
        self.written(LockWait::Unbounded, sql, values).await
    }

    /// The same for upkeep and for what an operator asks for, who hears that it failed where another session has a table locked:
    /// then it may not happen later. The server itself ends the wait, since a cancellation does not get through every pooler.
    pub(super) async fn write_unless_locked(&self, sql: &str, values: &[Parameter<'_>]) -> Result<Vec<Row>, Error> {
        self.written(LockWait::Bounded, sql, values).await
    }

    async fn written(&self, wait: LockWait, sql: &str, values: &[Parameter<'_>]) -> Result<Vec<Row>, Error> {
        let interrupted_waits = self.interrupted_waits();
        match self.run(wait, sql, values).await? {
            Some(answer) => answer.map_err(|error| error::of_write(&error)).and_then(|rows| {
                self.expect_replicated(interrupted_waits)?;
                Ok(rows)
            }),
            None => Err(Error::indeterminate(ErrorKind::Timeout, "the database did not answer in time")),
        }
    }

    /// How often the wait for a standby was cancelled so far.
    pub(super) fn interrupted_waits(&self) -> u64 {
        self.messages.interrupted_waits()
    }

    /// An error if that has happened since: the write may be on the primary only.
    pub(super) fn expect_replicated(&self, interrupted_waits: u64) -> Result<(), Error> {
        if self.interrupted_waits() == interrupted_waits { Ok(()) } else { Err(CallError::Unreplicated.into_error()) }
    }

    /// Runs a statement. No answer where that takes too long.
    async fn run(
        &self,
        wait: LockWait,
        sql: &str,
        values: &[Parameter<'_>],
    ) -> Result<Option<Result<Vec<Row>, SqlError>>, Error> {
        let mut connection = self.check_out().await?;
        let client = connection.client()?;
        let asking = async {
            if wait == LockWait::Unbounded {
                return client.query_typed(sql, values).await;
            }
            client.batch_execute(&format!("BEGIN; {LOOK_TIMEOUT}")).await?;
            let rows = client.query_typed(sql, values).await;
            // After an error, this takes the transaction back.
            let ended = client.batch_execute("COMMIT").await;
            let rows = rows?;
            ended.map(|()| rows)
        };
        let Ok(answer) = timeout(QUERY_TIMEOUT, asking).await else { return Ok(None) };
        if !answer.as_ref().is_err_and(error::must_close) {
            connection.give_back();
        }
        Ok(Some(answer))
    }

    pub(super) fn close(&self) {
        self.connections.close();
    }
}

/// How long the server waits for a lock on behalf of a statement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LockWait {
    /// As long as it is held. The statement takes one round trip.
    Unbounded,
    /// [`LOOK_TIMEOUT`]. The statement has a transaction of its own, which takes three.
    Bounded,
}

/// A connection in use. It is closed unless it is given back: where an answer was not awaited to the end, its state is
/// unknown, and no other caller should wait behind its statement. That statement is cancelled: one that waits for a lock
/// would run when the lock is gone, long after its caller heard that it failed, and until then keep its place among the
/// connections that the server allows. A pooler is not asked to cancel anything: PgBouncer 1.18 ends itself where the
/// client leaves meanwhile (`bad client state`), and others lose it.
pub(super) struct CheckedOut {
    connection: Option<Object>,
    cancelling: Option<Encryptor>,
}

impl CheckedOut {
    pub(super) fn client(&mut self) -> Result<&mut Client, Error> {
        self.connection.as_mut().map(|connection| &mut ***connection).ok_or_else(Error::closed)
    }

    /// Returns it to the pool, for the next caller.
    pub(super) fn give_back(mut self) {
        drop(self.connection.take());
    }
}

impl Drop for CheckedOut {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        let client = Object::take(connection);
        let tls = self.cancelling.take().filter(|_| !client.is_closed());
        if let (Some(tls), Ok(runtime)) = (tls, Handle::try_current()) {
            let cancel = Cancel { token: client.cancel_token(), tls };
            runtime.spawn(async move {
                cancel.send().await;
                drop(client);
            });
        }
    }
}

/// Makes connections as the batchers do.
struct PoolConnect {
    connector: Connector,
    messages: Arc<ServerMessages>,
}

impl Connect for PoolConnect {
    fn connect(&self, _: &Config) -> BoxFuture<'_, Result<(Client, JoinHandle<()>), SqlError>> {
        Box::pin(self.connector.connect_plainly(Arc::clone(&self.messages)))
    }
}
