//! An admin listener on a socket, with records in memory, for tests.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::*;
use crate::idempotency::codec::{Answer, Details, Head};
use crate::idempotency::fingerprint::{Fingerprint, Recipe};
use crate::idempotency::identity::{RecordIdHasher, RecordIdHashers};
use crate::idempotency::key::Key;
use crate::idempotency::record::{AttemptToken, RecordId, RequestId, Timestamp};
use crate::idempotency::scope::{Caller, ScopePart};
use crate::idempotency::unknown::UnknownCause;
use crate::store::deliveries::{self as queue, Acceptance, Lane, NewDelivery};
use crate::store::memory::Memory;
use crate::store::{Claim, Expiry, NamespaceRuleSet, NewRecord, Origin, Settled, Settlement};

/// How long an unknown outcome is kept.
const UNKNOWN_TTL: Duration = Duration::from_secs(86400);
pub(super) const LEASE: Duration = Duration::from_secs(30);
pub(super) const KEY: &str = "8e03978e-40d5-43e8-bc93-6894a57f9324";
pub(super) const START: u64 = 1_767_225_600_000;

pub(crate) struct Admin {
    pub(crate) address: SocketAddr,
    pub(crate) store: Arc<Memory>,
    pub(super) now: Arc<AtomicU64>,
    pub(super) state: Arc<State>,
    pub(super) readiness: Readiness,
    pub(super) stop: watch::Sender<bool>,
    pub(super) task: tokio::task::JoinHandle<()>,
}

/// How long entries of the audit log are kept.
pub(super) const AUDIT_TTL: Duration = Duration::from_secs(7 * 86400);

pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(super) head: String,
    pub(super) body: String,
}

impl Reply {
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("not JSON: {}", self.body))
    }

    pub(super) fn is_problem(&self, status: u16, code: &str) -> &Self {
        assert_eq!(self.status, status, "{}", self.body);
        assert!(self.head.contains("content-type: application/problem+json"), "{}", self.head);
        let problem = self.json();
        assert_eq!(problem["code"], code, "{problem}");
        assert_eq!(problem["type"], format!("urn:oncegate:problem:{code}"));
        assert_eq!(problem["status"], status);
        self
    }

    pub(super) fn says(&self, part: &str) {
        let problem = self.json();
        assert!(problem["detail"].as_str().unwrap().contains(part), "{problem}");
    }
}

pub(crate) async fn start(token: Option<&str>) -> Admin {
    with_store(start_without_store(token).await).await
}

/// Gives it a store, and what is in it.
pub(super) async fn with_store(admin: Admin) -> Admin {
    admin.state.set_store(admin.store.clone());
    let origins = ["charge", "refund"].map(origin);
    let rules = origins.each_ref().map(|Origin { service, namespace, .. }| NamespaceRuleSet {
        service: service.clone(),
        namespace: namespace.clone(),
        digest: [1; 32],
        others: Vec::new(),
        description: None,
    });
    admin.store.adopt(origins.to_vec(), rules.to_vec(), false).await.unwrap();
    admin.readiness.set(Phase::Ready);
    admin
}

pub(super) async fn start_without_store(token: Option<&str>) -> Admin {
    start_with(&token.map(|token| ("ops", Role::Operator, token)).into_iter().collect::<Vec<_>>()).await
}

/// With tokens, each of a name and a role.
pub(super) async fn start_with(tokens: &[(&str, Role, &str)]) -> Admin {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let now = Arc::new(AtomicU64::new(START));
    let clock = now.clone();
    let store = Arc::new(Memory::with_clock(Arc::new(move || Timestamp(clock.load(Ordering::SeqCst)))));
    let settings = Settings {
        listen: address.into(),
        tokens: tokens.iter().map(token).collect(),
        tls: None,
        audit_ttl: AUDIT_TTL,
    };
    let readiness = Readiness::default();
    let routes = vec![RouteInfo {
        name: "charge".into(),
        namespace: "charge".into(),
        methods: vec!["POST".into()],
        host: "*".into(),
        path: "/v1/charges".into(),
        upstream: "app".into(),
        mode: "protect",
        scope: vec!["header:X-Tenant?".into(), "host".into(), "credential".into()],
        accepts: false,
        ttl: Duration::from_secs(3600),
    }];
    let state = Arc::new(State::new(
        &settings,
        Metrics::new(),
        readiness.clone(),
        RecordIdHashers::only(identifier()),
        "shop".into(),
        routes,
    ));
    let (stop, shutdown) = watch::channel(false);
    let task = tokio::spawn(serve(listener, state.clone(), shutdown));
    Admin { address, store, now, state, readiness, stop, task }
}

pub(super) fn token((name, role, secret): &(&str, Role, &str)) -> Token {
    Token { name: (*name).into(), role: *role, secret: Secret((*secret).to_owned()) }
}

pub(super) fn identifier() -> RecordIdHasher {
    RecordIdHasher::new("shop".into(), None)
}

pub(super) fn origin(route: &str) -> Origin {
    Origin { service: "shop".into(), namespace: route.into(), route: route.into() }
}

