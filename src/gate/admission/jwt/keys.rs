//! The keys that tokens are verified with: from a secret, PEM, or a JSON Web Key Set (RFC 7517).

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, AlgorithmFamily, DecodingKey};
use rustls::pki_types::pem::{PemObject as _, SectionKind};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use x509_cert::Certificate;
use x509_cert::der::oid::ObjectIdentifier;
use x509_cert::der::{Decode as _, Encode as _};
use x509_cert::spki::SubjectPublicKeyInfoRef;

/// The most keys of a set that verify tokens.
const MOST_KEYS: usize = 64;

/// The most keys that are tried for one token that does not name its own.
const MOST_TRIES: usize = 8;

/// The shortest secret, in bytes (RFC 7518, 3.2), and the shortest modulus of an RSA key (RFC 7518, 3.3).
const SHORTEST_SECRET: usize = 32;
const SHORTEST_MODULUS: usize = 256;

/// Keys, and what each may verify.
#[derive(Clone)]
pub struct KeySet {
    keys: Vec<Key>,
    /// A digest of what it was made of: with the same, it is the same.
    made_of: [u8; 32],
}

#[derive(Clone)]
struct Key {
    /// Its `kid`; nothing where it has no name.
    id: Option<String>,
    /// What it may verify: never algorithms of two families.
    algorithms: Vec<Algorithm>,
    key: DecodingKey,
}

/// Why there is no set of keys, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub hint: &'static str,
}

impl KeySet {
    /// Of a secret that is shared with the issuer.
    ///
    /// # Errors
    /// The secret is too short.
    pub fn of_secret(secret: &[u8]) -> Result<Self, Unusable> {
        // Everybody has it, so everybody could sign.
        if secret.starts_with(b"-----BEGIN") || secret.starts_with(b"{") {
            let message = "it holds a key in PEM or JSON, not a secret".to_owned();
            return Err(Unusable { message, hint: "name it as pem_file or jwks_file" });
        }
        if secret.len() < SHORTEST_SECRET {
            let message = format!("the secret has fewer than {SHORTEST_SECRET} bytes");
            return Err(Unusable {
                message,
                hint: "use the secret that the tokens are signed with, of at least 32 bytes",
            });
        }
        Ok(Self { keys: vec![Key::secret(None, secret)], made_of: Sha256::digest(secret).into() })
    }

    /// Of public keys or certificates in PEM.
    ///
    /// # Errors
    /// There is none, or one that cannot be used.
    pub fn of_pem(pem: &[u8]) -> Result<Self, Unusable> {
        const HINT: &str = "name a file with public keys (\"BEGIN PUBLIC KEY\") or certificates in PEM: RSA of at least 2048 \
                            bits, P-256, P-384 or Ed25519";
        if pem.trim_ascii_start().starts_with(b"{") {
            let message = "it is JSON, and not PEM".to_owned();
            return Err(Unusable { message, hint: "name a JSON Web Key Set with jwks_file" });
        }
        let mut keys = Vec::new();
        for section in <(SectionKind, Vec<u8>)>::pem_slice_iter(pem) {
            let Ok((kind, der)) = section else {
                return Err(Unusable { message: "it is not PEM".to_owned(), hint: HINT });
            };
            let public = match kind {
                SectionKind::PublicKey => Some(der),
                SectionKind::Certificate => Certificate::from_der(&der)
                    .ok()
                    .and_then(|certificate| certificate.tbs_certificate.subject_public_key_info.to_der().ok()),
                SectionKind::PrivateKey | SectionKind::RsaPrivateKey | SectionKind::EcPrivateKey => {
                    let message = "it holds a private key, which only the issuer may have".to_owned();
                    return Err(Unusable {
                        message,
                        hint: "name the public key: openssl pkey -in KEY -pubout writes it",
                    });
                }
                _ => continue,
            };
            match public.as_deref().and_then(Key::of_spki) {
                Some(key) => keys.push(key),
                None => return Err(Unusable { message: "it holds a key that cannot be used".to_owned(), hint: HINT }),
            }
        }
        if keys.is_empty() || keys.len() > MOST_TRIES {
            let message = format!("it holds {} public keys, and there must be from 1 to {MOST_TRIES}", keys.len());
            return Err(Unusable { message, hint: HINT });
        }
        Ok(Self { keys, made_of: Sha256::digest(pem).into() })
    }

