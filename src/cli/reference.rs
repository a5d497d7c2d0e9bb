//! The chapter `docs/reference/command-line.md`: every command with its options and its exit statuses.
//!
//! Only the test that keeps the chapter true builds it.

use std::fmt::Write as _;

use clap::{Arg, Command};

use super::man::{Facts, whole, with_subcommands};
use crate::config::reference::assert_current;

#[test]
fn the_reference_is_made_of_the_command_line() {
    assert_current("docs/reference/command-line.md", &reference());
}

fn reference() -> String {
    let mut text = "# Command line\n\n\
        This page lists every command of `oncegate` with its arguments, its options and its exit statuses. `oncegate COMMAND \
        --help` prints the same, and `oncegate man --dir DIR` writes it as manual pages. [Exit statuses](exit-codes.md) says \
        what the numbers have in common.\n\n\
        A flag overrides an environment variable, a variable overrides the configuration file, and the file overrides the \
        defaults. [Configuration](configuration.md) lists the keys.\n"
        .to_owned();
    let whole = whole();
    for command in with_subcommands(&whole) {
        text += &chapter(command);
    }
    text
}

fn chapter(command: &Command) -> String {
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    let mut text = format!("\n## {name}\n");
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    for paragraph in about.split("\n\n") {
        let _ = write!(text, "\n{}\n", as_sentence(&escaped(paragraph.trim())));
    }
    let usage = command.clone().render_usage().to_string();
    let _ = write!(text, "\n```text\n{}\n```\n", usage.trim_start_matches("Usage: "));
    text += &table(
        "| command | what it does |",
        command.get_subcommands().filter(|below| !below.is_hide_set()).map(|below| {
            let full = below.get_bin_name().unwrap_or_else(|| below.get_name());
            let about = below.get_about().map(ToString::to_string).unwrap_or_default();
            vec![format!("[`{full}`](#{})", full.replace(' ', "-")), escaped(&about)]
        }),
    );
    let shown = |arg: &&Arg| !arg.is_hide_set() && arg.get_id() != "help" && arg.get_id() != "version";
    text += &table(
        "| argument or option | meaning | default | environment |",
        command.get_arguments().filter(shown).map(row),
    );
    let facts = Facts::of(command).unwrap_or_else(|| panic!("{name} has no facts"));
    let statuses = facts.statuses().map(|(status, meaning)| vec![format!("`{status}`"), meaning.to_owned()]);
    text += &table("| exit status | meaning |", statuses);
    for (meaning, line) in facts.examples {
        let _ = write!(text, "\n{}: `{line}`\n", meaning.trim_end_matches(['.', ':']));
    }
    text
}

fn row(arg: &Arg) -> Vec<String> {
    let value = arg.get_value_names().unwrap_or_default().join(" ");
    let long = arg.get_long().map(|long| format!("--{long}"));
    let short = arg.get_short().map(|short| format!("-{short}"));
    let mut spelled: Vec<String> = short.into_iter().chain(long).collect();
    let takes_value = arg.get_action().takes_values();
    match spelled.last_mut() {
        Some(last) if takes_value => *last = format!("{last} {value}"),
        Some(_) => {}
        None => spelled.push(value),
    }
    // A bar ends a cell, in code too.
    let spelled: Vec<String> =
        spelled.into_iter().map(|spelling| format!("`{}`", spelling.replace('|', "\\|"))).collect();
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut meaning = escaped(&help.replace('\n', " "));
    let words: Vec<String> = arg
        .get_possible_values()
        .iter()
        .filter(|word| !word.is_hide_set())
        .map(|word| format!("`{}`", word.get_name()))
        .collect();
    if takes_value && !words.is_empty() {
        let _ = write!(meaning, "; one of {}", words.join(", "));
    }
    if arg.is_required_set() {
        meaning.push_str("; required");
    }
    let defaults = if takes_value { arg.get_default_values() } else { &[] };
    let defaults: Vec<String> = defaults.iter().map(|value| format!("`{}`", value.to_string_lossy())).collect();
    let variable = arg.get_env().map(|name| format!("`{}`", name.to_string_lossy())).unwrap_or_default();
    vec![spelled.join(", "), as_sentence(&meaning), defaults.join(", "), variable]
}

/// A table, if it has rows. Columns in which no row has anything are left out.
fn table(head: &str, rows: impl Iterator<Item = Vec<String>>) -> String {
    let rows: Vec<Vec<String>> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    let names: Vec<&str> = head.trim_matches(['|', ' ']).split(" | ").collect();
    let used: Vec<usize> = (0..names.len()).filter(|column| rows.iter().any(|row| !row[*column].is_empty())).collect();
    let line = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
    let mut text = format!("\n{}|{}\n", line(used.iter().map(|at| names[*at]).collect()), "---|".repeat(used.len()));
    for row in &rows {
        text += &line(used.iter().map(|at| row[*at].as_str()).collect());
    }
    text
}

/// clap takes the stop from the end of a text.
fn as_sentence(text: &str) -> String {
    if text.is_empty() || text.ends_with(['.', ':']) { text.to_owned() } else { format!("{text}.") }
}

/// Text without markup, but for backticks.
fn escaped(text: &str) -> String {
    let (mut is_code, mut escaped) = (false, String::new());
    for character in text.chars() {
        is_code ^= character == '`';
        if character == '|' || !is_code && "*<_".contains(character) {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}
