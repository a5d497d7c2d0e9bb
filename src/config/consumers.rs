//! `[[consumers]]`

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use http::{HeaderValue, Method, Uri};
use serde_json::json;
use toml_edit::{ArrayOfTables, Item};

use super::declare::Shown::{Example, Required};
use super::declare::{Keys as _, Section, keys};
use super::kinds::{Kind, Shape, file, filled, number, raw, text_as};
use super::node::{Node, Table, Wrong};
use super::store::location::{Location, UrlGrammar, take_apart};
use super::store::{name, only_one_password, password, password_text};
use crate::consumers::{Amqp, RequestLine, Settings, Source};
use crate::idempotency::message::{MessageKeyRule, MessageKeySource};
use crate::idempotency::policy::Mode;
use crate::route::Router;

keys! {
    /// Queues whose messages oncegate takes and runs, each once, as requests. A message is acknowledged when its record is
    /// durable, so that a second copy of it is a replay.
    pub(super) struct Keys "[[consumers]]" {
        /// Its name in logs and metrics.
        name: Option<Arc<str>> = None => name().optional(), Required("\"orders\"");
        /// Where the messages are: "amqp://USER@HOST:PORT/VHOST?queue=NAME" is a queue of RabbitMQ ("amqps://" is encrypted, and
        /// the virtual host "/" is written %2F).
        source: Option<String> = None => source().optional(), Required("\"amqp://oncegate@rabbitmq.internal/%2F?queue=orders\"");
        /// A file with the password of the broker. The password may stand in the URL instead.
        password_file: Option<PathBuf> = None => file().optional(), Example("\"/run/secrets/oncegate-rabbitmq-password\"");
        /// The request that each message becomes: a method, and a path, or a URL where the host matters. Its route must
        /// protect. The body is the message, and its headers are those of the message that HTTP can carry.
        request: Option<RequestLine> = None => request().optional(), Required("\"POST /internal/orders\"");
        /// Where a message has its key: the first place that yields a value. "property:NAME" (of RabbitMQ: message-id,
        /// correlation-id, type, app-id, exchange, routing-key), "header:NAME", "json:/pointer", "cloudevent",
        /// "template:..." or "fingerprint" (two equal messages are one). A message without a key is a dead letter.
        key: Vec<String> = vec!["property:message-id".to_owned()]
            => filled("write [\"property:message-id\"], or remove it", raw(r"\S"));
        /// How many messages each gate runs at a time. With 1 they run one after the other, in the order of the queue.
        /// Otherwise messages with one key run one after the other.
        concurrency: u32 = 16 => number(1..=1000);
        /// The queue for messages that are given up, with the reason in the header `x-oncegate-reason`. If omitted, the name
        /// of the queue and ".dead-letter". It is made if there is none.
        dead_letter: Option<String> = None => raw(r"\S").optional(), Example("\"orders.failed\"");
    }
}

/// A consumer has its own keys only.
pub(super) const SECTION: &Section = Keys::SECTION;

/// `[[consumers]]` in the schema.
pub(super) fn shape() -> Shape {
    json!({ "type": "array", "items": SECTION.shape() })
}

const GRAMMAR: UrlGrammar = UrlGrammar {
    kind: "amqp:",
    form: "write \"amqp://USER@HOST:PORT/VHOST?queue=NAME\"",
    hidden_password: "",
    parameters: "queue password",
    otherwise: "remove it; there are queue and password",
    password_file: "password_file",
};

/// The ports of RabbitMQ.
const PORT: u16 = 5672;
const ENCRYPTED_PORT: u16 = 5671;

/// Who one is to RabbitMQ, and where, where nothing is said.
const GUEST: &str = "guest";
const VIRTUAL_HOST: &str = "/";

const URL: &str = r"^amqps?://([^\s#@/?]*@)?[^\s#@/?,]+(/[^\s#@/?]*)?\?[^\s#@]*$";

fn source() -> Kind<String> {
    Kind::new(
        || json!({ "type": "string", "pattern": URL }),
        |node| node.filled().map(str::to_owned),
        |url: &String| url.into(),
    )
}

