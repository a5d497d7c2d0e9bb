//! Quotas that gates count together.

use super::*;
use crate::idempotency::quota::{Quota, QuotaBy, QuotaId, Rate};
use crate::store::SharedQuotas;

const ID: QuotaId = QuotaId([7; 32]);

fn rate(new_keys: u32, per: Duration) -> Rate {
    Quota { new_keys, per, by: QuotaBy::Scope }.rate()
}

async fn take(quotas: &dyn SharedQuotas, id: QuotaId, rate: Rate) -> Result<(), Duration> {
    quotas.take(id, rate).expect("room").await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_gates_take_from_one_quota_what_a_gate_alone_would() {
    let Some(server) = servers::Redis::start() else { return };
    let hour = rate(100, Duration::from_secs(3600));
    let gates = [Redis::open(&settings(&server)).await.unwrap(), Redis::open(&settings(&server)).await.unwrap()];
    let quotas = gates.each_ref().map(|gate| gate.quotas().unwrap());
    let mut granted = 0;
    let wait = loop {
        match take(&*quotas[granted % 2], ID, hour).await {
            Ok(()) => granted += 1,
            Err(wait) => break wait,
        }
    };
    assert_eq!(granted, 100);
    assert!(wait <= Duration::from_secs(36), "{wait:?}");
    assert!(take(&*quotas[0], QuotaId([8; 32]), hour).await.is_ok(), "another caller");
    quotas[1].give_back(ID, hour);
    eventually("what was given back", async || take(&*quotas[0], ID, hour).await).await;
    assert!(take(&*quotas[0], ID, hour).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_whole_again_takes_no_room() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let quotas = store.quotas().unwrap();
    let before = server.run("DBSIZE").unwrap();
    take(&*quotas, ID, rate(10, Duration::from_secs(1))).await.unwrap();
    eventually("the end of the share of one key", async || {
        let now = server.run("DBSIZE").unwrap();
        if now == before { Ok(()) } else { Err(now) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_another_program_wrote_locks_nobody_out() {
    let Some(server) = servers::Redis::start() else { return };
    let store = Redis::open(&settings(&server)).await.unwrap();
    let quotas = store.quotas().unwrap();
    let second = rate(1000, Duration::from_secs(1));
    for junk in ["nonsense", "1e300", "-5", "nan", "inf"] {
        let id = QuotaId(*b"0123456789abcdef0123456789abcdef");
        server.run(&format!("SET oncegate:quota:0123456789abcdef0123456789abcdef {junk}")).unwrap();
        eventually(junk, async || take(&*quotas, id, second).await).await;
    }
}
