//! The real code of the gate in a made-up world: paused time, seeded chance, several gates on one store.
//!
//! A seed fixes all that chance does: the policies, the clients, the faults and when each strikes. So the same seed gives
//! the same history, to the millisecond, and a failure can be looked at as often as need be:
//!
//! ```sh
//! cargo test --test sim                                                # 2,000 seeds, and every known mistake
//! ONCEGATE_SIM_SEEDS=100000 cargo test --release --test sim seeds_hold # as many as you like
//! ONCEGATE_SIM_SEED=17 cargo test --test sim -- --exact --nocapture seeds::odd_seeds_hold   # one, told in full
//! ```
//!
//! What gates ask of their store in a run is asked again of PostgreSQL, directly and through PgBouncer, and of Redis, where
//! these are installed: each must say the same to each call.
//!
//! | module | what it is |
//! |---|---|
//! | [`world`] | a run: it begins gates, sends clients, strikes with faults, calms down, and asks every gate for every key |
//! | [`life`] | one life of a gate, and its death; a gate that comes back is another on the same store |
//! | [`link`], [`books`], [`mutant`] | the way to the store, what happens there, and the store itself, true or wrong |
//! | [`remote`], [`believer`] | the cache that gates share, and such a cache believed wrongly |
//! | [`pipe`], [`wire`] | connections in memory that stall, break and are cut; HTTP/1.1 on them |
//! | [`client`], [`upstream`] | the two sides of the gates |
//! | [`setup`], [`dice`] | routes and policies, some of which accept requests for later; chance |
//! | [`history`] | what happened, in order |
//! | [`ledger`] | what the store was asked, and what it said |
//! | [`check`] | what must hold of a history: pure, and tested by histories told by hand |
//! | [`tally`] | how often each thing worth simulating happened |
//! | [`seeds`], [`mutants`], [`report`] | the tests: the gate as it is, known mistakes, and what a failure shows |
//! | [`stage`] | the tests of other stores: ledgers are played again on them, and on stores with known mistakes |
//! | [`servers`], [`provided`] | PostgreSQL, PgBouncer and Redis, as every test of this repository has them |

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by panicking, and says why")]
#![allow(unreachable_pub, missing_docs, reason = "nothing reaches into a test binary")]

mod believer;
mod books;
mod check;
mod client;
mod dice;
mod history;
mod ledger;
mod life;
mod link;
mod mutant;
mod mutants;
mod pipe;
#[path = "../it/support/store.rs"]
#[expect(dead_code, reason = "the gates of a run have no store of this kind")]
mod provided;
mod remote;
mod report;
mod seeds;
#[path = "../servers/mod.rs"]
mod servers;
mod setup;
mod stage;
mod tally;
mod upstream;
mod wire;
mod world;
