//! Multipart bodies (RFC 2046, section 5.1.1) without their boundary: clients draw a new one for every retry.

/// Splits a body into its preamble, its parts (each with its headers) and its epilogue. Nothing where it is malformed:
/// such a body is compared byte for byte.
pub(super) fn split<'a>(body: &'a [u8], boundary: &[u8]) -> Option<Vec<&'a [u8]>> {
    if boundary.is_empty() || boundary.len() > 70 {
        return None;
    }
    let dashed = [b"--", boundary].concat();
    let mut pieces = Vec::new();
    let mut rest = match body.strip_prefix(&*dashed) {
        Some(rest) => {
            pieces.push(&body[..0]);
            rest
        }
        None => cut(body, &dashed, &mut pieces)?,
    };
    loop {
        if let Some(end) = rest.strip_prefix(b"--") {
            let epilogue = padding(end);
            if !epilogue.is_empty() && !epilogue.starts_with(b"\r\n") {
                return None;
            }
            pieces.push(epilogue);
            return Some(pieces);
        }
        rest = cut(padding(rest).strip_prefix(b"\r\n")?, &dashed, &mut pieces)?;
    }
}

/// Takes what stands before the next line that starts with `dashed`, and returns what follows that start.
fn cut<'a>(text: &'a [u8], dashed: &[u8], pieces: &mut Vec<&'a [u8]>) -> Option<&'a [u8]> {
    let mut at = 0;
    loop {
        at += text[at..].iter().position(|&byte| byte == b'\r')?;
        if let Some(rest) = text[at..].strip_prefix(b"\r\n").and_then(|line| line.strip_prefix(dashed)) {
            pieces.push(&text[..at]);
            return Some(rest);
        }
        at += 1;
    }
}

/// Skips the white space that a transport may have put behind a boundary.
fn padding(text: &[u8]) -> &[u8] {
    let end = text.iter().position(|byte| !matches!(byte, b' ' | b'\t')).unwrap_or(text.len());
    &text[end..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(body: &str, boundary: &str) -> Option<Vec<String>> {
        let pieces = split(body.as_bytes(), boundary.as_bytes())?;
        Some(pieces.into_iter().map(|piece| String::from_utf8(piece.to_vec()).unwrap()).collect())
    }

    #[test]
    fn parts_come_with_their_headers() {
        let body = "--b\r\nA: 1\r\n\r\none\r\n--b  \r\n\r\ntwo\r\n\r\n--b--\r\n";
        assert_eq!(texts(body, "b").unwrap(), ["", "A: 1\r\n\r\none", "\r\ntwo\r\n", "\r\n"]);
        assert_eq!(texts("pre\r\n--b\r\nx\r\n--b--", "b").unwrap(), ["pre", "x", ""]);
        assert_eq!(texts("--b--", "b").unwrap(), ["", ""]);
    }

    #[test]
    fn what_is_malformed_is_not_split() {
        for body in [
            "",
            "x",
            "--b",
            "--b\r\nx",
            "--b\r\nx\r\n--b\r\n",
            "--b\r\nx\r\n--bc\r\n--b--",
            "--b\nx\n--b--",
            "--b\r\nx\r\n--b--x",
            "--bx\r\n--b--",
        ] {
            assert_eq!(texts(body, "b"), None, "{body:?}");
        }
        assert_eq!(texts("----", ""), None);
    }
}
