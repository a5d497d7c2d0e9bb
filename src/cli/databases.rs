//! A store that is spread over databases: opening it, as far as they can be reached.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use crate::config::Postgres as Settings;
use crate::store::Store;
use crate::store::postgres::layout::{Database, OwnedTwice, find};
use crate::store::postgres::{Description, OpenError, Opened, Postgres};
use crate::store::sharded::layout::{DatabaseId, DatabaseMap, Found, Misfit, NotKnown, fit, follow};
use crate::store::sharded::{Databases, Sharded};

/// How long a database may take to say where records are. What another one says is enough.
const PATIENCE: Duration = Duration::from_secs(3);

/// Between two looks at databases of which two seem to take claims of the same ids.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// A store of several databases.
pub(super) struct Spread {
    /// The store.
    pub(super) store: Sharded,
    /// What the whole store is known by.
    pub(super) opened: Opened,
    /// Each database with its server, or why it is not open yet.
    pub(super) databases: Vec<(String, Result<Description, OpenError>)>,
}

/// What is made of each store that is opened, given the name of its database.
pub(super) type Wrap = Box<dyn Fn(Postgres, Arc<str>) -> Arc<dyn Store> + Send + Sync>;

/// Hears whether the database of a name works.
pub(super) type Observe = Box<dyn Fn(&str, bool) + Send + Sync>;

/// The databases of a list that belong to one store.
struct List {
    databases: Vec<Settings>,
    names: Vec<String>,
    wrap: Wrap,
    observe: Observe,
}

/// Opens those databases that can be reached: one at least. The others are opened when they can be.
///
/// # Errors
/// See [`OpenError`]. What cannot be reached is only an error where nothing can be, or where it cannot be known what it
/// must be.
pub(super) async fn open(databases: Vec<Settings>, wrap: Wrap, observe: Observe) -> Result<Spread, OpenError> {
    let names: Vec<String> = databases.iter().map(Settings::servers).collect();
    let list = Arc::new(List { databases, names, wrap, observe });
    let (looks, opened) = list.look_twice().await?;
    let routes = fit(&list.names, &reached(&looks)).map_err(|misfit| match misfit {
        Misfit::Unclear { .. } => OpenError::Unreachable(misfit.to_string()),
        other => other.into(),
    })?;
    let opening = looks.into_iter().enumerate().map(|(index, look)| {
        let list = &list;
        async move {
            look?;
            list.open_one(index).await.map_err(|error| named(&list.names[index], error))
        }
    });
    let (mut stores, mut described) = (Vec::new(), Vec::new());
    for (name, opening) in list.names.iter().zip(join_all(opening).await) {
        let arc: Arc<str> = name.as_str().into();
        let (store, description) = match opening {
            Ok(store) => {
                let description = store.description().clone();
                (Some((list.wrap)(store, Arc::clone(&arc))), Ok(description))
            }
            Err(error) if error.is_passing() => (None, Err(error)),
            Err(error) => return Err(error),
        };
        described.push((name.clone(), description));
        stores.push((arc, store));
    }
    if stores.iter().all(|(_, store)| store.is_none())
        && let Some((_, Err(error))) = described.pop()
    {
        return Err(error);
    }
    let store = Sharded::new(stores, routes, list);
    Ok(Spread { store, opened, databases: described })
}

/// The error of a database with its name.
fn named(name: &str, error: OpenError) -> OpenError {
    match error {
        OpenError::Unreachable(error) => OpenError::Unreachable(format!("{name}: {error}")),
        // It names the database itself.
        OpenError::Layout(misfit) => misfit.into(),
        error => OpenError::of_database(name, error),
    }
}

/// What the databases say that can be reached.
fn reached(looks: &[Result<Found, OpenError>]) -> Vec<Option<Found>> {
    looks.iter().map(|look| look.as_ref().ok().cloned()).collect()
}

impl List {
    /// What the databases say that can be reached, and why others cannot. Fails where one says no, as to a login, and where two take claims of the same ids.
    async fn look_twice(&self) -> Result<(Vec<Result<Found, OpenError>>, Opened), OpenError> {
        let looks = self.owning_apart(None).await?;
        self.found(looks, OpenError::is_passing)
    }

    /// The same for a gate that serves: a database that says no, or nothing, is no reason not to use the others.
    async fn look_again(&self) -> Result<(Vec<Option<Found>>, Opened), OpenError> {
        let (looks, opened) = self.found(self.looks(Some(PATIENCE)).await, |_| true)?;
        Ok((reached(&looks), opened))
    }

    /// What each says, within `patience`. Fails where two of them take claims of the same ids.
    async fn owning_apart(&self, patience: Option<Duration>) -> Result<Vec<Result<Database, OpenError>>, OpenError> {
        let mut seen = None;
        loop {
            let looks = self.looks(patience).await;
            let reached = looks.iter().zip(&self.names).filter_map(|(look, name)| Some((&**name, look.as_ref().ok()?)));
            if OwnedTwice::is_ruled_out(reached, &mut seen)? {
                return Ok(looks);
            }
            sleep(BETWEEN_LOOKS).await;
        }
    }

