//! What is advised of routes, and where.

use std::path::{Path, PathBuf};

use super::super::tests::DEFAULT;
use super::super::{Advice, Place, Sources, load, load_text};

const APP: &str = "[upstreams]\napp = \"http://127.0.0.1:3000\"\n";

fn advice(text: &str) -> Vec<Advice> {
    load_text(PathBuf::from("gate.toml"), text).unwrap_or_else(|problems| panic!("{text}\n{problems}")).advice
}

/// What is advised of the keys that end like this, as `check` shows it.
fn advised(text: &str, key: &str) -> Vec<String> {
    let about = advice(text).into_iter().filter(|advice| advice.key.ends_with(key));
    about.map(|advice| advice.to_string()).collect()
}

/// The key of a route on SQLite where something is advised in these words.
fn key_of_advice(keys: &str, words: &str) -> Option<String> {
    let store = "[store]\nurl = \"sqlite:/tmp/gate.db\"\n";
    let route = format!("[[routes]]\nname = \"r\"\npath = \"/{{*rest}}\"\nscope = [\"host\"]\n{keys}\n");
    let mut about = advice(&format!("{store}{APP}{route}")).into_iter();
    about.find(|advice| advice.message.contains(words)).map(|advice| advice.key)
}

/// Its requests would pass unprotected, whatever the route requires of them.
#[test]
fn a_method_that_is_nearly_a_usual_one_is_advised_against() {
    let about = advised(&format!("{APP}[[routes]]\nname = \"r\"\npath = \"/x\"\nmethods = [\"PSOT\"]\n"), "methods");
    let expected =
        "gate.toml:6: routes[0].methods: advice: route `r` takes PSOT requests, and no POST; did you mean \"POST\"?";
    assert_eq!(about, [expected]);
    for methods in [
        "\"POST\", \"PATCH\"",
        "\"PROPFIND\", \"MKCOL\", \"COPY\", \"MOVE\", \"LOCK\", \"SEARCH\"",
        "\"PURGE\", \"PATCH\", \"BATCH\"",
    ] {
        assert_eq!(key_of_advice(&format!("methods = [{methods}]"), "did you mean"), None, "{methods}");
    }
}

/// The first answer makes the session of a guest: cut off, its retry has another scope.
#[test]
fn a_scope_of_a_cookie_that_may_be_missing_is_advised_against() {
    let advised = |scope: &str| {
        let route = "[[routes]]\nname = \"r\"\npath = \"/x\"";
        let mut about = advised(&format!("{APP}{route}\nscope = [{scope}]\n"), "scope");
        about.retain(|advice| advice.contains("which an answer can set"));
        about
    };
    for (scope, word) in [("\"cookie:session?\"", "session"), ("\"host\", \"credential\", \"cookie:s?\"", "s")] {
        let [advice] = &advised(scope)[..] else { panic!("{scope}: {:?}", advised(scope)) };
        assert!(advice.contains(&format!("write \"cookie:{word}\"")), "{advice}");
    }
    for scope in ["\"cookie:session\"", "\"host\", \"header:X-Tenant?\""] {
        assert_eq!(advised(scope), [""; 0], "{scope}");
    }
}

#[test]
fn an_event_of_a_sender_is_not_to_be_accepted() {
    let advised = |preset: &str| {
        key_of_advice(&format!("mode = \"accept\"\npreset = \"{preset}\""), "their sender counts each 202 as handled")
    };
    for preset in ["stripe-webhook", "sns", "cloudevents"] {
        assert_eq!(advised(preset).as_deref(), Some("routes[0].mode"), "{preset}");
    }
    assert_eq!((advised("stripe"), advised("ietf")), (None, None));
}

#[test]
fn an_observed_route_answers_no_preflights() {
    let cors = "cors = { origins = [\"https://shop.example\"], preflight = true }";
    let advised = |mode: &str| key_of_advice(&format!("mode = \"{mode}\"\n{cors}"), "`cors.preflight` has no effect");
    assert_eq!(advised("observe").as_deref(), Some("routes[0].cors.preflight"));
    for mode in ["protect", "pass", "accept"] {
        assert_eq!(advised(mode), None, "{mode}");
    }
}

