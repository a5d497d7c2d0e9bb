//! The admin listener.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::io::Errno;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::answer::{Answer, Kind, for_browsers};
use super::clients::{Client, Clients};
use super::{State, api, stats};
use crate::http::accept::encrypt;

/// How long a request's head may take to arrive, and an idle connection may stay.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a connection may live, so that clients that stop reading do not take all there are.
const CONNECTION_LIFE: Duration = Duration::from_secs(600);

/// How long requests get to finish after the shutdown.
const DRAIN: Duration = Duration::from_secs(5);

/// How long to wait after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// How many file descriptors are held for connections that come when there are no others.
const SPARES: usize = 8;

/// Serves until `shutdown` turns true or its sender goes, then finishes the requests that it has.
pub async fn serve(listener: TcpListener, state: Arc<State>, mut shutdown: watch::Receiver<bool>) {
    let (mut clients, mut connections) = (Clients::default(), JoinSet::new());
    let mut spares = Spares::of(&listener);
    let mut is_failing = false;
    // It ends when this does.
    let mut sampling = JoinSet::new();
    sampling.spawn(stats::keep_sampling(Arc::clone(&state)));
    loop {
        let accepted = tokio::select! {
            biased;
            _ = shutdown.wait_for(|down| *down) => break,
            Some(_) = connections.join_next() => {
                spares.refill(&listener);
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            // There is one now.
            Err(error) if is_for_want_of_descriptors(&error) && spares.give_up_one() => continue,
            Err(error) => {
                if !std::mem::replace(&mut is_failing, true) {
                    tracing::warn!(%error, "admin connections cannot be accepted; trying again");
                }
                if is_for_want_of_descriptors(&error) {
                    clients.close_one();
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        is_failing = false;
        let client = clients.next();
        let (state, shutdown, own) = (state.clone(), shutdown.clone(), client.clone());
        let task = connections.spawn(async move {
            let served = connection(stream, address, own, state, shutdown);
            if tokio::time::timeout(CONNECTION_LIFE, served).await.is_err() {
                tracing::debug!(client = %address, "an admin connection was closed for its age");
            }
        });
        clients.enter(client, task);
    }
    // The spares are copies of its descriptor: while one is open, the system takes connections for it.
    drop((listener, spares));
    let finish = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN, finish).await.is_err() {
        tracing::warn!("admin requests did not finish in time");
    }
}

/// File descriptors that are held so that they can be given up: those who connect to other listeners may take all.
struct Spares(Vec<OwnedFd>);

impl Spares {
    fn of(listener: &TcpListener) -> Self {
        let mut spares = Self(Vec::with_capacity(SPARES));
        spares.refill(listener);
        spares
    }

    fn refill(&mut self, listener: &TcpListener) {
        while self.0.len() < SPARES {
            let Ok(spare) = listener.as_fd().try_clone_to_owned() else { return };
            self.0.push(spare);
        }
    }

    fn give_up_one(&mut self) -> bool {
        self.0.pop().is_some()
    }
}

fn is_for_want_of_descriptors(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

async fn connection(
    stream: TcpStream,
    address: SocketAddr,
    client: Client,
    state: Arc<State>,
    mut shutdown: watch::Receiver<bool>,
) {
    let tls = state.tls.load_full();
    let Some(tls) = tls else { return exchanges(stream, address, client, state, shutdown).await };
    let encrypted = tokio::select! {
        encrypted = encrypt(stream, Arc::clone(&tls.config), HEAD_TIMEOUT) => encrypted,
        _ = shutdown.wait_for(|down| *down) => return,
    };
    match encrypted {
        Ok(stream) => exchanges(stream, address, client, state, shutdown).await,
        Err(error) => tracing::debug!(client = %address, %error, "a handshake with the admin listener failed"),
    }
}

async fn exchanges<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    stream: S,
    address: SocketAddr,
    client: Client,
    state: Arc<State>,
    mut shutdown: watch::Receiver<bool>,
) {
    let service = service_fn(|request: Request<Incoming>| {
        let (state, client) = (state.clone(), client.clone());
        client.asks();
        let changes = api::may_change(&request);
        let asking = client.clone();
        let answer = async move { api::answer(&state, request, address, &asking).await };
        async move {
            let answer = if changes { detached(answer).await } else { attached(answer).await };
            client.answered();
            Ok::<_, Infallible>(for_browsers(answer))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        _ = shutdown.wait_for(|down| *down) => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(client = %address, %error, "an admin connection broke");
    }
}

/// Runs as a task of its own: a client that goes away must not separate a change from its audit line.
async fn detached(answer: impl Future<Output = Answer> + Send + 'static) -> Answer {
    tokio::spawn(answer).await.unwrap_or_else(|_| defect())
}

/// Runs as part of its connection: a client that goes away calls it off.
async fn attached(answer: impl Future<Output = Answer>) -> Answer {
    // Nothing of the answer is looked at after a panic; what it shares with others is behind locks of its own.
    AssertUnwindSafe(answer).catch_unwind().await.unwrap_or_else(|_| defect())
}

/// A defect in one answer does not take the connection with it.
fn defect() -> Answer {
    Kind::Internal.because("this is a defect of oncegate; its log says where").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_answer() {
        for answer in [detached(async { panic!("on purpose") }).await, attached(async { panic!("on purpose") }).await] {
            assert_eq!(answer.status(), http::StatusCode::INTERNAL_SERVER_ERROR);
        }
    }
}
