//! What the records of a store survive, and what can lose them, for its operator.

use std::path::Path;

use crate::store::{postgres, redis};

/// What an operator should know of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) struct Durability {
    /// What the store is and where it is, without a password.
    pub(in crate::cli) place: String,
    /// What its records survive.
    pub(in crate::cli) survives: &'static str,
    /// What loses records in any store of this kind.
    pub(in crate::cli) risk: &'static str,
    /// What can lose records in this one, and how to avoid it.
    pub(in crate::cli) warnings: Vec<String>,
}

impl Durability {
    pub(in crate::cli) fn memory() -> Self {
        let warning = "records are lost when this process ends; for tests and trials only";
        Self {
            place: "memory".to_owned(),
            survives: "nothing",
            risk: "every end of the process: every retry after it runs again",
            warnings: vec![warning.to_owned()],
        }
    }

    /// `filesystem` is what the file stands on, where that is not durable.
    pub(in crate::cli) fn sqlite(path: &Path, filesystem: Option<&str>) -> Self {
        let warning = |filesystem| {
            format!(
                "the store does not stand on a durable file system ({filesystem}): its records may be lost with the \
                 machine or container; move it to a disk or a volume"
            )
        };
        Self {
            place: format!("sqlite:{}", path.display()),
            survives: match filesystem {
                Some(_) => "a crash of the gate",
                None => "a crash of the gate, a crash of the machine, a power cut",
            },
            risk: "the loss of the disk or the file, or a restored backup: retries run again",
            warnings: filesystem.map(warning).into_iter().collect(),
        }
    }

    pub(in crate::cli) fn postgres(servers: &str, connections: usize, found: &postgres::Description) -> Self {
        let route = if found.is_direct { "directly" } else { "through a pooler" };
        let (version, database) = (&found.version, &found.database);
        Self {
            place: format!(
                "PostgreSQL {version} at {servers}, database {database}, reached {route}, {connections} connections"
            ),
            survives: "crashes of gates and of the database, for every commit that PostgreSQL acknowledged",
            risk: "a failover to a standby that is not synchronous, or a restored backup: retries run again",
            warnings: found.risks(),
        }
    }

    /// Of several databases, of which those with a description are open.
    pub(in crate::cli) fn databases(
        databases: &[(String, Result<postgres::Description, postgres::OpenError>)],
        connections: usize,
    ) -> Self {
        let each = databases.iter().map(|(name, found)| match found {
            Ok(found) => Self::postgres(name, connections, found),
            Err(error) if error.is_locked() => Self {
                place: format!("{name}, where another session has a table locked"),
                warnings: vec![
                    "another session has a table of the schema oncegate locked: its keys get 503 until that session ends, \
                     which pg_blocking_pids() finds"
                        .to_owned(),
                ],
                ..Self::memory()
            },
            Err(_) => Self {
                place: format!("{name}, which cannot be reached"),
                warnings: vec!["it cannot be reached: its keys get 503 until it can".to_owned()],
                ..Self::memory()
            },
        });
        let each: Vec<Self> = each.collect();
        let places: Vec<&str> = each.iter().map(|one| &*one.place).collect();
        let warnings = databases.iter().zip(&each);
        let warnings =
            warnings.flat_map(|((name, _), one)| one.warnings.iter().map(move |warning| format!("{name}: {warning}")));
        Self {
            place: format!("{} databases: {}", databases.len(), places.join("; ")),
            survives: "crashes of gates and of each database, for every commit that PostgreSQL acknowledged",
            risk: "a failover to a standby that is not synchronous, or a restored backup: retries run again",
            warnings: warnings.collect(),
        }
    }

    pub(in crate::cli) fn redis(servers: &str, found: &redis::Description) -> Self {
        let (topology, versions) = (found.topology, found.versions.join(", "));
        let (primaries, replicas) = (found.primaries.len(), found.replicas());
        Self {
            place: format!("Redis {versions} at {servers}, {topology}, primaries: {primaries}, replicas: {replicas}"),
            survives: "crashes of gates, and what the persistence settings of Redis survive",
            risk: "a failover, or a crash that loses acknowledged writes: retries run again",
            warnings: found.risks(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::postgres::OpenError;

    #[test]
    fn a_database_whose_tables_are_locked_is_not_said_to_be_away() {
        let locked = OpenError::of_database("b", OpenError::Locked);
        let away = OpenError::Unreachable("it did not answer in time".to_owned());
        let said = Durability::databases(&[("b".to_owned(), Err(locked)), ("c".to_owned(), Err(away))], 0);
        let [locked, away] = &said.warnings[..] else { panic!("{said:?}") };
        assert!(locked.starts_with("b: another session has a table of the schema oncegate locked"), "{locked}");
        assert!(away.starts_with("c: it cannot be reached"), "{away}");
        assert!(
            said.place.contains("b, where another session has a table locked; c, which cannot be"),
            "{}",
            said.place
        );
    }
}
