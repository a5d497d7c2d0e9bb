use http::HeaderValue;
use proptest::prelude::*;

use super::*;

fn read(field: &[u8], max_length: usize) -> Option<String> {
    Key::from_field(field, max_length).ok().map(|key| key.as_str().to_owned())
}

fn quoted(key: &str) -> String {
    format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Values that are keys, almost keys, and anything.
fn field() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        "[!-~]{0,12}".prop_map(String::into_bytes),
        "[!-~]{0,12}".prop_map(|key| quoted(&key).into_bytes()),
        "[ \t]?\"?[ab\"\\\\,; \t\u{7f}é]{0,8}\"?[ \t]?".prop_map(String::into_bytes),
        proptest::collection::vec(any::<u8>(), 0..16),
    ]
}

proptest! {
    #[test]
    fn it_is_read_as_the_standard_says(field in field(), max_length in 1..14usize) {
        prop_assert_eq!(read(&field, max_length), super::reference::key(&field, max_length));
    }

    #[test]
    fn what_is_read_survives_in_either_form(field in field()) {
        if let Some(key) = read(&field, 255) {
            prop_assert_eq!(read(quoted(&key).as_bytes(), 255), Some(key.clone()));
            prop_assert_eq!(read(format!(" \t{}\t ", quoted(&key)).as_bytes(), 255), Some(key.clone()));
            if !key.contains(['"', '\\', ',', ';']) {
                prop_assert_eq!(read(key.as_bytes(), 255), Some(key.clone()));
            }
            prop_assert!(read(&field, key.len() - 1).is_none(), "one less is too long");
        }
    }

    #[test]
    fn lists_parameters_spaces_and_other_scripts_are_no_keys(
        one in "[!-~&&[^\"\\\\,;]]{1,9}", other in "[!-~&&[^\"\\\\,;]]{1,9}", quotes: bool,
        odd in prop_oneof![Just(' '), Just('\t'), Just('\u{7f}'), prop::char::range('\0', '\u{1f}'), prop::char::range('\u{80}', '\u{10ffff}')],
    ) {
        let member = |key: &str| if quotes { quoted(key) } else { key.to_owned() };
        let (first, second) = (member(&one), member(&other));
        let more = [
            format!("{first},{second}"),
            format!("{first}, {second}"),
            format!("{first};{other}"),
            format!("{first};{other}={second}"),
            format!("{first} ;{other}=?1"),
            member(&format!("{one}{odd}{other}")),
            format!("{}{odd}", &first[..first.len() - usize::from(quotes)]) + &second,
            format!("({first})") + if quotes { "" } else { "," },
        ];
        for field in more {
            prop_assert_eq!(read(field.as_bytes(), 255), None, "{:?}", field);
        }
    }

    #[test]
    fn two_lines_are_no_key(one in "[!-~&&[^\"\\\\,;]]{1,9}", other in "[!-~]{0,9}") {
        let name = HeaderName::from_static("idempotency-key");
        let lines = [one, other].map(|line| (name.clone(), HeaderValue::from_str(&line).unwrap()));
        let headers = HeaderMap::from_iter(lines);
        prop_assert_eq!(headers.get_all(&name).iter().count(), 2);
        prop_assert!(KeyRule::default().find(&Uri::from_static("/"), &headers, None).is_err());
    }
}
