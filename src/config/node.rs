//! Walks the merged values and takes each out as what it should be.

use std::path::Path as FilePath;
use std::time::Duration;

use figment::value::{Dict, Num, Value};
use toml_edit::Item;

use super::context::{Context, Layer, Path};
use super::declare::Section;
use super::keys;
use super::problem::Place;
use super::suggest::nearest;
use super::{unexpanded, units};

/// What is wrong with a value, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    /// What is wrong.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl Wrong {
    /// What is wrong.
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None }
    }

    /// What to do about it.
    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// A value, and where it stands.
#[derive(Clone)]
pub(super) struct Node<'a> {
    pub(super) context: &'a Context,
    pub(super) value: &'a Value,
    pub(super) path: Path,
}

impl<'a> Node<'a> {
    /// Where it came from.
    pub(super) fn place(&self) -> Place {
        self.context.place(self.value, &self.path)
    }

    /// Notes what is wrong with it.
    pub(super) fn report(&self, wrong: Wrong) {
        let wrong = match unexpanded::hint(self) {
            Some(hint) => wrong.hint(hint),
            None => wrong,
        };
        self.context.report(self.place(), &self.path, wrong);
    }

    /// What was read of it; `None` if it is wrong, which is reported.
    pub(super) fn accept<T>(&self, read: Result<T, Wrong>) -> Option<T> {
        read.map_err(|wrong| self.report(wrong)).ok()
    }

    /// Whether it is set by an environment variable.
    fn is_variable(&self) -> bool {
        matches!(self.place(), Place::Environment(_))
    }

    /// Whether it is a table.
    pub(super) fn is_table(&self) -> bool {
        matches!(self.value, Value::Dict(..))
    }

    /// It as text. An environment variable is text as it stands, whatever it looks like.
    pub(super) fn text(&self) -> Result<&'a str, Wrong> {
        if let Value::String(_, text) = self.value {
            return Ok(text);
        }
        let variable = match self.context.layer(self.value) {
            Some(Layer::Environment) => self.context.variables.get(&self.path),
            _ => None,
        };
        match variable {
            Some(variable) => Ok(&variable.raw),
            None => Err(self.expected("text").hint(match self.value {
                Value::Num(..) => "put it in double quotes",
                Value::Array(..) => "write one value, in double quotes",
                _ => "write text, in double quotes",
            })),
        }
    }

    /// It as text that is not empty.
    pub(super) fn filled(&self) -> Result<&'a str, Wrong> {
        match self.text()? {
            text if text.trim().is_empty() => Err(Wrong::new("must not be empty").hint("remove it for the default")),
            text => Ok(text),
        }
    }

    /// It as true or false.
    pub(super) fn flag(&self) -> Result<bool, Wrong> {
        match self.value {
            Value::Bool(_, flag) => Ok(*flag),
            _ => Err(self.expected("true or false").hint("write true or false without quotes")),
        }
    }

    /// It as a whole number that is not negative.
    pub(super) fn number(&self) -> Result<u64, Wrong> {
        let number = self.integer().and_then(|number| u64::try_from(number).ok());
        number.ok_or_else(|| self.expected("a whole number").hint("write a number without quotes, such as 255"))
    }

    fn integer(&self) -> Option<i128> {
        let unsigned = || self.value.to_u128().and_then(|number| i128::try_from(number).ok());
        self.value.to_i128().or_else(unsigned)
    }

    /// It as a number that may have decimal places.
    pub(super) fn decimal(&self) -> Result<f64, Wrong> {
        let number = match self.value {
            Value::Num(_, Num::F64(number)) => Some(*number),
            Value::Num(_, Num::F32(number)) => Some((*number).into()),
            _ => self.integer().map(|number| number as f64),
        };
        number.ok_or_else(|| self.expected("a number").hint("write a number without quotes, such as 0.1"))
    }

    /// It as a duration.
    pub(super) fn duration(&self) -> Result<Duration, Wrong> {
        match self.value {
            Value::Num(..) => match self.integer() {
                Some(number) => Err(units::no_unit(number)),
                None => Err(self.expected("a duration").hint(units::DURATION_HINT)),
            },
            _ => units::duration(self.text().map_err(|_| self.expected("a duration").hint(units::DURATION_HINT))?),
        }
    }

    /// It as a size in bytes; a bare number is bytes.
    pub(super) fn size(&self) -> Result<u64, Wrong> {
        match self.value {
            Value::Num(..) => self.number().map_err(|wrong| wrong.hint(units::SIZE_HINT)),
            _ => units::size(self.text().map_err(|_| self.expected("a size").hint(units::SIZE_HINT))?),
        }
    }

    /// It as one of a few words.
    pub(super) fn word<T: Clone>(&self, words: &[(&str, T)]) -> Result<T, Wrong> {
        let known = || words.iter().map(|(word, _)| *word);
        let choice = known().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(" or ");
        let text = self.text().map_err(|_| self.expected(&choice).hint(format!("write {choice}")))?;
        match words.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => Ok(value.clone()),
            None => {
                let hint = match nearest(text, known()) {
                    Some(word) => format!("did you mean \"{word}\"?"),
                    None => format!("write {choice}"),
                };
                Err(Wrong::new(format!("`{text}` is not a choice here")).hint(hint))
            }
        }
    }

    /// The items of a list; nothing if it is not a list.
    pub(super) fn items(&self) -> Option<Vec<Node<'a>>> {
        let items = self.value.as_array()?.iter().enumerate();
        let node = |(index, value)| Node { context: self.context, value, path: self.path.index(index) };
        Some(items.map(node).collect())
    }

    /// That it should have been something else.
    pub(super) fn expected(&self, what: &str) -> Wrong {
        let found = match self.value {
            Value::String(..) | Value::Char(..) => "text",
            Value::Bool(..) => "true or false",
            Value::Num(_, number) if number.to_i128().is_some_and(|number| number < 0) => "a negative number",
            Value::Num(_, Num::F32(_) | Num::F64(_)) => "a fraction",
            Value::Num(..) => "a number",
            Value::Empty(..) => "nothing",
            Value::Dict(..) => "a table",
            Value::Array(..) => "a list",
        };
        Wrong::new(format!("expected {what}, found {found}"))
    }
}

