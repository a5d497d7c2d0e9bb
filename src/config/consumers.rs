//! `[[consumers]]`

mod source;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use http::header::AUTHORIZATION;
use http::uri::Scheme;
use http::{HeaderName, HeaderValue, Method, Uri};
use serde_json::json;
use toml_edit::{ArrayOfTables, Item};

use super::declare::Shown::{Example, Required};
use super::declare::{Keys as _, Section, keys};
use super::kinds::{Kind, Shape, file, number, raw, set, text_as};
use super::node::{Node, Table, Wrong};
use super::store::name;
use crate::consumers::{RequestLine, Settings, Source};
use crate::gate::may_have_header;
use crate::http::headers::is_host;
use crate::idempotency::key::KeySource;
use crate::idempotency::message::{MessageKeyRule, MessageKeySource};
use crate::idempotency::policy::Mode;
use crate::idempotency::scope::{ScopePart, ScopeWord};
use crate::route::{Ambiguity, Route, Router};

keys! {
    /// Queues, topics and streams whose messages oncegate takes and runs, each once, as requests. A message is acknowledged when
    /// its record is durable, so that a second copy of it is a replay.
    pub(super) struct Keys "[[consumers]]" {
        /// Its name in logs and metrics.
        name: Option<Arc<str>> = None => name().optional(), Required("\"orders\"");
        /// Where the messages are: "amqp://USER@HOST:PORT/VHOST?queue=NAME" is a queue of RabbitMQ ("amqps://" is encrypted, and
        /// the virtual host "/" is written %2F). "nats://USER@HOST:PORT?stream=NAME&consumer=NAME" is a stream of NATS JetStream
        /// and its durable pull consumer ("tls://" is encrypted; a password without a user is a token).
        /// "kafka://USER@HOST:PORT?topic=NAME&group=NAME" is a topic of Kafka, not encrypted; a user authenticates by SASL
        /// PLAIN. NATS and Kafka take several hosts, with commas between. Kafka needs a
        /// build with the cargo feature `kafka`, which the shipped builds have.
        source: Option<String> = None => source::kind().optional(), Required("\"amqp://oncegate@rabbitmq.internal/%2F?queue=orders\"");
        /// A file with the password of the broker. The password may stand in the URL instead.
        password_file: Option<PathBuf> = None => file().optional(), Example("\"/run/secrets/oncegate-rabbitmq-password\"");
        /// The request that each message becomes: a method, and a path, or a URL where the host matters. Its route must
        /// protect. The body is the message, and its headers are those of the message that HTTP can carry.
        request: Option<RequestLine> = None => request().optional(), Required("\"POST /internal/orders\"");
        /// Where a message has its key: the first place that yields a value. "property:NAME" (of RabbitMQ: message-id,
        /// correlation-id, type, app-id, exchange, routing-key; of NATS: message-id, position, subject; of Kafka: key,
        /// position, topic, partition; one that only another broker has is passed over), "header:NAME",
        /// "json:/pointer", "cloudevent", "template:..." or "fingerprint" (two equal messages are one). Of the messages
        /// with one key only the first runs, so name a place where each has another value: not type, app-id, exchange,
        /// routing-key, subject, topic or partition. A message without a key is a dead letter. If omitted, message-id
        /// of RabbitMQ; message-id, or else position, of NATS; position of Kafka.
        key: Option<Vec<String>> = None
            => set("write [\"header:x-event-id\"], or remove it", raw(r"\S")).optional(),
            Example("[\"property:message-id\", \"header:x-event-id\"]");
        /// How many messages each gate runs at a time. With 1 they run one after the other, in the order of the queue,
        /// partition or stream. Otherwise messages with one key run one after the other.
        concurrency: u32 = 16 => number(1..=1000);
        /// The queue, topic or subject for messages that are given up, with the reason in the header `x-oncegate-reason`. If
        /// omitted, the name of the queue, topic or stream and ".dead-letter". A queue is made if there is none, and so is a
        /// stream for a subject of NATS.
        dead_letter: Option<String> = None => raw(r"\S").optional(), Example("\"orders.failed\"");
    }
}

/// A consumer has its own keys only.
pub(super) const SECTION: &Section = Keys::SECTION;

/// `[[consumers]]` in the schema.
pub(super) fn shape() -> Shape {
    json!({ "type": "array", "items": SECTION.shape() })
}

