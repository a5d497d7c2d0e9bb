//! The configuration file as a JSON Schema, for editors.
//!
//! Which keys there are comes from `keys`, the choices from the tables that values are read by, and what stands beside
//! each key in an editor (its meaning, its default, examples) from the annotated default configuration.
//!
//! It is of draft 7, and repeats what stands at two places instead of referring to it: taplo, which most editors check
//! TOML with, reads nothing newer, and loses the text beside a reference. It refuses what is wrong with one value; what
//! only several values or the machine show (names that stand twice, routes that overlap, files that are missing) is
//! left to `oncegate check`.

use serde_json::{Map, Value, json};

use self::annotated::Annotated;
use super::declare::shape;
use super::headers::Headers;
use super::keys::{self, Section};
use super::limits;
use super::listeners::{Admin, Server};
use super::logging::Log;
use super::policy;
use super::policy::{DELIVERIES, FORMS, MODES, RECOVERIES, STORE_FAILURES};
use super::store::cache;
use super::store::postgres::MOST_CONNECTIONS;
use super::upstreams::{MAX_CONNECTIONS as UPSTREAM_CONNECTIONS, PROTOCOLS, SHARINGS};
use crate::http::limits::Limits;
use crate::store::postgres::Settings;

pub(super) mod annotated;
mod shapes;

/// The schema of the configuration file (JSON Schema, draft 7).
#[must_use]
pub fn schema() -> Value {
    let writer = Writer { annotated: Annotated::read() };
    let mut root = writer.table(&keys::ROOT, "", Writer::root);
    root["$schema"] = "http://json-schema.org/draft-07/schema#".into();
    root["title"] = "oncegate".into();
    root["description"] =
        "The configuration of oncegate, an idempotency reverse proxy. `oncegate check` finds more than \
                           an editor can."
            .into();
    root
}

struct Writer {
    annotated: Annotated,
}

/// What a value must be.
type Shape = Value;

impl Writer {
    /// A table of known keys. `at` is where it stands in the annotated default, with a dot at its end.
    fn table(&self, section: &Section, at: &str, shape: fn(&Self, &str) -> Shape) -> Shape {
        let property = |key: &'static str| (key.to_owned(), self.annotate(shape(self, key), &format!("{at}{key}")));
        let properties: Map<String, Value> = section.keys().map(property).collect();
        json!({ "title": section.name, "type": "object", "properties": properties, "additionalProperties": false })
    }

    /// Adds what the annotated default says of a key, and what the shape does not.
    fn annotate(&self, mut shape: Shape, path: &str) -> Shape {
        let Some(noted) = self.annotated.get(path) else { return shape };
        if shape.get("description").is_none() && !noted.comment.is_empty() {
            shape["description"] = noted.comment.clone().into();
        }
        // Tables have their defaults key by key.
        let leaf = noted.value.as_ref().filter(|value| !value.is_object());
        if let (Some(value), None) = (leaf, shape.get("default")) {
            match noted.is_default {
                true => shape["default"] = value.clone(),
                false => shape["examples"] = json!([value]),
            }
        }
        shape
    }

    fn root(&self, key: &str) -> Shape {
        match key {
            "default_upstream" => shapes::text(shapes::UPSTREAM_NAME),
            "server" => described(shape::<Server>(), "Where clients connect."),
            "limits" => described(shape::<Limits>(), "What clients may use, and for how long."),
            "admin" => described(shape::<Admin>(), "The listener of health, metrics and the records API."),
            "store" => described(self.table(&keys::STORE, "store.", Self::store), "Where records are kept."),
            "upstreams" => self.upstreams(),
            "defaults" => self.table(&keys::DEFAULTS, "defaults.", Self::policy),
            "routes" => {
                let mut route = self.table(&keys::ROUTE, "routes.", Self::route);
                route["required"] = json!(["name", "path"]);
                shapes::list(route)
            }
            "headers" => shape::<Headers>(),
            "log" => described(shape::<Log>(), "Logs go to standard error."),
            _ => unwritten(),
        }
    }

