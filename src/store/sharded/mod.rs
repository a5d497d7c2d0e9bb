//! One store spread over several databases, by record id.
//!
//! Each record is in one database, which alone answers for its id: see [`placement`]. So a database that is away costs
//! the keys of its own records, and nothing that is done for others waits for it. What reads many records asks all
//! databases, and fails where one does not answer: a list with records missing would look whole.
//!
//! While records move to another list, an id may be asked for in two databases. Each database refuses claims for ids
//! that are not its own at the moment, with [`ErrorKind::Moved`], so the order in which they are asked is no matter of
//! correctness. See `docs/operate/scaling-out.md` for the protocol.

mod audit;
mod deliveries;
pub mod layout;
mod member;
mod merge;
mod moving;
pub mod placement;
mod resealing;
mod settling;
#[cfg(test)]
mod tests;
mod upkeep;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::ArcSwap;
use async_trait::async_trait;
use futures_util::future::{BoxFuture, join_all, try_join_all};
use tokio::sync::{Notify, broadcast};
use tokio::task::JoinSet;

use self::layout::{DatabaseId, DatabaseMap, NotKnown};
use self::member::{Adoption, Member};
use self::moving::{Moved, look_where_records_are};
use self::placement::place_of;
use super::removals::Removals;
use super::{
    AuditLog, Chunk, Claim, Cursor, Deliveries, Error, ErrorKind, Filter, IdentityChange, LeaseRenewal,
    NamespaceRuleSet, NamespaceRules, NewRecord, Origin, Page, RecordEntry, Removal, Resealing, Settled, Settlement,
    Store, adoption,
};
use crate::idempotency::record::{AttemptToken, RecordId, Version};

/// How much longer than the first database the others may take to know new rules, before this goes on without them.
const ADOPTION_GRACE: Duration = Duration::from_secs(5);

/// How often what reads all records begins anew because they were elsewhere by its end.
const READS: usize = 3;

/// Opens the databases of a list.
#[async_trait]
pub trait Databases: Send + Sync + 'static {
    /// Opens the database with this index in the list, if it is the one that belongs there.
    async fn open(&self, index: usize) -> Result<Arc<dyn Store>, String>;

    /// Which databases have records now: the list has those with these ids.
    async fn routes(&self, ids: &[DatabaseId]) -> Result<DatabaseMap, NotKnown>;

    /// A database did or did not answer when it was asked whether it works.
    fn observed(&self, index: usize, is_up: bool);
}

/// The name of a database, and its store if it is open.
pub type Opened = (Arc<str>, Option<Arc<dyn Store>>);

/// A store spread over databases.
pub struct Sharded {
    members: Vec<Arc<Member>>,
    routes: Arc<ArcSwap<DatabaseMap>>,
    /// Records may be elsewhere than `routes` says.
    is_moved: Arc<Notify>,
    removals: Arc<Removals>,
    /// Leases that turned out to be past after the caller had left.
    expired_late: Arc<Mutex<Vec<RecordId>>>,
    swept_before: AtomicUsize,
    /// Which database is the first to be asked for deliveries.
    taking_turn: AtomicUsize,
    moved: Moved,
    databases: Arc<dyn Databases>,
    _tasks: JoinSet<()>,
}

/// The database that has a record, or the two that may have it while records move.
struct Owners<'a> {
    first: &'a Arc<Member>,
    second: Option<&'a Arc<Member>>,
}

impl Sharded {
    /// Over the databases with these names. Those that are not open are opened as soon as they can be. Its tasks run on the
    /// runtime that this is called on.
    #[must_use]
    pub fn new(opened: Vec<Opened>, routes: DatabaseMap, databases: Arc<dyn Databases>) -> Self {
        let members: Vec<Arc<Member>> =
            opened.into_iter().map(|(name, store)| Arc::new(Member::new(name, store))).collect();
        let (routes, removals) = (Arc::new(ArcSwap::from_pointee(routes)), Arc::<Removals>::default());
        let (is_moved, silent) = (Arc::new(Notify::new()), Arc::default());
        let mut tasks = JoinSet::new();
        for (index, member) in members.iter().enumerate() {
            let attending = Arc::clone(member).attend(index, Arc::clone(&databases));
            let (member, removals, silent) = (Arc::clone(member), Arc::clone(&removals), Arc::clone(&silent));
            tasks.spawn(async move {
                // What is open is listened to at once: no removal is missed after `removals` was called.
                tokio::join!(attending, merge::forward_removals(&member, &removals, &silent));
            });
        }
        tasks.spawn(look_where_records_are(Arc::clone(&is_moved), Arc::clone(&routes), Arc::clone(&databases)));
        Self {
            members,
            routes,
            is_moved,
            removals,
            expired_late: Arc::default(),
            swept_before: AtomicUsize::new(0),
            taking_turn: AtomicUsize::new(0),
            moved: Moved::default(),
            databases,
            _tasks: tasks,
        }
    }

