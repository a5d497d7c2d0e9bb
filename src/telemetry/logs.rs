//! Logs by `tracing`, to standard error.

use std::fmt;
use std::io::IsTerminal;
use std::panic::PanicHookInfo;

use prometheus::IntCounter;
use serde_json::Value;
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{EnvFilter, reload};

use self::line_writer::{LOST, LineWriter};

mod line_writer;

/// The target of events with a field that holds a JSON array of objects. Where lines are JSON it stands in them as it is.
pub const STRUCTURED: &str = "oncegate::structured";

/// `[log]`
#[derive(Clone, Debug)]
pub struct Settings {
    /// How lines are written.
    pub format: Format,
    /// The filter: a `tracing` filter such as `info` or `oncegate=debug`.
    pub level: String,
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The logs could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `level` is not a filter.
    #[error("`{level}` is not a log level or filter: {source}")]
    Level {
        /// What was given.
        level: String,
        /// The problem.
        source: ParseError,
    },
    /// This process has set up its logs before.
    #[error("the logs are set up already: {0}")]
    Again(#[from] TryInitError),
    /// The filter could not be changed.
    #[error("cannot change the log filter: {0}")]
    Reload(#[from] reload::Error),
}

/// The filter of a running process.
pub struct Filter(Box<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>);

impl Filter {
    /// From now on this is written.
    pub fn set(&self, level: &str) -> Result<(), Error> {
        Ok((self.0)(filter(level)?)?)
    }
}

/// How many lines of this process's log were lost.
pub(super) fn lost_lines() -> IntCounter {
    LOST.clone()
}

/// Sends the logs of this process to standard error, panics included. Colours only on a terminal, and not where the
/// environment variable `NO_COLOR` is set.
pub fn init(settings: &Settings) -> Result<Filter, Error> {
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter(&settings.level)?)
        .with_writer(LineWriter::new(std::io::stderr(), settings.format));
    // A line that cannot be written, as where standard error is a file on a full disk, is lost. To say so there would panic, and
    // a panic that is logged would end the process.
    let lines = lines.log_internal_errors(false);
    let changed = match settings.format {
        Format::Text => {
            let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
            let lines = lines.with_ansi(colours).with_filter_reloading();
            let handle = lines.reload_handle();
            lines.finish().try_init()?;
            Filter(Box::new(move |filter| handle.reload(filter)))
        }
        Format::Json => {
            let lines = lines.json().flatten_event(true).with_span_list(false).map_event_format(Structured);
            let lines = lines.with_filter_reloading();
            let handle = lines.reload_handle();
            lines.finish().try_init()?;
            Filter(Box::new(move |filter| handle.reload(filter)))
        }
    };
    std::panic::set_hook(Box::new(log_panic));
    Ok(changed)
}

/// A format of JSON lines, in which arrays of objects are no strings.
struct Structured<F>(F);

impl<S, N, F> FormatEvent<S, N> for Structured<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, ctx: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        if event.metadata().target() != STRUCTURED {
            return self.0.format_event(ctx, writer, event);
        }
        let mut line = String::new();
        self.0.format_event(ctx, Writer::new(&mut line), event)?;
        writeln!(writer, "{}", unquoted(&line).as_deref().unwrap_or(line.trim_end()))
    }
}

/// A line of JSON with the arrays of objects that its strings hold in their place.
fn unquoted(line: &str) -> Option<String> {
    let Value::Object(mut fields) = serde_json::from_str(line).ok()? else { return None };
    for value in fields.values_mut() {
        if let Some(array) = value.as_str().filter(|text| text.starts_with("[{") || *text == "[]")
            && let Ok(array) = serde_json::from_str(array)
        {
            *value = array;
        }
    }
    Some(Value::Object(fields).to_string())
}

fn filter(level: &str) -> Result<EnvFilter, Error> {
    // A library's message about a new connection is logged elsewhere, and h2 warns once for each connection that misbehaves: they are
    // counted, and clients could fill the log with them. Settings that name the library count more.
    EnvFilter::try_new(format!("async_nats=off,deadpool=error,h2=error,lapin=off,{level}"))
        .map_err(|source| Error::Level { level: level.to_owned(), source })
}

/// A panic is one log line like any other. Its message is written only where it is a literal: one that was put
/// together at run time may quote a key or a body.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let message = panic.payload().downcast_ref::<&'static str>().copied().unwrap_or("(not shown)");
    let location = panic.location().map(ToString::to_string).unwrap_or_default();
    tracing::error!(message, location, "a task panicked; this is a defect of oncegate");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_of_objects_are_not_quoted() {
        let line = r#"{"a":"[{\"b\":[\"c\"]}]","d":"[]","e":"[::1]:80","f":"[{","g":1}"#;
        let expected = r#"{"a":[{"b":["c"]}],"d":[],"e":"[::1]:80","f":"[{","g":1}"#;
        assert_eq!(unquoted(line).as_deref(), Some(expected));
        assert_eq!(unquoted("no JSON"), None);
    }

    #[test]
    fn a_bad_level_is_named() {
        let settings = Settings { format: Format::Text, level: "oncegate=loud".into() };
        let error = init(&settings).err().unwrap();
        assert!(error.to_string().contains("`oncegate=loud`"), "{error}");
    }
}
