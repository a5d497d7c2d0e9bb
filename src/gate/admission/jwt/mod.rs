//! `[auth.jwt]`: verifies the tokens that scopes have claims of.
//!
//! `jsonwebtoken` verifies; what is decided here is which key and which algorithm a token may use, what becomes of a token
//! that was verified before, and when keys are fetched again.

mod crypto;
mod keys;
mod remote;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName};
pub use jsonwebtoken::Algorithm;
use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{AlgorithmFamily, Validation, decode, decode_header};
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use ring::digest::{SHA256, digest};
use serde::de::IgnoredAny;

pub use self::keys::{KeySet, Unusable};
pub use self::remote::JwksUrl;
use self::remote::RemoteKeys;
use crate::gate::request::Head;
use crate::gate::{Gate, Settings as GateSettings};
use crate::http::problem::Problem;
use crate::http::usage::Usage;
use crate::idempotency::token::{ClaimValue, PresentedToken, TokenClaims};
use crate::telemetry::outcome::Code;

/// The longest token, in bytes.
pub const LONGEST_TOKEN: usize = 16 * 1024;

/// How much memory the claims of verified tokens may take, in bytes.
const MOST_REMEMBERED: u64 = 16 << 20;

/// The approximate overhead of a remembered token, in bytes.
const ENTRY_BYTES: u64 = 256;

/// How many tokens room is made for at first.
const FIRST_ENTRIES: usize = 256;

/// How long a client waits before it repeats a request whose token could not be verified for lack of keys.
const NO_KEYS_RETRY: Duration = Duration::from_secs(5);

/// `[auth.jwt]`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// What keys tokens are verified with.
    pub keys: KeySource,
    /// What `iss` must be, where that matters.
    pub issuer: Option<String>,
    /// What `aud` must have one of; empty where it does not matter.
    pub audience: Vec<String>,
    /// By how much the clock of the issuer may differ from the gate's.
    pub leeway: Duration,
    /// The header that the token comes in.
    pub header: HeaderName,
}

/// Where keys come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeySource {
    /// Files, which were read with the configuration.
    Files(Arc<KeySet>),
    /// A URL, which the gate asks for them.
    Url(Arc<JwksUrl>),
}

impl GateSettings {
    /// The header that tokens come in, where it is not the usual one.
    pub(in crate::gate) fn token_header(&self) -> Option<&HeaderName> {
        self.jwt.as_ref().map(|jwt| &jwt.header).filter(|name| *name != AUTHORIZATION)
    }
}

/// Verifies tokens.
pub(in crate::gate) struct Verifier {
    settings: Settings,
    keys: Keys,
    verified: Cache<[u8; 32], Verified, Weight>,
}

enum Keys {
    Files(Arc<KeySet>),
    Url(Arc<RemoteKeys>),
}

/// A token that was verified.
#[derive(Clone)]
struct Verified {
    claims: Arc<TokenClaims>,
    /// Until when, in seconds of Unix time.
    until: u64,
    /// The generation of the keys that verified it.
    generation: u64,
}

#[derive(Clone)]
struct Weight;

impl Weighter<[u8; 32], Verified> for Weight {
    fn weight(&self, _: &[u8; 32], verified: &Verified) -> u64 {
        ENTRY_BYTES + verified.claims.size() as u64
    }
}

