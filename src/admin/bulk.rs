//! An operator removes or resolves all records that a filter finds, or has all dead deliveries queued again.

mod accepted;
mod bodies;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::{FutureExt, StreamExt, stream};
use http::{Method, StatusCode};
use hyper::body::Incoming;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

pub(super) use self::bodies::{ChangeAllBody, ResolveAllBody};
use super::State;
use super::access::Principal;
use super::answer::{Answer, Kind, Problem, json};
use super::api;
use super::audit::{self, AuditEvent, Outcome};
use super::records::{check_not_held, check_optional, check_reason, settle, silence, unavailable};
use super::resolve::{Resolution, from_object, receive, wrong_body};
use super::scope::sift;
use super::wanted::{Selection, Wanted, begins, parse_time};
use crate::idempotency::codec::{Details, Head};
use crate::idempotency::record::{self, Record, RecordId, Timestamp};
use crate::idempotency::recovery::unknown_since;
use crate::store::deliveries::{Sequence, remove_of};
use crate::store::{Filter, RecordEntry, Settled, Settlement, Store};
use crate::telemetry::rfc3339;

/// How many records are looked for at once, and changed before the time is looked at again.
const CHUNK: usize = 128;

/// How many are changed at a time. Each waits for the store, which takes those that wait together.
const AT_A_TIME: usize = 16;

/// How long one request goes on. The records that are left then are for the next one.
const PATIENCE: Duration = Duration::from_secs(15);

/// After how many failures a request gives up: the store is away.
const MAX_FAILURES: u64 = 16;

const AS_OF: &str = "`as_of` must be the `as_of` of an answer, a time such as 2026-01-31T22:00:00Z";

/// What a request to change many is.
const FORM: &str = "{\"filter\": {...}, \"all\": false, \"dry_run\": false, \"reason\": \"...\"}";

/// How many ids an answer shows.
const SHOWN: usize = 100;

/// What came of it.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub(super) struct BulkReport {
    /// How many records and accepted requests the filter found, of those that are to be changed.
    matched: u64,
    /// How many of them are accepted requests that have no record yet, and are not delivered any more.
    #[serde(skip_serializing_if = "is_zero")]
    accepted: u64,
    /// How many of them are of accepted requests that a release leaves dead: `records retry` delivers them again.
    #[serde(skip_serializing_if = "is_zero")]
    to_retry: u64,
    /// How many in-flight records the filter found and a purge leaves alone: their attempts run.
    #[serde(skip_serializing_if = "is_zero")]
    in_flight: u64,
    /// How many dead deliveries the filter found and a retry leaves alone: whether they ran is unknown.
    #[serde(skip_serializing_if = "is_zero")]
    of_unknown_outcome: u64,
    /// How many the filter found whose clients could not read the answer: this gate cannot read the record, or it is of a gRPC call and
    /// the answer is none to a call. A completion leaves them alone.
    #[serde(skip_serializing_if = "is_zero")]
    unreadable: u64,
    /// How many do not say whose they are, where the filter has a scope. They are left alone.
    #[serde(skip_serializing_if = "is_zero")]
    of_unknown_scope: u64,
    /// How many of them were changed. A record that became another one meanwhile is left alone.
    done: u64,
    /// For how many the store failed.
    failed: u64,
    /// The first that were found.
    ids: Vec<String>,
    /// By the store's clock: what was claimed, or turned unknown, later than this is left alone.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "time")]
    #[schemars(with = "String")]
    as_of: Option<Timestamp>,
    /// Where the next request goes on, where this one came to its time limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

/// Where a request goes on.
#[derive(Clone, Copy)]
enum BulkCursor {
    /// With the records after this id.
    Records(RecordId),
    /// With the accepted requests after this one.
    Accepted(Sequence),
}

/// What happens to each record that is found.
enum BulkChange {
    Purge,
    Resolve(Resolution),
    Retry,
}

/// One request.
struct Bulk<'a> {
    state: &'a State,
    change: BulkChange,
    /// Whether nothing is to be changed.
    is_dry_run: bool,
    /// As it was given, for the audit entry.
    filter: Map<String, Value>,
    reason: String,
    asker: &'a Principal,
}

