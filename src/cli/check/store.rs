//! `oncegate check --store`: what a start would find in the store.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;

use crate::cli::identity_changes::{self, Forgotten, Occasion, Written};
use crate::cli::serve::durability::Durability;
use crate::cli::serve::missing_keys;
use crate::cli::{block_on, databases};
use crate::config::{self, Resolved, Store as Settings};
use crate::gate::identity::IdentityRules;
use crate::gate::identity::coverage::Coverage;
use crate::store::postgres::Postgres;
use crate::store::sealed::{Keyring, Locked, Pace, Resealer, Sealed};
use crate::store::{NamespaceRules, RecordEntry, Store, redis, sqlite};

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
    locked: Locked,
    risks: Vec<String>,
}

/// How long to look for records whose key is not configured.
const PATIENCE: Duration = Duration::from_secs(30);

/// Asks the store that is configured. Changes nothing in it, and holds up no gate that uses it.
pub(super) fn ask(config: &Resolved) -> anyhow::Result<Found> {
    let rules = IdentityRules::of(&config.gate, &config.router);
    let keys = Arc::new(Keyring::new(config.sealing.clone()));
    let source = config.store_places.url();
    let (name, looked) = match &config.store {
        Settings::Memory => {
            let text = "store memory: it forgets all keys when the gate ends; there is nothing to ask\n".to_owned();
            return Ok(Found { text, is_refused: false });
        }
        Settings::Sqlite { path } => {
            (format!("store sqlite, {}", path.display()), of_sqlite(path, rules, &keys).context(source)?)
        }
        Settings::Postgres(settings) => {
            let servers = settings.servers();
            (format!("store postgres, {servers}"), waited_for(of_postgres(settings, rules, keys), &servers, &source)?)
        }
        Settings::Databases(settings) => {
            let servers = settings.iter().map(config::Postgres::servers).collect::<Vec<_>>().join(" and ");
            (format!("store postgres, {servers}"), waited_for(of_databases(settings, rules, keys), &servers, &source)?)
        }
        Settings::Redis(settings) => {
            let servers = settings.servers();
            (format!("store redis, {servers}"), waited_for(of_redis(settings, rules, keys), &servers, &source)?)
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
    let missing = missing_keys::in_words(&locked);
    let is_refused = is_unannounced || !forgotten.is_nothing();
    let mut text = match is_refused {
        true if is_unannounced => format!("{name}: a start would be refused: {}\n", identity_changes::UNANNOUNCED),
        true => {
            let report = identity_changes::report(&forgotten, rules, &on_file, written, Occasion::Start);
            format!("{name}: a start would be refused: {report}\n")
        }
        // It would start, and not all is well.
        false if missing.is_some() => String::new(),
        false => format!("{name}: ok, a start with this configuration forgets no live key\n"),
    };
    let is_refused = is_refused || missing.is_some();
    if let Some(missing) = missing {
        let _ = writeln!(text, "{name}: {missing}");
    } else if locked.is_partial {
        let _ = writeln!(
            text,
            "{name}: not all records were looked at within {} s: `oncegate_records_by_key` of a running gate says whether a \
             key is missing, or records are plain",
            PATIENCE.as_secs()
        );
    }
    for risk in risks {
        let _ = writeln!(text, "{name}: risk: {risk}");
    }
    Found { text, is_refused }
}

fn of_sqlite(path: &Path, rules: IdentityRules<'_>, keys: &Keyring) -> anyhow::Result<Option<Looked>> {
    let preview = sqlite::preview(path, &rules.adoption().1)?;
    let risks = Durability::sqlite(path, sqlite::filesystem_warning(path)).warnings;
    let Some(preview) = preview else { return Ok(None) };
    let mut coverage = Coverage::of(rules, &preview.on_file);
    let (is_changed, mut locked, strict) =
        (coverage.is_changed(), Locked::default(), keys.strict(rules.sealed_origins()));
    let look = |listed: RecordEntry, ending: Option<Bytes>, is_accepted: bool| {
        locked.look_at(&listed, ending.as_ref(), rules.service(), &strict);
        if is_changed {
            coverage.look_at(&keys.open_listed(listed, |_| ()), is_accepted);
        }
    };
    preview.for_each(look)?;
    let forgotten = Forgotten { changes: preview.changes, lost: coverage.finish() };
    // Only one process opens the file: none has to hear of a secret.
    Ok(Some(Looked { forgotten, on_file: preview.on_file, is_unannounced: false, locked, risks }))
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
    let store = redis::Redis::look(&redis::Settings { servers: settings.servers.clone() }).await?;
    let risks = store.description().risks();
    Ok(Looked { risks, ..look(store, rules, keys).await? })
}

async fn look(store: impl Store, rules: IdentityRules<'_>, keys: Arc<Keyring>) -> anyhow::Result<Looked> {
    let store: Arc<dyn Store> = Arc::new(store);
    let strict = Arc::new(keys.strict(rules.sealed_origins()));
    let finder = Resealer::new(Arc::clone(&store), strict, Arc::clone(rules.service()));
    let locked = finder.look_for_locked(Pace { patience: PATIENCE, pauses: false }).await?;
    let store = Sealed::new(store, keys, Arc::clone(rules.service()), |_, _| ());
    let (origins, identities) = rules.adoption();
    let changes = store.changes(origins, identities).await?;
    let lost = identity_changes::look_for_lost(&store, rules).await?;
    let on_file = store.identities().await?;
    store.close().await;
    let is_unannounced = identity_changes::is_unannounced(&on_file, rules);
    Ok(Looked { forgotten: Forgotten { changes, lost }, on_file, is_unannounced, locked, risks: Vec::new() })
}

fn waited_for(
    looking: impl Future<Output = anyhow::Result<Looked>>,
    servers: &str,
    source: &str,
) -> anyhow::Result<Option<Looked>> {
    block_on(looking)?.map(Some).with_context(|| format!("{source}: {servers}"))
}
