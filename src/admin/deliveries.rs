//! Accepted requests that are delivered later: lists them, holds routes back, and has dead ones delivered again.

use std::borrow::Cow;

use http::StatusCode;
use hyper::body::Incoming;
use schemars::JsonSchema;
use serde::Deserialize;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::State;
use super::access::Principal;
use super::answer::{Answer, Kind, Problem, empty, json};
use super::audit::{AuditEvent, Outcome};
use super::endpoints::REVEALING;
use super::forms;
use super::query::{DEFAULT_LIMIT, bad, limit, pairs, unknown};
use super::records::{MAX_REASON, absent, check_optional, unavailable};
use super::resolve::{from_object, receive, wrong_body};
use super::tokens::Role;
use super::wanted::id_prefix;
use crate::idempotency::codec;
use crate::idempotency::record::{self, RecordId};
use crate::store::deliveries::{self as queue, Delivery, DeliveryFilter, DeliveryState, Sequence};
use crate::store::{Error, Origin, OriginId, RecordEntry};
use crate::telemetry::deliveries::{ended_attempts, is_given_up_as_unknown, note_of};
use crate::telemetry::rfc3339;

/// Where a delivery may stand.
pub(super) const STATES: [&str; 2] = ["queued", "dead"];

/// The body of a request to hold a route back, or to let it go.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RouteBody {
    #[schemars(length(min = 1))]
    route: String,
    #[serde(default)]
    #[schemars(extend("pattern" = forms::REASON_OR_NONE, "maxLength" = MAX_REASON))]
    reason: String,
}

/// The body of a request to deliver a dead one again.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RetryBody {
    #[serde(default)]
    #[schemars(extend("pattern" = forms::REASON_OR_NONE, "maxLength" = MAX_REASON))]
    reason: String,
}

/// A page of deliveries.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "DeliveryPage")]
pub(super) struct Page {
    /// In the order of acceptance.
    deliveries: Vec<DeliveryView>,
    /// The cursor of the next page, if there is one.
    next: Option<String>,
    /// The routes that an operator holds back.
    paused: Vec<String>,
}

/// An accepted request.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Delivery")]
struct DeliveryView {
    /// The id of its record, which is there from its first attempt on.
    id: String,
    /// The route that it came in by; nothing where the store no longer knows it.
    route: Option<String>,
    /// `queued`, also while an attempt is under way, or `dead`.
    state: &'static str,
    /// When it was accepted.
    accepted_at: String,
    /// When it is delivered, or looked at again; of one that is queued.
    due_at: Option<String>,
    /// When it is forgotten; of one that is dead.
    expires_at: Option<String>,
    /// How many attempts have ended, one with an unknown outcome included.
    attempts: u32,
    /// What came of the last attempt, or why it was given up.
    reason: Option<String>,
    /// Its method.
    method: Option<String>,
    /// Its path, which may be cut.
    path: Option<String>,
    /// Its key, shortened; nothing for a viewer.
    key: Option<String>,
}

/// `GET /api/v1/deliveries`
pub(super) async fn list(state: &State, query: Option<&str>, asker: &Principal) -> Result<Answer, Problem> {
    let mut filter = DeliveryFilter { service: Some(state.service.clone()), ..DeliveryFilter::default() };
    let (mut most, mut after) = (DEFAULT_LIMIT, None);
    for (name, value) in pairs(query)? {
        match name {
            "route" if value.is_empty() => return Err(bad(name, "is empty")),
            "route" => filter.route = Some(value.into()),
            "state" => match &*value {
                "queued" => filter.is_dead = Some(false),
                "dead" => filter.is_dead = Some(true),
                _ => return Err(bad(name, "must be one of: queued, dead")),
            },
            "id" if value.is_empty() => return Err(bad(name, "is empty")),
            "id" => filter.prefix = Some(id_prefix(&value).map_err(|wrong| bad(name, wrong))?),
            "limit" => most = limit(&value)?,
            "cursor" => {
                let place = value.parse().map_err(|_| bad(name, "must be the `next` of the page before"))?;
                after = Some(Sequence(place));
            }
            _ => return Err(unknown(&["route", "state", "id", "limit", "cursor"])),
        }
    }
    let _slot = state.listing_slot()?;
    let store = state.opened()?;
    // A store that accepts nothing has none.
    let Some(deliveries) = store.deliveries() else {
        return Ok(json(StatusCode::OK, &Page { deliveries: Vec::new(), next: None, paused: Vec::new() }));
    };
    let found = deliveries.deliveries(filter, after, most).await.map_err(unavailable)?;
    let origins = deliveries.paused().await.map_err(unavailable)?;
    let routes = state.configured.load();
    let is_paused = |name: &&str| state.origin_of(name).is_some_and(|origin| origins.contains(&origin));
    let paused = routes.routes.iter().map(|route| &*route.name).filter(is_paused).map(str::to_owned).collect();
    let next = found.next.map(|Sequence(place)| place.to_string());
    let deliveries = found.deliveries.iter().map(|found| DeliveryView::of(found, asker.role)).collect();
    Ok(json(StatusCode::OK, &Page { deliveries, next, paused }))
}

