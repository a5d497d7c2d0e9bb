//! `oncegate completions` and `oncegate man`

use std::process::ExitCode;

use clap::{Args, CommandFactory as _, ValueEnum};
use clap_complete::Shell;

use super::{Cli, complain, print};

/// Print completions for a shell.
#[derive(Args, Debug)]
pub(super) struct CompletionsArgs {
    /// The shell
    shell: Target,
}

/// Print a manual page.
#[derive(Args, Debug)]
pub(super) struct ManArgs {
    /// The command whose page it is, as `records resolve`; none for the first page
    #[arg(value_name = "COMMAND")]
    path: Vec<String>,
}

/// What completions are for; `man` gives the manual page, as [`man`] does.
#[derive(Clone, Copy, Debug)]
enum Target {
    Shell(Shell),
    Man,
}

impl ValueEnum for Target {
    fn value_variants<'a>() -> &'a [Self] {
        const ALL: [Target; 6] = [
            Target::Shell(Shell::Bash),
            Target::Shell(Shell::Elvish),
            Target::Shell(Shell::Fish),
            Target::Shell(Shell::PowerShell),
            Target::Shell(Shell::Zsh),
            Target::Man,
        ];
        &ALL
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        match self {
            Self::Shell(shell) => shell.to_possible_value(),
            Self::Man => Some(clap::builder::PossibleValue::new("man").hide(true)),
        }
    }
}

/// Prints a script for the shell.
pub(super) fn run(args: CompletionsArgs) -> anyhow::Result<ExitCode> {
    let Target::Shell(shell) = args.shell else { return man(ManArgs { path: Vec::new() }) };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "oncegate", &mut script);
    print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints a page in roff.
pub(super) fn man(args: ManArgs) -> anyhow::Result<ExitCode> {
    let mut whole = Cli::command().disable_help_subcommand(true);
    // Gives each command its own whole name.
    whole.build();
    let mut command = &whole;
    for word in &args.path {
        match command.find_subcommand(word) {
            Some(below) => command = below,
            None => {
                let known: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
                let known = if known.is_empty() { "it has none".to_owned() } else { known.join(", ") };
                complain(&format!("error: `{}` has no command `{word}`: {known}", command.get_name()));
                return Ok(ExitCode::from(2));
            }
        }
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    print(&String::from_utf8_lossy(&page))?;
    Ok(ExitCode::SUCCESS)
}
