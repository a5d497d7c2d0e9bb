//! The annotated default configuration as notes on keys.

use std::collections::BTreeMap;

use serde_json::Value;
use toml_edit::{DocumentMut, Item};

use super::super::DEFAULT;

/// What the annotated default says, by dotted key. Of lists of tables, the first counts.
pub(in crate::config) struct Annotated(BTreeMap<String, Noted>);

/// What it says of one key.
#[derive(Debug, Default)]
pub(in crate::config) struct Noted {
    /// The comment above it, in one line; that of the key above where both share it.
    pub comment: String,
    /// The value that stands there; nothing for a table.
    pub value: Option<Value>,
    /// Whether that value is in force: else it stands behind a `#`, as an example.
    pub is_default: bool,
}

impl Annotated {
    /// Reads it.
    pub(in crate::config) fn read() -> Self {
        let mut noted: BTreeMap<String, Noted> = BTreeMap::new();
        for (path, comment) in comments(DEFAULT) {
            noted.insert(path, Noted { comment, ..Noted::default() });
        }
        for (text, is_default) in [(with_examples(), false), (DEFAULT.to_owned(), true)] {
            // It is part of the program, and tests hold that it can be read.
            let document: DocumentMut = text.parse().unwrap_or_default();
            values(document.as_item(), "", &mut |path, value| {
                let noted = noted.entry(path).or_default();
                (noted.value, noted.is_default) = (Some(value), is_default);
            });
        }
        Self(noted)
    }

    /// What it says of a key.
    pub(in crate::config) fn get(&self, path: &str) -> Option<&Noted> {
        self.0.get(path)
    }

    /// The keys whose paths begin so, without that beginning, and their values.
    pub(in crate::config) fn below<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a Value)> {
        self.0.iter().filter_map(move |(path, noted)| Some((path.strip_prefix(prefix)?, noted.value.as_ref()?)))
    }
}

/// The annotated default with its examples: a `#` without a space hides a setting, one with a space starts prose.
pub(in crate::config) fn with_examples() -> String {
    DEFAULT.lines().map(|line| example(line).unwrap_or(line)).collect::<Vec<_>>().join("\n")
}

/// A TOML value in JSON.
pub(in crate::config) fn json(value: &toml_edit::Value) -> Value {
    match value {
        toml_edit::Value::String(text) => text.value().as_str().into(),
        toml_edit::Value::Integer(number) => (*number.value()).into(),
        toml_edit::Value::Float(number) => (*number.value()).into(),
        toml_edit::Value::Boolean(flag) => (*flag.value()).into(),
        toml_edit::Value::Datetime(date) => date.value().to_string().into(),
        toml_edit::Value::Array(items) => items.iter().map(json).collect(),
        toml_edit::Value::InlineTable(table) => {
            table.iter().map(|(key, value)| (key.to_owned(), json(value))).collect()
        }
    }
}

fn example(line: &str) -> Option<&str> {
    line.strip_prefix('#').filter(|setting| !setting.is_empty() && !setting.starts_with(' '))
}

/// The comment above each key and table, by its dotted path.
fn comments(text: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let (mut table, mut comment, mut is_fresh) = (String::new(), String::new(), true);
    for line in text.lines() {
        let setting = example(line).unwrap_or(line);
        if line.trim().is_empty() {
            (comment, is_fresh) = (String::new(), true);
        } else if let Some(prose) = setting.strip_prefix('#') {
            // Behind a setting, another comment begins.
            if !std::mem::replace(&mut is_fresh, true) {
                comment.clear();
            }
            comment.push_str(if comment.is_empty() { "" } else { " " });
            comment.push_str(prose.trim());
        } else if setting.starts_with('[') {
            let name = setting.trim_matches(|char| matches!(char, '[' | ']'));
            found.push((name.to_owned(), std::mem::take(&mut comment)));
            table = format!("{name}.");
        } else if let Some((key, _)) = setting.split_once(" = ") {
            found.push((format!("{table}{}", key.trim_matches('"')), comment.clone()));
            is_fresh = false;
        }
    }
    found
}

fn values(item: &Item, at: &str, note: &mut impl FnMut(String, Value)) {
    let below = |key: &str| if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") };
    match item {
        Item::None => {}
        Item::ArrayOfTables(tables) => {
            if let Some(first) = tables.get(0) {
                first.iter().for_each(|(key, item)| values(item, &below(key), note));
            }
        }
        Item::Table(table) => table.iter().for_each(|(key, item)| values(item, &below(key), note)),
        Item::Value(value) => note(at.to_owned(), json(value)),
    }
}
