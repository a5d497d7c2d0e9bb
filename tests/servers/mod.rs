//! PostgreSQL, PgBouncer, Redis and a bad wire, for tests: real servers on free loopback ports, in directories of their
//! own, that end with the test.
//!
//! Test binaries and the library's own tests include this by its path. It knows nothing of the product.
//!
//! Where `ONCEGATE_TEST_POSTGRES` holds the URL of a superuser on a server, and `ONCEGATE_TEST_PGBOUNCER` that of a
//! pooler before it, tests that need no more than a database make theirs there (`tests/run` starts both once for all).
//! Elsewhere each process of tests starts its own.

#![allow(dead_code, unused_imports, unreachable_pub, missing_docs, reason = "each who includes this uses a part of it")]
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test fails by panicking, and says why")]

pub mod certificates;
mod database;
mod pgbouncer;
mod postgres;
pub mod process;
mod proxy;
mod redis;
mod session;

pub use database::{Database, database, prepared_database};
pub use pgbouncer::PgBouncer;
pub use postgres::Postgres;
pub use process::skipped;
pub use proxy::{Cut, Direction, Proxy};
pub use redis::{Cluster, Connection, Dump, Redis, Reply, Sentinels};
pub use session::Session;

use std::net::SocketAddr;

/// The same URL with another server's address.
pub fn at(url: &str, address: SocketAddr) -> String {
    let (scheme, rest) = url.split_once("://").expect("a URL");
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let user = authority.rsplit_once('@').map_or(String::new(), |(user, _)| format!("{user}@"));
    format!("{scheme}://{user}{address}/{path}")
}
