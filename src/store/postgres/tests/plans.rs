//! How the server goes about what the gate asks: by index, whatever it knows of the table.

use std::future::poll_fn;
use std::sync::{Mutex, PoisonError};

use tokio_postgres::{AsyncMessage, Client, NoTls};

use super::*;
use crate::store::IdPrefix;

/// The functions of the hot path and of upkeep, with what makes each part of a function run.
const ASKED: &[&str] = &[
    "SELECT * FROM oncegate.claim_v1(ARRAY['\\x01', '\\x02']::bytea[], ARRAY['\\x01', '\\x02']::bytea[],
        ARRAY[0, 0]::bigint[], ARRAY[1, 1]::bigint[], ARRAY[1, 1]::bigint[], ARRAY[1, 1]::bigint[],
        ARRAY['\\x', '\\x']::bytea[])",
    "SELECT * FROM oncegate.claim_v1(ARRAY['\\x01', '\\x02']::bytea[], ARRAY['\\x01', '\\x03']::bytea[],
        ARRAY[1, 1]::bigint[], ARRAY[1, 1]::bigint[], ARRAY[1, 1]::bigint[], ARRAY[1, 1]::bigint[],
        ARRAY['\\x', '\\x']::bytea[])",
    "SELECT oncegate.renew_v1(ARRAY['\\x01']::bytea[], ARRAY['\\x01']::bytea[], ARRAY[1]::bigint[])",
    "SELECT * FROM oncegate.get_v1('\\x01')",
    "SELECT oncegate.await_v1('\\x01')",
    "SELECT * FROM oncegate.settle_v1(ARRAY['\\x01', '\\x02', '\\x04']::bytea[], ARRAY['\\x01', '\\x03', '\\x04']::bytea[],
        ARRAY[1, 3, 4]::smallint[], ARRAY[1, 1, 1]::bigint[], ARRAY['\\x', NULL, NULL]::bytea[], false)",
    "SELECT * FROM oncegate.settle_v1(ARRAY['\\x01', '\\x02', '\\x04']::bytea[], ARRAY['\\x01', '\\x02', '\\x04']::bytea[],
        ARRAY[1, 3, 4]::smallint[], ARRAY[1, 1, 1]::bigint[], ARRAY['\\x', NULL, NULL]::bytea[], true)",
    "SELECT oncegate.supersede_v1('\\x01', '\\x01', 1::smallint, 1, '\\x02', 1, 1, 1, 1, '\\x')",
    "SELECT oncegate.expire_leases_v1(10)",
    "SELECT oncegate.expire_leases_v2(10)",
    "SELECT * FROM oncegate.sweep_v1(0, 10)",
    "SELECT oncegate.remove_v1('\\x01')",
    "SELECT oncegate.append_entry_v1(1, 's', 'a', 'b', NULL, '\\x', NULL)",
    "SELECT oncegate.amend_entry_v1(1, '\\x')",
    "SELECT oncegate.sweep_entries_v1(10)",
];

/// A connection that receives the plan of each statement within functions.
async fn explained(url: &str) -> (Client, Arc<Mutex<Vec<String>>>) {
    let (client, mut driven) = url.parse::<tokio_postgres::Config>().unwrap().connect(NoTls).await.unwrap();
    let plans = Arc::new(Mutex::new(Vec::new()));
    let found = Arc::clone(&plans);
    tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|context| driven.poll_message(context)).await {
            if let AsyncMessage::Notice(notice) = message {
                found.lock().unwrap_or_else(PoisonError::into_inner).push(notice.message().to_owned());
            }
        }
    });
    let setting = "LOAD 'auto_explain'; SET auto_explain.log_min_duration = 0;
                   SET auto_explain.log_nested_statements = on; SET auto_explain.log_analyze = on;
                   SET client_min_messages = log";
    client.batch_execute(setting).await.unwrap();
    (client, plans)
}

