//! Redis says what the store of a run said.
//!
//! `ONCEGATE_SIM_SEEDS=N` plays as many more runs as N is more than the usual 2,000; `ONCEGATE_SIM_SEED=S` plays one, and
//! the crowd that begins with it.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::join_all;
use oncegate::store::redis::{self, Servers, Settings, Topology};
use tokio::runtime::{Builder, Runtime};

use super::met::Met;
use super::script::scripts;
use super::{Clock, Difference, STORES, Stage};
use crate::history::EPOCH;
use crate::ledger::Line;
use crate::report::command;
use crate::seeds::{asked_for, share_of};
use crate::servers::Redis;

/// How many crowds, and how many runs alone, are played.
const CROWDS: u64 = 8;
const RUNS: u64 = 80;

/// The time that stands until it is set, as `now`.
const STOPPED: &str = "local now = tonumber(redis.call('GET', 'clock'))\n";

#[test]
fn it_says_what_was_said() {
    let Some(house) = House::open() else { return };
    let (began, mut met) = (Instant::now(), Met::default());
    let (crowds, runs) = (share_of(CROWDS), share_of(RUNS));
    let mut calls = 0;
    // Others than those that PostgreSQL is played.
    for script in scripts(2, crowds, runs) {
        let lines = script.lines();
        if asked_for().is_some() {
            println!("{script}");
            lines.iter().for_each(|line| println!("{line}"));
        }
        if let Err(difference) = house.play(&lines) {
            let command = command(script.first(), "stage::redis::it_says_what_was_said");
            panic!("{script}:\n{difference}All of it: {command}");
        }
        met.add(&lines);
        calls += lines.len();
    }
    println!("{crowds} crowds and {runs} runs, {calls} calls, say what was said, in {:.1?}\n{met}", began.elapsed());
    if asked_for().is_none() && runs >= RUNS {
        let missing = met.missing();
        assert!(missing.is_empty(), "what is played has become poor:\n{}", missing.join("\n"));
    }
}

/// A server whose clock stands, and stores on it.
struct House {
    stage: Stage,
    runtime: Runtime,
    server: Arc<Redis>,
}

impl House {
    /// Nothing where Redis is not installed.
    #[track_caller]
    fn open() -> Option<Self> {
        let server = Arc::new(Redis::start()?);
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let settings = Settings { servers: servers(&server) };
        let stores = runtime.block_on(join_all((0..STORES).map(|_| redis::Redis::with_clock(&settings, STOPPED))));
        let stores = stores.into_iter().map(|store| Arc::new(store.unwrap()) as _).collect();
        let clock = Arc::clone(&server);
        let clock = Clock::new(move |at| drop(clock.ask(&["SET", "clock", &(EPOCH + at).to_string()])));
        Some(Self { stage: Stage { stores, clock: Arc::new(clock) }, runtime, server })
    }

    /// Plays a script from the beginning.
    fn play(&self, lines: &[Line]) -> Result<(), Difference> {
        self.server.ask(&["FLUSHALL"]).status().expect("it is empty");
        // The clock's time went with the rest, and is not set again to what it was.
        self.stage.clock.set(0);
        self.stage.clock.shift(1);
        self.runtime.block_on(self.stage.play(lines))
    }
}

fn servers(server: &Redis) -> Servers {
    let address = server.address();
    let hosts = vec![(address.ip().to_string(), address.port())];
    Servers { topology: Topology::Standalone, hosts, user: None, password: None, database: 0, tls: None }
}