/// Why a token is not verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unverified {
    /// For this reason, which is the token's.
    Token(&'static str),
    /// For this reason: no key here has signed it. One that is published since may have.
    Key(&'static str),
    /// No keys could be fetched so far.
    NoKeys,
}

/// What is known of a request's token.
pub(in crate::gate) enum Examined {
    /// Its claims, or that there is none.
    Known(Option<Arc<TokenClaims>>),
    /// Only a gate that runs has the keys.
    Unknown,
    /// A request with it is refused.
    Refused(Problem),
}

/// What a token says of how it is to be verified.
struct TokenHeader {
    algorithm: Algorithm,
    key: Option<String>,
}

impl Verifier {
    /// A verifier. Where `former` has the same settings, or the same keys from a URL, it is the same or has the same keys.
    pub(in crate::gate) fn new(settings: Settings, former: Option<&Arc<Self>>, usage: &Arc<Usage>) -> Arc<Self> {
        if let Some(former) = former.filter(|former| former.settings == settings) {
            return Arc::clone(former);
        }
        crypto::install();
        let keys = match &settings.keys {
            KeySource::Files(keys) => Keys::Files(Arc::clone(keys)),
            KeySource::Url(url) => Keys::Url(match former.map(|former| &former.keys) {
                Some(Keys::Url(keys)) if keys.url() == url => Arc::clone(keys),
                Some(Keys::Url(keys)) => Arc::new(RemoteKeys::new(Arc::clone(url), Some(keys), usage)),
                Some(Keys::Files(_)) | None => Arc::new(RemoteKeys::new(Arc::clone(url), None, usage)),
            }),
        };
        let verified = Cache::with_weighter(FIRST_ENTRIES, MOST_REMEMBERED, Weight);
        Arc::new(Self { settings, keys, verified })
    }

    /// The claims of a token.
    pub(super) async fn verify(&self, token: &[u8]) -> Result<Arc<TokenClaims>, Unverified> {
        let (keys, mut generation) = self.current();
        let mut id = [0; 32];
        id.copy_from_slice(digest(&SHA256, token).as_ref());
        if let Some(known) = self.verified.get(&id) {
            if known.generation == generation && now() < known.until {
                return Ok(known.claims);
            }
            self.verified.remove(&id);
        }
        let header = TokenHeader::read(token)?;
        let verify = |keys: Option<Arc<KeySet>>| {
            keys.ok_or(Unverified::NoKeys).and_then(|keys| self.settings.verify_with(&keys, token, &header))
        };
        let mut verified = verify(keys);
        if let (Keys::Url(remote), Err(Unverified::Key(_) | Unverified::NoKeys)) = (&self.keys, &verified) {
            remote.fetch_for_request().await;
            let (keys, newest) = self.current();
            if newest != generation {
                (verified, generation) = (verify(keys), newest);
            }
        }
        let claims = Arc::new(verified?);
        let until = claims.seconds("exp").unwrap_or(0).saturating_add(self.settings.leeway.as_secs());
        self.verified.insert(id, Verified { claims: Arc::clone(&claims), until, generation });
        Ok(claims)
    }

    /// The keys, where there are any, and which they are.
    fn current(&self) -> (Option<Arc<KeySet>>, u64) {
        match &self.keys {
            Keys::Files(keys) => (Some(Arc::clone(keys)), 0),
            Keys::Url(remote) => remote.current(),
        }
    }
}

impl Settings {
    /// The claims of a token that these keys verify, without fetching others.
    fn verify_with(&self, keys: &KeySet, token: &[u8], header: &TokenHeader) -> Result<TokenClaims, Unverified> {
        if !keys.knows(header.key.as_deref()) {
            return Err(Unverified::Key("its key is not known here (kid)"));
        }
        let mut validation = Validation::new(header.algorithm);
        // See `check_time`.
        validation.validate_exp = false;
        validation.validate_aud = !self.audience.is_empty();
        let mut required = Vec::new();
        if let Some(issuer) = &self.issuer {
            validation.set_issuer(&[issuer]);
            required.push("iss");
        }
        if validation.validate_aud {
            validation.set_audience(&self.audience);
            required.push("aud");
        }
        validation.set_required_spec_claims(&required);
        // Keys of a URL are never secrets: there is no use in a fetch.
        let is_secret = is_for_secrets(header.algorithm);
        let mut why = if is_secret { Unverified::Token(NO_SECRET_FOR_IT) } else { Unverified::Key(NO_KEY_FOR_IT) };
        for key in keys.fitting(header.key.as_deref(), header.algorithm) {
            match decode::<IgnoredAny>(token, key, &validation) {
                Ok(_) => {
                    let claims = TokenClaims::parse(&payload(token)?).map_err(|_| Unverified::Token(TWO_READINGS))?;
                    // One issuer (RFC 7519, 4.1.1); `jsonwebtoken` takes a list of them.
                    if matches!(claims.get("iss"), Some(ClaimValue::Nested)) {
                        return Err(Unverified::Token("its iss is not text"));
                    }
                    return self.check_time(&claims, now()).map(|()| claims);
                }
                Err(error) if matches!(error.kind(), ErrorKind::InvalidSignature) => {
                    why = Unverified::Key(reason(error.kind()));
                }
                // This key has signed it, or it has no form that any key could have.
                Err(error) => return Err(Unverified::Token(reason(error.kind()))),
            }
        }
        Err(why)
    }

    /// Holds that a token is good now, in seconds of Unix time. `jsonwebtoken` takes no fractions where the parser of JSON keeps
    /// numbers as they are written, as it does in this program.
    fn check_time(&self, claims: &TokenClaims, now: u64) -> Result<(), Unverified> {
        // Before 1970, they are negative (RFC 7519, 2: NumericDate).
        let (now, leeway) = (now as f64, self.leeway.as_secs() as f64);
        let expires = claims.number("exp").ok_or(Unverified::Token("it does not say when it expires (exp)"))?;
        if now >= expires.floor() + leeway {
            return Err(Unverified::Token("it has expired"));
        }
        match claims.number("nbf") {
            Some(begins) if now + leeway < begins.floor() => Err(Unverified::Token("it is not valid yet")),
            None if claims.get("nbf").is_some() => Err(Unverified::Token("its nbf is not a number")),
            _ => Ok(()),
        }
    }

    /// What is known of the token of a request without fetching keys: for `explain`.
    pub(in crate::gate) fn examine(&self, headers: &HeaderMap) -> Examined {
        let token = match PresentedToken::of(headers, &self.header) {
            PresentedToken::Nothing => return Examined::Known(None),
            PresentedToken::Several => return Examined::Refused(several()),
            PresentedToken::Token(token) => token,
        };
        let KeySource::Files(keys) = &self.keys else { return Examined::Unknown };
        crypto::install();
        let verified = TokenHeader::read(token).and_then(|header| self.verify_with(keys, token, &header));
        match verified {
            Ok(claims) => Examined::Known(Some(Arc::new(claims))),
            Err(why) => Examined::Refused(why.problem()),
        }
    }
}

/// The reason where a part of a token has a name twice, or is no JSON object.
const TWO_READINGS: &str = "a part of it is not a JSON object, or has a name twice";

const NO_KEY_FOR_IT: &str = "its algorithm is not one that its key may be used with here";

/// See RFC 7518, section 3.2.
const NO_SECRET_FOR_IT: &str = "its algorithm is not one that a key may be used with here: HS256 needs a secret of 32 bytes, HS384 one \
                                of 48 and HS512 one of 64, and `algorithms` may narrow the choice";

const NOT_A_TOKEN: &str = "it does not have the form of a signed JWT";

impl TokenHeader {
    fn read(token: &[u8]) -> Result<Self, Unverified> {
        if token.len() > LONGEST_TOKEN {
            return Err(Unverified::Token("it is longer than 16384 bytes"));
        }
        let mut parts = token.split(|&byte| byte == b'.');
        let (Some(header), Some(_), Some(_), None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
            return Err(Unverified::Token(NOT_A_TOKEN));
        };
        let header = URL_SAFE_NO_PAD.decode(header).map_err(|_| Unverified::Token(NOT_A_TOKEN))?;
        let members = TokenClaims::parse(&header).map_err(|_| Unverified::Token(TWO_READINGS))?;
        // Extensions that must be understood (RFC 7515, 4.1.11), or that change what is signed or how it is read.
        if ["crit", "b64", "zip", "enc"].iter().any(|name| members.get(name).is_some()) {
            return Err(Unverified::Token("it uses an extension that is not supported here"));
        }
        let algorithm =
            decode_header(token).map_err(|_| Unverified::Token("its header or its algorithm is not accepted"))?.alg;
        let key = match members.get("kid") {
            None => None,
            Some(ClaimValue::Scalar(marked)) if marked.first() == Some(&b's') => {
                Some(String::from_utf8_lossy(&marked[1..]).into_owned())
            }
            Some(_) => return Err(Unverified::Token("its kid is not text")),
        };
        Ok(Self { algorithm, key })
    }
}

/// The payload of a token that was verified.
fn payload(token: &[u8]) -> Result<Vec<u8>, Unverified> {
    let payload = token.split(|&byte| byte == b'.').nth(1).unwrap_or_default();
    URL_SAFE_NO_PAD.decode(payload).map_err(|_| Unverified::Token(NOT_A_TOKEN))
}

/// What is wrong with a token, in words that do not show it.
fn reason(kind: &ErrorKind) -> &'static str {
    match kind {
        ErrorKind::InvalidSignature => "its signature is not that of a key that is known here",
        ErrorKind::InvalidIssuer => "it is by another issuer",
        ErrorKind::InvalidAudience => "it is for another audience",
        ErrorKind::MissingRequiredClaim(claim) => match claim.as_str() {
            "iss" => "it names no issuer",
            _ => "it names no audience",
        },
        ErrorKind::Json(_) => {
            "a registered claim of it, such as sub, stands twice or does not have the form of RFC 7519"
        }
        _ => NOT_A_TOKEN,
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Unverified {
    /// What the client gets.
    pub(super) fn problem(self) -> Problem {
        match self {
            Self::Token(why) | Self::Key(why) => {
                let detail = format!("the token of this request cannot be verified: {why}; nothing was sent");
                Problem::new(Code::CredentialsUnverifiable, detail)
            }
            Self::NoKeys => {
                let detail = "the keys that verify tokens could not be fetched yet; nothing was sent";
                Problem::new(Code::Overloaded, detail).retry_after(NO_KEYS_RETRY)
            }
        }
    }
}

/// The problem of a request whose token was not looked at, although its scope has a claim of it.
pub(in crate::gate) fn unverified() -> Problem {
    Unverified::Token("it was not looked at").problem()
}

impl Gate {
    /// Verifies the token of a request, and notes its claims.
    pub(in crate::gate) async fn verify(&self, head: &mut Head) -> Result<(), Problem> {
        let Some(verifier) = &self.verifier else {
            head.set_jwt_claims(None);
            return Ok(());
        };
        let claims = match PresentedToken::of(&head.headers, &verifier.settings.header) {
            PresentedToken::Nothing => None,
            PresentedToken::Several => return Err(several()),
            PresentedToken::Token(token) => Some(verifier.verify(token).await.map_err(Unverified::problem)?),
        };
        head.set_jwt_claims(claims);
        Ok(())
    }

    /// Notes the claims of the token of a request that was verified when it was accepted, and that may have expired since.
    pub(in crate::gate) fn reread_jwt_claims(&self, head: &mut Head) {
        let header = self.verifier.as_ref().map_or(&AUTHORIZATION, |verifier| &verifier.settings.header);
        let claims = match PresentedToken::of(&head.headers, header) {
            PresentedToken::Token(token) => payload(token).ok().and_then(|payload| TokenClaims::parse(&payload).ok()),
            PresentedToken::Nothing | PresentedToken::Several => None,
        };
        head.set_jwt_claims(claims.map(Arc::new));
    }

    /// Whether it has keys that verify tokens.
    #[must_use]
    pub fn has_token_keys(&self) -> bool {
        self.verifier.as_ref().is_some_and(|verifier| verifier.current().0.is_some())
    }

    /// Fetches the keys of tokens where that is due, and returns whether there are any: called about once a second.
    pub async fn refresh_token_keys(&self) -> bool {
        match self.verifier.as_ref().map(|verifier| &verifier.keys) {
            Some(Keys::Url(remote)) => {
                remote.refresh().await;
                remote.current().0.is_some()
            }
            Some(Keys::Files(_)) | None => true,
        }
    }
}

/// Whether an algorithm is for a secret, and not for a pair of keys.
#[must_use]
pub fn is_for_secrets(algorithm: Algorithm) -> bool {
    algorithm.family() == AlgorithmFamily::Hmac
}

/// The problem of a request with several tokens.
pub(super) fn several() -> Problem {
    Unverified::Token("the request has several lines of its header").problem()
}
