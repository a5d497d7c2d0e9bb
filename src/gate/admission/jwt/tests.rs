use http::{HeaderMap, HeaderValue};
use jsonwebtoken::AlgorithmFamily;
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair, EcdsaSigningAlgorithm,
    Ed25519KeyPair, KeyPair as _,
};

use super::remote::tests::{passes, served};
use super::*;
use crate::http::limits::Limits;
use crate::telemetry::logged::logged;
use crate::telemetry::metrics::Metrics;

/// An RSA key of 2048 bits, as a JSON Web Key and in PEM, and tokens of `ann` that were signed with it.
const RSA: &str = r#"{"kty":"RSA","kid":"rsa","e":"AQAB","n":"25sKX3YJrIgtuRLCa7W9oLQm54PW1R-e75LwFMdZIfAH_lkYXOAIYm0nXMwfZtSLybNkLQYVBuBTcuFMufCKM_3NC0_vutyvGDnkSRGwB9W6plh6zCFgAdFOWb-V6UA4MEsi8PaY8IQZas29tWuRMSzbbTSirKFTcP8YeFqizP8C1u0ENJLdGdCA0YNDHMRMnFjqpQtDveY9JtAL6Cem6iaMwvAOI4M5g0xTWelZURGsMw8n57gY-JG37V65nVy3lB5lUfxAts7QO3aSAB4gSFs7d5g9IFltRy3EwbfgqWox68JSUgRLDLGsUhB-z-BeDbFLjLK7NSxTJ2hlGGA8pQ"}"#;
const RSA_PEM: &str = "\
-----BEGIN PUBLIC KEY-----
MIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8AMIIBCgKCAQEA25sKX3YJrIgtuRLCa7W9
oLQm54PW1R+e75LwFMdZIfAH/lkYXOAIYm0nXMwfZtSLybNkLQYVBuBTcuFMufCK
M/3NC0/vutyvGDnkSRGwB9W6plh6zCFgAdFOWb+V6UA4MEsi8PaY8IQZas29tWuR
MSzbbTSirKFTcP8YeFqizP8C1u0ENJLdGdCA0YNDHMRMnFjqpQtDveY9JtAL6Cem
6iaMwvAOI4M5g0xTWelZURGsMw8n57gY+JG37V65nVy3lB5lUfxAts7QO3aSAB4g
SFs7d5g9IFltRy3EwbfgqWox68JSUgRLDLGsUhB+z+BeDbFLjLK7NSxTJ2hlGGA8
pQIDAQAB
-----END PUBLIC KEY-----
";
const RS256: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6InJzYSJ9.eyJzdWIiOiJhbm4iLCJleHAiOjQxMDI0NDQ4MDB9.prNhcSlChQ-rsnW-f9wZvLGHoAJ1l8wj7Iu8ct6Go_C7gv9dqsK15OqhyzCGK6plk3V6kehqxO0vTKyMQkupTfHlHcS8wdXWx2fCmSxVFghFCXCrrMyTaM8qOdmmZsWo4ndor1basDGohDbXrFg_FZejI2TPrZ0dvWgwmNxhMMrgw9l8H5x8qGBqlp2PAq4eW0qp9yOIMuqeFkcYFViyuo8bmm4xdKGQeyrkKf32zmnR79AtP_nlRcHftlKD6WrJs7R8_vFef_J4CWacv8RvgjxbzE-x94XvshYNKxDQViVl-yQcSp2_z8qBZk_rAfiqZfD6vH4trncUK4tlok02NA";
const PS256: &str = "eyJhbGciOiJQUzI1NiIsImtpZCI6InJzYSJ9.eyJzdWIiOiJhbm4iLCJleHAiOjQxMDI0NDQ4MDB9.CxR10bSp7mfl_yeBRtztWuZP6tRJKFzh_9PjAlofE-a-1L3qLeP2huiUuVoyWxl10SKpqVECKPS1LVjixrLFTtItdZ8MfEo8H7WZPNR4RAZ6RgWjbAjRW0GeL8Q7t9mxb123VMGk4zVGanoaN_9zkCKCQ-2fLhVYvLSQFV8u-s7D1uZWq2LA1Bdp7pty7zBCOdLFD31mSLQCI7EO00bl4F1-uGtqE3Fup4YWwrUkcStETHQUmGY0EfYsvYOLMgUC0xFKG_L3ffSbSV9Cl1ouPdY84_g9Fxl2IBkOyHSAyhfjWqPi22YZSMSwEvXjuFposKrTxeqqYWPMoYxNUmEzhg";

