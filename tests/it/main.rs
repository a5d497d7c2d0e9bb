//! The gate as its users meet it: the real binary between real sockets, judged by what each side sees.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test fails by panicking, and says why")]
#![allow(unreachable_pub, reason = "nothing reaches into a test binary")]

mod admin;
mod bad_requests;
mod browser;
mod cache_faults;
mod callers;
mod clocks;
mod commands;
mod concurrency;
mod corpus;
mod cors;
mod crash;
mod database_faults;
mod demo;
mod disconnect;
mod encryption;
mod explain;
mod forwarding;
mod grpc;
mod grpc_h2;
mod harness;
mod history;
mod http2;
mod http2_abuse;
mod identity;
mod ignored_keys;
mod incident;
mod lifecycle;
mod limits;
mod listeners;
mod matrix;
mod migrate;
mod operations;
mod outcomes_body;
mod passthrough;
mod paths;
mod policy;
mod policy_page;
mod presets;
mod reauthorize;
mod redis_servers;
mod redis_topologies;
mod reload;
mod replay;
mod replicas;
mod response_headers;
#[path = "../servers/mod.rs"]
mod servers;
mod start;
mod store_faults;
mod storm;
mod stream;
mod support;
mod systemd;
mod test_servers;
mod tokens;
mod upstream_addresses;
mod upstream_failures;
mod upstream_h2;
mod upstream_reuse;
mod upstream_revoked;
mod upstream_settles;
mod upstream_tls;
mod waiting;
