//! What operators do leaves an entry in the store and a line in the log. Both are made here.
//!
//! An entry is written before anything is done, and says then that it began. If it cannot be written, nothing is done. When
//! all is over, the entry gets its outcome, and the log its line. So an entry that still says that something began tells of a
//! process that ended meanwhile or of a store that failed, and it is not known whether it was done.
//!
//! An entry has no attempt, key, body, header, scope or token.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::State;
use super::access::Principal;
use super::answer::{Answer, Kind, Problem, empty};
use super::deliveries::{route_of, state_of};
use super::view::{claiming_request, shortened_key};
use crate::idempotency::record::{Record, RecordId};
use crate::store::audit::{self, AuditLog, NewEntry, Position};
use crate::store::deliveries::Delivery;
use crate::store::{Error, RecordEntry, Store};
use crate::telemetry::deliveries::{ended_attempts, note_of};
use crate::telemetry::rfc3339;

mod listing;

pub(super) use self::listing::{EntryPage, list};

/// Longest text of a filter in an entry, in characters: that of a route can be of any length.
const MAX_FILTER: usize = 256;

/// What of a filter is never kept: whoever reads it could tell whose records they were.
const SECRET: [&str; 2] = ["key", "scope"];

/// How many namespaces of a change of identities an entry names.
const MAX_NAMESPACES: usize = 64;

/// A kind of what is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AuditAction {
    Resolve,
    Purge,
    BulkResolve,
    BulkPurge,
    BulkRetry,
    Reseal,
    Reload,
    ReadAnswer,
    ReadKey,
    AcceptIdentityChange,
    Retry,
    Pause,
    Resume,
}

