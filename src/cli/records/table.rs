//! Records for people.

use std::io::Write;
use std::time::Duration;

use serde_json::Value;

const TITLES: [&str; 7] = ["ID", "STATE", "ROUTE", "KEY", "AGE", "METHOD", "PATH"];

/// A table with a line for each record, written in parts. The columns only grow wider.
#[derive(Default)]
pub(super) struct Table {
    /// Of the columns; all 0 before the first record.
    widths: [usize; 7],
}

impl Table {
    pub(super) fn write(&mut self, records: &[Value], out: &mut dyn Write) -> anyhow::Result<()> {
        let mut rows = Vec::new();
        if !self.is_begun() && !records.is_empty() {
            rows.push(TITLES.map(str::to_owned));
        }
        rows.extend(records.iter().map(|record| {
            ["id", "state", "route", "key", "age_seconds", "method", "path"].map(|name| {
                let shown = text(&record[name]);
                match name {
                    "age_seconds" => age(&record[name]).unwrap_or(shown),
                    "state" if record["orphaned"] == true => shown + " (orphaned)",
                    _ => shown,
                }
            })
        }));
        for (column, width) in self.widths.iter_mut().enumerate() {
            *width = rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).max(*width);
        }
        for row in rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(self.widths) {
                line.push_str(&format!("{cell:<width$}  "));
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }

    pub(super) fn end(self, out: &mut dyn Write) -> anyhow::Result<()> {
        if !self.is_begun() {
            writeln!(out, "no records")?;
        }
        Ok(())
    }

    fn is_begun(&self) -> bool {
        self.widths != [0; 7]
    }
}

/// A line for each member of a record.
pub(super) fn write_one(record: &Value, out: &mut dyn Write) -> anyhow::Result<()> {
    let members = record.as_object().ok_or_else(|| anyhow::anyhow!("the answer is not a record"))?;
    let width = members.keys().map(String::len).max().unwrap_or(0);
    // The order of `RecordView`; what a later version adds comes last.
    const ORDER: [&str; 14] = [
        "id",
        "state",
        "service",
        "namespace",
        "route",
        "key",
        "method",
        "path",
        "claimed_at",
        "age_seconds",
        "lease_until",
        "expires_at",
        "status",
        "body_bytes",
    ];
    let known = ORDER.iter().filter_map(|name| members.get_key_value(*name));
    let others = members.iter().filter(|(name, _)| !ORDER.contains(&name.as_str()));
    for (name, value) in known.chain(others) {
        writeln!(out, "{name:<width$}  {}", text(value))?;
    }
    Ok(())
}

/// Clients choose paths and keys: what would drive the terminal is escaped.
pub(super) fn text(value: &Value) -> String {
    let text = match value {
        Value::Null => return "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    text.chars().fold(String::new(), |mut shown, c| {
        if c.is_control() {
            shown.extend(c.escape_unicode())
        } else {
            shown.push(c)
        }
        shown
    })
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
        let mut table = Table::default();
        table.write(&records[..2], &mut out).unwrap();
        table.write(&records[2..], &mut out).unwrap();
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
    fn one_record_in_the_order_of_the_api() {
        let mut out = Vec::new();
        write_one(&json!({"state": "completed", "id": "aa", "status": 201, "new": true}), &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "id      aa\nstate   completed\nstatus  201\nnew     true\n");
    }
}
