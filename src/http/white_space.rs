//! White space around the values of fields, which HTTP/2 does not allow and HTTP/1.1 takes away (RFC 9113, 8.2.1).

use http::{HeaderMap, HeaderValue};

/// Whether a value has white space around it.
pub(super) fn is_padded(value: &HeaderValue) -> bool {
    let is_space = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    is_space(value.as_bytes().first()) || is_space(value.as_bytes().last())
}

/// Fields without white space around their values.
pub(super) fn trimmed(mut fields: HeaderMap) -> HeaderMap {
    for value in fields.values_mut().filter(|value| is_padded(value)) {
        if let Ok(bare) = HeaderValue::from_bytes(value.as_bytes().trim_ascii()) {
            *value = bare;
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_goes_and_nothing_else() {
        for (value, bare) in [(" a b\t", "a b"), ("\ta", "a"), (" ", ""), ("a", "a"), ("", "")] {
            let value = HeaderValue::from_static(value);
            assert_eq!(is_padded(&value), value != bare, "{value:?}");
            assert_eq!(trimmed(HeaderMap::from_iter([(http::header::VIA, value)]))["via"], bare);
        }
    }
}