    /// Of a JSON Web Key Set. Keys of other kinds or for other uses are left out; shared secrets too, unless they are allowed.
    ///
    /// # Errors
    /// It is none, or none of its keys can verify a token.
    pub fn of_jwks(text: &[u8], takes_secrets: bool) -> Result<Self, Unusable> {
        let set = Self::read_jwks(text, takes_secrets)?;
        if set.keys.is_empty() {
            let message = "none of its keys can verify a token".to_owned();
            let hint = "it needs a key of RSA (at least 2048 bits), P-256, P-384 or Ed25519 that is not for encryption";
            return Err(Unusable { message, hint });
        }
        Ok(set)
    }

    /// Of a JSON Web Key Set that was fetched. It may have no key that can verify a token: then the issuer has withdrawn them.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn of_fetched(text: &[u8]) -> Result<Self, Unusable> {
        Self::read_jwks(text, false)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    fn read_jwks(text: &[u8], takes_secrets: bool) -> Result<Self, Unusable> {
        #[derive(Deserialize)]
        struct Set {
            keys: Vec<serde_json::Value>,
        }
        const HINT: &str = "a JSON Web Key Set is an object with a list of keys: {\"keys\": [{\"kty\": \"EC\", ...}]}";
        if text.trim_ascii_start().starts_with(b"-----BEGIN") {
            let message = "it is PEM, and not a JSON Web Key Set".to_owned();
            return Err(Unusable { message, hint: "name it with pem_file" });
        }
        let set: Set = serde_json::from_slice(text)
            .map_err(|_| Unusable { message: "it is not a JSON Web Key Set".to_owned(), hint: HINT })?;
        let keys = set.keys.into_iter().filter_map(|key| serde_json::from_value::<Jwk>(key).ok());
        let keys = keys.filter_map(|key| Key::of_jwk(&key));
        let keys = keys.filter(|key| takes_secrets || key.key.family() != AlgorithmFamily::Hmac);
        Ok(Self { keys: keys.collect(), made_of: Sha256::digest(text).into() })
    }

    /// Lets its keys verify these algorithms alone, of those that each may; all where none is named. It may have no key then.
    pub(super) fn retain(&mut self, algorithms: &[Algorithm]) {
        if !algorithms.is_empty() {
            self.keys.iter_mut().for_each(|key| key.algorithms.retain(|algorithm| algorithms.contains(algorithm)));
            self.keys.retain(|key| !key.algorithms.is_empty());
        }
    }

    /// The first 64 of them, as of a set that was fetched.
    pub(super) fn truncate(&mut self) {
        let keys = self.keys.len();
        if keys > MOST_KEYS {
            tracing::warn!(
                keys,
                counts = MOST_KEYS,
                "auth.jwt.jwks_url has too many keys: tokens of the last ones get 401"
            );
            self.keys.truncate(MOST_KEYS);
        }
    }

    /// The same, of which a key has to be left, and not too many.
    ///
    /// # Errors
    /// None is, or more than 64 are.
    pub fn limited_to(mut self, algorithms: &[Algorithm]) -> Result<Self, Unusable> {
        self.retain(algorithms);
        if self.keys.is_empty() {
            let message = "none of the keys is for these algorithms".to_owned();
            let hint = "a key is never used with an algorithm of another kind: HS* is for secrets, RS* and PS* for RSA, ES256 \
                        for P-256, ES384 for P-384, EdDSA for Ed25519; or remove `algorithms`";
            return Err(Unusable { message, hint });
        }
        if self.keys.len() > MOST_KEYS {
            let message =
                format!("it holds {} keys that verify tokens, and at most {MOST_KEYS} may be", self.keys.len());
            return Err(Unusable { message, hint: "remove the keys that no token is signed with any more" });
        }
        Ok(self)
    }

    /// Whether a key has this name, or may have it since it has none.
    pub(super) fn knows(&self, id: Option<&str>) -> bool {
        id.is_none_or(|id| self.keys.iter().any(|key| key.is_called(id)))
    }

    /// The keys that may have signed a token which says this of its key.
    pub(super) fn fitting(&self, id: Option<&str>, algorithm: Algorithm) -> impl Iterator<Item = &DecodingKey> {
        let named = self.keys.iter().filter(move |key| id.is_none_or(|id| key.is_called(id)));
        named.filter(move |key| key.algorithms.contains(&algorithm)).map(|key| &key.key).take(MOST_TRIES)
    }
}