/// The gate delivers a request again by itself: no client decides that an answer 5xx means that nothing was done.
#[test]
fn a_route_that_accepts_requests_is_to_say_what_its_5xx_mean() {
    let advised = |keys: &str| key_of_advice(keys, "after an answer 5xx");
    assert_eq!(advised("mode = \"accept\"").as_deref(), Some("routes[0].mode"));
    assert_eq!(advised("async = \"allow\"").as_deref(), Some("routes[0].async"));
    for keys in [
        "mode = \"protect\"",
        "mode = \"accept\"\noutcomes.5xx = \"release\"",
        "mode = \"accept\"\noutcomes.500 = \"hold\"",
    ] {
        assert_eq!(advised(keys), None, "{keys}");
    }
    // Those are held: nothing delivers it again by itself.
    assert!(key_of_advice("mode = \"accept\"", "after an answer 5xx other than 502 and 504").is_some());
}

#[test]
fn a_route_whose_keys_are_in_json_is_to_require_them() {
    let advised = |keys: &str| key_of_advice(keys, "`Content-Encoding`");
    for from in ["\"json:/id\"", "\"header:Idempotency-Key\", \"json:/id\"", "\"template:a-{json:/id}\""] {
        assert_eq!(advised(&format!("key.from = [{from}]")).as_deref(), Some("routes[0].key"), "{from}");
    }
    for keys in [
        "key = { from = [\"json:/id\"], required = true }",
        // It is chosen.
        "key = { from = [\"json:/id\"], required = false }",
        "key.from = [\"json:/id\"]\n[defaults]\nkey.required = false",
        // One that accepts requires it.
        "key.from = [\"json:/id\"]\nmode = \"accept\"",
        "key.from = [\"json:/id\"]\nmode = \"observe\"",
        // Each request has a key.
        "key.from = [\"json:/id\", \"fingerprint\"]",
        // An event that cannot be read is refused.
        "key.from = [\"cloudevent\"]",
        "key.from = [\"header:X-Id\"]",
        "preset = \"stripe-webhook\"",
    ] {
        assert_eq!(advised(keys), None, "{keys}");
    }
}

#[test]
fn a_route_that_accepts_requests_is_to_limit_them() {
    let advised = |keys: &str| key_of_advice(keys, "nothing limits");
    assert_eq!(advised("mode = \"accept\"").as_deref(), Some("routes[0].mode"));
    assert_eq!(advised("async = \"allow\"").as_deref(), Some("routes[0].async"));
    assert_eq!(advised("mode = \"accept\"\nquota = { new_keys = 10, per = \"1s\" }"), None);
    assert_eq!(advised("mode = \"protect\""), None);
}

#[test]
fn a_route_whose_keys_are_fingerprints_is_to_say_for_how_long() {
    let told = |defaults: &str, keys: &str| {
        let route = "[[routes]]\nname = \"r\"\npath = \"/{*rest}\"\nscope = [\"host\"]\n";
        let about = advised(&format!("{APP}{defaults}{route}{keys}\n"), "key");
        about.iter().filter(|advice| advice.contains("an equal request")).count()
    };
    let fingerprint = "key.from = [\"header:Idempotency-Key\", \"fingerprint\"]";
    assert_eq!(told("", fingerprint), 1);
    assert_eq!(told("[defaults]\nttl = \"10m\"\n", fingerprint), 0);
    assert_eq!(told("", &format!("{fingerprint}\nttl = \"7d\"")), 0);
    assert_eq!(told("", "key.from = [\"header:Idempotency-Key\"]"), 0);
}

#[test]
fn a_route_for_the_rest_is_one_whatever_its_parameter_is_called() {
    for (path, count) in [("/{*rest}", 0), ("/{*path}", 0), ("/v1/{*rest}", 1)] {
        let route = format!("[[routes]]\nname = \"r\"\npath = \"{path}\"\n");
        let about = advice(&format!("{APP}{route}")).into_iter();
        assert_eq!(about.filter(|advice| advice.message.contains("would protect the rest")).count(), count, "{path}");
    }
}

