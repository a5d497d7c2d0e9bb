//! The rules as tables that anybody can read: `decide.golden.md`, written from what [`decide`] and [`settle`] do.
//!
//! A test compares. To accept a change: `ONCEGATE_BLESS=1 cargo test golden`, then read the difference.

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, StatusCode};

use super::codec::{Answer, Content, Head};
use super::credential::Proof;
use super::decide::{Decision, RunningAttempt, decide_read};
use super::fingerprint::{Fingerprint, Recipe};
use super::grpc::Status;
use super::key::Key;
use super::policy::Policy;
use super::record::{AttemptToken, Record, State, Timestamp};
use super::recovery::{Probe, ProbePath, Recovery};
use super::settle::{Control, Ending, GateSays, Outcomes, Verdict, settle};
use super::unknown::UnknownCause;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/idempotency/decide.golden.md");

/// When the records of the tables were claimed, and until when they stand.
const CLAIMED: Timestamp = Timestamp(1_000_000);
const UNTIL: Timestamp = Timestamp(1_030_000);

/// Holds that a file has this text. With `ONCEGATE_BLESS=1` the file is written instead.
pub(super) fn compare(file: &str, text: &str) {
    if std::env::var_os("ONCEGATE_BLESS").is_some() {
        std::fs::write(file, text).unwrap();
    }
    let agreed = std::fs::read_to_string(file).unwrap_or_default();
    for (line, (now, then)) in text.lines().zip(agreed.lines()).enumerate() {
        assert_eq!(now, then, "line {} of {file}; ONCEGATE_BLESS=1 accepts the change", line + 1);
    }
    assert_eq!(text, agreed);
}

#[test]
fn the_tables_are_as_agreed() {
    compare(FILE, &tables());
}

fn tables() -> String {
    let mut out = String::new();
    out.push_str(
        "# What a request gets\n\n\
         This file is written by a test from what the program does. It is read by people: a change here is a change \
         of what oncegate promises.\n\n\
         ## A key that has a record\n\n\
         A request with a key comes to a protected route. A request whose key has no record runs. This is what happens \
         where there is one. It is *the same* request if its fingerprint is the record's, and of the same caller if the \
         proof of its credential is the record's: *the same, other proof* is the request after a token, a password or a \
         session changed, or somebody else's who guessed the key. `recovery` is what the route says of unknown outcomes; \
         `hold` is the default. *Runs* means that a new attempt takes the key over and is forwarded.\n",
    );
    for (title, time, make) in RECORDS {
        requests(&mut out, title, time, *make);
    }
    out.push_str(
        "\n## How an attempt ends\n\n\
         An attempt was forwarded, and ended. This is what becomes of its record, by default and where the upstream \
         says something in `Idempotency-Control`, or is another gate and says in `Idempotency-Status` that the answer is its own. *Stored*: retries get this answer for the route's ttl, or for as \
         long as is said. *Without body*: retries get 409 `response-not-stored`. *Released*: a retry runs. *Held*: the \
         outcome is unknown.\n\n",
    );
    controls(&mut out);
    out.push_str(
        "\n## What `outcomes` changes\n\n\
         The most specific entry decides. An exact status is more specific than a class, also where the exact one is \
         a default: 401, 407, 408, 425, 429, 502 and 504 must be named to change.\n\n",
    );
    outcomes(&mut out);
    out
}

/// A kind of record: what it is called, what its time limit is called, how it is made.
type Kind = (&'static str, &'static str, fn() -> Record);

const RECORDS: &[Kind] = &[
    ("In flight", "lease", || record(State::InFlight, None)),
    ("Completed", "ttl", || record(State::Completed, Some(answer(true).encode()))),
    ("Completed, body not kept", "ttl", || record(State::Completed, Some(answer(false).encode()))),
    ("Unknown", "unknown_ttl", || record(State::Unknown, None)),
    ("Unknown, and about to be sent again", "unknown_ttl", || {
        record(State::Unknown, Some(UnknownCause::SentAgain(Ending::Timeout).encode()))
    }),
    ("In flight, in a format that cannot be read", "lease", || Record { head: odd(), ..record(State::InFlight, None) }),
    ("Completed, in a format that cannot be read", "ttl", || Record {
        head: odd(),
        ..record(State::Completed, Some(answer(true).encode()))
    }),
    ("Unknown, in a format that cannot be read", "unknown_ttl", || Record {
        head: odd(),
        ..record(State::Unknown, None)
    }),
    ("Completed, with an answer that cannot be read", "ttl", || record(State::Completed, Some(odd()))),
    ("Completed, with its answer lost", "ttl", || record(State::Completed, None)),
    ("Completed, of a caller with nothing to prove", "ttl", || Record {
        head: head(None),
        ..record(State::Completed, Some(answer(true).encode()))
    }),
];