/// What is done.
#[derive(Clone, Copy, Debug)]
pub(super) enum AuditEvent<'a> {
    /// The attempt of an unknown record ends so: `release` or `complete`.
    Resolve { found: &'a RecordEntry, resolution: &'static str, reason: &'a str },
    /// A record is removed.
    Purge { found: &'a RecordEntry, reason: Option<&'a str> },
    /// The attempts of all unknown records that a filter finds end so.
    BulkResolve { filter: &'a Map<String, Value>, resolution: &'static str, reason: &'a str },
    /// All records that a filter finds are removed.
    BulkPurge { filter: &'a Map<String, Value>, reason: &'a str },
    /// All dead deliveries that a filter finds are queued again.
    BulkRetry { filter: &'a Map<String, Value>, reason: &'a str },
    /// Records are encrypted anew.
    Reseal,
    /// The configuration is read again.
    Reload,
    /// Somebody is shown the answer of a record.
    ReadAnswer { found: &'a RecordEntry },
    /// Somebody is shown its key.
    ReadKey { found: &'a RecordEntry },
    /// An accepted request is removed that has no record.
    Discard { found: &'a Delivery, reason: Option<&'a str> },
    /// A dead delivery is queued again.
    Retry { found: &'a Delivery, reason: &'a str },
    /// The deliveries of a route are held back, or go on.
    Pause { route: &'a str, is_paused: bool, reason: &'a str },
    /// A start forgets keys of these namespaces, so many of each.
    AcceptIdentityChange { forgotten: &'a [(Arc<str>, u64)] },
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It is not over, or it is not known what came of it.
    Begun,
    /// It is done.
    Done,
    /// It broke off when some of it was done.
    Partial,
    /// Nothing is done.
    Unchanged,
}

/// Writes the entries of a service.
#[derive(Clone, Debug)]
pub struct AuditWriter {
    /// `[store] service`
    pub service: Arc<str>,
    /// How long they are kept.
    pub ttl: Duration,
}

/// What began, and whose entry waits for its outcome.
#[must_use = "the entry says that it began, until it gets its outcome"]
pub struct Begun<'a> {
    log: &'a dyn AuditLog,
    position: Position,
    detail: Detail,
}

/// What an entry says besides what the store looks at.
#[derive(Clone, Debug, Serialize)]
struct Detail {
    outcome: Outcome,
    /// Nothing where no client of the admin listener did it.
    #[serde(skip_serializing_if = "Option::is_none")]
    client: Option<String>,
    #[serde(flatten)]
    subject: Map<String, Value>,
    /// What it found and did.
    #[serde(flatten)]
    report: Map<String, Value>,
}

impl AuditAction {
    pub(super) const ALL: [Self; 13] = [
        Self::Resolve,
        Self::Purge,
        Self::BulkResolve,
        Self::BulkPurge,
        Self::BulkRetry,
        Self::Reseal,
        Self::Reload,
        Self::ReadAnswer,
        Self::ReadKey,
        Self::AcceptIdentityChange,
        Self::Retry,
        Self::Pause,
        Self::Resume,
    ];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Resolve => "resolve",
            Self::Purge => "purge",
            Self::BulkResolve => "bulk-resolve",
            Self::BulkPurge => "bulk-purge",
            Self::BulkRetry => "bulk-retry",
            Self::Reseal => "reseal",
            Self::Reload => "reload",
            Self::ReadAnswer => "read-answer",
            Self::ReadKey => "read-key",
            Self::AcceptIdentityChange => "accept-identity-change",
            Self::Retry => "retry",
            Self::Pause => "pause",
            Self::Resume => "resume",
        }
    }
}

impl State {
    /// Writes the entry of what is about to be done. Without it, that must not be done.
    pub(super) async fn begin(&self, asker: &Principal, deed: AuditEvent<'_>) -> Result<Begun<'_>, Problem> {
        self.write_entry(asker, deed, Outcome::Begun).await
    }

    /// Writes the entry of a reading, which is as good as done, and its line.
    pub(super) async fn note(&self, asker: &Principal, deed: AuditEvent<'_>) -> Result<(), Problem> {
        drop(self.write_entry(asker, deed, Outcome::Done).await?);
        deed.log(asker);
        Ok(())
    }

    async fn write_entry(
        &self,
        asker: &Principal,
        deed: AuditEvent<'_>,
        outcome: Outcome,
    ) -> Result<Begun<'_>, Problem> {
        let store = &**self.opened()?;
        self.audit_writer().write(store, Some(asker), deed, outcome).await.map_err(|error| {
            tracing::warn!(%error, action = deed.action().as_str(), "an audit entry cannot be written: nothing is done");
            Kind::StoreUnavailable.because(match deed {
                AuditEvent::Reload => {
                    "the store did not take the audit entry; nothing was done. A reload needs the store; the gate goes on as it is"
                }
                _ => "the store did not take the audit entry; nothing was done",
            })
        })
    }
}

impl AuditWriter {
    /// Writes the entry of a start that is about to forget keys of these namespaces, so many of each.
    ///
    /// # Errors
    /// Where the store does not take it.
    pub async fn accepting_identity_change<'a>(
        &self,
        store: &'a dyn Store,
        forgotten: &[(Arc<str>, u64)],
    ) -> Result<Begun<'a>, Error> {
        self.write(store, None, AuditEvent::AcceptIdentityChange { forgotten }, Outcome::Begun).await
    }

    /// Writes the entry of a reload that a signal asked for.
    ///
    /// # Errors
    /// Where the store does not take it.
    pub async fn reloading_by_signal<'a>(&self, store: &'a dyn Store) -> Result<Begun<'a>, Error> {
        self.write(store, None, AuditEvent::Reload, Outcome::Begun).await
    }

    async fn write<'a>(
        &self,
        store: &'a dyn Store,
        asker: Option<&Principal>,
        deed: AuditEvent<'_>,
        outcome: Outcome,
    ) -> Result<Begun<'a>, Error> {
        let log = audit::of(store)?;
        let client = asker.map(|asker| asker.client.to_string());
        let detail = Detail { outcome, client, subject: deed.subject(), report: Map::new() };
        let entry = NewEntry {
            ttl: self.ttl,
            service: Arc::clone(&self.service),
            action: deed.action().as_str().into(),
            by: asker.map_or("-", Principal::name).into(),
            record: deed.record_id(),
            detail: detail.encode(),
            reason: deed.reason().map(|reason| Value::from(reason).to_string().into()),
        };
        let position = log.append(entry).await?;
        Ok(Begun { log, position, detail })
    }
}

