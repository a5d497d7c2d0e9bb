//! The endpoints of an upstream, and the order in which they are tried.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, sleep_until};

use super::io::{SocketState, UpstreamIo};
use super::settings::UpstreamAddress;
use super::tls::TlsConnectors;
use super::{Io, NotSent};
use crate::http::socket::configure_tcp;
use crate::net::{ATTEMPT_DELAY, Names, race};

/// How long a failed endpoint is tried after all others.
const EJECTION: Duration = Duration::from_secs(10);

/// How many consecutive failures eject an endpoint.
const MAX_CONSECUTIVE_FAILURES: u32 = 3;

/// The maximum number of remembered endpoints: a name may resolve to ever new addresses.
const MAX_ENDPOINTS: usize = 1024;

/// The endpoints of an upstream.
pub(super) struct Endpoints {
    places: Vec<UpstreamAddress>,
    tls: Option<TlsConnectors>,
    turn: AtomicUsize,
    /// The endpoints that were tried.
    known: Mutex<HashMap<Address, Arc<Endpoint>>>,
}

/// The health of one address.
#[derive(Default)]
pub(super) struct Endpoint {
    /// The number of consecutive failed exchanges.
    failures: AtomicU32,
    /// The end of its ejection in milliseconds since [`epoch`]; or 0.
    ejected_until: AtomicU64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// An address to try, and the index of the configured place that it was resolved from.
struct Candidate {
    place: usize,
    address: Address,
    endpoint: Arc<Endpoint>,
}

/// A stream to an upstream that is ready for a request.
pub(super) struct Connected {
    pub(super) stream: ConnectedIo,
    pub(super) socket: Arc<SocketState>,
    pub(super) endpoint: Option<Arc<Endpoint>>,
    /// The upstream has chosen HTTP/2.
    pub(super) chose_h2: bool,
}

/// The most common kind is not boxed.
pub(super) enum ConnectedIo {
    Tcp(UpstreamIo<TcpStream>),
    Other(Box<dyn Io>),
}

impl Endpoint {
    /// It has answered.
    pub(super) fn answered(&self) {
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// An exchange with it failed.
    pub(super) fn broke_off(&self) {
        if self.failures.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_CONSECUTIVE_FAILURES {
            self.failures.store(0, Ordering::Relaxed);
            self.eject();
        }
    }

    /// Starts a probe: the endpoint must complete a step before a request can be sent.
    pub(super) fn probe(&self) -> HealthProbe<'_> {
        HealthProbe { endpoint: self, since: Instant::now(), is_finished: false }
    }

    fn eject(&self) {
        self.ejected_until.store(now() + millis(EJECTION), Ordering::Relaxed);
    }

    fn is_ejected(&self) -> bool {
        let until = self.ejected_until.load(Ordering::Relaxed);
        until != 0 && until > now()
    }
}

/// A step that an endpoint must complete. Dropping this before the end ejects the endpoint, unless the step has just
/// started.
pub(super) struct HealthProbe<'a> {
    endpoint: &'a Endpoint,
    since: Instant,
    is_finished: bool,
}

impl HealthProbe<'_> {
    /// Records the result of the step.
    pub(super) fn finish<T, E>(mut self, how: Result<T, E>) -> Result<T, E> {
        self.is_finished = true;
        match &how {
            Ok(_) => self.endpoint.ejected_until.store(0, Ordering::Relaxed),
            Err(_) => self.endpoint.eject(),
        }
        how
    }
}

impl Drop for HealthProbe<'_> {
    fn drop(&mut self) {
        // The request was cancelled, or an endpoint that started later was faster.
        if !self.is_finished && self.since.elapsed() >= ATTEMPT_DELAY {
            self.endpoint.eject();
        }
    }
}

fn epoch() -> Instant {
    static EPOCH: LazyLock<Instant> = LazyLock::new(Instant::now);
    *EPOCH
}

