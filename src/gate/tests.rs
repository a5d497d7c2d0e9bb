//! Gates for tests, and which identities they have.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::http::limits::Limits;
use crate::http::upstream::{self, Dial, Io};
use crate::idempotency::policy::{Mode, Policy};
use crate::idempotency::scope::ScopePart;
use crate::route::Pattern;
use crate::store::memory::Memory;

pub(crate) fn route(name: &str, mode: Mode, scope: &str) -> Route {
    let policy = Policy { mode, scope: vec![ScopePart::parse(scope).unwrap()].into(), ..Policy::default() };
    Route {
        name: name.into(),
        namespace: "shared".into(),
        methods: vec![http::Method::POST],
        host: None,
        path: Pattern::parse(&format!("/{name}")).unwrap(),
        upstream: 0,
        policy,
    }
}

pub(crate) fn gate_of(routes: Vec<Route>) -> Arc<Gate> {
    gate_with(None, routes)
}

pub(crate) fn gate_with(jwt: Option<jwt::Settings>, routes: Vec<Route>) -> Arc<Gate> {
    gate(jwt, routes, None, Memory::new())
}

pub(crate) fn gate_on(store: Memory, routes: Vec<Route>) -> Arc<Gate> {
    gate(None, routes, None, store)
}

/// A gate before one upstream, which is reached like this.
pub(crate) fn gate_before(dial: Arc<dyn Dial>, routes: Vec<Route>) -> Arc<Gate> {
    gate(None, routes, Some(dial), Memory::new())
}

fn gate(jwt: Option<jwt::Settings>, routes: Vec<Route>, dial: Option<Arc<dyn Dial>>, store: Memory) -> Arc<Gate> {
    let settings = Settings {
        service: "default".into(),
        id_secret: None,
        other_id_secrets: Vec::new(),
        settle_timeout: Duration::from_secs(5),
        headers: HeaderNames { status: None, replayed: None, expires: None },
        own_headers: OwnHeaders::default(),
        default_upstream: None,
        forwarding: Forwarding::default(),
        upgrades: Upgrades::default(),
        policy_page: None,
        tokens: Tokens::secret(),
        jwt,
    };
    let router = Router::new(routes).unwrap();
    let metrics = Metrics::new();
    let usage = Usage::new(&Limits::default(), &metrics);
    let upstreams =
        dial.map(|dial| Upstream::through(upstream_settings(), Arc::clone(&usage), dial)).into_iter().collect();
    Gate::new(settings, router, upstreams, Arc::new(store), usage, &metrics)
}

/// Refuses every connection, and counts them.
#[derive(Default)]
pub(crate) struct Nowhere(pub(crate) AtomicU32);

#[async_trait::async_trait]
impl Dial for Nowhere {
    async fn dial(&self) -> std::io::Result<Box<dyn Io>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Err(std::io::ErrorKind::ConnectionRefused.into())
    }
}

/// An upstream with long times.
pub(crate) fn upstream_settings() -> upstream::Settings {
    let minute = Duration::from_secs(60);
    upstream::Settings {
        name: "app".into(),
        places: vec![upstream::UpstreamAddress::Tcp { host: "app".into(), port: 80 }],
        tls: None,
        protocol: upstream::Protocol::Http1,
        timeout: minute,
        connect_timeout: minute,
        client_timeout: minute,
        max_connections: 1000,
        max_headers: Limits::default().max_answer_headers(),
        reuse: upstream::Sharing::Always,
    }
}

fn digests(routes: Vec<Route>) -> Vec<[u8; 32]> {
    gate_of(routes).identities().1.into_iter().map(|identity| identity.digest).collect()
}

#[test]
fn the_rules_of_a_namespace_are_those_of_the_routes_that_protect() {
    let pass = || route("pass", Mode::Pass, "host");
    let protect = || route("protect", Mode::Protect, "header:x-tenant");
    let rules = digests(vec![protect()]);
    assert_eq!(rules.len(), 1);
    assert_eq!(digests(vec![pass(), protect()]), rules);
    assert_eq!(digests(vec![protect(), pass()]), rules);
    assert!(digests(vec![pass()]).is_empty());
}
