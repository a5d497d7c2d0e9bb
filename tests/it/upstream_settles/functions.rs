//! `oncegate.complete` and `oncegate.assert_current`, called as an upstream calls them.

use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode};
use oncegate::idempotency::codec::{Answer, Content};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::{migrated, quoted, tokio};
use crate::servers::{Database, Session};

/// What is raised where the attempt is not current.
const NOT_CURRENT: &str = "OG001: ";
/// What is raised where an argument is wrong.
const WRONG: &str = "22023: ";

/// The tokens of attempts, by number.
fn token(number: u32) -> String {
    format!("{number:032x}")
}

/// Claims a record for an attempt of the same number: a lease of 30 s, a ttl of a minute, an unknown ttl of an hour.
#[track_caller]
fn claim(session: &Session, number: u32) {
    let (id, attempt) = (format!("'\\x{number:064x}'::bytea"), format!("'\\x{}'::bytea", token(number)));
    session.run(&format!(
        "SELECT oncegate.claim_v1(ARRAY[{id}], ARRAY[{attempt}], '{{30000}}', '{{60000}}', '{{3600000}}', '{{1}}', \
         ARRAY['\\x'::bytea])"
    ));
}

#[track_caller]
fn state(session: &Session, number: u32) -> String {
    session.value(&format!("SELECT state FROM oncegate.record WHERE id = '\\x{number:064x}'"))
}

fn complete(number: u32) -> String {
    format!("SELECT oncegate.complete('{}', 201, '[[\"X-A\", \"1\"]]', 'paid')", token(number))
}

fn assert_current(number: u32) -> String {
    format!("SELECT oncegate.assert_current('{}')", token(number))
}

/// A session of a role that was given nothing.
#[track_caller]
fn upstream(database: &Database) -> Session {
    let session = database.session();
    session.run(
        "DO $$ BEGIN CREATE ROLE oncegate_test_upstream; EXCEPTION WHEN duplicate_object OR unique_violation THEN END $$;
         CREATE TABLE IF NOT EXISTS charge (amount int);
         GRANT ALL ON charge TO oncegate_test_upstream;
         SET ROLE oncegate_test_upstream",
    );
    session
}

#[track_caller]
fn refused(session: &Session, sql: &str) -> String {
    session.try_run(sql).map(|rows| panic!("{sql}: {rows:?}")).unwrap_err()
}

/// An answer as it is handed over: status, headers as they are written, body.
type Given = (u16, Option<Vec<(String, String)>>, Option<Vec<u8>>);

fn given() -> impl Strategy<Value = Given> {
    let name = prop_oneof![
        Just("Set-Cookie".to_owned()),
        Just("x-repeated".to_owned()),
        "[A-Za-z0-9!#$%&'*+.^_`|~-]{1,12}".prop_filter("given by the gate", |name| !is_kept_back(name)),
    ];
    // All that is no control character, and the tab.
    let character = any::<char>().prop_filter("no control character", |c| *c == '\t' || (*c >= ' ' && *c != '\x7f'));
    let value = proptest::collection::vec(prop_oneof![character, Just(' '), Just('é'), Just('\t')], 0..12)
        .prop_map(|characters| characters.into_iter().collect::<String>());
    let headers = proptest::option::of(proptest::collection::vec((name, value), 0..8));
    let body = proptest::option::of(proptest::collection::vec(any::<u8>(), 0..64));
    (200..=599u16, headers, body).prop_map(|(status, headers, body)| {
        let has_none = [204, 205, 304].contains(&status);
        (status, headers, if has_none { body.map(|_| Vec::new()) } else { body })
    })
}

fn is_kept_back(name: &str) -> bool {
    ["te", "trailer", "upgrade", "connection", "keep-alive"].contains(&name.to_ascii_lowercase().as_str())
}

