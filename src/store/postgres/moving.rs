//! Moves records to another number of databases while gates serve.
//!
//! Of an id, one database at most takes claims: it owns the id. A range of ids goes from one owner to the next in four
//! steps, each of which is durable before the next begins:
//!
//! 1. The former owner gives the range up, under a lock that every claim holds until it has committed. From here on
//!    nothing is claimed in it, anywhere. Attempts under way go on, and are settled where they are.
//! 2. Once none of its records is in flight, they are set aside. Until then retries are answered by them.
//! 3. The next owner gets them and owns the range, both in one transaction.
//! 4. What was set aside is removed.
//!
//! A range whose attempts do not end in time is taken back, unless somebody has begun to set it aside.
//!
//! Who owns what, and what was given up, is all that there is to know of how far this is: it may end anywhere, and goes on
//! from there. Of two that do it at once, neither can undo a step of the other, for each is checked where it is done.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::time::{Instant, sleep};
use tokio_postgres::types::Type;
use tokio_postgres::{Error as SqlError, Row, Transaction};

use super::connect::Connector;
use super::layout::{Database, look};
use super::ranges::Range;
use super::schema::{self, LOCK};
use super::session::{CallError, Parameter, Session};
use super::{OpenError, Settings, error};
use crate::store::sharded::layout::{DatabaseId, Layout, Misfit};

/// About how many records are handed over at once: for so long, new claims of their ids are refused.
const PART: u64 = 5_000;

/// In how many parts all ids are divided at least and at most.
const PARTS: std::ops::RangeInclusive<u64> = 64..=1 << 20;

/// How long attempts of a range may take to end before it is left for later, and at most if nothing else is left.
const PATIENCE: Duration = Duration::from_secs(2);
const LONG_PATIENCE: Duration = Duration::from_secs(30);

/// By how many milliseconds the clocks of the databases may differ. What it takes to ask them counts as well.
const MAX_SKEW: i64 = 2_000;

/// Between two looks whether the attempts of a range have ended.
const POLL: Duration = Duration::from_millis(20);

/// How often a step is tried that others hold up, and the pause between.
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(100);

/// What is kept beside records, which every database needs, and what to do where it is there.
const SHARED: [(&str, &str); 4] = [
    ("origin", "DO NOTHING"),
    ("identity", "(service, namespace) DO UPDATE SET digest = excluded.digest"),
    ("rules_period", "DO NOTHING"),
    ("paused", "DO NOTHING"),
];

/// Two lists of databases.
pub struct Move {
    /// Where records are.
    pub from: Vec<(String, Settings)>,
    /// Where they are to be.
    pub to: Vec<(String, Settings)>,
    /// Makes the databases know of it, and moves nothing yet.
    pub is_preparation: bool,
}

/// One of the databases of both lists.
struct Member {
    name: String,
    session: Session,
    database: Database,
}

/// Moves records, or goes on with it. `say` hears how far it is.
///
/// # Errors
/// See [`OpenError`]. It can be run again after each.
pub async fn move_records(lists: &Move, say: &mut dyn FnMut(String)) -> Result<(), OpenError> {
    let mut members: Vec<Member> = Vec::new();
    let (from, to) = (ids(&lists.from, &mut members).await?, ids(&lists.to, &mut members).await?);
    let mut moving = Moving { members, from, to };
    moving.check()?;
    moving.check_clocks().await?;
    if moving.is_over() {
        say("nothing to move: the records are where they belong".to_owned());
        return Ok(());
    }
    moving.announce().await?;
    moving.copy_rules().await?;
    if lists.is_preparation {
        let (from, to) = (moving.from.len(), moving.to.len());
        say(format!(
            "the databases know that records move from {from} to {to} of them; restart the gates with the next list, and run this \
             again without --prepare"
        ));
        return Ok(());
    }
    moving.hand_over_all(say).await?;
    moving.finish().await?;
    let plural = if moving.to.len() == 1 { "" } else { "s" };
    say(format!("the records are in {} database{plural}", moving.to.len()));
    Ok(())
}

