//! Keys that are fetched from a URL: at the start, when they are no longer fresh, and when none of them verifies a token.
//! Those that were fetched last stay in force while others cannot be fetched.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use bytes::Bytes;
use http::header::{ACCEPT, CACHE_CONTROL, HOST, USER_AGENT};
use http::{HeaderMap, HeaderValue, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Limited};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout};

use super::Algorithm;
use super::keys::KeySet;
use crate::http::body::Body;
use crate::http::upstream::{self, Reuse, SendContext, Upstream};
use crate::http::usage::Usage;

/// Once there are keys, they are asked for at most once in this time.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(30);

/// As long as there are none, how long after a fetch that failed they are asked for again.
const UNTIL_FIRST: Duration = Duration::from_secs(5);

/// How long keys are fresh whose answer does not say, and how long at most.
const FRESH: Duration = Duration::from_secs(5 * 60);
const LONGEST_FRESH: Duration = Duration::from_secs(24 * 60 * 60);

/// How long a fetch may take.
const DEADLINE: Duration = Duration::from_secs(5);

/// How many requests wait for a fetch at a time. The others do without, so that a slow server of keys leaves the gate room.
const MOST_WAITING: usize = 256;

/// The largest set, in bytes.
const LARGEST: usize = 1 << 20;

/// Where a JSON Web Key Set is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JwksUrl {
    /// How the host is connected to.
    pub host: upstream::Settings,
    /// What `Host` says.
    pub authority: HeaderValue,
    /// Path and query.
    pub target: Uri,
    /// The only algorithms that count; all where none is named.
    pub algorithms: Vec<Algorithm>,
}

impl JwksUrl {
    fn is_same_place(&self, other: &Self) -> bool {
        (&self.host, &self.authority, &self.target) == (&other.host, &other.authority, &other.target)
    }
}

/// The keys of a URL.
pub(super) struct RemoteKeys {
    url: Arc<JwksUrl>,
    upstream: Upstream,
    keys: ArcSwapOption<Fetched>,
    schedule: Mutex<Schedule>,
    /// A permit for each request that waits for a fetch.
    waiting: Semaphore,
}

/// Keys, and which they are.
struct Fetched {
    /// All that there are at the URL.
    all: KeySet,
    /// Those that its algorithms leave.
    keys: Arc<KeySet>,
    generation: u64,
}

impl Fetched {
    fn new(all: KeySet, algorithms: &[Algorithm], generation: u64) -> Self {
        let mut keys = all.clone();
        keys.retain(algorithms);
        keys.truncate();
        Self { all, keys: Arc::new(keys), generation }
    }
}

#[derive(Default)]
struct Schedule {
    /// Before then, no fetch begins.
    not_before: Option<Instant>,
    /// When the keys are no longer fresh.
    due: Option<Instant>,
    /// The fetch that began last: it runs as long as this is open.
    fetch: Option<watch::Receiver<()>>,
}

/// Why keys are fetched.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    NotFresh,
    /// None of them verifies a token.
    Unknown,
}

impl RemoteKeys {
    /// The keys of a URL. They begin with those of a former configuration that differs in its algorithms alone.
    pub(super) fn new(url: Arc<JwksUrl>, former: Option<&Self>, usage: &Arc<Usage>) -> Self {
        let upstream = Upstream::new(url.host.clone(), Arc::clone(usage));
        let known = former.filter(|former| former.url.is_same_place(&url)).and_then(|former| former.keys.load_full());
        let keys = known.map(|known| Fetched::new(known.all.clone(), &url.algorithms, 1));
        let keys = keys.filter(|keys| !keys.keys.is_empty()).map(Arc::new);
        let (keys, waiting) = (ArcSwapOption::new(keys), Semaphore::new(MOST_WAITING));
        Self { url, upstream, keys, schedule: Mutex::default(), waiting }
    }

    pub(super) fn url(&self) -> &Arc<JwksUrl> {
        &self.url
    }