    fn owners(&self, id: RecordId) -> Result<Owners<'_>, Error> {
        let routes = self.routes.load();
        let of = |list: &Vec<Option<usize>>| list.get(place_of(id, list.len())).copied().flatten();
        let next = routes.target.as_ref().and_then(of);
        let now = of(&routes.members);
        match (next, now) {
            (Some(next), Some(now)) if next != now => {
                // The one first that had records like this the last time; the other is asked as well.
                let (first, second) = if self.moved.has(id) { (next, now) } else { (now, next) };
                Ok(Owners { first: &self.members[first], second: Some(&self.members[second]) })
            }
            (Some(only), _) | (None, Some(only)) => Ok(Owners { first: &self.members[only], second: None }),
            (None, None) => {
                Err(Error::determinate(ErrorKind::Moved, "the record is in a database that [store] url does not name"))
            }
        }
    }

    /// Calls the database that has a record; where two may have it, the second too unless the first has it.
    async fn ask<T>(
        &self,
        id: RecordId,
        is_claim: bool,
        call: impl Fn(Arc<dyn Store>) -> BoxFuture<'static, Result<T, Error>>,
        is_found: impl Fn(&T) -> bool,
    ) -> Result<T, Error> {
        let store = |member: &Arc<Member>| {
            let store = if is_claim { member.store_for_claims() } else { member.store() };
            store.map(Arc::clone)
        };
        let had_moved = self.moved.has(id);
        let Owners { first, second } = self.owners(id)?;
        let asked = match store(first) {
            Ok(store) => call(store).await,
            Err(error) => Err(error),
        };
        let answer = match (asked, second) {
            (Ok(found), _) if is_found(&found) => return Ok(found),
            (Ok(absent), None) => Ok(absent),
            (Err(error), None) => Err(error),
            (asked, Some(second)) => match store(second) {
                Ok(store) => match call(store).await {
                    Ok(found) if is_found(&found) => {
                        if matches!(&asked, Err(error) if error.cause().kind == ErrorKind::Moved) {
                            self.moved.set(id, !had_moved);
                        }
                        return Ok(found);
                    }
                    Ok(absent) => asked.map(|_| absent),
                    // It may have happened in the first.
                    Err(_) if matches!(asked, Err(Error::Indeterminate(_))) => asked,
                    Err(error) => Err(error),
                },
                Err(error) => asked.and(Err(error)),
            },
        };
        let answer = match answer {
            Ok(_) if !is_claim => self.confirm(id, [Some(first), second], call, is_found).await,
            answer => answer,
        };
        if let Err(error) = &answer
            && error.cause().kind == ErrorKind::Moved
        {
            self.is_moved.notify_one();
        }
        answer
    }

    /// What the owner of an id says, for nobody has anything of it: while it is on its way from one database to another, neither
    /// has it. To be absent it has to be absent in a database that owns it before and after.
    async fn confirm<T>(
        &self,
        id: RecordId,
        members: [Option<&Arc<Member>>; 2],
        call: impl Fn(Arc<dyn Store>) -> BoxFuture<'static, Result<T, Error>>,
        is_found: impl Fn(&T) -> bool,
    ) -> Result<T, Error> {
        for _ in 0..2 {
            for member in members.into_iter().flatten() {
                let store = member.store()?;
                if !store.owns(id).await? {
                    continue;
                }
                let found = call(Arc::clone(store)).await?;
                if is_found(&found) || store.owns(id).await? {
                    return Ok(found);
                }
            }
        }
        Err(Error::determinate(
            ErrorKind::Moved,
            "the record is on its way to another database, or in one that [store] url does not name",
        ))
    }

    /// What stands for a database that may have records, where the list does not name it.
    fn unnamed(&self) -> Option<Arc<str>> {
        self.routes.load().is_partial().then(|| UNNAMED.into())
    }

    /// The indexes of the databases that may have records, and the databases.
    fn all(&self) -> Vec<(usize, Arc<Member>)> {
        self.routes.load().all().into_iter().map(|index| (index, Arc::clone(&self.members[index]))).collect()
    }

    /// The result of a call of every database that may have records. Fails where one fails.
    async fn of_all<T>(
        &self,
        call: impl Fn(Arc<dyn Store>) -> BoxFuture<'static, Result<T, Error>>,
    ) -> Result<Vec<T>, Error> {
        let mut routes = self.routes.load_full();
        for _ in 0..READS {
            let results = self.of_all_of(&routes, &call).await?;
            let now = self.look().await?;
            if *routes == now {
                return Ok(results);
            }
            routes = Arc::new(now);
        }
        Err(not_all())
    }

    /// The same of every database that may have records by a map, which may be old.
    async fn of_all_of<T>(
        &self,
        routes: &DatabaseMap,
        call: impl Fn(Arc<dyn Store>) -> BoxFuture<'static, Result<T, Error>>,
    ) -> Result<Vec<T>, Error> {
        if routes.is_partial() {
            return Err(not_all());
        }
        let calls = routes.all().into_iter().map(|index| {
            let member = &self.members[index];
            let call = member.store().map(|store| call(Arc::clone(store)));
            async move { call?.await.map_err(|error| named(&member.name, error)) }
        });
        try_join_all(calls).await
    }
}

