//! Reading the configuration again while the gate serves.
//!
//! It changes everything or nothing. What routes, policies, limits, upstreams and the admin tokens are is replaced at
//! once; what runs, runs on as it began. Where records are kept and whose they are cannot change under a gate that serves:
//! it would answer from one store what was meant for another. What else only a start sets is said, and stays.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::time::timeout;
use toml_edit::DocumentMut;

use super::adopting::{self, Refused};
use super::listening::admin_is_guarded;
use super::{Serving, admin_routes, files, missing_keys};
use crate::admin::{Begun, Outcome, ReloadProblem, ReloadReport};
use crate::cli::describe;
use crate::cli::identity_changes::Written;
use crate::config::{self, Problem, Problems, Resolved, Sources, Store as StoreSettings};
use crate::consumers;
use crate::gate::Secret;
use crate::http::server;
use crate::store::Store;
use crate::telemetry::access_log::Output;
use crate::telemetry::logs;

/// How long claims may be held up, where the rules of identities change: until those under way are answered, and then
/// until the store knows.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long the store has to take an audit entry.
const NOTE: Duration = Duration::from_secs(2);

const NO_ENTRY: &str = "the reload has no audit entry";

/// What a reload says that takes the last token of the admin listener away.
const OPENED: &str =
    "the admin listener no longer asks for a token: every client that can connect to it may change and read records";

/// The log message of a reload that changes nothing.
const NOT_RELOADED: &str = "the configuration is not reloaded: the gate goes on with the former one";

/// What the records are found by: a configuration that changes it is refused.
const IDENTITY: [&str; 2] = ["store.url", "store.service"];

/// What only a start sets. With a configuration that changes it, the rest is applied.
const AT_START: [&str; 9] = [
    "server.listen",
    "server.socket_mode",
    "admin.listen",
    "store.connections",
    "store.cache",
    "store.cache_max_age",
    "store.cache_max_bytes",
    "store.cache_max_entries",
    "log.format",
];

/// What the process was started with and cannot change.
pub(super) struct StartSettings {
    effective: DocumentMut,
    id_secret: Option<Secret>,
    other_id_secrets: Vec<Option<Secret>>,
    passwords: Vec<Option<Vec<u8>>>,
    cache_password: Option<Vec<u8>>,
    consumers: Vec<consumers::Settings>,
    is_sealed: bool,
}

impl StartSettings {
    pub(super) fn of(config: &Resolved) -> Self {
        let of_postgres = |store: &config::Postgres| store.settings.servers.get_password().map(<[u8]>::to_vec);
        let passwords = match &config.store {
            StoreSettings::Memory | StoreSettings::Sqlite { .. } => Vec::new(),
            StoreSettings::Postgres(store) => vec![of_postgres(store)],
            StoreSettings::Databases(databases) => databases.iter().map(of_postgres).collect(),
            StoreSettings::Redis(store) => vec![store.servers.password.clone().map(String::into_bytes)],
        };
        Self {
            is_sealed: !config.sealing.is_empty(),
            effective: config.effective.clone(),
            consumers: config.consumers.clone(),
            id_secret: config.gate.id_secret.clone(),
            other_id_secrets: config.gate.other_id_secrets.clone(),
            passwords,
            cache_password: config
                .cache
                .as_ref()
                .and_then(|cache| cache.servers.password.clone())
                .map(String::into_bytes),
        }
    }

