//! An upstream that settles inside its own transaction.

mod beside_gates;
mod example;
mod functions;
mod whole;

use ::tokio::runtime::{Builder, Runtime};
use oncegate::store::postgres::{Settings, migrate};

use crate::servers::{Database, prepared_database};

/// A database with the schema; nothing where PostgreSQL is missing.
#[track_caller]
fn migrated() -> Option<Database> {
    prepared_database("oncegate_migrated", |url| {
        let applied = tokio().block_on(migrate(&settings(url))).expect("it migrates");
        assert!(!applied.is_empty());
    })
}

fn settings(url: &str) -> Settings {
    Settings { servers: url.parse().expect("a URL"), tls: None, connections: Settings::FEWEST_CONNECTIONS }
}

fn tokio() -> Runtime {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// A text as SQL writes it.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