/// What a gate that serves with a former list cannot reach.
const UNNAMED: &str = "a database that [store] url does not name";

/// Some records are out of reach.
pub(super) fn not_all() -> Error {
    let why = "the store has records in a database that [store] url does not name: they move, or the gate needs the list that \
               the store has now";
    Error::determinate(ErrorKind::Moved, why)
}

/// An error with the database that it comes from.
fn named(name: &str, error: Error) -> Error {
    let name_in =
        |cause: super::Cause| super::Cause { kind: cause.kind, source: format!("{name}: {}", cause.source).into() };
    match error {
        Error::Determinate(cause) => Error::Determinate(name_in(cause)),
        Error::Indeterminate(cause) => Error::Indeterminate(name_in(cause)),
    }
}

#[async_trait]
impl Store for Sharded {
    fn kind(&self) -> &'static str {
        let open = self.members.iter().find_map(|member| member.store().ok());
        open.map_or("postgres", |store| store.kind())
    }

    async fn claim(&self, id: RecordId, fresh: NewRecord) -> Result<Claim, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            let fresh = fresh.clone();
            Box::pin(async move { store.claim(id, fresh).await })
        };
        self.ask(id, true, call, |_| true).await
    }

    async fn supersede(&self, id: RecordId, seen: Version, fresh: NewRecord) -> Result<bool, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            let fresh = fresh.clone();
            Box::pin(async move { store.supersede(id, seen, fresh).await })
        };
        self.ask(id, true, call, |superseded| *superseded).await
    }

    async fn settle(&self, id: RecordId, attempt: AttemptToken, end: Settlement) -> Result<Settled, Error> {
        self.settle_at_owner(id, attempt, end).await
    }

    async fn renew(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        self.renew_each(held).await
    }

    async fn expire_leases(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        self.expire_each(limit).await
    }

    async fn sweep(&self, limit: usize) -> Result<usize, Error> {
        let call =
            move |store: Arc<dyn Store>| -> BoxFuture<'static, _> { Box::pin(async move { store.sweep(limit).await }) };
        let swept: usize = self.sweep_each(|busy| Arc::clone(&busy.sweeping), call).await?.into_iter().sum();
        let swept = swept + self.swept_before.swap(0, Ordering::Relaxed);
        // What is above the limit counts the next time.
        self.swept_before.fetch_add(swept.saturating_sub(limit), Ordering::Relaxed);
        Ok(swept.min(limit))
    }

    async fn changed(&self, id: RecordId) {
        let Ok(Owners { first, second }) = self.owners(id) else { return std::future::pending().await };
        let changed = async |member: &Arc<Member>| match member.store() {
            Ok(store) => store.changed(id).await,
            Err(_) => std::future::pending().await,
        };
        match second {
            Some(second) => tokio::select! {
                () = changed(first) => {}
                () = changed(second) => {}
            },
            None => changed(first).await,
        }
    }

    fn removals(&self) -> Option<broadcast::Receiver<Removal>> {
        Some(self.removals.subscribe())
    }

    fn resealing(&self) -> Option<&dyn Resealing> {
        Some(self)
    }

    fn audit(&self) -> Option<&dyn AuditLog> {
        Some(self)
    }

    fn deliveries(&self) -> Option<&dyn Deliveries> {
        Some(self)
    }

    async fn get(&self, id: RecordId) -> Result<Option<RecordEntry>, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> { Box::pin(async move { store.get(id).await }) };
        self.ask(id, false, call, Option::is_some).await
    }

    async fn is_held(&self, id: RecordId) -> Result<bool, Error> {
        let Owners { first, second } = self.owners(id)?;
        for member in [Some(first), second].into_iter().flatten() {
            if member.store()?.is_held(id).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn list(&self, filter: Filter, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            let filter = filter.clone();
            Box::pin(async move { store.list(filter, after, limit).await })
        };
        Ok(merge::pages(self.of_all(call).await?, limit))
    }

    async fn scan(&self, filter: Filter, after: Option<RecordId>, limit: usize) -> Result<Chunk, Error> {
        let scan = |store: Arc<dyn Store>, wanted| -> BoxFuture<'static, _> {
            let filter = filter.clone();
            Box::pin(async move {
                let Chunk { records, next } = store.scan(filter, after, wanted).await?;
                Ok((records, next))
            })
        };
        // One extra record shows whether there are more.
        let wanted = limit.saturating_add(1);
        let (records, next) = self.in_order(after, wanted, scan, |listed| listed.id).await?;
        Ok(if records.len() > limit { Chunk::of(records, limit) } else { Chunk { records, next } })
    }

    async fn remove(&self, id: RecordId, attempt: AttemptToken) -> Result<bool, Error> {
        let call = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            Box::pin(async move { store.remove(id, attempt).await })
        };
        self.ask(id, false, call, |removed| *removed).await
    }

    async fn count(&self) -> Result<[u64; 3], Error> {
        let count = |store: Arc<dyn Store>| -> BoxFuture<'static, _> { Box::pin(async move { store.count().await }) };
        let counts = self.of_all(count).await?;
        Ok(counts.into_iter().fold([0; 3], |sum, counts| std::array::from_fn(|state| sum[state] + counts[state])))
    }

    async fn changes(&self, origins: Vec<Origin>, rules: Vec<NamespaceRuleSet>) -> Result<Vec<IdentityChange>, Error> {
        let changes = |store: Arc<dyn Store>| -> BoxFuture<'static, _> {
            let (origins, rules) = (origins.clone(), rules.clone());
            Box::pin(async move { store.changes(origins, rules).await })
        };
        let routes = self.routes.load_full();
        let answers = self.of_reached(&routes, changes).await?;
        let is_whole = answers.len() == routes.all().len() && routes.target.is_none() && !routes.is_partial();
        if !is_whole || self.look().await? != *routes {
            let services = adoption::services(&origins, &rules);
            let mut on_file = self.identities().await?;
            on_file.retain(|found| services.contains(&*found.service));
            if !adoption::forgotten(&on_file, &rules).is_empty() {
                let why =
                    "the rules of keys change while a database is away or records move: what that forgets is not known";
                return Err(Error::determinate(ErrorKind::Unavailable, why));
            }
        }
        Ok(merge::changes(answers))
    }

    async fn adopt(
        &self,
        origins: Vec<Origin>,
        rules: Vec<NamespaceRuleSet>,
        accept_change: bool,
    ) -> Result<Vec<IdentityChange>, Error> {
        if !accept_change {
            let changes = self.changes(origins.clone(), rules.clone()).await?;
            if !changes.is_empty() {
                return Ok(changes);
            }
        }
        // A database that has records by now must know them too.
        let routes = self.look().await?;
        self.adopt_each(&routes, &Arc::new(Adoption { origins, rules, accept_change })).await
    }

    async fn identities(&self) -> Result<Vec<NamespaceRules>, Error> {
        let identities =
            |store: Arc<dyn Store>| -> BoxFuture<'static, _> { Box::pin(async move { store.identities().await }) };
        Ok(merge::identities(self.of_reached(&self.routes.load(), identities).await?))
    }

    async fn ping(&self) -> Result<(), Error> {
        let mut failed = None;
        let pinged = self.ping_each().await;
        if pinged.iter().any(Result::is_ok) {
            return Ok(());
        }
        pinged.into_iter().for_each(|pinged| failed = failed.take().or(pinged.err()));
        // Without a database that may have records, every claim is refused.
        Err(failed.unwrap_or_else(not_all))
    }

    fn away(&self) -> Vec<Arc<str>> {
        let all = self.all().into_iter();
        let silent = all.filter(|(_, member)| !member.is_up.load(Ordering::Relaxed));
        silent.map(|(_, member)| Arc::clone(&member.name)).chain(self.unnamed()).collect()
    }

    async fn silent(&self) -> Vec<Arc<str>> {
        self.ask_each().await
    }

    async fn close(&self) {
        join_all(self.members.iter().filter_map(|member| member.store().ok()).map(|store| store.close())).await;
    }
}