/// Asks everything several times, so that plans which the server keeps are among them, and holds that none walks the
/// table or hashes it.
async fn all_goes_by_index(client: &Client, plans: &Mutex<Vec<String>>, when: &str) {
    for _ in 0..7 {
        for asked in ASKED {
            client.simple_query(asked).await.unwrap();
        }
    }
    // Notices come before the answers that they belong to.
    let plans = std::mem::take(&mut *plans.lock().unwrap());
    let of_table: Vec<&String> = plans.iter().filter(|plan| plan.contains(" on record ")).collect();
    assert!(of_table.len() > 7 * ASKED.len(), "{when}: only {} plans of {}", of_table.len(), plans.len());
    let wrong =
        ["Seq Scan on record", "Hash Join", "Hash Anti Join", "Merge Join", "Merge Anti Join", "Bitmap Heap Scan"];
    for plan in of_table {
        // An index that is read from end to end is a table that is.
        let lines: Vec<&str> = plan.lines().collect();
        let is_walk = |pair: &[&str]| {
            pair[0].contains("using record_")
                && !pair[0].contains("record_in_flight")
                && !pair[1].contains("Index Cond")
        };
        assert!(!lines.windows(2).any(is_walk), "{when}: {plan}");
        assert!(!wrong.iter().any(|way| plan.contains(way)), "{when}: {plan}");
        let read = rows_read(plan);
        assert!(read <= 200.0, "{when}, {read} rows: {plan}");
        // What is forbidden counts as 1e10 more: a plan that costs nearly as much loses to it on a larger table.
        let costs = plan.split("cost=").skip(1).filter_map(|cost| cost.split("..").nth(1)?.split(' ').next());
        let most = costs.map(|cost| cost.parse::<f64>().unwrap()).fold(0.0, f64::max);
        assert!(most > 0.0 && most < 1e9, "{when}, {most}: {plan}");
    }
}

const FILL: &str = "
    INSERT INTO oncegate.record (id, attempt, state, claimed_at, lease_until, expires_at, ttl, unknown_ttl, origin, head,
        answer)
    SELECT sha256(int4send(i)), substr(sha256(int4send(-i)), 1, 16),
        CASE WHEN i % 1000 = 0 THEN 0 WHEN i % 1000 = 1 THEN 2 ELSE 1 END, 1, 4000000000000, 4000000000000, 1, 1, 1, '\\x00',
        decode(repeat('ab', 100), 'hex')
    FROM generate_series(1, 100000) i";

#[tokio::test]
async fn all_goes_by_index_whatever_the_server_knows() {
    let Some(database) = database() else { return };
    database.run("ALTER TABLE oncegate.record SET (autovacuum_enabled = false)");
    let (client, plans) = explained(&database.url).await;
    all_goes_by_index(&client, &plans, "on an empty table").await;
    client.batch_execute("ANALYZE oncegate.record").await.unwrap();
    all_goes_by_index(&client, &plans, "on a table that is known to be empty").await;
    // The session keeps the plans that it made for the empty table.
    client.batch_execute(FILL).await.unwrap();
    plans.lock().unwrap().clear();
    all_goes_by_index(&client, &plans, "on a table that has grown since").await;
    let (other, others) = explained(&database.url).await;
    all_goes_by_index(&other, &others, "on a large table that is thought to be empty").await;
    client.batch_execute("ANALYZE oncegate.record").await.unwrap();
    plans.lock().unwrap().clear();
    all_goes_by_index(&client, &plans, "on a large table").await;
    let (other, others) = explained(&database.url).await;
    all_goes_by_index(&other, &others, "on a large table, in a new session").await;
    // The statistics of ten thousand million records.
    let immense = "UPDATE pg_class SET reltuples = 1e10 WHERE oid = 'oncegate.record'::regclass
                   OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = 'oncegate.record'::regclass)";
    client.batch_execute(immense).await.unwrap();
    let (other, others) = explained(&database.url).await;
    all_goes_by_index(&other, &others, "on a table that is thought to be immense").await;
}

