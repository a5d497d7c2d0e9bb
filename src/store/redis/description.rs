//! Describes the servers and their durability risks.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use redis::{Cmd, FromRedisValue, RedisResult, Value};
use tokio::time::timeout;

use super::manager::{Answers, ConnectionManager};
use super::{OpenError, Servers, Topology, error};

/// How long the servers have to say what they are.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(5);

/// The server, as of the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// How the servers belong together: `standalone`, `sentinel` or `cluster`.
    pub topology: &'static str,
    /// Their versions, each once.
    pub versions: Vec<String>,
    /// The servers that take writes.
    pub primaries: Vec<Primary>,
}

/// A server that takes writes. What it does not let this user see is not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Primary {
    /// Host and port.
    pub address: String,
    /// How many replicas are connected.
    pub replicas: Option<u64>,
    /// Whether it appends each write to a file.
    pub appends: Option<bool>,
    /// When it syncs that file: `always`, `everysec` or `no`.
    pub appendfsync: Option<String>,
    /// Whether it syncs nothing while it writes a snapshot or a new append-only file.
    pub pauses_sync: bool,
    /// When it writes snapshots; empty where never.
    pub save: Option<String>,
    /// How many bytes it may hold; 0 is no bound.
    pub maxmemory: Option<u64>,
    /// The risk of its eviction policy.
    pub maxmemory_policy: Option<String>,
    /// With how few replicas it still takes writes.
    pub min_replicas_to_write: Option<u64>,
}

impl Description {
    pub(super) async fn of(servers: &Servers, manager: &ConnectionManager) -> Result<Self, OpenError> {
        let question = |name: &str, part: &str| redis::cmd(name).arg(part).to_owned();
        let mut questions: Vec<Cmd> =
            ["replication", "persistence", "memory"].map(|part| question("INFO", part)).into();
        let settings = [
            "appendonly",
            "appendfsync",
            "no-appendfsync-on-rewrite",
            "save",
            "maxmemory",
            "maxmemory-policy",
            "min-replicas-to-write",
        ];
        questions.extend(settings.map(|setting| redis::cmd("CONFIG").arg("GET").arg(setting).to_owned()));
        let response = timeout(DESCRIBE_TIMEOUT, manager.ask_each(&questions)).await;
        let response = response.map_err(|_| OpenError::Unreachable("it did not answer in time".to_owned()))?;
        let mut primaries = Vec::new();
        for (address, answers) in response.map_err(|error| OpenError::of(&error))? {
            let answers =
                answers.map_err(|error| OpenError::Unreachable(format!("{address}: {}", error::message(&error))))?;
            primaries.push(Primary::read(address, &answers));
        }
        let topology = match servers.topology {
            Topology::Standalone => "standalone",
            Topology::Sentinel { .. } => "sentinel",
            Topology::Cluster => "cluster",
        };
        Ok(Self { topology, versions: manager.versions(), primaries })
    }

    /// How many replicas are connected to them all, as far as it can be seen.
    #[must_use]
    pub fn replicas(&self) -> u64 {
        self.primaries.iter().filter_map(|primary| primary.replicas).sum()
    }

    /// The data that may be lost and the setting to change, each once, for the operator.
    #[must_use]
    pub fn risks(&self) -> Vec<String> {
        let mut risks: Vec<(String, BTreeSet<&str>)> = Vec::new();
        for primary in &self.primaries {
            for risk in primary.risks() {
                match risks.iter_mut().find(|(known, _)| *known == risk) {
                    Some((_, servers)) => drop(servers.insert(&primary.address)),
                    None => risks.push((risk, BTreeSet::from([&*primary.address]))),
                }
            }
        }
        let format_address = |(risk, servers): (String, BTreeSet<&str>)| {
            let servers: Vec<&str> = servers.into_iter().collect();
            format!("{}: {risk}", servers.join(", "))
        };
        risks.into_iter().map(format_address).collect()
    }
}