#[test]
fn keys_that_do_nothing_in_the_mode_of_their_route_are_advised_against() {
    let store = "[store]\nurl = \"sqlite:/tmp/gate.db\"\n";
    let idle = |keys: &str| {
        let route = format!("[[routes]]\nname = \"r\"\npath = \"/{{*rest}}\"\nscope = [\"host\"]\n{keys}\n");
        let about =
            advice(&format!("{store}{APP}{route}")).into_iter().filter(|advice| advice.message.contains("no effect"));
        about.map(|advice| advice.to_string()).collect::<Vec<_>>()
    };
    let line = |key: &str, rest: &str| {
        format!("gate.toml:10: routes[0].{key}: advice: `{key}` has no effect: route `r` {rest}")
    };
    let needed = idle("mode = \"accept\"\nkey.required = false");
    assert!(needed.len() == 1 && needed[0].contains("`key.required` has no effect"), "{needed:?}");
    assert_eq!(idle("mode = \"accept\"\nkey.required = true"), Vec::<String>::new());
    let passes = "forwards its requests unprotected";
    for keys in
        ["cors.origins = [\"*\"]", "docs = \"https://docs.example.com\"", "upstream = \"app\"", "namespace = \"n\""]
    {
        assert_eq!(idle(&format!("mode = \"pass\"\n{keys}")), Vec::<String>::new(), "{keys}");
    }
    assert_eq!(idle("mode = \"pass\"\nttl = \"7d\""), [line("ttl", passes)]);
    assert_eq!(idle("mode = \"pass\"\nkey.required = true"), [line("key", passes)]);
    assert_eq!(idle("mode = \"observe\"\nasync = \"allow\""), [line("async", "only observes")]);
    assert_eq!(idle("mode = \"observe\"\nstore_failure = \"forward\""), [line("store_failure", "only observes")]);
    assert_eq!(idle("mode = \"observe\"\nttl = \"7d\""), Vec::<String>::new());
    let accept = "accepts no requests; write async = \"allow\", or mode = \"accept\"";
    assert_eq!(idle("mode = \"protect\"\ndeliver.attempts = 3"), [line("deliver", accept)]);
    assert_eq!(idle("async = \"allow\"\ndeliver.attempts = 3"), Vec::<String>::new());
    let keys = "async = \"allow\"\nbody = \"stream\"\nin_flight = { wait = \"1s\" }";
    let found = idle(&format!("mode = \"accept\"\n{keys}"));
    let expected =
        |(nth, key): (usize, &str)| line(key, "accepts every request").replace(":10:", &format!(":{}:", 10 + nth));
    assert_eq!(found, ["async", "body", "in_flight"].into_iter().enumerate().map(expected).collect::<Vec<_>>());
    assert_eq!(idle("mode = \"accept\"\ndeliver.attempts = 3"), Vec::<String>::new());
    // Messages keep to it.
    let consumer =
        "[[consumers]]\nname = \"c\"\nrequest = \"POST /x\"\nsource = \"nats://127.0.0.1?stream=S&consumer=c\"\n";
    assert_eq!(idle(&format!("mode = \"protect\"\ndeliver.attempts = 3\n{consumer}")), Vec::<String>::new());
    let most = "deliver = { attempts = 3, rate = \"1/s\", timeout = \"5s\" }";
    let not_kept = "accepts no requests, and messages do not keep to it";
    assert_eq!(
        idle(&format!("mode = \"protect\"\n{most}\n{consumer}")),
        [line("deliver.rate", not_kept), line("deliver.timeout", not_kept)]
    );
    assert_eq!(idle(&format!("async = \"allow\"\n{most}\n{consumer}")), Vec::<String>::new());
    // What a key says anyway may stand there: `config print` writes all of them.
    for keys in
        ["mode = \"protect\"\ndeliver.timeout = \"30s\"", "mode = \"pass\"\nttl = \"24h\"\nkey.required = false"]
    {
        assert_eq!(idle(keys), Vec::<String>::new(), "{keys}");
    }
    for mode in ["accept", "observe", "pass", "protect"] {
        let route = format!("[[routes]]\nname = \"r\"\npath = \"/{{*rest}}\"\nmode = \"{mode}\"\n");
        let printed = load_text("gate.toml".into(), &format!("{store}{APP}{route}")).unwrap().effective.to_string();
        let idle = advice(&printed).into_iter().filter(|advice| advice.message.contains("no effect"));
        assert_eq!(idle.map(|advice| advice.to_string()).collect::<Vec<_>>(), Vec::<String>::new(), "{printed}");
    }
    // What stands in [defaults] may be for other routes.
    let defaults = "[defaults]\nttl = \"7d\"\n[[routes]]\nname = \"r\"\npath = \"/{*rest}\"\nmode = \"pass\"\n";
    assert_eq!(advised(&format!("{APP}{defaults}"), "ttl"), Vec::<String>::new());
}