/// The server plans it each time, since the gate does not prepare it.
#[tokio::test]
async fn a_record_is_removed_by_its_id() {
    let Some(database) = database() else { return };
    database.run("ALTER TABLE oncegate.record SET (autovacuum_enabled = false)");
    database.run("ANALYZE oncegate.record");
    database.run(FILL);
    let removal = REMOVE.replace("$1", "'\\x01'").replace("$2", "'\\x02'");
    for when in ["thought to be empty", "known to be large"] {
        let plan = database.value(&format!("EXPLAIN (FORMAT JSON) {removal}"));
        assert!(plan.contains(r#""Index Name": "record_pkey""#), "on a table that is {when}: {plan}");
        database.run("ANALYZE oncegate.record");
    }
}

#[tokio::test]
async fn a_check_of_writes_is_too_cheap_to_be_compiled() {
    let Some(database) = database() else { return };
    let check = write_check::CHECK_WRITES.sql.replace("$1", "'\\x01'::bytea").replace("$2", "'\\x02'::bytea");
    let plan = database.value(&format!("EXPLAIN (COSTS, FORMAT JSON) {check}"));
    let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    let cost = plan[0]["Plan"]["Total Cost"].as_f64().unwrap();
    let limit: f64 = database.value("SHOW jit_above_cost").parse().unwrap();
    assert!(cost < limit / 100.0, "{cost} of {limit}: {plan}");
}

#[tokio::test]
async fn a_few_records_are_listed_by_their_index() {
    let Some(database) = database() else { return };
    let (client, _) = explained(&database.url).await;
    client.batch_execute(FILL).await.unwrap();
    client.batch_execute("ANALYZE oncegate.record").await.unwrap();
    let prefix = IdPrefix::parse("abc");
    for (filter, wanted) in [
        (Filter { state: Some(State::Unknown), ..Filter::default() }, "record_unknown"),
        (Filter { state: Some(State::InFlight), ..Filter::default() }, "record_in_flight"),
        (Filter { prefix, ..Filter::default() }, "record_pkey"),
    ] {
        let mut sql = listing::Set::of(&filter).newest();
        // The last one first: `$1` is the beginning of `$10` too.
        let range = filter.prefix.map(|_| ("'\\xabc0'", "'\\xabcf'"));
        let (from, upto) = range.unwrap_or(("NULL", "NULL"));
        let values = [[from, upto, "101", "'shop'", "NULL"], ["NULL"; 5]].concat();
        for (number, value) in (1..=10_u8).zip(values).rev() {
            sql = sql.replace(&format!("${number}"), value);
        }
        let rows = client.simple_query(&format!("EXPLAIN {sql}")).await.unwrap();
        let lines = rows.iter().filter_map(|message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
            _ => None,
        });
        let plan = lines.collect::<Vec<_>>().join("\n");
        assert!(plan.contains(wanted) && !plan.contains("Seq Scan on record"), "{filter:?}: {plan}");
    }
}

/// Everything that becomes of accepted requests.
const ASKED_OF_THE_QUEUE: &[&str] = &[
    "SELECT * FROM oncegate.accept_v1(ARRAY['\\x01', '\\x02']::bytea[], ARRAY['\\x01', '\\x02']::bytea[],
        ARRAY[1, 1]::bigint[], ARRAY[1, 1]::bigint[], ARRAY['\\x', '\\x']::bytea[], ARRAY['\\x', '\\x']::bytea[],
        ARRAY['\\x', '\\x']::bytea[])",
    "SELECT * FROM oncegate.take_due_v1(1, 8, 1000000, 0, false, NULL)",
    "SELECT * FROM oncegate.take_due_v1(1, 8, 1000000, 0, true, 3)",
    "SELECT * FROM oncegate.take_due_v2(1, 8, 1000000, 0, false, NULL, NULL, NULL)",
    "SELECT * FROM oncegate.take_due_v2(1, 8, 1000000, 0, true, 3, 1, 1)",
    "SELECT * FROM oncegate.take_due_v3(1, 8, 1000000, 0, false, NULL, false, NULL, NULL)",
    "SELECT * FROM oncegate.take_due_v3(1, 1, 1000000, 0, false, 3, true, 1, 1)",
    "SELECT * FROM oncegate.take_due_v3(1, 8, 1, 0, true, 3, true, 1, 1)",
    "SELECT oncegate.change_delivery_v1('\\x01', '\\x01', 0, 1::smallint, 1, true, NULL)",
    "SELECT oncegate.change_delivery_v2('\\x01', '\\x01', 0, 1::smallint, 1, true, NULL)",
    "SELECT oncegate.change_delivery_v1('\\x01', '\\x01', 0, 2::smallint, 1, true, '\\x')",
    "SELECT oncegate.requeue_delivery_v1('\\x01')",
    "SELECT oncegate.reseal_delivery_v1('\\x01', '\\x01', '\\x', '\\x', '\\x', '\\x', '\\x')",
    "SELECT oncegate.finish_deliveries_v1(ARRAY['\\x01', '\\x02']::bytea[], ARRAY['\\x01', '\\x02']::bytea[])",
    "SELECT oncegate.sweep_deliveries_v1(10)",
];

