//! What is wrong with a configuration, and where.

use std::fmt;
use std::path::PathBuf;

use crate::telemetry::logs::Format;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A line of a file, counted from 1; nothing where the whole file is meant.
    File(PathBuf, Option<usize>),
    /// An environment variable.
    Environment(String),
    /// A flag, with its dashes.
    Flag(&'static str),
    /// Nowhere: it is missing, and there is no file.
    Nowhere,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Where.
    pub place: Place,
    /// The dotted key; empty where the whole file is meant.
    pub key: String,
    /// What is wrong. Never shows a secret.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// Everything that is wrong with a configuration, by place. Never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    pub(super) found: Vec<Problem>,
    /// How the configuration would have logs written, as far as it can be read.
    pub log_format: Format,
}

/// Something that is accepted, but better known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Advice {
    /// Where.
    pub place: Place,
    /// The dotted key.
    pub key: String,
    /// What to know.
    pub message: String,
}

impl Problems {
    /// Sorts what was found by place, and drops what was said twice.
    #[must_use]
    pub fn new(mut found: Vec<Problem>) -> Self {
        found.sort();
        found.dedup();
        Self { found, log_format: Format::Text }
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.found.len()
    }

    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = &Problem> {
        self.found.iter()
    }
}

impl std::error::Error for Problems {}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.found {
            writeln!(f, "{problem}")?;
        }
        match self.count() {
            1 => f.write_str("1 problem"),
            count => write!(f, "{count} problems"),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_place(f, &self.place, &self.key)?;
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n    hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_place(f, &self.place, &self.key)?;
        write!(f, "advice: {}", self.message)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(file, Some(line)) => write!(f, "{}:{line}", file.display()),
            Self::File(file, None) => write!(f, "{}", file.display()),
            Self::Environment(name) => f.write_str(name),
            Self::Flag(name) => f.write_str(name),
            Self::Nowhere => f.write_str("configuration"),
        }
    }
}

fn write_place(f: &mut fmt::Formatter<'_>, place: &Place, key: &str) -> fmt::Result {
    write!(f, "{place}: ")?;
    if key.is_empty() { Ok(()) } else { write!(f, "{key}: ") }
}
