//! `oncegate records retry`: a dead delivery is queued again. And how an accepted request is found by the start of its id.

use std::io::Write;

use anyhow::bail;
use http::Method;
use serde_json::json;

use super::{WHOLE, record_path};
use crate::cli::http_client::AdminClient;
use crate::cli::paging::members_of;

/// How many accepted requests are looked through for one whose id is cut.
const MOST: usize = 1000;

pub(super) async fn retry(client: &AdminClient, start: &str, reason: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    let id = match delivery_id(client, start, "state=dead&").await? {
        Some(id) => id,
        None => {
            bail!("no dead delivery has an id that starts with {start}; see `oncegate deliveries list --state dead`")
        }
    };
    client.send(Method::POST, &format!("{}/retry", record_path(&id)), Some(&json!({ "reason": reason }))).await?;
    writeln!(out, "{id} queued: it is delivered again, with as many attempts as a new one")?;
    Ok(())
}

/// The whole id of the one accepted request that passes `filter` and whose id starts so, if there is one.
pub(super) async fn delivery_id(client: &AdminClient, start: &str, filter: &str) -> anyhow::Result<Option<String>> {
    if start.len() == WHOLE {
        return Ok(Some(start.to_owned()));
    }
    let start = start.to_ascii_lowercase();
    let page = client.send(Method::GET, &format!("/api/v1/deliveries?{filter}limit={MOST}"), None).await?;
    let ids = members_of(&page, "deliveries")?.iter().filter_map(|delivery| delivery["id"].as_str());
    let found: Vec<&str> = ids.filter(|id| id.starts_with(&start)).collect();
    match found.as_slice() {
        [one] => Ok(Some((*one).to_owned())),
        [] if page["next"].is_null() => Ok(None),
        [] => bail!(
            "none of the {MOST} oldest accepted requests has an id that starts with {start}; give all {WHOLE} digits"
        ),
        several => bail!("{} accepted requests have ids that start with {start}; give more digits", several.len()),
    }
}
