use std::sync::Arc;

use super::advice::scope_word;
use super::*;
use crate::config;
use crate::idempotency::description::NamespaceDescription;
use crate::idempotency::policy::Mode;
use crate::idempotency::policy::Policy;
use crate::idempotency::scope::ScopePart;
use crate::store::{LiveKeys, NamespaceRuleSet};

/// 2026-11-23T14:00:00Z
const UNTIL: u64 = 1_795_442_400_000;

const OLD_SCOPE: &str = "scope = [\"host\", \"header:Authorization\", \"header:X-Api-Key\"]";

fn config(text: &str) -> config::Resolved {
    let text = format!("{text}\n[upstreams]\napp = \"http://127.0.0.1:3000\"\n");
    config::load_text("gate.toml".into(), &text).unwrap_or_else(|problems| panic!("{problems}"))
}

fn live(route: &str, keys: u64, in_flight: u64) -> LiveKeys {
    let until = (keys > in_flight).then_some(Timestamp(UNTIL));
    LiveKeys { route: route.into(), keys, in_flight, until }
}

/// What a start with `next` says where `former` was adopted and has live keys in these namespaces; `with_descriptions`
/// is false where a version of oncegate adopted it that kept none.
fn said(former: &str, next: &str, lives: &[(&str, &[LiveKeys])], with_descriptions: bool) -> String {
    let (former, next) = (config(former), config(next));
    let (_, identities) = IdentityRules::of(&former.gate, &former.router).adoption();
    let rules = IdentityRules::of(&next.gate, &next.router);
    let (_, adopting) = rules.adoption();
    let on_file: Vec<NamespaceRules> = identities.iter().cloned().map(on_file).collect();
    let changes: Vec<IdentityChange> = identities
        .into_iter()
        .filter(|rule| !adopting.iter().any(|next| next.digest == rule.digest && next.namespace == rule.namespace))
        .filter_map(|rule| {
            let (_, live) = lives.iter().find(|(namespace, _)| **namespace == *rule.namespace)?;
            Some(IdentityChange {
                service: rule.service,
                namespace: rule.namespace,
                digest: rule.digest,
                description: rule.description.filter(|_| with_descriptions),
                live: live.to_vec(),
            })
        })
        .collect();
    assert!(!changes.is_empty(), "nothing changed");
    let forgotten = Forgotten { changes, lost: Vec::new() };
    report(&forgotten, rules, &on_file, &Written::of(&next), Occasion::Start)
}

const CHARGE: &str = "[[routes]]\nname = \"create-charge\"\nmethods = [\"POST\"]\npath = \"/v1/charges\"\n";
const REFUND: &str = "[[routes]]\nname = \"refund\"\npath = \"/v1/refunds\"\n";
const TENANT: &str = "scope = [\"header:X-Tenant\"]\n";