#[test]
fn an_upstream_is_not_asked_about_a_key_that_it_does_not_see() {
    let advised = |from: &str, probe: &str, headers: &str| {
        let route = format!(
            "{headers}[[routes]]\nname = \"r\"\npath = \"/{{*rest}}\"\nscope = [\"host\"]\nkey.from = [{from}]\n\
             recovery = {{ probe = \"/by-key/{probe}\" }}\n"
        );
        let about = advised(&format!("{APP}{route}"), "recovery");
        about.iter().filter(|advice| advice.contains("keys that are fingerprints")).count()
    };
    assert_eq!(advised("\"header:Idempotency-Key\", \"fingerprint\"", "{key}", ""), 1);
    assert_eq!(advised("\"fingerprint\"", "{id}", ""), 0);
    assert_eq!(advised("\"fingerprint\"]\nmode = \"observe\"\nmethods = [\"POST\"", "{key}", ""), 0);
    assert_eq!(advised("\"header:Idempotency-Key\"", "{key}", ""), 0);
    assert_eq!(advised("\"fingerprint\"", "{key}", "[headers]\nforward_key_as = \"X-Request-Id\"\n"), 0);
}

#[test]
fn a_probe_that_comes_when_the_outcome_is_forgotten_is_advised_against() {
    let route = |recovery: &str| {
        let route = format!("unknown_ttl = \"1h\"\nrecovery = {{ probe = \"/by-key/{{key}}\"{recovery} }}\n");
        let path = "[[routes]]\nname = \"r\"\npath = \"/{*rest}\"\nscope = [\"host\"]\n";
        advised(&format!("{APP}{path}{route}"), "recovery")
    };
    for (recovery, advised) in [("", 0), (", after = \"59m\"", 0), (", after = \"1h\"", 1)] {
        let told = route(recovery).into_iter().filter(|advice| advice.contains("it never asks"));
        assert_eq!(told.count(), advised, "{recovery}");
    }
}

#[test]
fn what_counts_for_spans_alone_is_advised_against_where_there_are_none() {
    let collector = "otlp = \"http://127.0.0.1:4318\"\n";
    let about = |keys: &str| advised(&format!("{APP}[telemetry]\n{keys}"), "telemetry.sample");
    assert_eq!(about(&format!("{collector}sample = 1.0")), Vec::<String>::new());
    let told = about("sample = 1.0");
    assert!(told.len() == 1 && told[0].contains("`sample` has no effect: no collector gets spans"), "{told:?}");
}

#[test]
fn the_format_of_an_access_log_that_is_not_there_is_advised_against() {
    let about = |keys: &str| advised(&format!("{APP}[access_log]\n{keys}\n"), "access_log.format");
    let told = about("format = \"combined\"");
    assert!(told.len() == 1 && told[0].contains("`format` has no effect: there is no access log"), "{told:?}");
    for keys in ["format = \"json\"", "path = \"-\"\nformat = \"combined\""] {
        assert_eq!(about(keys), [""; 0], "{keys}");
    }
}

