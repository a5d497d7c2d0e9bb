//! Finds what a request to the admin listener asks for.

use std::net::SocketAddr;

use http::{Method, Request, StatusCode};
use hyper::body::{Body as _, Incoming};
use serde_json::json;

use super::access::{self, Principal, Refused};
use super::answer::{Answer, Kind, Problem, json, text};
use super::clients::Client;
use super::endpoints::{Endpoint, REVEALING, Resource};
use super::readiness::STORE_UNAVAILABLE;
use super::tokens::Role;
use super::{
    Observations, RouteList, State, audit, bulk, deliveries, openapi, page, query, records, reload, reseal, resolve,
    stats,
};
use crate::idempotency::record::RecordId;
use crate::store::Error;

/// Whether a request may change something: only what an operator is needed for does.
pub(super) fn may_change<B>(request: &Request<B>) -> bool {
    let endpoint = Endpoint::at(request.uri().path()).map(|(endpoint, _)| endpoint);
    let right = endpoint.and_then(|endpoint| endpoint.right(request.method()));
    right.is_some_and(|(_, role)| *role == Some(Role::Operator))
}

/// Answers one request of the client at this address.
pub(super) async fn answer(state: &State, request: Request<Incoming>, address: SocketAddr, client: &Client) -> Answer {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let problem = match dispatch(state, request, &path, address, client).await {
        Ok(answer) => return answer,
        Err(problem) => problem,
    };
    let Some(error) = &problem.failure else { return problem.into() };
    log_failure(&method, &path, Endpoint::at(&path).and_then(|(_, id)| RecordId::parse(id)), error);
    // A reading is repeated without harm, so it does not matter what the store did of it.
    let is_reading = method == Method::GET || method == Method::HEAD;
    if is_reading { problem.of_reading(&state.away()).into() } else { problem.into() }
}

/// Says which request the store failed, and for which record. Queries stay out of the log: they name keys and callers.
pub(super) fn log_failure(method: &Method, path: &str, record: Option<RecordId>, error: &Error) {
    let record = record.map(tracing::field::display);
    tracing::warn!(%method, path, record, %error, "a request to the admin listener failed");
}

async fn dispatch(
    state: &State,
    request: Request<Incoming>,
    path: &str,
    address: SocketAddr,
    client: &Client,
) -> Result<Answer, Problem> {
    let found = Endpoint::at(path);
    let asker = if found.is_some_and(|(endpoint, _)| endpoint.is_anybodys()) {
        Principal::anybody(address)
    } else {
        let (configured, headers) = (state.configured.load(), request.headers());
        let is_there = found.is_some_and(|(endpoint, _)| endpoint.right(request.method()).is_some());
        let takes_body = is_there && request.method() == Method::POST;
        let checked = access::check(&configured.tokens, &state.throttle, address, takes_body, headers);
        checked.map_err(|refused| state.refused(refused))?
    };
    if asker.has_token() {
        client.proves_itself();
    }
    let Some((endpoint, id)) = found else {
        return Err(Kind::NotFound.because("there is nothing at this path; the records are at `/api/v1/records`"));
    };
    let Some((method, role)) = endpoint.right(request.method()) else {
        return Err(Kind::MethodNotAllowed(endpoint).because(format!("allowed here: {}", endpoint.allow())));
    };
    if let Some(role) = role {
        asker.must_be(*role, &format!("{method} {}", endpoint.path)).map_err(|refused| state.refused(refused))?;
    }
    let query = request.uri().query();
    if query.is_some_and(|query| !query.is_empty()) && !endpoint.takes_parameters {
        return Err(Kind::BadRequest.because("no query parameters are known here"));
    }
    match endpoint.resource {
        Resource::Page(file) => Ok(page::answer(file, request.headers())),
        Resource::Livez => Ok(json(StatusCode::OK, &json!({ "status": "live" }))),
        Resource::Readyz => readyz(state, query).await,
        Resource::Metrics => Ok(metrics(state).await),
        Resource::OpenApi => Ok(openapi::answer()),
        Resource::Routes => Ok(json(StatusCode::OK, &RouteList { routes: &state.configured.load().routes })),
        Resource::Stats => Ok(stats::answer(state, &asker).await),
        Resource::Observed => Ok(observed(state, &asker)),
        Resource::Records => records::list(state, query, &asker).await,
        Resource::Record if *method == Method::DELETE => {
            // Its reason would be lost.
            if request.body().size_hint().exact() != Some(0) {
                let detail = "a DELETE has no body here: give the reason as the query parameter `reason`";
                return Err(Kind::BadRequest.because(detail));
            }
            records::remove(state, parse_id(id)?, query, request.headers(), &asker).await
        }
        Resource::Record => records::show(state, parse_id(id)?, query, request.headers(), &asker).await,
        Resource::Resolve => resolve::resolve(state, parse_id(id)?, request, &asker).await,
        Resource::Retry => deliveries::retry(state, parse_id(id)?, request.into_body(), &asker).await,
        Resource::Deliveries => deliveries::list(state, query, &asker).await,
        Resource::Pause => deliveries::pause(state, request.into_body(), true, &asker).await,
        Resource::Resume => deliveries::pause(state, request.into_body(), false, &asker).await,
        Resource::PurgeAll => bulk::purge(state, request.into_body(), &asker).await,
        Resource::ResolveAll => bulk::resolve(state, request.into_body(), &asker).await,
        Resource::RetryAll => bulk::retry(state, request.into_body(), &asker).await,
        Resource::Reseal => {
            let after = reseal::after(query)?;
            reseal::reseal(state, after, request.into_body(), &asker).await
        }
        Resource::Audit => audit::list(state, query, &asker).await,
        Resource::Reload => reload::reload(state, request.into_body(), &asker).await,
    }
}

