//! What a database knows of the list that it stands in: see `migrations/postgres/0011_layout.sql`.

use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error as SqlError};

use super::connect::Connector;
use super::pool::Pool;
use super::ranges::Range;
use super::schema::{self, LOCK, LOCK_TIMEOUT};
use super::session::Session;
use super::{OpenError, Settings, error, hosts};
use crate::idempotency::record::Timestamp;
use crate::store::Error;
use crate::store::sharded::layout::{DatabaseId, Found, Layout, Misfit, fit};
use crate::store::sharded::placement::beginning;

/// How often databases are tried to be joined that others have locked, and the pause between, in which those go on.
const TRIES: u32 = 60;
const PAUSE: Duration = Duration::from_millis(500);

/// Keeps claims, deliveries and entries from a database that joins a list: it must have none then.
const HOLD: &str = "LOCK TABLE oncegate.record, oncegate.delivery, oncegate.audit IN SHARE ROW EXCLUSIVE MODE";

/// The identity of a store, and its time when it was opened.
#[derive(Clone, Copy)]
pub struct Opened {
    /// Its id.
    pub id: [u8; 16],
    /// A secret that only its gates know.
    pub secret: [u8; 32],
    /// Its time.
    pub time: Timestamp,
    /// When the request for its time was sent.
    pub asked: Instant,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opened").field("time", &self.time).finish_non_exhaustive()
    }
}

/// A database with what it says of itself.
pub struct Database {
    /// Its id, and the list that it stands in.
    pub found: Found,
    /// What the store is known by, and the secret of its gates: that of the whole list where it stands in one.
    pub opened: Opened,
    /// Where it keeps records of its own: a record, a delivery or an entry.
    pub(super) has_records: bool,
    /// See the column `number`.
    pub(super) number: Option<i16>,
    /// The ids that it takes claims for, where it stands in a list.
    pub(super) owned: Vec<Range>,
}

/// Looks at a database. Its schema must be there.
///
/// # Errors
/// See [`OpenError`].
pub async fn find(settings: &Settings) -> Result<Database, OpenError> {
    let session = Connector::new(settings).connect_unchecked().await?;
    find_by(session.client()).await
}

/// As [`find`], by this session.
pub(super) async fn find_by(client: &Client) -> Result<Database, OpenError> {
    let finding = async {
        schema::check(client).await?;
        look(client).await
    };
    schema::within(schema::LOOK_TIMEOUT, client, finding).await
}

/// Makes databases one store, which they may be already. All of them must be there, with the schema, and without records
/// where they are not. Returns whether anything was changed. Where others have a database locked, it tries again.
///
/// # Errors
/// See [`OpenError`].
pub async fn join(names: &[String], databases: &[Settings]) -> Result<bool, OpenError> {
    let mut sessions = Vec::new();
    for (settings, name) in databases.iter().zip(names) {
        let session = Connector::new(settings).connect_unchecked().await;
        sessions.push(session.map_err(|error| OpenError::of_database(name, error))?);
    }
    let mut tries = 1;
    loop {
        match try_join(names, &mut sessions).await {
            Ok(is_changed) => return Ok(is_changed),
            Err(failed) if !failed.is_transient() || tries == TRIES => return Err(failed.into_open_error(names)),
            Err(_) => {
                tries += 1;
                sleep(PAUSE).await;
            }
        }
    }
}

/// Why databases were not joined.
enum NotJoined {
    /// A statement failed in the database with this index in the list: nothing was changed, unless it was lost at the end.
    Sql(usize, SqlError),
    /// The database with this index cannot be looked at.
    Look(usize, OpenError),
    /// They do not belong together.
    Misfit(Misfit),
}

impl From<Misfit> for NotJoined {
    fn from(misfit: Misfit) -> Self {
        Self::Misfit(misfit)
    }
}

impl NotJoined {
    fn is_transient(&self) -> bool {
        match self {
            Self::Sql(_, error) => error::is_transient(error),
            Self::Look(_, error) => error.is_locked(),
            Self::Misfit(_) => false,
        }
    }

    fn into_open_error(self, names: &[String]) -> OpenError {
        match self {
            Self::Sql(index, error) => OpenError::of_database(&names[index], OpenError::of(&error)),
            Self::Look(index, error) => OpenError::of_database(&names[index], error),
            Self::Misfit(misfit) => misfit.into(),
        }
    }
}

