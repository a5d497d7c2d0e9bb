//! The identity of the store on a server, and the timeline of its log.
//!
//! A host that commits may still be the wrong one: an empty or another database, on which every key would run again, or an
//! old primary that came back after its standby was promoted, which lacks all records since.

use std::sync::{Mutex, PoisonError};

use tokio_postgres::{Client, Error as SqlError};

use super::error::{had_no_effect, message};
use super::{OpenError, schema};

/// Fails on a standby, where a role lacks the right, and on servers without a log of their own.
const TIMELINE: &str = "SELECT ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int";

/// The store and the timeline of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lineage {
    /// The id of its store.
    pub(super) store: [u8; 16],
    /// The timeline of its log, which increases with every promotion; `None` if the server does not report it.
    pub(super) timeline: Option<u32>,
}

/// The stores and timelines that this process has used. A server that holds another store, or is on a lower timeline,
/// is refused from then on.
#[derive(Default)]
pub(super) struct LineageGuard(Mutex<Option<KnownLineage>>);

#[derive(Debug)]
struct KnownLineage {
    store: [u8; 16],
    /// The server where the store was first seen.
    first: String,
    /// The highest timeline, and the server that was on it.
    newest: Option<(u32, String)>,
}

impl Lineage {
    pub(super) async fn of(client: &Client) -> Result<Self, OpenError> {
        let store = schema::store(client).await?.id;
        let timeline = match client.query_typed_one(TIMELINE, &[]).await {
            Ok(row) => row.get::<_, Option<i32>>(0).and_then(|timeline| u32::try_from(timeline).ok()),
            Err(error) if had_no_effect(&error) && !is_transient(&error) => None,
            // An old primary may merely be too busy to answer.
            Err(error) if is_transient(&error) => return Err(OpenError::Unreachable(message(&error))),
            Err(error) => return Err(OpenError::of(&error)),
        };
        Ok(Self { store, timeline })
    }

    /// Whether its log went through more promotions, as far as both are known.
    pub(super) fn is_newer_than(&self, other: &Self) -> bool {
        matches!((self.timeline, other.timeline), (Some(one), Some(other)) if one > other)
    }
}

/// Whether a server fails for reasons that pass: it has too few resources, or an operator or a timeout intervened (classes
/// 53 and 57 of SQLSTATE).
fn is_transient(error: &SqlError) -> bool {
    error.code().is_some_and(|code| code.code().starts_with("53") || code.code().starts_with("57"))
}

impl LineageGuard {
    /// Refuses a server that lacks what was recorded on others.
    pub(super) fn check(&self, found: &Lineage, server: &str) -> Result<(), OpenError> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(known) = &*known else { return Ok(()) };
        if found.store != known.store {
            return Err(OpenError::OtherStore { server: server.to_owned(), first: known.first.clone() });
        }
        match (&known.newest, found.timeline) {
            (Some((newest, promoted)), Some(timeline)) if timeline < *newest => Err(OpenError::LeftBehind {
                server: server.to_owned(),
                timeline,
                promoted: promoted.clone(),
                newest: *newest,
            }),
            _ => Ok(()),
        }
    }

    /// Notes that a server is used.
    pub(super) fn add(&self, found: &Lineage, server: &str) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known =
            known.get_or_insert_with(|| KnownLineage { store: found.store, first: server.to_owned(), newest: None });
        if let Some(timeline) = found.timeline
            && known.newest.as_ref().is_none_or(|(newest, _)| timeline > *newest)
        {
            known.newest = Some((timeline, server.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(store: u8, timeline: Option<u32>) -> Lineage {
        Lineage { store: [store; 16], timeline }
    }

    #[test]
    fn a_server_with_another_store_or_a_lower_timeline_is_refused() {
        let used = LineageGuard::default();
        assert!(used.check(&on(1, Some(1)), "one").is_ok(), "nothing was used yet");
        used.add(&on(1, None), "one");
        for timeline in [None, Some(1), Some(7)] {
            assert!(used.check(&on(1, timeline), "two").is_ok(), "no timeline is known");
        }
        used.add(&on(1, Some(2)), "two");
        used.add(&on(1, Some(1)), "one");
        for timeline in [None, Some(2), Some(3)] {
            assert!(used.check(&on(1, timeline), "one").is_ok(), "{timeline:?}");
        }
        let behind = used.check(&on(1, Some(1)), "one").unwrap_err().to_string();
        assert!(behind.contains("one is on timeline 1") && behind.contains("two was on timeline 2"), "{behind}");
        let other = used.check(&on(2, Some(3)), "two").unwrap_err().to_string();
        assert!(other.contains("two holds another store than one"), "{other}");
        let moved = used.check(&on(2, Some(3)), "one").unwrap_err().to_string();
        assert!(moved.contains("one holds another store than it held before"), "{moved}");
    }

    #[test]
    fn only_timelines_that_are_known_are_compared() {
        let cases =
            [(Some(2), Some(1), true), (Some(1), Some(1), false), (Some(1), None, false), (None, Some(1), false)];
        for (one, other, is_newer) in cases {
            assert_eq!(on(1, one).is_newer_than(&on(1, other)), is_newer, "{one:?} {other:?}");
        }
    }
}
