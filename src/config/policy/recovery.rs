//! `recovery` of a policy: a word, or a table that says how to find out.

use std::path::Path;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use serde_json::json;
use toml_edit::InlineTable;

use super::hinted;
use crate::config::declare::Shown::Example;
use crate::config::declare::{Inner, Keys as _, Section, keys};
use crate::config::headers::TOKEN;
use crate::config::kinds::{Kind, Toml, nested, nonzero_time, number, text, time, time_of};
use crate::config::node::{Node, Table, Wrong};
use crate::config::secrets;
use crate::config::suggest::nearest;
use crate::idempotency::recovery::{Probe, ProbeHeader, ProbePath, Recovery, Resend};

keys! {
    /// `resend` of `recovery`
    pub(in crate::config) struct ResendKeys "resend" {
        /// How often the request is sent at most, the first time included.
        attempts: u32 = 5 => number(2..=100);
        /// The pause before it is sent for the second time, at most "60s". Each pause after that is twice as long, up to 1 min.
        backoff: Duration = Duration::from_secs(1) => time_of(Duration::from_millis(1)..=Resend::LONGEST_PAUSE);
    }
}

keys! {
    /// `recovery`, where it is a table.
    pub(in crate::config) struct ProbeKeys "recovery" {
        /// The path that the upstream is asked for, with GET. {key} is the key, percent-encoded; {id} the record's id. The gate
        /// checks it against a request that succeeded: if that is not found, 404 and 410 let nothing run again.
        probe: Option<ProbePath> = None => text(r"^/[^\s#]*\{(key|id)\}[^\s#]*$", path).optional(), Example("\"/v1/charges/by-key/{key}\"");
        /// How long an outcome must have been unknown before the upstream is asked. It must exceed the time that the upstream
        /// may take for a request, or an attempt that is still under way counts as one that never came. By default, the
        /// upstream's timeout.
        after: Option<Duration> = None => time().optional(), Example("\"60s\"");
        /// How often oncegate itself asks about records whose clients do not come back. The keys of requests are then kept in
        /// their records. 404 and 410 release such a record.
        every: Option<Duration> = None => nonzero_time().optional(), Example("\"5m\"");
        /// What oncegate then sends instead of a client's headers; "file:PATH" reads a value from a file.
        headers: Vec<ProbeHeader> = Vec::new() => headers(), Example("{ Authorization = \"file:/run/secrets/books\" }");
        /// Instead of a probe, for an upstream that honours the key itself: a request whose outcome is unknown is sent again, with
        /// the same key, while its client waits. After the last attempt the outcome is unknown.
        resend: Option<ResendKeys> = None => nested::<ResendKeys>().optional(), Example("{ attempts = 5, backoff = \"1s\" }");
    }
}

/// A word, or a table.
pub(super) fn recovery() -> Kind<Recovery> {
    let shape = || {
        let mut shape = ProbeKeys::SECTION.shape();
        shape["type"] = json!(["string", "object"]);
        shape["pattern"] = "^(hold|retry)$".into();
        // One of the two, where it is a table.
        shape["if"] = json!({ "type": "object" });
        shape["then"] = json!({ "oneOf": [{ "required": ["probe"] }, { "required": ["resend"] }] });
        let of_probe = json!({ "properties": { "after": false, "every": false, "headers": false } });
        // Without entries, `headers` asks for nothing, and `config print` writes it so.
        let of_every =
            json!({ "anyOf": [{ "required": ["every"] }, { "properties": { "headers": { "maxProperties": 0 } } }] });
        shape["dependencies"] = json!({ "headers": of_every, "resend": of_probe });
        shape
    };
    let print = |value: &Recovery| match value {
        Recovery::Hold => "hold".into(),
        Recovery::Retry => "retry".into(),
        Recovery::Probe(Probe { path, after, every, headers }) => {
            let (probe, headers) = (Some(path.clone()), headers.clone());
            ProbeKeys { probe, after: *after, every: *every, headers, resend: None }.print_inline().into()
        }
        Recovery::Resend(Resend { attempts, backoff }) => {
            let resend = ResendKeys { attempts: *attempts, backoff: *backoff }.print_inline();
            InlineTable::from_iter([("resend", Toml::from(resend))]).into()
        }
    };
    Kind::new(shape, word, print).with_inner(|| Inner::Table(ProbeKeys::SECTION)).merged(|node, base| {
        let read = if node.is_table() { table(node) } else { node.accept(word(node)) };
        read.unwrap_or(base)
    })
}

