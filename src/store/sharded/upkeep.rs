//! What is done for many records at once, in every database: none waits for one that does not answer.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};

use super::member::{Adoption, Busy, Member};
use super::placement::place_of;
use super::{ADOPTION_GRACE, DatabaseMap, READS, Sharded, merge, not_all};
use crate::idempotency::record::RecordId;
use crate::store::{Error, ErrorKind, IdentityChange, LeaseRenewal, Store};

/// How much longer than the first database the others may take, before a round of upkeep goes on without them. What they
/// do, they finish; until then they are left out.
const GRACE: Duration = Duration::from_millis(250);

/// The same of a sweep, for which no caller waits.
const SWEEP_GRACE: Duration = Duration::from_secs(2);

/// How long a database may take to answer [`Store::ping`]: less than who asks for readiness waits.
const PING_TIMEOUT: Duration = Duration::from_millis(800);

/// The same of [`Store::silent`]: longer than a list may keep the one connection of a small pool.
const SILENT_AFTER: Duration = Duration::from_secs(2);

/// What is done in a database.
pub(super) type Call<T> = (Arc<Member>, BoxFuture<'static, Result<T, Error>>);

/// Sets a flag for as long as it lives.
struct Occupied(Arc<AtomicBool>);

impl Occupied {
    /// Nothing where it is set already.
    fn try_set(flag: Arc<AtomicBool>) -> Option<Self> {
        (!flag.swap(true, Ordering::AcqRel)).then(|| Self(flag))
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Sharded {
    /// Calls databases at once, but not those in which the same call is under way. Returns what they answered by `grace` after
    /// the first that worked. Fails if none works.
    pub(super) async fn each<T: Send + 'static>(
        &self,
        calls: Vec<Call<T>>,
        busy: impl Fn(&Busy) -> Arc<AtomicBool>,
        grace: Duration,
    ) -> Result<Vec<T>, Error> {
        if calls.is_empty() {
            return Ok(Vec::new());
        }
        let (sender, mut answers) = mpsc::unbounded_channel();
        for (member, call) in calls {
            let Some(occupied) = Occupied::try_set(busy(&member.busy)) else { continue };
            let sender = sender.clone();
            tokio::spawn(async move {
                let answer = call.await;
                drop(occupied);
                // Its caller may have left.
                let _ = sender.send(answer);
            });
        }
        drop(sender);
        let (mut done, mut failed) = (Vec::new(), None);
        let mut deadline: Option<Instant> = None;
        loop {
            let next = match deadline {
                Some(deadline) => timeout_at(deadline, answers.recv()).await.unwrap_or_default(),
                None => answers.recv().await,
            };
            match next {
                Some(Ok(answer)) => {
                    done.push(answer);
                    deadline = deadline.or(Some(Instant::now() + grace));
                }
                Some(Err(error)) => failed = Some(error),
                None => break,
            }
        }
        let none = || Error::determinate(ErrorKind::Timeout, "no database of the store answers");
        if done.is_empty() { Err(failed.unwrap_or_else(none)) } else { Ok(done) }
    }

    /// Asks all databases at once whether they work.
    pub(super) async fn ping_each(&self) -> Vec<Result<(), Error>> {
        let pings = self.all().into_iter().map(|(index, member)| async move {
            let pinged = in_time(PING_TIMEOUT, async { member.store()?.ping().await }).await;
            member.is_up.store(pinged.is_ok(), Ordering::Relaxed);
            self.databases.observed(index, pinged.is_ok());
            pinged
        });
        join_all(pings).await
    }

    /// Those that do not answer, and those that the list does not name.
    pub(super) async fn ask_each(&self) -> Vec<Arc<str>> {
        let asked = self.all().into_iter().map(|(_, member)| async move {
            let ask = async {
                let store = member.store()?;
                store.ping().await?;
                // A ping may go by what worked a moment ago.
                store.owns(RecordId([0; 32])).await
            };
            let asked = in_time(SILENT_AFTER, ask).await;
            asked.is_err().then(|| Arc::clone(&member.name))
        });
        join_all(asked).await.into_iter().flatten().chain(self.unnamed()).collect()
    }

    pub(super) async fn renew_each(&self, held: Vec<LeaseRenewal>) -> Result<Vec<RecordId>, Error> {
        // A lease is renewed when a third of it is past, and must not end while another database is waited for.
        let shortest = held.iter().map(|held| held.lease).min().unwrap_or_default();
        let mut groups: HashMap<usize, Vec<LeaseRenewal>> = HashMap::new();
        let routes = self.routes.load_full();
        for lease in held {
            let of = |list: &Vec<Option<usize>>| list.get(place_of(lease.id, list.len())).copied().flatten();
            let (now, next) = (of(&routes.members), routes.target.as_ref().and_then(of));
            // Where it moves, one of the two has it.
            for index in now.into_iter().chain(next.filter(|next| Some(*next) != now)) {
                groups.entry(index).or_default().push(lease);
            }
        }
        let calls = groups.into_iter().map(|(index, group)| {
            let member = Arc::clone(&self.members[index]);
            let store = member.store().map(Arc::clone);
            let call: BoxFuture<'static, _> = Box::pin(async move { store?.renew(group).await });
            (member, call)
        });
        let renewed = self.each(calls.collect(), |busy| Arc::clone(&busy.renewing), GRACE.min(shortest / 8)).await?;
        Ok(renewed.into_iter().flatten().collect())
    }

    pub(super) async fn expire_each(&self, limit: usize) -> Result<Vec<RecordId>, Error> {
        let calls = self.all().into_iter().map(|(_, member)| {
            let (store, late) = (member.store().map(Arc::clone), Arc::clone(&self.expired_late));
            let call: BoxFuture<'static, _> = Box::pin(async move {
                let expired = store?.expire_leases(limit).await?;
                // They are reported by the round that asked, or by the next one.
                late.lock().unwrap_or_else(PoisonError::into_inner).extend(expired);
                Ok(())
            });
            (member, call)
        });
        self.each(calls.collect(), |busy| Arc::clone(&busy.expiring), GRACE).await?;
        let mut expired = self.expired_late.lock().unwrap_or_else(PoisonError::into_inner);
        let count = expired.len().min(limit);
        Ok(expired.drain(..count).collect())
    }

    /// How many records of each database a sweep removed.
    pub(super) async fn sweep_each(
        &self,
        busy: impl Fn(&Busy) -> Arc<AtomicBool>,
        sweep: impl Fn(Arc<dyn Store>) -> BoxFuture<'static, Result<usize, Error>>,
    ) -> Result<Vec<usize>, Error> {
        let calls = self.all().into_iter().map(|(_, member)| {
            let sweeping = member.store().map(|store| sweep(Arc::clone(store)));
            let call: BoxFuture<'static, _> = Box::pin(async move { sweeping?.await });
            (member, call)
        });
        self.each(calls.collect(), busy, SWEEP_GRACE).await
    }

    /// The answers of all databases that can be reached, and of one at least.
    pub(super) async fn of_reached<T>(
        &self,
        routes: &DatabaseMap,
        call: impl Fn(Arc<dyn Store>) -> BoxFuture<'static, Result<T, Error>>,
    ) -> Result<Vec<T>, Error> {
        let calls = routes.all().into_iter().map(|index| {
            let call = self.members[index].store().map(|store| call(Arc::clone(store)));
            async move { call?.await }
        });
        let (mut done, mut failed) = (Vec::new(), None);
        for answer in join_all(calls).await {
            match answer {
                Ok(answer) => done.push(answer),
                Err(error) if is_away(&error) => failed = Some(error),
                Err(error) => return Err(error),
            }
        }
        failed.filter(|_| done.is_empty()).map_or(Ok(done), Err)
    }

    /// Makes every database know the rules. One that cannot be reached takes no claims until it does. Where one finds that they
    /// forget keys, the others may know them already: a gate with the former rules claims nothing there until one adopts those.
    pub(super) async fn adopt_each(
        &self,
        routes: &DatabaseMap,
        adoption: &Arc<Adoption>,
    ) -> Result<Vec<IdentityChange>, Error> {
        let (sender, mut answers) = mpsc::unbounded_channel();
        let members: Vec<(usize, &Arc<Member>)> =
            routes.all().into_iter().map(|index| (index, &self.members[index])).collect();
        for (index, member) in &members {
            let (index, store, sender) = (*index, member.store().map(Arc::clone), sender.clone());
            let adoption = Arc::clone(adoption);
            tokio::spawn(async move {
                let adopt = async {
                    let Adoption { origins, rules, accept_change } = &*adoption;
                    store?.adopt(origins.clone(), rules.clone(), *accept_change).await
                };
                tokio::select! {
                    // Its caller has left: it is done again then.
                    () = sender.closed() => {}
                    adopted = adopt => drop(sender.send((index, adopted))),
                }
            });
        }
        drop(sender);
        let (mut changes, mut failed, mut adopted) = (Vec::new(), None, Vec::new());
        let mut is_refused = false;
        let mut deadline: Option<Instant> = None;
        loop {
            let next = match deadline {
                Some(deadline) => timeout_at(deadline, answers.recv()).await.unwrap_or_default(),
                None => answers.recv().await,
            };
            match next {
                Some((index, Ok(found))) => {
                    is_refused |= !found.is_empty() && !adoption.accept_change;
                    adopted.push(index);
                    changes.push(found);
                    deadline = deadline.or(Some(Instant::now() + ADOPTION_GRACE));
                }
                Some((_, Err(error))) if is_away(&error) => failed = Some(error),
                Some((_, Err(error))) => return Err(error),
                None => break,
            }
        }
        if let Some(error) = failed.filter(|_| adopted.is_empty()) {
            return Err(error);
        }
        for (index, member) in members.iter().filter(|_| !is_refused) {
            if adopted.contains(index) { member.adopted() } else { member.adopt_later(adoption) }
        }
        Ok(merge::changes(changes))
    }

    /// Up to `wanted` of what the databases have in the order of ids, after `after`; and after which id to go on where a
    /// database did not look further. While no records move, the order of the databases is that of their ids.
    pub(super) async fn in_order<T>(
        &self,
        after: Option<RecordId>,
        wanted: usize,
        call: impl Fn(Arc<dyn Store>, usize) -> BoxFuture<'static, Result<Part<T>, Error>>,
        id: impl Fn(&T) -> RecordId,
    ) -> Result<Part<T>, Error> {
        let mut routes = self.routes.load_full();
        for _ in 0..READS {
            let part = if routes.target.is_some() {
                let parts = self.of_all_of(&routes, |store| call(store, wanted)).await?;
                merge::in_order(parts, &id, wanted)
            } else {
                self.of_places(&routes, after, wanted, &call).await?
            };
            let now = self.look().await?;
            if *routes == now {
                return Ok(part);
            }
            routes = Arc::new(now);
        }
        Err(not_all())
    }

    /// The same from one database after another, as they have records by a map, which may be old.
    async fn of_places<T>(
        &self,
        routes: &DatabaseMap,
        after: Option<RecordId>,
        wanted: usize,
        call: impl Fn(Arc<dyn Store>, usize) -> BoxFuture<'static, Result<Part<T>, Error>>,
    ) -> Result<Part<T>, Error> {
        let (mut found, count) = (Vec::new(), routes.members.len());
        for place in after.map_or(0, |after| place_of(after, count))..count {
            let Some(member) = routes.members[place].map(|index| &self.members[index]) else {
                return Err(not_all());
            };
            let call = call(Arc::clone(member.store()?), wanted - found.len());
            let (more, next) = call.await.map_err(|error| super::named(&member.name, error))?;
            found.extend(more);
            if next.is_some() || found.len() >= wanted {
                return Ok((found, next));
            }
        }
        Ok((found, None))
    }
}

/// Some records in order, and after which id to go on.
pub(super) type Part<T> = (Vec<T>, Option<RecordId>);

/// What a database answers within this time.
async fn in_time<T>(limit: Duration, answer: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let late = || Error::determinate(ErrorKind::Timeout, "it did not answer in time");
    timeout(limit, answer).await.unwrap_or_else(|_| Err(late()))
}

fn is_away(error: &Error) -> bool {
    error.cause().kind.is_passing()
}
