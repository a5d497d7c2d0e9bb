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
    /// Each database with its server, where that was reached.
    pub(super) databases: Vec<(String, Option<Description>)>,
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
    let (found, opened) = list.look_twice().await?;
    let routes = fit(&list.names, &found).map_err(|misfit| match misfit {
        Misfit::Unclear { .. } => OpenError::Unreachable(misfit.to_string()),
        other => other.into(),
    })?;
    let reached = found.iter().map(Option::is_some);
    let opening = list.databases.iter().enumerate().zip(reached).map(|((index, _), is_reached)| {
        let list = &list;
        async move { if is_reached { Some(list.open_one(index).await) } else { None } }
    });
    let (mut stores, mut described, mut failed) = (Vec::new(), Vec::new(), None);
    for (name, opening) in list.names.iter().zip(join_all(opening).await) {
        let store = match opening {
            Some(Err(error)) if error.is_passing() => {
                failed = Some(error);
                None
            }
            other => other.transpose()?,
        };
        described.push((name.clone(), store.as_ref().map(|store| store.description().clone())));
        let name: Arc<str> = name.as_str().into();
        let store = store.map(|store| (list.wrap)(store, Arc::clone(&name)));
        stores.push((name, store));
    }
    if let (Some(error), true) = (failed, stores.iter().all(|(_, store)| store.is_none())) {
        return Err(error);
    }
    let store = Sharded::new(stores, routes, list);
    Ok(Spread { store, opened, databases: described })
}

impl List {
    /// What the databases say that can be reached. Fails where one says no, as to a login, and where two take claims of the same ids.
    async fn look_twice(&self) -> Result<(Vec<Option<Found>>, Opened), OpenError> {
        let looks = self.owning_apart(None).await?;
        self.found(looks, OpenError::is_passing)
    }

    /// The same for a gate that serves: a database that says no, or nothing, is no reason not to use the others.
    async fn look_again(&self) -> Result<(Vec<Option<Found>>, Opened), OpenError> {
        self.found(self.looks(Some(PATIENCE)).await, |_| true)
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
    ) -> Result<(Vec<Option<Found>>, Opened), OpenError> {
        let (mut found, mut opened, mut failed) = (Vec::new(), None, None);
        for (look, name) in looks.into_iter().zip(&self.names) {
            match look {
                Ok(database) => {
                    opened.get_or_insert(database.opened);
                    found.push(Some(database.found));
                }
                Err(error) => {
                    let is_passed_over = pass_over(&error);
                    let error = match error {
                        OpenError::Unreachable(error) => OpenError::Unreachable(format!("{name}: {error}")),
                        OpenError::Layout(misfit) => misfit.into(),
                        error => OpenError::of_database(name, error),
                    };
                    if !is_passed_over {
                        return Err(error);
                    }
                    failed = Some(error);
                    found.push(None);
                }
            }
        }
        let none = || OpenError::Unreachable("the list is empty".to_owned());
        opened.map(|opened| (found, opened)).ok_or_else(|| failed.unwrap_or_else(none))
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
        let (found, _) = self.found(looks, |_| true).map_err(|error| error.to_string())?;
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
