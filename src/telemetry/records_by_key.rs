//! The gauge of records by the key that they are encrypted with.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use prometheus::{IntGaugeVec, Opts, Registry};

use super::register::add;
use crate::store::sealed::CountByKey;

/// The label of parts that are not encrypted. No id of a key has a parenthesis.
const PLAIN: &str = "(plain)";

/// The label of parts whose key the configuration does not have.
const MISSING: &str = "(missing)";

/// The series of the last count.
pub struct RecordsByKey {
    gauges: IntGaugeVec,
    labels: Mutex<BTreeSet<Box<str>>>,
}

impl RecordsByKey {
    pub(super) fn new(registry: &Registry) -> Self {
        let what = "Records in the store, by the key that they are encrypted with.";
        let gauges = add(registry, IntGaugeVec::new(Opts::new("oncegate_records_by_key", what), &["key"]));
        Self { gauges, labels: Mutex::default() }
    }

    /// Shows a count in the place of the last one: keys that are configured no more go.
    pub fn show(&self, counted: &CountByKey) {
        let CountByKey { keys, plain, missing } = counted;
        let mut shown = self.labels.lock().unwrap_or_else(PoisonError::into_inner);
        let mut labels = BTreeSet::new();
        let others = [(PLAIN, *plain), (MISSING, *missing)];
        for (label, count) in keys.iter().map(|(id, count)| (&**id, *count)).chain(others) {
            self.gauges.with_label_values(&[label]).set(i64::try_from(count).unwrap_or(i64::MAX));
            labels.insert(label.into());
        }
        for gone in shown.difference(&labels) {
            // It is there: it was shown.
            let _ = self.gauges.remove_label_values(&[gone]);
        }
        *shown = labels;
    }
}

#[cfg(test)]
mod tests {
    use prometheus::core::Collector as _;

    use super::*;

    #[test]
    fn a_count_takes_the_place_of_the_last() {
        let metric = RecordsByKey::new(&Registry::new());
        let shown = || {
            let families = metric.gauges.collect();
            let of = |metric: &prometheus::proto::Metric| {
                (metric.get_label()[0].value().to_owned(), metric.get_gauge().get_value() as u64)
            };
            let mut shown: Vec<_> = families[0].get_metric().iter().map(of).collect();
            shown.sort();
            shown.into_iter().map(|(label, count)| format!("{label} {count}")).collect::<Vec<_>>().join(", ")
        };
        assert_eq!(shown(), "", "nothing before the first count");
        let count = |keys: &[(&str, u64)], plain, missing| CountByKey {
            keys: keys.iter().map(|(id, count)| ((*id).into(), *count)).collect(),
            plain,
            missing,
        };
        metric.show(&count(&[("old", 3)], 1, 0));
        assert_eq!(shown(), "(missing) 0, (plain) 1, old 3");
        metric.show(&count(&[("new", 2)], 0, 4));
        assert_eq!(shown(), "(missing) 4, (plain) 0, new 2");
    }
}