#[test]
fn a_scope_that_changes_with_each_request_is_advised_against() {
    let scoped = |parts: &str| {
        let route = format!("[[routes]]\nname = \"r\"\npath = \"/{{*rest}}\"\nscope = [{parts}]\n");
        advised(&format!("{APP}{route}"), "scope")
    };
    let each = "has a value for each request";
    for (header, why) in [
        ("Date", each),
        ("X-Request-Id", each),
        ("X-Amz-Request-Id", each),
        ("Request-Id", each),
        ("X-Correlation-ID", each),
        ("traceparent", each),
        ("X-Amzn-Trace-Id", each),
        ("X-Cloud-Trace-Context", each),
        ("X-B3-TraceId", each),
        ("CF-Ray", each),
        ("X-Request-Timestamp", each),
        ("X-Amz-Date", each),
        ("X-Nonce", each),
        ("Stripe-Signature", each),
        ("Content-Digest", each),
        ("User-Agent", "tells clients apart and not callers"),
        ("Accept-Language", "tells clients apart and not callers"),
        ("X-Forwarded-For", "lists the proxies on the way"),
        ("Cookie", "has every cookie"),
    ] {
        let shown = header.to_lowercase();
        let told = scoped(&format!("\"header:{header}\""));
        let expected = format!(
            "gate.toml:6: routes[0].scope: advice: route `r` is scoped by header:{shown}, which {why}: a retry that carries \
             another value is another caller and runs again; "
        );
        assert!(told.len() == 1 && told[0].starts_with(&expected), "{header}: {told:?}");
    }
    for key in ["Idempotency-Key", "X-Idempotency-Key"] {
        let told = scoped(&format!("\"host\", \"header:{key}\""));
        assert!(told.len() == 1 && told[0].contains("which is the key itself: it tells no callers apart"), "{told:?}");
    }
    let own = "\"header:X-Order\"]\nkey.from = [\"header:X-Order\"";
    assert!(scoped(own).iter().any(|told| told.contains("which is the key itself")), "{:?}", scoped(own));
    for header in ["X-Tenant", "X-Api-Key", "X-User-Id", "X-Updated-By", "X-Candidate", "X-Array", "Api-Version"] {
        assert_eq!(scoped(&format!("\"header:{header}\"")), [""; 0], "{header}");
    }
    assert_eq!(scoped("\"host\", \"cookie:session\", \"client-ip\", \"const:Date\"").len(), 0);
    // Of a route that protects nothing, the scope does not count.
    assert_eq!(scoped("\"header:Date\"]\nmode = \"pass\"\nmethods = [\"POST\"").len(), 0);
    assert_eq!(scoped("\"header:Date\", \"header:traceparent\"").len(), 2);
}

#[test]
fn keys_that_requests_share_and_releases_of_the_unknown_are_advised_against() {
    let route = "[[routes]]\nname = \"r\"\npath = \"/{*rest}\"\n";
    for header in ["Content-Length", "Host", "Authorization", "Cookie", "User-Agent", "Via", "X-B3-TraceId"] {
        let told = advised(&format!("{APP}{route}key = {{ from = [\"header:{header}\"] }}\n"), "key");
        assert!(told.len() == 1 && told[0].contains("which different requests have in common"), "{header}: {told:?}");
    }
    for header in ["traceparent", "Date", "X-B3-SpanId"] {
        let told = advised(&format!("{APP}{route}key = {{ from = [\"header:{header}\"] }}\n"), "key");
        assert!(told.len() == 1 && told[0].contains("a retry runs again"), "{header}: {told:?}");
    }
    for header in ["Idempotency-Key", "X-Request-Id", "X-GitHub-Delivery"] {
        assert_eq!(
            advised(&format!("{APP}{route}key = {{ from = [\"header:{header}\"] }}\n"), "key").len(),
            0,
            "{header}"
        );
    }
    for (outcomes, count) in [
        ("timeout = \"release\"", 1),
        ("timeout = \"release\", broken = \"release\"", 2),
        ("unreachable = \"hold\"", 0),
    ] {
        let told = advised(&format!("{APP}{route}outcomes = {{ {outcomes} }}\n"), "outcomes");
        assert!(told.len() == count && told.iter().all(|told| told.contains("may still run")), "{told:?}");
    }
    for (status, count) in [("13", 1), ("INTERNAL", 1), ("UNKNOWN", 1), ("UNAVAILABLE", 0), ("NOT_FOUND", 0)] {
        let told = advised(&format!("{APP}{route}outcomes = {{ \"grpc:{status}\" = \"release\" }}\n"), "outcomes");
        assert!(told.len() == count && told.iter().all(|told| told.contains("cut off")), "{status}: {told:?}");
    }
}

