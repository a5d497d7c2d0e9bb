//! Checks that the Redis user has the rights that the store needs.

use redis::{Cmd, RedisError, RedisResult, Value};

use super::error::{code, message};
use super::keys::Partition;
use super::script_client::ScriptClient;
use super::{CHANNEL, OpenError};

/// Tries all that is needed, at each node that has records.
pub(super) async fn check(client: &ScriptClient, user: Option<&str>) -> Result<(), OpenError> {
    let count = if client.is_partitioned { usize::MAX } else { 1 };
    let tries: Vec<(Cmd, &str)> = Partition::all().take(count).flat_map(|partition| tries(client, partition)).collect();
    let (commands, names): (Vec<Cmd>, Vec<&str>) = tries.into_iter().unzip();
    let response = client.send(&commands).await.map_err(|error| OpenError::of(&error))?;
    let mut denied: Vec<String> =
        names.into_iter().zip(response).flat_map(|(name, response)| denials(name, response)).collect();
    if client.manager.subscribe(CHANNEL).await.is_err_and(|error| is_denial(&error)) {
        denied.push("SUBSCRIBE".to_owned());
    }
    denied.sort_unstable();
    denied.dedup();
    if denied.is_empty() {
        return Ok(());
    }
    let user = user.unwrap_or("default");
    let rights: Vec<String> = denied.iter().map(|name| format!("+{}", name.to_lowercase())).collect();
    Err(OpenError::Refused(format!(
        "this user lacks rights to {}: ACL SETUSER {user} ~oncegate* &oncegate* {} gives them",
        denied.join(", "),
        rights.join(" ")
    )))
}

fn tries(client: &ScriptClient, partition: Partition) -> [(Cmd, &'static str); 6] {
    let absent_key = partition.absent_key();
    let on = |name: &'static str, more: &[&str]| {
        let mut command = redis::cmd(name);
        command.arg(&absent_key).arg(more);
        (command, name)
    };
    let mut script = client.scripts.try_all.call(1);
    script.arg(&absent_key);
    let in_full = client.scripts.in_full(&script);
    let [count, scan] = [on("ZCOUNT", &["0", "0"]), on("ZSCAN", &["0"])];
    [(in_full, "EVAL"), (script, "EVALSHA"), count, scan, on("HVALS", &[]), on("HGETALL", &[])]
}

fn denials(name: &str, response: RedisResult<Value>) -> Vec<String> {
    match response {
        Ok(Value::Array(denied)) if name.starts_with("EVAL") => denied
            .into_iter()
            .filter_map(|name| match name {
                Value::BulkString(name) => String::from_utf8(name).ok(),
                _ => None,
            })
            .collect(),
        Err(error) if is_denial(&error) => vec![name.to_owned()],
        // Other errors are reported when they occur in use, and may be transient.
        Err(error) => {
            tracing::debug!(name, error = message(&error), "cannot check this permission now");
            Vec::new()
        }
        Ok(_) => Vec::new(),
    }
}

fn is_denial(error: &RedisError) -> bool {
    code(error) == Some("NOPERM")
}
