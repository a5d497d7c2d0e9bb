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
mod pipe;
mod setup;
mod upstream;
mod wire;
mod world;

#[test]
fn slice() {
    if let Some(seed) = std::env::var("ONCEGATE_SIM_SEED").ok().map(|s| s.parse().unwrap()) {
        let run = world::run(seed, None);
        for (i, entry) in run.history.iter().enumerate() {
            println!("{i:>5} {entry}");
        }
        for violation in check::check(&run.setup, &run.history) {
            println!("{violation}");
        }
        return;
    }
    let began = std::time::Instant::now();
    let mut counts = std::collections::BTreeMap::new();
    let seeds: u64 = std::env::var("ONCEGATE_SIM_SEEDS").ok().map_or(200, |s| s.parse().unwrap());
    for seed in 0..seeds {
        let run = world::run(seed, None);
        let violations = check::check(&run.setup, &run.history);
        if let Some(first) = violations.first() {
            let n = counts.entry(first.invariant).or_insert(0);
            *n += 1;
            if *n <= 4 {
            println!("seed {seed}: {first}");
            }
        }
    }
    println!("{counts:?}");
    println!("{:?}", began.elapsed() / seeds as u32);
}
