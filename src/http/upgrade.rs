//! Upgrades: once both sides have switched protocols, bytes pass both ways until either closes.

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

/// Takes the client's side of an upgrade out of its request.
#[must_use]
pub fn of_client(request: &mut Request<Incoming>) -> OnUpgrade {
    hyper::upgrade::on(request)
}

/// Passes bytes between the two sides when both have switched.
pub fn join(client: OnUpgrade, response: &mut Response<Incoming>) {
    let upstream = hyper::upgrade::on(response);
    tokio::spawn(async move {
        let sides = async { Ok::<_, hyper::Error>((client.await?, upstream.await?)) };
        match sides.await {
            Ok((client, upstream)) => {
                let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
                // Either side may end it in whatever way; the other side then sees the end.
                let _ = tokio::io::copy_bidirectional(&mut client, &mut upstream).await;
            }
            Err(error) => tracing::debug!(%error, "an upgrade did not come about"),
        }
    });
}
