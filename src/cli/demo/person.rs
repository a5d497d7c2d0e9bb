//! The person who resolves the records whose outcome is unknown: by the books of the API, through the records API.

use std::sync::Arc;

use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::Method;
use serde_json::{Value, json};

use super::customer::Customer;
use super::day::Day;
use super::payments::{Charge, receipt};
use super::screen::Tone;
use crate::cli::http_client::AdminClient;

/// How many characters of a record's id are shown.
const SHOWN: usize = 8;

/// What became of records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Resolved {
    /// The charge stands in the books: retries get it.
    pub(super) completed: usize,
    /// There is no charge: a retry runs.
    pub(super) released: usize,
}

/// How many records the gate holds as unknown.
pub(super) async fn unknown(admin: &AdminClient) -> anyhow::Result<usize> {
    let found = admin.send(Method::GET, "/api/v1/records?state=unknown&limit=1000", None).await?;
    Ok(list(&found)?.len())
}

/// Settles the records of these customers' payments. Those of the first `told` customers are shown one by one.
pub(super) async fn resolve(
    day: &Day,
    admin: &AdminClient,
    customers: &[Arc<Customer>],
    told: &[Arc<Customer>],
) -> anyhow::Result<Resolved> {
    let mut resolved = Resolved::default();
    let mut others = Resolved::default();
    for customer in customers {
        let found =
            admin.send(Method::GET, &format!("/api/v1/records?state=unknown&key={}", customer.key), None).await?;
        for record in list(&found)? {
            let id = record["id"].as_str().context("a record has no id")?;
            let charges = day.charges_of(&customer.order).await?;
            let charge = charges.first();
            admin.send(Method::POST, &format!("/api/v1/records/{id}/resolve"), Some(&resolution(charge))).await?;
            resolved.count(charge);
            if told.iter().any(|told| told.order == customer.order) {
                say(day, customer, id, charge);
            } else {
                others.count(charge);
            }
        }
    }
    if others != Resolved::default() {
        day.screen.say(&format!(
            "  and the others in the same way: {} completed, {} released",
            others.completed, others.released
        ));
    }
    Ok(resolved)
}

impl Resolved {
    fn count(&mut self, charge: Option<&Charge>) {
        match charge {
            Some(_) => self.completed += 1,
            None => self.released += 1,
        }
    }
}

fn say(day: &Day, customer: &Customer, id: &str, charge: Option<&Charge>) {
    let books = charge.map_or("no charge", |charge| &charge.id);
    let action = match charge {
        Some(_) => "complete: retries get 201",
        None => "release: a retry may run",
    };
    let action = day.screen.paint(Tone::Open, action);
    let shown = id.get(..SHOWN).unwrap_or(id);
    day.screen.say(&format!("  {:<4}  record {shown}...  the books have {books:<10}  {action}", customer.name));
}

/// The body of `POST /api/v1/records/{id}/resolve`.
fn resolution(charge: Option<&Charge>) -> Value {
    match charge {
        Some(charge) => json!({
            "action": "complete",
            "status": 201,
            "headers": [["Content-Type", "application/json"]],
            "body_base64": STANDARD.encode(receipt(charge)),
            "reason": format!("found in the books as {}", charge.id),
        }),
        None => json!({ "action": "release", "reason": "no such charge in the books" }),
    }
}

fn list(found: &Value) -> anyhow::Result<&Vec<Value>> {
    found["records"].as_array().context("the answer has no records")
}