/// `POST /api/v1/deliveries/pause` and `resume`
pub(super) async fn pause(
    state: &State,
    body: Incoming,
    is_paused: bool,
    asker: &Principal,
) -> Result<Answer, Problem> {
    let RouteBody { route, reason } = read(body, "{\"route\": \"...\", \"reason\": \"...\"}").await?;
    check_optional(&reason)?;
    let store = state.opened()?;
    let origin = state.origin_of(&route).ok_or_else(|| Kind::NotFound.because("there is no route of this name"))?;
    if is_paused && !state.may_deliver(&route).await? {
        return Err(Kind::NotConfigured.because(
            "the route accepts no requests and has none to deliver: there is nothing to hold back. What it protects goes to \
             the upstream at once",
        ));
    }
    let deed = AuditEvent::Pause { route: &route, is_paused, reason: &reason };
    let begun = state.begin(asker, deed).await?;
    let changed = async { queue::of(&**store)?.pause(origin, is_paused).await }.await.map_err(|error| match error {
        Error::Determinate(_) => unavailable(error),
        Error::Indeterminate(_) => {
            let detail = "the store failed, and some of the deliveries may be held back and others not: send the request \
                          again when the store answers";
            Kind::StoreUnavailable.because(detail).caused_by(error)
        }
    });
    match changed {
        Ok(true) => deed.log(asker),
        // It was so before.
        Ok(false) => {
            begun.end(Outcome::Unchanged).await;
            return Ok(empty(StatusCode::NO_CONTENT));
        }
        Err(_) => {}
    }
    begun.end_as(&changed).await;
    changed?;
    Ok(empty(StatusCode::NO_CONTENT))
}

/// `POST /api/v1/records/{id}/retry`
pub(super) async fn retry(state: &State, id: RecordId, body: Incoming, asker: &Principal) -> Result<Answer, Problem> {
    let RetryBody { reason } = read(body, "{\"reason\": \"...\"}").await?;
    check_optional(&reason)?;
    let Some(found) = find(state, id).await? else { return Err(why_gone(state, id).await) };
    if !found.is_dead() {
        return Err(already_queued());
    }
    if is_held(state, &found).await? {
        return Err(Kind::OutcomeUnknown.because(
            "the outcome of the request is unknown, so the gate does not deliver it again. Find out first: resolve the record \
             with `complete` if it ran; if it did not, with `release`, and then retry",
        ));
    }
    let deed = AuditEvent::Retry { found: &found, reason: &reason };
    let begun = state.begin(asker, deed).await?;
    let store = state.opened()?;
    let queued = async { queue::of(&**store)?.requeue(id).await }.await.map_err(unavailable);
    let queued = match queued {
        Ok(true) => Ok(()),
        // Another request was faster: one to retry it, which may have been delivered since, or one to remove it.
        Ok(false) => Err(match find(state, id).await {
            Ok(Some(_)) => already_queued(),
            Ok(None) => why_gone(state, id).await,
            Err(problem) => problem,
        }),
        Err(problem) => Err(problem),
    };
    begun.conclude(deed, asker, queued).await
}

/// Why there is no accepted request of this id.
async fn why_gone(state: &State, id: RecordId) -> Problem {
    match super::records::find(state, id).await {
        Ok(RecordEntry { record, .. }) => Kind::NotFound.because(format!(
            "nothing is left to deliver: the record of this id is {}, and no accepted request waits under it",
            record.state.as_str()
        )),
        Err(problem) => problem,
    }
}

