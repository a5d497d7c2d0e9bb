//! Where the process listens: at addresses of its own, and on sockets that it inherits.

mod unix;

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use http::{Method, StatusCode};
use listenfd::ListenFd;
use rustix::net::sockopt::{set_socket_reuseaddr, socket_acceptconn};
use rustix::net::{Shutdown, listen, shutdown};
use serde_json::Value;
use tokio::net::{TcpListener, UnixListener};
use tokio::time::{Instant, timeout};

pub(super) use self::unix::SocketFile;
use super::Signals;
use super::opening::REMINDER;
use crate::admin;
use crate::cli::http_client::AdminClient;
use crate::http::socket::{Listen, Listener};
use crate::telemetry::log_throttle::LogThrottle;
use crate::tls::{self, Trust};

/// How long another process may hold the address: one that is stopping may be about to release it.
const GRACE: Duration = Duration::from_secs(2);

/// How often to look whether an address is free again.
const POLL: Duration = Duration::from_millis(200);

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 1024;

/// How long the holder of the address may take to identify itself.
const READYZ_TIMEOUT: Duration = Duration::from_secs(1);

/// Sockets that the process inherited (sd_listen_fds(3)), with their names.
#[derive(Debug, Default)]
pub(in crate::cli) struct Inherited(Vec<(String, Passed)>);

/// A socket that listens already.
#[derive(Debug)]
pub(super) enum Passed {
    Tcp(StdListener),
    Unix(StdUnixListener),
}

/// Where a listener's socket comes from.
#[derive(Debug)]
pub(super) enum Source {
    /// It is to be bound.
    Address(SocketAddr),
    /// It is to be bound to this path.
    Unix(PathBuf),
    /// It is there.
    Socket(Passed),
}

/// A listener of `[server]` that has its address, and the file of its socket, where it was made for it.
pub(super) struct Bound {
    socket: Socket,
    path: Option<SocketFile>,
}

enum Socket {
    /// It has its address, and refuses connections.
    Paused(StdListener),
    Listening(Listener),
}

impl Bound {
    /// Where it listens, for people.
    pub(super) fn place(&self) -> String {
        match (&self.path, &self.socket) {
            (Some(path), _) => path.place(),
            (None, Socket::Paused(socket)) => place_of(socket),
            (None, Socket::Listening(listener)) => listener.place(),
        }
    }

    /// Lets clients connect, where they cannot yet.
    pub(super) fn listen(self) -> anyhow::Result<(Listener, Option<SocketFile>)> {
        let listener = match self.socket {
            Socket::Paused(socket) => {
                let place = place_of(&socket);
                Listener::Tcp(resume(socket).with_context(|| cannot_listen("server", &place))?)
            }
            Socket::Listening(listener) => listener,
        };
        Ok((listener, self.path))
    }
}

fn place_of(socket: &StdListener) -> String {
    socket.local_addr().map(|address| address.to_string()).unwrap_or_default()
}

/// Refuses connections from here on. On Linux a listener that is shut down keeps its address, and listens again later. No other socket
/// gets the address meanwhile: not even one that would share it (`SO_REUSEADDR`), as this one does not.
fn pause(socket: StdListener) -> io::Result<Socket> {
    match shutdown(&socket, Shutdown::Read) {
        Ok(()) => set_socket_reuseaddr(&socket, false)?,
        // Elsewhere it goes on: clients connect, and wait.
        Err(_) => return Ok(Socket::Listening(Listener::Tcp(into_tokio(socket)?))),
    }
    Ok(Socket::Paused(socket))
}

fn resume(socket: StdListener) -> io::Result<TcpListener> {
    // Connections of a process that has just ended have the address for a minute.
    set_socket_reuseaddr(&socket, true)?;
    listen(&socket, BACKLOG)?;
    into_tokio(socket)
}

fn into_tokio(socket: StdListener) -> io::Result<TcpListener> {
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket)
}

