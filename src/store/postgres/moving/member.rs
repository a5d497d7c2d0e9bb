//! One of the databases that records move between.

use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::time::sleep;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error as SqlError, IsolationLevel, Row};

use super::{Lists, slices};
use crate::idempotency::record::Hex;
use crate::store::postgres::connect::Connector;
use crate::store::postgres::layout::Database;
use crate::store::postgres::ranges::Range;
use crate::store::postgres::schema::{self, LOCK, LOCK_TIMEOUT};
use crate::store::postgres::session::{CallError, Parameter, Session};
use crate::store::postgres::{OpenError, Settings, error};
use crate::store::sharded::layout::DatabaseId;

/// How often a step is tried that others hold up, and the pause between.
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(100);

/// Which of the two lists a database knows. It cannot come to know others before the end of the transaction.
const STAGE: &str = "SELECT members = $1 AND target IS NOT DISTINCT FROM $2, members = $2 AND target IS NULL
    FROM oncegate.layout FOR SHARE";

/// One of the databases of both lists.
pub(super) struct Member {
    pub(super) name: String,
    pub(super) session: Session,
    pub(super) database: Database,
}

/// How far a move is in a database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It knows both lists.
    Moving,
    /// It knows the next list alone.
    Over,
}

/// A connection on which all is durable that is seen.
pub(super) async fn connect(settings: &Settings) -> Result<Session, OpenError> {
    let session = Connector::new(settings).connect_unchecked().await?;
    schema::within(schema::LOOK_TIMEOUT, session.client(), schema::check(session.client())).await?;
    session.commit().await.map_err(CallError::into_open_error)?;
    Ok(session)
}

/// How far a move is in the database of a transaction, which is held there until its end; nothing where it is in another move.
async fn stage(client: &Client, lists: &Lists) -> Result<Option<Stage>, SqlError> {
    let (from, to) = (slices(&lists.from), slices(&lists.to));
    let rows = client.query_typed(STAGE, &[(&from, Type::BYTEA_ARRAY), (&to, Type::BYTEA_ARRAY)]).await?;
    Ok(rows.first().and_then(|row| match (row.get(0), row.get(1)) {
        (true, _) => Some(Stage::Moving),
        (false, true) => Some(Stage::Over),
        (false, false) => None,
    }))
}

impl Member {
    fn error(&self, error: &SqlError) -> OpenError {
        OpenError::of_database(&self.name, OpenError::of(error))
    }

    /// Whether it was found with these lists.
    pub(super) fn knows(&self, members: &[DatabaseId], target: Option<&[DatabaseId]>) -> bool {
        let layout = self.database.found.layout.as_ref();
        layout.is_some_and(|layout| layout.members == members && layout.target.as_deref() == target)
    }

    /// Why this process does not go on.
    pub(super) fn is_in_other_move(&self) -> OpenError {
        let why = "another `oncegate migrate` has moved the same records meanwhile";
        OpenError::of_database(&self.name, OpenError::Failed(why.to_owned()))
    }

    pub(super) async fn rows(&self, sql: &str) -> Result<Vec<Row>, OpenError> {
        self.session.client().query_typed(sql, &[]).await.map_err(|error| self.error(&error))
    }

