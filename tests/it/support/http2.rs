//! A client of HTTP/2, over whatever carries it.

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt as _, Full, combinators::BoxBody};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::{Handle, Runtime};

use super::wait::PATIENCE;

/// A connection of HTTP/2 to the gate.
pub struct Http2 {
    runtime: Runtime,
    requests: SendRequest<BoxBody<Bytes, std::convert::Infallible>>,
}

/// An answer, whole.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub trailers: Option<HeaderMap>,
}

impl Http2 {
    /// By prior knowledge.
    #[track_caller]
    pub fn connect(address: impl Into<std::net::SocketAddr>) -> Self {
        let address = address.into();
        Self::over(async move {
            let stream = tokio::net::TcpStream::connect(address).await.expect("the gate listens");
            // A head and a body are two writes.
            stream.set_nodelay(true).expect("a socket");
            stream
        })
    }

    /// By prior knowledge; the gate may send so many bytes of an answer before they are read.
    #[track_caller]
    pub fn with_window(address: impl Into<std::net::SocketAddr>, window: u32) -> Self {
        let address = address.into();
        let open = async move { tokio::net::TcpStream::connect(address).await.expect("the gate listens") };
        Self::built(open, Builder::new(TokioExecutor::new()).initial_stream_window_size(window))
    }

    /// Over a stream that is opened so.
    #[track_caller]
    pub fn over<S>(open: impl Future<Output = S>) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        Self::built(open, &Builder::new(TokioExecutor::new()))
    }

    #[track_caller]
    fn built<S>(open: impl Future<Output = S>, builder: &Builder<TokioExecutor>) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let requests = runtime.block_on(async {
            let (requests, connection) = builder.handshake(TokioIo::new(open.await)).await.expect("a handshake");
            tokio::spawn(connection);
            requests
        });
        Self { runtime, requests }
    }

    /// Sends a request and waits for its answer.
    #[track_caller]
    pub fn send(&mut self, request: Request<impl Into<Bytes>>) -> Answer {
        self.try_send(request.map(|body| Full::new(body.into()).boxed())).expect("the gate answers")
    }

    /// The same, with any body; or why there is no whole answer.
    pub fn try_send(
        &mut self,
        request: Request<BoxBody<Bytes, std::convert::Infallible>>,
    ) -> Result<Answer, hyper::Error> {
        let exchange = async {
            let (head, body) = self.requests.send_request(request).await?.into_parts();
            let body = body.collect().await?;
            let trailers = body.trailers().cloned();
            Ok(Answer { status: head.status.as_u16(), headers: head.headers, body: body.to_bytes(), trailers })
        };
        self.runtime.block_on(async { tokio::time::timeout(PATIENCE, exchange).await.expect("an answer in time") })
    }

    /// Sends a request and waits for the head of its answer.
    #[track_caller]
    pub fn begin(&mut self, request: Request<impl Into<Bytes>>) -> Begun {
        let sending = self.requests.send_request(request.map(|body| Full::new(body.into()).boxed()));
        let answer = async { tokio::time::timeout(PATIENCE, sending).await.expect("a head in time") };
        let (head, body) = self.runtime.block_on(answer).expect("the gate answers").into_parts();
        let answer = Answer { status: head.status.as_u16(), headers: head.headers, body: Bytes::new(), trailers: None };
        Begun { runtime: self.runtime.handle().clone(), answer, body }
    }

    /// POST with a key.
    #[track_caller]
    pub fn post(&mut self, path: &str, key: &str, body: &str) -> Answer {
        self.send(post(path).header("idempotency-key", key).body(body.to_owned()).unwrap())
    }
}

/// An answer of which the head has come. Dropped, it is given up, and so it is when its connection is.
pub struct Begun {
    runtime: Handle,
    /// What has come of it.
    pub answer: Answer,
    body: Incoming,
}

impl Begun {
    /// Reads on until so many bytes of the body have come.
    #[track_caller]
    pub fn until(&mut self, length: usize) -> &Answer {
        while self.answer.body.len() < length {
            assert!(self.next().expect("it goes on"), "it ends after {} bytes", self.answer.body.len());
        }
        &self.answer
    }

    /// Reads to the end; or says why there is none.
    pub fn whole(mut self) -> Result<Answer, hyper::Error> {
        while self.next()? {}
        Ok(self.answer)
    }

    /// Reads what comes next, if anything does.
    fn next(&mut self) -> Result<bool, hyper::Error> {
        let coming = async { tokio::time::timeout(PATIENCE, self.body.frame()).await.expect("more of it in time") };
        let Some(frame) = self.runtime.block_on(coming) else { return Ok(false) };
        match frame?.into_data() {
            Ok(data) => self.answer.body = [&self.answer.body[..], &data].concat().into(),
            Err(frame) => self.answer.trailers = frame.into_trailers().ok(),
        }
        Ok(true)
    }
}

/// A POST to the host that [`super::Request`] names.
pub fn post(path: &str) -> http::request::Builder {
    Request::post(format!("http://gate.test{path}"))
}

impl Answer {
    /// A header's value; empty where it is absent.
    pub fn get(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// Holds that this is the answer of this status under this word.
    #[track_caller]
    pub fn expect(&self, status: u16, word: &str) -> &Self {
        assert_eq!((self.status, self.get("idempotency-status")), (status, word), "{self:?}");
        self
    }
}