impl Begun<'_> {
    /// Adds the outcome.
    pub async fn end(self, outcome: Outcome) {
        self.end_with(outcome, Map::new()).await;
    }

    /// Adds the outcome, and what it found and did.
    pub(super) async fn end_with(mut self, outcome: Outcome, report: Map<String, Value>) {
        (self.detail.outcome, self.detail.report) = (outcome, report);
        if let Err(error) = self.log.amend(self.position, self.detail.encode()).await {
            tracing::warn!(
                %error,
                id = self.position.0,
                "an audit entry does not get its outcome, and goes on saying that its change began"
            );
        }
    }

    /// Logs a change of one record that was made, adds its outcome, and answers with it.
    pub(super) async fn conclude(
        self,
        deed: AuditEvent<'_>,
        asker: &Principal,
        result: Result<(), Problem>,
    ) -> Result<Answer, Problem> {
        if result.is_ok() {
            deed.log(asker);
        }
        self.end_as(&result).await;
        result.map(|()| empty(StatusCode::NO_CONTENT))
    }

    /// Adds the outcome of a change of one record, where it is known: after a failure of the store it is not.
    pub(super) async fn end_as<T>(self, result: &Result<T, Problem>) {
        match result {
            Ok(_) => self.end(Outcome::Done).await,
            Err(problem) if problem.is_about_the_record() => self.end(Outcome::Unchanged).await,
            Err(_) => {}
        }
    }
}

impl AuditEvent<'_> {
    fn action(&self) -> AuditAction {
        match self {
            Self::Resolve { .. } => AuditAction::Resolve,
            Self::Purge { .. } => AuditAction::Purge,
            Self::BulkResolve { .. } => AuditAction::BulkResolve,
            Self::BulkPurge { .. } => AuditAction::BulkPurge,
            Self::BulkRetry { .. } => AuditAction::BulkRetry,
            Self::Reseal => AuditAction::Reseal,
            Self::Reload => AuditAction::Reload,
            Self::ReadAnswer { .. } => AuditAction::ReadAnswer,
            Self::ReadKey { .. } => AuditAction::ReadKey,
            Self::AcceptIdentityChange { .. } => AuditAction::AcceptIdentityChange,
            Self::Discard { .. } => AuditAction::Purge,
            Self::Retry { .. } => AuditAction::Retry,
            Self::Pause { is_paused: true, .. } => AuditAction::Pause,
            Self::Pause { is_paused: false, .. } => AuditAction::Resume,
        }
    }

    fn record(&self) -> Option<&RecordEntry> {
        match self {
            Self::Resolve { found, .. }
            | Self::Purge { found, .. }
            | Self::ReadAnswer { found }
            | Self::ReadKey { found } => Some(found),
            _ => None,
        }
    }

    fn record_id(&self) -> Option<RecordId> {
        match self {
            Self::Discard { found, .. } | Self::Retry { found, .. } => Some(found.id),
            _ => self.record().map(|found| found.id),
        }
    }

    fn reason(&self) -> Option<&str> {
        let reason = match self {
            Self::Resolve { reason, .. }
            | Self::BulkResolve { reason, .. }
            | Self::BulkPurge { reason, .. }
            | Self::BulkRetry { reason, .. } => *reason,
            Self::Purge { reason, .. } | Self::Discard { reason, .. } => reason.unwrap_or_default(),
            Self::Retry { reason, .. } | Self::Pause { reason, .. } => reason,
            _ => "",
        };
        Some(reason).filter(|reason| !reason.is_empty())
    }

    /// To what it is done, and how.
    fn subject(&self) -> Map<String, Value> {
        let mut subject = self.record().map(of_record).unwrap_or_default();
        let mut say = |name: &str, value: Value| drop(subject.insert(name.to_owned(), value));
        match self {
            Self::Resolve { resolution, .. } | Self::BulkResolve { resolution, .. } => {
                say("resolution", (*resolution).into());
            }
            Self::Discard { found, .. } | Self::Retry { found, .. } => {
                say("namespace", found.origin.as_ref().map(|origin| &*origin.namespace).into());
                say("route", route_of(found.origin.as_ref()).into());
                let note = note_of(found);
                let (state, accepted_at) = (state_of(found), rfc3339(found.accepted_at));
                let attempts = ended_attempts(found);
                say(
                    "before",
                    json!({ "state": state, "accepted_at": accepted_at, "attempts": attempts, "reason": note }),
                );
            }
            Self::Pause { route, .. } => say("route", (*route).into()),
            Self::AcceptIdentityChange { forgotten } => {
                say("keys", forgotten.iter().map(|(_, keys)| keys).sum::<u64>().into());
                let names = forgotten.iter().take(MAX_NAMESPACES).map(|(namespace, _)| Value::from(&**namespace));
                say("namespaces", names.collect());
            }
            _ => {}
        }
        if let Self::BulkResolve { filter, .. } | Self::BulkPurge { filter, .. } | Self::BulkRetry { filter, .. } = self
        {
            say("filter", Value::Object(without_secrets(filter)));
        }
        subject
    }

    /// Writes the line of a record. A change of many has one for each, and one entry for all.
    pub(super) fn log(&self, asker: &Principal) {
        let (client, by) = (asker.client, asker.name());
        let key = |record: &Record| shortened_key(record).unwrap_or_else(|| "-".to_owned());
        match self {
            Self::Resolve { found: RecordEntry { id, record, .. }, resolution, reason } => tracing::info!(
                target: "oncegate::audit",
                %client,
                by,
                record = %id,
                key = key(record),
                action = resolution,
                // A string, which every format escapes: it must not look like another line.
                reason,
                "an operator resolved a record"
            ),
            Self::Purge { found: RecordEntry { id, record, .. }, reason } => tracing::info!(
                target: "oncegate::audit",
                %client,
                by,
                record = %id,
                state = record.state.as_str(),
                key = key(record),
                reason,
                "an operator removed a record: its key is free"
            ),
            Self::ReadAnswer { found: RecordEntry { id, .. } } => {
                tracing::info!(target: "oncegate::audit", %client, by, record = %id, "an operator read the answer of a record");
            }
            Self::ReadKey { found: RecordEntry { id, .. } } => {
                tracing::info!(target: "oncegate::audit", %client, by, record = %id, "an operator read the key of a record");
            }
            Self::Discard { found, reason } => {
                let (id, route) = (found.id, route_of(found.origin.as_ref()));
                tracing::info!(target: "oncegate::audit", %client, by, record = %id, route, reason, "an operator discarded an accepted request");
            }
            Self::Retry { found, reason } => {
                let (id, route) = (found.id, route_of(found.origin.as_ref()));
                tracing::info!(target: "oncegate::audit", %client, by, record = %id, route, reason, "an operator queued an accepted request again");
            }
            Self::Pause { route, is_paused: true, reason } => {
                tracing::info!(target: "oncegate::audit", %client, by, route, reason, "an operator paused the deliveries of a route");
            }
            Self::Pause { route, is_paused: false, reason } => {
                tracing::info!(target: "oncegate::audit", %client, by, route, reason, "an operator resumed the deliveries of a route");
            }
            _ => {}
        }
    }
}