/// A method, a path, and a host if one is named.
fn request() -> Kind<RequestLine> {
    text_as(r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+ (https?://([^\s/@:]+|\[[^\s/@]+\])(:[0-9]*)?)?/\S*$", request_line, |line| {
        let host = line.host.as_ref().and_then(|host| host.to_str().ok());
        format!("{} {}{}", line.method, host.map_or_else(String::new, |host| format!("http://{host}")), line.target)
    })
}

fn request_line(node: &Node<'_>) -> Result<RequestLine, Wrong> {
    let hint = "write a method and a path, such as \"POST /internal/orders\"";
    let wrong = |what: &str| Wrong::new(what.to_owned()).hint(hint);
    let Some((method, target)) = node.filled()?.split_once(' ') else { return Err(wrong("it is no request")) };
    let method = Method::from_bytes(method.as_bytes()).ok().filter(|method| *method != Method::CONNECT);
    let method = method.ok_or_else(|| wrong("its first word is no method"))?;
    let whole: Uri = target.parse().map_err(|_| wrong("its second word is neither a path nor a URL"))?;
    let host = whole.authority().map(|host| HeaderValue::from_str(host.as_str())).transpose();
    let host = host.map_err(|_| wrong("its host cannot be read"))?;
    // The gate refuses a request with another, and so each message would be a dead letter.
    if host.as_ref().is_some_and(|host| host.to_str().map_or(true, |host| !is_host(host))) {
        return Err(Wrong::new("its URL has no host that a request may have, or has a user".to_owned())
            .hint("write a host and perhaps a port, such as \"POST http://orders.internal/internal/orders\""));
    }
    if whole.scheme().is_some_and(|scheme| *scheme != Scheme::HTTP && *scheme != Scheme::HTTPS) {
        return Err(wrong("its URL is neither http: nor https:"));
    }
    match whole.path_and_query() {
        Some(path) if path.path().starts_with('/') => Ok(RequestLine { method, target: path.clone().into(), host }),
        _ => Err(wrong("its path begins with no slash")),
    }
}

/// Reads `[[consumers]]`. `tokens` is the header that tokens come in.
pub(super) fn read(root: &Table<'_>, router: &Router, tokens: Option<&HeaderName>) -> Vec<Settings> {
    let tables = root.tables("consumers", SECTION).unwrap_or_default();
    let (mut printed, mut names, mut consumers) = (ArrayOfTables::new(), BTreeSet::new(), Vec::new());
    for table in &tables {
        if let Some((settings, keys)) = one(table, router, tokens) {
            if !names.insert(Arc::clone(&settings.name)) {
                let twice = Wrong::new(format!("two consumers have the name `{}`", settings.name));
                table.report("name", twice.hint("give each a name of its own"));
            }
            printed.push(keys.print().into_iter().map(|(key, value)| (key, Item::Value(value))).collect());
            consumers.push(settings);
        }
    }
    if !tables.is_empty() {
        root.print("consumers", Item::ArrayOfTables(printed));
    }
    consumers
}

/// Properties that tell no message from the next.
const SHARED: [&str; 7] = ["app-id", "exchange", "partition", "routing-key", "subject", "topic", "type"];

/// A record that is lost lets a message run again.
pub(super) fn advise_on_store(root: &Table<'_>, consumers: &[Settings], unfit_store: Option<&str>) {
    if let (Some(store), false) = (unfit_store, consumers.is_empty()) {
        root.advise("consumers", format!("{store} may lose records: a message that comes again after that runs again"));
    }
}

