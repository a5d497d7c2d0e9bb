//! `oncegate check --store`: what a start would find in the store.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;

use crate::cli::databases;
use crate::cli::identity_changes::{self, Forgotten, Occasion, Written};
use crate::cli::serve::durability::Durability;
use crate::config::{self, Resolved, Store as Settings};
use crate::gate::identity::IdentityRules;
use crate::gate::identity::coverage::Coverage;
use crate::idempotency::record::RecordId;
use crate::store::deliveries::DeliveryFilter;
use crate::store::postgres::Postgres;
use crate::store::resealing::{Beginnings, Values};
use crate::store::sealed::{Keyring, Sealed};
use crate::store::{Error, Filter, NamespaceRules, RecordEntry, Store, redis, sqlite};

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

/// Live records of the service that are encrypted with a key that is not configured.
#[derive(Default)]
struct Locked {
    ids: HashSet<RecordId>,
    /// Whether there was not the time to look at all.
    is_partial: bool,
}

impl Locked {
    /// `ending` is its answer, or the beginning of that: another key may have come before the attempt ended.
    fn look_at(&mut self, listed: &RecordEntry, ending: Option<&Bytes>, rules: IdentityRules<'_>, keys: &Keyring) {
        if is_own(listed, rules) && lacks_key(keys, &listed.record.head, ending) {
            self.ids.insert(listed.id);
        }
    }
}

/// Whether one of the values is sealed with a key that is missing.
fn lacks_key(keys: &Keyring, head: &Bytes, ending: Option<&Bytes>) -> bool {
    [Some(head), ending].into_iter().flatten().any(|value| keys.lacks_key_of(value))
}

/// Whether it is a live record of the service.
fn is_own(listed: &RecordEntry, rules: IdentityRules<'_>) -> bool {
    listed.origin.as_ref().is_some_and(|origin| origin.service == *rules.service()) && listed.is_live()
}

/// How long to look for records whose key is not configured.
const PATIENCE: Duration = Duration::from_secs(30);

/// How many records to read at a time.
const CHUNK: usize = 1000;

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
    let Locked { ids, is_partial } = locked;
    if !ids.is_empty() {
        let (least, count) = (if is_partial { "at least " } else { "" }, ids.len());
        let (noun, verb) = if count == 1 { ("record", "is") } else { ("records", "are") };
        let _ = writeln!(
            text,
            "{name}: {least}{count} {noun} {verb} encrypted with a key that `store.encryption_keys` does not have: retries get \
             503 until it does"
        );
    } else if is_partial {
        let _ = writeln!(
            text,
            "{name}: not all records were looked at within {} s: `oncegate_records_by_key` of a running gate says whether a \
             key is missing",
            PATIENCE.as_secs()
        );
    }
    let is_refused = is_refused || !ids.is_empty();
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
    let (is_changed, mut locked) = (coverage.is_changed(), Locked::default());
    let look = |listed: RecordEntry, ending: Option<Bytes>| {
        locked.look_at(&listed, ending.as_ref(), rules, keys);
        if is_changed {
            coverage.look_at(&keys.open_listed(listed, |_| ()));
        }
    };
    preview.for_each(look).context("[store] url")?;
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
    let store = redis::Redis::open(&redis::Settings { servers: settings.servers.clone() }).await?;
    let risks = store.description().risks();
    Ok(Looked { risks, ..look(store, rules, keys).await? })
}

async fn look(store: impl Store, rules: IdentityRules<'_>, keys: Arc<Keyring>) -> anyhow::Result<Looked> {
    let store: Arc<dyn Store> = Arc::new(store);
    let locked = look_for_locked(&*store, rules, &keys).await?;
    let store = Sealed::new(store, keys, Arc::clone(rules.service()), |_, _| ());
    let (origins, identities) = rules.adoption();
    let changes = store.changes(origins, identities).await?;
    let lost = identity_changes::look_for_lost(&store, rules).await?;
    let on_file = store.identities().await?;
    store.close().await;
    let is_unannounced = identity_changes::is_unannounced(&on_file, rules);
    Ok(Looked { forgotten: Forgotten { changes, lost }, on_file, is_unannounced, locked, risks: Vec::new() })
}

/// Looks at the records as they are stored, then at the accepted requests, for [`PATIENCE`] at most.
async fn look_for_locked(store: &dyn Store, rules: IdentityRules<'_>, keys: &Keyring) -> Result<Locked, Error> {
    let (deadline, mut locked) = (Instant::now() + PATIENCE, Locked::default());
    locked.is_partial = !look_at_records(store, rules, keys, &mut locked, deadline).await?;
    if !locked.is_partial {
        locked.is_partial = !look_at_deliveries(store, rules, keys, &mut locked, deadline).await?;
    }
    Ok(locked)
}

/// False if there was not the time to look at all.
async fn look_at_records(
    store: &dyn Store,
    rules: IdentityRules<'_>,
    keys: &Keyring,
    locked: &mut Locked,
    deadline: Instant,
) -> Result<bool, Error> {
    let Some(resealing) = store.resealing() else { return Ok(true) };
    // Whose they are, and whether they are live, is asked of those alone whose key is missing: as a rule there are none.
    let (mut found, mut after) = (HashSet::new(), None);
    loop {
        let Beginnings { records, next } = resealing.beginnings(after, CHUNK).await?;
        let lacking = |values: &Values| lacks_key(keys, &values.head, values.answer.as_ref());
        found.extend(records.iter().filter(|record| lacking(&record.values)).map(|record| record.id));
        after = next;
        if after.is_none() {
            break;
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
    }
    while !found.is_empty() {
        let filter = Filter { service: Some(Arc::clone(rules.service())), ..Filter::default() };
        let chunk = store.scan(filter, after, CHUNK).await?;
        let own = chunk.records.iter().filter(|listed| found.contains(&listed.id) && is_own(listed, rules));
        locked.ids.extend(own.map(|listed| listed.id));
        after = chunk.next;
        if after.is_none() {
            break;
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The same of accepted requests.
async fn look_at_deliveries(
    store: &dyn Store,
    rules: IdentityRules<'_>,
    keys: &Keyring,
    locked: &mut Locked,
    deadline: Instant,
) -> Result<bool, Error> {
    let mut after = None;
    while let Some(queue) = store.deliveries() {
        let filter = DeliveryFilter { service: Some(Arc::clone(rules.service())), ..DeliveryFilter::default() };
        let page = queue.deliveries(filter, after, CHUNK).await?;
        for delivery in page.deliveries {
            let note = delivery.note.clone();
            locked.look_at(&delivery.as_listed(page.now), note.as_ref(), rules, keys);
        }
        after = page.next;
        if after.is_none() {
            break;
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
    }
    Ok(true)
}

fn waited_for(looking: impl Future<Output = anyhow::Result<Looked>>, servers: &str) -> anyhow::Result<Option<Looked>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(looking).map(Some).with_context(|| format!("[store] url: {servers}"))
}
