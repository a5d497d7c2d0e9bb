//! Lists, shows and removes records.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::ETAG;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::SemaphorePermit;
use tokio::time::{sleep, timeout};

use super::access::Principal;
use super::answer::{Answer, Kind, Problem, json};
use super::audit::AuditEvent;
use super::bulk::purge_one;
use super::endpoints::REVEALING;
use super::precondition::{self, Precondition};
use super::query::{self, Query};
use super::scope::{Belongs, belongs};
use super::view::{Extent, RecordView, Revealed, keeps_answer, keeps_key};
use super::wanted::{Selection, begins};
use super::{MAX_LISTINGS, Phase, State, deliveries};
use crate::idempotency::identity::ScopeTag;
use crate::idempotency::record::RecordId;
use crate::store::{self, Cursor, Error, ErrorKind, Filter, RecordEntry, SETTLE_TIMEOUT, Settled, Settlement, Store};

/// How long pages are looked through for the first record of a scope. An empty page may have a next one.
const LIST_PATIENCE: Duration = Duration::from_secs(5);

/// For how long a gate holds a record, at most, while it removes it.
const MOMENT: Duration = Duration::from_millis(200);

/// How many records are looked through at once for those of a scope.
const SIFTED: usize = 5000;

/// Longest reason for a change, in bytes.
pub(super) const MAX_REASON: usize = 2000;

/// What a script of a web page, or a program that is made to fetch a URL, cannot send by itself.
const REQUESTED_WITH: HeaderName = HeaderName::from_static("x-requested-with");

/// A page of a list of records.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "RecordPage")]
pub(super) struct Page {
    /// The newest first.
    records: Vec<RecordView>,
    /// The cursor of the next page, if there may be one.
    next: Option<String>,
}

/// `GET /api/v1/records`
pub(super) async fn list(state: &State, query: Option<&str>, asker: &Principal) -> Result<Answer, Problem> {
    let Query { wanted, limit, after } = Query::parse(query)?;
    if wanted.is_guess() {
        asker.must_be(REVEALING, "a filter by key or scope").map_err(|refused| state.refused(refused))?;
    }
    let _slot = state.listing_slot()?;
    let store = state.opened()?;
    // A later page may be empty where an earlier one was not.
    let unused = wanted.unused_scope(state).filter(|_| after.is_none());
    let Some(Selection { filter, tags, prefixes, .. }) = wanted.select(state) else {
        return Ok(json(StatusCode::OK, &Page { records: Vec::new(), next: None }));
    };
    let sifting = Sifting { store: &**store, filter, tags, prefixes };
    let (records, next) = sifting.page(after, limit).await?;
    if records.is_empty()
        && next.is_none()
        && let Some(unused) = unused
    {
        return Err(Kind::NotFound.because(unused));
    }
    let on_file = store.identities().await.map_err(unavailable)?;
    let next = next.map(|next| next.to_string());
    let records = records.iter().map(|listed| RecordView::of(listed, &on_file, Extent::RecordEntry, asker.role));
    Ok(json(StatusCode::OK, &Page { records: records.collect(), next }))
}

/// Finds the records of which a store does not know that they are wanted: whose they are, and which of several prefixes
/// their ids have.
struct Sifting<'a> {
    store: &'a dyn Store,
    filter: Filter,
    tags: Option<Vec<ScopeTag>>,
    prefixes: Vec<[u8; 8]>,
}

impl Sifting<'_> {
    fn passes(&self, listed: &RecordEntry) -> bool {
        let is_of = |tags: &[ScopeTag]| belongs(listed, tags, &[]) == Belongs::Yes;
        begins(listed.id, &self.prefixes) && self.tags.as_deref().is_none_or(is_of)
    }

    /// The first `limit` of them, or fewer.
    async fn page(
        &self,
        mut after: Option<Cursor>,
        limit: usize,
    ) -> Result<(Vec<RecordEntry>, Option<Cursor>), Problem> {
        let began = Instant::now();
        // A store may look at all records for each page: where few of them are wanted, pages are long.
        let sifts = self.tags.is_some() || !self.prefixes.is_empty();
        let chunk = if sifts { limit.max(SIFTED) } else { limit };
        loop {
            let (places, found) = self.found(after, chunk).await?;
            if let Some(last) = places.get(limit - 1).filter(|_| places.len() > limit) {
                // A page that ends with the last one has the place where the next begins.
                let (_, found) = self.found(after, last + 1).await?;
                return Ok((found.records, found.next));
            }
            if !found.records.is_empty() || found.next.is_none() || began.elapsed() >= LIST_PATIENCE {
                return Ok((found.records, found.next));
            }
            after = found.next;
        }
    }

    /// Those in a page of the store, and the place of each in it.
    async fn found(&self, after: Option<Cursor>, limit: usize) -> Result<(Vec<usize>, store::Page), Problem> {
        let page =
            self.store.list(self.filter.clone(), after, limit).await.map_err(|error| match error.cause().kind {
                ErrorKind::Timeout => {
                    tracing::warn!(%error, "a list of records took too long");
                    Kind::StoreUnavailable
                        .because("the list took too long; narrow it by state (unknown or in-flight), key or id")
                }
                _ => unavailable(error),
            })?;
        let found = page.records.into_iter().enumerate().filter(|(_, listed)| self.passes(listed));
        let (places, records) = found.unzip();
        Ok((places, store::Page { records, next: page.next }))
    }
}

