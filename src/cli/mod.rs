//! The commands.

mod http_client;
pub mod records;

use std::process::ExitCode;

/// Parses the command line and runs what it asks for.
#[must_use]
pub fn main() -> ExitCode {
    ExitCode::SUCCESS
}
