//! A database of a test's own, on a server that is this run's or this process's.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::pgbouncer::PgBouncer;
use super::postgres::Postgres;
use super::process::PATIENCE;
use super::session::{Rows, Session};

/// A database that nobody else uses. Dropped when this is.
pub struct Database {
    pub name: String,
    /// Where it is, as the superuser.
    pub url: String,
    admin: String,
    /// Lives as long as this does.
    own: Option<Arc<Own>>,
}

/// A server of this process, and a pooler before it where one was asked for.
struct Own {
    // Ended in this order.
    pooler: OnceLock<Option<PgBouncer>>,
    postgres: Postgres,
}

/// An empty database; nothing (and a failure where `CI` is set) where PostgreSQL is not installed.
#[track_caller]
pub fn database() -> Option<Database> {
    Some(DatabaseServer::find()?.create("CREATE DATABASE \"{}\""))
}

/// A copy of a database that `prepare` has filled, given its URL. That is done once on each server for each `name`, which
/// says what it holds.
#[track_caller]
pub fn prepared_database(name: &str, prepare: impl FnOnce(&str)) -> Option<Database> {
    let server = DatabaseServer::find()?;
    let admin = Session::open(&server.admin);
    // One process at a time, and until this session ends.
    admin.run("SELECT pg_advisory_lock(7230512)");
    if admin.run(&format!("SELECT FROM pg_database WHERE datname = '{name}'")).is_empty() {
        let new = format!("{name}_new");
        admin.run(&format!("DROP DATABASE IF EXISTS \"{new}\" WITH (FORCE)"));
        admin.run(&format!("CREATE DATABASE \"{new}\""));
        prepare(&named(&server.admin, &new));
        // Whoever was in there has gone, or is thrown out.
        admin.run(&format!("ALTER DATABASE \"{new}\" ALLOW_CONNECTIONS false"));
        admin.run(&format!("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '{new}'"));
        admin.run(&format!("ALTER DATABASE \"{new}\" RENAME TO \"{name}\""));
    }
    admin.run("SELECT pg_advisory_unlock(7230512)");
    Some(server.create(&format!("CREATE DATABASE \"{{}}\" TEMPLATE \"{name}\"")))
}

impl Database {
    /// An empty database on the server that this is a URL of.
    #[track_caller]
    pub fn on(admin: &str) -> Self {
        DatabaseServer { admin: admin.into(), own: None }.create("CREATE DATABASE \"{}\"")
    }

    /// Where it is through a pooler; nothing (and a failure where `CI` is set) where there is none.
    #[track_caller]
    pub fn pooled_url(&self) -> Option<String> {
        let Some(own) = &self.own else {
            let Ok(pooler) = std::env::var("ONCEGATE_TEST_PGBOUNCER") else {
                super::skipped("PgBouncer");
                return None;
            };
            return Some(named(&pooler, &self.name));
        };
        let pooler = own.pooler.get_or_init(|| PgBouncer::before(own.postgres.address()));
        Some(pooler.as_ref()?.url(&self.url))
    }

    /// Where its server listens.
    pub fn address(&self) -> SocketAddr {
        let authority = self.url.split('/').nth(2).and_then(|authority| authority.rsplit('@').next());
        authority.and_then(|address| address.parse().ok()).expect("the address of a server in a URL")
    }

    #[track_caller]
    pub fn session(&self) -> Session {
        Session::open(&self.url)
    }

    /// Runs statements in a session of their own.
    #[track_caller]
    pub fn run(&self, sql: &str) -> Rows {
        self.session().run(sql)
    }

    /// The one value that a statement gives.
    #[track_caller]
    pub fn value(&self, sql: &str) -> String {
        self.session().value(sql)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // A server that is down takes its databases with it.
        if let Ok(admin) = Session::try_open(&self.admin) {
            // A test may have left it waiting for a standby that is not there.
            drop(admin.try_run("SET synchronous_commit = local"));
            let sql = format!("DROP DATABASE IF EXISTS \"{}\" WITH (FORCE)", self.name);
            drop(admin.start(&sql).within(PATIENCE));
        }
    }
}

/// Where databases can be made.
struct DatabaseServer {
    admin: String,
    own: Option<Arc<Own>>,
}

impl DatabaseServer {
    /// This run's server, or else this process's, which lives as long as one of its databases.
    #[track_caller]
    fn find() -> Option<Self> {
        static OWN: Mutex<Weak<Own>> = Mutex::new(Weak::new());
        if let Ok(admin) = std::env::var("ONCEGATE_TEST_POSTGRES") {
            return Some(Self { admin, own: None });
        }
        let mut shared = OWN.lock().unwrap();
        let own = match shared.upgrade() {
            Some(own) => own,
            None => {
                let postgres = Postgres::with(&[("max_connections", "300")])?;
                let own = Arc::new(Own { pooler: OnceLock::new(), postgres });
                *shared = Arc::downgrade(&own);
                own
            }
        };
        let admin = own.postgres.url("postgres");
        Some(Self { admin, own: Some(own) })
    }

    #[track_caller]
    fn create(self, sql: &str) -> Database {
        let name = format!("test_{:016x}", fastrand::u64(..));
        Session::open(&self.admin).run(&sql.replace("{}", &name));
        let url = named(&self.admin, &name);
        Database { name, url, admin: self.admin, own: self.own }
    }
}

/// The URL of another database of the same server.
fn named(url: &str, name: &str) -> String {
    let (server, _) = url.rsplit_once('/').expect("the URL of a database");
    format!("{server}/{name}")
}
