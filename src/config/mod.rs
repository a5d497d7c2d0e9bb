//! Files, environment and flags into settings.
//!
//! Each room defines the settings that it needs; this one reads, checks and resolves them, and reports every problem
//! at once. Only `main` and [`crate::cli`] import it.
//!
//! The path of a value: `layers` merges file, environment and flags into one tree that remembers the origin of each
//! value; `node` walks the tree; the declared keys of a section read its values, and the section resolves them into
//! settings and prints what is in force. The declarations are also what the annotated default file (`annotated`), the
//! JSON Schema (`schema`), the suggestions for misspelt keys (`keys`) and the reference chapter of the docs (`reference`)
//! are made of.
//!
//! To add a key:
//! 1. Declare it in the `keys!` of its section, such as `limits`: name, documentation, default, and one of the kinds of
//!    `kinds`, which says how values are read, printed and described.
//! 2. Use it where the section becomes settings. A check that involves other keys belongs there too.
//! 3. Add a line to `schema/tests/lines.rs`, and run the tests with `ONCEGATE_BLESS=1`, which writes
//!    `config/oncegate.default.toml` and `docs/reference/configuration.md`.

use std::path::PathBuf;
use std::time::Duration;

use toml_edit::DocumentMut;

use self::context::Context;
use self::listeners::Serving;
use self::node::Table;
use crate::http::socket::Listen;
use crate::route::Router;
use crate::store::sealed::SealingKey;
use crate::telemetry::access_log::Settings as AccessLogSettings;
use crate::telemetry::logs;
use crate::{admin, gate, http};

mod access_log;
mod admin_tokens;
mod annotated;
mod auth;
mod consumers;
mod context;
mod declare;
mod file;
mod headers;
mod keys;
mod kinds;
mod layers;
mod limits;
mod listeners;
mod logging;
mod node;
mod pem;
mod policy;
mod policy_page;
mod preset;
mod problem;
#[cfg(test)]
pub(crate) mod reference;
mod routes;
mod schema;
mod secrets;
mod store;
mod suggest;
mod telemetry;
mod tls;
mod unexpanded;
mod units;
mod upstreams;

pub use annotated::annotated;
pub use layers::{Flags, Sources};
pub use problem::{Advice, Place, Problem, Problems};
pub use schema::schema;
pub use store::{Postgres, Redis, Store, StorePlaces};
pub use tls::{ServerTrust, client as client_tls, reread as reread_tls};
pub use units::show_duration;

/// Everything that is configured.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// `[server]`
    pub server: http::server::Settings,
    /// `[admin]`
    pub admin: admin::Settings,
    /// `[store] url`
    pub store: Store,
    /// Where the keys of `[store]` stand that records are found by.
    pub store_places: StorePlaces,
    /// `[store] cache`: only in front of PostgreSQL.
    pub cache: Option<Redis>,
    /// `[store] cache_max_age`. Zero: nothing is remembered of what others write too. Never with a cache.
    pub cache_max_age: Duration,
    /// `[store] cache_max_bytes`
    pub cache_max_bytes: u64,
    /// `[store] encryption_keys`: the first seals, all open.
    pub sealing: Vec<SealingKey>,
    /// `[store] cache_max_entries`. Never 0.
    pub cache_max_entries: usize,
    /// The settings of the gate, from `[store]`, `[headers]` and `default_upstream`.
    pub gate: gate::Settings,
    /// `[upstreams]`, in the order of their names. Never empty.
    pub upstreams: Vec<http::upstream::Settings>,
    /// `[[routes]]`. Never empty.
    pub router: Router,
    /// Where each of them stands, in the same order; empty where there are no `[[routes]]`.
    pub route_places: Vec<Place>,
    /// `[[consumers]]`
    pub consumers: Vec<crate::consumers::Settings>,
    /// `[log]`
    pub log: logs::Settings,
    /// `[access_log]`
    pub access_log: Option<AccessLogSettings>,
    /// `[telemetry]`
    pub traces: Option<http::collector::Settings>,
    /// What is accepted, but better known.
    pub advice: Vec<Advice>,
    /// The same as TOML: every value spelled out, files of secrets by name only.
    pub effective: DocumentMut,
}

/// Reads, checks and resolves a configuration, or says everything that is wrong with it.
///
/// Reads the file named in `sources` and the files of secrets named in it. Blocks.
pub fn load(sources: Sources) -> Result<Resolved, Problems> {
    resolve(layers::merge(sources)?)
}