async fn try_join(names: &[String], sessions: &mut [Session]) -> Result<bool, NotJoined> {
    let mut looks = Vec::new();
    for (index, session) in sessions.iter().enumerate() {
        let looked = schema::within(LOCK_TIMEOUT, session.client(), look(session.client())).await;
        looks.push(looked.map_err(|error| NotJoined::Look(index, error))?);
    }
    let members: Vec<DatabaseId> = looks.iter().map(|database| database.found.id).collect();
    let found = |database: &Database| {
        // Those that stand in no list yet are to be what this one says.
        let layout = database.found.layout.clone().unwrap_or(Layout { members: members.clone(), target: None });
        Some(Found { id: database.found.id, layout: Some(layout) })
    };
    let all: Vec<_> = looks.iter().map(found).collect();
    fit(names, &all)?;
    let single = |index: usize| Misfit::Single { name: names[index].clone(), place: index + 1, count: members.len() };
    // A store that serves is not even locked.
    let is_single = |database: &Database| database.found.layout.is_none() && database.has_records;
    if let Some(index) = looks.iter().position(is_single) {
        return Err(single(index).into());
    }
    // In one order, whatever the list says: of two that make different lists of the same databases, one finds the first
    // taken, and changes nothing.
    let mut order: Vec<(usize, &mut Session)> = sessions.iter_mut().enumerate().collect();
    order.sort_by_key(|(index, _)| members[*index]);
    // All that join are held, and no claim is made in one meanwhile, before the first is changed for good.
    let mut joining = Vec::new();
    for (index, session) in order {
        let begun = async {
            let transaction = session.client_mut().transaction().await?;
            transaction.batch_execute(&format!("{LOCK_TIMEOUT}; {LOCK}")).await?;
            Ok::<_, SqlError>(transaction)
        };
        let transaction = begun.await.map_err(|error| NotJoined::Sql(index, error))?;
        let unread = |error| NotJoined::Look(index, error);
        let mut database = look(transaction.client()).await.map_err(unread)?;
        if database.found.layout.is_none() {
            transaction.batch_execute(HOLD).await.map_err(|error| NotJoined::Sql(index, error))?;
            database = look(transaction.client()).await.map_err(unread)?;
        }
        if database.found.layout.is_some() {
            // Another process may have joined it meanwhile.
            let mut found = vec![None; members.len()];
            found[index] = Some(database.found);
            fit(names, &found)?;
            continue;
        }
        if database.has_records {
            return Err(single(index).into());
        }
        joining.push((index, transaction));
    }
    let is_changed = !joining.is_empty();
    let (store, secret) = (looks[0].opened.id, looks[0].opened.secret);
    for (index, transaction) in &joining {
        let from = beginning(*index, members.len());
        let to = (index + 1 < members.len()).then(|| beginning(index + 1, members.len()));
        let number = i16::try_from(*index).unwrap_or(i16::MAX);
        let values: [(&(dyn ToSql + Sync), Type); 6] = [
            (&&store[..], Type::BYTEA),
            (&&secret[..], Type::BYTEA),
            (&members.iter().map(|id| &id[..]).collect::<Vec<_>>(), Type::BYTEA_ARRAY),
            (&number, Type::INT2),
            (&from, Type::BYTEA),
            (&to, Type::BYTEA),
        ];
        let joined = transaction.query_typed("SELECT oncegate.join_v1($1, $2, $3, NULL, $4, $5, $6)", &values).await;
        joined.map_err(|error| NotJoined::Sql(*index, error))?;
    }
    for (index, transaction) in joining {
        transaction.commit().await.map_err(|error| NotJoined::Sql(index, error))?;
    }
    Ok(is_changed)
}

/// Two databases that take claims of the same ids, the name of each, and the first such ids.
#[derive(PartialEq, Eq)]
pub struct OwnedTwice {
    one: String,
    other: String,
    range: Range,
}

