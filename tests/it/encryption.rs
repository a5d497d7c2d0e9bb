//! Encrypted connections to a database: who is believed to be the server, and how a gate proves who it is.

use std::path::PathBuf;
use std::process::Command;

use crate::migrate::{command, done, refused};
use crate::servers::certificates::{self, authority, signed};
use crate::servers::{Database, Postgres, Proxy, Session};
use crate::support::{Gate, Reply, Upstream, eventually};

/// A server that encrypts, and what vouches for it. Its roles: `gate` comes in with a password over TLS only, `badge`
/// with a certificate.
struct Secured {
    postgres: Postgres,
    database: Database,
    /// Where the server's data is, and what was made for it.
    directory: PathBuf,
}

const ACCESS: &str = "\
hostnossl all gate,badge all reject
hostssl all gate all scram-sha-256
hostssl all badge all cert
host all all 127.0.0.0/8 trust
";

impl Secured {
    /// A server whose certificate names its address and is signed by `ca.pem`.
    fn start() -> Option<Self> {
        let (postgres, directory) = Self::plain()?;
        let address = postgres.address().ip();
        authority(&directory, "ca");
        signed(&directory, "server", "ca", &format!("subjectAltName=IP:{address}"));
        authority(&directory, "other");
        Some(Self::encrypting(postgres, directory))
    }

    /// A server whose certificate names its address and is signed by nobody but itself.
    fn start_self_signed() -> Option<Self> {
        let (postgres, directory) = Self::plain()?;
        let name = format!("subjectAltName=IP:{}", postgres.address().ip());
        // Another kind of signature than the authorities' certificates have, and another digest with it.
        let kind = ["-newkey", "rsa:2048", "-sha384", "-nodes", "-keyout", "server.key", "-out", "server.pem"];
        let mut command = Command::new("openssl");
        command.args(["req", "-x509", "-subj", "/CN=db", "-days", "3", "-addext", &name]).args(kind);
        certificates::run(command.current_dir(&directory));
        std::fs::copy(directory.join("server.pem"), directory.join("ca.pem")).unwrap();
        Some(Self::encrypting(postgres, directory))
    }

    fn plain() -> Option<(Postgres, PathBuf)> {
        if !certificates::can_be_made() {
            return None;
        }
        let postgres = Postgres::start()?;
        let directory = postgres.session().value("SHOW data_directory").into();
        Some((postgres, directory))
    }

    fn encrypting(postgres: Postgres, directory: PathBuf) -> Self {
        let owner = std::fs::metadata(&directory).unwrap();
        for name in ["server.key", "server.pem", "ca.pem"] {
            let (uid, gid) = (std::os::unix::fs::MetadataExt::uid(&owner), std::os::unix::fs::MetadataExt::gid(&owner));
            std::os::unix::fs::chown(directory.join(name), Some(uid), Some(gid)).unwrap();
        }
        std::fs::write(directory.join("pg_hba.conf"), ACCESS).unwrap();
        let session = postgres.session();
        for setting in [
            "ssl_cert_file = 'server.pem'",
            "ssl_key_file = 'server.key'",
            "ssl_ca_file = 'ca.pem'",
            "ssl = on",
            "password_encryption = 'scram-sha-256'",
        ] {
            session.run(&format!("ALTER SYSTEM SET {setting}"));
        }
        session.run("SELECT pg_reload_conf()");
        let encrypts = || (Session::open(&postgres.url("postgres")).value("SHOW ssl") == "on").then_some(());
        eventually("a server that encrypts", encrypts);
        session.run("CREATE ROLE gate LOGIN PASSWORD 's3cret'; CREATE ROLE badge LOGIN");
        let database = postgres.database();
        database.run(&format!("GRANT CREATE ON DATABASE {} TO gate, badge", database.name));
        Self { postgres, database, directory }
    }

    /// The database's URL as this role, with these parameters.
    fn url(&self, role: &str, parameters: &str) -> String {
        format!("postgres://{role}@{}/{}?{parameters}", self.postgres.address(), self.database.name)
    }

