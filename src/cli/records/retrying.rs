//! `oncegate records retry`: a dead delivery is queued again.

use std::io::Write;

use anyhow::bail;
use http::Method;
use serde_json::json;

use super::record_path;
use crate::cli::http_client::AdminClient;
use crate::cli::paging::members_of;

/// How many dead deliveries are looked through for one whose id is cut.
const MOST: usize = 1000;

pub(super) async fn retry(client: &AdminClient, start: &str, reason: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    let id = whole_id(client, start).await?;
    client.send(Method::POST, &format!("{}/retry", record_path(&id)), Some(&json!({ "reason": reason }))).await?;
    writeln!(out, "{id} queued: it is delivered again, with as many attempts as a new one")?;
    Ok(())
}

async fn whole_id(client: &AdminClient, start: &str) -> anyhow::Result<String> {
    if start.len() == 64 {
        return Ok(start.to_owned());
    }
    let page = client.send(Method::GET, &format!("/api/v1/deliveries?state=dead&limit={MOST}"), None).await?;
    let ids = members_of(&page, "deliveries")?.iter().filter_map(|delivery| delivery["id"].as_str());
    let found: Vec<&str> = ids.filter(|id| id.starts_with(start)).collect();
    match found.as_slice() {
        [one] => Ok((*one).to_owned()),
        [] => bail!("no dead delivery has an id that starts with {start}; see `oncegate deliveries list --state dead`"),
        several => bail!("{} dead deliveries have ids that start with {start}; give more digits", several.len()),
    }
}