/// Logs that records were encrypted anew.
pub(super) fn log_reseal(asker: &Principal, records: u64) {
    let (client, by) = (asker.client, asker.name());
    tracing::info!(target: "oncegate::audit", %client, by, records, "an operator had records encrypted anew");
}

/// Logs what came of a reload.
pub(super) fn log_reload(asker: &Principal, outcome: &str) {
    let (client, by) = (asker.client, asker.name());
    tracing::info!(target: "oncegate::audit", %client, by, outcome, "an operator had the configuration read again");
}

/// Where a record comes from, and how it stands. The request that claimed it stands for its attempt.
fn of_record(found: &RecordEntry) -> Map<String, Value> {
    #[derive(Serialize)]
    struct Subject<'a> {
        namespace: Option<&'a str>,
        route: Option<&'a str>,
        before: Before,
    }
    #[derive(Serialize)]
    struct Before {
        state: &'static str,
        claimed_at: String,
        request: Option<String>,
    }
    let RecordEntry { origin, record, .. } = found;
    let before = Before {
        state: record.state.as_str(),
        claimed_at: rfc3339(record.claimed_at),
        request: claiming_request(record),
    };
    let origin = origin.as_ref();
    members(&Subject {
        namespace: origin.map(|origin| &*origin.namespace),
        route: origin.map(|origin| &*origin.route),
        before,
    })
}

/// The members of an object that something becomes.
pub(super) fn members(of: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(of) {
        Ok(Value::Object(members)) => members,
        _ => Map::new(),
    }
}

fn without_secrets(filter: &Map<String, Value>) -> Map<String, Value> {
    let shown = |(name, value): (&String, &Value)| {
        let value = match value {
            _ if SECRET.contains(&&**name) => Value::from("(not kept)"),
            Value::String(text) if text.chars().nth(MAX_FILTER).is_some() => {
                Value::from(format!("{}…", text.chars().take(MAX_FILTER).collect::<String>()))
            }
            other => other.clone(),
        };
        (name.clone(), value)
    };
    filter.iter().map(shown).collect()
}

impl Detail {
    fn encode(&self) -> Bytes {
        serde_json::to_vec(self).unwrap_or_default().into()
    }
}
