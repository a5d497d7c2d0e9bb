//! The story: a day without the gate, the same day with it, and what is left for a person.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};

use super::ROUTE;
use super::customer::{Customer, Fate, told};
use super::day::{Day, Paid};
use super::payments::SLOW;
use super::person;
use super::screen::{Screen, Tone};
use super::shop::TIMEOUT;
use super::tally::{Tally, table};
use super::wire::Server;
use crate::cli::http_client::AdminClient;

/// How often a person looks, at most, until nothing is left open.
const ROUNDS: usize = 5;

/// What the story needs.
pub(super) struct Story {
    /// The day when the shop calls the API itself.
    pub(super) without: Arc<Day>,
    /// The same day through the gate.
    pub(super) with: Arc<Day>,
    /// Where the gate is.
    pub(super) gate: SocketAddr,
    /// Where its admin listener is.
    pub(super) admin: SocketAddr,
    pub(super) seed: u64,
    /// Those who are shown one by one come first.
    pub(super) customers: Vec<Arc<Customer>>,
}

impl Story {
    /// Tells it. Fails where the gate let anybody be charged twice, or not all could be resolved.
    pub(super) async fn tell(&self) -> anyhow::Result<()> {
        self.introduce();
        self.rest(4).await;

        self.title("1. The shop calls the API itself");
        let payments = self.pay(&self.without).await?;
        let without = self.tally(&self.without, &open(&payments)).await?;
        self.rest(2).await;

        self.title("2. The same day, with oncegate before the API");
        self.introduce_gate();
        self.rest(2).await;
        let payments = self.pay(&self.with).await?;
        self.say_what_the_gate_counted().await?;
        let open = open(&payments);
        let with = self.tally(&self.with, &open).await?;
        self.rest(1).await;

        self.title("3. A person resolves what remained unknown");
        let open = self.resolve(open).await?;
        let resolved = self.tally(&self.with, &open).await?;
        self.rest(1).await;

        self.title("The books of the API, counted");
        self.conclude(&without, &with, &resolved)
    }

    fn introduce(&self) {
        let count = self.customers.len();
        let title =
            format!("{count} customers pay, once each, at a payment API that has a bad day (seed {})", self.seed);
        let mut text = format!("{}\n\n  Of 100 requests, the API\n", self.screen().paint(Tone::Title, &title));
        for (fate, odds) in Fate::ODDS {
            let late = if fate == Fate::Slow { format!(", after {} s", SLOW.as_secs_f64()) } else { String::new() };
            text.push_str(&format!("  {odds:>6}  {}{late}\n", fate.in_words()));
        }
        text.push_str(&format!(
            "  It takes no notice of the Idempotency-Key, like most APIs.\n\n  \
             The shop waits {} ms for an answer. Then it tries again, with the same key,\n  \
             as payment SDKs do: after a timeout, a reset, 429, 500, 502, 503, 504, and\n  \
             after a 409 that has Retry-After.",
            TIMEOUT.as_millis()
        ));
        self.screen().say(&text);
    }

    fn introduce_gate(&self) {
        let mut text = format!("  At {}, with its records in SQLite (full sync) and this route:\n\n", self.gate);
        for line in ROUTE.lines() {
            text.push_str(&format!("      {line}\n"));
        }
        text.push_str(
            "\n  By default a 500 frees the key. This API may have charged before: hold.\n\
             \x20 Its 503 comes before the charge: release. A reset is held anyway.\n",
        );
        self.screen().say(&text);
    }

    /// Everybody pays: a few one by one, then all the others at once.
    async fn pay(&self, day: &Arc<Day>) -> anyhow::Result<Vec<Paid>> {
        let (first, others) = self.told();
        let mut payments = day.told(first).await?;
        self.screen().say(&format!("\n  Now the {} others, all within two seconds:", others.len()));
        let (began, requests) = (Instant::now(), day.api.requests());
        let storm = day.storm(others).await?;
        let tries: u32 = storm.iter().map(|(_, payment)| payment.tries).sum();
        self.screen().say(&format!(
            "  the shop sent {tries} requests in {:.1} s, {} of them reached the API",
            began.elapsed().as_secs_f64(),
            day.api.requests() - requests
        ));
        payments.extend(storm);
        Ok(payments)
    }

    async fn tally(&self, day: &Day, open: &[Arc<Customer>]) -> anyhow::Result<Tally> {
        let charges = day.charges().await?;
        let tally = Tally::of(self.customers.iter().map(|customer| &**customer), &charges, open.len());
        let twice = format!("{} charged twice or more", tally.more);
        let tone = if tally.more > 0 { Tone::Bad } else { Tone::Good };
        let mut text =
            format!("  by the API's books: {}, {} charged once", self.screen().paint(tone, &twice), tally.once);
        if tally.never > 0 {
            text.push_str(&format!(", {} not yet", tally.never));
        }
        self.screen().say(&text);
        Ok(tally)
    }

    /// How the gate says that the requests ended.
    async fn say_what_the_gate_counted(&self) -> anyhow::Result<()> {
        let metrics = Server::at("the admin listener", self.admin)?.get("/metrics").await?;
        let counted = outcomes(&String::from_utf8_lossy(&metrics));
        let mut text = String::from("  the gate's answers, by its /metrics:");
        for (nth, outcome) in counted.iter().enumerate() {
            let end = if nth + 1 < counted.len() { "," } else { "" };
            let column = text.len() - text.rfind('\n').unwrap_or(0);
            let gap = if column + outcome.len() > 76 { "\n    " } else { " " };
            text.push_str(&format!("{gap}{outcome}{end}"));
        }
        self.screen().say(&text);
        Ok(())
    }

