//! The layout of keys.
//!
//! Records are kept in partitions, each on one node of a cluster: the part in braces decides which (Redis Cluster
//! specification, "Hash tags"). A partition is a range of ids, so that partitions follow one another as ids do.

use crate::idempotency::record::RecordId;

/// How many partitions there are. Never changed: records would not be found any more.
pub(super) const PARTITIONS: u8 = 64;

/// A range of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Partition(pub(super) u8);

impl Partition {
    /// The one that an id is in.
    pub(super) fn of(id: RecordId) -> Self {
        Self(id.0[0] / (u8::MAX / PARTITIONS + 1))
    }

    /// All of them, in the order of ids.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..PARTITIONS).map(Self)
    }

    /// The sorted set of its ids.
    pub(super) fn times(self) -> [u8; 14] {
        let mut key = *b"oncegate{00}:t";
        self.write_number(&mut key);
        key
    }

    /// The prefix of the key of each record; its id follows.
    pub(super) fn records(self) -> [u8; 15] {
        let mut key = *b"oncegate{00}:r:";
        self.write_number(&mut key);
        key
    }

    /// A key in the slot of its records that never exists.
    pub(super) fn absent_key(self) -> String {
        format!("oncegate{{{:02}}}:-", self.0)
    }

    fn write_number(self, key: &mut [u8]) {
        key[9] += self.0 / 10;
        key[10] += self.0 % 10;
    }
}

/// The key of a record.
pub(super) fn record(id: RecordId) -> [u8; 47] {
    let mut key = [0; 47];
    key[..15].copy_from_slice(&Partition::of(id).records());
    key[15..].copy_from_slice(&id.0);
    key
}

/// The hash of origins by their ids.
pub(super) const ORIGINS: &str = "oncegate{origins}";

/// The hash of identities' digests by service and namespace.
pub(super) const IDENTITIES: &str = "oncegate{identities}";

/// The hash of the periods of rules by service and namespace. It has the hash tag of the identities, with which it is written.
pub(super) const PERIODS: &str = "oncegate{identities}:periods";

/// The id of the store.
pub(super) const STORE: &str = "oncegate{store}";

/// Held by the process that adopts rules.
pub(super) const ADOPTING: &str = "oncegate{identities}:lock";

/// The sorted set of audit entries by their places. It has one slot of a cluster: one script writes both sets.
pub(super) const AUDIT: &str = "oncegate{audit}";

/// The sorted set of the places of audit entries, by when they expire.
pub(super) const AUDIT_EXPIRY: &str = "oncegate{audit}:expiry";

/// The prefix of the key of each quota; its id follows.
pub(super) const QUOTAS: &[u8] = b"oncegate:quota:";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_follow_one_another_as_ids_do() {
        let partitions: Vec<u8> = (0..=255).map(|first| Partition::of(RecordId([first; 32])).0).collect();
        assert!(partitions.is_sorted());
        assert_eq!((partitions[0], partitions[255]), (0, PARTITIONS - 1));
        assert!(Partition::all().all(|partition| partitions.contains(&partition.0)));
    }

    #[test]
    fn keys_of_one_partition_share_a_hash_tag() {
        let id = RecordId([0xff; 32]);
        let partition = Partition::of(id);
        let tag = |key: &[u8]| {
            let begin = key.iter().position(|byte| *byte == b'{').unwrap();
            let end = key.iter().position(|byte| *byte == b'}').unwrap();
            key[begin..=end].to_vec()
        };
        assert_eq!(tag(&partition.times()), tag(&record(id)));
        assert_eq!(tag(&record(id)), b"{63}");
        assert_eq!(tag(&Partition(7).times()), b"{07}");
    }
}
