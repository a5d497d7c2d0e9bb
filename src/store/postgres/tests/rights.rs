//! Users who lose a right that claims and endings need: the store is not ready, and nothing is claimed that could not be
//! settled.

use super::faults::{attempt, complete, fresh, id, until_up};
use super::*;

/// A role with the rights that docs/operate/postgresql.md names, and the URL by which it comes in.
struct Gate<'a> {
    database: &'a Database,
    role: String,
}

impl<'a> Gate<'a> {
    fn of(database: &'a Database) -> Self {
        let role = format!("gate_{}", database.name);
        database.run(&format!(
            "CREATE ROLE {role} LOGIN;
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA oncegate TO {role};
             GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO {role}"
        ));
        Self { database, role }
    }

    fn url(&self) -> String {
        let (_, rest) = self.database.url.split_once('@').expect("a user");
        format!("postgres://{}@{rest}", self.role)
    }

    fn run(&self, sql: &str) {
        self.database.run(&sql.replace("{gate}", &self.role));
    }
}

impl Drop for Gate<'_> {
    fn drop(&mut self) {
        self.run("DROP OWNED BY {gate}; DROP ROLE {gate}");
    }
}

/// What takes a right away, and what gives it back.
const LOSSES: [(&str, &str); 5] = [
    ("REVOKE INSERT ON oncegate.record FROM {gate}", "GRANT INSERT ON oncegate.record TO {gate}"),
    ("ALTER TABLE oncegate.record ENABLE ROW LEVEL SECURITY", "ALTER TABLE oncegate.record DISABLE ROW LEVEL SECURITY"),
    // No statement fails then; each finds nothing.
    (
        "ALTER TABLE oncegate.record ENABLE ROW LEVEL SECURITY;
         CREATE POLICY inserts ON oncegate.record FOR INSERT WITH CHECK (true);
         CREATE POLICY reads ON oncegate.record FOR SELECT USING (true)",
        "ALTER TABLE oncegate.record DISABLE ROW LEVEL SECURITY; DROP POLICY inserts ON oncegate.record;
         DROP POLICY reads ON oncegate.record",
    ),
    (
        "REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate FROM {gate};
         GRANT EXECUTE ON FUNCTION oncegate.store_v1 TO {gate}",
        "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO {gate}",
    ),
    (
        "REVOKE EXECUTE ON FUNCTION oncegate.settle_v1 FROM {gate}",
        "GRANT EXECUTE ON FUNCTION oncegate.settle_v1 TO {gate}",
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_on_which_nothing_can_be_claimed_or_settled_is_not_ready() {
    let Some(database) = database() else { return };
    let gate = Gate::of(&database);
    let store = open(&gate.url()).await;
    for (lose, regain) in LOSSES {
        until_up(|| store.ping()).await;
        gate.run(lose);
        let began = Instant::now();
        // What worked a moment ago counts for a moment.
        while store.ping().await.is_ok() {
            assert!(began.elapsed() < Duration::from_secs(20), "it is ready after {lose}");
            sleep(Duration::from_millis(50)).await;
        }
        let refused = Postgres::open(&settings(&gate.url())).await.unwrap_err();
        assert!(matches!(refused, OpenError::Denied(_)), "{lose}: {refused}");
        assert_eq!(
            database.value("SELECT count(*) FROM oncegate.record"),
            "0",
            "{lose}: a proof leaves nothing behind"
        );
        gate.run(regain);
        until_up(|| store.ping()).await;
    }
    assert_eq!(database.value("SELECT count(*) FROM oncegate.record"), "0");
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_claimed_that_could_not_be_settled() {
    let Some(database) = database() else { return };
    let gate = Gate::of(&database);
    let store = open(&gate.url()).await;
    store.claim(id(1), fresh(1)).await.unwrap();
    gate.run("REVOKE EXECUTE ON FUNCTION oncegate.settle_v1 FROM {gate}");
    let denied = store.settle(id(1), attempt(1), complete()).await;
    assert!(matches!(denied, Err(Error::Determinate(_))), "{denied:?}");
    let began = Instant::now();
    let mut claims = 1..=255;
    let refused = loop {
        let number = claims.next().expect("claims are refused before these are used up");
        if let Err(refused) = store.claim(id(number), fresh(number)).await {
            break refused;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "claims go on");
        sleep(Duration::from_millis(20)).await;
    };
    assert!(matches!(refused, Error::Determinate(_)) && refused.to_string().contains("settle_v1"), "{refused}");
    let seen = store.get(id(1)).await.unwrap().expect("it stands").record.version();
    assert!(store.supersede(id(1), seen, fresh(99)).await.is_err());
    assert!(store.ping().await.is_err());

    gate.run("GRANT EXECUTE ON FUNCTION oncegate.settle_v1 TO {gate}");
    // By itself, whether anybody asks if it is ready or not.
    until_up(|| store.claim(id(255), fresh(255))).await;
    store.settle(id(1), attempt(1), complete()).await.unwrap();
    store.ping().await.unwrap();
    store.close().await;
}