/// A secret of 64 bytes.
const SECRET: &[u8; 64] = b"a secret of sixty-four bytes for tests, which everybody may know";

/// The claims of a token that is good until the year 2100.
const ANN: &str = r#"{"sub":"ann","exp":4102444800}"#;

fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn token(header: &str, payload: &str, sign: impl Fn(&[u8]) -> Vec<u8>) -> String {
    let message = format!("{}.{}", encode(header), encode(payload));
    let signature = sign(message.as_bytes());
    format!("{message}.{}", encode(signature))
}

fn hs256(secret: &[u8]) -> impl Fn(&[u8]) -> Vec<u8> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
    move |message| hmac::sign(&key, message).as_ref().to_vec()
}

/// A key of the issuer.
struct Pair(EcdsaKeyPair);

impl Pair {
    fn new(algorithm: &'static EcdsaSigningAlgorithm) -> Self {
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
        Self(EcdsaKeyPair::from_pkcs8(algorithm, key.as_ref(), &random).unwrap())
    }

    fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.0.sign(&SystemRandom::new(), message).unwrap().as_ref().to_vec()
    }

    fn jwk(&self, id: &str, curve: &str, more: &str) -> String {
        let (x, y) = self.0.public_key().as_ref()[1..].split_at(self.0.public_key().as_ref().len() / 2);
        format!(r#"{{"kty":"EC","kid":"{id}","crv":"{curve}","x":"{}","y":"{}"{more}}}"#, encode(x), encode(y))
    }

    fn pem(&self) -> String {
        // The algorithm, as `openssl pkey -pubout` writes it for P-256.
        let mut der =
            b"\x30\x59\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07\x03\x42\x00"
                .to_vec();
        der.extend(self.0.public_key().as_ref());
        let text = base64::engine::general_purpose::STANDARD.encode(der);
        format!("-----BEGIN PUBLIC KEY-----\n{}\n{}\n-----END PUBLIC KEY-----\n", &text[..64], &text[64..])
    }
}

fn jwks(keys: &[&str]) -> Result<KeySet, Unusable> {
    KeySet::of_jwks(format!("{{\"keys\":[{}]}}", keys.join(",")).as_bytes(), true)
}

fn settings(keys: KeySet) -> Settings {
    let keys = KeySource::Files(Arc::new(keys));
    Settings { keys, issuer: None, audience: Vec::new(), leeway: Duration::from_secs(30), header: AUTHORIZATION }
}

/// The subject of a token, with its mark, or why it is not verified.
fn subject(settings: &Settings, token: &str) -> Result<String, String> {
    let line = HeaderValue::from_str(&format!("Bearer {token}")).unwrap();
    match settings.examine(&HeaderMap::from_iter([(settings.header.clone(), line)])) {
        Examined::Known(Some(claims)) => match claims.get("sub") {
            Some(ClaimValue::Scalar(marked)) => Ok(String::from_utf8(marked.to_vec()).unwrap()),
            _ => Ok(String::new()),
        },
        Examined::Known(None) | Examined::Unknown => panic!("there is a token"),
        Examined::Refused(problem) => {
            assert_eq!(problem.code, Code::CredentialsUnverifiable);
            Err(problem.detail)
        }
    }
}

#[track_caller]
fn refused(settings: &Settings, token: &str, why: &str) {
    let detail = subject(settings, token).unwrap_err();
    assert!(detail.contains(why), "{why}: {detail}");
}

