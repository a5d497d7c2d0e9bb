//! What is made of a `postgres://` URL, and what is shown of it.

use std::path::PathBuf;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{ChannelBinding, Host, LoadBalanceHosts, SslMode, SslNegotiation, TargetSessionAttrs};

use super::{Postgres, Store};
use crate::config::{Flags, Problems, Resolved, Sources, load, load_store};

/// Loads a configuration with this `[store]`, an upstream, and these variables.
pub(super) fn loaded(store: &str, environment: &[(&str, &str)]) -> Result<Resolved, Problems> {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gate.toml");
    std::fs::write(&file, format!("[upstreams]\napp = \"http://app\"\n[store]\n{store}\n")).unwrap();
    let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    load(Sources { file: Some(file), environment, ..Sources::default() })
}

#[track_caller]
fn postgres(resolved: &Resolved) -> &Postgres {
    let Store::Postgres(postgres) = &resolved.store else { panic!("{:?}", resolved.store) };
    postgres
}

#[track_caller]
fn servers(url: &str) -> Config {
    let resolved = loaded(&format!("url = \"{url}\""), &[]).unwrap_or_else(|problems| panic!("{url}: {problems}"));
    postgres(&resolved).settings.servers.clone()
}

fn password(resolved: &Resolved) -> Option<&str> {
    postgres(resolved).settings.servers.get_password().map(|password| std::str::from_utf8(password).unwrap())
}

