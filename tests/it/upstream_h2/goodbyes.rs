//! What an upstream of HTTP/2 says of requests that it has not processed, at whatever moment, and answers that come early.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{ENHANCE_YOUR_CALM, NO_ERROR, REFUSED_STREAM, before, complete, provably_unsent, unknown};
use crate::support::frames::WINDOW_UPDATE;
use crate::support::h2::{DATA, END_HEADERS, END_STREAM, Frame, HEADERS, OK};
use crate::support::{H2, Request, eventually};

/// The last stream that a goodbye names which is yet to say what it leaves out (RFC 9113, 6.8).
const ANY: u32 = u32::MAX >> 1;

#[test]
fn a_goodbye_in_two_steps_counts_by_its_second() {
    provably_unsent(|conn, _| {
        conn.go_away(ANY, NO_ERROR);
        conn.go_away(0, NO_ERROR);
    });
    complete(|conn, stream| {
        conn.go_away(ANY, NO_ERROR);
        conn.go_away(stream, NO_ERROR);
        conn.answer(stream, b"paid");
    });
    complete(|conn, stream| {
        conn.go_away(ANY, NO_ERROR);
        conn.answer(stream, b"paid");
        conn.go_away(0, NO_ERROR);
    });
    // It ends without the second, or before the answer that the second left room for.
    for names_it in [false, true] {
        unknown(move |conn, stream| {
            conn.go_away(ANY, NO_ERROR);
            if names_it {
                conn.go_away(stream, NO_ERROR);
            }
            conn.stream.shutdown(std::net::Shutdown::Both).unwrap();
        });
    }
}

#[test]
fn of_two_requests_a_goodbye_leaves_out_the_one_above_its_last() {
    let upstream = H2::start(&[], |mut conn| {
        conn.is_heard();
        if let (Some(one), Some(other)) = (conn.request(), conn.request()) {
            let (first, second) = (one.min(other), one.max(other));
            conn.go_away(ANY, NO_ERROR);
            conn.go_away(first, NO_ERROR);
            assert!(second > first);
            conn.answer(first, b"paid");
            conn.rest();
        }
    });
    let gate = before(&upstream).upstream("protocol = \"h2\", max_connections = 1, connect_timeout = \"20s\"").start();
    let address = gate.address;
    let threads = ["a", "b"]
        .map(|key| std::thread::spawn(move || (key, Request::post("/charges").key(key).body("{}").send(address))));
    let mut told: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    told.sort_by_key(|(_, answer)| answer.status);
    let [(answered, paid), (left_out, unsent)] = &told[..] else { panic!("two") };
    assert_eq!((paid.status, paid.text()), (200, "paid".to_owned()), "{}", paid.show());
    assert_eq!((unsent.status, &*unsent.word()), (502, "upstream-unreachable"), "{}", unsent.show());
    assert_eq!((gate.states(answered), gate.states(left_out)), (vec!["completed".to_owned()], vec![]));
    assert_eq!(upstream.connections(), 1);
}

/// `:status: 103`
const EARLY_HINTS: &[u8] = b"\x08\x03103";

#[test]
fn what_was_answered_if_only_for_the_interim_was_processed() {
    unknown(|conn, stream| {
        conn.send(HEADERS, END_HEADERS, stream, EARLY_HINTS);
        conn.reset(stream, REFUSED_STREAM);
    });
    for code in [NO_ERROR, ENHANCE_YOUR_CALM] {
        unknown(move |conn, stream| {
            conn.send(HEADERS, END_HEADERS, stream, EARLY_HINTS);
            conn.go_away(0, code);
        });
        unknown(move |conn, stream| {
            conn.go_away(0, code);
            conn.send(HEADERS, END_HEADERS, stream, EARLY_HINTS);
            conn.stream.shutdown(std::net::Shutdown::Both).unwrap();
        });
    }
}

#[test]
fn a_complete_answer_beats_a_goodbye_before_it() {
    for code in [NO_ERROR, ENHANCE_YOUR_CALM] {
        complete(move |conn, stream| {
            conn.go_away(0, code);
            conn.answer(stream, b"paid");
        });
        complete(move |conn, stream| {
            conn.go_away(0, code);
            conn.answer(stream, b"paid");
            conn.stream.shutdown(std::net::Shutdown::Both).unwrap();
        });
    }
}