/// A table whose keys are known.
#[derive(Clone)]
pub(super) struct Table<'a> {
    node: Node<'a>,
    entries: &'a Dict,
    section: &'static Section,
}

static EMPTY: Dict = Dict::new();

impl<'a> Table<'a> {
    /// Reports each key that the section does not know. What is no table at all is reported and taken as empty.
    pub(super) fn open(node: Node<'a>, section: &'static Section) -> Self {
        let entries = match node.value {
            Value::Dict(_, entries) => entries,
            _ => {
                let example = keys::example_variable(&node.path.to_string()).filter(|_| node.is_variable());
                node.report(node.expected("a table").hint(match example {
                    Some(example) => format!("each of its keys has a variable of its own, such as {example}"),
                    None => format!("its keys are {}", listed(section)),
                }));
                &EMPTY
            }
        };
        let table = Self { node, entries, section };
        for (key, node) in table.entries().filter(|_| !section.is_open()) {
            if !section.names().any(|known| known == key) {
                node.report(table.unknown(key, &node));
            }
        }
        table
    }

    /// A table in it; empty where it is absent.
    pub(super) fn table(&self, key: &str, section: &'static Section) -> Self {
        match self.get(key) {
            Some(node) => Self::open(node, section),
            None => Self { node: self.child(key), entries: &EMPTY, section },
        }
    }

    /// A list of tables in it; nothing where it is absent.
    pub(super) fn tables(&self, key: &str, section: &'static Section) -> Option<Vec<Self>> {
        let node = self.get(key)?;
        match node.items() {
            Some(items) => Some(items.into_iter().map(|item| Self::open(item, section)).collect()),
            None => {
                let hint = match node.context.layer(node.value) {
                    Some(Layer::Environment) => "a variable cannot set a part of a list: set it in the file".to_owned(),
                    _ => listed_as(key, &node, section),
                };
                node.report(node.expected("a list of tables").hint(hint));
                Some(Vec::new())
            }
        }
    }

