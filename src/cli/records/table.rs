//! Records for people.

use std::io::Write;
use std::time::Duration;

use anyhow::Context;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use crate::cli::table::{Table, text};

/// The member with the whole answer.
const ANSWER_FIELD: &str = "answer";

pub(super) fn table() -> Table<7> {
    Table::new(["ID", "STATE", "ROUTE", "KEY", "AGE", "METHOD", "PATH"], "no records")
}

pub(super) fn row(record: &Value) -> [String; 7] {
    ["id", "state", "route", "key", "age_seconds", "method", "path"].map(|name| {
        let shown = text(&record[name]);
        match name {
            "age_seconds" => age(&record[name]).unwrap_or(shown),
            "state" if record["orphaned"] == true => shown + " (orphaned)",
            _ => shown,
        }
    })
}

/// A line for each member of a record, but for its answer.
pub(super) fn write_one(record: &Value, out: &mut dyn Write) -> anyhow::Result<()> {
    let members = record.as_object().ok_or_else(|| anyhow::anyhow!("the answer is not a record"))?;
    let width = members.keys().map(String::len).max().unwrap_or(0);
    // The order of `RecordView`; what a later version adds comes last.
    const ORDER: [&str; 24] = [
        "id",
        "state",
        "unknown_since",
        "unknown_because",
        "service",
        "namespace",
        "route",
        "upstream",
        "key",
        "keeps_key",
        "method",
        "path",
        "grpc",
        "request",
        "trace_id",
        "caller",
        "fingerprint",
        "claimed_at",
        "age_seconds",
        "lease_until",
        "expires_at",
        "status",
        "content_type",
        "body_bytes",
    ];
    let known = ORDER.iter().filter_map(|name| members.get_key_value(*name));
    let others = members.iter().filter(|(name, _)| {
        !ORDER.contains(&name.as_str()) && ![ANSWER_FIELD, "etag", "unreadable_because"].contains(&name.as_str())
    });
    for (name, value) in known.chain(others) {
        let mut shown = text(value);
        match name.as_str() {
            "age_seconds" => {
                writeln!(out, "{:<width$}  {}", "age", age(value).unwrap_or(shown))?;
                continue;
            }
            "unknown_because" => {
                if let Some(explained) = value.as_str().and_then(explained) {
                    shown = format!("{shown}: {explained}");
                }
            }
            "unreadable" if *value == true => {
                shown += match members["unreadable_because"].as_str() {
                    Some("encrypted") => {
                        ": it is encrypted, and no key of this gate opens it. Add its key to store.encryption_keys"
                    }
                    _ => ": a later version of oncegate wrote it. Update the gate",
                };
            }
            _ => {}
        }
        writeln!(out, "{name:<width$}  {shown}")?;
    }
    Ok(())
}

/// Says why the record does not show the answer or the key that was asked for.
pub(super) fn write_lacking(record: &Value, answer: bool, key: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let is_unreadable = record["unreadable"] == true;
    // A gate of an earlier version does not say.
    let is_shortened = || record["key"].as_str().is_none_or(|key| key.contains('…'));
    if key && record["keeps_key"].as_bool().map_or_else(is_shortened, |keeps| !keeps) {
        writeln!(
            out,
            "{}",
            match is_unreadable {
                true => "the key cannot be read",
                false => "this record does not keep its key: only routes with recovery.every do",
            }
        )?;
    }
    if answer && record.get(ANSWER_FIELD).is_none() {
        writeln!(
            out,
            "{}",
            match record["state"].as_str() {
                _ if is_unreadable => "the answer cannot be read",
                Some("in-flight") => "no answer is kept: the attempt is in flight",
                _ => "no answer is kept: the outcome is unknown",
            }
        )?;
    }
    Ok(())
}

/// The answer of a record, where it is shown, as HTTP/1.1 would have it: headers, body, trailers.
pub(super) fn write_answer_of(record: &Value, out: &mut dyn Write) -> anyhow::Result<()> {
    record.get(ANSWER_FIELD).map_or(Ok(()), |answer| write_answer(answer, out))
}

