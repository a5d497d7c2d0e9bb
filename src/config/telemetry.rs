//! `[telemetry]`

use std::time::Duration;

use serde_json::json;

use super::declare::Shown::Example;
use super::declare::{Keys as _, keys};
use super::kinds::{Kind, nested, words};
use super::node::{Node, Table, Wrong};
use super::upstreams::encryption::{self, Tls};
use super::upstreams::location::{Endpoint, endpoint};
use crate::http::collector::{DEADLINE, Protocol, Settings};
use crate::http::limits::Limits;
use crate::http::upstream::{self, Sharing};

keys! {
    /// Traces: a span for each protected request, in the OpenTelemetry protocol (OTLP).
    pub(super) struct Telemetry "[telemetry]" {
        /// Where the collector is: http://HOST:PORT, https://HOST:PORT or unix:PATH. If omitted, there are no spans.
        otlp: Option<Endpoint> = None => endpoint().optional(), Example("\"https://collector:4318\"");
        /// What it speaks: "http" for protobuf over HTTP, at /v1/traces, usually on port 4318; "grpc", usually on port 4317.
        protocol: Protocol = Protocol::Http => words(&[("http", Protocol::Http), ("grpc", Protocol::Grpc)]);
        /// How the collector is authenticated, as in `tls` of an upstream.
        tls: Tls = Tls::default() => nested(), Example(r#"{ ca = "/etc/oncegate/ca.pem" }"#);
        /// What fraction of the requests without a trace of their own has a span, from 0 to 1. For the others the sampled flag
        /// of their `traceparent` decides.
        sample: f64 = 0.1 => ratio();
    }
}

/// How many connections there are at most: batches are sent one after the other.
const MAX_CONNECTIONS: u64 = 2;

/// How long a connection to the collector may take to open.
const CONNECT: Duration = Duration::from_secs(2);

/// Reads `[telemetry]`; nothing where there is no collector.
pub(super) fn read(root: &Table<'_>) -> Option<Settings> {
    let table = root.table("telemetry", Telemetry::SECTION);
    let telemetry = Telemetry::read(&table, Telemetry::default());
    root.print("telemetry", telemetry.print_table());
    let Telemetry { otlp, protocol, tls, sample } = telemetry;
    let usual = Telemetry::default();
    let is_encrypted = otlp.as_ref().is_some_and(|(_, is_encrypted)| *is_encrypted);
    if table.get("tls").is_some() && !is_encrypted {
        let useless = Wrong::new("`tls` has no effect: the collector has no https URL");
        table.report("tls", useless.hint("write otlp = \"https://...\", or remove it"));
    }
    if otlp.is_none()
        && let Some((key, _)) = [("protocol", protocol != usual.protocol), ("sample", sample != usual.sample)]
            .into_iter()
            .find(|(_, is_changed)| *is_changed)
    {
        table.advise(key, format!("`{key}` has no effect: no collector gets spans; write otlp = \"http://HOST:4318\""));
    }
    let (place, is_encrypted) = otlp?;
    let tls = match is_encrypted {
        true => Some(encryption::read(&table, "otlp", tls, std::slice::from_ref(&place))?),
        false => None,
    };
    let host = upstream::Settings {
        name: "telemetry".into(),
        places: vec![place],
        tls,
        protocol: match protocol {
            Protocol::Http => upstream::Protocol::Auto,
            Protocol::Grpc => upstream::Protocol::H2,
        },
        timeout: DEADLINE,
        connect_timeout: CONNECT,
        max_connections: MAX_CONNECTIONS,
        max_headers: Limits::default().max_answer_headers(),
        reuse: Sharing::Always,
        client_timeout: DEADLINE,
    };
    Some(Settings { host, protocol, sample })
}

/// A part of a whole.
fn ratio() -> Kind<f64> {
    Kind::new(|| json!({ "type": "number", "minimum": 0, "maximum": 1 }), part, |ratio| (*ratio).into())
}

fn part(node: &Node<'_>) -> Result<f64, Wrong> {
    let ratio = node.decimal()?;
    if (0.0..=1.0).contains(&ratio) {
        return Ok(ratio);
    }
    Err(Wrong::new("must be from 0 to 1").hint("write 0.1 for every tenth trace, or 1 for all"))
}