/// A method, a path, and a host if one is named.
fn request() -> Kind<RequestLine> {
    text_as(r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+ (https?://[^\s/]+)?/\S*$", request_line, |line| {
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
    match whole.path_and_query() {
        Some(path) if path.path().starts_with('/') => Ok(RequestLine { method, target: path.clone().into(), host }),
        _ => Err(wrong("its path begins with no slash")),
    }
}

/// Reads `[[consumers]]`.
pub(super) fn read(root: &Table<'_>, router: &Router) -> Vec<Settings> {
    let tables = root.tables("consumers", SECTION).unwrap_or_default();
    let (mut printed, mut names, mut consumers) = (ArrayOfTables::new(), BTreeSet::new(), Vec::new());
    for table in &tables {
        if let Some((settings, keys)) = one(table, router) {
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

/// A record that is lost lets a message run again.
pub(super) fn advise_on_store(root: &Table<'_>, consumers: &[Settings], unfit_store: Option<&str>) {
    if let (Some(store), false) = (unfit_store, consumers.is_empty()) {
        root.advise("consumers", format!("{store} may lose records: a message that comes again after that runs again"));
    }
}

fn one(table: &Table<'_>, router: &Router) -> Option<(Settings, Keys)> {
    let required = [
        ("name", "write name = \"orders\""),
        ("source", "write source = \"amqp://USER@HOST/%2F?queue=NAME\""),
        ("request", "write request = \"POST /internal/orders\""),
    ];
    table.require("consumer", &required);
    let mut keys = Keys::read(table, Keys::default());
    let source = keys.source.as_ref().and_then(|url| amqp(table, url, &keys));
    if let Some(request) = &keys.request {
        check_route(table, router, request);
    }
    let (queue, shown) = source?;
    let source = Source::Amqp(queue);
    let mut places = Vec::new();
    for text in &keys.key {
        match MessageKeySource::parse(text, source.properties()) {
            Ok(place) => places.push(place),
            Err(what) => table.report("key", Wrong::new(what).hint("write [\"property:message-id\"], for instance")),
        }
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

/// The queue of a URL, and the URL without its password.
fn amqp(table: &Table<'_>, url: &str, keys: &Keys) -> Option<(Amqp, String)> {
    let report = |wrong: Wrong| table.report("source", wrong);
    let (scheme, rest) = match url.split_once(':') {
        Some((scheme @ ("amqp" | "amqps"), rest)) => (scheme, rest),
        _ => {
            report(Wrong::new("the source is no queue of a broker that this version knows").hint(GRAMMAR.form));
            return None;
        }
    };
    let from_file = table.read_file("password_file", keys.password_file.as_deref(), |path| {
        password_text(password(path)?, &path.display().to_string())
    });
    let mut location = take_apart(&GRAMMAR, scheme, rest).map_err(report).ok()?;
    only_one_password(table, &GRAMMAR, &location);
    let mut wrong = Vec::new();
    let from_url = location.password.take().map(|password| password_text(password, "the password"));
    let from_url = from_url.and_then(|password| password.map_err(|error| wrong.push(error)).ok());
    let queue = location.take("queue").filter(|queue| !queue.is_empty()).unwrap_or_else(|| {
        wrong.push(Wrong::new("the source names no queue").hint(GRAMMAR.form));
        String::new()
    });
    let is_encrypted = scheme == "amqps";
    let (host, port) = host(&location, &mut wrong);
    wrong.extend(location.unknown(&GRAMMAR));
    if !wrong.is_empty() {
        wrong.into_iter().for_each(report);
        return None;
    }
    let queue = Amqp {
        is_encrypted,
        host,
        port: port.unwrap_or(if is_encrypted { ENCRYPTED_PORT } else { PORT }),
        user: location.user.unwrap_or_else(|| GUEST.to_owned()),
        password: from_url.or(from_file).unwrap_or_else(|| GUEST.to_owned()),
        virtual_host: location.database.unwrap_or_else(|| VIRTUAL_HOST.to_owned()),
        queue,
    };
    Some((queue, location.shown))
}

fn host(location: &Location, wrong: &mut Vec<Wrong>) -> (String, Option<u16>) {
    match location.hosts.as_slice() {
        [host] => host.clone(),
        _ => {
            wrong.push(Wrong::new("the source has one host").hint(GRAMMAR.form));
            (String::new(), None)
        }
    }
}

/// The request must be one that its route protects.
fn check_route(table: &Table<'_>, router: &Router, request: &RequestLine) {
    let host = request.host.as_ref().and_then(|host| host.to_str().ok());
    let wrong = match router.choose(&request.method, host, request.target.path()) {
        // `routes` reports what is wrong with them.
        _ if router.routes().is_empty() => return,
        Ok(Some(route)) => match route.policy.mode {
            Mode::Protect => return,
            mode => {
                let what = format!("the route `{}` of this request has mode = \"{}\"", route.name, mode.as_str());
                Wrong::new(what)
                    .hint("a message runs once where its route protects: give it a route with mode = \"protect\"")
            }
        },
        Ok(None) => Wrong::new("no route matches this request").hint("add a [[routes]] table for it"),
        Err(_) => Wrong::new("the path of this request can be read in two ways").hint("write it as its route has it"),
    };
    table.report("request", wrong);
}
