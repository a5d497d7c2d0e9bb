//! `[log]`

use tracing_subscriber::EnvFilter;

use super::declare::{Keys as _, keys};
use super::kinds::{text, words};
use super::node::{Node, Table, Wrong};
use super::suggest::nearest;
use crate::telemetry::logs::{Format, Settings};

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

keys! {
    /// Logs go to standard error.
    pub(super) struct Log "[log]" {
        /// "text" for people, "json" for machines.
        format: Format = Format::Text => words(&[("text", Format::Text), ("json", Format::Json)]);
        /// off, error, warn, info, debug, trace, or a filter such as "info,oncegate=debug". Of some libraries, such as h2, lines come only
        /// where the filter names them: "debug,h2=debug".
        level: String = "info".to_owned() => text(pattern(), level);
    }
}

/// Reads `[log]`.
pub(super) fn read(root: &Table<'_>) -> Settings {
    let log = Log::read(&root.table("log", Log::SECTION), Log::default());
    root.print("log", log.print_table());
    Settings { format: log.format, level: log.level }
}

/// Directives that are levels, in any case, or have a `=` or a `[`.
fn pattern() -> String {
    let any_case = |char: char| format!("[{}{char}]", char.to_ascii_uppercase());
    let levels = LEVELS.map(|level| level.chars().map(any_case).collect::<String>()).join("|");
    let directive = format!(r"\s*({levels}|[^,]*[=\[][^,]*)\s*");
    format!("^{directive}(,{directive})*$")
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
