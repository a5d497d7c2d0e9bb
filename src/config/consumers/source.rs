//! `source`: the URL of what a consumer takes messages from.

use std::path::Path;

use serde_json::json;

use super::super::kinds::Kind;
use super::super::node::{Table, Wrong};
use super::super::store::location::{Location, UrlGrammar, take_apart};
use super::super::store::{only_one_password, password, password_text};
use crate::consumers::{Amqp, Kafka, Nats, NatsLogin, Source};

/// What to write where there is no source.
pub(super) const HINT: &str = "write source = \"amqp://USER@HOST/%2F?queue=NAME\", \
                               \"nats://HOST?stream=NAME&consumer=NAME\" or \"kafka://HOST?topic=NAME&group=NAME\"";

/// What differs from one broker's URLs to another's.
struct Broker {
    /// Their schemes, and whether each encrypts.
    schemes: &'static [(&'static str, bool)],
    grammar: UrlGrammar,
    /// Makes a source of what stands there.
    source: fn(Parts<'_>) -> Source,
}

/// What stands in a URL, and what is wrong with it.
struct Parts<'a> {
    is_encrypted: bool,
    form: &'static str,
    location: &'a mut Location,
    password: Option<String>,
    wrong: &'a mut Vec<Wrong>,
}

static BROKERS: [Broker; 3] = [
    Broker {
        schemes: &[("amqp", false), ("amqps", true)],
        grammar: UrlGrammar {
            kind: "amqp:",
            form: "write \"amqp://USER@HOST:PORT/VHOST?queue=NAME\"",
            hidden_password: "",
            parameters: "queue password",
            otherwise: "remove it; there are queue and password",
            password_file: "password_file",
        },
        source: amqp,
    },
    Broker {
        schemes: &[("kafka", false)],
        grammar: UrlGrammar {
            kind: "kafka:",
            form: "write \"kafka://HOST:PORT,HOST:PORT?topic=NAME&group=NAME\"",
            hidden_password: "",
            parameters: "group password topic",
            otherwise: "remove it; there are topic, group and password",
            password_file: "password_file",
        },
        source: kafka,
    },
    Broker {
        schemes: &[("nats", false), ("tls", true)],
        grammar: UrlGrammar {
            kind: "nats:",
            form: "write \"nats://HOST:PORT?stream=NAME&consumer=NAME\"",
            hidden_password: "",
            parameters: "consumer password stream",
            otherwise: "remove it; there are stream, consumer and password",
            password_file: "password_file",
        },
        source: nats,
    },
];

/// The ports of RabbitMQ, plain and encrypted, of Kafka and of NATS.
const AMQP_PORTS: [u16; 2] = [5672, 5671];
const KAFKA_PORT: u16 = 9092;
const NATS_PORT: u16 = 4222;

/// Who one is to RabbitMQ, and where, where nothing is said.
const GUEST: &str = "guest";
const VIRTUAL_HOST: &str = "/";

const URL: &str =
    r"^(amqps?://([^\s#@/?]*@)?[^\s#@/?,]+(/[^\s#@/?]*)?|(kafka|nats|tls)://([^\s#@/?]*@)?[^\s#@/?]+/?)\?[^\s#@]*$";

pub(super) fn kind() -> Kind<String> {
    Kind::new(
        || json!({ "type": "string", "pattern": URL }),
        |node| node.filled().map(str::to_owned),
        |url: &String| url.into(),
    )
}

