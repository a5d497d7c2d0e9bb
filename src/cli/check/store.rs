//! `oncegate check --store`: what a start would find in the store.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::Context as _;

use crate::cli::identity_changes;
use crate::cli::serve::durability::Durability;
use crate::config::{self, Resolved, Store as Settings};
use crate::gate::identities::IdentityRules;
use crate::store::postgres::Postgres;
use crate::store::{IdentityChange, NamespaceRules, Store, redis, sqlite};

/// What the store said.
pub(super) struct Found {
    /// For the operator, in lines.
    pub(super) text: String,
    /// Whether a start would be refused.
    pub(super) is_refused: bool,
}

/// What a store has on file, and what it risks.
#[derive(Default)]
struct Looked {
    changes: Vec<IdentityChange>,
    on_file: Vec<NamespaceRules>,
    risks: Vec<String>,
}

/// Asks the store that is configured. Changes nothing in it, and holds up no gate that uses it.
pub(super) fn ask(config: &Resolved) -> anyhow::Result<Found> {
    let rules = IdentityRules::of(&config.gate, &config.router);
    let (name, looked) = match &config.store {
        Settings::Memory => {
            let text = "store memory: it forgets all keys when the gate ends; there is nothing to ask\n".to_owned();
            return Ok(Found { text, is_refused: false });
        }
        Settings::Sqlite { path } => (format!("store sqlite, {}", path.display()), of_sqlite(path, rules)?),
        Settings::Postgres(settings) => {
            let servers = settings.servers();
            (format!("store postgres, {servers}"), waited_for(of_postgres(settings, rules), &servers)?)
        }
        Settings::Redis(settings) => {
            let servers = settings.servers();
            (format!("store redis, {servers}"), waited_for(of_redis(settings, rules), &servers)?)
        }
    };
    Ok(match looked {
        Some(looked) => said(&name, looked, rules),
        None => {
            let text = format!("{name}: there is no store yet; the first start makes it\n");
            Found { text, is_refused: false }
        }
    })
}

fn said(name: &str, Looked { changes, on_file, risks }: Looked, rules: IdentityRules<'_>) -> Found {
    let is_refused = !changes.is_empty();
    let mut text = match is_refused {
        true => format!("{name}: a start would be refused: {}\n", identity_changes::report(&changes, rules, &on_file)),
        false => format!("{name}: ok, a start with this configuration forgets no live key\n"),
    };
    for risk in risks {
        let _ = writeln!(text, "{name}: risk: {risk}");
    }
    Found { text, is_refused }
}

fn of_sqlite(path: &Path, rules: IdentityRules<'_>) -> anyhow::Result<Option<Looked>> {
    let preview = sqlite::preview(path, &rules.adoption().1).context("[store] url")?;
    let risks = Durability::sqlite(path, sqlite::filesystem_warning(path)).warnings;
    Ok(preview.map(|sqlite::Preview { changes, on_file }| Looked { changes, on_file, risks }))
}

async fn of_postgres(settings: &config::Postgres, rules: IdentityRules<'_>) -> anyhow::Result<Looked> {
    let store = Postgres::open(&settings.settings).await?;
    let risks = store.description().risks();
    Ok(Looked { risks, ..look(&store, rules).await? })
}

async fn of_redis(settings: &config::Redis, rules: IdentityRules<'_>) -> anyhow::Result<Looked> {
    let store = redis::Redis::open(&redis::Settings { servers: settings.servers.clone() }).await?;
    let risks = store.description().risks();
    Ok(Looked { risks, ..look(&store, rules).await? })
}

async fn look(store: &dyn Store, rules: IdentityRules<'_>) -> anyhow::Result<Looked> {
    let (origins, identities) = rules.adoption();
    let changes = store.changes(origins, identities).await?;
    let on_file = store.identities().await?;
    store.close().await;
    Ok(Looked { changes, on_file, risks: Vec::new() })
}

fn waited_for(looking: impl Future<Output = anyhow::Result<Looked>>, servers: &str) -> anyhow::Result<Option<Looked>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(looking).map(Some).with_context(|| format!("[store] url: {servers}"))
}