#[test]
fn what_a_url_leaves_open_is_safe() {
    let servers = servers("postgres://gate@db.internal/shop");
    assert_eq!(servers.get_hosts(), [Host::Tcp("db.internal".into())]);
    assert_eq!(servers.get_ports(), [5432]);
    assert_eq!((servers.get_user(), servers.get_dbname()), (Some("gate"), Some("shop")));
    assert_eq!(servers.get_application_name(), Some("oncegate"));
    assert_eq!(servers.get_connect_timeout(), Some(&Duration::from_secs(2)));
    assert_eq!(servers.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
    assert_eq!(servers.get_ssl_mode(), SslMode::Prefer);
    assert!(servers.get_keepalives());
    assert_eq!(servers.get_keepalives_idle(), Duration::from_secs(30));
    assert_eq!((servers.get_password(), servers.get_options()), (None, None));
}

#[test]
fn every_parameter_counts() {
    let all = servers(
        "postgresql:///?user=gate&dbname=shop&host=a,b&port=5433,&hostaddr=192.0.2.1,192.0.2.2&options=-c%20a%3Db\
         &application_name=mine&connect_timeout=7&tcp_user_timeout=1500&keepalives=0&keepalives_idle=11\
         &keepalives_interval=12&keepalives_count=4&target_session_attrs=any&channel_binding=require\
         &load_balance_hosts=random&sslmode=require&sslnegotiation=direct",
    );
    assert_eq!(all.get_hosts(), [Host::Tcp("a".into()), Host::Tcp("b".into())]);
    assert_eq!(all.get_ports(), [5433, 5432]);
    assert_eq!(all.get_hostaddrs().len(), 2);
    assert_eq!((all.get_user(), all.get_dbname(), all.get_options()), (Some("gate"), Some("shop"), Some("-c a=b")));
    assert_eq!(all.get_application_name(), Some("mine"));
    assert_eq!(all.get_connect_timeout(), Some(&Duration::from_secs(7)));
    assert_eq!(all.get_tcp_user_timeout(), Some(&Duration::from_millis(1500)), "in milliseconds, as libpq has it");
    assert!(!all.get_keepalives());
    assert_eq!(all.get_keepalives_idle(), Duration::from_secs(11));
    assert_eq!(all.get_keepalives_interval(), Some(Duration::from_secs(12)));
    assert_eq!(all.get_keepalives_retries(), Some(4));
    assert_eq!(all.get_target_session_attrs(), TargetSessionAttrs::Any);
    assert_eq!(all.get_channel_binding(), ChannelBinding::Require);
    assert_eq!(all.get_load_balance_hosts(), LoadBalanceHosts::Random);
    assert_eq!((all.get_ssl_mode(), all.get_ssl_negotiation()), (SslMode::Require, SslNegotiation::Direct));
    let retries = servers("postgres://db?keepalives_retries=5&target_session_attrs=primary");
    assert_eq!(retries.get_keepalives_retries(), Some(5));
    assert_eq!(retries.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
}

#[test]
fn hosts_ports_and_sockets_are_found() {
    for (url, shown) in [
        ("postgres://db", "db:5432"),
        ("postgres://u:p@db:1,[::1]:2,192.0.2.1/d", "db:1,[::1]:2,192.0.2.1:5432/d"),
        ("postgres://db,other/d?port=6432", "db:6432,other:6432/d"),
        ("postgres:///d?host=/run/postgresql&port=5433", "/run/postgresql:5433/d"),
        ("postgres://%2Frun%2Fpostgresql/d", "/run/postgresql:5432/d"),
        // Where there is only an address, that is the host, and what a certificate is looked at for.
        ("postgres:///d?hostaddr=::1", "[::1]:5432/d"),
    ] {
        let resolved = loaded(&format!("url = \"{url}\""), &[]).unwrap_or_else(|problems| panic!("{url}: {problems}"));
        assert_eq!(postgres(&resolved).servers(), shown, "{url}");
    }
    assert_eq!(servers("postgres://%2Frun/d").get_hosts(), [Host::Unix("/run".into())]);
}

#[test]
fn nothing_is_encrypted_on_a_socket() {
    let resolved = loaded("url = \"postgres://%2Frun/d?sslmode=require\"", &[]).unwrap();
    assert_eq!(postgres(&resolved).settings.servers.get_ssl_mode(), SslMode::Disable);
    assert!(postgres(&resolved).settings.tls.is_none());
    let tls = |url: &str| postgres(&loaded(&format!("url = \"{url}\""), &[]).unwrap()).settings.tls.is_some();
    assert!(tls("postgres://h") && tls("postgres://h?sslmode=require") && !tls("postgres://h?sslmode=disable"));
}

/// The URL's password or the file's, but not both; the environment's where there is neither.
#[test]
fn a_password_comes_from_one_place() {
    let directory = tempfile::tempdir().unwrap();
    let file: PathBuf = directory.path().join("password");
    std::fs::write(&file, "of the file\n").unwrap();
    let (plain, own) = ("url = \"postgres://u@h/d\"", "url = \"postgres://u:of%20the%20url@h/d\"");
    let named = format!("password_file = {file:?}");
    let pg = [("PGPASSWORD", "of the environment")];
    for (store, environment, expected) in [
        (plain.to_owned(), &[][..], None),
        (plain.to_owned(), &pg, Some("of the environment")),
        (own.to_owned(), &pg, Some("of the url")),
        ("url = \"postgres://u@h/d?password=of%20the%20url\"".to_owned(), &pg, Some("of the url")),
        (format!("{plain}\n{named}"), &pg, Some("of the file")),
        (plain.to_owned(), &[("ONCEGATE_STORE__URL", "postgres://u:of%20the%20url@h/d")], Some("of the url")),
        ("url = \"postgres://u:@h/d\"".to_owned(), &pg, Some("of the environment")),
        (plain.to_owned(), &[("PGPASSWORD", "")], None),
    ] {
        let resolved = loaded(&store, environment).unwrap_or_else(|problems| panic!("{store}: {problems}"));
        assert_eq!(password(&resolved), expected, "{store}");
    }
    let problems = loaded(&format!("{own}\n{named}"), &[]).map(|_| ()).unwrap_err().to_string();
    assert!(problems.contains("store.password_file: the password stands in the URL as well"), "{problems}");
    assert!(!problems.contains("of the url") && !problems.contains("of the file"), "{problems}");
    std::fs::write(&file, "\n").unwrap();
    let problems = loaded(&format!("{plain}\n{named}"), &[]).map(|_| ()).unwrap_err().to_string();
    assert!(problems.contains(" is empty"), "{problems}");
}

#[test]
fn a_password_is_not_shown_and_what_is_printed_can_be_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    std::fs::write(&file, "s3cret").unwrap();
    for (store, environment) in [
        ("url = \"postgres://gate:s3cret@h/d?sslmode=require\"\nconnections = 20".to_owned(), &[][..]),
        ("url = \"postgres://gate@h/d?password=s3cret&application_name=mine\"".to_owned(), &[]),
        (format!("url = \"postgres://gate@h/d\"\npassword_file = {file:?}"), &[]),
        ("url = \"postgres://gate@h/d\"".to_owned(), &[("PGPASSWORD", "s3cret")]),
    ] {
        let resolved = loaded(&store, environment).unwrap();
        assert_eq!(password(&resolved), Some("s3cret"));
        let printed = resolved.effective.to_string();
        for shown in [printed.clone(), format!("{resolved:?}"), format!("{:#?}", resolved.store)] {
            assert!(!shown.contains("s3cret") && !shown.contains("115, 51, 99"), "{shown}");
        }
        assert!(printed.contains("# a password would not be shown"), "{printed}");
        let again = directory.path().join("again.toml");
        std::fs::write(&again, &printed).unwrap();
        let again = load(Sources { file: Some(again), ..Sources::default() }).unwrap();
        assert_eq!(again.effective.to_string(), printed);
        assert_eq!(postgres(&again).settings.connections, postgres(&resolved).settings.connections);
    }
}

#[test]
fn a_far_server_that_proves_nothing_is_advised_against() {
    let advice = |url: &str| {
        let resolved = loaded(&format!("url = \"{url}\""), &[]).unwrap_or_else(|problems| panic!("{url}: {problems}"));
        let of_store = resolved.advice.into_iter().find(|advice| advice.key == "store.url");
        of_store.map(|advice| advice.message)
    };
    for (url, told) in [
        ("postgres://gate:s3cret@db", "connections are encrypted only if the server offers it"),
        (
            "postgres://localhost,db?sslmode=require",
            "connections are encrypted, but without proof that the server is db",
        ),
        ("postgres://10.0.0.1?sslmode=disable", "nothing is encrypted on the way to 10.0.0.1"),
    ] {
        let advice = advice(url).unwrap_or_else(|| panic!("{url}"));
        assert!(advice.starts_with(told) && advice.contains("sslmode=verify-full"), "{url}: {advice}");
        assert!(!advice.contains("s3cret"), "{advice}");
    }
    for url in ["postgres://localhost", "postgres://127.0.0.1,[::1]", "postgres://%2Frun"] {
        assert_eq!(advice(url), None, "{url}");
    }
}

#[test]
fn keys_of_the_store_have_places() {
    let resolved = loaded("url = \"postgres://u@h/d\"", &[("ONCEGATE_STORE__SERVICE", "shop")]).unwrap();
    let line = |key: &str| resolved.store_places.of_key(key).to_string();
    assert!(line("store.url").ends_with("gate.toml:4"), "{}", line("store.url"));
    assert!(line("store.id_secret_file").ends_with("gate.toml:1"), "{}", line("store.id_secret_file"));
    assert_eq!(line("store.service"), "ONCEGATE_STORE__SERVICE");
    assert_eq!(resolved.store_places.url(), "[store] url");
    let flags = Flags { store: vec!["memory:".to_owned()], ..Flags::default() };
    let (_, places) = load_store(Sources { flags, ..Sources::default() }).unwrap();
    assert_eq!(places.url(), "--store");
}

#[test]
fn a_store_is_read_alone() {
    let store = |url: &str| {
        let flags = Flags { store: vec![url.to_owned()], ..Flags::default() };
        load_store(Sources { flags, ..Sources::default() })
    };
    // No upstream, which a gate needs.
    assert!(matches!(store("postgres://u@h/d"), Ok((Store::Postgres(_), _))));
    assert!(matches!(store("memory:"), Ok((Store::Memory, _))));
    assert!(matches!(load_store(Sources::default()), Ok((Store::Sqlite { .. }, _))));
    let problems = store("postgres://u@h/d?sslmode=never").map(|_| ()).unwrap_err().to_string();
    assert!(problems.starts_with("--store: store.url: `sslmode` is "), "{problems}");
}