    /// A person looks, and the shops pay once more, until nothing is left open. Returns what is.
    async fn resolve(&self, mut open: Vec<Arc<Customer>>) -> anyhow::Result<Vec<Arc<Customer>>> {
        let admin = AdminClient::new(&self.admin.to_string(), None, None)?;
        for round in 0..ROUNDS {
            if open.is_empty() {
                break;
            }
            let held = match person::unknown(&admin).await? {
                1 => "1 key whose outcome is".to_owned(),
                unknown => format!("{unknown} keys whose outcomes are"),
            };
            let again = if round > 0 { "The API failed some of them again.\n  " } else { "" };
            self.screen().say(&format!(
                "  {again}The gate holds {held} unknown. A person looks each of\n  \
                 them up in the books, and says what happened (oncegate records resolve):\n"
            ));
            person::resolve(&self.with, &admin, &open, self.told().0).await?;
            self.rest(2).await;
            self.screen().say("\n  The shop tries once more, with the same keys:\n");
            let (first, others): (Vec<_>, Vec<_>) =
                open.into_iter().partition(|customer| self.told().0.iter().any(|told| told.order == customer.order));
            open = Vec::new();
            for customer in first {
                if !self.with.tell(&customer, &Notify::new()).await?.paid {
                    open.push(customer);
                }
            }
            let paid = self.with.storm(&others).await?;
            let left = self::open(&paid);
            if !paid.is_empty() {
                let receipts = paid.len() - left.len();
                self.screen().say(&format!("  and the others: {receipts} of {} have their receipt", paid.len()));
            }
            open.extend(left);
        }
        Ok(open)
    }

    fn conclude(&self, without: &Tally, with: &Tally, resolved: &Tally) -> anyhow::Result<()> {
        let mark = |cell: String, bad| self.screen().paint(if bad { Tone::Bad } else { Tone::Good }, &cell);
        let columns = [("without oncegate", without), ("with oncegate", with), ("and a person", resolved)];
        self.screen().say(&table(columns, mark));
        let customers = self.customers.len();
        verdict(with, resolved).with_context(|| format!("--seed {} --customers {customers}", self.seed))?;
        let told = format!(
            "Without oncegate {} of {customers} customers were charged twice or more.\n\
             With oncegate no customer was, and each of them has a receipt.",
            without.more
        );
        self.screen().say(&self.screen().paint(Tone::Title, &told));
        self.screen().say("\nBefore your own API: oncegate serve --upstream http://127.0.0.1:3000");
        Ok(())
    }

    fn title(&self, text: &str) {
        self.screen().say(&format!("\n{}\n", self.screen().paint(Tone::Title, text)));
    }

    /// Lets the viewer read.
    async fn rest(&self, pauses: u32) {
        sleep(self.with.pause * pauses).await;
    }

    /// Those who are shown one by one, and the others.
    fn told(&self) -> (&[Arc<Customer>], &[Arc<Customer>]) {
        self.customers.split_at(told().min(self.customers.len()))
    }

    fn screen(&self) -> &Screen {
        &self.with.screen
    }
}

/// Fails where the gate let anybody be charged twice, or not all could be resolved.
fn verdict(with: &Tally, resolved: &Tally) -> anyhow::Result<()> {
    let harmed = with.more.max(resolved.more);
    if harmed > 0 {
        bail!(
            "customers were charged twice through the gate: {harmed}. That is a defect of oncegate: please report it, \
             with this output"
        );
    }
    if !resolved.is_resolved() {
        bail!(
            "not all could be resolved: {} customers are not charged, and {} do not know. Is this machine very busy?",
            resolved.never,
            resolved.left_open
        );
    }
    Ok(())
}

/// The customers whose shop stopped without a receipt, in their order.
fn open(payments: &[Paid]) -> Vec<Arc<Customer>> {
    let mut open: Vec<_> =
        payments.iter().filter(|(_, payment)| !payment.paid).map(|(customer, _)| Arc::clone(customer)).collect();
    open.sort_by(|one, other| one.order.cmp(&other.order));
    open
}

/// `N executed` and so on: the samples of `oncegate_requests_total`, without the requests that were not counted.
fn outcomes(metrics: &str) -> Vec<String> {
    let samples = metrics.lines().filter_map(|line| {
        let (labels, count) = line.strip_prefix("oncegate_requests_total{")?.split_once("} ")?;
        let outcome = labels.split(',').find_map(|label| label.strip_prefix("outcome=\"")?.strip_suffix('"'))?;
        (count != "0").then(|| format!("{count} {outcome}"))
    });
    samples.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn harm_is_never_passed_over() {
        let good = Tally { customers: 10, once: 10, ..Tally::default() };
        assert!(verdict(&good, &good).is_ok());
        let twice = Tally { customers: 10, once: 9, more: 1, ..Tally::default() };
        for (with, resolved) in [(&twice, &good), (&good, &twice), (&twice, &twice)] {
            let error = verdict(with, resolved).unwrap_err().to_string();
            assert!(error.contains("charged twice through the gate: 1.") && error.contains("defect"), "{error}");
        }
        let open = Tally { left_open: 2, ..good.clone() };
        assert!(verdict(&open, &good).is_ok());
        assert!(verdict(&good, &open).unwrap_err().to_string().contains("2 do not know"));
    }

    #[test]
    fn outcomes_are_read_from_metrics() {
        let metrics = crate::telemetry::metrics::Metrics::new();
        let route = metrics.route("charges");
        for outcome in ["executed", "executed", "replayed"] {
            let all = crate::telemetry::outcome::Outcome::ALL;
            let outcome = all.into_iter().find(|known| known.as_str() == outcome).unwrap();
            drop(route.answered(outcome, http::StatusCode::OK, tokio::time::Instant::now()));
        }
        assert_eq!(outcomes(&metrics.encode()), ["2 executed", "1 replayed"]);
    }
}
