//! What `oncegate check --store` says of encrypted records.

use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::{is_refused, numbered, with_keys};
use crate::reload::reload;
use crate::support::store::kind;
use crate::support::{Gate, Reply, Request, Signal, Upstream, eventually};

/// The key of an answer may be a later one than that of its record.
#[test]
fn an_answer_whose_key_is_missing_is_found_by_a_check() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |_| Reply::ok("x").hold_until(&held));
    let plan = Gate::before(&upstream);
    let gate = with_keys(&plan, &[1]).start();
    let address = gate.address;
    let running = std::thread::spawn(move || Request::post("/charges").key("k-1").body("{}").send(address));
    upstream.wait_for_runs(1);
    assert!(reload(&gate, &with_keys(&plan, &[2, 1])), "{}", gate.log());
    signal.open();
    running.join().expect("an answer").expect(200, "executed");
    gate.stop();
    let checked = |keys: &[u8], status: i32| crate::identity::checked(&with_keys(&plan, keys), status);
    assert!(!checked(&[2, 1], 0).contains("encrypted"));
    for keys in [[1], [2]] {
        let said = checked(&keys, 78);
        assert!(said.contains("1 record is encrypted with a key that `store.encryption_keys` does not have"), "{said}");
        assert!(!said.contains("ok, a start"), "{said}");
    }
}

#[test]
fn a_reload_and_a_start_warn_that_a_key_is_missing() {
    const WARNING: &str = "1 record is encrypted with a key that `store.encryption_keys` does not have";
    let upstream = numbered();
    let plan = Gate::before(&upstream);
    let gate = with_keys(&plan, &[1]).start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    // One that no record needs may go.
    assert!(reload(&gate, &with_keys(&plan, &[1, 2])), "{}", gate.log());
    assert!(reload(&gate, &with_keys(&plan, &[1])), "{}", gate.log());
    with_keys(&plan, &[2]).config();
    let told = Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .args(["reload", "--admin", &gate.admin.to_string()])
        .output()
        .expect("a run of oncegate");
    let said = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.status.success() && said.contains(WARNING) && said.contains("the reload removed key-1"), "{said}");
    assert_eq!(gate.log().matches(WARNING).count(), 1, "{}", gate.log());
    gate.stop();
    for keys in [&[2][..], &[]] {
        let gate = with_keys(&plan, keys).start();
        eventually("the warning", || gate.log().contains(WARNING).then_some(()));
        gate.stop();
    }
}

#[test]
fn changed_routes_are_checked_against_encrypted_records() {
    let upstream = numbered();
    let plan = Gate::before(&upstream).routes("[[routes]]\nname = \"all\"\npath = \"/{*rest}\"\n");
    let next = plan.clone().routes("[[routes]]\nname = \"charges\"\npath = \"/charges\"\nnamespace = \"all\"\n");
    let gate = with_keys(&plan, &[1]).start();
    gate.post("/charges", "k-1", "{}").expect(200, "executed");
    gate.stop();

    let checked = |keys: &[u8], status: i32| crate::identity::checked(&with_keys(&next, keys), status);
    assert!(checked(&[2, 1], 0).contains(": ok, a start"));
    for keys in [&[][..], &[2]] {
        let said = checked(keys, 78);
        assert!(said.contains("1 live key: encrypted with a key that is not in `[store] encryption_keys`"), "{said}");
        assert!(said.contains("Add the key that these records were encrypted with"), "{said}");
    }

    // So are routes that have not changed.
    let same = |keys: &[u8], status: i32| crate::identity::checked(&with_keys(&plan, keys), status);
    assert!(!same(&[2, 1], 0).contains("encrypted"));
    for keys in [&[][..], &[2]] {
        let said = same(keys, 78);
        assert!(said.contains("1 record is encrypted with a key that `store.encryption_keys` does not have"), "{said}");
    }

    // Another service has keys of its own, where services share a store.
    if kind() == "postgres" {
        let other = plan.path("key-3");
        std::fs::write(&other, STANDARD.encode([3; 32])).unwrap();
        let lines = format!("service = \"other\"\nencryption_keys = [{{ id = \"key-3\", file = {other:?} }}]");
        let gate = plan.clone().store(&lines).start();
        gate.post("/charges", "k-1", "{}").expect(200, "executed");
        gate.stop();
        assert!(!same(&[1], 0).contains("encrypted"));
    }
    let runs = upstream.runs();

    // A reload of routes and keys at once reads with the keys that it brings.
    let gate = with_keys(&plan, &[2]).start();
    assert!(!reload(&gate, &with_keys(&next, &[2])), "{}", gate.log());
    is_refused(&gate, &upstream, "k-1");
    assert!(reload(&gate, &with_keys(&next, &[2, 1])), "{}", gate.log());
    gate.post("/charges", "k-1", "{}").expect(200, "replayed");
    assert_eq!(upstream.runs(), runs);
}