fn already_queued() -> Problem {
    Kind::AlreadyQueued.because("the request is queued: it is delivered by itself")
}

/// Whether the outcome of a dead one is unknown, and no operator has resolved it since.
pub(super) async fn is_held(state: &State, dead: &Delivery) -> Result<bool, Problem> {
    // What cannot be read may say so.
    if !is_given_up_as_unknown(dead) && !dead.note.as_ref().is_some_and(|note| codec::is_sealed(note)) {
        return Ok(false);
    }
    let record = state.opened()?.get(dead.id).await.map_err(unavailable)?.filter(RecordEntry::is_live);
    Ok(record.is_some_and(|listed| listed.record.state == record::State::Unknown))
}

/// Removes an accepted request that has no record.
pub(super) async fn discard(
    state: &State,
    id: RecordId,
    reason: Option<&str>,
    asker: &Principal,
) -> Result<Answer, Problem> {
    let found = find(state, id).await?.ok_or_else(absent)?;
    let deed = AuditEvent::Discard { found: &found, reason };
    let begun = state.begin(asker, deed).await?;
    let queue = queue::of(&**state.opened()?).map_err(unavailable)?;
    let discarded = queue.discard(found.id, found.token).await.map_err(unavailable);
    let discarded = discarded.and_then(|was_there| if was_there { Ok(()) } else { Err(absent()) });
    begun.conclude(deed, asker, discarded).await
}

/// The delivery of an id, unless it is another service's.
pub(super) async fn find(state: &State, id: RecordId) -> Result<Option<Delivery>, Problem> {
    let Some(deliveries) = state.opened()?.deliveries() else { return Ok(None) };
    let found = deliveries.delivery(id).await.map_err(unavailable)?;
    let is_own = |found: &Delivery| found.origin.as_ref().is_none_or(|origin| origin.service == state.service);
    Ok(found.filter(is_own))
}

/// The word for where a delivery stands.
pub(super) fn state_of(delivery: &Delivery) -> &'static str {
    STATES[usize::from(delivery.is_dead())]
}

pub(super) fn route_of(origin: Option<&Origin>) -> Option<&str> {
    origin.map(|origin| &*origin.route)
}

async fn read<T: DeserializeOwned>(body: Incoming, form: &str) -> Result<T, Problem> {
    from_object(&receive(body).await?).map_err(|error| wrong_body(&error, form))
}

impl State {
    /// Whether a route accepts requests, or has some left from when it did.
    async fn may_deliver(&self, route: &str) -> Result<bool, Problem> {
        if self.configured.load().routes.iter().any(|known| known.name == route && known.accepts) {
            return Ok(true);
        }
        let Some(deliveries) = self.opened()?.deliveries() else { return Ok(false) };
        let (service, route) = (Some(self.service.clone()), Some(route.into()));
        let filter = DeliveryFilter { service, route, ..DeliveryFilter::default() };
        Ok(!deliveries.deliveries(filter, None, 1).await.map_err(unavailable)?.deliveries.is_empty())
    }

    /// What the deliveries of a route that is configured refer to.
    fn origin_of(&self, route: &str) -> Option<OriginId> {
        let configured = self.configured.load();
        let route = configured.routes.iter().find(|known| known.name == route)?;
        let (namespace, name) = (route.namespace.as_str().into(), route.name.as_str().into());
        Some(Origin { service: self.service.clone(), namespace, route: name }.id())
    }
}

impl DeliveryView {
    /// As somebody of this role sees it.
    fn of(delivery: &Delivery, role: Role) -> Self {
        let head = codec::Head::decode(&delivery.head).ok();
        let (due_at, expires_at) = match delivery.state {
            DeliveryState::Queued { due } => (Some(rfc3339(due)), None),
            DeliveryState::Dead { until } => (None, Some(rfc3339(until))),
        };
        Self {
            id: delivery.id.to_string(),
            route: route_of(delivery.origin.as_ref()).map(str::to_owned),
            state: state_of(delivery),
            accepted_at: rfc3339(delivery.accepted_at),
            due_at,
            expires_at,
            attempts: ended_attempts(delivery),
            reason: note_of(delivery).map(Cow::into_owned),
            method: head.as_ref().map(|head| head.method.to_string()),
            path: head.as_ref().map(codec::Head::shown_path),
            key: head.map(|head| head.key).filter(|_| role >= REVEALING),
        }
    }
}
