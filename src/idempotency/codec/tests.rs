use proptest::prelude::*;

use super::*;

fn fields() -> impl Strategy<Value = Vec<(HeaderName, HeaderValue)>> {
    let value = proptest::collection::vec(prop_oneof![0x20..0x7fu8, 0x80..=0xffu8, Just(b'\t')], 0..12);
    proptest::collection::vec(
        ("[a-z][a-z0-9-]{0,8}", value)
            .prop_map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_bytes(&value).unwrap())),
        0..4,
    )
}

fn answer() -> impl Strategy<Value = Answer> {
    let bytes = || proptest::collection::vec(any::<u8>(), 0..20).prop_map(Bytes::from);
    let content = (bytes(), fields()).prop_map(|(body, trailers)| Content { body, trailers });
    (100..1000u16, proptest::option::of(bytes()), fields(), proptest::option::of(content)).prop_map(
        |(status, reason, headers, content)| Answer {
            status: StatusCode::from_u16(status).unwrap(),
            reason,
            headers,
            content,
        },
    )
}

fn head() -> impl Strategy<Value = Head> {
    let pointers = || {
        proptest::collection::vec("(/([a-z]|~0|~1|é){0,3}){0,3}", 0..3)
            .prop_map(|texts| texts.iter().map(|text| Pointer::parse(text).unwrap()).collect())
    };
    let recipe = (
        any::<[bool; 4]>(),
        proptest::collection::vec("[a-z]{1,8}".prop_map(|name| name.parse().unwrap()), 0..3),
        proptest::sample::select(&BodyForm::ALL[..]),
        pointers(),
        pointers(),
    )
        .prop_map(|([method, path, query, body], headers, form, include, exclude)| Recipe {
            method,
            path,
            query,
            body,
            headers,
            form,
            include,
            exclude,
        });
    let proof = proptest::option::of(any::<[u8; 32]>().prop_map(Proof));
    (recipe, any::<([u8; 32], bool)>(), proof, "[A-Z]{1,12}", "/\\PC{0,20}", "[!-~]{1,255}", details::tests::details())
        .prop_map(|(recipe, (digest, is_keyed), proof, method, path, key, details)| {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            let key = Key::from_value(key.as_bytes(), 255).unwrap();
            let head = Head::new(Fingerprint { recipe, digest }, method, &path, &key);
            head.with_keyed_digest(is_keyed.then_some(digest)).with_proof(proof).with_details(&details)
        })
}

/// As in a record that was damaged: the next answer on the connection would be taken for the rest of this one.
#[test]
fn a_body_of_another_length_than_the_answer_announces_is_unreadable() {
    let answer = |length: &'static str, body: &'static str| Answer {
        status: StatusCode::OK,
        reason: None,
        headers: vec![(CONTENT_LENGTH, HeaderValue::from_static(length))],
        content: Some(Content { body: Bytes::from_static(body.as_bytes()), trailers: Vec::new() }),
    };
    for length in ["4", "6", "x5", "55", "-5", "+5"] {
        assert!(Answer::decode(&answer(length, "12345").encode()).is_err(), "{length}");
    }
    // The second is one to HEAD.
    for answer in [answer("5", "12345"), answer("5", "")] {
        assert_eq!(Answer::decode(&answer.encode()).as_ref(), Ok(&answer));
    }
}

/// What has been changed at one place, cut off or added to.
fn damaged(bytes: &Bytes, at: prop::sample::Index, byte: u8) -> [Bytes; 3] {
    let at = at.index(bytes.len());
    let mut changed = bytes.to_vec();
    changed[at] = byte;
    [changed.into(), bytes.slice(..at), [bytes, &[byte][..]].concat().into()]
}