impl Primary {
    fn read(address: String, answers: &Answers) -> Self {
        let info: HashMap<&str, &str> =
            answers.iter().filter_map(text).flat_map(str::lines).filter_map(|line| line.split_once(':')).collect();
        let settings: HashMap<String, String> =
            answers.iter().filter_map(|answer| pairs(answer.as_ref().ok()?)).flatten().collect();
        let setting = |name: &str| settings.get(name).cloned();
        let counted = |name: &str| setting(name).and_then(|value| value.parse().ok());
        let field = |name: &str| info.get(name).map(|value| (*value).trim().to_owned());
        Self {
            address,
            replicas: field("connected_slaves").and_then(|count| count.parse().ok()),
            appends: field("aof_enabled").or(setting("appendonly")).map(|value| value == "1" || value == "yes"),
            appendfsync: setting("appendfsync"),
            pauses_sync: setting("no-appendfsync-on-rewrite").is_some_and(|value| value == "yes"),
            save: setting("save"),
            maxmemory: field("maxmemory").and_then(|bytes| bytes.parse().ok()).or(counted("maxmemory")),
            maxmemory_policy: field("maxmemory_policy").or(setting("maxmemory-policy")),
            min_replicas_to_write: counted("min-replicas-to-write"),
        }
    }

    fn risks(&self) -> Vec<String> {
        [self.eviction(), self.persistence(), self.replication()].into_iter().flatten().collect()
    }

    fn eviction(&self) -> Option<String> {
        let Some(policy) = self.maxmemory_policy.as_deref() else {
            return Some(
                "this user may not see maxmemory-policy (INFO and CONFIG are denied): make sure that it is noeviction, \
                 for a policy of allkeys-* throws away claims and answers when memory is full, and requests run twice"
                    .to_owned(),
            );
        };
        if !policy.starts_with("allkeys") {
            return None;
        }
        let when = match self.maxmemory {
            Some(0) => "as soon as a maxmemory is set and reached",
            _ => "when maxmemory is reached",
        };
        Some(format!(
            "NOT SAFE: maxmemory-policy {policy} lets Redis throw away claims and answers {when}, without a word, and \
             their requests WILL RUN TWICE; set maxmemory-policy to noeviction"
        ))
    }

    fn persistence(&self) -> Option<String> {
        let risk = match (self.appends, self.appendfsync.as_deref(), self.save.as_deref()) {
            (None, ..) => {
                "this user may not see how writes are kept (INFO and CONFIG are denied): what Redis acknowledged and did \
                 not keep is lost with it, and those requests may run twice; make sure that appendonly is yes"
            }
            (Some(true), Some("always" | "everysec"), _) if self.pauses_sync => {
                "no-appendfsync-on-rewrite yes: while Redis writes a snapshot or a new append-only file, nothing is synced, and a \
                 crash of its machine loses up to half a minute of claims and answers, and those requests may run twice; set \
                 no-appendfsync-on-rewrite to no"
            }
            (Some(true), Some("always"), _) => return None,
            (Some(true), Some("everysec"), _) => {
                "appendfsync everysec: a crash of its machine, or of Redis while its disk is slow, loses about the last second \
                 of claims and answers, and those requests may run twice; set appendfsync to always if that is too much"
            }
            (Some(true), Some(_), _) => {
                "appendfsync no: a crash of its machine loses what the system had not written yet, often half a minute of \
                 claims and answers, and those requests may run twice; set appendfsync to everysec or always"
            }
            (Some(true), None, _) => {
                "this user may not see appendfsync (CONFIG is denied): with everysec a crash of its machine loses about \
                 the last second of claims and answers, with no more than that, and those requests may run twice"
            }
            (Some(false), _, Some("")) => {
                "nothing is written to a disk: a restart loses every record, all claims and all answers, and every retry \
                 runs again; set appendonly to yes"
            }
            (Some(false), _, Some(_)) => {
                "only snapshots are written to a disk: a crash loses all claims and answers since the last one, minutes \
                 of them, and those requests may run twice; set appendonly to yes"
            }
            (Some(false), _, None) => {
                "writes are not appended to a file: a crash loses at least all claims and answers since the last snapshot, \
                 or every record where there is none, and those requests may run twice; set appendonly to yes"
            }
        };
        Some(risk.to_owned())
    }

