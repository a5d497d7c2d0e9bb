//! Two gates on one store: the attempt runs in the one, and requests wait in the other.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::gate::tests::upstream_settings;
use crate::gate::{Gate, HeaderNames, Secret, Settings, Tokens};
use crate::http::accept::AcceptSettings;
use crate::http::forwarding::Forwarding;
use crate::http::headers::OwnHeaders;
use crate::http::limits::Limits;
use crate::http::server;
use crate::http::upstream::{self, Dial, Io, Upstream};
use crate::http::usage::Usage;
use crate::idempotency::policy::{InFlight, Policy, StoreFailure};
use crate::idempotency::record::Timestamp;
use crate::idempotency::recovery::{Probe, ProbePath, Recovery};
use crate::route::{Pattern, Route, Router};
use crate::store::memory::Memory;
use crate::store::unreliable::{Fault, Operation, Unreliable};
use crate::store::{Filter, Store};
use crate::telemetry::metrics::Metrics;

mod accepted;
mod deadlines;
mod late;

const WAIT: Duration = Duration::from_secs(20);
/// The longest time between two looks at a record of another process.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(5);

/// An upstream that answers each request once a test has set the answer.
struct Backend {
    runs: AtomicUsize,
    answer: watch::Sender<&'static str>,
}

struct Dialler(Arc<Backend>);

#[async_trait::async_trait]
impl Dial for Dialler {
    async fn dial(&self) -> std::io::Result<Box<dyn Io>> {
        let (ours, theirs) = duplex(64 * 1024);
        tokio::spawn(Arc::clone(&self.0).serve(theirs));
        Ok(Box::new(ours))
    }
}

impl Backend {
    async fn serve(self: Arc<Self>, mut stream: DuplexStream) {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n{}") {
            if stream.read_buf(&mut request).await.unwrap_or(0) == 0 {
                return;
            }
        }
        self.runs.fetch_add(1, Ordering::SeqCst);
        let mut answer = self.answer.subscribe();
        let answer = *answer.wait_for(|answer| !answer.is_empty()).await.unwrap();
        stream.write_all(answer.as_bytes()).await.unwrap();
    }
}

struct Pair {
    /// Runs the attempt.
    first: Arc<Gate>,
    /// Where others wait for it.
    other: Arc<Gate>,
    store: Arc<Unreliable>,
    backend: Arc<Backend>,
}

/// `policy` without what these tests are about.
fn pair(policy: Policy) -> Pair {
    let began = Instant::now();
    let clock = move || Timestamp(1_000_000).plus(began.elapsed());
    let store = Arc::new(Unreliable::new(Arc::new(Memory::with_clock(Arc::new(clock)))));
    let backend = Arc::new(Backend { runs: AtomicUsize::new(0), answer: watch::Sender::new("") });
    let gate = || gate(&policy, &store, &backend);
    Pair { first: gate(), other: gate(), store: Arc::clone(&store), backend: Arc::clone(&backend) }
}

fn gate(policy: &Policy, store: &Arc<Unreliable>, backend: &Arc<Backend>) -> Arc<Gate> {
    gate_to(policy, Vec::new(), upstream_settings(), (store, backend))
}

/// A gate that has other id secrets besides, and these times of its upstream.
fn gate_to(
    policy: &Policy,
    other_id_secrets: Vec<Option<Secret>>,
    upstream: upstream::Settings,
    (store, backend): (&Arc<Unreliable>, &Arc<Backend>),
) -> Arc<Gate> {
    let route = Route {
        name: "all".into(),
        namespace: "all".into(),
        methods: vec![http::Method::POST],
        host: None,
        path: Pattern::parse("/{*rest}").unwrap(),
        upstream: 0,
        policy: Policy { in_flight: InFlight::Wait(WAIT), lease: LEASE, ..policy.clone() },
    };
    let settings = Settings {
        service: "default".into(),
        id_secret: None,
        other_id_secrets,
        settle_timeout: Duration::from_secs(2),
        headers: HeaderNames {
            status: Some(http::HeaderName::from_static("idempotency-status")),
            replayed: None,
            expires: None,
        },
        own_headers: OwnHeaders::default(),
        default_upstream: None,
        forwarding: Forwarding::default(),
        upgrades: crate::http::upgrade::Upgrades::default(),
        policy_page: None,
        tokens: Tokens::secret(),
        jwt: None,
    };
    let store: Arc<dyn Store> = Arc::<Unreliable>::clone(store);
    let metrics = Metrics::new();
    let usage = Usage::new(&Limits::default(), &metrics);
    let dialler = Arc::new(Dialler(Arc::clone(backend)));
    let upstreams = vec![Upstream::through(upstream, Arc::clone(&usage), dialler)];
    Gate::new(settings, Router::new(vec![route]).unwrap(), upstreams, store, usage, &metrics)
}

