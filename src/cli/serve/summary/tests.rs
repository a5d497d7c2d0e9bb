use std::path::Path;

use super::*;
use crate::config::{Flags, Sources, load, load_text};
use crate::store::{postgres, redis};

/// The block of a configuration, with a version that stays.
fn block(config: &Resolved, store: Durability) -> String {
    Summary::of(config, store).text().replace(VERSION, "VERSION")
}

fn sqlite() -> Durability {
    Durability::sqlite(Path::new("/var/lib/oncegate/oncegate.db"), None)
}

/// Compares a text with a file beside this one.
#[track_caller]
fn is_golden(name: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cli/serve/summary").join(name);
    let text = format!("{text}\n");
    if std::env::var_os("ONCEGATE_BLESS").is_some() {
        std::fs::write(&file, &text).unwrap();
    }
    let golden = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(golden == text, "run with ONCEGATE_BLESS=1 if this is meant:\n{text}");
}

#[test]
fn a_gate_with_one_flag() {
    let flags = Flags { upstream: Some("http://127.0.0.1:3000".to_owned()), ..Flags::default() };
    let config = load(Sources { flags, ..Sources::default() }).unwrap();
    is_golden("default.txt", &block(&config, Durability::sqlite(Path::new("/srv/oncegate.db"), Some("overlayfs"))));
}

#[test]
fn the_examples() {
    for name in ["sidecar", "gateway", "edge"] {
        let mut text = std::fs::read_to_string(format!("config/examples/{name}.toml")).unwrap();
        for file in ["cert", "key", "ca", "gate", "gate-key"] {
            let own = concat!("\"", env!("CARGO_MANIFEST_DIR"), "/tests/servers/own.pem\"");
            text = text.replace(&format!("\"/etc/oncegate/{file}.pem\""), own);
        }
        let config = load_text(format!("{name}.toml").into(), &text).unwrap();
        is_golden(&format!("{name}.txt"), &block(&config, sqlite()));
    }
}

fn loaded(text: &str) -> Resolved {
    let text = format!("{text}\n[upstreams]\napp = \"http://127.0.0.1:3000\"\n");
    load_text("gate.toml".into(), &text).unwrap_or_else(|problems| panic!("{problems}"))
}

#[test]
fn stores_say_what_they_survive_and_risk() {
    let found = postgres::Description {
        is_direct: false,
        version: "15.4".to_owned(),
        database: "gate".to_owned(),
        has_fsync: true,
        has_full_page_writes: false,
        unlogged: Vec::new(),
        hosts: 1,
        synchronous_commit: "on".to_owned(),
        synchronous_standby_names: "standby".to_owned(),
        standbys: Some(vec![postgres::Standby::Synchronous]),
    };
    let postgres = Durability::postgres("db.internal:5432/gate", 8, &found);
    assert!(postgres.place.contains("PostgreSQL 15.4") && postgres.place.contains("through a pooler"), "{postgres:?}");
    assert_eq!(postgres.warnings.len(), 1);
    assert!(postgres.warnings[0].contains("full_page_writes is off"), "{postgres:?}");

    let found = redis::Description { topology: "standalone", versions: vec!["7.0.15".to_owned()], primaries: vec![] };
    assert!(Durability::redis("127.0.0.1:6379", &found).place.starts_with("Redis 7.0.15 at 127.0.0.1:6379"));

    let shown = block(&loaded(""), Durability::memory());
    assert!(shown.contains("survives   nothing") && shown.contains("for tests and trials only"), "{shown}");
}

#[test]
fn what_becomes_of_a_5xx_is_said_of_every_policy() {
    for (entries, expected) in [
        (&[][..], "frees the key: a retry runs again; 502, 504 hold it: the outcome is unknown"),
        (&[("5xx", "hold")], "holds the key: the outcome is unknown"),
        (&[("5xx", "hold"), ("503", "release")], "holds the key: the outcome is unknown; 503 frees it"),
        (&[("5xx", "store")], "is kept: a retry gets it again; 502, 504 hold it: the outcome is unknown"),
        (&[("502", "release"), ("504", "release")], "frees the key: a retry runs again"),
        (
            &[("504", "release"), ("501", "store")],
            "frees the key: a retry runs again; 502 holds it: the outcome is unknown; 501 is kept",
        ),
        (
            &[
                ("500", "hold"),
                ("501", "hold"),
                ("503", "hold"),
                ("505", "hold"),
                ("506", "hold"),
                ("507", "hold"),
                ("508", "hold"),
            ],
            "frees the key: a retry runs again; 500, 501, 502, 503, 504, 505, 506, 507 and 1 more hold it: the outcome \
             is unknown",
        ),
    ] {
        let mut outcomes = Outcomes::default();
        entries.iter().for_each(|(entry, action)| outcomes.insert(entry, action).unwrap());
        assert_eq!(show_server_errors(&outcomes, false), expected, "{entries:?}");
    }
}

/// A retry of an accepted request runs nothing and does not wait: the gate delivers the request.
#[test]
fn what_becomes_of_a_delivery_is_said_where_every_request_is_accepted() {
    let route = "[[routes]]\nname = \"a\"\npath = \"/a\"\nmode = \"accept\"\nrecovery = \"retry\"\n";
    let shown = block(&loaded(route), Durability::memory());
    assert!(shown.contains("is delivered again later; 502, 504 leave the outcome unknown"), "{shown}");
    assert!(shown.contains("it is delivered again, perhaps beside the first attempt"), "{shown}");
    assert!(!shown.contains("a retry runs again"), "{shown}");
}

