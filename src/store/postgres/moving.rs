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
//! from there. Of two that do it at once, neither can undo a step of the other, for each is checked where it is done. One that
//! was stopped for a while does no step in another move than its own: each is done in databases that are held in the move.

mod check;
mod member;

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_postgres::types::Type;

use self::member::{Member, Stage, within};
use super::layout::find_by;
use super::ranges::Range;
use super::session::Parameter;
use super::{OpenError, Settings};
use crate::store::sharded::layout::{DatabaseId, Misfit};

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

/// What is kept beside records, which every database needs, and what to do where it is there.
const SHARED: [(&str, &str); 4] = [
    ("origin", "DO NOTHING"),
    ("identity", "(service, namespace) DO UPDATE SET digest = excluded.digest"),
    ("rules_period", "DO NOTHING"),
    ("paused", "DO NOTHING"),
];

/// What operators did.
const AUDIT: &str = "audit";

/// For the transaction that writes what comes from another database.
const IS_MOVING: &str = "SET LOCAL oncegate.is_moving = 'on'";

/// Whether a range was given up, and all of it is aside.
const IS_ASIDE: &str = "SELECT NOT EXISTS (
        SELECT FROM oncegate.owned o WHERE ($2 IS NULL OR o.first < $2) AND (o.beyond IS NULL OR o.beyond > $1)
    ) AND NOT EXISTS (
        SELECT FROM oncegate.handover h
        WHERE ($2 IS NULL OR h.first < $2) AND (h.beyond IS NULL OR h.beyond > $1) AND NOT h.is_aside
    )";

/// Makes a database know of a move, and its end; false where it is in another one.
const BEGIN_MOVE: &str = "WITH changed AS (
        UPDATE oncegate.layout SET target = $2 WHERE members = $1 AND target IS NULL RETURNING true
    ) SELECT EXISTS (SELECT FROM changed) OR EXISTS (SELECT FROM oncegate.layout WHERE members = $1 AND target = $2)";
const END_MOVE: &str = "WITH changed AS (
        UPDATE oncegate.layout SET members = $2, target = NULL WHERE members = $1 AND target = $2 RETURNING true
    ) SELECT EXISTS (SELECT FROM changed) OR EXISTS (SELECT FROM oncegate.layout WHERE members = $2 AND target IS NULL)";

/// Two lists of databases.
pub struct Move {
    /// Where records are.
    pub from: Vec<(String, Settings)>,
    /// Where they are to be.
    pub to: Vec<(String, Settings)>,
    /// Makes the databases know of it, and moves nothing yet.
    pub is_preparation: bool,
}

/// Why records were not moved, or not all of them.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// It was refused, and nothing was done.
    #[error("{0}")]
    Refused(OpenError),
    /// It broke off.
    #[error("{0}")]
    BrokenOff(#[from] OpenError),
}

/// Moves records, or goes on with it. `say` hears how far it is.
///
/// # Errors
/// See [`MoveError`]. It can be run again after each.
pub async fn move_records(lists: &Move, say: &mut dyn FnMut(String)) -> Result<(), MoveError> {
    let mut moving = Moving::of(lists).await.map_err(MoveError::Refused)?;
    moving.check_clocks().await.map_err(MoveError::Refused)?;
    if moving.is_over() {
        // An earlier run may have ended before it came to this.
        moving.copy_entries().await?;
        say("nothing to move: the records are where they belong".to_owned());
        return Ok(());
    }
    moving.announce().await?;
    moving.copy_rules().await?;
    if lists.is_preparation {
        let (from, to) = (moving.lists.from.len(), moving.lists.to.len());
        say(format!(
            "the databases know that records move from {from} to {to} of them; restart the gates with the next list, and run this \
             again without --prepare"
        ));
        return Ok(());
    }
    moving.hand_over_all(say).await?;
    moving.finish().await?;
    let plural = if moving.lists.to.len() == 1 { "" } else { "s" };
    say(format!("the records are in {} database{plural}", moving.lists.to.len()));
    Ok(())
}

