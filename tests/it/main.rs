//! The gate as its users meet it: the real binary between real sockets, judged by what each side sees.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test fails by panicking, and says why")]
#![allow(unreachable_pub, reason = "nothing reaches into a test binary")]

mod admin;
mod bad_requests;
mod cache_faults;
mod clocks;
mod commands;
mod concurrency;
mod corpus;
mod crash;
mod database_faults;
mod demo;
mod disconnect;
mod encryption;
mod explain;
mod forwarding;
mod harness;
mod history;
mod lifecycle;
mod limits;
mod migrate;
mod passthrough;
mod paths;
mod policy;
mod quickstart;
mod redis_servers;
mod redis_topologies;
mod reload;
mod replay;
mod replicas;
#[path = "../servers/mod.rs"]
mod servers;
mod store_faults;
mod storm;
mod support;
mod systemd;
mod test_servers;
mod upstream_failures;
mod upstream_settles;
mod waiting;
