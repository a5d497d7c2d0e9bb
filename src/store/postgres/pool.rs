//! A few connections for what is rare, or may take long: it holds up no claim and no ending.

use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::{
    Connect, Manager, ManagerConfig, Object, Pool as Connections, PoolError, RecyclingMethod, Runtime,
};
use futures_util::future::BoxFuture;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_postgres::{Client, Config, Error as SqlError, Row};

use super::connect::{Connector, Failed, Parameter};
use super::driver::News;
use super::error;
use crate::store::{Error, ErrorKind};

/// How long a caller waits for a connection.
const TURN: Duration = Duration::from_secs(2);

/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(10);

/// The connections.
#[derive(Clone)]
pub(super) struct Pool {
    connections: Connections,
    /// What the servers say on all of them: which one said it is not known, so a write counts as in doubt where the wait of
    /// another one was broken off meanwhile.
    news: Arc<News>,
}

impl Pool {
    pub(super) fn new(connector: Connector, connections: usize) -> Result<Self, super::OpenError> {
        let patience = connector.patience();
        let manager_config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let news = Arc::<News>::default();
        let servers = connector.servers().clone();
        let dial = Dial { connector, news: Arc::clone(&news) };
        let manager = Manager::from_connect(servers, dial, manager_config);
        let pool = Connections::builder(manager)
            .max_size(connections)
            .wait_timeout(Some(TURN))
            .create_timeout(Some(patience))
            .recycle_timeout(Some(TURN))
            .runtime(Runtime::Tokio1)
            .build();
        pool.map(|connections| Self { connections, news }).map_err(|error| super::OpenError::Failed(error.to_string()))
    }

    /// A connection for one caller. An error says that nothing was asked.
    pub(super) async fn get(&self) -> Result<Object, Error> {
        self.connections.get().await.map_err(|error| match error {
            PoolError::Backend(error) => error::of_question(&error),
            PoolError::Closed => Error::determinate(ErrorKind::Unavailable, "the store is closed"),
            PoolError::Timeout(_) => {
                Error::determinate(ErrorKind::Unavailable, "no connection to the database came free in time")
            }
            other => Error::determinate(ErrorKind::Other, other.to_string()),
        })
    }

    /// The rows of a question.
    pub(super) async fn look(&self, sql: &str, values: &[Parameter<'_>]) -> Result<Vec<Row>, Error> {
        match self.ask(sql, values).await? {
            Some(answer) => answer.map_err(|error| error::of_question(&error)),
            None => Err(Error::determinate(ErrorKind::Timeout, "the database did not answer in time")),
        }
    }

    /// The rows of a statement that writes.
    pub(super) async fn write(&self, sql: &str, values: &[Parameter<'_>]) -> Result<Vec<Row>, Error> {
        let doubts = self.doubts();
        match self.ask(sql, values).await? {
            Some(answer) => answer.map_err(|error| error::of_statement(&error)).and_then(|rows| {
                self.expect_replicated(doubts)?;
                Ok(rows)
            }),
            None => Err(Error::indeterminate(ErrorKind::Timeout, "the database did not answer in time")),
        }
    }

    /// How often the wait for a standby was broken off so far.
    pub(super) fn doubts(&self) -> u64 {
        self.news.doubts()
    }

    /// An error where that has happened since: what was written may be on the primary only.
    pub(super) fn expect_replicated(&self, doubts: u64) -> Result<(), Error> {
        if self.doubts() == doubts { Ok(()) } else { Err(Failed::Unreplicated.into_error()) }
    }

    async fn ask(&self, sql: &str, values: &[Parameter<'_>]) -> Result<Option<Result<Vec<Row>, SqlError>>, Error> {
        let mut connection = InUse(Some(self.get().await?));
        let Some(client) = connection.0.as_ref() else { return Ok(None) };
        let Ok(answer) = timeout(ANSWER, client.query_typed(sql, values)).await else { return Ok(None) };
        // It can be another's again, unless it is at its end.
        if !answer.as_ref().is_err_and(error::is_last) {
            drop(connection.0.take());
        }
        Ok(Some(answer))
    }

    pub(super) fn close(&self) {
        self.connections.close();
    }
}

/// A connection that is asked something. Where the answer is not waited for to its end it is given up: what it is at is
/// unknown, and nobody else is to wait behind it.
struct InUse(Option<Object>);

impl Drop for InUse {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            drop(Object::take(connection));
        }
    }
}

/// Makes connections as the lanes do.
struct Dial {
    connector: Connector,
    news: Arc<News>,
}

impl Connect for Dial {
    fn connect(&self, _: &Config) -> BoxFuture<'_, Result<(Client, JoinHandle<()>), SqlError>> {
        Box::pin(self.connector.connect_plainly(Arc::clone(&self.news)))
    }
}