/// What a cause means, for those that do not say it themselves.
fn explained(because: &str) -> Option<String> {
    Some(match because {
        "lease-expired" => "the gate of the attempt ended, or could not reach the store in time".to_owned(),
        "not-recorded" => "the release that held it did not write why".to_owned(),
        "unreadable" => "this gate cannot read the record".to_owned(),
        "shutdown" => "the gate shut down before the upstream answered".to_owned(),
        "timeout" => "the upstream did not answer in time".to_owned(),
        "broken" => "the connection broke before the answer was complete".to_owned(),
        "unreachable" => "the upstream could not be reached, and the route holds that".to_owned(),
        status if status.parse::<u16>().is_ok() => format!("the upstream answered {status}, and the route holds that"),
        _ => return None,
    })
}

fn write_answer(answer: &Value, out: &mut dyn Write) -> anyhow::Result<()> {
    let lines = |name: &str| {
        let lines = answer[name].as_array().cloned().unwrap_or_default();
        lines.into_iter().map(|line| format!("{}: {}\n", text(&line[0]), text(&line[1]))).collect::<String>()
    };
    write!(out, "\n{}\n", lines("headers"))?;
    let Some(body) = answer["body_base64"].as_str() else {
        writeln!(out, "(the body was not kept)")?;
        return Ok(());
    };
    let body = STANDARD.decode(body).context("the answer's body is not base64")?;
    match String::from_utf8(body) {
        Ok(body) => {
            let lines = body.split('\n').map(|line| text(&Value::from(line)));
            writeln!(out, "{}", lines.collect::<Vec<_>>().join("\n"))?;
        }
        Err(error) => {
            let bytes = error.as_bytes().len();
            writeln!(out, "(the body has {bytes} bytes that are not text: --json prints them in base64)")?;
        }
    }
    write!(out, "{}", lines("trailers"))?;
    Ok(())
}

fn age(seconds: &Value) -> Option<String> {
    Some(humantime::format_duration(Duration::from_secs(seconds.as_u64()?)).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_table_is_aligned_and_drives_no_terminal() {
        let records = [
            json!({"id": "aa", "state": "unknown", "route": "create-charge", "key": "8e03…", "age_seconds": 7325,
                   "method": "POST", "path": "/v1/\u{9b}2J\u{1b}[2J"}),
            json!({"id": "cc", "state": "completed", "orphaned": true, "route": "refund", "key": "8e03…", "age_seconds": 60,
                   "method": "POST", "path": "/v1/refunds"}),
            json!({"id": "bb", "state": "in-flight", "route": null, "key": null, "age_seconds": 0, "method": null, "path": null}),
        ];
        let mut out = Vec::new();
        let mut table = table();
        table.write(records[..2].iter().map(row), &mut out).unwrap();
        table.write(records[2..].iter().map(row), &mut out).unwrap();
        table.end(&mut out).unwrap();
        let expected = "\
ID  STATE                 ROUTE          KEY    AGE       METHOD  PATH
aa  unknown               create-charge  8e03…  2h 2m 5s  POST    /v1/\\u{9b}2J\\u{1b}[2J
cc  completed (orphaned)  refund         8e03…  1m        POST    /v1/refunds
bb  in-flight             -              -      0s        -       -
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn an_answer_follows_its_record() {
        let answer = json!({
            "headers": [["content-type", "text/plain"], ["x-odd", "a\u{7}b"]],
            "body_base64": STANDARD.encode("one\ntwo\u{1b}["),
            "trailers": [["x-sum", "1"]],
        });
        let mut out = Vec::new();
        let record = json!({"id": "aa", "unknown_because": "502", "answer": answer});
        write_one(&record, &mut out).unwrap();
        write_answer_of(&record, &mut out).unwrap();
        let expected = "\
id               aa
unknown_because  502: the upstream answered 502, and the route holds that

content-type: text/plain
x-odd: a\\u{7}b

one
two\\u{1b}[
x-sum: 1
";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
        let mut out = Vec::new();
        write_answer(&json!({"headers": [], "body_base64": STANDARD.encode([0xff])}), &mut out).unwrap();
        assert!(String::from_utf8(out).unwrap().contains("1 bytes that are not text"));
    }

    #[test]
    fn one_record_in_the_order_of_the_api() {
        let mut out = Vec::new();
        write_one(&json!({"state": "completed", "id": "aa", "status": 201, "new": true}), &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "id      aa\nstate   completed\nstatus  201\nnew     true\n");
    }
}