/// Connects to the databases of a list that are not connected yet, and returns the ids of all.
async fn ids(list: &[(String, Settings)], members: &mut Vec<Member>) -> Result<Vec<DatabaseId>, OpenError> {
    let mut ids = Vec::new();
    for (name, settings) in list {
        let session = connect(settings).await.map_err(|error| OpenError::of_database(name, error))?;
        let database = look(session.client()).await.map_err(|error| OpenError::of_database(name, error))?;
        let id = database.found.id;
        if ids.contains(&id) {
            let one = members.iter().find(|member| member.database.found.id == id);
            let one = one.map_or_else(String::new, |member| member.name.clone());
            return Err(Misfit::Twice { one, other: name.clone() }.into());
        }
        if members.iter().all(|member| member.database.found.id != id) {
            members.push(Member { name: name.clone(), session, database });
        }
        ids.push(id);
    }
    Ok(ids)
}

/// A connection on which all is durable that is seen.
async fn connect(settings: &Settings) -> Result<Session, OpenError> {
    let session = Connector::new(settings).connect_unchecked().await?;
    schema::check(session.client()).await?;
    session.commit().await.map_err(CallError::into_open_error)?;
    Ok(session)
}

struct Moving {
    members: Vec<Member>,
    from: Vec<DatabaseId>,
    to: Vec<DatabaseId>,
}

impl Moving {
    /// Refuses lists that are not what the databases say.
    fn check(&self) -> Result<(), OpenError> {
        for (index, member) in self.members.iter().enumerate() {
            let is_former = index < self.from.len();
            let fits = match &member.database.found.layout {
                Some(Layout { members, target: None }) => *members == self.to || is_former && *members == self.from,
                Some(Layout { members, target: Some(target) }) => *members == self.from && *target == self.to,
                None if is_former => self.from.len() == 1,
                None => !member.database.has_records,
            };
            if !fits {
                let (flag, list) = if is_former { ("--from", &self.from) } else { ("--to", &self.to) };
                let found = &member.database.found;
                let place = list.iter().position(|id| *id == found.id).unwrap_or_default();
                return Err(Misfit::of_move(member.name.clone(), found, flag, place, list.len()).into());
            }
        }
        Ok(())
    }

    /// Refuses clocks that differ: a record ends when the clock of its database says so, and would end too early in one that
    /// is ahead.
    async fn check_clocks(&self) -> Result<(), OpenError> {
        let began = Instant::now();
        let mut clocks: Vec<(i64, &str)> = Vec::new();
        for member in &self.members {
            let rows = member.rows("SELECT oncegate.now_v1()").await?;
            let since = i64::try_from(began.elapsed().as_millis()).unwrap_or(i64::MAX);
            clocks.push((rows.first().map_or(0, |row| row.get::<_, i64>(0)).saturating_sub(since), &member.name));
        }
        match (clocks.iter().min(), clocks.iter().max()) {
            (Some((behind, one)), Some((ahead, other))) if ahead - behind > MAX_SKEW => {
                Err(OpenError::Failed(format!(
                    "the clock of {other} is {} ms ahead of that of {one}: records would expire too early; synchronise the clocks first",
                    ahead - behind
                )))
            }
            _ => Ok(()),
        }
    }

    /// Whether every database knows the next list alone.
    fn is_over(&self) -> bool {
        self.members.iter().all(|member| {
            member
                .database
                .found
                .layout
                .as_ref()
                .is_some_and(|layout| layout.target.is_none() && layout.members == self.to)
        })
    }

    fn index(&self, id: &DatabaseId) -> Result<usize, OpenError> {
        let place = self.members.iter().position(|member| member.database.found.id == *id);
        place.ok_or_else(|| OpenError::Failed("a database of the list has gone".to_owned()))
    }