#[test]
fn callers_are_described_in_words() {
    for (part, expected) in [
        ("host", "the host"),
        (
            "credential",
            "the credential (X-Api-Key, Basic user, token subject, or else cookies; callers without any of these share \
             their keys)",
        ),
        ("header:authorization", "header authorization (a refreshed token is another caller)"),
        ("header:x-tenant", "header x-tenant"),
        ("header:x-tenant?", "header x-tenant, if there is one"),
        ("cookie:session", "cookie session"),
        ("jwt:sub", "claim sub of the token"),
        ("basic:user", "the user of Basic credentials"),
        ("client-ip", "the client's address"),
        ("client-cert:subject", "the subject of the client's certificate"),
        ("client-cert:san", "the names in the client's certificate"),
        ("const:why?", "the constant why?"),
        ("something-new", "something-new"),
    ] {
        assert_eq!(show_part(part), expected);
    }
}

#[test]
fn many_routes_are_counted() {
    let route = |number: usize, mode: &str| {
        format!("[[routes]]\nname = \"{mode}-{number}\"\npath = \"/{mode}/{number}\"\nmode = \"{mode}\"\n")
    };
    let routes: String = (0..MOST + 3).map(|number| route(number, "protect") + &route(number, "pass")).collect();
    let shown = block(&loaded(&routes), sqlite());
    assert_eq!(shown.matches("and 3 more: see `oncegate config print`").count(), 2, "{shown}");
    assert_eq!(shown.matches("frees the key").count(), 1, "routes that are alike share a description:\n{shown}");
    for (route, is_shown) in [("protect-49:", true), ("protect-50:", false), ("pass-49:", true), ("pass-50:", false)] {
        assert_eq!(shown.contains(route), is_shown, "{route}");
    }
}

#[test]
fn a_reload_changes_what_it_sets_and_nothing_else() {
    let begun = Summary::of(&loaded("[admin]\nlisten = \"127.0.0.1:0\""), sqlite());
    let begun = begun.at("127.0.0.1:9090".to_owned(), vec!["127.0.0.1:8080".to_owned(), "unix:/run/gate".to_owned()]);
    assert_eq!(begun.reloaded(&loaded("[server]\nlisten = \"127.0.0.1:1\"")), begun);
    let changed = begun.reloaded(&loaded("[defaults]\nttl = \"36h\"\nrecovery = \"retry\""));
    assert_ne!(changed, begun);
    let text = changed.text();
    for part in ["http://127.0.0.1:8080\n", " unix:/run/gate\n", "http://127.0.0.1:9090,", " 36h;", "recovery = "] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
}

#[test]
fn a_reload_replaces_keys_and_does_not_begin_or_end_encryption() {
    let directory = tempfile::tempdir().unwrap();
    let with = |ids: &[&str]| {
        let entry = |id: &&str| {
            let file = directory.path().join(id);
            std::fs::write(&file, [id.as_bytes()[0] | 0x80; 32]).unwrap();
            format!("{{ id = {id:?}, file = {file:?} }}")
        };
        let entries: Vec<String> = ids.iter().map(entry).collect();
        loaded(&format!("[store]\nencryption_keys = [{}]", entries.join(", ")))
    };
    let at_rest = |summary: &Summary| {
        let text = summary.text();
        let line = text.lines().find_map(|line| line.trim().strip_prefix("at rest").map(str::trim));
        line.unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    let (readable, encrypted) = (Summary::of(&with(&[]), sqlite()), Summary::of(&with(&["a"]), sqlite()));
    assert_eq!(at_rest(&encrypted), "encrypted with the key a");
    let rotated = encrypted.reloaded(&with(&["b", "a"]));
    assert_eq!(at_rest(&rotated), "encrypted with the key b; decrypted with a too");
    assert_eq!(at_rest(&rotated.reloaded(&with(&[]))), at_rest(&rotated));
    assert_eq!(at_rest(&readable.reloaded(&with(&["a"]))), at_rest(&readable));
}

#[test]
fn no_secret_is_shown() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("secret");
    std::fs::write(&file, "a-secret-of-more-than-thirty-two-bytes").unwrap();
    let config = loaded(&format!(
        "[admin]\ntoken_file = {file:?}\n[store]\nurl = \"postgres://gate:s3cret@db.internal/gate\"\n\
         cache = \"redis://:s3cret@cache.internal\"\nid_secret_file = {file:?}\n"
    ));
    let shown = format!("{:?}\n{}", Summary::of(&config, sqlite()), block(&config, sqlite()));
    assert!(shown.contains("with a token") && shown.contains("cache.internal"), "{shown}");
    assert!(!shown.contains("s3cret") && !shown.contains("a-secret"), "{shown}");
}

#[test]
fn a_gate_that_asks_by_itself_says_so() {
    let shown = |more: &str| {
        let probe = format!("recovery = {{ probe = \"/by-key/{{key}}\"{more} }}");
        block(&loaded(&format!("[[routes]]\nname = \"charges\"\npath = \"/charges\"\n{probe}\n")), sqlite())
    };
    let asks = "a retry asks the upstream what became of it (GET /by-key/{key})";
    assert!(shown("").contains(&format!("{asks}\n")), "{}", shown(""));
    let every = shown(", every = \"5m\"");
    assert!(every.contains(&format!("{asks}; the gate asks by itself every 5m\n")), "{every}");
}
