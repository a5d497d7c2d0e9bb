//! What is made of a `redis://` URL, as a store and as a cache, and what is shown of it.

use std::path::PathBuf;

use proptest::prelude::*;

use super::super::tests::loaded;
use super::super::{Store, tests};
use super::*;
use crate::config::{Problems, Resolved, Sources, load};
use crate::store::servers::certificates;

/// Both places of such a URL.
const KEYS: [&str; 2] = ["url", "cache"];

/// Loads a configuration with this URL at this key, and what else that needs.
fn with(key: &str, url: &str, more: &str) -> Result<Resolved, Problems> {
    let before = if key == "cache" { "url = \"postgres://localhost\"\n" } else { "" };
    tests::loaded(&format!("{before}{key} = \"{url}\"\n{more}"), &[])
}

#[track_caller]
fn redis<'a>(resolved: &'a Resolved, key: &str) -> &'a Redis {
    match (&resolved.store, &resolved.cache) {
        (_, Some(cache)) if key == "cache" => cache,
        (Store::Redis(store), None) if key == "url" => store,
        other => panic!("{other:?}"),
    }
}

/// The same at both places.
#[track_caller]
fn both(url: &str) -> Redis {
    let [store, cache] = KEYS.map(|key| {
        let resolved = with(key, url, "").unwrap_or_else(|problems| panic!("{key} {url}: {problems}"));
        redis(&resolved, key).clone()
    });
    assert_eq!((store.servers(), &store.url), (cache.servers(), &cache.url));
    assert_eq!((&store.servers.user, &store.servers.password), (&cache.servers.user, &cache.servers.password));
    store
}

#[test]
fn what_a_url_leaves_open_is_usual() {
    let servers = both("redis://cache.internal").servers;
    assert_eq!(servers.topology, Topology::Standalone);
    assert_eq!(servers.hosts, [("cache.internal".to_owned(), 6379)]);
    assert_eq!((servers.user, servers.password, servers.database), (None, None, 0));
    assert!(servers.tls.is_none());
    let tls = both("rediss://cache.internal").servers.tls.unwrap();
    assert!(tls.roots.is_none() && tls.identity.is_none(), "the system's");
    for url in ["redis://a?cluster=false", "redis://a/", "redis://a/0", "redis://@a", "redis://:@a"] {
        let servers = both(url).servers;
        assert_eq!((servers.topology, servers.database, servers.user), (Topology::Standalone, 0, None), "{url}");
    }
}

#[test]
fn every_part_and_parameter_counts() {
    let all = both("redis://ga%40te:p%3Aw%2F@a,b:7000,[::1],10.0.0.1:1/12").servers;
    let hosts: Vec<(&str, u16)> = all.hosts.iter().map(|(host, port)| (&**host, *port)).collect();
    assert_eq!(hosts, [("a", 6379), ("b", 7000), ("::1", 6379), ("10.0.0.1", 1)]);
    assert_eq!((all.user.as_deref(), all.password.as_deref(), all.database), (Some("ga@te"), Some("p:w/"), 12));
    let sentinel = both("redis://:pw@a,b:1/3?sentinel=my-first&sentinel_auth=true").servers;
    assert_eq!(sentinel.hosts, [("a".to_owned(), 26379), ("b".to_owned(), 1)]);
    assert_eq!(sentinel.topology, Topology::Sentinel { primary: "my-first".to_owned(), is_guarded: true });
    let open = both("redis://:pw@a?sentinel=first").servers;
    assert_eq!(open.topology, Topology::Sentinel { primary: "first".to_owned(), is_guarded: false });
    assert_eq!(both("redis://a,b/0?cluster=true").servers.topology, Topology::Cluster);
    let behind = both("redis://gate@a?password=s%26cret").servers;
    assert_eq!((behind.user.as_deref(), behind.password.as_deref()), (Some("gate"), Some("s&cret")));
}

#[test]
fn people_are_told_where_it_is() {
    for (url, shown) in [
        ("redis://a", "a:6379"),
        ("redis://u:s3cret@a:1,[::1]/2", "a:1,[::1]:6379/2"),
        ("redis://a,b/3?sentinel=first", "a:26379,b:26379/3 (Sentinels of first)"),
        ("rediss://a?cluster=true", "a:6379 (cluster)"),
    ] {
        assert_eq!(both(url).servers(), shown, "{url}");
    }
}