#[test]
fn tokens_of_every_algorithm_are_verified() {
    let (p256, p384) = (Pair::new(&ECDSA_P256_SHA256_FIXED_SIGNING), Pair::new(&ECDSA_P384_SHA384_FIXED_SIGNING));
    let random = SystemRandom::new();
    let ed = Ed25519KeyPair::from_pkcs8(Ed25519KeyPair::generate_pkcs8(&random).unwrap().as_ref()).unwrap();
    let ed_key = format!(r#"{{"kty":"OKP","kid":"ed","crv":"Ed25519","x":"{}"}}"#, encode(ed.public_key()));
    let secret = format!(r#"{{"kty":"oct","kid":"hs","k":"{}"}}"#, encode(SECRET));
    let keys = jwks(&[&p256.jwk("p256", "P-256", ""), &p384.jwk("p384", "P-384", ""), &ed_key, RSA, &secret]).unwrap();
    let all = settings(keys);
    let hmac = |algorithm| {
        let key = hmac::Key::new(algorithm, SECRET);
        move |message: &[u8]| hmac::sign(&key, message).as_ref().to_vec()
    };
    for (what, token) in [
        ("HS256", token(r#"{"alg":"HS256","kid":"hs"}"#, ANN, hmac(hmac::HMAC_SHA256))),
        ("HS384", token(r#"{"alg":"HS384","kid":"hs"}"#, ANN, hmac(hmac::HMAC_SHA384))),
        ("HS512", token(r#"{"alg":"HS512","kid":"hs"}"#, ANN, hmac(hmac::HMAC_SHA512))),
        ("ES256", token(r#"{"alg":"ES256","kid":"p256"}"#, ANN, |message| p256.sign(message))),
        ("ES384", token(r#"{"alg":"ES384","kid":"p384","typ":"at+jwt"}"#, ANN, |message| p384.sign(message))),
        ("EdDSA", token(r#"{"alg":"EdDSA","kid":"ed"}"#, ANN, |message| ed.sign(message).as_ref().to_vec())),
        ("without kid", token(r#"{"alg":"ES256"}"#, ANN, |message| p256.sign(message))),
        ("RS256", RS256.to_owned()),
        ("PS256", PS256.to_owned()),
    ] {
        assert_eq!(subject(&all, &token), Ok("sann".to_owned()), "{what}");
    }
    let pem = settings(KeySet::of_pem(format!("{RSA_PEM}{}", p256.pem()).as_bytes()).unwrap());
    assert_eq!(subject(&pem, RS256), Ok("sann".to_owned()));
    let any_name = token(r#"{"alg":"ES256","kid":"whatever"}"#, ANN, |message| p256.sign(message));
    assert_eq!(subject(&pem, &any_name), Ok("sann".to_owned()), "a key in PEM has no name");
}

#[test]
fn forged_and_malformed_tokens_are_refused() {
    let key = Pair::new(&ECDSA_P256_SHA256_FIXED_SIGNING);
    let (sign, other) = (|message: &[u8]| key.sign(message), Pair::new(&ECDSA_P256_SHA256_FIXED_SIGNING));
    let own = key.jwk("own", "P-256", "");
    let only_rs256 = RSA.replacen('{', r#"{"alg":"RS256","#, 1);
    let all = settings(jwks(&[&own, &only_rs256]).unwrap());
    let header = r#"{"alg":"ES256","kid":"own"}"#;
    let good = token(header, ANN, sign);
    assert_eq!(subject(&all, &good), Ok("sann".to_owned()));

    // Without a signature, and with keys or algorithms of other kinds.
    for none in ["none", "None", "NONE", "nOnE", ""] {
        refused(&all, &token(&format!("{{\"alg\":\"{none}\"}}"), ANN, |_| Vec::new()), "algorithm");
    }
    refused(&all, &token(r#"{"kid":"own"}"#, ANN, sign), "algorithm");
    refused(&all, &token(header, ANN, |_| Vec::new()), "signature");
    let fraction = token(header, r#"{"sub":"ann","exp":4102444800.75,"nbf":1e3}"#, sign);
    let long_good = token(header, r#"{"sub":"ann","exp":4102444800,"nbf":-1}"#, sign);
    assert_eq!(subject(&all, &fraction), Ok("sann".to_owned()));
    assert_eq!(subject(&all, &long_good), Ok("sann".to_owned()));
    let public = RSA_PEM.as_bytes();
    let by_rsa = settings(KeySet::of_pem(public).unwrap());
    for secret in [public, RSA_PEM.trim_end().as_bytes(), RSA.as_bytes()] {
        refused(&by_rsa, &token(r#"{"alg":"HS256"}"#, ANN, hs256(secret)), "algorithm");
        refused(&all, &token(r#"{"alg":"HS256","kid":"rsa"}"#, ANN, hs256(secret)), "algorithm");
    }
    refused(&all, PS256, "algorithm");
    refused(
        &all,
        &RS256.replacen("eyJhbGciOiJSUzI1NiIsImtpZCI6InJzYSJ9", &encode(r#"{"alg":"RS256","kid":"own"}"#), 1),
        "algorithm",
    );

    // With other keys, and keys of its own.
    refused(&all, &token(header, ANN, |message| other.sign(message)), "signature");
    refused(&all, &token(r#"{"alg":"ES256","kid":"other"}"#, ANN, |message| other.sign(message)), "kid");
    let with_jwk = format!(r#"{{"alg":"ES256","kid":"own","jwk":{}}}"#, other.jwk("own", "P-256", ""));
    refused(&all, &token(&with_jwk, ANN, |message| other.sign(message)), "signature");
    refused(&all, &token(r#"{"alg":"ES256","kid":7}"#, ANN, sign), "");

    // With other content than what was signed.
    let changed = token(header, r#"{"sub":"bob","exp":4102444800}"#, |_| Vec::new());
    let (signature, message) = (good.rsplit_once('.').unwrap().1, changed.rsplit_once('.').unwrap().0);
    refused(&all, &format!("{message}.{signature}"), "signature");
    for cut in [good.len() - 1, good.len() - 40, 30, 10] {
        refused(&all, &good[..cut], "");
    }
    for odd in ["a", "..", "a.b", "a.b.c", "a.b.c.d", &format!("{good}."), &format!("{good}="), &format!("{good}.x.y")]
    {
        refused(&all, odd, "");
    }

    // Out of its time.
    for (payload, why) in [
        (r#"{"sub":"ann"}"#, "exp"),
        (r#"{"sub":"ann","exp":null}"#, "exp"),
        (r#"{"sub":"ann","exp":"4102444800"}"#, "exp"),
        (r#"{"sub":"ann","exp":1000}"#, "expired"),
        (r#"{"sub":"ann","exp":-1}"#, "expired"),
        (r#"{"sub":"ann","exp":[4102444800]}"#, ""),
        (r#"{"sub":"ann","exp":1e400}"#, ""),
        (r#"{"sub":"ann","exp":4102444800,"nbf":4102444700}"#, "not valid yet"),
        (r#"{"sub":"ann","exp":4102444800,"nbf":"1"}"#, "nbf"),
        // That two readers may take for two callers.
        (r#"{"sub":"ann","sub":"bob","exp":4102444800}"#, ""),
        (r#"{"sub":"ann","s\u0075b":"bob","exp":4102444800}"#, ""),
        (r#"{"sub":"ann","exp":4102444800,"a":{"b":1,"b":2}}"#, "twice"),
        (r#"["ann"]"#, ""),
        ("", ""),
    ] {
        refused(&all, &token(header, payload, sign), why);
    }
    refused(&all, &token(r#"{"alg":"ES256","kid":"own","kid":"rsa"}"#, ANN, sign), "twice");
    for extension in [r#""crit":["exp"]"#, r#""b64":false,"crit":["b64"]"#, r#""zip":"DEF""#] {
        refused(&all, &token(&format!(r#"{{"alg":"ES256","kid":"own",{extension}}}"#), ANN, sign), "extension");
    }
    let long = format!(r#"{{"sub":"ann","exp":4102444800,"x":"{}"}}"#, "x".repeat(48 << 10));
    refused(&all, &token(header, &long, sign), "longer");
}

#[test]
fn issuer_audience_and_leeway_count() {
    let sign = hs256(SECRET);
    let mut all = settings(KeySet::of_secret(SECRET).unwrap());
    (all.issuer, all.audience) = (Some("id".to_owned()), vec!["a".to_owned(), "b".to_owned()]);
    let of = |claims: &str| token(r#"{"alg":"HS256"}"#, &format!(r#"{{"sub":"ann","exp":4102444800{claims}}}"#), &sign);
    for good in [r#","iss":"id","aud":"a""#, r#","iss":"id","aud":["x","b"]"#] {
        assert_eq!(subject(&all, &of(good)), Ok("sann".to_owned()), "{good}");
    }
    refused(&all, &of(r#","aud":"a""#), "names no issuer");
    refused(&all, &of(r#","iss":"di","aud":"a""#), "another issuer");
    refused(&all, &of(r#","iss":["di","id"],"aud":"a""#), "iss is not text");
    refused(&all, &of(r#","iss":"id""#), "names no audience");
    refused(&all, &of(r#","iss":"id","aud":"c""#), "another audience");
    refused(&all, &of(r#","iss":"id","aud":[]"#), "audience");

    let all = settings(KeySet::of_secret(SECRET).unwrap());
    let at = |claim: &str, seconds: i64| {
        let time = i64::try_from(now()).unwrap() + seconds;
        let exp = if claim == "exp" { String::new() } else { ",\"exp\":4102444800".to_owned() };
        token(r#"{"alg":"HS256"}"#, &format!(r#"{{"sub":"ann","{claim}":{time}{exp}}}"#), &sign)
    };
    assert!(subject(&all, &at("exp", -20)).is_ok() && subject(&all, &at("nbf", 20)).is_ok());
    refused(&all, &at("exp", -40), "expired");
    refused(&all, &at("nbf", 40), "not valid yet");
}

#[test]
fn keys_that_cannot_be_used_are_refused() {
    let why = |keys: Result<KeySet, Unusable>| keys.unwrap_err().message;
    assert!(why(KeySet::of_secret(&SECRET[..31])).contains("32 bytes"));
    for (pem, what) in [
        ("", "holds 0"),
        ("-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----\n", "cannot be used"),
        ("-----BEGIN PRIVATE KEY-----\nMCow\n-----END PRIVATE KEY-----\n", "private key"),
        ("-----BEGIN PUBLIC KEY-----\n", "not PEM"),
        (&RSA_PEM.repeat(9), "holds 9"),
    ] {
        assert!(why(KeySet::of_pem(pem.as_bytes())).contains(what), "{what}");
    }
    let key = Pair::new(&ECDSA_P256_SHA256_FIXED_SIGNING);
    for unfit in [
        "",
        &key.jwk("a", "P-256", r#","use":"enc""#),
        &key.jwk("a", "P-256", r#","key_ops":["encrypt"]"#),
        &key.jwk("a", "P-256", r#","alg":"RS256""#),
        &key.jwk("a", "P-384", ""),
        r#"{"kty":"oct","k":"c2hvcnQ"}"#,
        r#"{"kty":"RSA","e":"AQAB","n":"25sK"}"#,
        r#"{"kty":"new"}"#,
        r#"{"kty":7}"#,
        "7",
    ] {
        assert!(why(jwks(&[unfit])).contains("none of its keys"), "{unfit}");
    }
    for text in ["", "[]", "{}", "{\"keys\":{}}"] {
        assert!(why(KeySet::of_jwks(text.as_bytes(), true)).contains("not a JSON Web Key Set"), "{text}");
    }
    // Others do not take the good ones with them.
    let good = key.jwk("a", "P-256", r#","use":"sig","key_ops":["verify"],"alg":"ES256""#);
    assert_eq!(jwks(&["7", r#"{"kty":"new"}"#, &good]).unwrap().fitting(Some("a"), Algorithm::ES256).count(), 1);
    // Of a file with too many, the last ones would count for nothing.
    let many: Vec<String> = (0..65).map(|number| key.jwk(&number.to_string(), "P-256", "")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let limited = |keys: &[&str]| jwks(keys).unwrap().limited_to(&[Algorithm::ES256]);
    assert!(why(limited(&many)).contains("65 keys"));
    assert!(limited(&many[1..]).unwrap().knows(Some("64")));
    let mut fetched = KeySet::of_fetched(format!("{{\"keys\":[{}]}}", many.join(",")).as_bytes()).unwrap();
    fetched.truncate();
    assert!(fetched.knows(Some("63")) && !fetched.knows(Some("64")));
    // A secret is no public key.
    let secret = format!(r#"{{"kty":"oct","k":"{}"}}"#, encode(SECRET));
    assert!(KeySet::of_jwks(format!("{{\"keys\":[{secret}]}}").as_bytes(), false).is_err());
    assert!(KeySet::of_secret(SECRET).unwrap().limited_to(&[Algorithm::RS256]).is_err());
    let limited = KeySet::of_secret(SECRET).unwrap().limited_to(&[Algorithm::HS512, Algorithm::ES256]).unwrap();
    assert_eq!(limited.fitting(None, Algorithm::HS256).count(), 0);
    assert_eq!(
        limited.fitting(None, Algorithm::HS512).map(|key| key.family()).collect::<Vec<_>>(),
        [AlgorithmFamily::Hmac]
    );
    assert_eq!(format!("{limited:?}"), "KeySet { keys: 1, .. }");
}

#[tokio::test]
async fn a_token_is_verified_once_until_it_expires() {
    let usage = Usage::new(&Limits::default(), &Metrics::new());
    let verifier = Verifier::new(settings(KeySet::of_secret(SECRET).unwrap()), None, &usage);
    let sign = hs256(SECRET);
    let good = token(r#"{"alg":"HS256"}"#, ANN, &sign);
    let first = verifier.verify(good.as_bytes()).await.unwrap();
    let again = verifier.verify(good.as_bytes()).await.unwrap();
    assert!(Arc::ptr_eq(&first, &again));
    // One that expires while it is remembered, here at once.
    let time = now() - 29;
    let short = token(r#"{"alg":"HS256"}"#, &format!(r#"{{"sub":"ann","exp":{time}}}"#), &sign);
    assert!(verifier.verify(short.as_bytes()).await.is_ok());
    tokio::time::sleep(Duration::from_millis(2100)).await;
    assert!(verifier.verify(short.as_bytes()).await.is_err());
    // The same settings keep what is known.
    let same = Verifier::new(settings(KeySet::of_secret(SECRET).unwrap()), Some(&verifier), &usage);
    assert!(Arc::ptr_eq(&same, &verifier));
    let other = Settings { leeway: Duration::ZERO, ..settings(KeySet::of_secret(SECRET).unwrap()) };
    assert!(!Arc::ptr_eq(&Verifier::new(other, Some(&verifier), &usage), &verifier));
}

/// Also where the former key has the same name, or none, so that it may have signed any token.
#[tokio::test]
async fn keys_that_changed_are_noticed_by_a_token_that_those_in_force_do_not_verify() {
    let (lines, _logging) = logged();
    let (old, new) = (Pair::new(&ECDSA_P256_SHA256_FIXED_SIGNING), Pair::new(&ECDSA_P256_SHA256_FIXED_SIGNING));
    for (header, set) in [
        (r#"{"alg":"ES256"}"#, r#"{"keys":[KEY]}"#),
        (r#"{"alg":"ES256"}"#, r#"{"keys":[NAMELESS]}"#),
        (r#"{"alg":"ES256","kid":"a"}"#, r#"{"keys":[KEY]}"#),
        (r#"{"alg":"ES256","kid":"a"}"#, r#"{"keys":[NAMELESS]}"#),
        // The former one is for another algorithm.
        (r#"{"alg":"RS256","kid":"rsa"}"#, ""),
    ] {
        let publish = |pair: &Pair| {
            let key = pair.jwk("a", "P-256", "");
            set.replace("KEY", &key).replace("NAMELESS", &key.replace(r#""kid":"a","#, ""))
        };
        let (is_rsa, first) = (set.is_empty(), old.jwk("rsa", "P-256", ""));
        let answers = match is_rsa {
            true => [format!("{{\"keys\":[{first}]}}"), format!("{{\"keys\":[{RSA}]}}")],
            false => [publish(&old), publish(&new)],
        };
        let url = served(&[("200 OK", &answers[0]), ("200 OK", &answers[1])]);
        let usage = Usage::new(&Limits::default(), &Metrics::new());
        let from_url = Settings { keys: KeySource::Url(url), ..settings(KeySet::of_secret(SECRET).unwrap()) };
        let verifier = Verifier::new(from_url, None, &usage);
        let verify = async |token: &str| verifier.verify(token.as_bytes()).await.map(|_| ());
        let former_header = if is_rsa { r#"{"alg":"ES256","kid":"rsa"}"# } else { header };
        let by_old = token(former_header, ANN, |message| old.sign(message));
        let by_new = if is_rsa { RS256.to_owned() } else { token(header, ANN, |message| new.sign(message)) };
        let forged = token(header, ANN, |_| vec![1; 64]);
        let expired = token(former_header, r#"{"sub":"ann","exp":1000}"#, |message| old.sign(message));

        assert_eq!(verify(&by_old).await, Ok(()));
        assert!(lines.take().contains("were fetched"));
        assert!(
            matches!(verify(&by_new).await, Err(Unverified::Key(_))),
            "they were asked for just now: {header} {set}"
        );
        passes(Duration::from_secs(31)).await;
        // What a key in force has signed asks for no other, and so does no secret.
        assert_eq!(verify(&expired).await, Err(Unverified::Token("it has expired")));
        let of_a_secret = token(&header.replace("ES256", "HS256").replace("RS256", "HS256"), ANN, hs256(SECRET));
        assert_eq!(verify(&of_a_secret).await, Err(Unverified::Token(NO_SECRET_FOR_IT)));
        assert!(lines.take().is_empty());
        assert_eq!(verify(&by_new).await, Ok(()), "{header} {set}");
        assert!(lines.take().contains("were fetched"));
        assert!(matches!(verify(&by_old).await, Err(Unverified::Key(_))));

        // There is no server any more, and bad signatures ask for it once.
        for time in [Duration::ZERO, Duration::from_secs(31)] {
            passes(time).await;
            for _ in 0..20 {
                assert!(matches!(verify(&forged).await, Err(Unverified::Key(_))));
            }
            assert_eq!(lines.take().matches("the former ones stay in force").count(), usize::from(!time.is_zero()));
        }
        assert_eq!(verify(&by_new).await, Ok(()));
    }
}