fn one(table: &Table<'_>, router: &Router, tokens: Option<&HeaderName>) -> Option<(Settings, Keys)> {
    let required = [
        ("name", "write name = \"orders\""),
        ("source", source::HINT),
        ("request", "write request = \"POST /internal/orders\""),
    ];
    table.require("consumer", &required);
    let mut keys = Keys::read(table, Keys::default());
    let source = keys.source.as_ref().and_then(|url| source::read(table, url, keys.password_file.as_deref()));
    if let Some(request) = &keys.request {
        check_route(table, router, request, tokens);
    }
    let (source, shown) = source?;
    let default_key = || source.default_key().iter().copied().map(str::to_owned).collect();
    let (mut places, mut wrong) = (Vec::new(), Vec::new());
    for text in keys.key.get_or_insert_with(default_key) {
        match MessageKeySource::parse(text, source.properties()) {
            Ok(place) => places.push(place),
            Err(what) => wrong.push((&*text, what)),
        }
    }
    for (text, what) in wrong {
        // One list serves consumers of several brokers.
        let is_of_another = text.strip_prefix("property:").is_some_and(Source::is_property);
        if is_of_another && !places.is_empty() {
            table.advise("key", format!("{what}; the next place counts"));
        } else {
            let hint = format!("write [\"{}\"], for instance", source.default_key()[0]);
            table.report("key", Wrong::new(what).hint(hint));
        }
    }
    check_places(table, &places);
    let is_shared =
        |place: &&MessageKeySource| matches!(place, MessageKeySource::Property(name) if SHARED.contains(&&**name));
    for place in places.iter().filter(is_shared) {
        let message = format!("`{place}` is the same for many messages, unless the publisher sets it anew for each");
        let effect =
            "those with the same key count as one, and the others are acknowledged without a run, or are dead letters";
        table.advise("key", format!("{message}: {effect}; name what the publisher sets anew for each message"));
    }
    if let (Source::Nats(_), Some(subject)) = (&source, &keys.dead_letter)
        && subject.contains(|char: char| char.is_whitespace() || matches!(char, '*' | '>'))
    {
        let wrong = Wrong::new("it is not a subject to publish to");
        table.report("dead_letter", wrong.hint("write a subject without spaces, * and >, such as \"orders.failed\""));
    }
    if keys.dead_letter.as_deref().is_some_and(|name| source.is_own(name)) {
        let wrong =
            Wrong::new("it is where the messages come from: a message that is given up would come again at once");
        table.report("dead_letter", wrong.hint("name another, or leave it out"));
    }
    keys.source = Some(shown);
    let settings = Settings {
        name: keys.name.clone()?,
        source,
        request: keys.request.clone()?,
        key: MessageKeyRule(places),
        concurrency: keys.concurrency,
        dead_letter: keys.dead_letter.clone(),
    };
    Some((settings, keys))
}

/// Of places that stand twice, or after one that every message has, nothing is ever read.
fn check_places(table: &Table<'_>, places: &[MessageKeySource]) {
    let twice = places.iter().enumerate().find(|(at, place)| places[..*at].contains(place));
    if let Some((_, place)) = twice {
        table.report("key", Wrong::new(format!("`{place}` stands twice")).hint("remove one of them"));
    } else if places.iter().rev().skip(1).any(|place| *place == MessageKeySource::Request(KeySource::Fingerprint)) {
        let wrong = Wrong::new("what stands after `fingerprint` is never used");
        table.report("key", wrong.hint("put \"fingerprint\" last"));
    }
}

/// A message has no address, no certificate and no credential. `tokens` is the header that tokens come in.
fn advise_on_scope(table: &Table<'_>, route: &Route, request: &RequestLine, tokens: Option<&HeaderName>) {
    let has = |name: &HeaderName| may_have_header(name, request.host.is_some());
    for ScopeWord { part, is_optional } in route.policy.scope.words() {
        let is_missing = match &part {
            ScopePart::ClientIp => {
                let what = "all messages have the same: they have no address of a client";
                table.advise("request", format!("the route `{}` is scoped by {part}, which {what}", route.name));
                continue;
            }
            ScopePart::Header(name) => !has(name),
            ScopePart::JwtClaim(_) => !has(tokens.unwrap_or(&AUTHORIZATION)),
            ScopePart::ClientCert(_) | ScopePart::Cookie(_) | ScopePart::BasicUser => true,
            ScopePart::Host | ScopePart::Credential | ScopePart::Const(_) => false,
        };
        if is_missing && !is_optional {
            let what = "no message has: each becomes a dead letter, `scope-missing`";
            let instead = format!("write \"{part}?\" if messages may lack it");
            let message = format!("the route `{}` is scoped by {part}, which {what}; {instead}", route.name);
            table.advise("request", message);
        }
    }
}

