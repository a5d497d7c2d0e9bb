//! A target goes on as it came, or not at all.

use crate::support::frames::{CONTINUATION, END_HEADERS, END_STREAM, Ending, Frames, HEADERS, block, frame, request};
use crate::support::{Gate, Reply, Upstream};

const WHOLE: u8 = END_HEADERS | END_STREAM;
const PRIORITY: u8 = 0x20;
const PADDED: u8 = 8;
const PROTOCOL_ERROR: u32 = 1;

/// `/a#b`, `/a?x#y` and `x#y` in Huffman's code, with their lengths.
const CODED: &[u8] = b"\x84\x60\x7f\xf5\x1f";
const CODED_BEHIND_QUERY: &[u8] = b"\x86\x60\x7f\xe7\x9f\xfa\xf5";
const CODED_VALUE: &[u8] = b"\x84\xf3\xff\x5e\xbf";

/// A request whose `:path` is written so, behind the other pseudo-headers.
fn of(path: &[&[u8]]) -> Vec<u8> {
    let others: [(&str, &[u8]); 3] = [(":method", b"GET"), (":scheme", b"http"), (":authority", b"gate.test")];
    [block(&others), path.concat()].concat()
}

#[test]
fn a_path_with_a_fragment_is_refused_however_it_is_written() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let literal: &[u8] = b"\x04/a#b";
    let forms: [(&str, &[&[u8]]); 10] = [
        ("as it is", &[b"\0\x05:path", literal]),
        ("by the static table", &[b"\x04", literal]),
        ("never indexed", &[b"\x14", literal]),
        ("coded", &[b"\x04", CODED]),
        ("behind a query", &[b"\x04", CODED_BEHIND_QUERY]),
        ("with a coded name", &[b"\0\x84\xb9\x58\xd3\x3f", CODED]),
        ("into the dynamic table", &[b"\x44", CODED]),
        // What the one before added is now the first entry.
        ("from the dynamic table", &[b"\xbe"]),
        ("by a name of the dynamic table", &[b"\x0f\x2f", CODED]),
        ("at its beginning", &[b"\x04", b"\x02#b"]),
    ];
    let mut client = Frames::connect(gate.address, &[]);
    for (nth, (what, path)) in (0..).zip(forms) {
        let stream = 4 * nth + 1;
        client.send(HEADERS, WHOLE, stream, &of(path));
        assert_eq!(client.ending(stream), Ending::Reset(PROTOCOL_ERROR), "{what}");
        // The connection goes on.
        client.send(HEADERS, WHOLE, stream + 2, &request("GET", "/after", &[]));
        assert_eq!(client.ending(stream + 2), Ending::Status(200), "{what}");
    }
    assert!(upstream.seen().iter().all(|seen| seen.start_line() == "GET /after HTTP/1.1"));
}

#[test]
fn it_is_found_wherever_frames_and_writes_part_it() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let coded = of(&[b"\x04", CODED]);
    let mut client = Frames::connect(gate.address, &[]);
    let mut stream = 1;
    for cut in coded.len() - 8..coded.len() {
        let (first, rest) = coded.split_at(cut);
        let padded = [&[7, 0, 0, 0, 200, 1][..], first, &[0; 7]].concat();
        client.send(HEADERS, END_STREAM | PADDED | PRIORITY, stream, &padded);
        client.send(CONTINUATION, END_HEADERS, stream, rest);
        assert_eq!(client.ending(stream), Ending::Reset(PROTOCOL_ERROR), "{cut}");
        stream += 2;
    }
    for byte in frame(HEADERS, WHOLE, stream, &coded) {
        client.write(&[byte]).unwrap();
    }
    assert_eq!(client.ending(stream), Ending::Reset(PROTOCOL_ERROR));
    assert_eq!(upstream.runs(), 0);
}

#[test]
fn what_is_no_fragment_goes_on_as_it_came() {
    let upstream = Upstream::start(|_| Reply::ok("x"));
    let gate = Gate::before(&upstream).start();
    let mut client = Frames::connect(gate.address, &[]);
    let paths = ["/a%23b", "/a?b=%23", "//a//?", "/?", "/a;b=c,d:e@f!$&'()*+"];
    let mut stream = 1;
    for path in paths {
        // Once into the dynamic table, and once by it.
        let note = [&[0x40, 6][..], b"x-note", CODED_VALUE].concat();
        client.send(HEADERS, WHOLE, stream, &[request("GET", path, &[]), note].concat());
        client.send(HEADERS, WHOLE, stream + 2, &[request("GET", path, &[]), vec![0xBE]].concat());
        assert_eq!(client.ending(stream + 2), Ending::Status(200), "{path}");
        stream += 4;
    }
    upstream.wait_for_runs(2 * paths.len());
    let seen = upstream.seen();
    for path in paths {
        let sent: Vec<_> = seen.iter().filter(|seen| seen.start_line() == format!("GET {path} HTTP/1.1")).collect();
        assert_eq!(sent.len(), 2, "{path}");
        assert!(sent.iter().all(|seen| seen.head.get("x-note").as_deref() == Some("x#y")), "{path}");
    }
    // A path that h2 would take and that would become another.
    client.send(HEADERS, WHOLE, stream, &request("GET", "?x", &[]));
    assert_eq!(client.ending(stream), Ending::Status(400));
    assert_eq!(upstream.runs(), 2 * paths.len());
}
