//! `oncegate check --store`: what a start would find in the store.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::timeout;

use crate::cli::databases;
use crate::cli::identity_changes::{self, Forgotten, Occasion, Written};
use crate::cli::serve::durability::Durability;
use crate::config::{self, Resolved, Store as Settings};
use crate::gate::coverage::Coverage;
use crate::gate::identities::IdentityRules;
use crate::store::postgres::Postgres;
use crate::store::sealed::{Keeper, Keyring, Sealed};
use crate::store::{Listed, NamespaceRules, Store, redis, sqlite};

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
    forgotten: Forgotten,
    on_file: Vec<NamespaceRules>,
    is_unannounced: bool,
    /// How many records are encrypted with a key that is not configured; `None` where there are too many to look at.
    locked: Option<u64>,
    risks: Vec<String>,
}

/// How long to look for records whose key is not configured.
const PATIENCE: Duration = Duration::from_secs(30);

/// What is wrong with records that are encrypted with another key, and what to do.
const LOCKED: &str = "`store.encryption_keys` does not have: their retries get 503 until it does";

/// Asks the store that is configured. Changes nothing in it, and holds up no gate that uses it.
pub(super) fn ask(config: &Resolved) -> anyhow::Result<Found> {
    let rules = IdentityRules::of(&config.gate, &config.router);
    let keys = Arc::new(Keyring::new(config.sealing.clone()));
    let (name, looked) = match &config.store {
        Settings::Memory => {
            let text = "store memory: it forgets all keys when the gate ends; there is nothing to ask\n".to_owned();
            return Ok(Found { text, is_refused: false });
        }
        Settings::Sqlite { path } => (format!("store sqlite, {}", path.display()), of_sqlite(path, rules, &keys)?),
        Settings::Postgres(settings) => {
            let servers = settings.servers();
            (format!("store postgres, {servers}"), waited_for(of_postgres(settings, rules, keys), &servers)?)
        }
        Settings::Databases(settings) => {
            let servers = settings.iter().map(config::Postgres::servers).collect::<Vec<_>>().join(" and ");
            (format!("store postgres, {servers}"), waited_for(of_databases(settings, rules, keys), &servers)?)
        }
        Settings::Redis(settings) => {
            let servers = settings.servers();
            (format!("store redis, {servers}"), waited_for(of_redis(settings, rules, keys), &servers)?)
        }
    };
    Ok(match looked {
        Some(looked) => said(&name, looked, rules, &Written::of(config)),
        None => {
            let text = format!("{name}: there is no store yet; the first start makes it\n");
            Found { text, is_refused: false }
        }
    })
}

fn said(name: &str, looked: Looked, rules: IdentityRules<'_>, written: &Written) -> Found {
    let Looked { forgotten, on_file, is_unannounced, locked, risks } = looked;
    let is_refused = is_unannounced || !forgotten.is_nothing();
    let mut text = match is_refused {
        true if is_unannounced => format!("{name}: a start would be refused: {}\n", identity_changes::UNANNOUNCED),
        true => {
            let report = identity_changes::report(&forgotten, rules, &on_file, written, Occasion::Start);
            format!("{name}: a start would be refused: {report}\n")
        }
        false => format!("{name}: ok, a start with this configuration forgets no live key\n"),
    };
    match locked {
        Some(0) => {}
        Some(1) => text += &format!("{name}: 1 record is encrypted with a key that {LOCKED}\n"),
        Some(count) => text += &format!("{name}: {count} records are encrypted with a key that {LOCKED}\n"),
        None => {
            text += &format!(
                "{name}: not all records were looked at within {} s: whether each of their keys is configured, \
            oncegate_records_by_key of a running gate says\n",
                PATIENCE.as_secs()
            )
        }
    }
    let is_refused = is_refused || locked.is_some_and(|count| count > 0);
    for risk in risks {
        let _ = writeln!(text, "{name}: risk: {risk}");
    }
    Found { text, is_refused }
}

fn of_sqlite(path: &Path, rules: IdentityRules<'_>, keys: &Keyring) -> anyhow::Result<Option<Looked>> {
    let preview = sqlite::preview(path, &rules.adoption().1).context("[store] url")?;
    let risks = Durability::sqlite(path, sqlite::filesystem_warning(path)).warnings;
    let Some(preview) = preview else { return Ok(None) };
    let mut coverage = Coverage::of(rules, &preview.on_file);
    let (is_changed, mut locked) = (coverage.is_changed(), 0);
    let look = |listed: Listed| {
        locked += u64::from(keys.lacks_key_of(&listed.record.head));
        if is_changed {
            coverage.look_at(&keys.open_listed(listed, |_| ()));
        }
    };
    preview.for_each(look).context("[store] url")?;
    let forgotten = Forgotten { changes: preview.changes, lost: coverage.finish() };
    // Only one process opens the file: none has to hear of a secret.
    Ok(Some(Looked { forgotten, on_file: preview.on_file, is_unannounced: false, locked: Some(locked), risks }))
}

async fn of_postgres(
    settings: &config::Postgres,
    rules: IdentityRules<'_>,
    keys: Arc<Keyring>,
) -> anyhow::Result<Looked> {
    let store = Postgres::open(&settings.settings).await?;
    let risks = store.description().risks();
    Ok(Looked { risks, ..look(store, rules, keys).await? })
}

async fn of_databases(
    settings: &[config::Postgres],
    rules: IdentityRules<'_>,
    keys: Arc<Keyring>,
) -> anyhow::Result<Looked> {
    let wrap = |store: Postgres, _| Arc::new(store) as Arc<dyn Store>;
    let opened = databases::open(settings.to_vec(), Box::new(wrap), Box::new(|_, _| ())).await?;
    let risks = Durability::databases(&opened.databases, 0).warnings;
    Ok(Looked { risks, ..look(opened.store, rules, keys).await? })
}

async fn of_redis(settings: &config::Redis, rules: IdentityRules<'_>, keys: Arc<Keyring>) -> anyhow::Result<Looked> {
    let store = redis::Redis::open(&redis::Settings { servers: settings.servers.clone() }).await?;
    let risks = store.description().risks();
    Ok(Looked { risks, ..look(store, rules, keys).await? })
}

async fn look(store: impl Store, rules: IdentityRules<'_>, keys: Arc<Keyring>) -> anyhow::Result<Looked> {
    let store: Arc<dyn Store> = Arc::new(store);
    let keeper = Keeper::new(Arc::clone(&store), Arc::clone(&keys), Arc::clone(rules.service()));
    let store = Sealed::new(store, keys, Arc::clone(rules.service()), |_, _| ());
    let (origins, identities) = rules.adoption();
    let changes = store.changes(origins, identities).await?;
    let lost = identity_changes::look_for_lost(&store, rules).await?;
    let on_file = store.identities().await?;
    let locked = match timeout(PATIENCE, keeper.count()).await {
        Ok(counted) => Some(counted?.missing),
        Err(_) => None,
    };
    store.close().await;
    let is_unannounced = identity_changes::is_unannounced(&on_file, rules);
    Ok(Looked { forgotten: Forgotten { changes, lost }, on_file, is_unannounced, locked, risks: Vec::new() })
}

fn waited_for(looking: impl Future<Output = anyhow::Result<Looked>>, servers: &str) -> anyhow::Result<Option<Looked>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(looking).map(Some).with_context(|| format!("[store] url: {servers}"))
}