/// Sends the request.
fn post(gate: &Arc<Gate>) -> JoinHandle<String> {
    post_as("ann", gate)
}

/// The same with a session.
fn post_as(session: &'static str, gate: &Arc<Gate>) -> JoinHandle<String> {
    post_with(format!("Cookie: session={session}\r\n"), gate)
}

/// The same as [`post`], waiting for so many seconds at most.
fn post_waiting(seconds: &str, gate: &Arc<Gate>) -> JoinHandle<String> {
    post_with(format!("Cookie: session=ann\r\nPrefer: wait={seconds}\r\n"), gate)
}

fn post_with(headers: String, gate: &Arc<Gate>) -> JoinHandle<String> {
    send(
        format!(
            "POST /x HTTP/1.1\r\nHost: a\r\nIdempotency-Key: k\r\n{headers}Connection: close\r\nContent-Length: 2\r\n\r\n{{}}"
        ),
        gate,
    )
}

/// Sends this, and gives all that comes back.
fn send(request: String, gate: &Arc<Gate>) -> JoinHandle<String> {
    let (mut client, stream) = duplex(64 * 1024);
    let (never, stop) = watch::channel(false);
    let current = server::ServerState::current(
        Arc::clone(gate),
        Limits::default(),
        AcceptSettings::default(),
        Usage::new(&Limits::default(), &Metrics::new()),
    );
    tokio::spawn(server::connection(stream, SocketAddr::from(([127, 0, 0, 1], 1)), current, stop));
    tokio::spawn(async move {
        let _never = never;
        client.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        client.read_to_string(&mut response).await.unwrap();
        response
    })
}

impl Pair {
    /// The attempt runs in the one, and a request waits in the other.
    async fn wait(&self) -> (JoinHandle<String>, JoinHandle<String>) {
        let first = post(&self.first);
        while self.runs() == 0 {
            sleep(Duration::from_millis(1)).await;
        }
        let waiter = post(&self.other);
        sleep(Duration::from_secs(1)).await;
        assert!(!waiter.is_finished());
        (first, waiter)
    }

    /// Keeps the lease of the attempt alive, as a gate does that serves.
    fn renew(&self) {
        let (gate, (never, stop)) = (Arc::clone(&self.first), watch::channel(false));
        tokio::spawn(async move {
            gate.renew_leases(stop).await;
            drop(never);
        });
    }

    fn answer(&self, answer: &'static str) {
        self.backend.answer.send_replace(answer);
    }

    fn runs(&self) -> usize {
        self.backend.runs.load(Ordering::SeqCst)
    }
}

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\nX-A: 1\r\n\r\ndone";

