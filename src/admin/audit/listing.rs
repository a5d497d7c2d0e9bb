//! `GET /api/v1/audit`

use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use super::AuditAction;
use crate::admin::State;
use crate::admin::access::Principal;
use crate::admin::answer::{Answer, Kind, Problem, json};
use crate::admin::endpoints::REVEALING;
use crate::admin::query::{self, bad, pairs, unknown};
use crate::admin::records::unavailable;
use crate::admin::tokens::Role;
use crate::admin::wanted::parse_since;
use crate::idempotency::record::RecordId;
use crate::store::ErrorKind;
use crate::store::audit::{self, Entry, EntryFilter, Position};
use crate::telemetry::rfc3339;

const NAMES: [&str; 6] = ["since", "action", "record", "by", "limit", "cursor"];

/// Longest name in `by`, in bytes. Tokens have shorter ones.
const MAX_NAME: usize = 128;

/// Which entries are asked for.
#[derive(Debug)]
struct Query {
    filter: EntryFilter,
    limit: usize,
    before: Option<Position>,
}

/// An entry as the API shows it.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "AuditEntry")]
struct EntryView {
    id: String,
    at: String,
    expires_at: String,
    action: String,
    by: String,
    record: Option<String>,
    /// Nothing for a viewer: people write keys and names there.
    reason: Option<String>,
    /// Whether the reason is encrypted with a key that is gone.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    reason_unreadable: bool,
    #[serde(flatten)]
    detail: Map<String, Value>,
}

/// A page of the audit log.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AuditPage")]
pub(in crate::admin) struct EntryPage {
    /// The newest first.
    entries: Vec<EntryView>,
    /// The cursor of the next page, if there is one.
    next: Option<String>,
}

/// Lists entries, newest first.
pub(in crate::admin) async fn list(state: &State, query: Option<&str>, asker: &Principal) -> Result<Answer, Problem> {
    let Query { mut filter, limit, before } = Query::parse(query)?;
    let _slot = state.listing_slot()?;
    filter.service = Some(state.service.clone());
    let log = audit::of(&**state.opened()?).map_err(unavailable)?;
    let found = log.entries(filter, before, limit).await.map_err(|error| match error.cause().kind {
        ErrorKind::Timeout => {
            tracing::warn!(%error, "a list of audit entries took too long");
            Kind::StoreUnavailable.because("the list took too long; narrow it by record, or ask for fewer with `limit`")
        }
        _ => unavailable(error),
    })?;
    let entries = found.entries.into_iter().map(|entry| EntryView::of(entry, asker.role)).collect();
    Ok(json(StatusCode::OK, &EntryPage { entries, next: found.next.map(|next| next.0.to_string()) }))
}

impl Query {
    fn parse(query: Option<&str>) -> Result<Self, Problem> {
        let mut parsed = Self { filter: EntryFilter::default(), limit: query::DEFAULT_LIMIT, before: None };
        let filter = &mut parsed.filter;
        for (name, value) in pairs(query)? {
            match name {
                "since" => filter.since = Some(parse_since(&value).map_err(|wrong| bad(name, wrong))?),
                "action" => {
                    let action = AuditAction::ALL.map(AuditAction::as_str).into_iter().find(|action| *action == value);
                    let words = || AuditAction::ALL.map(AuditAction::as_str).join(", ");
                    filter.action =
                        Some(action.ok_or_else(|| bad(name, &format!("must be one of: {}", words())))?.into());
                }
                "record" => {
                    let id = RecordId::parse(&value);
                    filter.record = Some(id.ok_or_else(|| bad(name, "must be an id, of 64 hexadecimal digits"))?);
                }
                "by" => {
                    let is_name = !value.is_empty() && value.len() <= MAX_NAME;
                    filter.by = Some(is_name.then(|| value.into()).ok_or_else(|| bad(name, "must be a name"))?);
                }
                "limit" => parsed.limit = query::limit(&value)?,
                "cursor" => {
                    let position = value.parse().ok().map(Position);
                    parsed.before = Some(position.ok_or_else(|| bad(name, "must be the `next` of the page before"))?);
                }
                _ => return Err(unknown(&NAMES)),
            }
        }
        Ok(parsed)
    }
}

impl EntryView {
    /// As somebody of this role sees it.
    fn of(entry: Entry, role: Role) -> Self {
        let Entry { position, at, until, service: _, action, by, record, detail, reason } = entry;
        let read = reason.as_deref().map(serde_json::from_slice::<String>);
        Self {
            id: position.0.to_string(),
            at: rfc3339(at),
            expires_at: rfc3339(until),
            action: action.to_string(),
            by: by.to_string(),
            record: record.map(|record| record.to_string()),
            reason_unreadable: matches!(read, Some(Err(_))),
            reason: read.and_then(Result::ok).filter(|_| role >= REVEALING),
            detail: serde_json::from_slice(&detail).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Since;

    #[test]
    fn everything_at_once() {
        let record = "0a".repeat(32);
        let query = format!("since=2d&action=bulk-purge&by=ops&record={record}&limit=7&cursor=42");
        let Query { filter, limit, before } = Query::parse(Some(&query)).unwrap();
        let expected = EntryFilter {
            service: None,
            action: Some("bulk-purge".into()),
            by: Some("ops".into()),
            record: Some(RecordId([10; 32])),
            since: Some(Since::Ago(std::time::Duration::from_secs(2 * 86400))),
        };
        assert_eq!((filter, limit, before), (expected, 7, Some(Position(42))));
    }

    #[test]
    fn what_is_wrong_is_named_with_what_would_be_right() {
        for (query, said) in [
            ("since=3", "`since` must be a duration"),
            ("action=delete", "`action` must be one of: resolve, purge, bulk-resolve, bulk-purge, bulk-retry, reseal,"),
            ("record=0a0a0a0a", "`record` must be an id"),
            ("by=", "`by` must be a name"),
            ("limit=1001", "`limit` must be a number from 1 to 1000"),
            ("cursor=x", "`cursor` must be the `next`"),
            ("by=a&by=b", "`by` stands there twice"),
            ("key=a", "known are: since, action, record, by, limit, cursor"),
        ] {
            let problem = format!("{:?}", Query::parse(Some(query)).unwrap_err());
            assert!(problem.contains(said), "{query}: {problem}");
        }
    }
}
