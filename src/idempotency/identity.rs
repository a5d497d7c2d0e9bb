//! Turns service, namespace, scope and key into a record's id.

use super::key::{Key, KeyRule};
use super::record::RecordId;
use super::scope::{Caller, ScopePart};

/// Makes ids: SHA-256, or HMAC-SHA-256 where a secret is set, so that ids cannot be guessed from keys.
#[derive(Clone)]
pub struct Identifier {
    secret: Option<std::sync::Arc<[u8]>>,
    service: std::sync::Arc<str>,
}

impl Identifier {
    /// For one service. The same secret must be used for the life of its records.
    #[must_use]
    pub fn new(service: std::sync::Arc<str>, secret: Option<std::sync::Arc<[u8]>>) -> Self {
        Self { secret, service }
    }

    /// The id of a record.
    #[must_use]
    pub fn id(&self, namespace: &str, scope: &[ScopePart], caller: Caller<'_>, key: &Key) -> RecordId {
        let _ = (namespace, scope, caller, key, &self.secret, &self.service);
        todo!()
    }

    /// The first eight bytes of the ids of every record of this key, whatever its namespace and scope.
    #[must_use]
    pub fn prefix(&self, key: &Key) -> [u8; 8] {
        let _ = key;
        todo!()
    }

    /// The digest of everything but the request that makes the ids of a namespace. Two gates with equal digests
    /// give a request the same id.
    #[must_use]
    pub fn rules_digest(&self, namespace: &str, scope: &[ScopePart], key: &KeyRule) -> [u8; 32] {
        let _ = (namespace, scope, key);
        todo!()
    }
}