proptest! {
    #[test]
    fn answers_survive(answer in answer()) {
        prop_assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
    }

    #[test]
    fn heads_survive(head in head()) {
        prop_assert_eq!(Head::decode(&head.encode()), Ok(head));
    }

    #[test]
    fn details_make_no_other_request(head in head(), other in head(), details in details::tests::details()) {
        let with = |details: &Details| head.clone().with_details(details).encode();
        prop_assert!(is_same_request(&head.encode(), &with(&details)));
        prop_assert!(is_same_request(&with(&details), &with(&Details::default())));
        let decisive = |head: &Head| (head.fingerprint.clone(), head.is_keyed, head.proof, head.method.clone());
        let is_other = decisive(&other) != decisive(&head);
        prop_assert_eq!(is_same_request(&head.encode(), &other.encode()), !is_other);
    }

    #[test]
    fn damaged_answers_do_no_harm(answer in answer(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        for bytes in damaged(&answer.encode(), at, byte) {
            if let Ok(read) = Answer::decode(&bytes) {
                let _ = read.encode();
            }
        }
    }

    #[test]
    fn a_flipped_bit_or_a_cut_changes_no_more_than_it_can(answer in answer()) {
        let bytes = answer.encode();
        for end in 0..bytes.len() {
            // Only a body may end anywhere.
            if let Ok(read) = Answer::decode(&bytes.slice(..end)) {
                let whole = answer.content.as_ref().map(|content| &content.body[..]).unwrap_or_default();
                let body = read.content.as_ref().map(|content| content.body.clone()).unwrap_or_default();
                prop_assert!(whole.starts_with(&body) && body.len() + bytes.len() - end == whole.len());
                prop_assert_eq!((&read.headers, &read.reason, read.status), (&answer.headers, &answer.reason, answer.status));
            }
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            match Answer::decode(&flipped.into()) {
                // Names have one case, and this bit changes a letter's.
                Ok(read) if bit % 8 == 5 => prop_assert_eq!(read.encode().len(), bytes.len()),
                Ok(read) => prop_assert_ne!(read, answer.clone()),
                Err(Unreadable) => {}
            }
        }
        for version in (0..=255).filter(|version| *version != VERSION) {
            let other = [&[version], &bytes[1..]].concat();
            prop_assert_eq!(Answer::decode(&other.into()), Err(Unreadable));
        }
    }

    #[test]
    fn damaged_heads_do_no_harm(head in head(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let [changed, cut, longer] = damaged(&head.encode(), at, byte);
        if let Ok(read) = Head::decode(&changed) {
            let _ = read.encode();
        }
        prop_assert_eq!(Head::decode(&cut), Err(Unreadable));
        prop_assert_eq!(Head::decode(&longer), Err(Unreadable));
    }

    #[test]
    fn no_bytes_are_too_odd(mut bytes in proptest::collection::vec(any::<u8>(), 0..80), plain in any::<bool>()) {
        if plain && bytes.len() > 2 {
            bytes[..2].copy_from_slice(&[VERSION, PLAIN]);
        }
        let bytes = Bytes::from(bytes);
        let _ = Head::decode(&bytes);
        let _ = Answer::decode(&bytes);
    }
}

fn small() -> Answer {
    Answer {
        status: StatusCode::CREATED,
        reason: Some(Bytes::from_static(b"Done")),
        headers: vec![(HeaderName::from_static("a"), HeaderValue::from_static("b"))],
        content: Some(Content { body: Bytes::from_static(b"body"), trailers: vec![] }),
    }
}

/// Records outlive programs: this never changes.
#[test]
fn the_layout_is_as_it_ever_was() {
    let bytes = small().encode();
    assert_eq!(&bytes[..], b"\x01\x00\x00\xc9\x01\0\0\0\x04Done\0\0\0\x01\0\0\0\x01a\0\0\0\x01b\x01\0\0\0\0body");
    let tombstone = Answer { reason: None, content: None, ..small() };
    assert_eq!(&tombstone.encode()[..], b"\x01\x00\x00\xc9\x00\0\0\0\x01\0\0\0\x01a\0\0\0\x01b\x00");
    let recipe = Recipe { exclude: vec![Pointer::parse("/t").unwrap()], ..Recipe::default() };
    let fingerprint = Fingerprint { recipe, digest: [7; 32] };
    let head = Head::new(fingerprint, Method::POST, "/p", &Key::parse("abcdefgh", 255).unwrap());
    let recipe = b"\x01\x0f\x00\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\x02/t";
    let rest = "\0\0\0\x04POST\0\0\0\x02/p\0\0\0\x07ab…gh".as_bytes();
    assert_eq!(head.encode(), [&b"\x01\x00"[..], recipe, &[7; 32], rest].concat());
    let (head_of_layout, proven) = (head.clone(), head.with_proof(Some(Proof([9; 32]))));
    assert_eq!(proven.encode(), [&b"\x02\x00"[..], recipe, &[7; 32], &[9; 32], rest].concat());
    let details = Details { upstream: Some("a".to_owned()), ..Details::default() };
    let detailed = head_of_layout.with_details(&details);
    let begin = &b"\x03\x00\0\0\0\x03\x03\x01a"[..];
    assert_eq!(detailed.encode(), [begin, b"\x01\x00", recipe, &[7; 32], rest].concat());
    let both = proven.with_details(&details);
    assert_eq!(both.encode(), [begin, b"\x02\x00", recipe, &[7; 32], &[9; 32], rest].concat());
}

#[test]
fn other_formats_are_unreadable() {
    let bytes = small().encode();
    for (at, value) in [(0, 0), (0, 2), (1, 1), (1, 255)] {
        let mut other = bytes.to_vec();
        other[at] = value;
        assert_eq!(Answer::decode(&other.into()), Err(Unreadable));
    }
    assert_eq!(Answer::decode(&Bytes::new()), Err(Unreadable));
    let fingerprint = Fingerprint { recipe: Recipe::default(), digest: [0; 32] };
    let head = Head::new(fingerprint, Method::POST, "/", &Key::parse("k", 255).unwrap());
    let details = Details { caller: Some([1; 8]), ..Details::default() };
    let proven = head.clone().with_proof(Some(Proof([9; 32])));
    for head in [head, proven.clone(), proven.with_details(&details)] {
        let bytes = head.encode();
        // A digest looks the same whether it is keyed or not.
        let keyed = if bytes[0] == WITH_DETAILS { bytes[0] } else { bytes[0] + KEYED };
        for version in (0..=255).filter(|version| ![bytes[0], keyed].contains(version)) {
            let other = [&[version], &bytes[1..]].concat();
            assert_eq!(Head::decode(&other.into()), Err(Unreadable), "{version}");
        }
    }
}

#[test]
fn a_length_that_lies_costs_nothing() {
    // Four billion headers, in ten bytes.
    let bytes = Bytes::from_static(b"\x01\x00\x00\xc9\x00\xff\xff\xff\xff\x00");
    assert_eq!(Answer::decode(&bytes), Err(Unreadable));
}

#[test]
fn more_headers_than_can_be_replayed_are_unreadable() {
    let line = |number: usize| (format!("x-{number}").parse().unwrap(), HeaderValue::from_static(""));
    let with = |count: usize| Answer { headers: (0..count).map(line).collect(), ..small() };
    assert_eq!(Answer::decode(&with(MAX_FIELDS).encode()), Ok(with(MAX_FIELDS)));
    assert_eq!(Answer::decode(&with(MAX_FIELDS + 1).encode()), Err(Unreadable));
    let content = Content { body: Bytes::new(), trailers: with(MAX_FIELDS + 1).headers };
    assert_eq!(Answer::decode(&Answer { content: Some(content), ..small() }.encode()), Err(Unreadable));
}

#[test]
fn the_body_shares_memory() {
    let bytes = small().encode();
    let body = Answer::decode(&bytes).unwrap().content.unwrap().body;
    assert!(bytes.as_ptr_range().contains(&body.as_ptr()));
}

#[test]
fn a_long_path_is_cut_between_characters() {
    let fingerprint = Fingerprint { recipe: Recipe::default(), digest: [0; 32] };
    let key = Key::parse("k", 255).unwrap();
    let head = |path: &str| Head::new(fingerprint.clone(), Method::POST, path, &key).path;
    assert_eq!(head(&"a".repeat(300)), "a".repeat(256));
    assert_eq!(head(&format!("a{}", "é".repeat(200))), format!("a{}", "é".repeat(127)));
    assert_eq!(head("/a"), "/a");
}