impl State {
    /// Counts a refusal, and gives the problem to answer with.
    pub(super) fn refused(&self, Refused(reason, problem): Refused) -> Problem {
        self.metrics.admin_refused(reason);
        problem
    }
}

/// What requests would have got. A viewer sees no keys.
fn observed(state: &State, asker: &Principal) -> Answer {
    let mut routes = state.metrics.observed();
    if asker.role < REVEALING {
        routes.iter_mut().flat_map(|route| &mut route.examples).for_each(|example| example.key = None);
    }
    json(StatusCode::OK, &Observations { routes })
}

/// With `store=optional`, a gate whose store is away is ready too: it forwards and replays what it can.
async fn readyz(state: &State, query: Option<&str>) -> Result<Answer, Problem> {
    let mut stores = query.unwrap_or_default().split('&').filter_map(|part| part.strip_prefix("store="));
    let store = stores.next();
    if store.is_some_and(|store| store != "optional") || stores.next().is_some() {
        return Err(query::bad("store", "must be `optional`, or left out"));
    }
    let is_store_optional = store.is_some();
    Ok(match state.why_not_ready().await {
        None => {
            let away = state.away();
            match away.is_empty() {
                true => json(StatusCode::OK, &json!({ "status": "ready" })),
                false => json(
                    StatusCode::OK,
                    &json!({ "status": "ready", "away": away.iter().map(|name| &**name).collect::<Vec<_>>() }),
                ),
            }
        }
        Some(reason @ STORE_UNAVAILABLE) if is_store_optional => {
            json(StatusCode::OK, &json!({ "status": "ready", "reason": reason }))
        }
        Some(reason) => json(StatusCode::SERVICE_UNAVAILABLE, &json!({ "status": "not-ready", "reason": reason })),
    })
}

async fn metrics(state: &State) -> Answer {
    state.metrics.ready(state.why_not_ready().await.is_none());
    text("text/plain; version=0.0.4; charset=utf-8", state.metrics.encode())
}

fn parse_id(text: &str) -> Result<RecordId, Problem> {
    RecordId::parse(text).ok_or_else(|| Kind::BadRequest.because("a record's id is 64 hexadecimal digits"))
}