fn now() -> u64 {
    // 0 stands for never.
    millis(epoch().elapsed()) + 1
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Endpoints {
    pub(super) fn new(places: Vec<UpstreamAddress>, tls: Option<TlsConnectors>) -> Self {
        Self { places, tls, turn: AtomicUsize::new(0), known: Mutex::default() }
    }

    /// Opens a stream to one of the addresses: to the one whose turn it is, and to the others as far as those before them
    /// fail or are slow. An error is that of the first that failed.
    pub(super) async fn open(&self, with_h2: bool) -> Result<Connected, NotSent> {
        let (candidates, is_complete) = self.candidates(Some(ATTEMPT_DELAY)).await?;
        match self.open_first(&candidates, with_h2).await {
            // The names that were left out may lead somewhere.
            Err(_) if !is_complete => self.open_first(&self.candidates(None).await?.0, with_h2).await,
            opened => opened,
        }
    }

    async fn open_first(&self, candidates: &[Candidate], with_h2: bool) -> Result<Connected, NotSent> {
        if let [only] = candidates {
            return self.open_one(only, with_h2).await;
        }
        let opened =
            race(ATTEMPT_DELAY, candidates.iter(), |candidate| self.open_one(candidate, with_h2), |_| false).await;
        opened.map_err(|error| error.unwrap_or_else(|| NotSent::Connect(io::ErrorKind::AddrNotAvailable.into())))
    }

    /// The addresses in the order in which they are to be tried, and whether they are all. `patience` is as for [`resolve_all`].
    async fn candidates(&self, patience: Option<Duration>) -> Result<(Vec<Candidate>, bool), NotSent> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut addresses = Vec::new();
        let mut unknown = None;
        let (resolved, is_complete) = resolve_all(&self.places, Names::global(), patience).await;
        for (index, found) in resolved {
            match found {
                Ok(found) => addresses.extend(found.into_iter().map(|address| (index, address))),
                Err(error) => unknown = Some(error),
            }
        }
        match unknown {
            Some(error) if addresses.is_empty() => return Err(NotSent::Connect(error)),
            Some(_) | None => {}
        }
        if addresses.len() > 1 {
            let turn = turn % addresses.len();
            addresses.rotate_left(turn);
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() + addresses.len() > MAX_ENDPOINTS {
            known.clear();
        }
        let candidate = |(place, address): (usize, Address)| {
            let endpoint = Arc::clone(known.entry(address.clone()).or_default());
            Candidate { place, address, endpoint }
        };
        let mut candidates: Vec<_> = addresses.into_iter().map(candidate).collect();
        candidates.sort_by_key(|candidate| candidate.endpoint.is_ejected());
        Ok((candidates, is_complete))
    }

    async fn open_one(&self, candidate: &Candidate, with_h2: bool) -> Result<Connected, NotSent> {
        let Candidate { place, address, endpoint } = candidate;
        let probe = endpoint.probe();
        let opened = probe.finish(self.open_at(*place, address, with_h2).await)?;
        Ok(Connected { endpoint: Some(Arc::clone(endpoint)), ..opened })
    }

    async fn open_at(&self, place: usize, address: &Address, with_h2: bool) -> Result<Connected, NotSent> {
        let socket = Arc::new(SocketState::default());
        let is_secure = self.tls.is_some();
        let stream = match address {
            Address::Tcp(address) => {
                let connected = async {
                    let stream = TcpStream::connect(address).await?;
                    configure_tcp(&stream).map(|()| stream)
                };
                ConnectedIo::Tcp(stream(connected.await.map_err(NotSent::Connect)?, &socket, is_secure))
            }
            Address::Unix(path) => {
                let connected = UnixStream::connect(path).await.map_err(NotSent::Connect)?;
                ConnectedIo::Other(Box::new(stream(connected, &socket, is_secure)))
            }
        };
        let Some(tls) = &self.tls else { return Ok(Connected { stream, socket, endpoint: None, chose_h2: false }) };
        let (stream, chose_h2) = match stream {
            ConnectedIo::Tcp(stream) => tls.handshake(stream, &self.places[place], with_h2).await?,
            ConnectedIo::Other(stream) => tls.handshake(stream, &self.places[place], with_h2).await?,
        };
        Ok(Connected { stream: ConnectedIo::Other(stream), socket, endpoint: None, chose_h2 })
    }
}

fn stream<T>(inner: T, socket: &Arc<SocketState>, is_secure: bool) -> UpstreamIo<T> {
    let socket = Arc::clone(socket);
    if is_secure { UpstreamIo::encrypted(inner, socket) } else { UpstreamIo::new(inner, socket) }
}

/// The addresses of each place, and whether these are all places. With `patience`, a name that takes longer is left out once
/// another place is found.
async fn resolve_all(
    places: &[UpstreamAddress],
    names: &Arc<Names>,
    patience: Option<Duration>,
) -> (Vec<(usize, io::Result<Vec<Address>>)>, bool) {
    let one = async |(index, place)| (index, resolve(place, names).await);
    let mut resolving: FuturesUnordered<_> = places.iter().enumerate().map(one).collect();
    let mut all: Vec<(usize, io::Result<Vec<Address>>)> = Vec::new();
    let since = Instant::now();
    loop {
        let is_any_found = all.iter().any(|(_, found)| found.is_ok());
        tokio::select! {
            biased;
            found = resolving.next() => match found {
                Some(found) => all.push(found),
                None => break,
            },
            () = sleep_until(since + patience.unwrap_or_default()), if patience.is_some() && is_any_found => break,
        }
    }
    all.sort_by_key(|(index, _)| *index);
    (all, resolving.is_empty())
}

async fn resolve(place: &UpstreamAddress, names: &Arc<Names>) -> io::Result<Vec<Address>> {
    match place {
        UpstreamAddress::Unix(path) => Ok(vec![Address::Unix(path.clone())]),
        UpstreamAddress::Tcp { host, port } => {
            Ok(names.resolve(host, *port).await?.into_iter().map(Address::Tcp).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_endpoint_that_fails_or_is_overtaken_is_ejected() {
        let endpoint = Endpoint::default();
        drop(endpoint.probe());
        assert!(!endpoint.is_ejected());
        let probe = endpoint.probe();
        advance(ATTEMPT_DELAY).await;
        drop(probe);
        assert!(endpoint.is_ejected());
        let _ = endpoint.probe().finish::<_, ()>(Ok(()));
        assert!(!endpoint.is_ejected());
        let _ = endpoint.probe().finish::<(), _>(Err(()));
        assert!(endpoint.is_ejected());
        advance(EJECTION).await;
        assert!(!endpoint.is_ejected());
    }

    #[tokio::test]
    async fn a_name_that_hangs_is_left_out_and_an_address_is_not_looked_up() {
        let (go_on, hanging) = std::sync::mpsc::channel::<()>();
        let hanging = Mutex::new(hanging);
        let lookup = move |host: &str| match host {
            "slow.test" => hanging.lock().unwrap().recv().map(|()| Vec::new()).map_err(io::Error::other),
            "a.test" => Ok(vec![([127, 0, 0, 1], 0).into()]),
            _ => panic!("{host}"),
        };
        let names = Names::new(lookup, 2, Duration::ZERO);
        let tcp = |host: &str| UpstreamAddress::Tcp { host: host.to_owned(), port: 80 };
        let places = [tcp("slow.test"), tcp("::1"), tcp("a.test")];
        let found = async |places| {
            let (found, is_complete) = resolve_all(places, &names, Some(ATTEMPT_DELAY)).await;
            assert!(!is_complete);
            found.into_iter().map(|(index, found)| (index, found.unwrap())).collect::<Vec<_>>()
        };
        let of = |address: &str| vec![Address::Tcp(address.parse().unwrap())];
        assert_eq!(found(&places).await, [(1, of("[::1]:80")), (2, of("127.0.0.1:80"))]);
        // There is nothing else to try.
        assert!(tokio::time::timeout(2 * ATTEMPT_DELAY, found(&places[..1])).await.is_err());
        // Where the others cannot be connected to, it is waited for after all.
        let all = tokio::spawn(async move { resolve_all(&places, &names, None).await });
        // Every lookup ends, also one that begins only now.
        drop(go_on);
        let (found, is_complete) = all.await.unwrap();
        assert_eq!((found.len(), is_complete), (3, true));
    }
}
