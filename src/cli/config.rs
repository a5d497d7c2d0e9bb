//! `oncegate config`

use std::process::ExitCode;

use clap::Subcommand;

use super::{FileArgs, configured, print};
use crate::config::{self, Flags, Sources};

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Print the annotated default configuration.
    Default,
    /// Print a JSON Schema of the configuration file, for editors.
    Schema,
    /// Print the effective configuration: file, environment and defaults, without the content of secrets.
    Print(FileArgs),
}

/// Prints what was asked for.
pub(super) fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Default => print(&config::annotated())?,
        Command::Schema => print(&format!("{:#}\n", config::schema()))?,
        Command::Print(args) => match configured(Sources::of_process(args.config, Flags::default())) {
            Ok(resolved) => print(&resolved.effective.to_string())?,
            Err(status) => return Ok(status),
        },
    }
    Ok(ExitCode::SUCCESS)
}
