//! The gate as its users meet it: the real binary between real sockets, judged by what each side sees.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test fails by panicking, and says why")]
#![allow(unreachable_pub, reason = "nothing reaches into a test binary")]

mod admin;
mod bad_requests;
mod commands;
mod concurrency;
mod crash;
mod demo;
mod disconnect;
mod encryption;
mod explain;
mod forwarding;
mod harness;
mod lifecycle;
mod limits;
mod migrate;
mod passthrough;
mod policy;
mod quickstart;
mod replay;
#[path = "../servers/mod.rs"]
mod servers;
mod store_faults;
mod support;
mod test_servers;
mod upstream_failures;
mod waiting;
