use http::HeaderValue;

use super::*;

const JSON: &[(&str, &str)] = &[("content-type", "application/json")];

fn headers(lines: &[(&str, &str)]) -> HeaderMap {
    lines
        .iter()
        .map(|&(name, value)| (name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap()))
        .collect()
}

fn digest(recipe: &Recipe, target: &str, lines: &[(&str, &str)], body: &[u8]) -> [u8; 32] {
    let (uri, headers) = (target.parse().unwrap(), headers(lines));
    recipe.digest(Subject { method: &Method::POST, uri: &uri, headers: &headers, body: Body::Whole(body) })
}

/// The digest of a body by the default recipe.
fn of(lines: &[(&str, &str)], body: &str) -> [u8; 32] {
    digest(&Recipe::default(), "/", lines, body.as_bytes())
}

fn pointers(texts: &[&str]) -> Vec<Pointer> {
    texts.iter().map(|text| Pointer::parse(text).unwrap()).collect()
}

/// Asserts that no two are equal.
fn assert_distinct(digests: &[[u8; 32]]) {
    for (at, one) in digests.iter().enumerate() {
        assert!(!digests[at + 1..].contains(one), "number {at} stands again");
    }
}

#[test]
fn everything_of_a_request_counts() {
    let recipe = Recipe { headers: vec![HeaderName::from_static("x-a")], ..Recipe::default() };
    let get = {
        let (uri, headers) = ("/".parse().unwrap(), HeaderMap::new());
        recipe.digest(Subject { method: &Method::GET, uri: &uri, headers: &headers, body: Body::Whole(b"") })
    };
    assert_distinct(&[
        get,
        digest(&recipe, "/", &[], b""),
        digest(&recipe, "/a", &[], b""),
        digest(&recipe, "/%61", &[], b""),
        digest(&recipe, "/?", &[], b""),
        digest(&recipe, "/?a", &[], b""),
        digest(&recipe, "/?a&b", &[], b""),
        digest(&recipe, "/?b&a", &[], b""),
        digest(&recipe, "/", &[], b"a"),
        digest(&recipe, "/", &[("x-a", "")], b""),
        digest(&recipe, "/", &[("x-a", "b")], b""),
        digest(&recipe, "/", &[("x-a", "b"), ("x-a", "c")], b""),
        digest(&recipe, "/", &[("x-a", "b, c")], b""),
        digest(&recipe, "/", &[("x-a", "c"), ("x-a", "b")], b""),
    ]);
    assert_eq!(digest(&recipe, "/", &[("x-b", "b")], b""), digest(&recipe, "/", &[], b""));
}

#[test]
fn what_is_left_out_does_not_count() {
    let nothing = Recipe { method: false, path: false, query: false, body: false, ..Recipe::default() };
    assert_eq!(digest(&nothing, "/a?b", &[], b"c"), digest(&nothing, "/", &[], b""));
    let without = Recipe { form: BodyForm::None, ..Recipe::default() };
    assert_eq!(digest(&without, "/", &[], b"c"), digest(&without, "/", &[], b""));
    let path_only = Recipe { query: false, body: false, ..nothing.clone() };
    let path_only = Recipe { path: true, ..path_only };
    let query_only = Recipe { query: true, ..nothing };
    assert_ne!(digest(&path_only, "/a?b", &[], b""), digest(&query_only, "/a?b", &[], b""));
}