#[test]
fn what_cannot_do_what_it_says_is_advised_against() {
    let route = "[[routes]]\nname = \"r\"\npath = \"/{*rest}\"\n";
    for (lines, key, count) in [
        ("outcomes = { \"2xx\" = \"release\" }", "outcomes", 1),
        ("outcomes = { \"201\" = \"release\" }", "outcomes", 1),
        ("outcomes = { \"404\" = \"release\" }", "outcomes", 0),
        ("mode = \"accept\"\nstore_failure = \"forward\"", "store_failure", 1),
        ("store_failure = \"forward\"", "store_failure", 0),
        ("unknown_ttl = \"1h\"\nrecovery = { probe = \"/x/{key}\", after = \"60s\", every = \"5h\" }", "recovery", 1),
        ("recovery = { probe = \"/x/{key}\", after = \"60s\", every = \"5h\" }", "recovery", 0),
        ("unknown_ttl = \"60s\"", "unknown_ttl", 1),
        ("unknown_ttl = \"61s\"", "unknown_ttl", 0),
        ("unknown_ttl = \"1s\"\nrecovery = \"retry\"", "unknown_ttl", 0),
    ] {
        let told = advised(&format!("{APP}{route}{lines}\n"), key);
        assert_eq!(told.len(), count, "{lines}: {told:?}");
    }
}

#[test]
fn a_collection_that_no_route_takes_is_advised_of() {
    let told = |routes: &[(&str, &str)]| {
        let tables = routes
            .iter()
            .enumerate()
            .map(|(nth, (path, more))| format!("[[routes]]\nname = \"r{nth}\"\npath = \"{path}\"\n{more}\n"));
        advised(&format!("{APP}{}", tables.collect::<String>()), "path")
    };
    let expected = "gate.toml:5: routes[0].path: advice: no route takes POST /v1/orders: route `r0` is for what stands below \
                    it, and creating is usually a POST to the collection, which is forwarded unprotected here; add a route \
                    with path = \"/v1/orders\", or write \"/v1/orders/{*rest}\" for both";
    let item = ("/v1/orders/{id}", "");
    assert_eq!(told(&[item]), [expected]);
    assert_eq!(told(&[item, ("/v1/orders/{id}/lines", "")]), [expected]);
    assert_eq!(told(&[item, ("/v1/orders", "methods = [\"PATCH\"]")]), [expected]);
    assert_eq!(told(&[("/v1/{tenant}/orders/{id}", ""), ("/v1/acme/orders", "")]).len(), 1);
    for others in [
        ("/v1/orders", ""),
        ("/v1/orders", "mode = \"pass\""),
        ("/v1/orders", "host = \"a.example\""),
        ("/v1/orders/", ""),
        ("/v1/orders/{*rest}", ""),
        ("/v1/{collection}", ""),
        ("/{*rest}", "methods = [\"POST\"]"),
    ] {
        assert_eq!(told(&[item, others]), [""; 0], "{others:?}");
    }
    for unlikely in [
        ("/v1/orders/{id}", "methods = [\"PATCH\", \"DELETE\"]"),
        ("/v1/orders/{id}", "mode = \"pass\""),
        ("/v1/orders/{id}/capture", ""),
        ("/{tenant}/{id}", ""),
        ("/v1/{id}", ""),
        ("/api/{id}", ""),
        ("/payments.v1.Payments/{call}", ""),
    ] {
        assert_eq!(told(&[unlikely]), [""; 0], "{unlikely:?}");
    }
    assert_eq!(told(&[("/v1/{tenant}/orders/{id}", ""), ("/v1/{any}/orders", "")]), [""; 0]);
    let nowhere = "[upstreams]\na = \"http://a\"\nb = \"http://b\"\n\
                   [[routes]]\nname = \"r\"\npath = \"/orders/{id}\"\nupstream = \"a\"\n";
    assert!(advised(nowhere, "path")[0].contains("the collection, which gets 404 `no-route` here;"));
}