    async fn looks(&self, patience: Option<Duration>) -> Vec<Result<Database, OpenError>> {
        let looks = self.databases.iter().map(|database| async move {
            let look = find(&database.settings);
            let late = || Err(OpenError::Unreachable("it did not answer in time".to_owned()));
            match patience {
                Some(patience) => timeout(patience, look).await.unwrap_or_else(|_| late()),
                None => look.await,
            }
        });
        join_all(looks).await
    }

    /// What was found, where all errors of databases are ones to `pass_over` and one was reached.
    fn found(
        &self,
        looks: Vec<Result<Database, OpenError>>,
        pass_over: impl Fn(&OpenError) -> bool,
    ) -> Result<(Vec<Result<Found, OpenError>>, Opened), OpenError> {
        let (mut found, mut opened) = (Vec::new(), None);
        for (look, name) in looks.into_iter().zip(&self.names) {
            match look {
                Ok(database) => {
                    opened.get_or_insert(database.opened);
                    found.push(Ok(database.found));
                }
                Err(error) => {
                    let is_passed_over = pass_over(&error);
                    let error = named(name, error);
                    if !is_passed_over {
                        return Err(error);
                    }
                    found.push(Err(error));
                }
            }
        }
        match opened {
            Some(opened) => Ok((found, opened)),
            None => match found.pop() {
                Some(Err(error)) => Err(error),
                _ => Err(OpenError::Unreachable("the list is empty".to_owned())),
            },
        }
    }

    async fn open_one(&self, index: usize) -> Result<Postgres, OpenError> {
        let check = |one: &Found| {
            let mut found = vec![None; self.names.len()];
            found[index] = Some(one.clone());
            match fit(&self.names, &found) {
                // It is itself what it must be.
                Ok(_) | Err(Misfit::Unclear { .. }) => Ok(()),
                Err(misfit) => Err(misfit),
            }
        };
        Postgres::open_member(&self.databases[index].settings, &check).await
    }
}

#[async_trait]
impl Databases for List {
    async fn open(&self, index: usize) -> Result<Arc<dyn Store>, String> {
        // It may have come back as another one, with another list, or with ids that others own by now.
        let looks = self.owning_apart(Some(PATIENCE)).await.map_err(|error| error.to_string())?;
        let (looks, _) = self.found(looks, |_| true).map_err(|error| error.to_string())?;
        let found = reached(&looks);
        if found[index].is_some() {
            fit(&self.names, &found).map_err(|misfit| misfit.to_string())?;
        }
        let store = self.open_one(index).await.map_err(|error| error.to_string())?;
        for risk in store.description().risks() {
            tracing::warn!(store = self.names[index], "{risk}");
        }
        Ok((self.wrap)(store, self.names[index].as_str().into()))
    }

    async fn routes(&self, ids: &[DatabaseId]) -> Result<DatabaseMap, NotKnown> {
        let (found, _) = self.look_again().await.map_err(|error| NotKnown::Unreached(error.to_string()))?;
        follow(ids, &found)
    }

    fn observed(&self, index: usize, is_up: bool) {
        (self.observe)(&self.names[index], is_up);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::postgres::layout::join;
    use crate::store::postgres::migrate;
    use crate::store::servers;

    fn named(server: &servers::Postgres, database: &str) -> Settings {
        let url = server.url(database);
        let servers = url.parse().unwrap();
        let settings = crate::store::postgres::Settings { servers, tls: None, connections: 2 };
        Settings { settings, url, password_file: None }
    }

    fn list(databases: &[Settings]) -> List {
        let names = databases.iter().map(Settings::servers).collect();
        let wrap: Wrap = Box::new(|store, _| Arc::new(store));
        List { databases: databases.to_vec(), names, wrap, observe: Box::new(|_, _| ()) }
    }

    /// A database that was removed from the store may be gone from its server.
    #[tokio::test]
    async fn a_database_that_says_no_does_not_keep_a_gate_that_serves_from_the_others() {
        let Some(server) = servers::Postgres::start() else { return };
        for database in ["one", "other"] {
            server.session().run(&format!("CREATE DATABASE {database}"));
        }
        let both = ["one", "other"].map(|database| named(&server, database));
        for database in &both {
            migrate(&database.settings).await.unwrap();
        }
        let names = both.clone().map(|database| database.servers());
        join(&names, &both.clone().map(|database| database.settings)).await.unwrap();
        let [one, _] = both.clone();
        let list = list(&[one, named(&server, "nowhere")]);
        let (found, _) = list.look_again().await.unwrap();
        let ids: Vec<DatabaseId> = found[0].as_ref().unwrap().layout.as_ref().unwrap().members.clone();
        assert_eq!(list.routes(&ids).await.unwrap().members, [Some(0), Some(1)]);
        list.open(0).await.unwrap().close().await;
        // Both take claims of the same ids, as one does that was restored from an older backup.
        servers::Session::open(&server.url("one")).run("UPDATE oncegate.owned SET beyond = NULL");
        let both = self::list(&both);
        assert!(matches!(both.look_twice().await, Err(OpenError::Layout(Misfit::OwnedTwice { .. }))));
        let refused = list.open(1).await.err().unwrap();
        assert!(refused.contains("nowhere"), "{refused}");
        // At a start it is a mistake of the configuration.
        assert!(matches!(list.look_twice().await, Err(OpenError::Of { .. })));
    }
}
