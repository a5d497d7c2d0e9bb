//! Finds what a request to the admin listener asks for.

use std::net::SocketAddr;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde_json::json;

use super::answer::{Answer, Kind, Problem, json, text};
use super::readiness::STORE_UNAVAILABLE;
use super::{State, access, bulk, records, reload, resolve};
use crate::idempotency::record::RecordId;

/// What a path names.
enum Resource<'a> {
    Livez,
    Readyz,
    Metrics,
    Routes,
    Observed,
    Records,
    Record(&'a str),
    Resolve(&'a str),
    PurgeAll,
    ResolveAll,
    Reload,
}

/// Whether a request may change something: only a DELETE, and a POST to purge or resolve records or to reload.
pub(super) fn may_change<B>(request: &Request<B>) -> bool {
    let resource = Resource::named(request.uri().path());
    match *request.method() {
        Method::DELETE => matches!(resource, Some(Resource::Record(_))),
        Method::POST => resource.is_some_and(|resource| resource.methods() == "POST"),
        _ => false,
    }
}

/// Answers one request.
pub(super) async fn answer(state: &State, request: Request<Incoming>, client: SocketAddr) -> Answer {
    dispatch(state, request, client).await.unwrap_or_else(Answer::from)
}

async fn dispatch(state: &State, request: Request<Incoming>, client: SocketAddr) -> Result<Answer, Problem> {
    let path = request.uri().path().to_owned();
    let resource = Resource::named(&path);
    // Probes come with any host and no token, and learn nothing but one word.
    if !matches!(resource, Some(Resource::Livez | Resource::Readyz)) {
        access::check(state.configured.load().token.as_ref(), request.method(), request.headers())?;
    }
    let Some(resource) = resource else {
        return Err(Kind::NotFound.because("there is nothing at this path; the records are at `/api/v1/records`"));
    };
    let allow = resource.methods();
    if !allow.split(", ").any(|method| method == request.method().as_str()) {
        return Err(Kind::MethodNotAllowed(allow).because(format!("allowed here: {allow}")));
    }
    let query = request.uri().query();
    if query.is_some_and(|query| !query.is_empty()) && resource.refuses_parameters() {
        return Err(Kind::BadRequest.because("no query parameters are known here"));
    }
    match resource {
        Resource::Livez => Ok(json(StatusCode::OK, &json!({ "status": "live" }))),
        Resource::Readyz => Ok(readyz(state, query).await),
        Resource::Metrics => Ok(metrics(state).await),
        Resource::Routes => Ok(json(StatusCode::OK, &json!({ "routes": state.configured.load().routes }))),
        Resource::Observed => Ok(json(StatusCode::OK, &json!({ "routes": state.metrics.observed() }))),
        Resource::Records => records::list(state, query).await,
        Resource::Record(id) if request.method() == Method::DELETE => {
            records::remove(state, parse_id(id)?, query, client).await
        }
        Resource::Record(id) => records::show(state, parse_id(id)?, query, request.headers(), client).await,
        Resource::Resolve(id) => resolve::resolve(state, parse_id(id)?, request.into_body(), client).await,
        Resource::PurgeAll => bulk::purge(state, request.into_body(), client).await,
        Resource::ResolveAll => bulk::resolve(state, request.into_body(), client).await,
        Resource::Reload => reload::reload(state).await,
    }
}

impl<'a> Resource<'a> {
    fn named(path: &'a str) -> Option<Self> {
        Some(match path {
            "/livez" => Self::Livez,
            "/readyz" => Self::Readyz,
            "/metrics" => Self::Metrics,
            "/api/v1/routes" => Self::Routes,
            "/api/v1/observed" => Self::Observed,
            "/api/v1/records" => Self::Records,
            "/api/v1/records/purge" => Self::PurgeAll,
            "/api/v1/records/resolve" => Self::ResolveAll,
            "/api/v1/reload" => Self::Reload,
            _ => {
                let rest = path.strip_prefix("/api/v1/records/")?;
                match rest.split_once('/') {
                    None if rest.is_empty() => return None,
                    None => Self::Record(rest),
                    Some((id, "resolve")) => Self::Resolve(id),
                    Some(_) => return None,
                }
            }
        })
    }

    fn methods(&self) -> &'static str {
        match self {
            Self::Record(_) => "GET, HEAD, DELETE",
            Self::Resolve(_) | Self::PurgeAll | Self::ResolveAll | Self::Reload => "POST",
            _ => "GET, HEAD",
        }
    }

    /// Probes and scrapers may send what they like; a mistyped parameter of the API must not be ignored.
    fn refuses_parameters(&self) -> bool {
        match self {
            Self::Livez | Self::Readyz | Self::Metrics | Self::Records | Self::Record(_) => false,
            Self::Routes | Self::Observed | Self::Resolve(_) | Self::PurgeAll | Self::ResolveAll | Self::Reload => true,
        }
    }
}

/// With `store=optional`, a gate whose store is away is ready too: it forwards and replays what it can.
async fn readyz(state: &State, query: Option<&str>) -> Answer {
    let is_store_optional = query.is_some_and(|query| query.split('&').any(|part| part == "store=optional"));
    match state.why_not_ready().await {
        None => json(StatusCode::OK, &json!({ "status": "ready" })),
        Some(reason @ STORE_UNAVAILABLE) if is_store_optional => {
            json(StatusCode::OK, &json!({ "status": "ready", "reason": reason }))
        }
        Some(reason) => json(StatusCode::SERVICE_UNAVAILABLE, &json!({ "status": "not-ready", "reason": reason })),
    }
}

async fn metrics(state: &State) -> Answer {
    state.metrics.ready(state.why_not_ready().await.is_none());
    text("text/plain; version=0.0.4; charset=utf-8", state.metrics.encode())
}

fn parse_id(text: &str) -> Result<RecordId, Problem> {
    RecordId::parse(text).ok_or_else(|| Kind::BadRequest.because("a record's id is 64 hexadecimal digits"))
}