    /// The keys, where there are any, and which they are.
    pub(super) fn current(&self) -> (Option<Arc<KeySet>>, u64) {
        match &*self.keys.load() {
            Some(fetched) => (Some(Arc::clone(&fetched.keys)), fetched.generation),
            None => (None, 0),
        }
    }

    /// Fetches the keys where they are not fresh.
    pub(super) async fn refresh(self: &Arc<Self>) {
        if let Some(fetch) = self.fetch_if_due(Why::NotFresh) {
            end_of(fetch).await;
        }
    }

    /// Fetches the keys for a request that those in force do not verify, unless that was just done. Requests that come while
    /// keys are fetched wait for that fetch, and never for another one.
    pub(super) async fn fetch_for_request(self: &Arc<Self>) {
        if let Some(fetch) = self.fetch_if_due(Why::Unknown)
            && let Ok(_permit) = self.waiting.try_acquire()
        {
            end_of(fetch).await;
        }
    }

    /// The fetch that runs, or one that begins now; nothing where none is due.
    fn fetch_if_due(self: &Arc<Self>, why: Why) -> Option<watch::Receiver<()>> {
        let mut schedule = self.schedule();
        if let Some(running) = schedule.fetch.as_ref().filter(|fetch| fetch.has_changed().is_ok()) {
            return Some(running.clone());
        }
        let now = Instant::now();
        let is_early = schedule.not_before.is_some_and(|instant| now < instant);
        let is_fresh = schedule.due.is_some_and(|due| now < due);
        if is_early || why == Why::NotFresh && is_fresh {
            return None;
        }
        let (running, fetch) = watch::channel(());
        schedule.not_before = Some(now + SHORTEST_INTERVAL);
        schedule.fetch = Some(fetch.clone());
        let keys = Arc::clone(self);
        // In a task of its own: clients that go away must not keep the keys from being fetched.
        tokio::spawn(async move {
            keys.fetch_and_store().await;
            drop(running);
        });
        Some(fetch)
    }

    async fn fetch_and_store(&self) {
        let former = self.keys.load_full();
        match timeout(DEADLINE, self.fetch()).await.unwrap_or_else(|_| Err("it did not answer in time".to_owned())) {
            // Before there were any, they may not be published yet.
            Ok((fetched, _)) if fetched.keys.is_empty() && former.is_none() => {
                self.report_failure("it has no key that can verify a token", false)
            }
            Ok((fetched, fresh)) => {
                let keys = &fetched.keys;
                if keys.is_empty() {
                    let host = self.upstream.places();
                    tracing::error!(host, "the keys that verify tokens were withdrawn: requests with a token get 401");
                }
                self.schedule().due = Some(Instant::now() + fresh);
                if former.as_ref().is_none_or(|former| former.keys != *keys) {
                    tracing::info!(host = self.upstream.places(), ?keys, "the keys that verify tokens were fetched");
                    let generation = former.map_or(1, |former| former.generation + 1);
                    self.keys.store(Some(Arc::new(Fetched { generation, ..fetched })));
                }
            }
            Err(error) => self.report_failure(&error, former.is_some()),
        }
        if self.keys.load().is_none() {
            self.schedule().not_before = Some(Instant::now() + UNTIL_FIRST);
        }
    }

    fn schedule(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report_failure(&self, error: &str, has_former: bool) {
        let host = self.upstream.places();
        if has_former {
            tracing::warn!(host, error, "fetching the keys of tokens failed: the former ones stay in force");
        } else {
            let message = "fetching the keys of tokens failed: requests with a token get 503 until there are keys";
            tracing::error!(host, error, "{message}");
        }
    }

    /// Fetches the keys, and for how long they are fresh.
    async fn fetch(&self) -> Result<(Fetched, Duration), String> {
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = self.url.target.clone();
        let headers = request.headers_mut();
        headers.insert(HOST, self.url.authority.clone());
        headers.insert(ACCEPT, HeaderValue::from_static("application/jwk-set+json, application/json"));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("oncegate/", env!("CARGO_PKG_VERSION"))));
        let context = SendContext::default();
        let sending = self.upstream.send(request, Reuse::Unprotected, &context);
        let (response, connection) = sending.await.map_err(|error| error.to_string())?;
        match response.status() {
            StatusCode::OK => {}
            status if status.is_redirection() => {
                return Err(format!("it answered {}, and redirects are not followed", status.as_u16()));
            }
            status => return Err(format!("it answered {}", status.as_u16())),
        }
        let fresh = freshness(response.headers());
        let body = Limited::new(response.into_body(), LARGEST).collect().await;
        let body: Bytes =
            body.map_err(|_| format!("its answer broke off, or is larger than {LARGEST} bytes"))?.to_bytes();
        connection.return_to_pool();
        let all = KeySet::of_fetched(&body).map_err(|unusable| unusable.message)?;
        Ok((Fetched::new(all, &self.url.algorithms, 1), fresh))
    }
}