    /// The value of a key.
    pub(super) fn get(&self, key: &str) -> Option<Node<'a>> {
        debug_assert!(self.section.is_open() || self.section.names().any(|known| known == key), "{key}");
        let value = self.entries.get(key)?;
        Some(Node { context: self.node.context, value, path: self.node.path.key(key) })
    }

    /// Reads the file that a key names; `None` if there is none or it is wrong, which is reported.
    pub(super) fn read_file<T>(
        &self,
        key: &str,
        path: Option<&FilePath>,
        read: impl FnOnce(&FilePath) -> Result<T, Wrong>,
    ) -> Option<T> {
        read(path?).map_err(|wrong| self.report(key, wrong)).ok()
    }

    /// Every key and its value.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&'a str, Node<'a>)> {
        let (context, path) = (self.node.context, &self.node.path);
        self.entries.iter().map(move |(key, value)| (key.as_str(), Node { context, value, path: path.key(key) }))
    }

    /// Notes what is wrong with a key, whether it is there or not.
    pub(super) fn report(&self, key: &str, wrong: Wrong) {
        match self.get(key) {
            Some(node) => node.report(wrong),
            None => self.node.context.report(self.node.place(), &self.node.path.key(key), wrong),
        }
    }

    /// Where a key stands, or would be missed.
    pub(super) fn place_of(&self, key: &str) -> Place {
        match (self.get(key), self.node.place()) {
            (Some(node), _) => node.place(),
            // A variable that sets another key of the table has nothing to do with it.
            (None, Place::Environment(_)) => self.node.context.root().place(),
            (None, place) => place,
        }
    }

    /// The same with a line, also where the table is not in the file.
    pub(super) fn place_with_line(&self, key: &str) -> Place {
        self.node.context.with_line(self.place_of(key))
    }

    /// Notes which of these keys are missing, each with a hint; `what` the table is.
    pub(super) fn require(&self, what: &str, keys: &[(&str, &str)]) {
        for (key, hint) in keys.iter().filter(|(key, _)| self.get(key).is_none()) {
            self.report(key, Wrong::new(format!("the {what} has no {key}")).hint(*hint));
        }
    }

    /// Notes what is better known of a key.
    pub(super) fn advise(&self, key: &str, message: String) {
        let place = self.place_of(key);
        self.node.context.advise(place, &self.node.path.key(key), message);
    }

    /// Notes what is in force of a key of the top level.
    pub(super) fn print(&self, key: &'static str, item: Item) {
        self.node.context.printed.borrow_mut().insert(key, item);
    }

    /// The configuration file.
    pub(super) fn file(&self) -> Option<&'a FilePath> {
        self.node.context.file.as_ref().map(|(file, _)| file.as_path())
    }

    /// Where the table stands.
    pub(super) fn place(&self) -> Place {
        self.node.place()
    }

    fn child(&self, key: &str) -> Node<'a> {
        Node { context: self.node.context, value: self.node.value, path: self.node.path.key(key) }
    }

    fn unknown(&self, key: &str, node: &Node<'_>) -> Wrong {
        let wrong = Wrong::new(format!("unknown key in {}", self.section.name));
        let is_variable = node.is_variable();
        if let (true, Some((section, key))) = (is_variable, keys::split_variable(key)) {
            let variable = keys::variable(section, key);
            return wrong.hint(format!("did you mean {variable}, with two underscores between levels?"));
        }
        let variables: Vec<String> = keys::variables(key).filter(|_| is_variable).collect();
        if !variables.is_empty() {
            return wrong.hint(format!("did you mean {}?", variables.join(" or ")));
        }
        // A secret stands in no configuration.
        let file = format!("{key}_file");
        if self.section.names().any(|known| known == file) {
            let variable = keys::variable_at(&format!("{}.{file}", self.node.path)).filter(|_| is_variable);
            return wrong
                .hint(format!("write it to a file, and name that as {}", variable.unwrap_or(format!("`{file}`"))));
        }
        if let Some(near) = nearest(key, self.section.names()) {
            let variable = keys::example_variable(near).filter(|_| is_variable && !node.is_table());
            return wrong.hint(format!("did you mean {}?", variable.unwrap_or(format!("`{near}`"))));
        }
        let homes: Vec<&str> = keys::homes(key).collect();
        // A name that stands in many tables says nothing of what is meant.
        if homes.is_empty() || homes.len() > MANY_HOMES {
            return wrong.hint(format!("the keys here are {}", listed(self.section)));
        }
        let homes = format!("`{key}` is a key of {}", homes.join(" and "));
        // Its name may be another's by chance.
        let is_nested = !self.section.name.starts_with('[') && !self.section.names().any(|known| known == "upstreams");
        let is_small = is_nested || self.section.names().count() <= FEW_KEYS;
        wrong.hint(if is_small { format!("the keys here are {}; {homes}", listed(self.section)) } else { homes })
    }
}

/// In more tables than these, a key's name is no hint.
const MANY_HOMES: usize = 2;

/// So many keys are listed beside the tables that have a key which is none of them.
const FEW_KEYS: usize = 10;

/// How a list of tables is written where one table stands in its place.
fn listed_as(key: &str, node: &Node<'_>, section: &Section) -> String {
    let Value::Dict(_, entries) = node.value else { return format!("write [[{key}]] above each of them") };
    let is_named =
        |(name, value): &(&String, &Value)| value.as_dict().is_some() && section.names().all(|known| known != *name);
    match entries.iter().find(is_named) {
        Some((name, _)) if section.names().any(|known| known == "name") => {
            format!("write [[{key}]] in the place of [{key}.{name}], and name = \"{name}\" below it")
        }
        _ => format!("write [[{key}]] in the place of [{key}], above each of them"),
    }
}

fn listed(section: &Section) -> String {
    match section.name {
        "outcomes" => return "endings of an attempt, as in { \"5xx\" = \"hold\" }".to_owned(),
        _ if section.is_open() => return "names of your choice".to_owned(),
        _ => {}
    }
    section.names().collect::<Vec<_>>().join(", ")
}
