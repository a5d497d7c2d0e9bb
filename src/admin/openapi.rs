//! `GET /api/v1/openapi.json`: the API as OpenAPI 3.1, made of its endpoints and of the types of its bodies.

use std::sync::LazyLock;

use http::{Method, StatusCode};
use schemars::JsonSchema;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Map, Value, json};

use super::answer::{Answer, ProblemBody, with_body};
use super::audit::{AuditAction, EntryPage};
use super::bulk::{BulkReport, ChangeAllBody, ResolveAllBody};
use super::deliveries::{Page as DeliveryPage, RetryBody, RouteBody, STATES};
use super::endpoints::{ENDPOINTS, Endpoint, Resource};
use super::forms::{self, pattern};
use super::query::{DEFAULT_LIMIT, MAX_LIMIT};
use super::records::{MAX_REASON, Page};
use super::reload::ReloadReport;
use super::reseal::ResealReport;
use super::resolve::ResolveBody;
use super::stats::Stats;
use super::tokens::Role;
use super::view::RecordView;
use super::wanted::Wanted;
use super::{Observations, RouteList};

const JSON: &str = "application/json";
const PROBLEM: &str = "application/problem+json";

/// What an operation does, takes and gives.
struct Operation {
    /// What a client in code calls it.
    id: &'static str,
    summary: &'static str,
    parameters: Vec<Value>,
    body: Option<Value>,
    /// Each answer that is no problem: status, description and body.
    answers: Vec<(StatusCode, &'static str, Option<Body>)>,
}

/// The media type of a body, and its schema.
type Body = (&'static str, Value);

/// The document.
pub(super) fn answer() -> Answer {
    static DOCUMENT: LazyLock<Vec<u8>> = LazyLock::new(|| {
        // A control character that JSON need not escape, and that readers of YAML refuse.
        document().to_string().replace('\u{7f}', "\\u007f").into_bytes()
    });
    with_body(StatusCode::OK, JSON, DOCUMENT.clone())
}

fn document() -> Value {
    let mut schemas = Schemas::new();
    let problem = schemas.of::<ProblemBody>();
    let mut paths = Map::new();
    for endpoint in ENDPOINTS {
        let mut item = Map::new();
        // HEAD is a GET without its body.
        for (method, role) in endpoint.rights.iter().filter(|(method, _)| method != Method::HEAD) {
            let operation = describe(endpoint.resource, method, &mut schemas);
            item.insert(method.as_str().to_lowercase(), operation.write(endpoint, *role, &problem));
        }
        paths.insert(endpoint.path.to_owned(), item.into());
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "oncegate admin API",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Health, metrics, records, accepted requests and the audit log of an oncegate gate.",
            "license": { "name": env!("CARGO_PKG_LICENSE"), "identifier": env!("CARGO_PKG_LICENSE") },
        },
        "servers": [{ "url": "/" }],
        "paths": paths,
        "components": {
            "schemas": schemas.take(),
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
        },
    })
}

impl Operation {
    /// Something to read.
    fn read(id: &'static str, summary: &'static str, schema: Value) -> Self {
        let answers = vec![(StatusCode::OK, "What there is.", Some((JSON, schema)))];
        Self { id, summary, parameters: Vec::new(), body: None, answers }
    }

    fn with(self, parameters: Vec<Value>) -> Self {
        Self { parameters, ..self }
    }

    fn taking(self, body: Value) -> Self {
        Self { body: Some(body), ..self }
    }

