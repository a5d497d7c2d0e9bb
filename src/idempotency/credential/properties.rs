//! What holds of any two requests under the default scope.

use http::{HeaderMap, HeaderValue};
use proptest::prelude::*;

use super::super::codec::{Answer, Content, Head};
use super::super::decide::{Decision, decide_read};
use super::super::fingerprint::{Fingerprint, Recipe};
use super::super::identity::RecordIdHasher;
use super::super::key::Key;
use super::super::policy::Policy;
use super::super::record::{AttemptToken, Record, State, Timestamp};
use super::super::recovery::Recovery;
use super::super::scope::ClientCertificate;
use super::*;

/// The lines of a request that say who it is from.
#[derive(Clone, Debug)]
struct Lines {
    key: Vec<&'static str>,
    authorization: Vec<&'static str>,
    cookie: Vec<&'static str>,
    /// A subject; or a subject, a slash, and an alternative name. The subject may be empty.
    certificate: Option<&'static str>,
}

/// Of `{"iss":"i","sub":"a"}`, `{"sub":"a"}`, `{"iss":"i","sub":"b"}` and `{"sub":7}`, and of the first again.
const TOKENS: [&str; 6] = [
    "Bearer e30.eyJpc3MiOiJpIiwic3ViIjoiYSJ9.x",
    "Bearer e30.eyJzdWIiOiJhIn0.x",
    "Bearer e30.eyJpc3MiOiJpIiwic3ViIjoiYiJ9.x",
    "Bearer e30.eyJzdWIiOjd9.x",
    "Bearer e30.eyJpc3MiOiJpIiwic3ViIjoiYSJ9.y",
    "bearer  e30.eyJpc3MiOiJpIiwic3ViIjoiYSJ9.y",
];

