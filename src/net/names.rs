//! The addresses of names. The system's lookup cannot be cancelled and may take half a minute, so it runs on threads of its own:
//! a name that hangs delays neither temporary files nor other names.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

/// The maximum number of lookups at a time. A name has one at most.
const MAX_LOOKUPS: usize = 32;

/// How long a lookup may take before the previous addresses of the name are used, if they are known.
const PATIENCE: Duration = Duration::from_millis(200);

/// How long the addresses of a name are kept for a lookup that hangs.
const KEPT: Duration = Duration::from_secs(30);

/// The system's lookup.
type Lookup = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// The names that are being looked up, and those that were of late.
pub struct Names {
    lookup: Box<Lookup>,
    max_lookups: usize,
    kept: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    names: HashMap<Arc<str>, Name>,
    /// The names whose lookup waits for a thread.
    queue: VecDeque<Arc<str>>,
    /// How many threads there are.
    threads: usize,
}

#[derive(Default)]
struct Name {
    pending: Option<Pending>,
    /// Its addresses, and when they were found.
    last: Option<(Arc<[SocketAddr]>, Instant)>,
}

/// A lookup that all who need the name wait for.
struct Pending {
    since: Instant,
    result: watch::Sender<Option<Found>>,
}

/// When a lookup began, its result to come, and the previous addresses.
type Joined = (Instant, watch::Receiver<Option<Found>>, Option<Arc<[SocketAddr]>>);

/// The port of each address is 0.
type Found = Result<Arc<[SocketAddr]>, Arc<io::Error>>;