impl Key {
    fn is_called(&self, id: &str) -> bool {
        self.id.as_deref().is_none_or(|own| own == id)
    }

    fn secret(id: Option<String>, secret: &[u8]) -> Self {
        // A secret is as long as the digest at least (RFC 7518, 3.2).
        let sizes = [(Algorithm::HS256, 32), (Algorithm::HS384, 48), (Algorithm::HS512, 64)];
        let algorithms = sizes.into_iter().filter(|(_, size)| secret.len() >= *size).map(|(algorithm, _)| algorithm);
        Self { id, algorithms: algorithms.collect(), key: DecodingKey::from_secret(secret) }
    }

    /// Of a `SubjectPublicKeyInfo` (RFC 5280, 4.1.2.7).
    fn of_spki(der: &[u8]) -> Option<Self> {
        const RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");
        const EC: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");
        const ED25519: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.101.112");
        const P256: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.3.1.7");
        const P384: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.3.132.0.34");
        let info = SubjectPublicKeyInfoRef::from_der(der).ok()?;
        let bits = info.subject_public_key.as_bytes()?;
        let (algorithms, key) = match info.algorithm.oid {
            // Its modulus is most of it.
            RSA if bits.len() > SHORTEST_MODULUS => (all_of(AlgorithmFamily::Rsa), DecodingKey::from_rsa_der(bits)),
            EC => {
                let curve = info.algorithm.parameters_oid().ok()?;
                let (algorithm, length) = match curve {
                    P256 => (Algorithm::ES256, 65),
                    P384 => (Algorithm::ES384, 97),
                    _ => return None,
                };
                if bits.len() != length {
                    return None;
                }
                (vec![algorithm], DecodingKey::from_ec_der(bits))
            }
            ED25519 if bits.len() == 32 => (all_of(AlgorithmFamily::Ed), DecodingKey::from_ed_der(bits)),
            _ => return None,
        };
        Some(Self { id: None, algorithms, key })
    }

    /// Of a JSON Web Key that may verify.
    fn of_jwk(jwk: &Jwk) -> Option<Self> {
        let common = &jwk.common;
        let signs = matches!(common.public_key_use, None | Some(PublicKeyUse::Signature));
        let verifies = common.key_operations.as_ref().is_none_or(|all| all.contains(&KeyOperations::Verify));
        if !signs || !verifies {
            return None;
        }
        let length = |text: &str| URL_SAFE_NO_PAD.decode(text).map(|bytes| bytes.len()).unwrap_or_default();
        let may = match &jwk.algorithm {
            AlgorithmParameters::RSA(key) if length(&key.n) >= SHORTEST_MODULUS => all_of(AlgorithmFamily::Rsa),
            AlgorithmParameters::EllipticCurve(key) => match key.curve {
                EllipticCurve::P256 if (length(&key.x), length(&key.y)) == (32, 32) => vec![Algorithm::ES256],
                EllipticCurve::P384 if (length(&key.x), length(&key.y)) == (48, 48) => vec![Algorithm::ES384],
                _ => return None,
            },
            AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 && length(&key.x) == 32 => {
                all_of(AlgorithmFamily::Ed)
            }
            AlgorithmParameters::OctetKey(key) => {
                Self::secret(None, &URL_SAFE_NO_PAD.decode(&key.value).ok()?).algorithms
            }
            _ => return None,
        };
        let algorithms: Vec<_> = match common.key_algorithm {
            None => may,
            Some(only) => may.into_iter().filter(|algorithm| KeyAlgorithm::from(*algorithm) == only).collect(),
        };
        let key = DecodingKey::from_jwk(jwk).ok()?;
        (!algorithms.is_empty()).then(|| Self { id: common.key_id.clone(), algorithms, key })
    }
}

fn all_of(family: AlgorithmFamily) -> Vec<Algorithm> {
    family.algorithms().to_vec()
}

impl PartialEq for KeySet {
    fn eq(&self, other: &Self) -> bool {
        let algorithms = |set: &Self| set.keys.iter().map(|key| key.algorithms.clone()).collect::<Vec<_>>();
        self.made_of == other.made_of && algorithms(self) == algorithms(other)
    }
}

impl Eq for KeySet {}

impl fmt::Debug for KeySet {
    /// Without the keys, which may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeySet").field("keys", &self.keys.len()).finish_non_exhaustive()
    }
}