/// `POST /api/v1/records/purge`
pub(super) async fn purge(state: &State, body: Incoming, asker: &Principal) -> Result<Answer, Problem> {
    let ChangeAllBody { filter, all, dry_run, reason, as_of, after } = read(&receive(body).await?, FORM)?;
    let given = filter.given(all);
    let wanted = filter.wanted(all)?;
    // By name only: an attempt of another gate may run, and a retry would run beside it.
    let spares_in_flight = wanted.state != Some(record::State::InFlight);
    Bulk::new(state, BulkChange::Purge, dry_run, given, reason, asker)?
        .run(wanted, spares_in_flight, as_of, after)
        .await
}

/// `POST /api/v1/records/retry`
pub(super) async fn retry(state: &State, body: Incoming, asker: &Principal) -> Result<Answer, Problem> {
    let ChangeAllBody { filter, all, dry_run, reason, as_of, after } = read(&receive(body).await?, FORM)?;
    let given = filter.given(all);
    let wanted = filter.wanted(all)?;
    if wanted.state.is_some() {
        return Err(bad("`state` must be left out: what can be retried is dead, and that is no state of a record"));
    }
    Bulk::new(state, BulkChange::Retry, dry_run, given, reason, asker)?.run(wanted, false, as_of, after).await
}

/// `POST /api/v1/records/resolve`
pub(super) async fn resolve(state: &State, body: Incoming, asker: &Principal) -> Result<Answer, Problem> {
    const FORM: &str = "{\"filter\": {...}, \"all\": false, \"dry_run\": false, \"reason\": \"...\", \"action\": \
                        \"release\" | \"complete\", \"status\": 200, \"headers\": [[\"name\", \"value\"]], \"body_base64\": \"...\"}";
    let body: ResolveAllBody = read(&receive(body).await?, FORM)?;
    let resolution = Resolution::of(&body.action, body.status, body.headers, body.body_base64)?;
    let given = body.filter.given(body.all);
    let mut wanted = body.filter.wanted(body.all)?;
    match wanted.state.replace(record::State::Unknown) {
        None | Some(record::State::Unknown) => {}
        Some(_) => return Err(bad("`state` can be `unknown` only: other records have nothing to resolve")),
    }
    Bulk::new(state, BulkChange::Resolve(resolution), body.dry_run, given, body.reason, asker)?
        .run(wanted, false, body.as_of, body.after)
        .await
}

impl<'a> Bulk<'a> {
    fn new(
        state: &'a State,
        change: BulkChange,
        is_dry_run: bool,
        filter: Map<String, Value>,
        reason: String,
        asker: &'a Principal,
    ) -> Result<Self, Problem> {
        // A dry run needs none, and does not pass one that the change itself would not.
        if is_dry_run { check_optional(&reason) } else { check_reason(&reason) }?;
        Ok(Self { state, change, is_dry_run, filter, reason, asker })
    }

    /// Changes what is found. One audit entry stands for all of it.
    async fn run(
        &self,
        wanted: Wanted,
        spares_in_flight: bool,
        as_of: Option<String>,
        after: Option<String>,
    ) -> Result<Answer, Problem> {
        let as_of = as_of.map(|time| parse_time(&time).ok_or_else(|| bad(AS_OF))).transpose()?;
        let after =
            after.map(|after| BulkCursor::parse(&after).ok_or_else(|| bad("`after` must be the `next` of an answer")));
        let after = after.transpose()?;
        let _slot = self.state.change_slot()?;
        self.state.needs_all_databases().await?;
        let mut report = BulkReport { as_of, ..BulkReport::default() };
        // A later part may find nothing where an earlier one did.
        let unused = wanted.unused_scope(self.state).filter(|_| after.is_none());
        let Some(mut selection) = wanted.select(self.state) else {
            return Ok(json(StatusCode::OK, &report));
        };
        if selection.tags.is_some() {
            selection.on_file = self.state.opened()?.identities().await.map_err(unavailable)?;
        }
        let begun = match self.is_dry_run {
            false => Some(self.state.begin(self.asker, self.deed()).await?),
            true => None,
        };
        let gone_through = self.go_through(selection, spares_in_flight, after, &mut report).await;
        if let Some(begun) = begun {
            begun.end_with(report.outcome(gone_through.is_err()), report.for_audit()).await;
        }
        gone_through?;
        match unused.filter(|_| report.found_nothing()) {
            Some(unused) => Err(Kind::NotFound.because(unused)),
            None => Ok(json(StatusCode::OK, &report)),
        }
    }