/// The source of a URL, and the URL without its password.
pub(super) fn read(table: &Table<'_>, url: &str, password_file: Option<&Path>) -> Option<(Source, String)> {
    let report = |wrong: Wrong| table.report("source", wrong);
    let known = url.split_once(':').and_then(|(scheme, rest)| {
        let of = |broker: &'static Broker| {
            broker.schemes.iter().find(|(name, _)| *name == scheme).map(|found| (broker, found))
        };
        BROKERS.iter().find_map(of).map(|(broker, (_, is_encrypted))| (broker, scheme, rest, *is_encrypted))
    });
    let Some((broker, scheme, rest, is_encrypted)) = known else {
        if url.starts_with("kafkas:") {
            report(Wrong::new("connections to Kafka are not encrypted in this version").hint("write kafka:"));
            return None;
        }
        report(Wrong::new("the source is not of a broker that this version knows").hint(HINT));
        return None;
    };
    let from_file = table
        .read_file("password_file", password_file, |path| password_text(password(path)?, &path.display().to_string()));
    let mut location = take_apart(&broker.grammar, scheme, rest).map_err(report).ok()?;
    only_one_password(table, &broker.grammar, &location);
    let mut wrong = Vec::new();
    let from_url = location.password.take().map(|password| password_text(password, "the password"));
    let from_url = from_url.and_then(|password| password.map_err(|error| wrong.push(error)).ok());
    let source = (broker.source)(Parts {
        is_encrypted,
        form: broker.grammar.form,
        location: &mut location,
        password: from_url.or(from_file),
        wrong: &mut wrong,
    });
    wrong.extend(location.unknown(&broker.grammar));
    if let (true, Some(feature)) = (wrong.is_empty(), source.missing_feature()) {
        wrong.push(lacking(feature));
    }
    if !wrong.is_empty() {
        wrong.into_iter().for_each(report);
        return None;
    }
    Some((source, location.shown))
}

fn lacking(feature: &str) -> Wrong {
    Wrong::new("this build of oncegate cannot use this broker")
        .hint(format!("use a packaged oncegate, or build it with cargo build --features {feature}"))
}

fn amqp(mut parts: Parts<'_>) -> Source {
    let queue = parts.name("queue", "the source names no queue");
    if parts.location.hosts.len() > 1 {
        parts.wrong.push(Wrong::new("the source has one host").hint(parts.form));
    }
    let [plain, encrypted] = AMQP_PORTS;
    let (host, port) = parts.servers(if parts.is_encrypted { encrypted } else { plain }).swap_remove(0);
    Source::Amqp(Amqp {
        is_encrypted: parts.is_encrypted,
        host,
        port,
        user: parts.location.user.take().unwrap_or_else(|| GUEST.to_owned()),
        password: parts.password.unwrap_or_else(|| GUEST.to_owned()),
        virtual_host: parts.location.database.take().unwrap_or_else(|| VIRTUAL_HOST.to_owned()),
        queue,
    })
}

fn kafka(mut parts: Parts<'_>) -> Source {
    let topic = parts.name("topic", "the source names no topic");
    let group = parts.name("group", "the source names no group");
    parts.has_no_path();
    let login = match (parts.location.user.take(), parts.password.take()) {
        (Some(user), Some(password)) => Some((user, password)),
        (None, None) => None,
        (user, _) => {
            parts.wrong.push(half_a_login(user.is_some()));
            None
        }
    };
    Source::Kafka(Kafka { servers: parts.servers(KAFKA_PORT), login, topic, group })
}

fn nats(mut parts: Parts<'_>) -> Source {
    let stream = parts.name("stream", "the source names no stream");
    let consumer = parts.name("consumer", "the source names no consumer");
    parts.has_no_path();
    let login = match (parts.location.user.take(), parts.password.take()) {
        (Some(user), Some(password)) => NatsLogin::User(user, password),
        (None, Some(token)) => NatsLogin::Token(token),
        (None, None) => NatsLogin::Anonymous,
        (Some(_), None) => {
            parts.wrong.push(half_a_login(true));
            NatsLogin::Anonymous
        }
    };
    let servers = parts.servers(NATS_PORT);
    Source::Nats(Nats { is_encrypted: parts.is_encrypted, servers, login, stream, consumer })
}

fn half_a_login(is_user: bool) -> Wrong {
    match is_user {
        true => Wrong::new("the user has no password").hint("write password_file = \"/run/secrets/...\""),
        false => Wrong::new("the password has no user").hint("write the user before the host: USER@HOST"),
    }
}