    fn store(&self, key: &str) -> Shape {
        match key {
            "url" => shapes::text(shapes::STORE_URL),
            "password_file" => shapes::file(),
            "connections" => {
                json!({ "type": "integer", "minimum": Settings::FEWEST_CONNECTIONS, "maximum": MOST_CONNECTIONS })
            }
            "service" => shapes::name(),
            "id_secret_file" => shapes::file(),
            "cache" => shapes::text(shapes::CACHE_URL),
            "cache_password_file" => shapes::file(),
            "cache_max_age" | "settle_timeout" => shapes::duration(),
            "cache_max_bytes" => shapes::size(0..=cache::MOST_BYTES),
            "cache_max_entries" => shapes::number(1..=cache::MOST_ENTRIES),
            _ => unwritten(),
        }
    }

    /// An upstream is a table, or only its URL.
    fn upstreams(&self) -> Shape {
        let mut upstream = self.table(&keys::UPSTREAM, "upstreams.app.", Self::upstream);
        upstream["type"] = json!(["string", "object"]);
        upstream["pattern"] = shapes::UPSTREAM_URL.into();
        upstream["description"] = "A service behind: only its URL, or a table with its URL and its timeouts.".into();
        json!({
            "title": "[upstreams]",
            "description": "The services behind. The names are yours; with only one, no route has to name it.",
            "type": "object",
            "patternProperties": { (shapes::UPSTREAM_NAME): upstream },
            "additionalProperties": false,
        })
    }

    fn upstream(&self, key: &str) -> Shape {
        match key {
            "url" => shapes::one_or_several(shapes::text(shapes::UPSTREAM_URL)),
            "tls" => self.table(&keys::UPSTREAM_TLS, "upstreams.app.tls.", Self::upstream_tls),
            "protocol" => with_default(shapes::words(PROTOCOLS.map(|(word, _)| word)), json!("auto")),
            "timeout" => with_default(shapes::some_duration(), json!("60s")),
            "connect_timeout" => with_default(shapes::some_duration(), json!("2s")),
            "client_timeout" => shapes::some_duration(),
            "max_connections" => with_default(shapes::number(limits::COUNTS), json!(UPSTREAM_CONNECTIONS)),
            "reuse" => with_default(shapes::words(SHARINGS.map(|(word, _)| word)), json!("always")),
            _ => unwritten(),
        }
    }

    fn upstream_tls(&self, key: &str) -> Shape {
        match key {
            "ca" => {
                described(shapes::file(), "A file with the certificates that vouch for it; else those of this system.")
            }
            "cert" => described(shapes::file(), "A file with the certificate that the gate proves itself by."),
            "key" => described(shapes::file(), "A file with the key of that certificate."),
            "crl" => described(shapes::file(), "A file with the lists of certificates that were revoked."),
            "name" => described(shapes::text(r"^\S+$"), "What its certificate must name where that is not the host."),
            _ => unwritten(),
        }
    }

    /// A route: its own keys, and those of a policy. What a policy lacks there is what `[defaults]` says.
    fn route(&self, key: &str) -> Shape {
        match key {
            "name" => shapes::text(shapes::ROUTE_NAME),
            "namespace" => shapes::name(),
            "methods" => with_default(shapes::set(shapes::text(shapes::METHOD)), json!(["POST", "PATCH"])),
            "host" => with_default(shapes::text(shapes::HOST), json!("*")),
            "path" => shapes::text(shapes::PATH),
            "upstream" => shapes::text(shapes::UPSTREAM_NAME),
            _ => {
                let mut shape = self.annotate(self.policy(key), &format!("defaults.{key}"));
                without_defaults(&mut shape);
                shape
            }
        }
    }