    /// Finds the records chunk by chunk, so that not all of them are ever in memory, and changes each.
    async fn go_through(
        &self,
        selection: Selection,
        spares_in_flight: bool,
        after: Option<BulkCursor>,
        report: &mut BulkReport,
    ) -> Result<(), Problem> {
        let (started, store) = (Instant::now(), self.state.opened()?);
        let mut after = match after {
            Some(BulkCursor::Accepted(after)) => {
                return self.go_through_accepted(&selection, Some(after), started, report).await;
            }
            None if matches!(self.change, BulkChange::Retry) => {
                return self.go_through_accepted(&selection, None, started, report).await;
            }
            Some(BulkCursor::Records(after)) => Some(after),
            None => None,
        };
        let Selection { filter, tags, on_file, prefixes } = &selection;
        loop {
            let chunk = match store.scan(pinned(filter, report.as_of), after, CHUNK).await {
                Ok(chunk) => chunk,
                Err(error) => return Err(report.broken_off().caused_by(error)),
            };
            if let (None, Some(first)) = (report.as_of, chunk.records.first()) {
                report.as_of = Some(first.now);
            }
            let was_there = |found: &RecordEntry| {
                report.as_of.is_none_or(|as_of| stood(found, filter, as_of)) && begins(found.id, prefixes)
            };
            let mut found: Vec<RecordEntry> = chunk.records.into_iter().filter(was_there).collect();
            if let Some(tags) = tags {
                report.of_unknown_scope += sift(&mut found, tags, on_file, |listed| listed);
            }
            report.in_flight += leave(&mut found, |record| spares_in_flight && record.state == record::State::InFlight);
            if let BulkChange::Resolve(resolution) = &self.change {
                report.unreadable += leave(&mut found, |record| !resolution.is_readable(record));
            }
            found.iter().for_each(|found| report.found(found));
            if matches!(self.change, BulkChange::Resolve(Resolution::Release)) {
                report.to_retry += self.count_dead(&found).await;
            }
            if !self.is_dry_run {
                self.change_all(found, report).await?;
            }
            after = chunk.next;
            if after.is_none() && matches!(self.change, BulkChange::Purge) {
                return self.go_through_accepted(&selection, None, started, report).await;
            }
            if after.is_none() || started.elapsed() >= PATIENCE {
                report.next = after.map(|after| BulkCursor::Records(after).to_string());
                return Ok(());
            }
            // One may be away by now.
            if let Some(error) = silence(&store.silent().await) {
                return Err(report.broken_off().caused_by(error));
            }
        }
    }

    /// How many of these records are of accepted requests that were given up.
    async fn count_dead(&self, found: &[RecordEntry]) -> u64 {
        let Some(queue) = self.state.opened().ok().and_then(|store| store.deliveries()) else { return 0 };
        let routes = self.state.configured.load();
        let accepts = |name: &str| routes.routes.iter().any(|route| route.name == name && route.accepts);
        // A record of an older version does not say that it was accepted.
        let may_be_accepted = |found: &&RecordEntry| {
            details(&found.record).is_accepted || found.origin.as_ref().is_some_and(|origin| accepts(&origin.route))
        };
        let mut count = 0;
        for accepted in found.iter().filter(may_be_accepted) {
            // It is for information: where the store fails, the change itself says so.
            let delivery = queue.delivery(accepted.id).await.ok().flatten();
            count += u64::from(delivery.is_some_and(|delivery| delivery.is_dead()));
        }
        count
    }

