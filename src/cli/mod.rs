//! The commands.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand};

use self::http_client::WrongParameter;
use self::paging::Output;
use self::serve::WatchedFile;
use crate::config::{Flags, Problem, Problems, Resolved, Sources, load};
use crate::telemetry::logs::{self, Format};

mod audit;
#[cfg(test)]
mod catalogues;
mod check;
mod completions;
mod config;
mod databases;
mod deliveries;
mod demo;
mod docs;
mod explain;
mod health;
mod http_client;
mod identity_changes;
mod keys;
mod man;
mod migrate;
mod observed;
mod paging;
pub mod records;
#[cfg(test)]
mod reference;
mod reload;
pub mod serve;
mod table;

/// What the process ends with where its configuration is wrong (`EX_CONFIG` of sysexits.h).
const BAD_CONFIGURATION: u8 = 78;

/// The same where its command line is wrong.
const WRONG_USAGE: u8 = 2;

/// A reverse proxy that makes unmodified HTTP services safe to retry.
#[derive(Debug, Parser)]
#[command(name = "oncegate", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the gate.
    Serve(ServeArgs),
    Check(check::CheckArgs),
    /// Show configurations.
    #[command(subcommand)]
    Config(config::Command),
    Explain(explain::ExplainArgs),
    Migrate(migrate::MigrateArgs),
    Records(records::RecordsArgs),
    Deliveries(deliveries::DeliveriesArgs),
    Audit(audit::AuditArgs),
    Observed(observed::ObservedArgs),
    Health(health::HealthArgs),
    Reload(reload::ReloadArgs),
    #[command(subcommand)]
    Keys(keys::Command),
    Completions(completions::CompletionsArgs),
    Docs(docs::DocsArgs),
    Man(man::ManArgs),
    Demo(demo::DemoArgs),
    /// Print the version.
    Version,
}

/// The environment variable that names the configuration file.
const FILE_VARIABLE: &str = "ONCEGATE_CONFIG";

/// Where the configuration file is.
#[derive(Args, Debug)]
struct FileArgs {
    /// The configuration file. If omitted, only environment variables and defaults apply.
    #[arg(short, long, value_name = "FILE", env = FILE_VARIABLE)]
    config: Option<PathBuf>,
}

#[derive(Args, Debug)]
struct ServeArgs {
    #[command(flatten)]
    file: FileArgs,
    /// The service to protect, such as http://127.0.0.1:3000.
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
    /// Where to listen, such as 0.0.0.0:8080, or systemd for inherited sockets.
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// Where the admin listener listens, such as 127.0.0.1:9090, or systemd:NAME for an inherited socket.
    #[arg(long, value_name = "ADDR")]
    admin: Option<String>,
    /// The store: sqlite:PATH, postgres://USER@HOST/DATABASE, redis://HOST or memory:. Repeat it to name several PostgreSQL
    /// databases that are one store.
    #[arg(long, value_name = "URL")]
    store: Vec<String>,
    /// Start although the scope or key rules changed, and forget the live keys that were made by the former ones.
    #[arg(long)]
    accept_identity_change: bool,
    /// Reload when the content of the configuration file changes, within about two seconds.
    #[arg(long, requires = "config")]
    watch: bool,
}

/// Parses the command line and runs what it asks for.
#[must_use]
pub fn main() -> ExitCode {
    let cli = match parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => {
            // Help comes here too. A closed output is no error.
            return match error.print() {
                Err(failure) if !error.use_stderr() && failure.kind() != std::io::ErrorKind::BrokenPipe => {
                    complain(&format!("oncegate: cannot write the output: {failure}"));
                    ExitCode::FAILURE
                }
                _ => ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(WRONG_USAGE)),
            };
        }
    };
    run(cli.command).unwrap_or_else(|error| {
        complain(&format!("oncegate: {}", describe(&error)));
        if error.is::<Problems>() {
            ExitCode::from(BAD_CONFIGURATION)
        } else if error.is::<WrongParameter>() {
            ExitCode::from(WRONG_USAGE)
        } else {
            ExitCode::FAILURE
        }
    })
}