fn request() -> impl Strategy<Value = Lines> {
    // Values that could pass for one another's if their places or their lengths did not count.
    let few = |values: &[&'static str]| prop::sample::select(values.to_vec());
    let key = prop::collection::vec(few(&["", "k", "l", "Basic", "s=1", "Bearer o", "anonymous"]), 0..3);
    let basic = ["Basic YTpw", "Basic YTpx", "basic  YTpw", "Basic YjpwYTpw", "Basic !", "Basic"];
    let other = ["", "k", "s=1", "Bearer", "Bearer o", "Bearer p", "cookie", "authorization"];
    let authorization = prop_oneof![
        2 => prop::collection::vec(few(&basic), 0..2),
        2 => prop::collection::vec(few(&TOKENS), 0..2),
        2 => prop::collection::vec(few(&other), 0..3),
        1 => prop::collection::vec(few(&[&basic[..], &TOKENS, &other].concat()), 0..3),
    ];
    let cookie = prop::collection::vec(few(&["", ";", "s=1", "s=2", "s=1; t=2", "t=2", "k"]), 0..3);
    let certificate = prop::option::of(few(&["ann", "bob", "ann/x", "/", "/x", "/y"]));
    (key, authorization, cookie, certificate).prop_map(|(key, authorization, cookie, certificate)| Lines {
        key,
        authorization,
        cookie,
        certificate,
    })
}

impl Lines {
    fn headers(&self) -> HeaderMap {
        let lines = [(X_API_KEY, &self.key), (AUTHORIZATION, &self.authorization), (COOKIE, &self.cookie)];
        let lines = lines.into_iter().flat_map(|(name, values)| values.iter().map(move |value| (name.clone(), *value)));
        lines.map(|(name, value)| (name, HeaderValue::from_static(value))).collect()
    }

    /// Everything that counts, spelled out: what must be equal for one request to get the other's answer.
    fn counted(&self) -> Vec<String> {
        let tell = |lines: &[&str]| lines.iter().any(|line| !matches!(*line, "" | "Basic" | "Bearer" | "basic"));
        let tagged = |tag: &str, lines: &[&str]| {
            let lines = lines.iter().map(|line| format!("{tag}:{line}"));
            lines.collect::<Vec<_>>()
        };
        let cookies = self.cookie.join("; ");
        let cookies: &[&str] = if cookies.trim_matches(['\t', ' ', ';']).is_empty() { &[] } else { &[&cookies] };
        if tell(&self.key) {
            let authorization = if tell(&self.authorization) { &self.authorization[..] } else { &[] };
            return [tagged("key", &self.key), tagged("authorization", authorization)].concat();
        }
        if tell(&self.authorization) {
            return match self.authorization[..] {
                // Two spellings of one scheme are one.
                [line] => match line.split_once(' ') {
                    Some((scheme, rest)) => vec![format!("{} {}", scheme.to_lowercase(), rest.trim())],
                    None => tagged("authorization", &self.authorization),
                },
                _ => tagged("authorization", &self.authorization),
            };
        }
        // Without a name it is known by its alternative names.
        let certificate = self.certificate.map(|names| match names.split_once('/') {
            Some((subject, _)) if !subject.is_empty() => subject,
            _ => names,
        });
        [tagged("cookie", cookies), tagged("certificate", certificate.as_slice())].concat()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases * 16))]

    /// Whatever state the record of one request is in, the other hears of it only if both have the same credentials in
    /// everything that counts; and then it does.
    #[test]
    fn an_answer_goes_to_equal_credentials_alone(one in request(), other in request(), retries: bool) {
        let policy = Policy {
            recovery: if retries { Recovery::Retry } else { Recovery::Hold },
            ..Policy::default()
        };
        let key = Key::parse("k", 255).unwrap();
        let identify = |lines: &Lines| {
            let headers = lines.headers();
            let certificate = lines.certificate.map(|names| {
                let (subject, san) = names.split_once('/').map_or((names, None), |(subject, san)| (subject, Some(san)));
                let subject = if subject.is_empty() { &[0x30, 0] } else { subject.as_bytes() };
                ClientCertificate::of_parts(subject, san.filter(|san| !san.is_empty()).map(str::as_bytes))
            });
            let caller =
                Caller { headers: &headers, authority: Some("a"), client_ip: None, certificate: certificate.as_ref(), claims: None };
            RecordIdHasher::new("s".into(), None).identify("n", &policy.scope, caller, &key)
        };
        let ((id, proof), (other_id, other_proof)) = (identify(&one), identify(&other));
        let is_same_caller = one.counted() == other.counted();
        if id != other_id {
            prop_assert!(!is_same_caller, "{:?} {:?}", one.counted(), other.counted());
            return Ok(());
        }
        prop_assert_eq!(proof.is_some(), other_proof.is_some(), "one has a proof, and the other has none");
        let fingerprint = Fingerprint { recipe: Recipe::default(), digest: [0; 32] };
        let head = Head::new(fingerprint, http::Method::POST, "/", &key).with_proof(proof).encode();
        for state in State::ALL {
            let answer = Answer {
                status: http::StatusCode::OK,
                reason: None,
                headers: Vec::new(),
                content: Some(Content { body: "of one".into(), trailers: Vec::new() }),
            };
            let record = Record {
                attempt: AttemptToken([1; 16]),
                state,
                claimed_at: Timestamp(0),
                until: Timestamp(10),
                head: head.clone(),
                answer: (state == State::Completed).then(|| answer.encode()),
            };
            // In flight with a lease that lasts, and with one that is past.
            for now in [Timestamp(5), Timestamp(10)] {
                if now == record.until && state != State::InFlight {
                    continue;
                }
                let decision = decide_read(now, &policy, &record, other_proof.as_ref(), true);
                prop_assert_eq!(decision != Decision::CallerDiffers, is_same_caller, "{:?} {:?}", one, other);
            }
        }
    }

    #[test]
    fn no_header_is_too_odd(
        key in prop::option::of(prop::collection::vec(any::<u8>(), 0..20)),
        authorization in "(?i:basic|bearer)? ?[ -~\u{80}-\u{ff}]{0,40}",
        payload in prop::collection::vec(any::<u8>(), 0..60),
        json in "[{}\\[\\]\",:a-z0-9\\\\]{0,40}|\\{\"sub\":[ -~]{0,30}",
    ) {
        let payloads = [payload, json.into_bytes()].map(|payload| {
            format!("Bearer e30.{}.", URL_SAFE_NO_PAD.encode(payload)).into_bytes()
        });
        for line in payloads.into_iter().chain([authorization.into_bytes()]) {
            let Ok(line) = HeaderValue::from_bytes(&line) else { continue };
            let mut headers = HeaderMap::from_iter([(AUTHORIZATION, line.clone()), (COOKIE, line)]);
            if let Some(Ok(key)) = key.as_deref().map(HeaderValue::from_bytes) {
                headers.insert(X_API_KEY, key);
            }
            let caller = Caller { headers: &headers, authority: None, client_ip: None, certificate: None, claims: None };
            let credential = Credential::of(caller);
            prop_assert_eq!(&credential, &Credential::of(caller));
        }
    }
}