/// Does the same with a configuration that is at hand as text, as if that were all that there is. Its problems are
/// reported as those of `file`, which is not read; files of secrets that it names are.
pub fn load_text(file: PathBuf, text: &str) -> Result<Resolved, Problems> {
    resolve(layers::only(file, text)?)
}

/// Reads `[store] url` and its place, for commands that work on a store. It ignores problems of all other keys.
pub fn load_store(sources: Sources) -> Result<(Store, StorePlaces), Problems> {
    let context = layers::merge(sources)?;
    let store = store::read(&Table::open(context.root(), keys::ROOT));
    context.finish()?;
    Ok((store.store, store.places))
}

/// Reads `[admin]` alone, for commands that ask a running gate: whatever else is missing or wrong.
pub fn load_admin(sources: Sources) -> Result<admin::Settings, Problems> {
    let context = layers::merge(sources)?;
    let admin = listeners::admin(&Table::open(context.root(), keys::ROOT), &[]);
    context.finish_with("admin")?;
    Ok(admin)
}

/// Reads `[admin] listen` alone, and whether the listener encrypts. Nothing else that is wrong
/// matters, as long as the file is TOML.
pub fn load_admin_address(sources: Sources) -> Result<(Listen, bool), Problems> {
    let context = layers::merge(sources)?;
    Ok(listeners::admin_address(&Table::open(context.root(), keys::ROOT)))
}

fn resolve(context: Context) -> Result<Resolved, Problems> {
    let root = Table::open(context.root(), keys::ROOT);
    let limits = limits::read(&root);
    let upstreams = upstreams::read(&root, limits.max_answer_headers());
    let longest = upstreams.settings.iter().map(|upstream| upstream.timeout).max().unwrap_or_default();
    let Serving { settings: server, forwarding, upgrades } = listeners::server(&root, longest, limits);
    let admin = listeners::admin(&root, &server.listen);
    upstreams::advise_on_places(&root, &upstreams, &server.listen, &admin.listen);
    let store = store::read(&root);
    let (headers, own_headers) = headers::read(&root);
    let log = logging::read(&root);
    let access_log = access_log::read(&root, &store.store);
    let traces = telemetry::read(&root);
    let default_upstream = upstreams::default(&root, &upstreams);
    let (router, route_places) = routes::read(&root, &upstreams);
    if !matches!(store.store, Store::Memory) {
        upstreams::advise_on_patience(&root, &upstreams, store.keys.settle_timeout, &router);
    }
    let policy_page = policy_page::read(&root);
    policy_page::advise(&root, policy_page.as_deref(), &router);
    listeners::check_scopes(&root);
    let jwt = auth::read(&root, &router);
    policy::check_response_headers(&root, &headers);
    policy::advise_retention(&root, store.keys.max_ttl, &router);
    policy::check_seals(&root, !store.keys.encryption_keys.is_empty());
    let unfit = match &store.store {
        Store::Redis(_) => Some("redis"),
        Store::Memory => Some("memory:"),
        Store::Sqlite { .. } | Store::Postgres(_) | Store::Databases(_) => None,
    };
    policy::check_accepting(&root, &router, unfit, matches!(store.store, Store::Databases(_)));
    let token_header = jwt.as_ref().map(|jwt| &jwt.header);
    let consumers = consumers::read(&root, &router, token_header);
    consumers::advise_on_store(&root, &consumers, unfit);
    headers::check(&root, &own_headers, &router, token_header);
    unexpanded::advise(&context.root());
    drop(root);

    // From here on nothing is missing: whatever was wrong has been reported.
    let (advice, mut printed) = context.finish().map_err(|problems| Problems { log_format: log.format, ..problems })?;
    let printed = keys::ROOT.names().filter_map(|name| Some((name, printed.remove(name)?)));
    let effective = DocumentMut::from(printed.collect::<toml_edit::Table>());
    Ok(Resolved {
        server,
        admin,
        store: store.store,
        store_places: store.places,
        cache: store.cache,
        cache_max_age: store.keys.cache_max_age,
        cache_max_bytes: store.keys.cache_max_bytes,
        sealing: store.sealing,
        cache_max_entries: store.keys.cache_max_entries,
        gate: gate::Settings {
            service: store.keys.service,
            id_secret: store.id_secret,
            other_id_secrets: store.other_id_secrets,
            settle_timeout: store.keys.settle_timeout,
            headers,
            own_headers,
            default_upstream,
            forwarding,
            upgrades,
            policy_page,
            tokens: gate::Tokens::secret(),
            jwt,
        },
        upstreams: upstreams.settings,
        router,
        route_places,
        consumers,
        log,
        access_log,
        traces,
        advice,
        effective,
    })
}

#[cfg(test)]
mod tests;
