//! What becomes of a credential, in words.

use crate::idempotency::credential::Kind;

/// What a credential is read from.
pub(super) fn carrier(kind: Kind) -> &'static str {
    match kind {
        Kind::ApiKey => "X-Api-Key",
        Kind::Basic => "the user of Authorization: Basic",
        Kind::Jwt => "the iss and sub of a JWT in Authorization, not verified",
        Kind::Other => "Authorization as it stands",
        Kind::Cookie => "cookies",
        Kind::Certificate => "the client's certificate",
        Kind::Anonymous => "nothing",
    }
}

/// What a retry gets after the credential was renewed.
pub(super) fn on_renewal(kind: Kind) -> &'static str {
    match kind {
        Kind::ApiKey => {
            "a retry with another Authorization, or without it, gets 422 caller-differs; cookies do not count; one with \
             another key is another caller's, and runs"
        }
        Kind::Basic => "a retry after a change of the password gets 422 caller-differs",
        Kind::Jwt => "a retry with a refreshed token gets 422 caller-differs",
        Kind::Other => "a retry with a refreshed token is another caller's, and runs",
        Kind::Cookie => "a retry with a renewed session, or any other cookie, gets 422 caller-differs",
        Kind::Certificate => "a retry with a certificate of another subject gets 422 caller-differs",
        Kind::Anonymous => {
            "a retry with a cookie gets 422 caller-differs; one with X-Api-Key or Authorization is another caller's, and runs"
        }
    }
}
