//! Trailers, both ways: which of them go on depends on what is spoken on the other side, and on what is held whole.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::stream;
use http::HeaderMap;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;

use super::PROTOCOL;
use crate::support::http2::{Http2, post};
use crate::support::{Gate, Reply, Request, Service, Upstream};

/// A body with trailers: one that counts, and one that nobody may say at the end.
fn trailed() -> BoxBody<Bytes, Infallible> {
    let trailers = [("x-sum", "6"), ("authorization", "mine")].map(|(n, v)| (n.parse().unwrap(), v.parse().unwrap()));
    let frames = [Frame::data(Bytes::from("all")), Frame::trailers(HeaderMap::from_iter(trailers))];
    BodyExt::boxed(StreamBody::new(stream::iter(frames.map(Ok))))
}

#[test]
fn trailers_of_a_request_by_http_2() {
    let (http1, h2) = (Upstream::start(|_| Reply::ok("paid")), Service::start(|_| (200, vec![], "paid", vec![])));
    let (to_http1, to_h2) = (Gate::before(&http1).start(), Gate::before_url(&h2.url()).upstream(PROTOCOL).start());
    for (key, is_announced) in [("", true), ("", false), ("k", true), ("l", false)] {
        let sent = |gate: &Gate| {
            let mut request = post("/pay");
            for (name, value, is_there) in
                [("trailer", "x-sum", is_announced), ("idempotency-key", key, !key.is_empty())]
            {
                request = if is_there { request.header(name, value) } else { request };
            }
            let answer = Http2::connect(gate).try_send(request.body(trailed()).unwrap()).unwrap();
            assert_eq!((answer.status, &*answer.body), (200, &b"paid"[..]), "{answer:?}");
        };
        let told = format!("{key:?}, announced: {is_announced}");
        sent(&to_h2);
        let asked = h2.asked().pop().unwrap();
        assert_eq!(asked.body, "all", "{told}");
        assert_eq!(
            asked.trailers,
            Some(HeaderMap::from_iter([("x-sum".parse().unwrap(), "6".parse().unwrap())])),
            "{told}"
        );
        sent(&to_http1);
        let seen = http1.last().body;
        assert!(seen.complete && seen.bytes == b"all", "{told}");
        let goes_on = is_announced || !key.is_empty();
        let expected = if goes_on { vec![(b"x-sum".to_vec(), b"6".to_vec())] } else { Vec::new() };
        assert_eq!(seen.trailers, expected, "{told}");
    }
}

#[test]
fn trailers_of_an_answer_by_http_2() {
    let service = Service::start(|asked| {
        let announced = vec![("trailer", "x-sum")];
        let headers = if asked.target.ends_with("/announced") { announced } else { vec![] };
        (200, headers, "paid", vec![("x-sum", "6"), ("set-cookie", "a=1")])
    });
    let gate = Gate::before_url(&service.url()).upstream(PROTOCOL).start();
    for (path, is_announced) in [("/announced", true), ("/bare", false)] {
        // What passes through, a first answer, and its replay.
        for (word, is_held) in [("", false), ("executed", true), ("replayed", true)] {
            let told = format!("{path} {word}");
            for takes_trailers in [false, true] {
                let key = format!("h1{path}{takes_trailers}");
                let request = Request::post(path).body("{}");
                let request = if is_held { request.key(&key) } else { request };
                let request = if takes_trailers { request.header("TE", "trailers") } else { request };
                let answer = request.send(&gate);
                answer.expect(200, word);
                assert_eq!(answer.text(), "paid", "{told}");
                let goes_on = takes_trailers && (is_announced || is_held);
                let expected = if goes_on { vec![(b"x-sum".to_vec(), b"6".to_vec())] } else { Vec::new() };
                assert_eq!(answer.body.trailers, expected, "{told}, {takes_trailers}");
            }
            // By HTTP/2 nobody has to ask.
            let request = if is_held { post(path).header("idempotency-key", format!("h2{path}")) } else { post(path) };
            let answer = Http2::connect(&gate).send(request.body("{}").unwrap());
            answer.expect(200, word);
            let trailers = answer.trailers.unwrap();
            assert_eq!((trailers.len(), &trailers["x-sum"]), (1, &"6".parse().unwrap()), "{told}");
        }
    }
}