impl Inherited {
    /// Takes those of this process. To be called before any thread is started, for it changes the environment.
    pub(super) fn take() -> Self {
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let mut names = names.split(':');
        let mut passed = ListenFd::from_env();
        let mut sockets = Vec::new();
        for place in 0..passed.len() {
            let name = names.next().unwrap_or_default().to_owned();
            let tcp = passed.take_tcp_listener(place).ok().flatten().map(Passed::Tcp);
            let socket = tcp.or_else(|| passed.take_unix_listener(place).ok().flatten().map(Passed::Unix));
            match socket.filter(Passed::listens) {
                Some(socket) => sockets.push((name, socket)),
                None => {
                    let what =
                        "what was passed here is neither a TCP socket that listens nor a unix one: it is not used";
                    tracing::warn!(name, place, "{what}");
                }
            }
        }
        Self(sockets)
    }

    /// Gives each listener what it is to have: those of a name to the one that names them, the rest to the one that takes
    /// any. The first is that of the admin listener, which has one.
    pub(super) fn share_out(mut self, admin: &Listen, server: &[Listen]) -> anyhow::Result<(Source, Vec<Source>)> {
        let named: Vec<&String> = std::iter::once(admin).chain(server).filter_map(name).collect();
        let (theirs, others) = self.0.drain(..).partition(|(own, _)| named.contains(&own));
        let (mut theirs, mut others): (Vec<(String, Passed)>, Vec<_>) = (theirs, others);
        let mut sources = |listen: &Listen, section: &str| {
            let sockets: Vec<_> = match listen {
                Listen::Address(address) => return Ok(vec![Source::Address(*address)]),
                Listen::Unix(path) => return Ok(vec![Source::Unix(path.clone())]),
                Listen::Inherited(None) => std::mem::take(&mut others),
                Listen::Inherited(Some(name)) => theirs.extract_if(.., |(own, _)| own == name).collect(),
            };
            if sockets.is_empty() {
                bail!(
                    "[{section}] listen: {listen}: no such socket was passed to this process\n  hint: start it by a socket \
                     unit whose FileDescriptorName= is the name, or write an address"
                );
            }
            Ok(sockets.into_iter().map(|(_, socket)| Source::Socket(socket)).collect())
        };
        let mut of_server = Vec::new();
        for listen in server {
            of_server.extend(sources(listen, "server")?);
        }
        let mut of_admin = sources(admin, "admin")?;
        let (Some(of_admin), None) = (of_admin.pop(), of_admin.pop()) else {
            bail!("[admin] listen: {admin}: several such sockets were passed, and the admin listener has one");
        };
        for (name, _) in others {
            tracing::warn!(name, "a socket was passed that no `listen` names: who connects to it gets no answer");
        }
        Ok((of_admin, of_server))
    }
}

fn name(listen: &Listen) -> Option<&String> {
    match listen {
        Listen::Inherited(name) => name.as_ref(),
        Listen::Address(_) | Listen::Unix(_) => None,
    }
}

impl Passed {
    fn listens(&self) -> bool {
        match self {
            Self::Tcp(socket) => socket_acceptconn(socket),
            Self::Unix(socket) => socket_acceptconn(socket),
        }
        .unwrap_or(false)
    }
}

/// The socket of a listener of `[server]`; nothing if the process was stopped while it waited for its address.
///
/// A TCP socket that the gate makes has its address now, and listens from [`Bound::listen`] on. Others listen already: their clients
/// connect, and wait.
pub(super) async fn bind_server(source: Source, mode: u32, signals: &mut Signals) -> anyhow::Result<Option<Bound>> {
    let (socket, path) = match source {
        Source::Socket(Passed::Unix(socket)) => {
            socket.set_nonblocking(true)?;
            (Some(Socket::Listening(Listener::Unix(UnixListener::from_std(socket)?))), None)
        }
        Source::Socket(Passed::Tcp(socket)) => (Some(Socket::Listening(Listener::Tcp(into_tokio(socket)?))), None),
        Source::Unix(path) => {
            let (listener, file) = unix::bind(&path, mode, signals).await?.unzip();
            (listener.map(|listener| Socket::Listening(Listener::Unix(listener))), file)
        }
        Source::Address(address) => {
            let socket = bind(address, "server", false, signals).await?;
            // One whose port the system chose would lose it.
            let held = |socket| match address.port() {
                0 => Ok(Socket::Listening(Listener::Tcp(into_tokio(socket)?))),
                _ => pause(socket),
            };
            (socket.map(held).transpose()?, None)
        }
    };
    Ok(socket.map(|socket| Bound { socket, path }))
}