#[test]
fn certificates_are_read_at_the_start() {
    if !certificates::can_be_made() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    for name in ["one", "another"] {
        certificates::authority(directory.path(), name);
    }
    let [one, key, another] = ["one.pem", "one.key", "another.key"].map(|name| directory.path().join(name));
    let content = |file: &PathBuf| std::fs::read(file).unwrap();
    let (roots, certificate) = (one.display(), one.display());
    let tls = both(&format!("rediss://a?cacert={roots}&cert={certificate}&key={}", key.display())).servers.tls.unwrap();
    assert_eq!((tls.roots, tls.identity), (Some(content(&one)), Some((content(&one), content(&key)))));
    for name in KEYS {
        let url = format!("rediss://a?cacert={roots}&cert={certificate}&key={}", another.display());
        let problems = with(name, &url, "").unwrap_err().to_string();
        assert!(problems.contains(&format!("store.{name}: `cert` and `key` cannot be used: ")), "{problems}");
        assert!(problems.ends_with("\n1 problem"), "{problems}");
    }
}

#[test]
fn a_password_comes_from_one_place_and_is_not_shown() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    std::fs::write(&file, "s3cret\n").unwrap();
    for key in KEYS {
        let file_key = if key == "url" { "password_file" } else { "cache_password_file" };
        let named = format!("{file_key} = {file:?}");
        for (url, more, shown) in [
            ("redis://gate:s3cret@a/1", "", "redis://gate:@a/1"),
            ("redis://:s3cret@a", "", "redis://:@a"),
            ("redis://gate@a?password=s3cret", "", "redis://gate:@a"),
            (
                "redis://a?sentinel=first&password=s3cret&sentinel_auth=true",
                "",
                "redis://a?sentinel=first&sentinel_auth=true",
            ),
            ("redis://gate@a", &*named, "redis://gate:@a"),
            ("redis://a", &*named, "redis://a"),
        ] {
            let resolved = with(key, url, more).unwrap_or_else(|problems| panic!("{url}: {problems}"));
            assert_eq!(redis(&resolved, key).servers.password.as_deref(), Some("s3cret"), "{key} {url}");
            assert_eq!(redis(&resolved, key).url, shown);
            let printed = resolved.effective.to_string();
            let debugged = format!("{resolved:?} {:#?} {:?}", resolved.store, redis(&resolved, key).servers);
            for text in [&printed, &debugged, &format!("{:?}", resolved.advice)] {
                assert!(!text.contains("s3cret"), "{text}");
            }
            assert!(printed.contains(&format!("{key} = \"{shown}\" # a password would not be shown")), "{printed}");
            assert_eq!(printed.contains(&named), !more.is_empty(), "{printed}");
            let again = directory.path().join("again.toml");
            std::fs::write(&again, &printed).unwrap();
            let again = load(Sources { file: Some(again), ..Sources::default() }).unwrap();
            assert_eq!(again.effective.to_string(), printed);
            assert_eq!(redis(&again, key).servers.topology, redis(&resolved, key).servers.topology);
        }
        let problems = with(key, "redis://:other@a", &named).unwrap_err().to_string();
        assert!(problems.contains(&format!("store.{file_key}: the password stands in the URL as well")), "{problems}");
        assert!(!problems.contains("s3cret") && !problems.contains("other@"), "{problems}");
        let problems = with(key, "redis://:%ff@a", "").unwrap_err().to_string();
        assert!(problems.contains("the password is not text in UTF-8"), "{problems}");
    }
    std::fs::write(&file, b"\xff").unwrap();
    let named = format!("password_file = {file:?}");
    let problems = with("url", "redis://a", &named).unwrap_err().to_string();
    assert!(problems.contains("password is not text in UTF-8"), "{problems}");
}

#[test]
fn a_cache_can_come_from_the_environment() {
    let store = "url = \"postgres://localhost\"";
    let variable = |value: &str| loaded(store, &[("ONCEGATE_STORE__CACHE", value)]);
    let resolved = variable("redis://:s3cret@a").unwrap();
    assert_eq!(redis(&resolved, "cache").servers.password.as_deref(), Some("s3cret"));
    let problems = variable("redis://:s3cret@a/x").unwrap_err().to_string();
    assert!(problems.starts_with("ONCEGATE_STORE__CACHE: store.cache: the database is not"), "{problems}");
    assert!(loaded(store, &[]).unwrap().cache.is_none());
}