    fn write(mut self, endpoint: &Endpoint, role: Option<Role>, problem: &Value) -> Value {
        if endpoint.path.contains("{id}") {
            let id = record_id();
            let id =
                json!({ "name": "id", "in": "path", "required": true, "schema": id, "description": "A record's id." });
            self.parameters.insert(0, id);
        }
        let mut responses = Map::new();
        for (status, description, body) in self.answers {
            let mut response = json!({ "description": description });
            if let Some((media, schema)) = body {
                response["content"] = json!({ media: { "schema": schema } });
            }
            responses.insert(status.as_str().to_owned(), response);
        }
        let other = json!({ "description": "A problem (RFC 9457).", "content": { PROBLEM: { "schema": problem } } });
        responses.insert("default".to_owned(), other);
        let mut operation = json!({
            "operationId": self.id,
            "summary": self.summary,
            "parameters": self.parameters,
            "responses": responses,
            // Without tokens in the configuration, none is needed.
            "security": match role {
                Some(_) => json!([{ "token": [] }, {}]),
                None => json!([]),
            },
        });
        if let Some(role) = role {
            operation["description"] = format!("Needs a token of the role {}.", role.as_str()).into();
        }
        if let Some(body) = self.body {
            operation["requestBody"] = json!({ "required": true, "content": { JSON: { "schema": body } } });
        }
        operation
    }
}

