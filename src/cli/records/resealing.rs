//! `oncegate records reseal`

use std::io::Write;

use anyhow::{Context as _, bail};
use http::Method;
use serde_json::{Map, Value};

use super::counts::records;
use crate::cli::http_client::AdminClient;

/// Goes on until the gate has looked at every record.
pub(super) async fn reseal(client: &AdminClient, out: &mut dyn Write) -> anyhow::Result<()> {
    let (mut resealed, mut in_flight, mut unopened, mut failed) = (0, 0, 0, 0);
    let mut target = "/api/v1/records/reseal".to_owned();
    loop {
        let done = client.send(Method::POST, &target, Some(&Value::Object(Map::new()))).await?;
        let count = |name: &str| done[name].as_u64().with_context(|| format!("the answer has no `{name}`"));
        resealed += count("resealed")?;
        in_flight += count("in_flight")?;
        unopened += count("unopened")?;
        failed += count("failed")?;
        let Value::String(after) = &done["after"] else { break };
        writeln!(out, "{resealed} encrypted so far")?;
        target = format!("/api/v1/records/reseal?after={after}");
    }
    writeln!(out, "{} encrypted with the first key", records(resealed))?;
    if in_flight > 0 {
        writeln!(out, "{in_flight} in flight, which are left alone: run it again when their attempts have ended")?;
    }
    if unopened > 0 {
        writeln!(
            out,
            "{unopened} not encrypted anew: their key is missing, they were altered, or a route has seal = \"required\" and they \
             are not encrypted"
        )?;
    }
    if failed > 0 {
        writeln!(out, "{failed} left, since the store failed or a transaction holds them: run it again")?;
    }
    if failed + unopened > 0 {
        bail!("not all records have the first key: keep the others");
    }
    Ok(())
}
