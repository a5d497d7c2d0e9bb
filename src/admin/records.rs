//! Lists, shows and removes records.

use std::net::SocketAddr;
use std::sync::Arc;

use http::StatusCode;
use serde::Serialize;

use super::answer::{Answer, Kind, Problem, empty, json};
use super::query::Query;
use super::view::{Extent, RecordView, shortened_key};
use super::{MAX_LISTINGS, State};
use crate::idempotency::record::RecordId;
use crate::store::{Error, Filter, Listed, Store};

/// `GET /api/v1/records`
pub(super) async fn list(state: &State, query: Option<&str>) -> Result<Answer, Problem> {
    #[derive(Serialize)]
    struct Page {
        records: Vec<RecordView>,
        next: Option<String>,
    }
    let query = Query::parse(query)?;
    let _slot = state.listings.try_acquire().map_err(|_| {
        Kind::Overloaded
            .because(format!("{MAX_LISTINGS} lists of records are being made already; ask again in a second"))
    })?;
    let filter = Filter {
        service: Some(state.service.clone()),
        route: query.route,
        state: query.state,
        prefix: query.key.map(|key| state.identifier.prefix(&key)),
        older_than: query.older_than,
    };
    let store = state.opened()?;
    let found = store.list(filter, query.after, query.limit).await.map_err(unavailable)?;
    let on_file = store.identities().await.map_err(unavailable)?;
    let next = found.next.map(|next| next.to_string());
    let records = found.records.iter().map(|listed| RecordView::of(listed, &on_file, Extent::Listed));
    Ok(json(StatusCode::OK, &Page { records: records.collect(), next }))
}

/// `GET /api/v1/records/{id}`, with `?answer=true` for the answer itself
pub(super) async fn show(
    state: &State,
    id: RecordId,
    query: Option<&str>,
    client: SocketAddr,
) -> Result<Answer, Problem> {
    let extent = match query {
        None | Some("" | "answer=false") => Extent::Described,
        Some("answer=true") => Extent::WithAnswer,
        Some(_) => return Err(Kind::BadRequest.because("the only query parameter is `answer`, `true` or `false`")),
    };
    let found = find(state, id).await?;
    let on_file = state.opened()?.identities().await.map_err(unavailable)?;
    if extent == Extent::WithAnswer {
        tracing::info!(target: "oncegate::audit", %client, %id, "an operator read the answer of a record");
    }
    Ok(json(StatusCode::OK, &RecordView::of(&found, &on_file, extent)))
}

/// `DELETE /api/v1/records/{id}`
pub(super) async fn remove(state: &State, id: RecordId, client: SocketAddr) -> Result<Answer, Problem> {
    let found = find(state, id).await?;
    if !state.opened()?.remove(id).await.map_err(unavailable)? {
        return Err(absent());
    }
    tracing::info!(
        target: "oncegate::audit",
        %client,
        %id,
        state = found.record.state.as_str(),
        key = shortened_key(&found.record).as_deref().unwrap_or("-"),
        "an operator removed a record: its key is free"
    );
    Ok(empty(StatusCode::NO_CONTENT))
}

/// The record of an id, unless it is another service's.
pub(super) async fn find(state: &State, id: RecordId) -> Result<Listed, Problem> {
    let found = state.opened()?.get(id).await.map_err(unavailable)?;
    found
        .filter(|listed| listed.origin.as_ref().is_none_or(|origin| origin.service == state.service))
        .ok_or_else(absent)
}

impl State {
    /// The store, once it is open.
    pub(super) fn opened(&self) -> Result<&Arc<dyn Store>, Problem> {
        self.store.get().ok_or_else(|| Kind::StoreUnavailable.because("the store is not open yet; see `/readyz`"))
    }
}

pub(super) fn unavailable(error: Error) -> Problem {
    tracing::warn!(%error, "a request to the admin listener failed");
    Kind::StoreUnavailable.because(match error {
        Error::Determinate(_) => "the store failed; nothing was changed",
        Error::Indeterminate(_) => "the store failed, and what was asked for may have happened; look at the record",
    })
}

pub(super) fn absent() -> Problem {
    Kind::NotFound.because("there is no record of this id")
}
