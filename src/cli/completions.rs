//! `oncegate completions`

use std::process::ExitCode;

use clap::{Args, CommandFactory as _, ValueEnum};
use clap_complete::Shell;

use super::{Cli, man, print};

/// Print completions for a shell.
#[derive(Args, Debug)]
pub(super) struct CompletionsArgs {
    /// The shell
    shell: Target,
}

/// What completions are for; `man` gives the manual page, as [`man::run`] does.
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
    let Target::Shell(shell) = args.shell else { return man::run(man::ManArgs::default()) };
    print(&script_for(shell))?;
    Ok(ExitCode::SUCCESS)
}

fn script_for(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "oncegate", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    match shell {
        // It begins a comment there.
        Shell::Fish => script.replace(" -s # ", " -s '#' "),
        _ => script,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_short_option_begins_a_comment_of_fish() {
        let script = script_for(Shell::Fish);
        assert!(script.contains(" -s '#' ") && !script.contains(" -s # "), "{script}");
    }
}
