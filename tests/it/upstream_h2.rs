//! HTTP/2 to upstreams: what each way to fail proves, and what makes an answer complete.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::frames::{CONTINUATION, block, frame};
use crate::support::h2::{Conn, DATA, END_HEADERS, END_STREAM, HEADERS, OK, RST_STREAM};
use crate::support::http2::{Http2, post};
use crate::support::{Gate, H2, Plan, Request, Response, eventually};

mod goodbyes;
mod messages;
mod sharing;
mod trailers;
mod waiting;

const PROTOCOL: &str = "protocol = \"h2\"";

const NO_ERROR: u32 = 0;
const INTERNAL_ERROR: u32 = 2;
const REFUSED_STREAM: u32 = 7;
const CANCEL: u32 = 8;
const ENHANCE_YOUR_CALM: u32 = 11;

fn before(upstream: &H2) -> Plan {
    Gate::before_url(&upstream.url()).upstream(PROTOCOL)
}

/// What a gate makes of an upstream that does this about its first request.
fn first(script: impl Fn(&mut Conn, u32) + Send + Sync + 'static) -> (Gate, H2, Response) {
    let upstream = H2::start(&[], move |mut conn| {
        if let Some(stream) = conn.request() {
            script(&mut conn, stream);
            conn.rest();
        }
    });
    let gate = before(&upstream).start();
    let answer = gate.post("/charges", "k", "{\"amount\": 1}");
    (gate, upstream, answer)
}

#[track_caller]
fn provably_unsent(script: impl Fn(&mut Conn, u32) + Send + Sync + 'static) {
    let (gate, upstream, answer) = first(script);
    assert_eq!((answer.status, &*answer.word()), (502, "upstream-unreachable"), "{}", answer.show());
    assert_eq!(gate.states("k"), [] as [&str; 0]);
    assert_eq!(upstream.connections(), 1, "nothing is tried again by itself");
}

#[track_caller]
fn unknown(script: impl Fn(&mut Conn, u32) + Send + Sync + 'static) {
    let (gate, upstream, answer) = first(script);
    assert_eq!((answer.status, &*answer.word()), (502, "upstream-broken"), "{}", answer.show());
    assert_eq!(gate.states("k"), ["unknown"]);
    assert_eq!(upstream.connections(), 1, "nothing is tried again by itself");
}

#[track_caller]
fn complete(script: impl Fn(&mut Conn, u32) + Send + Sync + 'static) {
    let (gate, _upstream, answer) = first(script);
    assert_eq!((answer.status, answer.text()), (200, "paid".to_owned()), "{}", answer.show());
    assert_eq!(gate.states("k"), ["completed"]);
}

/// Questions that no client waits for as well.
#[test]
fn an_upstream_that_speaks_nothing_else_is_asked_about_unknown_outcomes_by_http_2() {
    let posted = AtomicUsize::new(0);
    let upstream = H2::start(&[], move |mut conn| {
        while let Some(stream) = conn.request() {
            match posted.fetch_add(1, Ordering::SeqCst) {
                0 => conn.reset(stream, INTERNAL_ERROR),
                _ => conn.answer(stream, b"paid"),
            }
        }
    });
    let recovery = "recovery = { probe = \"/by-key/{key}\", after = \"0s\", every = \"1s\" }\n";
    let gate = before(&upstream).defaults(recovery).start();
    gate.post("/charges", "k", "{}").expect_problem(502, "upstream-broken");
    eventually("it is found out", || (gate.states("k") == ["completed"]).then_some(()));
}

#[test]
fn what_the_upstream_says_it_did_not_process_was_not_sent() {
    provably_unsent(|conn, stream| conn.reset(stream, REFUSED_STREAM));
    provably_unsent(|conn, _| conn.go_away(0, NO_ERROR));
    provably_unsent(|conn, _| conn.go_away(0, ENHANCE_YOUR_CALM));
}

