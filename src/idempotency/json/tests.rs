use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn pointers(texts: &[&str]) -> Vec<Pointer> {
    texts.iter().map(|text| Pointer::parse(text).unwrap()).collect()
}

fn form(text: &str) -> Result<String, Fault> {
    without(text, &[])
}

fn without(text: &str, exclude: &[&str]) -> Result<String, Fault> {
    canonical(text.as_bytes(), &pointers(exclude)).map(|form| String::from_utf8(form).unwrap())
}

fn at(text: &str, pointer: &str) -> Result<Option<String>, Fault> {
    let found = locate(text.as_bytes(), &Pointer::parse(pointer).unwrap())?;
    Ok(found.map(|found| String::from_utf8(found.to_vec()).unwrap()))
}

#[test]
fn the_canonical_form() {
    for (text, canonical) in [
        (" { } ", "{}"),
        ("[ ]", "[]"),
        ("\t[ 1 , 2,3 ]\r\n", "[1,2,3]"),
        (r#"{"b":1,"a":{"d":[],"c":null}}"#, r#"{"a":{"c":null,"d":[]},"b":1}"#),
        (r#"{"":0}"#, r#"{"":0}"#),
        // Prefixes come first, whatever quote and colon stand behind them.
        (r#"{"a!":1,"a":2}"#, r#"{"a":2,"a!":1}"#),
        // Number literals stay.
        ("[0,-0,1.0,1.00,1e3,1E+3,10000000000000000000001]", "[0,-0,1.0,1.00,1e3,1E+3,10000000000000000000001]"),
        ("true", "true"),
        // Strings count by value.
        (r#""a\/b\u0041\u00e9\"\\\u0022\u005c""#, r#""a/bAé\"\\\"\\""#),
        (r#""\u000A\n\u0008\u001f\u001F\u007f""#, "\"\\n\\n\\b\\u001f\\u001f\u{7f}\""),
        (r#""\ud83d\ude00""#, "\"😀\""),
        (r#""\uD83D x \uDE00 \ude00\ud83d""#, r#""\ud83d x \ude00 \ude00\ud83d""#),
        (r#""\ud83d\ud83d\ude00""#, "\"\\ud83d😀\""),
        (r#""\ud83d\n""#, r#""\ud83d\n""#),
    ] {
        assert_eq!(form(text).as_deref(), Ok(canonical), "{text}");
    }
}

#[test]
fn what_is_not_json_is_told() {
    for text in [
        "",
        " ",
        "{",
        "[",
        "[1",
        "[1,",
        "[1,]",
        "[,1]",
        "[1 2]",
        "{,}",
        r#"{"a"}"#,
        r#"{"a":}"#,
        r#"{"a":1,}"#,
        "{a:1}",
        "{1:1}",
        "]",
        "[}",
        "[1]]",
        "1 2",
        "tru",
        "truex",
        "nul",
        "True",
        "NaN",
        "'a'",
        "\"",
        "\"a",
        r#""\x""#,
        r#""\u12""#,
        r#""\u12g4""#,
        "\"\n\"",
        "\"\u{1}\"",
        r#""\ud83d\u""#,
        r#""\"#,
        "01",
        "-",
        "+1",
        "1.",
        ".5",
        "1e",
        "1e+",
        "-01",
        "0x1",
        "\u{feff}1",
        "//",
        "1//",
        "\u{a0}1",
    ] {
        assert_eq!(form(text), Err(Fault::Syntax), "{text:?}");
        assert_eq!(at(text, ""), Err(Fault::Syntax), "{text:?}");
        assert_eq!(at(text, "/a"), Err(Fault::Syntax), "{text:?}");
    }
    assert_eq!(canonical(b"\"\xff\"", &[]), Err(Fault::Syntax));
}

#[test]
fn names_that_stand_twice_are_told() {
    for text in [r#"{"a":1,"a":1}"#, r#"[{"a":1,"b":2,"\u0061":1}]"#] {
        assert_eq!(form(text), Err(Fault::Ambiguous), "{text}");
    }
    assert_eq!(without(r#"{"a":1,"a":2}"#, &["/a"]), Err(Fault::Ambiguous));
    assert_eq!(form(r#"{"a":{"a":1},"b":{"a":1}}"#).as_deref(), Ok(r#"{"a":{"a":1},"b":{"a":1}}"#));
}

#[test]
fn nesting_has_an_end() {
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    assert_eq!(form(&nested(64)), Ok(nested(64)));
    assert_eq!(form(&nested(65)), Err(Fault::TooDeep));
    assert_eq!(form(&"[".repeat(1_000_000)), Err(Fault::TooDeep));
    assert_eq!(form(&"{\"a\":".repeat(1_000_000)), Err(Fault::TooDeep));
    assert_eq!(at(&"[".repeat(1_000_000), "/0/0"), Err(Fault::TooDeep));
    assert_eq!(at(&"[".repeat(1_000_000), ""), Err(Fault::TooDeep));
}

#[test]
fn excluded_parts_do_not_count() {
    let text = r#"{"b":{"x":1,"y":[1,{"z":2},3]},"a":{"x":5},"~/\n":6}"#;
    for (exclude, left) in [
        (&["/b"][..], r#"{"a":{"x":5},"~/\n":6}"#),
        (&["/b/x", "/a", "/~0~1\n"], r#"{"b":{"y":[1,{"z":2},3]}}"#),
        (&["/b/y/1", "/a", "/b/x"], r#"{"b":{"y":[1,null,3]},"~/\n":6}"#),
        (&["/b/y/1/z", "/b/y/01", "/b/y/3", "/c", "/a/x/y"], r#"{"a":{"x":5},"b":{"x":1,"y":[1,{},3]},"~/\n":6}"#),
        (&["/a", "/b", "/~0~1\n"], "{}"),
        (&["/a/x", "/a", "/b"], r#"{"~/\n":6}"#),
        (&[""], "null"),
    ] {
        assert_eq!(without(text, exclude).as_deref(), Ok(left), "{exclude:?}");
    }
    assert_eq!(without("5", &["/a"]).as_deref(), Ok("5"));
    assert_eq!(without(r#"{"a":[}"#, &["/a"]), Err(Fault::Syntax));
}

#[test]
fn pointers_lead_to_values() {
    let text = r#" {"a": [1, {"b\u0063" : "x"} ], "": {"/": null}, "0":7} "#;
    for (pointer, value) in [
        ("", Some(text.trim())),
        ("/a", Some(r#"[1, {"b\u0063" : "x"} ]"#)),
        ("/a/0", Some("1")),
        ("/a/1/bc", Some("\"x\"")),
        ("//~1", Some("null")),
        ("/0", Some("7")),
        ("/a/2", None),
        ("/a/00", None),
        ("/a/-", None),
        ("/b", None),
        ("/a/0/x", None),
        ("/a/1/bc/0", None),
    ] {
        assert_eq!(at(text, pointer).unwrap().as_deref(), value, "{pointer}");
    }
    assert_eq!(at(r#"{"a":1,"b":2,"a":1}"#, "/a"), Err(Fault::Ambiguous));
    assert_eq!(at(r#"{"a":1,"b":2,"a":1}"#, "/b").unwrap().as_deref(), Some("2"));
}

#[test]
fn strings_have_values() {
    assert_eq!(
        string(br#""a\u00e9\ud83d\ude00\ud83d""#).unwrap(),
        "aé😀".bytes().chain(*b"\xed\xa0\xbd").collect::<Vec<_>>()
    );
    assert_eq!(string(b"5"), None);
}

/// Any JSON text, with names in random order, random white space and random escapes; written in two ways.
fn written_twice() -> impl Strategy<Value = (String, String)> {
    let leaf = prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        // With exponents as serde_json writes them, so that it changes no literal.
        "-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,3})?(e[+-][0-9]{1,2})?",
    ]
    .prop_map(|literal| (literal.clone(), literal));
    let text = || proptest::collection::vec((any::<char>(), any::<bool>(), any::<bool>()), 0..4);
    let leaf = prop_oneof![leaf, text().prop_map(|chars| (quote(&chars, 0), quote(&chars, 1)))];
    leaf.prop_recursive(4, 40, 5, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(|items| {
                let (one, other): (Vec<_>, Vec<_>) = items.into_iter().unzip();
                (format!("[{}]", one.join(",")), format!("[ {}\n]", other.join(" ,\t")))
            }),
            proptest::collection::vec((text(), inner), 0..5).prop_map(|mut members| {
                let name = |chars: &[(char, bool, bool)]| chars.iter().map(|&(char, ..)| char).collect::<String>();
                members.sort_by_key(|(chars, _)| name(chars));
                members.dedup_by_key(|(chars, _)| name(chars));
                let one: Vec<_> = members.iter().map(|(name, (one, _))| format!("{}:{one}", quote(name, 0))).collect();
                let other: Vec<_> =
                    members.iter().rev().map(|(name, (_, other))| format!("{} :\r{other}", quote(name, 1))).collect();
                (format!("{{{}}}", one.join(",")), format!("{{\t{} }}", other.join(", ")))
            }),
        ]
    })
}

/// Writes a string, escaping the characters that are marked for this way of writing.
fn quote(chars: &[(char, bool, bool)], way: usize) -> String {
    let mut out = "\"".to_owned();
    for &(char, one, other) in chars {
        if [one, other][way] || matches!(char, '"' | '\\' | '\0'..' ') {
            for unit in char.encode_utf16(&mut [0; 2]) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            out.push(char);
        }
    }
    out + "\""
}

proptest! {
    #[test]
    fn ways_of_writing_do_not_count((one, other) in written_twice()) {
        let canonical = form(&one).unwrap();
        prop_assert_eq!(&form(&other).unwrap(), &canonical);
        prop_assert_eq!(&form(&canonical).unwrap(), &canonical);
        prop_assert_eq!(serde_json::from_str::<Value>(&canonical).unwrap(), serde_json::from_str::<Value>(&one).unwrap());
        prop_assert!(canonical.len() <= one.len().min(other.len()));
    }

    #[test]
    fn values_count((one, _) in written_twice(), (other, _) in written_twice()) {
        let (one, other) = (format!("[{one}]"), format!("[{other}]"));
        // Numbers are compared by their literals in both.
        let equal = serde_json::from_str::<Value>(&one).unwrap() == serde_json::from_str::<Value>(&other).unwrap();
        if form(&one) == form(&other) {
            prop_assert!(equal);
        }
    }

    #[test]
    fn what_counts_as_json_is_what_others_read(text in r#"([\[\]{},:" \-+.eE0-9au\\]|"a":|"b"|null|\\u0041){0,12}"#) {
        prop_assert_eq!(at(&text, "").is_ok(), serde_json::from_str::<Value>(&text).is_ok());
        if let Ok(canonical) = form(&text) {
            prop_assert_eq!(form(&canonical), Ok(canonical));
        }
    }

    #[test]
    fn no_bytes_are_too_odd(text in proptest::collection::vec(any::<u8>(), 0..64)) {
        let _ = canonical(&text, &pointers(&["/a/0"]));
        let _ = locate(&text, &Pointer::parse("/a/0").unwrap());
        let _ = string(&text);
    }

    #[test]
    fn a_literal_counts((one, _) in written_twice(), at in any::<prop::sample::Index>(), other in "[b-y]{2}") {
        let mut value: Value = serde_json::from_str(&one).unwrap();
        let places = places(&value);
        let place = value.pointer_mut(&places[at.index(places.len())]).unwrap();
        // What is generated holds neither such a number nor, but for chance, such a text.
        let changed = if place.is_number() { Value::from(-77.125) } else { Value::from(other) };
        if *place != changed {
            *place = changed;
            prop_assert_ne!(form(&value.to_string()), form(&one));
        }
    }

    #[test]
    fn pointers_lead_to_the_same_in_every_way_of_writing((one, other) in written_twice(), at in any::<prop::sample::Index>()) {
        let mut value: Value = serde_json::from_str(&one).unwrap();
        let places = places(&value);
        let pointer = places[at.index(places.len())].as_str();
        let found = form(&value.pointer(pointer).unwrap().to_string()).unwrap();
        for text in [&one, &other, &form(&one).unwrap()] {
            prop_assert_eq!(form(&super::tests::at(text, pointer).unwrap().unwrap()), Ok(found.clone()), "{}", text);
        }

        // Excluded members are as if they had never been present.
        leave_out(&mut value, pointer);
        let left = form(&value.to_string());
        for text in [&one, &other, &form(&one).unwrap()] {
            prop_assert_eq!(without(text, &[pointer]), left.clone(), "{}", text);
            prop_assert_eq!(without(text, &[pointer, pointer, "/nowhere/0"]), left.clone(), "{}", text);
        }
    }

    #[test]
    fn a_name_that_stands_twice_is_told_wherever_it_stands(
        (one, _) in written_twice(), name in "[a-c]", steps in prop::collection::vec(any::<bool>(), 0..6), escaped: bool,
    ) {
        let again = if escaped { format!("\\u{:04x}", u32::from(name.as_bytes()[0])) } else { name.clone() };
        let mut text = format!(r#"{{"{name}":{one},"x":1,"{again}":{one}}}"#);
        for is_member in steps {
            text = if is_member { format!(r#"{{"b":0,"a":{text}}}"#) } else { format!("[1, {text}]") };
        }
        prop_assert_eq!(form(&text), Err(Fault::Ambiguous));
    }

    #[test]
    fn bombs_are_told_before_the_stack_ends(
        layers in prop::collection::vec(prop::sample::select(&["[", "{\"a\":", "[0,", "{\"b\":0,\"a\":"][..]), 1..90),
        times in prop_oneof![4 => Just(1_usize), 1 => Just(500)],
    ) {
        let open = layers.concat().repeat(times);
        let depth = layers.len() * times;
        let closing = open.bytes().rev().filter_map(|byte| match byte {
            b'[' => Some("]"),
            b'{' => Some("}"),
            _ => None,
        });
        let whole = format!("{open}0{}", closing.collect::<String>());
        let expected = if depth <= 64 { Ok(()) } else { Err(Fault::TooDeep) };
        prop_assert_eq!(form(&whole).map(drop), expected);
        prop_assert_eq!(at(&whole, "/a/0/a").map(drop), expected);
        prop_assert_eq!(at(&whole, "/nowhere").map(drop), expected);
        prop_assert_eq!(without(&whole, &["/a", "/0", "/1"]).map(drop), expected);
        let unclosed = if depth <= 64 { Fault::Syntax } else { Fault::TooDeep };
        prop_assert_eq!(form(&open), Err(unclosed));
    }
}

/// The pointers to every part of a value, the whole first.
fn places(value: &Value) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut below = |step: &str, value: &Value| {
        let step = step.replace('~', "~0").replace('/', "~1");
        all.extend(places(value).into_iter().map(|rest| format!("/{step}{rest}")));
    };
    match value {
        Value::Array(items) => items.iter().enumerate().for_each(|(index, item)| below(&index.to_string(), item)),
        Value::Object(members) => members.iter().for_each(|(name, member)| below(name, member)),
        _ => {}
    }
    all
}

/// Takes a member out, and puts `null` in the place of an element.
fn leave_out(value: &mut Value, pointer: &str) {
    let Some((above, last)) = pointer.rsplit_once('/') else {
        *value = Value::Null;
        return;
    };
    match value.pointer_mut(above).unwrap() {
        Value::Object(members) => drop(members.remove(&last.replace("~1", "/").replace("~0", "~"))),
        _ => *value.pointer_mut(pointer).unwrap() = Value::Null,
    }
}
