//! A gate whose user may not settle any more is not ready, and forwards nothing that it could not record.

use crate::support::store::migrated;
use crate::support::{Gate, Reply, Upstream, eventually};

#[test]
fn a_gate_that_may_not_settle_forwards_nothing() {
    let Some(database) = migrated() else { return };
    let role = format!("gate_{}", database.name);
    database.run(&format!(
        "CREATE ROLE {role} LOGIN;
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA oncegate TO {role};
         GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO {role}"
    ));
    let (_, rest) = database.url.split_once('@').expect("a user");
    let upstream = Upstream::start(|request| Reply::ok(format!("run {}", request.nth)));
    let plan = Gate::before(&upstream).store_url(&format!("postgres://{role}@{rest}"));
    let gate = plan.store("settle_timeout = \"1s\"").start();
    gate.post("/charges", "before", "{}").expect(200, "executed");

    database.run(&format!("REVOKE EXECUTE ON FUNCTION oncegate.settle_v1 FROM {role}"));
    // It finds out by the first that it cannot settle.
    gate.post("/charges", "first", "{}").expect(200, "unrecorded");
    eventually("it is not ready", || (gate.admin("GET", "/readyz", None).status == 503).then_some(()));
    gate.post("/charges", "second", "{}").expect_problem(503, "store-unavailable");
    assert_eq!(upstream.runs_of("second"), 0);

    database.run(&format!("GRANT EXECUTE ON FUNCTION oncegate.settle_v1 TO {role}"));
    eventually("it is ready", || (gate.admin("GET", "/readyz", None).status == 200).then_some(()));
    gate.post("/charges", "second", "{}").expect(200, "executed");
    eventually("what was answered is recorded", || {
        (gate.post("/charges", "first", "{}").word() == "replayed").then_some(())
    });
    drop(gate);
    database.run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}
