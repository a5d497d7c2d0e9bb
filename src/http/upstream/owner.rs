//! Whose requests a connection carries.

use http::HeaderMap;
use http::header::{AUTHORIZATION, COOKIE, HeaderName};
use sha2::{Digest as _, Sha256};

use super::{Reuse, Sharing};

/// The headers that identify a caller, whatever its route.
static CREDENTIALS: [HeaderName; 3] = [AUTHORIZATION, COOKIE, HeaderName::from_static("x-api-key")];

/// Whose requests a connection carries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// Any caller's.
    AnyCaller,
    /// One caller's: a digest of its scope and credentials.
    Caller([u8; 32]),
    /// One request's, which it was opened for.
    OneRequest,
}

impl Owner {
    /// The owner of the connection that a request needs. `scope` is a digest of its record's scope. A request without a record
    /// and without credentials identifies no caller.
    pub(super) fn of(sharing: Sharing, scope: Option<&[u8; 32]>, headers: &HeaderMap) -> Self {
        match sharing {
            Sharing::Always => Self::AnyCaller,
            Sharing::Never => Self::OneRequest,
            Sharing::Caller => {
                let credentials =
                    || CREDENTIALS.iter().flat_map(|name| headers.get_all(name).iter().map(move |v| (name, v)));
                if scope.is_none() && credentials().next().is_none() {
                    return Self::OneRequest;
                }
                let mut digest = Sha256::new();
                digest.update([u8::from(scope.is_some())]);
                digest.update(scope.unwrap_or(&[0; 32]));
                for (name, value) in credentials() {
                    for part in [name.as_str().as_bytes(), value.as_bytes()] {
                        digest.update((part.len() as u64).to_be_bytes());
                        digest.update(part);
                    }
                }
                Self::Caller(digest.finalize().into())
            }
        }
    }
}

/// The requirements of a request on its connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Purpose {
    pub(super) reuse: Reuse,
    pub(super) owner: Owner,
}

impl Purpose {
    /// Whether a connection of this owner may carry the request.
    pub(super) fn may_use(&self, owner: Owner) -> bool {
        self.owner == owner && owner != Owner::OneRequest
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const SCOPES: [Option<&[u8; 32]>; 3] = [None, Some(&[0; 32]), Some(&[1; 32])];

    fn headers(lines: &[(&str, &'static str)]) -> HeaderMap {
        let line = |(name, value): &(&str, &'static str)| (name.parse().unwrap(), HeaderValue::from_static(value));
        lines.iter().map(line).collect::<Vec<(HeaderName, HeaderValue)>>().into_iter().fold(
            HeaderMap::new(),
            |mut headers, (name, value)| {
                headers.append(name, value);
                headers
            },
        )
    }

    #[test]
    fn callers_differ_by_scope_and_by_every_line_of_their_credentials() {
        let all = [
            headers(&[("authorization", "Bearer a")]),
            headers(&[("authorization", "Bearer b")]),
            headers(&[("x-api-key", "Bearer a")]),
            headers(&[("cookie", "a=1")]),
            headers(&[("cookie", "a=1; b=2")]),
            headers(&[("cookie", "a=1"), ("cookie", "b=2")]),
            headers(&[("authorization", "Bearer a"), ("cookie", "a=1")]),
        ];
        let mut owners = Vec::new();
        for scope in SCOPES {
            for headers in &all {
                let owner = Owner::of(Sharing::Caller, scope, headers);
                assert!(owner == Owner::of(Sharing::Caller, scope, headers) && !owners.contains(&owner));
                owners.push(owner);
            }
        }
        assert!(owners.iter().all(|owner| matches!(owner, Owner::Caller(_))));
    }

    #[test]
    fn a_request_that_identifies_no_caller_shares_no_connection() {
        let none = headers(&[("x-tenant", "a")]);
        let owner = Owner::of(Sharing::Caller, None, &none);
        assert!(owner == Owner::OneRequest);
        assert!(!Purpose { reuse: Reuse::Unprotected, owner }.may_use(owner));
        assert!(
            matches!(Owner::of(Sharing::Caller, SCOPES[1], &none), Owner::Caller(_)),
            "its scope identifies a caller"
        );
        for scope in SCOPES {
            assert!(Owner::of(Sharing::Always, scope, &none) == Owner::AnyCaller);
            assert!(Owner::of(Sharing::Never, scope, &none) == Owner::OneRequest);
        }
    }
}