/// The admin listener; nothing if the process was stopped while it waited for its address.
pub(super) async fn listen_admin(
    source: Source,
    is_encrypted: bool,
    signals: &mut Signals,
) -> anyhow::Result<Option<TcpListener>> {
    let socket = match source {
        Source::Socket(Passed::Tcp(socket)) => Some(socket),
        Source::Socket(Passed::Unix(_)) | Source::Unix(_) => {
            bail!("[admin] listen: a unix socket cannot be used here\n  hint: pass a TCP socket, or write an address")
        }
        Source::Address(address) => bind(address, "admin", is_encrypted, signals).await?,
    };
    Ok(socket.map(into_tokio).transpose()?)
}

/// A listener at this address; nothing if the process was stopped while it waited for the address.
async fn bind(
    address: SocketAddr,
    section: &str,
    is_encrypted: bool,
    signals: &mut Signals,
) -> anyhow::Result<Option<StdListener>> {
    let mut patience = Instant::now() + GRACE;
    let reminder = LogThrottle::every(REMINDER);
    loop {
        let error = match StdListener::bind(address) {
            Ok(socket) => return Ok(Some(socket)),
            Err(error) => error,
        };
        let is_taken = error.kind() == io::ErrorKind::AddrInUse;
        // What has another address may be anything: it is not asked.
        if is_taken && section == "admin" && drains(address, is_encrypted).await {
            patience = Instant::now() + GRACE;
            if reminder.due().is_some() {
                tracing::warn!(%address, "an oncegate that drains has the admin address; waiting for it to end");
            }
        } else if !is_taken || Instant::now() >= patience {
            let hint =
                if is_taken && address.ip().is_unspecified() { shared_port(address.port()) } else { String::new() };
            return Err(error).with_context(|| cannot_listen(section, &address.to_string()) + &hint);
        }
        if timeout(POLL, signals.stop()).await.is_ok() {
            return Ok(None);
        }
    }
}

/// A listener on every IPv6 address has those of IPv4 too, unless the system says otherwise (ipv6(7), `IPV6_V6ONLY`).
fn shared_port(port: u16) -> String {
    format!("; if both are listed, leave out 0.0.0.0:{port}: [::]:{port} has every IPv4 address too")
}

fn cannot_listen(section: &str, place: &str) -> String {
    let flag = if section == "admin" { "--admin" } else { "--listen" };
    format!("[{section}] listen: cannot listen on {place}; {flag} ADDR gives another one")
}

/// Whether an oncegate has this address that drains, and is about to end. One that demands a certificate does not say.
async fn drains(address: SocketAddr, is_encrypted: bool) -> bool {
    let asking = async {
        // Any certificate will do: the request has nothing secret, and the answer only makes this process wait.
        let anybody = || tls::client(Trust::Anybody, None).ok().map(Arc::new);
        let tls = if is_encrypted { anybody() } else { None };
        let client = AdminClient::new(&address.to_string(), None, tls).ok()?;
        let (status, body) = client.exchange_within(READYZ_TIMEOUT, Method::GET, "/readyz", None).await.ok()?;
        let answer: Value = serde_json::from_slice(&body).ok()?;
        Some(status == StatusCode::SERVICE_UNAVAILABLE && answer["reason"] == admin::Phase::Draining.as_str())
    };
    asking.await.unwrap_or(false)
}