/// The most rows that a step of a plan gave or threw away, over all its loops.
fn rows_read(plan: &str) -> f64 {
    let number = |text: &str, name: &str| -> Option<f64> {
        let digits = text.split(name).nth(1)?.split([' ', ')']).next()?;
        Some(digits.parse().unwrap())
    };
    let (mut most, mut loops) = (0.0, 1.0);
    for line in plan.lines() {
        if let Some(actual) = line.split("actual").nth(1) {
            loops = number(actual, "loops=").unwrap();
            most = f64::max(most, loops * number(actual, "rows=").unwrap());
        }
        if let Some(removed) = number(line, "Rows Removed by Filter: ") {
            most = f64::max(most, loops * removed);
        }
    }
    assert!(most > 0.0 || plan.contains("actual"), "{plan}");
    most
}

#[tokio::test]
async fn the_queue_is_never_read_as_a_whole() {
    let Some(database) = database() else { return };
    database.run("ALTER TABLE oncegate.delivery SET (autovacuum_enabled = false)");
    let fill = "INSERT INTO oncegate.delivery (id, token, origin, lane, accepted_at, queued_at, due, head, request, body)
                SELECT sha256(int4send(i)), '\\x00', 1, i % 3, 1, 1, 1, '\\x', '\\x', '\\x' FROM generate_series(1, 20000) i";
    let (client, plans) = explained(&database.url).await;
    for (when, before) in [
        ("on an empty queue", ""),
        ("on a queue that has grown since", fill),
        ("on a long queue", "ANALYZE oncegate.delivery"),
    ] {
        client.batch_execute(before).await.unwrap();
        let (other, others) = explained(&database.url).await;
        plans.lock().unwrap().clear();
        for (client, plans) in [(&client, &plans), (&other, &others)] {
            for asked in std::iter::repeat_n(ASKED_OF_THE_QUEUE, 7).flatten() {
                client.simple_query(asked).await.unwrap();
            }
            let plans = std::mem::take(&mut *plans.lock().unwrap());
            let of_queue: Vec<&String> = plans.iter().filter(|plan| plan.contains(" delivery ")).collect();
            assert!(of_queue.len() > 7 * ASKED_OF_THE_QUEUE.len(), "{when}: only {} plans", of_queue.len());
            let wrong =
                ["Seq Scan on delivery", "BitmapAnd", "Bitmap Index Scan on delivery_", "Hash Join", "Merge Join"];
            for plan in of_queue {
                let read = rows_read(plan);
                assert!(read <= 200.0, "{when}, {read} rows: {plan}");
                let found = wrong.iter().find(|way| plan.replace("delivery_pkey", "").contains(**way));
                assert!(found.is_none(), "{when}, {found:?}: {plan}");
            }
        }
    }
}