#[test]
fn an_answer_is_waited_for_through_a_hundred_interim_ones_and_no_more() {
    complete(|conn, stream| {
        for _ in 0..100 {
            conn.send(HEADERS, END_HEADERS, stream, EARLY_HINTS);
        }
        conn.answer(stream, b"paid");
    });
    unknown(|conn, stream| {
        for _ in 0..101 {
            conn.send(HEADERS, END_HEADERS, stream, EARLY_HINTS);
        }
        conn.answer(stream, b"paid");
    });
    unknown(|conn, stream| {
        for _ in 0..101 {
            conn.send(HEADERS, END_HEADERS, stream, EARLY_HINTS);
        }
        conn.send(HEADERS, END_HEADERS | END_STREAM, stream, OK);
    });
}

/// The others on the connection are answered.
#[test]
fn a_stream_of_interim_answers_ends_alone() {
    let upstream = H2::start(&[], |mut conn| {
        conn.is_heard();
        if let (Some(one), Some(other)) = (conn.request(), conn.request()) {
            for _ in 0..300 {
                conn.send(HEADERS, END_HEADERS, one, EARLY_HINTS);
            }
            conn.answer(one, b"late");
            conn.answer(other, b"paid");
            conn.rest();
        }
    });
    let gate = before(&upstream).upstream("protocol = \"h2\", max_connections = 1, connect_timeout = \"20s\"").start();
    let address = gate.address;
    let threads =
        ["a", "b"].map(|key| std::thread::spawn(move || Request::post("/charges").key(key).body("{}").send(address)));
    let mut words = threads.map(|thread| thread.join().unwrap()).map(|answer| answer.word());
    words.sort();
    assert_eq!(words, ["executed", "upstream-broken"]);
    assert_eq!(upstream.connections(), 1);
}

#[test]
fn a_refusal_is_one_after_a_part_of_the_request_too() {
    // Without a key, its body may be gone: it is not tried again by itself either.
    for (says_goodbye, key) in [(false, "k"), (false, ""), (true, "k"), (true, "")] {
        let upstream = H2::start(&[], move |mut conn| {
            let Some(part) = conn.until(|frame| frame.kind == DATA) else { return };
            assert!(!part.ends());
            match says_goodbye {
                true => conn.go_away(0, NO_ERROR),
                false => conn.reset(part.stream, REFUSED_STREAM),
            }
            conn.rest();
        });
        let gate = before(&upstream).start();
        let request = Request::post("/charges").body(vec![b'x'; 4 << 20]);
        let answer = if key.is_empty() { request.send(&gate) } else { request.key(key).send(&gate) };
        answer.expect_bare_problem(502, "upstream-unreachable");
        assert_eq!((upstream.connections(), gate.states("k")), (1, vec![]));
    }
}

#[test]
fn an_upstream_that_answers_early_still_gets_all_of_the_request() {
    const SIZE: usize = 12 << 20;
    let whole = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&whole);
    let upstream = H2::start(&[], move |mut conn| {
        while let Some(head) = conn.until(|frame| frame.kind == HEADERS) {
            conn.answer(head.stream, b"ok");
            let (mut came, stream) = (0, head.stream);
            while came < SIZE {
                let Some(Frame { payload, .. }) = conn.until(|frame| frame.kind == DATA) else { return };
                came += payload.len();
                for stream in [0, stream] {
                    let more = u32::try_from(payload.len()).unwrap();
                    // An empty frame ends the request.
                    if more > 0 {
                        conn.send(WINDOW_UPDATE, 0, stream, &more.to_be_bytes());
                    }
                }
            }
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    let gate = before(&upstream).start();
    let request = Request::post("/charges").body(vec![b'x'; SIZE]);
    request.clone().key("k-1").send(&gate).expect(200, "executed");
    eventually("the whole request", || (whole.load(Ordering::SeqCst) == 1).then_some(()));
    request.send(&gate).expect(200, "");
    eventually("the whole request without a key", || (whole.load(Ordering::SeqCst) == 2).then_some(()));
    gate.post("/charges", "k-1", "{}").expect_problem(422, "key-reused");
}

/// The upstream has said all that it has to say before it had the whole request.
#[test]
fn an_answer_that_is_whole_counts_where_the_connection_ends_before_the_request_does() {
    let upstream = H2::start(&[], |mut conn| {
        if let Some(frame) = conn.until(|frame| frame.kind == HEADERS) {
            conn.answer(frame.stream, b"refused");
        }
    });
    let gate = before(&upstream).start();
    let answer = Request::post("/charges").key("k").body(vec![b'x'; 1 << 20]).send(&gate);
    assert_eq!((answer.status, answer.text()), (200, "refused".to_owned()), "{}", answer.show());
    assert_eq!(gate.states("k"), ["completed"]);
}
