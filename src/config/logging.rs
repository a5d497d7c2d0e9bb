//! `[log]`

use tracing_subscriber::EnvFilter;

use super::keys;
use super::node::{Node, Table, Wrong};
use super::suggest::nearest;
use crate::telemetry::logs::{Format, Settings};

/// The words for levels.
pub(super) const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// The words for formats.
pub(super) const FORMATS: [(&str, Format); 2] = [("text", Format::Text), ("json", Format::Json)];

/// Reads `[log]`.
pub(super) fn read(root: &Table<'_>) -> Settings {
    let table = root.table("log", &keys::LOG);
    Settings {
        format: table.read("format", |node| node.word(&FORMATS, &[])).unwrap_or(Format::Text),
        level: table.read("level", level).unwrap_or_else(|| "info".to_owned()),
    }
}

/// A filter takes a bare word that is no level for the name of a module, and would then be silent about the rest.
fn level(node: &Node<'_>) -> Result<String, Wrong> {
    let text = node.filled()?;
    let hint = format!("write one of {}, or a filter such as \"info,oncegate=debug\"", LEVELS.join(", "));
    for directive in text.split(',').map(str::trim) {
        let is_level = LEVELS.iter().any(|level| level.eq_ignore_ascii_case(directive));
        if !is_level && !directive.contains(['=', '[']) {
            let hint = nearest(directive, LEVELS).map_or(hint, |level| format!("did you mean \"{level}\"?"));
            return Err(Wrong::new(format!("`{directive}` is not a log level")).hint(hint));
        }
    }
    match EnvFilter::builder().parse(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(Wrong::new(format!("`{text}` is not a log filter: {error}")).hint(hint)),
    }
}
