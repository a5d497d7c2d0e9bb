//! The tokens that the admin listener takes, and what each of them allows.

use std::sync::Arc;

use sha2::{Digest, Sha256};

/// From how many characters on a token counts as one that cannot be guessed: 128 bits in hexadecimal.
pub const UNGUESSABLE: usize = 32;

/// What the holder of a token may do. Each role may do what the ones before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// To look, without keys and answers.
    Viewer,
    /// Everything.
    Operator,
}

impl Role {
    /// The word for it, in configurations and answers.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
        }
    }
}

/// A token that the listener takes.
#[derive(Clone, Debug)]
pub struct Token {
    /// What the log of changes calls who shows it.
    pub name: Arc<str>,
    /// What its holder may do.
    pub role: Role,
    /// What its holder shows.
    pub secret: Secret,
}

/// A secret that `Debug` does not show.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(***)")
    }
}

/// The tokens in force, as they are compared.
pub(super) struct Tokens(Vec<TokenDigest>);

/// One of them.
pub(super) struct TokenDigest {
    pub(super) name: Arc<str>,
    pub(super) role: Role,
    pub(super) is_guessable: bool,
    /// Compared instead of the token, so that neither length nor content shows in the time taken.
    digest: [u8; 32],
}

impl Tokens {
    pub(super) fn of(tokens: &[Token]) -> Self {
        let known = |Token { name, role, secret }: &Token| {
            let secret = secret.0.trim();
            let is_guessable = secret.len() < UNGUESSABLE;
            TokenDigest { name: Arc::clone(name), role: *role, is_guessable, digest: Sha256::digest(secret).into() }
        };
        Self(tokens.iter().map(known).collect())
    }

    /// Whether a token must be shown.
    pub(super) fn are_demanded(&self) -> bool {
        !self.0.is_empty()
    }

    /// The token that is presented. Each is compared, whether one before it is equal or not.
    pub(super) fn find(&self, presented: &str) -> Option<&TokenDigest> {
        let digest: [u8; 32] = Sha256::digest(presented).into();
        self.0.iter().fold(None, |found, known| if known.is(&digest) { Some(known) } else { found })
    }
}

impl TokenDigest {
    fn is(&self, digest: &[u8; 32]) -> bool {
        let difference = self.digest.iter().zip(digest).fold(0, |difference, (a, b)| difference | (a ^ b));
        std::hint::black_box(difference) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_is_found_by_itself_alone() {
        let token = |name: &str, secret: &str| Token {
            name: name.into(),
            role: Role::Viewer,
            secret: Secret(secret.to_owned()),
        };
        let tokens = Tokens::of(&[token("a", "first\n"), token("b", "second"), token("c", &"x".repeat(UNGUESSABLE))]);
        let found = |presented: &str| tokens.find(presented).map(|known| (&*known.name, known.is_guessable));
        assert_eq!(found("first"), Some(("a", true)));
        assert_eq!(found("second"), Some(("b", true)));
        assert_eq!(found(&"x".repeat(UNGUESSABLE)), Some(("c", false)));
        for wrong in ["", "firs", "first ", "firstsecond", "First"] {
            assert_eq!(found(wrong), None, "{wrong}");
        }
        assert!(!format!("{:?}", token("a", "s3cret")).contains("s3cret"));
    }
}