/// Waits until a fetch has ended.
async fn end_of(mut fetch: watch::Receiver<()>) {
    // Nothing is ever sent: its end closes the channel.
    let _ = fetch.changed().await;
}

/// How long an answer is fresh (RFC 9111, 4.2.1).
fn freshness(headers: &HeaderMap) -> Duration {
    let lines = headers.get_all(CACHE_CONTROL).iter().filter_map(|line| line.to_str().ok());
    let directives: Vec<String> =
        lines.flat_map(|line| line.split(',')).map(|directive| directive.trim().to_ascii_lowercase()).collect();
    let said = match directives.iter().find_map(|directive| directive.strip_prefix("max-age=")) {
        _ if directives.iter().any(|directive| directive == "no-store" || directive == "no-cache") => Duration::ZERO,
        Some(seconds) => seconds.trim_matches('"').parse().map_or(Duration::ZERO, Duration::from_secs),
        None => FRESH,
    };
    said.clamp(SHORTEST_INTERVAL, LONGEST_FRESH)
}

#[cfg(test)]
pub(super) mod tests {
    use std::net::TcpListener;

    use tokio::task::JoinSet;

    use super::*;
    use crate::gate::admission::jwt::{KeySource, Settings};
    use crate::gate::tests::{gate_with, route};
    use crate::http::limits::Limits;
    use crate::http::upstream::{Protocol, Sharing, UpstreamAddress};
    use crate::idempotency::policy::Mode;
    use crate::telemetry::logged::logged;
    use crate::telemetry::metrics::Metrics;

    /// A URL where no server answers.
    fn url(target: &'static str, algorithms: &[Algorithm]) -> Arc<JwksUrl> {
        let host = upstream::Settings {
            name: "auth.jwt".into(),
            places: vec![UpstreamAddress::Tcp { host: "127.0.0.1".to_owned(), port: 1 }],
            tls: None,
            protocol: Protocol::Auto,
            timeout: DEADLINE,
            connect_timeout: DEADLINE,
            max_connections: 1,
            max_headers: Limits::default().max_answer_headers(),
            reuse: Sharing::Always,
            client_timeout: DEADLINE,
        };
        let (authority, target) = (HeaderValue::from_static("127.0.0.1:1"), Uri::from_static(target));
        Arc::new(JwksUrl { host, authority, target, algorithms: algorithms.to_vec() })
    }

    #[tokio::test]
    async fn other_algorithms_of_the_same_url_leave_its_keys() {
        let usage = Usage::new(&Limits::default(), &Metrics::new());
        let new = |url, former: &RemoteKeys| RemoteKeys::new(url, Some(former), &usage);
        let rs256 = RemoteKeys::new(url("/keys", &[Algorithm::RS256]), None, &usage);
        assert!(rs256.current().0.is_none());
        let all = KeySet::of_fetched(set("a").as_bytes()).unwrap();
        rs256.keys.store(Some(Arc::new(Fetched::new(all, &rs256.url.algorithms, 7))));
        assert!(rs256.current().0.unwrap().is_empty());

        let es256 = new(url("/keys", &[Algorithm::ES256]), &rs256);
        assert_eq!(es256.current().0.unwrap().fitting(Some("a"), Algorithm::ES256).count(), 1);
        let any = new(url("/keys", &[]), &es256);
        assert!(any.current().0.is_some());
        assert!(new(url("/keys", &[Algorithm::RS256]), &any).current().0.is_none(), "none that can verify a token");
        assert!(new(url("/others", &[]), &any).current().0.is_none());
    }

