//! Counts the records by the key that they are encrypted with, so that an operator knows when an old one may go.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::Worker;
use crate::store::PAUSE_FOR_EACH;

/// The shortest time between two counts.
const PAUSE: Duration = Duration::from_secs(15);

pub(super) async fn run(mut worker: Worker) {
    let Some(resealer) = worker.resealer.clone() else { return };
    loop {
        let (began, mut counted) = (Instant::now(), None);
        if !worker.unless_shut_down(async { counted = resealer.count().await.ok() }).await {
            return;
        }
        // The store reports its failures.
        if let Some(counted) = counted {
            worker.metrics.records_by_key().show(&counted);
        }
        let pause = async {
            tokio::select! {
                () = sleep(PAUSE.max(PAUSE_FOR_EACH * began.elapsed())) => {}
                () = resealer.count_requested() => {}
            }
        };
        if !worker.unless_shut_down(pause).await {
            return;
        }
    }
}
