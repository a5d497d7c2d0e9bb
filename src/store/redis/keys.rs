//! What is kept under which key.
//!
//! Records are kept in partitions, each on one node of a cluster: what stands in braces decides which (Redis Cluster
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

    /// The sorted set of ids by the end of their lease.
    pub(super) fn in_flight(self) -> String {
        self.named('f')
    }

    /// The sorted set of ids of completed records by their expiry.
    pub(super) fn completed(self) -> String {
        self.named('c')
    }

    /// The sorted set of ids of unknown records by their expiry.
    pub(super) fn unknown(self) -> String {
        self.named('u')
    }

    /// The sorted set of ids in their order.
    pub(super) fn ids(self) -> String {
        self.named('i')
    }

    /// What the key of each record begins with; its id follows.
    pub(super) fn records(self) -> String {
        self.named('r') + ":"
    }

    fn named(self, what: char) -> String {
        format!("oncegate{{{:02}}}:{what}", self.0)
    }
}

/// The key of a record.
pub(super) fn record(id: RecordId) -> Vec<u8> {
    let mut key = Partition::of(id).records().into_bytes();
    key.extend_from_slice(&id.0);
    key
}

/// The key of no record, beside those of the first partition.
pub(super) const NOBODY: &str = "oncegate{00}:r:";

/// The hash of origins by their ids.
pub(super) const ORIGINS: &str = "oncegate{origins}";

/// The hash of identities' digests by service and namespace.
pub(super) const IDENTITIES: &str = "oncegate{identities}";

/// Whoever adopts holds it.
pub(super) const ADOPTING: &str = "oncegate{identities}:lock";

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
    fn what_belongs_together_has_one_hash_tag() {
        let id = RecordId([0xff; 32]);
        let partition = Partition::of(id);
        let tag = |key: &[u8]| {
            let begin = key.iter().position(|byte| *byte == b'{').unwrap();
            let end = key.iter().position(|byte| *byte == b'}').unwrap();
            key[begin..=end].to_vec()
        };
        let sets = [partition.in_flight(), partition.completed(), partition.unknown(), partition.ids()];
        assert!(sets.iter().all(|set| tag(set.as_bytes()) == tag(&record(id))));
    }
}