    fn keys(url: Arc<JwksUrl>) -> Arc<RemoteKeys> {
        Arc::new(RemoteKeys::new(url, None, &Usage::new(&Limits::default(), &Metrics::new())))
    }

    /// A URL of a server, and what it accepts connections of.
    fn listening() -> (Arc<JwksUrl>, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut url = JwksUrl::clone(&url("/keys", &[]));
        url.host.places = vec![UpstreamAddress::Tcp { host: "127.0.0.1".to_owned(), port }];
        (Arc::new(url), listener)
    }

    /// The URL of a server that gives these answers, one on each connection, and then takes no more.
    pub(in crate::gate::admission::jwt) fn served(answers: &[(&str, &str)]) -> Arc<JwksUrl> {
        let (url, listener) = listening();
        let answers: Vec<String> = answers
            .iter()
            .map(|(status, body)| {
                let length = body.len();
                format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}")
            })
            .collect();
        std::thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let (mut head, mut some) = (Vec::new(), [0; 1024]);
                while !head.ends_with(b"\r\n\r\n") {
                    let read = std::io::Read::read(&mut stream, &mut some).unwrap();
                    assert!(read > 0, "no request");
                    head.extend_from_slice(&some[..read]);
                }
                std::io::Write::write_all(&mut stream, answer.as_bytes()).unwrap();
            }
        });
        url
    }

    /// A set of a key of this name.
    fn set(kid: &str) -> String {
        let x = "A".repeat(43);
        format!(r#"{{"keys":[{{"kty":"EC","kid":"{kid}","crv":"P-256","x":"{x}","y":"{x}"}}]}}"#)
    }

    /// Lets this time pass at once. It runs again before anything waits for a socket.
    pub(in crate::gate::admission::jwt) async fn passes(time: Duration) {
        tokio::time::pause();
        tokio::time::advance(time).await;
        tokio::time::resume();
    }

    /// After keys were fetched, each fetch that fails leaves them, and says so.
    #[tokio::test]
    async fn keys_stay_in_force_while_they_cannot_be_fetched_and_go_when_they_are_withdrawn() {
        let (lines, _logging) = logged();
        let (first, second) = (set("a"), set("b"));
        let remote = keys(served(&[
            ("200 OK", &first),
            ("500 Oops", ""),
            ("200 OK", "no set of keys"),
            ("200 OK", &second),
            ("200 OK", r#"{"keys":[]}"#),
            ("500 Oops", ""),
            ("200 OK", &first),
        ]));
        let names =
            |kid: &str| remote.current().0.is_some_and(|keys| keys.fitting(Some(kid), Algorithm::ES256).count() == 1);
        let next = async || {
            let early = lines.take();
            assert!(early.is_empty(), "{early}");
            remote.fetch_for_request().await;
            assert!(lines.take().is_empty(), "they were asked for just now");
            passes(SHORTEST_INTERVAL + Duration::from_secs(1)).await;
            remote.fetch_for_request().await;
            lines.take()
        };
        remote.refresh().await;
        assert!(names("a"));
        assert!(lines.take().contains("were fetched"));

        for reason in ["it answered 500", "JSON"] {
            let said = next().await;
            assert!(said.contains("WARN") && said.contains("the former ones stay in force"), "{said}");
            assert!(said.contains(reason), "{said}");
            assert_eq!((names("a"), remote.current().1), (true, 1));
        }
        let said = next().await;
        assert!(said.contains("were fetched") && names("b") && !names("a"), "{said}");

        let said = next().await;
        assert!(said.contains("ERROR") && said.contains("were withdrawn"), "{said}");
        assert!(remote.current().0.is_some_and(|keys| keys.is_empty()), "requests get 401, and not 503");
        // That they are gone stays in force too.
        let said = next().await;
        assert!(said.contains("the former ones stay in force"), "{said}");
        assert!(remote.current().0.is_some_and(|keys| keys.is_empty()));
        next().await;
        assert_eq!((names("a"), remote.current().1), (true, 4));
        // There is no server any more.
        let said = next().await;
        assert!(said.contains("the former ones stay in force") && names("a"), "{said}");
    }

    /// Where a server takes connections and says nothing.
    #[tokio::test(start_paused = true)]
    async fn requests_share_one_fetch_and_get_no_keys_at_once_after_it_failed() {
        const MOMENT: Duration = Duration::from_millis(100);
        let (url, listener) = listening();
        listener.set_nonblocking(true).unwrap();
        let connections = || std::iter::from_fn(|| listener.accept().ok()).count();
        let remote = keys(url);
        let began = Instant::now();
        let mut requests = JoinSet::new();
        for _ in 0..2 * MOST_WAITING {
            let remote = Arc::clone(&remote);
            requests.spawn(async move { remote.fetch_for_request().await });
        }
        let mut waits = Vec::new();
        while requests.join_next().await.is_some() {
            waits.push(began.elapsed());
        }
        let (at_once, after_it) = waits.split_at(MOST_WAITING);
        assert!(at_once.iter().all(|wait| *wait < MOMENT), "{at_once:?}");
        assert!(after_it.iter().all(|wait| (DEADLINE..DEADLINE + MOMENT).contains(wait)), "{after_it:?}");
        assert_eq!(connections(), 1);

        // The next one is due five seconds after the end of the last.
        tokio::time::advance(UNTIL_FIRST - MOMENT * 2).await;
        let asked = Instant::now();
        remote.fetch_for_request().await;
        remote.refresh().await;
        assert!(asked.elapsed() < MOMENT && connections() == 0, "{:?}", asked.elapsed());

        // Requests that are given up leave the fetch, and nothing else.
        tokio::time::advance(MOMENT * 3).await;
        let asked = Instant::now();
        for _ in 0..MOST_WAITING {
            let remote = Arc::clone(&remote);
            requests.spawn(async move { remote.fetch_for_request().await });
        }
        tokio::time::sleep(MOMENT).await;
        assert_eq!(remote.waiting.available_permits(), 0);
        requests.shutdown().await;
        assert_eq!(remote.waiting.available_permits(), MOST_WAITING);
        let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
        assert!(tasks < 5, "{tasks}");
        remote.fetch_for_request().await;
        assert!((DEADLINE..DEADLINE + MOMENT).contains(&asked.elapsed()), "{:?}", asked.elapsed());
        assert_eq!(connections(), 1);
    }

    #[tokio::test]
    async fn keys_are_waited_for_only_where_a_scope_has_a_claim() {
        let jwt = || {
            let keys = KeySource::Url(url("/keys", &[]));
            let (audience, header) = (Vec::new(), http::header::AUTHORIZATION);
            Some(Settings { keys, issuer: None, audience, leeway: Duration::ZERO, header })
        };
        assert!(!gate_with(jwt(), vec![route("a", Mode::Protect, "jwt:sub")]).refresh_token_keys().await);
        assert!(gate_with(jwt(), vec![route("a", Mode::Pass, "jwt:sub")]).refresh_token_keys().await);
        assert!(gate_with(jwt(), vec![route("a", Mode::Protect, "host")]).refresh_token_keys().await);
    }

    #[test]
    fn cache_control_says_how_long_keys_are_fresh() {
        for (line, seconds) in [
            ("", 300),
            ("public", 300),
            ("max-age=600", 600),
            ("public, Max-Age=3600, must-revalidate", 3600),
            ("max-age=0", 30),
            ("max-age=soon", 30),
            ("max-age=99999999999999999999", 30),
            ("max-age=9999999999", 86_400),
            ("no-store", 30),
            ("max-age=600, no-cache", 30),
        ] {
            let headers = HeaderMap::from_iter([(CACHE_CONTROL, HeaderValue::from_static(line))]);
            assert_eq!(freshness(&headers), Duration::from_secs(seconds), "{line}");
        }
    }
}