    fn file(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }
}

#[test]
fn a_server_has_to_prove_what_is_asked_for() {
    let Some(server) = Secured::start() else { return };
    let (root, wrong_root) = (server.file("ca.pem"), server.file("other.pem"));
    let with = |parameters: &str| server.url("gate:s3cret", parameters);
    done(&["--store", &with(&format!("sslmode=verify-full&sslrootcert={root}"))]);
    for parameters in [
        format!("sslrootcert={root}"),
        format!("sslmode=verify-ca&sslrootcert={root}"),
        format!("sslmode=require&sslrootcert={root}"),
        "sslmode=require".to_owned(),
        "sslmode=prefer".to_owned(),
        String::new(),
        "channel_binding=require".to_owned(),
        format!("sslmode=verify-full&sslrootcert={root}&channel_binding=require"),
    ] {
        assert!(done(&["--store", &with(&parameters)]).contains("nothing to do"), "{parameters}");
    }
    for (parameters, told) in [
        (format!("sslmode=verify-full&sslrootcert={wrong_root}"), "UnknownIssuer"),
        (format!("sslmode=verify-ca&sslrootcert={wrong_root}"), "UnknownIssuer"),
        (format!("sslmode=require&sslrootcert={wrong_root}"), "UnknownIssuer"),
        ("sslmode=disable".to_owned(), "no encryption"),
    ] {
        let said = refused(&["--store", &with(&parameters)], 1);
        assert!(said.contains(told) && !said.contains("s3cret"), "{parameters}: {said}");
    }
    // By who the system knows, or somebody else.
    for (roots, status) in [(&root, 0), (&wrong_root, 1)] {
        let mut command = command(&["--store", &with("sslmode=verify-full&sslrootcert=system")]);
        let output = command.env("SSL_CERT_FILE", roots).output().expect("the binary starts");
        assert_eq!(output.status.code(), Some(status), "{roots}: {}", String::from_utf8_lossy(&output.stderr));
    }
    // By another address than the certificate names.
    let proxy = Proxy::before(server.postgres.address());
    let elsewhere = |parameters: &str| proxy.url(&with(parameters));
    let said = refused(&["--store", &elsewhere(&format!("sslmode=verify-full&sslrootcert={root}"))], 1);
    assert!(said.contains("not valid for name") || said.contains("NotValidForName"), "{said}");
    done(&["--store", &elsewhere(&format!("sslmode=verify-ca&sslrootcert={root}"))]);
}

#[test]
fn a_certificate_that_signed_itself_vouches_for_itself() {
    let Some(server) = Secured::start_self_signed() else { return };
    let root = server.file("ca.pem");
    let with = |parameters: &str| server.url("gate:s3cret", parameters);
    done(&["--store", &with(&format!("sslmode=verify-full&sslrootcert={root}"))]);
    done(&["--store", &with("sslmode=require&channel_binding=require")]);
    let proxy = Proxy::before(server.postgres.address());
    let said = refused(&["--store", &proxy.url(&with(&format!("sslrootcert={root}")))], 1);
    assert!(said.contains("not valid for name") || said.contains("NotValidForName"), "{said}");
}

#[test]
fn a_gate_proves_who_it_is_with_a_certificate() {
    let Some(server) = Secured::start() else { return };
    signed(&server.directory, "badge", "ca", "extendedKeyUsage=clientAuth");
    signed(&server.directory, "gate", "ca", "extendedKeyUsage=clientAuth");
    let with = |name: &str| {
        let (root, certificate) = (server.file("ca.pem"), server.file(&format!("{name}.pem")));
        let key = server.file(&format!("{name}.key"));
        server.url("badge", &format!("sslmode=verify-full&sslrootcert={root}&sslcert={certificate}&sslkey={key}"))
    };
    done(&["--store", &with("badge")]);
    let said = refused(&["--store", &with("gate")], 1);
    assert!(said.contains("certificate authentication failed"), "{said}");
    let said = refused(&["--store", &server.url("badge", "sslmode=require")], 1);
    assert!(said.contains("certificate"), "{said}");
    let mixed = with("badge").replace("badge.key", "gate.key");
    let said = refused(&["--store", &mixed], 78);
    assert!(said.contains("`sslcert` and `sslkey` cannot be used"), "{said}");
}

