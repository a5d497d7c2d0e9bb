//! An upstream that settles inside its own transaction.

mod functions;

use ::tokio::runtime::{Builder, Runtime};
use oncegate::store::postgres::{Settings, migrate};

use crate::servers::{Database, prepared_database};

/// A database with the schema; nothing where PostgreSQL is missing.
#[track_caller]
fn migrated() -> Option<Database> {
    prepared_database("oncegate_migrated", |url| {
        let servers = url.parse().expect("a URL");
        let settings = Settings { servers, tls: None, connections: Settings::FEWEST_CONNECTIONS };
        let applied = tokio().block_on(migrate(&settings)).expect("it migrates");
        assert!(!applied.is_empty());
    })
}

fn tokio() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// A text as SQL writes it.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