    /// Makes every database know both lists: the new ones first, so that no gate finds one that knows nothing.
    async fn announce(&mut self) -> Result<(), OpenError> {
        let (store, secret) = {
            let first = &self.members[0].database.opened;
            (first.id, first.secret)
        };
        let mut taken: BTreeSet<i16> = self.members.iter().filter_map(|member| member.database.number).collect();
        let former = self.from.len();
        let (from, to) = (slices(&self.from), slices(&self.to));
        let order: Vec<usize> = (former..self.members.len()).chain(0..former).collect();
        for index in order {
            let member = &mut self.members[index];
            let number = member.database.number.or_else(|| (0..64).find(|number| !taken.contains(number)));
            let number = number.ok_or_else(|| OpenError::Failed("there are too many databases".to_owned()))?;
            taken.insert(number);
            if member
                .database
                .found
                .layout
                .as_ref()
                .is_some_and(|layout| layout.members != self.from || layout.target.is_some())
            {
                continue;
            }
            // A store by itself owns every id.
            let owned: Option<&[u8]> = (index < former).then_some(&[]);
            let (store, secret) = (&store[..], &secret[..]);
            let join: [Parameter<'_>; 6] = [
                (&store, Type::BYTEA),
                (&secret, Type::BYTEA),
                (&from, Type::BYTEA_ARRAY),
                (&to, Type::BYTEA_ARRAY),
                (&number, Type::INT2),
                (&owned, Type::BYTEA),
            ];
            match member.database.found.layout {
                None => member.change(LOCK, "SELECT oncegate.join_v1($1, $2, $3, $4, $5, $6, NULL)", &join).await?,
                Some(_) => member.change(LOCK, "UPDATE oncegate.layout SET target = $1", &join[3..4]).await?,
            };
        }
        Ok(())
    }

    /// Makes the next databases know what is kept beside records.
    async fn copy_rules(&mut self) -> Result<(), OpenError> {
        for to in self.to.clone() {
            let target = self.index(&to)?;
            for (table, conflict) in SHARED {
                self.copy_beside(0, target, table, conflict).await?;
            }
        }
        Ok(())
    }

    /// Copies a table that both have.
    async fn copy_beside(&mut self, from: usize, to: usize, table: &str, conflict: &str) -> Result<(), OpenError> {
        let Ok([source, target]) = self.members.get_disjoint_mut([from, to]) else { return Ok(()) };
        let Member { name, session, .. } = target;
        let sql = |error: SqlError| OpenError::of_database(name, OpenError::of(&error));
        let transaction = session.client_mut().transaction().await.map_err(sql)?;
        let begin = format!("{IS_MOVING}; CREATE TEMP TABLE copied (LIKE oncegate.{table}) ON COMMIT DROP");
        transaction.batch_execute(&begin).await.map_err(sql)?;
        source.copy(&format!("SELECT * FROM oncegate.{table}"), &transaction, "pg_temp.copied").await.map_err(sql)?;
        let insert = format!(
            "INSERT INTO oncegate.{table} OVERRIDING SYSTEM VALUE SELECT * FROM pg_temp.copied ON CONFLICT {conflict}"
        );
        transaction.batch_execute(&insert).await.map_err(sql)?;
        transaction.commit().await.map_err(sql)?;
        target.settle().await
    }

    /// Hands over every range whose owner is another in the next list.
    async fn hand_over_all(&mut self, say: &mut dyn FnMut(String)) -> Result<(), OpenError> {
        let mut patience = PATIENCE;
        let mut said = Instant::now();
        loop {
            let mut left = Vec::new();
            for (from, to, range) in self.pending().await? {
                if !self.hand_over(from, to, range, patience).await? {
                    left.push(range);
                }
                if said.elapsed() >= Duration::from_secs(10) {
                    said = Instant::now();
                    let share: u128 = self.ranges()?.iter().map(|(_, _, range)| range.beyond - range.first).sum();
                    let rest: u128 = self.rest().await?.iter().map(|(_, _, range)| range.beyond - range.first).sum();
                    let percent = 100 - rest.saturating_mul(100) / share.max(1);
                    say(format!("{percent} % of the ids that move have moved"));
                }
            }
            if left.is_empty() {
                return Ok(());
            }
            patience = LONG_PATIENCE;
            say(format!("{} ranges of ids wait for attempts that run in them", left.len()));
        }
    }

    /// The ranges that move, with the indexes of their databases.
    fn ranges(&self) -> Result<Vec<(usize, usize, Range)>, OpenError> {
        let mut ranges = Vec::new();
        for (place, from) in self.from.iter().enumerate() {
            for (next, to) in self.to.iter().enumerate() {
                let both = Range::of_place(place, self.from.len()).and(Range::of_place(next, self.to.len()));
                if let Some(range) = both.filter(|_| from != to) {
                    ranges.push((self.index(from)?, self.index(to)?, range));
                }
            }
        }
        Ok(ranges)
    }

