use super::*;

fn sent(text: &str) -> Option<(String, Option<String>)> {
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
        assert_eq!(sent(text), Some((name.to_owned(), value.map(ToOwned::to_owned))), "{text}");
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

#[test]
fn the_head_is_what_curl_would_send() {
    let of = |target: &str, headers: &[&str], type_is_ours| {
        let headers = headers.iter().map(|text| parse_header(text).unwrap()).collect();
        head(Method::POST, parse_target(target).unwrap(), headers, type_is_ours).unwrap()
    };
    let head = of("http://a.example:81/b?c", &["X-A: 1", "X-A: 2"], true);
    assert_eq!((head.uri.to_string().as_str(), head.version), ("/b?c", Version::HTTP_11));
    assert_eq!(
        (head.headers["host"].as_bytes(), head.headers.get_all("x-a").iter().count()),
        (&b"a.example:81"[..], 2)
    );
    assert_eq!(head.headers["content-type"], "application/x-www-form-urlencoded");
    let head = of("/b", &["Content-Type:"], false);
    assert_eq!((head.version, head.headers.len()), (Version::HTTP_10, 0), "nobody named a host");
}

#[test]
fn several_bodies_are_joined() {
    let body = |data: &[&str]| read_body(&data.iter().map(|&piece| piece.to_owned()).collect::<Vec<_>>());
    assert_eq!(body(&[]).unwrap(), None);
    assert_eq!(body(&[""]).unwrap().unwrap(), b"");
    assert_eq!(body(&["a=1", "b=2"]).unwrap().unwrap(), b"a=1&b=2");
    assert!(body(&["@no/such/file"]).unwrap_err().to_string().contains("no/such/file"));
}
