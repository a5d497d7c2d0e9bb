//! The admin listener.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

use super::answer::{Answer, Kind};
use super::{State, api};

/// Most connections at once: each may hold a whole answer in memory.
const MAX_CONNECTIONS: usize = 128;

/// How long a request's head may take to arrive, and an idle connection may stay.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a connection may live, so that clients that stop reading do not take all there are.
const CONNECTION_LIFE: Duration = Duration::from_secs(600);

/// How long requests get to finish after the shutdown.
const DRAIN: Duration = Duration::from_secs(5);

/// How long to wait after a connection could not be accepted, which is mostly for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `shutdown` turns true or its sender goes, then finishes the requests that it has.
pub async fn serve(listener: TcpListener, state: Arc<State>, mut shutdown: watch::Receiver<bool>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            _ = shutdown.wait_for(|down| *down) => break,
            Some(_) = connections.join_next() => continue,
            accepted = accept(&listener, &slots) => accepted,
        };
        let (stream, client, slot) = accepted;
        let (state, shutdown) = (state.clone(), shutdown.clone());
        connections.spawn(async move {
            let _slot = slot;
            let served = connection(stream, client, state, shutdown);
            if tokio::time::timeout(CONNECTION_LIFE, served).await.is_err() {
                tracing::debug!(%client, "an admin connection was closed for its age");
            }
        });
    }
    drop(listener);
    let finish = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(DRAIN, finish).await.is_err() {
        tracing::warn!("admin requests did not finish in time");
    }
}

/// The next connection, once there is room for it.
async fn accept(listener: &TcpListener, slots: &Arc<Semaphore>) -> (TcpStream, SocketAddr, OwnedSemaphorePermit) {
    let slot = slots.clone().acquire_owned().await.expect("the semaphore is never closed");
    let mut said = false;
    loop {
        match listener.accept().await {
            Ok((stream, client)) => return (stream, client, slot),
            Err(error) => {
                if !std::mem::replace(&mut said, true) {
                    tracing::warn!(%error, "admin connections cannot be accepted; trying again");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection(stream: TcpStream, client: SocketAddr, state: Arc<State>, mut shutdown: watch::Receiver<bool>) {
    let service = service_fn(|request| {
        let state = state.clone();
        let changes = api::may_change(&request);
        let answer = async move { api::answer(&state, request, client).await };
        async move { Ok::<_, Infallible>(if changes { detached(answer).await } else { attached(answer).await }) }
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
        tracing::debug!(%client, %error, "an admin connection broke");
    }
}

/// Runs as a task of its own: a client that goes away must not separate what is done from its audit line.
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
