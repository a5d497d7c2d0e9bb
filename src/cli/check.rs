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

    #[test]
    fn a_good_configuration_gets_one_line_and_advice() {
        let report = check("config/examples/gateway.toml".into());
        let mut lines = report.lines();
        assert_eq!(lines.next(), Some("config/examples/gateway.toml: ok (4 routes, 2 upstreams)"));
        assert_eq!(lines.filter(|line| !line.contains(": advice: ")).count(), 0, "{report}");
        assert!(report.contains("with a key or without; a route with path ="), "{report}");
        assert!(!report.contains("  "), "stray spaces: {report}");
        assert!(check("config/examples/sidecar.toml".into()).contains(": ok (1 route, 1 upstream)\n"));
    }
}
