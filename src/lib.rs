//! oncegate: an idempotency reverse proxy.
//!
//! `docs/architecture.md` describes the code: the map of its modules, the walk of one request, the invariants with their
//! tests, the threads, a glossary, and where to change what. Begin with `gate/driver.rs`, which says in order what happens to
//! a request, and [`idempotency::protocol`], which decides it.
//!
//! # The promise
//!
//! For one claim, at most one attempt starts. Nothing is forwarded before its claim is durable, and no answer to a
//! protected request is complete before it is durable, with one exception that is said in its header (`unrecorded`).
//! How durable, the store decides: [`store::redis`] and [`store::memory`] may forget what they acknowledged, and are
//! outside the promise.

pub mod admin;
pub mod cli;
pub mod config;
pub mod consumers;
pub mod gate;
pub mod http;
pub mod idempotency;
pub mod net;
pub mod route;
pub mod store;
pub mod telemetry;
pub mod tls;
pub mod worker;
