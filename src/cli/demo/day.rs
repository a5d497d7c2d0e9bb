//! A day of payments: some shown one by one, and then all the others at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep};

use super::customer::{Customer, Fate};
use super::payments::{Charge, Done, PATH, Payments};
use super::screen::{Screen, Tone};
use super::shop::{Answer, Next, Payment, Seen, Shop, TIMEOUT};
use super::wire::Server;

/// From this pause on, a shop that waits is left alone, and the next customer's payment is shown.
const LONG: Duration = Duration::from_secs(1);

/// Between two changes of the line that tells how far the storm is.
const FRAME: Duration = Duration::from_millis(100);

/// An API, a shop that pays there, and how it is shown.
pub(super) struct Day {
    pub(super) api: Arc<Payments>,
    /// The API as those see it who look into its books.
    pub(super) books: Server,
    pub(super) shop: Shop,
    pub(super) screen: Arc<Screen>,
    pub(super) began: Instant,
    /// Between two customers, so that the viewer can read.
    pub(super) pause: Duration,
}

/// A customer, and how paying ended.
pub(super) type Paid = (Arc<Customer>, Payment);

impl Day {
    /// The payments of these customers, shown try by try. One begins when the one before has ended, or waits.
    pub(super) async fn told(self: &Arc<Self>, customers: &[Arc<Customer>]) -> anyhow::Result<Vec<Paid>> {
        let title =
            format!("{:>8}  {:<4}  {:<26}  {}", "time", "who", "what the API does", "what the shop sees, and does");
        self.screen.say(&self.screen.paint(Tone::Faint, &title));
        let mut payments = JoinSet::new();
        for customer in customers {
            let (day, customer) = (Arc::clone(self), Arc::clone(customer));
            let waits = Arc::new(Notify::new());
            let ended = Arc::clone(&waits);
            payments.spawn(async move {
                let payment = day.tell(&customer, &ended).await;
                ended.notify_one();
                payment.map(|payment| (customer, payment))
            });
            waits.notified().await;
            sleep(self.pause).await;
        }
        self.passing(all(payments), || "a shop waits, as it was told".to_owned()).await
    }