    async fn change_all(&self, found: Vec<RecordEntry>, report: &mut BulkReport) -> Result<(), Problem> {
        let failed = AtomicU64::new(report.failed);
        // Each that has begun is waited for: it must not be changed without its line in the log.
        let mut changes = stream::iter(found)
            .take_while(|_| std::future::ready(failed.load(Ordering::Relaxed) < MAX_FAILURES))
            .map(|found| self.apply(found).boxed())
            .buffer_unordered(AT_A_TIME);
        while let Some(changed) = changes.next().await {
            match changed {
                Ok(is_changed) => report.done += u64::from(is_changed),
                Err(_) => drop(failed.fetch_add(1, Ordering::Relaxed)),
            }
        }
        drop(changes);
        report.failed = failed.into_inner();
        if report.failed >= MAX_FAILURES { Err(report.broken_off()) } else { Ok(()) }
    }

    /// Whether the record was changed; not if it is another one by now, or a transaction holds it.
    async fn apply(&self, found: RecordEntry) -> Result<bool, Problem> {
        let changed = match &self.change {
            BulkChange::Purge => purge_one(&**self.state.opened()?, &found).await,
            BulkChange::Resolve(resolution) => resolution.apply(self.state, &found).await.map(|()| true),
            // It is about deliveries.
            BulkChange::Retry => Ok(false),
        };
        let changed = match changed {
            Err(problem) if problem.is_about_the_record() => Ok(false),
            changed => changed,
        };
        self.log_failure(found.id, &changed);
        if changed.as_ref().is_ok_and(|is_changed| *is_changed) {
            let (found, reason) = (&found, &*self.reason);
            match &self.change {
                BulkChange::Resolve(resolution) => {
                    AuditEvent::Resolve { found, resolution: resolution.as_str(), reason }.log(self.asker);
                }
                _ => AuditEvent::Purge { found, reason: Some(reason) }.log(self.asker),
            }
        }
        changed
    }

    /// Says that the store failed for this one, where it did: the answer only counts it.
    fn log_failure<T>(&self, id: RecordId, changed: &Result<T, Problem>) {
        let path = match self.change {
            BulkChange::Purge => "/api/v1/records/purge",
            BulkChange::Resolve(_) => "/api/v1/records/resolve",
            BulkChange::Retry => "/api/v1/records/retry",
        };
        if let Some(error) = changed.as_ref().err().and_then(|problem| problem.failure.as_ref()) {
            api::log_failure(&Method::POST, path, Some(id), error);
        }
    }

    fn deed(&self) -> AuditEvent<'_> {
        let (filter, reason) = (&self.filter, &*self.reason);
        match &self.change {
            BulkChange::Retry => AuditEvent::BulkRetry { filter, reason },
            BulkChange::Purge => AuditEvent::BulkPurge { filter, reason },
            BulkChange::Resolve(resolution) => {
                AuditEvent::BulkResolve { filter, resolution: resolution.as_str(), reason }
            }
        }
    }
}

/// Removes a record with the request that was accepted for it, which would run again without the record. What a later request
/// with its key has in the store stays.
pub(super) async fn purge_one(store: &dyn Store, found: &RecordEntry) -> Result<bool, Problem> {
    if found.record.state != record::State::Completed {
        check_not_held(store, found.id).await?;
    }
    remove_of(store, found).await.map_err(unavailable)?;
    remove_unchanged(store, found).await
}

/// Removes a record if it is still what was found: one that was claimed again meanwhile has an attempt that runs.
async fn remove_unchanged(store: &dyn Store, found: &RecordEntry) -> Result<bool, Problem> {
    let RecordEntry { id, record, .. } = found;
    match record.state {
        record::State::InFlight | record::State::Unknown => {
            let released = settle(store, found, Settlement::Release).await?;
            Ok(matches!(released, Settled::Done { .. }))
        }
        // Not a release: `remove` also has the caches forget the record.
        record::State::Completed => store.remove(*id, record.attempt).await.map_err(unavailable),
    }
}

