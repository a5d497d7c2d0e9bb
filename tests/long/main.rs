//! What is too slow for every day: `tests/run --long` runs it, and prints what it measures.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by panicking, and says what it measured")]

#[path = "../servers/mod.rs"]
mod servers;

mod callers;
mod large_database;
mod large_table;