/// The proof of a request and of most records, and another one.
const PROOF: Option<Proof> = Some(Proof([1; 32]));
const OTHER_PROOF: Option<Proof> = Some(Proof([2; 32]));

fn requests(out: &mut String, title: &str, time: &str, make: fn() -> Record) {
    let _ = write!(
        out,
        "\n### {title}\n\n| {time} | request | with `recovery = \"hold\"` | with `\"retry\"` | with a `probe` |\n|---|---|---|---|---|\n"
    );
    let ages = [
        ("just claimed", CLAIMED),
        ("1 ms left", Timestamp(UNTIL.0 - 1)),
        ("ends now", UNTIL),
        ("past", UNTIL.plus(Duration::from_secs(365 * 24 * 3600))),
    ];
    for (age, now) in ages {
        let gets = |same: bool, proof: Option<Proof>| {
            let path = ProbePath::parse("/by-key/{key}").unwrap();
            let probe = Probe { path, after: Some(Duration::ZERO), every: None, headers: Vec::new() };
            let [hold, retry, probe] = [Recovery::Hold, Recovery::Retry, Recovery::Probe(probe)].map(|recovery| {
                // An unknown record has been that since it was claimed.
                let policy = Policy { recovery, unknown_ttl: UNTIL.since(CLAIMED), ..Policy::default() };
                describe(&decide_read(now, &policy, &make(), proof.as_ref(), same))
            });
            format!("{hold} | {retry} | {probe}")
        };
        // What the record holds, where it can be read.
        let kept = Head::decode(&make().head).map_or(PROOF, |head| head.proof);
        let cells = [
            ("the same", gets(true, kept)),
            ("the same, other proof", gets(true, OTHER_PROOF)),
            ("another", gets(false, kept)),
        ];
        // Whether the proof is the same makes no difference to another request; nor does its absence.
        assert_eq!(cells[2].1, gets(false, OTHER_PROOF));
        assert_eq!(cells[1].1, gets(true, if kept.is_some() { None } else { PROOF }));
        if cells.iter().all(|(_, cell)| *cell == cells[0].1) {
            let _ = writeln!(out, "| {age} | any | {} |", cells[0].1);
        } else {
            cells.iter().for_each(|(request, cell)| {
                let _ = writeln!(out, "| {age} | {request} | {cell} |");
            });
        }
    }
}

fn describe(decision: &Decision) -> String {
    match decision {
        Decision::Supersede => "runs".to_owned(),
        Decision::Reused => "422 `key-reused`".to_owned(),
        Decision::CallerDiffers => "422 `caller-differs`".to_owned(),
        Decision::InFlight(RunningAttempt { elapsed, lease_left }) => {
            let left = lease_left.expect("a record has a lease").as_millis();
            format!("409 `in-flight` ({} s so far, {left} ms of the lease left)", elapsed.as_secs())
        }
        Decision::Replay(first) => {
            assert_eq!(*first, answer(true));
            "replay of the first answer".to_owned()
        }
        Decision::NotStored(status) => format!("409 `response-not-stored`, the status was {}", status.as_u16()),
        Decision::Unknown => "409 `outcome-unknown`".to_owned(),
        Decision::Probe => "asks the upstream".to_owned(),
        Decision::Unreadable => "503 `store-unavailable`, never run".to_owned(),
    }
}

fn controls(out: &mut String) {
    let ttl = Some(Duration::from_secs(60));
    let said = [
        ("nothing said", Control::default()),
        ("`ttl=60`", Control { ttl, ..Control::default() }),
        ("`no-store`", Control { no_store: true, ..Control::default() }),
        ("`no-store, ttl=60`", Control { no_store: true, ttl, ..Control::default() }),
        ("`release`", Control { release: true, ..Control::default() }),
        ("`release, no-store, ttl=60`", Control { release: true, no_store: true, ttl, ..Control::default() }),
        ("of another gate: nothing sent", Control { of_gate: Some(GateSays::NothingSent), ..Control::default() }),
        ("of another gate: not over", Control { of_gate: Some(GateSays::NotOver), ..Control::default() }),
    ];
    endings(out, &said.map(|(said, control)| (said, move |ending| settle(&Policy::default(), ending, &control, None))));
}

