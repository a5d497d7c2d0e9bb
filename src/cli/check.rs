//! `oncegate check`

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;

use super::{BAD_CONFIGURATION, FileArgs, complain, print};
use crate::config::{self, Flags, Problems, Resolved, Sources};

mod store;

/// Validate the configuration: print every problem with its line.
///
/// With --store, say also whether a start with it would find the keys that are in the store, and what the store risks. The
/// store may be in use, and is only looked at.
#[derive(Args, Debug)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    file: FileArgs,
    /// The configuration file: it counts before --config.
    #[arg(value_name = "FILE")]
    only_file: Option<PathBuf>,
    /// The only upstream, as for `oncegate serve`.
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
    /// The store to ask: sqlite:PATH, postgres://USER@HOST/DATABASE or redis://HOST. Repeat it to name several PostgreSQL
    /// databases that are one store.
    #[arg(long, value_name = "URL")]
    store: Vec<String>,
}

/// Reads the configuration and reports on it, and on what the store holds where one is named.
pub(super) fn run(args: CheckArgs) -> anyhow::Result<ExitCode> {
    let file = args.only_file.or(args.file.config);
    let asks_store = !args.store.is_empty();
    let flags = Flags { upstream: args.upstream, store: args.store, ..Flags::default() };
    let result = config::load(Sources::of_process(file.clone(), flags));
    print(&report(file.as_deref(), &result))?;
    let resolved = match result {
        Ok(resolved) if asks_store => resolved,
        Ok(_) => return Ok(ExitCode::SUCCESS),
        Err(_) => return Ok(ExitCode::from(BAD_CONFIGURATION)),
    };
    match store::ask(&resolved) {
        Ok(found) => {
            print(&found.text)?;
            Ok(if found.is_refused { ExitCode::from(BAD_CONFIGURATION) } else { ExitCode::SUCCESS })
        }
        Err(error) => {
            complain(&format!("oncegate: {}", super::describe(&error)));
            Ok(ExitCode::FAILURE)
        }
    }
}

/// What `check` prints.
fn report(file: Option<&Path>, result: &Result<Resolved, Problems>) -> String {
    let resolved = match result {
        Ok(resolved) => resolved,
        Err(problems) => return format!("{}\n", super::report(problems, file)),
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn check(file: PathBuf) -> String {
        let sources = Sources { file: Some(file.clone()), ..Sources::default() };
        report(Some(&file), &config::load(sources))
    }

    /// Each file of `tests/config-errors` is wrong in its own way, and its report stands beside it. With
    /// `ONCEGATE_BLESS=1` the reports are written instead of compared.
    #[test]
    fn every_wrong_configuration_is_told_apart() {
        // Paths count from the root of the package, where tests run.
        let mut files: Vec<PathBuf> = std::fs::read_dir("tests/config-errors")
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
            .collect();
        files.sort();
        assert!(files.len() >= 15, "{}", files.len());
        let mut wrong = Vec::new();
        for file in files {
            let report = check(file.clone());
            assert!(!report.contains(": ok ("), "{} is not wrong", file.display());
            assert!(!report.contains("s3cret"), "{report}");
            assert!(!report.lines().any(|line| line.trim_start().contains("  ")), "stray spaces:\n{report}");
            let problems: Vec<&str> = report.lines().filter(|line| line.starts_with("tests/")).collect();
            let in_a_line = |line: &&&str| line.split(':').nth(1).is_some_and(|number| number.parse::<u32>().is_ok());
            assert_eq!(problems.iter().filter(in_a_line).count(), problems.len(), "a line each:\n{report}");
            assert_eq!(report.matches("\n    hint: ").count(), problems.len(), "a hint each:\n{report}");
            let golden = file.with_extension("txt");
            if std::env::var_os("ONCEGATE_BLESS").is_some() {
                std::fs::write(&golden, &report).unwrap();
            } else if std::fs::read_to_string(&golden).ok().as_deref() != Some(&report) {
                wrong.push(format!("{}:\n{report}", golden.display()));
            }
        }
        assert!(wrong.is_empty(), "run with ONCEGATE_BLESS=1 if this is meant:\n{}", wrong.join("\n"));
    }

    /// As `oncegate serve --upstream URL` starts without a file.
    #[test]
    fn the_quick_form_can_be_checked() {
        let flags = |upstream: Option<&str>| Flags {
            upstream: upstream.map(str::to_owned),
            store: vec!["sqlite:x.db".to_owned()],
            ..Flags::default()
        };
        let of = |upstream| config::load(Sources { flags: flags(upstream), ..Sources::default() });
        assert!(report(None, &of(None)).contains("or start with --upstream URL"));
        let report = report(None, &of(Some("http://127.0.0.1:3000")));
        assert!(report.starts_with("configuration: ok (1 route, 1 upstream)\n"), "{report}");
    }

    #[test]
    fn a_good_configuration_gets_one_line_and_advice() {
        let report = check("config/examples/gateway.toml".into());
        let mut lines = report.lines();
        assert_eq!(lines.next(), Some("config/examples/gateway.toml: ok (6 routes, 2 upstreams)"));
        assert_eq!(lines.filter(|line| !line.contains(": advice: ")).count(), 0, "{report}");
        assert!(report.contains("with a key or without; a route with path ="), "{report}");
        assert!(!report.contains("  "), "stray spaces: {report}");
        assert!(check("config/examples/sidecar.toml".into()).contains(": ok (1 route, 1 upstream)\n"));
    }
}
