//! `oncegate records list`, page by page.

use std::io::Write;

use http::Method;
use serde_json::Value;

use super::table::Table;
use super::{ListArgs, percent_encode, records_of};
use crate::cli::http_client::AdminClient;

/// Most records that the API gives at once.
const PAGE: usize = 1000;

/// Follows the pages up to the limit. Each is written before the next is asked for.
pub(super) async fn list(client: &AdminClient, args: ListArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let filter = args.filter.query();
    let mut left = if args.all { usize::MAX } else { args.limit };
    let mut next = args.after;
    let mut list = if args.json { List::Json { is_begun: false } } else { List::Table(Table::default()) };
    loop {
        let limit = left.min(PAGE);
        let cursor = next.map(|next| format!("&cursor={}", percent_encode(&next))).unwrap_or_default();
        let page = client.send(Method::GET, &format!("/api/v1/records?limit={limit}{filter}{cursor}"), None).await?;
        let found = records_of(&page)?;
        list.write(found, out)?;
        left = left.saturating_sub(found.len());
        next = page["next"].as_str().map(ToOwned::to_owned);
        if next.is_none() || left == 0 {
            break;
        }
    }
    list.end(next.as_deref(), out)
}

/// A list that is being written.
enum List {
    Table(Table),
    /// One object, with the records as the API gives them.
    Json {
        is_begun: bool,
    },
}

impl List {
    fn write(&mut self, records: &[Value], out: &mut dyn Write) -> anyhow::Result<()> {
        match self {
            Self::Table(table) => table.write(records, out)?,
            Self::Json { is_begun } => {
                for record in records {
                    let before = if *is_begun { "," } else { "{\n  \"records\": [" };
                    let record = serde_json::to_string_pretty(record)?.replace('\n', "\n    ");
                    write!(out, "{before}\n    {record}")?;
                    *is_begun = true;
                }
            }
        }
        out.flush()?;
        Ok(())
    }

    /// Ends the list; `next` is where more records are.
    fn end(self, next: Option<&str>, out: &mut dyn Write) -> anyhow::Result<()> {
        match self {
            Self::Table(table) => {
                table.end(out)?;
                if let Some(next) = next {
                    writeln!(out, "next: {next}")?;
                }
            }
            Self::Json { is_begun } => {
                let before = if is_begun { "\n  ]" } else { "{\n  \"records\": []" };
                writeln!(out, "{before},\n  \"next\": {}\n}}", Value::from(next))?;
            }
        }
        Ok(())
    }
}
