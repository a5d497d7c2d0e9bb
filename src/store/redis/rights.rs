//! Whether a user may do what is needed.

use redis::{Cmd, RedisError, RedisResult, Value};

use super::caller::Caller;
use super::error::{code, told};
use super::keys::Partition;
use super::{CHANNEL, OpenError};

/// Tries all that is needed, at each node that has records.
pub(super) async fn check(caller: &Caller, user: Option<&str>) -> Result<(), OpenError> {
    let count = if caller.is_partitioned { usize::MAX } else { 1 };
    let tries: Vec<(Cmd, &str)> = Partition::all().take(count).flat_map(|partition| tries(caller, partition)).collect();
    let (commands, names): (Vec<Cmd>, Vec<&str>) = tries.into_iter().unzip();
    let said = caller.send(&commands).await.map_err(|error| OpenError::of(&error))?;
    let mut denied: Vec<String> = names.into_iter().zip(said).flat_map(|(name, said)| denials(name, said)).collect();
    if caller.link.subscribe(CHANNEL).await.is_err_and(|error| is_denial(&error)) {
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

fn tries(caller: &Caller, partition: Partition) -> [(Cmd, &'static str); 6] {
    let nobody = partition.nobody();
    let on = |name: &'static str, more: &[&str]| {
        let mut command = redis::cmd(name);
        command.arg(&nobody).arg(more);
        (command, name)
    };
    let mut script = caller.scripts.try_all.call(1);
    script.arg(&nobody);
    let in_full = caller.scripts.in_full(&script);
    let [count, scan] = [on("ZCOUNT", &["0", "0"]), on("ZSCAN", &["0"])];
    [(in_full, "EVAL"), (script, "EVALSHA"), count, scan, on("HVALS", &[]), on("HGETALL", &[])]
}

fn denials(name: &str, said: RedisResult<Value>) -> Vec<String> {
    match said {
        Ok(Value::Array(denied)) if name.starts_with("EVAL") => denied
            .into_iter()
            .filter_map(|name| match name {
                Value::BulkString(name) => String::from_utf8(name).ok(),
                _ => None,
            })
            .collect(),
        Err(error) if is_denial(&error) => vec![name.to_owned()],
        // What else keeps it from working is told when it does, and may pass.
        Err(error) => {
            tracing::debug!(name, error = told(&error), "whether this is allowed cannot be known now");
            Vec::new()
        }
        Ok(_) => Vec::new(),
    }
}

fn is_denial(error: &RedisError) -> bool {
    code(error) == Some("NOPERM")
}
