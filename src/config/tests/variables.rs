//! Keys that environment variables set.

use super::{APP, Case};
use crate::idempotency::grpc::Status;
use crate::idempotency::settle::OutcomeAction;

#[test]
fn variables_have_the_type_that_their_key_needs() {
    let resolved = Case::new("")
        .variable("ONCEGATE_UPSTREAMS__APP__URL", APP)
        .variable("ONCEGATE_STORE__SERVICE", "0042")
        .variable("ONCEGATE_SERVER__LISTEN", "[\"127.0.0.1:1\", \"[::1]:2\"]")
        .variable("ONCEGATE_DEFAULTS__KEY__REQUIRED", "true")
        .variable("ONCEGATE_DEFAULTS__KEY__MAX_LENGTH", "64")
        .variable("ONCEGATE_DEFAULTS__SCOPE", "[\"const:all\"]")
        .variable("ONCEGATE_DEFAULTS__OUTCOMES__429", "store")
        .variable("ONCEGATE_DEFAULTS__MAX_REQUEST_BODY", "1024")
        .variable("ONCEGATE_LIMITS__MAX_HEADERS", "50")
        .variable("ONCEGATE_LIMITS__MAX_HEADER_SIZE", "8KiB")
        .variable("ONCEGATE_HEADERS__EXPIRES", "false")
        .variable("ONCEGATE_CONFIG", "not a key")
        .variable("ONCEGATE_ADMIN_CERT", "not a key")
        .variable("ONCEGATE_BLESS", "1")
        .variable("ONCEGATE_TEST_STORE", "sqlite")
        .variable("PATH", "/bin")
        .load();
    assert_eq!(&*resolved.gate.service, "0042");
    assert_eq!(resolved.server.listen.len(), 2);
    assert_eq!(resolved.gate.headers.expires, None);
    let limits = &resolved.server.limits;
    assert_eq!((limits.max_headers, limits.max_header_size), (50, 8192));
    let policy = &resolved.router.routes()[0].policy;
    assert!(policy.key.required);
    assert_eq!((policy.key.max_length, policy.max_request_body), (64, 1024));
    assert_eq!(policy.scope[0].to_string(), "const:all");
    assert_eq!(policy.outcomes.status.len(), 1);
    assert!(resolved.advice.is_empty());
}

#[test]
fn a_variable_cannot_set_a_part_of_a_list() {
    let text = "[upstreams]\napp = \"http://app\"\n[[routes]]\nname = \"a\"\npath = \"/a\"\n";
    let problems = Case::new(text).variable("ONCEGATE_ROUTES__0__TTL", "1h").problems();
    let expected = "ONCEGATE_ROUTES__0__TTL: routes: expected a list of tables, found a table\n    hint: a variable cannot set a part";
    assert!(problems.contains(expected), "{problems}");
}

#[test]
fn a_table_and_its_keys_cannot_both_be_set_by_variables() {
    let problems = Case::new("")
        .variable("ONCEGATE_UPSTREAMS__APP", "http://a")
        .variable("ONCEGATE_UPSTREAMS__APP__URL", "http://b")
        .problems();
    assert!(problems.starts_with("ONCEGATE_UPSTREAMS__APP__URL: upstreams.app.url: another variable"), "{problems}");
}

/// Names of variables have no small letters, and those of statuses have no others.
#[test]
fn a_status_of_grpc_keeps_its_case_in_the_name_of_a_variable() {
    let of = |name: &str, value: &str| {
        Case::new("[upstreams]\napp = \"http://app\"\n")
            .variable(&format!("ONCEGATE_DEFAULTS__OUTCOMES__{name}"), value)
    };
    for name in ["GRPC:UNAVAILABLE", "grpc:UNAVAILABLE", "GRPC:14"] {
        let resolved = of(name, "release").load();
        let outcomes = &resolved.router.routes()[0].policy.outcomes;
        assert_eq!(outcomes.grpc.get(&Status::Unavailable), Some(&OutcomeAction::Release), "{name}");
    }
    let problems = of("GRPC:UNAVAILABEL", "release").problems();
    assert!(problems.contains("grpc:UNAVAILABEL"), "{problems}");
}

#[test]
fn a_number_in_a_variable_is_no_fraction() {
    for (name, value, found) in [
        ("KEY__REQUIRED", "1", "expected true or false, found a number"),
        ("SCOPE", "5", "expected a list, found a number"),
        ("SCOPE", "-5", "expected a list, found a negative number"),
        ("KEY__MAX_LENGTH", "1.5", "expected a whole number, found a fraction"),
    ] {
        let problems = Case::new("").variable(&format!("ONCEGATE_DEFAULTS__{name}"), value).problems();
        assert!(problems.contains(found), "{name}: {problems}");
    }
}

#[test]
fn a_hint_for_text_in_the_place_of_a_list_can_be_followed() {
    for (name, value, hint) in [
        ("SCOPE", "host", "write [\"host\"]"),
        ("SCOPE", "host, credential,", "write [\"host\", \"credential\"]"),
        ("SCOPE", " ", "write [\"const:shared\"] if all clients may get each other's answers"),
        ("KEY__FROM", "", "write [\"header:Idempotency-Key\"], or remove it"),
        ("FINGERPRINT__EXCLUDE", "", "write []"),
        ("FINGERPRINT__EXCLUDE", "/a,/b", "write [\"/a\", \"/b\"]"),
        ("SCOPE", "[\"host\"", "write it as TOML has it: "),
    ] {
        let problems = Case::new("").variable(&format!("ONCEGATE_DEFAULTS__{name}"), value).problems();
        let hints: Vec<&str> = problems.lines().filter_map(|line| line.trim().strip_prefix("hint: ")).collect();
        assert!(hints.iter().any(|given| given.starts_with(hint)), "{name} {value:?}: {problems}");
    }
}

/// As the reference says.
#[test]
fn a_table_in_a_variable_leaves_what_it_does_not_name() {
    let text = "[upstreams]\napp = \"http://app\"\n[defaults]\nkey = { max_length = 64 }\nscope = [\"host\", \"credential\"]\n\
                recovery = { probe = \"/x/{key}\", after = \"60s\" }\n";
    let resolved = Case::new(text)
        .variable("ONCEGATE_DEFAULTS__KEY", "{ required = true }")
        .variable("ONCEGATE_DEFAULTS__SCOPE", "[\"host\"]")
        .variable("ONCEGATE_DEFAULTS__RECOVERY", "{ every = \"5m\" }")
        .load();
    let policy = &resolved.router.routes()[0].policy;
    assert_eq!((policy.key.required, policy.key.max_length, policy.scope.iter().count()), (true, 64, 1));
    let printed = resolved.effective.to_string();
    assert!(printed.contains("after = \"60s\", every = \"5m\""), "{printed}");
}