/// Two files hold the reports of all cases: those about changed rules, and those about routes that no longer take the requests of
/// live keys. With `ONCEGATE_BLESS=1` the test writes them instead of comparing.
#[test]
fn each_change_is_told_with_what_to_do() {
    let old = format!("[defaults]\n{OLD_SCOPE}\n");
    let defaults = |lines: &str| format!("[defaults]\n{lines}\n");
    let one = |namespace| [(namespace, [live(namespace, 12, 1)])];
    let one = |namespace: &'static str| one(namespace).map(|(name, live)| (name, live.to_vec()));
    let run = |former: &str, next: &str, lives: &[(&'static str, Vec<LiveKeys>)], described: bool| {
        let lives: Vec<(&str, &[LiveKeys])> = lives.iter().map(|(name, live)| (*name, live.as_slice())).collect();
        said(former, next, &lives, described)
    };
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "a secret of more than thirty-two bytes").unwrap();
    let secret = format!("[store]\nid_secret_file = {:?}\n", file.path());
    let tenant = |route: &str| format!("{route}{TENANT}");
    let cases = [
        ("the first routes", run(&old, &[&old, CHARGE, REFUND].concat(), &one("default"), true)),
        ("the first route", run("", CHARGE, &one("default"), true)),
        ("the first routes, with rules of their own", {
            run(&defaults("scope = [\"host\"]"), &[&tenant(CHARGE), REFUND].concat(), &one("default"), true)
        }),
        ("a route that was renamed", {
            let renamed = CHARGE.replace("create-charge", "charge");
            run(&[CHARGE, REFUND].concat(), &[&renamed, REFUND].concat(), &one("create-charge"), true)
        }),
        ("a route that was removed", run(&[CHARGE, REFUND].concat(), CHARGE, &one("refund"), true)),
        ("a route that observes from now on", {
            run(CHARGE, &[CHARGE, "mode = \"observe\"\n"].concat(), &one("create-charge"), true)
        }),
        (
            "another scope",
            run(&tenant(CHARGE), &[CHARGE, "scope = [\"host\"]\n"].concat(), &one("create-charge"), true),
        ),
        (
            "another scope without routes",
            run(&defaults(TENANT), &defaults("scope = [\"host\"]"), &one("default"), true),
        ),
        ("the default scope of an earlier version", run(&old, &defaults("scope = [\"host\"]"), &one("default"), false)),
        ("an earlier version, and the first route", run(&old, &tenant(CHARGE), &one("default"), false)),
        ("another key", run(CHARGE, &[CHARGE, "key.from = [\"query:id\"]\n"].concat(), &one("create-charge"), true)),
        ("another fingerprint", {
            let by = |of: &str| defaults(&format!("{TENANT}key.from = [\"fingerprint\"]\nfingerprint.of = [{of}]"));
            run(&by("\"method\", \"path\", \"body\", \"header:x-a\""), &by("\"path\", \"body\""), &one("default"), true)
        }),
        ("other proxies", {
            let trusted =
                |net: &str| format!("[server]\ntrusted_proxies = [\"{net}\"]\n[defaults]\nscope = [\"client-ip\"]\n");
            run(&trusted("10.0.0.0/8"), &trusted("10.1.0.0/16"), &one("default"), true)
        }),
        ("a secret", run("", &secret, &one("default"), true)),
        ("no secret", run(&secret, "", &one("default"), true)),
        ("another service", run("", "[store]\nservice = \"billing\"\n", &one("default"), true)),
        ("rules that nobody knows", run(&defaults("scope = [\"header:X-Gone\"]"), "", &one("default"), false)),
        ("rules that nobody knows, and the first route", {
            run(&defaults("scope = [\"header:X-Gone\"]"), CHARGE, &one("default"), false)
        }),
        ("several", {
            let former = [tenant(CHARGE), tenant(REFUND)].concat();
            let next = [CHARGE, "scope = [\"host\"]\n", REFUND, "scope = [\"host\"]\n"].concat();
            let lives = [
                ("create-charge", vec![live("create-charge", 1, 1)]),
                ("refund", vec![live("back", 2, 0), live("refund", 3, 0)]),
            ];
            run(&former, &next, &lives, true)
        }),
    ];
    let other = |name| LossReason::Other(Arc::from(name));
    let open = "[[routes]]\nname = \"open\"\npath = \"/v1/open\"\nmode = \"pass\"\n";
    let named = [CHARGE, "namespace = \"default\"\n"].concat();
    let kept = [
        ("a route that takes less", lost("", &named, &[(LossReason::NoRoute, 1, true)], Occasion::Start)),
        ("a route that takes less, after an earlier version", {
            lost("", &named, &[(LossReason::NoRoute, 7, false)], Occasion::Start)
        }),
        ("routes that take requests away", {
            let next = [&*named, open, REFUND].concat();
            let instead = [(LossReason::Unprotected("open".into(), Mode::Pass), 2, true), (other("refund"), 9, true)];
            lost("", &next, &instead, Occasion::Start)
        }),
        ("a route that takes requests away, and has keys", {
            let former = [&*named, CHARGE.replace("charge", "refund").as_str()].concat();
            let next = format!("{former}[[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\n");
            lost(&former, &next, &[(other("create-refund"), 1, true)], Occasion::Start)
        }),
        (
            "a reload",
            lost(
                "",
                &named,
                &[(LossReason::NoRoute, 2, true), (LossReason::Sealed, 5, true), (LossReason::Unreadable, 1, true)],
                Occasion::Reload,
            ),
        ),
        ("a route that accepts and is renamed", {
            let next = [&named.replace("create-charge", "charges"), "mode = \"accept\"\n"].concat();
            lost("", &next, &[(LossReason::Undelivered("create-charge".into()), 3, true)], Occasion::Reload)
        }),
        ("several upstreams", {
            let next = format!(
                "default_upstream = \"other\"\n{named}upstream = \"app\"\n[upstreams.other]\nurl = \"http://127.0.0.1:2\"\n"
            );
            lost("", &next, &[(LossReason::NoRoute, 1, true)], Occasion::Start)
        }),
    ];
    let upgrade = [("an upgrade, where the default scope is another one now", upgraded())];
    are_as_agreed("rules.golden.txt", cases);
    are_as_agreed("routes.golden.txt", kept.into_iter().chain(upgrade));
}