fn sql_of((status, headers, body): &Given, attempt: &str) -> String {
    let headers = headers.as_ref().map_or("NULL".into(), |lines| quoted(&serde_json::to_string(lines).expect("JSON")));
    let body = body.as_ref().map_or("NULL".into(), |body| {
        format!("'\\x{}'", body.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    });
    format!("SELECT oncegate.complete('{attempt}', {status}, {headers}, {body})")
}

/// What the program makes of it.
fn meant((status, headers, body): Given) -> Answer {
    let line = |(name, value): (String, String)| {
        let value = value.trim_matches([' ', '\t']).as_bytes();
        (HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_bytes(value).unwrap())
    };
    Answer {
        status: StatusCode::from_u16(status).unwrap(),
        reason: None,
        headers: headers.into_iter().flatten().map(line).collect(),
        content: Some(Content { body: body.unwrap_or_default().into(), trailers: Vec::new() }),
    }
}

fn stored(session: &Session, number: u32) -> Bytes {
    let hex =
        session.value(&format!("SELECT encode(answer, 'hex') FROM oncegate.record WHERE id = '\\x{number:064x}'"));
    let digits = hex.as_bytes().chunks_exact(2);
    digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

#[test]
fn what_is_written_is_what_the_program_reads() {
    let Some(database) = migrated() else { return };
    let session = database.session();
    let number = std::cell::Cell::new(0);
    let mut runner = TestRunner::new(Config { failure_persistence: None, ..Config::default() });
    let ran = runner.run(&given(), |given| {
        number.set(number.get() + 1);
        claim(&session, number.get());
        session.run(&sql_of(&given, &token(number.get())));
        let stored = stored(&session, number.get());
        let meant = meant(given);
        // To the byte: a name in another case would be read too.
        prop_assert_eq!(&stored, &meant.encode());
        prop_assert_eq!(Answer::decode(&stored), Ok(meant));
        Ok(())
    });
    ran.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn as_much_as_may_be_kept() {
    let Some(database) = migrated() else { return };
    let session = database.session();
    claim(&session, 1);
    let lines = "(SELECT jsonb_agg(jsonb_build_array('x-' || n, repeat('v', 50))) FROM generate_series(1, 4096) n)";
    let body = "decode(repeat('00', 67108864), 'hex')";
    let refused = refused(&session, &format!("SELECT oncegate.complete('{}', 200, NULL, {body} || '\\x00')", token(1)));
    assert_eq!(refused, format!("{WRONG}oncegate.complete: the body is larger than 64 MiB"));
    session.run(&format!("SELECT oncegate.complete('{}', 200, {lines}, {body})", token(1)));
    let length: usize = session.value("SELECT octet_length(answer) FROM oncegate.record").parse().unwrap();
    session.run("UPDATE oncegate.record SET answer = substr(answer, 1, 300000)");
    let answer = Answer::decode(&stored(&session, 1)).unwrap();
    assert_eq!((answer.headers.len(), answer.content.unwrap().body.len() + length - 300_000), (4096, 64 << 20));
}

#[test]
fn what_cannot_be_an_answer_is_refused() {
    let Some(database) = migrated() else { return };
    let session = upstream(&database);
    claim(&database.session(), 1);
    let with = |status: &str, headers: &str, body: &str| {
        format!("SELECT oncegate.complete('{}', {status}, {headers}, {body})", token(1))
    };
    let lines = |count: usize| format!("(SELECT jsonb_agg('[\"a\", \"\"]'::jsonb) FROM generate_series(1, {count}))");
    let larger = format!("'[[\"a\", \"{}\"], [\"b\", \"{}\"]]'", "x".repeat(131_072), "x".repeat(131_071));
    let name = format!("'[[\"{}\", \"\"]]'", "a".repeat(65_536));
    let kept_back = ["Connection", "content-length", "TE", "trailer", "Transfer-Encoding", "Upgrade", "Keep-Alive"];
    let kept_back = kept_back.iter().chain(&["Proxy-Connection", "Proxy-Authenticate", "HTTP2-Settings"]);
    let ours = ["Idempotency-Status", "Idempotent-Replayed", "idempotency-expires", "Idempotency-Attempt"];
    let ours = ours.iter().chain(&["IDEMPOTENCY-CONTROL"]);
    let mut cases = vec![
        (with("NULL", "NULL", "NULL"), "the status is not a number from 200 to 599"),
        (with("199", "NULL", "NULL"), "the status is not a number from 200 to 599"),
        (with("600", "NULL", "NULL"), "the status is not a number from 200 to 599"),
        (with("204", "NULL", "'x'"), "an answer with status 204 has no body"),
        (with("205", "NULL", "'x'"), "an answer with status 205 has no body"),
        (with("304", "NULL", "'x'"), "an answer with status 304 has no body"),
        (with("200", "'null'", "NULL"), "the headers are not an array"),
        (with("200", "'{\"a\": \"b\"}'", "NULL"), "the headers are not an array"),
        (with("200", "'\"a\"'", "NULL"), "the headers are not an array"),
        (with("200", "'[\"a\", \"b\"]'", "NULL"), "header 1 is not a pair of two strings"),
        (with("200", "'[[\"a\", \"b\"], [\"a\"]]'", "NULL"), "header 2 is not a pair of two strings"),
        (with("200", "'[[\"a\", \"b\", null]]'", "NULL"), "header 1 is not a pair of two strings"),
        (with("200", "'[[\"a\", 1]]'", "NULL"), "header 1 is not a pair of two strings"),
        (with("200", "'[[null, \"b\"]]'", "NULL"), "header 1 is not a pair of two strings"),
        (with("200", "'[{\"a\": \"b\"}]'", "NULL"), "header 1 is not a pair of two strings"),
        (with("200", "'[null]'", "NULL"), "header 1 is not a pair of two strings"),
        (with("200", "'[[\"\", \"b\"]]'", "NULL"), "header 1 has a name that no header can have"),
        (with("200", "'[[\"s3cret: x\", \"b\"]]'", "NULL"), "header 1 has a name that no header can have"),
        (with("200", "'[[\"\u{212a}\", \"b\"]]'", "NULL"), "header 1 has a name that no header can have"),
        (with("200", "'[[\"a\\n\", \"b\"]]'", "NULL"), "header 1 has a name that no header can have"),
        (with("200", &name, "NULL"), "header 1 has a name that no header can have"),
        (
            with("200", "'[[\"X-A\", \"s3cret\\r\\nb: c\"]]'", "NULL"),
            "header 1, x-a, has a value that no header can have",
        ),
        (with("200", "'[[\"a\", \"b\\n\"]]'", "NULL"), "header 1, a, has a value that no header can have"),
        (with("200", "'[[\"a\", \"\\u0001\"]]'", "NULL"), "header 1, a, has a value that no header can have"),
        (with("200", "'[[\"a\", \"\\u007f\"]]'", "NULL"), "header 1, a, has a value that no header can have"),
        (with("200", &larger, "NULL"), "the headers are larger than 256 KiB"),
        (with("200", &lines(4097), "NULL"), "there are more than 4096 headers"),
    ];
    cases.extend(
        kept_back.chain(ours).map(|name| (with("200", &format!("'[[\"{name}\", \"x\"]]'"), "NULL"), "cannot be given")),
    );
    for (sql, said) in cases {
        let error = refused(&session, &sql);
        let shown: String = sql.chars().take(200).collect();
        assert!(error.starts_with(&format!("{WRONG}oncegate.complete: ")) && error.contains(said), "{shown}: {error}");
        assert!(!error.contains("s3cret") && !error.contains(&token(1)), "{shown}: {error}");
    }
    // None of these was the end of the attempt.
    session.run(&complete(1));
}

#[test]
fn what_is_no_token_is_refused() {
    let Some(database) = migrated() else { return };
    let session = upstream(&database);
    for function in ["assert_current(%)", "complete(%, 200, NULL, NULL)"] {
        for (token, said) in [
            ("NULL".to_owned(), "there is no attempt"),
            ("''".to_owned(), "there is no attempt"),
            (format!("'{}'", &token(1)[1..]), "the attempt is not 32 hexadecimal digits"),
            (format!("'{}g'", &token(1)[1..]), "the attempt is not 32 hexadecimal digits"),
            (format!("'{} '", token(1)), "the attempt is not 32 hexadecimal digits"),
            (format!("E'{}\\n'", token(1)), "the attempt is not 32 hexadecimal digits"),
        ] {
            let error = refused(&session, &format!("SELECT oncegate.{}", function.replace('%', &token)));
            let name = function.split('(').next().unwrap();
            assert_eq!(error, format!("{WRONG}oncegate.{name}: {said}"));
        }
    }
}

#[test]
fn an_attempt_that_is_not_current_undoes_the_transaction() {
    let Some(database) = migrated() else { return };
    let (gate, session) = (database.session(), upstream(&database));
    for number in 1..=5 {
        claim(&gate, number);
    }
    // Completed by the gate; completed by the upstream; released; superseded; purged; never there.
    gate.run("UPDATE oncegate.record SET state = 1, expires_at = 1, answer = '' WHERE id = decode(lpad('1', 64, '0'), 'hex')");
    session.run(&complete(2));
    gate.run("DELETE FROM oncegate.record WHERE id = decode(lpad('3', 64, '0'), 'hex')");
    gate.run("UPDATE oncegate.record SET attempt = '\\xff' WHERE id = decode(lpad('4', 64, '0'), 'hex')");
    gate.run("SELECT oncegate.remove_v1(decode(lpad('5', 64, '0'), 'hex'))");
    for number in 1..=6 {
        for call in [complete(number), assert_current(number)] {
            let error = refused(&session, &format!("BEGIN; INSERT INTO charge VALUES (1); {call}; COMMIT"));
            assert!(error.starts_with(NOT_CURRENT) && error.contains("is not current"), "{number}: {error}");
            assert!(!error.contains(&token(number)), "{error}");
            session.run("ROLLBACK");
        }
    }
    assert_eq!(session.value("SELECT count(*) FROM charge"), "0");
}

#[test]
fn an_attempt_completes_once() {
    let Some(database) = migrated() else { return };
    let session = upstream(&database);
    claim(&database.session(), 1);
    // Also in one transaction and with the same answer.
    let twice = format!("BEGIN; INSERT INTO charge VALUES (1); {0}; {0}; COMMIT", complete(1));
    assert!(refused(&session, &twice).starts_with(NOT_CURRENT));
    session.run("ROLLBACK");
    assert_eq!(state(&database.session(), 1), "0");
    // What was undone was not done.
    session.run(&format!(
        "BEGIN; INSERT INTO charge VALUES (1); SAVEPOINT s; {0}; ROLLBACK TO s; {0}; COMMIT",
        complete(1)
    ));
    assert_eq!(state(&database.session(), 1), "1");
    // Whoever lost the answer to its COMMIT and does it all once more must not charge twice.
    let again = format!("BEGIN; INSERT INTO charge VALUES (1); {}; COMMIT", complete(1));
    assert!(refused(&session, &again).starts_with(NOT_CURRENT));
    session.run("ROLLBACK");
    assert_eq!(session.value("SELECT count(*) FROM charge"), "1");
}

#[test]
fn a_rollback_leaves_the_record_to_the_gate() {
    let Some(database) = migrated() else { return };
    let session = upstream(&database);
    claim(&database.session(), 1);
    let before = database.run("SELECT * FROM oncegate.record");
    session.run(&format!("BEGIN; {}; INSERT INTO charge VALUES (1); {}; ROLLBACK", assert_current(1), complete(1)));
    assert_eq!(database.run("SELECT * FROM oncegate.record"), before);
}

#[test]
fn an_unknown_attempt_can_still_complete() {
    let Some(database) = migrated() else { return };
    let (gate, session) = (database.session(), upstream(&database));
    claim(&gate, 1);
    gate.run("UPDATE oncegate.record SET state = 2, expires_at = oncegate.now_v1() + 3600000");
    session.run(&format!("BEGIN; {}; {}; COMMIT", assert_current(1), complete(1)));
    assert_eq!(state(&gate, 1), "1");
}

#[test]
fn it_expires_as_if_the_gate_had_completed_it() {
    let Some(database) = migrated() else { return };
    let session = database.session();
    let lives = "SELECT expires_at - claimed_at FROM oncegate.record";
    claim(&session, 1);
    session.run(&complete(1));
    assert_eq!(session.value(lives), "60000");
    // Where that is past already it would be dead on arrival: it lives from now on.
    session.run("DELETE FROM oncegate.record");
    claim(&session, 1);
    session.run("UPDATE oncegate.record SET claimed_at = claimed_at - 100000");
    session.run(&complete(1));
    let lives: u64 = session.value(lives).parse().unwrap();
    assert!((160_000..170_000).contains(&lives), "{lives}");
    // For ever is not beyond the end of time.
    session.run("DELETE FROM oncegate.record");
    claim(&session, 1);
    session.run(&format!("UPDATE oncegate.record SET ttl = {}", i64::MAX));
    session.run(&complete(1));
    assert_eq!(session.value("SELECT expires_at FROM oncegate.record"), i64::MAX.to_string());
}

#[test]
fn it_is_as_durable_as_what_the_gate_writes() {
    let Some(database) = migrated() else { return };
    for (number, (set, becomes)) in
        (1..).zip([("off", "on"), ("local", "on"), ("remote_write", "on"), ("remote_apply", "remote_apply")])
    {
        let session = upstream(&database);
        claim(&database.session(), number);
        session.run(&format!("SET synchronous_commit = {set}; BEGIN; {}", complete(number)));
        assert_eq!(session.value("SHOW synchronous_commit"), becomes, "after {set}");
        session.run("COMMIT");
        assert_eq!(session.value("SHOW synchronous_commit"), set);
    }
}

#[test]
fn a_session_with_odd_settings_writes_the_same() {
    let Some(database) = migrated() else { return };
    let session = upstream(&database);
    claim(&database.session(), 1);
    database.run(
        "CREATE SCHEMA odd; GRANT USAGE ON SCHEMA odd TO PUBLIC;
         CREATE FUNCTION odd.decode(text, text) RETURNS bytea LANGUAGE sql RETURN 'odd'::bytea;
         CREATE FUNCTION odd.btrim(text, text) RETURNS text LANGUAGE sql RETURN 'odd';
         CREATE FUNCTION odd.now_v1() RETURNS bigint LANGUAGE sql RETURN 1",
    );
    session.run(
        "SET search_path = odd, pg_catalog, oncegate; SET standard_conforming_strings = off; SET bytea_output = escape;
         SET enable_indexscan = off; SET plan_cache_mode = force_custom_plan; SET transform_null_equals = on",
    );
    let with = |value: &str| {
        let headers = format!("jsonb_build_array(jsonb_build_array('A', {value}))");
        format!("SELECT oncegate.complete('{}', 200, {headers}, 'x')", token(1))
    };
    assert!(refused(&session, &with("'x' || chr(10)")).contains("no header can have"));
    session.run(&with("chr(9) || 'é' || chr(9) || 'u001f' || chr(92)"));
    let meant = meant((200, Some(vec![("a".into(), "é\tu001f\\".into())]), Some(b"x".to_vec())));
    assert_eq!(stored(&database.session(), 1), meant.encode());
}

#[test]
fn who_may_call_them_may_do_nothing_else() {
    let Some(database) = migrated() else { return };
    let session = upstream(&database);
    claim(&database.session(), 1);
    let functions = database.run(
        "SELECT format('SELECT oncegate.%I(%s)', p.proname,
                array_to_string(array_fill('NULL'::text, ARRAY[p.pronargs::int]), ', '))
         FROM pg_proc p WHERE p.pronamespace = 'oncegate'::regnamespace
            AND p.proname NOT IN ('complete', 'assert_current')",
    );
    assert!(functions.len() > 10, "{functions:?}");
    let calls = functions.into_iter().flatten().flatten();
    for sql in calls.chain(["SELECT FROM oncegate.record".into(), "DELETE FROM oncegate.record".into()]) {
        let error = refused(&session, &sql);
        assert!(error.starts_with("42501: permission denied"), "{sql}: {error}");
    }
    session.run(&format!("{}; {}", assert_current(1), complete(1)));
}

/// A table in which a third of the records is in each state, from one of these numbers to the other.
#[track_caller]
fn fill(session: &Session, from: u32, to: u32) {
    session.run(&format!(
        "INSERT INTO oncegate.record
            (id, attempt, state, claimed_at, lease_until, expires_at, ttl, unknown_ttl, origin, head)
         SELECT sha256(n::text::bytea), substr(sha256((-n)::text::bytea), 1, 16), n % 3, 1, 1,
            CASE WHEN n % 3 > 0 THEN 1 END, 1, 1, 1, ''
         FROM generate_series({from}, {to}) n"
    ));
}

/// Holds that nothing is read of the table but the record of the one attempt, be it in flight or unknown.
#[track_caller]
fn expect_one_read(session: &Session, caller: &Session, what: &str) {
    for state in [0, 2] {
        session.run("DELETE FROM oncegate.record WHERE id = decode(lpad('1', 64, '0'), 'hex')");
        claim(session, 1);
        session.run(&format!(
            "UPDATE oncegate.record SET state = {state}, expires_at = CASE {state} WHEN 2 THEN 1 END WHERE claimed_at > 1"
        ));
        // What was counted before is not to be counted again.
        caller.run("SELECT pg_stat_force_next_flush()");
        caller.run(&format!("BEGIN; {}; {}", assert_current(1), complete(1)));
        let read = caller.run(
            "SELECT seq_scan, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relid = 'oncegate.record'::regclass",
        );
        caller.run("ROLLBACK");
        let read: Vec<u64> = read[0].iter().flatten().map(|number| number.parse().unwrap()).collect();
        assert!(read[0] == 0 && read[1] <= 4, "{what}, state {state}: {read:?}");
    }
}

/// The planner knows little of a table that is young, and much of a large one.
#[test]
fn only_the_record_is_read_of_any_table() {
    let Some(database) = migrated() else { return };
    let session = database.session();
    session.run("ALTER TABLE oncegate.record SET (autovacuum_enabled = off)");
    // It is planned on a table that is known to be empty, and for all the time that the session lives.
    session.run("VACUUM ANALYZE oncegate.record");
    let early = database.session();
    for call in [assert_current(1), complete(1)] {
        refused(&early, &call);
    }
    for (from, to, is_analysed) in [(10, 40, false), (41, 42, true), (100, 30_000, false), (30_001, 30_002, true)] {
        fill(&session, from, to);
        if !is_analysed {
            // To look at a table anew has every session plan anew.
            expect_one_read(&session, &early, &format!("planned early, up to {to}"));
        } else {
            session.run("ANALYZE oncegate.record");
        }
        expect_one_read(&session, &database.session(), &format!("up to {to}"));
    }
}

/// The gate renews leases meanwhile: a snapshot that is older than that cannot be written to.
#[test]
fn a_stricter_isolation_works_where_it_is_asked_first() {
    let Some(database) = migrated() else { return };
    let (gate, session) = (database.session(), upstream(&database));
    let renew = |number: u32| {
        let (id, attempt) = (format!("'\\x{number:064x}'::bytea"), format!("'\\x{}'::bytea", token(number)));
        gate.value(&format!("SELECT count(*) FROM oncegate.renew_v1(ARRAY[{id}], ARRAY[{attempt}], '{{30000}}')"))
    };
    for (number, level) in (1..).zip(["REPEATABLE READ", "SERIALIZABLE"]) {
        claim(&gate, number);
        session.run(&format!("BEGIN ISOLATION LEVEL {level}; SELECT FROM charge"));
        assert_eq!(renew(number), "1");
        assert!(refused(&session, &complete(number)).starts_with("40001: "));
        session.run(&format!("ROLLBACK; BEGIN ISOLATION LEVEL {level}; {}", assert_current(number)));
        assert_eq!(renew(number), "0");
        session.run(&format!("INSERT INTO charge VALUES (1); {}; COMMIT", complete(number)));
        assert_eq!(state(&gate, number), "1");
    }
}

/// Somebody who waits is told when the transaction commits, and not before.
#[test]
fn who_waits_is_told() {
    let Some(database) = migrated() else { return };
    let session = upstream(&database);
    claim(&database.session(), 1);
    claim(&database.session(), 2);
    tokio().block_on(async {
        let (client, mut connection) = tokio_postgres::connect(&database.url, tokio_postgres::NoTls).await.unwrap();
        let (tell, mut told) = ::tokio::sync::mpsc::unbounded_channel();
        ::tokio::spawn(async move {
            while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
                if let tokio_postgres::AsyncMessage::Notification(notification) = message {
                    drop(tell.send(notification.payload().to_owned()));
                }
            }
        });
        client
            .batch_execute("LISTEN oncegate; SELECT oncegate.await_v1(decode(lpad('1', 64, '0'), 'hex'))")
            .await
            .unwrap();
        session.run(&format!("BEGIN; {}; {}", complete(1), complete(2)));
        client.batch_execute("SELECT").await.unwrap();
        assert!(told.try_recv().is_err(), "not yet");
        session.run("COMMIT");
        client.batch_execute("NOTIFY oncegate, 'the last'").await.unwrap();
        // Nobody waits for the other one.
        assert_eq!(told.recv().await.unwrap(), format!("{:064x}", 1));
        assert_eq!(told.recv().await.unwrap(), "the last");
    });
}
