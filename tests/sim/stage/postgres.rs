//! PostgreSQL says what the store of a run said, direct and through PgBouncer.
//!
//! `ONCEGATE_SIM_SEEDS=N` plays as many more runs as N is more than the usual 2,000; `ONCEGATE_SIM_SEED=S` plays one, and
//! the crowd that begins with it.

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::join_all;
use oncegate::store::Store;
use oncegate::store::postgres::{Postgres, Settings};
use tokio::runtime::{Builder, Runtime};

use super::met::Met;
use super::script::scripts;
use super::{Clock, Difference, STORES, Stage};
use crate::history::EPOCH;
use crate::ledger::Line;
use crate::provided::migrated;
use crate::report::command;
use crate::seeds::{asked_for, share_of};
use crate::servers::{Database, Session};

/// How many crowds, and how many runs alone, are played each way.
pub const CROWDS: u64 = 8;
pub const RUNS: u64 = 80;

/// Makes a database's time stand until it is set.
const STOP_CLOCK: &str = "
    CREATE TABLE clock (at bigint NOT NULL);
    INSERT INTO clock VALUES (0);
    CREATE OR REPLACE FUNCTION oncegate.now_v1() RETURNS bigint LANGUAGE sql VOLATILE
    AS 'SELECT at FROM public.clock';";

/// What a fresh store has.
const EMPTY: &str = "TRUNCATE oncegate.record, oncegate.origin, oncegate.identity, oncegate.rules_period";

#[test]
fn it_says_what_was_said() {
    hold("it_says_what_was_said", 0, Way::Direct);
}

#[test]
fn it_says_what_was_said_through_a_pooler() {
    hold("it_says_what_was_said_through_a_pooler", 1, Way::Pooled);
}

/// How the server is reached.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Direct,
    Pooled,
}

fn hold(test: &str, nth: u64, way: Way) {
    let Some(house) = House::open(way) else { return };
    let (began, mut met) = (Instant::now(), Met::default());
    let (crowds, runs) = (share_of(CROWDS), share_of(RUNS));
    let mut calls = 0;
    for script in scripts(nth, crowds, runs) {
        let lines = script.lines();
        if asked_for().is_some() {
            println!("{script}");
            lines.iter().for_each(|line| println!("{line}"));
        }
        if let Err(difference) = house.play(&lines) {
            let command = command(script.first(), &format!("stage::postgres::{test}"));
            panic!("{script}:\n{difference}All of it: {command}");
        }
        met.add(&lines);
        calls += lines.len();
    }
    met.carry(house.closed());
    println!("{crowds} crowds and {runs} runs, {calls} calls, say what was said, in {:.1?}\n{met}", began.elapsed());
    if asked_for().is_none() && runs >= RUNS {
        let missing = met.missing();
        assert!(missing.is_empty(), "what is played has become poor:\n{}", missing.join("\n"));
    }
}

/// A database whose clock stands, and stores on it.
pub struct House {
    stage: Stage,
    session: Arc<Session>,
    runtime: Runtime,
    database: Database,
}

impl House {
    /// Nothing where PostgreSQL, or the pooler on the way, is not installed.
    #[track_caller]
    pub fn open(way: Way) -> Option<Self> {
        let database = migrated()?;
        let url = match way {
            Way::Direct => database.url.clone(),
            Way::Pooled => database.pooled_url()?,
        };
        database.run(STOP_CLOCK);
        // The server counts the calls of functions.
        database.run(&format!("ALTER DATABASE \"{}\" SET track_functions = 'pl'", database.name));
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let settings = Settings { servers: url.parse().unwrap(), tls: None, connections: Settings::USUAL_CONNECTIONS };
        let stores = runtime.block_on(join_all((0..STORES).map(|_| Postgres::open(&settings))));
        let stores = stores.into_iter().map(|store| {
            let store = store.unwrap();
            assert_eq!(store.description().is_direct, way == Way::Direct);
            Arc::new(store) as _
        });
        let stores = stores.collect();
        let session = Arc::new(database.session());
        let clock = Arc::clone(&session);
        let clock = Clock::new(move |at| drop(clock.run(&format!("UPDATE clock SET at = {}", EPOCH + at))));
        Some(Self { stage: Stage { stores, clock: Arc::new(clock) }, session, runtime, database })
    }

    /// Puts other stores before those that there are.
    pub fn with(mut self, before: impl Fn(Arc<dyn Store>, Arc<Clock>) -> Arc<dyn Store>) -> Self {
        for store in &mut self.stage.stores {
            *store = before(Arc::clone(store), Arc::clone(&self.stage.clock));
        }
        self
    }

    /// Plays a script from the beginning.
    pub fn play(&self, lines: &[Line]) -> Result<(), Difference> {
        self.session.run(EMPTY);
        self.runtime.block_on(self.stage.play(lines))
    }

    /// How many statements there were for claims and for endings, at the end of all.
    fn closed(self) -> [u32; 2] {
        self.runtime.block_on(join_all(self.stage.stores.iter().map(|store| store.close())));
        // A process of the server gives its counts when it ends.
        self.session.run(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
             WHERE datname = current_database() AND pid <> pg_backend_pid()",
        );
        let calls = |function: &str| {
            let calls = format!("SELECT calls FROM pg_stat_user_functions WHERE funcname = '{function}'");
            self.database.value(&calls).parse().unwrap()
        };
        [calls("claim_v1"), calls("settle_v1")]
    }
}