/// `GET /api/v1/records/{id}`, with `?answer=true` for the answer itself and `?key=true` for the whole key
pub(super) async fn show(
    state: &State,
    id: RecordId,
    query: Option<&str>,
    headers: &HeaderMap,
    asker: &Principal,
) -> Result<Answer, Problem> {
    let revealed = revealed(query)?;
    if revealed != Revealed::default() {
        asker.must_be(REVEALING, "an answer or a whole key").map_err(|refused| state.refused(refused))?;
    }
    // An application that can be made to fetch a URL of its own machine sends no such header.
    let needs_proof = revealed != Revealed::default() && !asker.has_token();
    if needs_proof && !headers.contains_key(&REQUESTED_WITH) {
        return Err(Kind::Forbidden
            .because("without a token, `X-Requested-With` must be sent for an answer or a key to be shown"));
    }
    let found = find_begun(state, id).await?;
    let on_file = state.opened()?.identities().await.map_err(unavailable)?;
    if revealed.answer && keeps_answer(&found) {
        state.note(asker, AuditEvent::ReadAnswer { found: &found }).await?;
    }
    if revealed.key && keeps_key(&found) {
        state.note(asker, AuditEvent::ReadKey { found: &found }).await?;
    }
    let mut answer = json(StatusCode::OK, &RecordView::of(&found, &on_file, Extent::Described(revealed), asker.role));
    answer.headers_mut().extend(HeaderValue::try_from(precondition::etag(&found)).ok().map(|tag| (ETAG, tag)));
    Ok(answer)
}

/// What `answer` and `key` ask for.
fn revealed(query: Option<&str>) -> Result<Revealed, Problem> {
    let mut revealed = Revealed::default();
    for (name, value) in query::pairs(query)? {
        match (name, &*value) {
            ("answer", "true") => revealed.answer = true,
            ("key", "true") => revealed.key = true,
            ("answer" | "key", "false") => {}
            _ => {
                let only = "the only query parameters are `answer` and `key`, `true` or `false`";
                return Err(Kind::BadRequest.because(only));
            }
        }
    }
    Ok(revealed)
}

/// `DELETE /api/v1/records/{id}?reason=`
pub(super) async fn remove(
    state: &State,
    id: RecordId,
    query: Option<&str>,
    headers: &HeaderMap,
    asker: &Principal,
) -> Result<Answer, Problem> {
    let reason = query::reason(query)?;
    if let Some(reason) = &reason {
        check_reason(reason)?;
    }
    let precondition = Precondition::of(headers);
    let found = match find(state, id).await {
        Err(problem) if problem.is_about_the_record() => {
            precondition.check(None)?;
            return deliveries::discard(state, id, reason.as_deref(), asker).await;
        }
        found => found?,
    };
    precondition.check(Some(&found))?;
    let deed = AuditEvent::Purge { found: &found, reason: reason.as_deref() };
    let begun = state.begin(asker, deed).await?;
    let removed = purge_one(&**state.opened()?, &found).await;
    let changed = || Kind::NotFound.because("the record changed while it was to be removed: look at it again");
    let removed = removed.and_then(|was_there| if was_there { Ok(()) } else { Err(changed()) });
    begun.conclude(deed, asker, removed).await
}

/// Refuses a reason that is blank, or too long for a line of a log. None need be given.
pub(super) fn check_optional(reason: &str) -> Result<(), Problem> {
    if reason.is_empty() { Ok(()) } else { check_reason(reason) }
}

/// The same, and one must be given.
pub(super) fn check_reason(reason: &str) -> Result<(), Problem> {
    if reason.chars().all(|char| char.is_whitespace() || char.is_control()) {
        return Err(Kind::BadRequest.because("`reason` is empty: say why"));
    }
    if reason.len() > MAX_REASON {
        return Err(Kind::BadRequest.because(format!("`reason` is longer than {MAX_REASON} bytes")));
    }
    Ok(())
}

/// The record of an id, unless it is another service's.
pub(super) async fn find(state: &State, id: RecordId) -> Result<RecordEntry, Problem> {
    let found = state.opened()?.get(id).await.map_err(unavailable)?;
    found
        .filter(|listed| listed.origin.as_ref().is_none_or(|origin| origin.service == state.service))
        .ok_or_else(absent)
}