/// The filter, whose ages count at that time once it is known.
fn pinned(filter: &Filter, as_of: Option<Timestamp>) -> Filter {
    let filter = filter.clone();
    match as_of {
        Some(as_of) => filter.at(as_of),
        None => filter,
    }
}

/// Whether a record stood as it stands now at that time, and was as old then as the filter says. One that cannot be read does not tell
/// since when it is unknown: it counts from its claim, or nothing would find the records whose encryption key is lost.
fn stood(found: &RecordEntry, filter: &Filter, as_of: Timestamp) -> bool {
    let record = &found.record;
    if filter.older_than.is_some_and(|age| record.claimed_at.plus(age) > as_of) {
        return false;
    }
    // A time later than now says nothing: the request was given up under a longer `unknown_ttl` than it was accepted under.
    let is_earlier = |since| since <= as_of || since > found.now;
    record.claimed_at <= as_of && unknown_since(record, &details(record)).is_none_or(is_earlier)
}

fn details(record: &Record) -> Details {
    Head::decode(&record.head).map(|head| head.details()).unwrap_or_default()
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn time<S: Serializer>(time: &Option<Timestamp>, serializer: S) -> Result<S::Ok, S::Error> {
    time.map(rfc3339).serialize(serializer)
}

impl BulkCursor {
    fn parse(text: &str) -> Option<Self> {
        match text.strip_prefix("accepted-") {
            Some(place) => place.parse().ok().map(|place| Self::Accepted(Sequence(place))),
            None => RecordId::parse(text).map(Self::Records),
        }
    }
}

impl fmt::Display for BulkCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Records(id) => id.fmt(f),
            Self::Accepted(Sequence(place)) => write!(f, "accepted-{place}"),
        }
    }
}

impl BulkReport {
    /// Whether the filter finds nothing at all.
    fn found_nothing(&self) -> bool {
        self.matched + self.in_flight + self.unreadable + self.of_unknown_scope + self.of_unknown_outcome == 0
            && self.next.is_none()
    }

    /// Counts one that is to be changed.
    fn found(&mut self, found: &RecordEntry) {
        self.matched += 1;
        if self.ids.len() < SHOWN {
            self.ids.push(found.id.to_string());
        }
    }

    /// What came of it, and whether it broke off.
    fn outcome(&self, is_broken_off: bool) -> Outcome {
        match self.done {
            _ if is_broken_off || self.failed > 0 => Outcome::Partial,
            0 => Outcome::Unchanged,
            _ => Outcome::Done,
        }
    }

    /// What an audit entry keeps of it: the log has the ids.
    fn for_audit(&self) -> Map<String, Value> {
        let mut members = audit::members(self);
        members.remove("ids");
        members
    }

    /// The problem that ended it, with what was done before.
    fn broken_off(&self) -> Problem {
        let Self { matched, done, failed, .. } = self;
        let detail = match (self.found_nothing(), done + failed) {
            (true, 0) => "the store failed before any record was looked at; nothing was changed".to_owned(),
            (false, 0) => format!("the store failed after {matched} records were found; nothing was changed"),
            _ => format!(
                "it broke off: of {matched} records {done} were changed, and for {failed} the store failed; the rest are as \
                 they were"
            ),
        };
        let detail = format!("{detail}; see the log of `oncegate serve`");
        Kind::StoreUnavailable.because(detail).with(audit::members(self))
    }
}

/// Takes the records out that are to be left alone. Returns how many.
fn leave(found: &mut Vec<RecordEntry>, is_left: impl Fn(&Record) -> bool) -> u64 {
    let count = found.len();
    found.retain(|found| !is_left(&found.record));
    (count - found.len()) as u64
}

fn read<T: DeserializeOwned>(body: &[u8], form: &str) -> Result<T, Problem> {
    from_object(body)
        .map_err(|error| wrong_body(&error, &format!("{form}, with a filter of {}", Wanted::NAMES.join(", "))))
}

fn bad(detail: &str) -> Problem {
    Kind::BadRequest.because(detail)
}
