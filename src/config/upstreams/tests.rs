use std::path::PathBuf;

use crate::config::{Resolved, load_text};
use crate::http::upstream::{Protocol, Settings, Sharing, UpstreamAddress};
use crate::store::servers::certificates::{self, authority, revoked, signed};

fn load(upstream: &str) -> Resolved {
    load_text(PathBuf::from("gate.toml"), &format!("[upstreams]\napp = {upstream}\n"))
        .unwrap_or_else(|problems| panic!("{problems}"))
}

fn settings(upstream: &str) -> Settings {
    let resolved = load(upstream);
    // What is printed gives the same again.
    let printed = load_text(PathBuf::from("gate.toml"), &resolved.effective.to_string()).unwrap();
    assert_eq!(printed.upstreams, resolved.upstreams, "{}", resolved.effective);
    let [only] = <[Settings; 1]>::try_from(resolved.upstreams).unwrap();
    only
}

fn tcp(host: &str, port: u16) -> UpstreamAddress {
    UpstreamAddress::Tcp { host: host.to_owned(), port }
}

#[test]
fn an_upstream_is_where_its_url_says() {
    for (upstream, places) in [
        ("\"http://app\"", vec![tcp("app", 80)]),
        ("\"http://[::1]:3000/\"", vec![tcp("::1", 3000)]),
        ("\"unix:/run/app.sock\"", vec![UpstreamAddress::Unix("/run/app.sock".into())]),
        ("\"unix:///run/app.sock\"", vec![UpstreamAddress::Unix("/run/app.sock".into())]),
        ("{ url = [\"http://a:1\", \"http://b:2\"] }", vec![tcp("a", 1), tcp("b", 2)]),
        ("{ url = [\"http://a:1\", \"unix:b\"] }", vec![tcp("a", 1), UpstreamAddress::Unix("b".into())]),
    ] {
        let settings = settings(upstream);
        assert_eq!((settings.places, settings.tls.is_some()), (places, false), "{upstream}");
        assert_eq!(settings.protocol, Protocol::Auto);
    }
    assert_eq!(settings("{ url = \"http://app\", protocol = \"h2\" }").protocol, Protocol::H2);
    for (word, reuse) in [("always", Sharing::Always), ("caller", Sharing::Caller), ("never", Sharing::Never)] {
        assert_eq!(settings(&format!("{{ url = \"http://app\", reuse = \"{word}\" }}")).reuse, reuse);
    }
    assert_eq!(settings("\"http://app\"").reuse, Sharing::Always);
    assert_eq!(settings("\"unix:/run/app.sock\"").authority(), "localhost");
    assert_eq!(settings("\"http://[::1]:3000/\"").authority(), "[::1]:3000");
}

#[test]
fn a_socket_has_a_file_name_and_a_zone_is_not_encoded() {
    for (upstream, hint) in [
        ("unix:/", "unix:/run/app.sock"),
        ("unix:/run/", "unix:/run/app.sock"),
        ("http://[fe80::1%25eth0]:1", "`%eth0`"),
    ] {
        let text = format!("[upstreams]\napp = \"{upstream}\"\n");
        let Err(problems) = load_text(PathBuf::from("gate.toml"), &text) else { panic!("{upstream}") };
        assert!(problems.to_string().contains(hint), "{upstream}: {problems}");
    }
    assert_eq!(settings("\"http://[fe80::1%eth0]:1\"").places, [tcp("fe80::1%eth0", 1)]);
}

#[test]
fn a_host_is_one_that_can_be_looked_up() {
    let label = "a".repeat(63);
    let longest = [&*label, &*label, &*label, &label[..61]].join(".");
    assert_eq!(longest.len(), 253);
    let path = format!("/{}", "s".repeat(106));
    for host in ["app.test.", "a_b-c.test", "xn--bcher-kva.test", "127.1", &longest] {
        assert_eq!(settings(&format!("\"http://{host}\"")).places, [tcp(host, 80)]);
    }
    assert_eq!(settings(&format!("\"unix:{path}\"")).places, [UpstreamAddress::Unix(path.clone().into())]);
    for (upstream, said) in [
        ("http://a..b", "single dots"),
        ("http://.", "single dots"),
        ("http://.test", "single dots"),
        ("http://*:1", "neither a name nor an address"),
        ("http://256.1.1.1", "not an IPv4 address"),
        ("http://127.0.0.01", "without leading zeros"),
        ("http://bücher.test", "`xn--`"),
        (&format!("http://{label}a.test"), "63 between two dots"),
        (&format!("http://{longest}a"), "253 bytes at most"),
        (&format!("unix:{path}s"), "has 108 bytes, and may have 107"),
    ] {
        let text = format!("[upstreams]\napp = \"{upstream}\"\n");
        let Err(problems) = load_text(PathBuf::from("gate.toml"), &text) else { panic!("{upstream}") };
        assert!(problems.to_string().contains(said), "{upstream}: {problems}");
    }
}

