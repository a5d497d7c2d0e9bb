//! `oncegate check`

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use super::{BAD_CONFIGURATION, FileArgs, print};
use crate::config::{self, Flags, Problems, Resolved, Sources};

/// Reads the configuration and reports on it.
pub(super) fn run(args: FileArgs) -> anyhow::Result<ExitCode> {
    let file = args.config.clone();
    let result = config::load(Sources::of_process(args.config, Flags::default()));
    print(&report(file.as_deref(), &result))?;
    Ok(if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(BAD_CONFIGURATION) })
}

/// What `check` prints.
fn report(file: Option<&Path>, result: &Result<Resolved, Problems>) -> String {
    let resolved = match result {
        Ok(resolved) => resolved,
        Err(problems) => return format!("{problems}\n"),
    };
    let name = file.map_or_else(|| "configuration".to_owned(), |file| file.display().to_string());
    let routes = counted(resolved.router.routes().len(), "route");
    let upstreams = counted(resolved.upstreams.len(), "upstream");
    let mut report = format!("{name}: ok ({routes}, {upstreams})\n");
    for advice in &resolved.advice {
        let _ = writeln!(report, "{advice}");
    }
    report
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}