fn outcomes(out: &mut String) {
    let entries: [&[(&str, &str)]; 9] = [
        &[],
        &[("2xx", "hold")],
        &[("4xx", "release")],
        &[("4xx", "store")],
        &[("429", "store")],
        &[("5xx", "store")],
        &[("5xx", "hold"), ("503", "release"), ("502", "release")],
        &[("grpc:UNAVAILABLE", "hold"), ("grpc:13", "release")],
        &[("unreachable", "hold"), ("timeout", "release"), ("broken", "release")],
    ];
    let columns = entries.map(|entries| {
        let mut outcomes = Outcomes::default();
        for (entry, action) in entries {
            outcomes.insert(entry, action).unwrap();
        }
        let title: Vec<_> = entries.iter().map(|(entry, action)| format!("`{entry} = {action}`")).collect();
        let title = if title.is_empty() { "default".to_owned() } else { title.join(", ") };
        let policy = Policy { outcomes, ..Policy::default() };
        (title, move |ending| settle(&policy, ending, &Control::default(), None))
    });
    endings(out, &columns);
}

/// Writes a table with a row for every ending, those of neighbouring statuses in one row where they are alike.
fn endings<T: AsRef<str>>(out: &mut String, columns: &[(T, impl Fn(Ending) -> Verdict)]) {
    let titles: Vec<_> = columns.iter().map(|(title, _)| title.as_ref()).collect();
    let _ = write!(out, "| ending | {} |\n|---|{}\n", titles.join(" | "), "---|".repeat(columns.len()));
    let cells = |ending| {
        let cells: Vec<_> = columns.iter().map(|(_, settle)| verdict(settle(ending))).collect();
        cells.join(" | ")
    };
    let mut from = 100;
    for status in 100..=999 {
        let here = cells(Ending::Answered(from));
        // A new class begins a new row, so that people find their way.
        if status == 999 || (status < 600 && status % 100 == 99) || cells(Ending::Answered(status + 1)) != here {
            let range = if from == status { status.to_string() } else { format!("{from} to {status}") };
            let _ = writeln!(out, "| {range} | {here} |");
            from = status + 1;
        }
    }
    for status in Status::ALL {
        let _ = writeln!(out, "| gRPC {} {} | {} |", status.number(), status.name(), cells(Ending::Called(status)));
    }
    let others = [
        ("unreachable: nothing was sent", Ending::Unreachable),
        ("timeout", Ending::Timeout),
        ("broken off", Ending::Broken),
    ];
    for (title, ending) in others {
        let _ = writeln!(out, "| {title} | {} |", cells(ending));
    }
}

fn verdict(verdict: Verdict) -> String {
    match verdict {
        Verdict::Release => "released".to_owned(),
        Verdict::Hold => "held".to_owned(),
        Verdict::Complete { ttl, keep_body } => {
            let body = if keep_body { "stored" } else { "stored without body" };
            if ttl == Policy::default().ttl { body.to_owned() } else { format!("{body} for {} s", ttl.as_secs()) }
        }
    }
}

fn record(state: State, answer: Option<Bytes>) -> Record {
    Record { attempt: AttemptToken([1; 16]), state, claimed_at: CLAIMED, until: UNTIL, head: head(PROOF), answer }
}

fn head(proof: Option<Proof>) -> Bytes {
    let fingerprint = Fingerprint { recipe: Recipe::default(), digest: [0; 32] };
    let key = Key::parse("8e03978e-40d5-43dd-bc93-6894a57f9324", 255).expect("a key");
    Head::new(fingerprint, Method::POST, "/v1/charges", &key).with_proof(proof).encode()
}

fn answer(keep_body: bool) -> Answer {
    let content = keep_body.then(|| Content { body: Bytes::from_static(b"{}"), trailers: Vec::new() });
    Answer { status: StatusCode::CREATED, reason: None, headers: Vec::new(), content }
}

/// Bytes of some later version.
fn odd() -> Bytes {
    Bytes::from_static(b"\xff\x00later")
}
