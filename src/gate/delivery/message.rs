//! Messages of brokers: each becomes a request that runs under the claim of its key, as a client's would that sends it again
//! until it has its end.

use std::net::Ipv4Addr;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};

use super::circuit::HalfOpenPermit;
use super::disposition::{Disposition, Tries};
use crate::gate::admission::admit::{Candidate, Refusal, Step};
use crate::gate::answer::RETRY_SOON;
use crate::gate::claim::protected::{ProtectedRequest, identify};
use crate::gate::request::Head;
use crate::gate::{Gate, RouteState};
use crate::http::headers::is_end_to_end;
use crate::http::request_body::Buffered;
use crate::http::server::Peer;
use crate::http::usage::{Account, Usage};
use crate::idempotency::credential;
use crate::idempotency::key::{Found, Key, KeySource};
use crate::route::Route;
use crate::telemetry::outcome::Code;

/// The key, towards an upstream whose route reads it from no header.
const KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// A message, as a request.
pub struct Message {
    /// Its method.
    pub method: Method,
    /// Path and query.
    pub target: Uri,
    /// Its host; if omitted, the upstream's.
    pub host: Option<HeaderValue>,
    /// Its headers. Those that belong to a connection are left out.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
    /// Its key.
    pub key: Found,
}

/// A message may run. It is held until its run ends.
pub struct CircuitPermit(#[expect(dead_code, reason = "its end is what counts")] Option<HalfOpenPermit>);

impl Gate {
    /// Whether a message may run: its upstream could be reached, or is to be tried again.
    pub fn permit(&self, message: &Message) -> Option<CircuitPermit> {
        let Some(route) = self.route_of_message(message) else { return Some(CircuitPermit(None)) };
        let permit = self.states[&route.name].circuit.allow(1);
        (permit.count > 0).then_some(CircuitPermit(permit.trial))
    }

    /// Runs a message.
    pub async fn consume(self: &Arc<Self>, message: &Message, tries: Tries) -> Disposition {
        // The configuration is checked for that, and so is a reload.
        let Some(route) = self.route_of_message(message) else { return Disposition::Wait(RETRY_SOON) };
        let state = &self.states[&route.name];
        match self.message_request(route, state, message).await {
            // An accepted request with its key comes first. The claim sees one that is accepted from here on.
            Ok(request) if request.may_have_delivery() && matches!(request.is_queued().await, Ok(true)) => {
                Disposition::Wait(RETRY_SOON)
            }
            // Where the store does not say what became of it, it says so later.
            Ok(request) => self.try_unattended(request, tries).await.unwrap_or(Disposition::Wait(RETRY_SOON)),
            Err(disposition) => disposition,
        }
    }

    /// Whether a route protects messages that become such a request.
    #[must_use]
    pub fn takes_messages(&self, method: &Method, host: Option<&HeaderValue>, target: &Uri) -> bool {
        self.protecting_route(method, host, target).is_some()
    }

    fn route_of_message(&self, message: &Message) -> Option<&Arc<Route>> {
        self.protecting_route(&message.method, message.host.as_ref(), &message.target)
    }

    fn protecting_route(&self, method: &Method, host: Option<&HeaderValue>, target: &Uri) -> Option<&Arc<Route>> {
        let host = host.and_then(|host| host.to_str().ok());
        let route = self.router.choose(method, host, target.path()).ok()??;
        route.policy.mode.protects().then_some(route)
    }

    async fn message_request(
        self: &Arc<Self>,
        route: &Arc<Route>,
        state: &Arc<RouteState>,
        message: &Message,
    ) -> Result<ProtectedRequest, Disposition> {
        let policy = &route.policy;
        if message.body.len() as u64 > policy.max_request_body {
            return Err(given_up(Code::RequestTooLarge, "the body is larger than max_request_body"));
        }
        let permit = self.shared.usage.requests.acquire(1).map(Arc::new).ok_or(Disposition::Wait(RETRY_SOON))?;
        let mut head = self.message_head(route, message)?;
        if policy.scope.has_jwt_claims() {
            self.verify(&mut head).await.map_err(|problem| match problem.code {
                Code::CredentialsUnverifiable => given_up(problem.code, "its token cannot be verified"),
                _ => Disposition::Wait(RETRY_SOON),
            })?;
        }
        if let Found::Key(key) = &message.key {
            show_key(&mut head.headers, &policy.key.from, key);
        }
        let memory = Account::new(&self.shared.usage.memory, None);
        let body = Usage::count_body_or_half(memory, message.body.clone()).map(Buffered::of);
        let body = body.ok_or(Disposition::Wait(RETRY_SOON))?;
        let found = match Candidate::new(&head).protect(route, message.key.clone()) {
            Step::Protect(found) => found,
            Step::Refuse(Refusal { problem, .. }) => return Err(given_up(problem.code, &problem.detail)),
            // What a key was found for is protected or refused.
            Step::Forward(_) | Step::NeedBody | Step::Verify { .. } => return Err(Disposition::Wait(RETRY_SOON)),
        };
        let identified =
            identify(self, policy, &head, &body, found).await.map_err(|_| Disposition::Wait(RETRY_SOON))?;
        let mut request = ProtectedRequest::new((self, route, state), (head, body), identified, permit);
        request.is_unattended = true;
        request.find_record().await;
        Ok(request)
    }

    fn message_head(&self, route: &Route, message: &Message) -> Result<Head, Disposition> {
        let mut headers: HeaderMap = message
            .headers
            .iter()
            .filter(|(name, _)| is_passed_on(name))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        let host = message.host.clone();
        let host = host.or_else(|| HeaderValue::from_str(&self.upstreams[route.upstream].settings().authority()).ok());
        headers.insert(HOST, host.ok_or_else(|| given_up(Code::BadRequest, "its upstream has no host"))?);
        headers.insert(CONTENT_LENGTH, HeaderValue::from(message.body.len()));
        let (mut parts, ()) = Request::new(()).into_parts();
        (parts.method, parts.uri, parts.headers) = (message.method.clone(), message.target.clone(), headers);
        let peer = Peer { may_be_trusted: false, ..Peer::new((Ipv4Addr::LOCALHOST, 0).into()) };
        let head = Head::of(parts, peer, &self.context).map_err(|problem| given_up(problem.code, &problem.detail))?;
        // The upstream may move, and a message that is delivered again must find its record all the same.
        Ok(if message.host.is_none() { head.without_host() } else { head })
    }
}

/// Whether the request of a message passes on a header of this name, if the message has one.
fn is_passed_on(name: &HeaderName) -> bool {
    // A message has no credential: another publisher may send it again with another one.
    is_end_to_end(name) && !credential::HEADERS.contains(name)
}

/// Whether the request of a message may have a header of this name. `names_host` says whether its consumer names the host.
#[must_use]
pub fn may_have_header(name: &HeaderName, names_host: bool) -> bool {
    match *name {
        CONTENT_LENGTH => true,
        HOST => names_host,
        _ => is_passed_on(name),
    }
}

fn given_up(code: Code, why: &str) -> Disposition {
    Disposition::GiveUp { is_attempt: false, note: format!("{}: {why}", code.as_str()) }
}

/// The upstream finds the key where a client of its route would have put it.
fn show_key(headers: &mut HeaderMap, places: &[KeySource], key: &Key) {
    let name = places.iter().find_map(|place| match place {
        KeySource::Header(name) => Some(name),
        _ => None,
    });
    if let Ok(mut value) = HeaderValue::from_str(&key.to_field()) {
        value.set_sensitive(true);
        headers.insert(name.unwrap_or(&KEY).clone(), value);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use super::*;
    use crate::gate::tests::{Nowhere, gate_before, route};
    use crate::http::limits::Limits;
    use crate::idempotency::policy::Mode;
    use crate::store::deliveries::Take;
    use crate::telemetry::outcome::Outcome;

    #[tokio::test]
    async fn a_message_has_no_credential() {
        let gate = gate_before(Arc::new(Nowhere::default()), vec![route("orders", Mode::Protect, "host")]);
        let sent = [("authorization", "Bearer a"), ("x-api-key", "k"), ("cookie", "s=1"), ("x-event-id", "7")];
        let headers = sent.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        let message = Message {
            method: Method::POST,
            target: "/orders".parse().unwrap(),
            host: None,
            headers: HeaderMap::from_iter(headers),
            body: Bytes::new(),
            key: Found::Fingerprint,
        };
        let head = gate.message_head(&gate.router.routes()[0], &message).unwrap();
        let kept = sent.map(|(name, _)| head.headers.contains_key(name));
        assert_eq!(kept, [false, false, false, true]);
    }

    /// A broker may deliver it again after the upstream has moved.
    #[tokio::test]
    async fn the_address_of_the_upstream_is_no_part_of_who_sent_a_message() {
        let gate = gate_before(Arc::new(Nowhere::default()), vec![route("orders", Mode::Protect, "host")]);
        let named = [None, Some(HeaderValue::from_static("orders.example"))].map(|host| {
            let (method, target, headers) = (Method::POST, "/orders".parse().unwrap(), HeaderMap::new());
            let message = Message { method, target, host, headers, body: Bytes::new(), key: Found::Fingerprint };
            let head = gate.message_head(&gate.router.routes()[0], &message).unwrap();
            (head.authority().map(str::to_owned), head.headers.contains_key(HOST))
        });
        assert_eq!(named, [(None, false), (Some("orders.example".to_owned()), true)]);
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_that_are_accepted_or_delivered_count_as_those_of_clients_do() {
        let upstream = Arc::new(Nowhere::default());
        let orders = route("orders", Mode::Accept, "host");
        let gate = gate_before(Arc::<Nowhere>::clone(&upstream), vec![orders]);
        let body = Bytes::from(vec![b'x'; 1 << 20]);
        let (method, target, headers) = (Method::POST, "/orders".parse().unwrap(), HeaderMap::new());
        let host = Some(HeaderValue::from_static("orders.example"));
        let message = Message { method, target, host, headers, body, key: Found::Fingerprint };
        let route = &gate.router.routes()[0];
        let Ok(request) = gate.message_request(route, &gate.states[&route.name], &message).await else {
            panic!("there is room")
        };
        let all = gate.shared.usage.memory.acquire(Limits::default().max_buffered_memory - (3 << 20) / 2).unwrap();
        assert_eq!(request.accepted().await.unwrap().outcome, Outcome::Problem(Code::Overloaded));
        let tries = Tries { attempts: 0, age: Duration::ZERO };
        assert!(matches!(gate.consume(&message, tries).await, Disposition::Wait(_)));
        assert_eq!(upstream.0.load(Ordering::Relaxed), 0);
        drop(all);
        assert_eq!(request.accepted().await.unwrap().outcome, Outcome::Accepted);
        let queue = gate.shared.store.deliveries().unwrap();
        let take = || Take {
            origin: gate.states["orders"].origin,
            limit: 1,
            max_bytes: 1,
            hold: Duration::ZERO,
            is_ordered: false,
        };
        let taken = queue.take_due(take()).await.unwrap().taken.remove(0);
        drop(request);
        // This store has the very bytes, which count on.
        let of_delivery = async || ProtectedRequest::of_delivery(&gate, route, &gate.states["orders"], &taken).await;
        let all = gate.shared.usage.memory.acquire(Limits::default().max_buffered_memory - (3 << 19)).unwrap();
        assert!(of_delivery().await.is_err(), "it waits");
        drop(all);
        assert!(of_delivery().await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn messages_of_all_routes_go_by_what_one_finds_out_of_their_upstream() {
        let upstream = Arc::new(Nowhere::default());
        let mut routes = ["orders", "refunds"].map(|name| route(name, Mode::Protect, "host"));
        routes[0].policy.reauthorize = Some("/whoami".parse().unwrap());
        let gate = gate_before(Arc::<Nowhere>::clone(&upstream), routes.to_vec());
        let message = |name: &str| Message {
            method: Method::POST,
            target: format!("/{name}").parse().unwrap(),
            host: None,
            headers: HeaderMap::new(),
            body: Bytes::new(),
            key: Found::Fingerprint,
        };
        let [orders, refunds] = ["orders", "refunds"].map(message);
        for attempts in 0..5 {
            let _permission = gate.permit(&orders).expect("the upstream may be there");
            let disposition = gate.consume(&orders, Tries { attempts, age: Duration::ZERO }).await;
            assert!(matches!(disposition, Disposition::Again { .. }), "{disposition:?}");
        }
        assert!(gate.permit(&orders).is_none() && gate.permit(&refunds).is_none());
        assert_eq!(upstream.0.load(Ordering::Relaxed), 5);
        tokio::time::advance(Duration::from_secs(1)).await;
        let trial = gate.permit(&refunds).expect("one may try it");
        assert!(gate.permit(&orders).is_none());
        drop(trial);
        assert!(gate.permit(&orders).is_some());
        // The upstream is back.
        gate.states["refunds"].circuit.ended(true);
        let both = [gate.permit(&orders), gate.permit(&refunds), gate.permit(&orders)];
        assert!(both.iter().all(Option::is_some));
    }
}