/// Advice is about a key, about the table that lacks it, or about the file. It never points at a line that says nothing.
#[test]
fn no_advice_points_at_a_comment() {
    let read = |name: &str| std::fs::read_to_string(Path::new("config/examples").join(name)).unwrap();
    let scopes = "# defaults.scope = [\"host\"]\n[defaults]\n# scope = [\"host\"]\nttl = \"1s\"\n# routes\n";
    let route = "# [[routes]]\n# name\n[[routes]]\n# path = \"/a\"\n# scope\nname = \"a\"\npath = \"/a/{id}\"\n";
    let texts = [
        format!("# The gate.\n#[defaults]\n#scope = [\"header:Date\"]\n\n{APP}"),
        format!("# The gate.\n{APP}{route}"),
        format!(
            "# The gate.\n{scopes}{APP}# the first route\n{route}# another\n[[routes]]\nname = \"b\"\npath = \"/b\"\n"
        ),
        format!("# The gate.\n# all\nroutes = [\n  # one\n  {{ name = \"a\", path = \"/a/{{id}}\" }},\n]\n{APP}"),
        format!(
            "# The gate.\n{APP}[defaults] # scope\n# ttl\nscope = [ # scope\n  # raw\n  \"header:Cookie\",\n]\n{route}"
        ),
        format!("{DEFAULT}\n{APP}").replace("\n[upstreams]\n# app", "\n# app"),
        read("gateway.toml"),
        read("sidecar.toml"),
    ];
    let mut count = 0;
    for text in texts {
        let lines: Vec<&str> = text.lines().collect();
        for Advice { place, key, message } in advice(&text) {
            count += 1;
            let Place::File(_, line) = place else { panic!("{key} is of the file: {place:?}") };
            let Some(line) = line else {
                let outer = key.split(['.', '[']).next().unwrap();
                assert!(
                    !lines.iter().any(|line| line.trim_start_matches('[').starts_with(outer)),
                    "{key}: {message}\n{text}"
                );
                continue;
            };
            let line = lines[line - 1].trim();
            assert!(!line.is_empty() && !line.starts_with('#'), "{key} at {line:?}: {message}\n{text}");
        }
    }
    assert!(count > 12, "{count}");
}

/// A key that stands nowhere in a file has no line in it; what a variable sets is said of the variable.
#[test]
fn advice_on_what_is_not_in_a_file_names_the_file_or_the_variable() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gate.toml");
    std::fs::write(&file, format!("# The gate.\n{APP}")).unwrap();
    let places = |environment: &[(&str, &str)]| -> Vec<(String, Place)> {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let sources = Sources { file: Some(file.clone()), environment, ..Sources::default() };
        load(sources).unwrap().advice.into_iter().map(|advice| (advice.key, advice.place)).collect()
    };
    for (_, place) in places(&[]) {
        assert_eq!(place, Place::File(file.clone(), None));
    }
    let variable = "ONCEGATE_DEFAULTS__SCOPE";
    let of_variable = Place::Environment(variable.to_owned());
    assert_eq!(places(&[(variable, "[\"header:Date\"]")]), [("defaults.scope".to_owned(), of_variable)]);
    let port = "ONCEGATE_PORT";
    let of_port = (String::new(), Place::Environment(port.to_owned()));
    assert!(places(&[(port, "8080")]).contains(&of_port));
    assert!(!places(&[(port, "tcp://10.0.0.1:8080")]).contains(&of_port));
}

/// What is missing from a file is a problem in the first line that says anything.
#[test]
fn a_problem_has_a_line_that_says_something() {
    let problems = |text: &str| load_text(PathBuf::from("gate.toml"), text).map(|_| ()).unwrap_err().to_string();
    let several = format!("# The gate.\n# [[routes]]\n{APP}b = \"http://b\"\n");
    assert!(problems(&several).starts_with("gate.toml:3: routes: "), "{}", problems(&several));
    assert!(problems("# nothing\n").starts_with("gate.toml:1: upstreams: "));
}
