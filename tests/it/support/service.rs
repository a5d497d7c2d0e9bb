//! An upstream that speaks HTTP/2 as services do, and remembers what it was asked.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct Asked {
    pub method: String,
    /// `:scheme`, `:authority` and `:path`, put together.
    pub target: String,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub trailers: Option<HeaderMap>,
}

/// What a handler answers: a status, headers, a body and trailers.
pub type Answer<B> = (u16, Vec<(&'static str, &'static str)>, B, Vec<(&'static str, &'static str)>);

/// A service. Ends when dropped.
pub struct Service {
    pub address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
    _runtime: Runtime,
}

impl Service {
    pub fn start<B: Into<Bytes> + 'static>(handler: impl Fn(&Asked) -> Answer<B> + Send + Sync + 'static) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a free port");
        let address = listener.local_addr().expect("an address");
        let (asked, handler) = (Arc::default(), Arc::new(in_bytes(handler)));
        let seen = Arc::clone(&asked);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (seen, handler) = (Arc::clone(&seen), Arc::clone(&handler));
                let service = service_fn(move |request| {
                    let (seen, handler) = (Arc::clone(&seen), Arc::clone(&handler));
                    async move { Ok::<_, Infallible>(answer(request, &seen, &*handler).await) }
                });
                let serving = http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service);
                tokio::spawn(serving);
            }
        });
        Self { address, asked, _runtime: runtime }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All requests, in the order in which they came.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn in_bytes<B: Into<Bytes>>(handler: impl Fn(&Asked) -> Answer<B>) -> impl Fn(&Asked) -> Answer<Bytes> {
    move |asked| {
        let (status, headers, body, trailers) = handler(asked);
        (status, headers, body.into(), trailers)
    }
}

type Body = http_body_util::combinators::BoxBody<Bytes, Infallible>;

async fn answer(
    request: Request<Incoming>,
    seen: &Mutex<Vec<Asked>>,
    handler: &(dyn Fn(&Asked) -> Answer<Bytes> + Send + Sync),
) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let Ok(body) = body.collect().await else { return Response::new(Full::default().boxed()) };
    let trailers = body.trailers().cloned();
    let body = body.to_bytes();
    let asked = Asked {
        method: parts.method.to_string(),
        target: parts.uri.to_string(),
        headers: parts.headers,
        body,
        trailers,
    };
    seen.lock().unwrap().push(asked.clone());
    let (status, headers, body, trailers) = handler(&asked);
    let trailers: HeaderMap =
        trailers.into_iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
    let body = match trailers.is_empty() {
        true => Full::new(body).boxed(),
        // Of no length that is known: with one there is no room for trailers in HTTP/1.1.
        false => BodyExt::boxed(StreamBody::new(stream::iter([Frame::data(body), Frame::trailers(trailers)].map(Ok)))),
    };
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    for (name, value) in headers {
        response.headers_mut().append(name, value.parse().unwrap());
    }
    response
}
