//! The real code of the gate in a made-up world: paused time, seeded chance, several gates on one store.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by panicking, and says why")]
#![allow(unreachable_pub, missing_docs, reason = "nothing reaches into a test binary")]

mod books;
mod check;
mod client;
mod dice;
mod history;
mod life;
mod link;
mod mutant;
mod mutants;
mod pipe;
mod report;
mod seeds;
mod setup;
mod tally;
mod upstream;
mod wire;
mod world;