impl Admin {
    pub(super) async fn send(&self, request: &str, headers: &str, body: &str) -> Reply {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let length = if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        let text = format!("{request} HTTP/1.1\r\nConnection: close\r\n{headers}{length}\r\n{body}");
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await.unwrap();
        let (head, body) = reply.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Reply { status, head: head.to_lowercase(), body: body.into() }
    }

    pub(super) async fn get(&self, target: &str) -> Reply {
        self.send(&format!("GET {target}"), &format!("Host: {}\r\n", self.address), "").await
    }

    pub(super) async fn delete(&self, id: RecordId) -> Reply {
        self.send(&format!("DELETE /api/v1/records/{id}"), &format!("Host: {}\r\n", self.address), "").await
    }

    pub(crate) async fn resolve(&self, id: RecordId, body: Value) -> Reply {
        let headers = format!("Host: {}\r\nContent-Type: application/json\r\n", self.address);
        self.send(&format!("POST /api/v1/records/{id}/resolve"), &headers, &body.to_string()).await
    }

    /// Asks for a change of many records.
    pub(crate) async fn bulk(&self, change: &str, body: Value) -> Reply {
        let headers = format!("Host: {}\r\nContent-Type: application/json\r\n", self.address);
        self.send(&format!("POST /api/v1/records/{change}"), &headers, &body.to_string()).await
    }

    pub(crate) fn pass(&self, time: Duration) {
        self.now.fetch_add(u64::try_from(time.as_millis()).unwrap(), Ordering::SeqCst);
    }

    /// Claims `key` as the gate would, and gives its id and its attempt.
    pub(crate) async fn claim(&self, route: &str, key: &str) -> (RecordId, AttemptToken) {
        let (id, attempt, head) = Self::request(route, key);
        let fresh = NewRecord {
            attempt,
            origin: origin(route).id(),
            lease: LEASE,
            ttl: Duration::from_secs(86400),
            unknown_ttl: UNKNOWN_TTL,
            head,
        };
        assert!(matches!(self.store.claim(id, fresh).await.unwrap(), Claim::Inserted(_)));
        (id, attempt)
    }

    /// Accepts a request with `key` to be delivered later, and gives its id.
    pub(crate) async fn accept(&self, route: &str, key: &str) -> RecordId {
        let (id, token, head) = Self::request(route, key);
        let (request, body) = (Bytes::new(), Bytes::new());
        let new = NewDelivery { token, origin: origin(route).id(), lane: Lane(0), head, request, body };
        assert!(matches!(queue::of(&*self.store).unwrap().accept(id, new).await.unwrap(), Acceptance::Accepted));
        id
    }

    /// The id of a request, its attempt, and what its record keeps of it.
    fn request(route: &str, key: &str) -> (RecordId, AttemptToken, Bytes) {
        let key = Key::parse(key, 255).unwrap();
        let headers = HeaderMap::new();
        let caller = Caller { headers: &headers, authority: None, client_ip: None, certificate: None, claims: None };
        let id = identifier().id(route, &[ScopePart::Host], caller, &key);
        let attempt = AttemptToken(std::array::from_fn(|i| id.0[i] ^ 0x5a));
        let recipe = Recipe::default();
        let fingerprint = Fingerprint { recipe, digest: [7; 32] };
        let details = Details {
            request: NonZeroU64::new(0xab).map(RequestId),
            trace: Some(0xcd),
            upstream: Some("app".to_owned()),
            rules: None,
            is_accepted: false,
            is_call: false,
            caller: Some([9; 8]),
            // The record of this key is as an older release claimed it.
            scope: (key.as_str() != "legacy").then(|| identifier().scope_tags(&[ScopePart::Host], caller)),
            unknown_ttl: Some(UNKNOWN_TTL),
            // The one route whose upstream is asked about records without a client.
            key: (route == "refund").then(|| key.clone()),
        };
        let head = Head::new(fingerprint, Method::POST, &format!("/v1/{route}s"), &key).with_details(&details);
        (id, attempt, head.encode())
    }

    pub(super) async fn end(&self, id: RecordId, attempt: AttemptToken, end: Settlement) {
        assert!(matches!(self.store.settle(id, attempt, end).await.unwrap(), Settled::Done { .. }));
    }

    pub(crate) async fn unknown(&self, route: &str, key: &str) -> (RecordId, AttemptToken) {
        let (id, attempt) = self.claim(route, key).await;
        self.end(id, attempt, Settlement::Hold { cause: UnknownCause::Shutdown.encode() }).await;
        (id, attempt)
    }

    pub(super) async fn completed(&self, route: &str, key: &str) -> RecordId {
        let (id, attempt) = self.claim(route, key).await;
        let content = crate::idempotency::codec::Content { body: Bytes::from_static(b"paid"), trailers: Vec::new() };
        let answer =
            Answer { status: http::StatusCode::CREATED, reason: None, headers: Vec::new(), content: Some(content) };
        let expiry = Expiry::FromClaim(Duration::from_secs(3600));
        self.end(id, attempt, Settlement::Complete { answer: answer.encode(), expiry }).await;
        id
    }

    pub(super) async fn ids(&self, query: &str) -> Vec<String> {
        let reply = self.get(&format!("/api/v1/records{query}")).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()["records"].as_array().unwrap().iter().map(|record| record["id"].as_str().unwrap().into()).collect()
    }
}
