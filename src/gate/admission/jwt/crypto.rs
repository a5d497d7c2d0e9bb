//! The cryptography of `jsonwebtoken`, by ring, which TLS uses here too.

use std::sync::Once;

use jsonwebtoken::crypto::{CryptoProvider, JwtVerifier, KeyUtils};
use jsonwebtoken::errors::{ErrorKind, Result};
use jsonwebtoken::signature::{Error, Verifier};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};
use ring::hmac;
use ring::signature::{self as ring_signature, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm};

/// Lets `jsonwebtoken` verify in this process.
pub(super) fn install() {
    static INSTALLED: Once = Once::new();
    // Nothing else in the process installs one.
    INSTALLED.call_once(|| {
        let _ = PROVIDER.install_default();
    });
}

static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: |_, _| Err(ErrorKind::UnsupportedAlgorithm.into()),
    verifier_factory: verifier,
    // Only conversions of private keys use it.
    key_utils: KeyUtils::new_unimplemented(),
};

/// A key, and the one algorithm that it verifies by.
struct BoundKey {
    algorithm: Algorithm,
    key: DecodingKey,
}

fn verifier(algorithm: &Algorithm, key: &DecodingKey) -> Result<Box<dyn JwtVerifier>> {
    if algorithm.family() != key.family() {
        return Err(ErrorKind::InvalidKeyFormat.into());
    }
    Ok(Box::new(BoundKey { algorithm: *algorithm, key: key.clone() }))
}

impl JwtVerifier for BoundKey {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

impl Verifier<Vec<u8>> for BoundKey {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> std::result::Result<(), Error> {
        let Some(means) = Means::of(self.algorithm) else { return Err(Error::new()) };
        let verified = match (means, self.key.kind()) {
            (Means::Hmac(algorithm), DecodingKeyKind::SecretOrDer(secret)) => {
                hmac::verify(&hmac::Key::new(algorithm, secret), message, signature)
            }
            (Means::Rsa(algorithm), DecodingKeyKind::RsaModulusExponent { n, e }) => {
                RsaPublicKeyComponents { n, e }.verify(algorithm, message, signature)
            }
            (Means::Rsa(algorithm), DecodingKeyKind::SecretOrDer(der)) => {
                UnparsedPublicKey::new(algorithm, der).verify(message, signature)
            }
            (Means::Curve(algorithm), DecodingKeyKind::SecretOrDer(point)) => {
                UnparsedPublicKey::new(algorithm, point).verify(message, signature)
            }
            _ => return Err(Error::new()),
        };
        verified.map_err(|_| Error::new())
    }
}

/// How ring verifies.
enum Means {
    Hmac(hmac::Algorithm),
    Rsa(&'static ring_signature::RsaParameters),
    Curve(&'static dyn VerificationAlgorithm),
}

impl Means {
    fn of(algorithm: Algorithm) -> Option<Self> {
        use ring_signature as ring;
        Some(match algorithm {
            Algorithm::HS256 => Self::Hmac(hmac::HMAC_SHA256),
            Algorithm::HS384 => Self::Hmac(hmac::HMAC_SHA384),
            Algorithm::HS512 => Self::Hmac(hmac::HMAC_SHA512),
            Algorithm::RS256 => Self::Rsa(&ring::RSA_PKCS1_2048_8192_SHA256),
            Algorithm::RS384 => Self::Rsa(&ring::RSA_PKCS1_2048_8192_SHA384),
            Algorithm::RS512 => Self::Rsa(&ring::RSA_PKCS1_2048_8192_SHA512),
            Algorithm::PS256 => Self::Rsa(&ring::RSA_PSS_2048_8192_SHA256),
            Algorithm::PS384 => Self::Rsa(&ring::RSA_PSS_2048_8192_SHA384),
            Algorithm::PS512 => Self::Rsa(&ring::RSA_PSS_2048_8192_SHA512),
            Algorithm::ES256 => Self::Curve(&ring::ECDSA_P256_SHA256_FIXED),
            Algorithm::ES384 => Self::Curve(&ring::ECDSA_P384_SHA384_FIXED),
            Algorithm::EdDSA => Self::Curve(&ring::ED25519),
            _ => return None,
        })
    }
}