/// Holds that the admin listener, at this address, has a token where others than this machine reach it.
pub(super) fn admin_is_guarded(address: SocketAddr, settings: &admin::Settings) -> anyhow::Result<()> {
    if address.ip().to_canonical().is_loopback() || !settings.tokens.is_empty() {
        return Ok(());
    }
    bail!(
        "[admin] token_file: the admin listener is at {address}, which is not a loopback address, so the records API needs \
         a token\n  hint: name a file that holds one, here or in admin.tokens"
    )
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, TcpStream};

    use super::*;

    fn passed(names: &[&str]) -> Inherited {
        Inherited(
            names
                .iter()
                .map(|name| ((*name).to_owned(), Passed::Tcp(StdListener::bind("127.0.0.1:0").unwrap())))
                .collect(),
        )
    }

    fn address_of(socket: &Passed) -> SocketAddr {
        match socket {
            Passed::Tcp(socket) => socket.local_addr().unwrap(),
            Passed::Unix(_) => unreachable!("none was passed"),
        }
    }

    fn shared(names: &[&str], admin: &str, server: &[&str]) -> Result<(String, Vec<String>), String> {
        let listen = |text: &str| match text.strip_prefix("systemd") {
            Some("") => Listen::Inherited(None),
            Some(name) => Listen::Inherited(Some(name[1..].to_owned())),
            None => Listen::Address(text.parse().unwrap()),
        };
        let inherited = passed(names);
        let known: Vec<_> = inherited.0.iter().map(|(name, socket)| (address_of(socket), name.clone())).collect();
        let server: Vec<_> = server.iter().map(|text| listen(text)).collect();
        let (admin, server) = inherited.share_out(&listen(admin), &server).map_err(|error| error.to_string())?;
        let show = |source: &Source| match source {
            Source::Address(address) => address.to_string(),
            Source::Unix(path) => path.display().to_string(),
            Source::Socket(socket) => {
                let address = address_of(socket);
                known.iter().find(|(known, _)| *known == address).unwrap().1.clone()
            }
        };
        Ok((show(&admin), server.iter().map(show).collect()))
    }

    /// Also where connections of a former process still have the address.
    #[tokio::test]
    async fn a_listener_that_is_paused_refuses_connections_and_keeps_its_address() {
        let former = StdListener::bind("127.0.0.1:0").unwrap();
        let address = former.local_addr().unwrap();
        let client = TcpStream::connect(address).unwrap();
        drop(former.accept().unwrap());
        drop((former, client));

        let Socket::Paused(socket) = pause(StdListener::bind(address).unwrap()).unwrap() else { panic!("it listens") };
        assert_eq!(place_of(&socket), address.to_string());
        let refused = |error: io::Result<()>| error.unwrap_err().kind();
        assert_eq!(refused(TcpStream::connect(address).map(drop)), io::ErrorKind::ConnectionRefused);
        for other in
            [address, (Ipv4Addr::UNSPECIFIED, address.port()).into(), (Ipv6Addr::UNSPECIFIED, address.port()).into()]
        {
            assert_eq!(refused(StdListener::bind(other).map(drop)), io::ErrorKind::AddrInUse, "{other}");
        }
        let listener = resume(socket).unwrap();
        let client = TcpStream::connect(address).unwrap();
        assert_eq!(listener.accept().await.unwrap().1, client.local_addr().unwrap());
    }

    #[test]
    fn each_listener_gets_its_own() {
        let ok = |admin: &str, server: &[&str]| {
            Ok((admin.to_owned(), server.iter().map(|&name| name.to_owned()).collect::<Vec<_>>()))
        };
        let at = "127.0.0.1:1";
        assert_eq!(shared(&["x", "y"], at, &["systemd"]), ok(at, &["x", "y"]));
        assert_eq!(shared(&["http", "admin", "http"], "systemd:admin", &["systemd"]), ok("admin", &["http", "http"]));
        assert_eq!(shared(&["http", "rest"], "systemd", &["systemd:http"]), ok("rest", &["http"]));
        assert_eq!(shared(&["a", "b"], at, &["systemd:b", "127.0.0.1:2"]), ok(at, &["b", "127.0.0.1:2"]));
        assert_eq!(shared(&["unused"], at, &["127.0.0.1:2"]), ok(at, &["127.0.0.1:2"]));
    }

    #[test]
    fn what_is_missing_or_too_much_is_said() {
        let at = "127.0.0.1:1";
        for (names, admin, server) in [
            (&[][..], at, "systemd"),
            (&["x"], at, "systemd:y"),
            (&["x"], "systemd:y", "systemd"),
            (&["a", "a", "x"], "systemd:a", "systemd"),
        ] {
            let error = shared(names, admin, &[server]).unwrap_err();
            assert!(error.contains("] listen: systemd"), "{error}");
        }
    }
}
