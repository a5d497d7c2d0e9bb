//! The real code of the gate in a made-up world: paused time, seeded chance, several gates on one store.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by panicking, and says why")]
#![allow(unreachable_pub, missing_docs, reason = "nothing reaches into a test binary")]

mod books;
mod client;
mod dice;
mod history;
mod life;
mod link;
mod mutant;
mod pipe;
mod setup;
mod upstream;
mod wire;
mod world;

#[test]
fn slice() {
    let seed = std::env::var("ONCEGATE_SIM_SEED").ok().map_or(0, |s| s.parse().unwrap());
    let run = world::run(seed, None);
    for entry in &run.history {
        println!("{entry}");
    }
    let began = std::time::Instant::now();
    for seed in 0..100 {
        world::run(seed, None);
    }
    println!("{:?}", began.elapsed() / 100);
}
