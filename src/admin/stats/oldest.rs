//! Finds the unknown record that was claimed first, without reading all of them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::idempotency::record::{RecordId, State, Timestamp};
use crate::store::{Error, Filter, RecordEntry, Store};

/// How long an answer waits for the store. A slower one is in the answers that come later.
const PATIENCE: Duration = Duration::from_millis(250);

/// The shortest time between two searches.
const PAUSE: Duration = Duration::from_secs(5);

/// The pause after a search, in times of what it took: a store where that is dear is searched more rarely.
const PAUSE_FOR_EACH: u32 = 20;

/// How many records are read at once.
const PAGE: usize = 100;

/// How many pages are read in one search.
const MAX_STEPS: usize = 24;

/// How close a search comes where there are many unknown records.
const EXACT: Duration = Duration::from_secs(1);

/// The unknown record that was claimed first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Oldest {
    pub(super) id: RecordId,
    pub(super) route: Option<Arc<str>>,
    pub(super) claimed_at: Timestamp,
    /// When it was found.
    pub(super) age: Duration,
}

/// What the last search found.
pub(super) struct Search {
    last: Arc<Mutex<Option<LastSearch>>>,
    turn: Arc<Semaphore>,
}

#[derive(Clone)]
struct LastSearch {
    at: Instant,
    took: Duration,
    found: Option<Oldest>,
}

impl LastSearch {
    fn found_by_now(&self) -> Option<Oldest> {
        self.found.clone().map(|oldest| Oldest { age: oldest.age + self.at.elapsed(), ..oldest })
    }
}

impl Default for Search {
    fn default() -> Self {
        Self { last: Arc::default(), turn: Arc::new(Semaphore::new(1)) }
    }
}

impl Search {
    /// The unknown record of this service that was claimed first; `None` if there is none, or the store has not said.
    pub(super) async fn oldest(&self, store: &Arc<dyn Store>, service: &Arc<str>) -> Option<Oldest> {
        if self.is_due()
            && let Ok(turn) = Arc::clone(&self.turn).try_acquire_owned()
        {
            let (store, service, last) = (Arc::clone(store), Arc::clone(service), Arc::clone(&self.last));
            let search = tokio::spawn(async move {
                let began = Instant::now();
                let found = search(&*store, &service).await;
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                // The store reports its failures. A record does not become younger by one, and an alert on its age must not end.
                let found = found.unwrap_or_else(|_| last.as_ref().and_then(LastSearch::found_by_now));
                *last = Some(LastSearch { at: Instant::now(), took: began.elapsed(), found });
                drop(turn);
            });
            // It goes on without whoever asked.
            let _ = timeout(PATIENCE, search).await;
        }
        self.last()?.found_by_now()
    }

    fn is_due(&self) -> bool {
        self.last().is_none_or(|last| last.at.elapsed() >= PAUSE.max(PAUSE_FOR_EACH * last.took))
    }

    fn last(&self) -> Option<LastSearch> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Lists come newest first. So it asks for records of twice the age until there are none, and then halves what is left.
async fn search(store: &dyn Store, service: &Arc<str>) -> Result<Option<Oldest>, Error> {
    let mut oldest: Option<Oldest> = None;
    let (mut older_than, mut none_beyond) = (None, None);
    for _ in 0..MAX_STEPS {
        let service = Some(Arc::clone(service));
        let filter = Filter { service, state: Some(State::Unknown), older_than, ..Filter::default() };
        let page = store.list(filter, None, PAGE).await?;
        match page.records.last() {
            Some(last) => oldest = Some(Oldest::of(last)),
            // The store has looked at a part only.
            None if page.next.is_some() => break,
            None => none_beyond = older_than,
        }
        let Some(Oldest { age, .. }) = oldest else { break };
        let is_last = page.next.is_none() && !page.records.is_empty();
        older_than = Some(match none_beyond {
            _ if is_last => break,
            None => age * 2 + EXACT,
            Some(beyond) if beyond <= age + EXACT => break,
            Some(beyond) => (age + beyond) / 2,
        });
    }
    Ok(oldest)
}

impl Oldest {
    fn of(listed: &RecordEntry) -> Self {
        Self {
            id: listed.id,
            route: listed.origin.as_ref().map(|origin| Arc::clone(&origin.route)),
            claimed_at: listed.record.claimed_at,
            age: listed.now.since(listed.record.claimed_at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::testing::start;

    #[tokio::test]
    async fn the_oldest_is_found_among_more_than_a_page() {
        let admin = start(None).await;
        let (store, service): (Arc<dyn Store>, Arc<str>) = (admin.store.clone(), "shop".into());
        assert_eq!(search(&*store, &service).await.unwrap(), None);
        let (first, _) = admin.unknown("charge", "first").await;
        // Most of them are young, and some old.
        for nth in 0..3 * PAGE {
            admin.pass(Duration::from_secs(if nth < PAGE + PAGE / 2 { 60 } else { 1 }));
            admin.unknown("charge", &format!("k-{nth}")).await;
        }
        admin.completed("charge", "done").await;
        let found = search(&*store, &service).await.unwrap().unwrap();
        assert_eq!((found.id, found.route.as_deref()), (first, Some("charge")));
        assert_eq!(found.age, Duration::from_secs(150 * 60 + 150));
        assert_eq!(search(&*store, &"other".into()).await.unwrap(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_search_is_remembered_for_a_while() {
        let admin = start(None).await;
        let (store, service): (Arc<dyn Store>, Arc<str>) = (admin.store.clone(), "shop".into());
        let known = Search::default();
        assert_eq!(known.oldest(&store, &service).await, None);
        let (id, _) = admin.unknown("charge", "first").await;
        assert_eq!(known.oldest(&store, &service).await, None, "as before");
        tokio::time::advance(PAUSE).await;
        assert_eq!(known.oldest(&store, &service).await.unwrap().id, id);
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(known.oldest(&store, &service).await.unwrap().age, Duration::from_secs(3));
        store.close().await;
        for waited in 1..=3 {
            tokio::time::advance(PAUSE).await;
            let found = known.oldest(&store, &service).await.unwrap();
            assert_eq!((found.id, found.age), (id, Duration::from_secs(3) + waited * PAUSE), "the store has failed");
        }
    }
}