impl Names {
    /// The names of this process.
    #[must_use]
    pub fn global() -> &'static Arc<Self> {
        static NAMES: LazyLock<Arc<Names>> = LazyLock::new(|| {
            let lookup = |host: &str| Ok((host, 0).to_socket_addrs()?.collect());
            Names::new(lookup, MAX_LOOKUPS, KEPT)
        });
        &NAMES
    }

    /// Those that `lookup` finds, at most so many at a time. The addresses of a name are kept so long for a lookup that hangs.
    #[must_use]
    pub fn new(
        lookup: impl Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
        max_lookups: usize,
        kept: Duration,
    ) -> Arc<Self> {
        Arc::new(Self { lookup: Box::new(lookup), max_lookups, kept, state: Mutex::default() })
    }

    /// The addresses of a name; of an address, itself. It joins the lookup that is under way for the name, or starts one.
    ///
    /// # Errors
    /// Where the system finds none.
    pub async fn resolve(self: &Arc<Self>, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        if let Ok(address) = host.parse::<IpAddr>() {
            return Ok(vec![(address, port).into()]);
        }
        let (since, mut result, last) = self.join(host)?;
        let found = async {
            let found = result.wait_for(Option::is_some).await.ok();
            found.and_then(|found| found.clone()).unwrap_or_else(|| Err(Arc::new(io::ErrorKind::Interrupted.into())))
        };
        let found = match last {
            Some(last) => timeout_at(since + PATIENCE, found).await.unwrap_or(Ok(last)),
            None => found.await,
        };
        let with_port = |address: &SocketAddr| {
            let mut address = *address;
            address.set_port(port);
            address
        };
        match found {
            Ok(addresses) => Ok(addresses.iter().map(with_port).collect()),
            Err(error) => Err(io::Error::new(error.kind(), error)),
        }
    }

    /// As [`Names::resolve`], for as long as `patience`.
    ///
    /// # Errors
    /// Also where that is over.
    pub async fn resolve_within(
        self: &Arc<Self>,
        patience: Duration,
        host: &str,
        port: u16,
    ) -> io::Result<Vec<SocketAddr>> {
        let late = |_| {
            let seconds = patience.as_secs();
            io::Error::new(
                io::ErrorKind::TimedOut,
                format!("the name {host} was still being looked up after {seconds} s; does the DNS server answer?"),
            )
        };
        timeout(patience, self.resolve(host, port)).await.map_err(late)?
    }

    /// Joins the lookup of a name, or starts one.
    fn join(self: &Arc<Self>, host: &str) -> io::Result<Joined> {
        let mut state = self.state();
        let name = state.names.get(host);
        let last = name.and_then(|name| name.last.as_ref()).filter(|(_, found)| found.elapsed() < self.kept);
        let last = last.map(|(addresses, _)| Arc::clone(addresses));
        if let Some(pending) = name.and_then(|name| name.pending.as_ref()) {
            return Ok((pending.since, pending.result.subscribe(), last));
        }
        let host: Arc<str> = host.into();
        if state.threads < self.max_lookups {
            let (names, host) = (Arc::clone(self), Arc::clone(&host));
            thread::Builder::new().name("lookup".to_owned()).spawn(move || names.run(host))?;
            state.threads += 1;
        } else {
            state.queue.push_back(Arc::clone(&host));
        }
        let (sender, result) = watch::channel(None);
        let since = Instant::now();
        state.names.entry(host).or_default().pending = Some(Pending { since, result: sender });
        Ok((since, result, last))
    }

    /// A thread: looks a name up, and then those that wait for a thread.
    fn run(&self, mut host: Arc<str>) {
        loop {
            let began = Instant::now();
            let found: Found = (self.lookup)(&host).map(Into::into).map_err(Arc::new);
            let is_slow = began.elapsed() > PATIENCE;
            let mut state = self.state();
            let name = state.names.entry(host).or_default();
            match &found {
                Ok(addresses) => name.last = Some((Arc::clone(addresses), Instant::now())),
                // The resolver gave no answer.
                Err(_) if is_slow => {}
                // A name that has no addresses any more must not be connected to where it was.
                Err(_) => name.last = None,
            }
            if let Some(pending) = name.pending.take() {
                pending.result.send_replace(Some(found));
            }
            let kept = self.kept;
            state.names.retain(|_, name| name.is_needed(kept));
            match state.queue.pop_front() {
                Some(next) => host = next,
                None => {
                    state.threads -= 1;
                    return;
                }
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Name {
    fn is_needed(&self, kept: Duration) -> bool {
        self.pending.is_some() || self.last.as_ref().is_some_and(|(_, found)| found.elapsed() < kept)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Condvar;

    use super::*;
    use futures_util::future::join_all;

    const MOMENT: Duration = Duration::from_millis(50);
    const SOON: Duration = Duration::from_secs(10);

    /// A lookup that hangs for some names, and what it was asked.
    #[derive(Default)]
    struct System {
        hanging: Mutex<HashSet<&'static str>>,
        changed: Condvar,
        asked: Mutex<Vec<String>>,
    }

    impl System {
        fn names(self: &Arc<Self>, max_lookups: usize, kept: Duration) -> Arc<Names> {
            let system = Arc::clone(self);
            let lookup = move |host: &str| {
                system.asked.lock().unwrap().push(host.to_owned());
                let hanging = system.hanging.lock().unwrap();
                drop(system.changed.wait_while(hanging, |hanging| hanging.contains(host)).unwrap());
                match host {
                    "gone.test" => Err(io::Error::new(io::ErrorKind::NotFound, "no such name")),
                    _ => Ok(vec![([127, 0, 0, 1], 0).into()]),
                }
            };
            Names::new(lookup, max_lookups, kept)
        }

        fn hang(&self, host: &'static str) {
            self.hanging.lock().unwrap().insert(host);
        }

        fn go_on(&self) {
            self.hanging.lock().unwrap().clear();
            self.changed.notify_all();
        }

        fn times_asked(&self, host: &str) -> usize {
            self.asked.lock().unwrap().iter().filter(|asked| *asked == host).count()
        }
    }

    fn home(port: u16) -> Vec<SocketAddr> {
        vec![([127, 0, 0, 1], port).into()]
    }

    #[tokio::test]
    async fn a_name_that_hangs_is_looked_up_once_and_delays_no_other() {
        let system = Arc::<System>::default();
        let names = system.names(2, Duration::ZERO);
        system.hang("slow.test");
        let all = async { join_all((0..100).map(|port| names.resolve("slow.test", port))).await };
        let mut all = std::pin::pin!(all);
        assert!(timeout(MOMENT, all.as_mut()).await.is_err());
        // Each waits no longer than it likes, and the next one joins.
        for _ in 0..10 {
            assert!(timeout(Duration::from_millis(1), names.resolve("slow.test", 1)).await.is_err());
        }
        for host in ["a.test", "b.test", "c.test"] {
            assert_eq!(timeout(SOON, names.resolve(host, 80)).await.unwrap().unwrap(), home(80));
        }
        assert_eq!(system.times_asked("slow.test"), 1);
        system.go_on();
        for (port, found) in (0..).zip(timeout(SOON, all).await.unwrap()) {
            assert_eq!(found.unwrap(), home(port));
        }
        assert_eq!(system.times_asked("slow.test"), 1);
        // Its result is not that of later ones.
        assert_eq!(names.resolve("slow.test", 1).await.unwrap(), home(1));
        assert_eq!(system.times_asked("slow.test"), 2);
    }

    #[tokio::test]
    async fn a_lookup_that_takes_too_long_is_called_one() {
        let system = Arc::<System>::default();
        let names = system.names(1, Duration::ZERO);
        system.hang("slow.test");
        let error = names.resolve_within(MOMENT, "slow.test", 1).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains("slow.test was still being looked up"), "{error}");
        assert_eq!(names.resolve_within(MOMENT, "127.0.0.1", 1).await.unwrap(), home(1));
        system.go_on();
        assert_eq!(names.resolve_within(SOON, "slow.test", 1).await.unwrap(), home(1));
    }

    #[tokio::test]
    async fn an_error_serves_all_who_wait() {
        let system = Arc::<System>::default();
        let names = system.names(1, SOON);
        system.hang("gone.test");
        let mut all = std::pin::pin!(join_all((0..3).map(|port| names.resolve("gone.test", port))));
        // All have joined.
        assert!(timeout(MOMENT, &mut all).await.is_err());
        system.go_on();
        for found in all.await {
            let error = found.unwrap_err();
            assert_eq!((error.kind(), &*error.to_string()), (io::ErrorKind::NotFound, "no such name"));
        }
        assert_eq!(system.times_asked("gone.test"), 1);
    }

    #[tokio::test]
    async fn the_previous_addresses_serve_while_a_lookup_hangs() {
        let system = Arc::<System>::default();
        let names = system.names(1, SOON);
        names.resolve("slow.test", 1).await.unwrap();
        system.hang("slow.test");
        for _ in 0..3 {
            assert_eq!(timeout(SOON, names.resolve("slow.test", 2)).await.unwrap().unwrap(), home(2));
        }
        assert_eq!(system.times_asked("slow.test"), 2);
        system.go_on();

        // Only for a while.
        let names = system.names(1, MOMENT);
        names.resolve("slow.test", 1).await.unwrap();
        system.hang("slow.test");
        tokio::time::sleep(MOMENT).await;
        assert!(timeout(2 * PATIENCE, names.resolve("slow.test", 2)).await.is_err());
        system.go_on();
    }

    #[tokio::test]
    async fn names_beyond_the_limit_take_turns_and_none_is_left_behind() {
        let system = Arc::<System>::default();
        let names = system.names(2, Duration::ZERO);
        system.hang("slow.test");
        system.hang("dull.test");
        for host in ["slow.test", "dull.test", "a.test", "b.test", "a.test"] {
            assert!(timeout(MOMENT, names.resolve(host, 1)).await.is_err());
        }
        assert_eq!((system.times_asked("a.test"), names.state().queue.len()), (0, 2));
        system.go_on();
        for host in ["a.test", "b.test"] {
            assert_eq!(timeout(SOON, names.resolve(host, 1)).await.unwrap().unwrap(), home(1));
        }
        let deadline = Instant::now() + SOON;
        while names.state().threads > 0 {
            assert!(Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let state = names.state();
        assert_eq!((state.names.len(), state.queue.len()), (0, 0));
    }
}