    /// What of them has not come to its next database.
    async fn rest(&self) -> Result<Vec<(usize, usize, Range)>, OpenError> {
        let mut rest = Vec::new();
        for (from, to, range) in self.ranges()? {
            let there = self.members[to].owned().await?;
            rest.extend(range.without(&there).into_iter().map(|range| (from, to, range)));
        }
        Ok(rest)
    }

    /// The same in parts: those first that no database owns.
    async fn pending(&self) -> Result<Vec<(usize, usize, Range)>, OpenError> {
        let mut count = 0_i64;
        for member in &self.members {
            let sql = "SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = 'oncegate.record'::regclass";
            count += member.rows(sql).await?.first().map_or(0, |row| row.get::<_, i64>(0));
        }
        let parts = (count.unsigned_abs() / PART).clamp(*PARTS.start(), *PARTS.end());
        let length = (1_u128 << 64).div_ceil(parts.into());
        let (mut pending, mut between) = (Vec::new(), Vec::new());
        for (from, to, range) in self.rest().await? {
            let owned = self.members[from].owned().await?;
            between.extend(range.without(&owned).into_iter().map(|range| (from, to, range)));
            for owned in owned.iter().filter_map(|owned| range.and(*owned)) {
                pending.extend(owned.parts(length).map(|range| (from, to, range)));
            }
        }
        between.append(&mut pending);
        Ok(between)
    }

