//! How fast it is.

use super::*;

/// Not a test of anything: how fast it is here. Run in release mode.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn measure() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(open(&dir.path().join("a.db")));
    let answer = Bytes::from(vec![5; 400]);
    for tasks in [1_u64, 64, 256] {
        let deadline = Instant::now() + Duration::from_secs(5);
        let lanes = (0..tasks).map(|lane| {
            let (store, answer) = (store.clone(), answer.clone());
            tokio::spawn(async move {
                let mut done = 0_u64;
                while Instant::now() < deadline {
                    let mut bytes = [0; 32];
                    getrandom::fill(&mut bytes).unwrap();
                    let fresh = Fresh { head: Bytes::from_static(&[2; 120]), ..fresh(lane as u16) };
                    store.claim(RecordId(bytes), fresh).await.unwrap();
                    store.settle(RecordId(bytes), attempt(lane as u16), complete(answer.clone())).await.unwrap();
                    done += 1;
                }
                done
            })
        });
        let lanes = lanes.collect::<Vec<_>>();
        let mut done = 0;
        for lane in lanes {
            done += lane.await.unwrap();
        }
        println!("{tasks} tasks: {} claims and settles per second", done / 5);
    }
}