    /// The payments of these customers, all within moments.
    pub(super) async fn storm(self: &Arc<Self>, customers: &[Arc<Customer>]) -> anyhow::Result<Vec<Paid>> {
        let mut payments = JoinSet::new();
        let (sent, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        for customer in customers {
            let (day, customer) = (Arc::clone(self), Arc::clone(customer));
            let (sent, ended) = (Arc::clone(&sent), Arc::clone(&ended));
            payments.spawn(async move {
                sleep(customer.arrives).await;
                let count = |_: &Seen, _: Next| {
                    sent.fetch_add(1, Ordering::Relaxed);
                };
                let payment = day.shop.pay(&customer, count).await?;
                ended.fetch_add(1, Ordering::Relaxed);
                anyhow::Ok((customer, payment))
            });
        }
        let progress = || {
            let requests = sent.load(Ordering::Relaxed);
            format!("{}  {requests} requests", bar(ended.load(Ordering::Relaxed), customers.len()))
        };
        self.passing(all(payments), progress).await
    }

    /// Waits for it, while a passing line tells the time and how far it is.
    async fn passing<T>(&self, ending: impl Future<Output = T>, progress: impl Fn() -> String) -> T {
        let mut ending = std::pin::pin!(ending);
        let mut frames = interval(FRAME);
        loop {
            tokio::select! {
                biased;
                ended = &mut ending => return ended,
                _ = frames.tick() => {
                    self.screen.pass(&format!("{:>7.3}s  {}", self.began.elapsed().as_secs_f64(), progress()));
                }
            }
        }
    }

    /// One payment, shown try by try. `waits` hears of it when the shop waits for long.
    pub(super) async fn tell(&self, customer: &Customer, waits: &Notify) -> anyhow::Result<Payment> {
        let mut known = self.api.done(&customer.order).len();
        let payment = self.shop.pay(customer, |seen, next| {
            let done = self.api.done(&customer.order);
            let since = &done[known.min(done.len())..];
            known = done.len();
            let times = done.iter().filter(|done| done.charge.is_some()).count();
            self.line(&customer.name, &does(since), &format!("{}{}", sees(seen), self.then(next, times)));
            if matches!(next, Next::Again(pause) if pause >= LONG) {
                waits.notify_one();
            }
        });
        payment.await
    }

    /// A line of a story: when, who, what the API does, what the shop sees.
    fn line(&self, who: &str, does: &str, sees: &str) {
        let time = format!("{:>7.3}s", self.began.elapsed().as_secs_f64());
        self.screen.say(&format!("{}  {who:<4}  {does:<26}  {sees}", self.screen.paint(Tone::Faint, &time)));
    }

    fn then(&self, next: Next, times: usize) -> String {
        match next {
            Next::Again(pause) if pause >= LONG => "; waits".to_owned(),
            Next::Again(_) => "; tries again".to_owned(),
            Next::Stop => self.screen.paint(Tone::Open, "; stops"),
            Next::Paid if times == 1 => self.screen.paint(Tone::Good, ": charged once"),
            Next::Paid if times == 2 => self.screen.paint(Tone::Bad, ": CHARGED TWICE"),
            Next::Paid => self.screen.paint(Tone::Bad, &format!(": CHARGED {times} TIMES")),
        }
    }

    /// What stands in the books, as the API itself tells it. Waits for what it still works on.
    pub(super) async fn charges(&self) -> anyhow::Result<Vec<Charge>> {
        self.api.idle().await;
        serde_json::from_slice(&self.books.get(PATH).await?).context("the books of the API cannot be read")
    }

    /// The charges of one order.
    pub(super) async fn charges_of(&self, order: &str) -> anyhow::Result<Vec<Charge>> {
        let found = self.books.get(&format!("{PATH}?order={order}")).await?;
        serde_json::from_slice(&found).context("the books of the API cannot be read")
    }
}

/// What the API did about a try.
fn does(done: &[Done]) -> String {
    let Some(Done { fate, charge }) = done.last() else { return "never hears of it".to_owned() };
    let charge = charge.as_deref().unwrap_or_default();
    match fate {
        Fate::Prompt => format!("charges {charge}"),
        Fate::Slow => format!("charges {charge}, is slow"),
        Fate::ResetAfter => format!("charges {charge}, then resets"),
        Fate::ResetBefore => "resets before it charges".to_owned(),
        Fate::FailedAfter => format!("charges {charge}, answers 500"),
        Fate::Refused => "answers 503 at once".to_owned(),
    }
}

fn sees(seen: &Seen) -> String {
    match seen {
        Seen::Silence => format!("nothing for {} ms", TIMEOUT.as_millis()),
        Seen::Reset => "connection reset".to_owned(),
        Seen::Failed => "connection lost".to_owned(),
        Seen::Answer(Answer { status, charge, code, retry_after, replayed }) => {
            let mut text = status.as_u16().to_string();
            for word in [charge, code].into_iter().flatten() {
                text = format!("{text} {word}");
            }
            if let Some(wait) = retry_after {
                text = format!("{text}, Retry-After {}", wait.as_secs());
            }
            if *replayed { text + " replayed" } else { text }
        }
    }
}

/// How much of it is done: `[#####               ]  30 of 120 paid`.
fn bar(done: usize, of: usize) -> String {
    const WIDTH: usize = 24;
    let filled = WIDTH * done / of.max(1);
    format!("[{:<WIDTH$}]  {done} of {of} customers", "#".repeat(filled))
}

/// Waits for all of them. The first that fails ends the others.
async fn all(mut payments: JoinSet<anyhow::Result<Paid>>) -> anyhow::Result<Vec<Paid>> {
    let mut ended = Vec::with_capacity(payments.len());
    while let Some(payment) = payments.join_next().await {
        ended.push(payment.context("a payment failed")??);
    }
    Ok(ended)
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;

    #[test]
    fn lines_fit_into_80_columns() {
        let fates = Fate::ODDS.map(|(fate, _)| Done { fate, charge: fate.charges().then(|| "ch_999".to_owned()) });
        for done in fates {
            assert!(does(std::slice::from_ref(&done)).len() <= 27, "{done:?}");
        }
        let conflict = Seen::Answer(Answer {
            status: StatusCode::CONFLICT,
            code: Some("in-flight".to_owned()),
            retry_after: Some(Duration::from_secs(5)),
            ..Answer::default()
        });
        assert_eq!(sees(&conflict), "409 in-flight, Retry-After 5");
        let replay = Seen::Answer(Answer {
            status: StatusCode::CREATED,
            charge: Some("ch_7".to_owned()),
            replayed: true,
            ..Answer::default()
        });
        assert_eq!(sees(&replay), "201 ch_7 replayed");
        // Eight of time, four of a name, two between columns.
        assert!(8 + 2 + 4 + 2 + 26 + 2 + sees(&replay).len() + ": CHARGED TWICE".len() <= 80);
        assert!(bar(1000, 1000).len() + 30 <= 80);
    }

    #[test]
    fn a_bar_fills() {
        assert_eq!(bar(0, 4), "[                        ]  0 of 4 customers");
        assert_eq!(bar(1, 4), "[######                  ]  1 of 4 customers");
        assert_eq!(bar(4, 4), "[########################]  4 of 4 customers");
        assert_eq!(bar(0, 0), "[                        ]  0 of 0 customers");
    }
}