#[test]
fn certificates_count_by_what_they_are_and_keys_are_shown_nowhere() {
    if !certificates::can_be_made() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    authority(directory.path(), "ca");
    authority(directory.path(), "other");
    signed(directory.path(), "gate", "ca", "extendedKeyUsage=clientAuth");
    let (ca, certificate, key) = (at("ca.pem"), at("gate.pem"), at("gate.key"));
    let upstream = format!(
        "{{ url = \"https://app\", tls = {{ ca = {ca:?}, cert = {certificate:?}, key = {key:?}, name = \"db\" }} }}"
    );
    let first = settings(&upstream);
    assert_eq!(first.places, [tcp("app", 443)]);
    assert_eq!(first, settings(&upstream));
    let secret = std::fs::read_to_string(&key).unwrap();
    let line = secret.lines().nth(1).unwrap();
    assert!(!format!("{first:?}{:?}", load(&upstream)).contains(line));
    std::fs::copy(at("other.pem"), &ca).unwrap();
    assert_ne!(first, settings(&upstream));
    // Lists of revoked certificates count too.
    revoked(directory.path(), "list", "other", &[]);
    let listed = format!("{{ url = \"https://app\", tls = {{ ca = {ca:?}, crl = {:?} }} }}", at("list.pem"));
    let first = settings(&listed);
    assert_eq!(first, settings(&listed));
    revoked(directory.path(), "list", "other", &["gate"]);
    assert_ne!(first, settings(&listed));
}

/// The gate would answer 504 before it has given up a store that is away.
#[test]
fn a_client_timeout_that_the_wait_for_the_store_outlasts_is_advised_against() {
    let advised = |upstream: &str, settle_timeout: &str, route: &str| {
        let text = format!(
            "[store]\nsettle_timeout = \"{settle_timeout}\"\n[upstreams]\napp = {{ url = \"http://app\"{upstream} }}\n\
             [[routes]]\nname = \"r\"\npath = \"/{{*rest}}\"\n{route}\n"
        );
        let advice = load_text(PathBuf::from("gate.toml"), &text).unwrap().advice;
        let about = advice.into_iter().filter(|advice| advice.message.contains("store.settle_timeout"));
        about.map(|advice| advice.key).next()
    };
    let (client_timeout, timeout) = (Some("upstreams.app.client_timeout"), Some("upstreams.app.timeout"));
    let resend = "recovery = { resend = {} }";
    for (upstream, settle_timeout, route, key) in [
        ("", "5s", "", None),
        ("", "5s", resend, None),
        (", client_timeout = \"6s\"", "5s", "", None),
        (", client_timeout = \"5s\"", "5s", "", client_timeout),
        (", client_timeout = \"4s\"", "5s", "mode = \"accept\"", client_timeout),
        (", client_timeout = \"4s\"", "3s", "", None),
        (", client_timeout = \"4s\"", "5s", "mode = \"pass\"", None),
        (", client_timeout = \"4s\"", "5s", "mode = \"observe\"", None),
        // The attempt's own end comes first.
        (", timeout = \"4s\"", "5s", "", None),
        (", timeout = \"4s\", client_timeout = \"4s\"", "5s", "", None),
        (", timeout = \"4s\"", "5s", resend, timeout),
        ("", "2m", resend, timeout),
        ("", "2m", "", None),
    ] {
        assert_eq!(advised(upstream, settle_timeout, route).as_deref(), key, "{upstream} {settle_timeout} {route}");
    }
}

/// As one who tries it may, whose service has the port that oncegate takes.
#[test]
fn an_upstream_where_oncegate_listens_is_advised_against() {
    let advised = |listen: &str, upstream: &str| {
        let text = format!(
            "[server]\nlisten = \"{listen}\"\n[upstreams]\napp = \"{upstream}\"\n[defaults]\nscope = [\"host\"]\n"
        );
        load_text(PathBuf::from("gate.toml"), &text).unwrap().advice.into_iter().map(|advice| advice.message).next()
    };
    for (listen, upstream, key) in [
        ("127.0.0.1:8080", "http://127.0.0.1:8080", "server.listen"),
        ("127.0.0.1:8080", "http://localhost:8080", "server.listen"),
        ("0.0.0.0:8080", "http://127.0.0.1:8080", "server.listen"),
        ("[::]:80", "https://[::1]:80", "server.listen"),
        ("[::]:80", "http://127.0.0.1:80", "server.listen"),
        ("unix:/run/a.sock", "unix:/run/a.sock", "server.listen"),
        ("127.0.0.1:8080", "http://localhost:9090", "admin.listen"),
    ] {
        let message = advised(listen, upstream).unwrap_or_else(|| panic!("{listen} {upstream}"));
        assert!(message.starts_with(&format!("oncegate itself listens here ({key} is ")), "{message}");
    }
    for (listen, upstream) in [
        ("127.0.0.1:8080", "http://127.0.0.1:3000"),
        ("127.0.0.1:8080", "http://127.0.0.2:8080"),
        ("127.0.0.1:8080", "http://[::1]:8080"),
        ("0.0.0.0:8080", "http://192.0.2.1:8080"),
        ("0.0.0.0:8080", "http://app:8080"),
        ("unix:/run/a.sock", "unix:/run/b.sock"),
    ] {
        assert_eq!(advised(listen, upstream), None, "{listen} {upstream}");
    }
}