#[test]
fn an_unprotected_request_without_a_body_goes_on_to_another_connection() {
    for refuses_always in [false, true] {
        let (nth, seen) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let counted = Arc::clone(&seen);
        let upstream = H2::start(&[], move |mut conn| {
            let is_first = nth.fetch_add(1, Ordering::SeqCst) == 0;
            while let Some(stream) = conn.request() {
                counted.fetch_add(1, Ordering::SeqCst);
                match is_first || refuses_always {
                    true => conn.go_away(0, NO_ERROR),
                    false => conn.answer(stream, b"paid"),
                }
            }
        });
        let gate = before(&upstream).start();
        let answer = Request::get("/x").send(&gate);
        let (status, times) = if refuses_always { (502, 4) } else { (200, 2) };
        assert_eq!((answer.status, seen.load(Ordering::SeqCst)), (status, times), "{}", answer.show());
    }
}

#[test]
fn other_resets_leave_the_outcome_unknown() {
    for code in [NO_ERROR, 1, INTERNAL_ERROR, CANCEL, ENHANCE_YOUR_CALM, 13] {
        unknown(move |conn, stream| conn.reset(stream, code));
    }
}

#[test]
fn a_goodbye_that_names_the_request_leaves_it_to_its_answer() {
    for code in [NO_ERROR, INTERNAL_ERROR] {
        unknown(move |conn, stream| {
            conn.go_away(stream, code);
            conn.stream.shutdown(std::net::Shutdown::Both).unwrap();
        });
    }
    complete(|conn, stream| {
        conn.go_away(stream, NO_ERROR);
        conn.answer(stream, b"paid");
    });
    complete(|conn, stream| {
        conn.go_away(u32::MAX >> 1, NO_ERROR);
        conn.answer(stream, b"paid");
    });
}

#[test]
fn an_answer_that_is_cut_off_is_none_whatever_is_said_of_it() {
    // A goodbye that does not name the request, once its answer has begun.
    for code in [NO_ERROR, ENHANCE_YOUR_CALM] {
        unknown(move |conn, stream| {
            conn.send(HEADERS, END_HEADERS, stream, OK);
            conn.send(DATA, 0, stream, b"pa");
            conn.go_away(0, code);
        });
    }
    // An end that comes before so many bytes as were announced, and a reset with it.
    for code in [NO_ERROR, INTERNAL_ERROR, CANCEL] {
        unknown(move |conn, stream| {
            use std::io::Write as _;
            let mut all = frame(HEADERS, END_HEADERS, stream, &content_length("100"));
            all.extend(frame(DATA, END_STREAM, stream, b"paid"));
            all.extend(frame(RST_STREAM, 0, stream, &code.to_be_bytes()));
            // In one piece.
            let _ = conn.stream.write_all(&all);
        });
    }
}

#[test]
fn a_connection_that_drops_after_the_request_leaves_its_outcome_unknown() {
    unknown(|conn, _| conn.stream.shutdown(std::net::Shutdown::Both).unwrap());
    unknown(|conn, stream| {
        conn.send(HEADERS, END_HEADERS, stream, OK);
        conn.send(DATA, 0, stream, b"pa");
        conn.stream.shutdown(std::net::Shutdown::Both).unwrap();
    });
}

#[test]
fn a_connection_that_is_none_was_not_sent_anything() {
    // Closed before a word, closed before its own greeting, and no HTTP/2 at all.
    let scripts: [fn(Conn); 3] = [
        |conn| drop(conn),
        |mut conn| {
            use std::io::Read as _;
            conn.stream.read_exact(&mut [0; 24]).unwrap();
        },
        |mut conn| {
            use std::io::Write as _;
            conn.stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").unwrap();
            conn.rest();
        },
    ];
    for script in scripts {
        let upstream = H2::raw(script);
        let gate = before(&upstream).start();
        let answer = gate.post("/charges", "k", "{}");
        assert_eq!(answer.word(), "upstream-unreachable", "{}", answer.show());
        assert_eq!(gate.states("k"), [] as [&str; 0]);
    }
}

#[test]
fn an_upstream_that_does_not_greet_is_not_waited_for() {
    let upstream = H2::raw(|mut conn| conn.rest());
    let gate = before(&upstream).upstream("protocol = \"h2\", connect_timeout = \"300ms\"").start();
    assert_eq!(gate.post("/charges", "k", "{}").word(), "upstream-unreachable");
}

#[test]
fn a_complete_answer_beats_a_reset() {
    for code in [NO_ERROR, INTERNAL_ERROR, CANCEL, REFUSED_STREAM] {
        complete(move |conn, stream| {
            conn.answer(stream, b"paid");
            conn.reset(stream, code);
        });
    }
}