    /// Those of `keys` that `other` has otherwise.
    fn changes(&self, other: &Self, keys: &[&'static str]) -> Vec<&'static str> {
        keys.iter().copied().filter(|key| value(&self.effective, key) != value(&other.effective, key)).collect()
    }

    /// What makes that records are found, and is otherwise in `other`.
    fn identity_changes(&self, other: &Self) -> Vec<&'static str> {
        let mut changes = self.changes(other, &IDENTITY);
        changes.extend((self.id_secret != other.id_secret).then_some("store.id_secret_file"));
        changes.extend((self.other_id_secrets != other.other_id_secrets).then_some("store.other_id_secret_files"));
        changes
    }

    /// What only a start sets, and is otherwise in `other`.
    fn start_changes(&self, other: &Self) -> Vec<&'static str> {
        let mut changes = self.changes(other, &AT_START);
        changes.extend((self.passwords != other.passwords).then_some("store.password_file"));
        changes.extend((self.cache_password != other.cache_password).then_some("store.cache_password_file"));
        changes.extend((self.consumers != other.consumers).then_some("consumers"));
        changes.extend((self.is_sealed != other.is_sealed).then_some("store.encryption_keys"));
        changes
    }
}

/// The value of a dotted key, as it is written.
fn value(document: &DocumentMut, key: &str) -> Option<String> {
    let (table, key) = key.split_once('.')?;
    document.get(table)?.get(key).map(ToString::to_string)
}

impl Serving {
    /// Reads the configuration again. Where anything is wrong with it nothing changes, and that is said. What a client of the
    /// admin listener asks for is in the audit log already.
    pub(super) async fn reload(
        &mut self,
        sources: &Sources,
        log_filter: &logs::Filter,
        is_by_signal: bool,
    ) -> ReloadReport {
        self.notices.reloading();
        let store = Arc::clone(&self.store);
        let begun = if is_by_signal { self.note_signal(&*store).await } else { None };
        let reloaded = self.try_reload(sources.clone(), log_filter).await;
        self.metrics.config_reloaded(reloaded.is_ok());
        self.notices.reloaded(reloaded.is_ok());
        if let Some(begun) = begun {
            begun.end(if reloaded.is_ok() { Outcome::Done } else { Outcome::Unchanged }).await;
        }
        if reloaded.is_err() {
            self.reopen_access_log().await;
        }
        reloaded.unwrap_or_else(|error| {
            self.log_refusal(&error);
            refusal(&error)
        })
    }