/// Parses a command line. `explain` takes those of curl: a flag of curl that it does not know is to be left out, not passed
/// as a value.
fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let is_explain = args.get(1).is_some_and(|command| command == "explain");
    Cli::try_parse_from(args).map_err(|mut error| {
        if is_explain && error.kind() == ErrorKind::UnknownArgument {
            let tip = "explain does not know it: if it changes nothing about the request, leave it out";
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
        if std::env::var_os(FILE_VARIABLE).is_some_and(|file| file.is_empty()) {
            let tip = format!("{FILE_VARIABLE} is set, and empty: unset it, or let it name the file");
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
        }
        error
    })
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Serve(args) => run_serve(args),
        Command::Check(args) => check::run(args),
        Command::Config(command) => config::run(command),
        Command::Explain(args) => explain::run(args),
        Command::Migrate(args) => migrate::run(args),
        Command::Records(args) => records::run(args),
        Command::Deliveries(args) => deliveries::run(args),
        Command::Audit(args) => audit::run(args),
        Command::Observed(args) => observed::run(args),
        Command::Health(args) => health::run(args),
        Command::Reload(args) => reload::run(args),
        Command::Keys(command) => keys::run(command),
        Command::Completions(args) => completions::run(args),
        Command::Docs(args) => docs::run(args),
        Command::Man(args) => man::run(args),
        Command::Demo(args) => demo::run(args),
        Command::Version => {
            print(concat!("oncegate ", env!("CARGO_PKG_VERSION"), "\n"))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn run_serve(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let flags = Flags { upstream: args.upstream, listen: args.listen, admin: args.admin, store: args.store };
    let watched = args.file.config.clone().filter(|_| args.watch).map(WatchedFile::new);
    let sources = Sources::of_process(args.file.config, flags);
    match load(sources.clone()) {
        Ok(config) => serve::run(config, sources, args.accept_identity_change, watched),
        Err(problems) => {
            match problems.log_format {
                Format::Text => complain(&report(&problems, sources.file.as_deref())),
                Format::Json => log(&problems)?,
            }
            Ok(ExitCode::from(BAD_CONFIGURATION))
        }
    }
}

/// The configuration of this process; or, once its problems are printed, the exit code.
fn configured(sources: Sources) -> Result<Resolved, ExitCode> {
    let file = sources.file.clone();
    load(sources).map_err(|problems| {
        complain(&report(&problems, file.as_deref()));
        ExitCode::from(BAD_CONFIGURATION)
    })
}

/// The problems of a configuration, read from `file` if that was named.
fn report(problems: &Problems, file: Option<&Path>) -> String {
    // It has the name that the book gives it, and no flag or variable names it.
    let unread = Path::new("oncegate.toml");
    match file.is_none() && unread.exists() {
        true => {
            format!("{problems}\n    hint: oncegate.toml is not read by itself: did you mean --config oncegate.toml?")
        }
        false => problems.to_string(),
    }
}

/// Writes the problems of a configuration as lines of JSON, as the gate would have written its logs.
fn log(problems: &Problems) -> anyhow::Result<()> {
    logs::init(&logs::Settings { format: Format::Json, level: "error".to_owned() })?;
    for Problem { place, key, message, hint } in problems.iter() {
        tracing::error!(%place, key, problem = message, hint, "the configuration is wrong: the gate does not start");
    }
    Ok(())
}

/// Writes what a command was asked for to standard output. A reader that went away wanted no more.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = Output::stdout();
    let written = out.write_all(text.as_bytes());
    paging::finish(written.map_err(Into::into), &mut out)
}

/// Runs the future of a command. A lookup of a name that goes on after it is not waited for.
fn block_on<T>(future: impl Future<Output = T>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("the runtime cannot be started")?;
    let output = runtime.block_on(future);
    runtime.shutdown_background();
    Ok(output)
}

/// An error and its causes, each once: the message of many an error ends with its cause.
fn describe(error: &anyhow::Error) -> String {
    let mut description = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if description.is_empty() {
            description = cause;
        } else if !description.contains(&cause) {
            description = format!("{description}: {cause}");
        }
    }
    description
}

/// Writes a line to standard error. A closed one is no error.
fn complain(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    /// The options of a command are not lost among those that say how to reach the gate.
    #[test]
    fn how_to_reach_the_gate_is_a_list_of_its_own() {
        let help = Cli::try_parse_from(["oncegate", "records", "list", "--help"]).unwrap_err().to_string();
        let (own, admin) = help.split_once("\nAdmin listener:\n").unwrap();
        assert!(own.contains("--state ") && !own.contains("--admin"), "{help}");
        assert!(admin.contains("--config ") && admin.contains("--admin-ca ") && !admin.contains("--state "), "{help}");
    }

    #[test]
    fn a_cause_is_described_once() {
        let cause = anyhow::anyhow!("no such file");
        assert_eq!(
            describe(&cause.context("cannot read x: no such file").context("start")),
            "start: cannot read x: no such file"
        );
        assert_eq!(describe(&anyhow::anyhow!("b").context("a")), "a: b");
    }

    #[test]
    fn a_flag_that_explain_does_not_know_is_no_value() {
        let of = |line: &str| parse(line.split(' ').map(OsString::from)).unwrap_err().to_string();
        let said = of("oncegate explain --speed-limit 9 http://a/x");
        assert!(
            said.contains("'--speed-limit'") && said.contains("leave it out") && !said.contains("as a value"),
            "{said}"
        );
        assert!(of("oncegate records show --speed").contains("unexpected argument '--speed'"));
    }

    #[test]
    fn wrong_usage_is_2_and_help_is_0() {
        for (args, status) in [
            (vec!["oncegate"], 2),
            (vec!["oncegate", "frobnicate"], 2),
            (vec!["oncegate", "serve", "--no-such-flag"], 2),
            (vec!["oncegate", "--version"], 0),
            (vec!["oncegate", "serve", "--help"], 0),
        ] {
            let error = Cli::try_parse_from(&args).unwrap_err();
            assert_eq!(error.exit_code(), status, "{args:?}");
        }
    }
}
