//! Where connections to an upstream open, and which of several addresses is tried first.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::{Instant, sleep};

use super::secure::Secure;
use super::settings::Place;
use super::stream::{Stream, Wire};
use super::{Io, NotSent};
use crate::http::socket::watch_over;

/// How long an address that failed is tried after all others.
const ASIDE: Duration = Duration::from_secs(10);

/// How many exchanges in a row break off before an address is set aside.
const MOST_BROKEN: u32 = 3;

/// How long a connection may take to open before the next address is tried beside it (RFC 8305, 5).
const HEAD_START: Duration = Duration::from_millis(250);

/// Most addresses that are remembered: names may resolve to others for ever.
const MOST_REMEMBERED: usize = 1024;

/// The addresses of an upstream.
pub(super) struct Origins {
    places: Vec<Place>,
    secure: Option<Secure>,
    turn: AtomicUsize,
    /// Those that connections were opened to, or were to be.
    known: Mutex<HashMap<Address, Arc<Origin>>>,
}

/// One address, and how it does.
#[derive(Default)]
pub(super) struct Origin {
    /// How many exchanges in a row broke off.
    broken: AtomicU32,
    /// Until when the others come first, in milliseconds since [`epoch`]; or 0.
    aside: AtomicU64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// An address to try, with the place in whose name.
struct Candidate {
    place: usize,
    address: Address,
    origin: Arc<Origin>,
}

/// A stream to an upstream that is ready for a request.
pub(super) struct Opened {
    pub(super) stream: Ready,
    pub(super) wire: Arc<Wire>,
    pub(super) origin: Option<Arc<Origin>>,
    /// The upstream has chosen HTTP/2.
    pub(super) chose_h2: bool,
}

/// By far the most common kind goes without a box.
pub(super) enum Ready {
    Tcp(Stream<TcpStream>),
    Other(Box<dyn Io>),
}

impl Origin {
    /// It has answered.
    pub(super) fn answered(&self) {
        if self.broken.load(Ordering::Relaxed) != 0 {
            self.broken.store(0, Ordering::Relaxed);
        }
    }

    /// An exchange with it broke off.
    pub(super) fn broke_off(&self) {
        if self.broken.fetch_add(1, Ordering::Relaxed) + 1 >= MOST_BROKEN {
            self.broken.store(0, Ordering::Relaxed);
            self.set_aside();
        }
    }

    /// Watches over something that it has to do before a request can be sent.
    pub(super) fn trial(&self) -> Trial<'_> {
        Trial { origin: self, since: Instant::now(), is_over: false }
    }

    fn set_aside(&self) {
        self.aside.store(now() + millis(ASIDE), Ordering::Relaxed);
    }

    fn is_aside(&self) -> bool {
        let until = self.aside.load(Ordering::Relaxed);
        until != 0 && until > now()
    }
}

/// Something that an address has to do. Where this is dropped before, the address is set aside, unless it has hardly begun.
pub(super) struct Trial<'a> {
    origin: &'a Origin,
    since: Instant,
    is_over: bool,
}

