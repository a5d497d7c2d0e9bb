//! `oncegate man`

mod facts;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Command, CommandFactory as _};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, roman};

pub(super) use self::facts::Facts;
use super::{Cli, complain, print};

/// Print a manual page, or write the pages of all commands
#[derive(Args, Debug, Default)]
pub(super) struct ManArgs {
    /// The command whose page it is, as `records resolve`; none for the first page
    #[arg(value_name = "COMMAND", conflicts_with = "dir")]
    path: Vec<String>,
    /// Write the pages of all commands into this directory, such as /usr/local/share/man/man1
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Prints a page in roff, or writes them all.
pub(super) fn run(args: ManArgs) -> anyhow::Result<ExitCode> {
    let whole = whole();
    if let Some(dir) = &args.dir {
        let count = write_all(&whole, dir)?;
        print(&format!("{count} pages written to {}\n", dir.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut command = &whole;
    for word in &args.path {
        match command.find_subcommand(word) {
            Some(below) => command = below,
            None => {
                let known: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
                let known = if known.is_empty() { "it has none".to_owned() } else { known.join(", ") };
                complain(&format!("error: `{}` has no command `{word}`: {known}", command.get_name()));
                return Ok(ExitCode::from(super::WRONG_USAGE));
            }
        }
    }
    let mut page = Vec::new();
    write_page(command, &mut page)?;
    print(&String::from_utf8_lossy(&page))?;
    Ok(ExitCode::SUCCESS)
}

/// The command line, in which each command has its own whole name.
pub(super) fn whole() -> Command {
    let mut whole = Cli::command().disable_help_subcommand(true);
    whole.build();
    whole
}

/// A command and all below it, in the order in which the help lists them.
pub(super) fn with_subcommands(command: &Command) -> Vec<&Command> {
    let below = command.get_subcommands().filter(|below| !below.is_hide_set());
    [command].into_iter().chain(below.flat_map(with_subcommands)).collect()
}

/// Writes each command's page to a file of its own, and says how many there are.
fn write_all(whole: &Command, dir: &Path) -> anyhow::Result<usize> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make the directory {}", dir.display()))?;
    let commands = with_subcommands(whole);
    for command in &commands {
        let file = dir.join(Man::new((*command).clone()).get_filename());
        let mut page = Vec::new();
        write_page(command, &mut page)?;
        std::fs::write(&file, page).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(commands.len())
}

/// clap knows the sections up to the commands; `facts` has the rest.
fn write_page(command: &Command, page: &mut dyn Write) -> io::Result<()> {
    let man = Man::new(command.clone()).source(concat!("oncegate ", env!("CARGO_PKG_VERSION")));
    man.render_title(page)?;
    man.render_name_section(page)?;
    man.render_synopsis_section(page)?;
    man.render_description_section(page)?;
    man.render_options_section(page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(page)?;
    }
    if let Some(facts) = Facts::of(command) {
        let mut roff = Roff::new();
        let statuses = facts.statuses().map(|(status, meaning)| (status.to_string(), meaning));
        define(&mut roff, "EXIT STATUS", statuses);
        define(&mut roff, "FILES", owned(facts.files));
        define(&mut roff, "ENVIRONMENT", owned(facts.environment));
        if !facts.examples.is_empty() {
            roff.control("SH", ["EXAMPLES"]);
        }
        for (meaning, line) in facts.examples {
            roff.control("PP", []).text([roman(*meaning)]);
            roff.control("RS", ["4"]).control("nf", []).text([roman(*line)]).control("fi", []).control("RE", []);
        }
        roff.to_writer(page)?;
    }
    match command.get_version() {
        Some(_) => man.render_version_section(page),
        None => Ok(()),
    }
}

fn owned(entries: &'static [(&'static str, &'static str)]) -> impl Iterator<Item = (String, &'static str)> {
    entries.iter().map(|(term, meaning)| ((*term).to_owned(), *meaning))
}

/// A section of terms with their meanings, if there are any.
fn define(roff: &mut Roff, heading: &str, entries: impl Iterator<Item = (String, &'static str)>) {
    for (index, (term, meaning)) in entries.enumerate() {
        if index == 0 {
            roff.control("SH", [heading]);
        }
        let lines: [Vec<Inline>; 2] = [vec![bold(term)], vec![roman(meaning)]];
        roff.control("TP", []);
        for line in lines {
            roff.text(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[test]
    fn every_command_has_its_facts() {
        let whole = whole();
        let commands: Vec<String> = with_subcommands(&whole).into_iter().map(facts::path_of).collect();
        let listed: Vec<&str> = Facts::ALL.iter().map(|facts| facts.command).collect();
        assert_eq!(commands, listed);
    }

    /// FILES and ENVIRONMENT stand only where a file or a variable counts.
    #[test]
    fn every_command_says_how_it_ends_and_has_an_example() {
        for facts in Facts::ALL {
            assert!(facts.statuses().count() > 1 && !facts.examples.is_empty(), "{}", facts.command);
        }
    }

    #[test]
    fn every_example_is_a_command_line_that_works() {
        for (_, line) in Facts::ALL.iter().flat_map(|facts| facts.examples) {
            let command = line.split(['|', '>']).next().unwrap().replace(" ID ", &format!(" {} ", "0".repeat(64)));
            if let Err(error) = Cli::try_parse_from(words(&command)) {
                panic!("{line}: {error}");
            }
        }
    }

    /// The words of a command as a shell reads them, where quotes are single ones.
    fn words(command: &str) -> Vec<String> {
        let mut words = vec![String::new()];
        for (index, part) in command.trim().split('\'').enumerate() {
            // What is quoted stands at odd places.
            let mut pieces = if index % 2 == 1 { vec![part] } else { part.split(' ').collect() }.into_iter();
            words.last_mut().unwrap().push_str(pieces.next().unwrap());
            words.extend(pieces.map(str::to_owned));
        }
        words
    }

    #[test]
    fn a_page_has_the_sections_of_a_manual() {
        let whole = whole();
        let serve = whole.find_subcommand("serve").unwrap();
        let mut page = Vec::new();
        write_page(serve, &mut page).unwrap();
        let page = String::from_utf8(page).unwrap();
        let version = concat!("\"oncegate ", env!("CARGO_PKG_VERSION"), "\"");
        assert!(page.lines().any(|line| line.starts_with(".TH ") && line.contains(version)), "{page}");
        let mut rest = page.as_str();
        for heading in
            ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "\"EXIT STATUS\"", "FILES", "ENVIRONMENT", "EXAMPLES"]
        {
            let heading = format!(".SH {heading}\n");
            rest = rest.split_once(&heading).unwrap_or_else(|| panic!("{heading} is missing or early in\n{page}")).1;
        }
    }

    #[test]
    fn all_pages_are_written_each_under_its_own_name() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("man1");
        let count = write_all(&whole(), &below).unwrap();
        let mut names: Vec<_> = std::fs::read_dir(&below).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names.len(), count);
        assert!(names.contains(&"oncegate.1".into()) && names.contains(&"oncegate-records-resolve.1".into()));
    }
}
