//! Takes in an upstream's answer whole, as far as it may be kept.

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body as _, Frame};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

use super::body::Sender;

/// An answer's body as far as it was taken in.
pub enum Captured {
    /// All of it.
    Whole {
        /// Its bytes.
        body: Bytes,
        /// The trailers that followed it.
        trailers: Option<HeaderMap>,
    },
    /// It is larger than may be kept.
    TooLarge(Rest),
}

/// A body that was taken in in part.
pub struct Rest {
    prefix: Bytes,
    incoming: Incoming,
}

/// Reads a body to its end, or until it is larger than `limit` bytes.
pub async fn capture(mut incoming: Incoming, limit: u64) -> hyper::Result<Captured> {
    let announced = incoming.size_hint().lower();
    if announced > limit {
        return Ok(Captured::TooLarge(Rest { prefix: Bytes::new(), incoming }));
    }
    let mut first: Option<Bytes> = None;
    let mut memory = BytesMut::new();
    let mut trailers = None;
    let mut length = 0;
    while let Some(frame) = incoming.frame().await {
        let data = match frame?.into_data() {
            Ok(data) => data,
            Err(frame) => {
                trailers = frame.into_trailers().ok();
                continue;
            }
        };
        length += data.len() as u64;
        // Most bodies come in one frame, which then needs no copy.
        if first.is_none() && memory.is_empty() {
            first = Some(data);
        } else {
            if let Some(first) = first.take() {
                memory.reserve(usize::try_from(announced).unwrap_or(0).max(first.len() + data.len()));
                memory.extend_from_slice(&first);
            }
            memory.extend_from_slice(&data);
        }
        if length > limit {
            let prefix = first.unwrap_or_else(|| memory.freeze());
            return Ok(Captured::TooLarge(Rest { prefix, incoming }));
        }
    }
    Ok(Captured::Whole { body: first.unwrap_or_else(|| memory.freeze()), trailers })
}

impl Rest {
    /// Sends all of the body on: to `client` while that is there, then nowhere, so that the upstream is read to its
    /// end either way.
    pub async fn relay(mut self, client: Sender) -> hyper::Result<()> {
        let mut client = Some(client);
        if !self.prefix.is_empty() {
            deliver(&mut client, Frame::data(std::mem::take(&mut self.prefix))).await;
        }
        while let Some(frame) = self.incoming.frame().await {
            deliver(&mut client, frame?).await;
        }
        if let Some(client) = client {
            client.finish().await;
        }
        Ok(())
    }
}

async fn deliver(client: &mut Option<Sender>, frame: Frame<Bytes>) {
    if let Some(sender) = client
        && sender.send(frame).await.is_err()
    {
        *client = None;
    }
}
