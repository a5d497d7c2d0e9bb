//! Where records come from.

use std::sync::Arc;

use sha2::{Digest, Sha256};

/// Where a record comes from. Records refer to it by [`Origin::id`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// `[store] service`
    pub service: Arc<str>,
    /// The namespace of its identity.
    pub namespace: Arc<str>,
    /// The route that claimed it.
    pub route: Arc<str>,
}

/// A hash that names an [`Origin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OriginId(pub i64);

/// What follows the name of a service in the origins of its shadow records, so that no list of its records has them.
const OBSERVED: &str = " (observed)";

impl Origin {
    /// The origin of the shadow records of a route that only observes.
    #[must_use]
    pub fn shadow(self) -> Self {
        Self { service: format!("{}{OBSERVED}", self.service).into(), ..self }
    }

    /// Whether it is of shadow records.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.service.ends_with(OBSERVED)
    }

    /// Whether it is of shadow records of this service.
    #[must_use]
    pub fn is_shadow_of(&self, service: &str) -> bool {
        self.is_shadow() && self.gate_service() == service
    }

    /// The service of its gates, whether it is of shadow records or not.
    #[must_use]
    pub fn gate_service(&self) -> &str {
        self.service.strip_suffix(OBSERVED).unwrap_or(&self.service)
    }

    /// The hash that records refer to it by: the first eight bytes of the SHA-256 of its parts, each length-prefixed.
    #[must_use]
    pub fn id(&self) -> OriginId {
        let mut hash = Sha256::new();
        for part in [&self.service, &self.namespace, &self.route] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part.as_bytes());
        }
        let digest = hash.finalize();
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        OriginId(i64::from_be_bytes(first))
    }
}
