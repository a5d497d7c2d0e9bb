//! Large answers, in pieces. Each piece has a transaction, and so its sync, to itself or shares it with what others write: they wait for a
//! piece, and never for all of a large answer.
//!
//! A record has its answer in pieces where `answer` is an integer: how many bytes they have together. The pieces are of its attempt, and go
//! when the attempt does: with the record, or when another attempt takes its place. Those of an attempt that ended otherwise stay as long as
//! its record.

use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use rusqlite::types::{Type, ValueRef};
use rusqlite::{Connection, Error as SqlError, Row, params};

use super::Sqlite;
use super::error::Failure;
use super::requests::SettleRequest;
use super::row;
use super::session::Session;
use super::writer::Request;
use crate::idempotency::record::{AttemptToken, Record, RecordId, State};
use crate::store::{Error, ErrorKind, Settled, Settlement};

/// Answers of more bytes are written in pieces.
const MAX_WHOLE: usize = 1 << 20;

/// How many bytes a piece has at least, but for the last one. With fewer, others wait less: measured, half as long where pieces have 64 KiB
/// as where they have 256 KiB.
const PIECE: usize = 64 << 10;

/// How many pieces an answer has at most, and how many of them are asked for at once: large ones are not to take too many syncs.
const MOST: usize = 256;
const AT_ONCE: usize = 4;

/// How much room the disk has besides, where answers are written in pieces. With less, a large answer is written as a whole: what has no
/// room then leaves nothing behind.
const ROOM: u64 = 64 << 20;

pub(super) mod sql {
    pub(in crate::store::sqlite) const PUT: &str =
        "INSERT INTO piece (attempt, place, turn, answer) VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT (attempt, place) DO UPDATE SET turn = excluded.turn, answer = excluded.answer";
    pub(in crate::store::sqlite) const ALL: &str = "SELECT answer FROM piece WHERE attempt = ?1 ORDER BY place";
    pub(in crate::store::sqlite) const LENGTH: &str =
        "SELECT coalesce(sum(length(answer)), 0), coalesce(min(turn) = ?2 AND max(turn) = ?2, 0)
         FROM piece WHERE attempt = ?1";
    pub(in crate::store::sqlite) const REMOVE: &str = "DELETE FROM piece WHERE attempt = ?1";
    pub(in crate::store::sqlite) const REMOVE_TURN: &str = "DELETE FROM piece WHERE attempt = ?1 AND turn = ?2";
}

/// A piece of the answer with which an attempt is about to end.
struct PutRequest {
    id: RecordId,
    attempt: AttemptToken,
    /// A number of its own for each try: another one may write at the same time.
    turn: i64,
    place: usize,
    piece: Bytes,
}

/// Removes the pieces that one try has written, where the store cannot take the rest.
struct GiveUpRequest {
    attempt: AttemptToken,
    turn: i64,
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
        let values = params![self.attempt.0, self.place as i64, self.turn, &self.piece[..]];
        session.conn.prepare_cached(sql::PUT)?.execute(values)?;
        Ok(true)
    }
}

impl Request for GiveUpRequest {
    type Reply = ();

    fn run(&self, session: &mut Session) -> Result<(), Failure> {
        session.conn.prepare_cached(sql::REMOVE_TURN)?.execute(params![self.attempt.0, self.turn])?;
        Ok(())
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
            Settlement::Complete { answer, .. } if answer.len() > MAX_WHOLE && self.has_room(answer.len()) => {
                answer.clone()
            }
            _ => return self.ask(SettleRequest { id, attempt, end, turn: None }).await,
        };
        let turn = fastrand::i64(..);
        if let Err(Error::Determinate(cause) | Error::Indeterminate(cause)) = self.put(id, attempt, turn, large).await {
            let _ = self.ask(GiveUpRequest { attempt, turn }).await;
            // The settlement itself cannot have happened yet.
            return Err(Error::Determinate(cause));
        }
        self.ask(SettleRequest { id, attempt, end, turn: Some(turn) }).await
    }

    /// Writes an answer, unless the attempt cannot end so any more: the settlement says then what the record is instead.
    async fn put(&self, id: RecordId, attempt: AttemptToken, turn: i64, answer: Bytes) -> Result<(), Error> {
        let (length, size) = (answer.len(), PIECE.max(answer.len().div_ceil(MOST)));
        let put = |place: usize| {
            let piece = answer.slice(place * size..length.min((place + 1) * size));
            self.ask(PutRequest { id, attempt, turn, place, piece })
        };
        // It removes what an earlier try has left.
        if !put(0).await? {
            return Ok(());
        }
        let mut others = stream::iter(1..length.div_ceil(size)).map(put).buffered(AT_ONCE);
        while others.try_next().await?.unwrap_or(false) {}
        Ok(())
    }

    /// Whether an answer of so many bytes fits, and much more: in the log and in the database.
    pub(super) fn has_room(&self, length: usize) -> bool {
        rustix::fs::statvfs(&self.path)
            .is_ok_and(|disk| disk.f_bavail.saturating_mul(disk.f_frsize) / 2 >= (length as u64).saturating_add(ROOM))
    }
}

/// How long an answer of `length` bytes is by its pieces. Refuses one whose pieces are not all there, and of one turn.
pub(super) fn expect_all(conn: &Connection, attempt: AttemptToken, turn: i64, length: usize) -> Result<i64, Failure> {
    let (found, is_of_turn) = conn
        .prepare_cached(sql::LENGTH)?
        .query_row(params![attempt.0, turn], |found| Ok((found.get::<_, i64>(0)?, found.get::<_, bool>(1)?)))?;
    if usize::try_from(found) == Ok(length) && is_of_turn {
        Ok(found)
    } else {
        let missing = format!("an answer of {length} bytes has {found} in its pieces, or some of another answer");
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
        answer.extend_from_slice(row::blob(piece, 0)?.unwrap_or_default());
    }
    if answer.len() == wanted {
        Ok(answer.freeze())
    } else {
        let missing = format!("an answer of {wanted} bytes has {} in its pieces", answer.len());
        Err(SqlError::FromSqlConversionFailure(column, Type::Blob, missing.into()))
    }
}