    /// Hands a range over; false if attempts in it did not end in time, and it stays where it was.
    async fn hand_over(&mut self, from: usize, to: usize, range: Range, patience: Duration) -> Result<bool, OpenError> {
        let (first, beyond) = range.to_row();
        let values: [Parameter<'_>; 2] = [(&first, Type::BYTEA), (&beyond, Type::BYTEA)];
        let former = &mut self.members[from];
        former.change("", "SELECT oncegate.give_up_v1($1, $2)", &values).await?;
        let began = Instant::now();
        while !former.change("", "SELECT oncegate.set_aside_v1($1, $2)", &values).await? {
            if began.elapsed() >= patience {
                // Nothing of it was set aside: new claims need not wait for these attempts.
                former.change("", "SELECT oncegate.take_back_v1($1, $2)", &values).await?;
                return Ok(false);
            }
            sleep(POLL).await;
        }
        self.copy(from, to, range, &values).await?;
        self.members[from].remove_copied(range).await?;
        Ok(true)
    }

    /// Writes what was set aside into the next database, which owns it from then on.
    async fn copy(
        &mut self,
        from: usize,
        to: usize,
        range: Range,
        values: &[Parameter<'_>; 2],
    ) -> Result<(), OpenError> {
        let Ok([source, target]) = self.members.get_disjoint_mut([from, to]) else { return Ok(()) };
        let Member { name, session, .. } = target;
        let sql = |error: SqlError| OpenError::of_database(name, OpenError::of(&error));
        let transaction = session.client_mut().transaction().await.map_err(sql)?;
        transaction.batch_execute(IS_MOVING).await.map_err(sql)?;
        for table in ["record", "delivery"] {
            let read = format!("SELECT * FROM oncegate.outgoing_{table} WHERE {}", within("id", range));
            source.copy(&read, &transaction, &format!("oncegate.{table}")).await.map_err(sql)?;
        }
        let taken = transaction.query_typed_one("SELECT oncegate.take_over_v1($1, $2)", values).await.map_err(sql)?;
        if !taken.get::<_, bool>(0) {
            return Err(OpenError::Failed(format!("{name}: somebody else moves records too")));
        }
        transaction.commit().await.map_err(sql)?;
        target.settle().await
    }

    /// Makes every database know the next list alone.
    async fn finish(&mut self) -> Result<(), OpenError> {
        self.copy_rules().await?;
        let first = self.index(&self.to[0])?;
        for index in 0..self.from.len() {
            // Those of an earlier run too, which ended before it came to this.
            self.members[index].remove_copied(Range::of_place(0, 1)).await?;
            if !self.to.contains(&self.members[index].database.found.id) {
                // What operators did is kept where it is found.
                self.copy_beside(index, first, "audit", "DO NOTHING").await?;
            }
        }
        let to = slices(&self.to);
        for member in &mut self.members {
            let values: [Parameter<'_>; 1] = [(&to, Type::BYTEA_ARRAY)];
            member.change(LOCK, "UPDATE oncegate.layout SET members = $1, target = NULL", &values).await?;
        }
        Ok(())
    }
}

/// For the transaction that writes what comes from another database.
const IS_MOVING: &str = "SET LOCAL oncegate.is_moving = 'on'";

impl Member {
    fn error(&self, error: &SqlError) -> OpenError {
        OpenError::of_database(&self.name, OpenError::of(error))
    }

    async fn rows(&self, sql: &str) -> Result<Vec<Row>, OpenError> {
        self.session.client().query_typed(sql, &[]).await.map_err(|error| self.error(&error))
    }

    /// The ranges that it owns.
    async fn owned(&self) -> Result<Vec<Range>, OpenError> {
        let rows = self.rows("SELECT first, beyond FROM oncegate.owned").await?;
        Ok(rows.iter().map(|row| Range::of_row(row.get(0), row.get(1))).collect())
    }

    /// Runs a statement in a transaction, after `before`, until nothing holds it up; what it says, where that is true or
    /// false. It is durable then.
    async fn change(&mut self, before: &str, sql: &str, values: &[Parameter<'_>]) -> Result<bool, OpenError> {
        let mut tries = 1;
        loop {
            match self.try_change(before, sql, values).await {
                Ok(said) => {
                    self.settle().await?;
                    return Ok(said);
                }
                Err(error) if error::is_transient(&error) && tries < TRIES => {
                    tries += 1;
                    sleep(PAUSE).await;
                }
                Err(error) => return Err(self.error(&error)),
            }
        }
    }

    async fn try_change(&mut self, before: &str, sql: &str, values: &[Parameter<'_>]) -> Result<bool, SqlError> {
        let transaction = self.session.client_mut().transaction().await?;
        transaction.batch_execute(before).await?;
        let rows = transaction.query_typed(sql, values).await?;
        transaction.commit().await?;
        Ok(rows.first().is_none_or(|row| row.try_get(0).unwrap_or(true)))
    }

    /// Makes all that was committed durable, on standbys too.
    async fn settle(&self) -> Result<(), OpenError> {
        let settled = self.session.commit().await.map_err(CallError::into_open_error);
        settled.map_err(|error| OpenError::of_database(&self.name, error))
    }

    /// Copies rows into a table of another database.
    async fn copy(&self, read: &str, to: &Transaction<'_>, table: &str) -> Result<(), SqlError> {
        let out = self.session.client().copy_out(&format!("COPY ({read}) TO STDOUT (FORMAT binary)")).await?;
        let sink = to.copy_in::<_, Bytes>(&format!("COPY {table} FROM STDIN (FORMAT binary)")).await?;
        let (mut out, mut sink) = (pin!(out), pin!(sink));
        while let Some(bytes) = out.next().await {
            sink.send(bytes?).await?;
        }
        sink.finish().await.map(drop)
    }

    /// Removes what was set aside and is in another database now.
    async fn remove_copied(&mut self, range: Range) -> Result<(), OpenError> {
        for table in ["record", "delivery"] {
            self.rows(&format!("DELETE FROM oncegate.outgoing_{table} WHERE {}", within("id", range))).await?;
        }
        self.rows(&format!("DELETE FROM oncegate.handover WHERE {}", within("first", range))).await?;
        self.settle().await
    }
}

/// The condition that the id in a column is in a range.
fn within(column: &str, range: Range) -> String {
    let hex = |bytes: Vec<u8>| {
        bytes.iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
    };
    let (first, beyond) = range.to_row();
    let beyond = beyond.map_or_else(String::new, |beyond| format!(" AND {column} < '\\x{}'", hex(beyond)));
    format!("{column} >= '\\x{}'{beyond}", hex(first))
}

fn slices(ids: &[DatabaseId]) -> Vec<&[u8]> {
    ids.iter().map(|id| &id[..]).collect()
}