impl Trial<'_> {
    /// It has or has not done it.
    pub(super) fn ended<T, E>(mut self, how: Result<T, E>) -> Result<T, E> {
        self.is_over = true;
        match &how {
            Ok(_) => self.origin.aside.store(0, Ordering::Relaxed),
            Err(_) => self.origin.set_aside(),
        }
        how
    }
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        // Nobody waits for it any longer, or another was faster, and had not begun before.
        if !self.is_over && self.since.elapsed() >= HEAD_START {
            self.origin.set_aside();
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

impl Origins {
    pub(super) fn new(places: Vec<Place>, secure: Option<Secure>) -> Self {
        Self { places, secure, turn: AtomicUsize::new(0), known: Mutex::default() }
    }

    /// Opens a stream to one of the addresses: to the one whose turn it is, and to the others as far as those before them
    /// fail or are slow. An error is that of the first that failed.
    pub(super) async fn open(&self, with_h2: bool) -> Result<Opened, NotSent> {
        let candidates = self.candidates().await?;
        if let [only] = &*candidates {
            return self.open_one(only, with_h2).await;
        }
        let mut candidates = candidates.iter();
        let mut opening = FuturesUnordered::new();
        let mut first_error = None;
        loop {
            if let Some(next) = candidates.next() {
                opening.push(self.open_one(next, with_h2));
            }
            let ended = tokio::select! {
                biased;
                ended = opening.next() => ended,
                () = sleep(HEAD_START), if candidates.len() > 0 => continue,
            };
            match ended {
                Some(Ok(opened)) => return Ok(opened),
                Some(Err(error)) => _ = first_error.get_or_insert(error),
                None => {
                    let none = || NotSent::Connect(io::ErrorKind::AddrNotAvailable.into());
                    return Err(first_error.unwrap_or_else(none));
                }
            }
        }
    }

    /// All addresses, in the order in which they are to be tried.
    async fn candidates(&self) -> Result<Vec<Candidate>, NotSent> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mut addresses = Vec::new();
        let mut unknown = None;
        for (index, place) in self.places.iter().enumerate() {
            match resolve(place).await {
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
        if known.len() + addresses.len() > MOST_REMEMBERED {
            known.clear();
        }
        let candidate = |(place, address): (usize, Address)| {
            let origin = Arc::clone(known.entry(address.clone()).or_default());
            Candidate { place, address, origin }
        };
        let mut candidates: Vec<_> = addresses.into_iter().map(candidate).collect();
        candidates.sort_by_key(|candidate| candidate.origin.is_aside());
        Ok(candidates)
    }

    async fn open_one(&self, candidate: &Candidate, with_h2: bool) -> Result<Opened, NotSent> {
        let Candidate { place, address, origin } = candidate;
        let trial = origin.trial();
        let opened = trial.ended(self.open_at(*place, address, with_h2).await)?;
        Ok(Opened { origin: Some(Arc::clone(origin)), ..opened })
    }

    async fn open_at(&self, place: usize, address: &Address, with_h2: bool) -> Result<Opened, NotSent> {
        let wire = Arc::new(Wire::default());
        let is_secure = self.secure.is_some();
        let stream = match address {
            Address::Tcp(address) => {
                let connected = async {
                    let stream = TcpStream::connect(address).await?;
                    watch_over(&stream).map(|()| stream)
                };
                Ready::Tcp(stream(connected.await.map_err(NotSent::Connect)?, &wire, is_secure))
            }
            Address::Unix(path) => {
                let connected = UnixStream::connect(path).await.map_err(NotSent::Connect)?;
                Ready::Other(Box::new(stream(connected, &wire, is_secure)))
            }
        };
        let Some(secure) = &self.secure else { return Ok(Opened { stream, wire, origin: None, chose_h2: false }) };
        let (stream, chose_h2) = match stream {
            Ready::Tcp(stream) => secure.begin(stream, &self.places[place], with_h2).await?,
            Ready::Other(stream) => secure.begin(stream, &self.places[place], with_h2).await?,
        };
        Ok(Opened { stream: Ready::Other(stream), wire, origin: None, chose_h2 })
    }
}

fn stream<T>(inner: T, wire: &Arc<Wire>, is_secure: bool) -> Stream<T> {
    let wire = Arc::clone(wire);
    if is_secure { Stream::encrypted(inner, wire) } else { Stream::new(inner, wire) }
}

async fn resolve(place: &Place) -> io::Result<Vec<Address>> {
    match place {
        Place::Unix(path) => Ok(vec![Address::Unix(path.clone())]),
        Place::Tcp { host, port } => match host.parse::<IpAddr>() {
            Ok(address) => Ok(vec![Address::Tcp((address, *port).into())]),
            Err(_) => Ok(lookup_host((host.as_str(), *port)).await?.map(Address::Tcp).collect()),
        },
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_address_that_fails_or_that_others_overtake_is_set_aside() {
        let origin = Origin::default();
        drop(origin.trial());
        assert!(!origin.is_aside());
        let trial = origin.trial();
        advance(HEAD_START).await;
        drop(trial);
        assert!(origin.is_aside());
        let _ = origin.trial().ended::<_, ()>(Ok(()));
        assert!(!origin.is_aside());
        let _ = origin.trial().ended::<(), _>(Err(()));
        assert!(origin.is_aside());
        advance(ASIDE).await;
        assert!(!origin.is_aside());
    }
}
