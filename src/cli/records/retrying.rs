//! `oncegate records retry`: a dead delivery is queued again.

use std::io::Write;

use http::Method;
use serde_json::json;

use super::{SHOWN, WHOLE, ids_of, one_of, record_path};
use crate::cli::http_client::AdminClient;

pub(super) async fn retry(client: &AdminClient, start: &str, reason: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    let id = whole_id(client, start).await?;
    client.send(Method::POST, &format!("{}/retry", record_path(&id)), Some(&json!({ "reason": reason }))).await?;
    writeln!(out, "{id} queued: it is delivered again, with as many attempts as a new one")?;
    Ok(())
}

/// The whole id of the one dead delivery whose id starts so.
async fn whole_id(client: &AdminClient, start: &str) -> anyhow::Result<String> {
    if start.len() == WHOLE {
        return Ok(start.to_owned());
    }
    let target = format!("/api/v1/deliveries?state=dead&id={start}&limit={}", SHOWN + 1);
    one_of(ids_of(client, &target, "deliveries").await?, start, "dead delivery")
}