    fn policy(&self, key: &str) -> Shape {
        match key {
            "ttl" | "unknown_ttl" => shapes::some_duration(),
            "key" => {
                let what = "Where the idempotency key comes from, and whether there must be one.";
                described(self.table(&keys::KEY, "defaults.key.", Self::key), what)
            }
            "scope" => {
                // It stands in the annotated default as an example: written down, it means more than itself.
                let default = json!(["host", "credential"]);
                with_default(shapes::set(shapes::text(&shapes::scope_part())), default)
            }
            "fingerprint" => {
                let what = "What tells a retry from a key that was reused for another request.";
                described(self.table(&keys::FINGERPRINT, "defaults.fingerprint.", Self::fingerprint), what)
            }
            "outcomes" => self.outcomes(),
            "in_flight" => self.in_flight(),
            "recovery" => shapes::words(RECOVERIES.map(|(word, _)| word)),
            "store_failure" => shapes::words(STORE_FAILURES.map(|(word, _)| word)),
            "lease" => shapes::text(&shapes::at_least_a_second()),
            "mode" => shapes::words(MODES.map(|(word, _)| word)),
            "body" => shapes::words(DELIVERIES.map(|(word, _)| word)),
            "max_request_body" | "max_response_body" => shapes::size(0..=policy::LARGEST_BODY),
            "cors" => {
                let what = "Whose scripts may read, in browsers, what the gate itself answers.";
                described(self.table(&keys::CORS, "defaults.cors.", Self::cors), what)
            }
            "docs" => shapes::text(shapes::PAGE),
            _ => unwritten(),
        }
    }

    /// A word, or a table with how long to wait.
    fn in_flight(&self) -> Shape {
        let mut in_flight = self.table(&keys::IN_FLIGHT, "defaults.in_flight.", |_, key| match key {
            "wait" => described(shapes::some_duration(), "How long a duplicate is held, at most 24h."),
            _ => unwritten(),
        });
        in_flight["minProperties"] = 1.into();
        in_flight["type"] = json!(["string", "object"]);
        in_flight["pattern"] = "^reject$".into();
        in_flight
    }

    fn key(&self, key: &str) -> Shape {
        match key {
            "from" => shapes::set(shapes::text(&shapes::key_source())),
            "required" => json!({ "type": "boolean" }),
            "max_length" => shapes::number(1..=policy::LONGEST_KEY),
            _ => unwritten(),
        }
    }

    fn fingerprint(&self, key: &str) -> Shape {
        match key {
            "of" => shapes::set(shapes::text(&shapes::ingredient())),
            "body" => shapes::words(FORMS.map(|(word, _)| word)),
            "include" | "exclude" => shapes::list(shapes::text(&shapes::pointer())),
            _ => unwritten(),
        }
    }

    fn cors(&self, key: &str) -> Shape {
        match key {
            "origins" => {
                let mut origins = shapes::list(shapes::text(shapes::ORIGIN));
                origins["uniqueItems"] = true.into();
                origins
            }
            "credentials" => json!({ "type": "boolean" }),
            _ => unwritten(),
        }
    }

    fn outcomes(&self) -> Shape {
        let (answered, without_answer) = (["store", "release", "hold"], ["release", "hold"]);
        let noted = self.annotated.below("defaults.outcomes.");
        let properties = noted.map(|(entry, default)| {
            // What did not answer has nothing to store.
            let has_answer = entry.as_bytes()[0].is_ascii_digit() || entry.starts_with("grpc:");
            let words = if has_answer { shapes::words(answered) } else { shapes::words(without_answer) };
            (entry.to_owned(), with_default(words, default.clone()))
        });
        json!({
            "title": "outcomes",
            "type": "object",
            "properties": properties.collect::<Map<_, _>>(),
            "patternProperties": {
                "^[2-5]([0-9]{2}|xx)$": shapes::words(answered),
                (shapes::grpc_entry()): shapes::words(answered),
            },
            "additionalProperties": false,
        })
    }
}

/// The shape of a key that has none here yet. Anything goes, and a test fails.
fn unwritten() -> Shape {
    json!({})
}

fn described(mut shape: Shape, what: &str) -> Shape {
    shape["description"] = what.into();
    shape
}

fn with_default(mut shape: Shape, default: Value) -> Shape {
    shape["default"] = default;
    shape
}

/// Takes the defaults out of a shape and of the keys in it.
fn without_defaults(shape: &mut Shape) {
    let Some(shape) = shape.as_object_mut() else { return };
    shape.remove("default");
    for property in shape.get_mut("properties").and_then(Value::as_object_mut).into_iter().flat_map(Map::values_mut) {
        without_defaults(property);
    }
}

#[cfg(test)]
mod tests;
