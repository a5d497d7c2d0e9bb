//! What a killed process leaves.

use std::io::{BufRead, BufReader};

use super::*;

/// The process that the next test kills: works on the file that the environment names, and tells what is acknowledged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run by a_killed_process_loses_no_acknowledged_write"]
async fn victim() {
    let Some(path) = std::env::var_os("ONCEGATE_TEST_VICTIM") else { return };
    let store = Arc::new(open(Path::new(&path)));
    let first = store.scan(Filter::default(), None, usize::MAX).await.unwrap().records.len() as u16;
    let tasks = (0..4).map(|task| {
        let store = store.clone();
        tokio::spawn(async move {
            for number in (first + task..).step_by(4) {
                store.claim(id(number), fresh(number)).await.unwrap();
                println!("claimed {number}");
                // Large enough that the log is copied into the database now and then.
                let end = complete(Bytes::from(vec![number as u8; 40_000]));
                store.settle(id(number), attempt(number), end).await.unwrap();
                println!("settled {number}");
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

#[tokio::test]
async fn a_killed_process_loses_no_acknowledged_write() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.db");
    let (mut claimed, mut settled) = (Vec::new(), Vec::new());
    for kill in 0..6_u64 {
        let mut victim = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "store::sqlite::tests::crash::victim", "--ignored", "--nocapture"])
            .env("ONCEGATE_TEST_VICTIM", &path)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines().map(Result::unwrap);
        let mut note = |line: &str| match line.split_once(' ') {
            Some(("claimed", number)) => claimed.push(number.parse::<u16>().unwrap()),
            Some(("settled", number)) => settled.push(number.parse::<u16>().unwrap()),
            _ => {}
        };
        let mut told = 0;
        while told < 20 {
            let line = lines.next().unwrap();
            told += u64::from(line.starts_with("settled"));
            note(&line);
        }
        std::thread::sleep(Duration::from_millis(kill * 37 % 150));
        victim.kill().unwrap();
        victim.wait().unwrap();
        let rest = lines.collect::<Vec<_>>();
        // The last line may be cut off.
        rest.iter().rev().skip(1).for_each(|line| note(line));

        let store = open(&path);
        for number in &claimed {
            assert!(state_of(&store, *number).await.is_some_and(|state| state != State::InFlight), "{number}");
        }
        for number in &settled {
            let record = store.get(id(*number)).await.unwrap().unwrap().record;
            assert_eq!(record.state, State::Completed);
            assert!(record.answer.unwrap().iter().all(|byte| *byte == *number as u8));
        }
        let counts = store.count().await.unwrap();
        assert_eq!(
            counts.iter().sum::<u64>(),
            store.scan(Filter::default(), None, usize::MAX).await.unwrap().records.len() as u64
        );
        store.close().await;
    }
    assert!(settled.len() > 100);
}