#[track_caller]
fn check(response: &str, status: &str, word: &str, retry_after: Option<&str>) {
    assert!(response.starts_with(&format!("HTTP/1.1 {status} ")), "{response}");
    let value = |name: &str| response.lines().find_map(|line| line.strip_prefix(name));
    assert_eq!(value("idempotency-status: "), Some(word), "{response}");
    if retry_after.is_some() {
        assert_eq!(value("retry-after: "), retry_after, "{response}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_answer_of_another_replica_is_replayed() {
    let pair = pair(Policy::default());
    let (first, waiter) = pair.wait().await;
    pair.answer(OK);
    let first = first.await.unwrap();
    check(&first, "200", "executed", None);
    let answered = Instant::now();
    let replay = waiter.await.unwrap();
    assert!(answered.elapsed() <= LONGEST_PAUSE, "{:?}", answered.elapsed());
    assert_eq!(replay.replace("replayed", "executed"), first);
    assert_eq!(pair.runs(), 1);
}

/// Sends the request with other credentials, which are refused at once: what comes back, but for its date.
async fn refused(gate: &Arc<Gate>) -> String {
    let asked = Instant::now();
    let refused = post_as("bob", gate).await.unwrap();
    check(&refused, "422", "caller-differs", None);
    assert!(asked.elapsed() < Duration::from_secs(1) && !refused.contains("retry-after"), "{refused}");
    let mut refused: String = refused.lines().filter(|line| !line.starts_with("date: ")).collect();
    let instance = refused.find("urn:oncegate:request:").expect("it says which request it is");
    refused.replace_range(instance..instance + "urn:oncegate:request:".len() + 16, "");
    refused
}

/// A caller with other credentials learns at once that the key is not theirs, in each of the gates, and nothing of how the
/// attempt goes on.
#[tokio::test(start_paused = true)]
async fn another_caller_does_not_wait() {
    for recovery in [Recovery::Hold, Recovery::Retry] {
        let pair = pair(Policy { recovery, ..Policy::default() });
        let (first, waiter) = pair.wait().await;
        let running = refused(&pair.first).await;
        assert_eq!(refused(&pair.other).await, running, "the same in both");
        // The lease passes: for its own caller the outcome is unknown.
        sleep(LEASE).await;
        assert_eq!(refused(&pair.other).await, running);
        assert_eq!(pair.runs(), 1, "it took nothing over");
        pair.answer(OK);
        first.await.unwrap();
        drop(waiter);
        assert_eq!(refused(&pair.first).await, running);
        assert_eq!(refused(&pair.other).await, running);
        assert_eq!(pair.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_in_another_replica_lets_the_client_try_again() {
    let pair = pair(Policy::default());
    let (first, waiter) = pair.wait().await;
    pair.answer("HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n");
    check(&first.await.unwrap(), "500", "released", None);
    check(&waiter.await.unwrap(), "409", "in-flight", Some("1"));
    assert_eq!(pair.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_another_replica_ends_too() {
    let pair = pair(Policy::default());
    pair.renew();
    let began = Instant::now();
    let (first, waiter) = pair.wait().await;
    let before = pair.store.calls();
    check(&waiter.await.unwrap(), "409", "in-flight", None);
    assert!((WAIT..WAIT + Duration::from_secs(1)).contains(&began.elapsed()), "{:?}", began.elapsed());
    // The renewals are among them.
    assert!(pair.store.calls() - before < 50, "{} calls", pair.store.calls() - before);
    assert!(!first.is_finished());
}

/// Nothing renews the lease here, as if the gate of the attempt were dead.
#[tokio::test(start_paused = true)]
async fn retry_after_is_no_longer_than_the_lease_of_another_replica() {
    let pair = pair(Policy::default());
    let first = post(&pair.first);
    sleep(Duration::from_millis(3200)).await;
    // Here it would be as long again as the attempt has been running: 4 s.
    check(&post_waiting("0", &pair.other).await.unwrap(), "409", "in-flight", Some("2"));
    check(&post_waiting("1", &pair.other).await.unwrap(), "409", "in-flight", Some("1"));
    // The gate of the attempt renews the lease.
    check(&post_waiting("0", &pair.first).await.unwrap(), "409", "in-flight", Some("5"));
    assert!(!first.is_finished());
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_passes_leaves_an_unknown_outcome() {
    let pair = pair(Policy::default());
    let (_first, waiter) = pair.wait().await;
    let response = timeout(LEASE, waiter).await.expect("no longer than the lease").unwrap();
    check(&response, "409", "outcome-unknown", None);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_passes_is_not_taken_over_by_who_waits() {
    let pair = pair(Policy { recovery: Recovery::Retry, ..Policy::default() });
    let (_first, waiter) = pair.wait().await;
    check(&waiter.await.unwrap(), "409", "in-flight", Some("1"));
    assert_eq!(pair.runs(), 1);
    // The request that comes after it is the one that may.
    let retry = post(&pair.other);
    sleep(Duration::from_millis(100)).await;
    assert_eq!(pair.runs(), 2);
    pair.answer(OK);
    check(&retry.await.unwrap(), "200", "executed", None);
}

#[tokio::test(start_paused = true)]
async fn a_purge_lets_the_client_try_again() {
    let pair = pair(Policy::default());
    let (_first, waiter) = pair.wait().await;
    let page = pair.store.list(Filter::default(), None, 1).await.unwrap();
    assert!(pair.store.remove(page.records[0].id, page.records[0].record.attempt).await.unwrap());
    check(&waiter.await.unwrap(), "409", "in-flight", Some("1"));
    assert_eq!(pair.runs(), 1);
}

/// One of them looks, and tells the others.
#[tokio::test(start_paused = true)]
async fn many_who_wait_for_what_is_purged_do_not_all_ask() {
    let pair = pair(Policy::default());
    let (_first, _waiter) = pair.wait().await;
    let waiters: Vec<_> = (0..200).map(|_| post(&pair.first)).collect();
    sleep(Duration::from_secs(1)).await;
    let page = pair.store.list(Filter::default(), None, 1).await.unwrap();
    assert!(pair.store.remove(page.records[0].id, page.records[0].record.attempt).await.unwrap());
    pair.store.script_for(Operation::Get, [Fault::Delay(Duration::from_millis(1)); 200]);
    let before = pair.store.calls();
    pair.answer("HTTP/1.1 500 No\r\nContent-Length: 0\r\nIdempotency-Control: no-store\r\n\r\n");
    for waiter in waiters {
        waiter.await.unwrap();
    }
    assert!(pair.store.calls() - before < 20, "{} calls", pair.store.calls() - before);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_comes_back_in_time_is_asked_again() {
    let pair = pair(Policy::default());
    let (first, waiter) = pair.wait().await;
    pair.store.set_away(true);
    pair.answer(OK);
    check(&first.await.unwrap(), "200", "unrecorded", None);
    sleep(Duration::from_secs(5)).await;
    assert!(!waiter.is_finished());
    pair.store.set_away(false);
    check(&waiter.await.unwrap(), "200", "replayed", None);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_stays_away_ends_in_a_conflict() {
    let pair = pair(Policy::default());
    let (_first, waiter) = pair.wait().await;
    pair.store.set_away(true);
    check(&waiter.await.unwrap(), "409", "in-flight", None);
    assert_eq!(pair.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_went_away_is_not_waited_for() {
    let pair = pair(Policy::default());
    let (_first, waiter) = pair.wait().await;
    assert_eq!(pair.other.running(), 1);
    waiter.abort();
    sleep(Duration::from_millis(1)).await;
    assert_eq!(pair.other.running(), 0);
    assert_eq!(pair.first.running(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_gate_that_ends_does_not_stay_for_another() {
    let pair = pair(Policy::default());
    pair.renew();
    let (_first, waiter) = pair.wait().await;
    let began = Instant::now();
    assert!(!pair.other.drain(sleep(Duration::from_secs(3))).await);
    assert!(began.elapsed() <= Duration::from_secs(6), "{:?}", began.elapsed());
    check(&waiter.await.unwrap(), "409", "in-flight", None);
}

/// What a gate read before the answer came says nothing to a request that came after it.
#[tokio::test(start_paused = true)]
async fn an_outcome_that_was_unknown_before_a_request_came_is_looked_at_again() {
    for recovery in [Recovery::Hold, Recovery::Retry] {
        let pair = pair(Policy { recovery, ..Policy::default() });
        let first = post(&pair.first);
        // Nothing renews the lease.
        sleep(LEASE + Duration::from_secs(1)).await;
        let slow = Fault::DelayAnswer(Duration::from_millis(1500));
        let quick = Fault::Delay(Duration::from_millis(1));
        pair.store.script_for(Operation::Claim, std::iter::once(slow).chain([quick; 50]));
        let leader = post(&pair.other);
        sleep(Duration::from_secs(1)).await;
        pair.answer(OK);
        check(&first.await.unwrap(), "200", "executed", None);
        let followers: Vec<_> = (0..50).map(|_| post(&pair.other)).collect();
        let before = pair.store.calls();
        for follower in followers {
            check(&follower.await.unwrap(), "200", "replayed", None);
        }
        leader.await.unwrap();
        assert_eq!(pair.runs(), 1);
        assert!(pair.store.calls() - before < 10, "{} calls", pair.store.calls() - before);
    }
}

/// Requests of all kinds in both gates while one attempt runs: what it answers is what they get.
#[tokio::test(start_paused = true)]
async fn many_wait_in_both() {
    let pair = pair(Policy::default());
    let (first, waiter) = pair.wait().await;
    let mut waiters = vec![waiter];
    for _ in 0..20 {
        waiters.push(post(&pair.other));
        waiters.push(post(&pair.first));
    }
    sleep(Duration::from_secs(1)).await;
    pair.answer(OK);
    check(&first.await.unwrap(), "200", "executed", None);
    for waiter in waiters {
        check(&waiter.await.unwrap(), "200", "replayed", None);
    }
    assert_eq!(pair.runs(), 1);
}

/// The store is slow, and not away: what leads for the key knows of a record while another request still waits for it.
#[tokio::test(start_paused = true)]
async fn a_request_is_not_forwarded_unprotected_beside_a_record_that_another_has_found() {
    let path = ProbePath::parse("/ask/{key}").unwrap();
    let probe = Probe { path, after: Some(Duration::from_secs(1)), every: None, headers: Vec::new() };
    let (recovery, store_failure) = (Recovery::Probe(probe), StoreFailure::Forward);
    let pair = pair(Policy { recovery, store_failure, ..Policy::default() });
    let _first = post(&pair.first);
    sleep(LEASE + Duration::from_secs(2)).await;
    assert_eq!(pair.runs(), 1);
    // The claim finds the record, and the right to ask the upstream is claimed after that. Each is within settle_timeout.
    let slow = Fault::DelayAnswer(Duration::from_millis(1500));
    pair.store.script_for(Operation::Claim, [slow, slow]);
    let (_leader, follower) = (post(&pair.other), post(&pair.other));
    check(&follower.await.unwrap(), "503", "store-unavailable", None);
    assert_eq!(pair.runs(), 1);
    // A store that says nothing is away.
    pair.store.script_for(Operation::Claim, [Fault::Hang]);
    let fresh = || post_with("X-Api-Key: eve\r\n".to_owned(), &pair.other);
    let (leader, follower) = (fresh(), fresh());
    pair.answer(OK);
    for forwarded in [leader, follower] {
        check(&forwarded.await.unwrap(), "200", "unprotected", None);
    }
    assert_eq!(pair.runs(), 3);
}
