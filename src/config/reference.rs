//! The reference chapter of the docs, `docs/reference/configuration.md`: every key with its type, its default and its documentation.
//!
//! Only the test that keeps the chapter true builds it.

use serde_json::Value;

use super::declare::{Inner, Key, Section, Shown};
use super::keys::ROOT;
use super::kinds::Shape;

#[test]
fn the_reference_is_made_of_the_declarations() {
    assert_current("docs/reference/configuration.md", &reference());
}

/// Holds that a generated file is what is generated now. With `ONCEGATE_BLESS=1` the file is written instead of compared.
#[track_caller]
pub(crate) fn assert_current(file: &str, generated: &str) {
    if std::env::var_os("ONCEGATE_BLESS").is_some() {
        std::fs::write(file, generated).unwrap();
    } else {
        let written = std::fs::read_to_string(file).unwrap();
        assert_eq!(generated, written, "run with ONCEGATE_BLESS=1 if this is meant");
    }
}

fn reference() -> String {
    let mut text = "# Configuration reference\n\n\
        Every key of the configuration file, which is TOML. `oncegate config default` prints the same as an annotated file, \
        `oncegate config schema` as a JSON Schema for editors, and `oncegate config print` the values in force.\n"
        .to_owned();
    // The first two paragraphs are about the annotated file.
    let after_paragraph = |lines: &'static [&str]| match lines.iter().position(|line| line.is_empty()) {
        Some(blank) => &lines[blank + 1..],
        None => &[],
    };
    text += &prose(after_paragraph(after_paragraph(ROOT.about)));
    for key in ROOT.keys() {
        text += &match (key.facts)().inner {
            Inner::Table(section) => chapter(section, key.doc, key.name, section.keys()),
            Inner::Named(section) => chapter(section, key.doc, &format!("{}.NAME", key.name), section.keys()),
            // Keys of a policy are described where `[defaults]` is.
            Inner::List(section) if section.groups.len() == 1 => chapter(section, key.doc, key.name, section.keys()),
            Inner::List(section) => {
                let note = "\nEvery key of [`[defaults]`](#defaults) can stand here too, and overrides it.\n";
                chapter(section, key.doc, key.name, section.groups[0].iter()) + note
            }
            Inner::None | Inner::Entries(_) => format!("\n## Top level\n{}", entry(key, "")),
        };
    }
    text
}

fn chapter<'a>(section: &Section, about: &[&str], path: &str, keys: impl Iterator<Item = &'a Key>) -> String {
    let entries: String = keys.map(|key| entry(key, path)).collect();
    format!("\n## {}\n{}{entries}", section.name, prose(about))
}

/// A key, and the keys in it.
fn entry(key: &Key, table: &str) -> String {
    let path = if table.is_empty() { key.name.to_owned() } else { format!("{table}.{}", key.name) };
    let facts = (key.facts)();
    let mut terms = vec![type_of(&facts.shape)];
    let default = facts.default.as_ref().map(|default| default.to_string().trim().to_owned());
    match (&key.shown, default) {
        (Shown::Required(example), _) => terms.push(format!("required, such as `{example}`")),
        (Shown::Example(example), _) => terms.push(format!("no fixed default, such as `{example}`")),
        (Shown::DefaultAs(spelled), _) => terms.push(format!("default `{spelled}`")),
        // A table has its defaults key by key.
        (Shown::Default | Shown::DefaultOff, Some(default)) if !default.starts_with('{') => {
            terms.push(format!("default `{default}`"));
        }
        (Shown::Default | Shown::DefaultOff, _) => {}
    }
    let mut text = format!("\n### `{path}`\n\n*{}*\n{}", terms.join("; "), prose(key.doc));
    match facts.inner {
        Inner::Table(section) => text.extend(section.keys().map(|below| entry(below, &path))),
        Inner::Entries(entries) if !entries.is_empty() => {
            text += "\n| entry | default |\n|---|---|\n";
            text.extend(entries.iter().map(|(name, value)| format!("| `{name}` | `{}` |\n", value.to_string().trim())));
        }
        Inner::List(section) => text.extend(section.keys().map(|below| entry(below, &format!("{path}[]")))),
        Inner::None | Inner::Named(_) | Inner::Entries(_) => {}
    }
    text
}

/// What a value looks like, in words.
fn type_of(shape: &Shape) -> String {
    if let Some(words) = shape["enum"].as_array() {
        return words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(" or ");
    }
    let types = match &shape["type"] {
        Value::Array(types) => types.clone(),
        one => vec![one.clone()],
    };
    let pattern = shape["pattern"].as_str().unwrap_or_default();
    let named = types.iter().filter_map(Value::as_str).map(|name| match name {
        "string" if pattern.contains("KiB") => "size".to_owned(),
        "string" if pattern.contains("ms|s|m|h|d") => "duration".to_owned(),
        "integer" if pattern.contains("KiB") => "number of bytes".to_owned(),
        "integer" => match (&shape["minimum"], &shape["maximum"]) {
            (Value::Number(least), Value::Number(most)) => format!("integer from {least} to {most}"),
            _ => "integer".to_owned(),
        },
        "array" => format!("list of {}s", type_of(&shape["items"])),
        "object" => "table".to_owned(),
        name => name.to_owned(),
    });
    named.collect::<Vec<_>>().join(" or ")
}

/// Lines of documentation as Markdown: a blank line ends a paragraph. Text outside backquotes has no markup.
fn prose(lines: &[&str]) -> String {
    let mut text = String::new();
    for paragraph in lines.split(|line| line.trim().is_empty()).filter(|lines| !lines.is_empty()) {
        text.push('\n');
        let (mut is_code, mut is_block) = (false, false);
        for line in paragraph {
            // An example is indented further than text.
            let is_example = line.starts_with("     ");
            if is_example != std::mem::replace(&mut is_block, is_example) {
                text.push_str(if is_example { "\n```toml\n" } else { "```\n\n" });
            }
            if is_example {
                text.push_str(line.trim());
                text.push('\n');
                continue;
            }
            for character in line.trim().chars() {
                is_code ^= character == '`';
                if !is_code && "*<".contains(character) {
                    text.push('\\');
                }
                text.push(character);
            }
            text.push('\n');
        }
        if is_block {
            text.push_str("```\n");
        }
    }
    text
}
