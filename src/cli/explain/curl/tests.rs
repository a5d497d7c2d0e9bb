use clap::Parser as _;

use super::super::ExplainArgs;
use super::*;

fn header(text: &str) -> Option<(String, Option<String>)> {
    let (name, value) = parse_header(text).ok()?;
    Some((name.to_string(), value.map(|value| String::from_utf8(value.as_bytes().to_vec()).unwrap())))
}

#[test]
fn headers_are_written_as_for_curl() {
    for (text, name, value) in [
        ("X-A: b", "x-a", Some("b")),
        ("X-A:b: c ", "x-a", Some("b: c")),
        ("X-A;", "x-a", Some("")),
        ("X-A:", "x-a", None),
        ("X-A: café", "x-a", Some("café")),
    ] {
        assert_eq!(header(text), Some((name.to_owned(), value.map(ToOwned::to_owned))), "{text}");
    }
    for text in ["", "X-A", "X A: b", ": b", "X-A: a\nb"] {
        assert!(parse_header(text).is_err(), "{text}");
    }
    assert_eq!(parse_header("X-A: s3cret\n s3cret").unwrap_err(), "not a header's value");
}

#[test]
fn a_target_is_a_path_or_a_url() {
    for text in ["/", "/a?b=c", "*", "http://a", "https://a:8443/b?c"] {
        assert!(parse_target(text).is_ok(), "{text}");
    }
    for text in ["", "a", "a.example/b", "ftp://a/b", "http://u:p@a/b", "/a b", "http://"] {
        assert!(parse_target(text).is_err(), "{text}");
    }
}

#[derive(clap::Parser)]
struct CommandLine {
    #[command(flatten)]
    args: ExplainArgs,
}

/// The words of a command line, as a shell splits it that knows single quotes only.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut is_quoted) = (vec![String::new()], false);
    for char in line.trim_end().chars() {
        match char {
            '\'' => is_quoted = !is_quoted,
            ' ' if !is_quoted => words.push(String::new()),
            char => words.last_mut().unwrap().push(char),
        }
    }
    words
}

fn sent(line: &str) -> Result<Sent, Unsent> {
    CommandLine::try_parse_from(words(&format!("explain {line}"))).unwrap().args.curl.into_sent()
}

/// The request line, the headers in the order of their names, and the body.
fn show(sent: &Sent) -> String {
    let head = &sent.head;
    let mut lines: Vec<String> =
        head.headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
    lines.sort();
    lines.insert(0, format!("{} {}", head.method, head.uri));
    lines.extend(sent.body.iter().map(|body| format!("= {}", String::from_utf8_lossy(body))));
    lines.join(" | ")
}

/// Each request was compared with what curl 7.88 sends, less its own `User-Agent` and `Accept: */*`.
#[test]
fn the_request_is_what_curl_would_send() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("FILE");
    std::fs::write(&file, "{\r\n1}\n").unwrap();
    let file = &*file.to_string_lossy();
    for (line, expected) in [
        ("curl http://a.example/x", "GET /x | host: a.example"),
        ("/x", "GET /x"),
        ("curl http://a.example", "GET / | host: a.example"),
        ("curl http://a.example?b=c", "GET /?b=c | host: a.example"),
        ("curl http://a.example/x#y", "GET /x | host: a.example"),
        ("curl http://a.example:80/x", "GET /x | host: a.example"),
        ("curl https://a.example:443/x", "GET /x | host: a.example"),
        ("curl https://a.example:80/x", "GET /x | host: a.example:80"),
        ("curl --url http://a.example:81/b?c", "GET /b?c | host: a.example:81"),
        ("curl --path-as-is http://a.example/a/../b", "GET /a/../b | host: a.example"),
        ("curl -H 'Host: b.example' http://a.example/x", "GET /x | host: b.example"),
        ("curl -H Host: http://a.example/x", "GET /x"),
        ("curl -sSi -k -L -v --insecure http://a/x -s", "GET /x | host: a"),
        ("--include --silent --show-error --location --verbose /x", "GET /x"),
        ("curl -sSiXPUT /x", "PUT /x"),
        ("curl -fsSo out.json --max-time 3 -m5 http://a/x", "GET /x | host: a"),
        ("curl -o - --retry 3 --retry-delay=1 --http2 -w '%{http_code}' -D- /x", "GET /x"),
        ("curl --http1.1 --connect-timeout 2 --fail --cacert ca.pem --resolve a:80:127.0.0.1 /x", "GET /x"),
        ("--request PUT -X PATCH /x", "PATCH /x"),
        ("-H X-A: -H 'X-B;' --header 'X-C: 1' -H 'X-C: 2' /x", "GET /x | x-b:  | x-c: 1 | x-c: 2"),
        ("curl -d a=1 http://a/x --data b=2", "POST /x | FORM | host: a | = a=1&b=2"),
        ("curl -da=1 -X GET /x", "GET /x | FORM | = a=1"),
        ("-d '' /x", "POST /x | FORM | = "),
        ("-d '' -d b /x", "POST /x | FORM | = &b"),
        ("-d -1 /x", "POST /x | FORM | = -1"),
        ("-d x -H 'Content-Type: text/plain' /x", "POST /x | content-type: text/plain | = x"),
        ("-d x -H Content-Type: /x", "POST /x | = x"),
        ("-d @FILE /x", "POST /x | FORM | = {1}"),
        ("--data-ascii @FILE /x", "POST /x | FORM | = {1}"),
        ("--data-binary @FILE /x", "POST /x | FORM | = {\r\n1}\n"),
        ("--data-binary x --data-raw @y -d z /x", "POST /x | FORM | = x&@y&z"),
        ("--json '{' --json '}' /x", "POST /x | JSON | = {}"),
        ("--json @FILE /x", "POST /x | JSON | = {\r\n1}\n"),
        ("-d x --json y -d z /x", "POST /x | JSON | = xy&z"),
        ("--json {} -H 'Content-Type: a/b' -H accept: /x", "POST /x | content-type: a/b | = {}"),
        ("-G --json {} /x", "GET /x?{} | JSON"),
        ("--data-urlencode 'a b=c&d' --data-urlencode '=e f=' /x", "POST /x | FORM | = a b=c%26d&e+f%3D"),
        ("--data-urlencode 'ü~-._+*' /x", "POST /x | FORM | = %C3%BC~-._%2B%2A"),
        ("--data-urlencode n@FILE --data-urlencode m=@ /x", "POST /x | FORM | = n=%7B%0D%0A1%7D%0A&m=%40"),
        ("curl -G -d a=1 --data-urlencode 'q=a b' /x", "GET /x?a=1&q=a+b"),
        ("curl --get -d a http://a/x?b=c", "GET /x?b=c&a | host: a"),
        ("curl -G -d a -X POST http://a?", "POST /?a | host: a"),
        ("-G -d '' /x", "GET /x"),
        ("-G /x", "GET /x"),
        ("-u ann:one /x", "GET /x | authorization: Basic YW5uOm9uZQ=="),
        ("-u ann:one --user bob:two:three /x", "GET /x | authorization: Basic Ym9iOnR3bzp0aHJlZQ=="),
        ("-u ann: /x", "GET /x | authorization: Basic YW5uOg=="),
        ("-u ann:one -H 'Authorization: Bearer t' /x", "GET /x | authorization: Bearer t"),
        ("-u ann:one -H Authorization: /x", "GET /x"),
        ("-b a=1 --cookie 'b=2; c=3' /x", "GET /x | cookie: a=1;b=2; c=3"),
        ("-b a=1 -H 'Cookie: z=9' /x", "GET /x | cookie: z=9"),
        ("-A me --user-agent you -e http://r/;auto /x", "GET /x | referer: http://r/ | user-agent: you"),
        ("-A '' -e '' /x", "GET /x"),
        ("--compressed --referer r /x", "GET /x | accept-encoding: deflate, gzip, br, zstd | referer: r"),
    ] {
        let shown = show(&sent(&line.replace("@FILE", &format!("@{file}"))).unwrap());
        let expected = expected.replace("FORM", "content-type: application/x-www-form-urlencoded");
        let expected = expected.replace("JSON", "accept: application/json | content-type: application/json");
        assert_eq!(shown, expected, "{line}");
    }
}

