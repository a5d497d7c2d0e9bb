//! The annotated default file: every key with its documentation and its default.

use super::declare::{Inner, Key, Section, Shown};
use super::keys::ROOT;

/// What stands below the example of a route.
const OF_A_POLICY: &str = "\
# Every key of [defaults] can stand here too, and overrides it.
#ttl = \"7d\"
#key = { required = true }
#in_flight = { wait = \"10s\" }
#recovery = { probe = \"/v1/charges/by-key/{key}\" }
#outcomes = { \"429\" = \"store\", \"5xx\" = \"hold\" }
";

/// The annotated default file.
#[must_use]
pub fn annotated() -> String {
    let mut text = comment(ROOT.about);
    for key in ROOT.keys() {
        let (about, name) = (comment(key.doc), key.name);
        text += &match (key.facts)().inner {
            Inner::None | Inner::Entries(_) => format!("\n{}", paragraph(key, "")),
            Inner::Table(section) => format!("\n\n{about}[{name}]\n{}", body(name, section)),
            Inner::Named(section) => format!("\n\n{about}#[{name}.app]\n{}", examples(section)),
            Inner::List(section) => {
                // A route has more keys than its own.
                let more = if section.groups.len() > 1 { OF_A_POLICY } else { "" };
                format!("\n\n{about}#[[{name}]]\n{}{more}", examples(section))
            }
        };
    }
    text
}

/// The keys of a table of the top level.
fn body(table: &str, section: &Section) -> String {
    let (mut paragraphs, mut tables) = (Vec::new(), String::new());
    for key in section.keys() {
        let facts = (key.facts)();
        let has_value = facts.default.is_some_and(|default| !default.is_inline_table());
        match facts.inner {
            Inner::Entries(entries) => {
                let is_bare = |entry: &str| entry.bytes().all(|byte| byte.is_ascii_alphabetic());
                let name = |entry: String| if is_bare(&entry) { entry } else { format!("{entry:?}") };
                let lines = entries.into_iter().map(|(entry, value)| format!("#{} = {value}\n", name(entry)));
                let lines: String = lines.collect();
                tables += &format!("\n{}[{table}.{}]\n{lines}", comment(key.doc), key.name);
            }
            Inner::Table(inner) if !has_value && matches!(key.shown, Shown::Default) => {
                let prefix = format!("{}.", key.name);
                paragraphs.extend(inner.keys().map(|below| paragraph(below, &prefix)));
            }
            _ => paragraphs.push(paragraph(key, "")),
        }
    }
    paragraphs.join("\n") + &tables
}

/// The keys of a table that is there as an example. Keys that it shares with another table are left to that.
fn examples(section: &Section) -> String {
    let lines: String = section.groups[0].iter().map(|key| paragraph(key, "")).collect();
    lines.lines().map(|line| if line.starts_with('#') { format!("{line}\n") } else { format!("#{line}\n") }).collect()
}

/// A key and its documentation. A `#` without a space comments out a setting.
fn paragraph(key: &Key, prefix: &str) -> String {
    let default = || (key.facts)().default.map(|default| default.to_string()).unwrap_or_default();
    let (off, value) = match key.shown {
        Shown::Default => ("", default()),
        Shown::DefaultAs(value) => ("", value.to_owned()),
        Shown::DefaultOff => ("#", default()),
        Shown::Example(value) | Shown::Required(value) => ("#", value.to_owned()),
    };
    format!("{}{off}{prefix}{} = {value}\n", comment(key.doc), key.name)
}

fn comment(lines: &[&str]) -> String {
    lines.iter().map(|line| format!("#{line}\n")).collect()
}