/// Connects to the databases of a list that are not connected yet, and returns the ids of all.
async fn ids(list: &[(String, Settings)], members: &mut Vec<Member>) -> Result<Vec<DatabaseId>, OpenError> {
    let mut ids = Vec::new();
    for (name, settings) in list {
        let session = member::connect(settings).await.map_err(|error| OpenError::of_database(name, error))?;
        let database = find_by(session.client()).await.map_err(|error| OpenError::of_database(name, error))?;
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

struct Moving {
    members: Vec<Member>,
    lists: Lists,
}

/// The databases of both lists.
struct Lists {
    from: Vec<DatabaseId>,
    to: Vec<DatabaseId>,
}

impl Moving {
    /// Connects to the databases of both lists, and refuses lists that are not what these say.
    async fn of(lists: &Move) -> Result<Self, OpenError> {
        let mut members: Vec<Member> = Vec::new();
        let (from, to) = (ids(&lists.from, &mut members).await?, ids(&lists.to, &mut members).await?);
        let moving = Self { members, lists: Lists { from, to } };
        moving.check()?;
        moving.check_owners().await?;
        Ok(moving)
    }

    /// Whether every database knows the next list alone.
    fn is_over(&self) -> bool {
        self.members.iter().all(|member| member.knows(&self.lists.to, None))
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
        let former = self.lists.from.len();
        let (from, to) = (slices(&self.lists.from), slices(&self.lists.to));
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
                .is_some_and(|layout| layout.members != self.lists.from || layout.target.is_some())
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
            let begun = match member.database.found.layout {
                None => member.change(None, "SELECT oncegate.join_v1($1, $2, $3, $4, $5, $6, NULL)", &join).await?,
                Some(_) => member.change(None, BEGIN_MOVE, &join[2..4]).await?,
            };
            if !begun {
                return Err(member.is_in_other_move());
            }
        }
        Ok(())
    }

    /// Makes the next databases know what is kept beside records.
    async fn copy_rules(&mut self) -> Result<(), OpenError> {
        for to in self.lists.to.clone() {
            let target = self.index(&to)?;
            for (table, conflict) in SHARED {
                self.copy_beside(0, target, table, conflict).await?;
            }
        }
        Ok(())
    }

    /// Copies a table that both have. Rules have been copied where the move is over: those that came since are newer.
    async fn copy_beside(&mut self, from: usize, to: usize, table: &str, conflict: &str) -> Result<(), OpenError> {
        let Ok([source, target]) = self.members.get_disjoint_mut([from, to]) else { return Ok(()) };
        let stages = [source.begin(&self.lists).await?, target.begin(&self.lists).await?];
        if stages == [Stage::Moving; 2] || table == AUDIT {
            let begin = format!("{IS_MOVING}; CREATE TEMP TABLE copied (LIKE oncegate.{table}) ON COMMIT DROP");
            target.run(&begin).await?;
            source.copy(&format!("SELECT * FROM oncegate.{table}"), target, "pg_temp.copied").await?;
            let insert = format!(
                "INSERT INTO oncegate.{table} OVERRIDING SYSTEM VALUE SELECT * FROM pg_temp.copied ON CONFLICT {conflict}"
            );
            target.run(&insert).await?;
        }
        target.commit().await?;
        source.commit().await
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
        for (place, from) in self.lists.from.iter().enumerate() {
            for (next, to) in self.lists.to.iter().enumerate() {
                let both =
                    Range::of_place(place, self.lists.from.len()).and(Range::of_place(next, self.lists.to.len()));
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
        if !self.set_aside(from, range, patience).await? {
            return Ok(false);
        }
        self.copy(from, to, range).await?;
        Ok(true)
    }

    /// Takes a range from a database, and puts its records aside there; false if attempts in it did not end in time.
    async fn set_aside(&mut self, from: usize, range: Range, patience: Duration) -> Result<bool, OpenError> {
        let (first, beyond) = range.to_row();
        let values: [Parameter<'_>; 2] = [(&first, Type::BYTEA), (&beyond, Type::BYTEA)];
        let (former, lists) = (&mut self.members[from], Some(&self.lists));
        former.change(lists, "SELECT oncegate.give_up_v1($1, $2)", &values).await?;
        let began = Instant::now();
        while !former.change(lists, "SELECT oncegate.set_aside_v1($1, $2)", &values).await? {
            if began.elapsed() >= patience {
                // Nothing of it was set aside: new claims need not wait for these attempts.
                former.change(lists, "SELECT oncegate.take_back_v1($1, $2)", &values).await?;
                return Ok(false);
            }
            sleep(POLL).await;
        }
        Ok(true)
    }

    /// Writes what was set aside into the next database, which owns it from then on.
    ///
    /// This process may have been stopped since it was set aside, for as long as it took others to move it there, back, and away
    /// again. So both databases are held in the move, and the former one must not own any of the range: until they are let go,
    /// the range can come to the next one alone, which takes it over once.
    async fn copy(&mut self, from: usize, to: usize, range: Range) -> Result<(), OpenError> {
        let (first, beyond) = range.to_row();
        let values: [Parameter<'_>; 2] = [(&first, Type::BYTEA), (&beyond, Type::BYTEA)];
        let Ok([source, target]) = self.members.get_disjoint_mut([from, to]) else { return Ok(()) };
        for member in [&*source, &*target] {
            if member.begin(&self.lists).await? != Stage::Moving {
                return Err(member.is_in_other_move());
            }
        }
        if !source.says(IS_ASIDE, &values).await? {
            return Err(source.is_in_other_move());
        }
        target.run(IS_MOVING).await?;
        for table in ["record", "delivery"] {
            let read = format!("SELECT * FROM oncegate.outgoing_{table} WHERE {}", within("id", range));
            source.copy(&read, target, &format!("oncegate.{table}")).await?;
        }
        if !target.says("SELECT oncegate.take_over_v1($1, $2)", &values).await? {
            return Err(target.is_in_other_move());
        }
        target.commit().await?;
        source.remove_copied(range).await?;
        source.commit().await
    }

    /// Removes what is aside in a database though it has come to the next one: an earlier run ended before it came to this.
    async fn remove_left(&self, index: usize) -> Result<(), OpenError> {
        let member = &self.members[index];
        if member.begin(&self.lists).await? == Stage::Moving {
            // By now others may have moved it back, and begun to move it away again.
            if !self.rest().await?.is_empty() {
                return Err(member.is_in_other_move());
            }
            member.remove_copied(Range::of_place(0, 1)).await?;
        }
        member.commit().await
    }

    /// Makes every database know the next list alone.
    async fn finish(&mut self) -> Result<(), OpenError> {
        self.copy_rules().await?;
        for index in 0..self.lists.from.len() {
            self.remove_left(index).await?;
        }
        self.copy_entries().await?;
        let (from, to) = (slices(&self.lists.from), slices(&self.lists.to));
        let values: [Parameter<'_>; 2] = [(&from, Type::BYTEA_ARRAY), (&to, Type::BYTEA_ARRAY)];
        for member in &mut self.members {
            if !member.change(None, END_MOVE, &values).await? {
                return Err(member.is_in_other_move());
            }
        }
        // Those that gates wrote before they knew.
        self.copy_entries().await
    }

    /// Copies what operators did from the databases that are given up to one where it is found.
    async fn copy_entries(&mut self) -> Result<(), OpenError> {
        let first = self.index(&self.lists.to[0])?;
        for index in 0..self.lists.from.len() {
            if !self.lists.to.contains(&self.members[index].database.found.id) {
                self.copy_beside(index, first, AUDIT, "DO NOTHING").await?;
            }
        }
        Ok(())
    }
}

fn slices(ids: &[DatabaseId]) -> Vec<&[u8]> {
    ids.iter().map(|id| &id[..]).collect()
}

#[cfg(test)]
mod tests;
