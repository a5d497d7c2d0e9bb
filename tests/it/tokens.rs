//! Scopes with claims of tokens that the gate verifies: `[auth.jwt]`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};

use crate::accept::is_refused_here;
use crate::examples::Example;
use crate::reload::reload;
use crate::support::gate::Plan;
use crate::support::https::Certificates;
use crate::support::{Gate, Reply, Request, Response, Signal, Terms, Tls, Upstream, eventually};

const BODY: &str = "{\"amount\":1}";

/// A key of the issuer, and its name.
struct Signer {
    id: &'static str,
    pair: EcdsaKeyPair,
}

impl Signer {
    fn new(id: &'static str) -> Self {
        let (random, algorithm) = (SystemRandom::new(), &ECDSA_P256_SHA256_FIXED_SIGNING);
        let key = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
        Self { id, pair: EcdsaKeyPair::from_pkcs8(algorithm, key.as_ref(), &random).unwrap() }
    }

    fn jwk(&self) -> String {
        let (x, y) = self.pair.public_key().as_ref()[1..].split_at(32);
        let (id, x, y) = (self.id, encode(x), encode(y));
        format!("{{\"kty\":\"EC\",\"crv\":\"P-256\",\"kid\":\"{id}\",\"x\":\"{x}\",\"y\":\"{y}\"}}")
    }

    /// A token with these claims, good for an hour.
    fn token(&self, claims: &str) -> String {
        self.until(claims, 3600)
    }

    fn until(&self, claims: &str, seconds: i64) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let exp = i64::try_from(now).unwrap() + seconds;
        self.signed(&format!("{{\"alg\":\"ES256\",\"kid\":\"{}\"}}", self.id), &format!("{{{claims},\"exp\":{exp}}}"))
    }

    fn signed(&self, header: &str, payload: &str) -> String {
        let message = format!("{}.{}", encode(header), encode(payload));
        let signature = self.pair.sign(&SystemRandom::new(), message.as_bytes()).unwrap();
        format!("{message}.{}", encode(signature))
    }
}