    /// Writes an audit entry of a reload that a signal asked for. Without one it goes on: who may send signals may also restart
    /// the process.
    async fn note_signal<'a>(&self, store: &'a dyn Store) -> Option<Begun<'a>> {
        match timeout(NOTE, self.admin_state.audit_writer().reloading_by_signal(store)).await {
            Ok(Ok(begun)) => return Some(begun),
            Ok(Err(error)) => tracing::warn!(%error, "{NO_ENTRY}"),
            Err(_) => tracing::warn!(error = "the store did not answer in time", "{NO_ENTRY}"),
        }
        None
    }

    fn log_refusal(&self, error: &anyhow::Error) {
        let format = self.log_format;
        if let Some(problems) = error.downcast_ref::<Problems>() {
            for problem in problems.iter() {
                let (place, key, hint) = (&problem.place, &*problem.key, problem.hint.as_deref());
                tracing::error!(%place, key, hint, "{}", problem.message);
            }
            tracing::error!(problems = problems.count(), "{NOT_RELOADED}");
        } else if format == logs::Format::Text {
            // A block to read, as at a start.
            tracing::error!("{NOT_RELOADED}\n{}", describe(error));
        } else if let Some(Refused { report, keys }) = error.downcast_ref::<Refused>() {
            tracing::error!(keys, error = report, "{NOT_RELOADED}");
        } else {
            tracing::error!(error = describe(error), "{NOT_RELOADED}");
        }
    }

    async fn try_reload(&mut self, sources: Sources, log_filter: &logs::Filter) -> anyhow::Result<ReloadReport> {
        let mut config = tokio::task::spawn_blocking(move || config::load(sources)).await??;
        let asked = StartSettings::of(&config);
        let changes = self.start_settings.identity_changes(&asked);
        if !changes.is_empty() {
            let each = changes.into_iter().map(|key| Problem {
                place: config.store_places.of_key(key),
                key: key.to_owned(),
                message:
                    "cannot change while the gate serves: its records would be looked for elsewhere, or by other ids"
                        .to_owned(),
                hint: Some("restart the process, or restore the former value".to_owned()),
            });
            bail!(Problems::new(each.collect()));
        }
        // Its address stays, whatever the configuration says now.
        admin_is_guarded(self.admin, &config.admin)?;
        files::share_out(&mut config);
        let advice = std::mem::take(&mut config.advice);
        let access_log = match config.access_log.take() {
            Some(settings) => Some(Output::open_in_background(settings).await?),
            None => None,
        };
        let (gate, routes) = (Arc::clone(&self.current.load().handler), admin_routes(&config));
        let (summary, written) = (self.summary.reloaded(&config), Written::of(&config));
        let upstreams = config.upstreams.into_iter().map(|settings| gate.upstream(settings)).collect();
        let next = gate.successor(config.gate, config.router, upstreams, &self.metrics);
        // Keys that verify tokens are not given up for a URL that has none to give.
        if gate.has_token_keys() && !next.refresh_token_keys().await {
            bail!(
                "auth.jwt.jwks_url: no keys could be fetched from there, and those in force verify tokens\n  \
                 hint: the log says why; correct the URL, or see that it can be reached"
            );
        }
        if let Some(consumer) = self.start_settings.consumers.iter().find(|consumer| !consumer.has_route(&next)) {
            bail!(
                "no route protects the messages of the consumer `{}` any more, and it consumes until a restart\n  \
                 hint: restart the process, or restore the route",
                consumer.name
            );
        }
        let stuck = "cannot change what keys are found by";
        if self.resealer.is_none() && !next.sealed_origins().is_empty() {
            bail!(
                "seal = \"required\" needs encryption, and this process was started without store.encryption_keys\n  \
                 hint: restart the process"
            );
        }
        let mut reload = gate.begin_reload(&next, PATIENCE).await.context(stuck)?;
        // Other gates may write with keys that are new here.
        let opening = self.resealer.as_ref().map(|resealer| resealer.keys().open_too(&config.sealing));
        adopting::look_before_reload(&gate, &next, &*self.store, &written, self.is_shared).await?;
        drop(opening);
        reload.adopt(PATIENCE).await.context(stuck)?;
        // The process may be stopped meanwhile: then it is not known what the store has adopted.
        let (store, readiness) = (&*self.store, &self.readiness);
        if let Err(error) =
            adopting::at_reload(&gate, &next, store, &written, self.is_shared, PATIENCE, readiness).await
        {
            reload.cancel();
            return Err(error);
        }

        let (mut removed, mut is_stricter) = (Vec::new(), false);
        if let Some(resealer) = self.resealer.as_ref().filter(|_| !config.sealing.is_empty()) {
            removed = resealer.keys().replace(config.sealing);
            is_stricter = gate.sealed_origins().is_empty() && !next.sealed_origins().is_empty();
            resealer.keys().be_strict(next.sealed_origins());
            if is_stricter || !removed.is_empty() {
                // Memory may hold answers of records that this gate no longer reads.
                self.cached.forget_all();
            }
            resealer.count_again();
        }
        next.show_metrics(&self.metrics);
        server::ServerState::replace(&self.current, next, config.server.limits, config.server.accept);
        reload.done();
        (self.shutdown_delay, self.drain_timeout) = (config.server.shutdown_delay, config.server.drain_timeout);
        let count = routes.len();
        let is_opened = self.admin_state.asks_for_token() && config.admin.tokens.is_empty();
        self.admin_state.reload(&config.admin, routes);
        // The new configuration is in force: what fails from here on does not refuse it.
        if let Err(error) = self.log_access_to(access_log).await {
            tracing::error!(%error, "the access log goes on as before");
        }
        self.trace_to(config.traces);
        // The configuration saw that it is a filter.
        if let Err(error) = log_filter.set(&config.log.level) {
            tracing::error!(%error, "the log level stays as it was");
        }
        let changes = self.start_settings.start_changes(&asked);
        if !changes.is_empty() {
            tracing::warn!(
                keys = changes.join(", "),
                "these keys were changed too, and only a start sets them: restart the process to apply them"
            );
        }
        tracing::info!(routes = count, "configuration reloaded");
        for advice in advice {
            tracing::info!("{advice}");
        }
        if self.summary != summary {
            summary.log(self.log_format);
            self.summary = summary;
        }
        let needs_restart = changes.into_iter().map(str::to_owned).collect();
        if is_opened {
            tracing::warn!("{OPENED}");
        }
        let warning = match self.resealer.as_ref().filter(|_| is_stricter || !removed.is_empty()) {
            Some(resealer) => missing_keys::warn_at_reload(resealer, &removed).await,
            None => None,
        };
        Ok(ReloadReport::Reloaded {
            routes: count,
            needs_restart,
            warnings: warning.into_iter().chain(is_opened.then(|| OPENED.to_owned())).collect(),
        })
    }
}

