//! Raw requests and raw answers (`corpus/*.txt`; `corpus/cases.rs` says how they are written) through a real socket.
//!
//! Of each: what reaches the upstream is one request that can be read in one way only for each that is answered from
//! there, or nothing; the client's connection carries one answer a request, in order; where it is not trusted any more
//! it ends behind the answer, and without a reset.
//!
//! `CORPUS_FORWARDED` names a directory for what was forwarded, for `tests/conformance`.

mod cases;
mod recorder;
mod strict;
mod theme;

use std::path::{Path, PathBuf};

use crate::support::{Client, Gate, Reply, Request, Signal, Upstream, eventually};
use theme::theme;

#[test]
fn lengths() {
    theme("lengths");
}

#[test]
fn codings() {
    theme("codings");
}

#[test]
fn chunks() {
    theme("chunks");
}

#[test]
fn lines() {
    theme("lines");
}

#[test]
fn request_lines() {
    theme("request-lines");
}

#[test]
fn hosts() {
    theme("hosts");
}

#[test]
fn sizes() {
    theme("sizes");
}

#[test]
fn expectations() {
    theme("expectations");
}

#[test]
fn pipelines() {
    theme("pipelines");
}

#[test]
fn keys() {
    theme("keys");
}

#[test]
fn hops() {
    theme("hops");
}

#[test]
fn ends() {
    theme("ends");
}

#[test]
fn answer_heads() {
    theme("answer-heads");
}

#[test]
fn answer_bodies() {
    theme("answer-bodies");
}

/// A request that runs meanwhile elsewhere cannot be written as a case.
#[test]
fn a_conflict_leaves_no_body_to_be_read_as_a_request() {
    let signal = Signal::new();
    let held = signal.clone();
    let upstream = Upstream::start(move |request| match request.key() {
        Some(_) => Reply::ok("first").hold_until(&held),
        None => Reply::ok(request.start_line()),
    });
    let gate = Gate::before(&upstream).start();
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: gate.test\r\n\r\n";
    let large = smuggled.repeat(100_000);
    for (key, body) in [("small", smuggled), ("large", &large)] {
        let request = Request::post("/charges").key(key).body(body).bytes();
        let mut first = Client::connect(gate.address);
        first.send(&request);
        eventually("the first attempt", || (upstream.runs_of(key) == 1).then_some(()));
        let mut second = Client::connect(gate.address);
        second.send(&request).send(Request::get("/after").bytes());
        second.response().expect_problem(409, "in-flight");
        assert_eq!(second.response().text(), "GET /after HTTP/1.1", "{key}");
        let mut third = Client::connect(gate.address);
        third.send(Request::post("/other").key(key).body(body).bytes()).send(Request::get("/after").bytes());
        third.response().expect_problem(422, "key-reused");
        assert_eq!(third.response().text(), "GET /after HTTP/1.1", "{key}");
        assert_eq!(upstream.runs_of(key), 1);
    }
    assert_eq!(upstream.runs(), 6, "a body was read as a request");
    signal.open();
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/corpus")
}

/// A theme that no test names would pass for one that holds.
#[test]
fn every_theme_is_run_and_every_case_has_a_title_of_its_own() {
    let run = include_str!("corpus.rs");
    let mut titles = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir(directory()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "txt") {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            assert!(run.contains(&format!("theme(\"{name}\")")), "{name} is not run");
            for case in cases::read(&path) {
                assert!(titles.insert((name.clone(), case.title.clone())), "{name}: {} twice", case.title);
            }
        }
    }
    assert!(titles.len() >= 150, "{} cases", titles.len());
}