impl Parts<'_> {
    /// A parameter that must be there.
    fn name(&mut self, parameter: &str, absent: &'static str) -> String {
        self.location.take(parameter).filter(|name| !name.is_empty()).unwrap_or_else(|| {
            self.wrong.push(Wrong::new(absent).hint(self.form));
            String::new()
        })
    }

    fn has_no_path(&mut self) {
        if self.location.database.is_some() {
            self.wrong.push(Wrong::new("nothing stands between the hosts and the `?`").hint(self.form));
        }
    }

    /// At least one.
    fn servers(&mut self, default: u16) -> Vec<(String, u16)> {
        let hosts = std::mem::take(&mut self.location.hosts);
        if hosts.is_empty() {
            self.wrong.push(Wrong::new("the source has no host").hint(self.form));
            return vec![(String::new(), default)];
        }
        hosts.into_iter().map(|(host, port)| (host, port.unwrap_or(default))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::Case;

    const ROUTE: &str = "upstreams.app = \"http://app\"\nroutes = [{ name = \"r\", path = \"/r\" }]\n";

    fn consuming(source: &str) -> Case {
        Case::new(&format!("{ROUTE}consumers = [{{ name = \"c\", source = \"{source}\", request = \"POST /r\" }}]\n"))
    }

    #[test]
    fn sources_are_read_and_shown_without_their_passwords() {
        let cases = [
            ("amqp://gate:s3cret@[::1]/shop?queue=orders", "the queue orders of RabbitMQ at [::1]:5672"),
            ("amqps://rabbit?queue=orders", "the queue orders of RabbitMQ at rabbit:5671"),
            #[cfg(feature = "kafka")]
            (
                "kafka://gate:s3cret@a,b:9093?topic=orders&group=g",
                "the topic orders of Kafka at a:9092,b:9093, as group g",
            ),
            ("nats://gate:s3cret@a,b:4223?stream=S&consumer=C", "the stream S of NATS at a:4222,b:4223, as consumer C"),
            ("tls://:s3cret@a?stream=S&consumer=C", "the stream S of NATS at a:4222, as consumer C"),
        ];
        for (url, shown) in cases {
            let resolved = consuming(url).load();
            let settings = &resolved.consumers[0];
            assert_eq!(settings.source.to_string(), shown);
            let said = format!("{:?} {}", settings, resolved.effective);
            assert!(!said.contains("s3cret"), "{said}");
            let key: Vec<String> = settings.key.0.iter().map(ToString::to_string).collect();
            assert_eq!(key, settings.source.default_key());
        }
    }

    #[test]
    fn a_user_and_a_password_go_to_the_broker() {
        let login = |url: &str| match &consuming(url).load().consumers[0].source {
            Source::Nats(nats) => match nats.login.clone() {
                NatsLogin::Anonymous => "nobody".to_owned(),
                NatsLogin::Token(token) => token,
                NatsLogin::User(user, password) => format!("{user} {password}"),
            },
            _ => String::new(),
        };
        assert_eq!(login("nats://a?stream=S&consumer=C"), "nobody");
        assert_eq!(login("nats://:t0k%40n@a?stream=S&consumer=C"), "t0k@n");
        assert_eq!(login("nats://gate@a?stream=S&consumer=C&password=s3cret"), "gate s3cret");
    }

    #[test]
    fn a_build_without_a_broker_says_how_to_have_it() {
        let said = format!("{:?}", lacking("kafka"));
        assert!(said.contains("cannot use this broker") && said.contains("--features kafka"), "{said}");
    }

    #[cfg(not(feature = "kafka"))]
    #[test]
    fn kafka_is_refused_by_a_build_without_it() {
        let problems = consuming("kafka://a?topic=orders&group=g").problems();
        assert!(problems.contains("consumers[0].source: this build of oncegate cannot use this broker"), "{problems}");
    }
}