#[test]
fn a_reset_never_makes_an_answer_complete() {
    for code in [NO_ERROR, INTERNAL_ERROR, CANCEL, REFUSED_STREAM] {
        unknown(move |conn, stream| {
            conn.send(HEADERS, END_HEADERS, stream, OK);
            conn.send(DATA, 0, stream, b"pa");
            conn.reset(stream, code);
        });
    }
}

/// `content-length: N`, not indexed.
fn content_length(length: &str) -> Vec<u8> {
    [&[0x88, 0x0f, 0x0d, u8::try_from(length.len()).unwrap()], length.as_bytes()].concat()
}

#[test]
fn a_body_of_another_length_than_was_said_is_broken() {
    for length in ["3", "5"] {
        unknown(move |conn, stream| {
            conn.send(HEADERS, END_HEADERS, stream, &content_length(length));
            conn.send(DATA, END_STREAM, stream, b"paid");
        });
    }
    complete(|conn, stream| {
        conn.send(HEADERS, END_HEADERS, stream, &content_length("4"));
        conn.send(DATA, END_STREAM, stream, b"paid");
    });
}

#[test]
fn interim_answers_are_none() {
    complete(|conn, stream| {
        // `:status: 103`
        conn.send(HEADERS, END_HEADERS, stream, b"\x08\x03103");
        conn.answer(stream, b"paid");
    });
}

#[test]
fn a_head_that_is_malformed_or_too_large_is_broken() {
    // No status; and a header of connections.
    unknown(|conn, stream| conn.send(HEADERS, END_HEADERS | END_STREAM, stream, b"\x00\x01a\x01b"));
    unknown(|conn, stream| conn.send(HEADERS, END_HEADERS | END_STREAM, stream, b"\x88\x00\x0aconnection\x05close"));
    unknown(|conn, stream| {
        let lines = b"\x00\x01a\x01b".repeat(300);
        conn.send(HEADERS, END_HEADERS | END_STREAM, stream, &[OK, &lines].concat());
    });
    unknown(|conn, stream| conn.send(HEADERS, END_HEADERS | END_STREAM, stream, b"\x88\x00\x01a\x03b\nc"));
    unknown(|conn, stream| {
        let large = [OK, &block(&[("a", &[b'a'; 300_000])])].concat();
        let (first, rest) = large.split_at(16_384);
        conn.send(HEADERS, END_STREAM, stream, first);
        for (nth, part) in rest.chunks(16_384).enumerate() {
            let is_last = nth == rest.len() / 16_384;
            conn.send(CONTINUATION, if is_last { END_HEADERS } else { 0 }, stream, part);
        }
    });
}

/// Sends so many requests at once, without a key: an attempt goes to no connection that nothing was heard of for a second.
#[track_caller]
fn all_are_paid(gate: &Gate, count: usize) {
    let address = gate.address;
    let send = || move || Request::post("/charges").body("{}").send(address);
    let clients: Vec<_> = (0..count).map(|_| std::thread::spawn(send())).collect();
    for client in clients {
        let answer = client.join().unwrap();
        assert_eq!(answer.text(), "paid", "{}", answer.show());
    }
}

/// Some servers end each body with an empty frame, before its trailers: h2 takes a hundred of them on a connection for an
/// attack.
#[test]
fn empty_frames_in_answers_are_no_attack() {
    let upstream = H2::start(&[], |mut conn| {
        while let Some(stream) = conn.request() {
            conn.send(HEADERS, END_HEADERS, stream, OK);
            conn.send(DATA, 0, stream, b"x");
            conn.send(DATA, 0, stream, b"");
            conn.send(HEADERS, END_HEADERS | END_STREAM, stream, &block(&[("x-sum", b"7")]));
        }
    });
    let gate = before(&upstream).start();
    let mut client = Http2::connect(&gate);
    // Without a key: for an attempt, a connection that nothing was heard of for a second is not good enough.
    for nth in 0..150 {
        let answer = client.send(post("/x").body("{}").unwrap());
        assert_eq!((answer.expect(200, "").body.as_ref(), upstream.connections()), (&b"x"[..], 1), "{nth}");
    }
}
