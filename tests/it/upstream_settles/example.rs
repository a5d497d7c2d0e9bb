//! The example upstream of `deploy/examples/payments-python`, as a process, with faults where a request asks for them.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::servers::Database;
use crate::support::process::python_with_psycopg;
use crate::support::{Request, eventually};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/examples/payments-python");
const FAULTY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/upstream_settles/faulty.py");

/// The example on a database that has the schema, as a role that was granted nothing of it. Ended when dropped.
pub struct Example {
    child: Child,
    pub url: String,
    pub database: Database,
    dir: TempDir,
}

/// A request that does not get through to its end before it is let go on.
pub struct Held {
    file: PathBuf,
}

impl Example {
    /// Starts it; nothing (and a failure where `CI` is set) where what it needs is missing.
    #[track_caller]
    pub fn start(database: Database) -> Option<Self> {
        let python = python_with_psycopg()?;
        database.run(
            "DO $$ BEGIN CREATE ROLE oncegate_test_payments LOGIN;
                EXCEPTION WHEN duplicate_object OR unique_violation THEN END $$;
             GRANT CREATE ON SCHEMA public TO oncegate_test_payments",
        );
        let (scheme, rest) = database.url.split_once("://").expect("a URL");
        let (_, server) = rest.split_once('@').expect("a URL with a user");
        let mut child = Command::new(python)
            .args(["-B", FAULTY, EXAMPLE, "0"])
            .env("DATABASE_URL", format!("{scheme}://oncegate_test_payments@{server}"))
            .stdout(Stdio::piped())
            .spawn()
            .expect("Python");
        let mut said = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut said).expect("a line");
        let url = said.trim().strip_prefix("payments on ").expect("the example says where it is").to_owned();
        Some(Self { child, url, database, dir: tempfile::tempdir().expect("a writable directory") })
    }

    /// How many charges have been committed.
    #[track_caller]
    pub fn charges(&self) -> u64 {
        self.database.value("SELECT count(*) FROM public.charge").parse().expect("a number")
    }

    /// A request with these faults, and what lets it go on where it waits.
    pub fn faulty(&self, key: &str, faults: &str) -> (Request, Held) {
        let held = Held { file: self.dir.path().join(key) };
        (pay(key).header("X-Fault", faults).header("X-File", held.file.display().to_string()), held)
    }
}

/// A request that has no faults. For the gate it is the same as one that has.
pub fn pay(key: &str) -> Request {
    Request::post("/v1/charges").key(key).body("{\"amount\": 100}")
}

impl Drop for Example {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Held {
    /// Waits until it has got to where it waits.
    #[track_caller]
    pub fn wait(&self) {
        eventually("the request gets to where it waits", || self.file.with_extension("reached").exists().then_some(()));
    }

    pub fn let_go(&self) {
        std::fs::write(&self.file, "").expect("a writable directory");
    }

    /// Waits until the upstream is done with it, and gives the status that it answers with.
    #[track_caller]
    pub fn done(&self) -> u16 {
        let done = self.file.with_extension("done");
        let status = eventually("the upstream is done", || std::fs::read_to_string(&done).ok());
        status.parse().expect("a status")
    }
}