/// The same. Of an accepted request that has no record yet, the problem says so.
pub(super) async fn find_begun(state: &State, id: RecordId) -> Result<RecordEntry, Problem> {
    match find(state, id).await {
        Err(problem) if problem.is_about_the_record() && deliveries::find(state, id).await?.is_some() => {
            Err(Kind::NotFound.because(
                "there is no record of this id yet: it is an accepted request. `oncegate deliveries list` and \
                 `/api/v1/deliveries` show it",
            ))
        }
        found => found,
    }
}

impl State {
    /// A place among the lists that are made at a time.
    pub(super) fn listing_slot(&self) -> Result<SemaphorePermit<'_>, Problem> {
        self.listings.try_acquire().map_err(|_| {
            Kind::Overloaded
                .because(format!("{MAX_LISTINGS} lists of records are being made already; ask again in a second"))
        })
    }

    /// The place of the one change of many records that is made at a time.
    pub(super) fn change_slot(&self) -> Result<SemaphorePermit<'_>, Problem> {
        let taken = "a change of many records is being made already; ask again when it has ended";
        self.changes.try_acquire().map_err(|_| Kind::Overloaded.because(taken))
    }

    /// Refuses to change many records while a database of the store is away: those of the others would change.
    pub(super) async fn needs_all_databases(&self) -> Result<(), Problem> {
        let silent = self.opened()?.silent().await;
        let Some(error) = silence(&silent) else { return Ok(()) };
        Err(Kind::StoreUnavailable.because(format!("{}; nothing was changed", error.cause().source)).caused_by(error))
    }

    /// The databases of the store that do not answer, where others do.
    pub(super) fn away(&self) -> Vec<Arc<str>> {
        self.store.get().map(|store| store.away()).unwrap_or_default()
    }

    /// The store, once it is open.
    pub(super) fn opened(&self) -> Result<&Arc<dyn Store>, Problem> {
        self.store.get().ok_or_else(|| {
            let why = match self.readiness.phase() {
                Phase::Starting | Phase::Ready => "the gate starts",
                Phase::WaitingForStoreLock => "another process holds it; see the log of `oncegate serve`",
                Phase::WaitingForStore => "it cannot be reached; see the log of `oncegate serve`",
                Phase::Draining => "the gate ends",
            };
            Kind::StoreUnavailable.because(format!("the store is not open yet: {why}"))
        })
    }
}

/// The problem of a failure of the store, which is logged when the request is answered.
pub(super) fn unavailable(error: Error) -> Problem {
    let detail = match &error {
        Error::Determinate(cause) if cause.kind == ErrorKind::Locked => {
            "another session has the record or a table of the store locked, such as a backup or an open transaction, and \
             nothing was done; end that session, which pg_blocking_pids() of PostgreSQL finds, or ask again when it has ended"
        }
        Error::Determinate(_) => "the store failed; nothing was done",
        Error::Indeterminate(_) => "the store failed, and what was asked for may have happened; look at the record",
    };
    Kind::StoreUnavailable.because(detail).caused_by(error)
}

/// The failure of a change of many records that needs these databases, too.
pub(super) fn silence(silent: &[Arc<str>]) -> Option<Error> {
    (!silent.is_empty()).then(|| Error::determinate(ErrorKind::Unavailable, do_not_answer(silent)))
}

/// Says that these databases of the store do not answer.
pub(super) fn do_not_answer(silent: &[Arc<str>]) -> String {
    format!("a database of the store does not answer: {}", silent.join(", "))
}

/// Refuses to end a record that the transaction of an upstream holds: the end would wait for that transaction, without a limit.
pub(super) async fn check_not_held(store: &dyn Store, id: RecordId) -> Result<(), Problem> {
    let detail = "the upstream has called oncegate.complete() or oncegate.assert_current() for the record, and its transaction is still \
                  open: ask again when it has ended, or end it with pg_terminate_backend()";
    // A gate that removes the record holds it for a moment, too.
    if store.is_held(id).await.map_err(unavailable)? {
        sleep(MOMENT).await;
        if store.is_held(id).await.map_err(unavailable)? {
            return Err(Kind::Held.because(detail));
        }
    }
    Ok(())
}

/// Ends the attempt of a record that [`check_not_held`] found free. A transaction may hold it since: after [`SETTLE_TIMEOUT`], what
/// becomes of the record is not known.
pub(super) async fn settle(store: &dyn Store, found: &RecordEntry, end: Settlement) -> Result<Settled, Problem> {
    match timeout(SETTLE_TIMEOUT, store.settle(found.id, found.record.attempt, end)).await {
        Ok(settled) => settled.map_err(unavailable),
        Err(_) => {
            Err(unavailable(Error::indeterminate(ErrorKind::Timeout, "the store did not end the attempt in time")))
        }
    }
}

pub(super) fn absent() -> Problem {
    Kind::NotFound.because("there is no record of this id")
}