#[test]
fn the_default_type_is_known_as_one() {
    for (line, is_default) in [
        ("-d x /x", true),
        ("-d x -H 'Content-Type: a/b' /x", false),
        ("-d x -H Content-Type: /x", false),
        ("--json x /x", false),
        ("-G -d x /x", false),
        ("/x", false),
    ] {
        assert_eq!(sent(line).unwrap().type_is_default, is_default, "{line}");
    }
    for target in ["/x", "http://a/x"] {
        assert_eq!(sent(target).unwrap().head.version, Version::HTTP_11, "{target}");
    }
}

#[test]
fn what_is_no_request_shows_no_secret() {
    for line in [
        "",
        "curl",
        "a.example/s3cret",
        "http://ann:s3cret@a.example/",
        "/a /b",
        "--url /a /b",
        "--url /a --url /b",
        "-u s3cret /x",
        "-b s3cret /x",
        "-b a=1 -b s3cret /x",
        "-b 's3cret=\n' /x",
        "-A 's3cret\n' /x",
        "-H s3cret /x",
        "-H 'X-A: s3cret\n!' /x",
    ] {
        match sent(line) {
            Err(Unsent::Usage(message)) => assert!(!message.contains("s3cret"), "{line}: {message}"),
            other => panic!("{line}: {other:?}"),
        }
    }
    for (line, said) in [("-d @no/such/file /x", "no/such/file"), ("-G -d 'a b' /x", "--data-urlencode")] {
        match sent(line) {
            Err(Unsent::Failed(error)) => assert!(error.to_string().contains(said), "{line}: {error}"),
            other => panic!("{line}: {other:?}"),
        }
    }
}

#[test]
fn a_flag_that_is_not_known_is_refused() {
    for line in ["--no-such-flag /x", "-sZ /x", "-u", "/x -o"] {
        let parsed = CommandLine::try_parse_from(words(&format!("explain {line}")));
        assert_eq!(parsed.map(|_| ()).unwrap_err().exit_code(), 2, "{line}");
    }
}

#[test]
fn a_flag_that_cannot_be_read_says_what_to_give_instead() {
    for (line, named, instead) in [
        ("curl -F a=s3cret http://a/x", "-F (--form)", "--data-binary @FILE"),
        ("--form-string a=s3cret /x", "--form-string", "--data-binary @FILE"),
        ("-T s3cret /x", "-T (--upload-file)", "-X PUT"),
        ("-sI /x", "-I (--head)", "-X HEAD"),
        ("--cert c.pem:s3cret /x", "-E (--cert)", "--client-cert FILE"),
    ] {
        match sent(line) {
            Err(Unsent::Usage(message)) => {
                assert!(message.starts_with(&format!("{named} is not read: ")), "{line}: {message}");
                assert!(message.contains(instead) && !message.contains("s3cret"), "{line}: {message}");
            }
            other => panic!("{line}: {other:?}"),
        }
    }
}