    fn replication(&self) -> Option<String> {
        match (self.replicas?, self.min_replicas_to_write) {
            (0, _) => Some(
                "it has no replica: its disk holds the only copy of all records, and with it every retry would run again; \
                 add a replica or back it up"
                    .to_owned(),
            ),
            (_, Some(0)) => Some(
                "min-replicas-to-write is 0: a failover loses what no replica had yet, and a primary that is cut off goes on \
                 taking claims that are lost, so those requests may run twice; set min-replicas-to-write to 1 and \
                 min-replicas-max-lag to a few seconds"
                    .to_owned(),
            ),
            (_, Some(_)) => Some(
                "replicas are written to after the claim is acknowledged: a failover may lose the last claims and answers, \
                 and those requests may run twice"
                    .to_owned(),
            ),
            (_, None) => Some(
                "this user may not see min-replicas-to-write (CONFIG is denied): a failover may lose the last claims and \
                 answers, and those requests may run twice; make sure that it is at least 1"
                    .to_owned(),
            ),
        }
    }
}

/// A text that was answered.
fn text(answer: &RedisResult<Value>) -> Option<&str> {
    match answer {
        Ok(Value::BulkString(text)) => std::str::from_utf8(text).ok(),
        Ok(Value::VerbatimString { text, .. } | Value::SimpleString(text)) => Some(text),
        _ => None,
    }
}

/// The names and values that were answered.
fn pairs(answer: &Value) -> Option<HashMap<String, String>> {
    match answer {
        Value::Array(_) | Value::Map(_) => HashMap::from_redis_value_ref(answer).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn primary() -> Primary {
        Primary {
            address: "a:1".to_owned(),
            replicas: Some(1),
            appends: Some(true),
            appendfsync: Some("always".to_owned()),
            pauses_sync: false,
            save: Some(String::new()),
            maxmemory: Some(1 << 30),
            maxmemory_policy: Some("noeviction".to_owned()),
            min_replicas_to_write: Some(1),
        }
    }

    fn only(primary: Primary) -> String {
        let risks = primary.risks();
        let before = super::Primary { ..self::primary() }.risks();
        let mut new = risks.into_iter().filter(|risk| !before.contains(risk));
        let risk = new.next().expect("it is a risk");
        assert_eq!(new.next(), None);
        risk
    }

    #[test]
    fn each_risk_names_the_setting_to_change() {
        let set = |text: &str| Some(text.to_owned());
        let cases = [
            (Primary { appends: Some(false), ..primary() }, "nothing is written to a disk", "appendonly to yes"),
            (Primary { appends: Some(false), save: set("3600 1"), ..primary() }, "only snapshots", "appendonly to yes"),
            (Primary { appends: Some(false), save: None, ..primary() }, "not appended", "appendonly to yes"),
            (Primary { appendfsync: set("everysec"), ..primary() }, "last second", "appendfsync to always"),
            (Primary { appendfsync: set("no"), ..primary() }, "half a minute", "appendfsync to everysec"),
            (Primary { pauses_sync: true, ..primary() }, "nothing is synced", "no-appendfsync-on-rewrite to no"),
            (Primary { appendfsync: None, ..primary() }, "may not see appendfsync", "may run twice"),
            (Primary { appends: None, ..primary() }, "may not see how writes are kept", "appendonly is yes"),
            (Primary { maxmemory_policy: set("allkeys-lru"), ..primary() }, "WILL RUN TWICE", "to noeviction"),
            (Primary { maxmemory_policy: None, ..primary() }, "may not see maxmemory-policy", "noeviction"),
            (Primary { replicas: Some(0), ..primary() }, "the only copy", "add a replica"),
            (Primary { min_replicas_to_write: Some(0), ..primary() }, "cut off", "min-replicas-to-write to 1"),
            (Primary { min_replicas_to_write: None, ..primary() }, "may not see min-replicas", "at least 1"),
        ];
        for (primary, what, remedy) in cases {
            let risk = only(primary);
            assert!(risk.contains(what) && risk.contains(remedy), "{risk}");
        }
    }

    #[test]
    fn a_policy_without_eviction_is_no_risk() {
        for policy in ["noeviction", "volatile-lru", "volatile-ttl"] {
            let primary = Primary { maxmemory_policy: Some(policy.to_owned()), ..primary() };
            assert_eq!(primary.risks(), self::primary().risks());
        }
    }

    #[test]
    fn a_risk_of_several_servers_is_reported_once() {
        let other = Primary { address: "b:2".to_owned(), ..primary() };
        let versions = vec!["7.0.15".to_owned()];
        let description = Description { topology: "cluster", versions, primaries: vec![primary(), other] };
        let risks = description.risks();
        assert_eq!(risks.len(), 1);
        assert!(risks[0].starts_with("a:1, b:2: "), "{risks:?}");
    }
}
