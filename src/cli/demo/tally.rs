//! What the books say: who was charged how often.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::customer::Customer;
use super::payments::Charge;

/// How customers fared, by the books of the API.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) customers: usize,
    pub(super) once: usize,
    pub(super) more: usize,
    pub(super) never: usize,
    /// Customers whose shop stopped without knowing whether they have paid.
    pub(super) left_open: usize,
    /// What was taken beyond what was owed, in cents.
    pub(super) too_much: u64,
}

impl Tally {
    /// Counts. `left_open` is what the shops say; the rest is what the books say.
    pub(super) fn of<'a>(
        customers: impl IntoIterator<Item = &'a Customer>,
        charges: &[Charge],
        left_open: usize,
    ) -> Self {
        let mut taken: HashMap<&str, (usize, u64)> = HashMap::new();
        for charge in charges {
            let (times, cents) = taken.entry(&charge.order).or_default();
            *times += 1;
            *cents += charge.amount;
        }
        let mut tally = Self { left_open, ..Self::default() };
        for customer in customers {
            let (times, cents) = taken.get(customer.order.as_str()).copied().unwrap_or_default();
            tally.customers += 1;
            match times {
                0 => tally.never += 1,
                1 => tally.once += 1,
                _ => tally.more += 1,
            }
            tally.too_much += cents.saturating_sub(customer.cents);
        }
        tally
    }

    /// Whether everybody was charged exactly once, and knows it.
    pub(super) fn is_resolved(&self) -> bool {
        self.once == self.customers && self.left_open == 0
    }
}

/// The tallies side by side. Lines that tell of harm are marked by `harm`, which gets a cell and whether it is bad.
pub(super) fn table(columns: [(&str, &Tally); 3], harm: impl Fn(String, bool) -> String) -> String {
    type Cell = fn(&Tally) -> String;
    const BAD: [&str; 2] = ["charged twice or more", "overcharged"];
    let rows: [(&str, Cell); 6] = [
        ("customers", |tally| tally.customers.to_string()),
        // A part of the customers, whichever of the lines below they are in.
        ("  left open, for a person", |tally| tally.left_open.to_string()),
        ("charged once", |tally| tally.once.to_string()),
        ("charged twice or more", |tally| tally.more.to_string()),
        ("not charged", |tally| tally.never.to_string()),
        ("overcharged", |tally| money(tally.too_much)),
    ];
    let mut text = format!("{:<26}", "");
    for (title, _) in columns {
        let _ = write!(text, "{title:>18}");
    }
    text.push('\n');
    for (name, cell) in rows {
        let _ = write!(text, "{name:<26}");
        for (_, tally) in columns {
            let cell = format!("{:>18}", cell(tally));
            text.push_str(&if BAD.contains(&name) { harm(cell, tally.more > 0) } else { cell });
        }
        text.push('\n');
    }
    text
}

/// Cents as money: `1,234.50`.
fn money(cents: u64) -> String {
    let whole = (cents / 100).to_string();
    let mut grouped = String::new();
    for (at, digit) in whole.char_indices() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    format!("{grouped}.{:02}", cents % 100)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::demo::customer::customers;

    fn charged(customer: &Customer, times: usize) -> Vec<Charge> {
        let charge = Charge { id: "ch".into(), order: customer.order.clone(), amount: customer.cents };
        vec![charge; times]
    }

    #[test]
    fn each_customer_counts_once() {
        let customers = customers(6, 1);
        let times = [1, 2, 0, 3, 1, 1];
        let charges: Vec<Charge> =
            customers.iter().zip(times).flat_map(|(customer, times)| charged(customer, times)).collect();
        let tally = Tally::of(&customers, &charges, 1);
        let too_much = customers[1].cents + 2 * customers[3].cents;
        assert_eq!(tally, Tally { customers: 6, once: 3, more: 2, never: 1, left_open: 1, too_much });
        assert!(!tally.is_resolved());
    }

    #[test]
    fn it_is_resolved_when_all_have_paid_once_and_know_it() {
        let customers = customers(10, 1);
        let once: Vec<Charge> = customers.iter().flat_map(|customer| charged(customer, 1)).collect();
        assert!(Tally::of(&customers, &once, 0).is_resolved());
        assert!(!Tally::of(&customers, &once, 1).is_resolved());
        assert!(!Tally::of(&customers, &once[1..], 0).is_resolved());
        let twice = [once, charged(&customers[9], 1)].concat();
        assert!(!Tally::of(&customers, &twice, 0).is_resolved());
    }

    #[test]
    fn money_has_cents_and_thousands() {
        for (cents, text) in
            [(0, "0.00"), (5, "0.05"), (99_999, "999.99"), (100_000, "1,000.00"), (123_456_789, "1,234,567.89")]
        {
            assert_eq!(money(cents), text);
        }
    }

    #[test]
    fn the_table_stands_in_columns_and_marks_harm() {
        let bad = Tally { customers: 120, once: 95, more: 25, never: 0, left_open: 0, too_much: 123_456 };
        let good = Tally { customers: 120, once: 112, more: 0, never: 8, left_open: 15, too_much: 0 };
        let end = Tally { customers: 120, once: 120, ..Tally::default() };
        let mark = |cell: String, bad: bool| if bad { cell.replace(' ', "!") } else { cell };
        let expected = "
                            without oncegate     with oncegate      and a person
customers                                120               120               120
  left open, for a person                  0                15                 0
charged once                              95               112               120
charged twice or more     !!!!!!!!!!!!!!!!25                 0                 0
not charged                                0                 8                 0
overcharged               !!!!!!!!!!1,234.56              0.00              0.00
";
        let text = table([("without oncegate", &bad), ("with oncegate", &good), ("and a person", &end)], mark);
        assert_eq!(format!("\n{text}"), expected);
    }
}