fn encode(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

fn jwks(signers: &[&Signer]) -> String {
    format!("{{\"keys\":[{}]}}", signers.iter().map(|signer| signer.jwk()).collect::<Vec<_>>().join(","))
}

fn upstream() -> Upstream {
    Upstream::start(|request| Reply::ok(format!("run {}", request.nth)))
}

/// A gate whose keys belong to a subject, with the keys of these.
fn verifying(upstream: &Upstream, signers: &[&Signer], more: &str) -> Plan {
    let plan = Gate::before(upstream).defaults("scope = [\"jwt:sub\"]");
    let file = plan.path("jwks.json");
    std::fs::write(&file, jwks(signers)).unwrap();
    plan.top(&format!("auth.jwt = {{ jwks_file = {file:?}{more} }}"))
}

fn charge(key: &str, token: &str) -> Request {
    Request::post("/charges").key(key).header("Authorization", format!("Bearer {token}")).body(BODY)
}

/// Holds that a request with this token is refused for it, without the upstream or the store having heard of it.
#[track_caller]
fn expect_unverified(gate: &Gate, request: &Request) -> Response {
    let refused = request.send(gate);
    refused.expect_problem(401, "credentials-unverifiable");
    assert_eq!(refused.get("www-authenticate").as_deref(), Some("Bearer error=\"invalid_token\""));
    assert_eq!(refused.json()["retryable"], false);
    assert!(gate.records("limit=10").is_empty(), "{}", refused.show());
    refused
}

/// A client that can guess the id of a record does not learn whether the record exists.
#[test]
fn a_wrong_token_gets_one_answer_whether_an_accepted_request_is_there_or_not() {
    if is_refused_here() {
        return;
    }
    let (upstream, own, other) = (upstream(), Signer::new("a"), Signer::new("a"));
    let gate = verifying(&upstream, &[&own], "").defaults("scope = [\"jwt:sub\"]\nmode = \"accept\"").start();
    let bearer = |signer: &Signer, subject: &str| format!("Bearer {}", signer.token(&format!("\"sub\":\"{subject}\"")));
    let ann = bearer(&own, "ann");
    let accepted = Request::post("/charges").key("k").header("Authorization", &ann).body(BODY).send(&gate);
    let location = accepted.expect(202, "accepted").get("location").expect("a location");
    let none = format!("{}{}", &location[..location.len() - 4], "0000");
    let status = |location: &str, token: &str| {
        let answer = Request::get(location).header("Authorization", token).send(&gate);
        answer.status
    };
    assert_eq!(status(&location, &ann), 200);
    for wrong in ["Bearer junk", &bearer(&other, "ann")] {
        for location in [&location, &none] {
            assert_eq!(status(location, wrong), 401, "{wrong}");
        }
    }
    assert_eq!((status(&location, &bearer(&own, "bob")), status(&none, &ann)), (404, 404));
}

#[test]
fn a_forged_token_runs_nothing() {
    let (own, other) = (Signer::new("own"), Signer::new("own"));
    let upstream = upstream();
    let gate = verifying(&upstream, &[&own], "").routes("[[routes]]\nname = \"all\"\nmethods = [\"POST\"]\npath = \"/{*rest}\"\n[limits]\nmax_header_size = \"256KiB\"\n").start();
    let ann = r#""sub":"ann""#;
    let hs256 = |secret: &[u8]| {
        let message =
            format!("{}.{}", encode(r#"{"alg":"HS256","kid":"own"}"#), encode(r#"{"sub":"ann","exp":4102444800}"#));
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), message.as_bytes());
        format!("{message}.{}", encode(tag))
    };
    let unsigned = format!("{}.{}.", encode(r#"{"alg":"none"}"#), encode(r#"{"sub":"ann","exp":4102444800}"#));
    let header = r#"{"alg":"ES256","kid":"own"}"#;
    for (what, token) in [
        ("none", unsigned),
        ("a public key as a secret", hs256(own.pair.public_key().as_ref())),
        ("a public key as a secret", hs256(own.jwk().as_bytes())),
        ("another key under the same name", other.token(ann)),
        ("an unknown key", Signer::new("unknown").token(ann)),
        ("expired", own.until(ann, -3600)),
        ("not valid yet", own.token(r#""sub":"ann","nbf":4102444800"#)),
        ("64 KiB", own.token(&format!(r#""sub":"ann","x":"{}""#, "x".repeat(48 << 10)))),
        ("a claim twice", own.signed(header, r#"{"sub":"ann","sub":"bob","exp":4102444800}"#)),
        ("a nested claim", own.token(r#""sub":{"name":"ann"}"#)),
        ("a list", own.token(r#""sub":["ann"]"#)),
        ("no token", "x".to_owned()),
    ] {
        let refused = expect_unverified(&gate, &charge("k-1", &token));
        let shown = refused.show();
        assert!(token.len() < 10 || !shown.contains(&token) && !gate.log().contains(&token), "{what}: {shown}");
    }
    let both = charge("k-1", &own.token(ann)).header("Authorization", format!("Bearer {}", own.token(ann)));
    expect_unverified(&gate, &both);
    assert_eq!(upstream.runs(), 0);
    charge("k-1", &own.token(ann)).send(&gate).expect(200, "executed");
}

#[test]
fn a_refreshed_token_is_the_same_caller() {
    let own = Signer::new("own");
    let upstream = upstream();
    let mut gate = verifying(&upstream, &[&own], "").start();
    let token = |claims: &str| own.token(claims);
    let first = charge("k-1", &token(r#""sub":"ann""#)).send(&gate);
    first.expect(200, "executed");
    for _ in 0..2 {
        let replay = charge("k-1", &own.until(r#""sub":"ann","jti":"2""#, 7200)).send(&gate);
        replay.expect(200, "replayed");
        first.expect_repeated_by(&replay);
        gate = gate.kill9().start();
    }
    // Values of other kinds are other callers, and so is another spelling of a number.
    for (nth, sub) in [r#""bob""#, r#""7""#, "7", "7.0", "true", r#""true""#].into_iter().enumerate() {
        charge("k-1", &token(&format!("\"sub\":{sub}"))).send(&gate).expect(200, "executed");
        assert_eq!(upstream.runs(), nth + 2, "{sub}");
    }
    // To the upstream goes the token as it came.
    let token = token(r#""sub":"ann""#);
    charge("k-2", &token).header("Connection", "authorization").send(&gate).expect(200, "executed");
    assert_eq!(upstream.last().head.get("authorization"), Some(format!("Bearer {token}")));
}

#[test]
fn an_absent_token_or_claim_is_an_absent_part() {
    let own = Signer::new("own");
    let upstream = upstream();
    let gate = verifying(&upstream, &[&own], "").start();
    let bare = Request::post("/charges").key("k-1").body(BODY);
    let basic = Request::post("/charges").key("k-1").header("Authorization", "Basic YTpi").body(BODY);
    for request in [
        &bare,
        &basic,
        &charge("k-1", ""),
        &charge("k-1", &own.token(r#""iss":"a""#)),
        &charge("k-1", &own.token(r#""sub":null"#)),
    ] {
        request.send(&gate).expect_problem(400, "scope-missing");
    }
    assert_eq!(upstream.runs(), 0);
    // What carries no key is not protected, and nothing is verified.
    let unkeyed = Request::post("/charges").header("Authorization", "Bearer x").body(BODY).send(&gate);
    assert_eq!((unkeyed.status, unkeyed.word().as_str()), (200, ""));
    gate.stop();

    let gate = verifying(&upstream, &[&own], "").defaults("scope = [\"jwt:sub?\"]").start();
    bare.send(&gate).expect(200, "executed");
    bare.send(&gate).expect(200, "replayed");
    charge("k-1", &own.token(r#""iss":"a""#)).send(&gate).expect(200, "replayed");
    charge("k-1", &own.token(r#""sub":"ann""#)).send(&gate).expect(200, "executed");
    charge("k-1", "x").send(&gate).expect_problem(401, "credentials-unverifiable");
}

#[test]
fn a_key_in_the_body_and_a_header_of_its_own() {
    let own = Signer::new("own");
    let upstream = upstream();
    let plan = verifying(&upstream, &[&own], ", header = \"X-Token\", issuer = \"id\", audience = [\"pay\"]");
    let gate = plan.defaults("scope = [\"jwt:tenant\"]\nkey.from = [\"json:/id\"]").start();
    let send = |token: &str| {
        let request = Request::post("/charges").header("Content-Type", "application/json").body("{\"id\":\"k-1\"}");
        request.header("X-Token", token).send(&gate)
    };
    let good = own.token(r#""tenant":"a","iss":"id","aud":["x","pay"]"#);
    send(&good).expect(200, "executed");
    send(&format!("Bearer {good}")).expect(200, "replayed");
    for claims in [r#""tenant":"a""#, r#""tenant":"a","iss":"id","aud":"x""#, r#""tenant":"a","iss":"x","aud":"pay""#] {
        assert_eq!(send(&own.token(claims)).status, 401, "{claims}");
    }
    assert_eq!(upstream.runs(), 1);
    // The body of a request whose token is refused is not read.
    let mut client = crate::support::Client::connect(gate.address);
    client.send("POST /charges HTTP/1.1\r\nHost: gate.test\r\nX-Token: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n");
    assert_eq!(client.response().status, 401);
}

#[test]
fn a_call_gets_a_status_of_its_own() {
    let own = Signer::new("own");
    let upstream = upstream();
    let gate = verifying(&upstream, &[&own], "").start();
    let call = Request::post("/pay.Payments/Charge").key("k-1").header("Content-Type", "application/grpc");
    let call = call.header("TE", "trailers").header("Authorization", "Bearer x").body(b"\0\0\0\0\0".to_vec());
    let refused = call.send(&gate);
    refused.expect(200, "credentials-unverifiable");
    assert_eq!(refused.get("grpc-status").as_deref(), Some("16"), "{}", refused.show());
    assert_eq!(refused.get("grpc-retry-pushback-ms").as_deref(), Some("-1"));
}

#[test]
fn files_of_keys_are_read_again() {
    let (old, new) = (Signer::new("old"), Signer::new("new"));
    let upstream = upstream();
    let plan = verifying(&upstream, &[&old], "");
    let gate = plan.start();
    let ann = r#""sub":"ann""#;
    let token = old.token(ann);
    charge("k-1", &token).send(&gate).expect(200, "executed");
    charge("k-1", &new.token(ann)).send(&gate).expect_problem(401, "credentials-unverifiable");
    std::fs::write(plan.path("jwks.json"), jwks(&[&new])).unwrap();
    gate.sighup();
    eventually("the reload", || gate.log().contains("configuration reloaded").then_some(()));
    charge("k-1", &new.token(ann)).send(&gate).expect(200, "replayed");
    charge("k-1", &token).send(&gate).expect_problem(401, "credentials-unverifiable");
    // Files that cannot be used change nothing.
    std::fs::write(plan.path("jwks.json"), "{}").unwrap();
    gate.sighup();
    eventually("the reload", || gate.log().contains("not a JSON Web Key Set").then_some(()));
    charge("k-1", &new.token(ann)).send(&gate).expect(200, "replayed");
}

/// A server of keys, which counts how often it is asked and says what `answer` does.
fn issuer(answer: impl Fn(usize) -> Reply + Send + Sync + 'static) -> (Upstream, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let server = Upstream::start(move |request| {
        assert_eq!(request.start_line(), "GET /keys?all=1 HTTP/1.1");
        answer(count.fetch_add(1, Ordering::SeqCst) + 1)
    });
    (server, asked)
}

fn from_url(upstream: &Upstream, issuer: &str, more: &str) -> Plan {
    let top = format!("auth.jwt = {{ jwks_url = \"{issuer}/keys?all=1\"{more} }}");
    Gate::before(upstream).defaults("scope = [\"jwt:sub\"]").top(&top)
}

#[test]
fn keys_of_a_url_are_fetched_when_a_token_names_an_unknown_one() {
    let (old, new) = (Signer::new("old"), Signer::new("new"));
    let (first, second) = (jwks(&[&old]), jwks(&[&new]));
    let (issuer, asked) = issuer(move |nth| Reply::ok(if nth == 1 { &first } else { &second }));
    let upstream = upstream();
    let plan = from_url(&upstream, &issuer.url(), "");
    let gate = plan.start();
    let ann = r#""sub":"ann""#;
    assert_eq!(gate.admin("GET", "/readyz", None).status, 200);
    let known = old.token(ann);
    charge("k-1", &known).send(&gate).expect(200, "executed");
    // At most once in 30 s, whatever comes.
    for _ in 0..3 {
        charge("k-1", &new.token(ann)).send(&gate).expect_problem(401, "credentials-unverifiable");
    }
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    std::thread::sleep(Duration::from_secs(30));
    charge("k-1", &new.token(ann)).send(&gate).expect(200, "replayed");
    charge("k-1", &Signer::new("x").token(ann)).send(&gate).expect_problem(401, "credentials-unverifiable");
    // What a key that is gone has signed is not good any more, although it was verified before.
    charge("k-1", &known).send(&gate).expect_problem(401, "credentials-unverifiable");
    assert_eq!(asked.load(Ordering::SeqCst), 2);
    // A reload keeps them.
    gate.sighup();
    eventually("the reload", || gate.log().contains("configuration reloaded").then_some(()));
    charge("k-1", &new.token(ann)).send(&gate).expect(200, "replayed");
    assert_eq!(asked.load(Ordering::SeqCst), 2);
}

#[test]
fn a_reload_gives_no_keys_up_for_a_url_that_has_none() {
    let own = Signer::new("own");
    let (set, other) = (jwks(&[&own]), jwks(&[&own]));
    let (first, _) = issuer(move |_| Reply::ok(&set));
    let (second, _) = issuer(move |_| Reply::ok(&other));
    let upstream = upstream();
    let gate = from_url(&upstream, &first.url(), "").start();
    let token = own.token(r#""sub":"ann""#);
    charge("k-1", &token).send(&gate).expect(200, "executed");
    let nowhere = format!("http://{}", Upstream::free_address());
    let plan = |url: &str| {
        let top = format!("auth.jwt = {{ jwks_url = \"{url}/keys?all=1\" }}");
        gate.plan.clone().top(&top)
    };
    assert!(!reload(&gate, &plan(&nowhere)), "{}", gate.log());
    assert!(gate.log().contains("no keys could be fetched from there"), "{}", gate.log());
    charge("k-1", &token).send(&gate).expect(200, "replayed");
    assert!(reload(&gate, &plan(&second.url())), "{}", gate.log());
    charge("k-1", &token).send(&gate).expect(200, "replayed");
}

#[test]
fn keys_that_cannot_be_fetched() {
    let own = Signer::new("own");
    let set = jwks(&[&own]);
    let large = format!("{{\"keys\":[{}],\"x\":\"{}\"}}", own.jwk(), "x".repeat(1 << 20));
    let signal = Signal::new();
    let held = signal.clone();
    // Before the fourth answer, none is of use.
    let (issuer, asked) = issuer(move |nth| match nth {
        1 => Reply::raw("HTTP/1.1 302 Found\r\nLocation: /keys?all=1\r\nContent-Length: 0\r\n\r\n"),
        2 => Reply::ok(&large),
        3 => Reply::ok(&set).hold_until(&held),
        _ => Reply::ok(&set),
    });
    let upstream = upstream();
    let gate = from_url(&upstream, &issuer.url(), "").start();
    let request = charge("k-1", &own.token(r#""sub":"ann""#));
    let refused = request.send(&gate);
    refused.expect_problem(503, "overloaded");
    assert!(refused.retry_after() >= 1 && upstream.runs() == 0);
    // It is no fault of a client without a token.
    Request::post("/charges").key("k-1").body(BODY).send(&gate).expect_problem(400, "scope-missing");
    let unready = gate.admin("GET", "/readyz", None);
    assert_eq!((unready.status, &unready.json()["reason"]), (503, &"waiting-for-token-keys".into()));
    assert!(gate.log().contains("redirects are not followed"), "{}", gate.log());
    eventually("an answer that is too large", || gate.log().contains("larger than 1048576 bytes").then_some(()));
    eventually("an answer that is too late", || gate.log().contains("did not answer in time").then_some(()));
    signal.open();
    eventually("the gate is ready", || (gate.admin("GET", "/readyz", None).status == 200).then_some(()));
    request.send(&gate).expect(200, "executed");
    assert_eq!(asked.load(Ordering::SeqCst), 4);
    // They are not asked for again so soon, whatever becomes of the issuer.
    drop(issuer);
    charge("k-2", &Signer::new("x").token(r#""sub":"ann""#))
        .send(&gate)
        .expect_problem(401, "credentials-unverifiable");
    charge("k-1", &own.token(r#""sub":"ann""#)).send(&gate).expect(200, "replayed");
}

#[test]
fn keys_come_over_tls() {
    let Some(certificates) = Certificates::new() else { return };
    certificates.sign("id", "subjectAltName=IP:127.0.0.1");
    let own = Signer::new("own");
    let set = jwks(&[&own]);
    let (issuer, _) = issuer(move |_| Reply::ok(&set));
    let tls = Tls::before(issuer.address, Terms::of(certificates.directory(), "id"));
    let upstream = upstream();
    let ca = format!(", tls = {{ ca = {:?} }}", certificates.path("ca.pem"));
    let gate = from_url(&upstream, &tls.url(), &ca).start();
    charge("k-1", &own.token(r#""sub":"ann""#)).send(&gate).expect(200, "executed");
    // By nobody whom the gate does not trust.
    let gate = from_url(&upstream, &tls.url(), "").start();
    charge("k-1", &own.token(r#""sub":"ann""#)).send(&gate).expect_problem(503, "overloaded");
}

#[test]
fn explain_verifies_too() {
    let own = Signer::new("own");
    let upstream = upstream();
    let plan = verifying(&upstream, &[&own], "");
    let gate = plan.start();
    let explain = |token: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(["explain", "--config", plan.config().to_str().unwrap(), "-H", "Idempotency-Key: k-1"]);
        command.args([
            "-H",
            "Content-Type:",
            "-H",
            &format!("Authorization: Bearer {token}"),
            "-d",
            BODY,
            "http://gate.test/charges",
        ]);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let token = own.token(r#""sub":"ann""#);
    charge("k-1", &token).header("Host", "gate.test").send(&gate).expect(200, "executed");
    let id = gate.records("key=k-1")[0]["id"].as_str().unwrap().to_owned();
    let explained = explain(&token);
    assert!(explained.contains(&id) && explained.contains("jwt:sub: present"), "{explained}");
    assert!(!explained.contains("ann") && !explained.contains(&token), "{explained}");
    let refused = explain(&own.until(r#""sub":"ann""#, -60));
    assert!(refused.contains("401 credentials-unverifiable") && refused.contains("expired"), "{refused}");
}

#[test]
fn example_of_many_tenants() {
    let signer = Signer::new("a");
    let keys = jwks(&[&signer]);
    let issuer = Upstream::start(move |_| Reply::ok(&keys));
    let upstream = Upstream::start(|request| match request.start_line().starts_with("GET ") {
        true => Reply::status("403 Forbidden", "no more"),
        false => Reply::ok(format!("run {}", request.nth)),
    });
    let url = issuer.url();
    let gate = Example::start_with("multi-tenant", &upstream.url(), &[("ONCEGATE_AUTH__JWT__JWKS_URL", &url)]);
    let user = |tenant: &str, name: &str| signer.token(&claims_of(tenant, name));
    let order = |token: &str| {
        Request::post("/v1/orders").key("order-1").header("Authorization", format!("Bearer {token}")).body(BODY)
    };
    let first = eventually("the gate has keys", || {
        let first = gate.send(&order(&user("acme", "ann")));
        (first.word() != "overloaded").then_some(first)
    });
    first.expect(200, "executed");
    // A renewed token, another user, another tenant.
    gate.send(&order(&signer.until(&claims_of("acme", "ann"), 60))).expect(200, "replayed");
    gate.send(&order(&user("acme", "bob"))).expect(200, "executed");
    gate.send(&order(&user("other", "ann"))).expect(200, "executed");
    gate.send(&order(&signer.token("\"sub\":\"ann\""))).expect_problem(401, "credentials-unverifiable");
    let refund = |token: &str| {
        Request::post("/v1/refunds").key("r-1").header("Authorization", format!("Bearer {token}")).body(BODY)
    };
    gate.send(&refund(&user("acme", "ann"))).expect(200, "executed");
    gate.send(&refund(&user("acme", "ann"))).expect(403, "refused");
}

fn claims_of(tenant: &str, name: &str) -> String {
    format!("\"iss\":\"https://id.example.com/\",\"aud\":\"app\",\"tenant\":\"{tenant}\",\"sub\":\"{name}\"")
}
