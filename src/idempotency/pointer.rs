//! JSON pointers.

use std::fmt;

/// A JSON pointer (RFC 6901).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pointer(String);

impl Pointer {
    /// Reads a pointer: empty for the whole document, else `/` before each step, with `~0` for `~` and `~1` for `/`.
    ///
    /// # Errors
    /// The problem, for the author of the configuration.
    pub fn parse(text: &str) -> Result<Self, String> {
        if !text.is_empty() && !text.starts_with('/') {
            return Err(format!("a JSON pointer starts with `/`: `/{text}`?"));
        }
        let mut rest = text;
        while let Some((_, after)) = rest.split_once('~') {
            if !after.starts_with(['0', '1']) {
                return Err("in a JSON pointer, `~` is written `~0`, and `~1` stands for `/`".to_owned());
            }
            rest = after;
        }
        Ok(Self(text.to_owned()))
    }

    /// The pointer as it is written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it leads to `other` or into it.
    #[must_use]
    pub fn is_within(&self, other: &Self) -> bool {
        self.0.strip_prefix(&other.0).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// The names of its steps, unescaped.
    pub fn steps(&self) -> impl Iterator<Item = String> + '_ {
        self.0.split('/').skip(1).map(|step| step.replace("~1", "/").replace("~0", "~"))
    }
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(text: &str) -> Vec<String> {
        Pointer::parse(text).unwrap().steps().collect()
    }

    #[test]
    fn steps_are_unescaped() {
        assert_eq!(steps(""), Vec::<String>::new());
        assert_eq!(steps("/"), [""]);
        assert_eq!(steps("/a/0/~0~1~01"), ["a", "0", "~/~1"]);
        assert_eq!(Pointer::parse("/a~1b").unwrap().to_string(), "/a~1b");
    }

    #[test]
    fn a_pointer_is_within_what_it_leads_through() {
        let within = |one, other| Pointer::parse(one).unwrap().is_within(&Pointer::parse(other).unwrap());
        for (one, other) in [("", ""), ("/a", ""), ("/a", "/a"), ("/a/b", "/a"), ("/a/", "/a")] {
            assert!(within(one, other), "{one} {other}");
        }
        for (one, other) in [("", "/a"), ("/a", "/a/b"), ("/ab", "/a"), ("/b/a", "/a"), ("/a", "/")] {
            assert!(!within(one, other), "{one} {other}");
        }
    }

    #[test]
    fn what_is_not_a_pointer_is_told() {
        for text in ["a", "#/a", "/~", "/~2", "/a~"] {
            assert!(Pointer::parse(text).is_err(), "{text}");
        }
    }
}
