//! Turns service, namespace, scope and key into a record's id.

use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::codec::put_recipe;
use super::fingerprint::Recipe;
use super::frame::{put, put_count, sha256};
use super::key::{Key, KeyRule, KeySource};
use super::record::RecordId;
use super::scope::{Caller, ScopePart};

/// Makes ids: SHA-256, or HMAC-SHA-256 where a secret is set, so that ids cannot be guessed from keys.
#[derive(Clone)]
pub struct Identifier {
    secret: Option<Arc<[u8]>>,
    service: Arc<str>,
}

impl Identifier {
    /// For one service. The same secret must be used for the life of its records.
    #[must_use]
    pub fn new(service: Arc<str>, secret: Option<Arc<[u8]>>) -> Self {
        Self { secret, service }
    }

    /// The id of a record.
    #[must_use]
    pub fn id(&self, namespace: &str, scope: &[ScopePart], caller: Caller<'_>, key: &Key) -> RecordId {
        let mut whole = self.begin(b"oncegate record 1");
        put(&mut whole, namespace.as_bytes());
        put_count(&mut whole, scope.len());
        scope.iter().for_each(|part| part.encode(caller, &mut whole));
        put(&mut whole, key.as_str().as_bytes());

        let mut id = [0; 32];
        id[..8].copy_from_slice(&self.prefix(key));
        id[8..].copy_from_slice(&self.hash(&whole)[..24]);
        RecordId(id)
    }

    /// The first eight bytes of the ids of every record of this key, whatever its namespace and scope.
    #[must_use]
    pub fn prefix(&self, key: &Key) -> [u8; 8] {
        let mut out = self.begin(b"oncegate key 1");
        put(&mut out, key.as_str().as_bytes());
        let mut prefix = [0; 8];
        prefix.copy_from_slice(&self.hash(&out)[..8]);
        prefix
    }

    /// The digest of everything but the request that makes the ids of a namespace. Two gates with equal digests
    /// give a request the same id.
    ///
    /// `fingerprint` counts only where a key may be a request's own fingerprint. The secret counts by making the
    /// digest, as it makes the ids.
    #[must_use]
    pub fn rules_digest(&self, namespace: &str, scope: &[ScopePart], key: &KeyRule, fingerprint: &Recipe) -> [u8; 32] {
        let mut out = self.begin(b"oncegate rules 1");
        put(&mut out, namespace.as_bytes());
        put_count(&mut out, scope.len());
        scope.iter().for_each(|part| put(&mut out, part.to_string().as_bytes()));
        put_count(&mut out, key.from.len());
        for source in &key.from {
            put(&mut out, source.to_string().as_bytes());
            if *source == KeySource::Fingerprint {
                put_recipe(&mut out, fingerprint);
            }
        }
        self.hash(&out)
    }

    /// What every hash begins with: what it is for, and the service.
    fn begin(&self, purpose: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(512);
        put(&mut out, purpose);
        put(&mut out, self.service.as_bytes());
        out
    }

    fn hash(&self, text: &[u8]) -> [u8; 32] {
        match &self.secret {
            None => sha256(text),
            Some(secret) => {
                let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes secrets of any length");
                mac.update(text);
                mac.finalize().into_bytes().into()
            }
        }
    }
}