#[test]
fn bounds_of_memory_are_read_on_every_store() {
    for url in ["memory:", "sqlite:a.db", "postgres://localhost", "redis://localhost"] {
        let usual = loaded(&format!("url = \"{url}\""), &[]).unwrap();
        assert_eq!((usual.cache_max_bytes, usual.cache_max_entries), (32 << 20, 65_536));
        let own = format!("url = \"{url}\"\ncache_max_bytes = \"1MiB\"\ncache_max_entries = 1");
        let own = loaded(&own, &[]).unwrap();
        assert_eq!((own.cache_max_bytes, own.cache_max_entries), (1 << 20, 1));
        let printed = own.effective.to_string();
        assert!(printed.contains("cache_max_bytes = \"1MiB\"\ncache_max_entries = 1\n"), "{printed}");
    }
    let most = "cache_max_bytes = \"1024GiB\"\ncache_max_entries = 100000000";
    assert_eq!(loaded(most, &[]).unwrap().cache_max_entries, 100_000_000);
    assert_eq!(loaded("cache_max_bytes = \"0B\"", &[]).unwrap().cache_max_bytes, 0);
}

/// What is advised of a key.
fn advice(key: &str, url: &str) -> Vec<String> {
    let resolved = with(key, url, "").unwrap_or_else(|problems| panic!("{url}: {problems}"));
    let advice = resolved.advice.into_iter().filter(|advice| advice.key == format!("store.{key}"));
    advice.map(|advice| advice.message).collect()
}

#[test]
fn a_store_outside_the_promise_is_told_of() {
    let of_store = advice("url", "redis://localhost");
    assert!(of_store.len() == 1 && of_store[0].contains("outside the promise"), "{of_store:?}");
    assert_eq!(advice("cache", "redis://localhost"), [""; 0]);
}

#[test]
fn what_goes_far_unencrypted_is_advised_against() {
    for url in
        ["redis://gate:s3cret@cache", "redis://localhost,cache?password=s3cret", "redis://:s3cret@cache?cluster=true"]
    {
        for key in KEYS {
            let advice = advice(key, url);
            let told = "the password goes to cache unencrypted, and so does all that is kept there: write rediss://";
            assert_eq!(advice.iter().filter(|advice| advice.starts_with(told)).count(), 1, "{url}: {advice:?}");
            assert!(!format!("{advice:?}").contains("s3cret"), "{advice:?}");
        }
    }
    for url in ["rediss://:s3cret@cache", "redis://:s3cret@localhost,127.0.0.1,[::1]", "redis://cache"] {
        assert_eq!(advice("cache", url), [""; 0], "{url}");
    }
}

#[test]
fn a_user_without_a_password_is_told_of() {
    for url in ["redis://gate:@localhost", "redis://localhost?sentinel=first&sentinel_auth=true"] {
        let advice = advice("cache", url);
        assert!(advice.len() == 1 && advice[0].starts_with("without a password, "), "{url}: {advice:?}");
        assert!(advice[0].contains("cache_password_file"), "{advice:?}");
    }
}

/// As `redis-cli` has it, what stands there without a colon is a password.
#[test]
fn what_could_be_a_password_is_not_taken_for_a_user() {
    for key in KEYS {
        let problems = with(key, "redis://s3cret@localhost", "").unwrap_err().to_string();
        assert!(problems.contains("it could be a user or a password") && !problems.contains("s3cret"), "{problems}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases / 4))]

    /// Whatever a password that is not encoded makes of a URL, nothing of it is shown, whether it is taken or refused.
    #[test]
    fn nothing_of_a_password_is_ever_shown(
        middle in "[a-z0-9@/?#&%:=,]{0,12}",
        user in "(gate)?",
        behind in "(/3)?(\\?cluster=true|\\?sentinel=m)?",
    ) {
        // Longer than what is random in the path of a temporary file, which problems name.
        let part = "Zq9Zq9Zq";
        for key in KEYS {
            let shown = match with(key, &format!("redis://{user}:{part}{middle}{part}@h{behind}"), "") {
                Ok(resolved) => {
                    prop_assert!(redis(&resolved, key).servers.password.is_some());
                    prop_assert_eq!(&redis(&resolved, key).servers.hosts[0].0, "h");
                    format!("{resolved:?}{}", resolved.effective)
                }
                Err(problems) => format!("{problems}{problems:?}"),
            };
            prop_assert!(!shown.contains(part), "{}", shown);
        }
    }
}