impl OwnedTwice {
    /// Looks for two among databases of a store, of which one may be named twice. Records that move between two looks can seem to be owned twice; they do not
    /// at the next pair of looks.
    fn find<'a>(databases: impl Iterator<Item = (&'a str, &'a Database)>) -> Option<Self> {
        let mut known: Vec<(&str, &Database)> = Vec::new();
        for (name, database) in databases {
            for (one, other) in known.iter().filter(|(_, other)| other.found.id != database.found.id) {
                let both = |range: &Range| other.owned.iter().find_map(|other| range.and(*other));
                if let Some(range) = database.owned.iter().find_map(both) {
                    return Some(Self { one: (*one).to_owned(), other: name.to_owned(), range });
                }
            }
            known.push((name, database));
        }
        None
    }

    /// Whether no two of the databases do, as far as one pair of looks tells; false where they have to be looked at again. `seen` is
    /// what the look before found.
    ///
    /// # Errors
    /// Where two looks found the same.
    pub fn is_ruled_out<'a>(
        databases: impl Iterator<Item = (&'a str, &'a Database)>,
        seen: &mut Option<Self>,
    ) -> Result<bool, Misfit> {
        match Self::find(databases) {
            Some(found) if seen.as_ref() == Some(&found) => {
                Err(Misfit::OwnedTwice { one: found.one, other: found.other })
            }
            found => {
                *seen = found;
                Ok(seen.is_none())
            }
        }
    }
}

pub(super) async fn look(client: &Client) -> Result<Database, OpenError> {
    let mut opened = schema::store(client).await?;
    let id = opened.id;
    let question = "SELECT l.store, l.secret, l.members, l.target, l.number,
            EXISTS (SELECT FROM oncegate.record) OR EXISTS (SELECT FROM oncegate.delivery),
            ARRAY(SELECT o.first FROM oncegate.owned o ORDER BY o.first),
            ARRAY(SELECT o.beyond FROM oncegate.owned o ORDER BY o.first)
        FROM (SELECT) one LEFT JOIN oncegate.layout l ON true";
    let row = client.query_typed_one(question, &[]).await.map_err(|error| OpenError::of(&error))?;
    let damaged = || OpenError::Failed("the table oncegate.layout has a row that cannot be read".to_owned());
    let has_records = row.get(5);
    let ends: (Vec<&[u8]>, Vec<Option<&[u8]>>) = (row.get(6), row.get(7));
    let owned = ends.0.into_iter().zip(ends.1).map(|(first, beyond)| Range::of_row(first, beyond)).collect();
    let Some(store) = row.get::<_, Option<&[u8]>>(0) else {
        return Ok(Database { found: Found { id, layout: None }, opened, has_records, number: None, owned });
    };
    opened.id = store.try_into().map_err(|_| damaged())?;
    opened.secret = row.get::<_, &[u8]>(1).try_into().map_err(|_| damaged())?;
    let ids = |ids: Vec<&[u8]>| ids.into_iter().map(|id| id.try_into().map_err(|_| damaged())).collect();
    let members = ids(row.get(2))?;
    let target = row.get::<_, Option<Vec<&[u8]>>>(3).map(ids).transpose()?;
    let layout = Some(Layout { members, target });
    Ok(Database { found: Found { id, layout }, opened, has_records, number: Some(row.get(4)), owned })
}

/// Whether no other database has records of the store, or is about to.
pub(super) async fn is_alone(pool: &Pool) -> Result<bool, Error> {
    let question = "SELECT NOT EXISTS (
            SELECT FROM oncegate.layout l, oncegate.store s, unnest(l.members || coalesce(l.target, '{}')) other
            WHERE other <> s.id
        )";
    Ok(pool.query_unless_locked(question, &[]).await?.first().is_none_or(|row| row.get(0)))
}

/// Refuses a database that is not the whole store, where it is named alone.
pub(super) fn check_alone(settings: &Settings, found: &Found) -> Result<(), Misfit> {
    if found.layout.is_some() {
        let hosts = (0..hosts::count(&settings.servers)).map(|host| hosts::name(&settings.servers, host));
        let mut name = hosts.collect::<Vec<_>>().join(",");
        // Several databases of one server may be one store.
        if let Some(database) = settings.servers.get_dbname() {
            name = format!("{name}/{database}");
        }
        fit(&[name], &[Some(found.clone())])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_keeps_a_list_from_being_made_names_its_database() {
        let names = ["a".to_owned(), "b".to_owned()];
        let locked = NotJoined::Look(1, OpenError::Locked);
        assert!(locked.is_transient(), "it is tried again");
        let said = locked.into_open_error(&names).to_string();
        assert!(said.starts_with("b: another session has a table"), "{said}");
    }
}
