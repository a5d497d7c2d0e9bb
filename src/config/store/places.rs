//! Where the keys of `[store]` stand that records are found by.

use crate::config::node::Table;
use crate::config::problem::Place;

/// The keys.
const KEYS: [&str; 4] = ["url", "service", "id_secret_file", "other_id_secret_files"];

/// Where each of them stands, or would be missed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorePlaces([Place; KEYS.len()]);

impl StorePlaces {
    pub(super) fn of(table: &Table<'_>) -> Self {
        Self(KEYS.map(|key| table.place_with_line(key)))
    }

    /// Where a dotted key stands.
    #[must_use]
    pub fn of_key(&self, key: &str) -> Place {
        let index = KEYS.iter().position(|known| key.strip_prefix("store.") == Some(*known));
        index.map_or(Place::Nowhere, |index| self.0[index].clone())
    }

    /// What names the URL of the store, for people: a flag, a variable or the key.
    #[must_use]
    pub fn url(&self) -> String {
        match &self.0[0] {
            place @ (Place::Flag(_) | Place::Environment(_)) => place.to_string(),
            Place::File(..) | Place::Nowhere => "[store] url".to_owned(),
        }
    }
}
