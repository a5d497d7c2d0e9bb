//! oncegate: an idempotency reverse proxy.
//!
//! # The map
//!
//! | room | what it is | what it may not know |
//! |---|---|---|
//! | [`idempotency`] | the pure rules: keys, identity, fingerprints, policies, records, `decide`, `settle` | clocks, I/O, tokio |
//! | [`route`] | request head to route | stores, records |
//! | [`store`] | durable conditional storage of records | what a lease or a fingerprint means |
//! | [`tls`] | who proves what to whom on encrypted connections | files, sockets |
//! | [`telemetry`] | outcomes, metrics, logs | how an outcome came about |
//! | [`gate`] | the story of one request: route, key, fingerprint, claim, decide, act | sockets, configuration files |
//! | [`http`] | listeners, upstream connections, bodies, headers, problems | records |
//! | [`worker`] | reaper and sweeper | requests |
//! | [`admin`] | health, metrics and records API | the gate |
//! | [`config`] | files, environment and flags into settings | everything at run time |
//! | [`cli`] | the commands | - |
//!
//! Imports go one way: `main -> cli -> {config, admin, worker, gate} -> http -> {route, store, telemetry} -> {tls, idempotency}`.
//! `tests/tidy.rs` holds the allowed edges.
//!
//! # The promise
//!
//! For one claim, at most one attempt starts. Nothing is forwarded before its claim is durable, and no answer to a
//! protected request is complete before it is durable, with one exception that is said in its header (`unrecorded`).
//! How durable, the store decides: [`store::redis`] and [`store::memory`] may forget what they acknowledged, and are
//! outside the promise.
//!
//! # Invariants
//!
//! - Every write after a claim is conditional on the record still being that attempt's.
//! - Turning a record unknown does not change its attempt, so a late but known answer can still complete it.
//! - A completed record never becomes anything else; it is only removed or, past its ttl, superseded.
//! - `now` comes back from the store with the record: no decision reads the clock of this process. Only what
//!   [`store::cached`] remembers grows older by it, which can do no more than end a replay.
//! - An error whose effect is unknown is treated as if it might have happened.
//! - What is remembered of a record ([`store::cached`]), in memory or in a cache that gates share, can answer a replay or
//!   say that a key is in flight, and never grants a claim. Of a store that others write to it is remembered for a while
//!   only (`cache_max_age`); what a cache says is believed only where it is authenticated, and for no longer.
//! - When the configuration is read again another gate takes the place of the one that serves, and what goes on is shared
//!   between them: the attempts, those who wait for them, their leases and the drain. A request is answered by the gate
//!   that it came to; it claims nothing by rules of identities that are not the present ones.
//! - A record that an upstream's transaction holds is neither expired nor waited for by what others depend on.
//!
//! # Threads
//!
//! Each core has a thread with a runtime of its own ([`http::shards`]), and a connection stays on the one that it was
//! given to, with its attempts and the upstream connections that they use. The main thread accepts connections, answers
//! the admin listener, renews leases and runs the workers. SQLite has a thread that writes, one transaction for all that
//! waits, and one that looks. The connections to PostgreSQL are the main thread's: a statement carries what all the others
//! wait for, and wakes each of them once. So are those to Redis, as a store and as a cache: one to each server carries all
//! commands, in calls for all that waits, and one listens. A request waits for the cache for milliseconds only; what is
//! written to it nobody waits for.

pub mod admin;
pub mod cli;
pub mod config;
pub mod gate;
pub mod http;
pub mod idempotency;
pub mod route;
pub mod store;
pub mod telemetry;
pub mod tls;
pub mod worker;