/// The request must be one that its route protects.
fn check_route(table: &Table<'_>, router: &Router, request: &RequestLine, tokens: Option<&HeaderName>) {
    let host = request.host.as_ref().and_then(|host| host.to_str().ok());
    let wrong = match router.choose(&request.method, host, request.target.path()) {
        // `routes` reports what is wrong with them.
        _ if router.routes().is_empty() => return,
        Ok(Some(route)) => match route.policy.mode {
            Mode::Protect => {
                advise_on_scope(table, route, request, tokens);
                return;
            }
            mode => {
                let what = format!("the route `{}` of this request has mode = \"{}\"", route.name, mode.as_str());
                Wrong::new(what)
                    .hint("a message runs once where its route protects: give it a route with mode = \"protect\"")
            }
        },
        Ok(None) => Wrong::new("no route matches this request").hint("add a [[routes]] table for it"),
        Err(ambiguous) if ambiguous.kind == Ambiguity::Method => {
            Wrong::new("the method of this request has lowercase letters").hint("write it in capitals")
        }
        Err(_) => Wrong::new("the path of this request can be read in two ways").hint("write it as its route has it"),
    };
    table.report("request", wrong);
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::load_text;

    #[test]
    fn a_place_that_only_another_broker_has_is_passed_over() {
        let of = |key: &str| {
            let text = format!(
                "[upstreams]\napp = \"http://127.0.0.1:3000\"\n[[consumers]]\nname = \"c\"\nrequest = \"POST /x\"\n\
                 source = \"nats://127.0.0.1?stream=S&consumer=c\"\nkey = {key}\n"
            );
            load_text(PathBuf::from("gate.toml"), &text)
        };
        let loaded = of("[\"property:routing-key\", \"property:position\"]").expect("one is left");
        let advised: Vec<_> = loaded.advice.iter().filter(|advice| advice.key.ends_with("key")).collect();
        assert!(advised.len() == 1 && advised[0].message.contains("`routing-key` is not a property"), "{advised:?}");
        let key = loaded.consumers[0].key.0.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(key, ["property:position"]);
        let shared = of("[\"property:subject\", \"property:position\"]").expect("it can be read");
        let advised: Vec<_> = shared.advice.iter().filter(|advice| advice.key.ends_with("key")).collect();
        assert!(advised.len() == 1 && advised[0].message.contains("the same for many messages"), "{advised:?}");
        assert!(of("[\"property:routing-key\"]").is_err(), "none is left");
        assert!(of("[\"property:x\", \"property:position\"]").is_err(), "no broker has it");
    }

    #[test]
    fn parts_of_a_scope_that_no_message_has_are_advised_against() {
        let of = |scope: &str, request: &str, auth: &str| {
            let text = format!(
                "[upstreams]\napp = \"http://127.0.0.1:3000\"\n{auth}[[routes]]\nname = \"r\"\npath = \"/{{*rest}}\"\n\
                 scope = [\"const:x\", {scope}]\n[[consumers]]\nname = \"c\"\nrequest = \"POST {request}\"\n\
                 source = \"nats://127.0.0.1?stream=S&consumer=c\"\n"
            );
            let loaded = load_text(PathBuf::from("gate.toml"), &text).unwrap_or_else(|wrong| panic!("{text}\n{wrong}"));
            let advised = loaded.advice.into_iter().filter(|advice| advice.key == "consumers[0].request");
            advised.map(|advice| advice.message).collect::<Vec<_>>()
        };
        let tokens = |header: &str| format!("[auth.jwt]\npem_file = \"tests/config-errors/issuer.pem\"\n{header}\n");
        for part in ["cookie:session", "basic:user", "header:Authorization", "header:X-Api-Key", "header:Cookie"] {
            let advised = of(&format!("\"{part}\""), "/x", "");
            assert!(advised.len() == 1 && advised[0].contains("no message has"), "{part}: {advised:?}");
            assert!(advised[0].contains("dead letter, `scope-missing`"), "{part}: {advised:?}");
            // All of them lack it alike.
            assert_eq!(of(&format!("\"{part}?\""), "/x", ""), Vec::<String>::new(), "{part}");
        }
        for (request, count) in [("/x", 1), ("http://a.example/x", 0)] {
            assert_eq!(of("\"header:Host\"", request, "").len(), count, "{request}");
        }
        for (header, count) in [("", 1), ("header = \"X-Api-Key\"", 1), ("header = \"X-Token\"", 0)] {
            assert_eq!(of("\"jwt:sub\"", "/x", &tokens(header)).len(), count, "{header}");
        }
        for part in ["header:X-Tenant", "credential", "host", "header:Content-Length"] {
            assert_eq!(of(&format!("\"{part}\""), "/x", ""), Vec::<String>::new(), "{part}");
        }
    }
}