/// The most pages that a statement of these plans touched.
fn pages_touched(plans: &[String]) -> u64 {
    let hits = |plan: &String| {
        let first = plan.split("Buffers: ").nth(1).unwrap_or_default().lines().next().unwrap_or_default();
        let parts = first.trim_start_matches("shared ").split(' ').filter_map(|part| part.split_once('='));
        parts.filter(|(kind, _)| ["hit", "read"].contains(kind)).map(|(_, pages)| pages.parse::<u64>().unwrap()).sum()
    };
    plans.iter().map(hits).max().unwrap_or_default()
}

#[tokio::test]
async fn a_take_passes_over_nothing_that_was_taken_before() {
    let Some(database) = database() else { return };
    database.run("ALTER TABLE oncegate.delivery SET (autovacuum_enabled = false)");
    let fill = "INSERT INTO oncegate.delivery (id, token, origin, lane, accepted_at, queued_at, due, head, request, body)
                SELECT sha256(int4send(i)), '\\x00', 1, i % LANES, 1, 1, i, '\\x', '\\x', '\\x' FROM generate_series(1, 20000) i";
    for lanes in [1, 3] {
        database.run("TRUNCATE oncegate.delivery");
        database.run(&fill.replace("LANES", &lanes.to_string()));
        database.run("DELETE FROM oncegate.delivery WHERE due <= 19000");
        let first = database.value("SELECT min(sequence) FROM oncegate.delivery");
        let (client, plans) = explained(&database.url).await;
        client.batch_execute("SET auto_explain.log_buffers = on").await.unwrap();
        let touched = async |from_due: &str, from_sequence: &str| {
            plans.lock().unwrap().clear();
            let take = format!(
                "SELECT * FROM oncegate.take_due_v3(1, 8, 1000000, 0, false, NULL, false, {from_due}, {from_sequence})"
            );
            client.simple_query(&take).await.unwrap();
            let plans = std::mem::take(&mut *plans.lock().unwrap());
            let of_queue: Vec<String> =
                plans.into_iter().filter(|plan| plan.contains(" delivery ") && !plan.contains("take_due")).collect();
            assert!(of_queue.len() >= 4, "{of_queue:#?}");
            pages_touched(&of_queue)
        };
        let from_where_it_was = touched("19000", &first).await;
        assert!(from_where_it_was < 150, "{lanes} lanes: {from_where_it_was} pages");
        let from_the_beginning = touched("NULL", "NULL").await;
        assert!(from_the_beginning > 300, "what shows the difference: {from_the_beginning} pages");
    }
}

#[tokio::test]
async fn a_delivery_ends_by_its_id_whatever_else_was_removed() {
    let Some(database) = database() else { return };
    database.run("ALTER TABLE oncegate.delivery SET (autovacuum_enabled = false)");
    let fill = "INSERT INTO oncegate.delivery (id, token, origin, lane, accepted_at, queued_at, due, head, request, body)
                SELECT sha256(int4send(i)), '\\x00', 1, 1, 1, 1, i, '\\x', '\\x', '\\x' FROM generate_series(1, 20000) i";
    database.run(fill);
    database.run("DELETE FROM oncegate.delivery WHERE due > 200");
    database.run("ANALYZE oncegate.delivery");
    let (client, plans) = explained(&database.url).await;
    client.batch_execute("SET auto_explain.log_buffers = on").await.unwrap();
    let finish = "SELECT oncegate.finish_deliveries_v1(array_agg(sha256(int4send(i))), array_agg('\\x00'::bytea)) \
                  FROM generate_series(1, 60) i";
    let ended = client.simple_query(finish).await.unwrap();
    assert_eq!(
        ended.iter().filter(|message| matches!(message, tokio_postgres::SimpleQueryMessage::Row(_))).count(),
        60
    );
    let plans = std::mem::take(&mut *plans.lock().unwrap());
    let of_queue: Vec<String> = plans.into_iter().filter(|plan| plan.contains("Delete on delivery")).collect();
    let touched = pages_touched(&of_queue);
    assert!((60..600).contains(&touched), "{touched} pages: {of_queue:#?}");
}