fn are_as_agreed(file: &str, cases: impl IntoIterator<Item = (&'static str, String)>) {
    let mut reports = String::new();
    for (case, said) in cases {
        assert!(!said.contains("s3cret") && !said.contains("more than thirty-two"), "{said}");
        assert!(said.lines().all(|line| line.trim_end() == line), "{said}");
        reports.push_str(&format!("# {case}\n\n{said}\n\n\n"));
    }
    let golden = format!("src/cli/identity_changes/{file}");
    if std::env::var_os("ONCEGATE_BLESS").is_some() {
        std::fs::write(&golden, &reports).unwrap();
    }
    let agreed = std::fs::read_to_string(&golden).unwrap_or_default();
    assert_eq!(agreed, reports, "run with ONCEGATE_BLESS=1 if this is meant");
}

/// The report for `next` where `former` was adopted, and where so many keys of the namespace `default` are lost like this;
/// with or without the former routes.
fn lost(former: &str, next: &str, instead: &[(LossReason, u64, bool)], occasion: Occasion) -> String {
    let (former, next) = (config(former), config(next));
    let (_, identities) = IdentityRules::of(&former.gate, &former.router).adoption();
    let found = identities.iter().find(|rule| &*rule.namespace == "default").unwrap();
    let described = NamespaceDescription::parse(found.description.as_deref().unwrap()).unwrap();
    let routes = described.coverage.unwrap().routes;
    let lost = instead.iter().map(|(reason, keys, is_known)| LostKeys {
        namespace: "default".into(),
        reason: reason.clone(),
        keys: *keys,
        in_flight: if matches!(reason, LossReason::Undelivered(_)) { *keys } else { keys / 5 },
        until: Some(Timestamp(UNTIL)).filter(|_| !matches!(reason, LossReason::Undelivered(_))),
        examples: (0..*keys).take(3).map(|number| format!("POST /v1/things/{number}")).collect(),
        methods: ["POST".to_owned()].into(),
        former: routes.iter().filter(|_| *is_known).cloned().collect(),
    });
    let forgotten = Forgotten { changes: Vec::new(), lost: lost.collect() };
    let on_file: Vec<NamespaceRules> = identities.into_iter().map(on_file).collect();
    report(&forgotten, IdentityRules::of(&next.gate, &next.router), &on_file, &Written::of(&next), occasion)
}

fn on_file(rule: NamespaceRuleSet) -> NamespaceRules {
    let NamespaceRuleSet { service, namespace, digest, .. } = rule;
    NamespaceRules { service, namespace, digest: Some(digest), periods: Vec::new() }
}

/// What a start says with other routes than the default one, and with a default scope that is not what it was.
fn upgraded() -> String {
    let rules = |scope: &[&str]| RulesDescription {
        scope: scope.iter().map(|&part| part.to_owned()).collect(),
        key: vec!["header:idempotency-key".to_owned()],
        ..RulesDescription::default()
    };
    let now = || rules(&["host", "credential"]);
    let names = ["create-charge", "refund"];
    let routes = names.map(|name| PresentRoute { name, namespace: name, is_on_file: true, rules: now() });
    let places = names.map(|name| (name, Some("gate.toml:1".to_owned()))).into();
    let present = Present {
        service: "default",
        default_scope: now().scope,
        routes: routes.into(),
        unprotected: Vec::new(),
        places,
        upstream: None,
        accepts: false,
    };
    let former = Former::Recognised(rules(&["host", "header:authorization", "header:x-api-key"]));
    let changes = names.map(|name| IdentityChange {
        service: "default".into(),
        namespace: name.into(),
        digest: [1; 32],
        description: None,
        live: vec![live(name, 7, 0)],
    });
    text(&present, &changes.each_ref().map(|change| (change, &former)), &[], Occasion::Start)
}

/// The word for a part that earlier versions let a request lack.
#[test]
fn a_former_scope_is_written_as_it_was_meant() {
    let scope = ["host", "header:x-api-key", "cookie:Sid", "const:a", "client-ip"].map(str::to_owned);
    let Policy { key, fingerprint, .. } = Policy::default();
    let rules = RulesDescription::of(&[ScopePart::Host], &key, &fingerprint, "", false);
    let words = |former: &Former| scope.each_ref().map(|part| scope_word(part, former));
    let recognised = words(&Former::Recognised(rules.clone()));
    assert_eq!(recognised, ["host", "header:X-Api-Key?", "cookie:Sid?", "const:a", "client-ip"]);
    let described = words(&Former::Described(rules));
    assert_eq!(described, ["host", "header:X-Api-Key", "cookie:Sid", "const:a", "client-ip"]);
}

#[test]
fn a_rule_for_addresses_is_shown_in_the_words_of_the_configuration() {
    for (kept, shown) in [
        ("XForwarded 10.0.0.0/8", "x-forwarded 10.0.0.0/8"),
        ("Rfc7239 10.0.0.0/8 by the PROXY protocol", "rfc7239 10.0.0.0/8 by the PROXY protocol"),
        (" by the PROXY protocol", " by the PROXY protocol"),
    ] {
        assert_eq!(in_words_of_the_configuration(kept), shown);
    }
}