#[test]
fn a_gate_that_must_encrypt_does() {
    let Some(server) = Secured::start() else { return };
    let url = server.url("gate:s3cret", "sslmode=require");
    done(&["--store", &url]);
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).arg("--store").arg(&url).start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    let open = server.database.run(
        "SELECT application_name, ssl::text FROM pg_stat_activity JOIN pg_stat_ssl USING (pid)
         WHERE usename = 'gate' AND datname = current_database()",
    );
    let encrypted = [Some("oncegate".to_owned()), Some("true".to_owned())];
    assert!(!open.is_empty() && open.iter().all(|row| row[..] == encrypted), "{open:?}");
    assert!(!gate.log().contains("s3cret"), "{}", gate.log());
    gate.stop();
}

/// A login that cannot work is no reason to wait.
#[test]
fn serve_ends_where_it_is_not_let_in() {
    let Some(server) = Secured::start() else { return };
    let (upstream, wrong_root) = (Upstream::start(|_| Reply::ok("x")), server.file("other.pem"));
    for (url, environment, told) in [
        (server.url("gate:wr0ng", ""), None, "password authentication failed"),
        (server.url("gate", ""), Some("wr0ng"), "password authentication failed"),
        (server.url("gate", ""), None, "no password is given"),
        (server.url("gate:wr0ng", &format!("sslrootcert={wrong_root}")), None, "invalid peer certificate"),
    ] {
        let mut plan = Gate::before(&upstream).arg("--store").arg(&url);
        if let Some(password) = environment {
            plan = plan.env("PGPASSWORD", password);
        }
        let mut process = plan.spawn();
        let status = process.wait();
        let log = process.log();
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(log.contains(told) && !log.contains("wr0ng"), "{told}: {log}");
    }
}

#[test]
fn a_password_comes_from_a_file_or_the_environment() {
    let Some(server) = Secured::start() else { return };
    let file = server.directory.join("password");
    std::fs::write(&file, "s3cret\n").unwrap();
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let plan = Gate::before(&upstream).store_url(&server.url("gate", "sslmode=require"));
    let named = plan.clone().store(&format!("password_file = {file:?}"));
    done(&["--config", &named.config().display().to_string()]);
    for plan in [named, plan.clone().env("PGPASSWORD", "s3cret")] {
        let gate = plan.start();
        assert!(!gate.log().contains("s3cret"), "{}", gate.log());
        gate.stop();
    }
    assert_eq!(plan.spawn().wait().code(), Some(1), "there is neither");
}

#[test]
fn a_socket_is_not_encrypted_whatever_is_said() {
    let Some(postgres) = Postgres::with(&[("unix_socket_directories", "/tmp")]) else { return };
    let directory = PathBuf::from(postgres.session().value("SHOW data_directory"));
    std::fs::write(directory.join("pg_hba.conf"), "local all all trust\nhost all all 127.0.0.0/8 trust\n").unwrap();
    postgres.session().run("SELECT pg_reload_conf()");
    let (database, port) = (postgres.database(), postgres.address().port());
    let url = |host: &str| format!("postgres://postgres@{host}:{port}/{}?sslmode=verify-full", database.name);
    eventually("a way in", || command(&["--store", &url("%2Ftmp")]).output().unwrap().status.success().then_some(()));
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).arg("--store").arg(&url("%2Ftmp")).start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.stop();
    let said = refused(&["--store", &url(&postgres.address().ip().to_string())], 1);
    assert!(said.contains("server does not support TLS"), "{said}");
}