fn word(node: &Node<'_>) -> Result<Recovery, Wrong> {
    let words = [("hold", Recovery::Hold), ("retry", Recovery::Retry)];
    let word = match node.text() {
        Ok(_) => node.word(&words),
        Err(_) => Err(node.expected("\"hold\", \"retry\" or a table")),
    };
    word.map_err(|wrong| {
        wrong.hint(match node.text() {
            Ok("probe") => "write { probe = \"/v1/charges/by-key/{key}\" }, with a path of yours",
            Ok("resend") => "write { resend = {} }",
            Ok(text) if nearest(text, ["hold"]).is_some() => "did you mean \"hold\"?",
            Ok(text) if nearest(text, ["retry"]).is_some() => "did you mean \"retry\"?",
            _ => "write \"hold\", \"retry\", { probe = \"/v1/charges/by-key/{key}\" } with a path of yours, or { resend = {} }",
        })
    })
}

fn table(node: &Node<'_>) -> Option<Recovery> {
    let table = Table::open(node.clone(), ProbeKeys::SECTION);
    let ProbeKeys { probe, after, every, headers, resend } = ProbeKeys::read(&table, ProbeKeys::default());
    match (table.get("probe").is_some(), table.get("resend").is_some()) {
        (true, true) => {
            let hint = "keep `resend` if the upstream itself runs a key once, and `probe` if it does not";
            table.report("resend", Wrong::new("does not go together with `probe`").hint(hint));
        }
        (false, false) => {
            let hint =
                "write { probe = \"/v1/charges/by-key/{key}\" }, with a path of yours, { resend = {} }, or \"hold\"";
            table.report("probe", Wrong::new("is missing").hint(hint));
        }
        (false, true) => {
            for key in ["after", "every", "headers"].into_iter().filter(|key| table.get(key).is_some()) {
                table.report(key, Wrong::new("goes with `probe`, and not with `resend`").hint("remove it"));
            }
            return resend.map(|ResendKeys { attempts, backoff }| Recovery::Resend(Resend { attempts, backoff }));
        }
        (true, false) => {}
    }
    if every.is_none() && !headers.is_empty() {
        let wrong = Wrong::new("is missing, and without it nothing sends `headers`: retries bring their own");
        table.report("every", wrong.hint("add every = \"5m\", or remove headers"));
    }
    Some(Recovery::Probe(Probe { path: probe?, after, every, headers }))
}

fn path(node: &Node<'_>) -> Result<ProbePath, Wrong> {
    let text = node.filled()?;
    ProbePath::parse(text).map_err(|message| hinted(&message, "write a path such as \"/v1/charges/by-key/{key}\""))
}

const HEADERS: &Section = &Section { name: "recovery.headers", about: &[], groups: &[] };

/// A table of headers.
fn headers() -> Kind<Vec<ProbeHeader>> {
    let shape = || {
        json!({
            "title": HEADERS.name,
            "type": "object",
            "patternProperties": { (format!("^{TOKEN}$")): { "type": "string" } },
            "additionalProperties": false,
        })
    };
    let print = |headers: &Vec<ProbeHeader>| {
        let entries = headers.iter().map(|header| (header.name.as_str().to_owned(), header.source.as_str()));
        Toml::InlineTable(entries.collect())
    };
    Kind::new(shape, |node| Ok(entries(node)), print).with_inner(|| Inner::Entries(Vec::new()))
}

fn entries(node: &Node<'_>) -> Vec<ProbeHeader> {
    let table = Table::open(node.clone(), HEADERS);
    let headers = table.entries().filter_map(|(name, node)| {
        let read = header(name, &node);
        node.accept(read)
    });
    headers.collect()
}

fn header(name: &str, node: &Node<'_>) -> Result<ProbeHeader, Wrong> {
    let text = node.filled()?;
    let hint = "write a value, or \"file:\" and the path of a file that holds it";
    let Ok(name) = HeaderName::from_bytes(name.as_bytes()) else {
        return Err(Wrong::new(format!("`{name}` is not a header name")).hint("such as Authorization"));
    };
    if matches!(name.as_str(), "connection" | "content-length" | "transfer-encoding" | "te" | "upgrade") {
        return Err(Wrong::new(format!("oncegate sets `{name}` itself")).hint("remove it"));
    }
    let (content, source) = match text.strip_prefix("file:") {
        Some(path) => (secrets::read(Path::new(path))?, text.to_owned()),
        // It may be a secret, which nothing prints.
        None => (text.as_bytes().to_vec(), "***".to_owned()),
    };
    if content.is_empty() {
        return Err(Wrong::new("the file is empty").hint(hint));
    }
    match HeaderValue::from_bytes(&content) {
        Ok(mut value) => {
            value.set_sensitive(true);
            Ok(ProbeHeader { name, value, source })
        }
        Err(_) => Err(Wrong::new("this cannot be the value of a header").hint(hint)),
    }
}
