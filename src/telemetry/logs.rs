//! Logs by `tracing`.

/// `[log]`
#[derive(Clone, Debug)]
pub struct Settings {
    /// How lines are written.
    pub format: Format,
    /// What is written: a `tracing` filter such as `info` or `oncegate=debug`.
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