fn describe(resource: Resource, method: &Method, schemas: &mut Schemas) -> Operation {
    let status = |words: &[&str]| {
        let members = json!({ "status": { "enum": words }, "reason": { "type": "string" } });
        json!({ "type": "object", "required": ["status"], "properties": members })
    };
    match resource {
        Resource::Page(file) => {
            let text = Some((file.media_type(), json!({ "type": "string" })));
            let mut operation = Operation::read(file.operation(), "A file of the admin page.", Value::Null);
            operation.answers = vec![
                (StatusCode::OK, "The file.", text),
                (StatusCode::NOT_MODIFIED, "The file that `If-None-Match` names.", None),
            ];
            operation
        }
        Resource::Livez => Operation::read("livez", "Whether the process lives.", status(&["live"])),
        Resource::Readyz => {
            let store = json!({ "enum": ["optional"] });
            let store = parameter("store", store, "A gate whose store is away is ready, too.");
            let mut operation = Operation::read("readyz", "Whether requests should be sent here.", status(&["ready"]))
                .with(vec![store]);
            let not_ready = Some((JSON, status(&["not-ready"])));
            operation.answers.push((StatusCode::SERVICE_UNAVAILABLE, "It is not ready, and why.", not_ready));
            operation
        }
        Resource::Metrics => {
            let text = Some(("text/plain", json!({ "type": "string" })));
            let answers = vec![(StatusCode::OK, "The Prometheus text format, version 0.0.4.", text)];
            Operation { answers, ..Operation::read("metrics", "Metrics of this process.", Value::Null) }
        }
        Resource::OpenApi => Operation::read("openapi", "This document.", json!({ "type": "object" })),
        Resource::Routes => {
            Operation::read("listRoutes", "The routes that are in force.", schemas.of::<RouteList<'static>>())
        }
        Resource::Stats => Operation::read("stats", "What this gate does now.", schemas.of::<Stats>()),
        Resource::Observed => {
            let summary = "What requests of routes with `mode = \"observe\"` would have got.";
            Operation::read("listObserved", summary, schemas.of::<Observations>())
        }
        Resource::Records => {
            let parameters = Wanted::NAMES.map(filter).into_iter().chain(paging(forms::RECORD_CURSOR));
            Operation::read("listRecords", "Records, newest first.", schemas.of::<Page>()).with(parameters.collect())
        }
        Resource::Record if *method == Method::DELETE => {
            let reason = json!({ "type": "string", "pattern": forms::REASON, "maxLength": MAX_REASON });
            Operation {
                answers: vec![(StatusCode::NO_CONTENT, "The record is gone, and its key is free.", None)],
                parameters: vec![parameter("reason", reason, "Why; for the audit log."), if_match()],
                ..Operation::read(
                    "purgeRecord",
                    "Remove a record: its key is free, and a retry runs again.",
                    Value::Null,
                )
            }
        }
        Resource::Record => {
            let flag = || json!({ "enum": ["true", "false"] });
            let parameters = vec![
                parameter(
                    "answer",
                    flag(),
                    "With the recorded answer itself. Needs the role operator; leaves an audit entry.",
                ),
                parameter(
                    "key",
                    flag(),
                    "With the whole key, if the record keeps it. Needs the role operator; leaves an audit entry.",
                ),
            ];
            Operation::read("showRecord", "One record.", schemas.of::<RecordView>()).with(parameters)
        }
        Resource::Resolve => Operation {
            answers: vec![(StatusCode::NO_CONTENT, "The record is resolved.", None)],
            parameters: vec![if_match()],
            ..Operation::read("resolveRecord", "Say how an attempt ended whose outcome is unknown.", Value::Null)
        }
        .taking(schemas.of_request::<ResolveBody>()),
        Resource::Retry => Operation {
            answers: vec![(StatusCode::NO_CONTENT, "The request is queued.", None)],
            ..Operation::read("retryDelivery", "Deliver an accepted request again that was given up.", Value::Null)
        }
        .taking(schemas.of_request::<RetryBody>()),
        Resource::Deliveries => {
            let state = json!({ "enum": STATES });
            let own = [filter("route"), filter("id"), parameter("state", state, "Where the delivery stands.")];
            let summary = "Accepted requests that are to be delivered, in the order of acceptance.";
            Operation::read("listDeliveries", summary, schemas.of::<DeliveryPage>())
                .with(own.into_iter().chain(paging(forms::CURSOR)).collect())
        }
        Resource::Pause => Operation {
            answers: vec![(StatusCode::NO_CONTENT, "The route is paused.", None)],
            ..Operation::read("pauseDeliveries", "Hold back the deliveries of a route, at every gate.", Value::Null)
        }
        .taking(schemas.of_request::<RouteBody>()),
        Resource::Resume => Operation {
            answers: vec![(StatusCode::NO_CONTENT, "The route delivers.", None)],
            ..Operation::read("resumeDeliveries", "Let the deliveries of a route go again.", Value::Null)
        }
        .taking(schemas.of_request::<RouteBody>()),
        Resource::PurgeAll => {
            let summary = "Remove all records that a filter finds, or count them.";
            let body = schemas.of_request::<ChangeAllBody>();
            Operation::read("purgeRecords", summary, schemas.of::<BulkReport>()).taking(body)
        }
        Resource::ResolveAll => {
            let summary = "Resolve all unknown records that a filter finds, or count them.";
            let body = schemas.of_request::<ResolveAllBody>();
            Operation::read("resolveRecords", summary, schemas.of::<BulkReport>()).taking(body)
        }
        Resource::RetryAll => {
            let summary =
                "Deliver all accepted requests again that a filter finds and that were given up, or count them.";
            // What can be retried is dead, and that is no state of a record.
            let stateless = json!({ "properties": { "filter": { "not": { "required": ["state"] } } } });
            let body = json!({ "allOf": [schemas.of_request::<ChangeAllBody>(), stateless] });
            Operation::read("retryDeliveries", summary, schemas.of::<BulkReport>()).taking(body)
        }
        Resource::Reseal => {
            let after = record_id();
            let after = parameter("after", after, "The `after` of the answer before: go on from there.");
            let summary = "Encrypt records anew with the first key, for a few seconds.";
            Operation::read("resealRecords", summary, schemas.of::<ResealReport>()).with(vec![after]).taking(nothing())
        }
        Resource::Audit => {
            let action = json!({ "enum": AuditAction::ALL.map(AuditAction::as_str) });
            let by = json!({ "type": "string", "pattern": forms::TEXT, "maxLength": 128 });
            let record = record_id();
            let own = [
                parameter("since", pattern(forms::SINCE), "A duration, or a time by RFC 3339."),
                parameter("action", action, "What was done."),
                parameter("record", record, "The record that it was done to."),
                parameter("by", by, "The name of the token."),
            ];
            let parameters = own.into_iter().chain(paging(forms::CURSOR));
            Operation::read("listAudit", "Audit entries, newest first.", schemas.of::<EntryPage>())
                .with(parameters.collect())
        }
        Resource::Reload => {
            let mut operation =
                Operation::read("reload", "Read the configuration again.", schemas.of::<ReloadReport>())
                    .taking(nothing());
            let refused = Some((JSON, schemas.of::<ReloadReport>()));
            let why = "The configuration has problems, or cannot change while the gate serves. Nothing changed.";
            operation.answers.push((StatusCode::UNPROCESSABLE_ENTITY, why, refused));
            operation
        }
    }
}

/// A body that says nothing. Its type is demanded, which no form of a web page can send.
fn nothing() -> Value {
    json!({ "type": "object", "maxProperties": 0 })
}

/// The id of a record.
fn record_id() -> Value {
    pattern(forms::ID)
}

fn parameter(name: &str, schema: Value, description: &str) -> Value {
    json!({ "name": name, "in": "query", "schema": schema, "description": description })
}

fn if_match() -> Value {
    json!({
        "name": "If-Match",
        "in": "header",
        "schema": { "type": "string" },
        "description": "The ETag of the record as it was shown. If it is another by now, nothing is done.",
    })
}

/// A parameter by which records are filtered.
fn filter(name: &str) -> Value {
    let description = match name {
        "state" => "Where the record stands.",
        "route" => "The name of the route that claimed it.",
        "key" => "The whole key. Needs the role operator.",
        "id" => "The beginning of the id.",
        "older_than" => "Claimed longer ago than this duration, such as 90s or 7d.",
        "since" => "Claimed within this duration, or after this time by RFC 3339.",
        _ => "A part of the scope and its value, such as header:X-Tenant=acme. Needs the role operator.",
    };
    parameter(name, forms::member(name), description)
}

fn paging(cursor: &str) -> [Value; 2] {
    let limit = json!({ "type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT });
    [
        parameter("limit", limit, "How many at most."),
        parameter("cursor", pattern(cursor), "The `next` of the page before."),
    ]
}

/// Schemas of answers, which are named, and of requests, which are not.
struct Schemas {
    answers: SchemaGenerator,
    requests: SchemaGenerator,
}

impl Schemas {
    fn new() -> Self {
        let named = SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = "/components/schemas".into();
            settings.meta_schema = None;
        });
        let inline = SchemaSettings::draft2020_12().with(|settings| {
            settings.inline_subschemas = true;
            settings.meta_schema = None;
        });
        Self { answers: named.for_serialize().into_generator(), requests: inline.for_deserialize().into_generator() }
    }

    fn of<T: JsonSchema>(&mut self) -> Value {
        self.answers.subschema_for::<T>().into()
    }

    fn of_request<T: JsonSchema>(&mut self) -> Value {
        self.requests.subschema_for::<T>().into()
    }

    fn take(mut self) -> Map<String, Value> {
        self.answers.take_definitions(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_endpoint_is_described_with_its_methods() {
        let document = document();
        assert_eq!(document["openapi"], "3.1.0");
        let mut ids = std::collections::BTreeSet::new();
        for endpoint in ENDPOINTS {
            let item = document["paths"][endpoint.path].as_object().unwrap();
            let methods: Vec<&str> = item.keys().map(String::as_str).collect();
            let expected = endpoint.rights.iter().map(|(method, _)| method.as_str().to_lowercase());
            let mut expected: Vec<String> = expected.filter(|method| method != "head").collect();
            expected.sort();
            assert_eq!(methods, expected, "{}", endpoint.path);
            for operation in item.values() {
                assert!(ids.insert(operation["operationId"].as_str().unwrap().to_owned()), "{operation}");
                let takes_query =
                    operation["parameters"].as_array().unwrap().iter().any(|parameter| parameter["in"] == "query");
                assert!(endpoint.takes_parameters || !takes_query, "{operation}");
            }
        }
    }

    /// Every reference leads somewhere.
    #[test]
    fn references_can_be_followed() {
        fn follow(document: &Value, within: &Value, found: &mut usize) {
            match within {
                Value::Object(members) => {
                    if let Some(reference) = members.get("$ref").and_then(Value::as_str) {
                        let pointer = reference.strip_prefix('#').unwrap();
                        assert!(document.pointer(pointer).is_some(), "{reference}");
                        *found += 1;
                    }
                    members.values().for_each(|member| follow(document, member, found));
                }
                Value::Array(items) => items.iter().for_each(|item| follow(document, item, found)),
                _ => {}
            }
        }
        let document = document();
        let mut found = 0;
        follow(&document, &document, &mut found);
        assert!(found > 10, "{found}");
    }
}
