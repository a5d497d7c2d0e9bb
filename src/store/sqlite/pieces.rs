//! Large answers, in pieces. Each piece has a transaction, and so its sync, to itself or shares it with what others write: they wait for a
//! piece, and never for all of a large answer.
//!
//! A record has its answer in pieces where `answer` is an integer: how many bytes they have together. The pieces are of its attempt, and go
//! when the attempt does: with the record, or when another attempt takes its place. Those of an attempt that ended otherwise stay as long as
//! its record.

use bytes::{Bytes, BytesMut};
use rusqlite::types::{Type, ValueRef};
use rusqlite::{Connection, Error as SqlError, Row, params};

use super::Sqlite;
use super::error::Failure;
use super::requests::SettleRequest;
use super::row;
use super::session::Session;
use super::writer::{MAX_BATCH_BYTES, Request};
use crate::idempotency::record::{AttemptToken, Record, RecordId, State};
use crate::store::{Error, ErrorKind, Settled, Settlement};

/// Answers of more bytes are written in pieces.
const MAX_WHOLE: usize = MAX_BATCH_BYTES;

/// How many bytes a piece has, but for the last one.
const PIECE: usize = 256 << 10;

pub(super) mod sql {
    pub(in crate::store::sqlite) const PUT: &str = "INSERT INTO piece (attempt, place, answer) VALUES (?1, ?2, ?3)
         ON CONFLICT (attempt, place) DO UPDATE SET answer = excluded.answer";
    pub(in crate::store::sqlite) const ALL: &str = "SELECT answer FROM piece WHERE attempt = ?1 ORDER BY place";
    pub(in crate::store::sqlite) const LENGTH: &str =
        "SELECT coalesce(sum(length(answer)), 0) FROM piece WHERE attempt = ?1";
    pub(in crate::store::sqlite) const REMOVE: &str = "DELETE FROM piece WHERE attempt = ?1";
}

/// A piece of the answer with which an attempt is about to end.
struct PutRequest {
    id: RecordId,
    attempt: AttemptToken,
    place: usize,
    piece: Bytes,
}

impl Request for PutRequest {
    /// Whether the attempt may still end so. Otherwise nothing is written.
    type Reply = bool;
    const ABANDONED_WITH_CALLER: bool = true;

    fn size(&self) -> usize {
        self.piece.len()
    }

    fn run(&self, session: &mut Session) -> Result<bool, Failure> {
        let may_end = session.view(self.id)?;
        let may_end = may_end.is_some_and(|found| found.attempt == self.attempt && found.state != State::Completed);
        if !may_end {
            return Ok(false);
        }
        if self.place == 0 {
            // Of an earlier try.
            remove(&session.conn, self.attempt)?;
        }
        let values = params![self.attempt.0, self.place as i64, &self.piece[..]];
        session.conn.prepare_cached(sql::PUT)?.execute(values)?;
        Ok(true)
    }
}

impl Sqlite {
    /// Ends an attempt, and writes a large answer before.
    pub(super) async fn settle_in_pieces(
        &self,
        id: RecordId,
        attempt: AttemptToken,
        end: Settlement,
    ) -> Result<Settled, Error> {
        let large = match &end {
            Settlement::Complete { answer, .. } if answer.len() > MAX_WHOLE => Some(answer.clone()),
            _ => None,
        };
        let is_in_pieces = large.is_some();
        let mut rest = large.unwrap_or_default();
        let mut place = 0;
        while !rest.is_empty() {
            let piece = rest.split_to(PIECE.min(rest.len()));
            match self.ask(PutRequest { id, attempt, place, piece }).await {
                Ok(true) => place += 1,
                // The settlement says what the record is instead.
                Ok(false) => break,
                // What was asked for cannot have happened yet.
                Err(Error::Determinate(cause) | Error::Indeterminate(cause)) => return Err(Error::Determinate(cause)),
            }
        }
        self.ask(SettleRequest { id, attempt, end, is_in_pieces }).await
    }
}

/// How long an answer of `length` bytes is by its pieces. Refuses one whose pieces are not all there.
pub(super) fn expect_all(conn: &Connection, attempt: AttemptToken, length: usize) -> Result<i64, Failure> {
    let found = conn.prepare_cached(sql::LENGTH)?.query_row([attempt.0], |found| found.get::<_, i64>(0))?;
    if usize::try_from(found) == Ok(length) {
        Ok(found)
    } else {
        let missing = format!("an answer of {length} bytes has {found} in its pieces");
        Err(Failure::Request(Error::determinate(ErrorKind::Other, missing)))
    }
}

/// Removes the pieces of an attempt, if it has any.
pub(super) fn remove(conn: &Connection, attempt: AttemptToken) -> rusqlite::Result<usize> {
    conn.prepare_cached(sql::REMOVE)?.execute([attempt.0])
}

/// The record of [`row::record`] with its answer, whose column follows.
pub(super) fn record(conn: &Connection, found: &Row<'_>, first: usize) -> rusqlite::Result<Record> {
    let record = row::record(found, first)?;
    let column = first + 5;
    let answer = match found.get_ref(column)? {
        ValueRef::Integer(length) => Some(read(conn, record.attempt, column, length)?),
        _ => row::read_bytes(found, column)?,
    };
    Ok(Record { answer, ..record })
}

fn read(conn: &Connection, attempt: AttemptToken, column: usize, length: i64) -> rusqlite::Result<Bytes> {
    let wanted = usize::try_from(length).map_err(|_| SqlError::IntegralValueOutOfRange(column, length))?;
    let mut answer = BytesMut::new();
    let mut all = conn.prepare_cached(sql::ALL)?;
    let mut rows = all.query([attempt.0])?;
    while let Some(piece) = rows.next()? {
        answer.extend_from_slice(&row::read_bytes(piece, 0)?.unwrap_or_default());
    }
    if answer.len() == wanted {
        Ok(answer.freeze())
    } else {
        let missing = format!("an answer of {wanted} bytes has {} in its pieces", answer.len());
        Err(SqlError::FromSqlConversionFailure(column, Type::Blob, missing.into()))
    }
}