#[test]
fn json_counts_by_value() {
    let one = of(JSON, r#"{"a":1,"b":"é"}"#);
    assert_eq!(of(JSON, "{ \"b\" : \"\\u00e9\",\n\"a\":1 }"), one);
    assert_eq!(of(&[("content-type", "application/problem+json; charset=utf-8")], r#"{"b":"é","a":1}"#), one);
    assert_eq!(
        digest(&Recipe { form: BodyForm::Json, ..Recipe::default() }, "/", &[], r#"{"b":"é","a":1}"#.as_bytes()),
        one
    );
    assert_distinct(&[
        one,
        of(JSON, r#"{"a":1.0,"b":"é"}"#),
        of(JSON, r#"{"a":"1","b":"é"}"#),
        of(JSON, r#"{"a":1}"#),
        // The same bytes, read in another way.
        of(&[], r#"{"a":1,"b":"é"}"#),
    ]);
}

#[test]
fn what_is_not_quite_json_counts_by_its_bytes() {
    let gzip: &[_] = &[("content-type", "application/json"), ("content-encoding", "gzip")];
    let twice: &[_] = &[("content-type", "application/json"), ("content-type", "application/json")];
    let deep = "[".repeat(1000) + &"]".repeat(1000);
    for (lines, body) in
        [(JSON, r#"{"a":1,"a":2}"#), (JSON, "{"), (JSON, ""), (JSON, &deep), (gzip, "[1]"), (twice, "[1]")]
    {
        assert_eq!(of(lines, body), of(&[], body), "{body}");
        assert_ne!(of(lines, body), of(lines, &format!("{body} ")), "{body}");
    }
}

#[test]
fn forms_count_by_their_bytes() {
    let form: &[_] = &[("content-type", "application/x-www-form-urlencoded")];
    assert_eq!(of(form, "a=1&b=2"), of(&[], "a=1&b=2"));
    assert_ne!(of(form, "a=1&b=2"), of(form, "b=2&a=1"));
}

#[test]
fn multipart_counts_without_its_boundary() {
    let body = |subtype: &str, boundary: &str, parts: &[&str]| {
        let lines = [("content-type", &*format!("multipart/{subtype}; boundary=\"{boundary}\""))];
        let body: String = parts.iter().map(|part| format!("--{boundary}\r\n{part}\r\n")).collect();
        of(&lines, &format!("{body}--{boundary}--\r\n"))
    };
    let part = "Content-Disposition: form-data; name=a\r\n\r\none";
    for subtype in ["form-data", "mixed", "related", "Mixed"] {
        let body = |boundary, parts: &[_]| body(subtype, boundary, parts);
        let one = body("x", &[part]);
        assert_eq!(body("0123456789", &[part]), one, "{subtype}");
        assert_distinct(&[
            one,
            body("x", &[]),
            body("x", &[part, part]),
            body("x", &["Content-Disposition: form-data; name=b\r\n\r\none"]),
            body("x", &["Content-Disposition: form-data; name=a\r\n\r\ntwo"]),
        ]);
    }
    let malformed = format!("--x\r\n{part}\r\n--x");
    assert_eq!(of(&[("content-type", "multipart/form-data; boundary=x")], &malformed), of(&[], &malformed));
}

#[test]
fn pointers_choose_what_counts() {
    let exclude = Recipe { exclude: pointers(&["/sent_at", "/items/0"]), ..Recipe::default() };
    let at = |recipe: &Recipe, body: &str| digest(recipe, "/", JSON, body.as_bytes());
    let one = at(&exclude, r#"{"a":1,"sent_at":5,"items":[1,2]}"#);
    assert_eq!(at(&exclude, r#"{"items":[9,2],"a":1}"#), one);
    assert_ne!(at(&exclude, r#"{"items":[9,3],"a":1}"#), one);

    let include = Recipe { include: pointers(&["/a", "/b/c"]), ..Recipe::default() };
    let one = at(&include, r#"{"a":{"y":1,"x":2},"z":3}"#);
    assert_eq!(at(&include, r#"{"a":{"x":2, "y":1},"b":[]}"#), one);
    assert_distinct(&[
        one,
        at(&include, r#"{"a":{"y":1,"x":2},"b":{"c":null}}"#),
        at(&include, r#"{"b":{"c":null}}"#),
        at(&include, r#"{"a":null}"#),
        // What has none of them counts as a whole.
        at(&include, "{}"),
        at(&include, r#"{"amount":1}"#),
        at(&include, r#"{"amount":2}"#),
        at(&include, "[1]"),
        at(&include, "no json"),
        at(&Recipe::default(), r#"{"a":{"y":1,"x":2},"z":3}"#),
    ]);

    let both = Recipe { exclude: pointers(&["/a/x"]), ..include };
    assert_eq!(at(&both, r#"{"a":{"y":1,"x":2}}"#), at(&both, r#"{"a":{"y":1}}"#));
    assert_ne!(at(&both, r#"{"a":{"y":1,"x":2}}"#), at(&both, r#"{"a":{"y":2,"x":2}}"#));
}

#[test]
fn a_body_with_nothing_that_counts_counts_as_a_whole() {
    let include = Recipe { include: pointers(&["/a"]), exclude: pointers(&["/sent_at", "/a/x"]), ..Recipe::default() };
    let at = |body: &str| digest(&include, "/", JSON, body.as_bytes());
    assert_eq!(at(r#"{"c":2,"b":1,"sent_at":1}"#), at(r#"{ "b":1, "c":2 }"#), "without what is left out");
    assert_ne!(at(r#"{"b":1}"#), at(r#"{"b":2}"#));
    assert_eq!(at(r#"{"a":{"x":1},"b":1}"#), at(r#"{"a":{"x":2},"b":2}"#), "what counts is there");
}

#[test]
fn a_recipe_knows_what_it_tells_apart() {
    let nothing = Recipe { method: false, path: false, query: false, body: false, ..Recipe::default() };
    let body = Recipe { body: true, ..nothing.clone() };
    let exclude = |texts: &[&str]| Recipe { exclude: pointers(texts), ..body.clone() };
    for (recipe, bodies, requests) in [
        (Recipe::default(), true, true),
        (nothing.clone(), false, false),
        (Recipe { path: true, ..nothing.clone() }, false, true),
        (Recipe { headers: vec![HeaderName::from_static("x-a")], ..nothing }, false, true),
        (body.clone(), true, true),
        (Recipe { form: BodyForm::None, ..body.clone() }, false, false),
        (Recipe { form: BodyForm::None, ..Recipe::default() }, false, true),
        (exclude(&["/a"]), true, true),
        (exclude(&["/a", ""]), false, false),
    ] {
        assert_eq!((recipe.tells_bodies_apart(), recipe.tells_requests_apart()), (bodies, requests), "{recipe:?}");
    }
}

#[test]
fn a_digest_stands_for_bytes() {
    let uri = "/".parse().unwrap();
    let both = |recipe: &Recipe, lines: &[(&str, &str)], bytes: &[u8]| {
        let headers = headers(lines);
        [Body::Whole(bytes), Body::Digest(sha256(bytes))]
            .map(|body| recipe.digest(Subject { method: &Method::POST, uri: &uri, headers: &headers, body }))
    };
    let multipart: &[_] = &[("content-type", "multipart/form-data; boundary=x")];
    let gzip: &[_] = &[("content-type", "application/json"), ("content-encoding", "gzip")];
    for form in BodyForm::ALL {
        let recipe = Recipe { form, ..Recipe::default() };
        for lines in [&[], JSON, multipart, gzip] {
            if !recipe.needs_whole_body(&headers(lines)) {
                let [whole, digest] = both(&recipe, lines, b"[1]");
                assert_eq!(whole, digest, "{form:?} {lines:?}");
            }
        }
    }
    let needs = |form, lines| Recipe { form, ..Recipe::default() }.needs_whole_body(&headers(lines));
    assert!(needs(BodyForm::Auto, JSON) && needs(BodyForm::Auto, multipart) && needs(BodyForm::Json, &[]));
    assert!(!needs(BodyForm::Auto, &[]) && !needs(BodyForm::Auto, gzip) && !needs(BodyForm::Bytes, JSON));
    assert!(!needs(BodyForm::Json, gzip) && !needs(BodyForm::None, JSON));
    assert!(!Recipe { body: false, ..Recipe::default() }.needs_whole_body(&headers(JSON)));
}

/// Records outlive programs: these never change.
#[test]
fn digests_are_as_they_ever_were() {
    let hex = |digest: [u8; 32]| digest.map(|byte| format!("{byte:02x}")).concat();
    let recipe = Recipe { headers: vec![HeaderName::from_static("x-a")], ..Recipe::default() };
    let json = Recipe { include: pointers(&["/a", "/b"]), ..Recipe::default() };
    let all = [
        digest(&recipe, "/v1/charges?a=b", &[("x-a", "1"), ("x-a", "2")], b"amount=1"),
        digest(&recipe, "/", JSON, br#"{"b": 1.0, "a": [true]}"#),
        digest(&json, "/", JSON, br#"{"a": [true]}"#),
        of(&[("content-type", "multipart/form-data; boundary=x")], "--x\r\n\r\none\r\n--x--\r\n"),
    ];
    let ever = [
        "360f31e7f949c6ad1bb2c40c8ff7b774a335efdb5532dc8f732316e365f9417b",
        "4e99f206194ced1d0a1e2c9cfd21ea662d36e6e59c36a0546f4bea9b3e7be6f8",
        "c35574c556bf31d5711366fa2fb89f27993a156b577deb2e8206232443a34048",
        "c4edfa47b63f3fe2befccf96aab237414a8f7ed1171e111c4a8f0e862cdbb632",
    ];
    assert_eq!(all.map(hex), ever);
}

#[test]
fn words_survive() {
    for form in BodyForm::ALL {
        assert_eq!(BodyForm::parse(form.as_str()), Ok(form));
    }
    assert!(BodyForm::parse("JSON").is_err());
}

#[test]
fn how_a_body_counts_is_told() {
    let recipe = |form, include: &[&str]| Recipe { form, include: pointers(include), ..Recipe::default() };
    let auto = recipe(BodyForm::Auto, &[]);
    let multipart = &[("content-type", "multipart/form-data; boundary=b")];
    let coded = &[("content-type", "application/json"), ("content-encoding", "gzip")];
    let deep = format!("{}{}", "[".repeat(500), "]".repeat(500));
    for (recipe, lines, body, counted) in [
        (&auto, JSON, "{}", BodyComparison::Json),
        (&auto, JSON, "{", BodyComparison::Bytes(BytewiseReason::Malformed)),
        (&auto, JSON, "", BodyComparison::Bytes(BytewiseReason::Malformed)),
        (&auto, JSON, "{\"a\":1,\"a\":2}", BodyComparison::Bytes(BytewiseReason::Ambiguous)),
        (&auto, JSON, &*deep, BodyComparison::Bytes(BytewiseReason::TooDeep)),
        (&auto, coded, "{}", BodyComparison::Bytes(BytewiseReason::Coded)),
        (&auto, &[], "{}", BodyComparison::Bytes(BytewiseReason::Type)),
        (&auto, multipart, "--b--", BodyComparison::Multipart),
        (&auto, multipart, "--c--", BodyComparison::Bytes(BytewiseReason::Malformed)),
        (&auto, &[("content-type", "multipart/mixed")], "", BodyComparison::Bytes(BytewiseReason::NoBoundary)),
        (&recipe(BodyForm::Json, &[]), &[], "{}", BodyComparison::Json),
        (&recipe(BodyForm::Bytes, &[]), JSON, "{}", BodyComparison::Bytes(BytewiseReason::Asked)),
        (&recipe(BodyForm::None, &[]), JSON, "{}", BodyComparison::None),
        (&Recipe { body: false, ..Recipe::default() }, JSON, "{}", BodyComparison::None),
        (&recipe(BodyForm::Auto, &["/a", "/b"]), JSON, "{\"b\":1}", BodyComparison::JsonParts),
        (&recipe(BodyForm::Auto, &["/a"]), JSON, "{\"b\":1}", BodyComparison::Json),
    ] {
        assert_eq!(recipe.counted(&headers(lines), body.as_bytes()), counted, "{recipe:?} {body}");
    }
    let [there, missing] = ["/a/0", "/a/1"].map(|text| stands_at(&Pointer::parse(text).unwrap(), b"{\"a\":[null]}"));
    assert!(there && !missing);
}
