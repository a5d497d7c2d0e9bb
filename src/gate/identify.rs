//! The key and the fingerprint of a request whose body is held.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::SemaphorePermit;

use super::request::Head;
use super::{Gate, pass};
use crate::http::problem::Problem;
use crate::http::request_body::{BufferError, Buffered};
use crate::idempotency::fingerprint::{Body, Fingerprint, Recipe, Subject};
use crate::idempotency::key::{Found, Key};
use crate::idempotency::policy::Policy;
use crate::telemetry::outcome::Code;

/// The key that was found, and the fingerprint.
pub(super) async fn identify(
    gate: &Gate,
    policy: &Policy,
    head: &Head,
    body: &Buffered,
    found: Found,
) -> Result<(Key, Fingerprint), Problem> {
    let recipe = policy.fingerprint.clone();
    let digest = digest(gate, &recipe, head, body).await.map_err(|error| spool_problem(gate, &error))?;
    Ok((found.into_key(&digest), Fingerprint { recipe, digest }))
}

/// The whole body, to look for a key in it, and the right to have it in memory.
pub(super) async fn read_back<'a>(
    gate: &'a Gate,
    body: &Buffered,
) -> Result<(Bytes, Option<SemaphorePermit<'a>>), Problem> {
    let permit = large_body(gate, body).await;
    let whole = body.whole().await.map_err(|error| spool_problem(gate, &error))?;
    Ok((whole, permit))
}

/// The digest of a request by a recipe.
pub(super) async fn digest(gate: &Gate, recipe: &Recipe, head: &Head, body: &Buffered) -> io::Result<[u8; 32]> {
    let Head { method, uri, headers, .. } = head;
    if let Some(bytes) = body.in_memory() {
        return Ok(recipe.digest(Subject { method, uri, headers, body: Body::Whole(bytes) }));
    }
    if let Some(sha256) = body.spooled_digest()
        && !recipe.needs_whole_body(headers)
    {
        return Ok(recipe.digest(Subject { method, uri, headers, body: Body::Digest(sha256) }));
    }
    let _permit = large_body(gate, body).await;
    let whole = body.whole().await?;
    let (recipe, method, uri, headers) = (recipe.clone(), method.clone(), uri.clone(), headers.clone());
    // Large JSON takes its time, which is not to be the other requests'.
    let digesting = tokio::task::spawn_blocking(move || {
        recipe.digest(Subject { method: &method, uri: &uri, headers: &headers, body: Body::Whole(&whole) })
    });
    digesting.await.map_err(io::Error::other)
}

/// Waits for the right to read a spooled body back into memory.
async fn large_body<'a>(gate: &'a Gate, body: &Buffered) -> Option<SemaphorePermit<'a>> {
    match body.in_memory() {
        Some(_) => None,
        // It is never closed.
        None => gate.shared.large_bodies.acquire().await.ok(),
    }
}

/// Why a body could not be held.
pub(super) fn body_problem(gate: &Gate, error: BufferError) -> Problem {
    match error {
        BufferError::TooLarge { limit } => too_large(limit),
        BufferError::Malformed(error) => pass::client_body_problem(&error),
        BufferError::NoRoom => no_room(),
        BufferError::Spool(error) => spool_problem(gate, &error),
    }
}

/// The body is larger than so many bytes.
pub(super) fn too_large(limit: u64) -> Problem {
    Problem::new(Code::RequestTooLarge, format!("the body is larger than the {limit} bytes allowed here"))
}

/// The temporary file failed.
pub(super) fn spool_problem(gate: &Gate, error: &io::Error) -> Problem {
    if let Some(others) = gate.shared.unspooled.due() {
        tracing::error!(%error, others, "the temporary file of a request body failed");
    }
    no_room()
}

fn no_room() -> Problem {
    Problem::new(Code::Overloaded, "there is no room for the request's body; nothing was sent")
        .retry_after(Duration::from_secs(1))
}
