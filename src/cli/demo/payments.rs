//! The payment API: it charges at every POST that it gets, and fails as payment APIs do.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::customer::{Customer, Fate};

/// Where it is paid.
pub(super) const PATH: &str = "/v1/charges";

/// How long a prompt answer takes.
const PROMPT: Duration = Duration::from_millis(40);

/// How long a slow one takes: more than twice as long as the shop waits.
pub(super) const SLOW: Duration = Duration::from_millis(1200);

/// Largest request, in bytes.
const MAX_REQUEST: usize = 64 * 1024;

/// The API and its books.
pub(super) struct Payments {
    pub(super) address: SocketAddr,
    fates: HashMap<String, Vec<Fate>>,
    books: Mutex<Books>,
    /// Each request that is worked on holds a receiver.
    working: watch::Sender<()>,
}

/// A line in the books: money that was taken.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct Charge {
    pub(super) id: String,
    pub(super) order: String,
    /// In cents.
    pub(super) amount: u64,
}

/// What the API did about one request.
#[derive(Clone, Debug)]
pub(super) struct Done {
    pub(super) fate: Fate,
    /// The id of the charge, where there was one.
    pub(super) charge: Option<String>,
}

#[derive(Default)]
struct Books {
    charges: Vec<Charge>,
    requests: HashMap<String, Vec<Done>>,
}

/// What the API is asked for.
#[derive(Deserialize)]
struct Order {
    order: String,
    amount: u64,
}

/// Instead of an answer: the connection is to be reset.
#[derive(Debug, thiserror::Error)]
#[error("reset on purpose")]
struct Reset;

impl Payments {
    /// Opens the API on a free port of the loopback address, with empty books. What it does about each customer's
    /// requests is the customer's fate.
    pub(super) async fn open(customers: &[Arc<Customer>]) -> anyhow::Result<Arc<Self>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("the payment API cannot listen")?;
        let fates = customers.iter().map(|customer| (customer.order.clone(), customer.fates.to_vec()));
        let api = Arc::new(Self {
            address: listener.local_addr()?,
            fates: fates.collect(),
            books: Mutex::default(),
            working: watch::Sender::new(()),
        });
        tokio::spawn(accept(listener, Arc::clone(&api)));
        Ok(api)
    }

    /// What it did about the requests for an order so far.
    pub(super) fn done(&self, order: &str) -> Vec<Done> {
        self.books().requests.get(order).cloned().unwrap_or_default()
    }

    /// How many requests for payments it got.
    pub(super) fn requests(&self) -> usize {
        self.books().requests.values().map(Vec::len).sum()
    }

    /// Waits until it works on nothing: a request whose client has left counts too.
    pub(super) async fn idle(&self) {
        self.working.closed().await;
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        // Nothing that is done under this lock can leave it half done.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Reset> {
        let (head, body) = request.into_parts();
        match (&head.method, head.uri.path()) {
            (&Method::POST, PATH) => {
                let Ok(body) = Limited::new(body, MAX_REQUEST).collect().await else { return Err(Reset) };
                let Ok(order) = serde_json::from_slice(&body.to_bytes()) else {
                    return Ok(json(StatusCode::BAD_REQUEST, &"not an order"));
                };
                // Whoever asked may go away: the work goes on.
                let working = self.working.subscribe();
                let work = tokio::spawn(async move {
                    let answer = self.charge(order).await;
                    drop(working);
                    answer
                });
                work.await.unwrap_or(Err(Reset))
            }
            (&Method::GET, PATH) => {
                let order = head.uri.query().and_then(|query| query.strip_prefix("order="));
                let charges = self.books().charges.clone();
                let found = charges.into_iter().filter(|charge| order.is_none_or(|order| order == charge.order));
                Ok(json(StatusCode::OK, &found.collect::<Vec<_>>()))
            }
            _ => Ok(json(StatusCode::NOT_FOUND, &"nothing here")),
        }
    }

    async fn charge(&self, Order { order, amount }: Order) -> Result<Response<Full<Bytes>>, Reset> {
        let (fate, charge) = self.book(order, amount);
        tokio::time::sleep(if fate == Fate::Slow { SLOW } else { PROMPT }).await;
        match fate {
            Fate::Prompt | Fate::Slow => Ok(json(StatusCode::CREATED, &charge)),
            Fate::ResetAfter | Fate::ResetBefore => Err(Reset),
            Fate::FailedAfter => Ok(json(StatusCode::INTERNAL_SERVER_ERROR, &"something went wrong")),
            Fate::Refused => Ok(json(StatusCode::SERVICE_UNAVAILABLE, &"come back later")),
        }
    }

    /// Takes the money, where that is what this request meets with.
    fn book(&self, order: String, amount: u64) -> (Fate, Option<Charge>) {
        let mut books = self.books();
        let nth = books.requests.get(&order).map_or(0, Vec::len);
        let fate = self.fates.get(&order).and_then(|fates| fates.get(nth)).copied().unwrap_or(Fate::Prompt);
        let id = format!("ch_{}", books.charges.len() + 1);
        let charge = fate.charges().then(|| Charge { id, order: order.clone(), amount });
        books.charges.extend(charge.clone());
        let done = Done { fate, charge: charge.as_ref().map(|charge| charge.id.clone()) };
        books.requests.entry(order).or_default().push(done);
        (fate, charge)
    }
}

/// The body of a request to pay.
pub(super) fn order(customer: &Customer) -> Bytes {
    serde_json::json!({ "order": customer.order, "amount": customer.cents }).to_string().into()
}

/// What the API answers when it has charged.
pub(super) fn receipt(charge: &Charge) -> Bytes {
    written(charge)
}

async fn accept(listener: TcpListener, api: Arc<Payments>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(connection(stream, Arc::clone(&api)))),
            // Mostly for want of file descriptors, of which some come free.
            Err(_) => tokio::time::sleep(PROMPT).await,
        }
    }
}

async fn connection(stream: TcpStream, api: Arc<Payments>) {
    let mut connection = http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service_fn(|request| Arc::clone(&api).answer(request)));
    if (&mut connection).await.is_err() {
        // Closed with this option set, it says RST and not FIN. A connection that the client closed does not mind.
        let _ = connection.into_parts().io.into_inner().set_zero_linger();
    }
}

fn json(status: StatusCode, value: &impl Serialize) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(written(value)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}

fn written(value: &impl Serialize) -> Bytes {
    // Strings and numbers can always be written.
    serde_json::to_vec(value).unwrap_or_default().into()
}
