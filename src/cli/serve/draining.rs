//! The end of what runs.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

use super::LAST_WORDS;
use super::signals::Signals;
use crate::gate::Gate;

/// How long the last answers may take to be written.
const WRITING: Duration = Duration::from_millis(100);

/// Waits for what runs, no longer than `patience` and until the next signal to stop. Then it ends it, and gives clients that wait
/// an answer.
pub(super) async fn drain(gate: &Gate, servers: &mut JoinSet<()>, patience: Duration, signals: &mut Signals) {
    let over = async {
        if timeout(patience, signals.stop_again()).await.is_ok() {
            tracing::warn!(running = gate.running(), "stop signal during the drain: exiting now");
        }
    };
    tokio::pin!(over);
    let connections = async {
        all_ended(servers).await;
        gate.tunnels_ended().await;
    };
    let is_over = tokio::select! {
        () = connections => false,
        () = &mut over => true,
    };
    let owes_answers = is_over && gate.owes_answers();
    // An attempt that no client waits for runs on when all connections have ended.
    let has_ended = if is_over { gate.drain(std::future::ready(())).await } else { gate.drain(over).await };
    match gate.running() {
        _ if has_ended => {}
        0 => tracing::warn!("attempts that did not end in time are recorded as unknown"),
        _ => tracing::error!(
            "some requests have not ended: where the store does not answer, the ends of their attempts are not recorded, and \
             their records turn unknown when their leases end"
        ),
    }
    if owes_answers || !has_ended {
        // Their clients get one now. Streams, and what clients have yet to send, may go on for ever.
        let given = async {
            while gate.owes_answers() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            tokio::time::sleep(WRITING).await;
        };
        tokio::select! {
            () = all_ended(servers) => {}
            _ = timeout(LAST_WORDS, given) => {}
        }
    }
}

async fn all_ended(servers: &mut JoinSet<()>) {
    while servers.join_next().await.is_some() {}
}