fn refusal(error: &anyhow::Error) -> ReloadReport {
    let Some(problems) = error.downcast_ref::<Problems>() else {
        return ReloadReport::Refused { detail: describe(error), problems: Vec::new() };
    };
    let each = problems.iter().map(|problem| ReloadProblem {
        place: problem.place.to_string(),
        key: problem.key.clone(),
        message: problem.message.clone(),
        hint: problem.hint.clone(),
    });
    ReloadReport::Refused { detail: problems.to_string(), problems: each.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start_settings(text: &str) -> StartSettings {
        let text = format!("{text}\n[upstreams]\napp = \"http://127.0.0.1:3000\"\n");
        StartSettings::of(&config::load_text("gate.toml".into(), &text).unwrap())
    }

    #[test]
    fn what_stays_is_named() {
        let before = start_settings("");
        assert!(before.identity_changes(&before).is_empty() && before.start_changes(&before).is_empty());
        let after = start_settings(
            "[server]\nlisten = \"127.0.0.1:1\"\ndrain_timeout = \"1s\"\n[admin]\nlisten = \"127.0.0.1:2\"\n\
             [store]\nurl = \"memory:\"\nservice = \"other\"\nsettle_timeout = \"1s\"\ncache_max_entries = 5\n\
             [log]\nformat = \"json\"",
        );
        assert_eq!(before.identity_changes(&after), ["store.url", "store.service"]);
        let named = ["server.listen", "admin.listen", "store.cache_max_entries", "log.format"];
        assert_eq!(before.start_changes(&after), named);
    }

    #[test]
    fn a_password_and_a_secret_count_by_what_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("secret");
        let with = |secret: &str| {
            std::fs::write(&file, secret).unwrap();
            let url = "postgres://gate@127.0.0.1/gate";
            start_settings(&format!("[store]\nurl = {url:?}\npassword_file = {file:?}\nid_secret_file = {file:?}"))
        };
        let before = with("a secret of more than thirty-two bytes");
        let after = with("another secret of more than thirty-two bytes");
        assert_eq!(before.identity_changes(&after), ["store.id_secret_file"]);
        assert_eq!(before.start_changes(&after), ["store.password_file"]);
    }

    /// A key that is misspelled here would never be seen to change.
    #[test]
    fn every_key_is_one() {
        let cached = "[store]\nurl = \"postgres://gate@127.0.0.1/gate\"\ncache = \"redis://127.0.0.1\"";
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "a secret of more than thirty-two bytes").unwrap();
        let settings = start_settings(&format!("{cached}\nid_secret_file = {:?}", file.path()));
        for key in IDENTITY.iter().chain(&AT_START) {
            assert!(value(&settings.effective, key).is_some(), "{key}");
        }
    }
}