    /// What a question says.
    pub(super) async fn says(&self, sql: &str, values: &[Parameter<'_>]) -> Result<bool, OpenError> {
        let row = self.session.client().query_typed_one(sql, values).await;
        row.map(|row| row.get(0)).map_err(|error| self.error(&error))
    }

    pub(super) async fn run(&self, sql: &str) -> Result<(), OpenError> {
        self.session.client().batch_execute(sql).await.map_err(|error| self.error(&error))
    }

    /// Begins a transaction that holds the database in the move. After an error the process ends, and the transaction with it.
    pub(super) async fn begin(&self, lists: &Lists) -> Result<Stage, OpenError> {
        self.run("BEGIN ISOLATION LEVEL READ COMMITTED").await?;
        let stage = stage(self.session.client(), lists).await.map_err(|error| self.error(&error))?;
        stage.ok_or_else(|| self.is_in_other_move())
    }

    /// Ends the transaction. What it did is durable then.
    pub(super) async fn commit(&self) -> Result<(), OpenError> {
        self.run("COMMIT").await?;
        self.settle().await
    }

    /// The ranges that it owns.
    pub(super) async fn owned(&self) -> Result<Vec<Range>, OpenError> {
        let rows = self.rows("SELECT first, beyond FROM oncegate.owned").await?;
        Ok(rows.iter().map(|row| Range::of_row(row.get(0), row.get(1))).collect())
    }

    /// Runs a statement in a transaction until nothing holds it up; what it says, where that is true or false. It is durable
    /// then. The database is held in the move; or where it is to begin or to end, no other process does the same.
    pub(super) async fn change(
        &mut self,
        held_in: Option<&Lists>,
        sql: &str,
        values: &[Parameter<'_>],
    ) -> Result<bool, OpenError> {
        let mut tries = 1;
        loop {
            match self.try_change(held_in, sql, values).await {
                Ok(Some(said)) => {
                    self.settle().await?;
                    return Ok(said);
                }
                Ok(None) => return Err(self.is_in_other_move()),
                Err(error) if error::is_transient(&error) && tries < TRIES => {
                    tries += 1;
                    sleep(PAUSE).await;
                }
                Err(error) => return Err(self.error(&error)),
            }
        }
    }

    /// Nothing where the database is not in the move.
    async fn try_change(
        &mut self,
        held_in: Option<&Lists>,
        sql: &str,
        values: &[Parameter<'_>],
    ) -> Result<Option<bool>, SqlError> {
        let begin = self.session.client_mut().build_transaction().isolation_level(IsolationLevel::ReadCommitted);
        let transaction = begin.start().await?;
        match held_in {
            Some(lists) if stage(transaction.client(), lists).await? != Some(Stage::Moving) => return Ok(None),
            Some(_) => {}
            // A process that was stopped in the middle may hold it.
            None => transaction.batch_execute(&format!("{LOCK_TIMEOUT}; {LOCK}")).await?,
        }
        let rows = transaction.query_typed(sql, values).await?;
        transaction.commit().await?;
        Ok(Some(rows.first().is_none_or(|row| row.try_get(0).unwrap_or(true))))
    }

    /// Makes all that was committed durable, on standbys too.
    async fn settle(&self) -> Result<(), OpenError> {
        let settled = self.session.commit().await.map_err(CallError::into_open_error);
        settled.map_err(|error| OpenError::of_database(&self.name, error))
    }

    /// Copies rows into a table of another database.
    pub(super) async fn copy(&self, read: &str, to: &Self, table: &str) -> Result<(), OpenError> {
        let out = self.session.client().copy_out(&format!("COPY ({read}) TO STDOUT (FORMAT binary)")).await;
        let mut out = pin!(out.map_err(|error| self.error(&error))?);
        let failed = |error: SqlError| to.error(&error);
        let into = to.session.client();
        let sink =
            into.copy_in::<_, Bytes>(&format!("COPY {table} FROM STDIN (FORMAT binary)")).await.map_err(failed)?;
        let mut sink = pin!(sink);
        while let Some(bytes) = out.next().await {
            sink.send(bytes.map_err(|error| self.error(&error))?).await.map_err(failed)?;
        }
        sink.finish().await.map(drop).map_err(failed)
    }

    /// Removes what was set aside and is in another database now.
    pub(super) async fn remove_copied(&self, range: Range) -> Result<(), OpenError> {
        for table in ["record", "delivery"] {
            self.rows(&format!("DELETE FROM oncegate.outgoing_{table} WHERE {}", within("id", range))).await?;
        }
        self.rows(&format!("DELETE FROM oncegate.handover WHERE {}", within("first", range))).await.map(drop)
    }
}

/// The condition that the id in a column is in a range.
pub(super) fn within(column: &str, range: Range) -> String {
    let (first, beyond) = range.to_row();
    let beyond = beyond.map_or_else(String::new, |beyond| format!(" AND {column} < '\\x{}'", Hex(&beyond)));
    format!("{column} >= '\\x{}'{beyond}", Hex(&first))
}
