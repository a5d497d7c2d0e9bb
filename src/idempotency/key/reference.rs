//! A second reading of the key header, by the words of the standard, for properties and the fuzz target to compare.

/// The key that a field's value holds, if it holds one of at most `max_length` characters.
pub(super) fn key(field: &[u8], max_length: usize) -> Option<String> {
    let text = std::str::from_utf8(field).ok()?.trim_matches([' ', '\t', '\n', '\r', '\u{c}']);
    let key = match text.strip_prefix('"') {
        Some(rest) => sf_string(rest)?,
        None if text.contains(['"', '\\', ',', ';']) => return None,
        None => text.to_owned(),
    };
    let is_key = !key.is_empty() && key.len() <= max_length && key.chars().all(|char| ('!'..='~').contains(&char));
    is_key.then_some(key)
}

/// The rest of an `sf-string` behind its first quote, and nothing behind it: RFC 9651, section 4.2.5.
fn sf_string(rest: &str) -> Option<String> {
    let mut output = String::new();
    let mut input = rest.chars();
    loop {
        match input.next()? {
            '\\' => match input.next()? {
                escaped @ ('"' | '\\') => output.push(escaped),
                _ => return None,
            },
            '"' => return input.as_str().is_empty().then_some(output),
            '\u{0}'..='\u{1f}' | '\u{7f}'.. => return None,
            char => output.push(char),
        }
    }
}
